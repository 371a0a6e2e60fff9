"""What is saved of a run: the state from which --resume goes on, and the model."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import shutil
import zlib
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from plumbing.errors import Fault, InputError, first_line

# The settings that a resumed run may change.
FREE_ON_RESUME = """resume overwrite output_dir device num_steps eval_every save_every sample_every
save_best tensorboard wandb micro_batch_size micro_batch_tokens rollout_batch_size
gradient_checkpointing compile record_tokens""".split()

FIELDS = """weights optimizer generators torch cuda step metrics samples tokens first_metrics
best warned""".split()  # of a checkpoint


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write `state` to `path`, followed by a checksum. Raises Fault.

    It is complete, and on the disk, before it takes its name: whenever the process dies, `path` is
    the new state or the one before it.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(exist_ok=True)
        torch.save(state, new)
        with new.open("r+b") as file:
            # torch.load doesn't look at the checksums inside the file.
            file.write(_crc32(file, new.stat().st_size).to_bytes(4, "big"))
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        with contextlib.suppress(OSError):  # Windows opens no folders
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)  # the new name, too, survives a power cut
            os.close(folder)
    except (OSError, RuntimeError) as e:
        new.unlink(missing_ok=True)  # half a checkpoint would keep the disk full
        # torch reports a full disk as a RuntimeError, "unexpected pos".
        reason = e.strerror if isinstance(e, OSError) else "is the disk full?"
        raise Fault(f"{path} can't be written ({reason}): make room for it") from e


def read_state(path: Path) -> dict[str, Any]:
    """The state that write_state wrote, on the CPU. Raises InputError if it is damaged."""
    try:
        with path.open("rb") as file:
            checksum = _crc32(file, path.stat().st_size - 4)
            if checksum.to_bytes(4, "big") != file.read():
                raise ValueError("its checksum is wrong")
        # weights_only: a checkpoint is data, nothing in it is executed.
        state = torch.load(path, weights_only=True, map_location="cpu")
        if missing := [name for name in FIELDS if name not in state]:
            raise ValueError(f"it has no {missing[0]!r}")
        return state
    except (OSError, ValueError, RuntimeError, UnpicklingError) as e:
        reason = f"{path} is damaged ({first_line(e)})"
        raise InputError(f"--resume: {reason}; --overwrite starts the run anew") from e


def _crc32(file: BinaryIO, size: int) -> int:
    """The checksum of the next `size` bytes of the file."""
    checksum = 0
    while size > 0 and (block := file.read(min(size, 2**24))):
        checksum, size = zlib.crc32(block, checksum), size - len(block)
    return checksum


def trained_weights(**models: nn.Module | None) -> dict[str, Tensor]:
    """All weights of the models that are trained, by name."""
    return {
        f"{kind}.{name}": p.detach()
        for kind, model in models.items()
        if model is not None
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def random_state(generators: dict[str, torch.Generator]) -> dict[str, Any]:
    """The state of all random numbers: of the generators and of torch itself."""
    return {
        "generators": {name: g.get_state() for name, g in generators.items()},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore(
    state: dict, weights: dict[str, Tensor], optimizer: torch.optim.Optimizer, generators: dict
) -> None:
    """Put weights, optimiser and random states back. Raises InputError if they don't fit."""
    shapes = {name: p.shape for name, p in state["weights"].items()}
    if shapes != {name: p.shape for name, p in weights.items()}:
        raise InputError("--resume: the checkpoint belongs to another model")
    try:
        for name, generator in generators.items():
            generator.set_state(state["generators"][name])
    except RuntimeError as e:
        raise InputError("--resume: the run was on another kind of device, see --device") from e
    for name, p in weights.items():
        p.copy_(state["weights"][name])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def check_settings(config: Any, path: Path) -> None:
    """Check that `config` is that of the run whose config.json is `path`. Raises InputError."""
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        script = before.pop("script")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise InputError(f"--resume: {path} can't be read ({first_line(e)})") from e
    if script != config.script:
        raise InputError(f"--resume: {path.parent} holds a run of {script}.py")
    for name, value in dataclasses.asdict(config).items():
        if name not in FREE_ON_RESUME and before.get(name) != value:
            has = f"the run in {path.parent} has {before.get(name)}"
            rule = "--resume goes on with the settings of the run"
            raise InputError(f"--{name} {value}: {has}, and {rule}")


def save_model(
    folder: Path, policy: PreTrainedModel, tokenizer: Tokenizer, merge_adapter: bool
) -> None:
    """Save the policy, or its adapter, as folder/model; merged, the adapter as folder/adapter."""
    new = folder / "model.new"  # complete before it takes its name
    shutil.rmtree(new, ignore_errors=True)
    # peft would ask the hub whether the vocabulary has grown: it hasn't.
    options = {"save_embedding_layers": False} if hasattr(policy, "peft_config") else {}
    if merge_adapter and hasattr(policy, "peft_config"):
        policy.save_pretrained(folder / "adapter", **options)
        tokenizer.save_pretrained(folder / "adapter")
        # A copy: after the best evaluation the adapter trains on.
        policy, options = copy.deepcopy(policy).merge_and_unload(), {}
    policy.save_pretrained(new, **options)
    tokenizer.save_pretrained(new)
    if (folder / "model").exists():
        shutil.rmtree(folder / "model")
    new.rename(folder / "model")
