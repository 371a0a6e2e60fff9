"""PPO: its losses, its loop on small models, and that it learns for the right reason."""

import json
import math
from pathlib import Path

import pytest
import torch
from conftest import (
    EOS,
    byte_tokenizer,
    letter_tokenizer,
    make_rollout,
    save_model,
    small_gpt2,
    small_llama,
)
from transformers import AutoModelForCausalLM, GPT2Config, GPT2ForSequenceClassification

import ppo
import runs
from common import Fault, InputError, gae, masked_whiten
from ppo import Config, policy_loss, shape_rewards, value_loss
from runs import Meter

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]).bool()


# --- Rewards ---


def test_the_score_sits_on_the_last_real_token_and_the_kl_on_every_one():
    kl = torch.arange(12.0).reshape(3, 4)
    rewards = shape_rewards(torch.tensor([10.0, 20.0, 30.0]), kl, MASK, kl_coef=0.5)
    expected = [[0, -0.5, 10 - 1, 0], [20 - 2, 0, 0, 0], [-4, -4.5, -5, 30 - 5.5]]
    assert torch.allclose(rewards, torch.tensor(expected))


def test_a_row_without_a_real_token_gets_no_reward_and_no_nan():
    rewards = shape_rewards(
        torch.tensor([5.0]), torch.full((1, 3), torch.nan), torch.zeros(1, 3), 1
    )
    assert (rewards == 0).all()


def test_with_gamma_and_lambda_1_and_no_value_every_token_gets_the_whole_score_eos_included():
    """With the score one slot after EOS, as in TRL's PPO, EOS would get lam times the score."""
    scores = torch.tensor([1.0, 2.0, 3.0])
    rewards = shape_rewards(scores, torch.zeros(3, 4), MASK, 0.0)
    advantages, _ = gae(rewards, torch.zeros(3, 4), MASK, 1.0, 1.0)
    assert torch.equal(advantages, scores[:, None] * MASK)
    last_only, _ = gae(rewards, torch.zeros(3, 4), MASK, 1.0, 0.0)
    assert torch.equal(last_only, rewards)


# --- Losses ---


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "slope"),
    [
        (1.0, 1.5, -1.2, 0.0),  # good, already likelier by more than the range: no gradient
        (1.0, 0.5, -0.5, -0.5),  # good, but less likely: full gradient
        (-1.0, 1.5, 1.5, 1.5),  # bad, and likelier: full gradient; a minimum would stop it
        (-1.0, 0.5, 0.8, 0.0),  # bad, already less likely by more than the range: no gradient
        (1.0, 1.1, -1.1, -1.1),
        (-1.0, 0.9, 0.9, 0.9),
    ],
)
def test_the_clip_stops_the_gradient_only_where_moving_on_would_pay(advantage, ratio, loss, slope):
    logprobs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    value = policy_loss(logprobs, torch.zeros(1, 1), torch.tensor([[advantage]]), 0.2)
    value.sum().backward()
    assert value.item() == pytest.approx(loss)
    assert logprobs.grad.item() == pytest.approx(slope)  # d ratio / d logprob = ratio


@pytest.mark.parametrize(
    ("value", "ret", "loss", "slope"),
    [
        (0.1, 1.0, 0.405, -0.9),  # inside the range: plain squared error
        (0.5, 1.0, 0.32, 0.0),  # moved too far towards the return: clipped, no gradient
        (-0.5, 1.0, 1.125, -1.5),  # moved away from the return: the larger, unclipped error
        (0.5, 0.0, 0.125, 0.5),
    ],
)
def test_the_value_loss_is_half_the_larger_of_two_squared_errors(value, ret, loss, slope):
    values = torch.tensor([[value]], requires_grad=True)
    result = value_loss(values, torch.zeros(1, 1), torch.tensor([[ret]]), 0.2)
    result.sum().backward()
    assert result.item() == pytest.approx(loss)
    assert values.grad.item() == pytest.approx(slope)


def test_loss_gradients_equal_finite_differences():
    def numbers(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(2, 3, generator=generator, dtype=torch.float64)

    x = numbers(0).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: policy_loss(x, numbers(1), numbers(2), 0.2), (x,))
    assert torch.autograd.gradcheck(lambda x: value_loss(x, numbers(1), numbers(2), 0.2), (x,))


