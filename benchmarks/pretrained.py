"""What the three learn on a pretrained model, and what PPO's value model needs there: for
docs/compare.md.

  python benchmarks/pretrained.py --model FOLDER --workers 8   # about ten minutes of an H200
  python benchmarks/pretrained.py                              # tables alone

FOLDER holds SmolLM2-135M-Instruct on bfloat16's grid. "chat" asks for a sum in a sentence, and one
completion in 40 is right at first. "sums" has numbers below 30 and an example, and one in eight is
right. Each step has new prompts: so the mean score of its completions is an accuracy on sums that
the policy hasn't seen. A run that is in pretrained.json isn't repeated.
"""

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np
from learning import REPOSITORY

RESULTS = Path(__file__).with_suffix(".json")
SEEDS = 5
CHAT = "--task add --max_new_tokens 16 --num_steps 24 --eval_every 24 --num_eval_prompts 200"
SUMS = "--prompts {folder}/sums.jsonl --reward numeric_match --max_new_tokens 4 --stop '\n' "
SUMS += "--num_steps 16 --eval_every 16"
PPO = "ppo.py --num_mini_batches 2 --prompts_per_step 16 --num_generations 4"
FEW = "ppo.py --num_mini_batches 2 --prompts_per_step 32"
GRPO = "grpo.py --prompts_per_step 8"
RLOO = "rloo.py --prompts_per_step 16"
KEPT = ("objective/scores", "objective/kl", "val/explained_variance")
MODELS = ("value_model", "policy")
# What no flag sets is changed in a copy of ppo.py: each pair is a line, and what stands there then.
OPTIMIZER = "        parameters, lr=config.learning_rate"
BY_MODEL = '[{"params": list(m.parameters())} for m in (policy, value_model)]'
RATE = '            group["lr"] = config.learning_rate * share\n'
CLIP = "grad_norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)\n"
CLIP = 16 * " " + CLIP
TEN = [
    (OPTIMIZER, OPTIMIZER.replace("parameters", BY_MODEL)),
    (RATE, f'{RATE}        optimizer.param_groups[1]["lr"] *= 10\n'),
]
ALONE = [(CLIP, f"{16 * ' '}if step < 4:\n{20 * ' '}policy.zero_grad()\n{CLIP}")]
OF_V, OF_POLICY = (CLIP.replace("parameters", f"{x}.parameters()") for x in MODELS)
APART = [(CLIP, OF_V + OF_POLICY)]
JOBS = {  # {task: {name: (command, changes)}}
    "chat": {
        "PPO, 64 a step": (f"{PPO} {CHAT}", []),
        "PPO, 32 a step": (f"{FEW} {CHAT}", []),
        "GRPO": (f"{GRPO} {CHAT}", []),
        "RLOO": (f"{RLOO} {CHAT}", []),
        "GRPO, LoRA rank 16": (f"{GRPO} --lora_r 16 {CHAT}", []),
    },
    "sums": {
        "PPO": (f"{PPO} {SUMS}", []),
        "GRPO": (f"{GRPO} {SUMS}", []),
        "RLOO": (f"{RLOO} {SUMS}", []),
        "PPO, --kl_coef 0.1": (f"{PPO} --kl_coef 0.1 {SUMS}", []),
        "PPO, --kl_coef 0.02": (f"{PPO} --kl_coef 0.02 {SUMS}", []),
        "PPO, --lam 1 --vf_coef 0": (f"{PPO} --lam 1 --vf_coef 0 {SUMS}", []),
        "PPO, V at 10 times the rate": (f"{PPO} {SUMS}", TEN),
        "PPO, --lam 1": (f"{PPO} --lam 1 {SUMS}", []),
        "PPO, V at 10 times the rate, alone for 4 steps": (f"{PPO} {SUMS}", TEN + ALONE),
        "PPO, V alone for 4 steps": (f"{PPO} {SUMS}", ALONE),
        "PPO, clipped apart": (f"{PPO} {SUMS}", APART),
        "GRPO, LoRA rank 1": (f"{GRPO} --lora_r 1 {SUMS}", []),
        "GRPO, LoRA rank 64": (f"{GRPO} --lora_r 64 {SUMS}", []),
    },
}


