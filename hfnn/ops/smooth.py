"""Smooth functions of one input: one row per function, and what is kept for backward.

If torch keeps y (sigmoid, tanh, exp, sqrt), so does the room. For a second derivative, the first one's expression in y
is differentiated: in a backward under create_graph=True the saved output has its own graph, which leads to x. As in
torch, y must not be written to before backward.

If torch keeps x, x is kept, y carries a recipe, and a consumer rebuilds it. Some of these functions could compute their
derivative from y. But users may write to y, and may hang hooks on it that a second derivative would run again.

The slope at a NaN is a NaN on every device, as in torch's vector code for the CPU. torch's CUDA kernels use the slope
of one of the branches for elu, selu, celu and hardswish.
"""

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from hfnn.core import native
from hfnn.core.context import compiling, context, on_gpu
from hfnn.core.kernel import FLOATS, Kernel, Op, forced, kernels
from hfnn.core.node import Function, below, described, double_backward, select
from hfnn.ops import table
from hfnn.ops.behind import behind
from hfnn.ops.layout import _dense, ambiguous, in_order, laid, like, ordered
from hfnn.ops.table import BENCH, real

_nn = torch._C._nn  # not affected by patches
ALL_FLOATS = (*FLOATS, torch.float64)
_OPS: list[Op] = []


@dataclass(frozen=True)
class Smooth(Op):
    """A row.

    numbers(*torch's arguments after the input): the kernel arguments after the tensors, or None for torch's own op.
    formula(x, *numbers): torch's op, for second derivatives. gradient(dy, kept, *numbers): dx by torch's ops; None for
    the kernel's. casts: kernels support a result of another dtype than x's; otherwise x is cast first. keeps_output: y
    is kept, not x; gradient is then differentiable, in float32 or wider, and only used for that. fast: for ops where
    torch keeps no more than hfnn, the dtypes that are not slower on the CPU than torch's. label: the name that autograd
    and `hfnn.memory` show. through_y: the kernel's backward uses y, which is computed again for it. contiguous: torch's
    result on the CPU is contiguous for any input; otherwise it has the strides of x, and the gradient those of dy, also
    in dimensions of size 1. like_x: the gradient has x's layout, whatever dy's.
    """

    numbers: Callable = lambda: ()
    formula: Callable | None = None
    gradient: Callable | None = None
    casts: bool = False
    keeps_output: bool = False
    fast: tuple[torch.dtype, ...] = ALL_FLOATS
    label: str = ""
    through_y: bool = False
    contiguous: bool = False
    like_x: bool = False

    def run(self, input, prefer: str, arguments: tuple):
        """The result by a kernel, or None if torch's own op must run, or raise."""
        y = self.native(input, None, prefer, *arguments)
        if y is not NotImplemented:
            return y
        numbers = table.numbers(self, *arguments)
        if numbers is None:
            return None if context(input) else behind(self.name, input, arguments, prefer)
        if self.in_cpp:
            return self.left(input, prefer=prefer)
        kernel = self.select(input, prefer=prefer) if self.keeps_output else select(self, input, prefer=prefer)
        if kernel is None:
            return None
        if self.keeps_output:
            if not on_gpu(input) and input.dtype not in self.fast and forced() is None:
                return None
            input = input.to(self.out_dtype(input))  # under autocast, CUDA's exp is float32
            return self._function.apply(input, self, kernel) if torch.is_grad_enabled() else self.forward(input, kernel)
        if self.contiguous:
            if on_gpu(input) and ambiguous(input):
                return None
            input = input if on_gpu(input) else input.contiguous()
        # Under autocast, CUDA's softplus is float32.
        how = kernel, self, numbers, self.out_dtype(input)
        return self._node(below(_build, how, input), how, input)

    def fused(self, x, out, prefer: str, **options):
        """The result in dtype `out`, which is not narrower than x; None if no kernel accepts the call.

        For modules that compute this op in their own words (hfnn/patterns/lookalike.py), whose own code runs otherwise.
        Under autocast some of them return float32 from a narrower x.
        """
        y = None if compiling() else self.native(x, out, prefer, *options.values())
        return self.left(x, out=out, prefer=prefer) if y is NotImplemented else y

    @property
    def in_cpp(self) -> bool:
        """Whether its node is in C++ (csrc/autograd/smooth.cpp)."""
        return self.gradient is None and not (self.keeps_output or self.through_y or self.contiguous)

    @functools.cached_property
    def native(self) -> Callable:
        """The call in C++, (input, dtype of the result or None for torch's, prefer, *arguments)."""
        return native.call("smooth", self, self._second) if self.in_cpp else lambda *_: NotImplemented

    def numbers_of(self, arguments: tuple) -> tuple | None:
        return table.numbers(self, *arguments)

    def _second(self, dy, x, out, numbers):
        """The gradient by differentiable ops."""
        return double_backward(lambda x: self.formula(x.to(out), *numbers), (x,), (True,), dy)

    def forward(self, x, kernel, numbers=()):
        """y of x by a kernel."""
        x = _dense(x)
        y = like(x)
        kernel.forward(in_order(x), in_order(y), *(numbers or self.numbers()), kernel.queue(x))
        return y

    def backward(self, dy, x, numbers, kernel):
        """dx of dy and the kept tensor."""
        if self.gradient is not None and not self.keeps_output:
            if 1 not in dy.shape:  # otherwise torch's strides depend on the given ones
                dy, x, _ = ordered(dy, x)  # torch's bits depend on the layout
            return self.gradient(dy, x, *numbers)
        kept = self.forward(x, kernel, numbers) if self.through_y else x
        in_step, kept, dx = ordered(dy, kept)
        kernel.backward(in_order(in_step), in_order(kept), in_order(dx), *numbers, kernel.queue(kept))
        return laid(dx, dy.stride()) if self.contiguous and ambiguous(dy) else dx

    @functools.cached_property
    def _node(self) -> Callable:
        return described(f"_{self.label}", "x", _build, _gradients, _second)

    @functools.cached_property
    def _function(self) -> type:
        return type(f"_{self.label}", (_KeepsOutput,), {})


