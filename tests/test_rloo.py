"""RLOO's loss, against its definition written out in Python. test_grpo.py has its advantages,
test_by_hand.py its loop.
"""

import math

import pytest
import torch
from small import UNEVEN as MASK
from small import numbers

from rloo import rloo_loss


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
    logprobs, old = (numbers(i, 0.3).masked_fill(~mask, math.nan) for i in range(2))
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
        (-1.0, math.exp(102), math.exp(20), math.exp(20)),  # bounded, and still pushed back
    ],
)
def test_the_clip_is_of_the_whole_completion(advantage, ratio, loss, slope):
    half = math.log(ratio) / 2  # two tokens share the log-ratio; the third is padding
    logprobs = torch.tensor([[half, half, math.nan]], dtype=torch.float64, requires_grad=True)
    args = logprobs, torch.zeros(1, 3), torch.tensor([advantage]), torch.tensor([[1, 1, 0]])
    value, clipped = rloo_loss(*args, clip_range=0.2)
    value.backward()
    assert value.item() == pytest.approx(loss)
    assert logprobs.grad.tolist()[0] == pytest.approx([slope, slope, 0])
    assert clipped.tolist() == [slope == 0]
