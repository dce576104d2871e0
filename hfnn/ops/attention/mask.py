"""Masks and lengths in the form of the attention kernels (csrc/attention.h).

A boolean mask of T x S becomes T x ceil(S / 8) bytes of bits, and a summary of its 128 x 128 tiles, so that kernels can
skip hidden tiles. A caller's mask is packed at each call, because it may be refilled in between without a new version
(by numpy, a receive, `.data`). A mask that hfnn made itself for the layers of one forward (`own`) is packed once, and
the result lives as long as the mask. Nothing here waits for the GPU.
"""

import weakref
from collections.abc import Callable

import torch

from hfnn.core import bits
from hfnn.core.context import address, capturing

TILE = 128
NONE, MIXED, FULL = 0, 1, 2  # which pairs of a tile count

# By id() of a tensor of `own`, with a weak reference that proves its identity: (reference, {(kind of result, part):
# (marks of the tensor at that time, the result)}).
_made: dict[int, tuple] = {}


def own(x: torch.Tensor) -> torch.Tensor:
    """Marks x so that results from it and its views are cached: a tensor that only hfnn has used."""
    key = id(x)
    _made[key] = weakref.ref(x, lambda _: _made.pop(key, None)), {}
    return x


def packed(mask: torch.Tensor, shape: tuple[int, int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(bits, tiles) of a boolean mask that broadcasts to `shape`, (B, H, T, S).

    bits: (B, H, T, ceil(S / 8)) uint8, bits after the last key 0; tiles: (B, H, ceil(T / 128), ceil(S / 128)) uint8,
    each NONE, MIXED or FULL. Both have stride 0 in broadcast dimensions. Raises ValueError for a mask of another dtype
    or shape.
    """
    if mask.dtype is not torch.bool:
        raise ValueError(f"a mask to pack must be torch.bool, got {mask.dtype}: add a mask of numbers as attn_mask")
    _check_broadcast(mask, shape)
    return _once(mask, ("packed", *shape), lambda: _pack(_narrowed(mask.detach(), shape[3]), shape))


def unpacked(packed_bits: torch.Tensor, keys: int) -> torch.Tensor:
    """The boolean mask (B or 1, H or 1, T or 1, S) of which `packed` returned these bits."""
    rows = _narrowed(packed_bits, packed_bits.shape[3])
    return bits.unpack(rows.reshape(-1), (*rows.shape[:3], rows.shape[3] * 8))[..., :keys]


def bounds(lengths: torch.Tensor, batch: int, keys: int) -> torch.Tensor:
    """(B, 2) int32: the first key of each batch element, and the one after its last, from 0 to `keys`.

    lengths: integers, (B,), how many keys each element has, or (B, 2), the two numbers themselves. Raises ValueError
    for another dtype or shape.
    """
    integers = torch.int32, torch.int64
    if lengths.dtype not in integers or tuple(lengths.shape) not in ((batch,), (batch, 2)):
        raise ValueError(
            f"lengths must be torch.int32 or torch.int64 of shape ({batch},), the keys of each batch element, or "
            f"({batch}, 2), their first and the one behind their last; got {lengths.dtype} {tuple(lengths.shape)}"
        )
    return _once(lengths, ("bounds", batch, keys), lambda: _bound(lengths, keys))


def _check_broadcast(mask, shape):
    sizes = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if mask.dim() > 4 or any(size not in (1, wanted) for size, wanted in zip(sizes, shape, strict=True)):
        raise ValueError(
            f"attn_mask {tuple(mask.shape)} does not broadcast to {tuple(shape)}: batch, heads, queries, keys"
        )


def _bound(lengths, keys):
    lengths = lengths.clamp(0, keys).int().contiguous()
    return lengths if lengths.dim() == 2 else torch.stack((torch.zeros_like(lengths), lengths), 1)


def _narrowed(mask, keys):
    """The mask with four dimensions; broadcast dimensions have size 1, except that of the keys."""
    mask = mask[(None,) * (4 - mask.dim())]
    for dim in range(3):
        if mask.stride(dim) == 0 and mask.shape[dim] > 1:
            mask = mask.narrow(dim, 0, 1)
    return mask.expand(*mask.shape[:3], keys)


def _pack(mask, shape):
    batch, heads, queries, keys = shape
    rows = torch.nn.functional.pad(mask, (0, -keys % 8))
    packed_bits = bits.pack(rows).view(*rows.shape[:3], rows.shape[3] // 8)
    tiles = _tiles(mask)
    down = -(-queries // TILE)
    return (
        packed_bits.expand(batch, heads, queries, packed_bits.shape[3]),
        tiles.expand(batch, heads, down, tiles.shape[3]),
    )


def _tiles(mask):
    """NONE, MIXED or FULL for each tile; a mask of one query, broadcast or not, has one row of tiles."""
    some, every = mask, mask
    for dim in (3, 2):
        some, every = _by_tiles(some, dim, torch.any), _by_tiles(every, dim, torch.all)
    return some.to(torch.uint8) + every.to(torch.uint8)


def _by_tiles(x, dim, reduce):
    """`reduce` over blocks of TILE elements along `dim`; the last block may be smaller."""
    whole = x.shape[dim] // TILE * TILE
    parts = [reduce(x.narrow(dim, 0, whole).unflatten(dim, (-1, TILE)), dim + 1)] if whole else []
    if whole < x.shape[dim]:
        parts.append(reduce(x.narrow(dim, whole, x.shape[dim] - whole), dim, keepdim=True))
    return torch.cat(parts, dim) if parts else x


def _once(x: torch.Tensor, what: tuple, make: Callable):
    """make(), or its previous result for the same part of a tensor of `own`, if the tensor was not written to since.

    During graph capture it is always made anew, because the mask of a replay has other contents.
    """
    owner = x if x._base is None else x._base
    found = _made.get(id(owner))
    if found is None or found[0]() is not owner:
        return make()
    if x.is_inference() or (x.is_cuda and capturing()):
        return make()
    stream = torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else None
    what = (*what, stream, x.dtype, x.storage_offset(), tuple(x.shape), x.stride())
    marks = x._version, address(x)
    before = found[1].get(what)
    if before is None or before[0] != marks:
        before = found[1][what] = marks, make()
    return before[1]
