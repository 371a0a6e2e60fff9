"""Metrics of a step, warnings, evaluation, curves: each number is what its definition says."""

import json
import math
import os
import statistics
from types import SimpleNamespace

import pytest
import torch
from matplotlib.figure import Figure
from small import EOS, letter_tokenizer, make_rollout, small_gpt2

import ppo
from common import is_flat
from plumbing import curves, metrics
from plumbing.data import Task
from plumbing.metrics import Meter

nan = math.nan
KL, SCORE, SAMPLER = "objective/kl", "objective/scores", "val/sampler_kl"
FLAT, SOLVED = "reward/frac_flat_groups", "reward/frac_solved_groups"
RATIO = "val/ratio_max_dev_first"


def test_of_constant_returns_no_variance_is_explained():
    mask = torch.tensor([[1, 1, 1, 0]]).bool()
    returns = torch.tensor([[0.1, 0.1, 0.1, 99.0]])
    assert metrics.explained_variance(torch.arange(4.0).view(1, 4), returns, mask) == 0


def test_the_largest_deviation_is_that_of_the_first_minibatch():
    rows, mask = torch.tensor([[0], [1], [2], [3]]), torch.tensor([[True, False]] * 4)
    old = torch.zeros(4, 2)
    meter, x = Meter(make_rollout([[1]] * 4, [[5, EOS]] * 4)), torch.zeros(1, 2, requires_grad=True)
    for row, ratio in zip(rows, (1.1, 0.5, 1.2, 9.0)):
        ratio = torch.tensor([[ratio, nan]]) * x.exp()
        meter.add_policy(row, x, old, ratio, x > 0, mask)
        meter.add_share("loss", x.sum())
        if row > 1:
            meter.end_mini_batch(torch.tensor(1.0))
    assert meter.results()[RATIO] == 0.5
    kept = [*meter.sums.values(), *meter.last_pass.values()]
    assert not any(total.requires_grad for total in kept)


def test_a_mean_is_added_up_in_float32():
    totals, ones = metrics.Totals(), torch.ones(1001, dtype=torch.bfloat16)  # which can't hold 1001
    totals.add("ones", ones), totals.add("none", ones, ones < 1)
    assert totals.results() == {"ones": 1, "none": 0}


def test_missing_scores_are_left_out_of_means_and_groups():
    scores = torch.tensor([1.0, 3, nan, 5, 5, 5, 0, 0, 6, nan, nan, nan])
    kl = torch.arange(24.0).view(12, 2)
    meter = Meter(make_rollout([[1]] * 12, [[5, EOS]] * 11 + [[EOS]]))
    meter.objective(scores, kl, 0.5)
    meter.groups(scores, 3)
    expected = {
        KL: sum(range(23)) / 12,  # 23 is that of padding
        SCORE: 25 / 8,
        "objective/rlhf_reward": (scores - 0.5 * kl.sum(1)).nanmean().item(),
        # With Bessel's correction; no score has no spread.
        "reward/std_within_group": (2**0.5 + 0 + 12**0.5 + 0) / 4,
        FLAT: 0.5,
        SOLVED: 0,  # 6 is higher than 5, 5, 5
    }
    found = {name: x for name, x in meter.results().items() if name in expected}
    assert found == pytest.approx(expected)
    groups = torch.tensor([[nan, 2.0], [1.0, 1 + 1e-6], [0.0, 1e-9]])
    assert is_flat(groups).tolist() == [[1], [0], [0]], "a tiny difference teaches"


# --- Warnings ---

STEP = {  # what is warned of is at its limit: no warning yet
    KL: 10.0,
    "objective/kl_token": 2.0,
    SCORE: 0.5,
    RATIO: 0.01,
    SAMPLER: 0.001,
    "policy/entropy_avg": 0.01,
    FLAT: 0.5,
    "length/truncated_frac": 0.5,
}
ABOVE = {name: 1.04 * x for name, x in STEP.items()}
NO_REWARD, SAME = {SCORE: nan, FLAT: 1.0}, {FLAT: 1.0, SOLVED: 1.0}
CONSTANT = [{SCORE: 0.5}] * 5


def around(mean, spread):
    return [{KL: mean + spread * (-1) ** i} for i in range(10)]


