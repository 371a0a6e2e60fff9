"""tools/outgrow.py: verl's own files and classes read what it writes, and find what the run has.

  pip install omegaconf tensordict && pip install --no-deps verl==0.9.1

verl runs here without Ray and vLLM: modules stand in for those that import them.
"""

import asyncio
import copy
import importlib
import importlib.util
import json
import re
import shlex
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from small import byte_tokenizer, save_model, small_llama

from plumbing.config import parse_flags
from plumbing.errors import InputError
from plumbing.loading import load_tokenizer
from plumbing.prompts import prompt_batch
from tools import outgrow

if not all(map(importlib.util.find_spec, "verl omegaconf tensordict pyarrow datasets".split())):
    pytest.skip("needs verl: see the head of this file", allow_module_level=True)
OmegaConf = importlib.import_module("omegaconf").OmegaConf
VERL = Path(importlib.util.find_spec("verl").origin).parent
DEFAULTS = OmegaConf.load(VERL / "trainer" / "config" / "_generated_ppo_trainer.yaml")
REWARDS = """
def has_answer(completions, answer, **columns):
    return [None if a is None else float(str(a) in c) for a, c in zip(answer, completions)]
def length(completions, **columns):
    return [float(len(c)) for c in completions]
def by_ids(completion_ids):
    return completion_ids
"""
ANSWERS = [7, "7", None, [1, {"a": 2}], 1.5, "null", 7, 8, 9]  # Parquet holds one type


