"""Prompts and rewards: the file to replace with your own.

A task is a list of prompts and a reward function. A prompt is a dict with the key `prompt` (a
string, or chat messages) and any further columns. A reward function has TRL's signature,

    def reward(prompts, completions, **columns) -> list[float | None]

and may name any column of the prompts as a parameter, or `completion_ids` for the sampled token
ids. Where the prompts are chat messages, each completion is `[{"role": "assistant", "content":
text}]`, as in TRL.

Look at a reward before you train on it: what the model gets now, and for what,

  python tasks.py --inspect --prompts my_prompts.jsonl --reward my_rewards.py:my_function
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import json
import math
import random
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from common import InputError, first_line, is_flat
from plumbing.loading import from_hub_or_folder, load_tokenizer
from sampling import Rollout

Prompt = str | list[dict[str, str]]
RewardFunction = Callable[..., list[float | None]]


@dataclass
class Task:
    """Prompts to train on, prompts that are only evaluated, and the rewards, summed with their
    weights.
    """

    train: list[dict]
    heldout: list[dict]
    rewards: list[RewardFunction]
    weights: list[float]
    verifier: RewardFunction | None = None  # 1 for a right answer, 0 for a wrong one: eval/accuracy
    reward_model: RewardModel | None = None  # also the last of `rewards`


# --- Built-in prompts and rewards ---


def add_prompts(digits: int = 2, chat: bool = False) -> tuple[list[dict], list[dict]]:
    """Sums of two numbers of `digits` digits: (train, held out), the same split in every run.

    a + b and b + a fall on the same side of the split: otherwise a held-out sum would have been
    seen mirrored.
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
    return [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}]


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


# --- Rewards to start from: --reward exact_match brevity --reward_weights 1 0.1 ---


def exact_match(completions: list, answer: list, **columns) -> list[float]:
    """1 where the completion is the answer, but for white space around it, else 0."""
    return [
        float(text_of(c).strip() == str(a).strip())
        for c, a in zip(completions, answer, strict=True)
    ]


def numeric_match(completions: list, answer: list, **columns) -> list[float]:
    """1 where the last number of the completion is the answer, else 0. 1,024 is read as 1024."""
    texts = [re.sub(r"(?<=\d),(?=\d{3}\b)", "", text_of(c)) for c in completions]
    numbers = [re.findall(r"-?\d+(?:\.\d+)?", text) for text in texts]
    return [
        float(bool(n) and Decimal(n[-1]) == Decimal(str(a).replace(",", "")))
        for n, a in zip(numbers, answer, strict=True)
    ]


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


READY_MADE = {f.__name__: f for f in (exact_match, numeric_match, format_match, brevity)}
READY_MADE |= {"no_repetition": no_repetition, "sentiment": sentiment_reward}


