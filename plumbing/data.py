"""Prompts and rewards: a Task makes tokens of prompts, and scores the texts that follow them."""

from __future__ import annotations

import copy
import csv
import functools
import importlib.util
import inspect
import io
import json
import math
import random
import re
import string
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase as Tokenizer

from common import Rollout
from plumbing.config import RunConfig
from plumbing.errors import Fault, InputError, blame
from plumbing.models import context_length, eos_token_ids
from plumbing.preferences import RewardModel

Prompt = str | list[dict[str, str]]  # text, or chat messages
RewardFunction = Callable[..., list[float | None]]  # (prompts, completions, **columns), as in TRL
# Any id will do: the masks say what is padding, not the id. That of the tokenizer may be one that
# the model doesn't know: a pad token that was added only to the tokenizer.
PADDING = 0


@dataclass
class Task:
    """Prompts, dicts with the key `prompt` and any further columns, and rewards with weights.

    A function of tasks.py gives prompts and rewards; load_task adds what the flags say.
    """

    train: list[dict]
    heldout: list[dict]  # evaluated, never trained on
    rewards: list[RewardFunction]
    weights: list[float] = field(default_factory=list)  # one per reward; empty: all 1
    verifier: RewardFunction | None = None  # 1 for a right answer, 0 for a wrong one: eval/accuracy
    about: str = ""  # what a prompt means and what to look at, for the terminal
    name: str = "prompts"
    tokenizer: Tokenizer | None = None
    eos_token_ids: list[int] = field(default_factory=list)
    seed: int = 0
    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of each prompt, once
    step: int = 0  # of the last batch
    means: dict[str, float] = field(default_factory=dict)  # of several rewards, as last scored
    frozen_models: list[nn.Module] = field(default_factory=list)  # reference, reward model

    def batch(self, step: int, size: int) -> list[dict]:
        """Return the `size` rows of a step."""
        self.step = step
        return prompt_batch(self.train, step, size, self.seed)

    def encode(self, rows: list[dict]) -> tuple[Tensor, Tensor]:
        """Return the tokens of N prompts: (ids, mask), each (N, P), on the CPU, left-padded."""
        self.tokenise(rows)
        return pad_rows([*map(self.read_as, rows)])

    def read_as(self, row: dict) -> tuple[int, ...]:
        """Return what the model reads of a row's prompt. This alone tells prompts apart."""
        return self.tokens[str(row["prompt"])]

    def tokenise(self, rows: list[dict]) -> None:
        """Make the tokens of the prompts that have none yet. Raises InputError."""
        prompts = [row["prompt"] for row in rows]
        new = [prompt for prompt in prompts if str(prompt) not in self.tokens]
        # In slices: what a tokenizer returns takes far more memory than the ids.
        for some in (new[i : i + 1000] for i in range(0, len(new), 1000)):
            self.tokens |= zip(map(str, some), map(tuple, prompt_tokens(self.tokenizer, some)))

    def score(
        self, rows: list[dict], rollout: Rollout, allow_none: bool = True
    ) -> tuple[Tensor, list[str]]:
        """Score G completions for each of N prompts: (scores (N*G,), texts). A score is the sum of
        the weighted rewards that aren't None; if all are, NaN, or if not `allow_none` InputError.
        Raises Fault where the completions were drawn from logits that are not finite.
        """
        if not rollout.logprobs.isfinite().all():  # float16 ends at 65,504
            remedy = "lower --learning_rate, or --fp16 false; in step 0 --model itself is at fault"
            raise Fault(f"the model's logits are not finite: {remedy}")
        texts = completion_texts(self.tokenizer, rollout, self.eos_token_ids)
        ids = completion_ids(rollout)
        scores = torch.stack(
            [call_reward(r, rows, texts, ids, self.step) for r in self.rewards], dim=1
        )
        weights = torch.tensor(self.weights or 1.0)
        total = (scores * weights).nansum(dim=1)  # (N*G, rewards) -> (N*G,)
        is_silent = scores.isnan() | ((weights == 0) & weights.any())  # 0: it is only watched
        total = total.masked_fill(is_silent.all(dim=1), math.nan)
        names = [f"reward/{name}" for name in names_of(self.rewards)]
        self.means = dict(zip(names, scores.nanmean(dim=0).tolist())) if len(names) > 1 else {}
        if not allow_none and total.isnan().any():
            raise InputError("a reward is None, and this algorithm needs one for every completion")
        return total.to(rollout.tokens.device), texts

    def verify(self, rows: list[dict], texts: list[str], rollout: Rollout) -> Tensor | None:
        """Ask the verifier about G completions for each of N prompts: (N, G), NaN for None."""
        if self.verifier is None:
            return None
        verdicts = call_reward(self.verifier, rows, texts, completion_ids(rollout), self.step)
        if bad := [x for x in verdicts.tolist() if x < 0 or x > 1]:  # NaN is neither
            raise InputError(f"a verdict is {bad[0]:g}: from a verifier 1 is right, 0 wrong")
        return verdicts.view(len(rows), -1)


