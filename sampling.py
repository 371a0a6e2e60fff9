"""How completions are drawn: token by token, from softmax(logits / temperature) and nothing else.

`model.generate` would apply top_k, repetition_penalty and more from the checkpoint's
generation_config: the samples would come from another distribution than the one that is trained,
and the estimated KL would be wrong, even negative.

A completion ends with its first EOS, or with a stop string (`--stop`). The token that ends it is in
the mask, and is trained on. What a row draws after its end is replaced by padding and is off the
mask. `generate`, its loop `decode`, `Step` and `draw` are the whole of it. plumbing/decoder.py
makes it faster: it rounds the weights that decode, and on CUDA it makes each step a graph.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig, StopStringCriteria

from common import Rollout, evaluating, unwrap
from forward import model_inputs


def sample(
    model: nn.Module,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    *,
    num_generations: int,
    max_rows: int,
    decoder: Any = None,
    **options: Any,
) -> Rollout:
    """Call `generate` for sub-batches of at most `max_rows` completions; a prompt's stay together.
    All use the plumbing.decoder.Decoder, if there is one.
    """
    num_prompts = max(1, max_rows // num_generations)  # per sub-batch
    parts = zip(prompt_ids.split(num_prompts), prompt_mask.split(num_prompts))
    with decoder or contextlib.nullcontext() as decoder:
        options |= {"num_generations": num_generations, "decoder": decoder}
        rollouts = [generate(model, *part, **options) for part in parts]
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
    eos_token_ids: list[int],
    pad_token_id: int,
    generator: torch.Generator | None = None,
    decoder: Any = None,
    stop: StopStringCriteria | None = None,
    **settings: float,
) -> Rollout:
    """Sample `num_generations` completions of each prompt from softmax(logits / temperature).

    prompt_ids and prompt_mask (N, P), padded on the left -> Rollout of B = N * num_generations
    rows; the rows of a prompt are consecutive. settings: temperature, top_k and top_p of `draw`.
    stop: the strings that end a completion. decoder: a Decoder of this model. NaN or +inf among the
    logits makes a log-prob NaN.
    """
    model = decoder.model if decoder else model
    G, device = num_generations, model.device
    prompt_ids, mask = prompt_ids.to(device), prompt_mask.to(device).bool()
    # Draw the random numbers of all tokens now. Then a row draws the same tokens whenever the
    # others end.
    uniforms = torch.rand(max_new_tokens, len(mask) * G, generator=generator, device=device)
    with evaluating(model):
        # Read each prompt once; keys and values are then copied for its completions.
        cache = DynamicCache(config=without_windows(model))  # some layers keep more than K and V
        inputs = model_inputs(model, prompt_ids, mask, cache, logits_to_keep=1)
        logits = model(**inputs).logits[:, -1].repeat_interleave(G, dim=0)  # (B, V)
        cache.batch_repeat_interleave(G)
        prompt_ids, mask = (x.repeat_interleave(G, dim=0) for x in (prompt_ids, mask))
        step = Step(model, cache, mask)
        if decoder and decoder.has_graphs:
            step = decoder.start(cache, mask, max_new_tokens)
        eos = torch.tensor(eos_token_ids, device=device)
        tokens, logprobs, ends = decode(step, logits, uniforms, eos, stop, settings)

    # What a row has drawn after its first end becomes padding: there, ends come strictly before.
    drawn_mask = ends.cumsum(1) - ends.long() == 0
    return Rollout(
        tokens=torch.cat([prompt_ids, tokens.masked_fill(~drawn_mask, pad_token_id)], dim=1),
        attention_mask=torch.cat([mask, drawn_mask], dim=1),
        completion_mask=drawn_mask,
        logprobs=logprobs.masked_fill(~drawn_mask, 0),
        finished=ends.any(dim=1),
    )


def decode(
    step: Any,
    logits: Tensor,
    uniforms: Tensor,
    eos: Tensor,
    stop: StopStringCriteria | None,
    settings: dict[str, float],
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw token after token, from the logits of the first one (B, V) and uniforms (T, B). Returns
    tokens, their log-probs, and which of them end a completion, each (B, T). A token ends one if it
    is in `eos`, or if stop(the row's tokens up to it, None) says so. What stands behind the end is
    not read.
    """
    T, B = uniforms.shape
    tokens = torch.zeros(B, T, dtype=torch.long, device=logits.device)
    logprobs, ends = torch.zeros_like(tokens).float(), torch.zeros_like(tokens).bool()
    rows = torch.arange(B, device=logits.device)  # those that haven't been dropped
    drawn, logprob = draw(logits, uniforms[0], **settings)
    for t in range(T):
        tokens[rows, t], logprobs[rows, t] = drawn, logprob
        ends[rows, t] = torch.isin(drawn, eos)
        if stop is not None:  # a string that begins in the prompt doesn't count
            ends[rows, t] |= stop(tokens[rows, : t + 1], None)
        if t + 1 == T:
            break
        # Ask whether rows have ended. This makes the CPU wait for the GPU, so with graphs it is
        # done only at every eighth token.
        if not step.has_graphs or t % 8 == 7:
            running = ~ends[rows].any(1)
            if not running.any():
                break
            # A graph keeps its rows. Dropping some copies the cache: wait for an eighth of them.
            if not step.has_graphs and running.float().mean() <= 7 / 8:
                kept = running.nonzero().squeeze(1)
                rows, drawn = rows[kept], drawn[kept]
                step.drop(kept)
        drawn, logprob = step(drawn, uniforms[t + 1, rows], settings)
    return tokens, logprobs, ends


