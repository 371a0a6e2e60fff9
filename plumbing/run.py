"""What a run leaves behind: metrics, samples, warnings, checkpoints, the model.

A run writes into runs/<script>-<model>-<task>-s<seed>/: config.json, metrics.jsonl (an object per
step; the key `step` is the number of steps before it), samples.jsonl, tokens.jsonl, model/ in
Hugging Face format, checkpoint/state.pt for --resume, and curve.png. A run that is overwritten is
renamed to <folder>.old.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
import json
import math
import os
import shutil
import signal
import sys
import textwrap
import warnings
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import logging as transformers_logging

from common import Rollout, ValueModel
from plumbing.data import Task, text_of
from plumbing.errors import Fault, InputError, first_line, optional_library
from plumbing.metrics import Meter, evaluate, headline, pair_warnings, progress, warnings_about
from plumbing.models import keep_freed_memory
from plumbing.preferences import (
    Pairs,
    evaluate_pairs,
    pair_headline,
    pair_progress,
    pair_records,
)
from plumbing.tokens import Credit, TokenRecorder

CHECKPOINT = Path("checkpoint", "state.pt")  # in the folder of a run
FILES = ("metrics", "samples", "tokens")  # .jsonl


@dataclass(kw_only=True, eq=False)
class Run:
    """The records, checkpoints and model of a run, `with Run(...) as run:`. Creates its folder, or
    with --resume puts the checkpoint back. However the block ends, what was computed is saved.
    """

    config: Any
    folder: Path
    policy: PreTrainedModel
    value_model: ValueModel | None = None
    tokenizer: Tokenizer
    task: Task | Pairs
    sampling: dict[str, Any] = field(default_factory=dict)  # empty: a reward model samples nothing
    optimizer: torch.optim.Optimizer
    shuffler: torch.Generator | None = None
    ref: Any = None  # of common.reference
    credit: Credit | None = None  # how the script judges completions: see TokenRecorder

    def __post_init__(self) -> None:
        config, folder = self.config, self.folder
        self.weights = trained_weights(policy=self.policy, value=self.value_model)
        self.generators = _given(shuffler=self.shuffler, sampler=self.sampling.get("generator"))
        self.first_step = 0
        self.first_metrics, self.best = {}, -math.inf  # of the evaluations
        self.history, self.warned = [], set()  # metrics of this process; warnings given
        self.signals, self.saved_step = Signals(), None  # the step of the newest checkpoint
        # Before, not after: Ctrl-C in the middle of a step must find it noted.
        self.optimizer.register_step_pre_hook(self._note_move)
        models = (self.policy, self.value_model, self.ref, self.tokenizer)
        self.recorder = TokenRecorder(config, *models, self.task, self.sampling, self.credit)
        check_installed(config)
        state = self._resume() if config.resume and (folder / CHECKPOINT).exists() else None
        try:
            if not config.resume and _holds_run(folder):
                _move_old_run(folder, config.overwrite)
            folder.mkdir(parents=True, exist_ok=True)
            # First metrics.jsonl, which marks the folder as a run's.
            ends = state or dict.fromkeys(FILES, 0)
            self.files = {x: _opened(folder / f"{x}.jsonl", ends[x]) for x in FILES}
            settings = {"script": config.script} | asdict(config)
            write_text(folder / "config.json", json.dumps(settings, indent=2))
        except OSError as e:
            raise InputError(f"--output_dir {folder}: can't be written ({e.strerror})") from e
        self.trackers = start_trackers(folder, config, self.first_step)
        print(_description(config, self.policy, self.task, folder))

    def __enter__(self) -> Run:
        self.signals.watch()
        options = {"initial": self.first_step, "desc": self.config.script, "dynamic_ncols": True}
        self.bar = tqdm(total=self.config.num_steps, **options)
        self._note_state(self.first_step)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        self.signals.restore()
        self.bar.close()
        failure = ""
        try:
            self._save_at_exit(error)
        except Exception as e:  # whatever a full disk makes the libraries raise
            if str(e) != str(error):
                failure = f"; saving to {self.folder} failed: {first_line(e)}"
        for file in self.files.values():
            _close(file)
        if error is None and failure:
            raise Fault(failure.removeprefix("; "))
        before, after = f"step {self.state['step']}: ", failure
        if self.saved_step is not None:
            saved = f"{self.folder} is saved up to step {self.saved_step}"
            after = f"; {saved}, --resume goes on from there{failure}"
        _explain(error, before, after, isinstance(self.task, Pairs))

    def _save_at_exit(self, error: BaseException | None) -> None:
        """Save what the run has computed, whether or not an error ends it."""
        step = self.state["step"]
        # A step that fails before its update leaves the weights as they were when it began.
        if error is not None and not self.weights_moved and step not in (0, self.saved_step):
            self._write_checkpoint()
        if step > 0 and not (self.config.save_best and self.best > -math.inf):
            self._save_model()
            when = f"in the middle of step {step}" if self.weights_moved else f"after {step} steps"
            print(f"{self.folder}/model holds the model {when}.")
        if error is None and importlib.util.find_spec("matplotlib"):
            from tools.plot import draw

            draw([self.folder], self.folder / "curve.png")

    def log(self, step: int, metrics: dict[str, float | None]) -> None:
        """Append one line to metrics.jsonl, at once: a later fault doesn't lose it."""
        line = {"step": step} | {name: _finite(value) for name, value in metrics.items()}
        _append(self.files["metrics"], [line])
        for track in self.trackers:
            track(step, {name: value for name, value in line.items() if value is not None})
        if "grad_norm" in metrics or isinstance(self.task, Pairs):  # not the last evaluation
            self.history.append(metrics)
            found, shown = _watched(self.task, self.history, self.config.bf16)
            for name, text in found:
                if name not in self.warned:
                    self.warned.add(name)
                    tqdm.write(f"warning, step {step}: {text}")
            self.bar.set_postfix_str(shown)

    def show(
        self,
        step: int,
        rows: list[dict],
        texts: list[str],
        scores: Tensor,
        rollout: Rollout,
        meter: Meter,
        columns: dict[str, Tensor],
    ) -> None:
        """Every `sample_every` steps: record completions and their `columns`, print a few."""
        if step % self.config.sample_every == 0:
            title, file = "samples from training", self.files["samples"]
            _record(file, step, "train", title, rows, texts, scores.tolist())
        found = self.recorder.after_update(step, rows, rollout, scores, meter, columns)
        _append(self.files["tokens"], found)

    def evaluate(self, step: int) -> dict[str, float | None]:
        """Evaluate the policy on the held-out prompts, record the samples, print a few."""
        rows = self.task.heldout[: self.config.num_eval_prompts]
        metrics, texts, scores = evaluate(
            self.config, self.policy, self.tokenizer, self.task, self.sampling, rows
        )
        self.first_metrics = self.first_metrics or metrics
        title = headline(step, metrics, self.first_metrics, self.config.eval_generations)
        _record(self.files["samples"], step, "heldout", title, rows, texts, scores)
        _append(self.files["tokens"], self.recorder.at_evaluation(step))
        value = metrics["eval/reward" if metrics["eval/accuracy"] is None else "eval/accuracy"]
        self._save_if_best(value)
        return metrics

    def evaluate_pairs(self, step: int) -> dict[str, float]:
        """Judge the held-out pairs, record them, print a few; write the reliability curve."""
        pairs, most = self.task.heldout, self.config.micro_batch_size or 128
        metrics, curve, scores = evaluate_pairs(self.policy, pairs, self.config.bf16, most)
        self.first_metrics = self.first_metrics or metrics
        records, lines = pair_records(step, pairs, scores)
        _append(self.files["samples"], records)
        tqdm.write(pair_headline(step, metrics, self.first_metrics) + lines)
        write_text(self.folder / "reliability.json", json.dumps(curve, indent=2))
        self._save_if_best(metrics["eval/accuracy"])
        return metrics

    def _save_if_best(self, value: float | None) -> None:
        if self.config.save_best and value is not None and value > self.best:
            self.best = value
            self._save_model()
            tqdm.write(f"  the best so far: saved as {self.folder}/model")

    def checkpoint_if_due(self, steps_done: int) -> None:
        """After each step: write a checkpoint if it's due. After a signal: raises Interrupted."""
        self._note_state(steps_done)
        self.bar.update()
        last = steps_done == self.config.num_steps
        if steps_done % self.config.save_every == 0 or last or self.signals.number is not None:
            self._write_checkpoint()
        if self.signals.number is not None:
            raise Interrupted(self.signals.number, "interrupted")

    def _note_state(self, step: int) -> None:
        """Note what, with the weights, makes the state of the run after `step` steps."""
        self.state = random_state(self.generators) | {
            **{name: file.tell() for name, file in self.files.items()},
            "step": step,
            "first_metrics": self.first_metrics,
            "best": self.best,
            "warned": sorted(self.warned),
        }
        self.weights_moved = False  # since the state was noted

    def _write_checkpoint(self) -> None:
        for file in self.files.values():
            _append(file, [], sync=True)  # the checkpoint relies on what they hold
        whole = {"weights": self.weights, "optimizer": self.optimizer.state_dict()}
        write_state(self.folder / CHECKPOINT, self.state | whole)
        self.saved_step = self.state["step"]

    def _resume(self) -> dict[str, Any]:
        """Continue from the checkpoint, and return its state. Raises InputError."""
        state = read_state(self.folder / CHECKPOINT)
        if state["step"] > self.config.num_steps:
            steps = f"{self.folder} has {state['step']} steps already"
            raise InputError(f"--num_steps {self.config.num_steps}: {steps}")
        for name in FILES:
            path = self.folder / f"{name}.jsonl"
            if state[name] > (path.stat().st_size if path.exists() else 0):
                raise InputError(f"--resume: {path} has lost lines that the checkpoint knows of")
        restore(state, self.weights, self.optimizer, self.generators)
        self.first_step = self.saved_step = state["step"]
        self.first_metrics, self.best = state["first_metrics"], state["best"]
        self.warned = set(state["warned"])
        print(f"--resume: {self.folder} goes on after {self.first_step} steps.")
        return state

    def _save_model(self) -> None:
        save_model(self.folder, self.policy, self.tokenizer, self.config.merge_adapter)

    def _note_move(self, *args: object) -> None:
        self.weights_moved = True


