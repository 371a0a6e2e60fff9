"""What imports what, and how large a file, a function and a class may grow."""

import ast
import difflib
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
SCRIPTS = ["ppo", "grpo", "rloo"]
LOOPS = [*SCRIPTS, "reward_model"]
TOOLS = ["evaluate", "fit", "inspect_reward", "look", "outgrow", "plot"]
TOOLS = [f"tools.{name}" for name in TOOLS]
# From the ground up: a file imports files of lower floors alone, none of its own floor.
FLOORS = [
    ["common"],
    ["plumbing.errors", "plumbing.inputs"],
    ["plumbing.forward"],
    ["plumbing.loading"],
    ["plumbing.config"],
    ["plumbing.stopping"],
    ["plumbing.decoding"],
    ["plumbing.prompts", "plumbing.words"],
    ["plumbing.answers", "plumbing.reward_models"],
    ["plumbing.data"],
    ["plumbing.scoring"],
    ["plumbing.advice", "plumbing.metrics"],
    ["plumbing.curves"],
    ["plumbing.checkpoints", "plumbing.trackers", "plumbing.signals"],
    ["sampling", "tasks"],
    ["plumbing.evaluation", "plumbing.extras", "plumbing.pairs", "plumbing.tokens"],
    ["plumbing.judging"],
    ["plumbing.runs"],
    LOOPS,
    ["tools.outgrow_verl"],
    TOOLS,
]
HEIGHT = {name: height for height, floor in enumerate(FLOORS) for name in floor}
MOST_LINES = {
    "reward_model": 200,
    "ppo": 300,
    "grpo": 300,
    "rloo": 250,
    "common": 340,
    "sampling": 150,
    "tasks": 200,
}


