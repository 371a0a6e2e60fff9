"""tools/outgrow.py --to verl: verl's own classes read what it writes, and find what the run has.

  pip install omegaconf tensordict && pip install --no-deps verl==0.9.1

verl runs here without Ray and vLLM: modules stand in for those that import them.
"""

import asyncio
import copy
import dataclasses
import functools
import importlib
import importlib.util
import json
import re
import shlex
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from small import byte_tokenizer, save_model, small_llama

import grpo
import ppo
import rloo
from common import Rollout
from plumbing.config import parse_flags
from plumbing.data import Task
from plumbing.errors import InputError
from plumbing.extras import overlong_penalty
from plumbing.loading import TINY, load_tokenizer
from plumbing.prompts import prompt_batch
from plumbing.scoring import prompt_tokens, score_texts
from tasks import add_prompts
from tools import outgrow, outgrow_verl

MISSING = [
    name
    for name in ("verl", "omegaconf", "tensordict", "pyarrow", "datasets")
    if importlib.util.find_spec(name) is None
]
if MISSING:
    pytest.skip(f"{MISSING} not there: see the head of this file", allow_module_level=True)
datasets, omegaconf = map(importlib.import_module, ("datasets", "omegaconf"))
OmegaConf, DictConfig = omegaconf.OmegaConf, omegaconf.DictConfig

SCRIPTS = {"ppo": ppo, "grpo": grpo, "rloo": rloo}
DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "evidence" / "outgrow.md").read_text(encoding="utf-8")
VERL = Path(importlib.util.find_spec("verl").origin).parent
ACTOR, ROLLOUT = outgrow_verl.ACTOR, outgrow_verl.ROLLOUT
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}<assistant>"
REWARDS = """
def has_answer(completions, answer, **columns):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [None if a is None else float(str(a) in t) for a, t in zip(answer, texts)]
def length(prompts, completions):
    assert isinstance(prompts[0], str) == isinstance(completions[0], str)
    return [float(len(c if isinstance(c, str) else c[-1]["content"])) for c in completions]
def none(completions, **columns):
    return [None] * len(completions)
def by_ids(completion_ids, **columns):
    return [0.0] * len(completion_ids)
"""


@pytest.fixture(scope="module")
def verl() -> Iterator[Callable[[str], types.ModuleType]]:
    """Imports a module of the installed verl."""

    def package(name: str) -> types.ModuleType:
        """The package without its __init__, which imports everything."""
        module = types.ModuleType(name)
        module.__path__ = [str(VERL.joinpath(*name.split(".")[1:]))]
        return module

    packages = {name: package(name) for name in ("verl", "verl.experimental.reward_loop")}
    packages["verl"].DataProto = object
    loop = types.SimpleNamespace(get_event_loop=asyncio.get_event_loop)
    stand_ins = {"ray": MagicMock(), "verl.utils.ray_utils": loop}
    stand_ins["verl.utils.reward_score"] = MagicMock()  # the rewards of verl's own examples
    with pytest.MonkeyPatch.context() as m:
        for name, module in (packages | stand_ins).items():
            m.setitem(sys.modules, name, module)
        yield importlib.import_module
    for name in [name for name in sys.modules if name.startswith("verl.")]:
        del sys.modules[name]


@pytest.fixture
def outgrown(tmp_path: Path) -> Callable[..., Path]:
    """outgrown(script, flags) -> the folder RUN/verl of a run with these flags."""
    (tmp_path / "rewards.py").write_text(REWARDS)

    def write(script: str, flags: str = "") -> Path:
        args = ["--device", "cpu", *shlex.split(flags.replace("HERE", str(tmp_path)))]
        config = parse_flags(SCRIPTS[script].Config, "", args)
        run = tmp_path / "a run = it's"  # for Hydra and the shell alike
        run.mkdir(exist_ok=True)
        settings = {"script": script, **dataclasses.asdict(config)}
        (run / "config.json").write_text(json.dumps(settings))
        outgrow.main([str(run), "--to", "verl"])
        return run / "verl"

    return write


def arguments(folder: Path) -> list[str]:
    """The arguments of the command in run.sh."""
    _, text = (folder / "run.sh").read_text().split("verl.trainer.main_ppo")
    text = text.replace("${GPUS:-1}", "2").replace("${NODES:-1}", "1").replace('"$@"', "")
    return shlex.split(text.replace("\\\n", " "))


