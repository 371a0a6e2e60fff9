"""Two errors that are one line for the user, and what makes a library's errors one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class InputError(ValueError):
    """The user's input is at fault: one line that says what, where and what to do. Exit code 2."""


class Fault(Exception):
    """The run can't go on: one line that says what happened and what helps. Exit code 1."""


@contextlib.contextmanager
def blame(what: str) -> Iterator[None]:
    """Turn what a library raises, while it reads what the user gave, into an InputError of one
    line: `with blame("--model gpt2"):`.
    """
    try:
        yield
    except (InputError, Fault, MemoryError):
        raise
    except Exception as e:  # transformers, peft and datasets raise anything
        if type(e).__name__ == "OutOfMemoryError":  # torch's: this file is loaded without torch
            raise
        # A first line that ends in a colon only announces the reason.
        reason = " ".join(str(e).split()) if ":\n" in str(e)[:200] else str(e).split("\n")[0]
        if isinstance(e, ModuleNotFoundError):
            reason += f": pip install {e.name}"
        raise InputError(f"{what}: {type(e).__name__}: {reason[:300]}") from e
