"""Write the job of a run for verl, which has PPO, GRPO and RLOO on many GPUs and machines.

  python tools/outgrow.py runs/ppo-tiny-add-s0     # needs no verl
  GPUS=8 sh runs/ppo-tiny-add-s0/verl/run.sh       # where verl 0.9 is installed

All settings come from the run's config.json; start it in the folder where the run was started.
Writes RUN/verl: train.jsonl, test.jsonl, tokenizer/, reward.py and run.sh. Prints the flags that
verl has nothing for. What differs there: docs/outgrow.md.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from plumbing.data import Prompt, Task, as_messages, load_task, prompt_tokens
from plumbing.errors import InputError, first_line
from plumbing.models import TINY, adapter_base, load_policy
from plumbing.rewards import load_reward, score_texts
from plumbing.run import run_main

CONFIGS = {"ppo": ppo.Config, "grpo": grpo.Config, "rloo": rloo.Config}
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
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
    "data.shuffle": False,  # train.jsonl has the prompts of all steps in their order
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
NOT_THERE = "stop missing_eos_penalty mask_truncated_completions overlong_buffer verifier".split()
REPOSITORY = Path(__file__).resolve().parent.parent


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


def not_carried_over(config: Any) -> list[str]:
    """The flags of the run that verl has nothing for."""
    flags = vars(config)
    found = [name for name in NOT_THERE if flags.get(name)]
    if flags.get("scale_rewards") in ("batch", "mean"):
        found.append("scale_rewards")  # verl divides by the std of the group or not at all
    if flags.get("vf_coef") == 0:
        found.append("vf_coef")
    if config.prompts_per_step % config.num_mini_batches:
        found.append("num_mini_batches")  # verl's minibatches hold whole prompts
    return found


def settings_of(script: str, config: Any, folder: Path, longest: int) -> dict[str, Any]:
    """verl's settings by name, but for the loss and the model; longest: tokens of a prompt."""
    flags, found = vars(config), dict(FIXED)
    for flag, names in SAME_VALUE.items():
        if flag in flags:
            found |= dict.fromkeys(names.split(), flags[flag])
    return found | {
        "algorithm.adv_estimator": "gae" if script == "ppo" else script,
        "data.train_files": str(folder / "train.jsonl"),
        "data.val_files": str(folder / "test.jsonl"),
        "data.max_prompt_length": longest,
        "reward.custom_reward_function.path": str(folder / "reward.py"),
        f"{ACTOR}.ppo_mini_batch_size": config.prompts_per_step // config.num_mini_batches,
        "trainer.logger": ["console", *config.report_to],
        "trainer.experiment_name": folder.parent.name,
        "trainer.default_local_dir": str(folder / "checkpoints"),
    }


def loss_settings(script: str, config: Any) -> dict[str, Any]:
    """The loss of the policy, its clip, the KL, and whether flat groups are left out."""
    flags, low, high = vars(config), config.clip_range, vars(config).get("clip_range_high")
    loss_type, high = flags.get("loss_type", script), low if high is None else high
    if loss_type == "cispo":  # the weight of a token lies between 1 - low and 1 + high there
        low, high = 1.0, CISPO_BOUND - 1
    mode, aggregation = LOSSES[loss_type]
    in_loss = script == "grpo"
    return {
        f"{ACTOR}.clip_ratio_low": low,
        f"{ACTOR}.clip_ratio_high": high,
        f"{ACTOR}.policy_loss.loss_mode": mode,
        f"{ACTOR}.loss_agg_mode": aggregation,
        f"{ACTOR}.loss_scale_factor": config.max_new_tokens,  # of Dr. GRPO
        f"{ACTOR}.use_kl_loss": in_loss and config.kl_coef > 0,
        f"{ACTOR}.kl_loss_coef": config.kl_coef,
        f"{ACTOR}.kl_loss_type": "k3",
        "algorithm.use_kl_in_reward": not in_loss and config.kl_coef > 0,
        "algorithm.kl_ctrl.kl_coef": config.kl_coef,
        "algorithm.kl_penalty": flags.get("kl_estimator", "k1"),
        "algorithm.norm_adv_by_std_in_grpo": flags.get("scale_rewards") == "group",
        "algorithm.filter_groups.enable": flags.get("dynamic_sampling", 0) > 0,
    }


