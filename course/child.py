"""What runs beside a submission in its process: it calls functions and says what came back.

Nothing here decides on points, and nothing is secret: a submission shares this process and can
make it say anything. The grader compares what it says with answers of its own (checks.py).
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import numbers
import re
import runpy
import shutil
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace

import peft
import torch
import wire
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)
from transformers.utils import logging as transformers_logging

NOTES = 20  # that are told of a process
ARTEFACT = 8 * 2**20  # bytes of a file of a run that is told

# --- Models, the same on both sides ---


def tiny_gpt2(dropout: float = 0.0, vocab: int = 12) -> GPT2LMHeadModel:
    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    ids = {"bos_token_id": None, "eos_token_id": vocab - 1}
    config = GPT2Config(vocab_size=vocab, initializer_range=0.4, **sizes, **drops, **ids)
    return GPT2LMHeadModel(config)


SIZES = {"vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def adapted() -> nn.Module:
    config = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, r=2)
    return peft.get_peft_model(tiny_gpt2(), config)


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(intermediate_size=16, attention_dropout=0.5, **SIZES))


def opt() -> nn.Module:
    options = {"ffn_dim": 16, "dropout": 0.5, "layerdrop": 0.5, "word_embed_proj_dim": 16}
    return OPTForCausalLM(OPTConfig(**options, **SIZES))


def falcon() -> nn.Module:
    drops = {"attention_dropout": 0.5, "hidden_dropout": 0.5}
    return FalconForCausalLM(FalconConfig(new_decoder_architecture=True, **drops, **SIZES))


def dropouts(spatial: bool) -> nn.Module:
    if spatial:
        return nn.Sequential(nn.Dropout(0.5), nn.Dropout2d(0.5))
    return nn.Sequential(nn.Dropout(0.1), nn.Linear(2, 2), nn.Dropout(0.2), nn.Dropout1d(0.3))


BUILD = {f.__name__: f for f in (tiny_gpt2, adapted, llama, opt, falcon, dropouts)}


def warm_up(folder: Path) -> None:
    """Load a model once: transformers builds tables of names then, which the processes that are
    forked later have.
    """
    # A progress bar starts a thread, and makes a lock that all these processes would share: one
    # student could stop the others.
    transformers_logging.disable_progress_bar()
    AutoModelForCausalLM.from_pretrained(folder)
    AutoTokenizer.from_pretrained(folder)
    transformers_logging.enable_progress_bar()


# --- What the grader may ask for ---


class Harness:
    def __init__(self, code: Path) -> None:
        self.code, self.module, self.path = code, None, None
        self.objects: list[object] = []
        self.graphs: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    def load(self, file: str, number: int, seed: int) -> None:
        """The file as a new module, for one check."""
        torch.manual_seed(seed)
        self.objects.clear()
        self.graphs.clear()
        self.path = self.code / file
        name = f"student_{self.path.stem}_{number}"
        spec = importlib.util.spec_from_file_location(name, self.path)
        self.module = importlib.util.module_from_spec(spec)
        sys.modules[name] = self.module  # dataclasses look for their module there
        spec.loader.exec_module(self.module)

    def call(self, name: str, args: list, kwargs: dict) -> dict:
        """A function of the module: its value, which inputs it has changed, and what can be
        differentiated.
        """
        given = [x for x in leaves((args, kwargs)) if isinstance(x, Tensor)]
        before = [x.detach().clone() for x in given]
        args, kwargs = self.inner(args), self.inner(kwargs)
        value = getattr(self.module, name)(*args, **kwargs)
        told = self.outer(value)
        changed = [
            (i, x.detach())
            for i, (x, y) in enumerate(zip(given, before))
            if x.shape != y.shape or not torch.equal(x.detach().nan_to_num(7), y.nan_to_num(7))
        ]
        number, found = len(self.graphs), [x for x in leaves(told) if isinstance(x, Tensor)]
        self.graphs[number] = [x for x in given if x.requires_grad], found
        return {"value": told, "changed": changed, "graph": number}

    def backward(self, graph: int, gradients: list) -> list:
        """The gradients of the inputs of a call for given gradients of its results."""
        inputs, results = self.graphs[graph]
        chosen = [(x, g) for x, g in zip(results, gradients) if x.requires_grad]
        return list(torch.autograd.grad(
            [x for x, _ in chosen], inputs, [g.to(x.dtype) for x, g in chosen],
            allow_unused=True, retain_graph=True))  # fmt: skip

    def model(self, kind: str, options: dict, state: dict, generation: dict) -> wire.Handle:
        model = BUILD[kind](**options)
        model.load_state_dict(state)
        if generation:
            model.generation_config.update(**generation)
        return self.handle(model)

    def guarded(self, model: wire.Handle) -> None:
        """A copy of it fails from now on."""

        def refuse(memo: dict) -> None:
            raise RuntimeError("the policy is copied")

        self.objects[model.number].__deepcopy__ = refuse

    def mode(self, model: wire.Handle, training: bool) -> None:
        self.objects[model.number].train(training)

    def set_weights(self, model: wire.Handle, state: dict) -> None:
        with torch.no_grad():
            for name, p in self.objects[model.number].state_dict().items():
                p.copy_(state[name])

    def output(self, model: wire.Handle, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            found = self.objects[model.number](inputs)
        return getattr(found, "logits", found)

    def enter(self, context: wire.Handle) -> object:
        return self.outer(self.objects[context.number].__enter__())

    def exit(self, context: wire.Handle) -> None:
        self.objects[context.number].__exit__(None, None, None)

    def look(self, model: wire.Handle, other: wire.Handle | None) -> dict:
        """What is to be seen of a model without running it."""
        found = self.objects[model.number]
        parameters = list(found.parameters())
        others = {id(p) for p in self.objects[other.number].parameters()} if other else set()
        config = getattr(found, "config", None)
        return {
            "training": found.training,
            "trains": [p.requires_grad for p in parameters],
            "own": sum(id(p) not in others for p in parameters),
            "attention_dropout": getattr(config, "attention_dropout", None),
        }

    def train(self, flags: list[str], spied: bool) -> dict:
        """A run of main: its metrics, and of an update what it was given."""
        folder = Path("run")
        steps: list = []
        watch = spying(self.module, steps) if spied else contextlib.nullcontext()
        with contextlib.ExitStack() as stack:
            for redirect in (contextlib.redirect_stdout, contextlib.redirect_stderr):
                stack.enter_context(redirect(io.StringIO()))
            stack.enter_context(watch)
            without_picture()
            prompts = ["--prompts", str(self.code / "sums.jsonl")]
            self.module.main([*flags, *prompts, "--output_dir", str(folder)])
        text = (folder / "metrics.jsonl").read_text()
        shutil.rmtree(folder)
        return {"metrics": text, "steps": steps}

    def script(self, file: str, flags: list[str], artefacts: list[str]) -> dict:
        """Run a file as from the command line; what it wrote."""
        self.path = self.code / file
        sys.argv = [str(self.path), *flags]
        code = 0
        try:
            without_picture()
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else int(bool(e.code))
        found = {}
        for name in artefacts:
            path = Path(name)
            if path.is_file() and path.stat().st_size <= ARTEFACT:
                data = bytearray(path.read_bytes())
                found[name] = torch.frombuffer(data, dtype=torch.uint8) if data else None
        return {"code": code, "files": found}

    # --- Objects that stay here ---

    def handle(self, value: object) -> wire.Handle:
        self.objects.append(value)
        return wire.Handle(len(self.objects) - 1, type(value).__name__)

    def inner(self, value: object) -> object:
        """Data from the grader, with the objects that it means."""
        if isinstance(value, wire.Handle):
            return self.objects[value.number]
        if isinstance(value, (list, tuple)):
            return type(value)(self.inner(x) for x in value)
        if isinstance(value, dict):
            return {k: self.inner(v) for k, v in value.items()}
        return value

    def outer(self, value: object) -> object:
        """A value as the grader can have it: data, or a handle."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, Tensor):
            return value
        if isinstance(value, numbers.Number) and hasattr(value, "item"):
            return value.item()
        if type(value) in (list, tuple):
            return type(value)(self.outer(x) for x in value)
        if isinstance(value, tuple):
            return tuple(self.outer(x) for x in value)
        if type(value) is dict:
            return {k: self.outer(v) for k, v in value.items()}
        if type(value).__name__ == "Rollout":
            return SimpleNamespace(**{k: self.outer(v) for k, v in vars(value).items()})
        return self.handle(value)


