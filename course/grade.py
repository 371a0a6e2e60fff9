"""Grades a submission by this repository's own tests.

  python course/grade.py SUBMISSION                      # a folder, or a zip file
  python course/grade.py SUBMISSION --json results.json  # in the form of Gradescope
  python course/grade.py FOLDER --class grades.csv       # a folder of submissions: a row for each,
                                                         # after those that are in the table already
  python course/grade.py SUBMISSION --week 1             # the points of that week alone

For each problem the student's function takes the place of ours in a copy of the repository, and the
tests that are marked for it run there, in a process of its own: a fault costs its problem alone.
The scripts run with all files of the submission together.
"""

import argparse
import contextlib
import csv
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import judge
from problems import BY_NAME, PROGRAM, REPOSITORY, SHARED, WEEKS, NotFound, Problem
from submission import read_submission, remarks_on, transplanted

# Each process is forked off one that has done the slow imports.
FORKSERVER = multiprocessing.get_context("forkserver")
PRELOAD = ["judge", "peft", "safetensors.torch", "transformers.models.gpt2.modeling_gpt2"]


def grade(
    changed: dict | str, problem: Problem, template: Path, seconds: int, hanging: set[str]
) -> dict:
    """Run the tests of a problem on what `transplanted` gives: its points, in Gradescope's form.
    `template` is a copy of the repository. A file whose import never ends gets into `hanging`, and
    isn't tried again.
    """
    if met := hanging & {problem.file, *(SHARED if not problem.function else ())}:
        changed = f"{min(met)} hangs while it is imported"
    faults = dict.fromkeys(problem.properties, changed)
    if not isinstance(changed, str):
        with tempfile.TemporaryDirectory(prefix="grade-") as work:
            folder = Path(work) / "copy"
            shutil.copytree(template, folder)
            for name, text in changed.items():
                (folder / name).write_text(text, encoding="utf-8")
            found, ending, hangs = in_a_process(folder, problem, seconds)
        if hangs:
            hanging.add(problem.file)
        faults = {test: found.get(test, ending) for test in problem.properties}
    lines = {}  # of each reason: itself, and what it costs
    for test, fault in faults.items():
        name = test.partition("::")[2].removeprefix("test_").replace("_", " ")
        lines[fault] = f"{lines.get(fault, fault)}\n-{problem.properties[test]}: {name}"
    lines.pop("", None)
    score = sum(points for test, points in problem.properties.items() if not faults[test])
    names = {"name": problem.name, "output": "\n".join(lines.values())}
    return names | {"score": score, "max_score": problem.points}


def in_a_process(folder: Path, problem: Problem, seconds: int) -> tuple[dict[str, str], str, bool]:
    """({test: its fault, or ""}, the fault of all others, whether it hung while it was imported)"""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    args = str(folder), problem.name, problem.test_files, theirs
    process = FORKSERVER.Process(target=judge.run, args=args)
    process.start()
    theirs.close()
    found, hangs = {}, False
    ending = "the process ended before the tests did: by an exit, or by endless prints"
    with contextlib.suppress(OSError, EOFError, ValueError):
        for phase in (", while it is imported", ""):
            if not ours.poll(seconds):
                ending, hangs = f"not done after {seconds} seconds{phase}", phase != ""
                break
            if found := json.loads(ours.recv_bytes(1_000_000)):  # {} once all is imported
                break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
    process.kill()
    process.join()
    return found, found.get(judge.IMPORTS, ending), hangs


def graded(texts: dict[str, str], problems: list[Problem], seconds: int) -> list[dict]:
    """The points of a submission, a record for each problem."""
    hanging = set()
    files = {file for problem in problems for file in problem.test_files}
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(os.cpu_count()) as pool:
        for name in [*PROGRAM, "tests/conftest.py", "tests/small.py", *files]:
            (Path(work) / name).parent.mkdir(exist_ok=True)
            shutil.copy(REPOSITORY / name, Path(work) / name)
        changes = [transplanted(texts, x) for x in problems]  # ast.parse wants a single thread
        more = Path(work), seconds, hanging
        return list(pool.map(lambda *x: grade(*x, *more), changes, problems))


def grade_class(folder: Path, table: Path, problems: list[Problem], seconds: int) -> None:
    """A row for each submission in a folder, written as soon as it is known. What is in the table
    already stays, so a class that was interrupted goes on. Raises NotFound.
    """
    columns = ["name", "total", "of", *(x.name for x in problems), "remarks", "faults"]
    most, done = sum(problem.points for problem in problems), {table.name, "__MACOSX"}
    if not folder.is_dir():
        raise NotFound(f"{folder} is no folder: unpack it, and give the folder of all hand-ins")
    if table.exists():
        with table.open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            if rows.fieldnames not in (None, columns):
                raise NotFound(f"{table} is of other problems: choose another name")
            done |= {row["name"] for row in rows}
    with table.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        if file.tell() == 0:
            writer.writeheader()
        paths = (x for x in folder.iterdir() if x.name not in done and x.name[0] != ".")
        for path in sorted(paths):
            row, fault = {"name": path.name, "of": most}, ""
            try:
                texts = read_submission(path)
                row["remarks"] = "\n".join(remarks_on(texts))
                results = graded(texts, problems, seconds)
                row |= {x["name"]: x["score"] for x in results}
                row["total"] = sum(x["score"] for x in results)
                faults = [f"{x['name']}: {x['output']}" for x in results if x["output"]]
            except NotFound as e:  # it has no total: a 0 would count
                fault, faults = str(e), [str(e)]
            writer.writerow(row | {"faults": "\n".join(faults)})
            file.flush()
            print(f"{row.get('total', ''):4} of {most}  {path.name}  {fault}")


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("submission", type=Path)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--class", dest="table", type=Path, metavar="CSV", help="grade a folder")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--problems", nargs="+", choices=BY_NAME, default=[*BY_NAME])
    which.add_argument("--week", type=int, choices=WEEKS, help="the problems due in this week")
    parser.add_argument("--time_limit", type=int, default=120, help="seconds of a problem (120)")
    options = parser.parse_args(args)
    names = WEEKS[options.week].split() if options.week else options.problems
    problems = [BY_NAME[name] for name in names]
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    FORKSERVER.set_forkserver_preload(PRELOAD)
    results, remarks, fault = [], [], ""
    try:
        if options.table:
            grade_class(options.submission, options.table, problems, options.time_limit)
        else:
            texts = read_submission(options.submission)
            remarks = remarks_on(texts)
            results = graded(texts, problems, options.time_limit)
    except (OSError, NotFound) as e:  # nothing to grade, or a table that can't be written
        fault = str(e)
    for x in results:
        print(f"{x['score']:4} of {x['max_score']:2}  {x['name']}")
        print(textwrap.indent(x["output"], " " * 12), end="\n" * bool(x["output"]))
    total, most = (sum(x[key] for x in results) for key in ("score", "max_score"))
    print(f"{total:4} of {most}, {100 * total / most:.0f}%" if results else "")
    print("\n".join(f"remark: {remark}" for remark in remarks))
    if options.json:
        text = json.dumps(
            {"score": total, "output": fault or "\n".join(remarks), "tests": results}, indent=1
        )
        options.json.write_text(f"{text}\n", encoding="utf-8")
    if fault:
        print(f"error: {fault}", file=sys.stderr)
    return 2 if fault else 0


if __name__ == "__main__":
    raise SystemExit(main())
