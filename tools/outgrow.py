"""Repeat a run with TRL's trainer (grpo.py, rloo.py), or write what verl needs for it (ppo.py too).

  python tools/outgrow.py runs/grpo-tiny-add-s0               # needs pip install trl==1.16.0
  accelerate launch tools/outgrow.py runs/grpo-tiny-add-s0    # on every GPU of the machine
  python tools/outgrow.py runs/ppo-tiny-add-s0 --to verl      # files and a command

Takes all settings from the run's config.json; start it in the folder that the run was started in.
Writes RUN_FOLDER/trl or RUN_FOLDER/verl.
"""

import argparse
import importlib
import inspect
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from transformers import PreTrainedModel

import grpo
import ppo
import rloo
from common import disable_dropout
from plumbing.data import Task, check_prompts, load_task, prompt_batch, prompt_tokens
from plumbing.errors import InputError, first_line
from plumbing.models import load_policy, load_tokenizer, pick_device
from plumbing.run import run_main
from tasks import REWARDS, TASKS
from tools import outgrow_verl

CONFIGS = {"ppo": ppo.Config, "grpo": grpo.Config, "rloo": rloo.Config}

# Our flag: the field of GRPOConfig and RLOOConfig. outgrow.md is checked against these dicts.
SAME_NAME = """num_generations temperature reward_weights scale_rewards reward_clip_range seed bf16
normalize_advantages learning_rate warmup_steps loss_type importance_sampling_level entropy_coef
mask_truncated_completions max_grad_norm disable_dropout gradient_checkpointing
output_dir""".split()
FIELDS = {name: name for name in SAME_NAME} | {
    "num_steps": "max_steps", "prompts_per_step": "generation_batch_size", "kl_coef": "beta",
    "max_new_tokens": "max_completion_length", "rollout_batch_size": "per_device_eval_batch_size",
    "num_epochs": "num_iterations", "num_mini_batches": "gradient_accumulation_steps",
    "micro_batch_size": "per_device_train_batch_size", "clip_range": "epsilon",
    "micro_batch_tokens": "per_device_train_batch_size", "clip_range_high": "epsilon_high",
    "cispo_bound": "epsilon_high",
    "compile": "torch_compile", "device": "use_cpu", "tensorboard": "report_to",
    "wandb": "report_to", "save_every": "save_steps", "eval_every": "eval_steps",
    "eval_generations": "num_generations_eval",
}  # fmt: skip
ARGUMENTS = dict.fromkeys(  # of the trainer
    "task digits prompts subset split prompt_column prompt_template system_prompt".split(),
    "train_dataset",
)
ARGUMENTS |= dict.fromkeys(["eval_prompts", "eval_split"], "eval_dataset")
ARGUMENTS |= {"model": "model", "lora_r": "model", "num_eval_prompts": "eval_dataset"}
ARGUMENTS |= dict.fromkeys(["reward", "reward_model", "overlong_buffer"], "reward_funcs")
NOT_THERE = ["stop", "importance_cap", "dynamic_sampling"]  # refused where they are set
FIXED = {  # what has no flag here and another default there
    "shuffle_dataset": False, "eval_strategy": "steps", "eval_on_start": True, "logging_steps": 1,
    "save_total_limit": 1, "use_bias_correction_kl": False, "adam_beta2": 0.95,
}  # fmt: skip


def config_of(folder: Path, to: str = "trl") -> tuple[str, Any]:
    """(script, its Config) of the run in `folder`. Raises InputError."""
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if (script := settings.pop("script")) == "ppo" and to == "trl":
            raise InputError(f"{folder}: a run of ppo.py, and TRL has no PPO: try --to verl")
        if script not in CONFIGS:
            fault = "a reward model grows with TRL's RewardTrainer, on the same pairs"
            raise InputError(f"{folder}: a run of {script}.py; {fault}")
        return script, CONFIGS[script](**settings)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise InputError(f"{folder}/config.json can't be read ({first_line(e)})") from e


def check_flags(script: str, config: Any) -> None:
    """Check that TRL has what is asked for. Raises InputError."""
    names = [*NOT_THERE, "entropy_coef"] if script == "rloo" else NOT_THERE
    for name in names:
        if value := vars(config).get(name):
            kind = script.upper()
            raise InputError(f"--{name} {value}: TRL's {kind} has nothing like it")


def check_task(config: Any, policy: PreTrainedModel, task: Task, lengths: set[int]) -> None:
    """Check what TRL asks of rewards and prompts; lengths of the prompts. Raises InputError."""
    for reward in task.rewards:
        if inspect.getfullargspec(reward).varkw is None:
            raise InputError(f"the reward {reward.__name__} must take **columns: TRL passes more")
    learned = "gpt2 gpt_neo gpt_bigcode biogpt xglm".split()  # no rotary positions
    if policy.config.model_type in learned and len(lengths) > 1:
        raise InputError(f"{config.model}: TRL needs prompts of equal length: see docs/outgrow.md")


