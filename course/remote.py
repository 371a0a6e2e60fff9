"""A submission as the checks see it: `student.gae(...)` runs in the sandbox, gradients included."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import wire
from child import leaves
from sandbox import Confined, Ended
from torch import Tensor, nn

SAID = 500  # characters of a fault that are told


class Fault(Exception):
    """What the submission raised, in one line."""


class Refusal(Fault, ValueError):
    """It raised ValueError."""


class Student:
    """The module of a submission: its functions are called by their names. What the grader asks of
    the harness beside that is `student.child.train(...)` and so on, see child.Harness.
    """

    def __init__(self, process: Confined, file: str) -> None:
        self._process, self._file = process, file
        self.child = Child(self)
        self.notes: list[str] = []

    def __getattr__(self, name: str) -> Callable:
        if name.startswith("__"):
            raise AttributeError(name)
        return functools.partial(self._call, name)

    def ask(self, operation: str, *arguments: object) -> object:
        """One request and its answer. Raises Fault, Ended."""
        process = self._process
        try:
            wire.send(process.file, [operation, arguments])
            while True:
                answer = wire.receive(process.file)
                if not isinstance(answer, dict) or not {"ok", "fault", "note"} & answer.keys():
                    raise wire.Malformed("no answer")
                if "note" not in answer:
                    break
                if len(self.notes) < 50:
                    self.notes.append(str(answer["note"])[:200])
        except wire.Malformed as e:
            process.broken = True
            raise Ended(f"the process sent what is no answer ({e})") from None
        except (EOFError, OSError, ValueError):
            raise Ended(process.how_it_ended()) from None
        if "fault" in answer:
            text = str(answer["fault"])
            raise (Refusal if answer.get("refused") is True else Fault)(text)
        return answer["ok"]

    def _call(self, name: str, *args: object, **kwargs: object) -> object:
        given = [x for x in leaves((args, kwargs)) if isinstance(x, Tensor)]
        try:
            answer = self.ask("call", name, list(args), kwargs)
            value, graph = answer["value"], int(answer["graph"])
            with torch.no_grad():
                for i, changed in answer["changed"]:
                    given[i].data = changed.detach()
        except (KeyError, TypeError, IndexError, RuntimeError, AttributeError) as e:
            raise Fault(f"the answer has another form ({type(e).__name__})") from None
        inputs = [x for x in given if x.requires_grad]
        results = [x for x in leaves(value) if isinstance(x, Tensor)]
        if not inputs or not results:
            return value
        return _replaced(value, iter(_Remote.apply(self, graph, results, *inputs)))


class Child:
    """The operations of child.Harness."""

    def __init__(self, student: Student) -> None:
        self._student = student

    def __getattr__(self, name: str) -> Callable:
        return functools.partial(self._student.ask, name)

    def twin(self, kind: str, model: nn.Module, options: dict, **generation: object) -> wire.Handle:
        """The same model on the other side."""
        return self._student.ask("model", kind, options, model.state_dict(), generation)


class _Remote(torch.autograd.Function):
    """Results that came over the pipe, with the gradients that are to be had there."""

    @staticmethod
    def forward(ctx, student, graph, results, *inputs):
        ctx.student, ctx.graph, ctx.inputs = student, graph, inputs
        found = tuple(x.detach() for x in results)
        ctx.mark_non_differentiable(*(f for f, x in zip(found, results) if not x.requires_grad))
        return found

    @staticmethod
    def backward(ctx, *gradients):
        found = ctx.student.ask("backward", ctx.graph, list(gradients))
        return None, None, None, *found


def _replaced(value: object, tensors) -> object:
    """The value with its tensors replaced by others, in order."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(x, tensors) for x in value)
    if isinstance(value, dict):
        return {k: _replaced(x, tensors) for k, x in value.items()}
    if hasattr(value, "__dict__") and not isinstance(value, wire.Handle):
        for k, x in vars(value).items():
            setattr(value, k, _replaced(x, tensors))
    return value
