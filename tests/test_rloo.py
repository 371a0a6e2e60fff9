"""RLOO's loss, against its definition written out in Python. test_grpo.py has its advantages,
test_by_hand.py its loop.
"""

import math

import pytest
import torch
from small import UNEVEN as MASK
from small import numbers

from rloo import rloo_loss

nan = math.nan


def naive_loss(logprobs, old, advantages, mask, clip: float) -> tuple[float, list[bool]]:
    """(loss, the completions where the clip decides)"""
    losses, clipped = [], []
    for i, a in enumerate(advantages):
        ratio = math.exp(sum(logprobs[i][t] - old[i][t] for t in range(4) if mask[i, t]))
        losses.append(-min(ratio * a, min(max(ratio, 1 - clip), 1 + clip) * a))
        clipped.append((a > 0 and ratio > 1 + clip) or (a < 0 and ratio < 1 - clip))
    return sum(losses) / len(losses), clipped


@pytest.mark.problem("rloo_loss", 2)
def test_the_loss_equals_its_definition_and_a_completion_is_clipped_as_one_action():
    """Padding holds NaN, and no input is changed."""
    mask = MASK.clone()
    mask[3] = False  # a row that is masked as a whole
    logprobs, old = (numbers(i, 0.3).masked_fill(~mask, nan) for i in range(2))
    seen = set()
    for advantages in ([1.0, -1.0, -0.5, 2.0], [-1.0, 1.0, 0.5, -2.0], [0.0, 0.0, -0.5, 0.0]):
        inputs = logprobs, old, torch.tensor(advantages, dtype=torch.float64), mask
        before = [x.clone() for x in inputs]
        ours, clipped = rloo_loss(*inputs, clip_range=0.2)
        expected, stopped = naive_loss(logprobs.tolist(), old.tolist(), advantages, mask, 0.2)
        assert ours.item() == pytest.approx(expected, rel=1e-6)
        assert clipped.dtype == torch.bool and clipped.tolist() == stopped
        seen |= {(a > 0, c) for a, c in zip(advantages, stopped, strict=True)}
        assert all(torch.equal(x.nan_to_num(9), y.nan_to_num(9)) for x, y in zip(inputs, before))
    assert len(seen) == 4, "either sign of the advantage, with and without the clip"


@pytest.mark.problem("rloo_loss", 1)
@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "slope"),  # clipped: where the slope is 0
    [
        (1.0, 1.5, -1.2, 0.0),  # good, already likelier by more than the range: no gradient
        (1.0, 0.5, -0.5, -0.5),
        (-1.0, 1.5, 1.5, 1.5),  # bad, and likelier: full gradient; a minimum would stop it
        (-1.0, 0.5, 0.8, 0.0),
        (1.0, 1.0, -1.0, -1.0),  # on policy: the gradient of plain REINFORCE
    ],
)
def test_the_clip_is_of_the_whole_completion(advantage, ratio, loss, slope):
    half = math.log(ratio) / 2  # two tokens share the log-ratio; the third is padding
    logprobs = torch.tensor([[half, half, nan]], dtype=torch.float64, requires_grad=True)
    args = logprobs, torch.zeros(1, 3), torch.tensor([advantage]), torch.tensor([[1, 1, 0]])
    value, clipped = rloo_loss(*args, clip_range=0.2)
    value.backward()
    assert value.item() == pytest.approx(loss)
    assert logprobs.grad.tolist()[0] == pytest.approx([slope, slope, 0])
    assert clipped.tolist() == [slope == 0]


@pytest.mark.problem("rloo_loss", 1)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_shares_of_micro_batches_add_up_to_the_gradient_of_the_whole(size):
    old, x = numbers(1, 0.2).repeat(2, 1), numbers(0, 0.2).repeat(2, 1)
    mask, A = torch.cat([MASK, MASK.flip(0)]), torch.linspace(-2, 2, 8).double()
    whole, parts = (x.clone().requires_grad_() for _ in range(2))
    loss, clipped = rloo_loss(whole, old, A, mask, clip_range=0.2)
    loss.backward()
    for start in range(0, 8, size):
        r = slice(start, start + size)
        share, part = rloo_loss(parts[r], old[r], A[r], mask[r], clip_range=0.2, num_rows=8)
        share.backward()
        assert torch.equal(part, clipped[r])
    assert torch.allclose(parts.grad, whole.grad, atol=1e-12) and whole.grad.abs().max() > 1e-3


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("length", [1, 512])
def test_a_ratio_that_overflows_exp_gives_no_nan_and_a_bad_completion_keeps_its_gradient(
    length, advantage
):
    """By one bad token, or by many that are a little off: log-ratio 102.4."""
    logprobs, old = torch.zeros(1, 512, requires_grad=True), torch.zeros(1, 512)
    old[:, :length] = -102.4 / length
    args = torch.tensor([advantage]), torch.ones(1, 512)
    value, clipped = rloo_loss(logprobs, old, *args, clip_range=0.2)
    value.backward()
    assert clipped.tolist() == [advantage > 0]
    if advantage < 0:
        assert math.exp(19) < value.item() < math.inf and (logprobs.grad > math.exp(19)).all()
    else:
        assert value.item() == pytest.approx(-1.2 * advantage) and (logprobs.grad == 0).all()
