"""Prompts, rewards and what becomes of text on its way to tokens and back."""

import json
import re
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small import EOS, byte_tokenizer, make_rollout, save_model, small_gpt2
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from plumbing.config import TaskConfig
from plumbing.data import RewardModel, Task, load_reward, load_task
from plumbing.errors import InputError
from plumbing.loading import load_policy, load_tokenizer
from plumbing.prompts import prompt_batch, read_prompts
from plumbing.reward_models import text_ids
from plumbing.scoring import check_prompts, decode, encode_prompts, score, verify
from tasks import (
    REWARDS,
    TASKS,
    add_prompts,
    answer_is_no_number,
    numeric_match,
    sentiment_prompts,
    sentiment_reward,
)
from tools import inspect_reward
from tools.inspect_reward import describe_scores, explained_by_prompt

REPOSITORY = Path(__file__).parent.parent
CHAT_TEMPLATE = (
    "{{ '<|endoftext|>' }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def task_config(**options) -> TaskConfig:
    """The flags of a task at their defaults, but for `options`."""
    return TaskConfig(**({"num_generations": 1, "max_new_tokens": 8, "task": "add"} | options))


# --- Built-in tasks ---


@pytest.mark.parametrize("digits", [1, 2, 3])
def test_no_held_out_sum_is_trained_on_not_even_mirrored(digits):
    train, heldout = add_prompts(digits)
    pairs = [
        {frozenset(r["prompt"].strip("=").split("+")) for r in rows} for rows in (train, heldout)
    ]
    assert len(pairs[0]) > 30 and len(pairs[1]) > 5 and not pairs[0] & pairs[1]
    assert add_prompts(digits) == (train, heldout)
    for row in train + heldout:
        a, b = row["prompt"].strip("=").split("+")
        assert len(a) == len(b) == digits and int(row["answer"]) == int(a) + int(b)
    sums = {int(row["answer"]) for row in train + heldout}
    # From 0+0, 10+10 and 100+100 on.
    assert min(sums) == 0 if digits == 1 else min(sums) >= 2 * 10 ** (digits - 1)


def test_chat_models_get_the_sum_as_a_message():
    train, _ = add_prompts(2, chat=True)
    plain, _ = add_prompts(2)
    (message,) = train[0]["prompt"]
    assert message["role"] == "user"
    assert re.findall(r"\d+", message["content"]) == re.findall(r"\d+", plain[0]["prompt"])


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("46", 1), ("12 + 34 = 46.", 1), ("46, not 47", 0), ("It is 1,046", 0), ("", 0),
        ("four", 0), ("046", 1), ("-46", 0), ([{"role": "assistant", "content": "so 46"}], 1),
    ],
)  # fmt: skip
def test_the_verifier_reads_the_last_number(completion, expected):
    assert numeric_match([completion], ["46"]) == [expected]


def test_sentiment_counts_words_within_bounds_and_has_its_own_held_out_openings():
    texts = ["a great, GREAT film", "boring and bad", "a film", "good " * 10, "greatly"]
    assert sentiment_reward(texts) == [2, -2, 0, 3, 0]
    train, heldout = sentiment_prompts()
    assert len(train) > 50 and heldout and not [row for row in heldout if row in train]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sentimant", "did you mean sentiment"),
        ("sing", "--task sing: not in tasks.py, which has add, s"),
        (None, "--task None: not in tasks.py"),
    ],
)
def test_an_unknown_task_is_refused_with_the_names_that_there_are(name, message):
    with pytest.raises(InputError, match=message):
        load_task(task_config(task=name), TASKS, REWARDS, byte_tokenizer(), torch.device("cpu"))


def test_a_task_needs_prompts_and_its_own_weights_hold_unless_flags_say_otherwise():
    rows = [{"prompt": "a"}]
    tasks = {
        "none": lambda config, chat: Task([], rows, [sentiment_reward]),
        "two": lambda config, chat: Task(rows, rows, [sentiment_reward] * 2, [1.0, 0.5]),
    }

    def load(**flags) -> Task:
        return load_task(task_config(**flags), tasks, REWARDS, byte_tokenizer(), "cpu")

    with pytest.raises(InputError, match="--task none: needs prompts"):
        load(task="none")
    assert load(task="two").weights == [1.0, 0.5]
    assert load(task="two", reward_weights=[2.0, 3.0]).weights == [2.0, 3.0]
    assert load(task="two", reward=["brevity"]).weights == [1.0]


