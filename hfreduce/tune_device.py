"""`python -m hfreduce.tune --device cuda`: measures paths and launches of collectives on CUDA tensors.

A time is the slowest rank's median of device time, for calls that are enqueued behind a sleeping kernel. If a path does
not accept a message, its row falls back to the default, which is then measured twice. Among candidates that are about
as fast, the first is chosen.

Between hosts, the backends hfreduce and NCCL are compared, by the host's clock. haiscale.init then uses the faster one.
"""

import os
import statistics
import time
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from hfreduce import backend, plan

SIZES = [1 << k for k in range(12, 31, 2)]
WORTH = 0.97  # of the default's time: a candidate must be below
PATIENCE = timedelta(seconds=60)


def candidates(ranks: int, peers: bool) -> dict[str, list[plan.DeviceRow]]:
    """The rows to compare, by kind, without the default. peers: see have_peers."""
    if peers:
        ways = {"packets": (4, 16, 32), "two_shot": (8, 16, 32, 64, 128)}
    else:
        ways = {"mapped": (1, 2, 4, 8), "mapped_two_shot": (8, 16, 32), "assisted": (0,)}
    ways = dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather", "broadcast"), ways)
    if peers and ranks > 2:
        ways["all_reduce"] = ways["all_reduce"] | {"packets_two_shot": (4, 16, 32), "one_shot": (8, 16, 32, 64, 128)}
    if peers:
        ways["all_gather"] = ways["all_gather"] | {"copies": (0,)}
    return {
        kind: [plan.DeviceRow(kind, plan.ANY, path, blocks) for path, counts in of.items() for blocks in counts]
        for kind, of in ways.items()
    }


