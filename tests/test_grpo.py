"""GRPO's and RLOO's advantages and GRPO's losses, against their definitions written out in Python.
test_by_hand.py has the loops.
"""

import inspect
import math
import re
import statistics
import typing
from pathlib import Path

import pytest
import torch
from small import UNEVEN as MASK
from small import near, numbers
from torch import Tensor

import grpo
from grpo import group_advantages, grpo_loss
from plumbing.config import parse_flags
from rloo import rloo_advantages, rloo_loss

KINDS = typing.get_args(typing.get_type_hints(grpo.Config)["loss_type"])
SCALES = ["group", "batch", "none", "mean", "rloo"]  # of GRPO; and RLOO
nan = math.nan


def advantages_of(rewards: Tensor, group_size: int, scale: str) -> Tensor:
    if scale == "rloo":
        return rloo_advantages(rewards, group_size)
    return group_advantages(rewards, group_size, scale)


def naive_advantages(rewards: list[float], group_size: int, scale: str) -> list[float]:
    known = [r for r in rewards if not math.isnan(r)]
    advantages = []
    for i, reward in enumerate(rewards):
        start = i // group_size * group_size
        group = [r for r in rewards[start : start + group_size] if not math.isnan(r)]
        if math.isnan(reward) or len(group) < 2:
            advantages.append(0.0)
            continue
        divisors = {"none": 1, "mean": statistics.mean(group)}
        divisors |= {k: statistics.stdev(x) + 1e-4 for k, x in (("group", group), ("batch", known))}
        # The reward less the mean of the others is G / (G - 1) times that less the mean of all.
        divisors |= {"rloo": (len(group) - 1) / len(group)}
        advantages.append((reward - statistics.mean(group)) / divisors[scale])
    return advantages


@pytest.mark.problem("rloo_advantages", 1, "rloo")
@pytest.mark.problem("group_advantages", 1, "group batch none mean")
@pytest.mark.parametrize("scale", SCALES)
def test_advantages_equal_their_definition_with_rewards_missing(scale):
    some = [1.0, 2, 4, 3, 3, 3, 0, nan, 5, nan, nan, 1, nan, nan, nan, 7, 7, 9]
    hint = f"scale {scale}; a reward of NaN gets 0, and stays out of mean and std"
    for rewards in (some, [nan, 7, nan]):
        ours = advantages_of(torch.tensor(rewards, dtype=torch.float64), 3, scale)
        near(ours, naive_advantages(rewards, 3, scale), hint)
    half = advantages_of(torch.tensor([1, 2, 4]).bfloat16(), 3, scale)
    assert scale == "rloo" or half.dtype == torch.float32, "half precision becomes float32"


@pytest.mark.filterwarnings("error")  # torch warns of a std of one number
@pytest.mark.parametrize("scale", SCALES)
def test_missing_rewards_print_no_warning(scale):
    advantages_of(torch.tensor([1.0, nan, nan, 2.0, 3.0, nan, nan, nan, nan]), 3, scale)


@pytest.mark.problem("rloo_advantages", 1, "rloo")
@pytest.mark.problem("group_advantages", 1, "group batch none mean")
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("group_size", [2, 8, 12])
def test_equal_rewards_get_exactly_0(group_size, scale):
    """In float32 the std of equal values is not 0: other code gives advantages of .4 to .9."""
    for reward in (0.0, 0.1, 0.3, 0.7, 1.1, 1e-6, -1e-6, 0.1e6, 1e6, -1e6):
        reward = abs(reward) if scale == "mean" else reward
        rewards = torch.full((2 * group_size,), reward)
        rewards[group_size + 1] += 1
        advantages = advantages_of(rewards, group_size, scale)
        assert (advantages[:group_size] == 0).all(), "exactly 0, without what rounding leaves"
        assert (advantages[group_size:] != 0).any(), "the rewards of this group differ"
        rewards[0] = nan  # one that is missing doesn't make the others differ
        first = advantages_of(rewards, group_size, scale)[:group_size]
        assert (first == 0).all(), "exactly 0 too where a reward of the group is NaN"
    assert advantages_of(torch.tensor([1.0, 1.0001]), 2, scale).all(), "these differ"


