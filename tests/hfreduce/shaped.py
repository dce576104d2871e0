"""A rank of the speed test between hosts, see test_hierarchy.py: all_reduce by hfreduce and by gloo, in turns."""

import os
import time

import torch
import torch.distributed as dist
from faulty import FLOAT32, connect


def all_reduces(rank, size, store, *, count, rounds):
    """Seconds per call of both, and whether all results were right."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo", store=dist.FileStore(store + ".gloo", size), rank=rank, world_size=size)
    comm = connect(rank, size, store)
    x = torch.empty(count)
    calls = {
        "hfreduce": lambda: comm.all_reduce(x.data_ptr(), x.data_ptr(), count, FLOAT32),
        "gloo": lambda: dist.all_reduce(x),
    }
    seconds, right = {name: [] for name in calls}, True
    for name in [*calls] * (rounds + 1):
        x.fill_(rank + 1)
        comm.barrier()
        began = time.perf_counter()
        calls[name]()
        seconds[name].append(time.perf_counter() - began)
        right = right and bool((x == size * (size + 1) / 2).all())
    comm.shutdown()
    dist.destroy_process_group()
    return {"seconds": {name: times[1:] for name, times in seconds.items()}, "right": right}
