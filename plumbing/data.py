"""Tasks: the prompts that the flags name, rewards and reward models by name."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from common import base_model
from plumbing.answers import VERIFIERS
from plumbing.errors import InputError, first_line
from plumbing.prompts import (
    Prompt,
    after_system,
    in_template,
    names_in,
    read_prompts,
    split_prompts,
    text_or_file,
)
from plumbing.reward_models import RewardModel

RewardFunction = Callable[..., list[float | None]]  # (prompts, completions, **columns), as in TRL


@dataclass
class Task:
    """Prompts, dicts with the key `prompt` and any further columns, and rewards with weights."""

    train: list[dict]
    heldout: list[dict]  # evaluated, never trained on
    rewards: list[RewardFunction]
    weights: list[float] = field(default_factory=list)  # one per reward; empty: all 1
    verifier: RewardFunction | None = None  # 1 for a right answer, 0 for a wrong one: eval/accuracy
    row_fault: Callable[[dict], str | None] | None = None  # why `rewards` can't score a row
    reward_model: RewardModel | None = None  # also the last of `rewards`
    stop: list[str] = field(default_factory=list)  # strings that end a completion
    name: str = "prompts"


def load_reward(
    spec: str, ready_made: dict[str, RewardFunction], flag: str = "--reward"
) -> RewardFunction:
    """One of `ready_made` by its name, or FILE.py:FUNCTION; runs the file. Raises InputError."""
    if spec in ready_made:
        return ready_made[spec]
    path, _, name = spec.rpartition(":")
    if not path or not name:
        known = ", ".join(ready_made)
        raise InputError(f"{flag} {spec}: write it as FILE.py:FUNCTION, or choose from {known}")
    if not Path(path).is_file():
        raise InputError(f"{flag} {spec}: there is no file {path}")
    module_spec = importlib.util.spec_from_file_location(f"reward_{Path(path).stem}", path)
    if module_spec is None:
        raise InputError(f"{flag} {spec}: {path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickle look modules up by name
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:
        fault = f"{path} fails on import: {type(e).__name__}: {first_line(e)}"
        raise InputError(f"{flag} {spec}: {fault}") from e
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"{flag} {spec}: {path} has no function {name}")
    return function


def load_task(
    config: Any, tasks: dict, rewards: dict, tokenizer: Tokenizer, device: torch.device
) -> Task:
    """The task that the flags name, of TASKS and REWARDS of tasks.py. Raises InputError."""
    if config.task not in tasks:
        nearest = difflib.get_close_matches(str(config.task), tasks, n=1)
        known = ", ".join(tasks) + (f"; did you mean {nearest[0]}?" if nearest else "")
        raise InputError(f"--task {config.task}: not in tasks.py, which has {known}")
    chat = tokenizer.chat_template is not None
    task = tasks[config.task](config, chat)
    task.stop = config.stop
    has_own_reward = bool(config.reward or config.reward_model)
    _load_prompts(config, task, has_own_reward, chat)
    if has_own_reward:
        task.rewards, task.weights = [load_reward(spec, rewards) for spec in config.reward], []
        if config.prompts or config.eval_prompts:
            task.verifier = None  # made for the prompts of the task, not for these
    # A verifier of one's own, or a reward that is one; else that of the task.
    is_verifier = next((spec for spec in config.reward if spec in VERIFIERS), None)
    if config.verifier or is_verifier:
        task.verifier = load_reward(config.verifier or is_verifier, rewards, "--verifier")
    for name in {*config.reward, config.verifier} & VERIFIERS.keys():
        check_answers(VERIFIERS[name], task.train + task.heldout)
    if config.reward_model:
        task.reward_model = RewardModel(config.reward_model, device)
        task.rewards.append(task.reward_model)
    task.weights = config.reward_weights or task.weights or [1.0] * len(task.rewards)
    if len(task.weights) != (count := len(task.rewards)):
        raise InputError(f"--reward_weights {task.weights}: give one per reward, here {count}")
    if not task.train or not task.heldout:
        raise InputError(f"--task {config.task}: needs prompts to train on and held-out ones")
    if chat and isinstance(task.train[0]["prompt"], str):
        print(
            "The prompts are plain text, so the model's chat template is not used."
            ' --system_prompt "" makes messages of them.'
        )
    return task


def _load_prompts(config: Any, task: Task, has_own_reward: bool, chat: bool) -> None:
    """Put the prompts that the flags name into the task, in their template. Raises InputError."""
    template = text_or_file(config.prompt_template, "--prompt_template")
    system = text_or_file(config.system_prompt, "--system_prompt")
    if template is not None and not names_in(template):
        raise InputError("--prompt_template: names no column; {prompt} stands for the prompt")
    if system is not None and not chat:
        fault = "--system_prompt: the model has no chat template"
        raise InputError(f"{fault}; write the text into --prompt_template")
    if template is not None and not config.prompts:  # those of files are filled in as they are read
        _change_prompts(task, "", lambda row: in_template(template, row))
    for flag, is_set in (
        ("subset", config.subset),
        ("prompt_column", config.prompt_column != "prompt"),
    ):
        if is_set and not (config.prompts or config.eval_prompts):
            value = getattr(config, flag)
            raise InputError(f"--{flag} {value}: needs --prompts or --eval_prompts")
    options = {"column": config.prompt_column, "template": template}

    def read(name: str, split: str, flags: tuple[str, str]) -> list[dict]:
        is_other_file = name != config.prompts and Path(name).is_file()
        subset = None if is_other_file else config.subset
        rows = read_prompts(name, split, subset, flags=flags, **options)
        faults = () if has_own_reward or task.row_fault is None else map(task.row_fault, rows)
        if fault := next(filter(None, faults), None):
            raise InputError(f"{name}: task {config.task} {fault}; or give --reward")
        return rows

    heldout = config.eval_prompts or (config.prompts if config.eval_split else None)
    if config.eval_split and heldout is None:
        raise InputError(f"--eval_split {config.eval_split}: needs --prompts or --eval_prompts")
    if config.eval_split and Path(heldout).is_file():
        fault = f"{heldout} is one file, and has no splits"
        raise InputError(f"--eval_split {config.eval_split}: {fault}; --eval_prompts takes another")
    if config.prompts:
        rows = read(config.prompts, config.split, ("--prompts", "--split"))
        task.train, task.heldout = (rows, []) if heldout else split_prompts(rows)
    if heldout:
        flag = "--eval_prompts" if config.eval_prompts else "--prompts"
        task.heldout = read(heldout, config.eval_split or "test", (flag, "--eval_split"))
    if system is not None:
        _change_prompts(task, "--system_prompt: ", lambda row: after_system(system, row["prompt"]))


def check_answers(verifier: RewardFunction, rows: list[dict]) -> None:
    """Raise InputError now for an answer that the verifier can't read, not when its row is due."""
    if all("answer" in row for row in rows):
        verifier([""] * len(rows), answer=[row["answer"] for row in rows])


def _change_prompts(task: Task, what: str, new_prompt: Callable[[dict], Prompt]) -> None:
    try:
        task.train, task.heldout = (
            [row | {"prompt": new_prompt(row)} for row in rows]
            for rows in (task.train, task.heldout)
        )
    except ValueError as e:
        raise InputError(f"{what}{e}") from e


def value_backbone(
    config: Any, policy: PreTrainedModel, tokenizer: Tokenizer, task: Task
) -> PreTrainedModel:
    """The model whose backbone the value model copies, by --value_init. Raises InputError."""
    if config.value_init == "policy":
        return policy
    if task.reward_model is None:
        raise InputError("--value_init reward_model: needs --reward_model")
    if task.reward_model.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise InputError("--value_init reward_model: its vocabulary is not the policy's")
    if base_model(policy) is not policy:  # all its weights would train, at an adapter's rate
        raise InputError("--value_init reward_model: not with an adapter, use --value_init policy")
    return task.reward_model.model
