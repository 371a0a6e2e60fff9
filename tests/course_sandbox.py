"""One sandbox of each level for all tests of a process: to start one takes seconds."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "course"))

from sandbox import LEVELS, Sandbox


class Shared(Sandbox):
    """Stays open for the next test, and ends when this process does."""

    def close(self) -> None:
        pass


SANDBOXES = {level: Shared(level) for level in LEVELS}
SANDBOX = SANDBOXES[LEVELS[0]]
