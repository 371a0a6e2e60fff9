"""The first picture of the README: docs/first-light.png and first-dark.png, and for phones
first-light-narrow.png and first-dark-narrow.png.

  python grpo.py --task cups --eval_every 1 --num_eval_prompts 8 --output_dir runs/picture
  python benchmarks/picture.py runs/picture 0 7 10 36

The curves are those of eight seeds, from learning.json. The answers are of the run: eight to one
game at each of four steps, in the colours of the page of tools/look.py.
"""

import json
import sys
import textwrap
from pathlib import Path

import matplotlib as mpl
import numpy as np
from learning import REPOSITORY, RESULTS, TEXTS, at
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

THEMES = {  # as in tools/look.html: text; less likely, the same, more likely; and a line
    "light": ["#1d1f21", "#f6a14f", "#f0f0ec", "#6db1ee", "#2b6cb0"],
    "dark": ["#e9e7e2", "#9a5200", "#2b3138", "#1b68ab", "#7db7ec"],
}
CHANCE = 1 / 5  # of five cups
# Panels by name: curves of accuracy and length, answers at four steps.
WIDE = ["aall", "0123"]
NARROW = ["al", "01", "23"]
KEY = [
    "A line is the mean of eight runs of 40 steps, a band reaches from the lowest to the highest.",
    "Below: eight answers to one game at four steps of a run. Ten steps take one or two seconds.",
    "A blue token became more likely in this step, an orange one less likely.",
    "A step learns from 32 games. A wrong guess may be blue, because it was right in another.",
]


def draw_curves(panels: dict[str, Axes], colour: str, ink: str) -> None:
    """Accuracy and tokens over seconds: the mean of the seeds, and lowest to highest."""
    curves = [run["points"] for run in json.loads(RESULTS.read_text())["cups"]["GRPO"]]
    x = np.linspace(0, min(curve[-1]["seconds"] for curve in curves), 200)
    for panel, keys in (("a", ("sampled", "greedy")), ("l", ("length",))):
        axes = panels[panel]
        for key, style in zip(keys, ("-", "--"), strict=False):
            y = np.array([at(curve, "seconds", x, key) for curve in curves])
            axes.plot(x, y.mean(0), style, color=colour, lw=1.6, label=key)
            axes.fill_between(x, y.min(0), y.max(0), color=colour, alpha=0.2, lw=0)
        axes.set(xlim=(0, x[-1]), ylim=(0, None), xlabel="seconds of training")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels["a"].axhline(CHANCE, color=ink, lw=0.8, ls=":")
    panels["a"].text(x[-1], CHANCE - 0.02, "a guess", ha="right", va="top", size=7)
    panels["a"].yaxis.set_major_formatter("{x:.0%}")
    panels["a"].set_title("games answered right")
    panels["a"].legend(loc="center right", frameon=False, fontsize=7, handlelength=1.6)
    panels["l"].set_title("tokens of an answer")


def draw_answers(
    axes: Axes, group: list[dict], limit: float, chips: LinearSegmentedColormap
) -> None:
    """A row for each answer, a chip for each token but EOS."""
    size = axes.get_window_extent().width / axes.figure.dpi * 72 / 14.8  # points a token
    for row, line in enumerate(group):
        axes.text(-1.1, -row, "✓" if line["score"] else "✗", ha="center", va="center", size=8)
        pairs = zip(line["tokens"], line["old_logprobs"], line["new_logprobs"], strict=True)
        for i, (token, old, new) in enumerate(pairs):
            if token != "<eos>":
                colour = chips(0.5 + np.clip((new - old) / limit, -1, 1) / 2)
                axes.plot(i, -row, "s", markersize=size, color=colour, markeredgewidth=0)
                axes.text(i, -row, token, size=0.9 * size, ha="center", va="center_baseline")
    axes.set(xlim=(-1.7, 12.5), ylim=(-7.6, 0.6))
    axes.set_title(f"step {group[0]['step']}\n{group[0]['prompt']}", family="monospace")
    axes.axis("off")


def main() -> None:
    run, *steps = sys.argv[1:]
    lines = [json.loads(x) for x in Path(run, "tokens.jsonl").read_text().splitlines()]
    # The scale of the page: the 2% of the largest changes are beyond it.
    pairs = ((x["old_logprobs"], x["new_logprobs"]) for x in lines)
    limit = np.quantile(
        [abs(a - b) for old, new in pairs for a, b in zip(old, new) if a != b], 0.98
    )
    for page, (ink, *chips, line) in THEMES.items():
        style = dict.fromkeys(TEXTS, ink) | {"font.size": 8, "axes.titlesize": 8}
        colours = LinearSegmentedColormap.from_list("", chips)
        for end, layout, size in (("", WIDE, (8.2, 4.2)), ("-narrow", NARROW, (4.2, 5.6))):
            with mpl.rc_context(style):
                figure = Figure(size, layout="constrained", dpi=220)
                panels = figure.subplot_mosaic([[*row] for row in layout])
                draw_curves(panels, line, ink)
                figure.draw_without_rendering()  # the sizes of the panels
                for name, step in zip("0123", steps, strict=True):
                    group = [x for x in lines if x["step"] == int(step)]
                    draw_answers(panels[name], group, limit, colours)
                key = [textwrap.fill(line, 26 * size[0] // 2) for line in KEY]
                text = figure.text(0.5, 0, "\n".join(key), ha="center", va="bottom")
                bottom = text.get_window_extent().height / figure.dpi / size[1] + 0.01
                figure.get_layout_engine().set(rect=(0, bottom, 1, 1 - bottom))
                file = REPOSITORY / "docs" / f"first-{page}{end}.png"
                figure.savefig(file, transparent=True)


if __name__ == "__main__":
    main()
