"""Rewards: TRL's signature, by name and from files, verifiers, the built-in tasks."""

import pickle
import re
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from small import EOS, byte_tokenizer, letter_tokenizer, make_rollout, save_model, task_of
from tokenizers import decoders
from transformers import GPT2Config, GPT2ForSequenceClassification

from plumbing.data import Task, completion_ids, completion_texts, load_reward
from plumbing.errors import InputError
from plumbing.preferences import RewardModel
from tasks import REWARDS, TASKS, add_prompts

ROWS = [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]
TEXTS = ["x", "yy", "z", "ww"]  # two completions of each prompt


def scored(*rewards, rows=ROWS, weights=(), **options) -> list[float]:
    """The scores of TEXTS."""
    tokenizer = byte_tokenizer()
    task = Task([], [], list(rewards), list(weights), tokenizer=tokenizer, eos_token_ids=[256])
    rollout = make_rollout([[1]] * 4, tokenizer(TEXTS).input_ids)
    scores, texts = task.score(rows, rollout, **options)
    assert texts == TEXTS
    return scores.tolist()


def test_a_reward_written_for_trl_gets_its_arguments():
    chat, got = [{"role": "user", "content": "q"}], {}
    # A column may be in some rows alone, and must not replace what is sampled.
    rows = [{"prompt": "a", "n": 1, "completions": ["?"]}, {"prompt": chat, "n": 2, "late": 0}]
    scored(lambda **given: got.update(given) or [0.0] * 4, rows=rows)
    assert got["prompts"] == ["a", "a", chat, chat] and got["n"] == [1, 1, 2, 2]
    assert got["late"] == [None, None, 0, 0]
    messages = [[{"role": "assistant", "content": text}] for text in TEXTS[2:]]
    assert got["completions"] == TEXTS[:2] + messages, "messages where the prompt has messages"
    assert [len(ids) for ids in got["completion_ids"]] == [1, 2, 1, 2]
    got["log_metric"]("length", 2.0)  # TRL keeps it
    got["log_extra"]("text", TEXTS)
    of_trl = {"prompts", "completions", "completion_ids", "trainer_state"}
    assert got.keys() == of_trl | {"log_metric", "log_extra", "n", "late"}
    *scores, unknown = scored(lambda prompts, completions, **others: [*others["n"][:3], None])
    assert scores == [1, 1, 2] and unknown != unknown, "None is NaN"
    assert scored(lambda completions: map(len, completions)) == [1, 2, 1, 2]


def test_a_reward_changes_none_of_the_rows():
    """A prompt that a reward makes longer is longer at every later step."""

    def greedy(prompts, completions, tags, completion_ids):
        for prompt, completion, tag, ids in zip(prompts, completions, tags, completion_ids):
            prompt += completion
            found.append((len(prompt), tag.pop(), len(ids)))
            ids.clear()
        return [0.0] * 4

    rows = [{"prompt": [{"role": "user", "content": x}], "tags": [1, 2]} for x in "ab"]
    before, found = repr(rows), []
    scored(greedy, greedy, rows=rows)
    assert repr(rows) == before and found == [(2, 2, 1), (2, 2, 2)] * 4


def test_a_reward_may_ask_for_the_step():
    reward = lambda trainer_state: [trainer_state.global_step] * 2  # noqa: E731
    task = Task(ROWS * 4, [], [reward], tokenizer=byte_tokenizer(), eos_token_ids=[256])
    rollout = make_rollout([[1]] * 2, [[256]] * 2)
    assert task.score(ROWS, rollout)[0].tolist() == [0, 0], "before the first batch"
    assert task.score(task.batch(3, 2), rollout)[0].tolist() == [3, 3]


def test_rewards_are_added_with_their_weights():
    first = lambda completions, **kw: [1.0, 1.0, None, None]  # noqa: E731
    second = lambda completions, **kw: [1.0, None, 1.0, None]  # noqa: E731
    for weights, expected in (
        ([1.0, 10.0], [11, 1, 10, None]),
        ([0.0, 10.0], [10, None, 10, None]),  # the first one is only watched
        ([0.0, 0.0], [0, 0, 0, None]),
        ([], [2, 1, 1, None]),
    ):
        scores = scored(first, second, weights=weights)
        assert [None if x != x else x for x in scores] == expected, weights
    known = lambda completions: [0.0, 0.0, 2.0, 2.0]  # noqa: E731
    assert scored(first, known, allow_none=False) == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("reward", "fault"),
    [
        (lambda **kw: [1.0] * 3, "returned 3 values, 0 not finite, for 4 completions"),
        (lambda **kw: [float("nan"), 1, None, 1], "returned 4 values, 1 not finite"),
        (lambda **kw: [1e39] * 4, "4 not finite"),
        (lambda **kw: ["good"] * 4, "must return a list of numbers or None: ValueError"),
        (lambda completions, answer: 1, "gets the columns .'n'. .*: missing a required .*'answer'"),
    ],
)
def test_a_reward_must_return_finite_numbers(reward, fault):
    with pytest.raises(InputError, match=f"^the reward <lambda> .*{fault}"):
        scored(reward)


