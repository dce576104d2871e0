"""Loops in which ranks have different numbers of batches."""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from haiscale import checks

_NOTHING = object()


def batches(engine, mesh: DeviceMesh, given: Iterable) -> Iterator:
    """Yields this rank's batches, then repeats its last one until every rank has used all of its own.

        for x, y in model.join(loader):
            loss(model(x), y).backward(); optimizer.step(); optimizer.zero_grad()

    FSDP's ranks need each other in every step. So a rank without batches left takes part with its last one, and its
    gradients count as zero in the average over all ranks. The loop's body must use `model` equally often on every rank.
    The ranks agree during the previous step on which of them still have a batch.

    Raises ValueError, on all ranks, if a rank has no batch at all.
    """
    iterator, last = iter(given), None
    batch = next(iterator, _NOTHING)
    counted = _count(batch, mesh)
    first = True
    while having := counted():
        if first and having < mesh.size():
            raise ValueError(
                f"only {having} of {mesh.size()} ranks have a batch; in join() each needs one at least, "
                "to take part in the others' steps with"
            )
        first, current = False, batch
        last = last if current is _NOTHING else current
        batch = _NOTHING if current is _NOTHING else next(iterator, _NOTHING)
        counted = _count(batch, mesh)
        engine.dummy = current is _NOTHING
        try:
            yield last
        finally:
            engine.dummy = False


def _count(batch, mesh: DeviceMesh):
    """The number of ranks with a batch: the exchange starts now, and the returned function waits for the result."""
    shards = mesh.get_group(mesh.ndim - 1)
    flag = torch.tensor([int(batch is not _NOTHING)], device=checks.host_device(shards))
    work = dist.all_reduce(flag, group=shards, async_op=True)

    def counted() -> int:
        work.wait()
        if mesh.ndim == 2:
            dist.all_reduce(flag, group=mesh.get_group(0))
        return int(flag)

    return counted
