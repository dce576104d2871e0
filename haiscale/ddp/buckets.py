"""The memory of gradients: one flat buffer per device and dtype, and its slices, the buckets.

All gradients of one device and dtype are in one buffer, in the order in which they became ready in the first step. A
bucket is a slice of it. So a change of the bucket size moves no gradient: pointers in optimizers stay valid, and sizes
can be tried during training.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from haiscale.ddp import arrivals

ALIGNMENT = 64  # bytes, for each gradient in its buffer, unless communication hooks read that
CODES = torch.float8_e4m3fn  # as `wire_dtype`: gradients are only sent in it, and averaged in their own dtype


class Bucket:
    """A slice of a flat buffer that is averaged in one operation; `places` are the indices of its parameters.

    error: the accumulated rounding error of the transfers, float32, if it is kept.
    """

    def __init__(
        self, flat: Tensor, places: list[int], parameters: list[Tensor], views: list[Tensor],
        error: Tensor | None = None,
    ):  # fmt: skip
        self.flat, self.places, self.parameters, self.views, self.error = flat, places, parameters, views, error
        self.dtypes = [p.dtype for p in parameters]  # mixed precision changes them during a step
        self.done = False  # whether its average began since the last forward
        self.work = None  # the operation that averages it, while in progress

    def collect(self, attach: bool) -> None:
        """Copies gradients that are not in the buffer yet into it; 0 for missing ones.

        attach: `.grad` becomes the view in the buffer. Autograd then adds to it, and nothing needs copying.
        """
        if attach:
            arrivals.native().collect(self.parameters, self.views)
            return
        pairs = [(view, p.grad) for p, view in zip(self.parameters, self.views, strict=True)]
        given, missing = [pair for pair in pairs if pair[1] is not None], [view for view, grad in pairs if grad is None]
        with torch.no_grad():
            if given:
                torch._foreach_copy_(*map(list, zip(*given, strict=True)))
            if missing:
                torch._foreach_zero_(missing)
        for p, dtype in zip(self.parameters, self.dtypes, strict=True):
            if p.grad is not None and p.dtype != dtype:
                p.grad = None  # until `release`, when the parameter has its original dtype again

    def release(self, attach: bool, ranks: int, has_gradient: Sequence[bool] | None = None) -> None:
        """Gives the averages to the parameters: as views, or copied into their gradients.

        has_gradient, by parameter index: if False and there was no gradient, there is none afterwards. ranks: their
        number. A gradient with a graph keeps it, scaled to this rank's share of the average.
        """
        targets, sources = [], []
        for place, p, view, dtype in zip(self.places, self.parameters, self.views, self.dtypes, strict=True):
            if p.grad is view or not p.requires_grad:
                continue
            grad = p.grad
            if grad is None:
                if has_gradient is not None and not has_gradient[place]:
                    continue
                kind = dtype_of(p, None) if p.dtype == dtype else dtype
                if not attach or kind != view.dtype:
                    grad = p.grad = torch.empty_like(p, dtype=kind, requires_grad=False)
            elif grad.requires_grad:  # of create_graph=True
                share = grad / ranks
                share.detach().copy_(view)
                grad.copy_(share)
                continue
            if attach and (grad is None or grad.dtype == view.dtype):
                p.grad = view
                continue
            targets.append(grad)
            sources.append(view)
        if targets:
            torch._foreach_copy_(targets, sources)


class Flat:
    """The buffer of all gradients of one device and dtype; `order`: the indices of its parameters.

    error: the accumulated rounding error per element; None if it is not kept. It belongs to its element, however the
    buffer is divided. packed: there are no gaps between gradients.
    """

    def __init__(
        self, order: list[int], parameters: list[Tensor], dtype: torch.dtype, feedback: bool = False, packed=False
    ):
        self.order, self.parameters = order, [parameters[i] for i in order]
        step = 1 if packed else max(1, ALIGNMENT // dtype.itemsize)
        self.offsets = [0]
        for p in self.parameters:
            self.offsets.append(self.offsets[-1] + -(-p.numel() // step) * step)
        self.buffer = torch.zeros(self.offsets[-1], dtype=dtype, device=self.parameters[0].device)
        self.views = [self._view(p, offset) for p, offset in zip(self.parameters, self.offsets, strict=False)]
        keeps = feedback and dtype.is_floating_point
        self.error = torch.zeros_like(self.buffer, dtype=torch.float32) if keeps else None

    def _view(self, p, offset):
        """In the layout of the parameter, if that is dense, as autograd makes gradients."""
        contiguous = torch.empty_like(p, device="meta").stride()  # of what is dense, its own strides
        return self.buffer.as_strided(p.size(), contiguous, offset)

    def cut(self, full_bytes: int, used: Sequence[bool]) -> list[Bucket]:
        """Slices; each ends with the parameter that brings it to `full_bytes`, as in torch's wrapper.

        Parameters unused in the first step are not mixed with others.
        """
        buckets, first, size = [], 0, self.buffer.element_size()
        for end in range(1, len(self.order) + 1):
            full = (self.offsets[end] - self.offsets[first]) * size >= full_bytes
            if end == len(self.order) or full or used[self.order[end]] != used[self.order[first]]:
                piece, of = slice(self.offsets[first], self.offsets[end]), slice(first, end)
                error = None if self.error is None else self.error[piece]
                parts = self.order[of], self.parameters[of], self.views[of]
                buckets.append(Bucket(self.buffer[piece], *parts, error))
                first = end
        return buckets


def flats(
    order: list[int], parameters: list[Tensor], wire_dtype: torch.dtype | None, feedback=False, packed=False
) -> list[Flat]:
    """The buffers of all parameters, in the order given; `wire_dtype`: of all floating-point ones, if not their own.

    feedback: they keep the rounding error of transfers. packed: they have no gaps.
    """
    kinds: dict[tuple, list[int]] = {}
    for i in order:
        kinds.setdefault((parameters[i].device, dtype_of(parameters[i], wire_dtype)), []).append(i)
    return [Flat(places, parameters, dtype, feedback, packed) for (_, dtype), places in kinds.items()]


def nbytes(parameters: list[Tensor], wire_dtype: torch.dtype | None) -> int:
    """Bytes of all gradients, in the dtype of the average."""
    return sum(p.numel() * dtype_of(p, wire_dtype).itemsize for p in parameters)


def dtype_of(p: Tensor, wire_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a parameter's gradient is averaged."""
    if wire_dtype not in (None, CODES) and p.dtype.is_floating_point:
        return wire_dtype
    return getattr(p, "grad_dtype", None) or p.dtype


def cut(buffers: list[Flat], order: list[int], full_bytes: int, used: Sequence[bool]) -> list[Bucket]:
    """All buckets in the order in which their last gradients became ready."""
    ready = {place: i for i, place in enumerate(order)}
    buckets = [bucket for flat in buffers for bucket in flat.cut(full_bytes, used)]
    return sorted(buckets, key=lambda bucket: max(ready[place] for place in bucket.places))


def keep_dtypes(parameters, wire_dtype) -> bool:
    """Whether all gradients are averaged in their own dtypes."""
    return all(dtype_of(p, wire_dtype) == p.dtype for p in parameters)
