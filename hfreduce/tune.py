"""Measure which algorithm and chunk are fastest on this machine, and keep them for later groups of the same shape.

    hfreduce tune                            # one rank per core
    hfreduce tune --ranks 4 --seconds 0.1
    torchrun --nnodes 2 --nproc-per-node 4 ... -m hfreduce.tune    # between hosts; every host gets the file
    hfreduce tune --device cuda              # paths and launches on CUDA tensors, one rank per GPU
    torchrun --nnodes 2 ... -m hfreduce.tune --device cuda    # between hosts: hfreduce or NCCL, for haiscale.init

All candidates take turns in the same rounds. A time is the slowest rank's median. The default stays unless a candidate
is 5% faster. The table shows microseconds. `hfreduce.explain(op, nbytes)` then shows the new choice.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from haiprof import command
from hfreduce import api, plan, tune_device

SIZES = [1 << k for k in (10, 12, 14, 15, 16, 17, 18, 20, 22, 24, 26)]
CHUNKS = [plan.SLOT >> k for k in (3, 2, 1, 0)]
WORTH = 0.95  # of the default's time: a candidate must be below
PATIENCE = 60  # seconds, the timeout of groups


def candidates(of: plan.Shape) -> dict[str, list[plan.Row]]:
    """The rows to compare, by kind, without the default."""
    if of.hosts == 1:
        rows = [plan.Row("all_reduce", plan.ANY, way, "direct", chunk, 1) for way in plan.INSIDE for chunk in CHUNKS]
        return {"all_reduce": rows}
    between = {"all_reduce": plan.BETWEEN, "reduce_scatter": ("direct", "ring"), "all_gather": ("direct", "ring")}
    between |= {"broadcast": ("tree",), "reduce": ("tree",), "all_to_all": ("direct",)}
    return {
        kind: [plan.Row(kind, plan.ANY, "two_shot", name, plan.SLOT, n) for name in names for n in (1, 2, 4, 8)]
        for kind, names in between.items()
    }


def label(row: plan.Row, of: plan.Shape) -> str:
    if of.hosts > 1:
        return f"{row.between} x{row.streams}"
    return f"{row.inside} {row.chunk >> 10}K"


def call(group: api.Group, kind: str, nbytes: int):
    """A function that runs a collective of `nbytes` on zeros."""
    n = group.size
    x = torch.zeros(n, max(1, nbytes // 4 // n))
    block = torch.zeros_like(x[0])
    return {
        "all_reduce": lambda: group.all_reduce_(x),
        "reduce_scatter": lambda: group.reduce_scatter(x, out=block),
        "all_gather": lambda: group.all_gather(block, out=x),
        "broadcast": lambda: group.broadcast_(x),
        "reduce": lambda: group.reduce_(x),
        "all_to_all": lambda: group.all_to_all(x),
    }[kind]


def measure(group: api.Group, calls: list, rounds: int, seconds: float) -> tuple[list[float], list[float]]:
    """Seconds of each call, and the relative spread of its rounds. The calls are the same on all ranks. They take turns
    in each round, for `seconds` each in total. A time is the slowest rank's median over rounds."""
    once = []
    for call in calls:
        call()
        begin = time.perf_counter()
        call()
        once.append(time.perf_counter() - begin)
    repeats = [max(1, int(seconds / rounds / spent)) for spent in agreed(group, once)]
    times = [[] for _ in calls]
    for _ in range(rounds):
        for call, count, found in zip(calls, repeats, times, strict=True):
            group.barrier()
            begin = time.perf_counter()
            for _ in range(count):
                call()
            found.append((time.perf_counter() - begin) / count)
    medians = agreed(group, [statistics.median(found) for found in times])
    return medians, agreed(group, [(max(found) - min(found)) / statistics.median(found) for found in times])


def agreed(group: api.Group, times: list[float]) -> list[float]:
    """The maximum over all ranks, so that all ranks decide alike."""
    return group.all_reduce_(torch.tensor(times, dtype=torch.float64), "max").tolist()


def pick(times: list[float]) -> int:
    """The index of the fastest; 0, the default, if that is about as fast."""
    best = min(range(len(times)), key=times.__getitem__)
    return best if times[best] < WORTH * times[0] else 0


def merged(chosen: list[tuple[int, plan.Row]]) -> list[plan.Row]:
    """Rows for all sizes from measured ones. A row ends at the geometric mean with the next size, the last nowhere."""
    rows = []
    for i, (nbytes, row) in enumerate(chosen):
        end = int((nbytes * chosen[i + 1][0]) ** 0.5) if i + 1 < len(chosen) else plan.ANY
        row = plan.Row(row.kind, end, row.inside, row.between, row.chunk, row.streams)
        if rows and rows[-1].tuple()[2:] == row.tuple()[2:]:
            rows.pop()
        rows.append(row)
    return rows


