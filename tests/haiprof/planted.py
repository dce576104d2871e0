"""Ranks for the tests of haiprof: training with 50 ms planted somewhere, which the ranks time themselves."""

import contextlib
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from haiprof import collectives
from haiprof.collector import Collector

PLANTED, STEPS = 0.05, 12
real_time = time.time


class Clock:
    """Seconds that this process has spent in each named activity."""

    def __init__(self):
        self.seconds, self.armed = {}, False

    def __call__(self, name, call, *args):
        begin = time.perf_counter()
        try:
            return call(*args)
        finally:
            self.seconds.setdefault(name, []).append(time.perf_counter() - begin)

    def plant(self, place):
        if self.armed:
            self(f"planted {place}", time.sleep, PLANTED)


class Data(Dataset):
    def __init__(self, plant):
        self.plant = plant

    def __len__(self):
        return STEPS

    def __getitem__(self, i):
        self.plant()
        return torch.randn(8)


class Model(nn.Module):
    def __init__(self, forward, backward):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.plants = forward, backward

    def forward(self, x):
        forward, backward = self.plants
        forward()
        y = self.last(self.first(x))
        if y.requires_grad:
            y.register_hook(lambda grad: backward())  # before anything in backward
        return y


class Optimizer(torch.optim.SGD):
    def __init__(self, *args, plant, **kwargs):
        super().__init__(*args, **kwargs)
        self.plant = plant

    @torch.no_grad()
    def step(self, closure=None):
        self.plant()
        return super().step(closure)


@contextlib.contextmanager
def clock_is_ahead(seconds):
    """Simulates another host's clock: shifts this rank's clock and its flight recorder."""
    now, now_ns, entries = time.time, time.time_ns, collectives.Arrivals._entries

    def moved(self):
        for group, entry in entries(self):
            yield group, {**entry, "time_created_ns": entry["time_created_ns"] + int(seconds * 1e9)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: now() + seconds)
        patch.setattr(time, "time_ns", lambda: now_ns() + int(seconds * 1e9))
        patch.setattr(collectives, "time", time.time)
        patch.setattr(collectives.Arrivals, "_entries", moved)
        yield


def trains_on_two_hosts(rank, size, store, ahead, **more):
    """`trains`, with the clock of rank 1 shifted by `ahead` seconds."""
    with pytest.MonkeyPatch.context() as patch, clock_is_ahead(ahead if rank == 1 else 0.0):
        for name, value in {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
            patch.setenv(name, value)
        return trains(rank, size, store, hz=10, **more)


def trains(rank, size, store, profile, where, slow=None, backend="gloo", hz=1):
    """Trains with DDP. In `where` ("all": in each phase), rank `slow` (None: each) sleeps PLANTED seconds in each step.
    Returns its own timings by phase, without the first step, and when it entered the collectives.
    """
    if backend == "hfreduce":
        import hfreduce  # noqa: F401
    collectives.prepare()
    dist.init_process_group(backend, store=dist.FileStore(store, size), rank=rank, world_size=size)
    clock = Clock()

    def plants(place):
        here = (where == place or (where == "all" and place != "all_reduce")) and slow in (None, rank)
        return lambda: clock.plant(place) if here else None

    torch.manual_seed(rank)
    model = Model(plants("forward"), plants("backward"))
    first = model.first.weight
    arrivals = {"backward": [], "all_reduce": []}
    first.register_post_accumulate_grad_hook(lambda p: arrivals["backward"].append(real_time()))
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = Optimizer(model.parameters(), lr=0.01, plant=plants("optimizer"))
    collector = Collector(profile, hz).start()
    dist.barrier()
    data = iter(DataLoader(Data(plants("data")), batch_size=1))
    for step in range(STEPS):
        clock.armed = step > 0
        if step == 1:
            clock.seconds.clear()
        x = clock("data", next, data)
        loss = clock("forward", model, x).square().sum()
        clock("backward", loss.backward)
        clock("optimizer", optimizer.step)
        plants("all_reduce")()
        arrivals["all_reduce"].append(real_time())
        clock("wait", dist.all_reduce, torch.ones(1))
    collector.stop()
    dist.barrier()
    dist.destroy_process_group()
    return {"seconds": clock.seconds, "arrivals": arrivals}
