"""`torch.nn.TransformerEncoderLayer` and `TransformerDecoderLayer` made of hfnn's parts, with fused block ends.

    norm_first      x = x + dropout(block(norm(x)))         a sum and the norm of the next block in one kernel
    else            x = norm(x + dropout(block(x)))         a sum and its norm in one kernel

The blocks are self-attention, in the decoder attention to memory, and linear2(dropout(f(linear1(x)))). Vaswani et al.,
"Attention Is All You Need", 2017; norms first: Xiong et al., "On Layer Normalization in the Transformer Architecture",
ICML 2020, https://arxiv.org/abs/2002.04745

So a layer keeps the sums, q, k, v, and the results of attention and linear1. The rest is rebuilt, or drawn again from a
seed.
"""

import functools
import types
from typing import Any

import torch
from torch import Tensor, nn

from hfnn.core.context import compiling, context, is_bare
from hfnn.core.holder import target_of
from hfnn.core.kernel import forced
from hfnn.ops.add_norm import add_layer_norm
from hfnn.ops.attention.multihead import MultiheadAttention
from hfnn.ops.attention.sdpa import OP
from hfnn.ops.dropout import Dropout
from hfnn.ops.dropout_add import dropout_add
from hfnn.ops.layer_norm import LayerNorm
from hfnn.ops.layout import in_rows
from hfnn.ops.linear import Linear
from hfnn.ops.piecewise import ReLU, relu
from hfnn.ops.relu_dropout import relu_dropout
from hfnn.ops.smooth import GELU, SiLU, gelu, silu

_PARTS = {
    nn.MultiheadAttention: MultiheadAttention,
    nn.LayerNorm: LayerNorm,
    nn.Linear: Linear,
    nn.Dropout: Dropout,
    nn.ReLU: ReLU,
    nn.GELU: GELU,
    nn.SiLU: SiLU,
}
# The next product keeps its input, which is relu's output.
_FUNCTIONS = {
    nn.functional.relu: functools.partial(relu, keep="output"),
    torch.relu: functools.partial(relu, keep="output"),
    nn.functional.gelu: gelu,
    nn.functional.silu: silu,
}
_RELUS = nn.functional.relu, torch.relu


class _Layer:
    """Common part of both layers: hfnn's parts from the start, and the decision whether they are fused here."""

    prefer = "auto"
    _hfnn_when = (
        "sums and norms are one where dropout and norm are hfnn's and carry no hooks, which would not be called"
    )

    @property
    def _hfnn_cols(self) -> int:
        """The subject of a kernel's limit, for `hfnn.report`."""
        return self.self_attn.head_dim

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for part in self._modules.values():
            if type(part) in _PARTS:
                part.__class__ = _PARTS[type(part)]


