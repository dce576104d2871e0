"""What structure alone cannot tell: classes of other libraries that are an op of ours by name, one file per library.

No library is imported here: where the user has not imported it, a model cannot hold its classes.
"""

from torch import nn

from hfnn.adapters import transformers


def rooms() -> dict[type, type]:
    """The library's class -> what its forward becomes, for the libraries imported in this process."""
    return {**transformers.rooms()}


def room_of(module: nn.Module, around: list[nn.Module]) -> tuple[type, type] | None:
    """(the class it has without hfnn, what its forward becomes) for a module told by what is in it or around it."""
    return transformers.room_of(module, around)
