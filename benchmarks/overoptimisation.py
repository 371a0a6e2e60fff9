"""A learned reward trusted too far: PPO and best of n on reward models of few and of many pairs.

  python benchmarks/overoptimisation.py            # 40 minutes on two CPU cores
  python benchmarks/overoptimisation.py --draw     # the picture alone

Reward models on 50, 200, 1,000 and 5,000 pairs of the embedded model's own samples, a tenth of the
labels flipped, each at its best held-out accuracy. PPO then trains on each of them, with a KL
penalty that hardly holds it and with one that does. The proxy is the score of the reward model, the
truth is the verifier, which nothing is trained on: Gao et al. 2023, arXiv 2210.10760. Beside PPO
stands the best of n samples by the same score, with a KL of log n - (n - 1) / n. The results of all
runs are in overoptimisation.json: to measure one again, take it out of that file.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from drawing import SIZES as COLOURS
from drawing import plain, save
from matplotlib.figure import Figure

from plumbing.data import PADDING, decode, encode_prompts
from plumbing.models import eos_token_ids, load_causal, load_tokenizer
from plumbing.preferences import RewardModel
from sampling import sample
from tasks import add_prompts, numeric_match

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).with_suffix(".json")
PICTURE = REPOSITORY / "docs" / "overoptimisation.png"
SIZES = (50, 200, 1000, 5000)
SEEDS = range(5)
WEIGHTS = (0.01, 0.1)  # of the KL penalty
PPO = "--num_eval_prompts 512 --eval_every 5 --save_every 1000 --kl_coef {} --seed {}"
SAMPLES, PROMPTS = 64, 256  # for the best of n


def train_judge(size: int, seed: int, folder: Path) -> None:
    """reward_model.py on so many pairs; folder/best is the model of the best evaluation."""
    import reward_model
    from plumbing import preferences

    preferences.OWN_PAIRS = size
    evaluate, best = reward_model.evaluate_pairs, -1.0

    def keep_the_best(config, model, pairs):
        nonlocal best
        found = evaluate(config, model, pairs)
        if found.metrics["eval/accuracy"] > best:
            best = found.metrics["eval/accuracy"]
            model.save_pretrained(folder / "best")
            pairs.tokenizer.save_pretrained(folder / "best")
        return found

    reward_model.evaluate_pairs = keep_the_best
    reward_model.main(f"--eval_every 20 --seed {seed} --output_dir {folder}".split())


def run(command: list[str], folder: Path) -> list[dict]:
    """The metrics of a run, one dict per step."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.splitlines()[-1]}")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def best_of_n(folder: Path, seed: int) -> dict:
    """What the best of n samples scores, by the proxy and in truth, for n = 1, 2, 4, ..., 64; and
    mean and standard deviation of the proxy over all samples.
    """
    policy, tokenizer = load_causal("tiny").eval(), load_tokenizer("tiny")
    rows = add_prompts()[1][:PROMPTS]
    generator = torch.Generator().manual_seed(seed)
    scores, right = [], []
    judge = RewardModel(str(folder), torch.device("cpu"), batch_size=1024)
    for start in range(0, len(rows), 32):
        part = rows[start : start + 32]
        rollout = sample(
            policy, *encode_prompts(tokenizer, part), num_generations=SAMPLES, max_rows=2048,
            max_new_tokens=5, temperature=1.0, eos_token_ids=eos_token_ids(policy, tokenizer),
            pad_token_id=PADDING, generator=generator,
        )  # fmt: skip
        texts = decode(tokenizer, rollout)
        whole = [row for row in part for _ in range(SAMPLES)]
        scores.append(judge([row["prompt"] for row in whole], texts))
        right.append(numeric_match(texts, [row["answer"] for row in whole]))
    scores = np.array(scores).reshape(-1, SAMPLES)
    right = np.array(right).reshape(-1, SAMPLES)
    order = scores.argsort(1)
    ranked = [np.take_along_axis(x, order, 1).mean(0) for x in (scores, right)]
    found = []
    for n in (1, 2, 4, 8, 16, 32, 64):
        # That the k-th of all samples, from the lowest, is the best of n drawn without replacement.
        chances = [math.comb(k, n - 1) / math.comb(SAMPLES, n) for k in range(SAMPLES)]
        proxy, truth = (float(np.dot(chances, x)) for x in ranked)
        found.append({"kl": math.log(n) - (n - 1) / n, "proxy": proxy, "truth": truth})
    return {"points": found, "mean": float(scores.mean()), "std": float(scores.std())}


def points(metrics: list[dict]) -> list[dict]:
    """KL, proxy and truth at each evaluation at which the KL is known: all but the last."""
    names = {"kl": "objective/kl", "proxy": "eval/reward", "truth": "eval/accuracy"}
    found = [m for m in metrics if "eval/reward" in m and "objective/kl" in m]
    return [{key: m[name] for key, name in names.items()} for m in found]


