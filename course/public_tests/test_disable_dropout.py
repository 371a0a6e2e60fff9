import torch
from torch import nn

from common import disable_dropout


def test_dropout_modules_change_nothing_any_more():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
    assert disable_dropout(model) == 1
    x = torch.ones(3, 4)
    assert torch.equal(model(x), model(x))


def test_a_probability_that_is_an_attribute_is_set_to_0():
    class Attention(nn.Module):
        attention_dropout: float

        def __init__(self):
            super().__init__()
            self.attention_dropout = 0.5

    model = nn.Sequential(Attention())
    disable_dropout(model)
    assert model[0].attention_dropout == 0
