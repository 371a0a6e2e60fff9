"""Flags: from the command line to a Config, whose fields they are, complete and checked. A script's
Config adds its own to those of RunConfig, and its TINY says what the embedded model has otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import re
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from plumbing.errors import InputError, blame
from plumbing.models import fast_half, folder_of, is_adapter, pick_device

Embedded = dict[str, dict[str, Any]]  # the defaults of each embedded model, by its name
# What they have in every script; the rest is in its TINY and CUPS.
SUMS = {"task": "add", "max_new_tokens": 5, "num_eval_prompts": 1024, "bf16": False}
SUMS |= {"micro_batch_tokens": 16384, "rollout_batch_size": 256}
SWAPS = {"task": "cups", "max_new_tokens": 16, "num_eval_prompts": 512, "learning_rate": 1e-3}


def flag(default: Any, help: str, *, least: float | None = None, most: float = math.inf) -> Any:
    """Make a field of a Config: the default of the flag and its help text. A number must be above
    0, or in least..most where `least` is given.
    """
    metadata = {"help": help, "bounds": (least, most)}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass
class TrainConfig:
    """The flags of all that trains. A script gives its name, and `num_steps`, `learning_rate` and
    `eval_every`.
    """

    script: ClassVar[str]  # "ppo", say: in the name of the run's folder and in its files
    on_gpu: ClassVar[dict[str, Any]] = {"micro_batch_tokens": 4096}  # other defaults on CUDA

    model: str = flag("tiny", "tiny, tiny/cups, a local folder, or a name on the model hub")
    warmup_steps: int = flag(10, "steps over which the learning rate rises; then it falls", least=0)
    max_grad_norm: float = flag(1.0, "a longer gradient is scaled down to this norm")
    micro_batch_tokens: int = flag(1024, "most tokens of a training pass; GPU: 8192, pairs: 4096")
    disable_dropout: bool = flag(True, "false leaves dropout on, to show what it does")
    lora_r: int = flag(0, "rank of a new LoRA adapter; 0 trains all weights", least=0)
    gradient_checkpointing: bool = flag(False, "recompute activations: less memory, more time")
    bf16: bool | None = flag(None, "train in bfloat16; default: where the device is fast at it")
    device: str | None = flag(None, "cuda, mps or cpu; default: the first there is")
    seed: int = flag(0, "of all random draws, except a reward's own", least=0, most=2**63)
    output_dir: str | None = flag(None, "default: runs/<script>-<model>-<task>-s<seed>")
    overwrite: bool = flag(False, "begin anew in a folder that holds a run, which is lost")
    resume: str | None = flag(None, "go on with the run in this folder, with its settings")
    save_every: int = flag(50, "steps between checkpoints; the last step saves as well")
    report_to: list[Literal["tensorboard", "wandb"]] = flag([], "tensorboard, wandb or both")

    @property
    def half(self) -> torch.dtype | None:
        """Name the half precision to which weights are rounded, in each pass or to decode."""
        decodes_in_fp16 = getattr(self, "fp16", False)
        return torch.bfloat16 if self.bf16 else torch.float16 if decodes_in_fp16 else None

    def check(self) -> None:
        """Check what depends on more than one flag. Raises InputError."""


@dataclass
class RunConfig(TrainConfig):
    """The flags that ppo.py, grpo.py and rloo.py share. A script adds `prompts_per_step`,
    `num_generations` and `kl_coef`.
    """

    smallest_group: ClassVar[int] = 1  # completions per prompt
    on_gpu: ClassVar[dict[str, Any]] = {"micro_batch_tokens": 8192, "rollout_batch_size": 256}

    reference: str | None = flag(None, "the KL is to this model; default: --model as it was loaded")
    task: str = flag("sentiment", "add, cups, sentiment or one more of tasks.py")
    prompts: str | None = flag(None, "file of JSON lines or CSV, or a dataset NAME:SUBSET:SPLIT")
    prompt_template: str | None = flag(None, "text with {column} for each row; default: {prompt}")
    system_prompt: str | None = flag(None, "system message put in front; makes text messages")
    eval_prompts: str | None = flag(None, "held-out prompts; default: a tenth of the prompts")
    reward: list[str] = flag([], "FILE.py:FUNCTION, or one of tasks.py; there may be several")
    reward_weights: list[float] = flag([], "default 1 each; reward_model's last", least=-math.inf)
    reward_model: str | None = flag(None, "sequence classifier with one label: folder or name")
    verifier: str | None = flag(None, "like a reward, 1 for a right answer; makes eval/accuracy")

    max_new_tokens: int = flag(24, "longest completion")
    temperature: float = flag(1.0, "the policy is softmax(logits / temperature)", least=1e-3)
    stop: list[str] = flag([], "strings that end a completion, and belong to it")
    rollout_batch_size: int = flag(32, "most completions decoded at once; GPU: 256")
    fp16: bool | None = flag(None, "decode in float16; default: on a T4 or V100, without --bf16")
    cuda_graphs: bool = flag(True, "false: decode without CUDA graphs, slowly")

    eval_every: int = flag(20, "steps between evaluations on held-out prompts")
    num_eval_prompts: int = flag(24, "held-out prompts per evaluation")
    eval_generations: int = flag(1, "completions per held-out prompt, K, for pass@1 and pass@K")

    def check(self) -> None:
        group = self.num_generations
        if group < self.smallest_group:
            raise InputError(f"--num_generations {group}: they are compared, so give 2 or more")
        if self.reference and self.kl_coef == 0:
            raise InputError("--reference: is for the KL, so give a --kl_coef above 0")
        if self.bf16 and self.fp16:
            raise InputError("--fp16: decodes in float16 what --bf16 trains in bfloat16: give one")
        if (batch := self.prompts_per_step * group) % getattr(self, "num_mini_batches", 1):
            raise InputError(f"--num_mini_batches: must divide the {batch} completions of a step")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise InputError(message)


def parse_flags(
    config_class: type[TrainConfig], doc: str, embedded: Embedded, args: list[str] | None = None
) -> Any:
    """Read the command line as a complete, checked `config_class`. Raises InputError."""
    parser = _Parser(
        usage="python %(prog)s [--flag value ...]", description=doc, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS,
    )  # fmt: skip
    # Before Python 3.14 argparse takes -1e-3, a number, for a flag.
    parser._negative_number_matcher = re.compile(r"-\.?\d")
    kinds = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        default = field.default if field.default is not dataclasses.MISSING else []
        shown = "" if default in (None, [], False) else f" ({str(default).lower()})"
        own = {name: x[field.name] for name, x in embedded.items() if field.name in x}
        for name, value in own.items():
            if name == "tiny" or value != own.get("tiny"):
                shown += f" ({name}: {str(value).lower()})"
        help = field.metadata["help"] + shown
        parser.add_argument(f"--{field.name}", help=help, **_argument(kinds[field.name]))
    given, unknown = parser.parse_known_args(args)
    if unknown:
        of_ratio = "--num_epochs", "--num_mini_batches", "--clip_range"  # rloo.py makes one update
        is_there = unknown[0].partition("=")[0] in of_ratio
        where = "grpo.py has it" if is_there else "--help lists them"
        raise InputError(f"unknown flag {unknown[0]}: {where}")
    return complete(config_class, vars(given), embedded)


def complete(config_class: type[TrainConfig], given: dict[str, Any], embedded: Embedded) -> Any:
    """Make of the flags that are given a complete, checked `config_class`. Raises InputError."""
    if os.environ.get("WORLD_SIZE", "1") != "1":  # each process would write to the same folder
        raise InputError("a run is one process, not several as of torchrun: see docs/outgrow.md")
    has_own_rate = "learning_rate" in given or "resume" in given
    if folder := given.get("resume"):
        settings = settings_of_run(Path(folder))
        if settings.pop("script", None) != config_class.script:
            raise InputError(f"--resume {folder}: is not a run of {config_class.script}.py")
        # Which rows a step draws depends on these: others would skip some, and repeat some.
        fixed = ("num_steps", "prompts_per_step", "pairs_per_step", "oversample", "seed")
        for name in (x for x in given if x in ("output_dir", *fixed)):
            if name == "output_dir" or given[name] != settings.get(name):
                raise InputError(f"--{name} can't change on --resume")
        given = settings | {"overwrite": False} | given | {"output_dir": folder}
    else:
        # --task cups by itself means the embedded model that plays it.
        of_task = [name for name, own in embedded.items() if own.get("task") == given.get("task")]
        given = {"model": (of_task or ["tiny"])[0]} | given
        given = embedded.get(given["model"], {}) | given
    device = pick_device(given.get("device"))
    if device.type == "cuda":
        given = config_class.on_gpu | given
    with blame(f"--resume {given.get('resume')}"):  # a setting of another version
        config = config_class(**given)
    config.device = str(device)
    _check_numbers(config)
    config.check()
    if config.bf16 is None:
        fp16 = getattr(config, "fp16", False)
        config.bf16 = fast_half(device) is torch.bfloat16 and not fp16
        if fp16 is None:
            config.fp16 = fast_half(device) is torch.float16
    with blame("a folder that the flags name"):  # its name is too long, or nobody may enter it
        if (config.lora_r > 0 or is_adapter(config.model)) and not has_own_rate:
            config.learning_rate *= 10  # Schulman et al. 2025, "LoRA without regret"
        find_folder(config)  # before a model is loaded
    return config


def _argument(kind: Any) -> dict[str, Any]:
    """Say what argparse has to know of a flag whose field has this type."""
    inner = typing.get_args(kind)
    if type(None) in inner:  # X | None
        return _argument(inner[0])
    if typing.get_origin(kind) is list:
        return _argument(inner[0]) | {"nargs": "+", "action": "extend"}
    if typing.get_origin(kind) is Literal:
        return {"choices": inner}
    if kind is bool:
        return {"type": _boolean, "nargs": "?", "const": True, "metavar": "BOOL"}
    return {"type": kind, "metavar": {int: "N", float: "X", str: "TEXT"}[kind]}


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"must be true or false, not {text!r}")
    return text.lower() == "true"


def _check_numbers(config: TrainConfig) -> None:
    kinds = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, (least, most) = getattr(config, field.name), field.metadata["bounds"]
        kind = list if field.default is dataclasses.MISSING else type(field.default)
        kind = kinds[field.name] if field.default is None else kind  # str | None, say
        allowed = kind | int if float in (kind, *typing.get_args(kind)) else kind
        if not isinstance(value, allowed):  # config.json, edited by hand
            name = getattr(kind, "__name__", kind)
            raise InputError(f"--{field.name} {value!r}: must be of type {name}")
        for x in value if isinstance(value, list) else [value]:
            if x == "" and field.name != "system_prompt":  # "$FILE", where no FILE is set
                raise InputError(f"--{field.name}: is empty; leave the flag out for its default")
            if type(x) not in (int, float):
                continue
            if not abs(x) < math.inf or (x <= 0 if least is None else not least <= x <= most):
                rule = f"from {least} to {most}" if most < math.inf else f"of at least {least}"
                rule = "above 0" if least is None else rule
                raise InputError(f"--{field.name} {x}: must be a finite number {rule}")


# --- The folder of a run ---

# What a run and tools/look.py make in it; `.new` is left where a run is killed. In the order in
# which --overwrite erases: half a run has no checkpoint.
MADE = """checkpoint.pt config.json metrics.jsonl samples.jsonl tokens.jsonl warnings.jsonl model
checkpoint.pt.new model.new curve.png look.html tensorboard""".split()
ANEW = "--overwrite erases the run, model/ too, and begins anew"


def settings_of_run(folder: Path) -> dict[str, Any]:
    """Read the settings of the run in `folder`, with its `script`. Raises InputError."""
    with blame(f"{folder / 'config.json'}"):
        return dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def claim_folder(config: TrainConfig) -> Path:
    """Return the folder of the run, absolute. The run claims it by making metrics.jsonl, which only
    one process can do: of two that start at once, one gets the next number or an InputError.
    """
    while True:
        folder = find_folder(config)
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # another run was faster: look again
            (folder / "metrics.jsonl").touch(exist_ok=bool(config.resume or config.overwrite))
            config.output_dir = str(folder)
            return folder.absolute()  # a reward may change the working directory


def find_folder(config: TrainConfig) -> Path:
    """Return --output_dir, or a free folder of the default name. Raises InputError if a run were
    lost.
    """
    path = Path(folder_of(config.model))
    model = path.resolve().name if path.is_dir() else config.model
    data = getattr(config, "pairs", None) or getattr(config, "prompts", None)
    task = Path(data).stem if data else config.task
    # `cups` is a model and a task, and once in the name is enough.
    name = "-".join(dict.fromkeys((config.script, model, task, f"s{config.seed}")))
    name = name.replace("/", "-").replace(":", "-")
    name += "-eval" if config.num_steps == 0 else ""
    folder, number = Path(config.output_dir or f"runs/{name}").expanduser(), 1
    while (lost := _lost(config, folder)) and not config.output_dir:
        number += 1
        folder = folder.with_name(f"{name}-{number}")
    if lost:
        raise InputError(f"{folder} already holds {lost}")
    return folder


def _lost(config: TrainConfig, folder: Path) -> str | None:
    """Say what this run would destroy in a folder, and what to do instead; None if nothing."""
    needed = [getattr(config, flag, None) for flag in ("model", "reference", "reward_model")]
    for path in [Path(name).resolve() for name in needed if name and Path(name).exists()]:
        if folder.resolve() in (path, *path.parents):
            return f"{path}, which the run needs: name another --output_dir"
    settings = folder / "config.json"
    if not settings.is_file() or b'"script": ' not in settings.read_bytes():
        found = [name for name in MADE if (folder / name).exists()]
        if found == ["metrics.jsonl"] and (folder / "metrics.jsonl").stat().st_size == 0:
            claim = "metrics.jsonl of a run that begins, or was killed: --overwrite takes it"
            return None if config.overwrite else claim
        return f"{found[0]}, and no run: name another --output_dir" if found else None
    # A run that ends without a step gives its metrics.jsonl up.
    is_free = config.resume or config.overwrite or not (folder / "metrics.jsonl").exists()
    goes_on = (folder / "checkpoint.pt").exists() * f"--resume {folder} goes on with it, "
    return None if is_free else f"a run: {goes_on}{ANEW}"
