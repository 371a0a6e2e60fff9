"""GRPO's and RLOO's advantages and GRPO's losses, against their definitions written out in Python.
test_by_hand.py has the loops.
"""

import inspect
import itertools
import math
import re
import statistics
import typing
from pathlib import Path

import pytest
import torch
from small import UNEVEN as MASK
from small import numbers

import grpo
from grpo import group_advantages, grpo_loss
from plumbing.config import parse_flags
from rloo import rloo_advantages, rloo_loss

KINDS = typing.get_args(typing.get_type_hints(grpo.Config)["loss_type"])
SCALES = ["group", "batch", "none", "mean", "rloo"]  # of GRPO; and RLOO
nan = math.nan


def advantages_of(rewards: torch.Tensor, group_size: int, scale: str) -> torch.Tensor:
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
    rewards = [1.0, 2, 4, 3, 3, 3, 0, nan, 5, nan, nan, 1, nan, nan, nan, 7, 7, 9]
    ours = advantages_of(torch.tensor(rewards, dtype=torch.float64), 3, scale)
    hint = f"scale {scale}; a reward of NaN gets 0, and stays out of mean and std"
    assert ours.tolist() == pytest.approx(naive_advantages(rewards, 3, scale), abs=1e-5), hint


@pytest.mark.filterwarnings("error")  # of one number there is no std
@pytest.mark.parametrize("scale", SCALES)
def test_groups_with_less_than_two_known_rewards_get_0(scale):
    for rewards in ([nan, nan, nan], [nan, 7.0, nan]):
        assert advantages_of(torch.tensor(rewards), 3, scale).tolist() == [0, 0, 0]
    half = torch.tensor([1, 2, 4]).bfloat16()  # RLOO only subtracts
    assert scale == "rloo" or advantages_of(half, 3, scale).dtype == torch.float32


@pytest.mark.problem("rloo_advantages", 1, "rloo")
@pytest.mark.problem("group_advantages", 1, "group batch none mean")
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("group_size", [2, 8, 12])
def test_equal_rewards_get_exactly_0(group_size, scale):
    """In float32 the std of equal values is not 0: other code gives advantages of .4 to .9."""
    for reward in (0.0, 0.1, 0.3, 0.7, 1.1, 1e-6, -1e-6, 0.1e6, 1e6, -1e6):
        if reward < 0 and scale == "mean":
            continue
        rewards = torch.full((2 * group_size,), reward)
        rewards[group_size + 1] += 1
        advantages = advantages_of(rewards, group_size, scale)
        assert (advantages[:group_size] == 0).all(), "exactly 0, without what rounding leaves"
        assert (advantages[group_size:] != 0).any(), "the rewards of this group differ"
        rewards[0] = nan  # one that is missing doesn't make the others differ
        assert (advantages_of(rewards, group_size, scale)[:group_size] == 0).all()
    assert advantages_of(torch.tensor([1.0, 1.0001]), 2, scale).all(), "these differ"


# --- Loss ---


def options(kind: str) -> dict:
    more = dict(clip_range=0.2, clip_range_high=0.3, cispo_bound=1.1, max_new_tokens=4)
    return more | {"loss_type": kind}


def naive_loss(logprobs, old, advantages, mask, kind, ref, kl_coef, estimator, high):
    """Token by token: (loss, the tokens where the clip decides). The clip is 0.2 below, the bound
    of cispo 1.1.
    """
    rows, clipped = [], []
    for i, a in enumerate(advantages.tolist()):
        tokens = [t for t in range(4) if mask[i, t]]
        d, row = logprobs[i, tokens] - old[i, tokens], []
        for t, of_token in zip(tokens, d, strict=True):
            ratio = d.mean().exp() if kind == "gspo" else of_token.exp()
            value = -torch.min(ratio * a, ratio.clamp(0.8, 1 + high) * a)
            stopped = (a > 0 and ratio > 1 + high) or (a < 0 and ratio < 0.8)
            if kind == "cispo":
                value = -ratio.clamp(max=1.1).detach() * a * logprobs[i, t]
                stopped = a != 0 and ratio > 1.1
            clipped += [[i, t]] if stopped else []
            r = ref[i, t] - logprobs[i, t]
            weight = of_token.exp() if estimator == "unbiased" else 1  # gspo: of the token too
            row.append(value + kl_coef * weight * (r.exp() - 1 - r))
        rows.append(row)
    if kind in ("grpo", "gspo"):
        return sum(sum(row) / max(1, len(row)) for row in rows) / len(rows), clipped
    count = len(rows) * 4 if kind == "dr_grpo" else sum(map(len, rows))
    return sum(map(sum, rows)) / max(1, count), clipped


