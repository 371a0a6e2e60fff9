"""Bad inputs and faults, and the one line that each of them gets.

  python tests/faults.py      # runs them all and writes docs/evidence/errors.md

test_faults.py runs the same list.
"""

import contextlib
import io
import json
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from unittest import mock

REPOSITORY = Path(__file__).parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

import torch
from small import byte_tokenizer, letter_tokenizer, save_model, small_gpt2
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2ForSequenceClassification,
    MambaConfig,
    MambaForCausalLM,
)

import grpo
import ppo
import reward_model
import rloo
from plumbing.runs import run_main
from tools import inspect_reward, plot

RUN = (
    "--model small --prompts prompts.jsonl --reward reward.py:spread --num_steps 6"
    " --prompts_per_step 2 --num_generations 2 --max_new_tokens 4 --num_eval_prompts 2"
    " --save_every 2 --output_dir run --bf16 false"
)
REWARDS = '''
calls = 0

def spread(completions, completion_ids, **columns):
    return [sum(ids) % 7 - 3.0 for ids in completion_ids]

def from_step_3(completions, completion_ids, **columns):
    """Two calls are those of the evaluation before step 0."""
    global calls
    calls += 1
    if calls > 5:
        raise KeyError("verdict")
    return spread(completions, completion_ids)

def huge(completions, completion_ids, **columns):
    return [1e38 * (sum(ids) % 7 - 3.0) for ids in completion_ids]

def divides_by_zero(completions, **columns):
    raise ZeroDivisionError("division by zero")

def too_few(completions, **columns):
    return [1.0]

def infinite(completions, **columns):
    return [float("inf")] * len(completions)

def words(completions, **columns):
    return ["good"] * len(completions)

def of_a_column(completions, verdict):
    return verdict

def unknown_now_and_then(completions, **columns):
    return [1.0, None] * (len(completions) // 2)

def unknown(completions, **columns):
    return [None] * len(completions)

number = 5
'''


@dataclass
class Case:
    """A command, in a folder of its own, and part of the line that it must end with."""

    what: str
    flags: str
    message: str
    code: int = 2  # bad input; 1 for a fault
    script: ModuleType = ppo
    files: dict[str, str] = field(default_factory=dict)
    before: Callable[[], None] | None = None  # what has happened before the command
    during: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    saved: int | None = None  # steps after which --resume must go on, and end as if nothing was


def run_again(flags: str = RUN, script: ModuleType = ppo) -> Callable[[], None]:
    """A run that is there already."""
    return lambda: run(script, flags.split())