class _KeepsOutput(Function):
    @staticmethod
    def forward(ctx, x, op, kernel):
        ctx.set_materialize_grads(False)
        y = op.forward(x, kernel)
        ctx.save_for_backward(y)
        ctx.op, ctx.kernel = op, kernel
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            wide = torch.promote_types(y.dtype, torch.float32)
            return ctx.op.gradient(dy.to(wide), y.to(wide)).to(y.dtype), None, None
        return ctx.op.backward(dy, y, ctx.op.numbers(), ctx.kernel), None, None


# Of those that keep their input, without a node of their own in C++.


def _build(how, x):
    kernel, op, numbers, out = how
    return op.forward(x.to(out), kernel, numbers)


def _gradients(dy, needs, how, x):
    kernel, op, numbers, out = how
    return (op.backward(dy, x.to(out), numbers, kernel).to(x.dtype),)


def _second(dy, needs, how, x):
    _, op, numbers, out = how
    return double_backward(lambda x: op.formula(x.to(out), *numbers), (x,), needs, dy)


def _document(op, text, kept) -> str:
    known = "torch.nn.functional" if hasattr(F, op.name) else "torch"
    text = inspect.cleandoc(text)
    lines = [
        text if op.torch is op.reference else f"`{known}.{op.name}`: {text}",
        "",
        "y is kept, as by torch." if kept else "Keeps its input, and lets its consumer rebuild the output.",
        "Shapes: any; the result has the shape and dtype that torch gives it.",
    ]
    lines[-1] += " Raises what torch raises."
    return "\n".join(lines)


def _normal(shape, generator, *options):
    return torch.randn(shape, generator=generator).mul(2)


