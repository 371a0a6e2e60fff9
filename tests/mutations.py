"""Makes bugs, each by a change at one place, plants one after the other, and says who sees it.

  python tests/mutations.py rloo.py plumbing/run.py    # every bug of these files
  python tests/mutations.py one_page                   # of the files of this folder
  python tests/mutations.py --sample 100 --seed 3      # some of the whole program
  python tests/mutations.py --changed HEAD~1           # of the lines that differ from a commit

1. `bugs` walks over the syntax tree of a file, and changes it: it has a bug until the next one.
2. The fast tests run once without a bug: which lines does each of them run, and in which time?
   What a test runs in another process counts as not run.
3. This process has loaded the libraries, but no file of the program. For each bug it forks. The
   fork imports the program with the bug, and runs the tests that run the line, the fastest first,
   up to the first that fails. All tests run for what a file does when it is imported.
"""

import argparse
import ast
import builtins
import contextlib
import gc
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from coverage import Coverage

REPOSITORY = Path(__file__).resolve().parent.parent
PROGRAM = "common.py forward.py ppo.py grpo.py rloo.py reward_model.py sampling.py tasks.py".split()
for folder in ("plumbing", "tools"):
    PROGRAM += sorted(f"{folder}/{path.name}" for path in (REPOSITORY / folder).glob("*.py"))
TEXTS = ("test_course", "test_pages", "test_mutations")  # they read files, in which no bug is
OPTIONS = "-n 0 -q --tb=no --capture=sys -p no:cacheprovider".split()
OPTIONS += ["-m", "not slow", *(f"--ignore-glob=*{name}.py" for name in TEXTS)]
PAIRS = """Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, Add Sub, Mult Div, BitOr BitAnd, min max,
any all, amin amax, argmin argmax, minimum maximum""".split(",")
OTHER = {x: y for pair in PAIRS for x, y in (pair.split(), pair.split()[::-1])}
OTHER |= {"FloorDiv": "Div", "Mod": "FloorDiv", "Pow": "Mult"}
# Keywords: texts, guards, speed, and the look of a picture.
SILENT = "help usage bar_format strict fused non_blocking use_cache".split()
SILENT += "figsize fontsize alpha lw frameon dpi layout xlabel".split()


class Bug(NamedTuple):
    file: str  # plumbing/run.py
    line: int
    name: str  # without the line, so that it outlives other changes of the file
    lines: range | None  # a test that runs one of them may see the bug; None: any test
    tree: ast.Module  # it has the bug until the next one is made


def other(operator: ast.AST) -> ast.AST:
    return getattr(ast, OTHER.get(type(operator).__name__, ""), type(operator))()


def without(nodes: list[Any]) -> list[list[Any]]:
    """The list without the first, without the second, and so on."""
    return [nodes[:i] + nodes[i + 1 :] for i in range(len(nodes))]


def changes(parent: ast.AST, field: str, node: ast.AST, known: set[str]) -> Iterator[Any]:
    """What a bug puts in the place of a node, which is a field of its parent; None drops it."""
    if field in ("test", "ifs"):  # `while True` would never end
        yield from map(ast.Constant, (False,) if isinstance(parent, ast.While) else (False, True))
    match node:
        case ast.Constant(bool(x)):
            yield ast.Constant(not x)
        case ast.Constant(int(x) | float(x)):
            yield ast.Constant(0 if x == 1 else x + 1 if x == int(x) else 2 * x)
        case ast.Name(name) if name in OTHER:
            yield ast.Name(OTHER[name], node.ctx)
        case ast.Attribute(x, name) if name in OTHER:
            yield ast.Attribute(x, OTHER[name], node.ctx)
        case ast.UnaryOp(_, x) if not isinstance(x, ast.Constant):
            yield x
        case ast.BoolOp(operator, xs):
            yield from (x[0] if len(x) == 1 else ast.BoolOp(operator, x) for x in without(xs))
        case ast.BinOp(x, operator, y):
            yield from (x, y, ast.BinOp(x, other(operator), y))
        case ast.Compare(x, [first, *rest], ys):
            yield ast.Compare(x, [other(first), *rest], ys)
        case ast.keyword(str()):
            yield None
        case ast.Call(ast.Attribute(x)) if not isinstance(parent, ast.Expr):
            if re.split(r"\W", ast.unparse(x))[0] not in known:  # torch.cat(x) is no method
                yield x
        case ast.With(items, body) if not any(item.optional_vars for item in items):
            yield ast.If(ast.Constant(True), body, [])
        case ast.Assign([_, _, *_] as targets, x):
            yield from (ast.Assign(left, x) for left in without(targets))
        case ast.Assign([ast.Tuple(targets)], ast.Tuple(xs)) if len(targets) == len(xs):
            for left, right in zip(without(targets), without(xs)):
                yield ast.Assign([ast.Tuple(left, ast.Store())], ast.Tuple(right, ast.Load()))
        case ast.Assign([ast.Name(name)], x) if name not in ast.unparse(x):
            return  # the name would be missing, which any test sees
        case ast.AugAssign(target, operator, x):
            yield from (ast.Assign([target], x), ast.AugAssign(target, other(operator), x))
            yield ast.Pass()
        case ast.Expr(ast.Constant()):  # a docstring
            return
        case ast.Assign() | ast.Expr() | ast.For() | ast.While() | ast.Raise() | ast.Continue():
            yield ast.Pass()


