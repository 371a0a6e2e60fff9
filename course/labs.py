"""The experiments of the labs: each asks what one choice, or one mistake, does to a run.

  python labs.py                          # what there is, and its seconds on two CPU cores
  python labs.py dropout                  # one seed of each variant, beside what to expect
  python labs.py dropout --seeds 5 --pictures here
  python labs.py all --seeds 40 --update  # adds the seeds that reference.json lacks
  python labs.py --pictures docs/experiments  # draws those of the page anew, runs nothing

Where 40 seeds have been run, a figure has bounds: one more run lies within them in 999 of 1,000
cases. (That of a rounding error is wider: machines differ.) `rloo_steps`, `ppo_steps` and
`grpo_steps` draw nothing: their figures must be those of the solution. Elsewhere a figure stands
beside the mean and the spread in reference.json.

All of them train the embedded model of 0.6 M parameters on sums, without a network. A mistake is
put into a fresh copy of the script: the files stay as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import io
import json
import math
import multiprocessing
import os
import random
import shlex
import statistics
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
ROOT = HERE if (HERE / "ppo.py").exists() else HERE.parent
REFERENCE = HERE / "reference.json"
CURVES = HERE / "curves.json"
sys.path.insert(0, str(ROOT))
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical"}

import torch
from torch import Tensor

PPO = "--num_steps 30 --prompts_per_step 64 --num_eval_prompts 256 --eval_every 30"
GROUPS = "--num_steps 60 --prompts_per_step 8 --num_generations 8 --num_eval_prompts 256"
GROUPS += " --eval_every 60"
HOT = GROUPS.replace("prompts_per_step 8", "prompts_per_step 32") + " --temperature 1.5"
# 10 rollouts of 256 completions, 32 updates of 32 rows with each: 4 epochs of 8 minibatches.
ROLLOUTS = "--num_steps 10 --prompts_per_step 32 --num_generations 8 --num_eval_prompts 256"
ROLLOUTS += " --eval_every 10 --warmup_steps 0 --kl_coef 0 --eval_generations 8"
REUSED = f"{ROLLOUTS} --num_epochs 4 --num_mini_batches 8"

# Three steps of three updates on given completions. A whole rollout is a minibatch, so the order of
# its rows, which a right solution may draw otherwise, changes nothing but rounding.
FIRST = "--num_steps 3 --num_eval_prompts 8 --eval_every 3 --warmup_steps 0 --learning_rate 2e-4"
FIRST += " --num_epochs 3 --num_mini_batches 1 --micro_batch_tokens 256"
FIRST_OF_GROUPS = f"{FIRST} --prompts_per_step 32 --num_generations 8"
FIRST_FIGURES = "entropy_first kl policy_loss clipfrac approxkl grad_norm".split()

# What the figures can be. Shares are from 0 to 1; those of some 256 samples have at least the error
# of that sample, here on the scale asin(sqrt(share)), where it is the same for all shares.
SAMPLED = set("accuracy accuracy_first accuracy_best judge pass_at_8".split())
SAMPLED |= set("reward truncated clip_first flat first_digit".split())
SHARES = SAMPLED | set("greedy lowest clipfrac easy hard".split())
SAMPLING_ERROR = 1 / (2 * 256**0.5)
SIGNED = {"right", "wrong"}  # from -1 to 1
POSITIVE = set("k1_std k2_std k3_std entropy entropy_first value_loss".split())
POSITIVE |= set(
    "grad_norm approxkl kl kl_largest length length_first sampler_dev reward surprise".split()
)
POSITIVE |= {"loss", "loss_last"}  # of reward_model.py
# On another machine a few times as large; with a mistake thousands of times.
ROUNDING = {"logprob_dev"}
# The same with every seed.
EXACT = set("ratio_dev clip_first kl_first one_of_8 loss_first".split())
FEWEST = 40  # seeds that bounds are made from: of fewer the spread is not known well enough
CONFIDENCE = 0.999  # one more run lies within the bounds of a figure so often


@dataclass
class Variant:
    """A run: a script, its flags, and for a mistake what is done to the script's module. Or, where
    nothing is trained, a function from the seed to the figures. `judge` are flags of
    reward_model.py, which then runs first, on so many pairs: JUDGE in the flags of the script is
    its folder.
    """

    label: str
    script: str = ""
    flags: str = ""
    change: Callable[[ModuleType], None] | None = None
    measure: Callable[[int], dict[str, float]] | None = None
    judge: str = ""
    pairs: int = 0


@dataclass
class Experiment:
    """Variants that differ in one thing, and the figures in which it shows."""

    lab: int
    question: str
    variants: list[Variant]
    figures: list[str]
    exact: bool = False  # always run with seed 0: the figures are the same but for rounding
    curve: str = "objective/scores"
    samples: bool = False  # keep some of the last completions


# --- Rewards that ask for something else than right sums ---


def nines(completions: list[str], **columns: object) -> list[float]:
    """How many digits are a 9: easy to get, and not what was meant."""
    return [float(text.count("9")) for text in completions]


def short(completions: list[str], **columns: object) -> list[float]:
    """1 for no text at all, 1/2 for one character, and so on: end early."""
    return [1 / (1 + len(text)) for text in completions]


def long(completions: list[str], **columns: object) -> list[float]:
    """A twelfth for each character: go on as long as you can."""
    return [len(text) / 12 for text in completions]


# --- Mistakes, and what else no flag asks for ---


def top_5(module: ModuleType) -> None:
    module.sample = functools.partial(module.sample, top_k=5)


def forget_the_temperature(module: ModuleType) -> None:
    in_the_update, of_the_rollout = module.completion_logprobs, module.rollout_logprobs

    def unscaled(model, rollout, temperature, *args, **options):
        return in_the_update(model, rollout, 1.0, *args, **options)

    module.completion_logprobs = unscaled
    module.rollout_logprobs = lambda model, rollout, config: of_the_rollout(
        model, rollout, replace(config, temperature=1.0)
    )


def take_eos_for_padding(module: ModuleType) -> None:
    """A mask inferred from ids, where pad and EOS are the same id."""
    original = module.sample

    def sample(model, prompt_ids, *args, **options):
        rollout = original(model, prompt_ids, *args, **options)
        completions = rollout.tokens[:, prompt_ids.shape[1] :]
        is_eos = torch.isin(completions, torch.tensor(options["eos_token_ids"]))
        seen = rollout.completion_mask & ~is_eos
        return replace(rollout, completion_mask=seen, finished=torch.zeros_like(rollout.finished))

    module.sample = sample


def one_slot_after(module: ModuleType) -> None:
    """The score one slot after EOS, as in TRL's PPO; there V is 0."""
    gae, shape = module.gae, module.shape_rewards

    def longer(mask: Tensor) -> Tensor:
        return mask | torch.nn.functional.pad(mask, (1, 0))[:, :-1]

    def shape_rewards(scores, kl, mask, kl_coef):
        zeros = torch.zeros_like(scores)
        penalty = shape(zeros, kl, mask, kl_coef)
        return penalty + shape(scores, torch.zeros_like(kl), longer(mask), 0.0)

    def gae_with_a_slot_more(rewards, values, mask, gamma, lam):
        advantages, returns = gae(rewards, values, longer(mask), gamma, lam)
        return advantages.masked_fill(~mask, 0), returns.masked_fill(~mask, 0)

    module.shape_rewards, module.gae = shape_rewards, gae_with_a_slot_more


