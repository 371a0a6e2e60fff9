"""What verl needs to repeat a run of ppo.py, grpo.py or rloo.py: prompts, a reward, a command.

`python tools/outgrow.py RUN --to verl` writes RUN/verl with it. The names are those of verl 0.9;
verl itself isn't needed for that.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers import AutoConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from plumbing.data import RewardFunction, Task, load_task, prompt_batch, prompt_tokens
from plumbing.errors import InputError, first_line, optional_library
from plumbing.models import TINY, adapter_base, load_tokenizer, pick_device
from tasks import REWARDS, TASKS

REPOSITORY = Path(__file__).resolve().parent.parent
_ALL = "actor_rollout_ref"
ACTOR, MODEL = f"{_ALL}.actor", f"{_ALL}.model"
ROLLOUT, REF = f"{_ALL}.rollout", f"{_ALL}.ref"

# Our flag: verl's settings, + before what its files don't name. outgrow.md is checked against it.
SETTINGS = dict.fromkeys(
    "task digits prompts subset split prompt_column prompt_template system_prompt".split(),
    "data.train_files",
)
SETTINGS |= dict.fromkeys("eval_prompts eval_split num_eval_prompts".split(), "data.val_files")
SETTINGS |= dict.fromkeys(
    "reward reward_weights reward_clip_range".split(), "reward.custom_reward_function.path"
)
SETTINGS |= {
    "model": f"{MODEL}.path {MODEL}.tokenizer_path critic.model.path critic.model.tokenizer_path",
    "num_steps": "trainer.total_training_steps trainer.total_epochs",
    "prompts_per_step": "data.train_batch_size",
    "num_generations": f"{ROLLOUT}.n",
    "max_new_tokens": f"data.max_response_length {ACTOR}.loss_scale_factor",
    "temperature": f"{ROLLOUT}.temperature {ROLLOUT}.val_kwargs.temperature",
    "rollout_batch_size": f"{ROLLOUT}.log_prob_max_token_len_per_gpu"
    f" {REF}.log_prob_max_token_len_per_gpu critic.forward_max_token_len_per_gpu",
    "dynamic_sampling": "algorithm.filter_groups.enable algorithm.filter_groups.metric",
    "importance_cap": "algorithm.rollout_correction.rollout_is"
    " algorithm.rollout_correction.rollout_is_threshold",
    "kl_coef": "algorithm.use_kl_in_reward algorithm.kl_ctrl.kl_coef algorithm.kl_penalty"
    f" {ACTOR}.use_kl_loss {ACTOR}.kl_loss_coef {ACTOR}.kl_loss_type",
    "kl_estimator": "algorithm.kl_penalty",
    "gamma": "algorithm.gamma",
    "lam": "algorithm.lam",
    "overlong_buffer": "reward.reward_manager.name +reward.reward_kwargs.max_resp_len"
    " +reward.reward_kwargs.overlong_buffer_cfg",
    "scale_rewards": "algorithm.norm_adv_by_std_in_grpo",
    "loss_type": f"{ACTOR}.loss_agg_mode {ACTOR}.loss_scale_factor {ACTOR}.policy_loss.loss_mode",
    "importance_sampling_level": f"{ACTOR}.policy_loss.loss_mode",
    "clip_range": f"{ACTOR}.clip_ratio {ACTOR}.clip_ratio_low {ACTOR}.clip_ratio_high",
    "clip_range_high": f"{ACTOR}.clip_ratio_high",
    "cispo_bound": f"{ACTOR}.clip_ratio_low {ACTOR}.clip_ratio_high",
    "clip_range_value": "critic.cliprange_value",
    "vf_coef": "critic.optim.lr",
    "learning_rate": f"{ACTOR}.optim.lr critic.optim.lr",
    "warmup_steps": f"{ACTOR}.optim.lr_warmup_steps critic.optim.lr_warmup_steps",
    "num_epochs": f"{ACTOR}.ppo_epochs",
    "num_mini_batches": f"{ACTOR}.ppo_mini_batch_size",
    "micro_batch_size": f"{ACTOR}.ppo_max_token_len_per_gpu critic.ppo_max_token_len_per_gpu",
    "micro_batch_tokens": f"{ACTOR}.ppo_max_token_len_per_gpu critic.ppo_max_token_len_per_gpu",
    "entropy_coef": f"{ACTOR}.entropy_coeff",
    "max_grad_norm": f"{ACTOR}.optim.clip_grad critic.optim.clip_grad",
    "disable_dropout": f"+{MODEL}.override_config +critic.model.override_config",
    "lora_r": f"{MODEL}.lora_rank {MODEL}.lora_alpha {ROLLOUT}.load_format"
    " critic.model.lora_rank critic.model.lora_alpha",
    "gradient_checkpointing": f"{MODEL}.enable_gradient_checkpointing"
    " critic.model.enable_gradient_checkpointing",
    "bf16": f"{ROLLOUT}.dtype +{ACTOR}.fsdp_config.mixed_precision.param_dtype"
    f" +{REF}.fsdp_config.mixed_precision.param_dtype +critic.fsdp.mixed_precision.param_dtype"
    f" +{MODEL}.override_config {MODEL}.use_remove_padding"
    " +critic.model.override_config critic.model.use_remove_padding",
    "seed": f"{ROLLOUT}.seed {ACTOR}.data_loader_seed critic.data_loader_seed",
    "save_every": "trainer.save_freq",
    "eval_every": "trainer.test_freq",
    "eval_generations": f"{ROLLOUT}.val_kwargs.n",
    "tensorboard": "trainer.logger",
    "wandb": "trainer.logger",
    "output_dir": "trainer.default_local_dir",
}
OTHERS = """algorithm.adv_estimator data.max_prompt_length trainer.experiment_name
trainer.n_gpus_per_node trainer.nnodes""".split()  # which algorithm, and where
# Refused where they are set, with the reason.
NOT_THERE = {
    "stop": "verl's rollout has no stop strings, and would train on longer completions",
    "reward_model": "verl serves reward models itself, on another text than here; give a --reward"
    " that asks one",
    "missing_eos_penalty": "verl's reward sees the text alone, not whether EOS ended it",
    "whiten_rewards": "verl doesn't scale rewards",
    "normalize_advantages": "verl's RLOO doesn't scale advantages",
    "mask_truncated_completions": "verl trains on completions that are cut",
}
# Neither needed nor refused.
LEFT_OUT = """value_init verifier merge_adapter compile device overwrite resume save_best
sample_every record_tokens""".split()
LOSS_AGG_MODES = {
    "ppo": "token-mean", "rloo": "seq-mean-token-sum", "grpo": "seq-mean-token-mean",
    "dapo": "token-mean", "cispo": "token-mean", "dr_grpo": "seq-mean-token-sum-norm",
}  # fmt: skip
_OPTIMIZER = {  # as AdamW is set here; cosine, like our schedule, ends at 0
    "weight_decay": 0.0, "betas": [0.9, 0.95], "lr_scheduler_type": "cosine",
    "zero_indexed_step": False,
}  # fmt: skip
FIXED = {  # what has no flag here and another default there
    "data.shuffle": False, f"{ACTOR}.clip_ratio_c": 1e9, f"{ACTOR}.shuffle": True,
    f"{ACTOR}.use_dynamic_bsz": True, f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.tensor_model_parallel_size": 1, f"{ROLLOUT}.val_kwargs.do_sample": True,
    "trainer.project_name": "plainrlhf", "trainer.max_actor_ckpt_to_keep": 1,
    **{f"{ACTOR}.optim.{name}": value for name, value in _OPTIMIZER.items()},
}  # fmt: skip
FIXED_CRITIC = {"trainer.max_critic_ckpt_to_keep": 1}
FIXED_CRITIC |= {f"critic.optim.{name}": value for name, value in _OPTIMIZER.items()}


def check_flags(script: str, config: Any) -> None:
    """Check that verl has what is asked for. Raises InputError."""
    flags, remedy = vars(config), "change it in a copy of config.json in another folder"
    for name, reason in NOT_THERE.items():
        if value := flags.get(name):
            raise InputError(f"--{name} {value}: {reason}; {remedy}")
    if flags.get("scale_rewards") == "batch":
        raise InputError(f"--scale_rewards batch: verl has group and none alone; {remedy}")
    if flags.get("loss_type") == "cispo" and config.importance_sampling_level == "sequence":
        fault = "verl's CISPO weighs tokens alone"
        raise InputError(f"--importance_sampling_level sequence: {fault}; {remedy}")
    if script == "rloo" and (updates := config.num_epochs * config.num_mini_batches) > 1:
        flag = "num_epochs" if config.num_epochs > 1 else "num_mini_batches"
        fault = f"with {updates} updates verl clips the ratio of a token, not of the completion"
        raise InputError(f"--{flag} {getattr(config, flag)}: {fault}; {remedy}")
    if config.prompts_per_step % config.num_mini_batches:
        fault = f"verl's minibatches hold whole prompts, and can't share {config.prompts_per_step}"
        raise InputError(f"--num_mini_batches {config.num_mini_batches}: {fault}; {remedy}")
    if config.model != "tiny" and adapter_base(config.model) is not None:
        fault = "holds an adapter; --merge_adapter saves a whole model, give verl that"
        raise InputError(f"--model {config.model}: {fault}")


# --- The settings ---


def settings_of(script: str, config: Any, folder: Path, longest: int) -> dict[str, Any]:
    """verl's settings by name, but for the model's; longest: tokens of a prompt."""
    flags, has_critic = vars(config), script == "ppo"
    length = longest + config.max_new_tokens
    rows = config.prompts_per_step * config.num_generations // config.num_mini_batches
    # A pass counts tokens in verl, of rows of any length: this holds for any number of GPUs. One
    # row must fit.
    most = min(config.micro_batch_size or rows, rows) * length
    most = max(length, min(most, config.micro_batch_tokens or most))
    without_gradient = config.rollout_batch_size * length
    found = FIXED | (FIXED_CRITIC if has_critic else {}) | loss_settings(script, config) | {
        "algorithm.adv_estimator": "gae" if has_critic else script,
        "data.train_files": str(folder / "train.parquet"),
        "data.val_files": str(folder / "test.parquet"),
        "data.train_batch_size": config.prompts_per_step,
        "data.max_prompt_length": longest, "data.max_response_length": config.max_new_tokens,
        "reward.custom_reward_function.path": str(folder / "reward.py"),
        f"{ROLLOUT}.n": config.num_generations, f"{ROLLOUT}.temperature": config.temperature,
        f"{ROLLOUT}.val_kwargs.temperature": config.temperature,
        f"{ROLLOUT}.val_kwargs.n": config.eval_generations, f"{ROLLOUT}.seed": config.seed,
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu": without_gradient,
        f"{REF}.log_prob_max_token_len_per_gpu": without_gradient,
        f"{ACTOR}.ppo_max_token_len_per_gpu": most, f"{ACTOR}.data_loader_seed": config.seed,
        f"{ACTOR}.ppo_epochs": config.num_epochs,
        f"{ACTOR}.ppo_mini_batch_size": config.prompts_per_step // config.num_mini_batches,
        **optimizer_settings(f"{ACTOR}.optim", config, config.learning_rate),
        "trainer.total_training_steps": config.num_steps,
        "trainer.total_epochs": 1,  # train.parquet holds the rows of all steps
        "trainer.save_freq": config.save_every, "trainer.test_freq": config.eval_every,
        "trainer.logger": ["console", *(x for x in ("tensorboard", "wandb") if flags[x])],
        "trainer.experiment_name": folder.parent.name,
        "trainer.default_local_dir": str(folder / "checkpoints"),
    }  # fmt: skip
    if has_critic:
        # AdamW's steps don't depend on the weight of the value loss, unless it is 0.
        rate = config.learning_rate if config.vf_coef else 0.0
        found |= optimizer_settings("critic.optim", config, rate) | {
            "algorithm.gamma": config.gamma, "algorithm.lam": config.lam,
            "critic.cliprange_value": config.clip_range_value,
            "critic.data_loader_seed": config.seed, "critic.ppo_max_token_len_per_gpu": most,
            "critic.forward_max_token_len_per_gpu": without_gradient,
        }  # fmt: skip
    return found | reward_settings(config) | correction_settings(script, config)


def optimizer_settings(prefix: str, config: Any, learning_rate: float) -> dict[str, Any]:
    """What the run says of one of verl's two optimisers."""
    return {
        f"{prefix}.lr": learning_rate, f"{prefix}.lr_warmup_steps": config.warmup_steps,
        f"{prefix}.clip_grad": config.max_grad_norm,
    }  # fmt: skip


