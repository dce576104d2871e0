"""The tensors in the arguments and results of modules: in lists, tuples, mappings and dataclasses."""

import collections
import copy
import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


def tensors(nest) -> Iterator[Tensor]:
    """The tensors in a module's result."""
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, list | tuple):
        for part in nest:
            yield from tensors(part)
    elif isinstance(nest, collections.abc.Mapping):
        for part in nest.values():
            yield from tensors(part)
    elif dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        for field in dataclasses.fields(nest):
            yield from tensors(getattr(nest, field.name))


def cast(nest, dtype: torch.dtype):
    """The same, with its floating-point tensors in `dtype`; containers with such tensors are copied."""

    def one(leaf):
        if isinstance(leaf, Tensor):
            return leaf.to(dtype) if leaf.is_floating_point() and leaf.dtype is not dtype else leaf
        if isinstance(leaf, collections.abc.MutableMapping):  # one that torch's pytree does not know
            leaf = copy.copy(leaf)
            for key, value in list(leaf.items()):
                leaf[key] = cast(value, dtype)
        return leaf

    return tree_map(one, nest)
