"""A CUDA device that is pretended: its tensors lie in main memory, all else is as strict.

`with pretended_cuda() as gpu:` makes torch say that there is one GPU. It raises where an operation
mixes tensors of the two devices, where a generator belongs to the other device, and where something
waits for the device, or copies to it, while a CUDA graph is captured. A replay of a graph repeats
its operations on the same tensors: one that was replaced since is as stale as on a GPU. Streams,
and memory that is used again too early, aren't shown. `gpu.waits` counts what waits for the device.
"""

import contextlib
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
aten = torch.ops.aten
# Operations whose kernel for CUDA has to know a number that is on the device.
WAITING = [aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten._unique2]
INDEXING = [aten.index, aten.index_put, aten.index_put_]


def tensors_in(*values):
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += tensors_in(*value)
    return found


def is_there(tensor):
    """Noted at the memory, so views, gradients and saved tensors are on the device as well."""
    return getattr(tensor.untyped_storage(), "on_device", False)


def fresh(result, given):
    """The tensors of a result that have memory of their own."""
    known = {x.untyped_storage()._cdata for x in given}
    return [x for x in tensors_in(result) if x.untyped_storage()._cdata not in known]


class Graph:
    """torch.cuda.CUDAGraph: what was done while it was captured, and the tensors it was done to."""

    def __init__(self, gpu):
        self.gpu, self.steps, self.is_invalid = gpu, [], False
        self.before = {}  # the memory that was given to an operation, and a copy of it

    @contextlib.contextmanager
    def capture(self):
        self.gpu.graph = self
        try:
            yield
        finally:
            self.gpu.graph = None
            # On a GPU capturing runs nothing: what was there is as it was, the rest holds nothing.
            with _disable_current_modes(), torch.no_grad():
                for memory, before in self.before.values():
                    memory.copy_(before)
                for x in tensors_in([made for *_, made in self.steps]):
                    x.fill_(torch.nan if x.is_floating_point() else 0)
            if self.is_invalid:
                raise RuntimeError("operation failed due to a previous error while captured")

    def replay(self):
        self.gpu.replays += 1
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            for function, args, kwargs, given, made in self.steps:
                again = fresh(function(*args, **kwargs), given)
                for old, now in zip(made, again, strict=True):
                    old.copy_(now)


class Device(TorchFunctionMode):
    """The pretended GPU. As a mode: what is called from Python, the device that it asks for, and
    where tensors say they are.
    """

    def __init__(self):
        super().__init__()
        self.waits, self.replays = Counter(), 0
        self.operations = Counter()  # on the device, without replays
        self.graph = None  # that is being captured
        self.asked_for = False  # by the function of torch that is running

    def wait(self, name):
        if self.graph is not None:
            self.graph.is_invalid = True
            raise RuntimeError(f"{name}: not permitted while a CUDA graph is captured")
        self.waits[name] += 1

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function.__name__ == "__get__":  # shape, dtype, grad ...
            if function == Tensor.device.__get__ and is_there(args[0]):
                return CUDA
            return is_there(args[0]) if function == Tensor.is_cuda.__get__ else function(*args)
        if function in (Tensor.to, Tensor.cpu):
            return self.moved(*args, *([CPU] if function is Tensor.cpu else []), **kwargs)
        if function is Tensor.__deepcopy__ and is_there(args[0]):  # of a buffer
            return args[1].setdefault(id(args[0]), args[0].clone())
        if function is Tensor.tolist and is_there(args[0]):
            self.wait("tolist")
        device, generator = kwargs.get("device"), kwargs.get("generator")
        if device is None:
            on_device = any(map(is_there, tensors_in(*args, *kwargs.values())))
        else:
            on_device = torch.device(device).type == "cuda"
            kwargs["device"] = CPU if on_device else device
        if generator is not None and (generator.device.type == "cuda") != on_device:
            raise RuntimeError(f"{function.__name__}: a generator for {generator.device}")
        if function is torch.histc and on_device:  # a CPU counts floats alone
            args = args[0].float(), *args[1:]
        outer, self.asked_for = self.asked_for, on_device
        try:
            result = function(*args, **kwargs)
        finally:
            self.asked_for = outer
        if function is scaled_dot_product_attention and on_device:  # CUDA's kernel has this layout
            result = result.transpose(1, 2).contiguous().transpose(1, 2)
        if function is torch.tensor and on_device and result.numel() > 0:
            self.wait("torch.tensor")
        for x in tensors_in(result) if device is not None else ():
            x.untyped_storage().on_device = on_device
        return result

    def moved(self, tensor, *args, copy=False, **kwargs):
        if args and isinstance(args[0], Tensor):
            args = args[0].device, args[0].dtype
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        was = is_there(tensor)
        on_device = was if device is None else device.type == "cuda"
        if on_device != was:
            self.wait("from the device" if was else "to the device")
        result = Tensor.to(tensor, dtype=dtype or tensor.dtype, copy=copy or on_device != was)
        result.untyped_storage().on_device = on_device
        return result


