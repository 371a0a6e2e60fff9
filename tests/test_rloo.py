"""RLOO: its baseline and its loss, against their definitions written out in Python."""

import math
import statistics

import pytest
import torch

import rloo
from plumbing.errors import InputError
from rloo import rloo_advantages, rloo_loss

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]).bool()
nan = math.nan


def numbers(seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(4, 4, generator=generator, dtype=torch.float64)


# --- Advantages ---


def naive_advantages(rewards: list[float], group_size: int) -> list[float]:
    advantages = []
    for i, reward in enumerate(rewards):
        start = i // group_size * group_size
        others = [rewards[j] for j in range(start, start + group_size) if j != i]
        others = [r for r in others if not math.isnan(r)]
        known = not math.isnan(reward) and others
        advantages.append(reward - sum(others) / len(others) if known else 0.0)
    return advantages


def test_the_baseline_is_the_mean_of_the_other_completions_of_the_prompt():
    rewards = [1.0, 2, 4, 3, 3, 3, 0, nan, 5, nan, nan, 1, nan, nan, nan, 7, 7, 9]
    ours = rloo_advantages(torch.tensor(rewards, dtype=torch.float64), 3)
    assert ours.tolist() == pytest.approx(naive_advantages(rewards, 3))


@pytest.mark.parametrize("group_size", [2, 4, 7])
def test_it_is_g_over_g_minus_1_times_the_distance_from_the_mean_of_the_group(group_size):
    rewards = torch.linspace(-3, 9, 4 * group_size, dtype=torch.float64) ** 2
    groups = rewards.view(4, group_size)
    expected = (groups - groups.mean(1, keepdim=True)) * group_size / (group_size - 1)
    assert torch.allclose(rloo_advantages(rewards, group_size), expected.flatten())


@pytest.mark.parametrize("group_size", [2, 3, 8, 12, 16])
def test_a_group_of_equal_rewards_gets_exactly_0_whatever_the_rounding(group_size):
    for reward in (0.0, 0.1, 0.3, 0.7, 1.1, 1e-6, -1e-6, 0.1e6, 1e6, -1e6):
        rewards = torch.full((2 * group_size,), reward)
        rewards[group_size + 1] += 1
        for normalize in (False, True):
            advantages = rloo_advantages(rewards, group_size, normalize)
            assert (advantages[:group_size] == 0).all() and (advantages[group_size:] != 0).all()
        missing = rewards.clone()
        missing[0] = nan  # one that is missing doesn't make the others differ
        assert (rloo_advantages(missing, group_size)[:group_size] == 0).all()
        constant = torch.full((group_size,), reward, dtype=torch.bfloat16)
        assert (rloo_advantages(constant, group_size) == 0).all()


@pytest.mark.parametrize("normalize", [False, True])
def test_equal_rewards_of_float64_get_no_more_than_its_rounding(normalize):
    for reward in (0.1, 1 / 3, 1e6 / 7):
        rewards = torch.full((24,), reward, dtype=torch.float64)
        advantages = rloo_advantages(rewards, 12, normalize)
        assert advantages.abs().max() <= 1e-11 * max(1, reward)


@pytest.mark.parametrize("normalize", [False, True])
def test_advantages_are_at_least_float32_and_float64_where_the_rewards_are(normalize):
    rewards = [1, 2, 4, 3, 3, 3, 0, 8, 5]
    expected = naive_advantages(list(map(float, rewards)), 3)
    std = statistics.stdev(expected) + 1e-4
    expected = [a / std for a in expected] if normalize else expected
    float32, float64 = torch.float32, torch.float64
    dtypes = {torch.int64: float32, torch.int32: float32, torch.bfloat16: float32}
    dtypes |= {torch.float16: float32, float32: float32, float64: float64}
    for dtype, result in dtypes.items():
        ours = rloo_advantages(torch.tensor(rewards, dtype=dtype), 3, normalize)
        assert ours.dtype == result
        tolerance = 1e-12 if result == float64 else 1e-6
        assert ours.tolist() == pytest.approx(expected, rel=tolerance, abs=tolerance), dtype


def test_a_missing_reward_and_the_only_known_one_of_a_group_get_exactly_0():
    rewards = torch.tensor([nan, 5.0, nan, 1.0, nan, 3.0, nan, nan, nan])
    for normalize in (False, True):
        ours = rloo_advantages(rewards, 3, normalize)
        assert ours[[0, 1, 2, 4, 6, 7, 8]].tolist() == [0] * 7
        assert ours[3] == -ours[5] != 0


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="a group needs 2 or more"):
        rloo_advantages(torch.ones(3), 1)


