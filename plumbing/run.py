"""What a run leaves behind: metrics, samples, warnings, checkpoints, the model.

A run writes into runs/<script>-<model>-<task>-s<seed>/: config.json, metrics.jsonl (an object per
step; the key `step` is the number of steps before it), samples.jsonl, tokens.jsonl,
warnings.jsonl, model/ in Hugging Face format (with an adapter merged, and adapter/ beside it),
checkpoint/state.pt for --resume, and curve.png. A run that is overwritten is renamed to
<folder>.old.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import textwrap
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from common import base_model, evaluating
from plumbing.config import CHECKPOINT, holds_run, open_metrics
from plumbing.errors import (
    Fault,
    InputError,
    Interrupted,
    described,
    first_line,
    is_out_of_memory,
    optional_library,
    run_tool,
)
from plumbing.metrics import Evaluation, Meter, Metrics, headline, sample_records
from plumbing.tokens import token_records

FILES = ("metrics", "samples", "tokens", "warnings")  # .jsonl
# What a checkpoint holds; of a file, where it ended.
FIELDS = [*FILES, *"weights optimizer generators torch cuda step first_metrics warned".split()]


class Run:
    """The records, checkpoints and model of a run, `with Run(...) as run:`. Creates its folder, or
    with --resume puts the checkpoint back. However the block ends, what was computed is saved.

    models: those that train, by name, the one to save as model/ first. generators: all from which
    the run draws. data: what it trains on, with `train`, `heldout`, `name` and `tokenizer`.
    """

    def __init__(
        self,
        config: Any,
        data: Any,
        models: dict[str, nn.Module],
        optimizer: torch.optim.Optimizer,
        generators: list[torch.Generator] = (),
    ) -> None:
        self.config, self.data, self.optimizer = config, data, optimizer
        self.model, self.folder = next(iter(models.values())), Path(config.output_dir)
        self.weights = {
            f"{kind}.{name}": p.detach()
            for kind, model in models.items()
            for name, p in model.named_parameters()
            if p.requires_grad
        }
        self.generators = list(generators)
        self.first_step = 0
        self.first_metrics: Metrics = {}  # of the evaluation before the first step
        self.evaluated: Metrics = {}  # of the evaluation before the step at hand
        self.history, self.warned = [], set()  # metrics of this process; warnings given
        self.saved_step: int | None = None  # of the newest checkpoint
        self.process = os.getpid()  # not that of what a reward forks
        # Before, not after: Ctrl-C in the middle of a step must find it noted.
        self.optimizer.register_step_pre_hook(self._note_move)
        for name in config.report_to:
            module = {"tensorboard": "torch.utils.tensorboard"}.get(name, name)
            optional_library(module, f"--report_to {name}: pip install {name}")
        check_saving(config.model, self.model, data.tokenizer)
        try:
            self.files = self._open_files()
            settings = {"script": config.script} | asdict(config)
            write_text(self.folder / "config.json", json.dumps(settings, indent=2))
        except OSError as e:
            fault = f"--output_dir {self.folder}: can't be written ({e.strerror})"
            raise InputError(fault) from e
        self.trackers = _start_trackers(self.folder, config, self.first_step)
        print(self._description())

    def _open_files(self) -> dict[str, BinaryIO]:
        """The files of the records, in a folder of this run alone. With --resume they end where the
        checkpoint does, which is put back. Raises InputError.
        """
        folder, resume = self.folder, self.config.resume
        holds_run(folder)  # or something else, which is refused
        folder.mkdir(parents=True, exist_ok=True)
        metrics = open_metrics(folder)  # the first file, which marks the folder as a run's
        if holds_run(folder) and not resume:
            if os.name == "nt":  # Windows renames no folder whose files are open
                metrics.close()
            _move_old_run(folder, self.config.overwrite)
            folder.mkdir()
            metrics = open_metrics(folder)
        state = self._resume() if resume and (folder / CHECKPOINT).exists() else None
        files = {name: (folder / f"{name}.jsonl").open("ab") for name in FILES[1:]}
        files["metrics"] = metrics  # opened once: its lock ends where any handle of it is closed
        for name, file in files.items():
            file.truncate(state[name] if state else 0)
            file.seek(0, os.SEEK_END)
        return files

    def __enter__(self) -> Run:
        signals.watch()
        options = {"initial": self.first_step, "desc": self.config.script, "dynamic_ncols": True}
        self.bar = tqdm(total=self.config.num_steps, **options)
        self._note_state(self.first_step)
        return self

    def steps(self, evaluate: Callable[[], Evaluation]) -> Iterator[int]:
        """The numbers of the steps that are left, for `for step in run.steps(...)`.

        Evaluates before every eval_every-th step and after the last. When the loop asks for the
        next step, the one before is over: its checkpoint is written if it is due, and after Ctrl-C
        or SIGTERM the run ends here.
        """
        for step in range(self.first_step, self.config.num_steps):
            if step % self.config.eval_every == 0:
                self._evaluate(step, evaluate)
            self.laps, self.lap_started = {}, time.perf_counter()
            yield step
            self._end_step(step + 1)
        self._evaluate(self.config.num_steps, evaluate)
        self._write_metrics(self.config.num_steps, self.evaluated)

    def lap(self, name: str) -> None:
        """End the phase `name` of a step: its seconds are a metric."""
        if self.config.device.startswith("cuda"):
            torch.cuda.synchronize(self.config.device)
        now = time.perf_counter()
        self.laps[name], self.lap_started = now - self.lap_started, now

    def log(self, step: int, meter: Meter, **more: float) -> None:
        """Write the metrics of a step to metrics.jsonl, with time, memory and `more`; warn."""
        metrics = self.evaluated | meter.results()  # waits for the device: the update is over
        self.lap("time/update")
        metrics |= self.laps | more
        metrics["lr"] = self.optimizer.param_groups[0]["lr"]
        metrics["tokens_per_second"] = meter.num_tokens / sum(self.laps.values())
        metrics["memory/peak_gb"] = peak_memory(self.config.device) / 1e9
        self._write_metrics(step, metrics)
        self.history.append(metrics)
        self.evaluated = {}
        for name, text in meter.warnings(self.history, self.config.bf16):
            if name not in self.warned:
                self.warned.add(name)
                self._append("warnings", [{"step": step, "text": text}])
                tqdm.write(f"warning, step {step}: {text}")
        self.bar.set_postfix_str(meter.progress(metrics))

    def show(
        self,
        step: int,
        prompts: list[dict],
        texts: list[str],
        scores: Tensor,
        meter: Meter,
        columns: dict[str, Tensor | None],
    ) -> None:
        """At the steps that begin with an evaluation: record the completions of the step, and of a
        few of them `columns` for each token, (B, T) or (B,); print one of each of four prompts.
        """
        if step % self.config.eval_every:
            return
        G = len(texts) // len(prompts)
        rows = [row for row in prompts for _ in range(G)]
        records, lines = sample_records(rows, texts, scores.tolist())
        self._append("samples", [{"step": step, "split": "train"} | x for x in records])
        tqdm.write("\n".join([f"step {step}: samples from training", *lines[::G][:4]]))
        models = self.config, self.model, self.data.tokenizer
        found = token_records(*models, rows, scores, meter, columns)
        self._append("tokens", [{"step": step} | x for x in found])

    def _evaluate(self, step: int, evaluate: Callable[[], Evaluation]) -> None:
        found = evaluate()
        self.evaluated = found.metrics
        self.first_metrics = self.first_metrics or found.metrics
        self._append("samples", [{"step": step, "split": "heldout"} | x for x in found.records])
        title = headline(step, found.headline, found.metrics, self.first_metrics)
        tqdm.write("\n".join([f"step {step}: {title}", *found.lines[:4]]))  # print tears the bar

    def _write_metrics(self, step: int, metrics: Metrics) -> None:
        """Append one line to metrics.jsonl, at once: a later fault doesn't lose it."""
        # JSON has neither NaN nor infinity: they become null.
        finite = {k: x if x is not None and math.isfinite(x) else None for k, x in metrics.items()}
        self._append("metrics", [{"step": step} | finite])
        for track in self.trackers:
            track(step, {name: x for name, x in finite.items() if x is not None})

    def _append(self, name: str, records: list[dict], sync: bool = False) -> None:
        """Append records, as JSON lines; with `sync` they outlive a power cut. Raises Fault."""
        if not records and not sync:
            return
        file = self.files[name]
        text = "".join(json.dumps(r, allow_nan=False, ensure_ascii=False) + "\n" for r in records)
        try:
            file.write(text.encode("utf-8", "backslashreplace"))  # half a surrogate pair: \\ud800
            file.flush()
            if sync:
                os.fsync(file.fileno())
        except OSError as e:
            raise Fault(f"{file.name} can't be written ({e.strerror}): make room for it") from e

    # --- Checkpoints ---

    def _end_step(self, steps_done: int) -> None:
        """Write a checkpoint if it's due. After a signal: raises Interrupted."""
        self._note_state(steps_done)
        self.bar.update()
        last = steps_done == self.config.num_steps
        if steps_done % self.config.save_every == 0 or last or signals.seen is not None:
            self._write_checkpoint()
        if signals.seen is not None:
            raise Interrupted(signals.seen, "interrupted")

    def _note_state(self, step: int) -> None:
        """Note what, with the weights, makes the state of the run after `step` steps."""
        self.state = {
            "generators": [g.get_state() for g in self.generators],
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            **{name: file.tell() for name, file in self.files.items()},
            "step": step,
            "first_metrics": self.first_metrics,
            "warned": sorted(self.warned),
        }
        self.weights_moved = False  # since the state was noted

    def _note_move(self, *args: object) -> None:
        self.weights_moved = True

    def _write_checkpoint(self) -> None:
        for name in FILES:
            self._append(name, [], sync=True)  # the checkpoint relies on what they hold
        whole = {"weights": self.weights, "optimizer": self.optimizer.state_dict()}
        write_state(self.folder / CHECKPOINT, self.state | whole)
        self.saved_step = self.state["step"]

    def _resume(self) -> dict[str, Any]:
        """Continue from the checkpoint, and return its state. Raises InputError."""
        state = read_state(self.folder / CHECKPOINT)
        for name in FILES:
            path = self.folder / f"{name}.jsonl"
            if state[name] > (path.stat().st_size if path.exists() else 0):
                raise InputError(f"--resume: {path} has lost lines that the checkpoint knows of")
        shapes = {name: p.shape for name, p in state["weights"].items()}
        if shapes != {name: p.shape for name, p in self.weights.items()}:
            raise InputError("--resume: the checkpoint belongs to another model")
        try:
            for generator, its_state in zip(self.generators, state["generators"], strict=True):
                generator.set_state(its_state)
        except (RuntimeError, TypeError, ValueError) as e:  # the latter two: of another version
            raise InputError("--resume: the run was on another kind of device, see --device") from e
        for name, p in self.weights.items():
            p.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["torch"])
        if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])
        self.first_step = self.saved_step = state["step"]
        self.first_metrics, self.warned = state["first_metrics"], set(state["warned"])
        print(f"--resume: {self.folder} goes on after {self.first_step} steps.")
        return state

    # --- The end ---

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        if os.getpid() != self.process:  # a reward has forked and failed; the run is its parent's
            return
        signals.restore()
        self.bar.close()
        failure = ""
        try:
            self._save_at_exit(error)
        except Exception as e:  # whatever a full disk makes the libraries raise
            if str(e) != str(error):
                failure = f"; saving to {self.folder} failed: {first_line(e)}"
        for file in self.files.values():
            with contextlib.suppress(OSError):  # a full disk, again
                file.close()
        before, after = f"step {self.state['step']}: ", failure
        if self.saved_step is not None:
            saved = f"{self.folder} is saved up to step {self.saved_step}"
            after = f"; {saved}, --resume goes on from there{failure}"
        if error is None and failure:
            raise Fault(f"{before}the training is over{after}")
        _explain(error, before, after)

    def _save_at_exit(self, error: BaseException | None) -> None:
        """Save what the run has computed, whether or not an error ends it."""
        step = self.state["step"]
        # A step that fails before its update leaves the weights as they were when it began.
        if error is not None and not self.weights_moved and step not in (0, self.saved_step):
            self._write_checkpoint()
        if step > 0:
            save_model(self.folder, self.model, self.data.tokenizer)
            when = f"in the middle of step {step}" if self.weights_moved else f"after {step} steps"
            print(f"{self.folder}/model holds the model {when}.")
        if error is None and importlib.util.find_spec("matplotlib"):
            from tools.plot import draw

            draw([self.folder], self.folder / "curve.png")

    def _description(self) -> str:
        """What this run is, and every setting that has a value."""
        config, data = self.config, self.data
        total = sum(p.numel() for p in self.model.parameters()) / 1e6
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad) / 1e6
        adapter = f"an adapter of {trained:.2f} M on " if trained < total else ""
        num_heldout = min(len(data.heldout), getattr(config, "num_eval_prompts", math.inf))
        settings = {name: x for name, x in asdict(config).items() if x not in (None, [])}
        shown = "  ".join(f"{name}={value}" for name, value in settings.items())
        where = f"{total:.1f} M parameters on {config.device}"
        what = f"{len(data.train)} {data.name} to train on, {num_heldout} held out"
        text = f"{config.script}: {adapter}{where}, {what}, writing to {self.folder}\n"
        return text + textwrap.fill(shown, 98, initial_indent="  ", subsequent_indent="  ")


