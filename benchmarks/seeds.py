"""Does the first example learn every time? Each script with its defaults, on one thread and on two.

  python benchmarks/seeds.py                 # 20 seeds, an hour and a half on two CPU cores
  python benchmarks/seeds.py --seeds 4242    # a seed on which no default was chosen
  python benchmarks/seeds.py --table         # a table of seeds.json

A run that is in seeds.json is not repeated: to measure again, delete the file. Threads change the
order in which floats are added, so a run on two threads is another run. A run passes if at the end
enough of the held-out sums are right, sampled and greedy, if no evaluation lies far below the best
one before it, and if the KL stays small at every step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
RESULTS = Path(__file__).with_suffix(".json")
SCRIPTS = ("ppo", "grpo", "rloo")
UNUSED_SEED = 4242
# What every run must reach: see passes.
LOWEST_ACCURACY, LOWEST_GREEDY, LARGEST_DROP, LARGEST_KL = 0.95, 0.97, 0.05, 3.0


def measure(script: str, threads: int, seed: int) -> dict[str, float]:
    """A run: accuracy and greedy accuracy at the end, the largest drop of either below its best so
    far, and the largest KL of a step.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(REPOSITORY / f"{script}.py"), "--device", "cpu"]
        command += ["--seed", str(seed), "--output_dir", f"{folder}/run"]
        # Passive: two runs share the cores, so a thread that waits must not keep one busy.
        limit = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        subprocess.run(command, check=True, capture_output=True, env=limit)
        text = (Path(folder) / "run" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    accuracy = [x["eval/accuracy"] for x in lines if "eval/accuracy" in x]
    greedy = [x["eval/accuracy_greedy"] for x in lines if "eval/accuracy_greedy" in x]
    found = {
        "before": accuracy[0],
        "greedy_before": greedy[0],
        "accuracy": accuracy[-1],
        "greedy": greedy[-1],
        "drop": max(largest_drop(accuracy), largest_drop(greedy)),
        "kl": max(x["objective/kl"] for x in lines if "objective/kl" in x),
    }
    return {name: round(value, 4) for name, value in found.items()}


def largest_drop(values: list[float]) -> float:
    """How far a value lies at most below the largest one before it; 0 if none does."""
    return max(max(values[: i + 1]) - value for i, value in enumerate(values))


def passes(run: dict[str, float]) -> bool:
    """Whether a run has learnt, steadily."""
    learnt = run["accuracy"] >= LOWEST_ACCURACY and run["greedy"] >= LOWEST_GREEDY
    return learnt and run["drop"] <= LARGEST_DROP and run["kl"] <= LARGEST_KL


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """A line per script and number of threads."""
    lines = [
        "| | runs | that pass | sampled: lowest, median, highest | greedy: lowest | largest drop"
        " | largest KL |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, by_seed in sorted(results.items()):
        runs = [run for seed, run in by_seed.items() if seed != str(UNUSED_SEED)]
        sampled = [run["accuracy"] for run in runs]
        cells = [
            f"{len(runs)} | {sum(map(passes, runs))}",
            f"{min(sampled):.3f}, {statistics.median(sampled):.3f}, {max(sampled):.3f}",
            f"{min(run['greedy'] for run in runs):.3f}",
            f"{max(run['drop'] for run in runs):.3f}",
            f"{max(run['kl'] for run in runs):.2f}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(20), UNUSED_SEED])
    parser.add_argument("--table", action="store_true", help="of seeds.json alone")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}

    lock = threading.Lock()

    def work(script: str, threads: int, seed: int) -> None:
        name = f"{script.upper()}, threads: {threads}"
        if str(seed) in results.get(name, {}):
            return
        run = measure(script, threads, seed)
        with lock:
            results.setdefault(name, {})[str(seed)] = run
            RESULTS.write_text(json.dumps(results) + "\n")
        print(f"{name}, seed {seed}: {run}", flush=True)

    pairs = [(seed, threads) for seed in options.seeds for threads in (1, 2)]
    jobs = [(script, threads, seed) for seed, threads in pairs for script in SCRIPTS]
    if not options.table:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(work, *zip(*jobs, strict=True)))
    print(table(results))


if __name__ == "__main__":
    main()