def bugs(text: str, file: str) -> Iterator[Bug]:
    """Every bug of a file with this text. Docstrings, type hints and messages have none."""
    tree = ast.parse(text.partition("\nif __name__ ==")[0])
    imports = [x for x in ast.walk(tree) if isinstance(x, ast.Import | ast.ImportFrom)]
    known = {name.asname or name.name.split(".")[0] for x in imports for name in x.names}
    known |= {*dir(builtins), "self", "cls"}

    def walk(parent: ast.AST, where: str, statement: ast.AST, lines: range | None) -> Iterator[Bug]:
        for field, value in ast.iter_fields(parent):
            nodes = value if isinstance(value, list) else [value]
            for i, node in enumerate(all_nodes := nodes.copy()):
                is_text = field in ("annotation", "returns") or isinstance(node, ast.JoinedStr)
                if is_text or getattr(node, "arg", "") in SILENT or not isinstance(node, ast.AST):
                    continue
                its, own, inner = statement, lines, where
                if isinstance(node, ast.stmt):
                    its, end = node, node.end_lineno + 1
                    if hasattr(node, "name"):
                        inner = f"{where}.{node.name}".strip(".")
                    elif hasattr(node, "body"):
                        end = node.body[0].lineno
                    if lines or isinstance(node, ast.FunctionDef):  # the import runs its first line
                        own = range(node.lineno if lines else node.body[0].lineno, end)
                right = ast.unparse(its).splitlines()
                old = ast.unparse(node).partition("\n")[0]
                for new in changes(parent, field, node, known):
                    if new is not None:
                        ast.fix_missing_locations(ast.copy_location(new, its))
                    nodes[i : i + 1] = [] if new is None else [new]
                    setattr(parent, field, value if nodes is value else new)
                    name = f"{inner}: {old} → {'' if new is None else ast.unparse(new)}"
                    if its is not node:
                        wrong = zip(right, ast.unparse(its).splitlines())
                        name += next((f" in {y.strip()}" for x, y in wrong if x != y), "")
                    line = getattr(node, "lineno", its.lineno)
                    yield Bug(file, line, name.partition("\n")[0], own, tree)
                    nodes[:] = all_nodes
                    setattr(parent, field, value)
                yield from walk(node, inner, its, own)

    # A test runs a page of one_page as it stands; another file's top runs when it is imported.
    yield from walk(tree, "", tree, range(1) if file.startswith("one_page/") else None)


def all_bugs(files: list[str]) -> Iterator[Bug]:
    for file in files:
        yield from bugs(Path(file).read_text(encoding="utf-8"), file)


