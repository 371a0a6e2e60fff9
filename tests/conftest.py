"""Which tests grade a problem, and fixtures. Nothing here imports torch (small.py does): the
process that hands out the tests starts its workers at once.
"""

import gc
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
# Faster for models this small, in the processes that tests start too: threads would wait for each
# other, as other workers have the cores.
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest

# Python looks for garbage at every 700 new objects: that took a tenth of the time of a small run.
gc.set_threshold(20_000)

# A starter of the course leaves functions to be written. Only the tests that grade them run there.
IS_STARTER = (Path(__file__).parent.parent / "answers.md").exists()


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "the tests that grade this problem of the course alone; give it again for one more"
    parser.addoption("--problem", action="append", default=[], help=words)


@pytest.hookimpl(tryfirst=True)  # before xdist reads it
def pytest_cmdline_main(config: pytest.Config) -> None:
    if config.option.problem:  # to start two more processes takes longer than these tests
        config.option.numprocesses = 0
    config.option.reportchars += "s" * IS_STARTER


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    problems = config.getoption("problem")
    for item in items:
        item.user_properties += [("graded", part) for part in graded_parts(item, problems)]
    if problems or IS_STARTER:
        items[:] = [item for item in items if item.user_properties]


def graded_parts(item: pytest.Item, problems: list[str]) -> list[str]:
    """What a test grades of these problems, or of all, as course/problems.py names it.
    @pytest.mark.problem has (problem, points), or (problem, points, "ids"), which are those of the
    parameters that count.
    """
    words, parts = set(re.findall(r"\w+", item.name.partition("[")[2])), []
    for problem, _, *ids in (mark.args for mark in item.iter_markers("problem")):
        if (problem in problems or not problems) and (not ids or words & {*ids[0].split()}):
            name = f"{item.path.name}::{item.originalname}"
            parts.append(f"{name} [{ids[0]}]" if ids else name)
    return parts


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo) -> Iterator[None]:
    """In a starter a test that meets a function which isn't written yet is skipped, and says which:
    so what is red is wrong.
    """
    report, fault = (yield), call.excinfo and call.excinfo.value
    if isinstance(fault, NotImplementedError) and str(fault).startswith("not written yet"):
        place = call.excinfo.traceback[-1]
        report.outcome = "skipped"
        report.longrepr = str(place.path), place.lineno + 1, str(fault)
    return report


@pytest.fixture(autouse=True)
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The picture of a run takes three quarters of the time of a small one: it is empty here. And a
    run that another test has left behind is none that an error could end.
    """
    monkeypatch.setattr("plumbing.run.Run.active", None)
    monkeypatch.setattr("plumbing.run.draw_curves", lambda folders, path: path.touch())


@pytest.fixture(autouse=True)
def no_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a GPU, what is marked cuda alone sees it: figures are those of a CPU."""
    if not request.node.get_closest_marker("cuda"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # of the processes that a test starts
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        # Where an earlier test has used the GPU, torch would ask it for its memory.
        monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)


@pytest.fixture(params=["gpt2", "llama"])
def small_model(request: pytest.FixtureRequest):
    """A GPT-2 (learned positions) and a Llama (rotary positions), in evaluation mode."""
    from small import SMALL_MODELS

    return SMALL_MODELS[request.param]().eval()


@pytest.fixture
def make_job(tmp_path: Path):
    """small.job_maker."""
    from small import job_maker

    return job_maker(tmp_path)
