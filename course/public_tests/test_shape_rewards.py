import torch

from ppo import shape_rewards


def test_the_score_is_added_at_the_last_real_token():
    mask = torch.tensor([[True, True, False], [True, True, True]])
    kl = torch.tensor([[1.0, 2.0, 9.0], [1.0, 1.0, 1.0]])
    found = shape_rewards(torch.tensor([10.0, 20.0]), kl, mask, kl_coef=0.5)
    assert torch.allclose(found, torch.tensor([[-0.5, 9.0, 0.0], [-0.5, -0.5, 19.5]]))
