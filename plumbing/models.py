"""Devices, models, LoRA adapters and tokenizers; what a model is given in a forward pass."""

from __future__ import annotations

import contextlib
import inspect
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    masking_utils,
)
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.activations import NewGELUActivation
from transformers.utils.hub import cached_file, has_file

from common import ValueModel, base_model, store_in_bfloat16
from plumbing.errors import InputError, first_line, optional_library

# Here, because all that runs a model imports this file. PyTorch takes cuDNN's attention on an H100,
# and its gradients are NaN for some masks (pytorch/pytorch#196678); on a B200 it decodes wrongly
# (pytorch/pytorch#193893). The other kernels stay.
torch.backends.cuda.enable_cudnn_sdp(False)


def model_inputs(
    model: nn.Module, tokens: Tensor, attention_mask: Tensor, **options: object
) -> dict[str, object]:
    """Arguments for a forward pass over tokens (B, L): position ids, and those of `options` that
    the model's forward takes.

    Without position ids GPT-2 puts the tokens of a left-padded row at shifted positions: 34 nats
    off in huggingface/trl#6800. attention_mask (B, C+L) also covers the C tokens in a KV cache.
    """
    accepted = inspect.signature(base_model(model).forward).parameters
    if "cache" in options and "cache" not in accepted:  # its name before transformers 5.24
        options["past_key_values"] = options.pop("cache")
    if "position_ids" not in options:
        position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        options["position_ids"] = position_ids[:, -tokens.shape[1] :]
    options["attention_mask"] = attention_mask.long()
    return {"input_ids": tokens} | {k: v for k, v in options.items() if k in accepted}


# Threads take turns: two at once would put each other's function back, and the last one would stay.
_replacing = threading.RLock()


@contextlib.contextmanager
def mask_is_known(no_padding: bool) -> Iterator[None]:
    """In a forward pass with an attention mask, tell transformers whether it masks anything.

    To choose a kernel it would ask the device, in every forward pass, and wait for the answer.
    Other threads are answered as they would be without this.
    """
    if not hasattr(masking_utils, "_ignore_causal_mask_sdpa"):  # another version of transformers
        yield
        return
    this_thread = threading.get_ident()

    def answer(padding_mask: Tensor | None, *args: object, **kwargs: object) -> bool:
        if threading.get_ident() != this_thread:
            return ask(padding_mask, *args, **kwargs)
        return (no_padding or padding_mask is None) and ask(None, *args, **kwargs)

    with _replacing:
        ask = masking_utils._ignore_causal_mask_sdpa
        try:
            masking_utils._ignore_causal_mask_sdpa = answer
            yield
        finally:
            masking_utils._ignore_causal_mask_sdpa = ask


NO_PEFT = "{}: adapters need peft: pip install peft"
TINY = Path(__file__).parent.parent / "tiny"


def pick_device(name: str | None) -> torch.device:
    """The named device, else the first there is of cuda, mps and cpu. Raises InputError.

    A CUDA device becomes the current one, on which CUDA graphs are captured.
    """
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    kinds = [kind for kind, there in present.items() if there] + ["cpu"]
    name, found = name or kinds[0], f"this machine, with this torch, has {', '.join(kinds)}"
    try:
        device = torch.empty(0, device=name).device
    except (AssertionError, RuntimeError) as e:  # no such device, an old driver, one that is busy
        raise InputError(f"--device {name}: {found}: {first_line(e)}") from e
    if device.type not in kinds:
        raise InputError(f"--device {name}: {found}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def fast_at_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 matrices faster than float32 ones."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )


