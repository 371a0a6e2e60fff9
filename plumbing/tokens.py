"""tokens.jsonl: what a step does to every token of a few completions, for tools/look.py."""

from __future__ import annotations

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
MOST_TOKENS = 50_000  # of the file, which then has about 5 MB
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
    room = max(1, MOST_TOKENS // math.ceil(config.num_steps / config.eval_every))
    for i in range(B):
        length = int(here.completion_mask[i].sum())
        shown = min(length, room)  # the end of a long completion is left out
        room -= shown
        if shown == 0:
            break
        ids = here.tokens[i, -T - 1 :][: shown + 1].tolist()
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
            numbers = [_short(number) for number in row[:shown]]
            record[name] = numbers if x.dim() == 2 else numbers[0]
        records.append(record)
    return records


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


def _short(x: float) -> float | None:
    """Five digits; null for what isn't finite."""
    return float(f"{x:.5g}") if math.isfinite(x) else None