@pytest.mark.problem("group_advantages", 1, "group std mean")
@pytest.mark.parametrize(("size", "scale"), [(1, "group"), (1, "rloo"), (2, "std"), (4, "mean")])
def test_advantages_refuse_groups_of_one_and_unknown_scales(size, scale):
    with pytest.raises(ValueError):
        advantages_of(torch.tensor([1.0, 1, -0.5, 1]), size, scale)
    right = group_advantages(torch.tensor([0.0, 2, 4, 6]), 2)
    near(right, [-0.70706, 0.70706] * 2, "a group of two is right", atol=1e-4)


# --- Loss ---

FLAGS = [{}, {"kl_coef": 0.4, "clip_range_high": 0.3}, {"kl_coef": 1, "kl_estimator": "unbiased"}]


def options(kind: str, **more: object) -> dict:
    return {"clip_range": 0.2, "cispo_bound": 1.1, "max_new_tokens": 4, "loss_type": kind} | more


def naive_loss(logprobs, old, advantages, mask, ref, given: dict) -> tuple[Tensor, list, list]:
    """Token by token: (loss, ratios, the tokens where the clip decides). GSPO has one ratio a row,
    the geometric mean.
    """
    rows, ratios, clipped = [], [], []
    kind, high = given["loss_type"], 1 + given.get("clip_range_high", 0.2)
    for i, a in enumerate(advantages.tolist()):
        tokens = [t for t in range(4) if mask[i, t]]
        d, row = logprobs[i, tokens] - old[i, tokens], []
        for t, of_token in zip(tokens, d, strict=True):
            ratio = d.mean().exp() if kind == "gspo" else of_token.exp()
            value = -torch.min(ratio * a, ratio.clamp(0.8, high) * a)
            stopped = (a > 0 and ratio > high) or (a < 0 and ratio < 0.8)
            if kind == "cispo":
                value = -ratio.clamp(max=1.1).detach() * a * logprobs[i, t]
                stopped = a != 0 and ratio > 1.1
            ratios.append(ratio.item())
            clipped += [[i, t]] if stopped else []
            r = ref[i, t] - logprobs[i, t]
            weight = of_token.exp() if "kl_estimator" in given else 1  # gspo: of the token too
            row.append(value + given.get("kl_coef", 0) * weight * (r.exp() - 1 - r))
        rows.append(row)
    if kind in ("grpo", "gspo"):
        return sum(sum(row) / max(1, len(row)) for row in rows) / len(rows), ratios, clipped
    count = len(rows) * 4 if kind == "dr_grpo" else sum(map(len, rows))
    return sum(map(sum, rows)) / max(1, count), ratios, clipped


@pytest.mark.problem("grpo_loss", 1)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_are_those_of_the_definition(kind, flags):
    """Padding holds NaN, a row is masked as a whole, and no input is changed."""
    mask, given = torch.cat([MASK, MASK[:1] & False]), options(kind, **flags)
    inputs = (torch.cat([numbers(i, 0.5), numbers(9)[:1]]) - 2 for i in range(3))
    x, old, ref = (y.masked_fill(~mask, nan).requires_grad_() for y in inputs)
    for sign in (1, -1, 0):
        inputs = x, old, sign * torch.tensor([1.0, -1.0, -0.5, 2.0, 1.0]).double(), mask, ref
        before = [y.clone() for y in inputs]
        loss, ratio, clipped = grpo_loss(*inputs[:4], ref_logprobs=ref, **given)
        for y, was in zip(inputs, before, strict=True):
            assert torch.equal(y.nan_to_num(9), was.nan_to_num(9)), "an input is changed"
        expected, ratios, stopped = naive_loss(*inputs, given)
        hint = "padding may hold NaN, a row may have no tokens; kl_estimator, clip_range_high?"
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6), hint
        near(ratio[mask], ratios, "the loss is right, the ratio that it returns isn't", 1e-6)
        assert clipped.dtype == torch.bool and clipped.shape == mask.shape, "a mask of tokens"
        assert (clipped & mask).nonzero().tolist() == stopped, "where the clip decides"
        assert bool(stopped) == (sign != 0), "each clip decides somewhere"
        ours, theirs = (torch.autograd.grad(y, x)[0] for y in (loss, expected))
        near(ours, theirs, "the loss is right, the gradient isn't", 1e-5, 1e-12)
        assert not ours[~mask].any(), "a gradient at padding"


