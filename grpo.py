"""GRPO: group relative policy optimisation of a language model against a score.

For a prompt the policy pi samples a group of G completions y_1 .. y_G. On the left the name in the
code; eps is clip_range.

  scores      R_i, the score of y_i
  advantages  A_i = (R_i - mean(R)) / (std(R) + 1e-4), mean and std over the group     [1] 4.1.2
  ratio       rho_t = pi(y_t) / pi_old(y_t), of each token
  kl          k3_t = r_t - 1 - log r_t, with r_t = pi_ref(y_t) / pi(y_t)               [1] eq. 4
  loss        L_t = max(-A_i rho_t, -A_i clip(rho_t, 1 - eps, 1 + eps)) + kl_coef k3_t [1] eq. 3
              its mean over the tokens of a completion, and of that over the completions

No value model: the group is the baseline. What later papers change, a flag each:
Dr. GRPO [2] doesn't divide by the std, which favours prompts that are too easy or too hard, nor by
the length, which favours long failures, but by max_new_tokens; DAPO [3] counts each token of the
minibatch the same, and lets good tokens rise further before it clips; GSPO [4] clips the ratio of
the completion, exp(mean over its tokens of log rho_t); CISPO [5] bounds the weight of a token
instead of dropping its gradient.

[1] Shao et al. 2024, arXiv 2402.03300. [2] Liu et al. 2025, arXiv 2503.20783.
[3] Yu et al. 2025, arXiv 2503.14476. [4] Zheng et al. 2025, arXiv 2507.18071.
[5] MiniMax 2025, arXiv 2506.13585.

  python grpo.py                 # sums: 39% -> 97% right, in 25 seconds on two CPU cores
  python grpo.py --loss_type dr_grpo --scale_rewards none --kl_coef 0               # Dr. GRPO: 97%
  python grpo.py --loss_type dapo --clip_range_high 0.28 --kl_coef 0 --num_mini_batches 4
                                 # DAPO, without its dynamic sampling and length penalty: 98%
  python grpo.py --importance_sampling_level sequence --clip_range 3e-4 --clip_range_high 4e-4 \\
      --kl_coef 0 --num_mini_batches 4                                              # GSPO: 96%
  python grpo.py --model gpt2 --prompts my_prompts.jsonl --reward my_rewards.py:my_reward
"""

import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from common import (
    Fault,
    InputError,
    clear_cache,
    completion_logprobs,
    disable_dropout,
    is_flat,
    kl_estimate,
    masked_mean,
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
    num_generations: int = flag(8, "completions per prompt, G")
    max_new_tokens: int | None = flag(None, "longest completion")
    temperature: float = flag(1.0, "the policy is softmax(logits / temperature)")
    rollout_batch_size: int | None = flag(None, "most rows decoded or read at once")
    kl_coef: float = flag(
        0.04, "weight of the KL penalty; 0 builds no reference model", "reward and advantage"
    )
    scale_rewards: Literal["group", "batch", "none"] = flag(
        "group", "what advantages are divided by: the std of the group, of the batch, or 1"
    )
    learning_rate: float | None = flag(
        None, "of AdamW; falls linearly to 0; adapters: 10 times", "update"
    )
    num_epochs: int = flag(1, "passes over one rollout")
    num_mini_batches: int = flag(1, "optimiser steps per pass")
    micro_batch_size: int | None = flag(None, "most rows per forward and backward")
    micro_batch_tokens: int | None = flag(None, "most tokens read at once, padding too")
    loss_type: Literal["grpo", "dapo", "dr_grpo", "cispo"] = flag(
        "grpo",
        "what counts the same: rows (grpo), tokens (dapo, cispo); or / max_new_tokens (dr_grpo)",
    )
    importance_sampling_level: Literal["token", "sequence"] = flag("token", "sequence: GSPO")
    clip_range: float = flag(0.2, "epsilon of the ratio clip, downwards")
    clip_range_high: float | None = flag(None, "upwards; default: clip_range; cispo: bound, 5")
    mask_truncated_completions: bool = flag(False, "no gradient from completions without EOS")
    max_grad_norm: float = flag(1.0, "a longer gradient is scaled down to this norm")
    disable_dropout: bool = flag(True, "false shows what dropout does to the ratio")
    lora_r: int = flag(0, "rank of a new LoRA adapter (needs peft); 0 trains all weights")
    merge_adapter: bool = flag(False, "model/ holds base and adapter merged, adapter/ the adapter")
    gradient_checkpointing: bool = flag(False, "less memory, more time")
    bf16: bool | None = flag(None, "bfloat16 autocast; default: where the device is fast at it")
    compile: bool = flag(False, "torch.compile the training forward")
    seed: int = flag(0, "of every random draw", "the run")
    device: str | None = flag(None, "cuda, mps or cpu; default: the first there is")
    output_dir: str | None = flag(None, "default: runs/grpo-<model>-<task>-s<seed>")
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
    "prompts_per_step": 32,
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
    "prompts_per_step": 4,
    "max_new_tokens": 24,
    "rollout_batch_size": 32,
    "learning_rate": 2e-5,
    "micro_batch_tokens": 1024,
    "eval_every": 20,
    "num_eval_prompts": 24,
}


