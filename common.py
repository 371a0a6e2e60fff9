"""What PPO, GRPO and RLOO share: masks, log-probs, KL, GAE, dropout, the value head, the reference.

Every mathematical function is pure. A mask may be bool, or 0 and 1. Elements off the mask have no
influence, even if they are NaN. This file imports no other file of the project.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel

# --- The rollout ---

# One row of a rollout, for the prompt "9 7 + 1 =" and the completion "9 8 EOS". B rows, P prompt
# positions, padded on the left, T completion positions, padded on the right, V tokens in the
# vocabulary:
#
#                     P prompt                  | T completion
#     tokens          pad   9   7   +   1   =   |   9    8   EOS   pad      (B, P+T)
#     attention_mask    0   1   1   1   1   1   |   1    1    1     0       (B, P+T)
#     completion_mask                           |   1    1    1     0       (B, T)
#     logprobs                                  |  l_1  l_2  l_3    0       (B, T)
#     values    (PPO)                           |  V_1  V_2  V_3    0       (B, T)
#     rewards   (PPO)                           |  r_1  r_2  r_3    0       (B, T)
#
# l_t and V_t come from the hidden state one column to the LEFT of token t: the state before the
# token is chosen. r_t is -kl_coef kl_t, and the last one has the score s added. The masks are made
# while sampling and never from token ids, because pad may equal EOS.
#
#   score         the number that the reward function gives a completion: s
#   reference     the model before training, or the one that --reference names
#   KL            how far the policy has drifted from the reference, in nats
#   reward        the score less the KL penalty (PPO, RLOO) or alone (GRPO): r; makes advantages
#   return        the sum of the rewards to come, by GAE: R; the value model learns to predict it
#   advantage     how much better an action was than expected: A
#   ratio         pi / pi_old: by what factor updates have changed a token's chance
#   step          one rollout and the updates that learn from it
#   epoch         one pass over the rows of a rollout, in a new order
#   minibatch     the rows of one update of the weights
#   micro-batch   the rows of one forward and backward pass: it changes memory, never the gradient
#   group         the G completions of one prompt, in consecutive rows


@dataclass
class Rollout:
    """B sampled completions: P prompt positions, padded on the left, then T of the completion."""

    tokens: Tensor  # (B, P+T) prompt and completion; pad_token_id after the end
    attention_mask: Tensor  # (B, P+T) bool: False at padding on either side
    completion_mask: Tensor  # (B, T) bool: True up to the end, EOS included
    # (B, T) as the sampler computed them, 0 off the mask. Decoding rounds differently from the
    # forward pass that trains, so the loops compute log-probs of their own in step 3.
    logprobs: Tensor
    finished: Tensor  # (B,) bool: ended by EOS or a stop string, not at the limit

    def __getitem__(self, rows: Tensor | slice) -> Rollout:
        """The given rows of every field."""
        return Rollout(*(getattr(self, field.name)[rows] for field in dataclasses.fields(self)))


def completion_mask(completions: Tensor, eos_token_ids: list[int]) -> Tensor:
    """(B, T) tokens -> (B, T) bool: True up to and including the first EOS, any of the EOS ids.

    With EOS = 9: [5, 9, 7] -> [1, 1, 0] and [5, 6, 7] -> [1, 1, 1].
    """
    # On MPS a copy that isn't waited for would be read too early.
    ids = torch.tensor(eos_token_ids).to(completions.device, non_blocking=completions.is_cuda)
    is_eos = torch.isin(completions, ids).long()
    # EOS is an action and has to get its gradient: so count the EOS strictly before each position.
    eos_before = is_eos.cumsum(1) - is_eos
    return eos_before == 0


# --- Statistics over a mask ---


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of x where mask is 1, over all elements or along `dim`; 0 where the mask is empty."""
    mask = mask.bool()
    # Fill, don't multiply: 0 * NaN is NaN.
    x = x.masked_fill(~mask, 0)
    return x.sum(dim) / mask.sum(dim).clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scale x to variance 1 over the mask, and to mean 0 unless `shift_mean` is False. Only the
    course keeps the mean: it tries what happens when rewards are whitened.

    0 off the mask. One number alone becomes 0, not NaN. The variance has Bessel's correction and
    eps 1e-8, as in TRL's PPO; the code of Huang et al. 2024 (arXiv 2403.17031) whitens without the
    correction.
    """
    mask = mask.bool()
    mean = masked_mean(x, mask)
    centred = (x - mean).masked_fill(~mask, 0)
    variance = (centred**2).sum() / (mask.sum() - 1).clamp(min=1)
    whitened = centred * torch.rsqrt(variance + 1e-8)
    return whitened if shift_mean else (whitened + mean).masked_fill(~mask, 0)


# --- Log-probs, entropy, KL, ratio ---


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """log softmax(logits) at the given tokens: logits (..., V), tokens (...) -> (...). Half
    precision is converted to float32 first.
    """
    return at_least_float32(logits).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def token_entropy(logits: Tensor) -> Tensor:
    """Entropy of softmax(logits) in nats: (..., V) -> (...)."""
    return entropy_of(at_least_float32(logits).log_softmax(-1))


def entropy_of(logprobs: Tensor) -> Tensor:
    """Entropy in nats of distributions with these log-probs: (..., V) -> (...)."""
    # A token of probability 0 must add 0, and 0 * -inf is NaN.
    return -(logprobs.exp() * logprobs.clamp(min=torch.finfo(logprobs.dtype).min)).sum(-1)


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision to float32: a softmax over a large vocabulary in bfloat16 is percents off."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Per-token estimates of KL(policy || reference) from tokens that the policy sampled: (B, T).

    With d = log policy - log reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, exact near 0
    too. Schulman, "Approximating KL divergence", joschu.net, 2020. As a value k1 and k3 are
    unbiased, k2 is not; k1 may be negative. In a reward, k1 gives the gradient of KL(policy ||
    reference) of whole completions; k2 and k3 hardly pull near the reference. In a loss in which
    every token weighs alike, the expected gradient is that of a token's KL, its prefix given: of k1
    it is 0, of k2 that of KL(policy || reference), of k3 that of KL(reference || policy). What a
    token does to later prefixes is missing there. Raises ValueError for another name.
    """
    d = logprobs - ref_logprobs
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d**2 / 2
    if estimator == "k3":
        # exp(-d) - 1 loses all digits where d is near 0, expm1 does not. It overflows above 88: so
        # a -d above 20 counts as 20 in the exponent, as in policy_ratio, and keeps its gradient.
        excess = (-d - 20).clamp(min=0).detach()
        return torch.expm1(-d - excess) + d
    raise ValueError(f"unknown KL estimator {estimator!r}: choose k1, k2 or k3")


