import torch

from common import completion_mask


def test_up_to_and_including_the_first_eos():
    found = completion_mask(torch.tensor([[5, 9, 7], [5, 6, 7]]), [9])
    assert found.tolist() == [[True, True, False], [True, True, True]]