def test_a_scored_text_ends_before_eos_and_padding():
    for prompt, completion, eos, text in (
        ([1], [71, 72, 256], 256, "hi"),
        ([1], [71, 72], 256, "hi"),
        ([1], [71, 72, 0], 0, "hi"),  # a second EOS, of the generation_config
        ([65, 127], [102, 65, 66], 256, "\ufffdbc"),  # an é that begins in the prompt
        ([256, 65], [256, 71, 72, 13], 13, "<|endoftext|>hi"),  # a tag may be a special token
    ):
        rollout = make_rollout([prompt, [1]], [completion, [2] * 5], eos=eos)
        assert completion_texts(byte_tokenizer(), rollout, [eos]) == [text, "#" * 5]
    words = letter_tokenizer(["\u2581a", "\u2581b", "\u2581c"])
    words.backend_tokenizer.decoder = decoders.Metaspace()  # the first word loses its space
    assert completion_texts(words, make_rollout([[0], [2, 0]], [[1, 2], [0]]), []) == [" b c", " a"]


# --- By name, from a file, a model ---


def test_a_completion_mask_with_a_hole_is_refused():
    """Of the tokens that a tool has written, say: the ids would be those of other tokens."""
    rollout = make_rollout([[1], [1]], [[5, 6, EOS], [7, EOS]])
    assert completion_ids(rollout) == [[5, 6, EOS], [7, EOS]]
    rollout.completion_mask[0, 1] = False
    with pytest.raises(ValueError, match="completion_mask has a hole"):
        completion_ids(rollout)


def test_ready_made_rewards_read_text_or_messages():
    texts = " a b\n", "0"
    for completions in (texts, [[{"role": "assistant", "content": text}] for text in texts]):
        for name, answer, expected in (
            ("exact_match", ["a b ", 0], [1, 1]),
            ("exact_match", ["a", "00"], [0, 0]),
            ("exact_match", [0.0, 0.0], [0, 1]),  # files with gaps make floats of 0
            ("exact_match", [0.5, 0.5], [0, 0]),
            ("brevity", None, [-0.02, -0.01]),
        ):
            assert load_reward(name, REWARDS)(completions=completions, answer=answer) == expected


OWN = """
import torch
from neighbour_of_mine import graded

torch.set_grad_enabled(False)

def lengths(completions):
    torch.set_grad_enabled(False)
    return [graded(text) for text in completions]
"""


def test_a_file_of_rewards_runs_once_and_keeps_gradients(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "neighbour_of_mine.py").write_text("graded = len")
    (tmp_path / "rewards_of_mine.py").write_text(OWN)
    spec = f"{tmp_path}/rewards_of_mine.py:lengths"
    lengths = load_reward(spec, REWARDS)
    assert load_reward(spec, REWARDS) is lengths, "it ran once"
    assert torch.is_grad_enabled(), "as if the file had not switched them off"
    assert scored(lengths) == [1, 2, 1, 2] and torch.is_grad_enabled()
    # A pool of processes sends a function by the name of its module, and the path.
    assert pickle.loads(pickle.dumps(lengths)) is lengths and str(tmp_path) in sys.path


def test_a_reward_model_is_the_last_of_the_rewards(tmp_path):
    config = GPT2Config(vocab_size=257, n_embd=8, n_layer=1, n_head=1, num_labels=1)
    model = save_model(tmp_path / "rm", GPT2ForSequenceClassification(config), byte_tokenizer())
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1="}\n' * 2)
    alone = task_of(prompts=str(tmp_path / "p.jsonl"), reward_model=model, bf16=False)
    assert alone.verifier is None and len(alone.rewards) == 1
    assert alone.frozen_models == [alone.rewards[0].model]
    tokens = byte_tokenizer()(["2<|endoftext|>", "34"]).input_ids
    scores, _ = alone.score(alone.train[:1], make_rollout([[1]] * 2, tokens, eos=256))
    first, second = RewardModel(model, "cpu")(["1+1="] * 2, ["2", "34"])
    assert scores.tolist() == [first, second] and first != second
    both = task_of(reward_model=model, reward=["brevity"], reward_weights=[2.0, 0.5])
    assert both.weights == [2.0, 0.5] and both.rewards[0] is REWARDS["brevity"]


