"""What a call is made in: whether rooms take its tensors, who traces or compiles it, and who looks on."""

import sys

import torch
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module

# By their own names, for each look-up counts in a small call. Dynamo knows the function by its identity.
Tensor, compiling = torch.Tensor, torch.compiler.is_dynamo_compiling
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, FakeTensor))


def is_plain(x) -> bool:
    """Whether x is a tensor that rooms work on: no subclass, but for FakeTensor."""
    return type(x) in PLAIN


def context(*tensors: torch.Tensor | None) -> str | None:
    """Why a call goes to torch's own op whatever the kernel, or None."""
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
    return None


def is_bare(module) -> bool:
    """Whether nobody sees that a module is not called, nor has given it another forward: what it computes may run."""
    return not (
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
        or torch_module._global_forward_pre_hooks
        or torch_module._global_forward_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )


def autocasting(x: torch.Tensor) -> bool:
    """Whether autocast is on for x's device. It knows nothing of "meta", and raises."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def capturing() -> bool:
    """Whether the current stream is recorded as a CUDA graph: nothing may wait for it, nor be another at a replay."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _proxies() -> bool:
    """Whether make_fx is recording: its FakeTensors stand for values, not just for shapes."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def mixture(x: torch.Tensor, others) -> str | None:
    """What about the further tensors does not go with x, or None."""
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
