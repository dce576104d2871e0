"""Knowledge distillation between two linear maps into one vocabulary, without the logits of either.

    z = (hidden weight^T + bias) / temperature,    p = softmax(z) of the student,    q = softmax(z) of the teacher

    beta = 0:  KL(q | p) = sum_v q_v (log q_v - log p_v)          the teacher's words, weighed by the teacher
    beta = 1:  KL(p | q)                                          the student's words: reverse KL
    between:   beta KL(q | m) + (1 - beta) KL(p | m),    m = beta q + (1 - beta) p

Hinton et al., "Distilling the Knowledge in a Neural Network", 2015, https://arxiv.org/abs/1503.02531; generalised
Jensen-Shannon divergence: Agarwal et al., "On-Policy Distillation of Language Models", 2024,
https://arxiv.org/abs/2306.13649

Logits of both are made for a chunk of tokens at a time (head.py), and the student's logits are turned into their
gradient at once. Forward ends with the gradients of hidden, weight and bias. Backward multiplies them by the gradient
of the loss and releases them. A second backward of a retained graph makes the logits once more, and so does
reduction="none", whose gradient is not known in forward. The teacher is data: it gets no gradient. If `max_bytes` only
allows small chunks, the weight's gradient is summed in float32. Slabs of the vocabulary are not possible, because the
two softmaxes need whole rows.

Names end in their shape: T tokens, V vocabulary, H hidden.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hfnn.core import flops
from hfnn.core.context import autocasting, context
from hfnn.core.kernel import Op, kernels
from hfnn.core.node import Function
from hfnn.ops import head
from hfnn.ops.layer_norm import statistics_dtype


def reference(input, linear_weight, teacher_input, teacher_weight, linear_bias=None, teacher_bias=None, **options):
    """The definition, in the dtype of the input."""
    teacher = [None if t is None else t.to(input.dtype) for t in (teacher_input, teacher_weight, teacher_bias)]
    return of_logits(
        nn.functional.linear(input, linear_weight, linear_bias), nn.functional.linear(*teacher).detach(), **options
    )


def of_logits(logits, teacher, target=None, ignore_index=-100, beta=0.0, temperature=1.0, reduction="mean"):
    """The divergence of existing logits, by torch's ops, in float32 (float64)."""
    wide = torch.promote_types(torch.promote_types(logits.dtype, teacher.dtype), torch.float32)
    log_p, log_q = ((z.to(wide) / temperature).log_softmax(-1) for z in (logits, teacher))
    if beta == 0:
        loss = _kl(log_q, log_p)
    elif beta == 1:
        loss = _kl(log_p, log_q)
    else:
        log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
        loss = beta * _kl(log_q, log_m) + (1 - beta) * _kl(log_p, log_m)
    total = loss.numel()
    if target is not None:
        counted = target != ignore_index
        loss, total = loss.where(counted, 0), counted.sum()
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / total


def _kl(log_a, log_b):
    a = log_a.exp()
    return (a * (log_a - log_b).where(a > 0, 0)).sum(-1)


def composed(input, linear_weight, teacher_input, teacher_weight, linear_bias=None, teacher_bias=None, **options):
    """torch's own ops, in torch's dtypes."""
    logits = nn.functional.linear(input, linear_weight, linear_bias)
    with torch.no_grad():
        teacher = nn.functional.linear(teacher_input, teacher_weight, teacher_bias)
    out = torch.promote_types(logits.dtype, teacher.dtype)
    if autocasting(logits):  # where softmax returns float32
        out = torch.promote_types(out, torch.float32)
    return of_logits(logits, teacher, **options).to(out)


def sample(case, dtype, device, generator=None):
    """Arguments for a student of shape `case` and a teacher 1.5 times as wide; the first token is ignored."""
    *tokens, width = case if len(case) > 1 else (1, *case)
    vocabulary, teacher_width = width + 37, width + width // 2

    def pair(width):
        hidden = torch.randn(*tokens, width, generator=generator)
        weight = torch.randn(vocabulary, width, generator=generator) * width**-0.5
        return [t.to(dtype).to(device) for t in (hidden, weight)]

    student, teacher = pair(width), pair(teacher_width)
    target = torch.zeros(tokens, dtype=torch.int64)
    if target.numel() > 1:
        target.view(-1)[0] = -100
    # The teacher's arguments are keywords, because they get no gradient.
    return tuple(student), {
        "teacher_input": teacher[0],
        "teacher_weight": teacher[1],
        "target": target.to(device),
        "beta": 0.5,
    }