@pytest.mark.parametrize(
    ("steps", "names"),
    [
        ([{}], ""),
        ([ABOVE], "large KL, ratio, sampler, flat groups, truncated"),
        # Four errors of the mean are 0.027 and 0.040, and -0.02 is allowed.
        ([{}, *around(-0.05, 0.02)], "negative KL"),
        (around(-0.05, 0.03), ""),
        (around(-0.02, 0), ""),
        # 12 nats are much for 80 tokens and little for 120.
        ([{KL: 12.0, "objective/kl_token": 0.15}], "large KL"),
        ([{KL: 12.0, "objective/kl_token": 0.1}], ""),
        ([{}] * 11 + [{KL: math.inf, "objective/kl_token": math.inf}], "large KL"),
        # Prompts that are solved are no fault: equal scores that are the highest.
        ([{FLAT: 0.6, SOLVED: 0.31}], ""),
        ([{FLAT: 0.6, SOLVED: 0.3}], "flat groups"),
        ([SAME], "flat groups"),
        ([{}, SAME | {SCORE: 0.0}], "flat groups"),
        ([NO_REWARD, {}, SAME], ""),
        ([NO_REWARD | {KL: 10.5}], "large KL, no reward"),
        (CONSTANT[:4], ""),
        (CONSTANT, "constant reward"),
        ([{}, *CONSTANT], ""),  # nothing is higher
        # The lowest, or the highest, is neither the first nor the one before.
        ([{SCORE: 0.5}, {SCORE: 0.1}, {SCORE: 0.4}, SAME], ""),
        ([{}, {SCORE: 0.6}, *CONSTANT], "constant reward"),
        # One token that rounding makes rare, and three of the last five steps.
        ([{}, {}, {}, {}, {SAMPLER: 0.038}], ""),
        ([{}, {}, {}, *[{SAMPLER: 0.03}] * 3], "sampler"),
    ],
)
def test_each_warning_has_its_cause(steps, names):
    history = [STEP | {SCORE: i / 10} | step for i, step in enumerate(steps)]
    found = metrics.warnings_about(history, bf16=False)
    assert ", ".join(name for name, _ in found) == names
    assert not any("\n" in line for _, line in found)
    for step in history:  # what rounding to bfloat16 may be
        step |= {RATIO: 50 * step[RATIO], SAMPLER: 10 * step[SAMPLER]}
    found = metrics.warnings_about(history, bf16=True)
    assert ", ".join(name for name, _ in found) == names


def test_a_constant_reward_has_the_cause_that_metrics_show():
    for step, cause in (
        ({"policy/entropy_avg": 0.009}, "the policy is destroyed"),
        ({KL: 10.5}, "the policy is destroyed"),
        ({}, "is the reward function constant"),
        ({KL: None}, "is the reward function constant"),
    ):
        *_, (name, line) = metrics.warnings_about([STEP | step] * 10, bf16=False)
        assert name == "constant reward" and cause in line, step


def test_a_hacked_reward_is_warned_of():
    """As measured with the number of nines as the reward, and what chance or success gives."""
    names, start = ("eval/reward", "eval/accuracy", "eval/accuracy_se"), (0.15, 0.45, 0.016)
    for steps, warned in (
        ([start, (4.99, 0.0, 0.0)], True),
        # Above the start, and hacked since, but not since the last evaluation.
        ([start, (0.3, 0.9, 0.01), (0.25, 0.81, 0.01), (0.6, 0.8, 0.012)], True),
        ([start, (0.16, 0.4, 0.016)], False),  # 2.2 standard errors of the difference
        ([start, (0.14, 0.1, 0.01)], False),  # both fall: no hack
        ([start, (0.9, 0.9, 0.01)], False),
        ([start, (0.9, None, None)], False),
        ([(None, 0.4, 0.016), (0.9, 0.1, 0.016)], False),
        ([(0.1, 1.0, nan), (0.9, 0.0, nan)], False),  # of a single prompt
    ):
        *earlier, now = (dict(zip(names, step)) for step in steps)
        found = metrics.warnings_of_evaluation(now, [{}, *earlier])
        assert [name for name, _ in found] == ["hacked reward"] * warned, steps
    pairs = {"eval/accuracy": 0.5, "eval/loss": 0.7}  # of a reward model
    assert metrics.warnings_of_evaluation(pairs, [pairs | {"eval/accuracy": 0.9}]) == []


def test_a_run_gives_each_warning_once(make_job, monkeypatch, capsys):
    earlier = []

    def warn_of_all(now, before):
        earlier.append([m.get("eval/reward") for m in before])
        return [("mine", f"number {len(earlier)}")]

    monkeypatch.setattr("plumbing.run.warnings_of_evaluation", warn_of_all)
    job = make_job(ppo)  # always the same tokens, to the limit
    lines = job(num_steps=2, eval_every=1, temperature=0.001)
    first, second, _ = (x["eval/reward"] for x in lines)
    assert earlier == [[first], [first, first], [first, first, second]]
    output, kept = capsys.readouterr().out, (job.folder / "warnings.jsonl").read_text()
    for text in (output, kept):
        assert text.count("of the completions were cut at --max_new_tokens") == 1
    assert "warning, step 0: number 1\n" in output and "groups" not in output


