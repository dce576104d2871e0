"""Linear maps written out by an author: FalconLinear's `x @ weight.T`, + bias; `linear(x, weight.to(x.dtype))`.

Recognised by a weight of two dimensions, then proved: a clone with other widths is compared with `x W^T + b`, output
and gradients, to the last digits in float64 and within rounding in float32, bfloat16 and float16. Its result under
autocast must have the dtype of torch's. If it takes inputs of another dtype than its weight's, and gives bit for bit
what casts of weight and bias give, these casts are made again in backward instead of kept.
"""

from dataclasses import dataclass

import torch
from torch import nn

from hfnn.core.context import compiling, is_plain
from hfnn.core.holder import stock_of
from hfnn.ops import linear
from hfnn.patterns import probe, proof
from hfnn.patterns.probe import Refusal
from hfnn.patterns.proof import Match, Proofs, check

INPUTS, OUTPUTS = 24, 16


class Mapped:
    """Mixin for such a module: hfnn's linear map if it keeps less, else the class's own code."""

    prefer, recompute, exact = "auto", False, False

    def _hfnn_small(self, like, args: tuple, kwargs: dict) -> bool:
        if len(args) != 1 or kwargs:
            return False
        return linear.is_torchs(args[0], self.recompute, self.prefer, like.casts)

    def forward(self, like, *args, **kwargs):
        if len(args) == 1 and not kwargs and not compiling() and is_plain(args[0]):
            given = args[0], self.weight, self.bias, self.recompute, self.prefer
            y = linear.keeping_less(*given, exact=self.exact, casts=like.casts)
            if y is not None:
                return y
        return stock_of(self).forward(self, *args, **kwargs)


@dataclass(frozen=True)
class OwnLinear(Match):
    """casts: whether it casts weight and bias to its input's dtype."""

    casts: bool = False
    mixin, op = Mapped, linear.OP

    def __str__(self) -> str:
        return "hfnn linear"


def recognise(module: nn.Module) -> Match | Refusal | None:
    """How to treat the module, or why it is left alone; None if it is no map of one input."""
    weight = module._parameters.get("weight")
    if not isinstance(module, nn.Linear) or weight is None or weight.dim() != 2 or module._modules or module._buffers:
        return None
    bias = module._parameters.get("bias") is not None
    if len([p for p in module._parameters.values() if p is not None]) > 1 + bias:
        return None
    but = f"{type(module).__name__} has a forward of its own, and "
    return _proofs.of(module, (bias,), lambda notes: _prove(module, notes, bias), but)


_proofs = Proofs()


def _prove(module, notes, bias) -> OwnLinear:
    def small(training, dtype):
        """An input, and a clone of other widths."""
        generator = torch.Generator("cpu").manual_seed(int(training))
        shapes = [(2, 3, INPUTS), (OUTPUTS, INPUTS), (OUTPUTS,)]
        x, weight, b = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        parameters = {"weight": nn.Parameter(weight), "bias": nn.Parameter(b) if bias else None}
        widths = {"in_features": INPUTS, "out_features": OUTPUTS}
        return x, probe.clone(module, notes, training, parameters, changed=widths)

    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for training in (True, False):
            x, clone = small(training, dtype)
            check(clone, (x,), _definition, f"against x W^T + b, {dtype}", dtype=dtype)
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                low = type(clone).forward(clone, x).dtype
                if low is not _definition(clone, x).dtype:
                    raise Refusal(f"it returns {low} under autocast")
    return OwnLinear(_casts(small))


def _casts(small) -> bool:
    """Whether it computes the definition with weight and bias in its input's dtype, if this is another one."""
    for low, wide in ((torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.bfloat16)):
        for training in (True, False):
            x, clone = small(training, wide)
            try:
                found = proof._run(type(clone).forward, clone, (x.to(low),))
            except Exception:  # as torch's own op for two dtypes
                return False
            if not all(map(torch.equal, found, proof._run(_definition, clone, (x.to(low),)))):
                return False
    return True


def _definition(module, x):
    bias = None if module.bias is None else module.bias.to(x.dtype)
    return nn.functional.linear(x, module.weight.to(x.dtype), bias)