OWN_TASKS = """
from plumbing.data import Task

def vowels(completions, **columns):
    return [sum(letter in "aeiou" for letter in text) / 4 for text in completions]

def letters(config, chat):
    rows = [{"prompt": letter} for letter in "abcdefgh"]
    return Task(rows[:6], rows[6:], [vowels])

TASKS = {"letters": letters}
REWARDS = {"vowels": vowels}
"""


USES_OWN_TASKS = """
import sys

sys.path[:0] = [FOLDER, "."]
import tasks  # before the scripts: they get the one in FOLDER
import grpo, ppo, rloo
from tools import inspect_reward

FLAGS = "--task letters --device cpu --max_new_tokens 4 --num_generations 2".split()
RUN = [*FLAGS, "--num_steps", "1", "--prompts_per_step", "4"]
ppo.main([*RUN, "--output_dir", f"{FOLDER}/ppo"])
grpo.main([*RUN, "--output_dir", f"{FOLDER}/grpo", "--reward", "vowels"])
rloo.main([*RUN, "--output_dir", f"{FOLDER}/rloo"])
inspect_reward.main([*FLAGS, "--num_prompts", "4"])
"""


@pytest.mark.slow
def test_the_scripts_run_with_a_tasks_py_of_ones_own(tmp_path):
    """A file with a TASKS and a REWARDS of its own, in place of the built-in one."""
    (tmp_path / "tasks.py").write_text(OWN_TASKS)
    program = f"FOLDER = {str(tmp_path)!r}\n{USES_OWN_TASKS}"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "8 scores: mean" in done.stdout  # of the inspection
    for script in ("ppo", "grpo", "rloo"):
        lines = (tmp_path / script / "samples.jsonl").read_text().splitlines()
        samples = [json.loads(line) for line in lines]
        heldout = [sample["prompt"] for sample in samples if sample["split"] == "heldout"]
        assert set(heldout) == {"g", "h"}
        for sample in samples:
            vowels = sum(letter in "aeiou" for letter in sample["completion"])
            assert sample["score"] == vowels / 4


# --- Prompts of the user ---


def test_a_prompt_may_leave_just_the_room_that_its_completion_needs():
    model, tokenizer = load_policy("tiny"), load_tokenizer("tiny")
    task = SimpleNamespace(train=[{"prompt": "12+34="}], heldout=[{"prompt": "5+6="}])
    room = model.config.n_positions - len(tokenizer("12+34=").input_ids)
    check_prompts(SimpleNamespace(max_new_tokens=room), model, tokenizer, task)
    turned = SimpleNamespace(train=task.heldout, heldout=task.train)  # one that is only evaluated
    for given in (task, turned):
        with pytest.raises(InputError, match=f"leaves no room for {room + 1} new ones"):
            check_prompts(SimpleNamespace(max_new_tokens=room + 1), model, tokenizer, given)


def test_a_token_that_the_model_lacks_is_refused_also_if_it_lacks_just_one(small_model):
    # small_model knows 40 tokens, 0 to 39.
    config = SimpleNamespace(max_new_tokens=1, model="m")
    for last, fits in ((39, True), (40, False)):
        rows = [{"prompt": "x"}]
        task = SimpleNamespace(train=rows, heldout=[])

        def tokenizer(texts: list[str], last: int = last) -> SimpleNamespace:
            return SimpleNamespace(input_ids=[[3, last] for _ in texts])

        if fits:
            check_prompts(config, small_model, tokenizer, task)
        else:
            with pytest.raises(InputError, match="id 40, and the model knows 40 tokens"):
                check_prompts(config, small_model, tokenizer, task)