def test_normalised_advantages_have_mean_0_and_std_1_over_those_that_are_known():
    rewards = torch.tensor([1.0, 2, nan, 5, -3, 4, 7, 7, 7])
    known = ~rewards.isnan()
    result = rloo_advantages(rewards, 3, normalize=True)
    assert result[~known].tolist() == [0] and result[6:].tolist() == [0, 0, 0]
    assert result[known].mean().item() == pytest.approx(0, abs=1e-6)
    assert result[known].std().item() == pytest.approx(1, abs=1e-4)


def test_normalising_divides_by_the_std_plus_1e_4_of_those_that_were_compared_with_others():
    """Not of the missing ones, nor of the only known one of a group."""
    rewards = [1.0, 2, 4, 3, 3, 3, 0, nan, 5, nan, nan, nan, 7, 7, 9, nan, 8, nan]
    plain = naive_advantages(rewards, 3)
    std = statistics.stdev([*plain[:7], plain[8], *plain[12:15]])
    ours = rloo_advantages(torch.tensor(rewards, dtype=torch.float64), 3, normalize=True)
    assert ours.tolist() == pytest.approx([a / (std + 1e-4) for a in plain], abs=1e-12)


@pytest.mark.filterwarnings("ignore:std")  # of one number there is none
@pytest.mark.parametrize("num_known", [0, 1, 4])
def test_normalising_what_is_constant_gives_0_and_no_nan(num_known):
    rewards = torch.full((4,), 0.1).masked_fill(torch.arange(4) >= num_known, nan)
    for group_size in (2, 4):
        assert (rloo_advantages(rewards, group_size, normalize=True) == 0).all()


# --- Loss ---


def naive_loss(logprobs, old, advantages, mask, clip: float) -> tuple[float, list[bool]]:
    """(loss, the completions where the clip decides)"""
    losses, clipped = [], []
    for i, a in enumerate(advantages):
        ratio = math.exp(sum(logprobs[i][t] - old[i][t] for t in range(4) if mask[i, t]))
        losses.append(-min(ratio * a, min(max(ratio, 1 - clip), 1 + clip) * a))
        clipped.append((a > 0 and ratio > 1 + clip) or (a < 0 and ratio < 1 - clip))
    return sum(losses) / len(losses), clipped


