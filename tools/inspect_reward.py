"""Look at a reward before you train on it: the scores of the model as it is, and what gets them.

python tools/inspect_reward.py --prompts my_prompts.jsonl --reward my_rewards.py:my_function
"""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

import tasks
from common import is_flat
from plumbing.config import TaskConfig, flag, parse_flags
from plumbing.data import load_task, prompt_batch, sampling_options, text_of
from plumbing.errors import InputError
from plumbing.models import load_policy
from plumbing.run import run_main
from sampling import sample


@dataclass(kw_only=True)
class Config(TaskConfig):
    smallest_group: ClassVar[int] = 2

    num_prompts: int = flag(32, "sampled from those to train on", group="rollout", least=2)
    num_generations: int = flag(8)
    max_new_tokens: int = flag(64)


def describe_scores(scores: torch.Tensor) -> list[str]:
    """Mean, spread, range and a histogram of scores (N, G), NaN left out, as lines of text."""
    known = scores[~scores.isnan()]
    low, high = known.min().item(), known.max().item()
    spread = f"std {known.std():.3g}, from {low:.3g} to {high:.3g}"
    lines = [f"{len(known)} scores: mean {known.mean():.3g}, {spread}"]
    if scores.isnan().any():
        lines.append(f"{int(scores.isnan().sum())} completions got no score (None)")
    counts = known.histc(10, low, high).long().tolist() if high > low else []
    edges = [low + i * (high - low) / 10 for i in range(10)] + [high]
    for i, count in enumerate(counts):
        bar = "#" * round(50 * count / max(counts))
        lines.append(f"  {edges[i]:8.3g} to {edges[i + 1]:<8.3g}  {bar} {count}")
    flat = is_flat(scores).float().mean()
    lines.append(f"{flat:.0%} of the prompts give all their completions the same score")
    return lines


def extremes(scores: torch.Tensor, prompts: list, texts: list[str]) -> list[str]:
    """Lines with the four lowest and the four highest scores (B,), of B prompts and completions."""
    known = (~scores.isnan()).nonzero().squeeze(1).tolist()
    order = sorted(known, key=lambda i: scores[i].item())
    lines = []
    for title, some in (("lowest", order[:4]), ("highest", order[::-1][:4])):
        lines.append(f"{title}:")
        for i in some:
            line = f"{text_of(prompts[i])} -> {texts[i]}"
            line = textwrap.shorten(line, 200, placeholder=" ...")
            lines.append(f"  {scores[i].item():7.3g}  {line}")
    return lines


def main(args: list[str] | None = None) -> None:
    """Sample completions, score them, and print what the scores look like. Nothing is trained."""
    config = parse_flags(Config, __doc__, args)
    model, tokenizer = load_policy(config)
    task = load_task(config, tasks, model, tokenizer)
    rows = prompt_batch(task.train, 0, min(config.num_prompts, len(task.train)), config.seed)
    sampling = sampling_options(config, model, tokenizer)
    rollout = sample(model, *task.encode(rows), **sampling)
    scores, texts = task.score(rows, rollout)
    scores = scores.cpu()
    if scores.isnan().all():
        raise InputError("the reward returned None for every completion")
    print("\n".join(describe_scores(scores.view(-1, config.num_generations))))
    mean_length = rollout.completion_mask.sum(1).float().mean()
    ended = rollout.finished.float().mean()
    print(f"{ended:.0%} of the completions ended by themselves; mean length {mean_length:.0f}")
    prompts = [row["prompt"] for row in rows for _ in range(config.num_generations)]
    print("\n".join(extremes(scores, prompts, texts)))


if __name__ == "__main__":
    run_main(main)
