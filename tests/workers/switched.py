"""Ranks of tests/haiscale/test_auto.py, which sets HAISCALE_AUTO; they use torch's names.

Each function returns what `dist` and the model looked like; a script's own errors are returned as text.
"""

import copy
import logging
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

LINES = []


class _Lines(logging.Handler):
    def emit(self, record):
        LINES.append(record.getMessage())


logging.getLogger("haiscale.auto").addHandler(_Lines())


def start(rank, size, store, backend="gloo", **options):
    options.setdefault("timeout", timedelta(seconds=60))
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size, **options)


def runs_on(group=None):
    """The group's actual backend, after a collective in it."""
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [dist.get_world_size(group)] * 3
    return (group or dist.group.WORLD)._get_backend(torch.device("cpu")).name()


def error(call, *args, **options):
    try:
        call(*args, **options)
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return None


def step(model, rank):
    torch.manual_seed(rank)
    model(torch.randn(4, 8)).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def pipelined(rank):
    """torch's pipelines access its wrapper's internals; gradients of two microbatches are averaged once."""
    alone = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    model = made()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    whole = copy.deepcopy(model.module)
    stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=alone)
    for _ in range(3):
        model.zero_grad()
        schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, target: y.sum(), scale_grads=False)
        schedule.step(x, target=torch.zeros(4))
    whole(x).sum().backward()
    for p in whole.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    return all(torch.allclose(p.grad, q.grad, atol=1e-6) for p, q in pairs)


def holds(rank):
    """Gradients that a script keeps are not overwritten by later steps."""
    model = made()
    step(model, rank)
    kept = [p.grad for p in model.parameters()]
    values = [grad.clone() for grad in kept]
    model.zero_grad()
    step(model, rank + 10)
    return all(torch.equal(a, b) for a, b in zip(kept, values, strict=True))


def made(**options):
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), **options)


def as_ever(rank, size, store):
    """What scripts query from torch is answered as if nothing had been switched."""
    from hfreduce import operations

    start(rank, size, store)
    found = {"default": runs_on(), "backend": dist.get_backend()}
    found["identity"] = dist.get_backend() is dist.Backend.GLOO
    found["twice"] = error(start, rank, size, store)
    dist.barrier(device_ids=[0])
    dist.monitored_barrier(timeout=timedelta(seconds=30))
    found["groups"] = [runs_on(dist.new_group()), runs_on(dist.new_group(backend="gloo")), runs_on(dist.new_group())]
    found["odd"] = runs_on(dist.new_group(backend="cpu:gloo"))
    found["options"] = runs_on(dist.new_group(pg_options=dist.ProcessGroupGloo._Options()))
    found["tagged"] = runs_on(dist.distributed_c10d._new_group_with_tag(pg_tag="own"))
    own = [dist.new_group([each], backend="gloo") for each in range(size)][rank]
    found["alone"] = runs_on(own)
    found["nccl"] = error(dist.new_group, backend="nccl")  # torch's error without NCCL
    found["unknown"] = error(dist.new_group, backend="neither")
    outputs = [None] * size
    dist.all_gather_object(outputs, {"rank": rank})
    assert outputs == [{"rank": each} for each in range(size)]
    before = operations()
    dist.destroy_process_group()
    for again in range(2):
        start(rank, size, f"{store}.again{again}")
        assert runs_on() == "hfreduce" and operations() > before
        dist.destroy_process_group()
    start(rank, size, f"{store}.named", backend=None)  # torch chooses
    found["none"] = runs_on()
    dist.destroy_process_group()
    start(rank, size, f"{store}.one", backend="cpu:gloo,cuda:nccl")
    found["devices"] = [runs_on(), dist.get_backend()]
    dist.destroy_process_group()
    start(rank, size, f"{store}.both", backend="cpu:gloo,cuda:gloo")
    found["both"] = [runs_on(), dist.get_backend()]
    dist.destroy_process_group()
    return {**found, "lines": LINES}


def one_store(rank, size, store):
    """A group made again in the same store, as with torchrun's agents: no old keys are read."""
    kept = dist.FileStore(f"{store}.kept", size)
    found = []
    for _ in range(3):
        dist.init_process_group("gloo", store=dist.PrefixStore("same", kept), rank=rank, world_size=size)
        group = dist.new_group([0] if not found else [0, 1])  # the same name, with other members at first
        found.append(runs_on(group if found else None))
        if len(found) == 2 and rank == 1:
            sys.modules["hfreduce._build"] = None  # from here on it cannot be imported
        dist.barrier()
        dist.destroy_process_group()
        dist.PrefixStore("apart", kept).set(f"{len(found)} {rank}", "")  # gloo would read old keys
        kept.wait([f"apart/{len(found)} {each}" for each in range(size)])
        if len(found) == 2:
            kept = dist.FileStore(f"{store}.other", size)
    return {"found": found, "lines": LINES}


