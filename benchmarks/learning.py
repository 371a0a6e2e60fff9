"""What PPO, GRPO and RLOO learn by the episode and by the second: each script with its own defaults
on the embedded model, five seeds, and two jobs for SmolLM2-135M-Instruct.

  python benchmarks/learning.py                               # sums, embedded model, 25 minutes
  python benchmarks/learning.py --job pretrained --model FOLDER   # sums, SmolLM2, 1.5 hours
  python benchmarks/learning.py --job reviews --model FOLDER  # film reviews, SmolLM2, an hour
  python benchmarks/learning.py --draw                        # pictures and tables alone

Times are those of two CPU cores; say --device cuda where there is one. Seconds are those of rollout
and update, without evaluations; the runs alternate, so that a machine that slows down slows down
all of them. A run that is in learning.json is not repeated: to measure a job again, take it out of
that file. learning_metrics.json says how far each metric ranged in the runs of the embedded model.
"""

import argparse
import json
import shlex
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
COLORS = {"PPO": "tab:blue", "GRPO": "tab:orange", "RLOO": "tab:green", "GRPO, LoRA": "tab:red"}
STYLES = ("-", "--")


@dataclass
class Job:
    """What is compared: commands by name, and the keys of a point that are drawn, with their names.
    The table says when the first of these keys reaches the levels.
    """

    title: str
    commands: dict[str, str]
    seeds: int
    curves: dict[str, str]
    label: str  # of the y axis
    levels: tuple[float, float]
    limits: tuple[float, float]
    picture: str
    flags: str = ""


JOBS = {
    "tiny": Job(
        title="Two-digit sums, embedded model of 0.6 M parameters",
        commands={
            "PPO": "ppo.py --eval_every 4",
            "GRPO": "grpo.py --eval_every 10",
            "RLOO": "rloo.py --eval_every 10",
        },
        seeds=5,
        curves={"sampled": "accuracy, sampled", "greedy": "accuracy, greedy"},
        label="accuracy on held-out sums",
        levels=(0.9, 0.95),
        limits=(0.4, 1.0),
        picture="learning.png",
    ),
    "pretrained": Job(
        title="Two-digit sums, SmolLM2-135M-Instruct",
        commands={
            "PPO": "ppo.py --prompts_per_step 32 --num_mini_batches 2",
            "GRPO": "grpo.py --prompts_per_step 8",
            "RLOO": "rloo.py --prompts_per_step 16",
            "GRPO, LoRA": "grpo.py --prompts_per_step 8 --lora_r 16",
        },
        seeds=2,
        curves={"sampled": "accuracy, sampled", "greedy": "accuracy, greedy"},
        label="accuracy on held-out sums",
        levels=(0.3, 0.5),
        limits=(0.0, 1.0),
        picture="learning-pretrained.png",
        flags="--task add --max_new_tokens 16 --num_steps 24 --eval_every 8 --num_eval_prompts 200",
    ),
    # 24 held-out prompts are too few for a curve: the rewards of the last five steps instead.
    "reviews": Job(
        title="Film reviews in a positive tone, SmolLM2-135M-Instruct",
        commands={"PPO": "ppo.py", "GRPO": "grpo.py", "RLOO": "rloo.py"},
        seeds=5,
        curves={"training": "reward in training"},
        label="reward in training",
        levels=(0.75, 1.0),
        limits=(0.0, 2.0),
        picture="learning-reviews.png",
        flags="--eval_every 5",
    ),
}


def train(command: str, flags: str, seed: int) -> tuple[list[dict], list[list[str]]]:
    """Run a script: its metrics, a dict per step and one of the last evaluation, and some held-out
    prompts with their completions before and after.
    """
    with tempfile.TemporaryDirectory() as folder:
        script, *own = shlex.split(f"{command} {flags} --seed {seed} --output_dir {folder}/r")
        command = [sys.executable, str(REPOSITORY / script), *own]
        subprocess.run(command, check=True, capture_output=True)
        metrics, samples = (
            [json.loads(line) for line in (Path(folder) / "r" / name).read_text().splitlines()]
            for name in ("metrics.jsonl", "samples.jsonl")
        )
    samples = [x for x in samples if x["split"] == "heldout"]
    pairs = zip(samples[:8], [x for x in samples if x["step"] == samples[-1]["step"]][:8])
    return metrics, [[a["prompt"], a["completion"], b["completion"]] for a, b in pairs]


