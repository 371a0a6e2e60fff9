"""Metrics of a step, warnings, and evaluation: each number is what its definition says."""

import json
import math
import statistics

import pytest
import torch
from small import EOS, make_rollout

import grpo
import ppo
from plumbing.errors import Fault, InputError
from plumbing.metrics import (
    Meter,
    Totals,
    best_of_k,
    explained_variance,
    is_flat,
    mean_and_error,
    warnings_about,
)
from tools import evaluate as tool


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_a_fault(norm):
    with pytest.raises(Fault, match=f"{norm}: lower --learning_rate; other causes: bfloat16"):
        Totals().end_mini_batch(torch.tensor(norm))


def test_a_largest_deviation_is_of_the_first_minibatch_padding_is_left_out_and_no_graph_is_kept():
    rollout = make_rollout([[1], [1]], [[5, EOS], [5]])
    mask = rollout.completion_mask
    meter, rows, nan = Meter(rollout), torch.arange(2), torch.nan
    for ratio in ([[1.25, 0.5], [1.5, nan]], [[9.0, 9.0], [9.0, nan]]):
        moved = torch.tensor([[1.0, 2.0], [3.0, nan]]).requires_grad_()
        meter.add_policy(rows, moved, torch.zeros(2, 2), moved, torch.tensor(ratio), mask, mask)
        meter.end_mini_batch(torch.tensor(1.0))
    assert not any(x.requires_grad for x in meter.sums.values()), "memory: a graph is kept"
    results = meter.results()
    assert results["val/ratio_max_dev_first"] == 0.5
    assert results["policy/approxkl_avg"] == pytest.approx(0.5 * (1 + 4 + 9) / 3)
    assert results["policy/entropy_avg"] == 2


def test_explained_variance_is_1_for_the_returns_themselves_and_0_for_a_constant():
    returns = torch.tensor([[1.0, 2.0, 5.0, 99.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 0]]).bool()
    shifted = returns.masked_fill(~mask, -50) + 7
    assert explained_variance(shifted, returns, mask) == pytest.approx(1), "over padding?"
    assert explained_variance(torch.full((1, 4), 3.0), returns, mask) == pytest.approx(0)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3)
    assert explained_variance(returns, torch.full((1, 4), 0.1), mask) == 0


def test_the_objective_is_a_sum_of_kl_per_completion_and_leaves_out_padding_and_missing_scores():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]]).bool()
    kl = torch.tensor([[1.0, 2, 3, 99], [4, 99, 99, 99], [-1, 3, 99, 99]])
    logprobs = torch.where(mask, -0.5 * kl.abs(), torch.tensor(99.0))
    scores = torch.tensor([10.0, torch.nan, 4.0])
    expected = {
        "objective/kl": (6 + 4 + 2) / 3,
        "objective/kl_token": 12 / 6,
        "objective/entropy": 0.5 * (1 + 2 + 3 + 4 + 1 + 3) / 6,
        "objective/scores": 7,
        "objective/non_score_reward": -0.5 * 4,
        "objective/rlhf_reward": ((10 - 0.5 * 6) + (4 - 0.5 * 2)) / 2,
    }
    rollout = make_rollout([[1]] * 3, [[5, 6, EOS], [EOS], [5, 6]], extra_right=1)
    assert torch.equal(rollout.completion_mask, mask)

    def objective(kl):
        meter = Meter(rollout)
        meter.objective(scores, kl, logprobs, kl_coef=0.5)
        return meter.results()

    metrics, unknown = objective(kl), objective(None)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert unknown["objective/kl"] is None and unknown["objective/kl_token"] is None
    assert unknown["objective/non_score_reward"] == 0 and unknown["objective/rlhf_reward"] == 7


def test_the_spread_within_a_group_leaves_out_missing_scores_and_counts_flat_groups_as_0():
    nan = torch.nan
    assert is_flat(torch.tensor([[nan, 2.0], [nan, nan], [1.0, 2.0]])).tolist() == [[1], [1], [0]]
    meter = Meter(make_rollout([[1]], [[EOS]]))
    meter.groups(torch.tensor([1.0, 3, nan, 5, 5, 5, 0, 0, 6, nan, nan, nan]), 3)
    metrics = meter.results()
    stds = [2**0.5, 0, 12**0.5, 0]  # with Bessel's correction; no score has no spread
    assert metrics["reward/std_within_group"] == pytest.approx(sum(stds) / 4)
    assert metrics["reward/frac_flat_groups"] == 0.5


# --- Warnings ---

STEP = {
    "objective/kl": 0.1,
    "objective/scores": 0.5,
    "val/ratio_max_dev_first": 0.0,
    "reward/frac_flat_groups": 0.1,
    "length/truncated_frac": 0.1,
}
INFINITE = dict.fromkeys(["objective/kl", "objective/kl_token"], math.inf)


