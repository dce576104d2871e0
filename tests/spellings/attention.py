"""Attention as people write it.

The unit is a tensor (BATCH, TOKENS, WIDTH); scores and weights are 4 units. Stock keeps x, copies of q, k and v in the
order of heads, the weights, and the result in the order of tokens: 9 units. The target is x, q, k, v and the result: 5
units, and the log-sum-exp of each row, a 64th. With dropout, stock keeps its noise and the dropped weights, too: 17.
"""

import math

import torch
from einops import rearrange
from program import Program
from torch import nn
from torch.nn import functional as F

BATCH, TOKENS, WIDTH, HEADS = 4, 256, 256, 4
HEAD = WIDTH // HEADS
UNIT = 4 * BATCH * TOKENS * WIDTH
X = lambda: (torch.randn(BATCH, TOKENS, WIDTH),)  # noqa: E731


class Packed(nn.Module):
    """One map for queries, keys and values; a lower triangle as a buffer."""

    def __init__(self, dropout=0.0, bias=True):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH, bias), nn.Linear(WIDTH, WIDTH, bias)
        self.attn_dropout, self.resid_dropout, self.dropout = nn.Dropout(dropout), nn.Dropout(dropout), dropout
        self.n_head, self.flash, self.softmax = HEADS, False, nn.Softmax(dim=-1)
        self.register_buffer("bias", torch.tril(torch.ones(512, 512)).view(1, 1, 512, 512))


class NanoGPT(Packed):
    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if self.flash:
            p = self.dropout if self.training else 0
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=p, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            att = F.softmax(att, dim=-1)
            att = self.attn_dropout(att)
            y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class HelperMethod(Packed):
    """GPT-2 of transformers as many copy it: a method, torch.where, a division."""

    def forward(self, hidden):
        query, key, value = self.c_attn(hidden).chunk(3, dim=-1)
        query, key, value = (self.split_heads(x) for x in (query, key, value))
        return self.c_proj(self.merge_heads(self._attn(query, key, value)))

    def _attn(self, query, key, value):
        weights = torch.matmul(query, key.transpose(-1, -2))
        weights = weights / (float(value.size(-1)) ** 0.5)
        t, s = query.size(-2), key.size(-2)
        mask = self.bias[:, :, s - t : s, :s].bool()
        weights = torch.where(mask, weights, torch.full([], torch.finfo(weights.dtype).min, dtype=weights.dtype))
        weights = nn.functional.softmax(weights, dim=-1).type(value.dtype)
        return torch.matmul(self.attn_dropout(weights), value)

    def split_heads(self, x):
        return x.view(*x.shape[:-1], HEADS, HEAD).permute(0, 2, 1, 3)

    def merge_heads(self, x):
        x = x.permute(0, 2, 1, 3).contiguous()
        return x.view(*x.shape[:-2], WIDTH)


class InPlace(Packed):
    def forward(self, x):
        q, k, v = rearrange(self.c_attn(x), "b t (n h d) -> n b h t d", n=3, h=HEADS)
        w = torch.einsum("bhid,bhjd->bhij", q * HEAD**-0.5, k)
        w.masked_fill_(torch.ones(x.shape[1], x.shape[1], device=x.device).triu(1).bool(), -1e9)
        return self.c_proj(rearrange(torch.einsum("bhij,bhjd->bhid", w.softmax(-1), v), "b h t d -> b t (h d)"))


class Timm(Packed):
    """timm's ViT before its fused attention."""

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.c_attn(x).reshape(B, N, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q * HEAD**-0.5) @ k.transpose(-2, -1)
        attn = attn.softmax(dim=-1)
        attn = self.attn_dropout(attn)
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.resid_dropout(self.c_proj(x))


class Einops(Packed):
    """lucidrains' ViT."""

    def forward(self, x):
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=self.n_head) for t in self.c_attn(x).chunk(3, dim=-1))
        dots = torch.matmul(q, k.transpose(-1, -2)) * HEAD**-0.5
        attn = self.attn_dropout(self.softmax(dots))
        return self.c_proj(rearrange(torch.matmul(attn, v), "b h n d -> b n (h d)"))


class TokensFirst(Packed):
    """Einsum without a transposition of heads and tokens; scores of a full lower triangle that is added."""

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, HEAD)) for t in self.c_attn(x).chunk(3, dim=-1))
        scores = torch.einsum("b t h d, b s h d -> b h t s", q, k) / math.sqrt(HEAD)
        hidden = torch.full((x.shape[1], x.shape[1]), float("-inf"), device=x.device, dtype=x.dtype).triu(1)
        probabilities = torch.softmax((scores + hidden).float(), dim=-1).type_as(q)
        return self.c_proj(torch.einsum("bhts,bshd->bthd", probabilities, v).flatten(-2))


