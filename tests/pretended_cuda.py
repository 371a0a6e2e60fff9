"""A CUDA device that is pretended: its tensors lie in main memory, all else is as strict.

`with pretended_cuda() as gpu:` makes torch say that there is one GPU. Which tensors are on it is
noted by their memory, so views, gradients and saved tensors are on it as well. It raises

- where an operation mixes tensors of the two devices (but for CPU tensors without dimensions);
- where a generator belongs to the other device;
- where something waits for the device, or copies to it, while a CUDA graph is captured.

A captured graph is the list of its operations: a replay repeats them on the same tensors, so a
tensor that was replaced by another one since is as stale as on a GPU. `gpu.waits` counts what makes
the CPU wait for a real GPU, by name; `gpu.calls` the patched functions of torch.cuda.

What it can't show: order between streams, memory that is used again too early, a graph's inputs
that are freed before its replay, how much memory is taken, the random numbers of a real GPU.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.utils.clip_grad
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
aten = torch.ops.aten
SYNCHRONIZES = "called a synchronizing CUDA operation"  # the words of PyTorch

# Operations whose kernel for CUDA has to know a number that is on the device.
WAITING = {
    aten._local_scalar_dense: "item",
    aten.nonzero: "nonzero",
    aten.masked_select: "masked_select",
    aten.unique_dim: "unique",
    aten._unique2: "unique",
    aten.unique_consecutive: "unique",
    aten.equal: "equal",
    aten.bincount: "bincount",
}
# Operations that may see both devices: a copy from one to the other.
COPYING = (aten.copy_, aten._to_copy)
INDEXING = (aten.index, aten.index_put, aten.index_put_)


def tensors_in(*values: object) -> list[Tensor]:
    """All tensors in tuples, lists and dictionaries."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += tensors_in(*value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
    return found


class Memory:
    """Which tensors are on the device."""

    def __init__(self) -> None:
        # While a weak reference to a storage is held, no other one gets its address.
        self.storages: dict[int, StorageWeakRef] = {}

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.storages

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.storages:
            self.storages[storage._cdata] = StorageWeakRef(storage)
        if len(self.storages) > 20_000:
            alive = {key: ref for key, ref in self.storages.items() if not ref.expired()}
            self.storages = alive if len(alive) < 10_000 else self.storages

    def remove(self, tensor: Tensor) -> None:
        self.storages.pop(tensor.untyped_storage()._cdata, None)