def source(name: str) -> str:
    return (REPOSITORY / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8")


def modules() -> dict[str, ast.Module]:
    """Name -> syntax tree of every file of the program."""
    files = [f for folder in ("", "plumbing/", "tools/") for f in REPOSITORY.glob(f"{folder}*.py")]
    names = [".".join(f.relative_to(REPOSITORY).with_suffix("").parts) for f in files]
    return {name: ast.parse(source(name)) for name in names if not name.endswith("__init__")}


def imported(tree: ast.AST, name: str, ours: set[str]) -> set[str]:
    """Which of `ours` the file `name` imports, in whatever way and wherever the import stands."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = name.split(".")[: -node.level] if node.level else []
            module = ".".join([*package, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}".strip(".") for alias in node.names}
            names |= {module} & ours  # the name may be that of a function in it
        elif isinstance(node, ast.Call) and "import_" in ast.unparse(node.func):
            names |= {a.value for a in node.args if isinstance(a, ast.Constant)}
    # `import plumbing` and `from plumbing import *`: any file of it may be meant.
    folders = {n.removesuffix(".*") for n in names}
    return {n for n in ours if n in names or n.rpartition(".")[0] in folders}


def upward(trees: dict[str, ast.Module], height: dict[str, int]) -> list[str]:
    """The imports that don't lead to a lower floor: all that a circle could be made of."""
    ours = set(trees)
    return [
        f"{name} imports {other}"
        for name, tree in trees.items()
        for other in sorted(imported(tree, name, ours))
        if height[other] >= height[name]
    ]


def test_every_import_of_ours_leads_to_a_lower_floor_so_there_is_no_circle():
    trees = modules()
    assert set(trees) == set(HEIGHT), "a file without a floor, or a floor without its file"
    assert upward(trees, HEIGHT) == []


def test_common_imports_no_file_of_ours():
    trees = modules()
    assert imported(trees["common"], "common", set(trees)) == set()
    assert imported(trees["sampling"], "sampling", set(trees)), "the search finds nothing"


@pytest.mark.parametrize(
    "statement",
    [
        "from plumbing import runs",
        "from plumbing import errors, runs as records",
        "import plumbing.runs",
        "import os, plumbing.runs as records",
        "from plumbing.runs import Run",
        "from . import runs",
        "from .runs import Run",
        "def f():\n    from plumbing import runs",
        "class A:\n    def f(self):\n        import plumbing.runs",
        "if TYPE_CHECKING:\n    from plumbing.runs import Run",
        "try:\n    import plumbing.runs\nexcept ImportError:\n    pass",
        "importlib.import_module('plumbing.runs')",
        "__import__('plumbing.runs')",
        "from plumbing import *",
        "import plumbing",
    ],
)
def test_an_import_is_found_in_whatever_way_and_place_it_is_written(statement):
    ours = {"plumbing.runs", "plumbing.errors", "tasks", "sampling"}
    found = imported(ast.parse(statement), "plumbing.data", ours)
    assert "plumbing.runs" in found and not found & {"tasks", "sampling"}
    trees = {name: ast.parse("") for name in ours} | {"plumbing.data": ast.parse(statement)}
    height = HEIGHT | {"plumbing.errors": -1}
    assert "plumbing.data imports plumbing.runs" in upward(trees, height)


def test_other_modules_of_the_same_name_are_not_ours():
    other = (
        "import sampler\nfrom other import tasks\nimport other.common\nfrom other.common import x"
    )
    assert imported(ast.parse(other), "ppo", {"sampling", "tasks", "common"}) == set()
    assert (
        imported(ast.parse("from plumbing.errors import runs"), "ppo", {"plumbing.runs"}) == set()
    )


def test_a_circle_within_a_floor_or_through_another_one_is_found():
    def tree(*names: str) -> ast.Module:
        return ast.parse("\n".join(f"import {name}" for name in names))

    within = {"sampling": tree("tasks"), "tasks": tree("sampling")}
    assert len(upward(within, HEIGHT)) == 2
    itself = {"sampling": tree("sampling")}
    assert upward(itself, HEIGHT) == ["sampling imports sampling"]
    long = {"common": tree("sampling"), "plumbing.data": tree("common"), "sampling": tree()}
    long["sampling"] = tree("plumbing.data")
    assert upward(long, HEIGHT) == ["common imports sampling"]


def late_imports(tree: ast.Module, name: str, ours: set[str]) -> set[str]:
    """Which of `ours` are imported elsewhere than at the top of a file."""
    below = [child for node in tree.body for child in ast.iter_child_nodes(node)]
    return set().union(*(imported(node, name, ours) for node in below))


def test_files_of_ours_are_imported_at_the_top_of_a_file_alone():
    trees = modules()
    for name, tree in trees.items():
        assert late_imports(tree, name, set(trees)) == set(), name
    late = ast.parse("import sampling\nfrom plumbing import runs\ndef f():\n    import tasks")
    assert late_imports(late, "x", {"sampling", "plumbing.runs", "tasks"}) == {"tasks"}


# --- Sizes ---


@pytest.mark.parametrize("name", MOST_LINES)
def test_a_file_that_is_read_stays_short(name):
    assert source(name).count("\n") <= MOST_LINES[name]


def test_the_page_of_tokens_stays_short_with_its_style_and_its_script():
    files = [REPOSITORY / "tools" / name for name in ("look.py", "look.html")]
    lines = [line for f in files for line in f.read_text(encoding="utf-8").splitlines()]
    assert len(lines) <= 600 and max(map(len, lines)) <= 100
    ours = {
        f.name for f in (REPOSITORY / "tools").rglob("*") if f.suffix in (".html", ".js", ".css")
    }
    assert ours == {"look.html", "uPlot.min.js", "uPlot.min.css"}, "a library's, or counted above"


def test_the_process_that_hands_out_the_tests_imports_no_torch():
    tree = ast.parse((REPOSITORY / "tests" / "conftest.py").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {x.name for n in imports if isinstance(n, ast.Import) for x in n.names}
    names |= {node.module for node in imports if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= {*sys.stdlib_module_names, "pytest"}


def test_the_top_level_holds_what_is_read_and_nothing_else():
    assert {name for name in modules() if "." not in name} == set(MOST_LINES)


def test_grpo_and_rloo_differ_in_little_else_than_the_estimator():
    def changed(a: list[str], b: list[str]) -> int:
        return sum(line[0] in "+-" for line in difflib.ndiff(a, b))

    whole, mains = [], []
    for name in ("grpo", "rloo"):
        text = source(name)
        body = text.index("@dataclass(kw_only=True)\nclass Config")  # after the imports
        doc = text[: text.index('"""\n\n')]
        whole.append((doc + text[body:]).splitlines())
        mains.append(text[text.index("def main") :].splitlines())
    assert changed(*whole) <= 140 and changed(*mains) <= 31


def test_a_comment_line_stands_in_front_of_each_block_of_what_a_reader_follows():
    """12 to 18% of the lines, as in nanoGPT: fewer explain too little, more hide the code."""
    files = {name: source(name).splitlines() for name in [*LOOPS, "common"]}
    counts = {n: sum(x.lstrip().startswith("#") for x in lines) for n, lines in files.items()}
    assert 0.12 <= sum(counts.values()) / sum(map(len, files.values())) <= 0.18
    assert all(0.1 <= counts[name] / len(lines) <= 0.18 for name, lines in files.items())


def too_long(tree: ast.Module, main_may: bool) -> list[str]:
    """The functions of more than 50 lines, signature and docstring included, the classes of more
    than 200. The loop of an algorithm is one function however long: main, at the top level.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            limit = 200 if isinstance(node, ast.ClassDef) else 50
            free = main_may and node.name == "main" and node in tree.body
            if node.end_lineno - node.lineno + 1 > limit and not free:
                found.append(node.name)
    return found


def test_no_function_but_the_loops_has_more_than_50_lines_and_no_class_more_than_200():
    found = {name: too_long(tree, name in LOOPS) for name, tree in modules().items()}
    assert {name: names for name, names in found.items() if names} == {}

    def body(lines: int, indent: str = "    ") -> str:
        return "".join(f"{indent}x = {i}\n" for i in range(lines))

    for start, most in (("def f(\n):\n", 48), ("async def f():\n", 49), ("class A:\n", 199)):
        assert too_long(ast.parse(start + body(most)), True) == []
        assert len(too_long(ast.parse(start + body(most + 1)), True)) == 1
    main = "def main():\n" + body(60)
    assert too_long(ast.parse(main), True) == [] and too_long(ast.parse(main), False) == ["main"]
    method = "class A:\n    def main(self):\n" + body(60, " " * 8)
    assert too_long(ast.parse(method), True) == ["main"]


BLOCKS = (ast.With, ast.For, ast.While, ast.If, ast.Try, ast.Match, ast.FunctionDef, ast.ClassDef)
BLOCKS += (ast.AsyncWith, ast.AsyncFor, ast.AsyncFunctionDef)


def depth(node: ast.AST) -> int:
    """How deep statements are nested below a node. An `elif` is beside its `if`, not below it,
    although the tree has it there; an `if` alone under `else:` is below, and further to the right.
    """
    deepest = 0
    for child in ast.iter_child_nodes(node):
        is_elif = (
            isinstance(node, ast.If)
            and node.orelse == [child]
            and isinstance(child, ast.If)
            and child.col_offset == node.col_offset
        )
        level = isinstance(child, BLOCKS) and not is_elif
        deepest = max(deepest, depth(child) + level)
    return deepest


@pytest.mark.parametrize("script", LOOPS)
def test_statements_of_main_are_nested_four_deep_at_most(script):
    (main,) = (n for n in modules()[script].body if getattr(n, "name", "") == "main")
    assert 3 <= depth(main) <= 4


@pytest.mark.parametrize(
    ("code", "levels"),
    [
        ("x = [a for a in b if a]", 0),
        ("if a:\n  x\nelif b:\n  x\nelif c:\n  x\nelse:\n  x", 1),
        ("if a:\n  x\nelse:\n  if b:\n    x", 2),
        ("if a:\n  x\nelif b:\n  if c:\n    x", 2),
        ("if a:\n  x\nelif b:\n  for c in d:\n    x\nelse:\n  for c in d:\n    x", 2),
        (
            "with a:\n for b in c:\n  while d:\n   try:\n    x\n   finally:\n    y",
            4,
        ),
        ("with a, b:\n  x", 1),
        ("for a in b:\n  def f():\n    if c:\n      x", 3),
        ("match a:\n  case 1:\n    if b:\n      x", 2),
    ],
)
def test_levels_are_counted_as_a_reader_sees_them(code, levels):
    assert depth(ast.parse(code)) == levels
