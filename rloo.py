"""RLOO: REINFORCE with a leave-one-out baseline, of a language model against a score.

For a prompt the policy pi samples G completions y_1 .. y_G; a completion is a single action. On the
left the name in the code; eps is clip_range.

  kl          kl_t = log pi(y_t) - log pi_ref(y_t), at each token of y_i               k1 in [2]
  rewards     R_i = score of y_i - kl_coef * sum of kl_t over y_i
  advantages  A_i = R_i - mean of the R_j of the other G - 1 completions               [1] eq. 8
  ratio       rho_i = pi(y_i) / pi_old(y_i), of the whole completion
  loss        mean over the completions of max(-A_i rho_i, -A_i clip(rho_i, 1 - eps, 1 + eps))

With one update per rollout, the default, pi is pi_old: rho_i is 1, the clip never acts, and since
the gradient of rho is rho times that of log pi, the line of the loss is plain REINFORCE,

  loss        mean over the completions of -A_i log pi(y_i)                            [1]

[1] Ahmadian et al. 2024, arXiv 2402.14740. [2] Schulman, "Approximating KL divergence", 2020.

  python rloo.py                 # sums: 39% -> 97% right, in 30 seconds on two CPU cores
  python rloo.py --num_mini_batches 4    # four updates per rollout, the clip acts: 99%
  python rloo.py --model gpt2 --prompts my_prompts.jsonl --reward my_rewards.py:my_reward
"""

import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from common import (
    Fault,
    clear_cache,
    completion_logprobs,
    disable_dropout,
    is_flat,
    kl_estimate,
    micro_batches,
    reference,
    set_up_training,
)
from plumbing.config import (
    apply_defaults,
    check_flags,
    check_prompts,
    choose_folder,
    flag,
    parse_flags,
)
from plumbing.loading import (
    eos_token_ids,
    fast_at_bfloat16,
    load_policy,
    load_tokenizer,
    pick_device,
)
from plumbing.metrics import Meter, group_metrics, objective_metrics, rollout_metrics, seconds_since
from plumbing.runs import Run, run_main
from sampling import concatenate, generate
from tasks import encode_prompts, load_task, prompt_batch, score


@dataclass
class Config:
    # None: see TINY and PRETRAINED below.
    model: str = flag("tiny", "embedded, or a local folder, or a name on the model hub", "the job")
    task: Literal["add", "sentiment"] | None = flag(None, "add: sums; sentiment: film reviews")
    digits: int = flag(2, "digits of the numbers of the task add")
    prompts: str | None = flag(None, "JSON lines, CSV, Parquet, a dataset, instead of the task's")
    split: str = flag("train", "of a dataset")
    reward: list[str] = flag([], "FILE.py:FUNCTION or one of tasks.py, several; not the task's")
    reward_weights: list[float] = flag([], "one per reward, the reward model's last; default 1")
    reward_model: str | None = flag(None, "sequence classifier with one label: a folder or a name")
    num_steps: int | None = flag(None, "rollouts, each followed by an update", "rollout")
    prompts_per_step: int | None = flag(None, "prompts sampled per step")
    num_generations: int = flag(4, "completions per prompt, G")
    max_new_tokens: int | None = flag(None, "longest completion")
    temperature: float = flag(1.0, "the policy is softmax(logits / temperature)")
    rollout_batch_size: int | None = flag(None, "most rows decoded or read at once")
    kl_coef: float = flag(
        0.05, "weight of the KL penalty; 0 builds no reference model", "reward and advantage"
    )
    reward_clip_range: list[float] = flag([], "LOW HIGH: bounds of the score, before the KL")
    normalize_advantages: bool = flag(False, "scale advantages to variance 1 over the batch")
    learning_rate: float | None = flag(
        None, "of AdamW; falls linearly to 0; adapters: 10 times", "update"
    )
    num_epochs: int = flag(1, "passes over one rollout")
    num_mini_batches: int = flag(1, "optimiser steps per pass")
    micro_batch_size: int | None = flag(None, "most rows per forward and backward")
    micro_batch_tokens: int | None = flag(None, "most tokens read at once, padding too")
    clip_range: float = flag(0.2, "epsilon of the ratio clip")
    max_grad_norm: float = flag(1.0, "a longer gradient is scaled down to this norm")
    disable_dropout: bool = flag(True, "false shows what dropout does to the ratio")
    lora_r: int = flag(0, "rank of a new LoRA adapter (needs peft); 0 trains all weights")
    merge_adapter: bool = flag(False, "model/ holds base and adapter merged, adapter/ the adapter")
    gradient_checkpointing: bool = flag(False, "less memory, more time")
    bf16: bool | None = flag(None, "bfloat16 autocast; default: where the device is fast at it")
    compile: bool = flag(False, "torch.compile the training forward")
    seed: int = flag(0, "of every random draw", "the run")
    device: str | None = flag(None, "cuda, mps or cpu; default: the first there is")
    output_dir: str | None = flag(None, "default: runs/rloo-<model>-<task>-s<seed>")
    overwrite: bool = flag(False, "replace the run in output_dir")
    resume: bool = flag(False, "go on with the run in output_dir")
    save_every: int = flag(50, "steps between checkpoints; the last step and Ctrl-C save as well")
    save_best: bool = flag(False, "model/ is that of the best evaluation, not the last one")
    sample_every: int = flag(50, "steps between samples from training")
    tensorboard: bool = flag(False, "write for TensorBoard, needs tensorboard")
    wandb: bool = flag(False, "report to Weights & Biases, needs wandb")
    eval_every: int | None = flag(None, "steps between evaluations on held-out prompts")
    num_eval_prompts: int | None = flag(None, "held-out prompts per evaluation")


