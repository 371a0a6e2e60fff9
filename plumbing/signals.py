"""Ctrl-C and SIGTERM: the first lets a step end and be saved, the second ends the run at once."""

import contextlib
import os
import signal


class Interrupted(Exception):
    """Ctrl-C or SIGTERM: the step is finished and saved. Exit code 128 + the signal's number."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.code = 128 + number


class Signals:
    """Notes which signal came, if one did, in `number`, from `watch` to `restore`."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.handlers = {}  # what each signal did before

    def watch(self) -> None:
        with contextlib.suppress(ValueError):  # only the main thread may
            for number in (signal.SIGINT, signal.SIGTERM):
                self.handlers[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.number = number
        self.restore()
        # print may be what the signal interrupts, and can't be called again from within.
        with contextlib.suppress(OSError):
            os.write(2, b"\nfinishing what is begun, then saving; once more stops at once\n")

    def restore(self) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