def _watched(
    task: Task | Pairs, history: list[dict[str, float | None]], bf16: bool
) -> tuple[list[tuple[str, str]], str]:
    """The warnings about the steps so far, and what the progress bar shows."""
    if isinstance(task, Pairs):
        return pair_warnings(history), pair_progress(history)
    return warnings_about(history, bf16), progress(history[-1])


def _given(**generators: torch.Generator | None) -> dict[str, torch.Generator]:
    return {name: g for name, g in generators.items() if g is not None}


def _explain(error: BaseException | None, before: str, after: str, on_pairs: bool) -> None:
    """Say what an error that ends a run left behind; raises what stands for it, if something does.

    What is none of ours is left to be shown with its traceback.
    """
    on_cpu = isinstance(error, RuntimeError) and "allocate memory" in str(error)
    if on_cpu or isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        smaller = "micro_batch_size" if on_pairs else "micro_batch_tokens or --rollout_batch_size"
        raise Fault(f"{before}{first_line(error).rstrip('.')}; lower --{smaller}{after}")
    if isinstance(error, KeyboardInterrupt):
        raise Interrupted(signal.SIGINT, f"{before}interrupted{after}")
    if isinstance(error, (InputError, Fault, Interrupted)):
        error.args = (f"{before}{error}{after}",)


