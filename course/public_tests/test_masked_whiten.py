import torch

from common import masked_whiten

X, MASK = torch.tensor([[1.0, 2.0, 3.0, 99.0]]), torch.tensor([[True, True, True, False]])


def test_three_numbers_by_hand():
    assert torch.allclose(masked_whiten(X, MASK), torch.tensor([[-1.0, 0.0, 1.0, 0.0]]))


def test_without_shifting_the_mean():
    found = masked_whiten(10 * X, MASK, shift_mean=False)
    assert torch.allclose(found, torch.tensor([[19.0, 20.0, 21.0, 0.0]]))
