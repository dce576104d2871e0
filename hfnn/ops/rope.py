"""Rotary position embedding of queries and keys.

    y_a = x_a cos_a - x_b sin_a,     y_b = x_b cos_b + x_a sin_b         for each pair (a, b) of a head's columns

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021. https://arxiv.org/abs/2104.09864
The pairs of the R rotated columns are (i, i + R / 2), as in GPT-NeoX and Llama, or (2 i, 2 i + 1), as in the paper,
GPT-J and ChatGLM. Other columns are copied. Scaled variants differ only in cos and sin.

Shapes: B batches, H heads of queries, G of keys, S tokens, D columns of a head, R of them rotated, W columns and P rows
of cos and sin. The same kernel rotates the gradient back; it only needs cos and sin.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hfnn.core.context import is_plain
from hfnn.core.kernel import Op, kernels
from hfnn.core.node import below, described, select
from hfnn.ops.layout import broadcast_strides, like

_HEADS = {"bhsd": -3, "bshd": -2}  # dimension of the heads


class How(NamedTuple):
    """The options of a call besides its tensors."""

    rotary: int
    interleaved: bool
    tokens_first: bool  # layout="bshd"
    out: torch.dtype


def rotate_half(x, interleaved=False):
    """Each pair (a, b) as (-b, a)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rows_of(table, position_ids, heads):
    """cos or sin per token, aligned with tensors whose heads are dimension `heads`."""
    if position_ids is not None:
        table = (table if table.dim() == 2 else table[0])[position_ids]
    return table.unsqueeze(heads)


def turned(x, cos, sin, rotary, interleaved):
    """The formula of transformers, for cos and sin from `rows_of`."""
    if cos.shape[-1] != rotary:
        cos, sin = (t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in (cos, sin))
    if rotary == x.shape[-1]:
        return (x * cos) + (rotate_half(x, interleaved) * sin)
    x, rest = x[..., :rotary], x[..., rotary:]
    return torch.cat(((x * cos) + (rotate_half(x, interleaved) * sin), rest), -1)


def reference(query, key, cos, sin, position_ids=None, *, rotary_dim=None, interleaved=False, layout="bhsd"):
    """The definition, in the dtypes of the arguments."""
    return formula(query, key, cos, sin, position_ids, rotary_dim, interleaved, layout)


def formula(query, key, cos, sin, position_ids, rotary_dim, interleaved, layout):
    rotary, heads = rotary_dim or cos.shape[-1], _HEADS[layout]
    cos, sin = rows_of(cos, position_ids, heads), rows_of(sin, position_ids, heads)
    q = turned(query, cos, sin, rotary, interleaved)
    return q, None if key is None else turned(key, cos, sin, rotary, interleaved)


def angles(batch, tokens, rotary, dtype, device, generator=None, interleaved=False):
    """cos and sin (batch, tokens, rotary) as in transformers, for positions with any start."""
    first = torch.randint(1000, (batch, 1, 1), generator=generator)
    pairs = torch.arange(tokens)[:, None] + first, 10000 ** -(torch.arange(0, rotary, 2) / rotary)
    pairs = pairs[0] * pairs[1]
    both = pairs.repeat_interleave(2, -1) if interleaved else torch.cat((pairs, pairs), -1)
    return both.cos().to(dtype).to(device), both.sin().to(dtype).to(device)


def heads_of(batch, heads, tokens, columns, dtype, device, generator=None):
    """(batch, heads, tokens, columns) in the memory layout of a projection's result: tokens before heads."""
    return torch.randn(batch, tokens, heads, columns, generator=generator).to(dtype).to(device).transpose(1, 2)


def sample(case, dtype, device, generator=None):
    """Arguments of `rope` for a case (B, H, G, S, D, R, interleaved)."""
    batch, heads, groups, tokens, columns, rotary, interleaved = case
    query, key = (heads_of(batch, n, tokens, columns, dtype, device, generator) for n in (heads, groups))
    cos, sin = angles(batch, tokens, rotary, dtype, device, generator, interleaved)
    return (query, key, cos, sin), {"interleaved": interleaved}