class Device:
    """The state of the pretended GPU."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.waits: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.graph: Graph | None = None  # that is being captured
        self.replays = 0
        self.on_device = False  # within a function that was called with tensors of the device
        self.busy = False  # since it was last waited for, it has got work
        self.side_stream = False  # whether the current stream is another than the default one
        self.sync_debug_mode = 0
        self.disordered = False  # the allocator, after a capture that failed

    def wait(self, name: str) -> None:
        self.allow(f"{name}: not permitted")
        if self.sync_debug_mode and name != "synchronize":  # which it doesn't see
            if self.sync_debug_mode == 2:
                raise RuntimeError(f"{name}: {SYNCHRONIZES}")
            warnings.warn(f"{name}: {SYNCHRONIZES}", stacklevel=2)
        self.waits[name] += 1
        self.busy = False

    def allow(self, what: str) -> None:
        """Nothing that waits or copies from the host, while a graph is captured."""
        if self.graph is not None:
            self.graph.failed = True
            raise RuntimeError(f"{what} while a CUDA graph is captured")

    def call(self, name: str, result: Any = None) -> Callable[..., Any]:
        def function(*args: object, **kwargs: object) -> Any:
            self.calls[name] += 1
            return result

        return function

    def synchronize(self, *args: object) -> None:
        self.wait("synchronize")

    def empty_cache(self) -> None:
        self.calls["empty_cache"] += 1
        if self.disordered:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        if self.busy:  # cudaFree waits
            self.wait("empty_cache")

    def set_sync_debug_mode(self, mode: int | str) -> None:
        self.sync_debug_mode = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)

    @contextlib.contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        before, self.side_stream = self.side_stream, True
        try:
            yield
        finally:
            self.side_stream = before


class Graph:
    """torch.cuda.CUDAGraph: what was done while it was captured, and the tensors it was done to."""

    def __init__(self, gpu: Device) -> None:
        self.gpu, self.steps, self.failed = gpu, [], False
        self.inside: set[int] = set()  # storages that were made while capturing
        self.before: list[tuple[Tensor, Tensor]] = []  # and what others held before

    def record(self, function: Any, args: tuple, kwargs: dict) -> Any:
        written = [
            value
            for argument, value in zip(function._schema.arguments, args)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for tensor in tensors_in(written):
            if tensor.untyped_storage()._cdata not in self.inside:
                self.before.append((tensor, tensor.clone()))
        result = function(*args, **kwargs)
        known = {x.untyped_storage()._cdata for x in tensors_in(args, kwargs)}
        fresh = [x.untyped_storage()._cdata not in known for x in tensors_in(result)]
        self.inside |= {
            x.untyped_storage()._cdata for x, new in zip(tensors_in(result), fresh) if new
        }
        if written or any(fresh):
            self.steps.append((function, args, kwargs, result, fresh))
        return result

    def capture_begin(self, pool: object = None) -> None:
        if not self.gpu.side_stream:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        self.gpu.graph = self

    def capture_end(self) -> None:
        self.gpu.graph = None
        with _disable_current_modes(), torch.no_grad():
            self.end()
        if self.failed:
            self.gpu.disordered = True
            raise RuntimeError("operation failed due to a previous error during capture")

    def end(self) -> None:
        """Capturing runs nothing: what was there is as it was, what is new holds nothing yet."""
        for tensor, value in reversed(self.before):
            tensor.copy_(value)
        for *_, result, fresh in self.steps:
            for tensor, new in zip(tensors_in(result), fresh):
                if new and tensor.is_floating_point():
                    tensor.fill_(torch.nan)
        self.before = []

    def replay(self) -> None:
        self.gpu.replays += 1
        with _disable_current_modes(), torch.no_grad():
            for function, args, kwargs, result, fresh in self.steps:
                again = function(*args, **kwargs)
                for old, now, new in zip(tensors_in(result), tensors_in(again), fresh):
                    if new:
                        old.copy_(now)


class Operations(TorchDispatchMode):
    """Every operation, those of the backward pass as well."""

    def __init__(self, gpu: Device) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(
        self, function: Any, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        gpu, kwargs = self.gpu, kwargs or {}
        holds = gpu.memory.holds
        given = tensors_in(args, kwargs)
        there = [holds(x) for x in given]
        packet = function.overloadpacket
        if any(there):
            # A number, a CPU tensor without dimensions, is welcome in elementwise operations alone.
            numbers = torch.Tag.pointwise in function.tags or packet in (*INDEXING, aten.fill_)
            here = [x for x, on in zip(given, there) if not on and (x.dim() > 0 or not numbers)]
            if here and packet not in COPYING:
                raise RuntimeError(f"{function}: a tensor {tuple(here[0].shape)} is on the CPU")
            if here:
                gpu.allow(f"{function}: a copy")
            if packet in WAITING:
                gpu.wait(WAITING[packet])
            if packet is aten.copy_ and not there[0]:
                gpu.wait("copy to the CPU")
            elif packet is aten.copy_ and here and not (args[2:] or [False])[0]:
                gpu.wait("copy to the device")
            if packet in INDEXING and any(x.dtype == torch.bool for x in tensors_in(args[1])):
                gpu.wait("mask as index")
            if packet is aten.repeat_interleave and kwargs.get("output_size") is None:
                gpu.wait("repeat_interleave")
        if gpu.graph is not None:
            result = gpu.graph.record(function, args, kwargs)
        else:
            result = function(*args, **kwargs)
        known = {x.untyped_storage()._cdata for x in given}
        on_device = any(there) or (not given and gpu.on_device)
        gpu.busy |= on_device and packet not in WAITING
        for x in tensors_in(result):
            if x.untyped_storage()._cdata not in known:
                gpu.memory.add(x) if on_device else gpu.memory.remove(x)
        return result


def wants(device: object) -> torch.device | None:
    return None if device is None else torch.device(device)


class Functions(TorchFunctionMode):
    """What is called from Python: the device that it asks for, and where tensors say they are."""

    def __init__(self, gpu: Device) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(
        self, function: Any, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        gpu, kwargs = self.gpu, dict(kwargs or {})
        memory = gpu.memory
        if function.__name__ == "__get__":  # shape, dtype, grad ...
            if function == Tensor.device.__get__ and memory.holds(args[0]):
                return CUDA
            if function in (Tensor.is_cuda.__get__, Tensor.is_cpu.__get__):
                return memory.holds(args[0]) == (function == Tensor.is_cuda.__get__)
            return function(*args)
        if function is Tensor.get_device:
            return 0 if memory.holds(args[0]) else -1
        if function in (Tensor.to, Tensor.cpu, Tensor.cuda):
            return self.moved(function, *args, **kwargs)
        if function is Tensor.pin_memory:
            return args[0]
        if function is Tensor.tolist and memory.holds(args[0]):
            gpu.wait("tolist")
        if function is Tensor.numpy and memory.holds(args[0]):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        device = wants(kwargs.get("device"))
        given = tensors_in(args, kwargs)
        on_device = any(map(memory.holds, given)) if device is None else device.type == "cuda"
        generator = kwargs.get("generator")
        if generator is not None and (generator.device.type == "cuda") != on_device:
            raise RuntimeError(f"{function.__name__}: a generator for {generator.device}")
        if device is not None and device.type == "cuda":
            kwargs["device"] = CPU
        outer, gpu.on_device = gpu.on_device, on_device
        try:
            result = function(*args, **kwargs)
        finally:
            gpu.on_device = outer
        copied = function in (torch.tensor, torch.as_tensor, torch.asarray) and on_device
        if copied and result.numel() > 0 and not given:
            gpu.wait(f"torch.{function.__name__}")
        if device is not None:
            for x in tensors_in(result):
                memory.add(x) if on_device else memory.remove(x)
        return result

    def moved(self, function: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        gpu = self.gpu
        was, blocking = gpu.memory.holds(tensor), True
        if function is not Tensor.to:
            device, dtype, copy = CPU if function is Tensor.cpu else CUDA, None, False
        elif isinstance(args[0] if args else kwargs.get("other"), Tensor):
            other = args[0] if args else kwargs["other"]
            device, dtype, copy = other.device, other.dtype, False
        else:
            copy = kwargs.pop("copy", False)
            device, dtype, blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
            blocking = not blocking
        on_device = was if device is None else device.type == "cuda"
        outer, gpu.on_device = gpu.on_device, on_device
        result = Tensor.to(tensor, dtype=dtype or tensor.dtype, copy=copy or on_device != was)
        gpu.on_device = outer
        if on_device != was:
            gpu.allow("a copy between devices")
            if was or blocking:
                gpu.wait("to the CPU" if was else "to the device")
            gpu.memory.add(result) if on_device else gpu.memory.remove(result)
        return result


class Generator(torch.Generator):
    """A generator says on which device it is; its numbers are those of the CPU."""

    def __new__(cls, device: object = "cpu") -> Generator:
        made = super().__new__(cls, CPU)
        made.where = CUDA if torch.device(device).type == "cuda" else CPU
        return made

    def __init__(self, device: object = "cpu") -> None:
        super().__init__()

    @property
    def device(self) -> torch.device:
        return self.where


class Stream:
    """One of the device's queues of work: here there is no other."""

    def __init__(self, *args: object) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        pass


