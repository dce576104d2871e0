"""Facts that structure alone cannot show: classes of other libraries that are one of our ops by name, one file each.

No library is imported here: if the user has not imported it, a model cannot contain its classes.
"""

import torch
from torch import nn

from hfnn.adapters import attention, diffusers, transformers, written
from hfnn.core import parts
from hfnn.core.holder import target_of
from hfnn.deferred.head import Head, Use
from hfnn.deferred.head import candidates as candidates
from hfnn.patterns.probe import Refusal
from hfnn.patterns.proof import Match


def rooms() -> dict[type, type]:
    """A library's class -> the replacement of its forward, for the libraries imported in this process."""
    return {**transformers.rooms()}


def room_of(module: nn.Module, around: list[nn.Module], use: Use | None) -> type | None:
    """The replacement of its forward for a module recognised by its content or its surroundings. use: of a candidate
    for the model's output layer."""
    return transformers.room_of(module, around) or (None if use is None or target_of(module) is Head else Head)


def recognise(module: nn.Module) -> Match | Refusal | None:
    """How to treat a class that uses a library's own interface, or why it is left alone."""
    return attention.recognise(module) or diffusers.recognise(module) or written.recognise(module)


def without_hooks(copy: nn.Module) -> nn.Module:
    """Makes the modules of a copy without hooks know that there are none; returns the copy."""
    return transformers.without_hooks(copy)


def widened(copy: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The copy in float64 or float32, complex parts too, without implementations that do not support float64."""
    return transformers.without_grouped_products(copy)._apply(lambda t: parts.widened(t, dtype))


def settle(model: nn.Module) -> None:
    """What a model needs in addition, once the classes of its modules are final."""
    attention.settle(model)


def release(model: nn.Module) -> None:
    """Undo `settle`."""
    attention.release(model)
