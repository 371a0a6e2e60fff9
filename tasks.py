"""The built-in prompts and rewards: the file to replace with your own.

A task is prompts plus a reward. A prompt is a dict with the key `prompt`, a string or chat
messages, and any further columns. A reward function has the signature that TRL uses,

    def reward(prompts, completions, **columns) -> list[float | None]

and returns a score for each completion, None where it has none. It may name any column of the
prompts as a parameter, and `completion_ids`, the sampled token ids. Where the prompts are chat
messages, each completion is `[{"role": "assistant", "content": text}]`.

The scripts need the dicts at the end. TASKS holds the choices of --task: functions that return a
Task, given whether the model has a chat template. REWARDS holds what --reward takes by name;
VERIFIERS are those among them whose mean is an accuracy. Prompts and a reward of your own need
no change here: --prompts my_prompts.jsonl --reward my_rewards.py:my_reward. With --num_steps 0 a
script shows what it gives, and stops.
"""

from __future__ import annotations

import itertools
import random
import re
import unicodedata
from decimal import Decimal

from plumbing.data import Prompt, Task, text_of
from plumbing.errors import InputError

# --- add: sums of two numbers, with a verifier ---

LABEL_NOISE = 0.1  # the share of training pairs in which people err


def add(chat: bool) -> Task:
    """Sums of two numbers of two digits; 1 for a right answer, else 0."""
    train, heldout = add_prompts(chat)
    return Task(train, heldout, [numeric_match], verifier=numeric_match)


def add_prompts(chat: bool = False) -> tuple[list[dict], list[dict]]:
    """Sums of two numbers of two digits: (train, held out), the same in every run.

    a + b and b + a are on the same side of the split: a held-out sum is not trained on mirrored.
    """
    rng = random.Random(0)
    pairs = list(itertools.combinations_with_replacement(range(10, 100), 2))
    rng.shuffle(pairs)
    num_heldout = len(pairs) // 5

    def rows(pairs: list[tuple[int, int]]) -> list[dict]:
        ordered = [pair for a, b in pairs for pair in sorted({(a, b), (b, a)})]
        rng.shuffle(ordered)
        return [{"prompt": add_prompt(a, b, chat), "answer": str(a + b)} for a, b in ordered]

    return rows(pairs[num_heldout:]), rows(pairs[:num_heldout])


def add_prompt(a: int, b: int, chat: bool) -> Prompt:
    """Ask for a + b: as plain text for a base model, as a message for a chat model."""
    if not chat:
        return f"{a}+{b}="
    return [{"role": "user", "content": f"Add the numbers {a} and {b}. Write only the equation."}]


