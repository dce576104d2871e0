"""The asynchronous save of this process that is not on disk yet. One thread writes them one after another.

The next save or load waits for it and raises its error, as does destroy_process_group before a group ends. Python waits
for the thread at exit; an error is printed then, and the exit status is 1.
"""

import atexit
import concurrent.futures
import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Callable

import torch.distributed as dist

_pending: concurrent.futures.Future | None = None
_writer: concurrent.futures.ThreadPoolExecutor | None = None


def begin(write: Callable, *args) -> concurrent.futures.Future:
    """Calls `write` in the thread."""
    global _pending, _writer
    if _writer is None:
        _writer = concurrent.futures.ThreadPoolExecutor(1, "haiscale.checkpoint")
    if dist.is_available() and _Leaving not in dist.distributed_c10d._world.comms:
        dist.distributed_c10d._world.comms.append(_Leaving)
    _pending = _writer.submit(write, *args)
    return _pending


def finish() -> None:
    """Waits for the last one, and raises its error."""
    global _pending
    pending, _pending = _pending, None
    if pending is not None:
        pending.result()


class _Leaving:
    """torch calls `finalize` of `_world.comms` first when it destroys all groups."""

    finalize = staticmethod(finish)


def _at_exit() -> None:
    try:
        finish()
    except Exception:
        traceback.print_exc()
        with contextlib.suppress(Exception):
            dist.destroy_process_group()  # what follows here ends without goodbyes
        logging.shutdown()
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # an exception would leave the exit status 0


def _in_child() -> None:
    global _pending, _writer
    _pending = _writer = None  # the thread is the parent's


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_child)
