"""The mathematics on shapes, masks and numbers that nobody chose by hand."""

import hypothesis
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from common import (
    gae,
    importance_ratio,
    kl_estimate,
    masked_mean,
    masked_whiten,
    token_entropy,
    token_logprobs,
)
from grpo import group_advantages, grpo_loss
from ppo import policy_loss, shape_rewards, value_loss
from rloo import rloo_advantages, rloo_loss

hypothesis.settings.register_profile("same every time", derandomize=True, deadline=None)
hypothesis.settings.load_profile("same every time")
EXAMPLES = hypothesis.settings(max_examples=40)
SEEDS, SIZES = st.integers(0, 2**32), st.integers(1, 7)
GROUPS = st.integers(2, 5)
LOSSES = st.fixed_dictionaries(
    {
        "loss_type": st.sampled_from(["grpo", "dapo", "dr_grpo", "cispo"]),
        "importance_sampling_level": st.sampled_from(["token", "sequence"]),
        "clip_range": st.sampled_from([0.05, 0.2]),
        "clip_range_high": st.sampled_from([None, 0.3]),
        "kl_coef": st.sampled_from([0.0, 0.1]),
    }
)


def case(seed: int, rows: int, width: int, spread: float = 1.0) -> dict[str, Tensor]:
    """Float64, ragged on the right as completions are, with garbage where the mask is 0."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=g)
    old = -3 + spread * torch.randn(rows, width, generator=g, dtype=torch.float64)
    return {
        "mask": torch.arange(width) < lengths,
        "old_logprobs": old,
        "logprobs": old + spread * torch.randn(old.shape, generator=g, dtype=torch.float64),
        "ref_logprobs": old + spread * torch.randn(old.shape, generator=g, dtype=torch.float64),
        "advantages": torch.randn(rows, generator=g, dtype=torch.float64),
        "values": torch.randn(old.shape, generator=g, dtype=torch.float64),
        "rewards": torch.randn(old.shape, generator=g, dtype=torch.float64),
    }


def loss_of(x: dict[str, Tensor], rows: Tensor | slice, options: dict, total: int, tokens: int):
    """(share of these rows in GRPO's loss, gradient) of a minibatch of so many rows and tokens."""
    logprobs = x["logprobs"][rows].clone().requires_grad_()
    names = ("old_logprobs", "advantages", "mask")
    loss, _ = grpo_loss(
        logprobs, *(x[name][rows] for name in names), ref_logprobs=x["ref_logprobs"][rows],
        num_rows=total, num_tokens=tokens, max_new_tokens=9, **options,
    )  # fmt: skip
    loss.backward()
    return loss.detach(), logprobs.grad


def padded(x: dict[str, Tensor], extra: int) -> dict[str, Tensor]:
    """With more columns on the right, which the mask leaves out and which hold garbage."""

    def wider(t: Tensor) -> Tensor:
        fill = torch.zeros if t.dtype == torch.bool else torch.ones
        return torch.cat([t, fill(len(t), extra, dtype=t.dtype) * 77], 1) if t.dim() == 2 else t

    return {name: wider(t).bool() if name == "mask" else wider(t) for name, t in x.items()}


@EXAMPLES
@given(SEEDS, SIZES, SIZES, st.floats(0, 1), st.floats(0, 1))
def test_gae_is_its_double_sum(seed, rows, width, gamma, lam):
    x = case(seed, rows, width)
    advantages, returns = gae(x["rewards"], x["values"], x["mask"], gamma, lam)
    for b in range(rows):
        length = int(x["mask"][b].sum())
        r, v = x["rewards"][b, :length], [*x["values"][b, :length], 0.0]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(length)]
        for t in range(length):
            total = sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, length))
            assert abs(advantages[b, t] - total) < 1e-9
            assert abs(returns[b, t] - total - v[t]) < 1e-9
        assert (advantages[b, length:] == 0).all() and (returns[b, length:] == 0).all()