@functools.cache
def defaults() -> DictConfig:
    """verl's configuration as verl ships it in one file."""
    return OmegaConf.load(VERL / "trainer" / "config" / "_generated_ppo_trainer.yaml")


def configuration(folder: Path) -> DictConfig:
    """verl's configuration with what run.sh sets. Raises where a name is not there."""
    if importlib.util.find_spec("hydra"):
        hydra = importlib.import_module("hydra")
        with hydra.initialize_config_dir(str(VERL / "trainer" / "config"), version_base=None):
            config = hydra.compose("ppo_trainer", overrides=arguments(folder))
        OmegaConf.resolve(config)
        return config
    config = copy.deepcopy(defaults())
    for argument in arguments(folder):
        name, value = argument.split("=", 1)
        OmegaConf.set_struct(config, not name.startswith("+"))
        value = re.sub(r"([{,])(\w+):", r"\1\2: ", value)  # Hydra's grammar is nearly YAML
        value = OmegaConf.create(f"value: {value}").value
        OmegaConf.update(config, name.removeprefix("+"), value, force_add=name.startswith("+"))
    return config


def chat_model(folder: Path) -> str:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    return save_model(folder, small_llama(vocab_size=300), tokenizer)


def messages(*texts: str) -> list[dict[str, str]]:
    return [{"role": role, "content": x} for role, x in zip(("system", "user"), texts, strict=True)]


def write_prompts(folder: Path, rows: list[dict]) -> list[dict]:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return rows


def read_by_verl(verl: Callable, config: DictConfig, split: str) -> tuple[list[dict], list]:
    """(rows, token ids of the prompts) as verl's dataset and its agent loop have them."""
    wiring = verl("verl.utils.tokenizer.continuous_token_wiring")
    model = config.actor_rollout_ref.model
    tokenizer = verl("verl.utils.tokenizer").hf_tokenizer(model.tokenizer_path or model.path)
    dataset = verl("verl.utils.dataset.rl_dataset").RLHFDataset(
        config.data[f"{split}_files"], tokenizer, config.data
    )
    builder = wiring.create_continuous_token_builder(tokenizer, hf_model_type="llama")
    rows = [dataset[i] for i in range(len(dataset))]
    return rows, [builder.build_initial_tokens(row["raw_prompt"]) for row in rows]


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


# --- The prompts ---


def test_verl_reads_the_same_prompts_in_the_same_order_with_the_same_tokens(verl, outgrown):
    folder = outgrown("ppo", "--num_steps 3 --prompts_per_step 40 --seed 5 --num_eval_prompts 30")
    config, tokenizer = configuration(folder), load_tokenizer("tiny")
    train, heldout = add_prompts()
    for split, ours in (("train", prompt_batch(train, 0, 120, 5)), ("val", heldout[:30])):
        rows, ids = read_by_verl(verl, config, split)
        assert ids == [prompt_tokens(tokenizer, row["prompt"]) for row in ours]
        assert [row["extra_info"]["columns"] for row in rows] == ours
        assert [row["index"] for row in rows] == list(range(len(ours)))
    assert config.data.max_prompt_length >= max(map(len, ids)) and not config.data.shuffle
    assert config.actor_rollout_ref.model.path == str(TINY.resolve())


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_a_chat_model_gets_its_template_for_messages_and_none_for_text(
    kind, verl, outgrown, tmp_path
):
    model = chat_model(tmp_path / "chat")
    text = [{"prompt": f"say {i}"} for i in range(30)]
    chat = [{"prompt": messages("be kind", f"say {i}")} for i in range(30)]
    write_prompts(tmp_path, rows := text if kind == "text" else chat)
    flags = f"--model {model} --prompts HERE/rows.jsonl --reward HERE/rewards.py:length"
    folder = outgrown("grpo", f"{flags} --num_steps 2")
    tokenizer = load_tokenizer(model)
    train, ids = read_by_verl(verl, configuration(folder), "train")
    heldout, more = read_by_verl(verl, configuration(folder), "val")
    ours = {json.dumps(row["prompt"]): prompt_tokens(tokenizer, row["prompt"]) for row in rows}
    prompts = [row["extra_info"]["columns"]["prompt"] for row in train + heldout]
    assert [ours[json.dumps(prompt)] for prompt in prompts] == ids + more
    assert ("<assistant>" in tokenizer.decode(ids[0])) == (kind == "chat")
    assert load_tokenizer(model).chat_template == CHAT  # the model's own folder is as it was


