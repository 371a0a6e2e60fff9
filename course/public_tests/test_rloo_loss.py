import math

import pytest
import torch

from rloo import rloo_loss


def test_the_ratio_is_the_product_over_the_tokens():
    new = torch.full((2, 2), math.log(1.5) / 2)
    mask = torch.tensor([[True, True], [True, False]])
    advantages = torch.tensor([1.0, -1.0])
    loss, clipped = rloo_loss(new, torch.zeros(2, 2), advantages, mask, clip_range=0.3)
    assert loss.item() == pytest.approx((-1.3 + math.sqrt(1.5)) / 2, abs=1e-6)
    assert clipped.tolist() == [True, False]
