import torch

from ppo import value_loss


def test_within_and_outside_of_the_clip():
    values, returns = torch.tensor([[0.1, 1.0, -1.0]]), torch.tensor([[2.0, 2.0, 2.0]])
    loss, clipped = value_loss(values, torch.zeros(1, 3), returns, clip_range_value=0.2)
    assert torch.allclose(loss, torch.tensor([[1.805, 1.62, 4.5]]))
    assert clipped.tolist() == [[False, True, False]]
