"""PPO: proximal policy optimisation of a language model against a score, with a KL penalty.

The policy pi samples a completion with tokens y_t; its score is s. A state is the text so far, an
action is the next token. pi_old and V_old are policy and value model as they were when the rollout
was sampled; pi and V change in the update. On the left are the names of the code; eps is
clip_range, eps_v is clip_range_value.

  kl          kl_t = log pi_old(y_t) - log pi_ref(y_t), without gradient; or k2, k3 of it
  rewards     r_t = -kl_coef kl_t, and s is added at the last token                   [1] eq. 2
  advantages  delta_t = r_t + gamma V_old_{t+1} - V_old_t                             [2] eq. 12
              A_t = delta_t + gamma lam A_{t+1}, whitened over the batch              [2] eq. 11
  returns     R_t = A_t + V_old_t, with A_t before whitening
  ratio       rho_t = pi(y_t) / pi_old(y_t)
  pg          max(-A_t rho_t, -A_t clip(rho_t, 1 - eps, 1 + eps))                     [2] eq. 7
  vf          max((V_t - R_t)^2, (clip(V_t, V_old_t - eps_v, V_old_t + eps_v) - R_t)^2) / 2  [3]
  loss        mean of pg + vf_coef vf - entropy_coef entropy over the tokens          [2] eq. 9

PPO adds a critic to GRPO: before each token the value model V predicts the return. So it needs no
group. One AdamW trains pi and V, which share no trained weight, at one learning rate; their
gradients are clipped together. Left out: InstructGPT's pretraining term (arXiv 2203.02155, eq. 2).
PPO has many parts, and most mistakes in them raise no error, so each formula stands here.

[1] Ziegler et al. 2019, arXiv 1909.08593. [2] Schulman et al. 2017, arXiv 1707.06347.
[3] Huang et al. 2024, arXiv 2403.17031: the implementation details.

one_page/ppo.py has the same update on a page, with this script's extras off. They are those of
rloo.py, a coefficient and a clip of the value loss, a bias in the value head, and an entropy bonus;
but no row is left out, and no score is None. The page's rate falls too. docs/architecture.md lists
all.

  python ppo.py                  # sums 46% -> 97% right, greedy 54% -> 100%, a minute on a CPU
  python ppo.py --model gpt2     # film reviews turn positive: the score rises, and the KL with it
  python ppo.py --model gpt2 --prompts my_prompts.jsonl --reward my_rewards.py:my_reward
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

import tasks
from common import (
    clear_cache,
    disable_dropout,
    gae,
    kl_estimate,
    masked_whiten,
    policy_ratio,
    reference,
    schedule,
)
from forward import (
    ValueModel,
    completion_logprobs,
    completion_values,
    micro_batches,
    rollout_logprobs,
    rollout_values,
)
from plumbing.config import SUMS, SWAPS, RunConfig, flag, parse_flags
from plumbing.data import load_task
from plumbing.decoder import sampling_options
from plumbing.metrics import Meter, evaluate, explained_variance
from plumbing.models import fit_micro_batch, load_policy, load_reference
from plumbing.run import Run, run_main
from sampling import sample


@dataclass
class Config(RunConfig):
    script = "ppo"

    num_steps: int = flag(40, "rollouts, each followed by an update; 0 only evaluates", least=0)
    prompts_per_step: int = flag(16, "prompts sampled per step, N")
    num_generations: int = flag(1, "completions per prompt, G")
    learning_rate: float = flag(2e-5, "AdamW's peak rate; with an adapter the default is tenfold")
    num_epochs: int = flag(2, "passes over one rollout")
    num_mini_batches: int = flag(1, "optimiser steps per pass")
    clip_range: float = flag(0.2, "epsilon: the ratio is clipped to 1 plus or minus this")

    # What only this algorithm has.
    entropy_coef: float = flag(0.0, "weight of a bonus for the mean entropy of a token", least=0)
    kl_coef: float = flag(0.05, "weight of the KL penalty in the reward; 0: none", least=0)
    kl_estimator: Literal["k1", "k2", "k3"] = flag("k1", "estimate of that KL; k2 and k3 pull less")
    missing_eos_penalty: float = flag(0.0, "subtracted from a score without EOS", least=0)
    gamma: float = flag(1.0, "discount", least=0, most=1)
    lam: float = flag(0.95, "lambda of GAE: 1 trusts rewards, 0 the values", least=0, most=1)
    clip_range_value: float = flag(0.2, "how far a value may move from V_old")
    vf_coef: float = flag(0.1, "weight of the value loss; acts through the joint clip", least=0)


# The embedded models' own defaults. They are small and have a single job, so they take large steps.
TINY = SUMS | {
    "num_steps": 60,
    "prompts_per_step": 256,
    "kl_coef": 0.01,
    "learning_rate": 5e-4,
    "num_mini_batches": 4,
    "eval_every": 15,
}
CUPS = TINY | SWAPS | {"num_steps": 20, "eval_every": 2}


def shape_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """r_t = -kl_coef kl_t, plus the score s at the last real token, [1] eq. 2: scores (B,), kl and
    mask (B, T) -> (B, T), 0 off the mask.

    The last real token is EOS, unless the row was cut; a row without tokens gets no score. TRL's
    PPO puts the score one slot later: GAE then discounts it by gamma lam, and mixes in the value of
    a slot that holds no token.
    """
    mask = mask.bool()
    # The last real token is where the count of real tokens reaches its total.
    is_last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))
    return (-kl_coef * kl).masked_fill(~mask, 0) + scores.unsqueeze(1) * is_last


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_range: float
) -> tuple[Tensor, Tensor, Tensor]:
    """max(-A_t rho_t, -A_t clip(rho_t, 1 - eps, 1 + eps)), [2] eq. 7: each (B, T) -> (loss, ratio,
    clipped), each (B, T).

    Once the ratio has left the clip range in the direction that the advantage favours, the gradient
    is 0. If it has left in the other direction, the full gradient brings it back. `clipped` is True
    where the clip decides.
    """
    # The paper maximises a minimum of objectives; this is its negative.
    ratio = policy_ratio(logprobs - old_logprobs)
    unclipped_loss = -advantages * ratio
    clipped_loss = -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
    return torch.max(unclipped_loss, clipped_loss), ratio, clipped_loss > unclipped_loss


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip_range_value: float
) -> tuple[Tensor, Tensor]:
    """max((V_t - R_t)^2, (clip(V_t, V_old_t - eps_v, V_old_t + eps_v) - R_t)^2) / 2, as in [3]:
    each (B, T) -> (loss, clipped), each (B, T).
    """
    # The worse of two predictions counts: a value can't profit from moving far from V_old.
    clipped_values = values.clamp(old_values - clip_range_value, old_values + clip_range_value)
    unclipped_loss, clipped_loss = (values - returns) ** 2, (clipped_values - returns) ** 2
    return 0.5 * torch.max(unclipped_loss, clipped_loss), clipped_loss > unclipped_loss


def main(args: list[str] | None = None) -> None:
    # The flags, and the random numbers: torch's own generator, and one that shuffles the rows.
    config = parse_flags(Config, __doc__, {"tiny": TINY, "tiny/cups": CUPS}, args)
    torch.manual_seed(config.seed)
    shuffler = torch.Generator().manual_seed(config.seed)

    # The policy, in float32 (with --lora_r only an adapter trains); the task: prompts and rewards.
    policy, tokenizer = load_policy(config)
    task = load_task(config, tasks, policy, tokenizer)

    # The value model, and the reference that the KL is measured against. Dropout is off: it
    # would make the policy differ from its own copy, and the KL at step 0 wouldn't be 0.
    value_model = ValueModel.on_backbone_of(policy)
    if config.disable_dropout:
        disable_dropout(policy, value_model)
    ref = reference(policy, config.kl_coef, load_reference(config, task))

    # One optimiser and one learning rate for both models, which share no weight that trains.
    parameters = [*policy.parameters(), *value_model.parameters()]
    parameters = [p for p in parameters if p.requires_grad]
    # beta2 is 0.95: with 0.999, a large gradient after some small ones makes too long a step.
    optimizer = torch.optim.AdamW(
        parameters, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )

    # Draw tokens from softmax(logits / temperature) and nothing else, or the KL would be wrong.
    sampling = sampling_options(config, policy, tokenizer)
    N, G = config.prompts_per_step, config.num_generations
    B = N * G  # completions per step
    with_bonus = config.entropy_coef > 0  # the loss rewards entropy; off by default
    models, generators = {"policy": policy, "value": value_model}, [shuffler, sampling["generator"]]

    # On a GPU: smaller micro-batches where they don't fit. The gradient is the same.
    fit_micro_batch(config, [policy, value_model], task.tokens)
    run = Run(config, task, models, optimizer, generators)
    for step in run.steps(evaluate=lambda: evaluate(config, policy, task, sampling)):
        # 1. Sample G completions of each of N prompts from the policy as it is now.
        prompts = task.batch(step, N)
        rollout = sample(policy, *task.encode(prompts), num_generations=G, **sampling)
        mask = rollout.completion_mask  # (B, T), EOS included

        # 2. Score the text of each completion.
        scores, texts = task.score(prompts, rollout, allow_none=False)  # (B,)
        scores = scores - config.missing_eos_penalty * ~rollout.finished

        # 3. Compute values, and log-probs under the policy that sampled and under the reference:
        #    (B, T), 0 off the mask, without gradient. They come from the forward pass that trains.
        #    Decoding rounds differently, and with its log-probs the ratio wouldn't be 1 before the
        #    first update.
        old_values = rollout_values(value_model, rollout, config)
        old_logprobs = rollout_logprobs(policy, rollout, config)
        ref_logprobs, kl = None, torch.zeros_like(old_logprobs)
        if config.kl_coef > 0:
            with ref() as ref_model:
                ref_logprobs = rollout_logprobs(ref_model, rollout, config)
            kl = kl_estimate(old_logprobs, ref_logprobs, config.kl_estimator)

        # 4. Make rewards: the KL penalty at every token, the score at the last one. Make advantages
        #    by GAE, and whiten them after the returns are made, for V must learn these as they are.
        #    Whitened advantages have mean 0, so the tokens above average become more likely.
        rewards = shape_rewards(scores, kl, mask, config.kl_coef)  # (B, T)
        advantages, returns = gae(rewards, old_values, mask, config.gamma, config.lam)  # (B, T)
        advantages = masked_whiten(advantages, mask)

        # Give the memory of the rollout back: the update needs tensors of other shapes.
        run.end_phase("time/rollout")
        clear_cache()

        # 5. Update both models, one optimiser step a minibatch. An epoch is a new order of rows.
        share = schedule(step, config.num_steps, config.warmup_steps)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * share
        meter = Meter(rollout)
        for _ in range(config.num_epochs):
            order = torch.randperm(B, generator=shuffler)
            for mini_batch in order.split(B // config.num_mini_batches):
                # Cut the minibatch into micro-batches of b rows, whose tensors are (b, T). Each
                # adds its share of the mean over tokens to the gradient: the sum doesn't depend on
                # b. Means are over tokens and not over rows, so long rows weigh more.
                num_tokens = mask[mini_batch].sum()
                for rows, part in micro_batches(
                    rollout, mini_batch, max_tokens=config.micro_batch_tokens
                ):
                    logprobs, entropy = completion_logprobs(
                        policy, part, config.temperature, bf16=config.bf16, entropy_grad=with_bonus
                    )
                    pg, ratio, clipped = policy_loss(
                        logprobs, old_logprobs[rows], advantages[rows], config.clip_range
                    )
                    # [2] eq. 9: the loss is pg + vf_coef vf - entropy_coef entropy. The two models
                    # share no weight that trains, so each part has a backward pass of its own: it
                    # frees the policy's activations before those of the value model are made.
                    m, bonus = mask[rows], config.entropy_coef * entropy
                    (((pg - bonus) * m).sum() / num_tokens).backward()
                    values = completion_values(value_model, part, bf16=config.bf16)
                    vf, vf_clipped = value_loss(
                        values, old_values[rows], returns[rows], config.clip_range_value
                    )
                    ((config.vf_coef * vf * m).sum() / num_tokens).backward()
                    meter.add_policy(rows, logprobs, old_logprobs, ratio, clipped, mask)
                    meter.add("policy/entropy_avg", entropy, m)
                    meter.add("loss/policy_avg", pg, m)
                    meter.add("loss/value_avg", vf, m)
                    meter.add("val/clipfrac_avg", vf_clipped, m)

                # Clip the sum of the gradients, for both models together, and take one step.
                grad_norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
                meter.end_mini_batch(grad_norm)
                optimizer.step()
                optimizer.zero_grad()

        # 6. Log the metrics, show samples, save when it is due. Watch two numbers: score and KL.
        meter.add("val/explained_variance", explained_variance(old_values, returns, mask))
        meter.objective(scores, kl, config.kl_coef)
        run.log(step, meter, episode=(step + 1) * B)
        columns = {"ref_logprobs": ref_logprobs, "kl": kl if config.kl_coef > 0 else None}
        columns |= {"rewards": rewards, "values": old_values}
        columns |= {"advantages": advantages, "returns": returns}
        run.show(step, prompts, texts, scores, rollout, columns | meter.last_pass)
        clear_cache()  # and that of the update


if __name__ == "__main__":
    run_main(main)
