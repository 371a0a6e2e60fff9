"""The course: starter, pages, notebooks, grader, experiments of the labs, bug hunt."""

import ast
import csv
import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY / "course"))

import bughunt
import experiments
import grade
import lab_parts
import labs
import make
import pages
from problems import BY_NAME, FILES, PROBLEMS, SCRIPTS, function_of, marked_tests

pytestmark = pytest.mark.slow  # copies of the repository, and short runs
LABS = pages.chosen_labs(PROBLEMS)
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
        if not problem.step:
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
    command = [sys.executable, *shlex.split(BY_NAME["kl_estimate"].test_command)[1:]]
    before = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert before.returncode == 1 and "NotImplementedError" in before.stdout
    shutil.copy(REPOSITORY / "common.py", folder / "common.py")
    after = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert after.returncode == 0 and "5 passed" in after.stdout.replace("6 passed", "5 passed")


def test_each_problem_has_marked_tests_and_all_functions_are_worth_100_points():
    assert set(marked_tests()) == set(BY_NAME)
    assert sum(problem.points for problem in PROBLEMS) == 100
    assert [script.points for script in SCRIPTS] == [10] * 4


def test_only_what_is_about_the_chosen_problems_is_asked(tmp_path):
    out = tmp_path / "gae"
    assert make.main([str(out), "--problems", "gae"]) == 0
    assert [path.name for path in (out / "handout").iterdir()] == ["lab3.md"]
    text = (out / "handout" / "lab3.md").read_text()
    assert "| `gae` |" in text and "| `policy_loss` |" not in text
    assert 'FILES = "common.py".split()' in (out / "pack.py").read_text()
    assert make.main([str(out)]) == 2, "the folder exists already"
    with pytest.raises(SystemExit):
        make.main([str(tmp_path / "new"), "--problems", "gea"])


def test_what_is_handed_in_is_packed_and_what_is_missing_is_said(starter, tmp_path):
    folder = tmp_path / "work"
    shutil.copytree(starter, folder)
    command = [sys.executable, "pack.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0
    assert re.search("note: common.py: not written yet: .*, gae, ", done.stdout)
    assert f"answers.md: {len(QUESTIONS)} answers are empty" in done.stdout
    names = zipfile.ZipFile(folder / "hand_in.zip").namelist()
    assert {*FILES, "answers.md"} <= set(names) and not {*make.LABS} & set(names)
    (folder / "ppo.py").write_text("def f(:\n")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 1 and "error: ppo.py is no Python" in done.stderr


# --- Pages and notebooks ---


def test_each_question_has_a_key_and_something_to_hand_in_and_its_commands_exist():
    assert sorted(name for lab in LABS for name in lab.problems) == sorted(x.name for x in PROBLEMS)
    for lab, question in QUESTIONS:
        assert question.deliverable and set(question.about) <= set(BY_NAME)
        for part in ("**Answer.**", "**Points.**", "**Usual mistakes.**"):
            assert question.key.count(part) == 1, (question.title, part)
        for script in re.findall("^    python ([^ ]+)", question.text, re.M):
            assert (REPOSITORY / script).exists() or (REPOSITORY / "course" / script).exists()
        for name in question.experiments:
            assert experiments.EXPERIMENTS[name].lab == lab.number
            assert experiments.EXPERIMENTS[name].predict.ask in pages.asked(question)


CLAIM = re.compile(
    r"`(\w+)`:\s+([^;]+?)\s+of\s+`([^`]+)`\s+([<>])\s+"
    r"(?:([^;]+?)\s+of\s+`([^`]+)`|(-?[\d.]+))(?:;|$)"
)


def noise(first: dict, second: dict) -> float:
    """What the difference of two figures of single runs exceeds in 1 of 100 cases."""
    return 2.33 * (first["std"] ** 2 + second["std"] ** 2) ** 0.5


def test_what_the_key_says_of_a_figure_holds_for_99_of_100_single_runs():
    keys = [question.key.partition("**Holds.**")[2].strip() for _, question in QUESTIONS]
    found = [match.groups() for key in keys for match in CLAIM.finditer(key)]
    assert len(found) > 50
    for experiment, figure, variant, sign, other, its_variant, number in found:
        first = REFERENCE[experiment][variant][figure]
        second = {"mean": float(number or 0), "std": 0}
        if number is None:
            second = REFERENCE[experiment][its_variant][other]
        distance = (second["mean"] - first["mean"]) * (1 if sign == "<" else -1)
        assert distance > noise(first, second), (experiment, figure, variant)


def run_notebook(path: Path, cells: list[str]) -> str:
    """What the cells print, run where the notebook lies."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    book.cells = [nbformat.v4.new_code_cell(source) for source in cells]
    resources = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(book, timeout=300, resources=resources).execute()
    return "".join(
        x.get("text", "") + str(x.get("data", "")) for c in book.cells for x in c.outputs
    )


def code_of(path: Path) -> list[str]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_of_a_lab_runs_its_tests_and_packs_what_is_handed_in(starter, tmp_path):
    folder = tmp_path / "work"
    shutil.copytree(starter, folder)
    shutil.copy(REPOSITORY / "common.py", folder / "common.py")
    path = folder / "notebooks" / "lab1.ipynb"
    cells = code_of(path)
    assert "!python labs.py estimators" in cells
    said = run_notebook(path, [cell for cell in cells if "labs.py estimators" not in cell])
    assert " passed" in said and "failed" not in said and "hand_in.zip has" in said, said


def test_the_notebook_for_colab_runs_grpo_and_shows_the_page_of_tokens_on_a_cpu(tmp_path):
    folder = tmp_path / "plain"
    make.copy_files(folder, [], 0)
    (folder / "course").mkdir()
    path = Path(shutil.copy(REPOSITORY / "course" / "colab.ipynb", folder / "course"))
    cells = [cell.replace('""  #', f'"{FEW}"  #') for cell in code_of(path)]
    assert FEW in cells[0]
    said = run_notebook(path, cells)
    assert "iframe srcdoc" in said and (folder / "runs/first/metrics.jsonl").exists()


# --- The grader ---


def hand_in(folder: Path, **files: str) -> Path:
    """A submission: this repository's files, but for those that are given as name=text."""
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / name)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return folder


