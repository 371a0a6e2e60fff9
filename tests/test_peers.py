"""The tests of others, run as they are on this project's functions, through the adapters in peers/.

  CS336_FOLDER=.../assignment5-alignment python -m pytest tests/test_peers.py

The folder is a clone of github.com/stanford-cs336/assignment5-alignment, of 2025. Its tests and
snapshots are not part of this repository: without it there is nothing to run.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Over an empty column the assignment's mean is NaN, ours 0 as in common.py.
OURS_IS_0 = "test_masked_mean_dim0"


@pytest.mark.slow
def test_cs336_assignment_5_of_2025(tmp_path):
    if not (folder := os.environ.get("CS336_FOLDER")):
        pytest.skip("CS336_FOLDER is not set: see the head of this file")
    shutil.copytree(Path(folder, "tests"), tmp_path / "tests")
    shutil.copy(TESTS / "peers" / "cs336_adapters.py", tmp_path / "tests" / "adapters.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rA"]
    command += ["tests/test_grpo.py", "tests/test_sft.py"]
    command += ["-k", "microbatch_train_step_grpo or compute or masked_mean"]
    environment = os.environ | {"PYTHONPATH": str(TESTS.parent)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    results = dict(
        (name, verdict)
        for verdict, name in re.findall(r"^(PASSED|FAILED|ERROR) \S+::(\w+)", done.stdout, re.M)
    )
    failed = {name for name, verdict in results.items() if verdict != "PASSED"}
    assert len(results) == 15 and failed == {OURS_IS_0}, done.stdout[-3000:]
