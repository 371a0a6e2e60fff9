"""Loading: the device, the policy, a new or a trained adapter on it, tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import cached_file, has_file

from common import InputError, first_line, logits_from, model_inputs

if TYPE_CHECKING:
    from peft import PeftModel

TINY = Path(__file__).parent.parent / "tiny"


def pick_device(name: str | None) -> torch.device:
    """The named device, or the first there is of cuda, mps, cpu. Raises InputError."""
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    kinds = [kind for kind, there in present.items() if there] + ["cpu"]
    try:
        device = torch.empty(0, device=name or kinds[0]).device
    except (AssertionError, RuntimeError):  # no such device; torch without CUDA asserts
        device = None
    if device is None or device.type not in kinds:
        raise InputError(f"--device {name}: this machine, with this torch, has {', '.join(kinds)}")
    return device


def fast_at_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies matrices of bfloat16 faster than of float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )


def load_policy(name: str, lora_r: int = 0) -> PreTrainedModel | PeftModel:
    """Load a causal language model in float32: `tiny`, a folder, or a name on the model hub.

    With `lora_r` a new adapter of that rank is put on it, and trains alone (LoRA: Hu et al. 2021,
    arXiv 2106.09685). A folder that holds an adapter is loaded on its base model, and the adapter
    trains on. Raises InputError.
    """
    base = adapter_base(name)
    if base is None:
        model = _load_causal(name)
        return add_adapter(model, lora_r) if lora_r > 0 else model
    if lora_r > 0:
        raise InputError(f"--lora_r {lora_r}: {name} holds an adapter already, leave the flag out")
    model, peft = _load_causal(base), _import_peft(f"--model {name}")
    try:
        return peft.PeftModel.from_pretrained(model, name, is_trainable=True)
    except Exception as e:  # whatever the files make peft raise
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


def add_adapter(model: PreTrainedModel, rank: int) -> PeftModel:
    """Freeze the model and put a new LoRA adapter on each of its linear layers but the head.

    Random A and B = 0: the policy starts as the base model. alpha 32 whatever the rank, as in
    Schulman et al. 2025, "LoRA without regret".
    """
    peft = _import_peft("--lora_r")
    # GPT-2's layers store their weights transposed.
    transposed = any(type(module).__name__ == "Conv1D" for module in model.modules())
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=32,
        lora_dropout=0.0,
        target_modules="all-linear",
        fan_in_fan_out=transposed,
    )
    return peft.get_peft_model(model, config)


def _import_peft(flag: str) -> ModuleType:
    try:
        import peft
    except ImportError as e:
        raise InputError(f"{flag}: adapters need peft: pip install peft") from e
    return peft


def _load_causal(name: str) -> PreTrainedModel:
    path = str(TINY) if name == "tiny" else name
    path = str(Path(path).resolve()) if Path(path).exists() else path  # an adapter names its base
    model, missing = from_hub_or_folder(AutoModelForCausalLM, path, "--model")
    fault = f"--model {name}: not a causal language model,"
    if missing:
        raise InputError(f"{fault} its checkpoint has no {missing[0]}")
    if hasattr(model, "peft_config"):  # transformers put it on its base, to be read only
        raise InputError(f"--model {name}: is an adapter, download it and give its folder")
    # Reading two rows that differ in their last token only shows whether it is causal.
    vocab_size = model.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(8).remainder(vocab_size).repeat(2, 1)
    tokens[1, -1] = (tokens[1, -1] + 1) % vocab_size
    with torch.no_grad():
        try:
            mask = torch.ones_like(tokens)
            logits = model.eval()(**model_inputs(model, tokens, mask)).logits
            backbone = model.base_model
            hidden = backbone(**model_inputs(backbone, tokens, mask)).last_hidden_state
            own = logits_from(model, hidden)
            decodes = _decodes_from_its_cache(model, torch.stack([tokens[0], tokens[0].flip(0)]))
        except Exception:  # whatever a model of another kind raises
            decodes = False
    if not decodes:
        raise InputError(f"--model {name}: can't be used, it doesn't decode with a key-value cache")
    first, second = logits[:, :-1]
    if (first - second).abs().max() > 1e-4 * logits.abs().max():  # BERT, say
        raise InputError(f"{fault} its logits depend on later tokens")
    if (own - logits).abs().max() > 1e-4 * logits.abs().max():
        raise InputError(
            f"--model {name}: can't be used, its last layer makes logits in an unknown way"
        )
    return model


def _decodes_from_its_cache(model: PreTrainedModel, tokens: Tensor) -> bool:
    """Whether the last of tokens (2, L) gets its logits from the cache alone, which is there row by
    row: exchanging the rows of the cache must exchange the logits. A state kept elsewhere (Mamba,
    RWKV) doesn't follow when finished rows are dropped.
    """
    mask = torch.ones_like(tokens)
    cache = DynamicCache(config=model.config)
    options = {"past_key_values": cache, "use_cache": True}
    model(**model_inputs(model, tokens[:, :-1], mask[:, :-1], **options))
    cache.batch_select_indices(torch.tensor([1, 0]))
    last = model(**model_inputs(model, tokens.flip(0)[:, -1:], mask, **options)).logits[:, -1]
    expected = model(**model_inputs(model, tokens, mask)).logits[:, -1].flip(0)
    return bool((last - expected).abs().max() <= 1e-3 * expected.abs().max())


def load_tokenizer(name: str, flag: str = "--model") -> PreTrainedTokenizerBase:
    """Load the tokenizer that belongs to a model. An adapter may leave it with its base model."""
    if (Path(name) / "adapter_config.json").exists() and not any(Path(name).glob("tokenizer*")):
        name = adapter_base(name)
    return from_hub_or_folder(AutoTokenizer, str(TINY) if name == "tiny" else name, flag)[0]


def from_hub_or_folder(auto_class: type, name: str, flag: str) -> tuple[Any, list[str]]:
    """`auto_class.from_pretrained(name)`: (model or tokenizer, names of missing weights).

    Safetensors only, no remote code. A folder, or a copy in the hub's cache, needs no network.
    Raises InputError that names the ways out.
    """
    is_model = auto_class is not AutoTokenizer
    options = {"dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}

    def load(path: str) -> tuple[Any, list[str]]:
        if is_model:
            model, info = auto_class.from_pretrained(path, **options)
            return model, sorted(info["missing_keys"])
        tokenizer = auto_class.from_pretrained(path)
        if len(tokenizer) < 2:  # transformers makes an empty one up where the files are missing
            raise OSError("its tokenizer files are missing")
        return tokenizer, []

    try:
        folder = name if Path(name).exists() else _cached_folder(name)
        try:
            if folder is not None:
                return load(folder)
        except Exception as e:
            # A cached copy may be partial, then the hub has the rest. A missing model file raises
            # OSError, missing tokenizer files anything.
            if folder == name or (is_model and not isinstance(e, OSError)):
                raise
        _require_on_hub(name, flag)
        return load(name)
    except InputError:
        raise
    except Exception as e:  # transformers raises OSError, ValueError, KeyError and others here
        kind = auto_class.__name__.removeprefix("Auto")
        raise InputError(f"{flag} {name}: can't be loaded as a {kind}: {first_line(e)}") from e


def _cached_folder(name: str) -> str | None:
    """The folder of `name` in the hub's cache, or None."""
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
        gated = "gated repository" in str(e)
        fault = "no such folder, and no such model on the hub;"
        fault = "gated on the model hub; accept its terms and log in, or" if gated else fault
    ways_out = "a local folder" + (", or use --model tiny" if flag == "--model" else "")
    raise InputError(f"{flag} {name}: {fault} give {ways_out}")


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every id that ends a completion. Chat models have several (Llama 3, Phi 3.5): missing one,
    rows never stop.
    """
    found = set()
    for source in (model.generation_config, model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found |= set(ids if isinstance(ids, list) else [ids])
    return sorted(found - {None})


def context_length(model: PreTrainedModel) -> int | None:
    """Longest sequence that the model reads, in tokens; None where it has no bound (Bloom)."""
    config = model.config.get_text_config()
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
