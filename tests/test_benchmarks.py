"""The operations that a GPU would do, counted: a change that adds many is seen without a GPU. And
benchmarks/gpu.py loses nothing that it has measured.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import GPT2Config, Qwen2Config

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import count
import gpu

GPT2 = GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=20011)
QWEN = Qwen2Config(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=20011,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "of_token", "of_update"),
    [pytest.param(GPT2, 67, 429, id="gpt2"), pytest.param(QWEN, 104, 786, id="qwen2")],
)
def test_kernels_and_bytes_of_a_token_and_of_a_micro_batch_are_bounded(config, of_token, of_update):
    found = count.count(config)
    assert 10 * config.num_hidden_layers < found["graph"] <= of_token
    assert found["draw"] <= 28 and found["eager"] <= 2
    assert found["draw_bytes"] <= 22
    assert found["scored_bytes"] <= 20 and found["trained_bytes"] <= 91
    assert found["micro_batch"] <= of_update


@pytest.mark.parametrize("flags", count.UPDATES)
def test_the_estimate_of_an_update_is_what_fake_tensors_count(flags):
    counted, estimated = count.memory_of_update(QWEN, flags)
    assert estimated == pytest.approx(counted, rel=0.15)


def test_a_part_that_takes_too_long_is_ended_with_its_children_and_its_records_are_kept():
    kept, begun = [], time.perf_counter()
    script = """echo '{"row": 1}'; sleep 86398 & echo '{"row": 2}'; wait"""
    fault = gpu.in_own_process(1.0, ["sh", "-c", script], kept.append)
    assert fault == "not done within 1 seconds" and time.perf_counter() - begun < 60
    assert kept == [{"row": 1}, {"row": 2}]
    left = subprocess.run(["pgrep", "-f", "^sleep 86398"], capture_output=True, text=True)
    assert not left.stdout
    assert gpu.in_own_process(60.0, ["sh", "-c", "exit 3"], kept.append) == "exit code 3"
    assert gpu.in_own_process(60.0, ["true"], kept.append) == ""


def test_a_measurement_that_fails_leaves_its_error_and_the_next_one_follows(monkeypatch, capsys):
    def part(path, sizes):
        yield "a", "x", lambda: 1 / 0
        yield "b", "x", lambda: 2

    monkeypatch.setitem(gpu.PARTS, "part", (part, 1))
    monkeypatch.setattr(sys, "__stdout__", sys.stdout)
    gpu.run_part("part", "", gpu.REHEARSAL)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["error"].startswith("a, x: ZeroDivisionError")
    assert lines[1] == {"row": "b", "found": {"x": 2}}
    assert sum(limit for _, limit in gpu.PARTS.values()) - 1 <= 8 * 60
