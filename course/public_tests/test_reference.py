import torch

from common import reference
from plumbing.loading import load_policy


def test_without_a_kl_there_is_none():
    with reference(load_policy("tiny"), 0.0) as model:
        assert model is None


def test_it_stays_as_it_was_while_the_policy_trains():
    policy, tokens = load_policy("tiny"), torch.tensor([[1, 2, 3]])
    before = policy(tokens).logits
    ref = reference(policy, 0.1)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.1)
        with ref as model:
            assert torch.allclose(model(tokens).logits, before, atol=1e-5)