def choose_folder(config: Any) -> Path:
    """The folder of a run. Raises InputError where it holds what must not be lost, or a run that
    --resume can't go on with.
    """
    model = Path(config.model).resolve().name if os.path.isdir(config.model) else config.model
    # The pairs of a reward model, the prompts of the others.
    data = config.pairs if hasattr(config, "pairs") else config.prompts
    task = Path(data).stem if data else config.task
    name = f"{config.script}-{model.replace('/', '-')}-{task}-s{config.seed}"
    folder = Path(config.output_dir or f"runs/{name}")
    if config.resume and config.overwrite:
        raise InputError("--resume --overwrite: give one of them, they contradict each other")
    try:
        if _holds_run(folder):
            if not (config.resume or config.overwrite):
                remedy = "give --resume, --overwrite or another --output_dir"
                raise InputError(f"{folder} already holds a run: {remedy}")
            if config.resume:
                check_settings(config, folder / "config.json")
            if config.overwrite:
                _holds_run(Path(f"{folder}.old"))  # which it will replace
        if config.resume and not (folder / CHECKPOINT).exists():
            print(f"--resume: {folder} holds no checkpoint, the run starts at step 0")
    except OSError as e:
        raise InputError(f"--output_dir {folder}: can't be used ({e.strerror})") from e
    return folder