FLAGS = [(None, "k3", None), (0.4, "k3", 0.3), (1.0, "unbiased", 0.3)]  # None: not given


@pytest.fixture(scope="module", params=itertools.product(KINDS, FLAGS), ids=str)
def losses(request) -> list[tuple]:
    """Log-probs, ours and what is expected, each loss with its clips, of advantages of either sign
    and of none. Padding holds NaN, a row is masked as a whole, and no input is changed.
    """
    kind, (kl_coef, estimator, high) = request.param
    more = options(kind) | {"kl_estimator": estimator, "clip_range_high": high}
    more |= {} if kl_coef is None else {"kl_coef": kl_coef}
    mask, found = torch.cat([MASK, MASK[:1] & False]), []
    logprobs, old, ref = (torch.cat([numbers(i, 0.5), numbers(9)[:1]]) - 2 for i in range(3))
    x, old, ref = (y.masked_fill(~mask, nan).requires_grad_() for y in (logprobs, old, ref))
    for sign in (1, -1, 0):
        inputs = x, old, sign * torch.tensor([1.0, -1.0, -0.5, 2.0, 1.0]).double(), mask
        before = [y.clone() for y in (*inputs, ref)]
        ours = grpo_loss(*inputs, ref_logprobs=ref, **more)[::2]  # loss, clipped
        for y, was in zip((*inputs, ref), before, strict=True):
            assert torch.equal(y.nan_to_num(9), was.nan_to_num(9))
        expected = naive_loss(*inputs, kind, ref, kl_coef or 0, estimator, high or 0.2)
        found.append((x, mask, *ours, *expected))
    return found


@pytest.mark.problem("grpo_loss", 1)
def test_loss_and_gradient_are_those_of_the_definition(losses):
    for x, mask, loss, clipped, expected, stopped in losses:
        hint = "padding may hold NaN, a row may have no tokens; kl_estimator, clip_range_high?"
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6), hint
        assert clipped.dtype == torch.bool and clipped.shape == mask.shape, "a mask of tokens"
        assert (clipped & mask).nonzero().tolist() == stopped, "where the clip decides"
        ours, theirs = (torch.autograd.grad(y, x)[0] for y in (loss, expected))
        assert torch.allclose(ours, theirs, atol=1e-12), "the loss is right, the gradient isn't"
        assert not ours[~mask].any(), "a gradient at padding"
    assert losses[0][-1] and losses[1][-1] and not losses[2][-1], "each clip decides somewhere"


@pytest.mark.problem("grpo_loss", 1)
@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens_cost_nothing_and_unknown_losses_are_refused(kind):
    x, A = numbers(0).requires_grad_(), numbers(2)[0]
    for mask in (MASK, torch.zeros(4, 4).long()):  # of numbers, as a tokenizer's
        more = options(kind) | {"ref_logprobs": numbers(3), "kl_coef": 0.5}
        loss, _, _ = grpo_loss(x, numbers(1), A, mask, **more)
        expected, _ = naive_loss(x, numbers(1), A, mask, kind, numbers(3), 0.5, "k3", 0.3)
        expected = torch.as_tensor(expected)
        hint = "another loss with tokens" if mask.any() else "a division by 0 tokens?"
        assert loss.item() == pytest.approx(expected.item()), hint
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

    def loss_of(logprobs: torch.Tensor, r: slice, **counts) -> tuple[torch.Tensor, torch.Tensor]:
        args = logprobs[r], old[r], A[r], mask[r]
        if kind == "rloo":
            return rloo_loss(*args, clip_range=0.2, num_rows=counts.get("num_rows"))
        return grpo_loss(*args, ref_logprobs=ref[r], kl_coef=0.3, **options(kind), **counts)

    whole, parts = (x.clone().requires_grad_() for _ in range(2))
    loss, _, clipped = loss_of(whole, slice(None))
    if kind != "rloo":
        loss, _ = naive_loss(whole, old, A, mask, kind, ref, 0.3, "k3", 0.3)
    loss.backward()
    for start in range(0, 8, size):
        rows = slice(start, start + size)
        share, _, part = loss_of(parts, rows, num_rows=8, num_tokens=mask.sum())
        share.backward()
        assert torch.equal(part, clipped[rows])
    hint = "another gradient, or shares too large: the counts are those of the whole minibatch"
    assert torch.allclose(parts.grad, whole.grad, atol=1e-12), hint
    assert whole.grad.abs().max() > 1e-3


