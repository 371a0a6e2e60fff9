"""A run and what it leaves in its folder: config.json, metrics.jsonl (an object per step; the key
`step` is the number of steps before it), samples.jsonl, tokens.jsonl, warnings.jsonl, model/ in
Hugging Face format (of a LoRA run the adapter), checkpoint.pt for --resume, and curve.png.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import logging as transformers_logging

from common import Rollout, evaluating, is_flat
from forward import rollout_logprobs
from plumbing.config import ANEW, MADE, TrainConfig, claim_folder
from plumbing.curves import draw_curves, read_lines
from plumbing.data import text_of
from plumbing.errors import Fault, InputError, blame
from plumbing.metrics import (
    Evaluation,
    Metrics,
    headline,
    sample_records,
    warnings_of_evaluation,
)

FILES = ("metrics", "samples", "tokens", "warnings")  # .jsonl


class Run:
    """Keeps the records and checkpoints of a run.

    models: those that train, by name, the one to save as model/ first. generators: all from which
    the run draws. data: what it trains on, with `train`, `heldout`, `name` and `tokenizer`.
    """

    active: ClassVar[Run | None] = None  # the one that an error ends

    def __init__(
        self,
        config: TrainConfig,
        data: Any,
        models: dict[str, nn.Module],
        optimizer: torch.optim.Optimizer,
        generators: list[torch.Generator] = (),
    ) -> None:
        self.config, self.data, self.models, self.optimizer = config, data, models, optimizer
        self.generators, self.files = list(generators), {}
        self.step, self.saved_step = 0, None  # steps done; and in the checkpoint
        self.process = os.getpid()
        self.history, self.warned = [], set()
        self.origin = self._hash()
        self.first_metrics: Metrics = {}  # of the evaluation before the first step
        self.evaluated: Metrics = {}  # of the evaluation before the step at hand
        optimizer.register_step_pre_hook(self._note_move)
        flag = "resume" if config.resume else "output_dir"
        with blame(f"--{flag} {config.output_dir or 'runs/...'}"):
            self.folder = claim_folder(config)
            try:
                self._open()
            except BaseException:
                self._give_up()
                raise
        size = sum(p.numel() for p in self._weights().values()) / 1e6
        what = f"{len(data.train)} {data.name} to train on, {len(data.heldout)} held out"
        print(f"{config.script}: {size:.1f} M weights train on {config.device}, {what}")
        print(f"It writes to {config.output_dir}")

    def _open(self) -> None:
        """Open the files of the run, behind the steps of a run that is resumed."""
        # First: without wandb this fails, before the old run is erased.
        config = self.config
        self.trackers = [tracker(name, self.folder, config) for name in config.report_to]
        if config.resume:
            self._resume()
        elif config.overwrite:
            # All but what says that the folder is a run's: it may be killed meanwhile.
            kept = ("metrics.jsonl", "config.json")
            for path in (self.folder / name for name in MADE if name not in kept):
                is_file = path.is_symlink() or not path.is_dir()  # of a link only the link goes
                path.unlink(missing_ok=True) if is_file else shutil.rmtree(path)
        settings = json.dumps({"script": config.script} | asdict(config), indent=2)
        new = self.folder / "config.json.new"  # on a full disk the old one is still there
        new.write_text(settings + "\n")
        new.replace(self.folder / "config.json")
        # Half a surrogate pair has no bytes: it is written as \ud800.
        options = {"encoding": "utf-8", "errors": "backslashreplace"}
        options["mode"] = "a" if config.resume else "w"
        self.files = {x: (self.folder / f"{x}.jsonl").open(**options) for x in FILES}

    def _give_up(self) -> None:
        """Leave the folder of a run without a step to the next one."""
        for file in self.files.values():  # Windows deletes no open file
            with contextlib.suppress(OSError):  # what a full disk didn't take is flushed again
                file.close()
        metrics = self.folder / "metrics.jsonl"
        if metrics.exists() and metrics.stat().st_size == 0:  # somebody may have deleted the folder
            metrics.unlink()

    def _note_move(self, *args: object) -> None:
        self.weights_moved = True

    def steps(self, evaluate: Callable[[], Evaluation]) -> Iterator[int]:
        """Yield the numbers of the steps that are left, for `for step in run.steps(...)`.

        Evaluates before every eval_every-th step and after the last. When the loop asks for the
        next step, the one before is over, and saved if a checkpoint is due.
        """
        Run.active, last, first = self, self.config.num_steps, self.step
        shape = "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"  # 80 columns
        options = {"initial": first, "dynamic_ncols": True}
        options |= {"disable": True} if last == 0 else {}  # else TQDM_DISABLE decides
        self.bar = tqdm(total=last, desc=self.config.script, bar_format=shape, **options)
        self._note_state(first)
        due = range(self.config.save_every, last, self.config.save_every)
        for step in range(first, last):
            if step % self.config.eval_every == 0:
                self._evaluate(step, evaluate)
            self.seconds, self.phase_began = {}, time.perf_counter()
            yield step
            self.bar.update()
            self._note_state(step + 1)
            if step + 1 in due:
                self.save()
        if last > 0:
            self.save()
        self._evaluate(last, evaluate)
        self._write_metrics(last, self.evaluated)
        self.bar.close()
        Run.active = None
        if importlib.util.find_spec("matplotlib"):
            draw_curves([self.folder], self.folder / "curve.png")
        if self.files["tokens"].tell() > 0:  # neither of a reward model nor of an evaluation
            print(f"what a step did to each token: python tools/look.py {self.config.output_dir}")

    def end_phase(self, name: str) -> None:
        """End a phase of a step: its seconds are the metric `name`."""
        if self.config.device.startswith("cuda"):
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[name], self.phase_began = now - self.phase_began, now

    def log(self, step: int, meter: Any, **more: float) -> None:
        """Write what a Meter or PairMeter has found, with time, memory and `more`; warn."""
        means = getattr(self.data, "means", {})  # of several rewards
        metrics = means | self.evaluated | meter.results()  # waits for the device: it is over
        self.end_phase("time/update")
        metrics |= self.seconds | more
        metrics["lr"] = self.optimizer.param_groups[0]["lr"]
        metrics["tokens_per_second"] = meter.num_tokens / sum(self.seconds.values())
        metrics["memory/peak_gb"] = torch.cuda.max_memory_allocated() / 1e9 or None
        self._write_metrics(step, metrics)
        self.history.append(metrics)
        self.evaluated = {}
        # Rounding explains thousandths. Dropout, where it is left on, explains more.
        off = metrics.get("val/sampler_kl", 0)
        if len(self.history) == 1 and off > 0.3 and self.config.disable_dropout:
            fault = f"sampling and training differ by {off:.2g} nats per token, beyond rounding"
            raise Fault(f"{fault}: --model {self.config.model} can't be trained here")
        # What is learnt only from a named reference has no score, and may begin far away from it.
        distils = getattr(self.config, "reference", None) and metrics["objective/scores"] == 0
        silent = {"large KL", "flat groups", "constant reward"} if distils else set()
        found = meter.warnings(self.history, self.config.bf16)
        self._warn(step, [x for x in found if x[0] not in silent])
        self.bar.set_postfix_str(meter.progress(metrics))

    def _warn(self, step: int, found: list[tuple[str, str]]) -> None:
        """Print and keep warnings, (name, line) each, that the run hasn't given yet."""
        for name, text in found:
            if name not in self.warned:
                self.warned.add(name)
                self._write("warnings", [{"name": name, "text": text}], step=step)
                tqdm.write(f"warning, step {step}: {text}")

    def show(
        self,
        step: int,
        prompts: list[dict],
        texts: list[str],
        scores: Tensor,
        rollout: Rollout,
        columns: dict[str, Tensor | None],
    ) -> None:
        """At the steps that begin with an evaluation: record the completions of the step, and of
        eight of them `columns` for each token, (B, T) or (B,); print one of each of four prompts.
        """
        if step % self.config.eval_every:
            return
        records, lines = sample_records(prompts, texts, scores)
        self._write("samples", records, step=step, split="train")
        tqdm.write("\n".join([f"step {step}: samples from training", *lines[:4]]))
        policy = next(iter(self.models.values()))
        # The first group whose (first eight) scores differ, if one does: equal ones push no token.
        size = len(texts) // len(prompts) if len(texts) > len(prompts) else 8
        differ = [i for i, x in enumerate(scores.split(size)) if not is_flat(x[None, :8])]
        first = size * differ[0] if differ else 0
        some = slice(first, first + 8)
        with evaluating(policy):
            new_logprobs = rollout_logprobs(policy, rollout[some], self.config)
        columns = {name: x[some] for name, x in columns.items() if x is not None}
        columns |= {"score": scores[some], "new_logprobs": new_logprobs}
        details = token_records(self.data.tokenizer, rollout[some], columns)
        for i, record in enumerate(details, first):
            record |= {"completion_index": i, "prompt": text_of(records[i]["prompt"])[-500:]}
        self._write("tokens", details, step=step, split="train")

    def _evaluate(self, step: int, evaluate: Callable[[], Evaluation]) -> None:
        found = evaluate()
        self.evaluated = found.metrics
        self.first_metrics = self.first_metrics or found.metrics
        self._write("samples", found.records, step=step, split="heldout")
        title = headline(step, found.headline, found.metrics, self.first_metrics)
        shown = found.lines[: 4 if self.config.num_steps else 20]
        tqdm.write("\n".join([f"step {step}: {title}", *shown]))  # print tears the bar
        self._warn(step, warnings_of_evaluation(found.metrics, [self.first_metrics, *self.history]))

    def _write_metrics(self, step: int, metrics: Metrics) -> None:
        # JSON has neither NaN nor infinity: they become null.
        finite = {k: x if x is not None and math.isfinite(x) else None for k, x in metrics.items()}
        self._write("metrics", [finite], step=step)
        for track in self.trackers:
            track({name: x for name, x in finite.items() if x is not None}, step)

    def _write(self, name: str, records: list[dict], **first: Any) -> None:
        options = {"ensure_ascii": False, "default": str}  # a message may hold a datetime
        for record in records:
            self.files[name].write(json.dumps(first | record, **options) + "\n")
        self.files[name].flush()

    # --- Checkpoints ---

    def _weights(self) -> dict[str, Tensor]:
        named = ((f"{k}.{n}", p) for k, m in self.models.items() for n, p in m.named_parameters())
        return {name: p.detach() for name, p in named if p.requires_grad}

    def _hash(self) -> str:
        """Hash the rows, and of a few weights of each matrix, that the run begins with."""
        # Not of a reward's file: a fault that has ended the run may be mended there.
        digest = hashlib.sha256()
        for row in (row for rows in (self.data.train, self.data.heldout) for row in rows):
            text = re.sub(" at 0x[0-9a-f]+", "", repr(row))  # a function's address
            digest.update(text.encode())
        models = [*self.models.values(), *getattr(self.data, "frozen_models", ())]
        for p in (p for model in models for p in model.parameters()):
            few = p.flatten()[-4:].bfloat16()  # under an adapter they may be stored so
            digest.update(repr(few.tolist()).encode())
        return digest.hexdigest()

    def _note_state(self, step: int) -> None:
        """Note what, with the weights, makes the state of the run after `step` steps."""
        self.step, self.weights_moved = step, False
        self.random_state = {
            "generators": [g.get_state() for g in self.generators],
            "torch": torch.get_rng_state(),
            "cuda": [torch.cuda.get_rng_state()] if self.config.device.startswith("cuda") else [],
        }

    def save(self) -> None:
        """Write model/ and checkpoint.pt, each complete before it takes its name: where one can't
        be written, the other one is. Raises Fault.
        """
        faults = []
        for name, write in (("model", self._write_model), ("checkpoint.pt", self._write_state)):
            old = (self.folder / name).resolve()  # it may be a link to a larger disk
            new = old.with_name(f"{old.name}.new")
            try:
                write(new)
                if old.is_dir():
                    shutil.rmtree(old)
                new.replace(old)
            except Exception as e:  # torch, safetensors and tokenizers raise kinds of their own
                faults.append(f"{new} can't be written ({e})")
                new.unlink() if new.is_file() else shutil.rmtree(new, ignore_errors=True)
            else:
                self.saved_step = self.step if name == "checkpoint.pt" else self.saved_step
        if faults:
            raise Fault("; ".join(faults) + ": is the disk full?")

    def _write_model(self, folder: Path) -> None:
        next(iter(self.models.values())).save_pretrained(folder)
        self.data.tokenizer.save_pretrained(folder)
        for file in folder.glob("*.safetensors"):  # safetensors lets only the owner read them
            file.chmod((self.folder / "config.json").stat().st_mode)

    def _write_state(self, file: Path) -> None:
        state = {"step": self.step, "first_metrics": self.first_metrics, "origin": self.origin}
        state |= self.random_state
        state |= {"weights": self._weights(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, file)

    def _resume(self) -> None:
        """Take up the state of the checkpoint, and drop the records of later steps."""
        if not (self.folder / "checkpoint.pt").exists():
            raise InputError(f"there is no checkpoint: {ANEW}")
        cut = f"{self.folder / 'checkpoint.pt'} is cut short, or of another version"
        with blame(f"{cut}: {ANEW}"):
            state = torch.load(self.folder / "checkpoint.pt", weights_only=True, map_location="cpu")
            if state["origin"] != self.origin:
                raise InputError("the rows or the weights of a model aren't those it began with")
            for name, p in self._weights().items():
                p.copy_(state["weights"][name])
            self.optimizer.load_state_dict(state["optimizer"])
            for generator, its_state in zip(self.generators, state["generators"], strict=True):
                generator.set_state(its_state)
            torch.set_rng_state(state["torch"])
            for its_state in state["cuda"][:1]:  # of the run's device: others may be hidden today
                torch.cuda.set_rng_state(its_state)
            self.step = self.saved_step = state["step"]
            self.first_metrics = state["first_metrics"]
        lengths = {}  # all are read before one is cut: a resume that is refused loses nothing
        for path in (self.folder / f"{name}.jsonl" for name in FILES):
            path.touch()  # somebody may have deleted an empty one
            with path.open("rb") as file, blame(f"{path}: a line is no record"):
                whole = takewhile(lambda line: line.endswith(b"\n"), file)
                kept = takewhile(lambda line: json.loads(line)["step"] < self.step, whole)
                lengths[path] = sum(map(len, kept))
        for path, length in lengths.items():
            os.truncate(path, length)  # not written anew: the disk may be full
        # What a warning knows of earlier steps. Not a number was written as null.
        lines = read_lines(self.folder / "metrics.jsonl")
        self.history = [{k: math.nan if x is None else x for k, x in m.items()} for m in lines]
        self.warned = {x.get("name") for x in read_lines(self.folder / "warnings.jsonl")}

    def rescue(self) -> str:
        """Save the state before the step that an error has ended, if the weights are still those;
        a line that says what is saved.
        """
        self.bar.close()  # what is printed begins a line
        if not self.weights_moved and self.step not in (0, self.saved_step):
            try:
                self.save()
            except Fault as e:
                print(e, file=sys.stderr)
        ended = f"The run ended in step {self.step}"
        if self.saved_step is None:
            self._give_up()
            model = (self.folder / "model").exists()
            saved = "model/ is saved, and no checkpoint" if model else "nothing is saved"
            return f"{ended}; {saved}."
        return f"{ended}: --resume {self.config.output_dir} goes on from step {self.saved_step}."


def tracker(name: str, folder: Path, config: TrainConfig) -> Callable[[Metrics, int], None]:
    """Make what sends the metrics of a step to "tensorboard" or "wandb". Raises InputError."""
    with blame(f"--report_to {name}"):
        if name == "wandb":
            import wandb

            run = wandb.init(project="plainrlhf", name=folder.name, config=asdict(config))
            return lambda metrics, step: run.log(metrics, step=step)
        from torch.utils.tensorboard import SummaryWriter

        # Made at the first call: an old run, with its curves, is erased before that.
        writer = functools.cache(lambda: SummaryWriter(str(folder / "tensorboard")))
        return lambda metrics, step: [writer().add_scalar(n, x, step) for n, x in metrics.items()]


# --- tokens.jsonl: what a step does to every token, for tools/look.py ---


def token_records(tokenizer: Tokenizer, rollout: Rollout, columns: dict[str, Tensor]) -> list[dict]:
    """Make records of b completions: `columns`, (b, T) a token or (b,) a completion."""
    columns = {"sampler_logprobs": rollout.logprobs} | columns
    numbers = {name: x.tolist() for name, x in columns.items()}
    T, records = rollout.completion_mask.shape[1], []
    for i, length in enumerate(rollout.lengths.tolist()):
        ids = rollout.tokens[i, -T - 1 :][: length + 1].tolist()
        record = {"num_tokens": length, "finished": bool(rollout.finished[i])}
        record["tokens"] = token_texts(tokenizer, ids)
        for name, x in numbers.items():
            of_tokens = isinstance(x[i], list)
            record[name] = [_short(n) for n in x[i][:length]] if of_tokens else _short(x[i])
        records.append(record)
    return records


def token_texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Return the text of each token except the first, each decoded with the token in front of it:
    SentencePiece tokenizers drop the space in front of the first word of what they decode.
    """
    texts, options = [], {"clean_up_tokenization_spaces": False}
    for before, token in pairwise(ids):
        start, both = (tokenizer.decode(x, **options) for x in ([before], [before, token]))
        is_whole = both.startswith(start)  # else a character whose bytes begin in the token before
        texts.append(both[len(start) :] if is_whole else tokenizer.decode([token], **options))
    return texts


def _short(x: float) -> float | None:
    """Round to five digits; null for what isn't finite."""
    return float(f"{x:.5g}") if math.isfinite(x) else None


# --- The end of a program ---


class LetPass(contextlib.suppress, contextlib.ContextDecorator):
    """Let errors of these kinds pass, in `with` or, as a decorator, in each call of a function."""


def run_main(main: Callable[[], None]) -> None:
    """Run a script's main(). A mistake in what the user gave is one line and exit code 2, a fault
    is one line and 1, Ctrl-C 130. All else keeps its traceback, after a line that says what is
    saved.
    """
    transformers_logging.set_verbosity(50)  # CRITICAL: its errors reach us as exceptions
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # from peft
    for stream in filter(None, (sys.stdout, sys.stderr)):
        # A character that the terminal lacks is shown as its number, not an error.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
        # A terminal that goes, or a log whose disk is full, must not take the step at hand along.
        stream.write, stream.flush = map(LetPass(OSError), (stream.write, stream.flush))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # by a shell, for `command &`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main()
    except BaseException as e:
        run, Run.active = Run.active, None
        if run is not None and run.process == os.getpid():  # no child that a reward has forked
            heard = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C: it saves
            print(run.rescue(), file=sys.stderr)
            signal.signal(signal.SIGINT, heard)
            if isinstance(e, SystemExit):  # else exit code 0, as if the run were whole
                e = Fault("exit() was called within the run: by a reward?")
        words = f"{type(e).__name__}: {e}"  # CUDA, a CPU, Python itself
        if re.search("out of memory|allocate memory|enough memory|MemoryError", words):
            remedy = "lower --micro_batch_tokens and --rollout_batch_size"
            e = Fault(f"out of memory: {remedy} ({words.splitlines()[0]})")
        codes = {InputError: 2, Fault: 1, KeyboardInterrupt: 130}
        if type(e) not in codes:
            raise
        print(f"error: {e}" if str(e) else "interrupted", file=sys.stderr)
        raise SystemExit(codes[type(e)]) from e
