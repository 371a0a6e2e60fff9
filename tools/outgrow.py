"""The job of a run of grpo.py or rloo.py by TRL's trainer, for whoever outgrows one GPU.

  python tools/outgrow.py runs/grpo-tiny-add-s0               # needs pip install trl==1.16.0
  accelerate launch tools/outgrow.py runs/grpo-tiny-add-s0    # on every GPU of the machine

Takes all from the run's config.json; start it where the run was started. Writes RUN_FOLDER/trl.
"""

import argparse
import importlib
import inspect
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import InputError, disable_dropout, first_line
from plumbing.config import check_prompts
from plumbing.loading import load_policy, load_tokenizer, pick_device
from plumbing.runs import run_main
from tasks import load_task, prompt_batch, prompt_tokens

# Our flag: the field of GRPOConfig and RLOOConfig. outgrow.md is checked against these dicts.
SAME_NAME = """num_generations temperature reward_weights scale_rewards reward_clip_range seed bf16
normalize_advantages learning_rate loss_type importance_sampling_level mask_truncated_completions
max_grad_norm disable_dropout gradient_checkpointing output_dir""".split()
FIELDS = {name: name for name in SAME_NAME} | {
    "num_steps": "max_steps", "prompts_per_step": "generation_batch_size", "kl_coef": "beta",
    "max_new_tokens": "max_completion_length", "rollout_batch_size": "per_device_eval_batch_size",
    "num_epochs": "num_iterations", "num_mini_batches": "gradient_accumulation_steps",
    "micro_batch_size": "per_device_train_batch_size", "clip_range": "epsilon",
    "micro_batch_tokens": "per_device_train_batch_size", "clip_range_high": "epsilon_high",
    "compile": "torch_compile", "device": "use_cpu", "tensorboard": "report_to",
    "wandb": "report_to", "save_every": "save_steps", "eval_every": "eval_steps",
}  # fmt: skip
ARGUMENTS = dict.fromkeys("task digits prompts split".split(), "train_dataset")  # of the trainer
ARGUMENTS |= {"model": "model", "lora_r": "model", "num_eval_prompts": "eval_dataset"}
ARGUMENTS |= {"reward": "reward_funcs", "reward_model": "reward_funcs"}
FIXED = {  # what has no flag here and another default there
    "shuffle_dataset": False, "eval_strategy": "steps", "eval_on_start": True, "logging_steps": 1,
    "num_generations_eval": 1, "save_total_limit": 1, "use_bias_correction_kl": False,
}  # fmt: skip


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--max_steps", type=int, help="optimiser steps, not as many as the run has")
    options = parser.parse_args(args)
    try:
        settings = json.loads((options.run / "config.json").read_text(encoding="utf-8"))
        if (script := settings.pop("script")) not in ("grpo", "rloo"):
            raise InputError(f"{options.run}: a run of {script}.py, TRL has GRPO and RLOO alone")
        config = importlib.import_module(script).Config(**settings)
        trl = importlib.import_module("trl")
        table = importlib.import_module("datasets").Dataset.from_list
    except ImportError as e:
        raise InputError(f"{first_line(e)}: pip install trl==1.16.0") from e
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise InputError(f"{options.run}/config.json can't be read ({first_line(e)})") from e
    policy, tokenizer = load_policy(config.model, config.lora_r), load_tokenizer(config.model)
    if config.disable_dropout:
        disable_dropout(policy)  # every kind; TRL switches off nn.Dropout alone
    task = load_task(config, tokenizer, pick_device("cpu"))
    check_prompts(config, policy, tokenizer, task)
    for reward in task.rewards:
        if inspect.getfullargspec(reward).varkw is None:
            raise InputError(f"the reward {reward.__name__} must take **columns: TRL passes more")
    lengths = {len(prompt_tokens(tokenizer, row["prompt"])) for row in task.train}
    learned = "gpt2 gpt_neo gpt_bigcode biogpt xglm".split()  # no rotary positions
    if policy.config.model_type in learned and len(lengths) > 1:
        raise InputError(f"{config.model}: TRL needs prompts of equal length: see docs/outgrow.md")
    updates = config.num_epochs * config.num_mini_batches  # per rollout
    max_steps = options.max_steps or config.num_steps * updates
    completions = config.prompts_per_step * config.num_generations
    processes = int(os.environ.get("WORLD_SIZE", 1))  # accelerate launch: they share a minibatch
    rows, rest = divmod(completions // config.num_mini_batches, processes)
    if rest:
        raise InputError(f"{processes} GPUs can't share {rows * processes + rest} completions")
    if max_steps < 1:
        raise InputError(f"--max_steps {max_steps}: must be greater than 0")
    fit = (config.micro_batch_tokens or sys.maxsize) // (max(lengths) + config.max_new_tokens)
    most = max(1, min(fit, config.micro_batch_size or rows))
    micro = max(n for n in range(1, rows + 1) if rows % n == 0 and n <= most)
    fields = {theirs: vars(config).get(ours) for ours, theirs in FIELDS.items()} | FIXED | {
        "max_steps": max_steps, "generation_batch_size": completions,
        "per_device_train_batch_size": micro, "gradient_accumulation_steps": rows // micro,
        "per_device_eval_batch_size": config.rollout_batch_size, "reward_weights": task.weights,
        "use_cpu": pick_device(config.device).type == "cpu", "output_dir": f"{options.run}/trl",
        "save_steps": config.save_every * updates, "eval_steps": config.eval_every * updates,
        "report_to": [name for name in ("tensorboard", "wandb") if getattr(config, name)],
    }  # fmt: skip
    kind, make = (getattr(trl, script.upper() + name) for name in ("Config", "Trainer"))
    fields = kind(**{name: value for name, value in fields.items() if hasattr(kind, name)})
    count = -(-max_steps // updates) * config.prompts_per_step  # prompts, in the order of the run
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
