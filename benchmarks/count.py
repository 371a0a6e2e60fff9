"""What a GPU would have to do, counted without one: kernels, bytes of logits, memory of an update.

  python benchmarks/count.py                 # five models; prints JSON, a line per model
  python benchmarks/count.py --models gpt2

The project's own functions decode some tokens and compute the gradient of a micro-batch on a
pretended GPU (tests/pretended_cuda.py), whose tensors are fake: they have shape, type and device,
and hold nothing. So nothing is computed, but every operation is seen. Views launch no kernel; any
other operation counts as one, so the figures are a little too low. Models are built from configs.

  graph          kernels of a token that are replayed as a CUDA graph, drawing it included
  eager          kernels of a token that are launched one by one
  draw           kernels of sampling.draw alone
  draw_bytes     what it reads and writes, per row and vocabulary entry
  scored_bytes   the same for log-probs without gradient, per token and vocabulary entry
  trained_bytes  with gradient, forward and backward, logits in chunks
  micro_batch    kernels of a micro-batch of 32 rows, forward and backward
  update_gb      what the update of a LoRA run or of a whole model holds, beside the weights, and
  estimated_gb   what plumbing/memory.py says of it
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import json
import sys
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
)

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "benchmarks"), str(REPOSITORY / "tests")]

import memory  # noqa: E402
from pretended_cuda import Graph, is_there, pretended_cuda, tensors_in  # noqa: E402

import sampling  # noqa: E402
from common import Rollout, disable_dropout, store_in_bfloat16  # noqa: E402
from plumbing.decoding import Decoder  # noqa: E402
from plumbing.forward import completion_logprobs, micro_batches  # noqa: E402
from plumbing.memory import estimate  # noqa: E402
from plumbing.models import add_adapter  # noqa: E402
from tools import fit  # noqa: E402

# Of the published config.json files.
MODELS = {
    "gpt2": memory.MODELS["gpt2"],
    "SmolLM2-135M": LlamaConfig(
        **dict(zip(memory.SHAPE, (576, 1536, 30, 9, 3))), vocab_size=49152, tie_word_embeddings=True
    ),
    "Qwen2.5-0.5B": memory.MODELS["Qwen2.5-0.5B"],
    "Qwen3-0.6B": Qwen3Config(
        **dict(zip(memory.SHAPE, (1024, 3072, 28, 16, 8))), head_dim=128, **memory.QWEN
    ),
    "gemma-3-270m": Gemma3TextConfig(
        **dict(zip(memory.SHAPE, (640, 2048, 18, 4, 1))),
        head_dim=256,
        vocab_size=262144,
        sliding_window=512,
    ),
}
SIZES = "--prompts_per_step 4 --num_generations 8 --max_new_tokens 256"
UPDATES = (f"{SIZES} --micro_batch_tokens 1024", f"{SIZES} --micro_batch_tokens 8192 --lora_r 16")
VIEWS = set(
    """view _unsafe_view expand transpose t permute slice select unsqueeze squeeze as_strided alias
    detach split split_with_sizes unbind chunk lift_fresh empty empty_like new_empty unflatten
    _reshape_alias diagonal unfold is_pinned""".split()
)


class Counter(TorchDispatchMode):
    """Counts the operations on the device, and the bytes of logits that they read and write."""

    def __init__(self, vocab_size: int = 0, not_logits: int = 0) -> None:
        super().__init__()
        self.vocab_size, self.not_logits = vocab_size, not_logits
        self.kernels = collections.Counter()  # by name
        self.bytes = 0  # of logits, and what has their shape, that were read or written
        self.graphs: list[int] = []  # the kernels of each graph that was replayed

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if launches(function, args, kwargs, result):
            self.kernels[function.overloadpacket.__name__] += 1
            # A gather reads a few entries of a row, and "out" is the result.
            is_gather = function.overloadpacket is torch.ops.aten.gather
            given = [x for name, x in (kwargs or {}).items() if name != "out"]
            touched = tensors_in(() if is_gather else args, *given, result)
            self.bytes += sum(x.nbytes for x in touched if self.is_of_logits(x))
        return result

    def is_of_logits(self, x: Tensor) -> bool:
        if x.dim() > 2:  # draw looks at blocks of 128 logits
            return self.vocab_size <= x.shape[1:].numel() < self.vocab_size + 128
        return x.dim() == 2 and x.shape[1] == self.vocab_size and x.shape[0] != self.not_logits


def launches(function, args: tuple, kwargs: dict | None, result: object) -> bool:
    """Whether an operation on the device launches a kernel."""
    name = function.overloadpacket.__name__
    if str(function).startswith("prim.") or name in VIEWS:
        return False
    return any(map(is_there, tensors_in(args, *(kwargs or {}).values(), result)))


def attention(
    q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """As PyTorch calls its memory-efficient kernel: a bool mask becomes a bias first, whose width
    is a multiple of 8.
    """
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    if torch.is_autocast_enabled("cpu"):
        q, k, v = (x.bfloat16() for x in (q, k, v))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            zero = torch.zeros((), dtype=q.dtype, device=q.device)
            attn_mask = torch.where(attn_mask, zero, float("-inf")).to(q.dtype)
        if attn_mask.shape[-1] % 8:
            padded = F.pad(attn_mask, (0, 8 - attn_mask.shape[-1] % 8))
            attn_mask = padded[..., : k.shape[2]]
        attn_mask = attn_mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    of_efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return of_efficient(q, k, v, attn_mask, q.requires_grad, 0.0, is_causal, scale=scale)[0]


def rms_norm(x, shape, weight=None, eps=None):
    """One kernel, as on CUDA. On a CPU it is several: a layer norm takes its place."""
    return torch.ops.aten.native_layer_norm(x, shape, weight, None, eps)[0]


@contextlib.contextmanager
def fake_gpu() -> Iterator[None]:
    """A pretended GPU with fake tensors, that has the kernels of a real one."""
    with (
        pretended_cuda(fake=True),
        mock.patch.object(F, "scaled_dot_product_attention", attention),
        mock.patch.object(F, "rms_norm", rms_norm),
    ):
        yield


def model_on_gpu(config: PretrainedConfig, lora_r: int = 0) -> nn.Module:
    """A model of that config whose weights hold nothing, those that don't train in bfloat16."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
        if lora_r > 0:
            model = add_adapter(model, lora_r)
            store_in_bfloat16(model, torch.device("cuda"))
    disable_dropout(model)
    made = {}  # tied weights stay tied
    for module in model.modules():
        for tensors in (module._parameters, module._buffers, vars(module)):
            for name, x in tensors.items():
                if not isinstance(x, Tensor):
                    continue
                if id(x) not in made:
                    there = torch.zeros(x.shape, dtype=x.dtype, device="cuda")
                    is_weight = isinstance(x, nn.Parameter)
                    made[id(x)] = nn.Parameter(there, x.requires_grad) if is_weight else there
                tensors[name] = made[id(x)]
    return model.eval()


