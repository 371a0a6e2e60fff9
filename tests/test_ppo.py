"""PPO's rewards and losses. test_by_hand.py has its loop."""

import math

import pytest
import torch
from small import near

from ppo import policy_loss, shape_rewards, value_loss

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])


@pytest.mark.problem("shape_rewards", 2)
def test_padding_and_a_row_without_tokens_get_no_reward():
    kl = torch.arange(16.0).reshape(4, 4).masked_fill(MASK == 0, torch.nan)
    rewards = shape_rewards(torch.tensor([10.0, 20, 30, 40]), kl, MASK, kl_coef=0.5)
    expected = [[0, -0.5, 9, 0], [18, 0, 0, 0], [-4, -4.5, -5, 24.5], [0, 0, 0, 0]]
    hint = "0 * NaN is NaN: fill, don't multiply; the last row is empty: it has no last token"
    near(rewards, expected, hint)


CLIP_CASES = {  # advantage, ratio, loss, slope; clipped where the slope is 0
    "near": [
        (1.0, 1.5, -1.2, 0.0),  # good, already likelier by more than the range: no gradient
        (1.0, 0.5, -0.5, -0.5),  # good, but less likely: full gradient
        (-1.0, 1.5, 1.5, 1.5),  # bad, and likelier: full gradient; a minimum would stop it
        (-1.0, 0.5, 0.8, 0.0),  # bad, already less likely by more than the range: no gradient
        (1.0, 1.1, -1.1, -1.1),
        (-1.0, 0.9, 0.9, 0.9),
    ],
    "huge": [(-1.0, math.exp(102), math.exp(20), math.exp(20))],  # bounded, and still pushed back
}


@pytest.mark.problem("policy_loss", 3, "near")
@pytest.mark.problem("policy_loss", 1, "huge")
@pytest.mark.parametrize("size", CLIP_CASES)
def test_the_clip_stops_gradients_where_moving_on_pays(size):
    """And there the token counts as clipped; the loss is the larger of two."""
    for advantage, ratio, loss, slope in CLIP_CASES[size]:
        old = torch.tensor([[-0.7]], dtype=torch.float64)
        logprobs = (old + math.log(ratio)).requires_grad_()
        found, _, clipped = policy_loss(logprobs, old, torch.tensor([[advantage]]), 0.2)
        case = f"advantage {advantage}, ratio {ratio:.3g}"
        assert found.tolist() == [[pytest.approx(loss)]], case
        assert clipped.tolist() == [[slope == 0]], f"{case}: does the clip decide?"
        assert found.requires_grad, "no gradient gets through: is something detached?"
        found.sum().backward()  # d ratio / d logprob = ratio
        assert logprobs.grad.item() == pytest.approx(slope), f"{case}: another gradient"


@pytest.mark.problem("value_loss", 1)
def test_the_value_loss_is_half_the_squared_error():
    loss, _ = value_loss(torch.tensor([[0.1, 0.0]]), torch.zeros(1, 2), torch.ones(1, 2), 0.2)
    assert loss.tolist() == [pytest.approx([0.405, 0.5])], "errors of 0.9 and 1"


# Value and return less the old value; the loss over the loss without a clip; the slope, which is 0
# where the clip decides.
VALUE_CASES = [
    (0.1, 1.0, 1.0, 1.0),  # inside the range: plain squared error
    (0.5, 1.0, 0.64 / 0.25, 0.0),  # moved too far towards the return: clipped, no gradient
    (-0.5, 1.0, 1.0, 1.0),  # moved away from the return: the larger, unclipped error
    (-0.5, -1.0, 0.64 / 0.25, 0.0),
    (0.5, 0.1, 1.0, 1.0),
]


@pytest.mark.problem("value_loss", 3)
@pytest.mark.parametrize(("value", "ret", "share", "slope"), VALUE_CASES)
def test_of_two_squared_errors_the_larger_counts(value, ret, share, slope):
    found = []
    for clip_range in (0.2, 1e6):
        values = torch.tensor([[0.7 + value]], requires_grad=True)
        old, returns = torch.tensor([[0.7]]), torch.tensor([[0.7 + ret]])
        loss, clipped = value_loss(values, old, returns, clip_range)
        assert loss.requires_grad, "no gradient gets through: is something detached?"
        gradient = torch.autograd.grad(loss.sum(), values)[0]
        found.append((loss.item(), gradient.item(), clipped.tolist()))
    (loss, gradient, clipped), (free, full, _) = found
    assert loss == pytest.approx(share * free), "of two squared errors the larger counts"
    assert gradient == pytest.approx(slope * full), "another gradient"
    assert clipped == [[slope == 0]], "does the clip decide?"
    assert full * (value - ret) > 0, "an error grows with the distance from the return"


def test_no_value_counts_as_clipped_by_rounding():
    """old + (new - old) isn't new in float32: half of all tokens would count as clipped."""
    generator = torch.Generator().manual_seed(0)
    old, returns = torch.randn(2, 100, 10, generator=generator)
    old, values = 0.05 * old, 0.05 * torch.rand(100, 10, generator=generator)
    loss, clipped = value_loss(values, old, returns, 0.2)
    assert torch.equal(loss, value_loss(values, old, returns, 1e6)[0]) and not clipped.any()