def _explain(error: BaseException | None, before: str, after: str) -> None:
    """Say what an error that ends a run left behind; raises what stands for it, if something does.

    What is none of ours is said here, and then shown with its traceback.
    """
    if is_out_of_memory(error):
        remedy = "lower --micro_batch_tokens, and --rollout_batch_size if there is one"
        raise Fault(f"{before}{described(error).rstrip('.')}; {remedy}{after}")
    if isinstance(error, KeyboardInterrupt):
        raise Interrupted(signal.SIGINT, f"{before}interrupted{after}")
    if isinstance(error, (InputError, Fault, Interrupted)):
        error.args = (f"{before}{error}{after}",)
    elif error is not None:
        print(f"{before}{described(error)}{after}", file=sys.stderr)


# --- Signals ---

HANDLED = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Ctrl-C and SIGTERM: the first lets a step end and be saved, the second ends the run."""

    def __init__(self) -> None:
        self.seen: int | None = None  # the number of the one that has come
        self.before: dict[int, Any] = {}  # what they did before the run

    def watch(self) -> None:
        self.seen = None
        with contextlib.suppress(ValueError):  # only the main thread may
            for number in HANDLED:
                self.before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.seen = number
        self.restore()
        # print may be what the signal interrupts, and can't be called again from within.
        with contextlib.suppress(OSError):
            os.write(2, b"\nfinishing what is begun, then saving; once more stops at once\n")

    def restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self.before = {}

    # Processes that a reward forks would inherit the handler, take note of the SIGTERM by which a
    # pool ends them, and go on: the pool waits for ever. No signal may come in between either.

    def before_fork(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)

    def after_fork(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)

    def after_fork_in_child(self) -> None:
        interrupt = self.before.get(signal.SIGINT)
        self.restore()
        if interrupt is not None:  # a terminal sends Ctrl-C to all: the first is for the run alone
            signal.signal(signal.SIGINT, lambda *args: signal.signal(signal.SIGINT, interrupt))
        self.after_fork()
        torch.set_num_threads(1)  # OpenMP would wait for ever for threads that weren't forked


signals = Signals()
if hasattr(os, "register_at_fork"):  # Windows doesn't fork
    hooks = {"before": signals.before_fork, "after_in_parent": signals.after_fork}
    os.register_at_fork(**hooks, after_in_child=signals.after_fork_in_child)


# --- Files ---


def _move_old_run(folder: Path, overwrite: bool) -> None:
    """Rename the run that the folder holds. Raises InputError where that isn't asked for."""
    if not overwrite:  # begun since the flags were checked
        raise InputError(f"{folder} already holds a run, which has just begun")
    old = Path(f"{folder}.old")
    if old.exists():
        shutil.rmtree(old)
    folder.rename(old)
    print(f"The run in {folder} is now {old}.")