def test_prompts_are_checked_at_once_and_the_one_at_fault_is_named(small_model, monkeypatch):
    tokenizer, calls = byte_tokenizer(), []
    real = type(tokenizer).__call__

    def noted(self, *args, **options):
        calls.append(args)
        return real(self, *args, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", noted)
    small_model.resize_token_embeddings(257)
    config = SimpleNamespace(max_new_tokens=1, model="m")
    rows = [{"prompt": "x" * n} for n in (3, 1, 2)]
    check_prompts(config, small_model, tokenizer, SimpleNamespace(train=rows, heldout=rows[:1]))
    assert len(calls) == 1
    for prompt, message in (("", "the prompt '' has no tokens"), ("\ud800", "can't be tokenised")):
        task = SimpleNamespace(train=rows, heldout=[{"prompt": prompt}])
        with pytest.raises(InputError, match=message):
            check_prompts(config, small_model, tokenizer, task)


def test_prompts_are_read_with_all_their_columns(tmp_path):
    file = tmp_path / "p.jsonl"
    rows = [{"prompt": "a\u2028b", "level": 3}, {"prompt": [{"role": "user", "content": "c"}]}]
    # As they are, a line separator of Unicode among them, which ends no line of JSON.
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    file.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    assert read_prompts(file) == rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompts"),
        ('{"prompt": "a"}\n{"prompt": ', "line 2: not JSON"),
        ('{"prompt": "a"}\n\n{"text": "b"}', 'line 3: no key "prompt"'),
        ('["prompt"]', 'line 1: no key "prompt"'),
        ('{"prompt": ' + "9" * 5000 + "}", "line 1: not JSON"),
        ("[" * 100_000, "line 1: not JSON"),
        ('{"prompt": 5}', "line 1"),
        ('{"prompt": ""}', "line 1"),
        ('{"prompt": [{"role": "user"}]}', "line 1"),
    ],
)
def test_a_fault_in_the_prompts_file_is_named_with_its_line(tmp_path, text, message):
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    with pytest.raises(InputError, match=message) as error:
        read_prompts(file)
    assert "p.jsonl" in str(error.value) and "\n" not in str(error.value)


def test_a_tenth_of_a_prompts_file_is_held_out_and_of_fewer_than_ten_none(tmp_path, capsys):
    file = tmp_path / "p.jsonl"
    for n, expected in ((1, (1, 1)), (2, (2, 2)), (9, (9, 9)), (10, (9, 1)), (50, (45, 5))):
        file.write_text("\n".join(json.dumps({"prompt": f"p{i}"}) for i in range(n)))
        config = task_config(task="sentiment", prompts=str(file))
        task = load_task(config, TASKS, REWARDS, byte_tokenizer(), torch.device("cpu"))
        assert (len(task.train), len(task.heldout)) == expected
        assert ("none is held out" in capsys.readouterr().out) == (n < 10)
    assert not [row for row in task.heldout if row in task.train]


def test_a_prompt_that_the_file_has_twice_is_not_on_both_sides(tmp_path):
    file = tmp_path / "p.jsonl"
    rows = [{"prompt": f"p{i % 40}", "n": i} for i in range(50)]
    file.write_text("\n".join(map(json.dumps, rows)))
    config = task_config(task="sentiment", prompts=str(file))
    task = load_task(config, TASKS, REWARDS, byte_tokenizer(), torch.device("cpu"))
    held = {row["prompt"] for row in task.heldout}
    assert 0 < len(task.heldout) < 5 and len(task.train) == 45
    assert not [row for row in task.train if row["prompt"] in held]


def test_every_prompt_is_seen_once_per_pass_and_batches_depend_on_seed_and_step_alone():
    rows = [{"prompt": str(i)} for i in range(10)]
    steps = [prompt_batch(rows, step, 4, seed=0) for step in range(5)]
    assert all(len(batch) == 4 for batch in steps)
    seen = [row["prompt"] for batch in steps for row in batch]
    assert sorted(seen[:10]) == sorted(seen[10:]) == sorted(str(i) for i in range(10))
    assert seen[:10] != seen[10:]
    assert prompt_batch(rows, 3, 4, seed=0) == steps[3]
    assert prompt_batch(rows, 3, 4, seed=1) != steps[3]
    assert len(prompt_batch(rows[:2], 0, 7, seed=0)) == 7
    # The second pass of a seed is not the first one of the next seed.
    assert prompt_batch(rows, 1, 10, seed=0) != prompt_batch(rows, 0, 10, seed=1)


# --- Tokens ---


def test_prompts_are_padded_on_the_left_and_masked():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<added to the tokenizer alone>"})
    ids, mask = encode_prompts(tokenizer, [{"prompt": "abc"}, {"prompt": "d"}])
    assert tokenizer.pad_token_id == 257 and ids.max() < 257, "an id that the model doesn't know"
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]] and ids[1, 2] == ids[0, 0] + 3


def test_a_chat_prompt_gets_exactly_one_bos():
    """Tokenising a rendered template with special tokens on puts a second BOS in front."""
    tokenizer = byte_tokenizer()
    tokenizer.bos_token, tokenizer.chat_template = "<|endoftext|>", CHAT_TEMPLATE
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.eos_token_id)]
    )
    assert encode_prompts(tokenizer, [{"prompt": "a"}])[0].tolist()[0][0] == tokenizer.bos_token_id
    ids, _ = encode_prompts(tokenizer, [{"prompt": [{"role": "user", "content": "a"}]}])
    assert (ids == tokenizer.bos_token_id).sum() == 1
    assert tokenizer.decode(ids[0]).endswith("[assistant]")


