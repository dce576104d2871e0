"""Operations on `hfnn.deferred.scores.Scores` that are recorded: factors, masks, the softmax, dropout, casts and views.

A handler takes (the scores, torch's function, its arguments and keywords). It returns NotImplemented if the scores must
be computed.
"""

import functools
import itertools
import math
from collections.abc import Callable

import torch

from hfnn.core.context import PLAIN
from hfnn.deferred.recorded import DTYPES, name_of
from hfnn.deferred.scores import recorder, writes

LOWEST = -1e4  # the largest number that hides a key


def _in_place(handler):
    """Also for names that write to the scores. Where these have not been computed, the handler gets the function that
    does not write."""

    @functools.wraps(handler)
    def run(x, func, args, kwargs, **how):
        if not writes(func):
            return handler(x, func, args, kwargs, **how)
        given = [a for a in args if isinstance(a, torch.Tensor) and a is not x]
        if (
            args[0] is not x
            or x.is_shared()
            or any(torch.promote_types(a.dtype, x.dtype) is not x.dtype for a in given)
        ):
            return NotImplemented
        if x._node._value is None:
            func = getattr(torch, name_of(func).strip("_"))
        y = handler(x, func, args, kwargs, **how)
        if y is NotImplemented:
            return y
        y._node.memory, x._node = x._node.memory, y._node
        return x

    return run


@recorder("mul", "multiply", "__mul__", "__rmul__", "mul_", "__imul__")
@_in_place
def _times(x, func, args, kwargs, divided=False):
    number = next((a for a in args if a is not x), None)
    if isinstance(number, torch.Tensor) and number.numel() == 1 and number.is_cpu and not number.requires_grad:
        number = number.item() if number.dim() < 2 and torch.promote_types(number.dtype, x.dtype) is x.dtype else None
    plan = x._node.plan
    if len(args) != 2 or kwargs or type(number) not in (int, float) or plan.weights or plan.biases or plan.hidden:
        return NotImplemented
    if not 0 < number < math.inf:  # of a negative scale torch's op hides other keys
        return NotImplemented
    scale = plan.scale / number if divided else plan.scale * number
    return x.then(_with(func, x, args), scale=scale)


def _with(func, x, args) -> Callable:
    """func of two arguments, of which x is one, with another value for x."""
    a, b = args
    return (lambda y: func(y, b)) if a is x else lambda y: func(a, y)


def _after(func, args, kwargs) -> Callable:
    """func with another value for its first argument, which is not kept."""
    rest = args[1:]
    return lambda y: func(y, *rest, **kwargs)


@recorder("div", "divide", "true_divide", "__truediv__", "div_", "__itruediv__")
def _over(x, func, args, kwargs):
    return _times(x, func, args, kwargs, divided=True) if args[0] is x else NotImplemented


@recorder("add", "__add__", "__radd__", "add_", "__iadd__")
@_in_place
def _plus(x, func, args, kwargs):
    bias = next((a for a in args if a is not x), None)
    plan = x._node.plan
    if len(args) != 2 or kwargs or plan.hidden or not _belongs(x, bias):
        return NotImplemented
    if bias.dtype not in (plan.query.dtype, torch.float32):  # of a mask that torch's op takes
        return NotImplemented
    dtype = torch.promote_types(x.dtype, bias.dtype) if bias.dim() else x.dtype
    leading = _leading(x, bias)
    biases = *_split(plan.biases, plan.leading, leading, x), *_split((bias,), x.shape[:-2], leading, x)
    return x.then(_with(func, x, args), dtype=dtype, biases=biases, leading=leading)


@recorder("masked_fill", "masked_fill_")
@_in_place
def _filled(x, func, args, kwargs):
    mask, number = (*args[1:], *kwargs.values()) if len(args) + len(kwargs) == 3 else (None, None)
    return _hidden(x, mask, number, lambda y: func(y, mask, number))


@recorder("where")
def _where(x, func, args, kwargs):
    if len(args) != 3 or kwargs or args[1] is not x or not isinstance(args[0], torch.Tensor):
        return NotImplemented
    seen, _, number = args
    if seen.dtype is not torch.bool or (isinstance(number, torch.Tensor) and number.dtype is not x.dtype):
        return NotImplemented
    mask = seen.logical_not()
    x._node.call.made.note(torch.logical_not, (seen,), {}, mask)
    return _hidden(x, mask, number, lambda y: func(seen, y, number))