@pytest.fixture
def outgrown(tmp_path):
    """outgrown(script, flags) -> verl's settings of that run; raises for a name that verl lacks."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = [json.dumps({"prompt": f"{i}+1=", "answer": x}) for i, x in enumerate(ANSWERS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))

    def write(script, flags=""):
        flags = f"--device cpu --prompts HERE/rows.jsonl --reward HERE/rewards.py:length {flags}"
        args = shlex.split(flags.replace("HERE", str(tmp_path)))
        config = parse_flags(importlib.import_module(script).Config, "", args)
        (run := tmp_path / "a run = it's").mkdir(exist_ok=True)  # for Hydra and the shell alike
        (run / "config.json").write_text(json.dumps({"script": script, **vars(config)}))
        outgrow.main([str(run), "--to", "verl"])
        _, text = (run / "verl" / "run.sh").read_text().split("verl.trainer.main_ppo")
        text = text.replace("${GPUS:-1}", "2").replace("${NODES:-1}", "1").replace('"$@"', "")
        verls = copy.deepcopy(DEFAULTS)
        for setting in shlex.split(text.replace("\\\n", " ")):
            name, value = setting.split("=", 1)
            OmegaConf.set_struct(verls, not name.startswith("+"))
            value = re.sub(r"([{,])(\w+):", r"\1\2: ", value)  # Hydra's grammar is nearly YAML
            value = OmegaConf.create(f"value: {value}").value
            OmegaConf.update(verls, name.removeprefix("+"), value, force_add=name.startswith("+"))
        return verls

    return write


def test_sizes_steps_models_and_learning_rates_are_those_of_the_run(outgrown):
    sizes = "--prompts_per_step 12 --num_generations 2 --num_mini_batches 3 --num_epochs 4"
    sizes += " --num_steps 7 --max_new_tokens 4 --micro_batch_tokens 3 --lora_r 4"
    numbers = "--learning_rate 0.2 --warmup_steps 3 --temperature 0.7 --seed 5 --lam 0.9"
    config = outgrown("ppo", f"{sizes} {numbers}")
    data, (actor, rollout) = config.data, map(config.actor_rollout_ref.get, ("actor", "rollout"))
    assert (data.train_batch_size, actor.ppo_mini_batch_size, actor.ppo_epochs) == (12, 4, 4)
    assert (rollout.n, rollout.temperature, rollout.seed) == (2, 0.7, 5)
    assert (config.trainer.total_training_steps, data.max_response_length) == (7, 4)
    assert (config.algorithm.adv_estimator, config.algorithm.lam) == ("gae", 0.9)
    for optimizer in (actor.optim, config.critic.optim):
        assert (optimizer.lr, optimizer.lr_warmup_steps) == (0.2, 3)
    row = data.max_prompt_length + data.max_response_length
    assert actor.ppo_max_token_len_per_gpu == row, "verl wants room for the longest row"
    for model in (config.actor_rollout_ref.model, config.critic.model):
        assert (model.lora_rank, model.override_config.attn_pdrop) == (4, 0)
    config = outgrown("ppo", "--vf_coef 0 --disable_dropout false")
    assert config.critic.optim.lr == 0
    assert "attn_pdrop" not in config.actor_rollout_ref.model.override_config


def test_the_losses_have_their_names_and_bounds_in_verl(outgrown):
    def loss(script, flags=""):
        actor = outgrown(script, flags).actor_rollout_ref.actor
        mode = actor.policy_loss.loss_mode, actor.loss_agg_mode
        return [*mode, actor.clip_ratio_low, actor.clip_ratio_high]

    assert loss("grpo", "--clip_range 0.1") == ["vanilla", "seq-mean-token-mean", 0.1, 0.1]
    assert loss("grpo", "--clip_range_high 0.28")[2:] == [0.2, 0.28]
    assert loss("grpo", "--loss_type dapo") == ["vanilla", "token-mean", 0.2, 0.2]
    assert loss("grpo", "--loss_type cispo") == ["cispo", "token-mean", 1.0, 4.0]
    assert loss("rloo")[:2] == ["vanilla", "seq-mean-token-sum"]
    assert loss("ppo")[:2] == ["vanilla", "token-mean"]
    config = outgrown("grpo", "--loss_type dr_grpo --scale_rewards none --max_new_tokens 9")
    assert config.actor_rollout_ref.actor.loss_scale_factor == 9
    assert not config.algorithm.norm_adv_by_std_in_grpo


def test_the_kl_is_in_the_loss_of_grpo_and_in_the_reward_of_the_others(outgrown):
    actor = outgrown("grpo", "--kl_coef 0.3").actor_rollout_ref.actor
    assert (actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type) == (True, 0.3, "k3")
    for script, flags, kind in (("ppo", "--kl_estimator k2", "k2"), ("rloo", "", "k1")):
        algorithm = outgrown(script, f"--kl_coef 0.3 {flags}").algorithm
        found = algorithm.use_kl_in_reward, algorithm.kl_ctrl.kl_coef, algorithm.kl_penalty
        assert found == (True, 0.3, kind)
    assert not outgrown("ppo", "--kl_coef 0").algorithm.use_kl_in_reward


REFUSED = [
    ("grpo", "--stop a", "verl's rollout has no stop strings"),
    ("ppo", "--reward_model x", "verl serves reward models itself"),
    ("ppo", "--missing_eos_penalty 1", "verl's reward sees the text alone"),
    ("grpo", "--mask_truncated_completions", "verl trains on completions that are cut"),
    ("rloo", "--num_epochs 2", "with 2 updates verl clips the ratio of a token"),
    ("grpo", "--prompts_per_step 3 --num_mini_batches 2", "verl's minibatches hold whole prompts"),
    ("ppo", "--reward HERE/rewards.py:by_ids", "the reward by_ids asks for completion_ids"),
]


@pytest.mark.parametrize(("script", "flags", "message"), REFUSED)
def test_what_verl_has_not_is_refused_in_one_line(script, flags, message, outgrown, tmp_path):
    with pytest.raises(InputError, match=message) as error:
        outgrown(script, flags)
    assert "\n" not in str(error.value) and not [*tmp_path.glob("*/verl")]


@pytest.fixture
def verl(monkeypatch):
    """Imports a module of the installed verl."""
    for name in ("verl", "verl.experimental.reward_loop"):  # their __init__ imports everything
        package = types.ModuleType(name)
        package.__path__ = [str(VERL.joinpath(*name.split(".")[1:]))]
        package.DataProto = object
        monkeypatch.setitem(sys.modules, name, package)
    for name in ("ray", "verl.utils.ray_utils", "verl.utils.reward_score"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    yield importlib.import_module
    for name in [name for name in sys.modules if name.startswith("verl.")]:
        del sys.modules[name]


def read_by_verl(verl, config, split):
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


def scores_of_verl(verl, config, rows, texts):
    """The scores by verl's own reward manager, with its own loader of our function."""
    tokenizer, items = load_tokenizer("tiny"), []
    for row, text in zip(rows, texts, strict=True):
        ids = torch.tensor(tokenizer(text).input_ids)
        batch = {"responses": ids, "attention_mask": torch.ones(len(ids) + 3, dtype=torch.long)}
        items.append([types.SimpleNamespace(batch=batch, non_tensor_batch=row)])

    async def ask():
        manager = verl("verl.trainer.ppo.reward").load_reward_manager(config, tokenizer)
        manager.loop = asyncio.get_running_loop()
        return [await manager.run_single(item) for item in items]

    return [float(result["reward_score"]) for result in asyncio.run(ask())]


