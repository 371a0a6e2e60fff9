"""The submission as a whole: its scripts, with all its files together, run and must learn.

A function may pass all its checks and still not fit what calls it. So each script makes a short
run of the embedded model in the sandbox; what it has learnt is measured here, on the weights that
it saved. Runs that were handed in are repeated for two steps.
"""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from checks import DRAW, Check, repository_files, shortened
from problems import PROBLEMS, REPOSITORY
from remote import Fault, Student
from sandbox import Ended, Sandbox, folder_for
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoTokenizer, GPT2ForSequenceClassification, GPT2LMHeadModel

from plumbing.loading import eos_token_ids
from plumbing.scoring import encode_prompts
from sampling import generate
from tasks import add_prompts

EVALUATED = 400  # held-out sums


@dataclass(frozen=True)
class Script:
    """A script that is run whole: its flags, and the accuracy that it must reach."""

    name: str
    file: str
    what: str
    flags: str
    bound: float


# The bounds lie between what is right before the first step and the worst of seven runs of the
# repository's own scripts: course/README.md has both.
FEW = "--eval_every 100 --sample_every 100 --num_eval_prompts 400"
SCRIPTS = [
    Script("ppo_script", "ppo.py", "ppo.py runs and learns", f"--num_steps 8 {FEW}", 0.62),
    Script(
        "grpo_script", "grpo.py", "grpo.py runs and learns",
        f"--num_steps 16 --warmup_steps 2 --learning_rate 1e-3 {FEW}", 0.56,
    ),
    Script(
        "rloo_script", "rloo.py", "rloo.py runs and learns",
        f"--num_steps 16 --warmup_steps 2 --learning_rate 1e-3 {FEW}", 0.56,
    ),
    Script(
        "reward_script", "reward_model.py", "reward_model.py runs and learns",
        "--num_steps 20 --num_pairs 2560 --num_eval_pairs 256 --eval_every 100", 0.60,
    ),
]  # fmt: skip
SCRIPT_BY_NAME = {script.name: script for script in SCRIPTS}


@dataclass
class Whole:
    """What a run has left behind, and the right accuracy of its weights."""

    script: Script
    metrics: list[dict]
    accuracy: float


def it_runs_to_its_end(run: Whole) -> None:
    """All files of the submission together: the command line has to work, and a line of metrics
    has to come for each step and for the end."""
    steps = int(run.script.flags.split()[1])
    found = [line.get("step") for line in run.metrics]
    assert found == [*range(steps + 1)], f"metrics of the steps {found[:20]}, not 0 to {steps}"


def what_it_saved_has_learnt(run: Whole) -> None:
    """The weights in model/ are evaluated by the grader, on held-out sums or pairs."""
    bound = run.script.bound
    assert run.accuracy >= bound, f"an accuracy of {run.accuracy:.3f}, less than {bound}"


def its_metrics_are_true(run: Whole) -> None:
    """Before the first update the KL is 0, and the loss of a reward model log 2. The last accuracy
    in metrics.jsonl has to be that of the weights."""
    first = run.metrics[0]
    if run.script.file == "reward_model.py":
        assert abs(first["loss/pairs"] - math.log(2)) < 0.01, f"loss {first['loss/pairs']:.3f}"
        return
    kl, told = first["objective/kl"], run.metrics[-1]["eval/accuracy"]
    assert kl is None or abs(kl) < 1e-3, f"objective/kl is {kl:.3g} before the first update"
    # Four standard errors of the difference between two samples.
    error = 4 * math.sqrt(2 * 0.25 / EVALUATED)
    off = abs(told - run.accuracy)
    assert off < error, f"eval/accuracy {told:.3f}, of the weights {run.accuracy:.3f}"


SCRIPT_CHECKS = [
    Check(4, it_runs_to_its_end), Check(4, what_it_saved_has_learnt), Check(2, its_metrics_are_true)
]  # fmt: skip
METRICS, SAMPLES, MODEL = "run/metrics.jsonl", "run/samples.jsonl", "run/model/model.safetensors"


