"""The metrics of a step, what they warn of, and the evaluation on held-out prompts."""

from __future__ import annotations

import math
import re
import statistics
import textwrap
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from common import Rollout, is_flat, kl_estimate, masked_mean
from plumbing.config import RunConfig
from plumbing.data import Task, text_of
from plumbing.errors import Fault
from sampling import sample

Metrics = dict[str, float | None]


class Totals:
    """Collects the metrics of an update: masked sums over masked counts, over all its
    micro-batches.

    A mean of the means of micro-batches would weigh the tokens of short rows more, and so change
    with the size of a micro-batch.
    """

    def __init__(self) -> None:
        self.sums, self.counts = {}, {}  # name -> sum, and over how many elements
        self.single: Metrics = {}  # those that are single numbers
        self.num_tokens = 0  # for the speed

    def add(self, name: str, x: Tensor, mask: Tensor | None = None) -> None:
        """Add the elements of x where mask is True (all of them without a mask), and count them:
        the result is their mean.
        """
        x = x.detach().float()
        mask = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
        # The sums stay on the device: a transfer would wait for it at every micro-batch.
        self.sums[name] = self.sums.get(name, 0) + x.masked_fill(~mask, 0).sum()
        self.counts[name] = self.counts.get(name, 0) + mask.sum()

    def add_share(self, name: str, x: Tensor) -> None:
        """Add a micro-batch's share of the minibatch's loss. It is divided by the counts of the
        whole minibatch already, so `results` divides the sum only by the number of minibatches.
        """
        self.sums[name] = self.sums.get(name, 0) + x.detach()

    def end_mini_batch(self, grad_norm: Tensor) -> None:
        """Close a minibatch with the norm of its gradient. Raises Fault where it isn't finite: a
        step with it would destroy the weights.
        """
        if not grad_norm.isfinite():
            remedy = "lower --learning_rate; other causes: bfloat16 (--bf16 false), huge rewards"
            raise Fault(f"the gradient is {grad_norm}: {remedy}")
        self.add("grad_norm", grad_norm)

    def results(self) -> Metrics:
        """Return the mean under each name, 0 where nothing was added. Waits for the device."""
        # The shares of a loss were added up over this many minibatches: divide by it.
        num_mini_batches = self.counts.get("grad_norm")
        counts = [self.counts.get(name, num_mini_batches) for name in self.sums]
        # One transfer: each one waits until the device has done all its work.
        pairs = [torch.stack([x, n.float()]) for x, n in zip(self.sums.values(), counts)]
        numbers = torch.stack(pairs).tolist()
        return self.single | {n: x / max(1, c) for n, (x, c) in zip(self.sums, numbers)}


