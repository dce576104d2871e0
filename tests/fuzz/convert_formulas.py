"""Modules that write out a norm, what stands behind it, or an activation, for the fuzzer of `hfnn.convert`."""

import torch
from torch import nn
from torch.nn import functional as F


class Formula(nn.Module):
    """turned: operands in the other order; asks: what the forward decides by. Channels are in the last dimension, or in
    the second one before `planes` others."""

    NORMS = "wide", "wide_own", "factor", "modulated", "unit", "residual"
    MAPS = "layer_scale", "silu", "gelu", "gelu_tanh", "quick_gelu", "relu_squared", "exp"
    ASKS = None, None, None, "rank", "size", "larger"

    def __init__(self, D, planes, kind, turned, asks):
        super().__init__()
        self.kind, self.turned, self.asks, self.planes, self.root = kind, turned, asks, planes, D**0.5
        if kind in ("wide", "wide_own", "factor", "modulated"):
            self.norm = nn.GroupNorm(2, D) if planes else nn.LayerNorm(D)
        if kind in ("factor", "unit"):
            self.g, self.b = (nn.Parameter(torch.randn(D, *(1,) * planes)) for _ in range(2))
        if kind == "modulated":
            self.embed = nn.Linear(D, 2 * D)
        if kind == "residual":
            self.proj, self.drop = nn.Linear(D, D), nn.Dropout(0.0)
        if kind in self.MAPS:
            self.first, self.last = nn.Linear(D, 2), nn.Linear(2, D)
        if kind == "layer_scale":
            self.gamma = nn.Parameter(torch.randn(D))

    def forward(self, x):
        if self.asks == "rank" and x.dim() == 2:
            x = x * 2
        if self.asks == "size" and x.shape[0] == 2:
            x = x * 2
        if self.asks == "larger" and x.size(0) * 2 > 4:
            x = x * 2
        if self.kind == "wide":
            return self.norm(x.float()).to(x.dtype)
        if self.kind == "wide_own" and self.planes:
            norm = self.norm
            return F.group_norm(x.float(), 2, norm.weight.float(), norm.bias.float(), norm.eps).type_as(x)
        if self.kind == "wide_own":
            norm = self.norm
            return F.layer_norm(x.float(), x.shape[-1:], norm.weight.float(), None, norm.eps).type(x.dtype)
        if self.kind == "factor":
            return self.b + self.g * self.norm(x) if self.turned else self.norm(x) * self.g + self.b
        if self.kind == "modulated":
            return self.modulated(x)
        if self.kind == "unit":
            y = F.normalize(x, dim=1 if self.planes else -1)
            return self.g * y * self.root if self.turned else y * self.root * (self.g + 1)
        if self.kind == "residual":
            y = self.drop(self.proj(x))
            return x + y if self.turned else y + x
        if self.kind == "layer_scale":
            y = self.last(self.first(x))
            return x + self.gamma * y if self.turned else y * self.gamma
        return self.last(self.activation(self.first(x)))

    def modulated(self, x):
        if self.planes == 2:
            scale, shift = self.embed(x.mean((2, 3))).unsqueeze(-1).unsqueeze(-1).chunk(2, dim=1)
        elif self.planes:
            scale, shift = self.embed(x.mean(2))[:, :, None].chunk(2, dim=1)
        else:
            scale, shift = self.embed(x.mean(1)).unsqueeze(1).chunk(2, dim=-1)
        return shift + (scale + 1) * self.norm(x) if self.turned else self.norm(x) * (1 + scale) + shift

    def activation(self, h):
        if self.kind == "silu":
            return torch.sigmoid(h) * h if self.turned else h * h.sigmoid()
        if self.kind == "gelu":
            return 0.5 * h * (1 + torch.erf(h / 2**0.5))
        if self.kind == "gelu_tanh":
            return h * 0.5 * (1.0 + torch.tanh(0.7978845608028654 * (h + 0.044715 * h**3)))
        if self.kind == "quick_gelu":
            return torch.sigmoid(1.702 * h) * h if self.turned else h * (h * 1.702).sigmoid()
        if self.kind == "relu_squared":
            return F.relu(h).pow(2) if self.turned else F.relu(h) ** 2
        h = h * 200
        return h / (1 + torch.exp(-h))


def draw(rng, planes, rank):
    kinds = [k for k in Formula.NORMS if not planes or k != "residual"] + list(() if planes else Formula.MAPS)
    kinds = [k for k in kinds if k != "modulated" or rank > 2]
    return planes, rng.choice(kinds), rng.random() < 0.5, rng.choice(Formula.ASKS)
