import json

import grpo


def test_two_steps_of_grpo_move_the_policy(tmp_path, monkeypatch):
    monkeypatch.setattr("plumbing.runs.draw", lambda *_: None)  # takes longer than the run
    flags = "--num_steps 2 --prompts_per_step 4 --num_generations 4 --num_eval_prompts 4"
    flags += " --warmup_steps 0 --kl_coef 0.1"
    grpo.main([*flags.split(), "--output_dir", str(tmp_path / "run")])
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert abs(lines[0]["objective/kl"]) < 1e-6 < lines[1]["objective/kl"]
    assert lines[0]["lr"] == 2 * lines[1]["lr"] and lines[0]["grad_norm"] > 0
