"""Options are checked where they are given: in `convert`, in constructors and tools, not at every call of an op."""

from collections.abc import Collection


def one_of(name: str, value, allowed: Collection) -> None:
    """Raises ValueError unless `value` equals one of `allowed`, which have its type; 1 is not True."""
    if not any(value is x or (isinstance(value, type(x)) and value == x) for x in allowed):
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(map(repr, allowed))}")
