"""The pages against the code: line references of docs/details.md and
docs/evidence/from-trl-ppo.md, named tests of docs/details.md, names, files and tests of
docs/architecture.md, the tables of docs/compare.md, every link, and the headers of the scripts.

After lines have moved,

  python tests/test_docs.py

finds each snippet again, writes its line number, and names those that a file has no more or twice.
"""

import ast
import json
import re
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PAGE = REPOSITORY / "docs" / "details.md"
NUMBERED = [
    PAGE,
    REPOSITORY / "docs" / "evidence" / "from-trl-ppo.md",
]  # pages with line references
ARCHITECTURE = REPOSITORY / "docs" / "architecture.md"
ENTRY = re.compile(r"^### (\d+)\. \S.*$", re.MULTILINE)
# `text of a line` in [ppo.py, line 171](../ppo.py#L171), with a new line for a space anywhere
# but in the snippet.
REFERENCE = re.compile(
    r"`(?P<snippet>[^`\n]+)`(?P<link>\s+in\s+\[(?P<file>[\w/.]+),\s+line\s+(?P<line>\d+)\]"
    r"\((?:\.\./)+(?P<path>[\w/.]+)#L(?P<anchor>\d+)\))"
)
TEST = re.compile(r"`(tests/\w+\.py)::(test_\w+)`")


def lines_with(snippet: str, file: str) -> list[int]:
    """The numbers of the lines of a file that contain the snippet; none where it is not there."""
    path = REPOSITORY / file
    lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
    return [number for number, line in enumerate(lines, 1) if snippet in line]


def renumbered(page: str) -> tuple[str, list[str]]:
    """The page with the line numbers that are right now, and the snippets without one such line."""
    lost = []

    def write(match: re.Match) -> str:
        found = lines_with(match["snippet"], match["path"])
        if len(found) != 1:
            place = f"on lines {found} of" if found else "no longer in"
            lost.append(f"`{match['snippet']}` is {place} {match['path']}")
            return match[0]
        link = re.sub(r"(line\s+|#L)\d+", rf"\g<1>{found[0]}", match["link"])
        return f"`{match['snippet']}`{link}"

    return REFERENCE.sub(write, page), lost


@pytest.mark.parametrize("path", NUMBERED, ids=lambda path: path.stem)
def test_each_reference_names_the_line_that_its_snippet_is_on(path):
    page = path.read_text(encoding="utf-8")
    references = list(REFERENCE.finditer(page))
    assert len(references) == page.count("#L"), "a reference in another form is not checked"
    for match in references:
        assert match["file"] == match["path"] and match["line"] == match["anchor"], match[0]
        hint = f"{match[0]}: python tests/test_docs.py writes the numbers anew"
        assert lines_with(match["snippet"], match["path"]) == [int(match["line"])], hint


@pytest.mark.parametrize("path", [PAGE, ARCHITECTURE], ids=lambda path: path.stem)
def test_each_test_that_is_named_exists(path):
    page = path.read_text(encoding="utf-8")
    named = TEST.findall(page)
    assert len(named) == page.count("::"), "a test named in another form is not checked"
    for file, name in set(named):
        assert lines_with(f"def {name}(", file), f"{file} has no {name}"


def test_the_page_of_the_architecture_names_every_file_and_each_name_is_defined_where_it_says():
    page = ARCHITECTURE.read_text(encoding="utf-8")
    assert len(page.split("\n")) <= 90
    program = [p for part in ("", "plumbing/", "tools/") for p in REPOSITORY.glob(f"{part}*.py")]
    missing = [p.name for p in program if p.name not in page and p.name != "__init__.py"]
    assert program and not missing, missing
    # `name`, `name` in [file.py](../folder/file.py)
    names = re.findall(r"((?:`\w+`(?:, | and ))*`\w+`) in \[[\w.]+\]\(\.\./([\w/.]+)\)", page)
    assert len(names) > 20
    for several, file in names:
        text = (REPOSITORY / file).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", several):
            defined = rf"^(def {name}\(|class {name}\b|{name} = )"
            assert re.search(defined, text, re.MULTILINE), f"{file} does not define {name}"


def test_the_entries_are_numbered_without_gaps_and_each_has_a_line_and_a_test():
    parts = ENTRY.split(PAGE.read_text(encoding="utf-8"))[1:]
    numbers, entries = [int(n) for n in parts[::2]], parts[1::2]
    assert len(numbers) >= 40 and numbers == list(range(1, len(numbers) + 1))
    for number, entry in zip(numbers, entries, strict=True):
        assert REFERENCE.search(entry), f"entry {number} names no line"
        assert TEST.search(entry.partition("Guarded by")[2]), f"entry {number} names no test"


def test_each_link_of_each_page_leads_to_a_file():
    pages = [p for p in REPOSITORY.rglob("*.md") if "runs" not in p.relative_to(REPOSITORY).parts]
    links = 0
    for page in pages:
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in link:
                links += 1
                assert (page.parent / link).exists(), f"{page.name} links to {link}"
    assert links > 100


