"""Scaled dot-product attention in O(T + S) memory, with arguments for what models usually put into dense masks.

    s_ij = softcap tanh(scale q_i . k_j / softcap) + bias_ij - slope |i + offset - j|
    o_i = sum_j exp(s_ij - lse_i) v_j,        lse_i = log(sum_j exp(s_ij) + exp(sink))

over the keys j that query i may see. The scores are computed again in backward, from q, k, v, o and lse (Dao et al.,
"FlashAttention", NeurIPS 2022, and "FlashAttention-2", ICLR 2024); csrc/attention.h is the definition in full. ALiBi:
Press et al., ICLR 2022. Soft-capping: Gemma Team, "Gemma 2", 2024. Sinks: Xiao et al., "Efficient Streaming Language
Models with Attention Sinks", ICLR 2024, as a learnt logit.

If torch's own op can compute a call without a dense matrix, it runs with its fastest backend (backends.py).
"""

import math
from typing import Any

import torch
from torch import Tensor

from hfnn.core import flops, native
from hfnn.core.context import compiling, on_gpu, place
from hfnn.core.kernel import FLOATS, NoKernel, Op, forced, kernels
from hfnn.core.node import Function, double_backward, wanted
from hfnn.ops import dropout
from hfnn.ops.attention import backends
from hfnn.ops.attention.arguments import Arguments, Tensors
from hfnn.ops.attention.mask import unpacked
from hfnn.ops.attention.reference import reference

_torch = torch.nn.functional.scaled_dot_product_attention
_HALVES = (torch.bfloat16, torch.float16)


def sample(case, dtype, device, generator=None):
    """Query, key and value of shape `case`."""
    return tuple(torch.randn(case, generator=generator).to(dtype).to(device) for _ in range(3)), {}


OP = Op(
    "scaled_dot_product_attention",
    reference,
    _torch,
    kernels=kernels("attention", 1 << 12, cuda=1 << 18, max_cols=256),
    sample=sample,
    cases=((1, 2, 17, 16), (2, 2, 17, 16)),
    recipe=False,
)
_passes = OP.passes
_joint = native.call("joint")  # csrc/autograd/joint.cpp: views of one product, whose gradient becomes one copy


class _Attention(Function):
    """(o, lse). bias and sinks are separate, because they may require gradients. math_dims: `_math_dims`."""

    @staticmethod
    def forward(ctx, query, key, value, bias, sinks, tensors, numbers, pair, settings, kernel, math_dims, stock):
        if flops.counting():
            stock.forward(query, key, value, bias)
        batch, heads, queries, _ = query.shape
        fresh = query.new_empty if tensors.starts_q is None else query.new_zeros  # rows of no sequence stay 0
        if math_dims:
            o = fresh((batch, heads, queries, value.shape[-1]))
        else:
            o = fresh((batch, queries, heads, value.shape[-1])).transpose(1, 2)
        statistics = torch.promote_types(query.dtype, torch.float32)
        lse = torch.full((batch, heads, queries), -math.inf, dtype=statistics, device=query.device)
        sums = None if bias is None else torch.ones_like(lse)
        bits, tiles, slopes, bounds, starts_q, starts_k = tensors
        kernel.forward(
            query, key, value, o, lse, sums, bits, tiles, _expanded(bias, query, key), slopes,
            None if sinks is None else sinks.float(), bounds, starts_q, starts_k,
            *numbers, pair, kernel.queue(query),
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, bias, sinks, o, lse, sums, pair, *tensors)
        ctx.numbers, ctx.settings, ctx.kernel, ctx.math_dims, ctx.stock = numbers, settings, kernel, math_dims, stock
        ctx.set_materialize_grads(False)
        return o, lse if sums is None else lse + sums.log()

    @staticmethod
    def backward(ctx, dout, dlse):
        query, key, value, bias, sinks, o, lse, sums, pair, *rest = ctx.saved_tensors
        needs, inputs = ctx.needs_input_grad[:5], (query, key, value, bias, sinks)
        if torch.is_grad_enabled():
            grads = _again(ctx.settings, inputs, needs, dout, dlse, Tensors(*rest), ctx.numbers)
        else:
            if flops.counting():
                # torch's nodes make only the gradients that this backward wants.
                asked = [need and wanted(node) for need, (node, _) in zip(needs[:3], ctx.next_functions, strict=False)]
                ctx.stock.backward(query, key, value, bias, (*asked, needs[3]))
            rows = o, lse, sums, dout, dlse
            grads = _gradients(inputs, needs, *rows, Tensors(*rest), ctx.numbers, pair, ctx.kernel)
            if ctx.math_dims:
                grads = _as_of_math(ctx.math_dims, query.shape[1], *grads)
        return *grads, None, None, None, None, None, None, None


