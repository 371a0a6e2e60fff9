"""Whole runs of ppo.py, grpo.py and rloo.py on small models: what must hold for all three."""

import copy
import itertools
import math
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from small import ALGORITHMS, SCRIPTS, letter_tokenizer, lines_of, save_model
from transformers import AutoModelForCausalLM

import grpo
import plumbing.models
import ppo
import reward_model
import rloo
import sampling
from forward import completion_logprobs, rollout_logprobs
from plumbing.config import settings_of_run

REWARDS = """
def zero(completions, **columns):
    return [0] * len(completions)

def flat_for_short_prompts(prompts, completion_ids, **columns):
    return [len(p) > 1 and sum(i) % 7 - 3.0 for p, i in zip(prompts, completion_ids)]
"""
ONE_UPDATE = {"num_epochs": 1, "num_mini_batches": 1}


@pytest.fixture(params=ALGORITHMS.values(), ids=ALGORITHMS)
def job(request, make_job):
    return make_job(request.param)


def record_calls(monkeypatch, owner, name) -> list:
    spy = mock.Mock(wraps=getattr(owner, name))
    monkeypatch.setattr(owner, name, spy)
    return spy.call_args_list


def test_a_run_begins_with_kl_0_and_ratio_1(job):
    """In float32, at temperature 0.7, with dropout in the config and padding on both sides."""
    first = job(num_epochs=2, num_mini_batches=2, completions=16)[0]
    assert 0 < first["length/truncated_frac"] < 1, "no row ended early: nothing is padded"
    assert first["step"] == 0 and abs(first["objective/kl"]) < 1e-5
    name = "val/sampler_kl" if job.script is rloo else "val/ratio_max_dev_first"
    assert first[name] < 1e-5
    # A single update needs old log-probs then, which it does without where dropout is off.
    with_dropout = job(disable_dropout="false", **ONE_UPDATE)[0]
    assert with_dropout[name] > 1e-2, "with dropout two passes of the same weights differ"
    for line in lines_of(job.folder / "tokens.jsonl"):  # computed without dropout
        assert line["new_logprobs"] == pytest.approx(line["sampler_logprobs"], abs=0.05)


@pytest.mark.parametrize(
    ("job", "lora_r"), [(x, 2 * (x is grpo)) for x in ALGORITHMS.values()], indirect=["job"]
)
def test_the_kl_is_to_a_named_model(lora_r, job, monkeypatch):
    """It may be an adapter, and far away: nothing is wrong then, so nothing is warned of."""
    folder, base = job.folder.parent, AutoModelForCausalLM.from_pretrained(job.model)
    adapter = LoraConfig(lora_alpha=99, init_lora_weights=False, fan_in_fan_out=True)
    teacher = get_peft_model(copy.deepcopy(base), adapter)
    teacher = teacher if lora_r else teacher.merge_and_unload()
    save_model(folder / "teacher", teacher, letter_tokenizer())
    (folder / "reward.py").write_text(REWARDS)
    flags = {"reference": folder / "teacher", "kl_coef": 1, "lora_r": lora_r}
    calls = record_calls(monkeypatch, job.script, "rollout_logprobs")
    first = job(reward=f"{folder}/reward.py:zero", num_steps=5, **flags)[0]
    with torch.no_grad():
        rollout, models = calls[0].args[1], (base.eval(), teacher.eval())
        ours, theirs = (completion_logprobs(x, rollout, 0.7)[0] for x in models)
    kl = (ours - theirs).sum(1).mean().item()
    assert first["objective/kl"] == pytest.approx(kl, rel=1e-4) and kl > 10
    warnings = lines_of(job.folder / "warnings.jsonl")
    assert [x for x in warnings if "were cut" not in x["text"]] == []
    job(reward="brevity", **flags)
    assert "the KL is" in (job.folder / "warnings.jsonl").read_text(), "with a score it matters"


