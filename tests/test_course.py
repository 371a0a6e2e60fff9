"""The course kit: nothing of the solution is given away, and points go where they belong."""

import ast
import csv
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY / "course"))

import grade
import make
from checks import CHECKS, DRAW, Solution, repository_files, run_check, run_checks
from course_answers import HARMLESS, LOOPS, WRONG
from course_sandbox import SANDBOX
from mutations import MUTATIONS
from problems import BY_NAME, PROBLEMS, function_of, solution_lines, splice, top_level
from remote import Student
from sandbox import folder_for

pytestmark = pytest.mark.slow  # runs of the scripts, again and again
ANSWERS = Path(__file__).with_name("course_answers.py")


def solution(problem) -> str:
    return (REPOSITORY / problem.file).read_text()


def answers() -> dict[str, tuple[str, str]]:
    """{test id: (problem, source of a file with that answer)}; helpers and imports with each."""
    text = ANSWERS.read_text()
    parts = top_level(text)
    helpers = [t for n, t in parts if isinstance(n, (ast.Import, ast.ImportFrom))]
    helpers += [t for n, t in parts if isinstance(n, ast.FunctionDef) and "__" not in n.name]
    found = {}
    for node, source in parts:
        if isinstance(node, ast.FunctionDef) and "__" in node.name:
            problem = node.name.split("__")[0]
            renamed = source.replace(f"def {node.name}(", f"def {problem}(", 1)
            found[node.name] = problem, "\n\n".join([*helpers, renamed])
    return found


def loop_answer(way: str) -> tuple[str, str]:
    """(problem, the script with its step written as LOOPS has it)."""
    problem = BY_NAME[way.split("__")[0]]
    source, new = solution(problem), LOOPS[way]
    if isinstance(new, dict):
        for old, text in new.items():
            assert source.count(old) == 1, old
            source = source.replace(old, text)
        return problem.name, source
    lines = source.split("\n")
    [(start, end)] = solution_lines(source, problem)
    indent = re.match(" *", lines[start - 1])[0]
    lines[start - 1 : end] = textwrap.indent(textwrap.dedent(new).strip(), indent).split("\n")
    return problem.name, "\n".join(lines)


@pytest.fixture(autouse=True)
def shared(monkeypatch):
    monkeypatch.setattr(grade, "Sandbox", lambda: SANDBOX)
    monkeypatch.setattr(DRAW, "salt", 0)  # a test that graded before has left one of its own


def faults(problem, submission: str) -> Iterator[tuple[str, str]]:
    """(check, fault) of those that fail; what isn't asked for isn't run."""
    text = splice(solution(problem), submission, problem.function)
    with folder_for(repository_files() | {problem.file: text.encode()}) as folder:
        process = SANDBOX.start(folder, 120)
        try:
            student, right = Student(process, problem.file), Solution(SANDBOX, problem.file)
            for number, check in enumerate(CHECKS[problem.name]):
                if fault := run_check(check, student, right, number):
                    yield check.name, fault
        finally:
            process.close()


def test_the_pages_hold_what_they_promise():
    for page in ("README.md", *(f"handout/lab{n}.md" for n in range(1, 7))):
        text = (REPOSITORY / "course" / page).read_text()
        assert not re.search(r"\b[A-Z]+_[A-Z]+\b|MUTANTS|UNSEEN|HUNTS", text), page
    text = (REPOSITORY / "course/README.md").read_text()
    assert f"{len(planted())} wrong ones, of which four lose none" in " ".join(text.split())
    assert len(UNSEEN) == 4
    hunts = json.loads((REPOSITORY / "course/symptoms.json").read_text())["bugs"]
    assert f"{len(hunts)} bugs" in text


