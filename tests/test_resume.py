"""An interrupted run goes on as if it had never been interrupted."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import letter_tokenizer, save_model, small_gpt2
from faults import RUN, Case, damage, folder_of, out_of_memory, run
from safetensors.torch import load_file

import grpo
import ppo
import rloo
from plumbing.runs import Run, _crc32

SCRIPTS = [ppo, grpo, rloo]
MEASURED = ("time/", "memory/", "tokens_per_second")  # what differs from run to run anyway
FLAGS = f"{RUN} --eval_every 2 --num_epochs 2 --learning_rate 1e-2 --sample_every 2".split()


@pytest.fixture
def here():
    with folder_of(Case("", "", "")):
        yield


def records(folder: str) -> list[dict]:
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in x.items() if not k.startswith(MEASURED)} for x in lines]


def assert_same_run(folder: str, expected: str) -> None:
    assert records(folder) == records(expected)
    same = "samples.jsonl"
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


@pytest.mark.parametrize("lora", [0, 2], ids=["all weights", "LoRA"])
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
    assert len(records("run")) == 7 and records("run")[3]["lr"] < records("run")[0]["lr"]
    assert_same_run("run", "whole")


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


def test_resume_without_a_run_starts_one_and_without_a_checkpoint_starts_anew(here, monkeypatch):
    assert run(ppo, [*FLAGS, "--resume"])[0] == 0
    monkeypatch.setattr(Run, "_checkpoint", lambda self: None)
    monkeypatch.setattr(Run, "_save", lambda self: None)
    with monkeypatch.context() as m:
        stop_after(1, m)
        assert run(ppo, [*FLAGS, "--output_dir", "other"])[0] == 130
    assert len(records("other")) == 2
    assert run(ppo, [*FLAGS, "--output_dir", "other", "--resume"])[0] == 0
    assert records("other") == records("run")


def contents(folder: str) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


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
    code, lines = run(ppo, [*FLAGS, "--overwrite", "--reward", "reward.py:raises"])
    assert code == 2 and "saved" not in lines[0]
    assert contents("run") == before


def test_after_running_out_of_memory_the_advice_can_be_followed_on_resume(here):
    with out_of_memory("policy_loss", 7, "CUDA out of memory.")():
        code, lines = run(ppo, FLAGS)
    assert code == 1 and "lower --micro_batch_tokens or --rollout_batch_size; run is" in lines[-1]
    less = ["--micro_batch_tokens", "8", "--rollout_batch_size", "2"]
    assert run(ppo, [*FLAGS, "--resume", *less, "--gradient_checkpointing"])[0] == 0
    assert [x["step"] for x in records("run")] == list(range(7))


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(here, monkeypatch):
    assert run(ppo, [*FLAGS, "--output_dir", "whole"])[0] == 0
    with monkeypatch.context() as m:
        stop_after(4, m)
        assert run(ppo, FLAGS)[0] == 130
    path = Path("run/checkpoint/state.pt")
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    printed = []
    monkeypatch.setattr("builtins.print", lambda *args, **kwargs: printed.append(args[0]))
    assert run(ppo, [*FLAGS, "--resume"])[0] == 0
    assert "run/checkpoint is damaged, it is left out: its checksum is wrong" in printed
    assert "run/checkpoint.old is whole: going on after 4 steps." in printed
    monkeypatch.undo()
    assert_same_run("run", "whole")


def test_a_checkpoint_is_data_and_nothing_in_it_is_run(here):
    class Bad:
        def __reduce__(self):
            return (Path("was_run").touch, ())

    damage()()
    for folder in ("run/checkpoint", "run/checkpoint.old"):
        torch.save({"step": Bad()}, f"{folder}/state.pt")
        record = {"step": 1, "crc32": _crc32(Path(folder, "state.pt"))}
        Path(folder, "record.json").write_text(json.dumps(record))
    code, lines = run(ppo, [*RUN.split(), "--resume"])
    assert code == 2 and "no checkpoint that is whole" in lines[-1]
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
    original, calls = ppo.gae, []

    def twice(*args):
        calls.append(None)
        if len(calls) == 4:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return original(*args)

    with monkeypatch.context() as m:
        m.setattr(ppo, "gae", twice)
        code, lines = run(ppo, FLAGS)
    assert code == 130 and lines[-1].startswith("step 3: interrupted; run is saved up to step 3")
    assert run(ppo, [*FLAGS, "--resume"])[0] == 0
    assert_same_run("run", "whole")


def test_lines_that_were_written_after_the_checkpoint_are_not_there_twice(here, monkeypatch):
    """As after a kill: the files are further than the checkpoint."""
    assert run(ppo, FLAGS)[0] == 0
    shutil.rmtree("run/checkpoint")  # checkpoint.old is that after step 4
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


def test_a_run_of_another_kind_of_device_is_not_resumed(here):
    assert run(ppo, FLAGS)[0] == 0
    path = Path("run/checkpoint/state.pt")
    state = torch.load(path, weights_only=True)
    state["generators"]["sampler"] = torch.zeros(16, dtype=torch.uint8)  # as on CUDA
    torch.save(state, path)
    record = {"step": state["step"], "crc32": _crc32(path)}
    (path.parent / "record.json").write_text(json.dumps(record))
    code, lines = run(ppo, [*FLAGS, "--resume", "--num_steps", "8"])
    assert code == 2
    assert lines[-1] == "error: --resume: the run was on another kind of device, see --device"


def test_records_without_a_checkpoint_survive_a_resume_that_fails(here, monkeypatch):
    with monkeypatch.context() as m:
        m.setattr(Run, "_checkpoint", lambda self: None)
        stop_after(1, m)
        assert run(ppo, FLAGS)[0] == 130
    before = contents("run")
    assert run(ppo, [*FLAGS, "--resume", "--reward", "reward.py:raises"])[0] == 2
    assert contents("run") == before
    assert run(ppo, [*FLAGS, "--resume"])[0] == 0
    assert [x["step"] for x in records("run")] == list(range(7))


def start(*flags: str) -> subprocess.Popen:
    script = Path(ppo.__file__)
    return subprocess.Popen(
        [sys.executable, str(script), *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


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
    saved = json.loads(Path("run/checkpoint/record.json").read_text())["step"]
    assert f"run is saved up to step {saved}, --resume goes on from there" in errors
    assert len(records("run")) == saved
    assert Path("run/model/model.safetensors").exists()


@pytest.mark.slow
def test_kill_9_at_50_random_moments_never_leaves_a_run_that_cannot_go_on(here):
    flags = [*FLAGS, "--num_steps", "40", "--save_every", "1"]
    assert run(ppo, [*flags, "--output_dir", "whole"])[0] == 0
    rng, kills, steps = random.Random(0), 0, set()
    while kills < 50:
        process = start(*flags, "--resume")
        # Mostly while it writes: after the start, which takes seconds.
        before = Path("run/metrics.jsonl")
        known = before.stat().st_size if before.exists() else 0
        while process.poll() is None and rng.random() < 0.97:
            time.sleep(0.1)
            if before.exists() and before.stat().st_size != known:
                time.sleep(rng.random() * 0.3)
                break
        process.kill()
        process.communicate()
        if process.returncode == 0:  # done: again from the start
            assert_same_run("run", "whole")
            shutil.rmtree("run")
        elif Path("run/checkpoint/record.json").exists():
            steps.add(json.loads(Path("run/checkpoint/record.json").read_text())["step"])
        kills += 1
    assert len(steps) > 10, "killed before it had computed anything?"
    process = start(*flags, "--resume")
    errors = process.communicate(timeout=300)[1]
    assert process.returncode == 0, errors
    assert_same_run("run", "whole")
