"""What must hold for ppo.py, grpo.py and rloo.py alike: their loops, on small models."""

import copy
import functools
import inspect
import json
import math
from dataclasses import fields

import pytest
import torch
from small import in_float64, letter_tokenizer, save_model, small_gpt2, small_llama
from transformers import AutoModelForCausalLM

import grpo
import ppo
import rloo
from plumbing import decoding, evaluation, forward
from plumbing.config import RunConfig, documentation, parse_flags
from plumbing.errors import Fault, InputError

SCRIPTS = [ppo, grpo, rloo]
ADVANTAGES = {ppo: "gae", grpo: "group_advantages", rloo: "rloo_advantages"}
LOSS = {ppo: "policy_loss", grpo: "grpo_loss", rloo: "rloo_loss"}
METRICS = """objective/kl objective/kl_token objective/entropy objective/scores
objective/non_score_reward objective/rlhf_reward policy/approxkl_avg policy/clipfrac_avg
policy/entropy_avg loss/policy_avg val/ratio val/ratio_max_dev_first val/num_eos_tokens length/mean
length/max length/truncated_frac grad_norm lr episode tokens_per_second time/rollout time/update
memory/peak_gb""".split()
OWN_METRICS = {
    ppo: ["loss/value_avg", "val/clipfrac_avg", "val/explained_variance"],
    grpo: ["reward/std_within_group", "reward/frac_flat_groups"],
    rloo: ["reward/std_within_group", "reward/frac_flat_groups"],
}


@pytest.fixture(params=SCRIPTS, ids=lambda script: script.__name__)
def job(request, make_job):
    return make_job(request.param)


# --- Log-probs, KL, reference ---


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_at_step_0_the_kl_is_0_and_the_first_ratio_1(job, tmp_path, architecture):
    """In float32, at temperature 0.7, with dropout in the config and padding on both sides."""
    make = {"gpt2": small_gpt2, "llama": small_llama}[architecture]
    folder = save_model(tmp_path / "m", make(dropout=0.1, vocab_size=20), letter_tokenizer())
    first = job(model=folder, num_epochs=2, num_mini_batches=2, completions=64)[0]
    assert 0 < first["length/truncated_frac"] < 1, "no row ended early: nothing is padded"
    assert first["step"] == 0 and abs(first["objective/kl"]) < 1e-5
    assert first["val/ratio_max_dev_first"] < 1e-5


@pytest.mark.parametrize("num_epochs", [1, 2])
def test_dropout_left_on_moves_the_ratio_off_1(job, num_epochs):
    """With a single update too, where old log-probs are not computed if dropout is off."""
    line = job(disable_dropout="false", num_epochs=num_epochs, num_mini_batches=1)[0]
    assert line["val/ratio_max_dev_first"] > 1e-2


@pytest.mark.parametrize(
    ("flags", "forwards"),
    [
        ({"kl_coef": 0}, {"ppo": 0, "grpo": 0, "rloo": 0}),
        # The KL inside the reward needs the old log-probs; in the loss it doesn't.
        ({"kl_coef": 0.1}, {"ppo": 4, "grpo": 2, "rloo": 4}),
        ({"kl_coef": 0, "num_mini_batches": 2}, {"ppo": 2, "grpo": 2, "rloo": 2}),
        ({"kl_coef": 0, "num_epochs": 2}, {"ppo": 2, "grpo": 2, "rloo": 2}),
        ({"kl_coef": 0.1, "num_epochs": 2}, {"ppo": 4, "grpo": 4, "rloo": 4}),
        ({"kl_coef": 0, "num_epochs": 2, "num_mini_batches": 2}, {"ppo": 2, "grpo": 2, "rloo": 2}),
    ],
)
def test_old_logprobs_are_computed_only_where_they_can_differ(job, monkeypatch, flags, forwards):
    """Forwards of 8 rows, 4 at a time: beside sampling, those without gradient are counted, the
    value model's left out.
    """
    counts, of_values = {"with gradient": 0, "without": 0}, []
    read = forward.completion_states

    def spy(backbone, rollout):
        if not any(backbone is other for other in of_values):
            counts["with gradient" if torch.is_grad_enabled() else "without"] += 1
        return read(backbone, rollout)

    monkeypatch.setattr(forward, "completion_states", spy)
    if job.script is ppo:
        build = ppo.ValueModel.on_backbone_of

        def built(model):
            value_model = build(model)
            of_values.append(value_model.backbone)
            return value_model

        monkeypatch.setattr(ppo.ValueModel, "on_backbone_of", built)
    flags = {"num_epochs": 1, "num_mini_batches": 1} | flags
    job(**flags)
    assert counts["without"] == forwards[job.script.__name__]
    assert counts["with gradient"] == 2 * flags["num_epochs"]


