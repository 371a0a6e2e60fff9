"""All figures of docs/climb.md and its picture.

  python benchmarks/climb.py            # all figures, docs/climb.png: 4 minutes
  python benchmarks/climb.py --runs     # before that, the runs that climb.json lacks: 15 minutes

Each run makes 16 updates with each of 20 rollouts. To repeat a run, take it out of climb.json.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from learning import INK, TEXTS, mpl, train
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parent.parent))

from tools import exact
from tools.exact import GROUPS, LOSSES, STATES, climb, ppo, problem_of, step_of

RESULTS = Path(__file__).with_suffix(".json")
PICTURE = Path(__file__).parent.parent / "docs" / "climb.png"
SHOWN = ["RLOO", "CISPO, bound 5", "DAPO, .2 and .28, by group", "GSPO, clip .2", "GRPO, clip .2"]
SHOWN += ["Dr. GRPO, clip .2", "TRL's RLOO, clip .2", "GSPO, .0003 and .0004"]
PANELS = [  # how the policy moved, a column of climb()
    ("learning", 2, "after learning", "along the true gradient"),
    ("learning", 3, "after learning", "angle to the true gradient, degrees"),
    ("noise", 2, "after a random change of the logits", "along the true gradient"),
]
JOB = """--task cups --num_steps 20 --eval_every 20 --num_epochs 4 --num_mini_batches 4 --kl_coef 0
--prompts_per_step 64 --num_generations 4 --device cpu"""
DR_GRPO = "grpo.py --loss_type dr_grpo --scale_rewards none"
COMMANDS = {
    "Dr. GRPO": DR_GRPO,
    "Dr. GRPO, no clip": f"{DR_GRPO} --clip_range 1e9",
    "GSPO": "grpo.py --loss_type gspo",
    "CISPO": "grpo.py --loss_type cispo",
}


def turned(losses: dict[str, Callable], problems: int = 100) -> None:
    """Print what the means of the table's eight problems can't tell."""
    print(f"{problems} problems: mean, standard error; how many are beyond 45 and 90 degrees")
    for name, figures in climb(losses, problems).items():
        along, angle = figures[:, 2], figures[:, 3]
        error = along.std() / problems**0.5
        print(
            f"{name:28s} along {along.mean():6.3f} ± {error:.3f}, angle {angle.mean():5.1f}", end=""
        )
        print(f"; {(angle > 45).sum()}, {(angle > 90).sum()}")


def draw() -> None:
    """How far and which way each loss climbs, by the KL: means over the table's eight problems."""
    mpl.rcParams.update(dict.fromkeys(TEXTS, INK))
    figure = Figure(figsize=(5.2, 9.0), layout="constrained")
    kls = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1]
    losses = {name: LOSSES[name] for name in SHOWN}
    drifts = ("learning", "noise")
    found = {x: [climb(losses, 8, kl=kl, drift=x) for kl in kls] for x in drifts}
    for panel, (drift, column, title, label) in zip(figure.subplots(3, 1), PANELS, strict=True):
        for name in losses:
            panel.plot(kls, [x[name][:, column].mean() for x in found[drift]], ".-", label=name)
        panel.axhline(0, color=INK, lw=0.8)
        panel.set(xscale="log", title=title, ylabel=label)
        panel.grid(alpha=0.2)
    panel.set_xlabel("KL(old || new) of a completion, in nats")
    handles = panel.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(PICTURE, dpi=110, transparent=True)


def value_models() -> list[tuple[float, float]]:
    """(explained variance, noise of PPO's step over that with V = 0), both with lambda 1, for exact
    values to which noise was added, as a number for each prompt and prefix.
    """
    torch.manual_seed(0)
    found = []
    for seed in range(8):
        b, _, *rest = problem_of(seed)
        states = STATES[GROUPS].flatten(0, 1)  # (rows of a prompt, T)
        share, rewards = b.chance / b.chance.sum(), b.rewards[:, None].expand_as(b.chance)

        def noise(values: torch.Tensor) -> float:
            along, _, std = step_of(lambda b: ppo(b, values * b.mask, 1), b, *rest)  # noqa: B023
            return (std / along).item()

        def variance(x: torch.Tensor) -> torch.Tensor:
            return (share * x**2).sum() - (share * x).sum() ** 2  # noqa: B023

        without = noise(0 * b.values)
        for size in (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0):
            values = b.values + (size * torch.randn(2, 7).double())[:, states].flatten(0, 1)
            explained = 1 - variance(rewards - values) / variance(rewards)
            found.append((explained.item(), noise(values) / without))
    return found


def table(runs: dict[str, list[dict]]) -> str:
    """A row for each loss: mean over the seeds, and the lowest and highest seed."""
    lines = ["| | step 3 | lowest later | last five |"]
    lines.append("|---" * 4 + "|")
    for name, seeds in runs.items():
        all_scores = [run["scores"] for run in seeds]
        columns = [[x[2] for x in all_scores], [min(x[6:]) for x in all_scores]]
        columns.append([statistics.mean(x[15:]) for x in all_scores])
        cells = [f"{statistics.mean(x):.2f} ({min(x):.2f} to {max(x):.2f})" for x in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--runs", action="store_true", help="make the runs that are missing")
    runs = json.loads(RESULTS.read_text()) if RESULTS.exists() else {x: [] for x in COMMANDS}
    if parser.parse_args().runs:
        for seed in range(5):
            for name, command in COMMANDS.items():
                if len(runs[name]) == seed:
                    lines, _, cpu = train(f"{command} {JOB} --seed {seed}")
                    run = {"scores": [round(x["objective/scores"], 4) for x in lines[:20]]}
                    run |= {"greedy": lines[-1]["eval/accuracy_greedy"], "cpu": round(cpu)}
                    runs[name].append(run)
                    RESULTS.write_text(json.dumps(runs) + "\n")
    exact.main([])
    turned(LOSSES)
    print(table(runs))
    models = value_models()
    for sign, kind in ((-1, "below"), (1, "above")):
        changes = [noise > 1 for explained, noise in models if sign * explained > 0]
        print(f"explained variance {kind} 0: {sum(changes)} of {len(changes)} add noise")
    draw()


if __name__ == "__main__":
    main()
