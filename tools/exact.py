"""Which way a loss climbs: its expected gradient, exactly, where every completion can be counted.

  python tools/exact.py                        # the losses of the scripts, 20 seconds
  python tools/exact.py my_loss.py:my_loss     # and one of your own

The policy is a table of logits. A completion has up to 3 tokens of 3, one of which is EOS: that
makes 15 completions and 3,060 groups of 4. Of two prompts, 2 of the 15 answers to the hard one are
right, and 12 to the easy one. Nothing is sampled: each group counts with its chance. The columns
are means over 8 such problems. The true gradient is that of the expected reward.

  cosine   on policy: of the mean step and the true gradient; rewards are 0 and 1
  graded   the same where right answers have rewards between 0 and 1
  noise    on policy: the std of the step from a group of each prompt, over the mean step's length
  along    after learning to a KL of 0.02: the part of the mean step along the true gradient;
           angle: between the two, in degrees; noise: the std of a step; along and noise are
           multiples of the way along on policy

Your loss is called as my_loss(logprobs, old_logprobs, rewards, mask, num_generations), all (B, T)
but rewards (B,), groups in consecutive rows. It returns the loss of each token or row, or a mean.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

sys.path.insert(0, str(Path(__file__).parent.parent))

from common import gae, token_logprobs
from grpo import group_advantages, grpo_loss
from plumbing.data import load_reward
from plumbing.errors import InputError
from plumbing.run import run_main
from ppo import policy_loss, shape_rewards
from rloo import rloo_advantages, rloo_loss

G, T, OFF = 4, 3, 1e9  # no ratio reaches a clip range of OFF
PREFIXES = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]  # S = 7; token 2 is EOS
ALL = [(*s, y) for s in PREFIXES for y in range(3) if y == 2 or len(s) == T - 1]  # C = 15
MASK = torch.tensor([[t < len(c) for t in range(T)] for c in ALL])  # (C, T)
TOKENS = torch.tensor([(*c, 0, 0)[:T] for c in ALL])  # (C, T), each behind the prefix of STATES
STATES = torch.tensor([[PREFIXES.index(c[: min(t, len(c) - 1)]) for t in range(T)] for c in ALL])
BEGINS = torch.tensor([[c[: len(s)] == s for s in PREFIXES] for c in ALL]).double()  # (C, S)
GROUPS = torch.combinations(torch.arange(len(ALL)), G, with_replacement=True)  # (M, G): M = 3,060
# A group can be drawn in G! / (n_1! n_2! ...) orders, where completion c is in it n_c times.
ORDERS = 24 / (torch.eye(len(ALL)).double()[GROUPS].sum(1) + 1).lgamma().exp().prod(1)  # (M,)


# b has all groups of both prompts, as a minibatch of B = 2 M G rows. In a large minibatch the
# number of tokens is a constant, and so are the mean and the std of PPO's advantages.
def grpo(
    b: SimpleNamespace,
    loss_type: str,
    scale: str = "group",
    clip: float = 0.2,
    high: float | None = None,
    by_group: bool = False,
) -> Tensor:
    """Call grpo.py's advantages and loss; `by_group` divides by the tokens of the group."""
    A = group_advantages(b.rewards, G, scale)
    if by_group:
        A = A / b.mask.view(-1, G * T).sum(1).repeat_interleave(G)
    more = {"num_tokens": b.chance.sum(), "max_new_tokens": T, "loss_type": loss_type}
    return grpo_loss(b.new, b.old, A, b.mask, clip_range=clip, clip_range_high=high, **more)[0]


def ppo(b: SimpleNamespace, values: Tensor, lam: float) -> Tensor:
    """Call ppo.py's rewards, GAE and loss, with whitening by constants."""
    A = gae(shape_rewards(b.rewards, 0 * b.old, b.mask, 0), values, b.mask, 1, lam)[0]
    return policy_loss(b.new, b.old, A - (b.chance * A).sum() / b.chance.sum(), 0.2)[0]