def loss_settings(script: str, config: Any) -> dict[str, Any]:
    """The loss of the policy, its clip and the KL."""
    flags, low = vars(config), config.clip_range
    loss_type = flags.get("loss_type", script)
    high = low if flags.get("clip_range_high") is None else config.clip_range_high
    if loss_type == "cispo":  # the weight lies between 1 - low and 1 + high there
        low, high = 1.0, config.cispo_bound - 1
    is_sequence = flags.get("importance_sampling_level") == "sequence"
    mode = "gspo" if is_sequence else "cispo" if loss_type == "cispo" else "vanilla"
    # clip_ratio_low and _high are 0.2 there by default: clip_ratio alone would change nothing.
    found = {
        f"{ACTOR}.policy_loss.loss_mode": mode, f"{ACTOR}.entropy_coeff": config.entropy_coef,
        f"{ACTOR}.clip_ratio": config.clip_range,
        f"{ACTOR}.clip_ratio_low": low, f"{ACTOR}.clip_ratio_high": high,
        f"{ACTOR}.loss_agg_mode": LOSS_AGG_MODES[loss_type],
    }  # fmt: skip
    if loss_type == "dr_grpo":
        found[f"{ACTOR}.loss_scale_factor"] = config.max_new_tokens
    if script == "grpo":
        found["algorithm.norm_adv_by_std_in_grpo"] = config.scale_rewards == "group"
    if config.kl_coef == 0:  # the default there: no KL, and no reference model
        return found
    if script == "grpo":
        names = ("use_kl_loss", "kl_loss_coef", "kl_loss_type")
        values = (True, config.kl_coef, "k3")
        return found | {f"{ACTOR}.{n}": v for n, v in zip(names, values, strict=True)}
    return found | {
        "algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": config.kl_coef,
        "algorithm.kl_penalty": flags.get("kl_estimator", "k1"),
    }  # fmt: skip