def policy_ratio(log_ratio: Tensor) -> Tensor:
    """rho = pi / pi_old from log pi - log pi_old, of any shape; at most exp(20)."""
    # exp overflows above 88 in float32, and where the clip asks for no gradient the backward pass
    # makes NaN of 0 * inf. So a log-ratio above 20, which no clip range reaches, counts as 20. It
    # keeps its gradient: a bad token must be pushed back.
    excess = (log_ratio - 20).clamp(min=0).detach()
    return (log_ratio - excess).exp()


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, level: str) -> Tensor:
    """pi / pi_old of each token: each (B, T) -> (B, T), 1 off the mask.

    At level "sequence" a completion has one ratio, the geometric mean over its tokens: GSPO, Zheng
    et al. 2025 (arXiv 2507.18071) eq. 7. It is repeated at each token, so that the caller clips and
    averages it as it does the ratios of tokens. Raises ValueError for another level.
    """
    log_ratio = (logprobs - old_logprobs).masked_fill(~mask.bool(), 0)
    if level == "sequence":
        mean = masked_mean(log_ratio, mask, dim=1).unsqueeze(1)
        log_ratio = mean.masked_fill(~mask.bool(), 0)  # (B, 1) -> (B, T)
    elif level != "token":
        raise ValueError(f"unknown level {level!r}: choose token or sequence")
    return policy_ratio(log_ratio)


