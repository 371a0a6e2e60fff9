"""The metrics of a step, and the warnings that they give rise to."""

from __future__ import annotations

import math
import re
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from common import Rollout, kl_estimate, masked_mean
from plumbing.errors import Fault
from plumbing.forward import on_cpu, to

try:
    import resource
except ImportError:  # Windows
    resource = None


class Meter:
    """The metrics of an update: masked sums over masked counts, over all its micro-batches.

    A mean of the means of micro-batches would weigh the tokens of short rows more, and so change
    with the size of a micro-batch (huggingface/trl#6380).
    """

    def __init__(self) -> None:
        self.sums, self.counts = {}, {}  # name -> sum, and over how many elements
        self.shares = {}  # name -> sum of the shares in the minibatch at hand
        self.first_mini_batch = True
        self.old_logprobs: Tensor | None = None  # (B, T), of the policy that sampled
        self.last_pass: dict[str, Tensor] = {}  # ratio and clipped, (B, T) or (B,)

    def add(self, name: str, x: Tensor, mask: Tensor | None = None) -> None:
        """Add the elements of x where mask is True (all of them without a mask)."""
        x = x.detach().float()
        mask = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
        # The sums stay on the device: a transfer would wait for it at every micro-batch.
        self.sums[name] = self.sums.get(name, 0) + x.masked_fill(~mask, 0).sum()
        self.counts[name] = self.counts.get(name, 0) + mask.sum()

    def add_share(self, name: str, x: Tensor) -> None:
        """Add a micro-batch's share of a scalar of the minibatch: the mean is over minibatches."""
        self.shares[name] = self.shares.get(name, 0.0) + x.detach()

    def add_policy(
        self,
        rollout: Rollout,
        rows: Tensor,
        logprobs: Tensor,
        old_logprobs: Tensor,
        entropy: Tensor,
        ratio: Tensor,
        clipped: Tensor,
        mask: Tensor,
    ) -> None:
        """Add what the policy did in a micro-batch: the given rows of a rollout.

        logprobs, old_logprobs, entropy and mask (rows, T); ratio and clipped (rows, T), or (rows,)
        where a completion has one ratio.
        """
        if self.old_logprobs is None:
            # Of rows that are left out of the update, those with which they were drawn.
            self.old_logprobs = rollout.logprobs.to(old_logprobs.dtype, copy=True)
        self.old_logprobs[rows] = old_logprobs
        used = mask if ratio.dim() == 2 else mask.any(1)
        for name, x in (("ratio", ratio.detach()), ("clipped", clipped.to(ratio.dtype))):
            if name not in self.last_pass:  # NaN for what is left out of the update
                whole = (len(rollout.tokens), *x.shape[1:])
                self.last_pass[name] = x.new_full(whole, torch.nan)
            self.last_pass[name][rows] = x.masked_fill(~used, torch.nan)
        self.add("policy/approxkl_avg", 0.5 * (logprobs - old_logprobs) ** 2, mask)
        self.add("policy/entropy_avg", entropy, mask)
        where = mask if ratio.dim() == 2 else None
        self.add("policy/clipfrac_avg", clipped, where)
        self.add("val/ratio", ratio, where)
        # Decoding may round otherwise than the training forward: KL(sampler || old policy).
        sampled = rollout.logprobs[rows]
        self.add("val/sampler_kl", kl_estimate(sampled, old_logprobs, "k3"), mask)
        self.add_largest("val/sampler_max_dev", (sampled - old_logprobs).abs(), mask)
        if self.first_mini_batch:
            self.add_largest("val/ratio_max_dev_first", (ratio - 1).abs(), where)

    def add_largest(self, name: str, x: Tensor, mask: Tensor | None = None) -> None:
        """Add the elements of x, 0 or more, where mask is True: the metric is the largest."""
        largest = (x if mask is None else x.masked_fill(~mask, 0)).detach().max().float()
        self.sums[name] = torch.maximum(self.sums.get(name, largest), largest)
        self.counts[name] = torch.ones_like(largest)

    def end_mini_batch(self, grad_norm: Tensor) -> None:
        """Close a minibatch with the norm of its gradient. Raises Fault where it isn't finite."""
        if not grad_norm.isfinite():  # a step with it would destroy the weights
            raise Fault(f"the gradient is {grad_norm}: lower --learning_rate")
        self.add("grad_norm", grad_norm)
        for name, total in self.shares.items():
            self.add(name, total)
        self.shares, self.first_mini_batch = {}, False

    def results(self) -> dict[str, float]:
        """The mean under each name, or the largest; 0 of nothing."""
        # One transfer: each one waits until the device has done all its work.
        pairs = [torch.stack([x, self.counts[name].float()]) for name, x in self.sums.items()]
        numbers = torch.stack(pairs).tolist()
        return {name: x / max(1, n) for name, (x, n) in zip(self.sums, numbers)}


