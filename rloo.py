"""RLOO: REINFORCE of a language model against a score, with a leave-one-out baseline.

For a prompt the policy pi samples a group of G completions. s_i is the score of completion i, and
the y_t are its tokens. On the left are the names of the code.

  kl          kl_t = log pi(y_t) - log pi_ref(y_t), without gradient                   k1 in [2]
  rewards     r_i = s_i - kl_coef * sum of kl_t over the tokens of completion i
  advantages  A_i = r_i - mean of r_j over the other G - 1 completions of the group    [1] 2.3
  loss        -A_i times the sum of log pi(y_t) over the tokens of completion i;
              its mean over the completions                                            [1] 2.2

There is no value model: a completion is compared with the others of its prompt. Of the scripts read
this one first. It makes one update per rollout, so it has no ratio. grpo.py adds a ratio to it,
for several updates, and ppo.py adds a critic, the value model.

[1] Ahmadian et al. 2024, arXiv 2402.14740. [2] Schulman, "Approximating KL divergence", 2020.

one_page/rloo.py has the same update on a page, with this script's extras off: a rate that rises and
falls, a limit on the gradient's norm, a temperature, scores of None, and noise on the weights
before a run in half precision. The script also takes prompts of several lengths, runs on a GPU and
in micro-batches, leaves rows of advantage 0 out, and keeps records and checkpoints: these leave the
update as it is. docs/architecture.md lists all.

  python rloo.py                 # sums 46% -> 97% right, greedy 54% -> 99%, a minute on a CPU
  python rloo.py --model gpt2 --prompts my_prompts.jsonl --reward my_rewards.py:my_reward
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import tasks
from common import (
    clear_cache,
    disable_dropout,
    is_flat,
    kl_estimate,
    reference,
    schedule,
)
from forward import completion_logprobs, logprobs_and_entropy, micro_batches, rollout_logprobs
from plumbing.config import SUMS, SWAPS, RunConfig, flag, parse_flags
from plumbing.data import load_task
from plumbing.decoder import sampling_options
from plumbing.metrics import Meter, evaluate
from plumbing.models import fit_micro_batch, load_policy, load_reference
from plumbing.run import Run, run_main
from sampling import sample


@dataclass
class Config(RunConfig):
    script = "rloo"
    smallest_group = 2

    num_steps: int = flag(40, "rollouts, each followed by an update; 0 only evaluates", least=0)
    prompts_per_step: int = flag(8, "prompts sampled per step, N")
    num_generations: int = flag(4, "completions per prompt, G")
    learning_rate: float = flag(2e-5, "AdamW's peak rate; with an adapter the default is tenfold")
    kl_coef: float = flag(0.05, "weight of the KL penalty in the reward; 0: none", least=0)


# The embedded models' own defaults. They are small and have a single job, so they take large steps.
TINY = SUMS | {
    "num_steps": 180,
    "prompts_per_step": 64,
    "kl_coef": 0.02,
    "learning_rate": 8e-4,
    "eval_every": 30,
}
CUPS = TINY | SWAPS | {"num_steps": 30, "eval_every": 5}


def rloo_advantages(rewards: Tensor, num_generations: int) -> Tensor:
    """A_i = r_i - mean of the other rewards of its group, [1] 2.3: rewards (B,) -> (B,), in which
    the G of a group are consecutive.

    A reward of NaN (the function returned None) gets 0 and stays out of the baseline. The advantage
    is exactly 0 where all rewards of a group are equal, or only one is known. Raises ValueError for
    groups of one.
    """
    if num_generations < 2:
        raise ValueError(f"num_generations is {num_generations}: a group needs 2 or more")
    groups = rewards.view(-1, num_generations)  # (N, G)
    num_others = (~groups.isnan()).sum(1, keepdim=True) - 1
    # The baseline doesn't depend on the completion that it judges, so the gradient has no bias.
    baseline = (groups.nansum(1, keepdim=True) - groups) / num_others
    advantages = groups - baseline
    # Equal rewards must give exactly 0, without the tiny differences that rounding leaves.
    return advantages.masked_fill(is_flat(groups), 0).nan_to_num(0).flatten()


def rloo_loss(
    logprobs: Tensor, advantages: Tensor, mask: Tensor, num_rows: int | None = None
) -> Tensor:
    """-A_i log pi(y), summed over these rows and divided by num_rows: logprobs and mask (B, T),
    advantages (B,) -> scalar.

    num_rows counts the rows of the whole update (default: these rows): with it the shares of
    micro-batches of any size add up to the exact gradient. A row may have no tokens.
    """
    # The completion is one action: its log-prob is a sum, and is not divided by its length.
    logprob = logprobs.masked_fill(~mask.bool(), 0).sum(1)  # (B,)
    num_rows = len(logprob) if num_rows is None else num_rows
    return -(advantages * logprob).sum() / num_rows


def main(args: list[str] | None = None) -> None:
    # The flags, and the seed of torch's own random numbers; the sampler gets a generator below.
    config = parse_flags(Config, __doc__, {"tiny": TINY, "tiny/cups": CUPS}, args)
    torch.manual_seed(config.seed)

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

    # On a GPU: smaller micro-batches where they don't fit. The gradient is the same.
    fit_micro_batch(config, [policy], task.tokens)
    run = Run(config, task, {"policy": policy}, optimizer, [sampling["generator"]])
    for step in run.steps(evaluate=lambda: evaluate(config, policy, task, sampling)):
        # 1. Sample G completions of each of N prompts from the policy as it is now.
        prompts = task.batch(step, N)
        rollout = sample(policy, *task.encode(prompts), num_generations=G, **sampling)

        # 2. Score the text of each completion. A score of None is NaN here.
        scores, texts = task.score(prompts, rollout)  # (B,)
        mask = rollout.completion_mask  # (B, T), EOS included

        # 3. Compute log-probs under the policy that sampled and under the reference: (B, T), 0 off
        #    the mask, without gradient. They come from the forward pass that trains. Decoding
        #    rounds differently: with its log-probs the KL wouldn't be 0 before the first update.
        #    (The page takes KL and loss from one pass. Here the update comes in micro-batches, and
        #    before the first of them all rewards must be known.)
        old_logprobs, entropy = logprobs_and_entropy(policy, rollout, config)
        ref_logprobs, kl = None, torch.zeros_like(old_logprobs)
        if config.kl_coef > 0:
            with ref() as ref_model:
                ref_logprobs = rollout_logprobs(ref_model, rollout, config)
            kl = kl_estimate(old_logprobs, ref_logprobs, "k1")

        # 4. Subtract the KL penalty of the whole completion from its score: this is the reward.
        #    Compare it with the rewards of the same prompt's other completions: the advantage.
        rewards = scores - config.kl_coef * kl.sum(1)  # (B,)
        advantages = rloo_advantages(rewards, G)  # (B,)

        # Give the memory of the rollout back: the update needs tensors of other shapes.
        run.end_phase("time/rollout")
        clear_cache()

        # 5. Update the policy, by one optimiser step.
        share = schedule(step, config.num_steps, config.warmup_steps)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * share
        meter = Meter(rollout)
        # Rows whose advantage is 0 have no gradient. Leave them out: with them a step of the first
        # command above takes 1.4 times as long. One stays, for the optimiser.
        kept = (advantages != 0).nonzero().flatten().cpu()
        kept = kept if len(kept) > 0 else torch.tensor([0])
        # Cut them into micro-batches of b rows, whose tensors are (b, T). Each adds its share of
        # the loss to the gradient, so the sum doesn't depend on b.
        for rows, part in micro_batches(rollout, kept, max_tokens=config.micro_batch_tokens):
            logprobs, _ = completion_logprobs(
                policy, part, config.temperature, bf16=config.bf16, entropy=False
            )
            loss = rloo_loss(logprobs, advantages[rows], mask[rows], num_rows=B)
            loss.backward()
            meter.add_share("loss/policy_avg", loss)
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
        meter.end_mini_batch(grad_norm)
        optimizer.step()
        optimizer.zero_grad()

        # 6. Log the metrics, show samples, save when it is due. Watch two numbers: score and KL.
        meter.objective(scores, kl, config.kl_coef)
        meter.groups(scores, G)
        meter.add("policy/entropy_avg", entropy, mask)
        meter.add("val/sampler_kl", kl_estimate(rollout.logprobs, old_logprobs, "k3"), mask)
        run.log(step, meter, episode=(step + 1) * B)
        columns = {"old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs}
        columns |= {"kl": kl if config.kl_coef > 0 else None, "advantages": advantages}
        run.show(step, prompts, texts, scores, rollout, columns)
        clear_cache()  # and that of the update


if __name__ == "__main__":
    run_main(main)