def test_a_prompt_without_tokens_is_refused():
    tokenizer = byte_tokenizer()
    tokenizer._tokenizer.normalizer = normalizers.Strip()
    with pytest.raises(InputError, match="' ' has no tokens"):
        encode_prompts(tokenizer, [{"prompt": "a"}, {"prompt": " "}])


def test_messages_need_a_chat_template():
    with pytest.raises(InputError, match="chat template"):
        encode_prompts(byte_tokenizer(), [{"prompt": [{"role": "user", "content": "a"}]}])


def test_a_prompt_that_cannot_be_tokenised_is_named_in_one_line():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    for prompt in ("a\ud800", [{"role": "user", "content": "b"}]):
        with pytest.raises(InputError, match="can't be tokenised") as error:
            encode_prompts(tokenizer, [{"prompt": prompt}])
        assert "\n" not in str(error.value)


def test_a_completion_keeps_its_leading_space_where_words_carry_it():
    """SentencePiece tokenizers drop the space of the first word of what they decode."""
    vocabulary = {"<unk>": 0, "\u2581film": 1, "\u2581great": 2, "<eos>": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    assert tokenizer.decode([2]) == "great"
    assert decode(tokenizer, make_rollout([[1]], [[2]])) == [" great"]


def test_text_ends_before_eos_and_padding():
    tokenizer = byte_tokenizer()
    eos = tokenizer.eos_token_id
    ids = tokenizer(["hi", "there"]).input_ids
    rollout = make_rollout([[1], [2]], [[*ids[0], eos], ids[1]])
    rollout.finished = torch.tensor([True, False])
    assert decode(tokenizer, rollout) == ["hi", "there"]


def test_an_eos_that_is_no_special_token_is_not_part_of_the_text_either():
    """A model may end with any id that its generation_config names."""
    tokenizer = byte_tokenizer()
    ids = tokenizer(["hi.", "ho."]).input_ids
    rollout = make_rollout([[1], [2]], ids, eos=ids[0][-1])
    rollout.finished = torch.tensor([True, False])
    assert decode(tokenizer, rollout) == ["hi", "ho."]


def test_a_character_that_begins_in_the_prompt_and_ends_in_the_completion_cuts_nothing_else():
    """é has two bytes, one on each side: the whole doesn't begin with the text of the prompt."""
    tokenizer = byte_tokenizer()
    first, second = tokenizer("é").input_ids
    b, c = tokenizer("bc").input_ids
    rollout = make_rollout([[b, first]], [[second, b, c]], eos=256)
    assert decode(tokenizer, rollout) == ["\ufffdbc"]


# --- Rewards ---


def scored(reward, rows=None, **task) -> torch.Tensor:
    tokenizer = byte_tokenizer()
    rows = rows or [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]
    ids = tokenizer(["x", "yy", "z", "ww"]).input_ids
    rollout = make_rollout([[1]] * 4, ids)
    rewards = reward if isinstance(reward, list) else [reward]
    weights = task.get("weights", [1.0] * len(rewards))
    return score(Task([], [], rewards, weights), rows, rollout, tokenizer)


def test_a_reward_written_for_trl_gets_prompts_completions_ids_and_columns():
    seen = {}

    def reward(prompts, completions, completion_ids, n, **kwargs):
        seen.update(prompts=prompts, completions=completions, n=n, ids=completion_ids)
        return [1.0, 2.0, 3.0, None]

    scores, texts = scored(reward)
    assert texts == ["x", "yy", "z", "ww"]
    assert seen["prompts"] == ["a", "a", "b", "b"] and seen["n"] == [1, 1, 2, 2]
    assert seen["completions"] == texts and [len(i) for i in seen["ids"]] == [1, 2, 1, 2]
    assert scores[:3].tolist() == [1, 2, 3] and scores[3].isnan()


def test_columns_that_only_some_rows_have_reach_the_reward_and_replace_nothing_sampled():
    seen = {}

    def reward(**columns):
        seen.update(columns)
        return [0.0] * 4

    scored(reward, [{"prompt": "a", "completions": ["?"]}, {"prompt": "b", "late": 5}])
    assert seen["completions"] == ["x", "yy", "z", "ww"]
    assert seen["late"] == [None, None, 5, 5] and seen["prompts"] == ["a", "a", "b", "b"]


def test_a_reward_may_name_only_what_it_reads():
    assert scored(lambda completions: [len(c) for c in completions])[0].tolist() == [1, 2, 1, 2]


def test_for_chat_prompts_completions_are_messages():
    rows = [{"prompt": [{"role": "user", "content": "q"}]}] * 2
    seen = []
    scored(lambda completions, **kw: seen.extend(completions) or [0.0] * 4, rows)
    assert seen[1] == [{"role": "assistant", "content": "yy"}]


def test_several_rewards_are_added_with_their_weights_and_none_counts_as_absent():
    first = lambda completions, **kw: [1.0, 1.0, None, None]  # noqa: E731
    second = lambda completions, **kw: [1.0, None, 1.0, None]  # noqa: E731
    scores, _ = scored([first, second], weights=[1.0, 10.0])
    assert scores[:3].tolist() == [11, 1, 10] and scores[3].isnan()


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda **kw: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (lambda completions, **kw: [1.0] * 3, "returned 3 values for 4 completions"),
        (lambda completions, **kw: [float("nan")] * 4, "returned nan for 'x'"),
        (lambda completions, **kw: [float("inf")] * 4, "returned inf"),
        (lambda completions, **kw: [1e39] * 4, "returned inf"),
        (lambda completions, **kw: [10**400] * 4, "must return a list of numbers"),
        (lambda **kw: sys.exit(3), "raised SystemExit: 3"),
        (dict.fromkeys, "dict|fromkeys"),
        (lambda completions, **kw: 1.0, "must return a list"),
        (lambda completions, **kw: ["a"] * 4, "must return a list"),
        (lambda completions, missing: [1.0] * 4, "missing"),
    ],
)
def test_a_reward_at_fault_is_named_in_one_line(reward, message):
    with pytest.raises(InputError, match=message) as error:
        scored(reward)
    assert "\n" not in str(error.value)


