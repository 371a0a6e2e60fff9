"""Whole runs of ppo.py, grpo.py and rloo.py on small models: what must hold for all three."""

import functools
import math

import pytest
import torch
from safetensors.torch import load_file
from small import computed, in_float64, lines_of
from transformers import AutoModelForCausalLM
from transformers.models.gpt2.modeling_gpt2 import GPT2Model

import grpo
import ppo
import reward_model
import rloo
import sampling
from plumbing import preferences
from plumbing.errors import Fault

SLOWER = [pytest.param(script, marks=pytest.mark.slow) for script in (ppo, rloo)]
LOSS = {ppo: "policy_loss", grpo: "grpo_loss", rloo: "rloo_loss"}
REWARDS = """
def flat(completions, **columns):
    return [1.0] * len(completions)

def flat_for_short_prompts(prompts, completion_ids, **columns):
    return [len(p) > 1 and sum(i) % 7 - 3.0 for p, i in zip(prompts, completion_ids)]
"""


@pytest.fixture(params=[grpo, *SLOWER], ids=lambda script: script.__name__)
def job(request, make_job):
    job = make_job(request.param)
    with (job.folder.parent / "reward.py").open("a") as file:
        file.write(REWARDS)
    job.rewards = f"{job.folder.parent}/reward.py:"
    return job