class Step:
    """Read a token of each row and draw the next ones, (R,): `step(drawn, uniform, settings)`."""

    has_graphs = False  # unlike a Decoder, which takes its place on CUDA

    def __init__(self, model: nn.Module, cache: DynamicCache, mask: Tensor) -> None:
        self.model, self.cache, self.mask = model, cache, mask  # (R, columns of the cache)

    def __call__(self, drawn: Tensor, uniform: Tensor, settings: dict) -> tuple[Tensor, Tensor]:
        self.mask = nn.functional.pad(self.mask, (0, 1), value=True)
        inputs = model_inputs(self.model, drawn.unsqueeze(1), self.mask, self.cache)
        return draw(self.model(**inputs).logits[:, -1], uniform, **settings)

    def drop(self, kept: Tensor) -> None:
        """Keep these rows only."""
        self.cache.batch_select_indices(kept)
        self.mask = self.mask[kept]


def draw(
    logits: Tensor, uniform: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Draw one token per row from softmax(logits / temperature): (tokens, log-probs), each (B,).

    logits (B, V), uniform (B,) in [0, 1). Inverse transform sampling: the token is the first whose
    cumulative probability exceeds the uniform number, so one random number per row is enough. The
    log-probs belong to the distribution after top_k and top_p. A row with a logit of NaN or
    +inf draws any token, and its log-prob is NaN.
    """
    # With top_k 1 it is greedy. In bfloat16 two tokens are often equally likely: take the first.
    if top_k == 1:
        largest = logits.amax(-1).float()
        return logits.argmax(-1), largest - largest  # 0, or NaN
    logits = logits.float() / temperature
    if top_k > 0:
        smallest_kept = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
    if top_p < 1:
        sorted_logits, order = logits.sort(descending=True)
        sorted_probs = sorted_logits.softmax(-1)
        above = sorted_probs.cumsum(-1) - sorted_probs  # probability of all that are more likely
        dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, above >= top_p)
        logits = logits.masked_fill(dropped, -torch.inf)
    probs = logits.softmax(-1)
    cumulative = probs.cumsum(-1)
    # Rounded probabilities add up to nearly 1: scale by their sum, or the last token may be wrong.
    threshold = uniform.unsqueeze(1) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, threshold, right=True)
    # For NaN it is one past the end: on a GPU, reading there would end the process.
    drawn = drawn.clamp(max=logits.shape[-1] - 1)
    return drawn.squeeze(1), probs.gather(1, drawn).log().squeeze(1)


def without_windows(model: nn.Module) -> PretrainedConfig:
    """Make the model's config for a cache whose layers keep all tokens: the mask hides those that a
    sliding window has left behind.
    """
    config = copy.copy(unwrap(model).config.get_text_config())
    if kinds := getattr(config, "layer_types", None):
        full = {"sliding_attention": "full_attention"}
        config.layer_types = [full.get(kind, kind) for kind in kinds]
    config.sliding_window = None
    return config
