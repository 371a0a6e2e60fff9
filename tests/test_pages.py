"""The pages: commands, links, flags, metrics; the files and imports that the README speaks of."""

import ast
import dataclasses
import graphlib
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from small import byte_tokenizer, reward_model_job, save_model, small_gpt2

import grpo
import ppo
import reward_model
import rloo
from plumbing.config import TRL_NAMES, parse_flags
from plumbing.data import decode, encode_prompts
from plumbing.models import load_causal, load_tokenizer
from sampling import generate
from tasks import add_prompts
from tools import evaluate, inspect_reward

REPOSITORY = Path(__file__).parent.parent
LOOPS = {"ppo": ppo, "grpo": grpo, "rloo": rloo, "reward_model": reward_model}
SCRIPTS = LOOPS | {"evaluate": evaluate, "inspect_reward": inspect_reward}
FILES = {"README": "README.md", "running": "docs/running.md", "recipes": "docs/recipes.md"}
PAGES = {page: (REPOSITORY / file).read_text(encoding="utf-8") for page, file in FILES.items()}
PAGES |= {name: script.__doc__ for name, script in SCRIPTS.items()}


def commands(text: str) -> list[str]:
    """The commands in blocks and in sentences."""
    text = text.replace("\\\n", " ")
    blocks = re.findall(r"^ *(?:pip .* && )?(python .*)$", text, re.MULTILINE)
    return [c.split("  #")[0] for c in blocks + re.findall(r"`(python [^`]*)`", text)]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_names_a_file_and_flags_that_are_there(page):
    found = [shlex.split(c)[1:] for c in commands(PAGES[page]) if " -m " not in c]
    assert found
    for program, *flags in found:
        assert (REPOSITORY / program).is_file()
        if (script := Path(program).stem) in SCRIPTS and "--help" not in flags:
            parse_flags(SCRIPTS[script].Config, "", flags)


def block(page: str, name: str) -> str:
    """The first indented block behind a file's name."""
    found = re.search(r"\n\n((?:    .*\n|\n(?=    ))+)", page[page.index(f"`{name}`") :])[1]
    return "".join(line[4:] + "\n" for line in found.rstrip("\n").split("\n"))


SHORT = "--num_steps 1 --prompts_per_step 4 --num_eval_prompts 4 --max_new_tokens 4 --device cpu"


def test_the_first_command_runs_and_that_with_the_reader_s_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "gpt2", small_gpt2(vocab_size=257), byte_tokenizer())
    for name in ("my_prompts.jsonl", "my_rewards.py"):
        Path(name).write_text(block(PAGES["README"], name))
    of_ppo = [c for c in commands(PAGES["README"]) if c.startswith("python ppo.py")]
    for command in (of_ppo[0], next(c for c in of_ppo if "my_rewards.py" in c)):
        ppo.main([*shlex.split(command)[2:], *SHORT.split()])
    out = capsys.readouterr().out
    assert re.search(r"step 1: eval/reward [\d.]+ \(was [\d.]+\), greedy", out)
    assert "2 prompts to train on" in out
    assert len(list(Path("runs").glob("*/model/model.safetensors"))) == 2


def test_the_reward_of_countdown_reads_an_equation_and_runs_nothing_else():
    functions = {}
    exec(block(PAGES["recipes"], "countdown.py"), functions)

    def score(text: str) -> float:
        message = [{"role": "assistant", "content": text}]
        return functions["right"]([message], nums=[[3, 5, 2]], target=[16])[0]

    assert score("<answer>1</answer> so <answer> (3 + 5) * 2 </answer>") == 1
    wrong = ["16", "3 + 5 * 2", "(3 + 5) * 2 + 2 - 2", "(3 + 5 * 2", "exit()", "3(5) + 2", "35**2"]
    assert [score(f"<answer>{text}</answer>") for text in wrong] == [0] * len(wrong)


# --- Imports ---


