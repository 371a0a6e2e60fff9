"""What PPO, GRPO and RLOO learn by the episode and by the second: on the embedded model with their
own defaults and at equal settings, three seeds each, and a job for SmolLM2-135M-Instruct.

  python benchmarks/learning.py                               # sums, embedded model, 7 minutes
  python benchmarks/learning.py --job updates                 # equal settings, 15 minutes
  python benchmarks/learning.py --job seconds                 # and the same seconds, 5 minutes
  python benchmarks/learning.py --job pretrained --model FOLDER   # sums, SmolLM2, 1.5 hours
  python benchmarks/learning.py --draw                        # pictures and tables alone

Times are those of two CPU cores; say --device cuda where there is one. Seconds are those of rollout
and update, without evaluations; the runs alternate, so that a machine that slows down slows down
all of them. A run that is in learning.json is not repeated: to measure a job again, take it out of
that file. Draws the pictures of docs/compare.md and prints a table per job, of which the page has
some rows. learning_metrics.json says how far each metric ranged in the runs of the first job.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).with_suffix(".json")
METRICS = Path(__file__).with_name("learning_metrics.json")
# The first three as in tools/plot.py.
COLOURS = {"PPO": "C0", "GRPO": "C1", "RLOO": "C2", "GRPO, LoRA": "#7b5cc4"}
SCRIPTS = ("PPO", "GRPO", "RLOO")
LEVEL = 0.9  # of the accuracy: when is it reached?


@dataclass
class Job:
    """Commands that are compared, by name, and the flags that all of them get."""

    title: str
    commands: dict[str, str]
    flags: str = ""
    seeds: int = 3


# At equal settings: the same learning rate, weight of the KL, and completions a step (256).
# "updates": the same episodes, in one update per rollout and in eight. "seconds": as many steps as
# take the same time.
EQUAL = "--kl_coef 0.01 --learning_rate 5e-4"
EPISODES = "--num_steps 60 --eval_every 10"
UPDATES = {
    "1 update": "--num_epochs 1 --num_mini_batches 1",
    "8 updates": "--num_epochs 2 --num_mini_batches 4",
}
JOBS = {
    "tiny": Job(
        "Two-digit sums, embedded model of 0.6 M parameters",
        {
            "PPO": "ppo.py --eval_every 4",
            "GRPO": "grpo.py --eval_every 10",
            "RLOO": "rloo.py --eval_every 10",
        },
    ),
    "pretrained": Job(
        "Two-digit sums, SmolLM2-135M-Instruct",
        {
            "PPO": "ppo.py --prompts_per_step 32 --num_mini_batches 2",
            "GRPO": "grpo.py --prompts_per_step 8",
            "RLOO": "rloo.py --prompts_per_step 16",
            "GRPO, LoRA": "grpo.py --prompts_per_step 8 --lora_r 16",
        },
        "--task add --max_new_tokens 16 --num_steps 24 --eval_every 8 --num_eval_prompts 200",
        seeds=2,
    ),
    "updates": Job(
        "Two-digit sums, equal settings and episodes",
        {
            f"{name}, {updates}": f"{name.lower()}.py {flags}"
            for updates, flags in UPDATES.items()
            for name in SCRIPTS
        },
        f"{EQUAL} {EPISODES}",
        seeds=5,
    ),
    "seconds": Job(
        "Two-digit sums, equal settings and seconds",
        {
            "PPO": "ppo.py --num_steps 36 --eval_every 6",
            "GRPO": "grpo.py --num_steps 160 --eval_every 32",
            "RLOO": "rloo.py --num_steps 196 --eval_every 28",
        },
        EQUAL,
    ),
}
Curve = list[dict[str, float]]  # the points of a run


def train(command: str, flags: str, seed: int) -> list[dict]:
    """Run a script: its metrics, a dict per step and one of the last evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        script, *own = shlex.split(f"{command} {flags} --seed {seed} --output_dir {folder}/r")
        command = [sys.executable, str(REPOSITORY / script), *own]
        subprocess.run(command, check=True, capture_output=True)
        text = (Path(folder) / "r" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def points_of(lines: list[dict]) -> Curve:
    """A point at each evaluation of a run. `sampled` and `greedy` are accuracies, `kl` the mean KL
    since the point before, `gb` the peak memory so far.
    """
    points, episodes, seconds, gb = [], 0, 0.0, 0.0
    kls = [lines[0]["objective/kl"]]  # step 0 samples from the untrained model
    for line in lines:
        if "eval/reward" in line:
            point = {
                "episodes": episodes,
                "seconds": seconds,
                "sampled": line["eval/accuracy"],
                "greedy": line["eval/accuracy_greedy"],
                "kl": float(np.mean(kls)),
                "gb": gb or line["memory/peak_gb"],
            }
            points.append({key: round(value, 4) for key, value in point.items()})
            kls = []
        if "episode" in line:  # not in the last line, which is an evaluation alone
            episodes = line["episode"]
            seconds += line["time/rollout"] + line["time/update"]
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


def measure(name: str, more_flags: str, results: dict[str, dict]) -> None:
    """Make the runs of a job that aren't in `results`, and save each."""
    job = JOBS[name]
    curves_of = results.setdefault(name, {command: [] for command in job.commands})
    metrics = {command: [] for command in job.commands}
    for seed in range(job.seeds):
        for of_command, command in job.commands.items():
            if len(curves_of[of_command]) > seed:
                continue
            lines = train(command, f"{job.flags} {more_flags}", seed)
            metrics[of_command].append(lines)
            points = points_of(lines)
            curves_of[of_command].append({"points": points})
            print(f"{of_command}, seed {seed}: {points[0]} -> {points[-1]}", flush=True)
            RESULTS.write_text(json.dumps(results) + "\n")
    if name == "tiny" and all(len(lines) == job.seeds for lines in metrics.values()):
        ranges = {command.lower(): ranges_of(lines) for command, lines in metrics.items()}
        METRICS.write_text(json.dumps(ranges) + "\n")


def at(curve: Curve, axis: str, where: np.ndarray | float, key: str) -> np.ndarray:
    """The value of `key` where `axis` (episodes or seconds) has reached `where`."""
    return np.interp(where, [p[axis] for p in curve], [p[key] for p in curve])


def table(curves_of: dict[str, list[Curve]]) -> str:
    """Mean ± standard deviation over the seeds: a row per quantity, a column per command."""
    every = [curve for curves in curves_of.values() for curve in curves]
    rows = {
        "accuracy, sampled, at the start": (3, lambda c: c[0]["sampled"]),
        "accuracy, greedy, at the start": (3, lambda c: c[0]["greedy"]),
        "accuracy, sampled, at the end": (3, lambda c: c[-1]["sampled"]),
        "accuracy, greedy, at the end": (3, lambda c: c[-1]["greedy"]),
        "KL at the end, nats per completion": (2, lambda c: c[-1]["kl"]),
        "peak memory, GB": (2, lambda c: c[-1]["gb"]),
    }
    for axis, digits in (("episodes", 0), ("seconds", 1)):
        least = min(curve[-1][axis] for curve in every)
        rows |= {
            f"{axis} of the run": (digits, lambda c, axis=axis: c[-1][axis]),
            f"{axis} to {LEVEL:.2f} (accuracy, sampled)": (
                digits,
                lambda c, axis=axis: next((p[axis] for p in c if p["sampled"] >= LEVEL), None),
            ),
            f"accuracy, sampled, after {least:,.0f} {axis}": (
                3,
                lambda c, axis=axis, least=least: at(c, axis, least, "sampled"),
            ),
        }
    lines = [f"| | {' | '.join(curves_of)} |", "|---" * (len(curves_of) + 1) + "|"]
    for name, (digits, value) in rows.items():
        cells = [spread([value(curve) for curve in c], digits) for c in curves_of.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: list[float | None], digits: int) -> str:
    """Mean ± standard deviation, and of how many seeds if some have no value."""
    known = [x for x in values if x is not None]
    if len(known) < 2:
        return "not reached"
    of = "" if len(known) == len(values) else f" ({len(known)} of {len(values)})"
    return f"{np.mean(known):,.{digits}f} ± {np.std(known, ddof=1):,.{digits}f}{of}"


# A line of a picture: its name in COLOURS, its style, the key of a point, and the seeds' curves.
Line = tuple[str, str, str, list[Curve]]


def draw(
    picture: str, title: str, panels: dict[str, tuple[str, list[Line]]], styles: dict[str, str]
) -> None:
    """Two panels side by side, {heading: (axis, lines)}; `styles` says what a style means."""
    figure = Figure(figsize=(9, 4.1), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    names = {}  # of the legend, in order
    for panel, (heading, (axis, lines)) in zip(axes, panels.items(), strict=True):
        for name, style, key, curves in lines:
            # The seeds have their points at the same episodes, but not at the same seconds.
            x = np.linspace(0, min(curve[-1][axis] for curve in curves), 200)
            y = np.array([at(curve, axis, x, key) for curve in curves])
            names[name] = COLOURS[name]
            panel.plot(x, y.mean(0), style, color=COLOURS[name], lw=1.6)
            panel.fill_between(x, y.min(0), y.max(0), color=COLOURS[name], alpha=0.12, lw=0)
        panel.set_title(heading, fontsize=10)
        unit = {"episodes": "sampled completions", "seconds": "rollout and update"}[axis]
        panel.set_xlabel(f"{axis} ({unit})")
        panel.set_xlim(0, None)
        panel.xaxis.set_major_locator(MaxNLocator(5))
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("accuracy on held-out sums")
    for name, colour in names.items():
        axes[1].plot([], [], color=colour, label=name)
    for style, meaning in styles.items():
        axes[1].plot([], [], style, color="black", label=meaning)
    figure.legend(loc="outside lower center", ncols=6, fontsize=9, frameon=False)
    bands = "lines: means over the seeds; bands: lowest to highest"
    figure.suptitle(f"{title}\n{bands}", fontsize=11)
    figure.savefig(REPOSITORY / "docs" / picture, dpi=110)


def draw_own_defaults(name: str, picture: str, curves_of: dict[str, list[Curve]]) -> None:
    """A job by the episode and by the second."""
    lines = [
        (of_command, style, key, curves)
        for of_command, curves in curves_of.items()
        for key, style in (("sampled", "-"), ("greedy", "--"))
    ]
    panels = {f"by the {axis[:-1]}": (axis, lines) for axis in ("episodes", "seconds")}
    draw(picture, JOBS[name].title, panels, {"-": "sampled", "--": "greedy"})


def draw_equal(updates: dict[str, list[Curve]], seconds: dict[str, list[Curve]]) -> None:
    """The jobs at equal settings. In the same seconds each script has its own number of updates."""
    by_episode = [
        (name, style, "sampled", updates[f"{name}, {number}"])
        for name in SCRIPTS
        for number, style in (("1 update", "--"), ("8 updates", "-"))
    ]
    by_second = [
        (name, "-" if name == "PPO" else "--", "sampled", curves)
        for name, curves in seconds.items()
    ]
    panels = {"the same episodes": ("episodes", by_episode)}
    panels |= {"the same seconds": ("seconds", by_second)}
    title = "Two-digit sums at one learning rate and KL weight, sampled"
    styles = {"-": "8 updates per rollout", "--": "1 update per rollout"}
    draw("learning-equal.png", title, panels, styles)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", action="store_true", help="pictures and tables of learning.json")
    parser.add_argument("--job", choices=JOBS, default="tiny")
    parser.add_argument("--model", help="folder or name of SmolLM2-135M-Instruct")
    parser.add_argument("--device", help="cuda, mps or cpu; default: the first there is")
    options = parser.parse_args()
    if options.job == "pretrained" and not options.model and not options.draw:
        parser.error(f"--job {options.job} needs --model")
    # {job: {name of a command: [{"points": ..} per seed]}}
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not options.draw:
        flags = f"--device {options.device} " if options.device else ""
        if options.job == "pretrained":
            flags += f"--model {shlex.quote(options.model)}"
        measure(options.job, flags, results)
    curves_of = {
        job: {name: [run["points"] for run in runs] for name, runs in results[job].items()}
        for job in results
    }
    for job, curves in curves_of.items():
        print(f"\n{JOBS[job].title}\n\n{table(curves)}")
    for job, picture in (("tiny", "learning.png"), ("pretrained", "learning-pretrained.png")):
        if job in curves_of:
            draw_own_defaults(job, picture, curves_of[job])
    if {"updates", "seconds"} <= set(curves_of):
        draw_equal(curves_of["updates"], curves_of["seconds"])


if __name__ == "__main__":
    main()
