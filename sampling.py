"""Rollouts: the decode loop and its KV cache.

Our own loop over the model's forward, because `model.generate` takes top_k, repetition_penalty
and more from the checkpoint's generation_config, and then samples from something other than
softmax(logits / temperature). The KL would be off, even negative, and the gradient that of other
samples. It is also twice as fast. The ideas, in the order in which they appear:

- all random numbers are drawn beforehand, one per token: a row's tokens depend on nothing else;
- where asked for, weights are rounded to bfloat16 once per call, not at every token;
- a prompt is read once, whatever the number of its completions;
- keys and values are written into memory of the final size, nothing is concatenated;
- rows that have finished leave the batch, a share of it at a time;
- a GPU is waited for every eighth token, and a token is one CUDA graph, not a thousand kernels.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.pytorch_utils import Conv1D

from common import InputError, base_model, evaluating, first_line, model_inputs
from plumbing.loading import context_length, fast_at_bfloat16


@dataclass
class Rollout:
    """B sampled completions: P prompt positions, padded on the left, then T of the completion."""

    tokens: Tensor  # (B, P+T) prompt and completion; pad_token_id after the first EOS
    attention_mask: Tensor  # (B, P+T) bool: False at padding on either side
    completion_mask: Tensor  # (B, T) bool: True up to and including the first EOS
    logprobs: Tensor  # (B, T) of the distribution that each token was drawn from; 0 off the mask
    finished: Tensor  # (B,) bool: ended with EOS, not at the length limit

    def __getitem__(self, rows: Tensor | slice) -> Rollout:
        """The given rows of every field."""
        return Rollout(*(getattr(self, field.name)[rows] for field in dataclasses.fields(self)))


def concatenate(rollouts: list[Rollout]) -> Rollout:
    """One rollout from several of the same P and T."""
    columns = zip(
        *([getattr(r, field.name) for field in dataclasses.fields(Rollout)] for r in rollouts),
        strict=True,
    )
    return Rollout(*(torch.cat(column) for column in columns))


def completion_mask(completions: Tensor, eos_token_ids: list[int]) -> Tensor:
    """(B, T) tokens -> (B, T) bool: True up to and including the first EOS, whichever of the EOS
    ids it is.

    With EOS = 9: [5, 9, 7] -> [1, 1, 0] and [5, 6, 7] -> [1, 1, 1]. EOS is an action and has to
    get its gradient.
    """
    is_eos = torch.isin(
        completions, torch.tensor(eos_token_ids, device=completions.device, dtype=completions.dtype)
    )
    eos_before = (
        is_eos.long().cumsum(1) - is_eos.long()
    )  # number of EOS strictly before each position
    return eos_before == 0


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    *,
    num_generations: int = 1,
    max_new_tokens: int,
    temperature: float = 1.0,
    eos_token_ids: list[int],
    pad_token_id: int,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    bf16: bool = False,
    static: bool | None = None,
) -> Rollout:
    """Sample `num_generations` completions of each prompt from softmax(logits / temperature).

    prompt_ids and prompt_mask (N, P), padded on the left -> Rollout of B = N * num_generations
    rows, the completions of one prompt in consecutive rows. bf16 decodes with a copy of the
    weights in bfloat16. static reads every token with tensors of one shape, what a CUDA graph
    needs; default: on CUDA. top_k and top_p are off; they are there for greedy evaluation, and to
    show how they bias the KL.
    """
    device = prompt_ids.device
    static = can_be_static(model) and device.type == "cuda" if static is None else static
    prompt_ids = prompt_ids.repeat_interleave(num_generations, dim=0)  # (B, P)
    prompt_mask = prompt_mask.bool().repeat_interleave(num_generations, dim=0)
    num_rows, prompt_length = prompt_ids.shape
    limit = context_length(model)
    if limit is not None and prompt_length + max_new_tokens > limit:
        lengths = f"{prompt_length} prompt tokens and {max_new_tokens} new ones"
        raise InputError(f"{lengths} don't fit into the model's context of {limit}")
    # All the randomness of the rollout: one uniform number per token, so that a row's tokens
    # depend neither on which other rows have finished nor on the size of the vocabulary.
    uniforms = torch.rand(max_new_tokens, num_rows, generator=generator, device=device)
    tokens = torch.full((num_rows, max_new_tokens), pad_token_id, device=device)
    logprobs = torch.zeros(num_rows, max_new_tokens, device=device)
    eos = torch.tensor(eos_token_ids, device=device, dtype=torch.long)

    # A compiled forward would be compiled again at every length.
    with evaluating(model), torch.compiler.set_stance("force_eager"):
        decoder = bfloat16_copy(model) if bf16 else model

        # 1. Prefill: read each distinct prompt once, and repeat its cache for its completions.
        prompts, which = torch.cat([prompt_ids, prompt_mask], 1).unique(dim=0, return_inverse=True)
        cache = preallocated_cache(decoder, prompt_length + max_new_tokens)
        logits = _next_logits(decoder, *prompts.split(prompt_length, dim=1), cache)[which]  # (B, V)
        cache.batch_select_indices(which)

        # 2. Decode: draw a token for every running row, read it, and so on.
        static = static and all(isinstance(layer, PreallocatedLayer) for layer in cache.layers)
        step = StaticStep(decoder, cache, num_rows) if static else None
        rows = torch.arange(num_rows, device=device)  # the rows in the cache
        running = torch.ones_like(rows, dtype=torch.bool)
        mask = torch.cat([prompt_mask, torch.zeros_like(tokens, dtype=torch.bool)], dim=1)
        for t in range(max_new_tokens):
            drawn, drawn_logprobs = draw(logits, uniforms[t, rows], temperature, top_k, top_p)
            tokens[rows, t], logprobs[rows, t] = drawn, drawn_logprobs
            running &= ~torch.isin(drawn, eos)
            if t + 1 == max_new_tokens:
                break
            # Finished rows go on drawing tokens, which the mask below takes out, until enough of
            # them leave together: counting waits for the device, and each drop copies the cache.
            if device.type == "cpu" or t % 8 == 7:
                num_running = int(running.sum())
                if num_running == 0:
                    break
                # Each number of rows is another CUDA graph, so there they are halved.
                size = len(rows) // 2 if static else num_running
                if num_running <= min(size, 7 / 8 * len(rows)):
                    kept = running.long().argsort(descending=True, stable=True)[:size]
                    cache.batch_select_indices(kept)
                    rows, drawn, mask, running = rows[kept], drawn[kept], mask[kept], running[kept]
            mask[:, prompt_length + t] = True
            if step is not None:
                logits = step(drawn, mask, prompt_length + t)
            else:
                seen = mask[:, : prompt_length + t + 1]
                logits = _next_logits(decoder, drawn.unsqueeze(1), seen, cache)

    drawn_mask = completion_mask(tokens, eos_token_ids)
    return Rollout(
        tokens=torch.cat([prompt_ids, tokens.masked_fill(~drawn_mask, pad_token_id)], dim=1),
        attention_mask=torch.cat([prompt_mask, drawn_mask], dim=1),
        completion_mask=drawn_mask,
        logprobs=logprobs.masked_fill(~drawn_mask, 0),
        finished=(torch.isin(tokens, eos) & drawn_mask).any(dim=1),
    )


def draw(
    logits: Tensor, uniform: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Draw one token per row from softmax(logits / temperature): (tokens, log-probs), each (B,).

    logits (B, V), uniform (B,) in [0, 1). By inversion: the token is the first whose cumulative
    probability exceeds the uniform number, so one random number per row is enough. The log-probs
    are those of the distribution after top_k and top_p.
    """
    logits = logits.float() / temperature
    if top_k > 0:
        smallest_kept = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
    if top_p < 1:
        sorted_logits, order = logits.sort(descending=True)
        sorted_probs = sorted_logits.softmax(-1)
        above = sorted_probs.cumsum(-1) - sorted_probs  # probability of all the likelier tokens
        dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, above >= top_p)
        logits = logits.masked_fill(dropped, -torch.inf)
    largest = logits.amax(-1, keepdim=True)
    weights = (logits - largest).exp_()  # (B, V), probabilities but for their sum
    # The cumulative sum of a whole row is slow. So first find the block of 128 tokens that holds
    # the drawn one, then the token in it.
    blocks = nn.functional.pad(weights, (0, -weights.shape[1] % 128)).unflatten(1, (-1, 128))
    sums = blocks.sum(-1)
    total = sums.sum(-1)
    block, rest = _first_above(sums, uniform * total)
    token, _ = _first_above(blocks[torch.arange(len(blocks), device=logits.device), block], rest)
    drawn = block * 128 + token
    logprobs = logits.gather(1, drawn.unsqueeze(1)) - largest
    return drawn, logprobs.squeeze(1) - total.log()


