"""Grades a submission by this repository's own tests.

  python course/grade.py SUBMISSION                      # a folder, or a zip file
  python course/grade.py SUBMISSION --json results.json  # in the form of Gradescope
  python course/grade.py FOLDER --class grades.csv       # a folder of submissions: a row for each

For each problem the student's function takes the place of ours in a copy of the repository, and the
tests that are marked for it run there, in a process of its own: a fault costs its problem alone.
The scripts run with all files of the submission together.
"""

import argparse
import ast
import contextlib
import csv
import dis
import filecmp
import json
import multiprocessing
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
import textwrap
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import judge
from problems import BY_NAME, FILES, PROBLEMS, PROGRAM, REPOSITORY, SHARED, NotFound, Problem

# Each process is forked off one that has done the slow imports.
FORKSERVER = multiprocessing.get_context("forkserver")
PRELOAD = ["judge", "peft", "safetensors.torch", "transformers.models.gpt2.modeling_gpt2"]
LARGEST = 1_000_000  # bytes that are read of a file


def read_submission(path: Path) -> dict[str, str]:
    """{file: text} of a folder or a zip file; they may lie in a folder of it. Raises NotFound."""
    try:
        root = path if path.is_dir() else zipfile.Path(path)  # nothing is unpacked
        tops = [root, *(x for x in root.iterdir() if x.is_dir())]
        tops = [top for top in tops if any((top / file).is_file() for file in FILES)]
        if not tops or (len(tops) > 1 and tops[0] is not root):
            where = " and ".join(sorted(top.name for top in tops)) or "none of its folders"
            raise NotFound(f"the files {', '.join(FILES)} are in {where}")
        names = {x.name for x in tops[0].iterdir() if x.name.endswith(".py")} | {*FILES}
        files = [(name, tops[0] / name) for name in sorted(names) if (tops[0] / name).is_file()]
        texts = {name: file.open("rb").read(LARGEST) for name, file in files}
    except Exception as e:  # broken archives raise many kinds
        raise NotFound(f"{path.name}: {str(e)[: judge.CUT]}") from None
    return {k: v.decode("utf-8-sig", "replace").replace("\r\n", "\n") for k, v in texts.items()}


def transplanted(texts: dict[str, str], problem: Problem) -> dict[str, str] | str:
    """{file: text} of what the submission changes in the repository, or why it can't be graded.

    Helpers, constants and imports come along from all files of the submission: those that ours
    lacks, and in the problem's file those that differ, but no function of another problem. Other
    code at the top of a file isn't run.
    """
    for file in [problem.file] if problem.function else [problem.file, *SHARED]:
        if file not in texts:
            return f"{file} isn't in the submission"
    found = {file: text for file, text in texts.items() if file not in PROGRAM}  # new files
    if not problem.function:
        return found | {file: texts[file] for file in FILES if file in texts}
    others = {other.function for other in PROBLEMS} - {problem.function} | {"annotations"}
    for file in {*texts} & {*FILES}:
        ours, is_own = statements((REPOSITORY / file).read_text("utf-8")), file == problem.file
        ours = [x for x in ours if not (is_own and problem.function in names_of(x))]
        known = {name: ast.dump(node) for node in ours for name in names_of(node)}
        theirs = [
            node
            for node in statements(texts[file])
            for name in names_of(node) - others
            if name not in known or (is_own and known[name] != ast.dump(node))
        ]
        if is_own and not any(problem.function in names_of(node) for node in theirs):
            return f"{problem.function} is not in {file}, or doesn't parse"
        found[file] = "\n\n".join([*map(ast.unparse, ours), *map(attempt, dict.fromkeys(theirs))])
    for text in found.values():
        if borrowed := re.search(r"^\s*(?:from|import)\s+(test_\w+|conftest|judge)", text, re.M):
            return f"the code imports {borrowed[1]}, a part of the tests"
    return found


def attempt(node: ast.stmt) -> str:
    """The text of a statement. Where an import or an assignment fails its names stay undefined."""
    text = textwrap.indent(ast.unparse(node), "    ")
    return f"try:\n{text}\nexcept Exception:\n    pass"


def statements(source: str) -> list[ast.stmt]:
    """The statements at the top of a file. Of a file that doesn't parse, those that do: an error in
    one function must not cost the others.
    """
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        compile(source, "submission", "exec")  # which sees more errors than ast.parse
        return ast.parse(source).body
    # Decorators, a line that begins a statement, and the lines that belong to it.
    parts = re.findall(r"(?m)^(?:@.*\n)*[^\s#)\]}@].*(?:\n(?:[ \t#)\]}].*|$))*", source)
    return [node for part in parts if part != source for node in statements(part)]


