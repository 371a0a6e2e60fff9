"""Flags: how they are written, which values are taken, their defaults."""

import math

import pytest

import grpo
import plumbing.config
import ppo
import reward_model
import rloo
from plumbing.config import parse_flags
from plumbing.errors import InputError

SCRIPTS = {"ppo": ppo, "grpo": grpo, "rloo": rloo, "reward_model": reward_model}
ANYWHERE = ["--device", "cpu", "--output_dir", "nowhere"]  # whatever runs/ holds


def parse(script: str, *flags: str) -> dict:
    return vars(parse_flags(SCRIPTS[script].Config, "", [*ANYWHERE, *flags]))


def refused(script: str, *flags: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        parse(script, *flags)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("flags", "name", "expected"),
    [
        ("--kl-coef 1", "kl_coef", 1.0),
        ("--kl_coef=1e-2", "kl_coef", 0.01),
        ("--overwrite --seed 3", "overwrite", True),
        ("--overwrite false", "overwrite", False),
        ("--bf16=true", "bf16", True),
        ("--reward a b --seed 3", "reward", ["a", "b"]),
        ("--reward_weights=0.5", "reward_weights", [0.5]),
        ("--reward_weights -1", "reward_weights", [-1.0]),
        ("--kl_estimator k3", "kl_estimator", "k3"),
        # Names of TRL
        ("--beta 1", "kl_coef", 1.0),
        ("--epsilon=0.3", "clip_range", 0.3),
        ("--cliprange_value 0.3", "clip_range_value", 0.3),
        ("--num_ppo_epochs 3", "num_epochs", 3),
        ("--response_length 9", "max_new_tokens", 9),
        ("--max_completion_length 9", "max_new_tokens", 9),
        ("--local_rollout_forward_batch_size 64", "rollout_batch_size", 64),
    ],
)
def test_how_a_flag_may_be_written(flags, name, expected):
    plain, found = parse("ppo"), parse("ppo", *flags.split())
    assert found[name] == expected and type(found[name]) is type(expected)
    assert {flag for flag in plain if plain[flag] != found[flag]} <= {name, "seed"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--kl-coeff=1", "unknown flag --kl-coeff; did you mean --kl_coef?"),
        ("--zzzzzz 1", "unknown flag --zzzzzz; --help lists the flags"),
        ("--epsilon_high 0.3", "unknown flag --epsilon_high; did you mean --epsilon?"),
        ("--reward_weights nan", "--reward_weights [nan]: must be a finite number"),
        ("--missing_eos_penalty inf", "--missing_eos_penalty inf: must be a finite number"),
        ("--temperature 0.0009", "--temperature 0.0009: must be 0.001 or greater"),
        (f"--seed {2**63 - 1}", "must be between 0 and"),
        ("--prompts_per_step 12 --num_mini_batches 5", "choose from 1, 2, 3, 4, 6, 12"),
        ("--prompts_per_step 4 --num_mini_batches 9", "choose from 1, 2, 4"),
        ("--num_generations 4 --rollout_batch_size 3", "must hold the 4 completions of a prompt"),
    ],
)
def test_a_bad_value_is_refused_with_the_remedy(flags, words):
    refused("ppo", *flags.split(), words=words)


def test_the_last_good_value_is_taken():
    assert parse("ppo", "--temperature", "0.001")["temperature"] == 0.001
    assert parse("ppo", "--seed", str(2**63 - 2))["seed"] == 2**63 - 2
    for flag in ("gamma", "lam"):
        assert [parse("ppo", f"--{flag}", x)[flag] for x in ("0", "1")] == [0.0, 1.0]
        for value in (-0.01, 1.01, math.nan):
            refused("ppo", f"--{flag}", str(value), words=f"--{flag} {value}: must be")
    for script in ("grpo", "rloo"):
        group = ["--num_generations", "2", "--rollout_batch_size", "2", "--prompts_per_step", "3"]
        assert parse(script, *group, "--num_mini_batches", "6")["num_generations"] == 2
        refused(script, "--num_generations", "1", words="--num_generations 1: must be 2 or more")
    penalty = ["--overlong_buffer", "1", "--scale_rewards"]
    assert parse("grpo", *penalty, "group")["overlong_buffer"] == 1
    refused("grpo", *penalty, "mean", words="--overlong_buffer 1: its penalty makes rewards")


MAY_BE_0 = """kl_coef vf_coef lora_r warmup_steps entropy_coef dynamic_sampling overlong_buffer
center_rewards_coef missing_eos_penalty seed""".split()
ABOVE_0 = """num_steps prompts_per_step max_new_tokens rollout_batch_size learning_rate num_epochs
num_mini_batches micro_batch_tokens clip_range clip_range_high clip_range_value max_grad_norm
eval_every save_every num_eval_prompts eval_generations num_eval_pairs pairs_per_step
max_length""".split()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_weight_may_be_0_and_a_count_or_a_rate_may_not(script):
    for flag in parse(script).keys() & MAY_BE_0:
        assert parse(script, f"--{flag}", "0")[flag] == 0
        refused(script, f"--{flag}", "-1", words=f"--{flag} -1")
    for flag in parse(script).keys() & ABOVE_0:
        refused(script, f"--{flag}", "0", words=": must be greater than 0")


