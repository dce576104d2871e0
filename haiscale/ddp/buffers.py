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
    """The buffers of a module, broadcast before a forward if any rank has written to one since the last broadcast."""

    def __init__(self, module: nn.Module, ignored: set[str], group: dist.ProcessGroup):
        self.group = group
        # A walk through all modules at each forward would cost as much as a few layers.
        self.places = [
            (part, name)
            for prefix, part in module.named_modules()
            for name in part._buffers
            if (f"{prefix}.{name}" if prefix else name) not in ignored
        ]
        self.device = checks.host_device(group)
        self.seen: list[tuple[Tensor, int]] = self._state()

    def all(self) -> list[Tensor]:
        """The present buffers, shared ones once: a module may replace its buffers."""
        buffers = (part._buffers.get(name) for part, name in self.places)
        return list({id(buffer): buffer for buffer in buffers if buffer is not None}.values())

    def synchronise(self, source: int = 0) -> bool:
        """Whether they were broadcast, from the group's rank `source`."""
        state = self._state()
        if not state:
            return False
        same = len(state) == len(self.seen) and all(
            a is b and version is not None and version == before
            for (a, version), (b, before) in zip(state, self.seen, strict=True)
        )
        # One byte tells whether any buffer has changed on any rank. If this would wait for a GPU, broadcasting is
        # cheaper.
        if self.device.type == "cpu" and not self._any(not same):
            return False
        broadcast([buffer for buffer, _ in state], self.group, source)
        self.seen = self._state()
        return True

    def _any(self, changed):
        vote = torch.tensor([changed], dtype=torch.uint8)
        dist.all_reduce(vote, dist.ReduceOp.MAX, group=self.group)
        return bool(vote.item())

    def _state(self):
        return [(buffer, None if buffer.is_inference() else buffer._version) for buffer in self.all()]
