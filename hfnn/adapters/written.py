"""Attention that a module's own code writes out: a product, a softmax, another product.

Recognised by the byte code of a class's forward and of what it calls in its file (hfnn/patterns/routed.py). Once
converted, products in this code give scores that are computed only if they are read (hfnn/deferred/scores.py), so that
names, the order of operations and the shape of masks do not matter. Calls of torch's functions are routed as elsewhere.
"""

import dis
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from hfnn.core.classes import cache_by_class
from hfnn.core.context import PLAIN, bare_mode, transformed
from hfnn.deferred import attended, scores
from hfnn.deferred import scored as scored  # its handlers
from hfnn.ops.attention import sdpa
from hfnn.patterns import routed
from hfnn.patterns.proof import Match

_PRODUCTS = frozenset(("matmul", "bmm", "einsum"))
SMALL = {"cpu": 1 << 18, "cuda": 1 << 18}  # elements of a first input below which it does not pay
_uses: weakref.WeakKeyDictionary[nn.Module, scores.Use] = weakref.WeakKeyDictionary()


class Written:
    """Mixin for such a module: its own forward, with scores deferred."""

    prefer = "auto"

    _hfnn_small = routed.Routed._hfnn_small

    @property
    def _hfnn_when(self) -> str:
        use = _uses.get(self)
        if use is not None and use.read >= attended.CALLS:
            return "its scores are computed: other operations than attention read them, or short ones are kept"
        return "in training, where nothing else reads its scores and weights"

    @staticmethod
    def forward_for(cls: type) -> Callable:
        (codes, _), found = _codes(cls), routed.calls(cls)
        forward = routed._within(cls.forward, found) if isinstance(found, routed.Calls) else _own(cls.forward)

        def run(self, like, *args, **kwargs):
            if transformed() or not torch.is_grad_enabled() or _is_small(self, args, kwargs) or not bare_mode():
                return forward(self, like, *args, **kwargs)
            use = _uses.setdefault(self, scores.Use())
            return attended.deferring(self, codes, use, forward, (like, *args), kwargs)

        return run


def _is_small(module, args, kwargs) -> bool:
    x = args[0] if args else next(iter(kwargs.values()), None)
    return module.prefer != "memory" and type(x) in PLAIN and x.numel() < SMALL.get(x.device.type, 0)


def _own(forward):
    return lambda self, like, *args, **kwargs: forward(self, *args, **kwargs)


@dataclass(frozen=True)
class WrittenAttention(Match):
    """A module whose own code computes attention. names: of the functions that it calls besides."""

    names: tuple[str, ...]
    mixin, op = Written, sdpa.OP

    def __str__(self) -> str:
        return f"hfnn {', '.join(dict.fromkeys((self.op.name, *self.names)))} inside"


def recognise(module: nn.Module) -> Match | None:
    """How to treat the module; None if its code has no attention."""
    codes, softmax = _codes(type(module))
    softmax = softmax or any(isinstance(part, nn.Softmax) for part in module._modules.values())
    if not (codes and softmax):
        return None
    found = routed.recognise(module)
    return WrittenAttention(found.names if isinstance(found, routed.RoutedCalls) else ())


@cache_by_class
def _codes(cls: type) -> tuple[frozenset, bool]:
    """(the code of a class's forward and of what it calls, if it has two products; whether it names a softmax)"""
    forward = routed._unwrapped(cls.forward)
    if forward is None or routed._is_foreign(cls) or routed._is_foreign(forward):
        return frozenset(), False
    found = {}
    routed._collect(forward, cls, 0 if routed._checkpoints(forward) else 2, found)
    codes = frozenset(code for function in found for code in routed._codes(function))
    read = [instruction for code in codes for instruction in dis.get_instructions(code)]
    count = sum(i.argval in _PRODUCTS or i.argrepr == "@" or i.opname == "BINARY_MATRIX_MULTIPLY" for i in read)
    softmax = any(re.search("LOAD_(GLOBAL|ATTR|METHOD)", i.opname) and "softmax" in i.argval.lower() for i in read)
    return codes if count > 1 else frozenset(), softmax
