"""What a run leaves behind: metrics, samples, warnings, checkpoints, the model.

A run writes into runs/<script>-<model>-<task>-s<seed>/: config.json, metrics.jsonl (an object per
step; the key `step` is the number of updates before it), samples.jsonl, model/ in Hugging Face
format, checkpoint/ for --resume, checkpoint.old/ should that be damaged, and curve.png.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import importlib.util
import json
import logging
import math
import os
import shutil
import signal
import sys
import tempfile
import textwrap
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from common import Fault, InputError, ValueModel, first_line
from plumbing.metrics import progress, warnings_about
from sampling import generate
from tasks import Task, encode_prompts, score, verify


class Interrupted(Exception):
    """Ctrl-C or SIGTERM: the step is finished and saved. Exit code 128 + the signal's number."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.code = 128 + number


class Run:
    """The records of a run, its checkpoints and its model. Use as `with Run(...) as run:`; however
    the block is left, what was computed is saved.

    A run that is overwritten is moved aside, and deleted when the first step of the new one is
    done: a mistake in the new command loses nothing.
    """

    def __init__(
        self,
        script: str,
        folder: Path,
        config: Any,
        policy: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        task: Task,
        sampling: dict[str, Any],
        optimizer: torch.optim.Optimizer,
        shuffler: torch.Generator,
        value_model: ValueModel | None = None,
    ) -> None:
        """Create the folder, or with --resume put back all that the checkpoint holds, and print the
        configuration. Raises InputError if that fails.
        """
        self.script, self.config, self.policy, self.tokenizer = script, config, policy, tokenizer
        self.task, self.sampling, self.folder = task, sampling, folder
        self.optimizer, self.value_model = optimizer, value_model
        self.generators = {"shuffler": shuffler, "sampler": sampling["generator"]}
        self.first_step = self.steps_done = 0
        self.first_metrics, self.best = {}, None
        self.history, self.warned = [], set()
        self.signal = None  # the number of the signal that asked to stop
        self.aside = None  # where the run that this one replaces waits
        self.state, self.weights_moved = None, False  # weights_moved: since the state was taken
        self.saved_step = None  # of the newest checkpoint that is whole
        self.bar = None
        optimizer.register_step_post_hook(self._note_move)
        state = self._newest_checkpoint() if config.resume else None
        try:
            if state is not None:
                self._put_back(state)  # with all checks, before a file is touched
            elif folder.exists() and any(folder.iterdir()):
                self.aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}-old-", dir=folder.parent))
                folder.rename(self.aside / folder.name)
            folder.mkdir(parents=True, exist_ok=True)
            # First the file that shows that this is a run: then --resume understands what it finds.
            self._metrics = _opened(folder / "metrics.jsonl", state and state["metrics"])
            self._samples = _opened(folder / "samples.jsonl", state and state["samples"])
            settings = {"script": script} | dataclasses.asdict(config)
            (folder / "config.json.new").write_text(json.dumps(settings, indent=2) + "\n")
            (folder / "config.json.new").replace(folder / "config.json")
            self.trackers = [start(folder, config, self.first_step) for start in _trackers(config)]
        except BaseException as e:
            self._bring_back()
            if isinstance(e, OSError):
                text = f"--output_dir {folder}: can't be written ({e.strerror})"
                raise InputError(text) from e
            raise
        print(self._description())

    def __enter__(self) -> Run:
        self.handlers = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.handlers[number] = signal.signal(number, self._note_signal)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        self._restore_handlers()
        if self.bar is not None:
            self.bar.close()
        failure = ""
        try:
            # A step that fails before its update leaves the weights as they were when it began.
            failed = error is not None and not isinstance(error, Interrupted)
            if failed and self.steps_done > 0 and not self.weights_moved:
                self._checkpoint()
            if self.steps_done > 0 and not (self.config.save_best and self.best is not None):
                self._save()
                when = f"after {self.steps_done} steps"
                if self.weights_moved:
                    when = f"in the middle of step {self.state['step']}"
                print(f"{self.folder}/model holds the model {when}.")
            if error is None and importlib.util.find_spec("matplotlib"):
                from tools.plot import draw

                draw([self.folder], self.folder / "curve.png")
        except Exception as e:  # whatever a full disk makes the libraries raise
            failure = f"; saving to {self.folder} failed: {first_line(e)}"
            if str(e) == str(error):
                failure = ""
        for file in (self._metrics, self._samples):
            with contextlib.suppress(OSError):  # a full disk, again
                file.close()
        if self.steps_done == 0:
            self._bring_back()
        if error is None and failure:
            raise Fault(failure.removeprefix("; "))
        out_of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
            isinstance(error, RuntimeError) and "allocate memory" in str(error)
        )
        if out_of_memory:
            text = first_line(error).rstrip(".")
            advice = "lower --micro_batch_tokens or --rollout_batch_size"
            raise Fault(f"{self._where()}{text}; {advice}{self._saved()}{failure}")
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(signal.SIGINT, f"{self._where()}interrupted{self._saved()}{failure}")
        if isinstance(error, (InputError, Fault, Interrupted)):
            error.args = (f"{self._where()}{error}{self._saved()}{failure}",)

    def _bring_back(self) -> None:
        """Put the run that this one was to replace back in its place."""
        if self.aside and (self.aside / self.folder.name).exists():
            shutil.rmtree(self.folder, ignore_errors=True)
            (self.aside / self.folder.name).rename(self.folder)
            self.aside.rmdir()

    def _where(self) -> str:
        return f"step {self.state['step']}: " if self.state else ""

    def _saved(self) -> str:
        """What is left of the run, for the end of a message."""
        if self.saved_step is None:
            return ""
        return f"; {self.folder} is saved up to step {self.saved_step}, --resume goes on from there"

    def steps(self) -> Iterator[int]:
        """The numbers of the steps that are still to do. Between them checkpoints are written, and
        Ctrl-C or SIGTERM end the run. Raises Interrupted.
        """
        num_steps = self.config.num_steps
        self.bar = tqdm(
            total=num_steps, initial=self.first_step, desc=self.script, dynamic_ncols=True
        )
        for step in range(self.first_step, num_steps + 1):
            self._take_state(step)
            due = step > self.first_step and step % self.config.save_every == 0
            if due or step == num_steps or self.signal is not None:
                self._checkpoint()
            if self.signal is not None:
                raise Interrupted(self.signal, "interrupted")
            if step < num_steps:
                yield step
                self.bar.update()
        self.bar.close()

    def log(self, step: int, metrics: dict[str, float | None]) -> None:
        """Append one line to metrics.jsonl, at once: a later fault doesn't lose it."""
        line = {"step": step} | {name: _finite(value) for name, value in metrics.items()}
        self._write(self._metrics, [line])
        self.steps_done = min(step + 1, self.config.num_steps)
        for track in self.trackers:
            track(step, {name: value for name, value in line.items() if value is not None})
        if "objective/kl" in metrics:  # not the last evaluation
            self.history.append(metrics)
            for name, text in warnings_about(self.history, self.config.bf16):
                if name not in self.warned:
                    self.warned.add(name)
                    tqdm.write(f"warning, step {step}: {text}")
            self.bar.set_postfix_str(progress(metrics))
        if self.aside:
            shutil.rmtree(self.aside)
            self.aside = None

    def show(self, step: int, rows: list[dict], texts: list[str], scores: Tensor) -> None:
        """Every `sample_every` steps: record the completions of a step, and print a few."""
        if step % self.config.sample_every == 0:
            rows = [row for row in rows for _ in range(len(texts) // len(rows))]
            shown = self._record(step, "train", rows, texts, scores.tolist())
            tqdm.write("\n".join([f"step {step}: samples from training", *shown]))

    @torch.no_grad()
    def evaluate(self, step: int) -> dict[str, float | None]:
        """Complete each held-out prompt, sampled and greedily: record the samples, print a few.

        The random numbers are the same every time and not those of training: two evaluations
        differ by the policy alone, and evaluating more often changes no run.
        """
        rows = self.task.heldout[: self.config.num_eval_prompts]
        metrics = {}
        for kind, options in (("", {}), ("_greedy", {"top_k": 1})):
            generator = torch.Generator(self.policy.device).manual_seed(self.config.seed + 1)
            sampling = self.sampling | {"generator": generator} | options
            scores, texts = [], []
            for start in range(0, len(rows), self.config.rollout_batch_size):
                part = rows[start : start + self.config.rollout_batch_size]
                prompt_ids, prompt_mask = encode_prompts(self.tokenizer, part, self.policy.device)
                rollout = generate(self.policy, prompt_ids, prompt_mask, **sampling)
                part_scores, part_texts = score(self.task, part, rollout, self.tokenizer)
                scores += part_scores.tolist()
                texts += part_texts
            known = [value for value in scores if not math.isnan(value)]
            metrics |= {
                f"eval/reward{kind}": sum(known) / len(known) if known else None,
                f"eval/accuracy{kind}": verify(self.task, rows, texts),
            }
            if not kind:
                shown = self._record(step, "heldout", rows, texts, scores)
        self.first_metrics = self.first_metrics or metrics
        title = self._compared(step, metrics, "eval/reward")
        if metrics["eval/accuracy"] not in (None, metrics["eval/reward"]):
            title += "; " + self._compared(step, metrics, "eval/accuracy")
        tqdm.write("\n".join([f"step {step}: {title}", *shown]))  # print would tear the bar
        value = metrics["eval/reward" if metrics["eval/accuracy"] is None else "eval/accuracy"]
        better = value is not None and (self.best is None or value > self.best)
        if self.config.save_best and better:
            self.best = value
            self._save()
            tqdm.write(f"  the best so far: saved as {self.folder}/model")
        return metrics

    def _compared(self, step: int, metrics: dict[str, float], name: str) -> str:
        """A metric sampled and greedy, each beside what it was before the training."""
        parts = []
        for key, title in ((name, name), (f"{name}_greedy", "greedy")):
            now, first = (
                "unknown" if x[key] is None else f"{x[key]:.3f}"
                for x in (metrics, self.first_metrics)
            )
            parts.append(f"{title} {now}" + (f" (was {first})" if step > 0 else ""))
        return ", ".join(parts)

    def _record(
        self, step: int, split: str, rows: list[dict], texts: list[str], scores: list[float]
    ) -> list[str]:
        """Write completions to samples.jsonl; returns lines that show the first few."""
        records, lines = [], []
        for row, text, value in zip(rows, texts, scores, strict=True):
            sample = {"prompt": row["prompt"], "completion": text, "score": _finite(value)}
            records.append({"step": step, "split": split} | sample)
            if len(lines) < 4:
                prompt = row["prompt"]
                prompt = prompt if isinstance(prompt, str) else prompt[-1]["content"]
                line = " ".join(f"{prompt} \N{RIGHTWARDS ARROW} {text}".split())
                lines.append(f"  {value:5.2f}  {textwrap.shorten(line, 90, placeholder=' ...')}")
        self._write(self._samples, records)
        return lines

    def _write(self, file: BinaryIO, records: list[dict]) -> None:
        """Append records, as JSON lines. Raises Fault."""
        text = "".join(json.dumps(r, allow_nan=False, ensure_ascii=False) + "\n" for r in records)
        try:
            file.write(
                text.encode("utf-8", "backslashreplace")
            )  # half a surrogate pair, as \\ud800
            file.flush()
        except OSError as e:
            raise Fault(f"{file.name} can't be written ({e.strerror}): make room for it") from e

    def _save(self) -> None:
        """The model; of a policy with an adapter the adapter, and the two merged if asked for."""
        policy, folder = self.policy, self.folder / "model"
        new = self.folder / "model.new"  # complete before it takes its name
        shutil.rmtree(new, ignore_errors=True)
        # peft would ask the hub whether the vocabulary has grown: it hasn't.
        options = {"save_embedding_layers": False} if hasattr(policy, "peft_config") else {}
        if self.config.merge_adapter:
            policy.save_pretrained(self.folder / "adapter", **options)
            self.tokenizer.save_pretrained(self.folder / "adapter")
            # A copy: after the best evaluation the adapter trains on.
            policy, options = copy.deepcopy(policy).merge_and_unload(), {}
        policy.save_pretrained(new, **options)
        self.tokenizer.save_pretrained(new)
        if folder.exists():
            shutil.rmtree(folder)
        new.rename(folder)

    def _trained(self) -> dict[str, Tensor]:
        """All weights that train, of the policy and of the value model."""
        models = {"policy": self.policy, "value": self.value_model}
        return {
            f"{kind}.{name}": p.detach()
            for kind, model in models.items()
            if model is not None
            for name, p in model.named_parameters()
            if p.requires_grad
        }

    def _take_state(self, step: int) -> None:
        """Note what a step changes beside the weights: random states, the ends of the files. With
        the weights it is the state of the run after `step` steps.
        """
        self.state = {
            "step": step,
            "generators": {name: g.get_state() for name, g in self.generators.items()},
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "metrics": self._metrics.tell(),
            "samples": self._samples.tell(),
            "first_metrics": self.first_metrics,
            "best": self.best,
            "warned": sorted(self.warned),
        }
        self.weights_moved = False

    def _checkpoint(self) -> None:
        """Write checkpoint/, for --resume. It is complete before it takes its name, and the one
        before it is kept as checkpoint.old/: whenever the process dies, one of them is whole.
        Raises Fault.
        """
        new, path, old = (self.folder / f"checkpoint{end}" for end in (".new", "", ".old"))
        state = self.state | {"weights": self._trained(), "optimizer": self.optimizer.state_dict()}
        try:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
            torch.save(state, new / "state.pt")
            record = {"step": state["step"], "crc32": _crc32(new / "state.pt")}
            (new / "record.json").write_text(json.dumps(record) + "\n")
            if path.exists():
                shutil.rmtree(old, ignore_errors=True)
                path.rename(old)
            new.rename(path)
            self.saved_step = state["step"]
        except (OSError, RuntimeError) as e:  # torch says RuntimeError for a full disk
            shutil.rmtree(new, ignore_errors=True)  # half of it would fill the disk
            # torch reports a full disk as "unexpected pos".
            reason = e.strerror if isinstance(e, OSError) else "is the disk full?"
            raise Fault(f"{path} can't be written ({reason}): make room for it") from e

    def _newest_checkpoint(self) -> dict[str, Any] | None:
        """The newest state that is whole, or None before the first. Raises InputError."""
        damaged = False
        for end in ("", ".new", ".old"):  # .new is whole where the process died between renames
            path = self.folder / f"checkpoint{end}"
            if not path.exists():
                continue
            try:
                record = json.loads((path / "record.json").read_text())
                if record["crc32"] != _crc32(path / "state.pt"):
                    raise ValueError("its checksum is wrong")
                # weights_only: a checkpoint is data, nothing in it is run.
                state = torch.load(path / "state.pt", weights_only=True, map_location="cpu")
                self.saved_step = state["step"]
                print(f"{path} is whole: going on after {state['step']} steps.")
                return state
            except (
                OSError,
                ValueError,
                LookupError,
                TypeError,
                RuntimeError,
                UnpicklingError,
            ) as e:
                damaged |= end != ".new"
                print(f"{path} is damaged, it is left out: {first_line(e)}")
        if damaged:
            raise InputError(f"--resume: {self.folder} has no checkpoint that is whole")
        print(f"--resume: {self.folder} has no checkpoint yet, the run starts at step 0.")
        return None

    def _put_back(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state. Raises InputError."""
        if state["step"] > self.config.num_steps:
            steps = f"{self.folder} has {state['step']} steps already"
            raise InputError(f"--num_steps {self.config.num_steps}: {steps}")
        trained = self._trained()
        shapes = {name: p.shape for name, p in state["weights"].items()}
        if shapes != {name: p.shape for name, p in trained.items()}:
            raise InputError(f"--resume: {self.folder}/checkpoint belongs to another model")
        for name in ("metrics", "samples"):
            path = self.folder / f"{name}.jsonl"
            if not path.exists() or path.stat().st_size < state[name]:
                raise InputError(f"--resume: {path} has lost lines that the checkpoint knows of")
        try:
            for name, generator in self.generators.items():
                generator.set_state(state["generators"][name])
        except RuntimeError as e:
            raise InputError("--resume: the run was on another kind of device, see --device") from e
        with torch.no_grad():
            for name, p in trained.items():
                p.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["torch"])
        if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])
        self.first_step = self.steps_done = state["step"]
        self.first_metrics, self.best = state["first_metrics"], state["best"]
        self.warned = set(state["warned"])

    def _note_move(self, *args: object) -> None:
        self.weights_moved = True

    def _note_signal(self, number: int, frame: object) -> None:
        """The first signal lets the step end; the second is what it always was."""
        self.signal = number
        self._restore_handlers()
        # print may be what the signal interrupts, and can't be called again from within.
        with contextlib.suppress(OSError):
            os.write(2, b"\nfinishing what is begun, then saving; once more stops at once\n")

    def _restore_handlers(self) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _description(self) -> str:
        """What this run is, and every setting that has a value."""
        sizes = {p: p.numel() / 1e6 for p in self.policy.parameters()}
        size = f"{sum(sizes.values()):.1f} M parameters"
        trained = sum(size for p, size in sizes.items() if p.requires_grad)
        if trained < sum(sizes.values()):
            size = f"an adapter of {trained:.2f} M on {size}"
        num_heldout = min(len(self.task.heldout), self.config.num_eval_prompts)
        settings = dataclasses.asdict(self.config).items()
        shown = "  ".join(f"{name}={value}" for name, value in settings if value not in (None, []))
        return (
            f"{self.script}: {size} on {self.policy.device}, "
            f"{len(self.task.train)} prompts to train on, {num_heldout} held out, "
            f"writing to {self.folder}\n"
            + textwrap.fill(shown, 98, initial_indent="  ", subsequent_indent="  ")
        )


def _trackers(config: Any) -> list[Callable]:
    """The services that are asked to follow the run. Raises InputError."""
    return [_tensorboard] * config.tensorboard + [_wandb] * config.wandb


def _tensorboard(
    folder: Path, config: Any, first_step: int
) -> Callable[[int, dict[str, float]], None]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as e:
        raise InputError("--tensorboard: pip install tensorboard") from e
    # What a run wrote after the checkpoint from which it goes on would be there twice.
    purge = first_step if config.resume else None
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def track(step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return track


def _wandb(folder: Path, config: Any, first_step: int) -> Callable[[int, dict[str, float]], None]:
    try:
        import wandb
    except ImportError as e:
        raise InputError("--wandb: pip install wandb") from e
    name = folder.resolve().name
    resume = "allow" if config.resume else None  # else the run would go on with one of this name
    settings = dataclasses.asdict(config)
    try:
        tracked = wandb.init(
            project="plainrlhf", id=name, name=name, resume=resume, config=settings, dir=folder
        )
    except Exception as e:  # no key, no network
        raise InputError(f"--wandb: {first_line(e)}") from e
    return lambda step, metrics: tracked.log(metrics, step=step)


def _opened(path: Path, length: int | None) -> BinaryIO:
    """The file, new, or cut to the length that it had at a checkpoint, to be appended to."""
    if length is None:
        return path.open("wb")
    file = path.open("r+b")
    file.truncate(length)
    file.seek(length)
    return file


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(2**24):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _finite(x: float | None) -> float | None:
    """JSON has neither NaN nor infinity: they become null."""
    return x if x is None or math.isfinite(x) else None


def keep_freed_memory() -> None:
    """On Linux, keep the memory that tensors free instead of giving it back, and take it in huge
    pages: on a CPU getting it anew from the system costs as much as computing with it.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read by PyTorch at its first allocation
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_mmap_threshold, 2**30) or libc.mallopt(m_mmap_threshold, 2**25)  # older
        libc.mallopt(m_trim_threshold, 2**31 - 1)


def run_main(main: Callable[[], None]) -> None:
    """Run a script's main(): errors are one line; exit code 2 for bad input, 1 for a fault."""
    keep_freed_memory()
    transformers_logging.set_verbosity(logging.CRITICAL)  # its errors reach us as exceptions
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # from peft
    try:
        main()
    except InputError as e:
        code, message = 2, f"error: {e}"
    except Fault as e:
        code, message = 1, f"error: {e}"
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