def test_a_tokenizer_that_puts_bos_in_front_of_text_does_so_in_verl():
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = "<|endoftext|>"
    processors = importlib.import_module("tokenizers.processors")
    pair = ("<|endoftext|>", tokenizer.bos_token_id)
    template = "<|endoftext|> $A"
    post = processors.TemplateProcessing(single=template, special_tokens=[pair])
    tokenizer.backend_tokenizer.post_processor = post
    assert prompt_tokens(tokenizer, "ab")[0] == tokenizer.bos_token_id
    tokenizer.chat_template = outgrow_verl.text_template(tokenizer, ["ab", "c\n"])
    assert "bos_token" in tokenizer.chat_template
    ids = outgrow_verl.verl_tokens(tokenizer, outgrow_verl.as_messages("ab"))
    assert ids == prompt_tokens(tokenizer, "ab")


# --- The reward ---


class Item:
    """One completion as verl's reward managers see it: a DataProto with a single row."""

    def __init__(self, row: dict, ids: list[int]) -> None:
        mask = torch.ones(len(ids) + 3, dtype=torch.long)
        self.batch = {"responses": torch.tensor(ids), "attention_mask": mask}
        self.non_tensor_batch = {name: row[name] for name in ("data_source", "reward_model")}
        self.non_tensor_batch["extra_info"] = row["extra_info"]

    def __getitem__(self, which: object) -> "Item":
        return self


def scores_of_verl(verl: Callable, config: DictConfig, rows: list[dict], texts: list[str]) -> list:
    """The scores by verl's own reward manager, with its own loader of our function."""
    tokenizer = load_tokenizer("tiny")

    async def ask() -> list[dict]:
        manager = verl("verl.trainer.ppo.reward").load_reward_manager(config, tokenizer)
        manager.loop = asyncio.get_running_loop()
        ids = [tokenizer(text).input_ids for text in texts]
        return [await manager.run_single(Item(*pair)) for pair in zip(rows, ids, strict=True)]

    return [float(result["reward_score"]) for result in asyncio.run(ask())]


def test_verls_reward_manager_scores_as_the_task_does(verl, outgrown):
    config = configuration(outgrown("grpo", "--num_steps 1 --prompts_per_step 4"))
    rows, _ = read_by_verl(verl, config, "train")
    answers = [row["extra_info"]["columns"]["answer"] for row in rows]
    assert scores_of_verl(verl, config, rows, answers) == [1.0] * 4
    assert scores_of_verl(verl, config, rows, ["7"] * 4) == [0.0] * 4


ANSWERS = [7, "7", None, [1, {"a": 2}], 1.5, "null"]  # Parquet holds one type in a column


def test_several_rewards_are_added_with_their_weights_and_none_is_left_out(
    verl, outgrown, tmp_path
):
    rows = [{"prompt": f"{i}+{i}=", "answer": ANSWERS[i % 6], "number": i} for i in range(9)]
    write_prompts(tmp_path, rows)
    both = "--reward HERE/rewards.py:has_answer HERE/rewards.py:length --reward_weights 2 0.5"
    flags = f"{both} --prompts HERE/rows.jsonl --num_steps 1 --prompts_per_step 9"
    config = configuration(outgrown("rloo", f"{flags} --reward_clip_range -1 3.5"))
    found, _ = read_by_verl(verl, config, "train")
    ours = prompt_batch(rows_in_order(rows), 0, 9, 0)
    module: dict[str, Any] = {}
    exec(REWARDS, module)
    task = Task([], [], [module["has_answer"], module["length"]], [2.0, 0.5])
    texts = ["7", "17", "777", "1", "1.5", "null", "", "77777777", "0"]
    expected = score_texts(task, ours, texts).clamp(-1, 3.5).tolist()
    assert scores_of_verl(verl, config, found, texts) == expected and len(set(expected)) > 4


def rows_in_order(rows: list[dict]) -> list[dict]:
    """As load_task shuffles fewer than ten."""
    return importlib.import_module("plumbing.prompts").split_prompts(rows)[0]


def test_a_reward_gets_no_token_ids_where_there_are_none():
    given = []

    def reward(completions: list, **columns: list) -> list[float]:
        given.append({*columns})
        return [1.0] * len(completions)

    rows = [{"prompt": "a", "answer": 1}]
    score_texts(Task([], [], [reward], [1.0]), rows, ["b"])
    score_texts(Task([], [], [reward], [1.0]), rows, ["b"], [[3]])
    assert given == [{"prompts", "answer"}, {"prompts", "answer", "completion_ids"}]


