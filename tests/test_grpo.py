"""GRPO: its advantages and its losses, against their definitions written out in Python."""

import math
import statistics

import pytest
import torch

import grpo
from common import InputError, kl_estimate
from grpo import group_advantages, grpo_loss, importance_ratio

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]).bool()
LOSS_TYPES = ["grpo", "dapo", "dr_grpo", "cispo"]
LEVELS = ["token", "sequence"]
nan = math.nan


def numbers(seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(4, 4, generator=generator, dtype=torch.float64)


# --- Advantages ---


def naive_advantages(rewards: list[float], group_size: int, scale: str) -> list[float]:
    known = [r for r in rewards if not math.isnan(r)]
    advantages = []
    for i, reward in enumerate(rewards):
        start = i // group_size * group_size
        group = [r for r in rewards[start : start + group_size] if not math.isnan(r)]
        if math.isnan(reward) or len(group) < 2:
            advantages.append(0.0)
            continue
        std = {"group": statistics.stdev(group), "batch": statistics.stdev(known)}
        advantage = reward - statistics.mean(group)
        advantages.append(advantage if scale == "none" else advantage / (std[scale] + 1e-4))
    return advantages


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_equal_their_definition_with_rewards_missing(scale):
    rewards = [1.0, 2, 4, 3, 3, 3, 0, nan, 5, nan, nan, 1, nan, nan, nan, 7, 7, 9]
    ours = group_advantages(torch.tensor(rewards, dtype=torch.float64), 3, scale)
    assert ours.tolist() == pytest.approx(naive_advantages(rewards, 3, scale), abs=1e-12)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("group_size", [2, 8, 12, 16])
def test_a_group_of_equal_rewards_gets_exactly_0_whatever_the_rounding(group_size, scale):
    """In float32 the std of equal values is not 0: other code gives advantages of .4 to .9."""
    for reward in (0, 0.1, 0.3, 0.7, 1.1, -1e6):
        rewards = torch.full((2 * group_size,), reward)
        rewards[group_size + 1] += 1
        advantages = group_advantages(rewards, group_size, scale)
        assert (advantages[:group_size] == 0).all() and (advantages[group_size:] != 0).any()


def test_rewards_that_are_equal_but_for_rounding_stay_near_0():
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3000001, 0.3], dtype=torch.float64)
    assert group_advantages(rewards, 4).abs().max() < 1e-2


def test_the_group_is_the_consecutive_rows_of_one_prompt():
    assert (group_advantages(torch.arange(6.0).repeat_interleave(4), 4) == 0).all()
    assert (group_advantages(torch.arange(6.0).repeat(4), 4) != 0).any()


def test_a_group_of_one_and_an_unknown_scale_are_refused():
    with pytest.raises(ValueError, match="a group needs 2 or more"):
        group_advantages(torch.ones(3), 1)
    with pytest.raises(ValueError, match="choose group, batch or none"):
        group_advantages(torch.ones(4), 2, "std")


# --- Loss ---


def naive_loss(logprobs, old, ref, advantages, mask, loss_type, level, kl_coef) -> float:
    """Token by token, in Python: clip 0.2 below and 0.3 above (the bound of cispo: 1.1)."""
    rows = []
    for i in range(len(mask)):
        tokens = [t for t in range(mask.shape[1]) if mask[i, t]]
        d = {t: logprobs[i][t] - old[i][t] for t in tokens}
        mean = sum(d.values()) / max(1, len(d))
        row = []
        for t in tokens:
            ratio = math.exp(d[t] if level == "token" else mean)
            a = advantages[i]
            if loss_type == "cispo":
                value = -min(ratio, 1.1) * a * logprobs[i][t]
            else:
                value = -min(ratio * a, min(max(ratio, 0.8), 1.3) * a)
            r = math.exp(ref[i][t] - logprobs[i][t])
            row.append(value + kl_coef * (r - 1 - math.log(r)))
        rows.append(row)
    if loss_type == "grpo":
        return sum(sum(row) / max(1, len(row)) for row in rows) / len(rows)
    total = sum(map(sum, rows))
    return total / (len(rows) * 4 if loss_type == "dr_grpo" else sum(map(len, rows)))