def unequal(rank, size, store):
    """One rank's environment lacks HAISCALE_AUTO (set by the test)."""
    start(rank, size, store, timeout=timedelta(seconds=8))
    found = {"runs on": runs_on(), "lines": LINES}
    dist.barrier()
    dist.destroy_process_group()
    return found


def unmet(rank, size, store):
    """All ranks have hfreduce, but their rendezvous fails."""
    from hfreduce import backend

    def create(*_):
        raise RuntimeError("no route to the others")

    before, backend.create = backend.create, create if rank == 1 else backend.create
    start(rank, size, store, timeout=timedelta(seconds=8))
    found = {"runs on": runs_on(), "again": runs_on(dist.new_group())}
    found["wrapper"] = type(DistributedDataParallel(nn.Linear(2, 2))).__module__
    dist.barrier()
    dist.destroy_process_group()
    backend.create = before
    lines = list(LINES)
    start(rank, size, f"{store}.other")
    found["afterwards"] = runs_on()
    dist.destroy_process_group()
    return {**found, "lines": lines}


def wrapped(rank, size, store):
    """torch's name gives haiscale's wrapper, or torch's own if haiscale's has a reason to refuse."""
    start(rank, size, store)
    model = made()
    found = {"class": [type(model).__module__, type(model).__name__]}
    found["isinstance"] = isinstance(model, DistributedDataParallel)
    found["explains"] = model.explain().splitlines()[0]
    switched = step(model, rank)
    copied = copy.deepcopy(model)
    copied.zero_grad()
    found["copied"] = all(torch.equal(a, b) for a, b in zip(switched, step(copied, rank), strict=True))

    sparse = DistributedDataParallel(nn.Sequential(nn.Embedding(4, 2, sparse=True)))
    sparse(torch.tensor([rank])).sum().backward()
    found["sparse"] = [type(sparse).__module__, sparse.module[0].weight.grad.to_dense().tolist()]

    one_sided = nn.Sequential(nn.Embedding(4, 2, sparse=rank == 1))  # only one rank has a reason
    one_sided = DistributedDataParallel(one_sided)
    found["one side"] = type(one_sided).__module__

    more = nn.Linear(2, 2)
    more.register_buffer("own", torch.ones(2 + rank))  # torch accepts this if buffers are not broadcast
    more = DistributedDataParallel(more, broadcast_buffers=False)
    more(torch.ones(2)).sum().backward()
    found["unequal"] = [type(more).__module__, more.module.bias.grad.tolist()]

    class Own(DistributedDataParallel):
        pass

    plain = Own(copy.deepcopy(model.module))
    found["subclass"] = [type(plain).__module__, type(plain).__name__]
    found["same"] = all(torch.equal(a, b) for a, b in zip(switched, step(plain, rank), strict=True))
    found["nothing to train"] = error(DistributedDataParallel, nn.ReLU())
    found["no module"] = error(DistributedDataParallel)
    found["devices"] = error(DistributedDataParallel, nn.Linear(2, 2), device_ids=[0, 1])

    frozen = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    frozen[0].requires_grad_(False)
    frozen = DistributedDataParallel(frozen)
    step(frozen, rank)
    frozen.module[0].requires_grad_(True)  # torch silently leaves it unaveraged
    found["unfrozen"] = error(step, frozen, rank)
    found["kept"] = holds(rank)
    static = made()
    static._set_static_graph()
    found["static"] = all(torch.equal(a, b) for a, b in zip(switched, step(static, rank), strict=True))
    builtin = made()
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    found["builtin"] = torch.allclose(step(builtin, rank)[0], switched[0], atol=1e-2)

    replicated = replicate(made().module)
    step(replicated, rank)
    found["replicated"] = all(torch.equal(a, b.grad) for a, b in zip(switched, replicated.parameters(), strict=True))
    found["pipelined"] = pipelined(rank)
    found["names"] = list(model.state_dict()) == list(plain.state_dict())
    dist.barrier()
    dist.destroy_process_group()
    return {**found, "lines": LINES}
