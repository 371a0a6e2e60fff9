"""Does a job fit? The memory of a run by its parts, before anything is downloaded but the config.

  python tools/fit.py --script grpo --model Qwen/Qwen2.5-0.5B-Instruct --prompt_tokens 200 \\
      --max_new_tokens 256

The memory is that of a GPU, with one here or without; --device cpu asks for a CPU's. All flags of
the script are understood.

  weights      4 bytes each, in float32; of the policy, the value model and a reward model
  gradients    4 bytes for each weight that trains
  moments      8 bytes for each weight that trains: Adam's
  reference    4 bytes for each weight of the policy; none with a LoRA adapter or --kl_coef 0
  KV cache     rows x tokens x layers x 2 x KV heads x head size x 4 bytes (2 in bfloat16)
  decoding     its logits, rows x vocabulary x 4 bytes, four times; a bfloat16 copy of the weights
  activations  what one micro-batch keeps for its backward pass, counted in a forward pass with fake
               tensors, which have a size and hold nothing
  logits       of a chunk of tokens, four times: logits, log-softmax, probabilities, gradient;
               eight times with an entropy bonus, which keeps as much again

Rollout and update don't overlap: on a GPU the larger of the two counts. A CPU's allocator keeps
what is freed, in pieces that seldom fit what comes next: there the two add up and take 1.3 times
their size, and the libraries take 0.45 GB.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from common import ValueModel, base_model, disable_dropout
from plumbing.config import parse_flags
from plumbing.errors import InputError, first_line
from plumbing.forward import CHUNK
from plumbing.models import TINY, add_adapter
from plumbing.run import run_main

DEVICES_GB = (8, 16, 24, 40, 80)
LIBRARIES = 0.45e9  # of torch and transformers, on a CPU
KEPT = 1.3  # what a CPU's allocator holds of memory that comes and goes: benchmarks/memory.json


def estimate(script: str, config: Any, prompt_tokens: int) -> dict[str, float]:
    """Bytes by part; "peak" is their sum, of rollout and update the larger. Raises InputError."""
    with torch.device("meta"):
        policy = _of_config(AutoModelForCausalLM, config.model, "--model")
        shape, vocab_size = policy.config.get_text_config(), policy.config.vocab_size
        policy = add_adapter(policy, config.lora_r) if config.lora_r > 0 else policy
        models, judges = [policy], []
        if script == "ppo":
            models.append(ValueModel.on_backbone_of(policy))
        if config.reward_model is not None:
            kind = AutoModelForSequenceClassification
            judges = [_of_config(kind, config.reward_model, "--reward_model")]
    if config.disable_dropout:
        disable_dropout(*models)
    trained = _count(*models, trained=True)
    parts = {"weights": 4.0 * (_count(*models) + _count(*judges)), "gradients": 4.0 * trained}
    parts["moments"] = 8.0 * trained
    if config.kl_coef > 0 and config.lora_r == 0:
        parts["reference"] = 4.0 * _count(policy)

    new, num_prompts = config.max_new_tokens, config.prompts_per_step
    rows = num_prompts * config.num_generations
    decoded = min(rows, config.rollout_batch_size)
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    head_size = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    states = 2 * shape.num_hidden_layers * heads * head_size * (2 if config.bf16 else 4)
    parts["KV cache"] = float(decoded * (prompt_tokens + new) * states)
    parts["decoding"] = 4.0 * 4 * decoded * vocab_size + 2.0 * _count(policy) * bool(config.bf16)

    # The widest micro-batch. Its rows are a random choice: each may have a prompt of its own, and
    # only where there are more rows than prompts is one read for several rows.
    rows //= config.num_mini_batches
    if (limit := config.micro_batch_tokens) is not None:
        fit = limit // (prompt_tokens + new)
        shared = (limit - num_prompts * prompt_tokens) // new
        rows = max(1, min(rows, fit if fit < num_prompts else shared))
    checkpointed = config.gradient_checkpointing
    read = rows if checkpointed else min(rows, num_prompts)  # prompts
    tokens = read * prompt_tokens + rows * new
    kept = sum(_kept(model, rows, -(-tokens // rows), config) for model in models)
    if checkpointed:  # one layer at a time, and what goes into each
        layers = shape.num_hidden_layers
        kept = kept / layers + len(models) * 4 * tokens * shape.hidden_size * layers
    elif read < rows:  # the keys and values of prompts are repeated: twice, about, as heads are too
        kept += 2 * len(models) * (rows - read) * prompt_tokens * states
    parts["activations"] = float(kept)
    chunk = max(1, (CHUNK if config.device == "cpu" else 16 * CHUNK) // vocab_size)
    copies = 8 if config.entropy_coef > 0 else 4
    parts["logits"] = 4.0 * copies * min(rows * new, chunk) * vocab_size
    return parts | {"peak": peak(parts, config.device)}


def peak(parts: dict[str, float], device: str) -> float:
    """The memory of a run at its largest, in bytes."""
    there = sum(parts.get(name, 0.0) for name in ("weights", "moments", "reference"))
    rollout = parts["KV cache"] + parts["decoding"]
    update = parts["activations"] + parts["logits"]
    if device == "cpu":
        return there + parts["gradients"] + KEPT * (rollout + update) + LIBRARIES
    return there + max(rollout, parts["gradients"] + update)


def _of_config(kind: type, name: str, flag: str) -> nn.Module:
    """A model of that name's config, in training mode. Raises InputError."""
    try:
        config = AutoConfig.from_pretrained(str(TINY) if name == "tiny" else name)
        return kind.from_config(config, dtype=torch.float32).train()
    except (OSError, ValueError) as e:
        raise InputError(f"{flag} {name}: its config can't be read ({first_line(e)})") from e