def _holds_run(folder: Path) -> bool:
    """Whether it holds metrics or a checkpoint. Raises InputError if it holds something else."""
    if not folder.exists() or not any(folder.iterdir()):
        return False
    if not (folder / "metrics.jsonl").exists():
        raise InputError(f"--output_dir {folder}: holds something that is not a run")
    return (folder / "metrics.jsonl").stat().st_size > 0 or (folder / CHECKPOINT).exists()


def _move_old_run(folder: Path, overwrite: bool) -> None:
    """Rename the run that the folder holds. Raises InputError where that isn't asked for."""
    if not overwrite:  # begun since choose_folder looked
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


def _opened(path: Path, length: int) -> BinaryIO:
    """The file, cut to the length that it had at a checkpoint, to be appended to."""
    file = path.open("ab")
    file.truncate(length)
    file.seek(length)
    return file


def _close(file: BinaryIO) -> None:
    with contextlib.suppress(OSError):  # a full disk, again, or a folder that is gone
        file.close()
        path = Path(file.name)
        if path.name == "tokens.jsonl" and path.stat().st_size == 0:  # nothing was to be recorded
            path.unlink()


def _append(file: BinaryIO, records: list[dict], sync: bool = False) -> None:
    """Append records, as JSON lines; with `sync` all lines outlive a power cut. Raises Fault."""
    if not records and not sync:
        return
    text = "".join(json.dumps(r, allow_nan=False, ensure_ascii=False) + "\n" for r in records)
    try:
        file.write(text.encode("utf-8", "backslashreplace"))  # half a surrogate pair, as \\ud800
        file.flush()
        if sync:
            os.fsync(file.fileno())
    except OSError as e:
        raise Fault(f"{file.name} can't be written ({e.strerror}): make room for it") from e


def _finite(x: float | None) -> float | None:
    """JSON has neither NaN nor infinity: they become null."""
    return x if x is None or math.isfinite(x) else None


def _record(
    file: BinaryIO, step: int, split: str, title: str, rows: list, texts: list, scores: list
) -> None:
    """Append the G completions of each row to samples.jsonl; print the title and four of them, in
    an evaluation of four prompts.
    """
    G = len(texts) // len(rows)
    rows = [row for row in rows for _ in range(G)]
    records, lines = [], []
    for row, text, value in zip(rows, texts, scores, strict=True):
        sample = {"prompt": row["prompt"], "completion": text, "score": _finite(value)}
        records.append({"step": step, "split": split} | sample)
        prompt = " ".join(text_of(row["prompt"]).split())
        prompt = prompt if len(prompt) <= 45 else f"... {prompt[-41:]}"
        line = textwrap.shorten(f"{prompt} \N{RIGHTWARDS ARROW} {text}", 90, placeholder=" ...")
        lines.append(f"  {value:5.2f}  {line}")
    _append(file, records)
    shown = lines[:: G if split == "heldout" else 1][:4]
    tqdm.write("\n".join([f"step {step}: {title}", *shown]))  # print would tear the bar


def _description(config: Any, policy: PreTrainedModel, task: Task, folder: Path) -> str:
    """What this run is, and every setting that has a value."""
    total = sum(p.numel() for p in policy.parameters()) / 1e6
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad) / 1e6
    adapter = f"an adapter of {trained:.2f} M on " if trained < total else ""
    num_heldout = min(len(task.heldout), getattr(config, "num_eval_prompts", len(task.heldout)))
    settings = asdict(config).items()
    shown = "  ".join(f"{name}={value}" for name, value in settings if value not in (None, []))
    return (
        f"{config.script}: {adapter}{total:.1f} M parameters on {policy.device}, "
        f"{len(task.train)} {task.name} to train on, {num_heldout} held out, writing to {folder}\n"
        + textwrap.fill(shown, 98, initial_indent="  ", subsequent_indent="  ")
    )