@pytest.mark.parametrize("job", [ppo], indirect=True)
def test_an_adapter_is_saved_alone_and_trained_further(job):
    flags = {"learning_rate": 1e-2, "num_steps": 2, "eval_every": 2}
    first = job(lora_r=4, **flags)
    adapter = (job.folder / "model").rename(job.folder.parent / "adapter")
    assert (adapter / "adapter_config.json").exists()
    assert not (adapter / "model.safetensors").exists()
    saved = torch.load(job.folder / "checkpoint.pt")["weights"]
    assert [name for name in saved if "lora" not in name and "value" not in name] == []
    second = job(model=adapter, **flags)
    assert second[0]["eval/reward"] == first[2]["eval/reward"] != first[0]["eval/reward"]
    assert abs(second[0]["objective/kl"]) < 1e-5 < abs(second[1]["objective/kl"])


@pytest.mark.parametrize("job", [ppo], indirect=True)
def test_the_seed_decides_the_weights_of_an_adapter(job):
    adapters = []
    for drawn_before in range(2):
        torch.manual_seed(drawn_before)
        job(lora_r=2, num_steps=1)
        adapters.append(load_file(job.folder / "model" / "adapter_model.safetensors"))
    for name, weights in adapters[0].items():
        assert torch.equal(weights, adapters[1][name]), name


@pytest.mark.parametrize(("kl_coef", "num_epochs"), [(0, 1), (0.1, 1), (0, 2)])
def test_a_step_computes_old_and_ref_log_probs_once(job, monkeypatch, kl_coef, num_epochs):
    """GRPO needs none of its own where one update follows a rollout."""
    if num_epochs == 1 and job.script is grpo:
        # Step 3 may round otherwise, in bfloat16: the ratio of an only update is 1 all the same.
        other = mock.Mock(side_effect=lambda *args: 1.01 * rollout_logprobs(*args))
        monkeypatch.setattr(job.script, "rollout_logprobs", other)
    names = ["rollout_logprobs"] + ["logprobs_and_entropy"] * (job.script is rloo)
    calls = [record_calls(monkeypatch, job.script, name) for name in names]
    # As many minibatches as epochs: their product is the number of updates, not their quotient.
    flags = {"num_epochs": num_epochs, "num_mini_batches": num_epochs, "kl_coef": kl_coef}
    line = job(learning_rate=1e-2, warmup_steps=0, **flags)[0]
    models = [id(call.args[0]) for call in itertools.chain(*calls)]
    needs_old = num_epochs == 2 or job.script is not grpo
    assert len(models) == len(set(models)) == needs_old + (kl_coef > 0)
    if job.script is not rloo:
        assert line["val/ratio_max_dev_first"] < 1e-5
        assert (line["policy/approxkl_avg"] > 1e-6) == (num_epochs == 2)
    assert line["grad_norm"] > 1e-3, "are the old ones a constant? Else the ratio has no gradient"


def test_training_draws_by_its_seed_and_evaluations_by_another(job, monkeypatch):
    calls = record_calls(monkeypatch, sampling, "generate")
    job(seed=3, num_eval_prompts=3)
    seeds = {(len(call.args[1]) == 3, call.kwargs["generator"].initial_seed()) for call in calls}
    assert seeds == {(False, 3), (True, 4)}


def test_in_bfloat16_the_weights_and_the_gradients_stay_float32(job, monkeypatch):
    clips = record_calls(monkeypatch, torch.nn.utils, "clip_grad_norm_")
    names = ["completion_logprobs", *["completion_values"] * (job.script is ppo)]
    calls = [record_calls(monkeypatch, job.script, name) for name in names]
    spread = record_calls(monkeypatch, plumbing.models, "spread_weights")
    flags = ONE_UPDATE | {"learning_rate": 1e-6, "kl_coef": 0.3}
    exact, rounded = (job(bf16=bf16, **flags)[0] for bf16 in (False, True))
    for each in calls:  # every forward pass of an update
        half = len(each) // 2
        assert half and [x.kwargs["bf16"] for x in each] == [False] * half + [True] * half
    assert rounded["policy/entropy_avg"] == pytest.approx(exact["policy/entropy_avg"], rel=0.1)
    assert rounded["policy/entropy_avg"] != exact["policy/entropy_avg"], "no autocast"
    assert rounded.get("val/ratio_max_dev_first", 0) < 0.05, "old log-probs of another forward?"
    assert [call.args[1] for call in spread] == [torch.bfloat16], "only the run that rounds"
    layers = [x for x in calls[0][-1].args[0].modules() if hasattr(x, "config")]
    assert {x.config._attn_implementation for x in layers} == {"eager"}, "slower on a CPU"
    before, after = map(AutoModelForCausalLM.from_pretrained, (job.model, job.folder / "model"))
    moved = [(p - q).abs().max() for p, q in zip(before.parameters(), after.parameters())]
    trained = [p.dtype for p in clips[1].args[0]]  # a gradient has the type of its weight
    assert {after.dtype, *trained} == {torch.float32}
    assert max(moved) > 1e-7, "a step of 1e-6 is lost where weights are bfloat16"


