"""Averages gradients over ranks while backward still runs.

A hook of each parameter counts its gradients (haiscale/ddp/arrivals.py). When all gradients of a bucket have arrived,
and the buckets before it have started, the bucket's average starts. At the end of backward the remaining averages are
started, and all are waited for.

The first backward learns the order in which gradients become ready (all ranks use rank 0's order), how many gradients a
parameter gets in one backward (several under reentrant checkpoints), and, if parameters may be unused, which are.
Nothing is averaged before its end; buckets exist only then.

An average of averages is the average. So a second backward of the same forward can average again the gradients that it
added to. Other backwards after that, as of the unwrapped module, are local: gradients are expected from a forward until
all have been averaged, and again from a gradient of that forward's output.

After Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from haiscale import checks
from haiscale.ddp.arrivals import native
from haiscale.ddp.buckets import CODES, Bucket, cut, flats
from haiscale.ddp.hooks import GradBucket, remove, weakly
from haiscale.ddp.sizes import Sizes
from haiscale.mesh import backend_of, host_groups
from hfreduce.wire import Wire

NAMES = 8  # parameters that a message lists


class Reducer:
    """See above. parameters: the trained ones, each once. wire_dtype: the dtype in which gradients are averaged, if not
    their own, or CODES. feedback, for CODES: the rounding error is added to the next gradients. attach: gradients are
    views of buckets. static: the same parameters lack gradients in every step; lenient: any. restore: called first."""

    order: list[int]
    begins: dict[bool, Callable[[Tensor], None]]
    handles: list[Any]

    def __init__(
        self, module: nn.Module, parameters: list[Tensor], group: dist.ProcessGroup, sizes: Sizes, *,
        wire_dtype: torch.dtype | None, feedback: bool, attach: bool, lenient: bool, static: bool,
        restore: Callable[[], None] | None,
    ):  # fmt: skip
        self.module, self.parameters, self.group, self.sizes = module, parameters, group, sizes
        self.wire_dtype, self.attach, self.restore = wire_dtype, attach, restore
        self.feedback, self.wire = feedback, None  # once there are buckets, the object that sends them in CODES
        self.lenient, self.static = lenient or static, static
        self.device = checks.host_device(group)
        self.averages = backend_of(group) in ("nccl", "hfreduce", "fake")  # others have no ReduceOp.AVG
        self.size, self.authority, self.contributors = group.size(), None, None
        self.buckets: list[Bucket] | None = None
        self.flats, self.order, self.bucket_of = [], [], {}
        self.expected, self.steps = [1] * len(parameters), 0
        self.hook: tuple[Callable[..., Any], object] | None = None
        self.defer = False  # averages are waited for in the next forward, by `settle`
        self.fault: BaseException | None = None
        self.sync = False  # whether the next backward averages
        self.owed = False  # whether it does if it is of an earlier forward, from before `no_sync`
        self.used = [False] * len(parameters)  # if lenient: which had a gradient here since the last average
        self.ending: weakref.ref[Any] | None = None  # what calls `_end` at the end of the backward in progress
        self.raised = False  # whether the last backward ended without `_end`
        self.begins = {again: _hook(self, again) for again in (False, True)}
        self.next = 0  # the next bucket to start
        self.lock = threading.Lock()  # each device has its own thread in backward
        self.frozen = [p for p in module.parameters() if not p.requires_grad]
        told = (weakly(method) for method in (self._queue_end, self._whole, self._late))
        self.arrivals = native().Arrivals(len(parameters), *told)
        hooks = [self.arrivals.hook(i) for i in range(len(parameters))]
        self.handles = [p.register_post_accumulate_grad_hook(h) for p, h in zip(parameters, hooks, strict=True)]
        weakref.finalize(self, remove, self.handles)

    def stop(self) -> None:
        """Waits for pending work and leaves the parameters alone from now on. May be called more than once."""
        self.settle()
        remove(self.handles)

    # Forward

    def prepare(self, sync: bool) -> None:
        """Called at the beginning of a forward that a backward may follow. Raises the error that made an earlier step
        fail."""
        if self.fault is not None:
            raise self.fault
        self._check_finished()
        earlier = self.owed or (self.sync and self.arrivals.expecting and not any(self.arrivals.counts))
        for p in self.frozen:
            if p.requires_grad:
                raise ValueError(
                    f"{checks.me()}: {checks.path(self.module, p)} needs a gradient now, and did not when the model "
                    "was wrapped, so it would not be averaged: wrap the model again after unfreezing"
                )
        self.arm(sync)
        self.owed = earlier and not sync

    def arm(self, sync: bool) -> None:
        """Sets whether the next backward averages; no gradient has arrived so far."""
        self.sync, self.owed, self.next, self.raised = sync, False, 0, False
        self.arrivals.arm()
        for bucket in self.buckets or ():
            bucket.done = False

    def _check_finished(self):
        """Raises for a backward that raised or left out parameters, and so was not averaged."""
        counts = self.arrivals.counts if self.sync else ()
        if not any(counts) or (not self.raised and self.buckets and all(bucket.done for bucket in self.buckets)):
            return
        self.sync = False  # the model may still be used after the error
        self.settle()
        if self.raised:
            raise ValueError(
                f"{checks.me()}: the last backward ended in an exception, so its gradients were not averaged: see that "
                "exception. If all ranks caught it, call zero_grad() and go on with the next forward"
            )
        missing = [p for p, count in zip(self.parameters, counts, strict=True) if not count and p.requires_grad]
        names = "; ".join(checks.path(self.module, p) for p in missing[:NAMES])
        more = f"; and {len(missing) - NAMES} more" if len(missing) > NAMES else ""
        raise ValueError(
            f"{checks.me()}: {len(missing)} of {len(self.parameters)} parameters got no gradient in the last backward, "
            f"so gradients were not averaged: {names}{more}. Let the loss depend on them; freeze them with "
            "requires_grad_(False) before wrapping; or pass find_unused_parameters=True"
        )

    # Backward

    def begin(self, again: bool) -> None:
        """Called by a hook of an output: registers `_end` for the end of the outermost backward.

        again: gradients are averaged even if a backward of the same forward has averaged all.
        """
        if again and self.owed:
            if self.arrivals.begun:
                self.sync, self.owed = True, False  # a backward of both forwards
            else:
                self.arm(True)
        if again and self.sync:
            self.arrivals.expecting = True
        if not self.arrivals.begun:
            self.arrivals.begun = True
            self._queue_end()

    def _queue_end(self):
        self.raised = True  # until `_end`
        end = weakly(self._end)
        self.ending = weakref.ref(end, _ended(weakref.ref(self)))
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _late(self, i):
        """Parameter i got a gradient that no average will include."""
        if i not in self.bucket_of:
            why = "and no rank had one for it in the first step: do without static_graph=True"
        else:
            why = (
                f"number {self.arrivals.counts[i]} of this step, after its average had begun, for in the first step "
                "there were fewer: checkpoint with use_reentrant=False, or use the same layers in every step"
            )
        raise ValueError(f"{checks.me()}: {checks.path(self.module, self.parameters[i])} got a gradient, {why}")

    def _whole(self, index):
        """A bucket has all its gradients."""
        with self.lock:
            self._advance(self.buckets[index])

    def _advance(self, bucket):
        """Starts the complete buckets, in their order; without averages, gradients are only collected."""
        if not self.sync:
            if self.restore is None:
                bucket.collect(self.attach)
            return
        while self.next < len(self.buckets) and self.arrivals.is_whole(self.next):
            self._launch(self.next)
            self.next += 1

    def _end(self):
        """The end of a backward that raised nothing."""
        self.arrivals.begun = False
        self._finish()
        self.raised = False

    def _finish(self):
        if self.arrivals.expecting:
            self.arrivals.finish()
        counts = self.arrivals.counts
        if not self.arrivals.expecting or not any(counts):
            return  # from torch.autograd.grad, which does not change .grad
        if self.restore is not None:
            self.restore()
        if self.lenient:
            came = [bool(count) and p.grad is not None for count, p in zip(counts, self.parameters, strict=True)]
            self.used = [a or b for a, b in zip(self.used, came, strict=True)]
        if not self.sync:
            for index, bucket in enumerate(self.buckets or ()):
                if self.attach and self.arrivals.is_dirty(index) and all(p.grad is not None for p in bucket.parameters):
                    bucket.collect(self.attach)
            return
        whole = all(count or not p.requires_grad for count, p in zip(counts, self.parameters, strict=True))
        if self.buckets is None:
            if not (self.lenient or whole):
                return  # another backward of this forward may provide the rest; otherwise the next forward raises
            self._build(counts)
        kept = {} if all(counts) or self.defer else self._unused()
        for index, bucket in enumerate(self.buckets):
            if bucket.work is None and self._due(index, bucket, counts):
                self._launch(index)
        if self.wire is not None:
            with self._noting_faults():
                self.wire.flush()
        has_gradient = self._vote(self.used) if self.lenient and not self.static else None
        if not self.defer:
            self.settle(has_gradient)
        with torch.no_grad():
            for i, grad in kept.items():
                if has_gradient is None or not has_gradient[i]:
                    self.parameters[i].grad.copy_(grad)
        if all(bucket.done for bucket in self.buckets):
            self.arrivals.expecting, self.used = False, [False] * len(self.parameters)
            self._stepped()

    def _unused(self):
        """Copies of older gradients that must not change, by parameter: of frozen ones, and of those that no rank may
        have used."""
        may = self.lenient and not self.static
        return {
            i: p.grad.detach().clone()
            for i, p in enumerate(self.parameters)
            if p.grad is not None and ((may and not self.used[i]) or not p.requires_grad)
        }

    def _due(self, index, bucket, counts):
        if self.lenient:
            return True  # the same on all ranks, whatever each has used
        came = all(counts[i] or not self.parameters[i].requires_grad for i in bucket.places)
        return came and (self.arrivals.is_dirty(index) or not bucket.done)

    def _stepped(self):
        self.steps += 1
        before = self.sizes.now
        with self._noting_faults():
            self.sizes.stepped(self.group, self.device)
        if self.sizes.now != before and not self.defer:
            self._cut()
            for bucket in self.buckets:
                bucket.done = True

    # Buckets

    def _build(self, counts: list[int]) -> None:
        """After the first backward, which made this many gradients: all ranks get rank 0's order and bucket size."""
        ready = {i: at for at, i in enumerate(self.arrivals.order)}  # the last one, if there are several gradients
        count = len(self.parameters)
        order = sorted(range(count), key=lambda i: ready.get(i, count))
        numbers = torch.tensor([*order, len(ready), *self.sizes.numbers()], device=self.device)
        used = self._vote(self.used) if self.static else None
        with self._noting_faults():
            if self.wire_dtype == CODES:
                self.wire = Wire(self.group, CODES, host_groups(self.group))
            authority = 0 if self.authority is None else self.authority()
            dist.broadcast(numbers, dist.get_global_rank(self.group, authority), group=self.group)
        numbers = numbers.tolist()
        self.order, came = numbers[:count], numbers[count]
        self.sizes.follow(numbers[count + 1 :])
        self.came = [False] * count
        for i in self.order[:came]:
            self.came[i] = True
        if used is not None:
            self.order = [i for i in self.order if used[i]]
        self.expected = [max(1, count) for count in counts]
        self._lay_out()

    def use_hook(self, hook: Callable, state: object) -> None:
        """From now on averages are made by the communication hook."""
        self.settle()
        self.hook = hook, state
        if self.buckets is not None:
            self._lay_out()
            for bucket in self.buckets:
                bucket.done = True

    def _lay_out(self):
        packed = self.hook is not None
        self.flats = flats(self.order, self.parameters, self.wire_dtype, self.feedback, packed)
        self._cut()

    def _cut(self):
        self.buckets = cut(self.flats, self.order, self.sizes.now, self.came)
        self.bucket_of = {i: bucket for bucket in self.buckets for i in bucket.places}
        numbers = {i: index for index, bucket in enumerate(self.buckets) for i in bucket.places}
        self.arrivals.watch([numbers.get(i, -1) for i in range(len(self.parameters))], self.expected)

    def _vote(self, mine: list[bool]) -> list[bool]:
        """Which parameters got a gradient on some rank."""
        votes = torch.tensor(mine, dtype=torch.uint8, device=self.device)
        with self._noting_faults():
            dist.all_reduce(votes, dist.ReduceOp.MAX, group=self.group)
        return [bool(vote) for vote in votes.tolist()]

    def _launch(self, index):
        bucket = self.buckets[index]
        bucket.collect(self.attach)
        self.arrivals.clean(index)
        bucket.done = True
        with self._noting_faults():
            bucket.work = self._average(bucket.flat, index)
        self.arrivals.run(index, True)
        if self.defer:
            for p in bucket.parameters:
                p.grad = None

    def _average(self, flat, index):
        """Starts it. The result has `wait`."""
        if self.hook is not None:
            hook, state = self.hook
            bucket = self.buckets[index]
            return hook(state, GradBucket(index, len(self.buckets), flat, bucket.views, bucket.parameters))
        wire = self.wire if flat.is_floating_point() else None
        if self.contributors is not None:
            flat.mul_(1 / self.contributors())
        elif wire is None and not self.averages:
            flat.mul_(1 / self.size)
        if wire is not None:
            return wire.begin(flat, "avg" if self.contributors is None else "sum", self.buckets[index].error)
        op = dist.ReduceOp.AVG if self.averages and self.contributors is None else dist.ReduceOp.SUM
        return dist.all_reduce(flat, op, group=self.group, async_op=True)

    def settle(self, has_gradient: list[bool] | None = None, only: Bucket | None = None) -> list[Bucket]:
        """Waits for the pending averages (or one of them) and gives them to the parameters."""
        settled = []
        for index, bucket in enumerate(self.buckets or ()):
            if bucket.work is None or only not in (None, bucket):
                continue
            with self._noting_faults():
                result = bucket.work.wait()
            if self.hook is not None:
                result = result[0] if isinstance(result, list) else result
                if result.data_ptr() != bucket.flat.data_ptr():
                    bucket.flat.copy_(result.view(-1))
            bucket.work = None
            self.arrivals.run(index, False)
            bucket.release(self.attach, self.size, has_gradient)
            settled.append(bucket)
        return settled

    def shadow(self) -> None:
        """For a rank without inputs: starts the same averages as the other ranks' backward, contributing zeros."""
        self.arm(False)
        if self.buckets is None:
            self._build([0] * len(self.parameters))
        nothing = [torch.zeros_like(bucket.flat) for bucket in self.buckets]
        with self._noting_faults():
            works = [self._average(flat, i) for i, flat in enumerate(nothing)]
            if self.wire is not None:
                self.wire.flush()
        if self.lenient and not self.static:
            self._vote([False] * len(self.parameters))
        with self._noting_faults():
            for work in works:
                work.wait()
        self._stepped()

    @contextlib.contextmanager
    def _noting_faults(self):
        """The backend's errors are raised unchanged, and again at the next forward, because the group is unusable."""
        try:
            yield
        except Exception as fault:
            self.fault = fault
            for index, bucket in enumerate(self.buckets or ()):
                bucket.work = None
                self.arrivals.run(index, False)
            raise

    def explain(self) -> list[str]:
        """Lines about the buckets and the reason for their size."""
        if self.buckets is None:
            return ["  buckets: none before the end of the first backward, which tells the order of gradients"]
        sizes = [bucket.flat.nbytes / 2**20 for bucket in self.buckets]
        lines = [
            f"  buckets: {len(sizes)}, of {min(sizes):.3g} to {max(sizes):.3g} MiB, in the order of the first backward",
            f"  size of buckets: full at {self.sizes.now / 2**20:.3g} MiB, {self.sizes.why}",
            *(f"    {size / 2**20:.3g} MiB: {time * 1e3:.2f} ms a step" for size, time in self.sizes.times.items()),
        ]
        again = [i for i, count in enumerate(self.expected) if count > 1]
        unused = [i for i, came in enumerate(self.came) if not came]
        for what, places in (("with several gradients a step", again), ("unused in the first step", unused)):
            if places:
                names = "; ".join(checks.path(self.module, self.parameters[i]) for i in places[:NAMES])
                lines.append(f"  {what}: {len(places)}: {names}{'; ...' if len(places) > NAMES else ''}")
        return lines


def _hook(reducer, again):
    """A hook of outputs, which may outlive the reducer, and be saved without it."""
    begin = weakly(reducer.begin)
    return torch.utils.hooks.unserializable_hook(lambda gradient: begin(again))


def _ended(reducer):
    """Called when a backward has ended or raised, and forgot what it would have called at its end."""

    def gone(ending):
        found = reducer()
        if found is not None and found.ending is ending:
            found.arrivals.begun = False

    return gone
