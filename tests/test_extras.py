"""Options that are off by default: --oversample, what long completions get, --stop."""

import json
import time

import pytest
import torch
from small import byte_tokenizer, letter_tokenizer, lines_of, make_rollout, small_gpt2
from transformers import AutoModelForCausalLM

import grpo
import tasks
from grpo import overlong_penalty
from plumbing.decoder import sampling_options

# --- Groups that teach something: DAPO (arXiv 2503.14476) eq. 11 ---


def test_oversampling_keeps_first_the_groups_that_teach(make_job, tmp_path, monkeypatch):
    def flat_with_an_a(prompts, completions):
        calls.append(list(zip(prompts, completions)))
        return [float("a" not in prompt) * (i % 2) for i, prompt in enumerate(prompts)]

    calls, prompts = [], [f"{x}{y}" for x in "abcdeh" for y in ("", "a", "ba", "da", "ae", "abc")]
    monkeypatch.setitem(tasks.REWARDS, "mine", flat_with_an_a)
    (tmp_path / "some.jsonl").write_text("\n".join(json.dumps({"prompt": x}) for x in prompts))
    job = make_job(grpo)
    flags = {"prompts": tmp_path / "some.jsonl", "eval_prompts": None, "reward": "mine"}
    began = time.perf_counter()
    metrics = job(oversample=5, num_generations=2, **flags)[0]
    drawn = calls[2]  # after the two of the evaluation
    groups = [drawn[i : i + 2] for i in range(0, len(drawn), 2)]
    assert len(groups) == 4 * 5
    kept = sorted(groups, key=lambda group: "a" in group[0][0])[:4]
    samples = [x for x in lines_of(job.folder / "samples.jsonl") if x["split"] == "train"]
    found = [(x["prompt"], x["completion"], x["score"]) for x in samples[:8]]
    assert found == [(*x, float("a" not in x[0]) * i) for g in kept for i, x in enumerate(g)]
    assert metrics["reward/frac_flat_groups"] == 1 / 4 and metrics["episode"] == 40
    seconds = metrics["time/rollout"] + metrics["time/update"]  # its cost is of all that is drawn
    assert 0 < seconds < time.perf_counter() - began, "no longer than the whole run"
    num_tokens = sum(min(6, len(text) + 1) for _, text in drawn)
    assert metrics["tokens_per_second"] * seconds == pytest.approx(num_tokens)
    # What is trained on: tokens, prompts, padding and log-probs belong together.
    tokens = ["".join(line["tokens"]) for line in lines_of(job.folder / "tokens.jsonl")[:8]]
    assert [text.removesuffix("<eos>") for text in tokens] == [text for _, text, _ in found]
    assert metrics["val/sampler_kl"] < 1e-6


# --- The length penalty, eq. 13 ---


def test_the_length_penalty_is_equation_13_at_every_length(make_job, monkeypatch):
    """|y| <= L_max - L_cache: 0; then ((L_max - L_cache) - |y|) / L_cache."""
    mask = make_rollout([[1]] * 10, [[5] * n for n in range(1, 11)]).completion_mask
    expected = [0, 0, 0, 0, 0, 0, -0.25, -0.5, -0.75, -1]
    assert [overlong_penalty(row[None], 4).item() for row in mask] == pytest.approx(expected)
    assert overlong_penalty(mask, 0).tolist() == [0] * 10
    monkeypatch.setitem(tasks.REWARDS, "mine", lambda completions: [1.0] * len(completions))
    line = make_job(grpo)(reward="mine", overlong_buffer=6)[0]  # of 6 tokens each costs a sixth
    assert line["objective/scores"] == pytest.approx(1 - line["length/mean"] / 6)


# --- Several rewards ---


def test_each_of_several_rewards_has_its_mean(make_job, tmp_path):
    files = [f"{tmp_path}/reward.py:{name}" for name in ("share_of_a", "spread")]
    line = make_job(grpo)(reward=files, reward_weights=[2, 0.5])[0]
    parts = 2 * line["reward/share_of_a"] + 0.5 * line["reward/spread"]
    assert parts == pytest.approx(line["objective/scores"], rel=1e-5)


# --- How completions are drawn: --fp16, --stop ---


def test_flags_choose_the_half_precision_of_rollouts():
    flags = [(True, False, torch.float16), (False, True, torch.bfloat16), (False, False, None)]
    for fp16, bf16, half in flags:
        config = grpo.Config(fp16=fp16, bf16=bf16)
        assert sampling_options(config, small_gpt2(), byte_tokenizer())["decoder"].half == half


def test_a_stop_token_is_another_eos_everywhere(make_job, monkeypatch):
    """Strings stay in the text; a token doesn't, and whoever loads the saved model knows it."""

    def texts_of(completions):
        texts.extend(completions)
        return [len(text) for text in completions]

    texts = []
    monkeypatch.setitem(tasks.REWARDS, "mine", texts_of)
    job, tokenizer = make_job(grpo), letter_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["z"]})
    tokenizer.save_pretrained(job.model)
    job(reward="mine", completions=16, stop=["ww", "z", "y"], max_new_tokens=12)
    ends = {text[-2:] if text[-2:] == "ww" else text[-1:] for text in texts}
    assert {"ww", "y"} < ends and not any("<eos>" in text or "z" in text for text in texts)
    assert not any("y" in text[:-1] or "ww" in text[:-1] for text in texts)
    saved = AutoModelForCausalLM.from_pretrained(job.folder / "model").generation_config
    assert saved.eos_token_id == tokenizer.convert_tokens_to_ids(["z", "<eos>"])
    lines = lines_of(job.folder / "tokens.jsonl")
    assert any(x["finished"] and x["tokens"][-1] == "z" for x in lines), "it is drawn and trained"
