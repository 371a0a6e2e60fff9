"""What a model is given in a forward pass, and what is known of its mask and of its compilation."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import masking_utils

from common import base_model


def model_inputs(
    model: nn.Module, tokens: Tensor, attention_mask: Tensor, **options: object
) -> dict[str, object]:
    """Arguments for a forward pass over tokens (B, L): position ids, and those of `options` that
    the model's forward takes.

    Without position ids GPT-2 puts the tokens of a left-padded row at shifted positions: 34 nats
    off in huggingface/trl#6800. attention_mask (B, C+L) also covers the C tokens in a KV cache.
    """
    accepted = inspect.signature(base_model(model).forward).parameters
    if "cache" in options and "cache" not in accepted:  # its name before transformers 5.24
        options["past_key_values"] = options.pop("cache")
    position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
    options = options | {"position_ids": position_ids, "attention_mask": attention_mask.long()}
    return {"input_ids": tokens} | {k: v for k, v in options.items() if k in accepted}


def uncompiled(model: nn.Module) -> contextlib.AbstractContextManager:
    """For forward passes of many lengths: what --compile has compiled would be compiled anew for
    each. Of a model that isn't compiled nothing is set: it would be set for all threads.
    """
    is_compiled = any(module._compiled_call_impl is not None for module in model.modules())
    return torch.compiler.set_stance("force_eager") if is_compiled else contextlib.nullcontext()


# Threads take turns: two at once would put each other's function back, and the last one would stay.
_replacing = threading.RLock()


@contextlib.contextmanager
def mask_is_known(backbone: nn.Module, no_padding: bool) -> Iterator[None]:
    """In a forward pass with an attention mask, tell transformers whether it masks anything.

    To choose a kernel it would ask the device, in every forward pass, and wait for the answer.
    Other threads are answered as they would be without this.
    """
    # Compiled, it never asks; and a function that is replaced would be compiled anew every time.
    compiled = backbone._compiled_call_impl is not None
    if compiled or not hasattr(masking_utils, "_ignore_causal_mask_sdpa"):  # or another version
        yield
        return
    this_thread = threading.get_ident()

    def answer(padding_mask: Tensor | None, *args: object, **kwargs: object) -> bool:
        if threading.get_ident() != this_thread:
            return ask(padding_mask, *args, **kwargs)
        return (no_padding or padding_mask is None) and ask(None, *args, **kwargs)

    with _replacing:
        ask = masking_utils._ignore_causal_mask_sdpa
        try:
            masking_utils._ignore_causal_mask_sdpa = answer
            yield
        finally:
            masking_utils._ignore_causal_mask_sdpa = ask
