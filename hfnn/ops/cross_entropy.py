"""Cross-entropy between logits and classes, or class probabilities.

    z = logit_scale x, or softcap tanh(logit_scale x / softcap)
    loss_r = sum_c b_rc (lse_r - z_rc) + z_loss lse_r^2,    lse_r = log(sum_c exp(z_rc))

b is the target: for a class t, b_c = (1 - smoothing) w_t [c = t] + smoothing / C * w_c; for probabilities q,
b_c = w_c ((1 - smoothing) q_c + smoothing / C). `z_loss` keeps lse near 0 (Chowdhery et al., "PaLM", 2022,
https://arxiv.org/abs/2204.02311), `softcap` bounds the logits (Gemma 2, 2024, https://arxiv.org/abs/2408.00118).

Forward reads the logits once and keeps them and lse_R. torch keeps the logarithms of the probabilities, a tensor of the
same size that it has to write. Backward writes the gradient into new memory: logits are never overwritten.

Names end in their shape: R rows (every dimension but the classes', flattened), C classes.
"""

import torch
from torch import Tensor, nn
from torch.nn import _reduction

from hfnn.core.context import is_plain
from hfnn.core.kernel import Kernel, Op, kernels
from hfnn.core.node import Function, double_backward
from hfnn.ops.layer_norm import statistics_dtype
from hfnn.ops.layout import like


def reference(
    input,
    target,
    weight=None,
    size_average=None,
    ignore_index=-100,
    reduce=None,
    reduction="mean",
    label_smoothing=0.0,
    *,
    z_loss=0.0,
    softcap=None,
    logit_scale=1.0,
):
    """The definition in plain torch, differentiable, in the dtype of the logits."""
    z = transform(input.movedim(min(1, input.dim() - 1), -1), softcap, logit_scale)
    classes, soft = z.shape[-1], target.is_floating_point()
    w_C = z.new_ones(classes) if weight is None else weight.to(z.dtype)
    lse = z.logsumexp(-1)
    if soft:
        counted = share = torch.ones_like(lse)
        b = w_C * ((1 - label_smoothing) * target.movedim(min(1, input.dim() - 1), -1) + label_smoothing / classes)
        # A probability of 0 leaves out a logit of -inf. torch's sum does not, but there is nothing to imitate.
        loss = (b * (lse.unsqueeze(-1) - z)).sum(-1)
    else:
        counted = target != ignore_index
        index = target.where(counted, 0)
        share = w_C[index] * counted
        picked = z.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        loss = (1 - label_smoothing) * w_C[index] * (lse - picked)
        if label_smoothing:
            loss = loss + label_smoothing / classes * (w_C * (lse.unsqueeze(-1) - z)).sum(-1)
    if z_loss:
        loss = loss + z_loss * lse.square()
    loss = loss.where(counted.bool(), 0)
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce, emit_warning=False)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / share.sum()


def transform(x, softcap, logit_scale):
    """The logits that the softmax sees."""
    z = x if logit_scale == 1 else x * logit_scale
    return z if not softcap else softcap * torch.tanh(z / softcap)


def sample(case, dtype, device, generator=None):
    """Arguments of `cross_entropy`; the leading dimensions of `case` become rows, and the first row is ignored."""
    x = torch.randn(case, generator=generator).mul_(3).flatten(0, -2) if len(case) > 1 else torch.randn(case)
    target = torch.randint(case[-1], x.shape[:-1], generator=generator)
    if target.numel() > 1:
        target[0] = -100
    return (x.to(dtype).to(device), target.to(device)), {}


OP = Op(
    "cross_entropy",
    reference,
    nn.functional.cross_entropy,
    kernels=kernels(
        "cross_entropy",
        1 << 15,
        Kernel("cuda", "hfnn._C:cuda.cross_entropy", "cuda", min_elements=1 << 24),
        max_cols=1 << 20,
    ),
    sample=sample,
    cases=((30, 257), (10, 769), (5, 3, 64), (257, 1024), (0, 8), (8, 8192), (33, 10)),
    traffic=(1, 2),
    probe=lambda x: (x.new_empty(0, dtype=torch.int64),),
    small=(3, 5),
    bench=((8192, 32000), (8192, 128256), (65536, 1024)),
    recipe=False,
    like_input=False,
    sums=True,
)
# The CUDA C++ kernel takes classes only.
SOFT = Op("cross_entropy", reference, OP.torch, OP.kernels[1:], sample, probe=OP.probe, like_input=False)
_passes = OP.passes


