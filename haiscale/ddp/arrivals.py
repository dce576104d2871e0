"""Tracks which gradients of a backward have arrived: a hook of each parameter counts them, and `collect` collects them.

`native()` returns the module to use: the C++ one (csrc/hfreduce/torch/arrivals.cpp) if hfreduce's backend is built, or
this one. Backward of a small batch waits for the host: docs/notes/parallel.md shows what C++ and larger buckets saved
together.
"""

import functools
import logging
import sys
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import hfreduce.backend

_log = logging.getLogger("haiscale.ddp")


class Arrivals:
    """Gradients since `arm`, of `parameters` parameters.

    begin() is called at the first one; whole(bucket) when a bucket has all expected gradients; late(i) at a gradient of
    a parameter that is in no bucket, or whose bucket is already running. counts: by parameter; order: order of arrival,
    before `watch`. If `expecting` is False, gradients are ignored.

    The user's hooks of a parameter may run after this one, and may change the gradient. So whole and late are called at
    the next gradient in the same thread, or by `finish`.
    """

    def __init__(self, parameters: int, begin: Callable, whole: Callable, late: Callable):
        self._begin, self._whole, self._late = begin, whole, late
        self.begun, self.expecting, self.counts, self.order = False, True, [0] * parameters, []
        self._latest: dict[int, int] = {}  # by thread, the parameter whose other hooks may still run
        self._bucket_of: Sequence[int] = ()
        self._expected, self._sizes = [], []
        self._waiting, self._dirty, self._running = [], [], []

    def hook(self, i: int) -> Callable:
        """For parameter i: register_post_accumulate_grad_hook."""
        return lambda p: self._arrived(i)

    def _arrived(self, i):
        if not self.expecting:
            return
        if not self.begun:
            self.begun = True
            self._begin()
        thread = threading.get_ident()
        if thread in self._latest:
            self._track(self._latest.pop(thread))
        self.counts[i] += 1
        if self._bucket_of:
            self._latest[thread] = i
        else:
            self.order.append(i)

    def _track(self, i):
        bucket = self._bucket_of[i]
        if bucket < 0 or self._running[bucket]:
            self._late(i)
            return
        self._dirty[bucket] = True
        if self.counts[i] == self._expected[i]:
            self._waiting[bucket] -= 1
            if not self._waiting[bucket]:
                self._whole(bucket)

    def finish(self) -> None:
        """Call at the end of a backward: no hook runs any more."""
        while self._latest:
            self._track(self._latest.pop(next(iter(self._latest))))

    def watch(self, bucket_of: Sequence[int], expected: Sequence[int]) -> None:
        """Start to track buckets: for each parameter, its bucket (-1: none) and its expected number of gradients."""
        self._bucket_of, self._expected = bucket_of, expected
        count = 1 + max(bucket_of, default=-1)
        self._sizes = [sum(of == bucket for of in bucket_of) for bucket in range(count)]
        self._waiting, self._dirty, self._running = list(self._sizes), [False] * count, [False] * count
        self._latest.clear()

    def arm(self) -> None:
        """Reset: gradients are expected, and none has arrived."""
        self.begun, self.expecting, self.counts, self.order = False, True, [0] * len(self.counts), []
        self._latest.clear()
        self._waiting, self._dirty = list(self._sizes), [False] * len(self._sizes)

    def clean(self, bucket: int) -> None:
        """Mark the bucket's gradients as averaged."""
        self._dirty[bucket] = False

    def run(self, bucket: int, running: bool) -> None:
        """Whether the bucket's average is in progress."""
        self._running[bucket] = running

    def is_whole(self, bucket: int) -> bool:
        """Whether all expected gradients have arrived."""
        return not self._waiting[bucket]

    def is_dirty(self, bucket: int) -> bool:
        """Whether it has a gradient that is not averaged."""
        return self._dirty[bucket]


def collect(parameters: Sequence[Tensor], views: Sequence[Tensor]) -> None:
    """Moves gradients into the `views`, which become the gradients; a missing gradient stays None, and its view is 0.

    If a parameter temporarily has another dtype than its view, its gradient is None afterwards. A gradient with a
    graph, or of another dtype than parameter and view, is copied only and stays the gradient.
    """
    away, grads, missing = [], [], []
    for i, (p, view) in enumerate(zip(parameters, views, strict=True)):
        grad = p.grad
        if grad is None:
            missing.append(view)
        elif grad is not view:
            away.append(i)
            grads.append(grad)
    with torch.no_grad():
        if away:
            torch._foreach_copy_([views[i] for i in away], grads)
        if missing:
            torch._foreach_zero_(missing)
    for i, grad in zip(away, grads, strict=True):
        p, view = parameters[i], views[i]
        if grad.dtype is not view.dtype:
            if p.dtype is not view.dtype:
                p.grad = None
        elif not grad.requires_grad:
            p.grad = view


@functools.cache
def native():
    """The module with `Arrivals` and `collect`: hfreduce._c10d, or this one if there is none for this torch."""
    try:
        return hfreduce.backend.native()
    except ImportError as error:
        _log.warning("DDP counts gradients in Python, which takes the host longer than C++: %s", error)
        return sys.modules[__name__]
