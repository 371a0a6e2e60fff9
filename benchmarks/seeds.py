"""Does the first example learn every time? Each script with its defaults, on one thread.

  python benchmarks/seeds.py                 # 8 seeds of three scripts, half an hour on two cores
  python benchmarks/seeds.py --seeds 4242    # a seed on which no default was chosen
  python benchmarks/seeds.py --table         # a table of seeds.json

A run that is in seeds.json is not repeated: to measure again, delete the file. A run passes if at
the end enough sums are right, if no evaluation lies far below the best one before it, and if the KL
stays small at every step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from learning import train

RESULTS = Path(__file__).with_suffix(".json")  # {name of a script: {seed: run}}


def measure(script: str, seed: int) -> dict[str, float]:
    """A run: accuracies before and at the end, their largest drop, and the largest KL of a step."""
    lines, _ = train(f"{script}.py --device cpu --seed {seed}")
    sampled, greedy = (
        [line[name] for line in lines if name in line]
        for name in ("eval/accuracy", "eval/accuracy_greedy")
    )
    found = {"before": sampled[0], "greedy_before": greedy[0]}
    found |= {"accuracy": sampled[-1], "greedy": greedy[-1]}
    found["drop"] = max(largest_drop(sampled), largest_drop(greedy))
    found["kl"] = max(line["objective/kl"] for line in lines if "objective/kl" in line)
    return {name: round(value, 4) for name, value in found.items()}


def largest_drop(values: list[float]) -> float:
    """How far a value lies at most below the largest one before it; 0 if none does."""
    return max(max(values[: i + 1]) - value for i, value in enumerate(values))


def passes(run: dict[str, float]) -> bool:
    """Whether a run has learnt, steadily."""
    learnt = run["accuracy"] >= 0.95 and run["greedy"] >= 0.97
    return learnt and run["drop"] <= 0.05 and run["kl"] <= 3


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """A line per script."""
    columns = "runs | that pass | sampled: lowest, median, highest | greedy: lowest | largest drop"
    lines = [f"| | {columns} | largest KL |", "|---" * 7 + "|"]
    for name, by_seed in sorted(results.items()):
        runs = list(by_seed.values())
        sampled = [run["accuracy"] for run in runs]
        cells = [name, str(len(runs)), str(sum(map(passes, runs)))]
        cells += [f"{min(sampled):.3f}, {statistics.median(sampled):.3f}, {max(sampled):.3f}"]
        cells += [f"{min(run['greedy'] for run in runs):.3f}"]
        cells += [f"{max(run[key] for run in runs):.3f}" for key in ("drop", "kl")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(8)])
    parser.add_argument("--table", action="store_true", help="of seeds.json alone")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    jobs = [(script, seed) for seed in options.seeds for script in ("ppo", "grpo", "rloo")]
    jobs = [(f"{script.upper()}, threads: 1", script, seed) for script, seed in jobs]
    new = [job for job in jobs if str(job[2]) not in results.get(job[0], {})]
    with ThreadPoolExecutor(2) as pool:
        new = [] if options.table else new
        for (name, _, seed), run in zip(new, pool.map(lambda job: measure(*job[1:]), new)):
            results.setdefault(name, {})[str(seed)] = run
            RESULTS.write_text(json.dumps(results) + "\n")
            print(f"{name}, seed {seed}: {run}", flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
