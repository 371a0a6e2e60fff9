"""The mathematics against verl 0.9.1: values and gradients in float64, on ragged rows.

  pip install omegaconf tensordict && pip install --no-deps verl==0.9.1
  python -m pytest -n 0 tests/test_verl_parity.py

verl's own core_algos.py runs here; of its configuration alone a stand-in, because the real one
wants Ray and vLLM. What differs by design has a test that shows the difference.
"""

import dataclasses
import importlib
import importlib.util
import math
import sys
import types
from pathlib import Path

import pytest
import torch
from small import compared

from common import gae, kl_estimate, masked_whiten
from grpo import group_advantages, grpo_loss
from ppo import policy_loss, value_loss
from rloo import rloo_advantages, rloo_loss

ROWS, T, G = 12, 7, 4


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


def equal(ours, theirs, tolerance=1e-12):
    compared("ours and verl's", [ours], [theirs], tolerance)


def noise(*shape):
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


# Ragged rows; 0 off the mask, as both systems have it there.
GENERATOR = torch.Generator().manual_seed(0)
MASK = torch.arange(T) < torch.randint(1, T + 1, (ROWS, 1), generator=GENERATOR)
REAL = MASK.double()
OLD = (-2 + noise(ROWS, T)) * REAL
LOGPROBS, REF = (OLD + 0.3 * noise(ROWS, T) * REAL for _ in range(2))
REWARDS, VALUES, RETURNS = (noise(ROWS, T) * REAL for _ in range(3))
SCORES, ADVANTAGES = noise(ROWS), noise(ROWS)
TOKEN_SCORES = torch.zeros_like(OLD)
TOKEN_SCORES[range(ROWS), MASK.sum(1) - 1] = SCORES
GROUP = [row // G for row in range(ROWS)]
ONE = torch.ones(1, 1).double()  # a batch of one token


def with_gradient(function, logprobs):
    leaf = logprobs.clone().requires_grad_()
    loss = function(leaf)
    loss.backward()
    return loss.detach(), leaf.grad


def loss_of(verl, kind="vanilla", mode="token-mean", old=OLD, A=ADVANTAGES, real=REAL, **config):
    """verl's loss of that kind, as a function of the log-probs."""
    function, A = getattr(verl, f"compute_policy_loss_{kind}"), A.view(len(A), -1)
    return lambda p: function(old, p, A, real, mode, ActorConfig(**config))[0]


def equal_losses(ours, theirs, logprobs=LOGPROBS, tolerance=1e-12):
    for a, b in zip(with_gradient(ours, logprobs), with_gradient(theirs, logprobs)):
        equal(a, b, tolerance)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (1.0, 0.0)])
def test_gae_and_its_whitening_on_ragged_rows(verl, gamma, lam):
    advantages, returns = gae(REWARDS, VALUES, MASK, gamma, lam)
    whitened, theirs = verl.compute_gae_advantage_return(REWARDS, VALUES, REAL, gamma, lam)
    equal(returns, theirs * REAL)
    # verl adds 1e-8 to the number of tokens, as well as to the variance.
    equal(masked_whiten(advantages, MASK), whitened * REAL, 1e-8)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_estimators_of_the_kl(verl, estimator):
    equal_losses(
        lambda p: (kl_estimate(p, REF, estimator) * REAL).sum(),
        lambda p: (verl.kl_penalty(p, REF, estimator) * REAL).sum(),
    )


@pytest.mark.parametrize("clip", [0.05, 0.2])
def test_the_losses_of_ppo(verl, clip):
    equal_losses(
        lambda p: (policy_loss(p, OLD, REWARDS, clip)[0] * REAL).sum() / MASK.sum(),
        loss_of(verl, A=REWARDS, clip_ratio=clip),
    )
    equal_losses(
        lambda v: (value_loss(v, VALUES, RETURNS, clip)[0] * REAL).sum() / MASK.sum(),
        lambda v: verl.compute_value_loss(v, RETURNS, VALUES, REAL, clip)[0],
        VALUES + 0.3 * REWARDS,
    )


def test_dual_clip_which_verl_has_by_default_bounds_the_loss_of_bad_tokens_alone(verl):
    """With A < 0 and a ratio above clip_ratio_c verl's loss is -A clip_ratio_c, without gradient.
    Ours pushes such a token back.
    """
    for ratio, same in ((2.0, True), (5.0, False)):
        p = ONE.mul(ratio).log()
        ours = with_gradient(lambda p: policy_loss(p, 0 * ONE, -ONE, 0.2)[0].sum(), p)
        theirs = with_gradient(loss_of(verl, old=0 * ONE, A=-ONE, real=ONE, clip_ratio_c=3.0), p)
        assert torch.isclose(ours[0], theirs[0]) == same and ours[1].item() == pytest.approx(ratio)
        assert same or (theirs[0].item() == pytest.approx(3) and theirs[1].item() == 0)