def test_every_problem_has_points_three_hints_public_tests_and_three_other_answers():
    assert sum(c.points for items in CHECKS.values() for c in items) == 100
    ways = [way.split("__")[0] for way in [*answers(), *LOOPS]]
    for problem in PROBLEMS:
        assert len(problem.hints) == 3 and len(CHECKS[problem.name]) >= 3
        assert (REPOSITORY / "course/public_tests" / f"test_{problem.name}.py").exists()
        assert ways.count(problem.name) >= 3, f"{problem.name} has too few other answers"
    assert all(c.run.__doc__ for items in CHECKS.values() for c in items)


@pytest.mark.parametrize("way", [*answers(), *LOOPS])
def test_a_right_answer_written_differently_gets_all_points(way, tmp_path):
    name, submission = loop_answer(way) if way in LOOPS else answers()[way]
    assert not list(faults(BY_NAME[name], submission))


@functools.cache
def planted() -> dict[str, tuple[str, str]]:
    """{bug: (problem, source with it)}: of the mutations those within a problem, and WRONG."""
    found = {}
    right = answers()
    for way, old, new, bug in WRONG:
        if way in right:
            problem, source = right[way]
            assert source.count(old) == 1, f"{bug}: {old}"
            found[bug] = problem, source.replace(old, new)
    for problem in PROBLEMS:
        source = solution(problem)
        spans = solution_lines(source, problem)
        edits = [(bug, old, new) for file, old, new, bug in MUTATIONS if file == problem.file]
        edits += [(bug, old, new) for name, old, new, bug in WRONG if name == problem.name]
        for bug, old, new in edits:
            assert source.count(old) == 1, f"{bug}: {old}"
            first = source[: source.index(old)].count("\n") + 1
            if any(start <= first <= end for start, end in spans) and bug not in HARMLESS:
                found[bug] = problem.name, source.replace(old, new)
    return found


# Wrong answers that no check sees: listed in the course's guide.
UNSEEN = {
    "an empty minibatch divides by 0",
    "GRPO's bonus changes with the micro-batch",
    "what a stop string ended counts as truncated",
    "a mask on the CPU",
}


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_wrong_answers_lose_points(problem):
    bugs = [(bug, text) for bug, (name, text) in planted().items() if name == problem.name]
    seen = {bug: next(faults(problem, text), None) is not None for bug, text in bugs}
    assert {bug for bug in seen if not seen[bug]} == UNSEEN & set(seen)
    assert len(seen) >= 3 and planted().keys() >= UNSEEN


@pytest.mark.parametrize("salt", [13, 7932, 15851, 23770, 31689])
def test_log_probs_after_eos_are_seen_whatever_is_drawn(salt, monkeypatch):
    monkeypatch.setattr(DRAW, "salt", salt)
    problem, text = planted()["log-probs recorded after EOS"]
    assert "log-probs after EOS are not 0" in dict(faults(BY_NAME[problem], text)).values()


# --- The starter repository ---


@pytest.fixture(scope="module")
def starter(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("course") / "starter"
    assert make.main([str(out), "--hints", "3"]) == 0
    return out


def statements(source: str) -> list[str]:
    """The simple statements of a source, however they were laid out."""
    kinds = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr, ast.Raise, ast.Delete)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return [ast.unparse(node) for node in nodes]


def test_no_statement_of_a_solution_is_left_anywhere_in_the_starter(starter):
    kept, removed = [], []
    for name in {problem.file for problem in PROBLEMS}:
        lines = (REPOSITORY / name).read_text().split("\n")
        whole = statements("\n".join(lines))
        for problem in PROBLEMS:
            if problem.file == name:
                for start, end in solution_lines("\n".join(lines), problem):
                    indent = " " * (len(lines[start - 1]) - len(lines[start - 1].lstrip()))
                    lines[start - 1 : end] = [f"{indent}raise NotImplementedError"] + [""] * (
                        end - start
                    )
        rest = statements("\n".join(lines))
        kept += rest
        removed += [s for s in whole if whole.count(s) > rest.count(s)]
    secret = {s for s in removed if len(s) > 15} - set(kept)
    assert len(secret) > 90
    for path in starter.rglob("*"):
        if path.suffix == ".py":
            found = secret & set(statements(path.read_text()))
            assert not found, f"{path.name}: {found}"
        elif path.suffix in (".md", ".txt", ".json"):
            text = path.read_text()
            assert not any(s in text for s in secret), path.name
    hints = "\n".join(hint for problem in PROBLEMS for hint in problem.hints)
    assert not any(s in hints for s in secret)


