"""docs/metrics.md and docs/debugging.md: each key, flag, command and quoted line is real."""

import json
import re
import shlex
from pathlib import Path

import pytest
from small import reward_model_job

import grpo
import ppo
import reward_model
import rloo
from plumbing.advice import warnings_about
from plumbing.config import parse_flags
from plumbing.errors import InputError
from tools import inspect_reward

SCRIPTS = {"ppo": ppo, "grpo": grpo, "rloo": rloo}
ALL = SCRIPTS | {"reward_model": reward_model}
PAGES = (
    Path(__file__).parents[1] / f"docs/{n}.md" for n in ("metrics", "debugging", "evidence/errors")
)
RESULTS = Path(__file__).parents[1] / "benchmarks" / "learning_metrics.json"
METRICS, DEBUGGING, ERRORS = (page.read_text("utf-8") for page in PAGES)
ROWS = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", METRICS.partition("## tokens.jsonl")[0], re.M)


def parses(script: str, args: str) -> bool:
    try:
        return bool(parse_flags(ALL[script].Config, "", shlex.split(args)))
    except InputError as e:
        return "this machine, with this torch, has" in str(
            e
        )  # the flag is right, the device absent


def test_the_page_has_each_key_of_each_script_once_and_no_other(make_job, tmp_path):
    assert len(ROWS) == len({key for key, _ in ROWS})
    for name, script in SCRIPTS.items():
        options = {"eval_generations": 2} | ({"dynamic_sampling": 1} if name == "grpo" else {})
        logged = {key for line in make_job(script)(**options) for key in line}
        assert logged == {key for key, where in ROWS if where == "all" or name.upper() in where}
    metrics = reward_model_job(tmp_path)()
    shared = set("eval/accuracy grad_norm lr time/update tokens_per_second memory/peak_gb".split())
    own = {key for key, where in ROWS if where == "reward model"}
    assert {key for line in metrics for key in line} == own | shared | {"step", "episode"}
    groups = "|".join({key.partition("/")[0] for key, _ in ROWS if "/" in key})
    assert set(re.findall(rf"`((?:{groups})/\w+)`", DEBUGGING)) <= {key for key, _ in ROWS}


def test_each_metric_beside_one_of_trl_is_a_metric_here():
    page = (Path(__file__).parents[1] / "docs/evidence/outgrow.md").read_text("utf-8")
    keys = re.findall(r"^\| `([^`]+)` \|", page.partition("\n## Metrics")[2], re.MULTILINE)
    assert len(keys) > 30 and set(keys) <= {key for key, _ in ROWS}


def test_flags_and_commands_are_those_of_the_scripts(capsys):
    text, flags = METRICS + DEBUGGING, re.compile(r"--(\w+)").findall
    fields = {name for script in ALL.values() for name in script.Config.__dataclass_fields__}
    assert set(flags(text)) <= fields
    with pytest.raises(SystemExit):
        inspect_reward.main(["--help"])
    of_inspection = flags(capsys.readouterr().out)
    for name, args in re.findall(r"`python (tools/inspect_reward|\w+)\.py([^`]*)`", text):
        if name == "tools/inspect_reward":
            assert set(flags(args)) <= set(of_inspection), args
        else:
            assert parses(name, args), args
    for args in re.findall(r"`(--\w+\s[^`]+)`", text):  # with values; or a message quoted
        assert any(parses(name, args) for name in ALL) or args.startswith("--resume goes"), args


def test_quoted_lines_are_what_a_run_says():
    keys = "objective/kl val/ratio_max_dev_first reward/frac_flat_groups length/truncated_frac"
    bad = dict(zip(keys.split(), (12.0, 0.3, 0.6, 0.6))) | {"objective/scores": 1.0}
    histories = [bad] * 5, [bad | {"objective/kl": -0.2 - i / 100} for i in range(10)]
    said = {text for history in histories for _, text in warnings_about(history, bf16=False)}
    assert set(re.findall(r"^    warning, step \d+: (.*)$", DEBUGGING, re.MULTILINE)) == said
    errors = re.findall(r"^    error: (.*)$", DEBUGGING, re.MULTILINE)
    assert errors and all(f"| {line} |" in ERRORS for line in errors)


def test_each_figure_that_is_said_to_be_of_runs_is_in_the_results_of_those_runs():
    """As lowest, highest or median value, at step 0, in the last third or in all steps."""
    results = json.loads(RESULTS.read_text())
    clauses = 0
    for line in METRICS.split("\n"):
        cells = line.split(" | ")
        name = cells[0].strip("|` ")
        for clause in re.findall(r"([^()]*)\(runs\)", cells[3] if len(cells) > 3 else ""):
            clauses += 1
            known = [x for part in results.values() for x in part.get(name, {}).values()]
            without_names = re.sub(r"`[^`]*`|step 0", "", clause)
            for figure in re.findall(r"-?\d[\d.]*(?:e-?\d+)?", without_names):
                digits = figure.partition("e")[0].partition(".")[2]
                unit = 10 ** (int(figure.partition("e")[2] or 0) - len(digits))
                near = [x for x in known if abs(x - float(figure)) <= 0.5001 * unit]
                assert near, f"{name}: {figure} is no figure of the runs"
    assert clauses >= 15
