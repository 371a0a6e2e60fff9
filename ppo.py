"""PPO: proximal policy optimisation of a language model against a score, with a KL penalty.

The policy pi samples y_1 .. y_T after a prompt; a state is what has been written so far. On the
left the name in the code; eps is clip_range, eps_v clip_range_value; the values are V_t.

  kl          kl_t estimates KL(pi || pi_ref) from log pi(y_t) - log pi_ref(y_t)
  rewards     r_t = -kl_coef * kl_t, and the score is added at the last token         [1] eq. 2
  advantages  delta_t = r_t + gamma V_{t+1} - V_t                                     [2] eq. 12
              A_t = delta_t + gamma lam A_{t+1}, whitened over the batch              [2] eq. 11
  returns     R_t = A_t + V_t, with A before whitening
  ratio       rho_t = pi(y_t) / pi_old(y_t)
  pg          max(-A_t rho_t, -A_t clip(rho_t, 1 - eps, 1 + eps))                     [2] eq. 7
  vf          max((V_t - R_t)^2, (clip(V_t, V_old -+ eps_v) - R_t)^2) / 2             [2] eq. 9, [3]
  loss        sum over the tokens of a minibatch of (pg + vf_coef vf), over their number

[1] Ziegler et al. 2019, arXiv 1909.08593. [2] Schulman et al. 2017, arXiv 1707.06347.
[3] Huang et al. 2024, arXiv 2403.17031: the implementation details.

  python ppo.py                  # sums: 39% -> 97% right, in a minute on two CPU cores
  python ppo.py --model gpt2     # film reviews turn positive: the score rises, and the KL with it
  python ppo.py --model gpt2 --prompts my_prompts.jsonl --reward my_rewards.py:my_reward
"""

import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common import (
    Fault,
    InputError,
    ValueModel,
    base_model,
    clear_cache,
    completion_logprobs,
    completion_values,
    disable_dropout,
    gae,
    kl_estimate,
    masked_whiten,
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
from plumbing.metrics import (
    Meter,
    explained_variance,
    objective_metrics,
    rollout_metrics,
    seconds_since,
)
from plumbing.runs import Run, run_main
from sampling import concatenate, generate
from tasks import Task, encode_prompts, load_task, prompt_batch, score


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
    num_generations: int = flag(1, "completions per prompt")
    max_new_tokens: int | None = flag(None, "longest completion")
    temperature: float = flag(1.0, "the policy is softmax(logits / temperature)")
    rollout_batch_size: int | None = flag(None, "most rows decoded or read at once")
    kl_coef: float | None = flag(
        None, "weight of the KL penalty; 0 builds no reference model", "reward and advantage"
    )
    kl_estimator: Literal["k1", "k2", "k3"] = flag(
        "k1", "of the KL in the reward; k2, k3 pull less"
    )
    missing_eos_penalty: float = flag(0.0, "taken off the score of a completion without EOS")
    whiten_rewards: bool = flag(False, "scale rewards to variance 1, without shifting their mean")
    gamma: float = flag(1.0, "discount")
    lam: float = flag(0.95, "lambda of GAE: 1 trusts the rewards, 0 the value model")
    learning_rate: float | None = flag(
        None, "of AdamW; falls linearly to 0; adapters: 10 times", "update"
    )
    num_epochs: int | None = flag(None, "passes over one rollout")
    num_mini_batches: int | None = flag(None, "optimiser steps per pass")
    micro_batch_size: int | None = flag(None, "most rows per forward and backward")
    micro_batch_tokens: int | None = flag(None, "most tokens read at once, padding too")
    clip_range: float = flag(0.2, "epsilon of the ratio clip")
    clip_range_value: float = flag(0.2, "how far a value may move in one update")
    vf_coef: float = flag(0.1, "weight of the value loss")
    value_init: Literal["policy", "reward_model"] = flag("policy", "backbone of the value model")
    max_grad_norm: float = flag(1.0, "a longer gradient is scaled down to this norm")
    disable_dropout: bool = flag(True, "false shows what dropout does to the ratio")
    lora_r: int = flag(0, "rank of a new LoRA adapter (needs peft); 0 trains all weights")
    merge_adapter: bool = flag(False, "model/ holds base and adapter merged, adapter/ the adapter")
    gradient_checkpointing: bool = flag(False, "less memory, more time")
    bf16: bool | None = flag(None, "bfloat16 autocast; default: where the device is fast at it")
    compile: bool = flag(False, "torch.compile the training forward")
    seed: int = flag(0, "of every random draw", "the run")
    device: str | None = flag(None, "cuda, mps or cpu; default: the first there is")
    output_dir: str | None = flag(None, "default: runs/ppo-<model>-<task>-s<seed>")
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
    "num_steps": 60,
    "prompts_per_step": 256,
    "max_new_tokens": 5,
    "rollout_batch_size": 256,
    "kl_coef": 0.02,
    "learning_rate": 5e-4,
    "num_epochs": 2,
    "num_mini_batches": 4,
    "micro_batch_size": 256,
    "bf16": False,
    "eval_every": 15,
    "num_eval_prompts": 512,
}
PRETRAINED = {
    "task": "sentiment",
    "num_steps": 40,
    "prompts_per_step": 16,
    "max_new_tokens": 24,
    "rollout_batch_size": 32,
    "kl_coef": 0.1,
    "learning_rate": 5e-5,
    "num_epochs": 2,
    "num_mini_batches": 1,
    "micro_batch_tokens": 1024,
    "eval_every": 20,
    "num_eval_prompts": 24,
}


