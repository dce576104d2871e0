"""The gated product of T5 1.1, Gemma and Stable Diffusion.

    y = gelu(gate) * up,   gelu(x) = x / 2 * (1 + erf(x / sqrt(2))), or its tanh form (gelu.py)

Shazeer, "GLU Variants Improve Transformer", 2020. https://arxiv.org/abs/2002.05202
"""

import torch

from hfnn.kernel import Op
from hfnn.ops import gated, gelu
from hfnn.ops.gated import formula, product

_gelu = torch._C._nn.gelu

FORMS = {"none": "gelu", "tanh": "gelu_tanh"}


def reference(gate, up, *, approximate="none"):
    """The definition, in the dtype of gate."""
    return gelu.reference(gate, approximate=approximate) * up


def sample(case, dtype, device, generator=None):
    """Arguments of `geglu` for tensors of shape `case[:-1]`; the last entry of a case is `approximate`."""
    *shape, approximate = case
    return gated.pair(shape, dtype, device, generator)[0], {"approximate": approximate}


def _torch(gate, up, *, approximate="none"):
    return formula(gate, up, FORMS[approximate])


OP = Op(
    "geglu",
    reference,
    _torch,
    kernels=gated.kernels(1 << 16),
    sample=sample,
    cases=tuple((*shape, form) for shape in gated.SHAPES for form in FORMS),
    traffic=(3, 5),
    probe=lambda x: (x,),
    small=(3, 5, "none"),
    bench=((16384, 8192, "none"), (16384, 8192, "tanh")),
)
_passes = OP.passes


def geglu(gate, up=None, approximate="none", *, gate_first=True, prefer="auto"):
    """gelu(gate) * up, keeping gate and up and letting its consumer rebuild the product.

    Shapes: gate and up (...), or gate (..., 2F) and up None: the halves of its last dimension are then gate and up, the
    other way round with gate_first=False (diffusers, timm). The result has their dtype. approximate: "none" | "tanh",
    as in `torch.nn.functional.gelu`. prefer: "auto" | "memory" | "speed" (`hfnn.convert`). Raises ValueError for
    another `approximate`, and for halves of an odd dimension.
    """
    form = FORMS.get(approximate)
    if form is None:
        raise ValueError(f"approximate={approximate!r}: choose one of {', '.join(map(repr, FORMS))}")
    if _passes(gate, prefer):
        if up is not None and form == "gelu":
            return _gelu(gate) * up
        return formula(gate, up, form, gate_first)
    y = product(OP, form, gate, up, gate_first, prefer)
    return formula(gate, up, form, gate_first) if y is None else y