def warnings_about(history: list[Metrics], bf16: bool) -> list[tuple[str, str]]:
    """Say what the metrics of all steps so far warn of: (name, line with cause and remedy) each."""
    now, found = history[-1], []
    kl, last = now["objective/kl"], [m["objective/kl"] for m in history[-10:]]
    if len(last) == 10 and all(x is not None and math.isfinite(x) for x in last):
        # The sampled KL may be negative by chance; its mean over ten steps hardly.
        error = statistics.stdev(last) / len(last) ** 0.5
        if statistics.mean(last) < -0.02 - 4 * error:
            text = "the KL is negative beyond chance: the samples are of another distribution;"
            found += [("negative KL", f"{text} look at temperature, top_k and dropout")]
    # Judged per token as well: 10 nats are much for 24 tokens and little for 500.
    if kl is not None and kl > 10 and now.get("objective/kl_token", math.inf) > 0.1:
        text = f"the KL is {kl:.0f}: what the reward doesn't measure is lost;"
        found += [("large KL", f"{text} raise --kl_coef or lower --learning_rate")]
    deviation = now.get("val/ratio_max_dev_first", 0)  # RLOO has no ratio
    if deviation > (0.5 if bf16 else 0.01):
        text = f"the ratio is off by {deviation:.2g} before the first update, and should be 1;"
        found += [("ratio", f"{text} leave dropout off, or try --bf16 false")]
    # A mistake acts in every step. Rounding can be as large in single steps, by one rare token. In
    # bfloat16 its median is at most 0.0055; sampling at temperature 0.9 by mistake gives 0.027:
    # docs/debugging.md.
    sampler_kl = statistics.median_low([m.get("val/sampler_kl", 0) for m in history[-5:]])
    if sampler_kl > (0.01 if bf16 else 0.001):
        text = f"sampling and training differ by {sampler_kl:.2g} nats per token, beyond rounding:"
        remedy = "leave dropout off, try --bf16 false --fp16 false, another transformers"
        found += [("sampler", f"{text} {remedy}")]
    flat, solved = (now.get(f"reward/frac_{x}_groups", 0) for x in ("flat", "solved"))
    scores = [m["objective/scores"] for m in history if not math.isnan(m["objective/scores"])]
    # Equal scores are no fault where they are the highest: these prompts are solved. A constant
    # reward has no others, and in the whole run none that are lower.
    has_risen = now["objective/scores"] > min(scores, default=math.inf)
    if math.isnan(now["objective/scores"]):
        text = "no completion has a reward, all are None: what does the reward function look for?"
        found += [("no reward", f"{text} --num_steps 0 shows what it gives")]
    elif flat > 0.5 and not (solved > flat / 2 and (solved < 1 or has_risen)):
        text = f"in {flat:.0%} of the groups all rewards are equal, and they teach nothing:"
        found += [("flat groups", f"{text} prompts too easy or hard, or low --num_generations")]
    truncated = now["length/truncated_frac"]
    if truncated > 0.5:
        text = f"{truncated:.0%} of the completions were cut at --max_new_tokens: raise it, unless"
        found += [("truncated", f"{text} the reward means unfinished text, or favours length")]
    is_best = has_risen and now["objective/scores"] == max(scores)
    recent = history[-5:]
    if len(recent) == 5 and len({m["objective/scores"] for m in recent}) == 1 and not is_best:
        text = "the mean reward has been the same for five steps"
        cause = ": is the reward function constant? --num_steps 0 shows what it gives"
        if (kl is not None and kl > 10) or now["policy/entropy_avg"] < 0.01:
            cause = ", and the policy is destroyed (see KL and entropy): lower --learning_rate"
        found += [("constant reward", text + cause)]
    return found


def warnings_of_evaluation(now: Metrics, earlier: list[Metrics]) -> list[tuple[str, str]]:
    """As warnings_about: whether the reward has risen since an earlier evaluation while the
    accuracy has fallen, by more than chance does.
    """
    names = ("eval/reward", "eval/accuracy", "eval/accuracy_se")
    for was in earlier:
        if None in (numbers := [m.get(name) for m in (was, now) for name in names]):
            continue
        reward, right, error, reward_now, right_now, error_now = numbers
        if reward_now > reward and right - right_now > 2.5 * math.hypot(error, error_now):
            text = f"eval/accuracy fell from {right:.3f} to {right_now:.3f} while eval/reward rose:"
            text += " the reward pays for other things than right answers; change it"
            return [("hacked reward", text)]
    return []


