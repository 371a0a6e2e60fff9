"""Pairs of texts of which one is preferred: how they are read, and how a model judges them."""

from __future__ import annotations

import functools
import math
import textwrap
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, logsigmoid
from transformers import PreTrainedTokenizerBase as Tokenizer

from common import InputError, blame, evaluating
from plumbing.data import read_rows, split_rows, text_of
from plumbing.metrics import Evaluation, Metrics, Totals
from plumbing.models import context_length
from plumbing.preferences import sequence_scores, text_ids

KEYS = ("chosen", "rejected")


@dataclass
class Pairs:
    """Dicts with chosen, rejected, margin, perhaps prompt, and ids: the tokens of both texts."""

    train: list[dict]
    heldout: list[dict]  # evaluated, never trained on
    tokenizer: Tokenizer
    name: str = "pairs"


def load_pairs(config: Any, tasks: ModuleType, model: nn.Module, tokenizer: Tokenizer) -> Pairs:
    """The pairs that the flags name, with their tokens. Raises InputError."""
    limit = min(context_length(model) or math.inf, config.max_length or math.inf)
    with_ids = functools.partial(_with_ids, tokenizer=tokenizer, limit=limit)
    if config.pairs:
        train, heldout = with_ids(read_rows(config.pairs, "train")), []
    elif config.model == "tiny":
        train, heldout = map(with_ids, tasks.add_pairs())
    else:
        raise InputError(f"--pairs: is needed for --model {config.model}; tiny has its own")
    if config.eval_pairs:
        heldout = with_ids(read_rows(config.eval_pairs, "test"))
    elif config.pairs:
        # Without a prompt a row is told by its conversation but for the answer, or by its text.
        train, heldout = split_rows(train, lambda x: str(x.get("prompt") or x["chosen"][:-1]))
    return Pairs(train, heldout[: config.num_eval_pairs], tokenizer)


def _with_ids(rows: list[dict], tokenizer: Tokenizer, limit: float) -> list[dict]:
    """The rows with their tokens, without those that teach nothing. Raises InputError."""
    pairs = []
    for row in rows:
        with blame(f"chosen or rejected of {str(row)[:60]} can't be read"):
            ids = [text_ids(tokenizer, row.get("prompt"), row[key]) for key in KEYS]
            pair = row | {"ids": ids, "margin": float(row.get("margin") or 0)}
        # A text that is cut could lose the very words that decide.
        if ids[0] != ids[1] and max(map(len, ids)) <= limit:
            pairs.append(pair)
    if len(pairs) < len(rows):
        left_out = f"{len(rows) - len(pairs)} of {len(rows)} pairs are left out"
        print(f"{left_out}: longer than {limit} tokens, or both texts are the same.")
    if not pairs:
        raise InputError("no pair is left to train on, or none to evaluate")
    return pairs


def pair_batches(pairs: list[dict], max_tokens: int) -> list[list[dict]]:
    """Cut pairs, those of short texts first, into parts whose texts, padded to the longest, have at
    most max_tokens tokens; a pair alone may have more.
    """

    def width(pair: dict) -> int:
        return max(map(len, pair["ids"]))

    parts = [[]]
    for pair in sorted(pairs, key=width):
        if parts[-1] and 2 * (len(parts[-1]) + 1) * width(pair) > max_tokens:
            parts.append([])
        parts[-1].append(pair)
    return parts


def pair_scores(model: nn.Module, pairs: list[dict], bf16: bool = False) -> Tensor:
    """The scores of b pairs by one forward pass, chosen and rejected: (2, b), with gradient."""
    rows = [pair["ids"][which] for which in (0, 1) for pair in pairs]
    return sequence_scores(model, rows, bf16).view(2, -1)


def above_0(x: Tensor) -> Tensor:
    """1 where an element is above 0, a half where it is 0, else 0."""
    return x.sign() / 2 + 0.5


@torch.no_grad()
def evaluate_pairs(config: Any, model: nn.Module, pairs: Pairs) -> Evaluation:
    """How well the model judges the held-out pairs."""
    parts = pair_batches(pairs.heldout, config.micro_batch_tokens)
    with evaluating(model):
        found = [pair_scores(model, part, config.bf16).cpu().double() for part in parts]
    rows = [pair for part in parts for pair in part]  # N, in the order of the scores
    scores = torch.cat(found, dim=1)  # (2, N)
    margins = scores[0] - scores[1]
    longer = torch.tensor([len(a) - len(b) for a, b in (row["ids"] for row in rows)]).double()
    metrics = {
        "eval/accuracy": above_0(margins).mean(),
        "eval/loss": -logsigmoid(margins).mean(),
        "eval/margin": margins.mean(),
        "eval/score_mean": scores.mean(),
        "eval/score_std": scores.std(),
        "eval/longer_is_better": above_0(longer).mean(),
        # About 0, not about the mean: which of the two comes first means something.
        "eval/length_correlation": cosine_similarity(margins, longer, dim=0),
    }
    records, lines = [], []
    for row, (better, worse) in zip(rows, scores.T.tolist(), strict=True):
        kept = {key: row.get(key) for key in ("prompt", *KEYS, "margin")}
        records.append(kept | {"score_chosen": better, "score_rejected": worse})
        texts = (text_of(row.get(key) or "") for key in ("prompt", *KEYS))
        prompt, good, bad = (textwrap.shorten(text, 26, placeholder=" ...") for text in texts)
        lines.append(f"  {better:6.2f} {worse:6.2f}  {prompt} {good} | {bad}")
    metrics = {name: x.item() for name, x in metrics.items()}
    return Evaluation(metrics, ["eval/accuracy", "eval/loss"], records, lines)


class PairMeter(Totals):
    """The metrics of an update of a reward model."""

    def add_pairs(self, pairs: list[dict], loss: Tensor, chosen: Tensor, rejected: Tensor) -> None:
        """Add b pairs with their losses and scores, each (b,)."""
        self.num_tokens += sum(len(ids) for pair in pairs for ids in pair["ids"])
        self.add("loss/pairs", loss)
        self.add("reward/accuracy", above_0(chosen - rejected))
        self.add("reward/margin", chosen - rejected)
        self.add("reward/mean", (chosen + rejected) / 2)

    @staticmethod
    def progress(metrics: Metrics) -> str:
        loss, accuracy = metrics["loss/pairs"], metrics["reward/accuracy"]
        return f"loss {loss:.3f}, accuracy {accuracy:.2f}, {metrics['tokens_per_second']:.0f} tok/s"

    @staticmethod
    def warnings(history: list[Metrics], bf16: bool = False) -> list[tuple[str, str]]:
        """As metrics.warnings_about, of pairs."""
        found, mean = [], history[-1]["reward/mean"]
        if abs(mean) > 10:
            text = f"the mean score is {mean:.0f}, and differences alone are learnt:"
            found += [("far scores", f"{text} raise --center_rewards_coef, to 0.01 say")]
        if evaluations := [m for m in history if "eval/loss" in m]:
            now, best = evaluations[-1], min(m["eval/loss"] for m in evaluations)
            if now["eval/loss"] > best + 0.1:
                text = f"the held-out loss has risen from {best:.2f} to {now['eval/loss']:.2f}: the"
                remedy = "model learns pairs by heart; take more pairs or fewer steps"
                found += [("overfitting", f"{text} {remedy}")]
            if abs(now["eval/length_correlation"]) > 0.7:
                text = "the scores follow the length within pairs, and so will a policy:"
                found += [("length", f"{text} balance it in the pairs")]
        return found