OP = Op(
    "rope",
    reference,
    reference,
    kernels=kernels("rope", 1 << 12, cuda=1 << 20),
    sample=sample,
    cases=(
        (2, 4, 2, 9, 16, 16, False), (2, 3, 1, 17, 96, 96, False), (1, 4, 4, 5, 80, 32, False),
        (2, 4, 2, 9, 24, 24, True), (1, 2, 1, 7, 64, 16, True), (2, 2, 1, 0, 8, 8, False),
    ),
    small=(2, 2, 1, 3, 6, 4, False),
    bench=((8, 32, 8, 4096, 128, 128, False), (8, 32, 8, 2048, 128, 32, False), (8, 16, 4, 4096, 64, 64, True)),
    traffic=(2.5, 2.5),  # in units of the queries' size, with one key per four queries
    saves=False,
    recipe_needs_recipe=True,
    constants=2,
)  # fmt: skip
_passes = OP.passes


def table(t):
    """cos or sin for kernels: (B or 1, P, W), contiguous."""
    t = t if t.dim() == 3 else t.unsqueeze(0)
    return (t[:1] if t.stride(0) == 0 else t).contiguous()


def rows_index(position_ids):
    """Positions for kernels: (B or 1, S) int64, contiguous."""
    if position_ids is None:
        return None
    return (position_ids if position_ids.dim() == 2 else position_ids.unsqueeze(0)).to(torch.int64).contiguous()


def columns_dense(x):
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def result(x, dtype, strides=None):
    """Memory for a dense tensor like x, in the order of its strides, as in torch's results."""
    if x is None:
        return None
    if strides is None and (x.is_contiguous() or 1 not in x.shape):
        return like(x, dtype)
    strides = broadcast_strides(x) if strides is None else strides
    return torch.empty_strided(x.shape, strides, dtype=dtype, device=x.device)


def heads_first(x, how):
    """x for kernels, (B, H, S, D)."""
    return x.transpose(1, 2) if how.tokens_first and x is not None else x


def _compute(query, key, cos, sin, position_ids, how, kernel, transposed=False, strides=(None, None)):
    """(of query, of key), in the order of `strides` or of their own."""
    inputs = columns_dense(query), columns_dense(key)
    results = tuple(result(x, how.out, like) for x, like in zip(inputs, strides, strict=True))
    q, k, yq, yk = (heads_first(x, how) for x in (*inputs, *results))
    options = how.rotary, how.interleaved, transposed
    kernel.forward(q, k, table(cos), table(sin), rows_index(position_ids), yq, yk, *options, kernel.queue(query))
    return results


# A node for each of the two results. It is linear, so it is its own backward, with negated angles. Its input is kept
# only if this can be rebuilt: it would otherwise be kept instead of the result, which saves nothing.


def _of_each(query, key, cos, sin, position_ids, how, kernel, transposed=False, strides=(None, None)):
    """The results of `_compute`, each with its node."""
    both = below(_compute, query, key, cos, sin, position_ids, how, kernel, transposed, strides)
    return tuple(
        None if x is None else _NODE(y, (kernel, how, x.dtype, y.stride(), transposed), x, cos, sin, position_ids)
        for x, y in zip((query, key), both, strict=True)
    )


def _build(given, x, cos, sin, position_ids):
    kernel, how, _, strides, transposed = given
    return _compute(x, None, cos, sin, position_ids, how, kernel, transposed, (strides, None))[0]


def _gradients(dy, needs, given, x, *tables, run=_compute):
    # Gradients have the order of the results' strides, whatever the order of the incoming gradients.
    kernel, how, dtype, strides, transposed = given
    return run(dy, None, *tables, how._replace(out=dtype), kernel, not transposed, (strides, None))[:1]


def _second(dy, needs, given, x, *tables):
    return _gradients(dy, needs, given, x, *tables, run=_of_each)


_NODE = described("_Rope", "tccc", _build, _gradients, _second)


