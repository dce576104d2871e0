"""Selections: by the order of two numbers (abs, maximum, minimum), by a mask (where, masked_fill) or by an index.

    dx_i = dy_i * factor[code_i],    code = 0 where a = b, 1 where a < b, 2 where a > b, 3 where either is a NaN

Backward only needs the order of two numbers: a two-bit code per element (csrc/compare.h). torch keeps the inputs
themselves. Slopes are constant, so backward is linear in dy, is its own backward, and can be differentiated as often as
torch's.

    y = a where mask, else b;    da = dy where mask, else 0;    db = 0 where mask, else dy

torch keeps one byte per element of a mask. Here it is packed into an eighth of that (hfnn/core/bits.py), at each call,
because a mask may be refilled in between without a new version. For a broadcast mask, the small one is kept. Values and
gradients are bitwise equal to torch's.
"""

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hfnn.core import bits
from hfnn.core.context import is_plain
from hfnn.core.kernel import Op, kernels
from hfnn.core.node import Function
from hfnn.ops import table
from hfnn.ops.avg_pool import takes
from hfnn.ops.flat import flat, link_before, links, zeros_or_none
from hfnn.ops.layout import ambiguous, in_rows, laid, like, like_dy, result_strides
from hfnn.ops.table import BENCH, SHAPES

ABS, MAXIMUM, MINIMUM, CODES = range(4)  # as in csrc/compare.h
NONE = math.nan  # as a factor: no gradient, for any dy

# Factors of a and of b, in the order of the codes.
FACTORS = {
    ABS: ((0.0, -1.0, 1.0, 0.0),),
    MAXIMUM: ((0.5, NONE, 1.0, 1.0), (0.5, 1.0, NONE, 1.0)),
    MINIMUM: ((0.5, 1.0, NONE, 1.0), (0.5, NONE, 1.0, 1.0)),
}


class _Compare(Function):
    @staticmethod
    def forward(ctx, a, b, before, kind, kernel):
        y, codes = _values(a, b, kind, kernel, with_codes=True)
        # torch's maximum selects from dy only.
        own, link = links(a, before) if kind == ABS else (None, None)
        ctx.save_for_backward(codes, link)
        ctx.set_materialize_grads(False)
        ctx.factors, ctx.kernel, ctx.shape = FACTORS[kind], kernel, a.shape
        return y, own

    @staticmethod
    def backward(ctx, dy, dlink):
        codes, link = ctx.saved_tensors
        if dy is None:
            return zeros_or_none(dlink, ctx.shape), *(None,) * 4
        da, *db = (
            flat(slope(dy, codes, factors, ctx.kernel), link) if need else None
            for factors, need in zip(ctx.factors, ctx.needs_input_grad, strict=False)
        )
        if not db:  # with two inputs, torch's gradients have their layout, not that of dy
            da = like_dy(da, dy)
        elif 1 in dy.shape and not dy.is_contiguous():
            da, *db = (d if d is None else laid(d, result_strides(d, dy)) for d in (da, *db))
        return da, *(db or (None,)), None, None, None


class _Slope(Function):
    """dx of dy: linear in dy, so it is its own backward."""

    @staticmethod
    def forward(ctx, dy, codes, factors, kernel):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(codes)
        ctx.factors, ctx.kernel = factors, kernel
        return _product(dy, codes, factors, kernel)

    @staticmethod
    def backward(ctx, dy):
        (codes,) = ctx.saved_tensors
        return slope(dy, codes, ctx.factors, ctx.kernel), None, None, None


def slope(dy, codes, factors, kernel):
    """dy times the factor of each code; differentiable in dy if needed. kernel: one of `kernels`."""
    if torch.is_grad_enabled():
        return _Slope.apply(dy, codes, factors, kernel)
    return _product(dy, codes, factors, kernel)


def _product(dy, codes, factors, kernel):
    dy = dy.contiguous()
    dx = like(dy)
    kernel.backward(dy, codes, dx, *factors, kernel.queue(dx))
    return dx