def fields_of(
    config: Any, folder: Path, weights: list[float], longest: int, max_steps: int
) -> dict[str, Any]:
    """The fields of TRL's config by name, for GRPO and RLOO; longest: tokens of a prompt."""
    updates = config.num_epochs * config.num_mini_batches  # per rollout
    completions = config.prompts_per_step * config.num_generations
    processes = int(os.environ.get("WORLD_SIZE", 1))  # accelerate launch: they share a minibatch
    rows, rest = divmod(completions // config.num_mini_batches, processes)
    if rest:
        raise InputError(f"{processes} GPUs can't share {rows * processes + rest} completions")
    if max_steps < 1:
        raise InputError(f"--max_steps {max_steps}: must be greater than 0")
    fit = (config.micro_batch_tokens or sys.maxsize) // (longest + config.max_new_tokens)
    most = max(1, min(fit, config.micro_batch_size or rows))
    micro = max(n for n in range(1, rows + 1) if rows % n == 0 and n <= most)
    is_cispo = vars(config).get("loss_type") == "cispo"
    return {theirs: vars(config).get(ours) for ours, theirs in FIELDS.items()} | FIXED | {
        "max_steps": max_steps, "generation_batch_size": completions,
        "per_device_train_batch_size": micro, "gradient_accumulation_steps": rows // micro,
        "per_device_eval_batch_size": config.rollout_batch_size, "reward_weights": weights,
        "use_cpu": pick_device(None).type == "cpu", "output_dir": f"{folder}/trl",
        "warmup_steps": config.warmup_steps * updates,
        "save_steps": config.save_every * updates, "eval_steps": config.eval_every * updates,
        "epsilon_high": vars(config).get("cispo_bound" if is_cispo else "clip_range_high"),
        "report_to": [name for name in ("tensorboard", "wandb") if getattr(config, name)],
    }  # fmt: skip


def to_verl(run: Path, script: str, config: Any, max_steps: int | None) -> None:
    """Write what verl needs for the run, and say so. Raises InputError."""
    if max_steps is not None:
        remedy = "write trainer.total_training_steps=N behind the command that this prints"
        raise InputError(f"--max_steps {max_steps}: for TRL alone; {remedy}")
    folder = outgrow_verl.write(run, script, config)
    print(f"{folder} holds train.parquet, test.parquet, reward.py and run.sh. Where verl is:")
    print(f"GPUS=8 sh {shlex.quote(str(folder / 'run.sh'))}")


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--max_steps", type=int, help="optimiser steps, not as many as the run has")
    parser.add_argument("--to", choices=["trl", "verl"], default="trl")
    options = parser.parse_args(args)
    script, config = config_of(options.run, options.to)
    if options.to == "verl":
        return to_verl(options.run, script, config, options.max_steps)
    check_flags(script, config)
    try:
        trl = importlib.import_module("trl")
        table = importlib.import_module("datasets").Dataset.from_list
    except ImportError as e:
        raise InputError(f"{first_line(e)}: pip install trl==1.16.0") from e
    policy, tokenizer = load_policy(config.model, config.lora_r), load_tokenizer(config.model)
    if config.disable_dropout:
        disable_dropout(policy)  # every kind; TRL switches off nn.Dropout alone
    task = load_task(config, TASKS, REWARDS, tokenizer, pick_device("cpu"))
    check_prompts(config, policy, tokenizer, task)
    lengths = {len(prompt_tokens(tokenizer, row["prompt"])) for row in task.train}
    check_task(config, policy, task, lengths)
    if buffer := vars(config).get("overlong_buffer"):
        rewards = importlib.import_module("trl.rewards")
        penalty = rewards.get_soft_overlong_punishment(config.max_new_tokens, buffer)
        task.rewards, task.weights = [*task.rewards, penalty], [*task.weights, 1.0]

    updates = config.num_epochs * config.num_mini_batches  # per rollout
    max_steps = options.max_steps or config.num_steps * updates
    fields = fields_of(config, options.run, task.weights, max(lengths), max_steps)
    kind, make = (getattr(trl, script.upper() + name) for name in ("Config", "Trainer"))
    fields = kind(**{name: value for name, value in fields.items() if hasattr(kind, name)})

    # The prompts in the order in which the run has them.
    count = -(-max_steps // updates) * config.prompts_per_step
    parts = prompt_batch(task.train, 0, count, config.seed), task.heldout[: config.num_eval_prompts]
    keys = dict.fromkeys(key for row in task.train + task.heldout for key in row)
    data = [table([keys | row for row in part], on_mixed_types="use_json") for part in parts]
    if task.reward_model:
        task.reward_model.model.to(fields.device)
    trainer = make(policy, task.rewards, fields, *data, processing_class=tokenizer)
    trainer.train()
    trainer.save_model(f"{options.run}/trl/model")
    print(f"{options.run}/trl/model holds the model after {max_steps} optimiser steps.")


if __name__ == "__main__":
    run_main(main)
