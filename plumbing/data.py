"""Prompts and rewards: read from files and datasets, filled into templates, tokenised, scored."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import inspect
import json
import math
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StopStringCriteria
from transformers import PreTrainedTokenizerBase as Tokenizer

from common import Rollout, base_model
from plumbing.decoding import text_after
from plumbing.errors import InputError, first_line, optional_library
from plumbing.forward import on_cpu, to
from plumbing.models import context_length, eos_token_ids

Prompt = str | list[dict[str, str]]  # text, or chat messages
ROW_FORMAT = 'each line must be like {"prompt": "..."} or {"prompt": [{"role": .., "content": ..}]}'


def text_of(completion: str | list[dict[str, str]]) -> str:
    """The text of a completion, whether it is a string or chat messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def read_prompts(
    path: str | Path,
    split: str | None = "train",
    subset: str | None = None,
    *,
    column: str = "prompt",
    template: str | None = None,
    flags: tuple[str, str] = ("--prompts", "--split"),
) -> list[dict]:
    """Rows from a file of JSON lines, or from what the library datasets reads: CSV and Parquet
    files, folders, datasets by name, of which `subset` and `split`. The key `prompt` of a row is
    what `column` holds, filled into the template. Raises InputError with the first bad row.
    """
    rows = []
    found, kind, remedy = read_rows(path, split, subset, flags, ROW_FORMAT)
    for number, row in found:
        try:
            rows.append(row | {"prompt": _prompt_of(row, column, template)})
        except (ValueError, TypeError) as e:
            raise InputError(f"{path}, {kind} {number}: {first_line(e)}{remedy}") from e
    if not rows:
        raise InputError(f"{path}: holds no prompts{remedy}")
    return rows


def read_rows(
    path: str | Path, split: str | None, subset: str | None, flags: tuple[str, str], form: str
) -> tuple[Iterator[tuple[int, Any]], str, str]:
    """What a file or a dataset holds: (number and row of each, "row" or "line", and what an error
    about one should say: the form of a line of JSON). Raises InputError, also while it is read.
    """
    suffix = Path(path).suffix
    is_name = suffix not in (".jsonl", ".json", ".txt") and not Path(path).is_file()
    if subset and not is_name:
        raise InputError(f"--subset {subset}: {path} is one file, and has no subsets")
    if is_name or suffix in (".csv", ".parquet"):
        return _from_datasets(str(path), split, subset, flags), "row", ""
    return _from_json_lines(path, flags[0], form), "line", f"; {form}"


def _from_json_lines(path: str | Path, flag: str, form: str) -> Iterator[tuple[int, Any]]:
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"{flag} {path}: can't be read ({first_line(e)})") from e
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                yield number, json.loads(line)
        except (ValueError, RecursionError) as e:
            fault = f"{path}, line {number}: not JSON ({first_line(e)})"
            raise InputError(f"{fault}; {form}") from e


def _from_datasets(
    name: str, split: str | None, subset: str | None, flags: tuple[str, str]
) -> Iterator[tuple[int, Any]]:
    remedy = "pip install datasets, or give a file of JSON lines"
    datasets = optional_library("datasets", f"{flags[0]} {name}: {remedy}")
    datasets.disable_progress_bars()
    kind = Path(name).suffix[1:]
    if kind in ("csv", "parquet"):
        arguments, options, said = [kind], {"data_files": name, "split": "train"}, ""
    elif subset and Path(name, subset).is_dir():  # the hub's layout, without its README
        arguments, options = [str(Path(name, subset))], {"split": split}
        said = f" --subset {subset} {flags[1]} {split}"
    else:
        arguments, options = [name, subset], {"split": split}
        said = f" --subset {subset}" * bool(subset) + f" {flags[1]} {split}"
    try:
        rows = datasets.load_dataset(*arguments, **options).to_list()
    except Exception as e:  # it raises anything, for a damaged file or without a network
        raise InputError(f"{flags[0]} {name}{said}: {first_line(e)}") from e
    return enumerate(rows, 1)