def graded(folder: Path, *problems: str, seconds: int = 60) -> dict[str, tuple[int, str]]:
    """{problem: (score, what is said)}"""
    file = folder.parent / "results.json"
    flags = ["--json", str(file), "--time_limit", str(seconds), "--problems", *problems]
    assert grade.main([str(folder), *flags]) == 0
    tests = json.loads(file.read_text())["tests"]
    return {test["name"]: (test["score"], test["output"]) for test in tests}


def changed(file: str, old: str, new: str) -> str:
    text = (REPOSITORY / file).read_text(encoding="utf-8")
    assert text.count(old) == 1, old
    return text.replace(old, new)


CHEAP = ["kl_estimate", "gae", "value_loss", "schedule", "group_advantages", "preference_loss"]


def test_the_solution_gets_all_points_and_what_is_not_written_none_and_names_itself(
    starter, tmp_path
):
    for name, (score, said) in graded(hand_in(tmp_path / "own"), *CHEAP, "rloo_loop").items():
        assert (score, said) == (BY_NAME[name].points, "")
    found = graded(starter, *CHEAP, "rloo_loop", "rloo_script")
    assert [score for score, _ in found.values()] == [0] * 8
    assert "not written yet" in found["gae"][1]
    assert "not written yet: set advantages" in found["rloo_loop"][1]


def test_one_mistake_costs_one_property_and_no_other_problem(tmp_path):
    text = changed("ppo.py", "return 0.5 * torch.max(free,", "return torch.max(free,")
    names = "value_loss", "policy_loss", "shape_rewards"
    found = graded(hand_in(tmp_path / "half", ppo=text), *names)
    assert [score for score, _ in found.values()] == [3, 4, 4]
    assert "-1: the value loss is half the squared error" in found["value_loss"][1]


BROKEN = """
import os

def gae(*args):
    os._exit(0)

def completion_mask(*args):
    raise ValueError("x" * 10**6)

def kl_estimate(logprobs, ref_logprobs, estimator):
    while True:
        pass

def token_logprobs(logits, tokens):
    return pick(at_least_float32(logits).log_softmax(-1), tokens)

def pick(logprobs, tokens):
    return logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
"""


