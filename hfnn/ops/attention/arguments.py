"""Translates the arguments of a call to kernel arguments (csrc/attention.h)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from hfnn.core import flops
from hfnn.ops.attention import mask
from hfnn.ops.attention.products import Stock


class Numbers(NamedTuple):
    """In the order of csrc/attention.h."""

    scale: float
    softcap: float
    left: int
    right: int
    shift: int
    uniform: bool = False
    threshold: int = 0
    seed: int = 0
    offset: int = 0


class Tensors(NamedTuple):
    """Tensors that define the pairs that count, and ALiBi's slopes; None if absent."""

    bits: torch.Tensor | None = None
    tiles: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    bounds: torch.Tensor | None = None
    starts_q: torch.Tensor | None = None
    starts_k: torch.Tensor | None = None

    def for_reference(self) -> dict:
        """Keyword arguments of `reference`, except the mask."""
        starts = None if self.starts_q is None else (self.starts_q, self.starts_k)
        return {"alibi": self.slopes, "lengths": self.bounds, "cu_seqlens": starts}


class Arguments(NamedTuple):
    """The given options besides query, key and value."""

    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    alibi: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    offset: int = 0
    cu_seqlens: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None
    uniform: bool = False
    stock: Stock | None = None  # what it replaces, if that is not torch's op with these options

    def replaced(self, bias: torch.Tensor | None) -> Stock:
        """The call of torch that has these options; bias: the additive mask."""
        if self.stock is not None:
            return self.stock
        explicit = not (self.softcap is self.alibi is self.sinks is None)
        dense = not (self.attn_mask is self.window is self.lengths is self.cu_seqlens is None) or self.offset != 0
        trained = bias is not None and bias.requires_grad
        return Stock(explicit, dense, trained, self.dropout_p, self.is_causal)

    @property
    def ordinary(self) -> bool:
        """Whether torch's own op has arguments for all of it, and counts as what it replaces."""
        if self.stock is not None and self.stock.explicit and flops.by_mode():
            return False
        return (
            self.window is None
            and self.softcap is None
            and self.alibi is None
            and self.sinks is None
            and self.lengths is None
            and self.offset == 0
            and self.cu_seqlens is None
            and not self.uniform
        )

    def for_reference(self) -> dict:
        """Keyword arguments of `reference`, except attn_mask and sinks, which may require gradients."""
        return {name: value for name, value in self._asdict().items() if name not in ("attn_mask", "sinks", "stock")}

    def numbers(self, width: int) -> Numbers:
        """width: the width of a query, D."""
        left, right = (-1 if limit is None else int(limit) for limit in self.window or (None, None))
        if self.is_causal:
            right = 0
        scale = 1 / math.sqrt(width) if self.scale is None and width else self.scale or 0.0
        return Numbers(float(scale), float(self.softcap or 0.0), left, right, int(self.offset), self.uniform)

    def tensors(self, query, key) -> Tensors:
        """query (B, H, T, D), key (B, G, S, D)."""
        batch, heads, queries, _ = query.shape
        found = {}
        if self.attn_mask is not None and self.attn_mask.dtype is torch.bool:
            found["bits"], found["tiles"] = mask.packed(self.attn_mask, (batch, heads, queries, key.shape[2]))
        if self.alibi is not None:
            found["slopes"] = self.alibi.detach().float().expand(batch, heads)
        if self.lengths is not None:
            found["bounds"] = mask.bounds(self.lengths, batch, key.shape[2])
        if self.cu_seqlens is not None:
            found["starts_q"], found["starts_k"] = self.starts()
        return Tensors(**found)

    def both_starts(self):
        return self.cu_seqlens if isinstance(self.cu_seqlens, tuple | list) else (self.cu_seqlens, self.cu_seqlens)

    def starts(self) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(starts.to(torch.int32).contiguous() for starts in self.both_starts())

    def bias(self, query) -> torch.Tensor | None:
        """The additive mask (B or 1, H or 1, T or 1, S or 1), in a dtype that kernels support."""
        bias = self.attn_mask
        if bias is None or bias.dtype is torch.bool:
            return None
        bias = bias[(None,) * (4 - bias.dim())]
        return bias if bias.dtype is query.dtype else bias.to(torch.promote_types(query.dtype, torch.float32))

    def problem(self, query, key, value) -> str | None:
        """Why no kernel accepts a call, as a sentence, or None. query, key and value have four dimensions."""
        batch, heads, _, width = query.shape
        if query.dtype is not key.dtype or query.dtype is not value.dtype:
            return f"query, key and value are {query.dtype}, {key.dtype}, {value.dtype}: give all the same dtype"
        if key.shape[0] != batch or key.shape[3] != width or value.shape[:3] != key.shape[:3]:
            return (
                f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)} do not go together: "
                "(B, H, T, D), (B, G, S, D), (B, G, S, E)"
            )
        if key.shape[1] != heads and not (self.enable_gqa and key.shape[1] and heads % key.shape[1] == 0):
            return f"{heads} heads of queries, {key.shape[1]} of keys: a multiple is taken with enable_gqa=True"
        return self._mask_problem(query, key) or self._other_problem(query, key)

    def _mask_problem(self, query, key) -> str | None:
        if self.attn_mask is None:
            return None
        wanted = (*query.shape[:3], key.shape[2])
        shape = self.attn_mask.shape
        fits = len(shape) <= 4 and all(n in (1, m) for n, m in zip(reversed(shape), reversed(wanted), strict=False))
        if not fits:
            return f"attn_mask {tuple(shape)} cannot be broadcast to {wanted}"
        if self.cu_seqlens is not None:
            return "attn_mask and cu_seqlens exclude each other"
        return None

    def _other_problem(self, query, key) -> str | None:
        if self.window is not None and (
            not isinstance(self.window, tuple | list)
            or len(self.window) != 2
            or any(limit is not None and limit < 0 for limit in self.window)
        ):
            return f"window is (left, right), each None or an int >= 0; got {self.window}"
        if self.softcap is not None and not self.softcap > 0:
            return f"softcap is a number above 0, or None; got {self.softcap}"
        heads = query.shape[1]
        if self.sinks is not None and tuple(self.sinks.shape) != (heads,):
            return f"sinks has shape ({heads},), one for each head; got {tuple(self.sinks.shape)}"
        if self.alibi is not None and tuple(self.alibi.shape) not in ((heads,), (query.shape[0], heads)):
            return f"alibi has shape ({heads},) or ({query.shape[0]}, {heads}); got {tuple(self.alibi.shape)}"
        if self.lengths is not None and tuple(self.lengths.shape) not in ((query.shape[0],), (query.shape[0], 2)):
            return f"lengths has shape ({query.shape[0]},) or ({query.shape[0]}, 2); got {tuple(self.lengths.shape)}"
        if self.cu_seqlens is not None:
            if any(starts.dim() != 1 or starts.is_floating_point() for starts in self.both_starts()):
                return "cu_seqlens is int32 (n + 1,), or two of them"
            if query.shape[0] != 1:
                return f"cu_seqlens goes with one batch element of sequences one behind the other, got {query.shape[0]}"
            if self.lengths is not None:
                return "lengths and cu_seqlens exclude each other"
        if self.uniform and self.cu_seqlens is not None:
            return "uniform and cu_seqlens exclude each other"
        if not 0 <= self.dropout_p <= 1:
            return f"dropout probability has to be between 0 and 1, but got {self.dropout_p}"
        return None
