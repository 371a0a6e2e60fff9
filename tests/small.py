"""Small models, tokenizers and rollouts, built from configs: no network and no GPU is needed."""

import functools
import importlib
import json
import random
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import conftest  # for files that run as scripts: the path, no hub, one thread
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

import ppo
import reward_model
import tasks
from common import Rollout
from plumbing.config import RunConfig
from plumbing.data import Task, load_task
from plumbing.run import run_main

torch.set_num_threads(1)

# The files that are run: whoever adds one has it tested.
FILES = sorted(Path(conftest.__file__).parent.parent.glob("*.py"))
FILES = [path for path in FILES if "\n    run_main(main)" in path.read_text(encoding="utf-8")]
SCRIPTS = {path.stem: importlib.import_module(path.stem) for path in FILES}
ALGORITHMS = {name: x for name, x in SCRIPTS.items() if issubclass(x.Config, RunConfig)}
# What each script says that the embedded models have otherwise.
EMBEDDED = {
    name: {"tiny": script.TINY} | ({"tiny/cups": script.CUPS} if hasattr(script, "CUPS") else {})
    for name, script in SCRIPTS.items()
}
VOCAB = 40
EOS = 39


def small_gpt2(dropout: float = 0.0, vocab_size: int = VOCAB, n_layer: int = 2) -> GPT2LMHeadModel:
    """A GPT-2 with random weights, the same in each call; its logits are far from uniform."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocab_size, n_positions=64, n_embd=32, n_layer=n_layer, n_head=2,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, initializer_range=0.3,
        bos_token_id=None, eos_token_id=vocab_size - 1,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def small_llama(dropout: float = 0.0, vocab_size: int = VOCAB) -> LlamaForCausalLM:
    """A Llama with such weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        attention_dropout=dropout, initializer_range=0.3, bos_token_id=None,
        eos_token_id=vocab_size - 1, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


SMALL_MODELS = {"gpt2": small_gpt2, "llama": small_llama}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 257 tokens like GPT-2's: no pad token, no chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "<|endoftext|>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


@functools.cache
def byte_policy() -> LlamaForCausalLM:
    """A tiny Llama for byte_tokenizer; its logits are nearly uniform."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=257, num_attention_heads=1, **sizes))


def task_of(chat_template: str | None = None, **flags: object) -> Task:
    """The task of these flags, for a model with or without a chat template."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = chat_template
    config = ppo.Config(**{"max_new_tokens": 8, "task": "add", "device": "cpu"} | flags)
    return load_task(config, tasks, byte_policy(), tokenizer)


def save_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> str:
    """Write both into a folder; its name, as --model takes it."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def letter_tokenizer(tokens: str | list[str] = " abcdehnofqrstuwxyz") -> PreTrainedTokenizerFast:
    """A token per letter (stop strings need a to f) and one for EOS, 20 in all: rows end often."""
    vocabulary = {token: index for index, token in enumerate([*tokens, "<eos>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=tokens[0]))
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


RAGGED_ROWS = (  # prompts, completions
    [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [3, 3], [11, 1, 2]],
    [[12, EOS], [EOS], [13, 14, 15, 16, 17], [18, 19, EOS], [20, 21, 22, EOS], [5, 6]],
)
RAGGED = make_rollout(*RAGGED_ROWS)

IN_GROUPS = make_rollout(  # several completions of one prompt; 0 is padding, and a token as well
    [[1, 2, 3], [4], [1, 2, 3], [0, 0, 0, 4], [4], [1, 2, 3]], RAGGED_ROWS[1]
)


UNEVEN = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]).bool()


def numbers(seed: int, scale: float = 1.0) -> Tensor:
    """Of the shape of UNEVEN, in float64."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(4, 4, generator=generator, dtype=torch.float64)


