"""Attention in windows of images, as Swin's, and torch's op in a module that has the products, too; the units of
attention.py."""

import torch
from attention import BATCH, HEAD, HEADS, TOKENS, WIDTH, NanoGPT, Packed, program
from torch import nn


class Windows(Packed):
    """Swin's: a trainable bias for heads, and, in shifted windows, another mask for each window of an image."""

    def __init__(self):
        super().__init__()
        self.table, N = nn.Parameter(torch.randn(HEADS, 128, 128)), 128
        regions = torch.arange(TOKENS).add(N // 2).div(N, rounding_mode="floor").view(-1, N)
        self.register_buffer("mask", (regions[:, None] != regions[:, :, None]) * -100.0)

    def forward(self, x):
        B_, N, C = (x := x.view(-1, 128, WIDTH)).shape
        qkv = self.c_attn(x).reshape(B_, N, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q * HEAD**-0.5) @ k.transpose(-2, -1)
        attn = attn + self.table.unsqueeze(0)
        nW = self.mask.shape[0]
        attn = attn.view(B_ // nW, nW, self.n_head, N, N) + self.mask.unsqueeze(1).unsqueeze(0)
        attn = self.softmax(attn.view(-1, self.n_head, N, N))
        x = (self.attn_dropout(attn) @ v).transpose(1, 2).reshape(B_, N, C)
        return self.c_proj(x).view(BATCH, TOKENS, C)


class Fused(NanoGPT):
    def __init__(self, dropout=0.0):
        super().__init__(dropout)
        self.flash = True


PROGRAMS = [
    program(Fused, 6, 18, 0.1, draws=True),  # the result is copied to the order of tokens
    program(Windows, 6.5, 7, slow=True),  # the masks of an image's windows and heads, and the result in another order
]
