"""Write the job of a run for verl, which has PPO, GRPO and RLOO on many GPUs and machines.

  python tools/outgrow.py runs/ppo-tiny-add-s0     # needs pip install pyarrow, and no verl
  GPUS=8 sh runs/ppo-tiny-add-s0/verl/run.sh       # where verl 0.9 is installed

All settings come from the run's config.json; start it in the folder where the run was started.
Writes RUN/verl: train.parquet, test.parquet, reward.py, run.sh, and tokenizer/ where the prompts
are plain text. What differs there: docs/outgrow.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
import math
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from transformers import PretrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

import grpo
import ppo
import rloo
import tasks
from plumbing.config import settings_of_run
from plumbing.data import Task, as_messages, load_task, prompt_tokens
from plumbing.errors import InputError, first_line, optional_library
from plumbing.models import TINY, adapter_base, load_policy
from plumbing.rewards import load_reward, score_texts
from plumbing.run import run_main

CONFIGS = {"ppo": ppo.Config, "grpo": grpo.Config, "rloo": rloo.Config}
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
ROLLOUT, REF = "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
# verl's settings that take the value of a flag as it is; those of its critic are for PPO alone.
SAME_VALUE = {
    "num_steps": "trainer.total_training_steps",
    "prompts_per_step": "data.train_batch_size",
    "num_generations": f"{ROLLOUT}.n",
    "max_new_tokens": "data.max_response_length",
    "temperature": f"{ROLLOUT}.temperature {ROLLOUT}.val_kwargs.temperature",
    "seed": f"{ROLLOUT}.seed {ACTOR}.data_loader_seed critic.data_loader_seed",
    "num_epochs": f"{ACTOR}.ppo_epochs",
    "clip_range": f"{ACTOR}.clip_ratio",
    "entropy_coef": f"{ACTOR}.entropy_coeff",
    "learning_rate": f"{ACTOR}.optim.lr critic.optim.lr",
    "warmup_steps": f"{ACTOR}.optim.lr_warmup_steps critic.optim.lr_warmup_steps",
    "max_grad_norm": f"{ACTOR}.optim.clip_grad critic.optim.clip_grad",
    "gradient_checkpointing": f"{MODEL}.enable_gradient_checkpointing"
    " critic.model.enable_gradient_checkpointing",
    "save_every": "trainer.save_freq",
    "eval_every": "trainer.test_freq",
    "eval_generations": f"{ROLLOUT}.val_kwargs.n",
    "gamma": "algorithm.gamma",
    "lam": "algorithm.lam",
    "clip_range_value": "critic.cliprange_value",
}
FIXED = {  # what has no flag here, and another default there
    "data.shuffle": False,  # train.parquet has the prompts of all steps in their order
    "trainer.total_epochs": 1,
    "trainer.max_actor_ckpt_to_keep": 1,
    "trainer.max_critic_ckpt_to_keep": 1,
    f"{ACTOR}.shuffle": True,
    f"{ACTOR}.use_dynamic_bsz": True,
    f"{ACTOR}.clip_ratio_c": 1e9,  # no dual clip
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.tensor_model_parallel_size": 1,
    f"{ROLLOUT}.val_kwargs.do_sample": True,
}
for optimizer in (f"{ACTOR}.optim", "critic.optim"):
    FIXED |= {f"{optimizer}.weight_decay": 0.0, f"{optimizer}.betas": [0.9, 0.95]}
    # Of verl's schedules, cosine falls to 0 as ours does.
    FIXED |= {f"{optimizer}.lr_scheduler_type": "cosine", f"{optimizer}.zero_indexed_step": False}
LOSSES = {  # the script, or --loss_type: verl's loss_mode and loss_agg_mode
    "ppo": ("vanilla", "token-mean"),
    "rloo": ("vanilla", "seq-mean-token-sum"),
    "grpo": ("vanilla", "seq-mean-token-mean"),
    "dapo": ("vanilla", "token-mean"),
    "dr_grpo": ("vanilla", "seq-mean-token-sum-norm"),
    "gspo": ("gspo", "seq-mean-token-mean"),
    "cispo": ("cispo", "token-mean"),
}
CISPO_BOUND = 5.0  # the largest weight of a token, as in grpo.py
NOT_THERE = {  # refused where they are set
    "stop": "verl's rollout has no stop strings, and would train on longer completions",
    "reward_model": "verl serves reward models itself; give a --reward that asks one",
    "missing_eos_penalty": "verl's reward sees the text alone, not whether EOS ended it",
    "mask_truncated_completions": "verl trains on completions that are cut",
    "overlong_buffer": "verl has it in another reward manager, reward.reward_manager.name=dapo",
}


def config_of(folder: Path) -> tuple[str, Any]:
    """(script, its Config) of the run in `folder`. Raises InputError."""
    settings = settings_of_run(folder)
    script = settings.pop("script")
    if script not in CONFIGS:
        raise InputError(f"{folder}: a run of {script}.py, and verl has nothing like it")
    try:
        return script, CONFIGS[script](**settings)
    except TypeError as e:  # of another version
        raise InputError(f"{folder}/config.json: {first_line(e)}") from e


def check_flags(script: str, config: Any) -> None:
    """Check that verl has what the run asks for. Raises InputError."""
    flags = vars(config)
    faults = {name: reason for name, reason in NOT_THERE.items() if flags.get(name)}
    if flags.get("scale_rewards") in ("batch", "mean"):
        faults["scale_rewards"] = "verl has group and none alone"
    if config.prompts_per_step % config.num_mini_batches:
        faults["num_mini_batches"] = "verl's minibatches hold whole prompts"
    if script == "rloo":
        for name in ("num_epochs", "num_mini_batches"):
            if flags[name] > 1:
                faults[name] = "after the first update verl clips the ratio of a token"
    for name, reason in faults.items():
        remedy = "change it in a copy of config.json in another folder"
        raise InputError(f"--{name} {flags[name]}: {reason}; {remedy}")
    if config.model != "tiny" and adapter_base(config.model) is not None:
        raise InputError(f"--model {config.model}: an adapter; merge it, and give verl the model")


def settings_of(script: str, config: Any, folder: Path, longest: int) -> dict[str, Any]:
    """verl's settings by name, but for the loss and the model; longest: tokens of a prompt."""
    flags, length = vars(config), longest + config.max_new_tokens
    found = dict(FIXED)
    for flag, names in SAME_VALUE.items():
        if flag in flags:
            found |= dict.fromkeys(names.split(), flags[flag])
    rows = config.prompts_per_step * config.num_generations // config.num_mini_batches
    # verl's limit counts the tokens of a pass without padding. The longest row must fit.
    most = max(length, min(rows * length, config.micro_batch_tokens or sys.maxsize))
    found |= dict.fromkeys(
        [f"{ACTOR}.ppo_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu"], most
    )
    without_gradient = [f"{place}.log_prob_max_token_len_per_gpu" for place in (ROLLOUT, REF)]
    without_gradient += ["critic.forward_max_token_len_per_gpu"]
    found |= dict.fromkeys(without_gradient, config.rollout_batch_size * length)
    if flags.get("vf_coef") == 0:  # any other weight doesn't change AdamW's steps
        found["critic.optim.lr"] = 0.0
    return found | {
        "algorithm.adv_estimator": "gae" if script == "ppo" else script,
        "data.train_files": str(folder / "train.parquet"),
        "data.val_files": str(folder / "test.parquet"),
        "data.max_prompt_length": longest,
        "reward.custom_reward_function.path": str(folder / "reward.py"),
        f"{ACTOR}.ppo_mini_batch_size": config.prompts_per_step // config.num_mini_batches,
        "trainer.logger": ["console", *config.report_to],
        "trainer.experiment_name": folder.parent.name,
        "trainer.default_local_dir": str(folder / "checkpoints"),
    }