def watch(monkeypatch, owner, name, note):
    """Calls note(result, *args, **kwargs) after each call of owner.name."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def spy(*args, **kwargs):
        result = original(*args, **kwargs)
        note(result, *args, **kwargs)
        return result

    monkeypatch.setattr(owner, name, spy)


def record_gradients(monkeypatch) -> list[torch.Tensor]:
    """The gradient of every update, before it is clipped."""
    recorded, clip = [], torch.nn.utils.clip_grad_norm_

    def spy(parameters, max_norm):
        recorded.append(torch.cat([p.grad.flatten() for p in parameters]))
        return clip(parameters, max_norm)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", spy)
    return recorded


def record_passes(monkeypatch) -> list[tuple]:
    """(With gradient, rows, columns, bf16) of each pass of policy, reference and value model."""
    passes = []

    def note(result, model, input_ids, **kwargs):
        bf16 = torch.is_autocast_enabled("cpu")
        passes.append((torch.is_grad_enabled(), *input_ids.shape, bf16))

    watch(monkeypatch, GPT2Model, "forward", note)
    return passes


# --- Log-probs, KL, reference ---


def test_at_step_0_the_kl_is_0_and_the_first_ratio_1(job):
    """In float32, at temperature 0.7, with dropout in the config and padding on both sides."""
    first = job(num_epochs=2, num_mini_batches=2, completions=64)[0]
    assert 0 < first["length/truncated_frac"] < 1, "no row ended early: nothing is padded"
    assert first["step"] == 0 and abs(first["objective/kl"]) < 1e-5
    assert first["val/ratio_max_dev_first"] < 1e-5


def test_dropout_left_on_moves_the_ratio_off_1(job):
    """With a single update too, where old log-probs are not computed if dropout is off."""
    line = job(disable_dropout="false", num_epochs=1, num_mini_batches=1)[0]
    assert line["val/ratio_max_dev_first"] > 1e-2


@pytest.mark.problem("rloo_loop", 1, "rloo")
@pytest.mark.parametrize(
    ("kl_coef", "num_epochs", "num_mini_batches"),
    [(0, 1, 1), (0.1, 1, 1), (0, 1, 2), (0, 2, 1), (0.1, 2, 1)],
)
def test_the_old_log_probs_are_those_before_the_first_update_and_computed_only_where_needed(
    job, monkeypatch, kl_coef, num_epochs, num_mini_batches
):
    """RLOO's KL inside the reward needs them even for a single update; GRPO's in the loss doesn't.
    PPO computes them always.
    """
    rows, models = {"completion_logprobs": 0, "rollout_logprobs": 0}, set()

    def note(name, result, model, rollout, *args, **kwargs):
        rows[name] += len(rollout.tokens)
        models.add(id(model))

    for name in rows:
        watch(monkeypatch, job.script, name, functools.partial(note, name))
    flags = {"num_epochs": num_epochs, "num_mini_batches": num_mini_batches}
    line = job(kl_coef=kl_coef, learning_rate=1e-2, warmup_steps=0, **flags)[0]
    single = num_epochs * num_mini_batches == 1
    needs_old = not single or job.script is ppo or (kl_coef > 0 and job.script is rloo)
    needs_reference = kl_coef > 0
    assert rows["completion_logprobs"] == 8 * num_epochs
    assert rows["rollout_logprobs"] == 8 * (needs_old + needs_reference)
    assert len(models) == 1 + needs_reference
    assert line["val/ratio_max_dev_first"] < 1e-5
    moved = line["policy/approxkl_avg"]
    as_before = moved < 1e-9 if job.script is ppo else moved == 0
    assert as_before if single else moved > 1e-6
    if kl_coef == 0:
        assert line["objective/kl"] is None, "unknown, not 0"
        assert line["objective/rlhf_reward"] == line["objective/scores"]


@pytest.mark.parametrize("job", [grpo, SLOWER[1]], ids=["grpo", "rloo"], indirect=True)
def test_with_one_update_per_rollout_the_ratio_is_1_however_step_3_rounds(job, monkeypatch):
    """In bfloat16 other batches round log-probs by a percent, which RLOO sums over a row."""
    original = job.script.rollout_logprobs
    monkeypatch.setattr(job.script, "rollout_logprobs", lambda *args: 1.01 * original(*args))
    metrics = job(num_epochs=1, num_mini_batches=1, kl_coef=0.1)[0]
    assert metrics["val/ratio_max_dev_first"] == 0


# --- What a run leaves ---


def test_a_run_evaluates_when_due_and_at_the_end(job):
    lines = job(num_steps=3, eval_every=2)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert ["eval/reward" in line for line in lines] == [True, False, True, True]


def test_a_seed_decides_the_run_and_evaluations_share_no_random_numbers_with_it(job, monkeypatch):
    seeds = {"evaluation": set(), "training": set()}

    def note(result, model, prompt_ids, *args, generator, **kwargs):
        where = "evaluation" if len(prompt_ids) == 3 else "training"
        seeds[where].add(generator.initial_seed())

    def numbers(**flags) -> list[dict]:
        return computed(job(num_steps=2, num_eval_prompts=3, **flags))

    first = numbers(seed=3)
    assert numbers(seed=3) == first
    assert numbers(seed=4) != first
    watch(monkeypatch, sampling, "generate", note)
    assert numbers(seed=3, eval_every=1)[-1] == first[-1], "evaluating more changes nothing"
    assert len(seeds["evaluation"]) == len(seeds["training"]) == 1
    assert seeds["evaluation"] != seeds["training"]


# --- The update ---


def test_gradient_checkpointing_changes_no_gradient_and_leaves_the_cache_on(job, monkeypatch):
    recorded, passes = record_gradients(monkeypatch), record_passes(monkeypatch)
    flags = {"num_epochs": 1, "num_mini_batches": 1, "learning_rate": 1e-3, "kl_coef": 0.3}
    in_float64(monkeypatch, job.script)
    job(**flags)
    passes.clear()
    job(gradient_checkpointing="true", **flags)
    plain, checkpointed = recorded
    assert plain.abs().max() > 1e-2 and torch.allclose(checkpointed, plain, atol=1e-12)
    columns = [columns for gradient, _, columns, _ in passes if not gradient]
    assert columns.count(1) > len(columns) / 2, "decoding reads a token at a time"


def test_in_bfloat16_the_weights_and_the_records_stay_float32(job, monkeypatch):
    recorded, passes = record_gradients(monkeypatch), record_passes(monkeypatch)
    flags = {"num_epochs": 1, "num_mini_batches": 1, "learning_rate": 1e-6, "kl_coef": 0.3}
    exact = job(bf16="false", **flags)[0]
    assert not any(bf16 for *_, bf16 in passes)
    passes.clear()
    rounded = job(bf16="true", **flags)[0]
    assert all(bf16 for gradient, *_, bf16 in passes if gradient)
    assert all(gradient.dtype == torch.float32 for gradient in recorded)
    assert rounded["val/ratio_max_dev_first"] < 0.05, "old log-probs of another forward?"
    assert rounded["policy/entropy_avg"] == pytest.approx(exact["policy/entropy_avg"], rel=0.1)
    before = AutoModelForCausalLM.from_pretrained(job.model)
    after = AutoModelForCausalLM.from_pretrained(job.folder / "model")
    moved = [(p - q).abs().max() for p, q in zip(before.parameters(), after.parameters())]
    assert after.dtype == torch.float32
    assert max(moved) > 1e-7, "a step of 1e-6 is lost where weights are bfloat16"


def test_a_nan_gradient_stops_the_run_before_it_reaches_the_weights(job, monkeypatch):
    original, calls = getattr(job.script, LOSS[job.script]), []

    def broken(*args, **kwargs):
        calls.append(1)
        loss, clipped = original(*args, **kwargs)
        return loss * (math.nan if len(calls) > 2 else 1.0), clipped

    monkeypatch.setattr(job.script, LOSS[job.script], broken)
    with pytest.raises(Fault, match="step 1: the gradient is nan: lower --learning_rate"):
        job(num_steps=3, num_epochs=1, num_mini_batches=2)
    model = AutoModelForCausalLM.from_pretrained(job.folder / "model")
    assert all(p.isfinite().all() for p in model.parameters())


# --- Groups ---


@pytest.mark.parametrize("job", [grpo, SLOWER[1]], ids=["grpo", "rloo"], indirect=True)
@pytest.mark.parametrize("flat", ["flat_for_short_prompts", "flat"])
def test_rows_without_advantage_are_left_out_and_the_gradient_is_the_same(job, flat, monkeypatch):
    """The smallest KL penalty in GRPO's loss or entropy bonus keeps them, and adds nothing that
    shows; RLOO's KL is in the advantages. One row stays where all advantages are 0: Adam's step of
    a gradient 0 is not none at all.
    """
    in_float64(monkeypatch, job.script)
    recorded, rows = record_gradients(monkeypatch), []

    def note(result, model, rollout, *args, **kwargs):
        if torch.is_grad_enabled():
            rows.append(len(rollout.tokens))

    watch(monkeypatch, job.script, "completion_logprobs", note)
    flags = {"reward": f"{job.rewards}{flat}", "completions": 16, "num_mini_batches": 2}
    flags |= {"num_steps": 2, "learning_rate": 1e-3, "warmup_steps": 0, "kl_coef": 0}
    found, counts = [], []
    for coefs in ({}, {"kl_coef": 1e-15}, {"entropy_coef": 1e-15}):
        metrics = job(**flags | coefs)
        found.append(torch.cat(recorded))
        counts.append(sum(rows))
        recorded.clear()
        rows.clear()
    assert counts[2] == 32
    assert counts[1] == 32 if job.script is grpo else counts[0] <= counts[1] < 32
    assert counts[0] == 4 if flat == "flat" else 4 < counts[0] < 28
    assert metrics[0]["reward/frac_flat_groups"] > 0.1
    # Without a KL RLOO computes its advantages in float32, as the scores are.
    assert torch.allclose(found[1], found[0], atol=1e-5)
    assert torch.allclose(found[2], found[0], atol=1e-9)
    assert flat == "flat" or found[0].abs().max() > 1e-3


@pytest.mark.problem("ppo_script", 4, "ppo")
@pytest.mark.problem("grpo_script", 4, "grpo")
@pytest.mark.problem("rloo_script", 4, "rloo")
@pytest.mark.problem("reward_script", 4, "reward_model")
@pytest.mark.slow
@pytest.mark.parametrize("script", [ppo, grpo, rloo, reward_model], ids=lambda s: s.__name__)
def test_two_steps_of_the_embedded_model_change_its_weights_and_leave_finite_metrics(
    script, tmp_path, monkeypatch
):
    monkeypatch.setattr(preferences, "OWN_PAIRS", 256)
    flags = "--num_steps 2 --device cpu --bf16 false --eval_every 2 --output_dir"
    few = {"num_eval_pairs": 8} if script is reward_model else {"num_eval_prompts": 8}
    script.main([*flags.split(), str(tmp_path / "run"), *(f"--{k}={v}" for k, v in few.items())])
    lines = lines_of(tmp_path / "run/metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines[:2]:
        assert all(math.isfinite(x) for x in line.values() if x is not None)
        assert line["grad_norm"] > 0
    before = load_file("tiny/model.safetensors")
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    shared = [name for name in before if name in after]
    assert shared and all((before[name] != after[name]).any() for name in shared)


# --- Learning ---


def learn(job) -> float:
    """How much the mean score of five steps rises in the run."""
    lines = job(
        reward=f"{job.rewards}share_of_a", num_steps=25, completions=64, num_epochs=2,
        micro_batch_tokens=1024, rollout_batch_size=64, learning_rate=1e-3, temperature=1.0,
        max_new_tokens=8, eval_every=100, kl_coef=0.01,
    )[:-1]  # fmt: skip
    scores = [line["objective/scores"] for line in lines]
    return (sum(scores[-5:]) - sum(scores[:5])) / 5


@pytest.mark.problem("ppo_script", 6, "ppo")
@pytest.mark.problem("grpo_script", 6, "grpo")
@pytest.mark.problem("rloo_script", 6, "rloo")
@pytest.mark.slow
def test_training_raises_the_reward(job):
    assert learn(job) > 0.3
