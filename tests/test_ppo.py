"""PPO: its rewards, its losses, and what its loop alone does, on small models."""

import json
import math

import pytest
import torch
from small import EOS, byte_tokenizer, letter_tokenizer, make_rollout, save_model, small_gpt2
from tokenizers import Tokenizer
from transformers import GPT2Config, GPT2ForSequenceClassification, PreTrainedTokenizerFast

import ppo
from common import gae, masked_whiten, policy_ratio
from plumbing.errors import InputError
from plumbing.forward import completion_logprobs
from plumbing.metrics import Meter
from ppo import policy_loss, shape_rewards, value_loss

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
    value, clipped = policy_loss(logprobs, torch.zeros(1, 1), torch.tensor([[advantage]]), 0.2)
    value.sum().backward()
    assert value.item() == pytest.approx(loss)
    assert logprobs.grad.item() == pytest.approx(slope)  # d ratio / d logprob = ratio
    assert clipped.tolist() == [[slope == 0]], "counted as clipped where the clip doesn't decide?"


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_a_ratio_that_overflows_exp_gives_no_nan_and_a_bad_token_keeps_its_gradient(advantage):
    """exp(100) is infinite in float32: where the clip stops the gradient, 0 * inf would be NaN."""
    logprobs = torch.tensor([[100.0, 0.0]], requires_grad=True)
    loss, _ = policy_loss(logprobs, torch.zeros(1, 2), torch.tensor([[advantage, 1.0]]), 0.2)
    loss.sum().backward()
    assert loss.isfinite().all() and logprobs.grad.isfinite().all()
    assert (logprobs.grad[0, 0] > 0) == (advantage < 0) and logprobs.grad[0, 1] == -1


def test_where_the_value_clip_does_not_bite_rounding_does_not_pass_for_it():
    """old + (new - old) isn't new in float32: half of all tokens would count as clipped."""
    generator = torch.Generator().manual_seed(0)
    old, returns = torch.randn(2, 100, 10, generator=generator)
    old, values = 0.05 * old, 0.05 * torch.rand(100, 10, generator=generator)
    loss, clipped = value_loss(values, old, returns, 0.2)
    assert torch.equal(loss, 0.5 * (values - returns) ** 2)
    assert not clipped.any()


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
    result, clipped = value_loss(values, torch.zeros(1, 1), torch.tensor([[ret]]), 0.2)
    result.sum().backward()
    assert result.item() == pytest.approx(loss)
    assert values.grad.item() == pytest.approx(slope)
    assert clipped.tolist() == [[slope == 0]], "counted as clipped where the clip doesn't decide?"


def test_where_neither_bound_moves_the_loss_nothing_is_clipped():
    """An advantage of 0 at a large ratio; a value as far from its return as its bound is."""
    far = torch.tensor([[3.0]])
    assert policy_loss(far, torch.zeros(1, 1), torch.zeros(1, 1), 0.2)[1].tolist() == [[False]]
    # The value and its bound of 0.25 are equally far from the return.
    near, ret = torch.tensor([[0.5]]), torch.tensor([[0.375]])
    assert value_loss(near, torch.zeros(1, 1), ret, 0.25)[1].tolist() == [[False]]


def test_loss_gradients_equal_finite_differences():
    def numbers(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(2, 3, generator=generator, dtype=torch.float64)

    x = numbers(0).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: policy_loss(x, numbers(1), numbers(2), 0.2)[0], (x,))
    assert torch.autograd.gradcheck(lambda x: value_loss(x, numbers(1), numbers(2), 0.2)[0], (x,))


def test_more_padding_on_the_right_changes_no_advantage_no_loss_and_no_metric():
    """The one test that catches most masking mistakes."""
    generator = torch.Generator().manual_seed(0)
    logprobs, old, ref, values, old_values = torch.randn(5, 3, 4, generator=generator)
    scores = torch.tensor([1.0, -1.0, 2.0])

    def update(extra: int) -> list[float]:
        def pad(x: torch.Tensor, garbage: float = 7.0) -> torch.Tensor:  # the mask keeps it out
            return torch.cat([x, torch.full((3, extra), garbage)], dim=1)

        mask = torch.cat([MASK, torch.zeros(3, extra, dtype=torch.bool)], dim=1)
        rewards = shape_rewards(scores, pad(old) - pad(ref), mask, 0.1)
        advantages, returns = gae(rewards, pad(old_values), mask, 1.0, 0.95)
        advantages = masked_whiten(advantages, mask)
        pg, clipped = policy_loss(pad(logprobs), pad(old, 3.0), advantages, 0.2)
        vf, vf_clipped = value_loss(pad(values), pad(old_values, 3.0), returns, 0.2)
        rollout = make_rollout([[1]] * 3, [[1] * 3, [1], [1] * 4], extra_right=extra)
        meter, ratio = Meter(), policy_ratio(pad(logprobs) - pad(old, 3.0))
        arguments = pad(logprobs), pad(old, 3.0), pad(ref), ratio, clipped, mask
        meter.add_policy(rollout, torch.arange(3), *arguments)
        for name, x in {"pg": pg, "vf": vf, "vf_clipped": vf_clipped}.items():
            meter.add(name, x, mask)
        return [((pg + 0.1 * vf) * mask).sum().item(), *meter.results().values()]

    assert len(update(0)) == 11 and update(0) == pytest.approx(update(5), rel=1e-5)