def write_text(path: Path, text: str) -> None:
    """Write a file that is complete whenever the process dies."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text + "\n", encoding="utf-8")
    new.replace(path)


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write `state` to `path`. Raises Fault.

    It is complete, and on the disk, before it takes its name: whenever the process dies, `path` is
    the new state or the one before it.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(exist_ok=True)
        torch.save(state, new)
        with new.open("r+b") as file:
            os.fsync(file.fileno())
        new.replace(path)
    except (OSError, RuntimeError) as e:
        new.unlink(missing_ok=True)  # half a checkpoint would keep the disk full
        # torch reports a full disk as a RuntimeError, "unexpected pos".
        reason = e.strerror if isinstance(e, OSError) else "is the disk full?"
        raise Fault(f"{path} can't be written ({reason}): make room for it") from e


def read_state(path: Path) -> dict[str, Any]:
    """The state that write_state wrote, on the CPU. Raises InputError if it is damaged."""
    try:
        with zipfile.ZipFile(path) as parts:  # as torch.save writes, whose checksums no load reads
            if parts.testzip() is not None:
                raise ValueError("its checksum is wrong")
        # weights_only: a checkpoint is data, nothing in it is executed.
        state = torch.load(path, weights_only=True, map_location="cpu")
        if missing := [name for name in FIELDS if name not in state]:
            raise ValueError(f"it has no {missing[0]!r}")
        return state
    except Exception as e:  # a damaged file raises anything
        reason = f"{path} is damaged ({first_line(e)})"
        raise InputError(f"--resume: {reason}; --overwrite starts the run anew") from e


def save_model(folder: Path, model: nn.Module, tokenizer: Any) -> None:
    """Save folder/model; with an adapter merged into its base, and folder/adapter beside it.
    Raises Fault where the merged model is another one.
    """
    if hasattr(model, "peft_config"):
        # peft would ask the hub whether the vocabulary has grown: it hasn't.
        model.save_pretrained(folder / "adapter", save_embedding_layers=False)
        tokenizer.save_pretrained(folder / "adapter")
        model, off = _merged(model)
        if not off <= 1e-3:
            fault = f"merged into its model, the adapter gives logits that are {off:.2g} off"
            remedy = f"load {folder}/adapter with peft.PeftModel, there is no {folder}/model"
            raise Fault(f"{fault}: {remedy}")
    new = folder / "model.new"  # complete before it takes its name
    shutil.rmtree(new, ignore_errors=True)
    _write_model(new, model, tokenizer)
    if (folder / "model").exists():
        shutil.rmtree(folder / "model")
    new.rename(folder / "model")


def _merged(model: nn.Module) -> tuple[PreTrainedModel, float]:
    """A copy of the model with its adapter merged into it, and how far this moves its logits."""
    # Copied to the CPU, where there is room, and in float32: in bfloat16, as the base may be, much
    # of what the adapter adds would be rounded away.
    memo = {}
    for p in filter(Tensor.is_floating_point, model.parameters()):
        precision = torch.promote_types(p.dtype, torch.float32)
        memo[id(p)] = nn.Parameter(p.detach().to("cpu", precision, copy=True), False)
    copied = copy.deepcopy(model, memo).cpu()
    expected, base = _some_outputs(copied), base_model(copied)
    ends = [base.get_input_embeddings(), base.get_output_embeddings()]
    if any(hasattr(layer, "base_layer") for layer in ends):
        # Where embedding and head share their weights, merging would change both of them.
        head = getattr(ends[1], "base_layer", ends[1])
        head.weight = nn.Parameter(head.weight.detach().clone())
        base.config.get_text_config().tie_word_embeddings = False
    merged = copied.merge_and_unload()
    off = (_some_outputs(merged) - expected).abs().max()
    return merged, (off / expected.abs().max().clamp(min=1)).item()


def _write_model(folder: Path, model: nn.Module, tokenizer: Any, **options: Any) -> None:
    # transformers up to 5.20 saves no generation_config that has a temperature but no do_sample.
    generation = getattr(model, "generation_config", None)
    try:
        model.generation_config = generation and GenerationConfig()
        model.save_pretrained(folder, **options)
    finally:
        model.generation_config = generation
    if generation is not None:
        generation.to_json_file(folder / "generation_config.json")
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def _some_outputs(model: nn.Module) -> Tensor:
    """What the model says to a few tokens: logits (1, 8, V), or (1, labels) of a classifier."""
    tokens = torch.arange(8, device=model.device)
    with evaluating(model):
        tokens = tokens % base_model(model).get_input_embeddings().weight.shape[0]
        return model(input_ids=tokens.unsqueeze(0)).logits


def check_saving(name: str, model: nn.Module, tokenizer: Any) -> None:
    """Save all but the weights, and merge each layer of an adapter. Raises InputError."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            _write_model(Path(folder), base_model(model), tokenizer, state_dict={})
        for layer in model.modules():
            if hasattr(layer, "base_layer") and hasattr(layer, "merge"):
                copy.deepcopy(layer).merge()
    except Exception as e:  # of whatever kind: after the training it would lose the model
        raise InputError(f"--model {name}: can't be saved: {first_line(e)}") from e


