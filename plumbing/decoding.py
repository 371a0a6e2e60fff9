"""Under sampling.generate: the forward passes of the decode loop, and what makes them fast.

- Prefill is one forward pass over each distinct prompt, whatever the number of its completions.
- Rows that have ended leave the batch, several at a time.
- Keys and values are written into memory of the final size, nothing is concatenated.
- In half precision, weights are rounded once per batch of rows, not at every token.
- On CUDA a token is one CUDA graph, not a thousand kernel launches, and the loop waits for the
  device every eighth token only.
"""

from __future__ import annotations

import copy
import warnings

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.pytorch_utils import Conv1D

import common
from common import base_model, clear_cache, has_plain_adapters
from plumbing.errors import Fault, InputError, first_line
from plumbing.forward import to
from plumbing.models import context_length, fast_at_bfloat16, mask_is_known, model_inputs


class Decoder:
    """A batch of B rows that grows by a token per `step`, with its KV cache.

    Rows that have ended are dropped on the way: `rows` (R,) says which of the B rows are left.
    half: decode with weights rounded to this type. static: tensors of one shape for every token, as
    a CUDA graph needs; default: on CUDA. Raises InputError where the model's context has no room
    for max_new_tokens after the prompts.
    """

    def __init__(
        self,
        model: nn.Module,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        max_new_tokens: int,
        half: torch.dtype | None = None,
        static: bool | None = None,
    ) -> None:
        num_rows, length = prompt_ids.shape
        limit, capacity = context_length(model), length + max_new_tokens
        if limit is not None and capacity > limit:
            lengths = f"{length} prompt tokens and {max_new_tokens} new ones"
            raise InputError(f"{lengths} don't fit into the model's context of {limit}")
        self.prompt_ids, self.prompt_mask, self.device = prompt_ids, prompt_mask, model.device
        self.max_new_tokens, self.num_drawn = max_new_tokens, 0
        self.half, self.model = half, model if half is None else half_precision_copy(model, half)
        self.cache = preallocated_cache(self.model, capacity)
        with_graphs = self.device.type == "cuda" and not common.capture_failed
        self.static = can_be_static(model) and with_graphs if static is None else static
        self.static_step: StaticStep | None = None
        self.rows = torch.arange(num_rows, device=self.device)
        self.running = torch.ones_like(self.rows, dtype=torch.bool)  # (R,) has not ended yet
        not_drawn = prompt_mask.new_zeros(num_rows, max_new_tokens)
        seen = torch.cat([prompt_mask, not_drawn], dim=1).bool()
        self.mask = to(self.device, seen)  # (R, P+T)

    def prefill(self) -> Tensor:
        """Fill the cache with the prompts; logits of the first token (B, V). Raises Fault."""
        # One forward pass over each distinct prompt, which is then copied for its completions.
        both = torch.cat([self.prompt_ids, self.prompt_mask], dim=1).cpu()
        distinct, which = both.unique(dim=0, return_inverse=True)
        distinct, which = to(self.device, distinct), to(self.device, which)
        with mask_is_known(no_padding=bool(self.prompt_mask.all())):
            logits = _next_logits(self.model, *distinct.chunk(2, dim=1), self.cache)[which]
        self.cache.batch_select_indices(which)
        if not logits.logsumexp(-1).isfinite().all():
            # Float16 ends at 65,504, and some models have larger hidden states: Gemma.
            fp16 = "give --fp16 false, or " if self.half == torch.float16 else ""
            raise Fault(f"the model's logits are not finite: {fp16}lower --learning_rate")
        if self.static and all(isinstance(layer, PreallocatedLayer) for layer in self.cache.layers):
            # While a graph is captured, the allocator can neither use what the prompts have left in
            # its cache nor give it back: the capture could run out of memory.
            clear_cache()
            self.static_step = StaticStep(self.model, self.cache, len(which))
        return logits

    def step(self, drawn: Tensor, ended: Tensor) -> Tensor | None:
        """One forward pass over drawn (R,), the tokens just drawn for `rows`: logits (R, V) of the
        next ones, R without the rows dropped here. None where no other token is needed.

        ended (R,): whether the token ends its completion. Its row may stay for a while.
        """
        self.num_drawn += 1
        self.running &= ~ended
        if self.num_drawn == self.max_new_tokens:
            return None
        # To count the running rows is to wait for the device: on a GPU only at every eighth token.
        if self.device.type == "cpu" or self.num_drawn % 8 == 0:
            num_running = int(self.running.sum())
            if num_running == 0:
                return None
            drawn = self._drop_ended(drawn, num_running)
        length = self.prompt_ids.shape[1] + self.num_drawn  # with the tokens just drawn
        self.mask[:, length - 1] = True
        if self.static_step is not None:
            return self.static_step(drawn, self.mask, length - 1)
        with mask_is_known(no_padding=False):
            return _next_logits(self.model, drawn.unsqueeze(1), self.mask[:, :length], self.cache)

    def _drop_ended(self, drawn: Tensor, num_running: int) -> Tensor:
        """Drop rows that have ended, if they are enough; `drawn` of the rows that are left."""
        # Dropping copies the cache, so a row or two don't pay for it. With CUDA graphs the number
        # of rows is halved: each number of rows is another graph.
        size = len(self.rows) // 2 if self.static_step is not None else num_running
        if num_running > min(size, 7 / 8 * len(self.rows)):
            return drawn
        kept = self.running.long().argsort(descending=True, stable=True)[:size]
        self.cache.batch_select_indices(kept)
        self.rows, self.mask, self.running = self.rows[kept], self.mask[kept], self.running[kept]
        return drawn[kept]


