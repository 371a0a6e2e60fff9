"""tokens.jsonl: what a step does to every token of a few completions, for tools/look.py."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from common import Rollout, ValueModel, evaluating, kl_estimate
from plumbing.data import Task, encode_prompts, score, text_of
from plumbing.forward import completion_logprobs, completion_values, on_cpu, to
from plumbing.metrics import Meter
from plumbing.models import uncompiled
from sampling import sample

HELDOUT_PROMPTS, OF_EACH = 4, 4  # held-out prompts, completions of each that are recorded
MOST_TOKENS = 400  # of all held-out completions: fewer prompts where these are long or many
TRAINED = 8  # completions of a training step that are recorded
MOST_BYTES = 5_000_000  # of the file
MOST_CHARACTERS = 500  # of a prompt
Columns = dict[str, Tensor]  # (b, T), a number per token, or (b,), one per completion
Credit = Callable[[Rollout, Tensor, Tensor, Tensor | None], Columns | Tensor]


@dataclass
class Completions:
    """b completions, and what is known of them before a step has changed the weights."""

    split: str  # "train" or "heldout"
    prompts: list[dict]  # (b)
    places: list[tuple[int, int]]  # (b) which prompt, which completion of it
    scores: list[float]  # (b)
    rollout: Rollout
    columns: Columns


@dataclass(eq=False)
class TokenRecorder:
    """Makes the records of completions. `credit(rollout, scores, kl, values)` gives those of
    held-out prompts what step 4 of the script gives to those that are trained on: advantages, or
    these and rewards and returns by name.
    """

    config: Any
    policy: PreTrainedModel
    value_model: ValueModel | None
    ref: Any  # of common.reference
    tokenizer: Tokenizer
    task: Task
    sampling: dict[str, Any]
    credit: Credit | None
    waiting: Completions | None = field(default=None, init=False)

    @property
    def is_on(self) -> bool:
        return self.credit is not None and self.config.record_tokens

    @torch.no_grad()
    def at_evaluation(self, step: int) -> list[dict]:
        """Complete the first held-out prompts. The records of these completions wait for the update
        of this step, unless it was the last evaluation: then they are returned.
        """
        if not self.is_on:
            return []
        config, G = self.config, max(2, self.config.num_generations)
        count = max(1, min(HELDOUT_PROMPTS, MOST_TOKENS // (G * config.max_new_tokens)))
        prompts = self.task.heldout[:count]
        # Random numbers of their own, the same every time: to record takes none of the run's, and
        # what differs between two steps is the policy alone.
        generator = torch.Generator(self.policy.device).manual_seed(config.seed + 2)
        options = {"num_generations": G, "max_rows": max(G, config.rollout_batch_size)}
        options |= self.sampling | {"generator": generator}
        rollout = sample(self.policy, *encode_prompts(self.tokenizer, prompts), **options)
        scores, _ = score(self.task, prompts, rollout, self.tokenizer)
        columns = self._known(rollout, self._logprobs(self.policy, rollout))
        if self.value_model is not None:
            with evaluating(self.value_model), uncompiled(self.value_model):
                columns["values"] = completion_values(self.value_model, rollout, **self._limits())
        kl = columns.get("kl", torch.zeros_like(rollout.logprobs))
        found = self.credit(rollout, scores, kl, columns.get("values"))
        columns |= found if isinstance(found, dict) else {"advantages": found}
        rows = [i for i in range(len(scores)) if i % G < OF_EACH]
        self.waiting = _chosen(rows, "heldout", prompts, rollout, scores, columns)
        return self._waiting(step, updated=False) if step == config.num_steps else []

    def after_update(
        self,
        step: int,
        prompts: list[dict],
        rollout: Rollout,
        scores: Tensor,
        meter: Meter,
        columns: Columns,
    ) -> list[dict]:
        """The records that wait and, every `sample_every` steps, of the first completions of the
        step, whose update is over.
        """
        records = self._waiting(step, updated=True)
        if self.is_on and step % self.config.sample_every == 0:
            rows = list(range(min(TRAINED, len(scores))))
            columns = {"old_logprobs": meter.old_logprobs} | columns | meter.last_pass
            trained = _chosen(rows, "train", prompts, rollout, scores, columns)
            trained.columns |= self._known(trained.rollout, trained.columns["old_logprobs"])
            records += self._records(step, trained, updated=True)
        return records

    @torch.no_grad()
    def _known(self, rollout: Rollout, old_logprobs: Tensor) -> Columns:
        """The log-probs under the policy that sampled and under the reference, and the KL."""
        with self.ref as ref_model:
            if ref_model is None:
                return {"old_logprobs": old_logprobs}
            ref_logprobs = self._logprobs(ref_model, rollout)
        estimator = getattr(self.config, "kl_estimator", "k1")
        kl = kl_estimate(old_logprobs, ref_logprobs, estimator)
        return {"old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs, "kl": kl}

    def _waiting(self, step: int, updated: bool) -> list[dict]:
        waiting, self.waiting = self.waiting, None
        return [] if waiting is None else self._records(step, waiting, updated)

    @torch.no_grad()
    def _records(self, step: int, found: Completions, updated: bool) -> list[dict]:
        columns = {"sampler_logprobs": found.rollout.logprobs} | found.columns
        if updated:
            columns["new_logprobs"] = self._logprobs(self.policy, found.rollout)
        # One transfer for all: each one waits until the device has done its work.
        B, T = found.rollout.completion_mask.shape
        wide = [x.float().view(B, -1).expand(B, T) for x in columns.values()]
        tables = torch.stack(wide, dim=1).tolist()  # (B, columns, T)
        rollout = on_cpu(found.rollout)
        records = []
        for i in sorted(range(B), key=lambda i: found.places[i][::-1]):
            length = int(rollout.completion_mask[i].sum())
            ids = rollout.tokens[i, -T - 1 :][: length + 1].tolist()
            numbers = {
                name: [_short(number) for number in row[:length]]
                if x.dim() == 2
                else _short(row[0])
                for (name, x), row in zip(columns.items(), tables[i], strict=True)
            }
            records.append(
                {
                    "step": step,
                    "split": found.split,
                    "prompt_index": found.places[i][0],
                    "completion_index": found.places[i][1],
                    "prompt": text_of(found.prompts[i]["prompt"])[-MOST_CHARACTERS:],
                    "score": _short(found.scores[i]),
                    "finished": bool(rollout.finished[i]),
                    "num_tokens": length,
                    "tokens": token_texts(self.tokenizer, ids),
                }
                | numbers
            )
        return fitting(records, MOST_BYTES // _times(self.config))

    def _logprobs(self, model: nn.Module, rollout: Rollout) -> Tensor:
        with evaluating(model), uncompiled(model):
            temperature = self.config.temperature
            return completion_logprobs(model, rollout, temperature, **self._limits())[0]

    def _limits(self) -> dict[str, Any]:
        config = self.config
        names = {"max_rows": config.rollout_batch_size, "max_tokens": config.micro_batch_tokens}
        return names | {"bf16": config.bf16}


def _chosen(
    rows: list[int],
    split: str,
    prompts: list[dict],
    rollout: Rollout,
    scores: Tensor,
    columns: Columns,
) -> Completions:
    """The given rows of a rollout of G completions for each prompt."""
    G = len(scores) // len(prompts)
    device = rollout.tokens.device
    there = to(device, torch.tensor(rows))
    columns = {name: to(device, x)[there] for name, x in columns.items()}
    some = [scores[i].item() for i in rows]
    places = [(i // G, i % G) for i in rows]
    return Completions(
        split, [prompts[i // G] for i in rows], places, some, rollout[there], columns
    )


def _times(config: Any) -> int:
    """How often a run records completions."""
    trained = math.ceil(config.num_steps / config.sample_every)
    return trained + math.ceil(config.num_steps / config.eval_every) + 1  # after the last step


def token_texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The text of each token but the first one, each decoded with the token in front of it:
    SentencePiece tokenizers drop the space in front of the first word of what they decode.
    """
    texts, options = [], {"clean_up_tokenization_spaces": False}
    for before, token in pairwise(ids):
        start, both = (tokenizer.decode(x, **options) for x in ([before], [before, token]))
        alone = both.startswith(start)  # else a character whose bytes begin in the token before
        texts.append(both[len(start) :] if alone else tokenizer.decode([token], **options))
    return texts


def fitting(records: list[dict], most_bytes: int) -> list[dict]:
    """The first records that fit into most_bytes; at least one, without its end if need be."""
    kept = []
    for record in records:
        while (size := len(json.dumps(record)) + 1) > most_bytes and not kept:
            n = len(record["tokens"])
            if n == 1:
                break
            n = max(1, n * most_bytes // size)
            record = {key: x[:n] if isinstance(x, list) else x for key, x in record.items()}
        if size > most_bytes and kept:
            break
        kept.append(record)
        most_bytes -= size
    return kept


def _short(x: float) -> float | None:
    """Five digits; null for what isn't finite."""
    return float(f"{x:.5g}") if math.isfinite(x) else None
