"""tools/exact.py: what it counts, against sampled groups and closed forms; a loss of one's own.
Commands of climb.md and questions.md.
"""

import re
import shlex
from types import SimpleNamespace

import pytest
import torch
from small import run_command
from test_pages import PAGES, commands
from torch import Tensor

from common import gae
from grpo import group_advantages, grpo_loss
from ppo import policy_loss, shape_rewards
from rloo import rloo_loss
from tools import exact
from tools.exact import ALL, GROUPS, MASK, STATES, TOKENS, climb, logprobs_of, problem_of, step_of


def minibatch_loss(name: str, new: Tensor, old: Tensor, rewards: Tensor, mask: Tensor) -> Tensor:
    if name.startswith("PPO"):
        A = gae(shape_rewards(rewards, 0 * old, mask, 0), 0 * old, mask, 1, 0.95)[0]
        return policy_loss(new, old, A - A[mask].mean(), 0.2)[0][mask].mean()
    A = group_advantages(rewards, 4)
    return grpo_loss(new, old, A, mask, clip_range=0.2, loss_type=name.split(",")[0].lower())[0]


BIASED = ["GRPO, clip .2", "GSPO, clip .2", "DAPO, clip .2", "CISPO, bound 5"]


@pytest.mark.parametrize("name", [*BIASED, "PPO, values 0, lam .95"])
def test_a_counted_step_is_the_mean_of_sampled_steps(name):
    """Off policy, where these are biased. Each is given as a multiple of the way along."""
    _, b, derivatives, true = problem_of(seed=6)
    wanted = step_of(exact.LOSSES[name], b, derivatives, true)
    first = [GROUPS.flatten().tolist().index(c) for c in range(len(ALL))]  # a row of each
    new, old, r = (
        x.detach().view(2, -1, *x.shape[1:])[:, first] for x in (b.new, b.old, b.rewards)
    )
    logits = torch.zeros(2, 7, 3).double()
    logits[:, STATES[MASK], TOKENS[MASK]] = new[:, MASK]  # log-probs are logits
    logits.requires_grad_()
    torch.manual_seed(0)
    steps = []
    for _ in range(120):  # minibatches of 250 groups of each prompt
        drawn = old.sum(2).exp().multinomial(4 * 250, replacement=True)  # (2, rows)
        logprobs = logits.log_softmax(2)[:, STATES, TOKENS] * MASK
        rows = [torch.cat([x[k][drawn[k]] for k in (0, 1)]) for x in (logprobs, old, r)]
        loss = minibatch_loss(name, *rows, MASK[drawn].flatten(0, 1))
        steps.append(-torch.autograd.grad(loss, logits)[0])
    mean, noise = torch.stack(steps).mean(0), (250 * torch.stack(steps).var(0).sum()).sqrt()
    along = (mean * true).sum() / true.norm()
    across = (mean - along * true / true.norm()).norm()
    assert (across / along).item() == pytest.approx((wanted[1] / wanted[0]).item(), 0.03, 0.02)
    assert (noise / along).item() == pytest.approx((wanted[2] / wanted[0]).item(), 0.15)


def test_theorems_hold_to_rounding():
    def times_inverse_length(b):  # E[(r - J) / T]
        return b.new * (b.values[:, :1] - b.rewards[:, None]) / b.mask.sum(1, keepdim=True)

    losses = exact.LOSSES | {"1 / T": times_inverse_length}
    found = climb(losses, problems=2, graded=True)
    unbiased = "RLOO;TRL's RLOO, no clip;CTPO's prefix ratio, no clip;Dr. GRPO, no clip"
    unbiased += ";TRL's RLOO, clip .2;Dr. GRPO, clip .2;PPO, exact values, lam .95"
    unbiased += ";PPO, values 0, lam 1"
    for name, figures in found.items():
        assert ((figures[:, 0] - 1).abs() < 1e-12).all() == (name in unbiased.split(";")), name
    along, angle = found["TRL's RLOO, no clip"][:, 2:4].T
    assert ((along - 1).abs() < 1e-9).all() and (angle < 1e-6).all()
    pairs = [("GRPO, clip .2", "GSPO, clip .2"), ("DAPO, clip .2", "CISPO, bound 5")]
    for one, other in (*pairs, ("GRPO, no std, no clip", "1 / T")):
        assert torch.allclose(found[one][:, 0], found[other][:, 0]), one


def test_the_angle_belongs_to_the_cosine():
    cosine, _, along, angle, _ = climb({"GRPO": lambda b: exact.grpo(b, "grpo")}, 1, kl=0)["GRPO"].T
    assert along.item() == pytest.approx(1) and cosine < 0.99
    assert angle.deg2rad().cos().item() == pytest.approx(cosine.item())


def test_a_loss_by_group_is_the_mean_over_its_tokens():
    b = problem_of(seed=0)[1]
    b = SimpleNamespace(**{name: x[:80] for name, x in vars(b).items()})
    b.chance = torch.ones(1)
    found = exact.grpo(b, "dapo", by_group=True)
    A = group_advantages(b.rewards, 4)
    groups = [[x[i : i + 4] for x in (b.new, b.old, A, b.mask)] for i in range(0, 80, 4)]
    alone = [grpo_loss(*x, clip_range=0.2, loss_type="dapo")[0] for x in groups]
    assert found.item() == pytest.approx(sum(alone).item()) and found.abs() > 1e-3


