"""Concatenation, whose result its consumer can rebuild from the parts (csrc/autograd/cat.cpp).

    y = [x_0, x_1, ...] along a dimension

torch keeps nothing of it. But the consumer, a convolution or a norm, keeps y: memory that the parts take once more
where they are kept for another reason, or can be rebuilt. A dense block keeps each feature once, not once a layer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hfnn.core.context import compiling, context, in_checkpoint, on_gpu
from hfnn.core.kernel import forced
from hfnn.core.native import extension
from hfnn.ops.behind import BEHIND_ELEMENTS

_cat = torch.cat


def cat(tensors: Sequence[Tensor], dim: int = 0, *, prefer: str = "auto") -> Tensor:
    """`torch.cat`, whose result its consumer can rebuild where a part is kept anyway or can be rebuilt itself.

    Then the parts are kept in place of the result, so they must not be written to before backward. Raises what torch
    raises.

    Args:
        tensors: Of one dtype, with equal sizes but for `dim`.
        dim: Along which they are put together.
        prefer: "auto", from 2^18 elements of the result on, on CUDA 2^23; "memory", always; "speed", never.

    >>> hfnn.functional.cat([torch.zeros(1, 2), torch.ones(1, 1)], 1)
    tensor([[0., 0., 1.]])
    """
    y = extension.cat(tensors, dim % tensors[0].dim()) if not compiling() and _fits(tensors, dim, prefer) else None
    return _cat(tensors, dim) if y is None else y


def _fits(tensors, dim, prefer) -> bool:
    """Whether the node accepts these; if not, torch's own op runs, or raises."""
    if extension is None or prefer == "speed" or forced() == "torch" or not torch.is_grad_enabled():
        return False
    if type(tensors) not in (list, tuple) or len(tensors) < 2 or type(dim) is not int:
        return False
    # A tensor without a gradient may be data or a buffer, which is often written to before backward.
    if not all(torch.is_tensor(x) and x.requires_grad for x in tensors) or context(*tensors) is not None:
        return False
    first, least = tensors[0], 0 if prefer == "memory" else BEHIND_ELEMENTS[on_gpu(tensors[0])]
    # A checkpoint's second forward must keep the same, whatever lives then.
    if in_checkpoint() or not -first.dim() <= dim < first.dim() or sum(x.numel() for x in tensors) < least:
        return False
    return all(x.dtype is first.dtype and x.device == first.device and x.dim() == first.dim() for x in tensors)
