"""The operations that a GPU would do, counted: a change that adds many is seen without a GPU."""

import sys
from pathlib import Path

import pytest
from transformers import GPT2Config, Qwen2Config

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import count

GPT2 = GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=20011)
QWEN = Qwen2Config(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=20011,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "of_token", "of_update"),
    [pytest.param(GPT2, 68, 500, id="gpt2"), pytest.param(QWEN, 126, 900, id="qwen2")],
)
def test_kernels_and_bytes_of_a_token_and_of_a_micro_batch_are_bounded(config, of_token, of_update):
    found = count.count(config)
    assert 10 * config.num_hidden_layers < found["graph"] <= of_token
    assert found["draw"] < found["eager"] <= 47
    assert found["draw_bytes"] <= 51
    assert found["scored_bytes"] <= 62 and found["trained_bytes"] <= 150
    assert found["micro_batch"] <= of_update