def _row(name, text, torchs, base, reference, floor, numbers, values=((),), draw=_normal, named=False, **more):
    """The function of an op, and its module if there is one. text: the definition and its source.

    base: torch's class, the name of a class that torch does not have, or None. floor: the number of elements from which
    the C++ kernel is faster than torch. values: options of the contract's cases; draw(shape, generator, *options): an
    input for them. named: torch takes the arguments only by name.
    """
    parameters = list(inspect.signature(numbers).parameters.values())
    names = [p.name for p in parameters]
    kept = more.get("keeps_output", False)
    defaults = {"kernels": kernels("unary", floor), "bench": ((*BENCH, *values[0]),)}
    label, base = (base, nn.Module) if isinstance(base, str) else (base.__name__ if base else name, base)
    op = Smooth(
        name, reference, torchs, label=label, sample=table.sampler(draw, names[: len(values[0])]), numbers=numbers,
        cases=table.cases(values), small=(3, 5, *values[0]), saves=not kept, recipe=not kept, **{**defaults, **more},
    )  # fmt: skip
    _OPS.append(op)
    function = table.function(op, parameters, _document(op, text, kept), named=named)
    if base is None:
        return function
    return function, table.module(op, base, label, function)


# The functions of csrc/unary.h, by their numbers there.


def _kind(number: int) -> Callable:
    return lambda: (number, 0.0, 0.0, 0.0)


def _kind_or_inplace(number: int) -> Callable:
    return lambda inplace=False: None if inplace else (number, 0.0, 0.0, 0.0)


def _without_numbers(formula: Callable) -> Callable:
    return lambda x, *numbers: formula(x)


sigmoid, Sigmoid = _row(
    "sigmoid", "y = 1 / (1 + exp(-x)), dy/dx = y (1 - y).", torch.sigmoid, nn.Sigmoid,
    lambda x: 1 / (1 + torch.exp(-x)), 1 << 22, _kind(0), keeps_output=True, fast=FLOATS,
    gradient=lambda dy, y: dy * (y * (1 - y)),
)  # fmt: skip

tanh, Tanh = _row(
    "tanh", "y = tanh(x), dy/dx = 1 - y^2. In float32 on the CPU torch's own op runs.", torch.tanh, nn.Tanh,
    lambda x: torch.tanh(x), 1 << 15, _kind(1), keeps_output=True, fast=(torch.bfloat16, torch.float16),
    gradient=lambda dy, y: dy * (1 - y * y),
)  # fmt: skip

exp = _row(
    "exp", "y = exp(x), dy/dx = y.", torch.exp, None,
    lambda x: torch.exp(x), 1 << 22, _kind(6), keeps_output=True, fast=FLOATS, gradient=lambda dy, y: dy * y,
)  # fmt: skip

sqrt = _row(
    "sqrt", "y = sqrt(x), dy/dx = 1 / (2 y).", torch.sqrt, None,
    lambda x: torch.sqrt(x), 1 << 19, _kind(7), keeps_output=True, gradient=lambda dy, y: dy / (2 * y),
    draw=lambda shape, generator: _normal(shape, generator).abs().add(1 / 16),  # at 0 the derivative is infinite
)  # fmt: skip


def _softplus(x, beta=1.0, threshold=20.0):
    z = x * beta
    return torch.where(z > threshold, x, (z.clamp(min=0) + torch.log1p(torch.exp(-z.abs()))) / beta)


softplus, Softplus = _row(
    "softplus",
    """y = log(1 + exp(beta x)) / beta, x itself where beta x > threshold; dy/dx = sigmoid(beta x). With beta <= 0
    torch's own op runs.

    Dugas et al., "Incorporating Second-Order Functional Knowledge for Better Option Pricing", 2000.

    >>> hfnn.functional.softplus(torch.tensor([-1.0, 0.0, 30.0]))
    tensor([ 0.3133,  0.6931, 30.0000])""",
    F.softplus, nn.Softplus, _softplus, 1 << 17,
    lambda beta=1, threshold=20: (2, real(beta), real(threshold), 0.0) if beta > 0 else None,
    values=((1.0,), (2.5,)),
    formula=lambda x, kind, beta, threshold, _: _nn.softplus(x, beta, threshold),
    gradient=lambda dy, x, kind, beta, threshold, _: torch.ops.aten.softplus_backward(dy, x, beta, threshold),
)  # fmt: skip