class Separate(nn.Module):
    """Maps of their own for queries, keys and values, with another number of arguments."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.drop = nn.Dropout(dropout)
        self.bias = nn.Embedding(2 * TOKENS, HEADS)
        self.register_buffer("tril", torch.tril(torch.ones(TOKENS, TOKENS)))
        self.lengths = [TOKENS, TOKENS, TOKENS // 2, TOKENS // 4]

    def heads(self, x):
        q, k, v = (f(x).view(*x.shape[:2], HEADS, HEAD).transpose(1, 2) for f in (self.query, self.key, self.value))
        return q, k, v

    def merged(self, o):
        return self.out(o.transpose(1, 2).contiguous().view(BATCH, -1, WIDTH))

    def counts(self, x):
        """(B, S): which keys count."""
        return torch.arange(x.shape[1], device=x.device) < torch.tensor(self.lengths, device=x.device)[:, None]


class Bert(Separate):
    """A number is added where a key is padding; the weights are returned only if they are asked for."""

    def forward(self, x, output_attentions=False):
        mask = (1.0 - self.counts(x)[:, None, None, :].to(x.dtype)) * -10000.0
        q, k, v = self.heads(x)
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(HEAD) + mask
        probs = self.drop(nn.Softmax(dim=-1)(scores))
        context = self.merged(torch.matmul(probs, v))
        return (context, probs) if output_attentions else context


def attention(query, key, value, mask=None, dropout=None):
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    p_attn = scores.softmax(dim=-1)
    if dropout is not None:
        p_attn = dropout(p_attn)
    return torch.matmul(p_attn, value), p_attn


class Annotated(Separate):
    """ "The Annotated Transformer", without its attribute: a function, with padding and a triangle in one mask."""

    def forward(self, x):
        mask = self.counts(x)[:, None, None, :] & (self.tril[: x.shape[1], : x.shape[1]] != 0)
        o, _ = attention(*self.heads(x), mask=mask, dropout=self.drop)
        return self.merged(o)


class Fairseq(Separate):
    """Heads joined to the batch, torch.bmm."""

    def forward(self, x):
        q, k, v = (t.reshape(BATCH * HEADS, -1, HEAD) for t in self.heads(x))
        weights = torch.bmm(q, k.transpose(1, 2)) * HEAD**-0.5
        weights = weights.view(BATCH, HEADS, x.shape[1], x.shape[1])
        weights = weights.masked_fill(~self.counts(x)[:, None, None], float("-inf")).view(
            q.shape[0], *weights.shape[2:]
        )
        weights = F.dropout(F.softmax(weights, dim=-1), p=self.drop.p, training=self.training)
        return self.merged(torch.bmm(weights, v).view(BATCH, HEADS, -1, HEAD))


class T5(Separate):
    """A trainable bias by the distance, no scale."""

    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device)
        bias = self.bias(places[:, None] - places + TOKENS).permute(2, 0, 1)[None]
        q, k, v = self.heads(x)
        scores = torch.einsum("bnqd,bnkd->bnqk", q * 0.1, k)
        scores += bias
        weights = F.softmax(scores.float(), dim=-1).type_as(scores)
        return self.merged(torch.matmul(weights, v))


class Rotary(Separate):
    """LLaMA's: rotated pairs, a triangle of -inf."""

    def forward(self, x):
        q, k, v = self.heads(x)
        angles = torch.outer(torch.arange(x.shape[1]), 0.01 ** (torch.arange(0, HEAD, 2) / HEAD)).to(x)
        q, k = (self.rotated(t, angles.cos(), angles.sin()) for t in (q, k))
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(HEAD)
        scores = scores + torch.full((1, 1, x.shape[1], x.shape[1]), float("-inf"), device=x.device).triu(1)
        scores = F.softmax(scores.float(), dim=-1).type_as(q)
        return self.merged(torch.matmul(scores, v))

    def rotated(self, x, cos, sin):
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(3)


