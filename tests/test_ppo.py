"""PPO's rewards and losses. test_ppo_by_hand.py has its loop."""

import math

import pytest
import torch

import ppo
from plumbing.errors import InputError
from ppo import policy_loss, shape_rewards, value_loss


def test_the_score_sits_on_the_last_real_token_and_the_kl_on_every_one():
    """A row without a real token gets no reward, and what padding holds has no part in it."""
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    kl = torch.arange(16.0).reshape(4, 4).masked_fill(mask == 0, torch.nan)
    rewards = shape_rewards(torch.tensor([10.0, 20, 30, 40]), kl, mask, kl_coef=0.5)
    expected = [[0, -0.5, 10 - 1, 0], [20 - 2, 0, 0, 0], [-4, -4.5, -5, 30 - 5.5], [0, 0, 0, 0]]
    assert torch.allclose(rewards, torch.tensor(expected))


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "slope"),
    [
        (1.0, 1.5, -1.2, 0.0),  # good, already likelier by more than the range: no gradient
        (1.0, 0.5, -0.5, -0.5),  # good, but less likely: full gradient
        (-1.0, 1.5, 1.5, 1.5),  # bad, and likelier: full gradient; a minimum would stop it
        (-1.0, 0.5, 0.8, 0.0),  # bad, already less likely by more than the range: no gradient
        (1.0, 1.1, -1.1, -1.1),
        (-1.0, 0.9, 0.9, 0.9),
    ],
)
def test_the_clip_stops_the_gradient_only_where_moving_on_would_pay(advantage, ratio, loss, slope):
    logprobs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    value, clipped = policy_loss(logprobs, torch.zeros(1, 1), torch.tensor([[advantage]]), 0.2)
    value.sum().backward()
    assert value.item() == pytest.approx(loss)
    assert logprobs.grad.item() == pytest.approx(slope)  # d ratio / d logprob = ratio
    assert clipped.tolist() == [[slope == 0]], "counted as clipped where the clip doesn't decide?"


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_a_ratio_that_overflows_exp_gives_no_nan_and_a_bad_token_keeps_its_gradient(advantage):
    """exp(100) is infinite in float32: where the clip stops the gradient, 0 * inf would be NaN."""
    logprobs = torch.tensor([[100.0, 0.0]], requires_grad=True)
    advantages = torch.tensor([[advantage, 1.0]])
    loss, clipped = policy_loss(logprobs, torch.zeros(1, 2), advantages, 0.2)
    loss.sum().backward()
    assert loss.isfinite().all() and logprobs.grad.isfinite().all()
    assert (logprobs.grad[0, 0] > 0) == (advantage < 0) and logprobs.grad[0, 1] == -1
    assert clipped.tolist() == [[advantage > 0, False]]


@pytest.mark.parametrize(
    ("value", "ret", "loss", "slope"),
    [
        (0.1, 1.0, 0.405, -0.9),  # inside the range: plain squared error
        (0.5, 1.0, 0.32, 0.0),  # moved too far towards the return: clipped, no gradient
        (-0.5, 1.0, 1.125, -1.5),  # moved away from the return: the larger, unclipped error
        (-0.5, -1.0, 0.32, 0.0),
        (0.5, 0.0, 0.125, 0.5),
    ],
)
def test_the_value_loss_is_half_the_larger_of_two_squared_errors(value, ret, loss, slope):
    values = torch.tensor([[value]], requires_grad=True)
    result, clipped = value_loss(values, torch.zeros(1, 1), torch.tensor([[ret]]), 0.2)
    result.sum().backward()
    assert result.item() == pytest.approx(loss)
    assert values.grad.item() == pytest.approx(slope)
    assert clipped.tolist() == [[slope == 0]], "counted as clipped where the clip doesn't decide?"


def test_where_the_value_clip_does_not_bite_rounding_does_not_pass_for_it():
    """old + (new - old) isn't new in float32: half of all tokens would count as clipped."""
    generator = torch.Generator().manual_seed(0)
    old, returns = torch.randn(2, 100, 10, generator=generator)
    old, values = 0.05 * old, 0.05 * torch.rand(100, 10, generator=generator)
    loss, clipped = value_loss(values, old, returns, 0.2)
    assert torch.equal(loss, 0.5 * (values - returns) ** 2)
    assert not clipped.any()


def test_without_a_kl_the_score_is_the_reward_and_the_first_ratio_is_1(make_job):
    """By default nothing is taken off a completion without EOS, and dropout is off."""
    job = make_job(ppo)
    file = job.folder.parent / "half.py"
    file.write_text("def half(completions, **kw): return [0.5] * len(completions)\n")
    line = job(kl_coef=0, reward=f"{file}:half")[0]
    assert line["objective/scores"] == 0.5 and line["length/truncated_frac"] > 0
    assert line["val/ratio_max_dev_first"] < 1e-5


def test_a_reward_of_none_is_refused_since_ppo_has_no_group_to_leave_it_out_of(make_job):
    job = make_job(ppo)
    file = job.folder.parent / "none.py"
    file.write_text("def none(completions, **kw): return [None] * len(completions)\n")
    with pytest.raises(InputError, match="None"):
        job(reward=f"{file}:none")
