"""What runs in the process of a submission: the tests of one problem, in a copy of the repository.

What each test came to goes into a pipe: what the student's code prints can't change it.
"""

import contextlib
import json
import os
import resource
import sys
import threading
from multiprocessing.connection import Connection

import pytest
from tqdm import tqdm

MEMORY = 6 * 2**30  # bytes of addresses
CUT = 500  # characters of a message
IMPORTS = "imports"  # the place of what no test can run without


def run(folder: str, problem: str, files: list[str], pipe: Connection) -> None:
    """Send {test: its fault, or ""} of the problem's tests, then end."""
    os.setsid()
    os.chdir(folder)
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(os.dup2(output, 1), 2)
    with contextlib.suppress(OSError, ValueError):  # a system without this limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    installed = (sys.prefix, sys.base_prefix)
    sys.path[:] = [folder, *(path for path in sys.path if path.startswith(installed))]
    tqdm.set_lock(threading.RLock())  # its own one outlives the process, which is killed
    judge, options = Judge(), "-q -p no:cacheprovider -p no:xdist --basetemp tmp --rootdir"
    pytest.main([*options.split(), folder, "--problem", problem, *files], plugins=[judge])
    pipe.send_bytes(json.dumps(judge.found).encode())
    os._exit(0)  # without the seconds that torch takes to end


class Judge:
    """A plugin of pytest that notes what each test function came to, of all its parameters."""

    def __init__(self) -> None:
        self.found = {}  # {test: its first fault, or ""}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.found[IMPORTS] = str(report.longrepr).strip().split("\n")[-1][:CUT]

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> None:
        test, fault = f"{item.path.name}::{item.originalname}", ""
        if call.excinfo is not None:
            kind = call.excinfo.typename.replace("NotImplementedError", "not written yet")
            fault = f"{kind}: {str(call.excinfo.value).strip()}"[:CUT].removesuffix(": ")
        self.found[test] = self.found.get(test) or fault