def load_task(
    config: RunConfig, tasks: ModuleType, policy: nn.Module, tokenizer: Tokenizer
) -> Task:
    """Make the task that the flags name; its prompts suit the policy. Raises InputError."""
    if config.task not in tasks.TASKS:
        raise InputError(f"--task {config.task}: choose from {', '.join(tasks.TASKS)}")
    task = tasks.TASKS[config.task](tokenizer.chat_template is not None)
    if task.about and not config.prompts:
        print(task.about)
    task.tokenizer, task.seed = tokenizer, config.seed
    task.eos_token_ids = eos_token_ids(policy, tokenizer)
    if config.prompts:
        task.train, task.heldout = read_rows(config.prompts, "train"), []
    if config.eval_prompts:
        task.heldout = read_rows(config.eval_prompts, "test")
        random.Random(0).shuffle(task.heldout)  # it may be sorted; the first are evaluated
    if (config.prompts or config.eval_prompts) and (config.reward or config.reward_model):
        task.verifier = None  # it was made for the task's own prompts
    task.train, task.heldout = (
        [row | {"prompt": _prompt_of(config, row)} for row in rows]
        for rows in (task.train, task.heldout)
    )
    rows = task.train + task.heldout
    if len({isinstance(row["prompt"], str) for row in rows}) > 1:
        raise InputError('some prompts are text and some messages: --system_prompt "" mends it')
    task.tokenise(rows)
    if config.prompts and not config.eval_prompts:
        task.train, task.heldout = split_rows(task.train, task.read_as)
    trained = {task.read_as(row) for row in task.train if config.eval_prompts}
    if both := sum(task.read_as(row) in trained for row in task.heldout):
        print(f"{both} of the {len(task.heldout)} held-out prompts are trained on as well.")
    _load_rewards(config, task, tasks)
    _check_prompts(config, task, policy)
    return task


def _load_rewards(config: RunConfig, task: Task, tasks: ModuleType) -> None:
    """Put the rewards and the verifier that the flags name into the task. Raises InputError."""
    if config.reward or config.reward_model:
        task.rewards = [load_reward(spec, tasks.REWARDS) for spec in config.reward]
        task.weights = []
    if config.reward_model:
        options = config.device, config.bf16, config.micro_batch_tokens
        task.rewards.append(RewardModel(config.reward_model, *options))
        task.frozen_models.append(task.rewards[-1].model)
    task.weights = config.reward_weights or task.weights or [1.0] * len(task.rewards)
    if len(task.weights) != (count := len(task.rewards)):
        raise InputError(f"--reward_weights {task.weights}: give one per reward, here {count}")
    of_answer = [r for r in task.rewards if "answer" in inspect.signature(r).parameters]
    is_given = config.reward or config.reward_model or of_answer  # of a task, such as add
    if config.prompts and not is_given and any("answer" in row for row in task.train):
        choices = f"FILE.py:FUNCTION, {', '.join(tasks.REWARDS)}"
        raise InputError(f"the prompts have a column answer, and no --reward is given: {choices}")
    weighted = zip(names_of(task.rewards), task.weights)
    print("Rewards:", ", ".join(f"{name} (weight {weight:g})" for name, weight in weighted))
    # A verifier of one's own, or a reward that is one; else that of the task.
    is_verifier = next((spec for spec in config.reward if spec in tasks.VERIFIERS), None)
    if spec := config.verifier or is_verifier:
        task.verifier = load_reward(spec, tasks.REWARDS)
    used = [task.verifier, *task.rewards]
    for verifier in (x for x in tasks.VERIFIERS.values() if x in used):
        # Check the answers now, not at the step that draws their row.
        with blame(f"give --reward; {verifier.__name__} needs a column answer in each row"):
            answers = [row["answer"] for row in task.train + task.heldout]
            verifier([""] * len(answers), answer=answers)


