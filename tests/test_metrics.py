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
from plumbing import metrics
from plumbing.data import Task
from plumbing.metrics import Meter


def test_of_constant_returns_no_variance_is_explained():
    mask = torch.tensor([[1, 1, 1, 0]]).bool()
    returns = torch.tensor([[0.1, 0.1, 0.1, 99.0]])
    assert metrics.explained_variance(torch.arange(4.0).view(1, 4), returns, mask) == 0


def test_the_largest_deviation_is_that_of_the_first_minibatch():
    rows, mask = torch.tensor([[0], [1], [2], [3]]), torch.tensor([[True, False]] * 4)
    old = torch.zeros(4, 2)
    meter, x = Meter(make_rollout([[1]] * 4, [[5, EOS]] * 4)), torch.zeros(1, 2, requires_grad=True)
    for row, ratio in zip(rows, (1.1, 0.5, 1.2, 9.0)):
        ratio = torch.tensor([[ratio, torch.nan]]) * x.exp()
        meter.add_policy(row, x, old, ratio, x > 0, mask)
        meter.add_share("loss", x.sum())
        if row > 1:
            meter.end_mini_batch(torch.tensor(1.0))
    assert meter.results()["val/ratio_max_dev_first"] == 0.5
    kept = [*meter.sums.values(), *meter.last_pass.values()]
    assert not any(total.requires_grad for total in kept)


def test_a_mean_is_added_up_in_float32():
    totals, ones = metrics.Totals(), torch.ones(1001, dtype=torch.bfloat16)  # which can't hold 1001
    totals.add("ones", ones), totals.add("none", ones, ones < 1)
    assert totals.results() == {"ones": 1, "none": 0}


def test_missing_scores_are_left_out_of_means_and_groups():
    nan = torch.nan
    scores = torch.tensor([1.0, 3, nan, 5, 5, 5, 0, 0, 6, nan, nan, nan])
    kl, known = torch.arange(24.0).view(12, 2), ~scores.isnan()
    meter = Meter(make_rollout([[1]] * 12, [[5, EOS]] * 11 + [[EOS]]))
    meter.objective(scores, kl, 0.5)
    meter.groups(scores, 3)
    found = meter.results()
    assert found["objective/kl"] == pytest.approx(sum(range(23)) / 12), "23 is that of padding"
    assert found["objective/scores"] == pytest.approx(25 / 8)
    rewards = (scores - 0.5 * kl.sum(1))[known]
    assert found["objective/rlhf_reward"] == pytest.approx(rewards.mean().item())
    stds = [2**0.5, 0, 12**0.5, 0]  # with Bessel's correction; no score has no spread
    assert found["reward/std_within_group"] == pytest.approx(sum(stds) / 4)
    assert found["reward/frac_flat_groups"] == 0.5
    assert found["reward/frac_solved_groups"] == 0, "6 is higher than 5, 5, 5"
    assert is_flat(torch.tensor([[nan, 2.0], [1.0, 2.0]])).tolist() == [[1], [0]]


# --- Warnings ---

STEP = {  # what is warned of is at its limit: no warning yet
    "objective/kl": 10.0,
    "objective/kl_token": 2.0,
    "objective/scores": 0.5,
    "val/ratio_max_dev_first": 0.01,
    "val/sampler_kl": 0.001,
    "policy/entropy_avg": 0.01,
    "reward/frac_flat_groups": 0.5,
    "length/truncated_frac": 0.5,
}
ABOVE = {name: 1.04 * x for name, x in STEP.items()}
NO_REWARD = {"objective/scores": math.nan, "reward/frac_flat_groups": 1.0}
FLAT = {"reward/frac_flat_groups": 0.6}
SAME = {"reward/frac_flat_groups": 1.0, "reward/frac_solved_groups": 1.0}
INFINITE = dict.fromkeys(["objective/kl", "objective/kl_token"], math.inf)
CONSTANT = [{"objective/scores": 0.5}] * 5


