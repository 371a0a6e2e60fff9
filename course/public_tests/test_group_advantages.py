import torch

from grpo import group_advantages


def test_a_group_by_hand():
    found = group_advantages(torch.tensor([1.0, 2.0, 3.0, 5.0, 5.0, 5.0]), 3)
    assert torch.allclose(found, torch.tensor([-1.0, 0, 1, 0, 0, 0]), atol=1e-3)


def test_without_scaling():
    found = group_advantages(torch.tensor([1.0, 2.0, 3.0, 6.0]), 2, "none")
    assert torch.allclose(found, torch.tensor([-0.5, 0.5, -1.5, 1.5]))