def test_the_loss_equals_its_definition_and_a_completion_is_clipped_as_one_action():
    logprobs, old = numbers(0, 0.3), numbers(1, 0.3)
    mask = MASK.clone()
    mask[3] = False  # a row that is masked as a whole
    seen = set()
    for advantages in ([1.0, -1.0, -0.5, 2.0], [-1.0, 1.0, 0.5, -2.0], [0.0, 0.0, -0.5, 0.0]):
        advantages = torch.tensor(advantages, dtype=torch.float64)
        ours, clipped = rloo_loss(logprobs, old, advantages, mask, clip_range=0.2)
        lists = logprobs.tolist(), old.tolist(), advantages.tolist()
        expected, expected_clipped = naive_loss(*lists, mask, 0.2)
        assert ours.item() == pytest.approx(expected, rel=1e-12)
        assert clipped.dtype == torch.bool and clipped.tolist() == expected_clipped
        seen |= {(a > 0, c) for a, c in zip(lists[2], expected_clipped, strict=True)}
    assert len(seen) == 4, "either sign of the advantage, with and without the clip"


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "slope"),  # clipped: where the slope is 0
    [
        (1.0, 1.5, -1.2, 0.0),  # good, already likelier by more than the range: no gradient
        (1.0, 0.5, -0.5, -0.5),
        (-1.0, 1.5, 1.5, 1.5),  # bad, and likelier: full gradient; a minimum would stop it
        (-1.0, 0.5, 0.8, 0.0),
        (1.0, 1.1, -1.1, -1.1),
        (-1.0, 0.9, 0.9, 0.9),
    ],
)
def test_the_clip_is_of_the_whole_completion(advantage, ratio, loss, slope):
    half = math.log(ratio) / 2  # two tokens share the log-ratio
    logprobs = torch.full((1, 2), half, dtype=torch.float64, requires_grad=True)
    value, clipped = rloo_loss(
        logprobs, torch.zeros(1, 2), torch.tensor([advantage]), torch.ones(1, 2), clip_range=0.2
    )
    value.backward()
    assert value.item() == pytest.approx(loss)
    assert logprobs.grad.tolist()[0] == pytest.approx([slope, slope])
    assert clipped.tolist() == [slope == 0]


def test_on_policy_the_gradient_is_that_of_plain_reinforce():
    x = numbers(0).requires_grad_()
    advantages = numbers(3)[0]
    loss, clipped = rloo_loss(x, x.detach(), advantages, MASK, clip_range=0.2)
    loss.backward()
    assert not clipped.any()
    y = numbers(0).requires_grad_()
    (-advantages * (y * MASK).sum(1)).mean().backward()
    assert torch.allclose(x.grad, y.grad)


def test_the_gradient_equals_finite_differences():
    x, old, advantages = numbers(0, 0.1).requires_grad_(), numbers(1, 0.1), numbers(3)[0]
    assert torch.autograd.gradcheck(
        lambda x: rloo_loss(x, old, advantages, MASK, clip_range=0.2)[0], (x,)
    )


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_shares_of_micro_batches_add_up_to_the_gradient_of_the_whole(size):
    old, x = numbers(1, 0.2).repeat(2, 1), numbers(0, 0.2).repeat(2, 1)
    mask, advantages = torch.cat([MASK, MASK.flip(0)]), torch.linspace(-2, 2, 8).double()
    whole, parts = (x.clone().requires_grad_() for _ in range(2))
    loss, clipped = rloo_loss(whole, old, advantages, mask, clip_range=0.2)
    loss.backward()
    for start in range(0, 8, size):
        rows = slice(start, start + size)
        share, part = rloo_loss(
            parts[rows], old[rows], advantages[rows], mask[rows], clip_range=0.2, num_rows=8
        )
        share.backward()
        assert torch.equal(part, clipped[rows])
    assert torch.allclose(parts.grad, whole.grad, atol=1e-12) and whole.grad.abs().max() > 1e-3


def test_padding_changes_no_loss_no_gradient_and_no_clip_even_where_it_holds_nan():
    plain = numbers(0, 0.3).masked_fill(~MASK, 0).requires_grad_()
    expected, clipped = rloo_loss(plain, numbers(1, 0.3), numbers(3)[0], MASK, clip_range=0.2)
    expected.backward()
    for garbage in (7.0, 1e4, nan):
        logprobs = numbers(0, 0.3).masked_fill(~MASK, garbage).requires_grad_()
        old = numbers(1, 0.3).masked_fill(~MASK, -garbage)
        loss, also = rloo_loss(logprobs, old, numbers(3)[0], MASK, clip_range=0.2)
        loss.backward()
        assert loss.item() == expected.item() and torch.equal(logprobs.grad, plain.grad)
        assert torch.equal(also, clipped)


