"""Set-up and shutdown of every gloo rank."""

import faulthandler
import os
import sys
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def process_group(rank: int, world_size: int, store: str):
    """A gloo group for the work of one rank, and the end of the process after it.

    When all ranks are done, the process exits without destroying the group or the interpreter: a gloo thread that
    releases a Python object after that sometimes aborts the process ("terminate called without an active exception").
    The ranks wait for each other at the store, because one that leaves early breaks the others' connections.
    """
    faulthandler.enable()  # shows the Python stack if the rank aborts
    torch.set_num_threads(1)
    notes = dist.FileStore(store, world_size)
    dist.init_process_group("gloo", store=notes, rank=rank, world_size=world_size)
    yield
    notes.set(f"ended/{rank}", "")
    notes.wait([f"ended/{other}" for other in range(world_size)])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