def _first_above(weights: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """The first index of weights (B, n) where their cumulative sum exceeds threshold (B,), and what
    the threshold leaves there after the sum of those before it.
    """
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1]
    # Rounding must neither carry the threshold past the end nor on to a weight of 0.
    threshold = torch.minimum(threshold, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, threshold.unsqueeze(1), right=True)
    before = (cumulative - weights).gather(1, index).squeeze(1)
    return index.squeeze(1), (threshold - before).clamp(min=0)


def _next_logits(
    model: nn.Module, tokens: Tensor, mask: Tensor, cache: DynamicCache, **options: Tensor
) -> Tensor:
    """Read tokens (B, L) after the C that the cache holds, mask (B, C+L): next logits (B, V)."""
    options |= {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    return model(**model_inputs(model, tokens, mask, **options)).logits[:, -1]


def bfloat16_copy(model: nn.Module) -> nn.Module:
    """The model with its weights rounded to bfloat16, to decode with. Its buffers stay: rotary
    frequencies rounded to 8 bits would put late tokens in wrong places.
    """
    rounded = {id(p): nn.Parameter(p.bfloat16(), requires_grad=False) for p in model.parameters()}
    copied = copy.deepcopy(model, memo=rounded)
    for module in copied.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.shape[1:] == (base_model(copied).config.get_text_config().hidden_size,):
                setattr(module, name, buffer.bfloat16())  # positions, added to the hidden states
    backbone = base_model(copied).base_model
    if backbone._supports_sdpa:  # for one token at a time the fastest on every device
        backbone.set_attn_implementation("sdpa")
    # DoRA looks at the weights of the layers that it adapts.
    is_dora = any("magnitude" in name for name, _ in copied.named_parameters())
    if backbone.device.type == "cpu" and fast_at_bfloat16(backbone.device) and not is_dora:
        for module in list(copied.modules()):
            for name, child in module.named_children():
                if type(child) is nn.Linear:
                    setattr(module, name, PackedLinear(child.weight, child.bias))
                elif type(child) is Conv1D:  # GPT-2's linear layer: the weight is transposed
                    setattr(module, name, PackedLinear(child.weight.T, child.bias))
    return copied


class PackedLinear(nn.Module):
    """A linear layer for decoding on a CPU. oneDNN rearranges a bfloat16 matrix to multiply by it,
    and for few rows that takes as long as the product; here it is done once.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight (out, in)."""
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out)."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def preallocated_cache(model: nn.Module, capacity: int) -> DynamicCache:
    """A KV cache for `capacity` tokens per row, with layers that are written in place."""
    cache = DynamicCache(config=base_model(model).config)
    for index, layer in enumerate(cache.layers):
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            cache.layers[index] = PreallocatedLayer(capacity)
    return cache


