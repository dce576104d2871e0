"""Predict how hfreduce's algorithms between hosts scale, from their steps and bytes and a measured link.

    bench/hfreduce_scale.py --latency 30e-6 --bandwidth 1.25e9       # up to 1024 hosts of a 10 Gbit/s network: tables
    bench/hfreduce_scale.py --local 8 --sizes 1M 256M --plot         # and a PNG in bench/results
    bench/hfreduce_scale.py --check                                  # against network namespaces: measured, predicted

Steps and bytes are those of hfreduce/cost.py. `--check` makes hosts out of network namespaces with shaped links
(tests/hfreduce/hosts.py, as root). It measures latency and bandwidth of a link by messages between two of them,
predicts from these two numbers only, and runs the collectives: rows in results/<device>-hfreduce-scale.csv.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import cli
import report
import torch
import torch.distributed as dist
from rich import box
from rich.table import Table

sys.path.pop(0)  # the folder of this file, which contains another hfreduce.py

from hfreduce import api, cost, plan, tune

HERE = Path(__file__).resolve().parent
CHECKED = {"all_reduce": plan.BETWEEN, "reduce_scatter": ("direct", "ring"), "broadcast": ("tree",)}


def predict(options) -> list[dict]:
    """Seconds of each algorithm for each size and number of hosts, and the plan's choice."""
    link = cost.Link(options.latency, options.bandwidth, options.overhead, options.memory)
    found = []
    for nbytes in options.sizes:
        for hosts in options.hosts:
            of = plan.Shape(hosts * options.local, hosts)
            times = {
                name: cost.seconds("all_reduce", name, nbytes, hosts, options.local, link) for name in plan.BETWEEN
            }
            chosen = plan.choose("all_reduce", nbytes, of, []).between
            found.append({"bytes": nbytes, "hosts": hosts, "times": times, "chosen": chosen})
    return found


def show(found: list[dict], options) -> None:
    """A table per size. Efficiency: the bus bandwidth of the plan's choice over the link's."""
    for nbytes in options.sizes:
        title = f"all_reduce of {nbytes} bytes, {options.local} ranks a host: predicted milliseconds"
        table = Table("hosts", *plan.BETWEEN, "plan", "busbw GB/s", "of the link", box=box.SIMPLE_HEAD, title=title)
        for one in found:
            if one["bytes"] != nbytes:
                continue
            busbw = 2 * (one["hosts"] - 1) / one["hosts"] * nbytes / one["times"][one["chosen"]]
            cells = [f"{1e3 * one['times'][name]:.3f}" for name in plan.BETWEEN]
            rate = [f"{busbw / 1e9:.3f}", f"{100 * busbw / options.bandwidth:.0f}%"] if one["hosts"] > 1 else ["", ""]
            table.add_row(str(one["hosts"]), *cells, one["chosen"], *rate)
        report.put(table)


