"""How plain data crosses the pipe to a submission: JSON and the bytes of tensors, nothing else.

No object is made from what comes back but numbers, texts, lists, dicts, tensors and the two
classes below: nothing of it is run.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from types import SimpleNamespace
from typing import BinaryIO

import torch
from torch import Tensor

MOST = 64 * 2**20  # bytes of tensors in one message
MOST_TEXT = 16 * 2**20  # bytes of all else in it
NAMES = """float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool""".split()
DTYPES = {name: getattr(torch, name) for name in NAMES}


class Malformed(Exception):
    """A message that is none."""


@dataclass(frozen=True)
class Handle:
    """An object that stays on the other side: its number there, and the name of its class."""

    number: int
    kind: str


def kind_of(value: object) -> str:
    """The name of the class of a value, also of one that stayed on the other side."""
    return value.kind if isinstance(value, Handle) else type(value).__name__


def pack(value: object, blobs: list[bytes]) -> object:
    """The value as JSON can hold it; the bytes of its tensors are added to `blobs`. Raises
    TypeError.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        found = value.detach().as_subclass(Tensor).cpu().contiguous()
        blobs.append(found.reshape(-1).view(torch.uint8).numpy().tobytes())
        dtype = str(found.dtype).removeprefix("torch.")
        return {"tensor": [dtype, list(found.shape), value.requires_grad]}
    if isinstance(value, torch.Generator):
        return {"generator": pack(value.get_state(), blobs)}
    if isinstance(value, Handle):
        return {"handle": [value.number, value.kind]}
    if isinstance(value, SimpleNamespace):
        return {"record": {str(k): pack(v, blobs) for k, v in vars(value).items()}}
    if isinstance(value, (list, tuple)):
        name = "list" if isinstance(value, list) else "tuple"
        return {name: [pack(item, blobs) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[pack(k, blobs), pack(v, blobs)] for k, v in value.items()]}
    raise TypeError(type(value).__name__)


def unpack(found: object, blob: memoryview) -> object:
    """The value that `pack` was given. Raises Malformed."""
    place = 0

    def read(item: object) -> object:
        nonlocal place
        if not isinstance(item, dict):
            return item
        [(kind, inner)] = item.items()
        if kind == "tensor":
            name, shape, requires_grad = inner
            dtype = torch.uint8 if name == "bool" else DTYPES[name]
            if len(shape) > 32 or not all(type(n) is int and 0 <= n < 2**31 for n in shape):
                raise Malformed("a shape is none")
            size = math.prod(shape) * dtype.itemsize
            if size > len(blob) - place:
                raise Malformed("a tensor is longer than the message")
            data = bytearray(blob[place : place + size])
            place += size
            tensor = torch.frombuffer(data, dtype=dtype) if size else torch.empty(0, dtype=dtype)
            tensor = (tensor.reshape(shape) != 0) if name == "bool" else tensor.reshape(shape)
            is_leaf = bool(requires_grad) and tensor.is_floating_point()
            return tensor.requires_grad_() if is_leaf else tensor
        if kind == "generator":
            generator = torch.Generator()
            generator.set_state(read(inner))
            return generator
        if kind == "handle":
            return Handle(int(inner[0]), str(inner[1])[:100])
        if kind == "record":
            return SimpleNamespace(**{str(k): read(v) for k, v in inner.items()})
        if kind == "dict":
            return {read(k): read(v) for k, v in inner}
        if kind in ("list", "tuple"):
            return {"list": list, "tuple": tuple}[kind]([read(x) for x in inner])
        raise Malformed(f"there is no {kind}")

    try:
        return read(found)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, RecursionError) as e:
        raise Malformed(f"{type(e).__name__}: {e}") from None


def send(file: BinaryIO, value: object) -> None:
    """Write one message. Raises TypeError for what is no plain data, ValueError if too long."""
    blobs: list[bytes] = []
    text = json.dumps(pack(value, blobs)).encode()
    size = sum(map(len, blobs))
    if len(text) > MOST_TEXT or size > MOST:
        raise ValueError(f"an answer of {(len(text) + size) / 2**20:.0f} MB is too long")
    file.write(struct.pack("<II", len(text), size) + text)
    for blob in blobs:
        file.write(blob)
    file.flush()


def receive(file: BinaryIO) -> object:
    """Read one message. Raises EOFError, Malformed."""
    text_size, size = struct.unpack("<II", _exactly(file, 8))
    if text_size > MOST_TEXT or size > MOST:
        raise Malformed("it is too long")
    text, blob = _exactly(file, text_size), _exactly(file, size)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise Malformed(type(e).__name__) from None
    return unpack(found, memoryview(blob))


def _exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if data is None or len(data) < size:
        raise EOFError
    return data