def _values(a, b, kind, kernel, with_codes):
    """(y, codes or None)"""
    a, b = a.contiguous(), None if b is None else b.contiguous()
    y = like(a)
    codes = empty_codes(a) if with_codes else None
    kernel.forward(a, b, y, codes, kind, kernel.queue(a))
    return y, codes


def empty_codes(x):
    """Memory for the codes of x."""
    return torch.empty(bits.size(x.numel(), 2), dtype=torch.uint8, device=x.device)


def compare(a, b, kind, kernel):
    """y of a and b (None for ABS); keeps what backward needs, if there will be one."""
    if torch.is_grad_enabled() and (a.requires_grad or (b is not None and b.requires_grad)):
        return _Compare.apply(a, b, link_before(a) if kind == ABS else None, kind, kernel)[0]
    return _values(a, b, kind, kernel, with_codes=False)[0]


# The codes of two tensors (kind CODES), and their slopes, for rooms whose first kernel is a different one.
ORDER = Op("compare", torch.sub, torch.sub, kernels("compare", 0), sample=lambda *_: None)


@dataclass(frozen=True)
class Compare(Op):
    kind: int = ABS

    def run(self, input, prefer: str, arguments: tuple):
        """The result by a kernel, or None if torch's own op must run."""
        (other,) = arguments or (None,)
        kernel = self.select(input, other, prefer=prefer)
        if kernel is None or not in_rows(input):  # torch's result has other strides
            return None
        if arguments and not (
            is_plain(other) and input.shape == other.shape and input.dtype is other.dtype and in_rows(other)
        ):
            return None
        return compare(input, other, self.kind, kernel)


def _apart(case, dtype, device, generator=None):
    """a and b of shape `case`, no two elements closer than a tenth."""
    a, difference = (torch.randn(case, generator=generator) for _ in range(2))
    return tuple(t.to(dtype).to(device) for t in (a, a + difference + difference.sign() / 10)), {}


