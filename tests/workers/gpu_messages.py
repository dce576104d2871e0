"""Messages between GPUs, by rank: see tests/hfreduce/test_gpu_messages.py, whose tests have the same names."""

import time
from datetime import timedelta

import ranks
import torch
import torch.distributed as dist
from gpu_groups import layouts, of, same, start, until_death
from process_faults import failing

import hfreduce

RING = 32 << 20  # bytes on their way from one GPU to another without the receiver's host


def messages(rank, size, store):
    """Of all sizes and layouts, before and after the ranks' rendezvous, from one rank and from any, in stream order."""
    gpu = start(rank, size, store)
    around(rank, size, gpu, [3, 1000], torch.float32)
    dist.all_reduce(torch.ones(1, device=gpu))
    for _ in range(2):
        around(rank, size, gpu, [0, 1, 7, 70_001, 3], torch.float32)
    for dtype in (torch.bfloat16, torch.uint8, torch.complex64, torch.int64):
        around(rank, size, gpu, [5, 300_001], dtype)
    around(rank, size, gpu, [100] * 40, torch.float16)
    around(rank, size, gpu, [RING // 4 + 1, 17, 3 * RING // 4, RING // 4], torch.float32)
    strided(rank, size, gpu)
    tags(rank, size, gpu)
    anybody(rank, size, gpu)
    ordered(rank, size, gpu)
    waited = asynchronous(rank, size, gpu)
    described = hfreduce.describe()
    dist.destroy_process_group()
    return {"described": described, "waited": waited}


def around(rank, size, gpu, counts, dtype):
    """To the next rank, concurrently: both sides send first, one by one and in a batch."""
    right, left = (rank + 1) % size, (rank - 1) % size

    def values(who):
        return [of(100 * who + i, count, dtype=dtype) for i, count in enumerate(counts)]

    for batched in (False, True):
        got = [torch.full((count,), 3, dtype=dtype, device=gpu) for count in counts]
        if batched:
            sends = [dist.P2POp(dist.isend, x.to(gpu), right) for x in values(rank)]
            works = dist.batch_isend_irecv(sends + [dist.P2POp(dist.irecv, y, left) for y in got])
        else:
            works = [dist.isend(x.to(gpu), right) for x in values(rank)] + [dist.irecv(y, left) for y in got]
        for work in works:
            work.wait()
        for y, wanted in zip(got, values(left), strict=True):
            same(y, wanted, f"{len(wanted)} {dtype} from rank {left}, {'in a batch' if batched else 'one by one'}")


def strided(rank, size, gpu):
    right, left = (rank + 1) % size, (rank - 1) % size
    for number, x in enumerate(layouts(of(rank, 5000), gpu)):
        for other, y in enumerate(layouts(torch.zeros(5000), gpu)):
            work = dist.isend(x, right)
            dist.recv(y, left)
            work.wait()
            same(y, of(left, 5000), f"of layout {number} into {other}")


def tags(rank, size, gpu):
    """Received in another order than sent."""
    right, left = (rank + 1) % size, (rank - 1) % size
    works = [dist.isend(of(rank + tag, 1000).to(gpu), right, tag=tag) for tag in (5, 0, 6)]
    for tag in (6, 5, 0):
        y = torch.zeros(1000, device=gpu)
        dist.recv(y, left, tag=tag)
        same(y, of(left + tag, 1000), f"tag {tag}")
    for work in works:
        work.wait()


def anybody(rank, size, gpu):
    if rank:
        dist.send(torch.full((1000,), float(rank), device=gpu), 0)
        return
    seen = []
    for _ in range(size - 1):
        y = torch.zeros(1000, device=gpu)
        source = dist.recv(y)
        same(y, torch.full((1000,), float(source)), f"rank {source}")
        seen.append(source)
    assert sorted(seen) == list(range(1, size)), seen


def ordered(rank, size, gpu):
    """A stream's earlier work is sent, its later work comes after, and nothing is freed too early."""
    right, left = (rank + 1) % size, (rank - 1) % size
    for count in (1000, 3 * RING // 8):
        side, other = torch.cuda.Stream(), torch.cuda.Stream()
        x, y = torch.zeros(count, device=gpu), torch.zeros(count, device=gpu)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000 * (rank == 0))
            x.fill_(rank + 1)
            work = dist.isend(x, right)
        with torch.cuda.stream(other):
            dist.recv(y, left)
            z = y + 1
        with torch.cuda.stream(side):
            work.wait()
            x.fill_(-1)
        torch.cuda.synchronize()
        same(z, torch.full((count,), left + 2.0), f"ordered, {count}")
    for i in range(30):
        torch.cuda._sleep(500_000)
        work = dist.isend(torch.full((100_000,), float(i), device=gpu), right)
        torch.full((100_000,), -1.0, device=gpu)
        y = torch.empty(100_000, device=gpu)
        dist.recv(y, left)
        same(y, torch.full((100_000,), float(i)), f"kept, {i}")
        work.wait()


def asynchronous(rank, size, gpu):
    """Seconds that the host waits in `wait()` while the sender's GPU is busy for a long time."""
    right, left = (rank + 1) % size, (rank - 1) % size
    x, y = torch.full((1000,), float(rank), device=gpu), torch.zeros(1000, device=gpu)
    dist.barrier()
    torch.cuda._sleep(2_000_000_000)
    works = [dist.isend(x, right), dist.irecv(y, left)]
    begun = time.monotonic()
    for work in works:
        work.wait()
    waited = time.monotonic() - begun
    same(y, torch.full((1000,), float(left)), "behind a busy GPU")
    return waited


def acquainted(group, rank, gpu):
    """Sends this group's first messages from rank 0 to rank 1; later ones go from GPU to GPU where possible."""
    dist.all_reduce(torch.ones(1, device=gpu), group=group)
    for _ in range(2):
        if rank == 0:
            dist.send(torch.ones(1, device=gpu), 1, group=group)
        if rank == 1:
            dist.recv(torch.ones(1, device=gpu), 0, group=group)
        dist.barrier(group)


def late(rank, size, store):
    """Mismatched sizes, and a receiver that does not come."""
    gpu = start(rank, size, store)
    differs, slow = dist.new_group(timeout=timedelta(seconds=20)), dist.new_group()
    x = torch.ones(RING // 2, device=gpu)
    found = {}
    for group in (differs, slow):
        acquainted(group, rank, gpu)
    slow.set_timeout(timedelta(seconds=2))
    if rank == 0:
        found["differs"] = failing(lambda: [dist.send(x[:100], 1, group=differs), dist.recv(x[:1], 1, group=differs)])
        found["late"] = failing(lambda: dist.send(x, 1, group=slow))
    elif rank == 1:
        found["differs"] = failing(lambda: dist.recv(x[:99], 0, group=differs))
        time.sleep(4)
        found["late"] = failing(lambda: dist.recv(x, 0, group=slow))
    torch.cuda.synchronize()
    y = torch.ones(5, device=gpu)
    dist.all_reduce(y)
    same(y, torch.full((5,), float(size)), "afterwards")
    dist.destroy_process_group()
    return found


def death(rank, size, store, count, number):
    """One rank is killed, or stopped, while all send to one another."""
    gpu = start(rank, size, store, timeout=5)
    x, y = torch.zeros(count, device=gpu), torch.zeros(count, device=gpu)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    ranks.reached(store, "works")

    def call():
        work = dist.isend(x, (rank + 1) % size)
        dist.recv(y, (rank - 1) % size)
        work.wait()

    return until_death(rank, number, call)