# --- Verifiers ---


THOUSANDS = [r"12,\!500", r"12\,500", "12~500", "12\xa0500", "12\u2009500", "12_500", "12'500"]
PARTS = ["1/18", "1 / 18.", r"\frac{1}{18}", r"\dfrac 1{18}", r"\frac{x}{18}", "1\u204418", "x/18"]
PARTS += ["2^10", "2^{10}", "10^-2", "2**10", "10^{12}", "2 ^ 10"]
PARTS += [
    r"\frac12",
    r"\tfrac1{18}",
    r"\frac{1}2",
    r"\dfrac 12",
    "10³",
    "2¹⁰",
    "10⁻²",
    "2½",
    "½",
    "1 ⅔",
]


def test_numeric_match_compares_the_marked_or_last_number():
    gsm8k = "She has 7 * 10 = <<7*10=70>>70, and 1002 more, of 2000.\n#### 1,072"
    for text, answer, expected in (
        ("12 + 34 = 46.", 46, 1),
        ("-46", 46, 0),
        ("it is 1,024.", "1,024 in all", 1),
        ("3,4567", 4567, 1),
        ("12345678901234568", "12345678901234567", 0),
        ("it is x=-5", "\u22125", 1),  # the minus sign of Unicode
        ("\u20135", -5, 1),  # a dash
        ("-$5", -5, 1),
        ("6.02e23", 23, 0),
        ("2E-3", "0.002", 1),
        ("1e99999999999999999999", 5, 0),  # it overflows
        ("10-5", 5, 1),
        ("(1)-5", 5, 1),
        ("#### 1072\nQ: 99", gsm8k, 1),
        ("#### 71\n#### 1072\n#### ", gsm8k, 1),
        ("\\boxed{1{,}072}", gsm8k, 1),
        ("1002 + 70 = 1072 dollars, as 268 * 4", gsm8k, 0),
        ("1072,000", gsm8k, 0),
        # A heading of Markdown is no mark.
        ("#### Part 1\n4 bags\n#### Part 2: more\n4 + 5 = 9", 9, 1),
        ("#### 1. Bags\n4\n#### 2) More\n4 + 5 = 9", 9, 1),
        ("#### 2nd step\n9", 9, 1),
        ("##### 2 steps\n9", 9, 1),
        ("#### **$-9.**\nAs 4", -9, 1),
        ("####\n\\boxed{.5}. As 4", 0.5, 1),
        # Thousands, of LaTeX and of others.
        *((f"{text} dollars", 12500, 1) for text in THOUSANDS),
        *(("12500", f"{text} dollars", 1) for text in THOUSANDS),
        ("12\u202f500\u202f000", 12500000, 1),
        ("12 500", 12500, 0),
        ("_18_", 18, 1),
        # What is a part of a number, or of a unit.
        ("18 $m^{2}$", "18 cm²", 1),
        ("18 m³", 3, 0),
        # Answers that a program has computed: as they would be written.
        ("3", 1.1 * 3 - 0.3, 1),
        ("0.3", 0.1 + 0.2, 1),
        ("0.30000000000000002", 0.1 + 0.2, 0),
        ("1234567890123456", 1234567890123456.0, 1),
        ("1e-7", 1e-7, 1),
        ("x_1 = 18, not x_{12}", 18, 1),
        ("**18**", 18, 1),
        *((text, part, 0) for text in PARTS for part in (1, 2, 10, 12, 18, 0.1)),
    ):
        assert REWARDS["numeric_match"]([text], answer=[answer]) == [expected], text


def test_exact_match_compares_what_a_reader_sees():
    for text, answer in (
        ("Caf\u00e9", "Cafe\u0301"),
        ("Cafe\u0301", "Caf\u00e9"),
        ("0.3", 0.1 + 0.2),
    ):
        assert REWARDS["exact_match"]([text], answer=[answer]) == [1]


@pytest.mark.parametrize("answer", [None, True, ["2"], {"value": "2"}, float("nan"), "", " \n"])
def test_answers_must_be_text_or_numbers(answer):
    with pytest.raises(InputError, match="needs text or numbers as answers, not"):
        REWARDS["exact_match"](["2"], answer=[answer])
    for answer in (PARTS[0], r"\frac34", "10³", "2½", ""):
        with pytest.raises(InputError, match="needs one number as an answer, not"):
            REWARDS["numeric_match"](["2"], answer=[answer])


