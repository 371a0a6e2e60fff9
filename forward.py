"""Forward passes over sampled completions, a rollout or a micro-batch: log-probs, and PPO's values.

They equal what the logits of model(tokens) give. What else stands here saves memory and time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel

from common import (
    Rollout,
    at_least_float32,
    copy_what_trains,
    token_entropy,
    token_logprobs,
    unwrap,
)

CHUNK = 2**25  # logits at a time: 128 MB in float32
# PyTorch takes cuDNN's attention on an H100, and its gradients are NaN for some masks
# (pytorch/pytorch#196678); on a B200 it decodes wrongly (pytorch/pytorch#193893).
torch.backends.cuda.enable_cudnn_sdp(False)


def completion_logprobs(
    model: nn.Module,
    rollout: Rollout,
    temperature: float,
    *,
    bf16: bool = False,
    entropy: bool = True,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute token_logprobs and token_entropy of model(tokens).logits[:, P-1:-1] / temperature.

    Returns a pair, each (B, T), 0 off the mask: log-probs with gradient, and entropies, which have
    one only with `entropy_grad`. Entropies cost more than log-probs: without `entropy` the second
    is None. The logits are divided by the temperature because the tokens were drawn from that
    distribution. With bf16 the model runs under autocast.
    """
    model, mask = unwrap(model), rollout.completion_mask.bool()
    device, head = rollout.tokens.device.type, model.get_output_embeddings()
    with torch.autocast(device, torch.bfloat16, enabled=bf16):
        states = completion_states(model.base_model, rollout)  # (B, t, D)
    # Leave the padding out: n tokens remain, each with the state from which it is predicted.
    tokens = rollout.tokens[:, -mask.shape[1] :][mask]  # (n,)
    states = states[mask[:, : states.shape[1]]]  # (n, D)

    def of_chunk(states: Tensor, tokens: Tensor) -> Tensor:
        # Logits rounded to bfloat16 would put log-probs .002 nats off, and some of them .1.
        logits = at_least_float32(logits_from(model, states.to(head.weight.dtype)))  # (n, V)
        logits = logits if temperature == 1 else logits / temperature
        logprobs = token_logprobs(logits, tokens)
        if not entropy:
            return logprobs.unsqueeze(0)
        return torch.stack([logprobs, token_entropy(logits if entropy_grad else logits.detach())])

    # The logits of all tokens, (n, V), would be the largest tensor: make them for a chunk at a
    # time. On CUDA, where small products are slow, a chunk is twice as large: it takes 1.3 GB, at
    # about 20 bytes a logit. For the backward pass five chunks are kept, or one with
    # `entropy_grad`; the others make their logits again.
    size = (2 * CHUNK if states.is_cuda else CHUNK) // head.weight.shape[0]
    chunks = list(zip(states.split(size), tokens.split(size)))
    num_kept = 1 if entropy_grad else 5
    found = [of_chunk(*chunk) for chunk in chunks[:num_kept]]
    options = {"use_reentrant": False, "preserve_rng_state": False}
    found += [checkpoint(of_chunk, *chunk, **options) for chunk in chunks[num_kept:]]
    found = torch.cat(found, dim=1)  # (2, n), or (1, n) without entropies
    padded = found.new_zeros(len(found), *mask.shape)
    padded[:, mask] = found
    return padded[0], padded[1] if entropy else None


def completion_values(value_model: ValueModel, rollout: Rollout, *, bf16: bool = False) -> Tensor:
    """Compute V_t, the value of the state before token t is chosen: (B, T), 0 off the mask, with
    gradient.

    It stands where the logits of token t stand. One position to the right V would know the action.
    """
    mask = rollout.completion_mask.bool()
    with torch.autocast(rollout.tokens.device.type, torch.bfloat16, enabled=bf16):
        values = value_model.values(completion_states(value_model.backbone, rollout))  # (B, t)
    values = nn.functional.pad(values, (0, mask.shape[1] - values.shape[1]))
    return values.masked_fill(~mask, 0)


