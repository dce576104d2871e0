"""Smooth functions of one input (csrc/unary.h): what is kept for backward, and how.

Where the derivative can be told from y (sigmoid, tanh, softplus, logsigmoid, elu, softsign, exp, sqrt), y is kept and x
is not: the next matrix product keeps y anyway, so it costs nothing more, where torch keeps x besides for most of them.
A second derivative is the first one's expression in y, differentiated: in a backward under create_graph=True the saved
output comes with its own graph, which leads on to x. As with torch's sigmoid, y must not be written to before backward.

Where it cannot (mish, hardswish, quick_gelu), x is kept, y carries a recipe, and a consumer rebuilds it. Or, with
keep="output", y and five bits are kept (recode.py).

The slope at a NaN is a NaN on every device, as in torch's vector code for the CPU. Its CUDA kernels give elu, selu,
celu and hardswish that of one of the branches.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hfnn import recipe
from hfnn.kernel import FLOATS, Kernel, Op, double_backward, forced
from hfnn.ops import recode
from hfnn.ops.pointwise_loss import _alike, _dense, _flat

SHAPES = ((1,), (3, 769), (64, 1024), (0, 4))  # for the contract tests, of every function here


def kernels(min_elements: int) -> tuple[Kernel, ...]:
    """The kernels of every function here; min_elements: on the CPU."""
    return (
        Kernel("triton", "hfnn.kernels.unary", "cuda", min_elements=1 << 24),
        Kernel("cpp", "hfnn._C:cpu.unary", "cpu", (*FLOATS, torch.float64), min_elements=min_elements),
    )


def normal(case, dtype, device, generator=None):
    """x of shape `case`, the one argument of a function without options."""
    return (torch.randn(case, generator=generator).mul(2).to(dtype).to(device),), {}


@dataclass(frozen=True)
class Kept:
    """A function whose derivative is told from its output. kind: its number in csrc/unary.h.

    gradient(dy, y, a, b, c): dx by differentiable torch ops, in float32 or wider; fast: dtypes in which a function of
    which torch keeps no more than hfnn is not slower on the CPU than torch's.
    """

    kind: int
    gradient: Callable
    fast: tuple[torch.dtype, ...] = FLOATS


def wide(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in float32, float64 as they are."""
    return tuple(t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors)


def _forward(x, kind, options, kernel):
    x = _dense(x)
    y = torch.empty_like(x)
    kernel.forward(_flat(x), _flat(y), kind, *options, kernel.queue(x))
    return y


def _backward(dy, kept, kind, options, kernel):
    kept, dy = _alike(kept, dy)
    dx = torch.empty_like(kept)
    kernel.backward(_flat(dy), _flat(kept), _flat(dx), kind, *options, kernel.queue(kept))
    return dx


class _KeepsOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, function, options, kernel):
        y = _forward(x, function.kind, options, kernel)
        ctx.save_for_backward(y)
        ctx.function, ctx.options, ctx.kernel = function, options, kernel
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return ctx.function.gradient(dy, y, *ctx.options).to(y.dtype), None, None, None
        return _backward(dy, y, ctx.function.kind, ctx.options, ctx.kernel), None, None, None


def keeping_output(op: Op, function: Kept, input, prefer: str, a=0.0, b=0.0, c=0.0):
    """The function of input by a kernel, or None where torch's own op is to run, or to raise."""
    kernel = op.select(input, prefer=prefer)
    if kernel is None:
        return None
    if not op.saves and input.is_cpu and input.dtype not in function.fast and forced() is None:
        return None
    input = input.to(op.out_dtype(input))  # under autocast, CUDA's exp and softplus are float32
    options = float(a), float(b), float(c)
    if torch.is_grad_enabled():
        return _KeepsOutput.apply(input, function, options, kernel)
    return _forward(input, function.kind, options, kernel)


@dataclass(frozen=True)
class Rebuilt:
    """A function that keeps its input. kind: its number in csrc/unary.h; formula: torch's, for second derivatives."""

    kind: int
    formula: Callable


NO_OPTIONS = (0.0, 0.0, 0.0)


class _KeepsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, function, out, kernel):
        recipe.save(ctx, x)
        ctx.function, ctx.out, ctx.kernel = function, out, kernel
        build = _build(function, out, kernel)
        return recipe.attach(ctx, build(x), build, x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = recipe.saved(ctx)
        if torch.is_grad_enabled():
            formula = lambda x: ctx.function.formula(x.to(ctx.out))  # noqa: E731
            return *double_backward(formula, (x,), ctx.needs_input_grad[:1], dy), None, None, None
        dx = _backward(dy, x.to(ctx.out), ctx.function.kind, NO_OPTIONS, ctx.kernel)
        return dx.to(x.dtype), None, None, None


def _build(function, out, kernel):
    """y of x: in forward, and again in backward."""

    def build(x):
        x = x.to(out)  # the kernels compute in one dtype; x itself, often the narrower, is what is kept
        if torch.is_grad_enabled():
            return function.formula(x)
        return _forward(x, function.kind, NO_OPTIONS, kernel)

    return build


def _rebuilding(x, *how):
    return _KeepsInput.apply(x, *how) if torch.is_grad_enabled() else _build(*how)(x)


def keeping_input(op: Op, function: Rebuilt, input, prefer: str, keep: str):
    """The function of input by a kernel, or None where torch's own op is to run, or to raise."""
    kernel = op.select(input, prefer=prefer)
    if kernel is None:
        return None
    if keep == "output":
        y = recode.keeping_output(
            input,
            (op.name, kernel.name),
            _build(function, input.dtype, kernel),
            lambda dy, x: _backward(dy, x, function.kind, NO_OPTIONS, kernel),
            function.formula,
        )
        if y is not None:
            return y
    return _rebuilding(input, function, input.dtype, kernel)


def fused(op: Op, function: Rebuilt, x, out, prefer: str):
    """The result in dtype `out`, which is no narrower than x; None where no kernel takes the call.

    For modules that compute the op in their own words (hfnn/lookalike.py): their own code is what runs otherwise.
    """
    kernel = op.select(x, prefer=prefer)
    return None if kernel is None else _rebuilding(x, function, out, kernel)