def tune(store, rank: int, size: int, options) -> list[plan.Row]:
    """Measures all kinds on all ranks, and prints on rank 0. Returns the rows, the same on every rank."""
    of, found = plan.shape(size), []
    for kind, rows in candidates(of).items():
        names = ["default", *(label(row, of) for row in rows)]
        plans = [[], *([row.tuple()] for row in rows)]
        groups = [
            api.Group(store, rank, size, name=f"tune-{kind}-{i}", timeout=PATIENCE, plan=p) for i, p in enumerate(plans)
        ]
        table = Table("bytes", *names, "chosen", title=f"{kind}, {of}: microseconds", title_justify="left")
        chosen = []
        for nbytes in options.sizes:
            calls = [call(group, kind, nbytes) for group in groups]
            times, _ = measure(groups[0], calls, options.rounds, options.seconds)
            best = pick(times)
            chosen.append((nbytes, rows[best - 1] if best else plan.choose(kind, nbytes, of, [])))
            table.add_row(str(nbytes), *(f"{1e6 * t:.1f}" for t in times), names[best])
        for group in groups:
            group.close()
        if rank == 0:
            console = Console()
            console.width = console.width if console.is_terminal else 160
            console.print(table)
        found += merged(chosen)
    return found


def start(ranks: int, program: list[str], hosts: int = 1) -> int:
    """Runs a command as `ranks` ranks on this machine, like torchrun, until one fails. Returns the exit status.

    hosts: the number of hosts that the ranks are told they run on.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # The store already exists; rank 0 does not create it.
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks // hosts), "OMP_NUM_THREADS": "1"}
    children = []
    try:
        for rank in range(ranks):
            children.append(subprocess.Popen(program, env=os.environ | shared | {"RANK": str(rank)}))
        while None in (codes := [child.poll() for child in children]) and not any(codes):
            time.sleep(0.05)
        return next((abs(code) for code in codes if code), 0)
    finally:
        for child in children:
            child.kill()
            child.wait()


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `checked` and `run`."""
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--ranks", type=int, help="to start on this machine, default one per core or GPU; not under torchrun")
    add("--hosts", type=int, default=1, help="with --device cuda: treat the started ranks as those of this many hosts")
    add("--sizes", type=int, nargs="+", metavar="BYTES")
    add("--rounds", type=int, default=7)
    add("--seconds", type=float, default=0.2, help="per candidate and size")
    add("--dry", action="store_true", help="only print, write no plan")


def checked(parser: argparse.ArgumentParser, options: argparse.Namespace) -> argparse.Namespace:
    """The options, with defaults filled in. Exits with the parser's error if they are invalid."""
    count = torch.cuda.device_count() if options.device == "cuda" else os.cpu_count()
    options.ranks = options.ranks or count or 1
    options.sizes = sorted(options.sizes or (tune_device.SIZES if options.device == "cuda" else SIZES))
    if options.ranks < 2:
        parser.error("--ranks: at least 2, because a single rank has no choice to make")
    if options.hosts < 1 or options.ranks % options.hosts or (options.hosts > 1 and options.device == "cpu"):
        parser.error("--hosts: only with --device cuda, and with the same number of ranks on each host")
    return options


def write(of: plan.Shape, rows: list, part: str) -> int:
    """Writes the plan's file. If that fails, prints the rows, so that they are not lost. Returns the exit status."""
    try:
        print(f"written to {plan.save(of, rows, part=part)}")
        return 0
    except (OSError, plan.PlanError) as why:
        print(f"not written: {why}", *rows, sep="\n")
        return 1


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Measures as one rank, or starts the ranks with these arguments. Returns the exit status."""
    if "RANK" not in os.environ:
        return start(options.ranks, [sys.executable, "-P", "-m", "hfreduce.tune", *arguments], options.hosts)
    store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=PATIENCE)))
    torch.set_num_threads(1)
    measure, part = tune, "shapes"
    if options.device == "cuda":
        several = plan.shape(size).hosts > 1
        measure, part = (tune_device.compare, "backends") if several else (tune_device.tune, "devices")
    rows = measure(store, rank, size, options)
    if not options.dry and int(os.environ.get("LOCAL_RANK", rank)) == 0:
        return write(plan.shape(size), rows, part)
    return 0


def main(argv=None) -> int:
    given = sys.argv[1:] if argv is None else argv
    parser = command.Parser(prog="python -m hfreduce.tune", description=__doc__)
    options(parser)
    found = checked(parser, parser.parse_args(given))
    return command.run("hfreduce", lambda: run(found, given), (RuntimeError,))


if __name__ == "__main__":
    sys.exit(main())