def damage(cut: bool = False) -> Callable[[], None]:
    """A run whose checkpoint has a bad byte, or lacks its second half."""

    def do() -> None:
        run(ppo, RUN.split())
        path = Path("run/checkpoint/state.pt")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data[: len(data) // 2] if cut else data)

    return do


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A disk that is full when a file has `size` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def out_of_memory(name: str, at_call: int, message: str) -> Callable:
    """ppo.<name> fails at one of its calls as CUDA, or a CPU, does."""

    def during() -> contextlib.AbstractContextManager:
        original, calls = getattr(ppo, name), []

        def fail(*args: object, **kwargs: object) -> object:
            calls.append(None)
            if len(calls) == at_call:
                kind = torch.OutOfMemoryError if "CUDA" in message else RuntimeError
                raise kind(f"{message}\nlines that nobody reads")
            return original(*args, **kwargs)

        return mock.patch.object(ppo, name, fail)

    return during


def save(name: str, model: Callable) -> Callable[[], None]:
    return lambda: save_model(Path(name), model(), byte_tokenizer())


def classifier(labels: int) -> GPT2ForSequenceClassification:
    config = GPT2Config(vocab_size=257, n_embd=16, n_layer=1, n_head=2, num_labels=labels)
    return GPT2ForSequenceClassification(config)


def bert() -> BertForMaskedLM:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForMaskedLM(BertConfig(vocab_size=257, **sizes))


def mamba() -> MambaForCausalLM:
    config = MambaConfig(vocab_size=257, hidden_size=32, num_hidden_layers=1, state_size=4)
    return MambaForCausalLM(config)


PAIRS = "--model small --pairs pairs.jsonl --num_steps 2 --output_dir run"


def pairs(*rows: object) -> dict[str, str]:
    """The file of pairs."""
    return {"pairs.jsonl": "\n".join(map(json.dumps, rows))}


GOOD = {"prompt": "a", "chosen": "b", "rejected": "c"}
NAN = " --learning_rate 1e30 --max_grad_norm 1e30"
CASES = [
    # Pairs
    Case(
        "a pair with nothing rejected", PAIRS, 'pairs.jsonl, line 2: no key "rejected"',
        script=reward_model, files=pairs(GOOD, {"prompt": "a", "chosen": "b"}),
    ),
    Case(
        "text beside messages in a pair", PAIRS, "must be both text or both messages",
        script=reward_model,
        files=pairs(GOOD | {"rejected": [{"role": "assistant", "content": "c"}]}),
    ),
    Case(
        "messages without content in a pair", PAIRS, '"chosen" is neither text nor messages',
        script=reward_model, files=pairs(GOOD | {"chosen": [{"role": "assistant"}]}),
    ),
    Case(
        "a margin that is no number", PAIRS, "\"margin\" is 'big', and must be a number",
        script=reward_model, files=pairs(GOOD | {"margin": "big"}),
    ),
    Case(
        "pairs of equal texts alone", PAIRS, "no pair is left to train on",
        script=reward_model, files=pairs(*[GOOD | {"rejected": "b"}] * 12),
    ),
    Case("a line of pairs that isn't JSON", PAIRS, "pairs.jsonl, line 1: not JSON",
         script=reward_model, files={"pairs.jsonl": "chosen, rejected"}),
    Case("no pairs in the file of pairs", PAIRS, "pairs.jsonl: holds no pairs", script=reward_model,
         files={"pairs.jsonl": ""}),
    Case("a model without pairs", "--model small", "--pairs: is needed", script=reward_model),
    # Flags
    Case("a flag misspelt", "--learning_rat 1", "did you mean --learning_rate?"),
    Case("a flag of GRPO given to PPO", "--epsilon_high 1", "unknown flag --epsilon_high"),
    Case("an abbreviated flag", "--learn 1e-3", "unknown flag --learn:"),
    Case("a word without a flag", "stray", "'stray' belongs to no flag"),
    Case("a word for a number", "--num_steps many", "--num_steps: invalid int value: 'many'"),
    Case("a word for a switch", "--overwrite maybe", "must be true or false, not 'maybe'"),
    Case("an unknown choice", "--kl_estimator k9", "--kl_estimator: invalid choice: 'k9'"),
    Case("temperature 0", "--temperature 0", "--temperature 0.0: must be greater than 0"),
    Case("a temperature that overflows", "--temperature 1e-46", "too close to 0"),
    Case("NaN for a number", "--kl_coef nan", "--kl_coef nan: must be a finite number"),
    Case("a negative learning rate", "--learning_rate -1", "must be greater than 0"),
    Case("lambda above 1", "--lam 1.5", "--lam 1.5: must be between 0 and 1"),
    Case("no steps", "--num_steps 0", "--num_steps 0: must be greater than 0"),
    Case(
        "minibatches that don't divide the batch",
        "--prompts_per_step 12 --num_mini_batches 5",
        "doesn't divide the 12 completions of a step",
    ),
    Case("groups of one", "--num_generations 1", "must be 2 or more", script=grpo),
    Case(
        "a rollout batch smaller than a group",
        "--num_generations 4 --rollout_batch_size 2",
        "must hold the 4 completions",
    ),
    Case("a CISPO bound below 1", "--loss_type cispo --cispo_bound 0.2", "1 or greater", script=grpo),
    Case("a clip range for CISPO", "--loss_type cispo --clip_range_high 0.2", "--cispo_bound", script=grpo),
    Case("a clip range upside down", "--reward_clip_range 2 1", "the lowest", script=rloo),
    Case("a device that isn't there", "--device cuda:99", "--device cuda:99: this machine"),
    Case("an empty stop string", "--stop", "--stop: expected at least one argument"),
    Case("a negative entropy bonus", "--entropy_coef -1", "--entropy_coef -1.0: must be 0 or greater"),
    Case("a cap of 0", "--importance_cap 0", "--importance_cap 0.0: must be greater than 0"),
    Case("a negative number of rounds", "--dynamic_sampling -1", "must be 0 or greater", script=grpo),
    Case(
        "a length penalty longer than a completion",
        "--overlong_buffer 9",
        "longer than the longest completion, --max_new_tokens 5",
        script=grpo,
    ),
    Case("no completions in an evaluation", "--eval_generations 0", "must be greater than 0"),
    Case(
        "more completions of a prompt than a batch",
        "--eval_generations 300",
        "must hold the 300 completions of a prompt (eval_generations)",
    ),
    Case("a negative seed", "--seed -1", "--seed -1: must be between 0 and"),
    Case("a completion as long as the context", "--max_new_tokens 128", "the model's context is 128"),
    Case("a prompt that leaves no room", "--max_new_tokens 125", "leaves no room for 125 new ones"),
    Case("an adapter to merge, and none there", "--merge_adapter", "no adapter to merge"),
    # Models
    Case("a model that isn't there", "--model nowhere/at-all", "or use --model tiny"),
    Case("an empty folder for a model", "--model empty", "can't be loaded", before=lambda: Path("empty").mkdir()),
    Case("BERT", "--model m", "not a causal language model", before=save("m", bert)),
    Case("a model without a KV cache", "--model m", "key-value cache", before=save("m", mamba)),
    Case(
        "a tokenizer of another model",
        "--model m --max_new_tokens 2",
        "don't belong together",
        before=save("m", lambda: small_gpt2(vocab_size=20)),
    ),
    Case("a value model from no reward model", "--value_init reward_model", "needs --reward_model"),
    Case("a reward model of two labels", "--reward_model m", "has 2 labels", before=save("m", lambda: classifier(2))),
    Case("a language model as reward model", "--reward_model small", "has 2 labels"),
    # Prompts
    Case("no such file", "--prompts nowhere.jsonl", "nowhere.jsonl: can't be read"),
    Case("an empty file", "--prompts p.jsonl", "holds no prompts", files={"p.jsonl": "\n"}),
    Case("a line that isn't JSON", "--prompts p.jsonl", "p.jsonl, line 2: not JSON", files={"p.jsonl": '{"prompt": "x"}\n{"prompt": \n'}),
    Case("a line without a prompt", "--prompts p.jsonl", 'line 1: no key "prompt"', files={"p.jsonl": '{"question": "x"}\n'}),
    Case("a message without content", "--prompts p.jsonl", 'a message has no "content"', files={"p.jsonl": '{"prompt": [{"role": "user"}]}\n'}),
    Case("messages for a model without a template", "--prompts p.jsonl --model small --task sentiment", "no chat template", files={"p.jsonl": '{"prompt": [{"role": "user", "content": "x"}]}\n'}),
    Case("a CSV file without a prompt column", "--prompts p.csv", 'row 1: no key "prompt"', files={"p.csv": "question,answer\n1+1,2\n"}),
    Case("a damaged Parquet file", "--prompts p.parquet", "--prompts p.parquet", files={"p.parquet": "nothing"}),
    Case("sums without answers", "--prompts p.jsonl", 'needs a key "answer"', files={"p.jsonl": '{"prompt": "1+1="}\n'}),
    Case("a column that isn't there", "--prompts p.jsonl --prompt_column qestion", "there are question, answer: did you mean question?", files={"p.jsonl": '{"question": "1+1=", "answer": "2"}\n'}),
    Case("a column of a template that isn't there", "--prompt_template {question}", "--prompt_template: no column question, there are prompt, answer"),
    Case("a template without a column", "--prompt_template Solve:", "names no column"),
    Case("a system prompt for a model without a template", "--system_prompt Hello", "no chat template; write the text into --prompt_template"),
    Case("a subset of a file", "--prompts p.jsonl --subset main", "p.jsonl is one file, and has no subsets", files={"p.jsonl": '{"prompt": "1+1=", "answer": "2"}\n'}),
    Case("a split of a file", "--prompts p.jsonl --eval_split test", "p.jsonl is one file, and has no splits", files={"p.jsonl": '{"prompt": "1+1=", "answer": "2"}\n'}),
    Case("a split of nothing", "--eval_split test", "needs --prompts or --eval_prompts"),
    Case("held-out prompts that aren't there", "--eval_prompts nowhere.jsonl", "--eval_prompts nowhere.jsonl: can't be read"),
    # Tasks and rewards
    Case("a verifier that is no file", "--verifier better", "--verifier better: write it as FILE.py:FUNCTION"),
    Case("an answer without a number", "--prompts p.jsonl --reward gsm8k", "finds no number in the answer 'two'", files={"p.jsonl": '{"prompt": "1+1=", "answer": "two"}\n'}),
    Case("a task that isn't there", "--task sing", "--task sing: not in tasks.py, which has add, sentiment"),
    Case("a task misspelt", "--task sentimant", "did you mean sentiment?"),
    Case("a reward that is no file", "--reward better", "FILE.py:FUNCTION, or choose from"),
    Case("a reward file that isn't there", "--reward nowhere.py:f", "there is no file nowhere.py"),
    Case("a reward file that doesn't parse", "--reward r.py:f", "fails on import: SyntaxError", files={"r.py": "def f(:\n"}),
    Case("a reward file without the function", "--reward reward.py:fun", "has no function fun"),
    Case("a reward that isn't a function", "--reward reward.py:number", "has no function number"),
    Case("two weights for one reward", "--reward_weights 1 2", "--reward_weights [1.0, 2.0]: give one per reward, here 1"),
    Case("a reward that raises at once", f"{RUN} --reward reward.py:divides_by_zero", "divides_by_zero raised ZeroDivisionError"),
    Case("a reward of too few values", f"{RUN} --reward reward.py:too_few", "returned 1 values for"),
    Case("an infinite reward", f"{RUN} --reward reward.py:infinite", "returned inf for"),
    Case("words for a reward", f"{RUN} --reward reward.py:words", "must return a list of numbers"),
    Case("a reward of a column that isn't there", f"{RUN} --reward reward.py:of_a_column", "'verdict'"),
    Case("no score for one of PPO's completions", f"{RUN} --reward reward.py:unknown_now_and_then", "None"),
    Case("no score for PPO", f"{RUN} --reward reward.py:unknown", "None"),
    Case("a format without its pattern", f"{RUN} --reward format_match", "'pattern'"),
    # The folder of the run
    Case("a folder that holds a run", RUN, "already holds a run: give --resume", before=run_again()),
    Case("a folder that holds something else", f"{RUN} --output_dir small", "not a run"),
    Case("a folder that can't be made", f"{RUN} --output_dir reward.py/run", "reward.py/run: can't be"),
    Case("resume and overwrite", f"{RUN} --resume --overwrite", "give one of them"),
    Case("resume with another setting", f"{RUN} --resume --gamma 0.5", "--gamma 0.5: the run in run has 1.0", before=run_again()),
    Case("resume with another script", f"{RUN} --resume", "holds a run of ppo.py", script=rloo, before=run_again()),
    Case("resume, the checkpoint damaged", f"{RUN} --resume", "run/checkpoint/state.pt is damaged", before=damage()),
    Case("resume, the checkpoint cut off", f"{RUN} --resume", "run/checkpoint/state.pt is damaged", before=damage(cut=True)),
    Case("resume, metrics cut off", f"{RUN} --resume", "has lost lines", before=lambda: (run_again()(), Path("run/metrics.jsonl").write_text(""))),
    # Faults on the way: what was computed is kept
    Case("a reward that raises at step 3", f"{RUN} --reward reward.py:from_step_3 --record_tokens false", "step 3: the reward function from_step_3 raised KeyError", saved=3),
    Case("a gradient that isn't finite", f"{RUN} --reward reward.py:huge", "lower --learning_rate", 1, rloo),
    Case("weights that aren't finite", f"{RUN}{NAN}", "--learning_rate", 1),
    Case("CUDA out of memory in the rollout of step 3", RUN, "step 3: CUDA out of memory; lower --micro_batch_tokens", 1, during=out_of_memory("sample", 4, "CUDA out of memory."), saved=3),
    Case("CUDA out of memory in the update of step 3", RUN, "is saved up to step 3", 1, during=out_of_memory("policy_loss", 7, "CUDA out of memory."), saved=3),
    Case("no memory left on the CPU", RUN, "step 1: [enforce fail] can't allocate memory", 1, during=out_of_memory("masked_whiten", 2, "[enforce fail] can't allocate memory"), saved=1),
    Case("a disk full when a checkpoint is due", RUN, "run/checkpoint/state.pt can't be written", 1, during=lambda: files_of_at_most(30_000)),
    Case("a disk full at a line of metrics", f"{RUN} --save_every 100 --record_tokens false", "metrics.jsonl can't be written", 1, during=lambda: files_of_at_most(3_000)),
    # The other commands
    Case("a plot of no run", "nowhere", "nowhere/metrics.jsonl: can't be read", script=plot),
    Case("a plot of an empty run", "here", "holds no metrics yet", script=plot, files={"here/metrics.jsonl": ""}),
    Case("a plot in an unknown format", "here --output p.xyz", "--output p.xyz", script=plot, files={"here/metrics.jsonl": '{"step": 0, "objective/kl": 1.0}\n'}),
    Case("an inspection of single completions", "--num_generations 1", "2 or more", script=inspect_reward),
    Case("an inspection of nothing", "--max_new_tokens 0", "must be greater than 0", script=inspect_reward),
    Case("an inspection with a negative seed", "--seed -1", "--seed -1: must be between 0", script=inspect_reward),
]  # fmt: skip


def run(script: ModuleType, args: list[str]) -> tuple[int, list[str]]:
    """Run a script's main in this process: (exit code, lines on stderr but the progress bar's)."""
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            run_main(lambda: script.main(args))
            code = 0
        except SystemExit as e:
            code = e.code
    lines = [line.rpartition("\r")[2] for line in errors.getvalue().split("\n")]
    return code, [
        line for line in lines if line.strip() and "it/s" not in line and "s/it" not in line
    ]


@contextlib.contextmanager
def folder_of(case: Case) -> Iterator[None]:
    """A folder with a small model, prompts and rewards, and what the case adds; as the current."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            save_model(Path("small"), small_gpt2(vocab_size=20), letter_tokenizer())
            prompts = ["x", "yy y", "zzz", "w", "the", "a b", "q", "rs"]
            lines = [json.dumps({"prompt": prompt}) for prompt in prompts]
            Path("prompts.jsonl").write_text("\n".join(lines))
            for name, text in {"reward.py": REWARDS, **case.files}.items():
                Path(name).parent.mkdir(exist_ok=True)
                Path(name).write_text(text)
            if case.before is not None:
                case.before()
            yield
        finally:
            os.chdir(here)


def line_of(case: Case) -> str:
    """Run the case in its folder; the one line that it got. Raises AssertionError."""
    with case.during():
        code, lines = run(case.script, case.flags.split())
    text = "\n".join(lines)
    assert code == case.code, f"exit code {code}: {text}"
    assert len(lines) == 1 and lines[0].startswith("error: "), text
    assert case.message in lines[0], text
    return lines[0].removeprefix("error: ")


INTRODUCTION = """# Bad inputs and faults

Each row is a mistake of a user or a fault of the machine, and the line that the run ends with. There
are {count} of them. `python tests/faults.py` makes each one, reads what is printed, and writes this
page; tests/test_faults.py makes each one again. All print one line on stderr, `error: ` and the text
below, without a traceback. The exit code is 2 for a bad input and 1 for a fault. Memory that runs out
and a full disk are imitated. Warnings are in [debugging.md](../debugging.md) and [metrics.md](../metrics.md).

| what | code | line |
|---|---|---|
"""


def main() -> None:
    rows = []
    for case in CASES:
        with folder_of(case):
            line = line_of(case).replace(f"{Path.cwd()}/", "").replace("|", "\\|")
        rows.append(f"| {case.what} | {case.code} | {line} |")
        print(rows[-1], flush=True)
    head = INTRODUCTION.format(count=len(rows))
    (REPOSITORY / "docs" / "evidence" / "errors.md").write_text(head + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