OP = Op(
    "linear_distillation",
    reference,
    composed,
    kernels=kernels("distillation", 0, cuda=0, max_cols=1 << 20),
    sample=sample,
    cases=((1, 64), (3, 769), (5, 3, 64), (257, 40), (0, 8)),
    traffic=(0, 0),
    probe=lambda x: (x.new_empty(3, 1), x, x.new_empty(3, 1)),
    small=(3, 5),
    recipe=False,
    like_input=False,
    sums=True,
)


class DistillationCall(NamedTuple):
    """Values that do not change between forward and backward. dtype: of the student's logits; ahead: whether forward
    makes the gradients.
    """

    beta: float
    temperature: float
    ignore_index: int
    reduction: str
    dtype: torch.dtype
    teacher_dtype: torch.dtype
    out_dtype: torch.dtype
    max_bytes: int | None
    ahead: bool
    kernel: object

    @property
    def late(self) -> bool:
        """Whether 1 / total waits for backward: in float16 the small gradients of a mean would vanish."""
        return self.dtype is torch.float16

    @property
    def options(self) -> dict:
        names = ("ignore_index", "beta", "temperature", "reduction")
        return {name: getattr(self, name) for name in names}


def _counted(hidden, target, call: DistillationCall):
    """(1 for tokens that count and 0 for others (T,), the number that count), in the dtype of the statistics."""
    wide, tokens = torch.promote_types(call.dtype, torch.float32), hidden.shape[:-1].numel()
    if target is None:
        return hidden.new_ones(tokens, dtype=wide), hidden.new_full((), tokens, dtype=wide)
    counted_T = (target.reshape(-1) != call.ignore_index).to(wide)
    return counted_T, counted_T.sum()


def _pass(student, teacher, counted_T, factor_T, loss_T, needs, weight_dtype, call: DistillationCall):
    """One pass over the tokens: fills `loss_T` if given; returns (gradients of hidden, weight, bias) for `factor_T`."""
    grads = None
    max_bytes = None if call.max_bytes is None else call.max_bytes // 2  # for both kinds of logits
    plan = head.plan_for(student, needs, weight_dtype, max_bytes)
    if factor_T is not None:
        # Whole rows are needed, so slabs are impossible. If there are too many roundings, chunks are added in float32.
        wide = statistics_dtype(student.hidden) if plan.by_slabs else weight_dtype
        grads = head.Gradients(student, needs, wide)
    kernel, scale = call.kernel, 1 / call.temperature
    for (tokens, x), (_, z) in zip(head.chunks(student, plan.step), head.chunks(teacher, plan.step), strict=True):
        loss = None if loss_T is None else loss_T[tokens]
        factor, dx = (counted_T[tokens], None) if grads is None else (factor_T[tokens], x)
        kernel.fused(x, z.to(call.dtype), loss, factor, dx, call.beta, scale, kernel.queue(x))
        if grads is not None:
            grads.add(tokens, x)
    return (None, None, None) if grads is None else grads.all()


class _Weights:
    """The teacher's weight and bias for another pass, as given, sharded or not; an error if they have changed.

    Autograd does not save them: their owner keeps them anyway, and hooks must not move or copy another model.
    """

    def __init__(self, *tensors):
        self._tensors = tensors
        self._versions = self._now()

    def _now(self):
        return [None if t is None or t.is_inference() else t._version for t in self._tensors]

    def gathered(self):
        if self._now() != self._versions:
            raise RuntimeError(
                "the teacher's weights have been modified by an inplace operation since forward, and this backward "
                "makes the logits once more: change them after it"
            )
        return tuple(head.gathered(t) for t in self._tensors)


def _products(*given):
    return nn.functional.linear(*given[:3]), nn.functional.linear(*given[3:])