def model_settings(config: Any, model: PretrainedConfig, folder: Path) -> dict[str, Any]:
    """The model of the policy, and that of the values; + stands before what verl doesn't name."""
    path = TINY if config.model == "tiny" else Path(config.model)
    values = {"path": str(path.resolve()) if path.exists() else config.model}
    values["tokenizer_path"] = str(folder / "tokenizer")
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


def choose_template(tokenizer: Tokenizer, prompts: list[Prompt]) -> int:
    """Give the tokenizer a chat template with which verl reads the prompts as the tokens that they
    have here: its own, or one for plain text. Returns the length of the longest. InputError.
    """
    ours = [prompt_tokens(tokenizer, prompt) for prompt in prompts]
    text = "{{ messages[0]['content'] }}"
    options = {"tokenize": True, "return_dict": False, "add_generation_prompt": True}  # as verl
    for template in (tokenizer.chat_template, text, "{{ bos_token }}" + text):
        tokenizer.chat_template = template or text
        if ours == [tokenizer.apply_chat_template(as_messages(p), **options) for p in prompts]:
            return max(map(len, ours))
    fault = "verl would read a prompt as other tokens"
    raise InputError(f"{fault}: give chat messages, of which the last is the user's")


def line_of(row: dict, index: int) -> str:
    """A row in verl's format."""
    messages = as_messages(row["prompt"])
    found = {
        "data_source": "plainrlhf",
        "prompt": [{key: m[key] for key in ("role", "content")} for m in messages],
        # As JSON: there a column has one type, and texts that look like dates become dates.
        "reward_model": {"style": "rule", "ground_truth": json.dumps(row.get("answer"))},
        "extra_info": {"index": index, "columns": json.dumps(row)},
    }
    return json.dumps(found) + "\n"


REWARD = """import sys

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
    """What --reward calls each reward, with the whole path of its file."""
    if not config.reward:  # the task's own
        return [f"{tasks.__file__}:{reward.__name__}" for reward in task.rewards]
    parts = (spec.rpartition(":") for spec in config.reward)
    return [f"{Path(path).resolve()}:{name}" if path else name for path, _, name in parts]


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
    if config.model != "tiny" and adapter_base(config.model) is not None:
        raise InputError(f"--model {config.model}: an adapter; merge it, and give verl the model")
    if config.reward_model:
        fault = "verl serves reward models itself; give a --reward that asks one"
        raise InputError(f"--reward_model {config.reward_model}: {fault}")
    here = dataclasses.replace(config, device="cpu", lora_r=0)
    policy, tokenizer = load_policy(here)
    task, folder = load_task(here, tasks, policy, tokenizer), run.resolve() / "verl"
    names = reward_names(config, task)
    scorer(names, task.weights)  # they can be loaded by these names
    parts = {"train": [row for step in range(config.num_steps) for row in task.batch(step)]}
    parts["test"] = task.heldout[: config.num_eval_prompts]
    longest = choose_template(tokenizer, [row["prompt"] for row in task.train + task.heldout])
    settings = settings_of(script, config, folder, longest) | loss_settings(script, config)
    settings |= model_settings(config, policy.config, folder)
    if script != "ppo":
        settings = {name: x for name, x in settings.items() if "critic" not in name}
    reward = REWARD.format(repository=str(REPOSITORY), names=names, weights=task.weights)
    try:
        folder.mkdir(exist_ok=True)
        tokenizer.save_pretrained(folder / "tokenizer")
        for name, rows in parts.items():
            lines = [line_of(row, index) for index, row in enumerate(rows)]
            (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        (folder / "reward.py").write_text(reward, encoding="utf-8")
        (folder / "run.sh").write_text(command(settings), encoding="utf-8")
    except OSError as e:
        raise InputError(f"{folder} can't be written ({e.strerror})") from e
    for name in not_carried_over(config):
        print(f"not carried over: --{name} {getattr(config, name)}")
    return folder


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="folder of the run")
    folder = write(parser.parse_args(args).run)
    print(f"{folder} holds train.jsonl, test.jsonl, reward.py and run.sh. Where verl is:")
    print(f"GPUS=8 sh {shlex.quote(str(folder / 'run.sh'))}")


if __name__ == "__main__":
    run_main(main)
