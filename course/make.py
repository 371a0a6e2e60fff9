"""Makes what students and Gradescope get: the files of this repository, without the solutions.

  python course/make.py OUT                                  # all problems, a hint each
  python course/make.py OUT --problems gae policy_loss       # some, the rest is there to be read
  python course/make.py OUT --no_hints
  python course/make.py autograder.zip --gradescope          # the grader, for Gradescope

Problems and hints are those of problems.py, points those of the marks in tests/.
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import sys
import textwrap
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import pages
import problems as course
from problems import BY_NAME, PROBLEMS, PROGRAM, REPOSITORY, SCRIPTS, NotFound, Problem, function_of

COURSE = REPOSITORY / "course"
DOCS = ["docs/metrics.md", "docs/debugging.md", "docs/running.md"]
LABS = ["labs.py", "lab_parts.py", "experiments.py", "reference.json"]
TESTS = ["tests/conftest.py", "tests/small.py"]
REQUIREMENTS = "-r requirements.txt\npytest\npytest-xdist\nmatplotlib\npeft\nipykernel\n"
LINK = re.compile(r"\[([^]]*)\]\((?!https?:)[^)]*\)")


def make(out: Path, problems: list[Problem], hints: bool, url: str) -> None:
    """Write the starter repository into the new folder `out`."""
    labs, files = pages.chosen_labs(problems), sorted({problem.file for problem in problems})
    whole = [*problems, *SCRIPTS] if len(problems) == len(PROBLEMS) else problems
    copy_files(out, problems, hints)
    # A script names the function that it lacks in one line.
    run = (REPOSITORY / "plumbing" / "run.py").read_text("utf-8")
    run = run.replace("{InputError:", "{NotImplementedError: 1, InputError:")
    write(out / "plumbing" / "run.py", run)
    tests = {file for problem in whole for file in problem.test_files}
    for name in ["pyproject.toml", *TESTS, *sorted(tests)]:
        write(out / name, (REPOSITORY / name).read_text("utf-8"))
    for name in LABS:
        write(out / name, (COURSE / name).read_text("utf-8"))
    for name in DOCS:  # their links lead to pages that aren't there
        text = LINK.sub(r"\1", (REPOSITORY / name).read_text("utf-8"))
        write(out / name, text.replace("course/labs.py", "labs.py"))
    pack = (COURSE / "starter" / "pack.py").read_text("utf-8")
    write(out / "version.txt", f"{course.commit()}\n")
    write(out / "pack.py", pack.replace('"FILES"', f'"{" ".join(files)}"'))
    write(out / "README.md", readme(whole))
    for name in ("AGENTS.md", "CLAUDE.md"):
        write(out / name, (COURSE / "starter" / name).read_text("utf-8"))
    write(out / "requirements-dev.txt", REQUIREMENTS)
    write(out / "answers.md", pages.answer_sheet(labs))
    for lab in labs:
        write(out / "handout" / f"lab{lab.number}.md", pages.page(lab))
        write(out / "notebooks" / f"lab{lab.number}.ipynb", pages.notebook(lab, url))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def copy_files(out: Path, problems: list[Problem], hints: bool) -> None:
    """The program into the new folder `out`, without what solves `problems`."""
    for name in [*PROGRAM, "LICENSE"]:
        own = [problem for problem in problems if problem.file == name]
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, out / name)
        if own:
            text = (REPOSITORY / name).read_text(encoding="utf-8")
            write(out / name, without_solutions(text, own, hints))


def readme(problems: list[Problem]) -> str:
    """What is to be done, and for how many points."""
    rows = [f"| `{x.name}` | {x.what} | {x.place} | {x.points} |" for x in problems]
    text = (COURSE / "starter" / "README.md").read_text(encoding="utf-8")
    text = text.replace("PROBLEMS", "\n".join(rows)).replace("FIRST", problems[0].test_command)
    return text.replace("TOTAL", str(sum(problem.points for problem in problems)))


def gradescope(out: Path) -> None:
    """The zip file that Gradescope takes as an autograder."""
    tests = {file for problem in BY_NAME.values() for file in problem.test_files}
    grader = [f"course/{name}.py" for name in ("grade", "judge", "problems", "submission")]
    with zipfile.ZipFile(out, "x", zipfile.ZIP_DEFLATED) as archive:
        for name in [*PROGRAM, *TESTS, *sorted(tests), *grader]:
            archive.write(REPOSITORY / name, f"grader/{name}")
        archive.writestr("grader/version.txt", f"{course.commit()}\n")
        for name in ("setup.sh", "run_autograder"):
            archive.write(COURSE / "gradescope" / name, name)


# --- What is left to the student ---


def solution_lines(source: str, problem: Problem) -> list[tuple[int, int]]:
    """The spans of lines, from 1, both ends included, that are the solution: the function's body
    after its docstring, or the code under the numbered comment of its step. Of a step loops stay,
    and the statements that measure or tidy up, see GIVEN. Raises NotFound.
    """
    function, lines = function_of(source, problem.function), source.split("\n")
    if not problem.step:
        first = function.body[int(ast.get_docstring(function) is not None)]
        return [(_start(lines, first), function.end_lineno)]
    numbers = {
        match[1]: n
        for n in range(function.lineno, function.end_lineno + 1)
        if (match := re.match(r" +# (\d)\. ", lines[n - 1]))
    }
    after = str(int(problem.step) + 1)
    if not {problem.step, after} <= numbers.keys():
        raise NotFound(f"{problem.file} lacks the comment of step {problem.step} or {after}")
    inside = range(numbers[problem.step], numbers[after])
    loops = [x for x in ast.walk(function) if isinstance(x, ast.For)]  # from the outermost on
    body = next(x.body for x in loops if any(node.lineno in inside for node in x.body))
    return _holes(lines, [node for node in body if node.lineno in inside])


# Of a step these are no part of its solution: metrics, times, the memory between phases.
GIVEN = re.compile(r"(meter|run)\.|meter = Meter\(|clear_cache\(")


def _holes(lines: list[str], body: list[ast.stmt]) -> list[tuple[int, int]]:
    """The spans of a step's statements, those of the same level that follow each other together."""
    spans, joins = [], False
    for node in body:
        if isinstance(node, ast.For):
            spans += _holes(lines, node.body)
        is_kept = isinstance(node, ast.For) or GIVEN.match(ast.unparse(node)) is not None
        if not is_kept:
            start = spans.pop()[0] if joins else _start(lines, node)
            spans.append((start, node.end_lineno))
        joins = not is_kept
    return spans


