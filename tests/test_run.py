"""What a run leaves behind and what it refuses: folder, records, faults, trackers, curves."""

import functools
import json
import math
import multiprocessing
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from small import contents, finished, job_maker, letter_tokenizer, lines_of, save_model, small_gpt2
from transformers import GPT2LMHeadModel, GPT2Model

import grpo
import ppo
from plumbing.config import open_metrics, parse_flags
from plumbing.run import signals
from tools import plot

FLAGS = """--model small-gpt2 --prompts prompts.jsonl --reward reward.py:spread --num_steps 1
--prompts_per_step 4 --num_generations 2 --max_new_tokens 4 --num_eval_prompts 2 --save_every 2
--device cpu --bf16 false""".split()
FORK = multiprocessing.get_context("fork")
REWARD = """
def divides_by_zero(completions, **columns):
    return 1 / 0

def forks(completions, **columns):
    import os
    if (child := os.fork()) == 0:
        raise OSError
    os.waitpid(child, 0)
    return [len(c) for c in completions]

def length_of_prompt(prompts, completions, **columns):
    return [None, *map(len, prompts[1:])]
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a script in a folder with a small model: exit code, and what it has printed."""
    job_maker(tmp_path)
    Path(tmp_path, "more.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "reward", raising=False)  # of another test

    def run(*flags, script=ppo):
        return finished(script, [*FLAGS, "--output_dir", "run", *flags], capsys)

    return run


# --- The folder and the records ---


@pytest.mark.draws
def test_a_run_leaves_its_files_in_a_folder_named_after_script_model_task_and_seed(run):
    ppo.main([*FLAGS, "--seed", "7"])
    [folder] = Path("runs").iterdir()
    assert folder.name == "ppo-small-gpt2-prompts-s7"
    files = contents(folder)
    assert {"checkpoint/state.pt", "curve.png", "samples.jsonl"} <= files.keys()
    assert files["model/model.safetensors"] != Path("small-gpt2/model.safetensors").read_bytes()
    assert json.loads(files["config.json"])["script"] == "ppo"
    assert [line["step"] for line in lines_of(folder / "metrics.jsonl")] == [0, 1]


def test_a_run_is_left_alone_without_overwrite_and_kept_as_old_with_it(run):
    run()
    Path("run/checkpoint/state.pt").unlink()  # it is a run without a checkpoint too
    first = contents("run")
    code, text = run()
    assert code == 2 and contents("run") == first
    assert "run already holds a run: give --resume, --overwrite or another --output_dir" in text
    code, text = run("--overwrite", "--seed", "1")
    assert code == 0 and text.count("The run in run is now run.old.") == 1
    second = contents("run")
    assert contents("run.old") == first and second != first
    assert run("--overwrite", "--seed", "2")[0] == 0
    assert contents("run.old") == second and contents("run") != second


def test_overwrite_loses_nothing_if_the_new_command_is_at_fault(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # the last check of all
    run()
    before = contents(".")
    faults = "--reward more.py:worse", "--prompts nowhere.jsonl", "--report_to wandb"
    for fault in map(str.split, faults):
        assert run("--overwrite", *fault)[0] == 2
        assert contents(".") == before
    kept = contents("run")
    for _ in range(2):  # the second finds a run without a step, which is not worth keeping
        code, text = run("--overwrite", "--reward", "more.py:divides_by_zero")
        assert code == 2 and "saved" not in text
        assert contents("run.old") == kept and not Path("run/checkpoint").exists()
    assert run()[0] == 0, "nor does it need --overwrite"
    assert len(lines_of("run/samples.jsonl")) == 2 + 8 + 2


def test_what_is_not_a_run_is_never_written_to(run):
    Path("run.old").mkdir()
    Path("run.old/thesis.txt").write_text("years of work")
    run()
    before = contents(".")
    for flags, folder, fault in (
        ("--overwrite", "small-gpt2", "small-gpt2: holds something that is not a run"),
        ("--overwrite", "run", "run.old: holds something that is not a run"),
        ("", "reward.py/run", "reward.py/run: can't be"),
    ):
        code, text = run(*flags.split(), "--output_dir", folder)
        assert code == 2 and fault in text and contents(".") == before


def test_a_run_that_began_while_this_one_was_loading_is_left_alone(run, monkeypatch):
    """The same command twice: both found the folder empty."""
    load_policy = ppo.load_policy

    def slow(*args):
        monkeypatch.setattr(ppo, "load_policy", load_policy)
        assert run()[0] == 0
        return load_policy(*args)

    monkeypatch.setattr(ppo, "load_policy", slow)
    code, text = run()
    assert code == 2 and "run already holds a run" in text
    assert len(lines_of("run/metrics.jsonl")) == 2 and not Path("run.old").exists()


def holds(folder, ready):
    file = open_metrics(Path(folder))
    ready.set()
    time.sleep(600)
    file.close()


def test_a_folder_has_one_run_at_a_time_and_one_that_was_killed_blocks_nobody(run):
    run()
    ready = FORK.Event()
    other = FORK.Process(target=holds, args=("run", ready), daemon=True)
    other.start()
    assert ready.wait(60)
    before = contents(".")
    for flag in ("--overwrite", "--resume"):
        code, text = run(flag)
        assert code == 2 and "run: another process has a run there: wait" in text
        assert contents(".") == before
    shutil.rmtree("run/checkpoint")
    Path("run/metrics.jsonl").write_text("")  # as if the other one had just begun
    code, text = run()
    assert code == 2 and "run: another process has a run there: wait" in text
    other.kill()
    other.join()
    assert run()[0] == 0


def test_each_sample_stands_beside_its_own_prompt_and_one_of_each_of_four_is_printed(run):
    code, text = run("--reward", "more.py:length_of_prompt", script=grpo)
    samples = [x for x in lines_of("run/samples.jsonl") if x["split"] == "train"]
    assert code == 0 and len(samples) == 8 and len({x["prompt"] for x in samples}) == 4
    scores = [x["score"] for x in samples]  # JSON has no NaN
    assert scores == [None] + [len(x["prompt"]) for x in samples[1:]]
    shown = text.split("step 0: samples from training\n")[1].split("\n")
    for line, sample in zip(shown[1:4], samples[2::2], strict=True):  # one of each prompt's two
        assert line.startswith(f"  {sample['score']:5.2f}  {sample['prompt']}")
    assert [line[:2] == "  " for line in shown[:5]] == [True] * 4 + [False]


def test_trackers_get_every_known_metric_of_every_step(run, monkeypatch):
    tensorboard, wandb = Mock(), Mock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    flags = ["--kl_coef", "0", "--num_steps", "2", "--report_to", "tensorboard", "wandb"]
    assert run(*flags)[0] == 0
    known = [{k: v for k, v in x.items() if v is not None} for x in lines_of("run/metrics.jsonl")]
    assert [x.pop("step") for x in known] == [0, 1, 2]
    scalars = tensorboard.SummaryWriter.return_value.add_scalar.call_args_list
    assert scalars == [call(name, v, step) for step, x in enumerate(known) for name, v in x.items()]
    logged = wandb.init.return_value.log.call_args_list
    assert logged == [call(x, step=step) for step, x in enumerate(known)]
    options = wandb.init.call_args.kwargs
    assert options["name"] == "run" and options["config"]["num_steps"] == 2
    assert options["resume"] is None, "it would go on with another run of this name"
    assert run(*flags, "--resume")[0] == 0
    # What is there of later steps would be there twice.
    assert tensorboard.SummaryWriter.call_args == call("run/tensorboard", purge_step=2)
    assert wandb.init.call_args.kwargs["resume"] == "allow"


def test_a_tracker_that_is_missing_or_broken_is_named_with_its_command(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    Path("wandb.py").write_text("raise ImportError('undefined symbol: x')")
    monkeypatch.syspath_prepend(".")
    for name in ("tensorboard", "wandb"):
        expected = f"error: --report_to {name}: pip install {name}\n"
        assert run("--report_to", name) == (2, expected)


# --- Faults, signals, and what is refused ---


@pytest.mark.slow
def test_sigterm_ends_a_real_process_after_its_step_with_a_way_to_go_on(run):
    command = [sys.executable, ppo.__file__, *FLAGS, "--num_steps", "10000", "--output_dir", "run"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not Path("run/metrics.jsonl").exists() or len(lines_of("run/metrics.jsonl")) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=120)[1]
    saved = len(lines_of("run/metrics.jsonl"))
    assert process.returncode == 128 + signal.SIGTERM and "Traceback" not in errors
    assert f"run is saved up to step {saved}, --resume goes on from there" in errors


def sends_itself(*numbers):
    for number in numbers:
        signal.raise_signal(number)


def uses_two_threads():
    torch.ones(300, 300) @ torch.ones(300, 300)
    torch.ones(10**6).sin().sum()


@pytest.mark.parametrize(
    ("work", "args", "code"),
    [
        (time.sleep, [60], -signal.SIGTERM),  # ended by `terminate`, as a pool does
        (sends_itself, [signal.SIGINT], 0),  # Ctrl-C, which a terminal sends to all processes
        (sends_itself, [signal.SIGINT] * 2, 1),
        (uses_two_threads, [], 0),  # which OpenMP would wait for
    ],
)
def test_a_process_that_a_reward_forks_can_be_ended_and_doesnt_hang(work, args, code, capfd):
    num_threads = torch.get_num_threads()
    signals.watch()
    try:
        torch.set_num_threads(2)
        uses_two_threads()
        process = FORK.Process(target=work, args=args, daemon=True)
        process.start()
        if work is time.sleep:
            process.terminate()
        process.join(60)
        assert process.exitcode == code and signals.seen is None
        assert "finishing what is begun" not in capfd.readouterr().err
    finally:
        process.kill()
        signals.restore()
        torch.set_num_threads(num_threads)


def test_a_process_that_a_reward_forks_saves_nothing_when_it_fails(run, tmp_path):
    """Else its state is written over that of the run, which goes on."""
    flags = [*FLAGS, "--output_dir", "run", "--reward", "more.py:forks"]
    command = [sys.executable, str(Path(ppo.__file__)), *flags]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0 and Path(tmp_path, "run", "model").exists()
    assert "OSError" in found.stderr and "is saved" not in found.stderr


def test_the_chosen_cuda_device_becomes_the_current_one(monkeypatch):
    """CUDA graphs are captured on the current device, whatever the device of their tensors."""
    chosen = []
    there = types.SimpleNamespace(device=torch.device("cuda:1"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *args, device: there)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    flags = ["--device", "cuda:1", "--bf16", "false", "--output_dir", "nowhere"]
    parse_flags(ppo.Config, "", flags)
    assert chosen == [torch.device("cuda:1")]


def test_a_model_with_weights_that_are_not_finite_is_refused(run):
    model = small_gpt2(vocab_size=20)
    model.transformer.h[0].mlp.c_fc.weight.data[0, 0] = math.nan
    save_model(Path("nan"), model, letter_tokenizer())
    code, text = run("--model", "nan")
    assert code == 2 and "can't be used, its logits are not finite" in text


CALLS = {  # the ways in which a model is called, by what its backbone's forward pass can see
    "a head of its own": None,
    "without a cache": lambda model, tokens, options: options.get("cache") is None,
    "in training mode": lambda model, tokens, options: model.training,
    "prompts that share a cache": lambda model, tokens, options: (
        model.training and options.get("cache") is not None
    ),
    "token by token": lambda model, tokens, options: tokens.shape[1] == 1,
    "with padding": lambda model, tokens, options: not options["attention_mask"].all(),
    "with checkpointing": lambda model, tokens, options: (
        model.training and model.gradient_checkpointing
    ),
}


@pytest.mark.parametrize("way", CALLS)
def test_a_model_that_computes_otherwise_in_one_way_of_calling_it_is_refused(way, run, monkeypatch):
    kind = GPT2LMHeadModel if CALLS[way] is None else GPT2Model
    forward = kind.forward

    @functools.wraps(forward)  # its arguments are looked at
    def otherwise(self, input_ids, **options):
        out = forward(self, input_ids, **options)
        if CALLS[way] is None:
            out.logits = 2 * out.logits
        elif CALLS[way](self, input_ids, options):
            out.last_hidden_state = out.last_hidden_state.flip(-1)
        return out

    monkeypatch.setattr(kind, "forward", otherwise)
    code, text = run("--gradient_checkpointing", str(way == "with checkpointing"))
    assert code == 2 and "off when it is called in another way" in text


# --- Curves ---


@pytest.mark.draws
def test_seeds_become_one_line_of_means_in_a_band(tmp_path, monkeypatch):
    folders, axes, save = [], [], Figure.savefig
    for seed in (0, 1, 11):
        folders.append(tmp_path / f"ppo-tiny-add-s{seed}")
        folders[-1].mkdir()
        lines = [{"step": step, "objective/scores": step + seed} for step in range(4)]
        lines[0] |= {"eval/reward": 1.0, "eval/accuracy": None}
        text = [*map(json.dumps, lines), '{"step": 4, "objective/sc']  # the run is writing it
        (folders[-1] / "metrics.jsonl").write_text("\n".join(text))

    def spy(figure, *args, **kwargs):
        axes.extend(figure.axes)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", spy)
    plot.main([*map(str, folders), "--output", str(tmp_path / "page.svg")])
    [line], [band] = axes[0].lines, axes[0].collections
    assert np.allclose(line.get_ydata(), [4, 5, 6, 7]) and list(line.get_xdata()) == [0, 1, 2, 3]
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (0, 14)
    assert line.get_label() == "ppo-tiny-add (3 seeds)"
    assert axes[5].lines[0].get_ydata() == [1], "the reward, where nothing is right or wrong"
