"""bench/hfreduce.py on GPUs: collectives on CUDA tensors against NCCL's, and how much they slow a concurrent backward.

Providers take turns in one process. Times are device times: calls are enqueued between two events, behind a kernel that
sleeps until the host has enqueued them. `--p2p off` sets NCCL_P2P_DISABLE=1 and HFREDUCE_P2P=0, as on a machine without
NVLink or peer access. `--hosts 2` tells both libraries that half of the GPUs is on another host: they use TCP on the
loopback interface. The rows `copies` are the bandwidth of all GPUs' copy engines at once.
"""

import itertools
import os
import statistics
import time
from datetime import timedelta
from types import SimpleNamespace

import report
import torch
import torch.distributed as dist
from rich import box
from rich.table import Table

SIZES = "4K 16K 64K 256K 1M 8M 32M 128M 256M 1G"
OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
DTYPES = (torch.bfloat16, torch.float32)
SYMMETRIC = ("one_shot", "two_shot")  # all_reduce of torch's symmetric memory
PROVIDERS = ("nccl", "hfreduce", *SYMMETRIC)
PATIENCE = timedelta(seconds=60)
BUCKET = 25 << 20  # bytes


def begin(options):
    """(rank, ranks, groups). The default group is gloo, for agreement; there is one group per provider."""
    import hfreduce

    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # a program that uses it can disturb others on the host
    rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gloo", timeout=PATIENCE)
    given = hfreduce.Options()
    if options.hosts > 1:
        given.host_id, given.interface = f"host{rank * options.hosts // n}", "lo"
        os.environ.update(NCCL_HOSTID=given.host_id, NCCL_NET="Socket", NCCL_SOCKET_IFNAME=given.interface)
    groups = {}
    for name in options.provider:
        if name in SYMMETRIC:
            groups[name] = None
            continue
        own = given if name == "hfreduce" else None
        groups[name] = dist.new_group(backend=name, timeout=PATIENCE, pg_options=own)
    return rank, n, groups


def greatest(*numbers: float) -> list[float]:
    """The maximum over all ranks."""
    x = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.tolist()


