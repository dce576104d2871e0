"""What masks hide, without a wait for the GPU at each call.

On a GPU it is read once for each mask. A mask is known by how a forward made it: from which of the module's buffers and
inputs, in which versions, by which functions. On the CPU it is read at each call, which takes little time.
"""

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from hfnn.core.context import capturing, has_values
from hfnn.deferred.recorded import name_of

MOST = 256  # masks that are remembered
WAITS = "cuda"  # the device for whose numbers the host waits
# Functions whose result depends on nothing but their arguments.
_PURE = frozenset((
    "ones", "zeros", "full", "arange", "tril", "triu", "eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__",
    "__lt__", "__le__", "__gt__", "__ge__", "__getitem__", "logical_not", "logical_and", "logical_or", "__invert__",
    "__and__", "__or__", "bitwise_and", "bitwise_or", "bitwise_not", "bool", "float", "half", "bfloat16", "int",
    "long", "to", "type", "type_as", "view", "reshape", "unsqueeze", "squeeze", "expand", "expand_as", "repeat",
    "transpose", "permute", "masked_fill", "where", "mul", "sub", "add", "div", "__mul__", "__rmul__", "__sub__",
    "__rsub__", "__add__", "__radd__", "__truediv__", "rsub", "neg", "__neg__", "narrow", "contiguous",
))  # fmt: skip
_CONSTANTS = (int, float, bool, str, type(None), torch.dtype, torch.device, type(Ellipsis))


class Facts(NamedTuple):
    """blind: whether a query sees no key; triangle: whether each sees itself and the keys before it; only: whether what
    is added hides, and does nothing else."""

    blind: bool
    triangle: bool
    only: bool


_read: dict[tuple, tuple[list, Facts]] = {}  # how it was made: (weak references to its sources, what it hides)


class Made:
    """How tensors of a forward were made, from `sources`."""

    def __init__(self, sources):
        self._known = {}  # id: (the tensor, its version, its key, its sources)
        for x in sources:
            if isinstance(x, torch.Tensor) and x.device.type == WAITS and not x.requires_grad:
                key = id(x), x._version, x.data_ptr(), x.shape, x.stride()
                self._known[id(x)] = x, x._version, key, [weakref.ref(x)]

    def note(self, func, args, kwargs, result) -> None:
        if type(result) is not torch.Tensor or result.device.type != WAITS or result.requires_grad:
            return
        if name_of(func) not in _PURE:
            return
        sources: list = []
        try:
            key = name_of(func), *self._keys((*args, *kwargs.items()), sources)
        except KeyError:
            return
        self._known[id(result)] = result, result._version, key, sources

    def _keys(self, values, sources):
        """What identifies values; raises KeyError if nothing does."""
        for x in values:
            if isinstance(x, torch.Tensor):
                _, version, key, more = self._known[id(x)]
                if version != x._version:
                    raise KeyError
                sources += more
                yield key
            elif isinstance(x, (tuple, list)):
                yield tuple(self._keys(x, sources))
            elif isinstance(x, slice):
                yield "slice", x.start, x.stop, x.step
            elif isinstance(x, _CONSTANTS):
                yield type(x), x
            else:
                raise KeyError

    def facts(self, masks, read: Callable[[], Facts]) -> Facts | None:
        """read() of masks; None if that would have to wait for the device at each call."""
        if not all(map(has_values, masks)):
            return None
        if all(mask.device.type != WAITS for mask in masks):
            return read()
        sources: list = []
        try:
            key = tuple(self._keys(masks, sources))
        except KeyError:
            return None
        refs, found = _read.get(key, ((), None))
        if found is None or any(ref() is None for ref in refs):
            if capturing():
                return None
            found = read()
            if len(_read) >= MOST:
                _read.clear()
            _read[key] = sources, found
        return found
