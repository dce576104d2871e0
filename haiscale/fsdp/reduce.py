"""Reduces gradients of whole parameters to shards: a few reductions at a time, the oldest finished first."""

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllreduceOptions, ReduceScatterOptions

from haiscale.fsdp.flat import WHOLE_ALIGNMENT, Flat, Parameter
from haiscale.fsdp.unit import is_fake
from haiscale.mesh import backend_of

AVERAGING = ("hfreduce", "nccl", "fake")  # backends whose reductions average; elsewhere a sum is divided

Gradients = list[tuple[Parameter, Tensor]]


@dataclass(eq=False)
class Reduction:
    """One flat's gradients: a reduce-scatter over shards, then an all-reduce over replicas, if there are any."""

    flat: Flat
    done: list[Parameter]
    values: Tensor  # result in the layout of the shard
    inputs: list[Tensor]  # kept alive until they are sent
    work: dist.Work | None


class Reductions:
    """`begin` starts one; at most `most` are in flight, and `end` waits for all of them."""

    def __init__(self, group: dist.ProcessGroup, replicas: dist.ProcessGroup | None, most: int, make: Callable):
        self.group, self.replicas, self.most, self._make = group, replicas, most, make
        self.scattering: deque[Reduction] = deque()
        self.replicating: deque[Reduction] = deque()
        self.buffers: list[Tensor] = []  # for gradients that must be cast or padded, used in turns
        self.needs: list[int] = []  # bytes, for each flat that needs one
        self.ended: Callable[[list[Parameter]], None] | None = None  # called when the `.grad` of these are complete
        self._turn = 0
        averages = backend_of(group) in AVERAGING
        ranks = group.size() * (replicas.size() if replicas else 1)
        self._op, self._divisor = (dist.ReduceOp.AVG, 1) if averages else (dist.ReduceOp.SUM, ranks)

    @property
    def buffer_bytes(self) -> int:
        """Size of a buffer: enough for most units. A few units, such as embeddings, are larger and get temporary
        memory."""
        return statistics.median_high(self.needs) if self.needs else 0

    @torch.no_grad()
    def keep(self, flat: Flat, gradients: Gradients) -> None:
        """Adds to the whole gradients of the microbatches so far, in the dtype of the reduction."""
        if flat.kept is None:
            flat.kept = torch.zeros(flat.whole_length, dtype=flat.reduce_dtype, device=flat.device)
        for known, into in ((True, torch._foreach_add_), (False, torch._foreach_copy_)):
            chosen = [(p, g) for p, g in gradients if (p in flat.kept_of) is known]
            if chosen:
                into([_view(flat.kept, p.whole_start, p) for p, _ in chosen], [g for _, g in chosen])
        flat.kept_of.update(p for p, _ in gradients)

    @torch.no_grad()
    def begin(self, flat: Flat, gradients: Gradients, keeping: bool) -> None:
        """Starts to average gradients of whole parameters over ranks. keeping: their whole buffer is permanent."""
        while len(self.scattering) >= self.most or any(r.flat is flat for r in self.scattering):
            self._scattered()
        while len(self.replicating) >= self.most or any(r.flat is flat for r in self.replicating):
            self._replicated()
        if keeping or flat.kept_of:
            self.keep(flat, gradients)
            done = [p for p in flat.parameters if p in flat.kept_of]
            inputs = [flat.kept[p.whole_start : p.whole_start + p.count * flat.size] for p in done]
            flat.kept_of.clear()
            if not keeping:
                flat.kept = None  # `inputs` hold it until they are sent
        else:
            done, inputs = [p for p, _ in gradients], self._inputs(flat, gradients)
        alone = self.replicas is None or len(done) == len(flat.trained())
        flat.let_go()
        if flat.writable(done) and alone and flat.reduce_dtype is flat.dtype and not flat.host:
            values = flat.make_grad()
        else:
            values = torch.empty(flat.length, dtype=flat.reduce_dtype, device=flat.device)
        outputs = [values[p.start : p.start + p.count] for p in done]
        work = self._reduce_scatter(outputs, inputs)
        self.scattering.append(Reduction(flat, done, values, inputs, work))

    def end(self) -> None:
        """Waits until all gradients are in the shards; on a GPU, only later kernels wait."""
        while self.scattering:
            self._scattered()
        while self.replicating:
            self._replicated()

    def forget(self) -> None:
        """After a failure: discards everything in flight."""
        self.scattering.clear()
        self.replicating.clear()

    def _scattered(self) -> None:
        """Finishes the oldest reduce-scatter."""
        oldest = self.scattering.popleft()
        _wait(oldest)
        if self.replicas is not None:
            options = AllreduceOptions()
            options.reduceOp, options.asyncOp = self._op, True
            if not is_fake(self.replicas):
                oldest.work = self.replicas.allreduce([oldest.values], options)
            self.replicating.append(oldest)
        else:
            self._arrived(oldest)

    def _replicated(self) -> None:
        oldest = self.replicating.popleft()
        _wait(oldest)
        self._arrived(oldest)

    def _arrived(self, reduction: Reduction) -> None:
        flat = reduction.flat
        flat.attach(reduction.done, reduction.values, self._divisor)
        hooks = [(h, p.sharded) for p in reduction.done for h in (p.sharded._post_accumulate_grad_hooks or {}).values()]
        if not hooks and self.ended is None:
            return
        flat.settle()
        if self.ended is not None:
            self.ended(reduction.done)
        for hook, sharded in hooks:
            hook(sharded)
        if all(p.sharded.grad is None for p in flat.parameters):  # the hooks have consumed it
            flat.grad = None

    def _reduce_scatter(self, outputs: list[Tensor], inputs: list[Tensor]) -> dist.Work | None:
        pairs = [(o, i) for o, i in zip(outputs, inputs, strict=True) if o.numel()]
        if not pairs or is_fake(self.group):
            return None
        outputs, inputs = [o for o, _ in pairs], [i for _, i in pairs]
        if self.group.size() == 1:
            torch._foreach_copy_(outputs, inputs)
            return None
        options = ReduceScatterOptions()
        options.reduceOp, options.asyncOp = self._op, True
        return self.group.reduce_scatter_tensor_coalesced(outputs, inputs, options)

    def _inputs(self, flat: Flat, gradients: Gradients) -> list[Tensor]:
        """The flat gradients themselves if they can be sent as they are; else copies in the next buffer."""
        copied = [_aligned(p.count * flat.size) for p, g in gradients if _copied(flat, p, g)]
        buffer = self._buffer(flat, sum(copied)) if copied else None
        inputs, views, values, at = [], [], [], 0
        for p, gradient in gradients:
            if not _copied(flat, p, gradient):
                inputs.append(gradient.contiguous().view(-1))
                continue
            place = buffer[at : at + p.count * flat.size]
            inputs.append(place)
            views.append(_view(buffer, at, p))
            values.append(gradient)
            at += _aligned(p.count * flat.size)
        if views:
            torch._foreach_copy_(views, values)
        return inputs

    def _buffer(self, flat: Flat, length: int) -> Tensor:
        """A buffer that no running reduction uses: there are as many buffers as reductions allowed."""
        if length * flat.reduce_dtype.itemsize > self.buffer_bytes:
            return torch.empty(length, dtype=flat.reduce_dtype, device=flat.device)
        self._turn = (self._turn + 1) % self.most
        while len(self.buffers) <= self._turn:
            self.buffers.append(self._make(self.buffer_bytes))
        return self.buffers[self._turn][: length * flat.reduce_dtype.itemsize].view(flat.reduce_dtype)


def _wait(reduction: Reduction) -> None:
    if reduction.work is not None:
        reduction.work.wait()
    reduction.work, reduction.inputs = None, []


def bytes_needed(flat: Flat) -> int:
    """Bytes of a buffer for the gradients that cannot be sent as autograd gives them."""
    uneven = [
        p for p in flat.trained() if flat.reduce_dtype is not flat.compute_dtype or p.count * flat.size != p.numel
    ]
    return sum(_aligned(p.count * flat.size) for p in uneven) * flat.reduce_dtype.itemsize


def _copied(flat: Flat, p: Parameter, gradient: Tensor) -> bool:
    return gradient.dtype is not flat.reduce_dtype or p.count * flat.size != p.numel


def _view(buffer: Tensor, start: int, p: Parameter) -> Tensor:
    return buffer[start : start + p.numel].view(p.shape)


def _aligned(count: int) -> int:
    return -(-count // WHOLE_ALIGNMENT) * WHOLE_ALIGNMENT
