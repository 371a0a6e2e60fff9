"""The course: starter, pages, notebooks, grader, experiments of the labs, bug hunt."""

import ast
import csv
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY / "course"))

import bughunt
import drafts
import grade
import lab_parts
import labs
import make
import pages
from experiments import EXPERIMENTS
from problems import BY_NAME, FILES, PROBLEMS, WEEKS, commit, function_of, marked_tests
from test_one_page import FEW as FEW_ROWS
from test_one_page import Page

import common
import grpo
import ppo
import rloo

pytestmark = pytest.mark.slow  # copies of the repository, and short runs
LABS = pages.chosen_labs(PROBLEMS)
QUESTIONS = [question for lab in LABS for question in lab.questions]
FEW = "--num_steps 2 --prompts_per_step 4 --num_generations 4 --num_eval_prompts 8"


@pytest.fixture
def starter(tmp_path) -> Path:
    assert make.main([str(tmp_path / "starter")]) == 0
    return tmp_path / "starter"


def run_in(folder: Path, *command: str) -> str:
    command, both = [sys.executable, *command], subprocess.STDOUT
    return subprocess.run(command, cwd=folder, stdout=-1, stderr=both, text=True, stdin=-3).stdout


def test_the_starter_gives_away_no_solution_and_no_key(starter):
    for problem in PROBLEMS:
        function = function_of((starter / problem.file).read_text(), problem.function)
        assert "NotImplementedError" in ast.unparse(function), problem.name
        assert problem.step or len(function.body) == 2, "a docstring and raise"
    assert "@AGENTS.md" in (starter / "CLAUDE.md").read_text() and (starter / "AGENTS.md").exists()
    given = [x for x in starter.rglob("*.*") if x.suffix in (".md", ".py", ".ipynb")]
    given = {x.name: " ".join(x.read_text().replace("\\n", " ").split()) for x in given}
    key = {" ".join(line.split()) for q in QUESTIONS for line in q.key.split("\n")}
    key = {line for line in key if len(line) > 25 and '"' not in line and "\\" not in line}
    assert len(key) > 100 and {"lab1.ipynb", "answers.md", "lab1.md"} <= {*given}
    assert not [(name, line) for name, text in given.items() for line in key if line in text]


@pytest.mark.parametrize("week", [1, 2, 3])  # 4: the next test, and that of grade.yml
def test_the_functions_of_a_week_turn_its_tests_green(starter, week):
    """The functions of later weeks aren't written there. And grade.py gives all its points."""
    done = " ".join(names for due, names in WEEKS.items() if due <= week).split()
    for file in FILES:
        later = [x for x in PROBLEMS if x.file == file and x.name not in done]
        text = (REPOSITORY / file).read_text(encoding="utf-8")
        make.write(starter / file, make.without_solutions(text, later, 0))
    names = WEEKS[week].split()
    said = run_in(starter, "-m", "pytest", "tests", *(f"--problem={name}" for name in names))
    assert re.search(r"^[0-9]+ passed in ", said, re.M), said[-3000:]
    points = {name: score for name, (score, _) in graded(starter, *names).items()}
    assert points == {name: BY_NAME[name].points for name in names}


def test_a_solved_starter_passes_by_its_readme(starter):
    hand_in(starter)
    assert "python -m pytest tests  " in (starter / "README.md").read_text()
    said = run_in(starter, "-m", "pytest", "tests")
    assert re.search(r"^[0-9]+ passed in ", said, re.M), said[-3000:]


def test_a_list_hands_out_the_whole_program(tmp_path):
    said = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True)
    tracked = re.findall(r"^(?:(?:one_page|plumbing|tools|tiny)/.+|\w+\.py)$", said.stdout, re.M)
    assert {*make.PROGRAM} == {*tracked, "requirements.txt"}
    make.main([str(tmp_path / "grader.zip"), "--gradescope"])
    names = zipfile.ZipFile(tmp_path / "grader.zip").namelist()
    assert {x for x in names if "/" not in x} == {"setup.sh", "run_autograder"}


