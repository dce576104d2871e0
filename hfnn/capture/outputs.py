"""The result of a captured forward: the nest that its author built, with new tensors in it at each call."""

import copy
import enum
import types

import torch
from torch import nn

from hfnn.core import parts
from hfnn.deferred.logits import Deferred

_AS_THEY_ARE = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    enum.Enum,
    type,
    types.FunctionType,
    torch.dtype,
    torch.device,
)


class Unfit(Exception):
    """Why a call cannot be captured."""


class _Place:
    """Placeholder of a tensor in the nest."""


class Outputs:
    """A nest of tensors. tensors: those of the nest, except views of others of them, then the hidden states that
    deferred logits are computed from; shown: how many belong to the nest.

    Raises Unfit for what may not be copied, and for tensors that share memory with `others`.
    """

    def __init__(self, nest, others):
        found: dict[int, torch.Tensor] = {}
        later: dict[int, Deferred] = {}
        _look(nest, found, later, set())
        bases = _bases(found.values())
        self.tensors = [t for t in found.values() if bases[storage(t)] is t]
        self.shown = len(self.tensors)
        hidden = [deferred._plan.product.hidden for deferred in later.values()]
        for t in hidden:
            if bases.setdefault(storage(t), t) is t and all(t is not known for known in self.tensors):
                self.tensors.append(t)
        if {*bases} & {key for t in others for key in parts.storages(t)}:
            raise Unfit("it returns tensors that share memory with its inputs or its parameters")
        where = {storage(t): at for at, t in enumerate(self.tensors)}
        # Nothing of the graph stays behind, nor deferred logits, which would cost time at each step.
        stand_ins = {key: _Place() for key in (*found, *later)}
        self._nest = copy.deepcopy(nest, dict(stand_ins))
        self._made = [(stand_ins[key], where[storage(t)], _view(t, bases[storage(t)])) for key, t in found.items()]
        self._later = [
            (stand_ins[key], where[storage(t)], deferred.steps(), _view(t, bases[storage(t)]))
            for (key, deferred), t in zip(later.items(), hidden, strict=True)
        ]

    def filled(self, tensors) -> tuple[object, list]:
        """The nest with these tensors in the place of `self.tensors`, and the products of logits in it."""
        memo = {id(place): view(tensors[at]) for place, at, view in self._made}
        for place, at, steps, view in self._later:
            memo[id(place)] = Deferred.again(steps, view(tensors[at]))
        products = [memo[id(place)]._plan.product for place, *_ in self._later]
        return copy.deepcopy(self._nest, memo), products


def _bases(tensors) -> dict[int, torch.Tensor]:
    """For each memory, the tensor that is made anew; other tensors of that memory are views of it."""
    bases: dict[int, torch.Tensor] = {}
    for t in tensors:
        known = bases.get(storage(t))
        if known is None or (t.numel(), t.requires_grad) > (known.numel(), known.requires_grad):
            bases[storage(t)] = t
    return bases


def _view(t: torch.Tensor, base: torch.Tensor):
    """A function that makes from a copy of `base` what t is of `base`."""
    if t is base:
        return lambda y: y
    size, stride, offset = t.shape, t.stride(), t.storage_offset() - base.storage_offset()
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    dense = torch.empty_like(base, device="meta").stride() == base.stride()
    if t.dtype is not base.dtype or (t.requires_grad and not base.requires_grad) or not dense:
        raise Unfit("it returns tensors that share memory in a way of their own")
    if offset < 0 or (t.numel() and last >= base.numel()):
        raise Unfit("it returns tensors that share memory, of which none holds all")
    grad = t.requires_grad
    return lambda y: (y if grad else y.detach()).as_strided(size, stride, offset + y.storage_offset())


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _look(x, found, later, seen) -> None:
    if isinstance(x, _AS_THEY_ARE) or id(x) in seen:
        return
    seen.add(id(x))
    if type(x) is Deferred:
        if not x.waits():
            raise Unfit("it reads logits that are computed only if they are read")
        later[id(x)] = x
    elif isinstance(x, torch.Tensor):
        if type(x) is not torch.Tensor:
            raise Unfit(f"it returns a {type(x).__name__}")
        found[id(x)] = x
    elif isinstance(x, nn.Module):
        raise Unfit("it returns a module")
    elif isinstance(x, (dict, list, tuple)) or hasattr(x, "__dict__"):
        for part in x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else ():
            _look(part, found, later, seen)
        for part in vars(x).values() if hasattr(x, "__dict__") else ():
            _look(part, found, later, seen)
    else:
        raise Unfit(f"it returns a {type(x).__name__}")
