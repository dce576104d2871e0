"""Log-probabilities of given tokens, and the entropy, for a linear map into a vocabulary, without its logits.

    z = logits of hidden weight^T + bias (softcap and logit_scale as in cross_entropy.py),  p = softmax(z)
    log_prob = z[target] - lse,    entropy = lse - sum_v p_v z_v,    lse = log(sum_v exp(z_v))

Policy-gradient and preference losses (PPO, GRPO, DPO) need these values. Forward keeps two numbers per token. Backward
makes the logits once more, for a chunk of tokens or a slab of the vocabulary at a time (head.py), because the gradient
of each token is not known before:

    dz_v = dlog_prob ([v = target] - p_v) - dentropy p_v (z_v - sum_u p_u z_u)

Names end in their shape: T tokens, V vocabulary, H hidden.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from hfnn.core import flops
from hfnn.core.kernel import Op, kernels
from hfnn.core.node import Function
from hfnn.ops import cross_entropy, head


def reference(input, linear_weight, target, linear_bias=None, *, softcap=None, logit_scale=1.0, ignore_index=-100):
    """The definition, in the dtype of the input."""
    return of_logits(
        nn.functional.linear(input, linear_weight, linear_bias), target, softcap, logit_scale, ignore_index
    )


def of_logits(logits, target, softcap, logit_scale, ignore_index):
    """(log_probs, entropy) of existing logits, by torch's ops."""
    valid = target != ignore_index
    log_p = cross_entropy.transform(logits, softcap, logit_scale).log_softmax(-1)
    picked = log_p.gather(-1, target.where(valid, 0).unsqueeze(-1)).squeeze(-1)
    return picked.where(valid, 0), -(log_p.exp() * log_p).sum(-1).where(valid, 0)


# Kernels for existing logits, for this room and for linear_cross_entropy.py: csrc/log_probs.h.
LOG_PROBS = Op(
    "linear_log_probs",
    reference,
    reference,
    kernels=kernels("log_probs", 0, cuda=0, max_cols=1 << 20),
    sample=lambda *_: None,
)


class Sums(NamedTuple):
    """For rows of logits: z[target] (0 if another process has it), lse in float64, and sum_v p_v z_v or None."""

    picked: torch.Tensor
    lse: torch.Tensor
    mean: torch.Tensor | None


def sums_of(kernel, logits, target, numbers, mean: bool, group=None) -> Sums:
    """The sums of some rows; `numbers` are logit_scale and softcap. group: the processes that share the vocabulary."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    lse, picked, *rest = (logits.new_empty(logits.shape[0], dtype=d) for d in (torch.float64, wide, wide)[: 2 + mean])
    mean_of = rest[0] if mean else None
    kernel.forward(logits, target, picked, lse, mean_of, *numbers, kernel.queue(logits))
    if group is None:
        return Sums(picked, lse, mean_of)
    top = lse.clone()
    torch.distributed.all_reduce(top, torch.distributed.ReduceOp.MAX, group=group)
    part = torch.exp(lse - top)
    both = torch.stack([part, picked, *([part * mean_of] if mean else ())])  # in float64
    torch.distributed.all_reduce(both, group=group)
    return Sums(both[1].to(wide), top + both[0].log(), (both[2] / both[0]).to(wide) if mean else None)


def local_target(target, vocabulary: int, group):
    """Targets relative to this process's shard of the vocabulary; shards may have different sizes."""
    if group is None:
        return target
    sizes = head.vocabulary_sizes(target, vocabulary, group)
    return target - torch.cat(sizes)[: torch.distributed.get_rank(group)].sum()