_OTHER = [inspect.Parameter("other", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
_LARGER = """`torch.{0}imum`, keeping two bits an element instead of both inputs.

y = {0}(a, b), da = dy where a is y and not b, dy / 2 where a = b, else 0; db likewise. Where either is a NaN, y is a
NaN and both gradients are dy, as torch's.

Shapes: input and other of one shape and dtype; what would have to be broadcast or cast is left to torch's own op. The
result has their shape and dtype. Raises what torch raises.
"""


def _extreme(name, reference, kind):
    op = Compare(
        f"{name}imum", reference, getattr(torch, f"{name}imum"), kernels("compare", 1 << 14), _apart,
        cases=SHAPES, traffic=(3.125, 4.25), probe=lambda x: (x,), small=(3, 5), bench=(BENCH,), recipe=False,
        kind=kind, like_input=False,  # as far as tests with another x go: the others have its shape
    )  # fmt: skip
    return op, table.function(op, _OTHER, _LARGER.format(name))


MAXIMUM_OP, maximum = _extreme("max", lambda a, b: a.where(a > b, b), MAXIMUM)
MINIMUM_OP, minimum = _extreme("min", lambda a, b: a.where(a < b, b), MINIMUM)


def _away_from_0(shape, generator):
    """No element is closer to the kink than a tenth."""
    x = torch.randn(shape, generator=generator)
    return x + x.sign() / 10


ABS_OP = Compare(
    "abs", lambda x: x.where(x > 0, -x), torch.abs, kernels("compare", 1 << 20),
    table.sampler(_away_from_0, ()), cases=SHAPES, traffic=(2.125, 2.125), small=(3, 5), bench=(BENCH,), recipe=False,
)  # fmt: skip
abs = table.function(
    ABS_OP,
    [],
    """`torch.abs`, keeping the sign, two bits an element, instead of its input.

    y = |x|, dx = dy sign(x), where sign(0) and sign(NaN) are 0, as torch's. Shapes: any; the result has the shape and
    dtype of input. Integers and complex numbers are left to torch's own op. Raises what torch raises.
    """,
)

# By a mask.

NEVER = 1 << 62  # elements from which this is faster: never, because it needs one more launch
# torch selects; a kernel packs the mask.
_KERNELS = kernels("bits", NEVER)


def _pack(mask):
    """The bits of a boolean mask without the dimensions along which it was expanded."""
    return bits.pack(_small(mask))


def _small(mask):
    """An expanded mask before it was expanded."""
    return mask[tuple(slice(0, 1) if step == 0 else slice(None) for step in mask.stride())]


def _small_shape(mask) -> tuple[int, ...]:
    """The shape that `_pack` packs."""
    return tuple(min(size, 1) if step == 0 else size for size, step in zip(mask.shape, mask.stride(), strict=True))


def _broadcasts(mask, x) -> bool:
    """Whether a mask is a plain boolean tensor on x's device that broadcasts to x without enlarging it."""
    if not is_plain(mask) or mask.dtype is not torch.bool or mask.device != x.device or mask.dim() > x.dim():
        return False
    shape = x.shape[x.dim() - mask.dim() :]
    return all(size in (1, wanted) for size, wanted in zip(mask.shape, shape, strict=True))


def _where_sample(case, dtype, device, generator=None):
    a, b, level = (torch.randn(case, generator=generator) for _ in range(3))
    return tuple(t.to(device) for t in (level > 0, a.to(dtype), b.to(dtype))), {}


# The definitions are for finite numbers. Not in the index: the first argument is not the input.
WHERE = Op(
    "where", lambda condition, a, b: a * condition + b * ~condition, torch.where, _KERNELS, _where_sample,
    cases=((3, 769), (64, 1024), (0, 4), (1,)), small=(3, 5), bench=(BENCH,), recipe=False,
)  # fmt: skip
_where, _where_passes = torch.where, WHERE.passes


class _Where(Function):
    @staticmethod
    def forward(ctx, mask, packed, a, b):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(packed)
        ctx.shape = _small_shape(mask)
        return _where(mask, a, b)

    @staticmethod
    def backward(ctx, dy):
        (packed,) = ctx.saved_tensors
        mask, (_, _, needs_a, needs_b) = bits.unpack(packed, ctx.shape), ctx.needs_input_grad
        return None, None, _where(mask, dy, 0) if needs_a else None, _where(mask, 0, dy) if needs_b else None


def _like(value, x) -> bool:
    """Whether a value is a number, x itself, a tensor like it, or a single number in a tensor without a gradient."""
    if not isinstance(value, torch.Tensor):
        return type(value) in (int, float, bool)
    if not is_plain(value) or value.dtype is not x.dtype or value.is_cpu != x.is_cpu:
        return False
    return value.shape == x.shape or (value.dim() == 0 and not value.requires_grad)


def where(
    condition: Tensor, input: Tensor | float | None = None, other: Tensor | float | None = None, *, prefer: str = "auto"
) -> Tensor | Any:
    """`torch.where`, keeping an eighth of a byte an element for a mask instead of a byte.

    Anything else than the following is left to torch's own op. Raises what torch raises.

    Args:
        condition: bool; broadcasts to the shape of input and other.
        input: Of the shape and dtype of other, or a number.
        other: Of the shape and dtype of input, or a number.
    PREFER
    """
    if input is None or other is None:
        return _where(condition, *(value for value in (input, other) if value is not None))
    x = input if isinstance(input, torch.Tensor) and input.dim() else other
    if not isinstance(x, torch.Tensor) or _where_passes(x, prefer) or not _wants_gradient(input, other):
        return _where(condition, input, other)
    if WHERE.select(x, prefer=prefer) is None or not all(_like(value, x) for value in (input, other)):
        return _where(condition, input, other)
    if (
        not _broadcasts(condition, x)
        or ambiguous(condition)
        or not (condition.is_contiguous() or in_rows(_small(condition)))
    ):
        return _where(condition, input, other)
    return _Where.apply(condition, _pack(condition), input, other)


def _wants_gradient(*values) -> bool:
    return torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in values)


def _masked_fill_sample(case, dtype, device, generator=None):
    x, level = (torch.randn(case, generator=generator) for _ in range(2))
    return (x.to(dtype).to(device), (level > 0).to(device), -2.0), {}


MASKED_FILL = Op(
    "masked_fill", lambda x, mask, value: x * ~mask + value * mask, torch.masked_fill, _KERNELS, _masked_fill_sample,
    cases=((3, 769), (64, 1024), (0, 4), (1,)), probe=lambda x: (x > 0, 0.0), small=(3, 5), bench=(BENCH,),
    recipe=False, like_input=False,  # as far as tests with another x go: the others have its shape
)  # fmt: skip
_masked_fill, _masked_fill_passes = torch.masked_fill, MASKED_FILL.passes


class _MaskedFill(Function):
    @staticmethod
    def forward(ctx, x, mask, packed, value):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(packed)
        ctx.shape = _small_shape(mask)
        return _masked_fill(x, mask, value)

    @staticmethod
    def backward(ctx, dy):
        (packed,) = ctx.saved_tensors
        return _masked_fill(dy, bits.unpack(packed, ctx.shape), 0), None, None, None


def masked_fill(input: Tensor, mask: Tensor, value: Tensor | float, *, prefer: str = "auto") -> Tensor:
    """`torch.masked_fill`, keeping an eighth of a byte an element for the mask instead of a byte.

    Anything else than the following is left to torch's own op. Raises what torch raises.

    Args:
        input: Of any shape.
        mask: bool; broadcasts to that of input.
        value: A number, or a tensor of one that needs no gradient.
    PREFER
    """
    kernel = None if _masked_fill_passes(input, prefer) else MASKED_FILL.select(input, prefer=prefer)
    if kernel is None or not (input.requires_grad and torch.is_grad_enabled()) or not _broadcasts(mask, input):
        return _masked_fill(input, mask, value)
    if isinstance(value, torch.Tensor) and (value.requires_grad or value.dim() != 0):
        return _masked_fill(input, mask, value)
    return _MaskedFill.apply(input, mask, _pack(mask), value)


# By an index. Both directions use torch's own kernels; torch also keeps x, for its shape.


def _gather_sample(case, dtype, device, generator=None):
    """Three elements of each row."""
    x = torch.randn(case, generator=generator).to(dtype).to(device)
    index = torch.randint(case[-1], (*case[:-1], 3), generator=generator).to(device)
    return (x, -1, index), {}


_gather = torch.gather
GATHER = Op("gather", _gather, _gather, (), _gather_sample, cases=((3, 769),), recipe=False, like_input=False)


class _Gather(Function):
    @staticmethod
    def forward(ctx, x, dim, index):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(index)
        ctx.shape, ctx.dim = x.shape, dim
        return _gather(x, dim, index)

    @staticmethod
    def backward(ctx, dy):
        (index,) = ctx.saved_tensors
        zeros = torch.zeros(ctx.shape, dtype=dy.dtype, device=dy.device)
        if torch.is_grad_enabled():
            return zeros.scatter_add(ctx.dim, index, dy), None, None
        return zeros.scatter_add_(ctx.dim, index, dy), None, None


def gather(input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False, prefer: str = "auto") -> Tensor:
    """`torch.gather`, keeping the index and not the input. Raises what torch raises.

        y[i, j] = x[i, index[i, j]], dx[i, k] = sum of dy[i, j] over the j with index[i, j] = k    (dim 1 of two)

    Args:
        input: Of any shape.
        dim: Along which the index counts.
        index: int64, as in torch; the result has its shape.
        sparse_grad: With it torch's own op runs.
    PREFER
    """
    if sparse_grad or not takes(input, prefer) or not is_plain(index) or type(dim) is not int:
        return _gather(input, dim, index, sparse_grad=sparse_grad)
    return _Gather.apply(input, dim, index)


OPS = ABS_OP, MAXIMUM_OP, MINIMUM_OP, MASKED_FILL, GATHER