# --- Advantages ---


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: (advantages, returns), each (B, T), not whitened.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}: Schulman et al.
    2016 (arXiv 1506.02438) eq. 16, Schulman et al. 2017 (arXiv 1707.06347) eq. 11 and 12. Both are
    0 off the mask. The episode ends with the last real token of a row, also where it was cut at the
    length limit: after it V and A are 0, whatever the value model says at padding.
    """
    # Token by token, so on the CPU: a GPU would launch a few small operations for each.
    device, mask = rewards.device, mask.bool().cpu()
    rewards, values = (x.cpu().masked_fill(~mask, 0) for x in (rewards, values))
    # From the last token to the first: A_t needs V_{t+1} and A_{t+1}.
    next_value = next_advantage = torch.zeros_like(values[:, 0])  # (B,)
    advantages = []
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = (delta + gamma * lam * next_advantage).masked_fill(~mask[:, t], 0)
        next_value = values[:, t]
        advantages.append(next_advantage)
    advantages = torch.stack(advantages[::-1], dim=1)
    return advantages.to(device), (advantages + values).to(device)


def is_flat(groups: Tensor) -> Tensor:
    """Which groups of rewards (N, G) are all the same, NaN left out: (N, 1) bool."""
    unknown = groups.isnan()
    lowest = groups.masked_fill(unknown, torch.inf).amin(dim=1, keepdim=True)
    highest = groups.masked_fill(unknown, -torch.inf).amax(dim=1, keepdim=True)
    return lowest >= highest


# --- The forward pass that trains: log-probs and values of completions ---

CHUNK = 2**25  # logits at a time: 128 MB in float32
# PyTorch takes cuDNN's attention on an H100, and its gradients are NaN for some masks
# (pytorch/pytorch#196678); on a B200 it decodes wrongly (pytorch/pytorch#193893).
torch.backends.cuda.enable_cudnn_sdp(False)


def completion_logprobs(
    model: nn.Module,
    rollout: Rollout,
    temperature: float,
    *,
    bf16: bool = False,
    entropy: bool = True,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """token_logprobs and token_entropy of model(tokens).logits[:, P-1:-1] / temperature: (B, T).

    The pair (log-probs with gradient, entropies without unless `entropy_grad`), 0 off the mask.
    Without `entropy` the second is None: it costs more than the log-probs. The logits are divided
    by the temperature because the tokens were drawn from that distribution. bf16: the model runs
    under autocast.
    """
    model, mask = base_model(model), rollout.completion_mask.bool()
    device, head = rollout.tokens.device.type, model.get_output_embeddings()
    with torch.autocast(device, torch.bfloat16, enabled=bf16):
        states = completion_states(model.base_model, rollout)  # (B, t, D)
    # Without padding: n tokens, each with the state from which it is predicted.
    tokens = rollout.tokens[:, -mask.shape[1] :][mask]  # (n,)
    states = states[mask[:, : states.shape[1]]]  # (n, D)

    def score(states: Tensor, tokens: Tensor) -> Tensor:
        # In float32: logits rounded to bfloat16 put log-probs .002 nats off, and some of them .1.
        logits = at_least_float32(logits_from(model, states.to(head.weight.dtype)))
        logprobs = (logits if temperature == 1 else logits / temperature).log_softmax(-1)  # (n, V)
        chosen = logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        if not entropy:
            return chosen.unsqueeze(0)
        return torch.stack([chosen, entropy_of(logprobs if entropy_grad else logprobs.detach())])

    # All logits (n, V) would be the largest tensor of all, so make them for a chunk of tokens at a
    # time. On CUDA a chunk takes at most an eighth of the card's memory, at 20 bytes a logit. It is
    # a share of the whole card, not of what is free, so that a resumed run cuts and rounds in the
    # same way. For the backward pass five chunks are kept, or one with `entropy_grad`; the others
    # make their logits again.
    num_logits = torch.cuda.mem_get_info()[1] // 160 if states.is_cuda else CHUNK
    size = num_logits // head.weight.shape[0]
    chunks = list(zip(states.split(size), tokens.split(size)))
    num_kept = 1 if entropy_grad else 5
    scores = [score(*chunk) for chunk in chunks[:num_kept]]
    options = {"use_reentrant": False, "preserve_rng_state": False}
    scores += [checkpoint(score, *chunk, **options) for chunk in chunks[num_kept:]]
    scores = torch.cat(scores, dim=1)  # (2, n)
    padded = scores.new_zeros(len(scores), *mask.shape)
    padded[:, mask] = scores
    return padded[0], padded[1] if entropy else None


def completion_values(value_model: ValueModel, rollout: Rollout, *, bf16: bool = False) -> Tensor:
    """V_t, the value of the state before token t is chosen: (B, T), 0 off the mask, with gradient.

    It stands where the logits of token t stand. One position to the right V would know the action.
    """
    mask = rollout.completion_mask.bool()
    with torch.autocast(rollout.tokens.device.type, torch.bfloat16, enabled=bf16):
        values = value_model.values(completion_states(value_model.backbone, rollout))  # (B, t)
    values = nn.functional.pad(values, (0, mask.shape[1] - values.shape[1]))
    return values.masked_fill(~mask, 0)


def completion_states(backbone: nn.Module, rollout: Rollout) -> Tensor:
    """Last hidden states (B, t, D), with gradient, from which the first t completion tokens are
    predicted. t is the longest completion.
    """
    # Columns that are padding in every row are skipped, on either side.
    first = rollout.attention_mask.long().argmax(1).min()
    longest = rollout.completion_mask.sum(1).max()
    first, t = torch.stack([first, longest]).tolist()
    end = rollout.tokens.shape[1] - rollout.completion_mask.shape[1] + t
    # The shift by one: the state at position i predicts token i + 1. So the states are those of
    # [:, P-1:-1], and the last column isn't read.
    tokens, mask = rollout.tokens[:, first : end - 1], rollout.attention_mask[:, first : end - 1]
    P = end - first - t

    def states(tokens: Tensor, mask: Tensor, cache: DynamicCache | None = None) -> Tensor:
        inputs = model_inputs(backbone, tokens, mask, cache)
        return backbone(**inputs).last_hidden_state

    # Gradient checkpointing allows no cache. On CUDA one pass is faster than two shorter ones.
    modules = backbone.modules() if backbone.training else ()
    checkpointed = any(getattr(module, "gradient_checkpointing", False) for module in modules)
    if checkpointed or tokens.is_cuda:
        return states(tokens, mask)[:, P - 1 :]
    prompts = [tuple(row) for row in torch.where(mask.bool(), tokens, -1)[:, :P].tolist()]
    distinct = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    if len(distinct) == len(prompts):
        return states(tokens, mask)[:, P - 1 :]

    # A prompt is read once for all its completions: its keys and values, which carry the gradient,
    # are repeated: by index_select, which adds up their gradients in the same order in every run.
    prompt_of_row = torch.tensor([distinct[prompt] for prompt in prompts], device=tokens.device)
    first_row = torch.tensor([prompts.index(prompt) for prompt in distinct], device=tokens.device)
    cache = DynamicCache(config=backbone.config)  # some layers keep more than keys and values
    last = states(tokens[first_row, :P], mask[first_row, :P], cache)[:, -1:]
    last = last.index_select(0, prompt_of_row)
    if t == 1:
        return last
    cache.reorder_cache(prompt_of_row)
    return torch.cat([last, states(tokens[:, P:], mask, cache)], dim=1)


def model_inputs(
    model: nn.Module,
    tokens: Tensor,
    mask: Tensor | dict[str, Tensor],
    cache: Any = None,
    position_ids: Tensor | None = None,
    **options: object,
) -> dict[str, object]:
    """Arguments for a forward pass over tokens (B, L): those that the model's forward takes. The
    attention mask (B, C+L) also covers the C tokens in a cache of keys and values.

    Without position ids GPT-2 puts the tokens of a left-padded row at shifted positions: 34 nats
    off in huggingface/trl#6800.
    """
    if position_ids is None:
        position_ids = (mask.long().cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        mask = mask.long()
    options |= {"input_ids": tokens, "attention_mask": mask, "position_ids": position_ids}
    accepted = inspect.signature(base_model(model).forward).parameters
    name = "cache" if "cache" in accepted else "past_key_values"  # before transformers 5.24
    options |= {name: cache, "use_cache": cache is not None}
    return {name: x for name, x in options.items() if name in accepted}


def logits_from(model: PreTrainedModel, states: Tensor) -> Tensor:
    """The end of the model's forward pass: last hidden states (n, D) -> logits (n, V)."""
    config = model.config.get_text_config()
    logits = model.get_output_embeddings()(states)
    if isinstance(scale := getattr(config, "logit_scale", None), float):  # Cohere
        logits = logits * scale
    if (scale := getattr(config, "logits_scaling", None)) is not None:  # Granite
        logits = logits / scale
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma
        logits = cap * torch.tanh(logits / cap)
    return logits


