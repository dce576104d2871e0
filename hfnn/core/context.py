"""The context of a call: whether rooms accept its tensors, and whether it is traced, compiled or observed."""

import contextlib
import sys

import torch
from torch._C._dynamo import eval_frame
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module

from hfnn.core.holder import foreign_forward

# Imported as names, because each look-up counts in a small call. Dynamo identifies the function by its identity.
Tensor, compiling = torch.Tensor, torch.compiler.is_dynamo_compiling
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_mode, _FAKE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, FakeTensor))


def uncompiled(function):
    """A decorator: Dynamo compiles neither this function nor what it calls. Unlike `torch.compiler.disable`, it costs
    nothing per call and does not import Dynamo.
    """
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True  # a frame that Dynamo compiles calls it, and does not inline it
    return function


def is_plain(x) -> bool:
    """Whether x is a tensor that rooms accept: no subclass except FakeTensor, not sparse or nested, and not lazily
    negated (of which Dynamo has no tensors)."""
    return type(x) in PLAIN and (
        torch.compiler.is_compiling() or not (x.is_neg() or x.is_nested or x.layout is not torch.strided)
    )


def faked(x: torch.Tensor) -> bool:
    """Whether what is made of x has no values: x is a FakeTensor, or a FakeTensorMode is on."""
    return type(x) is FakeTensor or _mode(_FAKE) is not None


_assumed = False  # whether `hfnn.as_if` is on


def assumed() -> bool:
    """Whether steps without values are run as if on a GPU (`hfnn.as_if`)."""
    return _assumed


def on_gpu(x: torch.Tensor) -> bool:
    """Whether choices for x are those of a GPU: where it is, or where the step that it is part of is as if."""
    return x.is_cuda or (_assumed and faked(x))


def place(x: torch.Tensor) -> str:
    """The type of the device for which kernels are chosen."""
    return "cuda" if on_gpu(x) else "cpu" if x.is_cpu else x.device.type


@contextlib.contextmanager
def fakes_under_autocast(dtype: torch.dtype):
    """FakeTensors on "cuda", without gradients, under its autocast. torch.autocast refuses where there is no GPU."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        with FakeTensorMode():
            yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


def has_values(x: torch.Tensor) -> bool:
    """Whether there are numbers to read: not in a FakeTensor, nor in its mode, nor on "meta"."""
    return not (type(x) is FakeTensor or x.is_meta or _mode(_FAKE) is not None)


def address(x: torch.Tensor) -> int:
    """Where the numbers begin, 0 without any; torch warns of that question to a FakeTensor."""
    return 0 if type(x) is FakeTensor else x.data_ptr()


def context(*tensors: torch.Tensor | None) -> str | None:
    """Why a call goes to torch's own op, regardless of the kernel, or None."""
    if torch._C._are_functorch_transforms_active():
        return "inside a functorch transform (vmap, grad, jvp)"
    if forward_ad._current_level >= 0:
        return "forward-mode AD is on"
    if torch._C._get_tracing_state() is not None or torch.compiler.is_compiling() or _proxies():
        return "a tracer is recording torch's own ops"
    if getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "compiled_autograd_enabled", False):
        return "compiled autograd is on, which compiles torch's own nodes"
    for x in tensors:
        if x is not None and type(x) not in PLAIN:
            return f"takes torch.Tensor and torch.nn.Parameter, got {type(x).__name__}"
        if x is not None and _wrapped(x):
            return "takes no tensor that a functorch transform left behind"
        if x is not None and x.is_neg():  # a view of what a conjugate holds: its memory has the other sign
            return "takes no lazily negated tensor: resolve_neg() makes one that it takes"
        if x is not None and (x.is_nested or x.layout is not torch.strided):
            return f"takes no {'nested' if x.is_nested else str(x.layout).removeprefix('torch.')} tensor"
    return None


def in_checkpoint() -> bool:
    """Whether a checkpoint of torch sees the tensors that are saved now."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def transformed() -> bool:
    """Whether a compiler, a tracer, a functorch transform or forward AD runs the call. hfnn then calls torch's own ops,
    so a module's own code runs: it may have another order than its definition, or more ops, such as a product with 1.
    """
    if compiling() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return True
    return torch._C._get_tracing_state() is not None or _proxies()


def bare_mode() -> bool:
    """Whether no mode of torch's functions is on that might count or change calls: hfnn's, and torch's of devices."""
    return all(
        getattr(mode, "hfnn_runs", False) or type(mode).__module__ == "torch.utils._device"
        for mode in torch.overrides._get_current_function_mode_stack()
    )


def is_bare(module) -> bool:
    """Whether a module's computation may run without calling the module: no hooks, and no replaced forward."""
    return not (
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or foreign_forward(module)
        or torch_module._global_forward_pre_hooks
        or torch_module._global_forward_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )


def autocasting(x: torch.Tensor) -> bool:
    """Whether autocast is on for x's device. torch raises for "meta"."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def capturing() -> bool:
    """Whether the current stream is recorded as a CUDA graph: nothing may wait for it or differ at a replay."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _proxies() -> bool:
    """Whether make_fx is recording: its FakeTensors stand for values, not just for shapes."""
    return _mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def mixture(x: torch.Tensor, others) -> str | None:
    """Why the further tensors do not fit x, or None."""
    place, dtype = x.get_device(), None
    for other in others:
        if other is None:
            continue
        if other.get_device() != place or other.is_cpu != x.is_cpu:
            return f"tensors on {x.device} and {other.device}"
        if dtype is not None and other.dtype is not dtype:
            return f"takes parameters of one dtype, got {dtype} and {other.dtype}"
        dtype = other.dtype
        if dtype is not x.dtype and (dtype is not torch.float32 or x.dtype is torch.float64):
            wider = "" if x.dtype is torch.float64 else " or torch.float32"
            return f"takes parameters of dtype {x.dtype}{wider}, got {dtype}"
    return None