def reward_settings(config: Any) -> dict[str, Any]:
    """The options of DAPO that concern the reward: length penalty and filter of groups."""
    found: dict[str, Any] = {}
    if buffer := vars(config).get("overlong_buffer"):
        found = {
            "reward.reward_manager.name": "dapo",
            "+reward.reward_kwargs.max_resp_len": config.max_new_tokens,
            "+reward.reward_kwargs.overlong_buffer_cfg": {
                "enable": True, "len": buffer, "penalty_factor": 1.0, "log": False,
            },
        }  # fmt: skip
    if vars(config).get("dynamic_sampling"):
        # acc is what compute_score returns: without the penalty, as here.
        found |= {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "acc"}
    return found


def correction_settings(script: str, config: Any) -> dict[str, Any]:
    """The weights pi_old / pi_sampler, of a token, or of a completion in RLOO."""
    if config.importance_cap is None:
        return {}
    place = "algorithm.rollout_correction.rollout_is"
    kind = "sequence" if script == "rloo" else "token"
    return {place: kind, f"{place}_threshold": config.importance_cap}


def model_settings(script: str, config: Any, path: str, tokenizer: str | None) -> dict[str, Any]:
    """The model of the policy, and that of the values: where it is and how it computes."""
    found = {"path": path, "enable_gradient_checkpointing": config.gradient_checkpointing}
    if tokenizer is not None:
        found["tokenizer_path"] = tokenizer
    if config.lora_r:
        found |= {"lora_rank": config.lora_r, "lora_alpha": 32}
    changes: dict[str, Any] = dropout_of(path) if config.disable_dropout else {}
    if not config.bf16:  # FlashAttention, their default, knows 16 bits alone
        changes = changes | {"attn_implementation": "sdpa"}
        found["use_remove_padding"] = False
    places = [MODEL, "critic.model"] if script == "ppo" else [MODEL]
    settings = {f"{place}.{name}": value for place in places for name, value in found.items()}
    for place in places:
        settings |= {f"+{place}.override_config.{n}": v for n, v in changes.items()}
    if config.lora_r:
        settings[f"{ROLLOUT}.load_format"] = "safetensors"  # the base isn't sent to vLLM
    if not config.bf16:
        settings[f"{ROLLOUT}.dtype"] = "float32"
        for place in [f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", "critic.fsdp"][
            : len(places) + 1
        ]:
            settings[f"+{place}.mixed_precision.param_dtype"] = "fp32"
    return settings


