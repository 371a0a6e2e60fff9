import torch

from rloo import rloo_advantages


def test_a_group_by_hand():
    found = rloo_advantages(torch.tensor([1.0, 2.0, 6.0]), 3)
    assert torch.allclose(found, torch.tensor([-3.0, -1.5, 4.5]))
