"""The edges of the flags: the last value that is taken and the first that is refused."""

import dataclasses
import math
import typing

import pytest

import grpo
import plumbing.config
import ppo
import reward_model
import rloo
from plumbing.config import ABOVE_0, LOWEST, TRL_NAMES, RunConfig, parse_flags
from plumbing.errors import InputError

SCRIPTS = {"ppo": ppo, "grpo": grpo, "rloo": rloo, "reward_model": reward_model}
OURS = {  # by hand: which of our flags each name of TRL means
    "beta": "kl_coef", "center_rewards_coefficient": "center_rewards_coef",
    "cliprange": "clip_range", "cliprange_value": "clip_range_value",
    "epsilon": "clip_range", "epsilon_high": "clip_range_high",
    "local_rollout_forward_batch_size": "rollout_batch_size",
    "max_completion_length": "max_new_tokens", "num_iterations": "num_epochs",
    "num_ppo_epochs": "num_epochs", "per_device_train_batch_size": "micro_batch_size",
    "response_length": "max_new_tokens",
}  # fmt: skip


def parse(script: str, *flags: str) -> RunConfig:
    return parse_flags(SCRIPTS[script].Config, "", ["--device", "cpu", *flags])


def has(script: str, flag: str) -> bool:
    return flag in SCRIPTS[script].Config.__dataclass_fields__


@pytest.mark.parametrize("name", TRL_NAMES)
def test_a_name_of_trl_sets_our_flag_and_no_other(name):
    assert OURS.keys() == TRL_NAMES.keys()
    for script in SCRIPTS:
        if has(script, OURS[name]):
            # 64 suits them all.
            value = "0.64" if "clip" in OURS[name] or name == "beta" else "64"
            plain, found = vars(parse(script)), vars(parse(script, f"--{name}", value))
            assert {flag for flag in plain if plain[flag] != found[flag]} == {OURS[name]}
            assert found[OURS[name]] == float(value)


@pytest.mark.parametrize("flag", ABOVE_0)
def test_0_is_refused_where_a_number_must_be_above_0(flag):
    for script in filter(lambda script: has(script, flag), SCRIPTS):
        with pytest.raises(InputError, match=f"--{flag} 0(.0)?: must be greater than 0"):
            parse(script, f"--{flag}", "0")


def test_every_number_without_another_bound_must_be_above_0():
    # By hand what may be 0, or has its bounds elsewhere: all other numbers must be in the list.
    other = set("digits temperature seed missing_eos_penalty gamma lam".split())
    other |= {"reward_clip_range", "reward_weights", "label_noise"}
    for script in SCRIPTS.values():
        kinds = typing.get_type_hints(script.Config)
        for name in (field.name for field in dataclasses.fields(script.Config)):
            if {int, float} & {kinds[name], *typing.get_args(kinds[name])}:
                assert name in {*ABOVE_0, *LOWEST, *other}, name


def test_the_defaults_of_the_embedded_model_are_for_that_name_alone():
    plain, embedded = parse("grpo", "--model", "my/tiny-llama"), parse("grpo")
    assert (embedded.max_new_tokens, plain.max_new_tokens) == (5, 24)


OF_THE_UPDATE = dict(warmup_steps=10, max_grad_norm=1.0, clip_range=0.2, temperature=1.0)
OFTEN = dict(digits=2, lora_r=0, seed=0, save_every=50, sample_every=50)
OFTEN |= dict(entropy_coef=0.0, eval_generations=1)
OF_REWARD_MODEL = dict(warmup_steps=10, max_grad_norm=1.0, lora_r=0, seed=0, save_every=50)
OF_REWARD_MODEL |= dict(eval_every=50, num_eval_pairs=512)
OF_REWARD_MODEL |= dict(center_rewards_coef=0.0)
SIZES = {
    "tiny": dict(
        max_new_tokens=5, rollout_batch_size=256, micro_batch_size=256, num_eval_prompts=1024
    ),
    "other": dict(
        max_new_tokens=24, rollout_batch_size=32, micro_batch_tokens=1024, num_eval_prompts=24
    ),
}
OF_PPO = dict(num_generations=1, num_epochs=2, gamma=1.0, lam=0.95, vf_coef=0.1)
OF_PPO |= dict(clip_range_value=0.2, missing_eos_penalty=0.0)
ONCE = dict(num_epochs=1, num_mini_batches=1)
DEFAULTS = {  # by hand: every figure of the pages was measured with these
    ("ppo", "tiny"): OF_PPO
    | dict(num_steps=60, prompts_per_step=256, kl_coef=0.01, learning_rate=5e-4)
    | dict(eval_every=15, num_mini_batches=4),
    ("ppo", "other"): OF_PPO
    | dict(num_steps=40, prompts_per_step=16, kl_coef=0.1, learning_rate=5e-5)
    | dict(eval_every=20, num_mini_batches=1),
    ("grpo", "tiny"): ONCE
    | dict(num_steps=180, prompts_per_step=32, kl_coef=0.01, learning_rate=8e-4)
    | dict(eval_every=30, num_generations=8, cispo_bound=5.0)
    | dict(dynamic_sampling=0, overlong_buffer=0),
    ("grpo", "other"): ONCE
    | dict(num_steps=40, prompts_per_step=4, kl_coef=0.04, learning_rate=2e-5)
    | dict(eval_every=20, num_generations=8, cispo_bound=5.0)
    | dict(dynamic_sampling=0, overlong_buffer=0),
    ("rloo", "tiny"): ONCE
    | dict(num_steps=180, prompts_per_step=64, kl_coef=0.02, learning_rate=8e-4)
    | dict(eval_every=30, num_generations=4),
    ("rloo", "other"): ONCE
    | dict(num_steps=40, prompts_per_step=8, kl_coef=0.05, learning_rate=2e-5)
    | dict(eval_every=20, num_generations=4),
}