logsigmoid, LogSigmoid = _row(
    "logsigmoid",
    """y = min(x, 0) - log(1 + exp(-|x|)), dy/dx = 1 - exp(y). torch keeps x, and on the CPU a buffer of its size.""",
    F.logsigmoid, nn.LogSigmoid, lambda x: x.clamp(max=0) - torch.log1p(torch.exp(-x.abs())), 1 << 17, _kind(3),
    formula=_without_numbers(_nn.log_sigmoid), through_y=True, contiguous=True,
)  # fmt: skip


# elu, and with other numbers selu and celu: y = scale x for x > 0, else scale alpha (exp(input_scale x) - 1).


def _elu_like(alpha, scale=1.0, input_scale=1.0):
    return 4, real(alpha), scale, input_scale


def _away_from_0(shape, generator, *options):
    """Not within 1e-2 of 0, because the slope may jump there."""
    x = _normal(shape, generator)
    return x + torch.where(x < 0, -1e-2, 1e-2)


_ELU_LIKE = {
    "formula": lambda x, kind, *numbers: _nn.elu(x, *numbers),
    "gradient": lambda dy, x, kind, *numbers: torch.ops.aten.elu_backward(dy, *numbers, False, x),
    "draw": _away_from_0,
}
_SELU = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946

elu, ELU = _row(
    "elu",
    """y = x for x > 0, else alpha (exp(x) - 1).

    Clevert, Unterthiner and Hochreiter, "Fast and Accurate Deep Network Learning by Exponential Linear Units (ELUs)",
    2015. https://arxiv.org/abs/1511.07289""",
    F.elu, nn.ELU, lambda x, alpha=1.0: torch.where(x > 0, x, alpha * torch.expm1(x.clamp(max=0))), 1 << 15,
    lambda alpha=1.0, inplace=False: None if inplace else _elu_like(alpha), values=((1.0,), (1.3,)), **_ELU_LIKE,
)  # fmt: skip

selu, SELU = _row(
    "selu",
    """y = scale x for x > 0, else scale alpha (exp(x) - 1), for two fixed numbers.

    Klambauer et al., "Self-Normalizing Neural Networks", NeurIPS 2017. https://arxiv.org/abs/1706.02515""",
    F.selu, nn.SELU, lambda x: _SELU[1] * torch.where(x > 0, x, _SELU[0] * torch.expm1(x.clamp(max=0))), 1 << 15,
    lambda inplace=False: None if inplace else _elu_like(*_SELU), **_ELU_LIKE,
)  # fmt: skip

celu, CELU = _row(
    "celu",
    """y = x for x > 0, else alpha (exp(x / alpha) - 1). With alpha <= 0 torch's own op runs.

    Barron, "Continuously Differentiable Exponential Linear Units", 2017. https://arxiv.org/abs/1704.07483""",
    F.celu, nn.CELU, lambda x, alpha=1.0: torch.where(x > 0, x, alpha * torch.expm1(x.clamp(max=0) / alpha)), 1 << 15,
    lambda alpha=1.0, inplace=False: _elu_like(alpha, 1.0, 1 / alpha) if alpha > 0 and not inplace else None,
    values=((1.0,), (0.7,)), **_ELU_LIKE,
)  # fmt: skip

softsign, Softsign = _row(
    "softsign",
    """y = x / (1 + |x|), dy/dx = 1 / (1 + |x|)^2 = (1 - |y|)^2.

    torch computes it by three ops and keeps x and 1 + |x|. Where |y| nears 1 the derivative, which is told from y, is
    as exact as y is: to an ulp of 1, not of itself. From a power of two on at which the dtype rounds 1 + |x| to |x|, it
    is 0.""",
    F.softsign, nn.Softsign, lambda x: x / (1 + x.abs()), 1 << 13, _kind(5),
    formula=_without_numbers(F.softsign), through_y=True,
)  # fmt: skip

mish, Mish = _row(
    "mish",
    """y = x tanh(log(1 + exp(x))).

    Misra, "Mish: A Self Regularized Non-Monotonic Activation Function", 2019. https://arxiv.org/abs/1908.08681""",
    F.mish, nn.Mish, lambda x: x * torch.tanh(x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))), 1 << 13,
    _kind_or_inplace(8), likes={"": {}}, formula=_without_numbers(_nn.mish),
)  # fmt: skip


