"""How completions are drawn: token by token, from softmax(logits / temperature) and nothing else.

Without what makes it fast, it is this loop. tests/test_sampling.py compares the two (`plainly`):

    cache, tokens, mask, drawn = DynamicCache(), prompt_ids, prompt_mask, []  # padded on the left
    for _ in range(max_new_tokens):
        inputs = model_inputs(model, tokens, mask, cache=cache, use_cache=True)
        logits = model(**inputs).logits[:, -1]  # (B, V)
        tokens = torch.multinomial((logits / temperature).softmax(-1), num_samples=1)  # (B, 1)
        mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
        drawn.append(tokens)
    mask = completion_mask(torch.cat(drawn, dim=1), eos_token_ids)  # (B, T)

`model.generate` would apply top_k, repetition_penalty and more from the checkpoint's
generation_config: the samples would come from another distribution than the one that is trained,
and the estimated KL would be wrong, even negative. What makes our loop fast is in
plumbing/decoding.py; it is faster than `model.generate` as well.

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
    decoder: Decoder | None = None,
    **options: object,
) -> Rollout:
    """`generate` in sub-batches of at most `max_rows` completions, num_generations or more."""
    # The completions of one prompt stay together.
    num_prompts = max_rows // num_generations  # per sub-batch
    parts = zip(prompt_ids.split(num_prompts), prompt_mask.split(num_prompts))
    decoder = decoder or Decoder(model)
    options |= {"num_generations": num_generations, "decoder": decoder}
    with decoder:
        return concatenate([generate(model, *part, **options) for part in parts])


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
    decoder: Decoder | None = None,
) -> Rollout:
    """Sample `num_generations` completions of each prompt from softmax(logits / temperature).

    prompt_ids and prompt_mask (N, P) on the CPU, padded on the left -> Rollout of B = N *
    num_generations rows; the rows of a prompt are consecutive. top_k and top_p are off by default:
    they serve greedy evaluation, and to show how they bias the KL. stop: the strings that end a
    completion. decoder: of this model; default: Decoder(model), in the model's own precision.
    """
    prompt_ids = prompt_ids.repeat_interleave(num_generations, dim=0)  # (B, P)
    prompt_mask = prompt_mask.bool().repeat_interleave(num_generations, dim=0)
    decoder = decoder or Decoder(model)
    decoder.make_room(*prompt_ids.shape, max_new_tokens)
    # All random numbers at once, one per token: a row's draws don't depend on when others end.
    decoder.uniforms[:max_new_tokens, : len(prompt_ids)].uniform_(generator=generator)
    tokens, logprobs, ends = (  # (B, T)
        x[: len(prompt_ids), :max_new_tokens]
        for x in (decoder.tokens, decoder.logprobs, decoder.ends)
    )
    eos = to(model.device, torch.tensor(eos_token_ids, dtype=torch.long))
    with evaluating(model):
        # The prompts, and the first token of each.
        decoder.start(prompt_ids, prompt_mask, draw, (temperature, top_k, top_p))
        seen = 0  # tokens in which ends were looked for
        while True:
            if decoder.may_wait() or decoder.num_drawn == max_new_tokens:
                rows = decoder.rows[: decoder.num_rows]  # which of the B rows are left
                new = slice(seen, decoder.num_drawn)
                ends[rows, new] = torch.isin(tokens[rows, new], eos)
                if stop is not None:  # a string that begins in the prompt doesn't count
                    for t in range(seen, decoder.num_drawn):
                        ends[rows, t] |= stop(tokens[rows, : t + 1], None)
                seen = decoder.num_drawn
                if seen == max_new_tokens or not decoder.drop_ended():
                    break
            decoder.step()  # a forward pass over the tokens just drawn, then the next ones

    # Mask: tokens that a row has drawn after its first end, the first 1 of `ends`, become padding.
    drawn_mask = completion_mask(ends.long(), [1])
    logprobs = logprobs.masked_fill(~drawn_mask, 0)
    if not logprobs.isfinite().all():
        raise decoder.not_finite()
    tokens = tokens.masked_fill(~drawn_mask, pad_token_id)
    return Rollout(
        tokens=torch.cat([to(model.device, prompt_ids), tokens], dim=1),
        attention_mask=torch.cat([to(model.device, prompt_mask), drawn_mask], dim=1),
        completion_mask=drawn_mask,
        logprobs=logprobs,
        finished=ends.any(dim=1),
    )


def draw(
    logits: Tensor, uniform: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Draw one token per row from softmax(logits / temperature): (tokens, log-probs), each (B,).

    logits (B, V), uniform (B,) in [0, 1). Inverse transform sampling: the token is the first whose
    cumulative probability exceeds the uniform number, so one random number per row is enough. The
    log-probs belong to the distribution after top_k and top_p. A row with a logit of NaN or
    +inf draws any token, and its log-prob is NaN.
    """
    if top_k == 1:  # greedy: of equally likely tokens, frequent in bfloat16, always the first
        largest = logits.amax(-1).float()
        return logits.argmax(-1), largest - largest  # 0, or NaN
    if temperature != 1 or top_k > 0 or top_p < 1:
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
    # Probabilities but for their sum, in blocks of 128 tokens. A cumulative sum over the whole
    # vocabulary is slow. So first find the block that holds the drawn token, then the token in it.
    num_rows, vocab_size = logits.shape
    largest = logits.amax(-1, keepdim=True).float()
    blocks = largest.new_empty(num_rows, -(-vocab_size // 128), 128)
    weights = blocks.view(num_rows, -1)
    torch.sub(logits, largest, out=weights[:, :vocab_size]).exp_()
    if vocab_size % 128:
        weights[:, vocab_size:] = 0
    sums = blocks.sum(-1)
    total = sums.sum(-1)
    cumulative = sums.cumsum(-1)
    block, threshold = _first_above(cumulative, (uniform * total).unsqueeze(1))
    # For NaN it is one past the end: on a GPU, reading there would end the process.
    block = block.clamp(max=sums.shape[1] - 1)
    rest = (threshold - (cumulative - sums).gather(1, block)).clamp(min=0)
    in_block = blocks.gather(1, block.unsqueeze(2).expand(-1, 1, 128)).squeeze(1)
    token, _ = _first_above(in_block.cumsum(-1), rest)
    drawn = torch.add(token, block, alpha=128).clamp(max=vocab_size - 1)
    logprobs = (logits.gather(1, drawn) - largest).float()
    return drawn.squeeze(1), logprobs.squeeze(1) - total.log()


def _first_above(cumulative: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """The first index at which the cumulative weights (B, n) exceed the threshold (B, 1), and the
    threshold, made low enough for that: (B, 1) each.
    """
    # Rounding must not carry the threshold past the end, nor on to a token of probability 0.
    total = cumulative[:, -1:]
    threshold = torch.minimum(threshold, total * (1 - 2**-24))  # the float32 below
    return torch.searchsorted(cumulative, threshold, right=True), threshold
