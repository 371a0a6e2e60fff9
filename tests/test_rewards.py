"""Rewards: by name and from files, TRL's signature, verifiers, the built-in tasks, inspection."""

import asyncio
import json
import re
import sys
from asyncio import CancelledError

import pytest
import torch
from small import byte_tokenizer, make_rollout, save_model, task_of
from transformers import RobertaConfig, RobertaForSequenceClassification

import grpo
from plumbing.data import Task
from plumbing.errors import InputError
from plumbing.rewards import load_reward
from tasks import REWARDS, TASKS
from tools import inspect_reward

ROWS = [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]
TEXTS = ["x", "yy", "z", "ww"]  # two completions of each prompt


def scored(*rewards, rows=ROWS, weights=(1.0,)) -> list[float]:
    """The scores of TEXTS."""
    task = task_of()
    task.rewards, task.weights = list(rewards), list(weights)
    rollout = make_rollout([[1]] * 4, task.tokenizer(TEXTS).input_ids)
    scores, texts = task.score(rows, rollout)
    assert texts == TEXTS
    return scores.tolist()


# --- TRL's signature ---


def test_a_reward_written_for_trl_gets_prompts_completions_ids_and_columns():
    seen = {}

    def reward(prompts, completions, completion_ids, n, **kwargs):
        seen.update(prompts=prompts, completions=completions, n=n, ids=completion_ids)
        return [1.0, 2.0, 3.0, None]

    scores = scored(reward)
    assert seen["prompts"] == ["a", "a", "b", "b"] and seen["n"] == [1, 1, 2, 2]
    assert seen["completions"] == TEXTS and [len(i) for i in seen["ids"]] == [1, 2, 1, 2]
    assert scores[:3] == [1, 2, 3] and scores[3] != scores[3], "None is NaN"
    assert scored(lambda completions: list(map(len, completions))) == [1, 2, 1, 2]


def test_columns_that_only_some_rows_have_reach_the_reward_and_replace_nothing_sampled():
    seen, chat = {}, [{"role": "user", "content": "q"}]

    def reward(**columns):
        seen.update(columns)
        return [0.0] * 4

    scored(reward, rows=[{"prompt": "a", "completions": ["?"]}, {"prompt": chat, "late": 5}])
    messages = [[{"role": "assistant", "content": text}] for text in TEXTS[2:]]
    assert seen["completions"] == TEXTS[:2] + messages, "messages where the prompt has messages"
    assert seen["late"] == [None, None, 5, 5] and seen["prompts"] == ["a", "a", chat, chat]


def test_several_rewards_are_added_with_their_weights_and_none_counts_as_absent():
    first = lambda completions, **kw: [1.0, 1.0, None, None]  # noqa: E731
    second = lambda completions, **kw: [1.0, None, 1.0, None]  # noqa: E731
    scores = scored(first, second, weights=[1.0, 10.0])
    assert scores[:3] == [11, 1, 10] and scores[3] != scores[3]


def raises(error):
    def reward(completions):
        raise error

    return reward


def awaited(reward):
    async def awaited_reward(completions):
        return reward(completions)

    return awaited_reward