def group_advantages(rewards: Tensor, num_generations: int, scale_rewards: str = "group") -> Tensor:
    """Advantages relative to the group: rewards (B,), groups in consecutive rows -> (B,).

    [1] 4.1.2 divides by the standard deviation of the group ("group"), [2] by nothing ("none"),
    "batch" by that of all rewards. It has Bessel's correction, and 1e-4 is added. A reward of NaN
    (the function returned None) gets 0 and stays out of the statistics; the KL still holds its row.
    Raises ValueError for groups of one, which have nothing to be compared with, and for another
    name.
    """
    if num_generations < 2:
        raise ValueError(f"num_generations is {num_generations}: a group needs 2 or more")
    groups = (rewards * 1.0).view(-1, num_generations)  # (N, G), also from integers
    centred = groups - groups.nanmean(dim=1, keepdim=True)
    if scale_rewards == "group":
        centred = centred / (_nanstd(groups, dim=1) + 1e-4)
    elif scale_rewards == "batch":
        centred = centred / (_nanstd(groups, dim=(0, 1)) + 1e-4)
    elif scale_rewards != "none":
        raise ValueError(f"unknown scale_rewards {scale_rewards!r}: choose group, batch or none")
    return centred.masked_fill(groups.isnan() | is_flat(groups), 0).flatten()


def _nanstd(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Standard deviation without NaN, with Bessel's correction, dimensions kept; 0 of one value."""
    count = (~x.isnan()).sum(dim, keepdim=True)
    squares = (x - x.nanmean(dim, keepdim=True)) ** 2
    return (squares.nansum(dim, keepdim=True) / (count - 1).clamp(min=1)).sqrt()


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, level: str) -> Tensor:
    """pi / pi_old of each token, or, at level "sequence", the geometric mean of that over the
    tokens of each completion ([4] eq. 7), at each of them: each (B, T) -> (B, T), 1 off the mask.
    """
    log_ratio = (logprobs - old_logprobs).masked_fill(~mask.bool(), 0)
    if level == "sequence":
        mean = masked_mean(log_ratio, mask, dim=1).unsqueeze(1)
        log_ratio = mean.expand_as(log_ratio).masked_fill(~mask.bool(), 0)
    elif level != "token":
        raise ValueError(f"unknown importance_sampling_level {level!r}: choose token or sequence")
    return log_ratio.exp()


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_range: float,
    clip_range_high: float | None = None,
    loss_type: str = "grpo",
    importance_sampling_level: str = "token",
    max_new_tokens: int | None = None,
    ref_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    num_rows: int | None = None,
    num_tokens: int | Tensor | None = None,
) -> Tensor:
    """The share of these rows in the loss of the whole minibatch: a scalar, to be minimised.

    logprobs, old_logprobs, ref_logprobs and mask (B, T), advantages (B,). num_rows and num_tokens
    count the whole minibatch (default: these rows): with them the shares of micro-batches of any
    size add up to the exact gradient. clip_range_high is the clip's upper side, clip_range if None;
    for loss_type cispo it bounds the ratio itself, 1 + eps_high of [5]: give it, 5 say. dr_grpo
    needs max_new_tokens. Raises ValueError without them, and for another name.
    """
    mask = mask.bool()
    logprobs = logprobs.masked_fill(~mask, 0)
    ratio = importance_ratio(logprobs, old_logprobs, mask, importance_sampling_level)  # (B, T)
    high = clip_range if clip_range_high is None else clip_range_high
    A = advantages.unsqueeze(1)  # (B, 1): every token of a completion has the same advantage
    if loss_type == "cispo":  # [5] eq. 4: a bounded weight, so no token loses its gradient
        loss = -A * ratio.clamp(max=high).detach() * logprobs
    else:  # [1] eq. 3; the upper side on its own: [3] eq. 10
        loss = torch.max(-A * ratio, -A * ratio.clamp(1 - clip_range, 1 + high))
    if ref_logprobs is not None and kl_coef != 0:
        loss = loss + kl_coef * kl_estimate(logprobs, ref_logprobs.masked_fill(~mask, 0), "k3")
    loss = loss.masked_fill(~mask, 0)  # (B, T)

    num_rows = len(loss) if num_rows is None else num_rows
    num_tokens = mask.sum() if num_tokens is None else torch.as_tensor(num_tokens)
    if loss_type == "grpo":  # each completion counts the same: [1] eq. 3
        return masked_mean(loss, mask, dim=1).sum() / num_rows
    if loss_type in ("dapo", "cispo"):  # each token counts the same: [3] eq. 12
        return loss.sum() / num_tokens.clamp(min=1)
    if loss_type == "dr_grpo":  # and is divided by a constant: [2] section 3.2
        if max_new_tokens is None:
            raise ValueError("loss_type dr_grpo needs max_new_tokens")
        return loss.sum() / (num_rows * max_new_tokens)
    raise ValueError(f"unknown loss_type {loss_type!r}: choose grpo, dapo, dr_grpo or cispo")


