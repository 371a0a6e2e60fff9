"""RLOO's loss where rows are masked. test_taught.py has its values, test_grpo.py its advantages and
the shares of micro-batches, test_by_hand.py its loop.
"""

import math

import pytest
import torch
from small import numbers

from rloo import rloo_loss


@pytest.mark.problem("rloo_loss", 1)
def test_padding_and_rows_without_tokens_do_no_harm():
    lengths = torch.tensor([3, 1, 4, 0])
    mask = torch.arange(4) < lengths[:, None]
    x = numbers(0).masked_fill(~mask, math.nan).requires_grad_()
    inputs = x, torch.tensor([1.0, 2.0, -3.0, -1.0], dtype=torch.float64), mask
    before = [y.clone() for y in inputs]
    loss = rloo_loss(*inputs)
    assert loss.isfinite(), "NaN at padding, and 0 * NaN is NaN?"
    expected = [-a * row[:n].sum().item() for a, row, n in zip([1, 2, -3], x, lengths)]
    assert 4 * loss.item() == pytest.approx(sum(expected)), "the row without tokens adds 0"
    gradient = torch.autograd.grad(loss, x)[0]
    assert not gradient[~mask].any(), "a gradient at padding"
    assert gradient[0, 0].item() == -1 / 4, "the loss is right, the gradient isn't"
    unchanged = (torch.equal(x.nan_to_num(9), y.nan_to_num(9)) for x, y in zip(inputs, before))
    assert all(unchanged), "an input is changed"
    assert torch.equal(rloo_loss(*inputs[:2], mask.long()), loss), "a mask of 0 and 1"
