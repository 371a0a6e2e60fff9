"""Runs as the scripts write them, made up: what tools/look.py is tested on."""

import json
import math
import random
from pathlib import Path

PROMPTS = ["12+34=", "  7 +5=", "98+7=", "<b>1</b> & 2"]
OF_TRAINING = ("ratio", "clipped")
TOKENS = [*"0123456789", " ", "\n", "<script>", "é", "</script>", " the"]


def numbers(rng: random.Random, n: int, scale: float = 1.0) -> list[float]:
    return [float(f"{rng.gauss(0, scale):.5g}") for _ in range(n)]


def completion(rng: random.Random, script: str, step: int, length: int, last: bool) -> dict:
    """A line of tokens.jsonl without what says where it belongs."""
    tokens = [*rng.choices(TOKENS, k=length - 1), "<|endoftext|>"]
    old = [-abs(x) for x in numbers(rng, length)]
    line = {
        "score": rng.choice([0.0, 1.0, None]),
        "finished": rng.random() < 0.9,
        "num_tokens": length,
        "tokens": tokens,
        "sampler_logprobs": old,
        "old_logprobs": old,
        "ref_logprobs": [-abs(x) for x in numbers(rng, length)],
        "kl": numbers(rng, length, 0.1 + step / 300),
    }
    if not last:
        line["new_logprobs"] = [float(f"{x + rng.gauss(0, 0.1):.5g}") for x in old]
    if script == "ppo":
        line |= {key: numbers(rng, length) for key in ("rewards", "values", "returns")}
        line |= {"advantages": numbers(rng, length)}
        line |= {"ratio": [float(f"{math.exp(x):.5g}") for x in numbers(rng, length, 0.1)]}
        line |= {"clipped": [float(abs(x - 1) > 0.2) for x in line["ratio"]]}
    else:
        line |= {"advantages": numbers(rng, 1)[0]}
    if script == "grpo":  # as one that isn't in the update
        line |= {"ratio": [None] * length, "clipped": [None] * length}
    if script == "rloo":
        line |= {"ratio": abs(numbers(rng, 1)[0]), "clipped": 0.0}
    return line


def completion_lines(folder: Path) -> list[dict]:
    """The records of tokens.jsonl."""
    text = (folder / "tokens.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def write_run(
    folder: Path,
    script: str = "ppo",
    steps: int = 20,
    every: int = 5,
    generations: int = 2,
    length: int = 5,
    tokens: bool = True,
) -> Path:
    """Write the folder <script>-made-up-s0 of a run, and return it."""
    rng = random.Random(script)
    folder = folder / f"{script}-made-up-s0"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"script": script, "bf16": None}))
    lines = []
    for step in range(steps + 1):
        done = step / steps
        line = {"step": step}
        if step < steps:
            line |= {
                "objective/scores": done + rng.gauss(0, 0.05),
                "objective/kl": 4 * done + rng.gauss(0, 0.1),
                "objective/entropy": 1 - 0.9 * done + rng.gauss(0, 0.02),
                "length/mean": 4 + rng.gauss(0, 0.2),
                "length/truncated_frac": 0.8 if step == steps // 2 else 0.1,
                "policy/clipfrac_avg": 0.02 if step else None,
                "val/ratio_max_dev_first": 1e-6 if step else None,
                "grad_norm": 1.0,
            }
        if step % every == 0 or step == steps:
            line |= {"eval/accuracy": done, "eval/accuracy_greedy": min(1, done + 0.1)}
        lines.append(line)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    if tokens:
        with (folder / "tokens.jsonl").open("w", encoding="utf-8") as file:
            for step in range(0, steps + 1, every):
                for split, count in (("train", generations), ("heldout", 1)):
                    for prompt in range(len(PROMPTS) if split == "heldout" else 2):
                        for n in range(count if step < steps or split == "heldout" else 0):
                            where = {"step": step, "split": split, "prompt_index": prompt}
                            where |= {"completion_index": n, "prompt": PROMPTS[prompt]}
                            body = completion(rng, script, step, length, step == steps)
                            if split == "heldout":
                                body = {k: v for k, v in body.items() if k not in OF_TRAINING}
                            file.write(json.dumps(where | body) + "\n")
    return folder
