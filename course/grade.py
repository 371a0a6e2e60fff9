"""Grades a submission by this repository's own tests.

  python course/grade.py SUBMISSION                      # a folder, or a zip file
  python course/grade.py SUBMISSION --json results.json  # in the form of Gradescope
  python course/grade.py FOLDER --class grades.csv       # a folder of submissions: a row for each
  python course/grade.py SUBMISSION --week 1             # the points of that week alone

For each problem the student's function takes the place of ours in a copy of the repository, and the
tests that are marked for it run there, in a process of its own: a fault costs its problem alone.
The scripts run with all files of the submission together.
"""

import argparse
import ast
import codecs
import contextlib
import csv
import io
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import judge
from problems import BY_NAME, FILES, PROBLEMS, PROGRAM, REPOSITORY, SHARED, WEEKS, NotFound, Problem

# Each process is forked off one that has done the slow imports.
FORKSERVER = multiprocessing.get_context("forkserver")
PRELOAD = ["judge", "peft", "safetensors.torch", "transformers.models.gpt2.modeling_gpt2"]


def read_submission(path: Path) -> dict[str, str]:
    """{file: text} of a folder or a zip file; they may lie in a folder of it, or in a zip file
    there, as Moodle packs them. Raises NotFound.
    """
    try:
        if not path.is_dir() and path.suffix.lower() != ".zip":
            raise NotFound("no folder, and no zip file" if path.exists() else "isn't there")
        tops = [*tops_of(path)]
        if len(tops) != 1:
            raise NotFound(f"{len(tops)} places have files of the assignment, and not one")
        names = {x.name for x in tops[0].iterdir() if x.name.endswith(".py")} | {*FILES}
        files = {name: tops[0] / name for name in sorted(names) if (tops[0] / name).is_file()}
        return {name: text_of(x.read_bytes()) for name, x in files.items()}
    except Exception as e:  # broken archives raise many kinds
        raise NotFound(f"{path.name}: {e}") from None


def tops_of(place: Path | zipfile.Path, depth: int = 2) -> Iterator[Path | zipfile.Path]:
    """The folders, this one or some below it, that have files of the assignment."""
    if place.name.lower().endswith(".zip") and place.is_file():
        place = zipfile.Path(io.BytesIO(place.read_bytes()))
    if any((place / file).is_file() for file in FILES):
        yield place
    elif depth > 0 and place.is_dir():
        for inner in place.iterdir():
            yield from tops_of(inner, depth - 1)


def text_of(data: bytes) -> str:
    """The text of a file, as Windows' editors save it too."""
    is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return data.decode("utf-16" if is_utf16 else "utf-8-sig", errors="replace")


def transplanted(texts: dict[str, str], problem: Problem) -> dict[str, str] | str:
    """{file: text} of what the submission changes in the repository, or why it can't be graded.

    Of the problem's file all comes along but the functions of other problems, which are ours; so
    do files that we don't have. A script runs with all that was handed in.
    """
    for file in [problem.file] if problem.function else [problem.file, *SHARED]:
        if file not in texts:
            return f"{file} isn't in the submission"
    if not problem.function:
        return {file: text for file, text in texts.items() if file in FILES or file not in PROGRAM}
    others = {other.function for other in PROBLEMS} - {problem.function}
    ours = ast.parse((REPOSITORY / problem.file).read_text(encoding="utf-8")).body
    try:
        theirs = ast.parse(texts[problem.file]).body
    except (SyntaxError, ValueError) as e:
        return f"{problem.file} doesn't parse: {e}"
    if problem.function not in map(name_of, theirs):
        return f"{problem.function} is not in {problem.file}"
    # Ours first, for what they lack. The call of main and __future__ may stand there only once.
    ours = [x for x in ours if name_of(x) != problem.function and not isinstance(x, ast.If)]
    theirs = [x for x in theirs if name_of(x) not in {*others, "__future__"}]
    found = {file: text for file, text in texts.items() if file not in PROGRAM}
    return found | {problem.file: "\n".join(map(ast.unparse, [*ours, *theirs]))}


def name_of(node: ast.stmt) -> str:
    """The name of a function, of a class, or of the module that names are imported from."""
    return getattr(node, "name", "") or getattr(node, "module", "")