class Stopwatch:
    """The seconds that each phase of a step takes."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.laps = device, {}
        self.started = time.perf_counter()

    def lap(self, name: str, wait: bool = True) -> None:
        """End the phase `name`, once the device has finished its work: without `wait`, it has."""
        if wait and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.laps[name], self.started = now - self.started, now


def step_metrics(
    meter: Meter,
    watch: Stopwatch,
    rollout: Rollout,
    scores: Tensor,
    kl: Tensor | None,
    kl_coef: float,
) -> dict[str, float | None]:
    """The metrics that the three scripts share: of the update, the objective, the rollout.

    scores (B,); kl (B, T), None without a reference. Ends the update's lap of the stopwatch.
    """
    mask = rollout.completion_mask
    metrics = objective_metrics(scores, kl, meter.old_logprobs, mask, kl_coef)
    for name, x in metrics.items():
        if x is not None:
            meter.add(name, x)
    metrics |= meter.results()
    watch.lap("time/update", wait=False)
    return metrics | rollout_metrics(rollout, watch.laps)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - Var(returns - values) / Var(returns) over the mask; 0 where the returns are constant."""

    def variance(x: Tensor) -> Tensor:
        return masked_mean((x - masked_mean(x, mask)) ** 2, mask)

    whole, errors = variance(returns), variance(returns - values)
    lowest = returns.masked_fill(~mask, torch.inf).min()
    constant = lowest >= returns.masked_fill(~mask, -torch.inf).max()
    return torch.where(constant, 0.0, 1 - errors / whole)


def objective_metrics(
    scores: Tensor, kl: Tensor | None, logprobs: Tensor, mask: Tensor, kl_coef: float
) -> dict[str, Tensor | None]:
    """Score and KL of the policy that sampled: scores (B,), NaN left out, before any clip, in PPO
    less the penalty for a missing EOS; KL estimates (B, T), None (unknown) without a reference.
    """
    scores = to(logprobs.device, scores)
    kl_per_row = torch.zeros_like(scores) if kl is None else kl.masked_fill(~mask, 0).sum(1)
    return {
        "objective/kl": None if kl is None else kl_per_row.mean(),
        "objective/kl_token": None if kl is None else masked_mean(kl, mask),
        "objective/entropy": masked_mean(-logprobs, mask),  # per token, from the sample
        "objective/scores": scores.nanmean(),
        "objective/non_score_reward": (-kl_coef * kl_per_row).mean(),
        "objective/rlhf_reward": (scores - kl_coef * kl_per_row).nanmean(),
    }


def is_flat(groups: Tensor) -> Tensor:
    """Which groups of rewards (N, G) are all the same, NaN left out: (N, 1) bool."""
    unknown = groups.isnan()
    lowest = groups.masked_fill(unknown, torch.inf).amin(dim=1, keepdim=True)
    highest = groups.masked_fill(unknown, -torch.inf).amax(dim=1, keepdim=True)
    return lowest >= highest


def group_metrics(scores: Tensor, num_generations: int) -> dict[str, float]:
    """Of scores (B,), NaN left out: their standard deviation within a group, averaged over the
    groups, and the share of groups whose scores are all the same, which teach nothing but the KL.
    """
    groups = scores.cpu().view(-1, num_generations)
    flat = is_flat(groups).squeeze(1)
    stds = [group[~group.isnan()].std().item() for group in groups[~flat]]
    return {
        "reward/std_within_group": sum(stds) / len(groups),
        "reward/frac_flat_groups": flat.float().mean().item(),
    }


def rollout_metrics(rollout: Rollout, seconds: dict[str, float]) -> dict[str, float]:
    """Lengths in tokens, EOS included; the `seconds` of each phase; peak memory so far."""
    device, rollout = rollout.tokens.device, on_cpu(rollout)
    lengths = rollout.completion_mask.sum(1)
    memory = peak_resident_memory()
    if device.type == "cuda":
        memory = torch.cuda.max_memory_allocated(device)
    return seconds | {
        "length/mean": lengths.float().mean().item(),
        "length/max": lengths.max().item(),
        "length/truncated_frac": 1 - rollout.finished.float().mean().item(),
        "val/num_eos_tokens": rollout.finished.sum().item(),
        "tokens_per_second": lengths.sum().item() / sum(seconds.values()),
        "memory/peak_gb": memory / 1e9,
    }


def peak_resident_memory() -> float:
    """Of this process so far, in bytes; NaN where the system doesn't say."""
    status = Path("/proc/self/status")
    # getrusage would count what the parent process had when it started us.
    if status.exists() and (found := re.search(r"VmHWM:\s*(\d+)", status.read_text())):
        return int(found[1]) * 1024
    if resource is None:
        return math.nan
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def progress(metrics: dict[str, float | None]) -> str:
    """What the progress bar shows."""
    kl = metrics["objective/kl"]
    return (
        f"reward {metrics['objective/scores']:.2f}, kl {'off' if kl is None else f'{kl:.2f}'}, "
        f"length {metrics['length/mean']:.0f}, {metrics['tokens_per_second']:.0f} tokens/s, "
        f"{metrics['memory/peak_gb']:.1f} GB"
    )
