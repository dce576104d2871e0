"""Broadcasts buffers and other tensors from one rank to all, in one flat message."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from haiscale import checks

MESSAGE = 256 << 20  # bytes that are sent at a time, or one tensor
ALIGNMENT = 16  # bytes, for each tensor in a message


def broadcast(tensors: list[Tensor], group: dist.ProcessGroup, source: int = 0) -> None:
    """Gives `tensors` the values of the group's rank `source`, invisible to autograd."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_device.setdefault(tensor.device, []).append(tensor)
    for device, some in by_device.items():
        while some:
            many, size = 0, 0
            while many < len(some) and (not many or size + some[many].nbytes <= MESSAGE):
                size += -(-some[many].nbytes // ALIGNMENT) * ALIGNMENT
                many += 1
            _broadcast(some[:many], size, device, group, source)
            some = some[many:]


@torch.no_grad()
def _broadcast(tensors, size, device, group, source):
    message = torch.empty(size, dtype=torch.uint8, device=device)
    views, offset = [], 0
    for tensor in tensors:
        views.append(message[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    sends = group.rank() == source
    if sends:
        for view, tensor in zip(views, tensors, strict=True):
            view.copy_(tensor)
    dist.broadcast(message, dist.get_global_rank(group, source), group=group)
    if not sends:
        with torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):
            for view, tensor in zip(views, tensors, strict=True):
                tensor.detach().copy_(view)


class Buffers:
    """The buffers of a module, whatever buffers it has at the time.

    They are broadcast before every forward, as in torch: no counter tells of writes to `buffer.data`.
    """

    def __init__(self, module: nn.Module, ignored: set[str], group: dist.ProcessGroup):
        self.module, self.ignored, self.group = module, ignored, group
        self._find()

    def _find(self):
        """Walks through all modules, which at each forward would cost as much as a few layers."""
        named = list(self.module.named_modules())
        self.parts, self.places = [part for _, part in named], []
        for prefix, part in named:
            names = (name for name in part._buffers if (f"{prefix}.{name}" if prefix else name) not in self.ignored)
            self.places += [(part, name) for name in names]
        self.contents = self._contents()

    def _contents(self):
        """The names of buffers and the modules, in which a change of the structure shows."""
        return [one for part in self.parts for one in (*part._buffers, *part._modules.values())]

    def all(self) -> list[Tensor]:
        """The present buffers, shared ones once: a module may replace its buffers, and get more."""
        if self._contents() != self.contents:
            self._find()
        buffers = (part._buffers.get(name) for part, name in self.places)
        return list({id(buffer): buffer for buffer in buffers if buffer is not None}.values())

    def synchronise(self, source: int = 0) -> None:
        """Gives them the values of the group's rank `source`."""
        try:
            broadcast(self.all(), self.group, source)
        except dist.DistBackendError as error:
            checks.explain(
                error,
                "was in a forward of DDP, which begins with a broadcast of buffers: every rank must call it as often, "
                "in evaluation too; to evaluate on one rank alone, call .module",
            )
            raise
