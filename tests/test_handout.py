"""What students and teachers read of the course: the pages of the labs, their key, the sheet for
the answers, the notebooks, what is handed in, and Gradescope's zip file.
"""

import ast
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
sys.path[:0] = [str(REPOSITORY / "course"), str(REPOSITORY / "course" / "starter")]

import into
import labs
import make
import pages
from problems import BY_NAME, PROBLEMS, function_of
from scripts import SCRIPTS

pytestmark = pytest.mark.slow  # copies of the repository, and its scripts
LABS = pages.all_labs()
QUESTIONS = [(lab, question) for lab in LABS for question in lab.questions]
IDS = [f"{lab.number}.{question.number}" for lab, question in QUESTIONS]
REFERENCE = json.loads((REPOSITORY / "course/reference.json").read_text())["experiments"]


@pytest.fixture(scope="module")
def starter(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("handout") / "starter"
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


# --- The pages and their key ---


def test_each_problem_is_written_in_one_lab_and_each_lab_has_a_page_of_theory():
    written = [name for lab in LABS for name in lab.problems]
    assert sorted(written) == sorted(BY_NAME)
    for lab in LABS:
        assert 120 <= len(lab.theory.split()) <= 500, lab.number
        assert "$$" in lab.theory, f"lab {lab.number} has no equation"
        assert "arXiv" in lab.theory or "Schulman 2020" in lab.theory


def test_no_formula_within_a_line_is_broken_over_two():
    for path in pages.SOURCES:
        for line in path.read_text().split("\n"):
            assert line.replace("$$", "").count("$") % 2 == 0, f"{path.name}: {line}"


@pytest.mark.parametrize(("lab", "question"), QUESTIONS, ids=IDS)
def test_each_question_says_what_to_hand_in_and_has_a_key(lab, question):
    assert 1 <= question.points <= 6 and 5 <= question.minutes <= 90
    assert set(question.about) <= set(BY_NAME)
    assert question.deliverable
    for part in ("**Answer.**", "**Points.**", "**Usual mistakes.**"):
        assert question.key.count(part) == 1, part
    assert not re.search("answer.{0,3}\\*\\*|usual mistakes", question.text, re.I)
    assert [q.number for q in lab.questions] == list(range(1, len(lab.questions) + 1))


@pytest.mark.parametrize(("lab", "question"), QUESTIONS, ids=IDS)
def test_each_command_of_a_question_can_be_run(lab, question):
    for command in question.commands:
        _, script, *rest = command.split()
        assert (REPOSITORY / script).exists() or (REPOSITORY / "course" / script).exists(), command
        if script == "labs.py":
            for name in rest:
                assert labs.EXPERIMENTS[name].lab == lab.number, name
        elif script.startswith("tiny/"):
            assert all(flag in (REPOSITORY / script).read_text() for flag in rest if "--" in flag)
        elif not script.startswith("tools/"):
            config = labs.module_of(script.removesuffix(".py")).Config
            flags = {flag.removeprefix("--") for flag in rest if flag.startswith("--")}
            assert flags <= set(config.__dataclass_fields__), command


def mean_and_std(experiment: str, figure: str, variant: str) -> tuple[float, float]:
    found = REFERENCE[experiment][variant][figure]
    return found["mean"], found["std"]


CLAIMS = [(q.title, claim) for _, q in QUESTIONS for claim in pages.claims(q)]


def test_every_claim_of_the_key_is_read():
    assert len(CLAIMS) > 50
    for _, question in QUESTIONS:
        text = question.key.partition("**Holds.**")[2]
        assert len(pages.claims(question)) == len(re.findall(r" [<>]\s", text)), question.title


@pytest.mark.parametrize(("title", "claim"), CLAIMS, ids=lambda x: x if isinstance(x, str) else "")
def test_what_the_key_says_of_a_figure_holds_for_a_single_run(title, claim):
    experiment, figure, variant, sign, *other = claim
    mean, std = mean_and_std(experiment, figure, variant)
    than, its_std = (other[0], 0) if len(other) == 1 else mean_and_std(experiment, *other)
    distance = than - mean if sign == "<" else mean - than
    # As many standard deviations of a difference: 99 of 100 runs.
    assert distance > 2.33 * (std**2 + its_std**2) ** 0.5, claim


def test_no_line_of_the_key_is_in_the_starter(starter):
    lines = [line for _, q in QUESTIONS for line in q.key.split("\n")]
    lines = {" ".join(line.split()) for line in lines}
    lines = {line for line in lines if len(line) > 25}
    assert len(lines) > 200
    given = {name: " ".join(text.split()) for name, text in texts(starter).items()}
    assert {"lab1.ipynb", "answers.md", "handout/lab1.md"} <= set(given)
    for name, text in given.items():
        assert not [line for line in lines if line in text], name
        assert "**Answer.**" not in text and "Usual mistakes" not in text, name


def test_the_pages_of_the_starter_have_every_question_and_its_points(starter):
    for lab in LABS:
        text = (starter / "handout" / f"lab{lab.number}.md").read_text()
        for question in lab.questions:
            assert f"### {lab.number}.{question.number} {question.title}" in text
        assert text.count("**Hand in:**") == len(lab.questions)
        assert f"{lab.points} points" in text
        for command in (c for q in lab.questions for c in q.commands):
            assert f"\n    {command}\n" in text
    sheet = (starter / "answers.md").read_text()
    assert sheet.count("(your answer)") == len(QUESTIONS)


def test_the_readme_has_a_command_for_each_script_that_is_graded_whole(starter, tmp_path):
    text = (starter / "README.md").read_text()
    assert "100 points. The grader" in text and "have 40 points beside these, 10 for" in text
    commands = re.findall(
        r"^    python (\S+\.py) (.+ --output_dir try/\w+ --overwrite)$", text, re.M
    )
    assert [file for file, _ in commands] == [script.file for script in SCRIPTS]
    for (file, flags), script in zip(commands, SCRIPTS):
        assert flags.startswith(script.flags) and f"{script.bound:.2f} ({file})" in text
    assert not re.search(r"\b[A-Z]{3,}S\b|WHOLE|EACH|TRUE|SUM\b", text)
    assert make.main([str(tmp_path / "one"), "--problems", "gae"]) == 0
    assert "as a whole" not in (tmp_path / "one" / "README.md").read_text()


def test_no_page_of_the_starter_has_a_link_to_what_is_not_there(starter):
    for page in starter.rglob("*.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
    page = (starter / "docs" / "metrics.md").read_text()
    assert "](debugging.md#" in page and "evidence/outgrow.md" in page, "the words of a link stay"


def test_what_to_run_when_the_functions_are_there_comes_after_their_table(starter):
    for lab in LABS:
        text = (starter / "handout" / f"lab{lab.number}.md").read_text(encoding="utf-8")
        if "When they are written" in text:
            assert text.index("## Functions to write") < text.index("When they are written")
            assert "\n\n\n" not in text
    assert sum(bool(lab.when_written) for lab in LABS) == 5


def test_only_what_is_about_the_chosen_problems_is_asked(tmp_path):
    out = tmp_path / "gae"
    assert make.main([str(out), "--problems", "gae"]) == 0
    assert [path.name for path in (out / "handout").iterdir()] == ["lab3.md"]
    text = (out / "handout" / "lab3.md").read_text()
    assert "| `gae` |" in text and "| `policy_loss` |" not in text
    assert "### 3.1 Credit by hand" in text and "Why the maximum?" not in text
    assert [path.name for path in (out / "notebooks").glob("*.ipynb")] == ["lab3.ipynb"]
    assert 'FILES = [path for path in "common.py".split()' in (out / "pack.py").read_text()
    chosen = [BY_NAME["last_real_token"], BY_NAME["rloo_loss"]]
    assert [lab.number for lab in pages.chosen_labs(chosen)] == [2, 6]
    assert [lab.number for lab in pages.chosen_labs(PROBLEMS)] == [1, 2, 3, 4, 5, 6]


def test_the_plan_of_five_weeks_has_all_functions_and_all_points():
    text = (REPOSITORY / "course" / "README.md").read_text()
    rows = re.findall(r"^\| \d \| .+ \| (\d+) \| (\d+) points \| \d+ \|$", text, re.M)
    assert len(rows) == 5
    assert sum(int(functions) for functions, _ in rows) == len(PROBLEMS)
    assert sum(int(points) for _, points in rows) == sum(lab.points for lab in LABS)


# --- What is handed in ---


def pack(folder: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "pack.py"], cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_what_is_handed_in_is_packed_and_what_is_missing_is_said(starter, tmp_path):
    folder = tmp_path / "work"
    shutil.copytree(starter, folder)
    (folder / "my_helpers.py").write_text("x = 1\n")
    run = folder / "runs" / "one"
    (run / "model").mkdir(parents=True)
    for name in ("config.json", "metrics.jsonl", "samples.jsonl", "tokens.jsonl"):
        (run / name).write_text("{}\n")
    (run / "model" / "model.safetensors").write_bytes(b"0" * 1000)
    code, said = pack(folder)
    assert code == 0 and re.search("note: common.py: not written yet: .*, gae, ", said)
    assert f"answers.md: {len(QUESTIONS)} answers are empty" in said
    names = zipfile.ZipFile(folder / "hand_in.zip").namelist()
    assert {"ppo.py", "plumbing/reward_models.py", "answers.md", "my_helpers.py"} <= set(names)
    assert {"runs/one/config.json", "runs/one/metrics.jsonl"} <= set(names)
    assert not {"labs.py", "tasks.py", "runs/one/tokens.jsonl", "hand_in.zip"} & set(names)
    assert not any("safetensors" in name or name.startswith("tests/") for name in names)

    (folder / "hand_in.zip").unlink()
    (folder / "ppo.py").write_text("def f(:\n")
    (folder / "rloo.py").unlink()
    (folder / "answers.md").unlink()
    code, said = pack(folder)
    assert code == 1 and not (folder / "hand_in.zip").exists()
    assert "error: ppo.py is no Python" in said and "error: rloo.py is missing" in said
    assert "note: answers.md is missing" in said


# --- Notebooks ---


def test_a_cell_is_put_in_the_place_of_its_function():
    source = "import torch\n\n\ndef a(x):\n    return 1\n\n\ndef b(x):\n    return 2\n"
    one = into.with_functions(source, "def a(x):\n    return 3")
    assert one == source.replace("return 1", "return 3")
    cell = "def helper(x):\n    return x\n\n\ndef b(x):\n    return helper(x)"
    two = into.with_functions(source, cell)
    names = [n.name for n in ast.parse(two).body if isinstance(n, ast.FunctionDef)]
    assert names == ["a", "helper", "b"] and two == into.with_functions(two, cell)
    for wrong in ("x = 1", "def c(x):\n    return 1", ""):
        with pytest.raises(ValueError):
            into.with_functions(source, wrong)


def test_a_cell_that_is_not_written_leaves_the_file_alone(tmp_path, capsys):
    path = tmp_path / "common.py"
    path.write_text("def a(x):\n    return 1\n")
    into.into(str(path), "def a(x):\n    raise NotImplementedError")
    assert "return 1" in path.read_text() and "not written yet" in capsys.readouterr().out
    into.into(str(path), "def a(x:")
    assert "error: " in capsys.readouterr().out
    into.into(str(path), "def a(x):\n    return 2")
    assert "return 2" in path.read_text()


def test_every_cell_of_every_notebook_compiles(starter):
    nbformat, inputs = pytest.importorskip("nbformat"), pytest.importorskip("IPython.core")
    from IPython.core.inputtransformer2 import TransformerManager

    assert inputs
    for lab in LABS:
        book = nbformat.read(starter / "notebooks" / f"lab{lab.number}.ipynb", as_version=4)
        nbformat.validate(book)
        cells = [cell.source for cell in book.cells if cell.cell_type == "code"]
        assert "google.colab" in cells[0] and cells[-1] == "!python pack.py"
        for source in cells:
            compile(TransformerManager().transform_cell(source), "cell", "exec")
            if source.startswith("%%into"):
                ast.parse(source.split("\n", 1)[1])
        commands = [f"!{command}" for q in lab.questions for command in q.commands]
        assert set(commands) <= set(cells)
        text = "\n".join(cell.source for cell in book.cells)
        assert text.count("**Hand in:**") == len(lab.questions)


def test_a_notebook_runs_without_a_network(starter, tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    folder = tmp_path / "work"
    shutil.copytree(starter, folder)
    book = nbformat.read(folder / "notebooks" / "lab1.ipynb", as_version=4)
    kept = ["kl_estimate", "google.colab", "pack.py"]
    cells = [c for c in book.cells if c.cell_type == "code" and any(k in c.source for k in kept)]
    problem = BY_NAME["kl_estimate"]
    text = (REPOSITORY / problem.file).read_text()
    node = function_of(text, problem.function)
    solved = "\n".join(text.split("\n")[node.lineno - 1 : node.end_lineno])
    assert cells[1].source.startswith("%%into common.py")
    written = nbformat.v4.new_code_cell(f"%%into common.py\n{solved}")
    book.cells = [*cells[:2], written, *cells[2:]]
    before = {key: os.environ.get(key) for key in ("https_proxy", "http_proxy")}
    os.environ |= dict.fromkeys(before, "http://127.0.0.1:9")  # nothing listens there
    try:
        client = nbclient.NotebookClient(
            book, timeout=300, resources={"metadata": {"path": str(folder / "notebooks")}}
        )
        client.execute()
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.__setitem__(key, value)
    said = ["".join(o.get("text", "") for o in cell.outputs) for cell in book.cells]
    assert "not written yet: common.py stays" in said[1] and "common.py has it" in said[2]
    assert "passed" in said[3] and "failed" not in said[3], said[3]
    assert "hand_in.zip has" in said[-1] and "kl_estimate" not in said[-1]


# --- Gradescope ---


TWO = ["kl_estimate", "gae"]


@pytest.fixture(scope="module")
def autograder(tmp_path_factory) -> Path:
    """/autograder as it is on Gradescope, but for setup.sh: its Python is this one."""
    root = tmp_path_factory.mktemp("autograder")
    assert make.main(["--gradescope", str(root / "a.zip"), "--problems", *TWO]) == 0
    with zipfile.ZipFile(root / "a.zip") as archive:
        modes = {info.filename: info.external_attr >> 16 for info in archive.infolist()}
        archive.extractall(root / "source")
    assert all(modes[name] & stat.S_IXUSR for name in ("setup.sh", "run_autograder"))
    (root / "venv" / "bin").mkdir(parents=True)
    python = root / "venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return root


def run_autograder(root: Path, submission: Path) -> dict:
    shutil.rmtree(root / "submission", ignore_errors=True)
    shutil.rmtree(root / "results", ignore_errors=True)
    shutil.copytree(submission, root / "submission")
    command = ["bash", str(root / "source" / "run_autograder")]
    environment = os.environ | {"AUTOGRADER": str(root), "PYTHONPATH": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((root / "results" / "results.json").read_text())


def test_gradescopes_zip_grades_a_submission_with_the_files_that_it_has(autograder, tmp_path):
    submission = tmp_path / "ada"
    submission.mkdir()
    text = (REPOSITORY / "common.py").read_text()
    node, lines = function_of(text, "kl_estimate"), text.split("\n")
    lines[node.lineno - 1 : node.end_lineno] = [
        "def kl_estimate(logprobs, ref, estimator):",
        "    1 / 0",
    ]
    (submission / "common.py").write_text("\n".join(lines))
    results = run_autograder(autograder, submission)
    wrong, right = (test for test in results["tests"] if test.get("max_score"))
    assert [test["name"].split(":")[0] for test in (wrong, right)] == TWO
    assert results["score"] == right["score"] == right["max_score"] > 0
    assert wrong["score"] == 0 and "division by zero" in wrong["output"]


def test_gradescopes_zip_has_no_key_no_bugs_and_no_students_files(autograder):
    names = {
        p.relative_to(autograder / "source").as_posix() for p in autograder.rglob("source/**/*")
    }
    assert "grader/course/grade.py" in names and "grader/tiny/model.safetensors" in names
    assert not any("handout" in name or "bughunt" in name or "tests" in name for name in names)
    script = (autograder / "source" / "run_autograder").read_text()
    assert script.rstrip().split("\n")[-3].endswith('results.json" --problems kl_estimate gae')
    for name in ("setup.sh", "run_autograder"):
        subprocess.run(["bash", "-n", str(autograder / "source" / name)], check=True)


def test_gradescopes_setup_installs_all_that_the_grader_imports(autograder):
    source = autograder / "source"
    installed = (source / "grader" / "requirements.txt").read_text()
    installed += (source / "setup.sh").read_text()
    trees = [ast.parse(path.read_text()) for path in source.rglob("course/*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {a.name.split(".")[0] for n in nodes if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module.split(".")[0] for n in nodes if isinstance(n, ast.ImportFrom) and n.module}
    ours = {path.stem for path in source.rglob("*.py")} | {"plumbing", "tools", "tiny"}
    wanted = names - ours - set(sys.stdlib_module_names) - {"safetensors"}  # of transformers
    assert {"torch", "peft"} <= wanted
    assert not [name for name in wanted if name not in installed]


def test_a_folder_or_a_file_has_to_be_given(tmp_path, capsys):
    assert make.main([]) == 2
    assert make.main(["--gradescope", str(tmp_path / "nowhere" / "a.zip")]) == 2
    errors = capsys.readouterr().err.strip().split("\n")
    assert len(errors) == 2 and all(line.startswith("error: ") for line in errors)
