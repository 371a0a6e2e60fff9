"""The mathematics against TRL 1.16 and verl 0.9.1: values and gradients in float64, on ragged rows.

  pip install omegaconf tensordict && pip install --no-deps verl==0.9.1
  python -m pytest -n 0 tests/test_parity.py

Their own functions run here; of their trainers and configurations, which want a model, Ray and
vLLM, there are stand-ins. Where a library is missing its rows are skipped. TRL has no PPO any more.
What verl does otherwise is switched off in its rows: it gives no gradient to a bad token with a
ratio above clip_ratio_c, and bounds the weight of CISPO below as well.
"""

import functools
import importlib
import importlib.util
import math
import re
import sys
import textwrap
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from common import gae, kl_estimate, masked_whiten
from grpo import group_advantages, grpo_loss
from plumbing.config import parse_flags
from ppo import policy_loss, value_loss
from rloo import rloo_advantages, rloo_loss

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ROWS, T, G = 12, 7, 4
GENERATOR = torch.Generator().manual_seed(0)
noise = partial(torch.randn, generator=GENERATOR, dtype=torch.float64)
MASK = torch.arange(T) < torch.randint(1, T + 1, (ROWS, 1), generator=GENERATOR)
REAL = MASK.double()
OLD = (-2 + noise(ROWS, T)) * REAL  # 0 off the mask, as in all three
# Some rows leave the clip range as a whole.
LOGPROBS = OLD + (0.3 * noise(ROWS, T) + torch.linspace(0.6, -0.6, ROWS).view(-1, 1)) * REAL
REF = OLD + 0.3 * noise(ROWS, T) * REAL
REWARDS, VALUES, RETURNS = (noise(ROWS, T) * REAL for _ in range(3))
SCORES, A = noise(ROWS), noise(ROWS)
SCORES[4:8] = 0.5  # a flat group
SOME = SCORES.clone()
SOME[[0, 1, 2, 9]] = math.nan  # of a group one score is known


# --- Theirs ---


def trainer(**settings: object) -> mock.MagicMock:
    """What TRL's functions read of their trainer; it answers to all else."""
    off = """mask_truncated_completions use_vllm off_policy_mask_threshold aux_loss_enabled tools
    environments environment_factories pad_to_multiple_of reward_clip_range""".split()
    t = mock.MagicMock(**dict.fromkeys(off), _entropy_bonus_enabled=False, beta=0.0)
    t.args = mock.Mock(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
    t.args.gradient_accumulation_steps = t.num_iterations = 1
    t.top_entropy_quantile = t.current_gradient_accumulation_steps = 1
    t.epsilon_low, t.max_completion_length, t.num_generations = 0.2, T, G
    t.multi_objective_aggregation, t.normalize_advantages = "sum_then_normalize", False
    t.accelerator = mock.Mock(num_processes=1, process_index=0, device="cpu")
    t.accelerator.gather, t.accelerator.reduce = (lambda x: x), (lambda x, reduction: x)
    t._tokenizer.pad_token_id, t.reward_weights = 0, torch.ones(1)
    t._pending_extra_logs = t._pending_metrics = {}
    t.configure_mock(**settings)
    return t


def trl_loss(p: Tensor, kind: str, level="token", high=0.2, old=OLD, **settings) -> Tensor:
    ids = torch.ones(ROWS, T, dtype=torch.long)
    inputs = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "advantages": A}
    inputs |= {"completion_mask": MASK.long(), "num_items_in_batch": MASK.sum()}
    inputs |= {"old_per_token_logps": old, "old_logps": old.sum(1), "ref_per_token_logps": REF}
    t = trainer(importance_sampling_level=level, epsilon_high=high, **settings)
    t._get_per_token_logps_and_entropies.return_value = p, p.detach(), None
    return getattr(pytest.importorskip("trl"), f"{kind}Trainer")._compute_loss(t, None, inputs)


def trl_advantages(kind: str, scores: Tensor, **settings: object) -> Tensor:
    t, texts = trainer(**settings), ["a"] * ROWS
    ids = [[1] * length for length in MASK.sum(1).tolist()]
    t._generate.return_value = ids, ids, texts
    if kind == "GRPO":
        t._generate.return_value = ids, ids, None, texts, None, {}, None, None
    t._calculate_rewards.return_value = scores.unsqueeze(1)
    logprobs = {id(t.model): LOGPROBS, id(t.ref_model): REF}
    t._get_per_token_logps_and_entropies = lambda m, *_, **more: (logprobs[id(m)], None, None)
    score = getattr(pytest.importorskip("trl"), f"{kind}Trainer")._generate_and_score_completions
    return score(t, [{"prompt": "a"}] * ROWS)["advantages"]


