"""Rank programs on CUDA tensors: see tests/hfreduce/test_gpu.py, whose tests have the same names."""

import os
import threading
import time
from datetime import timedelta

import pytest
import ranks
import torch
import torch.distributed as dist
from process_faults import failing
from process_groups import init

import hfreduce

OP = dist.ReduceOp


def start(rank, size, store, **options):
    gpu = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(gpu)
    if "HFREDUCE_TEST_HOSTS" in os.environ:
        options["pg_options"] = given = hfreduce.Options()
        given.host_id, given.interface = f"host{rank * int(os.environ['HFREDUCE_TEST_HOSTS']) // size}", "lo"
    init(rank, size, store, **options)
    return gpu


def of(rank, *shape, dtype=torch.float32):
    """A rank's input, on the CPU: small integers, whose sums are exact in all dtypes."""
    return torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def layouts(x, gpu):
    """The same values on the GPU: contiguous, with gaps, and aligned to one element only."""
    yield x.to(gpu)
    yield torch.stack([x, x], -1).to(gpu)[..., 0]
    yield torch.empty(x.numel() + 1, dtype=x.dtype, device=gpu)[1:].view(x.shape).copy_(x)


def same(x, y, what):
    x = x.cpu()
    if not torch.equal(x, y):
        wrong = (x != y).flatten().nonzero().flatten()
        i = int(wrong[0])
        got, wanted = x.flatten()[i].item(), y.flatten()[i].item()
        raise AssertionError(f"{what}: {len(wrong)} of {x.numel()} are wrong, the first at {i}: {got}, not {wanted}")


def operations(rank, size, store, device_id=False):
    """Every collective with several sizes and dtypes, synchronous and asynchronous, against the closed form; then the
    rest."""
    gpu = torch.device("cuda", rank % torch.cuda.device_count())
    start(rank, size, store, **({"device_id": gpu} if device_id else {}))
    for dtype, counts in (
        (torch.float32, (0, 1, 7, 1000, 70_001, 1_000_003)),
        (torch.bfloat16, (3, 4096, 300_001)),
        (torch.float16, (513,)),
        (torch.int64, (5, 33_333)),
        (torch.uint8, (11, 100_003)),
        (torch.complex64, (77,)),
    ):
        for count in counts:
            for later in (False, True):
                sized(rank, size, gpu, dtype, count, later)
    rest(rank, size, gpu)
    described = hfreduce.describe()
    dist.destroy_process_group()
    return described


def sized(rank, size, gpu, dtype, count, later):
    ins = [of(r, count, dtype=dtype) for r in range(size)]
    total = sum(ins)

    def done(work):
        assert (work is not None) == later
        if later:
            work.wait()

    told = f"{dtype} {count} {'later' if later else 'at once'}"
    for number, x in enumerate(layouts(ins[rank], gpu)):
        what = f"{told} layout {number}"
        done(dist.all_reduce(x, async_op=later))
        same(x, total, f"all_reduce {what}")
        done(dist.broadcast(x.copy_(ins[rank]), 1, async_op=later))
        same(x, ins[1], f"broadcast {what}")
        x.copy_(ins[rank])
        out = torch.full((size * count,), 3, dtype=dtype, device=gpu)
        done(dist.all_gather_into_tensor(out, x.contiguous(), async_op=later))
        same(out, torch.cat(ins), f"all_gather {what}")
        out = [torch.full_like(x, 3) for _ in ins]
        done(dist.all_gather(out, x, async_op=later))
        same(torch.cat(out), torch.cat(ins), f"all_gather of a list {what}")
        done(dist.reduce(x, 1, async_op=later))
        same(x, total if rank == 1 else ins[rank], f"reduce {what}")
    blocks = torch.cat([i + r for r, i in enumerate([ins[rank]] * size)]) if dtype != torch.uint8 else None
    if blocks is not None:
        out = torch.empty(count, dtype=dtype, device=gpu)
        done(dist.reduce_scatter_tensor(out, blocks.to(dtype).to(gpu), async_op=later))
        same(out, total + torch.tensor(size * rank, dtype=dtype), f"reduce_scatter {told}")
    sent = torch.cat([ins[rank]] * size).to(gpu)
    got = torch.empty_like(sent)
    done(dist.all_to_all_single(got, sent, async_op=later))
    same(got, torch.cat(ins), f"all_to_all {told}")