# --- Evaluation ---


def has_an_a(completions, **columns):
    return [float("a" in text) for text in completions]


def evaluated(K, reward, verifier, seed=0):
    """An evaluation of seven prompts, and its completions as (7, K) lists."""
    rows = [{"prompt": prompt} for prompt in ("x", "yy y", "zzz", "w", "the", "a b", "q")]
    options = {"tokenizer": letter_tokenizer(), "eos_token_ids": [19]}
    task = Task([], rows, [reward], verifier=verifier, **options)
    config = SimpleNamespace(num_eval_prompts=100, eval_generations=K, seed=seed)
    sampling = {"max_new_tokens": 6, "temperature": 0.7, "eos_token_ids": [19]}
    sampling |= {"pad_token_id": 0, "max_rows": 8}
    found = metrics.evaluate(config, small_gpt2(vocab_size=20).eval(), task, sampling)
    texts = [record["completion"] for record in found.records]
    return found, [texts[i : i + K] for i in range(0, len(texts), K)]


@pytest.mark.filterwarnings("error:.*degrees of freedom")
@pytest.mark.parametrize("missing", [0, 1])
def test_each_metric_of_k_completions_is_as_defined(missing):
    """The first prompt may have no reward, and no verdict on one of its four completions."""

    def lengths(prompts, completions):
        return [None if missing and p == "x" else len(c) for p, c in zip(prompts, completions)]

    def verdicts(completions):
        found = [max(x, 0.1) for x in has_an_a(completions)]  # the form counts a bit
        return [None] * missing + found[missing:]

    found, texts = evaluated(4, lengths, verdicts)
    right = [[float("a" in text) for text in of_one] for of_one in texts[missing:]]
    means = [statistics.mean(max(x, 0.1) for x in row) for row in right]
    expected = {
        "eval/reward": statistics.mean(len(x) for of_one in texts[missing:] for x in of_one),
        "eval/accuracy": statistics.mean(means),
        "eval/accuracy_se": statistics.stdev(means) / len(means) ** 0.5,
        "eval/pass_at_k": statistics.mean(map(max, right)),
    }
    assert {name: found.metrics[name] for name in expected} == pytest.approx(expected)
    assert found.headline == ["eval/reward", "eval/accuracy", "eval/pass_at_k"]
    assert (found.records[0]["score"] is None) == missing
    assert found.lines[0].startswith("    nan  x ->") == missing
    assert math.isnan(metrics.mean_and_error(torch.ones(1, 2))[1]), "the error of one prompt"


def test_what_nothing_judges_is_unknown():
    same, _ = evaluated(2, has_an_a, has_an_a)
    assert same.headline == ["eval/reward", "eval/pass_at_k"], "accuracy would say the same"
    unknown, _ = evaluated(1, lambda completions: [None] * len(completions), None)
    assert {*unknown.metrics.values()} == {None} and len(unknown.metrics) == 5
    assert unknown.headline == ["eval/reward"]


def test_the_seed_changes_the_sampled_evaluation_alone():
    no_reward = lambda completions: [None] * len(completions)  # noqa: E731
    first, second = (evaluated(1, no_reward, has_an_a, seed)[0] for seed in (0, 1))
    assert first.headline == ["eval/reward", "eval/accuracy"]
    assert first.metrics["eval/accuracy_greedy"] == second.metrics["eval/accuracy_greedy"]
    assert first.records != second.records


def test_a_printed_sample_shows_the_end_of_its_prompt():
    chat = [{"content": "Be brief."}, {"content": "What is left of it? " * 5 + "\nAll of it"}]
    rows, texts = [{"prompt": "a" * 45}, {"prompt": chat}], ["x", "y", "unbelievable " * 9, "z"]
    records, lines = metrics.sample_records(rows, texts, torch.tensor([1.0, 0.0, nan, 2.0]))
    shown = "... left of it? What is left of it? All of it -> " + "unbelievable " * 2 + "..."
    assert lines == [f"   1.00  {'a' * 45} -> x", f"    nan  {shown}"]
    prompts = ["a" * 45, "a" * 45, chat, chat]
    assert [[*x.values()] for x in records] == [*map(list, zip(prompts, texts, [1, 0, None, 2]))]
    _, lines = metrics.sample_records([{"prompt": "a" * 46}], ["x"], torch.ones(1))
    assert lines == [f"   1.00  ... {'a' * 41} -> x"]
    # What a model writes rules no terminal: it may be ESC, and a title.
    _, lines = metrics.sample_records([{"prompt": "a\x07"}], ["\x1b]0;b\x9b é"], torch.ones(1))
    assert lines == [r"   1.00  a\x07 -> \x1b]0;b\x9b é"]


