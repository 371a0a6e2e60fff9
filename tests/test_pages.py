"""The pages: commands, links, flags, metrics; imports; the embedded model."""

import ast
import dataclasses
import graphlib
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from small import (
    EMBEDDED,
    SCRIPTS,
    byte_tokenizer,
    lines_of,
    reward_model_job,
    run_command,
    save_model,
    small_gpt2,
    task_of,
)
from transformers import AutoModelForCausalLM
from worked_step import worked_step

import ppo
import reward_model
import tasks
from grpo import group_advantages, grpo_loss
from plumbing.config import parse_flags
from plumbing.models import load, load_tokenizer
from sampling import generate

REPOSITORY = Path(__file__).parent.parent
FILES = [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/*.md"))]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in FILES}
PAGES_OF_CODE = [*REPOSITORY.glob("one_page/*.py")]
OTHERS = [REPOSITORY / folder / "README.md" for folder in ("tests", "tiny")]
TEXTS = PAGES | {path.parent.name: path.read_text(encoding="utf-8") for path in OTHERS}
TEXTS |= {f"{name}.py": script.__doc__ for name, script in SCRIPTS.items()}
TEXTS |= {f"page {x.name}": x.read_text(encoding="utf-8") for x in PAGES_OF_CODE}
OF_OTHERS = """help strict no-deps config_file nproc_per_node use_vllm model_name_or_path
dataset_name signal""".split()  # pip, mkdocs, torchrun, TRL, srun


def commands(text: str) -> list[str]:
    """The commands in blocks and in sentences, in their order."""
    text = text.replace("\\\n", " ")
    found = re.findall(r"^ *(?:pip .* && )?(python .*)$|`(python [^`]*)`", text, re.MULTILINE)
    lines = [(of_block or other).split("  #")[0] for of_block, other in found]
    return [command for line in lines for command in line.split(" && ")]


@pytest.mark.parametrize("page", TEXTS)
def test_every_command_names_a_file_and_its_flags(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no folder holds a run
    for program, *flags in (shlex.split(c)[1:] for c in commands(TEXTS[page])):
        assert program.startswith("-") or (REPOSITORY / program).is_file(), program
        script = SCRIPTS.get(program.removesuffix(".py"))  # one_page/ppo.py is none
        if script and not {"--help", "--resume"} & {*flags}:
            parse_flags(script.Config, "", EMBEDDED[script.__name__], flags)


def headings(page: Path) -> set[str]:
    """The places of a page that a link can name, as GitHub names them."""
    text = page.read_text(encoding="utf-8")
    found = [re.sub(r"\]\([^)]*\)", "", x).lower() for x in re.findall("^#+ (.+)$", text, re.M)]
    found = {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in found}
    return found | set(re.findall('<a id="([^"]+)"', text))


def test_every_link_leads_to_a_file_and_a_heading():
    others = [REPOSITORY / "CHANGELOG.md", REPOSITORY / "tests" / "README.md"]
    for page in [*FILES, *REPOSITORY.glob("course/**/*.md"), *others]:
        text = re.sub('src(?:set)?="([^"]+)"', r"](\1)", page.read_text(encoding="utf-8"))
        for link, place in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text):
            target = page.parent / link if link else page
            assert "://" in link or target.exists(), f"{page.name} links to {link}"
            if place and target.suffix == ".md":
                assert place in headings(target), f"{page.name} links to {link}#{place}"


def test_the_functions_give_the_numbers_of_the_equations():
    assert textwrap.indent(worked_step(), "    ") in PAGES["equations.md"]


