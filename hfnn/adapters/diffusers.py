"""diffusers. A processor, which is an object but not a module, does the computation of its attention modules.

Calls in the processor's own code are routed like those in a module's code (hfnn/patterns/routed.py). So is the function
of torch's backend that newer processors call. A processor that is set later is read at its first use.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from hfnn.core.context import compiling
from hfnn.core.holder import stock_of
from hfnn.ops import attention
from hfnn.patterns import routed
from hfnn.patterns.probe import Refusal
from hfnn.patterns.proof import Match


class Processed:
    """Mixin for such a module: its own forward, with the calls in its processor's code routed."""

    prefer = "auto"

    @property
    def _hfnn_when(self) -> str:
        found = _calls(stock_of(self), type(self.processor))
        return "never: its processor calls none" if found is None else f"called in {found.where}"

    @staticmethod
    def forward_for(cls: type) -> Callable:
        return _with_processor(cls)


@dataclass(frozen=True)
class Processing(Match):
    mixin, op = Processed, attention.OP

    def __str__(self) -> str:
        return f"hfnn {self.op.name} in its processor"


def _with_processor(original: type) -> Callable:
    """The forward of such a class."""

    def forward(self, like, *args, **kwargs):
        run = None if compiling() else _routed(original, type(self.processor))
        return original.forward(self, *args, **kwargs) if run is None else run(self, like, *args, **kwargs)

    return forward


@functools.cache
def _routed(original: type, processor: type) -> Callable | None:
    found = _calls(original, processor)
    return None if found is None else routed._within(original.forward, found)


@functools.cache
def _calls(original: type, processor: type) -> routed.Calls | None:
    """The calls of functions that hfnn has, in the processor's code and in the module's own; None if there are none."""
    own, found = routed.calls(original), {}
    for function, depth in _functions(processor):
        routed._collect(function, processor, depth, found)
    found = {function: places for function, places in found.items() if places}
    if not found:
        return own
    places = {place for places in found.values() for place in places}.union(own.places if own else ())
    codes = {code for function in found for code in routed._codes(function)}.union(own.codes if own else ())
    where = ", ".join(function.__qualname__ for function in found)
    return routed.Calls(tuple(sorted(places, key=id)), frozenset(codes), where)


def _functions(processor: type) -> Iterator[tuple]:
    """The processor's own code and the torch backend that newer ones call, each with the depth of helpers to follow."""
    call = routed._unwrapped(processor.__call__)
    if call is None or routed._checkpoints(call):
        return
    yield call, 2
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    if any("dispatch_attention_fn" in code.co_names for code in routed._nested(call.__code__)):
        native = routed._unwrapped(getattr(dispatch, "_native_attention", None))
        if native is not None:
            yield native, 0  # its helpers are for tensors on several devices


def recognise(module: nn.Module) -> Match | Refusal | None:
    """How to treat the module, or why its calls cannot be routed; None for other modules."""
    if not isinstance(module, _classes()) or not hasattr(module, "processor"):
        return None
    own = routed.calls(type(module))
    if isinstance(own, str):
        return Refusal(own)
    return Processing() if _calls(type(module), type(module.processor)) else None


def _classes() -> tuple[type, ...]:
    names = ("attention_processor", "Attention"), ("attention", "AttentionModuleMixin")
    found = (getattr(sys.modules.get(f"diffusers.models.{file}"), name, None) for file, name in names)
    return tuple(cls for cls in found if cls is not None)