def names_of(node: ast.stmt) -> set[str]:
    """The names that a statement gives a meaning; loops and calls are scratch code."""
    if isinstance(node, (ast.Expr, ast.For, ast.While, ast.With)):
        return set()
    code = compile(ast.Module([node], []), "submission", "exec")
    return {x.argval for x in dis.get_instructions(code) if x.opname == "STORE_NAME"}


def grade(changed: dict | str, problem: Problem, template: Path, seconds: int) -> dict:
    """Run the tests of a problem on what `transplanted` gives: its points, in Gradescope's form.
    `template` is a copy of the repository.
    """
    tests, given = problem.properties, [path.name for path in (template / "tests").iterdir()]
    if isinstance(changed, str):
        return points(problem, dict.fromkeys(tests, changed))
    with tempfile.TemporaryDirectory(prefix="grade-") as work:
        folder = Path(work) / "copy"
        shutil.copytree(template, folder)
        for name, text in changed.items():
            (folder / name).write_text(text, encoding="utf-8")
        lines, ending = in_a_process(folder, problem, seconds)
        kept, *_ = filecmp.cmpfiles(template / "tests", folder / "tests", given, shallow=False)
    replaced = [line["replaced"] for line in lines if "replaced" in line]
    replaced += [name for name in given if name not in kept]
    if replaced:
        return points(problem, dict.fromkeys(tests, f"the code replaces {replaced[0]}"))
    ending = next((line["error"] for line in lines if "error" in line), ending)
    found = {line["test"]: line["fault"] for line in lines if "test" in line}
    return points(problem, {x: fault for x in tests if (fault := found.get(x, ending))})


def points(problem: Problem, faults: dict[str, str]) -> dict:
    """Gradescope's record of a problem whose tests have these faults."""
    lines = {}  # in their order, each once
    for test, fault in faults.items():
        name = test.partition("::")[2].removeprefix("test_").replace("_", " ")
        lines |= {f"-{problem.properties[test]}: {name}": None, fault: None}
    score = problem.points - sum(problem.properties[test] for test in faults)
    names = {"name": problem.name, "output": "\n".join(lines)}
    return names | {"score": score, "max_score": problem.points}


def in_a_process(folder: Path, problem: Problem, seconds: int) -> tuple[list[dict], str]:
    """(What judge.run sent, how it ended). The process is killed with all that it has started."""
    ours, theirs = multiprocessing.Pipe()
    key, lines, deadline = secrets.token_hex(), [], time.monotonic() + seconds
    ours.send_bytes(key.encode())
    args = str(folder), problem.name, problem.test_files, theirs
    process = FORKSERVER.Process(target=judge.run, args=args)
    process.start()
    theirs.close()
    ending = "the process ended before the test did"
    with contextlib.suppress(OSError, EOFError, ValueError, KeyError, TypeError):  # or forged
        while ours.poll(max(0, deadline - time.monotonic())):
            line = json.loads(ours.recv_bytes(100_000))
            if line["key"] != key:
                raise ValueError
            lines.append(line)
        ending = f"not done after {seconds} seconds"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
    return lines, ending


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
    columns = ["name", "total", *(problem.name for problem in problems), "faults"]
    with table.open("x", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for path in sorted(x for x in folder.iterdir() if x.is_dir() or x.suffix == ".zip"):
            results, fault = [], ""
            try:
                results = graded(path, problems, seconds)
            except NotFound as e:
                fault = str(e)
            faults = [f"{x['name']}: {x['output']}" for x in results if x["output"]]
            row = {x["name"]: x["score"] for x in results}
            row |= {"name": path.name, "total": sum(row.values())}
            writer.writerow(row | {"faults": fault or "\n".join(faults)})
            file.flush()
            print(f"{row['total']:4}  {path.name}  {fault}")


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("submission", type=Path)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--class", dest="table", type=Path, metavar="CSV", help="grade a folder")
    parser.add_argument("--problems", nargs="+", choices=BY_NAME, default=[*BY_NAME])
    parser.add_argument("--time_limit", type=int, default=120, help="seconds of a problem (120)")
    options = parser.parse_args(args)
    problems = [BY_NAME[name] for name in options.problems]
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
