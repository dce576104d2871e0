"""Models in every layout that haiscale.checkpoint supports, saved and loaded by real ranks: see tests/haiscale.

All ranks read the same batch, so the mean of their gradients is each one's, and training is bitwise the same in every
layout and on any number of ranks.
"""

import functools
import itertools
import json
import os
import random
import signal
import time
import traceback
from datetime import timedelta
from pathlib import Path

import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import hfreduce  # noqa: F401
from haiscale import checkpoint
from haiscale.ddp import DDP
from haiscale.fsdp import FSDP
from haiscale.pipeline import PipeDream, partition
from hfnn import optim

WIDTH, SAVED, END = 128, 3, 6


class Net(nn.Module):
    """Norms with buffers, a frozen layer, a tied weight, rows not divisible among ranks, a non-persistent buffer."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 10))
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.inner[0].weight
        self.head = nn.Linear(10, 3)
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x):
        return self.head(self.inner(torch.tanh(self.tied(self.frozen(x))) * self.scale))


def build(dtype=torch.float32):
    torch.manual_seed(0)
    return Net().to(dtype)


def adamw(model):
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.02}], lr=0.01)


OPTIMIZERS = {
    "adamw": adamw,
    "8bit": lambda model: optim.AdamW(model.parameters(), lr=0.01, state_dtype="8bit"),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "several": lambda model: [
        optim.AdamW(model.inner.parameters(), lr=0.01),
        torch.optim.SGD([*model.frozen.parameters(), *model.head.parameters()], lr=0.1),
    ],
}


def train(model, optimizer, first, last, forward=None):
    optimizers = checkpoint.optimizer_state.as_list(optimizer)
    for step in range(first, last):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        (forward or model)(x).square().mean().backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
            one.param_groups[0]["lr"] *= 0.9  # as a scheduler would


class Stage(nn.Module):
    """A pipeline rank's part: some tensors of the whole model, under the whole model's names."""

    def __init__(self, whole, rank, size):
        super().__init__()
        tensors = list(checkpoint.states.named_shards(whole))
        self.shards = dict(tensors[rank::size])

    def named_shards(self):
        yield from self.shards.items()


def plain(model):
    return model, model


def torch_ddp(model):
    wrapped = nn.parallel.DistributedDataParallel(model)
    return wrapped, model


def ddp(model):
    return DDP(model), model


def fsdp(model):
    return FSDP(model), model


def torch_fsdp2(model):
    for part in (model.inner[3], model.head):
        fully_shard(part, mesh=_mesh())
    return fully_shard(model, mesh=_mesh()), model


def torch_hsdp(model):
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh), model


def _mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


LAYOUTS = {f.__name__: f for f in (plain, ddp, fsdp, torch_ddp, torch_fsdp2, torch_hsdp)}


def prepared(layout, optimizer):
    """(what is saved and loaded, its optimizer)."""
    wrapped, model = LAYOUTS[layout](build())
    return wrapped, OPTIMIZERS[optimizer](model)


def whole(model):
    return {name: _whole(tensor).clone() for name, tensor in checkpoint.states.named_shards(model)}


def _whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def reference(optimizer, last):
    """The model after `last` steps on one rank, never interrupted."""
    model = build()
    train(model, OPTIMIZERS[optimizer](model), 0, last)
    return whole(model)


def difference(found, wanted):
    """The first name whose bits differ, or None."""
    if found.keys() != wanted.keys():
        return f"names {sorted(found.keys() ^ wanted.keys())}"
    return next((name for name in wanted if not torch.equal(found[name], wanted[name])), None)


def group(rank, size, store, timeout=60):
    torch.set_num_threads(1)
    dist.init_process_group(
        "hfreduce", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )


def cases(functions):
    """The error of each case, by name, or None."""
    found = {}
    for name, function in functions.items():
        try:
            found[name] = function()
        except Exception:  # of this case; the others continue
            found[name] = traceback.format_exc()[-2500:]
    return found


# Rank programs


def saves(rank, size, store, target, combinations):
    """Trains to step 3 in each layout and saves; for stages, what one rank has trained."""
    group(rank, size, store)

    def one(layout, optimizer):
        where = Path(target, f"{layout}-{optimizer}-{size}")
        if layout == "stages":
            model = build()
            trained = OPTIMIZERS[optimizer](model)
            train(model, trained, 0, SAVED)
            stage = Stage(model, rank, size)
            mine = [tensor for tensor in stage.shards.values() if isinstance(tensor, nn.Parameter)]
            groups = [{**g, "params": [p for p in g["params"] if id(p) in map(id, mine)]} for g in trained.param_groups]
            part = torch.optim.AdamW([group for group in groups if group["params"]])
            part.state.update({p: trained.state[p] for p in mine if p in trained.state})
            checkpoint.save(where, stage, part, step=SAVED, position=100 + rank)
            return None
        model, trained = prepared(layout, optimizer)
        train(model, trained, 0, SAVED)
        future = checkpoint.save(where, model, trained, step=SAVED, async_=True, position=100 + rank)
        # Later training does not change what is saved.
        train(model, trained, SAVED, END)
        future.result(60)
        return difference(whole(model), reference(optimizer, END))

    return cases({f"{layout} {name}": lambda a=layout, b=name: one(a, b) for layout, name in combinations})


def loads(rank, size, store, target, combinations, layouts):
    """Loads every checkpoint in every layout; training then continues as if uninterrupted."""
    if size > 1:
        group(rank, size, store)

    def one(source, layout):
        optimizer = source.split("-")[1]
        model, trained = prepared(layout, optimizer)
        extra = checkpoint.load(Path(target, source), model, trained)
        assert extra["step"] == SAVED and extra["position"] == 100 + rank, extra
        train(model, trained, SAVED, END)
        return difference(whole(model), reference(optimizer, END))

    asked = [(source, layout) for source in combinations for layout in layouts]
    found = cases({f"{source} in {layout}": lambda a=source, b=layout: one(a, b) for source, layout in asked})
    if size > 1:
        others = {
            f"resumes {layout}": functools.partial(resumes, layout=layout) for layout in ("ddp", "fsdp", "pipeline")
        }
        others |= {f.__name__: f for f in (misfits, stops, cannot_write)}
        found |= cases({name: functools.partial(f, rank, f"{target}/{name}") for name, f in others.items()})
    return found


def resumes(rank, target, layout):
    """Batches and dropout differ between ranks: random numbers continue where they were."""

    def make():
        torch.manual_seed(0)
        inner = nn.Sequential(build(), nn.Dropout(0.5), nn.Linear(3, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 3))
        if layout == "pipeline":
            model = PipeDream(partition(inner, rank, 2, balance=[2, 3]), 2)
            step = functools.partial(model.forward_backward, criterion=lambda y: y.square().mean())
        else:
            model = {"ddp": DDP, "fsdp": FSDP}[layout](inner)

            def step(x):
                model(x).square().mean().backward()

        return model, torch.optim.AdamW(model.parameters()), step

    def steps(model, optimizer, step, count):
        for _ in range(count):
            step(torch.randn(4, WIDTH) + random.random())
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer, step = make()
    torch.manual_seed(rank)
    random.seed(rank)
    steps(model, optimizer, step, 2)
    checkpoint.save(target, model, optimizer, step=2)
    steps(model, optimizer, step, 3)
    other, optimizer, step = make()
    torch.manual_seed(77)
    checkpoint.load(target, other, optimizer)
    steps(other, optimizer, step, 3)
    # Running statistics that differed between ranks are restored as rank 0's.
    found, wanted = (
        {name: x for name, x in whole(m).items() if rank == 0 or layout != "fsdp" or "running" not in name}
        for m in (other, model)
    )
    return difference(found, wanted)


def misfits(rank, target):
    """Only rank 1's model differs, but all ranks raise, and nothing was loaded."""
    checkpoint.save(target, build(), step=0)
    model = build()
    nn.init.zeros_(model.inner[0].weight)
    if rank == 1:
        model.head = nn.Linear(10, 4)
        model.more = nn.Linear(2, 2)
    try:
        checkpoint.load(target, model)
    except ValueError as error:
        text = str(error)
    wanted = ("more.bias, model.more.weight are not in it", "head.bias is (3,) there and (4,) here")
    return None if all(part in text for part in wanted) and not model.inner[0].weight.any() else text


