"""GRPO, RLOO and reward models against TRL's trainers: losses, gradients, advantages, whole steps.

TRL's own trainers run here, on the same small model and the same completions. TRL removed its PPO
trainer after 1.12.0; ppo.py is compared with the papers' equations instead, in test_ppo_by_hand.py.

  python tests/test_trl_parity.py        # writes what was compared into docs/evidence/parity.md
"""

import copy
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from small import compared, letter_tokenizer, make_rollout, save_model, small_llama
from transformers import AutoModelForCausalLM

import grpo
import rloo
from common import Rollout, importance_ratio
from grpo import group_advantages, grpo_loss
from plumbing.extras import overlong_penalty
from plumbing.forward import completion_logprobs
from plumbing.pairs import pair_of, pair_scores
from plumbing.reward_models import load_for_training, text_ids
from reward_model import preference_loss
from rloo import rloo_advantages, rloo_loss

trl = pytest.importorskip("trl", reason="TRL is not there: pip install -r requirements-dev.txt")
datasets = pytest.importorskip("datasets")
from trl.rewards import get_soft_overlong_punishment  # noqa: E402

pytestmark = pytest.mark.slow
EOS, T, TEMPERATURE = 19, 5, 0.7
PROMPTS = [[1, 2, 3], [4, 5], [6]]
COMPLETIONS = [
    [7, 8, EOS], [EOS], [9, 10, 11, 12, 13], [7, EOS], [14, 15, 16, EOS], [1, 2, 3, 4, 5], [3, EOS],
    [8, 9, EOS], [2, 2, 2, EOS], [17, EOS], [18, 1, 5, 6, EOS], [12, 13, 14, 1, 2],
]  # fmt: skip
G = 4
ROWS = len(COMPLETIONS)
PARTS = [(p, c) for i, c in enumerate(COMPLETIONS) for p in [PROMPTS[i // G]]]
ROLLOUT = make_rollout([p for p, _ in PARTS], [c for _, c in PARTS], eos=EOS)
REWARDS = [1.0, 0.0, 2.0, -1.0, 0.5, 0.5, 0.5, 0.5, 3.0, 0.1, 0.2, 7.0]


def numbers(seed: int, scale: float) -> torch.Tensor:
    """Noise on log-probs: (B, T)."""
    return scale * torch.randn(ROWS, T, generator=torch.Generator().manual_seed(seed))


RECORDS: list[str] = []  # the rows of the table


def compare(quantity: str, ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    RECORDS.append(compared(quantity, ours, theirs, tolerance=1e-6))


INTRODUCTION = """# The same numbers by plainrlhf, TRL and verl

The first table has losses, gradients, advantages and updated weights of GRPO, RLOO and the reward
model, by this code and by TRL's own trainers, from the same completions and rewards. For a
tensor it has the norm and the largest difference. `python tests/test_trl_parity.py` writes it;
here with TRL {trl} and torch {torch}. PPO is not in it, because TRL has no PPO trainer any more: it
is in the table of verl below. Sampling is not compared here, nor what a whole run learns: for that
see [compare.md](../compare.md).

| quantity | ours | TRL's | difference |
|---|---|---|---|"""


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    yield
    if path := os.environ.get("PARITY_TABLE"):
        head = INTRODUCTION.format(trl=trl.__version__, torch=torch.__version__)
        page = Path(path)
        rest = page.read_text(encoding="utf-8").partition("\n## ") if page.exists() else ("",) * 3
        page.write_text("\n".join([head, *RECORDS]) + "\n" + "".join(rest[1:]), "utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A small model with rotary positions: TRL passes no position ids for left-padded prompts."""
    path = tmp_path_factory.mktemp("trl") / "small"
    save_model(path, small_llama(vocab_size=20), letter_tokenizer())
    return path


def trainer(
    kind: str,
    folder: Path,
    rewards: list[list[float | None]] | None = None,
    dtype: torch.dtype = torch.float64,
    **flags: Any,
) -> Any:
    """TRL's trainer, whose generation returns COMPLETIONS and whose rewards are as given."""

    class Fixed(getattr(trl, f"{kind}Trainer")):
        def _generate(self, prompts: list) -> tuple:
            ids = [list(p) for p, _ in PARTS], [list(c) for _, c in PARTS]
            texts = [" ".join(map(str, c)) for c in COMPLETIONS]
            extras = (None, texts, None, {}, None, None) if kind == "GRPO" else (texts,)
            return *ids, *extras

    def fixed(values: list[float | None]):
        return lambda completions, **columns: values

    config = getattr(trl, f"{kind}Config")
    settings = {
        "output_dir": str(folder.parent / "out"), "use_cpu": True, "bf16": False,
        "report_to": "none", "save_strategy": "no", "gradient_checkpointing": False,
        "per_device_train_batch_size": ROWS, "num_generations": G, "max_completion_length": T,
        "temperature": TEMPERATURE, "learning_rate": 0.5, "lr_scheduler_type": "constant",
        "model_init_kwargs": {"dtype": dtype}, "disable_tqdm": True, "logging_steps": 1000,
    }  # fmt: skip
    if kind == "GRPO":
        settings["use_bias_correction_kl"] = False  # TRL's own addition, not in the paper
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Fixed(
            model=str(folder),
            reward_funcs=[fixed(values) for values in rewards or [REWARDS]],
            args=config(**(settings | flags)),
            train_dataset=datasets.Dataset.from_dict({"prompt": ["a", "b", "c"]}),
            processing_class=letter_tokenizer(),
        )


def their_inputs(rollout: Rollout, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "prompt_ids": rollout.tokens[:, :-T], "prompt_mask": rollout.attention_mask[:, :-T].long(),
        "completion_ids": rollout.tokens[:, -T:],
        "completion_mask": rollout.completion_mask.long(), **more,
    }  # fmt: skip


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def load(folder: Path, dtype: torch.dtype = torch.float64) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


# --- Losses and gradients ---


@pytest.fixture(scope="module")
def grpo_trainer(folder) -> Any:
    return trainer("GRPO", folder)


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("clip_range_high", [0.2, 0.5])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo"])
def test_the_loss_of_grpo_and_its_gradient_are_those_of_trl(
    loss_type, level, clip_range_high, kl_coef, grpo_trainer, folder
):
    model = load(folder)
    logprobs, _ = completion_logprobs(model, ROLLOUT, TEMPERATURE)
    noise = numbers(0, 0.4)
    noise[-3] -= 1.2  # a completion with A > 0, far above the clip range also as a whole
    old = (logprobs.detach() + noise) * ROLLOUT.completion_mask
    ref = (logprobs.detach() + numbers(1, 0.4)) * ROLLOUT.completion_mask
    advantages = torch.linspace(-2, 3, ROWS)
    ratio = importance_ratio(logprobs, old, ROLLOUT.completion_mask, "sequence")
    assert ratio[-3, 0] > 1.5 and advantages[-3] > 0
    num_tokens = ROLLOUT.completion_mask.sum()
    ours, clipped = grpo_loss(
        logprobs, old, advantages, ROLLOUT.completion_mask, clip_range=0.2,
        clip_range_high=clip_range_high, cispo_bound=clip_range_high, loss_type=loss_type,
        importance_sampling_level=level, max_new_tokens=T, ref_logprobs=ref, kl_coef=kl_coef,
    )  # fmt: skip

    t = grpo_trainer
    t.loss_type, t.importance_sampling_level, t.beta = loss_type, level, kl_coef
    t.epsilon_low, t.epsilon_high = 0.2, clip_range_high
    t.current_gradient_accumulation_steps = 1
    t.model.train()
    inputs = their_inputs(
        ROLLOUT, advantages=advantages, old_per_token_logps=old, ref_per_token_logps=ref,
        num_items_in_batch=num_tokens,
    )  # fmt: skip
    t.epsilon_high = 0.7 - clip_range_high
    other = t._compute_loss(t.model, inputs)
    t.epsilon_high = clip_range_high
    t._metrics["train"].clear()
    theirs = t._compute_loss(t.model, inputs)
    assert (theirs - other).abs() > 1e-3, "the upper side of the clip is not at work"
    kl = f"KL {kl_coef}" if kl_coef else "no KL"
    name = f"{loss_type}, {level} level, clip 0.2 to {clip_range_high}, {kl}"
    compare(f"loss: {name}", [ours], [theirs])
    compare(f"gradient: {name}", gradients(model, ours), gradients(t.model, theirs))
    clipped = clipped & ROLLOUT.completion_mask
    assert clipped.any()
    if loss_type == "cispo":  # there TRL counts completions with A > 0 alone
        clipped = clipped & (advantages > 0).unsqueeze(1)
    shares = clipped.any(dim=1).double().mean(), clipped.sum() / num_tokens
    share = shares[0] if level == "sequence" else shares[1]
    logged = t._metrics["train"]
    [theirs] = logged["cispo_clip_ratio" if loss_type == "cispo" else "clip_ratio/region_mean"]
    compare(f"share clipped: {name}", [share], [torch.tensor(theirs)])


def test_the_loss_of_rloo_and_its_gradient_are_those_of_trl(folder):
    model = load(folder)
    logprobs, _ = completion_logprobs(model, ROLLOUT, TEMPERATURE)
    old = (logprobs.detach() + numbers(0, 0.1)) * ROLLOUT.completion_mask
    advantages = torch.linspace(-2, 3, ROWS)
    ours, clipped = rloo_loss(logprobs, old, advantages, ROLLOUT.completion_mask, clip_range=0.2)
    t = trainer("RLOO", folder)
    t.model.train()
    inputs = their_inputs(ROLLOUT, advantages=advantages, old_logps=old.sum(1))
    theirs = t._compute_loss(t.model, inputs)
    compare("loss: rloo", [ours], [theirs])
    compare("gradient: rloo", gradients(model, ours), gradients(t.model, theirs))
    [theirs] = t._metrics["train"]["clip_ratio/region_mean"]
    compare("share clipped: rloo", [clipped.double().mean()], [torch.tensor(theirs)])
    assert clipped.any()


# --- From rewards to advantages ---

SOME = [1.0, None, 2.0, -1.0, 0.5, 0.5, 0.5, 0.5, None, None, None, None]
FEW = [1.0, 2.0, 4.0, -1.0, None, 0.5, None, None, None, None, None, None]
MORE = [0.2, None, None, 1.0, 2.0, 3.0, 4.0, 5.0, None, 1.5, 1.0, None]


def total(rewards: list[list[float | None]], weights: list[float]) -> torch.Tensor:
    """The weighted sum as tasks.score makes it, checked on its own in test_tasks.py."""
    rows = list(zip(*rewards, strict=True))
    nan = float("nan")
    return torch.tensor(
        [
            nan if all(r is None for r in row) else sum(w * (r or 0) for w, r in zip(weights, row))
            for row in rows
        ]
    )


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("rewards", [[REWARDS], [SOME], [REWARDS, MORE], [SOME, MORE]])
def test_the_advantages_of_grpo_are_those_of_trl(rewards, scale, folder):
    weights = [1.0, 0.5][: len(rewards)]
    t = trainer("GRPO", folder, rewards, scale_rewards=scale, reward_weights=weights)
    t.model.train()
    theirs = t._generate_and_score_completions([{"prompt": "a"}] * ROWS)["advantages"]
    ours = group_advantages(total(rewards, weights), G, scale)
    several = f"{len(rewards)} rewards" + (", some None" if SOME in rewards else "")
    compare(f"advantages: grpo, scale {scale}, {several}", [ours], [theirs])


@pytest.mark.parametrize("kl_coef", [0.0, 0.7])
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("clip", [None, (0.0, 1.5)])
@pytest.mark.parametrize("rewards", [[REWARDS], [SOME], [FEW], [SOME, MORE]])
def test_the_advantages_of_rloo_are_those_of_trl(rewards, clip, normalised, kl_coef, folder):
    weights = [1.0, 0.5][: len(rewards)]
    t = trainer(
        "RLOO", folder, rewards, reward_weights=weights, beta=kl_coef, reward_clip_range=clip,
        normalize_advantages=normalised,
    )  # fmt: skip
    model = load(folder)
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for p in moved.parameters():
            p.mul_(1.1)
    t.model.load_state_dict(moved.state_dict(), strict=False)
    t.model.train()
    theirs = t._generate_and_score_completions([{"prompt": "a"}] * ROWS)["advantages"]

    with torch.no_grad():
        policy, ref = (completion_logprobs(m, ROLLOUT, TEMPERATURE)[0] for m in (moved, model))
    scores = total(rewards, weights)
    scores = scores.clamp(*clip) if clip else scores
    ours = rloo_advantages(scores - kl_coef * (policy - ref).sum(1), G, normalised)
    name = f"KL {kl_coef}, {'normalised' if normalised else 'plain'}, clip {clip}"
    name += ", rewards None" if SOME in rewards else ", one or no reward" if FEW in rewards else ""
    name += ", 2 rewards" if len(rewards) == 2 else ""
    compare(f"advantages: rloo, {name}", [ours], [theirs])


@pytest.fixture(scope="module")
def reward_trainer(folder) -> Any:
    """TRL's RewardTrainer on a reward model in float64, whose pad is EOS."""
    model = load_for_training(str(folder)).double()
    torch.manual_seed(3)
    torch.nn.init.normal_(model.score.weight)
    tokenizer = letter_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    args = trl.RewardConfig(
        output_dir=str(folder.parent / "reward"), use_cpu=True, bf16=False, report_to="none",
        gradient_checkpointing=False, disable_dropout=True, max_length=None,
    )  # fmt: skip
    rows = [{"chosen": "ab", "rejected": "cad"}]
    data = datasets.Dataset.from_list(rows)
    return trl.RewardTrainer(model, args, train_dataset=data, processing_class=tokenizer)


# Rows of several lengths; of TRL's the last token must not be its pad, which it couldn't tell from
# padding: here the pad is EOS, and ours may end with it.
PAIR_IDS = [([1, 2, 3], [4, 5]), ([6], [7, 8, 9, 10, 11, 12]), ([13, 3], [14]), ([2] * 7, [5, 5])]
PAIR_MARGINS = [0.0, 0.7, -0.4, 2.0]


@pytest.mark.parametrize("coef", [0.0, 0.3])
@pytest.mark.parametrize("margins", [None, PAIR_MARGINS])
def test_the_loss_of_the_reward_model_and_its_gradient_are_those_of_trl(
    margins, coef, reward_trainer
):
    rows = [{"chosen_ids": a, "rejected_ids": b} for a, b in PAIR_IDS]
    theirs = [dict(row) for row in rows]
    for row, margin in zip(theirs, margins or []):
        row["margin"] = margin
    model = reward_trainer.model.train()
    reward_trainer.args.center_rewards_coefficient = coef or None
    losses, gradients = [], []
    for kind in ("ours", "theirs"):
        model.zero_grad()
        if kind == "ours":
            chosen, rejected, _ = pair_scores(model, rows)
            margin = torch.tensor(margins or [0.0] * 4, dtype=torch.float64)
            loss = preference_loss(chosen, rejected, margin, coef).mean()
        else:
            loss = reward_trainer.compute_loss(model, reward_trainer.data_collator(theirs))
        loss.backward()
        losses.append([loss.detach()])
        gradients.append([p.grad.clone() for p in model.parameters()])
    title = f"reward model, {'margins' if margins else 'no margins'}, centring {coef}"
    compare(f"loss: {title}", *losses)
    compare(f"gradient: {title}", *gradients)


def test_messages_become_the_tokens_that_trls_reward_trainer_makes_and_text_has_no_eos(
    reward_trainer,
):
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"
    user, good, bad = (
        {"role": r, "content": c}
        for r, c in (("user", "ab"), ("assistant", "c"), ("assistant", "d"))
    )
    for row in (
        {"prompt": [user], "chosen": [good], "rejected": [bad]},
        {"chosen": [user, good], "rejected": [user, bad]},
        {"prompt": "ab", "chosen": "c", "rejected": "d"},
        {"chosen": "abc", "rejected": "abd"},
    ):
        data = datasets.Dataset.from_list([row])
        (theirs,) = reward_trainer._prepare_dataset(data, tokenizer, reward_trainer.args, "x")
        pair = pair_of(row)
        for key in ("chosen", "rejected"):
            ours = text_ids(tokenizer, pair["prompt"], pair[key])
            # By design: a reward model here reads text as it is, now and in the loop.
            eos = [tokenizer.eos_token_id] * isinstance(row["chosen"], str)
            assert theirs[f"{key}_ids"] == ours + eos


def test_the_length_penalty_is_that_of_trl():
    for buffer in (1, 2, 5):
        theirs = [torch.tensor(get_soft_overlong_punishment(T, buffer)(COMPLETIONS))]
        compare(f"length penalty, {buffer} of {T}", [overlong_penalty(ROLLOUT, buffer)], theirs)


# --- Whole steps ---


class PlainSGD(torch.optim.SGD):
    """In the place of AdamW, whose division by the gradient's size would blow up rounding."""

    def __init__(self, parameters: list, lr: float, **ignored: Any) -> None:
        super().__init__(parameters, lr=lr)


STEPS = {
    "grpo": (grpo, {}, {}),
    "dapo, clip-higher, no KL": (
        grpo,
        {"loss_type": "dapo", "clip_range_high": 0.28, "kl_coef": 0.0},
        {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.0},
    ),
    "dr_grpo": (
        grpo,
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
    ),
    "cispo": (
        grpo,
        {"loss_type": "cispo", "cispo_bound": 5.0},
        {"loss_type": "cispo", "epsilon_high": 5.0},
    ),
    "gspo": (
        grpo,
        {"importance_sampling_level": "sequence"},
        {"importance_sampling_level": "sequence"},
    ),
    "grpo, entropy bonus": (grpo, {"entropy_coef": 0.5}, {"entropy_coef": 0.5}),
    "dapo, entropy bonus": (
        grpo,
        {"loss_type": "dapo", "entropy_coef": 0.5},
        {"loss_type": "dapo", "entropy_coef": 0.5},
    ),
    "rloo": (rloo, {}, {}),
    "rloo, normalised": (rloo, {"normalize_advantages": True}, {"normalize_advantages": True}),
}


@pytest.mark.parametrize("name", STEPS)
def test_two_updates_on_a_rollout_move_the_weights_to_where_trl_moves_them(
    name, folder, tmp_path, monkeypatch
):
    """At the first one the ratio is 1 and the KL 0; at the second one neither is."""
    script, our_flags, their_flags = STEPS[name]
    start = load(folder, torch.float32)

    # TRL's trainer, with an optimiser handed in.
    their_flags = {"loss_type": "grpo"} | their_flags if script is grpo else their_flags
    t = trainer(
        script.__name__.upper(), folder, dtype=torch.float32, num_iterations=2, max_steps=2,
        max_grad_norm=1.0, **({"beta": 0.3, "epsilon": 0.05} | their_flags),
    )  # fmt: skip
    t.optimizer = PlainSGD(list(t.model.parameters()), lr=0.5)
    t.train()
    theirs = dict(t.model.named_parameters())

    ours = our_steps(script, folder, tmp_path, monkeypatch, {"kl_coef": 0.3} | our_flags)
    moved = max((p - q).abs().max() for p, q in zip(ours.values(), start.parameters(), strict=True))
    assert moved > 1e-2
    theirs = [theirs[key] for key in ours]
    compare(f"weights after two updates of SGD: {name}", list(ours.values()), theirs)


def our_steps(
    script: ModuleType, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict
) -> dict[str, torch.Tensor]:
    """The weights after script.main on ROLLOUT with REWARDS, two epochs."""
    lines = [json.dumps({"prompt": "abc"[i]}) for i in range(3)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines * 2))
    (tmp_path / "fixed.py").write_text(f"def fixed(completions, **kw): return {REWARDS}\n")
    monkeypatch.setattr(script, "sample", lambda *args, **kwargs: ROLLOUT)
    monkeypatch.setattr(script, "score", lambda *args: (torch.tensor(REWARDS), ["x"] * ROWS))
    monkeypatch.setattr(torch.optim, "AdamW", PlainSGD)
    flags = {
        "model": folder, "prompts": tmp_path / "prompts.jsonl", "num_steps": 1,
        "prompts_per_step": 3, "num_generations": G, "rollout_batch_size": ROWS,
        "micro_batch_size": 5, "num_epochs": 2, "num_mini_batches": 1, "max_new_tokens": T,
        "temperature": TEMPERATURE, "learning_rate": 0.5, "warmup_steps": 0, "clip_range": 0.05,
        "max_grad_norm": 1.0, "num_eval_prompts": 1, "device": "cpu", "bf16": False,
        "output_dir": tmp_path / "run",
    } | flags  # fmt: skip
    script.main([f"--{name}={value}" for name, value in flags.items()])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")
    return dict(model.named_parameters())


if __name__ == "__main__":
    os.environ["PARITY_TABLE"] = str(
        Path(__file__).parent.parent / "docs" / "evidence" / "parity.md"
    )
    sys.exit(pytest.main([__file__, "-n", "0"]))