def _count(*models: nn.Module, trained: bool = False) -> int:
    """The number of weights, those shared by several models once."""
    weights = {id(p): p for model in models for p in model.parameters()}
    return sum(p.numel() for p in weights.values() if p.requires_grad or not trained)


def _kept(model: nn.Module, rows: int, length: int, config: Any) -> int:
    """Bytes that the forward pass over tokens (rows, length) keeps for the backward pass."""
    backbone = model.backbone if isinstance(model, ValueModel) else base_model(model).base_model
    if config.bf16 and config.device == "cpu":  # as in set_up_training
        backbone.set_attn_implementation("eager")
    kept, alive = {}, []  # a storage that is freed would lend its address to the next one

    def keep(x: torch.Tensor) -> torch.Tensor:
        alive.append(x.untyped_storage())
        kept[alive[-1]._cdata] = alive[-1].nbytes()
        return x

    with FakeTensorMode():
        for module in backbone.modules():  # on the CPU: attention on "meta" keeps other things
            for named in (module._parameters, module._buffers):
                for name, x in named.items():
                    if x is not None:
                        there = torch.zeros(x.shape, dtype=x.dtype)
                        is_weight = isinstance(x, nn.Parameter)
                        named[name] = nn.Parameter(there, x.requires_grad) if is_weight else there
        own = {p.untyped_storage()._cdata for p in backbone.parameters()}
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=bool(config.bf16))
        with autocast, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            backbone(input_ids=torch.zeros(rows, length, dtype=torch.long), use_cache=False)
    return sum(size for storage, size in kept.items() if storage not in own)


def describe(parts: dict[str, float], device: str) -> str:
    """The parts in GB, and which devices the sum fits."""
    lines = [f"  {name:12} {size / 1e9:7.2f} GB" for name, size in parts.items()]
    fits = ", ".join(f"{gb} GB" for gb in devices_for(parts["peak"] / 1e9, device))
    largest = f"none of {', '.join(map(str, DEVICES_GB))} GB"
    return "\n".join([*lines, f"fits: {fits or largest}"])


def devices_for(peak: float, device: str) -> list[int]:
    """The sizes of memory, in GB, that a peak of so many GB fits into."""
    # 0.5 GB for the CUDA context, and a tenth for what the allocator can't use.
    needed = peak if device == "cpu" else 1.1 * peak + 0.5
    return [gb for gb in DEVICES_GB if needed <= gb]


def config_of(script: str, flags: list[str], device: str) -> Any:
    """The config of a run on "cuda" or "cpu", with a GPU here or without. Raises InputError."""
    config = importlib.import_module(script).Config
    config = parse_flags(config, __doc__, [*flags, "--device", "cpu", "--overwrite"])
    if device == "cuda" and config.model != "tiny" and "--bf16" not in " ".join(flags):
        config.bf16 = True  # as the scripts choose on every GPU since 2020
    config.device = device
    return config


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise InputError(message.removeprefix("argument "))


def main(args: list[str] | None = None) -> None:
    parser = _Parser(add_help=False, allow_abbrev=False)  # --help is that of the script
    parser.add_argument("--script", choices=("ppo", "grpo", "rloo"), default="ppo")
    parser.add_argument("--prompt_tokens", type=int, default=64)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options, flags = parser.parse_known_args(args)
    script, length, device = options.script, options.prompt_tokens, options.device
    if length < 1:
        raise InputError(f"--prompt_tokens {length}: must be a whole number above 0")
    config = config_of(script, flags, device)
    parts = estimate(script, config, length)
    print(f"{script}.py --model {config.model}, prompts of {length} tokens, on {device}:")
    print(describe(parts, device))


if __name__ == "__main__":
    run_main(main)