def grade(changed: dict | str, problem: Problem, template: Path, seconds: int) -> dict:
    """Run the tests of a problem on what `transplanted` gives: its points, in Gradescope's form.
    `template` is a copy of the repository.
    """
    faults = dict.fromkeys(problem.properties, changed)
    if not isinstance(changed, str):
        with tempfile.TemporaryDirectory(prefix="grade-") as work:
            folder = Path(work) / "copy"
            shutil.copytree(template, folder)
            for name, text in changed.items():
                (folder / name).write_text(text, encoding="utf-8")
            found, ending = in_a_process(folder, problem, seconds)
        faults = {test: found.get(test, ending) for test in problem.properties}
    lines = {}  # each once
    for test, fault in faults.items():
        name = test.partition("::")[2].removeprefix("test_").replace("_", " ")
        lines |= {f"-{problem.properties[test]}: {name}": None, fault: None} if fault else {}
    score = sum(points for test, points in problem.properties.items() if not faults[test])
    names = {"name": problem.name, "output": "\n".join(lines)}
    return names | {"score": score, "max_score": problem.points}


def in_a_process(folder: Path, problem: Problem, seconds: int) -> tuple[dict[str, str], str]:
    """({test: its fault, or ""}, the fault of all others)"""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    args = str(folder), problem.name, problem.test_files, theirs
    process = FORKSERVER.Process(target=judge.run, args=args)
    process.start()
    theirs.close()
    found, ending = {}, "the process ended before the tests did: by an exit, or by endless prints"
    with contextlib.suppress(OSError, EOFError, ValueError):
        if ours.poll(seconds):
            found = json.loads(ours.recv_bytes(1_000_000))
        else:
            ending = f"not done after {seconds} seconds"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
    process.kill()
    process.join()
    return found, found.get(judge.IMPORTS, ending)


def graded(path: Path, problems: list[Problem], seconds: int) -> list[dict]:
    """The points of a submission, a record for each problem. Raises NotFound."""
    texts = read_submission(path)
    files = {file for problem in problems for file in problem.test_files}
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(os.cpu_count()) as pool:
        for name in [*PROGRAM, "tests/conftest.py", "tests/small.py", *files]:
            (Path(work) / name).parent.mkdir(exist_ok=True)
            shutil.copy(REPOSITORY / name, Path(work) / name)
        changes = [transplanted(texts, x) for x in problems]  # ast.parse wants a single thread
        return list(pool.map(lambda *x: grade(*x, Path(work), seconds), changes, problems))


def grade_class(folder: Path, table: Path, problems: list[Problem], seconds: int) -> None:
    """A row for each submission in a folder, written as soon as it is known."""
    columns = ["name", "total", "of", *(problem.name for problem in problems), "faults"]
    most = sum(problem.points for problem in problems)
    with table.open("x", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        others = {table.name, "__MACOSX"}
        paths = (x for x in folder.iterdir() if x.name not in others and x.name[0] != ".")
        for path in sorted(paths):
            row, fault = {"name": path.name, "of": most}, ""
            try:
                results = graded(path, problems, seconds)
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
    results, fault = [], ""
    try:
        if options.table:
            grade_class(options.submission, options.table, problems, options.time_limit)
        else:
            results = graded(options.submission, problems, options.time_limit)
    except (OSError, NotFound) as e:  # nothing to grade, or a table that is there already
        fault = str(e)
    for x in results:
        print(f"{x['score']:4} of {x['max_score']:2}  {x['name']}")
        print(textwrap.indent(x["output"], " " * 12), end="\n" * bool(x["output"]))
    total, most = (sum(x[key] for x in results) for key in ("score", "max_score"))
    print(f"{total:4} of {most}, {100 * total / most:.0f}%" if results else "")
    if options.json:
        text = json.dumps({"score": total, "output": fault, "tests": results}, indent=1)
        options.json.write_text(f"{text}\n", encoding="utf-8")
    if fault:
        print(f"error: {fault}", file=sys.stderr)
    return 2 if fault else 0


if __name__ == "__main__":
    raise SystemExit(main())
