"""Rewards: functions with TRL's signature, taken by name or from a file, and what they return."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copy
import functools
import importlib.util
import inspect
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from plumbing.errors import InputError, described, first_line, is_out_of_memory

RewardFunction = Callable[..., list[float | None]]  # (prompts, completions, **columns), as in TRL


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
    file = Path(path).resolve()
    if not file.is_file() or file.suffix != ".py":
        raise InputError(f"{flag} {spec}: there is no Python file {path}")
    try:
        module = _import_file(file, file.stat().st_mtime_ns)
    except (Exception, SystemExit) as e:
        raise InputError(f"{flag} {spec}: {path} fails on import: {described(e)}") from e
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"{flag} {spec}: {path} has no function {name}")
    return function


@functools.lru_cache
def _import_file(file: Path, mtime: int) -> ModuleType:
    """Import a file, once for all its functions: it may load a model.

    Its folder comes into sys.path, and it keeps its own name: so it can import its neighbours, and
    the processes that it spawns can import it.
    """
    if str(file.parent) not in sys.path:
        sys.path.insert(1, str(file.parent))  # after the folder of the script, which comes first
    importlib.invalidate_caches()
    name, found = file.stem, None
    with contextlib.suppress(ImportError, ValueError):  # a name with a dot; __main__
        found = importlib.util.find_spec(name)
    if found is None or found.origin != str(file):
        print(f"{file.name}: Python has another module {name}. If it spawns processes, rename it.")
        name = re.sub(r"\W", "_", str(file))
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    # A pool that it keeps fails at the exit, with a traceback, where what it needs is gone first.
    atexit.register(vars(module).clear)
    spec.loader.exec_module(module)
    return module


def check_answers(name: str, verifier: RewardFunction, rows: list[dict]) -> None:
    """Raise InputError now for an answer that the verifier can't read or that isn't there, not when
    its row is due.
    """
    if "answer" not in inspect.signature(verifier).parameters:
        return
    for row in rows:
        if row.get("answer") is None:
            fault = f"the prompt {str(row['prompt'])[:60]!r} has none: add it, or give --reward"
            raise InputError(f"the reward {name} needs a column answer, and {fault}")
    verifier([""] * len(rows), answer=[row["answer"] for row in rows])


def score_texts(
    rewards: list[RewardFunction],
    weights: list[float],
    rows: list[dict],
    texts: list[str],
    ids: list[list[int]] | None = None,
) -> Tensor:
    """Score G texts for each of N rows: (N*G,). The rewards are added with their weights; one that
    is None is left out of the sum, and where all are, the score is NaN. Without the token ids no
    reward gets `completion_ids`.
    """
    scores = torch.stack([call_reward(r, rows, texts, ids) for r in rewards], dim=1)
    total = (scores * torch.tensor(weights)).nansum(dim=1)  # (N*G, rewards) -> (N*G,)
    return total.masked_fill(scores.isnan().all(dim=1), math.nan)


def call_reward(
    reward: RewardFunction, rows: list[dict], texts: list[str], ids: list | None
) -> Tensor:
    """Call a reward function with TRL's keyword arguments on G texts for each of N rows: (N*G,)
    float32, NaN where it gave None. Raises InputError for what it raises, and for bad values.
    """
    what = f"the reward function {getattr(reward, '__name__', type(reward).__name__)}"
    try:
        values = reward(**_arguments(reward, rows, texts, ids))
        if inspect.isawaitable(values):
            values = _event_loop().run_until_complete(values)
        if isinstance(values, (str, bytes, Mapping, Set)) or not isinstance(values, Iterable):
            kind = type(values).__name__
            raise InputError(f"{what} must return a list of numbers or None, not a {kind}")
        # Here the code of a generator runs.
        values = list(values.detach() if isinstance(values, Tensor) else values)
    except BaseException as e:  # time-outs and cancelled tasks are no Exception
        if isinstance(e, (InputError, KeyboardInterrupt)) or is_out_of_memory(e):
            raise
        raise InputError(f"{what} raised {described(e)}{_place(e, reward)}") from e
    if len(values) != len(texts):
        raise InputError(f"{what} returned {len(values)} values for {len(texts)} completions")
    try:
        scores = torch.tensor([math.nan if v is None else float(v) for v in values])
    except Exception as e:  # of tensors, tables, ...
        raise InputError(f"{what} must return a list of numbers or None ({first_line(e)})") from e
    for value, score, text in zip(values, scores.tolist(), texts, strict=True):
        if value is not None and not math.isfinite(score):
            raise InputError(f"{what} returned {score} for {text[:60]!r}")
    return scores


def _arguments(
    reward: RewardFunction, rows: list[dict], texts: list[str], ids: list | None
) -> dict[str, list]:
    """The keyword arguments that a reward function takes, of N rows with G completions each. All
    are copies: a reward that appends to a prompt would change the data.
    """
    num_generations = len(texts) // len(rows)
    rows = [copy.deepcopy(row) for row in rows for _ in range(num_generations)]
    keys = {key: None for row in rows for key in row}
    arguments = {key: [row.get(key) for row in rows] for key in keys}
    arguments["prompts"] = arguments.pop("prompt")
    arguments["completions"] = [
        text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
        for row, text in zip(rows, texts, strict=True)
    ]
    if ids is not None:
        arguments["completion_ids"] = copy.deepcopy(ids)
    parameters = inspect.signature(reward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return arguments
    return {p.name: arguments[p.name] for p in parameters if p.name in arguments}


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """The one in which all rewards are awaited: connections that they keep open belong to it."""
    return asyncio.new_event_loop()


def _place(error: BaseException, reward: RewardFunction) -> str:
    """Where in its own file a reward raised the error: " (rewards.py, line 3)", or nothing."""
    file = getattr(sys.modules.get(getattr(reward, "__module__", "")), "__file__", None)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    return f" ({Path(file).name}, line {lines[-1]})" if lines else ""
