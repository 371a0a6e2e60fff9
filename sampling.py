"""How completions are drawn: token by token, from softmax(logits / temperature) and nothing else.

This is our own loop over the model's forward pass. `model.generate` would apply top_k,
repetition_penalty and more from the checkpoint's generation_config: the samples would come from
another distribution than the one that is trained, and the estimated KL would be wrong, even
negative. Our loop is also about twice as fast, because of plumbing/decoding.py.

A completion ends with its first EOS, which is part of it: it is in the mask, and is trained on. So
is the token that completes a stop string (`--stop`), which ends a completion as well. A row that
has ended may draw more tokens until enough rows have ended to be dropped together; they are
replaced by padding and are off the mask, so they are never scored, trained on or counted.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from transformers import StopStringCriteria

from common import Rollout, completion_mask, evaluating
from plumbing.decoding import Decoder
from plumbing.forward import to


def sample(
    model: nn.Module,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    *,
    num_generations: int,
    max_rows: int,
    **options: object,
) -> Rollout:
    """`generate` in sub-batches of at most `max_rows` completions, num_generations or more."""
    # The completions of one prompt stay together.
    num_prompts = max_rows // num_generations  # per sub-batch
    parts = zip(prompt_ids.split(num_prompts), prompt_mask.split(num_prompts))
    return concatenate(
        [generate(model, *part, num_generations=num_generations, **options) for part in parts]
    )


def concatenate(rollouts: list[Rollout]) -> Rollout:
    """One rollout from several of the same P and T."""
    names = [field.name for field in dataclasses.fields(Rollout)]
    return Rollout(*(torch.cat([getattr(r, name) for r in rollouts]) for name in names))


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
    stop: StopStringCriteria | None = None,
    bf16: bool = False,
    fp16: bool = False,
    static: bool | None = None,
) -> Rollout:
    """Sample `num_generations` completions of each prompt from softmax(logits / temperature).

    prompt_ids and prompt_mask (N, P) on the CPU, padded on the left -> Rollout of B = N *
    num_generations rows; the rows of a prompt are consecutive. top_k and top_p are off by default:
    they serve greedy evaluation, and to show how they bias the KL. stop: the strings that end a
    completion. bf16, fp16: decode with weights rounded to bfloat16, to float16. static: see
    Decoder.
    """
    prompt_ids = prompt_ids.repeat_interleave(num_generations, dim=0)  # (B, P)
    prompt_mask = prompt_mask.bool().repeat_interleave(num_generations, dim=0)
    num_rows, device = len(prompt_ids), model.device
    tokens = torch.full((num_rows, max_new_tokens), pad_token_id, device=device)
    logprobs = torch.zeros(num_rows, max_new_tokens, device=device)
    # All random numbers at once, one per token: a row's draws don't depend on when others end.
    uniforms = torch.rand(max_new_tokens, num_rows, generator=generator, device=device)
    ends = torch.zeros_like(tokens)  # (B, T), 1: an EOS, or the token that completes a stop string
    eos = to(device, torch.tensor(eos_token_ids))
    with evaluating(model):
        half = torch.float16 if fp16 else torch.bfloat16 if bf16 else None
        decoder = Decoder(model, prompt_ids, prompt_mask, max_new_tokens, half=half, static=static)
        logits = decoder.prefill()  # (B, V), by one forward pass over each distinct prompt
        # Decode: draw a token for every row that is left, then one forward pass over these tokens.
        for t in range(max_new_tokens):
            rows = decoder.rows  # (R,) which of the B rows are left
            drawn, drawn_logprobs = draw(logits, uniforms[t, rows], temperature, top_k, top_p)
            tokens[rows, t], logprobs[rows, t] = drawn, drawn_logprobs
            ended = torch.isin(drawn, eos)
            if stop is not None:  # a string that begins in the prompt doesn't count
                ended |= stop(tokens[rows, : t + 1], None)
            ends[rows, t] = ended.long()
            logits = decoder.step(drawn, ended)  # (R, V), R without the rows that were dropped
            if logits is None:  # every row has ended, or has its max_new_tokens
                break

    # Mask: tokens that a row has drawn after its first end, the first 1 of `ends`, become padding.
    drawn_mask = completion_mask(ends, [1])
    tokens = tokens.masked_fill(~drawn_mask, pad_token_id)
    return Rollout(
        tokens=torch.cat([to(device, prompt_ids), tokens], dim=1),
        attention_mask=torch.cat([to(device, prompt_mask), drawn_mask], dim=1),
        completion_mask=drawn_mask,
        logprobs=logprobs.masked_fill(~drawn_mask, 0),
        finished=ends.any(dim=1),
    )


def draw(
    logits: Tensor, uniform: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Draw one token per row from softmax(logits / temperature): (tokens, log-probs), each (B,).

    logits (B, V), uniform (B,) in [0, 1). Inverse transform sampling: the token is the first whose
    cumulative probability exceeds the uniform number, so one random number per row is enough. The
    log-probs belong to the distribution after top_k and top_p.
    """
    if top_k == 1:  # greedy: of equally likely tokens, frequent in bfloat16, always the first
        return logits.argmax(-1), torch.zeros_like(uniform)
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
    largest = logits.amax(-1, keepdim=True)
    weights = (logits - largest).exp_()  # (B, V), probabilities but for their sum
    # A cumulative sum over the whole vocabulary is slow. So first find the block of 128 tokens
    # that holds the drawn one, then the token in that block.
    blocks = nn.functional.pad(weights, (0, -weights.shape[1] % 128)).unflatten(1, (-1, 128))
    sums = blocks.sum(-1)
    total = sums.sum(-1)
    block, rest = _first_above(sums, uniform * total)
    token, _ = _first_above(blocks[torch.arange(len(blocks), device=logits.device), block], rest)
    drawn = block * 128 + token
    logprobs = logits.gather(1, drawn.unsqueeze(1)) - largest
    return drawn, logprobs.squeeze(1) - total.log()


def _first_above(weights: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """(the first index (B,) at which the cumulative sum of weights (B, n) exceeds threshold (B,),
    the threshold less the sum of the weights before that index (B,)).
    """
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1]
    # Rounding must not carry the threshold past the end, nor on to a token of probability 0.
    threshold = torch.minimum(threshold, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, threshold.unsqueeze(1), right=True)
    before = (cumulative - weights).gather(1, index).squeeze(1)
    return index.squeeze(1), (threshold - before).clamp(min=0)
