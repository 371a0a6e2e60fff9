"""The errors that a run ends with, each shown as one line."""

import difflib
import importlib
import sys
from collections.abc import Callable, Iterable
from types import ModuleType


class InputError(ValueError):
    """The user's input is at fault: one line that says what, where and what to do. Exit code 2."""


class Fault(Exception):
    """The run can't go on: one line that says what happened and what helps. Exit code 1."""


class Interrupted(Exception):
    """Ctrl-C or SIGTERM: the step is finished and saved. Exit code 128 + the signal's number."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.code = 128 + number


def first_line(error: BaseException) -> str:
    """The first line of an error's text, for messages of one line: with the next lines where it
    ends in a colon, for then it only announces the reason.
    """
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    lines = lines or [type(error).__name__]
    ends = [number for number, line in enumerate(lines, 1) if not line.endswith(":")]
    return " ".join(lines[: min(ends, default=None)]).rstrip(":")


def described(error: BaseException) -> str:
    """Kind and first line of an error of other people's code, "KeyError: 'x'", for messages."""
    kind = type(error).__name__
    return f"{kind}: {first_line(error)}" if str(error).strip() else kind


# On CUDA not only OutOfMemoryError: so says the driver, and so say the libraries that find no room
# for what they need themselves. On a CPU and on MPS torch raises a RuntimeError too.
NO_MEMORY = ("out of memory", "allocate memory", "enough memory", "bad_alloc", "_ALLOC_FAILED")
NO_MEMORY += ("CUBLAS_STATUS_NOT_INITIALIZED", "CUDNN_STATUS_NOT_INITIALIZED")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, in whatever words, says that there is no memory left."""
    found = isinstance(error, RuntimeError) and any(x in str(error) for x in NO_MEMORY)
    return found or isinstance(error, MemoryError)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "; did you mean X?", or nothing where no name is near."""
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def optional_library(name: str, message: str) -> ModuleType:
    """Import a library that few runs need. Raises InputError with the message if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise InputError(message) from e


def run_tool(main: Callable[[], None]) -> None:
    """Run a main(): errors are one line; exit code 2 for bad input, 1 for a fault."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A character that the terminal lacks is shown as its number, and ends no run.
            stream.reconfigure(errors="backslashreplace")
    try:
        main()
    except (InputError, Fault) as e:
        code, message = 2 if isinstance(e, InputError) else 1, f"error: {e}"
    except Interrupted as e:
        code, message = e.code, str(e)
    except KeyboardInterrupt:
        code, message = 130, "interrupted"
    except Exception as e:
        if not is_out_of_memory(e):
            raise
        # In a run: see Run.__exit__.
        code, message = 1, f"error: {described(e).rstrip('.')}: choose a smaller model"
    else:
        return
    print(message, file=sys.stderr)
    raise SystemExit(code)