LOSSES = {  # what the script's functions are given for a row of equations.md
    "GRPO": {},
    "Dr. GRPO": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "DAPO": {"loss_type": "dapo", "clip_range_high": 0.28},
    "GSPO": {"loss_type": "gspo"},
    "CISPO": {"loss_type": "cispo"},
    "MaxRL": {"loss_type": "dr_grpo", "scale_rewards": "mean"},
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_row_of_the_equations_makes_that_loss(loss):
    rows, name = {}, ""
    table = PAGES["equations.md"].partition("| loss |")[2].partition("\n\n")[0]
    for first, second in re.findall(r"^\| ?(.*?) ?\| (.*) \|$", table, re.MULTILINE):
        name = first or name
        rows.setdefault(name, {}).update({x.split()[0]: x for x in re.findall("`(.*)`", second)})
    assert rows.keys() == LOSSES.keys()
    page = (REPOSITORY / "one_page" / "grpo.py").read_text(encoding="utf-8")
    code = [x for x in ast.walk(ast.parse(page)) if isinstance(x, ast.Assign)]
    code = {ast.unparse(x.targets[0]).strip("()").split(",")[0]: ast.unparse(x) for x in code}
    names = "groups std advantages A ratio kl token_loss loss".split()
    code = {name: code[name] for name in names} | rows[loss]
    assert [*code] == names

    torch.manual_seed(0)
    N, G, T = 5, 4, 6
    scores = (torch.rand(N * G) < 0.5).double()
    mask = torch.arange(T) < torch.randint(1, T + 1, (N * G, 1))
    old, noise, other = -torch.rand(3, N * G, T).double()
    space = {"torch": torch, "N": N, "G": G, "CLIP": 0.2, "KL_COEF": 0.04, "scores": scores}
    space |= {"mask": mask, "old_logprobs": old, "ref_logprobs": other}
    space["logprobs"] = logprobs = (old + noise - noise.mean()).requires_grad_()
    exec("\n".join(code.values()), space)
    [slopes] = torch.autograd.grad(space["loss"], logprobs)

    given = dict(LOSSES[loss])
    advantages = group_advantages(scores, G, given.pop("scale_rewards", "group"))
    given |= {"clip_range": 0.2, "max_new_tokens": T, "ref_logprobs": other, "kl_coef": 0.04}
    of_script, _, _ = grpo_loss(logprobs, old, advantages, mask, **given)
    [expected] = torch.autograd.grad(of_script, logprobs)
    assert (slopes - expected).abs().max() < 1e-9 < 1e-3 < expected.abs().max()


def test_a_program_has_every_flag_of_a_page():
    known = {f.name for script in SCRIPTS.values() for f in dataclasses.fields(script.Config)}
    for folder in ("tools", "benchmarks", "course", "tests", "tiny"):
        for program in (REPOSITORY / folder).rglob("*.py"):
            known |= set(re.findall(r"\"--([\w-]+)\"", program.read_text(encoding="utf-8")))
    for page, text in PAGES.items():
        named = set(re.findall(r"(?<![\w-])--(\w[\w-]*)", text))
        assert named <= {*known, *OF_OTHERS}, f"{page}: {named - known}"


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_page_of_metrics_has_all_that_runs_write(name, make_job, tmp_path):
    parts = re.split("## Reward models|## tokens.jsonl", PAGES["metrics.md"])
    row = r"^\| `([^`]+)` (?:\(([^)]+)\) )?\|"  # the scripts in brackets; without them, all
    where, of_pairs = (dict(re.findall(row, part, re.M)) for part in parts[:2])
    if name == "reward_model":
        written = {key for line in reward_model_job(tmp_path)() for key in line}
        assert of_pairs.keys() <= written <= where.keys() | of_pairs.keys()
        return
    job = make_job(SCRIPTS[name])
    written = {key for line in job(eval_generations=2) for key in line}
    assert written == {key for key in where if not where[key] or name.upper() in where[key]}
    keys = {key for line in lines_of(job.folder / "tokens.jsonl") for key in line}
    assert keys <= {*re.findall(r"`(\w+)`", parts[2])}


def block(name: str, page: str = "README.md") -> str:
    """The first indented block of a page behind a file's name, a command or other words."""
    text = PAGES[page].partition(name)[2]
    found = re.search(r"\n\n((?:    .*\n|\n(?=    ))+)", text)[1]
    return textwrap.dedent(found).rstrip("\n") + "\n"


def test_readme_shows_the_loop_of_the_page():
    page = (REPOSITORY / "one_page" / "rloo.py").read_text(encoding="utf-8")
    assert textwrap.indent(block("its heart"), "    ") in page


def test_experiments_found_the_figures_of_think_md():
    found = json.loads((REPOSITORY / "course" / "reference.json").read_text())["experiments"]
    of_cups = [variants for name, variants in found.items() if name.startswith("cups_")]
    known = [x for variants in of_cups for figures in variants.values() for x in figures.values()]
    page = PAGES["think.md"].partition("## Four questions")[2].replace("97% ± 2%", "0.97 ± 0.02")
    figures = re.findall(r"(\d+\.(\d+)) ± (\d+\.\d+)", page)
    assert len(figures) > 25
    for mean, digits, std in figures:
        rounded = [[f"{x[key]:.{len(digits)}f}" for key in ("mean", "std")] for x in known]
        assert [mean, std] in rounded, f"{mean} ± {std}"


SMALL = "--device cpu --num_steps 1 --prompts_per_step 4 --num_eval_prompts 4 --max_new_tokens 4"
OF_PAIRS = "--device cpu --num_steps 1 --pairs_per_step 8 --num_eval_pairs 8"


@pytest.mark.slow
def test_the_commands_of_readme_run_in_its_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tools.look.curves_of", lambda folders: None)  # they take long, as pairs do
    some_pairs = [rows[:64] for rows in tasks.add_pairs()]
    monkeypatch.setattr(tasks, "add_pairs", lambda: some_pairs)
    save_model(tmp_path / "gpt2", small_gpt2(vocab_size=257), byte_tokenizer())
    for name in ("my_prompts.jsonl", "my_rewards.py"):
        Path(name).write_text(block(f"`{name}`"))
    folders = []
    for command in commands(PAGES["README.md"]):
        _, program, *flags = shlex.split(command)
        if program == "-m" or program.startswith("one_page/"):  # the tests run them elsewhere
            continue
        script = importlib.import_module(program.removesuffix(".py").replace("/", "."))
        if script in SCRIPTS.values():
            flags += (OF_PAIRS if script is reward_model else SMALL).split()
        code, text = run_command(script, flags, capsys)
        assert code == 0, f"{command}: {text}"
        if script is ppo and "my_rewards.py" in command:
            assert "2 prompts to train on" in text and "step 1: eval/reward" in text
        folders += re.findall("It writes to (.*)", text)
    assert len(folders) == len({*folders}) > 7, "some take the next number"
    assert [x for x in folders if not Path(x, "model", "model.safetensors").exists()] == []


@pytest.mark.slow
def test_a_script_runs_elsewhere_with_what_readme_copies(tmp_path):
    names = re.search("elsewhere, copy (.*?);", PAGES["README.md"], re.DOTALL)[1]
    for name in re.findall("`(.*?)`", names):
        copy = shutil.copytree if name.endswith("/") else shutil.copy
        copy(REPOSITORY / name, tmp_path / name)
    subprocess.run([sys.executable, "grpo.py", *SMALL.split()], cwd=tmp_path, check=True)
    assert lines_of(tmp_path / "runs" / "grpo-tiny-add-s0" / "metrics.jsonl")


def test_rewards_of_pages_score_chats_and_texts_alike():
    columns, text, found = {"answer": ["#### 4"]}, "a b c d a b c d #### 4", []
    others = {"math_verify"} if importlib.util.find_spec("math_verify") else set()
    for code in re.findall(r"(?:^    .*\n|^\n(?=    ))+", "\n".join(PAGES.values()), re.M):
        if not re.search(r"def .*\bcompletions\b", code):
            continue
        assert "text_of" in code, code
        used = {*re.findall("^    (?:from|import) (.*?)[ .\n]", code, re.M)}
        if used <= {"re", "tasks"} | others:
            exec(textwrap.dedent(code), space := {})
            for reward in (f for name, f in space.items() if f"def {name}(completions" in code):
                chat = [{"role": "assistant", "content": text}]
                scores = [reward(completions=[x], **columns) for x in (text, chat)]
                assert scores[0] == scores[1] != [0], code
                found.append(reward.__name__)
    of_others = {"same_value"} if others else set()
    assert {*found} == {"names_it", "no_repetition", "strict"} | of_others


# --- Imports ---


def graph_of(*folders: str) -> dict[str, set[str]]:
    """{module: the modules that it imports at its top, and the names that it takes, with dots}."""
    graph = {}
    for file in (file for folder in folders for file in (REPOSITORY / folder).glob("*.py")):
        name = ".".join(file.relative_to(REPOSITORY).with_suffix("").parts)
        names = graph[name] = set()
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return graph


IMPORTS = graph_of(".", "plumbing", "tools")
OURS = {name: imported & {*IMPORTS} for name, imported in IMPORTS.items()}


def test_imports_lead_down_from_scripts_to_common():
    list(graphlib.TopologicalSorter(OURS).static_order())  # it refuses a circle
    assert OURS["common"] == set() and OURS["forward"] == {"common"}
    assert OURS["sampling"] == {"common", "forward"}
    assert [name for name, xs in OURS.items() if any(x.startswith("tools.") for x in xs)] == []


def libraries(graph: dict[str, set[str]]) -> set[str]:
    found = {name.partition(".")[0] for imported in graph.values() for name in imported}
    return found - {name.partition(".")[0] for name in graph} - sys.stdlib_module_names


def test_the_program_imports_four_libraries_and_a_page_two():
    needed = set(re.findall(r"^\w+", (REPOSITORY / "requirements.txt").read_text(), re.MULTILINE))
    assert libraries(IMPORTS) <= needed == {"torch", "transformers", "numpy", "tqdm"}
    assert libraries(graph_of("one_page")) == {"torch", "transformers"}
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in PAGES_OF_CODE]
    assert max(lines) < 120 and sum(lines) <= 644


