"""Softmax of scores, some of which are masked out: scaled, masked and normalised in one pass.

    y = exp(z - lse),    z = scale * x + mask,    lse = log(sum(exp(z)));    dx = scale * y * (dy - sum(dy * y))

For attention that returns its weights. torch scales, masks, widens, normalises and narrows in one pass each, and keeps
the mask and y in float32. Here y is kept, in the dtype in which it is returned, and the mask is read in place without
being expanded. The last two dimensions are those of queries and keys: T and S.

Masked elements are 0 in y and in the gradient, whatever their x and dy. A fully masked row is 0; torch's softmax would
give NaNs.
"""

import torch
from torch import Tensor

from hfnn.core.context import autocasting, is_plain
from hfnn.core.kernel import FLOATS, Op, kernels
from hfnn.core.node import Function

INF = float("inf")


def reference(input, mask=None, scale=1.0, dim=-1, *, dtype=None, offset=None):
    """The formula in torch's own ops, in the dtype of input; the softmax is in float32 or wider.

    offset: None, or keys count up to this many positions after their query.
    """
    z = input * scale
    if offset is not None:
        z = z.masked_fill(~_causal(input, offset), -INF)
    if mask is not None:
        z = z.masked_fill(~mask, -INF) if mask.dtype is torch.bool else z + mask
    empty = (z == -INF).all(dim, keepdim=True)
    y = torch.softmax(z.masked_fill(empty, 0), dim, dtype=torch.promote_types(z.dtype, torch.float32))
    return y.masked_fill(empty, 0).to(_torchs_dtype(input) if dtype is None else dtype)


def _causal(input, offset):
    return torch.ones(input.shape[-2:], dtype=torch.bool, device=input.device).tril(offset)


def _torchs_dtype(input):
    """The dtype that torch's softmax returns for input, which differs under autocast."""
    if not autocasting(input):
        return input.dtype
    return torch.softmax(input.new_empty(0, 1), -1).dtype


def sample(case, dtype, device, generator=None):
    """Arguments of `masked_softmax` for x of shape `case[:-1]`; the last entry of a case is the scale.

    The mask leaves out a quarter; one matrix is used for all.
    """
    *shape, scale = case
    x = torch.randn(shape, generator=generator).to(dtype).to(device)
    return (x, (torch.rand(shape[-2:], generator=generator) > 0.25).to(device), scale), {}


OP = Op(
    "masked_softmax",
    reference,
    reference,
    kernels=kernels("masked_softmax", 0, cuda=1 << 18, max_cols=1 << 20),
    sample=sample,
    cases=tuple(
        (*shape, 0.125) for shape in ((30, 257), (10, 769), (2, 3, 5, 64), (257, 1024), (0, 4), (8, 8192), (1,))
    ),
    small=(3, 5, 0.5),
    bench=((8, 16, 2048, 2048, 0.125),),
    traffic=(2, 3),
    recipe=False,
    sums=True,
)
_passes = OP.passes


def _matrices(x):
    """x as (N, H, T, S), contiguous."""
    x = x.contiguous()
    return x if x.dim() == 4 else x.view((1,) * (4 - x.dim()) + x.shape) if x.dim() < 4 else x.flatten(0, -4)


def _as_kernels_want(mask, shape):
    """A mask as (N, H, T, S) for scores of `shape`: expanded, and copied only if no kernel supports its strides."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = mask.view(torch.uint8)
    if mask.dim() and mask.stride(-1) != 1 and mask.shape[-1] != 1:
        mask = mask.contiguous()
    mask = mask.detach().expand(shape)
    # Leading dimensions of size 1, and dimensions expanded alike, give views; five dimensions may need a copy.
    return mask.reshape((1,) * (4 - mask.dim()) + mask.shape) if mask.dim() < 4 else mask.flatten(0, -4)


def _compute(x, mask, scale, shift, out, kernel):
    y = torch.empty(x.shape, dtype=out, device=x.device)
    x_NHTS, mask_NHTS, y_NHTS = _matrices(x), _as_kernels_want(mask, x.shape), _matrices(y)
    kernel.forward(x_NHTS, mask_NHTS, y_NHTS, scale, shift is not None, shift or 0, kernel.queue(x))
    return y


class _MaskedSoftmax(Function):
    @staticmethod
    def forward(ctx, x, mask, scale, shift, out, kernel):
        ctx.set_materialize_grads(False)
        y = _compute(x, mask, scale, shift, out, kernel)
        ctx.save_for_backward(y)
        ctx.mask = mask is not None and mask.requires_grad and (mask.shape, mask.dtype)
        ctx.dtype, ctx.scale, ctx.shift, ctx.kernel = x.dtype, scale, shift, kernel
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        if not ctx.mask and not torch.is_grad_enabled():
            return _gradient(ctx, dy, y, ctx.scale, ctx.dtype), None, None, None, None, None
        # dz first: the mask has its own gradient, which must not be a sum of rounded numbers.
        wide = torch.promote_types(ctx.dtype, torch.float32)
        dz = _differentiable(dy, y, wide) if torch.is_grad_enabled() else _gradient(ctx, dy, y, 1.0, wide)
        dx = (dz * ctx.scale).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        dmask = dz.sum_to_size(ctx.mask[0]).to(ctx.mask[1]) if ctx.mask else None
        return dx, dmask, None, None, None, None


def _gradient(ctx, dy, y, scale, dtype):
    dx = torch.empty(y.shape, dtype=dtype, device=y.device)
    dy_NHTS, y_NHTS, dx_NHTS = map(_matrices, (dy, y, dx))
    queue = ctx.kernel.queue(y)
    ctx.kernel.backward(dy_NHTS, y_NHTS, dx_NHTS, scale, ctx.shift is not None, ctx.shift or 0, queue)
    return dx


def _differentiable(dy, y, wide):
    """dz as a formula of dy and the saved output, whose graph leads to x and the mask."""
    dy, y = dy.to(wide).masked_fill(y == 0, 0), y.to(wide)
    return y * (dy - (dy * y).sum(-1, keepdim=True))


def _check(input, mask):
    """Raises ValueError for a mask that does not fit input."""
    if not isinstance(mask, torch.Tensor) or (mask.dtype is not torch.bool and not mask.is_floating_point()):
        got = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(
            f"mask is {got}: give a tensor that is bool (True where a key counts) or floating (added to the scores)"
        )
    tail = input.shape[max(0, input.dim() - mask.dim()) :]
    if mask.dim() > input.dim() or any(m not in (1, n) for m, n in zip(mask.shape, tail, strict=True)):
        raise ValueError(
            f"mask of shape {tuple(mask.shape)} does not broadcast to input of shape {tuple(input.shape)}: give each "
            "dimension, counted from the last, input's size or 1"
        )


def _kernel(input, mask, scale, out, prefer):
    """The kernel for a call along the last dimension, or None for torch's formula."""
    if _passes(input, prefer) or not isinstance(scale, (int, float)) or input.dim() == 0:
        return None
    pair = out, input.dtype
    if out is not input.dtype and (torch.float32 not in pair or any(dtype not in FLOATS for dtype in pair)):
        return None
    others = (mask,)
    if mask is not None and mask.dtype is torch.bool:  # bool is not a parameter dtype
        if not is_plain(mask) or mask.device != input.device:
            return None
        others = ()
    if input.numel() >= input.shape[-1] << 31:  # more rows than Triton can count
        return None
    return OP.select(input, *others, row=input.shape[-1:], out=out, prefer=prefer)


