"""Smooth functions of one input (csrc/unary.h): what is kept for backward, and how.

Where torch keeps y (sigmoid, tanh, exp, sqrt), so does the room. A second derivative is the first one's expression in
y, differentiated: in a backward under create_graph=True the saved output comes with its own graph, which leads on to x.
As in torch, y must not be written to before backward.

Where torch keeps x (elu, selu, celu, softplus, logsigmoid, softsign, mish, hardswish, quick_gelu), x is kept, y carries
a recipe, and a consumer rebuilds it. Though some of them could tell their derivative from y, y is the user's: to write
to, and to hang hooks on that a second derivative would run again. With keep="output", y and five bits are kept
(recode.py).

The slope at a NaN is a NaN on every device, as in torch's vector code for the CPU. Its CUDA kernels give elu, selu,
celu and hardswish that of one of the branches.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hfnn import recipe
from hfnn.kernel import FLOATS, Kernel, Op, double_backward, forced
from hfnn.ops import recode
from hfnn.ops.layout import _dense, _flat, ordered

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
    """A function that keeps its output. kind: its number in csrc/unary.h.

    gradient(dy, y): dx by differentiable torch ops, in float32 or wider; fast: dtypes in which a function of
    which torch keeps no more than hfnn is not slower on the CPU than torch's.
    """

    kind: int
    gradient: Callable
    fast: tuple[torch.dtype, ...] = FLOATS


def wide(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in float32, float64 as they are."""
    return tuple(t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors)


def _forward(x, kind, kernel, a=0.0, b=0.0, c=0.0):
    x = _dense(x)
    y = torch.empty_like(x)
    kernel.forward(_flat(x), _flat(y), kind, a, b, c, kernel.queue(x))
    return y


def _backward(dy, kept, kind, kernel):
    dy, kept = ordered(dy, kept)
    dx = torch.empty_like(kept)
    kernel.backward(_flat(dy), _flat(kept), _flat(dx), kind, 0.0, 0.0, 0.0, kernel.queue(kept))
    return dx


class _KeepsOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, function, kernel):
        y = _forward(x, function.kind, kernel)
        ctx.save_for_backward(y)
        ctx.function, ctx.kernel = function, kernel
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return ctx.function.gradient(dy, y).to(y.dtype), None, None
        return _backward(dy, y, ctx.function.kind, ctx.kernel), None, None


def keeping_output(op: Op, function: Kept, input, prefer: str):
    """The function of input by a kernel, or None where torch's own op is to run, or to raise."""
    kernel = op.select(input, prefer=prefer)
    if kernel is None:
        return None
    if not op.saves and input.is_cpu and input.dtype not in function.fast and forced() is None:
        return None
    input = input.to(op.out_dtype(input))  # under autocast, CUDA's exp is float32
    if torch.is_grad_enabled():
        return _KeepsOutput.apply(input, function, kernel)
    return _forward(input, function.kind, kernel)


@dataclass(frozen=True)
class Rebuilt:
    """A function that keeps its input. kind: its number in csrc/unary.h.

    formula(x, *options): torch's, for second derivatives; gradient(dy, x, *options): torch's own, in one pass, or None
    for the kernel's, which has no options; through_y: whether that is of y, which is computed again for it.
    """

    kind: int
    formula: Callable
    gradient: Callable | None = None
    through_y: bool = False

    def backward(self, dy, x, options, kernel):
        if self.gradient is not None:
            dy, x = ordered(dy, x)  # torch's bits depend on the layout
            return self.gradient(dy, x, *options)
        kept = _forward(x, self.kind, kernel) if self.through_y else x
        return _backward(dy, kept, self.kind, kernel)


class _KeepsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, function, options, out, kernel):
        recipe.save(ctx, x)
        ctx.function, ctx.options, ctx.out, ctx.kernel = function, options, out, kernel
        build = _build(function, options, out, kernel)
        return recipe.attach(ctx, build(x), build, x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = recipe.saved(ctx)
        if torch.is_grad_enabled():
            formula = lambda x: ctx.function.formula(x.to(ctx.out), *ctx.options)  # noqa: E731
            return *double_backward(formula, (x,), ctx.needs_input_grad[:1], dy), None, None, None, None
        dx = ctx.function.backward(dy, x.to(ctx.out), ctx.options, ctx.kernel)
        return dx.to(x.dtype), None, None, None, None


def _build(function, options, out, kernel):
    """y of x: in forward, and again in backward."""

    def build(x):
        x = x.to(out)  # the kernels compute in one dtype; x itself, often the narrower, is what is kept
        if torch.is_grad_enabled():
            return function.formula(x, *options)
        return _forward(x, function.kind, kernel, *options)

    return build


def _rebuilding(x, *how):
    return _KeepsInput.apply(x, *how) if torch.is_grad_enabled() else _build(*how)(x)


def keeping_input(op: Op, function: Rebuilt, input, prefer: str, keep: str = "input", options=()):
    """The function of input by a kernel, or None where torch's own op is to run, or to raise."""
    kernel = op.select(input, prefer=prefer)
    if kernel is None:
        return None
    if keep == "output":
        y = recode.keeping_output(
            input,
            (op.name, kernel.name),
            _build(function, options, input.dtype, kernel),
            lambda dy, x: function.backward(dy, x, options, kernel),
            lambda x: function.formula(x, *options),
        )
        if y is not None:
            return y
    # Under autocast, CUDA's softplus is float32.
    return _rebuilding(input, function, options, op.out_dtype(input), kernel)


def fused(op: Op, function: Rebuilt, x, out, prefer: str):
    """The result in dtype `out`, which is no narrower than x; None where no kernel takes the call.

    For modules that compute the op in their own words (hfnn/lookalike.py): their own code is what runs otherwise.
    """
    kernel = op.select(x, prefer=prefer)
    return None if kernel is None else _rebuilding(x, function, (), out, kernel)
