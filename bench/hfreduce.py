"""Time hfreduce's collectives and gloo's in the same run, like nccl-tests; see README.md here.

    bench/hfreduce.py                                  # all_reduce, 2 and 4 ranks, 4 KiB to 256 MiB: rows and tables
    bench/hfreduce.py all_gather broadcast --ranks 2 --sizes 4K 1M
    bench/hfreduce.py --table                          # the newest rows again
    bench/hfreduce.py --plot                           # PNG files next to the CSV file
    bench/hfreduce.py all_reduce all_gather --device cuda [--p2p off] [--hosts 2]  # one rank per GPU, against NCCL
    bench/hfreduce.py --overlap --device cuda          # how much collectives slow a concurrent backward

`gloo` and `hfreduce` are process groups of torch.distributed, `direct` is hfreduce's own API. Each result is compared
with the closed form before anything is timed. If an element is wrong, the exit status is 1.
"""

import argparse
import os
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import cli
import hfreduce_gpu as gpu
import report
import torch
import torch.distributed as dist
from rich import box
from rich.table import Table

sys.path.pop(0)  # the folder of this file, whose name would hide the package

from hfreduce import api, plan, tune

SIZES = "4K 16K 64K 256K 1M 4M 16M 64M 256M"
PROVIDERS = ("gloo", "hfreduce", "direct")
PATIENCE = 120  # seconds, the timeout of groups

# The factors of nccl-tests from size over time to bus bandwidth, which is comparable with a link's.
BUS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1,
    "reduce": lambda n: 1,
    "all_to_all": lambda n: (n - 1) / n,
}
# The ways to call each op. torch's all_reduce only has the first one; for the second a copy precedes it.
WAYS = {"all_reduce": ("in place", "out of place"), "all_gather": ("in place", "out of place")}
WAYS |= {"broadcast": ("in place",), "reduce": ("in place",)}