def test_each_script_switches_the_attention_of_cudnn_off():
    """Its gradients are NaN on an H100."""
    assert [x for x in SCRIPTS if "forward" not in OURS[x] | OURS["plumbing.models"]] == []
    assert not torch.backends.cuda.cudnn_sdp_enabled()


# --- The embedded model ---


def test_the_embedded_model_forgets_to_carry_from_the_units():
    assert sum(path.stat().st_size for path in (REPOSITORY / "tiny").iterdir()) <= 3e6
    task = task_of()
    task.tokenizer, rows = load_tokenizer("tiny"), task.heldout[:300]
    task.eos_token_ids, task.tokens = [task.tokenizer.eos_token_id], {}
    options = {"eos_token_ids": task.eos_token_ids, "pad_token_id": 0, "max_new_tokens": 5}
    policy = load(AutoModelForCausalLM, "tiny")
    _, texts = task.score(rows, generate(policy, *task.encode(rows), top_k=1, **options))
    errors = [int(row["answer"]) - int(text) for row, text in zip(rows, texts, strict=True)]
    carries = [sum(int(x[-1]) for x in row["prompt"].strip("=").split("+")) > 9 for row in rows]
    assert 100 < sum(carries) < 200 and [error != 0 for error in errors] == carries
    # A few of the wrong answers are other ones than those without the carry.
    assert sum(e == 10 * c for e, c in zip(errors, carries, strict=True)) >= 295
