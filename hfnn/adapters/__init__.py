"""What structure alone cannot tell: classes of other libraries that are an op of ours by name, one file per library.

No library is imported here: where the user has not imported it, a model cannot hold its classes.
"""

from torch import nn

from hfnn.adapters import attention, diffusers, transformers
from hfnn.patterns.probe import Refusal
from hfnn.patterns.proof import Match


def rooms() -> dict[type, type]:
    """The library's class -> what its forward becomes, for the libraries imported in this process."""
    return {**transformers.rooms()}


def room_of(module: nn.Module, around: list[nn.Module]) -> tuple[type, type] | None:
    """(the class it has without hfnn, what its forward becomes) for a module told by what is in it or around it."""
    return transformers.room_of(module, around)


def recognise(module: nn.Module) -> Match | Refusal | None:
    """How a class that uses a library's own interface is to be read, or why it is left alone."""
    return attention.recognise(module) or diffusers.recognise(module)


def without_hooks(copy: nn.Module) -> nn.Module:
    """Tells the modules of a copy that lost its hooks that it has none; returns the copy."""
    return transformers.without_hooks(copy)


def double(copy: nn.Module) -> nn.Module:
    """`copy.double()`, and no implementation that has no float64."""
    return transformers.double(copy)


def settle(model: nn.Module) -> None:
    """What a model needs besides the classes of its modules, once these are as they are to be."""
    attention.settle(model)


def release(model: nn.Module) -> None:
    """Undo `settle`."""
    attention.release(model)