def fast_at_float16(device: torch.device) -> bool:
    """Whether it is a GPU that multiplies float16 matrices faster than any others: Volta, Turing.

    Only decoding is done in float16: without gradients it needs no scaling of the loss.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 7


def load_policy(config: Any) -> tuple[nn.Module, Tokenizer]:
    """The policy that the flags name, on its device, and its tokenizer. Raises InputError.

    Under an adapter the weights of the base model are in bfloat16, if the flags ask for autocast.
    """
    policy = load_causal(config.model, getattr(config, "lora_r", 0))
    if config.bf16:
        store_in_bfloat16(policy, torch.device(config.device))
    return policy.to(config.device), load_tokenizer(config.model)


def load_causal(name: str, lora_r: int = 0) -> nn.Module:
    """Load a causal language model in float32: `tiny`, a folder, or a name on the model hub.

    With `lora_r` it gets a new LoRA adapter of that rank (Hu et al. 2021, arXiv 2106.09685). With
    an adapter, that of a folder too, only the adapter trains: a PeftModel. Raises InputError.
    """
    base = adapter_base(name)
    if base is None:
        model = _load_base(name)
        return add_adapter(model, lora_r) if lora_r > 0 else model
    if lora_r > 0:
        raise InputError(f"--lora_r {lora_r}: {name} holds an adapter already, leave the flag out")
    model = _load_base(base)
    peft = optional_library("peft", NO_PEFT.format(f"--model {name}"))
    try:
        return peft.PeftModel.from_pretrained(model, name, is_trainable=True)
    except Exception as e:  # peft raises anything for damaged files
        raise InputError(f"--model {name}: its adapter can't be trained: {first_line(e)}") from e


def adapter_base(name: str) -> str | None:
    """The base model of the adapter in the folder `name`, or None if there is no adapter."""
    file = Path(name) / "adapter_config.json"
    if not file.exists():
        return None
    try:
        base = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise InputError(f"--model {name}: {file.name} is damaged ({first_line(e)})") from e
    if not isinstance(base, str):
        raise InputError(f"--model {name}: {file.name} names no base_model_name_or_path, add it")
    return base


def add_adapter(model: PreTrainedModel, rank: int, task: str = "CAUSAL_LM") -> nn.Module:
    """Freeze the model and put a new LoRA adapter on all its linear layers except the head. The
    head of a classifier, task SEQ_CLS, trains as a whole.

    A is random and B is 0. alpha is 32 for any rank: Schulman et al. 2025, "LoRA without regret".
    """
    peft = optional_library("peft", NO_PEFT.format("--lora_r"))
    # GPT-2's linear layers store their weights transposed.
    transposed = any(type(module).__name__ == "Conv1D" for module in model.modules())
    where = {"target_modules": "all-linear", "fan_in_fan_out": transposed}
    sizes = {"r": rank, "lora_alpha": 32, "lora_dropout": 0.0}
    try:
        return peft.get_peft_model(model, peft.LoraConfig(task_type=task, **sizes, **where))
    except (TypeError, ValueError) as e:
        raise InputError(f"--lora_r {rank}: peft can't adapt this model: {first_line(e)}") from e


def _load_base(name: str) -> PreTrainedModel:
    """Load a causal language model, and refuse what is none. See also data.check_policy."""
    path = str(TINY) if name == "tiny" else name
    path = str(Path(path).resolve()) if Path(path).exists() else path  # an adapter names its base
    model, missing = from_hub_or_folder(AutoModelForCausalLM, path, "--model")
    if missing:
        fault = f"not a causal language model, its checkpoint has no {missing[0]}"
        raise InputError(f"--model {name}: {fault}")
    if hasattr(model, "peft_config"):  # from the hub; loaded for inference only
        raise InputError(f"--model {name}: is an adapter, download it and give its folder")
    return model.eval()


def load_tokenizer(name: str, flag: str = "--model") -> Tokenizer:
    """The tokenizer of a model; for an adapter without one, that of its base model."""
    if (Path(name) / "adapter_config.json").exists() and not any(Path(name).glob("tokenizer*")):
        name = adapter_base(name)
    return from_hub_or_folder(AutoTokenizer, str(TINY) if name == "tiny" else name, flag)[0]


def from_hub_or_folder(
    auto_class: type, name: str, flag: str, **changes: Any
) -> tuple[Any, list[str]]:
    """`auto_class.from_pretrained(name)`: (model or tokenizer, names of missing weights).

    Loads safetensors only, runs no remote code, and needs no network for a folder or for what is in
    the hub's cache. Raises InputError that says what else to give.
    """
    is_model = auto_class is not AutoTokenizer
    options = {"dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}
    options |= changes  # of the model's config, or of how it is loaded
    own_code = {"trust_remote_code": False}  # without it transformers would ask at the terminal

    def load(path: str) -> tuple[Any, list[str]]:
        if is_model:
            model, info = auto_class.from_pretrained(path, **options, **own_code)
            fuse_gelu(model)
            # Of another shape: only where the caller takes them for missing.
            return model, sorted({*info["missing_keys"], *(x[0] for x in info["mismatched_keys"])})
        tokenizer = auto_class.from_pretrained(path, **own_code)
        if len(tokenizer) < 2:  # transformers makes up an empty one where the files are missing
            raise OSError("its tokenizer files are missing")
        return tokenizer, []

    try:
        folder = name if Path(name).exists() else _cached_folder(name)
        try:
            if folder is not None:
                return load(folder)
        except Exception as e:
            # A cached copy may be incomplete: then ask the hub. A missing model file raises
            # OSError, missing tokenizer files raise anything.
            if folder == name or (is_model and not isinstance(e, OSError)):
                raise
        _require_on_hub(name, flag)
        return load(name)
    except InputError:
        raise
    except Exception as e:  # transformers raises OSError, ValueError, KeyError and others here
        kind, reason = auto_class.__name__.removeprefix("Auto"), first_line(e)
        if "trust_remote_code" in str(e):
            reason = (
                "it needs its own code, which is never run here; choose one that transformers has"
            )
        raise InputError(f"{flag} {name}: can't be loaded as a {kind}: {reason}") from e


def fuse_gelu(model: nn.Module) -> None:
    """Put PyTorch's own function in the place of GPT-2's activation, which is written out as eight
    operations: a third of the time, and of the memory that training keeps. Equal to rounding.
    """
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is NewGELUActivation:
                setattr(module, name, nn.GELU(approximate="tanh"))


def _cached_folder(name: str) -> str | None:
    """The folder of `name` in the hub's cache, or None. from_pretrained finds it as well, with
    local_files_only, but where there is no network it waits half a minute.
    """
    try:
        return str(Path(cached_file(name, "config.json", local_files_only=True)).parent)
    except (OSError, ValueError):  # not there, or no possible name
        return None


def _require_on_hub(name: str, flag: str) -> None:
    """Ask the model hub once for `name`: from_pretrained would retry for half a minute."""
    try:
        if has_file(name, "config.json"):
            return
        fault = "no such folder, and no model hub within reach;"
    except (OSError, ValueError) as e:
        fault = "no such folder, and no such model on the hub;"
        if "gated repository" in str(e):
            fault = "gated on the model hub; accept its terms and log in, or"
    ways_out = "a local folder" + (", or use --model tiny" if flag == "--model" else "")
    raise InputError(f"{flag} {name}: {fault} give {ways_out}")


def eos_token_ids(model: PreTrainedModel, tokenizer: Tokenizer) -> list[int]:
    """All ids that end a completion. Chat models have several: Llama 3, Phi 3.5."""
    found = set()
    for source in (model.generation_config, model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found |= set(ids if isinstance(ids, list) else [ids])
    return sorted(found - {None})


def context_length(model: PreTrainedModel) -> int | None:
    """The longest sequence for the model, in tokens; None where it has no limit (Bloom)."""
    config = model.config.get_text_config()
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)


def set_up_training(config: Any, *models: nn.Module) -> None:
    """Put policy and value model into training mode, as `config` says. Raises InputError."""
    for model in models:
        model.train()
        backbone = model.backbone if isinstance(model, ValueModel) else base_model(model).base_model
        if config.bf16 and backbone.device.type == "cpu":
            # PyTorch's fused attention is slower there than plain matrix products.
            backbone.set_attn_implementation("eager")
        if config.gradient_checkpointing:
            try:
                backbone.gradient_checkpointing_enable({"use_reentrant": False})
            except ValueError as e:
                raise InputError(f"--gradient_checkpointing: {first_line(e)}") from e


def logits_from(
    model: PreTrainedModel, hidden: Tensor, head: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """The end of the model's forward pass: last hidden states (n, D) -> logits (n, V), by its own
    head or by `head`.
    """
    config = model.config.get_text_config()
    logits = (head or model.get_output_embeddings())(hidden)
    if isinstance(scale := getattr(config, "logit_scale", None), float):  # Cohere
        logits = logits * scale
    if (scale := getattr(config, "logits_scaling", None)) is not None:  # Granite
        logits = logits / scale
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma
        logits = cap * torch.tanh(logits / cap)
    return logits