# --- The loop ---


@pytest.fixture
def job(make_job):
    return make_job(ppo)


def test_whitening_rewards_scales_them_about_their_mean_but_leaves_the_logged_scores(
    job, monkeypatch
):
    """Over all real tokens: most have a reward of 0, and they count."""
    seen, original = [], ppo.gae

    def spy(rewards, values, mask, *args):
        seen.append((rewards, mask))
        return original(rewards, values, mask, *args)

    monkeypatch.setattr(ppo, "gae", spy)
    flags = {"kl_coef": 0, "completions": 32, "temperature": 3.0, "missing_eos_penalty": 5}
    plain, white = job(**flags)[0], job(whiten_rewards="true", **flags)[0]
    assert plain["objective/scores"] == white["objective/scores"]
    (plain, mask), (white, same_mask) = seen
    assert torch.equal(mask, same_mask) and not mask.all(), "no row ended early"
    assert (plain[mask] == 0).any() and (white[~mask] == 0).all(), "rewards at padding?"
    assert white[mask].std().item() == pytest.approx(1, rel=1e-4), "whitened over another mask?"
    mean, std = plain[mask].mean(), plain[mask].std()
    expected = mean + (plain[mask] - mean) / std
    assert abs(mean) > 0.05, "a mean of 0 would hide a shift"
    assert torch.allclose(white[mask], expected, atol=1e-5), "the mean of the rewards was shifted?"


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


def test_a_reward_of_none_is_refused_since_ppo_has_no_group_to_leave_it_out_of(job):
    file = job.folder.parent / "none.py"
    file.write_text("def none(completions, **kw): return [None] * len(completions)\n")
    with pytest.raises(InputError, match="None"):
        job(reward=f"{file}:none")


def test_the_value_model_can_start_from_a_reward_model_that_shares_the_tokens(job, tmp_path):
    config = GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, num_labels=1)
    config.bos_token_id = config.eos_token_id = 19
    model = GPT2ForSequenceClassification(config)
    folder = save_model(tmp_path / "rm", model, letter_tokenizer())
    flags = {"reward_model": folder, "value_init": "reward_model"}
    built, build = [], ppo.ValueModel.on_backbone_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo.ValueModel, "on_backbone_of", keep(built, build))
        line = job(**flags)[0]
    assert math.isfinite(line["loss/value_avg"])
    assert [value_model.head.in_features for value_model in built] == [16]
    with pytest.raises(InputError, match="needs --reward_model"):
        job(value_init="reward_model")
    exchanged = json.loads(letter_tokenizer().backend_tokenizer.to_str())
    ids = exchanged["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    exchanged = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(exchanged)), eos_token="<eos>"
    )
    for other in (byte_tokenizer(), exchanged):  # of another size, and of the same
        save_model(tmp_path / "rm", model, other)
        with pytest.raises(InputError, match="vocabulary"):
            job(**flags)


def keep(results: list, function):
    """The function, with its results kept in a list."""

    def kept(*args, **kwargs):
        results.append(function(*args, **kwargs))
        return results[-1]

    return kept


def test_eos_gets_a_gradient_where_pad_equals_eos():
    model = small_gpt2()
    rollout = make_rollout([[1, 2]], [[5, EOS]], extra_right=2)
    rollout.tokens[:, 4:] = EOS
    logprobs, _ = completion_logprobs(model, rollout, 1.0)
    logprobs.retain_grad()
    loss, _ = policy_loss(logprobs, logprobs.detach(), torch.ones(1, 4), 0.2)
    (loss * rollout.completion_mask).sum().backward()
    assert logprobs.grad.tolist() == [[-1, -1, 0, 0]]