@pytest.mark.parametrize("on_policy", [True, False])
def test_the_unbiased_kl_has_the_gradient_of_the_kl(on_policy):
    """By enumeration of all completions of at most three tokens, where token 2 is EOS. On policy k3
    has that of the KL turned round. The KL of whole completions has another one, which RLOO gets by
    k1 in the reward. With 1/T a token weighs less if the completion goes on: then neither holds.
    """
    ys = [y for n in (1, 2, 3) for y in itertools.product(range(3), repeat=n)]
    ys = [y for y in ys if 2 not in y[:-1] and (len(y) == 3 or y[-1] == 2)]  # 15 completions
    before = [y[:t] for y in ys for t in range(len(y))]
    prefixes = sorted(set(before))  # 7
    logits, ref, old = (torch.cat([numbers(i), numbers(i + 3)])[:7, :3] for i in range(3))
    policy, ref, old = (x.log_softmax(-1) for x in (logits.requires_grad_(), ref, old))
    old = policy.detach() if on_policy else old
    mask = torch.arange(3) < torch.tensor([[len(y)] for y in ys])
    prefix, token = torch.zeros(2, 15, 3).long()
    prefix[mask] = torch.tensor([prefixes.index(x) for x in before])
    token[mask] = torch.tensor([t for y in ys for t in y])
    p, r, o = (x[prefix, token] * mask for x in (policy, ref, old))  # log-probs, (15, 3)
    chance, kls = o.sum(1).exp(), (p - r).sum(1)  # of a completion, (15,)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(x, logits, retain_graph=True)[0]

    def of_tokens(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean over completions that `old` sampled of the KL of x to y after each prefix."""
        return chance @ ((x.exp() * (x - y)).sum(1)[prefix] * mask).sum(1)

    def of_grpo(estimator: str, loss_type: str) -> torch.Tensor:
        more = {"kl_coef": 1.0, "kl_estimator": estimator, "loss_type": loss_type}
        more |= {"clip_range": 0.2, "max_new_tokens": 1}
        rows = [[x[i : i + 1] for x in (p, o, 0 * chance, mask, r)] for i in range(15)]
        return chance @ torch.stack([grpo_loss(*x, ref_logprobs=y, **more)[0] for *x, y in rows])

    unbiased, k3 = (of_grpo(name, "dr_grpo") for name in ("unbiased", "k3"))
    kl, turned = gradient(of_tokens(policy, ref)), gradient(of_tokens(ref, policy))
    assert unbiased.item() == pytest.approx(of_tokens(policy, ref).item())
    assert torch.allclose(gradient(unbiased), kl)
    assert torch.allclose(gradient(k3), turned) == on_policy
    whole = gradient(p.sum(1).exp() @ kls)
    of_rloo, _, _ = rloo_loss(p, o, -chance * kls.detach(), mask, clip_range=0.2, num_rows=1)
    assert torch.allclose(gradient(of_rloo), whole) == on_policy
    for other in (gradient(k3), whole):
        assert (kl - other).abs().max() > 0.05
    for estimator, law in (("unbiased", kl), ("k3", turned)):
        found = gradient(of_grpo(estimator, "grpo"))
        assert torch.cosine_similarity(found.flatten(), law.flatten(), dim=0) < 0.999


# --- The commands of docs/running.md ---

CLIP = {"clip_range": 0.2, "clip_range_high": None, "kl_coef": 0}
VARIANTS = {  # by the papers; the losses themselves are above
    "Dr. GRPO": CLIP | {"loss_type": "dr_grpo", "scale_rewards": "none"},  # arXiv 2503.20783
    "DAPO": CLIP | {"loss_type": "dapo", "scale_rewards": "group", "clip_range_high": 0.28},
    "GSPO": {"loss_type": "gspo", "clip_range": 3e-4, "clip_range_high": 4e-4, "kl_coef": 0},
    "CISPO": {"loss_type": "cispo", "scale_rewards": "group", "kl_coef": 0},  # arXiv 2506.13585
}


def flags_of(variant: str, folder) -> grpo.Config:
    page = Path(grpo.__file__).with_name("docs") / "running.md"
    [command] = re.findall(rf"^\| {variant} \| `python grpo.py (.*)` \|", page.read_text(), re.M)
    flags = [*command.split(), f"--output_dir={folder}"]
    return parse_flags(grpo.Config, "", {"tiny": grpo.TINY}, flags)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_command_has_the_settings_of_its_paper(variant, tmp_path):
    config = flags_of(variant, tmp_path)
    assert vars(config).items() >= VARIANTS[variant].items()
    assert inspect.signature(grpo_loss).parameters["cispo_bound"].default == 5
    assert config.loss_type == "dr_grpo" or config.num_mini_batches > 1, "else no bound ever acts"


def test_maxrl_has_the_gradient_of_log_p_in_part(tmp_path):
    """By enumeration of all groups of G of three completions, of which one is right."""
    config, G, lengths = flags_of("MaxRL", tmp_path), 4, torch.tensor([4, 1, 2])
    logits = torch.tensor([-0.5, 0.6, 0.1]).double().requires_grad_()
    logp = logits.log_softmax(0)
    mask = torch.arange(4) < lengths[:, None]
    expected = torch.zeros(3).double()
    for group in itertools.product(range(3), repeat=G):
        rows = torch.tensor(group)
        tokens = (logp / lengths)[rows, None] * mask[rows]  # its log-prob, cut into its tokens
        A = group_advantages((rows == 0).double(), G, config.scale_rewards)
        more = {"loss_type": config.loss_type, "max_new_tokens": 4, "clip_range": 0.2}
        loss, _, _ = grpo_loss(tokens, tokens.detach(), A, mask[rows], **more)
        chance = logp[rows].sum().exp().detach()
        expected += chance * torch.autograd.grad(loss, logits, retain_graph=True)[0]
    p = logp[0].exp()
    exact = (1 - (1 - p) ** (G - 1)).detach() * torch.autograd.grad(logp[0], logits)[0]
    assert torch.allclose(-4 * expected, exact, atol=1e-12)  # 4: Dr. GRPO's constant


@pytest.mark.problem("group_advantages", 1, "group std mean")
@pytest.mark.parametrize(("size", "scale"), [(1, "group"), (1, "rloo"), (2, "std"), (4, "mean")])
def test_advantages_refuse_groups_of_one_and_unknown_scales(size, scale):
    with pytest.raises(ValueError):
        advantages_of(torch.tensor([1.0, 1, -0.5, 1]), size, scale)
    near = pytest.approx([-0.70706, 0.70706] * 2, abs=1e-4)
    assert group_advantages(torch.tensor([0.0, 2, 4, 6]), 2).tolist() == near, "these are right"


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_returns_the_ratio_that_it_clips(kind):
    """Of each token, in GSPO the geometric mean over the completion; 1 off the mask."""
    new, old = numbers(0), numbers(1)
    _, ratio, _ = grpo_loss(new, old, numbers(2)[0], MASK, **options(kind))
    for row, real in enumerate(MASK):
        d = (new - old)[row, real]
        expected = d.mean().exp().expand_as(d) if kind == "gspo" else d.exp()
        assert torch.allclose(ratio[row, real], expected) and (ratio[row, ~real] == 1).all()


def test_cispo_clips_no_ratio_at_its_bound():
    same, more = numbers(0), {"loss_type": "cispo", "cispo_bound": 1.0, "clip_range": 0.2}
    assert not grpo_loss(same, same, numbers(3)[0], MASK, **more)[2].any()
