"""The functions of the course as its handouts teach them, by numbers that were worked out by hand:
no NaN, no overflow, no half precision. The other tests ask what a function does with those.
"""

import math

import pytest
import torch
from small import near
from torch import Tensor

from common import completion_mask, gae, kl_estimate, masked_whiten, token_logprobs
from grpo import group_advantages, grpo_loss
from plumbing.preferences import last_real_token
from ppo import shape_rewards
from reward_model import preference_loss
from rloo import rloo_advantages, rloo_loss
from sampling import decode

LENGTHS = "over real tokens alone, each by its own row? what stands at padding has no part in it"


def slope(found: Tensor, x: Tensor) -> Tensor:
    """The gradient of a sum."""
    assert found.requires_grad, "no gradient gets through: is something detached?"
    (gradient,) = torch.autograd.grad(found.sum(), x, allow_unused=True)
    assert gradient is not None, "no gradient gets through: is something detached?"
    return gradient


@pytest.mark.problem("token_logprobs", 2)
def test_a_token_has_the_log_of_its_probability():
    chances = torch.tensor([[[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]])
    logits = (chances.log() + 3).requires_grad_()  # 3 more on each changes nothing
    found = token_logprobs(logits, torch.tensor([[2, 0]]))
    near(found, [[-1.38629, -2.30259]], "the log of 0.25 and of 0.1")
    near(slope(found, logits), [[[-0.5, -0.25, 0.75], [0.9, -0.2, -0.7]]], "of which logits?")


@pytest.mark.problem("kl_estimate", 3)
@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_each_kl_estimate_has_its_value_and_slope(name):
    values = {"k1": [0.5, -1, 0], "k2": [0.125, 0.5, 0], "k3": [0.106531, 0.718282, 0]}
    slopes = {"k1": [1, 1, 1], "k2": [0.5, -1, 0], "k3": [0.393469, -1.718282, 0]}
    policy = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    found = kl_estimate(policy, torch.tensor([-1.5, -1.0, -0.5]), name)
    near(found, values[name], "of the policy to the reference, not the other way round")
    near(slope(found, policy), slopes[name], "the values are right, the gradient isn't")


@pytest.mark.problem("completion_mask", 2)
def test_eos_is_an_action_and_what_follows_is_none():
    found = completion_mask(torch.tensor([[5, 9, 7], [5, 6, 7], [9, 9, 1]]), [9])
    near(found, [[1, 1, 0], [1, 1, 1], [1, 0, 0]], "EOS is 9, and is an action itself")


NUMBERS, OF_THEM = torch.tensor([[2.0, 4, 9], [6, 9, 9]]), torch.tensor([[1, 1, 0], [1, 0, 0]])


@pytest.mark.problem("masked_whiten", 1)
def test_whitened_numbers_keep_their_distances_and_have_mean_0():
    found = masked_whiten(NUMBERS, OF_THEM.bool())
    hint = "divided by the first: the real numbers are 2, 4 and 6, and their mean is 4"
    near(found / found[0, 0], [[1, 0, 0], [-1, 0, 0]], hint)


@pytest.mark.problem("masked_whiten", 1)
def test_whitened_numbers_have_variance_1():
    hint = "the real numbers are 2, 4 and 6: their variance, with Bessel's correction, is 4"
    near(masked_whiten(NUMBERS, OF_THEM.bool()), [[-1, 0, 0], [1, 0, 0]], hint)


@pytest.mark.problem("gae", 3)
def test_an_advantage_is_the_recursion_from_the_last_token():
    rewards, values = torch.tensor([[1.0, 0, 2], [3, 7, 7]]), torch.tensor([[1.0, 2, 4], [1, 7, 7]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    advantages, returns = (x[mask] for x in gae(rewards, values, mask, gamma=0.5, lam=0.8))
    hint = "deltas are 1, 0, -2; after the last real token V and A are 0"
    near(advantages, [0.68, -0.8, -2, 2], f"advantages: {hint}")
    near(returns, [1.68, 1.2, 2, 3], "the advantages are right, the returns aren't")


@pytest.mark.problem("shape_rewards", 2)
def test_tokens_pay_their_kl_and_the_last_is_scored():
    kl = torch.tensor([[1.0, 2, 3, 0], [4, 0, 0, 0]])
    found = shape_rewards(torch.tensor([10.0, 20.0]), kl, kl > 0, kl_coef=0.5)  # 0: padding
    near(found, [[-0.5, -1, 8.5, 0], [18, 0, 0, 0]], "a KL costs; the score is at the last token")


@pytest.mark.problem("rloo_advantages", 2)
def test_the_baseline_is_the_mean_of_the_others():
    found = rloo_advantages(torch.tensor([1.0, 2, 6, 0, 0, 3]), 3)
    near(found, [-3, -1.5, 4.5, -1.5, -1.5, 3], "the first two rows have baselines of 4 and 3.5")


@pytest.mark.problem("group_advantages", 3)
def test_a_score_is_compared_with_its_group():
    found = group_advantages(torch.tensor([1.0, 2, 3, 4, 4, 10]), 3)
    hint = "the groups have means of 2 and 6, stds of 1 and 3.4641 with Bessel's correction"
    near(found, [-0.9999, 0, 0.9999, -0.577334, -0.577334, 1.154667], hint)


@pytest.mark.problem("rloo_loss", 2)
def test_a_completion_is_one_action_with_one_log_prob():
    advantages, lengths = torch.tensor([1.0, 2, -1, -3]), torch.tensor([3, 1, 4, 2])
    mask = torch.arange(4) < lengths[:, None]
    logprobs = torch.where(mask, torch.tensor([[-1.0], [-2], [-0.5], [-4]]), 7).requires_grad_()
    loss = rloo_loss(logprobs, advantages, mask)
    hint = "the rows have [3, 4, -2, -24], and the loss is their mean"
    near(loss, -4.75, f"{hint}. Is a row's log-prob of all its tokens, {LENGTHS}")
    expected = (-advantages / 4)[:, None] * mask
    near(slope(loss, logprobs), expected.tolist(), "the loss is right, the gradient isn't")


RATIOS = torch.tensor([[1.5, 0.5, 1.1], [0.5, 1.5, 9.0]])
NEW = torch.tensor([[-1.0, -2, -0.5], [-1, -2, 5]])  # the last number is padding
REAL = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
# Advantages 1 and -2: the tokens' losses are -1.2, -0.5, -1.1 and 1.6, 3.
AVERAGES = {"grpo": 0.683333, "dapo": 0.36, "dr_grpo": 0.09, "cispo": -0.61}


def loss_of(loss_type: str, **more: object) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs, loss, clipped)"""
    new = NEW.clone().requires_grad_()
    options = {"clip_range": 0.2, "cispo_bound": 1.2, "max_new_tokens": 10, "loss_type": loss_type}
    advantages = torch.tensor([1.0, -2.0])
    loss, _, clipped = grpo_loss(new, NEW - RATIOS.log(), advantages, REAL, **options | more)
    return new, loss, clipped & REAL


@pytest.mark.problem("grpo_loss", 3)
def test_grpo_clips_each_token_and_takes_means_of_rows():
    new, loss, clipped = loss_of("grpo")
    near(loss, AVERAGES["grpo"], f"a mean of each row, then of the rows. Is it {LENGTHS}")
    expected = torch.tensor([[0, -0.083333, -0.183333], [0, 0.75, 0]])
    near(slope(loss, new), expected.tolist(), "the loss is right, the gradient isn't")
    assert clipped.tolist() == [[True, False, False]] * 2, "where the clip decides"
    new, loss, _ = loss_of("grpo", ref_logprobs=NEW + math.log(2), kl_coef=0.5)
    near(loss, AVERAGES["grpo"] + 0.153426, "0.5 times a k3 of 0.306853 at each token")
    expected -= torch.tensor([[0.083333], [0.125]]) * REAL
    near(slope(loss, new), expected.tolist(), "the KL in the loss has a gradient of its own")


@pytest.mark.problem("grpo_loss", 1)
@pytest.mark.parametrize("loss_type", [name for name in AVERAGES if name != "grpo"])
def test_the_other_losses_take_other_means(loss_type):
    _, loss, _ = loss_of(loss_type)
    near(loss, AVERAGES[loss_type], "over tokens, or rows times max_new_tokens; a bound for cispo")


PAIRS = {  # (margin, weight): the losses and slopes of two pairs
    (0.0, 0.0): ([0.313262, 3.048587], [-0.268941, -0.952574]),
    (1.0, 0.0): ([0.693147, 4.018150], [-0.5, -0.982014]),
    (0.0, 0.1): ([1.213262, 3.948587], [0.331059, -0.352574]),
}


@pytest.mark.problem("preference_loss", 3)
@pytest.mark.parametrize("margin, center", PAIRS)
def test_a_pair_costs_less_the_more_the_chosen_leads(margin, center):
    losses, slopes = PAIRS[margin, center]
    chosen, rejected = torch.tensor([2.0, 0.0], requires_grad=True), torch.tensor([1.0, 3.0])
    found = preference_loss(chosen, rejected, torch.full((2,), margin), center)
    near(found, losses, f"leads of 1 and -3, a margin of {margin}, a weight of {center}")
    near(slope(found, chosen), slopes, "the loss is right, the gradient isn't")


@pytest.mark.problem("last_real_token", 2)
def test_a_text_is_scored_at_its_last_real_token():
    x = torch.arange(24.0).view(3, 4, 2).requires_grad_()
    found = last_real_token(x, torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]]))
    near(found, [[0, 1], [14, 15], [20, 21]], "of texts of 1, 4 and 3 tokens")
    assert slope(found, x).sum() == 6, "each of the six numbers that are taken has a slope of 1"


@pytest.mark.problem("decode", 3)
def test_the_loop_draws_notes_and_reads_token_by_token():
    """A model that is written down: whatever it reads, it goes on with these tokens."""
    script, read = [([2, 1], [-0.1, -0.2]), ([0, 1], [-0.3, -0.4]), ([1, 2], [-0.5, -0.6])], []
    uniforms, settings = torch.tensor([[0.6, 0.05], [0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]), {}

    def step(drawn: Tensor, uniform: Tensor, given: dict) -> tuple[Tensor, Tensor]:
        tokens, logprobs = script[len(read)]
        read.append((drawn.tolist(), uniform, given))
        return torch.tensor(tokens), torch.tensor(logprobs)

    step.has_graphs = True  # so it keeps its rows
    settings["temperature"] = 2.0
    logits = 2 * torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]).log()
    tokens, logprobs, ends = decode(step, logits, uniforms, torch.tensor([2]), None, settings)
    near(tokens[:, 0], [1, 0], "the first token is drawn from the logits, by uniforms[0], settings")
    near(logprobs[:, 0], [-1.386294, -2.302585], "the log-probs of the first tokens")
    assert [drawn for drawn, _, _ in read] == [[1, 0], [2, 1], [0, 1]], "what the step reads"
    hint = "the step at column t gets uniforms[t]"
    near(torch.stack([x for _, x, _ in read]), uniforms[1:], hint)
    assert all(given == settings for *_, given in read), "each draw takes the settings"
    near(tokens[0, :2], [1, 2], "the row that ends with EOS, which is 2")
    near(tokens[1], [0, 1, 1, 2], "the row that fills the width")
    near(logprobs[1, 1:], [-0.2, -0.4, -0.6], "a log-prob stands at its token")
    near(ends[1], [0, 0, 0, 1], "the tokens that end a completion")
    near(ends[0, :2], [0, 1], "the tokens that end a completion")
