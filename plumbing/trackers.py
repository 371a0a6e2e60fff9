"""TensorBoard and Weights & Biases, where a run asks for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plumbing.errors import InputError, first_line, optional_library

Tracker = Callable[[int, dict[str, float]], None]  # called with a step and its metrics


def check_installed(config: Any) -> None:
    """Check that the services that are to follow the run are installed. Raises InputError."""
    for name, module in (("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")):
        if getattr(config, name):
            optional_library(module, f"--{name}: pip install {name}")


def start(folder: Path, config: Any, first_step: int) -> list[Tracker]:
    """The trackers that --tensorboard and --wandb ask for. Raises InputError."""
    found = []
    if config.tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        # What a run wrote after the checkpoint from which it goes on would be there twice.
        purge = first_step if config.resume else None
        writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

        def track(step: int, metrics: dict[str, float]) -> None:
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        found.append(track)
    if config.wandb:
        import wandb

        name = folder.resolve().name
        resume = "allow" if config.resume else None  # else it would go on with a run of this name
        options = {"resume": resume, "config": asdict(config), "dir": folder}
        try:
            tracked = wandb.init(project="plainrlhf", id=name, name=name, **options)
        except Exception as e:  # no key, no network
            raise InputError(f"--wandb: {first_line(e)}") from e
        found.append(lambda step, metrics: tracked.log(metrics, step=step))
    return found
