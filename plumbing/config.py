"""Flags: from the command line to a Config that is complete and makes sense.

The fields of a Config are the flags. A script's Config adds its own to those of RunConfig, and
changes a default with a line like `kl_coef: float = flag(0.04)`: the help stays.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import re
import sys
import types
import typing
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal

from plumbing.errors import InputError, did_you_mean, first_line
from plumbing.models import adapter_base, fast_at_bfloat16, fast_at_float16, pick_device

# TRL's names for our flags: they are accepted as well.
TRL_NAMES = {
    "beta": "kl_coef",
    "center_rewards_coefficient": "center_rewards_coef",
    "cliprange": "clip_range",
    "cliprange_value": "clip_range_value",
    "epsilon": "clip_range",
    "epsilon_high": "clip_range_high",
    "local_rollout_forward_batch_size": "rollout_batch_size",
    "max_completion_length": "max_new_tokens",
    "num_iterations": "num_epochs",
    "num_ppo_epochs": "num_epochs",
    "response_length": "max_new_tokens",
}
HEADINGS = ("the job", "rollout", "update", "this algorithm", "the run")  # of --help, in order


@dataclass(frozen=True)
class ByModel:
    """A default that is one value for the embedded model and another one for all others.

    `learned`, where it is given, is for the embedded model with a reward model, which is right only
    near the texts that it was trained on: docs/experiments.md, "Trusted too far".
    """

    tiny: Any
    other: Any
    learned: Any = None


def flag(
    default: Any = MISSING,
    help: str = "",
    group: str = "this algorithm",
    least: float | None = None,
    most: float = math.inf,
    **by_model: Any,
) -> Any:
    """A field of a Config: the default of the flag, its help text, and its heading in HEADINGS.

    A number must be above 0, or in least..most where `least` is given. `flag(tiny=60, other=40)`
    gives the embedded model another default than all other models. A field without a help text
    overrides one of a parent class: all but the default stays.
    """
    default = ByModel(**by_model) if by_model else default
    metadata = {"help": help, "group": group, "least": least, "most": most} if help else {}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


_job, _rollout = partial(flag, group="the job"), partial(flag, group="rollout")
_update, _run = partial(flag, group="update"), partial(flag, group="the run")


@dataclass(kw_only=True)
class BaseConfig:
    """The flags of all scripts and of the tools that sample."""

    smallest_group: ClassVar[int] = 1  # completions per prompt

    model: str = _job("tiny", "embedded, or a local folder, or a name on the model hub")
    seed: int = _run(0, "of every random draw", least=0, most=2**63 - 2)
    device: str | None = _run(None, "cuda, mps or cpu; default: the first there is")
    bf16: bool | None = _update(
        help="bfloat16 autocast; default: where the device is fast at it", tiny=False, other=None
    )


@dataclass(kw_only=True)
class TrainConfig(BaseConfig):
    """The flags of all that trains. A script gives its name and the missing defaults."""

    script: ClassVar[str]  # "ppo", say: in the name of the run's folder and in its files

    num_steps: int = _update(help="optimisation steps")
    # The defaults suit models of about 0.1 B parameters; larger ones want 1e-6 to 1e-5.
    learning_rate: float = _update(help="of AdamW, at its highest; adapters: 10 times")
    warmup_steps: int = _update(10, "of a rising learning rate; then it falls towards 0", least=0)
    micro_batch_tokens: int | None = _update(
        help="most tokens per forward and backward pass, padding included; by memory on a GPU",
        tiny=None,
        other=1024,
    )
    max_grad_norm: float = _update(1.0, "a longer gradient is scaled down to this norm")
    disable_dropout: bool = _update(True, "false shows what dropout does to the ratio")
    lora_r: int = _update(0, "rank of a new LoRA adapter; 0 trains all weights", least=0)
    gradient_checkpointing: bool = _update(False, "less memory, more time")
    output_dir: str | None = _run(None, "default: runs/<script>-<model>-<task>-s<seed>")
    overwrite: bool = _run(False, "rename the run there to <output_dir>.old; an older .old is lost")
    resume: bool = _run(False, "go on with the run in output_dir")
    save_every: int = _run(50, "steps between checkpoints; the last step and Ctrl-C save as well")
    eval_every: int = _run(help="steps between evaluations on what is held out", tiny=30, other=20)
    report_to: list[Literal["tensorboard", "wandb"]] = _run([], "tensorboard, wandb or both")


@dataclass(kw_only=True)
class TaskConfig(BaseConfig):
    """The flags of all that samples completions and scores them."""

    task: str = _job(help="add, sentiment or one more of tasks.py", tiny="add", other="sentiment")
    prompts: str | None = _job(
        None, "file of JSON lines, CSV or Parquet, or dataset NAME:SUBSET:SPLIT; not the task's"
    )
    prompt_template: str | None = _job(None, "text or file with {column}; default: {prompt}")
    system_prompt: str | None = _job(None, "text or file; makes chat messages of text, '' too")
    eval_prompts: str | None = _job(None, "held-out prompts; default: a tenth of the prompts")
    reward: list[str] = _job([], "FILE.py:FUNCTION or one of tasks.py, several; not the task's")
    reward_weights: list[float] = _job([], "default 1; reward_model's last", least=-math.inf)
    reward_model: str | None = _job(None, "sequence classifier with one label: a folder or a name")
    verifier: str | None = _job(None, "as reward; 1 for a right answer: eval/accuracy")
    num_generations: int = _rollout(help="completions per prompt, G")
    max_new_tokens: int = _rollout(help="longest completion")
    stop: list[str] = _rollout([], "strings that end a completion, and belong to it")
    temperature: float = _rollout(1.0, "the policy is softmax(logits / temperature)", least=1e-3)
    rollout_batch_size: int = _rollout(
        help="most rows decoded, or per forward pass without gradient; by memory on a GPU",
        tiny=256,
        other=32,
    )
    fp16: bool | None = _rollout(None, "decode in float16; default: on a T4 or V100, say")
    cuda_graphs: bool = _rollout(True, "false: decode without CUDA graphs, slowly")


@dataclass(kw_only=True)
class RunConfig(TaskConfig, TrainConfig):
    """The flags that ppo.py, grpo.py and rloo.py share."""

    num_steps: int = _rollout(help="rollouts, each followed by an update")
    prompts_per_step: int = _rollout(help="prompts sampled per step, N")
    max_new_tokens: int = _rollout(tiny=5, other=24)
    kl_coef: float = _update(help="weight of the KL penalty; 0: none", least=0)
    num_epochs: int = _update(1, "passes over one rollout")
    num_mini_batches: int = _update(1, "optimiser steps per pass")
    clip_range: float = _update(0.2, "epsilon of the ratio clip")
    entropy_coef: float = _update(0.0, "weight of a bonus for the mean entropy of a token", least=0)
    num_eval_prompts: int = _run(help="held-out prompts per evaluation", tiny=1024, other=24)
    eval_generations: int = _run(1, "completions per held-out prompt, K, for pass@1 and pass@K")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise InputError(re.sub(r"^argument (--\w+)", r"\1", message))


def parse_flags(config_class: type[BaseConfig], doc: str, args: list[str] | None = None) -> Any:
    """The command line as a complete, checked `config_class`. Raises InputError."""
    given = _parse(config_class, doc, sys.argv[1:] if args is None else args)
    config = config_class(**given)
    for name, value in vars(config).items():
        if isinstance(value, ByModel):
            by_model = value.tiny if config.model == "tiny" else value.other
            learned = config.model == "tiny" and getattr(config, "reward_model", None) is not None
            setattr(config, name, value.learned if learned and value.learned else by_model)
    check_numbers(config)
    device = pick_device(config.device)
    config.device = str(device)
    if isinstance(config, RunConfig) and device.type == "cuda" and config.model != "tiny":
        for name in {*LIMITS} - {*given}:  # choose_limits fills them in, or --resume
            setattr(config, name, None)
    if isinstance(config, TaskConfig):
        check_groups(config)
    by_device = config.bf16 is None
    if by_device:
        config.bf16 = fast_at_bfloat16(device)
    if isinstance(config, TaskConfig) and config.fp16 is None:
        config.fp16 = by_device and not config.bf16 and fast_at_float16(device)
    if isinstance(config, TrainConfig):
        has_adapter = config.lora_r > 0 or adapter_base(config.model) is not None
        if has_adapter and "learning_rate" not in given:
            # Schulman et al. 2025, "LoRA without regret".
            config.learning_rate *= 10
        check_folder(config)
    return config


def _parse(config_class: type[BaseConfig], doc: str, args: list[str]) -> dict[str, Any]:
    """The flags on the command line: name -> value. Raises InputError."""
    fields = {field.name for field in dataclasses.fields(config_class)}

    def our_name(arg: str) -> str:
        name, equals, value = arg.partition("=")
        name = name.removeprefix("--").replace("-", "_")
        name = TRL_NAMES.get(name, name)
        return f"--{name}{equals}{value}" if arg.startswith("--") and name in fields else arg

    parser = _parser(config_class, doc)
    namespace, unknown = parser.parse_known_args([our_name(arg) for arg in args])
    if not unknown:
        return vars(namespace)
    name = unknown[0].partition("=")[0]
    if not name.startswith("-"):
        raise InputError(f"{name!r} belongs to no flag: flags are written --name value")
    known = [*fields, *(name for name, ours in TRL_NAMES.items() if ours in fields)]
    hint = did_you_mean(name.replace("-", "_"), [f"--{name}" for name in known])
    raise InputError(f"unknown flag {name}{hint or '; --help lists the flags'}")


def _parser(config_class: type[BaseConfig], doc: str) -> argparse.ArgumentParser:
    """A parser with a flag for each field, under the headings; it leaves out what isn't given."""
    layout = partial(argparse.RawDescriptionHelpFormatter, max_help_position=39, width=116)
    parser = _Parser(
        usage="python %(prog)s [--flag value ...]",
        description=doc,
        formatter_class=layout,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,  # or --learn would be --learning_rate
    )
    groups = {heading: parser.add_argument_group(heading) for heading in HEADINGS}
    kinds, documented = typing.get_type_hints(config_class), documentation(config_class)
    for field in dataclasses.fields(config_class):
        text, options = documented[field.name]["help"], _argument(kinds[field.name])
        if "choices" in options and options["choices"][0] not in text:
            text += f": {', '.join(options['choices'])}"
        if shown := _shown(field.default):
            text += f" ({shown})"
        group = groups[documented[field.name]["group"]]
        group.add_argument(f"--{field.name}", help=text, **options)
    return parser


