"""Prompts: a Task reads them, makes tokens of them, and has the texts that follow scored.

Prompts come from a file or a dataset, are filled into a template, and are split into those to train
on and those held out.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StopStringCriteria
from transformers import PreTrainedTokenizerBase as Tokenizer

from common import Rollout, evaluating
from plumbing.decoding import Decoder
from plumbing.errors import (
    Fault,
    InputError,
    described,
    did_you_mean,
    first_line,
    is_out_of_memory,
    optional_library,
)
from plumbing.forward import completion_logprobs, on_cpu, to
from plumbing.models import context_length, eos_token_ids
from plumbing.rewards import (
    RewardFunction,
    call_reward,
    check_answers,
    load_reward,
    score_texts,
)
from sampling import generate

Prompt = str | list[dict[str, str]]  # text, or chat messages
ROW_FORMAT = 'each line must be like {"prompt": "..."} or {"prompt": [{"role": .., "content": ..}]}'
# Any id will do: the masks say what is padding, not the id. That of the tokenizer may be one that
# the model doesn't know: a pad token that was added to the tokenizer alone.
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
    name: str = "prompts"
    tokenizer: Tokenizer | None = None
    config: Any = None
    longest_prompt: int = 0  # in tokens

    def batch(self, step: int) -> list[dict]:
        """The N rows of a step."""
        return prompt_batch(self.train, step, self.config.prompts_per_step, self.config.seed)

    def encode(self, rows: list[dict]) -> tuple[Tensor, Tensor]:
        """The tokens of N prompts: (ids, mask), each (N, P), on the CPU, padded on the left."""
        return encode_prompts(self.tokenizer, rows)

    def score(
        self, rows: list[dict], rollout: Rollout, every: bool = False
    ) -> tuple[Tensor, list[str]]:
        """Score a rollout of G completions for each of N prompts: (scores (N*G,), texts). A score
        is NaN where all its rewards are None, or with `every` an InputError.
        """
        texts = decode(self.tokenizer, rollout, self.config.stop)
        scores = score_texts(self.rewards, self.weights, rows, texts, completion_ids(rollout))
        if every and scores.isnan().any():
            raise InputError("a reward is None, and this algorithm needs one for every completion")
        return to(rollout.tokens.device, scores), texts

    def verify(self, rows: list[dict], texts: list[str], rollout: Rollout) -> Tensor | None:
        """What the verifier says of G completions for each of N prompts: (N, G), NaN for None; None
        if the task has no verifier.
        """
        if self.verifier is None:
            return None
        right = call_reward(self.verifier, rows, texts, completion_ids(rollout))
        return right.view(len(rows), -1)


def load_task(
    config: Any,
    tasks: ModuleType,
    policy: PreTrainedModel,
    tokenizer: Tokenizer,
    heldout_only: bool = False,
) -> Task:
    """The task that the flags name, of tasks.py; its prompts suit the policy. On a GPU it also
    says how much is computed at a time, because the longest prompt is known now. Raises InputError.

    heldout_only: none is trained on, and with --eval_prompts the task's own needn't suit the flags.
    """
    if config.task not in tasks.TASKS:
        known = ", ".join(tasks.TASKS) + did_you_mean(config.task, tasks.TASKS)
        raise InputError(f"--task {config.task}: not in tasks.py, which has {known}")
    chat = tokenizer.chat_template is not None
    task = tasks.TASKS[config.task](chat)
    task.tokenizer, task.config = tokenizer, config
    if heldout_only:
        task.train, task.heldout = [], [] if config.eval_prompts else task.heldout
    _load_prompts(config, task, chat)
    _load_rewards(config, task, tasks, policy.device)
    if not (task.train or heldout_only) or not task.heldout:
        raise InputError(f"--task {config.task}: needs prompts to train on and held-out ones")
    prompts = [row["prompt"] for row in task.train + task.heldout]
    if chat and isinstance(prompts[0], str):
        print(
            "The prompts are plain text, so the model's chat template is not used."
            ' --system_prompt "" makes messages of them.'
        )
    _check_prompts(config, policy, task)
    if config.reward_model:
        task.rewards[-1].check_prompts(prompts, config.max_new_tokens)
    if config.device.startswith("cuda") and config.model != "tiny":
        from plumbing.memory import choose_limits  # which a CPU doesn't need

        choose_limits(config, policy, task)
    return task


def _load_rewards(config: Any, task: Task, tasks: ModuleType, device: torch.device) -> None:
    """Put the rewards and the verifier that the flags name into the task. Raises InputError."""
    if config.reward or config.reward_model:
        task.rewards = [load_reward(spec, tasks.REWARDS) for spec in config.reward]
        task.weights = []
        if config.prompts or config.eval_prompts:
            task.verifier = None  # made for the prompts of the task, not for these
    # A verifier of one's own, or a reward that is one; else that of the task.
    is_verifier = next((spec for spec in config.reward if spec in tasks.VERIFIERS), None)
    if config.verifier or is_verifier:
        task.verifier = load_reward(config.verifier or is_verifier, tasks.REWARDS, "--verifier")
    for name, verifier in tasks.VERIFIERS.items():
        if verifier in [*task.rewards, task.verifier]:
            check_answers(name, verifier, task.train + task.heldout)
    if config.reward_model:
        from plumbing.preferences import RewardModel  # which most runs don't need

        task.rewards.append(RewardModel(config.reward_model, device, bf16=config.bf16))
    task.weights = config.reward_weights or task.weights or [1.0] * len(task.rewards)
    if len(task.weights) != (count := len(task.rewards)):
        raise InputError(f"--reward_weights {task.weights}: give one per reward, here {count}")


# --- Reading prompts ---


def as_messages(prompt: Prompt) -> list[dict[str, str]]:
    """A prompt as chat messages: text is one of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def text_of(completion: str | list[dict[str, str]]) -> str:
    """The text of a completion, whether it is a string or chat messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def _load_prompts(config: Any, task: Task, chat: bool) -> None:
    """Put the prompts that the flags name into the task, in their template. Raises InputError."""
    template = text_or_file(config.prompt_template, "--prompt_template")
    template = "{prompt}" if template is None else template
    system = text_or_file(config.system_prompt, "--system_prompt")
    if not names_in(template):
        raise InputError("--prompt_template: names no column; {prompt} stands for the prompt")
    if system is not None and not chat:
        fault = "--system_prompt: the model has no chat template"
        raise InputError(f"{fault}; write the text into --prompt_template")

    def with_prompt(row: dict) -> dict:
        prompt = _prompt_of(row, template)
        json.dumps(prompt, allow_nan=False)  # or samples.jsonl couldn't hold what messages have
        return row | {"prompt": prompt if system is None else after_system(system, prompt)}

    if config.prompts:
        rows = read_rows(config.prompts, "train", "--prompts", ROW_FORMAT, with_prompt)
        task.train, task.heldout = (rows, []) if config.eval_prompts else split_prompts(rows)
    else:  # those of the task itself, checked in the same way
        try:
            task.train, task.heldout = (
                [with_prompt(row) for row in rows] for rows in (task.train, task.heldout)
            )
        except (ValueError, TypeError) as e:
            raise InputError(f"--task {config.task}: {e}") from e
    if config.eval_prompts:
        name, flag = config.eval_prompts, "--eval_prompts"
        task.heldout = read_rows(name, "test", flag, ROW_FORMAT, with_prompt)


def read_rows(
    name: str, split: str, flag: str, form: str, parse: Callable[[Any], dict]
) -> list[dict]:
    """The rows of a file of JSON lines, or of what the library datasets reads: CSV and Parquet
    files, folders, and datasets on the hub, written NAME, NAME:SUBSET or NAME:SUBSET:SPLIT.

    `split` is read where the name has none; `parse` makes a row of what is there, or raises
    ValueError. Raises InputError with the first bad row; `form` says what a line of JSON must be.
    """
    suffix = Path(name).suffix[1:]
    is_json = suffix in ("jsonl", "json", "txt") or (Path(name).is_file() and suffix not in TABLES)
    kind, remedy = ("line", f"; {form}") if is_json else ("row", "")
    rows = []
    found = _read(name, flag).split("\n") if is_json else _from_datasets(name, split, flag)
    for number, row in enumerate(found, 1):
        if is_json and not row.strip():
            continue
        try:
            rows.append(parse(json.loads(row) if is_json else row))
        except (ValueError, TypeError, RecursionError) as e:
            fault = "not JSON: " * isinstance(e, (json.JSONDecodeError, RecursionError))
            raise InputError(f"{name}, {kind} {number}: {fault}{first_line(e)}{remedy}") from e
    if not rows:
        raise InputError(f"{name}: is empty{remedy}")
    return rows


TABLES = ("csv", "parquet")


def _read(path: str, flag: str) -> str:
    try:
        # "sig": without the byte order mark that some editors write at the start.
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"{flag} {path}: can't be read ({first_line(e)})") from e


def _from_datasets(name: str, split: str, flag: str) -> list[dict]:
    remedy = "pip install datasets, or give a file of JSON lines"
    datasets = optional_library("datasets", f"{flag} {name}: {remedy}")
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it also logs what it raises
    kind = Path(name).suffix[1:]
    if kind in TABLES:
        arguments, options = [kind], {"data_files": name, "split": "train"}
    else:
        # A folder may have a colon in its name, a dataset on the hub has none.
        parts = [name] if Path(name).exists() else name.split(":", 2)  # train[:100] has one too
        source, subset, own_split = [*parts, "", ""][:3]
        if subset and Path(source, subset).is_dir():  # the hub's layout, without its README
            source, subset = str(Path(source, subset)), ""
        arguments, options = [source, subset or None], {"split": own_split or split}
    try:
        return datasets.load_dataset(*arguments, **options).to_list()
    except Exception as e:  # it raises anything, for a damaged file or without a network
        # What it says of a damaged file is that "an error occurred".
        fault = first_line(e.__cause__ or e)
        raise InputError(f"{flag} {name} (split {options['split']}): {fault}") from e


def _prompt_of(row: object, template: str) -> Prompt:
    """The prompt that a row holds, filled into the template. Raises ValueError."""
    if not isinstance(row, dict):
        raise ValueError("not an object with keys")
    names = names_in(template)
    for name in names:
        if name not in row:
            there = ", ".join(row) + did_you_mean(name, row)
            raise ValueError(f'no key "{name}", there are {there}')
    # One column alone may hold messages, which the template {messages} leaves as they are.
    if template == f"{{{names[0]}}}":
        return text_or_messages(row[names[0]], names[0])
    prompt = text_or_messages(row["prompt"], "prompt") if "prompt" in names else None
    if isinstance(prompt, list):  # the last message is filled in
        filled = template.format(**row | {"prompt": text_of(prompt)})
        return [*prompt[:-1], prompt[-1] | {"content": filled}]
    return text_or_messages(template.format(**row), names[0])


def text_or_messages(value: object, name: str, may_be_empty: bool = False) -> Prompt:
    """What a row has under the key `name`, if it is text or messages. Raises ValueError."""
    if isinstance(value, str) and (value or may_be_empty):
        return value
    if not isinstance(value, list) or not value or not all(isinstance(x, dict) for x in value):
        raise ValueError(f'"{name}" is neither text nor messages, or is empty')
    return [_text_message(message) for message in value]


def _text_message(message: dict[str, Any]) -> dict[str, Any]:
    """A chat message whose content is one text: it may come as a list of parts, as OpenAI writes
    it, and be left out beside tool calls. Raises ValueError.
    """
    # A table has every key in every row, and templates ask whether a message has `tool_calls`.
    message = {key: x for key, x in message.items() if x is not None}
    content = message.get("content", "" if "tool_calls" in message else None)
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    message |= {} if content is None else {"content": content}
    for key in ("content", "role"):
        if not isinstance(message.get(key), str):
            raise ValueError(f'a message has no text as "{key}"')
    return message


def names_in(template: str) -> list[str]:
    """The columns that a template names, in braces. {{ and }} are braces of the text."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        if bad := [name for name in names if not name.isidentifier()]:
            raise ValueError(f"{{{bad[0]}}} names no column")
    except ValueError as e:
        raise InputError(f"--prompt_template: {e}; a brace of the text is written {{{{") from e
    return names


