"""Small models and tokenizers, built from configs: nothing here needs a network or a GPU."""

import fnmatch
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

os.environ["HF_HUB_OFFLINE"] = "1"
# Faster for models this small, in the processes that tests start too: threads would wait for each
# other, as other workers have the cores.
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent.parent))


import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from common import Rollout

torch.set_num_threads(1)

VOCAB = 40
EOS = 39


# Slow as well: cases that have a faster sibling among the fast ones, or that few edits can break.
SLOWER = """
test_faults.py::*no memory left*
test_faults.py::*step 3]
test_groups_by_hand.py::*cispo]
test_groups_by_hand.py::*dr_grpo]
test_groups_by_hand.py::*normalised*
test_groups_by_hand.py::test_every_gradient*[[][dg]*o]
test_outgrow_verl.py::test_a_chat_model*
test_outgrow_verl.py::test_a_completion_without*
test_outgrow_verl.py::test_a_run_of_ppo*
test_outgrow_verl.py::test_dropout_is_0*
test_outgrow_verl.py::test_every_setting*
test_outgrow_verl.py::test_it_says_what*
test_outgrow_verl.py::test_minibatches_count*
test_outgrow_verl.py::test_the_length_penalty*
test_outgrow_verl.py::test_verl*
test_pitfalls.py::test_16_in_a_run*[[]rloo]
test_pitfalls.py::test_31*[[]*flags[02-9]]
test_pretended_cuda.py::test_a_reward_model*
test_pretended_cuda.py::test_a_run_*
test_pretended_cuda.py::test_a_tensor_*
test_pretended_cuda.py::test_a_wait_for_every*
test_pretended_cuda.py::test_of_a_long_completion*
test_pretended_cuda.py::test_other_architectures*
test_pretended_cuda.py::test_training_a_reward_model*
test_recipes.py::test_the_figures_of_memory*
test_reference.py::test_a_merged_model_is*
test_reference.py::test_an_adapter_is_trained_saved*
test_resume.py::test_a_command_that_is_refused*
test_resume.py::test_a_disk_that_fills*
test_resume.py::test_a_second_ctrl_c*
test_resume.py::test_after_running_out*
test_resume.py::test_an_overwritten_run_takes*
test_resume.py::test_ctrl_c_in_the_last*
test_resume.py::test_every_field*
test_resume.py::test_half_an_update*
test_resume.py::test_resume_where_there_is_nothing*
test_resume.py::test_resume_without_a_checkpoint_starts*
test_reward_model.py::test_another_value*
test_reward_model.py::test_the_embedded_model_prefers*
test_runs.py::test_where_matplotlib*
test_scripts.py::test_at_step_0*llama*
test_scripts.py::test_dropout_left_on*
test_scripts.py::test_every_forward_pass*
test_scripts.py::test_gradient_checkpointing*
test_scripts.py::test_in_bfloat16*[[]rloo*
test_scripts.py::test_rows_without_advantage*all-*[mkl]*
test_stopping.py::test_a_run_with_stop_strings*
test_tiny.py::test_chances*
test_tiny.py::test_the_page_has*
test_tokens.py::test_of_long_completions*
test_tokens.py::test_the_file_keeps*
""".split("\n")[1:-1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`pytest -m fast` runs all that is not marked slow."""
    ids = {item.nodeid for item in items}
    for item in items:
        # What runs with each of the scripts runs with grpo.py alone among the fast tests.
        sibling = re.sub(r"\b(ppo|rloo)\b(?=[^\[]*\]$)", "grpo", item.nodeid)
        has_faster = sibling != item.nodeid and sibling in ids
        if has_faster or any(fnmatch.fnmatch(item.nodeid, f"tests/{x}") for x in SLOWER):
            item.add_marker("slow")
        if not item.get_closest_marker("slow"):
            item.add_marker("fast")


@pytest.fixture(autouse=True)
def no_picture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The picture of a run takes three quarters of the time of a small one."""
    if not request.node.get_closest_marker("draws"):
        monkeypatch.setattr("plumbing.runs.draw", lambda folders, path: None)


def small_gpt2(dropout: float = 0.0, vocab_size: int = VOCAB) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocab_size, n_positions=64, n_embd=32, n_layer=2, n_head=2,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, initializer_range=0.3,
        bos_token_id=None, eos_token_id=vocab_size - 1,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def small_llama(dropout: float = 0.0, vocab_size: int = VOCAB) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        attention_dropout=dropout, initializer_range=0.3, bos_token_id=None,
        eos_token_id=vocab_size - 1, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


SMALL_MODELS = {"gpt2": small_gpt2, "llama": small_llama}


@pytest.fixture(params=SMALL_MODELS)
def small_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A GPT-2 (learned positions) and a Llama (rotary positions), in evaluation mode."""
    return SMALL_MODELS[request.param]().eval()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 257 tokens like GPT-2's: no pad token, no chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "<|endoftext|>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def save_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> str:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """A token per letter and one for EOS, 20 in all: small models end their rows often."""
    vocabulary = {token: index for index, token in enumerate([*" abcdehnopqrstuwxyz", "<eos>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def make_rollout(
    prompts: list[list[int]],
    completions: list[list[int]],
    extra_left: int = 0,
    extra_right: int = 0,
    eos: int = EOS,
) -> Rollout:
    """A rollout of ragged prompts and completions, EOS included, with more padding at will."""
    width = max(map(len, prompts)) + extra_left
    length = max(map(len, completions)) + extra_right
    tokens = torch.tensor(
        [
            [0] * (width - len(p)) + p + c + [0] * (length - len(c))
            for p, c in zip(prompts, completions, strict=True)
        ]
    )
    prompt_mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]).bool()
    mask = torch.tensor([[1] * len(c) + [0] * (length - len(c)) for c in completions]).bool()
    return Rollout(
        tokens=tokens,
        attention_mask=torch.cat([prompt_mask, mask], dim=1),
        completion_mask=mask,
        logprobs=torch.zeros(mask.shape),
        finished=torch.tensor([c[-1] == eos for c in completions]),
    )


def more_padding(rollout: Rollout, extra: int) -> Rollout:
    """The rollout with masked columns on the right that hold garbage: nothing may depend on it."""
    num_rows = len(rollout.tokens)
    ids = 1 + torch.arange(num_rows * extra).view(num_rows, extra) % 7
    off = torch.zeros(num_rows, extra, dtype=torch.bool)
    return Rollout(
        tokens=torch.cat([rollout.tokens, ids.to(rollout.tokens)], dim=1),
        attention_mask=torch.cat([rollout.attention_mask, off], dim=1),
        completion_mask=torch.cat([rollout.completion_mask, off], dim=1),
        logprobs=torch.cat([rollout.logprobs, torch.full(off.shape, -7.0)], dim=1),
        finished=rollout.finished,
    )


def compared(quantity: str, ours: list[Tensor], theirs: list[Tensor], tolerance: float) -> str:
    """Two systems' numbers as a row of a table; of many their norm. They must be equal to
    `tolerance` of the largest number, which is at least counted as 1.
    """
    ours, theirs = (torch.cat([x.detach().flatten() for x in xs]) for xs in (ours, theirs))
    difference = (ours - theirs).abs().max().item()
    values = [x.item() if x.numel() == 1 else x.norm().item() for x in (ours, theirs)]
    norm = "" if ours.numel() == 1 else " (norm)"
    largest = max(1.0, theirs.abs().max().item())
    assert difference <= tolerance * largest, f"{quantity}: {difference} of {largest}"
    return f"| {quantity}{norm} | {values[0]:.7f} | {values[1]:.7f} | {difference:.1e} |"


def in_float64(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> None:
    """The script's policy, and with it its value model and reference, in float64."""
    load_policy = script.load_policy
    monkeypatch.setattr(script, "load_policy", lambda *args: load_policy(*args).double())


RAGGED = make_rollout(
    prompts=[[1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [3, 3], [11, 1, 2]],
    completions=[[12, EOS], [EOS], [13, 14, 15, 16, 17], [18, 19, EOS], [20, 21, 22, EOS], [5, 6]],
)

IN_GROUPS = make_rollout(  # several completions of one prompt; 0 is padding, and a token as well
    prompts=[[1, 2, 3], [4], [1, 2, 3], [0, 0, 0, 4], [4], [1, 2, 3]],
    completions=[[12, EOS], [EOS], [13, 14, 15, 16, 17], [18, 19, EOS], [20, 21, 22, EOS], [5, 6]],
)


PROMPTS = ["x", "yy y", "zzz", "w", "the", "a b", "q", "rs"] * 4
REWARD = """
def share_of_a(completions, **columns):
    return [(c.count("a") + 1) / (len(c) + 4) for c in completions]

def spread(completions, completion_ids, **columns):
    return [sum(ids) % 7 - 3.0 for ids in completion_ids]

def huge(completions, completion_ids, **columns):
    return [1e6 * (sum(ids) % 7 - 3.0) for ids in completion_ids]
"""


@pytest.fixture
def make_job(tmp_path: Path) -> Callable[[ModuleType], Callable[..., list[dict]]]:
    """make_job(script) -> job; job(flag=value, ...) runs script.main on a small saved model and
    returns the metrics of each step. `completions` is their number per step, whatever the group.
    """
    folder = save_model(tmp_path / "small-gpt2", small_gpt2(0.1, vocab_size=20), letter_tokenizer())
    (tmp_path / "reward.py").write_text(REWARD)
    lines = [json.dumps({"prompt": prompt}) for prompt in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    flags = {
        "model": folder, "prompts": tmp_path / "prompts.jsonl",
        "reward": f"{tmp_path}/reward.py:spread", "num_steps": 1, "completions": 8,
        "max_new_tokens": 6, "temperature": 0.7, "micro_batch_size": 4, "rollout_batch_size": 4,
        "num_eval_prompts": 2, "device": "cpu", "bf16": False, "output_dir": tmp_path / "run",
        "record_tokens": False,  # it calls what some tests count: test_tokens.py turns it on
    }  # fmt: skip

    def make(script: ModuleType) -> Callable[..., list[dict]]:
        def run(**changes) -> list[dict]:
            ours = {"num_generations": 1 if script.__name__ == "ppo" else 4} | flags | changes
            ours.setdefault("prompts_per_step", ours["completions"] // ours["num_generations"])
            del ours["completions"]
            args = ["--overwrite"]
            for name, value in ours.items():
                values = value if isinstance(value, list) else [value]
                args += [f"--{name}", *map(str, values)]
            script.main(args)
            text = (Path(ours["output_dir"]) / "metrics.jsonl").read_text()
            return [json.loads(line) for line in text.splitlines()]

        run.script, run.folder, run.model = script, Path(flags["output_dir"]), folder
        return run

    return make


WORDS = ["ab", "cad", "be", "do", "hen", "nest", "coat", "tan"]


def rows_of(count: int, seed: int = 0) -> list[dict]:
    """Pairs of which the one with more of the letter a is chosen."""
    rng, rows = random.Random(seed), []
    while len(rows) < count:
        first, second = ("".join(rng.choices("abcde", k=rng.randint(1, 6))) for _ in range(2))
        if first.count("a") > second.count("a"):
            rows.append({"prompt": rng.choice(WORDS), "chosen": first, "rejected": second})
    return rows


def reward_model_job(tmp_path: Path) -> Callable[..., list[dict]]:
    """Runs reward_model.py on a small model and pairs of letters; gives its metrics."""
    save_model(tmp_path / "small", small_llama(0.1, vocab_size=20), letter_tokenizer())
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows_of(80))))

    def run(**flags: object) -> list[dict]:
        settings = {
            "model": tmp_path / "small", "pairs": tmp_path / "pairs.jsonl", "num_steps": 3,
            "pairs_per_step": 8, "warmup_steps": 1, "learning_rate": 1e-2, "eval_every": 2,
            "output_dir": tmp_path / "run", "device": "cpu", "bf16": "false",
        } | flags  # fmt: skip
        if not {"overwrite", "resume"} & settings.keys():
            settings["overwrite"] = "true"
        import reward_model

        reward_model.main([part for k, v in settings.items() for part in (f"--{k}", str(v))])
        lines = (Path(settings["output_dir"]) / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return run


CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = """--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run
--disable-background-networking --disable-component-update --disable-sync""".split()


def browser_missing() -> str | None:
    """What the tests in a browser lack on this machine."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "needs selenium: pip install selenium"
    return None if CHROMIUM and DRIVER else "needs chromium and chromedriver"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    """A browser without a screen, which logs each of its requests."""
    if reason := browser_missing():
        assert os.environ.get("PLAINRLHF_BROWSER") != "1", reason
        pytest.skip(reason)
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(DRIVER)
    driver = webdriver.Chrome(options=options, service=service)
    driver.get("data:,")  # the page that it opens with asks for pages of its own
    yield driver
    driver.quit()
