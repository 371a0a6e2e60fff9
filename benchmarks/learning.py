"""What PPO, GRPO and RLOO learn by the episode and by the second: on the embedded model with their
own defaults and at equal settings, five seeds each, and a job for SmolLM2-135M-Instruct.

  python benchmarks/learning.py                               # sums, embedded model, 25 minutes
  python benchmarks/learning.py --job updates                 # equal settings, 25 minutes
  python benchmarks/learning.py --job seconds                 # and the same seconds, 10 minutes
  python benchmarks/learning.py --job rate                    # and a higher rate, 10 minutes
  python benchmarks/learning.py --job pretrained --model FOLDER   # sums, SmolLM2, 1.5 hours
  python benchmarks/learning.py --draw                        # pictures and tables alone

Times are those of two CPU cores; say --device cuda where there is one. Seconds are those of rollout
and update, without evaluations; the runs alternate, so that a machine that slows down slows down
all of them. A run that is in learning.json is not repeated: to measure a job again, take it out of
that file. Draws pictures and prints the tables of docs/compare.md; --all prints every row.
learning_metrics.json says how far each metric ranged in the runs of the first job.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from drawing import ALGORITHMS, mean_and_range, plain, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).with_suffix(".json")
METRICS = Path(__file__).with_name("learning_metrics.json")
COLOURS = ALGORITHMS | {"GRPO, LoRA": "#7b5cc4"}
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
    picture: str = ""
    flags: str = ""
    short: tuple[str, ...] = ()  # the rows of the table that docs/compare.md has
    memory: bool = True  # of a small model it is that of the libraries
    seconds: bool = True  # without them where the machine was too busy to measure any


SAMPLED, GREEDY = "accuracy, sampled, at the end", "accuracy, greedy, at the end"
KL, GB = "KL at the end, nats per completion", "peak memory, GB"
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
        short=(
            SAMPLED,
            GREEDY,
            KL,
            "episodes to 0.90 (accuracy, sampled)",
            "seconds to 0.90 (accuracy, sampled)",
        ),
        memory=False,
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
        short=(
            SAMPLED,
            GREEDY,
            GB,
            "accuracy, sampled, after 768 episodes",
            "accuracy, sampled, after 294 seconds",
        ),
        flags="--task add --max_new_tokens 16 --num_steps 24 --eval_every 8 --num_eval_prompts 200",
    ),
}


# The same learning rate, weight of the KL, and completions a step (256). "updates": the same
# episodes, in one update per rollout and in eight. "seconds": as many steps as take the same time.
# "rate": the same episodes, each with its own number of updates, at the rate of GRPO and RLOO.
EQUAL = "--kl_coef 0.01 --learning_rate 5e-4"
EIGHT, ONE = "--num_epochs 2 --num_mini_batches 4", "--num_epochs 1 --num_mini_batches 1"
SCRIPTS = ("PPO", "GRPO", "RLOO")
JOBS["updates"] = replace(
    JOBS["tiny"],
    title="Two-digit sums, equal settings and episodes",
    commands={
        f"{name}, {updates}": f"{name.lower()}.py {flags}"
        for updates, flags in (("1 update", ONE), ("8 updates", EIGHT))
        for name in SCRIPTS
    },
    picture="",
    flags=f"{EQUAL} --num_steps 60 --eval_every 10",
    seconds=False,
    short=(SAMPLED,),
)
JOBS["seconds"] = replace(
    JOBS["tiny"],
    title="Two-digit sums, equal settings and seconds",
    commands={
        "PPO": "ppo.py --num_steps 36 --eval_every 6",
        "GRPO": "grpo.py --num_steps 186 --eval_every 31",
        "RLOO": "rloo.py --num_steps 140 --eval_every 28",
    },
    picture="",
    flags=EQUAL,
    short=("episodes of the run", "seconds of the run", SAMPLED),
)
JOBS["rate"] = replace(
    JOBS["updates"],
    title="Two-digit sums, equal settings and episodes, learning rate 8e-4",
    commands={name: f"{name.lower()}.py" for name in SCRIPTS},
    flags=f"{EQUAL.replace('5e-4', '8e-4')} --num_steps 60 --eval_every 10",
)


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


def at(curve: list[dict], axis: str, where: np.ndarray | float, key: str) -> np.ndarray:
    """The value of `key` where `axis` (episodes or seconds) has reached `where`."""
    return np.interp(where, [p[axis] for p in curve], [p[key] for p in curve])


def lines(
    axes: Axes, scale: str, curves: list[list[dict]], key: str, colour: str, style: str, band: bool
) -> None:
    """The mean over the seeds of `key` against episodes or seconds, and the range as a band."""
    # The seeds have their points at the same episodes, but not at the same seconds.
    x = np.linspace(0, min(curve[-1][scale] for curve in curves), 200)
    y = np.array([at(curve, scale, x, key) for curve in curves])
    if band:
        mean_and_range(axes, x, y, colour, style)
    else:
        axes.plot(x, y.mean(0), style, color=colour, lw=1.4)


def frame(axes: Axes, job: Job, scale: str, title: str = "") -> None:
    names = {
        "episodes": "episodes (sampled completions)",
        "seconds": "seconds of rollout and update",
    }
    plain(axes, title, names[scale])
    axes.set(ylim=job.limits, xlim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter("{x:,.0f}")


def draw(job: Job, curves_of: dict[str, list[list[dict]]]) -> None:
    """Mean over the seeds as a line; of the first key, from the lowest to the highest as a band."""
    figure = Figure(figsize=(9, 4.1), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for panel, scale in zip(axes, ("episodes", "seconds"), strict=True):
        for name, curves in curves_of.items():
            for key, style in zip(job.curves, STYLES):
                lines(panel, scale, curves, key, COLOURS[name], style, band=style == STYLES[0])
        frame(panel, job, scale, f"by the {scale.removesuffix('s')}")
    axes[0].set_ylabel(job.label)
    several = list(job.curves.values()) if len(job.curves) > 1 else []
    legend(figure, axes[1], dict.fromkeys(curves_of, "-"), dict(zip(several, STYLES)))
    figure.suptitle(
        f"{job.title}\nlines: mean of {job.seeds} seeds; bands: lowest to highest"
        + (f" ({several[0].partition(', ')[2]})" if several else ""),
        fontsize=11,
    )
    save(figure, REPOSITORY / "docs" / job.picture)


def draw_equal(results: dict[str, dict]) -> None:
    """The jobs at equal settings: the same episodes, and the same seconds. Dashed is one update per
    rollout, as GRPO and RLOO have it by default, solid eight, as PPO has.
    """
    figure = Figure(figsize=(9, 4.1), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for name in SCRIPTS:
        for updates, style in (("1 update", "--"), ("8 updates", "-")):
            curves = [run["points"] for run in results["updates"][f"{name}, {updates}"]]
            lines(axes[0], "episodes", curves, "sampled", COLOURS[name], style, band=True)
        curves = [run["points"] for run in results["seconds"][name]]
        style = "-" if name == "PPO" else "--"
        lines(axes[1], "seconds", curves, "sampled", COLOURS[name], style, band=True)
    frame(axes[0], JOBS["updates"], "episodes", "the same episodes")
    frame(axes[1], JOBS["seconds"], "seconds", "the same seconds")
    axes[0].set_ylabel(f"{JOBS['updates'].label}, sampled")
    styles = {"8 updates per rollout": "-", "1 update per rollout": "--"}
    legend(figure, axes[1], dict.fromkeys(SCRIPTS, "-"), styles)
    figure.suptitle(
        "Two-digit sums at one learning rate and KL weight\n"
        "lines: mean of 5 seeds; bands: lowest to highest",
        fontsize=11,
    )
    save(figure, REPOSITORY / "docs" / "learning-equal.png")


def legend(figure: Figure, axes: Axes, names: dict[str, str], styles: dict[str, str]) -> None:
    for name, style in names.items():
        axes.plot([], [], style, color=COLOURS[name], label=name)
    for name, style in styles.items():
        axes.plot([], [], style, color="black", label=name)
    figure.legend(loc="outside lower center", ncols=6, fontsize=9, frameon=False)


def spread(values: list[float], digits: int) -> str:
    """Mean ± standard deviation over the seeds."""
    return f"{np.mean(values):,.{digits}f} ± {np.std(values, ddof=1):,.{digits}f}"


def table(job: Job, curves_of: dict[str, list[list[dict]]], short: bool = False) -> str:
    """What each command pays and gets: a row per quantity, a column per command. `short`: with the
    rows of docs/compare.md alone.
    """
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
    row(KL, 2, lambda c: c[-1]["kl"])
    row("episodes of the run", 0, lambda c: c[-1]["episodes"])
    row("seconds of the run", 1, lambda c: c[-1]["seconds"])
    if job.memory:
        row(GB, 2, lambda c: c[-1]["gb"])
    for axis, digits in (("episodes", 0), ("seconds", 1)):
        for level in job.levels:
            to(level, axis, digits)
    for axis, least in (("episodes", episodes), ("seconds", seconds)):
        name = f"{first_name}, after {least:,.0f} {axis}"
        row(name, 3, lambda c, axis=axis, least=least: at(c, axis, least, first_key))
    row("gain per nat of KL", 3, lambda c: gain(c) / c[-1]["kl"])
    rows = {name: rows[name] for name in job.short} if short else rows
    if not job.seconds:
        rows = {name: cells for name, cells in rows.items() if "seconds" not in name}
    head = [f"| | {' | '.join(curves_of)} |", "|---" * (len(curves_of) + 1) + "|"]
    return "\n".join(head + [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()])


def points_by_command(results: dict[str, dict], job: str) -> dict[str, list[list[dict]]]:
    return {name: [run["points"] for run in runs] for name, runs in results[job].items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", action="store_true", help="pictures and tables of learning.json")
    parser.add_argument("--all", action="store_true", help="print the tables with every row")
    parser.add_argument("--job", choices=JOBS, default="tiny")
    parser.add_argument("--model", help="folder or name of SmolLM2-135M-Instruct")
    parser.add_argument("--device", help="cuda, mps or cpu; default: the first there is")
    options = parser.parse_args()
    if options.job == "pretrained" and not options.model and not options.draw:
        parser.error(f"--job {options.job} needs --model")
    # {job: {name of a command: [{"points": .., "samples": ..} per seed]}}
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not options.draw:
        job = JOBS[options.job]
        flags = f"{job.flags} --device {options.device}" if options.device else job.flags
        if options.job == "pretrained":
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
            METRICS.write_text(json.dumps(ranges) + "\n")
    for name in results:
        curves_of = points_by_command(results, name)
        if JOBS[name].picture and all(len(curves) > 1 for curves in curves_of.values()):
            draw(JOBS[name], curves_of)
        print(f"\n{JOBS[name].title}\n\n{table(JOBS[name], curves_of, short=not options.all)}")
    if set(results) == set(JOBS):
        draw_equal(results)


if __name__ == "__main__":
    main()
