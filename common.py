"""The mathematics and the models that the three algorithms share.

Shapes: B rows (completions), P prompt positions (padded on the left), T completion positions, V
vocabulary. A mask is 1 at the tokens that were really sampled, EOS included; it is carried from
sampling and never inferred from token ids, because pad may equal EOS; it may be of bool or of 0 and
1, and what stands off it has no influence, even NaN. Every function of the mathematics is pure.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    DynamicCache,
    PreTrainedModel,
)

if TYPE_CHECKING:
    from sampling import Rollout


class InputError(Exception):
    """The user's input is at fault: one line that says what, where and what to do. Exit code 2."""


class Fault(Exception):
    """The run can't go on: one line that says what happened and what helps. Exit code 1."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, for messages of one line."""
    return (str(error).strip().split("\n") or [""])[0]


# --- Masked statistics ---


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of x where mask is 1, over all elements or along `dim`; 0 where the mask is empty."""
    mask = mask.bool()
    total = x.masked_fill(~mask, 0).sum() if dim is None else x.masked_fill(~mask, 0).sum(dim)
    count = mask.sum() if dim is None else mask.sum(dim)
    return total / count.clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scale x to variance 1 over the mask, and to mean 0 unless `shift_mean` is False; 0 off the
    mask.

    The variance has Bessel's correction and eps 1e-8: Huang et al. 2024, arXiv 2403.17031.
    """
    mask = mask.bool()
    mean = masked_mean(x, mask)
    centred = (x - mean).masked_fill(~mask, 0)
    variance = (centred**2).sum() / (mask.sum() - 1).clamp(min=1)
    whitened = centred * torch.rsqrt(variance + 1e-8)
    return whitened if shift_mean else (whitened + mean).masked_fill(~mask, 0)


# --- Log-probs, entropy, KL ---


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """log softmax(logits) at the given tokens: logits (B, T, V), tokens (B, T) -> (B, T), in at
    least float32.
    """
    return _full(logits).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def token_entropy(logits: Tensor) -> Tensor:
    """Entropy of softmax(logits) in nats: (B, T, V) -> (B, T). A token of probability 0 adds 0,
    not NaN.
    """
    logprobs = _full(logits).log_softmax(-1)
    # -inf becomes the lowest finite number, and that times 0 is 0.
    return -(logprobs.exp() * logprobs.clamp(min=torch.finfo(logprobs.dtype).min)).sum(-1)


def _full(x: Tensor) -> Tensor:
    """Half precision to float32: a softmax over a large vocabulary in bfloat16 is off by whole
    percents.
    """
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Per-token estimates of KL(policy || reference) from tokens that the policy sampled: (B, T).

    With d = log policy - log reference: k1 = d (unbiased, may be negative), k2 = d^2 / 2 (biased,
    low variance), k3 = exp(-d) - 1 + d (unbiased, never negative). Schulman, "Approximating KL
    divergence", joschu.net, 2020. Raises ValueError for another name.
    """
    d = logprobs - ref_logprobs
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d**2 / 2
    if estimator == "k3":
        return torch.expm1(-d) + d  # expm1: exp(-d) - 1 loses all digits where d is near 0
    raise ValueError(f"unknown KL estimator {estimator!r}: choose k1, k2 or k3")


# --- Advantages ---


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: (advantages, returns), each (B, T), not whitened, 0 off
    the mask.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}: Schulman et al.
    2016 (arXiv 1506.02438) eq. 16, Schulman et al. 2017 (arXiv 1707.06347) eq. 11 and 12. The
    episode ends with the last real token of a row, so V and A are 0 after it, whatever the value
    model says at padding.
    """
    mask = mask.bool()
    rewards, values = rewards.masked_fill(~mask, 0), values.masked_fill(~mask, 0)
    next_value = next_advantage = torch.zeros_like(values[:, 0])
    advantages = []
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = (delta + gamma * lam * next_advantage).masked_fill(~mask[:, t], 0)
        next_value = values[:, t]
        advantages.append(next_advantage)
    advantages = torch.stack(advantages[::-1], dim=1)
    return advantages, advantages + values