def _check_prompts(config: RunConfig, task: Task, policy: nn.Module) -> None:
    """Check that the prompts suit the model, and show one. Raises InputError."""
    if not task.train or not task.heldout:
        raise InputError(f"--task {config.task}: needs prompts to train on and held-out ones")
    if isinstance(task.train[0]["prompt"], str) and task.tokenizer.chat_template is not None:
        print('The prompts are text. --system_prompt "" makes messages of them and of completions.')
    _show_prompts(config, task)
    text, longest = max(task.tokens.items(), key=lambda item: len(item[1]))
    limit, new = context_length(policy) or math.inf, config.max_new_tokens
    if len(longest) + new > limit:
        fault = f"a prompt of {len(longest)} tokens and {new} new ones don't fit into the model's"
        raise InputError(f"{fault} context of {limit}: lower --max_new_tokens or cut {text[:50]!r}")
    largest, size = max(map(max, task.tokens.values())), len(policy.get_input_embeddings().weight)
    if largest >= size:
        fault = f"its tokenizer gives id {largest}, and the model knows {size} tokens"
        raise InputError(f"--model {config.model}: {fault}: they don't belong together")


def _show_prompts(config: RunConfig, task: Task) -> None:
    """Print a prompt as the model sees it, and what templates have done to it. They fail silently:
    the run goes on, and learns something else. Raises InputError where rows become one prompt.
    """
    rows, first, tokenizer = task.train + task.heldout, task.train[0]["prompt"], task.tokenizer
    count, written = len({*map(task.read_as, rows)}), config.prompt_template or ""
    shown = tokenizer.decode(task.read_as(task.train[0]))
    shown = repr(shown if len(shown) < 400 else f"{shown[:200]} ... {shown[-200:]}")
    if count == 1 and any(x != rows[0] for x in rows) and (written or len(task.tokens) > 1):
        fault = f"all {len(rows)} rows are one prompt to the model, {shown}"
        raise InputError(f"{fault}: name a {{column}} in --prompt_template, mend a chat template")
    print(f"Different prompts: {count}. The model continues, for one, {shown}")
    columns = {re.split(r"[.[]", x[1] or "")[0] for x in string.Formatter().parse(written)} - {""}
    read = [inspect.signature(x).parameters for x in (task.verifier, *task.rewards) if x]
    # A column that stands there by itself is the question, which a judge may read.
    for name in columns & {"answer"}.union(*read) if len(columns) > 1 else ():
        print(f"A reward checks {{{name}}} too: is it the answer? As text it is {{{{{name}}}}}.")
    is_text = isinstance(first, str)
    begun = rows if is_text else [x for x in rows if x["prompt"][-1]["role"] == "assistant"]
    if spaces := sum(text_of(row["prompt"]).endswith((" ", "\t")) for row in begun):
        print(f"Prompts that end in a space: {spaces}. Most tokenizers put it in front of a word.")
    if is_text:
        return
    if begun:
        print(f"Prompts that end with the assistant's words: {len(begun)}. Are they the answer?")
    for prompt in {str([m["role"] for m in x["prompt"]]): x["prompt"] for x in rows}.values():
        text = "".join(_in_template(tokenizer, prompt).split())
        for m in (m for m in prompt if "".join(m["content"].split()) not in text):
            print(f"The chat template leaves out what {m['role']} says: {m['content'][:60]!r}")
    template = functools.partial(tokenizer.apply_chat_template, tokenize=False)
    asked, answer = {"role": "user", "content": "1"}, {"role": "assistant", "content": "ANSWER"}
    try:
        end = template([asked, answer]).partition("ANSWER")[2].strip()
        opened = template([asked], add_generation_prompt=True) != template([asked])
    except Exception:  # a template may refuse a conversation that isn't the user's
        return
    ids = tokenizer(end, add_special_tokens=False).input_ids
    if end and {*ids}.isdisjoint(task.eos_token_ids) and not any(x in end for x in config.stop):
        print(f"A turn ends with {end!r} in the chat template, and no completion: --stop {end!r}")
    if not opened and len(begun) < len(rows):
        print("The chat template opens no assistant's turn: right for few models (Mistral's).")
    if "strftime_now" in str(tokenizer.chat_template):
        print("The chat template writes the date: a run that goes on tomorrow has other prompts.")