def _shown(default: Any) -> str:
    """A default for the help: "false", "24; tiny: 5", "tiny: 256"; empty where there is none."""
    if not isinstance(default, ByModel):
        return "" if default in (None, MISSING) else str(default).lower()
    values = {"": default.other, "tiny: ": default.tiny, "tiny, reward_model: ": default.learned}
    return "; ".join(f"{name}{_shown(x)}" for name, x in values.items() if x is not None)


def documentation(config_class: type) -> dict[str, dict[str, Any]]:
    """Help text, heading and bounds of each flag, from the nearest class that gives them."""
    found = {}
    for parent in filter(dataclasses.is_dataclass, reversed(config_class.__mro__)):
        found |= {f.name: f.metadata for f in dataclasses.fields(parent) if f.metadata}
    return found


def _argument(kind: Any) -> dict[str, Any]:
    """What argparse has to know of a flag whose field has this type."""
    inner = [part for part in typing.get_args(kind) if part is not types.NoneType]
    if typing.get_origin(kind) in (types.UnionType, typing.Union):  # X | None
        return _argument(inner[0])
    if typing.get_origin(kind) is list:
        return _argument(inner[0]) | {"nargs": "+"}
    if typing.get_origin(kind) is Literal:
        return {"choices": inner, "metavar": "NAME"}
    if kind is bool:
        return {"type": _boolean, "nargs": "?", "const": True, "metavar": "BOOL"}
    return {"type": kind, "metavar": {int: "N", float: "X", str: "TEXT"}[kind]}