def of_completions(b: SimpleNamespace, clip: float = 0.2) -> Tensor:
    """Call ppo.py's loss with the ratio of a whole completion: TRL's RLOO. rloo.py has no ratio."""
    return policy_loss(b.new.sum(1), b.old.sum(1), b.A[:, 0], clip)[0]


LOSSES = {
    "RLOO": lambda b: rloo_loss(b.new, b.A[:, 0], b.mask),
    "TRL's RLOO, no clip": lambda b: of_completions(b, OFF),
    "CTPO's prefix ratio, no clip": lambda b: -b.A * b.ratio.cumprod(1) * b.new,
    "Dr. GRPO, no clip": lambda b: grpo(b, "dr_grpo", "none", OFF),
    "GRPO, no std, no clip": lambda b: grpo(b, "grpo", "none", OFF),
    "CISPO, bound 5": lambda b: grpo(b, "cispo"),
    "TRL's RLOO, clip .2": of_completions,
    "Dr. GRPO, clip .2": lambda b: grpo(b, "dr_grpo", "none"),
    "DAPO, clip .2": lambda b: grpo(b, "dapo"),
    "DAPO, .2 and .28, by group": lambda b: grpo(b, "dapo", high=0.28, by_group=True),
    "GRPO, clip .2": lambda b: grpo(b, "grpo"),
    "GSPO, clip .2": lambda b: grpo(b, "gspo"),
    "GSPO, .0003 and .0004": lambda b: grpo(b, "gspo", clip=0.0003, high=0.0004),
    "PPO, exact values, lam .95": lambda b: ppo(b, b.values, 0.95),
    "PPO, values 0, lam 1": lambda b: ppo(b, 0 * b.values, 1),
    "PPO, values 0, lam .95": lambda b: ppo(b, 0 * b.values, 0.95),
}


def logprobs_of(logits: Tensor) -> Tensor:
    """Logits after each prefix (S, 3) -> log-probs of the completions' tokens (C, T), 0 behind."""
    return token_logprobs(logits[STATES], TOKENS) * MASK


def expected_reward(logits: Tensor, rewards: Tensor) -> Tensor:
    """Of both prompts together: (2, S, 3), (2, C) -> scalar."""
    return (vmap(logprobs_of)(logits).sum(2).exp() * rewards).sum()


def batch_of(new: Tensor, old: Tensor, rewards: Tensor) -> SimpleNamespace:
    """All groups that `old` may draw, as rows: (2, C, T), rewards (2, C) -> (B, T) and (B,)."""
    p = old.sum(2).exp()  # (2, C)
    values = (p * rewards @ BEGINS / (p @ BEGINS))[:, STATES]  # the mean of what may follow
    b = {"new": new, "old": old, "ratio": (new - old).exp(), "rewards": rewards, "values": values}
    b |= {"mask": MASK.expand(2, -1, -1)}
    b = SimpleNamespace(**{name: x[:, GROUPS].flatten(0, 2) for name, x in b.items()})
    chance = ORDERS * p[:, GROUPS].prod(2)  # (2, M)
    b.chance = chance.flatten().repeat_interleave(G)[:, None] * b.mask  # (B, T)
    b.A = rloo_advantages(b.rewards, G)[:, None]  # (B, 1)
    b.new.requires_grad_()
    return b


def problem_of(seed: int, graded: bool = False, kl: float = 0.02, drift: str = "learning") -> tuple:
    """Two policies that are `kl` nats apart, by "learning" or by "noise". Returns the batches on
    and off policy, the log-probs' derivatives (2, M, G, T, S, 3), the true gradient (2, S, 3).
    """
    draws = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}
    logits = torch.randn(2, len(PREFIXES), 3, **draws)
    right = [torch.randperm(len(ALL), generator=draws["generator"]) < n for n in (2, 12)]
    rewards = torch.stack(right) * (torch.rand(2, len(ALL), **draws) if graded else 1.0)
    noise = torch.randn(logits.shape, **draws)
    old = new = vmap(logprobs_of)(logits)  # the groups come from old; the policy moves on
    while (old.sum(2).exp() * (old - new).sum(2)).sum() / 2 < kl:
        learning = 0.1 * grad(expected_reward)(logits, rewards)
        logits = logits + (learning if drift == "learning" else 0.01 * noise)
        new = vmap(logprobs_of)(logits)
    derivatives = vmap(jacrev(logprobs_of))(logits)[:, GROUPS]
    true = grad(expected_reward)(logits, rewards)
    return batch_of(new, new, rewards), batch_of(new, old, rewards), derivatives, true