def loss_settings(script: str, config: Any) -> dict[str, Any]:
    """The loss of the policy, its clip, the KL, and which groups are left out."""
    flags, low, high = vars(config), config.clip_range, vars(config).get("clip_range_high")
    loss_type, high = flags.get("loss_type", script), low if high is None else high
    if loss_type == "cispo":  # the weight of a token lies between 1 - low and 1 + high there
        low, high = 1.0, CISPO_BOUND - 1
    found = {f"{ACTOR}.clip_ratio_low": low, f"{ACTOR}.clip_ratio_high": high}
    found[f"{ACTOR}.policy_loss.loss_mode"], found[f"{ACTOR}.loss_agg_mode"] = LOSSES[loss_type]
    if loss_type == "dr_grpo":
        found[f"{ACTOR}.loss_scale_factor"] = config.max_new_tokens
    if script == "grpo":
        found["algorithm.norm_adv_by_std_in_grpo"] = config.scale_rewards == "group"
    if config.kl_coef > 0 and script == "grpo":  # by default there is no KL there
        found[f"{ACTOR}.use_kl_loss"] = True
        found[f"{ACTOR}.kl_loss_coef"] = config.kl_coef
        found[f"{ACTOR}.kl_loss_type"] = "k3"
    elif config.kl_coef > 0:
        found["algorithm.use_kl_in_reward"] = True
        found["algorithm.kl_ctrl.kl_coef"] = config.kl_coef
        found["algorithm.kl_penalty"] = flags.get("kl_estimator", "k1")
    if flags.get("dynamic_sampling"):
        found |= {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "acc"}
    return found


