"""Rollouts: the decode loop and its KV cache.

Our own loop over the model's forward, because `model.generate` takes top_k, repetition_penalty
and more from the checkpoint's generation_config, and then samples from something other than
softmax(logits / temperature). The KL would turn negative, and the importance ratio would be
wrong.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from common import InputError, context_length, evaluating, model_inputs


@dataclass
class Rollout:
    """B sampled completions: P prompt positions, padded on the left, then T of the completion."""

    tokens: Tensor  # (B, P+T) prompt and completion; pad_token_id after the first EOS
    attention_mask: Tensor  # (B, P+T) bool: False at padding on either side
    completion_mask: Tensor  # (B, T) bool: True up to and including the first EOS
    logprobs: Tensor  # (B, T) of the distribution that each token was drawn from; 0 off the mask
    finished: Tensor  # (B,) bool: ended with EOS, not at the length limit

    def __getitem__(self, rows: Tensor | slice) -> Rollout:
        """The given rows of every field."""
        return Rollout(*(getattr(self, field.name)[rows] for field in dataclasses.fields(self)))


def concatenate(rollouts: list[Rollout]) -> Rollout:
    """One rollout from several of the same P and T."""
    columns = zip(
        *([getattr(r, field.name) for field in dataclasses.fields(Rollout)] for r in rollouts),
        strict=True,
    )
    return Rollout(*(torch.cat(column) for column in columns))


def completion_mask(completions: Tensor, eos_token_ids: list[int]) -> Tensor:
    """(B, T) tokens -> (B, T) bool: True up to and including the first EOS, whichever of the EOS
    ids it is.

    With EOS = 9: [5, 9, 7] -> [1, 1, 0] and [5, 6, 7] -> [1, 1, 1]. EOS is an action and has to
    get its gradient.
    """
    is_eos = torch.isin(
        completions, torch.tensor(eos_token_ids, device=completions.device, dtype=completions.dtype)
    )
    eos_before = (
        is_eos.long().cumsum(1) - is_eos.long()
    )  # number of EOS strictly before each position
    return eos_before == 0


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    *,
    num_generations: int = 1,
    max_new_tokens: int,
    temperature: float = 1.0,
    eos_token_ids: list[int],
    pad_token_id: int,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Rollout:
    """Sample `num_generations` completions of each prompt from softmax(logits / temperature).

    prompt_ids and prompt_mask (N, P), padded on the left -> Rollout of B = N * num_generations
    rows, the completions of one prompt in consecutive rows. top_k and top_p are off; they are
    there to show that they make the KL negative.
    """
    device = prompt_ids.device
    prompt_ids = prompt_ids.repeat_interleave(num_generations, dim=0)  # (B, P)
    prompt_mask = prompt_mask.bool().repeat_interleave(num_generations, dim=0)
    num_rows, prompt_length = prompt_ids.shape
    limit = context_length(model)
    if limit is not None and prompt_length + max_new_tokens > limit:
        lengths = f"{prompt_length} prompt tokens and {max_new_tokens} new ones"
        raise InputError(f"{lengths} don't fit into the model's context of {limit}")
    # All the randomness of the rollout: one uniform number per token, so that a row's tokens
    # depend neither on which other rows have finished nor on the size of the vocabulary.
    uniforms = torch.rand(max_new_tokens, num_rows, generator=generator, device=device)
    tokens = torch.full((num_rows, max_new_tokens), pad_token_id, device=device)
    logprobs = torch.zeros(num_rows, max_new_tokens, device=device)
    eos = torch.tensor(eos_token_ids, device=device, dtype=torch.long)

    with evaluating(model):
        # 1. Prefill: read each distinct prompt once, and repeat its cache for its completions.
        prompts, which = torch.cat([prompt_ids, prompt_mask], 1).unique(dim=0, return_inverse=True)
        cache = DynamicCache(config=model.config)
        logits = _next_logits(model, *prompts.split(prompt_length, dim=1), cache)[which]  # (B, V)
        cache.batch_select_indices(which)

        # 2. Decode: draw a token for every running row, read it, and so on.
        rows, mask = torch.arange(num_rows, device=device), prompt_mask  # the rows in the cache
        running = torch.ones_like(rows, dtype=torch.bool)
        for t in range(max_new_tokens):
            drawn, drawn_logprobs = draw(logits, uniforms[t, rows], temperature, top_k, top_p)
            tokens[rows, t], logprobs[rows, t] = drawn, drawn_logprobs
            running &= ~torch.isin(drawn, eos)
            num_running = int(running.sum())
            if num_running == 0 or t + 1 == max_new_tokens:
                break
            # Drop finished rows from the cache an eighth at a time: each drop copies the cache.
            # Until then they go on drawing tokens, which the mask below takes out.
            if num_running <= 7 / 8 * len(rows):
                kept = running.nonzero().squeeze(1)
                cache.batch_select_indices(kept)
                rows, drawn, mask, running = rows[kept], drawn[kept], mask[kept], running[kept]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            logits = _next_logits(model, drawn.unsqueeze(1), mask, cache)

    drawn_mask = completion_mask(tokens, eos_token_ids)
    return Rollout(
        tokens=torch.cat([prompt_ids, tokens.masked_fill(~drawn_mask, pad_token_id)], dim=1),
        attention_mask=torch.cat([prompt_mask, drawn_mask], dim=1),
        completion_mask=drawn_mask,
        logprobs=logprobs.masked_fill(~drawn_mask, 0),
        finished=(torch.isin(tokens, eos) & drawn_mask).any(dim=1),
    )


def draw(
    logits: Tensor, uniform: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Draw one token per row from softmax(logits / temperature): (tokens, log-probs), each (B,).

    logits (B, V), uniform (B,) in [0, 1). By inversion: the token is the first whose cumulative
    probability exceeds the uniform number, so one random number per row is enough. The log-probs
    are those of the distribution after top_k and top_p.
    """
    logits = logits.float() / temperature
    if top_k > 0:
        smallest_kept = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
    if top_p < 1:
        sorted_logits, order = logits.sort(descending=True)
        sorted_probs = sorted_logits.softmax(-1)
        above = sorted_probs.cumsum(-1) - sorted_probs  # probability of all the likelier tokens
        dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, above >= top_p)
        logits = logits.masked_fill(dropped, -torch.inf)
    logprobs = logits.log_softmax(-1)
    cumulative = logprobs.exp().cumsum(-1)
    # The sum is 1 only up to rounding; scaling keeps the last tokens in reach and a token of
    # probability 0 out of it.
    total = cumulative[:, -1]
    threshold = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, threshold.unsqueeze(1), right=True)
    return drawn.squeeze(1), logprobs.gather(1, drawn).squeeze(1)


def _next_logits(model: nn.Module, tokens: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
    """Read tokens (B, L) after the C that the cache holds, mask (B, C+L): next logits (B, V)."""
    options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    return model(**model_inputs(model, tokens, mask, **options)).logits[:, -1]
