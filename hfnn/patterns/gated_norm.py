"""RMSNorms with a gate: the last step of a gated linear attention or a state space layer.

    y = rms_norm(x) weight * f(gate)          Qwen3-Next, OlmoHybrid; f = silu or sigmoid
    y = rms_norm(x * f(gate)) weight          Mamba2, Bamba, Zamba2

Such classes widen to float32 and keep four or five float32 tensors. hfnn's norm followed by its product keeps x and the
gate. Recognised by the class's name and its weight, then proved: a clone's own forward is compared with the formula,
output and gradients, in float32, bfloat16 and float16, with two values of eps.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import nn

from hfnn.core.context import compiling, is_plain
from hfnn.core.holder import stock_of
from hfnn.ops import rms_norm
from hfnn.ops.gated import GATES, gated
from hfnn.patterns import lookalike, probe
from hfnn.patterns.probe import Refusal
from hfnn.patterns.proof import Differs, Match, Proofs, check

ROWS = 6
# (dtype of the weight, of the inputs), factor of eps
CASES = (
    *itertools.product([(torch.float32, torch.float32)], (1.0, 3.0)),
    *(((weight, half), 1.0) for half in (torch.bfloat16, torch.float16) for weight in (half, torch.float32)),
)


class NormGate:
    """Mixin for such a module: hfnn's norm and product, or the class's own code."""

    prefer = "auto"

    def forward(self, like, *args, **kwargs):
        y = None
        if len(args) == 2 and not kwargs and not compiling() and all(map(is_plain, args)):
            y = like.fused(self, *args)
        return stock_of(self).forward(self, *args, **kwargs) if y is None else y


@dataclass(frozen=True)
class GatedNorm(Match):
    """f: of GATES; first: whether the norm comes before the gate; eps: the name of an attribute.

    promotes: whether a weight of float32 makes the result float32.
    """

    f: str
    first: bool
    promotes: bool
    eps: str
    mixin, op = NormGate, rms_norm.OP

    def __str__(self) -> str:
        return f"hfnn rms_norm, {self.f} gate"

    def fused(self, module, x, gate):
        if x.shape != gate.shape or x.dtype is not gate.dtype or x.dtype is torch.float64:
            return None
        weight, eps, prefer = module.weight, getattr(module, self.eps), module.prefer
        if self.first:
            y = rms_norm.fused(x, weight, eps, 0.0, x.dtype, prefer)
            return None if y is None else gated(gate, y, self.f, prefer=prefer)
        if rms_norm.OP.passes(x, prefer):
            return None
        y = gated(gate, x, self.f, prefer=prefer)
        return rms_norm.fused(y, weight, eps, 0.0, self.dtype(x, weight), prefer)

    def dtype(self, x, weight) -> torch.dtype:
        return torch.promote_types(x.dtype, weight.dtype) if self.promotes else x.dtype

    def exact(self, module, x, gate, eps):
        f = GATES[self.f].reference(gate)
        x = x if self.first else x * f
        y = rms_norm.reference(x, x.shape[-1:], module.weight, eps, 0.0)
        return y * f if self.first else y


def recognise(module: nn.Module) -> Match | Refusal | None:
    """How to treat the module, or why it is left alone; None if it has another name."""
    name, weight = type(module).__name__.lower(), module._parameters.get("weight")
    if "norm" not in name or "gated" not in name or weight is None or weight.dim() != 1 or len(module._parameters) > 1:
        return None
    if module._modules or module._buffers or len(weight) < lookalike.MIN_COLS:
        return None
    but = "named like a norm with a gate, but "
    return _proofs.of(module, (len(weight),), lambda notes: _prove(module, notes, len(weight)), but)


_proofs = Proofs()


def _prove(module, notes, cols) -> GatedNorm:
    epsilons = [name for name, value in probe.attributes(module).items() if isinstance(value, float) and "eps" in name]
    why = Refusal("it has no eps")
    orders = (True, False), (False, True), (False, False)
    for f, order, eps in itertools.product(("silu", "sigmoid"), orders, epsilons):
        like = GatedNorm(f, *order, eps)
        try:
            for number, case in enumerate(CASES):
                _check(module, notes, like, cols, number, *case)
            return like
        except Differs as difference:
            why = difference
    raise why


def _check(module, notes, like, cols, number, dtypes, factor) -> None:
    generator = torch.Generator("cpu").manual_seed(number)
    eps = getattr(module, like.eps) * factor
    weight = nn.Parameter(torch.randn(cols, generator=generator).to(dtypes[0]))
    clone = probe.clone(module, notes, True, {"weight": weight}, changed={like.eps: eps})
    shape = ((ROWS, cols), (2, ROWS // 2, cols))[number % 2]
    # The smallest rows are so small that eps matters.
    scale = torch.tensor([1.0, 30.0, 0.3, eps**0.5, 3.0, 1.0])
    x, gate = (torch.randn(ROWS, cols, generator=generator) for _ in range(2))
    inputs = tuple(t.view(shape).to(dtypes[1]) for t in (x * scale[:, None], gate))
    setting = f"{like.f} {'after' if like.first else 'before'} the norm, {dtypes}, eps times {factor:g}"
    definition = lambda wide, x, gate: like.exact(wide, x, gate, eps)  # noqa: E731
    how = {"dtype": like.dtype(inputs[0], weight), "off": lookalike._row_error, "names": ("the input", "the gate")}
    check(clone, inputs, definition, setting, **how)
