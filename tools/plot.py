"""The curves of one or several runs on one page.

  python tools/plot.py runs/grpo-tiny-add-s0
  python tools/plot.py runs/*-tiny-add-s? --output curves.svg      # bands over the seeds of each

Runs whose folders differ in -s<seed> alone are one line, their mean, in a band from the lowest to
the highest.
"""

import argparse
import json
import re
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import InputError, first_line

PANELS = {
    "reward": ["objective/scores"],
    "KL to the reference, nats a completion": ["objective/kl"],
    "entropy, nats a token": ["objective/entropy"],
    "tokens a completion": ["length/mean"],
    "share of clipped tokens": ["policy/clipfrac_avg"],
    "held out: sampled, and greedy (dashed)": ["eval/accuracy", "eval/accuracy_greedy"],
}


def read_metrics(folder: Path) -> dict[str, dict[int, float]]:
    """The metrics of a run: {name: {step: value}}, unknown values left out, and a last line that
    is not complete: the run may be writing it. Raises InputError.
    """
    path = Path(folder) / "metrics.jsonl"
    curves = {}
    try:
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
            record = json.loads(line)
            for name, value in record.items():
                if value is not None:
                    curves.setdefault(name, {})[record["step"]] = value
    except (OSError, ValueError, KeyError, AttributeError) as e:
        raise InputError(f"{path}: can't be read ({first_line(e)})") from e
    if not curves:
        raise InputError(f"{path}: holds no metrics yet")
    return curves


def draw(folders: list[Path], output: Path) -> None:
    """Draw the runs in `folders` into the picture `output` (.png, .svg, ...). Raises InputError."""
    try:
        import matplotlib
    except ImportError as e:
        raise InputError("plots need matplotlib: pip install matplotlib") from e
    from matplotlib.figure import Figure  # no pyplot: it would keep figures, and look for a screen

    groups = {}
    for folder in folders:
        label = re.sub(r"-s\d+$", "", Path(folder).resolve().name)
        groups.setdefault(label, []).append(read_metrics(folder))
    figure = Figure(figsize=(12, 6.2), layout="constrained")
    colours = matplotlib.colormaps["tab10"].colors
    for index, (title, names) in enumerate(PANELS.items(), 1):
        axes = figure.add_subplot(2, 3, index)
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if index > 3:
            axes.set_xlabel("step")
        for (label, runs), colour in zip(groups.items(), colours * len(groups)):
            for name, style in zip(names, ("-", "--")):
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
        if index == 1 and axes.lines:
            axes.legend(fontsize=8, frameon=False)
    try:
        figure.savefig(output, dpi=100)
    except (OSError, ValueError) as e:  # ValueError: an ending that it doesn't know
        raise InputError(f"--output {output}: {first_line(e)}") from e


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--output", type=Path, default=Path("curves.png"), help="(curves.png)")
    options = parser.parse_args(args)
    draw(options.runs, options.output)
    print(f"{options.output} shows {len(options.runs)} runs.")


if __name__ == "__main__":
    try:
        main()
    except InputError as e:
        print(f"error: {e}", file=sys.stderr)
        raise SystemExit(2) from None
