"""Does a job fit? The memory of a run by its parts, before anything is downloaded but the config.

python tools/fit.py --script grpo --model Qwen/Qwen2.5-0.5B-Instruct --prompt_tokens 200 \\
    --max_new_tokens 256 --device cuda

All flags of the script are understood. The model is built without memory, as fake tensors; what a
micro-batch keeps for the backward pass is counted in a fake forward pass, the rest is arithmetic:

  weights      4 bytes each, in float32; of the policy, the value model and a reward model
  gradients    4 bytes for each weight that trains
  moments      8 bytes for each weight that trains: Adam's
  reference    4 bytes for each weight of the policy; none with a LoRA adapter or --kl_coef 0
  KV cache     rows x tokens x layers x 2 x KV heads x head size x 4 bytes (2 in bfloat16)
  decoding     its logits, rows x vocabulary x 4 bytes, four times; a bfloat16 copy of the weights
  activations  what one micro-batch keeps for its backward pass, by the fake forward pass
  logits       of a chunk of tokens, four times: logits, log-softmax, probabilities, gradient

Rollout and update don't overlap: the larger of the two counts. On a CPU the libraries take 0.45 GB.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from common import ValueModel
from plumbing.config import parse_flags
from plumbing.errors import InputError, first_line
from plumbing.forward import CHUNK, mask_is_known, model_inputs
from plumbing.loading import TINY, add_adapter
from plumbing.runs import run_main

DEVICES_GB = (8, 16, 24, 40, 80)
LIBRARIES = 0.45e9  # of torch and transformers, on a CPU


def estimate(script: str, config: object, prompt_tokens: int) -> dict[str, float]:
    """Bytes by part; "peak" is their sum, of rollout and update the larger. Raises InputError."""
    with torch.device("meta"):
        policy = _of_config(AutoModelForCausalLM, config.model, "--model")
        shape, vocab_size = policy.config.get_text_config(), policy.config.vocab_size
        policy = add_adapter(policy, config.lora_r) if config.lora_r > 0 else policy
        models = [policy, ValueModel.on_backbone_of(policy)] if script == "ppo" else [policy]
    with FakeTensorMode():
        _onto_cpu(models)
        parts = {"weights": 4.0 * _count(*models)}
        trained = _count(*models, trained=True)
        parts |= {"gradients": 4.0 * trained, "moments": 8.0 * trained}
        if config.reward_model is not None:
            kind = AutoModelForSequenceClassification
            judge = _of_config(kind, config.reward_model, "--reward_model")
            parts["weights"] += 4.0 * _count(judge)
        if config.kl_coef > 0 and config.lora_r == 0:
            parts["reference"] = 4.0 * _count(policy)

        rows = config.prompts_per_step * config.num_generations
        length = prompt_tokens + config.max_new_tokens
        decoded = min(rows, config.rollout_batch_size)
        heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
        head_size = (
            getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
        )
        width = 2 if config.bf16 else 4
        states = 2 * shape.num_hidden_layers * heads * head_size
        parts["KV cache"] = float(decoded * length * states * width)
        parts["decoding"] = 4.0 * 4 * decoded * vocab_size
        if config.bf16:
            parts["decoding"] += 2.0 * _count(policy)

        rows = _widest_micro_batch(config, rows, prompt_tokens)
        parts["activations"] = sum(
            _activations(m, shape, config, rows, prompt_tokens) for m in models
        )
        tokens = min(rows * config.max_new_tokens, max(1, _chunk(config.device) // vocab_size))
        parts["logits"] = 4.0 * 4 * tokens * vocab_size
    return parts | {"peak": _peak(parts, config.device)}


def _widest_micro_batch(config: object, rows: int, prompt_tokens: int) -> int:
    """Its rows: each prompt counts once, as in plumbing/forward.py."""
    widest = min(rows // config.num_mini_batches, config.micro_batch_size or rows)
    if config.micro_batch_tokens is None:
        return widest
    per_row = config.max_new_tokens + prompt_tokens / config.num_generations
    return max(1, min(widest, int(config.micro_batch_tokens / per_row)))


def _activations(
    model: nn.Module, shape: object, config: object, rows: int, prompt_tokens: int
) -> float:
    """What a micro-batch keeps: its completions, and its prompts once each."""
    # Under gradient checkpointing a prompt is read for each of its completions.
    prompts = rows if config.gradient_checkpointing else -(-rows // config.num_generations)
    kept = _kept(model, rows, config.max_new_tokens, config.bf16)
    kept += _kept(model, prompts, prompt_tokens, config.bf16)
    if not config.gradient_checkpointing:
        return kept
    # One layer at a time, and what goes into each.
    tokens = rows * config.max_new_tokens + prompts * prompt_tokens
    num_layers = shape.num_hidden_layers
    return kept / num_layers + 4 * tokens * shape.hidden_size * num_layers


def _peak(parts: dict[str, float], device: str) -> float:
    """The larger of rollout and update, with what is there in both."""
    there = sum(parts.get(name, 0.0) for name in ("weights", "moments", "reference"))
    rollout = parts["KV cache"] + parts["decoding"]
    update = parts["gradients"] + parts["activations"] + parts["logits"]
    return there + max(rollout, update) + (LIBRARIES if device == "cpu" else 0.0)


def _chunk(device: str) -> int:
    return CHUNK if device == "cpu" else 16 * CHUNK


def _onto_cpu(models: list[nn.Module]) -> None:
    """Fake tensors on the CPU for all weights and buffers; those that are shared stay shared."""
    made: dict[int, torch.Tensor] = {}
    for module in [module for model in models for module in model.modules()]:
        for named in (module._parameters, module._buffers):
            for name, x in named.items():
                if x is None:
                    continue
                if id(x) not in made:
                    there = torch.zeros(x.shape, dtype=x.dtype)
                    is_weight = isinstance(x, nn.Parameter)
                    made[id(x)] = nn.Parameter(there, x.requires_grad) if is_weight else there
                named[name] = made[id(x)]


def _of_config(kind: type, name: str, flag: str) -> nn.Module:
    """A model of that name's config, in training mode. Raises InputError."""
    try:
        config = AutoConfig.from_pretrained(str(TINY) if name == "tiny" else name)
        return kind.from_config(config).train()
    except (OSError, ValueError) as e:
        raise InputError(f"{flag} {name}: its config can't be read ({first_line(e)})") from e