def _next_logits(
    model: nn.Module, tokens: Tensor, mask: Tensor, cache: DynamicCache, **options: Tensor
) -> Tensor:
    """Logits of the next token (B, V): tokens (B, L) follow the C in the cache; mask (B, C+L)."""
    options |= {"cache": cache, "use_cache": True, "logits_to_keep": 1}
    return model(**model_inputs(model, tokens, mask, **options)).logits[:, -1]


def half_precision_copy(model: nn.Module, half: torch.dtype) -> nn.Module:
    """A copy of the model with its weights rounded to bfloat16 or float16, to decode with. Buffers
    keep their precision: rotary frequencies of 8 bits would put late tokens at wrong positions.
    """
    floats = [p for p in model.parameters() if p.is_floating_point()]  # adapters have indices too
    rounded = {id(p): nn.Parameter(p.to(half), requires_grad=False) for p in floats}
    copied = copy.deepcopy(model, memo=rounded)
    backbone = base_model(copied).base_model
    width = backbone.config.get_text_config().hidden_size
    for module in copied.modules():
        for name, buffer in module.named_buffers(recurse=False):
            # Positions, added to the hidden states; matrices that an adapter (VeRA) doesn't train.
            is_one = buffer.shape[1:] == (width,) or type(module).__name__ == "BufferDict"
            if is_one and buffer.is_floating_point():
                module._buffers[name] = buffer.to(half)
    if backbone._supports_sdpa:  # the fastest for one token at a time, on every device
        backbone.set_attn_implementation("sdpa")
    packs = backbone.device.type == "cpu" and fast_at_bfloat16(backbone.device)
    if packs and half == torch.bfloat16 and has_plain_adapters(copied):
        for module in list(copied.modules()):
            for name, child in module.named_children():
                if type(child) in (nn.Linear, Conv1D):  # GPT-2's Conv1D: a transposed weight
                    weight = child.weight.T if type(child) is Conv1D else child.weight
                    setattr(module, name, PackedLinear(weight, child.bias))
    return copied


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


def preallocated_cache(model: nn.Module, capacity: int) -> DynamicCache:
    """A KV cache for `capacity` tokens per row, with layers that are written in place."""
    cache = DynamicCache(config=base_model(model).config)
    for index, layer in enumerate(cache.layers):
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            cache.layers[index] = PreallocatedLayer(capacity)
    return cache


def can_be_static(model: nn.Module) -> bool:
    """Whether every token can be decoded with tensors of one shape."""
    # Not where the forward depends on values of its tensors, or on the length of the cache.
    return base_model(model).config.model_type not in ("gpt_neo", "falcon", "mpt", "xglm")


