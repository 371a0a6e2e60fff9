"""What students read: a page for each lab, a sheet for the answers, notebooks.

One source per lab, course/handout/labN.md: theory, the functions to write, and questions. Under
each question stands its key, in lines that begin with `>`. It is for the teacher, and cut out here.
A lab or a question that is about none of the chosen problems is left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from experiments import EXPERIMENTS
from problems import BY_NAME, Problem

SOURCES = sorted((Path(__file__).parent / "handout").glob("lab*.md"))
# ## 3. Title (4 points, 20 minutes, gae policy_loss)
HEAD = re.compile(r"^## (\d+)\. (.+) \((\d+) points, (\d+) minutes(?:, ([\w ]+))?\)$", re.M)
EMPTY = "(your answer)"


@dataclass(frozen=True)
class Question:
    """A question of a lab, and its key. `about` are the problems that it asks about; with none it
    is always asked.
    """

    title: str  # with its number
    points: int
    minutes: int
    about: tuple[str, ...]
    text: str
    key: str

    @property
    def deliverable(self) -> str:
        """What is to be handed in."""
        return re.search(r"^Hand in: (.+?)(?:\n\n|\Z)", self.text, re.M | re.S)[1]

    @property
    def commands(self) -> list[str]:
        """The commands to run, in their order."""
        return [line.strip() for line in self.text.split("\n") if line.startswith("    python ")]

    @property
    def experiments(self) -> list[str]:
        """The experiments of labs.py among them."""
        words = [command.split() for command in self.commands]
        return [name for _, script, *names in words if script == "labs.py" for name in names]


@dataclass(frozen=True)
class Lab:
    """A lab: its theory, the problems whose functions are written in it, its questions."""

    number: int
    title: str
    theory: str
    problems: tuple[str, ...]
    questions: tuple[Question, ...]
    when_written: str = ""  # what to run when the functions are there


def lab_of(source: str) -> Lab:
    """A lab from its source."""
    number, title = re.match(r"# Lab (\d+): (.+)\n", source).groups()
    theory, *parts = HEAD.split(source)
    theory = theory.split("\n", 1)[1]
    written = re.search(r"^Functions: (.+)$", theory, re.M)
    questions = []
    for n, name, points, minutes, about, body in zip(*(parts[i::6] for i in range(6))):
        lines = body.strip("\n").split("\n")
        text = "\n".join(line for line in lines if not line.startswith(">")).strip("\n")
        key = "\n".join(line[1:].removeprefix(" ") for line in lines if line.startswith(">"))
        head = f"{number}.{n} {name}", int(points), int(minutes), tuple((about or "").split())
        questions.append(Question(*head, text, key))
    names = tuple(written[1].split(", ")) if written else ()
    theory, _, after = theory.partition(written[0]) if written else (theory, "", "")
    return Lab(int(number), title, theory.strip(), names, tuple(questions), after.strip())


def chosen_labs(problems: list[Problem]) -> list[Lab]:
    """The labs, with the functions and the questions that `problems` leave to the students."""
    names, found = {problem.name for problem in problems}, []
    for lab in (lab_of(path.read_text(encoding="utf-8")) for path in SOURCES):
        asked = [q for q in lab.questions if not q.about or names & set(q.about)]
        if any(q.about for q in asked) or names & set(lab.problems):
            written = tuple(name for name in lab.problems if name in names)
            found.append(replace(lab, problems=written, questions=tuple(asked)))
    return found


def page(lab: Lab) -> str:
    """The page of a lab, for students."""
    points, minutes = (sum(getattr(q, x) for q in lab.questions) for x in ("points", "minutes"))
    parts = [f"# Lab {lab.number}: {lab.title}", lab.theory]
    if lab.problems:
        rows = [f"| `{p}` | {BY_NAME[p].place} | {BY_NAME[p].points} |" for p in lab.problems]
        parts += ["## Functions to write", "\n".join([TABLE_HEAD, *rows])]
        parts += [f"Test one with `{BY_NAME[lab.problems[0]].test_command}`."]
        parts += [lab.when_written] if lab.when_written else []
    if lab.questions:
        parts += ["## Questions", QUESTIONS.format(points=points, minutes=minutes)]
    for question in lab.questions:
        parts += [f"### {question.title}", asked(question)]
    return "\n\n".join(parts) + "\n"


TABLE_HEAD = "| function | where | points |\n|---|---|---|"
QUESTIONS = """{points} points, about {minutes} minutes without the functions. Answers go into
answers.md. `python labs.py` lists the experiments with their seconds. An experiment names a
function that it needs and that isn't written. It asks what you will see: answer before you look.
Nearly all right runs lie within six standard deviations of ours: where yours is marked, look for a
mistake in your code."""


def asked(question: Question) -> str:
    """A question as students read it, with what to predict before its experiments."""
    parts = [f"*{question.points} points, about {question.minutes} minutes*"]
    for name in question.experiments:
        parts.append(f"**Before you run** `{name}`: {EXPERIMENTS[name].predict.ask}")
    return "\n\n".join([*parts, question.text]).replace("\nHand in: ", "\n**Hand in:** ")


def answer_sheet(labs: list[Lab]) -> str:
    """answers.md: a place for each answer."""
    parts = ["# Answers", "Name:"]
    for lab in labs:
        for question in lab.questions:
            head = f"## {question.title} ({question.points} points)"
            parts += [head, f"*{' '.join(question.deliverable.split())}*", EMPTY]
    return "\n\n".join(parts) + "\n"


SETUP = """import os
import sys

if "google.colab" in sys.modules and not os.path.exists("labs.py"):
    !git clone -q URL assignment
    %cd assignment
    !pip install -q -r requirements-dev.txt
if os.path.basename(os.getcwd()) == "notebooks":
    %cd -q ..
sys.path.insert(0, "notebooks")
%load_ext into"""
HOW = """The first cell clones and installs on Colab; in a checkout it goes to its top folder. A
cell that begins with `%%into FILE` puts the function in it into that file, once it no longer says
`raise NotImplementedError`. Tests and experiments then use it. Answers may stand here, or in
answers.md."""


def notebook(lab: Lab, stubs: dict[str, str], url: str) -> str:
    """The notebook of a lab, as the text of its file, with the functions {problem: text} as the
    starter has them. Needs jupytext.
    """
    import jupytext

    parts = [f"# Lab {lab.number}: {lab.title}\n\n{HOW}", _cell(SETUP.replace("URL", url))]
    parts.append(lab.theory)
    for name in lab.problems:
        problem = BY_NAME[name]
        parts.append(f"## `{name}` ({problem.points} points): {problem.what}")
        if problem.step:
            parts.append(f"Open {problem.file} and write step {problem.step} of `main`.")
        else:
            parts.append(_cell(f"%%into {problem.file}\n{stubs[name]}"))
        parts.append(_cell(f"!{problem.test_command}"))
    parts += [lab.when_written] if lab.problems and lab.when_written else []
    for question in lab.questions:
        parts.append(f"## {question.title}\n\n{asked(question)}")
        parts += [_cell(f"!{command}") for command in question.commands]
        parts.append(EMPTY)
    parts.append(_cell("!python pack.py"))
    # Two empty lines end a cell of text.
    book = jupytext.reads("\n\n\n".join(parts) + "\n", fmt="md")
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    book.metadata["kernelspec"] = kernel
    return jupytext.writes(book, fmt="ipynb")


def _cell(code: str) -> str:
    return f"```python\n{code}\n```"