def test_flags_or_the_task_name_the_verifier(tmp_path, monkeypatch, capsys):
    (path := tmp_path / "p.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    rows, verifier = [{"prompt": "1+2=", "answer": "3"}], REWARDS["numeric_match"]
    few = Task(rows, rows, [verifier], verifier=verifier, about="Look at the sum.")
    monkeypatch.setitem(TASKS, "add", lambda chat: replace(few))
    for flags, expected in (
        ({"prompts": path, "reward": ["brevity", "numeric_match", "exact_match"]}, "numeric_match"),
        ({"prompts": path, "reward": ["numeric_match"], "verifier": "exact_match"}, "exact_match"),
        ({"prompts": path}, "numeric_match"),
        ({"reward": ["brevity"]}, "numeric_match"),  # that of the task's prompts
        ({"reward": ["brevity"], "prompts": path}, None),  # for which it was not made
        ({"reward": ["brevity"], "eval_prompts": path}, None),
    ):
        assert getattr(task_of(**flags).verifier, "__name__", None) == expected, flags
        assert ("Look at the sum." in capsys.readouterr().out) == ("prompts" not in flags)


def test_a_run_says_which_rewards_it_adds(tmp_path, capsys):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text("def good(completions, **k): return [1.0, 3.0]")
    files = [f"{tmp_path}/{folder}/mine.py:good" for folder in ("a", "b")]
    task = task_of(reward=["brevity", *files], reward_weights=[0.5, 1, -2])
    line = "Rewards: brevity (weight 0.5), good_2 (weight 1), good_3 (weight -2)\n"
    assert line in capsys.readouterr().out
    task.score(task.train[:1], make_rollout([[1]] * 2, [[71, 256], [71, 256]]))
    means = {"brevity": pytest.approx(-0.01), "good_2": 2, "good_3": 2}
    assert task.means == {f"reward/{name}": mean for name, mean in means.items()}


# --- Tasks ---


def test_no_held_out_sum_is_trained_on_mirrored():
    sides = []
    for rows, messages in zip(add_prompts(), add_prompts(chat=True), strict=True):
        numbers = [row["prompt"].removesuffix("=").split("+") for row in rows]
        assert [str(int(a) + int(b)) for a, b in numbers] == [row["answer"] for row in rows]
        sides.append({frozenset(pair) for pair in numbers})
        assert re.findall(r"\d+", messages[0]["prompt"][0]["content"]) == numbers[0]
    assert len(sides[0]) + len(sides[1]) == 90 * 91 / 2 and not sides[0] & sides[1]


def test_sentiment_counts_words_within_bounds():
    texts = ["a great, GREAT film", "boring and bad", "good " * 10, "bad " * 10, "greatly"]
    assert REWARDS["sentiment"](texts) == [2, -2, 3, -3, 0]


def test_a_task_of_ones_own_may_weight_its_rewards(monkeypatch):
    @dataclass
    class Judge:  # it has no hash
        def __call__(self, completions):
            return [0.0] * len(completions)

    rows, rewards = [{"prompt": letter} for letter in "abcdefgh"], [REWARDS["brevity"], Judge()]
    own = Task(rows[:6], rows[6:], rewards, [2.0, 1.0])
    monkeypatch.setitem(TASKS, "letters", lambda chat: own)
    task = task_of(task="letters")
    assert (task.train, task.heldout, task.weights) == (rows[:6], rows[6:], [2.0, 1.0])
    assert task.rewards == rewards and task.verifier is None
    assert task_of(task="letters", reward_weights=[3.0, 4.0]).weights == [3, 4], "a flag wins"
    assert task_of(task="letters", reward=["sentiment"]).weights == [1], "of its own rewards"


def test_a_verdict_is_that_on_its_own_prompt():
    judge = Task([], [], [], verifier=REWARDS["numeric_match"])
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}]
    found = judge.verify(rows, ["2", "1", "3", "3"], make_rollout([[1]] * 4, [[2]] * 4))
    assert found.tolist() == [[1, 0], [1, 1]]
    for verdict in (-1.0, 2.0):
        judge.verifier = lambda completions, verdict=verdict: [verdict] * len(completions)
        with pytest.raises(InputError, match=f"a verdict is {verdict:g}: from a verifier 1 is"):
            judge.verify(rows, ["2"] * 4, make_rollout([[1]] * 4, [[2]] * 4))
