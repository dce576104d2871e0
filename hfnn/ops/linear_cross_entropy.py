"""Cross-entropy of a linear map, without its logits.

    loss = cross_entropy(hidden weight^T + bias, target)

The logits are made for a chunk of tokens at a time (head.py) and turned into their gradient at once. So forward ends
with the gradients of hidden, weight and bias instead of a tensor of tokens x vocabulary. Backward multiplies them by
the gradient of the loss, which costs nothing if that is 1, and releases them. A second backward of a retained graph
makes the logits once more, and so does reduction="none", whose gradient is not known in forward. head.py decides the
size of chunks; it documents their cost and the accuracy of the weight's gradient.

Each process of a `group` may have a shard of the vocabulary: rows of the weight, in the order of the ranks. For each
chunk, processes then exchange two numbers per token (Shoeybi et al., "Megatron-LM", 2019,
https://arxiv.org/abs/1909.08053).

Names end in their shape: T tokens, V vocabulary, H hidden.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hfnn.core.ask import ask, may_ask
from hfnn.core.kernel import Kernel, Op
from hfnn.core.node import Function, double_backward
from hfnn.ops import cross_entropy as logits_room
from hfnn.ops import head
from hfnn.ops.linear_log_probs import LOG_PROBS, local_target, sums_of


def reference(input, linear_weight, target, linear_bias=None, **options):
    """The definition, in the dtype of the input."""
    logits = nn.functional.linear(input, linear_weight, linear_bias).flatten(0, -2)
    return logits_room.reference(logits, target.flatten(), **options)


def composed(input, linear_weight, target, linear_bias=None, **options):
    """torch's own ops."""
    logits = nn.functional.linear(input, linear_weight, linear_bias)
    return nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten(), **options)


def sample(case, dtype, device, generator=None):
    """Arguments for hidden of shape `case`; a last entry "V128256" is the vocabulary."""
    shape = [n for n in case if isinstance(n, int)]
    vocabulary = int(case[-1][1:]) if isinstance(case[-1], str) else shape[-1] + 37
    hidden = torch.randn(shape if len(shape) > 1 else (1, *shape), generator=generator)
    weight = torch.randn(vocabulary, shape[-1], generator=generator) * shape[-1] ** -0.5
    target = torch.randint(vocabulary, hidden.shape[:-1], generator=generator)
    if target.numel() > 1:
        target.view(-1)[0] = -100
    return (hidden.to(dtype).to(device), weight.to(dtype).to(device), target.to(device)), {}


# The kernels work on the logits; the products are torch's.
OP = Op(
    "linear_cross_entropy",
    reference,
    composed,
    kernels=tuple(Kernel(k.name, k.source, k.device, k.dtypes, k.max_cols) for k in logits_room.OP.kernels),
    sample=sample,
    cases=((1, 64), (3, 769), (5, 3, 64), (257, 40), (0, 8)),
    traffic=(0, 0),
    probe=lambda x: (x.new_empty(3, 1), x.new_empty(0, dtype=torch.int64)),
    small=(3, 5),
    recipe=False,
    like_input=False,
    sums=True,
)

# The tokens that count are padded with others to a multiple of 1 / SHARES of all tokens.
SHARES, LEAST_SHARE = 32, 128


class CrossEntropyCall(NamedTuple):
    """Values that do not change between forward and backward. `options` are the kernels' (csrc/cross_entropy.h)."""

    options: tuple
    reduction: str
    dtype: torch.dtype  # of the products and the logits
    out_dtype: torch.dtype
    max_bytes: int | None
    compact: bool
    group: object
    kernel: object
    ahead: bool  # whether forward makes the gradients

    @property
    def late(self) -> bool:
        """Whether 1 / total waits for backward: in float16 the small gradients of a mean would vanish."""
        return self.dtype is torch.float16


class Rows(NamedTuple):
    """Values per token that do not depend on its logits."""

    target: torch.Tensor  # (T,) int64
    share: torch.Tensor  # (T,) the weight of a token in a mean; 0 if ignored
    scale: torch.Tensor | None  # (T,) token_weight, or None for 1
    total: torch.Tensor  # sum of share
    kept: torch.Tensor | None = None  # the processed tokens, if not all: indices in order, then T, which is no token


def _rows(target, class_weight, token_weight, call: CrossEntropyCall) -> Rows:
    wide, target = torch.promote_types(call.dtype, torch.float32), target.reshape(-1).contiguous()
    scale = None if token_weight is None else token_weight.reshape(-1).to(wide)
    kept = _kept(target != call.options[0]) if call.compact else None
    if kept is not None:
        target = _taken(target, kept, call.options[0])
        scale = None if scale is None else _taken(scale, kept, 0)
    share = _class_weights(target, class_weight, call).to(wide)
    share = share if scale is None else share * scale
    return Rows(target, share, scale, share.sum(), kept)


