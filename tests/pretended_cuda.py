"""A CUDA device that is pretended: its tensors lie in main memory, all else is as strict.

`with pretended_cuda() as gpu:` makes torch say that there is one GPU. It raises where an operation
mixes tensors of the two devices, where a generator belongs to the other device, and where something
waits for the device, or copies to it, while a CUDA graph is captured. A captured graph is the list
of its operations: a replay repeats them on the same tensors, so a tensor that was replaced since is
as stale as on a GPU. `gpu.waits` counts what makes the CPU wait for a real GPU, by name.

What it can't show: order between streams, memory that is used again too early, how much memory is
taken, the random numbers of a real GPU.
"""

import contextlib
import functools
import warnings
from collections import Counter
from unittest import mock

import torch
import torch.nn.utils.clip_grad
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
SYNCHRONIZES = "called a synchronizing CUDA operation"  # the words of PyTorch
FAKE_DEVICE = FakeTensor.device  # to PyTorch they lie on the CPU
aten = torch.ops.aten
# Operations whose kernel for CUDA has to know a number that is on the device.
WAITING = [aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.bincount]
WAITING += [aten.unique_dim, aten._unique2, aten.unique_consecutive]
INDEXING = (aten.index, aten.index_put, aten.index_put_)


def tensors_in(*values):
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(*value)


def is_there(tensor):
    """Noted at the memory, so views, gradients and saved tensors are on the device as well."""
    return getattr(tensor.untyped_storage(), "on_device", False)


def fresh(result, args, kwargs):
    """The tensors of a result that have memory of their own."""
    known = {x.untyped_storage()._cdata for x in tensors_in(args, *kwargs.values())}
    return [x for x in tensors_in(result) if x.untyped_storage()._cdata not in known]


def written(function, args, kwargs):
    """The tensors that an operation writes into."""
    named = zip(function._schema.arguments, args)
    named = [*named, *((a, kwargs[a.name]) for a in function._schema.arguments if a.name in kwargs)]
    return tensors_in([x for a, x in named if a.alias_info is not None and a.alias_info.is_write])


class Device:
    """The state of the pretended GPU."""

    def __init__(self, fakes=None):
        self.waits, self.replays = Counter(), 0
        self.fakes = fakes  # a FakeTensorMode, where the memory holds nothing
        self.graph = None  # that is being captured
        self.in_disorder = False  # a capture has failed, and the cache can't be emptied any more
        self.asked_for = False  # by the function of torch that is running
        self.busy = False  # since it was last waited for, it has got work
        self.sync_debug_mode = "default"

    def wait(self, name, not_now=False):
        """What waits for the device: unless it is but queued, as a copy to it may be."""
        if self.graph is not None:
            self.in_disorder = self.graph.is_invalid = True
            raise RuntimeError(f"{name}: not permitted while a CUDA graph is captured")
        if not_now:
            return
        if name != "synchronize":  # which the debug mode doesn't see
            if self.sync_debug_mode in (2, "error"):
                raise RuntimeError(f"{name}: {SYNCHRONIZES}")
            if self.sync_debug_mode in (1, "warn"):
                warnings.warn(f"{name}: {SYNCHRONIZES}", stacklevel=2)
        self.waits[name] += 1
        self.busy = False

    def fake(self, function, args, kwargs):
        """The result of an operation on fake tensors; a question to the device is answered yes."""
        if function.overloadpacket is aten._local_scalar_dense and args[0].dtype == torch.bool:
            return True

        def faked(x):
            is_real = isinstance(x, Tensor) and not isinstance(x, FakeTensor)
            return self.fakes.from_tensor(x) if is_real else x

        args, kwargs = tree_map(faked, (args, kwargs))
        with self.fakes, mock.patch.object(FakeTensor, "device", FAKE_DEVICE):
            return function(*args, **kwargs)


