"""Gaussian error linear unit.

    y = x * Phi(x) = x / 2 * (1 + erf(x / sqrt(2)))                                 approximate="none"
    y = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))                     approximate="tanh"

Hendrycks and Gimpel, "Gaussian Error Linear Units (GELUs)", 2016. https://arxiv.org/abs/1606.08415
"""

import math

import torch
from torch import nn

from hfnn import recipe
from hfnn.kernel import FLOATS, Function, Kernel, Op, double_backward
from hfnn.ops import recode
from hfnn.ops.layout import _dense, in_order, ordered

_gelu = torch._C._nn.gelu


def reference(x, *, approximate="none"):
    """The definition, in the dtype of x."""
    if approximate == "tanh":
        return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / 2 * (1 + torch.erf(x / math.sqrt(2)))


def sample(case, dtype, device, generator=None):
    """Arguments of `gelu` for x of shape `case[:-1]`; the last entry of a case is `approximate`."""
    *shape, approximate = case
    return (torch.randn(shape, generator=generator).mul(2).to(dtype).to(device),), {"approximate": approximate}


OP = Op(
    "gelu",
    reference,
    _gelu,
    kernels=(
        Kernel("cuda", "hfnn._C:cuda.gelu", "cuda", min_elements=1 << 24),
        Kernel("triton", "hfnn.kernels.gelu", "cuda", min_elements=1 << 24),
        Kernel("cpp", "hfnn._C:cpu.gelu", "cpu", (*FLOATS, torch.float64), min_elements=1 << 15),
    ),
    sample=sample,
    cases=tuple((*shape, form) for shape in ((1,), (3, 769), (64, 1024), (0, 4)) for form in ("none", "tanh")),
    small=(3, 5, "none"),
    bench=((16384, 8192, "none"), (16384, 8192, "tanh")),
    likes={"erf form": {"approximate": "none"}, "tanh form": {"approximate": "tanh"}},
)
_passes = OP.passes


class _GELU(Function):
    @staticmethod
    def forward(ctx, x, approximate, out, kernel):
        recipe.save(ctx, x)
        ctx.approximate, ctx.out, ctx.kernel = approximate, out, kernel
        build = _build(approximate, out, kernel)
        return recipe.attach(ctx, build(x), build, x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = recipe.saved(ctx)
        if torch.is_grad_enabled():
            formula = lambda x: _gelu(x.to(ctx.out), approximate=ctx.approximate)  # noqa: E731
            return *double_backward(formula, (x,), ctx.needs_input_grad[:1], dy), None, None, None
        return _gradient(dy, x, ctx.approximate, ctx.kernel), None, None, None


def _gradient(dy, x, approximate, kernel):
    dy, x = ordered(dy, x)
    dx = torch.empty_like(x)
    kernel.backward(in_order(dy), in_order(x), in_order(dx), approximate == "tanh", kernel.queue(x))
    return dx


def _build(approximate, out, kernel, into=None):
    """y of x: in forward, and again in backward, there as a cast to the dtype `into` leaves it."""

    def build(x):
        if torch.is_grad_enabled():
            return _gelu(x.to(out), approximate=approximate).to(into or out)
        x = _dense(x)
        y = torch.empty_like(x, dtype=into or out)
        compute = kernel.rebuild if into else kernel.forward
        compute(in_order(x), in_order(y), approximate == "tanh", kernel.queue(x))
        return y

    build.into = lambda dtype: _build(approximate, out, kernel, dtype)
    return build


def _run(x, *how):
    return _GELU.apply(x, *how) if torch.is_grad_enabled() else _build(*how)(x)


def _keeping_output(x, approximate, kernel):
    return recode.keeping_output(
        x,
        ("gelu", approximate, kernel.name),
        _build(approximate, x.dtype, kernel),
        lambda dy, x: _gradient(dy, x, approximate, kernel),
        lambda x: _gelu(x, approximate=approximate),
    )


def gelu(input, approximate="none", *, prefer="auto", keep="input"):
    """`torch.nn.functional.gelu`, keeping its input and letting its consumer rebuild the output.

    Shapes: any; the result has the shape and dtype of input. prefer: "auto" | "memory" | "speed" (`hfnn.convert`).
    keep="output": bfloat16 keeps y and five bits an element instead, with the same gradient to the bit: worth it where
    the consumer is not hfnn's and keeps y anyway (hfnn/ops/recode.py). Then y must not be written to before backward.
    Raises what torch raises, and ValueError for an unknown `keep`.
    """
    if keep != "input":
        recode.check(keep)
    kernel = None if _passes(input, prefer) else OP.select(input, prefer=prefer)
    if kernel is None or approximate not in ("none", "tanh"):
        # A keyword costs torch a third of a microsecond.
        return _gelu(input) if approximate == "none" else _gelu(input, approximate=approximate)
    y = _keeping_output(input, approximate, kernel) if keep == "output" else None
    return _run(input, approximate, input.dtype, kernel) if y is None else y


def fused(x, out, prefer, *, approximate):
    """The room's result in dtype `out`, which is no narrower than x; None where no kernel takes the call.

    For modules that compute this op in their own words (hfnn/lookalike.py): their own code is what runs otherwise.
    Under autocast some of them return float32 from a narrower x.
    """
    kernel = OP.select(x, prefer=prefer)
    return None if kernel is None else _run(x, approximate, out, kernel)


class GELU(nn.GELU):
    """`torch.nn.GELU`: the same arguments and defaults. `prefer` is set by `hfnn.convert`; `keep` as in `gelu`."""

    prefer, keep = "auto", "input"

    def forward(self, input):
        return gelu(input, self.approximate, prefer=self.prefer, keep=self.keep)


OP.modules[nn.GELU] = GELU