def _prompt_of(row: object, column: str, template: str | None) -> Prompt:
    """The prompt that a row holds, filled into the template. Raises ValueError."""
    if not isinstance(row, dict):
        raise ValueError(f'no key "{column}"')
    if template is not None and "prompt" not in names_in(template):
        return fill(template, row)
    if column not in row:
        raise ValueError(f'no key "{column}"{_nearest(column, list(row))}')
    prompt = row[column]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'"{column}" is neither text nor messages')
    for key in ("content", "role"):
        if not all(isinstance(m, dict) and isinstance(m.get(key), str) for m in messages):
            raise ValueError(f'a message has no "{key}"')
    if not prompt:
        raise ValueError(f'"{column}" is empty')
    return prompt if template is None else in_template(template, row | {"prompt": prompt})


def _nearest(name: str, names: list[str]) -> str:
    """ ", there are a, b: did you mean a?" """
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f", there are {', '.join(names)}" + (f": did you mean {found[0]}?" if found else "")


IN_BRACES = re.compile(r"\{\{|\}\}|\{(\w+)\}")


def names_in(template: str) -> list[str]:
    """The columns that a template names, in braces. {{ and }} are braces of the text."""
    return [name for name in IN_BRACES.findall(template) if name]


def fill(template: str, columns: dict) -> str:
    """The template with the value of each column in the place of its name. Raises ValueError."""

    def value(match: re.Match) -> str:
        if (name := match[1]) is None:
            return match[0][0]  # {{ or }}
        if name not in columns:
            hint = _nearest(name, list(columns))
            raise ValueError(f"--prompt_template: no column {name}{hint}; {{{{ is a brace")
        return str(columns[name])

    return IN_BRACES.sub(value, template)


def in_template(template: str, row: dict) -> Prompt:
    """The prompt of a row, filled into the template; of messages the last one. ValueError."""
    prompt = row["prompt"]
    filled = fill(template, row | {"prompt": text_of(prompt)})
    return filled if isinstance(prompt, str) else [*prompt[:-1], prompt[-1] | {"content": filled}]


