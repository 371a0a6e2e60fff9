"""An interrupted run goes on as if it had never been interrupted."""

import dataclasses
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from faults import RUN, Case, damage, folder_of, out_of_memory, run
from safetensors.torch import load_file
from small import letter_tokenizer, run_undrawn, save_model, small_gpt2
from tqdm import tqdm

import grpo
import ppo
import rloo
from plumbing.checkpoints import (
    FIELDS,
    FREE_ON_RESUME,
    check_settings,
    read_state,
    trained_weights,
    write_state,
)
from plumbing.config import parse_flags
from plumbing.errors import Fault, InputError
from plumbing.runs import Run

SCRIPTS = [ppo, grpo, rloo]
MEASURED = ("time/", "memory/", "tokens_per_second")  # what differs from run to run anyway
FLAGS = f"{RUN} --eval_every 2 --num_epochs 2 --learning_rate 1e-2 --warmup_steps 2".split()
FLAGS += ["--sample_every", "2"]


@pytest.fixture
def here():
    with folder_of(Case("", "", "")):
        yield


def records(folder: str) -> list[dict]:
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in x.items() if not k.startswith(MEASURED)} for x in lines]


def assert_same_run(folder: str, expected: str) -> None:
    assert records(folder) == records(expected)
    for same in ("samples.jsonl", "tokens.jsonl"):
        assert Path(folder, same).read_bytes() == Path(expected, same).read_bytes()
    weights = [
        load_file(next(Path(name, "model").glob("*.safetensors"))) for name in (folder, expected)
    ]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def stop_after(step: int, monkeypatch) -> None:
    """As by Ctrl-C during the given step."""
    original = Run.log

    def log(self, now, metrics):
        original(self, now, metrics)
        if now == step:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Run, "log", log)


def test_a_checkpoint_holds_the_weights_that_train_and_no_others():
    model = small_gpt2()
    model.transformer.requires_grad_(False)  # as under an adapter
    model.transformer.h[1].requires_grad_(True)
    kept = trained_weights(policy=model, value=None)
    assert kept and all(name.startswith("policy.transformer.h.1.") for name in kept)


@pytest.mark.parametrize(
    "lora", [0, pytest.param(2, marks=pytest.mark.slow)], ids=["all weights", "LoRA"]
)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(script, lora, here, monkeypatch):
    flags = [*FLAGS, "--lora_r", str(lora)]
    assert run(script, [*flags, "--output_dir", "whole"]) == (0, [])
    with monkeypatch.context() as m:
        stop_after(2, m)
        code, lines = run(script, flags)
    assert code == 130
    assert lines == ["step 3: interrupted; run is saved up to step 3, --resume goes on from there"]
    assert len(records("run")) == 3
    assert run(script, [*flags, "--resume"]) == (0, [])
    assert len(records("run")) == 7 and records("run")[3]["lr"] < records("run")[1]["lr"]
    assert_same_run("run", "whole")


RISING = """
calls = 0

def rising(completions, **columns):
    global calls
    calls += 1
    return [calls + len(c) for c in completions]
"""


