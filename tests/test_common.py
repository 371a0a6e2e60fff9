"""The mathematics of common.py against definitions, worked examples and known mistakes."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import transformers
from small import RAGGED, small_gpt2
from torch import Tensor

from common import (
    ValueModel,
    at_least_float32,
    completion_mask,
    disable_dropout,
    gae,
    importance_ratio,
    kl_estimate,
    masked_mean,
    masked_whiten,
    policy_ratio,
    set_learning_rate,
    store_in_bfloat16,
    token_entropy,
    token_logprobs,
)
from plumbing.forward import completion_values, rollout_logprobs, rollout_values

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]).bool()
OFF = ~MASK


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- Masks and statistics over them ---


@pytest.mark.problem("completion_mask", 3)
def test_a_completion_ends_with_its_first_eos_whichever_of_the_eos_ids_it_is():
    """Missing one of several: huggingface/trl#7039."""
    completions = torch.tensor([[5, 38, 7], [5, 39, 38], [5, 6, 7], [39, 39, 1]])
    mask = completion_mask(completions, [38, 39])
    assert mask.dtype == torch.bool
    assert mask.long().tolist() == [[1, 1, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]]


def test_masked_mean_ignores_what_is_masked_even_nan():
    x = random(3, 4).masked_fill(OFF, torch.nan)
    assert masked_mean(x, MASK).item() == pytest.approx(x[MASK].mean().item())
    rows = masked_mean(x, MASK, dim=1)
    assert rows.tolist() == pytest.approx([x[i][MASK[i]].mean().item() for i in range(3)])


def test_masked_mean_of_an_empty_mask_is_0():
    assert masked_mean(torch.ones(2, 3), torch.zeros(2, 3)).item() == 0


@pytest.mark.problem("masked_whiten", 3)
@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitened_values_have_unbiased_std_1_over_the_whole_mask_and_mean_0_or_their_own(
    shift_mean,
):
    x = (random(3, 4) * 7 + 100).masked_fill(OFF, torch.nan)
    white = masked_whiten(x, MASK) if shift_mean else masked_whiten(x, MASK, shift_mean=False)
    mean = 0 if shift_mean else x[MASK].mean().item()
    assert white[MASK].mean().item() == pytest.approx(mean, abs=1e-9)
    assert white[MASK].std().item() == pytest.approx(1, abs=1e-6)  # torch's std has Bessel's N - 1
    assert (white[OFF] == 0).all()


@pytest.mark.problem("masked_whiten", 1)
@pytest.mark.parametrize("value", [0.1, 0.3, 1.1])
def test_whitening_a_constant_or_a_single_value_gives_no_nan_and_no_blow_up(value):
    assert masked_whiten(torch.full((3, 4), value), MASK).abs().max() < 1e-2
    assert masked_whiten(torch.full((1, 1), value), torch.ones(1, 1)).item() == 0


# --- Log-probs and entropy ---


@pytest.mark.problem("token_logprobs", 2)
def test_token_logprobs_equal_the_gathered_log_softmax_and_carry_its_gradient():
    logits, tokens = random(3, 4, 9).requires_grad_(), torch.arange(12).view(3, 4) % 9
    expected = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    found = token_logprobs(logits, tokens)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12) and found.dtype == torch.float64
    gradients = [torch.autograd.grad(x[0].sum(), logits)[0] for x in (found, expected)]
    assert torch.allclose(*gradients, rtol=0, atol=1e-12)


@pytest.mark.problem("token_logprobs", 1)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4)])
def test_log_probs_and_entropies_take_any_leading_shape(shape):
    logits, tokens = 1e3 * random(*shape, 9), torch.full(shape, 7)  # exp would overflow
    assert torch.allclose(token_logprobs(logits, tokens), logits.log_softmax(-1)[..., 7])
    assert token_entropy(logits).shape == shape


