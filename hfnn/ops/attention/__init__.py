"""Attention: softmax(q k^T) v without a matrix of scores (csrc/attention.h)."""

from hfnn.ops.attention.multihead import MultiheadAttention
from hfnn.ops.attention.sdpa import OP, in_rows, scaled_dot_product_attention
from hfnn.ops.attention.transformer import TransformerDecoderLayer, TransformerEncoderLayer

__all__ = [
    "OP",
    "MultiheadAttention",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
    "in_rows",
    "scaled_dot_product_attention",
]
