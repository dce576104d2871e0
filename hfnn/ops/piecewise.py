"""Piecewise linear maps, one row per map: one bit per element is kept instead of a tensor.

    dx = dy * inside where the bit of the element is set, dy * outside elsewhere

The slope of such a map has two values, so backward only needs one bit per element. torch keeps the input or the output,
two or four bytes per element. Forward makes the bits in the pass that makes y. csrc/piecewise.h has the maps; at a kink
and at a NaN it uses torch's slope.

dx is linear in dy, so backward is its own backward, and can be differentiated any number of times.
"""

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from hfnn.core import bits
from hfnn.core.kernel import WORTH_ELEMENTS, Op, forced, kernels
from hfnn.core.node import Function
from hfnn.ops import table
from hfnn.ops.behind import BEHIND, BEHIND_ELEMENTS, behind
from hfnn.ops.flat import flat, link_before, links, zeros_or_none
from hfnn.ops.layout import _dense, ambiguous, in_order, laid, like, result_strides
from hfnn.ops.table import BENCH, real

RELU, LEAKY_RELU, HARDTANH, CLAMP, THRESHOLD, HARDSHRINK, SOFTSHRINK, HARDSIGMOID = range(8)

# For these the gradient has the layout of x (relu's: of y), whatever dy's layout. For the others dy's layout decides.
_LIKE_X = (RELU, LEAKY_RELU, CLAMP, THRESHOLD)

_gradient_by_output = torch.ops.aten.threshold_backward.default  # as torch's own
_OPS: list[Op] = []


@dataclass(frozen=True)
class Piecewise(Op):
    """A row. numbers(input, *torch's arguments after it): the numbers for `_compute` and `_gradient`, (kind, a, b,
    inside, outside), or the first of them; None for torch's own op.
    """

    numbers: Callable = lambda input: None

    def run(self, input, prefer: str, arguments: tuple, keep: str = "bits"):
        """The map of input by a kernel, keeping bits if a gradient is needed; None if torch's own op must run.

        keep="output": torch's own op runs and keeps y. Where input can be built again, neither is kept.
        """
        kernel = self.select(input, prefer=prefer)
        y = None if kernel is None else behind(self.name, input, arguments, prefer)
        if y is not None:
            return y
        if self.name in BEHIND and prefer == "auto" and forced() is None and input.numel() < WORTH_ELEMENTS:
            return None  # bits take longer
        numbers = None if kernel is None or keep == "output" else table.numbers(self, input, *arguments)
        if numbers is None:
            return None
        if numbers[0] == CLAMP and ambiguous(input):  # torch's gradient uses the strides of a comparison of it
            return None
        kind, a, b, inside, outside = (*numbers, *_NUMBERS[len(numbers) :])
        if torch.is_grad_enabled() and input.requires_grad:
            before = None if kind == CLAMP else link_before(input)
            return _Piecewise.apply(input, before, kind, a, b, inside, outside, kernel)[0]
        return _compute(input, kind, a, b, kernel, False)[0]


_NUMBERS = RELU, 0.0, 0.0, 1.0, 0.0


class _Piecewise(Function):
    @staticmethod
    def forward(ctx, x, before, kind, a, b, inside, outside, kernel):
        y, flags, strides = _compute(x, kind, a, b, kernel, True)
        # torch's clamp selects from dy only.
        own, link = (None, None) if kind == CLAMP else links(x, before)
        ctx.save_for_backward(flags, link)
        ctx.set_materialize_grads(False)
        given = y.stride() if kind == RELU else x.stride()
        ctx.how, ctx.shape = (kind, strides, given, inside, outside, kernel), x.shape
        ctx.recipe = bits.of_output(flags, y) if kind == RELU else None  # torch keeps the output of relu alone
        return y, own

    @staticmethod
    def backward(ctx, dy, dlink):
        flags, link = ctx.saved_tensors
        y = None if ctx.recipe is None else ctx.recipe.output()
        if dy is None:
            dx = zeros_or_none(dlink, ctx.shape)
        else:
            dx = flat(_gradient(dy, flags, *ctx.how) if y is None else _gradient_by_output(dy, y, 0), link)
        return dx, *(None,) * 7