@functools.cache
def verl() -> types.ModuleType:
    """core_algos.py of the installed verl, without what `import verl` loads."""
    found = [importlib.util.find_spec(name) for name in ("verl", "omegaconf", "tensordict")]
    if not all(found):
        pytest.skip("needs verl, omegaconf and tensordict: see the head of this file")
    package = types.ModuleType("verl")
    package.__path__ = found[0].submodule_search_locations
    configs = types.SimpleNamespace(ActorConfig=object, AlgoConfig=dict)
    modules = {"verl": package, "verl.trainer.config": configs, "verl.workers.config": configs}
    with mock.patch.dict(sys.modules, modules):  # at the end it forgets what was imported
        return importlib.import_module("verl.trainer.ppo.core_algos")


def verl_loss(p: Tensor, mode="token-mean", kind="vanilla", A=A, **settings: object) -> Tensor:
    config = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None}
    config |= {"clip_ratio_c": 1e9, "global_batch_info": {}} | settings  # no dual clip
    function = getattr(verl(), f"compute_policy_loss_{kind}")
    its = mock.Mock(**config, get=config.get)
    return function(OLD, p, A.view(ROWS, -1), REAL, mode, its)[0]


def verl_advantages(kind: str, **options: object) -> Tensor:
    tokens = torch.nn.functional.pad(SCORES.unsqueeze(1), (0, T - 1))  # verl adds up each row
    function = getattr(verl(), f"compute_{kind}_outcome_advantage")
    return function(tokens, REAL, [row // G for row in range(ROWS)], **options)[0][:, 0]


def verl_gae(gamma: float, lam: float) -> Tensor:
    found = verl().compute_gae_advantage_return(REWARDS, VALUES, REAL, gamma, lam)
    return torch.cat([x * REAL for x in found])


# --- Ours, theirs, tolerance ---


def mean(p: Tensor, loss: Callable, *args: object) -> Tensor:
    return (loss(p, *args)[0] * REAL).sum() / REAL.sum()


def grpo(p: Tensor, loss_type: str, loss: Callable = grpo_loss, **options: object) -> Tensor:
    given = {"clip_range": 0.2, "max_new_tokens": T, "ref_logprobs": REF} | options
    return loss(p, OLD, A, MASK, loss_type=loss_type, **given)[0]


EXACT, ADDED = 1e-12, 1e-8  # verl adds 1e-8 to lengths
LOSSES = {  # functions of the log-probs: ours, theirs; the tolerance
    "verl-ppo": (
        lambda p: mean(p, policy_loss, OLD, REWARDS, 0.2),
        lambda p: verl_loss(p, A=REWARDS), EXACT,
    ),
    "verl-values": (
        lambda p: mean(p, value_loss, OLD, RETURNS, 0.2),
        lambda p: verl().compute_value_loss(p, RETURNS, OLD, REAL, 0.2)[0], EXACT,
    ),
    "verl-gspo": (
        lambda p: grpo(p, "gspo"), lambda p: verl_loss(p, "seq-mean-token-mean", "gspo"), ADDED,
    ),
    "verl-cispo": (  # without verl's lower bound
        lambda p: grpo(p, "cispo", cispo_bound=1.28),
        lambda p: verl_loss(p, kind="cispo", clip_ratio_low=1.0, clip_ratio_high=0.28), EXACT,
    ),
}  # fmt: skip
for kind in ("k1", "k2", "k3"):
    ours = partial(kl_estimate, ref_logprobs=REF, estimator=kind)
    LOSSES[f"verl-{kind}"] = ours, lambda p, k=kind: verl().kl_penalty(p, REF, k), EXACT
MODES = {"grpo": "seq-mean-token-mean", "dapo": "token-mean", "dr_grpo": "seq-mean-token-sum-norm"}
for kind, mode in MODES.items():
    ours = partial(grpo, loss_type=kind, clip_range_high=0.28)
    LOSSES[f"verl-{kind}"] = ours, partial(verl_loss, mode=mode, clip_ratio_high=0.28), ADDED
for kind in ("grpo", "dapo", "dr_grpo", "gspo", "cispo"):
    for high, beta, kl in ((0.2, 0.0, "k3"), (0.5, 0.3, "k3"), (0.5, 0.3, "unbiased")):
        if (kind, kl) == ("gspo", "unbiased"):  # TRL takes the ratio of the whole completion
            continue
        bounds = {"clip_range_high": high, "cispo_bound": 1 + high}
        ours = partial(grpo, loss_type=kind, kl_coef=beta, kl_estimator=kl, **bounds)
        level, name = ("sequence", "grpo") if kind == "gspo" else ("token", kind)
        more = {"loss_type": name, "beta": beta, "args.use_bias_correction_kl": kl == "unbiased"}
        more["high"] = 1 + high if kind == "cispo" else high
        theirs = partial(trl_loss, kind="GRPO", level=level, **more)
        LOSSES[f"trl-{kind}-{beta}-{kl}"] = ours, theirs, EXACT


@functools.cache
def grpo_of_the_page() -> types.ModuleType:
    """grpo.py after the changes that docs/architecture.md makes for a loss of one's own."""
    root, module = Path(__file__).parent.parent, types.ModuleType("grpo_of_the_page")
    source = (root / "grpo.py").read_text(encoding="utf-8")
    page = (root / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = re.search(r"((?:    .*\n)+)", page.partition("## A loss of your own")[2])[1]
    for change in textwrap.dedent(block).split("...\n"):
        lines = change.splitlines(keepends=True)
        old, new = ("".join(x[1:] for x in lines if x[0] in signs) for signs in (" -", " +"))
        assert source.count(old) == 1, f"the page changes what isn't there:\n{old}"
        source = source.replace(old, new)
    exec(compile(source, "grpo_of_the_page", "exec"), module.__dict__)
    return module


more = {"args.sapo_temperature_pos": 1.0, "args.sapo_temperature_neg": 1.05}
LOSSES["trl-sapo"] = (
    lambda p: grpo(p, "sapo", grpo_of_the_page().grpo_loss, kl_coef=0.3),
    partial(trl_loss, kind="GRPO", loss_type="sapo", beta=0.3, **more), EXACT,
)  # fmt: skip


def test_the_loss_of_the_page_is_a_flag():
    script = grpo_of_the_page()
    assert parse_flags(script.Config, "", {}, ["--loss_type", "sapo"]).loss_type == "sapo"


def whitened_gae(gamma: float, lam: float) -> Tensor:
    advantages, returns = gae(REWARDS, VALUES, MASK, gamma, lam)
    return torch.cat([masked_whiten(advantages, MASK), returns])


ADVANTAGES = {
    "verl-rloo": (lambda: rloo_advantages(SCORES, G), lambda: verl_advantages("rloo"), EXACT),
    "verl-reinforce++": (  # PPO with lambda 1 and V = 0
        lambda: masked_whiten(gae(REWARDS, 0 * VALUES, MASK, 0.9, 1.0)[0], MASK),
        lambda: verl().compute_reinforce_plus_plus_outcome_advantage(
            REWARDS, REAL, types.SimpleNamespace(gamma=0.9)
        )[0], ADDED,
    ),
    "verl-grpo": (  # here 1e-4 is added to the std, as in TRL; there 1e-6 by default
        lambda: group_advantages(SCORES, G), lambda: verl_advantages("grpo", epsilon=1e-4), EXACT,
    ),
}  # fmt: skip
for x in ((1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (1.0, 0.0)):
    ADVANTAGES[f"verl-gae-{x}"] = lambda x=x: whitened_gae(*x), lambda x=x: verl_gae(*x), ADDED
for known, s in (("all", SCORES), ("some", SOME)):
    ours = partial(rloo_advantages, s - 0.7 * (LOGPROBS - REF).sum(1), G)
    theirs = partial(trl_advantages, "RLOO", s, beta=0.7)
    ADVANTAGES[f"trl-rloo-{known}"] = ours, theirs, EXACT
    for scale in ("group", "batch", "none"):
        ours = partial(group_advantages, s, G, scale)
        theirs = partial(trl_advantages, "GRPO", s, scale_rewards=scale)
        ADVANTAGES[f"trl-{scale}-{known}"] = ours, theirs, 1e-6


def assert_numbers_agree(
    quantity: str, ours: list[Tensor], theirs: list[Tensor], tolerance: float
) -> None:
    """Two systems' numbers must be equal to `tolerance` of the largest number, which is at least
    counted as 1.
    """
    ours, theirs = (torch.cat([x.detach().flatten() for x in xs]) for xs in (ours, theirs))
    difference = (ours - theirs).abs().max().item()
    largest = max(1.0, theirs.abs().max().item())
    assert difference <= tolerance * largest, f"{quantity}: {difference} of {largest}"


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradient_are_theirs(name):
    *functions, tolerance = LOSSES[name]
    found = []
    for function in functions:
        logprobs = LOGPROBS.clone().requires_grad_()
        loss = function(logprobs).sum()
        found.append([loss, *torch.autograd.grad(loss, logprobs)])
    assert_numbers_agree(name, *found, tolerance)
    assert found[0][1].abs().max() > 1e-3


def test_on_policy_rloo_has_the_gradient_of_trl():
    """Off policy TRL has a ratio and a clip, and rloo.py makes no update."""
    p = LOGPROBS.clone().requires_grad_()
    losses = rloo_loss(p, A, MASK), trl_loss(p, "RLOO", old=p.detach())
    ours, theirs = (torch.autograd.grad(loss, p)[0] for loss in losses)
    assert_numbers_agree("gradient", [ours], [theirs], EXACT)
    assert ours.abs().max() > 1e-3


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_are_theirs(name):
    ours, theirs, tolerance = ADVANTAGES[name]
    assert_numbers_agree(name, [ours()], [theirs()], tolerance)
