"""The check of the tensors that a step's table was made for; csrc/optim_look.h has the contract.

It runs at every step for all parameters, so C++ does it if it is built. This is the same in Python.
"""

from array import array
from itertools import chain
from operator import attrgetter, is_

import torch
from torch import Tensor

_base, _dtype = torch._C.TensorBase, attrgetter("dtype")
_address, _numel, _contiguous = _base.data_ptr, _base.numel, _base.is_contiguous


def look_in_python(params: list[Tensor], grads: list[Tensor | None] | None = None) -> tuple | None:
    """`look`, with layouts that are not bytes, compared only as far as a row depends on them."""
    grads = [p.grad for p in params] if grads is None else grads
    which = [i for i, g in enumerate(grads) if g is not None]
    there = [*params, *[grads[i] for i in which]]
    try:
        addresses, n = list(map(_address, there)), len(params)
    except RuntimeError:  # a sparse tensor has none
        return None
    moving = addresses[n:]
    if len(which) < n:
        moving = [0] * n
        for i, address in zip(which, addresses[n:], strict=True):
            moving[i] = address
    plain, odd = list(map(_contiguous, there)), ()
    if False in plain:
        odd = [(x.shape, x.stride()) for x, contiguous in zip(there, plain, strict=True) if not contiguous]
    layouts = which, list(map(_dtype, there)), list(map(_numel, there)), plain, odd
    return array("q", addresses[:n]).tobytes(), array("q", moving).tobytes(), layouts


def same_in_python(items: list, kept: list) -> bool:
    found = flat_values(items)
    return len(found) == len(kept) and all(map(is_, found, kept))


def flat_values(items: list) -> list:
    """The items, then the values of dicts among them."""
    return [*items, *chain.from_iterable([item.values() for item in items if isinstance(item, dict)])]


try:
    from hfnn._C import optim as _native
except ImportError:
    look, same = look_in_python, same_in_python
else:
    look, same = _native.look, _native.same
