"""A CUDA device that is pretended: its tensors lie in main memory, all else is as strict.

`with pretended_cuda() as gpu:` makes torch say that there is one GPU. Every call of a function of
torch then goes through `gpu`, a Device. It raises where a call mixes tensors of the two devices,
where a generator belongs to the other device, and where something waits for the device, or copies
to it, while a CUDA graph is captured. A replay of a graph makes its calls again on the same
tensors: one that was replaced since is as stale as on a GPU. Streams, and memory that is used again
too early, aren't shown. `gpu.waits` counts what waits for the device.
"""

import contextlib
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
# They give the CPU a number, or a tensor whose shape is one.
WAITING = "item tolist __bool__ __int__ __float__ __index__ nonzero equal unique".split()
INDEXING = Tensor.__getitem__, Tensor.__setitem__


def tensors_in(value):
    if isinstance(value, Tensor):
        return [value]
    parts = value if isinstance(value, (tuple, list)) else []
    return [tensor for part in parts for tensor in tensors_in(part)]


def is_there(tensor):
    """Noted at the memory, so views and parameters are on the device as well."""
    return getattr(tensor.untyped_storage(), "on_device", False)


class Device(TorchFunctionMode):
    """The pretended GPU: where tensors say they are, and what may be done with them."""

    def __init__(self):
        super().__init__()
        self.waits, self.replays = Counter(), 0
        self.graph = None  # that is being captured

    def __torch_function__(self, function, types, args=(), kwargs=None):
        call = self.call if self.graph is None else self.graph.record
        return call(function, args, kwargs or {})

    def call(self, function, args, kwargs):
        given, generator = tensors_in([*args, *kwargs.values()]), kwargs.get("generator")
        on_device = any(map(is_there, given))
        if function == Tensor.device.__get__ and on_device:
            return CUDA
        if function == Tensor.is_cuda.__get__:
            return on_device
        if function in (Tensor.to, Tensor.cpu):
            return self.move(*args, *([CPU] if function is Tensor.cpu else []), **kwargs)
        if kwargs.get("device") is not None:
            on_device = torch.device(kwargs["device"]).type == "cuda"
            kwargs = kwargs | ({"device": CPU} if on_device else {})
        if generator is not None and (generator.device.type == "cuda") != on_device:
            raise RuntimeError(f"{function.__name__}: a generator for {generator.device}")
        if on_device:
            self.check(function, args, given)
        result = function(*args, **kwargs)
        for tensor in tensors_in(result) if on_device and function is not Tensor.copy_ else ():
            tensor.untyped_storage().on_device = True
        return result

    def check(self, function, args, given):
        """That all is on the device; and whether a real one would be waited for."""
        if function.__name__ in ("__set__", "_has_compatible_shallow_copy_type"):
            return  # a module is moved
        # A number, a CPU tensor without dimensions, is welcome, but not in a list.
        here = [x for x in given if not is_there(x)]
        here = [x for x in here if x.dim() > 0 or not any(x is arg for arg in args)]
        copies = function is Tensor.copy_ or (function in INDEXING and is_there(args[0]))
        if here and not copies:
            shapes = [tuple(x.shape) for x in here]
            raise RuntimeError(f"{function.__name__}: tensors {shapes} are on the CPU")
        if here:
            self.wait("a copy between devices")
        if function in INDEXING and any(x.dtype == torch.bool for x in tensors_in(args[1])):
            self.wait("mask as index")
        if function.__name__ in WAITING or (function is torch.tensor and args[0]):
            self.wait(function.__name__)

    def move(self, tensor, *args, copy=False, **kwargs):
        if args and isinstance(args[0], Tensor):
            args = CUDA if is_there(args[0]) else CPU, args[0].dtype
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        was = is_there(tensor)
        on_device = was if device is None else device.type == "cuda"
        if on_device != was:
            self.wait("from the device" if was else "to the device")
        result = tensor.to(dtype or tensor.dtype, copy=copy or on_device != was)
        result.untyped_storage().on_device = on_device
        return result

    def wait(self, name):
        if self.graph is not None:
            self.graph.is_invalid = True
            raise RuntimeError(f"{name}: not permitted while a CUDA graph is captured")
        self.waits[name] += 1


class Graph:
    """torch.cuda.CUDAGraph: the calls while it was captured, each with its result."""

    def __init__(self):
        self.calls, self.is_invalid = [], False
        self.given, self.made = {}, []  # {address: memory, what it held}; tensors

    @contextlib.contextmanager
    def capture(self, gpu):
        self.gpu, gpu.graph = gpu, self
        try:
            yield
        finally:
            gpu.graph = None
            # On a GPU capturing runs nothing: what was given is as it was, the rest holds nothing.
            for memory, before in self.given.values():
                memory.copy_(before)
            for tensor in self.made:
                tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
            if self.is_invalid:
                raise RuntimeError("operation failed due to a previous error while captured")

    def record(self, function, args, kwargs):
        for memory in [x.untyped_storage() for x in tensors_in([*args, *kwargs.values()])]:
            if memory.data_ptr() not in self.given:
                self.given[memory.data_ptr()] = memory, memory.clone()
        result = self.gpu.call(function, args, kwargs)
        for tensor in tensors_in(result):
            if tensor.untyped_storage().data_ptr() not in self.given:
                self.made.append(tensor)
        self.calls.append((function, args, kwargs, result))
        return result

    def replay(self):
        self.gpu.replays += 1
        for function, args, kwargs, result in self.calls:
            again = function(*args, **kwargs)
            for old, new in zip(tensors_in(result), tensors_in(again), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Generator(torch.Generator):
    """It says on which device it is; its numbers are those of the CPU."""

    device = CPU

    def __new__(cls, device="cpu"):
        found = super().__new__(cls, CPU)
        found.device = torch.device(device)
        return found


@contextlib.contextmanager
def pretended_cuda():
    """torch with one GPU: gives its Device. As a P100 it has no half precision that is fast."""
    gpu, autocast = Device(), torch.autocast
    stream = SimpleNamespace(is_capturing=lambda: gpu.graph is not None)
    of_cuda = {
        "is_available": lambda: True, "set_device": mock.Mock(), "empty_cache": lambda: None,
        "get_device_capability": lambda device=None: (6, 0),
        "is_bf16_supported": lambda including_emulation=True: including_emulation,
        "mem_get_info": lambda: (2**34, 2**35), "memory_reserved": lambda: 2**20,
        "memory_allocated": lambda: 2**19, "reset_peak_memory_stats": mock.Mock(),
        "get_rng_state": lambda: torch.ones(1), "set_rng_state": lambda state: None,
        "synchronize": lambda: gpu.wait("synchronize"), "CUDAGraph": Graph,
        "graph": lambda graph, pool: graph.capture(gpu), "graph_pool_handle": lambda: None,
        "is_current_stream_capturing": stream.is_capturing,
    }  # fmt: skip
    with (
        mock.patch.multiple(torch.cuda, **of_cuda),
        mock.patch("torch.Generator", Generator),
        mock.patch("torch.autocast", lambda _, *args, **options: autocast("cpu", *args, **options)),
        # AdamW asks for it from torch 2.14 on: a CUDA build without a driver has none.
        mock.patch("torch.accelerator.current_stream", lambda device=None: stream),
        gpu,
    ):
        yield gpu
