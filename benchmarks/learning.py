"""What PPO, GRPO and RLOO learn by the episode and by the second, for docs/compare.md.

  python benchmarks/learning.py --job tiny      # 8 seeds, 20 minutes on two CPU cores
  python benchmarks/learning.py --job updates   # equal settings, 15 minutes
  python benchmarks/learning.py --job seconds   # and the same seconds, 5 minutes
  python benchmarks/learning.py --job cups      # the other embedded model, 8 seeds, 8 minutes
  python benchmarks/learning.py --job long      # GRPO on it for 60 steps, for docs/think.md
  python benchmarks/learning.py                 # pictures and tables alone

Seconds are those of rollout and update, without evaluations; the runs alternate, so that a machine
that slows down slows down all of them. A run that is in learning.json is not repeated: to measure a
job again, take it out of that file.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parent.parent))

from plumbing.curves import COLOURS as OF_SCRIPTS

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).with_suffix(".json")
COLOURS = {name.upper(): colour for name, colour in OF_SCRIPTS.items()}
# The ink is for light and for dark pages.
TEXTS, INK = "text.color axes.labelcolor axes.edgecolor xtick.color ytick.color".split(), "#7a7f85"
SEEDS = {"tiny": 8, "updates": 5, "seconds": 3, "cups": 8, "long": 8}
# At equal settings: the same learning rate, weight of the KL, and completions a step (256).
EQUAL = "--kl_coef 0.01 --learning_rate 5e-4"
EPISODES = f"{EQUAL} --num_steps 60 --eval_every 10"
ONE = f"{EPISODES} --num_epochs 1 --num_mini_batches 1"  # as RLOO always does
EIGHT = f"{EPISODES} --num_epochs 2 --num_mini_batches 4"
JOBS = {  # {name: command}
    "tiny": {
        "PPO": "ppo.py --eval_every 4",
        "GRPO": "grpo.py --eval_every 10",
        "RLOO": "rloo.py --eval_every 10",
    },
    "updates": {
        "PPO, 1 update": f"ppo.py {ONE}",
        "GRPO, 1 update": f"grpo.py {ONE}",
        "RLOO, 1 update": f"rloo.py {EPISODES}",
        "PPO, 8 updates": f"ppo.py {EIGHT}",
        "GRPO, 8 updates": f"grpo.py {EIGHT}",
    },
    "seconds": {  # as many steps as take the same time
        "PPO": f"ppo.py {EQUAL} --num_steps 36 --eval_every 6",
        "GRPO": f"grpo.py {EQUAL} --num_steps 160 --eval_every 32",
        "RLOO": f"rloo.py {EQUAL} --num_steps 196 --eval_every 28",
    },
    "cups": {name: f"{name.lower()}.py --task cups" for name in ("PPO", "GRPO", "RLOO")},
    "long": {"GRPO": "grpo.py --task cups --num_steps 60"},
}
Curve = list[dict[str, float]]  # the points of a run


def train(command: str) -> tuple[list[dict], float, float]:
    """Run a script: its metrics, a dict per step and one of the last evaluation; its peak memory in
    GB and its CPU seconds, those of the start included.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = f"{sys.executable} {REPOSITORY}/{command} --output_dir {folder}/run"
        process = subprocess.Popen(command.split(), stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        if status:
            sys.exit(f"{command} failed")
        text = Path(folder, "run", "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return lines, used.ru_maxrss * 1024 / 1e9, used.ru_utime + used.ru_stime


def points_of(lines: list[dict], gb: float) -> Curve:
    """A point at each evaluation of a run; `kl` and `length` are means since the point before."""
    points, episodes, seconds = [], 0, 0.0
    since = lines[:1]  # step 0 samples from the untrained model
    for line in lines:
        if "eval/reward" in line:
            point = {"episodes": episodes, "seconds": seconds, "gb": gb}
            for name, key in (("kl", "objective/kl"), ("length", "length/mean")):
                point[name] = statistics.mean(x[key] for x in since)
            point |= {"sampled": line["eval/accuracy"], "greedy": line["eval/accuracy_greedy"]}
            points.append({key: round(value, 4) for key, value in point.items()})
            since = []
        if "episode" in line:  # not in the last line, which is an evaluation alone
            episodes = line["episode"]
            seconds += line["time/rollout"] + line["time/update"]
            since.append(line)
    return points


def measure(job: str, results: dict[str, dict]) -> None:
    """Make the runs of a job that aren't in `results`, and save each."""
    runs = results.setdefault(job, {name: [] for name in JOBS[job]})
    for seed in range(SEEDS[job]):
        for name, command in JOBS[job].items():
            if len(runs[name]) == seed:
                lines, gb, cpu = train(f"{command} --seed {seed}")
                points = points_of(lines, gb)
                runs[name].append({"points": points, "cpu": round(cpu, 1)})
                print(f"{name}, seed {seed}: {points[0]} -> {points[-1]}", flush=True)
                RESULTS.write_text(json.dumps(results) + "\n")


def at(curve: Curve, axis: str, where: np.ndarray | float, key: str = "sampled") -> np.ndarray:
    """The value of `key` where `axis` (episodes or seconds) has reached `where`."""
    return np.interp(where, [p[axis] for p in curve], [p[key] for p in curve])


def table(curves_of: dict[str, list[Curve]]) -> str:
    """Mean ± standard deviation over the seeds; nan: not reached by all."""
    lines = [f"| | {' | '.join(curves_of)} |", "|---" * (len(curves_of) + 1) + "|"]
    groups = list(curves_of.values())

    def add(name: str, digits: int, values: list[list[float]]) -> None:
        cells = [f"{np.mean(x):,.{digits}f} ± {np.std(x, ddof=1):,.{digits}f}" for x in values]
        lines.append(f"| {name} | {' | '.join(cells)} |")

    for when, point in (("start", 0), ("end", -1)):
        for key in ("sampled", "greedy"):
            values = [[c[point][key] for c in curves] for curves in groups]
            add(f"accuracy, {key}, at the {when}", 3, values)
    for key in ("sampled", "greedy"):
        cells = [f"{min(c[-1][key] for c in curves):.3f}" for curves in groups]
        lines.append(f"| the lowest of the seeds, {key} | {' | '.join(cells)} |")
    if "length" in groups[0][0][0]:
        for when, point in (("start", 0), ("end", -1)):
            add(f"tokens, at the {when}", 2, [[c[point]["length"] for c in x] for x in groups])
    add("KL at the end, nats per completion", 2, [[c[-1]["kl"] for c in x] for x in groups])
    add("peak memory, GB", 2, [[c[-1]["gb"] for c in x] for x in groups])
    for axis, digits in (("episodes", 0), ("seconds", 1)):
        ends = [[c[-1][axis] for c in curves] for curves in groups]
        add(f"{axis} of the run", digits, ends)
        high = [[[p[axis] for p in c if p["sampled"] >= 0.9] for c in x] for x in groups]
        first = [[min(reached, default=np.nan) for reached in x] for x in high]
        add(f"{axis} to 0.90 (accuracy, sampled)", digits, first)
        least = min(map(min, ends))
        after = [[at(c, axis, least, "sampled") for c in curves] for curves in groups]
        add(f"accuracy, sampled, after {least:,.0f} {axis}", 3, after)
    return "\n".join(lines)


def draw(picture: str, title: str, panels: dict[str, list[tuple]], styles: dict[str, str]) -> None:
    """Two panels, {axis: [(name in COLOURS, style, key of a point, curves)]}; `styles` says what a
    style means.
    """
    mpl.rcParams.update(dict.fromkeys(TEXTS, INK))
    figure = Figure(figsize=(5.2, 6.4), layout="constrained")
    axes, names = figure.subplots(2, 1), {}  # a set would lose the order
    for panel, (axis, lines) in zip(axes, panels.items(), strict=True):
        for name, style, key, curves in lines:
            # The seeds have their points at the same episodes, but not at the same seconds.
            x = np.linspace(0, min(curve[-1][axis] for curve in curves), 200)
            y = np.array([at(curve, axis, x, key) for curve in curves])
            names[name] = True
            panel.plot(x, y.mean(0), style, color=COLOURS[name], lw=1.6)
            panel.fill_between(x, y.min(0), y.max(0), color=COLOURS[name], alpha=0.12, lw=0)
        unit = {"episodes": "sampled completions", "seconds": "rollout and update"}[axis]
        panel.set(xlabel=f"{axis} ({unit})", xlim=(0, None), ylabel="held-out sums right")
        panel.grid(alpha=0.2)
    for name in names:
        axes[1].plot([], [], color=COLOURS[name], label=name)
    for style, meaning in styles.items():
        axes[1].plot([], [], style, color=INK, label=meaning)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"{title}\nlines: means over the seeds; bands: lowest to highest", fontsize=10)
    figure.savefig(REPOSITORY / "docs" / picture, dpi=130, transparent=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--job", choices=JOBS, help="default: pictures and tables alone")
    options = parser.parse_args()
    # {job: {name of a command: [{"points": ..} per seed]}}
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if options.job:
        measure(options.job, results)
    curves_of = {}
    for job, by_name in results.items():
        curves_of[job] = {name: [run["points"] for run in by_name[name]] for name in by_name}
        print(f"\n{job}\n\n{table(curves_of[job])}")
        cpu = [[run["cpu"] for run in runs if "cpu" in run] for runs in by_name.values()]
        print("CPU seconds:", *(f"{min(x):.0f} to {max(x):.0f}" for x in cpu if x))
    styles = {"-": "sampled", "--": "greedy"}
    lines = [
        (name, style, key, curves)
        for name, curves in curves_of["tiny"].items()
        for style, key in styles.items()
    ]
    title = "Two-digit sums, the embedded model"
    draw("learning.png", title, {"episodes": lines, "seconds": lines}, styles)
    panels = {}
    for axis, job in (("episodes", "updates"), ("seconds", "seconds")):
        for name, curves in curves_of[job].items():  # by default PPO alone makes 8 updates
            style = "-" if "8" in name or name == "PPO" else "--"
            panels.setdefault(axis, []).append((name.split(",")[0], style, "sampled", curves))
    styles = {"-": "8 updates per rollout", "--": "1 update per rollout"}
    draw("learning-equal.png", "Two-digit sums at equal settings, sampled", panels, styles)


if __name__ == "__main__":
    main()
