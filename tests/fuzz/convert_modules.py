"""Modules as users write them, for the fuzzer of `hfnn.convert`. Each preserves its input's shape."""

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef


class Model(nn.Module):
    """The outermost module, which also holds the loss's module."""

    def __init__(self, body, criterion):
        super().__init__()
        self.body, self.criterion = body, criterion

    def forward(self, x):
        return self.body(x)


class Functional(nn.Module):
    """Calls torch's functions in its forward."""

    NAMES = (
        "gelu",
        "silu",
        "relu",
        "softmax",
        "layer_norm",
        "dropout",
        "tanh",
        "leaky_relu",
        "elu",
        "inplace",
        "negated",
    )

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        if self.name == "gelu":
            return F.gelu(x)
        if self.name == "silu":
            return F.silu(x)
        if self.name == "relu":
            return F.relu(x)
        if self.name == "softmax":
            return F.softmax(x, -1)
        if self.name == "layer_norm":
            return F.layer_norm(x, x.shape[-1:])
        if self.name == "dropout":
            return F.dropout(x, 0.0)
        if self.name == "tanh":
            return torch.tanh(x)
        if self.name == "leaky_relu":
            return F.leaky_relu(x, 0.1)
        if self.name == "elu":
            return F.elu(x)
        if self.name == "negated":  # the imaginary part of a conjugate is negated when it is read
            return F.gelu(torch.complex(x, -x).conj().imag)
        return F.silu(x * 1, inplace=True)


class Where(nn.Module):
    """Masks, clamps and maxima by functions."""

    NAMES = ("where", "masked_fill", "clamp", "maximum", "abs")

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        if self.name == "where":
            return torch.where(x > 0, x, x * 0.5)
        if self.name == "masked_fill":
            return x.masked_fill(x > 1, -1.0)
        if self.name == "clamp":
            return torch.clamp(x, -1, 1)
        if self.name == "maximum":
            return torch.maximum(x, x * 0.3 + 0.1)
        return torch.abs(x)


class Config:
    def __init__(self):
        self.factor = 1.0


class RMSNormLike(nn.Module):
    """Llama's norm, written by a user."""

    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.rand(width) + 0.5), eps
        self.factor = 1.0

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * self.scaled(x.to(dtype))

    def scaled(self, x):
        return x * self.factor


class GroupNorm(nn.Module):
    """Avoids a crash of torch's backward on channels-last inputs whose gradient is not needed (seen, without hfnn)."""

    def __init__(self, groups, width, eps, affine):
        super().__init__()
        self.norm = nn.GroupNorm(groups, width, eps, affine)

    def forward(self, x):
        return self.norm(x if x.requires_grad else x.contiguous())


class ConvBlock(nn.Module):
    """act(norm(conv(x)) + x) as in convolutional models; the sum in place, separate or absent."""

    HOW = ("plain", "sum", "inplace")

    def __init__(self, D, dimensions, norm, act, how):
        super().__init__()
        self.conv = getattr(nn, f"Conv{dimensions}d")(D, D, 1, bias=False)
        self.norm, self.act, self.how = norm, act, how

    def forward(self, x):
        y = self.norm(self.conv(x))
        if self.how == "sum":
            y = y + x
        elif self.how == "inplace":
            y += x
        return self.act(y)


