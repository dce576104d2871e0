"""Batch norms with their activation as a part: timm's BatchNormAct2d.

    y = act(drop(batch_norm(x)))

Recognised by the class, a subclass of torch's with its own forward, and by its parts: an activation and identities.
Then a clone's forward must be bitwise equal to torch's ops: output, gradients, and updated statistics.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from hfnn.core.context import compiling, is_bare, is_plain
from hfnn.core.holder import stock_of
from hfnn.ops.batch_norm import ACT, _activated, arguments, batch_norm_act
from hfnn.patterns import probe
from hfnn.patterns.kinds import ACTIVATIONS_OF as _ACTIVATIONS
from hfnn.patterns.kinds import BATCH_NORMS as _NORMS
from hfnn.patterns.probe import Refusal
from hfnn.patterns.proof import Differs, Match, Proofs, check
from hfnn.patterns.proof import arguments as arguments_of_forward

CHANNELS = 6
# (dtype, training, momentum, whether statistics are tracked, eps)
CASES = (
    *itertools.product((torch.float64, torch.float32), (True, False), (0.3, None), (True,), (1e-5,)),
    *((torch.float64, training, 0.1, tracked, 0.1) for training in (True, False) for tracked in (True, False)),
)
_STATE = "running_mean", "running_var", "num_batches_tracked"


class OwnAct:
    """Mixin for such a module: one kernel, or the class's own forward."""

    prefer = "auto"
    _hfnn_one_input = True  # the op's size limit applies to it
    _hfnn_when = "while the op has its activation, and it carries no hooks, which would not be called"

    def forward(self, like, *args, **kwargs):
        y = None
        if len(args) == 1 and not kwargs and not compiling() and is_plain(args[0]):
            y = like.fused(self, args[0])
        return stock_of(self).forward(self, *args, **kwargs) if y is None else y


@dataclass(frozen=True)
class NormWithAct(Match):
    """dims: of the input."""

    dims: int
    mixin, op, free = OwnAct, ACT, ("eps", "momentum", "track_running_stats")

    def __str__(self) -> str:
        return "hfnn batch_norm_act"

    def fused(self, module, x):
        parts = module._modules.values()
        if x.dim() != self.dims or not all(map(is_bare, parts)):
            return None
        acts = [part for part in parts if type(part) is not nn.Identity]
        name = _ACTIVATIONS.get(type(acts[0])) if acts else None
        if len(acts) != (name is not None):
            return None
        slope = acts[0].negative_slope if name == "leaky_relu" else 0.01
        return batch_norm_act(x, *arguments(module), None, name, slope, prefer=module.prefer)


def recognise(module: nn.Module) -> Match | Refusal | None:
    """How to treat the module, or why it is left alone; None if it is no batch norm with an activation as its part."""
    cls, parts = type(module), module._modules
    base = next((base for base in _NORMS if issubclass(cls, base)), None)
    if base is None or cls.forward is base.forward or not parts or arguments_of_forward(cls) != 1:
        return None
    acts = [part for part in parts.values() if type(part) is not nn.Identity]
    if len(acts) > 1 or any(type(part) not in _ACTIVATIONS for part in acts):
        return None
    if set(module._parameters) != {"weight", "bias"} or set(module._buffers) != set(_STATE):
        return None
    key = tuple((name, _ACTIVATIONS.get(type(part))) for name, part in parts.items())
    return _proofs.of(module, key, lambda notes: _prove(module, notes, _NORMS[base]), "it is a batch norm, but ")


_proofs = Proofs()


def _prove(module, notes, dims) -> NormWithAct:
    for number, case in enumerate(CASES):
        _check(module, notes, (4, CHANNELS, 3, 5, 2)[:dims], number, *case)
    return NormWithAct(dims)


def _check(module, notes, shape, number, dtype, training, momentum, tracked, eps) -> None:
    generator = torch.Generator("cpu").manual_seed(number)
    draw = lambda *size: torch.randn(size, generator=generator).to(dtype)  # noqa: E731
    state = (draw(CHANNELS), draw(CHANNELS).abs() + 0.5, torch.tensor(number)) if tracked else (None,) * 3
    parameters = {name: nn.Parameter(draw(CHANNELS)) for name in ("weight", "bias")}
    changed = {"momentum": momentum, "eps": eps, "num_features": CHANNELS, "track_running_stats": tracked}
    act = next((part for part in module._modules.values() if type(part) is not nn.Identity), None)
    kept = []

    def copies():
        return {name: b if b is None else b.clone() for name, b in zip(_STATE, state, strict=True)}

    def clone(buffers):
        parts = {name: _part(part) for name, part in module._modules.items()}
        return probe.clone(module, notes, training, parameters, parts, changed, buffers=buffers)

    def definition(parts, x):
        kept.append(copies())
        mean, var, _ = kept[-1].values()
        factor = momentum if momentum is not None else 1.0 / (number + 1) if training and tracked else 0.0
        y = F.batch_norm(x, mean, var, parts.weight, parts.bias, training or not tracked, factor, eps)
        return y if act is None else _activated(y, _ACTIVATIONS[type(act)], getattr(act, "negative_slope", 0.01))

    x = draw(*shape)
    setting = f"{dtype}, {'training' if training else 'eval'}, momentum {momentum}, tracked: {tracked}"
    check(clone(copies()), (x,), definition, setting, within=0.0, wide=False, dtype=dtype)
    once = copies()
    with torch.no_grad():
        type(module).forward(clone(once), x.clone())
    if tracked and (
        int(once["num_batches_tracked"]) != number + training
        or not all(torch.equal(once[name], kept[0][name]) for name in _STATE[:2])
    ):
        raise Differs(f"its running statistics become others than torch's ({setting})")


def _part(part) -> nn.Module:
    """A part's class with its numbers; in-place parts only write to a result of the norm."""
    made = type(part).__new__(type(part))
    nn.Module.__init__(made)
    vars(made).update(probe.attributes(part))
    return made
