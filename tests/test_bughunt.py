"""The bug hunt: each hunt has one bug, a curve in which it shows, and a sealed answer."""

import ast
import json
import re
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY / "course"))

import bughunt
import make
from mutations import MUTATIONS

pytestmark = pytest.mark.slow  # pictures, and copies of the repository
MEASURED = json.loads((REPOSITORY / "course/symptoms.json").read_text())


def unused(source: str) -> set[str]:
    """Names that a function takes or sets and never reads: an editor greys them out."""
    found = set()
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
            set_ = {node.id for node in names if isinstance(node.ctx, ast.Store)}
            set_ |= {arg.arg for arg in [*function.args.args, *function.args.kwonlyargs]}
            read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
            found |= {f"{function.name}: {name}" for name in set_ - read}
    return found


@pytest.mark.parametrize("bug", MEASURED["bugs"])
def test_no_bug_leaves_a_name_that_an_editor_greys_out(bug):
    _, before, after = bughunt.planted(bug)
    assert before != after
    assert unused(after) <= unused(before)


def test_a_name_that_is_set_and_never_read_is_found():
    assert unused("def f(x, y):\n    z = x\n    return x") == {"f: y", "f: z"}


def test_each_curve_of_a_hunt_has_a_point_for_each_step():
    for bug, about in MEASURED["bugs"].items():
        steps = int(re.search(r"--num_steps (\d+)", bughunt.JOBS[about["script"]])[1])
        assert len(about["curve"]) == steps, bug
        rows = MEASURED["right"][about["script"]][about["metric"]]
        assert [len(row) for row in rows] == [steps] * 5, bug
    assert not any(name.startswith("eval/") for name in bughunt.METRICS)


def test_what_a_hunt_says_about_its_place_is_true_of_each_bug():
    for bug in MEASURED["bugs"]:
        before, after = (text.split("\n") for text in bughunt.planted(bug)[1:])
        more = len(after) - len(before)
        lines = bughunt.changed_lines("\n".join(before), "\n".join(after))
        # A line that says something else or is one too many, or a statement that is missing: then
        # the lines on both sides of the gap count.
        assert (more in (0, 1) and len(lines) == 1) or (more < 0 and len(lines) == 2), bug


def test_there_are_25_bugs_whose_curve_leaves_the_range_of_the_right_ones():
    measured = MEASURED
    known = {bug for _, _, _, bug in MUTATIONS}
    assert len(measured["bugs"]) >= 25 and set(measured["bugs"]) <= known
    for about in measured["bugs"].values():
        right = measured["right"][about["script"]][about["metric"]]
        assert len(right) == 5 and about["z"] > 3


def test_the_measured_bugs_lie_where_they_are_planted():
    measured = MEASURED["bugs"]
    files = {bug: file for bug, _, file, _, _ in bughunt.candidates()}
    assert {bug: about["file"] for bug, about in measured.items()} == {
        b: files[b] for b in measured
    }
    for about in measured.values():
        assert about["file"] in [f"{about['script']}.py", *bughunt.SHARED]


def test_a_hunt_has_one_bug_a_picture_and_a_sealed_answer(tmp_path, capsys):
    measured = MEASURED["bugs"]
    files = set()
    for seed in range(0, len(measured), 5):
        out = tmp_path / f"hunt{seed}"
        assert bughunt.main([str(out), "--seed", str(seed)]) == 0
        changed = [
            name
            for name in make.FILES
            if not name.endswith(".md")
            and (out / name).read_text() != (REPOSITORY / name).read_text()
        ]
        assert len(changed) == 1
        files |= set(changed)
        before, after = ((d / changed[0]).read_text() for d in (REPOSITORY, out))
        line = bughunt.changed_lines(before, after)[0]
        capsys.readouterr()
        assert bughunt.main([str(out), "--check", f"{changed[0]}:{line}"]) == 0
        assert bughunt.main([str(out), "--check", f"{changed[0]}:{line + 20}"]) == 1
        assert capsys.readouterr().out.split("\n")[0] == "Yes, that is the line."
        assert bughunt.main([str(out), "--check", "here"]) == 2
        # As seen from above the folder, and under another system's separator.
        for path in (f"{out}/{changed[0]}", f"./{changed[0]}", changed[0].replace("/", "\\")):
            assert bughunt.main([str(out), "--check", f"{path}:{line}"]) == 0
        # A file in a folder isn't found by its name alone: "no" would mislead.
        name = changed[0].rpartition("/")[2] if "/" in changed[0] else "forward.py"
        assert bughunt.main([str(out), "--check", f"{name}:{line}"]) == 2
        assert (out / "symptom.png").read_bytes()[:4] == b"\x89PNG"
        said = (out / "README.md").read_text() + (out / "answer.json").read_text()
        assert not any(bug in said for bug in measured)
    assert len(files) > 1
    again = tmp_path / "again"
    assert bughunt.main([str(again), "--seed", "0"]) == 0
    assert (again / changed[0]).exists() and bughunt.main([str(again)]) == 2


def test_each_bug_of_the_hunt_has_a_reason_for_its_curve():
    measured = MEASURED["bugs"]
    assert set(bughunt.REASONS) == set(measured)
    assert all(len(text) > 60 and text.endswith(".") for text in bughunt.REASONS.values())


def test_a_hunt_is_revealed_with_the_line_that_is_sealed(tmp_path, capsys):
    measured = MEASURED["bugs"]
    for seed in (2, 20231234):
        out = tmp_path / f"hunt{seed}"
        assert bughunt.main([str(out), "--seed", str(seed)]) == 0
        capsys.readouterr()
        assert bughunt.main(["--reveal", str(out)]) == 0
        text = capsys.readouterr().out
        assert bughunt.main(["--reveal", str(out / "answer.json")]) == 0
        assert capsys.readouterr().out == text
        place, bug = re.match(r"(\S+:\d+): (.+)", text).groups()
        assert bughunt.main([str(out), "--check", place]) == 0
        about = measured[bug]
        assert about["metric"] in text and bughunt.REASONS[bug] in " ".join(text.split())
        file, line = place.split(":")
        wrong = (out / file).read_text().split("\n")[int(line) - 1]
        assert wrong.strip() in text
        gone = set((REPOSITORY / file).read_text().split("\n"))
        gone -= set((out / file).read_text().split("\n"))
        assert gone and all(right.strip() in text for right in gone)


def test_what_is_no_hunt_or_of_another_version_is_one_line(tmp_path, capsys):
    assert bughunt.main(["--reveal", str(tmp_path)]) == 2
    for text in ("{}", "no json"):
        (tmp_path / "answer.json").write_text(text)
        assert bughunt.main(["--reveal", str(tmp_path)]) == 2
    (tmp_path / "answer.json").write_text('{"salt": "0", "seed": 3, "sealed": []}')
    assert bughunt.main(["--reveal", str(tmp_path)]) == 2
    errors = capsys.readouterr().err.strip().split("\n")
    assert len(errors) == 4 and all(line.startswith("error: ") for line in errors)
    assert "holds no hunt" in errors[0] and "another version" in errors[3]
    assert all("answer.json is no answer" in line for line in errors[1:3])