class Operations(TorchDispatchMode):
    """Every operation, those of the backward pass as well."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():  # or each look at a tensor here would be a call
            return self.done(function, args, kwargs or {})

    def done(self, function, args, kwargs):
        gpu = self.gpu
        given = tensors_in(*args, *kwargs.values())
        on_device = any(map(is_there, given)) or (not given and gpu.asked_for)
        if given and on_device:
            self.check(function, args, given)
        for memory in [x.untyped_storage() for x in given] if gpu.graph is not None else ():
            if memory._cdata not in gpu.graph.before:
                gpu.graph.before[memory._cdata] = memory, memory.clone()
        result = function(*args, **kwargs)
        made = fresh(result, given)
        gpu.operations[function.overloadpacket.__name__] += on_device
        for x in made if on_device else ():
            x.untyped_storage().on_device = True
        if gpu.graph is not None:
            gpu.graph.steps.append((function, args, kwargs, given, made))
        return result

    def check(self, function, args, given):
        """That all is on the device; and whether a real one would be waited for."""
        gpu, packet = self.gpu, function.overloadpacket
        indices = tensors_in(args[1]) if packet in INDEXING else []
        # A number, a CPU tensor without dimensions, is welcome in elementwise operations alone.
        numbers = torch.Tag.pointwise in function.tags or packet in (*INDEXING, aten.fill_)
        here = [x for x in given if not is_there(x) and (x.dim() > 0 or not numbers)]
        for x in here:
            if packet is not aten.copy_ and not any(x is index for index in indices):
                raise RuntimeError(f"{function}: a tensor {tuple(x.shape)} is on the CPU")
        if here:
            gpu.wait("a copy between devices")
        if packet in WAITING:
            gpu.wait(packet.__name__)
        if any(x.dtype == torch.bool for x in indices):
            gpu.wait("mask as index")


class Generator(torch.Generator):
    """It says on which device it is; its numbers are those of the CPU."""

    device = CPU

    def __new__(cls, device="cpu"):
        return super().__new__(cls, CPU)

    def __init__(self, device="cpu"):
        self.device = torch.device(device)


@contextlib.contextmanager
def pretended_cuda():
    """torch with one GPU: gives its Device. As a P100 it has no half precision that is fast."""
    gpu, autocast, is_autocast_enabled = Device(), torch.autocast, torch.is_autocast_enabled
    stream = SimpleNamespace(is_capturing=lambda: gpu.graph is not None)

    class CUDAGraph(Graph):  # a class, for transformers has it in type annotations
        def __init__(self):
            super().__init__(gpu)

    answers = {  # of torch.cuda: what a function gives, or what is done instead
        "is_available": True, "device_count": 1, "set_device": None, "empty_cache": None,
        "get_device_capability": (6, 0), "manual_seed_all": None, "reset_peak_memory_stats": None,
        "is_bf16_supported": lambda including_emulation=True: (
            including_emulation or torch.cuda.get_device_capability()[0] >= 8
        ),
        "mem_get_info": (2**34, 2**35), "memory_reserved": 2**20, "memory_allocated": 2**19,
        "max_memory_allocated": 0, "get_rng_state": torch.ones(1), "set_rng_state": None,
        "graph_pool_handle": None, "graph": lambda graph, **_: graph.capture(),
        "is_current_stream_capturing": stream.is_capturing,
        "synchronize": lambda *_: gpu.wait("synchronize"),
    }  # fmt: skip
    stubs = [(torch.cuda, *answer) for answer in answers.items()]
    # AdamW asks for it from torch 2.14 on: a CUDA build without a driver has none.
    stubs += [(torch.accelerator, "current_stream", stream)]
    stubs += [(clip_grad, "_has_foreach_support", False)]
    others = [
        (torch.cuda, "CUDAGraph", CUDAGraph),
        (torch, "Generator", Generator),
        (torch, "autocast", lambda kind, *args, **kwargs: autocast("cpu", *args, **kwargs)),
        (torch, "is_autocast_enabled", lambda kind: is_autocast_enabled("cpu")),
    ]
    with contextlib.ExitStack() as stack:
        for place, name, answer in stubs:  # with its specification it refuses unknown arguments
            kind = "side_effect" if callable(answer) else "return_value"
            stub = mock.create_autospec(getattr(place, name), **{kind: answer})
            stack.enter_context(mock.patch.object(place, name, stub))
        for context in (*(mock.patch.object(*other) for other in others), gpu, Operations(gpu)):
            stack.enter_context(context)
        yield gpu