class Recurrent(nn.Module):
    """A recurrent layer, its y and its state; optionally bidirectional, or two layers with dropout in between."""

    def __init__(self, D, kind, both, deep):
        super().__init__()
        how = {"num_layers": 2, "dropout": 0.5} if deep else {}
        self.body = getattr(nn, kind)(D, D // 2 if both else D, bidirectional=both, batch_first=True, **how)

    def forward(self, x):
        y, end = self.body(x)
        end = end[0] if isinstance(end, tuple) else end
        return y + end.sum()


class QuickGELU(nn.Module):
    factor = 1.0

    def forward(self, x):
        return x * torch.sigmoid(1.702 * x) * self.factor


class MLP(nn.Module):
    """fc2(dropout(act(fc1(x))))."""

    def __init__(self, width, act, p):
        super().__init__()
        self.fc1, self.act = nn.Linear(width, 2 * width), act
        self.drop, self.fc2 = nn.Dropout(p), nn.Linear(2 * width, width)
        self.config = Config()

    def forward(self, x):
        return self.fc2(self.drop(self.act(self.fc1(x)))) * self.config.factor


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, width, act):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.act_fn, self.down_proj = act, nn.Linear(2 * width, width, bias=False)
        self.config, self.factor = Config(), 1.0

    def forward(self, x):
        y = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(y) * self.config.factor * self.factor


class SwishBeta(nn.SiLU):
    """A subclass of torch's activation that computes something else."""

    def forward(self, x):
        return x * torch.sigmoid(2 * x)


class LimitedMLP(GatedMLP):
    """A gated network that limits its gates, which small inputs do not show."""

    def forward(self, x):
        gate, up = self.gate_proj(x).clamp(max=10), self.up_proj(x).clamp(-10, 10)
        return self.down_proj(self.act_fn(gate) * up)


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


class BlockEnd(nn.Module):
    """LayerNorm(dropout(dense(x)) + residual), as at the end of BERT's blocks."""

    def __init__(self, width):
        super().__init__()
        self.dense, self.LayerNorm, self.dropout = nn.Linear(width, width), nn.LayerNorm(width), nn.Dropout(0.0)
        self.factor = 1.0

    def forward(self, hidden_states, input_tensor):
        hidden_states = self.dropout(self.dense(hidden_states))
        return self.LayerNorm(hidden_states + input_tensor) * self.factor


class Attention(nn.Module):
    """q, k, v of one input; scores by torch's function, or masked and normalised by hand."""

    HOW = ("sdpa", "causal", "mask", "hand", "bias", "mask and causal")

    def __init__(self, width, how):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(16, 16)) if how == "bias" else None
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.how = how
        self.register_buffer("mask", torch.ones(16, 16, dtype=torch.bool).tril())

    def forward(self, x):
        q, k, v = (f(x).view(*x.shape[:-1], 2, -1).transpose(-2, -3) for f in (self.q, self.k, self.v))
        mask = self.mask[: x.shape[-2], : x.shape[-2]]
        if self.how == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v)
        elif self.how == "causal":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.how == "mask":
            y = F.scaled_dot_product_attention(q, k, v, mask)
        elif self.how == "mask and causal":
            y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=True)
        elif self.how == "bias":
            y = F.scaled_dot_product_attention(q, k, v, self.bias[: x.shape[-2], : x.shape[-2]])
            y = y.view(-1).view(y.shape)  # an error unless it is contiguous
        else:
            scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~mask, torch.finfo(q.dtype).min)
            y = F.softmax(scores, -1) @ v
        return self.out(y.transpose(-2, -3).reshape(x.shape))


class SelfAttention(nn.Module):
    """nn.MultiheadAttention, called as users do."""

    def __init__(self, width, need_weights, masked):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.need_weights, self.masked = need_weights, masked

    def forward(self, x):
        mask = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).triu(1) if self.masked else None
        y, weights = self.attention(x, x, x, need_weights=self.need_weights, attn_mask=mask)
        return y if weights is None else y + weights.mean()


class Decoder(nn.Module):
    def __init__(self, width, norm_first):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(width, 2, 2 * width, 0.0, batch_first=True, norm_first=norm_first)

    def forward(self, x):
        return self.layer(x, x.flip(-2))


class Experts(nn.Module):
    """Each row goes to an expert chosen by its first feature; the expert for large values often has no rows."""

    def __init__(self, width, border):
        super().__init__()
        self.small, self.large = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)), nn.Linear(width, width)
        self.border = border

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        large = rows[:, 0] > self.border
        y = torch.zeros_like(rows, dtype=self.small[1].weight.dtype)
        for chosen, expert in ((~large, self.small), (large, self.large)):
            at = chosen.nonzero()[:, 0]
            y = y.index_add(0, at, expert(rows[at]).to(y.dtype))
        return y.view(x.shape)


