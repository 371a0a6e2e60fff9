"""RLOO's loss where rows are masked, and where a ratio overflows. test_taught.py has its values,
test_grpo.py its advantages and the shares of micro-batches, test_by_hand.py its loop.
"""

import math

import pytest
import torch
from small import numbers

from rloo import rloo_loss


@pytest.mark.problem("rloo_loss", 1)
def test_padding_and_huge_ratios_do_no_harm():
    lengths = torch.tensor([3, 1, 4, 0])
    mask = torch.arange(4) < lengths[:, None]
    old = numbers(0).masked_fill(~mask, math.nan)
    of_each_token = torch.tensor([0.1 / 3, 0.2, 100.0, 0.0], dtype=torch.float64)
    new = (old + of_each_token[:, None]).requires_grad_()
    inputs = new, old, torch.tensor([1.0, 2.0, -3.0, -1.0], dtype=torch.float64), mask
    before = [x.clone() for x in inputs]
    loss, _, clipped = rloo_loss(*inputs, clip_range=0.2)
    assert loss.isfinite(), (
        "NaN at padding, and 0 * NaN is NaN? exp of 400? policy_ratio is bounded"
    )
    # Ratios 1.1052 and 1.2214, where the clip decides, one of exp(20), and that of no token, 1.
    expected = [-1.105171, -2.4, 3 * math.exp(20), 1.0]
    assert 4 * loss.item() == pytest.approx(sum(expected))
    assert clipped.tolist() == [False, True, False, False]
    gradient = torch.autograd.grad(loss, new)[0]
    assert not gradient[~mask].any(), "a gradient at padding"
    assert gradient[0, 0].item() == pytest.approx(-1.105171 / 4)
    assert all(torch.equal(x.nan_to_num(9), y.nan_to_num(9)) for x, y in zip(inputs, before))
    of_numbers, _, _ = rloo_loss(*inputs[:3], mask.long(), clip_range=0.2)
    assert torch.equal(of_numbers, loss), "a mask of 0 and 1"
