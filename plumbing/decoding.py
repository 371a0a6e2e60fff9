"""Under sampling.generate: the forward passes of the decode loop, and what makes them fast.

- Prefill is one forward pass over each distinct prompt, whatever the number of its completions.
- Rows that have ended leave the batch, several at a time.
- Keys and values are written into memory of the final size, nothing is concatenated.
- In half precision, weights are rounded once per rollout: half.py.
- On CUDA a token, from reading the one before to drawing it, is one CUDA graph, not a thousand
  kernel launches, and the loop waits for the device every eighth token only. Graphs, weights and
  memory are kept for the next rollout.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import common
from common import base_model, clear_cache
from plumbing import models
from plumbing.errors import Fault, InputError, first_line, is_out_of_memory
from plumbing.forward import to
from plumbing.half import half_precision_copy
from plumbing.models import mask_is_known, model_inputs

COLUMNS = 128  # tensors of one shape hold a multiple of so many tokens


class Decoder:
    """Decodes batches of B rows with one model: `start` draws a first token of each row, `step` the
    next ones. `with decoder:` is a rollout, in which the weights don't change.

    Rows that have ended are dropped on the way: `rows` (B,) says first which `num_rows` are left.
    half: decode with weights rounded to this type. static: tensors of one shape for many tokens, as
    a CUDA graph needs; default: on CUDA.
    """

    def __init__(
        self, model: nn.Module, half: torch.dtype | None = None, static: bool | None = None
    ) -> None:
        self.model, self.half, self.device = model, half, model.device
        on_cuda = self.device.type == "cuda"
        with_graphs = on_cuda and can_be_static(model) and not common.capture_failed
        self.wants_static = with_graphs if static is None else static
        self.capture = on_cuda and self.wants_static
        self.stream = torch.cuda.Stream() if self.capture else None
        self.in_rollout = self.updated = False
        self.norm: Tensor | None = None  # of the weights in the last rollout
        self._forget()

    def _forget(self) -> None:
        """Give all memory back."""
        self.copy: nn.Module | None = None
        self.is_fresh = False  # the copy has the weights of this rollout
        self.draws: dict[tuple, Any] = {}  # sampling.Draws, by their settings
        self.max_rows = self.capacity = 0
        self._forget_shapes()

    def _forget_shapes(self) -> None:
        self.buffers: dict[int, list[Tensor]] = {}  # keys and values of each layer
        self.graphs: dict[tuple, torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.capture else None

    def __enter__(self) -> Decoder:
        self.in_rollout = True
        return self

    def __exit__(self, *error: object) -> None:
        self.in_rollout = self.is_fresh = False
        # Nothing is kept after an error, nor on a CPU, where packed weights aren't refreshed.
        if any(error) or not self.capture:
            return self._forget()
        # What an update takes is known once there was one: then the peak counts it.
        self.norm = self._norm_of_weights()
        kept = [*(self.copy.parameters() if self.copy is not None else ()), self.mask]
        kept += [x for buffers in self.buffers.values() for x in buffers]
        size = sum(x.numel() * x.element_size() for x in kept)
        room = 0.8 * torch.cuda.mem_get_info(self.device)[1]
        if not self.updated or torch.cuda.max_memory_allocated(self.device) + size > room:
            self._forget()

    def _norm_of_weights(self) -> Tensor:
        trained = [p.detach() for p in self.model.parameters() if p.requires_grad]
        if not trained:
            return torch.zeros((), device=self.device)
        return torch.stack(torch._foreach_norm(trained)).sum()

    def start(self, prompt_ids: Tensor, prompt_mask: Tensor, draws: Any) -> None:
        """Read the prompts (B, P), and draw the first token of each row.

        draws: a sampling.Draws. Raises InputError where the model's context has no room for its T
        tokens, Fault where the logits are not finite.
        """
        (num_rows, self.length), max_new_tokens = prompt_ids.shape, draws.ends.shape[1]
        limit, capacity = models.context_length(self.model), self.length + max_new_tokens
        if limit is not None and capacity > limit:
            lengths = f"{self.length} prompt tokens and {max_new_tokens} new ones"
            raise InputError(f"{lengths} don't fit into the model's context of {limit}")
        self.num_rows, self.num_drawn, self.now = num_rows, 1, draws
        self._make_room(num_rows, capacity)
        self._refresh()
        self.rows[:num_rows] = torch.arange(num_rows, device=self.device)
        self.mask[:num_rows] = False
        self.mask[:num_rows, : self.length] = to(self.device, prompt_mask)
        self.first[:num_rows, 0] = self.mask[:num_rows].sum(1) - 1
        self.cache = preallocated_cache(self.model, self.max_rows, self.capacity, self.buffers)
        logits = self._prefill(prompt_ids, prompt_mask)
        all_preallocated = all(type(x) is PreallocatedLayer for x in self.cache.layers)
        self.static = self.wants_static and all_preallocated
        if self.static and self.capture and not self.graphs:
            # While a graph is captured, the allocator can neither use what the prompts have left in
            # its cache nor give it back: the capture could run out of memory.
            clear_cache()
        self.t.fill_(0)
        self._take(logits)

    def _make_room(self, num_rows: int, capacity: int) -> None:
        """Memory for so many rows, of so many tokens each."""
        if self.wants_static:
            capacity = _round_up(capacity)
        if num_rows <= self.max_rows and capacity <= self.capacity:
            return
        self._forget_shapes()
        self.max_rows, self.capacity = max(num_rows, self.max_rows), max(capacity, self.capacity)
        long = {"dtype": torch.long, "device": self.device}
        self.rows = torch.zeros(self.max_rows, **long)
        self.last = torch.zeros(self.max_rows, 1, **long)  # the tokens drawn last
        self.first = torch.zeros(self.max_rows, 1, **long)  # one less than a prompt has tokens
        self.mask = torch.zeros(self.max_rows, self.capacity, dtype=torch.bool, device=self.device)
        # The number of the token that is drawn; the column of the one before it, which is read.
        self.t, self.column = torch.zeros(1, **long), torch.zeros(1, **long)

    def _refresh(self) -> None:
        """Round the weights, as they are now: in place, where graphs hold their address."""
        if self.half is None or self.is_fresh:
            return
        new, old = half_precision_copy(self.model, self.half), self.copy
        if old is None:
            self.copy = new
        else:
            torch._foreach_copy_(list(old.parameters()), list(new.parameters()))
        self.is_fresh = self.in_rollout

    def _prefill(self, prompt_ids: Tensor, prompt_mask: Tensor) -> Tensor:
        """Fill the cache with the prompts; logits of the first token (B, V). Raises Fault."""
        # One forward pass over each distinct prompt, which is then copied for its completions.
        both = torch.cat([prompt_ids, prompt_mask], dim=1).cpu()
        distinct, which = both.unique(dim=0, return_inverse=True)
        distinct, which = to(self.device, distinct), to(self.device, which)
        with mask_is_known(no_padding=bool(prompt_mask.all())):
            logits = self._next_logits(*distinct.chunk(2, dim=1))[which]
        self.cache.batch_select_indices(which)
        facts = [logits.logsumexp(-1).isfinite().all()]
        if self.norm is not None:
            facts.append(self._norm_of_weights() != self.norm)
        is_finite, *has_moved = torch.stack(facts).tolist()  # together: each transfer waits
        self.updated |= any(has_moved)
        if not is_finite:
            # Float16 ends at 65,504, and some models have larger hidden states: Gemma.
            fp16 = "give --fp16 false, or " if self.half == torch.float16 else ""
            raise Fault(f"the model's logits are not finite: {fp16}lower --learning_rate")
        return logits

    def _next_logits(self, tokens: Tensor, mask: Tensor, **options: Tensor) -> Tensor:
        """Logits of the next token (R, V): tokens (R, L) follow C in the cache; mask (R, C+L)."""
        model = self.model if self.half is None else self.copy
        options |= {"cache": self.cache, "use_cache": True, "logits_to_keep": 1}
        return model(**model_inputs(model, tokens, mask, **options)).logits[:, -1]

    def _take(self, logits: Tensor) -> None:
        num_rows = len(logits)
        self.last[:num_rows, 0] = self.now.take(logits, self.rows[:num_rows], self.t)

    def may_wait(self) -> bool:
        """Whether to see now which rows have ended, which waits for the device: on a GPU only after
        every eighth token.
        """
        return self.device.type == "cpu" or self.num_drawn % 8 == 0

    def drop_ended(self) -> bool:
        """Drop rows that have ended, if they are enough; whether any are left."""
        # Dropping copies the cache, so a row or two don't pay for it. With CUDA graphs the number
        # of rows is halved: each number of rows is another graph.
        num_rows = self.num_rows
        running = ~self.now.ends[self.rows[:num_rows]].any(1)
        num_running = int(running.sum())
        size = num_rows // 2 if self.static else num_running
        if 0 < num_running <= min(size, 7 / 8 * num_rows):
            kept = running.long().argsort(descending=True, stable=True)[:size]
            if self.static:  # to move all that was written: a replay leaves the views as they were
                self._make_static(num_rows, _round_up(self.length + self.num_drawn))
            self.cache.batch_select_indices(kept)
            for x in (self.rows, self.last, self.first, self.mask):
                x[:size] = x[kept]
            self.num_rows = size
        return num_running > 0

    def step(self) -> None:
        """Read the tokens that were drawn last, and draw the next one of each row that is left."""
        num_read = self.length + self.num_drawn
        columns = _round_up(num_read) if self.static else num_read
        self.t.fill_(self.num_drawn)
        self.column.fill_(num_read - 1)
        self.num_drawn += 1
        # Columns that hold nothing yet aren't read, but for the last few.
        key = (self.now.settings, self.num_rows, columns)
        if not self.static or not self.capture:
            self._token(*key[1:])
        elif key in self.graphs:
            self.graphs[key].replay()
        else:
            self._warm_up(*key[1:])  # the token itself, and what capturing needs before
            if self.capture:
                self._capture(key)

    def _token(self, num_rows: int, columns: int) -> None:
        """A token of the first rows, of which `columns` tokens are kept at most."""
        mask, options = self.mask[:num_rows], {}
        mask.index_fill_(1, self.column, True)
        if self.static:
            options["cache_position"] = self.column
            options["position_ids"] = self.first[:num_rows] + self.t
            self._make_static(num_rows, columns)
        with mask_is_known(no_padding=False):
            logits = self._next_logits(self.last[:num_rows], mask[:, :columns], **options)
        self._take(logits)

    def _make_static(self, num_rows: int, columns: int) -> None:
        for layer in self.cache.layers:
            layer.make_static(self.column, num_rows, columns)

    def _warm_up(self, num_rows: int, columns: int) -> None:
        """A token without a graph. One that waits for the device can't be captured."""
        # Found out here: a capture that fails leaves PyTorch's allocator in disorder, and the next
        # empty_cache would end the run (pytorch/pytorch#180395).
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return self._token(num_rows, columns)
        except RuntimeError as e:
            if is_out_of_memory(e):
                raise
            self._go_without_graphs(e)
        finally:
            torch.cuda.set_sync_debug_mode(before)
        self._token(num_rows, columns)

    def _capture(self, key: tuple) -> None:
        """Keep a token as a graph: launching its kernels one by one takes longer than they run."""
        # Not by torch.cuda.graph, which waits for the device and empties the cache every time.
        # Graphs that share a workspace of cuBLAS can't do with another's (pytorch/pytorch#193402).
        graph = torch.cuda.CUDAGraph()
        clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
        clear_workspaces()
        self.stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self.stream):
                graph.capture_begin(pool=self.pool)
                try:
                    self._token(*key[1:])
                finally:
                    graph.capture_end()
        except RuntimeError as e:
            common.capture_failed = True  # no other decoder tries again
            self._go_without_graphs(e.__context__ or e)  # capture_end fails after the forward pass
            return
        torch.cuda.current_stream().wait_stream(self.stream)
        clear_workspaces()
        self.graphs[key] = graph

    def _go_without_graphs(self, error: BaseException) -> None:
        warnings.warn(f"decoding without CUDA graphs, slowly: {first_line(error)}", stacklevel=2)
        self.capture = False