def in_fork(work: Callable[[], Any]) -> Any:
    """What work() returns in a fork of this process; None if it dies."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        if (child := os.fork()) == 0:
            try:
                os.setpgid(0, 0)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.environ["PYTEST_DEBUG_TEMPROOT"] = folder  # a test that hangs leaves files
                result.write_bytes(pickle.dumps(work()))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # and processes
        return pickle.loads(result.read_bytes()) if result.exists() else None


def modules_below(folder: str) -> list[str]:
    """The names of modules, of libraries for "-packages", which may lie below REPOSITORY too."""
    files = {name: str(getattr(x, "__file__", None)) for name, x in [*sys.modules.items()]}
    are_ours = folder != "-packages"
    return [x for x, y in files.items() if f"{folder}/" in y and are_ours != ("-packages/" in y)]


class Recorder:
    """A plugin of pytest: which lines each test runs, and in which time."""

    def __init__(self, files: list[str]) -> None:
        self.coverage = Coverage(data_file=None, config_file=False, include=files)
        self.seconds, self.failed = {}, []

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        for module in modules_below(str(REPOSITORY)):  # else what is cached would not run again
            for x in [*vars(sys.modules[module]).values()]:
                getattr(x, "cache_clear", int)()
        self.coverage.switch_context(nodeid.partition("::")[0])  # a fixture may be for all
        self.seconds[nodeid] = -time.monotonic()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self.coverage.switch_context(item.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.seconds[nodeid] += time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed += [report.nodeid] * report.failed


def record(files: list[str]) -> tuple[dict[str, tuple[float, set]], list[str], list[str]]:
    """({test: (seconds, its lines)}, the tests that fail without a bug, the libraries' modules)."""
    recorder = Recorder(files)
    with recorder.coverage.collect():
        pytest.main(OPTIONS, plugins=[recorder])
    lines = defaultdict(set)
    for file in files:
        found = recorder.coverage.get_data().contexts_by_lineno(str(REPOSITORY / file))
        for line, contexts in found.items():
            for context in contexts:
                lines[context].add((file, line))
    tests = {
        test: (seconds, lines[""] | lines[test.partition("::")[0]] | lines[test])
        for test, seconds in recorder.seconds.items()
        if test not in recorder.failed
    }
    return tests, recorder.failed, modules_below("-packages")


class Runner:
    """A plugin of pytest: these tests in their order, none much longer than without a bug."""

    def __init__(self, tests: dict[str, float]) -> None:
        self.tests, self.failed = tests, ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        found = {item.nodeid: item for item in items}
        items[:] = [found[test] for test in self.tests if test in found]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        signal.alarm(20 + int(5 * self.tests[nodeid]))  # it kills the process

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = report.nodeid if report.failed else self.failed


def outcome(bug: Bug, code: Any, tests: dict[str, float]) -> str:
    """The first of the tests that fails with the bug, UNSEEN, or NOT PLANTED. For a fork."""
    get_code, planted, runner = SourceFileLoader.get_code, [], Runner(tests)

    def with_bug(loader: SourceFileLoader, name: str) -> Any:
        if loader.path != str(REPOSITORY / bug.file):
            return get_code(loader, name)
        planted.append(name)
        return code

    SourceFileLoader.get_code = with_bug
    for name in modules_below(str(REPOSITORY)):
        del sys.modules[name]
    sys.modules["torch"].set_num_threads(1)  # its threads aren't in a fork
    signal.alarm(120)
    files = dict.fromkeys(test.partition("::")[0] for test in tests)
    status = pytest.main([*OPTIONS, "-x", *files], plugins=[runner])
    said = "UNSEEN" if status == 0 else runner.failed or f"the import: {status!r}"
    return said if planted else "NOT PLANTED"


def seen_by(bug: Bug, tests: dict[str, tuple[float, set]], seen: Counter) -> str:
    """The test that sees the bug, or what happened instead. Those that saw others there begin."""
    its = {(bug.file, line) for line in bug.lines or ()}
    runs = [(s, test) for test, (s, lines) in tests.items() if bug.lines is None or lines & its]
    where = bug.name.partition(":")[0]
    runs.sort(key=lambda run: (-seen[where, run[1]], run[0]))
    if not runs:
        return "UNSEEN: no test runs the line"
    code = compile(bug.tree, REPOSITORY / bug.file, "exec")
    found = in_fork(lambda: outcome(bug, code, {test: seconds for seconds, test in runs}))
    seen[where, found] += 1
    return found or "it hangs or dies"


def changed_lines(commit: str, file: str) -> set[tuple[str, int]]:
    """The lines of a file that it hasn't in a commit, each with its name."""
    command = ["git", "diff", "-U0", commit, "--", file]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    hunks = re.findall(r"^@@ .* \+(\d+)(?:,(\d+))? @@", text, re.MULTILINE)
    return {(file, int(start) + i) for start, count in hunks for i in range(int(count or 1))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", default=PROGRAM, help="of the program (all)")
    parser.add_argument("--changed", nargs="?", const="HEAD", help="since this commit (HEAD)")
    parser.add_argument("--sample", type=int, metavar="N", help="draw N of the bugs")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # else a fork tries the network
    os.environ["COVERAGE_CORE"] = "ctrace"  # Python 3.14's default can't tell the tests apart
    os.chdir(REPOSITORY)
    files = []
    for name in options.files:
        inside = sorted(path.as_posix() for path in Path(name).glob("*.py"))
        files += inside or [Path(name).as_posix()]
    lines = {line for x in files for line in changed_lines(options.changed or "HEAD", x)}
    chosen = [
        i
        for i, bug in enumerate(all_bugs(files))
        if not options.changed or (bug.file, bug.line) in lines
    ]
    if options.sample:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    tests, failed, libraries = in_fork(lambda: record(files))
    print(
        f"{len(chosen)} bugs, {len(tests)} tests; without a bug fail {failed or 'none'}", flush=True
    )
    if not tests:
        sys.exit("no test has run: python -m pytest says why")
    for name in libraries:
        with contextlib.suppress(Exception):
            import_module(name)
    gc.freeze()  # a fork needn't look through what is loaded
    found, seen = [], Counter()
    for i, bug in enumerate(all_bugs(files)):
        if i in chosen:
            test = seen_by(bug, tests, seen)
            found += ["UNSEEN" not in test] * (test != "NOT PLANTED")
            print(f"{bug.file}:{bug.line} {bug.name}\n    {test}", flush=True)
    print(f"{sum(found)} of {len(found)} bugs are seen")


if __name__ == "__main__":
    main()
