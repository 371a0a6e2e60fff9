"""GRPO: its advantages and its losses, against their definitions written out in Python."""

import math
import statistics

import pytest
import torch

import grpo
from common import importance_ratio, kl_estimate, masked_mean
from grpo import group_advantages, grpo_loss
from plumbing.errors import InputError

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
    for reward in (0.0, 0.1, 0.3, 0.7, 1.1, 1e-6, -1e-6, 0.1e6, 1e6, -1e6):
        rewards = torch.full((2 * group_size,), reward)
        rewards[group_size + 1] += 1
        advantages = group_advantages(rewards, group_size, scale)
        assert (advantages[:group_size] == 0).all() and (advantages[group_size:] != 0).any()
        rewards[0] = nan  # one that is missing doesn't make the others differ
        assert (group_advantages(rewards, group_size, scale)[:group_size] == 0).all()
        constant = torch.full((group_size,), reward, dtype=torch.bfloat16)
        assert (group_advantages(constant, group_size, scale) == 0).all()


def test_rewards_that_are_equal_but_for_rounding_stay_near_0():
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3000001, 0.3], dtype=torch.float64)
    assert group_advantages(rewards, 4).abs().max() < 1e-2


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_of_float64_get_no_more_than_its_rounding(scale):
    for reward in (0.1, 1 / 3, 1e6 / 7):
        rewards = torch.full((24,), reward, dtype=torch.float64)
        assert group_advantages(rewards, 12, scale).abs().max() <= 1e-11 * max(1, reward)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_at_least_float32_and_float64_where_the_rewards_are(scale):
    rewards = [1, 2, 4, 3, 3, 3, 0, 8, 5]
    expected = naive_advantages(list(map(float, rewards)), 3, scale)
    float32, float64 = torch.float32, torch.float64
    dtypes = {torch.int64: float32, torch.int32: float32, torch.bfloat16: float32}
    dtypes |= {torch.float16: float32, float32: float32, float64: float64}
    for dtype, result in dtypes.items():
        ours = group_advantages(torch.tensor(rewards, dtype=dtype), 3, scale)
        assert ours.dtype == result
        tolerance = 1e-12 if result == float64 else 1e-6
        assert ours.tolist() == pytest.approx(expected, rel=tolerance, abs=tolerance), dtype


@pytest.mark.filterwarnings("ignore:std")  # of one number there is none
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_missing_reward_and_the_only_known_one_of_a_group_get_exactly_0(scale):
    rewards = torch.tensor([nan, 5.0, nan, 1.0, nan, 3.0, nan, nan, nan])
    ours = group_advantages(rewards, 3, scale)
    assert ours[[0, 1, 2, 4, 6, 7, 8]].tolist() == [0] * 7
    assert ours[3] == -ours[5] != 0
    for known in (rewards[6:], torch.tensor([nan, 7.0, nan])):  # of all rewards one or none
        assert group_advantages(known, 3, scale).tolist() == [0] * 3


def test_the_group_is_the_consecutive_rows_of_one_prompt():
    assert (group_advantages(torch.arange(6.0).repeat_interleave(4), 4) == 0).all()
    assert (group_advantages(torch.arange(6.0).repeat(4), 4) != 0).any()


def test_a_group_of_one_and_an_unknown_scale_are_refused():
    with pytest.raises(ValueError, match="a group needs 2 or more"):
        group_advantages(torch.ones(3), 1)
    with pytest.raises(ValueError, match="choose group, batch or none"):
        group_advantages(torch.ones(4), 2, "std")


# --- Loss ---


def naive_loss(logprobs, old, ref, advantages, mask, loss_type, level, kl_coef):
    """Token by token, in Python: (loss, the tokens where the clip decides). The clip is 0.2 below
    and 0.3 above, the bound of cispo 1.1."""
    rows, clipped = [], []
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
                stopped = ratio > 1.1 and a != 0
            else:
                value = -min(ratio * a, min(max(ratio, 0.8), 1.3) * a)
                stopped = (a > 0 and ratio > 1.3) or (a < 0 and ratio < 0.8)
            clipped += [(i, t)] if stopped else []
            r = math.exp(ref[i][t] - logprobs[i][t])
            row.append(value + kl_coef * (r - 1 - math.log(r)))
        rows.append(row)
    if loss_type == "grpo":
        return sum(sum(row) / max(1, len(row)) for row in rows) / len(rows), clipped
    count = len(rows) * 4 if loss_type == "dr_grpo" else sum(map(len, rows))
    return sum(map(sum, rows)) / count, clipped


