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


def test_help_shows_the_docstring_and_each_models_defaults(capsys):
    with pytest.raises(SystemExit):
        parse_flags(ppo.Config, ppo.__doc__, EMBEDDED["ppo"], ["--help"])
    text = capsys.readouterr().out
    assert ppo.__doc__ in text
    text = " ".join(text.split())
    for line in (
        "--disable_dropout [BOOL] false leaves dropout on, to show what it does (true) --lora_r N ",
        "--report_to {tensorboard,wandb} [",
        "sentiment or one more of tasks.py (sentiment) (tiny: add) (tiny/cups: cups) --prompts",
        "which is lost --resume TEXT go on with the run in this folder, with its settings --save",
        "where the device is fast at it (tiny: false) --device",
    ):
        assert line in text


def test_tasks_have_the_data_that_pages_were_measured_with():
    """By a hash of it: whoever changes what is drawn has to measure anew."""
    found = [task(chat=True) for task in tasks.TASKS.values()]
    assert [x.verifier for x in found] == [tasks.numeric_match, tasks.numeric_match, None]
    data = *((x.train, x.heldout) for x in found), tasks.add_pairs()
    digest = hashlib.sha256(repr(data).encode()).hexdigest()
    assert digest.startswith("8000051407d5b921")


@pytest.mark.parametrize("script", ALGORITHMS)
def test_task_cups_chooses_the_embedded_model_that_plays_them(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # not where the folder tiny/cups is
    flags = ["--device", "cpu", "--task", "cups"]
    found = parse_flags(SCRIPTS[script].Config, "", EMBEDDED[script], flags)
    assert find_folder(found) == Path(f"runs/{script}-cups-s0")
    assert asdict(found) | {"output_dir": "new"} == parse(script, "--model tiny/cups")
    assert parse(script, "--task cups --model x/y")["max_new_tokens"] == 24
    assert parse(script, "--task cups --model tiny")["max_new_tokens"] == 5


FROM_0 = """num_steps warmup_steps lora_r entropy_coef kl_coef missing_eos_penalty vf_coef
overlong_buffer center_rewards_coef"""
BOUNDS = {  # by hand: flags, their rule, what is refused and what is just taken
    FROM_0: ("of at least 0", "-1", "0"),
    "seed": (f"from 0 to {2**63}", f"-1 {2**63 + 1} {10**400}", f"0 {2**63}"),
    "gamma lam": ("from 0 to 1", "-0.01 1.01", "0 1"),
    "temperature": ("of at least 0.001", "0.0009", "0.001"),
    "reward_weights": ("of at least -inf", "", "-2 0 -1e-3 -.5"),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_number_has_its_bounds_and_is_finite(script):
    bounds = {name: row for names, row in BOUNDS.items() for name in names.split()}
    if script == "reward_model":
        del bounds["num_steps"]  # it has to train
    kinds = typing.get_type_hints(SCRIPTS[script].Config)
    for name in parse(script, ""):
        if not re.search(r"\b(int|float)\b", str(kinds[name])):
            continue
        rule, refused, taken = bounds.get(name, ("above 0", "-1 0", ""))
        for value in f"{refused} nan inf".split():
            said = f"--{name}={value} is taken; BOUNDS has the flags that may be 0 or below"
            try:
                parse(script, f"--{name}={value}")
            except InputError as error:
                said = str(error)
            fault = f"^--{name} .*: must be a finite number {rule}$|--{name}: invalid int value"
            assert re.search(fault, said)
        for value in taken.split():
            parse(script, f"--{name}={value}")


def test_a_list_may_hold_several_numbers_below_0():
    """Before Python 3.14 argparse takes -1e-3 for a flag."""
    flags = "--reward brevity exact_match --reward_weights 1 -1e-3 -.5"
    assert parse("grpo", flags)["reward_weights"] == [1, -0.001, -0.5]


def test_an_adapter_takes_ten_times_the_learning_rate(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    for flags in ("--model x/y --lora_r 4", f"--model {tmp_path}"):
        assert parse("ppo", flags)["learning_rate"] == pytest.approx(2e-4)
    assert parse("ppo", "--lora_r 4 --learning_rate 3e-6")["learning_rate"] == 3e-6


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16, None])
def test_half_precision_is_the_devices_unless_it_is_given(half, monkeypatch):
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
        assert (config["bf16"], config["fp16"]) == expected, flags
    assert parse("reward_model", "--model x/y")["bf16"] == is_bf16


def test_a_cuda_device_becomes_current_and_takes_larger_batches(monkeypatch):
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


def test_the_default_folder_is_the_first_free_one(tmp_path, monkeypatch):
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


def test_flags_win_over_the_settings_of_a_resumed_run(tmp_path):
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
        ("reward", "brevity", "list"),
        ("bf16", "false", "bool | None"),
        ("clip_range_high", "0.3", "float | None"),
    ],
)
def test_a_setting_edited_to_another_type_is_refused(name, value, kind, tmp_path):
    settings = {"script": "grpo"} | parse("grpo", "--model x/y") | {name: value}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=re.escape(f"--{name} {value!r}: must be of type {kind}")):
        parse("grpo", f"--resume {tmp_path}")