def _hardswish(x):
    """With torch's slopes at -3 and 3."""
    return torch.where(x >= 3, x, torch.where(x <= -3, 0, x * (x + 3) / 6))


def _away_from_3(shape, generator):
    x = _normal(shape, generator)
    return torch.where((x.abs() - 3).abs() < 1e-2, x * 1.02, x)


hardswish, Hardswish = _row(
    "hardswish",
    """y = x min(max(x + 3, 0), 6) / 6; dy/dx = 0 up to -3, 1 from 3 on, else (2 x + 3) / 6.

    Howard et al., "Searching for MobileNetV3", 2019. https://arxiv.org/abs/1905.02244""",
    F.hardswish, nn.Hardswish, _hardswish, 1 << 22, _kind_or_inplace(9), likes={"": {}},
    formula=_without_numbers(_nn.hardswish), draw=_away_from_3,
)  # fmt: skip


def _quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


_HENDRYCKS = 'Hendrycks and Gimpel, "Gaussian Error Linear Units (GELUs)", 2016. https://arxiv.org/abs/1606.08415'

quick_gelu, QuickGELU = _row(
    "quick_gelu",
    f"""x sigmoid(1.702 x), the approximation of gelu in CLIP, in one op; without a kernel by torch's.

    {_HENDRYCKS}""",
    _quick_gelu, "QuickGELU", _quick_gelu, 1 << 15, _kind(10), likes={"": {}},
    formula=_without_numbers(_quick_gelu),
)  # fmt: skip


def _relu_squared(x):
    return torch.square(F.relu(x))


relu_squared, ReLUSquared = _row(
    "relu_squared",
    """max(x, 0)^2, in one op; without a kernel by torch's two, of which both keep a tensor.

    So et al., "Primer: Searching for Efficient Transformers for Language Modeling", 2021.
    https://arxiv.org/abs/2109.08668""",
    _relu_squared, "ReLUSquared", _relu_squared, 1 << 15, _kind(11), likes={"": {}},
    formula=_without_numbers(_relu_squared), like_x=True,
)  # fmt: skip

# Kernels of their own.


def _gelu(x, *, approximate="none"):
    if approximate == "tanh":
        return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / 2 * (1 + torch.erf(x / math.sqrt(2)))


_FORMS = {"none": (False,), "tanh": (True,)}

gelu, GELU = _row(
    "gelu",
    f"""y = x Phi(x) = x / 2 (1 + erf(x / sqrt(2))) with approximate="none", x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715
    x^3))) with "tanh".

    {_HENDRYCKS}

    >>> hfnn.functional.gelu(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([-0.1587,  0.0000,  0.8413])""",
    F.gelu, nn.GELU, _gelu, 1 << 15, named=True, numbers=lambda approximate="none": _FORMS.get(approximate),
    values=(("none",), ("tanh",)), likes={"erf form": {"approximate": "none"}, "tanh form": {"approximate": "tanh"}},
    kernels=kernels("gelu", 1 << 15, Kernel("cuda", "hfnn._C:cuda.gelu", "cuda", min_elements=1 << 24)),
    bench=((*BENCH, "none"), (*BENCH, "tanh")), casts=True,
    formula=lambda x, by_tanh: _nn.gelu(x, approximate="tanh" if by_tanh else "none"),
)  # fmt: skip

silu, SiLU = _row(
    "silu",
    f"""y = x sigmoid(x) = x / (1 + exp(-x)), also called swish.

    {_HENDRYCKS}
    Elfwing, Uchibe and Doya, "Sigmoid-Weighted Linear Units for Neural Network Function Approximation in Reinforcement
    Learning", 2017. https://arxiv.org/abs/1702.03118

    >>> hfnn.functional.silu(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([-0.2689,  0.0000,  0.7311])""",
    F.silu, nn.SiLU, lambda x: x * torch.sigmoid(x), 1 << 18, lambda inplace=False: None if inplace else (),
    likes={"": {}}, kernels=kernels("silu", 1 << 18), bench=((16384, 14336),), formula=_nn.silu,
)  # fmt: skip

OPS = tuple(_OPS)
