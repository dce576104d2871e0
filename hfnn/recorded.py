"""What is recorded of a `hfnn.deferred.Deferred`, instead of computing it.

A handler takes (the Deferred, torch's function, its further arguments, its keywords) and returns the result, mostly
another Deferred, or None where the logits are to be computed and the function called on them.
"""

import functools
import math
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

PLAIN = (torch.Tensor, nn.Parameter)
DTYPES = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}

# Attributes and methods that say nothing of the numbers.
METADATA = frozenset(
    name
    for name in dir(torch._C.TensorBase)
    if type(getattr(torch._C.TensorBase, name)).__name__ == "getset_descriptor"
) - {"T", "H", "mT", "mH", "real", "imag", "data", "grad_fn", "_grad_fn"}
METADATA |= {"size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "get_device"}
METADATA |= {"is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference"}
METADATA |= {"__len__", "__dir__", "__hash__"}


def _recorder(*names):
    def register(handler):
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


# By the name of torch's function.
HANDLERS: dict[str, Callable] = {}


@_recorder("float", "double", "half", "bfloat16", "to", "type", "type_as")
def _cast(x, func, args, kwargs):
    name = func.__name__
    if name in DTYPES:
        dtype = None if args or kwargs else DTYPES[name]
    elif name == "type":
        dtype = args[0] if len(args) == 1 and not kwargs and isinstance(args[0], torch.dtype) else None
    elif name == "type_as":
        return _cast(x, torch.Tensor.to, args, kwargs)
    elif "copy" in kwargs or any(a is True for a in args):  # by position: non_blocking, copy
        return None
    else:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if memory_format is not None or (device is not None and torch.empty(0, device=device).device != x.device):
            return None
        dtype = dtype or x.dtype
    if dtype is None or not dtype.is_floating_point:
        return None
    return x if dtype is x.dtype else x.then(lambda y: y.to(dtype))


@_recorder("contiguous")
def _contiguous(x, func, args, kwargs):
    if args or kwargs:
        return None
    return x if x.is_contiguous() else x.then(torch.Tensor.contiguous)


@_recorder("detach")
def _detach(x, func, args, kwargs):
    return x.then(torch.Tensor.detach, grad=False)


@_recorder("clone")
def _clone(x, func, args, kwargs):
    # DDP's sink clones outputs, graph or not, and throws the clone away. A clone of detached logits is a snapshot: that
    # is computed while it can be.
    if args or kwargs or torch.is_grad_enabled() or not x._plan.grad:
        return None
    return x.then(torch.clone)


@_recorder("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze")
def _reshape(x, func, args, kwargs):
    """Rows stay whole, and in their order, where the last dimension is as long as before."""
    plan = x._plan
    meta = func(plan.meta, *args, **kwargs)
    if meta.dim() < 2 or meta.shape[-1] != plan.meta.shape[-1] or meta.dtype is not plan.meta.dtype:
        return None
    return x.then(lambda y: func(y, *args, **kwargs), meta=meta)


@_recorder("__getitem__")
def _index(x, func, args, kwargs):
    plan = x._plan
    index = _leading(args[0] if type(args[0]) is tuple else (args[0],), plan.meta.shape)
    if index is None:
        return None
    # A mask may be written to before the logits are computed.
    index = tuple(i.clone() if isinstance(i, torch.Tensor) else i for i in index)
    hidden = plan.hidden.reshape(*plan.meta.shape[:-1], plan.hidden.shape[-1])[index]
    if any(isinstance(i, torch.Tensor) for i in index):
        meta = plan.meta.new_empty(*hidden.shape[:-1], plan.meta.shape[-1])
    else:
        meta = plan.meta[index]
    if meta.dim() < 2:
        return None
    return x.then(lambda y: y[index], meta=meta, hidden=hidden)


def _leading(index: tuple, shape) -> tuple | None:
    """The index without what it says of the last dimension, where that is nothing; else None."""
    if not all(i is None or i is Ellipsis or type(i) in (int, slice) or type(i) in PLAIN for i in index):
        return None
    used = [0 if i is None or i is Ellipsis else i.dim() if _is_mask(i) else 1 for i in index]
    if Ellipsis in [i for i in index if not isinstance(i, torch.Tensor)]:
        reaches = index[-1] is not Ellipsis
    else:
        reaches = sum(used) >= len(shape)
    if not reaches:
        return index
    if type(index[-1]) is slice and index[-1].indices(shape[-1]) == (0, shape[-1], 1) and sum(used) <= len(shape):
        return (*index[:-1], slice(None))
    return None


def _is_mask(i) -> bool:
    return isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8)


@_recorder("mul", "__mul__", "__rmul__", "multiply", "div", "__truediv__", "__div__", "divide", "true_divide")
def _scale(x, func, args, kwargs):
    if len(args) != 1 or kwargs or not isinstance(args[0], (int, float)) or not args[0] or not math.isfinite(args[0]):
        return None
    (number,), plan = args, x._plan
    factor = 1 / number if "div" in func.__name__ else number
    which = {"after": plan.after * factor} if plan.capped else {"before": plan.before * factor}
    return x.then(lambda y: func(y, number), **which)


@_recorder("tanh")
def _tanh(x, func, args, kwargs):
    return None if x._plan.capped or args or kwargs else x.then(torch.tanh, capped=True)


@_recorder("add", "__add__", "__radd__")
def _add(x, func, args, kwargs):
    """A row that is the same for all tokens: BART's final_logits_bias."""
    plan = x._plan
    if len(args) != 1 or kwargs or type(args[0]) not in PLAIN or plan.capped or plan.before != 1:
        return None
    (row,), vocabulary = args, plan.meta.shape[-1]
    if row.requires_grad or row.is_inference() or row.device != x.device or row.shape[-1:] != (vocabulary,):
        return None
    if row.numel() != vocabulary or row.dim() > plan.meta.dim() or not row.is_floating_point():
        return None
    plan.product.watch(row)
    total = row if plan.row is None else plan.row.reshape(-1) + row.reshape(-1)
    meta = func(plan.meta, plan.meta.new_empty(row.shape, dtype=row.dtype))
    return x.then(lambda y: func(y, row), meta=meta, row=total)


_CROSS_ENTROPY = nn.functional.cross_entropy  # before anybody routes the name elsewhere


@_recorder("cross_entropy")
def _cross_entropy(x, func, args, kwargs):
    return _loss(x, *args, **kwargs) if func is _CROSS_ENTROPY else None


def _loss(x, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", **options):
    if size_average is not None or reduce is not None or (weight is not None and weight.requires_grad):
        return None
    return x._plan.loss(target, weight, {"reduction": reduction, "ignore_index": ignore_index, **options})


@_recorder("register_hook")
def _register_hook(x, func, args, kwargs):
    """fully_shard hooks every output; whichever graph is used, the hooks are run."""
    if len(args) != 1 or kwargs or not x.requires_grad:
        return None
    if x._hooks is None:
        x._hooks = OrderedDict()
        with torch._C.DisableTorchFunctionSubclass():
            func(x, functools.partial(run_hooks, x._hooks))
    handle = RemovableHandle(x._hooks)
    x._hooks[handle.id] = args[0]
    return handle


def run_hooks(hooks, grad):
    for hook in list(hooks.values()):
        replaced = hook(grad)
        grad = grad if replaced is None else replaced
    return grad


def name_of(func) -> str:
    """ "mul" for Tensor.mul and torch.mul, "shape" for what reads that attribute."""
    name = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name