def _as_of_math(dims, heads, dq, dk, dv, dbias, dsinks):
    """The gradients with the strides that torch's math backend returns."""
    dq, dk, dv = (x if x is None else x.contiguous() for x in (dq, dk, dv))
    if dk is not None and dims > 2 and dk.shape[1] == heads:
        dk = dk.mT.contiguous().mT
    return dq, dk, dv, dbias, dsinks


def _expanded(bias, query, key):
    return None if bias is None else bias.expand(*query.shape[:3], key.shape[2])


def _gradients(inputs, needs, o, lse, sums, dout, dlse, tensors, numbers, pair, kernel):
    query, key, value, bias, sinks = inputs
    dout = torch.zeros_like(o) if dout is None else _rows(dout)
    delta = torch.zeros_like(lse)
    kernel.delta(o, dout, delta, kernel.queue(query))
    if dlse is not None:
        delta -= dlse
    fresh = torch.empty_like if tensors.starts_q is None else torch.zeros_like
    dq, dk, dv = (fresh(x) if need else None for x, need in zip(inputs[:3], needs[:3], strict=True))
    dbias = bias.new_empty(*bias.shape[:2], query.shape[2], key.shape[2]) if needs[3] else None
    bits, tiles, slopes, bounds, starts_q, starts_k = tensors
    if any(needs[:4]):
        kernel.backward(
            query, key, value, lse, sums, dout, delta, dq, dk, dv, dbias, bits, tiles, _expanded(bias, query, key),
            slopes, bounds, starts_q, starts_k, *numbers, pair, kernel.queue(query),
        )  # fmt: skip
    if dbias is not None:
        dbias = dbias.sum_to_size(bias.shape)
    dsinks = None
    if needs[4]:
        share = (sinks.to(lse.dtype)[:, None] - lse).exp().where(lse != -math.inf, 0)
        share = share if sums is None else share / sums
        dsinks = -(share * delta).sum((0, 2)).to(sinks.dtype)
    return dq, dk, dv, dbias, dsinks


def _again(settings, inputs, needs, dout, dlse, tensors, numbers):
    """Gradients that can be differentiated again."""
    if numbers.threshold:
        raise RuntimeError("attention with dropout has no second derivative here: call it with dropout_p=0")

    given = [dy is not None for dy in (dout, dlse)]
    settings = settings | tensors.for_reference()

    def asked_for(query, key, value, bias, sinks):
        selects = None if tensors.bits is None else unpacked(tensors.bits, key.shape[2])
        both = reference(query, key, value, selects if bias is None else bias, sinks=sinks, return_lse=True, **settings)
        return [y for y, has in zip(both, given, strict=True) if has]

    return double_backward(asked_for, inputs, needs, [dy for dy in (dout, dlse) if dy is not None])