def test_without_kl_no_reference_is_built_and_the_kl_is_unknown_not_0(job, monkeypatch):
    models = set()
    original = job.script.completion_logprobs

    def spy(model, *args, **kwargs):
        models.add(id(model))
        return original(model, *args, **kwargs)

    monkeypatch.setattr(job.script, "completion_logprobs", spy)
    line = job(kl_coef=0)[0]
    assert len(models) == 1
    assert line["objective/kl"] is None and line["objective/non_score_reward"] == 0
    assert line["objective/rlhf_reward"] == line["objective/scores"]


# --- Records ---


def test_a_run_writes_every_metric_finite_and_an_evaluation_before_and_after(job):
    lines = job(num_steps=2, eval_every=1)
    assert [line["step"] for line in lines] == [0, 1, 2]
    expected = [*METRICS, *OWN_METRICS[job.script]]
    for line in lines[:2]:
        missing = [name for name in expected if not math.isfinite(line.get(name, math.nan))]
        assert not missing
    assert all("eval/reward" in line for line in lines)
    assert [line["episode"] for line in lines[:2]] == [8, 16]
    assert lines[0]["objective/rlhf_reward"] == pytest.approx(
        lines[0]["objective/scores"] + lines[0]["objective/non_score_reward"], abs=1e-5
    )
    samples = [json.loads(x) for x in (job.folder / "samples.jsonl").read_text().splitlines()]
    splits = [sample["split"] for sample in samples]
    assert splits == ["heldout"] * 2 + ["train"] * 8 + ["heldout"] * 4
    assert {"step", "split", "prompt", "completion", "score"} == set(samples[0])


def test_the_saved_model_is_the_trained_one_and_the_configuration_is_resolved(job):
    before = AutoModelForCausalLM.from_pretrained(job.model)
    job(learning_rate=0.01)
    after = AutoModelForCausalLM.from_pretrained(job.folder / "model")
    moved = [(a != b).any() for a, b in zip(after.parameters(), before.parameters(), strict=True)]
    assert all(moved)
    assert after.config.resid_pdrop == 0.1  # dropout is off in the run, not in what it leaves
    config = json.loads((job.folder / "config.json").read_text())
    assert config["eval_every"] == 20  # the default but for the tiny model
    assert config["task"] == "sentiment"


def test_the_same_seed_gives_the_same_run_and_another_seed_another(job):
    def numbers(**flags) -> list[tuple]:
        lines = job(num_steps=2, **flags)
        timed = ("time/", "memory/", "tokens_per_second")
        return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines]

    first = numbers(seed=3)
    assert numbers(seed=3) == first
    assert numbers(seed=3, eval_every=1)[-1] == first[-1]  # evaluating more changes nothing
    assert numbers(seed=4) != first


def test_evaluations_repeat_their_random_numbers_and_share_none_with_training(job, monkeypatch):
    seeds = {"evaluation": [], "training": []}

    def watch(module, function, seen):
        original = getattr(module, function)

        def spy(*args, **kwargs):
            seen.append(kwargs["generator"].initial_seed())
            return original(*args, **kwargs)

        monkeypatch.setattr(module, function, spy)

    watch(evaluation, "sample", seeds["evaluation"])
    watch(job.script, "sample", seeds["training"])
    job(num_steps=2, eval_every=1)
    assert len(seeds["evaluation"]) == 2 * 3 and len(set(seeds["evaluation"])) == 1
    assert len(seeds["training"]) == 2 and len(set(seeds["training"])) == 1
    assert not set(seeds["evaluation"]) & set(seeds["training"])


# --- The update ---


