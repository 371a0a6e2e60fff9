import torch

from reward_model import preference_loss

CHOSEN, REJECTED = torch.tensor([1.0, 0.0, -2.0]), torch.tensor([1.0, 2.0, -4.0])


def test_the_loss_of_each_pair():
    found = preference_loss(CHOSEN, REJECTED)
    assert torch.allclose(found, torch.tensor([0.6931, 2.1269, 0.1269]), atol=1e-4)


def test_a_margin_and_centred_scores():
    found = preference_loss(CHOSEN, REJECTED, margin=torch.tensor([0.0, -2.0, 2.0]))
    assert torch.allclose(found, torch.full((3,), 0.6931), atol=1e-4)
    found = preference_loss(CHOSEN, REJECTED, center_rewards_coef=0.5)
    assert torch.allclose(found, torch.tensor([2.6931, 4.1269, 18.1269]), atol=1e-4)