def leave_advantages_raw(module: ModuleType) -> None:
    module.masked_whiten = lambda x, mask: x


def whiten_rewards_too(module: ModuleType) -> None:
    """Rewards divided by their deviation. They keep their mean: it says what to prefer."""
    shape, whiten = module.shape_rewards, module.masked_whiten

    def shape_rewards(scores, kl, mask, kl_coef):
        return whiten(shape(scores, kl, mask, kl_coef), mask, shift_mean=False)

    module.shape_rewards = shape_rewards


def drop_the_ratio(module: ModuleType) -> None:
    """REINFORCE on a rollout that is used again: each update takes its own policy for the old."""
    original = module.grpo_loss

    def on_policy(logprobs, old_logprobs, *args, **options):
        return original(logprobs, logprobs.detach(), *args, **options)

    module.grpo_loss = on_policy


def imitate_what_is_right(module: ModuleType) -> None:
    """Rejection fine-tuning: the mean log-prob of the right completions rises, and no other."""
    drop_the_ratio(module)
    module.group_advantages = lambda rewards, *_: (rewards == 1).float()


def take_all_rows(module: ModuleType) -> None:
    """Rows without an advantage go through the model as well."""
    original = module.micro_batches

    def micro_batches(rollout, rows, has_gradient, **options):
        return original(rollout, rows, **options)

    module.micro_batches = micro_batches


