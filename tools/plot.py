"""The curves of one or several runs on one page.

  python tools/plot.py runs/grpo-tiny-add-s0
  python tools/plot.py runs/*-tiny-add-s? --output curves.svg      # bands over the seeds of each

Runs whose folders differ in -s<seed> alone are one line, their mean, in a band from the lowest to
the highest.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from plumbing.errors import InputError, first_line, optional_library, run_tool

PANELS = {
    "reward": ["objective/scores"],
    "KL to the reference, nats a completion": ["objective/kl"],
    "entropy, nats a token": ["objective/entropy"],
    "tokens a completion": ["length/mean"],
    "share of tokens clipped (RLOO: of completions)": ["policy/clipfrac_avg"],
    "held out: sampled, and greedy (dashed)": ["eval/accuracy", "eval/accuracy_greedy"],
}
OF_REWARD_MODELS = {
    "loss: of the step, and held out (dashed)": ["loss/pairs", "eval/loss"],
    "judged rightly: of the step, and held out (dashed)": ["reward/accuracy", "eval/accuracy"],
    "chosen minus rejected score; held out (dashed)": ["reward/margin", "eval/margin"],
    "mean score; held out (dashed)": ["reward/mean", "eval/score_mean"],
    "correlation of score and length, held out": ["eval/length_correlation"],
}
Curves = dict[str, dict[int, float]]  # name of a metric -> step -> value


def read_lines(path: Path, *needed: str) -> list[dict[str, Any]]:
    """The records of a .jsonl file, each with the keys that are needed. Raises InputError."""
    records = []
    try:
        # A last line that is not complete is left out: the run may be writing it.
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
            # What isn't a number in JSON (NaN, Infinity) becomes unknown, as null is.
            record = json.loads(line, parse_constant=lambda name: None)
            if not isinstance(record, dict) or not set(needed) <= set(record):
                raise ValueError(f"line {number} lacks something")
            records.append(record)
    except (OSError, ValueError) as e:
        raise InputError(f"{path}: can't be read ({first_line(e)})") from e
    return records


def read_metrics(folder: Path) -> Curves:
    """The metrics of a run, known values alone. Raises InputError."""
    path, curves = Path(folder) / "metrics.jsonl", {}
    for record in read_lines(path, "step"):
        for name, value in record.items():
            if value is not None:
                curves.setdefault(name, {})[record["step"]] = value
    if not curves:
        raise InputError(f"{path}: holds no metrics yet")
    return curves


def label_of(folder: Path) -> str:
    """The name of a run without its seed."""
    return re.sub(r"-s\d+$", "", Path(folder).resolve().name)


def draw(folders: list[Path], output: Path) -> None:
    """Draw the runs in `folders` into the picture `output` (.png, .svg, ...). Raises InputError."""
    # No pyplot: it keeps figures, and needs a screen.
    library = optional_library("matplotlib.figure", "plots need matplotlib: pip install matplotlib")
    groups: dict[str, list[Curves]] = {}
    for folder in folders:
        groups.setdefault(label_of(folder), []).append(read_metrics(folder))
    of_reward_models = all("loss/pairs" in run for runs in groups.values() for run in runs)
    panels = OF_REWARD_MODELS if of_reward_models else PANELS
    figure = library.Figure(figsize=(12, 6.2), layout="constrained")
    if any(len(runs) > 1 for runs in groups.values()):
        figure.suptitle("lines: means of the seeds; bands: lowest to highest", fontsize=11)
    for index, (title, names) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(2, 3, index)
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("step")
        for number, (label, runs) in enumerate(groups.items()):
            _draw_group(axes, label, runs, names, f"C{number % 10}")
        if index == 1 and axes.lines:
            axes.legend(fontsize=8, frameon=False)
    try:
        figure.savefig(output, dpi=100)
    except (OSError, ValueError) as e:  # ValueError: an ending that it doesn't know
        raise InputError(f"--output {output}: {first_line(e)}") from e


def _draw_group(axes: Any, label: str, runs: list[Curves], names: list[str], colour: str) -> None:
    """The mean of the runs that differ by the seed alone; the band is that of the first metric."""
    for name, style in zip(names, ("-", "--"), strict=False):
        if not any(name in run for run in runs):  # a task without right and wrong answers
            name = name.replace("accuracy", "reward")
        curves = [run[name] for run in runs if name in run]
        steps = sorted(set.intersection(*map(set, curves))) if curves else []
        if not steps:
            continue
        values = np.array([[curve[step] for step in steps] for curve in curves])
        seeds = f" ({len(runs)} seeds)" if len(runs) > 1 else ""
        shown = label + seeds if style == "-" else None
        axes.plot(steps, values.mean(0), style, color=colour, lw=1.4, label=shown)
        if len(curves) > 1 and style == "-":
            band = (values.min(0), values.max(0))
            axes.fill_between(steps, *band, color=colour, alpha=0.2, lw=0)


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--output", type=Path, default=Path("curves.png"), help="(curves.png)")
    options = parser.parse_args(args)
    draw(options.runs, options.output)
    noun = "run" if len(options.runs) == 1 else "runs"
    print(f"{options.output} shows {len(options.runs)} {noun}.")


if __name__ == "__main__":
    run_tool(main)