# --- Trackers ---


def _start_trackers(
    folder: Path, config: Any, first_step: int
) -> list[Callable[[int, dict[str, float]], None]]:
    """Functions to call with a step and its metrics, for --report_to. Raises InputError."""
    found = []
    if "tensorboard" in config.report_to:
        from torch.utils.tensorboard import SummaryWriter

        # What a run wrote after the checkpoint from which it goes on would be there twice.
        purge = first_step if config.resume else None
        writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

        def track(step: int, metrics: dict[str, float]) -> None:
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        found.append(track)
    if "wandb" in config.report_to:
        import wandb

        name = folder.resolve().name
        resume = "allow" if config.resume else None  # else it would go on with a run of this name
        options = {"resume": resume, "config": asdict(config), "dir": folder}
        try:
            tracked = wandb.init(project="plainrlhf", id=name, name=name, **options)
        except Exception as e:  # no key, no network
            raise InputError(f"--report_to wandb: {first_line(e)}") from e
        found.append(lambda step, metrics: tracked.log(metrics, step=step))
    return found


# --- Memory, and the process as a whole ---


def peak_memory(device: str) -> float:
    """The most memory so far, in bytes: of the CUDA device, else of this process; NaN where the
    system doesn't say.
    """
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    # getrusage would count what the parent process had when it started us.
    if status.exists() and (found := re.search(r"VmHWM:\s*(\d+)", status.read_text())):
        return int(found[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return math.nan
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def run_main(main: Callable[[], None]) -> None:
    """Run a script's main(): errors are one line; exit code 2 for bad input, 1 for a fault."""
    keep_freed_memory()
    transformers_logging.set_verbosity(50)  # CRITICAL: its errors reach us as exceptions
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # from peft
    # Of decoding.py, which asks whether a forward pass waits for the device.
    warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
    run_tool(main)


def keep_freed_memory() -> None:
    """On Linux, keep the memory that tensors free, and take it in huge pages: on a CPU, getting it
    anew from the system costs as much as computing with it.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read by PyTorch at its first allocation
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_mmap_threshold, 2**30) or libc.mallopt(m_mmap_threshold, 2**25)  # older
        libc.mallopt(m_trim_threshold, 2**31 - 1)
