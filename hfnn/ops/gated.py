"""Gated products: swiglu, geglu, reglu and glu.

    y = f(gate) * up,   dgate = dy up f'(gate),   dup = dy f(gate)

gate and up are two tensors, or the halves of one: `packed`, (..., 2F), the result of a single matrix product. gate and
up, or the packed tensor, are kept; if these have recipes, only their sources. torch keeps gate, f(gate) and up, and the
consumer keeps the product. The gradient of a packed tensor is one tensor whose halves the kernel fills.

Shazeer, "GLU Variants Improve Transformer", 2020. https://arxiv.org/abs/2002.05202
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hfnn.core import native
from hfnn.core.context import compiling, is_plain
from hfnn.core.kernel import Op, kernels
from hfnn.core.node import double_backward
from hfnn.ops import smooth, table
from hfnn.ops.table import BENCH


@dataclass(frozen=True)
class Gate:
    """f: its number in csrc/gated.h, torch's own op, and its definition in plain torch."""

    kind: int
    torch: Callable
    reference: Callable


_references = {op.name: op.reference for op in smooth.OPS}
GATES = {
    "silu": Gate(0, torch._C._nn.silu, _references["silu"]),
    "gelu": Gate(1, torch._C._nn.gelu, _references["gelu"]),
    "gelu_tanh": Gate(
        2,
        functools.partial(torch._C._nn.gelu, approximate="tanh"),
        functools.partial(_references["gelu"], approximate="tanh"),
    ),
    "relu": Gate(3, torch.relu, lambda x: torch.where(x <= 0, 0, x)),
    "sigmoid": Gate(4, torch.sigmoid, torch.sigmoid),
    "quick_gelu": Gate(5, _references["quick_gelu"], _references["quick_gelu"]),
}


def _pair(case, dtype, device, generator=None):
    """gate and up of shape `case`, without its options. No gate is closer to 0, relu's kink, than any dtype
    resolves."""
    shape = [size for size in case if isinstance(size, int)]
    gate, up = (torch.randn(shape, generator=generator).mul(2) for _ in range(2))
    gate = gate.masked_fill(gate.abs() < 0.01, 0.01)
    return tuple(t.to(dtype).to(device) for t in (gate, up)), {}


def halves(packed, gate_first: bool = True, dim: int = -1):
    """(gate, up), views of a packed (..., 2F). Raises ValueError if the last dimension is odd."""
    if packed.dim() == 0 or packed.shape[dim] % 2:
        raise ValueError(
            "without `up` the first tensor holds gate and up as the halves of its last dimension, which must be even; "
            f"got the shape {tuple(packed.shape)}: pass gate and up where they are two tensors"
        )
    first, second = packed.chunk(2, dim)
    return (first, second) if gate_first else (second, first)


def formula(gate, up, activation: str, gate_first: bool = True, dim: int = -1):
    """The product by torch's own ops; `up` is None if `gate` is packed."""
    if up is None:
        gate, up = halves(gate, gate_first, dim)
    return GATES[activation].torch(gate) * up


_KINDS = {gate.kind: name for name, gate in GATES.items()}
_natives: dict = {}  # the calls in C++, by the ops' names


def _second(dy, needs, gate, up, kind, gate_first, dim):
    """The gradients by differentiable ops."""
    own = functools.partial(formula, activation=_KINDS[kind], gate_first=gate_first, dim=dim)
    if up is None:
        return double_backward(lambda packed: own(packed, None), (gate,), needs[:1], dy)
    return double_backward(own, (gate, up), needs, dy)


def product(op: Op, activation: str, gate, up, gate_first: bool, prefer: str, dim: int = -1):
    """f(gate) * up by a kernel of `op`, or None if torch's own ops must run. dim: of the halves, from the end."""
    if op.name not in _natives:
        _natives[op.name] = native.call("gated", op, _second)
    y = NotImplemented if compiling() else _natives[op.name](gate, up, GATES[activation].kind, gate_first, dim, prefer)
    # Autocast leaves these ops alone.
    return op.left(gate, up, out=gate.dtype, prefer=prefer) if y is NotImplemented else y


# The product with any f of GATES, for modules that implement it themselves; the rooms have their own tables.
OP = Op("gated", formula, formula, kernels("gated", 1 << 17), _pair)
_passes = OP.passes


def gated(
    gate: Tensor, up: Tensor | None = None, activation: str = "silu", *, gate_first: bool = True, prefer: str = "auto"
) -> Tensor:
    """f(gate) * up for an activation f of GATES: silu, gelu, gelu_tanh, relu, sigmoid or quick_gelu.

    Shapes: gate and up (...), or gate (..., 2F) and up None: the halves of its last dimension are then gate and up, the
    other way round with gate_first=False. The result has their dtype. prefer: "auto" | "memory" | "speed"
    (`hfnn.convert`). Raises ValueError for an unknown activation, and for halves of an odd dimension.
    """
    if activation not in GATES:
        raise ValueError(f"activation={activation!r}: choose one of {', '.join(map(repr, GATES))}")
    y = None if _passes(gate, prefer) else product(OP, activation, gate, up, gate_first, prefer)
    return formula(gate, up, activation, gate_first) if y is None else y