def text_of(completion: str | list[dict[str, str]]) -> str:
    """The text of a completion, whether it is a string or chat messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


# --- Your own prompts and rewards ---


def read_prompts(path: str | Path, split: str = "train") -> list[dict]:
    """Read prompts from a file of JSON lines, or whatever else the library datasets reads: CSV and
    Parquet files, folders, datasets by name, of which `split` is taken. Raises InputError with the
    place of the first fault.
    """
    is_lines = Path(path).suffix in (".jsonl", ".json", ".txt") or Path(path).is_file()
    if not is_lines or Path(path).suffix in (".csv", ".parquet"):
        return _from_datasets(str(path), split)
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"--prompts {path}: can't be read ({first_line(e)})") from e
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            fault = _fault_of_row(row)
        except (ValueError, RecursionError) as e:
            fault = f"not JSON ({first_line(e)})"
        if fault:
            raise InputError(f"{path}, line {number}: {fault}; {ROW_FORMAT}")
        rows.append(row)
    if not rows:
        raise InputError(f"{path}: holds no prompts; {ROW_FORMAT}")
    return rows


def _from_datasets(name: str, split: str) -> list[dict]:
    try:
        import datasets
    except ImportError as e:
        remedy = "pip install datasets, or give a file of JSON lines"
        raise InputError(f"--prompts {name}: {remedy}") from e
    datasets.disable_progress_bars()
    kind = Path(name).suffix[1:]
    try:
        if kind in ("csv", "parquet"):
            rows = datasets.load_dataset(kind, data_files=name, split="train").to_list()
        else:
            rows = datasets.load_dataset(name, split=split).to_list()
    except Exception as e:  # whatever a file or a hub out of reach makes it raise
        raise InputError(f"--prompts {name} --split {split}: {first_line(e)}") from e
    for number, row in enumerate(rows, 1):
        if fault := _fault_of_row(row):
            raise InputError(f"{name}, row {number}: {fault}; give it a column prompt")
    if not rows:
        raise InputError(f"{name}: holds no prompts")
    return rows


ROW_FORMAT = 'each line must be like {"prompt": "..."} or {"prompt": [{"role": .., "content": ..}]}'


def _fault_of_row(row: object) -> str | None:
    if not isinstance(row, dict) or "prompt" not in row:
        return 'no key "prompt"'
    prompt = row["prompt"]
    messages = [{"content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list) or not messages:
        return '"prompt" is neither text nor messages'
    if not all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages):
        return 'a message has no "content"'
    if isinstance(prompt, list) and not all(isinstance(m.get("role"), str) for m in messages):
        return 'a message has no "role"'
    return None if prompt else '"prompt" is empty'


def load_reward(spec: str) -> RewardFunction:
    """Load `my_rewards.py:my_function`, which runs the file, as the user asked; or take one of
    READY_MADE by its name.
    """
    if spec in READY_MADE:
        return READY_MADE[spec]
    path, _, name = spec.rpartition(":")
    if not path or not name:
        known = ", ".join(READY_MADE)
        raise InputError(f"--reward {spec}: write it as FILE.py:FUNCTION, or choose from {known}")
    if not Path(path).is_file():
        raise InputError(f"--reward {spec}: there is no file {path}")
    module_spec = importlib.util.spec_from_file_location(f"reward_{Path(path).stem}", path)
    if module_spec is None:
        raise InputError(f"--reward {spec}: {path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickle look modules up by name
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:
        raise InputError(
            f"--reward {spec}: {path} fails on import: {type(e).__name__}: {first_line(e)}"
        ) from e
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"--reward {spec}: {path} has no function {name}")
    return function


class RewardModel:
    """A sequence classifier with one label as a reward function: reads text, by its own tokenizer.

    Raises InputError where the model is no such classifier, or a text is too long for it.
    """

    __name__ = "reward_model"

    def __init__(self, name: str, device: torch.device, batch_size: int = 32) -> None:
        flag = "--reward_model"
        self.model, missing = from_hub_or_folder(AutoModelForSequenceClassification, name, flag)
        labels = self.model.config.num_labels
        if labels != 1:
            raise InputError(f"{flag} {name}: has {labels} labels, and a reward model has one")
        if missing:
            raise InputError(f"{flag} {name}: no reward model, its checkpoint has no {missing[0]}")
        self.model.eval().requires_grad_(False).to(device)
        self.tokenizer = load_tokenizer(name, flag)
        self.batch_size = batch_size

    @torch.no_grad()
    def __call__(self, prompts: list[Prompt], completions: list, **columns) -> list[float]:
        ids = [self._tokens(p, c) for p, c in zip(prompts, completions, strict=True)]
        limit = getattr(self.model.config, "max_position_embeddings", None) or math.inf
        limit = min(limit, self.tokenizer.model_max_length)  # RoBERTa reads 2 less than the first
        longest = max(map(len, ids))
        if longest > limit:
            raise InputError(f"the reward model reads {limit} tokens, and a text has {longest}")
        scores = []
        for start in range(0, len(ids), self.batch_size):
            rows = ids[start : start + self.batch_size]
            # transformers reads the score at the last token that is not pad. With pad == EOS that
            # drops a real EOS: pad with an id that no row contains, if there is one; the mask hides
            # it anyway.
            used = set(itertools.chain(*rows))
            pad = next((i for i in range(self.model.config.vocab_size) if i not in used), 0)
            self.model.config.pad_token_id = pad
            tokens, mask = _padded(rows, pad, "right", self.model.device)
            # No position ids: the padding is on the right, and RoBERTa counts from another number.
            scores += self.model(input_ids=tokens, attention_mask=mask).logits[:, 0].tolist()
        return scores

    def _tokens(self, prompt: Prompt, completion: str | list[dict[str, str]]) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer(prompt + text_of(completion)).input_ids
        if self.tokenizer.chat_template is None:
            text = "\n".join(message["content"] for message in prompt + completion)
            return self.tokenizer(text).input_ids
        text = self.tokenizer.apply_chat_template(prompt + completion, tokenize=False)
        return self.tokenizer(text, add_special_tokens=False).input_ids


def check_answers(path: str, rows: list[dict]) -> None:
    """Check that each row has a whole number as its answer. Raises InputError."""
    for row in rows:
        if not re.fullmatch(r"-?\d{1,18}", str(row.get("answer"))):
            raise InputError(
                f'{path}: task add needs a key "answer" with a number in each line, and'
                f" {str(row['prompt'])[:60]!r} has {row.get('answer')!r}; or give --reward"
            )


def load_task(config: Any, tokenizer: PreTrainedTokenizerBase, device: torch.device) -> Task:
    """Build the task that the flags --task, --digits, --prompts, --split, --reward,
    --reward_weights, --reward_model name.
    """
    chat = tokenizer.chat_template is not None
    if config.task == "add":
        train, heldout = add_prompts(config.digits, chat)
        task = Task(train, heldout, [numeric_match], [], verifier=numeric_match)
    else:
        train, heldout = sentiment_prompts()
        task = Task(train, heldout, [sentiment_reward], [])
    if config.prompts:
        rows = read_prompts(config.prompts, config.split)
        random.Random(0).shuffle(rows)
        # A single prompt is a legitimate first experiment: it is then evaluated on what it was
        # trained on.
        num_heldout = min(512, max(1, len(rows) // 10))
        task.train, task.heldout = rows[num_heldout:] or rows, rows[:num_heldout]
        # Of a prompt that the file has twice, none is held out that is trained on.
        seen = {json.dumps(row["prompt"]) for row in task.train}
        unseen = [row for row in task.heldout if json.dumps(row["prompt"]) not in seen]
        task.heldout = unseen or task.heldout
        if config.task == "add" and not (config.reward or config.reward_model):
            check_answers(config.prompts, rows)
    if config.reward or config.reward_model:
        task.rewards = [load_reward(spec) for spec in config.reward]
        if config.prompts:
            task.verifier = None  # the answers of these prompts, if any, need not be sums
    if config.reward_model:
        task.reward_model = RewardModel(config.reward_model, device)
        task.rewards.append(task.reward_model)
    task.weights = config.reward_weights or [1.0] * len(task.rewards)
    if len(task.weights) != len(task.rewards):
        raise InputError(
            f"--reward_weights has {len(task.weights)} values for {len(task.rewards)} rewards"
        )
    if chat and isinstance(task.train[0]["prompt"], str):
        print("The prompts are plain text, so the model's chat template is not used.")
    return task


# --- From prompts to tokens and from rollouts to scores ---


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """The ids of one prompt. Messages go through the chat template, and are followed by the tokens
    that open the assistant's turn. Raises InputError where there is no template or no token.
    """
    if isinstance(prompt, list) and tokenizer.chat_template is None:
        raise InputError("the prompts are chat messages, and the model has no chat template")
    try:
        if isinstance(prompt, str):
            ids = tokenizer(prompt).input_ids
        else:
            text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            # The template writes BOS itself; add_special_tokens would put a second one in front.
            ids = tokenizer(text, add_special_tokens=False).input_ids
    except Exception as e:  # half a surrogate pair, roles that the template does not know, ...
        fault = f"{type(e).__name__}: {first_line(e)}"
        raise InputError(f"the prompt {str(prompt)[:60]!a} can't be tokenised ({fault})") from e
    if not ids:
        raise InputError(f"the prompt {prompt!r} has no tokens")
    return ids


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, rows: list[dict], device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokenise prompts: (ids, mask), each (N, P), padded on the left: completions start at P."""
    ids = [prompt_tokens(tokenizer, row["prompt"]) for row in rows]
    # Any pad id will do: the mask, not the id, says what is padding.
    return _padded(ids, tokenizer.pad_token_id or 0, "left", device)