# What a field left None becomes. The tiny model takes large batches and a large learning rate; that
# of PRETRAINED suits models of about 0.1 B parameters, larger ones want 1e-6 to 1e-5.
TINY = {
    "task": "add",
    "num_steps": 180,
    "prompts_per_step": 64,
    "max_new_tokens": 5,
    "rollout_batch_size": 256,
    "learning_rate": 7e-4,
    "micro_batch_size": 256,
    "bf16": False,
    "eval_every": 30,
    "num_eval_prompts": 512,
}
PRETRAINED = {
    "task": "sentiment",
    "num_steps": 40,
    "prompts_per_step": 8,
    "max_new_tokens": 24,
    "rollout_batch_size": 32,
    "learning_rate": 2e-5,
    "micro_batch_tokens": 1024,
    "eval_every": 20,
    "num_eval_prompts": 24,
}


def rloo_advantages(rewards: Tensor, num_generations: int) -> Tensor:
    """Each reward minus the mean of the others of its group: rewards (B,), groups in consecutive
    rows -> (B,). [1] eq. 8.

    The baseline doesn't depend on the completion that it judges, so the gradient is unbiased;
    equal to G / (G - 1) times the distance from the group's mean. A reward of NaN (the function
    returned None) gets 0 and stays out of the others' mean. Raises ValueError for groups of one.
    """
    if num_generations < 2:
        raise ValueError(f"num_generations is {num_generations}: a group needs 2 or more")
    groups = (rewards * 1.0).view(-1, num_generations)  # (N, G), also from integers
    known = ~groups.isnan()
    others = known.sum(dim=1, keepdim=True) - 1
    baseline = (groups.nansum(dim=1, keepdim=True) - groups) / others.clamp(min=1)
    return (groups - baseline).masked_fill(~known | is_flat(groups), 0).flatten()


def normalize(advantages: Tensor, known: Tensor) -> Tensor:
    """Scale leave-one-out advantages (B,) to variance 1 over those that are known (B,) bool.

    Their mean is 0 already, that of each group is. The standard deviation has Bessel's correction,
    and 1e-4 is added, as in TRL.
    """
    std = advantages[known].std() if known.sum() > 1 else 0.0
    return advantages / (std + 1e-4)


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """pi / pi_old of each completion, the product over its tokens: each (B, T) -> (B,)."""
    log_ratio = (logprobs - old_logprobs).masked_fill(~mask.bool(), 0).sum(1)
    # Summed over a long completion it can overflow exp, and where the clip asks for no gradient the
    # backward pass would make NaN of 0 * inf. No clip range comes near exp(20); what is above it is
    # taken off as a constant, so that a bad completion keeps its gradient.
    excess = (log_ratio - 20).clamp(min=0).detach()
    return (log_ratio - excess).exp()


