"""The mathematics against verl 0.9.1: values and gradients in float64, on ragged rows.

  pip install omegaconf tensordict && pip install --no-deps verl==0.9.1
  python tests/test_verl_parity.py       # writes what was compared into docs/evidence/parity.md

verl's own core_algos.py runs here; of its configuration alone a stand-in, because the real one
wants Ray and vLLM. What differs by design has a test that shows the difference.
"""

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small import compared
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from common import gae, kl_estimate, masked_whiten
from grpo import group_advantages, grpo_loss
from ppo import policy_loss, value_loss
from rloo import rloo_advantages, rloo_loss

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parent.parent / "docs" / "evidence" / "parity.md"
TITLE = "## By plainrlhf and by verl"
INTRODUCTION = """
Advantages, returns, losses and gradients of PPO, GRPO and RLOO, by this code and by verl's
functions, from the same random tensors, in float64. Trainers, sampling and whole runs are not
compared. `python tests/test_verl_parity.py` writes this table; here with verl {verl}.

| quantity | ours | verl's | difference |
|---|---|---|---|"""
DESIGN = """
Some things differ by design. A test shows each of them.

- With a negative advantage and a ratio above 3, verl gives a token no gradient; here it is pushed
  back.
- verl gives a token with a log-ratio above 20 no gradient; here it keeps it.
- verl's RLOO clips the ratio of each token, here that of the completion. Where the ratio is 1, as
  with one update per rollout, the gradients are equal.
- verl adds 1e-6 to GRPO's std; here it is 1e-4, as in TRL.
- verl bounds CISPO's weight from below as well.
- verl cuts k3 at 10.
"""
ROWS, T, G = 12, 7, 4
RECORDS: list[str] = []  # the rows of the table


@dataclasses.dataclass
class ActorConfig:
    """What core_algos.py reads of verl's."""

    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 1e9  # no dual clip
    global_batch_info: dict = dataclasses.field(default_factory=dict)

    def get(self, name: str, default: object) -> object:
        return getattr(self, name, default)


