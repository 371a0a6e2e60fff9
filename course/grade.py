"""Points for a submission, and in words why any were lost.

  python course/grade.py SUBMISSION                       # a folder with the student's files
  python course/grade.py SUBMISSION --json results.json   # as Gradescope reads it
  python course/grade.py FOLDER --class results.csv       # of a folder or a zip file per student

The checks run here, each function of the submission in a process of its own (sandbox.py), on the
repository's files with that one function put in the place of ours: whatever happens there costs no
other problem. Then the scripts of the submission run as a whole (scripts.py). Tests that lie in the
submission are not used. The submission needs the files that have problems and no others.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import secrets
import sys
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from checks import CHECKS, DRAW, repository_files, run_checks, shortened
from problems import BY_NAME, PROBLEMS, NotFound, Problem, splice_files
from sandbox import SEES, Sandbox, readable_by_all
from scripts import (
    SCRIPT_BY_NAME,
    SCRIPT_CHECKS,
    SCRIPTS,
    Script,
    files_of,
    repeated,
    run_script,
    runs_of,
)
from submissions import FILES, Refused, folder_of, modules_of, signs_in, sources_of, unpack

NAMES = BY_NAME.keys() | SCRIPT_BY_NAME.keys()


@dataclass
class Result:
    """Points of a problem or a script, and for each check that failed its name, points, fault and
    advice.
    """

    problem: Problem | Script
    points: int
    lost: list[tuple[str, int, str, str]]
    notes: list[str] = field(default_factory=list)  # what it did that no answer needs

    @property
    def most(self) -> int:
        return most_of(self.problem)


def most_of(problem: Problem | Script) -> int:
    """The points that there are to get."""
    return sum(item.points for item in CHECKS.get(problem.name, SCRIPT_CHECKS))


@dataclass
class Grading:
    """All results of a submission, and what its teacher should know."""

    results: list[Result]
    teacher: list[str]

    @property
    def points(self) -> int:
        return sum(result.points for result in self.results)


@dataclass
class Prepared:
    """The files that a problem is graded on, by their paths, or why there are none."""

    files: dict[str, bytes]
    fault: str = ""


def prepare(problem: Problem, submission: Path) -> Prepared:
    """The solution's file with the submission's function, and helpers from its other files."""
    texts, faults = sources_of(submission)
    if problem.file in faults:
        return Prepared({}, faults[problem.file])
    try:
        # The modules of one's own beside those of the repository replace none.
        files = modules_of(submission) | splice_files(texts, problem)
        return Prepared({path: text.encode("utf-8", "replace") for path, text in files.items()})
    except NotFound as e:
        return Prepared({}, f"{problem.file}: {e}")


def grade(problem: Problem, prepared: Prepared, sandbox: Sandbox, time_limit: float) -> Result:
    """Run the checks of a problem, its function in a process of its own."""
    verdicts, notes = [prepared.fault] * len(CHECKS[problem.name]), []
    if not prepared.fault:
        files = repository_files() | prepared.files
        verdicts, notes = run_checks(problem.name, files, sandbox, time_limit)
    return result_of(problem, CHECKS[problem.name], verdicts, notes)


def grade_script(script: Script, prepared: Prepared, sandbox: Sandbox, limit: float) -> Result:
    """Run a script of the submission, with all of its files."""
    verdicts, notes = [prepared.fault] * len(SCRIPT_CHECKS), []
    if not prepared.fault:
        verdicts, notes = run_script(script, prepared.files, sandbox, limit)
    return result_of(script, SCRIPT_CHECKS, verdicts, notes)


def result_of(
    problem: Problem | Script, checks: list, verdicts: list[str], notes: list[str]
) -> Result:
    lost = [
        (item.name, item.points, fault, item.advice)
        for item, fault in zip(checks, verdicts)
        if fault
    ]
    points = sum(item.points for item in checks) - sum(points for _, points, *_ in lost)
    return Result(problem, points, lost, notes)


def reasons(result: Result) -> list[str]:
    """Why points were lost, a line for each check; one for all where it is the same for all."""
    faults = {fault for *_, fault, _ in result.lost}
    if len(faults) == 1 and len(result.lost) > 1 and result.points == 0:
        return [f"-{result.most}: {faults.pop()}"]
    return [f"-{points} {name}: {fault}. {advice}" for name, points, fault, advice in result.lost]


def report(grading: Grading) -> str:
    """The results as a student reads them, and what the teacher should know."""
    lines = []
    for result in grading.results:
        problem = result.problem
        lines.append(f"{result.points:3} of {result.most:2}  {problem.name}: {problem.what}")
        for text in reasons(result):
            lines += textwrap.wrap(text, 92, initial_indent="    ", subsequent_indent="       ")
    lines.append("For the teacher:")
    for text in grading.teacher:
        lines += textwrap.wrap(text, 92, initial_indent="    ", subsequent_indent="       ")
    most = sum(result.most for result in grading.results)
    return "\n".join([*lines, f"{grading.points} of {most} points"])


def for_gradescope(grading: Grading) -> dict:
    """https://gradescope-autograders.readthedocs.io: one test per problem."""
    tests = [
        {
            "name": f"{result.problem.name}: {result.problem.what}",
            "score": result.points,
            "max_score": result.most,
            "output": "\n".join(reasons(result)),
            "visibility": "visible",
        }
        for result in grading.results
    ]
    told = {"output": "\n".join(grading.teacher), "visibility": "hidden"}
    tests.append({"name": "for the teacher", "score": 0, "max_score": 0} | told)
    return {"score": grading.points, "tests": tests}