@pytest.mark.parametrize("script, model", DEFAULTS)
def test_every_number_has_the_default_that_the_pages_were_measured_with(script, model):
    config = vars(parse(script, *([] if model == "tiny" else ["--model", "my/other"])))
    numbers = {name: value for name, value in config.items() if type(value) in (int, float)}
    assert numbers == DEFAULTS[script, model] | OF_THE_UPDATE | OFTEN | SIZES[model]


def test_the_reward_model_has_the_defaults_that_the_pages_were_measured_with():
    for model, sizes in (
        (
            "tiny",
            dict(num_steps=200, learning_rate=1e-3, micro_batch_size=256, pairs_per_step=128)
            | dict(num_pairs=10000, label_noise=0.1),
        ),
        ("my/other", dict(learning_rate=2e-5, micro_batch_size=16, pairs_per_step=32)),
    ):
        config = vars(parse("reward_model", "--model", model))
        numbers = {name: value for name, value in config.items() if type(value) in (int, float)}
        assert numbers == OF_REWARD_MODEL | sizes


@pytest.mark.parametrize("script, coef", [("ppo", 0.1), ("grpo", 0.4), ("rloo", 0.2)])
def test_with_a_learned_reward_the_kl_of_the_embedded_model_weighs_more(script, coef):
    assert parse(script, "--reward_model", "folder").kl_coef == coef
    assert parse(script, "--reward_model", "folder", "--kl_coef", "0.03").kl_coef == 0.03
    other = parse(script, "--reward_model", "folder", "--model", "my/other")
    assert other.kl_coef == DEFAULTS[script, "other"]["kl_coef"]


def test_a_config_is_made_by_name():
    for script in SCRIPTS.values():
        with pytest.raises(TypeError, match="positional"):
            script.Config("gpt2")


@pytest.mark.parametrize("flag", [flag for flag in LOWEST if flag != "num_prompts"])
def test_the_lowest_number_is_taken_and_a_lower_one_refused(flag):
    for script in filter(lambda script: has(script, flag), SCRIPTS):
        assert vars(parse(script, f"--{flag}", str(LOWEST[flag])))[flag] == LOWEST[flag]
        with pytest.raises(InputError, match=f"--{flag} .*: must be {LOWEST[flag]} or greater"):
            parse(script, f"--{flag}", str(LOWEST[flag] - 1))


@pytest.mark.parametrize("flag", ["gamma", "lam"])
def test_gamma_and_lambda_lie_between_0_and_1_both_included(flag):
    for value in (0.0, 1.0):
        assert vars(parse("ppo", f"--{flag}", str(value)))[flag] == value
    for value in (-0.01, 1.01, math.nan):
        with pytest.raises(InputError, match=f"--{flag}"):
            parse("ppo", f"--{flag}", str(value))


def test_the_smallest_temperature_and_the_largest_seed_are_taken():
    assert parse("ppo", "--temperature", "0.001").temperature == 0.001
    assert parse("ppo", "--seed", str(2**63 - 2)).seed == 2**63 - 2
    for flags in (["--temperature", "0.0009"], ["--seed", str(2**63 - 1)]):
        with pytest.raises(InputError, match=flags[0]):
            parse("ppo", *flags)


def test_a_rollout_batch_may_hold_just_one_group_and_a_group_just_two():
    flags = ["--num_generations", "4", "--rollout_batch_size"]
    assert parse("grpo", *flags, "4").rollout_batch_size == 4
    with pytest.raises(InputError, match="must hold the 4 completions of a prompt"):
        parse("grpo", *flags, "3")
    for script in ("grpo", "rloo"):
        assert parse(script, "--num_generations", "2").num_generations == 2
        with pytest.raises(InputError, match="--num_generations 1"):
            parse(script, "--num_generations", "1")
    assert parse("ppo", "--num_generations", "1").num_generations == 1


def test_minibatches_divide_the_completions_of_a_step_not_its_prompts():
    flags = ["--prompts_per_step", "3", "--num_generations", "4", "--num_mini_batches"]
    assert parse("grpo", *flags, "12").num_mini_batches == 12
    with pytest.raises(InputError, match=r"doesn't divide the 12 completions .*choose 6 or 12"):
        parse("grpo", *flags, "7")
    with pytest.raises(InputError, match=r"choose 12$"):
        parse("grpo", *flags, "24")


@pytest.mark.parametrize("fast", [False, True])
def test_bfloat16_is_chosen_by_the_device_unless_it_is_given(fast, monkeypatch):
    monkeypatch.setattr(plumbing.config, "fast_at_bfloat16", lambda device: fast)
    other = ["--model", "x/y"]
    assert parse("ppo", *other).bf16 is fast
    assert parse("ppo", *other, "--bf16", "false").bf16 is False
    assert parse("ppo", *other, "--bf16", "true").bf16 is True
    assert parse("ppo").bf16 is False, "the embedded model is too small to gain"
