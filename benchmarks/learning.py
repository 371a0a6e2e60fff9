"""Held-out accuracy of the three scripts: default settings, five seeds, by episodes and seconds.

  python benchmarks/learning.py          # the runs, 12 minutes on two CPU cores, then the picture
  python benchmarks/learning.py --draw   # the picture alone, from learning.json

Seconds are those of rollout and update, without evaluations; the runs alternate, so that a machine
that slows down slows down all three.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

REPOSITORY = Path(__file__).parent.parent
RESULTS = Path(__file__).with_suffix(".json")
PICTURE = REPOSITORY / "docs" / "learning.png"
SCRIPTS = {"ppo": "tab:blue", "grpo": "tab:orange", "rloo": "tab:green"}
SEEDS = range(5)


def train(script: str, seed: int) -> list[list[float]]:
    """Run a script; [[episodes, seconds, held-out accuracy], ...] of its evaluations."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--eval_every", "5", "--seed", str(seed), "--output_dir", f"{folder}/run"]
        command = [sys.executable, str(REPOSITORY / f"{script}.py"), *flags]
        subprocess.run(command, check=True, capture_output=True)
        text = (Path(folder) / "run" / "metrics.jsonl").read_text()
    curve, episodes, seconds = [], 0, 0.0
    for line in map(json.loads, text.splitlines()):
        if "eval/accuracy" in line:
            curve.append([episodes, round(seconds, 2), line["eval/accuracy"]])
        if "episode" in line:  # not in the last line, which is an evaluation alone
            episodes = line["episode"]
            seconds += line["time/rollout"] + line["time/update"]
    return curve


def draw(results: dict[str, list[list[list[float]]]]) -> None:
    """Mean over the seeds as a line, from the lowest to the highest as a band."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for script, curves in results.items():
        for axis, column in zip(axes, (0, 1), strict=True):
            scale = 1000 if column == 0 else 1
            # The seeds have their points at the same episodes, but not at the same seconds.
            end = min(curve[-1][column] for curve in curves)
            x = np.linspace(0, end, 200)
            y = np.array([np.interp(x, [p[column] for p in c], [p[2] for p in c]) for c in curves])
            axis.plot(x / scale, y.mean(0), color=SCRIPTS[script], label=script.upper())
            axis.fill_between(
                x / scale, y.min(0), y.max(0), color=SCRIPTS[script], alpha=0.15, lw=0
            )
    axes[0].set(xlabel="episodes (sampled completions), thousands", ylabel="held-out accuracy")
    axes[1].set(xlabel="seconds of rollout and update, 2 CPU cores")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.set(ylim=(0.3, 1.0), xlim=(0, None))
        axis.axhline(0.95, color="grey", lw=0.8, ls=":")
    axes[0].legend(loc="lower right")
    figure.suptitle("Two-digit sums, embedded model of 0.6 M parameters, seeds 0 to 4")
    figure.tight_layout()
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", action="store_true", help="only draw learning.json")
    if parser.parse_args().draw:
        draw(json.loads(RESULTS.read_text()))
        return
    results = {script: [] for script in SCRIPTS}
    for seed in SEEDS:
        for script, curves in results.items():
            curve = train(script, seed)
            curves.append(curve)
            above = next((point[1] for point in curve if point[2] >= 0.95), float("nan"))
            print(
                f"{script} seed {seed}: {curve[0][2]:.3f} -> {curve[-1][2]:.3f}, "
                f"{curve[-1][0]} episodes, {curve[-1][1]:.1f} s; 0.95 after {above:.1f} s",
                flush=True,
            )
    RESULTS.write_text(json.dumps(results) + "\n")
    draw(results)


if __name__ == "__main__":
    main()
