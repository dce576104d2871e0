"""RMS norm of each head of queries and keys, then rotary position embedding.

    n = x * rstd * (offset + weight),    rstd = 1 / sqrt(mean(x^2) + eps),    y = rope(n)

Dehghani et al., "Scaling Vision Transformers to 22 Billion Parameters", 2023. https://arxiv.org/abs/2302.05442, has the
norms. Qwen3 and Gemma 3 (which stores weight - 1: offset = 1) put them before the rotation of rope.py.

One pass, which keeps its inputs and one number per head. A consumer that would keep a result keeps that input instead.
"""

import torch
from torch import Tensor

from hfnn.core.kernel import Op, kernels
from hfnn.core.node import below, described, double_backward
from hfnn.ops import rms_norm, rope
from hfnn.ops.layer_norm import statistics_dtype
from hfnn.ops.rope import check_layout, choose, columns_dense, heads_first, result, rows_index, table


def reference(
    query,
    key,
    query_weight,
    key_weight,
    cos,
    sin,
    eps=1e-6,
    *,
    weight_offset=0.0,
    position_ids=None,
    rotary_dim=None,
    interleaved=False,
    layout="bhsd",
):
    """The definition, in the dtypes of the arguments."""

    def normed(x, weight):
        return None if x is None else rms_norm.reference(x, x.shape[-1:], weight, eps, weight_offset).to(x.dtype)

    turn = {"rotary_dim": rotary_dim, "interleaved": interleaved, "layout": layout}
    return rope.reference(normed(query, query_weight), normed(key, key_weight), cos, sin, position_ids, **turn)


def _torch(query, key, query_weight, key_weight, cos, sin, eps=1e-6, *, interleaved=False):
    weights = query_weight, key_weight
    return _by_torch(query, key, *weights, cos, sin, eps, 0.0, None, None, interleaved, "bhsd")


def _by_torch(query, key, query_weight, key_weight, cos, sin, eps, offset, position_ids, *turn):
    """By torch's own norm, as a model would call it."""

    def normed(x, weight):
        if x is None or offset == 0:
            return None if x is None else torch.rms_norm(x, x.shape[-1:], weight, eps).to(x.dtype)
        wide = torch.promote_types(x.dtype, torch.float32)
        return torch.rms_norm(x.to(wide), x.shape[-1:], offset + weight.to(wide), eps).to(x.dtype)

    return rope.formula(normed(query, query_weight), normed(key, key_weight), cos, sin, position_ids, *turn)


def sample(case, dtype, device, generator=None):
    """Arguments of `qk_norm_rope` for a case (B, H, G, S, D, R, interleaved)."""
    (query, key, cos, sin), options = rope.sample(case, dtype, device, generator)
    weights = (torch.randn(case[4], generator=generator).to(dtype).to(device) for _ in range(2))
    return (query, key, *weights, cos, sin), options


OP = Op(
    "qk_norm_rope",
    reference,
    _torch,
    kernels=kernels("qk_norm_rope", 1 << 9, cuda=1 << 20),
    sample=sample,
    cases=rope.OP.cases,
    small=rope.OP.small,
    bench=((8, 32, 8, 4096, 128, 128, False), (8, 4, 1, 4096, 256, 256, False)),
    traffic=(2.5, 3.75),  # in units of the queries' size, with one key per four queries
    constants=2,
)
_passes = OP.passes


def _compute(query, key, weights, tables, eps, offset, how, kernel, keep):
    """(y of query, y of key, rstd of query, rstd of key), None if absent or not kept."""
    inputs = columns_dense(query), columns_dense(key)
    results = tuple(result(x, how.out) for x in inputs)
    q, k, yq, yk = (heads_first(x, how) for x in (*inputs, *results))
    rstd = tuple(_statistic(x) if keep else None for x in (q, k))
    options = eps, offset, how.rotary, how.interleaved
    kernel.forward(q, k, *weights, *_tables(*tables), yq, yk, *rstd, *options, kernel.queue(query))
    return *results, *rstd


def _statistic(x):
    """Memory for one number per token and head of x (B, H, S, D): (B, S, H)."""
    if x is None:
        return None
    batch, heads, tokens, _ = x.shape
    return torch.empty(batch, tokens, heads, dtype=statistics_dtype(x), device=x.device)


def _tables(cos, sin, position_ids):
    return table(cos), table(sin), rows_index(position_ids)


# A node for each of the two results.


