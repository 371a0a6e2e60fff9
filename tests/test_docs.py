"""The pages against the code: references to lines, names and tests in docs/, their length, tables
that are made from data, every link, and the headers of the scripts.

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
DOCS = REPOSITORY / "docs"
DETAILS, EVIDENCE = DOCS / "details.md", DOCS / "evidence" / "details.md"
NUMBERED = [path for path in sorted(DOCS.rglob("*.md")) if ".py#L" in path.read_text("utf-8")]
ARCHITECTURE = DOCS / "architecture.md"
ENTRY = re.compile(r"^### (\d+)\. (\S.*)$", re.MULTILINE)
# `name`, `name` and `name` in [file.py](../folder/file.py); [`file.name`](../folder/file.py)
NAMES = re.compile(r"((?:`\w+`(?:, | and ))*`\w+`) in \[[\w.]+\]\(\.\./([\w/.]+)\)")
PLACE = re.compile(r"\[`(\w+)\.(\w+)`\]\(\.\./((?:\w+/)*\1\.py)\)")
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


@pytest.mark.parametrize("path", [EVIDENCE, ARCHITECTURE], ids=lambda path: path.parent.stem)
def test_each_test_that_is_named_exists(path):
    page = path.read_text(encoding="utf-8")
    named = TEST.findall(page)
    assert len(named) == page.count("::"), "a test named in another form is not checked"
    for file, name in set(named):
        assert lines_with(f"def {name}(", file), f"{file} has no {name}"


@pytest.mark.parametrize("path", [DETAILS, ARCHITECTURE], ids=lambda path: path.stem)
def test_each_name_is_defined_in_the_file_that_the_page_says(path):
    page = path.read_text(encoding="utf-8")
    found = [(name, file) for _, name, file in PLACE.findall(page)]
    assert len(found) == page.count("[`"), "a place in another form is not checked"
    for several, file in NAMES.findall(page):
        found += [(name, file) for name in re.findall(r"`(\w+)`", several)]
    assert len(found) > 20
    for name, file in found:
        text = (REPOSITORY / file).read_text(encoding="utf-8")
        defined = rf"^(def {name}\(|class {name}\b|{name} = )"
        assert re.search(defined, text, re.MULTILINE), f"{file} does not define {name}"


def test_the_page_of_the_architecture_names_every_file():
    page = ARCHITECTURE.read_text(encoding="utf-8")
    assert len(page.split("\n")) <= 90
    program = [p for part in ("", "plumbing/", "tools/") for p in REPOSITORY.glob(f"{part}*.py")]
    missing = [p.name for p in program if p.name not in page and p.name != "__init__.py"]
    assert program and not missing, missing


def test_there_are_fifty_details_at_most_and_each_says_what_happens_without_it_and_where_it_is():
    page = DETAILS.read_text(encoding="utf-8")
    assert len(page.encode()) <= 25_000
    numbers = []
    for section in page.split("\n## ")[1:]:
        _, *pairs = re.split(ENTRY, section)
        numbers += (these := [int(number) for number in pairs[::3]])
        title = section.partition("\n")[0]
        contents = f"[{title}](#{title.lower().replace(' ', '-')}) {these[0]} to {these[-1]}"
        assert contents in page, contents
        for number, entry in zip(these, pairs[2::3], strict=True):
            assert "**Without:**" in entry, f"entry {number} doesn't say what happens without it"
            assert PLACE.search(entry.partition("**Where:**")[2]), f"entry {number} names no place"
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) <= 50


def test_each_detail_has_a_line_and_a_test_under_its_number():
    details = re.findall(ENTRY, DETAILS.read_text(encoding="utf-8"))
    _, *rest = re.split(ENTRY, EVIDENCE.read_text(encoding="utf-8"))
    entries = list(zip(rest[::3], rest[1::3], strict=True))
    assert entries[: len(details)] == details
    assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
    for number, entry in zip(rest[::3], rest[2::3], strict=True):
        assert REFERENCE.search(entry), f"entry {number} names no line"
        assert TEST.search(entry), f"entry {number} names no test"


def test_the_pages_that_are_read_have_15000_words_at_most():
    """Those of docs/evidence/ are looked up, not read. What has no letter or digit, as the bars of
    a table, is no word.
    """
    word = re.compile(r"\S*\w\S*")
    words = {path.name: len(word.findall(path.read_text("utf-8"))) for path in DOCS.glob("*.md")}
    assert sum(words.values()) <= 15_000, words


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
    assert set(results) == set(learning.JOBS)
    for job in results:
        curves_of = learning.points_by_command(results, job)
        assert {len(curves) for curves in curves_of.values()} == {learning.JOBS[job].seeds}
        assert job == "rate" or learning.table(learning.JOBS[job], curves_of, short=True) in page
    hint = "python benchmarks/learning.py --draw writes it anew"
    assert learning.PAGE.read_text(encoding="utf-8") == learning.evidence(results), hint


def test_the_tables_of_speed_and_memory_are_those_of_their_results(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    import memory
    import speed

    page, evidence = (path.read_text(encoding="utf-8") for path in (memory.PAGE, memory.EVIDENCE))
    times = json.loads(speed.RESULTS.read_text(encoding="utf-8"))
    assert speed.ratios(times) in page and speed.table(times) in evidence
    peaks = json.loads(memory.RESULTS.read_text(encoding="utf-8"))
    assert memory.measured_table(peaks) in evidence
    # The first model's estimates are made again; each takes seconds.
    assert memory.estimated_table([*memory.MODELS][:1]) in page
    assert all(f"\n| {name} | " in page for name in memory.MODELS)


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


def test_the_tables_of_bugs_and_of_faults_have_every_one_of_their_lists():
    import faults
    import mutations

    evidence = REPOSITORY / "docs" / "evidence"
    text = (evidence / "errors.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ", 2) for line in text.splitlines() if line[:2] == "| "][1:]
    assert [row[:2] for row in rows] == [[case.what, str(case.code)] for case in faults.CASES]
    for (what, _, line), case in zip(rows, faults.CASES, strict=True):
        assert case.message in line.replace("\\|", "|"), f"{what}: python tests/faults.py"
    bugs = [(file, bug) for file, _, _, bug in mutations.MUTATIONS]
    there = mutations.earlier()
    assert [row for row in there if row in bugs] == bugs, "python tests/mutations.py WORD"
    assert set(mutations.PAIRS) <= set(there)


def test_the_plain_step_that_speed_is_compared_with_runs(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    import speed

    monkeypatch.setattr(speed, "STEPS", 1)
    sizes = {"model": "tiny", "prompts": 2, "generations": 2, "max_new_tokens": 2}
    (step,) = speed.plain(sizes | {"path": str(REPOSITORY / "tiny")}, bf16=False)
    assert 4 <= step["tokens"] <= 8 and step["rollout"] > 0 and step["update"] > 0


def test_the_pages_of_the_experiments_have_the_figures_that_were_measured(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs"))
    import experiments

    hint = "python docs/experiments.py writes it anew"
    assert experiments.PAGE.read_text(encoding="utf-8") == experiments.page(), hint
    assert experiments.EVIDENCE_PAGE.read_text(encoding="utf-8") == experiments.evidence(), hint
    for claim in experiments.CLAIMS:
        assert (experiments.DOCS / claim.picture).stat().st_size < 300_000


def test_a_figure_in_the_words_of_an_experiment_is_looked_up(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs"))
    import experiments

    half, many = {"mean": 0.456, "std": 0.04}, {"mean": 5195.2, "std": 100.2}
    below = {"mean": -0.0273, "std": 0.003}
    found = {"lab": {"a": {"x": half, "n": many}, "b": {"x": below}}}
    text = experiments.filled("{a|x}, {a|=x}, {b|x}, {a|n}, {lab/a|=n}", "lab", found)
    assert text == "0.46 ± 0.04, 0.46, \u22120.027 ± 0.003, 5,195 ± 100, 5,195"
    with pytest.raises(KeyError):
        experiments.filled("{a|y}", "lab", found)


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