def completion_states(backbone: nn.Module, rollout: Rollout) -> Tensor:
    """Compute the last hidden states (B, t, D), with gradient, from which the first t completion
    tokens are predicted; t is the longest completion.
    """
    # Columns that are padding in every row are skipped, on either side.
    first = rollout.attention_mask.long().argmax(1).min()
    first, t = torch.stack([first, rollout.lengths.max()]).tolist()
    end = rollout.tokens.shape[1] - rollout.completion_mask.shape[1] + t
    # The state at position i predicts token i + 1. So the states are those of [:, P-1:-1], and the
    # last column isn't read.
    tokens, mask = rollout.tokens[:, first : end - 1], rollout.attention_mask[:, first : end - 1]
    P = end - first - t

    def states(tokens: Tensor, mask: Tensor, cache: DynamicCache | None = None) -> Tensor:
        inputs = model_inputs(backbone, tokens, mask, cache)
        return backbone(**inputs).last_hidden_state

    # Gradient checkpointing allows no cache. On CUDA one pass is faster than two shorter ones.
    modules = backbone.modules() if backbone.training else ()
    checkpointed = any(getattr(module, "gradient_checkpointing", False) for module in modules)
    if checkpointed or tokens.is_cuda:
        return states(tokens, mask)[:, P - 1 :]
    prompts = [tuple(row) for row in torch.where(mask.bool(), tokens, -1)[:, :P].tolist()]
    distinct = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    if len(distinct) == len(prompts):
        return states(tokens, mask)[:, P - 1 :]

    # Read each prompt once for all its completions: after 147 tokens a GRPO step of SmolLM2, G = 8,
    # takes 47 CPU seconds then, and 101 otherwise. Keys and values, which carry the gradient, are
    # repeated by index_select, which adds up their gradients in the same order in every run.
    prompt_of_row = torch.tensor([distinct[prompt] for prompt in prompts], device=tokens.device)
    first_row = torch.tensor([prompts.index(prompt) for prompt in distinct], device=tokens.device)
    cache = DynamicCache(config=backbone.config)  # some layers keep more than keys and values
    last = states(tokens[first_row, :P], mask[first_row, :P], cache)[:, -1:]
    last = last.index_select(0, prompt_of_row)
    if t == 1:
        return last
    cache.reorder_cache(prompt_of_row)
    return torch.cat([last, states(tokens[:, P:], mask, cache)], dim=1)