@pytest.mark.parametrize(("advantage", "loss", "slope"), [(1.0, -1.2, 0.0), (0.0, 0.0, 0.0)])
@pytest.mark.parametrize("length", [1, 512])
def test_a_ratio_that_overflows_exp_gives_no_nan_where_the_clip_stops_the_gradient(
    length, advantage, loss, slope
):
    """By one bad token, or by many that are a little off: log-ratio 102.4."""
    logprobs = torch.zeros(1, 512, requires_grad=True)
    old = torch.zeros(1, 512)
    old[:, :length] = -102.4 / length
    args = torch.tensor([advantage]), torch.ones(1, 512)
    value, clipped = rloo_loss(logprobs, old, *args, clip_range=0.2)
    value.backward()
    assert value.item() == pytest.approx(loss) and (logprobs.grad == slope).all()
    assert clipped.tolist() == [advantage > 0]
    logprobs.grad = None
    worst, clipped = rloo_loss(logprobs, old, -torch.ones(1), torch.ones(1, 512), clip_range=0.2)
    worst.backward()
    assert math.exp(19) < worst.item() < math.inf and not clipped.any()
    assert (logprobs.grad > math.exp(19)).all(), "where it hurts the gradient stays"


def test_the_options_of_the_loss_are_given_by_name_and_its_tensors_may_be():
    names = "logprobs old_logprobs advantages mask".split()
    args = numbers(0), numbers(1), numbers(3)[0], MASK
    by_name, _ = rloo_loss(**dict(zip(names, args)), clip_range=0.2)
    assert by_name == rloo_loss(*args, clip_range=0.2)[0]
    with pytest.raises(TypeError, match="positional"):
        rloo_loss(*args, 0.2)


def test_no_function_changes_its_inputs():
    inputs = [numbers(0), numbers(1), numbers(3)[0].clone(), MASK.clone()]
    before = [x.clone() for x in inputs]
    rloo_loss(*inputs, clip_range=0.2)
    rloo_advantages(inputs[2], 2, normalize=True)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


# --- The loop ---


def test_the_score_is_clipped_before_the_kl_is_taken_off(make_job, monkeypatch):
    """At the second step, where the KL is not 0."""
    job, seen, kls = make_job(rloo), [], []
    original, estimate = rloo.rloo_advantages, rloo.kl_estimate

    def keep_kl(logprobs, ref_logprobs, estimator):
        assert estimator == "k1"
        kls.append(estimate(logprobs, ref_logprobs, estimator))
        return kls[-1]

    monkeypatch.setattr(
        rloo, "rloo_advantages", lambda r, *args: seen.append(r) or original(r, *args)
    )
    monkeypatch.setattr(rloo, "kl_estimate", keep_kl)
    args = ["--overwrite", f"--model={job.model}", f"--output_dir={job.folder}", "--num_steps=2"]
    args += ["--prompts_per_step=3", "--max_new_tokens=6", "--num_eval_prompts=2", "--kl_coef=2"]
    args += [f"--reward={job.folder.parent}/reward.py:spread", "--learning_rate=0.01"]
    args += ["--temperature=0.7", "--bf16=false", "--record_tokens=false"]
    rloo.main([*args, "--reward_clip_range", "-1", "2"])
    kl = kls[1].sum(1)
    assert kl.abs().max() > 0.5
    scores = seen[1] + 2 * kl
    assert scores.min().item() == pytest.approx(-1, abs=1e-5)
    assert scores.max().item() == pytest.approx(2, abs=1e-5)
    assert (seen[1] < -1).any()  # so the KL was not clipped with it


@pytest.mark.parametrize("bounds", [["1"], ["2", "1"], ["1", "2", "3"]])
def test_a_mistaken_clip_range_of_the_reward_is_refused(bounds):
    with pytest.raises(InputError, match="give the lowest and the highest reward"):
        rloo.main(["--reward_clip_range", *bounds])
