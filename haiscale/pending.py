"""The asynchronous save of this process that is not on disk yet: a thread writes one after another."""

import concurrent.futures
from collections.abc import Callable

_pending: concurrent.futures.Future | None = None
_writer: concurrent.futures.ThreadPoolExecutor | None = None


def begin(write: Callable, *args) -> concurrent.futures.Future:
    """Calls `write` in the thread, for which Python waits at exit."""
    global _pending, _writer
    if _writer is None:
        _writer = concurrent.futures.ThreadPoolExecutor(1, "haiscale.checkpoint")
    _pending = _writer.submit(write, *args)
    return _pending


def finish() -> None:
    """Waits for the last one, and raises its error."""
    global _pending
    pending, _pending = _pending, None
    if pending is not None:
        pending.result()