def record_gradients(monkeypatch) -> list[list[torch.Tensor]]:
    """The gradients of every update as they come to clip_grad_norm_, and as they leave it."""
    recorded = []
    clip = torch.nn.utils.clip_grad_norm_

    def spy(parameters, max_norm):
        before = [p.grad.clone() for p in parameters]
        norm = clip(parameters, max_norm)
        recorded.append((before, [p.grad.clone() for p in parameters]))
        return norm

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", spy)
    return recorded


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        (grpo, {}),
        (grpo, {"kl_coef": 0.1}),
        (grpo, {"loss_type": "dapo", "clip_range": 0.01}),
        (rloo, {"num_mini_batches": 2}),
    ],
    ids=lambda x: x.__name__ if x in SCRIPTS else " ".join(x) or "default",
)
@pytest.mark.parametrize("flat", ["some", "all"])
def test_rows_without_advantage_are_left_out_and_the_gradient_is_the_same(
    script, flags, flat, make_job, monkeypatch, tmp_path
):
    """One row stays where all advantages are 0: Adam's step of a gradient 0 is not none at all."""
    (tmp_path / "flat.py").write_text(
        "def some(prompts, completion_ids, **columns):\n"
        "    return [len(p) > 1 and sum(i) % 7 - 3.0 for p, i in zip(prompts, completion_ids)]\n"
        "def all(prompts, **columns):\n"
        "    return [1.0] * len(prompts)\n"
    )
    flags = {"reward": f"{tmp_path}/flat.py:{flat}", "kl_coef": 0, "completions": 32} | flags
    kl_coef = flags["kl_coef"]
    flags |= {"num_steps": 2, "learning_rate": 1e-3, "warmup_steps": 0, "num_epochs": 2}
    in_float64(monkeypatch, script)
    recorded, job, found, rows = record_gradients(monkeypatch), make_job(script), [], []
    original = script.micro_batches
    for leave_out in (True, False):

        def spy(rollout, mini_batch, wanted, leave_out=leave_out, **limits):
            if wanted is not None and not leave_out:
                wanted.fill_(True)  # in place: nothing else may depend on it
            parts = original(rollout, mini_batch, wanted, **limits)
            rows.append(sum(len(r) for r, _ in parts))
            return parts

        monkeypatch.setattr(script, "micro_batches", spy)
        metrics = job(**flags)
        found.append([before for before, _ in recorded])
        recorded.clear()
    per_run = len(rows) // 2
    assert len(found[0]) == per_run >= 4
    kept, whole = sum(rows[:per_run]), sum(rows[per_run:])
    expected = per_run if flat == "all" else pytest.approx(0.6 * whole, rel=0.5)
    assert kept == (whole if kl_coef > 0 and script is grpo else expected), "left out, or not"
    for mine, theirs in zip(*found, strict=True):
        for g, expected in zip(mine, theirs, strict=True):
            assert torch.allclose(g, expected, atol=1e-9)
    assert metrics[0]["reward/frac_flat_groups"] > 0.1
    assert flat == "all" or max(g.abs().max() for g in found[0][0]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "flags"),
    [
        (ppo, {}),
        (grpo, {}),
        (grpo, {"loss_type": "dapo", "mask_truncated_completions": "true"}),
        (grpo, {"loss_type": "dr_grpo"}),
        (grpo, {"loss_type": "cispo", "cispo_bound": "1.01"}),
        (grpo, {"importance_sampling_level": "sequence"}),
        (grpo, {"importance_sampling_level": "sequence", "loss_type": "dapo"}),
        (rloo, {}),
        (rloo, {"normalize_advantages": "true"}),
    ],
    ids=lambda x: x.__name__ if x in SCRIPTS else " ".join(x.values()) or "default",
)
def test_the_micro_batch_changes_memory_and_speed_but_not_the_gradient(
    script, flags, make_job, monkeypatch
):
    """Ragged rows, so a mean of micro-batch means would differ (huggingface/trl#2617). Of the
    second minibatch, where the ratio is not 1.
    """
    recorded, job = record_gradients(monkeypatch), make_job(script)
    flags = flags | {"num_epochs": 1, "num_mini_batches": 2, "temperature": 3.0, "completions": 32}
    flags |= {"learning_rate": 1e-3, "warmup_steps": 0, "kl_coef": 0.3, "clip_range": 0.01}
    # The first size is that of the minibatch, the others cut it.
    metrics = [job(micro_batch_size=n, **flags)[0] for n in (16, 5, 1)]
    metrics += [job(micro_batch_size=16, micro_batch_tokens=n, **flags)[0] for n in (30,)]
    assert 1 < metrics[0]["length/mean"] < 6 and metrics[0]["policy/clipfrac_avg"] > 0
    for update in (0, 1):
        whole = recorded[update][0]
        assert max(g.abs().max() for g in whole) > 1e-2
        for (gradients, _), other in zip(recorded[update + 2 :: 2], metrics[1:], strict=True):
            for g, expected in zip(gradients, whole, strict=True):
                # The second follows a step of Adam, which blows up rounding errors of the first.
                assert torch.allclose(g, expected, atol=[1e-6, 1e-4][update])
            for name in ("loss/policy_avg", "policy/entropy_avg", "grad_norm", "val/ratio"):
                assert other[name] == pytest.approx(metrics[0][name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize(
    ("warmup_steps", "rates"),
    [(0, [0.4, 0.3, 0.2, 0.1]), (2, [0.2, 0.3, 0.2, 0.1]), (10, [0.04, 0.06, 0.06, 0.04])],
)
def test_each_minibatch_is_an_optimiser_step_and_the_learning_rate_rises_then_falls_to_0(
    job, monkeypatch, warmup_steps, rates
):
    """In TRL's PPO num_mini_batches added no steps (huggingface/trl#5645). Without warm-up Adam's
    first steps are as large as the learning rate, whatever the gradient says.
    """
    found = []
    step = torch.optim.AdamW.step

    def spy(self, *args, **kwargs):
        found.append(self.param_groups[0]["lr"])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    flags = {"num_steps": 4, "num_epochs": 2, "num_mini_batches": 4, "learning_rate": 0.4}
    job(**flags, warmup_steps=warmup_steps, kl_coef=0)
    assert found == pytest.approx([rate for rate in rates for _ in range(8)])


@pytest.mark.parametrize("parts", [(1, 2), (2, 1), (2, 2)])
def test_with_several_updates_per_rollout_the_old_log_probs_are_those_before_the_first(job, parts):
    epochs, mini_batches = parts
    flags = {"num_steps": 1, "learning_rate": 1e-2, "warmup_steps": 0}
    line = job(num_epochs=epochs, num_mini_batches=mini_batches, **flags)[0]
    assert line["policy/approxkl_avg"] > 1e-6 and line["val/ratio_max_dev_first"] < 1e-5


def test_every_row_is_in_one_minibatch_per_epoch_and_the_order_changes(job, monkeypatch):
    seen = []
    original = job.script.completion_logprobs

    def spy(model, rollout, *args, **kwargs):
        if torch.is_grad_enabled():
            seen.append(rollout.tokens)
        return original(model, rollout, *args, **kwargs)

    monkeypatch.setattr(job.script, "completion_logprobs", spy)
    job(num_epochs=2, num_mini_batches=2, micro_batch_size=4)
    epochs = [torch.cat(seen[:2]), torch.cat(seen[2:])]
    rows = [sorted(map(tuple, epoch.tolist())) for epoch in epochs]
    assert len(epochs[0]) == 8 and rows[0] == rows[1]
    assert not torch.equal(*epochs)


def test_a_huge_reward_moves_the_weights_no_further_than_max_grad_norm(job, monkeypatch):
    recorded = record_gradients(monkeypatch)
    flags = {"scale_rewards": "none"} if job.script is grpo else {}
    job(reward=f"{job.folder.parent}/reward.py:huge", max_grad_norm=0.5, num_epochs=1, **flags)
    norms = [torch.cat([g.flatten() for g in grads]).norm().item() for grads in recorded[0]]
    assert norms[0] > 100 and norms[1] == pytest.approx(0.5, rel=1e-4)


def test_a_completion_that_is_eos_alone_trains_without_nan(job):
    """An empty completion has length 1: its only token is EOS."""
    line = job(max_new_tokens=1)[0]
    assert line["length/max"] == 1 and math.isfinite(line["grad_norm"])


def test_a_nan_gradient_stops_the_run_before_it_reaches_the_weights(job, monkeypatch):
    name = LOSS[job.script]
    original = getattr(job.script, name)
    calls = []

    def broken(*args, **kwargs):
        calls.append(1)
        loss, clipped = original(*args, **kwargs)
        return loss * (math.nan if len(calls) > 4 else 1.0), clipped

    monkeypatch.setattr(job.script, name, broken)
    with pytest.raises(Fault, match="step 1: the gradient is nan: lower --learning_rate") as error:
        job(num_steps=3, num_epochs=1, num_mini_batches=2, micro_batch_size=2)
    assert "is saved up to step 1, --resume goes on from there" in str(error.value)
    model = AutoModelForCausalLM.from_pretrained(job.folder / "model")
    assert all(p.isfinite().all() for p in model.parameters())
    assert len((job.folder / "metrics.jsonl").read_text().splitlines()) == 1


def test_weights_that_diverge_in_the_last_update_of_a_step_stop_the_run_with_a_fault(job):
    flags = {"num_epochs": 1, "num_mini_batches": 1, "learning_rate": 1e30}
    with pytest.raises(Fault, match="step 1: the model's logits are not finite: lower --learning"):
        job(num_steps=3, **flags)


def test_with_one_update_per_rollout_the_ratio_is_1_however_step_3_rounds(job, monkeypatch):
    """In bfloat16 other batches round log-probs by a percent, which RLOO sums over a row."""
    original = job.script.completion_logprobs

    def rounded(*args, **kwargs):
        logprobs, entropy = original(*args, **kwargs)
        return logprobs * (1 if torch.is_grad_enabled() else 1.01), entropy

    monkeypatch.setattr(job.script, "completion_logprobs", rounded)
    metrics = job(num_epochs=1, num_mini_batches=1, kl_coef=0.1)[0]
    assert metrics["val/ratio_max_dev_first"] == 0


def test_a_reward_that_fails_late_leaves_the_model_and_the_metrics_so_far(job):
    file = job.folder.parent / "late.py"
    file.write_text(
        "calls = []\n"
        "def late(completions, **kw):\n"
        "    calls.append(1)\n"
        "    # Two calls for the evaluation, then one per step.\n"
        "    return [1.0] * len(completions) if len(calls) < 6 else 1 / 0\n"
    )
    with pytest.raises(InputError, match="late raised ZeroDivisionError"):
        job(num_steps=9, reward=f"{file}:late", eval_every=100)
    assert len((job.folder / "metrics.jsonl").read_text().splitlines()) == 3
    AutoModelForCausalLM.from_pretrained(job.folder / "model")


# --- Flags that must reach what they are for ---


GRPO_FLAGS = {
    "clip_range": 0.1, "clip_range_high": 0.3, "cispo_bound": 2.5, "loss_type": "dapo",
    "importance_sampling_level": "sequence", "max_new_tokens": 5, "kl_coef": 0.25,
}  # fmt: skip


@pytest.mark.parametrize(("script", "flags"), [(grpo, GRPO_FLAGS), (rloo, {"clip_range": 0.1})])
def test_every_flag_of_the_loss_reaches_it_and_with_it_the_counts_of_the_minibatch(
    script, flags, make_job, monkeypatch
):
    calls, name = [], LOSS[script]
    original = getattr(script, name)
    arguments = inspect.signature(original).parameters
    names = {field.name for field in fields(script.Config)}
    assert set(flags) == set(arguments) & names

    def spy(logprobs, old_logprobs, advantages, mask, **kwargs):
        calls.append((mask, kwargs))
        return original(logprobs, old_logprobs, advantages, mask, **kwargs)

    monkeypatch.setattr(script, name, spy)
    job = make_job(script)
    job(num_mini_batches=2, micro_batch_size=3, completions=16, **({"kl_coef": 0.25} | flags))
    assert [len(mask) for mask, _ in calls] == [3, 3, 2] * 2
    for start in (0, 3):
        num_tokens = sum(int(mask.sum()) for mask, _ in calls[start : start + 3])
        for mask, given in calls[start : start + 3]:
            assert {flag: given[flag] for flag in flags} == flags
            assert given["num_rows"] == 8
            if script is grpo:
                assert given["num_tokens"] == num_tokens
                assert given["ref_logprobs"].shape == mask.shape
            assert set(given) <= set(arguments)


def test_cispo_bound_changes_an_update_where_a_ratio_exceeds_it_and_no_other(make_job, monkeypatch):
    recorded, job = record_gradients(monkeypatch), make_job(grpo)
    in_float64(monkeypatch, grpo)
    flags = {"loss_type": "cispo", "num_mini_batches": 2, "learning_rate": 1e-2, "kl_coef": 0}
    lines = [job(completions=32, cispo_bound=bound, **flags)[0] for bound in (1.05, 1e3, 1e6)]
    tight, loose, looser = (recorded[i : i + 2] for i in (0, 2, 4))
    for before, after in zip(tight[0][0], loose[0][0], strict=True):
        assert torch.equal(before, after), "at the first update every ratio is 1, below any bound"
    for (a, _), (b, _) in zip(loose, looser, strict=True):
        assert all(map(torch.equal, a, b)), "a bound that no ratio exceeds changed the update"
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(tight[1][0], loose[1][0], strict=True))
    assert lines[0]["policy/clipfrac_avg"] > 0.01
    assert lines[1]["policy/clipfrac_avg"] == lines[2]["policy/clipfrac_avg"] == 0


@pytest.mark.parametrize("bounds", [[], [-2.0, 1.5]])
def test_in_rloo_the_score_is_clipped_then_the_kl_of_all_its_tokens_subtracted(
    bounds, make_job, monkeypatch
):
    """At the second step, where the KL isn't 0. The rewards are compared with those that plain
    forward passes over one row at a time give, without any of our functions.
    """
    job, rewards, policies, rollouts, given = make_job(rloo), [], [], [], []
    load, score, advantages = rloo.load_policy, rloo.score, rloo.rloo_advantages

    def load_in_float64(*args):
        policies.append(load(*args).double())
        return policies[0]

    def score_and_keep(task, rows, rollout, tokenizer):
        scores, texts = score(task, rows, rollout, tokenizer)
        policies.append(copy.deepcopy(policies[0]).eval())
        rollouts.append(rollout)
        given.append(scores)
        return scores, texts

    monkeypatch.setattr(rloo, "load_policy", load_in_float64)
    monkeypatch.setattr(rloo, "score", score_and_keep)
    monkeypatch.setattr(
        rloo, "rloo_advantages", lambda r, *args: rewards.append(r) or advantages(r, *args)
    )
    args = ["--overwrite", f"--model={job.model}", f"--output_dir={job.folder}", "--num_steps=2"]
    args += ["--prompts_per_step=4", "--max_new_tokens=6", "--num_eval_prompts=2", "--kl_coef=0.5"]
    args += [f"--reward={job.folder.parent}/reward.py:spread", "--learning_rate=0.01"]
    args += ["--temperature=0.7", "--device=cpu", "--bf16=false", "--record_tokens=false"]
    rloo.main(args + (["--reward_clip_range", *map(str, bounds)] if bounds else []))

    rollout, policy = rollouts[1], policies[2]
    reference = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float64).eval()
    width, expected = rollout.completion_mask.shape[1], []
    for tokens, real, score in zip(rollout.tokens, rollout.attention_mask, given[1], strict=True):
        ids, kl = tokens[real], 0.0
        length = int(real[-width:].sum())
        for model, sign in ((policy, 1), (reference, -1)):
            with torch.no_grad():
                logprobs = (model(ids[None]).logits[0] / 0.7).log_softmax(-1)
            for i in range(len(ids) - length, len(ids)):
                kl += sign * logprobs[i - 1, ids[i]].item()
        clipped = min(max(score.item(), bounds[0]), bounds[1]) if bounds else score.item()
        expected.append(clipped - 0.5 * kl)
        assert abs(kl) > 1e-3
    assert rewards[1].tolist() == pytest.approx(expected, abs=1e-6)
    assert given[1].min() < -2 and given[1].max() > 1.5, "the bounds would not show"


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("max_tokens", [None, 20])
def test_every_forward_pass_keeps_the_limits_of_its_phase_and_the_precision_asked_for(
    bf16, max_tokens, job, monkeypatch
):
    """Those of the policy, the reference and the value model: with gradient at most
    micro_batch_size rows, without rollout_batch_size; micro_batch_tokens holds for both.
    """
    passes, states = [], forward.completion_states

    def spy(backbone, rollout):
        width = rollout.completion_mask.shape[1]
        prompts = rollout.tokens[:, :-width], rollout.attention_mask[:, :-width]
        distinct = {tuple(x[real].tolist()) for x, real in zip(*prompts, strict=True)}
        longest = rollout.completion_mask.sum(1).max()
        passes.append(
            {
                "gradient": torch.is_grad_enabled(),
                "rows": len(rollout.tokens),
                "tokens": len(distinct) * max(map(len, distinct)) + len(rollout.tokens) * longest,
                "bf16": torch.is_autocast_enabled("cpu"),
            }
        )
        return states(backbone, rollout)

    monkeypatch.setattr(forward, "completion_states", spy)
    flags = {"completions": 16, "num_mini_batches": 2, "micro_batch_size": 3, "kl_coef": 0.1}
    flags |= {"rollout_batch_size": 5, "temperature": 3.0, "bf16": bf16, "num_epochs": 1}
    flags |= {} if max_tokens is None else {"micro_batch_tokens": max_tokens}
    job(**flags)
    models = 2 if job.script is ppo else 1  # with gradient; without, one more: the reference
    assert all(p["bf16"] == bf16 for p in passes)
    for gradient, limit, num_models in ((True, 3, models), (False, 5, models + 1)):
        rows = [p["rows"] for p in passes if p["gradient"] == gradient]
        assert sum(rows) == 16 * num_models
        if max_tokens is None:
            assert max(rows) == limit
            assert len(rows) == num_models * (6 if gradient else 4), "3 + 3 + 2; 5 + 5 + 5 + 1"
        else:
            assert max(rows) <= limit
    if max_tokens is not None:
        assert all(p["tokens"] <= max_tokens or p["rows"] == 1 for p in passes)


