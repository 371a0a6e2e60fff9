"""The copy of a model in half precision that decodes, and what makes it fast.

Its norms, activations and attention of one token take few operations. On a CPU and in float16 a
LoRA adapter is merged. But for rounding the copy computes what the model does.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.pytorch_utils import Conv1D

from common import base_model, has_plain_adapters
from plumbing import models


def half_precision_copy(model: nn.Module, half: torch.dtype) -> nn.Module:
    """A copy of the model with its weights rounded to bfloat16 or float16, to decode with. Buffers
    keep their precision: rotary frequencies of 8 bits would put late tokens at wrong positions.
    """
    floats = [p for p in model.parameters() if p.is_floating_point()]  # adapters have indices too
    rounded = {id(p): nn.Parameter(p.to(half), requires_grad=False) for p in floats}
    lora = {name: x for name, x in model.named_modules() if _can_be_merged(x, model, half)}
    for layer in lora.values():
        weight = layer.base_layer.weight
        merged = weight.float() + layer.get_delta_weight(layer.active_adapters[0]).float()
        rounded[id(weight)] = nn.Parameter(merged.to(half), requires_grad=False)
    copied = copy.deepcopy(model, memo=rounded)
    for name in lora:
        copied.set_submodule(name, copied.get_submodule(name).base_layer)
    backbone = base_model(copied).base_model
    width = backbone.config.get_text_config().hidden_size
    for module in copied.modules():
        for name, buffer in module.named_buffers(recurse=False):
            # Positions, added to the hidden states; matrices that an adapter (VeRA) doesn't train.
            is_one = buffer.shape[1:] == (width,) or type(module).__name__ == "BufferDict"
            if is_one and buffer.is_floating_point():
                module._buffers[name] = buffer.to(half)
    models.fuse_gelu(copied)
    for name, module in model.named_modules():
        if (offset := RMS_NORMS.get(type(module).__name__)) is not None:
            eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
            norm = nn.RMSNorm(module.weight.shape, eps, device="meta")
            norm.weight = nn.Parameter((offset + module.weight).to(half), requires_grad=False)
            copied.set_submodule(name, norm)
    if backbone._supports_sdpa:  # the fastest for one token at a time, on every device
        backbone.set_attn_implementation("one_token")
    packs = backbone.device.type == "cpu" and models.fast_at_bfloat16(backbone.device)
    if packs and half == torch.bfloat16 and has_plain_adapters(copied):
        for module in list(copied.modules()):
            for name, child in module.named_children():
                if type(child) in (nn.Linear, Conv1D):  # GPT-2's Conv1D: a transposed weight
                    weight = child.weight.T if type(child) is Conv1D else child.weight
                    setattr(module, name, PackedLinear(weight, child.bias))
    return copied


# Norms that are nn.RMSNorm to rounding, which is one kernel instead of six, and what is added to
# their weights.
RMS_NORMS = dict.fromkeys(
    [f"{x}RMSNorm" for x in ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3")], 0
)
RMS_NORMS |= dict.fromkeys([f"{x}RMSNorm" for x in ("Gemma", "Gemma2", "Gemma3")], 1)


def _can_be_merged(layer: nn.Module, model: nn.Module, half: torch.dtype) -> bool:
    """Whether it is a layer with a plain LoRA adapter whose matrix can be added to the weight."""
    if getattr(layer, "lora_variant", None) != {} or type(layer).__name__ != "Linear":
        return False
    weight, active = layer.base_layer.weight, layer.active_adapters
    # A weight in half precision is shared with the copy on a GPU, for its memory: it can't change.
    is_shared = weight.dtype == half and weight.device.type != "cpu"
    is_tied = weight is base_model(model).get_input_embeddings().weight
    plain = type(layer.base_layer) in (nn.Linear, Conv1D) and not any(layer.lora_bias.values())
    return plain and len(active) == 1 and not (layer.disable_adapters or is_shared or is_tied)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention of transformers: query (B, heads, L, D) -> (B, L, heads, D)."""
    mask = attention_mask
    if query.shape[2] == 1 and mask is not None and mask.dtype == torch.bool:
        # Once for all layers: PyTorch would make it in each.
        if not hasattr(mask, "additive"):
            mask.additive = mask.to(query.dtype).log()  # 0 and -inf
        mask = mask.additive
    of_one_token = query.shape[2] == 1 and mask is not None and mask.shape[1] == 1
    if query.device.type != "cpu" or query.dtype != torch.bfloat16 or not of_one_token:
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **options)
    # On a CPU plain products of matrices take half the time of PyTorch's fused attention.
    (num_rows, heads, _, size), kv_heads = query.shape, key.shape[1]
    grouped = query.reshape(num_rows * kv_heads, heads // kv_heads, size)
    scores = torch.bmm(key.flatten(0, 1), grouped.mT).mT.float()  # (rows x KV heads, group, C)
    scores = scores.view(num_rows, kv_heads, heads // kv_heads, -1)
    weights = (scores * (scaling or size**-0.5) + mask).softmax(-1).to(value.dtype)
    out = torch.bmm(weights.flatten(0, 1), value.flatten(0, 1))
    return out.view(num_rows, 1, heads, size), None


def mask_of_tokens(*args: Any, **options: Any) -> Tensor | None:
    """A mask of transformers, (B, 1, L, C). It would take a dozen operations for one token, which
    attends to all that come before: where there is no window, its mask is that of the tokens.
    """
    mask, kind = options.get("attention_mask"), options.get("mask_function")
    if mask is not None and kind is causal_mask_function and options.get("q_length") == 1:
        return mask[:, None, None].bool()
    return sdpa_mask(*args, **options)


AttentionInterface.register("one_token", attend)
AttentionMaskInterface.register("one_token", mask_of_tokens)


class PackedLinear(nn.Module):
    """A linear layer, weight (out, in), for decoding on a CPU. oneDNN rearranges a bfloat16 matrix
    before each product; for few rows that takes as long as the product: here it is done once.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