class Case:
    """Tensors of one op and size, their expected result, and a call. All blocks together have `nbytes`."""

    def __init__(self, op: str, nbytes: int, dtype: torch.dtype, rank: int, n: int):
        self.op, self.rank, self.n = op, rank, n
        block = max(1, nbytes // dtype.itemsize // n)
        self.pattern = (torch.arange(block * n, device="cuda") % 7).to(dtype).view(n, block)
        self.bytes = self.pattern.nbytes
        whole = torch.zeros_like(self.pattern)
        self.y = whole[rank].clone() if op == "reduce_scatter" else whole
        self.x = whole if op == "all_reduce" else whole[rank].clone() if op == "all_gather" else whole.clone()

    def in_symmetric_memory(self) -> None:
        """Moves the tensor of an all_reduce to symmetric memory."""
        from torch.distributed import _symmetric_memory

        self.x = self.y = _symmetric_memory.empty(self.pattern.shape, dtype=self.pattern.dtype, device="cuda")
        _symmetric_memory.rendezvous(self.x, dist.group.WORLD.group_name)
        self.out = torch.empty_like(self.pattern)

    def fill(self) -> None:
        """Small integers, whose sums are exact."""
        mine = self.pattern + self.rank
        self.y.fill_(-1)
        self.x.copy_(mine[self.rank] if self.op == "all_gather" else mine)

    def wrong(self) -> int:
        total = self.n * self.pattern + self.n * (self.n - 1) // 2
        others = torch.arange(self.n, device="cuda").to(self.pattern.dtype).view(-1, 1)
        want = {
            "all_reduce": lambda: total,
            "reduce_scatter": lambda: total[self.rank],
            "all_gather": lambda: self.pattern + others,
            "all_to_all": lambda: self.pattern[self.rank] + others,
        }
        return int((self.y != want[self.op]()).sum())

    def call(self, name, group):
        x, y = self.x.view(-1), self.y.view(-1)
        if name in SYMMETRIC:
            world, ops = dist.group.WORLD.group_name, torch.ops.symm_mem
            if name == "two_shot":
                return lambda: ops.two_shot_all_reduce_(y, "sum", world)
            self.y = self.out
            return lambda: ops.one_shot_all_reduce_out(x, "sum", world, self.out.view(-1))
        return {
            "all_reduce": lambda: dist.all_reduce(y, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(y, x, group=group),
            "all_gather": lambda: dist.all_gather_into_tensor(y, x, group=group),
            "all_to_all": lambda: dist.all_to_all_single(y, x, group=group),
        }[self.op]


class Clock:
    """Device time of calls, without the host's."""

    def __init__(self):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1000)
        begin.record()
        torch.cuda._sleep(20_000_000)
        end.record()
        torch.cuda.synchronize()
        self.cycles = 20_000_000 / begin.elapsed_time(end)  # per millisecond

    def __call__(self, call, count: int) -> tuple[float, float]:
        """Milliseconds of device and host per call, of `count` calls."""
        from hfreduce import tune_device

        return tune_device.timed(call, count, self.ahead, self.cycles)

    ahead = 1.0  # milliseconds that the device sleeps


def measure(calls: dict, clock: Clock, options) -> dict:
    """{name: (device ms, host ms, spread)}: the slowest rank's median over rounds."""
    counts, ahead = {}, {}
    for name, call in calls.items():
        clock.ahead = 1.0
        clock(call, 2)
        device, host = greatest(*clock(call, 3))
        counts[name] = max(2, min(40, int(1e3 * options.seconds / options.rounds / device)))
        ahead[name] = 0.2 + 1.5 * host * counts[name]
    found = {name: [] for name in calls}
    for i in range(options.rounds):
        for name in list(calls)[:: -1 if i % 2 else 1]:
            clock.ahead = ahead[name]
            found[name].append(greatest(*clock(calls[name], counts[name])))
    result = {}
    for name, times in found.items():
        device = [t[0] for t in times]
        middle = statistics.median(device)
        result[name] = middle, statistics.median(t[1] for t in times), (max(device) - min(device)) / middle
    return result


def row(op, case, dtype, provider, options, n, timing=None, **more) -> dict:
    device, host, spread = timing or (None, None, None)
    clocks = SimpleNamespace(
        device_us=None if device is None else 1e3 * device,
        host_us=None if host is None else 1e3 * host,
        spread_pct=None if spread is None else 100 * spread,
    )
    columns = dict.fromkeys(("ranks", "bytes", "algbw_gbps", "busbw_gbps", "wrong", "path", "cores"), "")
    columns |= {"ranks": n, "cores": os.cpu_count()} | more
    kind = f"p2p {options.p2p}" + (f", {options.hosts} hosts" if options.hosts > 1 else "")
    return report.row(op, case, dtype, provider, kind, clocks, None, columns)


def collectives(options, bus: dict) -> int:
    """Runs all cases as one of the ranks; rank 0 writes and prints. Returns the exit status."""
    import hfreduce

    rank, n, groups = begin(options)
    clock, rows = Clock(), copies(options, rank, n)
    for op in options.ops:
        for dtype in DTYPES:
            for nbytes in options.sizes:
                calls, wrong = {}, {}
                for name, group in groups.items():
                    case = Case(op, nbytes, dtype, rank, n)
                    if name in SYMMETRIC:
                        if op != "all_reduce" or options.p2p == "off" or options.hosts > 1 or nbytes > 32 << 20:
                            continue
                        case.in_symmetric_memory()
                    case.fill()
                    calls[name] = case.call(name, group)
                    calls[name]()
                    wrong[name] = int(greatest(case.wrong())[0])
                    case.x.zero_(), case.y.zero_()
                for name, timing in measure(calls, clock, options).items():
                    rate = case.bytes / timing[0] / 1e6
                    more = {"bytes": case.bytes, "algbw_gbps": rate, "busbw_gbps": rate * bus[op](n)}
                    rows.append(row(op, (n, case.bytes), dtype, name, options, n, timing, wrong=wrong[name], **more))
                del case, calls
    if rank == 0:
        if "hfreduce" in groups:
            print(hfreduce.describe(groups["hfreduce"]).rpartition("; ")[2])
        show(report.append(file(options), rows))
    dist.barrier()
    dist.destroy_process_group()
    return int(any(r["wrong"] for r in rows))


def copies(options, rank: int, n: int, nbytes: int = 256 << 20) -> list[dict]:
    """Copies from all GPUs at once, to all, and both: the limit of a reduce through the host."""
    host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    gpu = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    rows = []
    for name, directions in (("down", [0]), ("up", [1]), ("both", [0, 1])):
        times = []
        for _ in range(5):
            dist.barrier()
            begun = time.perf_counter()
            for direction in directions:
                with torch.cuda.stream(streams[direction]):
                    for _ in range(4):
                        source, target = (gpu, host) if direction == 0 else (host, gpu)
                        target[direction].copy_(source[direction], non_blocking=True)
            torch.cuda.synchronize()
            times.append(greatest((time.perf_counter() - begun) / 4)[0])
        middle = statistics.median(times)
        timing = 1e3 * middle, None, (max(times) - min(times)) / middle
        more = {"bytes": nbytes, "algbw_gbps": nbytes / middle / 1e9, "path": name}
        rows.append(row("copies", (n, nbytes, name), torch.uint8, "copies", options, n, timing, **more))
    return rows


def overlap(options) -> int:
    """Backwards of GPT-2 medium, alone and with all_reduces of 25 MiB as gradients become ready; by batch."""
    options.p2p = "off"
    rank, n, groups = begin(options)
    rows = [row for batch in options.batch for row in beside(batch, groups, options, rank, n)]
    if rank == 0:
        report.append(file(options), rows)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def beside(batch: int, groups: dict, options, rank: int, n: int) -> list[dict]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=1024, n_layer=24, n_head=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    model = GPT2LMHeadModel(config).cuda()
    tokens = torch.randint(0, 50000, (batch, 1024), device="cuda")
    total = sum(p.numel() for p in model.parameters()) * 4
    buckets = [torch.zeros(BUCKET // 4, device="cuda") for _ in range(total // BUCKET)]
    state = SimpleNamespace(bytes=0, next=0, group=None, works=[])

    def ready(p):
        state.bytes += p.nbytes
        while state.group is not None and state.bytes >= BUCKET and state.next < len(buckets):
            state.works.append(dist.all_reduce(buckets[state.next], group=state.group, async_op=True))
            state.bytes, state.next = state.bytes - BUCKET, state.next + 1

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(ready)

    def once(group):
        """Milliseconds of the backward, until all is reduced, and of the host; and the host cores in use."""
        state.bytes, state.next, state.group, state.works = 0, 0, group, []
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens, labels=tokens).loss
        torch.cuda.synchronize()
        dist.barrier()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        used, begun = time.process_time(), time.perf_counter()
        marks[0].record()
        loss.backward()
        marks[1].record()
        host = 1e3 * (time.perf_counter() - begun)
        for work in state.works:
            work.wait()
        marks[2].record()
        torch.cuda.synchronize()
        cores = (time.process_time() - used) / (time.perf_counter() - begun)
        return greatest(marks[0].elapsed_time(marks[1]), marks[0].elapsed_time(marks[2]), host, cores)

    found = {name: [] for name in ("none", *groups)}
    for i in range(options.rounds + 2):
        for name in found:
            times = once(groups.get(name))
            if i >= 2:
                found[name].append(times)
    kernels = ours_in_profile(lambda: once(groups["hfreduce"])) if "hfreduce" in groups else 0
    title = f"backward of GPT-2 medium, batch {batch}, {n} ranks, no peer access"
    rows, table = [], Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("beside", "backward ms", "slower by %", "host ms", "all reduced ms", "host cores", "our kernels"):
        table.add_column(column, justify="right")
    alone = statistics.median(t[0] for t in found["none"])
    for name, times in found.items():
        backward, whole, host, cores = (statistics.median(t[i] for t in times) for i in range(4))
        spread = (max(t[0] for t in times) - min(t[0] for t in times)) / backward
        slower = 100 * (backward / alone - 1)
        more = {"bytes": len(buckets) * BUCKET if name != "none" else 0, "path": f"{slower:+.2f}%", "cores": cores}
        shape = (n, batch, "gpt2-medium")
        rows.append(row("overlap", shape, torch.float32, name, options, n, (backward, host, spread), **more))
        ours = str(kernels) if name == "hfreduce" else ""
        cells = (backward, f"{slower:+.2f}", host, whole)
        table.add_row(name, *(c if isinstance(c, str) else f"{c:.2f}" for c in cells), f"{cores:.1f}", ours)
    if rank == 0:
        report.put(table)
    return rows


def ours_in_profile(run) -> int:
    """The number of hfreduce's kernels that run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sum("hfreduce" in event.name for event in profile.events())


# Tables and pictures


def file(options):
    return report.path(options.results, "cuda", "-hfreduce")


def show(rows: list[dict]) -> None:
    """A table per op, dtype and kind of machine. The factor is hfreduce's time over NCCL's."""
    for r in rows:
        if r["op"] == "copies":
            print(f"copies {r['path']}, {r['ranks']} GPUs at once: {float(r['algbw_gbps']):.1f} GB/s each way and GPU")
    timed = [r for r in rows if r["op"] not in ("copies", "overlap")]
    for op, dtype, kind, n in dict.fromkeys((r["op"], r["dtype"], r["pass"], str(r["ranks"])) for r in timed):
        mine = [r for r in timed if (r["op"], r["dtype"], r["pass"], str(r["ranks"])) == (op, dtype, kind, n)]
        table = Table(
            title=f"{op}, {dtype}, {n} GPUs, {kind}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
        )
        providers = [p for p in PROVIDERS if any(r["provider"] == p for r in mine)]
        for column in (
            "bytes",
            *(f"{p} {what}" for p in providers for what in ("us", "host us", "busbw", "wrong")),
            "x",
        ):
            table.add_column(column, justify="right")
        for nbytes in dict.fromkeys(str(r["bytes"]) for r in mine):
            line = {r["provider"]: r for r in mine if str(r["bytes"]) == nbytes}
            cells = [nbytes]
            for name in providers:
                r = line.get(name)
                cells += (
                    [f"{float(r[c]):.1f}" for c in ("device_us", "host_us", "busbw_gbps")] + [str(r["wrong"])]
                    if r
                    else [""] * 4
                )
            both = {"hfreduce", "nccl"} <= line.keys()
            factor = float(line["hfreduce"]["device_us"]) / float(line["nccl"]["device_us"]) if both else None
            table.add_row(*cells, f"{factor:.2f}" if both else "")
        report.put(table)


def plot(rows: list[dict], target) -> list:
    """One PNG per op: bus bandwidth over size, with a row of panels per kind of machine and a column per dtype."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    written = []
    timed = [r for r in rows if r["op"] not in ("copies", "overlap")]
    for op in dict.fromkeys(r["op"] for r in timed):
        mine = [r for r in timed if r["op"] == op]
        kinds, dtypes = (list(dict.fromkeys(r[key] for r in mine)) for key in ("pass", "dtype"))
        size = 5 * len(dtypes), 3.2 * len(kinds)
        figure, panels = pyplot.subplots(len(kinds), len(dtypes), figsize=size, layout="constrained", squeeze=False)
        for axes, (kind, dtype) in zip(panels.flat, itertools.product(kinds, dtypes), strict=True):
            here = [r for r in mine if (r["pass"], r["dtype"]) == (kind, dtype)]
            for provider, n in sorted({(r["provider"], str(r["ranks"])) for r in here}):
                line = [r for r in here if (r["provider"], str(r["ranks"])) == (provider, n)]
                points = sorted((int(r["bytes"]), float(r["busbw_gbps"])) for r in line)
                style = {"color": f"C{PROVIDERS.index(provider)}", "linestyle": "-" if n == "4" else "--"}
                axes.plot(*zip(*points, strict=True), marker=".", label=f"{provider}, {n} GPUs", **style)
            axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="bus bandwidth, GB/s")
            axes.set_title(f"{op}, {dtype}, {kind}", fontsize=9)
            if here:
                axes.legend(fontsize=7)
        written.append(target.with_name(f"{target.stem}-{op}.png"))
        figure.savefig(written[-1], dpi=100)
        pyplot.close(figure)
    return written
