"""What runs in the process of a submission: the tests of one problem, in a copy of the repository.

What each test came to goes into a pipe: what the student's code prints can't change it.
"""

import contextlib
import json
import os
import re
import resource
import sys
import threading
from multiprocessing.connection import Connection

import pytest
from tqdm import tqdm

LIMITS = {resource.RLIMIT_AS: 6 * 2**30, resource.RLIMIT_FSIZE: 2**26}  # bytes: memory, a file
CUT = 500  # characters of a message
IMPORTS = "imports"  # the place of what no test can run without
RUNTEST = pytest.Function.runtest  # the first that a cheat replaces


def run(folder: str, problem: str, files: list[str], pipe: Connection) -> None:
    """Send {} once all is imported, then {test: its fault, or ""} of the tests, and end."""
    os.setsid()
    os.chdir(folder)
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(os.dup2(output, 1), 2)
    for kind, most in LIMITS.items():
        with contextlib.suppress(OSError, ValueError):  # a system without this limit
            resource.setrlimit(kind, (most, most))
    installed = (sys.prefix, sys.base_prefix)
    sys.path[:] = [folder, *(path for path in sys.path if path.startswith(installed))]
    tqdm.set_lock(threading.RLock())  # its own one outlives the process, which is killed
    judge, options = Judge(pipe), "-q -p no:cacheprovider -p no:xdist --basetemp tmp --rootdir"
    pytest.main([*options.split(), folder, "--problem", problem, *files], plugins=[judge])
    pipe.send_bytes(json.dumps(judge.found).encode())
    os._exit(0)  # without the seconds that torch takes to end


class Judge:
    """A plugin of pytest that notes what each part of a problem came to, of all its parameters."""

    def __init__(self, pipe: Connection) -> None:
        self.found, self.pipe = {}, pipe  # {part: its first fault, or ""}

    def pytest_collection_finish(self) -> None:
        self.pipe.send_bytes(b"{}")  # the imports have come to an end

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            text = str(report.longrepr).strip()
            of_syntax = re.search(r'^E +File ".*?(\w+\.py)", (line \d+)', text, re.M)
            place = f"{of_syntax[1]}, {of_syntax[2]}: " if of_syntax else ""
            self.found[IMPORTS] = (place + re.sub("^E +", "", text.split("\n")[-1]))[:CUT]

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> None:
        fault = ""
        if call.excinfo is not None:
            fault = f"{call.excinfo.typename}: {str(call.excinfo.value).strip()}"[:CUT]
            fault = fault.removesuffix(": ").removeprefix("NotImplementedError: ")
        if pytest.Function.runtest is not RUNTEST:
            fault = "the submission has changed how pytest runs a test"
        for _, part in item.user_properties:  # see tests/conftest.py
            self.found[part] = self.found.get(part) or fault
