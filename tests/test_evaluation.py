"""Evaluation: accuracy with its error, pass@K, batches, and tools/evaluate.py."""

import itertools
import json
import statistics
from types import SimpleNamespace

import pytest
import torch
from small import letter_tokenizer, save_model, small_gpt2, small_llama

import ppo
from plumbing.data import Task
from plumbing.errors import InputError
from plumbing.evaluation import evaluate, headline, mean_and_error, pass_at_k
from tools import evaluate as tool

TOKENIZER = letter_tokenizer()
ROWS = [{"prompt": p, "answer": "a"} for p in ("x", "yy y", "zzz", "w", "the", "a b", "q")]


def has_an_a(completions, **columns):
    return [float("a" in c) for c in completions]


def evaluated(rows=ROWS, verifier=has_an_a, **options):
    config = SimpleNamespace(seed=0, eval_generations=1, rollout_batch_size=8)
    vars(config).update(options)
    task = Task([], rows, [has_an_a], [1.0], verifier)
    sampling = {"max_new_tokens": 4, "eos_token_ids": [19], "pad_token_id": 0}
    return evaluate(config, small_gpt2(vocab_size=20).eval(), TOKENIZER, task, sampling, rows)


def test_pass_at_k_is_the_share_of_all_choices_of_k_with_a_right_one():
    """The definition, over every subset: Chen et al. 2021."""
    right = torch.tensor([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
    for k in range(1, 6):
        subsets = list(itertools.combinations(range(5), k))
        expected = statistics.mean(
            any(row[i] for i in some) for row in right.tolist() for some in subsets
        )
        assert pass_at_k(right, k) == pytest.approx(expected, abs=1e-12)
    assert pass_at_k(right, 1) == pytest.approx(right.float().mean().item())
    with pytest.raises(ValueError, match="pass@6 needs 6 completions, here 5"):
        pass_at_k(right, 6)


def test_the_error_of_an_accuracy_is_that_of_a_mean_over_the_prompts():
    right = torch.tensor([[1.0], [0], [0], [1], [1]])
    mean, error = mean_and_error(right)
    assert mean == pytest.approx(0.6) and error == pytest.approx((0.6 * 0.4 / 4) ** 0.5)
    # The K completions of a prompt are no further prompts.
    repeated = mean_and_error(right.expand(5, 8))
    assert repeated == pytest.approx((mean, error))
    assert mean_and_error(None) == (None, None)
    assert mean_and_error(right[:1])[1] != mean_and_error(right[:1])[1], "unknown of one prompt"


def test_of_k_completions_each_metric_is_what_its_definition_says():
    metrics, texts, scores = evaluated(eval_generations=4)
    right = torch.tensor([has_an_a([t])[0] for t in texts]).view(7, 4)
    assert scores == right.flatten().tolist() and 0 < right.mean() < 1
    assert metrics["eval/accuracy"] == metrics["eval/reward"] == pytest.approx(right.mean().item())
    assert metrics["eval/accuracy_se"] == pytest.approx(
        statistics.stdev(right.mean(1).tolist()) / 7**0.5
    )
    assert metrics["eval/pass_at_k"] == pytest.approx(right.amax(1).mean().item())
    assert metrics["eval/pass_at_k"] > metrics["eval/accuracy"]


def test_one_completion_has_no_pass_at_k_and_no_verifier_no_accuracy():
    assert "eval/pass_at_k" not in evaluated()[0]
    metrics, *_ = evaluated(verifier=None, eval_generations=2)
    for name in ("accuracy", "accuracy_se", "accuracy_greedy", "pass_at_k"):
        assert metrics[f"eval/{name}"] is None
    assert metrics["eval/reward"] is not None


def test_a_prompt_without_a_verdict_is_left_out_of_the_accuracy():
    def now_and_then(prompts, completions, **columns):
        return [None if p == "x" else float("a" in c) for p, c in zip(prompts, completions)]

    _, texts, _ = evaluated(eval_generations=2)
    metrics, *_ = evaluated(verifier=now_and_then, eval_generations=2)
    right = torch.tensor([has_an_a([t])[0] for t in texts]).view(7, 2)[1:]  # "x" is the first
    assert metrics["eval/accuracy"] == pytest.approx(right.mean().item())
    assert metrics["eval/pass_at_k"] == pytest.approx(right.amax(1).mean().item())
    metrics, *_ = evaluated(verifier=lambda completions, **columns: [None] * len(completions))
    assert metrics["eval/accuracy"] is None and metrics["eval/reward"] is not None


def test_every_prompt_is_completed_once_whatever_the_batches():
    whole, texts, _ = evaluated(rollout_batch_size=100)
    parts, in_parts, _ = evaluated(rollout_batch_size=3)
    assert len(texts) == len(in_parts) == 7
    for name in ("eval/reward_greedy", "eval/accuracy_greedy"):
        assert parts[name] == whole[name]
    _, of_two, _ = evaluated(rollout_batch_size=3, eval_generations=2)
    assert len(of_two) == 14


def test_the_headline_names_pass_at_k_where_there_is_one():
    values = {"eval/reward": 0.5, "eval/reward_greedy": 0.25, "eval/accuracy": 0.5}
    values |= {"eval/accuracy_greedy": 0.25}
    assert headline(0, values, values) == "eval/reward 0.500, greedy 0.250"
    text = headline(5, values | {"eval/pass_at_k": 0.75}, values, 8)
    assert text == "eval/reward 0.500 (was 0.500), greedy 0.250 (was 0.250), pass@8 0.750"


def long_llama():
    model = small_llama(vocab_size=20)
    model.config.max_position_embeddings = 256
    return model


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path / "model", small_gpt2(vocab_size=20), TOKENIZER)
    rows = [json.dumps(row) for row in ROWS * 4]
    (tmp_path / "p.jsonl").write_text("\n".join(rows))
    (tmp_path / "r.py").write_text(
        "def reward(completions):\n    return [len(c) / 8 for c in completions]\n"
        "def right(completions, completion_ids):\n"
        "    assert all(ids for ids in completion_ids)\n"
        "    return [float('a' in c) for c in completions]\n"
    )
    return tmp_path


def flags(folder, *more: str) -> list[str]:
    return [
        "--model", f"{folder}/model", "--prompts", f"{folder}/p.jsonl", "--max_new_tokens", "4",
        "--reward", f"{folder}/r.py:reward", "--verifier", f"{folder}/r.py:right",
        "--bf16", "false", "--device", "cpu", *more,
    ]  # fmt: skip


def test_the_tool_prints_what_a_run_logs_of_the_same_model(folder, capsys):
    more = ["--eval_generations", "4", "--num_eval_prompts", "100", "--eval_prompts"]
    more += [f"{folder}/p.jsonl", "--rollout_batch_size", "16"]
    ppo.main([*flags(folder, *more), "--num_steps", "1", "--output_dir", f"{folder}/run"])
    line = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[0])
    samples = [json.loads(x) for x in (folder / "run" / "samples.jsonl").read_text().splitlines()]
    samples = [s for s in samples if s["split"] == "heldout" and s["step"] == 0]
    assert len(samples) == 28 * 4 and line["eval/accuracy"] != line["eval/reward"]
    capsys.readouterr()
    tool.main(flags(folder, *more, "--output", f"{folder}/out.jsonl"))
    printed = capsys.readouterr().out
    expected = f"28 prompts: {headline(0, line, line, 4)}\n"
    assert expected in printed and "pass@4" in printed
    assert f"accuracy is {line['eval/accuracy_se']:.4f}" in printed
    found = [json.loads(x) for x in (folder / "out.jsonl").read_text().splitlines()]
    assert [s["completion"] for s in found] == [s["completion"] for s in samples]
    assert found[0].keys() == {"prompt", "completion", "score"}