def test_every_field_of_a_checkpoint_is_needed_and_put_back(here, monkeypatch):
    """Left out, the run is refused; with what it was two steps before, the run that goes on is
    another one.
    """
    save_model(Path("small"), small_gpt2(0.1, vocab_size=20), letter_tokenizer())
    Path("reward.py").write_text(RISING)
    flags = [*FLAGS, "--reward", "reward.py:rising", "--save_best", "--save_every", "1"]
    # Draws of torch itself, and a warning in the first step that isn't given twice.
    flags += ["--disable_dropout", "false", "--num_steps", "8", "--max_new_tokens", "3"]
    for step in (1, 3):
        with monkeypatch.context() as m:
            stop_after(step - 1, m)
            assert run(grpo, [*flags, "--output_dir", f"after {step}"])[0] == 130
    states = [read_state(Path(f"after {step}/checkpoint/state.pt")) for step in (1, 3)]
    # What is the same in both: as it is before the first step. Lines have times in them, and those
    # of two runs differ in length.
    states[0] |= {"first_metrics": {}, "best": math.inf, "warned": []}
    states[0]["metrics"] = len(Path("after 3/metrics.jsonl").read_bytes().splitlines(True)[0])

    def resumed(state: dict) -> tuple:
        """Exit code and what is left behind, printed text included."""
        shutil.rmtree("run", ignore_errors=True)
        shutil.copytree("after 3", "run")
        write_state(Path("run/checkpoint/state.pt"), state)
        printed = []
        with monkeypatch.context() as m:
            m.setattr(tqdm, "write", lambda text, **_: printed.append(text))
            code, lines = run(grpo, [*flags, "--resume"])
        files = [*Path("run").glob("[st]*s.jsonl"), *Path("run/model").glob("*.safetensors")]
        return code, lines, printed, records("run"), [file.read_bytes() for file in files]

    right = resumed(states[1])
    assert right[0] == 0 and any("the best so far" in text for text in right[2])
    assert states[1]["warned"] and states[1]["best"] > 0
    generators = states[1]["generators"]
    for name in generators:
        other = {"generators": generators | {name: states[0]["generators"][name]}}
        assert resumed(states[1] | other) != right, name
    for name in states[1]:
        code, lines, *_ = resumed({key: x for key, x in states[1].items() if key != name})
        assert code == 2 and f"has no '{name}'" in lines[0], name
        if name != "cuda":  # empty without a GPU
            assert resumed(states[1] | {name: states[0][name]}) != right, name


def test_resuming_with_dropout_left_on_draws_the_same_dropout(here, monkeypatch):
    save_model(Path("small"), small_gpt2(0.1, vocab_size=20), letter_tokenizer())
    flags = [*FLAGS, "--disable_dropout", "false"]
    assert run(grpo, [*flags, "--output_dir", "whole"])[0] == 0
    with monkeypatch.context() as m:
        stop_after(2, m)
        assert run(grpo, flags)[0] == 130
    assert run(grpo, [*flags, "--resume"])[0] == 0
    assert_same_run("run", "whole")


def test_a_resumed_run_that_is_done_changes_nothing_and_more_steps_make_it_longer(here):
    assert run(ppo, FLAGS)[0] == 0
    before = records("run"), Path("run/model/model.safetensors").read_bytes()
    assert run(ppo, [*FLAGS, "--resume"])[0] == 0
    assert (records("run"), Path("run/model/model.safetensors").read_bytes()) == before
    assert run(ppo, [*FLAGS, "--resume", "--num_steps", "8"])[0] == 0
    assert [x["step"] for x in records("run")] == list(range(9))
    assert records("run")[:6] == before[0][:6]


def printed_by(script, flags: list[str], monkeypatch) -> list[str]:
    """What a command prints: run() keeps stderr alone."""
    lines = []
    with monkeypatch.context() as m:
        m.setattr("builtins.print", lambda *args, **kwargs: lines.append(args[0]))
        assert run(script, flags)[0] == 0
    return lines


def stop_without_a_checkpoint(step: int, monkeypatch) -> None:
    """As by kill -9 before the first checkpoint."""
    with monkeypatch.context() as m:
        m.setattr(Run, "_write_checkpoint", lambda self: None)
        m.setattr(Run, "_save_model", lambda self: None)
        stop_after(step, m)
        assert run(ppo, FLAGS)[0] == 130


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "a run without a step"])
def test_resume_where_there_is_nothing_to_resume_says_so_and_starts(there, here, monkeypatch):
    if there == "an empty folder":
        Path("run").mkdir()
    elif there == "a run without a step":
        assert run(ppo, [*FLAGS, "--reward", "reward.py:divides_by_zero"])[0] == 2
    assert run(ppo, [*FLAGS, "--output_dir", "whole"])[0] == 0
    lines = printed_by(ppo, [*FLAGS, "--resume"], monkeypatch)
    assert lines[0] == "--resume: run holds no checkpoint, the run starts at step 0"
    assert not Path("run.old").exists()
    assert_same_run("run", "whole")