def around(mean, spread):
    return [{"objective/kl": mean + spread * (-1) ** i} for i in range(10)]


@pytest.mark.parametrize(
    ("steps", "name", "remedy"),
    [
        # Four errors of the mean are 0.027 and 0.040, and -0.02 is allowed.
        (around(-0.05, 0.02), "negative KL", "look at temperature"),
        (around(-0.05, 0.03), None, None),
        ([{"objective/kl": 10.5}], "large KL", "--kl_coef"),
        ([{"objective/kl": 9.9, "objective/kl_token": 2.0}], None, None),
        ([{"objective/kl": None}] * 3, None, None),
        # 12 nats are much for 24 tokens and little for 500.
        ([{"objective/kl": 12.0, "objective/kl_token": 0.5}], "large KL", "--kl_coef"),
        ([{"objective/kl": 12.0, "objective/kl_token": 0.024}], None, None),
        ([{}] * 11 + [INFINITE], "large KL", "the KL is inf"),
        ([{"val/ratio_max_dev_first": 0.02}], "ratio", "dropout"),
        ([{"val/ratio_max_dev_first": 0.009}], None, None),
        ([{"val/sampler_kl": 0.005}], "sampler", "--bf16 false"),
        ([{"val/sampler_kl": 0.0005}], None, None),
        ([{"reward/frac_flat_groups": 0.6}], "flat groups", "--num_generations"),
        ([{"length/truncated_frac": 0.6}], "truncated", "--max_new_tokens"),
        ([{"reward/frac_flat_groups": 0.5, "length/truncated_frac": 0.5}], None, None),
        ([{"objective/scores": 0.5}] * 5, "constant reward", "inspect_reward.py"),
        ([{"objective/scores": 0.5}] * 4, None, None),
    ],
)
def test_a_warning_has_a_cause_and_a_remedy_and_there_is_none_without_a_cause(steps, name, remedy):
    history = [STEP | {"objective/scores": i / 10} | step for i, step in enumerate(steps)]
    found = warnings_about(history, bf16=False)
    assert [kind for kind, _ in found] == [name] * (name is not None)
    assert all(remedy in text and "\n" not in text for _, text in found)
    if name in ("ratio", "sampler"):
        assert warnings_about(history, bf16=True) == [], "rounding moves it as far"


def test_a_run_gives_a_warning_once_and_without_groups_none_of_flat_ones(make_job, capsys):
    job = make_job(ppo)
    job(num_steps=3, temperature=0.001)  # always the same tokens, to the limit
    output, kept = capsys.readouterr().out, (job.folder / "warnings.jsonl").read_text()
    for text in (output, kept):
        assert text.count("of the completions were cut at --max_new_tokens") == 1
    assert "warning, step 0: " in output and "groups" not in output


# --- Evaluation ---

REWARD = """
def has_an_a(completions, **columns):
    return [float("a" in c) for c in completions]

def unknown_of_x(prompts, completions, **columns):
    return [None if p == "x" else float("a" in c) for p, c in zip(prompts, completions)]

def longest(completions, **columns):
    return [len(c) for c in completions]

def unknown(completions, **columns):
    return [None] * len(completions)
"""


@pytest.fixture
def evaluated(make_job, tmp_path):
    """Metrics of an evaluation of seven prompts, and their completions as (7, K) lists."""
    (tmp_path / "a.py").write_text(REWARD)
    rows = [json.dumps({"prompt": p}) for p in ("x", "yy y", "zzz", "w", "the", "a b", "q")]
    (tmp_path / "seven.jsonl").write_text("\n".join(rows))
    job = make_job(grpo)

    def evaluated(eval_generations, reward="has_an_a", verifier="has_an_a", **flags):
        flags |= {"eval_generations": eval_generations, "num_eval_prompts": 100}
        flags |= {"reward": f"{tmp_path}/a.py:{reward}", "eval_prompts": tmp_path / "seven.jsonl"}
        flags |= {"verifier": f"{tmp_path}/a.py:{verifier}"} if verifier else {}
        line = job(**flags)[0]
        samples = map(json.loads, (job.folder / "samples.jsonl").read_text().splitlines())
        texts = [s["completion"] for s in samples if (s["split"], s["step"]) == ("heldout", 0)]
        K = eval_generations
        return line, [texts[i : i + K] for i in range(0, len(texts), K)]

    return evaluated