def run_script(
    script: Script, files: dict[str, bytes], sandbox: Sandbox, time_limit: float
) -> tuple[list[str], list[str]]:
    """([fault of each check, '' where it passes], what the process did that no answer needs)."""
    flags = f"{script.flags} --seed {DRAW.salt % 10_000}".split()
    found, fault, notes = _run(script.file, flags, [METRICS, MODEL], files, sandbox, time_limit)
    if fault:
        return [fault] * len(SCRIPT_CHECKS), notes
    try:
        # A step may be left out of a file, but no line may be anything else.
        metrics = lines_of(found.get(METRICS))
        run = Whole(script, metrics, accuracy_of(script, found.get(MODEL)))
    except Exception as e:  # data of another form
        return [shortened(f"what it saved can't be read: {type(e).__name__}: {e}")] * 3, notes
    verdicts = []
    for item in SCRIPT_CHECKS:
        try:
            item.run(run)
            verdicts.append("")
        except AssertionError as e:
            verdicts.append(shortened(str(e)))
        except (KeyError, TypeError, IndexError, ValueError) as e:
            verdicts.append(shortened(f"metrics.jsonl has no {e}"))
    return verdicts, notes


def _run(
    file: str, flags: list[str], wanted: list[str], files: dict[str, bytes], sandbox: Sandbox,
    time_limit: float,
) -> tuple[dict[str, bytes], str, list[str]]:  # fmt: skip
    """({path: data} of what a run of a script left, why it failed or '', notes)."""
    with folder_for(files) as folder:
        process = sandbox.start(folder, time_limit)
        student = Student(process, file)
        try:
            answer = student.child.script(file, [*flags, "--output_dir", "run"], wanted)
            code, found = int(answer["code"]), {}
            for name, data in answer["files"].items():
                found[str(name)] = data.numpy().tobytes() if data is not None else b""
            fault = f"it ended with code {code}: {process.last_words()}" if code else ""
            return found, shortened(fault), student.notes
        except (Ended, Fault) as e:
            return {}, shortened(str(e)), student.notes
        except (KeyError, TypeError, ValueError, AttributeError):
            return {}, "the answer has another form", student.notes
        finally:
            process.close()


def lines_of(data: bytes | None) -> list[dict]:
    """The objects of a .jsonl file. Raises ValueError."""
    if not data:
        raise ValueError("there is none, or it is empty")
    found = [json.loads(line) for line in data.decode().splitlines()]
    if not all(isinstance(line, dict) for line in found):
        raise ValueError("a line is no object")
    return found


# --- What the weights can do ---


def accuracy_of(script: Script, data: bytes | None) -> float:
    """The share of held-out sums, or pairs, that the saved weights get right."""
    if not data:
        raise ValueError("there are no weights in model/")
    weights = safetensors.torch.load(data)
    config = AutoConfig.from_pretrained(REPOSITORY / "tiny")
    if script.file == "reward_model.py":
        config.num_labels = 1
        return share_of_pairs(_with(GPT2ForSequenceClassification(config), weights))
    return share_of_sums(_with(GPT2LMHeadModel(config), weights))


def _with(model: nn.Module, weights: dict[str, torch.Tensor]) -> nn.Module:
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if set(missing) - {"lm_head.weight"} or unexpected:
        raise ValueError("the weights are those of another model")
    return model.eval()


def held_out() -> tuple[object, list[dict]]:
    tokenizer = AutoTokenizer.from_pretrained(REPOSITORY / "tiny")
    rows = add_prompts()[1]
    return tokenizer, random.Random(DRAW.salt).sample(rows, EVALUATED)


def share_of_sums(model: nn.Module) -> float:
    """Of one sampled completion for each sum."""
    tokenizer, rows = held_out()
    ids, mask = encode_prompts(tokenizer, rows)
    ends = eos_token_ids(model, tokenizer)
    generator = torch.Generator().manual_seed(DRAW.salt)
    options = {"eos_token_ids": ends, "pad_token_id": 0, "generator": generator}
    found = generate(model, ids, mask, max_new_tokens=5, **options)
    completions = found.tokens[:, ids.shape[1] :]
    tokens = [row[m].tolist() for row, m in zip(completions, found.completion_mask)]
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return sum(text.strip() == row["answer"] for text, row in zip(texts, rows)) / len(rows)


def share_of_pairs(model: nn.Module) -> float:
    """Of a right and a wrong sum, one digit off, which has the higher score."""
    tokenizer, rows = held_out()
    texts, rng = [], random.Random(DRAW.salt)
    for row in rows:
        answer = row["answer"]
        place = rng.randrange(len(answer))
        digit = rng.choice([d for d in "123456789" if d != answer[place]])
        pair = answer, answer[:place] + digit + answer[place + 1 :]
        texts += [[*tokenizer(row["prompt"] + x).input_ids, tokenizer.eos_token_id] for x in pair]
    lengths = torch.tensor([len(text) for text in texts])
    # No mask: of a causal model no token sees the padding to its right.
    tokens = pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
    with torch.no_grad():
        hidden = model.transformer(tokens).last_hidden_state[range(len(texts)), lengths - 1]
        scores = model.score(hidden).view(-1, 2)
    return (scores[:, 0] > scores[:, 1]).double().mean().item()


