import torch

from common import token_logprobs


def test_equal_logits_give_equal_shares():
    found = token_logprobs(torch.zeros(1, 2, 4), torch.tensor([[0, 3]]))
    assert torch.allclose(found, torch.tensor([[-1.386294, -1.386294]]))


def test_the_token_is_the_one_that_was_given():
    logits = torch.tensor([[[0.0, 1.0, 2.0]]])
    assert torch.allclose(token_logprobs(logits, torch.tensor([[2]])), torch.tensor([[-0.407606]]))
    assert torch.allclose(token_logprobs(logits, torch.tensor([[0]])), torch.tensor([[-2.407606]]))
