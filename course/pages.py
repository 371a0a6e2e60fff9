"""What students read: a page for each lab, a sheet for the answers, notebooks.

One source per lab, course/handout/labN.md: theory, the functions to write, and questions. Under
each question stands its key, in lines that begin with `>`. It is for the teacher, and cut out here.
A lab or a question that is about none of the chosen problems is left out.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

from experiments import EXPERIMENTS
from problems import BY_NAME, Problem

SOURCES = sorted((Path(__file__).parent / "handout").glob("lab?.md"))
# ## 3. Title (4 points, 20 minutes, gae policy_loss)
HEAD = re.compile(r"^## (\d+)\. (.+) \((\d+) points, (\d+) minutes(?:, ([\w ]+))?\)$", re.M)
FUNCTIONS = re.compile(r"^Functions: (.+)$", re.M)


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
    def experiments(self) -> list[str]:
        """The experiments of labs.py that it runs."""
        return " ".join(re.findall(r"^    python labs.py (.+)$", self.text, re.M)).split()


@dataclass(frozen=True)
class Lab:
    """A lab: its theory, the problems whose functions are written in it, its questions."""

    number: int
    title: str
    theory: str  # the line `Functions: ...` in it becomes a table
    problems: tuple[str, ...]
    questions: tuple[Question, ...]


def lab_of(source: str) -> Lab:
    """A lab from its source."""
    number, title = re.match(r"# Lab (\d+): (.+)\n", source).groups()
    theory, *parts = HEAD.split(source)
    written = FUNCTIONS.findall(theory)
    questions = []
    for n, name, points, minutes, about, body in zip(*(parts[i::6] for i in range(6))):
        lines = body.strip("\n").split("\n")
        text = "\n".join(line for line in lines if not line.startswith(">")).strip("\n")
        key = "\n".join(line[1:].removeprefix(" ") for line in lines if line.startswith(">"))
        head = f"{number}.{n} {name}", int(points), int(minutes), tuple((about or "").split())
        questions.append(Question(*head, text, key))
    names = tuple(written[0].split(", ")) if written else ()
    return Lab(int(number), title, theory.split("\n", 1)[1].strip(), names, tuple(questions))


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
    written = [BY_NAME[name] for name in lab.problems]
    rows = [f"| `{x.name}` | {x.place} | {x.points} |\n" for x in written]
    command = written[0].test_command if written else ""
    table = FUNCTIONS_TABLE.format(rows="".join(rows), command=command) if written else ""
    parts = [f"# Lab {lab.number}: {lab.title}", FUNCTIONS.sub(table, lab.theory)]
    if lab.questions:
        parts += ["## Questions", QUESTIONS.format(points=points, minutes=minutes)]
    for question in lab.questions:
        parts += [f"### {question.title}", asked(question)]
    return "\n\n".join(parts) + "\n"


FUNCTIONS_TABLE = """## Functions to write

| function | where | points |
|---|---|---|
{rows}
Test one with

    {command}

A loop is tested with the rest of your files. A test that meets a function which isn't written yet,
here or in an earlier lab, is skipped and names it. The grader tests each problem with our functions
for all others."""
QUESTIONS = """{points} points, about {minutes} minutes without the functions. Answers go into
answers.md. `python labs.py` lists the experiments with their seconds. If an experiment needs a
function that isn't written yet, it says which. When it has run it first asks what you expect, and
then shows the figures.
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
            parts += [head, f"*{' '.join(question.deliverable.split())}*", "(your answer)"]
    return "\n\n".join(parts) + "\n"


SETUP = """import os
import sys

if "google.colab" in sys.modules and not os.path.exists("labs.py"):
    from google.colab import drive

    drive.mount("/content/drive")
    %cd /content/drive/MyDrive
    if not os.path.exists("assignment"):
        !git clone -q URL assignment
    %cd assignment
    !pip install -q -r requirements-dev.txt
elif os.path.basename(os.getcwd()) == "notebooks":
    %cd -q .."""
HOW = """On Colab the first cell puts the assignment into your Drive, where it stays. The panel at
the left opens its files: write functions and answers there. In a checkout the cell goes to the top
folder."""


def notebook(lab: Lab, url: str) -> str:
    """The page of a lab as a notebook, the text of its file: each block of commands is a cell.
    GitHub shows formulas from ```math blocks without a fault, Jupyter those between $$ alone.
    """
    cells = [cell("markdown", HOW), cell("code", SETUP.replace("URL", url))]
    text = re.sub(r"```math\n(.+?)\n```", r"$$\n\1\n$$", page(lab), flags=re.S)
    for part in re.split(r"^((?:    python .+\n)+)", text + "\n    python pack.py\n", flags=re.M):
        if part.startswith("    python "):
            cells.append(cell("code", "\n".join(f"!{line.strip()}" for line in part.splitlines())))
        elif part.strip():
            cells.append(cell("markdown", part.strip()))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    about = {"metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps({"cells": cells} | about, indent=1) + "\n"


def cell(kind: str, source: str) -> dict:
    """A cell of a notebook: "markdown" or "code"."""
    about = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "metadata": {}, "source": source} | about
