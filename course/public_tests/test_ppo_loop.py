import json

import ppo


def test_a_step_of_ppo_runs_and_moves_the_policy(tmp_path, monkeypatch):
    monkeypatch.setattr("plumbing.runs.draw", lambda *_: None)  # takes longer than the run
    flags = "--num_steps 2 --prompts_per_step 16 --num_eval_prompts 4 --num_mini_batches 1"
    ppo.main([*flags.split(), "--output_dir", str(tmp_path / "run")])
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert abs(lines[0]["objective/kl"]) < 1e-6 < abs(lines[1]["objective/kl"])
    assert lines[0]["val/ratio_max_dev_first"] < 1e-4
