"""benchmarks/gpu.py and memory.py without a GPU: kernels and bytes are counted, and nothing that is
measured is lost.
"""

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from plumbing import models

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import gpu
import memory


@pytest.mark.parametrize(("name", "token", "update"), [("gpt2", 64, 172), ("qwen", 103, 306)])
def test_a_token_and_a_micro_batch_cost_few_kernels(name, token, update):
    found = gpu.count(gpu.model_of(name, narrow=True, layers=2))
    assert 20 < found["graph"] <= token and found["eager"] <= 7
    assert 100 < found["micro_batch"] <= update


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "forward", "most", "peak"),
    [
        ("qwen", memory.our_pass, 62_400, 60),
        ("gpt2", memory.our_pass, 27_800, 26),
        ("qwen", memory.trl_pass, 69_600, 28),
    ],
)
def test_what_a_pass_saves_gives_measured_peaks(name, forward, most, peak):
    """The peaks are those of an H200, GB: docs/performance.md. There we had passes of 16,384 tokens
    and chunks of an eighth of the card, an MLP kept four wide tensors, and TRL had passes of 32
    rows.
    """
    if is_trl := forward is memory.trl_pass:
        pytest.importorskip("trl")
    with mock.patch.object(models, "GATED_MLPS", []):
        counted = memory.count(name, forward)
    assert 0.99 * most < counted["bytes"] <= most
    num_tokens, an_eighth = 32 * 307 if is_trl else 16384, int(150.1e9) // 160
    found = memory.peak_gb(name, counted, num_tokens, num_logits=an_eighth, is_trl=is_trl)
    assert found == pytest.approx(peak, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen", "qwen-1.5b"])
def test_an_update_takes_less_memory_than_trls(name):
    """GPT-2's takes more: the cache of its decoder stays, 3.6 GB."""
    pytest.importorskip("trl")
    ours, trl = (memory.count(name, forward) for forward in (memory.our_pass, memory.trl_pass))
    for num_models in (1, 2):
        theirs = memory.peak_gb(name, trl, num_models=num_models, is_trl=True)
        assert 0.9 * theirs < memory.peak_gb(name, ours, num_models=num_models) < theirs


def test_a_case_that_takes_too_long_is_ended(tmp_path):
    path, script = tmp_path / "records", "echo 1; sleep 60 & echo $! >&2; echo 2; wait"
    with path.open("a") as records:
        cases = [(["sh", "-c", script], 1.0), (["sh", "-c", "echo 3; exit 3"], 60)]
        cases += [(["sh", "-c", "kill $$"], 60), (["true"], 60)]
        faults = [gpu.run_case(*case, records, tmp_path / str(n)) for n, case in enumerate(cases)]
    assert faults == ["not done within 1 seconds", "exit code 3", "exit code -15", ""]
    assert path.read_text().split() == ["1", "2", "3"]
    child = (tmp_path / "0").read_text().strip()
    state = subprocess.run(["ps", "-o", "stat=", child], capture_output=True, text=True).stdout
    assert state.strip()[:1] in ("", "Z"), "nobody may have waited for it yet"


def test_a_page_has_the_table_of_its_runs():
    pytest.importorskip("matplotlib")
    import climb

    runs = json.loads(climb.RESULTS.read_text())
    assert set(map(len, runs.values())) == {5}, "seeds"
    assert climb.table(runs) in climb.PICTURE.with_name("climb.md").read_text(encoding="utf-8")
