"""The course: starter, pages, notebooks, experiments of the labs, bug hunt."""

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).parent.parent
sys.path[:0] = [str(REPOSITORY / "course"), str(REPOSITORY / "course" / "starter")]

import bughunt
import into
import labs
import make
import pages
from problems import BY_NAME, PROBLEMS, TESTS, function_of

pytestmark = pytest.mark.slow  # copies of the repository, and short runs
LABS = pages.all_labs()
QUESTIONS = [(lab, question) for lab in LABS for question in lab.questions]
REFERENCE = json.loads(labs.REFERENCE.read_text())["experiments"]
FEW = "--num_steps 2 --prompts_per_step 4 --num_generations 4 --num_eval_prompts 8"


@pytest.fixture(scope="module")
def starter(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("course") / "starter"
    assert make.main([str(out)]) == 0
    return out


def texts(folder: Path) -> dict[str, str]:
    """{name: text} of all that can be read in a folder; of a notebook the text of its cells."""
    found = {}
    for path in folder.rglob("*"):
        if path.suffix == ".ipynb":
            cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
            found[path.name] = "\n".join("".join(cell["source"]) for cell in cells)
        elif path.suffix in (".md", ".py", ".txt", ".json"):
            found[str(path.relative_to(folder))] = path.read_text(encoding="utf-8")
    return found


# --- The starter ---


def test_no_line_of_a_solution_and_no_line_of_the_key_is_in_the_starter(starter):
    given = {name: " ".join(text.split()) for name, text in texts(starter).items()}
    for problem in PROBLEMS:
        text = (starter / problem.file).read_text(encoding="utf-8")
        function = function_of(text, problem.function)
        if not problem.steps:
            docstring, *rest = function.body
            assert isinstance(docstring, ast.Expr) and len(rest) == 1, problem.name
            assert isinstance(rest[0], ast.Raise), problem.name
        assert "NotImplementedError" in ast.unparse(function), problem.name
    key = {" ".join(line.split()) for _, q in QUESTIONS for line in q.key.split("\n")}
    key = {line for line in key if len(line) > 25}
    assert len(key) > 200 and {"lab1.ipynb", "answers.md", "handout/lab1.md"} <= set(given)
    assert not [(name, line) for name, text in given.items() for line in key if line in text]


def test_the_starter_with_the_solutions_copied_back_passes_its_tests_and_fails_them_without(
    starter, tmp_path
):
    folder = tmp_path / "work"
    shutil.copytree(starter, folder)
    command = [sys.executable, *shlex.split(BY_NAME["kl_estimate"].test_command)[1:], "-n", "0"]
    before = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert before.returncode == 1 and "NotImplementedError" in before.stdout
    shutil.copy(REPOSITORY / "common.py", folder / "common.py")
    after = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert after.returncode == 0, after.stdout


@pytest.mark.parametrize("problem", [p for p in PROBLEMS if not p.steps], ids=lambda p: p.name)
def test_each_problem_has_tests_of_its_own(problem):
    file, words = TESTS[problem.name]
    names = re.findall(r"^def (test_\w+)", (REPOSITORY / "tests" / file).read_text(), re.M)
    for word in words.split(" or "):
        assert [name for name in names if word in name], f"{file} has no test of {word}"


def test_only_what_is_about_the_chosen_problems_is_asked(tmp_path):
    out = tmp_path / "gae"
    assert make.main([str(out), "--problems", "gae"]) == 0
    assert [path.name for path in (out / "handout").iterdir()] == ["lab3.md"]
    text = (out / "handout" / "lab3.md").read_text()
    assert "| `gae` |" in text and "| `policy_loss` |" not in text
    assert 'FILES = [path for path in "common.py".split()' in (out / "pack.py").read_text()
    assert make.main([str(out)]) == 2, "the folder exists already"
    assert make.main([str(tmp_path / "new"), "--problems", "gea"]) == 2


def test_what_is_handed_in_is_packed_and_what_is_missing_is_said(starter, tmp_path):
    folder = tmp_path / "work"
    shutil.copytree(starter, folder)
    command = [sys.executable, "pack.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0
    assert re.search("note: common.py: not written yet: .*, gae, ", done.stdout)
    assert f"answers.md: {len(QUESTIONS)} answers are empty" in done.stdout
    names = zipfile.ZipFile(folder / "hand_in.zip").namelist()
    assert {"ppo.py", "answers.md"} <= set(names) and "labs.py" not in names
    (folder / "ppo.py").write_text("def f(:\n")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 1 and "error: ppo.py is no Python" in done.stderr


# --- Pages and notebooks ---


def test_each_question_has_a_key_and_something_to_hand_in_and_its_commands_exist():
    assert sorted(name for lab in LABS for name in lab.problems) == sorted(BY_NAME)
    for lab, question in QUESTIONS:
        assert question.deliverable and set(question.about) <= set(BY_NAME)
        for part in ("**Answer.**", "**Points.**", "**Usual mistakes.**"):
            assert question.key.count(part) == 1, (question.title, part)
        for command in question.commands:
            _, script, *rest = command.split()
            assert (REPOSITORY / script).exists() or (REPOSITORY / "course" / script).exists()
            if script == "labs.py":
                assert all(labs.EXPERIMENTS[name].lab == lab.number for name in rest), command


def test_what_the_key_says_of_a_figure_holds_for_99_of_100_single_runs():
    found = [claim for _, q in QUESTIONS for claim in pages.claims(q)]
    assert len(found) > 50
    for experiment, figure, variant, sign, *other in found:
        first = REFERENCE[experiment][variant][figure]
        second = {"mean": other[0], "std": 0}
        if len(other) == 2:
            second = REFERENCE[experiment][other[1]][other[0]]
        distance = (second["mean"] - first["mean"]) * (1 if sign == "<" else -1)
        spread = (first["std"] ** 2 + second["std"] ** 2) ** 0.5
        assert distance > 2.33 * spread, (experiment, figure, variant)


def test_a_notebook_puts_its_cell_into_the_file_and_runs_the_tests(starter, tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    folder = tmp_path / "work"
    shutil.copytree(starter, folder)
    book = nbformat.read(folder / "notebooks" / "lab1.ipynb", as_version=4)
    kept = ["def kl_estimate", TESTS["kl_estimate"][1], "google.colab", "pack.py"]
    cells = [c for c in book.cells if c.cell_type == "code" and any(k in c.source for k in kept)]
    text = (REPOSITORY / "common.py").read_text()
    node = function_of(text, "kl_estimate")
    solved = "\n".join(text.split("\n")[node.lineno - 1 : node.end_lineno])
    written = nbformat.v4.new_code_cell(f"%%into common.py\n{solved}")
    book.cells = [*cells[:2], written, *cells[2:]]
    resources = {"metadata": {"path": str(folder / "notebooks")}}
    nbclient.NotebookClient(book, timeout=300, resources=resources).execute()
    said = ["".join(o.get("text", "") for o in cell.outputs) for cell in book.cells]
    assert "not written yet: common.py stays" in said[1] and "common.py has it" in said[2]
    assert "passed" in said[3] and "failed" not in said[3], said[3]
    assert "hand_in.zip has" in said[-1] and "kl_estimate" not in said[-1]


def test_a_cell_without_a_function_of_the_file_is_refused():
    source = "def a(x):\n    return 1\n"
    assert into.with_functions(source, "def a(x):\n    return 3") == source.replace("1", "3")
    for wrong in ("x = 1", "def c(x):\n    return 1", ""):
        with pytest.raises(ValueError):
            into.with_functions(source, wrong)


# --- Labs ---


def test_an_experiment_runs_and_lies_within_its_bounds_and_a_wrong_figure_does_not():
    found = {"tiny": {"figures": [labs.estimators(seed=77)], "curves": [[]]}}
    text = labs.table("estimators", found, REFERENCE)
    assert text.count("(expected") == 7 and "NOT" not in text and "from 40 seeds" in text
    found["tiny"]["figures"][0]["k3"] += 1
    assert labs.table("estimators", found, REFERENCE).count("NOT within") == 1


def test_on_given_completions_the_figures_are_exact_and_a_wrong_function_shows(monkeypatch):
    variant = labs.EXPERIMENTS["rloo_steps"].variants[0]

    def said() -> str:
        found = {variant.label: {"figures": [labs.run_variant(("rloo_steps", 0, 78))[0]]}}
        return labs.table("rloo_steps", found, REFERENCE)

    text = said()
    assert text.count("(as expected: ") == 6 and "NOT" not in text

    def wrong(module: ModuleType) -> None:
        labs.give_completions(module)
        right = module.rloo_advantages
        module.rloo_advantages = lambda rewards, n, *more: right(rewards, n, *more) * (n - 1) / n

    monkeypatch.setattr(variant, "change", wrong)
    assert said().count("NOT the expected") >= 1


@pytest.mark.parametrize("name", "pad_is_eos temperature rejection".split())
def test_a_planted_mistake_of_the_labs_changes_the_run(name):
    wrong = next(v for v in labs.EXPERIMENTS[name].variants if v.change)
    entropies = [
        labs.train(labs.module_of(wrong.script, change), f"{wrong.flags} {FEW}", 0)[0][1]
        for change in (None, wrong.change)
    ]
    assert entropies[0]["policy/entropy_avg"] != entropies[1]["policy/entropy_avg"]


def test_adding_seeds_writes_the_means_and_five_curves(tmp_path, monkeypatch):
    for name in ("REFERENCE", "CURVES"):
        monkeypatch.setattr(labs, name, tmp_path / name)
    reference, curves = {"experiments": {}}, {}
    for seeds in (range(4), range(4, 7)):
        found = {
            variant.label: {
                "figures": [{"clip_first": 0.0, "kl_first": float(s)} for s in seeds],
                "curves": [[float(s), None] for s in seeds],
            }
            for variant in labs.EXPERIMENTS["dropout"].variants
        }
        labs.add_seeds("dropout", found, reference, curves)
    written = json.loads((tmp_path / "REFERENCE").read_text())["experiments"]["dropout"]
    assert written["off"]["kl_first"]["mean"] == 3 and labs.seeds_of(written) == 7
    assert len(json.loads((tmp_path / "CURVES").read_text())["dropout"]["off"]) == 5
    labs.draw("dropout", curves["dropout"], written, tmp_path / "dropout.png")
    assert (tmp_path / "dropout.png").stat().st_size > 10_000


def test_an_experiment_names_the_function_that_is_not_written_yet(starter):
    command = [sys.executable, "labs.py", "estimators"]
    run = subprocess.run(command, cwd=starter, capture_output=True, text=True)
    needs = "needs a function that is not written yet: "
    assert run.returncode == 2 and f"error: estimators {needs}" in run.stderr, run.stderr


# --- The bug hunt ---


def test_every_bug_of_the_hunt_is_found_by_its_line_and_explained(tmp_path):
    bugs = [bug for names in bughunt.BUGS.values() for bug in names]
    measured = json.loads(bughunt.SYMPTOMS.read_text())["bugs"]
    assert len(bugs) >= 25 and set(bugs) == set(measured) == set(bughunt.REASONS)
    for bug, script, file, text in bughunt.candidates():
        assert measured[bug]["script"] == script
        assert bughunt.changed_lines((REPOSITORY / file).read_text(), text), bug


def test_a_hunt_has_one_wrong_file_its_symptom_and_a_seal_that_opens(tmp_path, capsys):
    out = tmp_path / "hunt"
    assert bughunt.main([str(out), "--seed", "3"]) == 0
    changed = [
        name
        for name in make.FILES
        if name.endswith(".py") and (out / name).read_text() != (REPOSITORY / name).read_text()
    ]
    assert len(changed) == 1 and (out / "symptom.png").stat().st_size > 10_000
    line = bughunt.changed_lines(*((x / changed[0]).read_text() for x in (REPOSITORY, out)))[0]
    assert bughunt.is_right(out, f"{changed[0]}:{line}")
    assert not bughunt.is_right(out, f"{changed[0]}:{line + 7}")
    capsys.readouterr()
    assert bughunt.main(["--reveal", str(out)]) == 0
    assert f"{changed[0]}:{line}: " in capsys.readouterr().out
    assert bughunt.main(["--reveal", str(tmp_path)]) == 2


def test_a_bug_of_the_hunt_shows_in_its_metric():
    bug = "GRPO rewards the KL"
    [(script, file, text)] = [x[1:] for x in bughunt.candidates() if x[0] == bug]
    buggy = bughunt.curves(script, 0, (file, text))
    right = json.loads(bughunt.SYMPTOMS.read_text())["right"][script]
    about = json.loads(bughunt.SYMPTOMS.read_text())["bugs"][bug]
    assert bughunt.ends(buggy[about["metric"]]) == pytest.approx(
        bughunt.ends(about["curve"]), rel=0.05
    )
    ranges = [bughunt.ends(run)[1] for run in right[about["metric"]]]
    assert not min(ranges) <= bughunt.ends(buggy[about["metric"]])[1] <= max(ranges)