@pytest.fixture(scope="module")
def verl() -> types.ModuleType:
    """core_algos.py of the installed verl."""
    for name in ("verl", "omegaconf", "tensordict"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not there: see the head of {Path(__file__).name}")
    package = types.ModuleType("verl")  # without its __init__, which imports everything
    package.__path__ = [str(Path(importlib.util.find_spec("verl").origin).parent)]
    configs = {
        "verl": package,
        "verl.trainer.config": types.SimpleNamespace(AlgoConfig=type("AlgoConfig", (), {})),
        "verl.workers.config": types.SimpleNamespace(ActorConfig=ActorConfig),
    }
    with pytest.MonkeyPatch.context() as m:
        for name, module in configs.items():
            m.setitem(sys.modules, name, module)
        yield importlib.import_module("verl.trainer.ppo.core_algos")
    for name in [name for name in sys.modules if name.startswith("verl.")]:
        del sys.modules[name]


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    yield
    if os.environ.get("PARITY_TABLE") and RECORDS:
        head = INTRODUCTION.format(verl=importlib.metadata.version("verl"))
        before = PAGE.read_text(encoding="utf-8").split(TITLE)[0].rstrip()
        PAGE.write_text("\n".join([before, "", TITLE, head, *RECORDS, DESIGN]), "utf-8")


def compare(quantity: str, ours: Tensor, theirs: Tensor, tolerance: float = 1e-12) -> None:
    RECORDS.append(compared(quantity, [ours], [theirs], tolerance))


class Batch:
    """Ragged rows in float64; 0 off the mask, as both systems have it there."""

    def __init__(self, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g, dtype=torch.float64)

        self.mask = torch.arange(T) < torch.randint(1, T + 1, (ROWS, 1), generator=g)
        self.real = self.mask.double()
        self.old = (-2 + noise(ROWS, T)) * self.real
        self.logprobs = self.old + 0.3 * noise(ROWS, T) * self.real
        self.ref = self.old + 0.3 * noise(ROWS, T) * self.real
        self.rewards, self.values, self.returns = (noise(ROWS, T) * self.real for _ in range(3))
        self.scores, self.advantages = noise(ROWS), noise(ROWS)
        self.group = [row // G for row in range(ROWS)]
        last = self.mask.sum(1) - 1  # where a score sits
        self.token_scores = torch.zeros_like(self.old).scatter_(
            1, last.unsqueeze(1), self.scores.unsqueeze(1)
        )


def with_gradient(function, x: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    loss = function(leaf)
    loss.backward()
    return loss.detach(), leaf.grad


def compare_losses(quantity: str, ours, theirs, x: Tensor, tolerance: float = 1e-12) -> None:
    a, b = with_gradient(ours, x), with_gradient(theirs, x)
    compare(f"loss: {quantity}", a[0], b[0], tolerance)
    compare(f"gradient: {quantity}", a[1], b[1], tolerance)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (1.0, 0.0)])
def test_gae_and_its_whitening_on_ragged_rows(verl, gamma, lam):
    x = Batch()
    advantages, returns = gae(x.rewards, x.values, x.mask, gamma, lam)
    whitened, theirs = verl.compute_gae_advantage_return(x.rewards, x.values, x.real, gamma, lam)
    compare(f"GAE: returns, gamma {gamma}, lambda {lam}", returns, theirs * x.real)
    ours = masked_whiten(advantages, x.mask)
    # verl adds 1e-8 to the number of tokens, as well as to the variance.
    compare(f"GAE: whitened, gamma {gamma}, lambda {lam}", ours, whitened * x.real, 1e-8)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_estimators_of_the_kl(verl, estimator):
    x = Batch()
    compare_losses(
        estimator,
        lambda p: (kl_estimate(p, x.ref, estimator) * x.real).sum(),
        lambda p: (verl.kl_penalty(p, x.ref, estimator) * x.real).sum(),
        x.logprobs,
    )


@pytest.mark.parametrize("clip", [0.05, 0.2])
def test_the_losses_of_ppo(verl, clip):
    x = Batch()
    advantages = x.rewards

    def ours(p: Tensor) -> Tensor:
        return (policy_loss(p, x.old, advantages, clip)[0] * x.real).sum() / x.mask.sum()

    config = ActorConfig(clip_ratio=clip)
    compare_losses(
        f"PPO, clip {clip}",
        ours,
        lambda p: verl.compute_policy_loss_vanilla(x.old, p, advantages, x.real, config=config)[0],
        x.logprobs,
    )
    compare_losses(
        f"value, clip {clip}",
        lambda v: (value_loss(v, x.values, x.returns, clip)[0] * x.real).sum() / x.mask.sum(),
        lambda v: verl.compute_value_loss(v, x.returns, x.values, x.real, clip)[0],
        x.values + 0.3 * x.rewards,
    )


def test_dual_clip_which_verl_has_by_default_bounds_the_loss_of_bad_tokens_alone(verl):
    """With A < 0 and a ratio above clip_ratio_c verl's loss is -A clip_ratio_c, without gradient.
    Ours pushes such a token back.
    """
    old, advantage = torch.zeros(1, 1).double(), torch.full((1, 1), -1.0).double()
    config = ActorConfig(clip_ratio_c=3.0)
    for ratio, same in ((2.0, True), (5.0, False)):
        p = torch.full((1, 1), ratio).double().log()
        ours = with_gradient(lambda p: policy_loss(p, old, advantage, 0.2)[0].sum(), p)
        theirs = with_gradient(
            lambda p: verl.compute_policy_loss_vanilla(
                old, p, advantage, torch.ones(1, 1), config=config
            )[0],
            p,
        )
        assert torch.isclose(ours[0], theirs[0]) == same and ours[1].item() == pytest.approx(ratio)
        assert same or (theirs[0].item() == pytest.approx(3) and theirs[1].item() == 0)


@pytest.mark.parametrize("scale", ["group", "none"])
def test_the_advantages_of_grpo_but_for_epsilon(verl, scale):
    """1e-4 is added to the std here, as in TRL, and 1e-6 there."""
    x = Batch()
    theirs, _ = verl.compute_grpo_outcome_advantage(
        x.token_scores, x.real, x.group, epsilon=1e-4, norm_adv_by_std_in_grpo=scale == "group"
    )
    ours = group_advantages(x.scores, G, scale).unsqueeze(1) * x.real
    compare(f"GRPO: advantages, scale_rewards {scale}", ours, theirs)
    by_default, _ = verl.compute_grpo_outcome_advantage(x.token_scores, x.real, x.group)
    if scale == "group":
        assert 1e-6 < (by_default - ours).abs().max() < 1e-3


def test_the_advantages_of_rloo(verl):
    x = Batch()
    theirs, _ = verl.compute_rloo_outcome_advantage(x.token_scores, x.real, x.group)
    compare("RLOO: advantages", rloo_advantages(x.scores, G).unsqueeze(1) * x.real, theirs)


MODES = {"grpo": "seq-mean-token-mean", "dapo": "token-mean", "dr_grpo": "seq-mean-token-sum-norm"}


@pytest.mark.parametrize("high", [0.2, 0.28])
@pytest.mark.parametrize("loss_type", MODES)
def test_the_losses_of_grpo_dr_grpo_and_dapo(verl, loss_type, high):
    x = Batch()
    config = ActorConfig(clip_ratio_high=high)
    compare_losses(
        f"{loss_type}, clip 0.2 to {high}",
        lambda p: grpo_loss(
            p, x.old, x.advantages, x.mask, clip_range=0.2, clip_range_high=high,
            loss_type=loss_type, max_new_tokens=T,
        )[0],
        lambda p: verl.compute_policy_loss_vanilla(
            x.old, p, x.advantages.unsqueeze(1), x.real, MODES[loss_type], config
        )[0],
        x.logprobs,
        1e-8,  # verl adds 1e-8 to the length of a row
    )  # fmt: skip


def test_the_loss_of_gspo(verl):
    """verl gives each token the gradient of its own log-prob times the ratio of the sequence
    (GSPO-token, eq. 14), which for one advantage per completion is that of eq. 5.
    """
    x = Batch()
    compare_losses(
        "GSPO",
        lambda p: grpo_loss(
            p, x.old, x.advantages, x.mask, clip_range=0.2, importance_sampling_level="sequence"
        )[0],
        lambda p: verl.compute_policy_loss_gspo(
            x.old, p, x.advantages.unsqueeze(1), x.real, config=ActorConfig()
        )[0],
        x.logprobs,
        1e-8,
    )


@pytest.mark.parametrize("loss_type", MODES)
def test_the_loss_of_gspo_in_each_way_to_average(verl, loss_type):
    """The modes that tools/outgrow.py gives verl with importance_sampling_level sequence."""
    x = Batch()
    options = {"clip_range": 0.2, "importance_sampling_level": "sequence", "max_new_tokens": T}
    ours = with_gradient(
        lambda p: grpo_loss(p, x.old, x.advantages, x.mask, loss_type=loss_type, **options)[0],
        x.logprobs,
    )
    theirs = with_gradient(
        lambda p: verl.compute_policy_loss_gspo(
            x.old, p, x.advantages.unsqueeze(1), x.real, MODES[loss_type], ActorConfig()
        )[0],
        x.logprobs,
    )
    assert all(torch.allclose(a, b, atol=1e-8) for a, b in zip(ours, theirs, strict=True))


def test_the_gradient_of_rloo_where_the_ratio_is_1_and_not_elsewhere(verl):
    """tools/outgrow.py gives verl one update per rollout: its ratio is that of a token."""
    x = Batch()
    for p, same in ((x.old, True), (x.logprobs, False)):
        ours = with_gradient(
            lambda p: rloo_loss(p, x.old, x.advantages, x.mask, clip_range=0.2)[0], p
        )
        theirs = with_gradient(
            lambda p: verl.compute_policy_loss_vanilla(
                x.old, p, x.advantages.unsqueeze(1), x.real, "seq-mean-token-sum", ActorConfig()
            )[0],
            p,
        )
        assert torch.allclose(ours[1], theirs[1] * x.real, atol=1e-12) == same


def test_the_loss_of_cispo_where_the_ratio_has_no_lower_bound(verl):
    """The weight is bounded above here, as in TRL; verl bounds it below as well, at 1 - 0.2 by
    default. Its loss has the same gradient.
    """
    x = Batch()
    compare_losses(
        "CISPO, weight at most 1.28",
        lambda p: grpo_loss(
            p, x.old, x.advantages, x.mask, clip_range=0.2, cispo_bound=1.28, loss_type="cispo"
        )[0],
        lambda p: verl.compute_policy_loss_cispo(
            x.old, p, x.advantages.unsqueeze(1), x.real,
            config=ActorConfig(clip_ratio_low=1.0, clip_ratio_high=0.28),
        )[0],
        x.logprobs,
    )  # fmt: skip


def test_verl_bounds_the_weight_of_cispo_below_as_well(verl):
    old, p, one = torch.zeros(1, 1).double(), torch.full((1, 1), -1.0).double(), torch.ones(1, 1)
    options = {"clip_range": 0.2, "loss_type": "cispo"}
    ours = with_gradient(lambda p: grpo_loss(p, old, one[0], one.bool(), **options)[0], p)
    theirs = with_gradient(
        lambda p: verl.compute_policy_loss_cispo(old, p, one, one, config=ActorConfig())[0], p
    )
    assert ours[1].item() == pytest.approx(-p.exp().item())
    assert theirs[1].item() == pytest.approx(-0.8)


def test_log_ratios_above_20_keep_their_gradient_here_and_lose_it_there(verl):
    old, advantage = torch.zeros(1, 1).double(), torch.full((1, 1), -1.0).double()
    p = torch.full((1, 1), 30.0).double()
    ours = with_gradient(lambda p: policy_loss(p, old, advantage, 0.2)[0].sum(), p)
    theirs = with_gradient(
        lambda p: verl.compute_policy_loss_vanilla(
            old, p, advantage, torch.ones(1, 1), config=ActorConfig()
        )[0],
        p,
    )
    assert torch.isclose(ours[0], theirs[0]) and ours[1].item() > 0 and theirs[1].item() == 0


def test_verl_cuts_k3_at_10_and_with_it_the_gradient(verl):
    ref, p = torch.zeros(1).double(), torch.full((1,), -5.0).double()
    ours = with_gradient(lambda p: kl_estimate(p, ref, "k3").sum(), p)
    theirs = with_gradient(lambda p: verl.kl_penalty(p, ref, "k3").sum(), p)
    assert ours[0].item() == pytest.approx(torch.tensor(5.0).exp().item() - 6, rel=1e-6)
    assert theirs[0].item() == 10 and theirs[1].item() == 0 and ours[1].item() < -100


def test_the_page_has_these_comparisons():
    text = PAGE.read_text(encoding="utf-8").split(TITLE)[1]
    differences = re.findall(r"\| (\S+) \|$", text, re.MULTILINE)[1:]
    assert len(differences) > 25 and max(map(float, differences)) < 1e-7


if __name__ == "__main__":
    os.environ["PARITY_TABLE"] = str(PAGE)
    raise SystemExit(pytest.main([__file__, "-n", "0", "-k", "not page"]))
