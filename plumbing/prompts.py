"""Prompts: from files and datasets, in a template, split, batched."""

from __future__ import annotations

import difflib
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plumbing.errors import InputError, first_line, optional_library

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
