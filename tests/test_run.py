"""A run: what it leaves, what ends it, and that it goes on as if nothing had happened."""

import functools
import io
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch
from safetensors import SafetensorError
from small import (
    computed,
    contents,
    finished,
    job_maker,
    letter_tokenizer,
    lines_of,
    rows_of,
    save_model,
)
from transformers import GPT2Config, GPT2ForSequenceClassification

import grpo
import plumbing.config
import plumbing.data
import plumbing.metrics
import plumbing.run
import ppo
import reward_model
import rloo
from plumbing.config import MADE
from plumbing.errors import Fault, InputError, blame
from plumbing.metrics import read_lines
from plumbing.run import Run, run_main

FLAGS = """--model small-gpt2 --prompts prompts.jsonl --reward reward.py:spread --num_steps 4
--prompts_per_step 2 --num_generations 2 --num_epochs 2 --max_new_tokens 4 --num_eval_prompts 2
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
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, rows_of(20))))

    def run(*flags, script=ppo):
        first = PAIRS if script is reward_model else FLAGS
        return finished(script, [*([] if "--resume" in flags else first), *flags], capsys)

    return run


@functools.cache
def whole():
    """The folder, named by the run itself, of one that nothing interrupts."""
    ppo.main(FLAGS[:-2])
    [folder] = Path("runs").iterdir()
    return folder.resolve()


def assert_same_run(folder, expected):
    records = [computed(lines_of(Path(x, "metrics.jsonl"))) for x in (folder, expected)]
    assert records[0] == records[1]
    found, wanted = contents(folder), contents(expected)
    assert found.keys() == wanted.keys(), "something is left, or is missing"
    for name in wanted:
        if name.endswith(("samples.jsonl", "tokens.jsonl", ".safetensors")):
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


RUNS = {  # flags, and what is interrupted before the weights move
    ppo: (LORA, "sample"),
    grpo: (DROPOUT, "sample"),
    rloo: ([*LORA, "--reference", "small-gpt2", "--num_mini_batches", "2"], "sample"),
    reward_model: ([*LORA, *DROPOUT], "schedule"),
}


@pytest.mark.parametrize("script", RUNS, ids=lambda script: script.__name__)
def test_an_interrupted_run_goes_on_bit_for_bit(script, run, monkeypatch):
    flags, phase = RUNS[script]
    _, expected = run(*flags, "--output_dir", "expected", script=script)
    with monkeypatch.context() as patch:
        fails(patch, script, phase, 3, KeyboardInterrupt())
        code, first = run(*flags, script=script)
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


SPACE = OSError(28, "No space left on device")
FULL = RuntimeError("pos. 64, expected 0")  # what torch makes of it
LACKS_SPACE = SafetensorError("I/O error: No space left on device (os error 28)")
ENDS = {  # what raises in which step, exit code, a part of what is said, where it goes on
    "optimiser": (torch, "_fused_adamw_", 3, KeyboardInterrupt(), 130, "interrupted", 2),
    "records": (Run, "_write", 3, SPACE, 1, "No space left", 2),
    "reward": (plumbing.data, "call_reward", 3, ValueError("verdict"), 1, "verdict", 3),
    "exit": (plumbing.data, "call_reward", 3, SystemExit(0), 1, "exit() was called", 3),
    "early": (torch.optim.Optimizer, "state_dict", 4, FULL, 1, "is the disk full?", 2),
    "state": (torch, "save", 4, FULL, 1, "checkpoint.pt.new can't be written (pos", 2),
    # The checkpoint is written all the same.
    "model": (Run, "_write_model", 4, SPACE, 1, "model.new can't be written ([Errno 28]", 4),
    "weights": (Run, "_write_model", 4, LACKS_SPACE, 1, "be written (I/O error: No space", 4),
}
FAILED = dict.fromkeys(("model", "weights"), "model/")
FAILED |= dict.fromkeys(("early", "state"), "checkpoint.pt")


@pytest.mark.parametrize("end", ENDS)
def test_what_ends_a_run_says_what_is_saved_and_the_run_goes_on_from_there(end, run, monkeypatch):
    module, name, in_step, error, expected, words, step = ENDS[end]
    saved, save = [], Run.save
    with monkeypatch.context() as patch:
        fails(patch, module, name, in_step, error)
        patch.setattr(Run, "save", lambda self: [save(self), saved.append(contents("run"))])
        code, text = run()
        if end == "optimiser":  # one that goes on knows what is saved before it has saved
            code, text = run("--resume", "run")
    assert code == expected and words in text
    assert ("Traceback" in text) == (end in ("reward", "records"))
    assert re.search(rf"\nThe run ended in step \d: --resume run goes on from step {step}\.", text)
    left, kept = contents("run"), FAILED.get(end, ("checkpoint.pt", "model/"))
    assert {x for x in saved[-1].items() if x[0].startswith(kept)} <= left.items()
    assert not [name for name in left if ".new" in name]
    assert run("--resume", "run")[0] == 0
    assert_same_run("run", whole())


def test_kill_9_and_half_a_line_lose_only_the_steps_since_the_checkpoint(run, monkeypatch):
    with monkeypatch.context() as patch:
        fails(patch, ppo, "policy_loss", 3, 9)
        process = multiprocessing.get_context("fork").Process(target=run)
        process.start()
        process.join(300)
    assert process.exitcode == -signal.SIGKILL
    assert [x["step"] for x in lines_of("run/metrics.jsonl")] == [0, 1, 2]
    Path("run/warnings.jsonl").unlink()  # as if it were empty
    for name in ("metrics", "samples", "tokens"):
        with Path(f"run/{name}.jsonl").open("ab") as file:
            file.write('{"step": 3, "é'.encode()[:-1])
    assert run("--resume", "run")[0] == 0
    assert_same_run("run", whole())


def test_a_run_does_not_go_on_with_other_rows_or_another_model(run):
    Path("held.jsonl").write_bytes(Path("prompts.jsonl").read_bytes())
    shutil.copytree("small-gpt2", "teacher")
    judge = GPT2ForSequenceClassification(GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=1))
    judge.config.num_labels, judge.score = 1, torch.nn.Linear(8, 1, bias=False)
    save_model(Path("judge"), judge, letter_tokenizer())
    models = ["small-gpt2", "teacher", "judge"]
    flags = "--reference teacher --reward_model judge --eval_prompts held.jsonl --num_steps 1"
    assert run(*flags.split())[0] == 0
    before = contents("run")
    for name in ("prompts.jsonl", "held.jsonl", *(f"{x}/model.safetensors" for x in models)):
        kept = (file := Path(name)).read_bytes()
        other = kept.replace(b"yy y", b"yy z", 1) if name.endswith("jsonl") else kept[:-4] + b"1234"
        file.write_bytes(other)  # the last of the weights is another one
        code, text = run("--resume", "run")
        assert code == 2 and "the rows or the weights of a model aren't" in text, name
        assert contents("run") == before
        file.write_bytes(kept)
    whole_file = Path("run/checkpoint.pt").read_bytes()
    state = torch.load("run/checkpoint.pt", weights_only=True)
    Path("run/checkpoint.pt").write_bytes(whole_file[:-100])
    assert "run/checkpoint.pt is cut short, or of another" in run("--resume", "run")[1]
    del state["first_metrics"]
    torch.save(state, "run/checkpoint.pt")
    assert "version: --overwrite begins anew: KeyError" in run("--resume", "run")[1]
    Path("run/checkpoint.pt").write_bytes(whole_file)
    Path("run/samples.jsonl").write_text('{"step": 0}\n{"step\n')
    code, text = run("--resume", "run")
    assert code == 2 and "run/samples.jsonl: a line is no record: JSONDecodeError" in text
    torch.save(Path("run"), "run/checkpoint.pt")
    code, text = run("--resume", "run")
    assert code == 2 and "UnpicklingError" in text, "it could run anything"


FORKS = """import os, sys
CALLS = []