def _boolean(text: str) -> bool:
    if text.lower() in ("true", "t", "yes", "y", "1"):
        return True
    if text.lower() in ("false", "f", "no", "n", "0"):
        return False
    raise argparse.ArgumentTypeError(f"must be true or false, not {text!r}")


def check_numbers(config: BaseConfig) -> None:
    """Check each number against the bounds of its flag. Raises InputError."""
    bounds = documentation(type(config))
    for name, value in vars(config).items():
        least, most = bounds[name]["least"], bounds[name]["most"]
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                continue
            if not math.isfinite(number):
                raise InputError(f"--{name} {value}: must be a finite number")
            if least is None and number <= 0:
                raise InputError(f"--{name} {value}: must be greater than 0")
            if least is not None and not least <= number <= most:
                rule = f"{least} or greater" if most == math.inf else f"between {least} and {most}"
                raise InputError(f"--{name} {value}: must be {rule}")


def check_groups(config: TaskConfig) -> None:
    """Check what depends on more than one flag. Raises InputError."""
    if "" in config.stop:
        raise InputError("--stop '': an empty string would end every completion")
    group, smallest = config.num_generations, config.smallest_group
    if group < smallest:
        why = "a completion is compared with the others of its prompt"
        raise InputError(f"--num_generations {group}: must be {smallest} or more, {why}")
    most = config.rollout_batch_size or sys.maxsize
    for name in ("num_generations", "eval_generations"):
        if most < (count := getattr(config, name, 0)):
            why = f"must hold the {count} completions of a prompt ({name})"
            raise InputError(f"--rollout_batch_size {most}: {why}")
    if not isinstance(config, RunConfig):
        return
    if getattr(config, "loss_type", "") == "cispo" and config.clip_range_high is not None:
        why = "with loss_type cispo no ratio is clipped at 1 + clip_range_high"
        raise InputError(f"--clip_range_high {config.clip_range_high}: {why}")
    buffer = getattr(config, "overlong_buffer", 0)
    if buffer > 0 and config.scale_rewards == "mean":
        why = "its penalty makes rewards negative, and --scale_rewards mean needs 0 or more"
        raise InputError(f"--overlong_buffer {buffer}: {why}")
    if buffer > config.max_new_tokens:
        fault = f"is longer than the longest completion, --max_new_tokens {config.max_new_tokens}"
        raise InputError(f"--overlong_buffer {buffer}: {fault}")
    batch, parts = config.prompts_per_step * group, config.num_mini_batches
    if batch % parts:
        divisors = ", ".join(str(n) for n in range(1, batch + 1) if batch % n == 0)
        what = f"the {batch} completions of a step (prompts_per_step * num_generations)"
        raise InputError(f"--num_mini_batches {parts}: must divide {what}: choose from {divisors}")


