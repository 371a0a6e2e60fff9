"""RLOO: its baseline and its loss, against their definitions written out in Python."""

import math

import pytest
import torch

import rloo
from common import InputError
from rloo import normalize, rloo_advantages, rloo_loss, sequence_ratio

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]).bool()
nan = math.nan


def numbers(seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(4, 4, generator=generator, dtype=torch.float64)


# --- Advantages ---


def naive_advantages(rewards: list[float], group_size: int) -> list[float]:
    advantages = []
    for i, reward in enumerate(rewards):
        start = i // group_size * group_size
        others = [rewards[j] for j in range(start, start + group_size) if j != i]
        others = [r for r in others if not math.isnan(r)]
        known = not math.isnan(reward) and others
        advantages.append(reward - sum(others) / len(others) if known else 0.0)
    return advantages


def test_the_baseline_is_the_mean_of_the_other_completions_of_the_prompt():
    rewards = [1.0, 2, 4, 3, 3, 3, 0, nan, 5, nan, nan, 1, nan, nan, nan, 7, 7, 9]
    ours = rloo_advantages(torch.tensor(rewards, dtype=torch.float64), 3)
    assert ours.tolist() == pytest.approx(naive_advantages(rewards, 3))


@pytest.mark.parametrize("group_size", [2, 4, 7])
def test_it_is_g_over_g_minus_1_times_the_distance_from_the_mean_of_the_group(group_size):
    rewards = torch.linspace(-3, 9, 4 * group_size, dtype=torch.float64) ** 2
    groups = rewards.view(4, group_size)
    expected = (groups - groups.mean(1, keepdim=True)) * group_size / (group_size - 1)
    assert torch.allclose(rloo_advantages(rewards, group_size), expected.flatten())


@pytest.mark.parametrize("group_size", [2, 3, 8, 12, 16])
def test_a_group_of_equal_rewards_gets_exactly_0_whatever_the_rounding(group_size):
    for reward in (0, 0.1, 0.3, 0.7, 1.1, -1e6):
        rewards = torch.full((2 * group_size,), reward)
        rewards[group_size + 1] += 1
        advantages = rloo_advantages(rewards, group_size)
        assert (advantages[:group_size] == 0).all() and (advantages[group_size:] != 0).all()


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="a group needs 2 or more"):
        rloo_advantages(torch.ones(3), 1)


def test_normalised_advantages_have_mean_0_and_std_1_over_those_that_are_known():
    rewards = torch.tensor([1.0, 2, nan, 5, -3, 4, 7, 7, 7])
    known = ~rewards.isnan()
    result = normalize(rloo_advantages(rewards, 3), known)
    assert result[~known].tolist() == [0] and result[6:].tolist() == [0, 0, 0]
    assert result[known].mean().item() == pytest.approx(0, abs=1e-6)
    assert result[known].std().item() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("num_known", [0, 1, 4])
def test_normalising_what_is_constant_gives_0_and_no_nan(num_known):
    known = torch.arange(4) < num_known
    assert (normalize(torch.zeros(4), known) == 0).all()


# --- Loss ---


def naive_loss(logprobs, old, advantages, mask, clip: float) -> float:
    losses = []
    for i, a in enumerate(advantages):
        ratio = math.exp(sum(logprobs[i][t] - old[i][t] for t in range(4) if mask[i, t]))
        losses.append(-min(ratio * a, min(max(ratio, 1 - clip), 1 + clip) * a))
    return sum(losses) / len(losses)


def test_the_loss_equals_its_definition_a_completion_being_one_action():
    logprobs, old = numbers(0, 0.3), numbers(1, 0.3)
    mask = MASK.clone()
    mask[3] = False  # a row that is masked as a whole
    for sign in (1, -1):
        advantages = sign * torch.tensor([1.0, -1.0, -0.5, 2.0], dtype=torch.float64)
        ours = rloo_loss(logprobs, old, advantages, mask, clip_range=0.2).item()
        lists = logprobs.tolist(), old.tolist(), advantages.tolist()
        assert ours == pytest.approx(naive_loss(*lists, mask, 0.2), rel=1e-12)


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "slope"),
    [
        (1.0, 1.5, -1.2, 0.0),  # good, already likelier by more than the range: no gradient
        (1.0, 0.5, -0.5, -0.5),
        (-1.0, 1.5, 1.5, 1.5),  # bad, and likelier: full gradient; a minimum would stop it
        (-1.0, 0.5, 0.8, 0.0),
        (1.0, 1.1, -1.1, -1.1),
        (-1.0, 0.9, 0.9, 0.9),
    ],
)
def test_the_clip_is_of_the_whole_completion(advantage, ratio, loss, slope):
    half = math.log(ratio) / 2  # two tokens share the log-ratio
    logprobs = torch.full((1, 2), half, dtype=torch.float64, requires_grad=True)
    value = rloo_loss(
        logprobs, torch.zeros(1, 2), torch.tensor([advantage]), torch.ones(1, 2), clip_range=0.2
    )
    value.backward()
    assert value.item() == pytest.approx(loss)
    assert logprobs.grad.tolist()[0] == pytest.approx([slope, slope])