_DOCUMENT = """{0}, keeping gate and up and letting its consumer rebuild the product.

Shazeer, "GLU Variants Improve Transformer", 2020. https://arxiv.org/abs/2002.05202

The result has the shape and dtype of up.

Args:
    gate: (...), or (..., 2F) if up is None: the halves of its last dimension are then gate and up.
    up: Of the shape and dtype of gate, or None.
{1}    gate_first: Whether gate is the first half; it is the second in diffusers and timm.
    prefer: "auto", "memory" or "speed", as in `hfnn.convert`.

Raises:
    ValueError: A dimension to be halved is odd{2}.

{3}
"""


def _row(name, text, activation, crossover=1 << 17, forms=None, example=""):
    """The function of an op. activation: one of GATES; forms: or one by the choice `approximate`.

    crossover: from how many elements on the C++ kernel is faster than torch's ops.
    """
    choices = forms or {"none": activation}

    def torchs(gate, up, *, approximate="none"):
        return formula(gate, up, choices[approximate])

    def reference(gate, up, *, approximate="none"):
        return GATES[choices[approximate]].reference(gate) * up

    def sample(case, dtype, device, generator=None):
        args, _ = _pair(case, dtype, device, generator)
        return args, {"approximate": case[-1]} if forms else {}

    values = tuple((form,) for form in choices) if forms else ((),)
    op = Op(
        name, reference, torchs, kernels("gated", crossover), sample,
        cases=table.cases(values), small=(3, 5, *values[0]),
        bench=tuple((*BENCH, *form) for form in values), traffic=(3, 5), probe=lambda x: (x,),
    )  # fmt: skip
    passes = op.passes

    def run(gate, up, activation, gate_first, prefer):
        y = None if passes(gate, prefer) else product(op, activation, gate, up, gate_first, prefer)
        return formula(gate, up, activation, gate_first) if y is None else y

    def plain(gate: Tensor, up: Tensor | None = None, *, gate_first: bool = True, prefer: str = "auto") -> Tensor:
        return run(gate, up, activation, gate_first, prefer)

    def formed(
        gate: Tensor,
        up: Tensor | None = None,
        approximate: str = "none",
        *,
        gate_first: bool = True,
        prefer: str = "auto",
    ) -> Tensor:
        if approximate not in forms:
            raise ValueError(f"approximate={approximate!r}: choose one of {', '.join(map(repr, forms))}")
        return run(gate, up, forms[approximate], gate_first, prefer)

    function = formed if forms else plain
    function.__name__ = function.__qualname__ = name
    known = '    approximate: "none" or "tanh", as in `hfnn.functional.gelu`.\n' if forms else ""
    refused = ", or `approximate` is another word" if forms else ""
    function.__doc__ = _DOCUMENT.format(text, known, refused, example).rstrip()
    return op, function


SWIGLU, swiglu = _row(
    "swiglu",
    "silu(gate) * up",
    "silu",
    example=""">>> x = torch.tensor([[1.0, -1.0, 2.0, 3.0]])  # two gates, then what they are multiplied with
>>> hfnn.functional.swiglu(x)
tensor([[ 1.4621, -0.8068]])""",
)
GEGLU, geglu = _row("geglu", "gelu(gate) * up", "gelu", 1 << 16, forms={"none": "gelu", "tanh": "gelu_tanh"})
REGLU, reglu = _row("reglu", "relu(gate) * up", "relu")


# torch's own op: the first half of a tensor, times the sigmoid of the second.


@dataclass(frozen=True)
class _Halves(Op):
    def run(self, input, prefer, arguments):
        (dim,) = arguments
        if type(dim) is not int or not is_plain(input) or not -input.dim() <= dim < input.dim():
            return None
        if input.shape[dim] % 2:
            return None
        return product(self, "sigmoid", input, None, False, prefer, dim if dim < 0 else dim - input.dim())


def _glu(x, dim=-1):
    a, b = x.chunk(2, dim)
    return a * torch.sigmoid(b)


# Its output has a recipe. The consumers of the contract tests need outputs as wide as the input, which this is not. So
# tests/ops/test_gated.py tests the recipe.
GLU_OP = _Halves(
    "glu", _glu, F.glu, kernels("gated", 1 << 17),
    table.sampler(lambda shape, generator: torch.randn((*shape[:-1], 2 * shape[-1]), generator=generator).mul(2), ()),
    cases=table.cases(((),)), small=(3, 5), bench=(BENCH,), traffic=(1.5, 2.5), recipe=False, like_input=False,
    probe=lambda x: (0,),  # the empty input has one column, and no rows to halve
)  # fmt: skip
glu = table.function(
    GLU_OP,
    [inspect.Parameter("dim", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=-1)],
    """`torch.nn.functional.glu`, letting its consumer rebuild the output.

    y = a sigmoid(b), (a, b) = the halves of x. Shapes: input (..., 2F), result (..., F) along the last dimension. Along
    another one a contiguous x is needed; else torch's own op runs. Raises what torch raises.

    Dauphin et al., "Language Modeling with Gated Convolutional Networks", 2017. https://arxiv.org/abs/1612.08083
    """,
)
GLU = table.module(GLU_OP, nn.GLU, "GLU", glu)
OPS = SWIGLU, GEGLU, REGLU, GLU_OP
