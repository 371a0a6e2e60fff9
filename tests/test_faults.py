"""Each bad input and fault of faults.py gets one line, and loses nothing."""

import json
from pathlib import Path

import pytest
from faults import CASES, RUN, folder_of, line_of, run


@pytest.mark.parametrize("case", CASES, ids=[case.what for case in CASES])
def test_a_fault_gets_one_line_and_loses_nothing(case):
    with folder_of(case):
        line = line_of(case)
        if case.saved is None:
            return
        assert f"run is saved up to step {case.saved}, --resume goes on" in line
        steps = [json.loads(x)["step"] for x in Path("run/metrics.jsonl").read_text().splitlines()]
        assert steps == list(range(case.saved))
        # The cause is gone, and the run ends as if it had never been there.
        reward = Path("reward.py")
        reward.write_text(reward.read_text().replace("calls > 5", "calls > 500"))
        assert run(case.script, [*case.flags.split(), "--resume"]) == (0, [])
        flags = [*case.flags.split(), "--output_dir", "whole"]
        assert run(case.script, flags) == (0, [])
        weights = [Path(name, "model/model.safetensors").read_bytes() for name in ("run", "whole")]
        assert weights[0] == weights[1]


def test_there_are_at_least_45_of_them_and_no_two_alike():
    assert len({case.what for case in CASES}) == len(CASES) >= 45
    assert RUN in CASES[-10].flags or any(RUN in case.flags for case in CASES)
