"""GRPO, RLOO and reward models against TRL's trainers: losses, gradients, advantages.

TRL's own trainers run here, on the same small model and the same completions. TRL removed its PPO
trainer after 1.12.0: ppo.py is compared with the papers' equations and with verl instead.
"""

import math

import pytest
import torch
from small import compared, letter_tokenizer, make_rollout, save_model, small_llama
from transformers import AutoModelForCausalLM

from grpo import group_advantages, grpo_loss
from plumbing.forward import completion_logprobs
from plumbing.preferences import load_for_training, pair_of, pair_scores, text_ids
from reward_model import preference_loss
from rloo import rloo_advantages, rloo_loss

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
EOS, T, TEMPERATURE = 19, 5, 0.7
PROMPTS = [[1, 2, 3]] * 4 + [[4, 5]] * 4 + [[6]] * 4
COMPLETIONS = [
    [7, 8, EOS], [EOS], [9, 10, 11, 12, 13], [7, EOS], [14, 15, 16, EOS], [1, 2, 3, 4, 5], [3, EOS],
    [8, 9, EOS], [2, 2, 2, EOS], [17, EOS], [18, 1, 5, 6, EOS], [12, 13, 14, 1, 2],
]  # fmt: skip
G, ROWS = 4, len(COMPLETIONS)
ROLLOUT = make_rollout(PROMPTS, COMPLETIONS, eos=EOS)
MASK, ADVANTAGES = ROLLOUT.completion_mask, torch.linspace(-2, 3, ROWS)
REWARDS = [1.0, 0.0, 2.0, -1.0, 0.5, 0.5, 0.5, 0.5, 3.0, 0.1, 0.2, 7.0]
WEIGHTS = [1.0, 0.5]  # where there are one or two rewards
NOISE = torch.randn(2, ROWS, T, generator=torch.Generator().manual_seed(0))  # on log-probs


def equal(ours, theirs):
    compared("ours and TRL's", ours, theirs, tolerance=1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model with rotary positions: TRL passes no position ids for left-padded prompts."""
    path = tmp_path_factory.mktemp("trl") / "small"
    return save_model(path, small_llama(vocab_size=20), letter_tokenizer())


def trainer(kind, folder, rewards=(REWARDS,), **flags):
    """TRL's trainer, whose generation returns COMPLETIONS and whose rewards are as given."""
    # Not at the head: it takes seconds, and fast tests do without it.
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")

    class Fixed(getattr(trl, f"{kind}Trainer")):
        def _generate(self, prompts):
            texts = [" ".join(map(str, c)) for c in COMPLETIONS]
            extras = (None, texts, None, {}, None, None) if kind == "GRPO" else (texts,)
            return [*map(list, PROMPTS)], [*map(list, COMPLETIONS)], *extras

    settings = {
        "output_dir": f"{folder}-out", "use_cpu": True, "bf16": False,
        "report_to": "none", "save_strategy": "no", "gradient_checkpointing": False,
        "per_device_train_batch_size": ROWS, "num_generations": G, "max_completion_length": T,
        "temperature": TEMPERATURE, "model_init_kwargs": {"dtype": torch.float64},
        "reward_weights": WEIGHTS[: len(rewards)],
    }  # fmt: skip
    if kind == "GRPO":
        settings["use_bias_correction_kl"] = False  # TRL's own addition, not in the paper
    return Fixed(
        model=folder,
        reward_funcs=[lambda completions, values=values, **columns: values for values in rewards],
        args=getattr(trl, f"{kind}Config")(**(settings | flags)),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["a", "b", "c"]}),
        processing_class=letter_tokenizer(),
    )