@pytest.mark.parametrize("on_policy", [True, False])
def test_the_unbiased_kl_has_the_gradient_of_the_kl(on_policy):
    """By enumeration of all completions of at most three tokens. On policy k3 has that of the KL
    turned round. The KL of whole completions has another one, which RLOO gets by k1 in the reward.
    With 1/T a token weighs less if the completion goes on: then neither holds.
    """
    draws = torch.Generator().manual_seed(0)
    logits, ref, old = torch.randn(3, 7, 3, generator=draws, dtype=torch.float64)
    old = logits.clone() if on_policy else old
    p, r, o = map(logprobs_of, (logits.requires_grad_(), ref, old))  # (15, 3)
    chance, kls = o.sum(1).exp(), (p - r).sum(1)  # of a completion, (15,)

    def gradient(x: Tensor) -> Tensor:
        return torch.autograd.grad(x, logits, retain_graph=True)[0]

    def of_tokens(x: Tensor, y: Tensor) -> Tensor:
        """The mean over completions that `old` sampled of the KL of x to y after each prefix."""
        x, y = x.log_softmax(-1), y.log_softmax(-1)
        return chance @ ((x.exp() * (x - y)).sum(1)[STATES] * MASK).sum(1)

    def of_grpo(estimator: str, loss_type: str) -> Tensor:
        more = {"kl_coef": 1.0, "kl_estimator": estimator, "loss_type": loss_type}
        more |= {"clip_range": 0.2, "max_new_tokens": 1}
        rows = [[x[i : i + 1] for x in (p, o, 0 * chance, MASK, r)] for i in range(15)]
        return chance @ torch.stack([grpo_loss(*x, ref_logprobs=y, **more)[0] for *x, y in rows])

    unbiased, k3 = (of_grpo(name, "dr_grpo") for name in ("unbiased", "k3"))
    kl, turned = gradient(of_tokens(logits, ref)), gradient(of_tokens(ref, logits))
    assert unbiased.item() == pytest.approx(of_tokens(logits, ref).item())
    assert torch.allclose(gradient(unbiased), kl)
    assert torch.allclose(gradient(k3), turned) == on_policy
    whole = gradient(p.sum(1).exp() @ kls)
    of_rloo = rloo_loss(p, -chance * kls.detach(), MASK, num_rows=1)
    assert torch.allclose(gradient(of_rloo), whole) == on_policy
    for other in (gradient(k3), whole):
        assert (kl - other).abs().max() > 0.05
    for estimator, law in (("unbiased", kl), ("k3", turned)):
        found = gradient(of_grpo(estimator, "grpo"))
        assert torch.cosine_similarity(found.flatten(), law.flatten(), dim=0) < 0.999


def test_maxrl_weighs_prompts_as_its_closed_form_says():
    b, _, _, true = problem_of(seed=0)
    p = b.values[:, 0].view(2, -1)[:, 0]  # the chance of a right answer to each prompt
    weight, length = (1 - (1 - p) ** 3) / p, true.flatten(1).norm(dim=1) ** 2
    cosine = (weight @ length) / (weight**2 @ length).sqrt() / true.norm()
    found = climb({"MaxRL": lambda b: exact.grpo(b, "dr_grpo", "mean")}, problems=1)["MaxRL"][0, 0]
    assert found.item() == pytest.approx(cosine.item(), abs=1e-9)


OWN = """
def good(logprobs, old_logprobs, rewards, mask, num_generations):
    groups = rewards.view(-1, num_generations)
    A = (groups - groups.mean(1, keepdim=True)).view(-1, 1)
    return (-A * (logprobs - old_logprobs).exp() * mask).mean()

def mixes(logprobs, old_logprobs, rewards, mask, num_generations):
    return -(rewards - rewards.mean())[:, None] * logprobs * mask

def first(logprobs, old_logprobs, rewards, mask, num_generations):
    return -(rewards[:, None] * logprobs * mask)[::num_generations]

def number(logprobs, old_logprobs, rewards, mask, num_generations):
    return 0.0
"""


def test_an_own_loss_is_a_row_or_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(exact, "LOSSES", {"Dr. GRPO, no clip": exact.LOSSES["Dr. GRPO, no clip"]})
    (tmp_path / "mine.py").write_text(OWN)
    code, text = run_command(exact, ["mine.py:good", "--problems", "1"], capsys)
    ours, theirs = (line[28:].split() for line in text.splitlines()[1:3])
    assert code == 0 and ours == theirs and len(ours) == 6
    faults = {"mixes": "other groups", "first": "their order", "number": "no t", "absent": "no f"}
    for spec, words in faults.items():
        code, text = run_command(exact, [f"mine.py:{spec}"], capsys)
        assert code == 2 and words in text and text.count("\n") == 1, text
    assert "FILE.py:FUNCTION" in run_command(exact, ["mine"], capsys)[1]


PRINTING = [x for x in PAGES["questions.md"].split("\n## ") if "\nIt prints:\n" in x]
PRINTING += [pytest.param(PAGES["climb.md"].split("\n## ")[0], marks=pytest.mark.slow)]


@pytest.mark.parametrize("section", PRINTING)
def test_a_command_prints_what_its_page_says(section, capsys):
    _, program, *code = shlex.split(commands(section)[0])
    if program == "-c":
        exec(*code, {})
    else:
        assert program == "tools/exact.py" and code == []
        exact.main([])
    wanted = re.search(r"^It prints:\n\n((?:    .+\n)+)", section, re.M)[1]
    printed = capsys.readouterr().out
    assert [x.split() for x in wanted.splitlines()] == [x.split() for x in printed.splitlines()]
