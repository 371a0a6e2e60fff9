"""Reward models: sequence classifiers with one label, trained by reward_model.py, or by others."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from common import base_model
from plumbing.errors import InputError, first_line
from plumbing.forward import to
from plumbing.inputs import mask_is_known
from plumbing.loading import (
    TINY,
    add_adapter,
    context_length,
    from_hub_or_folder,
    load_tokenizer,
)
from plumbing.prompts import Prompt, text_of

Completion = str | list[dict[str, str]]  # text, or the messages that follow the prompt


def last_real_token(x: Tensor, mask: Tensor) -> Tensor:
    """Of each row what stands at its last real token: x (B, L) or (B, L, D) and mask (B, L), padded
    on either side -> (B,) or (B, D).
    """
    # By the mask, not by the pad id: where pad is EOS, the last token that isn't pad is the one
    # before EOS, and a row that fills the width has none. argmax finds the first of the largest.
    last = (mask.long() * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)
    return x[torch.arange(len(x), device=x.device), last]


def sequence_scores(model: nn.Module, tokens: Tensor, mask: Tensor) -> Tensor:
    """The score of each row: tokens and mask (B, L), padded on the right -> (B,), with gradient."""
    model = base_model(model)
    device = tokens.device.type
    if not hasattr(model, "score"):
        # BERT and its kin, bidirectional, have read the whole text at every token. In bfloat16 a
        # score would have three digits, and the loss is made of differences.
        with torch.autocast(device, enabled=False):
            return model(input_ids=tokens, attention_mask=mask).logits[:, 0]
    # A causal model has read the whole text at its last token alone. No real token sees the padding
    # on its right: so it needs no position ids, and no mask.
    with mask_is_known(model.base_model, no_padding=True):
        hidden = model.base_model(input_ids=tokens, attention_mask=mask).last_hidden_state
    last = last_real_token(hidden, mask)  # (B, L, D) -> (B, D)
    with torch.autocast(device, enabled=False):  # float32 here as well
        return model.score(last.to(next(model.score.parameters()).dtype))[:, 0]


def text_ids(tokenizer: Tokenizer, prompt: Prompt, completion: Completion) -> list[int]:
    """The tokens of a prompt with its completion, as a reward model reads them: in its own chat
    template where both are messages. Reward models are trained and asked with the same tokens.
    """
    if isinstance(completion, str):
        return tokenizer(text_of(prompt) + completion if prompt else completion).input_ids
    messages = [*prompt, *completion]
    if tokenizer.chat_template is None:
        return tokenizer("\n".join(m["content"] for m in messages)).input_ids
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    # The template writes BOS itself; add_special_tokens would put a second one in front.
    return tokenizer(text, add_special_tokens=False).input_ids


def longest_text(model: PreTrainedModel, tokenizer: Tokenizer) -> float:
    """How many tokens the model reads, infinity if there is no limit."""
    # RoBERTa takes 2 less than its config says, and its tokenizer knows.
    return min(context_length(model) or math.inf, tokenizer.model_max_length)


@torch.no_grad()
def check_scores(model: PreTrainedModel, flag: str, name: str) -> None:
    """Check that the score of a text doesn't depend on the padding beside it. Raises InputError.

    It does where a model looks for the last token by itself, and encoder-decoders need more.
    """
    vocab_size = model.get_input_embeddings().weight.shape[0]
    short, long = ([i % vocab_size for i in range(2, length)] for length in (5, 9))
    try:
        alone = sequence_scores(model, *pad_rows([short], 0, "right", model.device))
        beside = sequence_scores(model, *pad_rows([short, long], 0, "right", model.device))[:1]
    except Exception as e:  # a model of another kind raises anything
        fault = f"can't be used as a reward model ({type(e).__name__}: {first_line(e)})"
        raise InputError(f"{flag} {name}: {fault}") from e
    if not torch.allclose(alone, beside, rtol=1e-3, atol=1e-3):
        fault = "can't be used as a reward model, the score of a text depends on its padding"
        raise InputError(f"{flag} {name}: {fault}")


def load_for_training(name: str, lora_r: int = 0) -> nn.Module:
    """A model to train as a reward model: a causal language model or a sequence classifier, which
    keeps its head if it has one label. A new head starts at 0, so the first scores are 0. Raises
    InputError.
    """
    path = str(TINY) if name == "tiny" else name
    if (Path(path) / "adapter_config.json").exists():
        raise InputError(f"--model {name}: is an adapter; give the model that it is merged into")
    kind = AutoModelForSequenceClassification
    options = {"num_labels": 1, "ignore_mismatched_sizes": True}
    model, missing = from_hub_or_folder(kind, path, "--model", **options)
    prefix = f"{model.base_model_prefix}."
    # A pooler is part of the head: BERT has it where it was trained to classify.
    if lost := [w for w in missing if w.startswith(prefix) and "pooler" not in w]:
        raise InputError(f"--model {name}: its checkpoint has no {lost[0]}")
    check_scores(model.eval(), "--model", name)  # while a new head is still random
    if missing:
        if any("SequenceClassification" in x for x in model.config.architectures or []):
            print(
                f"{name}: a classifier of several labels; its head is replaced by one of one label."
            )
        heads = [m for n, m in model.named_modules() if not f"{n}.".startswith(prefix)]
        for head in heads:
            if isinstance(head, nn.Linear) and head.out_features == 1:
                nn.init.zeros_(head.weight)
                if head.bias is not None:
                    nn.init.zeros_(head.bias)
    return add_adapter(model, lora_r, "SEQ_CLS") if lora_r > 0 else model


class RewardModel:
    """A sequence classifier with one label, and its tokenizer, as a reward. Raises InputError."""

    __name__ = "reward_model"

    def __init__(self, name: str, device: torch.device, batch_size: int = 32) -> None:
        flag = "--reward_model"
        if (Path(name) / "adapter_config.json").exists():
            raise InputError(f"{flag} {name}: is an adapter; train with --merge_adapter true")
        self.model, missing = from_hub_or_folder(AutoModelForSequenceClassification, name, flag)
        labels = self.model.config.num_labels
        if labels != 1:
            raise InputError(f"{flag} {name}: has {labels} labels, and a reward model has one")
        if missing:
            raise InputError(f"{flag} {name}: no reward model, its checkpoint has no {missing[0]}")
        check_scores(self.model.eval().requires_grad_(False).to(device), flag, name)
        self.tokenizer = load_tokenizer(name, flag)
        self.batch_size = batch_size

    @torch.no_grad()
    def __call__(self, prompts: list[Prompt], completions: list, **columns) -> list[float]:
        ids = [text_ids(self.tokenizer, p, c) for p, c in zip(prompts, completions, strict=True)]
        limit = longest_text(self.model, self.tokenizer)
        if (longest := max(map(len, ids))) > limit:
            fault = f"takes {limit} tokens, and a prompt with its completion has {longest}"
            remedy = "shorten the prompts or lower --max_new_tokens"
            raise InputError(f"the reward model {fault}: {remedy}")
        scores = []
        for start in range(0, len(ids), self.batch_size):
            rows = pad_rows(ids[start : start + self.batch_size], 0, "right", self.model.device)
            scores += sequence_scores(self.model, *rows).tolist()
        return scores


def pad_rows(rows: list[list[int]], pad: int, side: str, device: Any) -> tuple[Tensor, Tensor]:
    """Rows of ids, padded on the "left" or "right" to the longest row: (ids, mask), each (B, L)."""
    width = max(map(len, rows))
    tokens = torch.full((len(rows), width), pad)
    mask = torch.zeros_like(tokens)
    for i, row in enumerate(rows):
        columns = slice(width - len(row), None) if side == "left" else slice(len(row))
        tokens[i, columns], mask[i, columns] = torch.tensor(row), 1
    return to(torch.device(device), tokens), to(torch.device(device), mask)
