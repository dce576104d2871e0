"""The gated product with a rectifier.

    y = max(gate, 0) * up

Shazeer, "GLU Variants Improve Transformer", 2020. https://arxiv.org/abs/2002.05202
"""

import torch

from hfnn.kernel import Op
from hfnn.ops import gated
from hfnn.ops.gated import formula, product

_relu = torch.relu


def reference(gate, up):
    """The definition, in the dtype of gate."""
    return torch.where(gate <= 0, 0, gate) * up


def _torch(gate, up):
    return formula(gate, up, "relu")


OP = Op(
    "reglu",
    reference,
    _torch,
    kernels=gated.kernels(1 << 17),
    sample=gated.pair,
    cases=gated.SHAPES,
    traffic=(3, 5),
    probe=lambda x: (x,),
    small=(3, 5),
    bench=((16384, 8192),),
)
_passes = OP.passes


def reglu(gate, up=None, *, gate_first=True, prefer="auto"):
    """relu(gate) * up, keeping gate and up and letting its consumer rebuild the product.

    Shapes: gate and up (...), or gate (..., 2F) and up None: the halves of its last dimension are then gate and up, the
    other way round with gate_first=False. The result has their dtype. Where gate is 0 or less its gradient is 0, as
    torch's is. prefer: "auto" | "memory" | "speed" (`hfnn.convert`). Raises ValueError for halves of an odd dimension.
    """
    if _passes(gate, prefer):
        return _relu(gate) * up if up is not None else formula(gate, up, "relu", gate_first)
    y = product(OP, "relu", gate, up, gate_first, prefer)
    return formula(gate, up, "relu", gate_first) if y is None else y