def plain(completions, **columns):
    return [float(len(text)) for text in completions]

def forks(completions, **columns):
    CALLS.append(0)
    if len(CALLS) == 5:
        if (child := os.fork()) == 0:
            END
        with open("ended", "w") as file:
            file.write(str(os.waitpid(child, 0)[1] >> 8))
    return plain(completions)
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [("sys.exit(3)", 3), ("raise ValueError('no')", 1)],
)
def test_a_child_that_a_reward_forks_harms_nothing(end, code, run):
    Path("forks.py").write_text(FORKS.replace("END", end))
    parent = os.getpid()
    ended, _ = run("--reward", "forks.py:forks")
    if os.getpid() != parent:  # as the end of the script does
        os._exit(ended)
    assert ended == 0 and Path("ended").read_text() == str(code)
    assert run("--reward", "forks.py:plain", "--output_dir", "expected")[0] == 0
    assert_same_run("run", "expected")


def test_a_second_interrupt_does_not_end_the_saving(run, monkeypatch):
    save, handler = Run.save, signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        fails(patch, ppo, "sample", 3, KeyboardInterrupt())
        patch.setattr(Run, "save", lambda self: [os.kill(os.getpid(), signal.SIGINT), save(self)])
        code, text = run("--save_every", "50")
    assert code == 130 and text.endswith("--resume run goes on from step 3.\ninterrupted\n")
    assert signal.getsignal(signal.SIGINT) is handler