def run_main(main: Callable[[], None]) -> None:
    """Run a script's main(): errors are one line; exit code 2 for bad input, 1 for a fault."""
    keep_freed_memory()
    transformers_logging.set_verbosity(50)  # CRITICAL: its errors reach us as exceptions
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # from peft
    try:
        main()
    except (InputError, Fault) as e:
        code, message = 2 if isinstance(e, InputError) else 1, f"error: {e}"
    except torch.OutOfMemoryError as e:  # in a run: see Run.__exit__
        code, message = 1, f"error: {first_line(e)} Choose a smaller model"
    except Interrupted as e:
        code, message = e.code, str(e)
    except KeyboardInterrupt:
        code, message = 130, "interrupted"
    else:
        return
    print(message, file=sys.stderr)
    raise SystemExit(code)


# The settings that a resumed run may change.
FREE_ON_RESUME = """resume overwrite output_dir device num_steps eval_every save_every sample_every
save_best tensorboard wandb micro_batch_size micro_batch_tokens rollout_batch_size
gradient_checkpointing compile record_tokens""".split()

FIELDS = """weights optimizer generators torch cuda step metrics samples tokens first_metrics
best warned""".split()  # of a checkpoint


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write `state` to `path`, followed by a checksum. Raises Fault.

    It is complete, and on the disk, before it takes its name: whenever the process dies, `path` is
    the new state or the one before it.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(exist_ok=True)
        torch.save(state, new)
        with new.open("r+b") as file:
            # torch.load doesn't look at the checksums inside the file.
            file.write(_crc32(file, new.stat().st_size).to_bytes(4, "big"))
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        with contextlib.suppress(OSError):  # Windows opens no folders
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)  # the new name, too, survives a power cut
            os.close(folder)
    except (OSError, RuntimeError) as e:
        new.unlink(missing_ok=True)  # half a checkpoint would keep the disk full
        # torch reports a full disk as a RuntimeError, "unexpected pos".
        reason = e.strerror if isinstance(e, OSError) else "is the disk full?"
        raise Fault(f"{path} can't be written ({reason}): make room for it") from e


def read_state(path: Path) -> dict[str, Any]:
    """The state that write_state wrote, on the CPU. Raises InputError if it is damaged."""
    try:
        with path.open("rb") as file:
            checksum = _crc32(file, path.stat().st_size - 4)
            if checksum.to_bytes(4, "big") != file.read():
                raise ValueError("its checksum is wrong")
        # weights_only: a checkpoint is data, nothing in it is executed.
        state = torch.load(path, weights_only=True, map_location="cpu")
        if missing := [name for name in FIELDS if name not in state]:
            raise ValueError(f"it has no {missing[0]!r}")
        return state
    except (OSError, ValueError, RuntimeError, UnpicklingError) as e:
        reason = f"{path} is damaged ({first_line(e)})"
        raise InputError(f"--resume: {reason}; --overwrite starts the run anew") from e


def _crc32(file: BinaryIO, size: int) -> int:
    """The checksum of the next `size` bytes of the file."""
    checksum = 0
    while size > 0 and (block := file.read(min(size, 2**24))):
        checksum, size = zlib.crc32(block, checksum), size - len(block)
    return checksum