def _rows(x):
    """x itself if its rows are dense, which is all that kernels need, else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def suffices(query, attn_mask, dropout_p, prefer) -> bool:
    """Whether torch's op is as fast and keeps as little. It has no kernel for a mask that requires a gradient (on the
    CPU it has in no-grad mode); on the CPU none for dropout; and on CUDA none that reads a mask that is not expanded.
    """
    if (name := forced()) is not None:
        return name == "torch"
    if dropout_p == 1:  # its kernels multiply infinity by 0
        return False
    if _passes(query, prefer):  # also while Dynamo compiles
        return True
    if attn_mask is None:
        return on_gpu(query) or not dropout_p
    if (attn_mask.requires_grad and (on_gpu(query) or torch.is_grad_enabled())) or dropout_p:
        return False
    return not on_gpu(query) or _dtype(query) not in _HALVES


def _dtype(x) -> torch.dtype:
    """The dtype to which torch's op casts x under the present autocast state."""
    device = "cuda" if x.is_cuda else "cpu"
    casts = torch.is_autocast_enabled(device) and x.dtype in FLOATS
    return torch.get_autocast_dtype(device) if casts else x.dtype


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    sinks: Tensor | None = None,
    lengths: Tensor | None = None,
    offset: int = 0,
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = None,
    uniform: bool = False,
    return_lse: bool = False,
    prefer: str = "auto",
) -> Tensor | Any:
    """`torch.nn.functional.scaled_dot_product_attention` with more options, in O(T + S) memory.

    The result is (..., H, T, E). A query that sees no key gives 0, as in torch. Dropout draws 16-bit numbers: p is
    exact to 2^-16, and kept values are scaled by this rounded p. Raises what torch raises.

    Args:
        query: (..., H, T, D).
        key: (..., G, S, D).
        value: (..., G, S, E).
        attn_mask: Boolean (True: attends) or additive, broadcast to (..., H, T, S); may require a gradient.
        dropout_p: The probability of dropout.
        is_causal: The same as a window whose right is 0.
        scale: Of the scores; None: 1 / sqrt(D).
        enable_gqa: Whether G may be smaller than H, as in torch.
        window: (left, right), each None or an int >= 0: query i sees the keys from i + offset - left to i + offset +
            right.
        softcap: c > 0; scores are c tanh(score / c), before anything is added.
        alibi: Slopes (H,) or (B, H); slope |i + offset - j| is subtracted.
        sinks: (H,), one more logit in the denominator of each head; may require a gradient.
        lengths: int32 (B,), how many keys each batch element has, or (B, 2): its first key, and the one after its last.
        offset: The position of the first query among the keys.
        cu_seqlens: int32 (n + 1,), or two of them, for queries and for keys: B is 1, and sequence m is the rows
            cu_seqlens[m] to cu_seqlens[m + 1], which only see each other. window, offset and is_causal count within it.
            Not together with attn_mask or lengths.
        uniform: Whether a query that sees no key weighs all keys alike, as if its pairs had got a finite number that
            absorbs the scores, like the one that transformers' eager attention adds, in place of attn_mask and alibi.
            Not together with cu_seqlens.
        return_lse: Whether the log-sum-exp of the scores (..., H, T), float32, differentiable, is also returned.
        prefer: "auto", "memory" or "speed", as in `hfnn.convert`.

    Raises:
        ValueError: Options do not fit together.

    >>> q = k = torch.ones(1, 1, 3, 1)  # every visible key counts alike
    >>> v = torch.tensor([1.0, 3.0, 5.0]).view(1, 1, 3, 1)
    >>> hfnn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, window=(1, 0)).flatten()
    tensor([1., 2., 4.])
    """
    # If all of them are None:
    if attn_mask is window is softcap is alibi is sinks is lengths is cu_seqlens is None and not (
        offset or uniform or return_lse
    ):
        o = of_torch(query, key, value, dropout_p, is_causal, scale, enable_gqa, prefer)
        if o is not None:
            return o
    asked = Arguments(
        attn_mask, dropout_p, is_causal, scale, enable_gqa, window, softcap, alibi, sinks, lengths, offset, cu_seqlens,
        uniform,
    )  # fmt: skip
    found = _run(asked, query, key, value, asked.ordinary and not return_lse, prefer, True)
    return found if return_lse else found[0]


def in_rows(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, prefer, **options):
    """`scaled_dot_product_attention` within a module. The result is (B, T, H, E) in memory, whatever torch's order is:
    the module's next product reads it without a copy. attn_mask and is_causal do not exclude each other."""
    asked = Arguments(attn_mask, dropout_p, is_causal, **options)
    return _run(asked, query, key, value, asked.ordinary, prefer, False)[0]


def _run(asked: Arguments, query, key, value, ordinary: bool, prefer: str, as_torch: bool):
    """(o, lse); lse is None if torch's own op runs. ordinary: whether torch's own op can; as_torch: whether an ordinary
    call has torch's strides and refusals."""
    mask, p, causal, scale, gqa = asked[:5]
    enough = ordinary and (suffices(query, mask, p, prefer) or (as_torch and _few_keys(query, mask, p)))
    query, key, value = _joined(query, key, value)
    if enough and asked.stock is not None and asked.stock.explicit and flops.counting():
        asked.stock.both(query, key, value)
    if enough and mask is None:
        return backends.plain(query, key, value, p, causal, scale, gqa), None
    if not enough and not (ordinary and as_torch and causal and mask is not None):
        found = _attention(asked, query, key, value, ordinary, prefer, as_torch)
        if found is not None:
            return found
    return _torch(query, key, value, mask, p, causal, scale=scale, enable_gqa=gqa), None