def test_more_padding_on_the_right_changes_no_advantage_no_loss_and_no_metric():
    """The one test that catches most masking mistakes."""
    generator = torch.Generator().manual_seed(0)
    logprobs, old, ref, values, old_values = torch.randn(5, 3, 4, generator=generator)
    scores = torch.tensor([1.0, -1.0, 2.0])

    def update(extra: int) -> list[float]:
        def pad(x: torch.Tensor) -> torch.Tensor:  # with garbage: the mask must keep it out
            return torch.cat([x, torch.full((3, extra), 7.0)], dim=1)

        mask = torch.cat([MASK, torch.zeros(3, extra, dtype=torch.bool)], dim=1)
        rewards = shape_rewards(scores, pad(old) - pad(ref), mask, 0.1)
        advantages, returns = gae(rewards, pad(old_values), mask, 1.0, 0.95)
        advantages = masked_whiten(advantages, mask)
        pg = policy_loss(pad(logprobs), pad(old), advantages, 0.2)
        vf = value_loss(pad(values), pad(old_values), returns, 0.2)
        meter = Meter()
        meter.add("pg", pg, mask)
        meter.add("vf", vf, mask)
        meter.maximum("max", (pad(logprobs) - pad(old)).abs(), mask)
        return [((pg + 0.1 * vf) * mask).sum().item(), *meter.means().values()]

    assert update(0) == pytest.approx(update(5), rel=1e-5)


# --- The loop ---


REWARD = """
def share_of_a(completions, **columns):
    return [(c.count("a") + 1) / (len(c) + 4) for c in completions]

def spread(completions, completion_ids, **columns):
    return [sum(ids) % 7 - 3.0 for ids in completion_ids]

def huge(completions, completion_ids, **columns):
    return [1e6 * (sum(ids) % 7 - 3.0) for ids in completion_ids]
"""
PROMPTS = ["x", "yy y", "zzz", "w", "the", "a b", "q", "rs"] * 4


