"""The first picture of the README: docs/first-light.png, and first-dark.png for dark pages.

  python grpo.py --eval_every 5
  python benchmarks/picture.py runs/grpo-tiny-add-s0 0 25 70

Left: learning.json. Right: eight completions at each of three steps of the run.
"""

import json
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
from learning import COLOURS, REPOSITORY, RESULTS, TEXTS, at
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

THEMES = {  # as in tools/look.html: text; rarer, the same, likelier
    "light": ["#1d1f21", "#f6a14f", "#f0f0ec", "#6db1ee"],
    "dark": ["#e9e7e2", "#9a5200", "#2b3138", "#1b68ab"],
}


def draw_learning(axes: Axes) -> None:
    """Held-out accuracy over seconds: the mean of the seeds, and lowest to highest."""
    for name, runs in json.loads(RESULTS.read_text())["tiny"].items():
        curves, colour = [run["points"] for run in runs], COLOURS[name]
        x = np.linspace(0, min(curve[-1]["seconds"] for curve in curves), 200)
        y = np.array([at(curve, "seconds", x) for curve in curves])
        axes.plot(x, y.mean(0), color=colour, lw=2, label=name)
        axes.fill_between(x, y.min(0), y.max(0), color=colour, alpha=0.2, lw=0)
    axes.set(xlim=(0, 42), ylim=(0.4, 1), xlabel="seconds (bands: eight seeds)", frame_on=False)
    axes.set_title("sampled answers right", size=11)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False, labelcolor="linecolor", fontsize=12)


def draw_tokens(axes: Axes, group: list[dict], colour_of: LinearSegmentedColormap) -> None:
    """A row for each completion, a chip for each token."""
    for row, line in enumerate(group):
        advantage = line["advantages"]
        for i, token in enumerate(line["tokens"]):
            axes.plot(i, -row, "s", markersize=16.5, color=colour_of(0.5 + advantage / 3.3))
            token, size = ("end", 7) if token == "<eos>" else (token, 12)
            axes.text(i, -row, token, size=size, ha="center", va="center_baseline")
        axes.text(4.95, -row, f"{advantage:+.1f}" if advantage else "0", ha="right", va="center")
    axes.set(xlim=(-0.6, 5), ylim=(-7.5, 0.6))
    axes.set_title(f"step {group[0]['step']}: {group[0]['prompt']}", size=11)
    axes.axis("off")


def main() -> None:
    run, *steps = sys.argv[1:]
    lines = [json.loads(x) for x in Path(run, "tokens.jsonl").read_text().splitlines()]
    for page, (ink, *chips) in THEMES.items():
        with mpl.rc_context(dict.fromkeys(TEXTS, ink)):
            figure = Figure((7.4, 3.5), layout="constrained")
            left, *panels = figure.subplots(1, 4, width_ratios=[1.5, 1, 1, 1])
            draw_learning(left)
            colour_of = LinearSegmentedColormap.from_list("", chips)
            for panel, step in zip(panels, steps, strict=True):
                draw_tokens(panel, [x for x in lines if x["step"] == int(step)], colour_of)
            meaning = "in GRPO, blue answers become likelier (+), orange rarer (-)"
            panels[1].text(2, -8.5, meaning, ha="center").set_in_layout(False)
            figure.savefig(REPOSITORY / "docs" / f"first-{page}.png", dpi=220, transparent=True)


if __name__ == "__main__":
    main()
