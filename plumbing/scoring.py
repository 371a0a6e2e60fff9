"""From prompts to tokens, and from rollouts to texts and scores."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from common import Rollout
from plumbing.data import RewardFunction, Task
from plumbing.errors import InputError, first_line
from plumbing.forward import on_cpu
from plumbing.loading import context_length, eos_token_ids
from plumbing.prompts import Prompt
from plumbing.reward_models import pad_rows
from plumbing.stopping import StopStrings, text_after

# Any id will do: the masks say what is padding, not the id. That of the tokenizer may be one that
# the model doesn't know: a pad token that was added to the tokenizer alone.
PADDING = 0


def prompt_tokens(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """The token ids of one prompt; of chat messages up to where the assistant's turn begins. Raises
    InputError where there is no chat template, and for a prompt that gives no tokens.
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


def check_prompts(config: Any, policy: PreTrainedModel, tokenizer: Tokenizer, task: Task) -> None:
    """Check that every prompt suits the vocabulary and the context. Raises InputError."""
    limit, new = context_length(policy), config.max_new_tokens
    if limit is not None and new >= limit:
        raise InputError(f"--max_new_tokens {new}: the model's context is {limit}, prompt included")
    vocab_size = policy.get_input_embeddings().weight.shape[0]
    prompts = [row["prompt"] for row in task.train + task.heldout]
    for prompt, ids in zip(prompts, _tokens_of_all(tokenizer, prompts), strict=True):
        if limit is not None and len(ids) + new > limit:
            fault = f"a prompt of {len(ids)} tokens leaves no room for {new} new ones in a context"
            remedy = f"lower --max_new_tokens or shorten {str(prompt)[:60]!r}"
            raise InputError(f"{fault} of {limit}: {remedy}")
        if max(ids) >= vocab_size:
            fault = f"its tokenizer gives id {max(ids)}, and the model knows {vocab_size} tokens"
            raise InputError(f"--model {config.model}: {fault}: they don't belong together")


def _tokens_of_all(tokenizer: Tokenizer, prompts: list[Prompt]) -> list[list[int]]:
    """prompt_tokens of each prompt: texts all at once, which is many times as fast."""
    if all(isinstance(prompt, str) for prompt in prompts):
        with contextlib.suppress(Exception):
            ids = tokenizer(prompts).input_ids
            if all(ids):
                return ids
    # One by one: so that an error names its prompt.
    return [prompt_tokens(tokenizer, prompt) for prompt in prompts]


def encode_prompts(tokenizer: Tokenizer, rows: list[dict]) -> tuple[Tensor, Tensor]:
    """Tokenise prompts: (ids, mask), each (N, P), on the CPU, padded on the left, so completions
    start at P.
    """
    ids = [prompt_tokens(tokenizer, row["prompt"]) for row in rows]
    return pad_rows(ids, PADDING, "left", "cpu")


def sampling_options(config: Any, policy: PreTrainedModel, tokenizer: Tokenizer) -> dict[str, Any]:
    """Arguments of generate: softmax(logits / temperature), with a generator seeded by the run."""
    # A special token is no text: as a stop string it is another EOS.
    special = {str(x): i for i, x in tokenizer.added_tokens_decoder.items() if x.special}
    ids = [special[string] for string in config.stop if string in special]
    strings = [string for string in config.stop if string not in special]
    return {
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "eos_token_ids": eos_token_ids(policy, tokenizer) + ids,
        "pad_token_id": PADDING,
        "generator": torch.Generator(policy.device).manual_seed(config.seed),
        "bf16": getattr(config, "bf16", False),  # only runs have the flag
        "stops": StopStrings(tokenizer, strings) if strings else None,
    }


def decode(tokenizer: Tokenizer, rollout: Rollout, stop: Sequence[str] = ()) -> list[str]:
    """The text of each completion, B strings, without EOS and padding, with its stop string."""
    rollout, length = on_cpu(rollout), rollout.completion_mask.shape[1]
    num_tokens = rollout.completion_mask.sum(1).tolist()
    texts = []
    for row, real, n, finished in zip(
        rollout.tokens, rollout.attention_mask, num_tokens, rollout.finished.tolist(), strict=True
    ):
        prompt, ids = row[:-length][real[:-length]].tolist(), row[-length:][:n].tolist()
        text = text_after(tokenizer, prompt, ids[:-1] if finished else ids)
        if finished and stop:  # by EOS, which is no text, or by the end of a stop string
            whole = text_after(tokenizer, prompt, ids)
            text = whole if any(string in whole for string in stop) else text
        texts.append(text)
    return texts


def score(
    task: Task, rows: list[dict], rollout: Rollout, tokenizer: Tokenizer
) -> tuple[Tensor, list[str]]:
    """Score a rollout of G completions for each of N prompts: (scores (N*G,) on the CPU, texts).

    The rewards are added with their weights. One that is None is left out of the sum; where all
    are, the score is NaN.
    """
    texts, ids = decode(tokenizer, rollout, task.stop), completion_ids(rollout)
    return score_texts(task, rows, texts, ids), texts


def score_texts(
    task: Task, rows: list[dict], texts: list[str], ids: list[list[int]] | None = None
) -> Tensor:
    """Score G texts for each of N rows: (N*G,), as `score` does. Without the token ids no reward
    gets `completion_ids`.
    """
    num_generations = len(texts) // len(rows)
    rows = [row for row in rows for _ in range(num_generations)]
    columns = [_call_reward(reward, rows, texts, ids) for reward in task.rewards]
    scores = torch.stack(columns, dim=1)  # (N*G, rewards)
    total = (scores * torch.tensor(task.weights)).nansum(dim=1)
    return total.masked_fill(scores.isnan().all(dim=1), math.nan)


def verify(task: Task, rows: list[dict], texts: list[str], rollout: Rollout) -> Tensor | None:
    """What the verifier says of G completions for each of N prompts: (N, G), NaN for None; None if
    the task has no verifier.
    """
    if task.verifier is None:
        return None
    num_generations = len(texts) // len(rows)
    rows = [row for row in rows for _ in range(num_generations)]
    right = _call_reward(task.verifier, rows, texts, completion_ids(rollout))
    return right.view(-1, num_generations)


def completion_ids(rollout: Rollout) -> list[list[int]]:
    """The token ids of each completion, EOS included."""
    tokens, masks = on_cpu(rollout).tokens, on_cpu(rollout).completion_mask
    return [row[-len(mask) :][mask].tolist() for row, mask in zip(tokens, masks, strict=True)]


def _call_reward(
    reward: RewardFunction, rows: list[dict], texts: list[str], ids: list | None
) -> Tensor:
    """Call a reward function with TRL's keyword arguments: (B,) float32, NaN where it gave None."""
    name = getattr(reward, "__name__", type(reward).__name__)
    prompts = [row["prompt"] for row in rows]
    completions = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    keys = sorted({key for row in rows for key in row} - {"prompt"})
    columns = {key: [row.get(key) for row in rows] for key in keys}
    arguments = columns | {"prompts": prompts, "completions": completions, "completion_ids": ids}
    if ids is None:
        del arguments["completion_ids"]
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
        fault = f"must return a list of numbers or None ({first_line(e)})"
        raise InputError(f"the reward function {name} {fault}") from e
    if len(known) != len(texts):
        fault = f"returned {len(known)} values for {len(texts)} completions"
        raise InputError(f"the reward function {name} {fault}")
    for value, there, text in zip(scores.tolist(), known, texts, strict=True):
        if there and not math.isfinite(value):
            raise InputError(f"the reward function {name} returned {value} for {text[:60]!r}")
    return scores