def test_a_reward_is_loaded_from_a_file_by_name(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def good(completions, **kw):\n    return [1.0] * len(completions)\n")
    assert load_reward(f"{file}:good", REWARDS)(["a"]) == [1.0]
    # dataclasses look up the module of a class by its name where annotations are texts.
    record = "from dataclasses import dataclass\n\n@dataclass\nclass Kept:\n    x: int = 1\n"
    file.write_text(f"from __future__ import annotations\n{record}\ndef f(completions): pass\n")
    assert callable(load_reward(f"{file}:f", REWARDS))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mine.py", "FILE.py:FUNCTION"),
        ("nowhere.py:f", "no file nowhere.py"),
        ("{file}:other", "no function other"),
        ("{bad}:f", "fails on import"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_named(tmp_path, spec, message):
    file, bad = tmp_path / "mine.py", tmp_path / "bad.py"
    file.write_text("def good(): pass\n")
    bad.write_text("def f(:\n")
    with pytest.raises(InputError, match=message):
        load_reward(spec.format(file=file, bad=bad), REWARDS)


def test_answers_that_are_not_sums_need_a_reward_of_their_own(tmp_path):
    prompts, file = tmp_path / "p.jsonl", tmp_path / "mine.py"
    prompts.write_text('{"prompt": "capital of France?", "answer": "Paris"}')
    file.write_text("def one(completions, **kw):\n    return [1.0] * len(completions)\n")
    config = task_config(prompts=str(prompts))
    with pytest.raises(InputError, match="'Paris'; or give --reward"):
        load_task(config, TASKS, REWARDS, byte_tokenizer(), torch.device("cpu"))
    config.reward = [f"{file}:one"]
    task = load_task(config, TASKS, REWARDS, byte_tokenizer(), torch.device("cpu"))
    assert verify(task, task.heldout, ["12"], make_rollout([[1]], [[2]])) is None


def test_any_whole_number_is_an_answer_to_a_sum_and_nothing_else_is():
    for answer in ("46", -46, "-46", 0):
        assert answer_is_no_number({"prompt": "x", "answer": answer}) is None
    for answer in ("4.6", "", "4 6", "--4", None, "1" * 19):
        assert "'x'" in answer_is_no_number({"prompt": "x", "answer": answer})


def test_the_verifier_judges_the_prompts_of_its_task_whatever_the_reward_and_no_others(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 2)
    of_its_own = {"prompts": str(tmp_path / "p.jsonl")}

    def verifier(**options):
        arguments = TASKS, REWARDS, load_tokenizer("tiny"), torch.device("cpu")
        return load_task(task_config(**options), *arguments).verifier

    assert verifier() is verifier(reward=["brevity"]) is verifier(**of_its_own) is numeric_match
    assert verifier(reward=["brevity"], **of_its_own) is None, "it isn't made for these prompts"


def test_verify_gives_the_verdicts_on_each_prompt_and_none_without_a_verifier():
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}]
    four = make_rollout([[1]] * 4, [[2, EOS], [3], [4, EOS], [5, 6]])
    judge = Task([], [], [], [], numeric_match)
    assert verify(judge, rows, ["2", "2"], four[torch.tensor([0, 1])]).tolist() == [[1], [0]]
    # Several completions of a prompt are consecutive.
    assert verify(judge, rows, ["2", "1", "3", "3"], four).tolist() == [[1, 0], [1, 1]]
    assert verify(Task([], [], [], []), rows, ["2", "2"], four) is None
    ids = []
    spy = Task([], [], [], [], lambda completion_ids: ids.extend(completion_ids) or [1.0] * 4)
    verify(spy, rows, [""] * 4, four)
    assert ids == [[2, EOS], [3], [4, EOS], [5, 6]]


