"""The definition of attention in plain torch. Tests compare with it, and it runs if no kernel accepts a call.

For query i and key j of batch b and head h, with the distance d_ij = j - (i + offset):

    u_ij = scale q_i . k_j,    s_ij = softcap tanh(u_ij / softcap) + bias_ij - slope_h |d_ij|
    p_ij = exp(s_ij - lse_i),  lse_i = log(sum_j exp(s_ij) + exp(sink_h)),  o_i = sum_j p_ij m_ij v_j

summed over the keys that i sees; m_ij is 0 or 1 / (1 - p'), the dropout. If i sees no key, o_i is 0 and lse_i is -inf
(or the sink), with gradients of 0. If `uniform`, p_ij is then 1 / S for all keys, as if a number that absorbs the
capped u_ij were added to it: its derivative is that of a softmax.

Vaswani et al., "Attention Is All You Need", 2017. Press, Smith and Lewis, "Train Short, Test Long: Attention with
Linear Biases", 2022. Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", 2024 (softcap). Xiao et
al., "Efficient Streaming Language Models with Attention Sinks", 2024. Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018. Letters of names: B batch, H and G heads of queries and of keys, T queries, S keys.
"""

import math

import torch


def reference(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    *,
    window=None,
    softcap=None,
    alibi=None,
    sinks=None,
    lengths=None,
    offset=0,
    cu_seqlens=None,
    uniform=False,
    return_lse=False,
    keep=None,
):
    """`hfnn.functional.scaled_dot_product_attention` by its definition, with all scores at once.

    Shapes: query (..., H, T, D), key (..., G, S, D), value (..., G, S, E); the result (..., H, T, E), lse (..., H, T).
    dtypes: float64 is computed in float64, all others in float32, as in torch's math backend; autocast has no effect.
    keep: boolean, broadcastable to (..., H, T, S): the pairs that dropout keeps, multiplied by 1 / (1 - p') with p' =
    round(65536 dropout_p) / 65536. Without it torch's dropout draws. Raises what torch's matmul raises.
    """
    if cu_seqlens is not None:
        options = {"scale": scale, "enable_gqa": enable_gqa, "window": window, "softcap": softcap, "alibi": alibi}
        options |= {"sinks": sinks, "offset": offset, "dropout_p": dropout_p, "is_causal": is_causal}
        o, lse = _each_sequence(query, key, value, cu_seqlens, keep, options)
        return (o, lse) if return_lse else o
    wide = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast("cpu" if query.is_meta else query.device.type, enabled=False):  # none on "meta"
        q, k, v = (x.to(wide) for x in (query, key, value))
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        s = _product(q * scale, k.transpose(-2, -1), enable_gqa)
        s = softcap * torch.tanh(s / softcap) if softcap else s
        capped, distance = s, _distance(q.shape[-2], k.shape[-2], offset, q.device)
        if alibi is not None:
            s = s - alibi.to(wide)[..., None, None] * distance.abs()
        if attn_mask is not None and attn_mask.dtype is not torch.bool:
            s = s + attn_mask.to(wide)
        hidden = _hidden(q, distance, attn_mask, is_causal, window, lengths)
        sinks = None if sinks is None else sinks.to(wide)[:, None, None]
        p, lse = _softmax(s if hidden is None else s.masked_fill(hidden, -math.inf), sinks)
        if uniform:
            alike = torch.softmax(capped + torch.finfo(wide).min, -1)
            p = torch.where(lse[..., None] == -math.inf, alike, p)
        o = _product(_dropped(p, dropout_p, keep), v, enable_gqa).to(query.dtype)
    return (o, lse) if return_lse else o


def _product(x, y, grouped):
    """x @ y. grouped: head h of x with head h / (H / G) of y, without copying y for each head."""
    if not grouped or x.shape[-3] == y.shape[-3]:
        return x @ y
    *batch, heads, rows, inner = x.shape
    z = x.reshape(*batch, y.shape[-3], heads // y.shape[-3] * rows, inner) @ y
    return z.reshape(*batch, heads, rows, z.shape[-1])


def _distance(queries, keys, offset, device):
    """(T, S): the position of each key minus that of each query."""
    i, j = torch.arange(queries, device=device), torch.arange(keys, device=device)
    return j - (i + offset)[:, None]


def _hidden(q, distance, attn_mask, is_causal, window, lengths):
    """Boolean, broadcastable to the scores: the pairs that do not count; None if all count."""
    left, right = (None, None) if window is None else window
    right = 0 if is_causal else right
    parts = []
    if right is not None:
        parts.append(distance > right)
    if left is not None:
        parts.append(distance < -left)
    if lengths is not None:
        parts.append(_beyond(lengths, q.shape[:-3], distance.shape[-1]))
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        parts.append(~attn_mask)
    hidden = None
    for part in parts:
        hidden = part if hidden is None else hidden | part
    return hidden


def _beyond(lengths, batch, keys):
    """(..., 1, 1, S): keys outside `lengths`, (B,) or (B, 2) {first, last}; B counts all dimensions of `batch`."""
    j = torch.arange(keys, device=lengths.device)
    first, last = lengths.unbind(-1) if lengths.dim() == 2 else (torch.zeros_like(lengths), lengths)
    return ((j < first[:, None]) | (j >= last[:, None])).view(*batch, 1, 1, keys)


def _softmax(s, sinks):
    """(p, lse) over the last dimension; 0 and -inf, with gradients of 0, if all scores are -inf."""
    # A number that is subtracted and added again has no gradient.
    top = s.detach().amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -math.inf)
    if sinks is not None:
        top = torch.maximum(top, sinks.detach())
    top = top.masked_fill(top == -math.inf, 0)
    e = (s - top).exp()
    total = e.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks - top).exp()
    none = total == 0
    total = total.masked_fill(none, 1)
    return e / total, (top + total.log()).masked_fill(none, -math.inf).squeeze(-1)


def _dropped(p, dropout_p, keep):
    if keep is not None:
        return p * keep / (1 - round(dropout_p * 65536) / 65536)
    return torch.dropout(p, dropout_p, True) if dropout_p else p


def _each_sequence(query, key, value, cu_seqlens, keep, options):
    """(o, lse) of packed sequences, each separately; queries of no sequence see no key."""
    starts_q, starts_k = cu_seqlens if isinstance(cu_seqlens, (tuple, list)) else (cu_seqlens, cu_seqlens)
    starts_q, starts_k = starts_q.tolist(), starts_k.tolist()
    before, after = (0, starts_q[0], 0, 0), (starts_q[-1], query.shape[-2], 0, 0)
    inside = zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False)
    results = []
    for a, b, c, d in (before, *inside, after):
        kept = None if keep is None else keep[..., a:b, c:d]
        parts = query[..., a:b, :], key[..., c:d, :], value[..., c:d, :]
        results.append(reference(*parts, **options, keep=kept, return_lse=True))
    return torch.cat([o for o, _ in results], -2), torch.cat([lse for _, lse in results], -1)
