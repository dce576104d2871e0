"""Attention that a module writes out, for the trees of `convert_models.py`: spellings, masks, other reads of scores."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PRODUCTS = ("@", "matmul", "bmm", "einsum", "tokens")
SCALES = ("before", "after", "divided", "inplace", "negative", "tensor", "none")
MASKS = (
    "none", "none", "tril", "inplace", "where", "view", "finite", "infinite", "learned", "both", "blind", "short",
    "samples", "reversed", "windows", "joined",
)  # fmt: skip
SOFTMAXES = ("function", "method", "module", "float", "own")
READS = (
    *("none",) * 8, "mean", "no_grad", "hook", "retained", "printed", "kept", "twice", "detached", "alias",
    "checkpoint", "two orders", "written", "dropped", "returned", "held",
)  # fmt: skip
CHOICES = PRODUCTS, SCALES, MASKS, SOFTMAXES, READS


class OwnSoftmax(torch.autograd.Function):
    """Its gradient is half of that of softmax."""

    @staticmethod
    def forward(ctx, x):
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        return y * (dy - (dy * y).sum(-1, keepdim=True)) / 2


class Scored(nn.Module):
    def __init__(self, width, product, scale, mask, softmax, read):
        super().__init__()
        self.product, self.scale, self.mask, self.how, self.read = product, scale, mask, softmax, read
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.softmax, self.drop = nn.Softmax(-1), nn.Dropout(0.0)
        self.bias = nn.Parameter(torch.randn(4, 16, 16)) if mask == "learned" else None
        self.register_buffer("tril", torch.ones(16, 16).tril())

    def forward(self, x):
        rows = x.reshape(-1, *x.shape[-2:])
        q, k, v = (t.view(*rows.shape[:-1], 4, -1).transpose(1, 2) for t in self.qkv(rows).chunk(3, -1))
        y = self.merged(self.attend(q, k, v), x)
        return (y, vars(self).pop("last")) if self.read in ("dropped", "returned", "held") else y

    def merged(self, o, x):
        first = o[..., :1].mean() if self.read == "two orders" else 0
        o = o if self.product == "tokens" else o.transpose(1, 2)
        o = o.reshape(x.shape)
        if self.read == "written":
            o *= 2
        return self.out(o) + first

    def attend(self, q, k, v):
        size = q.shape[-1] ** -0.5
        if self.scale == "before":
            q = q * size
        if self.product == "@":
            scores = q @ k.transpose(-2, -1)
        elif self.product == "matmul":
            scores = torch.matmul(q, k.mT)
        elif self.product == "bmm":
            scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(*q.shape[:-1], k.shape[-2])
        else:
            scores = torch.einsum("bhid,bhjd->bhij", q, k)
        scores = self.masked(self.scaled(scores, size))
        first = scores[..., :1] if self.read == "alias" else None
        if self.read == "no_grad":
            with torch.no_grad():
                weights = self.normed(scores)
        else:
            weights = self.normed(scores)
        weights = self.drop(weights.to(v.dtype))
        if self.read == "alias":
            scores += 1
            weights = weights + first.clamp(-1, 1)
        return self.values(self.seen(weights), v)

    def scaled(self, scores, size):
        if self.scale == "after":
            return scores * size
        if self.scale == "divided":
            return scores / math.sqrt(1 / size)
        if self.scale == "inplace":
            scores *= size
        if self.scale == "negative":
            return -size * scores
        return scores / torch.tensor(3.0) if self.scale == "tensor" else scores

    def masked(self, scores):
        T = scores.shape[-1]
        hidden = self.tril[:T, :T] == 0
        padding = torch.arange(T) >= torch.arange(scores.shape[0]).add(1)[:, None, None, None]
        if self.mask == "tril":
            return scores.masked_fill(hidden, -math.inf)
        if self.mask == "inplace":
            scores.masked_fill_(hidden, -1e4)
        if self.mask == "view":
            scores.view(-1, T, T).masked_fill_(hidden, -1e4)
        if self.mask == "where":
            return torch.where(~hidden, scores, torch.finfo(scores.dtype).min)
        if self.mask in ("finite", "infinite"):
            lowest = -1e4 if self.mask == "finite" else -math.inf
            return scores + torch.zeros(T, T, dtype=scores.dtype).masked_fill(hidden, lowest)
        if self.mask == "learned":
            scores = scores + self.bias[:, :T, :T]
        if self.mask == "both":  # the first two keys of the first sample are padding: its first queries see no key
            added = torch.zeros(scores.shape[0], 1, T, T, dtype=scores.dtype)
            added[:1, ..., :2] = -1e4
            return (scores + added).masked_fill(hidden, -1e4)
        if self.mask == "blind":
            return scores.masked_fill(padding.roll(-1, 0) & hidden.roll(1, 0), -1e4)
        if self.mask == "short":
            return scores.masked_fill(torch.arange(T) == 1, -1e4)
        if self.mask == "samples":
            return scores.masked_fill(padding, -math.inf)
        if self.mask == "windows":  # this and the next: of the same scores in other leading dimensions
            scores = scores + torch.arange(4 * T * T).sin().view(4, T, T).to(scores.dtype)
            split = scores.view(-1, 2 - scores.shape[0] % 2, *scores.shape[1:])
            split = split + torch.arange(split.shape[1]).view(-1, 1, 1, 1) * hidden.to(scores.dtype)
            return split.view(scores.shape)
        if self.mask == "joined":
            split = scores.masked_fill(hidden[None, None], -math.inf).view(-1, T, T)
            split = split.masked_fill(padding.expand(-1, 4, 1, T).reshape(-1, 1, T), -math.inf)
            return split.view(scores.shape)
        if self.mask == "reversed":
            bias = torch.zeros(scores.shape, dtype=scores.dtype)
            bias += scores
            return bias
        return scores

    def normed(self, scores):
        if self.how == "function":
            return F.softmax(scores, dim=-1)
        if self.how == "method":
            return scores.softmax(-1)
        if self.how == "own":
            return OwnSoftmax.apply(scores)
        return self.softmax(scores) if self.how == "module" else F.softmax(scores, dim=-1, dtype=torch.float32)

    def seen(self, weights):
        if self.read == "hook":
            weights.register_hook(lambda grad: 2 * grad)
        if self.read == "retained":
            weights.retain_grad()
        if self.read == "printed":
            assert "not computed" not in f"{weights}"
        if self.read in ("kept", "dropped", "returned", "held"):
            self.last = weights
        return weights

    def values(self, weights, v):
        if self.product == "bmm":
            o = torch.bmm(weights.flatten(0, 1), v.flatten(0, 1)).view(v.shape)
        elif self.product == "tokens":
            o = torch.einsum("bhij,bhjd->bihd", weights, v)
        else:
            o = weights @ v if self.product == "@" else torch.matmul(weights, v)
        if self.read == "mean":
            return o + weights.square().mean()
        if self.read == "detached":
            return o + weights.detach().mean()
        return (
            o + weights.mT.contiguous() @ (o if self.product != "tokens" else o.transpose(1, 2)) if self.twice() else o
        )

    def twice(self):
        return self.read == "twice" and self.product != "tokens"


class Checkpointed(Scored):
    """One whose inner method is checkpointed."""

    def attend(self, *given):
        return checkpoint(super().attend, *given, use_reentrant=False)


class Returning(nn.Module):
    """Around one that returns its weights, too."""

    def __init__(self, width, *how):
        super().__init__()
        self.inner, self.read, self.last = Scored(width, *how), how[-1], None

    def forward(self, x):
        y, weights = self.inner(x)
        if self.read == "held":
            self.last = weights
        return y + weights.mean() if self.read == "returned" else y


AROUND = {"checkpoint": Checkpointed, "dropped": Returning, "returned": Returning, "held": Returning}


def scored(width, *how):
    return AROUND.get(how[-1], Scored)(width, *how)
