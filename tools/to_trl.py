"""Train the job of a run on many GPUs, with TRL 1.16: its GRPOTrainer or its RLOOTrainer.

  torchrun --nproc_per_node 8 tools/to_trl.py runs/grpo-tiny-add-s0
  accelerate launch --config_file zero3.yaml tools/to_trl.py runs/grpo-tiny-add-s0 --use_vllm True

Model, prompts, rewards and settings are those of the run; start it in the folder where the run was
started. Flags after the run are fields of TRL's GRPOConfig or RLOOConfig, and win. What TRL has
nothing for is printed. The model goes to RUN/trl, or to --output_dir. See docs/outgrow.md.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from transformers import HfArgumentParser, set_seed

import grpo
import rloo
import tasks
from common import disable_dropout, unwrap
from plumbing.config import RunConfig, settings_of_run
from plumbing.data import load_task
from plumbing.errors import InputError, blame
from plumbing.models import load_policy, spread_weights
from plumbing.run import run_main

CONFIGS = {"grpo": grpo.Config, "rloo": rloo.Config}
SAME_NAME = "bf16 gradient_checkpointing learning_rate max_grad_norm num_generations seed"
SAME_NAME_GRPO = "entropy_coef loss_type mask_truncated_completions scale_rewards"


def fields_of(config: RunConfig, num_processes: int, longest: int) -> dict[str, Any]:
    """Make the fields of GRPOConfig or RLOOConfig; `longest` is of a prompt. Raises InputError."""
    completions, is_grpo = config.prompts_per_step * config.num_generations, config.script == "grpo"
    num_mini_batches = config.num_mini_batches if is_grpo else 1  # RLOO makes one update a rollout
    rows, rest = divmod(completions, num_mini_batches * num_processes)
    if rest:
        parts = f"{num_mini_batches} minibatches on {num_processes} processes"
        raise InputError(f"the {completions} completions of a step can't be cut into {parts}")
    most = max(1, config.micro_batch_tokens // (longest + config.max_new_tokens))
    size = max(size for size in range(1, min(rows, most) + 1) if rows % size == 0)
    updates = num_mini_batches * (config.num_epochs if is_grpo else 1)  # TRL's steps are updates
    fields = {name: getattr(config, name) for name in SAME_NAME.split()} | {
        "beta": config.kl_coef,
        "temperature": config.temperature,
        "max_completion_length": config.max_new_tokens,
        "generation_batch_size": completions,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": rows // size,
        "max_steps": config.num_steps * updates,
        "warmup_steps": min(config.warmup_steps, config.num_steps // 2) * updates,
        "adam_beta2": 0.95,
        "num_generations_eval": config.eval_generations,
        "per_device_eval_batch_size": size * config.eval_generations,
        "eval_strategy": "steps",
        "eval_on_start": True,
        "eval_steps": config.eval_every * updates,
        "save_steps": config.save_every * updates,
        "logging_steps": updates,
        "report_to": config.report_to or "none",
    }
    if is_grpo:
        fields |= {name: getattr(config, name) for name in SAME_NAME_GRPO.split()}
        fields |= {"num_iterations": config.num_epochs, "epsilon": config.clip_range}
        fields["epsilon_high"] = config.clip_range_high
        fields["use_bias_correction_kl"] = config.kl_estimator == "unbiased"
        if config.loss_type == "gspo":
            fields |= {"loss_type": "grpo", "importance_sampling_level": "sequence"}
        if config.loss_type == "cispo":
            fields["epsilon_high"] = 5.0  # as in grpo_loss
        if config.scale_rewards == "mean":
            fields["scale_rewards"] = "none"
    return fields


def not_in_trl(config: RunConfig) -> list[str]:
    """Name the flags of the run that TRL has nothing for."""
    unknown = {"stop": config.stop, "reference": config.reference}
    if isinstance(config, grpo.Config):
        unknown["oversample"] = config.oversample > 1
        unknown["scale_rewards"] = config.scale_rewards == "mean"
    return [name for name in unknown if unknown[name]]


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("run", type=Path)
    given, flags = parser.parse_known_args(args)
    found = settings_of_run(given.run)
    script = found.pop("script")
    if script not in CONFIGS:
        instead = "for PPO docs/outgrow.md names verl, for reward models TRL's RewardTrainer"
        raise InputError(f"{given.run}: a run of {script}.py; {instead}")
    with blame("many GPUs need pip install trl==1.16.0"):
        import trl
        from datasets import Dataset
        from trl.rewards import get_soft_overlong_punishment

    with blame(f"{given.run / 'config.json'}"):  # a setting of another version
        config = CONFIGS[script](**found)
    config.device = "cpu"  # TRL moves the policy to the device of the process
    set_seed(config.seed)  # of a new adapter
    policy, tokenizer = load_policy(config)
    if unwrap(policy)._supports_sdpa:  # it chose a kind of attention for a CPU
        unwrap(policy).set_attn_implementation("sdpa")
    task = load_task(config, tasks, policy, tokenizer)
    if config.bf16 and hasattr(policy, "peft_config"):
        policy.get_output_embeddings().bfloat16()  # as the rest: TRL decodes without autocast
    if config.disable_dropout:
        disable_dropout(policy)
    heldout = task.heldout[: config.num_eval_prompts]
    mask = task.encode(task.train + heldout)[1]
    missing = [f"--{name} {getattr(config, name)}" for name in not_in_trl(config)]
    if not mask.all() and any(name.endswith("wpe") for name, _ in policy.named_modules()):
        missing.append("position ids, which GPT-2 needs where prompts are of unequal length")
    if missing and int(os.environ.get("RANK", 0)) == 0:  # one process prints for all
        print(*(f"not in TRL: {what}" for what in missing), sep="\n")

    # The settings of the run, under the flags that are given here.
    parser = HfArgumentParser(getattr(trl, f"{script.upper()}Config"), usage="see TRL's pages")
    fields = fields_of(config, int(os.environ.get("WORLD_SIZE", 1)), mask.shape[1])
    parser.set_defaults(output_dir=str(given.run / "trl"), **fields)
    with blame("TRL"):
        (settings,) = parser.parse_args_into_dataclasses(flags)
    if settings.bf16:
        spread_weights(unwrap(policy).base_model)
    if config.reward_model:
        task.rewards[-1].model.to(settings.device)
    if task.verifier not in [None, *task.rewards]:  # for the log
        task.rewards, task.weights = [*task.rewards, task.verifier], [*task.weights, 0.0]
    if script == "grpo" and config.overlong_buffer > 0:
        buffer = config.overlong_buffer
        task.rewards += [get_soft_overlong_punishment(config.max_new_tokens, buffer)]
        task.weights += [1.0]
    settings.reward_weights = task.weights
    train = task.train * -(-config.prompts_per_step // len(task.train))  # at least a whole batch
    with blame("TRL"):  # without vLLM, say
        trainer = getattr(trl, f"{script.upper()}Trainer")(
            model=policy,
            reward_funcs=task.rewards,
            args=settings,
            train_dataset=Dataset.from_list(train, on_mixed_types="use_json"),
            eval_dataset=Dataset.from_list(heldout, on_mixed_types="use_json"),
            processing_class=tokenizer,
        )
    trainer.train(resume_from_checkpoint=settings.resume_from_checkpoint)
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()  # gloo's threads need Python, to free their tensors:
    trainer.accelerator.end_training()  # else they block its end, or abort it


if __name__ == "__main__":
    run_main(main)