# --- The folder of a run ---

LIMITS = ("rollout_batch_size", "micro_batch_tokens")  # that change memory and speed
CHECKPOINT = Path("checkpoint", "state.pt")  # in the folder of a run
# The settings that a resumed run may change: where and how it runs. With another rollout_batch_size
# other completions are drawn, but a run that is out of memory needs it. num_steps may not change:
# the learning rate falls to 0 over it.
FREE_ON_RESUME = """resume overwrite output_dir device eval_every save_every report_to
micro_batch_tokens rollout_batch_size cuda_graphs gradient_checkpointing""".split()


def check_folder(config: TrainConfig) -> None:
    """Fill in --output_dir. Raises InputError where it holds what must not be lost, or a run that
    --resume can't go on with: said now, before a model is loaded.
    """
    model = Path(config.model).resolve().name if os.path.isdir(config.model) else config.model
    # The pairs of a reward model, the prompts of the others.
    data = config.pairs if hasattr(config, "pairs") else config.prompts
    task = Path(data).stem if data else config.task
    name = f"{config.script}-{model}-{task}-s{config.seed}".replace("/", "-").replace(":", "-")
    config.output_dir = config.output_dir or f"runs/{name}"
    folder = Path(config.output_dir)
    if config.resume and config.overwrite:
        raise InputError("--resume --overwrite: give one of them, they contradict each other")
    try:
        if holds_run(folder):
            if not (config.resume or config.overwrite):
                remedy = "give --resume, --overwrite or another --output_dir"
                raise InputError(f"{folder} already holds a run: {remedy}")
            open_metrics(folder).close()
            if config.resume:
                _check_settings(config, folder)
            if config.overwrite:
                holds_run(Path(f"{folder}.old"))  # which it will replace
        if config.resume and not (folder / CHECKPOINT).exists():
            print(f"--resume: {folder} holds no checkpoint, the run starts at step 0")
    except OSError as e:
        raise InputError(f"--output_dir {folder}: can't be used ({e.strerror})") from e