def test_the_headline_shows_numbers_beside_those_of_step_0():
    first = {"eval/reward": 0.25, "eval/reward_greedy": None}
    now = {"eval/reward": 0.75, "eval/reward_greedy": 1.0}
    assert metrics.headline(0, ["eval/reward"], first, first) == "eval/reward 0.250, greedy unknown"
    expected = "eval/reward 0.750 (was 0.250), greedy 1.000 (was unknown)"
    assert metrics.headline(1, ["eval/reward"], now, first) == expected
    known = {SCORE: 0.456, "length/mean": 11.6, "tokens_per_second": 340.4}
    bars = [Meter.progress(known | {KL: kl}) for kl in (0.123, None)]
    assert bars == [f"reward 0.46, kl {kl}, length 12, 340 tok/s" for kl in ("0.12", "off")]


# --- Curves ---


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """drawn({name of a run: its lines}): the Axes of each panel."""
    figures = []
    monkeypatch.setenv("MPLBACKEND", "of_a_notebook")  # matplotlib can't be imported with it
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: figures.append(figure))

    def drawn(runs):
        for name, lines in runs.items():
            (tmp_path / name).mkdir(parents=True)
            # The last line is half there: the run is writing it.
            text = "\n".join([*map(json.dumps, lines), '{"st'])
            (tmp_path / name / "metrics.jsonl").write_text(text)
        curves.draw_curves([tmp_path / name for name in runs], tmp_path / "curves.png")
        assert "MPLBACKEND" not in os.environ
        return figures.pop().axes

    return drawn


def test_seeds_of_a_job_have_one_colour_and_name(drawn):
    seeds = {"ppo-add-s0": 0, "ppo-add-s11": 11, "grpo-add-s0": 0, "grpo-2-add-s0": 0}
    runs = {x: [{"step": i, SCORE: i + n} for i in range(4)] for x, n in seeds.items()}
    axes, *_ = drawn(runs)
    assert axes.lines[1].get_xydata().tolist() == [[0, 11], [1, 12], [2, 13], [3, 14]]
    *colours, other = [line.get_color() for line in axes.lines]
    assert colours == [curves.COLOURS[x] for x in ("ppo", "ppo", "grpo")] and other not in colours
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["ppo-add", "grpo-add", "grpo-2-add"]
    axes, *_ = drawn({f"{folder}/ppo-s0": runs["ppo-add-s0"] for folder in "ab"})
    assert len({line.get_color() for line in axes.lines}) == 2, "of one name in two folders"


def test_a_dollar_in_a_folders_name_begins_no_formula(tmp_path):
    (folder := tmp_path / "$_{$").mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 0, "objective/scores": 1}\n')
    curves.draw_curves([folder], tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").stat().st_size > 0


PAIRS, SCORES = {"loss/pairs": 0.7}, {SCORE: 1.0}
BOTH = {"eval/accuracy": 0.4, "eval/accuracy_greedy": 0.5, "eval/reward": 9.0}


@pytest.mark.parametrize(
    ("runs", "panels", "curves"),  # of the panel of evaluations: dashed? and the numbers
    [
        ([SCORES | BOTH], curves.PANELS, {"-": [0.4] * 2, "--": [0.5] * 2}),
        # The reward, where nothing is right or wrong.
        ([SCORES | BOTH | dict.fromkeys([*BOTH][:2])], curves.PANELS, {"-": [9.0] * 2}),
        ([PAIRS | {"eval/accuracy": 0.4}, SCORES], curves.PANELS, {"-": [0.4] * 2}),
        ([PAIRS, PAIRS, {}], curves.OF_REWARD_MODELS, {}),  # one has no line yet
    ],
)
def test_panels_are_those_of_the_kind_of_run(runs, panels, curves, drawn):
    """Steps 0 and 2 have an evaluation, step 1 has none."""
    lines = [[{"step": 0} | x, {"step": 1}, {"step": 2} | x] if x else [] for x in runs]
    axes = drawn({str(n): x for n, x in enumerate(lines)})
    assert [x.get_title() for x in axes] == [*panels]
    found = [line for x in axes if x.get_title().startswith("held out") for line in x.lines]
    assert {x.get_linestyle(): list(x.get_ydata()) for x in found} == curves
    assert {tuple(x.get_xdata()) for x in found} <= {(0, 2)}
