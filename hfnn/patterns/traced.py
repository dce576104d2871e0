"""How a module combines its parts: found by running its own forward on a small instance, then proved.

`small` is a new instance of the module's class with the module's attributes and small parts: linear maps with random
weights, the activation unchanged, and for every other part a stand-in that mixes a row in a distinct way, so that its
position matters. All of them record their arguments. No hooks run, and the module itself is never called.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import nn

from hfnn.patterns import probe
from hfnn.patterns.proof import check

HIDDEN, INPUT, OUTPUT = 24, 16, 20
# (dtype, training, factor of the inputs). Large inputs show limits, for example of a clamped gate.
CASES = (
    *itertools.product((torch.float64, torch.float32, torch.bfloat16, torch.float16), (True, False), (1.5,)),
    *((dtype, False, 1e4) for dtype in (torch.float64, torch.float32, torch.bfloat16)),
    (torch.float16, False, 30.0),
)


@dataclass(frozen=True)
class Map:
    """A linear part: its widths, and whether it has a bias."""

    inputs: int
    outputs: int
    bias: bool


@dataclass(frozen=True)
class Activation:
    """f: which of the gates of hfnn/ops/gated.py."""

    f: str


@dataclass(frozen=True)
class Other:
    """A part that may be called on one tensor: a dropout, a norm, an identity."""


@dataclass(frozen=True)
class PartCall:
    name: str
    x: torch.Tensor
    y: torch.Tensor


class _Map(nn.Linear):
    def forward(self, input):
        y = nn.functional.linear(input, self.weight, self.bias)
        self.log.append(PartCall(self.name, input, y))
        return y


class _Activation(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = probe.clone(part, probe.Notes(part), part.training, {})

    def forward(self, input):
        y = type(self.part).forward(self.part, input)
        self.log.append(PartCall(self.name, input, y))
        return y


class _Other(nn.Module):
    def forward(self, input):
        places = torch.arange(input.shape[-1], dtype=torch.float64, device=input.device) + len(self.name)
        y = input * places.cos().to(input.dtype) + input.roll(self.number, -1)
        self.log.append(PartCall(self.name, input, y))
        return y


def widths(kinds) -> dict[int, int] | None:
    """The widths of the maps -> those of the small instance, if the maps fit together as a feed-forward network."""
    maps = [kind for kind in kinds.values() if isinstance(kind, Map)]
    hidden = _hidden(maps)
    if hidden is None:
        return None
    small = {hidden: HIDDEN}
    small.setdefault(2 * hidden, 2 * HIDDEN)
    for kind in maps:
        small.setdefault(kind.inputs, INPUT)
    for kind in maps:
        small.setdefault(kind.outputs, OUTPUT)
    return small


def _hidden(maps) -> int | None:
    if len(maps) == 1:
        return maps[0].outputs // 2 if maps[0].outputs % 2 == 0 else None
    if len(maps) in (2, 3):
        for at in range(len(maps) - 1, 0, -1):
            last, first = maps[at], maps[:at] + maps[at + 1 :]
            shapes = {(kind.inputs, kind.outputs) for kind in first}
            whole = 2 * last.inputs if len(first) == 1 else last.inputs
            if len(shapes) == 1 and first[0].outputs in (last.inputs, whole):
                return last.inputs
    return None


def small(module, notes, kinds, dtype, training, seed) -> tuple[nn.Module, list[PartCall]]:
    """(a small instance of the module's class, the record of its parts)."""
    sizes, log = widths(kinds), []
    generator = torch.Generator("cpu").manual_seed(seed)
    changed = {name: sizes.get(value, value) for name, value in probe.attributes(module).items() if type(value) is int}
    parts = {}
    for number, (name, kind) in enumerate(kinds.items()):
        part = parts[name] = _part(module._modules[name], kind, sizes, dtype, generator)
        part.name, part.number, part.log, part.training = name, number + 1, log, training
    return probe.clone(module, notes, training, {}, parts, changed), log


def _part(part, kind, sizes, dtype, generator):
    if isinstance(kind, Activation):
        return _Activation(part)
    if isinstance(kind, Other):
        return _Other()
    made = _Map(sizes[kind.inputs], sizes[kind.outputs], kind.bias, dtype=dtype)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / made.in_features**0.5)
    return made


def drawn(clone, kinds, dtype, dims, seed, factor=1.5):
    """An input for a small instance, with values of about `factor`."""
    width = next(part.in_features for part in clone._modules.values() if isinstance(part, _Map))
    if len([kind for kind in kinds.values() if isinstance(kind, Map)]) > 1:
        width = widths(kinds)[_inputs(kinds)]
    shape = {2: (6, width), 3: (2, 3, width), 4: (1, 2, 3, width)}[dims]
    x = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float64) * factor
    return x.to(dtype)


def _inputs(kinds) -> int:
    """The width of the module's input."""
    maps = [kind for kind in kinds.values() if isinstance(kind, Map)]
    hidden = _hidden(maps)
    return next((kind.inputs for kind in maps if kind.outputs in (hidden, 2 * hidden)), maps[0].inputs)


def check_all(module, notes, kinds, compute) -> None:
    """Raises Differs if the module's own code is not `compute(parts, x)`, the definition."""
    for number, (dtype, training, factor) in enumerate(CASES):
        clone, _ = small(module, notes, kinds, dtype, training, number)
        x = drawn(clone, kinds, dtype, 2 + number % 3, number, factor)
        setting = f"{dtype}, {'training' if training else 'eval'}, inputs times {factor:g}"
        check(clone, (x,), lambda wide, x: compute(wide._modules, x), setting, dtype=dtype)