# --- Reading prompts ---


def text_of(completion: Prompt) -> str:
    """Return the text of a completion, whether it is a string or chat messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def read_rows(name: str, split: str) -> list[dict]:
    """Read the rows of a file of JSON lines, CSV or TSV (every cell is text), or of a dataset NAME,
    NAME:SUBSET or NAME:SUBSET:SPLIT, a folder or on the hub; `split` where the name has none.
    Raises InputError.
    """
    path = Path(name)
    with blame(f"{name} (JSON lines, .csv, .tsv or a dataset)"):
        is_folder, kind = path.is_dir(), path.suffix.lower()
        if is_folder or (kind not in (".jsonl", ".json", ".csv", ".tsv") and not path.exists()):
            import datasets

            parts = [name] if is_folder else name.split(":", 2)  # it may be on drive C:
            source, subset, own_split = [*parts, "", ""][:3]
            found = datasets.load_dataset(source, subset or None, split=own_split or split)
            return found.to_list()
        # "sig": without the byte order mark that some editors write at the start.
        text = path.read_text(encoding="utf-8-sig")
        if kind in (".csv", ".tsv"):
            delimiter = "\t" if kind == ".tsv" else ","
            return list(csv.DictReader(io.StringIO(text), delimiter=delimiter))
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        with blame(f"{name}, line {number}: give one JSON object a line"):
            rows += [{**json.loads(line)}] if line.strip() else []
    return rows


def _prompt_of(config: RunConfig, row: Any) -> Prompt:
    """Make the prompt of a row, filled into the template: text or messages. Raises InputError."""
    template, system = config.prompt_template or "{prompt}", config.system_prompt
    hint = " Braces that are text are {{ }}." if config.prompt_template else ""
    with blame(f"a row of the prompts (--prompt_template?{hint}), {str(row)[:60]}"):
        whole = [x for key, x in row.items() if template == f"{{{key}}}"]  # it may hold messages
        prompt = whole[0] if whole else template.format(**row)
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        is_text = prompt and all(m["role"] and isinstance(m["content"], str) for m in turns)
        if system is not None:
            before = [{"role": "system", "content": system}] if system else []
            prompt = [*before, *turns]
        if not is_text:
            raise InputError(f"a prompt is text or messages of text, not empty: {str(row)[:60]}")
        return prompt


def split_rows(rows: list[dict], key: Callable[[dict], str]) -> tuple[list[dict], list[dict]]:
    """Split into (train, held out): the rows of a tenth of the keys, at most 512, are held out. Of
    fewer than ten keys, all rows are on both sides.
    """
    # Whole keys are held out, not rows: a file may have a prompt several times.
    rows = [(key(row), row) for row in rows]
    keys = list(dict.fromkeys(of_row for of_row, _ in rows))
    for some in (rows, keys):
        random.Random(0).shuffle(some)
    if len(keys) < 10:
        print("Fewer than ten prompts: none is held out, they are trained on and evaluated.")
        return [row for _, row in rows], [row for _, row in rows]
    kept = {*keys[: min(512, len(keys) // 10)]}
    train = [row for of_row, row in rows if of_row not in kept]
    return train, [row for of_row, row in rows if of_row in kept]


def prompt_batch(rows: list[dict], step: int, size: int, seed: int) -> list[dict]:
    """Return the `size` prompts of a step, from endless passes over `rows`, each shuffled anew."""
    # They depend only on seed and step: a resumed run gets the same prompts.
    places = range(step * size, (step + 1) * size)
    return [rows[_order(seed, i // len(rows), len(rows))[i % len(rows)]] for i in places]


@functools.lru_cache(maxsize=4)
def _order(seed: int, number: int, num_rows: int) -> list[int]:
    """Shuffle the rows for a pass. Kept, for a million rows take half a second to shuffle."""
    return random.Random(f"{seed},{number}").sample(range(num_rows), num_rows)


# --- Tokens and text ---


def prompt_tokens(tokenizer: Tokenizer, prompts: list[Prompt]) -> list[list[int]]:
    """Make the token ids of prompts, all text or all messages. Raises InputError."""
    is_chat = isinstance(prompts[0], list)
    with blame("the prompts can't be turned into tokens"):
        texts = prompts if not is_chat else [_in_template(tokenizer, p) for p in prompts]
        # The template writes BOS itself.
        options = {"add_special_tokens": not is_chat, "return_special_tokens_mask": True}
        found = tokenizer(texts, **options)
    rows = []
    for prompt, ids, added in zip(prompts, found.input_ids, found.special_tokens_mask, strict=True):
        while ids and added[len(ids) - 1]:  # EOS or a separator: the text goes on
            ids = ids[:-1]
        rows.append(ids[1:] if ids[:2] == [tokenizer.bos_token_id] * 2 else ids)
        if not ids:
            raise InputError(f"the prompt {prompt!r} has no tokens; leave it out")
    return rows


def _in_template(tokenizer: Tokenizer, messages: list[dict]) -> str:
    """Write chat messages as text, up to where the assistant's turn begins or goes on."""
    if tokenizer.chat_template is None:
        raise InputError("the prompts are chat messages, and the model has no chat template")
    begun = messages[-1]["role"] == "assistant"
    turn = {"add_generation_prompt": not begun, "continue_final_message": begun}
    return tokenizer.apply_chat_template(messages, tokenize=False, **turn)