def _kept(counted):
    """The tokens that count, padded with T to a whole number of shares; None if waiting is impossible, or for all
    shares.

    Shares are used because a recorded graph has room for a fixed number of tokens: products have the same sizes in it
    and outside.
    """
    if not may_ask(counted):
        return None
    share = max(LEAST_SHARE, counted.numel() // SHARES)
    full = -(-counted.numel() // share)
    (shares,) = ask((counted.sum() + share - 1) // share, (-(-full // 6),))  # for masked language models: 15 of 100
    if shares == full:
        return None
    return torch.nonzero_static(counted, size=shares * share, fill_value=counted.numel()).view(-1)


def _taken(x, kept, fill):
    """The kept rows of x; `fill` for padding."""
    return torch.cat((x, x.new_full((1, *x.shape[1:]), fill)))[kept]


def _laid(some, rows: Rows, tokens: int):
    """Zeros for all tokens, and the rows of those that are kept."""
    every = some.new_zeros(tokens + 1, *some.shape[1:])
    return every.index_copy_(0, rows.kept, some)[:tokens]


def _class_weights(target, class_weight, call: CrossEntropyCall):
    """The weight of each token's class, 1 without weights; 0 if ignored."""
    counted = target != call.options[0]
    return counted if class_weight is None else counted * class_weight[target.where(counted, 0)]


def _operands(hidden, weight, bias, call: CrossEntropyCall, rows: Rows) -> head.Operands:
    # A logit of -inf changes no loss and has a gradient of 0, except with smoothing, a cap or another scale.
    _, smoothing, _, logit_scale, softcap = call.options
    pad = call.group is None and not smoothing and not softcap and logit_scale > 0
    given = head.operands(hidden, weight, bias, call.dtype, pad)
    if rows.kept is None:
        return given
    # The first kept token is repeated as padding, because its hidden state is valid; in a graph there may be no token.
    tokens = len(given.hidden)
    at = rows.kept.where(rows.kept < tokens, rows.kept[:1]).clamp(max=tokens - 1)
    return replace(given, hidden=given.hidden[at])


def _factor(rows: Rows, call: CrossEntropyCall, dy=None):
    """The factor for the gradient of each row: (T,), or (1,) for one number. dy: the gradient for reduction="none"."""
    factor = rows.total.new_ones(1) if dy is None else dy.reshape(-1).to(rows.total.dtype).contiguous()
    if dy is not None and rows.kept is not None:
        factor = _taken(factor, rows.kept, 0)
    if call.reduction == "mean" and not call.late:
        factor = factor / rows.total
    return factor if rows.scale is None else factor * rows.scale


def _part(t, tokens: slice):
    """The part of a factor, or of an optional tensor, for some tokens."""
    return t if t is None or t.numel() == 1 else t[tokens]


class _Pass:
    """One pass over the tokens: computes losses if `loss_T` is given, and gradients if `factor` is."""

    def __init__(self, given: head.Operands, rows: Rows, class_weight, call: CrossEntropyCall, needs, weight_dtype):
        self.given, self.rows, self.class_weight, self.call = given, rows, class_weight, call
        self.pads = given.shape[1] - given.classes
        if self.pads and class_weight is not None:
            self.class_weight = nn.functional.pad(class_weight, (0, self.pads))
        self.needs, self.weight_dtype = needs, weight_dtype
        # The kernel that makes gradients from row sums does not support smoothing.
        self.sums = LOG_PROBS.find(given.hidden, cols=given.shape[1]) if not call.options[1] else None
        inside = self.sums is not None and self.sums.name == "triton"
        self.plan = head.plan_for(given, needs, weight_dtype, call.max_bytes, inside, call.group)

    def run(self, loss_T, factor):
        """(gradients of hidden, weight and bias), None if not needed."""
        if self.call.group is not None:
            return self._over_group(loss_T, factor)
        by_sums = factor is not None and self.plan.by_slabs and self.sums is not None
        if by_sums or self.plan.inside or self.pads:
            head.check_classes(self.rows.target, self.given.classes, self.call.options[0])
        if factor is None:
            for tokens, logits in head.chunks(self.given, self.plan.step):
                self._chunk(tokens, logits, loss_T, None)
            return None, None, None
        if by_sums:
            return self._by_sums(loss_T, factor)
        gradients, first = head.Gradients(self.given, self.needs, self.weight_dtype), self.plan.inside
        if first:
            gradients.inside(first, lambda logits_VT: self._columns(slice(0, first), logits_VT, loss_T, factor))
        for tokens, logits in head.chunks(self.given, self.plan.step, first):
            self._chunk(tokens, logits, loss_T, factor)
            gradients.add(tokens, logits)
        return gradients.all()

    def _columns(self, tokens, logits_VT, loss_T, factor):
        """The gradient of logits with one column per token, in place."""
        kernel, numbers, target = self.sums, self.call.options[-2:], self.rows.target[tokens]
        picked, lse = (logits_VT.new_empty(target.shape, dtype=d) for d in (torch.float32, torch.float64))
        partials = picked.new_empty(2, kernel.column_splits(*logits_VT.shape), *target.shape)
        queue = kernel.queue(logits_VT)
        kernel.forward_columns(logits_VT, target, partials, picked, lse, *numbers, queue)
        a, t = self._coefficients(tokens, picked, lse, None if loss_T is None else loss_T[tokens], factor)
        kernel.backward_columns(logits_VT, target, lse, a, t, logits_VT, *numbers, queue)

    def _chunk(self, tokens, logits, loss_T, factor):
        kernel, options, target = self.call.kernel, self.call.options, self.rows.target[tokens]
        loss = logits.new_empty(logits.shape[0], dtype=self.rows.share.dtype) if loss_T is None else loss_T[tokens]
        queue = kernel.queue(logits)
        if factor is not None:
            factor = _part(factor, tokens)
            kernel.fused(logits, target, self.class_weight, loss, None, None, None, factor, logits, *options, queue)
            return
        lse = torch.empty_like(loss, dtype=torch.float64)
        slope = torch.empty_like(loss) if self.class_weight is not None and options[1] else None
        kernel.forward(logits, target, self.class_weight, loss, None, lse, slope, *options, queue)

    def _by_sums(self, loss_T, factor):
        """The row sums by chunks, then the logits again for the gradients."""
        kernel, numbers = self.sums, self.call.options[-2:]
        picked, lse = (torch.empty_like(self.rows.share, dtype=dtype) for dtype in (None, torch.float64))
        target = self.rows.target
        for tokens, logits in head.chunks(self.given, self.plan.step):
            picked[tokens], lse[tokens], _ = sums_of(kernel, logits, target[tokens], numbers, mean=False)
        a, t = self._coefficients(slice(None), picked, lse, loss_T, factor)

        def backward(tokens, slab, logits):
            kernel.backward(logits, target - slab.start, lse, a, None, t, logits, *numbers, kernel.queue(logits))

        return head.gradients(self.given, self.needs, self.weight_dtype, self.call.max_bytes, backward)

    def _coefficients(self, tokens, picked, lse, loss, factor):
        """a and t of csrc/log_probs.h from the known values of some rows; fills `loss` if given."""
        z_loss, target = self.call.options[2], self.rows.target[tokens]
        counted = target != self.call.options[0]
        weight = _class_weights(target, self.class_weight, self.call).to(picked.dtype)
        if loss is not None:
            loss.copy_((weight * (lse - picked) + z_loss * lse.square()).where(counted, 0))
        if factor is None:
            return None, None
        factor, slope = _part(factor, tokens), (weight + 2 * z_loss * lse).to(picked.dtype)
        return (factor * slope).where(counted, 0), (-factor * weight).where(counted, 0)

    def _over_group(self, loss_T, factor):
        """Chunks of tokens over this process's shard of the vocabulary."""
        group, numbers, vocabulary = self.call.group, self.call.options[-2:], self.given.shape[1]
        kernel, target = self.sums, self.rows.target
        local = local_target(target, vocabulary, group)
        gradients = head.Gradients(self.given, self.needs, self.weight_dtype) if factor is not None else None
        for tokens, logits in head.chunks(self.given, self.plan.step):
            picked, lse, _ = sums_of(kernel, logits, local[tokens], numbers, mean=False, group=group)
            loss = None if loss_T is None else loss_T[tokens]
            a, t = self._coefficients(tokens, picked, lse, loss, factor)
            if gradients is not None:
                kernel.backward(logits, local[tokens], lse, a, None, t, logits, *numbers, kernel.queue(logits))
                gradients.add(tokens, logits)
        if gradients is None:
            return None, None, None
        if gradients.hidden is not None:
            torch.distributed.all_reduce(gradients.hidden, group=group)
        return gradients.all()


def _losses(loss_T, rows: Rows, call: CrossEntropyCall, shape):
    """The result from the losses of the tokens."""
    loss_T = loss_T if rows.scale is None else loss_T * rows.scale
    if call.reduction == "none":
        if rows.kept is not None:
            loss_T = _laid(loss_T, rows, shape.numel())
        return loss_T.view(shape).to(call.out_dtype)
    loss = loss_T.sum()
    return (loss / rows.total if call.reduction == "mean" else loss).to(call.out_dtype)


def _spread(dhidden, rows: Rows, hidden):
    """The gradient of all tokens from that of the kept ones, in hidden's shape and dtype."""
    if dhidden is None:
        return None
    if rows.kept is not None:
        dhidden = _laid(dhidden, rows, hidden.shape[:-1].numel())
    return dhidden.view(hidden.shape).to(hidden.dtype)


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, target, class_weight, token_weight, call):
        ctx.set_materialize_grads(False)
        needs = ctx.needs_input_grad[:3]
        with head.no_autocast(hidden), head.counted_as_linear(hidden, weight, bias):
            rows = _rows(target, class_weight, token_weight, call)
            given = _operands(hidden, weight, bias, call, rows)
            loss_T = torch.empty_like(rows.share)
            one_pass = _Pass(given, rows, class_weight, call, needs, head.gradient_dtype(weight, call.dtype))
            grads = one_pass.run(loss_T, _factor(rows, call) if call.ahead else None)
            loss = _losses(loss_T, rows, call, target.shape)
        ctx.grads = (_spread(grads[0], rows, hidden), *grads[1:], rows.total) if call.ahead else None
        ctx.save_for_backward(hidden, weight, bias, target, class_weight, token_weight)
        ctx.call, ctx.kernel = call, call.kernel
        return loss

    @staticmethod
    def backward(ctx, dy):
        hidden, weight, bias, target, class_weight, token_weight = ctx.saved_tensors
        call, needs, nothing = ctx.call, ctx.needs_input_grad[:3], (None,) * 4
        if torch.is_grad_enabled():
            if call.group is not None:
                raise NotImplementedError("no double backward over a vocabulary shared by a group")
            formula = _formula(target, class_weight, token_weight, call)
            return (*double_backward(formula, (hidden, weight, bias), needs, dy), *nothing)
        # Released: autograd makes them the .grad of the parameters, and nothing else may hold them then.
        grads, ctx.grads = ctx.grads, None
        factor = None
        with head.no_autocast(hidden), head.counted_as_linear(hidden, weight, bias, needs=needs):
            if grads is None:
                dy_T = dy if call.reduction == "none" else None
                grads = _gradients(hidden, weight, bias, target, class_weight, token_weight, call, needs, dy_T)
            if call.reduction != "none":
                total = grads[3]
                factor = dy.to(total.dtype)
                if call.late and call.reduction == "mean":
                    factor = factor / total.where(total != 0, 1)  # without any token the gradients are 0
            dtypes = (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
            return *(head.finished(g, factor, dtype) for g, dtype in zip(grads, dtypes, strict=False)), *nothing


def _gradients(hidden, weight, bias, target, class_weight, token_weight, call, needs, dy_T):
    """(gradients of hidden, weight and bias, total of the shares), from logits made only for them."""
    rows = _rows(target, class_weight, token_weight, call)
    given = replace(_operands(hidden, weight, bias, call, rows), again=True)
    grads = _Pass(given, rows, class_weight, call, needs, head.gradient_dtype(weight, call.dtype)).run(
        None, _factor(rows, call, dy_T)
    )
    return _spread(grads[0], rows, hidden), *grads[1:], rows.total


def _formula(target, class_weight, token_weight, call: CrossEntropyCall):
    """torch's own ops, in the widest dtype at hand."""
    ignore_index, smoothing, z_loss, logit_scale, softcap = call.options
    options = {"ignore_index": ignore_index, "label_smoothing": smoothing}
    options |= {"z_loss": z_loss, "softcap": softcap, "logit_scale": logit_scale}

    def formula(hidden, weight, bias):
        wide = torch.promote_types(call.dtype, torch.float32)
        logits = nn.functional.linear(*(t if t is None else t.to(wide) for t in (hidden, weight, bias)))
        loss = _of_logits(logits, target, class_weight, token_weight, call.reduction, options)
        return loss.to(call.out_dtype)

    return formula


def _of_logits(logits, target, class_weight, token_weight, reduction, options):
    """The result from existing logits."""
    logits, flat = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    each = reduction if token_weight is None else "none"
    class_weight = None if class_weight is None else class_weight.to(logits.dtype)
    loss = logits_room.cross_entropy(logits, flat, class_weight, reduction=each, **options)
    if token_weight is None:
        return loss.view(target.shape) if reduction == "none" else loss
    wide = torch.promote_types(logits.dtype, torch.float32)
    counted = flat != options["ignore_index"]
    scale = token_weight.reshape(-1).to(wide)
    share = counted * scale
    if class_weight is not None:
        share = share * class_weight[flat.where(counted, 0)]
    loss = loss.to(wide) * scale
    if reduction == "none":
        return loss.view(target.shape).to(logits.dtype)
    return (loss.sum() / share.sum() if reduction == "mean" else loss.sum()).to(logits.dtype)


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    token_weight: Tensor | None = None,
    compact: bool = False,
    dtype: torch.dtype | None = None,
    group: "torch.distributed.ProcessGroup | None" = None,
    max_bytes: int | None = None,
    prefer: str = "auto",
) -> Tensor:
    """`cross_entropy(linear(input, linear_weight, linear_bias), target)` without a tensor of logits.

    Argument names are those of torch 2.13's `torch.nn.functional.linear_cross_entropy`. The result is a scalar, or (*)
    for reduction="none". Small problems are left to torch. If cuBLAS is slow for the vocabulary (rows not divisible by
    16 bytes), a copy of the weight is needed in addition to `max_bytes`.

    Args:
        input: (*, in).
        linear_weight: (V, in).
        target: (*), int64.
        linear_bias: (V,) or None.
        weight: (V,) or None.
        reduction: "mean", "sum" or "none".
        ignore_index: As in `cross_entropy`; None: -100, as in torch.
        label_smoothing: As in `cross_entropy`.
        z_loss: As in `cross_entropy`.
        softcap: As in `cross_entropy`.
        logit_scale: As in `cross_entropy`.
        token_weight: (*) or None; multiplies the loss of each token and its weight in a mean.
        compact: Whether only the tokens that are not ignored are processed, plus at most a 32nd of all or 127 others;
            the host waits once for their number.
        dtype: Of the result; None: that of `cross_entropy(linear(...))`.
        group: A process group in which each process has the whole input and target, and its rows of linear_weight and
            linear_bias; label_smoothing is not supported, and `weight` must be whole.
        max_bytes: The limit for the logits at any time; None: an eighth to a quarter of them, as accurate gradients and
            fast products require.
        prefer: "auto", "memory" or "speed", as in `hfnn.convert`.

    Raises:
        ValueError: Arguments do not fit together. Errors of torch are raised unchanged.

    >>> hfnn.functional.linear_cross_entropy(torch.tensor([[1.0, 0.0]]), torch.eye(2), torch.tensor([0]))
    tensor(0.3133)
    """
    ignore_index = -100 if ignore_index is None else ignore_index
    linear_weight, linear_bias = head.gathered(linear_weight), head.gathered(linear_bias)
    _check(input, linear_weight, target, token_weight, label_smoothing, reduction, group)
    chosen = head.choose(OP, input, linear_weight, linear_bias, target, group, prefer)
    if chosen is None or (token_weight is not None and token_weight.requires_grad):
        logits = nn.functional.linear(input, linear_weight, linear_bias)
        options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        options |= {"z_loss": z_loss, "softcap": softcap, "logit_scale": logit_scale}
        return _of_logits(logits.to(dtype or logits.dtype), target, weight, token_weight, reduction, options)
    kernel, product = chosen
    options = (ignore_index, float(label_smoothing), float(z_loss), float(logit_scale), float(softcap or 0))
    wanted = any(t is not None and t.requires_grad for t in (input, linear_weight, linear_bias))
    ahead = wanted and torch.is_grad_enabled() and reduction != "none"
    out_dtype = dtype or OP.out_dtype(input)
    call = CrossEntropyCall(options, reduction, product, out_dtype, max_bytes, compact, group, kernel, ahead)
    weight = None if weight is None else weight.detach().contiguous()
    return _LinearCrossEntropy.apply(input, linear_weight, linear_bias, target, weight, token_weight, call)


def _check(input, linear_weight, target, token_weight, smoothing, reduction, group):
    head.check(input, linear_weight, target)
    if token_weight is not None and token_weight.shape != target.shape:
        shapes = f"{tuple(target.shape)}, got {tuple(token_weight.shape)}"
        raise ValueError(f"token_weight must have target's shape {shapes}")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction={reduction!r}: choose one of 'none', 'mean', 'sum'")
    if group is not None and (smoothing or (token_weight is not None and token_weight.requires_grad)):
        raise ValueError(
            "over a vocabulary shared by a group there is no label_smoothing and no gradient of token_weight"
        )
