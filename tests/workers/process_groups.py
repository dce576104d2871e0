"""Rank programs on the c10d backend: see tests/hfreduce/test_c10d.py, whose tests have the same names."""

import copy
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import hfreduce

SUM, AVG, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX


def init(rank, size, store, timeout=30, **options):
    torch.set_num_threads(1)
    dist.init_process_group(
        "hfreduce",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
        **options,
    )


def of(rank, *shape, dtype=torch.float32):
    """A rank's input."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 9, shape or (5, 7), generator=generator).to(dtype)


def negated(x):
    """The same values in a view that negates its memory when it is read."""
    return torch.complex(x, -x).conj().imag


def layouts(x):
    """The same values: contiguous, transposed, with gaps, lazily negated (floats), at an odd address."""
    yield x.clone()
    yield x.t().contiguous().t()
    yield torch.stack([x, x], -1)[..., 0]
    if x.dtype is torch.float32:
        yield negated(x)
    raw = torch.empty(x.nbytes + 16, dtype=torch.uint8)
    view = torch.frombuffer(raw.numpy().data, dtype=x.dtype, count=x.numel(), offset=1).view(x.shape)
    yield view.copy_(x)


def operations(rank, size, store):
    """Every collective, in every layout, synchronous and asynchronous, with several dtypes, against the closed form."""
    init(rank, size, store)
    everyone, before = range(size), hfreduce.operations()
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
        ins = [of(r, dtype=dtype) for r in everyone]
        total = sum(ins)
        for later in (False, True):

            def done(work, later=later):
                assert (work is not None) == later
                if later:
                    work.wait()
                    assert work.is_completed() and work.is_success()

            for x in layouts(ins[rank]):
                done(dist.all_reduce(x, async_op=later))
                assert torch.equal(x, total), (dtype, x.stride())
            for x in layouts(ins[rank]):
                done(dist.reduce(x, 1, async_op=later))
                assert torch.equal(x, total if rank == 1 else ins[rank])
            for x in layouts(ins[rank]):
                done(dist.broadcast(x, 1, async_op=later))
                assert torch.equal(x, ins[1])
            for x, out in zip(
                layouts(ins[rank]), zip(*[layouts(torch.zeros_like(i)) for i in ins], strict=True), strict=True
            ):
                done(dist.all_gather(list(out), x, async_op=later))
                assert all(map(torch.equal, out, ins))
                done(dist.gather(x, list(out) if rank == 1 else None, 1, async_op=later))
                done(dist.scatter(x, list(out) if rank == 1 else None, 1, async_op=later))
                assert torch.equal(x, ins[rank])
                done(dist.all_to_all(list(out), [x] * size, async_op=later))
                assert all(map(torch.equal, out, ins))
                done(dist.reduce_scatter(x, [o.clone() for o in out], async_op=later))
                assert torch.equal(x, size * ins[rank])
            done(dist.barrier(async_op=later))
    assert hfreduce.operations() - before > 200
    uneven(rank, size)
    bases(rank, size)
    reductions(rank, size)
    refusals(rank, size)
    dist.destroy_process_group()


def lazy(rank, size, store):
    """Lazily negated views, and conjugated ones, as inputs and outputs of every collective and message."""
    init(rank, size, store)
    ins, group = [of(r, 6) for r in range(size)], dist.group.WORLD
    mine, total, whole, right, left = ins[rank], sum(ins), torch.cat(ins), (rank + 1) % size, (rank - 1) % size
    copies = torch.cat([mine] * size)
    for call, got, want in (
        (dist.all_reduce, [mine], [total]),
        (lambda x, **o: dist.reduce(x, 1, **o), [mine], [total if rank == 1 else mine]),
        (lambda x, **o: dist.broadcast(x, 1, **o), [mine], [ins[1]]),
        (lambda x, *out, **o: dist.all_gather(list(out), x, **o), [mine] * (size + 1), [mine, *ins]),
        (lambda out, x, **o: dist.all_gather_into_tensor(out, x, **o), [copies, mine], [whole, mine]),
        (lambda out, x, **o: dist.reduce_scatter_tensor(out, x, **o), [mine, whole], [size * mine, whole]),
        (lambda out, *x, **o: dist.reduce_scatter(out, list(x), **o), [mine, *ins], [size * mine, *ins]),
        (lambda out, x, **o: dist.all_to_all_single(out, x, **o), [copies, whole], [copies, whole]),
        (
            lambda *x, **o: dist.all_to_all(list(x[:size]), list(x[size:]), **o),
            [*ins, *[mine] * size],
            [*ins, *[mine] * size],
        ),
    ):
        for later in (False, True):
            views = [negated(x) for x in got]
            work = call(*views, async_op=later)
            if later:
                work.wait()
            assert all(map(torch.equal, views, want)), (call, views, want)
    xs = [negated(mine), negated(of(rank, 2, 3))]
    with dist.distributed_c10d._coalescing_manager():
        for x in xs:
            dist.all_reduce(x)
    assert torch.equal(xs[0], total) and torch.equal(xs[1], sum(of(r, 2, 3) for r in range(size)))
    for lazily in (negated, lambda x: torch.complex(x, -x).conj()):
        sent, out = lazily(mine), lazily(-mine)
        assert sent.is_neg() or sent.is_conj()
        for work in (group.send([sent], right, 0), group.recv([out], left, 0)):
            work.wait()
        assert torch.equal(out, lazily(ins[left]))
        group.allreduce([out]).wait()
        assert torch.equal(out, sum(lazily(x) for x in ins))
    with pytest.raises(ValueError, match="lazily"):
        hfreduce.Group(dist.FileStore(f"{store}.direct{rank}", 1), 0, 1).all_reduce_(negated(mine))
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}.gloo", rank=rank, world_size=size)
    gathered = [torch.zeros(6) for _ in ins]
    dist.all_gather(gathered, negated(mine))  # other backends get what torch gives them
    assert all(map(torch.equal, gathered, ins))
    dist.destroy_process_group()


def uneven(rank, size):
    """Lists of tensors of different sizes, and empty ones."""
    parts = [of(r, 3 * r) for r in range(size)]
    out = [torch.full_like(p, -1) for p in parts]
    dist.all_gather(out, parts[rank])
    assert all(map(torch.equal, out, parts))
    mine = torch.empty(3 * rank)
    dist.reduce_scatter(mine, [p + rank for p in parts])
    assert torch.equal(mine, size * parts[rank] + sum(range(size)))
    rows = [[(a + 2 * b) % 4 for b in range(size)] for a in range(size)]  # from a to b
    sent = torch.cat([torch.full((n, 2), float(10 * rank + b)) for b, n in enumerate(rows[rank])])
    back = [rows[a][rank] for a in range(size)]
    got = torch.empty(sum(back), 2)
    dist.all_to_all_single(got, sent, back, rows[rank])
    assert torch.equal(got, torch.cat([torch.full((n, 2), float(10 * a + rank)) for a, n in enumerate(back)]))
    for shape in ((0,), (0, 3)):
        x = torch.empty(shape)
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.all_gather([torch.empty(shape) for _ in range(size)], x)
        dist.all_to_all_single(torch.empty(shape), x)


def bases(rank, size):
    """The single-tensor forms, in place, too: FSDP2's all-gather reads part of its output."""
    whole = torch.full((size, 6), -1.0)
    whole[rank] = of(rank, 6)
    dist.all_gather_into_tensor(whole, whole[rank])
    want = torch.stack([of(r, 6) for r in range(size)])
    assert torch.equal(whole, want)
    shifted = torch.cat([of(rank, 6), torch.zeros(6 * size)])  # the input is another part of the output
    dist.all_gather_into_tensor(shifted[: 6 * size], shifted[:6])
    assert torch.equal(shifted[: 6 * size].view(size, 6), want)
    whole += rank
    dist.reduce_scatter_tensor(whole[rank], whole)
    assert torch.equal(whole[rank], size * want[rank] + sum(range(size)))
    out = torch.empty(size * 4, 3).t().contiguous().t()
    dist.all_gather_into_tensor(out, of(rank, 4, 3))
    assert torch.equal(out, torch.cat([of(r, 4, 3) for r in range(size)]))