def model_inputs(
    model: nn.Module,
    tokens: Tensor,
    mask: Tensor | dict[str, Tensor],
    cache: Any = None,
    position_ids: Tensor | None = None,
    **options: object,
) -> dict[str, object]:
    """Make the arguments of a forward pass over tokens (B, L), as far as the model takes them. The
    attention mask (B, C+L) also covers the C tokens in a cache of keys and values; with
    position_ids the mask is taken as it is.

    Without position ids GPT-2 puts the tokens of a left-padded row at shifted positions, which was
    34 nats off in huggingface/trl#6800.
    """
    if position_ids is None:
        position_ids = (mask.long().cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        mask = mask.long()
    options |= {"input_ids": tokens, "attention_mask": mask, "position_ids": position_ids}
    accepted = inspect.signature(unwrap(model).forward).parameters
    name = "cache" if "cache" in accepted else "past_key_values"  # before transformers 5.24
    options |= {name: cache, "use_cache": cache is not None}
    return {name: x for name, x in options.items() if name in accepted}


def logits_from(model: PreTrainedModel, states: Tensor) -> Tensor:
    """Finish the model's forward pass: last hidden states (n, D) -> logits (n, V)."""
    config = model.config.get_text_config()
    logits = model.get_output_embeddings()(states)
    if isinstance(scale := getattr(config, "logit_scale", None), float):  # Cohere
        logits = logits * scale
    if (scale := getattr(config, "logits_scaling", None)) is not None:  # Granite
        logits = logits / scale
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma
        logits = cap * torch.tanh(logits / cap)
    return logits


def rollout_logprobs(model: nn.Module, rollout: Rollout, config: Any) -> Tensor:
    """Compute the log-probs of a whole rollout without gradient: (B, T). Of config it reads
    temperature, bf16 and micro_batch_tokens.
    """
    options = {"temperature": config.temperature, "bf16": config.bf16, "entropy": False}
    return _over_rollout(lambda x: completion_logprobs(model, x, **options)[0], rollout, config)


def logprobs_and_entropy(model: nn.Module, rollout: Rollout, config: Any) -> tuple[Tensor, Tensor]:
    """Compute rollout_logprobs, and the entropies in the same pass: a pair, each (B, T)."""
    options = {"temperature": config.temperature, "bf16": config.bf16}

    def both(part: Rollout) -> Tensor:
        return torch.stack(completion_logprobs(model, part, **options))

    logprobs, entropies = _over_rollout(both, rollout, config)  # (2, B, T)
    return logprobs, entropies


def rollout_values(value_model: ValueModel, rollout: Rollout, config: Any) -> Tensor:
    """Compute the values of a whole rollout without gradient: (B, T). Of config it reads bf16 and
    micro_batch_tokens.
    """
    options = {"bf16": config.bf16}
    return _over_rollout(lambda x: completion_values(value_model, x, **options), rollout, config)


@torch.no_grad()
def _over_rollout(forward: Callable[[Rollout], Tensor], rollout: Rollout, config: Any) -> Tensor:
    """Put forward(part), (..., b, T), of the micro-batches in the rollout's order: (..., B, T)."""
    parts = micro_batches(rollout, max_tokens=config.micro_batch_tokens)
    found = torch.cat([forward(part) for _, part in parts], dim=-2)
    return found[..., torch.cat([rows for rows, _ in parts]).argsort(), :]


def micro_batches(
    rollout: Rollout,
    rows: Tensor | None = None,
    *,
    max_tokens: int,
) -> list[tuple[Tensor, Rollout]]:
    """Cut `rows` (n,) of a rollout, default all, into parts of at most max_tokens tokens, padding
    included: pairs of the rows (b,), on the CPU, and the rollout of these rows. A single row may be
    longer. Tokens are counted as completion_states reads them: on a CPU a prompt that several rows
    of a part share counts once, on CUDA it counts for each row. (Gradient checkpointing reads it
    for each row on a CPU too, but keeps far less of it.)

    The longest completions come first: a part is as wide as its longest row, and padding costs as
    much as text. The gradient is a sum over rows, so their order doesn't matter.
    """
    lengths = rollout.lengths.cpu()  # (B,)
    rows = torch.arange(len(lengths)) if rows is None else rows
    rows = rows[lengths[rows].argsort(descending=True, stable=True)]
    P = rollout.tokens.shape[1] - rollout.completion_mask.shape[1]
    prompts = range(len(lengths))  # on CUDA each its own
    if not rollout.tokens.is_cuda:
        prompts = [tuple(row) for row in rollout.tokens[:, :P].tolist()]
    parts, distinct, longest = [[]], set(), 0
    for row in rows.tolist():
        num_tokens = len(distinct | {prompts[row]}) * P + (len(parts[-1]) + 1) * longest
        if parts[-1] and num_tokens > max_tokens:
            parts.append([])
        if not parts[-1]:
            distinct, longest = set(), int(lengths[row])
        parts[-1].append(row)
        distinct.add(prompts[row])
    return [(part, rollout[part.to(rollout.tokens.device)]) for part in map(torch.tensor, parts)]


class ValueModel(nn.Module):
    """Predicts returns: a transformer backbone with a scalar head that starts at 0, so V = 0."""

    def __init__(self, backbone: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @classmethod
    def on_backbone_of(cls, model: PreTrainedModel) -> ValueModel:
        """Make a value model on a copy of the backbone of `model`. Where this has an adapter, the
        copy trains an adapter as well, over the same frozen weights.
        """
        backbone = copy_what_trains(unwrap(model).base_model)
        config = model.config.get_text_config()
        # OPT projects its output to another width.
        width = getattr(config, "word_embed_proj_dim", config.hidden_size)
        found = cls(backbone, width)
        found.head.to(model.device, torch.promote_types(model.dtype, torch.float32))
        return found

    def values(self, hidden: Tensor) -> Tensor:
        """Turn last hidden states into values: (..., D) -> (...)."""
        # In bfloat16 a value would have three digits, and advantages are differences of values.
        with torch.autocast(hidden.device.type, enabled=False):
            return self.head(hidden.to(self.head.weight.dtype)).squeeze(-1)