def step_of(loss: Callable, b: SimpleNamespace, derivatives: Tensor, true: Tensor) -> Tensor:
    """A loss's mean step, (3,): its parts along and across the true gradient, and its std."""
    slopes = torch.autograd.grad(loss(b).sum(), b.new)[0].view(2, -1, G, T)
    steps = -torch.einsum("kmgt,kmgtsv->kmsv", slopes, derivatives)  # of each group
    chance = b.chance[::G, 0].view(2, -1, 1, 1)
    mean = (chance * steps).sum(1)  # (2, S, 3)
    std = (chance * (steps - mean[:, None]) ** 2).sum().sqrt()
    along = (mean * true).sum() / true.norm()
    return torch.stack([along, (mean - along * true / true.norm()).norm(), std])


def climb(losses: dict[str, Callable], problems: int, **options: Any) -> dict[str, Tensor]:
    """{loss: (problems, 5)}: cosine and noise on policy; along, angle and noise off policy."""
    found = {name: [] for name in losses}
    for seed in range(problems):
        on_policy, off_policy, *rest = problem_of(seed, **options)
        for name, loss in losses.items():
            along, across, std = step_of(loss, on_policy, *rest)
            length = (along**2 + across**2).sqrt()
            moved, aside, noise = step_of(loss, off_policy, *rest) / along
            angle = torch.atan2(aside, moved).rad2deg()
            found[name].append(torch.stack([along / length, std / length, moved, angle, noise]))
    return {name: torch.stack(figures) for name, figures in found.items()}


def own_loss(spec: str) -> Callable:
    """FILE.py:FUNCTION as a loss of a batch. Raises InputError, also where it mixes groups."""
    if ".py:" not in spec:
        raise InputError(f"{spec}: write a loss of your own as FILE.py:FUNCTION")
    function = load_reward(spec, {})

    def loss(b: SimpleNamespace) -> Tensor:
        found = function(b.new, b.old, b.rewards, b.mask, G)
        if not getattr(found, "requires_grad", False):
            raise InputError(f"{spec}: returns no tensor that depends on logprobs")
        return found

    b = problem_of(seed=0)[1]
    # Half of the groups, in another order: a mean makes each slope twice as large, and no more.
    rows = torch.arange(len(b.new)).view(-1, G)[::2].flip(0, 1).flatten()
    half = SimpleNamespace(**{name: x[rows] for name, x in vars(b).items()})
    slopes = [torch.autograd.grad(loss(x).sum(), b.new)[0][rows].flatten() for x in (b, half)]
    if not torch.cosine_similarity(*slopes, dim=0) > 1 - 1e-9:
        fault = "has no finite gradient, or one that depends on the other groups or their order"
        raise InputError(f"{spec}: {fault}")
    return loss


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("losses", nargs="*", metavar="FILE.py:FUNCTION", help="losses of your own")
    parser.add_argument("--problems", type=int, default=8, help="how many (8)")
    options = parser.parse_args(args)
    if options.problems < 1:
        raise InputError(f"--problems {options.problems}: must be at least 1")
    losses = LOSSES | {spec: own_loss(spec) for spec in options.losses}
    print(f"{'':28s}   cosine   graded    noise    along    angle    noise")
    found, graded = (climb(losses, options.problems, graded=x) for x in (False, True))
    for name, figures in found.items():
        cosine, *rest = figures.mean(0)
        columns = [cosine, graded[name][:, 0].mean(), *rest]
        print(f"{name:28s}" + "".join(f"{x.round(decimals=6):9.3g}" for x in columns))


if __name__ == "__main__":
    run_main(main)