def stops(rank, target):
    """A signal received by one rank counts for all."""
    asked = checkpoint.on_signal()
    before = asked()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return None if not before and asked() and asked() else f"asked {before}, then {asked()}"


def cannot_write(rank, target):
    """One rank cannot write: all name it and the reason, and earlier checkpoints stay."""
    model, write = build(), checkpoint.dcp.FileSystemWriter.write_data
    checkpoint.save(target, model, step=1)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    if rank == 1:
        checkpoint.dcp.FileSystemWriter.write_data = full
    try:
        checkpoint.save(target, model, step=2)
    except RuntimeError as error:
        text = str(error)
    checkpoint.dcp.FileSystemWriter.write_data = write
    assert checkpoint.latest(target).name == "step-00000001"
    checkpoint.save(target, model, step=2)
    right = "step 2 was not written: rank 1: OSError" in text and "No space left" in text
    return None if right and checkpoint.latest(target).name == "step-00000002" else text


def killed(rank, size, store, target):
    """One child for each of a save's disk operations, killed there: nothing is harmed.

    Returns the interrupted operation, and what was wrong afterwards.
    """
    torch.set_num_threads(1)
    model, found = nn.Linear(64, 64), []

    def fill(value):
        for p in model.parameters():
            nn.init.constant_(p, value)

    fill(1)
    checkpoint.save(target, model, step=1)
    last = 1
    for point in range(100):
        child = os.fork()
        if child == 0:
            fill(last + 1)
            _kill_at(point)
            checkpoint.save(target, model, step=last + 1, keep=1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        fill(-1)
        step = checkpoint.load(target, model)["step"]
        values = {float(x) for p in model.parameters() for x in p.detach().flatten()}
        there = sorted(path.name for path in Path(target).iterdir())
        found.append(
            {"killed": os.WIFSIGNALED(status), "before": last, "step": step, "values": list(values), "there": there}
        )
        last = step
        if not os.WIFSIGNALED(status):
            return found


def _kill_at(point):
    """Kills this process before call number `point` to any of these."""
    calls = iter(range(1000))
    for module, name in ((os, "fsync"), (os, "mkdir"), (os, "rename"), (os, "rmdir"), (os, "unlink")):

        def wrapped(*arguments, real, **options):
            if next(calls) == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        setattr(module, name, functools.partial(wrapped, real=getattr(module, name)))


def saves_for_ever(rank, size, store, target, timeout, layout):
    """Trains and saves until a rank is gone: what the others are told, and when."""
    group(rank, size, store, timeout)
    model = {"ddp": DDP, "fsdp": FSDP}[layout](build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    try:
        for step in itertools.count(1):
            train(model, optimizer, step - 1, step)
            checkpoint.save(target, model, optimizer, step=step, keep=2, async_=step % 2 == 0)
            if step == 3:
                ranks.reached(store, "saves")
    except dist.DistBackendError as error:
        Path(f"{store}.told").write_text(json.dumps({"text": str(error), "at": time.monotonic()}))
        ranks.reached(store, "told")  # leaving a group with a stopped rank takes a while


def goes_on(target):
    """Continues on one rank from a killed run: differences to an uninterrupted run."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first = checkpoint.load(target, model, optimizer)["step"]
    train(model, optimizer, first, first + 2)
    plain = build()
    train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), 0, first + 2)
    return first, difference(whole(model), whole(plain))