def test_of_k_completions_each_metric_is_what_its_definition_says(evaluated):
    metrics, texts = evaluated(4, reward="longest", rollout_batch_size=8)
    right = [[float("a" in text) for text in of_one] for of_one in texts]
    assert len(right) == 7 and 0 < statistics.mean(map(statistics.mean, right)) < 1
    means = [statistics.mean(row) for row in right]
    lengths = [[len(text) for text in of_one] for of_one in texts]
    assert metrics["eval/reward"] == pytest.approx(statistics.mean(map(statistics.mean, lengths)))
    assert metrics["eval/accuracy"] == pytest.approx(sum(means) / 7)
    assert metrics["eval/accuracy_se"] == pytest.approx(statistics.stdev(means) / 7**0.5)
    assert metrics["eval/pass_at_k"] == pytest.approx(sum(map(max, right)) / 7)
    # The reward chooses, the verifier judges.
    best = [[t for t in of_one if len(t) == max(map(len, of_one))] for of_one in texts]
    chosen = [statistics.mean("a" in t for t in of_one) for of_one in best]
    assert metrics["eval/best_of_k"] == pytest.approx(statistics.mean(chosen))
    assert metrics["eval/accuracy"] < metrics["eval/pass_at_k"]


def test_a_prompt_without_a_verdict_is_left_out_and_a_number_of_nothing_is_unknown(evaluated):
    metrics, texts = evaluated(2, reward="unknown_of_x", verifier="unknown_of_x")
    right = [[float("a" in text) for text in of_one] for of_one in texts[1:]]  # "x" is the first
    assert metrics["eval/accuracy"] == pytest.approx(sum(map(sum, right)) / 12)
    assert metrics["eval/reward"] == metrics["eval/accuracy"]
    assert metrics["eval/pass_at_k"] == pytest.approx(sum(map(max, right)) / 6)
    metrics, _ = evaluated(1, reward="unknown", verifier=None)
    assert "eval/pass_at_k" not in metrics
    for name in ("reward", "reward_greedy", "accuracy", "accuracy_greedy", "accuracy_se"):
        assert metrics[f"eval/{name}"] is None


def test_the_greedy_evaluation_depends_on_neither_seed_nor_batches(evaluated):
    first, texts = evaluated(1, rollout_batch_size=28)
    other, others = evaluated(1, rollout_batch_size=4, seed=1)
    assert first["eval/accuracy_greedy"] == other["eval/accuracy_greedy"] is not None
    assert len(texts) == len(others) == 7
    assert first["eval/accuracy"] != other["eval/accuracy"], "sampled ones depend on the seed"


def test_best_of_k_answers_with_the_highest_score_and_ties_count_equally():
    nan = math.nan
    scores = torch.tensor([[0.1, 0.9, 0.3], [2, 2, -5], [nan, -1, nan], [nan, nan, nan]])
    right = torch.tensor([[1.0, 0, 1], [1, 0, 1], [0, 1, 0], [1, 1, 0]])
    assert best_of_k(scores, right) == pytest.approx((0 + 1 / 2 + 1 + 2 / 3) / 4)


def test_the_error_of_an_accuracy_is_that_of_a_mean_over_the_prompts():
    right = torch.tensor([[1.0], [0], [0], [1], [1]])
    expected = (0.6, (0.6 * 0.4 / 4) ** 0.5)
    # The K completions of a prompt are no further prompts.
    for verdicts in (right, right.expand(5, 8)):
        assert mean_and_error(verdicts) == pytest.approx(expected)
    assert math.isnan(mean_and_error(right[:1])[1]), "unknown of one prompt"


def test_the_tool_prints_what_a_run_logs_of_the_same_model(evaluated, tmp_path, capsys):
    metrics, texts = evaluated(4, reward="unknown_of_x", rollout_batch_size=16)
    capsys.readouterr()
    flags = f"""--model {tmp_path}/small-gpt2 --eval_generations 4 --rollout_batch_size 16
    --prompts {tmp_path}/prompts.jsonl --eval_prompts {tmp_path}/seven.jsonl --device cpu
    --reward {tmp_path}/a.py:unknown_of_x --verifier {tmp_path}/a.py:has_an_a --bf16 false
    --max_new_tokens 6 --temperature 0.7 --output {tmp_path}/out.jsonl"""
    tool.main(flags.split())
    printed = capsys.readouterr().out
    for name in ("eval/reward", "eval/accuracy"):
        assert f"{name} {metrics[name]:.3f}, greedy {metrics[f'{name}_greedy']:.3f}" in printed
    for name in ("eval/pass_at_k", "eval/best_of_k"):
        assert f"{name} {metrics[name]:.3f}" in printed
    assert f"accuracy is {metrics['eval/accuracy_se']:.4f}" in printed
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    expected = [text for of_one in texts for text in of_one]
    assert [json.loads(line)["completion"] for line in lines] == expected
    with pytest.raises(InputError, match=r"--output .*out.jsonl: is there already"):
        tool.main(flags.split())