@pytest.fixture
def job(tmp_path):
    """Run ppo.main on a small saved model: job(steps=.., flags..) -> list of metrics per step."""
    model = small_gpt2(dropout=0.1, vocab_size=20)
    folder = save_model(tmp_path / "small-gpt2", model, letter_tokenizer())
    (tmp_path / "reward.py").write_text(REWARD)
    lines = [json.dumps({"prompt": prompt}) for prompt in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    flags = {
        "model": folder, "prompts": tmp_path / "prompts.jsonl",
        "reward": f"{tmp_path}/reward.py:spread", "num_steps": 1, "prompts_per_step": 8,
        "max_new_tokens": 6, "temperature": 0.7, "micro_batch_size": 4, "rollout_batch_size": 3,
        "num_eval_prompts": 2, "device": "cpu", "output_dir": tmp_path / "run",
    }  # fmt: skip

    def run(**changes) -> list[dict]:
        args = ["--overwrite"]
        for name, value in (flags | changes).items():
            args += [f"--{name}", str(value)]
        ppo.main(args)
        text = (Path(flags["output_dir"]) / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    run.folder, run.model = Path(flags["output_dir"]), folder
    return run


METRICS = """objective/kl objective/kl_token objective/entropy objective/scores
objective/non_score_reward objective/rlhf_reward policy/approxkl_avg policy/clipfrac_avg
policy/entropy_avg loss/policy_avg loss/value_avg val/clipfrac_avg val/ratio val/ratio_max_dev_first
val/num_eos_tokens val/explained_variance length/mean length/max length/truncated_frac grad_norm lr
episode tokens_per_second time/rollout time/update memory/peak_gb""".split()


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_at_step_0_the_kl_is_0_and_the_first_ratio_1(job, tmp_path, architecture):
    """In float32, at temperature 0.7, with dropout in the config and padding on both sides."""
    make = {"gpt2": small_gpt2, "llama": small_llama}[architecture]
    folder = save_model(tmp_path / "m", make(dropout=0.1, vocab_size=20), letter_tokenizer())
    first = job(model=folder, num_epochs=2, num_mini_batches=2, prompts_per_step=64)[0]
    assert 0 < first["length/truncated_frac"] < 1, "no row ended early: nothing is padded"
    assert first["step"] == 0 and abs(first["objective/kl"]) < 1e-5
    assert first["val/ratio_max_dev_first"] < 1e-5
    assert first["val/explained_variance"] == 0


def test_dropout_left_on_moves_the_ratio_off_1(job):
    assert job(disable_dropout="false")[0]["val/ratio_max_dev_first"] > 1e-2


def test_a_run_writes_every_metric_finite_and_an_evaluation_before_and_after(job):
    lines = job(num_steps=2, eval_every=1)
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines[:2]:
        missing = [name for name in METRICS if not math.isfinite(line.get(name, math.nan))]
        assert not missing
    assert all("eval/reward" in line for line in lines)
    assert [line["episode"] for line in lines[:2]] == [8, 16]
    assert lines[0]["objective/rlhf_reward"] == pytest.approx(
        lines[0]["objective/scores"] + lines[0]["objective/non_score_reward"], abs=1e-5
    )
    samples = [json.loads(x) for x in (job.folder / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 6 and {"step", "prompt", "completion", "score"} == set(samples[0])


def test_the_saved_model_is_the_trained_one_and_the_configuration_is_resolved(job):
    before = AutoModelForCausalLM.from_pretrained(job.model)
    job(learning_rate=0.01)
    after = AutoModelForCausalLM.from_pretrained(job.folder / "model")
    moved = [(a != b).any() for a, b in zip(after.parameters(), before.parameters(), strict=True)]
    assert all(moved)
    assert after.config.resid_pdrop == 0.1  # dropout is off in the run, not in what it leaves
    config = json.loads((job.folder / "config.json").read_text())
    assert config["num_epochs"] == ppo.PRETRAINED["num_epochs"] and config["task"] == "sentiment"


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
    for module, name in ((runs, "evaluation"), (ppo, "training")):

        def spy(*args, original=module.generate, seen=seeds[name], **kwargs):
            seen.append(kwargs["generator"].initial_seed())
            return original(*args, **kwargs)

        monkeypatch.setattr(module, "generate", spy)
    job(num_steps=2, eval_every=1)
    assert len(seeds["evaluation"]) == 3 and len(set(seeds["evaluation"])) == 1
    assert not set(seeds["evaluation"]) & set(seeds["training"])


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


def test_the_micro_batch_changes_memory_and_speed_but_not_the_gradient(job, monkeypatch):
    """Ragged rows, so a mean of micro-batch means would differ (huggingface/trl#2617)."""
    recorded = record_gradients(monkeypatch)
    flags = {"num_epochs": 1, "temperature": 3.0, "prompts_per_step": 24}
    metrics = [job(micro_batch_size=n, **flags)[0] for n in (24, 8, 5, 1)]
    assert 1 < metrics[0]["length/mean"] < 6
    whole = recorded[0][0]
    assert max(g.abs().max() for g in whole) > 1e-2
    for (gradients, _), other in zip(recorded[1:], metrics[1:], strict=True):
        for g, expected in zip(gradients, whole, strict=True):
            assert torch.allclose(g, expected, atol=1e-6)
        for name in ("loss/policy_avg", "loss/value_avg", "policy/entropy_avg", "grad_norm"):
            assert other[name] == pytest.approx(metrics[0][name], abs=1e-5), name


def test_there_are_as_many_optimiser_steps_as_epochs_times_minibatches_and_lr_falls_to_0(
    job, monkeypatch
):
    """In TRL's PPO num_mini_batches added no steps (huggingface/trl#5645)."""
    rates = []
    step = torch.optim.AdamW.step

    def spy(self, *args, **kwargs):
        rates.append(self.param_groups[0]["lr"])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    job(num_steps=3, num_epochs=2, num_mini_batches=4, learning_rate=0.3)
    assert rates == pytest.approx([0.3] * 8 + [0.2] * 8 + [0.1] * 8)


def test_every_row_is_in_one_minibatch_per_epoch_and_the_order_changes(job, monkeypatch):
    seen = []
    original = ppo.completion_values

    def spy(model, rollout, *args):
        if torch.is_grad_enabled():
            seen.append(rollout.tokens)
        return original(model, rollout, *args)

    monkeypatch.setattr(ppo, "completion_values", spy)
    job(num_epochs=2, num_mini_batches=2, micro_batch_size=4)
    epochs = [torch.cat(seen[:2]), torch.cat(seen[2:])]
    rows = [sorted(map(tuple, epoch.tolist())) for epoch in epochs]
    assert len(epochs[0]) == 8 and rows[0] == rows[1]
    assert not torch.equal(*epochs)


def test_a_huge_reward_moves_the_weights_no_further_than_max_grad_norm(job, monkeypatch):
    recorded = record_gradients(monkeypatch)
    reward = f"{job.folder.parent}/reward.py:huge"
    job(reward=reward, max_grad_norm=0.5, num_epochs=1)
    norms = [torch.cat([g.flatten() for g in grads]).norm().item() for grads in recorded[0]]
    assert norms[0] > 100 and norms[1] == pytest.approx(0.5, rel=1e-4)


def test_without_kl_no_reference_forward_runs_and_the_kl_is_unknown_not_0(job, monkeypatch):
    models = set()
    original = ppo.completion_logprobs

    def spy(model, *args, **kwargs):
        models.add(id(model))
        return original(model, *args, **kwargs)

    monkeypatch.setattr(ppo, "completion_logprobs", spy)
    line = job(kl_coef=0)[0]
    assert len(models) == 1
    assert line["objective/kl"] is None and line["objective/non_score_reward"] == 0


def test_whitening_rewards_scales_them_but_leaves_the_logged_scores(job, monkeypatch):
    seen = []
    original = ppo.gae
    monkeypatch.setattr(ppo, "gae", lambda r, *args: seen.append(r) or original(r, *args))
    plain, white = job(kl_coef=0)[0], job(kl_coef=0, whiten_rewards="true")[0]
    assert plain["objective/scores"] == white["objective/scores"]
    mask = seen[0] != 0
    assert seen[1][mask].std() != pytest.approx(seen[0][mask].std().item())
    # The same mean over the real tokens, and variance 1.
    assert seen[1].sum().item() == pytest.approx(seen[0].sum().item(), abs=1e-3)


def test_the_missing_eos_penalty_is_taken_off_unfinished_rows_only(job):
    flags = {"temperature": 3.0, "prompts_per_step": 24}
    plain, fined = job(**flags)[0], job(missing_eos_penalty=10, **flags)[0]
    unfinished = plain["length/truncated_frac"]
    assert 0 < unfinished < 1
    assert plain["objective/scores"] - fined["objective/scores"] == pytest.approx(10 * unfinished)
    assert plain["val/num_eos_tokens"] == pytest.approx(24 * (1 - unfinished))


def test_several_generations_per_prompt_train_too(job):
    line = job(num_generations=4, prompts_per_step=3, rollout_batch_size=8)[0]
    assert line["episode"] == 12 and line["val/ratio_max_dev_first"] < 1e-5


def test_a_completion_that_is_eos_alone_trains_without_nan(job):
    """An empty completion has length 1: its only token is EOS."""
    line = job(max_new_tokens=1)[0]
    assert line["length/max"] == 1 and math.isfinite(line["grad_norm"])


def test_a_nan_gradient_stops_the_run_before_it_reaches_the_weights(job, monkeypatch):
    original = ppo.policy_loss
    calls = []

    def broken(*args):
        calls.append(1)
        return original(*args) * (math.nan if len(calls) > 4 else 1.0)

    monkeypatch.setattr(ppo, "policy_loss", broken)
    with pytest.raises(Fault, match=r"step 1: the gradient is nan; lower --learning_rate"):
        job(num_steps=3, num_epochs=1, num_mini_batches=2, micro_batch_size=2)
    model = AutoModelForCausalLM.from_pretrained(job.folder / "model")
    assert all(p.isfinite().all() for p in model.parameters())
    assert len((job.folder / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_reward_of_none_is_refused_since_ppo_has_no_group_to_leave_it_out_of(job):
    file = job.folder.parent / "none.py"
    file.write_text("def none(completions, **kw): return [None] * len(completions)\n")
    with pytest.raises(InputError, match="None"):
        job(reward=f"{file}:none")


def test_a_reward_that_fails_late_leaves_the_model_and_the_metrics_so_far(job):
    file = job.folder.parent / "late.py"
    file.write_text(
        "calls = []\n"
        "def late(completions, **kw):\n"
        "    calls.append(1)\n"
        "    # One call for the evaluation, then one per step.\n"
        "    return [1.0] * len(completions) if len(calls) < 5 else 1 / 0\n"
    )
    with pytest.raises(InputError, match="late raised ZeroDivisionError"):
        job(num_steps=9, reward=f"{file}:late", eval_every=100)
    assert len((job.folder / "metrics.jsonl").read_text().splitlines()) == 3
    AutoModelForCausalLM.from_pretrained(job.folder / "model")


def test_the_value_model_can_start_from_a_reward_model_that_shares_the_tokens(job, tmp_path):
    config = GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, num_labels=1)
    config.bos_token_id = config.eos_token_id = 19
    model = GPT2ForSequenceClassification(config)
    folder = save_model(tmp_path / "rm", model, letter_tokenizer())
    flags = {"reward_model": folder, "value_init": "reward_model"}
    built = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo, "initial_value_model", keep(built, ppo.initial_value_model))
        line = job(**flags)[0]
    assert math.isfinite(line["loss/value_avg"]) and built[0].head.in_features == 16
    with pytest.raises(InputError, match="needs --reward_model"):
        job(value_init="reward_model")
    save_model(tmp_path / "rm", model, byte_tokenizer())
    with pytest.raises(InputError, match="vocabulary"):
        job(**flags)


def keep(results: list, function):
    """The function, with its results kept in a list."""

    def kept(*args, **kwargs):
        results.append(function(*args, **kwargs))
        return results[-1]

    return kept


# --- Learning ---


def learn(job, **flags) -> tuple[float, float]:
    reward = f"{job.folder.parent}/reward.py:share_of_a"
    lines = job(
        reward=reward, num_steps=25, prompts_per_step=64, micro_batch_size=64, num_epochs=2,
        rollout_batch_size=64, learning_rate=1e-3, temperature=1.0, max_new_tokens=8,
        eval_every=100, kl_coef=0.01, **flags,
    )[:-1]  # fmt: skip
    scores = [line["objective/scores"] for line in lines]
    return sum(scores[:5]) / 5, sum(scores[-5:]) / 5


def test_ppo_raises_the_reward(job):
    before, after = learn(job)
    assert after > before + 0.3


def test_with_shuffled_advantages_the_reward_does_not_rise(job, monkeypatch):
    """The twin of the test above: what it measured is credit assignment, not drift."""
    generator = torch.Generator().manual_seed(0)

    def shuffled(rewards, values, mask, gamma, lam):
        advantages, returns = gae(rewards, values, mask, gamma, lam)
        flat = advantages[mask]
        advantages[mask] = flat[torch.randperm(len(flat), generator=generator)]
        return advantages, returns

    monkeypatch.setattr(ppo, "gae", shuffled)
    before, after = learn(job)
    assert after < before + 0.05


def test_eos_gets_a_gradient_where_pad_equals_eos():
    from common import completion_logprobs

    model = small_gpt2()
    rollout = make_rollout([[1, 2]], [[5, EOS]], extra_right=2)
    rollout.tokens[:, 4:] = EOS
    logprobs = completion_logprobs(model, rollout, 1.0)
    logprobs.retain_grad()
    loss = policy_loss(logprobs, logprobs.detach(), torch.ones(1, 4), 0.2)
    (loss * rollout.completion_mask).sum().backward()
    assert logprobs.grad.tolist() == [[-1, -1, 0, 0]]


def test_every_flag_has_a_help_text():
    fields = Config.__dataclass_fields__.values()
    assert all(field.metadata.get("help") for field in fields)
