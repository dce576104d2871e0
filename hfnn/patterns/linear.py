"""Linear maps in an author's own words: FalconLinear's `x @ weight.T`, + bias.

Told by a weight of two dimensions, and proved: a clone with other widths is held against `x W^T + b`, output and
gradients, to the last digits in float64 and within rounding in float32 and bfloat16, and its result under autocast has
to have the dtype of torch's.
"""

from dataclasses import dataclass

import torch
from torch import nn

from hfnn.core.context import compiling, is_plain
from hfnn.ops import linear
from hfnn.patterns import probe
from hfnn.patterns.probe import NOTHING, Reads
from hfnn.patterns.traced import WITHIN
from hfnn.testing import error

INPUTS, OUTPUTS = 24, 16


@dataclass(frozen=True)
class OwnLinear:
    """How a module is to be read that computes a linear map itself."""

    reads: Reads = NOTHING
    op = linear.OP

    @property
    def mixin(self):
        return Mapped

    def __str__(self) -> str:
        return "hfnn linear"


class Mapped:
    """Goes before the class of such a module: hfnn's linear map where it keeps less, else the class's own code."""

    prefer, recompute = "auto", False

    def forward(self, *args, **kwargs):
        if len(args) == 1 and not kwargs and not compiling() and is_plain(args[0]):
            y = linear.keeping_less(args[0], self.weight, self.bias, self.recompute, self.prefer)
            if y is not None:
                return y
        return super().forward(*args, **kwargs)


def recognise(module: nn.Module) -> tuple[OwnLinear | None, str | None]:
    """(how the module is to be read, None), or (None, why not); (None, None) where it is no map of one input."""
    weight = module._parameters.get("weight")
    if not isinstance(module, nn.Linear) or weight is None or weight.dim() != 2 or module._modules or module._buffers:
        return None, None
    bias = module._parameters.get("bias") is not None
    if len([p for p in module._parameters.values() if p is not None]) > 1 + bias:
        return None, None
    why, reads = _proofs.of(module, (bias,), lambda notes: _prove(module, notes, bias))
    return (
        (OwnLinear(reads), None)
        if why is None
        else (None, f"{type(module).__name__} has a forward of its own, and {why}")
    )


_proofs = probe.Proofs()


def _prove(module, notes, bias) -> str | None:
    """What differs between the module's own code and the definition, or None."""
    try:
        return next(
            (why for dtype in WITHIN for on in (True, False) if (why := _compare(module, notes, bias, dtype, on))), None
        )
    except Exception as error:  # the author's code, run by us: whatever it raises is a reason
        return probe.reason(error)


def _compare(module, notes, bias, dtype, training) -> str | None:
    generator = torch.Generator("cpu").manual_seed(int(training))

    def draw(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

    parameters = {"weight": nn.Parameter(draw(OUTPUTS, INPUTS, scale=INPUTS**-0.5))}
    parameters["bias"] = nn.Parameter(draw(OUTPUTS)) if bias else None
    widths = {"in_features": INPUTS, "out_features": OUTPUTS}
    clone = probe.clone(module, notes, training, parameters, changed=widths)
    own = type(module).forward
    tensors = [draw(2, 3, INPUTS).requires_grad_(), *(p for p in parameters.values() if p is not None)]
    y = own(clone, tensors[0])
    wide = [t.detach().double().requires_grad_() for t in tensors]
    y64 = nn.functional.linear(*wide)
    if y.dtype is not dtype or y.shape != y64.shape:
        return f"it returns {y.dtype} {tuple(y.shape)}"
    dy = draw(*y.shape)
    grads = torch.autograd.grad(y, tensors, dy, allow_unused=True)
    grads64 = torch.autograd.grad(y64, wide, dy.double())
    for given, wanted in zip((y, *grads), (y64, *grads64), strict=True):
        off = float("inf") if given is None else error(given, wanted).l2
        if not off <= WITHIN[dtype]:
            return f"it is off x W^T + b by {off:.1e} in L2 norm ({dtype})"
    with torch.no_grad():
        again, empty = own(clone, tensors[0]), own(clone, tensors[0][:0])
        with torch.autocast("cpu", torch.bfloat16):
            low = own(clone, tensors[0]).dtype
            if low is not nn.functional.linear(*tensors).dtype:
                return f"it returns {low} under autocast"
    if not torch.equal(again, y) or (empty.dtype, empty.shape) != (y.dtype, y[:0].shape):
        return "its forward depends on more than its input (grad mode, number of rows or of calls)"
    return "its forward changes attributes of the module" if probe.changes(clone) else None
