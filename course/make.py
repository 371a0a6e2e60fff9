"""The starter repository of the assignment: the files of this one, without the solutions.

  python course/make.py OUT                                  # all problems, a first hint each
  python course/make.py OUT --problems gae policy_loss       # some, the rest is there to be read
  python course/make.py OUT --hints 3                        # 0: none, 3: a recipe

Points and hints are those of problems.py, expected curves those of benchmarks/learning.json.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import re
import shutil
import statistics
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from pages import answer_sheet, chosen_labs, notebook, page
from problems import BY_NAME, PROBLEMS, REPOSITORY, TESTS, Problem, without_solutions

COURSE = Path(__file__).parent
FILES = """ppo.py grpo.py rloo.py reward_model.py common.py sampling.py tasks.py tools/plot.py
tools/inspect_reward.py tools/look.py tools/look.html docs/metrics.md docs/debugging.md
tiny/make.py tiny/temperature.py requirements.txt LICENSE""".split()
FILES += sorted(f"plumbing/{path.name}" for path in (REPOSITORY / "plumbing").glob("*.py"))
MODEL = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
         "tokenizer_config.json"]  # fmt: skip


LINK = re.compile(r"\[([^]]*)\]\((?!https?:)([^)#]*)[^)]*\)")


def make(out: Path, problems: list[Problem], hints: int, url: str) -> None:
    """Write the starter repository into the new folder `out`."""
    copy_files(out, problems, hints)
    (out / "tests").mkdir()
    tests = {TESTS[problem.name][0] for problem in problems if not problem.steps}
    for name in ("conftest.py", "small.py", *sorted(tests)):
        shutil.copy(REPOSITORY / "tests" / name, out / "tests" / name)
    (out / "requirements-dev.txt").write_text(REQUIREMENTS)
    shutil.copy(COURSE / "labs.py", out / "labs.py")
    shutil.copy(COURSE / "reference.json", out / "reference.json")
    pack = (COURSE / "starter" / "pack.py").read_text(encoding="utf-8")
    files = " ".join(files_to_write(problems))
    (out / "pack.py").write_text(pack.replace('"FILES"', f'"{files}"'), encoding="utf-8")
    (out / "README.md").write_text(readme(problems), encoding="utf-8")
    labs = chosen_labs(problems)
    (out / "answers.md").write_text(answer_sheet(labs), encoding="utf-8")
    (out / "handout").mkdir()
    for lab in labs:
        (out / "handout" / f"lab{lab.number}.md").write_text(page(lab), encoding="utf-8")
    if importlib.util.find_spec("jupytext"):
        (out / "notebooks").mkdir()
        shutil.copy(COURSE / "starter" / "into.py", out / "notebooks" / "into.py")
        for lab in labs:
            text = notebook(lab, hints, url)
            (out / "notebooks" / f"lab{lab.number}.ipynb").write_text(text, encoding="utf-8")


def files_to_write(problems: list[Problem]) -> list[str]:
    """The files that have functions to write."""
    return sorted({problem.file for problem in problems})


def copy_files(out: Path, problems: list[Problem], hints: int) -> None:
    """Scripts, helpers and the model into the new folder `out`, without what solves `problems`."""
    (out / "tiny").mkdir(parents=True)
    for name in FILES:
        text = (REPOSITORY / name).read_text(encoding="utf-8")
        own = [problem for problem in problems if problem.file == name]
        (out / name).parent.mkdir(exist_ok=True)
        if name.endswith(".md"):
            text = LINK.sub(functools.partial(_link, name), text)
        (out / name).write_text(without_solutions(text, own, hints), encoding="utf-8")
    for name in MODEL:
        shutil.copy(REPOSITORY / "tiny" / name, out / "tiny" / name)


def _link(page: str, link: re.Match) -> str:
    """A link of a page, or its words alone where the starter doesn't have what it leads to."""
    path = Path(page).parent / link[2]
    return link[0] if not link[2] or os.path.normpath(path) in FILES else link[1]


def readme(problems: list[Problem]) -> str:
    """What is to be done, for how many points, and what the curves look like when it is."""
    rows = [
        f"| `{problem.name}` | {problem.what} | {problem.file}"
        + (f", step {' and '.join(problem.steps)} of `main`" if problem.steps else "")
        + f" | {problem.points} |"
        for problem in problems
    ]
    total = sum(problem.points for problem in problems)
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
    return text.replace("CURVES", table).replace("FIRST", problems[0].test_command)


SHARES = (0, 0.25, 0.5, 0.75, 1)
REQUIREMENTS = "-r requirements.txt\npytest\npytest-xdist\nmatplotlib\npeft\njupytext\nipykernel\n"
README = """# RLHF, from the log-probs to PPO, GRPO and RLOO

You need Python 3.10 or newer and a laptop; no GPU, no network, no model download. The model is in
`tiny/`: a GPT-2 of 0.6 M parameters that adds two-digit numbers and forgets to carry. Its preferred
answer to `57+68=` is 115; the right one comes once in a while when it samples: it gets 44% of the
sums right. Reinforcement learning has to make the right answer the preferred one.

    pip install -r requirements-dev.txt
    FIRST   # the tests of one problem
    python -m pytest tests                 # all of them
    python labs.py                         # the experiments; labs.py NAME runs one
    python pack.py                         # hand_in.zip, and what is missing in it

**Where to begin.** `handout/` has a page for each lab: theory, what to write, questions;
`notebooks/` has the same as notebooks, for Colab. Write the functions that say
`raise NotImplementedError`. Each docstring has the shapes, the formula and its source; the headers
of ppo.py, grpo.py, rloo.py and reward_model.py have the algorithms with their papers. Write your
answers into `answers.md`, and put plots into `figures/` as png files that answers.md names.

**Words.** B completions of up to T tokens; a mask is 1 at tokens that were really sampled, EOS
included. A run of a script writes a folder in `runs/`; `python tools/look.py runs/NAME` makes
a page of it: every token of a few completions with its credit, step by step. docs/metrics.md says
what each number of a run means.

| problem | what | where | points |
|---|---|---|---|
PROBLEMS

TOTAL points. Don't change names and arguments. Three rules hold everywhere: a mask may be of bool
or of 0 and 1; what stands off the mask may be anything, even NaN, and has no influence; no input is
changed. Where a docstring names the values that an argument may have, any other is a ValueError.

**What to hand in.** `python pack.py` writes `hand_in.zip` with the files that have functions to
write, answers.md, notebooks, figures, and the figures of the runs in `runs/`. All else in
plumbing/, tools/ and tiny/ stays as it is and is left away.

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
    parser.add_argument(
        "--url", default="https://github.com/OWNER/assignment",
        help="where you put the starter: the notebooks clone it on Colab",
    )  # fmt: skip
    options = parser.parse_args(args)
    unknown = sorted(set(options.problems) - set(BY_NAME) - {"all"})
    fault = ""
    if options.out.exists():
        fault = f"{options.out} exists already, choose a new folder"
    if unknown:
        fault = f"--problems {unknown[0]}: choose from all, {', '.join(BY_NAME)}"
    if fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    chosen = [p for p in PROBLEMS if "all" in options.problems or p.name in options.problems]
    make(options.out, chosen, options.hints, options.url)
    print(f"{options.out} has {len(chosen)} problems.")
    if not (options.out / "notebooks").exists():
        print("It has no notebooks: pip install jupytext and make it again.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