@pytest.mark.slow
def test_verl_reads_the_same_prompts_in_the_same_order_with_the_same_tokens(verl, outgrown):
    flags = "--eval_prompts HERE/rows.jsonl --num_steps 3 --prompts_per_step 4 --seed 5"
    config = outgrown("ppo", f"{flags} --num_eval_prompts 6")
    given = [{"prompt": f"{i}+1="} for i in range(9)]
    for split, ours in (("train", prompt_batch(given, 0, 12, 5)), ("val", given[:6])):
        _, ids = read_by_verl(verl, config, split)
        assert ids == [load_tokenizer("tiny")(row["prompt"]).input_ids for row in ours]
    assert not config.data.shuffle


@pytest.mark.slow
def test_a_chat_model_gets_its_template_for_messages(verl, outgrown, tmp_path):
    tokenizer = byte_tokenizer()
    turn = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer.chat_template = turn + "|<assistant>"
    model = save_model(tmp_path / "chat", small_llama(vocab_size=300), tokenizer)
    rows = [json.dumps({"prompt": [{"role": "user", "content": f"{i}"}]}) for i in range(9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    _, ids = read_by_verl(verl, outgrown("grpo", f"--model {model} --num_steps 1"), "val")
    assert {re.sub(r"\d", "N", tokenizer.decode(x)) for x in ids} == {"<user>N|<assistant>"}


@pytest.mark.slow
def test_verl_adds_the_rewards_with_their_weights_and_leaves_none_out(verl, outgrown):
    both = "--reward HERE/rewards.py:has_answer HERE/rewards.py:length --reward_weights 2 0.5"
    config = outgrown("rloo", f"--eval_prompts HERE/rows.jsonl {both}")
    rows, _ = read_by_verl(verl, config, "val")
    texts = ["7", "17", "777", "[1, {'a': 2}]", "1.4", "null", "", "12345678", "0"]
    expected = [2 * r + len(text) / 2 for r, text in zip([1, 1, 0, 1, 0, 1, 0, 1, 0], texts)]
    assert scores_of_verl(verl, config, rows, texts) == expected
    config = outgrown("grpo", "--overlong_buffer 3 --max_new_tokens 5")
    found = scores_of_verl(verl, config, rows[:4], ["11", "111", "1111", "11111"])
    assert found == pytest.approx([2, 3 - 1 / 3, 4 - 2 / 3, 5 - 1]), "the penalty of verl's DAPO"
    config = outgrown("grpo", "--reward HERE/rewards.py:has_answer")
    with pytest.raises(ValueError, match="every reward is None"):
        scores_of_verl(verl, config, rows[2:3], ["1"])