class Graph:
    """torch.cuda.CUDAGraph: what was done while it was captured, and the tensors it was done to."""

    def __init__(self, gpu):
        self.gpu, self.steps, self.is_invalid = gpu, [], False
        self.before = []  # tensors that were written into, each with its values before

    def capture_begin(self, pool=None):
        self.gpu.graph = self

    def capture_end(self):
        self.gpu.graph = None
        with _disable_current_modes(), torch.no_grad():
            # On a GPU capturing runs nothing: what was there is as it was, what is new holds
            # nothing yet.
            for tensor, values in reversed(self.before):
                tensor.copy_(values)
            if self.is_invalid:
                raise RuntimeError("operation failed due to a previous error while captured")
            for tensor in (x for *_, made in self.steps for x in made if x.is_floating_point()):
                tensor.fill_(torch.nan)

    def replay(self):
        self.gpu.replays += 1
        with _disable_current_modes(), torch.no_grad():
            for function, args, kwargs, made in self.steps:
                again = fresh(function(*args, **kwargs), args, kwargs)
                for old, now in zip(made, again, strict=True):
                    old.copy_(now)


class Operations(TorchDispatchMode):
    """Every operation, those of the backward pass as well."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        gpu, kwargs = self.gpu, kwargs or {}
        given = list(tensors_in(args, *kwargs.values()))
        there = [is_there(x) for x in given]
        if any(there):
            self.check(function, args, kwargs, given, there)
        if gpu.graph is not None and gpu.fakes is None:
            gpu.graph.before += [(x, x.clone()) for x in written(function, args, kwargs)]
        on_device = any(there) or (not given and gpu.asked_for)
        if on_device and gpu.fakes is not None:
            result = gpu.fake(function, args, kwargs)
        else:
            result = function(*args, **kwargs)
        made = fresh(result, args, kwargs)
        if gpu.graph is not None:
            gpu.graph.steps.append((function, args, kwargs, made))
        if on_device:
            gpu.busy |= function.overloadpacket not in WAITING
            for x in made:
                x.untyped_storage().on_device = True
        return result

    def check(self, function, args, kwargs, given, there):
        """That all is on the device; and whether a real one would be waited for."""
        gpu, packet = self.gpu, function.overloadpacket
        # A number, a CPU tensor without dimensions, is welcome in elementwise operations alone.
        numbers = torch.Tag.pointwise in function.tags or packet in (*INDEXING, aten.fill_)
        here = [x for x, on in zip(given, there) if not on and (x.dim() > 0 or not numbers)]
        if here and packet is not aten.copy_:
            raise RuntimeError(f"{function}: a tensor {tuple(here[0].shape)} is on the CPU")
        if here:
            gpu.wait("a copy between devices", not_now=there[0] and args[2:] == (True,))
        if packet in WAITING:
            gpu.wait(packet.__name__)
        if packet in INDEXING and any(x.dtype == torch.bool for x in tensors_in(args[1])):
            gpu.wait("mask as index")
        if packet is aten.repeat_interleave and kwargs.get("output_size") is None:
            gpu.wait("repeat_interleave")


class Functions(TorchFunctionMode):
    """What is called from Python: the device that it asks for, and where tensors say they are."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        gpu, kwargs = self.gpu, dict(kwargs or {})
        if function.__name__ == "__get__":  # shape, dtype, grad ...
            if function == Tensor.device.__get__ and is_there(args[0]):
                return CUDA
            if function == Tensor.is_cuda.__get__:
                return is_there(args[0])
            return function(*args)
        if function in (Tensor.to, Tensor.cpu):
            return self.moved(*args, *([CPU] if function is Tensor.cpu else []), **kwargs)
        if function is torch.mm and kwargs.pop("out_dtype", None):  # there is none on a CPU
            args = [x.float() for x in args]
        if function is Tensor.pin_memory:
            return args[0]
        if function is Tensor.__deepcopy__ and gpu.fakes is not None and is_there(args[0]):
            return args[0].clone()
        if function is Tensor.tolist and is_there(args[0]):
            gpu.wait("tolist")
        if function is Tensor.numpy and is_there(args[0]):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        device, generator = kwargs.get("device"), kwargs.get("generator")
        if device is None:
            on_device = any(map(is_there, tensors_in(args, *kwargs.values())))
        else:
            on_device = torch.device(device).type == "cuda"
            kwargs["device"] = CPU if on_device else device
        if generator is not None and (generator.device.type == "cuda") != on_device:
            raise RuntimeError(f"{function.__name__}: a generator for {generator.device}")
        outer, gpu.asked_for = gpu.asked_for, on_device
        try:
            result = function(*args, **kwargs)
        finally:
            gpu.asked_for = outer
        if function is torch.tensor and on_device and result.numel() > 0:
            gpu.wait("torch.tensor")
        for x in tensors_in(result) if device is not None else ():
            x.untyped_storage().on_device = on_device
        return result

    def moved(self, tensor, *args, copy=False, **kwargs):
        if args and isinstance(args[0], Tensor):
            args = args[0].device, args[0].dtype
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        was = is_there(tensor)
        on_device = was if device is None else device.type == "cuda"
        if on_device != was:
            self.gpu.wait(f"{'from' if was else 'to'} the device", not was and non_blocking)
        if self.gpu.fakes is not None and on_device != was:
            assert on_device, "fake tensors hold nothing that could be read"
            tensor = self.gpu.fakes.from_tensor(tensor)
        result = Tensor.to(tensor, dtype=dtype or tensor.dtype, copy=copy or on_device != was)
        result.untyped_storage().on_device = on_device
        self.gpu.busy &= on_device or not was  # what came from the device was waited for
        return result


