"""Hosts in the order of their switches.

    python -m hfreduce.topo --topology topology.conf         # switches and hosts as a tree, and how sure that is
    python -m hfreduce.topo order hosts.txt                  # the same hosts, one a line, in the order to start them in
    python -m hfreduce.topo simulate "fat_tree leaves=8 hosts=16 spines=4"      # times, by algorithm and order

A ring over hosts in random order loads the links between switches two to five times more than one in this order.
"""

import argparse
import os
import socket
import sys
from pathlib import Path

from haiprof import command
from hfreduce import topology, topology_sources


def hosts_of(file: str) -> dict[str, str]:
    """The hosts of a file, one a line as in a hostfile, with what follows the name; "-": of the standard input."""
    text = sys.stdin.read() if file == "-" else Path(file).read_text()
    lines = (line.partition("#")[0].strip().partition(" ") for line in text.splitlines())
    found = {host: space + rest for names, space, rest in lines if names for host in topology.expand(names)}
    if not found:
        raise ValueError(f"there are no hosts in {file}")
    return found


def source(args: argparse.Namespace, hosts: list[str]) -> topology.Fabric:
    address = os.environ.get("SLURM_TOPOLOGY_ADDR", "")
    mine = {address.rpartition(".")[2]: address} if address and len(hosts) == 1 else None
    return topology_sources.find(hosts, args.topology, mine)


def show(args: argparse.Namespace) -> None:
    listed = os.environ.get("SLURM_JOB_NODELIST")
    hosts = [*hosts_of(args.hosts)] if args.hosts else topology.expand(listed) if listed else []
    file = args.topology or os.environ.get("HFREDUCE_TOPO")
    if not hosts and file:
        hosts = topology_sources.read(file).hosts
    hosts = hosts or [socket.gethostname()]
    fabric = source(args, hosts)
    print(f"{len(hosts)} host{'s' * (len(hosts) != 1)}, by {fabric.source} ({fabric.sure})")
    before: tuple = ()
    for host in fabric.sorted(hosts):
        path = fabric.path(host)
        for depth, level in enumerate(path):
            if path[: depth + 1] != before[: depth + 1]:
                print("  " * (depth + 1) + ", ".join(level))
        print("  " * (len(path) + 1) + host + ("" if fabric.known(host) or not fabric.hosts else "  (unknown)"))
        before = path
    crossed, least = fabric.crossings(hosts)
    if crossed > least:
        print(f"a ring in the given order crosses {crossed} of {len(hosts)} links between leaves, {least} are enough")


def order(args: argparse.Namespace) -> None:
    hosts = hosts_of(args.file)
    print(*(host + hosts[host] for host in source(args, [*hosts]).sorted(hosts)), sep="\n")


def size(text: str) -> int:
    """Bytes, of 4096, 64K, 25M or 1G."""
    return int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0)


def simulate(args: argparse.Namespace) -> None:
    from hfreduce import plan
    from hfreduce.simulate import ALGORITHMS, ideal, network
    from hfreduce.simulate import simulate as run

    on = network(args.fabric)
    hosts = [*hosts_of(args.hosts)] if args.hosts else on.hosts
    orders = {"given order": hosts, "order of switches": on.fabric.sorted(hosts)}
    print(f"{args.op} of {plan._size(args.bytes)} between {len(hosts)} hosts on {args.fabric}")
    print(f"{'':8}{'one switch':>12}" + "".join(f"{name:>22}" for name in orders))
    for algorithm in ALGORITHMS if args.op == "all_reduce" else ALGORITHMS[:2]:
        best = ideal(on, hosts, args.op, algorithm, args.bytes)
        times = [run(on, order, args.op, algorithm, args.bytes).seconds for order in orders.values()]
        shown = "".join(f"{f'{each * 1e3:.4g} ms {each / best:.2f}x':>22}" for each in times)
        print(f"{algorithm:8}{f'{best * 1e3:.4g} ms':>12}{shown}")
    chosen = plan.choose(args.op, args.bytes, plan.Shape(len(hosts), len(hosts)), []).between
    busy = run(on, hosts, args.op, chosen, args.bytes).busy
    fullest = sorted(busy, key=lambda link: (-round(busy[link], 6), link))[:4]
    print(f"hfreduce's default: {chosen}. Its fullest links in the given order, and the part of the time:")
    print("  " + ", ".join(f"{a} to {b} {busy[a, b]:.0%}" for a, b in fullest))


def parser() -> command.Parser:
    found = command.Parser(prog="python -m hfreduce.topo", description=__doc__)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--topology", metavar="FILE", help="default: HFREDUCE_TOPO")
    found.set_defaults(call=show, hosts=None, topology=None)
    commands = found.add_subparsers(metavar="COMMAND")
    sub = commands.add_parser("show", parents=[shared], help="switches and hosts as a tree")
    sub.add_argument("--hosts", metavar="FILE", help="one a line; default: SLURM_JOB_NODELIST, or all of the topology")
    sub.set_defaults(call=show)
    sub = commands.add_parser("order", parents=[shared], help="hosts in the order to start them in")
    sub.add_argument("file", metavar="HOSTS", help="a file with one host a line; - is the standard input")
    sub.set_defaults(call=order)
    sub = commands.add_parser("simulate", help="times on a fabric, by algorithm and order of hosts", epilog=_FABRICS)
    sub.add_argument("fabric", metavar="FABRIC", help="a line as below, or a file of networkx.node_link_data")
    sub.add_argument("--hosts", metavar="FILE", help="one a line, in the order of ranks; default: all")
    sub.add_argument("--op", choices=("all_reduce", "reduce_scatter", "all_gather"), default="all_reduce")
    sub.add_argument("--bytes", type=size, default=25 << 20, help="of the whole message, such as 25M")
    sub.set_defaults(call=simulate)
    return found


_FABRICS = """fat_tree leaves=8 hosts=16 spines=16 rate=100, rails groups=2 hosts=8 rails=4 spines=4,
planes leaves=4 hosts=8 spines=4, dragonfly groups=4 routers=4 hosts=4; rate in Gbit/s"""


def main(argv: list[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    if not given or given[0].startswith("--topology") or given[0].startswith("--hosts"):
        given = ["show", *given]
    args = parser().parse_args(given)
    return command.run("python -m hfreduce.topo", lambda: args.call(args))


if __name__ == "__main__":
    sys.exit(main())