class _LinearLogProbs(Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, target, numbers, ignore_index, dtype, max_bytes, group, kernel):
        ctx.set_materialize_grads(False)
        flat = target.reshape(-1)
        with head.no_autocast(hidden), head.counted_as_linear(hidden, weight, bias):
            given = head.operands(hidden, weight, bias, dtype)
            wide = torch.promote_types(dtype, torch.float32)
            picked, mean = given.hidden.new_empty(2, flat.numel(), dtype=wide)
            lse = torch.empty_like(picked, dtype=torch.float64)
            if group is None:
                head.check_classes(flat, given.shape[1], ignore_index)
            local = local_target(flat, given.shape[1], group)
            plan = head.plan_for(given, (False, False, False), dtype, max_bytes, group=group)
            for tokens, logits in head.chunks(given, plan.step):
                found = sums_of(kernel, logits, local[tokens], numbers, True, group)
                picked[tokens], lse[tokens], mean[tokens] = found
        valid = flat != ignore_index
        ctx.save_for_backward(hidden, weight, bias, target, lse, mean)
        ctx.rest = numbers, ignore_index, dtype, max_bytes, group, kernel
        results = (picked - lse).where(valid, 0), (lse - mean).where(valid, 0)
        return tuple(result.to(wide).view(target.shape) for result in results)

    @staticmethod
    def backward(ctx, dlog_probs, dentropy):
        dlog_probs = torch.zeros_like(dentropy) if dlog_probs is None else dlog_probs
        dentropy = torch.zeros_like(dlog_probs) if dentropy is None else dentropy
        hidden, weight, bias, target, lse, mean = ctx.saved_tensors
        numbers, ignore_index, dtype, max_bytes, group, kernel = ctx.rest
        needs, nothing = ctx.needs_input_grad[:3], (None,) * 7
        if torch.is_grad_enabled():
            if group is not None:
                raise NotImplementedError("no double backward over a vocabulary shared by a group")
            inputs = [t for t, need in zip((hidden, weight, bias), needs, strict=True) if need]
            with torch.enable_grad():
                with flops.uncounted(profiled=True):
                    given = (t if t is None else t.to(mean.dtype) for t in (hidden, weight, bias))
                    logits = nn.functional.linear(*given)
                found = of_logits(logits, target, numbers[1], numbers[0], ignore_index)
                grads = iter(torch.autograd.grad(found, inputs, (dlog_probs, dentropy), create_graph=True))
            return (*(next(grads) if need else None for need in needs), *nothing)
        flat = target.reshape(-1)
        valid = flat != ignore_index
        d, e = (g.reshape(-1).where(valid, 0) for g in (dlog_probs, dentropy))
        a, b = e * mean - d, -e
        with head.no_autocast(hidden), head.counted_as_linear(hidden, weight, bias, needs=needs):
            given = head.operands(hidden, weight, bias, dtype)
            local = local_target(flat, given.shape[1], group)

            def backward(tokens, slab, logits):
                rows = (t[tokens] for t in (lse, a, b, d))
                kernel.backward(logits, local[tokens] - slab.start, *rows, logits, *numbers, kernel.queue(logits))

            weight_dtype = head.gradient_dtype(weight, dtype)
            grads = head.gradients(given, needs, weight_dtype, max_bytes, backward, group)
            dtypes = (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
            dhidden, *rest = (head.finished(g, None, dtype) for g, dtype in zip(grads, dtypes, strict=True))
        return None if dhidden is None else dhidden.view(hidden.shape), *rest, *nothing


def linear_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    group: "torch.distributed.ProcessGroup | None" = None,
    max_bytes: int | None = None,
    prefer: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(log_probs, entropy) of softmax(linear(input, linear_weight, linear_bias)) without a tensor of logits.

    Both results are (*), float32 (float64 for float64): the logarithm of the probability of `target`, and the entropy
    in nats; 0 where target is ignore_index.

    Args:
        input: (*, in).
        linear_weight: (V, in).
        target: (*), int64.
        linear_bias: (V,) or None.
        ignore_index: The target of tokens that do not count.
        softcap: As in `cross_entropy`.
        logit_scale: 1 / temperature.
        group: As in `linear_cross_entropy`.
        max_bytes: As in `linear_cross_entropy`.
        prefer: "auto", "memory" or "speed", as in `hfnn.convert`.

    Raises:
        ValueError: Shapes do not fit. Errors of torch are raised unchanged.

    >>> hfnn.functional.linear_log_probs(torch.tensor([[1.0, 0.0]]), torch.eye(2), torch.tensor([0]))
    (tensor([-0.3133]), tensor([0.5822]))
    """
    linear_weight, linear_bias = head.gathered(linear_weight), head.gathered(linear_bias)
    head.check(input, linear_weight, target)
    chosen = head.choose(LOG_PROBS, input, linear_weight, linear_bias, target, group, prefer)
    if chosen is None:
        logits = nn.functional.linear(input, linear_weight, linear_bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return of_logits(logits, target, softcap, logit_scale, ignore_index)
    kernel, dtype = chosen
    numbers = float(logit_scale), float(softcap or 0)
    return _LinearLogProbs.apply(
        input, linear_weight, linear_bias, target, numbers, ignore_index, dtype, max_bytes, group, kernel
    )