def pad_rows(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Pad rows of ids on the left to the longest row: (ids, mask), each (B, L)."""
    options = {"batch_first": True, "padding_side": "left"}
    tokens = pad_sequence([torch.tensor(row) for row in rows], padding_value=PADDING, **options)
    real = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    return tokens, pad_sequence(real, **options)


def completion_ids(rollout: Rollout) -> list[list[int]]:
    """Return the token ids of each completion, EOS included. ValueError: the mask has a hole."""
    mask = rollout.completion_mask
    if (mask[:, 1:] > mask[:, :-1]).any():  # as of what a tool answers in the middle
        raise ValueError("completion_mask has a hole: in each row it is True, then False")
    rows = rollout.tokens[:, -mask.shape[1] :].tolist()
    return [row[:length] for row, length in zip(rows, rollout.lengths.tolist(), strict=True)]


def completion_texts(tokenizer: Tokenizer, rollout: Rollout, eos_token_ids: list[int]) -> list[str]:
    """Return the text of each of B completions, without EOS and padding, with its stop string."""
    length, texts = rollout.completion_mask.shape[1], []
    prompts, real = rollout.tokens[:, :-length].tolist(), rollout.attention_mask.tolist()
    for row, mask, ids in zip(prompts, real, completion_ids(rollout), strict=True):
        # With the prompt in front: some tokenizers drop the space before the first word.
        prompt = [i for i, is_real in zip(row, mask) if is_real]
        ids = ids[:-1] if ids[-1] in eos_token_ids else ids
        text, before = tokenizer.decode(prompt + ids), tokenizer.decode(prompt)
        # A character whose bytes begin in the prompt changes its text.
        texts.append(text[len(before) :] if text.startswith(before) else tokenizer.decode(ids))
    return texts


# --- Rewards ---


def load_reward(spec: str, ready_made: dict[str, RewardFunction]) -> RewardFunction:
    """Find a reward: one of `ready_made`, or FILE.py:FUNCTION, by running it. Raises InputError."""
    if spec in ready_made:
        return ready_made[spec]
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py"):
        names = ", ".join(ready_made)
        raise InputError(f"{spec}: write a reward as FILE.py:FUNCTION, or choose from {names}")
    with blame(spec):
        file = Path(path).resolve(strict=True)
    if (function := getattr(_import(file), name, None)) is None:
        raise InputError(f"{spec}: the file has no function {name}")
    return function


@functools.cache
def _import(file: Path) -> ModuleType:
    """Import a file, once for all its functions: it may load a model."""
    # Its folder is in the path, and its name its own: a pool can import it and its neighbours.
    sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)  # a math.py must not hide Python's
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # it may switch them off
            spec.loader.exec_module(module)
    except SystemExit as e:  # with 0 the run would look like one that has succeeded
        raise InputError(f'{file}: exits: put that below `if __name__ == "__main__":`') from e
    return module


def names_of(rewards: list[RewardFunction]) -> list[str]:
    """Name the rewards, those of one name with their number."""
    names = [getattr(reward, "__name__", type(reward).__name__) for reward in rewards]
    return [f"{x}_{i}" if names.count(x) > 1 else x for i, x in enumerate(names, 1)]


def call_reward(
    reward: RewardFunction,
    rows: list[dict],
    texts: list[str],
    ids: list[list[int]],
    step: int,
) -> Tensor:
    """Call a reward with TRL's keyword arguments on G texts for each of N rows: (N*G,) float32, NaN
    where it gave None. Raises InputError for bad values; what it raises itself is left as it is.
    """
    # Copies: a reward that changes a prompt in place would change what later steps train on.
    rows = [copy.deepcopy(row) for row in rows for _ in range(len(texts) // len(rows))]
    keys = {key for row in rows for key in row} - {"prompt"}
    arguments = {key: [row.get(key) for row in rows] for key in keys}
    arguments |= {"prompts": [row["prompt"] for row in rows], "completion_ids": [[*x] for x in ids]}
    # What TRL gives besides. What a reward logs is not kept.
    arguments |= {"trainer_state": SimpleNamespace(global_step=step)}
    arguments |= dict.fromkeys(("log_metric", "log_extra"), lambda *args: None)
    arguments["completions"] = [
        text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
        for row, text in zip(rows, texts, strict=True)
    ]
    signature, (name,) = inspect.signature(reward), names_of([reward])
    parameters = signature.parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        arguments = {p.name: arguments[p.name] for p in parameters if p.name in arguments}
    with blame(f"the reward {name} gets the columns {sorted(map(str, keys))} besides the prompt"):
        signature.bind(**arguments)
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        values = reward(**arguments)
    with blame(f"the reward {name} must return a list of numbers or None"):
        values = list(values)
        scores = torch.tensor([math.nan if x is None else float(x) for x in values])
    num_bad = sum(x is not None and not math.isfinite(s) for x, s in zip(values, scores.tolist()))
    if len(scores) != len(texts) or num_bad > 0:
        wrong = f"{len(scores)} values, {num_bad} not finite"
        raise InputError(f"the reward {name} returned {wrong}, for {len(texts)} completions")
    return scores
