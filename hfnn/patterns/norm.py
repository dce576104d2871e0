"""Rows of norms: in float32, of unit vectors, and with a factor and a shift behind them.

norm(x.float()).type(x.dtype)                   CLIP, guided diffusion
norm(x) * (1 + scale) + shift                   DiT, scale-shift group norms, learned factors
normalize(x, dim=-1) * g                        RMSNorms of unit vectors, QK norms
"""

import math

import torch
from torch import fx

from hfnn.ops import affine, group_norm, layer_norm, normalize
from hfnn.patterns.graph import name_of
from hfnn.patterns.row import Row, added, call

WIDE_FLOOR = 1 << 19  # elements


def wide_norm(like, x, norm):
    return norm(x.float()).type_as(like)


def _wide_norm(prefer, like, x, norm):
    own, y = isinstance(norm, tuple), None
    if x.dtype is not torch.float64 and like.dtype in (x.dtype, torch.float32):
        if norm[0] == "layer_norm" if own else hasattr(norm, "normalized_shape"):
            how = norm[1:] if own else (norm.normalized_shape, norm.weight, norm.bias, norm.eps)
            fused = layer_norm.fused if tuple(how[0]) == tuple(x.shape[-1:]) else None
        else:
            how = norm[1:] if own else (norm.num_groups, norm.weight, norm.bias, norm.eps)
            fused = group_norm.fused
            prefer = "memory" if prefer == "auto" and x.numel() >= WIDE_FLOOR else prefer  # also faster than three ops
        # If not, torch's own op says what is wrong.
        if fused is not None and all(p is None or p.dtype is torch.float32 for p in how[1:3]):
            y = fused(x, *how[fused is layer_norm.fused :], like.dtype, prefer)
    return call(norm, x.float()).to(like.dtype) if y is None else y


def unit(x, length):
    return length(x)


def _unit(prefer, x, length):
    return normalize.normalize(x, *length[1:], prefer=prefer)


def scaled(x, scale):
    return x * scale


def modulated(x, scale, shift):
    return x * scale + shift


def _of_norm(site):
    """x is the result of a norm, and the others are numbers or smaller."""
    nodes = [node for node in site.bound.values() if isinstance(node, fx.Node)]
    if not all("shape" in node.meta for node in nodes):
        return None
    sizes = [math.prod(node.meta["shape"]) if node in nodes else 0 for node in site.bound.values()]
    if sizes[0] < sizes[1]:
        site.bound |= {"x": site.bound["scale"], "scale": site.bound["x"]}
    fits = sorted(sizes)[-2] < max(sizes) and (len(sizes) < 3 or sizes[2] < max(sizes))
    if not (fits and _is_normed(site.bound["x"])):
        return None
    return tuple(site.is_first(name) for name in site.row.names[1:])


def _is_normed(node) -> bool:
    if name_of(node) in ("to", "as_type", "contiguous", "mul"):
        return any(_is_normed(each) for each in node.all_input_nodes)
    what = node.meta["kind"] if node.op == "call_module" else name_of(node)
    return what in ("layer_norm", "group_norm", "norm", "normalize")


def _affine(prefer, x, *more):
    """more: factor, shift, and which of them is a first operand."""
    small, first = more[: len(more) // 2], more[len(more) // 2 :]
    ahead = [each for each, at in zip(small, first, strict=True) if at and isinstance(each, torch.Tensor)]
    if all(_follows(each, x) for each in ahead):
        return affine.affine(x, *small, prefer=prefer)
    y = small[0] * x if first[0] else x * small[0]
    return y if len(small) == 1 else added(y, small[1], first[1])


def _follows(small, x) -> bool:
    """Whether the result has the strides of x although `small` is the first operand, because its own are in the same
    order."""
    dims = [dim for dim in range(-small.dim(), 0) if small.shape[dim] != 1]
    return affine.is_small(small, x) and sorted(dims, key=small.stride) == sorted(dims, key=x.stride)


_WIDE = {"layer_norm": layer_norm.OP, "group_norm": group_norm.OP}
ROWS = (
    Row(wide_norm, {"norm": "norm"}, _wide_norm, _WIDE),
    Row(modulated, {}, _affine, affine.OP, _of_norm, numbers=True),
    Row(scaled, {}, _affine, affine.OP, _of_norm, numbers=True),
    Row(unit, {"length": "normalize"}, _unit, normalize.OP, lambda site: () if site.bound["length"][1] == 2 else None),
)