def _round_up(num_tokens: int) -> int:
    return -(-num_tokens // COLUMNS) * COLUMNS


def can_be_static(model: nn.Module) -> bool:
    """Whether every token can be decoded with tensors of one shape."""
    # Not where the forward depends on values of its tensors, or on the length of the cache.
    return base_model(model).config.model_type not in ("gpt_neo", "falcon", "mpt", "xglm")


# --- Keys and values ---


def preallocated_cache(
    model: nn.Module, max_rows: int, capacity: int, buffers: dict[int, list[Tensor]]
) -> DynamicCache:
    """A KV cache for `capacity` tokens per row, with layers that are written in place."""
    cache = DynamicCache(config=base_model(model).config)
    for index, layer in enumerate(cache.layers):
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            own = buffers.setdefault(index, [])
            cache.layers[index] = PreallocatedLayer(max_rows, capacity, own)
    return cache


class PreallocatedLayer(DynamicLayer):
    """Keys and values of one layer, each (rows, heads, tokens, head size), written in place.

    At first `keys` and `values` are those of the prompts; from the first `batch_select_indices` on
    they are views of `buffers` up to the last token; after `make_static` up to a later column. A
    sliding window keeps all its tokens, and the mask hides the old ones.
    """

    def __init__(self, max_rows: int, capacity: int, buffers: list[Tensor]) -> None:
        super().__init__()
        self.max_rows, self.capacity, self.buffers = max_rows, capacity, buffers
        self.has_begun = False
        self.column: Tensor | None = None  # (1,) where a static cache writes the next token

    def update(self, keys: Tensor, values: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append keys and values (rows, heads, L, head size); returns those of all tokens."""
        if not self.has_begun:  # the prompts
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
        """Keep the given rows. The first call may repeat rows."""
        old, length = (self.keys, self.values), self.keys.shape[2]
        if not self.buffers:
            shapes = [(self.max_rows, x.shape[1], self.capacity, x.shape[3]) for x in old]
            # Zeros, not empty: masked columns have weight 0 in the attention, and 0 * NaN is NaN.
            self.buffers += [x.new_zeros(shape) for x, shape in zip(old, shapes)]
        self.has_begun = True
        self._view(len(indices), length)
        for new, states in zip((self.keys, self.values), old):
            new.copy_(states[indices])

    def _view(self, num_rows: int, length: int) -> None:
        self.keys, self.values = (buffer[:num_rows, :, :length] for buffer in self.buffers)

    def make_static(self, column: Tensor, num_rows: int, columns: int) -> None:
        """From now on write at `column` and return `columns`, whether filled or not."""
        self._view(num_rows, columns)
        self.column, self.is_compileable = column, True

    def get_seq_length(self) -> int | Tensor:
        return super().get_seq_length() if self.column is None else self.column

    def get_max_length(self) -> int:  # transformers takes the size of some masks from it
        return -1 if self.column is None else self.keys.shape[2]

    get_max_cache_shape = get_max_length  # its name before transformers 5.24

    def get_mask_sizes(self, *args) -> tuple[int, int]:
        if self.column is None:
            return super().get_mask_sizes(*args)
        return self.keys.shape[2], 0
