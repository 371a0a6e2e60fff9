"""Devices, models, adapters, tokenizers: how they are loaded and made ready to train."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.activations import NewGELUActivation

from common import Rollout, clear_cache, unwrap
from forward import completion_logprobs, completion_values, micro_batches
from plumbing.errors import InputError, blame

TINY = Path(__file__).parent.parent / "tiny"


# --- Devices ---


def pick_device(name: str | None) -> torch.device:
    """Return the named device, else the first there is of cuda, mps and cpu. Raises InputError.

    A CUDA device becomes the current one, on which CUDA graphs are captured.
    """
    if name is None:
        name = "mps" if torch.backends.mps.is_available() else "cpu"
        name = "cuda" if torch.cuda.is_available() else name
        if name == "cpu" and shutil.which("nvidia-smi"):
            print("On the CPU: this torch is a CPU build, or too new for the GPU's driver.")
    with blame(f"--device {name}"):  # no such device, or this torch has no code for its generation
        one = torch.ones(1, device=name)
        one.item()  # waits for a kernel: an error of the device comes with it
    device = one.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def fast_half(device: torch.device) -> torch.dtype | None:
    """Return the half precision whose matrix products are faster on the device than those of
    float32.

    Float16 (Volta and Turing: V100, T4) is only for decoding: without gradients it needs no
    scaling of the loss.
    """
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16
        return torch.float16 if torch.cuda.get_device_capability(device)[0] == 7 else None
    # On an AMD EPYC with AVX-512 and no AMX it takes 0.6 of the time: docs/precision.md.
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if device.type == "cpu" and has_bf16 else None


# --- Loading ---


def folder_of(name: str) -> str:
    """Say where a model is: an embedded one beside this program, `tiny` or `tiny/cups`; others
    where their name says.
    """
    return str(TINY.parent / name) if name in ("tiny", "tiny/cups") else name


def is_adapter(name: str) -> bool:
    """Say whether the folder `name` holds an adapter, as peft saves it."""
    return (Path(name) / "adapter_config.json").exists()


def load_policy(config: Any, flag: str = "model") -> tuple[nn.Module, Tokenizer]:
    """Load the policy that the flag names, on its device, and its tokenizer. Raises InputError.

    It is in float32. With --lora_r, or an adapter as --model, only the adapter trains: a
    PeftModel, whose frozen weights are in bfloat16 where the run computes in it.
    """
    name = base = getattr(config, flag)
    rank = config.lora_r if flag == "model" else 0
    has_adapter = rank > 0 or is_adapter(name)
    hint = "" if Path(folder_of(name)).exists() else " (no folder, so a name on the hub)"
    with blame(f"--{flag} {name}" + f" --lora_r {rank}" * (rank > 0) + hint):
        if has_adapter:
            import peft  # before the model is loaded, which takes time
        if is_adapter(name):
            if rank > 0:
                raise InputError(f"--lora_r {rank}: {name} holds an adapter, leave the flag out")
            base = peft.PeftConfig.from_pretrained(name).base_model_name_or_path
        dtype = torch.bfloat16 if has_adapter and config.bf16 else torch.float32
        model = load(AutoModelForCausalLM, base, dtype=dtype)
        layers = DynamicCache(config=model.config).layers
        if model._is_stateful or any("Linear" in type(layer).__name__ for layer in layers):
            raise InputError(f"{name}: a {type(model).__name__} has layers other than attention")
        # The head stays float32, and an embedding that shares its weights. So do norms and biases:
        # they are small, and on a CPU a norm refuses mixed types.
        model.get_output_embeddings().float()
        for p in model.parameters():
            p.data = p.data.float() if p.dim() == 1 else p.data
        if is_adapter(name):
            model = peft.PeftModel.from_pretrained(model, name, is_trainable=True)
        elif rank > 0:
            model = add_adapter(model, rank)
        model = model.to(config.device)
        set_up_training(config, model)
        tokenizer = load_tokenizer(name, base)
        # Saved with the model, so that it stops where its training did.
        model.generation_config.eos_token_id = eos_token_ids(model, tokenizer, config.stop) or None
        return model, tokenizer


def load_reference(config: Any, task: Any) -> nn.Module | None:
    """Load the model that --reference names, for a Task's prompts; None without the flag.
    InputError.
    """
    if config.reference is None:
        return None
    model, its_tokenizer = load_policy(config, "reference")
    if its_tokenizer.get_vocab() != task.tokenizer.get_vocab():
        raise InputError(f"--reference {config.reference}: its tokens aren't those of --model")
    longest, limit = max(map(len, task.tokens.values())), context_length(model)
    if limit is not None and longest + config.max_new_tokens > limit:
        fault = f"a prompt of {longest} tokens and {config.max_new_tokens} new ones don't fit into"
        raise InputError(f"--reference {config.reference}: {fault} its context of {limit}")
    task.frozen_models.append(model)
    return model


def load(auto_class: type, name: str, new_head: bool = False, **options: Any) -> PreTrainedModel:
    """Load a model of safetensors: an embedded one, a folder, or a name on the model hub. Raises
    InputError where the checkpoint lacks weights; with `new_head` those of a head may be missing,
    and start at 0.
    """
    path = folder_of(name)
    if Path(path, "metrics.jsonl").exists() and Path(path, "model").is_dir():
        raise InputError(f"{name}: is the folder of a run: give {Path(name, 'model')}")
    path = str(Path(path).resolve()) if Path(path).exists() else path  # an adapter names its base
    options = {"dtype": torch.float32, "use_safetensors": True} | options  # not as it was saved
    options |= {"trust_remote_code": False}  # or transformers asks at the terminal
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, info = auto_class.from_pretrained(path, **options)
    # They are random numbers now: what the checkpoint lacks, or has in another size.
    lost = {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}
    backbone = f"{model.base_model_prefix}."
    if new_head:
        for p in map(model.get_parameter, lost):
            if len(p) == 1:  # of the one output
                nn.init.zeros_(p)
        # BERT's pooler is a part of the head.
        lost = {x for x in lost if x.startswith(backbone) and "pooler" not in x}
    if lost:
        fault = f"its checkpoint has no {min(lost)}, or in another size"
        raise InputError(f"{name}: is no {auto_class.__name__[4:]}, {fault}")
    unused = sorted(x for x in info["unexpected_keys"] if not new_head or x.startswith(backbone))
    if unused:
        kind, first = type(model).__name__, unused[0]
        print(f"{name}: {len(unused)} weights aren't loaded, {first} for one: a {kind} has none.")
    fuse(model)
    return model


def load_tokenizer(name: str, base: str | None = None) -> Tokenizer:
    """Load the tokenizer of a model; for an adapter without one, that of its base model.
    InputError.
    """
    name = base if base and not any(Path(name).glob("tokenizer*")) else name
    with blame(f"the tokenizer of {name}"):
        tokenizer = AutoTokenizer.from_pretrained(folder_of(name), trust_remote_code=False)
        if len(tokenizer) < 2:  # transformers makes up an empty one where the files are missing
            raise InputError(f"{name}: has no tokenizer files")
        return tokenizer


def add_adapter(model: PreTrainedModel, rank: int, task: str = "CAUSAL_LM") -> nn.Module:
    """Freeze the model and put a new LoRA adapter on all its linear layers except the head (Hu et
    al. 2021, arXiv 2106.09685). The head of a classifier, task SEQ_CLS, trains as a whole.

    A is random and B is 0. alpha is 32 for any rank: Schulman et al. 2025, "LoRA without regret".
    """
    import peft

    # GPT-2's linear layers store their weights transposed.
    transposed = any(type(module).__name__ == "Conv1D" for module in model.modules())
    where = {"target_modules": "all-linear", "fan_in_fan_out": transposed}
    sizes = {"r": rank, "lora_alpha": 32, "lora_dropout": 0.0}
    return peft.get_peft_model(model, peft.LoraConfig(task_type=task, **sizes, **where))


def eos_token_ids(model: PreTrainedModel, tokenizer: Tokenizer, stop: Any = ()) -> list[int]:
    """Find all ids that end a completion. Chat models have several: Llama 3, Phi 3.5. A string of
    `stop` that is a token of its own, "<|im_end|>" say, is one more.
    """
    found = {tokenizer.get_added_vocab().get(text) for text in stop}
    for source in (model.generation_config, model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found |= set(ids if isinstance(ids, list) else [ids])
    return sorted(found - {None})


def context_length(model: PreTrainedModel) -> int | None:
    """Return the longest sequence for the model, in tokens; None where it has no limit (Bloom)."""
    config = model.config.get_text_config()
    # LongRoPE (Phi-3) reads a longer row by other frequencies, and with it all rows of its batch.
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "longrope":
        return config.original_max_position_embeddings
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)


def set_up_training(config: Any, model: nn.Module) -> None:
    """Put a model into training mode, with the kind of attention and the checkpointing that suit
    the run, and spread its weights where the run rounds them. Raises InputError.

    It comes before disable_dropout, whose copies of a config don't follow a change (rounded_copy in
    decoder.py changes them too).
    """
    # The head stays in float32 where the rest is in bfloat16: TF32 makes its products far faster.
    torch.backends.cuda.matmul.allow_tf32 = config.bf16
    model.train()
    backbone = unwrap(model).base_model
    if config.bf16 and backbone.device.type == "cpu":
        # PyTorch's fused attention is slower there than plain matrix products.
        backbone.set_attn_implementation("eager")
    if config.gradient_checkpointing:
        with blame("--gradient_checkpointing"):
            backbone.gradient_checkpointing_enable({"use_reentrant": False})
    # A forward pass that rounds weights to half precision doesn't see small steps, unless they
    # begin between the numbers to which it rounds. The reference begins as the policy: KL 0.
    if config.half:
        spread_weights(backbone, config.half)


@torch.no_grad()
def spread_weights(backbone: nn.Module, half: torch.dtype = torch.bfloat16) -> None:
    """Put each weight of a linear layer that trains, in place, at a random point among the float32
    numbers that round to the same number of bfloat16 or float16: docs/precision.md.

    Autocast rounds these weights in each forward pass, or --fp16 those of the sampler. Most
    checkpoints lie on the grid of either type, and there a step shorter than half a spacing would
    be rounded away, in all weights. From random points a step of a tenth carries a tenth of them
    over. No forward pass that rounds changes before a step. Zeros stay as they are, and so do
    numbers that the type can't hold. Below 6e-5, where the numbers of float16 lie evenly, a
    weight is spread over a part of its interval.
    """
    numbers = torch.Generator(backbone.device).manual_seed(0)  # its own: no draw of the run changes
    options = {"generator": numbers, "dtype": torch.int32, "device": backbone.device}
    half_spacing = 2**15 if half is torch.bfloat16 else 2**12  # in steps between float32 numbers
    # The rest isn't spread: autocast leaves embedding, norms and experts in float32. (The sampler
    # rounds them too, and lags behind in them.)
    linear = [m for m in backbone.modules() if type(m).__name__ in ("Linear", "Conv1D")]
    for p in (p for m in linear for p in m.parameters(recurse=False) if p.requires_grad):
        rounded = p.to(half).float()
        # Float32 numbers read as integers are in order.
        steps = torch.randint(1 - half_spacing, half_spacing, p.shape, **options)
        bits = rounded.view(torch.int32) + steps
        p.copy_(bits.view(torch.float32).where((rounded != 0) & rounded.isfinite(), p))


def fit_micro_batch(config: Any, models: list[nn.Module], prompts: dict[str, tuple]) -> None:
    """On a GPU, halve config.micro_batch_tokens until a forward and backward pass of the widest
    micro-batch that can come fits. The gradient doesn't depend on it. prompts: tokens by prompt.
    """
    if not config.device.startswith("cuda"):
        return
    prompt_length = max(map(len, prompts.values()))
    asked, part = config.micro_batch_tokens, _widest_micro_batch(config, models[0], prompt_length)
    trained = [p for model in models for p in model.parameters() if p.requires_grad]
    while True:
        try:
            # Beside it: Adam's two moments, and what a Decoder may keep.
            _adam = [torch.empty_like(p) for p in trained for _ in range(2)]
            free = torch.cuda.mem_get_info()[0]
            _kept = torch.empty(free // 5, dtype=torch.uint8, device=models[0].device)
            _one_pass(config, models, part)
            break
        except torch.OutOfMemoryError:
            if len(part.finished) == 1:
                raise
            config.micro_batch_tokens = min(config.micro_batch_tokens, part.tokens.numel()) // 2
            part = _widest_micro_batch(config, models[0], prompt_length)
        finally:
            _adam = _kept = None
            for p in trained:
                p.grad = None
            clear_cache()
    torch.cuda.reset_peak_memory_stats()  # memory/peak_gb is that of the run
    if config.micro_batch_tokens < asked:
        print(f"--micro_batch_tokens {asked} doesn't fit: it is {config.micro_batch_tokens} here.")


def _widest_micro_batch(config: Any, policy: nn.Module, prompt_length: int) -> Rollout:
    """Make the widest one that the flags allow: of full rows, G for each prompt."""
    N, G, T = config.prompts_per_step, config.num_generations, config.max_new_tokens
    vocab_size = len(policy.get_input_embeddings().weight)
    numbers = torch.Generator().manual_seed(0)  # its own: no draw of the run changes
    prompts = torch.randint(vocab_size, (N, prompt_length), generator=numbers)
    completions = torch.randint(vocab_size, (N * G, T), generator=numbers)
    tokens = torch.cat([prompts.repeat_interleave(G, dim=0), completions], dim=1).to(policy.device)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, 0] = False  # padding: attention takes a mask for it, and with that more memory
    completion_mask = mask[:, -T:]  # in the place of the log-probs too, which nobody reads
    rollout = Rollout(tokens, mask, completion_mask, completion_mask, mask[:, -1])
    return micro_batches(rollout, max_tokens=config.micro_batch_tokens)[0][1]


def _one_pass(config: Any, models: list[nn.Module], part: Rollout) -> None:
    """Run forward and backward over a micro-batch."""
    options = {"bf16": config.bf16, "entropy_grad": getattr(config, "entropy_coef", 0) > 0}
    logprobs, entropy = completion_logprobs(models[0], part, config.temperature, **options)
    (logprobs + entropy).sum().backward()
    for value_model in models[1:]:
        completion_values(value_model, part, bf16=config.bf16).sum().backward()


# --- Layers that take fewer operations, equal to rounding ---


def fuse(model: nn.Module) -> None:
    """Put PyTorch's own functions in the place of those that the model writes out, in place.

    GPT-2's activation is eight operations there, a norm is six: a third of the time of a small
    model, and of the memory that training keeps.
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is NewGELUActivation:
                setattr(module, name, nn.GELU(approximate="tanh"))
            elif type(child).__name__ in RMS_NORMS:
                norm = nn.RMSNorm(child.weight.shape, child.variance_epsilon, device="meta")
                norm.weight = child.weight
                setattr(module, name, norm)
            elif type(child).__name__ in GATED_MLPS:
                setattr(module, name, GatedMLP(child))


class GatedMLP(nn.Module):
    """Compute down(act(gate(x)) * up(x)), and keep two of the four wide tensors: the backward pass
    makes the other two again, without a matrix product.
    """

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.act_fn = mlp.act_fn

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        # An adapter on `down_proj` would have its matrix product made again too: 8% of a pass.
        if not torch.is_grad_enabled() or type(self.down_proj) is not nn.Linear:
            return self._down(gate, up)
        return checkpoint(self._down, gate, up, use_reentrant=False, preserve_rng_state=False)

    def _down(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(gate) * up)


RMS_NORMS = [f"{family}RMSNorm" for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3")]
# By name: BitNet's has the same parts, and another forward pass.
GATED_MLPS = """LlamaMLP MistralMLP Qwen2MLP Qwen3MLP SmolLM3MLP GemmaMLP Gemma2MLP Gemma3MLP
GraniteMLP CohereMLP Olmo2MLP""".split()