@contextlib.contextmanager
def pretended_cuda() -> Iterator[Device]:
    """torch with one GPU."""
    gpu = Device()
    autocast = torch.autocast

    class CUDAGraph(Graph):
        def __init__(self) -> None:
            super().__init__(gpu)

    class CurrentStream(Stream):
        def is_capturing(self) -> bool:
            return gpu.graph is not None

    def autocast_on_cpu(device_type: str, *args: Any, **kwargs: Any) -> Any:
        if device_type == "cpu":  # which a GPU takes no notice of
            kwargs["enabled"] = False
        return autocast("cpu", *args, **kwargs)

    groups = torch.utils._foreach_utils._group_tensors_by_device_and_dtype

    def groups_on_device(lists: list, *args: Any) -> dict:
        found = groups(lists, *args)
        return {
            (CUDA if gpu.memory.holds(tensors[0][0]) else device, dtype): (tensors, indices)
            for (device, dtype), (tensors, indices) in found.items()
        }

    properties = SimpleNamespace(name="pretended", total_memory=2**34, major=9, minor=0)
    functions = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "is_bf16_supported": lambda *args, **kwargs: False,
        "set_device": gpu.call("set_device"),
        "synchronize": gpu.synchronize,
        "empty_cache": gpu.empty_cache,
        "get_sync_debug_mode": lambda: gpu.sync_debug_mode,
        "set_sync_debug_mode": gpu.set_sync_debug_mode,
        "max_memory_allocated": gpu.call("max_memory_allocated", 0),
        "max_memory_reserved": gpu.call("max_memory_reserved", 0),
        "memory_allocated": gpu.call("memory_allocated", 0),
        "memory_reserved": gpu.call("memory_reserved", 0),
        "reset_peak_memory_stats": gpu.call("reset_peak_memory_stats"),
        "mem_get_info": gpu.call("mem_get_info", (2**34, 2**34)),
        "get_device_capability": lambda *args: (9, 0),
        "get_device_name": lambda *args: "pretended",
        "get_device_properties": lambda *args: properties,
        "get_rng_state_all": lambda: [],
        "set_rng_state_all": gpu.call("set_rng_state_all"),
        "manual_seed_all": gpu.call("manual_seed_all"),
        "current_stream": CurrentStream,
        "Stream": Stream,
        "stream": gpu.stream,
        "graph_pool_handle": lambda: None,
        "CUDAGraph": CUDAGraph,
        "is_current_stream_capturing": lambda: gpu.graph is not None,
    }
    with contextlib.ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        # From 2.15 on the optimisers ask it whether a graph is captured.
        stack.enter_context(mock.patch.object(torch.accelerator, "current_stream", CurrentStream))
        stack.enter_context(mock.patch.object(torch, "Generator", Generator))
        stack.enter_context(mock.patch.object(torch, "autocast", autocast_on_cpu))
        for module in (torch.utils._foreach_utils, torch.nn.utils.clip_grad):
            name = "_group_tensors_by_device_and_dtype"
            stack.enter_context(mock.patch.object(module, name, groups_on_device))
        stack.enter_context(Functions(gpu))
        stack.enter_context(Operations(gpu))
        yield gpu
