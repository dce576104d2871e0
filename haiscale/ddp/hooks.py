"""The bucket that a communication hook gets: a replacement for torch.distributed.GradBucket, which Python cannot
create. And a way to call a method without keeping its object."""

import weakref
from collections.abc import Callable

from torch import Tensor


class GradBucket:
    """The interface of torch.distributed.GradBucket, for the hooks of `torch.distributed.algorithms.ddp_comm_hooks`."""

    def __init__(self, index: int, count: int, flat: Tensor, views: list[Tensor], parameters: list[Tensor]):
        self._index, self._count, self._flat = index, count, flat
        self._views, self._parameters = views, parameters

    def index(self) -> int:
        """The index of the bucket in the order of reduction; the same in every step."""
        return self._index

    def is_last(self) -> bool:
        """Whether it is the last of the step."""
        return self._index == self._count - 1

    def buffer(self) -> Tensor:
        """All gradients of this rank, flat, without gaps."""
        return self._flat

    def set_buffer(self, buffer: Tensor) -> None:
        """Replaces the gradients."""
        self._flat.copy_(buffer.view(-1))

    def gradients(self) -> list[Tensor]:
        """The gradients, each as a view of the buffer with its parameter's shape."""
        start = self._views[0].storage_offset()
        return [self._flat.as_strided(v.size(), v.stride(), self._flat.storage_offset() + v.storage_offset() - start)
                for v in self._views]  # fmt: skip

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of `gradients`."""
        return self._parameters


def weakly(method: Callable) -> Callable:
    """Calls a method while its object is alive, and does not keep it alive."""
    reference = weakref.WeakMethod(method)

    def call(*args):
        found = reference()
        if found is not None:
            found(*args)

    return call


def remove(handles: list) -> None:
    """Removes hooks by their handles, and empties the list."""
    while handles:
        handles.pop().remove()
