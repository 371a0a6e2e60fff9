"""What students read: a page for each lab, a sheet for the answers, notebooks.

One source per lab, course/handout/labN.md: theory, the functions to write, and questions. Under
each question stands its key, in lines that begin with `>`. It is for the teacher, and cut out here.
A lab or a question that is about none of the chosen problems is left out.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path

from problems import BY_NAME, REPOSITORY, Problem, function_of, without_solutions

SOURCES = sorted((Path(__file__).parent / "handout").glob("lab*.md"))
# ## 3. Title (4 points, 20 minutes, gae policy_loss)
HEAD = re.compile(r"^## (\d+)\. (.+) \((\d+) points, (\d+) minutes(?:, ([\w ]+))?\)$", re.M)
CLAIM = re.compile(
    r"`(\w+)`:\s+([^;]+?)\s+of\s+`([^`]+)`\s+([<>])\s+"
    r"(?:([^;]+?)\s+of\s+`([^`]+)`|(-?[\d.]+))(?:;|$)"
)
EMPTY = "(your answer)"


@dataclass(frozen=True)
class Question:
    """A question of a lab, and its key. `about` are the problems that it asks about; with none it
    is always asked.
    """

    number: int
    title: str
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


@dataclass(frozen=True)
class Lab:
    """A lab: its theory, the problems whose functions are written in it, its questions."""

    number: int
    title: str
    theory: str
    problems: tuple[str, ...]
    questions: tuple[Question, ...]
    when_written: str = ""  # what to run when the functions are there

    @property
    def points(self) -> int:
        return sum(question.points for question in self.questions)


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
        numbers = int(n), name, int(points), int(minutes)
        questions.append(Question(*numbers, tuple((about or "").split()), text, key))
    names = tuple(written[1].split(", ")) if written else ()
    theory, _, after = theory.partition(written[0]) if written else (theory, "", "")
    return Lab(int(number), title, theory.strip(), names, tuple(questions), after.strip())


def all_labs() -> list[Lab]:
    """The labs as they are in their sources, whatever is chosen."""
    return [lab_of(path.read_text(encoding="utf-8")) for path in SOURCES]


def chosen_labs(problems: list[Problem]) -> list[Lab]:
    """The labs, with the functions and the questions that `problems` leave to the students."""
    names, found = {problem.name for problem in problems}, []
    for lab in all_labs():
        asked = [q for q in lab.questions if not q.about or names & set(q.about)]
        if any(q.about for q in asked) or names & set(lab.problems):
            written = tuple(name for name in lab.problems if name in names)
            found.append(replace(lab, problems=written, questions=tuple(asked)))
    return found


def claims(question: Question) -> list[tuple]:
    """What the key says of the figures: (experiment, figure, variant, < or >, figure, variant), or
    a number in the place of the last two.
    """
    text = question.key.partition("**Holds.**")[2].strip()
    found = [match.groups() for match in CLAIM.finditer(text)]
    return [(*c[:4], float(c[6])) if c[6] else c[:6] for c in found]


# --- The page of a lab ---


def page(lab: Lab) -> str:
    """The page of a lab, for students."""
    minutes = sum(question.minutes for question in lab.questions)
    parts = [f"# Lab {lab.number}: {lab.title}", lab.theory]
    if lab.problems:
        rows = [f"| `{p}` | {_place(BY_NAME[p])} | {BY_NAME[p].points} |" for p in lab.problems]
        parts += ["## Functions to write", "\n".join([TABLE_HEAD, *rows])]
        parts += [f"Test one with `{BY_NAME[lab.problems[0]].test_command}`."]
        parts += [lab.when_written] if lab.when_written else []
    if lab.questions:
        parts += ["## Questions", QUESTIONS.format(points=lab.points, minutes=minutes)]
    for question in lab.questions:
        parts += [f"### {_title(lab, question)}", _timed(question), question.text]
    return "\n\n".join(parts).replace("\nHand in: ", "\n**Hand in:** ") + "\n"


TABLE_HEAD = "| function | where | points |\n|---|---|---|"
QUESTIONS = """{points} points, about {minutes} minutes without the functions. Answers go into
answers.md. `python labs.py` lists the experiments with the seconds that they take. An experiment
needs the functions of the labs before it too; one that isn't written is named. Some figures have
bounds: if yours is outside of them, look for a mistake in your code. The others stand beside the
mean and the standard deviation of a few runs of ours. Nearly all right runs lie within six standard
deviations."""


def _title(lab: Lab, question: Question) -> str:
    return f"{lab.number}.{question.number} {question.title}"


def _timed(question: Question) -> str:
    return f"*{question.points} points, about {question.minutes} minutes*"


def _place(problem: Problem) -> str:
    steps = f", step {' and '.join(problem.steps)} of `main`" if problem.steps else ""
    return f"{problem.file}{steps}"


def answer_sheet(labs: list[Lab]) -> str:
    """answers.md: a place for each answer."""
    parts = ["# Answers", "Name:"]
    for lab in labs:
        for question in lab.questions:
            head = f"## {_title(lab, question)} ({question.points} points)"
            parts += [head, f"*{' '.join(question.deliverable.split())}*", EMPTY]
    return "\n\n".join(parts) + "\n"


# --- The notebook of a lab ---


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


def notebook(lab: Lab, hints: int, url: str) -> str:
    """The notebook of a lab, as the text of its file. Needs jupytext."""
    import jupytext

    parts = [f"# Lab {lab.number}: {lab.title}\n\n{HOW}", _cell(SETUP.replace("URL", url))]
    parts.append(lab.theory)
    for name in lab.problems:
        problem = BY_NAME[name]
        parts.append(f"## `{name}` ({problem.points} points): {problem.what}")
        if problem.steps:
            parts.append(f"Open {problem.file} and write {_place(problem).partition(', ')[2]}.")
        else:
            parts.append(_cell(f"%%into {problem.file}\n{stub(problem, hints)}"))
        parts.append(_cell(f"!{problem.test_command}"))
    parts += [lab.when_written] if lab.problems and lab.when_written else []
    for question in lab.questions:
        text = f"## {_title(lab, question)}\n\n{_timed(question)}\n\n"
        parts.append(text + question.text.replace("\nHand in: ", "\n**Hand in:** "))
        parts += [_cell(f"!{command}") for command in question.commands]
        parts.append(f"{EMPTY}")
    parts.append(_cell("!python pack.py"))
    # Two empty lines end a cell of text.
    book = jupytext.reads("\n\n\n".join(parts) + "\n", fmt="md")
    book.metadata["kernelspec"] = KERNEL
    return jupytext.writes(book, fmt="ipynb")


KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def _cell(code: str) -> str:
    return f"```python\n{code}\n```"


def stub(problem: Problem, hints: int) -> str:
    """The function of a problem as the starter has it."""
    text = (REPOSITORY / problem.file).read_text(encoding="utf-8")
    text = without_solutions(text, [problem], hints)
    function = function_of(text, problem.function)
    return textwrap.dedent("\n".join(text.split("\n")[function.lineno - 1 : function.end_lineno]))
