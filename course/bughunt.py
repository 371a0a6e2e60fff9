"""A copy of the program with one bug and the curve that it makes, or a page with one to three bugs.

  python course/bughunt.py OUT --seed 3           # a folder for a student: each number has its bug
  python course/bughunt.py --seed 3 --answer      # FILE:LINE, what it should say, and why it shows
  python course/bughunt.py --page grpo --seed 3   # hunt-grpo-3.py, for an interview or an exam
  python course/bughunt.py --page grpo --seed 3 --answer
  python course/bughunt.py --measure              # which bugs show, and where: writes symptoms.json

The bugs are those of bughunt.md. Each one of the program leaves the range of five right runs in
some metric. A page of one_page/ runs to its end with any of its own.
"""

import argparse
import ast
import difflib
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

COURSE = Path(__file__).resolve().parent
sys.path.insert(0, str(COURSE))

from make import copy_files

SYMPTOMS = COURSE / "symptoms.json"
# - script or "page", bug. `place`: `what it says` → `the bug`, in it \n for a new line. Why.
ENTRY = re.compile(
    r"^- (\w+), (.+?)\.\s`(.+?)`:\s`(.+?)`\s→\s`(.+?)`\.\s(.+?)(?=^- |^#|\Z)", re.M | re.S
)
FOUND = ENTRY.findall((COURSE / "bughunt.md").read_text(encoding="utf-8").replace("\n  ", " "))
KEY = {bug: (script, *(x.replace("\\n", "\n") for x in rest)) for script, bug, *rest in FOUND}
# Short runs whose flags bring out what the defaults leave at rest.
SMALL = "--num_eval_prompts 256 --device cpu --temperature 1.2"
OF_GROUPS = f"{SMALL} --num_steps 50 --eval_every 50 --micro_batch_tokens 64"
JOBS = {
    "ppo": f"{SMALL} --num_steps 25 --eval_every 25 --prompts_per_step 64 --gamma 0.95",
    "grpo": f"{OF_GROUPS} --num_mini_batches 2 --prompts_per_step 8 --kl_coef 0.05",
    "rloo": f"{OF_GROUPS} --prompts_per_step 16",
}
METRICS = """objective/scores objective/kl policy/entropy_avg length/mean val/ratio_max_dev_first
val/ratio policy/clipfrac_avg policy/approxkl_avg val/explained_variance loss/value_avg
loss/policy_avg grad_norm val/num_eos_tokens length/truncated_frac lr objective/entropy""".split()


def edit_of(bug: str) -> tuple[str, str, str]:
    """(file, its text, its text with the bug). Raises ValueError where the bug has no one place."""
    _, target, old, new, _ = KEY[bug]
    module, *names = target.split(".")
    file = f"{module}.py" if (COURSE.parent / f"{module}.py").exists() else f"plumbing/{module}.py"
    text = (COURSE.parent / file).read_text(encoding="utf-8")
    node, lines = ast.parse(text), text.splitlines(keepends=True)
    for name in names:
        node = next(x for x in node.body if getattr(x, "name", None) == name)
    first, last = (node.lineno - 1, node.end_lineno) if names else (0, len(lines))
    body = "".join(lines[first:last])
    if body.count(old) != 1:
        raise ValueError(f"{target}: {old!r} is in it {body.count(old)} times")
    lines[first:last] = [body.replace(old, new)]
    # A statement that is missing leaves no trace.
    return file, text, "".join(lines).replace("\n        pass\n", "\n")