def test_a_completion_without_any_score_ends_the_run(verl, outgrown):
    flags = "--reward HERE/rewards.py:none --num_steps 1 --prompts_per_step 4"
    config = configuration(outgrown("grpo", flags))
    rows, _ = read_by_verl(verl, config, "train")
    with pytest.raises(ValueError, match="every reward is None"):
        scores_of_verl(verl, config, rows, ["1"] * 4)


def test_the_length_penalty_is_that_of_verls_dapo(verl, outgrown):
    flags = "--overlong_buffer 3 --max_new_tokens 5 --num_steps 1 --prompts_per_step 4"
    config = configuration(outgrown("grpo", flags + " --reward HERE/rewards.py:length"))
    rows, _ = read_by_verl(verl, config, "train")
    lengths = torch.tensor([2, 3, 4, 5])
    mask = torch.arange(5) < lengths.unsqueeze(1)
    whole = Rollout(mask.long(), mask, mask, lengths < 5, torch.zeros(4, 5))
    penalty = overlong_penalty(whole, 3)
    texts = ["1" * n for n in lengths]
    assert [len(load_tokenizer("tiny")(t).input_ids) for t in texts] == lengths.tolist()
    found = scores_of_verl(verl, config, rows, texts)
    assert found == pytest.approx((lengths + penalty).tolist()) and penalty.min() == -1


# --- The settings ---

VARIANTS = {
    "ppo": [
        "", "--bf16 true --lora_r 4 --tensorboard --wandb --importance_cap 2 --kl_coef 0",
        "--num_generations 2 --gradient_checkpointing --disable_dropout false --entropy_coef 0.1",
    ],
    "grpo": [
        "", "--loss_type cispo --cispo_bound 4", "--loss_type dr_grpo --scale_rewards none",
        "--importance_sampling_level sequence --clip_range 0.0003 --clip_range_high 0.0004",
        "--loss_type dapo --overlong_buffer 2 --dynamic_sampling 3 --kl_coef 0",
    ],
    "rloo": ["", "--importance_cap 3 --reward_clip_range -1 1 --num_mini_batches 1"],
}  # fmt: skip


def test_every_setting_is_in_verls_files_and_in_the_table(outgrown):
    known = {name for names in outgrow_verl.SETTINGS.values() for name in names.split()}
    known |= {*outgrow_verl.FIXED, *outgrow_verl.FIXED_CRITIC, *outgrow_verl.OTHERS}
    seen = set()
    for script, variants in VARIANTS.items():
        for flags in variants:
            folder = outgrown(script, f"--digits 1 --num_steps 1 {flags}")
            configuration(folder)  # raises for a name that isn't there
            names = [argument.split("=", 1)[0] for argument in arguments(folder)]
            assert len(names) == len(set(names))
            seen |= {re.sub(r"(override_config)\.\w+$", r"\1", name) for name in names}
    assert seen == known
    # What + adds is read by verl under this name.
    sources = "workers/config/engine.py workers/config/model.py".split()
    sources += ["experimental/reward_loop/reward_manager/dapo.py"]
    text = "".join((VERL / source).read_text() for source in sources)
    for name in (
        "mixed_precision",
        "override_config",
        "attn_implementation",
        "overlong_buffer_cfg",
    ):
        assert name in text
    assert "max_resp_len" in text and "penalty_factor" in text


def test_every_flag_is_mapped_or_refused_or_left_out_and_on_the_page():
    flags = {f.name for script in SCRIPTS.values() for f in dataclasses.fields(script.Config)}
    parts = [outgrow_verl.SETTINGS, outgrow_verl.NOT_THERE, outgrow_verl.LEFT_OUT]
    assert flags == {name for part in parts for name in part}
    assert len(flags) == sum(map(len, parts))
    lines = re.findall(
        r"\n\| (`.*)", PAGE.split("\n## verl, flag by flag")[1].split("\n## Metrics")[0]
    )
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    rows = {name.strip("`"): place for names, place, *_ in cells for name in names.split(", ")}
    fixed = outgrow_verl.FIXED | outgrow_verl.FIXED_CRITIC
    expected = {name: outgrow_verl.SETTINGS.get(name, "") for name in flags}
    for name in flags:
        shown = " ".join(re.findall(r"`([^`]*)`", rows[name]))
        assert shown == expected[name].replace("actor_rollout_ref.", ""), name
        assert (rows[name] == "refused") == (name in outgrow_verl.NOT_THERE), name
    others = {name: value for name, value in rows.items() if name not in flags}
    shorter = {
        n.replace("actor_rollout_ref.", ""): outgrow_verl.in_hydra(v) for n, v in fixed.items()
    }
    assert others == {n: v for n, v in shorter.items() if not n.startswith("critic.optim")}