def test_only_what_is_about_the_chosen_problems_is_asked(tmp_path):
    out = tmp_path / "gae"
    assert make.main([str(out), "--problems", "gae"]) == 0 and make.main([str(out)]) == 2
    assert [path.name for path in (out / "handout").iterdir()] == ["lab3.md"]
    text = (out / "handout" / "lab3.md").read_text()
    assert "| `gae` |" in text and "| `policy_loss` |" not in text and "```math\n" in text
    book = json.loads((out / "notebooks" / "lab3.ipynb").read_text())["cells"]
    assert any("\n$$\n" in x["source"] for x in book) and "```math" not in str(book)


def test_a_student_packs_all_and_hears_what_is_missing(starter):
    said = run_in(starter, "pack.py")
    assert re.search("note: common.py: not written yet: .*, gae, ", said)
    assert f"answers.md: {len(QUESTIONS)} answers are empty" in said
    (starter / "figures" / "lab1").mkdir(parents=True)
    for name in ("figures/a.PNG", "figures/lab1/a.png", "lost.png"):
        (starter / name).write_bytes(b"x")
    sheet = "![](figures/a.PNG) ![curve](figures/lab1/a.png) ![](lost.png)"
    text = (starter / "ppo.py").read_text()
    for name, written in (("answers.md", sheet), ("ppo.py", text)):
        (starter / name).write_text(written, encoding="utf-8-sig")  # as Notepad may save it
    notes = re.findall("^note: answers.md: (.+)$", run_in(starter, "pack.py"), re.M)
    assert notes == ["lost.png isn't packed: put it into figures/"]
    names = {*zipfile.ZipFile(starter / "hand_in.zip").namelist()}
    assert {*FILES, "answers.md", "version.txt"} <= names and not {*make.LABS} & names
    assert {"figures/a.PNG", "figures/lab1/a.png"} <= names
    assert (starter / "version.txt").read_text().strip() == commit()
    faults = {"must be there, as UTF-8: ": text.encode("utf-16"), "is no Python": b"def f(:"}
    for fault, data in faults.items():
        (starter / "ppo.py").write_bytes(data)
        assert f"\nerror: ppo.py {fault}" in run_in(starter, "pack.py")


def test_each_problem_has_points_and_each_question_a_key():
    assert set(marked_tests()) == set(BY_NAME)
    plan = (REPOSITORY / "course" / "README.md").read_text(encoding="utf-8")
    asked = sum(question.points for question in QUESTIONS)
    assert f"{len(QUESTIONS)} questions" in plan and f"questions have {asked} and" in plan
    plan = dict(re.findall(r"^\| (\d) \|.*\| (\d+) \+ \d+ \|", plan, re.M))
    points = {k: sum(BY_NAME[x].points for x in names.split()) for k, names in WEEKS.items()}
    assert plan == {str(k): str(x) for k, x in (points | {5: 0}).items()}
    assert sorted(" ".join(WEEKS.values()).split()) == sorted(BY_NAME)
    assert sum(problem.points for problem in PROBLEMS) == 100
    tests = {part.split(" [")[0] for x in BY_NAME.values() for part in x.properties}
    for file, test in (x.split("::") for x in tests):
        source = function_of((REPOSITORY / "tests" / file).read_text(), test)
        assert "match=" not in ast.unparse(source), f"{test}: no docstring gives these words"
    assert sorted(name for lab in LABS for name in lab.problems) == sorted(x.name for x in PROBLEMS)
    for question in QUESTIONS:
        assert question.deliverable and set(question.about) <= set(BY_NAME)
        for part in ("**Answer.**", "**Points.**", "**Usual mistakes.**"):
            assert question.key.count(part) == 1, (question.title, part)
        for script in re.findall("^    python ([^ ]+)", question.text, re.M):
            assert (REPOSITORY / script).exists() or (REPOSITORY / "course" / script).exists()


