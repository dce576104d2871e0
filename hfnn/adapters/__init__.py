"""What structure alone cannot tell: classes of other libraries that are an op of ours by name, one file per library.

No library is imported here: where the user has not imported it, a model cannot hold its classes.
"""

from hfnn.adapters import transformers


def rooms() -> dict[type, type]:
    """The library's class -> what its forward becomes, for the libraries imported in this process."""
    return {**transformers.rooms()}