class _Gradient(Function):
    """dx of dy, for a differentiable backward: linear in dy, so it is its own backward."""

    @staticmethod
    def forward(ctx, dy, flags, *how):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(flags)
        ctx.how = how
        with torch.no_grad():
            return _gradient(dy, flags, *ctx.how)

    @staticmethod
    def backward(ctx, ddx):
        (flags,) = ctx.saved_tensors
        return _gradient(ddx, flags, *ctx.how), *(None,) * 7


def _compute(x, kind, a, b, kernel, keep):
    """(y, the bits or None, the strides whose memory order the bits follow)"""
    x = _dense(x)
    y = torch.empty_like(x) if kind == HARDTANH else like(x)  # as torch's own
    flags = x.new_empty(bits.size(x.numel()), dtype=torch.uint8) if keep else None
    kernel.forward(in_order(x), in_order(y), flags, kind, a, b, kernel.queue(x))
    return y, flags, y.stride()


def _gradient(dy, flags, kind, strides, given, inside, outside, kernel):
    """dx. strides: those whose memory order the flags follow; given: those of x, or of the tensor that torch keeps."""
    if torch.is_grad_enabled():
        return _Gradient.apply(dy, flags, kind, strides, given, inside, outside, kernel)
    if kind == CLAMP and 1 in dy.shape and not given == dy.stride() == strides:
        # By torch's own op, because its strides in dimensions of size 1 are special.
        return torch.where(bits.unpack(flags, (dy.numel(),)).as_strided(dy.shape, strides), dy, 0)
    in_step = laid(dy, strides)
    dx = like(in_step)
    kernel.backward(in_order(in_step), flags, in_order(dx), inside, outside, kernel.queue(dy))
    if 1 in dy.shape and not given == dy.stride() == dx.stride():
        return laid(dx, _strides(kind, dy.shape, dy.stride(), given))
    return dx if in_step is dy or kind in _LIKE_X else laid(dx, result_strides(dy, dx))


@functools.lru_cache(1024)
def _strides(kind, shape, *strides):
    """The strides of torch's gradient, from those of dy and of the tensor that torch keeps, if size-1 dimensions
    matter."""
    dy, x = (torch.empty_strided(shape, each, device="meta") for each in strides)
    return result_strides(x, dy) if kind in _LIKE_X else result_strides(dy, x)


@functools.lru_cache(1024)
def _rounded(value: float, dtype: torch.dtype) -> float:
    """A bound after torch's rounding to the dtype of x, for ops that round before comparing."""
    return torch.tensor(real(value), dtype=torch.float64).to(dtype).item()


def crossing(shape, generator, kinks):
    """Random x on a scale that crosses the kinks, and not too close to a kink to be distinct from it in 16 bits."""
    x = torch.randn(shape, generator=generator).mul_(3)
    for kink in kinks:
        x = torch.where((x - kink).abs() < 0.06, kink + 0.15, x)
    return x


_DOCUMENT = """`{}`, keeping one bit per element instead of the input.

{}

Shapes: any; the result has the shape and dtype of input. Raises what torch raises.
"""


def _row(name, text, torchs, base, reference, numbers, values=((),), kinks=lambda *options: options, keeps=(), **more):
    """The function of an op, and its module if there is one. text: the definition and its source.

    values: options of the contract's cases; kinks(*options): where the slope jumps.
    """
    parameters = list(inspect.signature(numbers).parameters.values())[1:]
    names = [p.name for p in parameters]
    floor = more.pop("floor", 1 << 21)
    op = Piecewise(
        name, reference, torchs, sample=table.sampler(
            lambda shape, generator, *options: crossing(shape, generator, kinks(*options)), names[: len(values[0])]
        ),
        kernels=kernels("piecewise", floor),
        numbers=numbers, cases=table.cases(values), small=(3, 5, *values[0]), traffic=(2, 2),
        recipe=name in BEHIND, recipe_needs_recipe=name in BEHIND,
        worth=(BEHIND_ELEMENTS[0] if name in BEHIND else WORTH_ELEMENTS, WORTH_ELEMENTS),
        **{"bench": ((*BENCH, *values[0]),), **more},
    )  # fmt: skip
    _OPS.append(op)
    where = "torch.nn.functional" if hasattr(F, name) else "torch"
    function = table.function(op, parameters, _DOCUMENT.format(f"{where}.{name}", inspect.cleandoc(text)), keeps)
    if base is None:
        return function
    return function, table.module(op, base, base.__name__, function, keeps[0] if keeps else None)


