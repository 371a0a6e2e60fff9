"""The two errors that a run ends with, each shown as one line."""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType


class InputError(ValueError):
    """The user's input is at fault: one line that says what, where and what to do. Exit code 2."""


class Fault(Exception):
    """The run can't go on: one line that says what happened and what helps. Exit code 1."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, for messages of one line."""
    return (str(error).strip().split("\n") or [""])[0]


def optional_library(name: str, message: str) -> ModuleType:
    """Import a library that few runs need. Raises InputError with the message if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise InputError(message) from e


def run_tool(main: Callable[[], None]) -> None:
    """Run the main() of a tool without torch: bad input is one line and exit code 2."""
    try:
        main()
    except InputError as e:
        print(f"error: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