# --- Groups ---


@pytest.mark.parametrize("script", [grpo, rloo], ids=lambda script: script.__name__)
def test_a_reward_that_the_prompt_alone_decides_gives_every_completion_advantage_0(
    script, make_job, monkeypatch
):
    """Catches every mix-up of groups: shuffled, sharded or interleaved (huggingface/trl#2961)."""
    job, seen = make_job(script), []
    original = getattr(script, ADVANTAGES[script])

    def spy(*args):
        seen.append(original(*args))
        return seen[-1]

    monkeypatch.setattr(script, ADVANTAGES[script], spy)
    file = job.folder.parent / "by_prompt.py"
    file.write_text(
        "def by_prompt(prompts, **kw): return [sum(map(ord, p)) % 97 / 7 for p in prompts]\n"
    )
    line = job(reward=f"{file}:by_prompt", prompts_per_step=6, rollout_batch_size=8, kl_coef=0)[0]
    assert len(seen[0]) == 24 and (seen[0] == 0).all()
    assert line["reward/std_within_group"] == 0 and line["reward/frac_flat_groups"] == 1
    assert line["grad_norm"] == 0


@pytest.mark.parametrize("script", [grpo, rloo], ids=lambda script: script.__name__)
def test_a_reward_of_none_gets_advantage_0_and_stays_out_of_the_baseline(
    script, make_job, monkeypatch
):
    job, seen = make_job(script), []
    original = getattr(script, ADVANTAGES[script])

    def spy(rewards, *args):
        seen.append((rewards, original(rewards, *args)))
        return seen[-1][1]

    monkeypatch.setattr(script, ADVANTAGES[script], spy)
    file = job.folder.parent / "some.py"
    file.write_text(
        "def some(completions, **kw):\n"
        "    return [None if i % 4 == 1 else float(i % 4) for i in range(len(completions))]\n"
    )
    flags = {"scale_rewards": "none"} if script is grpo else {"normalize_advantages": "true"}
    line = job(reward=f"{file}:some", kl_coef=0.1, **flags)[0]
    rewards, advantages = seen[0]
    known = rewards.isnan().logical_not()
    assert known.tolist() == [True, False, True, True] * 2
    assert (advantages[~known] == 0).all() and (advantages[known] != 0).all()
    assert line["objective/scores"] == pytest.approx(5 / 3)
    assert line["reward/std_within_group"] == pytest.approx(torch.tensor([0.0, 2, 3]).std().item())
    assert math.isfinite(line["grad_norm"]) and line["grad_norm"] > 0