class PreallocatedLayer(DynamicLayer):
    """Keys and values of one layer, each (rows, heads, capacity, head size), written in place.

    At first `keys` and `values` are those of the prompts; from the first `batch_select_indices` on
    they are views of the buffers up to the last token; after `make_static` the whole buffers. A
    sliding window keeps all its tokens, and the mask hides the old ones.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.buffers = capacity, None
        self.column: Tensor | None = None  # (1,) where a static cache writes the next token

    def update(self, keys: Tensor, values: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append keys and values (rows, heads, L, head size); returns those of all tokens."""
        if self.buffers is None:  # the prompts
            return super().update(keys, values)
        if self.column is not None:
            self.keys.index_copy_(2, self.column, keys)
            self.values.index_copy_(2, self.column, values)
        else:
            start = self.keys.shape[2]
            self._view(len(keys), start + keys.shape[2])
            self.keys[:, :, start:], self.values[:, :, start:] = keys, values
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows. The first call allocates, and may repeat rows."""
        old, length = (self.keys, self.values), self.keys.shape[2]
        if self.buffers is None:
            shapes = [(len(indices), x.shape[1], self.capacity, x.shape[3]) for x in old]
            # Zeros, not empty: masked columns have weight 0 in the attention, and 0 * NaN is NaN.
            self.buffers = [x.new_zeros(shape) for x, shape in zip(old, shapes)]
        self._view(len(indices), length)
        for new, states in zip((self.keys, self.values), old):
            new.copy_(states[indices])

    def _view(self, num_rows: int, length: int) -> None:
        self.keys, self.values = (buffer[:num_rows, :, :length] for buffer in self.buffers)

    def make_static(self, column: Tensor) -> None:
        """From now on write at `column` and return all columns, whether filled or not."""
        self._view(len(self.keys), self.capacity)
        self.column, self.is_compileable = column, True

    def get_seq_length(self) -> int | Tensor:
        return super().get_seq_length() if self.column is None else self.column

    def get_max_length(self) -> int:  # transformers takes the size of some masks from it
        return -1 if self.column is None else self.capacity

    get_max_cache_shape = get_max_length  # its name before transformers 5.24

    def get_mask_sizes(self, *args) -> tuple[int, int]:
        return super().get_mask_sizes(*args) if self.column is None else (self.capacity, 0)


class StaticStep:
    """The forward pass over one token per row, in tensors that keep their shape and address.

    On CUDA it is captured as a graph, once per number of rows, and replayed: launching its kernels
    one by one takes longer than running them. On a CPU it is an ordinary forward pass.
    """

    def __init__(self, model: nn.Module, cache: DynamicCache, num_rows: int) -> None:
        device, capacity = cache.layers[0].keys.device, cache.layers[0].capacity
        self.model, self.cache = model, cache
        self.tokens = torch.zeros(num_rows, 1, dtype=torch.long, device=device)
        self.mask = torch.zeros(num_rows, capacity, dtype=torch.bool, device=device)
        self.column = torch.zeros(1, dtype=torch.long, device=device)
        self.capture = device.type == "cuda"
        self.pool = torch.cuda.graph_pool_handle() if self.capture else None
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        for layer in cache.layers:
            layer.make_static(self.column)

    def __call__(self, drawn: Tensor, mask: Tensor, column: int) -> Tensor:
        """Logits (R, V) after drawn (R,), which is written at `column`; mask (R, capacity)."""
        num_rows = len(drawn)
        self.tokens[:num_rows, 0], self.mask[:num_rows] = drawn, mask
        self.column.fill_(column)
        if not self.capture:
            return self._forward(num_rows)
        if num_rows not in self.graphs:  # once without a graph, which capturing needs as a warm-up
            logits = self._warmed_up(num_rows)
            if self.capture:
                self._capture(num_rows)
            return logits
        graph, logits = self.graphs[num_rows]
        graph.replay()
        return logits

    def _forward(self, num_rows: int) -> Tensor:
        tokens, mask = self.tokens[:num_rows], self.mask[:num_rows]
        return _next_logits(self.model, tokens, mask, self.cache, cache_position=self.column)

    def _warmed_up(self, num_rows: int) -> Tensor:
        """The forward pass, without a graph. One that waits for the device can't be captured."""
        # Found out here: a capture that fails leaves PyTorch's allocator in disorder, and the next
        # empty_cache would end the run (pytorch/pytorch#180395).
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return self._forward(num_rows)
        except RuntimeError as e:
            self._go_without_graphs(e)
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return self._forward(num_rows)

    def _capture(self, num_rows: int) -> None:
        """Keep the forward pass as a graph, with the tensor of logits that replaying it fills."""
        # Not by torch.cuda.graph, which waits for the device and empties the cache every time.
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=self.pool)
                try:
                    logits = self._forward(num_rows)
                finally:
                    graph.capture_end()
        except RuntimeError as e:
            common.capture_failed = True  # no other decoder tries again
            self._go_without_graphs(e.__context__ or e)  # capture_end fails after the forward pass
            return
        torch.cuda.current_stream().wait_stream(stream)
        self.graphs[num_rows] = graph, logits

    def _go_without_graphs(self, error: BaseException) -> None:
        warnings.warn(f"decoding without CUDA graphs, slowly: {first_line(error)}", stacklevel=2)
        self.capture = False