def _run(input, mask, scale, offset, dtype, prefer):
    out = dtype
    if out is None:
        out = input.dtype if _passes(input, prefer) else OP.out_dtype(input)
    kernel = _kernel(input, mask, scale, out, prefer)
    if kernel is None:
        return reference(input, mask, scale, dtype=dtype, offset=offset)
    # A shift beyond the matrix has the same effect as one at its edge.
    shift = None if offset is None else max(-input.shape[-2], min(offset, input.shape[-1]))
    compute = _MaskedSoftmax.apply if torch.is_grad_enabled() else _compute
    return compute(input, mask, scale, shift, out, kernel)


def masked_softmax(
    input: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    dim: int = -1,
    *,
    dtype: torch.dtype | None = None,
    prefer: str = "auto",
) -> Tensor:
    """softmax(scale * input + mask), in one pass over memory; only the result is kept.

    16-bit values are computed in float32, so `dtype=query.dtype` equals transformers' `softmax(...,
    dtype=float32).to(query.dtype)`. A fully masked row is 0, not NaN.

    Args:
        input: Of any shape, which the result has.
        mask: None, or of a shape that broadcasts to input's; bool (True where an element counts) or floating (added,
            and differentiable). It is not expanded in memory.
        scale: A factor of input.
        dim: Where exponentials are summed. Kernels work along the last dimension, torch's ops along others.
        dtype: Of the result; None: that of torch's softmax of input.
        prefer: "auto", "memory" or "speed", as in `hfnn.convert`.

    Raises:
        ValueError: A mask of another dtype or shape.

    >>> hfnn.functional.masked_softmax(torch.zeros(1, 3), torch.tensor([True, False, True]))
    tensor([[0.5000, 0.0000, 0.5000]])
    """
    if mask is not None:
        _check(input, mask)
    if dim != -1 and dim != input.dim() - 1:
        return reference(input, mask, scale, dim, dtype=dtype)
    return _run(input, mask, scale, None, dtype, prefer)


def causal_softmax(
    input: Tensor,
    scale: float = 1.0,
    *,
    mask: Tensor | None = None,
    offset: int | None = None,
    dtype: torch.dtype | None = None,
    prefer: str = "auto",
) -> Tensor:
    """`masked_softmax` along the last dimension, where key j of query i counts if j <= i + offset; others are not read.

    Args:
        input: (*, T, S).
        scale: A factor of input.
        mask: Further exclusions, as padding; as in `masked_softmax`.
        offset: An int; None: S - T, so that the last query sees all keys, as in transformers' eager masks.
        dtype: Of the result; None: that of torch's softmax of input.
        prefer: "auto", "memory" or "speed", as in `hfnn.convert`.

    Raises:
        ValueError: input has fewer than two dimensions, offset is not an int, or mask as in `masked_softmax`.

    >>> hfnn.functional.causal_softmax(torch.zeros(2, 3))
    tensor([[0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    """
    if input.dim() < 2:
        raise ValueError(f"input of shape {tuple(input.shape)}: give scores of shape (..., queries, keys)")
    if offset is None:
        offset = input.shape[-1] - input.shape[-2]
    elif not isinstance(offset, int):
        raise ValueError(f"offset={offset!r}: give an int, the position of query 0 among the keys, or None")
    if mask is not None:
        _check(input, mask)
    return _run(input, mask, scale, offset, dtype, prefer)
