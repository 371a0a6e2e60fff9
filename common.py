"""The mathematics that PPO, GRPO and RLOO share: masks, log-probs, KL, GAE; and what must be right
around it: dropout, the reference, the learning rate.

Every mathematical function is pure. A mask may be bool, or 0 and 1. Elements off the mask have no
influence, even if they are NaN. This file imports torch, and no other file of the project.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

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
#   reward        the score less the KL penalty (PPO, RLOO), or the score itself (GRPO): r
#   return        an estimate of the rewards to come, A + V by GAE: R; the value model learns it
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
    completion_mask: Tensor  # (B, T) bool: True up to the end, EOS included, without a hole
    # (B, T) as the sampler computed them, 0 off the mask. Decoding rounds differently from the
    # forward pass that trains, so the loops compute log-probs of their own in step 3.
    logprobs: Tensor
    finished: Tensor  # (B,) bool: ended by EOS or a stop string, not at the limit

    @property
    def lengths(self) -> Tensor:
        """Count the tokens of each completion, EOS included: (B,)."""
        return self.completion_mask.sum(1)

    def __getitem__(self, rows: Tensor | slice) -> Rollout:
        """Take the given rows of every field."""
        return Rollout(*(getattr(self, field.name)[rows] for field in dataclasses.fields(self)))


def completion_mask(completions: Tensor, eos_token_ids: list[int]) -> Tensor:
    """Return where a completion has real tokens: up to and including its first EOS, which may be
    any of the EOS ids: (B, T) -> (B, T) bool. `generate` does the same for stop strings too.

    With EOS = 9: [5, 9, 7] -> [1, 1, 0] and [5, 6, 7] -> [1, 1, 1].
    """
    is_eos = torch.isin(completions, completions.new_tensor(eos_token_ids)).long()
    # EOS is an action and has to get its gradient, so count the EOS strictly before each position.
    eos_before = is_eos.cumsum(1) - is_eos
    return eos_before == 0


# --- Statistics over a mask ---


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Average x where mask is 1, over all elements or along `dim`; 0 where the mask is empty."""
    mask = mask.bool()
    # Fill, don't multiply: 0 * NaN is NaN.
    x = x.masked_fill(~mask, 0)
    return x.sum(dim) / mask.sum(dim).clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale x to mean 0 and variance 1 over the mask; 0 off the mask.

    A single number becomes 0, not NaN. The variance has Bessel's correction and eps 1e-8, as in
    TRL's PPO; the code of Huang et al. 2024 (arXiv 2403.17031) whitens without the correction.
    """
    mask = mask.bool()
    centred = (x - masked_mean(x, mask)).masked_fill(~mask, 0)
    variance = (centred**2).sum() / (mask.sum() - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + 1e-8)


# --- Log-probs, entropy, KL, ratio ---


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return log softmax(logits) at the given tokens: logits (..., V), tokens (...) -> (...). Half
    precision is converted to float32 first.
    """
    return at_least_float32(logits).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def token_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of softmax(logits) in nats: (..., V) -> (...)."""
    logprobs = at_least_float32(logits).log_softmax(-1)
    # A token of probability 0 must add 0, and 0 * -inf is NaN.
    return -(logprobs.exp() * logprobs.clamp(min=torch.finfo(logprobs.dtype).min)).sum(-1)


def at_least_float32(x: Tensor) -> Tensor:
    """Convert half precision to float32: in bfloat16 a softmax over a large vocabulary is percents
    off.
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) at each token that the policy sampled: (B, T) -> (B, T).

    With d = log policy - log reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. Schulman,
    "Approximating KL divergence", joschu.net, 2020. k1 and k3 have no bias. docs/questions.md says
    where their gradients go, in a reward and in a loss. Raises ValueError for another name.
    """
    d = logprobs - ref_logprobs
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d**2 / 2
    if estimator == "k3":
        # exp(-d) - 1 loses all digits where d is near 0, expm1 does not.
        return torch.expm1(_at_most_20(-d)) + d
    raise ValueError(f"unknown KL estimator {estimator!r}: choose k1, k2 or k3")


def policy_ratio(log_ratio: Tensor) -> Tensor:
    """Return rho = pi / pi_old from log pi - log pi_old, of any shape; it is at most exp(20)."""
    return _at_most_20(log_ratio).exp()


def _at_most_20(exponent: Tensor) -> Tensor:
    """Lower what is above 20 to 20, which no clip range reaches. The gradient stays 1."""
    # exp overflows above 88 in float32, and where the clip asks for no gradient the backward pass
    # makes NaN of 0 * inf. The gradient has to stay: a bad token must be pushed back.
    return exponent - (exponent - 20).clamp(min=0).detach()


# --- Advantages ---


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Estimate advantages (GAE), and the returns that values learn: each (B, T), not whitened.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}: Schulman et al.
    2016 (arXiv 1506.02438) eq. 16, Schulman et al. 2017 (arXiv 1707.06347) eq. 11 and 12. The
    episode ends with the last real token of a row, also where it was cut at the length limit: after
    it V and A are 0, whatever the value model says at padding. Off the mask the returns are 0 too.
    """
    # It goes token by token, so on the CPU: a GPU would launch a few small operations for each.
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
    """Find the groups whose rewards (N, G), without those that are NaN, are all equal: (N, 1) bool.
    They teach nothing: every completion is as good as the others.
    """
    unknown = groups.isnan()
    lowest = groups.masked_fill(unknown, torch.inf).amin(dim=1, keepdim=True)
    highest = groups.masked_fill(unknown, -torch.inf).amax(dim=1, keepdim=True)
    return lowest >= highest


