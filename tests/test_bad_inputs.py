"""A bad input ends with exit code 2, a fault with 1, both with one line and without a traceback."""

import contextlib
import io
import json
import shutil
import sys
from contextlib import nullcontext as nothing
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from small import REWARD, byte_tokenizer, letter_tokenizer, save_model, small_gpt2
from transformers import (
    BertConfig,
    BertForMaskedLM,
    MambaConfig,
    MambaForCausalLM,
)

import grpo
import ppo
import reward_model
import rloo
from plumbing.run import run_main
from tools import inspect_reward, plot

MAINS = {"ppo": ppo.main, "grpo": grpo.main, "rloo": rloo.main, "reward_model": reward_model.main}
MAINS |= {"plot": plot.main, "inspect_reward": inspect_reward.main}
RUN = (
    "--model small --prompts prompts.jsonl --reward reward.py:spread --num_steps 6"
    " --prompts_per_step 2 --num_generations 2 --max_new_tokens 4 --num_eval_prompts 2"
    " --save_every 2 --output_dir run --bf16 false --device cpu"
)
HUGE = "--learning_rate 1e30 --max_grad_norm 1e30"
PAIRS = "--model small --num_steps 2 --output_dir run --pairs"
MORE_REWARDS = """
calls = 0

def from_call_6(completions, completion_ids, **columns):
    global calls
    calls += 1
    if calls > 5:
        raise KeyError("verdict")
    return spread(completions, completion_ids)

def unknown_now_and_then(completions, **columns):
    return [1.0, None] * (len(completions) // 2)

number = 5
"""
ROWS = {
    "prompts": [{"prompt": p} for p in ("x", "yy y", "zzz", "w", "the", "a b", "q", "rs")],
    "no_answer": [{"prompt": "1+1="}],
    "one_answer": [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": None}],
    "answer_in_words": [{"prompt": "1+1=", "answer": "two"}],
}
FILES = {f"{name}.jsonl": "\n".join(map(json.dumps, rows)) for name, rows in ROWS.items()}
FILES |= {
    "reward.py": REWARD + MORE_REWARDS,
    "no_python.py": "def f(:\n",
    "empty.jsonl": "\n",
    "damaged.parquet": "PAR1 and no more",
    "empty_run/metrics.jsonl": "",
    "empty_model/readme": "",
}
BAD = [  # (script, flags, part of the line)
    # Flags. What is tested of them in test_config.py is left out here.
    ("ppo", "--learn 1e-3", "unknown flag --learn"),
    ("ppo", "stray", "'stray' belongs to no flag"),
    ("ppo", "--num_steps many", "--num_steps: invalid int value: 'many'"),
    ("ppo", "--overwrite maybe", "must be true or false, not 'maybe'"),
    ("ppo", "--device cuda:99", "--device cuda:99: this machine"),
    ("reward_model", "--report_to tensorbord", "--report_to: invalid choice: 'tensorbord'"),
    ("ppo", "--stop", "--stop: expected at least one argument"),
    ("grpo", "--overlong_buffer 9", "longer than the longest completion, --max_new_tokens 5"),
    ("ppo", "--eval_generations 300", "must hold the 300 completions of a prompt"),
    ("ppo", "--max_new_tokens 125", "leaves no room for 125 new ones"),
    ("inspect_reward", "--num_generations 1", "2 or more"),
    # Models
    ("ppo", "--model nowhere/at-all", "or use --model tiny"),
    ("ppo", "--model empty_model", "can't be loaded"),
    ("ppo", "--model bert", "not a causal language model"),
    ("ppo", "--model mamba", "key-value cache"),
    ("ppo", "--model mixed --max_new_tokens 2", "don't belong together"),
    # Prompts
    ("ppo", "--prompts nowhere.jsonl", "nowhere.jsonl: can't be read"),
    ("ppo", "--system_prompt Hello", "no chat template; write the text into --prompt_template"),
    ("ppo", "--prompt_template {question}", '--task add: no key "question", there are prompt'),
    ("ppo", "--prompt_template templat.txt", "--prompt_template templat.txt: there is no such"),
    ("ppo", "--eval_prompts answer_in_words.jsonl --reward gsm8k", "in the answer 'two'"),
    ("ppo", "--prompts answer_in_words.jsonl --reward numeric_match", "needs a number"),
    ("ppo", "--prompts damaged.parquet --reward brevity", "Parquet magic bytes not found"),
    ("ppo", "--prompts one_answer.jsonl --reward gsm8k", "and the prompt '2+2=' has none"),
    # Tasks and rewards
    ("ppo", "--prompts no_answer.jsonl", "needs a column answer"),
    ("ppo", "--task sentimant", "not in tasks.py, which has add, sentiment"),
    ("ppo", "--reward better", "FILE.py:FUNCTION, or choose from"),
    ("ppo", "--verifier better", "--verifier better: write it as FILE.py:FUNCTION"),
    ("ppo", "--reward nowhere.py:f", "there is no Python file nowhere.py"),
    ("ppo", "--reward no_python.py:f", "fails on import: SyntaxError"),
    ("ppo", "--reward reward.py:number", "has no function number"),
    ("ppo", "--reward_weights 1 2", "give one per reward, here 1"),
    ("ppo", f"{RUN} --reward reward.py:unknown_now_and_then", "a reward is None"),
    # Pairs
    ("reward_model", "--model small", "--pairs: is needed"),
    ("reward_model", f"{PAIRS} prompts.jsonl", 'line 1: no key "chosen"'),
    # Folders
    ("ppo", f"{RUN} --resume --overwrite", "give one of them"),
    ("plot", "nowhere", "nowhere/metrics.jsonl: can't be read"),
    ("plot", "empty_run", "holds no metrics yet"),
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A folder with the files and the models of the commands."""
    folder = tmp_path_factory.mktemp("inputs")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1}
    bert = BertConfig(vocab_size=257, num_attention_heads=2, **sizes)
    mamba = MambaConfig(vocab_size=257, state_size=4, **sizes)
    save_model(folder / "small", small_gpt2(vocab_size=20), letter_tokenizer())
    save_model(folder / "mixed", small_gpt2(vocab_size=20), byte_tokenizer())
    save_model(folder / "bert", BertForMaskedLM(bert), byte_tokenizer())
    save_model(folder / "mamba", MambaForCausalLM(mamba), byte_tokenizer())
    return folder


@pytest.fixture
def run(inputs, monkeypatch, capsys):
    """Runs a command among the inputs: (exit code, lines on stderr but the progress bar's)."""
    monkeypatch.chdir(inputs)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for folder in ("run", "whole"):
        shutil.rmtree(folder, ignore_errors=True)

    def run(script: str, flags: str) -> tuple[int, list[str]]:
        code = 0
        try:
            run_main(lambda: MAINS[script](flags.split()))
        except SystemExit as e:
            code = e.code
        lines = [line.rpartition("\r")[2] for line in capsys.readouterr().err.split("\n")]
        return code, [x for x in lines if x.strip() and "it/s" not in x and "s/it" not in x]

    return run


def has_one_line(result: tuple[int, list[str]], code: int, words: str) -> None:
    lines = result[1]
    assert result[0] == code, lines
    assert len(lines) == 1 and lines[0].startswith("error: ") and words in lines[0], lines


@pytest.mark.draws
@pytest.mark.parametrize(("script", "flags", "words"), BAD, ids=[f"{s} {f}" for s, f, _ in BAD])
def test_a_bad_input_gets_exit_code_2_and_one_line_and_leaves_no_run(script, flags, words, run):
    has_one_line(run(script, flags), 2, words)
    assert not Path("run/model").exists() and not Path("runs").exists()


# --- Faults on the way: what was computed is kept ---


@contextlib.contextmanager
def fails(name: str, at_call: int, error: Exception):
    """ppo.<name> raises the error at one of its calls."""
    original, calls = getattr(ppo, name), []

    def fail(*args, **kwargs):
        calls.append(None)
        if len(calls) == at_call:
            raise error
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo, name, fail)
        yield


FULL = torch.OutOfMemoryError("CUDA out of memory.\nlines that nobody reads")
FULL_CPU = RuntimeError("[enforce fail] can't allocate memory\nlines that nobody reads")
FULL_CUBLAS = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")
FAULTS = [
    ("--reward reward.py:from_call_6", nothing(), 2, "the reward function from_call_6 raised"),
    ("", fails("sample", 4, FULL), 1, "CUDA out of memory; lower --micro_batch_tokens"),
    ("", fails("policy_loss", 7, FULL_CUBLAS), 1, "cublasCreate; lower --micro_batch_tokens"),
    ("", fails("masked_whiten", 2, FULL_CPU), 1, "[enforce fail] can't allocate memory"),
]
SLOWER = [pytest.param(*fault, marks=pytest.mark.slow) for fault in FAULTS[1:]]


@pytest.mark.parametrize(
    ("flags", "during", "code", "words"),
    [FAULTS[0], *SLOWER],
    ids=["reward", "rollout", "update", "cpu"],
)
def test_after_a_fault_the_run_is_saved_and_resumed_ends_as_if_nothing_had_been(
    flags, during, code, words, run
):
    flags = f"{RUN} {flags}"
    with during:
        result = run("ppo", flags)
    has_one_line(result, code, words)
    steps = [json.loads(x)["step"] for x in Path("run/metrics.jsonl").read_text().splitlines()]
    assert steps and steps == list(range(len(steps)))
    assert f"run is saved up to step {len(steps)}, --resume goes on" in result[1][0]
    reward = Path("reward.py")
    reward.write_text(reward.read_text().replace("calls > 5", "calls > 500"))
    assert run("ppo", f"{flags} --resume") == (0, [])
    assert run("ppo", f"{flags} --output_dir whole") == (0, [])
    weights = [Path(name, "model/model.safetensors").read_bytes() for name in ("run", "whole")]
    assert weights[0] == weights[1]


def test_an_error_that_is_none_of_ours_says_what_is_saved_before_its_traceback(run, capsys):
    """The alarm of a reward, for example, that goes off after the reward has returned."""
    with fails("sample", 2, GeneratorExit("late")), pytest.raises(GeneratorExit):
        run("ppo", RUN)
    assert "step 1: GeneratorExit: late; run is saved up to step 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        FULL_CUBLAS,
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling cublasCreate"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
        RuntimeError("MPS backend out of memory (allocated: 1 GB)"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes."),
        MemoryError(),
    ],
    ids=repr,
)
def test_memory_that_is_missing_in_whatever_words_is_one_line_that_says_what_helps(error, run):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MAINS, "ppo", Mock(side_effect=error))
        has_one_line(run("ppo", ""), 1, "choose a smaller model")
    with pytest.raises(RuntimeError, match="shapes differ"):
        run_main(Mock(side_effect=RuntimeError("shapes differ")))


def test_a_character_that_the_terminal_lacks_is_shown_as_its_number(monkeypatch):
    terminal = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, encoding="cp1252"))
    run_main(lambda: print("é \u2192 \ud800", flush=True))
    assert terminal.getvalue() == b"\xe9 \\u2192 \\ud800\n"


def test_after_a_fault_of_saving_the_model_at_the_end_resume_saves_it(run):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plumbing.run.save_model", Mock(side_effect=OSError("no space left")))
        result = run("ppo", RUN)
    has_one_line(result, 1, "the training is over; run is saved up to step 6, --resume goes on")
    assert result[1][0].endswith("; saving to run failed: no space left")
    assert run("ppo", f"{RUN} --resume") == (0, [])
    assert Path("run/model/model.safetensors").exists()


def test_logits_that_are_not_finite_stop_the_run_with_exit_code_1(run):
    result = run("ppo", f"{RUN} {HUGE} --num_epochs 1 --num_mini_batches 1")
    has_one_line(result, 1, "logits are not finite")
    assert "lower --learning_rate" in result[1][0]