class TransformerEncoderLayer(_Layer, nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer`: the same arguments, defaults, state dict and results.

    In eval mode, if nothing requires a gradient, torch's own code runs, with its fast path. `prefer`: see
    `hfnn.convert`.
    """

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        if not _takes(self, nn.TransformerEncoderLayer, src, (src_mask, src_key_padding_mask)):
            return nn.TransformerEncoderLayer.forward(self, src, src_mask, src_key_padding_mask, is_causal)
        how = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask, "is_causal": is_causal}
        if not self.norm_first:
            x, _ = _end(self, _attention(self.self_attn, src, src, how), src, self.dropout1, self.norm1)
            return _end(self, _feed_forward(self, x), x, self.dropout2, self.norm2)[0]
        y = self.norm1(src)
        y, x = _end(self, _attention(self.self_attn, y, y, how), src, self.dropout1, self.norm2)
        return _sum(self, _feed_forward(self, y), x, self.dropout2)


class TransformerDecoderLayer(_Layer, nn.TransformerDecoderLayer):
    """`torch.nn.TransformerDecoderLayer`: the same arguments, defaults, state dict and results.

    In eval mode, if nothing requires a gradient, torch's own code runs. `prefer` is set by `hfnn.convert`.
    """

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        if not _takes(self, nn.TransformerDecoderLayer, tgt):
            masks = tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask
            causal = tgt_is_causal, memory_is_causal
            return nn.TransformerDecoderLayer.forward(self, tgt, memory, *masks, *causal)
        own = {"attn_mask": tgt_mask, "key_padding_mask": tgt_key_padding_mask, "is_causal": tgt_is_causal}
        cross = {"attn_mask": memory_mask, "key_padding_mask": memory_key_padding_mask, "is_causal": memory_is_causal}
        if not self.norm_first:
            x, _ = _end(self, _attention(self.self_attn, tgt, tgt, own), tgt, self.dropout1, self.norm1)
            x, _ = _end(self, _attention(self.multihead_attn, x, memory, cross), x, self.dropout2, self.norm2)
            return _end(self, _feed_forward(self, x), x, self.dropout3, self.norm3)[0]
        y = self.norm1(tgt)
        y, x = _end(self, _attention(self.self_attn, y, y, own), tgt, self.dropout1, self.norm2)
        y, x = _end(self, _attention(self.multihead_attn, y, memory, cross), x, self.dropout2, self.norm3)
        return _sum(self, _feed_forward(self, y), x, self.dropout3)


def _takes(layer, base: type, x, masks=()) -> bool:
    """Whether the layer runs fused here: in training, unless a subclass has its own blocks.

    Masks that torch's layer rejects or warns about are left to torch.
    """
    # In training also without grad mode: reentrant checkpointing runs forward so, and again in grad mode.
    if compiling() or not (layer.training or torch.is_grad_enabled()):
        return False
    if forced() == "torch" or context(x) is not None or not (layer.training or _learns(layer, x)):
        return False
    for name in ("_sa_block", "_mha_block", "_ff_block"):
        own = getattr(base, name, None)
        if own is not None and getattr(getattr(layer, name), "__func__", None) is not own:
            return False
    kinds = {mask.dtype for mask in masks if isinstance(mask, torch.Tensor)}
    return len(kinds) < 2 and all(kind is torch.bool or kind.is_floating_point for kind in kinds)


def _learns(layer, x) -> bool:
    return x.requires_grad or any(parameter.requires_grad for parameter in layer.parameters())


def _attention(attention, x, memory, how):
    return attention(x, memory, memory, need_weights=False, **how)[0]


def _feed_forward(layer, x):
    h, f, drop, prefer = layer.linear1(x), layer.activation, layer.dropout, layer.prefer
    is_relu = any(f is known for known in _RELUS) or (isinstance(f, nn.Module) and _is_bare(f, ReLU))
    if is_relu and _is_bare(drop, Dropout) and drop.training and 0 < drop.p < 1:
        return layer.linear2(relu_dropout(h, drop.p, prefer=prefer))
    known = _FUNCTIONS.get(f) if type(f) in (types.FunctionType, types.BuiltinFunctionType) else None
    return layer.linear2(drop(f(h) if known is None else known(h, prefer=prefer)))


def _end(layer, x, residual, drop, norm):
    """(norm(sum), sum) for sum = residual + drop(x)."""
    if _is_bare(drop, Dropout) and _is_bare(norm, LayerNorm) and in_rows(residual):
        how = norm.normalized_shape, norm.weight, norm.bias, norm.eps
        return add_layer_norm(x, residual, *how, p=drop.p, training=drop.training, prefer=layer.prefer)
    total = _sum(layer, x, residual, drop)
    return norm(total), total


def _sum(layer, x, residual, drop):
    if _is_bare(drop, Dropout) and in_rows(residual):
        return dropout_add(x, residual, drop.p, drop.training, prefer=layer.prefer)
    return residual + drop(x)


def _is_bare(part, cls: type) -> bool:
    return target_of(part) is cls and is_bare(part)


OP.modules[nn.TransformerEncoderLayer] = TransformerEncoderLayer
OP.modules[nn.TransformerDecoderLayer] = TransformerDecoderLayer
