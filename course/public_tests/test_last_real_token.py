import torch

from plumbing.reward_models import last_real_token

X = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])


def test_padded_on_the_right():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert last_real_token(X, mask).tolist() == [2.0, 6.0]


def test_padded_on_the_left_with_a_vector_for_each_token():
    mask = torch.tensor([[False, True, True], [True, True, True]])
    vectors = torch.stack([X, -X], 2)
    assert last_real_token(vectors, mask).tolist() == [[3.0, -3.0], [6.0, -6.0]]