def without_picture() -> None:
    """Runs leave out their picture: nobody looks at it, and it takes seconds."""
    importlib.import_module("plumbing.runs").draw = lambda folders, path: None


def leaves(value: object) -> list:
    """The tensors and numbers of nested lists, tuples, dicts and records, in order."""
    if isinstance(value, SimpleNamespace):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [x for item in value for x in leaves(item)]
    return [value]


@contextlib.contextmanager
def spying(module: ModuleType, steps: list):
    """Note for each step of the optimiser the calls of grpo_loss since the last one, and the norm
    of the gradient.
    """
    calls, loss, step = [], module.grpo_loss, torch.optim.AdamW.step

    def spy_loss(logprobs, old_logprobs, advantages, mask, **options):
        rows, tokens = options.get("num_rows"), options.get("num_tokens")
        counted = int(mask.sum())
        given = [rows or len(mask), counted if tokens is None else int(tokens)]
        # What tells a row from the others.
        rows_given = (old_logprobs.detach() * mask).sum(1).tolist()
        calls.append([advantages.tolist(), counted, given, rows_given])
        return loss(logprobs, old_logprobs, advantages, mask, **options)

    def spy_step(self, *args, **kwargs):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.nn.utils.get_total_norm([g for g in grads if g is not None])
        steps.append([float(norm), calls.copy()])
        calls.clear()
        return step(self, *args, **kwargs)

    module.grpo_loss, torch.optim.AdamW.step = spy_loss, spy_step
    try:
        yield
    finally:
        module.grpo_loss, torch.optim.AdamW.step = loss, step


