"""Rank programs with faults on the c10d backend: see tests/hfreduce/test_c10d.py."""

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
from hfreduce import core
from hfreduce.plan import ANY, DeviceRow


def leaves(rank, size, store):
    """Ends without destroying its group, while callbacks that need the interpreter may be running."""
    init(rank, size, store)
    child = os.fork()
    if child == 0:
        sys.exit()  # a child that exits must not leave the group for its parent
    assert os.waitpid(child, 0)[1] == 0
    dist.all_reduce(torch.ones(5))
    for _ in range(20):
        dist.all_reduce(torch.ones(1000), async_op=True).get_future().then(lambda f: [0.0] * 1000)
    dist.isend(torch.ones(5), (rank + 1) % size)
    dist.recv(torch.ones(5), (rank - 1) % size)


def failing(call):
    """The error's message, and the seconds until it was raised."""
    begun = time.monotonic()
    with pytest.raises(dist.DistBackendError) as caught:
        call()
    return str(caught.value), time.monotonic() - begun


def faults(rank, size, store):
    """Mismatched calls, a late rank, an abort: each in its own group; the other groups continue."""
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
    """One rank is killed while another is in DDP's backward, a third in a receive."""
    init(rank, size, store, timeout=60)
    model = nn.parallel.DistributedDataParallel(nn.Linear(50, 50))
    for _ in range(2):  # buckets are rebuilt in the second
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


def caught(rank, size, store):
    """An exception inside a batch of messages that the program catches: later calls are unaffected."""
    init(rank, size, store)
    right, left = (rank + 1) % size, (rank - 1) % size
    with pytest.raises(NotImplementedError):
        sparse = torch.ones(4).to_sparse()
        dist.batch_isend_irecv([dist.P2POp(dist.isend, sparse, right), dist.P2POp(dist.irecv, torch.ones(4), left)])
    sent, x = dist.isend(torch.full((4,), float(rank)), right), torch.full((4,), -1.0)
    dist.recv(x, left)
    sent.wait()
    assert (x == left).all()
    x = torch.ones(4)
    dist.all_reduce(x)
    assert (x == size).all()
    batch = [dist.P2POp(dist.isend, torch.full((4,), float(rank)), right), dist.P2POp(dist.irecv, x, left)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert (x == left).all()
    dist.destroy_process_group()


def raises(rank, size, store):
    """One rank dies of an exception, another leaves while it handles one."""
    init(rank, size, store)
    gone = [dist.new_group([0, 1]), dist.new_group([0, 2])]
    dist.barrier()
    if rank == 1:
        raise ValueError("the loss is nan")
    if rank == 2:
        try:
            raise KeyError("no such sample")
        finally:
            dist.destroy_process_group()
    told = [failing(lambda group=group: dist.all_reduce(torch.ones(3), group=group))[0] for group in gone]
    return told


def forked(rank, size, store):
    """A forked child cannot use its parent's group, and does it no harm."""
    init(rank, size, store)
    group, x = dist.group.WORLD, torch.ones(2)
    dist.all_reduce(x)
    running = dist.all_reduce(x, async_op=True)
    backend = group._get_backend(torch.device("cpu"))
    path = f"{store}.child.{rank}"
    child = os.fork()
    if child == 0:
        told = []
        for call in (lambda: dist.all_reduce(x), lambda: dist.send(x, 1 - rank), running.wait, backend.abort):
            try:
                call()
            except RuntimeError as error:
                told.append(f"{type(error).__name__}: {error}")
        dist.destroy_process_group()
        with open(path, "w") as file:
            file.write("\n".join(told))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    running.wait()
    dist.all_reduce(x)
    assert (x == size**3).all()
    dist.destroy_process_group()
    with open(path) as file:
        return file.read().split("\n")


def options(rank, size, store):
    """Invalid options are refused on all ranks, not adjusted; the caller's object stays unchanged."""
    told = []
    for slot_bytes in (0, 64, 4100, 1 << 40):
        given = hfreduce.Options()
        given.slot_bytes = slot_bytes
        with pytest.raises(ValueError, match="slot_bytes must be a multiple of 64") as caught:
            init(rank, size, f"{store}.{slot_bytes}", pg_options=given)
        told.append(str(caught.value))
    given = hfreduce.Options()
    given.plan = [(257, 1, 0, 0, 64, 1)]
    with pytest.raises(ValueError, match="its kind must be known"):
        init(rank, size, f"{store}.plan", pg_options=given)
    given = hfreduce.Options()
    given.slot_bytes = 4096
    own, core.device_plan_rows = core.device_plan_rows, lambda size: [DeviceRow("all_gather", ANY, "copies").tuple()]
    init(rank, size, store, pg_options=given)
    core.device_plan_rows = own
    x = torch.arange(5000.0) + rank
    dist.all_reduce(x)
    assert torch.equal(x, size * torch.arange(5000.0) + sum(range(size)))
    assert (given.slot_bytes, given.plan, given.device_plan) == (4096, [], [])
    dist.destroy_process_group()
    return told


def barriers(rank, size, store):
    """monitored_barrier on a rank outside the group warns; a timeout of 0 is valid, and does not mean "none"."""
    init(rank, size, store)
    group = dist.new_group([0])
    if rank:
        with pytest.warns(UserWarning, match="does not belong to the given group"):
            hfreduce.monitored_barrier(group, 1)
        with pytest.raises(ValueError, match="does not belong"):
            hfreduce.describe(group)
        time.sleep(1)
        os._exit(0)
    hfreduce.monitored_barrier(group, 1)
    return failing(lambda: hfreduce.monitored_barrier(timeout=0))


def receives(rank, size, store):
    """Receives that nobody answers end with the group, without a wait; everything else is finished."""
    init(rank, size, store)
    other, big, x = 1 - rank, torch.zeros(2**20), torch.ones(3)
    answered = dist.irecv(big, other, tag=1)
    unanswered = [dist.irecv(torch.zeros(8), src=src, tag=tag) for src, tag in ((other, 2), (other, 2), (None, 3))]
    sent = dist.isend(torch.full_like(big, rank + 1.0), other, tag=1)
    summed = dist.all_reduce(x, async_op=True)
    if rank == 1:
        time.sleep(0.5)  # the other rank is waiting, and leaves first
    for work in (answered, sent, summed):
        work.wait()
    assert (big == other + 1).all() and (x == size).all()
    begun = time.monotonic()
    dist.destroy_process_group()
    seconds = time.monotonic() - begun
    for work in unanswered:
        text, _ = failing(work.wait)
        assert "rank 0 (" in text and ("before a message came" if rank == 0 else "has left the group") in text, text
    init(rank, size, f"{store}.again")
    dist.irecv(torch.zeros(8), other)
    return seconds  # this group is left at exit
