"""Layer normalisation of a residual connection with dropout: the end of a block of a post-norm transformer.

    sum = residual + dropout(x),    y = (sum - mean) * rstd * weight + bias,    rstd = 1 / sqrt(var + eps)

Vaswani et al., "Attention Is All You Need", 2017, section 5.4. https://arxiv.org/abs/1706.03762
dropout_add.py defines the sum, layer_norm.py defines y, and add_norm.py computes both.
"""

import torch
from torch import nn

from hfnn.core import native
from hfnn.core.context import compiling
from hfnn.core.kernel import Op, kernels
from hfnn.ops import add_norm, dropout_add, layer_norm


def reference(x, residual, normalized_shape, weight=None, bias=None, eps=1e-5, *, p=0.0, training=True, mask=None):
    """The definition for a given boolean mask of what is kept, in the dtype of x."""
    total = dropout_add.reference(x, residual, p, training and p > 0, mask=mask)
    return layer_norm.reference(total, normalized_shape, weight, bias, eps), total


def _torch(input, residual, normalized_shape, weight=None, bias=None, eps=1e-5, *, p=0.0, training=True):
    total = residual + nn.functional.dropout(input, p, training)
    return torch.layer_norm(total, normalized_shape, weight, bias, eps), total


def sample(case, dtype, device, generator=None):
    """Arguments of `add_layer_norm` for tensors of shape `case[:-1]`; the last entry of a case is p."""
    (x, residual, p, _), _ = dropout_add.sample(case, dtype, device, generator)
    weight, bias = (torch.randn(case[-2:-1], generator=generator).to(dtype).to(device) for _ in range(2))
    return (x, residual, case[-2:-1], weight, bias), {"p": p}


# Two results: not for the contract tests of ops with one result (tests/ops/test_residual.py tests it).
OP = Op(
    "add_layer_norm",
    reference,
    _torch,
    kernels=kernels("layer_norm", 1 << 17, max_cols=65536),
    sample=sample,
    cases=tuple((*shape, p) for shape in ((1, 1), (3, 769), (64, 1024), (0, 4)) for p in (0.0, 0.1)),
    traffic=(4, 5),
    small=(3, 5, 0.5),
    bench=((131072, 1024, 0.1),),
)
_passes = OP.passes
_native = native.call("add_norm", OP, layer_norm._native, dropout_add._native)


def add_layer_norm(
    input, residual, normalized_shape, weight=None, bias=None, eps=1e-5, *, p=0.0, training=True, prefer="auto"
):
    """(layer_norm(sum), sum) for sum = residual + dropout(input, p, training), keeping sum and a seed.

    Shapes: input, residual (*, *normalized_shape); weight, bias normalized_shape or None, float32 or of the residual's
    dtype. Both results have the shape of input and the dtypes torch returns; sum continues the residual stream. p in
    [0, 1] is exact to 2^-32. prefer: "auto" | "memory" | "speed" (`hfnn.convert`). Raises what torch raises.
    """
    dropped = float(p) if training else 0.0
    results = None
    if not compiling():
        results = _native(input, residual, normalized_shape, weight, bias, eps, 0.0, dropped, prefer)
    if results is not None and results is not NotImplemented:
        return results
    kernel = None
    if results is NotImplemented and not _passes(residual, prefer):
        out = layer_norm.OP.out_dtype(residual)
        kernel = OP.select(residual, weight, bias, row=normalized_shape, out=out, prefer=prefer)
    if kernel is not None and add_norm.fits(input, residual, dropped, normalized_shape, weight, bias):
        how = weight, bias, eps, normalized_shape, out
        results = add_norm.run(lambda x, k: layer_norm._run(x, *how, k), kernel, input, residual, dropped)
        if results is not None:
            return results
    total = dropout_add.dropout_add(input, residual, p, training, prefer=prefer)
    return layer_norm.layer_norm(total, normalized_shape, weight, bias, eps, prefer=prefer), total
