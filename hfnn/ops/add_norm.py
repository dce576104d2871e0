"""Normalisation of a residual connection with dropout, in one pass: add_layer_norm ends the blocks of post-norm
transformers, add_rms_norm stands between those of a Llama.

    sum = residual + dropout(x),    y = norm(sum)

dropout_add.py defines the sum; layer_norm.py and rms_norm.py define y. There are two autograd nodes, that of the sum
and the norm's own, and one kernel for both. Each node keeps, rebuilds and differentiates as it does alone. So the kept
tensors are the sum, which continues the residual stream, its statistics and a seed; y has the norm's recipe. The fused
kernel's y, mean and rstd match what the norm's own `rebuild` and `backward` expect (csrc/add_norm.h).

Vaswani et al., "Attention Is All You Need", 2017, section 5.4. https://arxiv.org/abs/1706.03762
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hfnn.core import native
from hfnn.core.context import compiling
from hfnn.core.kernel import Op, kernels
from hfnn.ops import dropout_add, layer_norm, rms_norm


def _op(norm, by_torch, floor, p) -> Op:
    """The op. by_torch: the norm by torch's own ops; floor: the elements from which the C++ kernel is faster; p: the
    benchmark's. It has two results, so the contract tests leave it out (tests/ops/test_residual.py tests it).
    """

    def reference(x, residual, *how, p=0.0, training=True, mask=None, **offset):
        """The definition for a given boolean mask of what is kept, in the dtype of x."""
        total = dropout_add.reference(x, residual, p, training and p > 0, mask=mask)
        return norm.reference(total, *how, **offset), total

    def torchs(input, residual, *how, p=0.0, training=True, **offset):
        total = residual + nn.functional.dropout(input, p, training)
        return by_torch(total, *how, **offset), total

    def sample(case, dtype, device, generator=None):
        """Arguments for tensors of shape `case[:-1]`; the last entry of a case is p."""
        (x, residual, p, _), _ = dropout_add.sample(case, dtype, device, generator)
        (_, *how), _ = norm.sample(case[-2:-1], dtype, device, generator)
        return (x, residual, *how), {"p": p}

    return Op(
        f"add_{norm.OP.name}",
        reference,
        torchs,
        kernels=kernels(norm.OP.name, floor, max_cols=65536),
        sample=sample,
        cases=tuple((*shape, p) for shape in ((1, 1), (3, 769), (64, 1024), (0, 4)) for p in (0.0, 0.1)),
        traffic=(4, 5),
        small=(3, 5, 0.5),
        bench=((131072, 1024, p),),
    )


def _rms_norm(x, normalized_shape, weight=None, eps=None, offset=0.0):
    if offset == 0:
        return torch.rms_norm(x, normalized_shape, weight, eps)
    return rms_norm._formula(normalized_shape, eps, offset, rms_norm.OP.out_dtype(x))(x, weight)


LAYER = _op(layer_norm, torch.layer_norm, 1 << 17, 0.1)
RMS = _op(rms_norm, _rms_norm, 1 << 14, 0.0)
_layer_native = native.call("add_norm", LAYER, layer_norm._native, dropout_add._native)
_rms_native = native.call("add_norm", RMS, rms_norm._native, dropout_add._native)


def _left(op, norm, residual, parameters, normalized_shape, prefer) -> None:
    if not op.passes(residual, prefer):
        op.left(residual, *parameters, row=normalized_shape, out=norm.out_dtype(residual), prefer=prefer)


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    p: float = 0.0,
    training: bool = True,
    prefer: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(layer_norm(sum), sum) for sum = residual + dropout(input, p, training), keeping sum and a seed.

    Both results have the shape of input and the dtypes that torch returns; sum continues the residual stream. Raises
    what torch raises.

    Args:
        input: (*, *normalized_shape).
        residual: Like input.
        normalized_shape: The last dimensions, over which mean and variance are taken.
        weight: Of normalized_shape, float32 or of the residual's dtype, or None.
        bias: Like weight.
        eps: Added to the variance.
        p: Of dropout, in [0, 1], exact to 2^-32.
        training: Whether there is dropout.
    PREFER
    """
    dropped = float(p) if training else 0.0
    results = None
    if not compiling():
        results = _layer_native(input, residual, normalized_shape, weight, bias, eps, 0.0, dropped, prefer)
    if results is NotImplemented:
        results = _left(LAYER, layer_norm.OP, residual, (weight, bias), normalized_shape, prefer)
    if results is not None:
        return results
    total = dropout_add.dropout_add(input, residual, p, training, prefer=prefer)
    return layer_norm.layer_norm(total, normalized_shape, weight, bias, eps, prefer=prefer), total


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    p: float = 0.0,
    training: bool = True,
    offset: float = 0.0,
    prefer: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(rms_norm(sum), sum) for sum = residual + dropout(input, p, training), keeping sum and a seed.

    Both results have the shape of input and the dtypes that torch returns; sum continues the residual stream. Raises
    what torch raises.

    Args:
        input: (*, *normalized_shape).
        residual: Like input.
        normalized_shape: The last dimensions, over which the mean of squares is taken.
        weight: Of normalized_shape, float32 or of the residual's dtype, or None.
        eps: Added to the mean of squares; None: as torch chooses it.
        p: Of dropout, in [0, 1], exact to 2^-32.
        training: Whether there is dropout.
        offset: Added to the weight (Gemma stores weight - 1).
        prefer: "auto", "memory" or "speed", as in `hfnn.convert`.

    >>> hfnn.functional.add_rms_norm(torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 2.0]]), (2,))
    (tensor([[0.8485, 1.1314]]), tensor([[3., 4.]]))
    """
    dropped = float(p) if training else 0.0
    results = None
    if not compiling():
        results = _rms_native(input, residual, normalized_shape, weight, None, eps, offset, dropped, prefer)
    if results is NotImplemented:
        results = _left(RMS, rms_norm.OP, residual, (weight,), normalized_shape, prefer)
    if results is not None:
        return results
    if offset == 0:
        total = dropout_add.dropout_add(input, residual, p, training, prefer=prefer)
        return rms_norm.rms_norm(total, normalized_shape, weight, eps, prefer=prefer), total
    return RMS.torch(input, residual, normalized_shape, weight, eps, p=p, training=training, offset=offset)
