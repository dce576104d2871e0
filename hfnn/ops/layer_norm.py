"""Layer normalisation over the last dimensions.

    y = (x - mean) * rstd * weight + bias,    rstd = 1 / sqrt(var + eps)

Ba, Kiros and Hinton, "Layer Normalization", 2016. https://arxiv.org/abs/1607.06450

Names end in their shape: R rows (every leading dimension, flattened), C columns (the normalised ones, flattened).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hfnn.core import native
from hfnn.core.context import compiling
from hfnn.core.kernel import Kernel, Op, kernels
from hfnn.core.node import double_backward


def reference(x, normalized_shape, weight=None, bias=None, eps=1e-5):
    """The definition, in the dtype of x."""
    dims = tuple(range(-len(normalized_shape), 0))
    centred = x - x.mean(dims, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def sample(case, dtype, device, generator=None):
    """Arguments of `layer_norm` for x of shape `case`."""
    x = torch.randn(case, generator=generator).to(dtype).to(device)
    weight, bias = (torch.randn(case[-1:], generator=generator).to(dtype).to(device) for _ in range(2))
    return (x, case[-1:], weight, bias), {}


OP = Op(
    "layer_norm",
    reference,
    torch.layer_norm,
    kernels=kernels(
        "layer_norm",
        1 << 17,
        Kernel("cuda", "hfnn._C:cuda.layer_norm", "cuda", max_cols=65536, out=False, min_elements=1 << 24),
        max_cols=65536,
    ),
    sample=sample,
    cases=((1, 257), (3, 769), (5, 3, 64), (257, 1024), (0, 8), (2, 8192)),
    probe=((1,),),
    small=(3, 5),
    bench=((131072, 1024), (65536, 4096), (32768, 8192), (8192, 32768)),
    sums=True,
)


def _formula(normalized_shape, eps, out_dtype):
    """torch's own op in the widest dtype at hand, returning what the kernel returned."""

    def formula(x, weight, bias):
        wide = torch.promote_types(x.dtype, torch.float32)
        weight, bias = (None if t is None else t.to(wide) for t in (weight, bias))
        return torch.layer_norm(x.to(wide), normalized_shape, weight, bias, eps).to(out_dtype)

    return formula


def _second(dy, needs, x, weight, bias, dims, eps, offset):
    """The gradients by differentiable ops."""
    return double_backward(_formula(x.shape[-dims:], eps, dy.dtype), (x, weight, bias), needs, dy)


_native = native.call("norm", OP, _second, True)


def statistics_dtype(x):
    """float32 for float32 and narrower x."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    prefer: str = "auto",
) -> Tensor:
    """`torch.nn.functional.layer_norm`, whose result its consumer can rebuild. Statistics are float32.

    The result has the shape of input and the dtype that torch returns. Raises what torch raises.

    Args:
        input: (*, *normalized_shape).
        normalized_shape: The last dimensions, over which mean and variance are taken.
        weight: Of normalized_shape, float32 or of the input's dtype, or None.
        bias: Like weight.
        eps: Added to the variance.
    PREFER
    """
    y = None
    if not compiling() and normalized_shape is not None:
        y = _native(input, normalized_shape, weight, bias, eps, 0.0, None, prefer)
    if y is NotImplemented:
        y = OP.left(input, weight, bias, row=normalized_shape, prefer=prefer)
    return torch.layer_norm(input, normalized_shape, weight, bias, eps) if y is None else y


def fused(x, weight, bias, eps, out, prefer):
    """The room's result over the last dimension, in dtype `out`; None if no kernel accepts the call.

    For modules that compute this op in their own words (hfnn/patterns/lookalike.py), whose own code runs otherwise.
    """
    y = None if compiling() else _native(x, None, weight, bias, eps, 0.0, out, prefer)
    return OP.left(x, weight, bias, row=x.shape[-1:], out=out, prefer=prefer) if y is NotImplemented else y


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm`: the same arguments, defaults and state dict.

        y = (x - mean) * rstd * weight + bias,    rstd = 1 / sqrt(var + eps)

    Args:
        normalized_shape: the sizes of the last dimensions, over which mean and var are taken.
        eps: added to the variance.
        elementwise_affine: whether there are weight and bias, of normalized_shape.
        bias: whether there is a bias, if there is a weight.
        device: of the parameters.
        dtype: of the parameters: float32, or the inputs'.

    Shapes: input (*, *normalized_shape); the result has its shape, and the dtype that torch returns. Statistics are
    float32 (float64 for float64). `prefer` is set by `hfnn.convert`. Raises what torch raises.

    >>> hfnn.LayerNorm(4)(torch.tensor([[1.0, 1.0, 3.0, 3.0]])).detach()
    tensor([[-1.0000, -1.0000,  1.0000,  1.0000]])
    """

    prefer = "auto"

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, prefer=self.prefer)


OP.modules[nn.LayerNorm] = LayerNorm
