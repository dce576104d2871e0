"""The gated product of Llama, Mistral, Qwen and most models since.

    y = silu(gate) * up = gate / (1 + exp(-gate)) * up

Shazeer, "GLU Variants Improve Transformer", 2020. https://arxiv.org/abs/2002.05202
"""

import torch

from hfnn.kernel import Op
from hfnn.ops import gated, silu
from hfnn.ops.gated import formula, product

_silu = torch._C._nn.silu


def reference(gate, up):
    """The definition, in the dtype of gate."""
    return silu.reference(gate) * up


def _torch(gate, up):
    return formula(gate, up, "silu")


OP = Op(
    "swiglu",
    reference,
    _torch,
    kernels=gated.kernels(1 << 17),
    sample=gated.pair,
    cases=gated.SHAPES,
    traffic=(3, 5),
    probe=lambda x: (x,),
    small=(3, 5),
    bench=((16384, 8192), (16384, 14336)),
)
_passes = OP.passes


def swiglu(gate, up=None, *, gate_first=True, prefer="auto"):
    """silu(gate) * up, keeping gate and up and letting its consumer rebuild the product.

    Shapes: gate and up (...), or gate (..., 2F) and up None: the halves of its last dimension are then gate and up, the
    other way round with gate_first=False. The result has their dtype. prefer: "auto" | "memory" | "speed"
    (`hfnn.convert`). Raises ValueError for halves of an odd dimension.
    """
    if _passes(gate, prefer):
        return _silu(gate) * up if up is not None else formula(gate, up, "silu", gate_first)
    y = product(OP, "silu", gate, up, gate_first, prefer)
    return formula(gate, up, "silu", gate_first) if y is None else y