def test_minibatches_count_prompts_and_tokens_hold_the_longest_row(outgrown):
    flags = "--prompts_per_step 12 --num_generations 2 --num_mini_batches 3 --num_epochs 4"
    config = configuration(outgrown("ppo", flags + " --micro_batch_size 2 --max_new_tokens 4"))
    actor, data = config.actor_rollout_ref.actor, config.data
    assert (data.train_batch_size, actor.ppo_mini_batch_size, actor.ppo_epochs) == (12, 4, 4)
    assert config.actor_rollout_ref.rollout.n == 2
    row = data.max_prompt_length + data.max_response_length
    assert actor.ppo_max_token_len_per_gpu == 2 * row == config.critic.ppo_max_token_len_per_gpu
    config = configuration(outgrown("ppo", "--micro_batch_tokens 3"))
    actor, data = config.actor_rollout_ref.actor, config.data
    row = data.max_prompt_length + data.max_response_length
    assert actor.ppo_max_token_len_per_gpu == row  # verl's own assertion wants as much


def settings(script: str, flags: str) -> dict[str, Any]:
    config = parse_flags(SCRIPTS[script].Config, "", [*flags.split(), "--device", "cpu"])
    outgrow_verl.check_flags(script, config)
    return outgrow_verl.settings_of(script, config, Path("/run/verl"), longest=6)


def test_the_losses_have_their_names_and_bounds_in_verl():
    def loss(flags: str) -> list:
        found, names = settings("grpo", flags), ("loss_mode", "loss_agg_mode", "low", "high")
        names = ("policy_loss.loss_mode", "loss_agg_mode", "clip_ratio_low", "clip_ratio_high")
        return [found[f"{ACTOR}.{name}"] for name in names]

    assert loss("--clip_range 0.1") == ["vanilla", "seq-mean-token-mean", 0.1, 0.1]
    assert loss("--clip_range_high 0.28") == ["vanilla", "seq-mean-token-mean", 0.2, 0.28]
    assert loss("--loss_type dapo") == ["vanilla", "token-mean", 0.2, 0.2]
    assert loss("--loss_type cispo --cispo_bound 5") == ["cispo", "token-mean", 1.0, 4.0]
    sequence = "--importance_sampling_level sequence"
    assert loss(sequence) == ["gspo", "seq-mean-token-mean", 0.2, 0.2]
    found = settings("grpo", "--loss_type dr_grpo --scale_rewards none --max_new_tokens 9")
    assert found[f"{ACTOR}.loss_scale_factor"] == 9
    assert found["algorithm.norm_adv_by_std_in_grpo"] is False
    assert settings("rloo", "")[f"{ACTOR}.loss_agg_mode"] == "seq-mean-token-sum"
    assert settings("ppo", "")[f"{ACTOR}.loss_agg_mode"] == "token-mean"


def test_the_kl_is_in_the_loss_of_grpo_and_in_the_reward_of_the_others():
    found = settings("grpo", "--kl_coef 0.3")
    names = ("use_kl_loss", "kl_loss_coef", "kl_loss_type")
    assert [found[f"{ACTOR}.{name}"] for name in names] == [True, 0.3, "k3"]
    assert "algorithm.use_kl_in_reward" not in found
    for script, flags, kind in (("ppo", "--kl_estimator k2", "k2"), ("rloo", "", "k1")):
        found = settings(script, f"--kl_coef 0.3 {flags}")
        names = ("use_kl_in_reward", "kl_ctrl.kl_coef", "kl_penalty")
        assert [found[f"algorithm.{name}"] for name in names] == [True, 0.3, kind]
        assert f"{ACTOR}.use_kl_loss" not in found
        assert not any("kl_coef" in name for name in settings(script, "--kl_coef 0"))


def test_the_value_model_has_an_optimiser_of_its_own_and_none_where_its_loss_counts_nothing():
    assert settings("ppo", "--learning_rate 0.2")["critic.optim.lr"] == 0.2
    assert settings("ppo", "--vf_coef 0")["critic.optim.lr"] == 0
    assert not any(name.startswith("critic") for name in settings("grpo", ""))