def loss_of(t, epsilon_high=0.2, **more):
    """TRL's loss on ROLLOUT."""
    t.model.train()
    t.epsilon_high = epsilon_high
    tokens, mask = ROLLOUT.tokens, ROLLOUT.attention_mask.long()
    inputs = {
        "prompt_ids": tokens[:, :-T], "prompt_mask": mask[:, :-T], "advantages": ADVANTAGES,
        "completion_ids": tokens[:, -T:], "completion_mask": mask[:, -T:],
    }  # fmt: skip
    return t._compute_loss(t.model, inputs | more)


def equal_losses(ours, theirs, model, their_model):
    equal([ours], [theirs])
    losses = (ours, model), (theirs, their_model)
    equal(*(torch.autograd.grad(loss, list(m.parameters())) for loss, m in losses))


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("clip_range_high", [0.2, 0.5])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "gspo", "cispo"])
def test_the_loss_of_grpo_and_its_gradient_are_those_of_trl(
    loss_type, clip_range_high, kl_coef, folder
):
    model = load(folder)
    logprobs, _ = completion_logprobs(model, ROLLOUT, TEMPERATURE)
    noise, other = 0.4 * NOISE
    noise[-3] -= 1.2  # a completion with A > 0, far above the clip range also as a whole
    old, ref = ((logprobs.detach() + x) * MASK for x in (noise, other))
    ours, clipped = grpo_loss(
        logprobs, old, ADVANTAGES, MASK, clip_range=0.2, clip_range_high=clip_range_high,
        cispo_bound=clip_range_high, loss_type=loss_type, max_new_tokens=T,
        ref_logprobs=ref, kl_coef=kl_coef,
    )  # fmt: skip

    theirs = {"loss_type": loss_type}
    if loss_type == "gspo":  # in TRL's words
        theirs = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    t = trainer("GRPO", folder, beta=kl_coef, **theirs)
    t.current_gradient_accumulation_steps = 1
    inputs = {"old_per_token_logps": old, "ref_per_token_logps": ref}
    inputs["num_items_in_batch"] = MASK.sum()
    other = loss_of(t, 0.7 - clip_range_high, **inputs)
    theirs = loss_of(t, clip_range_high, **inputs)
    assert (theirs - other).abs() > 1e-3, "the upper side of the clip is not at work"
    equal_losses(ours, theirs, model, t.model)
    assert (clipped & MASK).any()


def test_the_loss_of_rloo_and_its_gradient_are_those_of_trl(folder):
    model = load(folder)
    logprobs, _ = completion_logprobs(model, ROLLOUT, TEMPERATURE)
    old = (logprobs.detach() + 0.1 * NOISE[0]) * MASK
    ours, clipped = rloo_loss(logprobs, old, ADVANTAGES, MASK, clip_range=0.2)
    t = trainer("RLOO", folder)
    equal_losses(ours, loss_of(t, old_logps=old.sum(1)), model, t.model)
    assert clipped.any()


SOME = [1.0, None, 2.0, -1.0, 0.5, 0.5, 0.5, 0.5, None, None, None, None]
FEW = [1.0, 2.0, 4.0, -1.0, None, 0.5, None, None, None, None, None, None]
MORE = [0.2, None, None, 1.0, 2.0, 3.0, 4.0, 5.0, None, 1.5, 1.0, None]


def total(rewards):
    """The weighted sum of the rewards that are not None; NaN where all are."""
    columns = [[math.nan if r is None else r for r in column] for column in rewards]
    weighted = torch.tensor(columns) * torch.tensor(WEIGHTS[: len(rewards)]).unsqueeze(1)
    return weighted.nansum(0).masked_fill(weighted.isnan().all(0), math.nan)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("rewards", [[REWARDS], [SOME], [REWARDS, MORE], [SOME, MORE]])
def test_the_advantages_of_grpo_are_those_of_trl(rewards, scale, folder):
    t = trainer("GRPO", folder, rewards, scale_rewards=scale)
    t.model.train()
    theirs = t._generate_and_score_completions([{"prompt": "a"}] * ROWS)["advantages"]
    equal([group_advantages(total(rewards), G, scale)], [theirs])