def test_rows_that_hold_a_function_are_the_same_in_the_next_process():
    rows = [[{"check": (lambda: 0), "n": n}] for n in (1, 1, 2)]  # each function has its address
    datas = [SimpleNamespace(train=row, heldout=[]) for row in rows]
    first, again, other = [Run._hash(SimpleNamespace(models={}, data=data)) for data in datas]
    assert first == again != other


def test_overwrite_begins_anew_and_a_command_at_fault_loses_nothing(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # what is looked for last
    run("--seed", "1", "--num_steps", "1")
    for name in ("tensorboard/events", "model.new/a", "look.html"):
        Path("run", name).parent.mkdir(exist_ok=True)
        Path("run", name).touch()
    before = contents("run")
    code, text = run("--overwrite", "--report_to", "wandb")
    assert code == 2 and "\nerror: --report_to wandb: ModuleNotFoundError" in text
    assert contents("run") == before and "ended in step" not in text, "that was another run"
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


@pytest.mark.parametrize(("flags", "codes"), [(FLAGS[:-2], [0, 0]), (FLAGS, [0, 2])])
def test_two_runs_that_start_at_once_never_share_a_folder(flags, codes, run, monkeypatch, capsys):
    """Both load the model and then find the same folder free, before one of them makes it."""
    expected, calls, fork = whole(), [], multiprocessing.get_context("fork")
    before, both, find = {*Path().glob("run*/*")}, fork.Barrier(2), plumbing.config.find_folder

    def find_at_once(config):
        folder = find(config)
        calls.append(folder)
        if len(calls) == 2:  # the first one is that of the flags
            both.wait(60)
        return folder

    monkeypatch.setattr(plumbing.config, "find_folder", find_at_once)
    start = lambda: sys.exit(finished(ppo, flags, capsys)[0])  # noqa: E731
    processes = [fork.Process(target=start) for _ in range(2)]
    [process.start() for process in processes]
    [process.join(300) for process in processes]
    assert sorted(process.exitcode for process in processes) == codes
    folders = [Path("run")] if Path("run").exists() else {*Path().glob("run*/*")} - before
    assert len(folders) == codes.count(0)
    for folder in folders:
        assert_same_run(folder, expected)


def test_on_a_full_disk_a_resume_loses_nothing_and_a_start_leaves_nothing(run, monkeypatch):
    with monkeypatch.context() as patch:
        fails(patch, ppo, "policy_loss", 3, KeyboardInterrupt())
        fails(patch, torch, "save", 3, FULL)
        text = run()[1]
    assert "is the disk full?\nThe run ended in step 3: --resume run goes on from step 2." in text
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # no file can grow
    ends = [run("--resume", "run"), run("--output_dir", "new")]
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    fault = "OSError: [Errno 27] File too large\n"
    assert [code for code, _ in ends] == [2, 2]
    assert ends[0][1].endswith(f"error: --resume run: {fault}")
    assert ends[1][1].endswith(f"error: --output_dir new: {fault}")
    assert [run("--resume", "run")[0], run("--output_dir", "new")[0]] == [0, 0]
    assert_same_run("run", whole())


# --- The end of a program ---


def test_memory_that_is_missing_in_whatever_words_is_one_line_that_says_what_helps(capsys):
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


def test_a_character_that_the_terminal_lacks_is_shown_as_its_number(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # a notebook's can't be told
    run_main(lambda: print("é", flush=True))
    assert terminal.buffer.getvalue() == b"\\xe9\n"


@pytest.mark.parametrize(("flags", "at", "is_refused"), [([], 0, 1), ([], 1, 0), (DROPOUT, 0, 0)])
def test_a_model_that_samples_otherwise_than_it_trains_is_refused_at_step_0(
    flags, at, is_refused, run, monkeypatch
):
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

PRINTED = """3 of the 3 held-out prompts are trained on as well.
Different prompts: 8. The model continues, for one, 'the'
NAME: 0.0 M weights train on cpu, 29 prompts to train on, 3 held out
It writes to run
step 0: eval/reward #, greedy #
  samples
warning, step 0: #
step 0: samples from training
  samples
step 1: eval/reward # (was #), greedy # (was #)
  samples
what a step did to each token: python tools/look.py run
NAME 1/1 |#| #<#, reward #, kl #, length 4, # tok/s
"""
OF_PAIRS = """Fewer than ten prompts: none is held out, they are trained on and evaluated.
NAME: 0.0 M weights train on cpu, 20 pairs to train on, 20 held out
It writes to run
step 0: eval/accuracy #, eval/loss #
  samples
step 1: eval/accuracy # (was #), eval/loss # (was #)
  samples
NAME 1/1 |#| #<#, loss #, accuracy #, # tok/s
"""


@pytest.mark.parametrize("script", RUNS, ids=lambda script: script.__name__)
def test_a_run_prints_what_it_does_and_its_bar_fits_into_80_columns(script, run, monkeypatch):
    monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: lambda file: (80, 24))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3e9)
    texts = [run(*flags, script=script)[1] for flags in (["--num_steps", "1"], ["--resume", "run"])]
    assert lines_of("run/metrics.jsonl")[0]["memory/peak_gb"] == 3
    assert not Path("run/curve.png").exists()
    for warning in lines_of("run/warnings.jsonl"):
        texts[0] = texts[0].replace(warning["text"], "#")
    texts = [re.sub(r"(\n  .*)+", "\n  samples", text) for text in texts]
    texts = [re.sub(r"-?\d+\.\d\d+|\d+(?= tok)|\d\d:\d\d|█+", "#", text) for text in texts]
    expected = (OF_PAIRS if script is reward_model else PRINTED).replace("NAME", script.__name__)
    assert texts[0] == expected
    assert texts[1].endswith(f"\n{script.__name__} 1/1 |#| #<?\n"), "nothing is left to do"