def test_dropout_is_0_in_the_models_config_there(outgrown):
    config = configuration(outgrown("ppo", ""))
    for model in (config.actor_rollout_ref.model, config.critic.model):
        changes = model.override_config
        assert changes.attn_pdrop == changes.resid_pdrop == changes.embd_pdrop == 0
    config = configuration(outgrown("ppo", "--disable_dropout false"))
    assert "attn_pdrop" not in config.actor_rollout_ref.model.override_config


# --- Errors ---

REFUSED = [
    ("grpo", "--stop a", "--stop .*: verl's rollout has no stop strings"),
    ("ppo", "--reward_model x", "--reward_model x: verl serves reward models itself"),
    ("ppo", "--missing_eos_penalty 1", "--missing_eos_penalty 1.0: verl's reward sees the text"),
    ("ppo", "--whiten_rewards", "--whiten_rewards True: verl doesn't scale rewards"),
    ("rloo", "--normalize_advantages", "--normalize_advantages True: verl's RLOO"),
    ("grpo", "--mask_truncated_completions", "--mask_truncated_completions True: verl trains on"),
    ("grpo", "--scale_rewards batch", "--scale_rewards batch: verl has group and none"),
    (
        "grpo", "--loss_type cispo --importance_sampling_level sequence",
        "--importance_sampling_level sequence: verl's CISPO",
    ),
    ("rloo", "--num_epochs 2", "--num_epochs 2: with 2 updates verl clips the ratio of a token"),
    ("rloo", "--num_mini_batches 4", "--num_mini_batches 4: with 4 updates"),
    (
        "grpo", "--prompts_per_step 3 --num_generations 2 --num_mini_batches 2",
        "--num_mini_batches 2: verl's minibatches hold whole prompts, and can't share 3",
    ),
    ("ppo", "--reward HERE/rewards.py:by_ids", "the reward by_ids asks for completion_ids"),
]  # fmt: skip


@pytest.mark.parametrize(("script", "flags", "message"), REFUSED)
def test_what_verl_has_not_is_refused_and_nothing_is_written(
    script, flags, message, outgrown, tmp_path
):
    with pytest.raises(InputError, match=message) as error:
        outgrown(script, flags)
    assert "\n" not in str(error.value) and not [*tmp_path.glob("*/verl")]


def test_an_adapter_as_the_model_is_refused(outgrown, tmp_path):
    (tmp_path / "adapter").mkdir()
    text = '{"base_model_name_or_path": "gpt2"}'
    (tmp_path / "adapter" / "adapter_config.json").write_text(text)
    with pytest.raises(InputError, match="holds an adapter; --merge_adapter saves a whole model"):
        outgrown("ppo", "--model HERE/adapter --learning_rate 1e-5")


def test_text_and_messages_in_one_file_are_refused(outgrown, tmp_path):
    model = chat_model(tmp_path / "chat")
    write_prompts(tmp_path, [{"prompt": "a"}, {"prompt": messages("a", "b")}] * 5)
    flags = f"--model {model} --prompts HERE/rows.jsonl --reward HERE/rewards.py:length"
    with pytest.raises(InputError, match="some prompts are text and some messages"):
        outgrown("ppo", flags)


def test_a_run_of_ppo_goes_to_verl_alone_and_max_steps_to_trl_alone(outgrown, tmp_path):
    run = str(outgrown("ppo", "--num_steps 1").parent)
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "config.json").write_text('{"script": "reward_model"}')
    for to in ("trl", "verl"):
        with pytest.raises(InputError, match=r"a run of reward_model\.py; .* RewardTrainer"):
            outgrow.config_of(tmp_path / "judge", to)
    with pytest.raises(InputError, match=r"a run of ppo\.py, and TRL has no PPO: try --to verl"):
        outgrow.main([run])
    with pytest.raises(InputError, match="--max_steps 3: for TRL alone"):
        outgrow.main([run, "--to", "verl", "--max_steps", "3"])


def test_it_says_what_it_wrote_and_how_to_start(outgrown, capsys):
    folder = outgrown("rloo", "--num_steps 1")
    said = capsys.readouterr().out.strip().splitlines()
    assert said[-1] == f"GPUS=8 sh {shlex.quote(str(folder / 'run.sh'))}"
    assert {"train.parquet", "test.parquet", "reward.py", "run.sh"} <= {*map(str, names(folder))}


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]