def options(loss_type: str, level: str = "token") -> dict:
    return {
        "clip_range": 0.2, "clip_range_high": 0.3, "cispo_bound": 1.1, "loss_type": loss_type,
        "max_new_tokens": 4, "importance_sampling_level": level,
    }  # fmt: skip


@pytest.mark.parametrize("kl_coef", [0.0, 0.4])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_loss_equals_its_definition_token_by_token_and_so_do_the_tokens_clipped(
    loss_type, level, kl_coef
):
    logprobs, old, ref = numbers(0, 0.5) - 2, numbers(1, 0.5) - 2, numbers(2, 0.5) - 2
    mask = MASK.clone()
    mask[3] = False  # a row that is masked as a whole
    for advantages in ([1.0, -1.0, -0.5, 2.0], [-1.0, 1.0, 0.5, -2.0], [-1.0, 0.0, 0.5, 0.0]):
        advantages = torch.tensor(advantages, dtype=torch.float64)
        loss, clipped = grpo_loss(
            logprobs, old, advantages, mask, ref_logprobs=ref, kl_coef=kl_coef,
            **options(loss_type, level),
        )  # fmt: skip
        lists = [x.tolist() for x in (logprobs, old, ref, advantages)]
        expected, stopped = naive_loss(*lists, mask, loss_type, level, kl_coef)
        assert loss.item() == pytest.approx(expected, rel=1e-12)
        assert clipped.dtype == torch.bool and clipped.shape == mask.shape
        assert clipped.nonzero().tolist() == [list(where) for where in stopped]


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
        )[0]  # fmt: skip

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
            loss, part = grpo_loss(
                logprobs[rows], old[rows], advantages[rows], mask[rows], ref_logprobs=ref[rows],
                kl_coef=kl_coef, num_rows=8, num_tokens=mask.sum(), **options(loss_type, level),
            )  # fmt: skip
            loss.backward()
            assert torch.equal(part, clipped[rows])
        return logprobs.grad

    logprobs = x.clone().requires_grad_()
    whole, clipped = grpo_loss(
        logprobs, old, advantages, mask, ref_logprobs=ref, kl_coef=kl_coef,
        **options(loss_type, level),
    )  # fmt: skip
    whole.backward()
    parts = gradient([slice(start, start + size) for start in range(0, 8, size)])
    assert torch.allclose(parts, logprobs.grad, atol=1e-12) and parts.abs().max() > 1e-3


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_padding_changes_no_loss_no_gradient_and_no_clip_even_where_it_holds_nan(loss_type, level):
    def run(extra: int, garbage: float) -> tuple[float, torch.Tensor, torch.Tensor]:
        def pad(x: torch.Tensor, value: float = garbage) -> torch.Tensor:
            return torch.cat([x.masked_fill(~MASK, value), torch.full((4, extra), value)], dim=1)

        logprobs = pad(numbers(0)).requires_grad_()
        mask = torch.cat([MASK, torch.zeros(4, extra).bool()], dim=1)
        loss, clipped = grpo_loss(
            logprobs, pad(numbers(1)), numbers(3)[0], mask, ref_logprobs=pad(numbers(2)),
            kl_coef=0.3, **options(loss_type, level),
        )  # fmt: skip
        loss.backward()
        return loss.item(), logprobs.grad, clipped

    plain, gradient, clipped = run(0, 0.0)
    assert (gradient[~MASK] == 0).all() and clipped.any() and not clipped[~MASK].any()
    for garbage in (7.0, 1e4, nan):
        loss, other, more = run(3, garbage)
        assert loss == pytest.approx(plain) and torch.equal(other[:, :4], gradient)
        assert (other[:, 4:] == 0).all()
        assert torch.equal(more[:, :4], clipped) and not more[:, 4:].any()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_rows_without_a_token_give_a_finite_loss_and_no_gradient(loss_type):
    logprobs = numbers(0).requires_grad_()
    mask = torch.zeros(4, 4)
    loss, clipped = grpo_loss(logprobs, numbers(1), torch.ones(4), mask, **options(loss_type))
    loss.backward()
    assert loss.item() == 0 and (logprobs.grad == 0).all() and not clipped.any()


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "slope"),  # clipped: where the slope is 0
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
    value, clipped = grpo_loss(
        logprobs, torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1),
        clip_range=0.2, clip_range_high=0.28,
    )  # fmt: skip
    value.backward()
    assert value.item() == pytest.approx(loss)
    assert logprobs.grad.item() == pytest.approx(slope)
    assert clipped.tolist() == [[slope == 0]]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_a_ratio_that_overflows_exp_gives_no_nan_and_a_bad_token_keeps_its_gradient(
    advantage, loss_type, level
):
    """exp(100) is infinite in float32: where the clip stops the gradient, 0 * inf would be NaN."""
    logprobs = torch.tensor([[0.0, 0.0], [-1.0, -1.1]], requires_grad=True)
    old = torch.tensor([[-100.0, -100.0], [-1.1, -1.0]])
    if level == "token":
        old[0, 1] = 0
    advantages, more = torch.tensor([advantage, 1.0]), options(loss_type, level)
    loss, clipped = grpo_loss(logprobs, old, advantages, torch.ones(2, 2), **more)
    loss.backward()
    assert loss.isfinite() and logprobs.grad.isfinite().all()
    assert (logprobs.grad[1] < 0).all(), "the other completion has lost its gradient"
    slope = logprobs.grad[0, 0].item()
    if loss_type == "cispo":  # the weight is bounded at 1.1, and no token loses its gradient
        assert slope == pytest.approx(-advantage * 1.1 / 4) and clipped[0, 0] == (advantage != 0)
    elif advantage < 0:
        assert slope > math.exp(19) / 8 and not clipped[0, 0]
    else:
        assert slope == 0 and clipped[0, 0] == (advantage > 0)