@pytest.mark.problem("grpo_loss", 1)
@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens_cost_nothing_and_unknown_losses_are_refused(kind):
    x, A, given = numbers(0).requires_grad_(), numbers(2)[0], options(kind, kl_coef=0.5)
    for mask in (MASK, torch.zeros(4, 4).long()):  # of numbers, as a tokenizer's
        loss, _, _ = grpo_loss(x, numbers(1), A, mask, ref_logprobs=numbers(3), **given)
        expected, _, _ = naive_loss(x, numbers(1), A, mask, numbers(3), given)
        expected = torch.as_tensor(expected).item()
        hint = "another loss with tokens" if mask.any() else "a division by 0 tokens?"
        assert loss.item() == pytest.approx(expected), hint
    assert not torch.autograd.grad(loss, x)[0].any(), "a division by 0 tokens?"
    for more in ({"loss_type": "ppo", "max_new_tokens": 4}, {"loss_type": "dr_grpo"}):
        with pytest.raises(ValueError):  # the second lacks its constant
            grpo_loss(x, numbers(1), A, MASK, clip_range=0.2, **more)


@pytest.mark.problem("grpo_loss", 1, "grpo dapo dr_grpo gspo cispo")
@pytest.mark.problem("rloo_loss", 1, "rloo")
@pytest.mark.parametrize("kind", [*KINDS, "rloo"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_micro_batches_add_up_to_the_whole_gradient(size, kind):
    """Every loss type, with ragged rows (huggingface/trl#7249, #6024)."""
    old, ref, x = (numbers(i, 0.5).repeat(2, 1) for i in range(3))
    mask, A = torch.cat([MASK, MASK.flip(0)]), torch.linspace(-2, 2, 8).double()

    def loss_of(logprobs: Tensor, r: slice, **counts) -> tuple[Tensor, Tensor, Tensor]:
        if kind == "rloo":
            loss = rloo_loss(logprobs[r], A[r], mask[r], counts.get("num_rows"))
            return loss, mask[r], mask[r]
        args = logprobs[r], old[r], A[r], mask[r]
        return grpo_loss(*args, ref_logprobs=ref[r], **options(kind, kl_coef=0.3), **counts)

    whole, parts = (x.clone().requires_grad_() for _ in range(2))
    loss, _, clipped = loss_of(whole, slice(None))
    if kind != "rloo":
        loss, _, _ = naive_loss(whole, old, A, mask, ref, options(kind, kl_coef=0.3))
    loss.backward()
    for rows in (slice(start, start + size) for start in range(0, 8, size)):
        share, _, part = loss_of(parts, rows, num_rows=8, num_tokens=mask.sum())
        share.backward()
        assert torch.equal(part, clipped[rows]), f"where the clip decides: {rows}"
    hint = "another gradient, or shares too large: the counts are those of the whole minibatch"
    near(parts.grad, whole.grad, hint, 1e-5, 1e-12)
    assert whole.grad.abs().max() > 1e-3


def test_cispo_clips_no_ratio_at_its_bound():
    same, more = numbers(0), {"loss_type": "cispo", "cispo_bound": 1.0, "clip_range": 0.2}
    assert not grpo_loss(same, same, numbers(3)[0], MASK, **more)[2].any()


# --- The commands of docs/running.md ---

CLIP = {"clip_range": 0.2, "clip_range_high": None, "kl_coef": 0}
VARIANTS = {  # by the papers; the losses themselves are above, test_exact.py has MaxRL's gradient
    "Dr. GRPO": CLIP | {"loss_type": "dr_grpo", "scale_rewards": "none"},  # arXiv 2503.20783
    "DAPO": CLIP | {"loss_type": "dapo", "scale_rewards": "group", "clip_range_high": 0.28},
    "GSPO": {"loss_type": "gspo", "clip_range": 3e-4, "clip_range_high": 4e-4, "kl_coef": 0},
    "CISPO": {"loss_type": "cispo", "scale_rewards": "group", "kl_coef": 0},  # arXiv 2506.13585
    "MaxRL": {"loss_type": "dr_grpo", "scale_rewards": "mean", "kl_coef": 0},  # arXiv 2602.02710
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_command_has_the_settings_of_its_paper(variant, tmp_path):
    page = Path(grpo.__file__).with_name("docs") / "running.md"
    [command] = re.findall(rf"^\| {variant} \| `python grpo.py (.*)` \|", page.read_text(), re.M)
    flags = [*command.split(), f"--output_dir={tmp_path}"]
    config = parse_flags(grpo.Config, "", {"tiny": grpo.TINY}, flags)
    assert vars(config).items() >= VARIANTS[variant].items()
    assert inspect.signature(grpo_loss).parameters["cispo_bound"].default == 5
    assert config.loss_type == "dr_grpo" or config.num_mini_batches > 1, "else no bound ever acts"
