"""The memory that a run takes, by its parts, and the limits with which it fits a GPU.

  weights      of the policy, the value model and a reward model, each in its own precision
  gradients    4 bytes for each weight that trains
  moments      8 bytes for each weight that trains: Adam's
  reference    a copy of the policy's weights; none with a new LoRA adapter or --kl_coef 0
  KV cache     rows x tokens x layers x 2 x KV heads x head size x 4 bytes (2 in half precision);
               a GPU's has a multiple of 128 tokens
  decoding     a copy of the weights in half precision; and what one layer makes of the prompts of
               the rows that are decoded together, or what is made of the logits of their next
               tokens
  activations  what one micro-batch keeps for its backward pass, counted in a forward pass with fake
               tensors, which have a size and hold nothing
  logits       of a chunk of tokens: logits, log-softmax and their gradients; or the gradient of the
               head, where that is larger

Rollout and update don't overlap: on a GPU the larger of the two counts. A CPU's allocator keeps
what is freed, in pieces that seldom fit what comes next: there the two add up and take 1.3 times
their size, and the libraries take 0.45 GB.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)

from common import ValueModel, base_model, disable_dropout, reference, store_in_bfloat16
from plumbing.decoding import round_up
from plumbing.errors import first_line
from plumbing.forward import WITHOUT_GRADIENT, chunk_size, worth_sharing
from plumbing.models import add_adapter, mask_is_known, model_inputs

LIBRARIES = 0.45e9  # of torch and transformers, on a CPU
KEPT = 1.3  # what a CPU's allocator holds of memory that comes and goes: benchmarks/memory.json
CONTEXT = 1.1e9  # of CUDA and its libraries, and the workspaces of captured graphs
FRAGMENTS = 1.1  # what a GPU's allocator holds, over what tensors take
# Bytes of a logit while a token is drawn: in float32, and its weight twice; in bfloat16, and once
# more for the graphs of fewer rows.
DRAWN = 16 + 4
SCORED = 14  # bytes of a logit while a log-prob is computed, and its gradient
WITH_BONUS = 23  # the same with an entropy bonus
SMALLEST = {"rollout_batch_size": 32, "micro_batch_tokens": 1024}
LARGEST = {"rollout_batch_size": 1024, "micro_batch_tokens": 16384}  # more is hardly faster


@dataclass(frozen=True)
class Counts:
    """What the formula has to know of the models of a run: bytes, but for `trained`."""

    weights: float  # of all models but the reference
    reference: float
    decoding_copy: float
    trained: int  # weights
    states: int  # of a token in the KV cache
    heads: float  # that read one KV head
    layers: int  # of one model
    head: float  # bytes: its bfloat16 copy, its gradient before that is added up
    hidden_size: int
    models: int  # that train
    vocab_size: int
    casts: float = 0.0  # that autocast makes of weights, and keeps for the backward pass
    kept: float = 0.0  # of a token, by all models that train, for the backward pass


def count(
    config: Any,
    model: PretrainedConfig,
    prompt_tokens: int,
    judge: PretrainedConfig | None = None,
) -> Counts:
    """Counts of a run with the flags `config`, the policy `model` and the reward model `judge`,
    from configs alone. Raises InputError where the model takes no adapter.
    """
    policy, models, others, copies = _models(config, model, judge)
    shape = policy.config.get_text_config()
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    head_size = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    decodes_in_half = config.bf16 or config.fp16
    precision = 2 if decodes_in_half else 4
    head = policy.get_output_embeddings().weight
    casts_head = config.bf16 and config.device != "cpu" and head.element_size() == 4
    of_head = (4 + 4 * casts_head) if config.lora_r == 0 else 2 * casts_head
    length = prompt_tokens + config.max_new_tokens
    found = Counts(
        weights=_bytes(*models, *others),
        reference=_bytes(*copies),
        # It shares the weights that are in bfloat16.
        decoding_copy=sum(2.0 * p.numel() for p in policy.parameters() if p.element_size() == 4)
        * bool(decodes_in_half),
        trained=sum(p.numel() for p in _weights(*models) if p.requires_grad),
        states=2 * shape.num_hidden_layers * heads * head_size * precision,
        heads=shape.num_attention_heads / heads,
        layers=shape.num_hidden_layers,
        head=of_head * head.numel(),
        hidden_size=shape.hidden_size,
        models=len(models),
        vocab_size=shape.vocab_size,
    )
    # What is kept of one row and of two: the difference is proportional to the rows, the rest is
    # what autocast has made of the weights.
    one, two = (len(models) * _kept(policy, rows, length, config) for rows in (1, 2))
    return dataclasses.replace(found, casts=2.0 * one - two, kept=(two - one) / length)


def _models(
    config: Any, model: PretrainedConfig, judge: PretrainedConfig | None
) -> tuple[nn.Module, list[nn.Module], list[nn.Module], list[nn.Module]]:
    """(The policy, the models that train, reward models, copies for a reference), without memory
    for their weights.
    """
    others, copies = [], []
    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(copy.deepcopy(model), dtype=torch.float32)
        if config.lora_r > 0:
            policy = add_adapter(policy, config.lora_r)
        if config.bf16:
            store_in_bfloat16(policy, torch.device(config.device))
        models = [policy]
        if config.script == "ppo":
            models.append(ValueModel.on_backbone_of(policy))
        if judge is not None:
            others.append(AutoModelForSequenceClassification.from_config(judge))
            if config.bf16:
                store_in_bfloat16(others[0].requires_grad_(False), torch.device(config.device))
        if config.kl_coef > 0 and config.lora_r == 0:
            with reference(policy, config.kl_coef, config.bf16) as copied:
                copies.append(copied)
    if config.disable_dropout:
        disable_dropout(*models)
    return policy, models, others, copies


def _weights(*models: nn.Module) -> list[nn.Parameter]:
    """The weights of the models, those that several share once."""
    return list({id(p): p for model in models for p in model.parameters()}.values())


def _bytes(*models: nn.Module) -> float:
    return float(sum(p.numel() * p.element_size() for p in _weights(*models)))


def _kept(model: nn.Module, rows: int, length: int, config: Any) -> int:
    """Bytes that the forward pass of the backbone over tokens (rows, length) keeps for the backward
    pass.
    """
    backbone = base_model(model).base_model
    backbone.train()
    if config.bf16 and config.device == "cpu":  # as in set_up_training
        backbone.set_attn_implementation("eager")
    kept, alive = {}, []  # a storage that is freed would lend its address to the next one

    def keep(x: torch.Tensor) -> torch.Tensor:
        alive.append(x.untyped_storage())
        kept[alive[-1]._cdata] = alive[-1].nbytes()
        return x

    with FakeTensorMode():
        _replace_by_fakes(backbone)
        own = {p.untyped_storage()._cdata for p in backbone.parameters()}
        tokens = torch.zeros(rows, length, dtype=torch.long)
        inputs = model_inputs(backbone, tokens, tokens + 1, use_cache=False)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=bool(config.bf16))
        saved = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
        with autocast, saved, mask_is_known(no_padding=False):
            backbone(**inputs)
    return sum(size for storage, size in kept.items() if storage not in own)


def _replace_by_fakes(model: nn.Module) -> None:
    """Weights and buffers on the CPU: attention on "meta" keeps other things."""
    for module in model.modules():
        for named in (module._parameters, module._buffers):
            for name, x in named.items():
                if x is not None:
                    there = torch.zeros(x.shape, dtype=x.dtype)
                    is_weight = isinstance(x, nn.Parameter)
                    named[name] = nn.Parameter(there, x.requires_grad) if is_weight else there


def estimate(
    counts: Counts, config: Any, prompt_tokens: int, memory: int | None = None
) -> dict[str, float]:
    """Bytes by part of a run on a GPU with so many bytes of memory; without, on a CPU. "peak" is
    what tensors take at the same time, "needed" the memory that the run fits into.
    """
    parts = {"weights": counts.weights, "gradients": 4.0 * counts.trained}
    parts |= {"moments": 8.0 * counts.trained, "reference": counts.reference}
    parts |= _rollout(counts, config, prompt_tokens, memory)
    parts |= _update(counts, config, prompt_tokens, memory)
    there = parts["weights"] + parts["moments"] + parts["reference"]
    rollout = parts["KV cache"] + parts["decoding"]
    update = parts["activations"] + parts["logits"]
    if memory is None:
        peak = needed = there + parts["gradients"] + KEPT * (rollout + update) + LIBRARIES
    else:
        peak = there + max(rollout, parts["gradients"] + update)
        needed = FRAGMENTS * peak + CONTEXT
    return parts | {"peak": peak, "needed": needed}


def _rollout(
    counts: Counts, config: Any, prompt_tokens: int, memory: int | None
) -> dict[str, float]:
    """The parts of a rollout or an evaluation, whichever decodes more rows at a time."""
    rows = prompts = 0
    for all_prompts, each in (
        (config.prompts_per_step, config.num_generations),
        (config.num_eval_prompts, config.eval_generations),
    ):
        together = max(1, min(all_prompts, config.rollout_batch_size // each))
        prompts, rows = max(prompts, together), max(rows, together * each)
    # First the prompts are read, then tokens are drawn, then completions get log-probs: the largest
    # counts. Without gradient a layer makes about .6 of what it keeps for a backward pass.
    of_layer = 0.6 * counts.kept / counts.models / counts.layers
    length = prompt_tokens + config.max_new_tokens
    made = max(prompts * prompt_tokens * of_layer, DRAWN * rows * counts.vocab_size)
    if memory is not None and (limit := config.micro_batch_tokens) is not None:
        completions = config.prompts_per_step * config.num_generations
        scored = min(completions, config.rollout_batch_size)
        tokens = scored * length
        made = max(made, min(tokens, WITHOUT_GRADIENT * limit) * of_layer)
    columns = length if memory is None else round_up(length)
    return {
        "KV cache": float(rows * columns * counts.states),
        "decoding": made + counts.decoding_copy,
    }


def _update(
    counts: Counts, config: Any, prompt_tokens: int, memory: int | None
) -> dict[str, float]:
    """The parts of the widest micro-batch. Its rows are a random choice: each may have a prompt of
    its own, and only where there are more rows than prompts is one read for several rows.
    """
    new, num_prompts = config.max_new_tokens, config.prompts_per_step
    rows = num_prompts * config.num_generations // config.num_mini_batches
    widths = {"prompt_width": prompt_tokens, "width": new, "on_cuda": memory is not None}
    if (limit := config.micro_batch_tokens) is not None:
        whole = limit // (prompt_tokens + new)
        shared = (limit - num_prompts * prompt_tokens) // new
        shares = whole >= num_prompts and worth_sharing(shared, num_prompts, **widths)
        rows = max(1, min(rows, shared if shares else whole))
    checkpointed = config.gradient_checkpointing
    shares = not checkpointed and worth_sharing(rows, num_prompts, **widths)
    read = num_prompts if shares else rows  # prompts
    tokens = read * prompt_tokens + rows * new
    kept = counts.kept * tokens
    if checkpointed:  # one layer at a time, and what goes into each, in float32
        inputs = 4 * counts.hidden_size * counts.layers * counts.models
        kept = kept / counts.layers + inputs * tokens
    elif read < rows:  # the keys and values of prompts are repeated, and then for each query head
        repeated = (rows - read) * prompt_tokens * counts.states
        kept += counts.models * repeated * (1 + counts.heads)
    logits = min(rows * new * counts.vocab_size, chunk_size(memory))
    scored = WITH_BONUS if config.entropy_coef > 0 else SCORED
    logits = max(scored * logits, counts.head)
    return {"activations": kept + counts.casts, "logits": logits}


def largest_limits(
    counts: Counts,
    config: Any,
    prompt_tokens: int,
    memory: int,
    smallest: dict[str, int] = SMALLEST,
) -> dict[str, int]:
    """The limits in `smallest`: the largest with which the run fits into a GPU with so many bytes
    of memory, doubled up to LARGEST, whatever `config` has for them.
    """
    limits = dict(smallest)
    for name in limits:
        while limits[name] < LARGEST[name]:
            tried = limits | {name: 2 * limits[name]}
            parts = estimate(counts, dataclasses.replace(config, **tried), prompt_tokens, memory)
            if parts["needed"] > memory:
                break
            limits = tried
    return limits


def choose_limits(config: Any, policy: nn.Module, task: Any) -> None:
    """Fill in --rollout_batch_size and --micro_batch_tokens where they aren't given: the largest
    with which this run fits into the free memory of its GPU. Prints them.
    """
    names = [name for name in SMALLEST if getattr(config, name, 0) is None]
    if not names:  # or a tool, which has its own
        return
    free, total = torch.cuda.mem_get_info(config.device)
    # What this run holds already is part of what the formula counts.
    memory = min(total, int(free + torch.cuda.memory_reserved(config.device) + CONTEXT))
    adapter = next(iter(getattr(policy, "peft_config", {}).values()), None)
    judge = task.rewards[-1].model.config if config.reward_model else None
    fewest = max(config.num_generations, config.eval_generations)  # completions of a prompt
    limits = {name: max(fewest, SMALLEST[name]) for name in names}
    why = f"{memory / 1e9:.1f} GB are free"
    try:
        wanted = dataclasses.replace(config, lora_r=adapter.r if adapter else 0)
        counts = count(wanted, base_model(policy).config, task.longest_prompt, judge)
        limits = largest_limits(counts, wanted, task.longest_prompt, memory, limits)
        wanted = dataclasses.replace(wanted, **limits)
        needed = estimate(counts, wanted, task.longest_prompt, memory)["needed"]
        if needed > memory:
            why += f", and this run needs about {needed / 1e9:.1f} (see tools/fit.py)"
    except Exception as e:  # whatever a model of another kind raises
        why = f"the memory of this model can't be estimated ({first_line(e)})"
    for name in names:
        setattr(config, name, limits[name])
    print(f"{why}: {' '.join(f'--{name} {limits[name]}' for name in names)}")