def test_what_hangs_or_crashes_costs_its_own_problem_and_helpers_come_along(tmp_path):
    names = ["kl_estimate", "gae", "completion_mask", "token_logprobs"]
    folder = hand_in(tmp_path / "bad", common=BROKEN)
    found = graded(folder, *names, seconds=20)
    assert [score for score, _ in found.values()] == [0, 0, 0, BY_NAME["token_logprobs"].points]
    assert "not done after 20 seconds" in found["kl_estimate"][1]
    assert "the process ended before the tests did" in found["gae"][1]
    assert len(found["completion_mask"][1]) < 2000
    (folder / "common.py").write_text("def gae(:\n")
    found = graded(folder, "gae", "value_loss")
    assert found["value_loss"] == (4, "") and found["gae"][0] == 0
    assert "common.py doesn't parse: invalid syntax" in found["gae"][1]


@pytest.mark.parametrize(
    "code",
    [
        "theirs = {name}\ndef {name}(*args):\n    return theirs(*args)",
        "import common\ndef {name}(*args):\n    return common.{name}(*args)",
        "import os\ndef {name}(*args):\n    print('6 passed', flush=True)\n    os._exit(0)",
    ],
)
def test_neither_our_own_function_nor_a_printed_verdict_gets_points(code, tmp_path):
    folder = hand_in(tmp_path / "cheat", common=code.format(name="kl_estimate"))
    score, said = graded(folder, "kl_estimate")["kl_estimate"]
    assert score == 0 and said


def test_a_function_that_fits_its_tests_but_not_the_scripts_costs_the_scripts(tmp_path):
    """Here `generate` lacks an argument that its tests don't give it."""
    text = (REPOSITORY / "sampling.py").read_text() + (
        "\n\nwhole = generate\n\n\ndef generate(model, ids, mask, **options):\n"
        "    if 'stop' in options:\n        raise TypeError('unknown argument stop')\n"
        "    return whole(model, ids, mask, **options)\n"
    )
    found = graded(hand_in(tmp_path / "fewer", sampling=text), "generate", "grpo_script")
    assert found["generate"] == (7, "") and found["grpo_script"][0] == 0
    assert "unknown argument stop" in found["grpo_script"][1]


def test_a_class_has_a_row_for_each_whatever_the_others_hand_in(tmp_path, capsys):
    folder = tmp_path / "class"
    hand_in(folder / "deep" / "homework")
    hand_in(folder / "two" / "a"), hand_in(folder / "two" / "b")
    with zipfile.ZipFile(folder / "zipped.zip", "w") as archive:
        for name in FILES:
            archive.write(REPOSITORY / name, f"hand_in/{name}")
    (folder / "broken.zip").write_bytes((folder / "zipped.zip").read_bytes()[:2000])
    (folder / "empty").mkdir()
    args = [str(folder), "--class", str(tmp_path / "grades.csv"), "--problems", "schedule", "gae"]
    assert grade.main(args) == 0
    with (tmp_path / "grades.csv").open(newline="") as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    assert {name: row["total"] for name, row in rows.items()} == {
        "broken.zip": "0", "deep": "9", "empty": "0", "two": "0", "zipped.zip": "9"
    }  # fmt: skip
    assert rows["deep"]["gae"] == "6" and rows["deep"]["faults"] == ""
    assert "not a zip file" in rows["broken.zip"]["faults"]
    assert "2 folders have files" in rows["two"]["faults"]
    capsys.readouterr()
    assert grade.main(args) == 2 and capsys.readouterr().err.count("\n") == 1, "it exists"
    assert grade.main([str(folder / "broken.zip")]) == 2
    assert capsys.readouterr().err == "error: broken.zip: File is not a zip file\n"


# --- Labs ---


@pytest.mark.parametrize("name", experiments.EXPERIMENTS)
def test_before_each_experiment_is_a_question_whose_answer_hardly_depends_on_the_seed(name):
    predict = experiments.EXPERIMENTS[name].predict
    first = REFERENCE[name][predict.variant][predict.figure]
    if predict.than is None:
        assert first["std"] < 0.01
        return
    second = {"mean": predict.than, "std": 0}
    if isinstance(predict.than, tuple):
        second = REFERENCE[name][predict.than[1]][predict.than[0]]
    distance = abs(first["mean"] - second["mean"])
    assert distance == 0 or abs(distance - predict.near) > noise(first, second)


def test_an_answer_is_right_or_gets_a_hint():
    predict = experiments.EXPERIMENTS["dropout"].predict
    found = {"left on": [({"kl_first": -1}, [])]}
    assert labs.answered(predict, "-", found) == "You said -: right."
    assert labs.answered(predict, "0", found) == f"It is -. {predict.hint}"
    predict = experiments.EXPERIMENTS["difficulty"].predict
    found = {"none": [({"one_of_8": 7 / 16}, [])]}
    assert "right" in labs.answered(predict, "0.44", found)
    assert labs.answered(predict, "1", found).startswith("It is 0.438. The sum")
    assert labs.answered(predict, "+", found) == "+ is no number."