def _forward(x, target, weight, options, reduction, out_dtype, kernel):
    """(the result, lse_R, slope_R, total): the values that forward keeps besides the logits."""
    x_RC, target_R = rows(x), _target(target, x)
    count, smoothing, soft = x_RC.shape[0], options[1], target.is_floating_point()
    weighted_mean = reduction == "mean" and not soft
    loss_share = torch.empty((2 if weighted_mean else 1, count), dtype=statistics_dtype(x), device=x.device)
    loss_R, share_R = loss_share if weighted_mean else (loss_share[0], None)
    lse_R = torch.empty_like(loss_R, dtype=torch.float64)
    slope_R = torch.empty_like(loss_R) if soft or (weight is not None and smoothing) else None
    kernel.forward(x_RC, target_R, weight, loss_R, share_R, lse_R, slope_R, *options, kernel.queue(x))
    if reduction == "none":
        return _shaped(loss_R, x).to(out_dtype), lse_R, slope_R, None
    sums = loss_share.sum(1)
    if reduction == "sum":
        return sums[0].to(out_dtype), lse_R, slope_R, None
    # One launch divides and rounds.
    loss = torch.empty((), dtype=out_dtype, device=x.device)
    total = sums[1] if weighted_mean else count
    return torch.div(sums[0], total, out=loss), lse_R, slope_R, sums[1] if weighted_mean else None


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx, x, target, weight, options, reduction, out_dtype, kernel):
        ctx.set_materialize_grads(False)
        loss, lse_R, slope_R, total = _forward(x, target, weight, options, reduction, out_dtype, kernel)
        ctx.save_for_backward(x, target, weight, lse_R, slope_R, total)
        ctx.options, ctx.reduction, ctx.kernel = options, reduction, kernel
        return loss

    @staticmethod
    def backward(ctx, dy):
        x, target, weight, lse_R, slope_R, total = ctx.saved_tensors
        nothing = (None,) * 6
        if torch.is_grad_enabled():
            formula = _formula(target, weight, ctx.options, ctx.reduction, dy.dtype)
            return (*double_backward(formula, (x,), (True,), dy), *nothing)
        x_RC = rows(x)
        if total is not None:
            factor = (dy / total).reshape(1)  # in the dtype of total, by one launch
        else:
            factor = dy.reshape(-1).to(statistics_dtype(x)).contiguous()
            factor = factor / max(x_RC.shape[0], 1) if ctx.reduction == "mean" else factor
        dx_RC = like(x_RC)
        kernel, target_R = ctx.kernel, _target(target, x)
        kernel.backward(x_RC, target_R, weight, lse_R, slope_R, factor, dx_RC, *ctx.options, kernel.queue(x))
        return unrows(dx_RC, x), *nothing


def _formula(target, weight, options, reduction, out_dtype):
    """torch's own ops, in the widest dtype at hand, returning what the kernel returned."""
    ignore_index, smoothing, z_loss, logit_scale, softcap = options

    def formula(x):
        wide = torch.promote_types(x.dtype, torch.float32)
        soft, classes = target.is_floating_point(), min(1, x.dim() - 1)
        z = transform(x.to(wide), softcap, logit_scale)
        w = None if weight is None else weight.to(wide)
        t = target.to(wide) if soft else target
        loss = nn.functional.cross_entropy(
            z, t, w, ignore_index=ignore_index, reduction=reduction, label_smoothing=smoothing
        )
        if z_loss:
            counted = torch.ones_like(z.select(classes, 0), dtype=torch.bool) if soft else target != ignore_index
            penalty = z_loss * z.logsumexp(classes).square().where(counted, 0)
            share = counted if w is None or soft else w[target.where(counted, 0)] * counted
            penalty = penalty if reduction == "none" else penalty.sum()
            loss = loss + (penalty / share.sum() if reduction == "mean" else penalty)
        return loss.to(out_dtype)

    return formula


def rows(x):
    """Logits (C), (N, C) or (N, C, ...) as a contiguous x_RC."""
    if x.dim() > 2:
        x = x.movedim(1, -1)
    return x.contiguous().view(-1, x.shape[-1])


def unrows(dx_RC, x):
    """x_RC's gradient in the shape of x. torch's is contiguous, whatever x is."""
    if x.dim() <= 2:
        return dx_RC.view(x.shape)
    dx = dx_RC.view(x.shape[0], *x.shape[2:], x.shape[1]).movedim(-1, 1)
    return dx.new_empty(x.shape).copy_(dx)


def _target(target, x):
    """Classes as (R,), probabilities as (R, C), in the dtype of x or in that of the sums."""
    if not target.is_floating_point():
        return target.contiguous().view(-1)
    target_RC = rows(target)
    return target_RC if target.dtype is x.dtype else target_RC.to(statistics_dtype(x))


def _out_dtype(x, target, weight):
    """The dtype that torch's op returns: for probabilities, that of their product with logarithms and weights."""
    dtype = OP.out_dtype(x)
    if target.is_floating_point():
        for factor in (target, weight):
            dtype = dtype if factor is None else torch.promote_types(dtype, factor.dtype)
    return dtype