def points_of(lines: list[dict]) -> list[dict[str, float]]:
    """A point at each evaluation of a run. `sampled` and `greedy` are accuracies where the task has
    a verifier, else rewards; `training` and `kl` the mean reward and KL since the point before,
    `gb` the peak memory so far.
    """
    points, episodes, seconds, gb = [], 0, 0.0, 0.0
    # Step 0 samples before any update: its reward and KL are those of the untrained model.
    scores, kls = [lines[0]["objective/scores"]], [lines[0]["objective/kl"]]
    for line in lines:
        if "eval/reward" in line:
            # The accuracy is null without a verifier.
            kind = "reward" if line.get("eval/accuracy") is None else "accuracy"
            point = {
                "episodes": episodes,
                "seconds": seconds,
                "sampled": line[f"eval/{kind}"],
                "greedy": line[f"eval/{kind}_greedy"],
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
    """Mean over the seeds as a line; of the first key, from the lowest to the highest as a band."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
    for name, curves in curves_of.items():
        for axis, scale in zip(axes, ("episodes", "seconds"), strict=True):
            # The seeds have their points at the same episodes, but not at the same seconds.
            x = np.linspace(0, min(curve[-1][scale] for curve in curves), 200)
            for key, style in zip(job.curves, STYLES):
                y = np.array([at(curve, scale, x, key) for curve in curves])
                axis.plot(x, y.mean(0), style, color=COLORS[name])
                if style == STYLES[0]:
                    axis.fill_between(x, y.min(0), y.max(0), color=COLORS[name], alpha=0.15, lw=0)
    for name in curves_of:
        axes[1].plot([], [], color=COLORS[name], label=name)
    for label, style in zip(job.curves.values() if len(job.curves) > 1 else (), STYLES):
        axes[1].plot([], [], style, color="black", label=label)
    axes[0].set(xlabel="episodes (sampled completions)", ylabel=job.label)
    axes[1].set(xlabel="seconds of rollout and update")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.set(ylim=job.limits, xlim=(0, None))
    figure.suptitle(f"{job.title}: mean and range of {job.seeds} seeds", fontsize=11)
    figure.legend(loc="outside lower center", ncols=6, fontsize=8)
    figure.savefig(REPOSITORY / "docs" / job.picture, dpi=110)
    plt.close(figure)


def spread(values: list[float], digits: int) -> str:
    """Mean ± standard deviation over the seeds."""
    return f"{np.mean(values):,.{digits}f} ± {np.std(values, ddof=1):,.{digits}f}"


def table(job: Job, curves_of: dict[str, list[list[dict]]]) -> str:
    """What each command pays and gets: a row per quantity, a column per command."""
    episodes = min(c[-1]["episodes"] for curves in curves_of.values() for c in curves)
    seconds = min(c[-1]["seconds"] for curves in curves_of.values() for c in curves)
    first_key, first_name = next(iter(job.curves.items()))
    rows: dict[str, list[str]] = {}

    def row(name: str, digits: int, value) -> None:
        rows[name] = [spread([value(curve) for curve in c], digits) for c in curves_of.values()]

    def gain(curve: list[dict]) -> float:
        return curve[-1][first_key] - curve[0][first_key]

    def to(level: float, axis: str, digits: int) -> None:
        cells = []
        for curves in curves_of.values():
            first = [next((p for p in c if p[first_key] >= level), None) for c in curves]
            reached = [p[axis] for p in first if p is not None]
            missing = "" if len(reached) == len(first) else f" ({len(reached)} of {len(first)})"
            cells.append(spread(reached, digits) + missing if len(reached) > 1 else "not reached")
        rows[f"{axis} to {level:.2f} ({first_name})"] = cells

    for key, name in job.curves.items():
        row(f"{name}, before", 3, lambda c, key=key: c[0][key])
        row(f"{name}, at the end", 3, lambda c, key=key: c[-1][key])
    if first_key == "training":
        row("reward on held-out prompts, at the end", 3, lambda c: c[-1]["sampled"])
    row("KL at the end, nats per completion", 2, lambda c: c[-1]["kl"])
    row("episodes of the run", 0, lambda c: c[-1]["episodes"])
    row("seconds of the run", 1, lambda c: c[-1]["seconds"])
    row("peak memory, GB", 2, lambda c: c[-1]["gb"])
    for axis, digits in (("episodes", 0), ("seconds", 1)):
        for level in job.levels:
            to(level, axis, digits)
    for axis, least in (("episodes", episodes), ("seconds", seconds)):
        name = f"{first_name}, after {least:,.0f} {axis}"
        row(name, 3, lambda c, axis=axis, least=least: at(c, axis, least, first_key))
    row("gain per 1,000 episodes", 3, lambda c: 1000 * gain(c) / c[-1]["episodes"])
    row("gain per minute", 3, lambda c: 60 * gain(c) / c[-1]["seconds"])
    row("gain per nat of KL", 3, lambda c: gain(c) / c[-1]["kl"])
    head = [f"| | {' | '.join(curves_of)} |", "|---" * (len(curves_of) + 1) + "|"]
    return "\n".join(head + [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", action="store_true", help="pictures and tables of learning.json")
    parser.add_argument("--job", choices=JOBS, default="tiny")
    parser.add_argument("--model", help="folder or name of SmolLM2-135M-Instruct")
    parser.add_argument("--device", help="cuda, mps or cpu; default: the first there is")
    options = parser.parse_args()
    if options.job != "tiny" and not options.model and not options.draw:
        parser.error(f"--job {options.job} needs --model")
    # {job: {name of a command: [{"points": .., "samples": ..} per seed]}}
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not options.draw:
        job = JOBS[options.job]
        flags = f"{job.flags} --device {options.device}" if options.device else job.flags
        if options.job != "tiny":
            flags += f" --model {shlex.quote(options.model)}"
        runs_of = results.setdefault(options.job, {name: [] for name in job.commands})
        metrics = {name: [] for name in job.commands}
        for seed in range(job.seeds):
            for name, command in job.commands.items():
                if len(runs_of[name]) > seed:
                    continue
                lines, samples = train(command, flags, seed)
                metrics[name].append(lines)
                points = points_of(lines)
                runs_of[name].append({"points": points, "samples": samples})
                print(f"{name}, seed {seed}: {points[0]} -> {points[-1]}", flush=True)
                RESULTS.write_text(json.dumps(results) + "\n")
        if options.job == "tiny" and all(len(x) == job.seeds for x in metrics.values()):
            ranges = {name.lower(): ranges_of(lines) for name, lines in metrics.items()}
            METRICS.write_text(json.dumps(ranges, indent=1) + "\n")
    for name, runs_of in results.items():
        curves_of = {key: [run["points"] for run in runs] for key, runs in runs_of.items()}
        if all(len(curves) > 1 for curves in curves_of.values()):
            draw(JOBS[name], curves_of)
            print(f"\n{JOBS[name].title}\n\n{table(JOBS[name], curves_of)}")


if __name__ == "__main__":
    main()
