"""tokens.jsonl: what a step does to every token of a few completions, for tools/look.py."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from common import evaluating
from plumbing.data import text_of
from plumbing.forward import on_cpu, rollout_logprobs
from plumbing.metrics import Meter

MOST_COMPLETIONS = 8  # of a step
MOST_BYTES = 5_000_000  # of the file
MOST_CHARACTERS = 500  # of a prompt


@torch.no_grad()
def token_records(
    config: Any,
    policy: nn.Module,
    tokenizer: Tokenizer,
    rows: list[dict],
    scores: Tensor,
    meter: Meter,
    columns: dict[str, Tensor | None],
) -> list[dict]:
    """Records of the first completions of a step, whose update is over.

    rows: the prompt of each completion; columns: what the step computed, (B, T) for each token or
    (B,) for each completion. Added to them: the log-probs with which the tokens were drawn, those
    after the update, and the ratio and the clip of the last pass.
    """
    B = min(MOST_COMPLETIONS, len(rows))
    some, T = meter.rollout[:B], meter.rollout.completion_mask.shape[1]
    columns = {"sampler_logprobs": some.logprobs} | meter.columns | columns | meter.last_pass
    columns = {name: x[:B] for name, x in columns.items() if x is not None}
    with evaluating(policy):
        columns["new_logprobs"] = rollout_logprobs(policy, some, config)
    # One transfer for all columns: each one waits until the device has done its work.
    wide = [x.float().view(B, -1).expand(B, T) for x in columns.values()]
    tables = torch.stack(wide, dim=1).tolist()  # (B, columns, T)
    here, values, records = on_cpu(some), scores[:B].tolist(), []
    for i in range(B):
        length = int(here.completion_mask[i].sum())
        ids = here.tokens[i, -T - 1 :][: length + 1].tolist()
        record = {
            "split": "train",
            "completion_index": i,
            "prompt": text_of(rows[i]["prompt"])[-MOST_CHARACTERS:],
            "score": _short(values[i]),
            "finished": bool(here.finished[i]),
            "num_tokens": length,
            "tokens": token_texts(tokenizer, ids),
        }
        for (name, x), row in zip(columns.items(), tables[i], strict=True):
            numbers = [_short(number) for number in row[:length]]
            record[name] = numbers if x.dim() == 2 else numbers[0]
        records.append(record)
    return fitting(records, MOST_BYTES // math.ceil(config.num_steps / config.eval_every))


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