def around(mean, spread):
    return [{"objective/kl": mean + spread * (-1) ** i} for i in range(10)]


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
        ([{"objective/kl": 12.0, "objective/kl_token": 0.15}], "large KL"),
        ([{"objective/kl": 12.0, "objective/kl_token": 0.1}], ""),
        ([{}] * 11 + [INFINITE], "large KL"),
        # Prompts that are solved are no fault: equal scores that are the highest.
        ([FLAT | {"reward/frac_solved_groups": 0.31}], ""),
        ([FLAT | {"reward/frac_solved_groups": 0.3}], "flat groups"),
        ([SAME], "flat groups"),
        ([{}, SAME | {"objective/scores": 0.0}], "flat groups"),
        ([NO_REWARD, {}, SAME], ""),
        ([NO_REWARD | {"objective/kl": 10.5}], "large KL, no reward"),
        (CONSTANT[:4], ""),
        (CONSTANT, "constant reward"),
        ([{}, *CONSTANT], ""),  # nothing is higher
        ([{"objective/scores": 0.6}, *CONSTANT], "constant reward"),
    ],
)
def test_each_warning_has_its_cause(steps, names):
    history = [STEP | {"objective/scores": i / 10} | step for i, step in enumerate(steps)]
    found = metrics.warnings_about(history, bf16=False)
    assert ", ".join(name for name, _ in found) == names
    assert not any("\n" in line for _, line in found)
    beyond_rounding = [x for x in found if x[0] not in ("ratio", "sampler")]
    assert metrics.warnings_about(history, bf16=True) == beyond_rounding


def test_a_constant_reward_has_the_cause_that_metrics_show():
    for step, cause in (
        ({"policy/entropy_avg": 0.009}, "the policy is destroyed"),
        ({"objective/kl": 10.5}, "the policy is destroyed"),
        ({}, "is the reward function constant"),
        ({"objective/kl": None}, "is the reward function constant"),
    ):
        *_, (name, line) = metrics.warnings_about([STEP | step] * 10, bf16=False)
        assert name == "constant reward" and cause in line, step


def test_a_hacked_reward_is_warned_of():
    """As measured with the number of nines as the reward, and what chance or success gives."""
    names, start = ("eval/reward", "eval/accuracy", "eval/accuracy_se"), (0.15, 0.45, 0.016)
    for steps, warned in (
        ([start, (4.99, 0.0, 0.0)], True),
        ([start, (0.3, 0.9, 0.01), (0.6, 0.8, 0.012)], True),  # above the start, and hacked since
        ([start, (0.16, 0.4, 0.016)], False),  # 2.2 standard errors of the difference
        ([start, (0.14, 0.1, 0.01)], False),  # both fall: no hack
        ([start, (0.9, 0.9, 0.01)], False),
        ([start, (0.9, None, None)], False),
        ([(None, 0.4, 0.016), (0.9, 0.1, 0.016)], False),
        ([(0.1, 1.0, math.nan), (0.9, 0.0, math.nan)], False),  # of a single prompt
    ):
        *earlier, now = (dict(zip(names, step)) for step in steps)
        found = metrics.warnings_of_evaluation(now, [{}, *earlier])
        assert [name for name, _ in found] == ["hacked reward"] * warned, steps
    pairs = {"eval/accuracy": 0.5, "eval/loss": 0.7}  # of a reward model
    assert metrics.warnings_of_evaluation(pairs, [pairs | {"eval/accuracy": 0.9}]) == []


def test_a_mistake_is_told_from_rounding_to_bfloat16():
    """As measured with SmolLM2: what rounding gives, and a mistake in the first step."""
    for steps, warned in (
        ([0.003] * 5 + [0.038], False),  # one token that rounding makes rare
        ([0.003] * 3 + [0.03] * 3, True),  # three of the last five
        ([0.027], True),  # temperature 0.9
        ([0.006], False),  # top_k 50, and what rounding gives too
    ):
        history = [STEP | {"objective/scores": i, "val/sampler_kl": x} for i, x in enumerate(steps)]
        found = [name for name, _ in metrics.warnings_about(history, bf16=True)]
        assert found == ["sampler"] * warned, steps
    off = STEP | {"val/ratio_max_dev_first": 0.6}
    assert [name for name, _ in metrics.warnings_about([off], bf16=True)] == ["ratio"]


