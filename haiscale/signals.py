"""Signals that ask a rank to save, and what other processes do that get them, too.

torchrun signals the process group of a rank, Slurm each process. Workers of DataLoaders must outlive it, or the loader
raises before the rank has saved. So they ignore signals that the rank watches: by a handler, because programs that they
start would inherit SIG_IGN. They end with their loader, or when their rank has gone, as ever. torch ends a worker that
hangs by SIGTERM; it becomes SIGKILL here. All other processes that are forked get the former handlers back.
"""

import contextlib
import functools
import multiprocessing.forkserver
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable

from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _BaseDataLoaderIter

_watched: dict[int, tuple[Callable, object]] = {}  # signal: our handler, the former one
_masks = threading.local()


def watch(numbers: Iterable[int]) -> Callable[[], bool]:
    """A function that tells whether one of these signals has come since. Workers that start later ignore them."""
    got = []

    def handler(*_) -> None:
        got.append(True)

    for number in numbers:
        before = signal.signal(number, handler)
        _watched[number] = handler, _watched[number][1] if number in _watched else before
    _prepare()
    return lambda: bool(got)


@functools.cache
def _prepare() -> None:
    """For processes that start later, also those of iterators that are defined later, as by torchdata."""
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_forget)
    _BaseDataLoaderIter.__init_subclass__ = classmethod(_replace_init)
    for iterator in _BaseDataLoaderIter.__subclasses__():
        _replace_init(iterator)


def _replace_init(iterator: type) -> None:
    if "__init__" in vars(iterator):
        iterator.__init__ = _with_workers(iterator.__init__)
    for derived in iterator.__subclasses__():
        _replace_init(derived)


def _block() -> None:
    """Before a fork: a signal to the new process that came before it has its own handlers would be lost."""
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _watched)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _forget() -> None:
    """In a forked process."""
    for number, (handler, before) in _watched.items():
        if signal.getsignal(number) is handler:
            signal.signal(number, before or signal.SIG_DFL)
    _watched.clear()
    _unblock()


def _with_workers(init: Callable) -> Callable:
    """The __init__ of an iterator. Signals are blocked, also in the workers, until these ignore them."""

    @functools.wraps(init)
    def start(self, loader, *args, **options):
        own = loader.worker_init_fn
        if not _watched or getattr(own, "func", None) is _ignore:  # the second: called by a derived class
            return init(self, loader, *args, **options)
        if (loader.multiprocessing_context or multiprocessing).get_start_method() == "forkserver":
            multiprocessing.forkserver.ensure_running()  # what it forks later must not inherit what is blocked here
        loader.worker_init_fn = functools.partial(_ignore, [*_watched], own)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _watched)
        try:
            init(self, loader, *args, **options)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            loader.worker_init_fn = own
            for worker in getattr(self, "_workers", ()):
                worker._popen.terminate = functools.partial(_kill, weakref.WeakMethod(worker._popen.kill), id(self))

    return start


def _ignore(numbers: list[int], then: Callable | None, worker_id: int) -> None:
    """In a worker, as its worker_init_fn."""
    for number in numbers:
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    if then is not None:
        then(worker_id)


def _kill(kill: weakref.WeakMethod, key: int) -> None:
    """Kills a worker of the iterator with this key without an error of the loader."""
    with contextlib.suppress(ValueError):  # it has been removed
        signal_handling._remove_worker_pids(key)
    if found := kill():
        found()