def test_the_upper_clip_is_the_lower_one_if_not_given():
    args = numbers(0), numbers(1), numbers(3)[0], MASK
    loss, clipped = grpo_loss(*args, clip_range=0.1)
    same, same_clipped = grpo_loss(*args, clip_range=0.1, clip_range_high=0.1)
    assert loss == same and torch.equal(clipped, same_clipped)
    other, fewer = grpo_loss(*args, clip_range=0.1, clip_range_high=0.5)
    assert loss != other and fewer.sum() < clipped.sum()


def test_cispo_bounds_the_weight_of_a_token_and_drops_the_gradient_of_none():
    """By cispo_bound alone, 5 by default: the range of the clip has no part in it."""
    old = torch.tensor([[math.log(0.1), math.log(0.9)]])
    for more, bound in (({}, 5), ({"cispo_bound": 3.0}, 3), ({"clip_range_high": 0.1}, 5)):
        for a in (1.0, -1.0):
            logprobs = torch.tensor([[math.log(0.9), math.log(0.01)]], requires_grad=True)
            args = torch.tensor([a]), torch.ones(1, 2)
            loss, clipped = grpo_loss(
                logprobs, old, *args, clip_range=0.2, loss_type="cispo", **more
            )
            loss.backward()
            expected = [-a * bound / 2, -a * 0.01 / 0.9 / 2]
            assert logprobs.grad.tolist()[0] == pytest.approx(expected)
            assert clipped.tolist() == [[True, False]], "bounded is bounded, whatever the sign"