def test_a_run_gives_each_warning_once(make_job, capsys):
    job = make_job(ppo)
    job(num_steps=3, temperature=0.001)  # always the same tokens, to the limit
    output, kept = capsys.readouterr().out, (job.folder / "warnings.jsonl").read_text()
    for text in (output, kept):
        assert text.count("of the completions were cut at --max_new_tokens") == 1
    assert "warning, step 0: " in output and "groups" not in output


def test_a_run_warns_of_its_evaluations(make_job, monkeypatch, capsys):
    earlier = []

    def warn_of_all(now, before):
        earlier.append([m.get("eval/reward") for m in before])
        return [("mine", f"number {len(earlier)}")]

    monkeypatch.setattr("plumbing.run.warnings_of_evaluation", warn_of_all)
    first, second, last = (x["eval/reward"] for x in make_job(ppo)(num_steps=2, eval_every=1))
    assert earlier == [[first], [first, first], [first, first, second]] and last is not None
    assert "warning, step 0: number 1\n" in capsys.readouterr().out


# --- Evaluation ---


def has_an_a(completions, **columns):
    return [float("a" in text) for text in completions]


def unknown_of_x(prompts, completions, **columns):
    both = zip(prompts, completions)
    return [None if prompt == "x" else float("a" in text) for prompt, text in both]


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


def test_each_metric_of_k_completions_is_as_defined():
    partly = lambda completions: [max(x, 0.1) for x in has_an_a(completions)]  # noqa: E731
    found, texts = evaluated(4, lambda completions: map(len, completions), partly)
    right = [[float("a" in text) for text in of_one] for of_one in texts]
    means = [statistics.mean(max(x, 0.1) for x in row) for row in right]  # the form counts a bit
    lengths = [len(text) for of_one in texts for text in of_one]
    assert found.metrics["eval/reward"] == pytest.approx(statistics.mean(lengths))
    assert found.metrics["eval/accuracy"] == pytest.approx(sum(means) / 7)
    assert found.metrics["eval/accuracy_se"] == pytest.approx(statistics.stdev(means) / 7**0.5)
    assert found.metrics["eval/pass_at_k"] == pytest.approx(sum(map(max, right)) / 7)
    assert 0 < found.metrics["eval/accuracy"] < found.metrics["eval/pass_at_k"] < 1
    assert found.headline == ["eval/reward", "eval/accuracy", "eval/pass_at_k"]


@pytest.mark.filterwarnings("error:.*degrees of freedom")
def test_a_prompt_without_a_verdict_is_left_out():
    # "x" comes first; of its two verdicts one is missing.
    verdicts = lambda completions: [None, *has_an_a(completions)[1:]]  # noqa: E731
    found, texts = evaluated(2, unknown_of_x, verdicts)
    right = [[float("a" in text) for text in of_one] for of_one in texts[1:]]
    assert found.metrics["eval/accuracy"] == pytest.approx(sum(map(sum, right)) / 12)
    assert found.metrics["eval/reward"] == found.metrics["eval/accuracy"]
    assert found.metrics["eval/pass_at_k"] == pytest.approx(sum(map(max, right)) / 6)
    assert found.records[0]["score"] is None and found.lines[0].startswith("    nan  x ->")
    assert found.headline == ["eval/reward", "eval/pass_at_k"], "accuracy would say the same"
    assert math.isnan(metrics.mean_and_error(torch.ones(1, 2))[1]), "the error of one prompt"
    found, _ = evaluated(1, lambda completions: [None] * len(completions), None)
    assert "eval/pass_at_k" not in found.metrics and found.headline == ["eval/reward"]
    for name in ("reward", "reward_greedy", "accuracy", "accuracy_greedy", "accuracy_se"):
        assert found.metrics[f"eval/{name}"] is None


def test_the_seed_changes_the_sampled_evaluation_alone():
    no_reward = lambda completions: [None] * len(completions)  # noqa: E731
    first, second = (evaluated(1, no_reward, has_an_a, seed)[0] for seed in (0, 1))
    assert first.headline == ["eval/reward", "eval/accuracy"]
    assert first.metrics["eval/accuracy_greedy"] == second.metrics["eval/accuracy_greedy"]
    assert first.records != second.records