def reductions(rank, size):
    everyone, op = range(size), dist.ReduceOp
    for dtype in (torch.int32, torch.uint8, torch.float16, torch.float64, torch.float8_e4m3fn):
        x = of(rank, 40, dtype=dtype)
        dist.all_reduce(x, MAX)
        assert torch.equal(x.double(), torch.stack([of(r, 40) for r in everyone]).amax(0).double())
    x = of(rank, 40)
    dist.all_reduce(x, AVG)
    torch.testing.assert_close(x, sum(of(r, 40) for r in everyone) / size)
    x = of(rank, 40, dtype=torch.int64)
    dist.all_reduce(x, op.BXOR)
    want = of(0, 40, dtype=torch.int64)
    for r in everyone[1:]:
        want ^= of(r, 40, dtype=torch.int64)
    assert torch.equal(x, want)
    for factor in (0.5, torch.tensor([0.5])):
        x = of(rank, 40)
        dist.all_reduce(x, dist._make_nccl_premul_sum(factor))
        assert torch.equal(x, sum(0.5 * of(r, 40) for r in everyone))


def refusals(rank, size):
    """Impossible calls raise ValueError before anything is sent: the group remains usable."""
    group, x = dist.group.WORLD, torch.ones(2)
    for call, words in (
        (lambda: dist.all_reduce(of(rank), dist.ReduceOp.BAND), "BAND is not defined for Float"),
        (lambda: dist.all_reduce(of(rank, dtype=torch.bool), AVG), "AVG is not defined for Bool"),
        (lambda: dist.all_reduce(of(rank).to(torch.uint16)), "SUM is not defined for UInt16"),
        (lambda: group._get_backend(x.device).broadcast([torch.eye(3).to_sparse()]), "to_dense"),
        (lambda: group.allreduce([torch.ones(2), torch.ones(2)]).wait(), "one tensor, got 2"),
        (lambda: group._allgather_base(torch.ones(3), torch.ones(3)).wait(), f"an output of {3 * size}, got 3"),
        (lambda: group.send([torch.ones(2)], size, 0).wait(), f"0 to {size - 1}, got {size}"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=words):
            call()
    dist.all_reduce(x)
    assert x[0] == size


def futures(rank, size, store):
    init(rank, size, store)
    seen = []

    def nested(future):
        """Starts another operation, and waits for it on the thread that runs callbacks."""
        (x,) = future.value()
        seen.append(x[0].item())
        return dist.all_reduce(x, async_op=True).get_future().wait()[0]

    # Many at once, of different sizes: ranks that started the nested ones in different orders would sum other tensors.
    results = [
        dist.all_reduce(torch.ones(1 + i), async_op=True).get_future().then(nested).then(lambda f: f.value() * 2)
        for i in range(40)
    ]
    for i, future in enumerate(results):
        assert torch.equal(future.wait(), torch.full((1 + i,), 2.0 * size * size))
    assert seen == [size] * 40
    # A callback that waits for what is queued behind it. Rank 1 is late, so that it cannot have run yet.
    x, y, begun = torch.ones(3), torch.ones(3), []

    def waits(future):
        while not begun:
            time.sleep(0.01)
        return begun[0].wait()[0]

    time.sleep(0.5 * rank)
    first = dist.all_reduce(x, async_op=True).get_future()
    if rank == 0:
        first = first.then(waits)
    begun.append(dist.all_reduce(y, async_op=True).get_future())
    first.wait()
    begun[0].wait()
    assert x[0] == y[0] == size
    # A future that is requested late.
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert work.get_future().done() and work.result()[0] is not None
    dist.destroy_process_group()


def splits(rank, size, store):
    """split_group, and two-dimensional meshes, on a group bound to a device."""
    init(rank, size, store)
    world, device = dist.group.WORLD, torch.device("cuda:0")
    assert world._get_backend(torch.device("cpu")) is world._get_backend(torch.device("cuda"))
    options = copy.deepcopy(world._get_backend(torch.device("cpu")).options)
    assert isinstance(options, type(hfreduce.Options()))
    world.bound_device_id = device
    with (
        mock.patch("torch.cuda.is_available", lambda: True),  # torch 2.11 checks this
        mock.patch("torch.accelerator.is_available", lambda: True),
        mock.patch("torch.accelerator.current_accelerator", lambda *_, **__: device),
    ):
        half = dist.split_group(world, [[0, 2], [1, 3]])
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=half)
        assert x.item() == 2 + 2 * (rank % 2) and dist.get_process_group_ranks(half) == [rank % 2, rank % 2 + 2]
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        for name in "ab":
            x = torch.tensor([float(rank)])
            dist.all_reduce(x, group=mesh.get_group(name))
            assert x.item() == {"a": 2 + 2 * (rank % 2), "b": 1 + 4 * (rank // 2)}[name]
        pair = dist.new_group([1, 2])
        if rank in (1, 2):
            dist.all_reduce(x, group=pair)
    world.bound_device_id = None
    other = dist.new_group(backend="gloo")  # beside it, with its own results
    x = torch.ones(1)
    dist.all_reduce(x, group=other)
    dist.all_reduce(x)
    assert x.item() == size * size
    alone = [dist.new_group([r]) for r in range(size)][rank]
    dist.all_reduce(x, group=alone)
    dist.barrier(alone)
    assert x.item() == size * size
    dist.destroy_process_group()


def messages(rank, size, store):
    """Both sides of a pair send first; batches; any source; coalesced collectives."""
    init(rank, size, store)
    right, left, n = (rank + 1) % size, (rank - 1) % size, 300_000
    for count in (10, n):
        sends = [dist.isend(torch.full((count,), float(rank + k)), right) for k in range(5)]
        x = torch.empty(count)
        for k in range(5):
            dist.recv(x, left)
            assert (x == left + k).all()
        for work in sends:
            work.wait()
    x, y = torch.full((n,), float(rank)), torch.empty(n)
    batch = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, y, left)]
    works = dist.batch_isend_irecv(batch)
    for work in works:
        work.wait()
    assert (y == left).all()
    with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu")):
        dist.send(x, right)  # must wait only at the end, or it would hang
        dist.recv(y, left)
    xs = [torch.ones(3), torch.ones(4, 2)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    assert all((x == size).all() for x in xs)
    if rank:
        dist.send(torch.tensor([rank]), 0, tag=7)
    else:
        got = torch.empty(1, dtype=torch.int64)
        senders = sorted(dist.recv(got, tag=7) for _ in range(size - 1))
        assert senders == list(range(1, size))
    dist.barrier()
    dist.destroy_process_group()


def sparse(rank, size, store):
    """all_reduce of sparse tensors: DDP of a sparse embedding; different numbers of values, none, hybrid ones;
    refusals."""
    init(rank, size, store)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(10, 4, sparse=True), torch.nn.Linear(4, 2))
    twin = copy.deepcopy(model)
    model = torch.nn.parallel.DistributedDataParallel(model)
    model(torch.tensor([rank, 1])).sum().backward()
    for r in range(size):
        (twin(torch.tensor([r, 1])).sum() / size).backward()
    for x, y in zip(model.parameters(), twin.parameters(), strict=True):
        assert x.grad.layout is y.grad.layout
        torch.testing.assert_close(x.grad.to_dense(), y.grad.to_dense())
    for dtype in (torch.float32, torch.int64):
        # rank values, the last of which all ranks have twice
        places = [torch.tensor([[*range(r), 5, 5][: r * 3], [0] * min(r + 2, r * 3)]) for r in range(size)]
        all_of = [torch.sparse_coo_tensor(p, of(p.shape[1], p.shape[1], 3, dtype=dtype), (6, 2, 3)) for p in places]
        x = all_of[rank].clone()
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        assert x.is_coalesced() and torch.equal(x.to_dense(), sum(y.to_dense() for y in all_of))
    with pytest.raises(ValueError, match=r"of sparse tensors takes ReduceOp\.SUM"):
        dist.all_reduce(x, op=MAX)
    odd = torch.sparse_coo_tensor(torch.zeros(1, 1), torch.ones(1), (3 + rank,))
    with pytest.raises(ValueError, match="of one shape"):
        dist.all_reduce(odd)
    dist.barrier()
    dist.destroy_process_group()