def after_system(system: str, prompt: Prompt) -> Prompt:
    """The prompt as chat messages after a system message, which is left out where it is empty.
    Raises ValueError where there is one already.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if messages[0]["role"] == "system":
        raise ValueError("the messages have a system message already")
    return [{"role": "system", "content": system}] * bool(system) + messages


def text_or_file(value: str | None, flag: str) -> str | None:
    """What the file of this name holds, without its last line break; `value` if there is none."""
    try:
        if value is None or not Path(value).is_file():
            if value is not None and re.fullmatch(r"\S+\.(txt|md|jinja)", value):
                raise InputError(f"{flag} {value}: there is no such file")
            return value
    except (OSError, ValueError):  # too long for a name
        return value
    try:
        return Path(value).read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"{flag} {value}: can't be read ({first_line(e)})") from e


def split_prompts(rows: list[dict], what: str = "prompts") -> tuple[list[dict], list[dict]]:
    """(train, held out): a tenth of the rows, at most 512, is held out. Fewer than ten rows are all
    trained on and evaluated. No prompt is on both sides, unless every held-out one would be.
    """
    rows = list(rows)
    random.Random(0).shuffle(rows)
    if len(rows) < 10:
        print(f"Fewer than ten {what}: none is held out, they are trained on and evaluated.")
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
    reward_model: Any | None = None  # also the last of `rewards`
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
    from tasks import VERIFIERS

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
        from plumbing.preferences import RewardModel

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


# Any id will do: the masks say what is padding, not the id. That of the tokenizer may be one that
# the model doesn't know: a pad token that was added to the tokenizer alone.
PADDING = 0


def prompt_tokens(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """The token ids of one prompt; of chat messages up to where the assistant's turn begins. Raises
    InputError where there is no chat template, and for a prompt that gives no tokens.
    """
    if isinstance(prompt, list) and tokenizer.chat_template is None:
        raise InputError("the prompts are chat messages, and the model has no chat template")
    try:
        if isinstance(prompt, str):
            ids = tokenizer(prompt).input_ids
        else:
            text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            # The template writes BOS itself; add_special_tokens would put a second one in front.
            ids = tokenizer(text, add_special_tokens=False).input_ids
    except Exception as e:  # half a surrogate pair, roles that the template does not know, ...
        fault = f"{type(e).__name__}: {first_line(e)}"
        raise InputError(f"the prompt {str(prompt)[:60]!a} can't be tokenised ({fault})") from e
    if not ids:
        raise InputError(f"the prompt {prompt!r} has no tokens")
    return ids


def check_prompts(config: Any, policy: PreTrainedModel, tokenizer: Tokenizer, task: Task) -> None:
    """Check that every prompt suits the vocabulary and the context. Raises InputError."""
    limit, new = context_length(policy), config.max_new_tokens
    if limit is not None and new >= limit:
        raise InputError(f"--max_new_tokens {new}: the model's context is {limit}, prompt included")
    vocab_size = policy.get_input_embeddings().weight.shape[0]
    prompts = [row["prompt"] for row in task.train + task.heldout]
    for prompt, ids in zip(prompts, _tokens_of_all(tokenizer, prompts), strict=True):
        if limit is not None and len(ids) + new > limit:
            fault = f"a prompt of {len(ids)} tokens leaves no room for {new} new ones in a context"
            remedy = f"lower --max_new_tokens or shorten {str(prompt)[:60]!r}"
            raise InputError(f"{fault} of {limit}: {remedy}")
        if max(ids) >= vocab_size:
            fault = f"its tokenizer gives id {max(ids)}, and the model knows {vocab_size} tokens"
            raise InputError(f"--model {config.model}: {fault}: they don't belong together")


def _tokens_of_all(tokenizer: Tokenizer, prompts: list[Prompt]) -> list[list[int]]:
    """prompt_tokens of each prompt: texts all at once, which is many times as fast."""
    if all(isinstance(prompt, str) for prompt in prompts):
        with contextlib.suppress(Exception):
            ids = tokenizer(prompts).input_ids
            if all(ids):
                return ids
    # One by one: so that an error names its prompt.
    return [prompt_tokens(tokenizer, prompt) for prompt in prompts]


def encode_prompts(tokenizer: Tokenizer, rows: list[dict]) -> tuple[Tensor, Tensor]:
    """Tokenise prompts: (ids, mask), each (N, P), on the CPU, padded on the left, so completions
    start at P.
    """
    ids = [prompt_tokens(tokenizer, row["prompt"]) for row in rows]
    return pad_rows(ids, PADDING, "left", "cpu")


def sampling_options(config: Any, policy: PreTrainedModel, tokenizer: Tokenizer) -> dict[str, Any]:
    """Arguments of generate: softmax(logits / temperature), with a generator seeded by the run."""
    # A special token is no text: as a stop string it is another EOS.
    special = {str(x): i for i, x in tokenizer.added_tokens_decoder.items() if x.special}
    ids = [special[string] for string in config.stop if string in special]
    strings = [string for string in config.stop if string not in special]
    return {
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "eos_token_ids": eos_token_ids(policy, tokenizer) + ids,
        "pad_token_id": PADDING,
        "generator": torch.Generator(policy.device).manual_seed(config.seed),
        "bf16": getattr(config, "bf16", False),  # only runs have the flag
        "stop": stop_criteria(tokenizer, strings) if strings else None,
    }


def stop_criteria(tokenizer: Tokenizer, strings: list[str]) -> StopStringCriteria:
    """What tells from token ids which completions end with a stop string. Raises InputError."""
    try:
        criteria = StopStringCriteria(tokenizer, strings)
    except ValueError as e:  # no token has the last character of a string, for example
        raise InputError(
            f"--stop {strings}: can't be found with this tokenizer: {first_line(e)}"
        ) from e
    # It would take the name of a special token for text: "<|pad|>" would end at the string ">".
    special = [i for i, x in tokenizer.added_tokens_decoder.items() if x.special]
    criteria.embedding_vec = criteria.embedding_vec.clone()  # the library uses it for others too
    criteria.embedding_vec[special] = -1
    return criteria


def decode(tokenizer: Tokenizer, rollout: Rollout, stop: Sequence[str] = ()) -> list[str]:
    """The text of each completion, B strings, without EOS and padding, with its stop string."""
    rollout, length = on_cpu(rollout), rollout.completion_mask.shape[1]
    num_tokens = rollout.completion_mask.sum(1).tolist()
    texts = []
    for row, real, n, finished in zip(
        rollout.tokens, rollout.attention_mask, num_tokens, rollout.finished.tolist(), strict=True
    ):
        prompt, ids = row[:-length][real[:-length]].tolist(), row[-length:][:n].tolist()
        text = text_after(tokenizer, prompt, ids[:-1] if finished else ids)
        if finished and stop:  # by EOS, which is no text, or by the end of a stop string
            whole = text_after(tokenizer, prompt, ids)
            text = whole if any(string in whole for string in stop) else text
        texts.append(text)
    return texts


def score(
    task: Task, rows: list[dict], rollout: Rollout, tokenizer: Tokenizer
) -> tuple[Tensor, list[str]]:
    """Score a rollout of G completions for each of N prompts: (scores (N*G,) on the CPU, texts).

    The rewards are added with their weights. One that is None is left out of the sum; where all
    are, the score is NaN.
    """
    texts, ids = decode(tokenizer, rollout, task.stop), completion_ids(rollout)
    return score_texts(task, rows, texts, ids), texts


def score_texts(
    task: Task, rows: list[dict], texts: list[str], ids: list[list[int]] | None = None
) -> Tensor:
    """Score G texts for each of N rows: (N*G,), as `score` does. Without the token ids no reward
    gets `completion_ids`.
    """
    num_generations = len(texts) // len(rows)
    rows = [row for row in rows for _ in range(num_generations)]
    columns = [_call_reward(reward, rows, texts, ids) for reward in task.rewards]
    scores = torch.stack(columns, dim=1)  # (N*G, rewards)
    total = (scores * torch.tensor(task.weights)).nansum(dim=1)
    return total.masked_fill(scores.isnan().all(dim=1), math.nan)


def verify(task: Task, rows: list[dict], texts: list[str], rollout: Rollout) -> Tensor | None:
    """What the verifier says of G completions for each of N prompts: (N, G), NaN for None; None if
    the task has no verifier.
    """
    if task.verifier is None:
        return None
    num_generations = len(texts) // len(rows)
    rows = [row for row in rows for _ in range(num_generations)]
    right = _call_reward(task.verifier, rows, texts, completion_ids(rollout))
    return right.view(-1, num_generations)


def completion_ids(rollout: Rollout) -> list[list[int]]:
    """The token ids of each completion, EOS included."""
    tokens, masks = on_cpu(rollout).tokens, on_cpu(rollout).completion_mask
    return [row[-len(mask) :][mask].tolist() for row, mask in zip(tokens, masks, strict=True)]


def _call_reward(
    reward: RewardFunction, rows: list[dict], texts: list[str], ids: list | None
) -> Tensor:
    """Call a reward function with TRL's keyword arguments: (B,) float32, NaN where it gave None."""
    name = getattr(reward, "__name__", type(reward).__name__)
    prompts = [row["prompt"] for row in rows]
    completions = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    keys = sorted({key for row in rows for key in row} - {"prompt"})
    columns = {key: [row.get(key) for row in rows] for key in keys}
    arguments = columns | {"prompts": prompts, "completions": completions, "completion_ids": ids}
    if ids is None:
        del arguments["completion_ids"]
    try:
        parameters = inspect.signature(reward).parameters.values()
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            arguments = {p.name: arguments[p.name] for p in parameters if p.name in arguments}
        values = reward(**arguments)
    except InputError:
        raise
    except (Exception, SystemExit) as e:
        fault = f"{type(e).__name__}: {first_line(e)}"
        raise InputError(f"the reward function {name} raised {fault}") from e
    try:
        known = [value is not None for value in values]
        scores = torch.tensor([math.nan if v is None else float(v) for v in values])
    except (TypeError, ValueError, OverflowError) as e:
        fault = f"must return a list of numbers or None ({first_line(e)})"
        raise InputError(f"the reward function {name} {fault}") from e
    if len(known) != len(texts):
        fault = f"returned {len(known)} values for {len(texts)} completions"
        raise InputError(f"the reward function {name} {fault}")
    for value, there, text in zip(scores.tolist(), known, texts, strict=True):
        if there and not math.isfinite(value):
            raise InputError(f"the reward function {name} returned {value} for {text[:60]!r}")
    return scores


def pad_rows(rows: list[list[int]], pad: int, side: str, device: Any) -> tuple[Tensor, Tensor]:
    """Rows of ids, padded on the "left" or "right" to the longest row: (ids, mask), each (B, L)."""
    width = max(map(len, rows))
    tokens = torch.full((len(rows), width), pad)
    mask = torch.zeros_like(tokens)
    for i, row in enumerate(rows):
        columns = slice(width - len(row), None) if side == "left" else slice(len(row))
        tokens[i, columns], mask[i, columns] = torch.tensor(row), 1
    return to(torch.device(device), tokens), to(torch.device(device), mask)