def _shaped(loss_R, x):
    """Losses of the rows in the shape of the classes."""
    return loss_R.view(*x.shape[:1], *x.shape[2:]) if x.dim() > 1 else loss_R.view(())


def _fits(x, target, weight, smoothing, reduction, prefer) -> bool:
    """Whether shapes and types suit a kernel; otherwise torch's own op runs or raises."""
    if x.dim() == 0 or 0 in x.shape[min(1, x.dim() - 1) : 2] or reduction not in ("none", "mean", "sum"):
        return False
    if not is_plain(target) or target.device != x.device or not 0 <= smoothing <= 1:
        return False
    if target.is_floating_point():
        if target.shape != x.shape or target.requires_grad:
            return False
        if target.dtype is torch.float64 and x.dtype is not torch.float64:  # the loss is float64
            return False
    elif target.dtype is not torch.int64 or target.shape != (x.shape[:1] if x.dim() > 1 else ()) + x.shape[2:]:
        return False
    if weight is not None and (weight.shape != (x.shape[min(1, x.dim() - 1)],) or weight.requires_grad):
        return False
    # Rows of a (N, C, ...) tensor are strided, and copies cost more than the kernel saves, except in channels_last.
    return x.dim() <= 2 or prefer == "memory" or x.movedim(1, -1).is_contiguous()


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    prefer: str = "auto",
) -> Tensor:
    """`torch.nn.functional.cross_entropy`, which keeps only the logits and never writes to them. Sums are float32.

    The result is a scalar, or with reduction="none" has the shape of the classes; its dtype is torch's. A "mean"
    divides by the sum of weight[target] over rows that are not ignored, or by the number of rows where the target is
    probabilities; the mean of nothing is NaN. Raises what torch raises.

    Args:
        input: Logits, (C), (N, C) or (N, C, d1, ...).
        target: int64 classes, (), (N) or (N, d1, ...); or probabilities of the shape of input.
        weight: (C,) or None.
        size_average: Deprecated, as in torch.
        ignore_index: The class of rows that do not count.
        reduce: Deprecated, as in torch.
        reduction: "mean", "sum" or "none".
        label_smoothing: In [0, 1].
        z_loss: Adds z_loss * lse^2 to each row that is not ignored.
        softcap: c > 0: logits become c tanh(logit / c); None: they do not.
        logit_scale: A factor of the logits, before softcap.
        prefer: "auto", "memory" or "speed", as in `hfnn.convert`.

    >>> hfnn.functional.cross_entropy(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, -100]))
    tensor(0.1269)
    """
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    extras = bool(z_loss or softcap or logit_scale != 1)
    kernel = None
    if not _passes(input, prefer):
        op = SOFT if is_plain(target) and target.is_floating_point() else OP
        kernel = op.select(input, weight, row=input.shape[min(1, input.dim() - 1) :][:1], prefer=prefer)
    if kernel is not None and _fits(input, target, weight, label_smoothing, reduction, prefer):
        options = (ignore_index, float(label_smoothing), float(z_loss), float(logit_scale), float(softcap or 0))
        weight = None if weight is None else weight.detach().contiguous()
        out_dtype = _out_dtype(input, target, weight)
        if torch.is_grad_enabled():
            return _CrossEntropy.apply(input, target, weight, options, reduction, out_dtype, kernel)
        return _forward(input, target, weight, options, reduction, out_dtype, kernel)[0]
    if extras:
        options = (ignore_index, label_smoothing, z_loss, logit_scale, softcap)
        return _formula(target, weight, options, reduction, _out_dtype(input, target, weight))(input)
    return nn.functional.cross_entropy(
        input, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss`: the same arguments and defaults, and `z_loss`, `softcap` and `logit_scale`.

    `prefer` is set by `hfnn.convert`.

    Args:
        weight: (C,) or None.
        size_average: Deprecated, as in torch.
        ignore_index: The class of rows that do not count.
        reduce: Deprecated, as in torch.
        reduction: "mean", "sum" or "none".
        label_smoothing: In [0, 1].
        z_loss: As in `hfnn.functional.cross_entropy`.
        softcap: As in `hfnn.functional.cross_entropy`.
        logit_scale: As in `hfnn.functional.cross_entropy`.
    """

    prefer = "auto"
    z_loss, logit_scale = 0.0, 1.0
    softcap: float | None = None

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
    ):
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.z_loss, self.softcap, self.logit_scale = z_loss, softcap, logit_scale

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        own = isinstance(self, CrossEntropyLoss)  # not torch's, converted
        more = {"z_loss": self.z_loss, "softcap": self.softcap, "logit_scale": self.logit_scale} if own else {}
        return cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            prefer=self.prefer,
            **more,
        )


OP.modules[nn.CrossEntropyLoss] = CrossEntropyLoss