def _count(*models: nn.Module, trained: bool = False) -> int:
    """The number of weights, those shared by several models once."""
    weights = {id(p): p for model in models for p in model.parameters()}
    return sum(p.numel() for p in weights.values() if p.requires_grad or not trained)


def _kept(model: nn.Module, rows: int, length: int, bf16: bool) -> int:
    """Bytes that a forward pass over (rows, length) tokens keeps for the backward pass."""
    backbone = model.backbone if isinstance(model, ValueModel) else model.base_model
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, int] = {}

    tokens = torch.zeros(rows, length, dtype=torch.long)
    inputs = model_inputs(backbone, tokens, torch.ones_like(tokens), use_cache=False)
    alive = []  # a storage that is freed would lend its address to the next one

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in own:
            alive.append(storage)
            kept[storage._cdata] = storage.nbytes()
        return x

    autocast = torch.autocast("cpu", torch.bfloat16, enabled=bf16)
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
    with mask_is_known(no_padding=False), autocast, hooks:
        backbone(**inputs)
    return sum(kept.values())


def describe(parts: dict[str, float], device: str) -> str:
    """The parts in GB, and which devices the sum fits."""
    lines = [f"  {name:12} {size / 1e9:7.2f} GB" for name, size in parts.items() if name != "peak"]
    peak = parts["peak"] / 1e9
    # 0.5 GB for the CUDA context, and a tenth for what the allocator can't use.
    needed = peak if device == "cpu" else 1.1 * peak + 0.5
    fits = [f"{gb} GB" for gb in DEVICES_GB if needed <= gb]
    lines += [f"  {'peak':12} {peak:7.2f} GB"]
    return "\n".join([*lines, f"fits: {', '.join(fits) or 'none of these'}"])


def main(args: list[str] | None = None) -> None:
    args = list(sys.argv[1:] if args is None else args)
    options = {"--script": "ppo", "--prompt_tokens": "64"}
    for name in options:
        if name in args:
            where = args.index(name)
            if where + 1 == len(args):
                raise InputError(f"{name}: needs a value")
            options[name] = args[where + 1]
            del args[where : where + 2]
    script, length = options["--script"], options["--prompt_tokens"]
    if script not in ("ppo", "grpo", "rloo"):
        raise InputError(f"--script {script}: choose ppo, grpo or rloo")
    if not length.isdecimal() or int(length) == 0:
        raise InputError(f"--prompt_tokens {length}: must be a whole number above 0")
    config = parse_flags(importlib.import_module(script).Config, __doc__, args)
    parts = estimate(script, config, int(length))
    print(f"{script}.py --model {config.model}, prompts of {length} tokens, on {config.device}:")
    print(describe(parts, config.device))


if __name__ == "__main__":
    run_main(main)
