"""tests/adapters.py for Stanford's CS336, assignment 5 of 2025, out of this project's functions.

test_peers.py puts it beside the assignment's own tests. What has no counterpart here raises
NotImplementedError, as in the assignment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common import masked_mean, token_entropy, token_logprobs
from grpo import group_advantages, grpo_loss
from ppo import policy_loss


def run_masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    return masked_mean(tensor, mask, dim)


def run_compute_entropy(logits: Tensor) -> Tensor:
    return token_entropy(logits)


def run_get_response_log_probs(
    model: torch.nn.Module, input_ids: Tensor, labels: Tensor, return_token_entropy: bool
) -> dict[str, Tensor]:
    logits = model(input_ids).logits
    return {"log_probs": token_logprobs(logits, labels), "token_entropy": token_entropy(logits)}


def run_compute_group_normalized_rewards(
    reward_fn: Callable[[str, str], dict[str, float]],
    rollout_responses: list[str],
    repeated_ground_truths: list[str],
    group_size: int,
    advantage_eps: float,  # 1e-4 here
    normalize_by_std: bool,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    pairs = zip(rollout_responses, repeated_ground_truths, strict=True)
    rewards = torch.tensor([reward_fn(*pair)["reward"] for pair in pairs])
    scale = "group" if normalize_by_std else "none"
    return group_advantages(rewards, group_size, scale), rewards, {}


def run_compute_naive_policy_gradient_loss(
    raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor
) -> Tensor:
    """CISPO's loss of each token alone, where policy and old policy are the same: -A log pi."""
    rows, width = policy_log_probs.shape
    tokens = policy_log_probs.reshape(-1, 1)  # each a minibatch of one token
    one = torch.ones(1, 1, dtype=torch.bool)
    weights = raw_rewards_or_advantages.expand(rows, width).reshape(-1, 1)
    losses = [
        grpo_loss(
            p.unsqueeze(0), p.detach().unsqueeze(0), a, one, clip_range=0.2, loss_type="cispo"
        )[0]
        for p, a in zip(tokens, weights, strict=True)
    ]
    return torch.stack(losses).view(rows, width)


def run_compute_grpo_clip_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: float
) -> tuple[Tensor, dict[str, Tensor]]:
    per_token = advantages.expand_as(policy_log_probs)
    loss, clipped = policy_loss(policy_log_probs, old_log_probs, per_token, cliprange)
    return loss, {"clipped": clipped}


def run_compute_policy_gradient_loss(
    policy_log_probs: Tensor,
    loss_type: str,
    raw_rewards: Tensor,
    advantages: Tensor,
    old_log_probs: Tensor,
    cliprange: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    if loss_type == "grpo_clip":
        return run_compute_grpo_clip_loss(advantages, policy_log_probs, old_log_probs, cliprange)
    weights = raw_rewards if loss_type == "no_baseline" else advantages
    return run_compute_naive_policy_gradient_loss(weights, policy_log_probs), {}


def run_grpo_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    loss_type: str,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    rows = len(policy_log_probs) * gradient_accumulation_steps  # of the whole minibatch
    loss, clipped = grpo_loss(
        policy_log_probs, old_log_probs, advantages.squeeze(1), response_mask,
        clip_range=cliprange, num_rows=rows,
    )  # fmt: skip
    loss.backward()
    return loss.detach(), {"clipped": clipped}


def _not_here(*args: object, **kwargs: object) -> None:
    raise NotImplementedError


run_tokenize_prompt_and_output = run_masked_normalize = run_sft_microbatch_train_step = _not_here