def _padded(
    rows: list[list[int]], pad: int, side: str, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of ids as a rectangle: (tokens, mask)."""
    width = max(map(len, rows))
    tokens, mask = [], []
    for row in rows:
        padding = width - len(row)
        before, after = (padding, 0) if side == "left" else (0, padding)
        tokens.append([pad] * before + row + [pad] * after)
        mask.append([0] * before + [1] * len(row) + [0] * after)
    return torch.tensor(tokens, device=device), torch.tensor(mask, device=device)


def prompt_batch(rows: list[dict], step: int, size: int, seed: int) -> list[dict]:
    """The `size` prompts of one step, from endless reshuffled passes over `rows`: a function of
    seed and step alone.
    """
    passes = range(step * size // len(rows), ((step + 1) * size - 1) // len(rows) + 1)
    order = [row for p in passes for row in random.Random(f"{seed},{p}").sample(rows, len(rows))]
    start = step * size - passes[0] * len(rows)
    return order[start : start + size]


def decode(tokenizer: PreTrainedTokenizerBase, rollout: Rollout) -> list[str]:
    """The text of each completion, B strings, without EOS and padding.

    Decoded after its prompt: on their own, SentencePiece tokenizers drop a leading space.
    """
    length = rollout.completion_mask.shape[1]
    num_tokens = (rollout.completion_mask.sum(1) - rollout.finished.long()).tolist()
    texts = []
    for row, real, n in zip(
        rollout.tokens.cpu(), rollout.attention_mask.cpu(), num_tokens, strict=True
    ):
        prompt, completion = row[:-length][real[:-length]].tolist(), row[-length:][:n].tolist()
        before = tokenizer.decode(prompt, skip_special_tokens=True)
        text = tokenizer.decode(prompt + completion, skip_special_tokens=True)
        if not text.startswith(before):  # a character of several tokens spans the border
            before, text = "", tokenizer.decode(completion, skip_special_tokens=True)
        texts.append(text[len(before) :])
    return texts


def score(
    task: Task, rows: list[dict], rollout: Rollout, tokenizer: PreTrainedTokenizerBase
) -> tuple[torch.Tensor, list[str]]:
    """Score a rollout of G completions for each of N prompts: (scores (N*G,), texts). A score of
    None becomes NaN.
    """
    texts = decode(tokenizer, rollout)
    length = rollout.completion_mask.shape[1]
    ids = [
        row[-length:][mask].tolist()
        for row, mask in zip(rollout.tokens.cpu(), rollout.completion_mask.cpu(), strict=True)
    ]
    num_generations = len(texts) // len(rows)
    rows = [row for row in rows for _ in range(num_generations)]
    # A column per reward function: (N*G, functions).
    scores = torch.stack([_call_reward(f, rows, texts, ids) for f in task.rewards], dim=1)
    total = (scores * torch.tensor(task.weights)).nansum(dim=1)
    return total.masked_fill(scores.isnan().all(dim=1), math.nan), texts


def verify(task: Task, rows: list[dict], texts: list[str]) -> float | None:
    """Share of completions that the task's verifier calls right; None where the task has no
    verifier.
    """
    if task.verifier is None:
        return None
    rows = [row for row in rows for _ in range(len(texts) // len(rows))]
    return _call_reward(task.verifier, rows, texts, [None] * len(rows)).mean().item()


def _call_reward(
    reward: RewardFunction, rows: list[dict], texts: list[str], ids: list
) -> torch.Tensor:
    """Call one reward function with TRL's keyword arguments: (B,) float32, NaN where it returned
    None.
    """
    name = getattr(reward, "__name__", type(reward).__name__)
    prompts = [row["prompt"] for row in rows]
    completions = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    columns = {
        key: [row.get(key) for row in rows]
        for key in sorted({key for row in rows for key in row} - {"prompt"})
    }
    arguments = columns | {"prompts": prompts, "completions": completions, "completion_ids": ids}
    try:
        parameters = inspect.signature(reward).parameters.values()
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            arguments = {p.name: arguments[p.name] for p in parameters if p.name in arguments}
        values = reward(**arguments)
    except InputError:
        raise
    except (Exception, SystemExit) as e:
        fault = f"{type(e).__name__}: {first_line(e)}"
        raise InputError(f"the reward function {name} raised {fault}") from e
    try:
        known = [value is not None for value in values]
        scores = torch.tensor([math.nan if v is None else float(v) for v in values])
    except (TypeError, ValueError, OverflowError) as e:
        raise InputError(
            f"the reward function {name} must return a list of numbers or None ({first_line(e)})"
        ) from e
    if len(known) != len(texts):
        raise InputError(
            f"the reward function {name} returned {len(known)} values for {len(texts)} completions"
        )
    for value, there, text in zip(scores.tolist(), known, texts, strict=True):
        if there and not math.isfinite(value):
            raise InputError(f"the reward function {name} returned {value} for {text[:60]!r}")
    return scores


# --- Looking at a reward ---


def describe_scores(scores: torch.Tensor) -> list[str]:
    """Lines that describe scores (N, G) of G completions for each of N prompts, NaN left out."""
    known = scores[~scores.isnan()]
    quantiles = known.quantile(torch.tensor([0, 0.1, 0.5, 0.9, 1])).tolist()
    low, *_, high = quantiles
    names = ("min", "10%", "median", "90%", "max")
    shown = "  ".join(f"{name} {q:.3g}" for name, q in zip(names, quantiles))
    lines = [f"{len(known)} scores: mean {known.mean():.3g}, std {known.std():.3g}; {shown}"]
    if scores.isnan().any():
        lines.append(f"{int(scores.isnan().sum())} completions got no score (None)")
    counts = known.histc(10, low, high).long().tolist() if high > low else []
    for i, count in enumerate(counts):
        edge = low + i * (high - low) / 10
        lines.append(f"  {edge:8.3g}  {'#' * round(50 * count / max(counts))} {count}")
    flat = is_flat(scores).float().mean()
    lines.append(f"{flat:.0%} of the prompts give all their completions the same score")
    if high > low and len(scores) > 1 and not scores.isnan().any():
        lines.append(f"the prompt alone explains {explained_by_prompt(scores):.0%} of the variance")
    return lines


def explained_by_prompt(scores: torch.Tensor) -> float:
    """The share of the variance of scores (N, G) that lies between prompts: easy ones against hard
    ones, which a baseline takes away, and which teaches nothing about completions. The intraclass
    correlation ICC(1) of Shrout and Fleiss 1979, which isn't fooled by small G; 0 where negative.
    """
    num_generations = scores.shape[1]
    between = num_generations * scores.mean(1).var()
    within = scores.var(dim=1).mean()
    share = (between - within) / (between + (num_generations - 1) * within)
    return max(0.0, float(share))


def inspect_reward(args: list[str] | None = None) -> None:
    """Sample completions, score them, and print what the scores look like. Nothing is trained."""
    from plumbing.config import check_numbers, check_prompts, flag, parse_flags
    from plumbing.loading import eos_token_ids, load_policy, pick_device
    from sampling import generate

    @dataclass
    class Config:
        inspect: bool = flag(False, "this is it", "look at a reward")
        model: str = flag("tiny", "embedded, or a local folder, or a name on the model hub")
        task: Literal["add", "sentiment"] | None = flag(None, "add: sums; sentiment: film reviews")
        digits: int = flag(2, "digits of the numbers of the task add")
        prompts: str | None = flag(None, "JSON lines, CSV, Parquet, or the name of a dataset")
        split: str = flag("train", "of a dataset")
        reward: list[str] = flag([], "FILE.py:FUNCTION, or the name of a ready-made one")
        reward_weights: list[float] = flag([], "one per reward, the reward model's last; default 1")
        reward_model: str | None = flag(None, "sequence classifier with one label")
        num_prompts: int = flag(32, "sampled from those to train on")
        num_generations: int = flag(8, "completions of each")
        max_new_tokens: int = flag(64, "longest completion")
        temperature: float = flag(1.0, "the policy is softmax(logits / temperature)")
        seed: int = flag(0, "of every random draw")
        device: str | None = flag(None, "cuda, mps or cpu; default: the first there is")

    config = parse_flags(Config, __doc__, args)
    if not config.inspect:
        raise InputError("tasks.py alone does nothing: python tasks.py --inspect looks at a reward")
    check_numbers(config)
    if config.num_generations < 2 or config.num_prompts < 2:
        raise InputError("--inspect compares: choose --num_prompts and --num_generations 2 or more")
    config.task = config.task or ("add" if config.model == "tiny" else "sentiment")
    device = pick_device(config.device)
    model, tokenizer = load_policy(config.model).to(device), load_tokenizer(config.model)
    task = load_task(config, tokenizer, device)
    check_prompts(config, model, tokenizer, task)
    rows = prompt_batch(task.train, 0, min(config.num_prompts, len(task.train)), config.seed)
    ids, mask = encode_prompts(tokenizer, rows, device)
    rollout = generate(
        model,
        ids,
        mask,
        num_generations=config.num_generations,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        eos_token_ids=eos_token_ids(model, tokenizer),
        pad_token_id=tokenizer.pad_token_id or 0,
        generator=torch.Generator(device).manual_seed(config.seed),
    )
    scores, texts = score(task, rows, rollout, tokenizer)
    if scores.isnan().all():
        raise InputError("the reward returned None for every completion")
    print("\n".join(describe_scores(scores.view(-1, config.num_generations))))
    lengths = rollout.completion_mask.sum(1).float().cpu()
    ended = rollout.finished.float().mean()
    print(f"{ended:.0%} of the completions ended by themselves; mean length {lengths.mean():.0f}")
    known = (~scores.isnan()).nonzero().squeeze(1).tolist()
    order = sorted(known, key=lambda i: scores[i].item())
    for title, some in (("lowest", order[:4]), ("highest", order[::-1][:4])):
        print(f"{title}:")
        for i in some:
            prompt = rows[i // config.num_generations]["prompt"]
            prompt = prompt if isinstance(prompt, str) else prompt[-1]["content"]
            line = " ".join(f"{prompt} \N{RIGHTWARDS ARROW} {texts[i]}".split())
            print(f"  {scores[i].item():7.3g}  {textwrap.shorten(line, 200, placeholder=' ...')}")


if __name__ == "__main__":
    from plumbing.runs import run_main

    run_main(inspect_reward)