@EXAMPLES
@given(SEEDS, SIZES, SIZES)
def test_masked_statistics_are_those_of_the_values_that_the_mask_leaves(seed, rows, width):
    """Of masks of any shape, with NaN off them."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=g) < 0.6
    x = torch.randn(rows, width, generator=g, dtype=torch.float64).masked_fill(~mask, torch.nan)
    kept = x[mask]
    assert torch.isclose(masked_mean(x, mask), kept.mean() if len(kept) else kept.new_zeros(()))
    for b, mean in enumerate(masked_mean(x, mask, dim=1)):
        assert torch.isclose(mean, x[b][mask[b]].mean() if mask[b].any() else mean.new_zeros(()))
    whitened = masked_whiten(x, mask)
    assert (whitened[~mask] == 0).all() and whitened.isfinite().all()
    if len(kept) > 1:
        assert abs(whitened[mask].mean()) < 1e-9 and abs(whitened[mask].var() - 1) < 1e-5


@EXAMPLES
@given(SEEDS, st.integers(2, 8), SIZES, LOSSES, st.data())
def test_micro_batches_of_any_size_add_up_to_the_whole(seed, rows, width, options, data):
    x = case(seed, rows, width)
    total, tokens = rows, int(x["mask"].sum())
    whole = loss_of(x, slice(None), options, total, tokens)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    cuts = sorted(data.draw(st.sets(st.integers(1, rows - 1))))
    loss, gradient = 0.0, torch.zeros_like(whole[1])
    for part in order.tensor_split(cuts):
        share = loss_of(x, part, options, total, tokens)
        loss, gradient[part] = loss + share[0], share[1]
    assert torch.isclose(loss, whole[0], atol=1e-12) and torch.allclose(gradient, whole[1])


@EXAMPLES
@given(SEEDS, SIZES, SIZES, LOSSES, st.integers(1, 4))
def test_more_padding_changes_no_loss_no_gradient_and_no_advantage(
    seed, rows, width, options, extra
):
    x = case(seed, rows, width)
    more, tokens = padded(x, extra), int(x["mask"].sum())
    found = [loss_of(y, slice(None), options, rows, tokens) for y in (x, more)]
    assert torch.isclose(found[0][0], found[1][0], atol=1e-12)
    assert torch.allclose(found[0][1], found[1][1][:, :width]) and not found[1][1][:, width:].any()
    names = ("logprobs", "old_logprobs", "advantages", "mask")
    losses = [rloo_loss(*(y[name] for name in names), clip_range=0.2)[0] for y in (x, more)]
    assert torch.isclose(*losses)
    scores = torch.arange(rows, dtype=torch.float64)
    kl = [kl_estimate(y["logprobs"], y["ref_logprobs"], "k1") for y in (x, more)]
    shaped = [shape_rewards(scores, k, y["mask"], 0.1) for k, y in zip(kl, (x, more))]
    assert torch.equal(shaped[0], shaped[1][:, :width]) and not shaped[1][:, width:].any()
    for a, b in zip(*(gae(y["rewards"], y["values"], y["mask"], 0.9, 0.9) for y in (x, more))):
        assert torch.equal(a, b[:, :width]) and not b[:, width:].any()


@EXAMPLES
@given(SEEDS, st.integers(1, 4), GROUPS)
def test_advantages_follow_their_rows_and_know_no_zero_of_the_reward(seed, groups, size):
    g = torch.Generator().manual_seed(seed)
    rewards = torch.randn(groups, size, generator=g, dtype=torch.float64)
    order = torch.stack([torch.randperm(size, generator=g) for _ in range(groups)])
    for function in (
        *(
            lambda r, s=s: group_advantages(r.flatten(), size, s)
            for s in ("group", "batch", "none")
        ),
        *(lambda r, n=n: rloo_advantages(r.flatten(), size, n) for n in (False, True)),
    ):
        right = function(rewards).view(groups, size)
        assert abs(right.mean(1)).max() < 1e-9, "the mean of a group is its zero"
        shuffled = function(rewards.gather(1, order)).view(groups, size)
        assert torch.allclose(shuffled, right.gather(1, order))
        assert torch.allclose(function(rewards + 5).view(groups, size), right, atol=1e-9)
    for kind, tolerance in (("none", 1e-9), ("group", 1e-2), ("batch", 1e-2)):
        # Divided by a std the scale is gone, but for the 1e-4 that is added to it.
        few = rewards + torch.arange(size)  # no group of nearly equal rewards
        a, b = (group_advantages(r.flatten(), size, kind) for r in (few, 3 * few))
        assert torch.allclose(b, 3 * a if kind == "none" else a, rtol=tolerance, atol=1e-3)
    assert torch.allclose(
        rloo_advantages(3 * rewards.flatten(), size), 3 * rloo_advantages(rewards.flatten(), size)
    )
    # The leave-one-out baseline is the mean of the group, and G / (G - 1).
    rloo = rloo_advantages(rewards.flatten(), size)
    plain = group_advantages(rewards.flatten(), size, "none")
    assert torch.allclose(rloo, plain * size / (size - 1))


@EXAMPLES
@given(SEEDS, SIZES, SIZES, LOSSES, st.sampled_from([1.0, 30.0, 300.0]))
def test_no_log_prob_however_large_or_small_makes_a_nan(seed, rows, width, options, spread):
    """k3 is left out: it overflows where the policy is 88 nats below the reference."""
    x = {k: t.float() if t.is_floating_point() else t for k, t in case(seed, rows, width).items()}
    g = torch.Generator().manual_seed(seed + 1)
    x["logprobs"] = x["old_logprobs"] + spread * torch.randn(rows, width, generator=g)
    found = loss_of(x, slice(None), options | {"kl_coef": 0.0}, rows, int(x["mask"].sum()))
    assert found[0].isfinite() and found[1].isfinite().all()
    advantages = x["advantages"].unsqueeze(1).expand(rows, width)
    for name, function in (
        ("logprobs", lambda p: policy_loss(p, x["old_logprobs"], advantages, 0.2)[0]),
        ("values", lambda v: value_loss(spread * v, x["values"], x["rewards"], 0.2)[0]),
        (
            "logprobs",
            lambda p: rloo_loss(p, x["old_logprobs"], x["advantages"], x["mask"], clip_range=0.2)[
                0
            ],
        ),
    ):
        leaf = x[name].clone().requires_grad_()
        loss = function(leaf)
        (loss.masked_fill(~x["mask"], 0) if loss.dim() else loss).sum().backward()
        assert loss.isfinite().all() and leaf.grad.isfinite().all()
    logits = spread * torch.randn(rows, width, 11, generator=g)
    tokens = torch.randint(11, (rows, width), generator=g)
    assert token_logprobs(logits, tokens).isfinite().all()
    entropy = token_entropy(logits)
    assert entropy.isfinite().all() and (entropy > -1e-5).all() and (entropy < 2.4).all()


@EXAMPLES
@given(SEEDS, SIZES, SIZES, LOSSES)
def test_float32_agrees_with_float64_to_rounding(seed, rows, width, options):
    x = case(seed, rows, width, spread=0.1)
    y = {name: t.float() if t.is_floating_point() else t for name, t in x.items()}
    (a, b), (c, d) = (loss_of(z, slice(None), options, rows, 9) for z in (x, y))
    # A ratio on the edge of the clip range may fall on either side of it.
    ratio = importance_ratio(
        x["logprobs"], x["old_logprobs"], x["mask"], options["importance_sampling_level"]
    )
    edges = [1 - options["clip_range"]]
    edges += [1 + (options["clip_range_high"] or options["clip_range"])]
    hypothesis.assume(min((ratio - edge).abs().min() for edge in edges) > 1e-5)
    assert torch.isclose(c.double(), a, rtol=1e-4, atol=1e-5)
    assert torch.allclose(d.double(), b, rtol=1e-3, atol=1e-5)
    for estimator in ("k1", "k2", "k3"):
        exact, rounded = (kl_estimate(z["logprobs"], z["ref_logprobs"], estimator) for z in (x, y))
        assert torch.allclose(rounded.double(), exact, rtol=1e-3, atol=1e-5)
    assert (kl_estimate(y["logprobs"], y["ref_logprobs"], "k3") >= 0).all()