def model_settings(config: Any, model: PretrainedConfig) -> dict[str, Any]:
    """The model of the policy, and that of the values; + stands before what verl doesn't name."""
    path = str(TINY) if config.model == "tiny" else config.model
    values = {"path": str(Path(path).resolve()) if Path(path).exists() else path}
    found = {}
    if config.lora_r:
        values |= {"lora_rank": config.lora_r, "lora_alpha": 32}
        found[f"{ROLLOUT}.load_format"] = "safetensors"  # verl sends the adapter alone to vLLM
    rates = {n: x for n, x in model.to_dict().items() if "drop" in n and isinstance(x, float)}
    for place in (MODEL, "critic.model"):
        found |= {f"{place}.{name}": value for name, value in values.items()}
        if config.disable_dropout:
            found |= {f"+{place}.override_config.{n}": 0.0 for n, x in rates.items() if x > 0}
    return found


def text_template(tokenizer: Tokenizer, prompts: list[str]) -> str:
    """A chat template that gives a message the tokens that its text has here. InputError."""
    text = "{{ messages[0]['content'] }}"
    options = {"tokenize": True, "return_dict": False, "add_generation_prompt": True}  # as verl
    for template in (text, "{{ bos_token }}" + text, text + "{{ eos_token }}"):
        tokenizer.chat_template = template
        theirs = (tokenizer.apply_chat_template(as_messages(p), **options) for p in prompts)
        if all(ids == prompt_tokens(tokenizer, p) for ids, p in zip(theirs, prompts)):
            return template
    raise InputError("verl would read a prompt as other tokens; make them chat messages")


def write_rows(path: Path, rows: list[dict]) -> None:
    """Write rows in verl's format. Raises InputError."""
    arrow = optional_library("pyarrow", "verl reads Parquet: pip install pyarrow")
    table = [
        {
            "data_source": "plainrlhf",
            "prompt": [{k: m[k] for k in ("role", "content")} for m in as_messages(row["prompt"])],
            "reward_model": {"style": "rule", "ground_truth": str(row.get("answer", ""))},
            # As JSON: a column of Parquet has one type, and ours may have several.
            "extra_info": {"index": index, "columns": json.dumps(row)},
        }
        for index, row in enumerate(rows)
    ]
    try:
        importlib.import_module("pyarrow.parquet").write_table(arrow.Table.from_pylist(table), path)
    except (arrow.ArrowException, OSError, UnicodeError, TypeError) as e:
        raise InputError(f"{path} can't be written ({first_line(e)})") from e


REWARD = """# The reward of the run {run}, for verl. Written by tools/outgrow.py.
import sys

sys.path.insert(0, {repository!r})  # plainrlhf: must be there on every machine

from tools.outgrow import scorer

compute_score = scorer({names!r}, {weights!r})
"""


def scorer(names: list[str], weights: list[float]) -> Callable[..., float]:
    """verl's compute_score: the rewards of one completion, added with their weights."""
    rewards = [load_reward(name, tasks.REWARDS) for name in names]

    def compute_score(
        data_source: str, solution_str: str, ground_truth: str, extra_info: dict, **more: Any
    ) -> float:
        rows = [json.loads(extra_info["columns"])]
        score = score_texts(rewards, weights, rows, [solution_str]).item()
        # A reward that is None is left out of the sum. If all are, there is no score, and verl
        # needs one: 0 would count in the mean of the group, so the run ends.
        if math.isnan(score):
            raise ValueError("every reward is None, and verl needs a number for each completion")
        return score

    return compute_score