def imports(path: Path) -> set[str]:
    """The modules that a file imports at its top, and the names that it takes, with dots."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def graph_of(*folders: str) -> dict[str, set[str]]:
    """{module: what it imports at its top}; benchmarks/ import each other by bare names."""
    files = [f for folder in folders for f in (REPOSITORY / folder).glob("*.py")]
    places = [f.relative_to(REPOSITORY).with_suffix("").parts for f in files]
    names = [".".join(p[p[0] == "benchmarks" :]) for p in places]
    return {name: imports(file) for name, file in zip(names, files, strict=True)}


def test_no_import_leads_in_a_circle_and_common_imports_nothing_of_ours():
    """Among what is loaded at once: data.py loads what few runs need in the function that does."""
    graph = graph_of(".", "plumbing", "tools")
    graph = {name: imported & set(graph) for name, imported in graph.items()}
    assert graph["common"] == set() and "common" in graph["ppo"]
    list(graphlib.TopologicalSorter(graph).static_order())


def test_the_core_needs_torch_transformers_numpy_and_tqdm_alone():
    needed = set(re.findall(r"^\w+", (REPOSITORY / "requirements.txt").read_text(), re.MULTILINE))
    assert needed == {"torch", "transformers", "numpy", "tqdm"}
    graph = graph_of(".", "plumbing", "tools")
    found = {name.partition(".")[0] for imported in graph.values() for name in imported}
    ours = {name.partition(".")[0] for name in graph}
    assert found - ours - sys.stdlib_module_names == needed


def test_every_program_that_imports_torch_imports_what_switches_cudnn_attention_off():
    """Its gradients are NaN on an H100 for some masks, and its completions wrong on a B200."""
    assert "plumbing.models" in sys.modules and not torch.backends.cuda.cudnn_sdp_enabled()
    graph = graph_of(".", "plumbing", "tools", "benchmarks")
    programs = {
        x for x in graph_of(".", "tools", "benchmarks") if {"torch", "transformers"} & graph[x]
    }
    assert programs > {"ppo", "grpo", "rloo", "reward_model", "tools.fit", "speed", "gpu"}
    for program in programs - {"common"}:
        found, new = set(), {program}
        while new:
            found |= new
            new = {x for name in new for x in graph[name] & set(graph)} - found
        assert "plumbing.models" in found, program


# --- The embedded model ---


def test_the_embedded_model_is_small_and_forgets_to_carry_from_the_units():
    assert sum(path.stat().st_size for path in (REPOSITORY / "tiny").iterdir()) <= 3e6
    rows = add_prompts()[1][:300]
    policy, tokenizer = load_causal("tiny"), load_tokenizer("tiny")
    ids, mask = encode_prompts(tokenizer, rows)
    options = {"eos_token_ids": [tokenizer.eos_token_id], "pad_token_id": 0}
    rollout = generate(policy, ids, mask, max_new_tokens=5, top_k=1, **options)
    texts = decode(tokenizer, rollout)
    errors = [int(row["answer"]) - int(text) for row, text in zip(rows, texts, strict=True)]
    carries = [sum(int(x[-1]) for x in row["prompt"].strip("=").split("+")) > 9 for row in rows]
    assert 100 < sum(carries) < 200 and [error != 0 for error in errors] == carries
    # A few of the wrong answers are other ones than those without the carry.
    assert sum(e == 10 * c for e, c in zip(errors, carries, strict=True)) >= 295


# --- Links, flags, metrics ---


MARKDOWN = [
    REPOSITORY / "README.md",
    *(page for folder in ("docs", "course") for page in (REPOSITORY / folder).rglob("*.md")),
]
METRICS = (REPOSITORY / "docs" / "metrics.md").read_text(encoding="utf-8")
# Of mkdocs, of pip, of every parser, of trl sft.
OF_OTHERS = {"strict", "no-deps", "help", "model_name_or_path", "dataset_name"}


def test_every_link_of_a_page_leads_to_a_file():
    links = 0
    for page in MARKDOWN:
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in link:
                links += 1
                assert (page.parent / link).exists(), f"{page.name} links to {link}"
    assert links > 50


def test_every_flag_that_a_page_names_is_one_of_a_script_or_tool():
    known = {f.name for script in LOOPS.values() for f in dataclasses.fields(script.Config)}
    known |= {*TRL_NAMES, *OF_OTHERS}
    for folder in ("tools", "benchmarks", "course", "tests"):
        for program in (REPOSITORY / folder).rglob("*.py"):
            known |= set(re.findall(r"\"--([\w-]+)\"", program.read_text(encoding="utf-8")))
    for page in [REPOSITORY / "README.md", *REPOSITORY.glob("docs/*.md")]:
        named = set(re.findall(r"(?<![\w-])--(\w[\w-]*)", page.read_text(encoding="utf-8")))
        assert named <= known, f"{page.name}: {named - known}"


@pytest.mark.parametrize(
    "name",
    ["grpo", *(pytest.param(x, marks=pytest.mark.slow) for x in ("ppo", "rloo", "reward_model"))],
)
def test_the_page_of_metrics_has_each_that_a_run_writes_and_no_other(name, make_job, tmp_path):
    of_runs, _, rest = METRICS.partition("## Reward models")
    row = r"^\| `([^`]+)` (?:\(([^)]+)\) )?\|"  # the scripts in brackets; without them, all
    rows = re.findall(row, of_runs, re.M)
    of_pairs = re.findall(row, rest.partition("\n## ")[0], re.M)
    where = dict(rows) | dict.fromkeys(dict(of_pairs), "reward model")
    assert len(where) == len(rows) + len(of_pairs)
    if name == "reward_model":
        written = {key for line in reward_model_job(tmp_path)() for key in line}
        own = {key for key in where if where[key] == "reward model"}
        assert own <= written <= {"step", "episode", *where}
        return
    flags = {"eval_generations": 2} | ({"dynamic_sampling": 1} if name == "grpo" else {})
    written = {key for line in make_job(LOOPS[name])(**flags) for key in line}
    assert written == {key for key in where if not where[key] or name.upper() in where[key]}
