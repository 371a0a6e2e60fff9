import torch

from common import gae

REWARDS = torch.tensor([[0.0, 1.0, 0.0]])
VALUES = torch.tensor([[0.5, 0.25, 7.0]])
MASK = torch.tensor([[True, True, False]])


def test_two_tokens_by_hand():
    advantages, returns = gae(REWARDS, VALUES, MASK, gamma=1.0, lam=0.5)
    # delta: 0 + 0.25 - 0.5 and 1 + 0 - 0.25
    assert torch.allclose(advantages, torch.tensor([[0.125, 0.75, 0.0]]))
    assert torch.allclose(returns, torch.tensor([[0.625, 1.0, 0.0]]))


def test_lambda_0_trusts_the_value_model_alone():
    advantages, _ = gae(REWARDS, VALUES, MASK, gamma=1.0, lam=0.0)
    assert torch.allclose(advantages, torch.tensor([[-0.25, 0.75, 0.0]]))
