"""Under sampling.generate: the forward passes of the decode loop, and what makes them fast.

- Prefill is one forward pass over each distinct prompt, whatever the number of its completions.
- Rows that have ended leave the batch, several at a time.
- Keys and values are written into memory of the final size, nothing is concatenated.
- In half precision, weights are rounded once per rollout: half.py.
- On CUDA a token, from reading the one before to drawing it, is one CUDA graph, not a thousand
  kernel launches, and the loop waits for the device every eighth token only. Graphs, weights and
  memory are kept for the next rollout, where they fit beside an update.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
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
num_updates = 0  # of any weights


def _count_update(*_: object) -> None:
    global num_updates
    num_updates += 1


register_optimizer_step_post_hook(_count_update)


class Decoder:
    """Decodes batches of B rows with one model: `start` draws a first token of each row, `step` the
    next ones. `with decoder:` is a rollout, in which the weights don't change.

    tokens, logprobs, ends: (B, T) at least, filled by and by. uniforms (T, B): random numbers that
    they are drawn with. Rows that have ended are dropped on the way: the first `num_rows` entries
    of `rows` (B,) are the rows that are left.
    half: decode with weights rounded to this type. static: tensors of one shape for many tokens, as
    a CUDA graph needs; default: on CUDA.
    """

    def __init__(
        self, model: nn.Module, half: torch.dtype | None = None, static: bool | None = None
    ) -> None:
        self.model, self.half, self.device = model, half, model.device
        on_cuda = self.device.type == "cuda"
        if static is None:
            static = on_cuda and not common.capture_failed
        self.static = static and can_be_static(model)
        # On which graphs are captured; None: there are no graphs.
        self.stream = torch.cuda.Stream() if on_cuda and self.static else None
        self.in_rollout = False
        self.updates_before = num_updates
        self._forget()

    def _forget(self) -> None:
        """Give all memory back."""
        self.copy: nn.Module | None = None
        self.is_fresh = False  # the copy has the weights of this rollout
        self.room = (0, 0, 0)  # rows, tokens of a row with its prompt, new tokens
        self.cache: DynamicCache | None = None
        self.buffers: dict[int, list[Tensor]] = {}  # keys and values of each layer
        self.graphs: dict[tuple, torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.stream else None

    def __enter__(self) -> Decoder:
        self.in_rollout = True
        self.allocated = torch.cuda.memory_allocated(self.device) if self.stream else 0
        return self

    def __exit__(self, *error: object) -> None:
        self.in_rollout = self.is_fresh = False
        # Nothing is kept after an error, nor on a CPU, where packed weights aren't refreshed.
        if any(error) or self.stream is None:
            return self._forget()
        # Before the first update nobody knows what one takes; afterwards the peak includes it.
        new = torch.cuda.memory_allocated(self.device) - self.allocated
        room = 0.8 * torch.cuda.mem_get_info(self.device)[1]
        peak = torch.cuda.max_memory_allocated(self.device)
        if num_updates == self.updates_before or peak + new > room:
            self._forget()

    def make_room(self, num_rows: int, num_prompt_tokens: int, max_new_tokens: int) -> None:
        """Memory for so many rows of so many tokens: `start` needs it. Raises InputError where the
        model's context is shorter.
        """
        limit, capacity = models.context_length(self.model), num_prompt_tokens + max_new_tokens
        if limit is not None and capacity > limit:
            lengths = f"{num_prompt_tokens} prompt tokens and {max_new_tokens} new ones"
            raise InputError(f"{lengths} don't fit into the model's context of {limit}")
        if self.static:
            capacity = round_up(capacity)
        asked = (num_rows, capacity, max_new_tokens)
        if all(x <= y for x, y in zip(asked, self.room)):
            return
        room = tuple(map(max, asked, self.room))
        self._forget()
        self.room, (num_rows, capacity, max_new_tokens) = room, room
        long = {"dtype": torch.long, "device": self.device}
        self.rows = torch.zeros(num_rows, **long)
        self.last = torch.zeros(num_rows, 1, **long)  # the tokens drawn last
        self.first = torch.zeros(num_rows, 1, **long)  # one less than a prompt has tokens
        self.mask = torch.zeros(num_rows, capacity, dtype=torch.bool, device=self.device)
        # The number of the token that is drawn; the column of the one before it, which is read.
        self.t, self.column = torch.zeros(1, **long), torch.zeros(1, **long)
        self.uniforms = torch.zeros(max_new_tokens, num_rows, device=self.device)
        self.tokens = torch.zeros(num_rows, max_new_tokens, **long)
        self.logprobs = torch.zeros(num_rows, max_new_tokens, device=self.device)
        # An EOS, or the token that completes a stop string.
        self.ends = torch.zeros_like(self.tokens, dtype=torch.bool)

    def start(
        self, prompt_ids: Tensor, prompt_mask: Tensor, draw: Callable, settings: tuple
    ) -> None:
        """Read the prompts (B, P), and draw the first token of each row.

        draw(logits (R, V), uniforms (R,), *settings) gives tokens and log-probs. Raises Fault where
        the logits are not finite.
        """
        num_rows, self.length = prompt_ids.shape
        self.num_rows, self.num_drawn, self.columns = num_rows, 1, self.length
        self.draw, self.settings = draw, settings
        self._refresh()
        self.rows[:num_rows] = torch.arange(num_rows, device=self.device)
        self.mask[:num_rows] = False
        self.mask[:num_rows, : self.length] = to(self.device, prompt_mask)
        self.first[:num_rows, 0] = self.mask[:num_rows].sum(1) - 1
        self.ends.zero_()
        logits = self._prefill(prompt_ids, prompt_mask)
        if self.stream and not self.graphs:
            # While a graph is captured, the allocator can neither use what the prompts have left in
            # its cache nor give it back: the capture could run out of memory.
            clear_cache()
        self.t.fill_(0)
        self._take(logits)

    def _refresh(self) -> None:
        """Round the weights, as they are now: in place, where graphs hold their address."""
        if self.half is None or self.is_fresh:
            return
        new, old = half_precision_copy(self.model, self.half), self.copy
        if old is None or self.stream is None:
            self.copy = new
        else:
            torch._foreach_copy_(list(old.parameters()), list(new.parameters()))
        self.is_fresh = self.in_rollout

    def _prefill(self, prompt_ids: Tensor, prompt_mask: Tensor) -> Tensor:
        """Fill the cache with the prompts; logits of the first token (B, V). Raises Fault."""
        self.cache = DynamicCache(config=base_model(self.model).config)
        for index, layer in enumerate(self.cache.layers):
            if type(layer) in PREALLOCATED:
                buffers = self.buffers.setdefault(index, [])
                for x in buffers if self.half == torch.float16 else ():
                    x.zero_()  # a row that had ended may have overflown: weight 0 times NaN is NaN
                self.cache.layers[index] = PreallocatedLayer(*self.room[:2], buffers)
        # One forward pass over each distinct prompt, which is then copied for its completions.
        both = torch.cat([prompt_ids, prompt_mask], dim=1).cpu()
        distinct, which = both.unique(dim=0, return_inverse=True)
        distinct, which = to(self.device, distinct), to(self.device, which)
        with mask_is_known(no_padding=bool(prompt_mask.all())):
            logits = self._next_logits(*distinct.chunk(2, dim=1))[which]
        self.cache.batch_select_indices(which)
        if not logits.logsumexp(-1).isfinite().all():
            raise self.not_finite()
        return logits

    def not_finite(self) -> Fault:
        """What to raise where the logits are not finite."""
        # Float16 ends at 65,504, and some models have larger hidden states: Gemma.
        fp16 = "give --fp16 false, or " if self.half == torch.float16 else ""
        return Fault(f"the model's logits are not finite: {fp16}lower --learning_rate")

    def _next_logits(self, tokens: Tensor, mask: Tensor, **options: Tensor) -> Tensor:
        """Logits of the next token (R, V): tokens (R, L) follow C in the cache; mask (R, C+L)."""
        model = self.model if self.half is None else self.copy
        options |= {"cache": self.cache, "use_cache": True, "logits_to_keep": 1}
        return model(**model_inputs(model, tokens, mask, **options)).logits[:, -1]

    def _take(self, logits: Tensor) -> None:
        """Draw token `t` of the rows that are left from logits (R, V)."""
        rows, t = self.rows[: self.num_rows], self.t
        drawn, logprobs = self.draw(logits, self.uniforms[t, rows], *self.settings)
        self.tokens[rows, t], self.logprobs[rows, t] = drawn, logprobs
        self.last[: self.num_rows, 0] = drawn

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
        running = ~self.ends[self.rows[:num_rows]].any(1)
        num_running = int(running.sum())
        size = num_rows // 2 if self.static else num_running
        if 0 < num_running <= min(size, 7 / 8 * num_rows):
            kept = running.long().argsort(descending=True, stable=True)[:size]
            self._view_cache()  # all that was written: a replay leaves the views as they were
            self.cache.batch_select_indices(kept)
            for x in (self.rows, self.last, self.first, self.mask):
                x[:size] = x[kept]
            self.num_rows = size
        return num_running > 0

    def step(self) -> None:
        """Read the tokens that were drawn last, and draw the next one of each row that is left."""
        num_read = self.length + self.num_drawn
        self.columns = round_up(num_read) if self.static else num_read
        self.t.fill_(self.num_drawn)
        self.column.fill_(num_read - 1)
        key = (self.settings, self.num_rows, self.columns)
        if key in self.graphs:
            self.graphs[key].replay()
        elif self.stream is None:
            self._token()
        elif self._warm_up():  # the token itself, and what capturing needs before
            self._capture(key)
        self.num_drawn += 1

    def _view_cache(self) -> None:
        """Let the cache show the rows that are left, and the columns that are read: those that hold
        tokens, and the next few where static.
        """
        past = self.column if self.static else self.length + self.num_drawn - 1
        for layer in self.cache.layers:
            if isinstance(layer, PreallocatedLayer):
                layer.view(self.num_rows, self.columns, past)

    def _token(self) -> None:
        """A forward pass over the tokens drawn last, and the next ones."""
        rows = slice(self.num_rows)
        self._view_cache()
        self.mask[rows].index_fill_(1, self.column, True)
        mask = self.mask[rows, : self.columns]
        options = {"cache_position": self.column, "position_ids": self.first[rows] + self.t}
        with mask_is_known(no_padding=False):
            logits = self._next_logits(self.last[rows], mask, **options)
        self._take(logits)

    def _warm_up(self) -> bool:
        """A token without a graph; whether it can be captured: not if it waits for the device."""
        # Found out here: a capture that fails leaves PyTorch's allocator in disorder, and the next
        # empty_cache would end the run (pytorch/pytorch#180395).
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            self._token()
            return True
        except RuntimeError as e:
            if is_out_of_memory(e):
                raise
            self._go_without_graphs(e)
        finally:
            torch.cuda.set_sync_debug_mode(before)
        self._token()
        return False

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
                    self._token()
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
        self.static, self.stream = False, None


def round_up(num_tokens: int) -> int:
    """The columns of tensors of one shape that hold so many tokens."""
    return -(-num_tokens // COLUMNS) * COLUMNS


def can_be_static(model: nn.Module) -> bool:
    """Whether every token can be decoded with tensors of one shape."""
    config = base_model(model).config
    # Not where the forward depends on values of its tensors, or on the length of the cache.
    if config.model_type in ("gpt_neo", "falcon", "mpt", "xglm"):
        return False
    return all(type(layer) in PREALLOCATED for layer in DynamicCache(config=config).layers)


# --- Keys and values ---


PREALLOCATED = (DynamicLayer, DynamicSlidingWindowLayer)  # the layers that are written in place


class PreallocatedLayer(DynamicLayer):
    """Keys and values of one layer, each (rows, heads, tokens, head size), written in place.

    At first `keys` and `values` are those of the prompts; from the first `batch_select_indices` on
    they are views of `buffers`, and `view` says for each token of what. A sliding window keeps all
    its tokens, and the mask hides the old ones.
    """

    def __init__(self, max_rows: int, capacity: int, buffers: list[Tensor]) -> None:
        super().__init__()
        self.max_rows, self.capacity, self.buffers = max_rows, capacity, buffers
        # How many tokens come before the one that is read, on the device where the shapes are
        # static; None: the prompts are read.
        self.past: int | Tensor | None = None

    def update(self, keys: Tensor, values: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append keys and values (rows, heads, L, head size); returns those of all tokens."""
        if self.past is None:
            return super().update(keys, values)
        for all_states, new in ((self.keys, keys), (self.values, values)):
            if self.is_compileable:
                all_states.index_copy_(2, self.past, new)
            else:
                all_states[:, :, self.past : self.past + new.shape[2]] = new
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows. The first call may repeat rows."""
        old, length = (self.keys, self.values), self.keys.shape[2]
        if not self.buffers:
            shapes = [(self.max_rows, x.shape[1], self.capacity, x.shape[3]) for x in old]
            # Zeros, not empty: masked columns have weight 0 in the attention, and 0 * NaN is NaN.
            self.buffers += [x.new_zeros(shape) for x, shape in zip(old, shapes)]
        self.view(len(indices), length, self.past)
        for new, states in zip((self.keys, self.values), old):
            new.copy_(states[indices])

    def view(self, num_rows: int, columns: int, past: int | Tensor | None) -> None:
        """Show the first rows and columns, whether they are filled or not."""
        self.keys, self.values = (buffer[:num_rows, :, :columns] for buffer in self.buffers)
        self.past, self.is_compileable = past, isinstance(past, Tensor)

    def get_seq_length(self) -> int | Tensor:
        return super().get_seq_length() if self.past is None else self.past

    def get_max_length(self) -> int:  # transformers takes the size of some masks from it
        return self.keys.shape[2] if self.is_compileable else -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.24

    def get_mask_sizes(self, *args) -> tuple[int, int]:
        return super().get_mask_sizes(*args) if self.past is None else (self.keys.shape[2], 0)