class Tied(nn.Module):
    """Two maps with one weight, or a map and its transpose."""

    def __init__(self, width, transposed):
        super().__init__()
        self.first, self.second, self.transposed = nn.Linear(width, width), nn.Linear(width, width), transposed
        self.second.weight = self.first.weight
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        y = self.norm(self.first(x))
        return F.linear(y, self.first.weight.t()) if self.transposed else self.second(y)


class Parametrised(nn.Module):
    """A linear map with weight_norm."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))

    def forward(self, x):
        return self.linear(x)


class Viewed(nn.Module):
    """Views and copies that depend on strides; some raise if the strides do not allow them."""

    NAMES = (
        "flat",
        "rows",
        "flat_last",
        "reshape",
        "slice",
        "halves",
        "contiguous",
        "transposed",
        "unfolded",
        "as_strided",
    )

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        if self.name == "flat":
            return x.view(-1).view(x.shape)
        if self.name == "rows":
            return x.flatten(0, 1).view(x.shape)
        if self.name == "reshape":
            return x.reshape(-1, x.shape[-1]).reshape(x.shape)
        if self.name == "slice":
            return torch.cat([x[..., 1:], x[..., :1]], -1)
        if self.name == "halves":
            a, b = x.chunk(2, -1)
            return torch.cat([b, a], -1)
        if self.name == "contiguous":
            return x.contiguous()
        if self.name == "transposed":
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        if self.name == "unfolded":
            return x.unsqueeze(0).expand(2, *x.shape).sum(0)
        return x.as_strided(x.shape, x.stride())


class Written(nn.Module):
    """Writes in place to the previous layer's result, wholly or in part."""

    NAMES = ("add_", "mul_", "relu_", "item", "view", "row", "zero_")

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        if self.name == "add_":
            return x.add_(0.5)
        if self.name == "mul_":
            x *= 0.5
        elif self.name == "relu_":
            return torch.relu_(x)
        elif self.name == "item":
            x[..., 0] = 0.25
        elif self.name == "view":
            x.flatten(0, 1).mul_(2)
        elif self.name == "row":
            x[0].add_(1)
        else:
            x[..., :1].zero_()
        return x


class Probe(nn.Module):
    """Keeps weak references to what passed through it, to show what stays alive; may also act on it."""

    HOW = ("pass", "retain_grad", "hook", "detach")

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        # Not in backward: how far a checkpoint repeats forward depends on what is saved.
        first = torch._C._current_graph_task_id() == -1
        if first and not torch._C._functorch.is_functorch_wrapped_tensor(x):
            seen.append(StorageWeakRef(x.untyped_storage()))
        # Reading grad_fn is needed: torch's hooks crash on a tensor that was written to through a view (seen).
        learns = x.requires_grad and (x.is_leaf or x.grad_fn is not None)
        if self.how == "retain_grad" and learns:
            x.retain_grad()
            kept.extend([x] if first else [])
        if self.how == "hook" and learns:
            x.register_hook(lambda grad: grad * 0.5)
        return x * 0.5 + x.detach() * 0.5 if self.how == "detach" else x


seen: list[StorageWeakRef] = []  # by all probes of the running program
kept: list[torch.Tensor] = []  # tensors whose gradients the program reads


PATCHED = (RMSNormLike, QuickGELU, MLP, GatedMLP, BlockEnd, Functional, Attention)
_patched = {}


def patch(cls):
    """The class computes something else from now on, until `unpatch`."""
    forward = _patched.setdefault(cls, cls.forward)

    @functools.wraps(forward)
    def half(self, *args):
        return forward(self, *args) * 0.5

    cls.forward = half


def unpatch():
    for cls, forward in _patched.items():
        cls.forward = forward
    _patched.clear()