def plot(found: list[dict], options) -> Path:
    """Time over hosts, with a panel per size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(options.sizes), figsize=(4.2 * len(options.sizes), 3.6), layout="constrained", squeeze=False
    )
    for axes, nbytes in zip(panels[0], options.sizes, strict=True):
        mine = [one for one in found if one["bytes"] == nbytes]
        hosts = [one["hosts"] for one in mine]
        for name in plan.BETWEEN:
            axes.plot(hosts, [1e3 * one["times"][name] for one in mine], marker=".", label=name)
        taken = [1e3 * one["times"][one["chosen"]] for one in mine]
        axes.plot(hosts, taken, "k--", linewidth=1, label="the plan's")
        axes.set(xscale="log", yscale="log", xlabel="hosts", ylabel="predicted ms", title=f"{nbytes / 2**20:g} MiB")
        axes.legend(fontsize=7)
    target = options.results / "hfreduce-scale.png"
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120)
    pyplot.close(figure)
    return target


# The check


def check(options) -> int:
    """Runs the collectives on hosts made of namespaces, and compares with the prediction. Returns the exit status."""
    sys.path.append(str(HERE.parent / "tests" / "hfreduce"))
    import hosts as namespaces

    rows = []
    for n in options.checked:
        with tempfile.TemporaryDirectory() as folder, namespaces.hosts(n, rate=options.rate) as made:
            settings = json.dumps({"store": f"{folder}/store", "sizes": options.sizes, "rounds": options.rounds})
            command = [sys.executable, str(HERE / "hfreduce_scale.py"), "--rank-of-check", settings]
            environment = os.environ | {"WORLD_SIZE": str(n), "OMP_NUM_THREADS": "1", "HFREDUCE_PLAN": ""}
            children = [
                made.popen(i, command, env=environment | {"RANK": str(i)}, stdout=subprocess.PIPE, text=True)
                for i in range(n)
            ]
            output = [child.communicate(timeout=options.patience)[0] for child in children]
            if any(child.returncode for child in children):
                print(f"a rank of {n} hosts failed: exit codes {[child.returncode for child in children]}")
                return 1
        rows += compared(n, json.loads(output[0]), options)
    report.append(report.path(options.results, "cpu", "-hfreduce-scale"), rows)
    table = Table("op", "hosts", "bytes", "algorithm", "measured ms", "predicted ms", "ratio", box=box.SIMPLE_HEAD)
    for r in rows:
        ms = [float(r[c]) / 1e3 for c in ("device_us", "predicted_us")]
        cells = [str(r["hosts"]), str(r["bytes"]), r["provider"], *(f"{x:.3f}" for x in ms), f"{ms[0] / ms[1]:.2f}"]
        table.add_row(r["op"], *cells)
    print(f"links: {rows[-1]['latency_us']} us, {rows[-1]['link_gbps']} GB/s, measured by send and recv")
    report.put(table)
    return 0


def compared(n: int, measured: dict, options) -> list[dict]:
    link = cost.Link(measured["latency"], measured["bandwidth"], options.overhead, options.memory)
    rows = []
    for op, nbytes, name, seconds, spread in measured["times"]:
        more = {
            "hosts": n,
            "bytes": nbytes,
            "predicted_us": 1e6 * cost.seconds(op, name, nbytes, n, 1, link),
            "latency_us": 1e6 * link.latency,
            "link_gbps": link.bandwidth / 1e9,
        }
        clocks = SimpleNamespace(device_us=1e6 * seconds, host_us=None, spread_pct=100 * spread)
        rows.append(report.row(op, (n, nbytes), torch.float32, name, "measured", clocks, None, more))
    return rows


def rank_of_check(settings: dict) -> int:
    """Runs one rank, alone on its host. Rank 0 prints JSON."""
    torch.set_num_threads(1)
    rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(settings["store"], n)
    first = api.Group(store, rank, n, name="link", timeout=60, plan=[])
    latency, bandwidth = measure_link(first)
    found = []
    for op, names in CHECKED.items():
        rows = [[plan.Row(op, plan.ANY, "two_shot", name, plan.SLOT, 1).tuple()] for name in names]
        groups = [api.Group(store, rank, n, name=f"{op}-{i}", timeout=60, plan=p) for i, p in enumerate(rows)]
        for nbytes in settings["sizes"]:
            calls = [tune.call(group, op, nbytes) for group in groups]
            times = zip(*tune.measure(first, calls, settings["rounds"], 0.3), strict=True)
            found += [(op, nbytes, name, *each) for name, each in zip(names, times, strict=True)]
        for group in groups:
            group.close()
    if rank == 0:
        print(json.dumps({"latency": latency, "bandwidth": bandwidth, "times": found}))
    first.close()
    return 0


def measure_link(group: api.Group) -> tuple[float, float]:
    """(seconds one way, bytes per second) of messages from rank 0 to rank 1."""

    def there_and_back(x: torch.Tensor, times: int) -> float:
        answer = torch.zeros(1)
        begin = time.perf_counter()
        for _ in range(times):
            if group.rank == 0:
                group.send(x, 1)
                group.recv_(answer, 1)
            elif group.rank == 1:
                group.recv_(x, 0)
                group.send(answer, 0)
        return (time.perf_counter() - begin) / times

    small, large = torch.zeros(1), torch.zeros(4 << 20)
    there_and_back(small, 10)
    group.barrier()
    latency = there_and_back(small, 100) / 2
    there_and_back(large, 1)  # uses up the burst that the link allows
    seconds = there_and_back(large, 2) - 2 * latency
    group.barrier()
    return latency, large.nbytes / seconds


# Command line


def parse(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--latency", type=float, default=30e-6, help="seconds of a hop, from a send to the receiver's wake-up")
    add("--bandwidth", type=float, default=1.25e9, help="bytes per second of a host's link, each way")
    add("--overhead", type=float, default=cost.Link.overhead, help="seconds of CPU time per message")
    add("--memory", type=float, default=cost.Link.memory, help="bytes per second through a host's shared memory")
    add("--local", type=int, default=8, help="ranks on each host")
    add("--hosts", type=int, nargs="+", default=[1 << k for k in range(11)])
    add("--sizes", type=cli.size, nargs="+", metavar="BYTES", help="default: 64K 1M 16M 256M; with --check: 4K 256K 4M")
    add("--plot", action="store_true", help="write a PNG file into the folder of results")
    add("--results", type=Path, default=cli.RESULTS)
    add("--check", action="store_true", help="compare with measurements in network namespaces")
    add("--checked", type=int, nargs="+", default=[2, 4], help="hosts of --check")
    add("--rate", type=float, default=4e8, help="bits per second of the links of --check")
    add("--rounds", type=int, default=5)
    add("--patience", type=float, default=180, help="seconds that --check waits for its ranks")
    add("--rank-of-check", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.sizes = options.sizes or [
        cli.size(text) for text in ("4K 256K 4M" if options.check else "64K 1M 16M 256M").split()
    ]
    return options


def main(argv=None) -> int:
    options = parse(argv)
    if options.rank_of_check:
        return rank_of_check(options.rank_of_check)
    if options.check:
        return check(options)
    found = predict(options)
    show(found, options)
    if options.plot:
        print(plot(found, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
