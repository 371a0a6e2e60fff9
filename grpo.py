"""GRPO: group relative policy optimisation of a language model against a score.

For a prompt the policy pi samples a group of G completions. s_i is the score of completion i, and
the y_t are its tokens. On the left are the names of the code; eps is clip_range.

  advantages  A_i = (s_i - mean(s)) / (std(s) + 1e-4), over the group; 1e-4 is TRL's   [1] 4.1.2
  ratio       rho_t = pi(y_t) / pi_old(y_t), of each token
  kl          k3_t = u_t - 1 - log u_t, with u_t = pi_ref(y_t) / pi(y_t)               [1] eq. 4
  loss        max(-A_i rho_t, -A_i clip(rho_t, 1 - eps, 1 + eps)) + kl_coef k3_t       [1] eq. 3
              its mean over the tokens of a completion, then over the completions

There is no value model: a completion is compared with the others of its prompt. GRPO differs from
RLOO in the four lines above. It divides the advantage by the std, weighs each token by a ratio,
puts the KL into the loss, and takes a mean over tokens. The ratio lets several updates use a
rollout. (That mean(s) includes s_i only scales the advantage, by (G - 1) / G.) Most other lines
that `diff rloo.py grpo.py` shows serve variants, which flags switch on: Dr. GRPO [2], DAPO [3],
GSPO [4], CISPO [5] and MaxRL [6]. They share this file so that you see how little each paper
changes. At the first reading skip the lines marked with [2] to [6]. docs/running.md has the
commands.

[1] Shao et al. 2024, arXiv 2402.03300. [2] Liu et al. 2025, arXiv 2503.20783. [3] Yu et al. 2025,
arXiv 2503.14476. [4] Zheng et al. 2025, arXiv 2507.18071. [5] MiniMax 2025, arXiv 2506.13585.
[6] Tajwar et al. 2026, arXiv 2602.02710.

one_page/grpo.py has the same update on a page, with this script's extras off, and makes two per
rollout; here --num_epochs 2 does. To the extras of rloo.py come the variants and an entropy bonus,
but no row is left out. docs/architecture.md lists all.

  python grpo.py                 # sums 46% -> 97% right, greedy 54% -> 99%, a minute on a CPU
  python grpo.py --task cups     # a model finds out that thinking pays: answers of 13 tokens, not 3
  python grpo.py --model gpt2 --prompts my_prompts.jsonl --reward my_rewards.py:my_reward
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

import tasks
from common import (
    at_least_float32,
    clear_cache,
    disable_dropout,
    is_flat,
    kl_estimate,
    masked_mean,
    policy_ratio,
    reference,
    schedule,
)
from forward import completion_logprobs, micro_batches, rollout_logprobs
from plumbing.config import SUMS, SWAPS, RunConfig, flag, parse_flags
from plumbing.data import load_task
from plumbing.decoder import sampling_options
from plumbing.errors import blame
from plumbing.metrics import Meter, evaluate
from plumbing.models import fit_micro_batch, load_policy, load_reference
from plumbing.run import Run, run_main
from sampling import sample


@dataclass
class Config(RunConfig):
    script = "grpo"
    smallest_group = 2

    num_steps: int = flag(40, "rollouts, each followed by an update; 0 only evaluates", least=0)
    prompts_per_step: int = flag(4, "prompts sampled per step, N")
    num_generations: int = flag(8, "completions per prompt, G")
    learning_rate: float = flag(2e-5, "AdamW's peak rate; with an adapter the default is tenfold")
    num_epochs: int = flag(1, "passes over one rollout")
    num_mini_batches: int = flag(1, "optimiser steps per pass")
    clip_range: float = flag(0.2, "epsilon: the ratio is clipped to 1 plus or minus this")

    # What only this algorithm has.
    kl_coef: float = flag(0.04, "weight of the KL penalty in the loss; 0: none", least=0)
    kl_estimator: Literal["k3", "unbiased"] = flag("k3", "of that KL; unbiased: k3 times the ratio")
    loss_type: Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo"] = flag(
        "grpo", "the paper whose loss it is; cispo ignores clip_range"
    )
    scale_rewards: Literal["group", "batch", "none", "mean"] = flag(
        "group", "divide advantages by the std of the group or batch, by the group's mean, or not"
    )
    entropy_coef: float = flag(0.0, "weight of a bonus for the mean entropy of a token", least=0)
    clip_range_high: float | None = flag(None, "epsilon of the upper bound; default: clip_range")
    oversample: int = flag(1, "draw this many times the prompts; keep groups that differ (DAPO)")
    overlong_buffer: int = flag(0, "penalise so many tokens before the length limit", least=0)
    mask_truncated_completions: bool = flag(False, "learn nothing from completions that are cut")


# The embedded models' own defaults. They are small and have a single job, so they take large steps.
TINY = SUMS | {
    "num_steps": 180,
    "prompts_per_step": 32,
    "kl_coef": 0.01,
    "learning_rate": 8e-4,
    "eval_every": 30,
}
CUPS = TINY | SWAPS | {"num_steps": 40, "eval_every": 5}


def group_advantages(rewards: Tensor, num_generations: int, scale_rewards: str = "group") -> Tensor:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-4) over the group, [1] 4.1.2: rewards (B,) -> (B,), in
    which the G of a group are consecutive.

    scale_rewards names the divisor: the std of the "group" or of the "batch", each with Bessel's
    correction and 1e-4 as in TRL, the "mean" of the group, or "none". A reward of NaN (the function
    returned None) gets 0 and stays out of the statistics. The advantage is exactly 0 where all
    rewards of a group are equal, or only one is known. Half precision becomes float32. Raises
    ValueError for groups of one, and for rewards below 0 with "mean".
    """
    if num_generations < 2:
        raise ValueError(f"num_generations is {num_generations}: a group needs 2 or more")
    groups = at_least_float32(rewards).view(-1, num_generations)  # (N, G)
    num_known = (~groups.isnan()).sum(dim=1, keepdim=True)
    mean = groups.nanmean(dim=1, keepdim=True)
    # Equal rewards must give exactly 0. Rounding leaves tiny differences, and a division by a std
    # of about 0 would blow them up.
    centred = (groups - mean).masked_fill(is_flat(groups), 0)
    if scale_rewards == "group":
        variance = (centred**2).nansum(dim=1, keepdim=True) / (num_known - 1)
        centred = centred / (variance.sqrt() + 1e-4)
    elif scale_rewards == "batch":
        given = groups[~groups.isnan()]
        variance = ((given - given.mean()) ** 2).sum() / (len(given) - 1)
        centred = centred / (variance.sqrt() + 1e-4)
    elif scale_rewards == "mean":  # [6]: a group that seldom succeeds counts more
        if (groups < 0).any():  # a negative mean would turn good into bad
            raise ValueError("the group's mean divides only rewards of 0 or more")
        centred = centred / mean  # 0 / 0 in a group that never succeeds: it gets 0 below
    elif scale_rewards != "none":  # [2] leaves the std out
        choices = "group, batch, none or mean"
        raise ValueError(f"unknown scale_rewards {scale_rewards!r}: choose {choices}")
    # It is NaN where a reward is missing, and where only one is known: its variance is 0 / 0.
    return centred.nan_to_num(0).flatten()


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_range: float,
    clip_range_high: float | None = None,
    cispo_bound: float = 5.0,
    loss_type: str = "grpo",
    max_new_tokens: int | None = None,
    ref_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    num_rows: int | None = None,
    num_tokens: int | Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """max(-A_i rho_t, -A_i clip(rho_t, 1 - eps, 1 + eps)) + kl_coef k3_t, [1] eq. 3, or the loss of
    another paper: the share of these rows in its mean over the minibatch.

    logprobs, old_logprobs and mask (B, T), advantages (B,). num_rows counts the rows of the whole
    minibatch (default: these rows): with it the shares of micro-batches of any size add up to the
    exact gradient; num_tokens likewise. A row may have no tokens, and so may the whole minibatch:
    its loss is 0. A kl_coef other than 0 needs ref_logprobs. Returns (scalar, ratio (B, T), clipped
    (B, T)), which is True where the clip decides, in "cispo" where the ratio exceeds its bound.
    Raises ValueError for another loss_type, and for "dr_grpo" without max_new_tokens.
    """
    # Make the loss of each token. A score judges the whole completion and nobody knows which token
    # earned it, so each of its tokens gets the completion's advantage.
    mask, A = mask.bool(), advantages.unsqueeze(1)
    logprobs = logprobs.masked_fill(~mask, 0)
    log_ratio = (logprobs - old_logprobs).masked_fill(~mask, 0)
    ratio = token_ratio = policy_ratio(log_ratio)  # (B, T)
    if loss_type == "gspo":  # [4] eq. 7: a completion has one, the geometric mean over its tokens
        mean = masked_mean(log_ratio, mask, dim=1).unsqueeze(1)
        ratio = policy_ratio(mean.masked_fill(~mask, 0))  # (B, 1) -> (B, T)
    high = clip_range if clip_range_high is None else clip_range_high  # [3] eq. 10
    unclipped_loss = -A * ratio  # [1] eq. 3
    clipped_loss = -A * ratio.clamp(1 - clip_range, 1 + high)
    loss, clipped = torch.max(unclipped_loss, clipped_loss), clipped_loss > unclipped_loss
    if loss_type == "cispo":  # [5] eq. 4 and 5, bounded above only: no token loses its gradient
        loss = -A * ratio.clamp(max=cispo_bound).detach() * logprobs
        clipped = (ratio > cispo_bound) & (A != 0)
    if kl_coef != 0:
        kl = kl_estimate(logprobs, ref_logprobs, "k3")  # [1] eq. 4
        # arXiv 2512.02556. The ratio matters even where it is 1, because it has a gradient.
        if kl_estimator == "unbiased":
            kl = kl * token_ratio
        loss = loss + kl_coef * kl
    loss = loss.masked_fill(~mask, 0)  # (B, T)

    # Take the mean over the minibatch. [3] and [5] divide by the tokens of a group. Here, as in
    # TRL, all tokens of the minibatch are counted.
    num_rows = len(loss) if num_rows is None else num_rows
    num_tokens = mask.sum() if num_tokens is None else torch.as_tensor(num_tokens)
    # Each completion counts the same: [1] eq. 3, [4] eq. 5.
    if loss_type in ("grpo", "gspo"):
        return masked_mean(loss, mask, dim=1).sum() / num_rows, ratio, clipped
    # Each token counts the same: [3] eq. 12, [5] eq. 4.
    if loss_type in ("dapo", "cispo"):
        return loss.sum() / num_tokens.clamp(min=1), ratio, clipped
    if loss_type != "dr_grpo":
        choices = "grpo, dapo, dr_grpo, gspo or cispo"
        raise ValueError(f"unknown loss_type {loss_type!r}: choose {choices}")
    if max_new_tokens is None:
        raise ValueError('loss_type "dr_grpo" needs max_new_tokens')
    # Divide by a constant: [2] section 3.2.
    return loss.sum() / (num_rows * max_new_tokens), ratio, clipped


