"""Log-probs and values of completions, by the forward pass that trains.

Both functions compute what a plain forward pass over all tokens would, and do less work for it:
a prompt of several completions goes through the model once, columns that are padding in every row
are skipped, and logits are made for a part of the completion tokens at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel

from common import Rollout, ValueModel, at_least_float32, base_model, entropy_of, token_logprobs
from plumbing.models import logits_from, mask_is_known, model_inputs

CHUNK = 2**23  # logits at a time, at least: 32 MB in float32
# On a GPU a pass without gradient reads four times the tokens of one with gradient: it keeps
# nothing for a backward pass, and more tokens at a time are faster there.
WITHOUT_GRADIENT = 4


def completion_logprobs(
    model: nn.Module,
    rollout: Rollout,
    temperature: float,
    *,
    bf16: bool = False,
    entropy: bool = True,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """token_logprobs and token_entropy of model(tokens).logits[:, P-1:-1] / temperature: (B, T).

    The pair (log-probs with gradient, entropies without unless `entropy_grad`), 0 off the mask.
    Without `entropy` the second is None: it costs more than the log-probs. The logits are divided
    by the temperature because the tokens were drawn from that distribution. bf16: under autocast.
    """
    with torch.autocast(rollout.tokens.device.type, torch.bfloat16, enabled=bf16):
        mask = on_cpu(rollout).completion_mask.bool()  # (B, T)
        hidden = completion_states(base_model(model).base_model, rollout)  # (B, t, D)
        # Without padding: n tokens, each with the state from which it is predicted. Where they
        # are is found on the CPU: hidden[mask] would wait until the device knows their number.
        row, column = (to(hidden.device, x) for x in mask.nonzero(as_tuple=True))
        tokens = rollout.tokens[:, -mask.shape[1] :][row, column]  # (n,)
        hidden = hidden[row, column]  # (n, D)
        options = {"temperature": temperature, "entropy": entropy, "entropy_grad": entropy_grad}
        scores = _score_in_chunks(base_model(model), hidden, tokens, **options)
        padded = scores.new_zeros(len(scores), *mask.shape)
        padded[:, row, column] = scores  # (2, n) -> (2, B, T)
    return padded[0], padded[1] if entropy else None


def completion_values(value_model: ValueModel, rollout: Rollout, *, bf16: bool = False) -> Tensor:
    """V_t, the value of the state before token t is chosen: (B, T), 0 off the mask, with gradient.

    It stands where the logits of token t stand. One position to the right V would know the action.
    """
    length = rollout.completion_mask.shape[1]
    with torch.autocast(rollout.tokens.device.type, torch.bfloat16, enabled=bf16):
        values = value_model.values(completion_states(value_model.backbone, rollout))
    values = nn.functional.pad(values, (0, length - values.shape[1]))
    return values.masked_fill(~rollout.completion_mask.bool(), 0)


def rollout_logprobs(model: nn.Module, rollout: Rollout, config: Any) -> Tensor:
    """completion_logprobs of a whole rollout without gradient: (B, T)."""
    options = {"temperature": config.temperature, "bf16": config.bf16, "entropy": False}
    return _over_rollout(
        lambda part: completion_logprobs(model, part, **options)[0], rollout, config
    )


def rollout_values(value_model: ValueModel, rollout: Rollout, config: Any) -> Tensor:
    """completion_values of a whole rollout without gradient: (B, T)."""
    return _over_rollout(
        lambda part: completion_values(value_model, part, bf16=config.bf16), rollout, config
    )


@torch.no_grad()
def _over_rollout(forward: Callable[[Rollout], Tensor], rollout: Rollout, config: Any) -> Tensor:
    """forward(part) -> (b, T) over a whole rollout, cut by the two limits of the flags: (B, T)."""
    max_tokens = config.micro_batch_tokens
    if max_tokens is not None and rollout.tokens.device.type == "cuda":
        max_tokens *= WITHOUT_GRADIENT
    parts = micro_batches(rollout, max_rows=config.rollout_batch_size, max_tokens=max_tokens)
    found = torch.cat([forward(part) for _, part in parts])
    return found[torch.cat([rows for rows, _ in parts]).argsort()]  # in the rollout's order


def on_cpu(rollout: Rollout) -> Rollout:
    """The same on the CPU, where texts are made and micro-batches are planned."""
    # One transfer, once: each one waits until the device has done all its work. In float32, which
    # is exact for token ids below 2^24.
    tensors = [getattr(rollout, field.name) for field in dataclasses.fields(rollout)]
    if tensors[0].device.type == "cpu":
        return rollout
    if not hasattr(rollout, "copy_on_cpu"):
        columns = [x.reshape(len(x), -1).float() for x in tensors]
        parts = torch.cat(columns, dim=1).cpu().split([c.shape[1] for c in columns], dim=1)
        parts = (p.reshape(x.shape).to(x.dtype) for p, x in zip(parts, tensors, strict=True))
        rollout.copy_on_cpu = Rollout(*parts)
    return rollout.copy_on_cpu


def to(device: torch.device, x: Tensor) -> Tensor:
    """A copy of x on the device, on CUDA without waiting until the device has done its work."""
    if device.type != "cuda" or x.device.type == "cuda":
        # On MPS a copy that doesn't wait may read x after it was freed: pytorch/pytorch#189690.
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)  # from memory that isn't pinned it may wait


def micro_batches(
    rollout: Rollout,
    rows: Tensor | None = None,
    wanted: Tensor | None = None,
    *,
    max_rows: int | None = None,
    max_tokens: int | None = None,
) -> list[tuple[Tensor, Rollout]]:
    """Cut `rows` (n,) of a rollout, default all, into parts of at most max_rows rows and max_tokens
    tokens: pairs of the rows (b,), on the rollout's device, and the rollout of these rows.

    Padding is counted, and a prompt as often as it is computed; a row alone may be longer. The
    longest completions come first: a micro-batch is as wide as its longest row, and padding costs
    as much as text. The gradient is a sum over rows, so their order doesn't matter. That gradient
    checkpointing computes a prompt for each of its rows isn't counted: it keeps far less of each.

    Rows where `wanted` (B,) is 0 are left out, but for one if there is no other: the optimiser
    needs a gradient to make its step, and that of such a row is 0.
    """
    rows = torch.arange(len(rollout.tokens)) if rows is None else rows.cpu()
    if wanted is not None:
        wanted = wanted.cpu().bool()[rows]
        rows = rows[wanted] if wanted.any() else rows[:1]
    chosen = on_cpu(rollout)[rows]
    _, which, prompt_lengths = _distinct_prompts(chosen)
    lengths = chosen.completion_mask.sum(1)
    order = lengths.argsort(descending=True, stable=True)
    plan = torch.stack([rows, which, prompt_lengths, lengths])[:, order].T.tolist()
    on_cuda = rollout.tokens.device.type == "cuda"
    # Fill one micro-batch after the other; `widest` is the width of its prompts and completions.
    batches, prompts, widest = [[]], set(), (0, 0)
    for row, prompt, *widths in plan:
        wider = tuple(map(max, widest, widths))
        num_rows, num_prompts = len(batches[-1]) + 1, len(prompts | {prompt})
        if not worth_sharing(num_rows, num_prompts, *wider, on_cuda):
            num_prompts = num_rows
        tokens = num_prompts * wider[0] + num_rows * wider[1]
        # A part that is a quarter full is not filled up with much shorter completions: padding.
        much_shorter = 3 * widths[1] < 2 * widest[1] and 3 * sum(widths) < 2 * sum(widest)
        too_many = max_tokens is not None and (
            tokens > max_tokens or (much_shorter and 4 * tokens > max_tokens)
        )
        if batches[-1] and (too_many or len(batches[-1]) == max_rows):
            batches.append([])
            prompts, wider = set(), tuple(widths)
        batches[-1].append(row)
        prompts.add(prompt)
        widest = wider
    return [_part(rollout, torch.tensor(batch)) for batch in batches]


def worth_sharing(rows: int, prompts: int, prompt_width: int, width: int, on_cuda: bool) -> bool:
    """Whether each distinct prompt is computed once, before the completions of `width` tokens. That
    makes two forward passes of one: on a CPU it always pays. A GPU has to launch twice as many
    kernels, so there it has to save a third of the tokens.
    """
    shared, whole = prompts * prompt_width + rows * width, rows * (prompt_width + width)
    return prompts < rows and (not on_cuda or 3 * shared <= 2 * whole)


def _part(rollout: Rollout, rows: Tensor) -> tuple[Tensor, Rollout]:
    """(The rows, on the CPU, moved to the rollout's device; the rollout of these rows)."""
    there = to(rollout.tokens.device, rows)
    part = rollout[there]
    part.copy_on_cpu = on_cpu(rollout)[rows]  # or it would be transferred again
    return there, part


def _distinct_prompts(rollout: Rollout) -> tuple[Tensor, Tensor, Tensor]:
    """(A row of each distinct prompt (R,), which of them each row has (B,), its length (B,)) of a
    rollout on the CPU.
    """
    length = rollout.tokens.shape[1] - rollout.completion_mask.shape[1]
    mask = rollout.attention_mask[:, :length]
    prompts = torch.where(mask.bool(), rollout.tokens[:, :length], -1)
    distinct, which = prompts.unique(dim=0, return_inverse=True)
    order = torch.arange(len(which))
    first = order.new_full((len(distinct),), len(which)).scatter_reduce(0, which, order, "amin")
    return first, which, mask.sum(1)


def completion_states(backbone: nn.Module, rollout: Rollout) -> Tensor:
    """Last hidden states (B, t, D), with gradient, from which the first t completion tokens are
    predicted: each is one position to the left of its token. t is the longest completion.
    """
    here = on_cpu(rollout)
    longest = int(here.completion_mask.bool().any(0).sum())
    length = rollout.tokens.shape[1] - rollout.completion_mask.shape[1]
    first, which, prompt_lengths = _distinct_prompts(here)
    # Skip columns that are padding in every row, and the last token of the longest completion: the
    # state at position i predicts token i + 1, so no prediction needs the state there.
    padding = length - int(prompt_lengths.max())
    columns = slice(padding, length + longest - 1)
    tokens, mask = rollout.tokens[:, columns], rollout.attention_mask[:, columns]
    no_padding = bool(here.attention_mask[:, columns].all())
    length -= padding

    def states(tokens: Tensor, mask: Tensor, **options: object) -> Tensor:
        with mask_is_known(no_padding):
            return backbone(**model_inputs(backbone, tokens, mask, **options)).last_hidden_state

    # One forward pass over whole rows, where that is faster or no cache can be used.
    modules = backbone.modules() if backbone.training else ()
    checkpointed = any(getattr(module, "gradient_checkpointing", False) for module in modules)
    on_cuda = tokens.device.type == "cuda"
    if checkpointed or not worth_sharing(len(which), len(first), length, longest, on_cuda):
        return states(tokens, mask, use_cache=False)[:, -longest:]

    # Else one over the distinct prompts; their keys and values are repeated for the completions.
    first, which = to(tokens.device, first), to(tokens.device, which)
    cache = DynamicCache(config=backbone.config)
    options = {"cache": cache, "use_cache": True}
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
    model: PreTrainedModel, hidden: Tensor, tokens: Tensor, **options: object
) -> Tensor:
    """Log-probs and entropies (2, n), see _score_tokens, of tokens (n,) from states (n, D).

    The logits (n, V) would be the largest tensor of all. So they are made for a chunk of tokens at
    a time, and made again in the backward pass instead of being kept for it.
    """
    vocab_size = model.get_output_embeddings().weight.shape[0]
    size = max(1, chunk_size(device_memory(hidden.device)) // vocab_size)  # tokens
    logits_of, chunks = _logits_of(model, hidden.device.type), []
    for some_hidden, some_tokens in zip(hidden.split(size), tokens.split(size), strict=True):
        score = partial(_score_tokens, logits_of, some_hidden, some_tokens, **options)
        if torch.is_grad_enabled() and len(tokens) > size:
            chunks.append(checkpoint(score, use_reentrant=False, preserve_rng_state=False))
        else:
            chunks.append(score())
    return torch.cat(chunks, dim=1)


def chunk_size(memory: int | None) -> int:
    """Logits at a time, on a GPU with so many bytes of memory or, without, on a CPU: at 24 bytes
    each, with what is computed from them, they take a twentieth of a GPU's memory at most.
    """
    if memory is None:
        return CHUNK
    largest = memory // (20 * 24)
    return min(16 * CHUNK, max(CHUNK, 2 ** (largest.bit_length() - 1)))


@functools.cache
def device_memory(device: torch.device) -> int | None:
    """Bytes of memory of a GPU; None for a CPU, which shares its own."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None


def _logits_of(model: PreTrainedModel, device: str) -> Callable[[Tensor], Tensor]:
    """The function from last hidden states (n, D) to logits (n, V), under autocast too in float32:
    rounded to bfloat16 they put log-probs .001 to .002 nats off on average, and .1 or more where
    logits are large.
    """
    head = model.get_output_embeddings()
    by_onednn = torch.is_autocast_enabled(device) and not torch.cpu._is_amx_tile_supported()

    def exact(hidden: Tensor) -> Tensor:
        kernels = _onednn() if by_onednn else contextlib.nullcontext()
        with torch.autocast(device, enabled=False), kernels:
            return logits_from(model, hidden.to(head.weight.dtype))

    if device != "cuda":
        return exact
    # There a product of float32 takes many times as long: so its factors are rounded, but not what
    # comes out. PyTorch can do that from 2.8 on.
    has_out_dtype = "dtype" in torch.ops.aten.mm.overloads()
    if torch.is_autocast_enabled(device) and type(head) is nn.Linear and has_out_dtype:
        weight = head.weight.bfloat16()  # once for all chunks
        product = partial(linear_in_float32, weight=weight, bias=head.bias)
        return partial(logits_from, model, head=product)
    return partial(logits_from, model)


@contextlib.contextmanager
def _onednn() -> Iterator[None]:
    """Multiply float32 matrices by oneDNN on a CPU. "medium" would let it round the factors to
    bfloat16, but only a CPU with AMX does. On an AMD one MKL, the default, takes up to twice as
    long.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def linear_in_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer, weight (out, in) in bfloat16, from x (n, in) to (n, out) in float32."""
    out = _ProductInFloat32.apply(x.bfloat16(), weight)
    return out if bias is None else out + bias


class _ProductInFloat32(torch.autograd.Function):
    """x @ weight.T, x (n, in) and weight (out, in) in bfloat16, in float32: PyTorch has no
    derivative for it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _mm_to_float32(x, weight.T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grad.bfloat16()  # as under autocast
        return grad @ weight, grad.T @ x if ctx.needs_input_grad[1] else None


def _mm_to_float32(a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast(a.device.type, enabled=False):
        return torch.mm(a, b, out_dtype=torch.float32)


def _score_tokens(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    tokens: Tensor,
    temperature: float,
    entropy: bool,
    entropy_grad: bool,
) -> Tensor:
    """Log-probs and, with `entropy`, entropies of tokens (n,): (2, n) or (1, n)."""
    logits = at_least_float32(logits_of(hidden))  # (n, V)
    logits = logits if temperature == 1 else logits / temperature
    if not entropy:
        return token_logprobs(logits, tokens).unsqueeze(0)
    logprobs = logits.log_softmax(-1)  # (n, V), once for both
    chosen = logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    # Last, because checkpoint computes anew only up to what the backward pass needs.
    return torch.stack([chosen, entropy_of(logprobs if entropy_grad else logprobs.detach())])