def _hidden(x, mask, number, step):
    if isinstance(number, torch.Tensor) and number.dim() == 0 and number.is_cpu and not number.requires_grad:
        number = number.item()
    plan = x._node.plan
    numbers = {number, *(n for _, n in plan.hidden)}
    if type(number) not in (int, float) or len(numbers) > 1 or not number <= LOWEST:
        return NotImplemented
    if -math.inf < number < torch.finfo(x.dtype).min:
        return NotImplemented
    if not _belongs(x, mask) or mask.dtype is not torch.bool:
        return NotImplemented
    leading = _leading(x, mask)
    before = _split([m for m, _ in plan.hidden], plan.leading, leading, x)
    hidden = [(m, number) for m in (*before, *_split((mask,), x.shape[:-2], leading, x))]
    biases = _split(plan.biases, plan.leading, leading, x)
    return x.then(step, biases=(*biases,), hidden=(*hidden,), leading=leading)


def _belongs(x, mask) -> bool:
    """Whether a mask goes with the scores without making them larger, and with the masks before it."""
    plan = x._node.plan
    if type(mask) not in PLAIN or mask.device != x.device or plan.weights or mask.dim() > x.dim():
        return False
    if any(m not in (1, n) for m, n in zip(reversed(mask.shape), reversed(x.shape), strict=False)):
        return False
    return mask.dim() <= 2 or _leading(x, mask) is not None


def _leading(x, mask):
    """The leading dimensions for masks, which are split into those of all of them; None if they cannot be."""
    before, now = x._node.plan.leading, x.shape[:-2]
    if mask.dim() <= 2 or before in (None, now):
        return now if mask.dim() > 2 else before
    cuts = sorted({math.prod(shape[i:]) for shape in (before, now) for i in range(len(shape) + 1)})
    sizes = [b // a for a, b in itertools.pairwise(cuts) if b % a == 0]
    return tuple(reversed(sizes)) if len(sizes) == len(cuts) - 1 else None


def _split(masks, shape, leading, x) -> list[torch.Tensor]:
    """Masks of scores with leading dimensions `shape`, as of those with `leading`, into which these are split."""
    return [m if m.dim() <= 2 or shape == leading else _split_one(m, shape, leading, x) for m in masks]


def _split_one(mask, shape, leading, x):
    own = (1,) * (len(shape) - mask.dim() + 2) + mask.shape[:-2]
    sizes, rest = [], list(leading)
    for size, mine in zip(shape, own, strict=True):
        part = 1
        while part < size:
            part *= rest[0]
            sizes.append(min(mine, rest.pop(0)))
    y = mask.reshape(*sizes, *mask.shape[-2:])
    x._node.call.made.note(torch.Tensor.reshape, (mask, *y.shape), {}, y)
    return y


@recorder("softmax")
def _softmax(x, func, args, kwargs):
    def bound(input, dim=None, _stacklevel=3, dtype=None):
        return dim, dtype

    if len(args) == 3 and func is not torch.nn.functional.softmax:  # others have no _stacklevel
        dim, dtype = bound(args[0], args[1], dtype=args[2], **kwargs)
    else:
        dim, dtype = bound(*args, **kwargs)
    if dim not in (-1, x.dim() - 1) or x._node.plan.weights or (dtype is not None and not dtype.is_floating_point):
        return NotImplemented
    if dtype is None:  # autocast's differs between devices
        dtype = torch.softmax(torch.empty(0, 1, dtype=x.dtype, device=x.device), -1).dtype
    return x.then(_after(func, args, kwargs), dtype=dtype, weights=True)


@recorder("dropout", "feature_dropout")
def _dropout(x, func, args, kwargs):
    def bound(input, p=0.5, training=True, inplace=False, train=None):
        return p, training if train is None else train, inplace

    p, training, inplace = bound(*args, **kwargs)
    if not training or p == 0:
        return x
    if inplace or not x._node.plan.weights or x._node.plan.p or not 0 < p < 1 or "feature" in name_of(func):
        return NotImplemented
    return x.then(_after(func, args, kwargs), p=p)


@recorder("to", "float", "half", "bfloat16", "type_as", "type")
def _cast(x, func, args, kwargs):
    asked = args[1:] or ((DTYPES[name_of(func)],) if name_of(func) in DTYPES else ())
    asked = [a.dtype if isinstance(a, torch.Tensor) and a.device == x.device else a for a in asked]
    if kwargs or len(asked) != 1 or not isinstance(asked[0], torch.dtype) or not asked[0].is_floating_point:
        return NotImplemented
    return x if asked[0] is x.dtype else x.then(lambda y: y.to(asked[0]), dtype=asked[0])


@recorder("contiguous")
def _contiguous(x, func, args, kwargs):
    return NotImplemented if kwargs or args[1:] else x


@recorder("view", "reshape")
def _view(x, func, args, kwargs):
    """Leading dimensions are split or joined."""
    if any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values())):
        return NotImplemented
    meta = func(torch.empty(x.shape, device="meta"), *args[1:], **kwargs)
    if meta.dim() < 3 or meta.shape[-2:] != x.shape[-2:]:
        return NotImplemented
    y = x.then(_after(func, args, kwargs), shape=meta.shape)
    y._node.memory = x._node.memory
    return y