def rest(rank, size, gpu):
    """In place, uneven, other reductions, messages, objects, coalesced ones."""
    whole = torch.full((size, 999), -1.0, device=gpu)
    whole[rank] = of(rank, 999).to(gpu)
    dist.all_gather_into_tensor(whole, whole[rank])
    same(whole, torch.stack([of(r, 999) for r in range(size)]), "all_gather in place")
    dist.reduce_scatter_tensor(whole[rank], whole)
    same(whole[rank], size * of(rank, 999), "reduce_scatter in place")
    x = of(rank, 5000).to(gpu)
    for op, want in (
        (OP.MAX, torch.stack([of(r, 5000) for r in range(size)]).amax(0)),
        (OP.AVG, sum(of(r, 5000) for r in range(size)) / size),
        (dist._make_nccl_premul_sum(0.5), sum(0.5 * of(r, 5000) for r in range(size))),
    ):
        y = x.clone()
        dist.all_reduce(y, op)
        torch.testing.assert_close(y.cpu(), want)
    rows = [[(a + 2 * b) % 4 for b in range(size)] for a in range(size)]  # from a to b
    sent = torch.cat([torch.full((n, 2), float(10 * rank + b)) for b, n in enumerate(rows[rank])]).to(gpu)
    back = [rows[a][rank] for a in range(size)]
    got = torch.empty(sum(back), 2, device=gpu)
    dist.all_to_all_single(got, sent, back, rows[rank])
    same(got, torch.cat([torch.full((n, 2), float(10 * a + rank)) for a, n in enumerate(back)]), "uneven all_to_all")
    right, left = (rank + 1) % size, (rank - 1) % size
    y = torch.empty_like(x)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, y, left)]):
        work.wait()
    same(y, of(left, 5000), "messages")
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        xs = [torch.ones(3, device=gpu), torch.ones(4, 2, device=gpu)]
        for each in xs:
            dist.all_reduce(each)
    manager.wait()
    assert all((each == size).all() for each in xs)
    everybody = [None] * size
    dist.all_gather_object(everybody, x if rank == 0 else rank)
    same(everybody[0], of(0, 5000), "an object")
    with pytest.raises((ValueError, RuntimeError), match="on one device"):
        dist.all_gather([torch.empty(4)] * size, torch.ones(4, device=gpu))
    dist.barrier()


