"""Log-probs and values of completions, by the forward pass that trains.

Both functions compute what a plain forward pass over all tokens would, and do less work for it:
each distinct prompt goes through the model once, columns that are padding in every row are skipped,
and logits are made for a part of the completion tokens at a time.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel

from common import Rollout, ValueModel, at_least_float32, base_model, token_entropy, token_logprobs

CHUNK = 2**23  # logits at a time: 32 MB in float32, on CUDA 16 times as much


def completion_logprobs(
    model: nn.Module,
    rollout: Rollout,
    temperature: float,
    *,
    max_rows: int | None = None,
    max_tokens: int | None = None,
    bf16: bool = False,
) -> tuple[Tensor, Tensor]:
    """token_logprobs and token_entropy of model(tokens).logits[:, P-1:-1] / temperature: (B, T).

    The pair (log-probs with gradient, entropies without), 0 off the mask. The logits are divided by
    the temperature because the tokens were drawn from that distribution. `max_rows` and
    `max_tokens` limit a forward pass, see micro_batches; bf16 runs it under autocast.
    """
    every_row = torch.arange(len(rollout.tokens), device=rollout.tokens.device)
    batches = micro_batches(rollout, every_row, max_rows=max_rows, max_tokens=max_tokens)
    found = []
    with torch.autocast(rollout.tokens.device.type, torch.bfloat16, enabled=bf16):
        for rows in batches:
            part = rollout[rows]
            mask = part.completion_mask.bool()  # (rows, T)
            hidden = completion_states(base_model(model).base_model, part)  # (rows, t, D)
            # Without padding: n tokens, each with the state from which it is predicted.
            hidden = hidden[mask[:, : hidden.shape[1]]]  # (n, D)
            tokens = part.tokens[:, -mask.shape[1] :][mask]  # (n,)
            scores = _score_in_chunks(base_model(model), hidden, tokens, temperature)  # (2, n)
            padded = scores.new_zeros(2, *mask.shape)
            padded[:, mask] = scores
            found.append(padded)
    logprobs, entropies = torch.cat(found, dim=1)[:, torch.cat(batches).argsort()]
    return logprobs, entropies


def completion_values(
    value_model: ValueModel,
    rollout: Rollout,
    *,
    max_rows: int | None = None,
    max_tokens: int | None = None,
    bf16: bool = False,
) -> Tensor:
    """V_t, the value of the state before token t is chosen: (B, T), 0 off the mask, with gradient.

    It stands where the logits of token t stand. One position to the right V would know the action.
    """
    length = rollout.completion_mask.shape[1]
    every_row = torch.arange(len(rollout.tokens), device=rollout.tokens.device)
    batches = micro_batches(rollout, every_row, max_rows=max_rows, max_tokens=max_tokens)
    values = []
    with torch.autocast(rollout.tokens.device.type, torch.bfloat16, enabled=bf16):
        for rows in batches:
            value = value_model.values(completion_states(value_model.backbone, rollout[rows]))
            values.append(nn.functional.pad(value, (0, length - value.shape[1])))
    in_order = torch.cat(values)[torch.cat(batches).argsort()]
    return in_order.masked_fill(~rollout.completion_mask.bool(), 0)


def micro_batches(
    rollout: Rollout, rows: Tensor, *, max_rows: int | None = None, max_tokens: int | None = None
) -> list[Tensor]:
    """Cut `rows` (n,) of a rollout into parts of at most max_rows rows and max_tokens tokens.

    Padding is counted, and each prompt once; a row alone may be longer. The longest completions
    come first: a micro-batch is as wide as its longest row, and padding costs as much as text. The
    gradient is a sum over rows, so their order doesn't matter. That gradient checkpointing computes
    a prompt for each of its rows isn't counted: it keeps far less of a token.
    """
    _, which, prompt_lengths = _distinct_prompts(rollout[rows])
    lengths = rollout.completion_mask[rows].sum(1)
    order = lengths.argsort(descending=True, stable=True)
    plan = torch.stack([rows, which, prompt_lengths, lengths])[:, order].T.tolist()
    # Fill one micro-batch after the other; `widest` is the width of its prompts and completions.
    batches, prompts, widest = [[]], set(), (0, 0)
    for row, prompt, *widths in plan:
        wider = tuple(map(max, widest, widths))
        tokens = len(prompts | {prompt}) * wider[0] + (len(batches[-1]) + 1) * wider[1]
        too_many = max_tokens is not None and tokens > max_tokens
        if batches[-1] and (too_many or len(batches[-1]) == max_rows):
            batches.append([])
            prompts, wider = set(), tuple(widths)
        batches[-1].append(row)
        prompts.add(prompt)
        widest = wider
    return [torch.tensor(batch, device=rows.device) for batch in batches]


def _distinct_prompts(rollout: Rollout) -> tuple[Tensor, Tensor, Tensor]:
    """(A row of each distinct prompt (R,), which of them each row has (B,), its length (B,))."""
    length = rollout.tokens.shape[1] - rollout.completion_mask.shape[1]
    mask = rollout.attention_mask[:, :length]
    prompts = torch.where(mask.bool(), rollout.tokens[:, :length], -1)
    distinct, which = prompts.unique(dim=0, return_inverse=True)
    order = torch.arange(len(which), device=which.device)
    first = order.new_full((len(distinct),), len(which)).scatter_reduce(0, which, order, "amin")
    return first, which, mask.sum(1)


def model_inputs(
    model: nn.Module, tokens: Tensor, attention_mask: Tensor, **options: object
) -> dict[str, object]:
    """Arguments for a forward pass over tokens (B, L): position ids, and those of `options` that
    the model's forward takes.

    Without position ids GPT-2 puts the tokens of a left-padded row at shifted positions: 34 nats
    off in huggingface/trl#6800. attention_mask (B, C+L) also covers the C tokens in a KV cache.
    """
    accepted = inspect.signature(base_model(model).forward).parameters
    position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
    options = options | {"position_ids": position_ids, "attention_mask": attention_mask.long()}
    return {"input_ids": tokens} | {k: v for k, v in options.items() if k in accepted}


def completion_states(backbone: nn.Module, rollout: Rollout) -> Tensor:
    """Last hidden states (B, t, D), with gradient, from which the first t completion tokens are
    predicted: each is one position to the left of its token. t is the longest completion.
    """
    longest = int(rollout.completion_mask.bool().any(0).sum())
    length = rollout.tokens.shape[1] - rollout.completion_mask.shape[1]
    first, which, prompt_lengths = _distinct_prompts(rollout)
    # Skip columns that are padding in every row, and the last token of the longest completion: the
    # state at position i predicts token i + 1, so no prediction needs the state there.
    padding = length - int(prompt_lengths.max())
    columns = slice(padding, length + longest - 1)
    tokens, mask = rollout.tokens[:, columns], rollout.attention_mask[:, columns]
    length -= padding

    def states(tokens: Tensor, mask: Tensor, **options: object) -> Tensor:
        return backbone(**model_inputs(backbone, tokens, mask, **options)).last_hidden_state

    # One forward pass over whole rows, where no prompt is shared or no cache can be used.
    modules = backbone.modules() if backbone.training else ()
    checkpointed = any(getattr(module, "gradient_checkpointing", False) for module in modules)
    if len(first) == len(which) or checkpointed:
        return states(tokens, mask, use_cache=False)[:, -longest:]

    # Else one over the distinct prompts; their keys and values are repeated for the completions.
    cache = DynamicCache(config=backbone.config)
    options = {"past_key_values": cache, "use_cache": True}
    of_prompts = states(tokens[first, :length], mask[first, :length], **options)[:, -1:]
    of_rows = _repeat_rows(of_prompts, which)
    if longest == 1:
        return of_rows
    _repeat_cache_rows(cache, which)
    return torch.cat([of_rows, states(tokens[:, length:], mask, **options)], dim=1)


# The gradients of a prompt's rows are added up. That happens in the same order every time by
# index_select alone on a CPU, by indexing alone on CUDA; otherwise no run could be repeated.


def _repeat_rows(x: Tensor, which: Tensor) -> Tensor:
    return x[which] if which.device.type == "cuda" else x.index_select(0, which)


def _repeat_cache_rows(cache: DynamicCache, which: Tensor) -> None:
    if which.device.type == "cuda":
        cache.batch_select_indices(which)  # indexes
    else:
        cache.reorder_cache(which)  # calls index_select


def _score_in_chunks(
    model: PreTrainedModel, hidden: Tensor, tokens: Tensor, temperature: float
) -> Tensor:
    """Log-probs and entropies (2, n) of tokens (n,) from last hidden states (n, D).

    The logits (n, V) would be the largest tensor of all. So they are made for a chunk of tokens at
    a time, and made again in the backward pass instead of being kept for it.
    """
    on_cuda = hidden.device.type == "cuda"
    vocab_size = model.get_output_embeddings().weight.shape[0]
    size = max(1, (CHUNK * 16 if on_cuda else CHUNK) // vocab_size)  # tokens
    chunks = []
    for some_hidden, some_tokens in zip(hidden.split(size), tokens.split(size), strict=True):
        scored = (model, some_hidden, some_tokens, temperature)
        if torch.is_grad_enabled() and len(tokens) > size:
            options = {"use_reentrant": False, "preserve_rng_state": False}
            chunks.append(checkpoint(_score_tokens, *scored, **options))
        else:
            chunks.append(_score_tokens(*scored))
    return torch.cat(chunks, dim=1)


def _score_tokens(
    model: PreTrainedModel, hidden: Tensor, tokens: Tensor, temperature: float
) -> Tensor:
    """Log-probs and entropies (2, n), the entropies without gradient."""
    logits = at_least_float32(logits_from(model, hidden))  # (n, V)
    logits = logits if temperature == 1 else logits / temperature
    return torch.stack([token_logprobs(logits, tokens), token_entropy(logits.detach())])


def logits_from(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """The end of the model's forward pass: last hidden states (n, D) -> logits (n, V)."""
    config = model.config.get_text_config()
    logits = model.get_output_embeddings()(hidden)
    if isinstance(scale := getattr(config, "logit_scale", None), float):  # Cohere
        logits = logits * scale
    if (scale := getattr(config, "logits_scaling", None)) is not None:  # Granite
        logits = logits / scale
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma
        logits = cap * torch.tanh(logits / cap)
    return logits
