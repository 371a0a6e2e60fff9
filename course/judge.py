"""What runs in the process of a submission: the tests of one problem, in a copy of the repository.

What each test came to goes into a pipe, which has no name that the student's code could open, and
each line needs the key that the grader has drawn.
"""

import contextlib
import ctypes
import json
import os
import re
import resource
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
import torch
from tqdm import tqdm

LIMITS = {"AS": 6 * 2**30, "FSIZE": 64 * 2**20, "CORE": 0}  # bytes: addresses, a file
NEW_NETWORK, NEW_USER = 0x40000000, 0x10000000  # for Linux's unshare(2)
CUT = 500  # characters of a message
# What a comparison is made of. Code that replaces a part of it gets no points.
RELIED_ON = r"(builtins|math|statistics|torch|judge|test_\w+|small|conftest|pytest|_pytest[\w.]*)$"


def run(folder: str, problem: str, files: list[str], pipe: Connection) -> None:
    """Send what each test of the problem came to, then end."""
    key = pipe.recv_bytes().decode()
    os.setsid()
    os.chdir(folder)
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(os.dup2(output, 1), 2)
    for name, limit in LIMITS.items():
        with contextlib.suppress(OSError, ValueError):  # a system without this limit
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    if sys.platform == "linux":  # the network is refused where the system can do that
        unshare = ctypes.CDLL(None).unshare
        _ = unshare(NEW_NETWORK) and unshare(NEW_NETWORK | NEW_USER)  # the first one needs root
    installed = (sys.prefix, sys.base_prefix)
    sys.path[:] = [folder, *(path for path in sys.path if path.startswith(installed))]
    tqdm.set_lock(threading.RLock())  # one of its own, for this process alone

    def send(**line: object) -> None:
        pipe.send_bytes(json.dumps(line | {"key": key}).encode())

    options = f"-q -p no:cacheprovider -p no:xdist --basetemp tmp --problem {problem}".split()
    pytest.main([*options, "--rootdir", folder, *files], plugins=[Judge(send)])
    os._exit(0)  # without the seconds that torch takes to end


class Judge:
    """A plugin of pytest that sends what each test function came to, of all its parameters."""

    def __init__(self, send: Callable[..., None]) -> None:
        self.send, self.faults = send, {}  # {test: the first fault}

    def pytest_collection(self) -> None:  # nothing of the submission has been imported yet
        self.relied_on = dict(relied_on())

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.send(error=str(report.longrepr).strip().split("\n")[-1][:CUT])

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.relied_on = dict(relied_on()) | self.relied_on
        self.left = Counter(map(test_of, session.items))

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> None:
        if call.excinfo is not None:
            kind = call.excinfo.typename.replace("NotImplementedError", "not written yet")
            fault = f"{kind}: {str(call.excinfo.value).strip()}"[:CUT].removesuffix(": ")
            self.faults.setdefault(test_of(item), fault)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        result = yield
        now, before, test = dict(relied_on()), self.relied_on, test_of(item)
        replaced = [name for name in before if now.get(name) != before[name]]
        replaced += [name for name in now if name not in before and "Tensor" in name]
        if replaced:
            self.send(replaced=replaced[0])
        self.left[test] -= 1
        if not self.left[test]:
            self.send(test=test, fault=self.faults.get(test, ""))
        return result


def test_of(item: pytest.Item) -> str:
    return f"{item.path.name}::{item.originalname}"


def relied_on() -> Iterator[tuple[str, tuple[int, int]]]:
    """(Name, identity of it and of its code) of what a comparison is made of."""
    modules = [x for name, x in list(sys.modules.items()) if re.match(RELIED_ON, name)]
    classes = {x for m in modules for x in vars(m).values() if isinstance(x, type)}
    classes = {x for x in classes if re.match("_pytest|judge", x.__module__)} | {torch.Tensor}
    for holder in [*modules, *classes]:
        for name, x in list(vars(holder).items()):
            if callable(x):
                place = f"{getattr(holder, '__module__', '')}.{holder.__name__}.{name}"
                yield place.lstrip("."), (id(x), id(getattr(x, "__code__", None)))
