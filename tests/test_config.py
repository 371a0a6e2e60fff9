"""Flags: how they are written, which values are taken, defaults, and those of a resumed run."""

import hashlib
import json
import re
import typing
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small import ALGORITHMS, EMBEDDED, SCRIPTS

import grpo
import plumbing.config
import ppo
import reward_model
import tasks
from plumbing.config import find_folder, parse_flags
from plumbing.errors import InputError


def parse(script: str, flags: str) -> dict:
    flags += "" if {"--resume", "--output_dir"} & {*flags.split()} else " --output_dir new"
    flags += "" if "--device" in flags else " --device cpu"
    return asdict(parse_flags(SCRIPTS[script].Config, "", EMBEDDED[script], flags.split()))


def test_the_help_shows_the_docstring_and_the_defaults_of_each_embedded_model(capsys):
    with pytest.raises(SystemExit):
        parse_flags(ppo.Config, ppo.__doc__, EMBEDDED["ppo"], ["--help"])
    text = capsys.readouterr().out
    assert ppo.__doc__ in text
    text = " ".join(text.split())
    for line in (
        "--disable_dropout [BOOL] ",
        "(true) --lora_r N ",
        "--stop TEXT [TEXT ...] ",
        "--report_to {tensorboard,wandb} [",
        "sentiment or one more of tasks.py (sentiment) (tiny: add) (tiny/cups: cups) --prompts",
        "which is lost --resume TEXT go on with the run in this folder, with its settings --save",
        "where the device is fast at it (tiny: false) --device",
    ):
        assert line in text


DEFAULTS = {  # by hand: figures of the pages were measured with these, where none is named
    "all": "warmup_steps 10 clip_range .2 max_grad_norm 1 temperature 1 save_every 50 lora_r 0",
    "tiny": "max_new_tokens 5 rollout_batch_size 256 num_eval_prompts 1024",
    "tiny/cups": "max_new_tokens 16 learning_rate 1e-3 num_eval_prompts 512",
    "x/y": "max_new_tokens 24 rollout_batch_size 32 num_eval_prompts 24 num_steps 40 eval_every 20",
    "ppo": "num_epochs 2 gamma 1 lam .95 vf_coef .1 clip_range_value .2 num_generations 1",
    "grpo": "num_epochs 1 num_mini_batches 1 num_generations 8 oversample 1",
    "rloo": "num_epochs 1 num_mini_batches 1 num_generations 4",
    "ppo tiny": "num_steps 60 prompts_per_step 256 num_mini_batches 4 kl_coef .01 eval_every 15",
    "ppo x/y": "prompts_per_step 16 num_mini_batches 1 kl_coef .05 learning_rate 2e-5",
    "ppo tiny/cups": "num_steps 20 prompts_per_step 256 num_mini_batches 4 kl_coef .01",
    "grpo tiny/cups": "num_steps 60 prompts_per_step 32 kl_coef .01 eval_every 5",
    "rloo tiny/cups": "num_steps 60 prompts_per_step 64 kl_coef .02 eval_every 5",
    "grpo tiny": "num_steps 180 prompts_per_step 32 kl_coef .01 learning_rate 8e-4 eval_every 30",
    "grpo x/y": "prompts_per_step 4 kl_coef .04 learning_rate 2e-5 micro_batch_tokens 1024",
    "rloo tiny": "num_steps 180 prompts_per_step 64 kl_coef .02 learning_rate 8e-4 eval_every 30",
    "rloo x/y": "prompts_per_step 8 kl_coef .05 learning_rate 2e-5 micro_batch_tokens 1024",
}


@pytest.mark.parametrize("model", ["tiny", "tiny/cups", "x/y"])
@pytest.mark.parametrize("script", ALGORITHMS)
def test_every_number_has_the_default_that_the_pages_were_measured_with(script, model):
    config = parse(script, f"--model {model}")
    keys = "all", model, script, f"{script} {model}"
    words = " ".join(DEFAULTS.get(key, "") for key in keys).split()
    expected = dict(zip(words[::2], map(float, words[1::2])))
    assert {name: config[name] for name in expected} == expected
    assert config["task"] == {"tiny": "add", "tiny/cups": "cups"}.get(model, "sentiment")


def test_the_tasks_have_the_data_and_verifiers_that_the_pages_were_measured_with():
    """By a hash of it: whoever changes what is drawn has to measure anew."""
    found = [task(chat=True) for task in tasks.TASKS.values()]
    assert [x.verifier for x in found] == [tasks.numeric_match, tasks.numeric_match, None]
    data = *((x.train, x.heldout) for x in found), tasks.add_pairs()
    digest = hashlib.sha256(repr(data).encode()).hexdigest()
    assert digest.startswith("8000051407d5b921")


