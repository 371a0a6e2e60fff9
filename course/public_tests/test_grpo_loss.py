import pytest
import torch

from grpo import grpo_loss

MASK = torch.tensor([[True, True, True, True], [True, False, False, False]])
ZEROS, A = torch.zeros(2, 4), torch.tensor([1.0, -2.0])


@pytest.mark.parametrize(
    ("loss_type", "expected"), [("grpo", 0.5), ("dapo", -0.4), ("dr_grpo", -0.2)]
)
def test_at_ratio_1_the_types_differ_by_their_averages(loss_type, expected):
    options = {"clip_range": 0.2, "loss_type": loss_type, "max_new_tokens": 5}
    loss, clipped = grpo_loss(ZEROS, ZEROS, A, MASK, **options)
    assert loss.item() == pytest.approx(expected)
    assert clipped.shape == MASK.shape and not clipped.any()