def rollout_logprobs(model: nn.Module, rollout: Rollout, config: Any) -> Tensor:
    """completion_logprobs of a whole rollout without gradient: (B, T)."""
    options = {"temperature": config.temperature, "bf16": config.bf16, "entropy": False}
    return _over_rollout(
        lambda part: completion_logprobs(model, part, **options)[0], rollout, config
    )


def rollout_values(value_model: ValueModel, rollout: Rollout, config: Any) -> Tensor:
    """completion_values of a whole rollout without gradient: (B, T)."""
    return _over_rollout(
        lambda part: completion_values(value_model, part, bf16=config.bf16), rollout, config
    )


@torch.no_grad()
def _over_rollout(forward: Callable[[Rollout], Tensor], rollout: Rollout, config: Any) -> Tensor:
    """forward(part) -> (b, T) in micro-batches, put together in the rollout's order: (B, T)."""
    parts = micro_batches(rollout, max_tokens=config.micro_batch_tokens)
    found = torch.cat([forward(part) for _, part in parts])
    return found[torch.cat([rows for rows, _ in parts]).argsort()]


def micro_batches(
    rollout: Rollout,
    rows: Tensor | None = None,
    wanted: Tensor | None = None,
    *,
    max_tokens: int,
) -> list[tuple[Tensor, Rollout]]:
    """Cut `rows` (n,) of a rollout, default all, into parts of at most max_tokens tokens, padding
    included: pairs of the rows (b,), on the CPU, and the rollout of these rows. A single row may be
    longer. Tokens are counted as completion_states reads them: on a CPU a prompt that several rows
    of a part share counts once, on CUDA it counts for each row. (Gradient checkpointing reads it
    for each row on a CPU too, but keeps far less of it.)

    The longest completions come first: a part is as wide as its longest row, and padding costs as
    much as text. The gradient is a sum over rows, so their order doesn't matter. Rows where
    `wanted`, (B,) bool, is False are left out. If no other row is there, one of them stays: the
    optimiser needs a gradient to make its step, and that of such a row is 0.
    """
    lengths = rollout.completion_mask.sum(1).cpu()  # (B,)
    rows = torch.arange(len(lengths)) if rows is None else rows
    if wanted is not None:
        wanted = wanted.cpu()[rows]
        rows = rows[wanted] if wanted.any() else rows[:1]
    rows = rows[lengths[rows].argsort(descending=True, stable=True)]
    P = rollout.tokens.shape[1] - rollout.completion_mask.shape[1]
    prompts = range(len(lengths))  # on CUDA each its own
    if not rollout.tokens.is_cuda:
        prompts = [tuple(row) for row in rollout.tokens[:, :P].tolist()]
    parts, distinct, longest = [[]], set(), 0
    for row in rows.tolist():
        num_tokens = len(distinct | {prompts[row]}) * P + (len(parts[-1]) + 1) * longest
        if parts[-1] and num_tokens > max_tokens:
            parts.append([])
        if not parts[-1]:
            distinct, longest = set(), int(lengths[row])
        parts[-1].append(row)
        distinct.add(prompts[row])
    return [(part, rollout[part.to(rollout.tokens.device)]) for part in map(torch.tensor, parts)]


