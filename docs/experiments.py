"""Writes docs/experiments.md and its pictures from what `course/labs.py` has measured.

  python course/labs.py all --seeds 5 --update     # the runs, a quarter of an hour on two CPU cores
  python docs/experiments.py                       # the page, from course/reference.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
COURSE = DOCS.parent / "course"
sys.path.insert(0, str(COURSE))

from labs import CURVES, EXPERIMENTS, REFERENCE, draw

# What was claimed or asked, and what the figures below say to it.
FINDINGS = json.loads((DOCS / "experiments.json").read_text(encoding="utf-8"))


def section(name: str, figures: dict[str, dict]) -> list[str]:
    """The lines of an experiment: question, command, figures, picture, what is seen in them."""
    experiment = EXPERIMENTS[name]
    head = " | ".join(f"`{figure}`" for figure in experiment.figures)
    rows = []
    for label, found in figures.items():
        cells = [
            f"{found[f]['mean']:.3f} ± {found[f]['std']:.3f}" if f in found else ""
            for f in experiment.figures
        ]
        rows.append(f"| {label} | {' | '.join(cells)} |")
    runs = [f"- {v.label}: `python {v.script}.py {v.flags}`" for v in experiment.variants]
    changes = [v for v in experiment.variants if v.change is not None]
    runs = [line.replace(str(COURSE), "course") for line in runs]
    if changes:
        names = ", ".join(f"`{v.change.__name__}` of course/labs.py in {v.label}" for v in changes)
        runs.append(f"- with {names}")
    picture = [f"![{experiment.curve} of {name}](experiments/{name}.png)", ""]
    return [
        f"## {name}", "", experiment.question, "", f"    python course/labs.py {name} --seeds 5", "",
        *runs, *([""] if runs else []), f"| | {head} |", f"|---|{'---|' * len(experiment.figures)}",
        *rows, "", *(picture if experiment.variants else []), FINDINGS[name], "",
    ]  # fmt: skip


def main() -> None:
    reference = json.loads(REFERENCE.read_text())["experiments"]
    curves = json.loads(CURVES.read_text())
    lines = [FINDINGS["introduction"], ""]
    (DOCS / "experiments").mkdir(exist_ok=True)
    for name in EXPERIMENTS:
        lines += section(name, reference[name])
        if name in curves:
            draw(name, curves[name], DOCS / "experiments" / f"{name}.png")
    (DOCS / "experiments.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