def test_resume_without_a_checkpoint_says_so_before_anything_is_loaded(here, monkeypatch):
    lines = []
    monkeypatch.setattr("builtins.print", lambda *args, **kwargs: lines.append(args[0]))
    monkeypatch.setattr(ppo, "load_policy", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ppo.main([*FLAGS, "--resume"])
    assert lines == ["--resume: run holds no checkpoint, the run starts at step 0"]


def test_resume_without_a_checkpoint_starts_in_place_and_leaves_an_old_run_alone(here, monkeypatch):
    assert run(ppo, [*FLAGS, "--output_dir", "whole"])[0] == 0
    assert run(ppo, [*FLAGS, "--output_dir", "run.old", "--seed", "1"])[0] == 0
    before = contents("run.old")
    stop_without_a_checkpoint(1, monkeypatch)
    lines = printed_by(ppo, [*FLAGS, "--resume"], monkeypatch)
    assert "--resume: run holds no checkpoint, the run starts at step 0" in lines
    assert contents("run.old") == before
    assert_same_run("run", "whole")


def test_a_run_without_a_checkpoint_is_a_run_that_nothing_starts_over_unasked(here, monkeypatch):
    stop_without_a_checkpoint(1, monkeypatch)
    before = Path("run/metrics.jsonl").read_bytes()
    code, lines = run(ppo, FLAGS)
    assert code == 2 and "run already holds a run" in lines[0]
    assert Path("run/metrics.jsonl").read_bytes() == before != b""


def test_a_run_that_began_while_this_one_was_loading_is_left_alone(here, monkeypatch):
    """The same command twice: both found the folder empty."""
    original, before = ppo.load_policy, {}

    def slow(*args):
        if not before:
            before["run"] = True
            assert run(ppo, FLAGS)[0] == 0
            before["run"] = contents("run")
        return original(*args)

    monkeypatch.setattr(ppo, "load_policy", slow)
    code, lines = run(ppo, FLAGS)
    assert code == 2 and "run already holds a run" in lines[-1]
    assert contents("run") == before["run"] and not Path("run.old").exists()


def test_an_interrupt_within_the_optimiser_saves_no_weights_that_have_moved(here, monkeypatch):
    """Ctrl-C twice while the fused kernel runs: Python raises as soon as it returns."""
    flags, calls, fused = [*FLAGS, "--save_every", "2"], [], torch._fused_adamw_

    def interrupted(*args, **kwargs):
        fused(*args, **kwargs)
        calls.append(1)
        if len(calls) == 7:  # the first of the two updates of step 3
            raise KeyboardInterrupt

    assert run(ppo, [*flags, "--output_dir", "whole"])[0] == 0
    with monkeypatch.context() as m:
        m.setattr(torch, "_fused_adamw_", interrupted)
        code, lines = run(ppo, flags)
    assert code == 130 and "run is saved up to step 2" in lines[-1]
    assert run(ppo, [*flags, "--resume"])[0] == 0
    assert_same_run("run", "whole")


def contents(folder: str) -> dict[str, bytes]:
    files = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    "flags", ["--resume --num_steps 2", "--resume --gamma 0.5", "--overwrite --wandb"]
)
def test_a_command_that_is_refused_leaves_the_run_that_is_there_as_it_is(flags, here, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert run(ppo, FLAGS)[0] == 0
    before = contents(".")
    code, lines = run(ppo, [*FLAGS, *flags.split()])
    assert code == 2 and len(lines) == 1
    assert contents(".") == before


def test_an_overwrite_that_fails_at_once_says_nothing_of_what_the_old_run_saved(here):
    assert run(ppo, FLAGS)[0] == 0
    before = contents("run")
    for _ in range(2):  # the second finds a run without a step, which is not worth keeping
        code, lines = run(ppo, [*FLAGS, "--overwrite", "--reward", "reward.py:divides_by_zero"])
        assert code == 2 and "saved" not in lines[0]
        assert contents("run.old") == before and not Path("run/checkpoint").exists()


def test_an_overwritten_run_takes_the_place_of_the_one_that_was_overwritten_before(
    here, monkeypatch
):
    assert run(ppo, FLAGS)[0] == 0
    first = contents("run")
    lines = printed_by(ppo, [*FLAGS, "--overwrite", "--seed", "1"], monkeypatch)
    assert lines.count("The run in run is now run.old.") == 1
    second = contents("run")
    assert contents("run.old") == first and second != first
    assert run(ppo, [*FLAGS, "--overwrite", "--seed", "2"])[0] == 0
    assert contents("run.old") == second and contents("run") != second


def test_a_folder_that_is_no_run_does_not_make_room_for_an_overwritten_one(here):
    assert run(ppo, FLAGS)[0] == 0
    Path("run.old").mkdir()
    Path("run.old/thesis.txt").write_text("years of work")
    before = contents(".")
    code, lines = run(ppo, [*FLAGS, "--overwrite"])
    assert code == 2 and "run.old: holds something that is not a run" in lines[0]
    assert contents(".") == before


def test_after_running_out_of_memory_the_advice_can_be_followed_on_resume(here):
    with out_of_memory("policy_loss", 7, "CUDA out of memory.")():
        code, lines = run(ppo, FLAGS)
    assert code == 1 and "lower --micro_batch_tokens or --rollout_batch_size; run is" in lines[-1]
    less = ["--micro_batch_tokens", "8", "--rollout_batch_size", "2"]
    assert run(ppo, [*FLAGS, "--resume", *less, "--gradient_checkpointing"])[0] == 0
    assert [x["step"] for x in records("run")] == list(range(7))


def test_a_damaged_checkpoint_is_named_and_nothing_is_touched(here):
    assert run(ppo, FLAGS)[0] == 0
    path = Path("run/checkpoint/state.pt")
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    before = contents(".")
    code, lines = run(ppo, [*FLAGS, "--resume", "--num_steps", "8"])
    damage = "run/checkpoint/state.pt is damaged (its checksum is wrong)"
    assert (code, lines) == (2, [f"error: --resume: {damage}; --overwrite starts the run anew"])
    assert contents(".") == before


def test_every_byte_of_a_checkpoint_counts(tmp_path):
    """torch.load alone doesn't notice most of them."""
    path = tmp_path / "state.pt"
    state = dict.fromkeys(FIELDS, 0) | {"weights": {"a": torch.randn(9, 7)}}
    write_state(path, state)
    assert torch.equal(read_state(path)["weights"]["a"], state["weights"]["a"])
    assert [file.name for file in tmp_path.iterdir()] == ["state.pt"]
    data = path.read_bytes()
    for at in range(0, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        with pytest.raises(InputError, match=r"state\.pt is damaged \(its checksum is wrong\)"):
            read_state(path)
    for length in (0, 3, 4, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(InputError, match=r"state\.pt is damaged"):
            read_state(path)


def test_the_checksum_is_that_of_the_whole_file_however_large(tmp_path):
    """It is computed in blocks of 16 MB."""
    path = tmp_path / "state.pt"
    write_state(path, dict.fromkeys(FIELDS, 0) | {"weights": {"a": torch.randn(9_000_000)}})
    with path.open("r+b") as file:
        for at in (10**6, 20 * 10**6):
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))
            file.flush()
            with pytest.raises(InputError, match="its checksum is wrong"):
                read_state(path)
            file.seek(at)
            file.write(byte)
    assert len(read_state(path)["weights"]["a"]) == 9_000_000


def test_a_state_that_cannot_be_written_leaves_the_one_before_it(tmp_path, monkeypatch):
    path = tmp_path / "state.pt"
    write_state(path, dict.fromkeys(FIELDS, 1))
    for name in ("fsync", "replace"):

        def fail(*args):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as m, pytest.raises(Fault, match="No space left on device"):
            m.setattr(*((os, name) if name == "fsync" else (Path, name)), fail)
            write_state(path, dict.fromkeys(FIELDS, 2))
        assert read_state(path)["step"] == 1 and len(list(tmp_path.iterdir())) == 1


def test_a_checkpoint_is_data_and_nothing_in_it_is_run(here):
    class Bad:
        def __reduce__(self):
            return (Path("was_run").touch, ())

    damage()()
    write_state(Path("run/checkpoint/state.pt"), {"step": Bad()})
    code, lines = run(ppo, [*RUN.split(), "--resume"])
    assert code == 2 and "run/checkpoint/state.pt is damaged" in lines[-1]
    assert not Path("was_run").exists()


def test_a_disk_that_fills_up_leaves_the_last_checkpoint_whole(here, monkeypatch):
    assert run(ppo, [*FLAGS, "--output_dir", "whole"])[0] == 0
    save = torch.save

    def full(state, path):
        if state["step"] == 4:
            Path(path).write_bytes(b"half of it")
            raise OSError(28, "No space left on device")
        save(state, path)

    with monkeypatch.context() as m:
        m.setattr(torch, "save", full)
        code, lines = run(ppo, FLAGS)
    assert code == 1 and "No space left on device" in lines[0]
    assert "run is saved up to step 2, --resume goes on from there" in lines[0]
    assert run(ppo, [*FLAGS, "--resume"])[0] == 0
    assert_same_run("run", "whole")


def test_a_second_ctrl_c_stops_in_the_middle_of_a_step_and_keeps_what_there_is(here, monkeypatch):
    assert run(ppo, [*FLAGS, "--output_dir", "whole"])[0] == 0
    original, calls = ppo.masked_whiten, []  # once a step

    def twice(*args):
        calls.append(None)
        if len(calls) == 4:
            before = signal.getsignal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            # Python may run the handler a little later; two signals at once would count as one.
            deadline = time.monotonic() + 5
            while signal.getsignal(signal.SIGINT) == before and time.monotonic() < deadline:
                time.sleep(0.01)
            signal.raise_signal(signal.SIGINT)
        return original(*args)

    # A shell makes what it runs in the background ignore Ctrl-C.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as m:
            m.setattr(ppo, "masked_whiten", twice)
            code, lines = run(ppo, FLAGS)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert code == 130 and lines[-1].startswith("step 3: interrupted; run is saved up to step 3")
    assert run(ppo, [*FLAGS, "--resume"])[0] == 0
    assert_same_run("run", "whole")


def test_lines_that_were_written_after_the_checkpoint_are_not_there_twice(here, monkeypatch):
    """As after a kill: the files are further than the checkpoint."""
    with monkeypatch.context() as m:
        m.setattr(Run, "_save_model", lambda self: shutil.copytree("run/checkpoint", "after_4"))
        stop_after(3, m)
        assert run(ppo, FLAGS)[0] == 130
    assert run(ppo, [*FLAGS, "--resume"])[0] == 0 and len(records("run")) == 7
    shutil.rmtree("run/checkpoint")
    Path("after_4").rename("run/checkpoint")
    with monkeypatch.context() as m:
        stop_after(4, m)
        assert run(ppo, [*FLAGS, "--resume"])[0] == 130
    assert [x["step"] for x in records("run")] == [0, 1, 2, 3, 4]
    text = Path("run/samples.jsonl").read_text().splitlines()
    assert max(json.loads(line)["step"] for line in text) == 4


def test_ctrl_c_in_the_last_step_leaves_its_evaluation_to_resume(here, monkeypatch):
    assert run(ppo, [*FLAGS, "--output_dir", "whole"])[0] == 0
    with monkeypatch.context() as m:
        stop_after(5, m)
        code, lines = run(ppo, FLAGS)
    assert code == 130 and lines[-1].startswith("step 6: interrupted; run is saved up to step 6")
    assert len(records("run")) == 6
    assert run(ppo, [*FLAGS, "--resume"])[0] == 0
    assert_same_run("run", "whole")


def test_half_an_update_is_no_checkpoint_and_its_model_is_said_to_be_that(here, monkeypatch):
    assert run(ppo, [*FLAGS, "--output_dir", "whole"])[0] == 0
    printed = []
    # Two optimiser steps per rollout: call 8 is after the first of step 3.
    with monkeypatch.context() as m, out_of_memory("policy_loss", 8, "CUDA out of memory.")():
        m.setattr("builtins.print", lambda *args, **kwargs: printed.append(args[0]))
        assert run(ppo, FLAGS)[0] == 1
    assert "run is saved up to step 2, --resume goes on from there" in printed[-1]
    assert "run/model holds the model in the middle of step 3." in printed
    assert run(ppo, [*FLAGS, "--resume"])[0] == 0
    assert_same_run("run", "whole")


FREE = """resume overwrite output_dir device num_steps eval_every save_every sample_every save_best
tensorboard wandb micro_batch_size micro_batch_tokens rollout_batch_size gradient_checkpointing
compile record_tokens""".split()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_resumed_run_may_change_where_and_how_it_runs_and_nothing_that_it_computes(
    script, tmp_path
):
    assert FREE == FREE_ON_RESUME
    path = tmp_path / "config.json"
    config = parse_flags(script.Config, "", ["--device", "cpu"])
    path.write_text(json.dumps({"script": script.__name__} | vars(config)))
    check_settings(config, path)
    for name in vars(config):
        other = dataclasses.replace(config, **{name: "another value"})
        if name in FREE:
            check_settings(other, path)
        else:
            with pytest.raises(InputError, match=f"--{name} another value: the run in .* has "):
                check_settings(other, path)


def test_a_run_of_another_kind_of_device_is_not_resumed(here):
    assert run(ppo, FLAGS)[0] == 0
    path = Path("run/checkpoint/state.pt")
    state = read_state(path)
    state["generators"]["sampler"] = torch.zeros(16, dtype=torch.uint8)  # as on CUDA
    write_state(path, state)
    code, lines = run(ppo, [*FLAGS, "--resume", "--num_steps", "8"])
    assert code == 2
    assert lines[-1] == "error: --resume: the run was on another kind of device, see --device"


def test_records_without_a_checkpoint_survive_a_resume_that_fails(here, monkeypatch):
    stop_without_a_checkpoint(1, monkeypatch)
    before = contents("run")
    with monkeypatch.context() as m:
        m.setitem(sys.modules, "wandb", None)  # the last check of all
        assert run(ppo, [*FLAGS, "--resume", "--wandb"])[0] == 2
    assert contents("run") == before and not Path("run.old").exists()
    assert run(ppo, [*FLAGS, "--resume"])[0] == 0
    assert [x["step"] for x in records("run")] == list(range(7))


def start(*flags: str) -> subprocess.Popen:
    script = Path(ppo.__file__)
    return subprocess.Popen(
        [sys.executable, str(script), *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
def test_sigterm_ends_a_real_process_after_its_step_with_a_way_to_go_on(here):
    flags = [*FLAGS, "--num_steps", "10000"]
    process = start(*flags)
    deadline = time.monotonic() + 120
    while not Path("run/metrics.jsonl").exists() or len(records("run")) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 128 + signal.SIGTERM and "Traceback" not in errors
    saved = read_state(Path("run/checkpoint/state.pt"))["step"]
    assert f"run is saved up to step {saved}, --resume goes on from there" in errors
    assert len(records("run")) == saved
    assert Path("run/model/model.safetensors").exists()


@pytest.fixture
def start_forked(monkeypatch):
    """Starts of ppo.py that take no seconds for imports: processes forked off one that has them."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # for the preload
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["small", "ppo", "transformers.models.gpt2.modeling_gpt2"])

    def start(*flags: str) -> multiprocessing.process.BaseProcess:
        process = context.Process(target=run_undrawn, args=(ppo.main, [*flags]))
        process.start()
        return process

    return start


@pytest.mark.slow
def test_kill_9_at_20_random_moments_never_leaves_a_run_that_cannot_go_on(here, start_forked):
    flags = [*FLAGS, "--num_steps", "40", "--save_every", "1"]
    whole = start_forked(*flags, "--output_dir", "whole")
    whole.join(120)
    assert whole.exitcode == 0
    step_seconds = statistics.median(seconds_of_steps("whole"))
    rng, kills, steps = random.Random(0), 0, set()
    metrics = Path("run/metrics.jsonl")
    while kills < 20:  # a second each on a slow machine
        process = start_forked(*flags, "--resume")
        # Mostly within the steps that come after the first line that it writes.
        known = metrics.stat().st_size if metrics.exists() else 0
        latest = time.monotonic() + (rng.random() if rng.random() < 0.2 else 60)
        while process.is_alive() and time.monotonic() < latest:
            time.sleep(0.002)
            if metrics.exists() and metrics.stat().st_size != known:
                time.sleep(rng.random() * 5 * step_seconds)
                break
        process.kill()
        process.join()
        if process.exitcode == 0:  # done: again from the start
            assert_same_run("run", "whole")
            shutil.rmtree("run")
            continue
        assert process.exitcode == -signal.SIGKILL
        kills += 1
        if Path("run/checkpoint/state.pt").exists():
            steps.add(read_state(Path("run/checkpoint/state.pt"))["step"])
    assert len(steps) > 5, "killed before it had computed anything?"
    last = start_forked(*flags, "--resume")
    last.join(120)
    assert last.exitcode == 0
    assert_same_run("run", "whole")


def seconds_of_steps(folder: str) -> list[float]:
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    return [sum(seconds for k, seconds in step.items() if k.startswith("time/")) for step in steps]