@pytest.mark.parametrize("scale", ["group", "none"])
def test_the_advantages_of_grpo_but_for_epsilon(verl, scale):
    """1e-4 is added to the std here, as in TRL, and 1e-6 there."""
    theirs, _ = verl.compute_grpo_outcome_advantage(
        TOKEN_SCORES, REAL, GROUP, epsilon=1e-4, norm_adv_by_std_in_grpo=scale == "group"
    )
    ours = group_advantages(SCORES, G, scale).unsqueeze(1) * REAL
    equal(ours, theirs)
    by_default, _ = verl.compute_grpo_outcome_advantage(TOKEN_SCORES, REAL, GROUP)
    if scale == "group":
        assert 1e-6 < (by_default - ours).abs().max() < 1e-3


def test_the_advantages_of_rloo(verl):
    theirs, _ = verl.compute_rloo_outcome_advantage(TOKEN_SCORES, REAL, GROUP)
    equal(rloo_advantages(SCORES, G).unsqueeze(1) * REAL, theirs)


MODES = {"grpo": "seq-mean-token-mean", "dapo": "token-mean", "dr_grpo": "seq-mean-token-sum-norm"}


@pytest.mark.parametrize("high", [0.2, 0.28])
@pytest.mark.parametrize("loss_type", MODES)
def test_the_losses_of_grpo_dr_grpo_and_dapo(verl, loss_type, high):
    options = {"clip_range": 0.2, "clip_range_high": high, "max_new_tokens": T}
    equal_losses(
        lambda p: grpo_loss(p, OLD, ADVANTAGES, MASK, loss_type=loss_type, **options)[0],
        loss_of(verl, mode=MODES[loss_type], clip_ratio_high=high),
        tolerance=1e-8,  # verl adds 1e-8 to the length of a row
    )


def test_the_loss_of_gspo(verl):
    """verl gives each token the gradient of its own log-prob times the ratio of the sequence
    (GSPO-token, eq. 14), which for one advantage per completion is that of eq. 5.
    """
    equal_losses(
        lambda p: grpo_loss(p, OLD, ADVANTAGES, MASK, clip_range=0.2, loss_type="gspo")[0],
        loss_of(verl, "gspo", MODES["grpo"]),
        tolerance=1e-8,
    )


def test_the_gradient_of_rloo_where_the_ratio_is_1_and_not_elsewhere(verl):
    """verl's ratio is that of a token, RLOO's here that of the completion."""
    for p, same in ((OLD, True), (LOGPROBS, False)):
        ours = with_gradient(lambda p: rloo_loss(p, OLD, ADVANTAGES, MASK, clip_range=0.2)[0], p)
        theirs = with_gradient(loss_of(verl, mode="seq-mean-token-sum"), p)
        assert torch.allclose(ours[1], theirs[1] * REAL, atol=1e-12) == same


def test_the_loss_of_cispo_where_the_ratio_has_no_lower_bound(verl):
    """The weight is bounded above here, as in TRL; verl bounds it below as well, at 1 - 0.2 by
    default. Its loss has the same gradient.
    """
    options = {"clip_range": 0.2, "cispo_bound": 1.28, "loss_type": "cispo"}
    equal_losses(
        lambda p: grpo_loss(p, OLD, ADVANTAGES, MASK, **options)[0],
        loss_of(verl, "cispo", clip_ratio_low=1.0, clip_ratio_high=0.28),
    )


def test_verl_bounds_the_weight_of_cispo_below_as_well(verl):
    options = {"clip_range": 0.2, "loss_type": "cispo"}
    ours = with_gradient(lambda p: grpo_loss(p, 0 * ONE, ONE[0], ONE.bool(), **options)[0], -ONE)
    theirs = with_gradient(loss_of(verl, "cispo", old=0 * ONE, A=ONE, real=ONE), -ONE)
    assert ours[1].item() == pytest.approx(-math.exp(-1))
    assert theirs[1].item() == pytest.approx(-0.8)


def test_log_ratios_above_20_keep_their_gradient_here_and_lose_it_there(verl):
    ours = with_gradient(lambda p: policy_loss(p, 0 * ONE, -ONE, 0.2)[0].sum(), 30 * ONE)
    theirs = with_gradient(loss_of(verl, old=0 * ONE, A=-ONE, real=ONE), 30 * ONE)
    assert torch.isclose(ours[0], theirs[0]) and ours[1].item() > 0 and theirs[1].item() == 0


def test_verl_cuts_k3_at_10_and_with_it_the_gradient(verl):
    ours = with_gradient(lambda p: kl_estimate(p, 0 * ONE, "k3").sum(), -5 * ONE)
    theirs = with_gradient(lambda p: verl.kl_penalty(p, 0 * ONE, "k3").sum(), -5 * ONE)
    assert ours[0].item() == pytest.approx(math.exp(5) - 6, rel=1e-6)
    assert theirs[0].item() == 10 and theirs[1].item() == 0 and ours[1].item() < -100