@pytest.mark.parametrize(
    ("reward", "fault"),
    [
        (lambda **kw: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (lambda **kw: sys.exit(3), "raised SystemExit: 3"),
        (lambda completions, missing: [1.0] * 4, "missing"),
        (lambda **kw: [1.0] * 3, "returned 3 values for 4 completions"),
        (lambda **kw: iter([1.0] * 3), "returned 3 values for 4 completions"),
        (lambda **kw: [float("nan")] * 4, "returned nan for 'x'"),
        (lambda **kw: [1e39] * 4, "returned inf"),
        (lambda **kw: [10**400] * 4, "must return a list of numbers"),
        (lambda **kw: 1.0, "must return a list"),
        (lambda **kw: "1111", "must return a list of numbers or None, not a str"),
        (lambda **kw: {1: 1, 2: 2, 3: 3, 4: 4}, "must return a list .* not a dict"),
        (lambda **kw: torch.ones(4, 2), "must return a list of numbers"),
        (lambda **kw: (1 / 0 for _ in range(4)), "raised ZeroDivisionError: division by zero"),
        (raises(CancelledError()), r"raised CancelledError \(test_rewards.py, line \d+\)"),
        (raises(GeneratorExit("late")), "raised GeneratorExit: late"),  # no Exception
        (awaited(raises(TimeoutError("late"))), "raised TimeoutError: late"),
        (awaited(raises(SystemExit(1))), "raised SystemExit: 1"),
    ],
)
def test_a_reward_at_fault_is_named_in_one_line(reward, fault):
    with pytest.raises(InputError, match=fault) as error:
        scored(reward)
    assert "\n" not in str(error.value)


def test_what_a_reward_changes_is_a_copy():
    def reward(prompts, completions, completion_ids, n, **kwargs):
        changed.extend([prompts[0], completions[0], completion_ids[0], n[0]])
        for x in changed:
            x.append({"role": "assistant", "content": "?"})
        return list(map(len, prompts))

    changed, rows = [], [{"prompt": [{"role": "user", "content": "q"}], "n": [1]}]
    for _ in range(2):  # of the four completions of the prompt, one
        assert scored(reward, reward, rows=rows, weights=[1, 1]) == [4, 2, 2, 2]
    assert rows == [{"prompt": [{"role": "user", "content": "q"}], "n": [1]}]


def test_rewards_may_be_generators_and_async_functions_whose_parts_wait_at_the_same_time():
    started, loops = [], set()

    async def slow(text):  # waits until all four do
        loops.add(asyncio.get_running_loop())
        started.append(text)
        while len(started) % 4:
            await asyncio.sleep(0.001)
        return len(text)

    async def whole_batch(completions):
        return await asyncio.wait_for(asyncio.gather(*map(slow, completions)), 60)

    generator = lambda completions: map(len, completions)  # noqa: E731
    for reward in (whole_batch, whole_batch, generator):
        assert scored(reward) == [1, 2, 1, 2]
    assert len(started) == 8
    assert len(loops) == 1, "connections that are kept open belong to the loop that made them"


# --- The text that is scored ---


@pytest.mark.parametrize(
    ("prompt", "completion", "eos", "text"),
    [
        ([1], [71, 72, 256], 256, "hi"),
        ([1], [71, 72], 256, "hi"),
        ([1], [71, 72, 13], 13, "hi"),  # a point, which the generation_config may make an EOS
        ([65, 127], [102, 65, 66], 256, "\ufffdbc"),  # an é that begins in the prompt
        ([256, 65], [256, 71, 72, 13], 13, "<|endoftext|>hi"),  # a tag may be a special token
    ],
)
def test_the_text_of_a_completion_ends_before_eos_and_padding(prompt, completion, eos, text):
    rollout = make_rollout([prompt, [1]], [completion, [2] * 5], eos=eos)
    assert task_of(reward=["brevity"]).score(ROWS, rollout)[1][0] == text


# --- By name, from a file, a model ---


@pytest.mark.parametrize(
    ("name", "columns", "expected"),
    [
        ("exact_match", {"answer": ["a b", 7]}, [1.0, 1.0]),
        ("exact_match", {"answer": ["a", 70]}, [0.0, 0.0]),
        ("brevity", {}, [-0.02, -0.01]),
        ("no_repetition", {}, [5 / 17 - 1, 0.0]),  # 17 runs of four words, 5 of them different
    ],
)
def test_a_ready_made_reward_is_taken_by_its_name(name, columns, expected):
    texts = ["so very good it is " * 4 if name == "no_repetition" else " a b\n", "7"]
    reward = load_reward(name, REWARDS)
    assert reward(prompts=["x"] * 2, completions=texts, **columns) == expected
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    assert reward(prompts=["x"] * 2, completions=messages, **columns) == expected


REWARD = """
from __future__ import annotations
from dataclasses import dataclass  # which looks up its module where annotations are texts
from multiprocessing import get_context
from neighbour_of_my_rewards import graded

@dataclass
class Verdict:
    x: int = 1

def grade(text):
    return Verdict(graded(text))

def parallel(completions):
    with get_context(METHOD).Pool(1) as pool:
        return [verdict.x for verdict in pool.map(grade, completions)]
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_rewards_processes_and_its_file_find_its_folder(method, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("my_rewards", "neighbour_of_my_rewards"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "neighbour_of_my_rewards.py").write_text("graded = len")
    (tmp_path / "my_rewards.py").write_text(REWARD.replace("METHOD", repr(method)))
    assert scored(load_reward(f"{tmp_path}/my_rewards.py:parallel", REWARDS)) == [1, 2, 1, 2]


def test_a_file_with_two_rewards_runs_once_whatever_its_name(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "random.py").write_text("f = lambda completions: [1] * 4\ng = lambda: f")
    first, second = (load_reward(f"{tmp_path}/random.py:{name}", REWARDS) for name in "fg")
    assert scored(first) == [1] * 4 and second() is first
    said = "random.py: Python has another module random. If it spawns processes, rename it.\n"
    assert capsys.readouterr().out == said


def test_a_reward_model_alone_needs_no_answers_and_with_a_function_is_added(tmp_path):
    """RoBERTa, whose positions start at pad + 1; its tokenizer says that it reads 24 tokens."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 1}
    sizes |= {"vocab_size": 257, "intermediate_size": 32, "max_position_embeddings": 26}
    config = RobertaConfig(pad_token_id=1, initializer_range=0.5, **sizes)
    model, tokenizer = RobertaForSequenceClassification(config).eval(), byte_tokenizer()
    tokenizer.model_max_length = 24
    flags = {"reward_model": save_model(tmp_path / "model", model, tokenizer)}
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1="}\n' * 2)
    alone = task_of(prompts=str(tmp_path / "p.jsonl"), **flags)
    assert alone.verifier is None and alone.weights == [1.0]
    (reward,) = alone.rewards
    texts = ("abc", "d" * 24)
    expected = [model(torch.tensor([tokenizer(t).input_ids])).logits.item() for t in texts]
    assert reward(["a", "dd"], ["bc", "d" * 22]) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(InputError, match=r"takes 24 tokens, and a prompt with .* has 25"):
        reward(["a" * 20], ["b" * 5])
    both = task_of(reward=["brevity"], reward_weights=[2.0, 0.5], **flags)
    assert both.weights == [2.0, 0.5] and both.rewards[1].__name__ == "reward_model"


# --- Verifiers ---


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("12 + 34 = 46.", 46, 1),
        ("46, not 47", "46", 0),
        ("-46", 46, 0),
        ("3.5", "5", 0),
        ("it is .5", ".5", 1),
        (".5", 5, 0),
        ("four", 4, 0),
        ("it is 1,024.", "1,024", 1),
        ("3,4", 4, 1),
        ("12345678901234568", "12345678901234567", 0),
    ],
)
def test_numeric_match_compares_the_last_number_exactly(text, answer, expected):
    assert REWARDS["numeric_match"]([text], answer=[answer]) == [expected]


