"""Operations on a `hfnn.deferred.Deferred` that are recorded instead of computed.

A handler takes (the Deferred, torch's function, its further arguments, its keywords). It returns the result, mostly
another Deferred, or None if the logits must be computed and the function called on them.
"""

import functools
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hfnn.core.context import PLAIN
from hfnn.ops import log_softmax

DTYPES = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}

# Attributes and methods that do not depend on the numbers.
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


# Keyed by the name of torch's function.
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
    # DDP's sink clones outputs, with or without a graph, and discards the clone. A clone of detached logits is a
    # snapshot, so it is computed while this is possible.
    if args or kwargs or torch.is_grad_enabled() or not x._plan.grad:
        return None
    return x.then(torch.clone)


@_recorder("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze")
def _reshape(x, func, args, kwargs):
    """Rows stay whole and in their order if the last dimension keeps its length."""
    plan = x._plan
    if plan.second:
        return None
    meta = func(plan.meta, *args, **kwargs)
    if meta.dim() < 2 or meta.shape[-1] != plan.meta.shape[-1] or meta.dtype is not plan.meta.dtype:
        return None
    return x.then(lambda y: func(y, *args, **kwargs), meta=meta)


@_recorder("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "mT")
def _classes_second(x, func, args, kwargs):
    """The classes become the second dimension, where a loss of logits with more dimensions expects them."""
    plan = x._plan
    meta = func(plan.meta, *args, **kwargs)
    wanted = plan.meta.movedim(-1, 1)
    if plan.second or plan.meta.dim() < 3 or (meta.shape, meta.stride()) != (wanted.shape, wanted.stride()):
        return None
    return x.then(lambda y: func(y, *args, **kwargs), meta=meta, second=True)


@_recorder("__getitem__")
def _index(x, func, args, kwargs):
    plan = x._plan
    index = _leading(args[0] if type(args[0]) is tuple else (args[0],), plan.meta.shape)
    if index is None or plan.second:
        return None
    # A tensor may be written to before the logits are computed. For a mask, the host waits once for the numbers.
    index = [
        i.nonzero(as_tuple=True) if _is_mask(i) else (i.clone() if isinstance(i, torch.Tensor) else i,) for i in index
    ]
    index = tuple(itertools.chain.from_iterable(index))
    shape = plan.meta.shape[:-1]
    if any(isinstance(i, torch.Tensor) for i in index):
        leading = torch.empty((), device=x.device).expand(*shape, 1)[index].shape[:-1]
        meta = plan.meta.new_empty(*leading, plan.meta.shape[-1])
    else:
        meta = plan.meta[index]
    if meta.dim() < 2:
        return None
    rows = (*plan.rows, lambda hidden: hidden.reshape(*shape, hidden.shape[-1])[index])
    return x.then(lambda y: y[index], meta=meta, rows=rows)


def _leading(index: tuple, shape) -> tuple | None:
    """The index without its part for the last dimension, if that part selects everything; else None."""
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
    if plan.logs:
        return None
    factor = 1 / number if "div" in func.__name__ else number
    which = {"after": plan.after * factor} if plan.capped else {"before": plan.before * factor}
    return x.then(lambda y: func(y, number), **which)


@_recorder("tanh")
def _tanh(x, func, args, kwargs):
    plan = x._plan
    return None if plan.capped or plan.logs or args or kwargs else x.then(torch.tanh, capped=True)


@_recorder("log_softmax")
def _log_softmax(x, func, args, kwargs):
    """log_softmax over the classes, of which `nll_loss` is the cross-entropy of the logits."""
    options = dict(zip(("dim", "dtype") if func is not nn.functional.log_softmax else ("dim",), args, strict=False))
    dim, dtype = (kwargs.get(name, options.get(name)) for name in ("dim", "dtype"))
    plan = x._plan
    classes = 1 if plan.second else plan.meta.dim() - 1
    if plan.logs or type(dim) is not int or dim not in (classes, classes - plan.meta.dim()) or len(args) > len(options):
        return None
    if dtype is None:
        dtype = log_softmax.OP.out_dtype(plan.meta.new_empty(0, device=x.device))  # autocast's, too
    if not dtype.is_floating_point:
        return None
    return x.then(lambda y: y.log_softmax(dim, dtype=dtype), meta=plan.meta.log_softmax(dim, dtype=dtype), logs=True)


@_recorder("add", "__add__", "__radd__")
def _add(x, func, args, kwargs):
    """A row that is the same for all tokens: BART's final_logits_bias."""
    plan = x._plan
    if len(args) != 1 or kwargs or type(args[0]) not in PLAIN or plan.capped or plan.before != 1:
        return None
    if plan.logs or plan.second:
        return None
    (row,), vocabulary = args, plan.meta.shape[-1]
    if row.requires_grad or row.is_inference() or row.device != x.device or row.shape[-1:] != (vocabulary,):
        return None
    if row.numel() != vocabulary or row.dim() > plan.meta.dim() or not row.is_floating_point():
        return None
    plan.product.watch(row)
    total = row if plan.row is None else plan.row.reshape(-1) + row.reshape(-1)
    meta = func(plan.meta, plan.meta.new_empty(row.shape, dtype=row.dtype))
    return x.then(lambda y: func(y, row.to(y.device)), meta=meta, row=total)  # also on "meta"


# Before the names are routed elsewhere.
CROSS_ENTROPY, NLL_LOSS = nn.functional.cross_entropy, nn.functional.nll_loss


@_recorder("cross_entropy")
def _cross_entropy(x, func, args, kwargs):
    return None if func is not CROSS_ENTROPY or x._plan.logs else _loss(x, func, *args, **kwargs)


@_recorder("nll_loss")
def _nll_loss(x, func, args, kwargs):
    return _loss(x, func, *args, **kwargs) if func is NLL_LOSS and x._plan.logs else None


def _loss(x, func, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", **options):
    if size_average is not None or reduce is not None or (weight is not None and weight.requires_grad):
        return None
    return x._plan.loss(x, func, target, weight, {"reduction": reduction, "ignore_index": ignore_index, **options})


# Queries about the graph of logits, computed or not.
GRAPH: dict[str, Callable] = {}


def _below(func, x, *args):
    """func of the tensor without memory that C++ code sees."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(x, *args)


def ways(x) -> tuple[bool, torch.Tensor | None]:
    """(whether a gradient of x passes its own node, the computed tensor if one passes that and not the node).

    The loss of unread logits passes the node. So do computed logits, except views and tensors written to since.
    """
    if x._value is None or x._value.grad_fn is x._node is not None:
        return True, None
    if _is_own_leaf(x._value):
        return False, x._value
    return x._node is None and x._value.grad_fn is x._made_by, x._value


def _is_own_leaf(value) -> bool:
    """Whether the user made a leaf of detached logits, by `requires_grad_`."""
    return value.requires_grad and value.is_leaf


def _graph(name):
    def register(handler):
        GRAPH[name] = handler
        return handler

    return register


@_graph("register_hook")
def _register_hook(x, hook):
    hooks = OrderedDict()
    handle, run = RemovableHandle(hooks), functools.partial(_run_hooks, hooks)
    hooks[handle.id] = hook
    node, value = ways(x)
    if node:
        _below(torch.Tensor.register_hook, x, run)
    if value is not None:
        value.register_hook(run)
    x._hooks.append(run)
    return handle


@_graph("retain_grad")
def _retain_grad(x):
    node, value = ways(x)
    if node:
        _below(torch.Tensor.retain_grad, x)
    if value is not None:
        value.retain_grad()


@_graph("grad")
def _grad(x):
    found = [t for t in (x._value,) if t is not None and (t.retains_grad or _is_own_leaf(t))]
    grads = [t.grad for t in found]
    if not found or _below(torch.Tensor.retains_grad.__get__, x):
        grads.append(_below(torch.Tensor.grad.__get__, x))
    grads = [g for g in grads if g is not None]
    return sum(grads[1:], grads[0]) if grads else None


@_graph("set grad")
def _set_grad(x, grad):
    if x._value is not None:
        x._value.grad = None
    _below(torch.Tensor.grad.__set__, x, grad)


@_graph("delete grad")
def _delete_grad(x):
    _set_grad(x, None)


def _run_hooks(hooks, grad):
    for hook in list(hooks.values()):
        replaced = hook(grad)
        grad = grad if replaced is None else replaced
    return grad


def name_of(func) -> str:
    """ "mul" for Tensor.mul and torch.mul, "grad" for what reads that attribute, "set grad" for what writes it."""
    name = getattr(func, "__name__", "")
    if name not in _ATTRIBUTE:
        return name
    return _ATTRIBUTE[name] + getattr(func.__self__, "__name__", name)


_ATTRIBUTE = {"__get__": "", "__set__": "set ", "__delete__": "delete "}
