"""Modules that end a block of a transformer: recognised by their parts, then proved numerically.

    y = norm(dropout(dense(x)) + residual)        BertSelfOutput, BertOutput of transformers, and their many copies
    y = dropout(dense(x)) + residual              ViTOutput

A module with these parts may still compute anything. So its own `forward` is run on a new instance with small random
parts (CPU, separate generator, no hooks) and compared with the formula in torch's ops. Outputs and all gradients must
be bitwise equal in float64, float32, bfloat16 and float16, in eval mode, in training without dropout and, for one seed,
in training with dropout.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import nn

from hfnn.core.context import is_bare, is_plain, transformed
from hfnn.ops import add_norm, dropout, dropout_add, layer_norm, linear
from hfnn.ops.layout import in_rows
from hfnn.patterns import probe
from hfnn.patterns.probe import Refusal
from hfnn.patterns.proof import Match, Proofs, arguments, check

WIDTH = 16
CASES = tuple(
    itertools.product(
        (torch.float64, torch.float32, torch.bfloat16, torch.float16), ((False, 0.5), (True, 0.0), (True, 0.5))
    )
)


class Residual:
    """Mixin for such a module: one kernel for the ops after `dense`, else the class's own code."""

    prefer = "auto"
    _hfnn_when = "while its dropout and its norm are hfnn's and carry no hooks, which would not be called"

    def forward(self, *args, **kwargs):
        like = self._hfnn_like
        dense, drop, norm = like.parts(self)
        if len(args) != 2 or kwargs or not (is_plain(args[0]) and is_plain(args[1])) or not _open(drop, norm):
            return super().forward(*args, **kwargs)
        x, residual = dense(args[0]), args[1]
        if not (in_rows(x) and in_rows(residual)):  # otherwise the sum has the strides of x
            total = drop(x) + residual
            return total if norm is None else norm(total)
        if norm is None:
            return dropout_add.dropout_add(x, residual, drop.p, drop.training, prefer=self.prefer)
        how = norm.normalized_shape, norm.weight, norm.bias, norm.eps
        y, _ = add_norm.add_layer_norm(x, residual, *how, p=drop.p, training=drop.training, prefer=self.prefer)
        return y


def _open(drop, norm) -> bool:
    """Whether these two modules need not be called: their ops run instead."""
    if transformed() or type(drop) is not dropout.Dropout or not is_bare(drop):
        return False
    return norm is None or (type(norm) is layer_norm.LayerNorm and is_bare(norm))


@dataclass(frozen=True)
class BlockEnd(Match):
    """dense, dropout, norm: the names of the parts; norm is None if the sum is the result."""

    dense: str
    dropout: str
    norm: str | None
    mixin = Residual

    @property
    def op(self):
        return dropout_add.OP if self.norm is None else add_norm.LAYER

    def __str__(self) -> str:
        return f"hfnn {self.op.name} of {self.dense}"

    def parts(self, module):
        """(dense, dropout, norm) of the present module."""
        modules = module._modules
        return modules[self.dense], modules[self.dropout], None if self.norm is None else modules[self.norm]

    def exact(self, module, x, residual):
        """The definition, in torch's ops."""
        dense, drop, norm = self.parts(module)
        total = (
            nn.functional.dropout(nn.functional.linear(x, dense.weight, dense.bias), drop.p, drop.training) + residual
        )
        if norm is None:
            return total
        return nn.functional.layer_norm(total, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def recognise(module: nn.Module) -> Match | Refusal | None:
    """The names of its parts, or why they are no end of a block; None if it has other parts."""
    end = _read(module)
    if end is None:
        return None
    key, but = (end, _options(module, end)), "it has the parts of a residual connection, but "
    return _proofs.of(module, key, lambda notes: _prove(module, notes, end), but)


_proofs = Proofs()


def _options(module, end):
    """The options that the probe's parts copy from the module's."""
    dense, _, norm = end.parts(module)
    return dense.bias is not None, norm and (norm.eps, norm.weight is not None, norm.bias is not None)


def _read(module) -> BlockEnd | None:
    """The parts by their classes: a linear map, a dropout, and optionally a norm, each once and nothing else."""
    cls = type(module)
    if cls.__module__.startswith("torch.") or len(module._modules) not in (2, 3) or module._buffers:
        return None
    if any(p is not None for p in module._parameters.values()) or None in module._modules.values():
        return None
    names = {}
    for name, part in module._modules.items():
        kind = next((kind for kind, classes in _PARTS.items() if type(part) in classes), None)
        if kind is None or kind in names:
            return None
        names[kind] = name
    if not {"dense", "dropout"} <= names.keys() or arguments(cls) != 2:
        return None
    return BlockEnd(names["dense"], names["dropout"], names.get("norm"))


_PARTS = {
    "dense": (nn.Linear, linear.Linear),
    "dropout": (nn.Dropout, dropout.Dropout),
    "norm": (nn.LayerNorm, layer_norm.LayerNorm),
}


def _prove(module, notes, end) -> BlockEnd:
    for number, (dtype, (training, p)) in enumerate(CASES):
        generator = torch.Generator("cpu").manual_seed(number)
        clone = _fresh(module, notes, end, dtype, training, p, generator)
        shape = ((6, WIDTH), (2, 3, WIDTH), (2, 3, 1, WIDTH))[number % 3]
        large = 1e3 if number % 2 else 1.0
        inputs = tuple((torch.randn(shape, generator=generator) * large).to(dtype) for _ in range(2))
        setting = f"against {_formula(end)}, {dtype}, {'training' if training else 'eval'}, p {p:g}"
        check(
            clone, inputs, end.exact, setting, within=0.0, wide=False, dtype=dtype, names=("its input", "the residual")
        )
    return end


def _formula(end) -> str:
    total = f"{end.dropout}({end.dense}(x)) + residual"
    return total if end.norm is None else f"{end.norm}({total})"


def _fresh(module, notes, end, dtype, training, p, generator):
    """A clone with small random parts."""
    bias, norm = _options(module, end)
    parts = {end.dense: nn.Linear(WIDTH, WIDTH, bias), end.dropout: nn.Dropout(p)}
    if end.norm is not None:
        parts[end.norm] = nn.LayerNorm(WIDTH, *norm)
    parts = {name: parts[name] for name in module._modules}
    for part in parts.values():
        for parameter in part.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        part.to(dtype).train(training)
    return probe.clone(module, notes, training, {}, parts)