def measure(results: dict) -> None:
    """Fill in the runs that are missing, two at a time."""

    def one(job: tuple[int, int]) -> None:
        size, seed = job
        key = f"{size} pairs, seed {seed}"
        if key in results:
            return
        with tempfile.TemporaryDirectory() as work:
            judge = Path(work) / "judge"
            trained = run([__file__, "--judge", str(size), str(seed), str(judge)], judge)
            found = {
                "accuracy": max(m["eval/accuracy"] for m in trained if "eval/accuracy" in m),
                "best of n": best_of_n(judge / "best", seed),
            }
            for weight in WEIGHTS:
                folder = Path(work) / str(weight)
                command = [str(REPOSITORY / "ppo.py"), *PPO.format(weight, seed).split()]
                command += ["--reward_model", f"{judge}/best", "--output_dir", str(folder)]
                found[f"PPO, kl_coef {weight}"] = points(run(command, folder))
        results[key] = found
        RESULTS.write_text(json.dumps(results) + "\n")
        print(key, found["accuracy"], flush=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, [(size, seed) for seed in SEEDS for size in SIZES]))


def paths_of(results: dict, size: int, kind: str) -> dict[str, np.ndarray]:
    """sqrt(KL), proxy and truth, (seeds, evaluations) each, of a kind of runs. The proxy is in
    standard deviations of the score of the model's own samples, above their mean.
    """
    paths = []
    for found in (x for name, x in results.items() if name.startswith(f"{size} pairs, ")):
        best = found["best of n"]
        path = best["points"] if kind == "best of n" else found[kind]
        columns = {key: np.array([point[key] for point in path]) for key in path[0]}
        paths.append(
            {
                "kl": np.sqrt(columns["kl"].clip(0)),  # of a sample it may be below 0
                "proxy": (columns["proxy"] - best["mean"]) / best["std"],
                "truth": columns["truth"],
            }
        )
    return {key: np.array([path[key] for path in paths]) for key in paths[0]}


# The truth is the share of right sums. Its best is the best evaluation: stopping early saves it
# where it is known. The unit of the proxy is the standard deviation of the scores of the model's
# own samples.
KINDS = ("PPO, kl_coef 0.01", "PPO, kl_coef 0.1", "best of n")


def draw(results: dict) -> None:
    """Score above, right sums below, against sqrt(KL); a column per kind of run."""
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    axes = figure.subplots(2, 3, sharey="row", sharex=True)
    names = {
        "proxy": "score of the reward model\n(standard deviations)",
        "truth": "share of right sums",
    }
    for row, (key, name) in enumerate(names.items()):
        for column, (panel, kind) in enumerate(zip(axes[row], KINDS)):
            for size, colour in zip(SIZES, COLOURS, strict=False):
                found = paths_of(results, size, kind)
                x, y = found["kl"].mean(0), found[key]
                label = f"{size:,}"
                panel.plot(x, y.mean(0), "o-", ms=3, lw=1.8, color=colour, label=label)
                std = y.std(0, ddof=1)
                low, high = y.mean(0) - std, y.mean(0) + std
                order = x.argsort()  # a band needs x in order; near its end PPO goes to and fro
                panel.fill_between(
                    x[order], low[order], high[order], color=colour, alpha=0.12, lw=0
                )
            plain(panel, kind.replace("kl_coef", "KL weight") if row == 0 else "")
            panel.set_xlim(0, 2.3)
            if column == 0:
                panel.set_ylabel(name)
            if row == 1:
                panel.set_xlabel("square root of the KL to the start")
                panel.axhline(y.mean(0)[0], color="black", lw=0.8, ls=":")
    axes[1, 1].annotate("at the start", (1.7, 0.44), fontsize=8)
    axes[1, 2].legend(frameon=False, loc="lower left", fontsize=9, title="pairs seen")
    figure.suptitle(
        "Trust a reward model too far, and its score rises while the truth falls\n"
        "(a point per evaluation: mean of 5 seeds; bands: ± standard deviation)",
        fontsize=11,
    )
    save(figure, PICTURE)


def section(results: dict) -> str:
    """The table: means over the seeds, and the standard deviation of the truth."""
    lines = [
        "| pairs | judged rightly | run | sqrt(KL) at the end | proxy | truth at the start |"
        " at its best | at the end |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for size in SIZES:
        runs = [x for name, x in results.items() if name.startswith(f"{size} pairs, ")]
        judged = np.mean([x["accuracy"] for x in runs])
        for kind in KINDS:
            found = paths_of(results, size, kind)
            truth = found["truth"]
            cells = [
                f"{size:,}", f"{judged:.3f}", kind, f"{found['kl'][:, -1].mean():.2f}",
                f"{found['proxy'][:, 0].mean():+.2f} to {found['proxy'][:, -1].mean():+.2f}",
                f"{truth[:, 0].mean():.3f}",
                f"{truth.max(1).mean():.3f} ± {truth.max(1).std(ddof=1):.3f}",
                f"{truth[:, -1].mean():.3f} ± {truth[:, -1].std(ddof=1):.3f}",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", action="store_true", help="the picture of overoptimisation.json")
    parser.add_argument("--judge", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.judge:
        size, seed, folder = options.judge
        return train_judge(int(size), int(seed), Path(folder))
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not options.draw:
        measure(results)
    draw(results)
    print(section(results))


if __name__ == "__main__":
    main()