class Head(nn.Module):
    """One head, as in Karpathy's lecture."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, 64, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(1024, 1024)))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        _B, T, _C = x.shape
        k, q = self.key(x), self.query(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        wei = self.dropout(F.softmax(wei, dim=-1))
        return wei @ self.value(x)


# Near misses: what attention does not compute, or what something else reads.


class OtherDimension(Timm):
    def forward(self, x):
        q, k, v = rearrange(self.c_attn(x), "b t (n h d) -> n b h t d", n=3, h=HEADS)
        return self.c_proj(rearrange((q @ k.mT * 0.125).softmax(dim=-2) @ v, "b h t d -> b t (h d)"))


class DropsScores(Packed):
    def forward(self, x):
        q, k, v = rearrange(self.c_attn(x), "b t (n h d) -> n b h t d", n=3, h=HEADS)
        return self.c_proj(rearrange(self.attn_dropout(q @ k.mT).softmax(-1) @ v, "b h t d -> b t (h d)"))


class ScalesAfterwards(Separate):
    """The mask is scaled, too."""

    def forward(self, x):
        q, k, v = self.heads(x)
        scores = (q @ k.mT + self.tril) * HEAD**-0.5
        return self.merged(scores.softmax(-1) @ v)


class Blind(Separate):
    """The first query sees no key."""

    def forward(self, x, number=-1e9):
        q, k, v = self.heads(x)
        scores = (q @ k.mT * HEAD**-0.5).masked_fill(self.tril.roll(1, 0).tril(-1) == 0, number)
        return self.merged(scores.softmax(-1) @ v)


class BlindNaN(Blind):
    def forward(self, x):
        return super().forward(x, -math.inf)


class SmallNumber(Separate):
    """What is hidden still counts."""

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.merged((q @ k.mT * HEAD**-0.5).masked_fill(self.tril == 0, -2.0).softmax(-1) @ v)


class Returning(Separate):
    def forward(self, x):
        o, weights = attention(*self.heads(x), mask=self.tril, dropout=self.drop)
        return self.merged(o), weights


class Returned(nn.Module):
    """An attention that returns its weights, which the block drops."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.attention = Returning(dropout)

    def forward(self, x):
        y, _ = self.attention(x)
        return y


class Keeps(Separate):
    """ "The Annotated Transformer": the weights stay."""

    def forward(self, x):
        o, self.attn = attention(*self.heads(x), mask=self.tril, dropout=self.drop)
        return self.merged(o)


class Twice(Separate):
    """The weights have another reader."""

    def forward(self, x):
        q, k, v = self.heads(x)
        weights = (q @ k.mT * HEAD**-0.5).softmax(-1)
        return self.merged(weights @ v) + weights.mean()


class Hooked(Separate):
    def forward(self, x):
        q, k, v = self.heads(x)
        weights = (q @ k.mT * HEAD**-0.5).softmax(-1)
        weights.register_hook(lambda grad: 2 * grad)
        return self.merged(weights @ v)


class Written(Separate):
    """Scores that were used are written to."""

    def forward(self, x):
        q, k, v = self.heads(x)
        scores = q @ k.mT * HEAD**-0.5
        weights = scores.softmax(-1)
        scores.add_(10 * self.tril)
        return self.merged(weights @ v) + (scores.softmax(-1) @ v).sum()


class Fresh(Separate):
    """Another triangle: queries see the key after them, too."""

    def forward(self, x):
        q, k, v = self.heads(x)
        scores = (q @ k.mT * HEAD**-0.5).masked_fill(torch.ones_like(self.tril).triu(2).bool(), -math.inf)
        return self.merged(scores.softmax(-1) @ v)


def program(of, target=5.0, stock=9.0, *arguments, inputs=X, **how):
    target = target and (target + 1 / 64) * UNIT
    op = "" if target is None else "scaled_dot_product_attention"
    how = {"name": of.__name__} | how
    return Program(build=lambda: of(*arguments), inputs=inputs, op=op, stock=stock * UNIT, target=target, **how)


PROGRAMS = [
    program(NanoGPT),
    program(NanoGPT, 5, 18, 0.1, name="NanoGPT with dropout", draws=True, slow=True),
    program(HelperMethod),
    program(InPlace, 6),  # q is scaled before the product
    program(Timm, 6),
    program(Timm, 6, 18, 0.1, name="Timm with dropout", draws=True, slow=True),
    program(Einops),
    program(TokensFirst),
    program(Bert),
    program(Bert, 5, 17, 0.1, name="Bert with dropout", draws=True, slow=True),
    program(Annotated, 6, 9.25),  # torch's op makes numbers of the mask (B, 1, T, S)
    program(Annotated, 5, 17.25, 0.1, name="Annotated with dropout", draws=True, slow=True),
    program(Fairseq, 6),  # the result is copied to the order of tokens
    program(T5, 6.25, 9.5, slow=True),  # the bias, and q, which is scaled before the product
    program(Rotary, 6.125, 9.125),  # rotated queries are in the order of heads, and torch's result follows them
    program(Head, 2 - 3 / 256, 2.81),
    program(OtherDimension, None),
    program(DropsScores, None, 13, 0.1, draws=True),
    program(ScalesAfterwards, None),
    program(Blind, None),
    program(BlindNaN, None),
    program(SmallNumber, None),
    program(Returned),
    program(Returned, 5, 17, 0.1, name="Returned with dropout", draws=True, slow=True),
    program(Keeps),
    program(Twice, None),
    program(Hooked, None),
    program(Written, None, 14),
    program(Fresh, 5.25, name="Fresh: another triangle"),
]