# --- Reward model ---


@pytest.fixture
def reward_model_folder(tmp_path):
    """Its pad id is its EOS id, as on most decoder checkpoints."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=257, n_positions=64, n_embd=32, n_layer=2, n_head=2, num_labels=1,
        initializer_range=0.5, eos_token_id=256, pad_token_id=256, bos_token_id=None,
    )  # fmt: skip
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    return save_model(tmp_path / "rm", GPT2ForSequenceClassification(config), tokenizer)


def test_a_batch_of_texts_scores_as_each_does_alone_at_its_last_token_even_if_that_is_eos(
    reward_model_folder,
):
    model = RewardModel(reward_model_folder, torch.device("cpu"))
    prompts, completions = ["a", "film", "b"], ["bcd", " x<|endoftext|>", "c"]
    batch = model(prompts=prompts, completions=completions)
    alone = [model([p], [c])[0] for p, c in zip(prompts, completions, strict=True)]
    assert batch == pytest.approx(alone, abs=1e-5)
    for p, c, value in zip(prompts, completions, batch, strict=True):
        ids = torch.tensor([model.tokenizer(p + c).input_ids])
        hidden = model.model.transformer(ids).last_hidden_state[0, -1]
        assert value == pytest.approx((model.model.score.weight @ hidden).item(), abs=1e-5)


def test_with_a_reward_model_alone_prompts_need_no_answer(reward_model_folder, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1="}\n' * 2)
    config = task_config(prompts=str(tmp_path / "p.jsonl"), reward_model=reward_model_folder)
    task = load_task(config, TASKS, REWARDS, byte_tokenizer(), torch.device("cpu"))
    assert task.rewards == [task.reward_model] and task.verifier is None
    config.reward_model = None
    with pytest.raises(InputError, match="or give --reward"):
        load_task(config, TASKS, REWARDS, byte_tokenizer(), torch.device("cpu"))


def test_a_text_may_fill_the_context_of_the_reward_model_and_no_more(reward_model_folder):
    model = RewardModel(reward_model_folder, torch.device("cpu"))
    assert len(model(["a" * 60], ["bcde"])) == 1
    with pytest.raises(
        InputError, match="takes 64 tokens, and a prompt with its completion has 65"
    ):
        model(["a" * 60], ["bcdef"])


def test_a_roberta_reward_model_scores_as_the_library_does_and_says_how_much_it_reads(tmp_path):
    """Its positions start at pad + 1: position ids from 0 would change every score silently."""
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=257, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=26, num_labels=1, pad_token_id=1,
        initializer_range=0.5,
    )  # fmt: skip
    model, tokenizer = RobertaForSequenceClassification(config).eval(), byte_tokenizer()
    tokenizer.model_max_length = 24
    reward = RewardModel(save_model(tmp_path / "r", model, tokenizer), torch.device("cpu"))
    expected = [model(torch.tensor([tokenizer(t).input_ids])).logits.item() for t in ("abc", "de")]
    assert reward(["a", "d"], ["bc", "e"]) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(InputError, match="takes 24 tokens"):
        reward(["a" * 20], ["b" * 5])


def test_the_reward_model_reads_prompt_and_completion(reward_model_folder):
    model = RewardModel(reward_model_folder, torch.device("cpu"))
    values = model(["a", "b", "a"], ["xyz", "xyz", "xyw"])
    assert len({round(v, 4) for v in values}) == 3
    assert not any(p.requires_grad for p in model.model.parameters())


def test_chat_messages_are_scored_through_the_reward_models_own_template(reward_model_folder):
    model = RewardModel(reward_model_folder, torch.device("cpu"))
    chat = ([[{"role": "user", "content": "q"}]], [[{"role": "assistant", "content": "a"}]])
    plain = model(["q\n"], ["a"])
    assert model(*chat) == pytest.approx(plain)
    model.tokenizer.chat_template = CHAT_TEMPLATE
    assert model(*chat) == pytest.approx(model(["<|endoftext|>[user]q[assistant]"], ["a"]))


def test_the_reward_model_reads_one_bos_where_template_and_tokenizer_both_write_it(
    reward_model_folder,
):
    model = RewardModel(reward_model_folder, torch.device("cpu"))
    model.tokenizer.chat_template = CHAT_TEMPLATE
    eos = model.tokenizer.eos_token_id
    model.tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", eos)]
    )
    chat = [{"role": "user", "content": "q"}], [{"role": "assistant", "content": "a"}]
    for texts in (chat, ("q", "a")):
        assert text_ids(model.tokenizer, *texts).count(eos) == 1


def test_a_text_longer_than_the_reward_model_reads_is_refused(reward_model_folder):
    with pytest.raises(InputError, match="64 tokens"):
        RewardModel(reward_model_folder, torch.device("cpu"))(["a" * 60], ["b" * 10])


def test_a_classifier_with_two_labels_or_a_language_model_is_no_reward_model(tmp_path):
    config = GPT2Config(vocab_size=257, n_embd=32, n_layer=1, n_head=2, num_labels=2)
    two = save_model(tmp_path / "two", GPT2ForSequenceClassification(config), byte_tokenizer())
    with pytest.raises(InputError, match="2 labels"):
        RewardModel(two, torch.device("cpu"))
    lm = small_gpt2(vocab_size=257)
    lm.config.num_labels = 1
    folder = save_model(tmp_path / "lm", lm, byte_tokenizer())
    with pytest.raises(InputError, match=r"no score\.weight"):
        RewardModel(folder, torch.device("cpu"))


def test_a_reward_model_and_a_function_are_added(reward_model_folder, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def one(completions, **kw):\n    return [1.0] * len(completions)\n")
    config = task_config(
        reward=[f"{file}:one"], reward_model=reward_model_folder, reward_weights=[2.0, 0.5]
    )
    task = load_task(config, TASKS, REWARDS, byte_tokenizer(), torch.device("cpu"))
    assert task.weights == [2.0, 0.5] and task.rewards[1] is task.reward_model
    config.reward_weights = [1.0]
    with pytest.raises(InputError, match=r"\[1.0\]: give one per reward, here 2"):
        load_task(config, TASKS, REWARDS, byte_tokenizer(), torch.device("cpu"))


# --- The embedded model ---


def test_the_embedded_tokenizer_gives_a_token_per_character_and_back():
    tokenizer = load_tokenizer("tiny")
    text = "12+34= Hello, world!\n"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text) and tokenizer.decode(ids) == text


# --- Ready-made rewards, other files, inspection ---


def test_numbers_of_17_digits_are_compared_exactly():
    """Of floats the last digit would be lost."""
    texts = ["12345678901234567", "12345678901234568"]
    assert REWARDS["numeric_match"](texts, answer=[texts[0]] * 2) == [1.0, 0.0]


def test_an_answer_may_have_commas():
    assert REWARDS["numeric_match"](["1024", "24"], answer=["1,024", "1,024"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "columns", "expected"),
    [
        ("exact_match", {"answer": ["a b", 7]}, [1.0, 1.0]),
        ("exact_match", {"answer": ["a", 70]}, [0.0, 0.0]),
        ("numeric_match", {"answer": ["0", "7.0"]}, [0.0, 1.0]),
        ("format_match", {"pattern": [r"\s*a.*", "a"]}, [1.0, 0.0]),
        ("format_match", {"pattern": [r"\s*a", r"\d"]}, [0.0, 1.0]),  # all of the text
        ("brevity", {}, [-0.02, -0.01]),
        ("no_repetition", {}, [0.0, 0.0]),
    ],
)
@pytest.mark.parametrize("chat", [False, True])
def test_a_ready_made_reward_is_named_by_its_name(name, columns, expected, chat):
    texts = [" a b\n", "7"]
    completions = [[{"role": "assistant", "content": t}] for t in texts] if chat else texts
    prompts = ["x"] * 2
    assert (
        load_reward(name, REWARDS)(prompts=prompts, completions=completions, **columns) == expected
    )


def test_repetition_is_the_share_of_runs_of_four_words_seen_before():
    text = "so very good it is " * 4  # 20 words, 17 runs of four, 5 of them different
    assert load_reward("no_repetition", REWARDS)(completions=[text]) == [pytest.approx(5 / 17 - 1)]


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [("it is 1,024.", 1024, 1), ("3.5", "5", 0), ("12.", 12, 1), ("-4", -4, 1), ("", 0, 0),
     ("3,4", 34, 0), ("3,4", 4, 1), ("1,0245", 10245, 0)],
)  # fmt: skip
def test_the_last_number_counts_with_its_decimals_and_thousands(text, answer, expected):
    assert numeric_match([text], [answer]) == [expected]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_tables_are_read_by_datasets_with_all_their_columns(kind, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"prompt": "1+1=", "answer": 2}, {"prompt": "2, 3", "answer": 5}]
    table, path = datasets.Dataset.from_list(rows), tmp_path / f"p.{kind}"
    getattr(table, f"to_{kind}")(str(path))
    assert read_prompts(path) == rows


def test_a_dataset_by_name_is_asked_for_its_split(monkeypatch):
    asked = []
    module = types.ModuleType("datasets")

    def load_dataset(*names, split):
        asked.append((*names, split))
        return SimpleNamespace(to_list=lambda: [{"prompt": "x"}])

    module.load_dataset, module.disable_progress_bars = load_dataset, lambda: None
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert read_prompts("some/where-1.5", "test") == [{"prompt": "x"}]
    read_prompts("some/where", "test", "main")
    assert asked == [("some/where-1.5", None, "test"), ("some/where", "main", "test")]


def test_without_datasets_a_table_is_refused_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install datasets, or give a file of JSON lines"):
        read_prompts("some/where")


def test_what_the_prompt_explains_is_all_none_or_the_share_that_was_put_in():
    generator = torch.Generator().manual_seed(0)
    of_prompt = torch.randn(2000, 1, generator=generator)
    noise = torch.randn(2000, 4, generator=generator)
    assert explained_by_prompt(of_prompt.expand(-1, 4)) == pytest.approx(1)
    assert explained_by_prompt(noise) < 0.03
    assert explained_by_prompt(of_prompt + noise) == pytest.approx(0.5, abs=0.05)


def test_constant_scores_and_missing_ones_are_described():
    lines = describe_scores(torch.tensor([[0.5, 0.5], [0.5, torch.nan]]))
    assert lines[0].startswith("3 scores: mean 0.5, std 0; min 0.5")
    assert lines[1:] == [
        "1 completions got no score (None)",
        "100% of the prompts give all their completions the same score",
    ]
    lines = describe_scores(torch.tensor([[0.0, 1.0], [0.5, torch.nan]]))
    assert [line.split()[:3] for line in lines if "#" in line] == [
        ["0", "to", "0.1"], ["0.5", "to", "0.6"], ["0.9", "to", "1"]
    ]  # fmt: skip
    assert "50% of the prompts give all their completions the same score" in lines
    assert sum("#" in line for line in lines) == 3


def test_an_inspection_shows_distribution_extremes_and_what_the_prompt_explains(capsys, tmp_path):
    (tmp_path / "r.py").write_text(
        "def length(completion_ids, completions, prompts):\n"
        "    return [float(len(ids)) + ('9' in p) for ids, p in zip(completion_ids, prompts)]\n"
    )
    flags = f"--reward {tmp_path}/r.py:length --max_new_tokens 5 --num_prompts 8"
    inspect_reward.main(flags.split())
    output = capsys.readouterr().out
    assert output.startswith("64 scores: mean ")
    assert re.search(r"the prompt alone explains \d+% of the variance", output)
    # A group is the completions of one prompt: equal where the prompt alone decides.
    (tmp_path / "r.py").write_text(
        "def length(prompts, completions):\n    return [float(p.split('+')[0]) for p in prompts]\n"
    )
    inspect_reward.main(f"{flags} --num_prompts 4 --num_generations 3".split())
    assert "100% of the prompts give all their completions" in capsys.readouterr().out
    lowest, highest = output.split("lowest:\n")[1].split("highest:\n")
    low, high = (
        [float(line.split()[0]) for line in part.strip().split("\n")] for part in (lowest, highest)
    )
    assert len(low) == len(high) == 4 and max(low) < min(high)
    assert "+" in lowest and "\N{RIGHTWARDS ARROW}" in lowest
    bars = re.findall(r"^ +(\S+) to (\S+) +#* (\d+)$", output, re.MULTILINE)
    assert len(bars) == 10 and sum(int(count) for _, _, count in bars) == 64
    assert [end for _, end, _ in bars[:-1]] == [start for start, _, _ in bars[1:]]
