"""Records of a run, and the curves that they make. Nothing here loads torch."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, BinaryIO

from plumbing.errors import blame


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the records of a .jsonl file. A last line that is not complete is left out: the run may
    be writing it, or was killed. Raises InputError.
    """
    with blame(str(path)):
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
        return [json.loads(line) for line in lines]


PANELS = {
    "reward": ["objective/scores"],
    "KL to the reference, nats a completion": ["objective/kl"],
    "entropy, nats a token": ["objective/entropy"],
    "tokens a completion": ["length/mean"],
    "share of tokens clipped (RLOO has no clip)": ["policy/clipfrac_avg"],
    "held out: sampled, and greedy (dashed)": ["eval/accuracy", "eval/accuracy_greedy"],
}
OF_REWARD_MODELS = {
    "loss: of the step, and held out (dashed)": ["loss/pairs", "eval/loss"],
    "judged rightly: of the step, and held out (dashed)": ["reward/accuracy", "eval/accuracy"],
    "chosen minus rejected score; held out (dashed)": ["reward/margin", "eval/margin"],
    "mean score; held out (dashed)": ["reward/mean", "eval/score_mean"],
    "correlation of score and length, held out": ["eval/length_correlation"],
}
COLOURS = {"ppo": "#8a63d2", "grpo": "#d6417f", "rloo": "#27a074"}  # in all pictures


def draw_curves(folders: list[Path], output: Path | BinaryIO) -> None:
    """Draw the runs in `folders` into the picture `output` (.png, .svg, ...). Those whose folders
    differ only in -s<seed> have one colour; the first job of a script has the script's.
    """
    # No pyplot: it takes a second to import, and needs a screen. No backend: it may not be there.
    os.environ.pop("MPLBACKEND", None)
    from matplotlib.figure import Figure

    runs = [read_lines(Path(folder, "metrics.jsonl")) for folder in folders]
    names = [Path(folder).resolve().name for folder in folders]
    names = names if len({*names}) == len(names) else map(str, folders)  # lr1/run and lr2/run
    # As \$, or matplotlib reads a formula.
    labels = [re.sub(r"-s\d+$", "", name).replace("$", r"\$") for name in names]
    colours, left = {}, COLOURS.copy()
    for i, label in enumerate(dict.fromkeys(labels)):
        colours[label] = left.pop(label.partition("-")[0], f"C{i % 10}")
    figure = Figure(figsize=(12, 6.2), layout="constrained")
    of_pairs = all("loss/pairs" in run[0] for run in runs if run)
    panels = OF_REWARD_MODELS if of_pairs else PANELS
    for index, (title, names) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(2, 3, index, xlabel="step")
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.25)
        for label, run in zip(labels, runs, strict=True):
            for name, style in zip(names, ("-", "--"), strict=False):
                if all(x.get(name) is None for x in run):  # a task without right answers
                    name = name.replace("accuracy", "reward")
                points = [(x["step"], x[name]) for x in run if x.get(name) is not None]
                if points:
                    axes.plot(*zip(*points), style, color=colours[label], lw=1.4, label=label)
        if index == 1:
            shown = dict(zip(*axes.get_legend_handles_labels()[::-1]))  # each label once
            axes.legend(shown.values(), shown.keys(), fontsize=8, frameon=False)
    figure.savefig(output, dpi=100)