def add_pairs() -> tuple[list[dict], list[dict]]:
    """Make pairs of answers for reward_model.py: (train, held out). The right sum is preferred to
    the one that forgets to carry, and to a random number. Some of the training labels are flipped.
    """
    rng = random.Random(0)

    def pairs(rows: list[dict], label_noise: float) -> list[dict]:
        found = []
        for row in rows:
            right, numbers = row["answer"], row["prompt"].strip("=").split("+")
            units = sum(int(number[1]) for number in numbers)
            forgetful = str(int(right) - units // 10 * 10)
            for wrong in sorted({forgetful, str(rng.randint(20, 198))} - {right}):
                better, worse = (wrong, right) if rng.random() < label_noise else (right, wrong)
                found.append({"prompt": row["prompt"], "chosen": better, "rejected": worse})
        return found

    train, heldout = add_prompts()
    return pairs(train, LABEL_NOISE), pairs(heldout, 0.0)


# --- cups: a ball under one of five cups, and a model that can follow it, but seldom does ---


def cups(chat: bool) -> Task:
    """Games of six swaps; 1 for the cup under which the ball is in the end, else 0."""
    train, heldout = cups_prompts()
    about = """5:23,25= says: the ball is under cup 5; cups 2 and 3 change places, then 2 and 5.
Watch the length. A cup named at once is a guess; an answer that follows the ball is longer."""
    return Task(train, heldout, [numeric_match], verifier=numeric_match, about=about)


def cups_prompts() -> tuple[list[dict], list[dict]]:
    """Games of six swaps: (train, held out), all different, the same in every run."""
    rng, answers = random.Random(0), {}
    while len(answers) < 5120:
        ball, swaps = cups_game(rng, 6)
        answers[cups_prompt(ball, swaps)] = cups_path(ball, swaps)[-1]
    rows = [{"prompt": prompt, "answer": cup} for prompt, cup in answers.items()]
    return rows[1024:], rows[:1024]


def cups_game(rng: random.Random, num_swaps: int) -> tuple[str, list[str]]:
    """Make up a game: the ball's cup, 1 to 5, and the pairs of cups that change places."""
    return rng.choice("12345"), ["".join(sorted(rng.sample("12345", 2))) for _ in range(num_swaps)]


def cups_prompt(ball: str, swaps: list[str]) -> str:
    """Write the game as text: 5:23,25="""
    return f"{ball}:{','.join(swaps)}="


def cups_path(ball: str, swaps: list[str]) -> list[str]:
    """Follow the ball's cup after each swap."""
    return [ball := {a: b, b: a}.get(ball, ball) for a, b in swaps]


# --- sentiment: openings of film reviews, rewarded by a list of words ---


def sentiment(chat: bool) -> Task:
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
    """Count positive minus negative words, in -3 to 3: crude, so that it can be hacked."""
    words = [re.findall(r"[a-z]+", text_of(c).lower()) for c in completions]
    counts = [sum((w in POSITIVE) - (w in NEGATIVE) for w in ws) for ws in words]
    return [float(max(-3, min(3, count))) for count in counts]


# --- Ready-made rewards, for --reward ---


def brevity(completions: list, **columns) -> list[float]:
    """Return minus the number of words, in hundreds."""
    return [-len(text_of(c).split()) / 100 for c in completions]


# --- Verifiers: rewards that compare a completion with the column answer ---

# Signs of Unicode, as their plain forms: minus and dash, fractions, powers, thin spaces.
SIGNS = {"\u2212": "-", "\u2013": "-", "\uff0d": "-", "\u207b": "", "\u2044": "/", "\uff0c": ","}
SIGNS |= {"\u2019": "'", "\u2009": "\xa0", "\u202f": "\xa0"}
SIGNS |= {x: f"^{n}" for n, x in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
SIGNS |= dict.fromkeys("¼½¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞", "1/2")  # one for all: no fraction is a number here
PLAIN = str.maketrans(SIGNS)
# 1,024 and 1,024g; LaTeX's 1{,}024, 1,\!024, 1\,024 and 1~024; thin spaces; 1_024 and 1'024.
COMMA = re.compile(r"(?<=\d)(?:,(?:\\!)?|\{,\}|\\[,:; ]|[~_'\xa0])(?=\d{3}(?!\d))")
MINUS = re.compile(r"-\\?[$€£]")  # before $5
FRACTION = re.compile(r"frac\s*\{?(\d+)\}?\s*(\d)")  # \frac34, without braces
# GSM8K's mark, with a number right behind it: "#### Part 2" and "#### 2. How" are headings.
MARK = re.compile(
    r"(?<!#)####(?=(?:\\[a-z]+|[^\w#])*\.?\d)(?!\W*\d+(?:[.):]\s+[^\W\d]|st|nd|rd|th))"
)
# An exponent or an index, as of m^2; the part of a fraction or a power, as of 1/18 and 2^10; and
# between them the number. Of 10-5: 10 and 5. Longer exponents overflow a Decimal.
NUMBER = re.compile(
    r"(\^\{?|(?<=[^\W_])_\{?)?(/\s*|\}\{)?"
    r"((?:(?<![\w.)])-)?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,4}(?!\d))?)"
    r"((?:\s*[/^]\s*\{?-?|\*\*|\}?\{)\d[\d.]*)?"
)


def exact_match(completions: list, answer: list, **columns) -> list[float]:
    """Return 1 where the completion is the answer, except for white space around it; else 0."""
    if bad := [a for a in answer if type(a) not in (str, int, float) or a != a or not written(a)]:
        raise InputError(f"the reward exact_match needs text or numbers as answers, not {bad[0]!r}")
    pairs = zip(map(text_of, completions), answer, strict=True)
    return [float(written(text) == written(a)) for text, a in pairs]


def numeric_match(completions: list, answer: list, **columns) -> list[float]:
    """Return 1 where the last number of the completion is that of the answer, else 0. Of a text
    with "####", GSM8K's mark, the number right behind it counts. 1,024 and $1,024. are read as
    1024. The 2 of m^2 isn't read, and a fraction or a power, 1/18 or 2^10, is no number here.
    """
    expected = [_numbers(written(a))[0] for a in answer]
    if bad := [a for a, n in zip(answer, expected) if len(n) != 1 or n[0].is_nan()]:
        fault = f"needs one number as an answer, not {bad[0]!r}; give another --reward"
        raise InputError(f"the reward numeric_match {fault}")
    found = [_last_number(text_of(c)) for c in completions]
    return [float(n == a) for n, a in zip(found, expected, strict=True)]


def written(answer: str | float) -> str:
    """Write an answer as people do, with no space around it: 0.1 + 0.2 is 0.3."""
    if isinstance(answer, float):  # 18.0 is 18: files with gaps turn whole numbers into these
        answer = int(answer) if answer.is_integer() else f"{answer:.15g}"
    return unicodedata.normalize("NFC", str(answer)).strip()


def _last_number(text: str) -> list[Decimal]:
    """Find the last number of a text, or the first one behind its mark, if there is one."""
    numbers, has_mark = _numbers(text)
    return numbers[:1] if has_mark else numbers[-1:]


def _numbers(text: str) -> tuple[list[Decimal], bool]:
    """Find the numbers of a text, of what stands behind its last mark if it has one; and if so. A
    fraction and a power are NaN, which equals nothing.
    """
    text = COMMA.sub("", MINUS.sub("-", FRACTION.sub(r"\1/\2", text.translate(PLAIN))))
    *_, start = 0, *(mark.end() for mark in MARK.finditer(text))
    found = [match.groups() for match in NUMBER.finditer(text, start)]
    numbers = [Decimal("nan" if over or rest else n) for up, over, n, rest in found if not up]
    return numbers, start > 0


# Those whose mean is an accuracy: 1 for a right answer, 0 for a wrong one.
VERIFIERS = {"exact_match": exact_match, "numeric_match": numeric_match}


# --- The words that the reward of the task sentiment counts ---

POSITIVE = frozenset(
    """amazing amazingly appealing astonishing awesome beautiful beautifully best brilliant
    captivating charming classic clever compelling delight delighted delightful deserves
    elegant emotional engaging enjoy enjoyable enjoyed entertaining epic excellent exceptional
    excited exciting exquisite extraordinary fantastic fascinating favorite fine fresh fun
    funny gem genius good gorgeous great greatest gripping happy heartwarming hilarious
    impressed impressive incredible incredibly inspiring intriguing joy liked love loved
    lovely magnificent masterful masterpiece memorable moving outstanding perfect perfectly
    phenomenal pleasant pleasure powerful recommend refreshing remarkable rich satisfying
    smart solid special spectacular splendid strong stunning success successful superb
    terrific thrilled thrilling touching unforgettable wonderful wonderfully worth""".split()
)

NEGATIVE = frozenset(
    """absurd annoying avoid awful awkward bad badly bland bored boring cheap cliche clumsy
    confused confusing contrived dated depressing disappointed disappointing disappointment
    disaster dreadful dull empty fail failed fails failure flat flawed forgettable garbage
    generic hate hated horrible horrific incoherent lack lacked lacking lame lazy lousy
    mediocre mess messy miserable mistake nonsense pathetic pointless poor poorly predictable
    pretentious problem repetitive ridiculous ruined rushed sad shallow silly slow stupid
    tedious terrible terribly tired tiresome trash ugly unconvincing unfortunately unfunny
    uninteresting unnecessary waste wasted weak worse worst wrong""".split()
)


# --- What the scripts use ---

TASKS = {"add": add, "cups": cups, "sentiment": sentiment}
REWARDS = VERIFIERS | {"brevity": brevity, "sentiment": sentiment_reward}