def after_system(system: str, prompt: Prompt) -> Prompt:
    """The prompt as chat messages after a system message, which is left out where it is empty.
    Raises ValueError where there is one already.
    """
    messages = as_messages(prompt)
    if messages[0]["role"] == "system":
        raise ValueError("the messages have a system message already: leave out --system_prompt")
    return [{"role": "system", "content": system}] * bool(system) + messages


def text_or_file(value: str | None, flag: str) -> str | None:
    """What the file of this name holds, without its last line break; `value` if there is none."""
    if value is not None and os.path.isfile(value):  # not Path: a text is too long for a name
        return _read(value, flag).removesuffix("\n")
    if re.fullmatch(r"\S+\.(txt|md|jinja)", value or ""):
        raise InputError(f"{flag} {value}: there is no such file")
    return value


def split_prompts(
    rows: list[dict], what: str = "prompts", key: Callable[[dict], Any] = lambda row: row["prompt"]
) -> tuple[list[dict], list[dict]]:
    """(train, held out): a tenth of the rows, at most 512, is held out. Fewer than ten rows are all
    trained on and evaluated. No `key` is on both sides, unless every held-out one would be.
    """
    rows = list(rows)
    random.Random(0).shuffle(rows)
    if len(rows) < 10:
        print(f"Fewer than ten {what}: none is held out, they are trained on and evaluated.")
        return rows, rows
    num_heldout = min(512, len(rows) // 10)
    train, heldout = rows[num_heldout:], rows[:num_heldout]
    seen = {json.dumps(key(row)) for row in train}  # the file may have a prompt twice
    return train, [row for row in heldout if json.dumps(key(row)) not in seen] or heldout


def prompt_batch(rows: list[dict], step: int, size: int, seed: int) -> list[dict]:
    """The `size` prompts of a step, from endless passes over `rows`, each shuffled anew."""
    # They depend on seed and step alone: a resumed run gets the same prompts.
    places = range(step * size, (step + 1) * size)
    return [rows[_order(seed, i // len(rows), len(rows))[i % len(rows)]] for i in places]


@functools.lru_cache(maxsize=4)
def _order(seed: int, number: int, num_rows: int) -> list[int]:
    """The order of the rows in a pass. Kept, for a million rows take half a second to shuffle."""
    return random.Random(f"{seed},{number}").sample(range(num_rows), num_rows)


# --- Tokens and text ---


def prompt_tokens(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """The token ids of one prompt, after which a completion follows. Raises InputError where there
    is no chat template for its messages, and for a prompt that gives no tokens.
    """
    if isinstance(prompt, list) and tokenizer.chat_template is None:
        raise InputError("the prompts are chat messages, and the model has no chat template")
    return token_ids(tokenizer, prompt, "the prompt", goes_on=True)


def token_ids(tokenizer: Tokenizer, text: Prompt, what: str, goes_on: bool = False) -> list[int]:
    """The token ids of a text, or of chat messages in their template. If it `goes_on`, chat
    messages end where the assistant's turn begins, or goes on where the last message is the
    assistant's, and text ends without EOS. Raises InputError, which says what the text is.
    """
    try:
        if isinstance(text, str):
            found = tokenizer(text, return_special_tokens_mask=True)
            ids, added = found.input_ids, found.special_tokens_mask
            while goes_on and ids and added[len(ids) - 1]:  # EOS or a separator
                ids = ids[:-1]
        else:
            has_begun = goes_on and text[-1]["role"] == "assistant"
            turn = {
                "add_generation_prompt": goes_on and not has_begun,
                "continue_final_message": has_begun,
            }
            written = tokenizer.apply_chat_template(text, tokenize=False, **turn)
            # The template writes BOS itself; add_special_tokens would put a second one in front.
            ids = tokenizer(written, add_special_tokens=False).input_ids
    except Exception as e:  # half a surrogate pair, roles that the template does not know, ...
        fault = f"can't be tokenised ({type(e).__name__}: {first_line(e)})"
        raise InputError(f"{what} {str(text)[:60]!a} {fault}; leave it out") from e
    if not ids:
        raise InputError(f"{what} {text!r} has no tokens; leave it out")
    return without_second_bos(tokenizer, ids)


def without_second_bos(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """The ids with one BOS, where a text that begins with BOS got another one in front."""
    return ids[1:] if ids[:2] == [tokenizer.bos_token_id] * 2 else ids


def _check_prompts(config: Any, policy: PreTrainedModel, task: Task) -> None:
    """Check that every prompt suits the vocabulary and the context. Raises InputError."""
    limit, new = context_length(policy), config.max_new_tokens
    if limit is not None and new >= limit:
        raise InputError(f"--max_new_tokens {new}: the model's context is {limit}, prompt included")
    for row in task.train + task.heldout:
        ids = prompt_tokens(task.tokenizer, row["prompt"])
        if limit is not None and len(ids) + new > limit:
            fault = f"a prompt of {len(ids)} tokens leaves no room for {new} new ones in a context"
            remedy = f"lower --max_new_tokens or shorten {str(row['prompt'])[:60]!r}"
            raise InputError(f"{fault} of {limit}: {remedy}")
        check_ids(policy, max(ids), f"--model {config.model}")
        task.longest_prompt = max(task.longest_prompt, len(ids))


def check_ids(model: PreTrainedModel, largest: int, what: str) -> None:
    """Check that the model knows the largest id of its tokenizer. Raises InputError."""
    vocab_size = model.get_input_embeddings().weight.shape[0]
    if largest >= vocab_size:
        fault = f"its tokenizer gives id {largest}, and the model knows {vocab_size} tokens"
        raise InputError(f"{what}: {fault}: they don't belong together")


def encode_prompts(tokenizer: Tokenizer, rows: list[dict]) -> tuple[Tensor, Tensor]:
    """Tokenise prompts: (ids, mask), each (N, P), on the CPU, padded on the left, so completions
    start at P.
    """
    ids = [prompt_tokens(tokenizer, row["prompt"]) for row in rows]
    return pad_rows(ids, PADDING, "left", "cpu")


def pad_rows(rows: list[list[int]], pad: int, side: str, device: Any) -> tuple[Tensor, Tensor]:
    """Rows of ids, padded on the "left" or "right" to the longest row: (ids, mask), each (B, L)."""
    width = max(map(len, rows))
    tokens = torch.full((len(rows), width), pad)
    mask = torch.zeros_like(tokens)
    for i, row in enumerate(rows):
        columns = slice(width - len(row), None) if side == "left" else slice(len(row))
        tokens[i, columns], mask[i, columns] = torch.tensor(row), 1
    return to(torch.device(device), tokens), to(torch.device(device), mask)


def sampling_options(config: Any, policy: PreTrainedModel, tokenizer: Tokenizer) -> dict[str, Any]:
    """Arguments of sample: softmax(logits / temperature), with a generator seeded by the run.
    Raises InputError where the policy can't be sampled from and trained.
    """
    check_policy(config, policy)
    special = special_tokens(tokenizer)  # as a stop string, such a token is another EOS
    ids = [special[string] for string in config.stop if string in special]
    strings = [string for string in config.stop if string not in special]
    half = torch.float16 if config.fp16 else torch.bfloat16 if config.bf16 else None
    return {
        "num_generations": config.num_generations,
        "max_rows": config.rollout_batch_size,
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "eos_token_ids": eos_token_ids(policy, tokenizer) + ids,
        "pad_token_id": PADDING,
        "generator": torch.Generator(policy.device).manual_seed(config.seed),
        "decoder": Decoder(policy, half, None if config.cuda_graphs else False),
        "stop": stop_criteria(tokenizer, strings) if strings else None,
    }


def check_policy(config: Any, policy: PreTrainedModel) -> None:
    """Check that the policy gives the same log-probs in every way in which a run calls it. Some
    don't: BERT, and layers that need the cache of others (Gemma 3n). Raises InputError.
    """
    # Where dropout stays on, it changes them too.
    no_dropout, model = getattr(config, "disable_dropout", False), f"--model {config.model}"
    try:
        with contextlib.nullcontext() if no_dropout else evaluating(policy):
            off, limit = _deviation(config, policy)
    except Fault as e:
        remedy = "; try --fp16 false" if config.fp16 else ""
        raise InputError(f"{model}: can't be used, its logits are not finite{remedy}") from e
    except Exception as e:  # a model of another kind raises anything
        if isinstance(e, InputError) or is_out_of_memory(e):
            raise
        fault = f"can't be sampled from with a key-value cache and trained ({described(e)})"
        raise InputError(f"{model}: {fault}") from e
    if not off <= limit:
        fault = f"its log-probs are {off:.2g} off when it is called in another way: not a causal"
        causes = "language model, or its adapter or this version of transformers is at fault"
        raise InputError(f"{model}: {fault} {causes}")


@torch.no_grad()
def _deviation(config: Any, policy: PreTrainedModel) -> tuple[float, float]:
    """(The largest difference of log-probs between token by token, in one pass and without padding,
    for prompts alone and for shared ones; how much of it rounding explains).
    """
    ids = torch.arange(1, 9).view(2, 4) % policy.get_input_embeddings().weight.shape[0]
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]).bool()
    options = {"max_new_tokens": 2, "eos_token_ids": [], "pad_token_id": PADDING}
    static = None if config.cuda_graphs else False
    # Frozen weights may be in bfloat16; else float32 shows smaller faults.
    rounded = any(p.dtype == torch.bfloat16 for p in policy.parameters())
    drawn, read = [], []
    for G in (1, 2):
        options["generator"] = torch.Generator(policy.device).manual_seed(0)
        decoder = Decoder(policy, torch.bfloat16 if rounded else None, static)
        rollout = generate(policy, ids, mask, num_generations=G, decoder=decoder, **options)
        for part in (rollout, rollout[:1]):
            drawn.append(part.logprobs)
            read.append(completion_logprobs(policy, part, temperature=1.0, bf16=rounded)[0])
    if config.bf16 or config.fp16:  # here it must be possible, that is all
        decoder = Decoder(policy, torch.float16 if config.fp16 else torch.bfloat16, static)
        generate(policy, ids, mask, decoder=decoder, **options)
    drawn, read = torch.cat(drawn), torch.cat(read)
    limit = (0.1 if rounded else 1e-3) * max(1.0, drawn.abs().max().item())
    return (drawn - read).abs().max().item(), limit


def stop_criteria(tokenizer: Tokenizer, strings: list[str]) -> StopStringCriteria:
    """What tells from token ids which completions end with a stop string. Raises InputError."""
    try:
        criteria = StopStringCriteria(tokenizer, strings)
    except ValueError as e:  # no token has the last character of a string, for example
        fault = f"can't be found with this tokenizer: {first_line(e)}"
        raise InputError(f"--stop {strings}: {fault}") from e
    # It would take the name of a special token for text: "<|pad|>" would end at the string ">".
    special = [*special_tokens(tokenizer).values()]
    criteria.embedding_vec = criteria.embedding_vec.clone()  # the library uses it for others too
    criteria.embedding_vec[special] = -1
    return criteria


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Text and id of each special token: BOS, EOS, those of chat templates, ..."""
    return {str(x): i for i, x in tokenizer.added_tokens_decoder.items() if x.special}


def decode(tokenizer: Tokenizer, rollout: Rollout, stop: Sequence[str] = ()) -> list[str]:
    """The text of each completion, B strings, without EOS and padding, with its stop string."""
    rollout, length = on_cpu(rollout), rollout.completion_mask.shape[1]
    special, texts = set(special_tokens(tokenizer).values()), []
    prompts, real = rollout.tokens[:, :-length].tolist(), rollout.attention_mask.tolist()
    completions, all_finished = completion_ids(rollout), rollout.finished.tolist()
    text_of_ids = functools.cache(lambda ids: tokenizer.decode(list(ids)))
    for row, mask, ids, finished in zip(prompts, real, completions, all_finished, strict=True):
        # Special tokens of a completion stay: a reward must see a <think> that is one.
        prompt = [i for i, is_real in zip(row, mask) if is_real and i not in special]
        before = text_of_ids(tuple(prompt))
        text = text_after(tokenizer, prompt, before, ids[:-1] if finished else ids)
        if finished and stop and ids[-1] not in special:  # maybe the end of a stop string
            whole = text_after(tokenizer, prompt, before, ids)
            text = whole if any(string in whole for string in stop) else text
        texts.append(text)
    return texts


def text_after(tokenizer: Tokenizer, prompt: list[int], before: str, completion: list[int]) -> str:
    """The text of the completion's ids after a prompt, whose text is `before`. They are decoded
    together: SentencePiece tokenizers drop the space in front of the first word that they decode.
    """
    text = tokenizer.decode(prompt + completion)
    if not text.startswith(before):  # a character whose bytes begin in the prompt
        return tokenizer.decode(completion)
    return text.removeprefix(before)


def completion_ids(rollout: Rollout) -> list[list[int]]:
    """The token ids of each completion, EOS included."""
    mask = on_cpu(rollout).completion_mask  # True up to the end of each
    rows, lengths = on_cpu(rollout).tokens[:, -mask.shape[1] :].tolist(), mask.sum(1).tolist()
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]
