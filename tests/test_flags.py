"""Every flag reaches the place where it acts: another value leaves another run behind."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from small import letter_tokenizer, save_model, small_llama
from transformers import GPT2Config, GPT2ForSequenceClassification

import grpo
import ppo
import rloo

SCRIPTS = {"ppo": ppo, "grpo": grpo, "rloo": rloo}
MEASURED = ("time/", "memory/", "tokens_per_second")
BASE = {"num_steps": 2, "warmup_steps": 1, "learning_rate": 1e-3, "max_new_tokens": 5}
SHARED = "ppo grpo rloo"

# flag: (scripts, another value, what else is set in both runs)
CHANGES = {
    "model": (SHARED, "llama", {}),
    "reward": (SHARED, "reward.py:share_of_a", {}),
    "reward_weights": (SHARED, "2.0", {}),
    "reward_model": (SHARED, "judge", {}),
    "prompt_column": (SHARED, "other", {}),
    "prompt_template": (SHARED, "b {prompt}", {}),
    "system_prompt": (SHARED, "a b", {"model": "chat"}),
    "eval_prompts": (SHARED, "prompts.jsonl", {}),
    "verifier": (SHARED, "reward.py:share_of_a", {}),
    "stop": (SHARED, ["a", "b"], {"max_new_tokens": 12}),
    "num_generations": (SHARED, 2, {"prompts_per_step": 4}),
    "max_new_tokens": (SHARED, 3, {}),
    "temperature": (SHARED, 1.3, {}),
    "seed": (SHARED, 1, {}),
    "num_steps": (SHARED, 3, {}),
    "prompts_per_step": (SHARED, 4, {}),
    "kl_coef": (SHARED, 0.7, {}),
    "learning_rate": (SHARED, 2e-3, {}),
    "warmup_steps": (SHARED, 4, {}),
    "num_epochs": (SHARED, 3, {}),
    "num_mini_batches": (SHARED, 4, {}),
    "clip_range": (SHARED, 1e-3, {"num_epochs": 3, "learning_rate": 1e-2}),
    "max_grad_norm": (SHARED, 0.01, {"optimizer": "SGD"}),
    "disable_dropout": (SHARED, "false", {}),
    "lora_r": (SHARED, 2, {}),
    "merge_adapter": (SHARED, "true", {"lora_r": 2}),
    "bf16": (SHARED, "true", {}),
    "output_dir": (SHARED, "elsewhere", {}),
    "save_best": (SHARED, "true", {"learning_rate": 1e-2, "eval_every": 1, "num_steps": 3}),
    "sample_every": (SHARED, 1, {}),
    "eval_every": (SHARED, 1, {}),
    "num_eval_prompts": (SHARED, 1, {}),
    "eval_generations": (SHARED, 3, {}),
    "entropy_coef": (SHARED, 0.5, {}),
    "importance_cap": (SHARED, 1.0, {"bf16": "true"}),
    "dynamic_sampling": ("grpo", 2, {"reward": "reward.py:rarely"}),
    "overlong_buffer": ("grpo", 3, {}),
    "record_tokens": (SHARED, "true", {}),
    "kl_estimator": ("ppo", "k3", {"kl_coef": 0.7}),
    "missing_eos_penalty": ("ppo", 2.0, {}),
    "whiten_rewards": ("ppo", "true", {}),
    "gamma": ("ppo", 0.5, {}),
    "lam": ("ppo", 0.2, {}),
    "clip_range_value": ("ppo", 1e-3, {}),
    "vf_coef": ("ppo", 2.0, {}),
    "value_init": ("ppo", "reward_model", {"reward_model": "judge"}),
    "scale_rewards": ("grpo", "none", {}),
    "loss_type": ("grpo", "dapo", {}),
    "importance_sampling_level": ("grpo", "sequence", {"num_epochs": 2}),
    "clip_range_high": ("grpo", 0.5, {"clip_range": 1e-3, "num_epochs": 3}),
    "cispo_bound": ("grpo", 1.0, {"loss_type": "cispo", "num_epochs": 3, "learning_rate": 1e-2}),
    "mask_truncated_completions": ("grpo", "true", {}),
    "reward_clip_range": ("rloo", [-1.0, 1.0], {}),
    "normalize_advantages": ("rloo", "true", {}),
}  # fmt: skip
SAME = {
    "task": "prompts of one's own take its place: test_tasks.py",
    "digits": "of the task add alone: test_tasks.py",
    "prompts": "read by every run here; their columns: test_tasks.py",
    "split": "of a dataset alone: test_prompts.py",
    "subset": "of a dataset alone: test_prompts.py",
    "eval_split": "of a dataset alone: test_prompts.py",
    "device": "test_pretended_cuda.py: the same to the bit",
    "rollout_batch_size": "memory and speed: test_scripts.py",
    "micro_batch_size": "memory and speed: test_scripts.py",
    "micro_batch_tokens": "memory and speed: test_scripts.py",
    "gradient_checkpointing": "memory and speed: test_scripts.py",
    "compile": "speed: test_scripts.py",
    "overwrite": "of a run that is there: test_resume.py",
    "resume": "of a run that is there: test_resume.py",
    "save_every": "the last step saves as well: test_resume.py",
    "tensorboard": "needs its library: test_runs.py",
    "wandb": "needs its library: test_runs.py",
}
CASES = [(script, flag) for flag, change in CHANGES.items() for script in change[0].split()]


def test_every_flag_is_in_one_of_the_two_lists():
    flags = {
        field.name for script in SCRIPTS.values() for field in dataclasses.fields(script.Config)
    }
    assert flags == CHANGES.keys() | SAME.keys() and not CHANGES.keys() & SAME.keys()
    for name, script in SCRIPTS.items():
        own = {field.name for field in dataclasses.fields(script.Config)}
        assert own == {flag for s, flag in CASES if s == name} | SAME.keys()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Beside the model of make_job: another one, one with a chat template, and a reward model."""
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "llama", small_llama(0.1, vocab_size=20), letter_tokenizer())
    config = GPT2Config(
        vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=64, num_labels=1,
        pad_token_id=0, bos_token_id=None, eos_token_id=19,
    )  # fmt: skip
    torch.manual_seed(0)
    chat = letter_tokenizer()
    chat.chat_template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"
    save_model(folder / "chat", small_llama(0.1, vocab_size=20), chat)
    save_model(folder / "judge", GPT2ForSequenceClassification(config), letter_tokenizer())
    return folder