def shape_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """The reward of each token: scores (B,), kl and mask (B, T) -> (B, T), 0 off the mask.

    [1] eq. 2, its KL paid token by token. The score sits on the last real token, usually EOS. One
    slot later, as in TRL's PPO, GAE would pass only gamma * lam of it on to EOS.
    """
    mask = mask.bool()
    is_last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))
    return (-kl_coef * kl).masked_fill(~mask, 0) + scores.unsqueeze(1) * is_last


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_range: float
) -> Tensor:
    """Clipped surrogate of each token, to be minimised: each (B, T) -> (B, T). [2] eq. 7.

    Outside the clip range there is no gradient where moving on would pay, and the full gradient
    where it would hurt: hence the maximum of the two losses, for either sign of the advantage.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    return torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + clip_range))


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip_range_value: float
) -> Tensor:
    """Clipped squared error of each token, halved: each (B, T) -> (B, T). [2] eq. 9, clip: [3]."""
    clipped = values.clamp(old_values - clip_range_value, old_values + clip_range_value)
    return 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2)


def initial_value_model(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task, init: str
) -> ValueModel:
    """The value model, on a copy of the policy's backbone or of the reward model's.

    Raises InputError where the reward model reads other tokens than the policy writes.
    """
    if init == "policy":
        return ValueModel.on_backbone_of(policy)
    if task.reward_model is None:
        raise InputError("--value_init reward_model: needs --reward_model")
    if task.reward_model.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise InputError("--value_init reward_model: its vocabulary is not the policy's")
    if base_model(policy) is not policy:  # all its weights would train, at an adapter's rate
        raise InputError("--value_init reward_model: not with an adapter, use --value_init policy")
    return ValueModel.on_backbone_of(task.reward_model.model)


def main(args: list[str] | None = None) -> None:
    config = parse_flags(Config, __doc__, args, TINY, PRETRAINED)
    apply_defaults(config, TINY if config.model == "tiny" else PRETRAINED)
    check_flags(config)
    device = pick_device(config.device)
    config.bf16 = fast_at_bfloat16(device) if config.bf16 is None else config.bf16
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=config.bf16)
    folder = choose_folder("ppo", config)
    torch.manual_seed(config.seed)
    shuffler = torch.Generator().manual_seed(config.seed)

    policy = load_policy(config.model, config.lora_r).to(device)
    tokenizer = load_tokenizer(config.model)
    task = load_task(config, tokenizer, device)
    check_prompts(config, policy, tokenizer, task)
    value_model = initial_value_model(policy, tokenizer, task, config.value_init)
    if config.disable_dropout:
        disable_dropout(policy, value_model)  # before the reference is copied from the policy
    set_up_training(
        policy,
        value_model,
        bf16=config.bf16,
        checkpointing=config.gradient_checkpointing,
        compiled=config.compile,
    )
    ref = reference(policy, config.kl_coef)

    parameters = [*policy.parameters(), *value_model.parameters()]
    parameters = [p for p in parameters if p.requires_grad]  # of an adapter's base model none
    # PyTorch's Adam takes larger first steps than the TensorFlow one of the early papers, see [3].
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

    whole = (folder, config, policy, tokenizer, task, sampling, optimizer, shuffler, value_model)
    with Run("ppo", *whole) as run:
        for step in run.steps():
            metrics = run.evaluate(step) if step % config.eval_every == 0 else {}

            # 1. Roll out: sample completions from the policy as it is now, and score their text.
            rollout_started = time.perf_counter()
            batch = prompt_batch(task.train, step, config.prompts_per_step, config.seed)
            prompt_ids, prompt_mask = encode_prompts(tokenizer, batch, device)  # (N, P)
            at_once = config.rollout_batch_size // G  # prompts per sub-batch
            rollouts = []
            for ids, real in zip(prompt_ids.split(at_once), prompt_mask.split(at_once)):
                rollouts += [generate(policy, ids, real, num_generations=G, **sampling)]
            rollout = concatenate(rollouts)  # tokens (B, P+T)
            mask = rollout.completion_mask  # (B, T), EOS included
            scores, texts = score(task, batch, rollout, tokenizer)  # (B,)
            if scores.isnan().any():
                raise InputError("a reward is None, and PPO needs one for every row")
            scores = scores.to(device) - config.missing_eos_penalty * ~rollout.finished

            #    Log-probs and values by the forward that trains, not by the one that decoded: so
            #    the ratio is 1 before the first update. All are 0 off the mask.
            limits = config.rollout_batch_size, config.micro_batch_tokens
            with torch.no_grad(), autocast:
                old_values = completion_values(value_model, rollout, *limits)  # (B, T)
                old_logprobs = torch.zeros_like(old_values)  # (B, T)
                if not old_is_new:
                    old_logprobs = completion_logprobs(policy, rollout, config.temperature, *limits)
                ref_logprobs = None
                with ref as model:  # not around the lines above: it may switch an adapter off
                    if model is not None:
                        ref_logprobs = completion_logprobs(
                            model, rollout, config.temperature, *limits
                        )
            clear_cache()

            # 2. Rewards: the KL penalty at every token, the score at the last one.
            kl = torch.zeros_like(old_logprobs)  # (B, T)
            if ref_logprobs is not None:
                kl = kl_estimate(old_logprobs, ref_logprobs, config.kl_estimator)
            rewards = shape_rewards(scores, kl, mask, config.kl_coef)  # (B, T)
            if config.whiten_rewards:
                rewards = masked_whiten(rewards, mask, shift_mean=False)

            # 3. Advantages. Whitening comes after the returns: V must learn the real rewards.
            advantages, returns = gae(rewards, old_values, mask, config.gamma, config.lam)  # (B, T)
            advantages = masked_whiten(advantages, mask)
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
                # A micro-batch adds its share of the minibatch's mean over tokens: the gradient
                # is the same whatever its size.
                num_tokens = mask[mini_batch].sum()
                for rows in micro_batches(rollout, mini_batch, *sizes):
                    with autocast:
                        logprobs, entropy = completion_logprobs(
                            policy, rollout[rows], config.temperature, with_entropy=True
                        )
                        values = completion_values(value_model, rollout[rows])
                    if old_is_new:
                        old_logprobs[rows] = logprobs.detach()
                    m, old, adv = mask[rows], old_logprobs[rows], advantages[rows]  # (rows, T)
                    pg = policy_loss(logprobs, old, adv, config.clip_range)
                    vf = value_loss(
                        values, old_values[rows], returns[rows], config.clip_range_value
                    )
                    loss = ((pg + config.vf_coef * vf) * m).sum() / num_tokens
                    loss.backward()

                    with torch.no_grad():
                        ratio = torch.exp(logprobs - old)
                        meter.add("policy/approxkl_avg", 0.5 * (logprobs - old) ** 2, m)
                        meter.add("policy/clipfrac_avg", pg > -adv * ratio, m)  # the clip decided
                        meter.add("policy/entropy_avg", entropy, m)
                        meter.add("loss/policy_avg", pg, m)
                        meter.add("loss/value_avg", vf, m)
                        meter.add("val/clipfrac_avg", vf > 0.5 * (values - returns[rows]) ** 2, m)
                        meter.add("val/ratio", ratio, m)
                        if index == 0:
                            meter.maximum("val/ratio_max_dev_first", (ratio - 1).abs(), m)
                grad_norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
                if not grad_norm.isfinite():
                    raise Fault(f"the gradient is {grad_norm}: lower --learning_rate")
                meter.add("grad_norm", grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            clear_cache()

            # 5. Log. The two numbers to watch are the score and the KL.
            metrics |= meter.means()
            kl = None if ref_logprobs is None else kl
            metrics |= objective_metrics(scores, kl, old_logprobs, mask, config.kl_coef)
            metrics |= {
                "val/explained_variance": explained_variance(old_values, returns, mask),
                "lr": learning_rate,
                "episode": (step + 1) * batch_size,
            }
            update_seconds = seconds_since(update_started, device)
            metrics |= rollout_metrics(rollout, rollout_seconds, update_seconds)
            run.log(step, metrics)
            run.show(step, batch, texts, scores)

        run.log(config.num_steps, run.evaluate(config.num_steps))


if __name__ == "__main__":
    run_main(main)