@pytest.mark.parametrize("name", "pad_is_eos temperature rejection".split())
def test_a_planted_mistake_of_the_labs_changes_the_run(name, tmp_path):
    wrong = next(v for v in experiments.EXPERIMENTS[name].variants.values() if v.change)
    flags = wrong.flags.replace("REWARDS", lab_parts.__file__)
    entropies = []
    for change in ("", wrong.change):
        module = lab_parts.module_of(wrong.script, change)
        lines = lab_parts.start(module, f"{flags} {FEW}", 0, tmp_path / f"run{change}")
        entropies.append(lines[1]["policy/entropy_avg"])
    assert entropies[0] != entropies[1]


def test_update_writes_the_means_and_five_curves_which_a_picture_shows(tmp_path, monkeypatch):
    for name in ("REFERENCE", "CURVES"):
        monkeypatch.setattr(labs, name, tmp_path / name)
    parts = [({"clip_first": 0.0, "kl_first": float(s)}, [float(s), None], []) for s in range(7)]
    found = dict.fromkeys(experiments.EXPERIMENTS["dropout"].variants, parts)
    labs.keep("dropout", found, {"experiments": {}}, {})
    written = json.loads((tmp_path / "REFERENCE").read_text())["experiments"]["dropout"]
    assert written["off"]["kl_first"] == {"mean": 3, "std": 2.16025, "seeds": 7}
    curves = json.loads((tmp_path / "CURVES").read_text())["dropout"]
    assert curves["off"] == [[float(seed), None] for seed in range(5)]
    labs.draw("dropout", curves, written, tmp_path / "dropout.png")
    assert (tmp_path / "dropout.png").stat().st_size > 10_000


def test_an_experiment_asks_first_and_names_the_function_that_is_not_written_yet(starter):
    command = [sys.executable, "labs.py", "estimators"]
    run = subprocess.run(command, cwd=starter, capture_output=True, text=True, stdin=-3)
    assert run.stdout == "What will you see? Is the mean of k2 above, below or at the exact KL?\n"
    missing = "error: a function is not written yet: "
    assert run.returncode == 2 and missing in run.stderr and " in " in run.stderr, run.stderr


# --- The bug hunt ---


def test_every_bug_of_the_hunt_is_measured_and_explained():
    measured = json.loads(bughunt.SYMPTOMS.read_text())["bugs"]
    reasons = {bug: script for script, bug, _ in bughunt.KEY}
    assert len(measured) >= 25 and {k: x["script"] for k, x in measured.items()} == reasons
    for bug in reasons:
        file, before, after = bughunt.edit_of(bug)
        assert before == (REPOSITORY / file).read_text() and before != after
    assert f"{len(measured)} bugs" in (REPOSITORY / "course" / "README.md").read_text()


def test_a_hunt_has_one_wrong_file_and_its_symptom_and_the_answer_is_revealed(tmp_path, capsys):
    out = tmp_path / "hunt"
    bughunt.main([str(out), "--seed", "3"])
    names = [name for name in make.PROGRAM if name.endswith(".py")]
    wrong = [x for x in names if (out / x).read_text() != (REPOSITORY / x).read_text()]
    assert len(wrong) == 1 and (out / "symptom.png").stat().st_size > 10_000
    capsys.readouterr()
    bughunt.main(["--reveal", "3"])
    said = capsys.readouterr().out
    assert said.startswith(f"{wrong[0]}: ") and "\n@@ " in said
    with pytest.raises(SystemExit):
        bughunt.main([str(out)])  # the folder exists already


def test_a_bug_of_the_hunt_shows_in_its_metric():
    bug, measured = "GRPO rewards the KL", json.loads(bughunt.SYMPTOMS.read_text())
    about = measured["bugs"][bug]
    buggy = bughunt.curves("grpo", 0, bug)[about["metric"]]
    # To the rounding of another machine, which fifty steps enlarge.
    assert bughunt.ends(buggy) == pytest.approx(bughunt.ends(about["curve"]), rel=0.3)
    ranges = [bughunt.ends(run)[1] for run in measured["right"]["grpo"][about["metric"]]]
    assert not min(ranges) <= bughunt.ends(buggy)[1] <= max(ranges)