@pytest.mark.parametrize(
    ("text", "right", "strict"),
    [
        ("#### 1072\nQ: 99", 1, 1),
        ("####\n$1,072.00", 1, 1),
        ("#### 71\n#### 1072\n#### ", 1, 1),
        ("#### 1072\n#### 71", 0, 0),
        ("#### -$1072", 0, 0),
        ("It is $1,072.", 1, 0),
        ("\\boxed{1{,}072}, since 1002 + 70", 1, 0),
        ("1002 + 70 = 1072 dollars, as 268 * 4", 0, 0),
        ("1072,000", 0, 0),
        ("", 0, 0),
    ],
)
def test_gsm8k_reads_the_result_as_it_is_written(text, right, strict):
    answer = ["She has 7 * 10 = <<7*10=70>>70, and 1002 more, of 2000.\n#### 1,072"]
    assert REWARDS["gsm8k"]([text], answer=answer) == [right]
    assert REWARDS["gsm8k_strict"]([text], answer=answer) == [strict]


def test_the_verifier_is_the_one_that_is_named_else_a_reward_that_is_one_else_the_tasks(tmp_path):
    path, own = tmp_path / "p.jsonl", f"{tmp_path}/mine.py:one"
    (tmp_path / "mine.py").write_text("def one(completions): return [1.0] * len(completions)")
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n')

    def verifier(**flags):
        return task_of(**flags).verifier.__name__

    assert verifier(prompts=str(path), reward=["brevity", "gsm8k", "exact_match"]) == "gsm8k"
    assert verifier(reward=["gsm8k"], prompts=str(path), verifier="exact_match") == "exact_match"
    assert verifier(verifier=own) == "one" and task_of(verifier=own).rewards == task_of().rewards
    assert verifier() == verifier(prompts=str(path)) == "numeric_match"
    assert verifier(reward=["brevity"]) == "numeric_match", "that of the task's prompts"
    for flag in ("prompts", "eval_prompts"):
        assert task_of(reward=["brevity"], **{flag: str(path)}).verifier is None, (
            "not made for these"
        )


