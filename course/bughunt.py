"""A copy of one script with one bug in it, the curve that it makes, and a sealed answer.

  python course/bughunt.py OUT --seed 3              # the same number, the same bug
  python course/bughunt.py OUT --check ppo.py:212    # is this the line? or plumbing/forward.py:12
  python course/bughunt.py --reveal OUT              # the answer, for whoever handed it out
  python course/bughunt.py --measure                 # which bugs show, in what: symptoms.json

The bugs are those of tests/mutations.py that show in a metric of a short run: outside of what five
seeds of the right code do. The seal is a salted hash: it keeps from looking, not from trying.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

COURSE = Path(__file__).resolve().parent
REPOSITORY = COURSE.parent
sys.path[:0] = [str(COURSE), str(REPOSITORY), str(REPOSITORY / "tests")]

import mutations
from labs import student_t
from make import FILES, copy_files
from reasons import REASONS

SYMPTOMS = COURSE / "symptoms.json"
# Short runs whose flags bring out what the defaults leave at rest.
SMALL = "--num_eval_prompts 256 --device cpu"
JOBS = {
    "ppo": f"{SMALL} --num_steps 25 --eval_every 25 --prompts_per_step 64 --gamma 0.95"
    " --temperature 1.2",
    "grpo": f"{SMALL} --num_steps 50 --eval_every 50 --prompts_per_step 8 --kl_coef 0.05"
    " --num_mini_batches 2 --temperature 1.2 --micro_batch_tokens 64",
    "rloo": f"{SMALL} --num_steps 50 --eval_every 50 --prompts_per_step 16 --num_mini_batches 2"
    " --temperature 1.2 --micro_batch_tokens 64",
}
# By their names in tests/mutations.py, those that somebody could have written, by the script in
# which they show.
BUGS = {
    "ppo": [
        "mean over padding too", "whitening divides by the variance",
        "whitening shifts the mean the wrong way", "GAE without the value of the state",
        "GAE bootstraps from the reward",
        "value model and policy share their weights",
        "the score in the last column, not on the last token", "minimum for maximum in PPO's clip",
        "no clip", "PPO's ratio upside down", "values clipped around 0",
        "no half in the value loss", "advantages not whitened",
        "PPO sums over tokens and averages over rows", "the value loss is maximised",
        "constant learning rate in PPO", "returns from whitened advantages",
        "num_mini_batches adds no steps",
        "the value model learns advantages",
    ],
    "grpo": [
        "positions start at 1", "temperature missing from the log-probs",
        "logits times the temperature", "the completions of a prompt are not consecutive",
        "EOS is masked out", "the mean of the batch for that of the group",
        "GRPO divides by the variance", "GRPO's ratio upside down", "GRPO rewards the KL",
        "constant learning rate in GRPO",
    ],
    "rloo": [
        "KL turned round", "the reference is the policy itself", "the baseline divides by G",
        "the baseline holds its own reward", "constant learning rate in RLOO",
    ],
}  # fmt: skip
# The other files in which a bug may lie.
SHARED = ["common.py", "sampling.py", "plumbing/forward.py", "plumbing/models.py"]
# Those of evaluations are left out: a short run has two of them, and two points make no curve.
METRICS = [
    "objective/scores", "objective/kl", "policy/entropy_avg", "length/mean",
    "val/ratio_max_dev_first", "val/ratio", "policy/clipfrac_avg", "policy/approxkl_avg",
    "val/explained_variance", "loss/value_avg", "loss/policy_avg", "grad_norm",
    "val/num_eos_tokens", "length/truncated_frac", "lr", "objective/entropy",
]  # fmt: skip


def candidates() -> Iterator[tuple[str, str, str, str]]:
    """(bug, script, file, the file's text with the bug) of each of BUGS."""
    by_name = {bug[3]: bug for bug in mutations.MUTATIONS}
    for script, bugs in BUGS.items():
        for bug in bugs:
            path, text = mutations.planted(*by_name[bug])
            yield bug, script, path.relative_to(REPOSITORY).as_posix(), text


def curves(script: str, seed: int, edit: tuple[str, str] | None = None) -> dict | None:
    """{metric: a value per step} of the short run of a script, with an edit (file, its text); None
    where the run fails.
    """
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "code"
        copy_files(folder, [], 0)
        if edit is not None:
            file, text = edit
            (folder / file).write_text(text, encoding="utf-8")
        command = [sys.executable, f"{script}.py", *JOBS[script].split(), "--output_dir", "run"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        process = subprocess.run(
            [*command, "--seed", str(seed)], cwd=folder, env=environment, capture_output=True
        )
        if process.returncode != 0:
            return None
        text = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return {name: [line[name] for line in lines if line.get(name) is not None] for name in METRICS}


def ends(curve: list[float]) -> tuple[float, float]:
    """The means of the first three and of the last five steps."""
    return statistics.mean(curve[:3]), statistics.mean(curve[-5:])


def symptom(buggy: dict, right: list[dict]) -> tuple[str, float] | None:
    """The metric that leaves the range of the right runs most clearly, and by how many standard
    deviations; None where none does beyond chance.
    """
    best = None
    for name in METRICS:
        rows = [run[name] for run in right if run[name]]
        if not rows or not buggy[name] or len(buggy[name]) < 2:
            continue
        for end in (0, 1):
            values = [ends(row)[end] for row in rows]
            mean, std = statistics.mean(values), statistics.stdev(values)
            distance = abs(ends(buggy[name])[end] - mean)
            # Visible: also a sizeable part of what the curve itself covers.
            span = max(map(max, rows)) - min(map(min, rows))
            room = student_t(0.995, len(values) - 1) * std * (1 + 1 / len(values)) ** 0.5
            least = 0.05 if "frac" in name or "accuracy" in name else 1e-6
            if distance > max(room, 0.15 * span, 0.02 * abs(mean), least):
                z = min(distance / (std + 0.02 * span + 1e-9), 99.0)
                if best is None or z > 1.5 * best[1]:  # else the metric that is more telling
                    best = name, z
    return best


def measure() -> None:
    """Run all candidates, and write those with a symptom to symptoms.json."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        seeds = {s: [pool.submit(curves, s, seed) for seed in range(5)] for s in JOBS}
        runs = [
            (bug, script, file, pool.submit(curves, script, 0, (file, text)))
            for bug, script, file, text in candidates()
        ]
        right = {script: [f.result() for f in futures] for script, futures in seeds.items()}
        found = {"right": {}, "bugs": {}}
        used = set()
        for bug, script, file, future in runs:
            buggy = future.result()
            seen = None if buggy is None else symptom(buggy, right[script])
            print(f"{file:20} {bug:60} {seen or ('fails' if buggy is None else '')}", flush=True)
            if seen is not None:
                name, z = seen
                curve = [round(value, 4) for value in buggy[name]]
                found["bugs"][bug] = {
                    "script": script, "file": file, "metric": name, "z": round(z, 1), "curve": curve
                }  # fmt: skip
                used.add((script, name))
    for script, name in sorted(used):
        rows = [[round(value, 4) for value in run[name]] for run in right[script]]
        found["right"].setdefault(script, {})[name] = rows
    SYMPTOMS.write_text(json.dumps(found) + "\n")
    print(f"{len(found['bugs'])} of {len(runs)} show in a metric.")


def changed_lines(before: str, after: str) -> list[int]:
    """The lines of `after`, from 1, that an edit has changed; of one that only takes lines away,
    the two around the gap.
    """
    found = []
    matcher = difflib.SequenceMatcher(None, before.split("\n"), after.split("\n"), autojunk=False)
    for kind, _, _, start, end in matcher.get_opcodes():
        if kind == "delete":
            found += [start, start + 1]
        elif kind != "equal":
            found += range(start + 1, end + 1)
    return found


def seal(salt: str, file: str, line: int) -> str:
    return hashlib.sha256(f"{salt} {file}:{line}".encode()).hexdigest()


def salt_of(seed: int, bug: str) -> str:
    return hashlib.sha256(f"{seed} {bug}".encode()).hexdigest()[:16]


def sealed_lines(salt: str, file: str, before: str, after: str) -> list[str]:
    return [seal(salt, file, line) for line in changed_lines(before, after)]


def planted(bug: str) -> tuple[str, str, str]:
    """(file, its text, its text with the bug)."""
    [(file, after)] = [(file, text) for b, _, file, text in candidates() if b == bug]
    return file, (REPOSITORY / file).read_text(encoding="utf-8"), after


def make(out: Path, seed: int) -> None:
    """Write the hunt number `seed` into the new folder `out`."""
    measured = json.loads(SYMPTOMS.read_text())
    names = sorted(measured["bugs"])
    random.Random(0).shuffle(names)
    bug = names[seed % len(names)]
    about = measured["bugs"][bug]
    copy_files(out, [], 0)
    file, before, after = planted(bug)
    (out / file).write_text(after, encoding="utf-8")
    answer = {"seed": seed, "salt": salt_of(seed, bug)}
    answer["sealed"] = sealed_lines(answer["salt"], file, before, after)
    (out / "answer.json").write_text(json.dumps(answer) + "\n")
    draw(about, measured["right"][about["script"]][about["metric"]], out / "symptom.png")
    where = [f"{about['script']}.py", *SHARED]
    (out / "README.md").write_text(
        f"# Bug hunt {seed}\n\nOne place of {', '.join(where[:-1])} or {where[-1]} is wrong: a line"
        " says something else, a line is one too many, or a statement is missing. This is what the"
        f" short run below makes of `{about['metric']}`, beside five seeds of the right code:\n\n"
        f"![{about['metric']} against steps](symptom.png)\n\n"
        f"    python {about['script']}.py {JOBS[about['script']]} --output_dir run\n\n"
        "Which line is it, what should it say, and why does it show as it does? Whoever made this"
        " folder can check `FILE:LINE`. Where a statement is missing, the line before the gap and"
        " the line after it both count.\n",
        encoding="utf-8",
    )


def draw(about: dict, right: list[list[float]], output: Path) -> None:
    """The buggy curve before the band of the right ones."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    steps = range(min(map(len, right)))
    columns = [[row[step] for row in right] for step in steps]
    axes.fill_between(
        steps, [min(c) for c in columns], [max(c) for c in columns], alpha=0.3, lw=0,
        color="tab:green", label="right, 5 seeds",
    )  # fmt: skip
    axes.plot(about["curve"], color="tab:red", label=f"this {about['script']}.py")
    axes.set_xlabel("evaluation" if about["metric"].startswith("eval") else "step")
    axes.set_ylabel(about["metric"])
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(output, dpi=90)


def is_right(out: Path, answer: str) -> bool:
    """Whether FILE:LINE is the line, FILE as seen from the hunt's folder or from above it. Raises
    ValueError for another form or file, OSError without a hunt.
    """
    sealed = json.loads((out / "answer.json").read_text())
    file, colon, line = answer.rpartition(":")
    if not colon or not line.isdecimal():
        raise ValueError(f"{answer}: write it as FILE:LINE, ppo.py:212 or plumbing/forward.py:12")
    parts = file.replace("\\", "/").split("/")
    paths = ["/".join(parts[start:]) for start in range(len(parts))]
    found = [path for path in paths if path in FILES]
    if not found:
        raise ValueError(f"{out} has no file {file}: write it as plumbing/forward.py:12")
    return seal(sealed["salt"], found[0], int(line)) in sealed["sealed"]


def reveal(path: Path) -> str:
    """What a hunt, or its answer.json, has sealed: the line, the right one, and why the curve is as
    it is. Raises ValueError for one of another version, OSError without a hunt.
    """
    file = path / "answer.json" if path.is_dir() else path
    sealed = None
    with contextlib.suppress(ValueError):
        sealed = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(sealed, dict) or not {"salt", "sealed"} <= sealed.keys():
        raise ValueError(f"{file} is no answer of a hunt")
    measured = json.loads(SYMPTOMS.read_text())
    # Hunts of earlier versions don't have their number.
    seeds = [sealed["seed"]] if "seed" in sealed else range(10_000)
    for bug, about in measured["bugs"].items():
        if any(salt_of(seed, bug) == sealed["salt"] for seed in seeds):
            place, before, after = planted(bug)
            if sealed_lines(sealed["salt"], place, before, after) == sealed["sealed"]:
                right = measured["right"][about["script"]][about["metric"]]
                return explained(bug, about, right, (place, before, after))
    raise ValueError(f"{file} was made from another version of this repository: reveal it there")


def explained(bug: str, about: dict, right: list, edit: tuple[str, str, str]) -> str:
    file, before, after = edit
    numbers = changed_lines(before, after)
    lines = [f"{file}:{numbers[0]}: {bug}", "", "What it says, and what it should say:", ""]
    pair = before.split("\n"), after.split("\n")
    matcher = difflib.SequenceMatcher(None, *pair, autojunk=False)
    for kind, start, end, new_start, new_end in matcher.get_opcodes():
        if kind != "equal":
            lines += [f"  - {line}".rstrip() for line in pair[1][new_start:new_end]]
            lines += [f"  + {line}".rstrip() for line in pair[0][start:end]]
    (first, last), runs = ends(about["curve"]), [ends(run) for run in right]
    bounds = [f"{min(x):.3g} to {max(x):.3g}" for x in zip(*runs)]
    told = f"{about['metric']} is {first:.3g} in the first three steps (right: {bounds[0]}) and"
    told += f" {last:.3g} in the last five (right: {bounds[1]}). {REASONS[bug]}"
    return "\n".join([*lines, "", *textwrap.wrap(told, 92)])


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="?", help="the folder of the hunt")
    parser.add_argument("--seed", type=int, default=0, help="which bug (0)")
    parser.add_argument("--check", metavar="FILE:LINE", help="is this the line?")
    parser.add_argument(
        "--reveal", type=Path, metavar="HUNT", help="the answer: of a folder, or of its answer.json"
    )
    parser.add_argument("--measure", action="store_true", help="run all bugs, write symptoms.json")
    options = parser.parse_args(args)
    if options.measure:
        measure()
        return 0
    fault = ""
    if options.reveal:
        try:
            print(reveal(options.reveal))
            return 0
        except OSError:
            fault = f"{options.reveal} holds no hunt"
        except ValueError as e:
            fault = str(e)
    elif options.out is None:
        fault = "give a folder"
    elif options.check:
        try:
            right = is_right(options.out, options.check)
            print("Yes, that is the line." if right else "No, it is another line.")
            return 0 if right else 1
        except OSError:
            fault = f"{options.out} holds no hunt"
        except ValueError as e:
            fault = str(e)
    elif not SYMPTOMS.exists():
        fault = "symptoms.json is not there: --measure makes it"
    elif options.out.exists():
        fault = f"{options.out} exists already, choose a new folder"
    if fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    make(options.out, options.seed)
    print(f"{options.out}/README.md says what to look for.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
