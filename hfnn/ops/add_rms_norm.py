"""Root-mean-square normalisation of a residual connection with dropout, as between the blocks of a Llama.

    sum = residual + dropout(x),    y = sum * rstd * (offset + weight),    rstd = 1 / sqrt(mean(sum^2) + eps)

Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. https://arxiv.org/abs/1910.07467
dropout_add.py defines the sum, rms_norm.py defines y, and add_norm.py computes both.
"""

import torch
from torch import nn

from hfnn.core import native
from hfnn.core.context import compiling
from hfnn.core.kernel import Op, kernels
from hfnn.ops import add_norm, dropout_add, rms_norm


def reference(x, residual, normalized_shape, weight=None, eps=None, *, p=0.0, training=True, offset=0.0, mask=None):
    """The definition for a given boolean mask of what is kept, in the dtype of x."""
    total = dropout_add.reference(x, residual, p, training and p > 0, mask=mask)
    return rms_norm.reference(total, normalized_shape, weight, eps, offset), total


def _torch(input, residual, normalized_shape, weight=None, eps=None, *, p=0.0, training=True, offset=0.0):
    total = residual + nn.functional.dropout(input, p, training)
    if offset == 0:
        return torch.rms_norm(total, normalized_shape, weight, eps), total
    return rms_norm._formula(normalized_shape, eps, offset, rms_norm.OP.out_dtype(total))(total, weight), total


def sample(case, dtype, device, generator=None):
    """Arguments of `add_rms_norm` for tensors of shape `case[:-1]`; the last entry of a case is p."""
    (x, residual, p, _), _ = dropout_add.sample(case, dtype, device, generator)
    weight = torch.randn(case[-2:-1], generator=generator).to(dtype).to(device)
    return (x, residual, case[-2:-1], weight, 1e-6), {"p": p}


# Two results: not for the contract tests of ops with one result (tests/ops/test_residual.py tests it).
OP = Op(
    "add_rms_norm",
    reference,
    _torch,
    kernels=kernels("rms_norm", 1 << 14, max_cols=65536),
    sample=sample,
    cases=tuple((*shape, p) for shape in ((1, 1), (3, 769), (64, 1024), (0, 4)) for p in (0.0, 0.1)),
    traffic=(4, 5),
    small=(3, 5, 0.5),
    bench=((131072, 1024, 0.0),),
)
_passes = OP.passes
_native = native.call("add_norm", OP, rms_norm._native, dropout_add._native)


def add_rms_norm(
    input, residual, normalized_shape, weight=None, eps=None, *, p=0.0, training=True, offset=0.0, prefer="auto"
):
    """(rms_norm(sum), sum) for sum = residual + dropout(input, p, training), keeping sum and a seed.

    Shapes: input, residual (*, *normalized_shape); weight normalized_shape or None, float32 or of the residual's dtype.
    offset is added to the weight (Gemma stores weight - 1). Both results have the shape of input and the dtypes torch
    returns; sum continues the residual stream. p in [0, 1] is exact to 2^-32. prefer: "auto" | "memory" | "speed"
    (`hfnn.convert`). Raises what torch raises.
    """
    dropped = float(p) if training else 0.0
    results = None
    if not compiling():
        results = _native(input, residual, normalized_shape, weight, None, eps, offset, dropped, prefer)
    if results is not None and results is not NotImplemented:
        return results
    kernel = None
    if results is NotImplemented and not _passes(residual, prefer):
        out = rms_norm.OP.out_dtype(residual)
        kernel = OP.select(residual, weight, row=normalized_shape, out=out, prefer=prefer)
    if kernel is not None and add_norm.fits(input, residual, dropped, normalized_shape, weight):
        how = weight, rms_norm._eps(eps, residual.dtype), offset, normalized_shape, out
        results = add_norm.run(lambda x, k: rms_norm._run(x, *how, k), kernel, input, residual, dropped)
        if results is not None:
            return results
    if offset == 0:
        total = dropout_add.dropout_add(input, residual, p, training, prefer=prefer)
        return rms_norm.rms_norm(total, normalized_shape, weight, eps, prefer=prefer), total
    return _torch(input, residual, normalized_shape, weight, eps, p=p, training=training, offset=offset)
