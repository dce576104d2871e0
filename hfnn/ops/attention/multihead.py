"""`torch.nn.MultiheadAttention` called with `need_weights=False`.

    q, k, v = x_q W_q^T + b_q, x_k W_k^T + b_k, x_v W_v^T + b_v           one product where the inputs are one tensor
    y = concat_h(softmax(q_h k_h^T / sqrt(D) + mask) v_h) W_o^T + b_o

Vaswani et al., "Attention Is All You Need", 2017. https://arxiv.org/abs/1706.03762

The products are hfnn's (hfnn/ops/linear.py), so the output of the norm before them is not kept. They work on the inputs
as they are, and heads are views of their results. torch copies q, k, v before attention and its result after it.
Attention is that of sdpa.py. By default torch's module also returns the weights, B x T x S numbers; then torch's code
computes everything. Pass `need_weights=False` if the weights are not read.

Letters: B batch, T queries, S keys, H heads, D width of a head, E = H D.
"""

import functools

import torch
from torch import Tensor, nn

from hfnn.core.context import autocasting, compiling, context
from hfnn.core.kernel import forced
from hfnn.ops.attention.sdpa import OP, in_rows
from hfnn.ops.linear import linear


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention`: the same arguments, defaults, state dict and results.

    torch's own code runs with `need_weights=True`, the default, and in eval mode if nothing requires a gradient.
    `hfnn.convert` sets `prefer` and `exact`.
    """

    prefer, exact = "auto", False
    _hfnn_when = "where it is called with need_weights=False"

    @property
    def _hfnn_cols(self) -> int:
        """The subject of a kernel's limit, for `hfnn.report`."""
        return self.head_dim

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        # In training also without grad mode: reentrant checkpointing runs forward so, and again in grad mode.
        ours = (self.training or torch.is_grad_enabled()) and not compiling()
        if ours and not need_weights and _takes(self, query, key, value, key_padding_mask, attn_mask, is_causal):
            return _attend(self, query, key, value, key_padding_mask, attn_mask, is_causal), None
        return nn.MultiheadAttention.forward(
            self, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )


def _takes(module, query, key, value, key_padding_mask, attn_mask, is_causal) -> bool:
    """Whether it is a training call with plain tensors that fit together. torch handles all others, and their
    errors."""
    weights = _weights(module)
    if query is None or key is None or value is None or forced() == "torch":
        return False
    if context(query, key, value, key_padding_mask, attn_mask, *weights) is not None:
        return False
    inputs = query, key, value, attn_mask, *weights
    if not module.training and not any(x is not None and x.requires_grad for x in inputs):
        return False
    return _fit(module, query, key, value) and _masks_fit(module, query, key, key_padding_mask, attn_mask, is_causal)


def _weights(module):
    own, out = module._parameters.values(), module.out_proj
    return *own, out.weight, out.bias


def _fit(module, query, key, value) -> bool:
    if query.numel() == 0 or key.numel() == 0:
        return False
    if not query.dim() == key.dim() == value.dim() or query.dim() not in (2, 3) or key.shape[:-1] != value.shape[:-1]:
        return False
    if (query.shape[-1], key.shape[-1], value.shape[-1]) != (module.embed_dim, module.kdim, module.vdim):
        return False
    if not all(_is_of(x.dtype, module.out_proj.weight) for x in (query, key, value)):
        return False
    return query.dim() == 2 or _sizes(module, query)[0] == _sizes(module, key)[0]


def _masks_fit(module, query, key, key_padding_mask, attn_mask, is_causal) -> bool:
    batch, queries = _sizes(module, query)
    keys, kinds = _sizes(module, key)[1], set()
    if is_causal and attn_mask is None:
        return False
    if attn_mask is not None:
        shapes = (queries, keys), (batch * module.num_heads, queries, keys)
        kinds.add(attn_mask.dtype)
        if tuple(attn_mask.shape) not in shapes:
            return False
    if key_padding_mask is not None:
        kinds.add(key_padding_mask.dtype)
        if tuple(key_padding_mask.shape) != ((keys,) if query.dim() == 2 else (batch, keys)):
            return False
    # torch rejects or warns about mixed mask dtypes. Without autocast it only accepts the query's dtype.
    return len(kinds) < 2 and all(kind is torch.bool or _is_of(kind, query) for kind in kinds)


def _is_of(dtype, x) -> bool:
    """Whether torch supports this dtype together with x."""
    return dtype is x.dtype or (dtype.is_floating_point and autocasting(x))


def _sizes(module, x) -> tuple[int, int]:
    """(batch, length) of an input (T, E), (B, T, E) or (T, B, E)."""
    if x.dim() == 2:
        return 1, x.shape[0]
    return (x.shape[0], x.shape[1]) if module.batch_first else (x.shape[1], x.shape[0])


def _attend(module, query, key, value, key_padding_mask, attn_mask, is_causal):
    q, k, v = (_in_heads(module, x) for x in _projected(module, query, key, value))
    k, v = _extended(module, k, v)
    extra = k.shape[2] - _sizes(module, key)[1]
    if is_causal and key_padding_mask is not None:  # a hint that replaces the mask if both mean the same
        alike = not extra and not attn_mask.requires_grad
        is_causal = alike and OP.select(q, k, v, row=(module.head_dim,), prefer=module.prefer) is not None
    mask = _merged(module, q.shape[0], key_padding_mask, None if is_causal else attn_mask, extra)
    dropped = module.dropout if module.training else 0.0
    if is_causal and mask is not None:
        y = in_rows(q, k, v, mask, dropped, window=(None, 0), prefer=module.prefer)
    else:
        y = in_rows(q, k, v, mask, dropped, is_causal, prefer=module.prefer)
    del q, k, v
    out, prefer = module.out_proj, module.prefer
    y = linear(y.transpose(1, 2).flatten(2), out.weight, out.bias, prefer=prefer, exact=module.exact)  # (B, T, E)
    if query.dim() == 2:
        return y.squeeze(0)
    # Transposed to torch's order, (T, B, E), after the product. So the product keeps attention's own result, not a
    # copy.
    y = y.transpose(0, 1).flatten(0, 1).unflatten(0, (-1, y.shape[0]))  # torch's strides also for one sequence
    return y.transpose(0, 1) if module.batch_first else y


def _projected(module, query, key, value):
    """q, k, v, each with the heads split: (..., H, D)."""
    bias, heads = module.in_proj_bias, (module.num_heads, module.head_dim)
    project = functools.partial(linear, prefer=module.prefer, exact=module.exact)
    if not module._qkv_same_embed_dim:
        weights = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    elif key is value and query is key:
        return _split(project(query, module.in_proj_weight, bias), 3, heads)
    elif key is value:
        sizes = module.embed_dim, 2 * module.embed_dim
        (w_q, w_kv), (b_q, b_kv) = (
            module.in_proj_weight.split(sizes),
            (None, None) if bias is None else bias.split(sizes),
        )
        return project(query, w_q, b_q).unflatten(-1, heads), *_split(project(key, w_kv, b_kv), 2, heads)
    else:
        weights = module.in_proj_weight.chunk(3)
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    return tuple(project(*args).unflatten(-1, heads) for args in zip((query, key, value), weights, biases, strict=True))


def _split(x, parts, heads):
    """Views of a packed product, whose gradient is assembled once; gradients of slices would be added in full size."""
    return x.unflatten(-1, (parts, *heads)).unbind(-3)


def _in_heads(module, x):
    """(T, H, D), (B, T, H, D) or (T, B, H, D) as (B, H, T, D)."""
    if x.dim() == 3:
        return x.transpose(0, 1).unsqueeze(0)
    return x.transpose(1, 2) if module.batch_first else x.permute(1, 2, 0, 3)


def _extended(module, k, v):
    """Keys and values with the trained pair (bias_k, bias_v) and the pair of zeros appended, if there are any."""
    if module.bias_k is None and not module.add_zero_attn:
        return k, v
    (batch, heads, _, width), more = k.shape, ([k], [v])
    for found, bias in zip(more, (module.bias_k, module.bias_v), strict=True):
        if bias is not None:
            found.append(bias.to(k.dtype).view(1, heads, 1, width).expand(batch, -1, -1, -1))
        if module.add_zero_attn:
            found.append(k.new_zeros(batch, heads, 1, width))
    return torch.cat(more[0], 2), torch.cat(more[1], 2)


def _merged(module, batch, key_padding_mask, attn_mask, extra):
    """Both masks combined for `scaled_dot_product_attention`, broadcast to (B, H, T, S + extra), or None."""
    mask = padding = None
    if attn_mask is not None:
        mask = attn_mask[None, None] if attn_mask.dim() == 2 else attn_mask.unflatten(0, (batch, module.num_heads))
        mask = ~mask if mask.dtype is torch.bool else mask
    if key_padding_mask is not None:
        padding = key_padding_mask.view(batch, 1, 1, -1)
        padding = ~padding if padding.dtype is torch.bool else padding
    if mask is None or padding is None:
        mask = padding if mask is None else mask
    else:
        mask = mask & padding if mask.dtype is torch.bool else mask + padding
    if mask is not None and extra:
        mask = nn.functional.pad(mask, (0, extra), value=mask.dtype is torch.bool)
    return mask


OP.modules[nn.MultiheadAttention] = MultiheadAttention