def run_notebook(path: Path, change: tuple[str, str]) -> str:
    """What the cells of a notebook print, run where it lies, after a change of its code."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    book = nbformat.reads(path.read_text().replace(*change), as_version=4)
    nbformat.validate(book)
    resources = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(book, timeout=300, resources=resources).execute()
    outputs = [x for cell in book.cells for x in cell.get("outputs", ())]
    return "".join(x.get("text", "") + str(x.get("data", "")) for x in outputs)


def test_the_notebook_of_a_lab_tests_and_packs(starter):
    shutil.copy(REPOSITORY / "common.py", starter)
    change = "!python labs.py estimators", "!python labs.py"
    said = run_notebook(starter / "notebooks" / "lab1.ipynb", change)
    assert " passed" in said and "failed" not in said and "hand_in.zip has" in said, said


def test_the_notebook_for_colab_runs_on_a_cpu(tmp_path):
    make.copy_files(tmp_path / "plain", [], 0)
    folder = tmp_path / "plain" / "course"
    folder.mkdir()
    path = shutil.copy(REPOSITORY / "course" / "colab.ipynb", folder)
    said = run_notebook(Path(path), (r"\"\"  # flags", rf"\"{FEW}\"  # flags"))
    assert "iframe srcdoc" in said and re.search("^step   2: reward [0-9.]+, greedy", said, re.M)
    assert re.search(r"^step 2\n  [01].0  \d+\+\d+= -> ", said, re.M)
    nowhere = shutil.copy(path, tmp_path / "book.ipynb")
    with pytest.raises(Exception, match=r"AssertionError.*: set URL to the address"):
        run_notebook(Path(nowhere), ("", ""))


def test_the_notebook_for_colab_is_stored_with_its_pictures():
    text = (REPOSITORY / "course" / "colab.ipynb").read_text(encoding="utf-8")
    outputs = [cell["outputs"] for cell in json.loads(text)["cells"] if "outputs" in cell]
    assert len(text) < 3e5 and all(outputs)
    assert sum("image/png" in x.get("data", {}) for some in outputs for x in some) == 2


def hand_in(folder: Path, files: dict[str, str | bytes] | None = None) -> Path:
    """A submission: this repository's files, and then these."""
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / name)
    for name, text in (files or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def graded(folder: Path, *problems: str, seconds: int = 60) -> dict[str, tuple[int, str]]:
    """{problem: (score, what is said)}"""
    file = folder.parent / "results.json"
    flags = ["--json", str(file), "--time_limit", str(seconds), "--problems", *problems]
    assert grade.main([str(folder), *flags]) == 0
    tests = json.loads(file.read_text())["tests"]
    return {test["name"]: (test["score"], test["output"]) for test in tests}


def test_the_workflow_for_github_grades_one_week_alone(tmp_path):
    text = (REPOSITORY / "course" / "starter" / "grade.yml").read_text()
    *steps, last = yaml.safe_load(text)["jobs"]["grade"]["steps"]
    hand_in(tmp_path / steps[0]["with"]["path"])
    (tmp_path / steps[1]["with"]["path"]).symlink_to(REPOSITORY)
    run_in(tmp_path, *shlex.split(steps[-1]["run"])[1:], "--week", "4")
    assert json.loads((tmp_path / last["with"]["path"]).read_text())["score"] == 24


COMMON = """
def kl_estimate(logprobs, ref_logprobs, estimator):
    while True:
        pass

def token_logprobs(logits, tokens):
    return pick(at_least_float32(logits).log_softmax(-1), tokens)

def pick(logprobs, tokens):
    return logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
"""
EDITS = {  # in our files
    "ppo.py": ("return 0.5 * torch.max(", "return torch.max("),
    "grpo.py": ("mask[mini_batch].sum().clamp(min=1)", "mask[mini_batch].sum()"),
    "rloo.py": ("from dataclasses", "while True: pass\nfrom dataclasses"),
}


def test_a_fault_costs_its_problem_and_no_other(tmp_path):
    files = {"common.py": COMMON}
    for name, (ours, theirs) in EDITS.items():
        text = (REPOSITORY / name).read_text()
        assert ours in text, name
        files[name] = text.replace(ours, theirs)
    folder = hand_in(tmp_path / "theirs", files)
    found = graded(folder, "token_logprobs", "value_loss", "grpo_loop")
    points = {name: score for name, (score, _) in found.items()}
    assert points == {"token_logprobs": 4, "value_loss": 3, "grpo_loop": 6}, "helpers come along"
    reason, costs = found["value_loss"][1].rsplit("\n", 1)
    assert costs == "-1: the value loss is half the squared error" and "\n-" not in reason
    assert "run 'dapo', has stopped: the gradient is nan" in found["grpo_loop"][1]
    begin = time.monotonic()
    of_rloo = "rloo_advantages", "rloo_loss", "rloo_loop", "rloo_script"
    endless = graded(folder, "kl_estimate", *of_rloo, seconds=15)
    assert {score for score, _ in endless.values()} == {0}
    assert "not done after 15 seconds" in endless["kl_estimate"][1]
    said = "".join(endless[name][1] for name in of_rloo)
    assert "not done after 15 seconds, while it is imported" in said
    assert "rloo.py hangs while it is imported" in said and time.monotonic() - begin < 60


OURS = (REPOSITORY / "common.py").read_text(encoding="utf-8")
HELPED = OURS.replace("def gae(", "from helpers import one\n\n\ndef gae(")
UNWRITTEN = "def gae(*args):\n    raise NotImplementedError('not written yet')\n"
REPLACES = "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None\n\n\n"
RUNS_EVERYTHING = "def pytest_pyfunc_call(pyfuncitem):\n    return True\n"
RUNS_NOTHING = "[pytest]\naddopts = --collect-only\n"
FLOODS = "def gae(*args):\n    while True:\n        print('9' * 9999)"
ENDED = "by an exit, or by endless prints"
HAND_INS = {  # (files that come to ours or take their place; the total; what is said)
    "scratch": ({"my try (2).py": "raise SystemExit"}, "5", ""),
    "helper": ({"common.py": HELPED, "helpers.py": "one = 1"}, "5", ""),
    "helpless": ({"common.py": HELPED, "helpers.py": "one = ("}, "0", "helpers.py, line 1: Syntax"),
    "tabs": ({"common.py": OURS.replace("    ", "\t")}, "5", ""),
    "crlf": ({"common.py": OURS.replace("\n", "\r\n")}, "5", ""),
    "utf16": ({"common.py": OURS.encode("utf-16")}, "5", ""),
    "mark": ({"common.py": OURS.encode("utf-8-sig")}, "5", ""),
    "venv": ({f".venv/{name}": "" for name in FILES}, "5", ""),
    "peeks": ({"common.py": f"import importlib\n{OURS}"}, "5", "common.py says importlib: read it"),
    "cheats": (
        {"common.py": f"import _pytest.python\n{OURS}"},
        "5",
        "common.py says _pytest: read",
    ),
    "runtest": ({"common.py": REPLACES + UNWRITTEN}, "0", "has changed how pytest runs a test"),
    "old": ({"version.txt": "0123abc\n"}, "5", f"made from commit 0123abc, graded at {commit()}: "),
    "syntax": ({"common.py": "def gae(:"}, "0", "invalid syntax (common.py, line 1)"),
    "long sum": ({"common.py": f"x = {'1 + ' * 3000}1\n{OURS}"}, "0", "common.py doesn't parse: "),
    "floods": ({"common.py": FLOODS}, "0", ENDED),
    "exits": ({"common.py": "def gae(*args):\n    __import__('os')._exit(0)"}, "0", ENDED),
    "passes": ({"common.py": UNWRITTEN, "conftest.py": RUNS_EVERYTHING}, "0", "not written yet"),
    "small": ({"common.py": UNWRITTEN, "small.py": RUNS_EVERYTHING}, "0", "not written yet"),
    "ini": ({"common.py": UNWRITTEN, "pytest.ini": RUNS_NOTHING}, "0", "not written yet"),
    "site": ({"common.py": UNWRITTEN, "sitecustomize.py": "exit()"}, "0", "not written yet"),
}
PACKED = {  # what else is there: its total; what is said
    "CAPITALS.ZIP": ("5", ""),
    "王伟_2_assignsubmission_file_": ("5", ""),
    "deeper": ("5", ""),
    "without": ("0", "common.py isn't in the submission"),
    "broken.zip": ("", "broken.zip: File is not a zip file"),
    "tape.tar.gz": ("", "tape.tar.gz: no folder, and no zip file"),
    "empty": ("", "empty: no file of the assignment is in it, as common.py"),
    "bob": ("", "bob: common.py is a link: hand in the file itself"),
    "eve": ("", "eve: no file of the assignment is in it"),  # a link to a folder
    "bomb.zip": ("", "bomb.zip: common.py has more than 1,000,000 bytes: pack with pack.py"),
    "names.zip": ("", "names.zip has more than 500 files: pack with pack.py"),
    "versions": ("", "versions: 2 of its folders have files of the assignment: keep one"),
}


def hand_in_all(folder: Path) -> None:
    """A class: whatever its students hand in, each has a row."""
    for name, (files, _, _) in HAND_INS.items():
        hand_in(folder / name, files)
    for name in ("homework", "__MACOSX"):
        hand_in(folder.parent / "macos" / name)
    zipped = Path(shutil.make_archive(folder.parent / "hand_in", "zip", folder.parent / "macos"))
    (moodle := folder / "王伟_2_assignsubmission_file_" / "in").mkdir(parents=True)
    for path in (moodle / "hand_in.zip", folder / "CAPITALS.ZIP"):  # zip > homework > the files
        shutil.copy(zipped, path)
    hand_in(folder / "deeper" / "a" / "b" / "c")
    (hand_in(folder / "without") / "common.py").unlink()
    (folder / "broken.zip").write_bytes(zipped.read_bytes()[:2000])
    (folder / "tape.tar.gz").write_bytes(b"")
    (folder / "empty").mkdir()
    (hand_in(folder / "bob") / "common.py").unlink()
    (folder / "bob" / "common.py").symlink_to("../deeper/a/b/c/common.py")
    (folder / "eve").symlink_to("deeper")
    for name, files in {
        "bomb": {"common.py": 10**7},
        "names": dict.fromkeys(range(501), 1),
    }.items():
        with zipfile.ZipFile(folder / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for file, size in files.items():
                archive.writestr(str(file), " " * size)
    for version in ("new", "old"):
        hand_in(folder / "versions" / version)


def test_each_hand_in_of_a_class_has_its_row(tmp_path, capsys):
    """What can't be read has no total, which a 0 would be."""
    hand_in_all(folder := tmp_path / "class")
    args = ["--class", str(tmp_path / "grades.csv"), "--problems", "gae"]
    assert grade.main([str(tmp_path / "hand_in.zip"), *args]) == 2
    assert "hand_in.zip is no folder: unpack it" in capsys.readouterr().err
    late = (folder / "CAPITALS.ZIP").rename(tmp_path / "late.zip")  # the class is interrupted
    assert grade.main([str(folder), *args]) == 0
    capsys.readouterr()
    late.rename(folder / "CAPITALS.ZIP")
    assert grade.main([str(folder), *args]) == 0
    assert capsys.readouterr().out.strip() == "5 of 5  CAPITALS.ZIP"
    with (tmp_path / "grades.csv").open(newline="", encoding="utf-8") as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    expected = PACKED | {name: (total, words) for name, (_, total, words) in HAND_INS.items()}
    assert {*rows} == {path.name for path in folder.iterdir()} == {*expected}
    for name, (total, words) in expected.items():
        said = rows[name]["faults"] + rows[name]["remarks"]
        assert rows[name]["total"] == total and words in said and bool(words) == bool(said), name


SPOKEN = """log_softmax gather logsigmoid sigmoid softplus expm1 exp log clamp minimum cumsum nansum
nanmean argmax rsqrt sqrt logsumexp""".split()


def test_a_failing_test_shows_no_expression_of_a_solution():
    """Numbers by hand stand there; what helps to make numbers stands in functions of its own."""
    for problem in PROBLEMS:
        own = function_of((REPOSITORY / problem.file).read_text(), problem.function)
        calls = {x.attr for x in ast.walk(own) if isinstance(x, ast.Attribute)}
        calls |= {x.id for x in ast.walk(own) if isinstance(x, ast.Name)}
        for part in () if problem.step else problem.properties:
            file, test = part.split(" [")[0].split("::")
            source = function_of((REPOSITORY / "tests" / file).read_text(), test)
            shown = {x.attr for x in ast.walk(source) if isinstance(x, ast.Attribute)}
            assert not shown & calls & {*SPOKEN}, (problem.name, test)


def test_drafts_get_half_and_wrong_versions_a_quarter():
    table = drafts.table()
    assert table["value_loss"]["draft"] == 4, "another style than ours has all points"
    for name, scores in table.items():
        most = BY_NAME[name].points
        assert scores.pop("draft", most) >= most / 2, name
        assert scores.pop("detached", 0) <= most / 2, name
        assert scores and max(scores.values()) <= most / 4, (name, scores)


CLAIM = re.compile(
    r"`(\w+)`:\s+([^;]+?)\s+of\s+`([^`]+)`\s+([<>])\s+"
    r"(?:([^;]+?)\s+of\s+`([^`]+)`|(-?[\d.]+))(?:;|$)"
)


def apart(experiment: str, figure: str, variant: str, than: float | tuple) -> tuple[float, float]:
    """How far a figure is above another, and what this exceeds in 1 of 100 single runs."""
    known = json.loads(labs.REFERENCE.read_text())["experiments"][experiment]
    first, second = known[variant][figure], {"mean": than, "std": 0}
    if isinstance(than, tuple):
        second = known[than[1]][than[0]]
    noise = 2.33 * (first["std"] ** 2 + second["std"] ** 2) ** 0.5
    return first["mean"] - second["mean"], noise


def test_the_key_holds_for_99_of_100_single_runs():
    keys = [question.key.partition("**Holds.**")[2].strip() for question in QUESTIONS]
    found = [match.groups() for key in keys for match in CLAIM.finditer(key)]
    assert len(found) > 50
    for experiment, figure, variant, sign, other, its_variant, number in found:
        than = float(number) if number else (other, its_variant)
        difference, noise = apart(experiment, figure, variant, than)
        assert (difference if sign == ">" else -difference) > noise, (figure, variant)
    for name, predict in ((name, x.predict) for name, x in EXPERIMENTS.items()):
        difference, noise = apart(name, predict.figure, predict.variant, predict.than or 0)
        is_clear = difference == 0 or abs(abs(difference) - predict.near) > noise
        assert noise < 0.025 if predict.than is None else is_clear, name


def test_an_answer_is_right_or_gets_a_hint(monkeypatch, capsys):
    predict, found = EXPERIMENTS["dropout"].predict, {"left on": [({"kl_first": -1}, [])]}
    found |= {"top_k 5": [({"reward": 1, "accuracy": 0}, [])]}
    monkeypatch.setattr(labs, "run", lambda names, seeds: [(name, found) for name in names])
    labs.main(["dropout", "top_k", "--predict", "-", "+"])
    said = capsys.readouterr().out
    assert said.startswith("What will you see?") and said.count("What will you see?") == 2
    assert "\nYou said -: right.\n" in said and said.endswith("\nYou said +: right.\n")
    assert labs.answered(predict, "0", found) == f"It is -. {predict.hint}"
    predict, found = EXPERIMENTS["difficulty"].predict, {"none": [({"one_of_8": 7 / 16}, [])]}
    assert labs.answered(predict, "0.44", found) == "You said 0.44: right."


@pytest.mark.parametrize("name", "pad_is_eos off_policy".split())
def test_a_planted_mistake_of_the_labs_changes_the_run(name, tmp_path):
    wrong = next(v for v in EXPERIMENTS[name].variants.values() if v.change)
    flags = wrong.flags.replace("REWARDS", lab_parts.__file__)
    modules = [lab_parts.module_of(wrong.script, change) for change in ("", wrong.change)]
    runs = [lab_parts.start(x, f"{flags} {FEW}", 0, tmp_path / str(id(x))) for x in modules]
    assert runs[0][1]["policy/entropy_avg"] != runs[1][1]["policy/entropy_avg"]


def test_each_program_names_what_is_not_written(starter):
    lacks = "not written yet: step 4 of main in rloo.py: set advantages"
    assert lacks in graded(starter, "rloo_loop")["rloo_loop"][1]
    said = run_in(starter, *BY_NAME["gae"].test_command.split()[1:], "--problem", "schedule")
    assert re.findall(r"^SKIPPED .+ not written yet: (.+)", said, re.M) == [
        "gae in common.py", "schedule in common.py",
    ]  # fmt: skip
    said = run_in(starter, "labs.py", "estimators")
    assert said.strip() == "error: not written yet: decode in sampling.py"
    said = run_in(starter, "grpo.py", *FEW.split())
    assert said.strip().endswith("\nerror: not written yet: disable_dropout in common.py")


@pytest.mark.parametrize(("lab", "script"), [(2, rloo), (3, ppo), (4, grpo)])
def test_a_script_calls_no_function_of_a_later_lab(lab, script, make_job, monkeypatch):
    for name in [name for later in LABS[lab:] for name in later.problems]:
        monkeypatch.setattr(common, name, None, raising=False)
        monkeypatch.setattr(script, name, None, raising=False)
    assert make_job(script)()


def test_every_bug_of_the_hunt_is_measured_and_explained(capsys):
    measured = json.loads(bughunt.SYMPTOMS.read_text())["bugs"]
    scripts = {bug: script for bug, (script, *_) in bughunt.KEY.items() if script != "page"}
    assert {bug: x["script"] for bug, x in measured.items()} == scripts
    assert f"{len(measured)} bugs" in (REPOSITORY / "course" / "README.md").read_text()
    for seed in range(len(measured)):
        bughunt.main(["--seed", str(seed), "--answer"])
    assert {*re.findall(r"^\S+\.py:\d+, (.+)$", capsys.readouterr().out, re.M)} == {*measured}


def test_a_hunt_has_one_wrong_file_and_a_symptom(tmp_path):
    out = tmp_path / "hunt"
    bughunt.main([str(out), "--seed", "3"])
    names = [name for name in make.PROGRAM if name.endswith(".py")]
    wrong = [x for x in names if (out / x).read_text() != (REPOSITORY / x).read_text()]
    assert len(wrong) == 1 and (out / "symptom.png").stat().st_size > 10_000
    assert bughunt.told(bughunt.chosen(3)[0]).startswith(f"{wrong[0]}:")


def test_a_page_runs_with_each_of_its_bugs(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    taken = set()
    for bug in [bug for bug, (script, *_) in bughunt.KEY.items() if script == "page"]:
        file, right, wrong = bughunt.edit_of(bug)  # it stands there once
        lines = zip(right.split("\n"), wrong.split("\n"), strict=True)
        changed = {(file, n) for n, (old, new) in enumerate(lines) if old != new}
        assert changed and not changed & taken, f"{bug}: two bugs may come together"
        taken |= changed
        page = Page(Path(file).stem, wrong, **FEW_ROWS)
        assert page["optimizer"].state and page.out[-1].startswith("greedy: "), "it took steps"
        assert all(x.isfinite().all() for x in page["policy"].parameters()), bug


@pytest.mark.parametrize("page", ["grpo", "rloo", "ppo"])
def test_a_seed_plants_one_to_three_bugs_on_a_page(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    drawn = [bughunt.on_page(page, seed) for seed in range(40)]
    places = {bug: target for bug, (_, target, *_) in bughunt.KEY.items()}
    assert {len(bugs) for _, bugs in drawn} == {1, 2, 3}
    known = {bug for bug, target in places.items() if target == f"one_page/{page}"}
    assert {bug for _, bugs in drawn for bug in bugs} == known
    for flags in ("", "--answer"):
        bughunt.main(f"--page {page} --seed 3 {flags}".split())
    told = re.findall(rf"^one_page/{page}.py:(\d+), ", capsys.readouterr().out, re.M)
    right = (REPOSITORY / "one_page" / f"{page}.py").read_text().split("\n")
    wrong = Path(f"hunt-{page}-3.py").read_text().replace(f"hunt-{page}-3", f"one_page/{page}")
    lines = enumerate(zip(right, wrong.split("\n"), strict=True), 1)
    assert {n for n, (old, new) in lines if old != new} == {2, *map(int, told)}, "2: the task"
    assert wrong.split("\n")[1] == bughunt.TASK and len(told) == len(drawn[3][1])