def is_flat(groups: Tensor) -> Tensor:
    """Which groups of rewards (N, G) are all the same, NaN left out: (N, 1) bool.

    Such a group teaches nothing, and its advantages must be exactly 0. In float32 the mean of equal
    rewards is off by a rounding error, which a division by their standard deviation of about 0
    blows up: huggingface/trl#4158 saw an advantage of 7428.
    """
    unknown = groups.isnan()
    lowest = groups.masked_fill(unknown, torch.inf).amin(dim=1, keepdim=True)
    highest = groups.masked_fill(unknown, -torch.inf).amax(dim=1, keepdim=True)
    return lowest >= highest


# --- Forward passes over completions ---


def model_inputs(
    model: nn.Module, tokens: Tensor, attention_mask: Tensor, **options: object
) -> dict[str, object]:
    """Arguments for reading tokens (B, L) under attention_mask (B, L), with those of `options` that
    the model's forward takes, and position ids where it takes them.

    Without position ids GPT-2 reads a left-padded row at shifted positions: 34 nats off in
    huggingface/trl#6800. Where mask is longer than tokens, they follow what a KV cache holds.
    """
    accepted = inspect.signature(base_model(model).forward).parameters
    position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
    options = options | {"position_ids": position_ids, "attention_mask": attention_mask.long()}
    return {"input_ids": tokens} | {k: v for k, v in options.items() if k in accepted}


def micro_batches(
    rollout: Rollout, rows: Tensor, max_rows: int | None = None, max_tokens: int | None = None
) -> list[Tensor]:
    """Cut `rows` (n,) of a rollout into micro-batches of at most `max_rows` rows and `max_tokens`
    tokens, padding counted and each prompt once, the longest completions first; a row alone may be
    longer.

    Sorted by length, because a micro-batch is as wide as its longest row and padding costs as much
    as text. The gradient is a sum over rows, so their order doesn't matter. Gradient checkpointing
    reads a prompt for each row, see completion_states, and so more than is counted here; what it
    keeps of a token is far less.
    """
    _, which, read = _distinct_prompts(rollout[rows])
    new = rollout.completion_mask[rows].sum(1)
    order = new.argsort(descending=True, stable=True)
    batches, prompts, widest = [[]], set(), (0, 0)  # of the last batch; width of prompts, of rows
    for row, prompt, *lengths in torch.stack([rows, which, read, new])[:, order].T.tolist():
        wider = tuple(map(max, widest, lengths))
        tokens = len(prompts | {prompt}) * wider[0] + (len(batches[-1]) + 1) * wider[1]
        full = max_tokens is not None and tokens > max_tokens
        if batches[-1] and (full or len(batches[-1]) == max_rows):
            batches.append([])
            prompts, wider = set(), tuple(lengths)
        batches[-1].append(row)
        prompts.add(prompt)
        widest = wider
    return [torch.tensor(batch, device=rows.device) for batch in batches]


def _distinct_prompts(rollout: Rollout) -> tuple[Tensor, Tensor, Tensor]:
    """(one row (R,) for each of the R prompts that there are, which of them each row (B,) has, its
    number of tokens (B,)).
    """
    length = rollout.tokens.shape[1] - rollout.completion_mask.shape[1]
    mask = rollout.attention_mask[:, :length]
    prompts = torch.where(mask.bool(), rollout.tokens[:, :length], -1)
    distinct, which = prompts.unique(dim=0, return_inverse=True)
    order = torch.arange(len(which), device=which.device)
    first = order.new_full((len(distinct),), len(which)).scatter_reduce(0, which, order, "amin")
    return first, which, mask.sum(1)