def _start(lines: list[str], node: ast.stmt) -> int:
    """The first line of a statement, with the comments right above it, but not that of its step,
    whose first line has the number and whose others are indented.
    """
    start = node.lineno
    while re.match(r" *# (?! |\d\. )", lines[start - 2]):
        start -= 1
    return start


def to_be_set(source: str, problem: Problem, span: tuple[int, int]) -> list[str]:
    """The names that a hole gives a value, or entries of, and that the loop reads after it."""
    start, end = span
    nodes = [*ast.walk(function_of(source, problem.function))]
    stored = [x for x in nodes if isinstance(getattr(x, "ctx", None), ast.Store)]
    stored = [getattr(x, "value", x) for x in stored if start <= x.lineno <= end]
    read = {x.id for x in nodes if isinstance(x, ast.Name) and x.lineno > end}
    return sorted(read & {x.id for x in stored if isinstance(x, ast.Name)})


def without_solutions(source: str, problems: list[Problem], hints: bool) -> str:
    """The source of a file in which the solutions of `problems` are left to the reader."""
    lines = source.split("\n")
    cuts = [(span, p, n) for p in problems for n, span in enumerate(solution_lines(source, p))]
    for (start, end), problem, number in sorted(cuts, key=lambda cut: cut[0], reverse=True):
        indent = re.match(r" *", lines[start - 1])[0]
        hint = textwrap.wrap(problem.hint, 98 - len(indent)) if hints and number == 0 else []
        new = [f"{indent}# {line}" for line in hint]
        what = f"{problem.name} in {problem.file}"
        if problem.step:
            names = ", ".join(to_be_set(source, problem, (start, end)))
            what = f"step {problem.step} of main in {problem.file}" + f": set {names}" * bool(names)
        new.append(f'{indent}raise NotImplementedError("not written yet: {what}")')
        lines[start - 1 : end] = new
    return "\n".join(lines)


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the new folder, or zip file")
    names = [problem.name for problem in PROBLEMS]
    parser.add_argument("--problems", nargs="+", default=names, metavar="NAME", choices=names)
    parser.add_argument("--no_hints", action="store_true", help="leave only the docstrings")
    parser.add_argument(
        "--url", default="https://github.com/OWNER/assignment",
        help="where you put the starter: the notebooks clone it on Colab",
    )  # fmt: skip
    parser.add_argument("--gradescope", action="store_true", help="make the autograder's zip file")
    options = parser.parse_args(args)
    if options.out.exists():
        print(f"error: {options.out} exists already, choose a new name", file=sys.stderr)
        return 2
    if options.gradescope:
        gradescope(options.out)
        print(f"{options.out} is the autograder.")
        return 0
    chosen = [problem for problem in PROBLEMS if problem.name in options.problems]
    make(options.out, chosen, not options.no_hints, options.url)
    print(f"{options.out} has {len(chosen)} problems.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