@pytest.fixture
def folders(models: Path, tmp_path: Path) -> Path:
    for model in models.iterdir():
        (tmp_path / model.name).symlink_to(model)
    with (tmp_path / "reward.py").open("a") as file:
        file.write("\ndef rarely(completions):\n    return [len(c) > 4 for c in completions]\n")
    rows = [json.loads(x) for x in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    rows = [row | {"other": row["prompt"] + " a"} for row in rows]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def left_behind(folder: Path, metrics: list[dict]) -> tuple[list, str, list[str]]:
    """What a run leaves: metrics without what is measured, samples and weights, names of files."""
    lines = [{k: v for k, v in line.items() if not k.startswith(MEASURED)} for line in metrics]
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    weights = sorted(folder.glob("model/*.safetensors"))
    data = [path.read_bytes() for path in (folder / "samples.jsonl", *weights)]
    return lines, data, names


BASES: dict[str, tuple] = {}  # what the runs leave behind with which the others are compared


@pytest.mark.slow
@pytest.mark.parametrize(("script", "flag"), CASES)
def test_another_value_leaves_another_run_behind(script, flag, make_job, folders, monkeypatch):
    _, value, others = CHANGES[flag]
    monkeypatch.chdir(folders)
    flags = BASE | others
    if flags.pop("optimizer", None) == "SGD":  # Adam makes its steps as long for a scaled gradient
        make = lambda parameters, lr, **_: torch.optim.SGD(parameters, lr=lr)  # noqa: E731
        monkeypatch.setattr(torch.optim, "AdamW", make)
    job = make_job(SCRIPTS[script])

    def found(changes: dict) -> tuple:
        metrics = job(**(flags | changes))
        return left_behind(folders / (changes.get("output_dir") or "run"), metrics)

    same = f"{script} {others}"
    if same not in BASES:
        BASES[same] = found({})
    # Of two equal runs all is equal, which that of another folder shows.
    assert (found({flag: value}) == BASES[same]) == (flag == "output_dir")