def test_the_starter_keeps_names_arguments_and_docstrings_and_hints_of_the_depth_asked_for(
    starter, tmp_path
):
    for problem in PROBLEMS:
        ours, theirs = (
            function_of((folder / problem.file).read_text(), problem.function)
            for folder in (REPOSITORY, starter)
        )
        assert ast.unparse(ours.args) == ast.unparse(theirs.args)
        assert ast.get_docstring(ours) == ast.get_docstring(theirs)
        assert "raise NotImplementedError" in ast.unparse(theirs)
    assert "Write d once" in (starter / "common.py").read_text()
    assert make.main([str(tmp_path / "bare"), "--hints", "0", "--problems", "kl_estimate"]) == 0
    bare = (tmp_path / "bare" / "common.py").read_text()
    assert "raise NotImplementedError" in bare and "functions of d" not in bare
    assert (tmp_path / "bare" / "ppo.py").read_text() == (REPOSITORY / "ppo.py").read_text()
    assert [p.name for p in (tmp_path / "bare" / "tests").glob("test_*")] == ["test_kl_estimate.py"]


def test_what_a_step_has_to_set_is_said(starter):
    text = (starter / "ppo.py").read_text()
    assert 'raise NotImplementedError("set advantages, returns, rewards")' in text
    # What measures and tidies up is there.
    assert 'watch.lap("time/rollout")' in text
    text = (starter / "grpo.py").read_text()
    assert (
        'raise NotImplementedError("set clipped, entropy, logprobs, loss, m, old, ratio")' in text
    )


def pytest_in(folder: Path) -> tuple[int, int]:
    """(passed, failed) of the public tests of a starter repository."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    output = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""}
    ).stdout
    counts = {kind: number for number, kind in re.findall(r"(\d+) (passed|failed)", output)}
    return int(counts.get("passed", 0)), int(counts.get("failed", 0))


def solve(starter: Path, out: Path) -> Path:
    """The starter with all functions written."""
    shutil.copytree(starter, out)
    for problem in PROBLEMS:
        (out / problem.file).write_text(solution(problem))
    return out


def test_solved_it_gets_all_points_its_scripts_included(starter, tmp_path, capsys):
    solved = solve(starter, tmp_path / "solved")
    assert grade.main([str(solved), "--json", str(tmp_path / "results.json")]) == 0
    output = capsys.readouterr().out
    assert output.endswith("140 of 140 points\n"), output
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["score"] == 140 and len(results["tests"]) == len(PROBLEMS) + 4 + 1
    assert all(test["score"] == test["max_score"] for test in results["tests"])


def test_an_unsolved_problem_gets_no_points(starter, capsys):
    names = ["gae", "kl_estimate", "grpo_loop"]
    assert grade.main([str(starter), "--problems", *names]) == 0
    output = capsys.readouterr().out
    assert re.search(r"\n0 of \d+ points\n$", output) and "not written yet" in output


def test_the_public_tests_pass_when_solved_and_fail_before(starter, tmp_path):
    passed, failed = pytest_in(starter)
    assert passed == 0 and failed >= len(PROBLEMS)
    assert pytest_in(solve(starter, tmp_path / "solved")) == (failed, 0)


FAULTY = {
    "gae": "def gae(rewards, values, mask, gamma, lam):\n    while True:\n        pass\n",
    "kl_estimate": "def kl_estimate(a, b, estimator):\n    import os\n    os._exit(0)\n",
    "masked_whiten": "def masked_whiten(x, mask, shift_mean=True):\n    raise SystemExit(0)\n",
    "reference": "def reference(policy, kl_coef):\n    return undefined_helper(policy)\n",
    "token_logprobs": "def token_logprobs(logits, tokens):\n    return (logits\n",
}


def test_a_submission_that_hangs_crashes_or_breaks_keeps_the_points_of_its_other_problems(
    tmp_path, capsys
):
    text = (REPOSITORY / "common.py").read_text()
    for name, faulty in FAULTY.items():  # the one that doesn't parse comes last
        node, lines = function_of(text, name), text.split("\n")
        lines[node.lineno - 1 : node.end_lineno] = faulty.split("\n")
        text = "\n".join(lines)
    (tmp_path / "common.py").write_text(f"raise SystemExit(3)\n{text}")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text("raise SystemExit('no tests today')")
    names = [*FAULTY, "disable_dropout"]
    flags = ["--problems", *names, "--time_limit", "6", "--json", str(tmp_path / "r.json")]
    assert grade.main([str(tmp_path), *flags]) == 0
    output = capsys.readouterr().out
    results = json.loads((tmp_path / "r.json").read_text())["tests"][:-1]
    points = {test["name"].split(":")[0]: test["score"] for test in results}
    assert points.pop("disable_dropout") == sum(c.points for c in CHECKS["disable_dropout"])
    assert set(points.values()) == {0}, points
    for part in ("loop that doesn't end", "its syntax", "undefined_helper", "SystemExit"):
        assert part in output, output


SCRATCH = """
mask = torch.ones(1, 3)
advantages, returns = gae(mask, mask, mask, 1.0, 1.0)
for t in range(3):
    print(gae(mask, mask, mask, 1.0, 0.5))
