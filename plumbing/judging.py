"""How well a reward model judges held-out pairs, and what a run of reward_model.py shows."""

from __future__ import annotations

import statistics
import textwrap

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from common import evaluating
from plumbing.metrics import Meter, Stopwatch, peak_resident_memory
from plumbing.pairs import pair_scores
from plumbing.prompts import Prompt, text_of
from plumbing.reward_models import Completion

NUM_BINS = 5  # of the reliability curve, from 50% to 100%


@torch.no_grad()
def evaluate_pairs(
    model: nn.Module, pairs: list[dict], bf16: bool, batch_size: int = 64
) -> tuple[dict[str, float], list[dict], Tensor]:
    """Of N held-out pairs the metrics, the reliability curve, and the scores of chosen and rejected
    texts (2, N).
    """
    chosen, rejected = [], []
    with evaluating(model):
        for start in range(0, len(pairs), batch_size):
            better, worse, _ = pair_scores(model, pairs[start : start + batch_size], bf16)
            chosen, rejected = [*chosen, better], [*rejected, worse]
    # In float64: the calibration is a sum over all pairs.
    chosen, rejected = torch.cat(chosen).double().cpu(), torch.cat(rejected).double().cpu()
    margins, both = chosen - rejected, torch.cat([chosen, rejected])
    lengths = [len(pair[key]) for key in ("chosen_ids", "rejected_ids") for pair in pairs]
    longer = torch.tensor(lengths).view(2, -1).diff(dim=0)[0]
    curve, error = reliability(margins)
    metrics = {
        "eval/loss": -logsigmoid(margins).mean().item(),
        "eval/accuracy": _share(margins),
        "eval/margin": margins.mean().item(),
        "eval/score_mean": both.mean().item(),
        "eval/score_std": both.std().item(),
        "eval/calibration_error": error,
        "eval/longer_is_better": _share(-longer.double()),
        "eval/length_correlation": _correlation(both.tolist(), lengths),
    }
    return metrics, curve, torch.stack([chosen, rejected])


def _share(differences: Tensor) -> float:
    """The share of the differences that are above 0; a tie counts half."""
    return (differences.sign() / 2 + 0.5).mean().item()


def _correlation(x: list[float], y: list[int]) -> float:
    """Pearson's; 0 where one of the two is constant."""
    try:
        return statistics.correlation(x, y)
    except statistics.StatisticsError:
        return 0.0


def reliability(margins: Tensor) -> tuple[list[dict[str, float]], float]:
    """Whether the model is as often right as it says: margins (N,), chosen minus rejected, of which
    sigmoid gives the probability -> (the reliability curve, the expected calibration error).

    The curve has, for each bin of the confidence from 0.5 to 1 that isn't empty, the mean
    confidence, the share of right pairs and their number. The error is the mean distance of the
    two: Guo et al. 2017 (arXiv 1706.04599) eq. 3.
    """
    confidence = torch.sigmoid(margins.abs())
    right = margins.sign() / 2 + 0.5
    bins = ((confidence - 0.5) * 2 * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    curve, error = [], 0.0
    for number in bins.unique().tolist():
        here = bins == number
        said, was = confidence[here].mean().item(), right[here].mean().item()
        curve.append({"confidence": said, "accuracy": was, "pairs": int(here.sum())})
        error += here.double().mean().item() * abs(said - was)
    return curve, error


def pair_records(step: int, pairs: list[dict], scores: Tensor) -> tuple[list[dict], list[str]]:
    """Of N pairs with scores (2, N) the records for samples.jsonl, and the first four as lines."""
    records, lines = [], []
    for pair, (better, worse) in zip(pairs, scores.T.tolist(), strict=True):
        kept = {key: pair[key] for key in ("prompt", "chosen", "rejected", "margin")}
        kept |= {"score_chosen": better, "score_rejected": worse}
        records.append({"step": step, "split": "heldout"} | kept)
        prompt, good, bad = (_shown(pair[key], width) for key, width in COLUMNS)
        lines.append(f"  {better:6.2f} {worse:6.2f}  {prompt} {good} | {bad}")
    return records, lines[:4]


COLUMNS = (("prompt", 30), ("chosen", 24), ("rejected", 24))  # and how wide they are shown


def _shown(text: Prompt | Completion, width: int) -> str:
    return textwrap.shorten(text_of(text) if text else "", width, placeholder=" ...")


def pair_headline(step: int, metrics: dict[str, float], first: dict[str, float]) -> str:
    """Held-out accuracy and loss, beside what they were before the training."""
    parts = []
    for name in ("eval/accuracy", "eval/loss"):
        was = f" (was {first[name]:.3f})" if step > 0 else ""
        parts.append(f"{name} {metrics[name]:.3f}{was}")
    error = metrics["eval/calibration_error"]
    return f"step {step}: {', '.join(parts)}, calibration error {error:.3f}"


def pair_progress(metrics: dict[str, float]) -> str:
    """What the progress bar shows."""
    return (
        f"loss {metrics['loss/pairs']:.3f}, accuracy {metrics['reward/accuracy']:.2f}, "
        f"margin {metrics['reward/margin']:.2f}, {metrics['tokens_per_second']:.0f} tokens/s"
    )


def pair_metrics(meter: Meter, watch: Stopwatch, num_tokens: int) -> dict[str, float]:
    """The metrics of a step: those of the meter, time and memory. Ends the lap of the stopwatch."""
    found = meter.results()
    watch.lap("time/update", wait=False)  # the metrics have waited for the device
    memory = peak_resident_memory()
    if watch.device.type == "cuda":
        memory = torch.cuda.max_memory_allocated(watch.device)
    speed = {"tokens_per_second": num_tokens / watch.laps["time/update"]}
    return found | watch.laps | speed | {"memory/peak_gb": memory / 1e9}


def pair_warnings(history: list[dict[str, float]]) -> list[tuple[str, str]]:
    """What the metrics of all steps so far warn of: (name, line with cause and remedy) each."""
    found, now = [], history[-1]
    evaluations = [m for m in history if "eval/loss" in m]
    losses = [m["eval/loss"] for m in evaluations]
    if losses and losses[-1] > min(losses) + 0.1:
        text = f"the held-out loss has risen from {min(losses):.2f} to {losses[-1]:.2f}: the model"
        found += [("overfitting", f"{text} learns pairs by heart; take more pairs or fewer steps")]
    if abs(now["reward/mean"]) > 10:
        text = f"the mean score is {now['reward/mean']:.0f}, and the loss doesn't hold it anywhere:"
        found += [("far scores", f"{text} --center_rewards_coef 0.01 keeps it near 0")]
    for m in evaluations[-1:]:
        if abs(m["eval/length_correlation"]) > 0.7:
            text = f"score and length correlate by {m['eval/length_correlation']:.2f}: a policy"
            found += [("length", f"{text} will learn the length; balance it in the pairs")]
    last = history[-20:]
    if len(last) == 20 and statistics.mean(m["reward/accuracy"] for m in last) < 0.5:
        text = "for 20 steps not even half of the pairs were judged right:"
        found += [("worse than chance", f"{text} lower --learning_rate, look at the labels")]
    return found