def reward_names(config: Any, task: Task) -> list[str]:
    """What --reward calls each reward, with the whole path of its file. Raises InputError."""
    for reward in task.rewards:
        if "completion_ids" in inspect.signature(reward).parameters:
            fault = "asks for completion_ids, and verl passes the text alone"
            raise InputError(f"the reward {reward.__name__} {fault}: score the text")
    if config.reward:
        parts = (spec.rpartition(":") for spec in config.reward)
        return [f"{Path(path).resolve()}:{name}" if path else name for path, _, name in parts]
    names = [
        name for r in task.rewards for name, function in tasks.REWARDS.items() if function is r
    ]
    if len(names) < len(task.rewards):
        raise InputError(f"task {config.task}: a reward isn't in REWARDS; give it with --reward")
    return names


def command(settings: dict[str, Any]) -> str:
    """The text of run.sh. Hydra reads values in JSON."""
    values = {name: json.dumps(x, ensure_ascii=False) for name, x in sorted(settings.items())}
    lines = [
        "# GPUS is their number on each of NODES machines. Further settings may follow.",
        "exec python -m verl.trainer.main_ppo \\",
        *(f"  {shlex.quote(f'{name}={value}')} \\" for name, value in values.items()),
        '  trainer.n_gpus_per_node="${GPUS:-1}" trainer.nnodes="${NODES:-1}" "$@"',
    ]
    return "\n".join(lines) + "\n"


def write(run: Path) -> Path:
    """Write the folder for verl; returns it. Raises InputError."""
    script, config = config_of(run)
    check_flags(script, config)
    here = dataclasses.replace(config, device="cpu", lora_r=0)
    policy, tokenizer = load_policy(here)
    task, folder = load_task(here, tasks, policy, tokenizer), run.resolve() / "verl"
    parts = {"train": [row for step in range(config.num_steps) for row in task.batch(step)]}
    parts["test"] = task.heldout[: config.num_eval_prompts]
    prompts = [row["prompt"] for row in task.train + task.heldout]
    if any(isinstance(prompt, list) and prompt[-1]["role"] == "assistant" for prompt in prompts):
        raise InputError("verl closes a last message of the assistant, which is continued here")
    is_text = isinstance(prompts[0], str)
    if any(isinstance(prompt, str) != is_text for prompt in prompts):
        raise InputError("some prompts are text and some messages: verl has one template for all")
    longest = max(len(prompt_tokens(tokenizer, prompt)) for prompt in prompts)
    settings = settings_of(script, config, folder, longest) | loss_settings(script, config)
    settings |= model_settings(config, policy.config)
    where = {"run": folder.parent.name, "repository": str(Path(__file__).resolve().parent.parent)}
    reward = REWARD.format(names=reward_names(config, task), weights=task.weights, **where)
    try:
        folder.mkdir(exist_ok=True)
        if is_text:
            tokenizer.chat_template = text_template(tokenizer, prompts)
            tokenizer.save_pretrained(folder / "tokenizer")
            for place in (MODEL, "critic.model"):
                settings[f"{place}.tokenizer_path"] = str(folder / "tokenizer")
        for name, rows in parts.items():
            write_rows(folder / f"{name}.parquet", rows)
        if script != "ppo":
            settings = {name: x for name, x in settings.items() if "critic" not in name}
        (folder / "reward.py").write_text(reward, encoding="utf-8")
        (folder / "run.sh").write_text(command(settings), encoding="utf-8")
    except OSError as e:
        raise InputError(f"{folder} can't be written ({e.strerror})") from e
    return folder


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="folder of the run")
    folder = write(parser.parse_args(args).run)
    print(f"{folder} holds train.parquet, test.parquet, reward.py and run.sh. Where verl is:")
    print(f"GPUS=8 sh {shlex.quote(str(folder / 'run.sh'))}")


if __name__ == "__main__":
    run_main(main)