def rloo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_range: float,
    num_rows: int | None = None,
) -> Tensor:
    """The share of these rows in the loss of the whole minibatch: a scalar, to be minimised.

    logprobs, old_logprobs and mask (B, T), advantages (B,). num_rows counts the whole minibatch
    (default: these rows): with it the shares of micro-batches of any size add up to the exact
    gradient. Not divided by length: the completion is the action, and its log-prob is a sum.
    """
    ratio = sequence_ratio(logprobs, old_logprobs, mask)  # (B,)
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    loss = torch.max(-advantages * ratio, -advantages * clipped)
    return loss.sum() / (len(loss) if num_rows is None else num_rows)


def main(args: list[str] | None = None) -> None:
    config = parse_flags(Config, __doc__, args, TINY, PRETRAINED)
    apply_defaults(config, TINY if config.model == "tiny" else PRETRAINED)
    check_flags(config, smallest_group=2)
    device = pick_device(config.device)
    config.bf16 = fast_at_bfloat16(device) if config.bf16 is None else config.bf16
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=config.bf16)
    folder = choose_folder("rloo", config)
    torch.manual_seed(config.seed)
    shuffler = torch.Generator().manual_seed(config.seed)

    policy = load_policy(config.model, config.lora_r).to(device)
    tokenizer = load_tokenizer(config.model)
    task = load_task(config, tokenizer, device)
    check_prompts(config, policy, tokenizer, task)
    if config.disable_dropout:
        disable_dropout(policy)  # before the reference is copied from the policy
    set_up_training(
        policy,
        bf16=config.bf16,
        checkpointing=config.gradient_checkpointing,
        compiled=config.compile,
    )
    ref = reference(policy, config.kl_coef)

    parameters = [p for p in policy.parameters() if p.requires_grad]  # of an adapter's base none
    optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=0.0, fused=True)
    sampling = {
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "eos_token_ids": eos_token_ids(policy, tokenizer),
        "pad_token_id": tokenizer.pad_token_id or 0,  # the masks, not the id, say what is padding
        "generator": torch.Generator(device).manual_seed(config.seed),
        "bf16": config.bf16,
    }
    G = config.num_generations
    batch_size = config.prompts_per_step * G  # B, completions per step
    # With a single update per rollout the policy that sampled is the one that is updated, and the
    # old log-probs are the new ones; unless the KL needs them earlier, or dropout is left on.
    single_update = config.num_epochs * config.num_mini_batches == 1 and config.disable_dropout
    old_is_new = single_update and config.kl_coef == 0

    whole = (folder, config, policy, tokenizer, task, sampling, optimizer, shuffler)
    with Run("rloo", *whole) as run:
        for step in run.steps():
            metrics = run.evaluate(step) if step % config.eval_every == 0 else {}

            # 1. Roll out: sample G completions of each prompt from the policy as it is now, and
            #    score their text.
            rollout_started = time.perf_counter()
            batch = prompt_batch(task.train, step, config.prompts_per_step, config.seed)
            prompt_ids, prompt_mask = encode_prompts(tokenizer, batch, device)  # (N, P)
            at_once = config.rollout_batch_size // G  # prompts per sub-batch
            rollouts = []
            for ids, real in zip(prompt_ids.split(at_once), prompt_mask.split(at_once)):
                rollouts += [generate(policy, ids, real, num_generations=G, **sampling)]
            rollout = concatenate(rollouts)  # tokens (B, P+T), B = N*G
            mask = rollout.completion_mask  # (B, T), EOS included
            scores, texts = score(task, batch, rollout, tokenizer)
            scores = scores.to(device)  # (B,), NaN where a reward is None

            #    Log-probs by the forward that trains, not by the one that decoded: so the ratio
            #    is 1 before the first update. All are 0 off the mask.
            limits = config.rollout_batch_size, config.micro_batch_tokens
            with torch.no_grad(), autocast:
                if old_is_new:
                    old_logprobs = torch.zeros(mask.shape, dtype=policy.dtype, device=device)
                else:
                    old_logprobs = completion_logprobs(policy, rollout, config.temperature, *limits)
                ref_logprobs = None
                with ref as model:  # not around the lines above: it may switch an adapter off
                    if model is not None:
                        ref_logprobs = completion_logprobs(
                            model, rollout, config.temperature, *limits
                        )
            clear_cache()

            # 2. Rewards: the score, clipped, and less the KL of the completion.
            rewards = scores  # (B,)
            if config.reward_clip_range:
                rewards = rewards.clamp(*config.reward_clip_range)
            kl = None
            if ref_logprobs is not None:
                kl = kl_estimate(old_logprobs, ref_logprobs, "k1")  # (B, T)
                rewards = rewards - config.kl_coef * kl.sum(1)

            # 3. Advantages
            advantages = rloo_advantages(rewards, G)  # (B,)
            if config.normalize_advantages:
                advantages = normalize(advantages, known=~rewards.isnan())
            rollout_seconds = seconds_since(rollout_started, device)

            # 4. Update: each epoch is a new permutation of the rows, cut into minibatches.
            update_started = time.perf_counter()
            learning_rate = config.learning_rate * (1 - step / config.num_steps)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            orders = [
                torch.randperm(batch_size, generator=shuffler) for _ in range(config.num_epochs)
            ]
            mini_batches = torch.cat(orders).to(device).split(batch_size // config.num_mini_batches)
            sizes = config.micro_batch_size, config.micro_batch_tokens
            meter = Meter()
            for index, mini_batch in enumerate(mini_batches):
                # A micro-batch adds its share of the minibatch's loss: the gradient is the same
                # whatever its size.
                mini_batch_loss = 0.0
                for rows in micro_batches(rollout, mini_batch, *sizes):
                    with autocast:
                        logprobs, entropy = completion_logprobs(
                            policy, rollout[rows], config.temperature, with_entropy=True
                        )
                    if old_is_new:
                        old_logprobs[rows] = logprobs.detach()
                    m, old, adv = mask[rows], old_logprobs[rows], advantages[rows]
                    loss = rloo_loss(
                        logprobs,
                        old,
                        adv,
                        m,
                        clip_range=config.clip_range,
                        num_rows=len(mini_batch),
                    )
                    loss.backward()

                    with torch.no_grad():
                        mini_batch_loss += loss
                        ratio = sequence_ratio(logprobs, old, m)  # (rows,)
                        high, low = 1 + config.clip_range, 1 - config.clip_range
                        clipped = ((ratio > high) & (adv > 0)) | ((ratio < low) & (adv < 0))
                        meter.add("policy/approxkl_avg", 0.5 * (logprobs - old) ** 2, m)
                        meter.add("policy/clipfrac_avg", clipped)
                        meter.add("policy/entropy_avg", entropy, m)
                        meter.add("val/ratio", ratio)
                        if index == 0:
                            meter.maximum("val/ratio_max_dev_first", (ratio - 1).abs())
                grad_norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
                if not grad_norm.isfinite():
                    raise Fault(f"the gradient is {grad_norm}: lower --learning_rate")
                meter.add("grad_norm", grad_norm)
                meter.add("loss/policy_avg", mini_batch_loss)
                optimizer.step()
                optimizer.zero_grad()
            clear_cache()

            # 5. Log. The two numbers to watch are the score and the KL.
            metrics |= meter.means()
            metrics |= objective_metrics(scores, kl, old_logprobs, mask, config.kl_coef)
            metrics |= group_metrics(scores, G)
            metrics |= {"lr": learning_rate, "episode": (step + 1) * batch_size}
            update_seconds = seconds_since(update_started, device)
            metrics |= rollout_metrics(rollout, rollout_seconds, update_seconds)
            run.log(step, metrics)
            run.show(step, batch, texts, scores)

        run.log(config.num_steps, run.evaluate(config.num_steps))


if __name__ == "__main__":
    run_main(main)