def options(loss_type: str, level: str = "token") -> dict:
    high = 1.1 if loss_type == "cispo" else 0.3
    return {
        "clip_range": 0.2, "clip_range_high": high, "loss_type": loss_type, "max_new_tokens": 4,
        "importance_sampling_level": level,
    }  # fmt: skip


@pytest.mark.parametrize("kl_coef", [0.0, 0.4])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_loss_equals_its_definition_token_by_token(loss_type, level, kl_coef):
    logprobs, old, ref = numbers(0, 0.5) - 2, numbers(1, 0.5) - 2, numbers(2, 0.5) - 2
    advantages = torch.tensor([1.0, -1.0, -0.5, 2.0], dtype=torch.float64)
    mask = MASK.clone()
    mask[3] = False  # a row that is masked as a whole
    loss = grpo_loss(
        logprobs, old, advantages, mask, ref_logprobs=ref, kl_coef=kl_coef,
        **options(loss_type, level),
    )  # fmt: skip
    lists = [x.tolist() for x in (logprobs, old, ref, advantages)]
    expected = naive_loss(*lists, mask, loss_type, level, kl_coef)
    assert loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_gradient_equals_finite_differences(loss_type, level):
    """Of cispo the gradient is that of log-probs with the weight held fixed, by design."""
    old, ref = numbers(1, 0.3), numbers(2, 0.3)
    x = numbers(0, 0.3).requires_grad_()

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        return grpo_loss(
            logprobs, old, numbers(3)[0], MASK, ref_logprobs=ref, kl_coef=0.3,
            **options(loss_type, level),
        )  # fmt: skip

    if loss_type != "cispo":
        assert torch.autograd.gradcheck(loss, (x,))
        return
    weight = importance_ratio(x, old, MASK, level).clamp(max=1.1).detach()
    surrogate = -(weight * numbers(3)[0][:, None] * x)
    total = ((surrogate + 0.3 * kl_estimate(x, ref, "k3")) * MASK).sum() / MASK.sum()
    ours, expected = torch.autograd.grad(loss(x), x)[0], torch.autograd.grad(total, x)[0]
    assert torch.allclose(ours, expected) and expected.abs().max() > 0.01


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_shares_of_micro_batches_add_up_to_the_gradient_of_the_whole(
    size, loss_type, level, kl_coef
):
    """Every loss type, with ragged rows (huggingface/trl#2617, #6024)."""
    old, ref, x = numbers(1).repeat(2, 1), numbers(2).repeat(2, 1), numbers(0).repeat(2, 1)
    mask, advantages = torch.cat([MASK, MASK.flip(0)]), torch.linspace(-2, 2, 8).double()

    def gradient(micro_batches: list[slice]) -> torch.Tensor:
        logprobs = x.clone().requires_grad_()
        for rows in micro_batches:
            grpo_loss(
                logprobs[rows], old[rows], advantages[rows], mask[rows], ref_logprobs=ref[rows],
                kl_coef=kl_coef, num_rows=8, num_tokens=mask.sum(), **options(loss_type, level),
            ).backward()  # fmt: skip
        return logprobs.grad

    logprobs = x.clone().requires_grad_()
    whole = grpo_loss(
        logprobs, old, advantages, mask, ref_logprobs=ref, kl_coef=kl_coef,
        **options(loss_type, level),
    )  # fmt: skip
    whole.backward()
    parts = gradient([slice(start, start + size) for start in range(0, 8, size)])
    assert torch.allclose(parts, logprobs.grad, atol=1e-12) and parts.abs().max() > 1e-3


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_padding_changes_neither_loss_nor_gradient_even_where_it_holds_nan(loss_type, level):
    def run(extra: int, garbage: float) -> tuple[float, torch.Tensor]:
        def pad(x: torch.Tensor, value: float = garbage) -> torch.Tensor:
            return torch.cat([x.masked_fill(~MASK, value), torch.full((4, extra), value)], dim=1)

        logprobs = pad(numbers(0)).requires_grad_()
        mask = torch.cat([MASK, torch.zeros(4, extra).bool()], dim=1)
        loss = grpo_loss(
            logprobs, pad(numbers(1)), numbers(3)[0], mask, ref_logprobs=pad(numbers(2)),
            kl_coef=0.3, **options(loss_type, level),
        )  # fmt: skip
        loss.backward()
        return loss.item(), logprobs.grad

    plain, gradient = run(0, 0.0)
    assert (gradient[~MASK] == 0).all()
    for garbage in (7.0, 1e4, nan):
        loss, other = run(3, garbage)
        assert loss == pytest.approx(plain) and torch.equal(other[:, :4], gradient)
        assert (other[:, 4:] == 0).all()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_rows_without_a_token_give_a_finite_loss_and_no_gradient(loss_type):
    logprobs = numbers(0).requires_grad_()
    loss = grpo_loss(logprobs, numbers(1), torch.ones(4), torch.zeros(4, 4), **options(loss_type))
    loss.backward()
    assert loss.item() == 0 and (logprobs.grad == 0).all()


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "slope"),
    [
        (1.0, 1.5, -1.28, 0.0),  # good, already likelier by more than the upper range
        (1.0, 1.25, -1.25, -1.25),  # within it: clip-higher lets it go on, 0.2 would not
        (1.0, 0.5, -0.5, -0.5),
        (-1.0, 1.5, 1.5, 1.5),  # bad, and likelier: full gradient
        (-1.0, 0.5, 0.8, 0.0),  # bad, already less likely by more than the lower range
    ],
)
def test_the_upper_clip_is_its_own(advantage, ratio, loss, slope):
    logprobs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    value = grpo_loss(
        logprobs, torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1),
        clip_range=0.2, clip_range_high=0.28,
    )  # fmt: skip
    value.backward()
    assert value.item() == pytest.approx(loss)
    assert logprobs.grad.item() == pytest.approx(slope)


