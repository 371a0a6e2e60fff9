"""Held-out prompts, completed by sampling and greedily: rewards, accuracy, pass@K."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from plumbing.data import Task
from plumbing.scoring import encode_prompts, score, verify
from sampling import sample


def evaluate(
    config: Any,
    policy: PreTrainedModel,
    tokenizer: Tokenizer,
    task: Task,
    sampling: dict[str, Any],
    rows: list[dict],
) -> tuple[dict[str, float | None], list[str], list[float]]:
    """Complete each of the N prompts: --eval_generations completions that are sampled, and a greedy
    one. Returns (metrics, the N*K texts that were sampled, their scores, NaN for None).
    """
    metrics, samples, device = {}, [], policy.device
    for kind, K, options in (("", config.eval_generations, {}), ("_greedy", 1, {"top_k": 1})):
        # The random numbers are the same every time and not those of training: two evaluations
        # differ by the policy alone, and evaluating more often changes no run.
        generator = torch.Generator(device).manual_seed(config.seed + 1)
        options = sampling | {"generator": generator} | options
        scores, texts, right = [], [], []
        most = config.rollout_batch_size
        for start in range(0, len(rows), most // K):
            part = rows[start : start + most // K]  # as wide as its longest prompt
            prompts = encode_prompts(tokenizer, part)
            rollout = sample(policy, *prompts, num_generations=K, max_rows=most, **options)
            part_scores, part_texts = score(task, part, rollout, tokenizer)
            scores, texts = scores + part_scores.tolist(), texts + part_texts
            right += [verify(task, part, part_texts, rollout)]
        samples.append((texts, scores))
        known = [value for value in scores if not math.isnan(value)]
        metrics[f"eval/reward{kind}"] = sum(known) / len(known) if known else None
        right = _known(right) if task.verifier is not None else None  # (N, K)
        metrics[f"eval/accuracy{kind}"], error = mean_and_error(right)
        if not kind:
            metrics["eval/accuracy_se"] = error
            if K > 1:
                metrics["eval/pass_at_k"] = None if right is None else pass_at_k(right, K)
    return metrics, *samples[0]


def _known(right: list[Tensor]) -> Tensor | None:
    """The verdicts (N, K) of prompts without a None among them; None where there are none."""
    verdicts = torch.cat(right)
    verdicts = verdicts[~verdicts.isnan().any(1)]
    return verdicts if len(verdicts) else None


def mean_and_error(right: Tensor | None) -> tuple[float | None, float | None]:
    """Of (N, K) verdicts the mean, which is pass@1, and its standard error over the prompts.

    The K completions of a prompt are alike: so each prompt counts once, as the mean of its K.
    """
    if right is None:
        return None, None
    means = right.double().mean(1)
    error = means.std() / len(means) ** 0.5 if len(means) > 1 else torch.tensor(math.nan)
    return means.mean().item(), error.item()


def pass_at_k(right: Tensor, k: int) -> float:
    """The probability that one of k completions is right, from (N, n) verdicts, n >= k.

    1 - C(n - c, k) / C(n, k) with c right ones, which has no bias: Chen et al. 2021
    (arXiv 2107.03374) eq. 1. Raises ValueError for k above n.
    """
    n = right.shape[1]
    if k > n:
        raise ValueError(f"pass@{k} needs {k} completions, here {n}")
    counts = (right > 0).sum(1).tolist()
    return sum(1 - math.comb(n - c, k) / math.comb(n, k) for c in counts) / len(counts)


def headline(
    step: int, metrics: dict[str, float | None], first: dict[str, float | None], K: int = 1
) -> str:
    """Reward and accuracy in a line, each beside what it was before the training."""
    title = _compared(step, metrics, first, "eval/reward")
    if metrics["eval/accuracy"] not in (None, metrics["eval/reward"]):
        title += "; " + _compared(step, metrics, first, "eval/accuracy")
    if metrics.get("eval/pass_at_k") is not None:
        title += f", pass@{K} {metrics['eval/pass_at_k']:.3f}"
    return title


def _compared(step: int, metrics: dict[str, float], first: dict[str, float], name: str) -> str:
    """A metric sampled and greedy, each beside what it was before the training."""
    parts = []
    for key, title in ((name, name), (f"{name}_greedy", "greedy")):
        now, was = ("unknown" if x[key] is None else f"{x[key]:.3f}" for x in (metrics, first))
        parts.append(f"{title} {now}" + (f" (was {was})" if step > 0 else ""))
    return ", ".join(parts)