def grade_all(submission: Path, options: argparse.Namespace) -> Grading:
    """The results of a submission, a problem or a script each. Raises Refused."""
    folder, limit = folder_of(submission), options.time_limit
    chosen = chosen_of(options)
    files = {item.file for item in chosen if isinstance(item, Problem)}
    # Not in the threads: ast.parse of Python 3.11 fails where two run at once.
    jobs = [
        (grade, item, prepare(item, folder))
        if isinstance(item, Problem)
        else (grade_script, item, prepare_script(item, folder, files))
        for item in chosen
    ]
    with ThreadPoolExecutor(max(1, options.workers)) as pool:
        # The longest first.
        found = [pool.submit(*job, options.sandbox, limit) for job in reversed(jobs)]
        results = [job.result() for job in reversed(found)]
    return Grading(results, for_teacher(folder, results, options))


def chosen_of(options: argparse.Namespace) -> list[Problem | Script]:
    """The problems and scripts that are graded."""
    return [x for x in (*PROBLEMS, *SCRIPTS) if x.name in (options.problems or NAMES)]


def prepare_script(script: Script, folder: Path, asked: set[str]) -> Prepared:
    """All files of a submission; where only some problems are asked for, the others' files may be
    missing, and are the repository's.
    """
    texts, faults = sources_of(folder)
    scripts = {other.file for other in SCRIPTS} - {script.file}
    for file, fault in faults.items():
        if file in asked - scripts or not asked:
            return Prepared({}, fault)
        if file not in scripts:
            texts[file] = repository_files()[file].decode()
    return Prepared(files_of(texts, modules_of(folder)))


def for_teacher(folder: Path, results: list[Result], options: argparse.Namespace) -> list[str]:
    """What is no reason to take points away, and to be looked at."""
    level = options.sandbox.level
    found = [f"sandbox: {level} ({SEES[level]})"] if level else []
    if level == "user" and readable_by_all(str(Path(__file__).parent)):
        found.append("all users may read this folder, and so may the submission: chmod 700 it")
    texts, _ = sources_of(folder)
    found += signs_in(texts | modules_of(folder))
    found += [f"{result.problem.name} did {note}" for result in results for note in result.notes]
    runs = runs_of(folder)
    files = files_of(texts, modules_of(folder)) if runs else {}
    for run in runs:
        found.append("runs/" + repeated(run, files, options.sandbox, options.time_limit))
    return found


# --- A class: a row for each student ---


def students_of(folder: Path, results: Path) -> dict[str, Path]:
    """{name: what that student has handed in} of all that lies in a folder but the results."""
    paths = [p for p in sorted(folder.iterdir()) if not p.name.startswith((".", "__"))]
    paths = [p for p in paths if p.resolve() != results.resolve()]
    found = {p.name: p for p in paths if p.suffix.lower() != ".zip" or p.is_dir()}
    for path in paths:
        if path not in found.values():
            # Both ada and ada.zip: two rows.
            found[path.name if path.stem in found else path.stem] = path
    return dict(sorted(found.items()))


def results_of(path: Path, options: argparse.Namespace) -> Grading:
    """The results of a folder or a zip file. Raises Refused."""
    if path.is_dir():
        return grade_all(path, options)
    if path.suffix.lower() != ".zip":
        raise Refused(f"{path.name} is neither a folder nor a zip file")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        unpacked = Path(folder, path.stem)
        unpack(path, unpacked)
        return grade_all(unpacked, options)


def in_a_word(results: list[Result]) -> str:
    """What went wrong first in each problem; once what is the same for several."""
    names = {}
    for result in results:
        for *_, fault, _ in result.lost[:1]:
            names.setdefault(fault, []).append(result.problem.name)
    text = "; ".join(f"{', '.join(problems)}: {fault}" for fault, problems in names.items())
    return " ".join(shortened(text).split())