def count_decoding(model: nn.Module, rows: int, prompt_tokens: int, new_tokens: int) -> Counter:
    """The operations of a rollout; at most 7 new tokens: at every eighth it reads from the GPU."""
    ids = torch.arange(rows // 8).repeat_interleave(prompt_tokens).view(-1, prompt_tokens)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    options = {"num_generations": 8, "eos_token_ids": [1], "pad_token_id": 0}
    options["decoder"] = Decoder(model, torch.bfloat16)
    with Counter() as counter, torch.no_grad():

        def replay(graph: Graph) -> None:
            counter.graphs.append(sum(launches(f, a, k, made) for f, a, k, made in graph.steps))

        with mock.patch.object(Graph, "replay", replay):
            sampling.generate(model, ids, mask, max_new_tokens=new_tokens, **options)
    return counter


def rollout_on_gpu(prompts: int, generations: int, prompt_tokens: int, new_tokens: int) -> Rollout:
    """A rollout of these sizes, with one token of padding on each side; its copy on the CPU, by
    which micro-batches are planned, is real.
    """
    ids = torch.arange(prompts).repeat_interleave(generations).unsqueeze(1)
    ids = ids.repeat(1, prompt_tokens + new_tokens)
    seen = torch.ones_like(ids, dtype=torch.bool)
    seen[:generations, 0] = seen[0, -1] = False
    drawn = seen[:, prompt_tokens:]
    here = Rollout(ids, seen, drawn, torch.zeros(drawn.shape), drawn.all(1))
    there = Rollout(*(getattr(here, name).to("cuda") for name in vars(here)))
    there.copy_on_cpu = here
    return there


def count_update(model: nn.Module, rollout: Rollout) -> Counter:
    """The operations of a micro-batch: the log-probs, and their gradient, in bfloat16."""
    config = model.config.get_text_config()
    with Counter(config.vocab_size, not_logits=config.hidden_size) as counter:
        completion_logprobs(model.train(), rollout, 1.0, bf16=True)[0].sum().backward()
    return counter


@torch.no_grad()
def count_scoring(model: nn.Module, rollout: Rollout) -> Counter:
    """The operations of a forward pass without gradient, as of the reference."""
    config = model.config.get_text_config()
    with Counter(config.vocab_size, not_logits=config.hidden_size) as counter:
        completion_logprobs(model.eval(), rollout, 1.0, bf16=True, entropy=False)
    return counter


class Held(TorchDispatchMode):
    """The bytes on the device that are held by tensors made under it: now, and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.storages: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in filter(is_there, tensors_in(result)):
            self.note(x.untyped_storage())
        return result

    def note(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self.storages:
            return

        def forget(_: weakref.ref) -> None:
            del self.storages[address]
            self.now -= size

        self.storages[address] = weakref.ref(storage, forget)
        self.now += size
        self.peak = max(self.peak, self.now)


def memory_of_update(
    config: PretrainedConfig, flags: str, prompt_tokens: int = 200
) -> tuple[float, float]:
    """GB that the gradients and the widest micro-batch of a GRPO run take: (counted, estimated)."""
    # The second micro-batch finds the gradients of the first one.
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        run = fit.config_of("grpo", ["--model", folder, *flags.split()], "cuda")
        counts = fit.counts_of(run, prompt_tokens)
    sizes = (run.prompts_per_step, run.num_generations, prompt_tokens, run.max_new_tokens)
    with fake_gpu():
        model, rollout = model_on_gpu(config, run.lora_r).train(), rollout_on_gpu(*sizes)
        parts = micro_batches(rollout, max_tokens=run.micro_batch_tokens)
        _, widest = max(parts, key=lambda part: part[1].tokens.numel())
        with Held() as held:
            for _ in range(2):
                held.peak = held.now
                completion_logprobs(model, widest, 1.0, bf16=True)[0].sum().backward()
        found = estimate(counts, run, prompt_tokens, torch.cuda.mem_get_info()[1])
    update = sum(found[part] for part in ("gradients", "activations", "logits"))
    return held.peak / 1e9, update / 1e9


def count_draw(vocab_size: int, rows: int) -> Counter:
    """The operations that draw a token for each row from logits in bfloat16."""
    logits = torch.zeros(rows, vocab_size, dtype=torch.bfloat16, device="cuda")
    uniform = torch.zeros(rows, device="cuda")
    with Counter(vocab_size) as counter, torch.no_grad():
        sampling.draw(logits, uniform, 1.0)
    return counter


def count(config: PretrainedConfig) -> dict[str, int | float]:
    """The figures of a model, as the head of this file explains them."""
    vocab_size = config.get_text_config().vocab_size
    with fake_gpu():
        model = model_on_gpu(config)
        fewer, more = (count_decoding(model, 64, 40, new_tokens) for new_tokens in (6, 7))
        drawn = count_draw(vocab_size, rows := 64)
        rollout = rollout_on_gpu(8, 4, 40, 60)
        scored, trained = count_scoring(model, rollout), count_update(model, rollout)
    entries = vocab_size * int(rollout.copy_on_cpu.completion_mask.sum())
    return {
        "graph": more.graphs[-1],
        "eager": more.kernels.total() - fewer.kernels.total(),
        "draw": drawn.kernels.total(),
        "draw_bytes": round(drawn.bytes / rows / vocab_size, 1),
        "scored_bytes": round(scored.bytes / entries, 1),
        "trained_bytes": round(trained.bytes / entries, 1),
        "micro_batch": trained.kernels.total(),
    }


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    for name in parser.parse_args(args).models:
        print(json.dumps({"model": name} | count(MODELS[name])), flush=True)
        for flags in UPDATES:
            counted, estimated = memory_of_update(MODELS[name], flags)
            found = {"update_gb": round(counted, 2), "estimated_gb": round(estimated, 2)}
            print(json.dumps({"model": name, "flags": flags} | found), flush=True)


if __name__ == "__main__":
    main()
