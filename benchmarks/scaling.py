"""Time and memory of a GRPO step against completion length, batch, group size and model size.

  python benchmarks/scaling.py           # the runs, then the picture
  python benchmarks/scaling.py --draw    # the picture alone, from scaling.json

Models of random weights, whose completions nearly all have full length. Each point is a process of
its own and a median over its steps but the first; the points are taken in turns. The slope is that
of the logarithms: 1 is proportional, below 1 there is a part that doesn't grow.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from drawing import ALGORITHMS, plain, save
from matplotlib.figure import Figure
from speed import machine, random_gpt2, summary

SPEED = Path(__file__).with_name("speed.py")
RESULTS = Path(__file__).with_suffix(".json")
PICTURE = Path(__file__).parent.parent / "docs" / "scaling.png"

BASE = {"prompts": 4, "generations": 4, "max_new_tokens": 64, "layers": 4, "width": 256}
SWEEPS = {
    "max_new_tokens": [32, 64, 128, 256, 512],
    "prompts": [2, 4, 8, 16, 32],
    "generations": [2, 4, 8, 16, 32],
    "layers": [1, 2, 4, 8, 16],
}
LABELS = {
    "max_new_tokens": "tokens per completion",
    "prompts": "prompts of 4 completions",
    "generations": "completions of each of 4 prompts",
    "layers": "layers",
}


def measure(folder: Path, point: dict, threads: int) -> dict:
    """One process of three steps."""
    path = folder / f"{point['layers']}-{point['width']}"
    if not path.exists():
        random_gpt2(path, vocab_size=4096, n_layer=point["layers"], n_embd=point["width"], n_head=4)
    job = point | {"model": "gpt2", "kind": "grpo", "system": "ours", "path": str(path)}
    job |= {"threads": threads, "bf16": False}
    done = subprocess.run(
        [sys.executable, str(SPEED), "--worker", json.dumps(job)],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": str(threads)},
    )  # fmt: skip
    if done.returncode != 0:
        sys.exit(f"{point}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def slope(x: list[float], y: list[float]) -> float:
    """Of log y against log x, by least squares."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def draw(results: dict) -> None:
    """Step time above, peak memory below, a column per sweep; dotted: proportional growth."""
    figure = Figure(figsize=(11, 5.4), layout="constrained")
    axes = figure.subplots(2, len(SWEEPS), sharey="row")
    quantities = {"step_s": "seconds per step", "peak_gb": "peak memory, GB"}
    ticks = {"step_s": [0.2, 0.5, 1, 2, 5, 10], "peak_gb": [0.1, 0.2, 0.5, 1, 2]}
    for column, (name, sweep) in enumerate(results["sweeps"].items()):
        x = [int(value) for value in sweep]
        for row, (key, title) in enumerate(quantities.items()):
            y = [sweep[str(value)][key] for value in x]
            panel = axes[row][column]
            panel.plot(x, y, "o-", color=ALGORITHMS["GRPO"], label="measured")
            grown = [y[-1] * value / x[-1] for value in x]
            panel.plot(x, grown, ":", color="black", lw=1, label="if it grew in proportion")
            plain(panel, f"slope {slope(x, y):.2f}", LABELS[name] if row else "")
            panel.set(xscale="log", yscale="log")
            panel.set_xticks(x, [str(value) for value in x])
            panel.set_yticks(ticks[key], [str(value) for value in ticks[key]])
            panel.minorticks_off()
            if column == 0:
                panel.set_ylabel(title)
    axes[0][0].legend(fontsize=8, frameon=False)
    figure.suptitle(
        "A step of GRPO against its sizes (GPT-2 of 4 layers, width 256; slope 1: in proportion)"
    )
    save(figure, PICTURE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--draw", action="store_true")
    args = parser.parse_args()
    if not args.draw:
        torch.set_num_threads(args.threads)
        runs = {name: {value: [] for value in values} for name, values in SWEEPS.items()}
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(args.rounds):
                for name, values in SWEEPS.items():
                    for value in values:
                        found = measure(Path(folder), BASE | {name: value}, args.threads)
                        runs[name][value].append(found)
                        print(name, value, summary([found]), flush=True)
        sweeps = {n: {v: summary(found) for v, found in s.items()} for n, s in runs.items()}
        results = {"machine": machine(), "base": BASE, "sweeps": sweeps}
        RESULTS.write_text(json.dumps(results) + "\n")
    draw(json.loads(RESULTS.read_text()))


if __name__ == "__main__":
    main()
