"""How the pictures of docs/ look: one colour per algorithm, a grid, mean and range of the seeds."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from tools.plot import COLOURS  # noqa: E402

ALGORITHMS = {name.upper(): colour for name, colour in COLOURS.items()}  # PPO, GRPO, RLOO
# What isn't an algorithm has none of their colours: variants of a run, the first as it should be,
# and steps of a size, from light to dark.
VARIANTS = ("#333333", "#c51b7d", "#7b5cc4", "#a6761d")
SIZES = ("#e884b4", "#c4388c", "#8a55c8", "#4b2a86", "#000000")
BAND = "lines: means; bands: lowest to highest"


def plain(axes: Axes, title: str = "", xlabel: str = "", ylabel: str = "") -> None:
    """Names of a panel, its grid, and no frame above and on the right."""
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def mean_and_range(
    axes: Axes, x: np.ndarray, rows: np.ndarray, colour: str, style: str = "-", label: str = ""
) -> None:
    """The mean of rows (seeds, points) as a line, the lowest to the highest as a band."""
    axes.plot(x, rows.mean(0), style, color=colour, lw=1.6, label=label)
    axes.fill_between(x, rows.min(0), rows.max(0), color=colour, alpha=0.15, lw=0)


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