def test_a_printed_sample_shows_the_end_of_its_prompt():
    chat = [{"content": "Be brief."}, {"content": "What is left of it? " * 5 + "\nAll of it"}]
    rows, texts = [{"prompt": "a" * 45}, {"prompt": chat}], ["x", "y", "unbelievable " * 9, "z"]
    records, lines = metrics.sample_records(rows, texts, torch.tensor([1.0, 0.0, math.nan, 2.0]))
    shown = "... left of it? What is left of it? All of it -> " + "unbelievable " * 2 + "..."
    assert lines == [f"   1.00  {'a' * 45} -> x", f"    nan  {shown}"]
    prompts = ["a" * 45, "a" * 45, chat, chat]
    assert [[*x.values()] for x in records] == [*map(list, zip(prompts, texts, [1, 0, None, 2]))]
    _, lines = metrics.sample_records([{"prompt": "a" * 46}], ["x"], torch.ones(1))
    assert lines == [f"   1.00  ... {'a' * 41} -> x"]


def test_the_headline_shows_numbers_beside_those_of_step_0():
    first = {"eval/reward": 0.25, "eval/reward_greedy": None}
    now = {"eval/reward": 0.75, "eval/reward_greedy": 1.0}
    assert metrics.headline(0, ["eval/reward"], first, first) == "eval/reward 0.250, greedy unknown"
    expected = "eval/reward 0.750 (was 0.250), greedy 1.000 (was unknown)"
    assert metrics.headline(1, ["eval/reward"], now, first) == expected
    known = {"objective/scores": 0.456, "length/mean": 11.6, "tokens_per_second": 340.4}
    bars = [Meter.progress(known | {"objective/kl": kl}) for kl in (0.123, None)]
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
        metrics.draw_curves([tmp_path / name for name in runs], tmp_path / "curves.png")
        assert "MPLBACKEND" not in os.environ
        return figures.pop().axes

    return drawn


def test_seeds_of_a_job_have_one_colour_and_name(drawn):
    seeds = {"ppo-add-s0": 0, "ppo-add-s11": 11, "grpo-add-s0": 0, "grpo-2-add-s0": 0}
    runs = {x: [{"step": i, "objective/scores": i + n} for i in range(4)] for x, n in seeds.items()}
    axes, *_ = drawn(runs)
    assert list(axes.lines[1].get_xdata()) == [0, 1, 2, 3]
    assert list(axes.lines[1].get_ydata()) == [11, 12, 13, 14]
    *colours, other = [line.get_color() for line in axes.lines]
    assert colours == [metrics.COLOURS[x] for x in ("ppo", "ppo", "grpo")] and other not in colours
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["ppo-add", "grpo-add", "grpo-2-add"]
    axes, *_ = drawn({f"{folder}/ppo-s0": runs["ppo-add-s0"] for folder in "ab"})
    assert len({line.get_color() for line in axes.lines}) == 2, "of one name in two folders"


def test_a_dollar_in_a_folders_name_begins_no_formula(tmp_path):
    (folder := tmp_path / "$_{$").mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 0, "objective/scores": 1}\n')
    metrics.draw_curves([folder], tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").stat().st_size > 0


PAIRS, SCORES = {"loss/pairs": 0.7}, {"objective/scores": 1.0}
BOTH = {"eval/accuracy": 0.4, "eval/accuracy_greedy": 0.5, "eval/reward": 9.0}


@pytest.mark.parametrize(
    ("runs", "panels", "curves"),  # of the panel of evaluations: dashed? and the numbers
    [
        ([SCORES | BOTH], metrics.PANELS, {"-": [0.4] * 2, "--": [0.5] * 2}),
        # The reward, where nothing is right or wrong.
        ([SCORES | BOTH | dict.fromkeys([*BOTH][:2])], metrics.PANELS, {"-": [9.0] * 2}),
        ([PAIRS | {"eval/accuracy": 0.4}, SCORES], metrics.PANELS, {"-": [0.4] * 2}),
        ([PAIRS, PAIRS, {}], metrics.OF_REWARD_MODELS, {}),  # one has no line yet
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
