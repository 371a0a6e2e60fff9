"""How a run decodes: the options of sampling.py, weights rounded to half precision, CUDA graphs."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache, StopStringCriteria
from transformers import PreTrainedTokenizerBase as Tokenizer

from common import unwrap
from forward import model_inputs
from plumbing.config import RunConfig
from plumbing.data import PADDING
from plumbing.errors import Fault, blame
from plumbing.models import eos_token_ids
from sampling import draw, without_windows


def sampling_options(config: RunConfig, policy: nn.Module, tokenizer: Tokenizer) -> dict[str, Any]:
    """Make the arguments of `sample`, with a generator that the run's seed starts."""
    # load_policy has made an EOS of a stop that is a token.
    strings = [text for text in config.stop if text not in tokenizer.get_added_vocab()]
    with blame(f"--stop {strings}"):
        stop = StopStringCriteria(tokenizer, strings) if strings else None
    return {
        "max_rows": config.rollout_batch_size,
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "eos_token_ids": eos_token_ids(policy, tokenizer),
        "pad_token_id": PADDING,
        "generator": torch.Generator(policy.device).manual_seed(config.seed),
        "decoder": Decoder(policy, config.half, config.cuda_graphs),
        "stop": stop,
    }


class Decoder:
    """Decodes the rollouts of a run with its model, or given `half` with a copy whose weights are
    rounded to this type. On CUDA a step is a graph, unless `graphs` is False: launching its kernels
    one by one takes longer than they run. A replay repeats the same operations on the same memory:
    so the cache has its full size from the start, a mask hides the columns that aren't filled yet,
    and what changes from token to token lies in tensors that the graph itself moves on.
    """

    def __init__(
        self, model: nn.Module, half: torch.dtype | None = None, graphs: bool = True
    ) -> None:
        self.trained, self.half = model, half
        self.has_graphs = graphs and model.device.type == "cuda"
        # A graph reads a fixed number of the cache's columns. When they are full, the next graph
        # takes its place, which reads 128 more.
        self.stretch = 128
        # Each with the tensors that its replay draws into.
        self.graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]] = {}

    @torch.no_grad()
    def __enter__(self) -> Decoder:
        """Begin a rollout: round the weights as they are now."""
        if self.half and self.graphs:  # they hold the address of each weight
            rounded, weights = self.model.parameters(), self.trained.parameters()
            torch._foreach_copy_(list(rounded), list(weights))
        else:
            self.model = rounded_copy(self.trained, self.half) if self.half else self.trained
        return self

    def __exit__(self, *error: object) -> None:
        """End it. With graphs it keeps what it holds, if that is under a fifth of what is free."""
        shared = {p.data_ptr() for p in self.trained.parameters()}  # only the others are its own
        kept = [p for p in self.model.parameters() if p.data_ptr() not in shared]
        if self.graphs:
            kept += [x for layer in self.cache.layers for x in (layer.keys, layer.values)]
            free = torch.cuda.mem_get_info()[0] - torch.cuda.memory_allocated()
            free += torch.cuda.memory_reserved()
        if any(error) or not self.graphs or 5 * sum(x.nbytes for x in kept) > free:
            self.model, self.cache, self.graphs = None, None, {}

    def start(self, cache: DynamicCache, mask: Tensor, max_new_tokens: int) -> Decoder:
        """Take over the prompts: their keys and values, and their mask (B, P)."""
        B, columns = len(mask), mask.shape[1] + max_new_tokens
        if not self.graphs or len(self.mask) != B or self.mask.shape[3] < columns:
            # Their memory is free before the new ones take theirs.
            self.cache, self.graphs = None, {}
            columns = -(-columns // self.stretch) * self.stretch
            self.cache = FilledColumns(without_windows(self.model), max_cache_len=columns)
            self.pool = torch.cuda.graph_pool_handle()  # the graphs run one at a time
            self.token = torch.zeros(B, 1, dtype=torch.long, device=mask.device)
            self.uniform = torch.zeros(B, device=mask.device)
            self.position, self.column = torch.zeros_like(self.token), self.token.new_zeros(1)
            self.columns = torch.arange(columns, device=mask.device)
            # 0 where a column is seen, -inf elsewhere.
            self.mask = torch.zeros(B, 1, 1, columns, dtype=self.model.dtype, device=mask.device)
        # Clear what earlier rollouts have left: an attention weight of 0 times NaN is NaN.
        self.cache.reset()
        for layer, prompt in zip(self.cache.layers, cache.layers, strict=True):
            layer.update(prompt.keys, prompt.values)
        self.num_filled = mask.shape[1]
        self.position.copy_(mask.sum(1, keepdim=True))
        self.column.fill_(mask.shape[1])
        self.mask.fill_(-torch.inf)
        self.mask[:, 0, 0, : mask.shape[1]].masked_fill_(mask, 0)
        return self

    def __call__(self, drawn: Tensor, uniform: Tensor, settings: dict) -> tuple[Tensor, Tensor]:
        """As a Step, but what it gives lies in memory that the next call overwrites. Raises Fault
        where there can be no graph.
        """
        self.token.copy_(drawn.unsqueeze(1))
        self.uniform.copy_(uniform)
        self.num_filled += 1  # columns: attention reads them, up to a whole number of stretches
        self.cache.length = -(-self.num_filled // self.stretch) * self.stretch
        kind = (self.cache.length, *settings.items())
        if kind in self.graphs:
            graph, result = self.graphs[kind]
            graph.replay()
            return result
        result = self._step(settings)  # the token itself, and the warm-up
        graph = torch.cuda.CUDAGraph()
        try:
            # This records the step without running it, so the cache stays as it is.
            with torch.cuda.graph(graph, pool=self.pool):
                self.graphs[kind] = graph, self._step(settings)
        except RuntimeError as e:
            reason = str(e.__context__ or e).split("\n")[0]  # the end of a capture fails as well
            raise Fault(f"no CUDA graph of a step: give --cuda_graphs false ({reason})") from e
        return result

    def _step(self, settings: dict[str, float]) -> tuple[Tensor, Tensor]:
        self.mask.index_fill_(3, self.column, 0)
        mask, columns = (x[..., : self.cache.length] for x in (self.mask, self.columns))
        masks = masks_of_layers(self.model, mask, columns, self.column)
        inputs = model_inputs(self.model, self.token, masks, self.cache, self.position)
        logits = self.model(**inputs).logits[:, -1]
        self.position.add_(1)
        self.column.add_(1)
        return draw(logits, self.uniform, **settings)


class FilledColumns(StaticCache):
    """Lets attention read only the first `length` of its columns."""

    def update(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        return tuple(x[:, :, : self.length] for x in super().update(*args, **options))


def masks_of_layers(
    model: nn.Module, mask: Tensor, columns: Tensor, column: Tensor
) -> Tensor | dict[str, Tensor]:
    """Make an attention mask of four dimensions for a token in `column`, or one for each kind of
    layer where a window hides old `columns`. transformers takes it as it is.
    """
    config = unwrap(model).config.get_text_config()
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    if not window or set(kinds or ()) == {"full_attention"}:
        return mask
    windowed = mask.masked_fill(columns <= column - window, -torch.inf)
    both = {"full_attention": mask, "sliding_attention": windowed}
    return both if len(set(kinds or ())) > 1 else windowed


def rounded_copy(model: nn.Module, half: torch.dtype) -> nn.Module:
    """Copy the model with its weights rounded to bfloat16 or float16, to decode with. Buffers
    keep their precision: rotary frequencies of 8 bits would put late tokens at wrong positions.
    """
    floats = [p for p in model.parameters() if p.is_floating_point()]
    rounded = {id(p): nn.Parameter(p.detach().to(half), requires_grad=False) for p in floats}
    found = copy.deepcopy(model, memo=rounded)
    # On a CPU the policy trains with plain attention, which repeats the cache for its heads.
    if model.device.type == "cpu" and unwrap(found)._supports_sdpa:
        # In each module: disable_dropout has given some a config of their own. Plain attention
        # without the mask that it needs would see the tokens to come.
        for module in (m for m in unwrap(found).modules() if hasattr(m, "config")):
            module.config._attn_implementation = "sdpa"
    return found