def test_the_upper_clip_is_the_lower_one_if_not_given():
    args = numbers(0), numbers(1), numbers(3)[0], MASK
    assert grpo_loss(*args, clip_range=0.1) == grpo_loss(*args, clip_range=0.1, clip_range_high=0.1)
    assert grpo_loss(*args, clip_range=0.1) != grpo_loss(*args, clip_range=0.1, clip_range_high=0.2)


def test_cispo_bounds_the_weight_of_a_token_and_drops_the_gradient_of_none():
    logprobs = torch.tensor([[math.log(0.9), math.log(0.01)]], requires_grad=True)
    old = torch.tensor([[math.log(0.1), math.log(0.9)]])
    args = torch.ones(1), torch.ones(1, 2)
    grpo_loss(logprobs, old, *args, clip_range=0.2, clip_range_high=5, loss_type="cispo").backward()
    assert logprobs.grad.tolist()[0] == pytest.approx([-5 / 2, -0.01 / 0.9 / 2])


def test_a_twice_as_long_completion_weighs_the_same_in_grpo_and_twice_in_dr_grpo_and_dapo():
    """A "Dr. GRPO" that still divides by each length is the commonest mistake."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    weights = {}
    for loss_type in ("grpo", "dr_grpo", "dapo"):
        logprobs = torch.zeros(2, 4, requires_grad=True)
        grpo_loss(logprobs, torch.zeros(2, 4), torch.ones(2), mask, **options(loss_type)).backward()
        long, short = logprobs.grad.sum(1).tolist()
        weights[loss_type] = long / short
    assert weights == pytest.approx({"grpo": 1, "dr_grpo": 2, "dapo": 2})


def test_the_ratio_of_a_sequence_is_the_geometric_mean_over_its_real_tokens():
    logprobs, old = numbers(0), numbers(1)
    ratio = importance_ratio(logprobs, old, MASK, "sequence")
    d = logprobs - old
    assert ratio[0, :3].tolist() == pytest.approx([math.exp((d[0, :3].sum() / 3).item())] * 3)
    assert ratio[1, 0].item() == pytest.approx(math.exp(d[1, 0].item()))
    assert (ratio[~MASK] == 1).all()


def test_a_mistaken_call_is_refused_by_name():
    args = numbers(0), numbers(1), numbers(3)[0], MASK
    with pytest.raises(ValueError, match="unknown loss_type 'ppo'"):
        grpo_loss(*args, clip_range=0.2, loss_type="ppo")
    with pytest.raises(ValueError, match="unknown importance_sampling_level 'row'"):
        grpo_loss(*args, clip_range=0.2, importance_sampling_level="row")
    with pytest.raises(ValueError, match="dr_grpo needs max_new_tokens"):
        grpo_loss(*args, clip_range=0.2, loss_type="dr_grpo")


def test_no_function_changes_its_inputs():
    inputs = [numbers(0), numbers(1), numbers(2), numbers(3)[0].clone(), MASK.clone()]
    before = [x.clone() for x in inputs]
    logprobs, old, ref, advantages, mask = inputs
    group_advantages(advantages, 2)
    for loss_type in LOSS_TYPES:
        grpo_loss(
            logprobs, old, advantages, mask, ref_logprobs=ref, kl_coef=1.0, **options(loss_type)
        )
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


# --- The loop ---


def test_truncated_completions_are_masked_in_the_loss_but_count_in_the_baseline(
    make_job, monkeypatch
):
    job, calls, groups = make_job(grpo), [], []
    loss, advantages = grpo.grpo_loss, grpo.group_advantages

    def spy(logprobs, old, advantages, mask, **kwargs):
        calls.append((mask, kwargs["num_rows"], int(kwargs["num_tokens"])))
        return loss(logprobs, old, advantages, mask, **kwargs)

    monkeypatch.setattr(grpo, "grpo_loss", spy)
    monkeypatch.setattr(
        grpo, "group_advantages", lambda r, *args: groups.append(r) or advantages(r, *args)
    )
    flags = {"temperature": 3.0, "completions": 24, "micro_batch_size": 24}
    plain = job(**flags)[0]
    masked = job(mask_truncated_completions="true", **flags)[0]
    (mask, rows, tokens), (kept, rows_kept, tokens_kept) = calls
    truncated = ~kept.any(dim=1)
    assert masked["length/truncated_frac"] == pytest.approx(truncated.float().mean().item())
    assert 0 < truncated.sum() < 24 and torch.equal(kept[~truncated], mask[~truncated])
    assert rows == rows_kept == 24
    assert tokens == mask.sum() and tokens_kept == kept.sum() < tokens
    assert torch.equal(*groups) and masked["objective/scores"] == plain["objective/scores"]
    assert masked["length/mean"] == plain["length/mean"]  # only the loss is masked


def test_clip_range_high_is_clip_range_unless_given_and_5_for_cispo(make_job):
    import json

    job = make_job(grpo)
    for flags, high in (({"clip_range": 0.3}, 0.3), ({"loss_type": "cispo"}, 5.0)):
        job(**flags)
        assert json.loads((job.folder / "config.json").read_text())["clip_range_high"] == high
    job(clip_range_high=0.28, loss_type="dapo")
    assert json.loads((job.folder / "config.json").read_text())["clip_range_high"] == 0.28
    with pytest.raises(InputError, match=r"--clip_range_high 0\.28: for loss_type cispo"):
        job(clip_range_high=0.28, loss_type="cispo")
    with pytest.raises(InputError, match=r"--clip_range_high 0\.0: must be greater than 0"):
        job(clip_range_high=0)
