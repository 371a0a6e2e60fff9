"""Tasks: prompts from files and datasets, rewards and reward models by name."""

from __future__ import annotations

import difflib
import importlib.util
import itertools
import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from common import base_model
from plumbing.errors import InputError, first_line, optional_library
from plumbing.loading import from_hub_or_folder, load_tokenizer

Prompt = str | list[dict[str, str]]  # text, or chat messages
RewardFunction = Callable[..., list[float | None]]  # (prompts, completions, **columns), as in TRL
ROW_FORMAT = 'each line must be like {"prompt": "..."} or {"prompt": [{"role": .., "content": ..}]}'


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


def text_of(completion: str | list[dict[str, str]]) -> str:
    """The text of a completion, whether it is a string or chat messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def read_prompts(path: str | Path, split: str = "train") -> list[dict]:
    """Prompts from a file of JSON lines, or from what the library datasets reads: CSV and Parquet
    files, folders, datasets by name, of which `split`. Raises InputError with the first bad line.
    """
    suffix, rows = Path(path).suffix, []
    is_name = suffix not in (".jsonl", ".json", ".txt") and not Path(path).is_file()
    if is_name or suffix in (".csv", ".parquet"):
        found, kind, remedy = _from_datasets(str(path), split), "row", "give it a column prompt"
    else:
        found, kind, remedy = _from_json_lines(path), "line", ROW_FORMAT
    for number, row in found:
        if fault := _fault_of_row(row):
            raise InputError(f"{path}, {kind} {number}: {fault}; {remedy}")
        rows.append(row)
    if not rows:
        raise InputError(f"{path}: holds no prompts" + f"; {ROW_FORMAT}" * (kind == "line"))
    return rows


def _from_json_lines(path: str | Path) -> Iterator[tuple[int, object]]:
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"--prompts {path}: can't be read ({first_line(e)})") from e
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                yield number, json.loads(line)
        except (ValueError, RecursionError) as e:
            fault = f"{path}, line {number}: not JSON ({first_line(e)})"
            raise InputError(f"{fault}; {ROW_FORMAT}") from e


def _from_datasets(name: str, split: str) -> Iterator[tuple[int, object]]:
    remedy = "pip install datasets, or give a file of JSON lines"
    datasets = optional_library("datasets", f"--prompts {name}: {remedy}")
    datasets.disable_progress_bars()
    kind = Path(name).suffix[1:]
    file = kind in ("csv", "parquet")
    options = {"data_files": name, "split": "train"} if file else {"split": split}
    try:
        rows = datasets.load_dataset(kind if file else name, **options).to_list()
    except Exception as e:  # it raises anything, for a damaged file or without a network
        raise InputError(f"--prompts {name} --split {split}: {first_line(e)}") from e
    return enumerate(rows, 1)


def _fault_of_row(row: object) -> str | None:
    if not isinstance(row, dict) or "prompt" not in row:
        return 'no key "prompt"'
    prompt = row["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list) or not messages:
        return '"prompt" is neither text nor messages'
    for key in ("content", "role"):
        if not all(isinstance(m, dict) and isinstance(m.get(key), str) for m in messages):
            return f'a message has no "{key}"'
    return None if prompt else '"prompt" is empty'


def load_reward(spec: str, ready_made: dict[str, RewardFunction]) -> RewardFunction:
    """One of `ready_made` by its name, or FILE.py:FUNCTION; runs the file. Raises InputError."""
    if spec in ready_made:
        return ready_made[spec]
    path, _, name = spec.rpartition(":")
    if not path or not name:
        known = ", ".join(ready_made)
        raise InputError(f"--reward {spec}: write it as FILE.py:FUNCTION, or choose from {known}")
    if not Path(path).is_file():
        raise InputError(f"--reward {spec}: there is no file {path}")
    module_spec = importlib.util.spec_from_file_location(f"reward_{Path(path).stem}", path)
    if module_spec is None:
        raise InputError(f"--reward {spec}: {path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickle look modules up by name
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:
        fault = f"{path} fails on import: {type(e).__name__}: {first_line(e)}"
        raise InputError(f"--reward {spec}: {fault}") from e
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"--reward {spec}: {path} has no function {name}")
    return function


class RewardModel:
    """A sequence classifier with one label, and its tokenizer, as a reward. Raises InputError."""

    __name__ = "reward_model"

    def __init__(self, name: str, device: torch.device, batch_size: int = 32) -> None:
        flag, kind = "--reward_model", transformers.AutoModelForSequenceClassification
        self.model, missing = from_hub_or_folder(kind, name, flag)
        labels = self.model.config.num_labels
        if labels != 1:
            raise InputError(f"{flag} {name}: has {labels} labels, and a reward model has one")
        if missing:
            raise InputError(f"{flag} {name}: no reward model, its checkpoint has no {missing[0]}")
        self.model.eval().requires_grad_(False).to(device)
        self.tokenizer = load_tokenizer(name, flag)
        self.batch_size = batch_size

    @torch.no_grad()
    def __call__(self, prompts: list[Prompt], completions: list, **columns) -> list[float]:
        ids = [self._tokens(p, c) for p, c in zip(prompts, completions, strict=True)]
        limit = getattr(self.model.config, "max_position_embeddings", None) or math.inf
        limit = min(limit, self.tokenizer.model_max_length)  # RoBERTa takes 2 less than it has
        if (longest := max(map(len, ids))) > limit:
            fault = f"takes {limit} tokens, and a prompt with its completion has {longest}"
            remedy = "shorten the prompts or lower --max_new_tokens"
            raise InputError(f"the reward model {fault}: {remedy}")
        scores = []
        for start in range(0, len(ids), self.batch_size):
            rows = ids[start : start + self.batch_size]
            # transformers takes the score at the last token that is not pad, which with pad == EOS
            # would be the one before a real EOS. So pad with an id that no row contains.
            used = set(itertools.chain(*rows))
            pad = next((i for i in range(self.model.config.vocab_size) if i not in used), 0)
            self.model.config.pad_token_id = pad
            tokens, mask = pad_rows(rows, pad, "right", self.model.device)
            # No position ids: padding on the right needs none, and RoBERTa's don't start at 0.
            scores += self.model(input_ids=tokens, attention_mask=mask).logits[:, 0].tolist()
        return scores

    def _tokens(self, prompt: Prompt, completion: str | list[dict[str, str]]) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer(prompt + text_of(completion)).input_ids
        if self.tokenizer.chat_template is None:
            return self.tokenizer("\n".join(m["content"] for m in prompt + completion)).input_ids
        text = self.tokenizer.apply_chat_template(prompt + completion, tokenize=False)
        return self.tokenizer(text, add_special_tokens=False).input_ids


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
    has_own_reward = bool(config.reward or config.reward_model)
    if config.prompts:
        rows = read_prompts(config.prompts, config.split)
        faults = () if has_own_reward or task.row_fault is None else map(task.row_fault, rows)
        if fault := next(filter(None, faults), None):
            raise InputError(f"{config.prompts}: task {config.task} {fault}; or give --reward")
        task.train, task.heldout = split_prompts(rows)
    if has_own_reward:
        task.rewards, task.weights = [load_reward(spec, rewards) for spec in config.reward], []
        if config.prompts:
            task.verifier = None  # made for the prompts of the task, not for these
    if config.reward_model:
        task.reward_model = RewardModel(config.reward_model, device)
        task.rewards.append(task.reward_model)
    task.weights = config.reward_weights or task.weights or [1.0] * len(task.rewards)
    if len(task.weights) != (count := len(task.rewards)):
        raise InputError(f"--reward_weights {task.weights}: give one per reward, here {count}")
    if not task.train or not task.heldout:
        raise InputError(f"--task {config.task}: needs prompts to train on and held-out ones")
    if chat and isinstance(task.train[0]["prompt"], str):
        print("The prompts are plain text, so the model's chat template is not used.")
    return task


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


def split_prompts(rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """(train, held out): a tenth of the rows, at most 512, is held out. Fewer than ten rows are all
    trained on and evaluated. No prompt is on both sides, unless every held-out one would be.
    """
    rows = list(rows)
    random.Random(0).shuffle(rows)
    if len(rows) < 10:
        print("Fewer than ten prompts: none is held out, they are trained on and evaluated.")
        return rows, rows
    num_heldout = min(512, len(rows) // 10)
    train, heldout = rows[num_heldout:], rows[:num_heldout]
    seen = {json.dumps(row["prompt"]) for row in train}  # the file may have a prompt twice
    return train, [row for row in heldout if json.dumps(row["prompt"]) not in seen] or heldout


def prompt_batch(rows: list[dict], step: int, size: int, seed: int) -> list[dict]:
    """The `size` prompts of a step, from endless passes over `rows`, each shuffled anew."""
    # They depend on seed and step alone: a resumed run gets the same prompts.
    passes = range(step * size // len(rows), ((step + 1) * size - 1) // len(rows) + 1)
    order = [row for p in passes for row in random.Random(f"{seed},{p}").sample(rows, len(rows))]
    start = step * size - passes[0] * len(rows)
    return order[start : start + size]


def pad_rows(rows: list[list[int]], pad: int, side: str, device: Any) -> tuple[Tensor, Tensor]:
    """Rows of ids, padded on the "left" or "right" to the longest row: (ids, mask), each (B, L)."""
    width = max(map(len, rows))
    tokens = torch.full((len(rows), width), pad)
    mask = torch.zeros_like(tokens)
    for i, row in enumerate(rows):
        columns = slice(width - len(row), None) if side == "left" else slice(len(row))
        tokens[i, columns], mask[i, columns] = torch.tensor(row), 1
    return tokens.to(device), mask.to(device)
