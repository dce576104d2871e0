"""The products of attention, as counters of FLOPs see them where stock torch computes it."""

import functools
from typing import NamedTuple

import torch

from hfnn.core import flops

_aten = torch.ops.aten
_FUSED = {
    1: _aten._scaled_dot_product_flash_attention,
    2: lambda q, k, v: _aten._scaled_dot_product_efficient_attention(q, k, v, None, True),
    3: lambda q, k, v: _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True),
}


class Stock(NamedTuple):
    """The call of stock torch that an attention replaces. shapes: of query, key and value, None for the given ones.

    explicit: two products and a softmax, not torch's op; dense: whether the op gets a mask, trained: which requires a
    gradient; the other fields are arguments of the op.
    """

    explicit: bool
    dense: bool = False
    trained: bool = False
    dropout_p: float = 0.0
    is_causal: bool = False
    shapes: tuple | None = None

    def forward(self, query, key, value, bias) -> None:
        """Count the products of forward."""
        given, shape = self._given(query, key, value, (False,) * 3), None if bias is None else (1,)
        flops.forward(functools.partial(_formula, self._fused(given)), *(x.shape for x in given), shape)

    def backward(self, query, key, value, bias, needs) -> None:
        """Count those of backward for the gradients that are needed."""
        given = self._given(query, key, value, needs)
        shapes = *(x.shape for x in given), None if bias is None else (1,)
        flops.backward(functools.partial(_formula, self._fused(given)), needs[:4], *shapes)

    def both(self, query, key, value) -> None:
        """Count those of forward and of a backward, where an op of torch runs that a profiler does not count."""
        self.forward(query, key, value, None)
        if torch.is_grad_enabled():
            self.backward(query, key, value, None, [x.requires_grad for x in (query, key, value)] + [False])

    def _given(self, query, key, value, needs) -> list:
        """Tensors like stock's, on the same device, almost without memory."""
        given, shapes = (query, key, value), self.shapes or (query.shape, key.shape, value.shape)
        with flops.uncounted(profiled=True):
            return [
                x.new_empty(shape[-2:]).expand(shape).requires_grad_(need)
                for x, shape, need in zip(given, shapes, needs, strict=False)
            ]

    def _fused(self, given):
        """The op of torch that would compute it, or None for two products."""
        query, key, value = given
        if self.explicit:
            return None
        with flops.uncounted(profiled=True), torch.enable_grad():
            rows = query.shape[-2], key.shape[-2]
            dense = query.new_empty(rows[1], requires_grad=self.trained).expand(rows) if self.dense else None
            number = torch._fused_sdp_choice(
                query, key, value, dense, self.dropout_p, self.is_causal, enable_gqa=query.shape[-3] != key.shape[-3]
            )
        if number == 1 and query.is_cpu:
            return _aten._scaled_dot_product_flash_attention_for_cpu
        return _FUSED.get(number)


def _formula(fused, query, key, value, bias):
    heads = query.shape[-3]
    if fused is not None:
        key, value = (x.expand(*x.shape[:-3], heads, -1, -1) if x.shape[-3] == 1 else x for x in (key, value))
        return fused(query, key, value)[0]
    key, value = (x.repeat_interleave(heads // x.shape[-3], -3) for x in (key, value))
    scores = query @ key.mT
    return (scores if bias is None else scores + bias) @ value