class Generator(torch.Generator):
    """It says on which device it is; its numbers are those of the CPU."""

    device = CPU

    def __new__(cls, device="cpu"):
        return super().__new__(cls, CPU)

    def __init__(self, device="cpu"):
        self.device = torch.device(device)


ANSWERS = {"is_available": True, "device_count": 1, "is_bf16_supported": False}
ANSWERS |= {"get_device_capability": (9, 0), "get_device_name": "pretended", "set_device": None}
ANSWERS |= {"max_memory_allocated": 0, "max_memory_reserved": 0, "mem_get_info": (2**34, 2**34)}
ANSWERS |= {"memory_allocated": 0}
ANSWERS |= {"reset_peak_memory_stats": None, "graph_pool_handle": None, "manual_seed_all": None}
ANSWERS |= {"get_rng_state_all": [], "set_rng_state_all": None, "current_device": 0}


@contextlib.contextmanager
def pretended_cuda(fake=False):
    """torch with one GPU: gives its Device. With `fake`, its tensors hold nothing."""
    gpu, autocast = Device(FakeTensorMode() if fake else None), torch.autocast
    groups = torch.utils._foreach_utils._group_tensors_by_device_and_dtype

    def autocast_on_cpu(kind, *args, enabled=True, **kwargs):
        """A GPU takes no notice of an autocast for the CPU."""
        return autocast("cpu", *args, enabled=enabled and kind != "cpu", **kwargs)

    def groups_on_device(lists, *args):
        return {
            (CUDA if is_there(tensors[0][0]) else device, dtype): (tensors, indices)
            for (device, dtype), (tensors, indices) in groups(lists, *args).items()
        }

    # Classes, for transformers has them in type annotations.
    class CUDAGraph(Graph):
        def __init__(self):
            super().__init__(gpu)

    class Stream:
        def __init__(self, *args, **kwargs):
            pass

        def wait_stream(self, other):
            pass

        def is_capturing(self):
            return gpu.graph is not None

    stream = Stream()

    def empty_cache():  # cudaFree waits
        assert not gpu.in_disorder, "pytorch/pytorch#180395"
        return gpu.busy and gpu.wait("empty_cache")

    functions = {name: lambda *args, x=x, **kwargs: x for name, x in ANSWERS.items()}
    functions |= {
        "current_stream": lambda *args: stream,
        "Stream": Stream,
        "stream": contextlib.nullcontext,
        "synchronize": lambda *args: gpu.busy and gpu.wait("synchronize"),
        "empty_cache": empty_cache,
        "get_sync_debug_mode": lambda: gpu.sync_debug_mode,
        "set_sync_debug_mode": functools.partial(setattr, gpu, "sync_debug_mode"),
        "is_current_stream_capturing": stream.is_capturing,
        "CUDAGraph": CUDAGraph,
    }
    patches = [(torch.cuda, name, function) for name, function in functions.items()]
    patches += [
        (torch.accelerator, "current_stream", lambda *args: stream),  # asked from 2.15 on
        (torch, "Generator", Generator),
        (torch, "autocast", autocast_on_cpu),
        (torch, "is_autocast_enabled", lambda kind, ask=torch.is_autocast_enabled: ask("cpu")),
        (torch.utils._foreach_utils, groups.__name__, groups_on_device),
        (torch.nn.utils.clip_grad, groups.__name__, groups_on_device),
    ]
    if fake:
        patches += [(FakeTensor, "device", property(lambda x: CUDA if is_there(x) else CPU))]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        for mode in (Functions(), Operations()):
            mode.gpu = gpu
            stack.enter_context(mode)
        yield gpu