@pytest.mark.parametrize("job", [rloo], indirect=True)
def test_a_named_reference_is_spread_as_the_policy_is(job):
    """Where only the sampler rounds, the update sees it. In bfloat16 both round to the same."""
    assert job(reference=job.model, fp16=True, kl_coef=0.3)[0]["objective/kl"] == 0


def test_no_infinite_gradient_reaches_the_weights(job, monkeypatch, capsys):
    bad = math.inf if job.script is rloo else math.nan
    clip, factors = torch.nn.utils.clip_grad_norm_, iter([1.0, bad])
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *x: clip(*x) * next(factors))
    with pytest.raises(SystemExit):
        job.script.run_main(lambda: job(num_steps=3, **ONE_UPDATE))
    printed = capsys.readouterr().err
    assert "goes on from step 1" in printed and f"the gradient is {bad}: lower --learn" in printed


@pytest.mark.parametrize("job", [rloo], indirect=True)
def test_rows_without_advantage_are_left_out(job, monkeypatch):
    """Of the forward pass: test_by_hand.py has the gradient, to which they add nothing."""
    calls = record_calls(monkeypatch, rloo, "completion_logprobs")
    (file := job.folder.parent / "reward.py").write_text(REWARDS)
    # Of rows that are all alike one stays, for the optimiser.
    for reward, least, most in (("flat_for_short_prompts", 3, 13), ("zero", 1, 1)):
        line = job(reward=f"{file}:{reward}", completions=16, kl_coef=0)[0]
        assert least <= sum(len(call.args[1].tokens) for call in calls) <= most
        assert (line["grad_norm"] > 1e-3) == (most > 1)
        calls.clear()


@pytest.mark.problem("ppo_script", 4, "ppo")
@pytest.mark.problem("grpo_script", 4, "grpo")
@pytest.mark.problem("rloo_script", 4, "rloo")
@pytest.mark.problem("reward_script", 4, "reward_model")
@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_script_without_flags_trains_the_embedded_model(script, tmp_path):
    run = tmp_path / "run"
    num_eval = "num_eval_pairs" if script is reward_model else "num_eval_prompts"
    few = {"num_steps": 2, "eval_every": 2, num_eval: 8, "output_dir": str(run)}
    script.main([f"--{name}={x}" for name, x in few.items()])
    assert settings_of_run(run).items() >= (script.TINY | few).items()
    lines = lines_of(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2], "a line of metrics.jsonl for each step"
    assert lines[0]["grad_norm"] > 0, "the first update has a gradient"
    odd = {k for x in lines for k, v in x.items() if v is not None and not math.isfinite(v)}
    assert not odd, "metrics that are NaN or infinite"
    before, after = load_file("tiny/model.safetensors"), load_file(run / "model/model.safetensors")
    shared = before.keys() & after.keys()
    assert shared and [x for x in shared if torch.equal(before[x], after[x])] == [], (
        "weights that training doesn't move"
    )


@pytest.mark.problem("ppo_script", 6, "ppo")
@pytest.mark.problem("grpo_script", 6, "grpo")
@pytest.mark.problem("rloo_script", 6, "rloo")
@pytest.mark.slow
def test_training_raises_the_reward(job):
    lines = job(
        reward=job.folder.parent / "reward.py:share_of_a", num_steps=25, completions=64,
        num_epochs=2, micro_batch_tokens=1024, rollout_batch_size=64, learning_rate=3e-3,
        temperature=1.0, max_new_tokens=8, eval_every=100, kl_coef=0.01,
    )[:-1]  # fmt: skip
    scores = [line["objective/scores"] for line in lines]
    rise = (sum(scores[-5:]) - sum(scores[:5])) / 5
    assert rise > 0.3, "the mean score rises by 0.3 and more in 25 steps"
