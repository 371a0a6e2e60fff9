"""The metrics of a step, and the warnings that they give rise to."""

from __future__ import annotations

import math
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from common import is_flat, masked_mean

try:
    import resource
except ImportError:  # Windows
    resource = None

if TYPE_CHECKING:
    from sampling import Rollout


class Meter:
    """Means over the tokens of a whole update: masked sums over masked counts.

    A mean of the means of micro-batches would weigh the tokens of short rows more, and so change
    with the micro-batch (huggingface/trl#6380).
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor | int] = {}

    def add(self, name: str, x: Tensor, mask: Tensor | None = None) -> None:
        """Add the elements of x where mask is True (all of them without a mask)."""
        x = x.detach().float()
        mask = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
        # The sums stay on the device: reading them here would wait for it at every micro-batch.
        self.sums[name] = self.sums.get(name, 0) + x.masked_fill(~mask, 0).sum()
        self.counts[name] = self.counts.get(name, 0) + mask.sum()

    def maximum(self, name: str, x: Tensor, mask: Tensor | None = None) -> None:
        """Keep the largest element of x (not negative) where mask is True."""
        largest = (x if mask is None else x.masked_fill(~mask, 0)).detach().max()
        self.sums[name] = torch.maximum(self.sums.get(name, largest), largest)
        self.counts[name] = 1

    def means(self) -> dict[str, float]:
        """The mean, or the maximum, under each name; 0 where nothing was counted."""
        return {
            name: float(total) / max(1, int(self.counts[name])) for name, total in self.sums.items()
        }


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the mask: 1 is perfect, 0 no better than a
    constant, below 0 worse. 0 where the returns are constant."""
    errors, targets = (returns - values)[mask], returns[mask]
    variance = targets.var(correction=0)
    return float(1 - errors.var(correction=0) / variance) if variance > 0 else 0.0


def objective_metrics(
    scores: Tensor, kl: Tensor | None, logprobs: Tensor, mask: Tensor, kl_coef: float
) -> dict[str, float | None]:
    """The two sides of the bargain, of the policy that sampled: scores (B,), NaN left out, before
    any clip and in PPO less the penalty for a missing EOS; and the script's KL estimates (B, T),
    summed per completion. Without a reference the KL is unknown, not 0.
    """
    kl_per_row = torch.zeros_like(scores) if kl is None else kl.masked_fill(~mask, 0).sum(1)
    known = kl is not None
    return {
        "objective/kl": kl_per_row.mean().item() if known else None,
        "objective/kl_token": masked_mean(kl, mask).item() if known else None,
        "objective/entropy": masked_mean(-logprobs, mask).item(),  # per token, from the sample
        "objective/scores": scores.nanmean().item(),
        "objective/non_score_reward": (-kl_coef * kl_per_row).mean().item(),
        "objective/rlhf_reward": (scores - kl_coef * kl_per_row).nanmean().item(),
    }


def group_metrics(scores: Tensor, num_generations: int) -> dict[str, float]:
    """Of the scores (B,) as the reward gave them, NaN left out: their standard deviation within a
    group, averaged over the groups, and the share of groups whose scores are all the same. Those
    teach nothing but the KL.
    """
    groups = scores.cpu().view(-1, num_generations)
    flat = is_flat(groups).squeeze(1)
    stds = [group[~group.isnan()].std().item() for group in groups[~flat]]
    return {
        "reward/std_within_group": sum(stds) / len(groups),
        "reward/frac_flat_groups": flat.float().mean().item(),
    }


def rollout_metrics(
    rollout: Rollout, rollout_seconds: float, update_seconds: float
) -> dict[str, float]:
    """Lengths in tokens (EOS included) and speed of one step, peak memory of the run so far."""
    lengths = rollout.completion_mask.sum(1)
    memory = peak_resident_memory()
    if lengths.is_cuda:
        memory = torch.cuda.max_memory_allocated(lengths.device)
    return {
        "length/mean": lengths.float().mean().item(),
        "length/max": lengths.max().item(),
        "length/truncated_frac": 1 - rollout.finished.float().mean().item(),
        "val/num_eos_tokens": rollout.finished.sum().item(),
        "tokens_per_second": lengths.sum().item() / (rollout_seconds + update_seconds),
        "time/rollout": rollout_seconds,
        "time/update": update_seconds,
        "memory/peak_gb": memory / 1e9,
    }


def peak_resident_memory() -> float:
    """Of this process so far, in bytes; NaN where the system doesn't say."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count what the parent process had when it started us
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
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


def seconds_since(start: float, device: torch.device) -> float:
    """Seconds since `start` (time.perf_counter()), once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def warnings_about(history: list[dict[str, float | None]], bf16: bool) -> list[tuple[str, str]]:
    """What is likely to go wrong, seen from the metrics of all steps so far, the last step last:
    (name, one line with cause and remedy) each.
    """
    now, found = history[-1], []
    kls = [m["objective/kl"] for m in history[-10:] if math.isfinite(m["objective/kl"] or 0)]
    kls = [] if now["objective/kl"] is None else kls
    if len(kls) == 10:
        # The sampled KL may be negative by chance; its mean over ten steps hardly.
        error = statistics.stdev(kls) / len(kls) ** 0.5
        if statistics.mean(kls) < -0.02 - 4 * error:
            text = "the KL is negative beyond chance: what is sampled is not what is trained;"
            found += [("negative KL", f"{text} look at temperature, top_k and dropout")]
    if kls and kls[-1] > 10:
        text = f"the KL is {kls[-1]:.0f}: the policy has left the reference, and what the reward"
        remedy = "doesn't measure is lost; raise --kl_coef or lower --learning_rate"
        found += [("large KL", f"{text} {remedy}")]
    deviation = now["val/ratio_max_dev_first"]
    if deviation > (0.5 if bf16 else 0.01):
        text = f"the ratio is off by {deviation:.2g} before the first update, and should be 1;"
        found += [("ratio", f"{text} leave dropout off, or try --bf16 false")]
    flat = now.get("reward/frac_flat_groups", 0)
    if flat > 0.5:
        text = f"in {flat:.0%} of the groups all rewards are equal, and they teach nothing:"
        remedy = "prompts solved already or too hard, or too few generations (--num_generations)"
        found += [("flat groups", f"{text} {remedy}")]
    truncated = now["length/truncated_frac"]
    if truncated > 0.5:
        text = f"{truncated:.0%} of the completions were cut at --max_new_tokens: raise it, unless"
        found += [("truncated", f"{text} the reward means unfinished text")]
    last = history[-5:]
    if len(last) == 5 and len({m["objective/scores"] for m in last}) == 1:
        text = "the mean reward has been the same for five steps: is the reward function constant?"
        found += [("constant reward", f"{text} python tasks.py --inspect shows it")]
    return found