def holds_run(folder: Path) -> bool:
    """Whether it holds metrics or a checkpoint. Raises InputError if it holds something else."""
    if not folder.exists() or not any(folder.iterdir()):
        return False
    if not (folder / "metrics.jsonl").exists():
        raise InputError(f"--output_dir {folder}: holds something that is not a run")
    return (folder / "metrics.jsonl").stat().st_size > 0 or (folder / CHECKPOINT).exists()


def open_metrics(folder: Path) -> BinaryIO:
    """metrics.jsonl, to be appended to. Raises InputError while another process has it open so.

    The lock is the system's: it ends with its process, even if that is killed. Forked processes
    don't inherit it.
    """
    path = folder / "metrics.jsonl"
    file = path.open("ab")
    try:
        with contextlib.suppress(ImportError):  # Windows has no such lock
            import fcntl

            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # With --overwrite another process may have renamed the folder just now.
        is_free = os.path.samefile(path, file.fileno())
    except (BlockingIOError, PermissionError, FileNotFoundError):
        is_free = False
    except OSError:  # a file system without locks
        is_free = True
    if not is_free:
        remedy = "wait until it has ended, or give another --output_dir"
        raise InputError(f"{folder}: another process has a run there: {remedy}")
    return file


def settings_of_run(folder: Path) -> dict[str, Any]:
    """The settings of the run in `folder`, and its `script`. Raises InputError."""
    path = folder / "config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        return settings | {"script": settings["script"]}
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise InputError(f"{path}: can't be read ({first_line(e)})") from e


def _check_settings(config: TrainConfig, folder: Path) -> None:
    """Check that `config` is that of the run in `folder`. Raises InputError."""
    before = settings_of_run(folder)
    if before["script"] != config.script:
        raise InputError(f"--resume: {folder} holds a run of {before['script']}.py")
    for name, value in dataclasses.asdict(config).items():
        # Found at the start of a run: one pass over the pairs, what a GPU's memory allows.
        if value is None and name in ("num_steps", *LIMITS):
            setattr(config, name, before.get(name))
            continue
        if name not in FREE_ON_RESUME and before.get(name) != value:
            has = f"the run in {folder} has {before.get(name)}"
            rule = "--resume goes on with the settings of the run"
            raise InputError(f"--{name} {value}: {has}, and {rule}")
