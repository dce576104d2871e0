"""Attention over padded batches, for the trees of `convert_models.py`: some queries see no key.

What such a query gives depends on the spelling: 0, a mean of values, or NaN.
"""

import torch
import torch.nn.functional as F
from torch import nn

# How attention is spelled. Those of LIBRARY are classes of transformers, which make their masks themselves.
OWN, LIBRARY = ("function", "learned", "hand", "multihead"), ("eager", "sdpa", "capped")
PADDINGS = ("left", "right", "sample", "holes")
MASKS = ("boolean", "finite", "infinite")


def features(how, padding, mask, causal) -> set[str]:
    """Names of what a program with such a layer has; "blind": with queries that see no key."""
    mask = {"eager": "finite", "capped": "finite", "sdpa": "boolean"}.get(how, mask)
    mask = "finite" if (how, mask) in (("learned", "boolean"), ("hand", "boolean")) else mask
    found = {f"padding {padding}", f"mask {mask}"}
    return found | ({f"blind {mask}"} if padding == "sample" or (causal and padding != "right") else set())


def counts(padding: str, rows: int, tokens: int) -> torch.Tensor:
    """(rows, tokens): which tokens count."""
    mask = torch.ones(rows, tokens, dtype=torch.bool)
    for row in mask[:2]:
        if padding == "left":
            row[:2] = False
        elif padding == "right":
            row[-2:] = False
        elif padding == "holes":
            row[::2] = False
        else:
            row[:] = False
    return mask


class Padded(nn.Module):
    """Two heads of attention; the first two samples of a batch are padded."""

    def __init__(self, width, how, padding, mask, causal):
        super().__init__()
        self.how, self.padding, self.mask, self.causal = how, padding, mask, causal
        if how == "multihead":
            self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        elif how in LIBRARY:
            self.attention = _of_library(width, how)
            self.config = self.attention.config
        else:
            self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
            self.bias = nn.Parameter(torch.zeros(16, 16)) if how == "learned" else None

    def forward(self, x):
        rows = x.reshape(-1, *x.shape[-2:])
        counting = counts(self.padding, *rows.shape[:2])
        if self.how in LIBRARY:
            return self.library(rows, counting).view(x.shape)
        hidden = ~counting[:, None, None, :]
        if self.causal:
            hidden = hidden | torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).triu(1)
        if self.how == "multihead":
            hidden = hidden.expand(-1, 2, *x.shape[-2:-1], -1).flatten(0, 1)
            mask = hidden if self.mask == "boolean" else self.added(hidden, x)
            return self.attention(rows, rows, rows, attn_mask=mask, need_weights=False)[0].view(x.shape)
        return self.out(self.attend(rows, hidden).transpose(1, 2).reshape(x.shape))

    def attend(self, rows, hidden):
        q, k, v = (f(rows).view(*rows.shape[:-1], 2, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.how == "function":
            return F.scaled_dot_product_attention(q, k, v, ~hidden if self.mask == "boolean" else self.added(hidden, q))
        if self.how == "learned":
            bias = self.bias[: hidden.shape[-1], : hidden.shape[-1]]
            if self.mask == "boolean":
                mask = torch.where(hidden, torch.finfo(bias.dtype).min, bias)
            else:
                mask = bias + self.added(hidden, bias)
            return F.scaled_dot_product_attention(q, k, v, mask)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if self.mask == "boolean":
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        else:
            scores = scores + self.added(hidden, scores)
        return F.softmax(scores, -1) @ v

    def added(self, hidden, like):
        lowest = torch.finfo(like.dtype).min if self.mask == "finite" else -float("inf")
        return torch.zeros(hidden.shape, dtype=like.dtype).masked_fill(hidden, lowest)

    def library(self, rows, counting):
        from transformers import masking_utils

        make = masking_utils.create_causal_mask if self.causal else masking_utils.create_bidirectional_mask
        mask = make(self.config, rows, counting, None)
        turns = rows.new_ones(1, rows.shape[1], self.attention.head_dim), rows.new_zeros(1, 1, 1)
        return self.attention(rows, turns, mask, is_causal=self.causal)[0]


def _of_library(width: int, how: str) -> nn.Module:
    # transformers takes seconds to import, and few programs need it.
    from transformers import Gemma2Config, LlamaConfig
    from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
    from transformers.models.llama.modeling_llama import LlamaAttention

    config, made = (Gemma2Config, Gemma2Attention) if how == "capped" else (LlamaConfig, LlamaAttention)
    sizes = {"hidden_size": width, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": width // 2}
    implementation = "sdpa" if how == "sdpa" else "eager"
    return made(config(num_hidden_layers=1, attn_implementation=implementation, **sizes), 0)