relu, ReLU = _row(
    "relu",
    """y = max(x, 0), dx = dy where x > 0, else 0.

    keep="output" keeps y as torch does. Bits are better where nothing else keeps y: before a pooling, a dropout, an
    addition, a concatenation, a frozen layer. Before a linear layer or a convolution, which keeps its input, the output
    costs nothing more, and bits would. Raises ValueError for another `keep`.

    Nair and Hinton, "Rectified Linear Units Improve Restricted Boltzmann Machines", ICML 2010.

    >>> x = torch.tensor([-1.0, 0.0, 2.0], requires_grad=True)
    >>> hfnn.functional.relu(x, prefer="memory").sum().backward()
    >>> x.grad
    tensor([0., 0., 1.])""",
    F.relu, nn.ReLU, lambda x: torch.where(x > 0, x, 0),
    lambda input, inplace=False: None if inplace else (RELU,), kinks=lambda: (0,), keeps=("bits", "output"),
)  # fmt: skip

leaky_relu, LeakyReLU = _row(
    "leaky_relu",
    """y = x where x > 0, else a x; dx = dy where x > 0, else a dy.

    torch's own op runs for a slope of 0 too, whose gradient of an infinity is a NaN that relu's is not.

    Maas, Hannun and Ng, "Rectifier Nonlinearities Improve Neural Network Acoustic Models", 2013.""",
    F.leaky_relu, nn.LeakyReLU, lambda x, negative_slope=0.01: torch.where(x > 0, x, x * negative_slope),
    lambda input, negative_slope=0.01, inplace=False: None if inplace or negative_slope == 0 else (
        LEAKY_RELU, real(negative_slope), 0.0, 1.0, real(negative_slope)
    ),
    values=((0.01,), (-0.3,)), kinks=lambda slope: (0,),
)  # fmt: skip

# Before hardtanh: `nn.ReLU6` is an `nn.Hardtanh`, and `convert` takes the first that fits.
relu6, ReLU6 = _row(
    "relu6",
    """y = min(max(x, 0), 6), dx = dy where 0 < x < 6, else 0.

    Krizhevsky, "Convolutional Deep Belief Networks on CIFAR-10", 2010.""",
    F.relu6, nn.ReLU6, lambda x: torch.where(x > 0, torch.where(x < 6, x, 6), 0),
    lambda input, inplace=False: None if inplace else (HARDTANH, 0.0, 6.0), kinks=lambda: (0, 6),
)  # fmt: skip

hardtanh, Hardtanh = _row(
    "hardtanh",
    """y = min(max(x, a), b), dx = dy where a < x < b, else 0. `clamp` is the same but for its gradient at the bounds.

    Collobert, "Large Scale Machine Learning", 2004.""",
    F.hardtanh, nn.Hardtanh,
    lambda x, min_val=-1.0, max_val=1.0: torch.where(x > min_val, torch.where(x < max_val, x, max_val), min_val),
    lambda input, min_val=-1.0, max_val=1.0, inplace=False: (
        (HARDTANH, real(min_val), real(max_val)) if min_val <= max_val and not inplace else None
    ),
    values=((-1.0, 1.0), (-0.5, 4.0)),
)  # fmt: skip


def _clamp(x, min=None, max=None):
    x = x if min is None else torch.where(x >= min, x, min)
    return x if max is None else torch.where(x <= max, x, max)


