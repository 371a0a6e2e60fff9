"""Points for a submission, and in words why any were lost.

  python course/grade.py SUBMISSION                       # a folder with the student's files
  python course/grade.py SUBMISSION --json results.json   # as Gradescope reads it

Each problem runs in a process of its own with a time limit, on the repository's files with the one
function of the submission put in its place: whatever happens there costs no other problem, and
tests that lie in the submission are not used. The submission needs the files that have problems and
no others. It is still the student's code that runs: grade in a container.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from checks import CHECKS, shortened
from problems import BY_NAME, PROBLEMS, REPOSITORY, NotFound, Problem, splice


@dataclass
class Result:
    """Points of a problem, and for each check that failed its name, points, fault and advice."""

    problem: Problem
    points: int
    lost: list[tuple[str, int, str, str]]

    @property
    def most(self) -> int:
        return sum(item.points for item in CHECKS[self.problem.name])


def prepare(problem: Problem, submission: Path) -> tuple[str, str]:
    """(the solution's file with the submission's function, '') or ('', why that can't be made)."""
    try:
        data = (submission / problem.file).read_bytes()
        # What PowerShell's > writes is UTF-16.
        encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
        text = data.decode(encoding, "replace").replace("\r\n", "\n").replace("\r", "\n")
        solution = (REPOSITORY / problem.file).read_text(encoding="utf-8")
        return splice(solution, text.replace("\0", ""), problem.function), ""
    except OSError as e:
        return "", f"{problem.file} can't be read ({e.strerror})"
    except NotFound as e:
        return "", f"{problem.file}: {e}"


def grade(
    problem: Problem, prepared: tuple[str, str], submission: Path, time_limit: float
) -> Result:
    """Run the checks of a problem in a process of its own."""
    checks, verdicts, (source, ending) = CHECKS[problem.name], [], prepared
    if source:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            path, results = Path(folder, problem.file), Path(folder, "results.jsonl")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source, encoding="utf-8")
            results.touch()
            command = [sys.executable, str(Path(__file__).with_name("checks.py"))]
            command += [problem.name, str(path), str(results), str(submission.resolve())]
            ending = run(command, folder, time_limit)
            for line in results.read_text(encoding="utf-8", errors="replace").splitlines():
                # Half a line, or one that the submission has written.
                with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                    if isinstance(fault := json.loads(line)["fault"], str):
                        verdicts.append(shortened(fault))
    verdicts += [ending or "the process ended before this check"] * (len(checks) - len(verdicts))
    lost = [
        (item.name, item.points, fault, item.advice)
        for item, fault in zip(checks, verdicts)
        if fault
    ]
    points = sum(item.points for item in checks) - sum(points for _, points, *_ in lost)
    return Result(problem, points, lost)


def run(command: list[str], folder: str, time_limit: float) -> str:
    """Run the checks; how they ended, '' if by themselves. What they have started ends with them,
    and what they leave in a temporary folder lies in `folder`.
    """
    environment = os.environ | {"PYTHONPATH": "", "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}
    environment |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), folder)
    errors = Path(folder, "stderr")
    with errors.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=file, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(timeout=time_limit)
        except subprocess.TimeoutExpired:
            return f"not done after {time_limit:g} seconds, look for a loop that doesn't end"
        finally:
            end_group(process)
    if process.returncode == 0:
        return ""
    with errors.open("rb") as file:
        file.seek(max(0, errors.stat().st_size - 2**16))
        last = file.read().decode("utf-8", "replace").strip().split("\n")[-1]
    return f"the process ended with code {process.returncode}: {shortened(last)}"


def end_group(process: subprocess.Popen) -> None:
    """End a process and all that it has started in its group."""
    if hasattr(os, "killpg"):
        # No group is left where nothing was started; macOS refuses where all have ended.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def reasons(result: Result) -> list[str]:
    """Why points were lost, a line for each check; one for all where it is the same for all."""
    faults = {fault for *_, fault, _ in result.lost}
    if len(faults) == 1 and len(result.lost) > 1 and result.points == 0:
        return [f"-{result.most}: {faults.pop()}"]
    return [f"-{points} {name}: {fault}. {advice}" for name, points, fault, advice in result.lost]


def report(results: list[Result]) -> str:
    """The results as a student reads them."""
    lines = []
    for result in results:
        problem = result.problem
        lines.append(f"{result.points:3} of {result.most:2}  {problem.name}: {problem.what}")
        for text in reasons(result):
            lines += textwrap.wrap(text, 92, initial_indent="    ", subsequent_indent="       ")
    total, most = (sum(getattr(r, name) for r in results) for name in ("points", "most"))
    return "\n".join([*lines, f"{total} of {most} points"])


def for_gradescope(results: list[Result]) -> dict:
    """https://gradescope-autograders.readthedocs.io: one test per problem."""
    tests = [
        {
            "name": f"{result.problem.name}: {result.problem.what}",
            "score": result.points,
            "max_score": result.most,
            "output": "\n".join(reasons(result)),
            "visibility": "visible",
        }
        for result in results
    ]
    return {"score": sum(result.points for result in results), "tests": tests}


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("submission", type=Path, help="folder with the student's files")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write Gradescope's results.json")
    parser.add_argument("--problems", nargs="+", metavar="NAME", help="these alone")
    parser.add_argument("--time_limit", type=float, default=120, help="seconds a problem (120)")
    parser.add_argument("--workers", type=int, default=2, help="problems at a time (2)")
    options = parser.parse_args(args)
    unknown = sorted(set(options.problems or ()) - set(BY_NAME))
    fault = f"{options.submission} is not a folder" if not options.submission.is_dir() else ""
    if unknown:
        fault = f"--problems {unknown[0]}: choose from {', '.join(BY_NAME)}"
    if fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    chosen = [p for p in PROBLEMS if p.name in (options.problems or BY_NAME)]
    # Not in the threads: ast.parse of Python 3.11 fails where two run at once.
    prepared = [prepare(problem, options.submission) for problem in chosen]

    def run_one(problem: Problem, source: tuple[str, str]) -> Result:
        return grade(problem, source, options.submission, options.time_limit)

    with ThreadPoolExecutor(max(1, options.workers)) as pool:
        results = list(pool.map(run_one, chosen, prepared))
    if options.json:
        options.json.write_text(json.dumps(for_gradescope(results), indent=2) + "\n")
    # A student's text may hold what the terminal can't show.
    encoding = sys.stdout.encoding or "utf-8"
    print(report(results).encode(encoding, "backslashreplace").decode(encoding))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