@pytest.mark.problem("token_logprobs", 1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_scored_in_float32(dtype):
    logits, tokens = (5 * random(2, 3, 50)).to(dtype), torch.arange(6).view(2, 3)
    assert torch.equal(at_least_float32(logits), logits.float())
    assert torch.equal(token_logprobs(logits, tokens), token_logprobs(logits.float(), tokens))
    assert torch.equal(token_entropy(logits), token_entropy(logits.float()))
    assert token_entropy(logits).dtype == torch.float32


def test_entropy_is_that_of_the_softmax_and_a_zero_probability_adds_nothing():
    logits = torch.tensor([[[0.7, 0.2, 0.08, 0.02]]]).log()
    expected = 0.7 * 0.35667 + 0.2 * 1.60944 + 0.08 * 2.52573 + 0.02 * 3.91202
    assert token_entropy(logits).item() == pytest.approx(expected, abs=1e-4)
    for needs_gradient in (False, True):
        impossible = torch.tensor([[[0.0, -torch.inf, 0.0]]], requires_grad=needs_gradient)
        assert token_entropy(impossible).item() == pytest.approx(math.log(2))


# --- KL estimators: signs and expectations, not only non-negativity ---


P = torch.tensor([0.7, 0.2, 0.08, 0.02], dtype=torch.float64)
Q = torch.full((4,), 0.25, dtype=torch.float64)
KL = 0.5344  # of P to Q; the other way round it would be .7435


@pytest.mark.problem("kl_estimate", 1)
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_for_the_kl_of_policy_to_reference(estimator):
    expectation = (P * kl_estimate(P.log(), Q.log(), estimator)).sum().item()
    assert expectation == pytest.approx(KL, abs=1e-4)


@pytest.mark.problem("kl_estimate", 1)
def test_k2_is_half_the_squared_log_ratio():
    d = torch.tensor([0.3, -0.2])
    assert torch.allclose(kl_estimate(d, torch.zeros(2), "k2"), torch.tensor([0.045, 0.02]))


@pytest.mark.problem("kl_estimate", 1)
def test_k3_is_never_negative_and_exact_near_0():
    d = torch.tensor([-2.0, -1e-4, 0.0, 1e-4, 2.0])
    k3 = kl_estimate(d, torch.zeros(5), "k3")
    assert (k3 >= 0).all()
    # exp(-d) - 1 + d in float32 gives 0 or 6e-8.
    assert k3[3].item() == pytest.approx(5e-9, rel=0.2)


@pytest.mark.problem("kl_estimate", 1)
def test_in_a_loss_k2_has_the_gradient_of_the_kl_and_k3_that_of_the_kl_turned_round():
    """A loss is a mean over sampled tokens, whose probabilities carry no gradient."""
    logits, ref = random(4).requires_grad_(), P.log()
    logprobs = logits.log_softmax(-1)
    probs = logprobs.exp().detach()

    def gradient(x: Tensor) -> Tensor:
        return torch.autograd.grad(x.sum(), logits, retain_graph=True)[0]

    k1, k2, k3 = (gradient(probs * kl_estimate(logprobs, ref, k)) for k in ("k1", "k2", "k3"))
    assert torch.allclose(k1, torch.zeros(4, dtype=torch.float64))
    assert torch.allclose(k2, gradient(logprobs.exp() * (logprobs - ref)))
    assert torch.allclose(k3, gradient(ref.exp() * (ref - logprobs)))


def test_k3_of_a_token_that_the_policy_hardly_knows_stays_finite_and_keeps_its_gradient():
    """In float32 exp overflows above 88, and the backward pass then makes NaN of 0 * inf."""
    x = torch.tensor([-120.0], requires_grad=True)
    k3 = kl_estimate(x, torch.tensor([-1.0]), "k3")
    k3.sum().backward()
    assert k3.isfinite().all() and -1e9 < x.grad.item() < -1e8


@pytest.mark.problem("kl_estimate", 1)
def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


# --- Ratio ---


def test_the_ratio_is_exp_to_the_bit_up_to_far_beyond_any_clip_range():
    log_ratio = torch.linspace(-120, 20, 1000)
    assert torch.equal(policy_ratio(log_ratio), log_ratio.exp())


@pytest.mark.parametrize("log_ratio", [20.5, 89.0, 1e6])
def test_a_ratio_beyond_that_stays_finite_and_keeps_its_gradient(log_ratio):
    """In float32 exp overflows above 88."""
    x = torch.tensor([log_ratio, 0.5], requires_grad=True)
    expected = [math.exp(20), math.exp(0.5)]
    old, mask = torch.zeros(2, 1), torch.ones(2, 1)
    for ratio in (
        policy_ratio(x),
        importance_ratio(x.unsqueeze(1), old, mask, "token").squeeze(1),
        importance_ratio(x.unsqueeze(1), old, mask, "sequence").squeeze(1),
    ):
        gradient = torch.autograd.grad(ratio.sum(), x)[0]
        assert ratio.tolist() == pytest.approx(expected, rel=1e-5)
        assert gradient.tolist() == pytest.approx(expected, rel=1e-5)


def test_the_ratio_of_tokens_is_that_of_each_and_that_of_a_sequence_their_geometric_mean():
    logprobs, old = random(3, 4), random(3, 4, seed=1)
    ratio, whole = (importance_ratio(logprobs, old, MASK, name) for name in ("token", "sequence"))
    for row, length in enumerate(MASK.sum(1).tolist()):
        d = (logprobs - old)[row, :length]
        assert torch.allclose(ratio[row, :length], d.exp())
        assert whole[row, :length].tolist() == pytest.approx([math.exp(d.mean().item())] * length)
    assert (ratio[OFF] == 1).all() and (whole[OFF] == 1).all()
    assert torch.equal(importance_ratio(logprobs, old, MASK.long(), "sequence"), whole)


def test_an_unknown_level_of_the_ratio_is_refused_by_name():
    with pytest.raises(ValueError, match="'row'"):
        importance_ratio(random(3, 4), random(3, 4), MASK, "row")


# --- GAE ---


@pytest.mark.problem("gae", 3)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (1.0, 0.0)])
def test_gae_equals_the_defining_double_sum_on_ragged_rows(gamma, lam):
    """A_t is the sum over l of (gamma lam)^l delta_{t+l}."""
    rewards, values = random(3, 4), random(3, 4, seed=1)
    expected = torch.zeros_like(rewards)
    for row, n in enumerate(MASK.sum(1).tolist()):
        v = [*values[row, :n].tolist(), 0.0]
        delta = [rewards[row, t].item() + gamma * v[t + 1] - v[t] for t in range(n)]
        for t in range(n):
            expected[row, t] = sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n))
    assert torch.allclose(gae(rewards, values, MASK, gamma, lam)[0], expected)


