"""Layouts: dense tensors for kernels, and the strides of torch's results."""

import functools

import torch

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _alike(x, target):
    """Both in the layout of x, so that one index is valid for both; no copies if they already are."""
    if x.is_contiguous() and target.is_contiguous():
        return x, target
    x = _dense(x)
    return x, target if target.stride() == x.stride() else torch.empty_like(x).copy_(target)


def ordered(a, b):
    """Both dense, in the layout of torch's result for (a, b), which a decides, and an empty tensor in that layout.

    No copies if they already are. torch's backward is mostly computed from (dy, x), and its gradient has the resulting
    layout.
    """
    if (a.is_contiguous() and b.is_contiguous()) or (a.stride() == b.stride() and _dense(a) is a):
        return a, b, like(b)
    strides = result_strides(a, b)
    return laid(a, strides), laid(b, strides), b.new_empty_strided(b.shape, strides)


def like(x, dtype=None):
    """A new tensor with the strides of torch's elementwise results for x, which is dense.

    In dimensions of size 1 they are those of a contiguous tensor, whatever those of x are.
    """
    if x.is_contiguous():
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    last = x.is_contiguous(memory_format=torch.channels_last)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.channels_last if last else torch.preserve_format)


def ambiguous(x) -> bool:
    """Whether x is contiguous or channels last, but `like` has other strides in dimensions of size 1."""
    shape, strides, step = x.shape, x.stride(), 1
    if 1 not in shape:
        return False
    last = not x.is_contiguous()
    if last and not x.is_contiguous(memory_format=torch.channels_last):
        return False
    for d in (1, 3, 2, 0) if last else range(len(shape) - 1, -1, -1):
        if strides[d] != step:
            return True
        step *= max(shape[d], 1)
    return False


def in_rows(x) -> bool:
    """Whether torch's elementwise results for x are contiguous, even if x itself is a part of a larger tensor."""
    if x.is_contiguous():
        return True
    strides = [step for size, step in zip(x.shape, x.stride(), strict=True) if size != 1 and step]
    return strides == sorted(strides, reverse=True)


def like_dy(dx, dy):
    """dx, which is contiguous, in the layout of dy."""
    return dx if dy.is_contiguous() else laid(dx, result_strides(dy, dx))


def result_strides(*tensors) -> tuple[int, ...]:
    """The strides of torch's elementwise results."""
    if all(t.is_contiguous() for t in tensors):  # because the meta device has others
        return like(tensors[0].new_empty(tensors[0].shape, device="meta")).stride()
    a, *rest = (torch.empty_strided(t.shape, t.stride(), device="meta") for t in tensors)
    return sum(rest, a).stride()


def broadcast_strides(x) -> tuple[int, ...]:
    """The strides of torch's result for x and a broadcast tensor."""
    return _broadcast(x.shape, x.stride())


@functools.lru_cache(1024)
def _broadcast(shape, strides):
    x, one = torch.empty_strided(shape, strides, device="meta"), torch.empty(1, device="meta")
    return torch.addcmul(x, one, one).stride()  # an op of three tensors, which has no special case on the meta device


def suggested(x) -> torch.memory_format:
    """`Tensor::suggest_memory_format`: channels last if the strides of x are in that order."""
    if x.dim() not in LAST:
        return torch.contiguous_format
    least = 0
    for d in (1, *range(x.dim() - 1, 1, -1), 0):
        if x.stride(d) < least or x.stride(d) == 0 or (d == 0 and least == x.stride(1)):
            return torch.contiguous_format
        least = x.stride(d) * x.shape[d]
    return LAST[x.dim()]


def _dense(x):
    """x, or a copy in the order of torch's results if x is not dense."""
    if x.is_contiguous() or torch.empty_like(x, device="meta").stride() == x.stride():
        return x
    return torch.empty_like(x).copy_(x)


def laid(x, strides):
    """x, or a copy of it with these dense strides."""
    return x if x.stride() == strides else x.new_empty_strided(x.shape, strides).copy_(x)


def in_order(x):
    """The kernel argument for a dense tensor: x itself, or its elements in memory order."""
    return x if x.is_contiguous() else x.as_strided((x.numel(),), (1,))


def _flat(x):
    """The elements of a dense tensor in memory order."""
    if x is None or x.is_contiguous():
        return None if x is None else x.view(-1)
    return x.as_strided((x.numel(),), (1,))