@pytest.mark.parametrize("script", [grpo, rloo], ids=lambda script: script.__name__)
def test_several_rewards_are_summed_with_their_weights(script, make_job):
    job = make_job(script)
    file = job.folder.parent / "two.py"
    file.write_text(
        "def one(completions, **kw): return [1.0] * len(completions)\n"
        "def ten(completions, **kw): return [10.0] * len(completions)\n"
    )
    args = ["--overwrite", f"--model={job.model}", f"--output_dir={job.folder}", "--num_steps=1"]
    args += ["--max_new_tokens=4", "--prompts_per_step=2", "--num_eval_prompts=2"]
    args += ["--reward", f"{file}:one", f"{file}:ten", "--reward_weights", "2", "0.5"]
    script.main(args)
    line = json.loads((job.folder / "metrics.jsonl").read_text().splitlines()[0])
    assert line["objective/scores"] == pytest.approx(7)


@pytest.mark.parametrize("script", [grpo, rloo], ids=lambda script: script.__name__)
def test_a_group_of_one_is_refused(script, make_job):
    with pytest.raises(InputError, match="--num_generations 1: must be 2 or more"):
        make_job(script)(num_generations=1)


# --- Learning ---


def learn(job, **flags) -> tuple[float, float]:
    reward = f"{job.folder.parent}/reward.py:share_of_a"
    lines = job(
        reward=reward, num_steps=25, completions=64, micro_batch_size=64, num_epochs=2,
        rollout_batch_size=64, learning_rate=1e-3, temperature=1.0, max_new_tokens=8,
        eval_every=100, kl_coef=0.01, **flags,
    )[:-1]  # fmt: skip
    scores = [line["objective/scores"] for line in lines]
    return sum(scores[:5]) / 5, sum(scores[-5:]) / 5


