"""Ready-made rewards that compare a completion with the column answer."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from plumbing.errors import InputError
from plumbing.prompts import text_of

COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")  # 1,024 and 1,024g
NUMBER = re.compile(r"-?(?:\d+(?:\.\d+)?|\.\d+)")
MARKED = re.compile(r"(?<!#)####(?!#)[\s$*\\]*(-?[\s$\\]*\.?\d[\d,.{}]*)")  # a number, at once
BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")


def exact_match(completions: list, answer: list, **columns) -> list[float]:
    """1 where the completion is the answer, but for white space around it, else 0."""
    return [
        float(text_of(c).strip() == str(a).strip())
        for c, a in zip(completions, answer, strict=True)
    ]


def numeric_match(completions: list, answer: list, **columns) -> list[float]:
    """1 where the last number of the completion is the answer, else 0. 1,024 is read as 1024."""
    texts = [re.sub(COMMA, "", text_of(c)) for c in completions]
    numbers = [re.findall(r"-?\d+(?:\.\d+)?", text) for text in texts]
    try:
        expected = [Decimal(str(a).replace(",", "")) for a in answer]
    except InvalidOperation as e:
        raise InputError("the reward numeric_match needs a number as the answer of each row") from e
    return [float(bool(n) and Decimal(n[-1]) == a) for n, a in zip(numbers, expected, strict=True)]


def gsm8k(completions: list, answer: list[str], **columns) -> list[float]:
    """1 where the last number of the completion is that of the answer, else 0.

    The answer column is GSM8K's: a solution, then "#### 72". Of a completion with "####" or
    \\boxed{} the number there counts. $1,200. is read as 1200.
    """
    return [
        float(_number(_final(text_of(c))) == _expected(a))
        for c, a in zip(completions, answer, strict=True)
    ]


def gsm8k_strict(completions: list, answer: list[str], **columns) -> list[float]:
    """As gsm8k, but the completion must write its result as "#### 72"."""
    marked = [_last_with_number(MARKED, text_of(c)) for c in completions]
    return [
        float(found is not None and _number(found) == _expected(a))
        for found, a in zip(marked, answer, strict=True)
    ]


def answer_form(completions: list, **columns) -> list[float]:
    """A partial reward for form: 0.5 for a single "####", 1 if a number alone follows it."""
    scores = []
    for text in map(text_of, completions):
        _, *after = text.split("####")
        number = len(after) == 1 and NUMBER.fullmatch(_plain(after[0]).strip())
        scores.append(0.5 * (len(after) == 1) + 0.5 * bool(number))
    return scores


def _final(text: str) -> str:
    """The part of a text that holds its result."""
    for pattern in (MARKED, BOXED):
        if (found := _last_with_number(pattern, text)) is not None:
            return found
    return text


def _last_with_number(pattern: re.Pattern, text: str) -> str | None:
    """The last match that holds a number."""
    return next((x for x in reversed(pattern.findall(text)) if _number(x) is not None), None)


def _plain(text: str) -> str:
    """Without the commas in numbers, which LaTeX writes as {,}, dollar signs and a last point."""
    text = text.replace("{,}", ",").replace("\\$", "").replace("$", "")
    return re.sub(COMMA, "", text).strip().removesuffix(".")


def _number(text: str) -> Decimal | None:
    """The last number of a text."""
    found = NUMBER.findall(_plain(text))
    return Decimal(found[-1]) if found else None


def _expected(answer: object) -> Decimal:
    """The number of a row's answer. Raises InputError where it has none."""
    number = _number(str(answer).rpartition("####")[2])
    if number is None:
        raise InputError(f"the reward gsm8k finds no number in the answer {str(answer)[-60:]!r}")
    return number


# Those whose mean is an accuracy: 1 for a right answer, 0 for a wrong one.
VERIFIERS = {
    "exact_match": exact_match,
    "numeric_match": numeric_match,
    "gsm8k": gsm8k,
    "gsm8k_strict": gsm8k_strict,
}