@pytest.mark.parametrize("script", ALGORITHMS)
def test_the_cups_alone_mean_the_embedded_model_that_plays_them(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # not where the folder tiny/cups is
    flags = ["--device", "cpu", "--task", "cups"]
    found = parse_flags(SCRIPTS[script].Config, "", EMBEDDED[script], flags)
    assert find_folder(found) == Path(f"runs/{script}-cups-s0")
    assert asdict(found) | {"output_dir": "new"} == parse(script, "--model tiny/cups")
    assert parse(script, "--task cups --model x/y")["max_new_tokens"] == 24
    assert parse(script, "--task cups --model tiny")["max_new_tokens"] == 5


ABOVE_0 = """micro_batch_tokens save_every max_new_tokens rollout_batch_size num_epochs eval_every
num_mini_batches num_eval_prompts eval_generations prompts_per_step num_generations oversample
num_eval_pairs max_length pairs_per_step"""
FLOATS = "max_grad_norm clip_range clip_range_high clip_range_value learning_rate"
FROM_0 = """num_steps warmup_steps lora_r entropy_coef kl_coef missing_eos_penalty vf_coef
overlong_buffer center_rewards_coef"""
BOUNDS = {  # by hand: of a flag the rule, what is refused and what is just taken
    name: bounds
    for names, *bounds in (
        (ABOVE_0, "above 0", "-1 0", ""),
        (FLOATS, "above 0", "-1 0", "1e-9"),
        (FROM_0, "of at least 0", "-1", "0"),
        ("seed", f"from 0 to {2**63}", f"-1 {2**63 + 1} {10**400}", f"0 {2**63}"),
        ("gamma lam", "from 0 to 1", "-0.01 1.01", "0 1"),
        ("temperature", "of at least 0.001", "0.0009", "0.001"),
        ("reward_weights", "of at least -inf", "", "-2 0 -1e-3 -.5"),
    )
    for name in names.split()
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_number_has_its_bounds_and_is_finite(script):
    bounds = BOUNDS | ({"num_steps": BOUNDS["pairs_per_step"]} if script == "reward_model" else {})
    kinds = typing.get_type_hints(SCRIPTS[script].Config)
    for name in parse(script, ""):
        if not re.search(r"\b(int|float)\b", str(kinds[name])):
            continue
        assert name in bounds, f"--{name} is new: add its rule to BOUNDS, in tests/test_config.py"
        rule, refused, taken = bounds[name]
        for value in f"{refused} nan inf".split():
            fault = f"^--{name} .*: must be a finite number {rule}$|--{name}: invalid int value"
            with pytest.raises(InputError, match=fault):
                parse(script, f"--{name}={value}")
        for value in taken.split():
            parse(script, f"--{name}={value}")


def test_numbers_below_0_may_follow_each_other_in_a_list():
    """Before Python 3.14 argparse takes -1e-3 for a flag."""
    flags = "--reward brevity exact_match --reward_weights 1 -1e-3 -.5"
    assert parse("grpo", flags)["reward_weights"] == [1, -0.001, -0.5]


def test_an_adapter_takes_ten_times_the_learning_rate_unless_it_is_given(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    for flags in ("--model x/y --lora_r 4", f"--model {tmp_path}"):
        assert parse("ppo", flags)["learning_rate"] == pytest.approx(2e-4)
    assert parse("ppo", "--lora_r 4 --learning_rate 3e-6")["learning_rate"] == 3e-6


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16, None])
def test_half_precision_is_that_of_the_device_unless_it_is_given(half, monkeypatch):
    monkeypatch.setattr(plumbing.config, "fast_half", lambda device: half)
    is_bf16, is_fp16 = half is torch.bfloat16, half is torch.float16
    for flags, expected in (
        ("--model x/y", (is_bf16, is_fp16)),
        ("--model x/y --bf16 false", (False, None)),
        ("--model x/y --fp16 false", (is_bf16, False)),
        ("", (False, None)),  # the embedded model is too small to gain
        ("--bf16 True", (True, None)),
        ("--model x/y --fp16 true", (False, True)),
    ):
        config = parse("ppo", flags)
        assert (config["bf16"], config["fp16"]) == expected
    assert parse("reward_model", "--model x/y")["bf16"] == is_bf16


def test_a_cuda_device_becomes_the_current_one_and_takes_larger_batches(monkeypatch):
    """CUDA graphs are captured on the current device, whatever the device of their tensors."""
    chosen, there = [], SimpleNamespace(device=torch.device("cuda:1"), item=lambda: 1.0)
    monkeypatch.setattr(torch, "ones", lambda *args, device: there)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    config = parse("ppo", "--device cuda:1 --bf16 false --model x/y")
    assert chosen == [there.device] and config["device"] == "cuda:1"
    assert (config["rollout_batch_size"], config["micro_batch_tokens"]) == (256, 8192)
    assert parse("ppo", "--device cuda:1 --rollout_batch_size 7")["rollout_batch_size"] == 7
    pairs = parse("reward_model", "--device cuda:1 --bf16 false --model x/y")
    assert pairs["micro_batch_tokens"] == 4096


def test_the_default_folder_is_the_first_in_which_nothing_is_lost(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = Path("runs/grpo-x-y-b-c-s0")
    Path(f"{folder}-2/model").mkdir(parents=True)
    folder.mkdir()
    (folder / "config.json").write_text('{"script": "grpo"}')
    for flags, end in (("", ""), ("", "-3"), (" --overwrite", ""), (" --num_steps 0", "-eval")):
        config = parse_flags(grpo.Config, "", {}, f"--model x/y --prompts a/b:c{flags}".split())
        assert str(find_folder(config)) == f"{folder}{end}"
        (folder / "metrics.jsonl").touch()  # the first one to make it has the folder
    (folder / "checkpoint.pt").touch()  # without one there is nothing to go on with
    for script, flags, expected in (
        (reward_model, "--model x/y --pairs data/my.jsonl", "runs/reward_model-x-y-my-s0"),
        (reward_model, "--seed 1", "runs/reward_model-tiny-add-s1"),
        (grpo, "--model .", f"runs/grpo-{tmp_path.name}-sentiment-s0"),
        (grpo, "--output_dir ~/mine", f"{tmp_path}/mine"),
    ):
        config = parse_flags(script.Config, "", {}, flags.split())
        assert str(find_folder(config)) == expected
    with pytest.raises(InputError, match=f"a run: --resume {folder} goes on with it, --overwrite"):
        parse("grpo", f"--output_dir {folder}")
    assert parse("grpo", "--model x/y --output_dir .")["output_dir"] == ".", "a name on the hub"


def test_several_processes_as_of_torchrun_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"see docs/outgrow\.md"):
        parse("grpo", "")


def test_a_resumed_run_has_the_settings_of_its_folder_and_the_flags_win(tmp_path):
    flags = (
        "--model x/y --seed 3 --lora_r 2 --bf16 true --save_every 7 --stop a b --stop c --overwrite"
    )
    settings = parse("grpo", flags)
    assert settings["stop"] == ["a", "b", "c"], "a list that is given twice is one list"
    (tmp_path / "config.json").write_text(json.dumps({"script": "grpo"} | settings))
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    resumed = parse("grpo", f"--resume {tmp_path} --num_steps 40 --save_every 9")
    folder = {"resume": str(tmp_path), "output_dir": str(tmp_path)}  # it may have been moved
    assert resumed == settings | folder | {"save_every": 9, "overwrite": False}
    same = "--seed 3 --prompts_per_step 4 --oversample 1"
    assert parse("grpo", f"--resume {tmp_path} {same}") == resumed | {"save_every": 7}
    # With another batch or order, rows are skipped and others come twice.
    for flag in ("seed 4", "prompts_per_step 8", "oversample 2", "num_steps 41", "output_dir x"):
        with pytest.raises(InputError, match=f"--{flag.split()[0]} can't change on --resume"):
            parse("grpo", f"--resume {tmp_path} --{flag}")


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("learning_rate", "2e-5", "float"),
        ("lora_r", 0.5, "int"),
        ("seed", None, "int"),
        ("disable_dropout", "false", "bool"),
        ("reward", "brevity", "list"),
        ("model", 3, "str"),
        ("bf16", "false", "bool | None"),
        ("clip_range_high", "0.3", "float | None"),
    ],
)
def test_a_setting_edited_to_another_type_is_refused(name, value, kind, tmp_path):
    settings = {"script": "grpo"} | parse("grpo", "--model x/y") | {name: value}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=re.escape(f"--{name} {value!r}: must be of type {kind}")):
        parse("grpo", f"--resume {tmp_path}")


@pytest.mark.parametrize("flag", "prompts resume stop prompt_template output_dir verifier".split())
def test_an_empty_text_as_of_an_unset_variable_is_refused(flag):
    for value in ([""], ["a", ""]) if flag == "stop" else ([""],):
        with pytest.raises(InputError, match=f"--{flag}: is empty; leave the flag out"):
            parse_flags(ppo.Config, "", EMBEDDED["ppo"], [f"--{flag}", *value])
