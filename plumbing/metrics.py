"""The metrics of a step, what they warn of, and the evaluation on held-out prompts."""

from __future__ import annotations

import math
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from common import Rollout, kl_estimate, masked_mean
from plumbing.data import Task, encode_prompts, score, verify
from plumbing.errors import Fault
from plumbing.forward import on_cpu, to
from sampling import sample

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


def warnings_about(history: list[dict[str, float | None]], bf16: bool) -> list[tuple[str, str]]:
    """What the metrics of all steps so far warn of: (name, line with cause and remedy) each."""
    now, found = history[-1], []
    kl, last = now["objective/kl"], [m["objective/kl"] for m in history[-10:]]
    if len(last) == 10 and all(x is not None and math.isfinite(x) for x in last):
        # The sampled KL may be negative by chance; its mean over ten steps hardly.
        error = statistics.stdev(last) / len(last) ** 0.5
        if statistics.mean(last) < -0.02 - 4 * error:
            text = "the KL is negative beyond chance: samples and log-probs are of two"
            remedy = "distributions; look at temperature, top_k and dropout"
            found += [("negative KL", f"{text} {remedy}")]
    # Judged per token as well: 10 nats are much for 24 tokens and little for 500.
    if kl is not None and kl > 10 and now.get("objective/kl_token", math.inf) > 0.1:
        text = f"the KL is {kl:.0f}: the policy has left the reference, and what the reward"
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
        found += [("constant reward", f"{text} python tools/inspect_reward.py shows it")]
    return found


def pair_warnings(history: list[dict[str, float]]) -> list[tuple[str, str]]:
    """What the metrics of all steps and evaluations so far warn of: (name, line with cause and
    remedy) each.
    """
    found = []
    steps = [m for m in history if "reward/mean" in m]
    evaluations = [m for m in history if "eval/loss" in m]
    losses = [m["eval/loss"] for m in evaluations]
    if losses and losses[-1] > min(losses) + 0.1:
        text = f"the held-out loss has risen from {min(losses):.2f} to {losses[-1]:.2f}: the model"
        remedy = "take more pairs, fewer steps, or --save_best"
        found += [("overfitting", f"{text} learns pairs by heart; {remedy}")]
    if steps and abs(steps[-1]["reward/mean"]) > 10:
        text = (
            f"the mean score is {steps[-1]['reward/mean']:.0f}, and differences alone are learnt:"
        )
        found += [("far scores", f"{text} raise --center_rewards_coef, to 0.01 say")]
    for m in evaluations[-1:]:
        if abs(m["eval/length_correlation"]) > 0.7:
            text = f"score and length correlate by {m['eval/length_correlation']:.2f}: a policy"
            found += [("length", f"{text} will learn the length; balance it in the pairs")]
    last = steps[-20:]
    if len(last) == 20 and statistics.mean(m["reward/accuracy"] for m in last) < 0.5:
        text = "for 20 steps not even half of the pairs were judged right:"
        found += [("worse than chance", f"{text} lower --learning_rate, look at the labels")]
    return found


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