def test_a_run_leaves_its_files_in_a_folder_named_after_script_model_task_and_seed(run):
    folder, files = whole(), contents(whole())
    assert folder.name == "ppo-small-gpt2-prompts-s0"
    assert {path.name for path in folder.iterdir()} <= {*MADE}, "--overwrite takes them away"
    assert {"checkpoint.pt", "curve.png", "config.json", "warnings.jsonl"} <= files.keys()
    assert files["model/model.safetensors"] != Path("small-gpt2/model.safetensors").read_bytes()
    lines = lines_of(folder / "metrics.jsonl")
    assert lines[0]["memory/peak_gb"] is None, "a CPU's isn't known"
    assert [line["step"] for line in lines] == [*range(5)]
    assert [line.get("episode") for line in lines] == [4, 8, 12, 16, None]
    samples = {(x["split"], x["step"]) for x in lines_of(folder / "samples.jsonl")}
    assert samples == {("train", 0), ("train", 2), *(("heldout", step) for step in (0, 2, 4))}
    assert {x["step"] for x in lines_of(folder / "tokens.jsonl")} == {0, 2}


def test_without_steps_a_run_evaluates_shows_twenty_samples_with_their_scores_and_stops(run):
    code, text = run("--num_steps", "0", "--eval_prompts", "prompts.jsonl", "--num_eval_prompts=25")
    [line], samples = lines_of("run/metrics.jsonl"), lines_of("run/samples.jsonl")
    assert code == 0 and line["step"] == 0 and len(samples) == 25 and "0/0" not in text
    assert not Path("run/model").exists()
    shown = re.findall(r"^  ( ?-?\d\.\d\d)  (.*) ->", text, re.M)
    assert shown == [(f"{x['score']:5.2f}", x["prompt"]) for x in samples[:20]]