# --- Files ---


def files_of(texts: dict[str, str], modules: dict[str, str]) -> dict[str, bytes]:
    """All files of a submission, and the given ones."""
    theirs = {path: text.encode("utf-8", "replace") for path, text in (modules | texts).items()}
    problems = {problem.file for problem in PROBLEMS}
    given = {path: data for path, data in repository_files().items() if path not in problems}
    return given | theirs


# --- Runs that were handed in ---

RUNS = 6  # that are repeated, at most
REPEATED = """seed num_steps learning_rate warmup_steps micro_batch_size max_grad_norm lora_r
bf16 digits num_generations max_new_tokens temperature prompts_per_step rollout_batch_size kl_coef
num_epochs num_mini_batches clip_range entropy_coef num_eval_prompts kl_estimator
missing_eos_penalty whiten_rewards gamma lam clip_range_value vf_coef clip_range_high loss_type
scale_rewards importance_sampling_level mask_truncated_completions cispo_bound normalize_advantages
reward_clip_range num_pairs num_eval_pairs label_noise pairs_per_step center_rewards_coef""".split()
DIFFERS = re.compile(r"time/|memory/|tokens_per_second|lr$|_se$|reliab")


def runs_of(folder: Path) -> list[Path]:
    """The folders of runs that were handed in, in runs/."""
    found = sorted(path.parent for path in folder.glob("runs/*/config.json"))
    return [path for path in found if not path.is_symlink()][:RUNS]


def repeated(run: Path, files: dict[str, bytes], sandbox: Sandbox, time_limit: float) -> str:
    """What the first two steps of a run that was handed in are when it is made again, with the
    submission's own scripts: one line.
    """
    try:
        config, theirs, samples = (_read(run / name) for name in RUN_FILES)
        config, theirs = json.loads(config), lines_of(theirs)
        flags = _flags(config)
        script = SCRIPT_BY_NAME[f"{config['script']}_script".replace("_model", "")]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        return f"{run.name}: can't be read ({type(e).__name__}: {str(e)[:100]})"
    wanted = [METRICS, SAMPLES]
    found, fault, _ = _run(script.file, flags, wanted, files, sandbox, time_limit)
    if fault:
        return f"{run.name}: the repetition fails: {fault}"
    try:
        ours = lines_of(found.get(METRICS))
        for step in (0, 1):
            [first], [second] = (
                [x for x in lines if x.get("step") == step] for lines in (theirs, ours)
            )
            for name in sorted(first.keys() & second.keys()):
                a, b = first[name], second[name]
                # On another machine a token at the edge may be drawn differently.
                if not DIFFERS.search(name) and not _near(a, b):
                    return f"{run.name}: step {step}, {name}: handed in {a}, made again {b}"
        texts = [
            [x.get("completion") or x.get("chosen") for x in lines if x.get("step") == 0]
            for lines in (lines_of(samples), lines_of(found.get(SAMPLES)))
        ]
        equal = sum(a == b for a, b in zip(*texts)) / max(1, len(texts[1]))
        if equal < 0.95:
            return f"{run.name}: {equal:.0%} of the samples of step 0 are those that come again"
    except (ValueError, TypeError, AttributeError) as e:
        return f"{run.name}: can't be compared ({type(e).__name__}: {str(e)[:100]})"
    return f"{run.name}: its first two steps come again"


RUN_FILES = ("config.json", "metrics.jsonl", "samples.jsonl")


def _read(path: Path) -> bytes:
    if not path.is_file() or path.is_symlink() or path.stat().st_size > 16 * 2**20:
        raise ValueError(f"{path.name} is no file, or too large")
    return path.read_bytes()


def _flags(config: dict) -> list[str]:
    """The flags of the run, for two steps of it; paths and devices are no part of them."""
    flags = []
    for name in REPEATED:
        value = config.get(name)
        if isinstance(value, list):
            value = " ".join(str(float(x)) for x in value)
        if value not in (None, "") and name != "num_steps":
            flags += [f"--{name}", *str(value).lower().split()[:4]]
    return [*flags, "--num_steps", "2", "--eval_every", "2"]


def _near(a: object, b: object) -> bool:
    if isinstance(a, float | int) and isinstance(b, float | int):
        return abs(a - b) <= 0.02 + 0.02 * max(abs(a), abs(b))
    return a == b