def test_the_verdict_on_a_completion_is_that_on_its_own_prompt():
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}]
    judge = Task([], [], [], verifier=REWARDS["numeric_match"])
    found = judge.verify(rows, ["2", "1", "3", "3"], make_rollout([[1]] * 4, [[2]] * 4))
    assert found.tolist() == [[1, 0], [1, 1]]


# --- Tasks ---


def test_no_held_out_sum_is_trained_on_not_even_mirrored():
    task, sides = task_of(), []
    for rows in (task.train, task.heldout):
        numbers = [row["prompt"].removesuffix("=").split("+") for row in rows]
        assert [str(int(a) + int(b)) for a, b in numbers] == [row["answer"] for row in rows]
        assert {len(number) for pair in numbers for number in pair} == {2}
        sides.append({frozenset(pair) for pair in numbers})
    assert len(sides[0]) + len(sides[1]) == 90 * 91 / 2 and not sides[0] & sides[1]
    (message,) = task_of("{{ messages }}").train[0]["prompt"]
    assert re.findall(r"\d+", message["content"]) == re.findall(r"\d+", task.train[0]["prompt"])


def test_sentiment_counts_words_within_bounds_and_has_its_own_held_out_openings():
    task = task_of(task="sentiment")
    texts = ["a great, GREAT film", "boring and bad", "a film", "good " * 10, "greatly"]
    assert task.rewards[0](texts) == [2, -2, 0, 3, 0]
    assert len(task.train) > 50 and task.heldout
    assert not [row for row in task.heldout if row in task.train]


def test_a_script_runs_with_a_task_of_ones_own(tmp_path, monkeypatch):
    def letters(chat):
        rows = [{"prompt": letter} for letter in "abcdefgh"]
        return Task(rows[:6], rows[6:], [lambda completions: list(map(len, completions))], [2.0])

    monkeypatch.setitem(TASKS, "letters", letters)
    flags = "--task letters --device cpu --num_steps 1 --prompts_per_step 2 --num_generations 2"
    grpo.main([*flags.split(), "--output_dir", f"{tmp_path}/run"])
    for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        assert sample["prompt"] in ("gh" if sample["split"] == "heldout" else "abcdef")
        assert sample["score"] == 2 * len(sample["completion"])


# --- tools/inspect_reward.py ---


def test_an_inspection_shows_distribution_extremes_and_flat_groups(capsys, tmp_path):
    (tmp_path / "inspected.py").write_text(
        "def length(completion_ids, prompts):\n"
        "    return [float(len(ids)) + ('9' in p) for ids, p in zip(completion_ids, prompts)]\n"
        "def first(prompts):\n"
        "    return [float(p.split('+')[0]) for p in prompts]\n"
    )
    reward = f"--reward {tmp_path}/inspected.py"
    inspect_reward.main(f"{reward}:length --max_new_tokens 5 --num_prompts 8".split())
    output = capsys.readouterr().out
    assert output.startswith("64 scores: mean ")
    low, high = (
        [float(line.split()[0]) for line in part.strip().split("\n")]
        for part in output.split("lowest:\n")[1].split("highest:\n")
    )
    assert len(low) == len(high) == 4 and max(low) < min(high)
    # A group is the completions of one prompt: equal where the prompt alone decides.
    flags = "--max_new_tokens 2 --num_prompts 4 --num_generations 3"
    inspect_reward.main(f"{reward}:first {flags}".split())
    assert "100% of the prompts give all their completions" in capsys.readouterr().out
