"""The built-in prompts and rewards: the file to replace with your own.

A task is prompts plus a reward. A prompt is a dict with the key `prompt`, a string or chat
messages, and any further columns. A reward function has the signature that TRL uses,

    def reward(prompts, completions, **columns) -> list[float | None]

and returns a score for each completion, None where it has none. It may name any column of the
prompts as a parameter, and `completion_ids`, the sampled token ids. Where the prompts are chat
messages, each completion is `[{"role": "assistant", "content": text}]`.

The scripts need the two dicts at the end. TASKS holds the choices of --task: functions of the
flags, and of whether the model has a chat template, that return a Task. REWARDS holds what --reward
takes by name. A single function of your own needs no change here: --reward my_rewards.py:my_reward.
To see what a reward gives before training on it:

  python tools/inspect_reward.py --prompts my_prompts.jsonl --reward my_rewards.py:my_reward
"""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

from plumbing.answers import VERIFIERS, answer_form, numeric_match
from plumbing.data import Task
from plumbing.errors import InputError
from plumbing.prompts import Prompt, text_of
from plumbing.words import NEGATIVE, POSITIVE

# --- add: sums of two numbers, with a verifier ---


def add(config: Any, chat: bool) -> Task:
    """Sums of two numbers of --digits digits; 1 for a right answer, else 0."""
    train, heldout = add_prompts(config.digits, chat)
    return Task(
        train, heldout, [numeric_match], verifier=numeric_match, row_fault=answer_is_no_number
    )


def add_prompts(digits: int = 2, chat: bool = False) -> tuple[list[dict], list[dict]]:
    """Sums of two numbers of `digits` digits, 1 to 9: (train, held out), the same in every run.

    a + b and b + a are on the same side of the split: a held-out sum is not trained on mirrored.
    """
    if not 1 <= digits <= 9:
        raise InputError(f"--digits {digits} is out of range: choose 1 to 9")
    rng = random.Random(0)
    numbers = range(0 if digits == 1 else 10 ** (digits - 1), 10**digits)
    if digits <= 2:
        pairs = list(itertools.combinations_with_replacement(numbers, 2))
    else:  # too many to list: a sample
        pairs = sorted({tuple(sorted(rng.sample(numbers, 2))) for _ in range(5000)})
    rng.shuffle(pairs)
    num_heldout = len(pairs) // 5

    def rows(pairs: list[tuple[int, int]]) -> list[dict]:
        ordered = [pair for a, b in pairs for pair in sorted({(a, b), (b, a)})]
        rng.shuffle(ordered)
        return [{"prompt": add_prompt(a, b, chat), "answer": str(a + b)} for a, b in ordered]

    return rows(pairs[num_heldout:]), rows(pairs[:num_heldout])


def add_prompt(a: int, b: int, chat: bool) -> Prompt:
    """The question for a + b: as plain text for a base model, as a message for a chat model."""
    if not chat:
        return f"{a}+{b}="
    return [{"role": "user", "content": f"Add the numbers {a} and {b}. Write only the equation."}]


def answer_is_no_number(row: dict) -> str | None:
    """What is wrong with a prompt from --prompts for this task, None if nothing is."""
    if re.fullmatch(r"-?\d{1,18}", str(row.get("answer"))):
        return None
    return (
        'needs a key "answer" with a number in each line, and'
        f" {str(row['prompt'])[:60]!r} has {row.get('answer')!r}"
    )


# --- sentiment: openings of film reviews, rewarded by a list of words ---


def sentiment(config: Any, chat: bool) -> Task:
    """Openings of film reviews, to be continued in a positive tone."""
    train, heldout = sentiment_prompts()
    return Task(train, heldout, [sentiment_reward])


def sentiment_prompts() -> tuple[list[dict], list[dict]]:
    """Openings of film reviews: (train, held out), the same split in every run."""
    things = """film movie story plot acting script soundtrack ending cast director dialogue
    picture""".split()
    frames = [
        "The {} was",
        "I thought the {} was",
        "To me the {} felt",
        "In my opinion, the {} is",
        "Honestly, the {} was",
        "I just saw it, and the {} is",
        "After two hours, the {} seemed",
        "My friends said that the {} was",
        "What I remember most is that the {} was",
        "Compared with the book, the {} is",
    ]
    rows = [{"prompt": frame.format(thing)} for frame in frames for thing in things]
    random.Random(0).shuffle(rows)
    return rows[24:], rows[:24]


def sentiment_reward(completions: list, **columns) -> list[float]:
    """Positive minus negative words, in -3 to 3: crude on purpose, so that it can be hacked."""
    words = [re.findall(r"[a-z]+", text_of(c).lower()) for c in completions]
    counts = [sum((w in POSITIVE) - (w in NEGATIVE) for w in ws) for ws in words]
    return [float(max(-3, min(3, count))) for count in counts]


# --- Ready-made rewards, for --reward ---


def format_match(completions: list, pattern: list[str], **columns) -> list[float]:
    """1 where the whole completion matches the regular expression in the column pattern, else 0."""
    return [
        float(re.fullmatch(p, text_of(c), re.DOTALL) is not None)
        for c, p in zip(completions, pattern, strict=True)
    ]


def brevity(completions: list, **columns) -> list[float]:
    """Minus the number of words, in hundreds."""
    return [-len(text_of(c).split()) / 100 for c in completions]


def no_repetition(completions: list, **columns) -> list[float]:
    """Minus the share of runs of four words that have come before: 0 none, towards -1 all."""
    shares = []
    for words in (text_of(c).lower().split() for c in completions):
        runs = list(zip(words, words[1:], words[2:], words[3:]))
        shares.append(len(set(runs)) / len(runs) - 1 if runs else 0.0)
    return shares


# --- What the scripts use ---

TASKS = {"add": add, "sentiment": sentiment}
REWARDS = VERIFIERS | {
    "answer_form": answer_form,
    "format_match": format_match,
    "brevity": brevity,
    "no_repetition": no_repetition,
    "sentiment": sentiment_reward,
}