def test_a_twice_as_long_completion_weighs_the_same_in_grpo_and_twice_in_dr_grpo_and_dapo():
    """A "Dr. GRPO" that still divides by each length is the commonest mistake."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    weights = {}
    for loss_type in ("grpo", "dr_grpo", "dapo"):
        logprobs = torch.zeros(2, 4, requires_grad=True)
        args = logprobs, torch.zeros(2, 4), torch.ones(2), mask
        grpo_loss(*args, **options(loss_type))[0].backward()
        long, short = logprobs.grad.sum(1).tolist()
        weights[loss_type] = long / short
    assert weights == pytest.approx({"grpo": 1, "dr_grpo": 2, "dapo": 2})


def test_a_ratio_at_the_bound_of_cispo_is_not_bounded():
    zeros = torch.zeros(1, 2)
    args = zeros, zeros, torch.ones(1), torch.ones(1, 2)
    _, clipped = grpo_loss(*args, clip_range=0.2, loss_type="cispo", cispo_bound=1.0)
    assert not clipped.any()


@pytest.mark.parametrize("kl_coef", [0.5, 1.0, 2.0])
def test_the_kl_counts_kl_coef_times_and_without_kl_coef_not_at_all(kl_coef):
    args, ref = (numbers(0), numbers(1), numbers(3)[0], MASK), numbers(2)
    plain, _ = grpo_loss(*args, clip_range=0.2)
    same, _ = grpo_loss(*args, clip_range=0.2, ref_logprobs=ref)
    more, _ = grpo_loss(*args, clip_range=0.2, ref_logprobs=ref, kl_coef=kl_coef)
    kl = masked_mean(kl_estimate(numbers(0), ref, "k3"), MASK, dim=1).mean()
    assert same == plain
    assert (more - plain).item() == pytest.approx((kl_coef * kl).item())


def test_the_options_of_the_loss_are_given_by_name_and_its_tensors_may_be():
    names = "logprobs old_logprobs advantages mask".split()
    args = numbers(0), numbers(1), numbers(3)[0], MASK
    by_name, _ = grpo_loss(**dict(zip(names, args)), clip_range=0.2)
    assert by_name == grpo_loss(*args, clip_range=0.2)[0]
    with pytest.raises(TypeError, match="positional"):
        grpo_loss(*args, 0.2)


def test_a_mistaken_call_is_refused_by_name():
    args = numbers(0), numbers(1), numbers(3)[0], MASK
    with pytest.raises(ValueError, match="'ppo' is not grpo, dapo, cispo, or dr_grpo"):
        grpo_loss(*args, clip_range=0.2, loss_type="ppo")
    with pytest.raises(ValueError, match="unknown importance_sampling_level 'row'"):
        grpo_loss(*args, clip_range=0.2, importance_sampling_level="row")
    with pytest.raises(ValueError, match="dr_grpo with max_new_tokens"):
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


def test_clip_range_high_is_an_epsilon_and_cispo_has_a_bound_of_its_own(make_job):
    job = make_job(grpo)

    def update(**flags) -> tuple[float, float]:
        """Of two minibatches: with the second the ratio isn't 1 any more."""
        line = job(num_mini_batches=2, learning_rate=1e-2, completions=24, **flags)[0]
        return line["loss/policy_avg"], line["policy/clipfrac_avg"]

    by_default = update(clip_range=0.01)
    assert update(clip_range=0.01, clip_range_high=0.01) == by_default
    assert update(clip_range=0.01, clip_range_high=0.5) != by_default
    of_cispo = update(loss_type="cispo")
    assert update(loss_type="cispo", cispo_bound=5.0) == of_cispo
    assert update(loss_type="cispo", cispo_bound=1.01) != of_cispo
    with pytest.raises(InputError, match=r"--clip_range_high 0\.28: for loss_type cispo"):
        job(clip_range_high=0.28, loss_type="cispo")
    with pytest.raises(InputError, match=r"--cispo_bound 0\.9: must be 1 or greater"):
        job(cispo_bound=0.9, loss_type="cispo")
    with pytest.raises(InputError, match=r"--clip_range_high 0\.0: must be greater than 0"):
        job(clip_range_high=0)


def test_a_minibatch_whose_completions_are_all_cut_trains_nothing_even_with_an_entropy_bonus(
    make_job,
):
    job = make_job(grpo)
    flags = dict(mask_truncated_completions=True, max_new_tokens=1, entropy_coef=0.1, kl_coef=0)
    metrics = job(num_mini_batches=4, learning_rate=0.1, **flags)[0]
    assert metrics["length/truncated_frac"] == 1 and metrics["grad_norm"] == 0
