"""What every gloo rank does before and after its work."""

import os
import sys
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def process_group(rank: int, world_size: int, store: str):
    """A gloo group around the work of one rank, and the end of the process after it.

    The process leaves without taking the interpreter down: a thread of gloo's that lets go of a Python object after
    that aborts it now and then ("terminate called without an active exception").
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    yield
    dist.barrier()  # a rank that leaves early takes the other's connections down
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
