"""Keeping y and five bits instead of x, for a smooth y = f(x) whose derivative cannot be computed from y alone.

For gelu, silu, mish and hardswish, a bfloat16 y is f of at most 31 different bfloat16 x (counted by `_tables`).
Exceptions are the x with y = 0, and those so far to the left that f'(x) is also 0; there any of them will do. So y and
the rank of x among the x with the same y give x bit for bit, or one with the same derivative. With a consumer that
keeps y anyway (any product except hfnn's, which would rebuild y from x), this costs 5 bits per element instead of 16
for x.

The tables are made by running the forward and backward kernels on all 65536 numbers, once for each function, its
options, kernel, device and dtype. A NaN y is decoded as a NaN. float16 has finer steps: near the minimum of these
functions there are more x than 5 bits can distinguish. So x is kept in float16 and in float32.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch._subclasses import FakeTensor

from hfnn.core.context import capturing
from hfnn.core.function import Function, double_backward
from hfnn.core.kernel import Kernel, Op
from hfnn.ops.layout import _alike, _dense, _flat

KEEPS = ("input", "output")
WIDTH, PATTERNS = 5, 1 << 16
HALVES = (torch.bfloat16, torch.float16)

RECODE = Op(
    "recode",
    torch.clone,
    torch.clone,
    kernels=(
        Kernel("triton", "hfnn.kernels.recode", "cuda", HALVES),
        Kernel("cpp", "hfnn._C:cpu.recode", "cpu", HALVES),
    ),
    sample=lambda *_: None,
)


class Tables(NamedTuple):
    """The rank of each x, the start of the x of each y, and all x in the order of their y, as in csrc/recode.h."""

    rank: torch.Tensor
    start: torch.Tensor
    table: torch.Tensor


class _Way(NamedTuple):
    """A function's kernels: y of x, dx of dy and x, y of x by differentiable ops; and its tables and codec."""

    build: Callable
    gradient: Callable
    formula: Callable
    tables: Tables
    codec: Kernel


def check(keep: str) -> None:
    """Raises ValueError unless keep is one of KEEPS."""
    if keep not in KEEPS:
        raise ValueError(f"keep={keep!r}: choose one of {', '.join(map(repr, KEEPS))}")


_known: dict[tuple, Tables | None] = {}


def keeping_output(x, key: tuple, build: Callable, gradient: Callable, formula: Callable):
    """build(x), whose backward has y and five bits; None if x must be kept.

    key: everything that `build` and `gradient` depend on besides the device and dtype of x. Both are kernels; `formula`
    is torch's.
    """
    if not torch.is_grad_enabled() or x.dtype not in HALVES or type(x) is FakeTensor:
        return None
    codec = RECODE.find(x)
    if codec is None:
        return None
    key = *key, x.device, x.dtype
    if key not in _known:
        if x.is_cuda and capturing():  # making the tables reads values
            return None
        _known[key] = _tables(x, build, gradient)
    tables = _known[key]
    return None if tables is None else _KeepsCodes.apply(x, _Way(build, gradient, formula, tables, codec))[0]


@torch.no_grad()
def _tables(x, build, gradient) -> Tables | None:
    """The tables for numbers like x, or None if some y has more x than the codes can distinguish."""
    numbers = torch.arange(PATTERNS, dtype=torch.int32).to(torch.int16).view(x.dtype).to(x.device)
    largest = torch.full_like(numbers, torch.finfo(x.dtype).max)
    slopes = gradient(largest, numbers), gradient(-largest, numbers)
    y, *slopes = map(_patterns, (build(numbers), *slopes))
    pairs, place = torch.unique(y << 16 | _alias(numbers.cpu(), y, slopes), return_inverse=True)
    count = torch.bincount(pairs >> 16, minlength=PATTERNS)
    start = count.cumsum(0) - count
    start[numbers.cpu().isnan()] = start[_patterns(torch.full((1,), torch.nan, dtype=x.dtype))]  # whatever the NaN
    if count.max() > 1 << WIDTH:
        return None
    table = torch.zeros(PATTERNS, dtype=torch.int16)
    table[: len(pairs)] = (pairs & 0xFFFF).to(torch.int16)
    rank = place - start[y]
    return Tables(*(t.to(x.device) for t in (rank.to(torch.uint8), start.to(torch.int32), table)))


def _patterns(numbers) -> torch.Tensor:
    """Bit patterns, the same for every NaN."""
    numbers = numbers.cpu()
    return torch.where(numbers.isnan(), torch.nan, numbers).view(torch.int16).long() & 0xFFFF


def _alias(x, y, slopes) -> torch.Tensor:
    """The pattern that represents each x: its own, except one for all NaNs and one for all flat x of a y.

    Flat: even the largest dy gives the same dx, which is 0, or NaN where a kernel multiplies 0 by infinity. The
    smallest x represents them.
    """
    own, nan = torch.arange(PATTERNS), _patterns(torch.full((1,), torch.nan, dtype=x.dtype)).item()
    kinds = torch.unique(torch.stack([y, *slopes]), dim=1, return_inverse=True)[1]
    by_size = (own & 0x7FFF) << 16 | own
    smallest = torch.full((PATTERNS,), 1 << 40).scatter_reduce(0, kinds, by_size, "amin")[kinds] & 0xFFFF
    flat = (slopes[0] & 0x7FFF == 0) & (slopes[1] & 0x7FFF == 0) | (slopes[0] == nan) & (slopes[1] == nan)
    flat &= x.isfinite()
    return torch.where(x.isnan(), nan, torch.where(flat, smallest, own))


def _decode(y, packed, way):
    x = torch.empty_like(y)
    way.codec.decode(_flat(y), packed, way.tables.start, way.tables.table, _flat(x), way.codec.queue(y))
    return x


class _KeepsCodes(Function):
    """y, and a handle through which a second derivative reaches x.

    x is decoded from y and codes, which have no graph to x. The handle is a second output of the function and
    represents x; its gradient is dx. It is one element expanded to the shape of x.
    """

    @staticmethod
    def forward(ctx, x, way):
        y = way.build(x)
        in_step = _alike(_dense(y), x)[1]  # in memory order of y
        packed = torch.empty(-(-WIDTH * x.numel() // 8), dtype=torch.uint8, device=x.device)
        way.codec.encode(_flat(in_step), way.tables.rank, packed, way.codec.queue(x))
        handle = x.new_zeros(()).expand(x.shape)
        ctx.save_for_backward(y, packed, handle)
        ctx.set_materialize_grads(False)  # the handle's gradient is None except in a second backward
        ctx.way = way
        return y, handle

    @staticmethod
    def backward(ctx, dy, dhandle):
        y, packed, handle = ctx.saved_tensors
        if dy is None:
            return dhandle, None
        if torch.is_grad_enabled():
            x = _Decoded.apply(handle, y.detach(), packed, ctx.way)
            (dx,) = double_backward(ctx.way.formula, (x,), (True,), dy)
        else:
            dx = ctx.way.gradient(dy, _decode(y, packed, ctx.way))
        return dx if dhandle is None else dx + dhandle, None


class _Decoded(Function):
    """x, as a function of the handle that represents it."""

    @staticmethod
    def forward(ctx, handle, y, packed, way):
        ctx.set_materialize_grads(False)
        return _decode(y, packed, way)

    @staticmethod
    def backward(ctx, dx):
        return dx, None, None, None