def _build(given, x, weight, cos, sin, position_ids, rstd):
    kernel, _, offset, how, strides = given
    x = columns_dense(x)
    y = result(x, how.out, strides)
    options = offset, how.rotary, how.interleaved
    seen, to = heads_first(x, how), heads_first(y, how)
    kernel.rebuild(seen, weight, rstd, *_tables(cos, sin, position_ids), to, *options, kernel.queue(x))
    return y


def _gradients(dy, needs, given, x, weight, cos, sin, position_ids, rstd):
    kernel, _, offset, how, _ = given
    dtype, dy, x = x.dtype, columns_dense(dy), columns_dense(x)
    dx, dweight, partials = result(x, dtype), None, None
    if needs[1]:
        dweight, columns = torch.empty_like(weight), x.shape[-1]
        planes = 2, kernel.partials(rstd.shape[0], rstd.shape[1], columns), columns
        partials = torch.empty(planes, dtype=rstd.dtype, device=x.device)
    dy, x, to = (heads_first(t, how) for t in (dy, x, dx))
    kernel.backward(
        dy, None, x, None, weight, None, rstd, None, *_tables(cos, sin, position_ids), to, None, dweight, None,
        partials, offset, how.rotary, how.interleaved, kernel.queue(x),
    )  # fmt: skip
    return dx, dweight


def _second(dy, needs, given, x, weight, cos, sin, position_ids, rstd):
    """By the definition in the widest dtype at hand, returning what the kernel returned."""
    _, eps, offset, how, _ = given
    wide, layout = torch.promote_types(x.dtype, torch.float32), "bshd" if how.tokens_first else "bhsd"
    turn = {"rotary_dim": how.rotary, "interleaved": how.interleaved, "layout": layout}
    options = {"weight_offset": offset, "position_ids": position_ids, **turn}

    def formula(x, weight):
        x, weight, *angles = (t.to(wide) for t in (x, weight, cos, sin))
        return reference(x, None, weight, None, *angles, eps, **options)[0].to(how.out)

    return double_backward(formula, (x, weight), needs, dy)


_NODE = described("_QkNormRope", "xxcccc", _build, _gradients, _second)


def _run(query, key, weights, tables, eps, offset, how, kernel):
    keep = torch.is_grad_enabled()
    *both, q_rstd, k_rstd = below(_compute, query, key, weights, tables, eps, offset, how, kernel, keep)
    given = zip((query, key), weights, both, (q_rstd, k_rstd), strict=True)
    return tuple(
        None if x is None else _NODE(y, (kernel, eps, offset, how, y.stride()), x, weight, *tables, rstd)
        for x, weight, y, rstd in given
    )


def _weights_fit(query, key, *weights):
    """Whether kernels accept the weights; if not, torch's formula runs or raises."""
    kept = weights[:1] if key is None else weights
    dtypes = {None if weight is None else weight.dtype for weight in kept}
    if len(dtypes) > 1 or not dtypes <= {query.dtype, torch.float32}:
        return False
    return all(w.shape == query.shape[-1:] and w.device == query.device and rope.is_plain(w) for w in kept)


def qk_norm_rope(
    query: Tensor,
    key: Tensor | None,
    query_weight: Tensor,
    key_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    position_ids: Tensor | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    layout: str = "bhsd",
    prefer: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """(query, key), with each head's D columns divided by their root mean square, weighted, and rotated by position.

    The results have the dtype of `query * cos`, rounded once; statistics are float32. query, key and one number per
    head and token are kept; a consumer that would keep a result keeps these instead. Raises what torch raises.

    Args:
        query: As in `rope`.
        key: As in `rope`.
        query_weight: (D,), float32 or of query's dtype.
        key_weight: Like query_weight; None with key None.
        cos: As in `rope`.
        sin: As in `rope`.
        eps: Added to the mean square.
        weight_offset: Added to the weights (Gemma: 1).
        position_ids: As in `rope`.
        rotary_dim: As in `rope`.
        interleaved: As in `rope`.
        layout: As in `rope`.
        prefer: "auto", "memory" or "speed", as in `hfnn.convert`.

    Raises:
        ValueError: An unknown layout.
    """
    check_layout(layout)
    turn, weights = (rotary_dim, interleaved, layout), (query_weight, key_weight)
    chosen = None if _passes(query, prefer) else choose(OP, query, key, cos, sin, position_ids, *turn, prefer)
    if chosen is None or not _weights_fit(query, key, *weights):
        return _by_torch(query, key, *weights, cos, sin, eps, weight_offset, position_ids, *turn)
    kernel, how = chosen
    weights = query_weight, None if key is None else key_weight
    return _run(query, key, weights, (cos, sin, position_ids), eps, weight_offset, how, kernel)