def near(
    found: Tensor,
    expected: Tensor | list | float,
    hint: str,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> None:
    """Fail with the hint and both numbers, whatever their types are: the grader cuts a message, and
    pytest would begin it with the whole call of torch.allclose.
    """
    found, expected = (torch.as_tensor(x).detach().double() for x in (found, expected))
    if found.shape != expected.shape:
        found, expected, hint = (*map(list, (found.shape, expected.shape)), f"{hint}\nthe shape:")
    elif torch.allclose(found, expected, rtol=rtol, atol=atol, equal_nan=True):
        return
    elif found.numel() <= 12:
        found, expected = (x.round(decimals=6).tolist() for x in (found, expected))
    else:  # where they differ most
        worst = (found - expected).abs().nan_to_num(torch.inf).argmax()
        place = [int(i) for i in torch.unravel_index(worst, found.shape)]
        found, expected = (f"{x.flatten()[worst]:.6g}" for x in (found, expected))
        hint = f"{hint}\nat {place}:"
    raise AssertionError(f"{hint}\nfound {found}, expected {expected}")


def lines_of(path: str | Path) -> list[dict]:
    """The records of a file of JSON lines."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def without_times(metrics: list[dict]) -> list[dict]:
    """Metrics without times and memory, which differ from run to run."""
    measured = ("time/", "memory/", "tokens_per_second")
    return [{k: v for k, v in x.items() if not k.startswith(measured)} for x in metrics]


def files_below(folder: str | Path) -> dict[str, bytes]:
    """{path: bytes} of every file below a folder."""
    files = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def run_command(script: ModuleType, flags: list[str], capsys: pytest.CaptureFixture) -> tuple:
    """(Exit code, what is printed but the progress bar) of a script's command."""
    capsys.readouterr()
    code = 0
    try:
        run_main(lambda: script.main(flags))
    except SystemExit as e:
        code = e.code
    except Exception:
        traceback.print_exc()
        code = 1
    out, errors = capsys.readouterr()
    return code, out + errors.rpartition("\r")[2]


PROMPTS = ["x", "yy y", "zzz", "w", "the", "a b", "q", "rs"] * 4
REWARD = """
def share_of_a(completions, **columns):
    return [(c.count("a") + 1) / (len(c) + 4) for c in completions]

def spread(completions, completion_ids, **columns):
    return [sum(ids) % 7 - 3.0 for ids in completion_ids]
"""


OF_RATIO = {"num_epochs", "num_mini_batches", "clip_range"}


def job_maker(tmp_path: Path) -> Callable[[ModuleType], Callable[..., list[dict]]]:
    """job_maker(folder)(script) -> job; job(flag=value, ...) runs script.main on a small saved
    model and returns the metrics of each step. `completions` is their number per step, whatever the
    group.
    """
    folder = save_model(tmp_path / "small-gpt2", small_gpt2(0.1, 20, n_layer=1), letter_tokenizer())
    (tmp_path / "reward.py").write_text(REWARD)
    lines = [json.dumps({"prompt": prompt}) for prompt in PROMPTS]
    random.Random(0).shuffle(lines)
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines[3:]))
    (tmp_path / "heldout.jsonl").write_text("\n".join(lines[:3]))
    flags = {
        "model": folder, "prompts": tmp_path / "prompts.jsonl",
        "eval_prompts": tmp_path / "heldout.jsonl",
        "reward": f"{tmp_path}/reward.py:spread", "num_steps": 1, "completions": 8,
        "max_new_tokens": 6, "temperature": 0.7, "micro_batch_tokens": 40, "rollout_batch_size": 4,
        "num_eval_prompts": 2, "device": "cpu", "bf16": False, "output_dir": tmp_path / "run",
    }  # fmt: skip

    def make(script: ModuleType) -> Callable[..., list[dict]]:
        def run(**changes) -> list[dict]:
            ours = {"num_generations": 1 if script.__name__ == "ppo" else 4} | flags | changes
            ours.setdefault("prompts_per_step", ours["completions"] // ours["num_generations"])
            del ours["completions"]
            if script.__name__ == "rloo":  # of a rollout it makes one update, without a ratio
                ours = {k: v for k, v in ours.items() if k not in OF_RATIO}
            ours["output_dir"] = None if "resume" in ours else ours["output_dir"]
            args = ["--overwrite"]
            for name, value in ours.items():
                values = value if isinstance(value, list) else [value]
                args += [] if value is None else [f"--{name}", *map(str, values)]
            script.main(args)
            return lines_of(Path(ours["output_dir"] or ours["resume"]) / "metrics.jsonl")

        run.script, run.folder, run.model = script, Path(flags["output_dir"]), folder
        return run

    return make


WORDS = ["ab", "cad", "be", "do", "hen", "nest", "coat", "tan"]


def letter_pairs(count: int, seed: int = 0) -> list[dict]:
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
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, letter_pairs(80))))

    def run(**flags: object) -> list[dict]:
        settings = {
            "model": tmp_path / "small", "pairs": tmp_path / "pairs.jsonl", "num_steps": 3,
            "pairs_per_step": 8, "warmup_steps": 1, "learning_rate": 1e-2, "eval_every": 2,
            "output_dir": tmp_path / "run", "device": "cpu", "bf16": "false", "overwrite": "true",
        }  # fmt: skip
        settings |= flags
        reward_model.main([part for k, v in settings.items() for part in (f"--{k}", str(v))])
        return lines_of(settings["output_dir"] / "metrics.jsonl")

    return run
