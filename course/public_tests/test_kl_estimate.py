import pytest
import torch

from common import kl_estimate

POLICY, REFERENCE = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", [0.5, -1.0]), ("k2", [0.125, 0.5]), ("k3", [0.106531, 0.718282])],
)
def test_two_tokens_by_hand(estimator, expected):
    assert torch.allclose(kl_estimate(POLICY, REFERENCE, estimator), torch.tensor([expected]))


def test_a_policy_that_is_the_reference_has_a_kl_of_0():
    for estimator in ("k1", "k2", "k3"):
        assert (kl_estimate(POLICY, POLICY, estimator) == 0).all()
