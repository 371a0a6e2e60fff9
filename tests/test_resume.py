"""An interrupted run goes on as if it had never been interrupted."""

import json
import multiprocessing
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from small import computed, contents, finished, job_maker, lines_of, run_undrawn

import grpo
import ppo
import rloo
from plumbing.errors import Fault
from plumbing.run import FIELDS, read_state, write_state

FLAGS = """--model small-gpt2 --prompts prompts.jsonl --reward reward.py:spread --num_steps 6
--prompts_per_step 2 --num_generations 2 --num_epochs 2 --max_new_tokens 4 --num_eval_prompts 2
--eval_every 2 --save_every 2 --learning_rate 1e-2 --warmup_steps 2 --device cpu --bf16 false
--output_dir run""".split()
LORA, DROPOUT = ["--lora_r", "2"], ["--disable_dropout", "false"]
FREE = """resume overwrite output_dir device eval_every save_every report_to micro_batch_tokens
rollout_batch_size cuda_graphs gradient_checkpointing""".split()


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a script in a folder with a small model: exit code, and what it has printed."""
    job_maker(tmp_path)
    monkeypatch.chdir(tmp_path)

    def run(script, *flags):
        return finished(script, [*FLAGS, *flags], capsys)

    return run


def records(folder):
    return computed(lines_of(Path(folder, "metrics.jsonl")))


def assert_same_run(folder, expected):
    assert records(folder) == records(expected)
    found, wanted = contents(folder), contents(expected)
    assert found.keys() == wanted.keys()
    for name in wanted:
        if name.endswith(("samples.jsonl", "tokens.jsonl", "warnings.jsonl", ".safetensors")):
            assert found[name] == wanted[name], name


def interrupt_after(step, monkeypatch):
    """As by Ctrl-C at the end of the given step."""
    log = ppo.Run.log

    def logged(self, now, *args, **kwargs):
        log(self, now, *args, **kwargs)
        if now == step:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ppo.Run, "log", logged)


@pytest.mark.parametrize(
    ("script", "step", "flags"),
    [
        (ppo, 2, []),
        (grpo, 2, DROPOUT),
        (rloo, 2, []),
        pytest.param(ppo, 5, [], marks=pytest.mark.slow),  # the last evaluation is left
        *(pytest.param(x, 2, LORA, marks=pytest.mark.slow) for x in (ppo, grpo, rloo)),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    script, step, flags, run, monkeypatch
):
    _, whole = run(script, *flags, "--output_dir", "whole")
    with monkeypatch.context() as m:
        interrupt_after(step, m)
        code, first = run(script, *flags)
    saved = f"run is saved up to step {step + 1}, --resume goes on from there"
    assert code == 130 and first.endswith(f"step {step + 1}: interrupted; {saved}\n")
    assert len(records("run")) == step + 1
    code, rest = run(script, *flags, "--resume")
    assert code == 0 and len(records("run")) == 7
    assert_same_run("run", "whole")
    # Each warning once, and the first evaluation beside the later ones.
    said = [re.findall(r"^(?:warning, |step \d: eval).*", x, re.M) for x in (whole, first, rest)]
    assert said[0] == said[1] + said[2] and len(said[0]) > 4


def test_a_resumed_run_that_is_done_changes_nothing_and_gets_no_more_steps(run):
    run(ppo)
    before = records("run"), contents("run/model")
    assert run(ppo, "--resume")[0] == 0
    assert (records("run"), contents("run/model")) == before
    code, text = run(ppo, "--resume", "--num_steps", "8")  # whose learning rate falls more slowly
    assert code == 2 and "--num_steps 8: the run in run has 6" in text
    assert (records("run"), contents("run/model")) == before


def test_resume_without_a_checkpoint_says_so_and_starts_in_place(run):
    run(ppo, "--output_dir", "whole", "--num_steps", "2")
    for there in ("nothing", "an empty folder", "a run that was killed"):
        shutil.rmtree("run", ignore_errors=True)
        if there == "an empty folder":
            Path("run").mkdir()
        elif there == "a run that was killed":
            shutil.copytree("whole", "run")
            shutil.rmtree("run/checkpoint")
        code, text = run(ppo, "--resume", "--num_steps", "2")
        assert code == 0 and not Path("run.old").exists()
        assert text.startswith("--resume: run holds no checkpoint, the run starts at step 0\n")
        assert_same_run("run", "whole")


@pytest.mark.parametrize("script", [ppo, grpo, rloo])
def test_a_resumed_run_may_change_where_and_how_it_runs_and_nothing_that_it_computes(
    script, run, monkeypatch
):
    def accepted(*args):
        raise KeyboardInterrupt

    assert run(script, "--num_steps", "1")[0] == 0
    monkeypatch.setattr(script, "load_policy", accepted)
    path = Path("run/config.json")
    config = json.loads(path.read_text())
    for name in config:  # the script too
        path.write_text(json.dumps(config | {name: "another value"}))
        before = contents(".")
        code, text = run(script, "--num_steps", "1", "--resume")
        assert code == (130 if name in FREE else 2), name
        assert name in FREE or "the run in run has another value" in text or name == "script"
        assert contents(".") == before


# --- Ctrl-C twice, kill -9 ---


@pytest.mark.parametrize(
    ("module", "name", "call", "saved"),
    [
        # Once a step: before the update of step 3.
        pytest.param(ppo, "masked_whiten", 4, 3, marks=pytest.mark.slow),
        (torch, "_fused_adamw_", 7, 2),  # twice a step: between its two updates
    ],
)
def test_a_second_ctrl_c_stops_at_once_and_saves_no_weights_that_have_moved(
    module, name, call, saved, run, monkeypatch
):
    run(ppo, "--output_dir", "whole")
    original, calls = getattr(module, name), []

    def interrupted(*args, **kwargs):
        result = original(*args, **kwargs)
        calls.append(None)
        if len(calls) == call:
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.01)  # two signals at the same time would count as one
            signal.raise_signal(signal.SIGINT)
        return result

    # A shell makes what it runs in the background ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with monkeypatch.context() as m:
        m.setattr(module, name, interrupted)
        code, text = run(ppo)
    assert code == 130 and f"step 3: interrupted; run is saved up to step {saved}" in text
    assert ("run/model holds the model in the middle of step 3." in text) == (saved == 2)
    assert run(ppo, "--resume")[0] == 0
    assert_same_run("run", "whole")


@pytest.fixture
def start_forked(monkeypatch):
    """Starts of ppo.py that take no seconds for imports: processes forked off one that has them."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # for the preload
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["small", "ppo", "transformers.models.gpt2.modeling_gpt2"])

    def start(*flags):
        process = context.Process(target=run_undrawn, args=(ppo.main, [*FLAGS, *flags]))
        process.start()
        return process

    return start