def curves(script: str, seed: int, bug: str = "") -> dict[str, list[float]]:
    """{metric: a value per step} of the short run of a script, with a bug; {} where it fails."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "code"
        copy_files(folder, [], 0)
        if bug:
            file, _, text = edit_of(bug)
            (folder / file).write_text(text, encoding="utf-8")
        flags = f"{script}.py {JOBS[script]} --output_dir run --seed {seed}".split()
        if subprocess.run([sys.executable, *flags], cwd=folder, capture_output=True).returncode:
            return {}
        lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    return {x: [round(y[x], 4) for y in steps if y.get(x) is not None] for x in METRICS}


def ends(curve: list[float]) -> tuple[float, float]:
    """The means of the first three and of the last five steps."""
    return statistics.mean(curve[:3]), statistics.mean(curve[-5:])


def symptom(buggy: dict, right: list[dict]) -> tuple[str, float]:
    """The metric that leaves the range of right runs most clearly, and how clearly; or ""."""
    best = "", 0.0
    for name in (name for name in METRICS if len(buggy.get(name, ())) > 1 and right[0][name]):
        rows = [run[name] for run in right]
        span = max(map(max, rows)) - min(map(min, rows))
        for end, *values in zip(ends(buggy[name]), *map(ends, rows)):
            mean, std = statistics.mean(values), statistics.stdev(values)
            # Beyond chance (Student's t of 5 runs), and a sizeable part of what the curve covers.
            least = max(5.0 * std, 0.15 * span, 0.02 * abs(mean), 0.05 * ("frac" in name), 1e-6)
            z = min(abs(end - mean) / (std + 0.02 * span + 1e-9), 99.0)
            if abs(end - mean) > least and z > 1.5 * best[1]:  # else the first is more telling
                best = name, z
    return best


def measure() -> None:
    """Run all bugs, and write those with a symptom to symptoms.json."""
    found = {"right": {}, "bugs": {}}
    right = {script: [curves(script, seed) for seed in range(5)] for script in JOBS}
    for bug, (script, *_) in KEY.items():
        if script == "page":
            continue
        run = curves(script, 0, bug)
        name, z = symptom(run, right[script])
        print(f"{script:5} {bug:60} {name} {z:.1f}", flush=True)
        if name:
            about = {"script": script, "metric": name, "z": round(z, 1)}
            found["bugs"][bug] = about | {"curve": run[name]}
            found["right"].setdefault(script, {})[name] = [run[name] for run in right[script]]
    SYMPTOMS.write_text(json.dumps(found) + "\n")


def chosen(seed: int) -> tuple[str, dict]:
    """(bug, its record in symptoms.json with the curves of the right code) of a number."""
    measured = json.loads(SYMPTOMS.read_text())
    bugs = sorted(measured["bugs"].items())
    random.Random(0).shuffle(bugs)
    bug, about = bugs[seed % len(bugs)]
    return bug, about | {"right": measured["right"][about["script"]][about["metric"]]}


def make(out: Path, seed: int) -> None:
    """Write the hunt number `seed` into the new folder `out`."""
    from matplotlib.figure import Figure

    bug, about = chosen(seed)
    file, _, text = edit_of(bug)
    copy_files(out, [], 0)
    (out / file).write_text(text, encoding="utf-8")
    figure, columns = Figure(figsize=(7, 3.6), layout="constrained"), list(zip(*about["right"]))
    axes, band = figure.add_subplot(), [[*map(extreme, columns)] for extreme in (min, max)]
    axes.fill_between(range(len(columns)), *band, alpha=0.3, color="C2", label="right, 5 seeds")
    axes.plot(about["curve"], color="C3", label=f"this {about['script']}.py")
    axes.set(xlabel="step", ylabel=about["metric"])
    axes.legend(frameon=False)
    figure.savefig(out / "symptom.png", dpi=90)
    text = (COURSE / "starter" / "hunt.txt").read_text(encoding="utf-8")
    text = text.format(number=seed, flags=JOBS[about["script"]], **about)
    (out / "README.md").write_text(text, encoding="utf-8")


TASK = "One to three places below are wrong, but the page runs. Which, and what do they change?"


def on_page(page: str, seed: int) -> tuple[str, list[str]]:
    """A page of one_page/ with one to three bugs, as long as it was, and these bugs."""
    draw = random.Random(seed)
    known = [bug for bug, (_, target, *_) in KEY.items() if target == f"one_page/{page}"]
    bugs = draw.sample(known, draw.randint(1, 3))
    text = (COURSE.parent / "one_page" / f"{page}.py").read_text(encoding="utf-8")
    for _, _, old, new, _ in map(KEY.get, bugs):
        text = text.replace(old, new)
    return text.replace("\n\n", f"\n{TASK}\n", 1), bugs


def told(bug: str) -> str:
    """Where a bug is, what stands there, what should, and why it shows."""
    file, right, wrong = (text.split("\n") for text in edit_of(bug))
    matcher = difflib.SequenceMatcher(None, wrong, right, autojunk=False)
    [(_, a, b, c, d)] = [x for x in matcher.get_opcodes() if x[0] != "equal"]
    says = "\n".join(wrong[a:b]) or "        (a line is missing here)"
    should = "\n".join(right[c:d]) or "        (nothing: the line is one too many)"
    head = f"{file[0]}:{a + 1}, {bug}"
    return f"{head}\nIt says\n{says}\nIt should say\n{should}\n{KEY[bug][-1].strip()}\n"


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, nargs="?", help="the folder of the hunt, or the file")
    parser.add_argument("--seed", type=int, default=0, help="which bug, or bugs of a page (0)")
    parser.add_argument("--page", choices=["grpo", "rloo", "ppo"], help="a page of one_page/")
    parser.add_argument("--answer", action="store_true", help="print what is wrong, and why")
    parser.add_argument("--measure", action="store_true", help="run all bugs, write symptoms.json")
    options = parser.parse_args(args)
    out, seed, page = options.out, options.seed, options.page
    if options.measure:
        return measure()
    text, bugs = on_page(page, seed) if page else ("", [chosen(seed)[0]])
    out = out or (Path(f"hunt-{page}-{seed}.py") if page else None)
    if options.answer:
        print("\n".join(map(told, bugs)))
    elif out is None or out.exists():
        parser.error("give a name that doesn't exist yet")
    elif page:
        out.write_text(text.replace(f"one_page/{page}.py", out.name), encoding="utf-8")
        print(f"{out} is the page. With --answer this command says what is wrong.")
    else:
        make(out, seed)
        print(f"{out} is hunt {seed}. Hand out the folder: README.md has the task.")


if __name__ == "__main__":
    main()