def test_what_is_printed_is_the_end_of_four_prompts_and_what_follows(folder, capsys):
    rows = [json.dumps({"prompt": f"{'a b ' * 30}{c}", "answer": "a"}) for c in "bcdehn"]
    (folder / "long.jsonl").write_text("\n".join(rows))
    save_model(folder / "model", long_llama(), TOKENIZER)
    more = ["--prompts", f"{folder}/long.jsonl", "--eval_generations", "2", "--num_steps", "1"]
    ppo.main([*flags(folder), *more, "--output_dir", f"{folder}/run"])
    printed = [x for x in capsys.readouterr().out.split("\n") if "\N{RIGHTWARDS ARROW}" in x]
    at_the_start = printed[:4]
    assert all("... " in line and "a b" in line for line in at_the_start)
    ends = [line.partition(" \N{RIGHTWARDS ARROW}")[0][-1] for line in at_the_start]
    assert len(set(ends)) == 4, "of four prompts, each once"


def test_the_tool_doesnt_overwrite_what_it_has_written(folder):
    (folder / "out.jsonl").write_text("kept")
    with pytest.raises(InputError, match=r"--output .*out.jsonl: is there already"):
        tool.main(flags(folder, "--output", f"{folder}/out.jsonl"))
    assert (folder / "out.jsonl").read_text() == "kept"


def test_completions_of_the_tool_are_eval_generations(folder):
    with pytest.raises(InputError, match="--num_generations 8: of an evaluation they are --eval_g"):
        tool.main(flags(folder, "--num_generations", "8"))


def test_a_batch_must_hold_the_completions_of_a_prompt(folder):
    more = "--eval_generations", "9", "--rollout_batch_size", "8"
    for main in (tool.main, ppo.main):
        with pytest.raises(InputError, match=r"must hold the 9 completions of a prompt \(eval_gen"):
            main(flags(folder, *more))
