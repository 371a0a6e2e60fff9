"""Does a job fit? The memory of a run by its parts, before anything is downloaded but the config.

  python tools/fit.py --script grpo --model Qwen/Qwen2.5-0.5B-Instruct --prompt_tokens 200 \\
      --max_new_tokens 256

The memory is that of a GPU, with one here or without; --device cpu asks for a CPU's. All flags of
the script are understood. The parts are explained in plumbing/memory.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from transformers import AutoConfig, PretrainedConfig

from plumbing.config import parse_flags
from plumbing.errors import InputError, first_line
from plumbing.memory import SMALLEST, Counts, count, estimate, largest_limits
from plumbing.models import TINY
from plumbing.run import run_main

DEVICES_GB = (8, 16, 24, 40, 80)


def counts_of(config: Any, prompt_tokens: int) -> Counts:
    """What the formula has to know of the models that the flags name. Raises InputError."""
    judge = None
    if config.reward_model is not None:
        judge = _read_config(config.reward_model, "--reward_model")
    return count(config, _read_config(config.model, "--model"), prompt_tokens, judge)


def _read_config(name: str, flag: str) -> PretrainedConfig:
    try:
        folder = str(TINY) if name == "tiny" else name
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)  # else it would ask
    except (OSError, ValueError) as e:
        raise InputError(f"{flag} {name}: its config can't be read ({first_line(e)})") from e


def on_gpu(
    counts: Counts, config: Any, prompt_tokens: int, gb: int, given: str = ""
) -> tuple[Any, dict[str, float]]:
    """(The config of a run on a GPU with so many GB, its parts). The run chooses the limits whose
    flags aren't in the command line `given`.
    """
    given = given.replace("-", "_")  # --micro-batch-tokens is understood as well
    smallest = {name: limit for name, limit in SMALLEST.items() if name not in given}
    limits = largest_limits(counts, config, prompt_tokens, gb * 10**9, smallest)
    config = dataclasses.replace(config, **limits)
    return config, estimate(counts, config, prompt_tokens, gb * 10**9)


def fits(parts: dict[str, float], gb: int) -> bool:
    """Whether a run with these parts fits into so many GB."""
    return parts["needed"] <= gb * 1e9


def config_of(script: str, flags: list[str], device: str) -> Any:
    """The config of a run on "cuda" or "cpu", with a GPU here or without. Raises InputError."""
    config = importlib.import_module(script).Config
    # In no folder: a run of this job may be going on in its own.
    config = parse_flags(config, __doc__, [*flags, "--device", "cpu", "--output_dir", "no-folder"])
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
    counts = counts_of(config, length)
    print(f"{script}.py --model {config.model}, prompts of {length} tokens, on {device}:")
    if device == "cpu":
        parts = estimate(counts, config, length)
        print(describe(parts))
        fitting = [f"{gb} GB" for gb in DEVICES_GB if fits(parts, gb)]
    else:
        found = {gb: on_gpu(counts, config, length, gb, " ".join(flags)) for gb in DEVICES_GB}
        sizes = [gb for gb, (_, parts) in found.items() if fits(parts, gb)]
        print(describe(found[sizes[0] if sizes else DEVICES_GB[-1]][1]))
        fitting = [f"{gb} GB ({limits_of(found[gb][0])})" for gb in sizes]
    none = f"none of {', '.join(map(str, DEVICES_GB))} GB"
    print(f"fits: {', '.join(fitting) or none}")


def describe(parts: dict[str, float]) -> str:
    """The parts in GB, one a line."""
    return "\n".join(f"  {name:12} {size / 1e9:7.2f} GB" for name, size in parts.items())


def limits_of(config: Any) -> str:
    """The two limits as flags."""
    return " ".join(f"--{name} {getattr(config, name)}" for name in SMALLEST)


if __name__ == "__main__":
    run_main(main)