def fits(query, key, cos, sin, position_ids, rotary, layout) -> bool:
    """Whether kernels accept these tensors; if not, torch's formula runs or raises."""
    if query.dim() != 4 or cos.shape != sin.shape or cos.dim() not in (2, 3):
        return False
    heads = _HEADS[layout]
    batch, *_, columns = query.shape
    tokens = query.shape[-5 - heads]  # the other of dimensions 1 and 2
    if key is not None:
        if key.dim() != 4 or (key.shape[0], key.shape[-5 - heads], key.shape[-1]) != (batch, tokens, columns):
            return False
        if not is_plain(key) or key.dtype is not query.dtype or key.device != query.device:
            return False
    if rotary % 2 or not 2 <= rotary <= columns or cos.shape[-1] not in (rotary, rotary // 2):
        return False
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        return False
    if position_ids is None:
        return cos.shape[-2] == tokens and (cos.dim() == 2 or cos.shape[0] in (1, batch))
    return (
        position_ids.dtype in (torch.int64, torch.int32)
        and position_ids.device == query.device
        and position_ids.shape in ((tokens,), (1, tokens), (batch, tokens))
        and (cos.dim() == 2 or cos.shape[0] == 1)
    )


def choose(op, query, key, cos, sin, position_ids, rotary_dim, interleaved, layout, prefer):
    """(kernel, How), or None for torch's formula."""
    out, rotary = torch.promote_types(query.dtype, cos.dtype), rotary_dim or cos.shape[-1]
    kernel = select(op, query, cos, sin, out=out, prefer=prefer)
    if kernel is None or not fits(query, key, cos, sin, position_ids, rotary, layout):
        return None
    return kernel, How(rotary, interleaved, layout == "bshd", out)


def check_layout(layout):
    if layout not in _HEADS:
        raise ValueError(f"layout={layout!r}: 'bhsd' for (batch, heads, tokens, columns), 'bshd' for tokens first")


def rope(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    *,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    layout: str = "bhsd",
    prefer: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """(query, key) rotated by position, in one pass; only cos and sin are kept for backward.

    The results have the strides' order of query and key and the dtype of `query * cos`, rounded once; for float32 they
    are bitwise equal to torch's formula. If cos or sin requires grad, torch's formula computes it. Raises what torch
    raises.

    Args:
        query: (B, H, S, D) of any strides, or (B, S, H, D) with layout="bshd".
        key: (B, G, S, D), or (B, S, G, D), or None; then its result is None.
        cos: (S, W), (1, S, W) or (B, S, W); with position_ids a table (P, W). W is R, as in transformers, or R / 2 if
            both columns of a pair share one angle.
        sin: Like cos.
        position_ids: (B, S), int64 or int32, rows of the tables; or None.
        rotary_dim: R, the first columns, which are rotated; None: W.
        interleaved: Whether pairs are (2 i, 2 i + 1) instead of (i, i + R / 2).
        layout: "bhsd" or "bshd".
        prefer: "auto", "memory" or "speed", as in `hfnn.convert`.

    Raises:
        ValueError: An unknown layout.

    >>> cos, sin = torch.zeros(1, 2), torch.ones(1, 2)  # a quarter turn
    >>> hfnn.functional.rope(torch.tensor([[[[1.0, 2.0]]]]), None, cos, sin)[0]
    tensor([[[[-2.,  1.]]]])
    """
    check_layout(layout)
    turn = rotary_dim, interleaved, layout
    chosen = None if _passes(query, prefer) else choose(OP, query, key, cos, sin, position_ids, *turn, prefer)
    if chosen is None:
        return formula(query, key, cos, sin, position_ids, *turn)
    kernel, how = chosen
    return _of_each(query, key, cos, sin, position_ids, how, kernel)


def apply_rotary_pos_emb(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int = 1,
    *,
    interleaved: bool = False,
    prefer: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`apply_rotary_pos_emb` of transformers' models: (q, k) rotated by cos and sin. Raises what torch raises.

    Args:
        q: Of four dimensions, the last of width R.
        k: Like q.
        cos: (B, S, R).
        sin: (B, S, R).
        unsqueeze_dim: The dimension of the heads in q and k, 1 or 2.
        interleaved: As in `rope`.
    PREFER
    """
    if not _passes(q, prefer) and cos.dim() == 3 and q.dim() == 4 and unsqueeze_dim in (1, 2, -2, -3):
        layout = "bhsd" if unsqueeze_dim in (1, -3) else "bshd"
        return rope(q, k, cos, sin, interleaved=interleaved, layout=layout, prefer=prefer)
    cos, sin, width = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim), cos.shape[-1]
    return turned(q, cos, sin, width, interleaved), turned(k, cos, sin, width, interleaved)