class _LinearDistillation(Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, target, kept, call):
        ctx.set_materialize_grads(False)
        needs = ctx.needs_input_grad[:3]
        teacher = (teacher_hidden, teacher_weight, teacher_bias)
        counted_T, total = _counted(hidden, target, call)
        loss_T = torch.empty_like(counted_T)
        with flops.instead(_products, hidden, weight, bias, *teacher):
            grads = _gradients(hidden, weight, bias, teacher, counted_T, total, loss_T, None, needs, call)
        ctx.save_for_backward(hidden, weight, bias, teacher_hidden, target)
        ctx.grads = (*grads, total) if call.ahead else None
        ctx.kept, ctx.call = kept, call
        loss_T = loss_T.where(counted_T > 0, 0)
        if call.reduction == "none":
            return loss_T.view(hidden.shape[:-1]).to(call.out_dtype)
        loss = loss_T.sum()
        return (loss / total if call.reduction == "mean" else loss).to(call.out_dtype)

    @staticmethod
    def backward(ctx, dy):
        hidden, weight, bias, teacher_hidden, target = ctx.saved_tensors
        call, needs, nothing = ctx.call, ctx.needs_input_grad[:3], (None,) * 6
        if torch.is_grad_enabled():
            inputs = [t for t, need in zip((hidden, weight, bias), needs, strict=True) if need]
            teacher = (teacher_hidden, *ctx.kept.gathered())
            with torch.enable_grad():
                with flops.uncounted(profiled=True):
                    loss = _formula(hidden, weight, bias, teacher, target, call)
                grads = iter(torch.autograd.grad(loss, inputs, dy, create_graph=True))
            return (*(next(grads) if need else None for need in needs), *nothing)
        if flops.by_mode():
            flops.backward(
                nn.functional.linear, needs, hidden.shape, weight.shape, None if bias is None else bias.shape
            )
        # Released: autograd makes them the .grad of the parameters, and nothing else may hold them then.
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            counted_T, total = _counted(hidden, target, call)
            dy_T = dy.reshape(-1) if call.reduction == "none" else None
            teacher = (teacher_hidden, *ctx.kept.gathered())
            with flops.uncounted():
                grads = (*_gradients(hidden, weight, bias, teacher, counted_T, total, None, dy_T, needs, call), total)
        *grads, total = grads
        factor = None
        if call.reduction != "none":
            factor = dy.to(total.dtype)
            if call.late and call.reduction == "mean":
                factor = factor / total.clamp_min(1)
        dtypes = (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
        dhidden, *rest = (head.finished(g, factor, dtype) for g, dtype in zip(grads, dtypes, strict=True))
        return None if dhidden is None else dhidden.view(hidden.shape), *rest, *nothing


def _gradients(hidden, weight, bias, teacher, counted_T, total, loss_T, dy_T, needs, call: DistillationCall):
    """The losses if `loss_T` is given, and the gradients of hidden, weight and bias unless forward does not need them.

    dy_T: the gradient of each token's loss, for reduction="none".
    """
    factor_T = None
    if loss_T is None or call.ahead:
        factor_T = counted_T if dy_T is None else counted_T * dy_T.to(counted_T.dtype)
        if call.reduction == "mean" and not call.late:
            factor_T = factor_T / total.clamp_min(1)  # without any token the loss is NaN, but not the gradient
    with head.no_autocast(hidden):
        student, taught = (
            replace(head.operands(*given, dtype), again=loss_T is None)
            for given, dtype in (((hidden, weight, bias), call.dtype), (teacher, call.teacher_dtype))
        )
        return _pass(student, taught, counted_T, factor_T, loss_T, needs, head.gradient_dtype(weight, call.dtype), call)


def _formula(hidden, weight, bias, teacher, target, call: DistillationCall):
    """The loss by torch's own ops, in the widest dtype at hand."""
    wide = torch.promote_types(call.dtype, torch.float32)
    with head.no_autocast(hidden):
        student, taught = (
            [t if t is None else t.to(wide) for t in given] for given in ((hidden, weight, bias), teacher)
        )
        logits = nn.functional.linear(*student)
        with torch.no_grad():
            z = nn.functional.linear(*taught)
        return of_logits(logits, z, target, **call.options).to(call.out_dtype)


def linear_distillation(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    target: Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.0,
    temperature: float = 1.0,
    reduction: str = "mean",
    max_bytes: int | None = None,
    prefer: str = "auto",
) -> Tensor:
    """Distance between the student's and the teacher's distributions of the next token, without a tensor of logits.

    The teacher gets no gradient. The result is a scalar, for reduction="mean" over the tokens that count (NaN where
    none does), or (*) for "none"; its dtype is that of `log_softmax` of the logits. Small problems are left to torch.

    Args:
        input: (*, in).
        linear_weight: (V, in).
        teacher_input: (*, in of the teacher).
        teacher_weight: (V, in of the teacher).
        linear_bias: (V,) or None.
        teacher_bias: (V,) or None.
        target: (*), int64, or None: all tokens count.
        ignore_index: The target of tokens that do not count.
        beta: 0 is KL(teacher | student), 1 is KL(student | teacher), between is the generalised Jensen-Shannon
            divergence.
        temperature: Divides both kinds of logits. The gradient shrinks with its square: callers who mix this loss with
            another usually multiply it by temperature ** 2.
        reduction: "mean", "sum" or "none".
        max_bytes: The limit for the logits of both at any time; None: an eighth of them, or enough for fast products.
        prefer: "auto", "memory" or "speed", as in `hfnn.convert`.

    Raises:
        ValueError: Shapes or options do not fit. Errors of torch are raised unchanged.
    """
    linear_weight, linear_bias = head.gathered(linear_weight), head.gathered(linear_bias)
    # Without targets every token counts; a tensor without memory has their shape.
    tokens = input.new_empty((), dtype=torch.int64).expand(input.shape[:-1]) if target is None else target
    head.check(input, linear_weight, tokens)
    _check(input, linear_weight, teacher_input, teacher_weight, beta, temperature, reduction)
    # Inference tensors cannot be saved for backward.
    teacher_input = teacher_input.clone() if teacher_input.is_inference() else teacher_input.detach()
    kept = _Weights(teacher_weight.detach(), None if teacher_bias is None else teacher_bias.detach())
    teacher = (teacher_input, *kept.gathered())
    options = {"ignore_index": ignore_index, "beta": beta, "temperature": temperature, "reduction": reduction}
    chosen = head.choose(OP, input, linear_weight, linear_bias, tokens, None, prefer)
    teacher_dtype = None if chosen is None else _teacher_dtype(input, *teacher, chosen[1])
    if teacher_dtype is None:
        return composed(input, linear_weight, *teacher[:2], linear_bias, teacher[2], target=target, **options)
    needs = any(t is not None and t.requires_grad for t in (input, linear_weight, linear_bias))
    ahead = torch.is_grad_enabled() and needs and reduction != "none"
    dtypes = (chosen[1], teacher_dtype, OP.out_dtype(input))
    call = DistillationCall(
        float(beta), float(temperature), ignore_index, reduction, *dtypes, max_bytes, ahead, chosen[0]
    )
    return _LinearDistillation.apply(input, linear_weight, linear_bias, *teacher, target, kept, call)


def _check(input, linear_weight, teacher_input, teacher_weight, beta, temperature, reduction) -> None:
    tokens, vocabulary = tuple(input.shape[:-1]), linear_weight.shape[0]
    fits = teacher_weight.dim() == 2 and teacher_weight.shape == (vocabulary, teacher_input.shape[-1])
    if not fits or tuple(teacher_input.shape[:-1]) != tokens:
        raise ValueError(
            f"the teacher has the student's tokens {tokens} and vocabulary {vocabulary}: teacher_input "
            f"{(*tokens, 'in')} and teacher_weight {(vocabulary, 'in')}; got {tuple(teacher_input.shape)} and "
            f"{tuple(teacher_weight.shape)}"
        )
    if not 0 <= beta <= 1:
        raise ValueError(f"beta={beta!r}: choose from 0, KL(teacher | student), to 1, KL(student | teacher)")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature!r}: choose a number above 0")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction={reduction!r}: choose one of 'none', 'mean', 'sum'")


def _teacher_dtype(input, teacher_input, teacher_weight, teacher_bias, dtype):
    """The dtype of the teacher's product, or None if torch's own ops must run, or raise.

    Its logits are not rounded to a narrower dtype than torch's.
    """
    given = [t for t in (teacher_input, teacher_weight, teacher_bias) if t is not None]
    own = head.product_dtype(teacher_input)
    if context(*given) is not None or any(t.device != input.device for t in given):
        return None
    if torch.promote_types(own, dtype) is not dtype:
        return None
    autocast = torch.is_autocast_enabled("cuda" if input.is_cuda else "cpu")
    return own if autocast or all(t.dtype is own for t in given) else None
