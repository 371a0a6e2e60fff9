"""Does a job fit? The memory of a run by its parts, before anything is downloaded but the config.

python tools/fit.py --script grpo --model Qwen/Qwen2.5-0.5B-Instruct --prompt_tokens 200 \\
    --max_new_tokens 256

The memory is that of a GPU, with one here or without; --device cpu asks for a CPU's. All flags of
the script are understood. The model is built without memory, as fake tensors; what a micro-batch
keeps for the backward pass is counted in a fake forward pass, the rest is arithmetic:

  weights      4 bytes each, in float32; of the policy, the value model and a reward model
  gradients    4 bytes for each weight that trains
  moments      8 bytes for each weight that trains: Adam's
  reference    4 bytes for each weight of the policy; none with a LoRA adapter or --kl_coef 0
  KV cache     rows x tokens x layers x 2 x KV heads x head size x 4 bytes (2 in bfloat16)
  decoding     its logits, rows x vocabulary x 4 bytes, four times; a bfloat16 copy of the weights
  activations  what one micro-batch keeps for its backward pass, by the fake forward pass
  logits       of a chunk of tokens, four times: logits, log-softmax, probabilities, gradient;
               eight times with an entropy bonus, which keeps as much again

Rollout and update don't overlap: on a GPU the larger of the two counts. A CPU's allocator keeps
what is freed, in pieces that seldom fit what comes next: there the two add up and take 1.3 times
their size, and the libraries take 0.45 GB.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DynamicCache,
)

from common import ValueModel, base_model
from plumbing.config import parse_flags
from plumbing.errors import InputError, first_line
from plumbing.forward import CHUNK
from plumbing.models import TINY, add_adapter, mask_is_known, model_inputs
from plumbing.run import run_main

DEVICES_GB = (8, 16, 24, 40, 80)
LIBRARIES = 0.45e9  # of torch and transformers, on a CPU
KEPT = 1.3  # what a CPU's allocator holds of memory that comes and goes: benchmarks/memory.json


def estimate(script: str, config: object, prompt_tokens: int) -> dict[str, float]:
    """Bytes by part; "peak" is their sum, of rollout and update the larger. Raises InputError."""
    with torch.device("meta"):
        policy = _of_config(AutoModelForCausalLM, config.model, "--model")
        shape, vocab_size = policy.config.get_text_config(), policy.config.vocab_size
        policy = add_adapter(policy, config.lora_r) if config.lora_r > 0 else policy
        models = [policy]
        if config.reward_model is not None:
            kind = AutoModelForSequenceClassification
            judge = _of_config(kind, config.reward_model, "--reward_model").requires_grad_(False)
        if script == "ppo":
            with_reward = config.value_init == "reward_model"
            models.append(ValueModel.on_backbone_of(judge if with_reward else policy))
    if config.bf16 and config.device == "cpu":  # as in set_up_training
        for model in models:
            _backbone(model).set_attn_implementation("eager")
    with FakeTensorMode():
        _onto_cpu(models)
        parts = {"weights": 4.0 * _count(*models)}
        trained = _count(*models, trained=True)
        parts |= {"gradients": 4.0 * trained, "moments": 8.0 * trained}
        if config.reward_model is not None:
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

        widest = _widest_micro_batch(config, prompt_tokens)
        parts["activations"] = sum(
            _activations(m, shape, config, widest, prompt_tokens) for m in models
        )
        tokens = min(widest[0] * config.max_new_tokens, max(1, _chunk(config.device) // vocab_size))
        copies = 8 if config.entropy_coef > 0 else 4
        parts["logits"] = 4.0 * copies * tokens * vocab_size
    return parts | {"peak": peak(parts, config.device)}


def _widest_micro_batch(config: object, prompt_tokens: int) -> tuple[int, int]:
    """(Its rows, their distinct prompts, each of which is read once): see micro_batches. Its rows
    are a random choice, so nearly every row can have a prompt of its own.
    """
    num_prompts, new = config.prompts_per_step, config.max_new_tokens
    rows = num_prompts * config.num_generations // config.num_mini_batches
    rows = min(rows, config.micro_batch_size or rows)
    if (limit := config.micro_batch_tokens) is not None:
        one_each = limit // (prompt_tokens + new)
        more = (limit - num_prompts * prompt_tokens) // new
        rows = max(1, min(rows, one_each if one_each < num_prompts else more))
    return rows, min(rows, num_prompts)


def _activations(
    model: nn.Module, shape: object, config: object, sizes: tuple[int, int], prompt_tokens: int
) -> float:
    """What a micro-batch of (rows, prompts) keeps."""
    if not config.gradient_checkpointing:
        return _kept(model, sizes, prompt_tokens, config.max_new_tokens, config.bf16)
    # One layer at a time, and what goes into each. A prompt is read for each of its completions.
    rows, num_layers = sizes[0], shape.num_hidden_layers
    kept = _kept(model, (rows, rows), prompt_tokens, config.max_new_tokens, config.bf16)
    tokens = rows * (prompt_tokens + config.max_new_tokens)
    return kept / num_layers + 4 * tokens * shape.hidden_size * num_layers


def peak(parts: dict[str, float], device: str) -> float:
    """The larger of rollout and update, with what is there in both. On a CPU their sum, and more:
    freed memory is kept there, in pieces that don't fit what comes next.
    """
    there = sum(parts.get(name, 0.0) for name in ("weights", "moments", "reference"))
    rollout = parts["KV cache"] + parts["decoding"]
    update = parts["activations"] + parts["logits"]
    if device == "cpu":
        return there + parts["gradients"] + KEPT * (rollout + update) + LIBRARIES
    return there + max(rollout, parts["gradients"] + update)


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
        # In float32, as load_policy does, whatever the checkpoint is saved in.
        return kind.from_config(config, dtype=torch.float32).train()
    except (OSError, ValueError) as e:
        raise InputError(f"{flag} {name}: its config can't be read ({first_line(e)})") from e


def _backbone(model: nn.Module) -> nn.Module:
    return model.backbone if isinstance(model, ValueModel) else base_model(model).base_model


def _count(*models: nn.Module, trained: bool = False) -> int:
    """The number of weights, those shared by several models once."""
    weights = {id(p): p for model in models for p in model.parameters()}
    return sum(p.numel() for p in weights.values() if p.requires_grad or not trained)


def _kept(
    model: nn.Module, sizes: tuple[int, int], prompt_tokens: int, new_tokens: int, bf16: bool
) -> int:
    """Bytes that the forward pass over a micro-batch keeps for the backward pass: as
    completion_states, whole rows where each has a prompt of its own, else prompts first, and
    the last token never.
    """
    backbone, (rows, num_prompts) = _backbone(model), sizes
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, int] = {}
    alive = []  # a storage that is freed would lend its address to the next one

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in own:
            alive.append(storage)
            kept[storage._cdata] = storage.nbytes()
        return x

    def forward(rows: int, length: int, before: int = 0, **options: object) -> None:
        tokens = torch.zeros(rows, length, dtype=torch.long)
        mask = torch.ones(rows, before + length, dtype=torch.long)
        backbone(**model_inputs(backbone, tokens, mask, **options))

    autocast = torch.autocast("cpu", torch.bfloat16, enabled=bf16)
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
    with mask_is_known(backbone, no_padding=False), autocast, hooks:
        if rows == num_prompts:
            forward(rows, prompt_tokens + new_tokens - 1, use_cache=False)
        else:
            options = {"cache": DynamicCache(config=backbone.config), "use_cache": True}
            forward(num_prompts, prompt_tokens, **options)
            options["cache"].reorder_cache(torch.zeros(rows, dtype=torch.long))
            forward(rows, max(1, new_tokens - 1), prompt_tokens, **options)
    return sum(kept.values())


def describe(parts: dict[str, float], device: str) -> str:
    """The parts in GB, and which devices the sum fits."""
    lines = [f"  {name:12} {size / 1e9:7.2f} GB" for name, size in parts.items() if name != "peak"]
    peak = parts["peak"] / 1e9
    fits = ", ".join(f"{gb} GB" for gb in devices_for(peak, device))
    largest = f"none of {', '.join(map(str, DEVICES_GB))} GB"
    return "\n".join([*lines, f"  {'peak':12} {peak:7.2f} GB", f"fits: {fits or largest}"])


def devices_for(peak: float, device: str) -> list[int]:
    """The sizes of memory, in GB, that a peak of so many GB fits into."""
    # 0.5 GB for the CUDA context, and a tenth for what the allocator can't use.
    needed = peak if device == "cpu" else 1.1 * peak + 0.5
    return [gb for gb in DEVICES_GB if needed <= gb]


def config_of(script: str, flags: list[str], device: str) -> object:
    """The config of a run on "cuda" or "cpu", with a GPU here or without. Raises InputError."""
    config = importlib.import_module(script).Config
    config = parse_flags(config, __doc__, [*flags, "--device", "cpu"])
    if device == "cuda" and config.model != "tiny" and "--bf16" not in " ".join(flags):
        config.bf16 = True  # as the scripts choose on every GPU since 2020
    config.device = device
    return config


def main(args: list[str] | None = None) -> None:
    args = list(sys.argv[1:] if args is None else args)
    options = {"--script": "ppo", "--prompt_tokens": "64", "--device": "cuda"}
    for name in options:
        parts = [arg.split("=", 1) if arg.startswith(f"{name}=") else [arg] for arg in args]
        args = [x for part in parts for x in part]
        if name in args:
            where = args.index(name)
            if where + 1 == len(args):
                raise InputError(f"{name}: needs a value")
            options[name] = args[where + 1]
            del args[where : where + 2]
    script, length, device = options.values()
    for name, choices in (("--script", ("ppo", "grpo", "rloo")), ("--device", ("cuda", "cpu"))):
        if options[name] not in choices:
            listed = f"{', '.join(choices[:-1])} or {choices[-1]}"
            raise InputError(f"{name} {options[name]}: choose {listed}")
    if not length.isdecimal() or int(length) == 0:
        raise InputError(f"--prompt_tokens {length}: must be a whole number above 0")
    config = config_of(script, args, device)
    parts = estimate(script, config, int(length))
    print(f"{script}.py --model {config.model}, prompts of {length} tokens, on {device}:")
    print(describe(parts, device))


if __name__ == "__main__":
    run_main(main)
