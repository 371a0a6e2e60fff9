"""Reward models: sequence classifiers with one label, which give a whole text one number."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification
from transformers import PreTrainedTokenizerBase as Tokenizer

from common import at_least_float32, unwrap
from plumbing.errors import InputError, blame
from plumbing.models import add_adapter, context_length, is_adapter, load, load_tokenizer

Text = str | list[dict[str, str]]  # plain text, or chat messages


def text_ids(tokenizer: Tokenizer, prompt: Text | None, completion: Text) -> list[int]:
    """Make the tokens that a reward model reads of a prompt, if there is one, and what follows it.
    Plain text ends with EOS where the tokenizer has one, messages end as their chat template does.
    """
    if isinstance(prompt, list) and isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    roles = [m["role"] for m in [*prompt[-1:], *completion[:1]]] if isinstance(prompt, list) else []
    if roles == ["assistant", "assistant"]:  # the prompt has begun the turn that is completed
        begun = prompt[-1]["content"] + completion[0]["content"]
        prompt, completion = prompt[:-1], [completion[0] | {"content": begun}, *completion[1:]]
    text = prompt + completion if prompt else completion
    if isinstance(text, list) and tokenizer.chat_template is not None:
        text = tokenizer.apply_chat_template(text, tokenize=False)
        return tokenizer(text, add_special_tokens=False).input_ids  # BOS is in the template
    if isinstance(text, list):
        text = "\n".join(message["content"] for message in text)
    ids, eos = tokenizer(text).input_ids, tokenizer.eos_token_id
    return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]


def load_classifier(name: str, lora_r: int = 0, new_head: bool = False) -> nn.Module:
    """Load a sequence classifier with one label, with a new adapter if there is a rank. With
    `new_head` a causal model too: its head starts at 0, and so the first scores are 0. Raises
    InputError.
    """
    with blame(name):
        base, has_adapter = name, is_adapter(name)
        if has_adapter and new_head:
            raise InputError(f"{name}: is an adapter; give its base model, and --lora_r")
        if has_adapter:
            import peft

            base = peft.PeftConfig.from_pretrained(name).base_model_name_or_path
        head_comes = new_head or has_adapter
        model = load(AutoModelForSequenceClassification, base, head_comes, num_labels=1)
        if has_adapter:  # not left to transformers: 5.17 loses the head that is saved with it
            model = peft.PeftModel.from_pretrained(model, name).get_base_model()
        if not hasattr(model, "score") and not hasattr(model, "classifier"):
            # Other kinds look for the last token by themselves: a score depends on the padding.
            raise InputError(f"{name}: a {type(model).__name__} can't be a reward model here")
        return add_adapter(model, lora_r, "SEQ_CLS") if lora_r > 0 else model


def last_real_token(x: Tensor, mask: Tensor) -> Tensor:
    """Take of each row what stands at its last real token: x (B, L) or (B, L, D) and mask (B, L),
    padded on either side -> (B,) or (B, D).
    """
    # By the mask, not by the pad id: where pad is EOS, the last token that isn't pad is the one
    # before EOS, and a row that fills the width has none. argmax finds the first of the largest.
    last = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)
    return x[torch.arange(len(x), device=x.device), last]


def sequence_scores(model: nn.Module, rows: list[list[int]], bf16: bool) -> Tensor:
    """Score each of B rows of token ids: (B,), with gradient. With bf16 a causal model runs
    in bfloat16, except for its head.
    """
    model = unwrap(model)
    # On the right, with any id: the mask says what is padding.
    tokens, mask = (
        pad_sequence([torch.tensor(x) for x in some], batch_first=True).to(model.device)  # (B, L)
        for some in (rows, [[1] * len(row) for row in rows])
    )
    if not hasattr(model, "score"):
        # BERT and its kin, bidirectional, have read the whole text at every token. In bfloat16 a
        # score would have three digits, and the loss is made of differences.
        return model(input_ids=tokens, attention_mask=mask).logits[:, 0]
    # A causal model has read the whole text only at its last token. No real token sees the padding
    # on its right, so it needs no position ids, and no mask.
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=bf16):
        hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    return model.score(at_least_float32(last_real_token(hidden, mask)))[:, 0]


class RewardModel:
    """A reward model with its own tokenizer, as a reward function. Raises InputError."""

    __name__ = "reward_model"

    def __init__(self, name: str, device: str, bf16: bool = False, max_tokens: int = 1024) -> None:
        self.name, self.bf16, self.max_tokens = name, bf16, max_tokens  # of a forward pass
        self.model = load_classifier(name)
        self.tokenizer = load_tokenizer(name)
        if bf16 and hasattr(self.model, "score"):  # half the memory: it doesn't train
            for p in self.model.base_model.parameters():
                p.data = p.data.to(torch.bfloat16)
        self.model.to(device)

    @torch.no_grad()
    def __call__(self, prompts: list[Text], completions: list[Text], **columns) -> list[float]:
        with blame(f"--reward_model {self.name}"):
            ids = [text_ids(self.tokenizer, *pair) for pair in zip(prompts, completions)]
        limit, longest = context_length(self.model) or math.inf, max(map(len, ids))
        if longest > limit:  # it may need more tokens than the policy
            fault = f"reads {limit} tokens, and a prompt with its completion has {longest} of them"
            raise InputError(f"{self.name}: {fault}: lower --max_new_tokens or shorten prompts")
        scores = {}
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))  # little padding in a batch
        size = max(1, self.max_tokens // longest)  # texts of a forward pass
        for start in range(0, len(order), size):
            some = order[start : start + size]
            found = sequence_scores(self.model, [ids[i] for i in some], self.bf16)
            scores |= zip(some, found.tolist())
        return [scores[i] for i in range(len(ids))]