def call(group, kind: str, nbytes: int, n: int, device: str = "cuda"):
    x = torch.zeros(n, max(1, nbytes // 2 // n), dtype=torch.bfloat16, device=device)
    block = torch.zeros_like(x[0])
    return {
        "all_reduce": lambda: dist.all_reduce(x, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(block, x.view(-1), group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(x.view(-1), block, group=group),
        "broadcast": lambda: dist.broadcast(x, 0, group=group),
    }[kind]


def have_peers() -> bool:
    """Whether the GPUs of all ranks reach each other's memory."""
    group = dist.new_group(backend="hfreduce", timeout=PATIENCE)
    dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    described = backend.describe(group)
    dist.destroy_process_group(group)
    return "GPUs reach each other's memory" in described


def greatest(*numbers: float) -> list[float]:
    x = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.tolist()


def timed(call, count: int, ahead: float, cycles: float = 2e6) -> tuple[float, float]:
    """Milliseconds of device and host per call, of `count` calls behind a sleep of `ahead` ms. cycles: per ms."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    torch.cuda._sleep(int(cycles * ahead))
    begin.record()
    started = time.perf_counter()
    for _ in range(count):
        call()
    host = 1e3 * (time.perf_counter() - started)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count, host / count


def measure(calls: list, options) -> list[float]:
    """Milliseconds of each call, all in the same rounds."""
    plans = []
    for each in calls:
        timed(each, 2, 1.0)
        device, host = greatest(*timed(each, 3, 1.0))
        count = max(2, min(40, int(1e3 * options.seconds / options.rounds / device)))
        plans.append((count, 0.2 + 1.5 * host * count))
    times = [
        [greatest(timed(each, *how)[0])[0] for each, how in zip(calls, plans, strict=True)]
        for _ in range(options.rounds)
    ]
    return [statistics.median(each) for each in zip(*times, strict=True)]


def pick(times: list[float]) -> int:
    """The index of the fastest; 0, the default, if that is about as fast."""
    best = min(range(len(times)), key=times.__getitem__)
    return best if times[best] < WORTH * times[0] else 0


def merged(chosen: list[tuple[int, plan.DeviceRow | plan.BackendRow]]) -> list:
    """Rows for all sizes from measured ones. A row ends at the geometric mean with the next size, the last nowhere."""
    rows = []
    for i, (nbytes, row) in enumerate(chosen):
        end = int((nbytes * chosen[i + 1][0]) ** 0.5) if i + 1 < len(chosen) else plan.ANY
        if rows and replace(rows[-1], max_bytes=end) == replace(row, max_bytes=end):
            rows.pop()
        rows.append(replace(row, max_bytes=end))
    return rows


def waited_for(call, count: int, device: str) -> float:
    """Milliseconds per call, of `count` calls, until the device has finished the last."""
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(count):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begun) / count


def compare(store, rank: int, size: int, options, other: str = "nccl", device: str = "cuda") -> list[plan.BackendRow]:
    """The faster of hfreduce and another backend, by kind and size, the same on every rank. Prints on rank 0.

    options.hosts > 1: the ranks of one machine act as that many hosts, which communicate over its loopback interface.
    """
    given = backend.Options()
    if options.hosts > 1:
        given.host_id, given.interface = f"host{rank * options.hosts // size}", "lo"
        os.environ.update(NCCL_HOSTID=given.host_id, NCCL_NET="Socket", NCCL_SOCKET_IFNAME=given.interface)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)
    names = ("hfreduce", other)
    groups = [
        dist.new_group(backend=name, timeout=PATIENCE, pg_options=given if name == "hfreduce" else None)
        for name in names
    ]
    found = []
    for kind in ("all_reduce", "reduce_scatter", "all_gather"):
        table, chosen = _table(kind, f"{plan.shape(size)}", names), []
        for nbytes in options.sizes:
            calls = [call(group, kind, nbytes, size, device) for group in groups]
            once = [greatest(min(waited_for(each, 1, device) for _ in range(2)))[0] for each in calls]
            counts = [max(1, int(1e3 * options.seconds / options.rounds / ms)) for ms in once]
            times = [
                [greatest(waited_for(each, count, device))[0] for each, count in zip(calls, counts, strict=True)]
                for _ in range(options.rounds)
            ]
            medians = [statistics.median(each) for each in zip(*times, strict=True)]
            best = names[medians.index(min(medians))]
            chosen.append((nbytes, plan.BackendRow(kind, plan.ANY, best)))
            table.add_row(str(nbytes), *(f"{1e3 * t:.1f}" for t in medians), best)
        _print(table, rank)
        found += merged(chosen)
    dist.destroy_process_group()
    return found


def _table(kind: str, of: str, names) -> Table:
    return Table("bytes", *names, "chosen", title=f"{kind}, {of}: microseconds", title_justify="left")


def _print(table: Table, rank: int) -> None:
    if rank == 0:
        console = Console()
        console.width = console.width if console.is_terminal else 160
        console.print(table)


def tune(store, rank: int, size: int, options) -> list[plan.DeviceRow]:
    """Measures all kinds on all ranks, and prints on rank 0. Returns the rows, the same on every rank."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)
    found = []
    for kind, rows in candidates(size, have_peers()).items():
        groups, rows = [], [plan.DeviceRow(kind, plan.ANY, "automatic"), *rows]
        for row in rows:
            given = backend.Options()
            given.device_plan = [row.tuple()]
            groups.append(dist.new_group(backend="hfreduce", pg_options=given, timeout=PATIENCE))
        names = [f"{row.path} {row.blocks}" for row in rows]
        table, chosen = _table(kind, f"{size} GPUs", names), []
        for nbytes in options.sizes:
            times = measure([call(group, kind, nbytes, size) for group in groups], options)
            best = pick(times)
            chosen.append((nbytes, rows[best]))
            table.add_row(str(nbytes), *(f"{1e3 * t:.1f}" for t in times), names[best])
        for group in groups:
            dist.destroy_process_group(group)
        _print(table, rank)
        found += merged(chosen)
    dist.destroy_process_group()
    return found
