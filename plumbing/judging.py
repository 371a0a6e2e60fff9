"""How well a reward model judges held-out pairs, and what a run of reward_model.py shows."""

from __future__ import annotations

import textwrap

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from common import evaluating
from plumbing.errors import Fault
from plumbing.metrics import Meter, Stopwatch, peak_resident_memory
from plumbing.pairs import pair_scores
from plumbing.prompts import Prompt, text_of
from plumbing.reward_models import Completion

NUM_BINS = 5  # of the reliability curve, from 50% to 100%


@torch.no_grad()
def evaluate_pairs(
    model: nn.Module, pairs: list[dict], bf16: bool, max_rows: int
) -> tuple[dict[str, float], list[dict], Tensor]:
    """Of N held-out pairs the metrics, the reliability curve, and the scores of chosen and rejected
    texts (2, N), max_rows texts at a time. Raises Fault where a score isn't finite.
    """
    lengths = torch.tensor([[len(p[f"{key}_ids"]) for p in pairs] for key in KEYS])  # (2, N)
    order = lengths.amax(0).argsort()  # a batch is as wide as its longest text
    scores = torch.empty(2, len(pairs), dtype=torch.float64)
    with evaluating(model):
        for part in order.split(max(1, max_rows // 2)):
            chosen, rejected, _ = pair_scores(model, [pairs[i] for i in part.tolist()], bf16)
            scores[:, part] = torch.stack([chosen, rejected]).double().cpu()
    if not scores.isfinite().all():
        raise Fault("the scores of held-out pairs are not finite: lower --learning_rate")
    margins, longer = scores[0] - scores[1], (lengths[0] - lengths[1]).double()
    curve, error = reliability(margins)
    metrics = {
        "eval/loss": -logsigmoid(margins).mean().item(),
        "eval/accuracy": _share(margins),
        "eval/margin": margins.mean().item(),
        "eval/score_mean": scores.mean().item(),
        "eval/score_std": scores.std().item(),
        "eval/calibration_error": error,
        "eval/longer_is_better": _share(longer),
        "eval/length_correlation": length_correlation(margins, longer),
    }
    return metrics, curve, scores


KEYS = ("chosen", "rejected")


def _share(differences: Tensor) -> float:
    """The share of the differences that are above 0; a tie counts half."""
    return (differences.sign() / 2 + 0.5).mean().item()


def length_correlation(margins: Tensor, longer: Tensor) -> float:
    """How far the score follows the length within pairs: differences of the scores and of the
    lengths, each (N,) -> -1 to 1; 0 where one of the two is 0 throughout.

    Between the two texts of a pair, so the length of the prompt doesn't count; about 0, not about
    the mean, because which text comes first means something.
    """
    size = margins.norm() * longer.norm()
    return (margins @ longer / size).item() if size > 0 else 0.0


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


def pair_records(step: int, pairs: list[dict], scores: Tensor) -> tuple[list[dict], str]:
    """Of N pairs with scores (2, N) the records for samples.jsonl, and the first four as lines."""
    records, lines = [], []
    for pair, (better, worse) in zip(pairs, scores.T.tolist(), strict=True):
        kept = {key: pair[key] for key in ("prompt", "chosen", "rejected", "margin")}
        kept |= {"score_chosen": better, "score_rejected": worse}
        records.append({"step": step, "split": "heldout"} | kept)
        prompt, good, bad = (_shown(pair[key], width) for key, width in COLUMNS)
        lines.append(f"\n  {better:6.2f} {worse:6.2f}  {prompt} {good} | {bad}")
    return records, "".join(lines[:4])


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


def pair_progress(history: list[dict[str, float]]) -> str:
    """What the progress bar shows: of the last step, not of an evaluation after it; of a run that
    was done before it was resumed, nothing.
    """
    metrics = next((m for m in reversed(history) if "loss/pairs" in m), None)
    if metrics is None:
        return ""
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