def test_each_sample_stands_beside_its_own_prompt_and_one_of_each_of_four_is_printed(run):
    reward = "def spread(prompts, **columns): return [None, *map(len, prompts[1:])]"
    Path("reward.py").write_text(reward)
    flags = "--num_steps 1 --prompts_per_step 5 --eval_prompts prompts.jsonl".split()
    flags += ["--num_eval_prompts", "6"]
    code, text = run(*flags, script=grpo)
    samples = [x for x in lines_of("run/samples.jsonl") if x["split"] == "train"]
    assert code == 0 and len(samples) == 10 and len({x["prompt"] for x in samples}) == 5
    scores = [x["score"] for x in samples]  # JSON has no NaN
    assert scores == [None] + [len(x["prompt"]) for x in samples[1:]]
    shown = text.split("step 0: samples from training\n")[1].split("\n")
    for line, sample in zip(shown[1:4], samples[2:8:2], strict=True):  # one of each prompt's two
        assert line.startswith(f"  {sample['score']:5.2f}  {sample['prompt']}")
    for lines in (shown, text.split("step 0: eval/")[1].split("\n")[1:]):
        assert [line[:2] == "  " for line in lines[:5]] == [True] * 4 + [False]
    code, text = run(*flags, "--overwrite", script=ppo)
    assert code == 2 and "a reward is None, and this algorithm needs one" in text


def test_what_json_lacks_in_a_prompt_is_written_as_text(run, monkeypatch):
    """Of a dataset's messages: a datetime, bytes."""
    row = {"prompt": [message := {"role": "user", "content": "x", "at": datetime(2026, 3, 1)}]}
    one, _ = plumbing.metrics.sample_records([row], ["y"], torch.zeros(1))
    monkeypatch.setattr(plumbing.run, "sample_records", lambda _, texts, __: (one * len(texts), []))
    assert run("--num_steps", "1")[0] == 0
    lines = [x for x in lines_of("run/samples.jsonl") if x["split"] == "train"]
    assert lines[0]["prompt"] == [message | {"at": "2026-03-01 00:00:00"}]


def test_tqdm_itself_decides_whether_a_bar_is_shown(run, monkeypatch):
    """By TQDM_DISABLE, say."""
    monkeypatch.setattr(plumbing.run, "tqdm", bar := Mock(wraps=plumbing.run.tqdm))
    run("--num_steps", "1")
    assert "disable" not in bar.call_args.kwargs


def test_half_a_surrogate_pair_in_a_text_ends_no_run_and_is_kept(run, monkeypatch):
    monkeypatch.setattr(plumbing.data, "decode", lambda _, x, ids: ["é\ud83d"] * len(x.tokens))
    assert run("--num_steps", "1")[0] == 0
    assert run("--resume", "run")[0] == 0  # it reads the records and writes them again
    lines = read_lines(Path("run/samples.jsonl"))
    assert {line["completion"] for line in lines} == {"é\ud83d"}
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
