"""What each rank does where something goes wrong on the c10d backend: see tests/hfreduce/test_c10d.py."""

import os
import signal
import sys
import time
from datetime import timedelta

import pytest
import ranks
import torch
import torch.distributed as dist
from process_groups import init
from torch import nn

import hfreduce


def leaves(rank, size, store):
    """Ends without having ended its group, while callbacks that want the interpreter may be running."""
    init(rank, size, store)
    child = os.fork()
    if child == 0:
        sys.exit()  # a child that ends says no goodbye in its parent's name
    assert os.waitpid(child, 0)[1] == 0
    dist.all_reduce(torch.ones(5))
    for _ in range(20):
        dist.all_reduce(torch.ones(1000), async_op=True).get_future().then(lambda f: [0.0] * 1000)
    dist.isend(torch.ones(5), (rank + 1) % size)
    dist.recv(torch.ones(5), (rank - 1) % size)


def failing(call):
    """The message with which it fails, and the seconds until it did."""
    begun = time.monotonic()
    with pytest.raises(dist.DistBackendError) as caught:
        call()
    return str(caught.value), time.monotonic() - begun


def faults(rank, size, store):
    """Calls that differ, a rank that is late, an abort: each in a group of its own; the others go on."""
    init(rank, size, store)
    found = {}
    mismatch, late, monitored, aborted = [dist.new_group() for _ in range(4)]
    found["mismatch"] = failing(lambda: dist.all_reduce(torch.ones(3 + (rank == 1)), group=mismatch))
    found["afterwards"] = failing(lambda: dist.barrier(mismatch))
    late.set_timeout(timedelta(seconds=1))
    if rank != 1:
        found["late"] = failing(lambda: dist.all_reduce(torch.ones(3), group=late))
        found["monitored"] = failing(lambda: hfreduce.monitored_barrier(monitored, timeout=1))
        work = dist.all_reduce(torch.ones(3), group=aborted, async_op=True)
        found["aborted"] = failing(work.wait)
        found["error"] = str(aborted._get_backend(torch.device("cpu")).get_error())
    else:
        time.sleep(3.5)
        aborted.abort()
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x[0] == size
    dist.destroy_process_group()
    init(rank, size, f"{store}.again")
    dist.all_reduce(x)
    assert x[0] == size * size
    dist.destroy_process_group()
    return found


def death(rank, size, store):
    """One rank is killed while another is in backward of DDP, a third in a receive."""
    init(rank, size, store, timeout=60)
    model = nn.parallel.DistributedDataParallel(nn.Linear(50, 50))
    for _ in range(2):  # buckets are built again in the second
        model(torch.ones(2, 50)).sum().backward()
    dist.barrier()
    ranks.reached(store, "works")
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    call = model(torch.ones(2, 50)).sum().backward if rank == 0 else lambda: dist.recv(torch.ones(2), 1)
    begun = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        call()
    first = str(caught.value), time.monotonic() - begun
    again = failing(dist.barrier)
    dist.destroy_process_group()
    return {"first": first, "again": again}
