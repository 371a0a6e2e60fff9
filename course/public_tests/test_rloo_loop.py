import json

import rloo


def test_a_step_of_rloo_runs_and_moves_the_policy(tmp_path, monkeypatch):
    monkeypatch.setattr("plumbing.runs.draw", lambda *_: None)  # takes longer than the run
    flags = "--num_steps 2 --prompts_per_step 4 --num_generations 4 --num_eval_prompts 4"
    rloo.main([*flags.split(), "--output_dir", str(tmp_path / "run")])
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert abs(lines[0]["objective/kl"]) < 1e-6 < abs(lines[1]["objective/kl"])
    assert lines[0]["grad_norm"] > 0