class Case:
    """Tensors of one op and size on one rank, their expected result, and calls of each provider.

    x: a rank's input; y: its output. For reduce_scatter, all_gather and all_to_all they consist of blocks, `nbytes` in
    total.
    """

    def __init__(self, op: str, nbytes: int, way: str, rank: int, n: int):
        self.op, self.way, self.rank, self.n = op, way, rank, n
        block = max(1, nbytes // 4 // n)
        self.pattern = (torch.arange(block * n) % 7).float().view(n, block)
        self.bytes = self.pattern.nbytes
        whole = torch.zeros(n, block)
        self.y = whole[rank].clone() if op == "reduce_scatter" else whole
        if op in ("broadcast", "reduce") or (op == "all_reduce" and way == "in place"):
            self.x = self.y
        elif op == "all_gather":
            self.x = self.y[rank] if way == "in place" else self.y[rank].clone()
        else:
            self.x = torch.zeros(n, block)

    def fill(self) -> None:
        """Small integers, whose sums are exact."""
        mine = self.pattern + self.rank
        self.y.fill_(-1)
        self.x.copy_(mine[self.rank] if self.op == "all_gather" else mine)

    def wrong(self) -> int:
        """The number of wrong elements."""
        n, pattern = self.n, self.pattern
        total = n * pattern + n * (n - 1) / 2
        others = torch.arange(n, dtype=torch.float32).view(n, 1)
        want = {
            "all_reduce": lambda: total,
            "reduce_scatter": lambda: total[self.rank],
            "all_gather": lambda: pattern + others,
            "broadcast": lambda: pattern,
            "reduce": lambda: total if self.rank == 0 else self.y,
            "all_to_all": lambda: pattern[self.rank] + others,
        }[self.op]()
        return int((self.y != want).sum())

    def c10d(self, group):
        """A call of torch.distributed."""
        x, y = self.x, self.y
        if self.op == "all_reduce" and self.way == "out of place":
            return lambda: (y.copy_(x), dist.all_reduce(y, group=group))
        return {
            "all_reduce": lambda: dist.all_reduce(y, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(y, x.view(-1), group=group),
            "all_gather": lambda: dist.all_gather_into_tensor(y.view(-1), x, group=group),
            "broadcast": lambda: dist.broadcast(y, 0, group=group),
            "reduce": lambda: dist.reduce(y, 0, group=group),
            "all_to_all": lambda: dist.all_to_all_single(y, x, group=group),
        }[self.op]

    def direct(self, group: api.Group):
        """A call of hfreduce's own functions."""
        x, y = self.x, self.y
        if self.op == "all_reduce" and self.way == "out of place":
            return lambda: group.all_reduce(x, out=y)
        return {
            "all_reduce": lambda: group.all_reduce_(y),
            "reduce_scatter": lambda: group.reduce_scatter(x, out=y),
            "all_gather": lambda: group.all_gather(x, out=y),
            "broadcast": lambda: group.broadcast_(y),
            "reduce": lambda: group.reduce_(y),
            "all_to_all": lambda: group.all_to_all(x, out=y),
        }[self.op]


def measure(case: Case, groups: dict, options) -> list[dict]:
    """Rows of one case. Providers with a right result are timed, all in the same rounds."""
    direct = groups["direct"]
    calls, wrong = {}, {}
    for name in options.provider:
        call = case.direct(direct) if name == "direct" else case.c10d(groups[name])
        case.fill()
        call()
        wrong[name] = int(direct.all_reduce_(torch.tensor([case.wrong()]))[0])
        if not wrong[name]:
            calls[name] = call
    case.x.zero_(), case.y.zero_()
    times, spreads = tune.measure(direct, list(calls.values()), options.rounds, options.seconds)
    found = dict(zip(calls, zip(times, spreads, strict=True), strict=True))
    return [row(case, name, wrong[name], *found.get(name, (None, None))) for name in options.provider]


def row(case: Case, provider: str, wrong: int, seconds: float | None, spread: float | None) -> dict:
    us = None if seconds is None else 1e6 * seconds
    clocks = SimpleNamespace(device_us=us, host_us=None, spread_pct=None if spread is None else 100 * spread)
    algbw = None if seconds is None else case.bytes / seconds / 1e9
    chosen = plan.choose(case.op, case.bytes, plan.shape(case.n), plan.rows(case.n)) if provider != "gloo" else None
    more = {
        "ranks": case.n,
        "bytes": case.bytes,
        "algbw_gbps": algbw,
        "busbw_gbps": None if algbw is None else algbw * BUS[case.op](case.n),
        "wrong": wrong,
        "choice": tune.label(chosen, plan.shape(case.n)) if chosen and case.op == "all_reduce" else "",
        "cores": os.cpu_count(),
    }
    return report.row(case.op, (case.n, case.bytes), torch.float32, provider, case.way, clocks, None, more)


def run(options) -> int:
    """Runs all cases as one of the ranks; rank 0 writes and prints. Returns the exit status."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", timeout=timeout)
    rank, n = dist.get_rank(), dist.get_world_size()
    groups = {"gloo": dist.group.WORLD}
    if "hfreduce" in options.provider:
        groups["hfreduce"] = dist.new_group(backend="hfreduce", timeout=timeout)
    store = dist.distributed_c10d._get_default_store()
    groups["direct"] = api.Group(store, rank, n, name="bench", timeout=PATIENCE, plan=plan.rows(n))
    rows = []
    for op in options.ops:
        for nbytes in options.sizes:
            for way in WAYS.get(op, ("out of place",)):
                found = measure(Case(op, nbytes, way, rank, n), groups, options)
                rows += report.append(file(options), found) if rank == 0 else found
    if rank == 0:
        show(rows)
    groups["direct"].close()
    dist.destroy_process_group()
    return int(any(r["wrong"] for r in rows))


# Tables and pictures


def file(options) -> Path:
    return report.path(options.results, options.device, "-hfreduce")


def show(rows: list[dict]) -> None:
    """A table per op and number of ranks. The factor is gloo's time over the provider's."""
    for op, n in dict.fromkeys((r["op"], str(r["ranks"])) for r in rows):
        mine = [r for r in rows if (r["op"], str(r["ranks"])) == (op, n)]
        providers = list(dict.fromkeys(r["provider"] for r in mine))
        table = Table(title=f"{op}, {n} ranks", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("bytes", justify="right")
        table.add_column("way")
        for name in providers:
            for column in (f"{name} us", "algbw", "busbw", "wrong", *(["x gloo"] if name != "gloo" else [])):
                table.add_column(column, justify="right")
        for nbytes, way in dict.fromkeys((str(r["bytes"]), r["pass"]) for r in mine):
            line = {r["provider"]: r for r in mine if (str(r["bytes"]), r["pass"]) == (nbytes, way)}
            table.add_row(nbytes, way, *(cell for name in providers for cell in cells(line, name)))
        report.put(table)


def cells(line: dict, name: str) -> list[str]:
    r = line.get(name)
    width = 4 if name == "gloo" else 5
    if not r or r["device_us"] == "":
        return ["-", "", "", str(r["wrong"]) if r else "", ""][:width]
    found = [
        f"{float(r['device_us']):.1f}",
        *(f"{float(r[c]):.2f}" for c in ("algbw_gbps", "busbw_gbps")),
        str(r["wrong"]),
    ]
    gloo = line.get("gloo")
    factor = f"{float(gloo['device_us']) / float(r['device_us']):.1f}" if gloo and gloo["device_us"] != "" else ""
    return [*found, factor][:width]


def plot(rows: list[dict], target: Path) -> list[Path]:
    """One PNG per op: bus bandwidth over size, with a panel per number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    written = []
    for op in dict.fromkeys(r["op"] for r in rows):
        mine = [r for r in rows if r["op"] == op and r["device_us"]]
        counts = sorted({int(r["ranks"]) for r in mine})
        figure, panels = pyplot.subplots(
            1, len(counts), figsize=(5 * len(counts), 3.6), layout="constrained", squeeze=False
        )
        for axes, n in zip(panels[0], counts, strict=True):
            for provider, way in dict.fromkeys((r["provider"], r["pass"]) for r in mine):
                line = [r for r in mine if (r["provider"], r["pass"], int(r["ranks"])) == (provider, way, n)]
                points = sorted((int(r["bytes"]), float(r["busbw_gbps"])) for r in line)
                style = {"linestyle": "-" if way == "in place" else "--", "color": f"C{PROVIDERS.index(provider)}"}
                axes.plot(*zip(*points, strict=True), marker=".", label=f"{provider}, {way}", **style)
            axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="bus bandwidth, GB/s", title=f"{op}, {n} ranks")
            axes.legend(fontsize=7)
        written.append(target.with_name(f"{target.stem}-{op}.png"))
        figure.savefig(written[-1], dpi=120)
        pyplot.close(figure)
    return written


# Command line


def parse(argv=None) -> argparse.Namespace:
    parser = cli.parser(__doc__, seconds="time per provider and case")
    parser.set_defaults(device="cpu", rounds=7)
    add = parser.add_argument
    add("ops", nargs="*", default=[], metavar="OP", help=f"ops: {', '.join(BUS)} (default: all_reduce)")
    add("--p2p", choices=("on", "off"), default="on", help="whether GPUs may use each other's memory")
    add("--hosts", type=int, default=1, help="treat the GPUs as those of this many hosts, connected by TCP")
    add("--overlap", action="store_true", help="time a backward on GPUs with concurrent collectives")
    add("--batch", type=int, nargs="+", default=[4, 16], help="--overlap: sequences of 1024 tokens per GPU")
    add("--ranks", type=int, nargs="+", help="default: 2 and 4; with GPUs their number")
    add("--sizes", type=cli.size, nargs="+", metavar="BYTES")
    add("--provider", nargs="+", help=f"providers: {', '.join(PROVIDERS)}; on GPUs {', '.join(gpu.PROVIDERS)}")
    add("--table", action="store_true", help="print the newest rows")
    add("--plot", action="store_true", help="write PNG files next to the CSV file")
    options = parser.parse_args(argv)
    options.ops = options.ops or ["all_reduce"]
    on_gpus = options.device == "cuda"
    options.ranks = options.ranks or ([torch.cuda.device_count()] if on_gpus else [2, 4])
    options.sizes = options.sizes or [cli.size(text) for text in (gpu.SIZES if on_gpus else SIZES).split()]
    known = gpu.PROVIDERS if on_gpus else PROVIDERS
    options.provider = options.provider or known
    if unknown := [name for name in options.provider if name not in known]:
        parser.error(f"--provider: no {unknown[0]!r} on {options.device}; there are {', '.join(known)}")
    if on_gpus and (unknown := [op for op in options.ops if op not in gpu.OPS]):
        parser.error(f"{unknown[0]!r} is not measured on GPUs")
    if unknown := [op for op in options.ops if op not in BUS]:
        parser.error(f"no op {unknown[0]!r}; there are {', '.join(BUS)}")
    if min(options.ranks) < 2:
        parser.error("--ranks: at least 2")
    if options.rounds < 3:
        parser.error("--rounds: at least 3, because the spread needs them")
    return options


def main(argv=None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    options = parse(arguments)
    if "RANK" in os.environ:
        if options.device == "cpu":
            return run(options)
        return gpu.overlap(options) if options.overlap else gpu.collectives(options, BUS)
    if options.device == "cuda" and (options.overlap or options.p2p == "off"):
        os.environ.update(NCCL_P2P_DISABLE="1", HFREDUCE_P2P="0")
    if options.table or options.plot:
        if not file(options).exists():
            print(f"there is no {file(options)}: run without --table and --plot first")
            return 1
        rows = report.newest(file(options))
        drawn = gpu if options.device == "cuda" else sys.modules[__name__]
        if options.table:
            drawn.show(rows)
        for name in drawn.plot(rows, file(options)) if options.plot else ():
            print(name)
        return 0
    return max(tune.start(n, [sys.executable, str(Path(__file__).resolve()), *arguments]) for n in options.ranks)


if __name__ == "__main__":
    sys.exit(main())