def test_the_tables_of_the_comparison_are_those_of_its_results(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    import learning

    page = (REPOSITORY / "docs" / "compare.md").read_text(encoding="utf-8")
    results = json.loads(learning.RESULTS.read_text(encoding="utf-8"))
    assert {"tiny", "reviews"} <= set(results)
    for job, runs_of in results.items():
        curves_of = {name: [run["points"] for run in runs] for name, runs in runs_of.items()}
        assert {len(curves) for curves in curves_of.values()} == {learning.JOBS[job].seeds}
        assert learning.table(learning.JOBS[job], curves_of) in page


def test_points_of_a_run_are_means_since_the_point_before_and_reward_where_there_is_no_verifier(
    monkeypatch,
):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    import learning

    def line(step: int, score: float, **evaluation: float | None) -> dict:
        costs = {"time/rollout": 1.0, "time/update": 2.0, "memory/peak_gb": 1.0 + step}
        own = {"episode": 8 * (step + 1), "objective/scores": score, "objective/kl": score / 2}
        return costs | own | evaluation

    def rewards(sampled: float, greedy: float) -> dict:  # the accuracy is null without a verifier
        return {"eval/reward": sampled, "eval/reward_greedy": greedy, "eval/accuracy": None}

    run = [line(0, 1.0, **rewards(0.5, 0.6)), line(1, 3.0), rewards(0.7, 0.8)]
    first, last = learning.points_of(run)
    assert (first["episodes"], first["training"], first["sampled"]) == (0, 1, 0.5)
    assert (last.pop("sampled"), last.pop("greedy")) == (0.7, 0.8)
    assert last == {"episodes": 16, "seconds": 6, "training": 2, "kl": 1, "gb": 2}
    accuracies = {"eval/accuracy": 0.1, "eval/accuracy_greedy": 0.2}
    (point,) = learning.points_of([line(0, 1.0, **rewards(0.5, 0.6) | accuracies)])
    assert (point["sampled"], point["greedy"]) == (0.1, 0.2)


def test_the_page_of_seeds_is_made_from_the_runs_and_all_of_them_learn(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    import seeds

    results = json.loads(seeds.RESULTS.read_text(encoding="utf-8"))
    page = seeds.page(seeds.in_order(results))
    assert seeds.PAGE.read_text(encoding="utf-8") == page
    runs = [run for by_seed in results.values() for run in by_seed.values()]
    assert all(seeds.passes(run | {"drop": 0}) for run in runs)
    # A single one fell by more than 0.05 on the way, by 0.051: the page says so.
    assert sum(not seeds.passes(run) for run in runs) <= 1
    assert max(run["drop"] for run in runs) < 0.052
    assert not seeds.passes(runs[0] | {"drop": 0.06}) and not seeds.passes(runs[0] | {"kl": 4})
    assert not seeds.passes(runs[0] | {"greedy": 0.9})
    assert seeds.largest_drop([0.5, 0.9, 0.48, 0.95, 0.42]) == pytest.approx(0.53)
    assert seeds.largest_drop([0.5, 0.42]) == pytest.approx(0.08)
    assert seeds.largest_drop([0.4, 0.5]) == 0


def test_the_plain_step_that_speed_is_compared_with_runs(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    import speed

    monkeypatch.setattr(speed, "STEPS", 1)
    sizes = {"model": "tiny", "prompts": 2, "generations": 2, "max_new_tokens": 2}
    (step,) = speed.plain(sizes | {"path": str(REPOSITORY / "tiny")}, bf16=False)
    assert 4 <= step["tokens"] <= 8 and step["rollout"] > 0 and step["update"] > 0


def test_the_page_of_the_experiments_has_the_figures_that_were_measured(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs"))
    import experiments

    page = (REPOSITORY / "docs" / "experiments.md").read_text(encoding="utf-8")
    assert page == experiments.page(), "python docs/experiments.py writes it anew"


@pytest.mark.parametrize("script", ["ppo", "grpo", "rloo"])
def test_the_names_on_the_left_of_a_header_are_variables_of_the_script(script):
    tree = ast.parse((REPOSITORY / f"{script}.py").read_text(encoding="utf-8"))
    header = ast.get_docstring(tree)
    named = re.findall(r"^  (\w+) {2,}\S", header, re.MULTILINE)
    (main,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "main")
    stores = {n.id for n in ast.walk(main) if isinstance(n, ast.Name) and type(n.ctx) is ast.Store}
    assert {"kl", "advantages", "ratio", "loss"} <= set(named) <= stores


def test_lines_that_moved_are_found_again_and_lost_ones_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "REPOSITORY", tmp_path)
    (tmp_path / "a.py").write_text("x = 1\ny = 2\ny = 2\nz = 3\n")
    moved, gone, twice = (f"`{s}` in\n[a.py, line 1](../a.py#L9)." for s in ("z =", "w", "y"))
    page, lost = renumbered(moved + gone + twice)
    assert page == "`z =` in\n[a.py, line 4](../a.py#L4)." + gone + twice
    assert lost == ["`w` is no longer in a.py", "`y` is on lines [2, 3] of a.py"]


if __name__ == "__main__":
    all_lost = []
    for path in NUMBERED:
        new, lost = renumbered(path.read_text(encoding="utf-8"))
        path.write_text(new, encoding="utf-8")
        all_lost += lost
    sys.exit("\n".join(all_lost) or 0)
