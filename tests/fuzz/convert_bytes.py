"""The bytes that the graph behind a result keeps for backward: each storage once, rounded up as allocators do.

Counted without hooks of saved tensors: programs have hooks of their own, and converted modules keep more under hooks.
"""

import functools

import torch

from hfnn.core import bits, native
from hfnn.memory.peak import tensors
from hfnn.memory.saved import nodes

BLOCK = 512


def kept_bytes(result: torch.Tensor, others) -> int:
    """others: tensors whose memory is not counted, because the model or the user holds it."""
    seen = {t.untyped_storage()._cdata for t in others if t is not None}
    total = 0
    for _, node in nodes(result):
        for t in _held(node):
            storage = t.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                total += -(-storage.nbytes() // BLOCK) * BLOCK
    return total


def _held(node):
    for name in _names(type(node)):
        raw = getattr(node, name)
        for one in raw if isinstance(raw, (tuple, list)) else (raw,):
            yield from tensors(getattr(one, "data", None))
    attributes = getattr(node, "__dict__", {})
    yield from tensors(attributes)
    if type(attributes.get("recipe")) is bits.OfOutput:
        yield from tensors(attributes["recipe"]._y)
    if native.extension is not None:
        yield from native.extension.stored(node)
        yield from tensors(native.extension.packed(node))


@functools.lru_cache(1000)
def _names(cls):
    """The attributes for what a node saved."""
    return [attribute for attribute in dir(cls) if attribute.startswith("_raw_saved_")]