@pytest.mark.problem("gae", 1)
def test_the_returns_are_the_advantages_and_the_values():
    rewards, values = random(3, 4), random(3, 4, seed=1)
    advantages, returns = gae(rewards, values, MASK, 0.9, 0.5)
    assert torch.allclose(returns, (advantages + values) * MASK)


def test_advantages_and_returns_are_0_wherever_the_mask_is_also_in_the_middle_of_a_row():
    mask = torch.tensor([[1, 0, 1], [0, 1, 1]]).bool()
    advantages, returns = gae(torch.ones(2, 3), torch.ones(2, 3), mask, 0.9, 0.9)
    assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()


@pytest.mark.problem("gae", 1)
def test_garbage_at_padding_never_reaches_advantages_or_returns():
    rewards, values = random(3, 4), random(3, 4, seed=1)
    clean = gae(rewards, values, MASK, 1.0, 0.95)
    dirty = rewards.masked_fill(OFF, torch.nan), values.masked_fill(OFF, 1e9)
    for x, expected in zip(gae(*dirty, MASK, 1.0, 0.95), clean, strict=True):
        assert torch.equal(x, expected) and (x[OFF] == 0).all()


# --- Dropout ---


SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
DROPOUT_CONFIGS = {
    "Llama": SIZES | {"intermediate_size": 32, "attention_dropout": 0.5},
    "OPT": SIZES | {"ffn_dim": 32, "word_embed_proj_dim": 32, "dropout": 0.5, "layerdrop": 0.5},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "attn_pdrop": 0.5, "resid_pdrop": 0.5},
    "Falcon": SIZES | {"hidden_dropout": 0.5, "attention_dropout": 0.5},
}


@pytest.mark.problem("disable_dropout", 2)
@pytest.mark.parametrize("name", DROPOUT_CONFIGS)
@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_after_disable_dropout_training_forwards_are_bit_identical(name, attn_implementation):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(vocab_size=40, **DROPOUT_CONFIGS[name])
    kernel = {"attn_implementation": attn_implementation}
    model = transformers.AutoModelForCausalLM.from_config(config, **kernel).train()

    def all_equal() -> bool:
        first, *others = (model(torch.arange(20).view(2, 10)).logits for _ in range(5))
        return all(torch.equal(first, other) for other in others)

    settings = model.config.to_dict()
    assert not all_equal()
    assert disable_dropout(model) > 0
    assert all_equal() and disable_dropout(model) == 0
    assert model.config.to_dict() == settings  # what is saved keeps its dropout