def completion_states(backbone: nn.Module, rollout: Rollout) -> Tensor:
    """Last hidden states (B, t, D), with grad, from which the first t completion tokens are
    predicted, t those of the longest row: each is one position to the left of its token.

    Completions of one prompt are read from its keys and values, as in decoding: so a prompt is read
    once, not for each of them.
    """
    longest = int(rollout.completion_mask.bool().any(0).sum())
    length = rollout.tokens.shape[1] - rollout.completion_mask.shape[1]
    first, which, read = _distinct_prompts(rollout)
    # Neither padding on the left of every row is read, nor the last token of the longest: the
    # state at position i predicts token i + 1, so nothing needs the state there.
    padding = length - int(read.max())
    columns = slice(padding, length + longest - 1)
    tokens, mask = rollout.tokens[:, columns], rollout.attention_mask[:, columns]

    def states(tokens: Tensor, mask: Tensor, **options: object) -> Tensor:
        return backbone(**model_inputs(backbone, tokens, mask, **options)).last_hidden_state

    modules = backbone.modules() if backbone.training else ()
    checkpointed = any(getattr(module, "gradient_checkpointing", False) for module in modules)
    if len(first) == len(which) or checkpointed:
        return states(tokens, mask, use_cache=False)[:, -longest:]
    length -= padding
    options = {"past_key_values": DynamicCache(config=backbone.config), "use_cache": True}
    of_prompts = states(tokens[first, :length], mask[first, :length], **options)[:, -1:]
    # What a prompt's rows give back is added up: on a CPU by index_select alone in the same order
    # each time, on CUDA by indexing alone. In any order, no run could be repeated.
    on_cuda = which.device.type == "cuda"
    of_rows = of_prompts[which] if on_cuda else of_prompts.index_select(0, which)
    if longest == 1:
        return of_rows
    cache = options["past_key_values"]
    (cache.batch_select_indices if on_cuda else cache.reorder_cache)(which)
    return torch.cat([of_rows, states(tokens[:, length:], mask, **options)], dim=1)