def streams(rank, size, store):
    """Earlier work on the caller's stream is done first, later work waits, and nothing is freed too early."""
    gpu = start(rank, size, store)
    n, busy = 1 << 20, 50_000_000  # cycles: tens of milliseconds
    dist.all_reduce(torch.ones(n, device=gpu))
    for later in (False, True):
        side, other = torch.cuda.Stream(), torch.cuda.Stream()
        x = torch.zeros(n, device=gpu)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(busy * (rank == 0))
            x.fill_(rank + 1)
            work = dist.all_reduce(x, async_op=later)
            if not later:
                y = x + 1
        if later:
            with torch.cuda.stream(other):
                work.wait()
                y = x + 1
        torch.cuda.synchronize()
        same(y, torch.full((n,), size * (size + 1) / 2 + 1), f"ordered, {'later' if later else 'at once'}")
    results = []
    for i in range(30):  # works waited for only by their futures, among allocations of the same size
        x = torch.full((n,), float(i), device=gpu)
        torch.cuda._sleep(busy // 100)
        out = torch.empty(size * n, device=gpu)
        results.append(dist.all_gather_into_tensor(out, x, async_op=True).get_future())
        del x, out
        torch.full((n,), -1.0, device=gpu)
    for i, future in enumerate(results):
        (out,) = future.wait()
        same(out, torch.full((size * n,), float(i)), f"kept, {i}")
    seen = []
    for i in range(10):
        x = torch.full((1000 + i,), float(rank), device=gpu)
        future = dist.all_reduce(x, async_op=True).get_future()
        seen.append(future.then(lambda f: dist.all_reduce(f.value()[0] * 2, async_op=True).get_future().wait()[0]))
    for i, future in enumerate(seen):
        same(future.wait(), torch.full((1000 + i,), float(size * (size - 1) * size)), "nested")
    large = torch.ones(2, 10 << 20, device=gpu)
    out = torch.empty(size * (10 << 20), device=gpu)
    works = [dist.all_reduce(large[i], async_op=True) for i in (0, 1, 0, 0, 1)]  # without waits in between
    works += [dist.all_gather_into_tensor(out, large[0], async_op=True), dist.all_reduce(out, async_op=True)]
    for work in works:
        work.wait()
    same(large, torch.tensor([[size**3.0], [size**2.0]]).expand_as(large), "in the order in which they were given")
    same(out, torch.full_like(out, size**4.0, device="cpu"), "in the order in which they were given, gathered")
    work = dist.all_reduce(torch.ones(n, device=gpu), async_op=True)
    work.wait()
    torch.cuda.synchronize()
    assert work.is_completed()
    dist.destroy_process_group()


def graphs(rank, size, store, assisted=False):
    """Captured and replayed; or refused before anything is sent. assisted: all collectives are CPU-assisted."""
    gpu = start(rank, size, store)
    x = torch.ones(3000, device=gpu)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    described = hfreduce.describe()
    found = {
        "peers": "reach each other's memory" in described,
        "mapped": "kernels over mapped memory" in described and not assisted,
    }
    static, large, huge = (torch.zeros(count, device=gpu) for count in (3000, 1 << 20, 20 << 20))
    dist.all_reduce(huge)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    calls = [lambda: dist.broadcast(huge, 0), lambda: dist.all_reduce(static)]  # the second by copies if `assisted`
    for call in [] if found["peers"] else calls[: 1 if found["mapped"] else 2]:
        with pytest.raises(RuntimeError, match="cannot be captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            call()
        torch.cuda.synchronize()
        dist.all_reduce(x)
    if not any(found.values()):
        dist.destroy_process_group()
        return found
    blocks, third = torch.zeros(size, 500, device=gpu), torch.zeros(500, device=gpu)
    with torch.cuda.graph(graph):
        dist.all_reduce(static)
        dist.all_gather_into_tensor(blocks, third)
        dist.reduce_scatter_tensor(third, blocks)
        dist.broadcast(third, size - 1)
        work = dist.all_reduce(large, async_op=True)
        out = static + 1
        work.wait()
        again = large + 1
    for i in range(20):
        static.fill_(i + rank)
        large.fill_(i - rank)
        third.fill_(i + 2 * rank)
        graph.replay()
        if i % 3 == 0:
            dist.all_reduce(x)  # in between, on the same stream
        same(out, torch.full((3000,), size * i + size * (size - 1) / 2 + 1), f"replay {i}")
        same(third, torch.full((500,), float(size * (i + 2 * (size - 1)))), f"replay {i}, in blocks")
        same(again, torch.full((1 << 20,), size * i - size * (size - 1) / 2 + 1), f"replay {i}, large")
    torch.cuda.synchronize()
    dist.destroy_process_group()
    return found


def copies(rank, size, store):
    """All-gathers of many sizes, up to some that wrap around the ring, mixed with kernels; or refused, in a graph."""
    gpu = start(rank, size, store)
    y = torch.ones(1 << 20, device=gpu)
    for count in (1, 70_001, 5_000_003, 40_000_001):
        blocks = [torch.arange(count, dtype=torch.int32) + 7 * r for r in range(size)]
        for later in (False, True):
            what = f"all_gather {count} {'later' if later else 'at once'}"
            works = [dist.all_reduce(y, async_op=later)]
            out, other = (torch.full((size, count), 3, dtype=torch.int32, device=gpu) for _ in range(2))
            mine, x = out[rank].copy_(blocks[rank]), blocks[rank].to(gpu)
            works.append(dist.all_gather_into_tensor(out.view(-1), mine, async_op=later))
            works.append(dist.all_gather_into_tensor(other.view(-1), x, async_op=later))
            for work in works if later else []:
                work.wait()
            x.fill_(-1)  # no longer needed
            dist.all_reduce(y, OP.AVG)
            same(out, torch.stack(blocks), f"{what} in place")
            same(other, torch.stack(blocks), what)
    same(y, torch.full((1 << 20,), float(size) ** 8), "all_reduce")
    with pytest.raises(RuntimeError, match="cannot be captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        dist.all_gather_into_tensor(other.view(-1), x)
    torch.cuda.synchronize()
    dist.all_gather_into_tensor(other.view(-1), x.fill_(rank))
    same(other[:, 0], torch.arange(size, dtype=torch.int32), "after a graph")
    described = hfreduce.describe()
    dist.destroy_process_group()
    return described


def gather(x, **options):
    out = torch.empty(dist.get_world_size() * x.numel(), device=x.device)
    return dist.all_gather_into_tensor(out, x, **options)


def late(rank, size, store, count=1 << 20, gathers=False):
    """One rank does not come, one makes another call: an error in time, and the process continues."""
    gpu = start(rank, size, store)
    call = gather if gathers else dist.all_reduce
    x = torch.ones(count, device=gpu)
    call(x)
    torch.cuda.synchronize()
    slow, differs = dist.new_group(timeout=timedelta(seconds=20)), dist.new_group()
    for group in (slow, differs):
        call(x, group=group)
    torch.cuda.synchronize()
    found = {}
    slow.set_timeout(timedelta(seconds=2))

    def waits(group, y):
        call(y, group=group)
        torch.cuda.synchronize()
        time.sleep(0.3)  # lets the host learn of the device's error
        call(y, group=group)

    found["differs"] = failing(lambda: waits(differs, x[: count - (rank == 1)]))
    if rank == 1:
        time.sleep(4)
    else:
        found["late"] = failing(lambda: waits(slow, x))
    y = torch.ones(5, device=gpu)
    dist.all_reduce(y)
    same(y, torch.full((5,), float(size)), "afterwards")
    dist.destroy_process_group()
    return found


def death(rank, size, store, count, number, gathers=False):
    """One rank is killed, or stopped, while the others are in the middle of many collectives."""
    gpu = start(rank, size, store, timeout=5)
    call = gather if gathers else dist.all_reduce
    x = torch.zeros(count, device=gpu)
    call(x)
    torch.cuda.synchronize()
    ranks.reached(store, "works")

    return until_death(rank, number, lambda: call(x, async_op=True).wait())


def until_death(rank, number, call):
    """Calls repeatedly until rank 1 gets the signal; returns what the others are told, and how soon all has ended."""

    def runs():
        for _ in range(1_000_000):
            call()
            torch.cuda.synchronize()

    if rank == 1:
        threading.Timer(1.0, os.kill, (os.getpid(), number)).start()
        runs()
    with pytest.raises(dist.DistBackendError) as caught:
        runs()
    begun = time.monotonic()
    torch.cuda.synchronize()  # kernels have ended, and streams have been released
    again = failing(dist.barrier)
    dist.destroy_process_group()
    return {"message": str(caught.value), "again": again[0], "seconds": time.monotonic() - begun}
