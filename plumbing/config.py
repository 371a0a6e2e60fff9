"""Flags: from the command line to a Config that is complete and makes sense."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser, PreTrainedModel, PreTrainedTokenizerBase

from common import InputError, first_line
from plumbing.loading import adapter_base, context_length
from tasks import Task, prompt_tokens

# TRL's names for our flags: they are accepted as well.
TRL_NAMES = {
    "beta": "kl_coef",
    "cliprange": "clip_range",
    "cliprange_value": "clip_range_value",
    "epsilon": "clip_range",
    "epsilon_high": "clip_range_high",
    "local_rollout_forward_batch_size": "rollout_batch_size",
    "max_completion_length": "max_new_tokens",
    "num_iterations": "num_epochs",
    "num_ppo_epochs": "num_epochs",
    "per_device_train_batch_size": "micro_batch_size",
    "response_length": "max_new_tokens",
}


def flag(default: Any, help: str, group: str | None = None) -> Any:
    """A field of a Config, with the help text of its flag; `group` opens a group in the help."""
    # HfArgumentParser hands all metadata on to argparse, which knows no groups: so in the help.
    metadata = {"help": f"{group}|{help}" if group else help}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def parse_flags(
    config_class: type,
    doc: str,
    args: list[str] | None = None,
    tiny: dict[str, Any] | None = None,
    pretrained: dict[str, Any] | None = None,
) -> Any:
    """Parse the command line into `config_class`; `tiny` and `pretrained` are for the help, which
    shows the defaults of the fields that are None. Raises InputError at the first fault.
    """
    # allow_abbrev would take --learn for --learning_rate.
    parser = HfArgumentParser(config_class, description=doc, allow_abbrev=False)
    parser.formatter_class = _HelpFormatter
    _group_flags(parser, config_class, tiny or {}, pretrained or {})
    fields = {field.name for field in dataclasses.fields(config_class)}

    def fail(message: str) -> None:
        raise InputError(re.sub(r"^argument (--\w+)[^:]*", r"\1", message))

    def our_name(arg: str) -> str:
        name, equals, value = arg.partition("=")
        ours = TRL_NAMES.get(name.removeprefix("--").replace("-", "_"))
        return f"--{ours}{equals}{value}" if arg.startswith("--") and ours in fields else arg

    parser.error = fail
    args = [our_name(arg) for arg in (sys.argv[1:] if args is None else args)]
    config, unknown = parser.parse_args_into_dataclasses(
        args, return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        name = unknown[0].partition("=")[0]
        if not name.startswith("-"):
            raise InputError(f"{name!r} belongs to no flag: flags are written --name value")
        candidates = [*fields, *(name for name, ours in TRL_NAMES.items() if ours in fields)]
        nearest = difflib.get_close_matches(name.strip("-").replace("-", "_"), candidates, n=1)
        hint = f"did you mean --{nearest[0]}?" if nearest else "--help lists the flags"
        raise InputError(f"unknown flag {name}: {hint}")
    return config


def _group_flags(
    parser: HfArgumentParser, config_class: type, tiny: dict[str, Any], pretrained: dict[str, Any]
) -> None:
    """Put the flags under the headings that the Config gives, and defaults behind their help."""
    names, group = {field.name for field in dataclasses.fields(config_class)}, None
    for action in list(parser._actions):
        if action.dest not in names:
            continue
        title, opens, text = action.help.partition("|")
        if opens:
            group, action.help = parser.add_argument_group(title), text
        parser._optionals._group_actions.remove(action)
        group._group_actions.append(action)
        action.metavar = action.dest.rpartition("_")[2].upper()
        if action.choices and str(action.choices[0]) not in action.help:
            action.help += f": {', '.join(map(str, action.choices))}"
        if action.option_strings[0].startswith("--no_"):  # of a switch that is on by itself
            action.help = argparse.SUPPRESS
        elif action.dest in pretrained:
            default = pretrained[action.dest]
            embedded = (
                f"; tiny: {tiny[action.dest]}" if tiny.get(action.dest, default) != default else ""
            )
            action.help += f" ({default}{embedded})"
        elif action.dest in tiny:
            action.help += f" (tiny: {str(tiny[action.dest]).lower()})"
        elif action.default not in (None, []) and "default" not in action.help:
            action.help += f" ({str(action.default).lower()})"


def apply_defaults(config: Any, defaults: dict[str, Any]) -> None:
    """Fill the fields of `config` that the user left open (None).

    Adapters take ten times the learning rate: Schulman et al. 2025, "LoRA without regret".
    """
    has_adapter = config.lora_r > 0 or adapter_base(config.model) is not None
    for name, value in defaults.items():
        if getattr(config, name) is None:
            for_adapter = has_adapter and name == "learning_rate"
            setattr(config, name, value * 10 if for_adapter else value)
    if config.merge_adapter and not has_adapter:
        raise InputError("--merge_adapter: there is no adapter to merge; --lora_r 8 trains one")


def check_numbers(config: Any) -> None:
    """Check each number by itself. Raises InputError."""
    for name, value in vars(config).items():
        numbers = value if isinstance(value, list) else [value]
        if not all(math.isfinite(x) for x in numbers if isinstance(x, float)):
            raise InputError(f"--{name} {value}: must be a finite number")
    positive = (
        "num_steps prompts_per_step num_generations max_new_tokens temperature rollout_batch_size"
        " learning_rate num_epochs num_mini_batches micro_batch_size micro_batch_tokens clip_range"
        " clip_range_high clip_range_value max_grad_norm eval_every save_every sample_every"
        " num_eval_prompts num_prompts"
    )
    for name in positive.split():
        value = getattr(config, name, None)
        if value is not None and value <= 0:
            raise InputError(f"--{name} {value}: must be greater than 0")
    for name in ("kl_coef", "vf_coef", "lora_r"):
        if getattr(config, name, 0) < 0:
            raise InputError(f"--{name} {getattr(config, name)}: must be 0 or greater")
    for name in ("gamma", "lam"):
        if not 0 <= getattr(config, name, 1) <= 1:
            raise InputError(f"--{name} {getattr(config, name)}: must be between 0 and 1")
    if config.temperature < 1e-3:
        raise InputError(
            f"--temperature {config.temperature}: too close to 0, choose 0.001 or more"
        )
    if not 0 <= config.seed < 2**63 - 1:
        raise InputError(f"--seed {config.seed}: must be between 0 and 2^63 - 2")


def check_flags(config: Any, smallest_group: int = 1) -> None:
    """Check what can be checked before anything is loaded. Raises InputError."""
    check_numbers(config)
    if config.num_generations < smallest_group:
        raise InputError(
            f"--num_generations {config.num_generations}: must be {smallest_group} or more, a"
            " completion is compared with the others of its prompt"
        )
    clip_to = getattr(config, "reward_clip_range", [])
    if clip_to and not (len(clip_to) == 2 and clip_to[0] < clip_to[1]):
        raise InputError(f"--reward_clip_range {clip_to}: give the lowest and the highest reward")
    if config.rollout_batch_size < config.num_generations:
        raise InputError(
            f"--rollout_batch_size {config.rollout_batch_size}: must hold the"
            f" {config.num_generations} completions of a prompt (num_generations)"
        )
    batch, parts = config.prompts_per_step * config.num_generations, config.num_mini_batches
    if batch % parts:
        below = next(n for n in range(parts, 0, -1) if batch % n == 0)
        above = next((n for n in range(parts, batch + 1) if batch % n == 0), None)
        raise InputError(
            f"--num_mini_batches {parts} doesn't divide the {batch} completions of a step"
            f" (prompts_per_step * num_generations): choose {below}"
            + (f" or {above}" if above else "")
        )


def check_prompts(
    config: Any, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task
) -> None:
    """Check that the model can read each prompt and has room for max_new_tokens after it.

    Raises InputError.
    """
    limit, new = context_length(policy), config.max_new_tokens
    if limit is not None and new >= limit:
        raise InputError(f"--max_new_tokens {new}: the model's context is {limit}, prompt included")
    vocab_size = policy.get_input_embeddings().weight.shape[0]
    for row in task.train + task.heldout:
        ids = prompt_tokens(tokenizer, row["prompt"])
        if limit is not None and len(ids) + new > limit:
            raise InputError(
                f"a prompt of {len(ids)} tokens leaves no room for {new} new ones in a context of"
                f" {limit}: lower --max_new_tokens or shorten {str(row['prompt'])[:60]!r}"
            )
        if max(ids) >= vocab_size:
            raise InputError(
                f"--model {config.model}: its tokenizer gives id {max(ids)}, and the model knows"
                f" {vocab_size} tokens: they don't belong together"
            )


# What a resumed run may do otherwise than the run that it continues.
FREE_ON_RESUME = {
    *("resume", "overwrite", "output_dir", "device", "num_steps", "eval_every", "save_every"),
    *("sample_every", "save_best", "tensorboard", "wandb", "micro_batch_size"),
    *("micro_batch_tokens", "rollout_batch_size", "gradient_checkpointing", "compile"),
}


def choose_folder(script: str, config: Any) -> Path:
    """The folder of a run. Raises InputError where it holds something that must not be lost, or,
    with --resume, a run of other settings.
    """
    model = Path(config.model).resolve().name if os.path.isdir(config.model) else config.model
    task = Path(config.prompts).stem if config.prompts else config.task
    name = f"{script}-{model.replace('/', '-')}-{task}-s{config.seed}"
    folder = Path(config.output_dir or f"runs/{name}")
    if config.resume and config.overwrite:
        raise InputError("--resume --overwrite: give one of them, they contradict each other")
    try:
        if not folder.exists() or not any(folder.iterdir()):
            return folder
        if not (folder / "metrics.jsonl").exists():
            raise InputError(f"--output_dir {folder}: holds something that is not a run")
        if config.resume and (folder / "config.json").exists():
            _check_settings(script, config, folder / "config.json")
        used = (folder / "metrics.jsonl").stat().st_size > 0
        if used and not (config.resume or config.overwrite):
            remedy = "give --resume, --overwrite or another --output_dir"
            raise InputError(f"{folder} already holds a run: {remedy}")
    except OSError as e:
        raise InputError(f"--output_dir {folder}: can't be used ({e.strerror})") from e
    return folder


def _check_settings(script: str, config: Any, path: Path) -> None:
    """Check that `config` is that of the run in the file `path`. Raises InputError."""
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        before_script = before.pop("script")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise InputError(f"--resume: {path} can't be read ({first_line(e)})") from e
    if before_script != script:
        raise InputError(f"--resume: {path.parent} holds a run of {before_script}.py")
    for name, value in dataclasses.asdict(config).items():
        if name not in FREE_ON_RESUME and before.get(name) != value:
            raise InputError(
                f"--{name} {value}: the run in {path.parent} has {before.get(name)}, and --resume"
                f" goes on with the settings of the run"
            )


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the docstring, and gives each flag one line where it fits."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=116)

    def _format_usage(self, *args: object) -> str:
        return f"usage: python {self._prog} [--flag value ...]\n\n"

    def _format_action_invocation(self, action: argparse.Action) -> str:
        name = next((o for o in action.option_strings if o.startswith("--")), "")
        is_switch = action.choices or action.nargs in (0, "?")
        return name if is_switch else f"{name} {action.metavar}"
