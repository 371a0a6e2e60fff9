"""Pairs of completions, one of them preferred: read, or made of the model's own samples."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from common import base_model, disable_dropout
from plumbing.errors import InputError, first_line
from plumbing.loading import eos_token_ids, load_policy
from plumbing.prompts import Prompt, prompt_batch, read_rows, split_prompts
from plumbing.reward_models import longest_text, pad_rows, sequence_scores, text_ids
from plumbing.scoring import PADDING, decode, encode_prompts
from sampling import sample

PAIR_FORMAT = 'each line must be like {"prompt": "...", "chosen": "...", "rejected": "..."}'
OWN_SAMPLES = 8  # of a prompt, for the pairs of the embedded model


@dataclass
class Pairs:
    """Pairs: dicts with prompt, chosen, rejected, margin, and chosen_ids, rejected_ids: tokens."""

    train: list[dict]
    heldout: list[dict]  # evaluated, never trained on
    name: str = "pairs"


def load_pairs(config: Any, tasks: dict, model: nn.Module, tokenizer: Tokenizer) -> Pairs:
    """The pairs that the flags name, with their tokens; tasks: TASKS of tasks.py. InputError."""
    _check_flags(config)
    if config.pairs is None:
        train, heldout = _own_pairs(config, tasks, tokenizer, model.device)
    elif not (config.eval_pairs or config.eval_split):
        rows = read_pairs(config.pairs, config.split, config.subset)
        train, heldout = split_prompts(rows, "pairs")
    else:
        if config.eval_pairs is None and Path(config.pairs).is_file():
            fault = f"{config.pairs} is one file, and has no splits"
            remedy = "--eval_pairs takes another"
            raise InputError(f"--eval_split {config.eval_split}: {fault}; {remedy}")
        train = read_pairs(config.pairs, config.split, config.subset)
        name, flag = config.eval_pairs or config.pairs, "--eval_pairs"
        subset = None if Path(name).is_file() else config.subset
        flags = (flag if config.eval_pairs else "--pairs", "--eval_split")
        heldout = read_pairs(name, config.eval_split or "test", subset, flags)
    limit = longest_text(base_model(model), tokenizer)
    if config.max_length is not None and config.max_length > limit:
        raise InputError(f"--max_length {config.max_length}: the model takes {limit} tokens")
    limit = min(limit, config.max_length or math.inf)
    train = _with_tokens(train, tokenizer, limit, "to train on")
    heldout = _with_tokens(heldout, tokenizer, limit, "held out")
    vocab_size = base_model(model).get_input_embeddings().weight.shape[0]
    if (
        largest := max(max(p["chosen_ids"] + p["rejected_ids"]) for p in train + heldout)
    ) >= vocab_size:
        fault = f"its tokenizer gives id {largest}, and the model knows {vocab_size} tokens"
        raise InputError(f"--model {config.model}: {fault}: they don't belong together")
    return Pairs(train, heldout[: config.num_eval_pairs])


def _check_flags(config: Any) -> None:
    """Refuse what would have no effect. Raises InputError."""
    if config.pairs is None:
        if config.model != "tiny":
            raise InputError(f"--pairs: is needed for --model {config.model}; tiny makes its own")
        for name in ("eval_pairs", "eval_split", "subset"):
            if getattr(config, name) is not None:
                raise InputError(f"--{name} {getattr(config, name)}: needs --pairs")
    elif config.model != "tiny":
        for name in ("num_pairs", "label_noise"):
            if getattr(config, name) is not None:
                fault = "is about the pairs that tiny makes, and --pairs has others"
                raise InputError(f"--{name} {getattr(config, name)}: {fault}")


def read_pairs(
    path: str,
    split: str = "train",
    subset: str | None = None,
    flags: tuple[str, str] = ("--pairs", "--split"),
) -> list[dict]:
    """Pairs from a file or a dataset, in the formats that TRL takes: chosen and rejected are text
    or messages, after a prompt or with it in them; a margin may be there. Raises InputError with
    the first bad one.
    """
    pairs = []
    found, kind, remedy = read_rows(path, split, subset, flags, PAIR_FORMAT)
    for number, row in found:
        try:
            pairs.append(pair_of(row))
        except ValueError as e:
            raise InputError(f"{path}, {kind} {number}: {first_line(e)}{remedy}") from e
    if not pairs:
        raise InputError(f"{path}: holds no pairs{remedy}")
    return pairs


def pair_of(row: object) -> dict:
    """prompt, chosen, rejected and margin of a row: chosen and rejected follow the prompt. Where
    the row has none, it is what the two have in common. Raises ValueError.
    """
    if not isinstance(row, dict):
        raise ValueError("not an object with keys")
    prompt = row.get("prompt") or ""
    for key in ("prompt", "chosen", "rejected"):
        if key not in row and key != "prompt":
            raise ValueError(f'no key "{key}"')
        # An answer may be empty, a whole text may not.
        empty_is_fine = key == "prompt" or (prompt and row[key] == "")
        if not _is_text_or_messages(row.get(key) or "") or not (row.get(key) or empty_is_fine):
            raise ValueError(f'"{key}" is neither text nor messages, or is empty')
    margin = row.get("margin")
    margin = 0.0 if margin is None else margin
    if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not abs(margin) < 1e6:
        raise ValueError(f'"margin" is {margin!r}, and must be a number')
    texts = [row["chosen"], row["rejected"]]
    if len({type(x) for x in texts}) == 2:
        raise ValueError('"chosen" and "rejected" must be both text or both messages')
    if isinstance(texts[0], list):
        prompt, texts = _after_prompt(prompt, [_messages(text) for text in texts])
    elif isinstance(prompt, list):
        prompt = _messages(prompt)
        texts = [[{"role": "assistant", "content": text}] for text in texts]
    elif not prompt and texts[0] != texts[1]:
        length = [*(a == b for a, b in zip(*texts)), False].index(False)
        prompt, texts = texts[0][:length], [text[length:] for text in texts]
    return {"prompt": prompt, "chosen": texts[0], "rejected": texts[1], "margin": float(margin)}


def _messages(value: list[dict]) -> list[dict[str, str]]:
    """Role and content of each message, without what else a dataset keeps there."""
    return [{key: m[key] for key in ("role", "content")} for m in value]


def _after_prompt(prompt: Prompt, texts: list[list[dict]]) -> tuple[list[dict], list[list[dict]]]:
    """The prompt as messages, and those of the two completions after it. Raises ValueError.

    Many datasets have whole conversations, and the prompt beside them once more.
    """
    whole = any(text[0]["role"] in ("system", "user") for text in texts)
    start = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _messages(prompt)
    if not prompt:  # what the two have in common, but for the last message
        same = [a == b for a, b in zip(texts[0][:-1], texts[1][:-1])]
        length = [*same, False].index(False)
        return texts[0][:length], [text[length:] for text in texts]
    if not whole:
        return start, texts
    if texts[0][0]["role"] == "system" != start[0]["role"]:
        start = [texts[0][0], *start]
    known = [(m["role"], m["content"].strip()) for m in start]
    for text in texts:
        if [(m["role"], m["content"].strip()) for m in text[: len(start)]] != known:
            raise ValueError('the conversations don\'t begin with "prompt"; leave one of them out')
        if len(text) == len(start):
            raise ValueError("a conversation ends with its prompt")
    return texts[0][: len(start)], [text[len(start) :] for text in texts]


def _is_text_or_messages(value: object) -> bool:
    if isinstance(value, str):
        return True
    keys = ("role", "content")
    return isinstance(value, list) and all(
        isinstance(m, dict) and all(isinstance(m.get(key), str) for key in keys) for m in value
    )


def _own_pairs(
    config: Any, tasks: dict, tokenizer: Tokenizer, device: Any
) -> tuple[list[dict], list[dict]]:
    """Pairs of the embedded model's own samples: (train, held out). A right sum is preferred to a
    wrong one; some labels of the training pairs are flipped, as people sometimes err.
    """
    policy = load_policy(config.model).to(device)
    disable_dropout(policy)
    sampling = {
        "temperature": 1.0,
        "max_new_tokens": 5,
        "eos_token_ids": eos_token_ids(policy, tokenizer),
        "pad_token_id": PADDING,
        "generator": torch.Generator(device).manual_seed(config.seed),
    }
    rng = random.Random(config.seed)
    if config.task not in tasks:
        raise InputError(f"--pairs: is needed, tasks.py has no task {config.task}")
    task = tasks[config.task](config, False)

    def pairs(rows: list[dict], count: int, label_noise: float) -> list[dict]:
        found, batch = [], 0
        while len(found) < count:
            part = prompt_batch(rows, batch, 256, config.seed)
            ids, mask = encode_prompts(tokenizer, part)
            rollout = sample(
                policy, ids, mask, num_generations=OWN_SAMPLES, max_rows=2048, **sampling
            )
            texts = decode(tokenizer, rollout)
            for number, row in enumerate(part):
                own = texts[number * OWN_SAMPLES : (number + 1) * OWN_SAMPLES]
                verdicts = task.verifier(own, answer=[row["answer"]] * OWN_SAMPLES)
                right = [text for text, is_right in zip(own, verdicts) if is_right]
                wrong = [text for text, is_right in zip(own, verdicts) if not is_right]
                for pair in zip(right, wrong):  # each sample in one pair at most
                    chosen, rejected = pair if rng.random() >= label_noise else pair[::-1]
                    found.append(pair_of(row | {"chosen": chosen, "rejected": rejected}))
            batch += 1
        return found[:count]

    return pairs(task.train, config.num_pairs, config.label_noise), pairs(
        task.heldout, config.num_eval_pairs, 0.0
    )


def _with_tokens(pairs: list[dict], tokenizer: Tokenizer, limit: float, which: str) -> list[dict]:
    """The pairs with their tokens, without those that teach nothing. Raises InputError."""
    kept, same, long = [], 0, 0
    for pair in pairs:
        ids = {f"{key}_ids": _ids(tokenizer, pair, key) for key in ("chosen", "rejected")}
        if ids["chosen_ids"] == ids["rejected_ids"]:
            same += 1  # the loss would be log 2 whatever the scores are
        elif max(map(len, ids.values())) > limit:
            long += 1  # cut, the two may be the same text, or the better one without its point
        else:
            kept.append(pair | ids)
    for count, why in ((same, "both texts are the same"), (long, f"longer than {limit} tokens")):
        if count:
            print(f"{count} of the {len(pairs)} pairs {which} are left out: {why}.")
    if not kept:
        remedy = "; raise --max_length" if long else ""
        raise InputError(f"--pairs: no pair is left {which}{remedy}")
    return kept


def _ids(tokenizer: Tokenizer, pair: dict, key: str) -> list[int]:
    try:
        ids = text_ids(tokenizer, pair["prompt"], pair[key])
    except Exception as e:  # half a surrogate pair, roles that the template doesn't know, ...
        fault = f"{type(e).__name__}: {first_line(e)}"
        text = f"the text {str(pair[key])[:60]!a}"
        raise InputError(f"--pairs: {text} can't be tokenised ({fault}); leave it out") from e
    if not ids:
        raise InputError(f"--pairs: the text {pair[key]!r} has no tokens; leave it out")
    return ids


def pair_scores(
    model: nn.Module, pairs: list[dict], bf16: bool = False
) -> tuple[Tensor, Tensor, int]:
    """The scores of b pairs by one forward pass of 2b rows: (chosen (b,), rejected (b,), number of
    tokens), with gradient.
    """
    ids = [pair[f"{key}_ids"] for key in ("chosen", "rejected") for pair in pairs]
    tokens, mask = pad_rows(ids, 0, "right", model.device)  # (2b, L)
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=bf16):
        chosen, rejected = sequence_scores(model, tokens, mask).chunk(2)
    return chosen, rejected, sum(map(len, ids))