@pytest.mark.slow
def test_kill_9_at_random_moments_never_leaves_a_run_that_cannot_go_on(run, start_forked):
    flags = ["--num_steps", "16", "--save_every", "1"]
    start_forked(*flags, "--output_dir", "whole").join(120)
    rng, saved = random.Random(0), []
    while len(saved) < 6:
        process = start_forked(*flags, "--resume")
        metrics = Path("run/metrics.jsonl")
        known = metrics.stat().st_size if metrics.exists() else 0
        # Within the steps that come after the first line that it writes.
        while process.is_alive() and not (metrics.exists() and metrics.stat().st_size != known):
            time.sleep(0.002)
        time.sleep(rng.random() * 0.2)
        process.kill()
        process.join()
        if process.exitcode == 0:  # done: again from the start
            assert_same_run("run", "whole")
            shutil.rmtree("run")
            continue
        assert process.exitcode == -signal.SIGKILL
        state = Path("run/checkpoint/state.pt")
        saved.append(read_state(state)["step"] if state.exists() else 0)
    assert len(set(saved)) > 2, "killed before it had computed anything?"
    last = start_forked(*flags, "--resume")
    last.join(120)
    assert last.exitcode == 0
    assert_same_run("run", "whole")


# --- The file of a checkpoint ---


@pytest.mark.parametrize("name", ["torch.save", "os.fsync", "pathlib.Path.replace"])
def test_a_state_is_on_the_disk_before_it_takes_its_name(name, tmp_path, monkeypatch):
    """Else a disk that fills up would take the checkpoint that is there."""

    def fail(*args):
        if name == "torch.save":
            args[1].write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    path = tmp_path / "state.pt"
    write_state(path, dict.fromkeys(FIELDS, 1))
    with monkeypatch.context() as m, pytest.raises(Fault, match="No space left on device"):
        m.setattr(name, fail)
        write_state(path, dict.fromkeys(FIELDS, 2))
    assert read_state(path)["step"] == 1 and len(list(tmp_path.iterdir())) == 1


def test_a_checkpoint_that_cannot_be_used_is_named_and_nothing_of_it_is_run(run):
    class Bad:
        def __reduce__(self):
            return (Path("was_run").touch, ())

    run(ppo, "--num_steps", "1")
    path = Path("run/checkpoint/state.pt")
    data, state = path.read_bytes(), read_state(path)
    sampler = torch.zeros(16, dtype=torch.uint8)  # as on CUDA
    cases = {
        "is damaged (its checksum is wrong)": data[:9000] + bytes([data[9000] ^ 1]) + data[9001:],
        "is damaged": data[: len(data) // 2],
        "is damaged (Weights only load failed": state | {"step": Bad()},
        "has no 'warned'": {name: x for name, x in state.items() if name != "warned"},
        "the run was on another kind of device, see --device": state
        | {"generators": [state["generators"][0], sampler]},
    }
    for message, case in cases.items():
        path.write_bytes(case) if isinstance(case, bytes) else write_state(path, case)
        before = contents(".")
        code, text = run(ppo, "--num_steps", "1", "--resume")
        assert code == 2 and message in text, text
        assert contents(".") == before and not Path("was_run").exists()