def give_completions(module: ModuleType) -> None:
    """Completions that are made up take the place of sampled ones: of each prompt some right sums,
    some that forget the carry, and some random digits, of which a few have no EOS.
    """
    from common import Rollout
    from plumbing.models import load_tokenizer

    tokenizer, choices = load_tokenizer("tiny"), random.Random(0)

    def text_for(prompt: str) -> str:
        first, second = map(int, prompt.removesuffix("=").split("+"))
        without_carry = (first // 10 + second // 10) * 10 + (first + second) % 10
        digits = "".join(choices.choices("0123456789", k=choices.randint(1, 5)))
        return choices.choice([str(first + second), str(without_carry), digits])

    def sample(model, prompt_ids, prompt_mask, *, num_generations, **options):
        length, eos = options["max_new_tokens"], options["eos_token_ids"][0]
        texts = tokenizer.batch_decode([i[m.bool()] for i, m in zip(prompt_ids, prompt_mask)])
        tokens = torch.full((len(texts) * num_generations, length), options["pad_token_id"])
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        for row, ids in enumerate(tokens):
            text = text_for(texts[row // num_generations].strip())
            drawn = [*tokenizer.encode(text, add_special_tokens=False), eos][:length]
            ids[: len(drawn)], mask[row, : len(drawn)] = torch.tensor(drawn), True
        prompts = [x.repeat_interleave(num_generations, 0) for x in (prompt_ids, prompt_mask)]
        return Rollout(
            tokens=torch.cat([prompts[0], tokens], dim=1),
            attention_mask=torch.cat([prompts[1].bool(), mask], dim=1),
            completion_mask=mask,
            logprobs=torch.zeros(mask.shape),
            finished=(tokens.eq(eos) & mask).any(1),
        )

    module.sample = sample


# --- Figures without training: the tiny model at another temperature against itself at 1 ---


def sampled(seed: int, temperature: float, **options: object) -> tuple[Tensor, ...]:
    """8 completions of each of 250 sums by the tiny model: logits (B, T, V), the tokens that were
    drawn (B, T), the mask (B, T), which (B,) begin with the right digit, and the log-probs that
    `generate` noted (B, T).
    """
    from plumbing.data import encode_prompts
    from plumbing.forward import completion_states
    from plumbing.models import eos_token_ids, load_causal, load_tokenizer, logits_from
    from sampling import generate
    from tasks import add_prompts

    torch.set_num_threads(1)
    policy, tokenizer = load_causal("tiny").eval(), load_tokenizer("tiny")
    prompts = add_prompts()[0][:250]
    ids, mask = encode_prompts(tokenizer, prompts)
    rollout = generate(
        policy, ids, mask, num_generations=8, max_new_tokens=16, temperature=temperature,
        eos_token_ids=eos_token_ids(policy, tokenizer), pad_token_id=0,
        generator=torch.Generator().manual_seed(seed), **options,
    )  # fmt: skip
    with torch.no_grad():
        logits = logits_from(policy, completion_states(policy.base_model, rollout))
    length = logits.shape[1]  # of the longest
    tokens = rollout.tokens[:, ids.shape[1] :][:, :length]
    texts = tokenizer.batch_decode(tokens)
    answers = [prompt["answer"] for prompt in prompts for _ in range(8)]
    right = torch.tensor([text[:1] == a[:1] for text, a in zip(texts, answers)])
    return logits, tokens, rollout.completion_mask[:, :length], right, rollout.logprobs[:, :length]


def against_itself(
    seed: int, temperature: float, top_k: int = 0
) -> tuple[Tensor, dict[str, Tensor]]:
    """The exact KL at each token of 2,000 completions, from all probabilities, and its estimates
    from the sampled tokens: (tokens,), {estimator: (tokens,)}.
    """
    from common import kl_estimate

    logits, tokens, real, *_ = sampled(seed, temperature, top_k=top_k)
    ours, theirs = (logits / temperature).log_softmax(-1), logits.log_softmax(-1)
    exact = (ours.exp() * (ours - theirs)).sum(-1)[real]
    drawn = [x.gather(2, tokens.unsqueeze(2)).squeeze(2) for x in (ours, theirs)]
    return exact, {name: kl_estimate(*drawn, name)[real] for name in ("k1", "k2", "k3")}


def draws(seed: int) -> dict[str, float]:
    """What `generate` draws at temperature 1.5, and how far the log-probs that it notes are from
    those of a forward pass over the whole text, at most, in millionths.
    """
    from common import token_logprobs

    logits, tokens, real, right, noted = sampled(seed, 1.5)
    logprobs = token_logprobs(logits / 1.5, tokens)
    return {
        "first_digit": right.float().mean().item(),
        "length": real.sum(1).float().mean().item(),
        "surprise": -logprobs[real].mean().item(),
        "logprob_dev": 1e6 * (noted - logprobs)[real].abs().max().item(),
    }


def estimators(seed: int) -> dict[str, float]:
    """The exact KL, and mean and spread of each estimator over the tokens."""
    exact, estimates = against_itself(seed, 0.7)
    found = {"exact": exact.mean().item()}
    for name, values in estimates.items():
        found |= {name: values.mean().item(), f"{name}_std": values.std().item()}
    return found


def kl_of_top_k(temperature: float, seed: int) -> dict[str, float]:
    """From samples of the policy, and from those with top_k 5: the exact KL at the tokens of each
    is that of the policy, without top_k.
    """
    exact, estimates = against_itself(seed, temperature)
    exact_cut, cut = against_itself(seed, temperature, top_k=5)
    found = {"exact": exact, "k1": estimates["k1"], "exact_top_k": exact_cut, "k1_top_k": cut["k1"]}
    return {name: values.mean().item() for name, values in found.items()}


LAMBDAS = (0.5, 0.95, 1.0)


def share_of_score(change: Callable[[ModuleType], None] | None, seed: int = 0) -> dict[str, float]:
    """The advantage of EOS and of the token before it, for a score of 1 and V = 0."""
    module = module_of("ppo", change)
    mask = torch.tensor([[True, True, True, False]])
    zeros = torch.zeros(1, 4)
    rewards = module.shape_rewards(torch.ones(1), zeros, mask, 0.0)
    found = {}
    for lam in LAMBDAS:
        advantages, _ = module.gae(rewards, zeros, mask, 1.0, lam)
        found[f"EOS {lam}"] = advantages[0, 2].item()
        found[f"before {lam}"] = advantages[0, 1].item()
    return found


def push_on_eos(loss_type: str, scale_rewards: str, seed: int) -> dict[str, float]:
    """Which way a step moves the logit of EOS, over how far it moves it either way: -1 to 1. At
    temperature 3, where lengths vary most.
    """
    from common import token_logprobs
    from grpo import group_advantages, grpo_loss
    from plumbing.models import eos_token_ids, load_causal, load_tokenizer

    logits, tokens, real, right, _ = sampled(seed, 3.0)
    eos = eos_token_ids(load_causal("tiny"), load_tokenizer("tiny"))[0]
    logits.requires_grad_()
    logprobs = token_logprobs(logits / 3.0, tokens)
    advantages = group_advantages(right.float(), 8, scale_rewards)
    loss, _ = grpo_loss(
        logprobs, logprobs.detach(), advantages, real,
        clip_range=0.2, loss_type=loss_type, max_new_tokens=16,
    )  # fmt: skip
    up = -torch.autograd.grad(loss, logits)[0][:, :, eos].masked_fill(~real, 0)
    up = up[:, 1:]  # the first token decides what is right, so EOS in its place is no length
    parts = {"right": up[right], "wrong": up[~right]}
    return {name: (x.sum() / x.abs().sum()).item() for name, x in parts.items()}


# --- A model that doesn't know its sums yet ---


@functools.cache
def unfinished_model() -> tempfile.TemporaryDirectory:
    """A folder with the model of `python tiny/make.py --unfinished`; made once per process."""
    from tiny import make

    folder = tempfile.TemporaryDirectory()
    for part in make.train(make.UNFINISHED_STEPS, wrong=False):
        part.save_pretrained(folder.name)
    return folder


def pass_at_k(unfinished: bool, rate: str | None, seed: int) -> dict[str, float]:
    """pass@k on the held-out sums: the chance that one of k samples is right. Of the unfinished
    model or the embedded one, before (None) or after RLOO at a learning rate. Exact: where a sample
    is right with chance p, one of k is with 1 - (1 - p)^k. Chen et al. 2021, arXiv 2107.03374.
    """
    from tasks import add_prompts
    from tiny.temperature import chances

    torch.set_num_threads(1)
    folder = unfinished_model().name if unfinished else str(ROOT / "tiny")
    with tempfile.TemporaryDirectory() as output:
        if rate is not None:
            flags = f"--model {folder} {AS_EMBEDDED} --learning_rate {rate}"
            start(module_of("rloo"), flags, seed, Path(output) / "run")
            folder = f"{output}/run/model"
        greedy, chance = chances(Path(folder), add_prompts()[1], [0.02, 1.0])
    return {"greedy": greedy.mean().item()} | one_of_k(chance)


def one_of_k(chance: Tensor) -> dict[str, float]:
    """pass@k of prompts of which a sample is right with these chances (N,)."""
    return {f"pass@{k}": (1 - (1 - chance) ** k).mean().item() for k in PASS_AT}


def by_difficulty(scale_rewards: str, seed: int) -> dict[str, float]:
    """The sum of |A| of a group with one right answer of 8, over that of one with 4; and after
    training the mean chance of a right sample of the held-out sums that were hard and easy before
    (below 1/2 and above). The chances are exact, as in pass_at_k.
    """
    from grpo import group_advantages
    from tasks import add_prompts
    from tiny.temperature import chances

    torch.set_num_threads(1)
    rewards = (torch.arange(8.0) < torch.tensor([[1.0], [4.0]])).float().flatten()
    one, half = group_advantages(rewards, 8, scale_rewards).view(2, 8).abs().sum(1).tolist()
    prompts = add_prompts()[1]
    hard = chances(ROOT / "tiny", prompts, [1.0])[0] < 0.5
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{GROUPS} --kl_coef 0 --scale_rewards {scale_rewards}"
        start(module_of("grpo"), flags, seed, Path(folder) / "run")
        after = chances(Path(folder) / "run" / "model", prompts, [1.0])[0]
    means = {"hard": after[hard].mean().item(), "easy": after[~hard].mean().item()}
    return {"one_of_8": one / half} | means


def reward_steps(seed: int) -> dict[str, float]:
    """The figures of ten steps of reward_model.py."""
    flags = "--num_steps 10 --num_eval_pairs 256 --eval_every 10"
    flags += " --warmup_steps 0 --learning_rate 2e-4"
    with tempfile.TemporaryDirectory() as folder:
        train_judge(640, flags, seed, Path(folder) / "run")
        lines = read(Path(folder) / "run" / "metrics.jsonl")
    steps = lines[:-1]

    def mean(name: str) -> float:
        return statistics.mean(line[name] for line in steps)

    return {
        "loss_first": steps[0]["loss/pairs"],
        "loss": mean("loss/pairs"),
        "loss_last": lines[-1]["eval/loss"],
        "accuracy": lines[-1]["eval/accuracy"],
        "margin": steps[-1]["reward/margin"],
        "score_mean": steps[-1]["reward/mean"],
        "grad_norm": mean("grad_norm"),
    }


PASS_AT = (1, 4, 16, 64, 256)
# What rloo.py does with the embedded model, for any folder; but 120 steps instead of 180.
AS_EMBEDDED = """--task add --max_new_tokens 5 --num_steps 120 --prompts_per_step 64
--num_generations 4 --kl_coef 0.02 --rollout_batch_size 256 --micro_batch_tokens 4096 --bf16 false
--num_eval_prompts 8 --eval_every 120"""
LEARNT = "--reward_model JUDGE/model --num_steps 40 --prompts_per_step 64 --num_eval_prompts 256"
LEARNT += " --eval_every 5"
REWARD = f"--reward {shlex.quote(str(Path(__file__).resolve()))}"
EXPERIMENTS = {
    "draws": Experiment(
        1,
        "2,000 completions at temperature 1.5, in seconds: does your `generate` draw what it"
        " should? (`first_digit` is the share that begins with the right digit, `surprise` the mean"
        " of -log p of the tokens, `logprob_dev` how many millionths the noted log-probs are off.)",
        [Variant("tiny", measure=draws)],
        ["first_digit", "length", "surprise", "logprob_dev"],
    ),
    "estimators": Experiment(
        1,
        "k1, k2 and k3 estimate the same KL from samples. Which is unbiased, which varies least?"
        " (No training: the tiny model at temperature 0.7 against itself at 1, and the exact KL.)",
        [Variant("tiny", measure=estimators)],
        ["exact", "k1", "k2", "k3", "k1_std", "k2_std", "k3_std"],
    ),
    "rloo_steps": Experiment(
        2,
        "Three steps on 256 given completions, in seconds: does your RLOO compute what it should,"
        " before you wait for what it learns? (They aren't samples, so `kl` may be below 0.)",
        [Variant("3 steps", "rloo", f"{FIRST_OF_GROUPS} --kl_coef 0.1", give_completions)],
        FIRST_FIGURES,
        exact=True,
    ),
    "dropout": Experiment(
        2,
        "What does dropout that is left on do before the first update, where ratio 1 and KL 0"
        " should be, and to what is learnt?",
        [
            Variant("off", "rloo", GROUPS),
            Variant("left on", "rloo", f"{GROUPS} --disable_dropout false"),
        ],
        ["clip_first", "kl_first", "reward", "accuracy"],
    ),
    "top_k": Experiment(
        2,
        "top_k 5 samples from something else than the policy whose log-probs are trained. Which way"
        " does it move KL and entropy, as the policy gets surer of itself?",
        [
            Variant("softmax alone", "rloo", HOT),
            Variant("top_k 5", "rloo", HOT, top_5),
        ],
        ["entropy_first", "kl", "reward", "accuracy_first", "accuracy"],
        "objective/kl",
    ),
    "top_k_kl": Experiment(
        2,
        "top_k 5 is said to make the KL negative. When does it? (No training: the tiny model as"
        " policy, at temperature 0.7 surer than the reference at 1, at 1.4 less sure.)",
        [
            Variant("surer", measure=functools.partial(kl_of_top_k, 0.7)),
            Variant("less sure", measure=functools.partial(kl_of_top_k, 1.4)),
        ],
        ["exact", "k1", "exact_top_k", "k1_top_k"],
    ),
    "temperature": Experiment(
        2,
        "Sampled at temperature 1.5, log-probs at 1: a mistake that raises no error, and the ratio"
        " is 1 all the same. Where does it show?",
        [
            Variant("right", "rloo", HOT),
            Variant("forgotten", "rloo", HOT, forget_the_temperature),
        ],
        ["ratio_dev", "kl", "reward", "accuracy_first", "accuracy"],
        "objective/kl",
    ),
    "kl_coef": Experiment(
        2,
        "The reward counts nines, and right sums are what was meant. How much of them is left, for"
        " which weight of the KL? Read the samples below the figures.",
        [
            Variant(f"kl_coef {c}", "rloo", f"{GROUPS} {REWARD}:nines --kl_coef {c}")
            for c in (0, 0.05, 0.5)
        ],
        ["reward", "kl", "accuracy"],
        samples=True,
    ),
    "ppo_steps": Experiment(
        3,
        "Three steps on 256 given completions, in seconds: does your PPO compute what it should,"
        " before you wait for what it learns? (They aren't samples, so `kl` may be below 0.)",
        [
            Variant(
                "3 steps", "ppo", f"{FIRST} --prompts_per_step 256 --kl_coef 0.1", give_completions
            )
        ],
        [*FIRST_FIGURES, "value_loss", "explained"],
        exact=True,
    ),
    "missing_eos": Experiment(
        3,
        "With room for 3 tokens a sum of three digits has none left for EOS. What does a penalty"
        " for the missing EOS teach?",
        [
            Variant(f"penalty {p}", "ppo", f"{PPO} --max_new_tokens 3 --missing_eos_penalty {p}")
            for p in (0, 2)
        ],
        ["truncated", "reward", "accuracy"],
        "length/truncated_frac",
    ),
    "learning_rate": Experiment(
        2,
        "64 completions a step, three learning rates, with a warm-up of ten steps and without: what"
        " collapses, and what crawls?",
        [
            Variant(
                f"{rate}, {label}",
                "rloo",
                f"{GROUPS} --learning_rate {rate} --warmup_steps {steps}",
            )
            for rate in ("1e-4", "8e-4", "4e-3")
            for steps, label in ((10, "warm-up"), (0, "none"))
        ],
        ["lowest", "reward", "kl_largest", "accuracy"],
    ),
    "base_model": Experiment(
        2,
        "The unfinished model has seen too few sums to know them. The embedded one knows them, and"
        " prefers to forget the carry. What can RLOO add to each? (pass@k: the chance that one of k"
        " samples is right.)",
        [
            Variant(
                f"{name}, {'before' if rate is None else f'learning rate {rate}'}",
                measure=functools.partial(pass_at_k, name == "unfinished", rate),
            )
            for name, rates in (
                ("unfinished", (None, "1e-4", "8e-4")),
                ("embedded", (None, "8e-4")),
            )
            for rate in rates
        ],
        ["greedy", *(f"pass@{k}" for k in PASS_AT)],
    ),
    "group_size": Experiment(
        2,
        "64 completions a step, in groups of 2 to 32: more prompts, or a better baseline?",
        [
            Variant(
                f"G = {g}",
                "rloo",
                f"--num_steps 80 --prompts_per_step {64 // g} --num_generations {g}"
                " --num_eval_prompts 256 --eval_every 80 --learning_rate 3e-4",
            )
            for g in (2, 4, 8, 16, 32)
        ],
        ["accuracy", "flat", "grad_norm"],
    ),
    "lambda": Experiment(
        3,
        "lambda 1 trusts the rewards, lambda 0 the value model. What does a value model that starts"
        " at 0 need?",
        [
            *(Variant(f"lam {x}", "ppo", f"{PPO} --lam {x}") for x in (0.0, 0.95, 1.0)),
            Variant("lam 0.0, not whitened", "ppo", f"{PPO} --lam 0.0", leave_advantages_raw),
        ],
        ["accuracy", "explained"],
    ),
    "whitening": Experiment(
        3,
        "Advantages whitened or not, rewards whitened as well: what happens to the gradient, and to"
        " what is learnt?",
        [
            Variant("advantages", "ppo", PPO),
            Variant("both", "ppo", PPO, whiten_rewards_too),
            Variant("neither", "ppo", PPO, leave_advantages_raw),
        ],
        ["accuracy", "grad_norm", "clipfrac"],
        "grad_norm",
    ),
    "epochs": Experiment(
        3,
        "1 or 4 passes over a rollout: what is gained per episode, and what does the clip have to"
        " do with it?",
        [Variant(f"{n} epochs", "ppo", f"{PPO} --num_epochs {n}") for n in (1, 4)],
        ["accuracy", "clipfrac", "approxkl", "kl"],
    ),
    "score_slot": Experiment(
        3,
        "The score on EOS, or one slot after it: how much of it arrives at EOS and at the token"
        " before, by lambda, while V is still 0? (No training: shape_rewards and gae alone.)",
        [
            Variant("on EOS", measure=functools.partial(share_of_score, None)),
            Variant("one slot after", measure=functools.partial(share_of_score, one_slot_after)),
        ],
        [f"{where} {lam}" for lam in LAMBDAS for where in ("EOS", "before")],
    ),
    "grpo_steps": Experiment(
        4,
        "Three steps on 256 given completions, in seconds: does your GRPO compute what it should,"
        " before you wait for what it learns? (They aren't samples, so `kl` may be below 0.)",
        [Variant("3 steps", "grpo", f"{FIRST_OF_GROUPS} --kl_coef 0.01", give_completions)],
        FIRST_FIGURES,
        exact=True,
    ),
    "pad_is_eos": Experiment(
        4,
        "Pad and EOS are the same id, and the mask is inferred from the ids: EOS gets no gradient."
        " The reward is for short text. Who learns to end, and how can one learn it without?",
        [
            Variant(
                "mask carried",
                "grpo",
                f"{GROUPS} {REWARD}:short --temperature 1.5 --max_new_tokens 10",
            ),
            Variant(
                "mask inferred",
                "grpo",
                f"{GROUPS} {REWARD}:short --temperature 1.5 --max_new_tokens 10",
                take_eos_for_padding,
            ),
        ],
        ["reward", "entropy", "truncated"],
        "objective/entropy",
    ),
    "difficulty": Experiment(
        4,
        "Divided by the std of its group, of the batch, or not at all: how much does a group with"
        " one right answer of 8 weigh, where one with 4 weighs 1? Does the model learn more of the"
        " sums that were hard? (`hard` and `easy`: the chance of a right sample at the end.)",
        [
            Variant(scale, measure=functools.partial(by_difficulty, scale))
            for scale in ("group", "batch", "none")
        ],
        ["one_of_8", "hard", "easy"],
    ),
    "skipped_rows": Experiment(
        4,
        "Without a KL a group of equal rewards has no gradient, and its rows are left out of the"
        " update. Does that change what is learnt? Which share of the rows is saved (`flat`)?",
        [
            Variant("left out", "grpo", f"{GROUPS} --kl_coef 0"),
            Variant("taken along", "grpo", f"{GROUPS} --kl_coef 0", take_all_rows),
        ],
        ["flat", "grad_norm", "accuracy"],
        "reward/frac_flat_groups",
    ),
    "rejection": Experiment(
        4,
        "Rejection fine-tuning keeps the right samples and imitates them: no advantage, no ratio."
        " With one update for each rollout, and with 32: is it behind GRPO, and what is left of the"
        " entropy?",
        [
            Variant("GRPO, 1 update", "grpo", ROLLOUTS),
            Variant("GRPO, 32 updates", "grpo", REUSED),
            Variant("right ones, 1 update", "grpo", ROLLOUTS, imitate_what_is_right),
            Variant("right ones, 32 updates", "grpo", REUSED, imitate_what_is_right),
        ],
        ["accuracy", "pass_at_8", "entropy", "reward"],
    ),
    "off_policy": Experiment(
        5,
        "32 updates with each rollout: the policy leaves the one that drew it. What happens without"
        " a ratio, with one that isn't clipped, with GRPO's clip and with GSPO's? What is the size"
        " of a step to blame for?",
        [
            Variant("1 update", "grpo", ROLLOUTS),
            Variant("no ratio", "grpo", REUSED, drop_the_ratio),
            Variant("not clipped", "grpo", f"{REUSED} --clip_range 1e6"),
            Variant("clipped", "grpo", REUSED),
            Variant("GSPO", "grpo", f"{REUSED} --loss_type gspo"),
            Variant("no ratio, rate / 4", "grpo", f"{REUSED} --learning_rate 2e-4", drop_the_ratio),
        ],
        ["accuracy", "approxkl", "clipfrac", "entropy"],
    ),
    "length_bias": Experiment(
        5,
        "GRPO divides a completion by its length, Dr. GRPO by a constant, DAPO by all tokens. Where"
        " the first digit alone is judged, which way does each push EOS after it, in right and in"
        " wrong completions? (The gradient of one step; 1 would be: up, wherever EOS may be.)",
        [
            Variant("grpo", measure=functools.partial(push_on_eos, "grpo", "group")),
            Variant("dr_grpo", measure=functools.partial(push_on_eos, "dr_grpo", "none")),
            Variant("dapo", measure=functools.partial(push_on_eos, "dapo", "group")),
        ],
        ["right", "wrong"],
    ),
    "loss_types": Experiment(
        5,
        "GRPO, Dr. GRPO and DAPO in training: does the length of a completion move?",
        [
            Variant(
                kind,
                "grpo",
                f"{GROUPS} --temperature 1.5 --max_new_tokens 12 --num_mini_batches 2 {flags}",
            )
            for kind, flags in (
                ("grpo", "--loss_type grpo"),
                ("dr_grpo", "--loss_type dr_grpo --scale_rewards none"),
                ("dapo", "--loss_type dapo --clip_range_high 0.28"),
            )
        ],
        ["accuracy_first", "accuracy", "length", "clipfrac"],
        "length/mean",
    ),
    "dynamic_sampling": Experiment(
        5,
        "DAPO replaces groups of equal rewards by those of other prompts. Is that more than"
        " sampling as many completions, of 11 prompts a step?",
        [
            Variant("8 prompts", "grpo", GROUPS),
            Variant("8 prompts, replaced", "grpo", f"{GROUPS} --dynamic_sampling 2"),
            Variant("11 prompts", "grpo", GROUPS.replace("per_step 8", "per_step 11")),
        ],
        ["sampled", "flat", "grad_norm", "accuracy"],
    ),
    "overlong": Experiment(
        5,
        "The reward pays for length, up to the limit of 12 tokens. What does DAPO's soft penalty"
        " over the last 6 change?",
        [
            Variant(
                label,
                "grpo",
                f"{GROUPS} {REWARD}:long --temperature 1.5 --max_new_tokens 12 --kl_coef 0 {flags}",
            )
            for label, flags in (("no penalty", ""), ("penalty", "--overlong_buffer 6"))
        ],
        ["length_first", "length", "truncated"],
        "length/mean",
    ),
    "entropy_bonus": Experiment(
        5,
        "Entropy falls as the policy becomes sure. What does a bonus for it keep, and what does it"
        " cost? (Without a KL; pass@8 on held-out sums.)",
        [
            Variant(
                f"{coef}",
                "grpo",
                f"{GROUPS} --kl_coef 0 --eval_generations 8 --entropy_coef {coef}",
            )
            for coef in (0, 0.01, 0.1)
        ],
        ["entropy", "accuracy", "pass_at_8"],
        "policy/entropy_avg",
    ),
    "bfloat16": Experiment(
        5,
        "Decoding in bfloat16 draws from a rounded policy. How far is it from the one that trains,"
        " and does it change what is learnt?",
        [
            Variant("float32", "rloo", GROUPS),
            Variant("bfloat16", "rloo", f"{GROUPS} --bf16 true"),
        ],
        ["sampler_kl_x1000", "sampler_dev", "accuracy"],
    ),
    "reward_steps": Experiment(
        6,
        "Ten steps of reward_model.py, in seconds: are its figures what they should be?"
        " (`loss_first` is that of scores that are all 0.)",
        [Variant("10 steps", measure=reward_steps)],
        "loss_first loss loss_last margin accuracy grad_norm score_mean".split(),
    ),
    "overoptimisation": Experiment(
        6,
        "PPO on a reward model that has learnt from few pairs, or from many: where does its score"
        " rise while the sums get worse, and what does the weight of the KL save?",
        [
            Variant(
                f"{pairs} pairs, kl_coef {coef}",
                "ppo",
                f"{LEARNT} --kl_coef {coef}",
                judge="--num_steps 80 --num_eval_pairs 256 --eval_every 80",
                pairs=pairs,
            )
            for pairs in (200, 5000)
            for coef in (0.01, 0.1)
        ],
        "judge score_first score kl accuracy_first accuracy_best best_step accuracy".split(),
        "eval/accuracy",
    ),
}


CURVE_NAMES = {experiment.curve for experiment in EXPERIMENTS.values()}


def figures_of(lines: list[dict]) -> dict[str, float]:
    """What a run comes to: of its beginning, of its last five steps, of its last evaluation."""
    steps, last = lines[:-1], lines[-1]

    def late(name: str) -> float | None:
        values = [line[name] for line in steps[-5:] if line.get(name) is not None]
        return statistics.mean(values) if values else None

    group = round(steps[0]["episode"] / 8)  # completions of a prompt, where a step has 8 of them
    dropped = group * sum(line.get("reward/groups_dropped", 0) for line in steps)
    best = max((x for x in lines if "eval/accuracy" in x), key=lambda x: x["eval/accuracy"])
    found = {
        "accuracy": last["eval/accuracy"],
        "accuracy_first": steps[0]["eval/accuracy"],
        "accuracy_best": best["eval/accuracy"],
        "best_step": best["step"],
        "score": last["eval/reward"],  # on held-out prompts, as the accuracy is
        "score_first": steps[0]["eval/reward"],
        "ratio_dev": steps[0]["val/ratio_max_dev_first"],
        "clip_first": steps[0]["policy/clipfrac_avg"],
        "kl_first": steps[0]["objective/kl"],
        "entropy_first": steps[0]["objective/entropy"],
        "length_first": steps[0]["length/mean"],
        "kl": late("objective/kl"),
        "kl_largest": max((line["objective/kl"] or 0.0 for line in steps), default=None),
        "lowest": min(line["objective/scores"] for line in steps),
        "entropy": late("objective/entropy"),
        "reward": late("objective/scores"),
        "length": late("length/mean"),
        "truncated": late("length/truncated_frac"),
        "clipfrac": statistics.mean(line["policy/clipfrac_avg"] for line in steps),
        "approxkl": statistics.mean(line["policy/approxkl_avg"] for line in steps),
        "grad_norm": statistics.mean(line["grad_norm"] for line in steps),
        "explained": late("val/explained_variance"),
        "flat": late("reward/frac_flat_groups"),
        "pass_at_8": last.get("eval/pass_at_k"),
        "policy_loss": statistics.mean(line["loss/policy_avg"] for line in steps),
        "value_loss": late("loss/value_avg"),
        "sampler_kl_x1000": 1000 * statistics.mean(line["val/sampler_kl"] for line in steps),
        "sampler_dev": max(line["val/sampler_max_dev"] for line in steps),
        "sampled": steps[-1]["episode"] + dropped,  # completions
    }
    return {name: value for name, value in found.items() if value is not None}


def module_of(script: str, change: Callable[[ModuleType], None] | None = None) -> ModuleType:
    """A fresh copy of a script's module, with a change made to it."""
    spec = importlib.util.spec_from_file_location(f"lab_{script}", ROOT / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for their module there
    spec.loader.exec_module(module)
    if change is not None:
        change(module)
    return module


def start(module: ModuleType, flags: str, seed: int, folder: Path) -> None:
    """Call module.main, quietly, with a run in `folder`."""
    torch.set_num_threads(1)  # faster for a model this small, and the same on every machine
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        options = ["--output_dir", str(folder), "--seed", str(seed), "--device", "cpu"]
        module.main([*shlex.split(flags), *options])


def train_judge(pairs: int, flags: str, seed: int, folder: Path) -> None:
    """Run reward_model.py on so many pairs of the embedded model's own samples."""
    from plumbing import preferences

    before, preferences.OWN_PAIRS = preferences.OWN_PAIRS, pairs
    try:
        start(module_of("reward_model"), flags, seed, folder)
    finally:
        preferences.OWN_PAIRS = before


def read(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def train(module: ModuleType, flags: str, seed: int) -> tuple[list[dict], list[str]]:
    """The metrics of a run of module.main, a dict per step, and samples of its last step."""
    with tempfile.TemporaryDirectory() as folder:
        start(module, flags, seed, Path(folder) / "run")
        metrics, samples = (read(Path(folder, "run", f"{x}.jsonl")) for x in ("metrics", "samples"))
    last = [x for x in samples if x["step"] == samples[-1]["step"]]
    return metrics, [f"{x['score']:.0f}  {x['prompt']} {x['completion']}" for x in last[:4]]


class NotWritten(Exception):
    """A function of a starter repository, and its file, that an experiment needs."""


def run_variant(job: tuple[str, int, int]) -> tuple[dict[str, float], dict, list[str]]:
    """(figures, curves, samples) of a variant of an experiment with a seed. Raises NotWritten."""
    try:
        return _run_variant(*job)
    except NotImplementedError as e:
        place = traceback.extract_tb(e.__traceback__)[-1]
        if not Path(place.filename).resolve().is_relative_to(ROOT):
            raise  # of a library
        file = Path(place.filename).resolve().relative_to(ROOT).as_posix()
        what = f", {e}" if str(e) else ""
        raise NotWritten(f"{place.name} in {file}{what}") from None


def _run_variant(name: str, index: int, seed: int) -> tuple[dict[str, float], dict, list[str]]:
    experiment = EXPERIMENTS[name]
    variant = experiment.variants[index]
    if variant.measure is not None:
        with contextlib.redirect_stderr(io.StringIO()):  # bars of loading weights
            return variant.measure(seed), {}, []
    seed = 0 if experiment.exact else seed
    module, flags, figures = module_of(variant.script, variant.change), variant.flags, {}
    with tempfile.TemporaryDirectory() as folder:
        if variant.judge:
            judge = Path(folder) / "judge"
            train_judge(variant.pairs, variant.judge, seed, judge)
            # How many held-out pairs it judges rightly.
            figures["judge"] = read(judge / "metrics.jsonl")[-1]["eval/accuracy"]
            flags = flags.replace("JUDGE", shlex.quote(str(judge)))
        lines, samples = train(module, flags, seed)
    figures |= figures_of(lines)
    return figures, {name: [line.get(name) for line in lines[:-1]] for name in CURVE_NAMES}, samples


def run(names: list[str], seeds: range) -> Iterator[tuple[str, dict[str, dict]]]:
    """Pairs of an experiment and what it came to: {variant: {"figures": one dict per seed,
    "curves": one list per seed, "samples": those of the first seed}}. Raises NotWritten.
    """
    jobs = {}  # {(name, index): the same, or that of an equal run: it is made once}
    for name in names:
        for index, variant in enumerate(EXPERIMENTS[name].variants):
            equal = (x for x in jobs if _is_same_run(EXPERIMENTS[x[0]].variants[x[1]], variant))
            jobs[name, index] = jobs.get(next(equal, None), (name, index))
    distinct = [(*job, seed) for job in dict.fromkeys(jobs.values()) for seed in seeds]
    # Processes of one thread each: two runs at a time are faster than one on two threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(distinct), os.cpu_count() or 1), context) as pool:
        made = {job: pool.submit(run_variant, job) for job in distinct}
        for name in names:
            found, curve = {}, EXPERIMENTS[name].curve
            for index, variant in enumerate(EXPERIMENTS[name].variants):
                try:
                    parts = [made[(*jobs[name, index], seed)].result() for seed in seeds]
                except NotWritten as e:
                    pool.shutdown(cancel_futures=True)
                    what = f"{name} needs a function that is not written yet: {e}"
                    raise NotWritten(what) from None
                found[variant.label] = {
                    "figures": [figures for figures, _, _ in parts],
                    "curves": [curves.get(curve, []) for _, curves, _ in parts],
                    "samples": parts[0][2],
                }
            yield name, found


def _is_same_run(a: Variant, b: Variant) -> bool:
    return a.measure is None and replace(a, label="") == replace(b, label="")


def curves_of(name: str, found: dict[str, dict]) -> dict[str, list]:
    """{variant: a curve per seed}, rounded; {} for an experiment without training."""
    return {
        label: [[v if v is None else round(v, 4) for v in curve] for curve in part["curves"]]
        for label, part in found.items()
        if any(part["curves"])
    }


def summary(
    figures: list[dict[str, float]],
    names: list[str],
    before: dict[str, dict] | None = None,
    exact: bool = False,
) -> dict[str, dict[str, float]]:
    """{figure: the number of seeds, mean, std, and the bounds within which one more run is expected
    (or None)}, of these seeds together with those of a summary `before`. exact: no figure depends
    on the seed.
    """
    found = {}
    for name in names:
        values = [f[name] for f in figures if name in f]
        known = (before or {}).get(name, {"seeds": 0, "mean": 0.0, "std": 0.0})
        seeds = known["seeds"] + len(values)
        if seeds == 0:
            continue
        mean = (known["seeds"] * known["mean"] + sum(values)) / seeds
        squares = max(0, known["seeds"] - 1) * known["std"] ** 2
        squares += known["seeds"] * (known["mean"] - mean) ** 2
        squares += sum((value - mean) ** 2 for value in values)
        std = (squares / max(1, seeds - 1)) ** 0.5
        low, high = (mean, mean) if exact else bounds(name, seeds, mean, std) or (None, None)
        found[name] = {"mean": mean, "std": std, "low": low, "high": high}
        found[name] = {k: v if v is None else round(v, 5) for k, v in found[name].items()}
        found[name]["seeds"] = seeds
    return found


def bounds(name: str, seeds: int, mean: float, std: float) -> tuple[float, float] | None:
    """Where one more run lies with CONFIDENCE: a prediction interval of Student's t, on a scale on
    which the figure is closer to normal and can't leave what is possible. None for an interval that
    would let nearly everything pass, and for fewer than FEWEST seeds.
    """
    if name in EXACT and seeds > 1 and std == 0:
        return mean, mean
    if seeds < FEWEST:
        return None
    if name in ROUNDING:
        return 0.0, 30 * mean
    freedom, spread = seeds - 1, std
    is_share = (name in SHARES or name.startswith("pass@")) and 0 <= mean <= 1
    is_positive = name in POSITIVE and mean > 0 and not is_share
    if is_share:  # the slope of asin(sqrt(share))
        spread = std / (2 * (mean * (1 - mean)) ** 0.5) if 0 < mean < 1 else 0.0
    elif is_positive:  # that of the logarithm
        spread = std / mean
    chance, more = (1 + CONFIDENCE) / 2, (1 + 1 / seeds) ** 0.5
    room = student_t(chance, freedom) * more * spread
    if is_share:
        if name in SAMPLED:
            room = max(room, statistics.NormalDist().inv_cdf(chance) * more * SAMPLING_ERROR)
        middle = math.asin(mean**0.5)
        low = math.sin(max(0.0, middle - room)) ** 2
        high = math.sin(min(math.pi / 2, middle + room)) ** 2
        return (low, high) if high - low < 0.7 else None
    if is_positive:
        factor = math.exp(min(room, 10.0))
        return (mean / factor, mean * factor) if factor < 3.5 else None
    if name in SIGNED:
        return (max(-1.0, mean - room), min(1.0, mean + room)) if room < 0.7 else None
    return (mean - room, mean + room) if room <= max(1e-4, abs(mean)) else None


@functools.cache
def student_t(share: float, freedom: int) -> float:
    """The value below which Student's t lies with the chance `share`. (t = sqrt(freedom) tan(x)
    has a density in x of cos(x) to the power of freedom - 1.)
    """
    x = torch.linspace(-math.pi / 2, math.pi / 2, 1_000_001, dtype=torch.float64)
    below = (x.cos().clamp(min=0) ** (freedom - 1)).cumsum(0)
    return freedom**0.5 * math.tan(x[torch.searchsorted(below, share * below[-1])].item())


def table(name: str, found: dict[str, dict], reference: dict) -> str:
    """The figures of an experiment, a line per variant, beside what is expected."""
    experiment = EXPERIMENTS[name]
    lines = [f"{name}: {experiment.question}"]
    width = max(map(len, found))
    for label, part in found.items():
        cells = []
        for figure, x in summary(part["figures"], experiment.figures).items():
            cell = f"{figure} {x['mean']:.3f}" + (f" ± {x['std']:.3f}" if x["std"] else "")
            expected = reference.get(name, {}).get(label, {}).get(figure)
            if expected is not None:
                cell += _beside(expected, x["mean"], label)
            cells.append(cell)
        lines += [f"  {label:{width}}  {cell}" for cell in cells[:1]]
        lines += [f"  {'':{width}}  {cell}" for cell in cells[1:]]
        if experiment.samples:
            lines += [f"  {'':{width}}  wrote {sample}" for sample in part.get("samples", [])]
    return "\n".join(lines)


def _beside(expected: dict[str, float], value: float, label: str) -> str:
    """What is expected of a figure, and whether it is."""
    low, high, of = expected["low"], expected["high"], f"{expected['seeds']} seeds"
    if low is None:
        # It is trained on the machine where it is measured, and rounding makes another one of it.
        other = ", with another machine's model" if label.startswith("unfinished") else ""
        return f" (no bounds: {expected['mean']:.3f} ± {expected['std']:.3f} in {of}{other})"
    slack = 1e-4 + 0.01 * abs(expected["mean"])  # rounding differs between machines
    inside = low - slack <= value <= high + slack
    if low == high:
        return f" (as expected: {low:.3f})" if inside else f" (NOT the expected {low:.3f})"
    return f" ({'expected' if inside else 'NOT within'} {low:.3f} to {high:.3f}, from {of})"


def seeds_of(expected: dict[str, dict]) -> int:
    """How many seeds of an experiment are in its part of reference.json."""
    return min((x["seeds"] for figures in expected.values() for x in figures.values()), default=0)


def add_seeds(name: str, found: dict[str, dict], reference: dict, curves: dict) -> None:
    """Add what run() found to reference.json, and to curves.json up to 5 curves."""
    expected = reference["experiments"].setdefault(name, {})
    for label, part in found.items():
        names, exact = EXPERIMENTS[name].figures, EXPERIMENTS[name].exact
        expected[label] = summary(part["figures"], names, expected.get(label), exact)
        if EXPERIMENTS[name].samples:
            samples = reference.setdefault("samples", {}).setdefault(name, {})
            samples.setdefault(label, part["samples"])
    for label, new in curves_of(name, found).items():
        known = curves.setdefault(name, {}).setdefault(label, [])
        known += new[: max(0, 5 - len(known))]
    write(REFERENCE, reference)
    CURVES.write_text(json.dumps(curves) + "\n")


def write(path: Path, reference: dict) -> None:
    """reference.json, a line per experiment."""
    parts = [
        f'"{part}": {{\n'
        + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in x.items())
        + "\n}"
        for part, x in reference.items()
    ]
    path.write_text("{" + ",\n".join(parts) + "}\n")


def draw(name: str, curves: dict[str, list], figures: dict[str, dict], output: Path) -> None:
    """A picture of an experiment: its curves, {variant: one per seed}, with the range over the
    seeds as a band, and beside them the mean and standard deviation of its first figures.
    """
    from matplotlib.figure import Figure

    ordered = sorted(EXPERIMENTS[name].figures, key=lambda key: key != "accuracy")
    shown = ordered[: 2 if curves else 4]
    panels_of = [shown] if len(figures) == 1 else [[key] for key in shown]
    widths = [1.7] * bool(curves) + [1.0] * len(panels_of)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = list(figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0])
    colours = {label: f"C{index}" for index, label in enumerate(figures)}
    figure.suptitle(textwrap.fill(EXPERIMENTS[name].question, 120), fontsize=9)
    if curves:
        axes = panels.pop(0)
        for label, seeds in curves.items():
            columns = [[v for v in column if v is not None] for column in zip(*seeds)]
            steps = [step for step, column in enumerate(columns) if column]
            columns = [column for column in columns if column]
            colour = colours[label]
            axes.plot(steps, [statistics.mean(c) for c in columns], lw=1.4, color=colour)
            band = [min(c) for c in columns], [max(c) for c in columns]
            axes.fill_between(steps, *band, color=colour, alpha=0.15, lw=0)
        axes.set(xlabel="step", ylabel=EXPERIMENTS[name].curve)
        axes.set_title("mean and range of the seeds", fontsize=8)
    for panel, keys in zip(panels, panels_of):
        rows = [(label, key) for label in figures for key in keys]
        for y, (label, key) in enumerate(rows):
            if x := figures[label].get(key):
                style = {"fmt": "o", "capsize": 3, "color": colours[label]}
                panel.errorbar(x["mean"], -y, xerr=x["std"], **style)
        names = [label if len(keys) == 1 else key for label, key in rows]
        panel.set_yticks([-y for y in range(len(rows))], names, fontsize=8)
        panel.tick_params(labelleft=panel is panels[0])
        panel.set_ylim(0.5 - len(rows), 0.5)
        what = keys[0] if len(keys) == 1 else next(iter(figures))
        panel.set_title(f"{what}, mean ± std", fontsize=8)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(output, dpi=90)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="experiments, lab1 .. lab6, or all"
    )
    parser.add_argument("--seeds", type=int, default=1, help="runs of each variant (1)")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw the curves there")
    parser.add_argument("--update", action="store_true", help="add seeds to reference.json")
    options = parser.parse_args()
    reference = json.loads(REFERENCE.read_text()) if REFERENCE.exists() else {}
    if not options.names and options.pictures:
        curves = json.loads(CURVES.read_text())
        for picture in sorted(options.pictures.glob("*.png")):
            figures = reference["experiments"][picture.stem]
            draw(picture.stem, curves.get(picture.stem, {}), figures, picture)
        return 0
    if not options.names:
        for name, x in sorted(EXPERIMENTS.items(), key=lambda pair: pair[1].lab):
            seconds = reference.get("seconds", {}).get(name, "?")
            print(f"lab {x.lab} {name:16} {seconds:>4} s  {x.question}")
        return 0
    labs = {f"lab{n}": [k for k, x in EXPERIMENTS.items() if x.lab == n] for n in range(1, 7)}
    labs["all"] = list(EXPERIMENTS)
    names = [*dict.fromkeys(x for given in options.names for x in labs.get(given, [given]))]
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown or options.seeds < 1:
        fault = f"there is no experiment {unknown[0]}" if unknown else "--seeds must be 1 or more"
        print(f"error: {fault}; python labs.py lists them", file=sys.stderr)
        return 2
    started = time.perf_counter()
    expected = reference.setdefault("experiments", {})
    curves = json.loads(CURVES.read_text()) if CURVES.exists() else {}
    try:
        if options.update:
            for name in names:
                if missing := range(seeds_of(expected.get(name, {})), options.seeds):
                    [(_, found)] = run([name], missing)
                    add_seeds(name, found, reference, curves)
                    print(table(name, found, {}), flush=True)
        else:
            for name, found in run(names, range(options.seeds)):
                print(table(name, found, expected), flush=True)
                curves |= {name: made} if (made := curves_of(name, found)) else {}
                if options.pictures:
                    options.pictures.mkdir(parents=True, exist_ok=True)
                    names = EXPERIMENTS[name].figures
                    figures = {k: summary(x["figures"], names) for k, x in found.items()}
                    draw(name, curves.get(name, {}), figures, options.pictures / f"{name}.png")
    except NotWritten as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(f"{time.perf_counter() - started:.0f} seconds")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