def completion_logprobs(
    model: nn.Module,
    rollout: Rollout,
    temperature: float,
    micro_batch_size: int | None = None,
    micro_batch_tokens: int | None = None,
    with_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probs of the sampled tokens by the training forward: (B, T), 0 off the mask, with grad.

    The logits are divided by the temperature: these are the log-probs of the distribution that was
    sampled. `with_entropy` returns (logprobs, entropy), the entropy without gradient.
    """
    every = torch.arange(len(rollout.tokens), device=rollout.tokens.device)
    batches = micro_batches(rollout, every, micro_batch_size, micro_batch_tokens)
    logprobs, entropies = [], []
    for rows in batches:
        part = rollout[rows]
        real = part.completion_mask.bool()  # (rows, T)
        tokens = part.tokens[:, -real.shape[1] :][real]  # (n,), n tokens that are no padding
        hidden = completion_states(base_model(model).base_model, part)  # (rows, t, D)
        hidden = hidden[real[:, : hidden.shape[1]]]  # (n, D)
        # Logits, (n, V), would be the largest tensor of all. So they are made for a chunk of tokens
        # at a time, and again in the backward pass instead of kept for it.
        size = _chunk_size(base_model(model).get_output_embeddings(), hidden.device)
        chunks = []
        for chunk, drawn in zip(hidden.split(size), tokens.split(size)):
            scored = (base_model(model), chunk, drawn, temperature, with_entropy)
            if torch.is_grad_enabled() and len(tokens) > size:
                scores = checkpoint(
                    _score_tokens, *scored, use_reentrant=False, preserve_rng_state=False
                )
            else:
                scores = _score_tokens(*scored)
            chunks.append(scores)
        for scores, parts in zip(zip(*chunks), (logprobs, entropies)):
            values = torch.cat(scores)
            parts.append(values.new_zeros(real.shape).masked_scatter(real, values))
    in_order = torch.cat(batches).argsort()
    found = tuple(torch.cat(parts)[in_order] for parts in (logprobs, entropies))
    return found if with_entropy else found[0]


CHUNK = 2**23  # logits at a time: 32 MB in float32, on CUDA 16 times as much


def _chunk_size(head: nn.Module, device: torch.device) -> int:
    """For how many tokens logits are made at a time."""
    return max(1, (CHUNK * 16 if device.type == "cuda" else CHUNK) // head.weight.shape[0])


def _score_tokens(
    model: PreTrainedModel, hidden: Tensor, tokens: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, each (n,), of tokens (n,) from last hidden states (n, D)."""
    logits = _full(logits_from(model, hidden))  # (n, V)
    logits = logits if temperature == 1 else logits / temperature
    logprobs = token_logprobs(logits, tokens)
    entropy = token_entropy(logits.detach()) if with_entropy else torch.zeros_like(logprobs)
    return logprobs, entropy


def logits_from(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """The end of the model's forward: last hidden states (n, D) -> logits (n, V)."""
    config = model.config.get_text_config()
    logits = model.get_output_embeddings()(hidden)
    if isinstance(scale := getattr(config, "logit_scale", None), float):  # Cohere
        logits = logits * scale
    if (scale := getattr(config, "logits_scaling", None)) is not None:  # Granite
        logits = logits / scale
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma
        logits = cap * torch.tanh(logits / cap)
    return logits


def completion_values(
    value_model: ValueModel,
    rollout: Rollout,
    micro_batch_size: int | None = None,
    micro_batch_tokens: int | None = None,
) -> Tensor:
    """V_t, the value of the state before token t is chosen: (B, T), 0 off the mask, with grad."""
    shape = rollout.completion_mask.shape
    every = torch.arange(shape[0], device=rollout.tokens.device)
    batches = micro_batches(rollout, every, micro_batch_size, micro_batch_tokens)
    values = []
    for rows in batches:
        # Read where the logits of token t are: one to the right, V would know the action.
        value = value_model.values(completion_states(value_model.backbone, rollout[rows]))
        values.append(nn.functional.pad(value, (0, shape[1] - value.shape[1])))
    in_order = torch.cat(values)[torch.cat(batches).argsort()]
    return in_order.masked_fill(~rollout.completion_mask.bool(), 0)


# --- Models ---


def base_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model itself, under the wrapper that peft puts around it for an adapter."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def disable_dropout(*models: nn.Module) -> int:
    """Switch every kind of dropout off for good; returns the number of sites switched off.

    The ratio of PPO compares two forwards of the same weights: with dropout it isn't 1 even
    before the first update. Zeroing `nn.Dropout.p` is not enough: Llama, Qwen2, OPT and others
    keep the probability as a float attribute and call `F.dropout(p=self.attention_dropout if
    self.training else 0.0)`, OPT and others skip whole layers (layerdrop), Falcon looks into its
    config each time. The config of the model itself, which is saved with it, stays as it is.
    """
    sites = 0
    for model in models:
        wholes = (model, base_model(model))
        quiet_configs = {}  # id -> (quiet copy, itself: kept, or its id could come again)
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                module.p = 0.0
                sites += 1
            sites += _zero_noise(module)
            config = vars(module).get("config")
            if config is not None and not any(module is whole for whole in wholes):
                if id(config) not in quiet_configs:
                    quiet_configs[id(config)] = copy.copy(config), config
                    sites += _zero_noise(quiet_configs[id(config)][0])
                module.config = quiet_configs[id(config)][0]
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


def set_up_training(
    *models: nn.Module, bf16: bool = False, checkpointing: bool = False, compiled: bool = False
) -> None:
    """Put policy and value model into training mode. Gradient checkpointing keeps of each layer its
    input alone and computes the rest again in the backward pass; `compiled` has the training
    forward compiled when it is first called. Raises InputError.
    """
    for model in models:
        model.train()
        backbone = model.backbone if isinstance(model, ValueModel) else base_model(model).base_model
        if bf16 and backbone.device.type == "cpu":
            # PyTorch's fused attention is slower there than plain matrix products, most of all in
            # its backward pass.
            backbone.set_attn_implementation("eager")
        if checkpointing:
            try:
                backbone.gradient_checkpointing_enable({"use_reentrant": False})
            except ValueError as e:
                raise InputError(f"--gradient_checkpointing: {first_line(e)}") from e
        if compiled:
            backbone.compile(dynamic=True)


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
        """A value model on a copy of the backbone of `model`, the policy or a reward model.

        On a policy with an adapter it trains an adapter as well, over the same frozen weights.
        """
        backbone = base_model(model).base_model
        if any(p.requires_grad for p in backbone.parameters()):
            backbone = copy_of(backbone)
        else:  # a reward model is frozen
            backbone = copy.deepcopy(backbone).requires_grad_(True)
        config = model.config.get_text_config()
        # OPT projects its output to another width.
        width = getattr(config, "word_embed_proj_dim", config.hidden_size)
        return cls(backbone, width).to(model.device, model.dtype)

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        """tokens (B, L), attention_mask (B, L) -> values (B, L)."""
        inputs = model_inputs(self.backbone, tokens, attention_mask, use_cache=False)
        return self.values(self.backbone(**inputs).last_hidden_state)

    def values(self, hidden: Tensor) -> Tensor:
        """Last hidden states (..., D) -> values (...)."""
        # In bfloat16 a value would have three digits, and advantages are differences of values.
        with torch.autocast(hidden.device.type, enabled=False):
            return self.head(hidden.to(self.head.weight.dtype)).squeeze(-1)


def reference(policy: nn.Module, kl_coef: float) -> contextlib.AbstractContextManager:
    """Decide which reference model the KL is measured against; use as `with ref as model:`, as
    often as needed.

    - kl_coef 0: none, the model is None.
    - A new LoRA adapter: the policy itself with the adapter off, which needs no memory.
    - Otherwise a frozen copy of the policy, taken here, after dropout is off; a reload by name
      would miss any change made in memory, and the KL at step 0 would not be 0. Weights that
      don't train are shared with the policy, so of a trained adapter on its base this copies the
      adapter alone.
    """
    if kl_coef == 0:
        return contextlib.nullcontext(None)
    if has_new_adapter(policy):
        return AdapterOff(policy)
    return contextlib.nullcontext(copy_of(policy).eval().requires_grad_(False))


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy that shares the weights that don't train: they stay the same in both."""
    return copy.deepcopy(model, memo={id(p): p for p in model.parameters() if not p.requires_grad})


def has_new_adapter(policy: nn.Module) -> bool:
    """Whether a LoRA adapter is there that changes nothing yet: all that trains is 0, but A.

    Judged by the weights, not by where the adapter came from: with B other than 0 the base model
    is not the policy that the run starts from (huggingface/trl#1193).
    """
    trained = [(name, p) for name, p in policy.named_parameters() if p.requires_grad]
    matrices_a = [name for name, _ in trained if "lora_A" in name]
    return bool(matrices_a) and not any(p.any() for name, p in trained if name not in matrices_a)


class AdapterOff:
    """`with AdapterOff(policy) as base:` reads the base model, without adapter and dropout."""

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy

    def __enter__(self) -> nn.Module:
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(self.policy.disable_adapter())
        return self.stack.enter_context(evaluating(self.policy))

    def __exit__(self, *error: object) -> None:
        self.stack.close()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """Evaluation mode, and back, also after an error. Dropout must not touch a sample or the
    reference; and gradient checkpointing, active in training mode, switches the KV cache off:
    quadratic decoding.
    """
    was_training = model.training
    model.eval()
    try:
        yield model
    finally:
        model.train(was_training)


def clear_cache() -> None:
    """Give cached blocks back between the phases: rollout and update need different shapes, and
    the allocator would otherwise hold the memory of both at once.
    """
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()