1 / 0
"""
HELPERS = """
import nowhere_to_be_found

try:
    import numpy as np
except ImportError:
    np = None
ONE = 1.0


class Delta:
    def __init__(self, gamma):
        self.gamma = gamma

    def of(self, r, after, v):
        return r + helper(self.gamma * after) - v * ONE


def helper(x):
    return torch.as_tensor(np.multiply(x.numpy(), 1))
"""
DELTA = "rewards[:, t] + gamma * next_value - values[:, t]"
FILLED = "rewards.masked_fill(~mask, 0), values.masked_fill(~mask, 0)"
FULL = "def at_least_float32(x, mask):\n    return x.masked_fill(~mask, 0)\n\n\ndef _other(x):"
OWN_WAYS = {
    "scratch code at the end": [("", SCRATCH)],
    "another name, and an alias": [("def gae(", "def my_gae("), ("", "gae = my_gae\n")],
    "a class, a helper and a constant of one's own": [
        (DELTA, "Delta(gamma).of(rewards[:, t], next_value, values[:, t])"), ("", HELPERS)
    ],
    "a helper of the file, changed with its call": [
        (FILLED, "at_least_float32(rewards, mask), at_least_float32(values, mask)"),
        ("def at_least_float32(x: Tensor) -> Tensor:", FULL),
    ],
    "Windows line ends": [("\n", "\r\n")],
}  # fmt: skip


@pytest.mark.parametrize("way", OWN_WAYS)
def test_a_right_answer_in_an_unusual_file_gets_all_points(way, tmp_path):
    submission = solution(BY_NAME["gae"])
    for old, new in OWN_WAYS[way]:
        submission = submission.replace(old, new) if old else f"{submission}\n{new}"
    (tmp_path / "common.py").write_bytes(submission.encode())
    prepared = grade.prepare(BY_NAME["gae"], tmp_path)
    assert not prepared.fault
    found, _ = run_checks("gae", repository_files() | prepared.files, SANDBOX, 120)
    assert not any(found), found


def test_files_beside_the_submission_and_odd_encodings_cost_nothing(tmp_path, capsys):
    """A random.py of the student must not become Python's own."""
    for name in ("random", "types", "profile", "string"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not that one')\n")
    text = solution(BY_NAME["rloo_loss"])
    (tmp_path / "rloo.py").write_bytes(b"\xff\xfe" + text.encode("utf-16-le"))
    (tmp_path / "common.py").write_text(solution(BY_NAME["gae"]), encoding="utf-8-sig")
    assert grade.main([str(tmp_path), "--problems", "rloo_loss", "gae"]) == 0
    assert capsys.readouterr().out.endswith("\n11 of 11 points\n")


def test_a_missing_file_or_folder_or_problem_is_one_line(tmp_path, capsys):
    assert grade.main([str(tmp_path / "nowhere")]) == 2
    assert grade.main([str(tmp_path), "--problems", "gea"]) == 2
    assert make.main([str(tmp_path)]) == 2
    assert make.main([str(tmp_path / "new"), "--problems", "gea"]) == 2
    errors = capsys.readouterr().err.strip().split("\n")
    assert len(errors) == 4 and all(line.startswith("error: ") for line in errors)
    assert grade.main([str(tmp_path), "--problems", "gae"]) == 0
    assert "common.py can't be read (No such file" in capsys.readouterr().out


def test_lost_points_come_with_the_fault_and_advice(tmp_path, capsys):
    text = solution(BY_NAME["shape_rewards"]).replace("(-kl_coef * kl)", "(kl_coef * kl)")
    (tmp_path / "ppo.py").write_text(text)
    assert grade.main([str(tmp_path), "--problems", "shape_rewards"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "2 of 4 shape_rewards" in output
    assert "-1 each token pays for its kl: rewards: expected" in output
    assert "-kl_coef * kl at every real token" in output


# --- Where the files of a submission lie, and where the results go ---


def test_results_that_can_not_be_written_are_one_line_before_anything_is_graded(
    tmp_path, capsys, monkeypatch
):
    def refuse(*args):
        raise AssertionError("graded")

    monkeypatch.setattr(grade, "grade_all", refuse)
    for path in (tmp_path / "nowhere" / "r.json", tmp_path):
        for flag in ("--json", "--class"):
            assert grade.main([str(tmp_path), flag, str(path)]) == 2
    lines = capsys.readouterr().err.strip().split("\n")
    assert len(lines) == 4 and all(line.startswith("error: --") for line in lines)
    assert "nowhere" in lines[0] and "no folder" in lines[0]


def test_a_submission_one_folder_deeper_is_found(tmp_path, capsys):
    deeper = tmp_path / "ps3"
    (tmp_path / "__MACOSX").mkdir()
    (tmp_path / ".git").mkdir()
    (deeper / "tests").mkdir(parents=True)
    for folder in (deeper, tmp_path / "__MACOSX", tmp_path / ".git"):
        (folder / "common.py").write_text(solution(BY_NAME["kl_estimate"]))
    (deeper / "mine.py").write_text("half = 0.5\n")
    text = solution(BY_NAME["kl_estimate"]).replace("d**2 / 2", "half * d**2")
    assert "half * d" in text
    (deeper / "common.py").write_text(f"from mine import half\n{text}")
    assert grade.main([str(tmp_path), "--problems", "kl_estimate"]) == 0
    assert capsys.readouterr().out.endswith("\n5 of 5 points\n")


def test_a_submission_in_two_folders_is_one_line_that_names_them(tmp_path, capsys):
    for name in ("draft", "final"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "common.py").write_text(solution(BY_NAME["kl_estimate"]))
    results = tmp_path / "r.json"
    assert grade.main([str(tmp_path), "--json", str(results)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert "draft" in error and "final" in error
    # On Gradescope a student sees nothing but this file.
    told = json.loads(results.read_text())
    assert told["score"] == 0 and "draft" in told["output"]
    # Files at the top are the submission, whatever lies below.
    (tmp_path / "common.py").write_text(solution(BY_NAME["kl_estimate"]))
    assert grade.main([str(tmp_path), "--problems", "kl_estimate"]) == 0
    assert capsys.readouterr().out.endswith("\n5 of 5 points\n")


ODD_FILES = {
    "a pipe": (lambda path: os.mkfifo(path), "is no file"),
    "a folder": (lambda path: path.mkdir(), "is no file"),
    "a large file": (lambda path: path.write_text("#" * 2_000_000), "larger than 1 MB"),
    "a function with one name twice": (
        lambda path: path.write_text("def kl_estimate(a, a):\n    return a\n"),
        "kl_estimate doesn't parse",
    ),
    "depth": (
        lambda path: path.write_text(f"def kl_estimate(a):\n    return {'-' * 60_000}1\n"),
        "kl_estimate doesn't parse",
    ),
}


@pytest.mark.parametrize("way", ODD_FILES)
def test_a_file_that_is_none_or_has_no_end_costs_its_own_problems(way, tmp_path, capsys):
    make_it, said = ODD_FILES[way]
    if way == "a pipe" and not hasattr(os, "mkfifo"):
        pytest.skip("pipes of POSIX")
    make_it(tmp_path / "common.py")
    (tmp_path / "rloo.py").write_text(solution(BY_NAME["rloo_loss"]))
    assert grade.main([str(tmp_path), "--problems", "kl_estimate", "rloo_loss"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "0 of 5 kl_estimate" in output and said in output
    assert "4 of 4 rloo_loss" in output


# --- A class ---


def zipped(path: Path, **entries: str) -> zipfile.ZipFile:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in entries.items():
            archive.writestr(name.replace("__", "/") + ".py", text)
    return archive


def rows_of(path: Path) -> dict[str, dict[str, str]]:
    with path.open(newline="") as file:
        return {row["student"]: row for row in csv.DictReader(file)}


@pytest.fixture
def hand_ins(tmp_path) -> Path:
    """Those of a class of which most have gone wrong."""
    folder = tmp_path / "class"
    right, common = solution(BY_NAME["rloo_loss"]), solution(BY_NAME["kl_estimate"])
    for name in ("ada", "both", "both/one", "both/two", "crash", ".git"):
        (folder / name).mkdir(parents=True)
    for name in ("ada", "crash", "both/one", "both/two"):
        (folder / name / "rloo.py").write_text(right)
    (folder / "ada" / "common.py").write_text(common)
    (folder / "crash" / "common.py").write_text(FAULTY["kl_estimate"])
    zipped(folder / "bob.zip", ps3__rloo=right, ps3__common=common.replace("torch.expm1(-d)", "d"))
    zipped(folder / "out.zip", common=common, **{"..__..__evil": "1"})
    zipped(folder / "huge.zip", common=common, rloo="#" * 300 * 2**20)
    (folder / "broken.zip").write_bytes(b"PK no more")
    (folder / "carol.rar").write_bytes(b"Rar!")
    with zipfile.ZipFile(folder / "link.zip", "w") as archive:
        info = zipfile.ZipInfo("common.py")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
    return folder


REFUSED = {
    "both": "several folders (one, two)", "out": "leads out", "huge": "unpacks to more than",
    "broken": "can't be unpacked", "carol.rar": "neither a folder nor a zip", "link": "is a link",
}  # fmt: skip
TWO = ["--problems", "kl_estimate", "rloo_loss"]


def test_a_class_gets_a_row_for_each_student_whatever_the_others_hand_in(hand_ins, tmp_path):
    results = hand_ins / "results.csv"  # no student of that name
    assert grade.main([str(hand_ins), "--class", str(results), *TWO]) == 0
    rows = rows_of(results)
    assert set(rows) == {"ada", "bob", "crash", *REFUSED}
    points = {name: [row[x] for x in ("total", *TWO[1:])] for name, row in rows.items()}
    assert points["ada"] == ["9", "5", "4"] and points["crash"] == ["4", "0", "4"]
    assert points["bob"] == ["7", "3", "4"] and rows["ada"]["went wrong"] == ""
    assert "kl_estimate: k3: expected" in rows["bob"]["went wrong"]
    assert "kl_estimate: " in rows["crash"]["went wrong"]
    for name, said in REFUSED.items():
        assert points[name] == ["0", "0", "0"] and said in rows[name]["went wrong"], name
    assert not list(tmp_path.rglob("evil*")) and not Path("/evil.py").exists()


def fake_grade(calls: list) -> Callable:
    """A grader that gives all points, and notes who got them."""

    def run(submission, options):
        calls.append(submission.name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        if submission.name == "odd":
            raise RuntimeError("of the grader itself")
        [problem] = grade.chosen_of(options)
        return grade.Grading([grade.Result(problem, 5, [])], [])

    return run


def test_a_class_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    names, calls = ("ada", "bob", "cleo", "dan"), []
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "common.py").write_text("\n")
    monkeypatch.setattr(grade, "grade_all", fake_grade(calls))
    results = tmp_path / "results.csv"
    command = [str(tmp_path), "--class", str(results), "--problems", "kl_estimate"]
    assert grade.main(command) == 130
    assert list(rows_of(results)) == ["ada", "bob"]  # nothing that was computed is lost
    assert "run it again" in capsys.readouterr().err
    with results.open("a") as file:
        file.write("cleo,5")  # half a row, of a computer that was switched off
    assert grade.main(command) == 0
    assert calls == ["ada", "bob", "cleo", "cleo", "dan"] and list(rows_of(results)) == [*names]
    assert grade.main(command) == 0 and len(calls) == 5
    other = [*command[:-1], "gae"]
    assert grade.main(other) == 2
    error = capsys.readouterr().err
    assert "other columns" in error and "--overwrite" in error and error.count("\n") == 1
    assert grade.main([*other, "--overwrite"]) == 0
    assert calls[5:] == [*names] and "gae" in rows_of(results)["dan"]


def test_a_fault_of_the_grader_itself_leaves_the_row_without_points(tmp_path, monkeypatch):
    for name in ("odd", "zoe"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "common.py").write_text("\n")
    monkeypatch.setattr(grade, "grade_all", fake_grade([]))
    results = tmp_path / "results.csv"
    command = [str(tmp_path), "--class", str(results), "--problems", "kl_estimate"]
    assert grade.main(command) == 1
    rows = rows_of(results)
    assert rows["odd"]["total"] == "" and "of the grader itself" in rows["odd"]["went wrong"]
    assert rows["zoe"]["total"] == "5"


def test_a_folder_that_holds_no_class_is_one_line(tmp_path, capsys):
    (tmp_path / "common.py").write_text("\n")
    (tmp_path / "empty").mkdir()
    results = ["--class", str(tmp_path / "results.csv")]
    assert grade.main([str(tmp_path), *results]) == 2
    assert grade.main([str(tmp_path / "empty"), *results]) == 2
    assert grade.main([str(tmp_path), *results, "--json", str(tmp_path / "r.json")]) == 2
    errors = capsys.readouterr().err.strip().split("\n")
    assert len(errors) == 3 and all(line.startswith("error: ") for line in errors)
    assert "one submission" in errors[0] and not (tmp_path / "results.csv").exists()


# --- Helpers of one file that another imports ---

# What a student might put at the end of common.py: helpers that need an import, a constant, each
# other, and what the file has; and functions of the file written anew, and wrong.
SHARED_HELPERS = """
import math as m
from sampling import nothing_left_out

NOTHING = m.log(1.0)


def row_sums(x, mask):
    return _filled(x, mask).sum(1) + 0 * masked_mean(x, mask)


def _filled(x, mask):
    return nothing_left_out(at_least_float32(x)).masked_fill(~mask.bool(), NOTHING)


def constant(log_ratio):
    return log_ratio * 0


def policy_ratio(log_ratio):
    return log_ratio * 0
"""
LOG_RATIO = "(logprobs - old_logprobs).masked_fill(~mask.bool(), 0).sum(1)"
IMPORTED = {
    "beside what the file imports": (
        "from common import kl_estimate, row_sums", "row_sums(logprobs - old_logprobs, mask)"
    ),
    "under another name": (
        "from common import row_sums as of_rows", "of_rows(logprobs - old_logprobs, mask)"
    ),
    "a function of the file doesn't change": ("from common import policy_ratio", LOG_RATIO),
    "nor can a helper take its place": (
        "from common import row_sums, constant as policy_ratio",
        "row_sums(logprobs - old_logprobs, mask)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", IMPORTED)
def test_a_helper_of_one_file_comes_along_where_another_imports_it(way, tmp_path, capsys):
    imports, expression = IMPORTED[way]
    text = solution(BY_NAME["rloo_loss"])
    assert text.count(LOG_RATIO) == 1
    text = text.replace(LOG_RATIO, expression)
    text = text.replace("\nfrom common import", f"\n{imports}\nfrom common import", 1)
    (tmp_path / "rloo.py").write_text(text)
    (tmp_path / "common.py").write_text(solution(BY_NAME["gae"]) + SHARED_HELPERS)
    own = "def nothing_left_out(x):\n    return x\n"
    (tmp_path / "sampling.py").write_text(solution(BY_NAME["generate"]) + own)
    assert grade.main([str(tmp_path), "--problems", "rloo_loss"]) == 0
    output = capsys.readouterr().out
    assert output.endswith("\n4 of 4 points\n"), output


def test_a_helper_that_is_nowhere_costs_what_needs_it_and_is_named(tmp_path, capsys):
    text = solution(BY_NAME["rloo_loss"]).replace(LOG_RATIO, "row_sums(logprobs, mask)")
    (tmp_path / "rloo.py").write_text(f"from common import row_sums\n{text}")
    assert grade.main([str(tmp_path), "--problems", "rloo_loss", "rloo_advantages"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "0 of 4 rloo_loss" in output and "name 'row_sums' is not defined" in output
    assert "4 of 4 rloo_advantages" in output


# --- A mistake costs the check that is about it ---

ALONE = {
    "no half in the value loss": ("value_loss", {
        "return 0.5 * torch.max(free, bounded)": "return torch.max(free, bounded)"
    }, {"half the larger of two squared errors"}),
    "the value loss ignores the range": ("value_loss", {
        "old_values - clip_range_value, old_values + clip_range_value":
        "old_values - 0.2, old_values + 0.2"
    }, {"the clip range is used", "clipped says where the clipped prediction decides"}),
    "padding leaks into the advantages": ("gae", {
        "rewards.masked_fill(~mask, 0), values.masked_fill(~mask, 0)": "rewards, values"
    }, {"an episode ends with its last real token"}),
    "no discount in the delta": ("gae", {
        "rewards[:, t] + gamma * next_value": "rewards[:, t] + next_value"
    }, {"the discounted sum of deltas"}),
    "returns that aren't 0 off the mask": ("gae", {
        "def gae(": "def _gae(",
        "return advantages, advantages + values": "return advantages, advantages + values\n\n\n"
        "def gae(rewards, values, mask, gamma, lam):\n"
        "    advantages, _ = _gae(rewards, values, mask, gamma, lam)\n"
        "    return advantages, advantages + values"
    }, {"an episode ends with its last real token"}),
    "returns without the value": ("gae", {
        "return advantages, advantages + values": "return advantages, advantages"
    }, {"returns are advantages plus values"}),
}  # fmt: skip


@pytest.mark.parametrize("mistake", ALONE)
def test_a_mistake_costs_the_checks_that_are_about_it(mistake, tmp_path):
    name, edits, expected = ALONE[mistake]
    text = solution(BY_NAME[name])
    for old, new in edits.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    assert {check for check, _ in faults(BY_NAME[name], text)} == expected


def test_advantages_that_are_no_sum_earn_no_points_for_padding(tmp_path):
    text = "def gae(rewards, values, mask, gamma, lam):\n    mask = mask.bool()\n"
    text += "    found = rewards.masked_fill(~mask, 0)\n"
    text += "    return found, (found + values).masked_fill(~mask, 0)\n"
    lost = {check for check, _ in faults(BY_NAME["gae"], text)}
    assert lost >= {"the discounted sum of deltas", "an episode ends with its last real token"}
