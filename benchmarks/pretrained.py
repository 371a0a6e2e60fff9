"""What the three learn on a pretrained model, and what PPO's value model needs there: for
docs/compare.md.

  python benchmarks/pretrained.py --model FOLDER   # SmolLM2-135M-Instruct, 4 hours of a CPU core
  python benchmarks/pretrained.py                  # table and picture alone

Sums of numbers below 30, after one example. Each step has new prompts: so the mean score of its 64
completions is an accuracy on sums that the policy hasn't seen. A run that is in pretrained.json
isn't repeated.
"""

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl
import numpy as np
from learning import COLOURS, INK, REPOSITORY, TEXTS
from matplotlib.figure import Figure

RESULTS = Path(__file__).with_suffix(".json")
SEEDS = 3
SUMS = "--reward numeric_match --max_new_tokens 4 --stop '\n' --num_steps 16 --eval_every 16"
PPO = "ppo.py --prompts_per_step 16 --num_generations 4 --num_mini_batches 2"
GRPO = "grpo.py --prompts_per_step 8"
KEPT = ("objective/scores", "val/explained_variance")
MODELS = ("value_model", "policy")
# What no flag sets is changed in a copy of ppo.py: each pair is a line, and what stands there then.
OPTIMIZER = "        parameters, lr=config.learning_rate"
BY_MODEL = '[{"params": list(m.parameters())} for m in (policy, value_model)]'
RATE = "        set_learning_rate(optimizer, config, step)\n"
CLIP = "            grad_norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)\n"
FAST = [
    (OPTIMIZER, OPTIMIZER.replace("parameters", BY_MODEL)),
    (RATE, f'{RATE}        optimizer.param_groups[1]["lr"] *= 10\n'),
]
ALONE = [(CLIP, f"            if step < 4:\n                policy.zero_grad()\n{CLIP}")]
OF_V, OF_POLICY = (CLIP.replace("parameters", f"{x}.parameters()") for x in MODELS)
JOBS = {  # {name: (command, changes)}
    "PPO": (PPO, []),
    "PPO, V at 10 times the rate": (PPO, FAST),
    "PPO, so, and V alone for 4 steps": (PPO, FAST + ALONE),
    "PPO, clipped apart": (PPO, [(CLIP, OF_V + OF_POLICY)]),
    "PPO, --lam 1": (f"{PPO} --lam 1", []),
    "GRPO": (GRPO, []),
    "RLOO": ("rloo.py --prompts_per_step 16", []),
    "GRPO, LoRA rank 1": (f"{GRPO} --lora_r 1", []),
    "GRPO, LoRA rank 8": (f"{GRPO} --lora_r 8", []),
    "GRPO, LoRA rank 64": (f"{GRPO} --lora_r 64", []),
}


def train(command: str, changes: list[tuple[str, str]], flags: str) -> dict:
    """Run a script, changed or not: score and explained variance of each step, evaluations."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [(a, b) for a in range(30) for b in range(30)]
        random.Random(0).shuffle(rows)
        rows = [{"prompt": f"3+4=7\n{a}+{b}=", "answer": str(a + b)} for a, b in rows]
        Path(folder, "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        name, _, own = command.partition(" ")
        text = (REPOSITORY / name).read_text()
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        Path(folder, name).write_text(text)
        flags += f" --prompts {folder}/sums.jsonl --output_dir {folder}/run"
        subprocess.run(
            [sys.executable, f"{folder}/{name}", *shlex.split(f"{own} {SUMS} {flags}")],
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, stdout=subprocess.DEVNULL, check=True,
        )  # fmt: skip
        lines = map(json.loads, Path(folder, "run", "metrics.jsonl").read_text().splitlines())
        return record(list(lines))


def record(lines: list[dict]) -> dict:
    """What is kept of a run: numbers of each step, and the evaluation after the last."""
    steps, last = [line for line in lines if "episode" in line], lines[-1]
    found = {key: [round(line[key], 4) for line in steps] for key in KEPT if key in steps[0]}
    return found | {"sampled": last["eval/accuracy"], "greedy": last["eval/accuracy_greedy"]}


def measure(flags: str, results: dict[str, list[dict]]) -> None:
    for seed in range(SEEDS):
        for name, (command, changes) in JOBS.items():
            if len(results.setdefault(name, [])) == seed:
                results[name].append(train(command, changes, f"{flags} --seed {seed}"))
                RESULTS.write_text(json.dumps(results) + "\n")
                print(f"{name}, seed {seed}: {results[name][-1]}", flush=True)


def smooth(scores: list[float]) -> np.ndarray:
    """Means over three steps, of 192 completions."""
    return np.convolve(scores, np.full(3, 1 / 3), "valid")


def table(results: dict[str, list[dict]]) -> str:
    """A number per seed: accuracy and explained variance of the second half, greedy at the end."""
    lines = ["| | accuracy | greedy | explained variance |", "|---|---|---|---|"]
    for name, runs in results.items():
        halves = [
            [np.mean(run[key][8:]) for run in runs if key in run]
            for key in ("objective/scores", "val/explained_variance")
        ]
        columns = [halves[0], [run["greedy"] for run in runs], halves[1]]
        cells = [", ".join(f"{x:.2f}" for x in column) for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(results: dict[str, list[dict]]) -> None:
    """Scores of all, and explained variance of what differs in its value model."""
    mpl.rcParams.update(dict.fromkeys(TEXTS, INK))
    figure = Figure(figsize=(5.2, 6.4), layout="constrained")
    scores, variance = figure.subplots(2, 1)
    styles = {"PPO": "-", "PPO, V at 10 times the rate": "--", "PPO, --lam 1": ":"}
    colours = dict.fromkeys(styles, COLOURS["PPO"]) | {x: COLOURS[x] for x in ("GRPO", "RLOO")}
    for name, colour in colours.items():
        y = np.array([smooth(run["objective/scores"]) for run in results[name]])
        x = 64 * np.arange(2, 2 + y.shape[1])
        options = {"color": colour, "lw": 1.6, "label": name}
        scores.plot(x, y.mean(0), styles.get(name, "-"), **options)
        if name in styles:
            y = np.mean([run["val/explained_variance"] for run in results[name]], 0)
            variance.plot(64 * np.arange(len(y)), y, styles[name], **options)
    scores.set(ylabel="unseen sums right (means of 3 steps)", xlabel="completions")
    variance.set(ylabel="val/explained_variance", xlabel="completions")
    for axes in (scores, variance):
        axes.grid(alpha=0.2)
    lines = scores.get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle("Sums, SmolLM2-135M-Instruct: means over the seeds", fontsize=10)
    figure.savefig(REPOSITORY / "docs" / "pretrained.png", dpi=130, transparent=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="folder or name; default: table and picture alone")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if options.model:
        measure(f"--model {options.model}", results)
    print(table(results))
    draw(results)


if __name__ == "__main__":
    main()
