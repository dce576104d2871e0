"""Instance normalisation: group normalisation with one channel a group, by its kernels and its node.

    y = (x - mean) * rstd * weight + bias,    rstd = 1 / sqrt(var + eps)

Ulyanov, Vedaldi and Lempitsky, "Instance Normalization: The Missing Ingredient for Fast Stylization", 2016. Mean and
variance are those of one channel of one sample. Where running statistics are given, torch's own op runs: it rounds and
writes them in its own way, also in eval mode.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.instancenorm import _InstanceNorm

from hfnn.core.context import compiling, is_plain
from hfnn.core.kernel import Op, kernels
from hfnn.ops import group_norm
from hfnn.ops.batch_norm import sample


def reference(x, running_mean=None, running_var=None, weight=None, bias=None, *_):
    """The definition, in the dtype of x, with the default eps."""
    return group_norm.reference(x, x.shape[1], weight, bias)


def _in_torch(input, *args, **how):
    """torch's own op, also for the empty (N, C) by which `Op.out_dtype` asks for its dtype."""
    return F.instance_norm(input if input.dim() > 2 else input.new_empty(*input.shape, 2), *args, **how)


def _sample(case, dtype, device, generator=None):
    """Arguments of a case (N, C, ...), which is extended to three dimensions."""
    return sample(case if len(case) > 2 else (*(1, *case)[-2:], 5), dtype, device, generator)


OP = Op(
    "instance_norm", reference, _in_torch,
    kernels=kernels("group_norm", 1 << 62, cuda=1 << 25), sample=_sample,
    cases=((4, 12), (2, 3, 769), (3, 6, 6, 7), (2, 12, 20, 21), (1, 3, 4, 5, 6)),
    # The shapes of pix2pix's generator and of nnU-Net.
    bench=((4, 64, 256, 256), (4, 256, 64, 64), (2, 32, 128, 128, 128), (2, 320, 8, 8, 8)),
    probe=(), traffic=(3, 5), sums=True, worth=(1 << 18, 1 << 23), small=(3, 4, 5),
)  # fmt: skip


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    prefer: str = "auto",
) -> Tensor:
    """`torch.nn.functional.instance_norm`, whose result its consumer can rebuild. Statistics are float32.

    The result is contiguous and has the dtype that torch returns. Raises what torch raises.

    Args:
        input: (N, C, ...), with at least two elements in each channel of a sample.
        running_mean: (C,); with running statistics torch's own op runs.
        running_var: Like running_mean.
        weight: (C,), float32 or of the input's dtype, or None.
        bias: Like weight.
        use_input_stats: Whether the input's statistics are used, not the running ones.
        momentum: By which part running_mean and running_var move.
        eps: Added to the variance.
        prefer: "auto", "memory" or "speed", as in `hfnn.convert`.

    >>> hfnn.functional.instance_norm(torch.tensor([[[1.0, 3.0], [2.0, 6.0]]]))
    tensor([[[-1.0000,  1.0000],
             [-1.0000,  1.0000]]])
    """
    y = None
    if running_mean is None and running_var is None and use_input_stats and input.dim() > 2 and _fits(input, weight):
        y = group_norm.run(OP, input, input.shape[1], weight, bias, eps, 0, 0.0, prefer, contiguous=True)
    if y is None:
        return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    return y


def _fits(x, weight) -> bool:
    """Whether torch takes them too: more than one number in a channel, and no parameters that are narrower or wider
    than both x and float32."""
    return x.numel() > x.shape[0] * x.shape[1] and (weight is None or weight.dtype in (x.dtype, torch.float32))


class _Module:
    """Common base of the three modules. `prefer` is set by `hfnn.convert`."""

    prefer = "auto"

    def forward(self, input: Tensor) -> Tensor:
        unusual = compiling() or not is_plain(input) or self.track_running_stats or self.running_mean is not None
        if unusual or input.dim() == self._get_no_batch_dim() or input.shape[1:2] != (self.num_features,):
            return _InstanceNorm.forward(self, input)
        self._check_input_dim(input)
        return instance_norm(input, None, None, self.weight, self.bias, eps=self.eps, prefer=self.prefer)


class InstanceNorm1d(_Module, nn.InstanceNorm1d):
    """`torch.nn.InstanceNorm1d`: the same arguments, defaults and state dict."""


class InstanceNorm2d(_Module, nn.InstanceNorm2d):
    """`torch.nn.InstanceNorm2d`: the same arguments, defaults and state dict."""


class InstanceNorm3d(_Module, nn.InstanceNorm3d):
    """`torch.nn.InstanceNorm3d`: the same arguments, defaults and state dict."""


OP.modules.update({getattr(nn, cls.__name__): cls for cls in (InstanceNorm1d, InstanceNorm2d, InstanceNorm3d)})