@pytest.mark.parametrize("kl_coef", [0.0, 0.7])
@pytest.mark.parametrize("rewards", [[REWARDS], [SOME], [FEW], [SOME, MORE]])
def test_the_advantages_of_rloo_are_those_of_trl(rewards, kl_coef, folder):
    t = trainer("RLOO", folder, rewards, beta=kl_coef)
    model, moved = load(folder), load(folder)
    for p in moved.parameters():
        p.data.mul_(1.1)
    t.model.load_state_dict(moved.state_dict(), strict=False)
    t.model.train()
    theirs = t._generate_and_score_completions([{"prompt": "a"}] * ROWS)["advantages"]

    with torch.no_grad():
        policy, ref = (completion_logprobs(m, ROLLOUT, TEMPERATURE)[0] for m in (moved, model))
    equal([rloo_advantages(total(rewards) - kl_coef * (policy - ref).sum(1), G)], [theirs])


@pytest.fixture(scope="module")
def reward_trainer(folder):
    """TRL's RewardTrainer on a reward model in float64, whose pad is EOS."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    model = load_for_training(folder).double()
    model.score.weight.data.copy_(torch.linspace(-1, 1, 32))
    tokenizer = letter_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    args = trl.RewardConfig(
        output_dir=f"{folder}-reward", use_cpu=True, bf16=False, report_to="none",
        gradient_checkpointing=False, disable_dropout=True, max_length=None,
    )  # fmt: skip
    data = datasets.Dataset.from_list([{"chosen": "ab", "rejected": "cad"}])
    return trl.RewardTrainer(model, args, train_dataset=data, processing_class=tokenizer)


# Rows of several lengths; of TRL's the last token must not be its pad, which it couldn't tell from
# padding: here the pad is EOS, and ours may end with it.
PAIR_IDS = [([1, 2, 3], [4, 5]), ([6], [7, 8, 9, 10, 11, 12]), ([13, 3], [14]), ([2] * 7, [5, 5])]


@pytest.mark.parametrize("coef", [0.0, 0.3])
@pytest.mark.parametrize("margins", [[0.0, 0.0, 0.0, 0.0], [0.0, 0.7, -0.4, 2.0]])
def test_the_loss_of_the_reward_model_and_its_gradient_are_those_of_trl(
    margins, coef, reward_trainer
):
    pairs = zip(PAIR_IDS, margins, strict=True)
    rows = [{"chosen_ids": a, "rejected_ids": b, "margin": m} for (a, b), m in pairs]
    t, model = reward_trainer, reward_trainer.model.train()
    chosen, rejected, _ = pair_scores(model, rows)
    ours = preference_loss(chosen, rejected, torch.tensor(margins).double(), coef).mean()
    t.args.center_rewards_coefficient = coef or None
    theirs = t.compute_loss(model, t.data_collator(rows))
    equal_losses(ours, theirs, model, model)


def test_messages_become_the_tokens_that_trls_reward_trainer_makes_and_text_has_no_eos(
    reward_trainer,
):
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"
    user = {"role": "user", "content": "ab"}
    good, bad = ({"role": "assistant", "content": text} for text in "cd")
    for row in (
        {"prompt": [user], "chosen": [good], "rejected": [bad]},
        {"chosen": [user, good], "rejected": [user, bad]},
        {"prompt": "ab", "chosen": "c", "rejected": "d"},
    ):
        data = pytest.importorskip("datasets").Dataset.from_list([row])
        (theirs,) = reward_trainer._prepare_dataset(data, tokenizer, reward_trainer.args, "x")
        pair = pair_of(row)
        for key in ("chosen", "rejected"):
            ours = text_ids(tokenizer, pair["prompt"], pair[key])
            # By design: a reward model here reads text as it is, now and in the loop.
            eos = [tokenizer.eos_token_id] * isinstance(row["chosen"], str)
            assert theirs[f"{key}_ids"] == ours + eos