def _few_keys(query, mask, p) -> bool:
    """Whether the probabilities, which torch keeps on the CPU for a mask's gradient, are no larger than the result and
    two numbers per row."""
    trained = mask is not None and mask.requires_grad and not p and forced() is None
    return trained and not on_gpu(query) and mask.dim() > 0 and mask.shape[-1] <= query.shape[-1] + 2


def of_torch(query, key, value, dropout_p, is_causal, scale, enable_gqa, prefer):
    """torch's own op without a mask if it suffices, or None. Most calls are of this kind, and many are small."""
    if not suffices(query, None, dropout_p, prefer):
        return None
    return backends.plain(*_joined(query, key, value), dropout_p, is_causal, scale, enable_gqa)


def _joined(query, key, value):
    found = None if compiling() else _joint(query, key, value)
    return (query, key, value) if found is None or found is NotImplemented else found


def _attention(asked: Arguments, query, key, value, ordinary: bool, prefer: str, as_torch: bool):
    """(o, lse), or None if torch's own op must run or raise."""
    leading = query.shape[:-3]
    dtype = _dtype(query)
    q, k, v = (_rows(_four(x).to(dtype if x.is_floating_point() else x.dtype)) for x in (query, key, value))
    mask, *numbers = (None if x is None else x.resolve_neg() for x in (asked.attn_mask, asked.alibi, asked.sinks))
    mask = mask.to(_dtype(mask)) if mask is not None and ordinary and asked.stock is None else mask
    asked = asked._replace(attn_mask=_mask_in_four(mask, leading, q, k), alibi=numbers[0], sinks=numbers[1])
    problem = asked.problem(q, k, v) if query.dim() == key.dim() == value.dim() >= 2 else "of different dimensions"
    if problem is not None:
        if ordinary:
            return None
        raise ValueError(f"scaled_dot_product_attention: {problem}")
    kernel = _select(asked, q, k, v, ordinary, prefer)
    if kernel is None and ordinary and asked.dropout_p != 1:
        return None
    o, lse = _compute(asked, q, k, v, kernel, _math_dims(asked, query) if ordinary and as_torch else 0)
    return o.reshape(*query.shape[:-1], o.shape[-1]), lse.reshape(query.shape[:-1])


def _math_dims(asked, query) -> int:
    """query's dimensions if torch's own op would run its math backend on the CPU, whose strides differ; else 0."""
    bias = asked.attn_mask is not None and asked.attn_mask.requires_grad and torch.is_grad_enabled()
    return query.dim() if place(query) == "cpu" and (bias or asked.dropout_p > 0 or query.dim() != 4) else 0


def _select(asked, query, key, value, ordinary, prefer):
    if flops.watched():
        return None
    if (asked.alibi is not None and asked.alibi.requires_grad) or asked.dropout_p == 1:
        if forced() not in (None, "torch"):
            raise NoKernel(
                f"{OP.name}: `{forced()}` was asked for; no kernel has gradients of alibi, or drops everything"
            )
        return None
    row = (max(query.shape[-1], value.shape[-1]),)
    return OP.select(query, key, value, row=row, out=query.dtype, prefer=prefer if ordinary else "memory")


def _compute(asked, query, key, value, kernel, math_dims):
    settings = asked.for_reference()
    if kernel is None:
        return reference(query, key, value, asked.attn_mask, sinks=asked.sinks, return_lse=True, **settings)
    bias = asked.bias(query)
    numbers, pair = asked.numbers(query.shape[-1]), None
    if asked.dropout_p > 0:
        counters = math.prod(query.shape[:3]) * (-(-key.shape[2] // 8))
        seed, offset, pair = dropout.philox_seed(query, counters)
        numbers = numbers._replace(threshold=round(asked.dropout_p * 65536), seed=seed, offset=offset)
    tensors = asked.tensors(query, key)
    settings |= dict.fromkeys(tensors.for_reference())  # only saved tensors are freed by backward
    return _Attention.apply(
        query, key, value, bias, asked.sinks, tensors, numbers, pair, settings, kernel, math_dims, asked.replaced(bias)
    )


def _four(x):
    """x in four dimensions."""
    return x.flatten(0, -4) if x.dim() > 4 else x[(None,) * (4 - x.dim())]


def _mask_in_four(attn_mask, leading, query, key):
    if attn_mask is None or len(leading) < 2:
        return attn_mask
    return _four(attn_mask.expand(*leading, *attn_mask.shape[-3:]) if attn_mask.dim() > 3 else attn_mask)
