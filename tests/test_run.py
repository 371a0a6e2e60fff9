"""A run: what it leaves, what ends it, and that it goes on as if nothing had happened."""

import functools
import io
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch
from small import files_below, job_maker, letter_pairs, lines_of, run_command, without_times

import grpo
import plumbing.config
import plumbing.data
import plumbing.metrics
import plumbing.run
import ppo
import reward_model
import rloo
from plumbing.config import ANEW, MADE
from plumbing.curves import read_lines
from plumbing.errors import Fault, InputError, blame
from plumbing.run import Run, run_main

FLAGS = """--model small-gpt2 --prompts prompts.jsonl --reward reward.py:spread --num_steps 4
--prompts_per_step 2 --num_generations 2 --max_new_tokens 4 --num_eval_prompts 2
--eval_every 2 --save_every 2 --learning_rate 1e-2 --warmup_steps 2 --device cpu --bf16 false
--eval_prompts heldout.jsonl --output_dir run""".split()
PAIRS = """--model small-gpt2 --pairs pairs.jsonl --num_steps 4 --pairs_per_step 4 --eval_every 2
--save_every 2 --learning_rate 1e-2 --device cpu --bf16 false --output_dir run""".split()
LORA, DROPOUT = ["--lora_r", "2"], ["--disable_dropout", "false"]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a script on a small model: exit code, and what it has printed."""
    job_maker(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, letter_pairs(20))))

    def run(*flags, script=ppo):
        first = PAIRS if script is reward_model else FLAGS
        return run_command(script, [*([] if "--resume" in flags else first), *flags], capsys)

    return run


@functools.cache
def whole():
    """The folder, named by the run itself, of one that nothing interrupts."""
    earlier = [*Path("runs").glob("*")]
    ppo.main(FLAGS[:-2])
    [folder] = (path for path in Path("runs").iterdir() if path not in earlier)
    return folder.resolve()


def assert_same_run(folder, expected):
    records = [without_times(lines_of(Path(x, "metrics.jsonl"))) for x in (folder, expected)]
    assert records[0] == records[1]
    found, wanted = files_below(folder), files_below(expected)
    assert found.keys() == wanted.keys(), "something is left, or is missing"
    for name in wanted:
        if name.endswith(("samples.jsonl", "tokens.jsonl", "warnings.jsonl", ".safetensors")):
            assert found[name] == wanted[name], name


# --- Resume ---


def fails(monkeypatch, module, name, step, error):
    """module.name does its work, and raises the error from that step on; 9 is `kill -9`."""
    original = getattr(module, name)

    def fail(*args, **kwargs):
        result = original(*args, **kwargs)
        if Run.active is None or Run.active.step >= step:  # None: it saves, as it has ended
            if error == 9:
                os.kill(os.getpid(), signal.SIGKILL)
            raise error
        return result

    monkeypatch.setattr(module, name, fail)


def test_a_command_in_the_background_hears_sigint():
    """The shell of a script starts `command &` with SIGINT ignored."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit, match="130"):
            run_main(lambda: os.kill(os.getpid(), signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, handler)


RUNS = {  # flags, and what is interrupted before the weights move
    ppo: (LORA, "sample"),
    grpo: ([*DROPOUT, "--num_epochs", "2"], "sample"),
    rloo: ([*LORA, "--reference", "small-gpt2"], "sample"),
    reward_model: ([*LORA, *DROPOUT], "schedule"),
}


@pytest.mark.parametrize("script", RUNS, ids=lambda script: script.__name__)
def test_an_interrupted_run_goes_on_bit_for_bit(script, run, monkeypatch):
    flags, phase = RUNS[script]
    _, expected = run(*flags, "--output_dir", "expected", script=script)
    rescue, handler = Run.rescue, signal.getsignal(signal.SIGINT)

    def interrupted_again(self):
        os.kill(os.getpid(), signal.SIGINT)  # while it saves
        return rescue(self)

    with monkeypatch.context() as patch:
        fails(patch, script, phase, 3, KeyboardInterrupt())
        patch.setattr(Run, "rescue", interrupted_again)
        code, first = run(*flags, script=script)
    assert signal.getsignal(signal.SIGINT) is handler
    assert code == 130 and first.endswith("--resume run goes on from step 3.\ninterrupted\n")
    assert [x["step"] for x in lines_of("run/metrics.jsonl")] == [0, 1, 2]
    assert f'{{\n  "script": "{script.__name__}",\n' in Path("run/config.json").read_text()
    _, rest = run("--resume", "run", script=script)
    assert_same_run("run", "expected")
    # Each evaluation stands beside that of step 0, after the resume too.
    lines = [re.findall(r"^step \d: eval.*", text, re.M) for text in (expected, first, rest)]
    assert lines[0] == lines[1] + lines[2] and len(lines[0]) == 3
    number = re.search(r" (\S+?),", lines[0][0])[1]
    assert all(f" (was {number})," in line for line in lines[0][1:])
    assert run("--resume", "run", script=script)[0] == 0, "it is done, and may be asked again"
    assert_same_run("run", "expected")


def test_a_resumed_run_knows_what_its_rewards_were(run, monkeypatch):
    """None at step 0, then 0 and 1, then 1 alone: solved, or constant for who doesn't remember."""
    Path("reward.py").write_text(
        "from plumbing.run import Run\n"
        "def spread(completions, **columns):\n"
        "    step = Run.active.step\n"
        "    return [[None, i % 2, 1][min(step, 2)] for i in range(len(completions))]\n"
    )
    flags = ["--num_steps", "9", "--eval_every", "9"]
    run(*flags, "--output_dir", "expected", script=grpo)
    with monkeypatch.context() as patch:
        fails(patch, grpo, "sample", 3, KeyboardInterrupt())
        assert run(*flags, script=grpo)[0] == 130
    code, text = run("--resume", "run", script=grpo)
    assert code == 0 and "warning" not in text
    assert_same_run("run", "expected")


SPACE = OSError(28, "No space left on device")
FULL = RuntimeError("pos. 64, expected 0")  # what torch makes of it
ENDS = {  # what raises in which step, exit code, a part of what is said, where it goes on
    "optimiser": (torch, "_fused_adamw_", 3, KeyboardInterrupt(), 130, "interrupted", 2),
    "records": (Run, "_write", 3, SPACE, 1, "No space left", 2),
    "reward": (plumbing.data, "call_reward", 3, ValueError("verdict"), 1, "verdict", 3),
    "exit": (plumbing.data, "call_reward", 3, SystemExit(0), 1, "exit() was called", 3),
    "early": (torch.optim.Optimizer, "state_dict", 4, FULL, 1, "is the disk full?", 2),
    "state": (torch, "save", 4, FULL, 1, "checkpoint.pt.new can't be written (pos", 2),
    # The checkpoint is written all the same.
    "model": (Run, "_write_model", 4, SPACE, 1, "model.new can't be written ([Errno 28]", 4),
}
FAILED = {"model": "model/", "early": "checkpoint.pt", "state": "checkpoint.pt"}


@pytest.mark.parametrize("end", ENDS)
def test_an_ended_run_goes_on_from_where_it_says(end, run, monkeypatch):
    module, name, in_step, error, expected, words, step = ENDS[end]
    saved, save = [], Run.save
    with monkeypatch.context() as patch:
        fails(patch, module, name, in_step, error)
        patch.setattr(Run, "save", lambda self: [save(self), saved.append(files_below("run"))])
        code, text = run()
        if end == "optimiser":  # one that goes on knows what is saved before it has saved
            code, text = run("--resume", "run")
    assert code == expected and words in text
    assert ("Traceback" in text) == (end in ("reward", "records"))
    assert re.search(rf"\nThe run ended in step \d: --resume run goes on from step {step}\.", text)
    left, kept = files_below("run"), FAILED.get(end, ("checkpoint.pt", "model/"))
    assert {x for x in saved[-1].items() if x[0].startswith(kept)} <= left.items()
    assert not [name for name in left if ".new" in name]
    assert run("--resume", "run")[0] == 0
    assert_same_run("run", whole())


def kill(run, monkeypatch, module, name, *flags):
    """`kill -9` of a run behind module.name, at step 3 if the run has begun its steps."""
    with monkeypatch.context() as patch:
        fails(patch, module, name, 3, 9)
        process = multiprocessing.get_context("fork").Process(target=run, args=flags)
        process.start()
        process.join(300)
    assert process.exitcode == -signal.SIGKILL


def test_kill_9_loses_only_the_steps_since_the_checkpoint(run, monkeypatch):
    kill(run, monkeypatch, ppo, "policy_loss")
    assert [x["step"] for x in lines_of("run/metrics.jsonl")] == [0, 1, 2]
    for name in ("metrics", "samples", "tokens"):
        with Path(f"run/{name}.jsonl").open("ab") as file:
            file.write('{"step": 3, "é'.encode()[:-1])
    assert run("--resume", "run")[0] == 0
    assert_same_run("run", whole())


def test_resume_refuses_other_rows_and_damaged_files(run):
    assert run("--num_steps", "1")[0] == 0
    torch.save(Path("run"), unsafe := io.BytesIO())
    for name, found, fault in (
        ("run/samples.jsonl", b'{"step": 0}\n{"step\n', "samples.jsonl: a line is no record: JSON"),
        ("run/checkpoint.pt", unsafe.getvalue(), "UnpicklingError"),  # it could run anything
        ("prompts.jsonl", b'{"prompt": "new"}', "the rows or the weights of a model aren't"),
    ):
        kept = Path(name).read_bytes()
        Path(name).write_bytes(found)
        before = files_below("run")
        code, text = run("--resume", "run")
        assert code == 2 and fault in text, name
        assert files_below("run") == before, f"with another {name} nothing is lost"
        Path(name).write_bytes(kept)


def test_a_runs_hash_tells_rows_and_weights_apart():
    kept = []  # else the next function could have the same address

    def hashed(train=0, heldout=0, policy=0.0, frozen=0.0):
        models = [torch.nn.Linear(9, 1, bias=False) for _ in range(2)]
        for model, weight in zip(models, (policy, frozen)):
            torch.nn.init.constant_(model.weight, weight)
        kept.append([{"check": lambda: 0, "n": train}])
        data = SimpleNamespace(train=kept[-1], heldout=[heldout], frozen_models=models[1:])
        return Run._hash(SimpleNamespace(models={"policy": models[0]}, data=data))

    assert hashed() == hashed()
    for part in ("train", "heldout", "policy", "frozen"):
        assert hashed(**{part: 1}) != hashed(), part


def test_a_child_that_a_reward_forks_harms_nothing(run, monkeypatch):
    call_reward, parent, ended = plumbing.data.call_reward, os.getpid(), []

    def forks(*args):
        if Run.active and Run.active.step == 3 and not ended:
            if (child := os.fork()) == 0:
                sys.exit(3)
            ended.append(os.waitpid(child, 0)[1] >> 8)
        return call_reward(*args)

    monkeypatch.setattr(plumbing.data, "call_reward", forks)
    code, _ = run()
    if os.getpid() != parent:  # as the end of the script does
        os._exit(code)
    assert code == 0 and ended == [3]
    assert_same_run("run", whole())


def test_overwrite_begins_anew_and_a_fault_loses_nothing(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # what is looked for last
    run("--seed", "1", "--num_steps", "1")
    for name in ("tensorboard/events", "model.new/a", "look.html"):
        Path("run", name).parent.mkdir(exist_ok=True)
        Path("run", name).touch()
    before = files_below("run")
    code, text = run("--overwrite", "--report_to", "wandb")
    assert code == 2 and "\nerror: --report_to wandb: ModuleNotFoundError" in text
    assert files_below("run") == before and "ended in step" not in text, "that was another run"
    assert run("--overwrite")[0] == 0
    assert_same_run("run", whole())
    monkeypatch.setattr(ppo, "sample", Mock(side_effect=KeyboardInterrupt))
    code, text = run("--overwrite")
    assert code == 130 and "The run ended in step 0; nothing is saved." in text
    assert not Path("run/metrics.jsonl").exists(), "the folder is free again"
    assert run("--resume", "run")[0] == 2, "the checkpoint of the old run is gone"
    assert not Path("run/model").exists()
    Path("run/look.html").touch()
    assert run("--num_steps", "0")[0] == 0, "what has no step isn't in the way"
    assert Path("run/look.html").exists(), "nothing is erased without --overwrite"


@pytest.mark.parametrize("name", ["write_text", "unlink"])
def test_overwrite_takes_a_folder_whose_run_was_killed(name, run, monkeypatch):
    """Before its config.json stands, and while --overwrite erases the run before it."""
    if name == "unlink":
        run("--num_steps", "1")
    kill(run, monkeypatch, Path, name, "--overwrite")
    before = files_below("run")
    assert [run("--resume", "run")[0], run()[0]] == [2, 2] and files_below("run") == before
    assert run("--overwrite")[0] == 0
    assert_same_run("run", whole())


def test_a_save_follows_a_link_and_overwrite_leaves_its_target(run):
    run("--num_steps", "1")
    model, disk = Path("run/model"), Path("larger_disk").absolute()
    model.rename(disk)
    model.symlink_to(disk)
    (disk / "model.safetensors").unlink()
    assert run("--resume", "run")[0] == 0 and model.is_symlink()
    assert (kept := files_below(disk)).keys() >= {"model.safetensors"}
    assert run("--overwrite")[0] == 0
    assert_same_run("run", whole())
    assert files_below(disk) == kept and not model.is_symlink(), "of a link only the link goes"


def test_a_model_without_a_checkpoint_is_named(run, monkeypatch):
    fails(monkeypatch, torch, "save", 1, FULL)
    code, text = run("--num_steps", "1")
    assert code == 1 and "The run ended in step 1; model/ is saved, and no checkpoint" in text
    for flags in ([], ["--resume", "run"]):
        code, text = run(*flags)
        assert code == 2 and text.endswith(f": {ANEW}\n")


@pytest.mark.parametrize("flags", [FLAGS[:-2], FLAGS], ids=["default folder", "--output_dir"])
def test_two_runs_started_at_once_never_share_a_folder(flags, run, monkeypatch, capsys):
    """Another run claims the folder when this one has found it free and not yet made it."""
    find, found = plumbing.config.find_folder, []

    def find_and_lose(config):
        found.append(find(config))
        if len(found) == 2:  # the first call is that of the flags
            found[-1].mkdir(parents=True)
            (found[-1] / "metrics.jsonl").touch()
        return found[-1]

    monkeypatch.setattr(plumbing.config, "find_folder", find_and_lose)
    code, text = run_command(ppo, flags, capsys)
    assert files_below(found[1]) == {"metrics.jsonl": b""}, "that is the other run"
    if flags is FLAGS:
        assert code == 2 and "run already holds metrics.jsonl" in text
    else:
        assert code == 0 and found[2].name == f"{found[1].name}-2"
        assert_same_run(found[2], whole())


def test_a_resume_on_a_full_disk_loses_nothing(run, monkeypatch):
    with monkeypatch.context() as patch:
        fails(patch, torch, "_fused_adamw_", 3, KeyboardInterrupt())  # step 2 is saved
        run()
    limits, sample = resource.getrlimit(resource.RLIMIT_FSIZE), ppo.sample

    def fill(*args, **options):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # no file can grow
        return sample(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(ppo, "sample", fill)
        code, text = run("--output_dir", "new")
    assert "step 0; nothing is saved.\n" in text and text.endswith("[Errno 27] File too large\n")
    ends = [run("--resume", "run"), run("--output_dir", "new")]
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for (code, text), flag in zip(ends, ("--resume run", "--output_dir new")):
        assert code == 2 and text.endswith(f"error: {flag}: OSError: [Errno 27] File too large\n")
    assert [run("--resume", "run")[0], run("--output_dir", "new")[0]] == [0, 0]
    assert_same_run("run", whole())


# --- The end of a program ---


def test_a_terminal_that_goes_takes_no_step_along(run, monkeypatch):
    with monkeypatch.context() as patch:
        for name in ("stdout", "stderr"):
            full = io.FileIO("/dev/full", "w")
            patch.setattr(sys, name, io.TextIOWrapper(full, write_through=True))
        fails(patch, ppo, "sample", 3, KeyboardInterrupt())
        assert run()[0] == 130
    assert "goes on from step 4" not in run("--resume", "run")[1]
    assert_same_run("run", whole())


def test_missing_memory_is_one_line_that_says_what_helps(capsys):
    words = "not enough memory: you tried", "MPS backend out of memory", "CUDA out of memory\nmore"
    passed = InputError("a"), Fault("b"), MemoryError(), torch.OutOfMemoryError(words[2])
    for error in passed:
        with pytest.raises(type(error)) as end, blame("--model x"):
            raise error
        assert end.value is error, "of another kind: what was missing was memory"
    for error in (*passed[2:], *map(RuntimeError, words)):
        with pytest.raises(SystemExit) as end:
            run_main(Mock(side_effect=error))
        line = capsys.readouterr().err
        assert end.value.code == 1 and line.count("\n") == 1
        assert "lower --micro_batch_tokens and --rollout_batch_size" in line
    with pytest.raises(ZeroDivisionError):  # in a user's own function
        run_main(lambda: 1 / 0)


def test_a_terminal_shows_the_number_of_characters_it_lacks(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # a notebook's can't be told
    run_main(lambda: print("é", flush=True))
    assert terminal.buffer.getvalue() == b"\\xe9\n"


@pytest.mark.parametrize(("flags", "at", "is_refused"), [([], 0, 1), ([], 1, 0), (DROPOUT, 0, 0)])
def test_step_0_refuses_a_model_that_samples_otherwise(flags, at, is_refused, run, monkeypatch):
    sample = ppo.sample

    def otherwise(*args, **options):  # by 0.8 nats per token
        rollout = sample(*args, **options)
        by = 0.8 * (Run.active.step == at)
        return replace(rollout, logprobs=rollout.logprobs - by * rollout.completion_mask)

    monkeypatch.setattr(ppo, "sample", otherwise)
    code, text = run("--num_steps", "2", *flags)
    fault = "by 0.43 nats per token, beyond rounding: --model small-gpt2 can't be trained here"
    assert code == is_refused == (fault in text)


# --- Records ---


@pytest.mark.parametrize("script", RUNS, ids=lambda script: script.__name__)
def test_a_run_prints_what_it_does_in_80_columns(script, run, monkeypatch):
    monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: lambda file: (80, 24))
    monkeypatch.setattr(plumbing.run, "tqdm", tqdm := Mock(wraps=plumbing.run.tqdm))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3e9)
    text, name = run("--num_steps", "1", script=script)[1], script.__name__
    assert "disable" not in tqdm.call_args.kwargs, "tqdm itself decides, by TQDM_DISABLE say"
    rows, bar = "29 prompts to train on, 3 held out", r"reward \S+, kl \S+, length 4"
    order = ["step 0: eval", "warning", "step 0: samples", "step 1: eval", "what a step"]
    if script is reward_model:
        rows, bar = "20 pairs to train on, 20 held out", r"loss \d\.\d+, accuracy \d\.\d+"
        order = ["step 0: eval", "step 1: eval"]
    assert f"\n{name}: 0.0 M weights train on cpu, {rows}\nIt writes to run\n" in text
    assert re.findall("^(step .: eval|step .: samples|warning|what a step)", text, re.M) == order
    assert re.search(rf"\n{name} 1/1 \|█+\| [\d:]+<[\d:]+, {bar}, \d+ tok/s\n$", text)
    assert lines_of("run/metrics.jsonl")[0]["memory/peak_gb"] == 3
    assert not Path("run/curve.png").exists()
    end = run("--resume", "run", script=script)[1]
    assert re.search(rf"\n{name} 1/1 \|█+\| [\d:]+<\?\n$", end), "nothing is left to do"


def test_a_run_leaves_its_files_in_a_named_folder(run):
    folder, files = whole(), files_below(whole())
    assert folder.name == "ppo-small-gpt2-prompts-s0"
    assert {path.name for path in folder.iterdir()} <= {*MADE}, "--overwrite takes them away"
    assert {"checkpoint.pt", "curve.png", "config.json", "warnings.jsonl"} <= files.keys()
    modes = {path.stat().st_mode for path in (folder / "model").iterdir()}
    assert modes == {(folder / "config.json").stat().st_mode}, "whoever reads one reads all"
    assert files["model/model.safetensors"] != Path("small-gpt2/model.safetensors").read_bytes()
    lines = lines_of(folder / "metrics.jsonl")
    assert lines[0]["memory/peak_gb"] is None, "a CPU's isn't known"
    assert [line["step"] for line in lines] == [*range(5)]
    assert [line.get("episode") for line in lines] == [4, 8, 12, 16, None]
    samples = {(x["split"], x["step"]) for x in lines_of(folder / "samples.jsonl")}
    assert samples == {("train", 0), ("train", 2), *(("heldout", step) for step in (0, 2, 4))}
    assert {x["step"] for x in lines_of(folder / "tokens.jsonl")} == {0, 2}


def test_a_run_without_steps_evaluates_and_stops(run):
    code, text = run("--num_steps", "0", "--eval_prompts", "prompts.jsonl", "--num_eval_prompts=25")
    [line], samples = lines_of("run/metrics.jsonl"), lines_of("run/samples.jsonl")
    assert code == 0 and line["step"] == 0 and len(samples) == 25 and "0/0" not in text
    assert not Path("run/model").exists()
    shown = re.findall(r"^  ( ?-?\d\.\d\d)  (.*) ->", text, re.M)
    assert shown == [(f"{x['score']:5.2f}", x["prompt"]) for x in samples[:20]]


def test_each_sample_stands_beside_its_own_prompt(run):
    reward = "def spread(prompts, **columns): return [None, *map(len, prompts[1:])]"
    Path("reward.py").write_text(reward)
    flags = "--num_steps 1 --prompts_per_step 5 --eval_prompts prompts.jsonl --num_eval_prompts 6"
    code, text = run(*flags.split(), script=grpo)
    samples = [x for x in lines_of("run/samples.jsonl") if x["split"] == "train"]
    assert code == 0 and len(samples) == 10 and len({x["prompt"] for x in samples}) == 5
    assert [x["score"] for x in samples] == [None] + [len(x["prompt"]) for x in samples[1:]]
    evaluated, trained = re.findall(r"step 0: .*\n((?:  .*\n)+)", text)
    assert evaluated.count("\n") == trained.count("\n") == 4
    for line, sample in zip(trained.split("\n")[1:4], samples[2::2]):  # one of each prompt's two
        assert line.startswith(f"  {sample['score']:5.2f}  {sample['prompt']}")
    code, text = run(*flags.split(), "--overwrite", script=ppo)
    assert code == 2 and "a reward is None, and this algorithm needs one" in text


def test_what_json_lacks_is_kept_as_text(run, monkeypatch):
    """A datetime in a dataset's messages, half a surrogate pair in a completion."""
    message = {"role": "user", "content": "x", "at": datetime(2026, 3, 1)}
    record = {"prompt": [message], "completion": "é\ud83d"}
    samples = lambda _, texts, __: ([record] * len(texts), [])  # noqa: E731
    monkeypatch.setattr(plumbing.run, "sample_records", samples)
    assert run("--num_steps", "1")[0] == 0
    Path("run/warnings.jsonl").unlink()  # as if it were empty
    assert run("--resume", "run")[0] == 0  # it reads them
    line = next(x for x in read_lines(Path("run/samples.jsonl")) if x["split"] == "train")
    assert line["prompt"] == [message | {"at": "2026-03-01 00:00:00"}]
    assert line["completion"] == "é\ud83d"
    assert "é" in Path("run/samples.jsonl").read_text(encoding="utf-8"), "people read it too"


def test_trackers_get_every_known_metric_of_every_step(run, monkeypatch):
    tensorboard, wandb = Mock(), Mock()
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: float("inf"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    flags = ["--kl_coef", "0", "--num_steps", "2", "--report_to", "tensorboard", "wandb"]
    assert run(*flags)[0] == 0
    assert "kl" not in lines_of("run/tokens.jsonl")[0], "nobody has measured it"
    known = [{k: v for k, v in x.items() if v is not None} for x in lines_of("run/metrics.jsonl")]
    assert [x.pop("step") for x in known] == [0, 1, 2]
    assert not {"objective/kl", "memory/peak_gb"} & {*known[0]}, "JSON has no infinity"
    scalars = tensorboard.SummaryWriter.return_value.add_scalar.call_args_list
    assert scalars == [call(name, v, step) for step, x in enumerate(known) for name, v in x.items()]
    folder = Path("run").absolute()  # one writer for all steps
    assert tensorboard.SummaryWriter.call_args_list == [call(str(folder / "tensorboard"))]
    settings = json.loads(Path("run/config.json").read_text())
    del settings["script"]
    assert wandb.init.call_args == call(project="plainrlhf", name="run", config=settings)
    logged = wandb.init.return_value.log.call_args_list
    assert logged == [call(x, step=step) for step, x in enumerate(known)]
