"""The check of the tensors that a step's table was made for; csrc/optim_look.h has the contract.

It runs at every step for all parameters, so C++ does it if it is built. This is the same in Python.
"""

from array import array
from operator import attrgetter

import torch
from torch import Tensor

_base, _dtype, _shape = torch._C.TensorBase, attrgetter("dtype"), attrgetter("shape")
_address, _contiguous = _base.data_ptr, _base.is_contiguous
_WHOLE = frozenset((Tensor, torch.nn.Parameter))


def local(x):
    """This process's part of a DTensor; any other object as it is."""
    return x if type(x) in _WHOLE else getattr(x, "_local_tensor", x)


def look_in_python(params: list[Tensor], grads: list[Tensor | None] | None, states: list, chosen: bytes):
    """`look`, with layouts that are not bytes, compared only as far as a row depends on them."""
    grads = [p.grad for p in params] if grads is None else grads
    which = [i for i, g in enumerate(grads) if g is not None]
    kept, written = [], []
    for state, mine in zip(states, chosen, strict=True):
        values = state.items() if isinstance(state, dict) else ()
        kept += [local(x) if isinstance(x, Tensor) else None for _, x in values]
        written += [x for name, x in values if mine and name != "step" and isinstance(x, Tensor)]
    there = [*params, *[grads[i] for i in which], *[x for x in kept if x is not None]]
    try:
        addresses, n, end = list(map(_address, there)), len(params), len(params) + len(which)
        if any(grads[i].is_neg() for i in which):
            return None
    except RuntimeError:  # a sparse tensor has none
        return None
    moving = addresses[n:end]
    if len(which) < n:
        moving = [0] * n
        for i, address in zip(which, addresses[n:end], strict=True):
            moving[i] = address
    plain, odd = list(map(_contiguous, there)), ()
    if False in plain:
        odd = [(x.shape, x.stride()) for x, contiguous in zip(there, plain, strict=True) if not contiguous]
    sizes, absent = [len(state) if isinstance(state, dict) else -1 for state in states], [x is None for x in kept]
    kinds = list(map(_dtype, there)), list(map(_shape, there)), plain, odd
    layouts = list(map(id, params)), which, sizes, absent, kinds
    return array("q", addresses[:n] + addresses[end:]).tobytes(), array("q", moving).tobytes(), layouts, written


try:
    from hfnn._C import optim as _native
except ImportError:
    look = look_in_python
else:
    look = _native.look