def trained_weights(**models: nn.Module | None) -> dict[str, Tensor]:
    """All weights of the models that are trained, by name."""
    return {
        f"{kind}.{name}": p.detach()
        for kind, model in models.items()
        if model is not None
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def random_state(generators: dict[str, torch.Generator]) -> dict[str, Any]:
    """The state of all random numbers: of the generators and of torch itself."""
    return {
        "generators": {name: g.get_state() for name, g in generators.items()},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore(
    state: dict, weights: dict[str, Tensor], optimizer: torch.optim.Optimizer, generators: dict
) -> None:
    """Put weights, optimiser and random states back. Raises InputError if they don't fit."""
    shapes = {name: p.shape for name, p in state["weights"].items()}
    if shapes != {name: p.shape for name, p in weights.items()}:
        raise InputError("--resume: the checkpoint belongs to another model")
    try:
        for name, generator in generators.items():
            generator.set_state(state["generators"][name])
    except RuntimeError as e:
        raise InputError("--resume: the run was on another kind of device, see --device") from e
    for name, p in weights.items():
        p.copy_(state["weights"][name])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def check_settings(config: Any, path: Path) -> None:
    """Check that `config` is that of the run whose config.json is `path`. Raises InputError."""
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        script = before.pop("script")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise InputError(f"--resume: {path} can't be read ({first_line(e)})") from e
    if script != config.script:
        raise InputError(f"--resume: {path.parent} holds a run of {script}.py")
    for name, value in dataclasses.asdict(config).items():
        if name not in FREE_ON_RESUME and before.get(name) != value:
            has = f"the run in {path.parent} has {before.get(name)}"
            rule = "--resume goes on with the settings of the run"
            raise InputError(f"--{name} {value}: {has}, and {rule}")


def save_model(
    folder: Path, policy: PreTrainedModel, tokenizer: Tokenizer, merge_adapter: bool
) -> None:
    """Save the policy, or its adapter, as folder/model; merged, the adapter as folder/adapter."""
    new = folder / "model.new"  # complete before it takes its name
    shutil.rmtree(new, ignore_errors=True)
    # peft would ask the hub whether the vocabulary has grown: it hasn't.
    options = {"save_embedding_layers": False} if hasattr(policy, "peft_config") else {}
    if merge_adapter and hasattr(policy, "peft_config"):
        policy.save_pretrained(folder / "adapter", **options)
        tokenizer.save_pretrained(folder / "adapter")
        # A copy: after the best evaluation the adapter trains on.
        policy, options = copy.deepcopy(policy).merge_and_unload(), {}
    policy.save_pretrained(new, **options)
    tokenizer.save_pretrained(new)
    if (folder / "model").exists():
        shutil.rmtree(folder / "model")
    new.rename(folder / "model")


class Interrupted(Exception):
    """Ctrl-C or SIGTERM: the step is finished and saved. Exit code 128 + the signal's number."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.code = 128 + number


class Signals:
    """Notes which signal came, if one did, in `number`, from `watch` to `restore`."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.handlers = {}  # what each signal did before

    def watch(self) -> None:
        with contextlib.suppress(ValueError):  # only the main thread may
            for number in (signal.SIGINT, signal.SIGTERM):
                self.handlers[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.number = number
        self.restore()
        # print may be what the signal interrupts, and can't be called again from within.
        with contextlib.suppress(OSError):
            os.write(2, b"\nfinishing what is begun, then saving; once more stops at once\n")

    def restore(self) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)


Tracker = Callable[[int, dict[str, float]], None]  # called with a step and its metrics


def check_installed(config: Any) -> None:
    """Check that the services that are to follow the run are installed. Raises InputError."""
    for name, module in (("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")):
        if getattr(config, name):
            optional_library(module, f"--{name}: pip install {name}")


def start_trackers(folder: Path, config: Any, first_step: int) -> list[Tracker]:
    """The trackers that --tensorboard and --wandb ask for. Raises InputError."""
    found = []
    if config.tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        # What a run wrote after the checkpoint from which it goes on would be there twice.
        purge = first_step if config.resume else None
        writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

        def track(step: int, metrics: dict[str, float]) -> None:
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        found.append(track)
    if config.wandb:
        import wandb

        name = folder.resolve().name
        resume = "allow" if config.resume else None  # else it would go on with a run of this name
        options = {"resume": resume, "config": asdict(config), "dir": folder}
        try:
            tracked = wandb.init(project="plainrlhf", id=name, name=name, **options)
        except Exception as e:  # no key, no network
            raise InputError(f"--wandb: {first_line(e)}") from e
        found.append(lambda step, metrics: tracked.log(metrics, step=step))
    return found