@pytest.mark.slow
def test_training_raises_the_reward(job):
    before, after = learn(job)
    assert after > before + 0.3


@pytest.mark.slow
def test_with_shuffled_advantages_the_reward_does_not_rise(job, monkeypatch):
    """The twin of the test above: what it measured is credit assignment, not drift."""
    generator = torch.Generator().manual_seed(0)
    name = ADVANTAGES[job.script]
    original = getattr(job.script, name)

    def shuffled(*args):
        result = original(*args)
        advantages = result[0] if job.script is ppo else result
        chosen = args[2] if job.script is ppo else torch.ones_like(advantages).bool()
        flat = advantages[chosen]
        advantages[chosen] = flat[torch.randperm(len(flat), generator=generator)]
        return result

    monkeypatch.setattr(job.script, name, shuffled)
    before, after = learn(job)
    assert after < before + 0.05


def test_every_flag_has_a_help_text_and_the_common_ones_the_same_in_all_scripts():
    texts = []
    for script in SCRIPTS:
        documented = documentation(script.Config)
        texts.append({f.name: documented[f.name]["help"] for f in fields(script.Config)})
        assert all(texts[-1].values())
        own = set(texts[-1]) - {f.name for f in fields(RunConfig)}
        assert {documented[name]["group"] for name in own} == {"this algorithm"}
    common = set.intersection(*map(set, texts))
    assert common == {f.name for f in fields(RunConfig)} and len(common) > 25
    assert all(len({help_texts[name] for help_texts in texts}) == 1 for name in common)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_every_command_in_the_header_is_understood(script):
    text = script.__doc__.replace("\\\n", " ")
    commands = [line.split("#")[0].split() for line in text.split("\n") if "  python " in line]
    assert len(commands) >= 2 and any("--reward" in command for command in commands)
    assert ["python", f"{script.__name__}.py"] in commands
    for _, name, *args in commands:
        assert name == f"{script.__name__}.py"
        parse_flags(script.Config, "", args)