# --- The pipe ---

# Events of sys.audit that no answer needs; what libraries do of themselves isn't told.
HARD = ("socket.", "subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.system", "os.kill",
        "ctypes.", "urllib.", "ftplib.", "pty.", "sys.settrace", "sys.setprofile", "gc.",
        "sys._getframe", "sys._current_frames", "pickle.find_class", "os.listdir", "os.remove",
        "shutil.", "os.chmod", "os.symlink", "os.link")  # fmt: skip

FROM_LIBRARIES = ("subprocess.", "socket.", "urllib.", "os.fork", "os.exec")
GIVEN = re.compile(r"/plumbing/(?!reward_models)|/tasks\.py$|/tools/")  # what nobody hands in


def noting(code: Path, note: Callable[[str], None]) -> Callable:
    """A hook for sys.addaudithook that tells what the submission's own lines set off."""
    inside, told, busy = str(code), set(), []

    def hook(event: str, args: tuple) -> None:
        is_open = event == "open" and args and isinstance(args[0], str)
        if busy or len(told) >= NOTES or not (is_open or event.startswith(HARD)):
            return
        busy.append(event)  # to ask for a frame is an event as well
        try:
            caller = sys._getframe(1)
            while caller and event.startswith(FROM_LIBRARIES) and not here(caller):
                caller = caller.f_back
            if caller and here(caller) and not GIVEN.search(caller.f_code.co_filename):
                what = f"{event} {args[0]}" if args and isinstance(args[0], str) else event
                if what not in told:
                    told.add(what)
                    note(what[:200])
        finally:
            busy.pop()

    def here(frame: FrameType) -> bool:
        return frame.f_code.co_filename.startswith((inside, "<string>"))

    return hook


def serve(data: int, code: str) -> None:
    """Answer the grader's requests until there are no more."""
    torch.set_num_threads(1)
    pipe = socket.socket(fileno=data)
    file = pipe.makefile("rwb")
    sys.path.append(code)
    harness = Harness(Path(code))

    def note(text: str) -> None:
        wire.send(file, {"note": text})

    sys.addaudithook(noting(harness.code, note))
    while True:
        try:
            operation, arguments = wire.receive(file)
        except EOFError:
            return
        try:
            answer = {"ok": getattr(harness, operation)(*arguments)}
            message = answer
        except BaseException as e:
            message = {"fault": fault_of(e, harness.path), "refused": isinstance(e, ValueError)}
        try:
            wire.send(file, message)
        except (TypeError, ValueError) as e:
            wire.send(file, {"fault": f"it returned what can't be told: {e}", "refused": False})


def fault_of(error: BaseException, path: Path | None) -> str:
    """What went wrong, in one line, with the submission's line where there is one."""
    trace = traceback.extract_tb(error.__traceback__)
    is_hole = isinstance(error, NotImplementedError) and trace
    if is_hole and (trace[-1].line or "").startswith("raise NotImpl"):
        return f"not written yet: NotImplementedError {error}".strip()
    own = [f for f in trace if f.filename == str(path)]
    beside = [f for f in trace if path and f.filename.startswith(str(path.parent))]
    where = f" in {(own or beside)[-1].line!r}" if own or beside else ""
    text = (str(error).strip().split("\n") or [""])[0]
    return f"{type(error).__name__}: {text}{where}"