@pytest.mark.problem("disable_dropout", 1)
def test_disable_dropout_counts_what_it_switches_off_and_nothing_else():
    model = torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Dropout(0.0), torch.nn.Linear(1, 1))
    model[2].attention_dropout, model[2].layerdrop, model[2].dropout_kind = 0.2, 0.3, 4
    assert disable_dropout(model, torch.nn.Dropout2d(0.5)) == 4


# --- The value head ---


def test_a_fresh_value_model_predicts_exactly_0(small_model):
    assert (completion_values(ValueModel.on_backbone_of(small_model), RAGGED) == 0).all()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_value_model_trains_all_its_weights_and_shares_none_with_its_origin(frozen):
    """A policy trains, a reward model is frozen, and stored in bfloat16 where it can be."""
    origin = small_gpt2().requires_grad_(not frozen)
    store_in_bfloat16(origin, torch.device("cpu"))
    value_model = ValueModel.on_backbone_of(origin)
    assert all(p.requires_grad and p.dtype == torch.float32 for p in value_model.parameters())
    memory = {p.data_ptr() for p in origin.parameters()}
    assert not memory & {p.data_ptr() for p in value_model.parameters()}


# --- The learning rate ---


def rates(num_steps: int, warmup_steps: int) -> list[float]:
    """The learning rate of each step, of a full one of 3."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    config = SimpleNamespace(learning_rate=3.0, num_steps=num_steps, warmup_steps=warmup_steps)
    found = []
    for step in range(num_steps):
        set_learning_rate(optimizer, config, step)
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.problem("schedule", 1)
@pytest.mark.parametrize(("num_steps", "warmup_steps"), [(40, 10), (60, 1), (60, 0)])
def test_the_rate_rises_to_the_full_one_in_equal_steps(num_steps, warmup_steps):
    rise = rates(num_steps, warmup_steps)[:warmup_steps]
    assert rise == pytest.approx([3 * (i + 1) / len(rise) for i in range(len(rise))])


@pytest.mark.problem("schedule", 1)
@pytest.mark.parametrize(("num_steps", "warmup_steps"), [(40, 10), (60, 1), (60, 0)])
def test_after_that_the_rate_falls_in_equal_steps_towards_0(num_steps, warmup_steps):
    fall = rates(num_steps, warmup_steps)[warmup_steps:]
    assert fall == pytest.approx([3 * (1 - i / len(fall)) for i in range(len(fall))])


@pytest.mark.problem("schedule", 1)
@pytest.mark.parametrize("num_steps", [1, 2, 5, 19])
def test_a_run_that_is_shorter_than_its_warm_up_reaches_the_full_rate_too(num_steps):
    assert max(rates(num_steps, 10)) == 3 and min(rates(num_steps, 10)) > 0


@pytest.mark.problem("completion_mask", 1)
@pytest.mark.problem("gae", 1)
def test_no_function_of_the_mathematics_changes_its_inputs():
    x, y, mask = random(3, 4), random(3, 4, seed=1), MASK.clone()
    logits, tokens = random(3, 4, 9), torch.arange(12).view(3, 4) % 9
    rollout, model = copy.deepcopy(RAGGED), small_gpt2()
    rollout.tokens[~rollout.attention_mask] = 7  # or a masked_fill_ with 0 changes nothing
    inputs = [x, y, mask, logits, tokens, *vars(rollout).values()]
    before = copy.deepcopy(inputs)
    completion_mask(tokens, [3, 5])
    masked_mean(x, mask)
    masked_whiten(x, mask, shift_mean=False)
    token_logprobs(logits, tokens)
    token_entropy(logits)
    for estimator in ("k1", "k2", "k3"):
        kl_estimate(x, y, estimator)
    policy_ratio(x)
    for level in ("token", "sequence"):
        importance_ratio(x, y, mask, level)
    gae(x, y, mask, 1.0, 0.95)
    limits = {"rollout_batch_size": 2, "micro_batch_tokens": 9}
    config = SimpleNamespace(temperature=0.7, bf16=False, **limits)
    rollout_logprobs(model, rollout, config)
    rollout_values(ValueModel.on_backbone_of(model), rollout, config)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