def test_gradient_checkpointing_changes_no_gradient_and_leaves_the_cache_on(job, monkeypatch):
    recorded, lengths = record_gradients(monkeypatch), []
    read = decoding._next_logits

    def spy(model, tokens, *args, **kwargs):
        lengths.append(tokens.shape[1])
        return read(model, tokens, *args, **kwargs)

    monkeypatch.setattr(decoding, "_next_logits", spy)
    flags = {"num_epochs": 1, "num_mini_batches": 1, "learning_rate": 1e-3, "kl_coef": 0.3}
    in_float64(monkeypatch, job.script)
    job(**flags)
    job(gradient_checkpointing="true", **flags)
    (plain, _), (checkpointed, _) = recorded
    assert max(g.abs().max() for g in plain) > 1e-2
    for g, expected in zip(checkpointed, plain, strict=True):
        assert torch.allclose(g, expected, atol=1e-12)
    # The prompts, of up to 4 tokens, then a token at a time.
    assert max(lengths) <= 4 and lengths.count(1) > len(lengths) / 2


def test_in_bfloat16_the_weights_and_the_records_stay_float32(job, monkeypatch):
    recorded = record_gradients(monkeypatch)
    flags = {"num_epochs": 1, "num_mini_batches": 1, "learning_rate": 1e-6, "kl_coef": 0.3}
    exact, rounded = job(bf16="false", **flags)[0], job(bf16="true", **flags)[0]
    assert all(g.dtype == torch.float32 for gradients, _ in recorded for g in gradients)
    assert rounded["val/ratio_max_dev_first"] < 0.05, "old log-probs of another forward?"
    assert rounded["policy/entropy_avg"] == pytest.approx(exact["policy/entropy_avg"], rel=0.1)
    before = AutoModelForCausalLM.from_pretrained(job.model)
    after = AutoModelForCausalLM.from_pretrained(job.folder / "model")
    moved = [(p - q).abs().max() for p, q in zip(before.parameters(), after.parameters())]
    assert after.dtype == torch.float32
    assert max(moved) > 1e-7, "a step of 1e-6 is lost where weights are bfloat16"


@pytest.mark.slow
def test_compiled_the_training_forward_gives_the_same_gradient(make_job, monkeypatch):
    """Traced as by --compile true, but not made into machine code, which takes a minute."""
    torch._dynamo.reset()  # after too many other forward passes it compiles nothing, in silence
    traced, backend = [], torch._dynamo.lookup_backend("aot_eager")

    def noting(*args, **kwargs):
        traced.append(args)
        return backend(*args, **kwargs)

    compiling = functools.partialmethod(torch.nn.Module.compile, backend=noting)
    monkeypatch.setattr(torch.nn.Module, "compile", compiling)
    recorded, job = record_gradients(monkeypatch), make_job(rloo)
    model = AutoModelForCausalLM.from_pretrained(job.model, num_hidden_layers=1)
    model.save_pretrained(job.model)  # the second layer would be as much work again
    flags = {"num_epochs": 1, "num_mini_batches": 1, "learning_rate": 1e-3, "kl_coef": 0}
    job(**flags)
    assert not traced
    job(compile="true", **flags)
    assert traced
    (plain, _), (compiled, _) = recorded
    for g, expected in zip(compiled, plain, strict=True):
        assert torch.allclose(g, expected, atol=1e-5)