# --- Models ---


def base_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model itself, under the wrapper that peft puts around it for an adapter."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def disable_dropout(*models: nn.Module) -> int:
    """Switch every kind of dropout off for good; returns how many probabilities it has set to 0.

    Before the first update the ratio compares two forward passes of the same weights: with dropout
    it isn't 1. The model's own config is saved with it and keeps its values: modules get a copy.
    """
    sites = 0
    for model in models:
        wholes = (model, base_model(model))
        for module in model.modules():
            # 1. Modules: nn.Dropout and its kin.
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                module.p = 0.0
                sites += 1
            # 2. Numbers: Llama, Qwen2 and OPT call F.dropout(p=self.attention_dropout if
            #    self.training else 0.0), OPT and others skip whole layers (layerdrop).
            sites += _zero_noise(module)
            # 3. Configs that a module reads at every forward pass (Falcon): it gets a copy.
            config = vars(module).get("config")
            if config is not None and not any(module is whole for whole in wholes):
                quiet = copy.copy(config)
                if found := _zero_noise(quiet):
                    module.config = quiet
                sites += found
    return sites


def _zero_noise(record: object) -> int:
    """Set float attributes such as attention_dropout, layerdrop, resid_pdrop, jitter_noise to 0."""
    names = [
        name
        for name, value in vars(record).items()
        if ("drop" in name or "jitter" in name) and isinstance(value, float) and value > 0
    ]
    for name in names:
        setattr(record, name, 0.0)
    return len(names)