def main(args: list[str] | None = None) -> None:
    config = parse_flags(Config, __doc__, args, TINY, PRETRAINED)
    apply_defaults(config, TINY if config.model == "tiny" else PRETRAINED)
    if config.clip_range_high is None:
        config.clip_range_high = 5.0 if config.loss_type == "cispo" else config.clip_range
    check_flags(config, smallest_group=2)
    if config.loss_type == "cispo" and config.clip_range_high < 1:
        raise InputError(
            f"--clip_range_high {config.clip_range_high}: for loss_type cispo it bounds the ratio"
            " itself, choose 1 or more (5 is the default)"
        )
    device = pick_device(config.device)
    config.bf16 = fast_at_bfloat16(device) if config.bf16 is None else config.bf16
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=config.bf16)
    folder = choose_folder("grpo", config)
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
    # old log-probs are the new ones; unless dropout is left on.
    old_is_new = config.num_epochs * config.num_mini_batches == 1 and config.disable_dropout

    whole = (folder, config, policy, tokenizer, task, sampling, optimizer, shuffler)
    with Run("grpo", *whole) as run:
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

            # 2. Rewards: the scores alone, the KL penalty is in the loss.

            # 3. Advantages
            advantages = group_advantages(scores, G, config.scale_rewards)  # (B,)
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
            loss_mask = mask  # (B, T)
            if config.mask_truncated_completions:
                # From the loss alone: in the baseline they count, and so they do in num_rows.
                loss_mask = mask & rollout.finished.unsqueeze(1)
            sizes = config.micro_batch_size, config.micro_batch_tokens
            meter = Meter()
            for index, mini_batch in enumerate(mini_batches):
                # A micro-batch adds its share of the minibatch's loss: the gradient is the same
                # whatever its size.
                num_tokens = loss_mask[mini_batch].sum()
                mini_batch_loss = 0.0
                for rows in micro_batches(rollout, mini_batch, *sizes):
                    with autocast:
                        logprobs, entropy = completion_logprobs(
                            policy, rollout[rows], config.temperature, with_entropy=True
                        )
                    if old_is_new:
                        old_logprobs[rows] = logprobs.detach()
                    m, old, adv = loss_mask[rows], old_logprobs[rows], advantages[rows]
                    loss = grpo_loss(
                        logprobs,
                        old,
                        adv,
                        m,
                        clip_range=config.clip_range,
                        clip_range_high=config.clip_range_high,
                        loss_type=config.loss_type,
                        importance_sampling_level=config.importance_sampling_level,
                        max_new_tokens=config.max_new_tokens,
                        ref_logprobs=None if ref_logprobs is None else ref_logprobs[rows],
                        kl_coef=config.kl_coef,
                        num_rows=len(mini_batch),
                        num_tokens=num_tokens,
                    )
                    loss.backward()

                    with torch.no_grad():
                        mini_batch_loss += loss
                        ratio = importance_ratio(logprobs, old, m, config.importance_sampling_level)
                        A, low, high = adv.unsqueeze(1), config.clip_range, config.clip_range_high
                        clipped = ((ratio > 1 + high) & (A > 0)) | ((ratio < 1 - low) & (A < 0))
                        if config.loss_type == "cispo":
                            clipped = (ratio > high) & (A != 0)
                        meter.add("policy/approxkl_avg", 0.5 * (logprobs - old) ** 2, m)
                        meter.add("policy/clipfrac_avg", clipped, m)
                        meter.add("policy/entropy_avg", entropy, m)
                        meter.add("val/ratio", ratio, m)
                        if index == 0:
                            meter.maximum("val/ratio_max_dev_first", (ratio - 1).abs(), m)
                grad_norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
                if not grad_norm.isfinite():
                    raise Fault(f"the gradient is {grad_norm}: lower --learning_rate")
                meter.add("grad_norm", grad_norm)
                meter.add("loss/policy_avg", mini_batch_loss)
                optimizer.step()
                optimizer.zero_grad()
            clear_cache()

            # 5. Log. The two numbers to watch are the score and the KL.
            kl = None
            if ref_logprobs is not None:
                kl = kl_estimate(old_logprobs, ref_logprobs, "k3")  # (B, T)
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
