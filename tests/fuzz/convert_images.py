"""Modules of convolutional models that put features together."""

import torch
from torch import nn


class Dense(nn.Module):
    """Features and what is made of them, read together: by a norm, by a convolution, by both and by torch's ops; with a
    part that can be built again, one that is such a whole itself, one without a gradient, and a view; by numpy's name
    of the dimension; as the last of several wholes; with one that is written to: one that can be built again, or one
    that only the whole keeps."""

    READ = (
        "norm", "conv", "both", "torch", "twice", "nested", "data", "view", "axis", "several", "written", "kept written"
    )  # fmt: skip

    def __init__(self, D, dimensions, read, act):
        super().__init__()
        conv, norm = getattr(nn, f"Conv{dimensions}d"), getattr(nn, f"BatchNorm{dimensions}d")
        self.first, self.last = conv(D, D, 1, bias=False), conv(3 * D if read == "nested" else 2 * D, D, 1)
        self.norm, self.act, self.read = norm(D), act, read
        self.whole = norm(2 * D)

    def forward(self, x):
        new = self.act(self.norm(self.first(x)))
        if self.read == "axis":
            return self.last(torch.cat((x, new), axis=-x.dim() + 1))
        if self.read == "data":
            x = x.detach() * 1
        if self.read == "view":  # of more than the whole has
            x = torch.stack([x, x.sin(), x.cos()])[1]
        if self.read == "kept written":
            x = x * 1
        if self.read == "several":
            new = torch.cat([new, x], 1).chunk(2, 1)[0] + torch.cat([x, new, x]).sin()[: len(x)]
        y = torch.cat((x, new), dim=1)
        if self.read == "kept written":
            y = self.last(y)
            x.mul_(0.5)
            return y
        if self.read == "written":
            new.mul_(0.5)
        if self.read == "nested":
            y = torch.cat([self.first(new), y], 1)
        if self.read in ("norm", "both"):
            y = self.whole(y) + (y.sigmoid() if self.read == "both" else 0)
        if self.read in ("torch", "twice"):
            z = y.sin()
            return self.last(z) if self.read == "torch" else self.last(y) + self.last(z)
        return self.last(y)