def can_be_static(model: nn.Module) -> bool:
    """Whether a token can be read with tensors of one shape. Not where the model looks at its
    tensors' values on the way, or cuts its mask to the length of the cache (GPT-Neo).
    """
    return base_model(model).config.model_type not in ("gpt_neo", "falcon", "mpt", "xglm")


class PreallocatedLayer(DynamicLayer):
    """Keys and values of one layer, each (rows, heads, capacity, head size), written in place.

    Concatenating, as the parent does, copies everything at every token. In turn it holds the
    prompts as they come, then the buffers up to the last token, and after `make_static` all of the
    buffers. A sliding window keeps all its tokens; the mask hides the old ones.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.buffers = capacity, None
        self.column: Tensor | None = None  # (1,) where the next token goes, in a static cache

    def update(self, keys: Tensor, values: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Add keys and values (rows, heads, L, head size); returns all there are."""
        if self.buffers is None:  # the prompts
            return super().update(keys, values)
        if self.column is not None:
            self.keys.index_copy_(2, self.column, keys)
            self.values.index_copy_(2, self.column, values)
        else:
            start, length = self.keys.shape[2], self.keys.shape[2] + keys.shape[2]
            self._view(len(keys), length)
            self.keys[:, :, start:], self.values[:, :, start:] = keys, values
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows; a row may come several times at the first call, which allocates."""
        old, length = (self.keys, self.values), self.keys.shape[2]
        if self.buffers is None:
            shapes = [(len(indices), x.shape[1], self.capacity, x.shape[3]) for x in old]
            # Not empty: what is masked gets weight 0 in the attention, and 0 times NaN is NaN.
            self.buffers = [x.new_zeros(shape) for x, shape in zip(old, shapes)]
        self._view(len(indices), length)
        for new, states in zip((self.keys, self.values), old):
            new.copy_(states[indices])

    def _view(self, num_rows: int, length: int) -> None:
        self.keys, self.values = (buffer[:num_rows, :, :length] for buffer in self.buffers)

    def make_static(self, column: Tensor) -> None:
        """From now on write where `column` says and return all columns, filled or not."""
        self._view(len(self.keys), self.capacity)
        self.column, self.is_compileable = column, True

    def get_seq_length(self) -> int | Tensor:
        return super().get_seq_length() if self.column is None else self.column

    def get_max_cache_shape(self) -> int:  # transformers 5.0 sizes the masks of some models by it
        return -1 if self.column is None else self.capacity

    def get_mask_sizes(self, *args) -> tuple[int, int]:
        return super().get_mask_sizes(*args) if self.column is None else (self.capacity, 0)


class StaticStep:
    """Reads one token per row in tensors that keep their shape and their address: on CUDA captured
    once per number of rows and replayed, without which launching the kernels takes longer than
    running them. On a CPU, where there is nothing to capture, it does the same step by step.
    """

    def __init__(self, model: nn.Module, cache: DynamicCache, num_rows: int) -> None:
        device, capacity = cache.layers[0].keys.device, cache.layers[0].capacity
        self.model, self.cache = model, cache
        self.tokens = torch.zeros(num_rows, 1, dtype=torch.long, device=device)
        self.mask = torch.zeros(num_rows, capacity, dtype=torch.bool, device=device)
        self.column = torch.zeros(1, dtype=torch.long, device=device)
        self.capture = device.type == "cuda"
        self.pool = torch.cuda.graph_pool_handle() if self.capture else None
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor] | None] = {}
        for layer in cache.layers:
            layer.make_static(self.column)

    def __call__(self, drawn: Tensor, mask: Tensor, column: int) -> Tensor:
        """Read drawn (B,), which goes to `column`, under mask (B, capacity): next logits (B, V)."""
        num_rows = len(drawn)
        self.tokens[:num_rows, 0], self.mask[:num_rows] = drawn, mask
        self.column.fill_(column)
        if num_rows not in self.graphs:  # once step by step, which is also the warm-up of capturing
            logits = self._read(num_rows)
            self.graphs[num_rows] = self._captured(num_rows) if self.capture else None
            return logits
        if self.graphs[num_rows] is None:
            return self._read(num_rows)
        graph, logits = self.graphs[num_rows]
        graph.replay()
        return logits

    def _read(self, num_rows: int) -> Tensor:
        tokens, mask = self.tokens[:num_rows], self.mask[:num_rows]
        return _next_logits(self.model, tokens, mask, self.cache, cache_position=self.column)

    def _captured(self, num_rows: int) -> tuple[torch.cuda.CUDAGraph, Tensor] | None:
        """The step as a graph, and the tensor that replaying it fills."""
        graph = torch.cuda.CUDAGraph()
        try:
            # The outer context brings the stream back where capturing fails half-way.
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(graph, pool=self.pool),
            ):
                logits = self._read(num_rows)
        except RuntimeError as e:
            warnings.warn(f"decoding without CUDA graphs, slowly: {first_line(e)}", stacklevel=2)
            self.capture = False
            return None
        return graph, logits