# --- Defaults ---

SHARED = dict(warmup_steps=10, max_grad_norm=1.0, clip_range=0.2, temperature=1.0, lora_r=0, seed=0)
SHARED |= dict(save_every=50, entropy_coef=0.0, eval_generations=1)
SIZES = {
    "tiny": dict(max_new_tokens=5, rollout_batch_size=256, num_eval_prompts=1024),
    "my/tiny": dict(max_new_tokens=24, rollout_batch_size=32, micro_batch_tokens=1024)
    | dict(num_eval_prompts=24, num_steps=40, eval_every=20),
}
ONCE = dict(num_epochs=1, num_mini_batches=1)
OF_PPO = dict(num_generations=1, num_epochs=2, gamma=1.0, lam=0.95, vf_coef=0.1)
OF_PPO |= dict(clip_range_value=0.2, missing_eos_penalty=0.0)
OF_GRPO = ONCE | dict(num_generations=8, dynamic_sampling=0, overlong_buffer=0)
OF_RLOO = ONCE | dict(num_generations=4)
DEFAULTS = {  # by hand: every figure of the pages was measured with these
    ("ppo", "tiny"): OF_PPO
    | dict(num_steps=60, prompts_per_step=256, kl_coef=0.01, learning_rate=5e-4)
    | dict(eval_every=15, num_mini_batches=4),
    ("ppo", "my/tiny"): OF_PPO
    | dict(prompts_per_step=16, kl_coef=0.1, learning_rate=2e-5, num_mini_batches=1),
    ("grpo", "tiny"): OF_GRPO
    | dict(num_steps=180, prompts_per_step=32, kl_coef=0.01, learning_rate=8e-4, eval_every=30),
    ("grpo", "my/tiny"): OF_GRPO | dict(prompts_per_step=4, kl_coef=0.04, learning_rate=2e-5),
    ("rloo", "tiny"): OF_RLOO
    | dict(num_steps=180, prompts_per_step=64, kl_coef=0.02, learning_rate=8e-4, eval_every=30),
    ("rloo", "my/tiny"): OF_RLOO | dict(prompts_per_step=8, kl_coef=0.05, learning_rate=2e-5),
}


@pytest.mark.parametrize("script, model", DEFAULTS)
def test_every_number_has_the_default_that_the_pages_were_measured_with(script, model):
    config = parse(script, "--model", model)
    expected = SHARED | SIZES[model] | DEFAULTS[script, model]
    assert {name: config[name] for name in expected} == expected
    assert config["task"] == ("add" if model == "tiny" else "sentiment")


@pytest.mark.parametrize("script, coef", [("ppo", 0.1), ("grpo", 0.4), ("rloo", 0.2)])
def test_with_a_learned_reward_the_kl_of_the_embedded_model_weighs_more(script, coef):
    assert parse(script, "--reward_model", "folder")["kl_coef"] == coef
    assert parse(script, "--reward_model", "folder", "--kl_coef", "0.03")["kl_coef"] == 0.03
    other = parse(script, "--reward_model", "folder", "--model", "my/tiny")
    assert other["kl_coef"] == DEFAULTS[script, "my/tiny"]["kl_coef"]


def test_an_adapter_takes_ten_times_the_learning_rate_unless_it_is_given(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "x/y"}')
    assert parse("ppo", "--lora_r", "4")["learning_rate"] == pytest.approx(5e-3)
    assert parse("ppo", "--model", str(tmp_path))["learning_rate"] == pytest.approx(2e-4)
    assert parse("ppo", "--lora_r", "4", "--learning_rate", "3e-6")["learning_rate"] == 3e-6


@pytest.mark.parametrize("fast", [False, True])
def test_half_precision_is_chosen_by_the_device_unless_it_is_given(fast, monkeypatch):
    monkeypatch.setattr(plumbing.config, "fast_at_bfloat16", lambda device: fast)
    monkeypatch.setattr(plumbing.config, "fast_at_float16", lambda device: True)

    def chosen(*flags):
        config = parse("ppo", *flags)
        return config["bf16"], config["fp16"]

    assert chosen("--model", "x/y") == (fast, not fast), "decoding in float16 where it is slow"
    assert chosen("--model", "x/y", "--bf16", "false") == (False, False)
    assert chosen("--model", "x/y", "--fp16", "false") == (fast, False)
    assert chosen() == (False, False), "the embedded model is too small to gain"


def test_a_config_is_made_by_name():
    for script in SCRIPTS.values():
        with pytest.raises(TypeError, match="positional"):
            script.Config("gpt2")
