"""Options of later papers, all off by default: each is a line or a few in a script's loop."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
from torch import Tensor, nn

from common import Rollout
from plumbing.data import encode_prompts, score
from plumbing.forward import on_cpu
from plumbing.metrics import is_flat
from sampling import concatenate, sample

Drawn = tuple[list[dict], Rollout, Tensor, list[str]]  # prompts, rollout, scores, texts


def token_weighted(
    advantages: Tensor, old_logprobs: Tensor, rollout: Rollout, mask: Tensor, cap: float | None
) -> Tensor:
    """Advantages times min(pi_old / pi_sampler, cap) of each token, without gradient: (B, T); the
    advantages, (B,) or (B, T), as they are if cap is None.

    Truncated importance sampling, Yao et al. 2025 ("Your efficient RL framework secretly brings you
    off-policy RL training"): tokens are drawn from a rounded copy of the policy. A surrogate
    max(-A rho, -A clip(rho)) of the advantages A w is that of A, times w > 0. old_logprobs and mask
    (B, T).
    """
    if cap is None:
        return advantages
    log_ratio = _log_ratio(old_logprobs, rollout, mask)
    return advantages.view(len(advantages), -1) * log_ratio.exp().clamp(max=cap)


def sequence_weighted(
    advantages: Tensor, old_logprobs: Tensor, rollout: Rollout, mask: Tensor, cap: float | None
) -> Tensor:
    """As token_weighted where the completion is one action: advantages (B,) -> (B,)."""
    if cap is None:
        return advantages
    log_ratio = _log_ratio(old_logprobs, rollout, mask).sum(1)
    return advantages * log_ratio.exp().clamp(max=cap)


def _log_ratio(old_logprobs: Tensor, rollout: Rollout, mask: Tensor) -> Tensor:
    """log pi_old / pi_sampler (B, T), 0 off the mask, without gradient."""
    return (old_logprobs - rollout.logprobs).detach().masked_fill(~mask.bool(), 0)


def overlong_penalty(rollout: Rollout, buffer: int) -> Tensor | float:
    """DAPO's soft punishment of length, Yu et al. 2025 (arXiv 2503.14476) eq. 13: (B,) on the CPU.

    0 up to T - buffer tokens, then falling to -1 at T, the longest completion; 0 without a buffer.
    """
    if buffer == 0:
        return 0.0
    mask = on_cpu(rollout).completion_mask
    return -((mask.sum(1) - (mask.shape[1] - buffer)) / buffer).clamp(min=0)


def replace_flat_groups(run: Any, step: int, drawn: Drawn) -> tuple[Drawn, dict[str, int]]:
    """DAPO's dynamic sampling, Yu et al. 2025 (arXiv 2503.14476) eq. 11: groups whose rewards are
    all the same are replaced by groups of other prompts, in at most --dynamic_sampling rounds.

    N prompts, their rollout (N*G rows), scores (N*G,) and texts -> the same with flat groups
    replaced as far as others were found; and as a metric how many groups were drawn and dropped.
    """
    config, task, num_dropped = run.config, run.task, 0
    G, seen = config.num_generations, {id(row) for row in drawn[0]}
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
        ids, mask = encode_prompts(run.tokenizer, prompts)
        most = config.rollout_batch_size
        rollout = sample(run.policy, ids, mask, num_generations=G, max_rows=most, **run.sampling)
        scores, texts = score(task, prompts, rollout, run.tokenizer)
        useful = sorted({*range(len(prompts))} - {*_flat_groups(scores, G)})
        drawn = _replaced(drawn, dict(zip(flat, useful)), (prompts, rollout, scores, texts), G)
    return drawn, {"reward/groups_dropped": num_dropped}


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
    rows, device = rows.flatten(), rollout.tokens.device
    both = concatenate(_of_one_width(rollout, others[1]))
    return (
        [[*prompts, *others[0]][i] for i in groups],
        both[rows.to(device)],
        torch.cat([scores, others[2]])[rows],
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
