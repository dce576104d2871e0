"""Sigmoid linear unit, also called swish.

    y = x * sigmoid(x) = x / (1 + exp(-x))

Hendrycks and Gimpel, "Gaussian Error Linear Units (GELUs)", 2016. https://arxiv.org/abs/1606.08415
Elfwing, Uchibe and Doya, "Sigmoid-Weighted Linear Units for Neural Network Function Approximation in Reinforcement
Learning", 2017. https://arxiv.org/abs/1702.03118
"""

import torch
from torch import nn

from hfnn import recipe
from hfnn.kernel import FLOATS, Kernel, Op, double_backward
from hfnn.ops import recode
from hfnn.ops.layout import _dense, in_order, ordered

_silu = torch._C._nn.silu


def reference(x):
    """The definition, in the dtype of x."""
    return x * torch.sigmoid(x)


def sample(case, dtype, device, generator=None):
    """Arguments of `silu` for x of shape `case`."""
    return (torch.randn(case, generator=generator).mul(2).to(dtype).to(device),), {}


OP = Op(
    "silu",
    reference,
    _silu,
    kernels=(
        Kernel("triton", "hfnn.kernels.silu", "cuda", min_elements=1 << 24),
        Kernel("cpp", "hfnn._C:cpu.silu", "cpu", (*FLOATS, torch.float64), min_elements=1 << 18),
    ),
    sample=sample,
    cases=((1,), (3, 769), (64, 1024), (0, 4)),
    small=(3, 5),
    bench=((16384, 14336),),
    likes={"": {}},
)
_passes = OP.passes


class _SiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, out, kernel):
        recipe.save(ctx, x)
        ctx.out, ctx.kernel = out, kernel
        build = _build(out, kernel)
        return recipe.attach(ctx, build(x), build, x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = recipe.saved(ctx)
        if torch.is_grad_enabled():
            return *double_backward(lambda x: _silu(x.to(ctx.out)), (x,), ctx.needs_input_grad[:1], dy), None, None
        return _gradient(dy, x.to(ctx.out), ctx.kernel).to(x.dtype), None, None


def _gradient(dy, x, kernel):
    dy, x = ordered(dy, x)
    dx = torch.empty_like(x)
    kernel.backward(in_order(dy), in_order(x), in_order(dx), kernel.queue(x))
    return dx


def _build(out, kernel):
    """y of x: in forward, and again in backward."""

    def build(x):
        x = x.to(out)  # the kernels compute in one dtype; x itself, often the narrower, is what is kept
        if torch.is_grad_enabled():
            return _silu(x)
        x = _dense(x)
        y = torch.empty_like(x)
        kernel.forward(in_order(x), in_order(y), kernel.queue(x))
        return y

    return build


def _run(x, *how):
    return _SiLU.apply(x, *how) if torch.is_grad_enabled() else _build(*how)(x)


def _keeping_output(x, kernel):
    build = _build(x.dtype, kernel)
    return recode.keeping_output(x, ("silu", kernel.name), build, lambda dy, x: _gradient(dy, x, kernel), _silu)


def silu(input, inplace=False, *, prefer="auto", keep="input"):
    """`torch.nn.functional.silu`, keeping its input and letting its consumer rebuild the output.

    Shapes: any; the result has the shape and dtype of input. prefer: "auto" | "memory" | "speed" (`hfnn.convert`).
    keep: as in `hfnn.functional.gelu`. With inplace=True torch's own op runs. Raises what torch raises, and ValueError
    for an unknown `keep`.
    """
    if keep != "input":
        recode.check(keep)
    if inplace:
        return torch._C._nn.silu_(input)
    kernel = None if _passes(input, prefer) else OP.select(input, prefer=prefer)
    if kernel is None:
        return _silu(input)
    y = _keeping_output(input, kernel) if keep == "output" else None
    return _run(input, input.dtype, kernel) if y is None else y


def fused(x, out, prefer):
    """The room's result in dtype `out`, which is no narrower than x; None where no kernel takes the call.

    For modules that compute this op in their own words (hfnn/lookalike.py): their own code is what runs otherwise.
    """
    kernel = OP.select(x, prefer=prefer)
    return None if kernel is None else _run(x, out, kernel)


class SiLU(nn.SiLU):
    """`torch.nn.SiLU`: the same arguments and defaults. `prefer` is set by `hfnn.convert`; `keep` as in `silu`."""

    prefer, keep = "auto", "input"

    def forward(self, input):
        return silu(input, self.inplace, prefer=self.prefer, keep=self.keep)


OP.modules[nn.SiLU] = SiLU