def test_on_policy_the_gradient_is_that_of_plain_reinforce():
    x = numbers(0).requires_grad_()
    advantages = numbers(3)[0]
    rloo_loss(x, x.detach(), advantages, MASK, clip_range=0.2).backward()
    y = numbers(0).requires_grad_()
    (-advantages * (y * MASK).sum(1)).mean().backward()
    assert torch.allclose(x.grad, y.grad)


def test_the_gradient_equals_finite_differences():
    x, old, advantages = numbers(0, 0.1).requires_grad_(), numbers(1, 0.1), numbers(3)[0]
    assert torch.autograd.gradcheck(
        lambda x: rloo_loss(x, old, advantages, MASK, clip_range=0.2), (x,)
    )


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_shares_of_micro_batches_add_up_to_the_gradient_of_the_whole(size):
    old, x = numbers(1, 0.2).repeat(2, 1), numbers(0, 0.2).repeat(2, 1)
    mask, advantages = torch.cat([MASK, MASK.flip(0)]), torch.linspace(-2, 2, 8).double()
    whole, parts = (x.clone().requires_grad_() for _ in range(2))
    rloo_loss(whole, old, advantages, mask, clip_range=0.2).backward()
    for start in range(0, 8, size):
        rows = slice(start, start + size)
        rloo_loss(
            parts[rows], old[rows], advantages[rows], mask[rows], clip_range=0.2, num_rows=8
        ).backward()
    assert torch.allclose(parts.grad, whole.grad, atol=1e-12) and whole.grad.abs().max() > 1e-3


def test_padding_changes_neither_loss_nor_gradient_even_where_it_holds_nan():
    plain = numbers(0, 0.3).masked_fill(~MASK, 0).requires_grad_()
    expected = rloo_loss(plain, numbers(1, 0.3), numbers(3)[0], MASK, clip_range=0.2)
    expected.backward()
    for garbage in (7.0, 1e4, nan):
        logprobs = numbers(0, 0.3).masked_fill(~MASK, garbage).requires_grad_()
        old = numbers(1, 0.3).masked_fill(~MASK, -garbage)
        loss = rloo_loss(logprobs, old, numbers(3)[0], MASK, clip_range=0.2)
        loss.backward()
        assert loss.item() == expected.item() and torch.equal(logprobs.grad, plain.grad)


@pytest.mark.parametrize(("advantage", "loss", "slope"), [(1.0, -1.2, 0.0), (0.0, 0.0, 0.0)])
def test_a_ratio_that_overflows_exp_gives_no_nan_where_the_clip_stops_the_gradient(
    advantage, loss, slope
):
    logprobs = torch.zeros(1, 512, requires_grad=True)
    old = torch.full((1, 512), -0.2)  # log-ratio 102.4
    args = torch.tensor([advantage]), torch.ones(1, 512)
    value = rloo_loss(logprobs, old, *args, clip_range=0.2)
    value.backward()
    assert value.item() == pytest.approx(loss) and (logprobs.grad == slope).all()
    logprobs.grad = None
    worst = rloo_loss(logprobs, old, -torch.ones(1), torch.ones(1, 512), clip_range=0.2)
    worst.backward()
    assert math.exp(19) < worst.item() < math.inf
    assert (logprobs.grad > math.exp(19)).all(), "where it hurts the gradient stays"


def test_no_function_changes_its_inputs():
    inputs = [numbers(0), numbers(1), numbers(3)[0].clone(), MASK.clone()]
    before = [x.clone() for x in inputs]
    rloo_loss(*inputs, clip_range=0.2)
    sequence_ratio(inputs[0], inputs[1], inputs[3])
    normalize(rloo_advantages(inputs[2], 2), torch.ones(4).bool())
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


# --- The loop ---


def test_the_score_is_clipped_before_the_kl_is_taken_off(make_job, monkeypatch):
    """At the second step, where the KL is not 0."""
    job, seen, kls = make_job(rloo), [], []
    original, estimate = rloo.rloo_advantages, rloo.kl_estimate

    def keep_kl(logprobs, ref_logprobs, estimator):
        assert estimator == "k1"
        kls.append(estimate(logprobs, ref_logprobs, estimator))
        return kls[-1]

    monkeypatch.setattr(
        rloo, "rloo_advantages", lambda r, *args: seen.append(r) or original(r, *args)
    )
    monkeypatch.setattr(rloo, "kl_estimate", keep_kl)
    args = ["--overwrite", f"--model={job.model}", f"--output_dir={job.folder}", "--num_steps=2"]
    args += ["--prompts_per_step=3", "--max_new_tokens=6", "--num_eval_prompts=2", "--kl_coef=2"]
    args += [f"--reward={job.folder.parent}/reward.py:spread", "--learning_rate=0.01"]
    args += ["--temperature=0.7", "--bf16=false"]
    rloo.main([*args, "--reward_clip_range", "-1", "2"])
    kl = kls[1].sum(1)
    assert kl.abs().max() > 0.5
    scores = seen[1] + 2 * kl
    assert scores.min().item() == pytest.approx(-1, abs=1e-5)
    assert scores.max().item() == pytest.approx(2, abs=1e-5)
    assert (seen[1] < -1).any()  # so the KL was not clipped with it


@pytest.mark.parametrize("bounds", [["1"], ["2", "1"], ["1", "2", "3"]])
def test_a_mistaken_clip_range_of_the_reward_is_refused(bounds):
    with pytest.raises(InputError, match="give the lowest and the highest reward"):
        rloo.main(["--reward_clip_range", *bounds])