def dropout_of(path: str) -> dict[str, float]:
    """The dropout rates that the model's configuration has, as 0: name -> 0."""
    try:
        numbers = AutoConfig.from_pretrained(path).to_dict()
    except (OSError, ValueError, KeyError) as e:
        raise InputError(f"--model {path}: its config can't be read ({first_line(e)})") from e
    noisy = [n for n, v in numbers.items() if "drop" in n and isinstance(v, float)]
    return {name: 0.0 for name in noisy if numbers[name] > 0}


# --- The files ---


def text_template(tokenizer: Tokenizer, prompts: list[str]) -> str:
    """A chat template that gives a message the tokens that its text has here. InputError."""
    text = "{{ messages[0]['content'] }}"
    for template in (text, "{{ bos_token }}" + text, text + "{{ eos_token }}"):
        tokenizer.chat_template = template
        pairs = (
            (verl_tokens(tokenizer, as_messages(p)), prompt_tokens(tokenizer, p)) for p in prompts
        )
        if all(theirs == ours for theirs, ours in pairs):
            return template
    raise InputError("verl would read a prompt as other tokens; make them chat messages")


def verl_tokens(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[int]:
    """The ids that verl feeds to the model for a prompt."""
    options = {"tokenize": True, "return_dict": False, "add_generation_prompt": True}
    return tokenizer.apply_chat_template(messages, **options)


def as_messages(prompt: str | list[dict[str, str]]) -> list[dict[str, str]]:
    """The prompt as verl wants it, in messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def json_columns(rows: list[dict]) -> list[str]:
    """The columns that don't come back from Parquet as they were: of several types, say."""
    pyarrow = _pyarrow()

    def comes_back(values: list) -> bool:
        try:
            return repr(pyarrow.array(values).to_pylist()) == repr(values)
        except (pyarrow.ArrowException, OverflowError, UnicodeError, TypeError):
            return False

    keys = dict.fromkeys(key for row in rows for key in row)
    return [key for key in keys if not comes_back([row.get(key) for row in rows])]


def write_rows(path: Path, rows: list[dict], kind: str, as_json: list[str]) -> None:
    """Write rows in verl's format; as_json: columns that are written so. Raises InputError."""
    pyarrow, table = _pyarrow(), []
    keys = dict.fromkeys(key for row in rows for key in row)
    try:
        for index, row in enumerate(rows):
            columns = {key: row.get(key) for key in keys}
            columns |= {key: json.dumps(columns[key]) for key in as_json if key in columns}
            # In a folder of their own: verl puts more into extra_info.
            table.append({
                "data_source": "plainrlhf", "prompt": as_messages(row["prompt"]), "ability": kind,
                "reward_model": {"style": "rule", "ground_truth": str(row.get("answer", ""))},
                "extra_info": {"index": index, "columns": columns},
            })  # fmt: skip
        arrow = pyarrow.Table.from_pylist(table)
        importlib.import_module("pyarrow.parquet").write_table(arrow, path)
    except (pyarrow.ArrowException, OSError, UnicodeError, TypeError) as e:
        raise InputError(f"{path} can't be written ({first_line(e)})") from e


def _pyarrow() -> ModuleType:
    return optional_library("pyarrow", "--to verl: pip install pyarrow")


REWARD = '''"""The reward of the run {run}, for verl. Written by tools/outgrow.py."""

import json
import math
import sys

sys.path.insert(0, {repository!r})  # plainrlhf: must be there on every machine

from plumbing.data import Task, load_reward
from plumbing.data import score_texts
from tasks import REWARDS

NAMES, WEIGHTS = {names!r}, {weights!r}
LOWEST, HIGHEST = {bounds}  # of the sum: --reward_clip_range
JSON_COLUMNS = {as_json!r}  # Parquet couldn't hold them otherwise
TASK = Task([], [], [load_reward(name, REWARDS) for name in NAMES], WEIGHTS)


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """The rewards of one completion, added with their weights."""
    columns = dict(extra_info["columns"])
    columns |= {{key: json.loads(columns[key]) for key in JSON_COLUMNS if key in columns}}
    score = score_texts(TASK, [columns], [solution_str]).item()
    # A reward that is None is left out of the sum. If all are, there is no score, and verl needs
    # one: 0 would count in the mean of the group, so the run ends.
    if math.isnan(score):
        raise ValueError("every reward is None, and verl needs a number for each completion")
    return min(max(score, LOWEST), HIGHEST)
'''


def reward_file(config: Any, task: Task, folder: Path, as_json: list[str]) -> str:
    """The text of reward.py. Raises InputError."""
    for reward in task.rewards:
        if "completion_ids" in inspect.signature(reward).parameters:
            fault = "asks for completion_ids, and verl passes the text alone"
            raise InputError(f"the reward {reward.__name__} {fault}: score the text")
    names = [absolute_spec(spec) for spec in config.reward] or [*map(spec_of, task.rewards)]
    low, high = vars(config).get("reward_clip_range") or ("-math.inf", "math.inf")
    return REWARD.format(
        run=folder.parent.name, repository=str(REPOSITORY), names=names, weights=task.weights,
        bounds=f"{low}, {high}", as_json=as_json,
    )  # fmt: skip


def absolute_spec(spec: str) -> str:
    """The value of --reward with the whole path of the file."""
    path, colon, name = spec.rpartition(":")
    return spec if spec in REWARDS else f"{Path(path).resolve()}{colon}{name}"


def spec_of(reward: RewardFunction) -> str:
    """What --reward would call a reward of a task of tasks.py. Raises InputError."""
    for name, function in REWARDS.items():
        if function is reward:
            return name
    name = getattr(reward, "__name__", type(reward).__name__)
    if getattr(sys.modules.get(reward.__module__), name, None) is not reward:
        raise InputError(f"the reward {name} of the task has no name to load it by: use --reward")
    return f"{inspect.getsourcefile(reward)}:{name}"


def command(settings: dict[str, Any], tensorboard: Path | None) -> str:
    """The text of run.sh."""
    lines = [
        "#!/bin/sh",
        "# GPUS is their number on each of NODES machines. Further settings may follow.",
    ]
    if tensorboard is not None:
        lines.append(f"export TENSORBOARD_DIR={shlex.quote(str(tensorboard))}")
    lines.append("exec python -m verl.trainer.main_ppo \\")
    lines += [f"  {shlex.quote(f'{n}={in_hydra(v)}')} \\" for n, v in sorted(settings.items())]
    last = '  trainer.n_gpus_per_node="${GPUS:-1}" trainer.nnodes="${NODES:-1}" "$@"'
    return "\n".join([*lines, last]) + "\n"


def in_hydra(value: Any) -> str:
    """A value as Hydra's grammar has it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{n}:{in_hydra(v)}" for n, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(in_hydra, value)) + "]"
    if not isinstance(value, str):
        return json.dumps(value)
    if re.fullmatch(r"[A-Za-z/][\w./-]*", value) and value not in ("null", "true", "false"):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def write(run: Path, script: str, config: Any) -> Path:
    """Write the folder for verl; returns it. Raises InputError."""
    check_flags(script, config)
    folder = run.resolve() / "verl"
    tokenizer = load_tokenizer(config.model)
    task = load_task(config, TASKS, REWARDS, tokenizer, pick_device("cpu"))
    count = config.num_steps * config.prompts_per_step
    train = prompt_batch(task.train, 0, count, config.seed)
    heldout = task.heldout[: config.num_eval_prompts]
    rows, prompts = train + heldout, [row["prompt"] for row in task.train + task.heldout]
    if len({isinstance(prompt, str) for prompt in prompts}) > 1:
        raise InputError("some prompts are text and some messages: verl has one template for all")
    longest = max(len(prompt_tokens(tokenizer, prompt)) for prompt in prompts)
    as_json = json_columns(rows)
    if not isinstance(prompts[0], str) and "prompt" in as_json:
        raise InputError("the messages must all have the keys role and content alone: Parquet")
    reward, path = reward_file(config, task, folder, as_json), str(TINY)
    if config.model != "tiny":
        path = str(Path(config.model).resolve()) if Path(config.model).exists() else config.model
    is_text = isinstance(prompts[0], str)
    if is_text:
        tokenizer.chat_template = text_template(tokenizer, prompts)

    try:
        folder.mkdir(exist_ok=True)
        if is_text:
            tokenizer.save_pretrained(folder / "tokenizer")
    except OSError as e:
        raise InputError(f"{folder} can't be written ({e.strerror})") from e
    kind = "prompts" if config.prompts else config.task
    for name, part in (("train", train), ("test", heldout)):
        write_rows(folder / f"{name}.parquet", part, kind, as_json)
    (folder / "reward.py").write_text(reward, encoding="utf-8")
    template = str(folder / "tokenizer") if is_text else None
    settings = settings_of(script, config, folder, longest)
    settings |= model_settings(script, config, path, template)
    tensorboard = folder / "tensorboard" if config.tensorboard else None
    (folder / "run.sh").write_text(command(settings, tensorboard), encoding="utf-8")
    return folder
