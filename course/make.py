"""The starter repository of the assignment: the files of this one, without the solutions.

  python course/make.py OUT                                  # all problems, a first hint each
  python course/make.py OUT --problems gae policy_loss       # some, the rest is there to be read
  python course/make.py OUT --hints 3                        # 0: none, 3: a recipe

Points are those of grade.py, expected curves those of benchmarks/learning.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from checks import CHECKS
from problems import BY_NAME, PROBLEMS, REPOSITORY, Problem, without_solutions

COURSE = Path(__file__).parent
FILES = """ppo.py grpo.py rloo.py reward_model.py common.py sampling.py tasks.py tools/plot.py
tools/inspect_reward.py tools/look.py tools/look.html tools/vendor/uPlot.min.js
tools/vendor/uPlot.min.css tools/vendor/uPlot-LICENSE.txt docs/metrics.md tiny/make.py
tiny/temperature.py requirements.txt LICENSE""".split()
FILES += sorted(f"plumbing/{path.name}" for path in (REPOSITORY / "plumbing").glob("*.py"))
MODEL = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
         "tokenizer_config.json"]  # fmt: skip


def make(out: Path, problems: list[Problem], hints: int) -> None:
    """Write the starter repository into the new folder `out`."""
    copy_files(out, problems, hints)
    (out / "tests").mkdir()
    for problem in problems:
        name = f"test_{problem.name}.py"
        shutil.copy(COURSE / "public_tests" / name, out / "tests" / name)
    shutil.copy(COURSE / "public_tests" / "conftest.py", out / "tests" / "conftest.py")
    (out / "requirements-dev.txt").write_text("-r requirements.txt\npytest\nmatplotlib\npeft\n")
    shutil.copy(COURSE / "handout.md", out / "handout.md")
    shutil.copy(COURSE / "labs.py", out / "labs.py")
    shutil.copy(COURSE / "reference.json", out / "reference.json")
    (out / "README.md").write_text(readme(problems), encoding="utf-8")


def copy_files(out: Path, problems: list[Problem], hints: int) -> None:
    """Scripts, helpers and the model into the new folder `out`, without what solves `problems`."""
    (out / "tiny").mkdir(parents=True)
    for name in FILES:
        text = (REPOSITORY / name).read_text(encoding="utf-8")
        own = [problem for problem in problems if problem.file == name]
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(without_solutions(text, own, hints), encoding="utf-8")
    for name in MODEL:
        shutil.copy(REPOSITORY / "tiny" / name, out / "tiny" / name)


def readme(problems: list[Problem]) -> str:
    """What is to be done, for how many points, and what the curves look like when it is."""
    rows = [
        f"| `{problem.name}` | {problem.what} | {problem.file}"
        + (f", step {' and '.join(problem.steps)} of `main`" if problem.steps else "")
        + f" | {sum(item.points for item in CHECKS[problem.name])} |"
        for problem in problems
    ]
    total = sum(item.points for problem in problems for item in CHECKS[problem.name])
    learning = json.loads((REPOSITORY / "benchmarks" / "learning.json").read_text())
    curves = []
    for script, runs in learning["tiny"].items():
        cells = []
        for share in SHARES:
            seeds = [run["points"] for run in runs]
            values = [curve[round(share * (len(curve) - 1))]["sampled"] for curve in seeds]
            cells.append(f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}")
        curves.append(f"| `python {script.lower()}.py` | {' | '.join(cells)} |")
    head = " | ".join(f"{share:.0%} of the steps" for share in SHARES)
    table = "\n".join([f"| command | {head} |", f"|---|{'---|' * len(SHARES)}", *curves])
    text = README.replace("PROBLEMS", "\n".join(rows)).replace("TOTAL", str(total))
    files = sorted({problem.file for problem in problems})
    text = text.replace("FILES", ", ".join(files[:-1]) + " and " * (len(files) > 1) + files[-1])
    return text.replace("CURVES", table).replace("FIRST", problems[0].name)


SHARES = (0, 0.25, 0.5, 0.75, 1)
README = """# RLHF, from the log-probs to PPO, GRPO and RLOO

Write the functions that say `raise NotImplementedError`. Each docstring has the shapes, the formula
and its source; the headers of ppo.py, grpo.py, rloo.py and reward_model.py have the algorithms with
their papers. handout.md leads through it in six labs.

    pip install -r requirements-dev.txt
    python -m pytest -k FIRST         # the public tests of one problem
    python -m pytest                  # of all

Nothing needs a GPU, a network or a model download: `tiny/` holds a model of 0.6 M parameters that
adds two-digit numbers and forgets to carry: it gets 44% of the sums right when it samples.

| problem | what | where | points |
|---|---|---|---|
PROBLEMS

TOTAL points. The grader has more checks than the tests here. It takes each function by its name
and puts it among the right ones, so an error in one costs no other. Helpers of your own come along,
also from common.py to another file that has `from common import my_helper` at its top; a function
that common.py had from the beginning is ours there. Don't change names and arguments. Three rules
hold everywhere: a mask may be of bool or of 0 and 1; what stands off the mask may be anything, even
NaN, and has no influence; no input is changed. Where a docstring names the values that an argument
may have, any other is a ValueError.

Hand in FILES.
All else in plumbing/, tools/ and tiny/ stays as it is and may be left away.

When all is done, the scripts run. Held-out accuracy, mean and standard deviation over 5 seeds:

CURVES
"""


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the new folder")
    parser.add_argument("--problems", nargs="+", default=["all"], metavar="NAME", help="(all)")
    parser.add_argument("--hints", type=int, choices=range(4), default=1, help="depth of hints (1)")
    options = parser.parse_args(args)
    unknown = sorted(set(options.problems) - set(BY_NAME) - {"all"})
    fault = f"{options.out} exists already, choose a new folder" if options.out.exists() else ""
    if unknown:
        fault = f"--problems {unknown[0]}: choose from all, {', '.join(BY_NAME)}"
    if fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    chosen = [p for p in PROBLEMS if "all" in options.problems or p.name in options.problems]
    make(options.out, chosen, options.hints)
    print(f"{options.out} has {len(chosen)} problems.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
