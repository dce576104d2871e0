"""What every gloo rank does before and after its work."""

import faulthandler
import os
import sys
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def process_group(rank: int, world_size: int, store: str):
    """A gloo group around the work of one rank, and the end of the process after it.

    When all ranks have done their work the process leaves as it is, without taking the group or the interpreter down: a
    thread of gloo's that lets go of a Python object after that aborts it now and then ("terminate called without an
    active exception"). The ranks wait for each other at the store: one that leaves early takes the others' connections
    down.
    """
    faulthandler.enable()  # where in Python a rank was, should it abort
    torch.set_num_threads(1)
    notes = dist.FileStore(store, world_size)
    dist.init_process_group("gloo", store=notes, rank=rank, world_size=world_size)
    yield
    notes.set(f"ended/{rank}", "")
    notes.wait([f"ended/{other}" for other in range(world_size)])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