def train(command: str, changes: list[tuple[str, str]], flags: str) -> dict:
    """Run a script, changed or not: what `record` keeps of it."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [(a, b) for a in range(30) for b in range(30)]
        random.Random(0).shuffle(rows)
        rows = [{"prompt": f"3+4=7\n{a}+{b}=", "answer": str(a + b)} for a, b in rows]
        Path(folder, "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        name, _, own = command.format(folder=folder).partition(" ")
        text = (REPOSITORY / name).read_text()
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        Path(folder, name).write_text(text)
        flags = shlex.split(f"{own} {flags} --output_dir {folder}/run")
        subprocess.run(
            [sys.executable, f"{folder}/{name}", *flags], check=True, stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"},
        )  # fmt: skip
        lines = map(json.loads, Path(folder, "run", "metrics.jsonl").read_text().splitlines())
        return record(list(lines))


def record(lines: list[dict]) -> dict:
    """What is kept of a run: numbers of each step, the evaluations, and what it takes."""
    steps, last = [line for line in lines if "episode" in line], lines[-1]
    found = {key: [round(line[key], 4) for line in steps] for key in KEPT if key in steps[0]}
    found["episodes"] = steps[0]["episode"]  # of a step
    found["gb"] = round(max(line.get("memory/peak_gb") or 0 for line in steps), 2)
    for key in ("accuracy", "accuracy_greedy"):
        found[key] = [round(line[f"eval/{key}"], 4) for line in (lines[0], last)]
    return found


def measure(flags: str, workers: int, results: dict[str, dict[str, dict]]) -> None:
    """Make the runs that aren't in `results`, and save each."""
    runs = [
        (seed, task, name, *job)
        for task, jobs in JOBS.items()
        for seed in range(SEEDS)
        for name, job in jobs.items()
        if str(seed) not in results.setdefault(task, {}).setdefault(name, {})
    ]
    with ThreadPoolExecutor(workers) as pool:
        jobs = {pool.submit(train, *run[3:], f"{flags} --seed {run[0]}"): run[:3] for run in runs}
        for job in as_completed(jobs):
            seed, task, name = jobs[job]
            results[task][name][str(seed)] = job.result()
            RESULTS.write_text(json.dumps(results) + "\n")
            print(f"{task}, {name}, seed {seed}: {job.result()}", flush=True)


def smooth(scores: list[float]) -> np.ndarray:
    """Means over three steps."""
    return np.convolve(scores, np.full(3, 1 / 3), "valid")


def half(key: str, runs: dict[str, dict]) -> dict[str, float]:
    """The mean of the second half of each run, by seed."""
    found = {seed: run[key] for seed, run in runs.items() if key in run}
    return {seed: float(np.mean(values[len(values) // 2 :])) for seed, values in found.items()}


def table(runs_of: dict[str, dict[str, dict]]) -> str:
    """Mean ± standard deviation over the seeds of what a run does in its second half: accuracy, and
    how far it is above that of PPO, the first row, at the same seed; explained variance, KL. Then
    completions until the accuracy of three steps is 0.3 (never: a step more than there are), and
    the evaluation at the end.
    """
    names = ["accuracy", "above PPO", "explained variance", "KL", "completions to 0.3"]
    lines = [f"| | {' | '.join([*names, 'sampled', 'greedy', 'GB'])} |", "|---" * 9 + "|"]
    first = half("objective/scores", next(iter(runs_of.values())))
    for name, by_seed in runs_of.items():
        accuracy, runs = half("objective/scores", by_seed), by_seed.values()
        reached = [[*(smooth(run["objective/scores"]) >= 0.3), True].index(True) for run in runs]
        columns = [
            ([*accuracy.values()], 2),
            ([x - first[seed] for seed, x in accuracy.items() if seed in first], 2),
            ([*half("val/explained_variance", by_seed).values()], 2),
            ([*half("objective/kl", by_seed).values()], 1),
            ([float(run["episodes"] * (x + 3)) for run, x in zip(runs, reached)], 0),
            ([run["accuracy"][1] for run in runs], 3),
            ([run["accuracy_greedy"][1] for run in runs], 3),
            ([run["gb"] for run in runs], 1),
        ]
        cells = [
            f"{np.mean(x):,.{digits}f} ± {np.std(x, ddof=1):,.{digits}f}" if len(x) > 1 else ""
            for x, digits in columns
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="folder or name; default: tables alone")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time (default: 1)")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if options.model:
        measure(f"--model {options.model}", options.workers, results)
    for task, runs_of in results.items():
        print(f"\n{task}\n\n{table(runs_of)}")


if __name__ == "__main__":
    main()