class ValueModel(nn.Module):
    """A transformer backbone with a scalar head that starts at 0: V = 0 at step 0."""

    def __init__(self, backbone: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @classmethod
    def on_backbone_of(cls, model: PreTrainedModel) -> ValueModel:
        """A value model on a copy of the backbone of `model`. Where this has an adapter, the copy
        trains an adapter as well, over the same frozen weights.
        """
        backbone = copy_of(base_model(model).base_model)
        config = model.config.get_text_config()
        # OPT projects its output to another width.
        width = getattr(config, "word_embed_proj_dim", config.hidden_size)
        found = cls(backbone, width)
        found.head.to(model.device, torch.promote_types(model.dtype, torch.float32))
        return found

    def values(self, hidden: Tensor) -> Tensor:
        """Last hidden states (..., D) -> values (...)."""
        # In bfloat16 a value would have three digits, and advantages are differences of values.
        with torch.autocast(hidden.device.type, enabled=False):
            return self.head(hidden.to(self.head.weight.dtype)).squeeze(-1)


def reference(
    policy: nn.Module, kl_coef: float, named: nn.Module | None = None
) -> contextlib.AbstractContextManager:
    """The reference model that the KL is measured against: the one place that decides it.

    Use it as `with ref as ref_model:`, as often as needed. ref_model is None where kl_coef is 0;
    else the `named` model, if there is one; else the policy with its adapter off, if the adapter is
    new; else a copy of the policy, which shares the weights that don't train. It is in evaluation
    mode, and frozen: nothing in the named model or in the copy trains.
    """
    if kl_coef == 0:
        return contextlib.nullcontext(None)
    # The model that --reference names, if it names one.
    if named is not None:
        return contextlib.nullcontext(named.eval().requires_grad_(False))
    # A new LoRA adapter: the reference is the policy without it, which needs no memory.
    if has_new_adapter(policy):
        return AdapterOff(policy)
    # Else a frozen copy, taken after dropout is off: of all weights, or of a trained adapter alone.
    # A reload by name would miss any change made in memory, and the KL at step 0 would not be 0.
    return contextlib.nullcontext(copy_of(policy).eval().requires_grad_(False))


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy that shares the weights that don't train: they stay the same in both."""
    return copy.deepcopy(model, memo={id(p): p for p in model.parameters() if not p.requires_grad})


def has_new_adapter(policy: nn.Module) -> bool:
    """Whether a LoRA adapter is there that changes nothing yet: all its weights but A are 0.

    Judged by the weights, not by where the adapter came from. With B other than 0 the base model
    is not the policy that the run starts from (huggingface/trl#1340).
    """
    trained = [(name, p) for name, p in policy.named_parameters() if p.requires_grad]
    matrices_a = [name for name, _ in trained if "lora_A" in name]
    return bool(matrices_a) and not any(p.any() for name, p in trained if name not in matrices_a)


class AdapterOff:
    """`with AdapterOff(policy) as ref_model:` the policy without its adapter and dropout."""

    def __init__(self, policy: nn.Module) -> None:
        self.policy, self.stack = policy, contextlib.ExitStack()

    def __enter__(self) -> nn.Module:
        self.stack.enter_context(self.policy.disable_adapter())
        return self.stack.enter_context(evaluating(self.policy))

    def __exit__(self, *error: object) -> None:
        self.stack.close()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """Evaluation mode, and back, also after an error."""
    # Dropout must not touch a sample. And gradient checkpointing, active in training mode, switches
    # the KV cache off: decoding would take quadratic time.
    was_training = model.training
    model.eval()
    try:
        yield model
    finally:
        model.train(was_training)


def set_learning_rate(optimizer: torch.optim.Optimizer, config: Any, step: int) -> None:
    """Set the rate of a step: it rises to config.learning_rate, then falls linearly towards 0."""
    rate = config.learning_rate * schedule(step, config.num_steps, config.warmup_steps)
    for group in optimizer.param_groups:
        group["lr"] = rate


def schedule(step: int, num_steps: int, warmup_steps: int) -> float:
    """The share of the learning rate at a step: (step + 1) / warmup_steps up to 1, then linearly
    down, to 1 / (num_steps - warmup_steps) at the last step. The rise takes at most half of the
    steps, so that short runs reach the full rate too.
    """
    warmup_steps = min(warmup_steps, num_steps // 2)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return (num_steps - step) / (num_steps - warmup_steps)


def clear_cache() -> None:
    """Give cached memory back to the device, between the phases of a step."""
    # Rollout and update need tensors of different shapes: the allocator would keep memory for both.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()


# --- Errors ---


class InputError(ValueError):
    """The user's input is at fault: one line that says what, where and what to do. Exit code 2."""


class Fault(Exception):
    """The run can't go on: one line that says what happened and what helps. Exit code 1."""


@contextlib.contextmanager
def blame(what: str) -> Iterator[None]:
    """`with blame("--model gpt2"):` what a library raises here, while it reads what the user gave,
    becomes an InputError of one line.
    """
    try:
        yield
    except (InputError, Fault, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as e:  # transformers, peft and datasets raise anything
        # A first line that ends in a colon only announces the reason.
        reason = " ".join(str(e).split()) if ":\n" in str(e)[:200] else str(e).split("\n")[0]
        if isinstance(e, ModuleNotFoundError):
            reason += f": pip install {e.name}"
        raise InputError(f"{what}: {type(e).__name__}: {reason[:300]}") from e
