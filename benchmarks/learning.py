"""What PPO, GRPO and RLOO learn by the episode, by the second and by the gigabyte: each script with
its own defaults, five seeds.

  python benchmarks/learning.py                  # the embedded model, 10 minutes on two CPU cores
  python benchmarks/learning.py --model FOLDER   # SmolLM2-135M-Instruct, an hour; say --device cuda
  python benchmarks/learning.py --draw           # pictures and tables alone, from learning.json

Seconds are those of rollout and update, without evaluations; the runs alternate, so that a machine
that slows down slows down all three. learning.json keeps what the last run of each model measured,
learning_metrics.json how far each metric ranged in the runs of the embedded model.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

REPOSITORY = Path(__file__).parent.parent
RESULTS = Path(__file__).with_suffix(".json")
METRICS = Path(__file__).with_name("learning_metrics.json")
SCRIPTS = {"ppo": "tab:blue", "grpo": "tab:orange", "rloo": "tab:green"}
SEEDS = range(5)
EVAL_EVERY = 5


@dataclass
class Job:
    """What is compared on one model. `reward` is the key of a point that is called reward here."""

    title: str
    reward: str
    name: str
    levels: tuple[float, float]
    limits: tuple[float, float]
    picture: str


JOBS = {
    "tiny": Job(
        title="Two-digit sums, embedded model of 0.6 M parameters",
        reward="heldout",
        name="held-out accuracy",
        levels=(0.9, 0.95),
        limits=(0.3, 1.0),
        picture="learning.png",
    ),
    # 24 held-out prompts are too few for a curve: the rewards of the last five steps instead.
    "pretrained": Job(
        title="Film reviews in a positive tone, SmolLM2-135M-Instruct",
        reward="training",
        name="reward in training",
        levels=(0.75, 1.0),
        limits=(0.0, 2.0),
        picture="learning-pretrained.png",
    ),
}


def train(script: str, seed: int, flags: list[str]) -> list[dict]:
    """Run a script: its metrics, a dict per step, and one of the last evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        own = ["--eval_every", str(EVAL_EVERY), "--seed", str(seed), "--output_dir", f"{folder}/r"]
        command = [sys.executable, str(REPOSITORY / f"{script}.py"), *own, *flags]
        subprocess.run(command, check=True, capture_output=True)
        text = (Path(folder) / "r" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def points_of(lines: list[dict]) -> list[dict[str, float]]:
    """A point at each evaluation of a run. `heldout` is accuracy where the task has one, else
    reward, `training` and `kl` the mean reward and KL since the point before, `gb` the peak memory
    so far.
    """
    points, episodes, seconds, gb = [], 0, 0.0, 0.0
    # Step 0 samples before any update: its reward and KL are those of the untrained model.
    scores, kls = [lines[0]["objective/scores"]], [lines[0]["objective/kl"]]
    for line in lines:
        if "eval/reward" in line:
            accuracy = line.get("eval/accuracy")  # null without a verifier
            point = {
                "episodes": episodes,
                "seconds": seconds,
                "heldout": line["eval/reward"] if accuracy is None else accuracy,
                "training": float(np.mean(scores)),
                "kl": float(np.mean(kls)),
                "gb": gb or line["memory/peak_gb"],
            }
            points.append({key: round(value, 4) for key, value in point.items()})
            scores, kls = [], []
        if "episode" in line:  # not in the last line, which is an evaluation alone
            episodes = line["episode"]
            seconds += line["time/rollout"] + line["time/update"]
            scores.append(line["objective/scores"])
            kls.append(line["objective/kl"])
            gb = line["memory/peak_gb"]
    return points


def ranges_of(runs: list[list[dict]]) -> dict[str, dict[str, float]]:
    """Of each metric over the runs: lowest and highest at step 0, in the last third of the steps
    and in all of them, and the median.
    """
    found = {}
    for name in runs[0][0]:
        columns = [[x[name] for x in run if x.get(name) is not None] for run in runs]
        parts = {
            "first": [column[0] for column in columns],
            "late": [x for column in columns for x in column[-len(column) // 3 :]],
            "all": [x for column in columns for x in column],
        }
        found[name] = {f"{k} {f.__name__}": f(x) for k, x in parts.items() for f in (min, max)}
        found[name]["median"] = float(np.median(parts["all"]))
    return found


def at(curve: list[dict], axis: str, where: np.ndarray | float, key: str) -> np.ndarray:
    """The value of `key` where `axis` (episodes or seconds) has reached `where`."""
    return np.interp(where, [p[axis] for p in curve], [p[key] for p in curve])


def draw(job: Job, curves_of: dict[str, list[list[dict]]]) -> None:
    """Mean over the seeds as a line, from the lowest to the highest as a band."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for script, curves in curves_of.items():
        for axis, key in zip(axes, ("episodes", "seconds"), strict=True):
            # The seeds have their points at the same episodes, but not at the same seconds.
            x = np.linspace(0, min(curve[-1][key] for curve in curves), 200)
            y = np.array([at(curve, key, x, job.reward) for curve in curves])
            axis.plot(x, y.mean(0), color=SCRIPTS[script], label=script.upper())
            axis.fill_between(x, y.min(0), y.max(0), color=SCRIPTS[script], alpha=0.15, lw=0)
    axes[0].set(xlabel="episodes (sampled completions)", ylabel=job.name)
    axes[1].set(xlabel="seconds of rollout and update")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.set(ylim=job.limits, xlim=(0, None))
        axis.axhline(job.levels[1], color="grey", lw=0.8, ls=":")
    axes[0].legend(loc="lower right")
    figure.suptitle(f"{job.title}, seeds 0 to 4")
    figure.tight_layout()
    figure.savefig(REPOSITORY / "docs" / job.picture, dpi=110)
    plt.close(figure)


def spread(values: list[float], digits: int) -> str:
    """Mean ± standard deviation over the seeds."""
    return f"{np.mean(values):,.{digits}f} ± {np.std(values, ddof=1):,.{digits}f}"


def table(job: Job, curves_of: dict[str, list[list[dict]]]) -> str:
    """What each algorithm pays and gets: a row per quantity, a column per script."""
    episodes = min(c[-1]["episodes"] for curves in curves_of.values() for c in curves)
    seconds = min(c[-1]["seconds"] for curves in curves_of.values() for c in curves)
    rows: dict[str, list[str]] = {}

    def row(name: str, digits: int, value) -> None:
        rows[name] = [spread([value(curve) for curve in c], digits) for c in curves_of.values()]

    def gain(curve: list[dict]) -> float:
        return curve[-1][job.reward] - curve[0][job.reward]

    def to(level: float, axis: str, digits: int) -> None:
        cells = []
        for curves in curves_of.values():
            first = [next((p for p in c if p[job.reward] >= level), None) for c in curves]
            reached = [p[axis] for p in first if p is not None]
            missing = "" if len(reached) == len(first) else f" ({len(reached)} of {len(first)})"
            cells.append(spread(reached, digits) + missing if len(reached) > 1 else "not reached")
        rows[f"{axis} to {level:.2f}"] = cells

    row(f"{job.name}, before", 3, lambda c: c[0][job.reward])
    row(f"{job.name}, at the end", 3, lambda c: c[-1][job.reward])
    if job.reward != "heldout":
        row("reward on held-out prompts, at the end", 3, lambda c: c[-1]["heldout"])
    row("KL at the end (GRPO by k3, else k1), nats per completion", 2, lambda c: c[-1]["kl"])
    row("episodes of the run", 0, lambda c: c[-1]["episodes"])
    row("seconds of the run", 1, lambda c: c[-1]["seconds"])
    row("peak memory, GB", 2, lambda c: c[-1]["gb"])
    for axis, digits in (("episodes", 0), ("seconds", 1)):
        for level in job.levels:
            to(level, axis, digits)
    row(
        f"{job.name} after {episodes:,} episodes",
        3,
        lambda c: at(c, "episodes", episodes, job.reward),
    )
    row(
        f"{job.name} after {seconds:,.0f} seconds",
        3,
        lambda c: at(c, "seconds", seconds, job.reward),
    )
    row("gain per 1,000 episodes", 3, lambda c: 1000 * gain(c) / c[-1]["episodes"])
    row("gain per minute", 3, lambda c: 60 * gain(c) / c[-1]["seconds"])
    row("gain per GB", 3, lambda c: gain(c) / c[-1]["gb"])
    row("gain per nat of KL", 3, lambda c: gain(c) / c[-1]["kl"])
    head = ["| | " + " | ".join(s.upper() for s in curves_of) + " |", "|---|---|---|---|"]
    return "\n".join(head + [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", action="store_true", help="pictures and tables of learning.json")
    parser.add_argument("--model", help="a pretrained model instead of the embedded one")
    parser.add_argument("--device", help="cuda, mps or cpu; default: the first there is")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not options.draw:
        name = "pretrained" if options.model else "tiny"
        flags = ["--model", options.model] if options.model else []
        flags += ["--device", options.device] if options.device else []
        curves_of = {script: [] for script in SCRIPTS}
        runs = {script: [] for script in SCRIPTS}
        for seed in SEEDS:
            for script, curves in curves_of.items():
                runs[script].append(train(script, seed, flags))
                curves.append(points_of(runs[script][-1]))
                print(f"{script} seed {seed}: {curves[-1][0]} -> {curves[-1][-1]}", flush=True)
            results[name] = curves_of
            RESULTS.write_text(json.dumps(results) + "\n")
        if name == "tiny":
            ranges = {script: ranges_of(lines) for script, lines in runs.items()}
            METRICS.write_text(json.dumps(ranges, indent=1) + "\n")
    for name, curves_of in results.items():
        draw(JOBS[name], curves_of)
        print(f"\n{JOBS[name].title}\n\n{table(JOBS[name], curves_of)}")


if __name__ == "__main__":
    main()