def names_done(path: Path, header: list[str]) -> set[str]:
    """The students that have a row in an earlier file, from which half a row at its end is taken
    away. Raises Refused where it has other columns.
    """
    if not path.exists():
        return set()
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    text = text[: text.rfind("\n") + 1]
    rows = list(csv.reader(io.StringIO(text, newline="")))
    if rows and rows[0] != header:
        raise Refused(f"{path} has other columns: choose another file, or --overwrite")
    path.write_text(text, encoding="utf-8", errors="surrogateescape", newline="")
    return {row[0] for row in rows[1:] if row}


def grade_class(options: argparse.Namespace) -> int:
    """Write the rows of the students that have none yet, each as soon as it is known."""
    chosen = [item.name for item in chosen_of(options)]
    header = ["student", "total", *chosen, "went wrong", "for the teacher"]
    path, code = options.class_file, 0
    students = students_of(options.submission, path)
    if options.overwrite:
        path.unlink(missing_ok=True)
    done = names_done(path, header)
    with path.open("a", encoding="utf-8", errors="surrogateescape", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not path.stat().st_size:
            writer.writerow(header)
        for name in [name for name in students if name not in done]:
            points, word, told = [0] * len(chosen), "", ""
            try:
                grading = results_of(students[name], options)
                points = [result.points for result in grading.results]
                word, told = in_a_word(grading.results), shortened("; ".join(grading.teacher))
            except Refused as e:
                word = str(e)
            except Exception as e:  # the others are graded all the same
                points, word, code = [""] * len(chosen), f"the grader failed: {e!r}", 1
            total = "" if "" in points else sum(points)
            writer.writerow([name, total, *points, word, " ".join(told.split())])
            file.flush()
            say(f"{total:>3}  {name}" + f": {word}" * bool(word))
    return code


# --- The command ---


def fault_of(options: argparse.Namespace) -> str:
    """What is wrong with the flags, '' if nothing."""
    unknown = sorted(set(options.problems or ()) - NAMES)
    if unknown:
        known = ", ".join(item.name for item in (*PROBLEMS, *SCRIPTS))
        return f"--problems {unknown[0]}: choose from {known}"
    folder = options.submission
    if not folder.is_dir():
        return f"{folder} is not a folder"
    if options.json and options.class_file:
        return "--json is for one submission, --class for many: choose one"
    for flag, path in (("--json", options.json), ("--class", options.class_file)):
        if path and path.is_dir():
            return f"{flag} {path} is a folder: give a file"
        if path and not path.parent.is_dir():
            return f"{flag} {path}: there is no folder {path.parent}"
        if path and not os.access(path.parent, os.W_OK):
            return f"{flag} {path}: {path.parent} can't be written to"
    if options.class_file and any((folder / file).is_file() for file in FILES):
        return f"{folder} is one submission: leave --class away, or give the folder above it"
    if options.class_file and not students_of(folder, options.class_file):
        return f"{folder} is empty: --class wants a folder or a zip file for each student"
    return ""


def say(text: str) -> None:
    """Print it; a student's text may hold what the terminal can't show."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("submission", type=Path, help="folder with the student's files")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write Gradescope's results.json")
    parser.add_argument(
        "--class", type=Path, metavar="FILE", dest="class_file",
        help="SUBMISSION has a folder or zip file per student: a row of this CSV file for each",
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="grade those with a row again")
    parser.add_argument("--problems", nargs="+", metavar="NAME", help="these alone")
    parser.add_argument("--time_limit", type=float, default=120, help="seconds a problem (120)")
    parser.add_argument("--seed", type=int, help="of the inputs, to repeat a grading (drawn)")
    parser.add_argument("--workers", type=int, default=2, help="problems at a time (2)")
    options = parser.parse_args(args)
    if fault := fault_of(options):
        print(f"error: {fault}", file=sys.stderr)
        return 2
    DRAW.salt = options.seed if options.seed is not None else secrets.randbelow(2**40)
    options.sandbox = Sandbox()
    try:
        if options.class_file:
            return grade_class(options)
        grading = grade_all(options.submission, options)
    except Refused as e:
        if options.json:
            options.json.write_text(json.dumps({"score": 0, "output": str(e)}) + "\n")
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        again = "; run it again for the rest" if options.class_file else ""
        print(f"error: stopped{again}", file=sys.stderr)
        return 130
    finally:
        options.sandbox.close()
    if options.json:
        options.json.write_text(json.dumps(for_gradescope(grading), indent=2) + "\n")
    say(report(grading))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
