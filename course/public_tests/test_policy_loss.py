import math

import torch

from ppo import policy_loss


def test_four_corners_of_the_clip():
    new = torch.tensor([[math.log(1.5), math.log(1.5), math.log(0.5), math.log(0.5)]])
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    loss, clipped = policy_loss(new, torch.zeros(1, 4), advantages, clip_range=0.2)
    assert torch.allclose(loss, torch.tensor([[-1.2, 1.5, -0.5, 0.8]]))
    assert clipped.tolist() == [[True, False, False, True]]