# --- Models ---


def unwrap(model: nn.Module) -> nn.Module:
    """Return the transformers model itself, without the wrapper that peft puts around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def disable_dropout(*models: nn.Module) -> int:
    """Switch every kind of dropout off for good, and return how many probabilities are now 0.

    Before the first update the ratio compares two forward passes of the same weights, and with
    dropout it isn't 1. The model's own config is saved with it and keeps its values; modules get a
    copy.
    """
    sites = 0
    for model in models:
        wholes = (model, unwrap(model))
        for module in model.modules():
            # 1. Modules: nn.Dropout and its kin.
            if isinstance(module, DROPOUTS) and module.p > 0:
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


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
DROPOUTS += (nn.AlphaDropout, nn.FeatureAlphaDropout)


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


def reference(
    policy: nn.Module, kl_coef: float, named: nn.Module | None = None
) -> Callable[[], contextlib.AbstractContextManager]:
    """Decide which reference model the KL is measured against; this is the one place that does.

    Use it as `with ref() as ref_model:`, as often as needed. ref_model is None where kl_coef is 0;
    else the `named` model, if there is one; else the policy with its adapter off, if the adapter is
    new; else a copy of the policy, which shares the weights that don't train. It is in evaluation
    mode, and frozen: nothing in the named model or in the copy trains.
    """
    if kl_coef == 0:
        return contextlib.nullcontext
    # The model that --reference names.
    if named is not None:
        return partial(contextlib.nullcontext, named.eval().requires_grad_(False))
    # A new LoRA adapter: the reference is the policy without it, which needs no memory.
    if has_new_adapter(policy):
        return partial(adapter_off, policy)
    # Else a frozen copy, taken after dropout is off: of all weights, or of only a trained adapter.
    # A reload by name would miss any change made in memory, and the KL at step 0 would not be 0.
    return partial(contextlib.nullcontext, copy_what_trains(policy).eval().requires_grad_(False))


def copy_what_trains(model: nn.Module) -> nn.Module:
    """Copy a model, but share the weights that don't train: they stay the same in both."""
    return copy.deepcopy(model, memo={id(p): p for p in model.parameters() if not p.requires_grad})


def has_new_adapter(policy: nn.Module) -> bool:
    """Say whether there is a LoRA adapter that changes nothing yet: all its weights except A are 0.

    The weights decide, not where the adapter came from. With B other than 0 the base model is not
    the policy that the run starts from (huggingface/trl#1340).
    """
    trained = [(name, p) for name, p in policy.named_parameters() if p.requires_grad]
    matrices_a = [name for name, _ in trained if "lora_A" in name]
    return bool(matrices_a) and not any(p.any() for name, p in trained if name not in matrices_a)


@contextlib.contextmanager
def adapter_off(policy: nn.Module) -> Iterator[nn.Module]:
    """Lend the policy without its adapter and dropout."""
    with policy.disable_adapter(), evaluating(policy):
        yield policy


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """Put the model into evaluation mode, and back, also after an error."""
    # Dropout must not touch a sample. And gradient checkpointing, active in training mode, switches
    # the KV cache off: decoding would take quadratic time.
    was_training = model.training
    model.eval()
    try:
        yield model
    finally:
        model.train(was_training)


def schedule(step: int, num_steps: int, warmup_steps: int) -> float:
    """Return the share of the learning rate at a step: (step + 1) / warmup_steps up to 1, then
    linearly down, to 1 / (num_steps - warmup_steps) at the last step. The rise takes at most half
    of the steps, so that short runs reach the full rate too.
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