def overlong_penalty(mask: Tensor, buffer: int) -> Tensor:
    """Punish length softly, [3] eq. 13: completion mask (B, T) -> (B,).

    T is max_new_tokens. It is 0 up to T - buffer tokens, then falls to -1 at T; 0 without a buffer.
    """
    return -((mask.sum(1) - (mask.shape[1] - buffer)) / max(1, buffer)).clamp(min=0)


def main(args: list[str] | None = None) -> None:
    # The flags, and the random numbers: torch's own generator, and one that shuffles the rows.
    config = parse_flags(Config, __doc__, {"tiny": TINY, "tiny/cups": CUPS}, args)
    torch.manual_seed(config.seed)
    shuffler = torch.Generator().manual_seed(config.seed)

    # The policy, in float32 (with --lora_r only an adapter trains); the task: prompts and rewards.
    policy, tokenizer = load_policy(config)
    task = load_task(config, tasks, policy, tokenizer)

    # The reference that the KL is measured against. Dropout is off: it would make the policy
    # differ from its own copy, and the KL at step 0 wouldn't be 0.
    if config.disable_dropout:
        disable_dropout(policy)
    ref = reference(policy, config.kl_coef, load_reference(config, task))

    # The optimiser. Under an adapter the base model has nothing to train.
    parameters = [p for p in policy.parameters() if p.requires_grad]
    # beta2 is 0.95: with 0.999, a large gradient after some small ones makes too long a step.
    optimizer = torch.optim.AdamW(
        parameters, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )

    # Draw tokens from softmax(logits / temperature) and nothing else, or the KL would be wrong.
    sampling = sampling_options(config, policy, tokenizer)
    N, G = config.prompts_per_step, config.num_generations
    B = N * G  # completions per step
    with_bonus = config.entropy_coef > 0  # the loss rewards entropy; off by default
    # With a single update per rollout the policy of the update is the one that sampled, so the
    # update's log-probs are the old ones, and the ratio is 1. With dropout two passes differ.
    single_update = config.num_epochs * config.num_mini_batches == 1 and config.disable_dropout

    # On a GPU: smaller micro-batches where they don't fit. The gradient is the same.
    fit_micro_batch(config, [policy], task.tokens)
    run = Run(config, task, {"policy": policy}, optimizer, [shuffler, sampling["generator"]])
    for step in run.steps(evaluate=lambda: evaluate(config, policy, task, sampling)):
        # 1. Sample G completions of each of N prompts from the policy as it is now.
        prompts = task.batch(step, N * config.oversample)
        rollout = sample(policy, *task.encode(prompts), num_generations=G, **sampling)
        num_drawn = rollout.completion_mask.sum()  # tokens; some groups may be left out below

        # 2. Score the text of each completion. A score of None is NaN here.
        scores, texts = task.score(prompts, rollout)  # (B,)
        if config.oversample > 1:  # [3] eq. 11: of all groups keep N, first those that teach
            flat = is_flat(scores.view(-1, G)).flatten()
            kept = flat.long().argsort(stable=True)[:N].cpu()
            rows = (kept.unsqueeze(1) * G + torch.arange(G)).flatten()  # (B,)
            rollout, scores = rollout[rows], scores[rows]
            prompts, texts = [prompts[i] for i in kept], [texts[i] for i in rows]
        mask = rollout.completion_mask  # (B, T), EOS included
        scores = scores + overlong_penalty(mask, config.overlong_buffer)  # [3] eq. 13

        # 3. Compute log-probs under the policy that sampled and under the reference: (B, T), 0 off
        #    the mask, without gradient. They come from the forward pass that trains. Decoding
        #    rounds differently: with its log-probs the ratio wouldn't be 1 before the first update.
        if single_update:
            old_logprobs = torch.full_like(rollout.logprobs, torch.nan)  # the update fills it
        else:
            old_logprobs = rollout_logprobs(policy, rollout, config)
        ref_logprobs = None
        if config.kl_coef > 0:
            with ref() as ref_model:
                ref_logprobs = rollout_logprobs(ref_model, rollout, config)

        # 4. Compare each score with those of the same prompt's completions: the advantage.
        with blame(f"--scale_rewards {config.scale_rewards}"):
            advantages = group_advantages(scores, G, config.scale_rewards)  # (B,)
        if config.mask_truncated_completions:  # [3]: out of the loss, not of the group's mean
            mask = mask & rollout.finished.unsqueeze(1)

        # Give the memory of the rollout back: the update needs tensors of other shapes.
        run.end_phase("time/rollout")
        clear_cache()

        # 5. Update the policy, one optimiser step a minibatch. An epoch is a new order of all rows.
        share = schedule(step, config.num_steps, config.warmup_steps)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * share
        meter = Meter(rollout)
        meter.num_tokens = int(num_drawn)  # for the speed
        for _ in range(config.num_epochs):
            order = torch.randperm(B, generator=shuffler)
            for mini_batch in order.split(B // config.num_mini_batches):
                num_tokens = mask[mini_batch].sum().clamp(min=1)  # all rows may be masked
                # Cut the minibatch into micro-batches of b rows, whose tensors are (b, T). Each
                # adds its share of the loss to the gradient, so the sum doesn't depend on b.
                # (rloo.py leaves rows of advantage 0 out. Here the KL still pulls at them.)
                for rows, part in micro_batches(
                    rollout, mini_batch, max_tokens=config.micro_batch_tokens
                ):
                    logprobs, entropy = completion_logprobs(
                        policy, part, config.temperature, bf16=config.bf16, entropy_grad=with_bonus
                    )
                    if single_update:
                        old_logprobs[rows] = logprobs.detach()
                    loss, ratio, clipped = grpo_loss(
                        logprobs,
                        old_logprobs[rows],
                        advantages[rows],
                        mask[rows],
                        clip_range=config.clip_range,
                        clip_range_high=config.clip_range_high,
                        loss_type=config.loss_type,
                        max_new_tokens=config.max_new_tokens,
                        ref_logprobs=None if ref_logprobs is None else ref_logprobs[rows],
                        kl_coef=config.kl_coef,
                        kl_estimator=config.kl_estimator,
                        num_rows=len(mini_batch),
                        num_tokens=num_tokens,
                    )
                    bonus = config.entropy_coef * (entropy * mask[rows]).sum() / num_tokens
                    (loss - bonus).backward()
                    meter.add_share("loss/policy_avg", loss)
                    meter.add_policy(rows, logprobs, old_logprobs, ratio, clipped, mask)
                    meter.add("policy/entropy_avg", entropy, mask[rows])

                # Take one step: the gradient of the whole minibatch has been added up.
                grad_norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
                meter.end_mini_batch(grad_norm)
                optimizer.step()
                optimizer.zero_grad()

        # 6. Log the metrics, show samples, save when it is due. Watch two numbers: score and KL.
        kl = None
        if config.kl_coef > 0:  # the metric is k1, as in RLOO, whatever the loss takes
            kl = kl_estimate(old_logprobs, ref_logprobs, "k1")
        meter.objective(scores, kl, config.kl_coef)
        meter.groups(scores, G)
        run.log(step, meter, episode=(step + 1) * B * config.oversample)
        columns = {"ref_logprobs": ref_logprobs, "kl": kl, "advantages": advantages}
        run.show(step, prompts, texts, scores, rollout, columns | meter.last_pass)
        clear_cache()  # and that of the update


if __name__ == "__main__":
    run_main(main)
