"""The bugs that tests/mutations.py makes, and that it says who sees them."""

from collections import Counter

import pytest
from mutations import REPOSITORY, bugs, seen_by

# What stands in a function, and what bugs make of it.
MADE = {
    "if x: f()": ["False", "True", "pass"],
    "while x: f()": ["pass", "False", "pass"],
    "for x in y: continue": ["pass", "pass"],
    "with x: f()": ["if True:", "pass"],
    "raise x": ["pass"],
    "x = [y for y in z if y]": ["False", "True"],
    "x = y if z else a": ["False", "True"],
    "x = y and z and a": ["z and a", "y and a", "y and z"],
    "x = not y": ["y"],
    "x = -1": ["0"],
    "x = y + 0": ["y", "0", "y - 0", "1"],
    "x = y // 2.5": ["y", "2.5", "y / 2.5", "5.0"],
    "x = y < z <= a": ["y <= z <= a"],
    "x = y is None": ["y is not None"],
    "x = min(y, z)": ["max"],
    "x = y.any()": ["y", "y.all"],
    "x = torch.cat(y)": [],
    "x = f(y, z=True)": ["", "False"],
    "x = f(y, help=True, strict=True)": [],
    "x = f'{y[:60]}'": [],
    "x = f(x)": ["pass"],
    "x.y = z": ["pass"],
    "x += y": ["x = y", "x -= y", "pass"],
    "x = y = z": ["y = z", "x = z"],
    "x, y = z, 5": ["y, = (5,)", "x, = (z,)", "6"],
    "x: int | None = y": [],
    "'''Text'''": [],
}


@pytest.mark.parametrize("statement", MADE)
def test_of_a_statement_these_bugs_are_made(statement):
    made = [bug.name for bug in bugs(f"import torch\ndef f():\n    {statement}", "x.py")]
    assert [name.partition(" → ")[2].partition(" in ")[0] for name in made] == MADE[statement]


TEST = "test_the_first_of_several_eos_ids_ends_a_completion"


@pytest.mark.parametrize(
    ("file", "function", "said"),
    [
        ("common.py", "completion_mask", f"tests/test_common.py::{TEST}"),
        pytest.param("common.py", "gae", "UNSEEN", marks=pytest.mark.slow),
        pytest.param("tools/look.py", "main", "NOT PLANTED", marks=pytest.mark.slow),
    ],
)
def test_a_test_sees_only_bugs_that_it_runs(file, function, said, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    text = (REPOSITORY / file).read_text()
    bug = next(x for x in bugs(text, file) if x.name.startswith(f"{function}:"))
    tests = {f"tests/test_common.py::{TEST}": (1.0, {(file, bug.lines[0])})}
    assert seen_by(bug, tests, Counter()) == said
    assert seen_by(bug, {}, Counter()) == "UNSEEN: no test runs the line"