def _bounds(input, min=None, max=None):
    """The numbers of clamp, with bounds in the dtype of x, as torch compares with them.

    None for cases that torch must handle or refuse: a bound of another type, a NaN, a number outside the dtype's range,
    and no bound at all.
    """
    if min is None and max is None:
        return None
    found = []
    for bound, absent in ((min, -math.inf), (max, math.inf)):
        bound = absent if bound is None else bound
        if type(bound) not in (int, float):
            return None
        near = _rounded(float(bound), input.dtype)
        if math.isnan(near) or (math.isinf(near) and not math.isinf(bound)):
            return None
        found.append(near)
    return CLAMP, *found


clamp = _row(
    "clamp",
    """y = min(max(x, a), b), dx = dy where a <= x <= b, else 0.

    With tensors as bounds torch's own op runs.

    >>> hfnn.functional.clamp(torch.tensor([-3.0, 0.5, 3.0]), min=-1, max=1)
    tensor([-1.0000,  0.5000,  1.0000])""",
    torch.clamp, None, _clamp, _bounds, values=((-1.0, 2.0), (-0.5, None), (None, 3.0)),
    kinks=lambda *bounds: [bound for bound in bounds if bound is not None],
    floor=1 << 14, probe=(0.0,), bench=((*BENCH, -1.0, 1.0),),
)  # fmt: skip

threshold, Threshold = _row(
    "threshold", "y = x where x > threshold, else value; dx = dy where x > threshold, else 0.",
    F.threshold, nn.Threshold, lambda x, threshold, value: torch.where(x > threshold, x, value),
    lambda input, threshold, value, inplace=False: None if inplace else (THRESHOLD, real(threshold), real(value)),
    values=((0.5, -2.0),), kinks=lambda threshold, value: (threshold,), probe=(0.0, 0.0), bench=((*BENCH, 0.0, 0.0),),
)  # fmt: skip

hardshrink, Hardshrink = _row(
    "hardshrink",
    """y = 0 where |x| <= lambd, else x; dx = 0 there, else dy.

    Donoho and Johnstone, "Ideal spatial adaptation by wavelet shrinkage", Biometrika 1994.""",
    F.hardshrink, nn.Hardshrink, lambda x, lambd=0.5: torch.where(x.abs() <= lambd, 0, x),
    lambda input, lambd=0.5: (HARDSHRINK, _rounded(lambd, input.dtype)),
    values=((0.5,),), kinks=lambda lambd: (-lambd, lambd),
)  # fmt: skip

softshrink, Softshrink = _row(
    "softshrink",
    """y = x - lambd where x > lambd, x + lambd where x < -lambd, else 0; dx = 0 there, else dy.

    y is computed with lambd as it is given, and dx compares with it in the dtype of x, on every device as in torch's
    code for the CPU. Its CUDA kernels round it to the dtype of x for y too: another y in 16 bits where it is no such
    number.

    Donoho, "De-noising by soft-thresholding", IEEE Transactions on Information Theory 1995.""",
    F.softshrink, nn.Softshrink,
    lambda x, lambd=0.5: torch.where(x > lambd, x - lambd, torch.where(x < -lambd, x + lambd, x * 0)),
    lambda input, lambd=0.5: (SOFTSHRINK, real(lambd), _rounded(lambd, input.dtype)) if lambd >= 0 else None,
    values=((0.5,),), kinks=lambda lambd: (-lambd, lambd),
)  # fmt: skip

hardsigmoid, Hardsigmoid = _row(
    "hardsigmoid",
    """y = min(max(x + 3, 0), 6) / 6, dx = dy / 6 where -3 < x < 3, else 0.

    y is a quotient on every device, as in torch's code for the CPU; its CUDA kernels multiply with a sixth, and are an
    ulp off in places.

    Courbariaux, Bengio and David, "BinaryConnect", NeurIPS 2015; with these numbers in Howard et al., "Searching for
    MobileNetV3", ICCV 2019.""",
    F.hardsigmoid, nn.Hardsigmoid, lambda x: torch.where(x > -3, torch.where(x < 3, (x + 3) / 6, 1), 0),
    lambda input, inplace=False: None if inplace else (HARDSIGMOID, 0.0, 0.0, 1 / 6), kinks=lambda: (-3, 3),
)  # fmt: skip

OPS = tuple(_OPS)
