"""RLOO's loss, against its definition written out in Python. test_grpo.py has its advantages,
test_by_hand.py its loop.
"""

import math

import pytest
import torch
from small import UNEVEN as MASK
from small import numbers

from rloo import rloo_loss


@pytest.mark.problem("rloo_loss", 2)
def test_loss_and_gradient_equal_their_definition_and_a_completion_is_clipped_as_one_action():
    """Padding holds NaN, a row is masked as a whole, and no input is changed."""
    mask = MASK.clone()
    mask[3] = False
    x, old = (numbers(i, 0.3).masked_fill(~mask, math.nan).requires_grad_() for i in range(2))
    seen = set()
    for advantages in ([1.0, -1.0, -0.5, 2.0], [-1.0, 1.0, 0.5, -2.0], [0.0, 0.0, -0.5, 0.0]):
        inputs = x, old, torch.tensor(advantages, dtype=torch.float64), mask
        before = [y.clone() for y in inputs]
        loss, _, clipped = rloo_loss(*inputs, clip_range=0.2)
        losses, stopped = [], []
        for i, a in enumerate(advantages):
            ratio = (x[i, mask[i]] - old[i, mask[i]]).sum().exp()
            losses.append(-torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a))
            stopped.append(bool((a > 0 and ratio > 1.2) or (a < 0 and ratio < 0.8)))
        expected = sum(losses) / 4
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        ours, theirs = (torch.autograd.grad(y, x)[0] for y in (loss, expected))
        assert torch.allclose(ours, theirs, atol=1e-12) and not ours[~mask].any()
        assert clipped.dtype == torch.bool and clipped.tolist() == stopped
        seen |= {(a > 0, c) for a, c in zip(advantages, stopped, strict=True)}
        assert all(torch.equal(y.nan_to_num(9), w.nan_to_num(9)) for y, w in zip(inputs, before))
    assert len(seen) == 4, "either sign of the advantage, with and without the clip"


@pytest.mark.problem("rloo_loss", 1)
def test_a_huge_ratio_is_bounded_and_the_loss_finite():
    x, mask = numbers(0) + 400, MASK.long()  # of numbers, as a tokenizer's
    loss, _, _ = rloo_loss(x, numbers(1), numbers(2)[0], mask, clip_range=0.2)
    assert loss.isfinite(), "policy_ratio?"
