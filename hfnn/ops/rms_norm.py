"""Root-mean-square layer normalisation over the last dimensions.

    y = x * rstd * (offset + weight),    rstd = 1 / sqrt(mean(x^2) + eps)

Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. https://arxiv.org/abs/1910.07467
`offset` is 0 in torch; Gemma stores weight - 1.

Names end in their shape: R rows (every leading dimension, flattened), C columns (the normalised ones, flattened).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hfnn.core import native
from hfnn.core.context import compiling
from hfnn.core.kernel import Kernel, Op, kernels
from hfnn.core.node import double_backward


def reference(x, normalized_shape, weight=None, eps=None, offset=0.0):
    """The definition, in the dtype of x."""
    dims = tuple(range(-len(normalized_shape), 0))
    y = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + _eps(eps, x.dtype))
    return y if weight is None else y * (offset + weight)


def sample(case, dtype, device, generator=None):
    """Arguments of `rms_norm` for x of shape `case`."""
    x = torch.randn(case, generator=generator).to(dtype).to(device)
    weight = torch.randn(case[-1:], generator=generator).to(dtype).to(device)
    return (x, case[-1:], weight, 1e-6), {}


OP = Op(
    "rms_norm",
    reference,
    torch.rms_norm,
    kernels=kernels(
        "rms_norm",
        1 << 15,
        Kernel("cuda", "hfnn._C:cuda.rms_norm", "cuda", max_cols=65536, out=False, min_elements=1 << 24),
        max_cols=65536,
    ),
    sample=sample,
    cases=((1, 257), (3, 769), (5, 3, 64), (257, 1024), (0, 8), (2, 8192)),
    probe=((1,),),
    small=(3, 5),
    bench=((131072, 1024), (65536, 4096), (32768, 8192), (8192, 32768)),
    sums=True,
)


def _formula(normalized_shape, eps, offset, out_dtype):
    """The definition in the widest dtype at hand, returning what the kernel returned."""

    def formula(x, weight):
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = None if weight is None else weight.to(wide)
        return reference(x.to(wide), normalized_shape, weight, eps, offset).to(out_dtype)

    return formula


def _second(dy, needs, x, weight, bias, dims, eps, offset):
    """The gradients by differentiable ops."""
    return *double_backward(_formula(x.shape[-dims:], eps, offset, dy.dtype), (x, weight), needs[:2], dy), None


_native = native.call("norm", OP, _second, False)


def _eps(eps, dtype):
    """torch's default: the eps of the dtype in which it computes."""
    return torch.finfo(torch.promote_types(dtype, torch.float32)).eps if eps is None else eps


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    prefer: str = "auto",
) -> Tensor:
    """`torch.nn.functional.rms_norm`, whose result its consumer can rebuild. The statistic is float32.

    The result has the shape of input and the dtype that torch returns. Raises what torch raises.

    Args:
        input: (*, *normalized_shape).
        normalized_shape: The last dimensions, over which the mean of squares is taken.
        weight: Of normalized_shape, float32 or of the input's dtype, or None.
        eps: Added to the mean of squares; None: as torch chooses it.
        prefer: "auto", "memory" or "speed", as in `hfnn.convert`.

    >>> hfnn.functional.rms_norm(torch.tensor([[3.0, 4.0]]), (2,))
    tensor([[0.8485, 1.1314]])
    """
    y = None
    if not compiling() and normalized_shape is not None:
        y = _native(input, normalized_shape, weight, None, eps, 0.0, None, prefer)
    if y is NotImplemented:
        y = OP.left(input, weight, row=normalized_shape, prefer=prefer)
    return torch.rms_norm(input, normalized_shape, weight, eps) if y is None else y


def fused(x, weight, eps, offset, out, prefer):
    """The room's result over the last dimension, in dtype `out`; None if no kernel accepts the call.

    For modules that compute this op in their own words (hfnn/patterns/lookalike.py), whose own code runs otherwise.
    """
    y = None if compiling() else _native(x, None, weight, None, eps, offset, out, prefer)
    return OP.left(x, weight, row=x.shape[-1:], out=out, prefer=prefer) if y is NotImplemented else y


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm`: the same arguments, defaults and state dict. `prefer` is set by `hfnn.convert`.

    Args:
        normalized_shape: The last dimensions, over which the mean of squares is taken.
        eps: Added to the mean of squares; None: as torch chooses it.
        elementwise_affine: Whether there is a weight.
        device: Of the parameters.
        dtype: Of the parameters.
    """

    prefer = "auto"

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.normalized_shape, self.weight, self.eps, prefer=self.prefer)


OP.modules[nn.RMSNorm] = RMSNorm