class Meter(Totals):
    """Collects the metrics of a rollout and of the update that learns from it."""

    warnings = staticmethod(warnings_about)

    def __init__(self, rollout: Rollout) -> None:
        super().__init__()
        self.rollout = rollout
        # Of the last pass over each row: old log-probs, ratio, clipped, (B, T). NaN for what was
        # left out of the update.
        self.last_pass: dict[str, Tensor] = {}
        lengths = rollout.lengths.float()
        self.num_tokens = int(lengths.sum())
        self.single = {
            "length/mean": lengths.mean().item(),
            "length/max": lengths.max().item(),
            "length/truncated_frac": 1 - rollout.finished.float().mean().item(),
            "val/num_eos_tokens": rollout.finished.sum().item(),
        }

    def add_policy(
        self,
        rows: Tensor,
        logprobs: Tensor,
        old_logprobs: Tensor,
        ratio: Tensor,
        clipped: Tensor,
        mask: Tensor,
    ) -> None:
        """Add what the policy did in a micro-batch, where there is a ratio: the given rows of the
        rollout. logprobs, ratio and clipped (rows, T); old_logprobs and mask are the whole
        rollout's, (B, T).
        """
        old_logprobs, mask = old_logprobs[rows], mask[rows]
        of_rows = {
            "old_logprobs": old_logprobs,
            "ratio": ratio.detach().masked_fill(~mask, torch.nan),
            "clipped": clipped.to(ratio.dtype).masked_fill(~mask, torch.nan),
        }
        for name, x in of_rows.items():
            unknown = x.new_full(self.rollout.completion_mask.shape, torch.nan)
            self.last_pass.setdefault(name, unknown)[rows] = x
        self.add("policy/approxkl_avg", 0.5 * (logprobs - old_logprobs) ** 2, mask)
        self.add("policy/clipfrac_avg", clipped, mask)
        self.add("val/ratio", ratio, mask)
        # Decoding may round otherwise than the training forward: KL(sampler || old policy).
        sampled = self.rollout.logprobs[rows]
        self.add("val/sampler_kl", kl_estimate(sampled, old_logprobs, "k3"), mask)
        if "grad_norm" not in self.sums:  # in the first minibatch
            off = (ratio.detach() - 1).abs().masked_fill(~mask, 0).max()
            name = "val/ratio_max_dev_first"
            self.sums[name] = torch.maximum(self.sums.get(name, off), off)
            self.counts[name] = torch.ones_like(off)

    def objective(self, scores: Tensor, kl: Tensor | None, kl_coef: float) -> None:
        """Add score and KL of the policy that sampled: scores (B,), NaN left out; KL estimates
        (B, T), unknown where kl_coef is 0, for then there is no reference.
        """
        mask = self.rollout.completion_mask
        if kl_coef == 0:
            per_row = torch.zeros_like(scores)
            self.single |= {"objective/kl": None, "objective/kl_token": None}
        else:
            per_row = kl.masked_fill(~mask, 0).sum(1)
            self.add("objective/kl", per_row.mean())
            self.add("objective/kl_token", masked_mean(kl, mask))
        self.add("objective/entropy", masked_mean(-self.rollout.logprobs, mask))  # of the sample
        self.add("objective/scores", scores.nanmean())
        self.add("objective/non_score_reward", (-kl_coef * per_row).mean())
        self.add("objective/rlhf_reward", (scores - kl_coef * per_row).nanmean())

    def groups(self, scores: Tensor, num_generations: int) -> None:
        """Of scores (B,), NaN left out: their standard deviation within a group, averaged over the
        groups; the share of groups whose scores are all the same; and of those where they are all
        the highest of the step.
        """
        groups = scores.view(-1, num_generations)
        flat, num_known = is_flat(groups), (~groups.isnan()).sum(1, keepdim=True)
        squares = (groups - groups.nanmean(1, keepdim=True)) ** 2
        variance = squares.nansum(1, keepdim=True) / (num_known - 1)  # of a single one 0 / 0
        self.add("reward/std_within_group", variance.sqrt().masked_fill(flat, 0))
        self.add("reward/frac_flat_groups", flat)
        highest = groups.nan_to_num(-math.inf).amax(1, keepdim=True)
        self.add("reward/frac_solved_groups", flat & (highest == highest.max()))

    @staticmethod
    def progress(metrics: Metrics) -> str:
        """Write what the progress bar shows of a step."""
        kl = metrics["objective/kl"]
        kl = "off" if kl is None else f"{kl:.2f}"
        return (
            f"reward {metrics['objective/scores']:.2f}, kl {kl}, "
            f"length {metrics['length/mean']:.0f}, {metrics['tokens_per_second']:.0f} tok/s"
        )


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Return 1 - Var(returns - values) / Var(returns) over the mask; 0 where the returns are
    constant.
    """
    errors, returns = (returns - values)[mask], returns[mask]
    explained = 1 - errors.var() / returns.var()
    return torch.where(returns.amax() > returns.amin(), explained, 0.0)


# --- Evaluation ---


@dataclass
class Evaluation:
    """What an evaluation found: its metrics, which of them its headline shows, records for
    samples.jsonl, and these as lines to print.
    """

    metrics: Metrics
    headline: list[str]
    records: list[dict]
    lines: list[str]


def evaluate(
    config: RunConfig, policy: nn.Module, task: Task, sampling: dict[str, Any]
) -> Evaluation:
    """Complete the first --num_eval_prompts held-out prompts: --eval_generations completions each
    that are sampled, and a greedy one.
    """
    rows = task.heldout[: config.num_eval_prompts]
    metrics, K = {}, config.eval_generations
    greedy, sampled = {"num_generations": 1, "top_k": 1}, {"num_generations": K}
    for kind, options in (("_greedy", greedy), ("", sampled)):  # the second is shown
        # The random numbers are the same every time and not those of training: two evaluations
        # differ only by the policy, and evaluating more often changes no run.
        generator = torch.Generator(policy.device).manual_seed(config.seed + 1)
        options = sampling | {"generator": generator} | options
        rollout = sample(policy, *task.encode(rows), **options)
        scores, texts = task.score(rows, rollout)
        given = scores[~scores.isnan()]
        metrics[f"eval/reward{kind}"] = given.mean().item() if len(given) else None
        verdicts = task.verify(rows, texts, rollout)  # (N, K), or None
        # Of the prompts that have all their verdicts.
        right = torch.empty(0, K) if verdicts is None else verdicts[~verdicts.isnan().any(1)]
        metrics[f"eval/accuracy{kind}"], metrics["eval/accuracy_se"] = mean_and_error(right)
    if K > 1:
        metrics["eval/pass_at_k"], _ = mean_and_error((right == 1).any(1, keepdim=True))
    records, lines = sample_records(rows, texts, scores)
    names, accuracy, reward = ["eval/reward"], metrics["eval/accuracy"], metrics["eval/reward"]
    # A verifier that is the reward itself says the same, apart from rounding.
    if accuracy is not None and (reward is None or abs(accuracy - reward) > 1e-6):
        names += ["eval/accuracy"]
    if metrics.get("eval/pass_at_k") is not None:
        names += ["eval/pass_at_k"]
    return Evaluation(metrics, names, records, lines)


def mean_and_error(right: Tensor) -> tuple[float | None, float | None]:
    """Average (N, K) verdicts, which is pass@1, and give its standard error over the prompts; None
    where N is 0. The K completions of a prompt are alike, so each prompt counts once, as their
    mean.
    """
    if len(right) == 0:
        return None, None
    means = right.double().mean(1)
    error = means.std() / len(means) ** 0.5 if len(means) > 1 else torch.tensor(torch.nan)
    return means.mean().item(), error.item()


def headline(step: int, names: list[str], metrics: Metrics, first: Metrics) -> str:
    """Write the named metrics, sampled and greedy, each beside what it was before the training."""
    parts = []
    for key in [key for name in names for key in (name, f"{name}_greedy") if key in metrics]:
        now, was = ("unknown" if x[key] is None else f"{x[key]:.3f}" for x in (metrics, first))
        title = "greedy" if key.endswith("_greedy") else key
        parts.append(f"{title} {now}" + (f" (was {was})" if step > 0 else ""))
    return ", ".join(parts)


def sample_records(
    prompts: list[dict], texts: list[str], scores: Tensor
) -> tuple[list[dict], list[str]]:
    """Make of G completions of each prompt records for samples.jsonl, and the first of each as a
    line to print.
    """
    records, lines = [], []
    G = len(texts) // len(prompts)
    for i, (text, value) in enumerate(zip(texts, scores.tolist(), strict=True)):
        prompt = prompts[i // G]["prompt"]
        finite = value if math.isfinite(value) else None
        records.append({"prompt": prompt, "completion": text, "score": finite})
        shown = " ".join(text_of(prompt).split())
        shown = shown if len(shown) <= 45 else f"... {shown[-41:]}"
        lines.append(f"  {value:5.2f}  {shorten(f'{shown} -> {text}', 90)}")
    return records, lines[::G]


def shorten(text: str, width: int) -> str:
    """Cut a text to a line; control characters, which rule a terminal, become their numbers."""
    line = textwrap.shorten(text, width, placeholder=" ...")
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda sign: f"\\x{ord(sign[0]):02x}", line)
