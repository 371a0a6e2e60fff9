"""benchmarks/gpu.py without a GPU: kernels are counted, and nothing that is measured is lost. The
first picture of the README.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import gpu


@pytest.mark.parametrize(("name", "token", "update"), [("gpt2", 64, 172), ("qwen", 103, 300)])
def test_the_kernels_of_a_token_and_of_a_micro_batch_are_bounded(name, token, update):
    found = gpu.count(gpu.model_of(name, narrow=True, layers=2))
    assert 20 < found["graph"] <= token and found["eager"] <= 7
    assert 100 < found["micro_batch"] <= update


def test_a_case_that_takes_too_long_is_ended_with_its_children_and_its_records_are_kept(tmp_path):
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


@pytest.mark.slow
def test_the_first_picture_is_drawn_from_a_run_for_light_and_dark_pages(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    import picture

    (tmp_path / "docs").mkdir()
    group = [{"prompt": "4+3=", "tokens": ["7", "<eos>"], "advantages": x} for x in (-1.5, 0, 0.5)]
    lines = [json.dumps(line | {"step": step}) for step in (0, 5, 10) for line in group]
    (tmp_path / "tokens.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(picture, "REPOSITORY", tmp_path)
    monkeypatch.setattr(sys, "argv", ["picture.py", str(tmp_path), "0", "5", "10"])
    picture.main()
    light, dark = ((tmp_path / "docs" / f"first-{x}.png").read_bytes() for x in ("light", "dark"))
    assert light != dark and max(len(light), len(dark)) < 300_000
