"""Options of later papers, all off by default: each is a line or a few in a script's loop."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
from torch import Tensor, nn

from common import Rollout, is_flat
from plumbing.data import Task
from plumbing.forward import to
from sampling import concatenate, sample

Drawn = tuple[list[dict], Rollout, Tensor, list[str]]  # prompts, rollout, scores, texts


def overlong_penalty(rollout: Rollout, buffer: int) -> Tensor:
    """DAPO's soft punishment of length, Yu et al. 2025 (arXiv 2503.14476) eq. 13: (B,).

    0 up to T - buffer tokens, then falling to -1 at T, the longest completion; 0 without a buffer.
    """
    mask = rollout.completion_mask
    return -((mask.sum(1) - (mask.shape[1] - buffer)) / max(1, buffer)).clamp(min=0)


def replace_flat_groups(
    config: Any,
    policy: nn.Module,
    task: Task,
    sampling: dict[str, Any],
    step: int,
    drawn: Drawn,
) -> tuple[Drawn, int]:
    """DAPO's dynamic sampling, Yu et al. 2025 (arXiv 2503.14476) eq. 11: groups whose rewards are
    all the same are replaced by groups of other prompts, in at most --dynamic_sampling rounds.

    N prompts, their rollout (N*G rows), scores (N*G,) and texts -> the same with flat groups
    replaced as far as others were found; and how many groups were drawn and dropped.
    """
    G, num_dropped = config.num_generations, 0
    seen = {id(row) for row in drawn[0]}
    for sampling_round in range(config.dynamic_sampling):
        flat = _flat_groups(drawn[2], G)
        # A function of seed, step and round, so that a resumed run draws the same prompts.
        unused = [row for row in task.train if id(row) not in seen]
        order = random.Random(f"{config.seed},{step},{sampling_round}")
        prompts = order.sample(unused, min(len(flat), len(unused)))
        if not prompts:
            break
        seen |= {id(row) for row in prompts}
        num_dropped += len(prompts)
        rollout = sample(policy, *task.encode(prompts), **sampling)
        scores, texts = task.score(prompts, rollout)
        useful = sorted({*range(len(prompts))} - {*_flat_groups(scores, G)})
        drawn = _replaced(drawn, dict(zip(flat, useful)), (prompts, rollout, scores, texts), G)
    return drawn, num_dropped


def _flat_groups(scores: Tensor, num_generations: int) -> list[int]:
    """Which groups of scores (N*G,) are all the same."""
    return is_flat(scores.view(-1, num_generations)).flatten().nonzero().flatten().tolist()


def _replaced(drawn: Drawn, places: dict[int, int], others: Drawn, num_generations: int) -> Drawn:
    """`drawn` with the groups at the keys of `places` replaced by the groups of `others` at their
    values.
    """
    prompts, rollout, scores, texts = drawn
    groups = [places.get(i, i - len(prompts)) + len(prompts) for i in range(len(prompts))]
    rows = torch.tensor(groups).unsqueeze(1) * num_generations + torch.arange(num_generations)
    rows = rows.flatten()
    there = to(rollout.tokens.device, rows)
    both = concatenate(_of_one_width(rollout, others[1]))
    return (
        [[*prompts, *others[0]][i] for i in groups],
        both[there],
        torch.cat([scores, others[2]])[there],
        [[*texts, *others[3]][i] for i in rows.tolist()],
    )


def _of_one_width(*rollouts: Rollout) -> list[Rollout]:
    """The rollouts with more padding on the left of the narrower prompts."""
    width = max(rollout.tokens.shape[1] for rollout in rollouts)

    def widened(x: Tensor) -> Tensor:
        return nn.functional.pad(x, (width - x.shape[1], 0))

    return [
        dataclasses.replace(r, tokens=widened(r.tokens), attention_mask=widened(r.attention_mask))
        for r in rollouts
    ]
