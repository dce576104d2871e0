"""Generated fabrics, and the files in which each source describes them. Also a program that searches for defects:

    .venv/bin/python tests/hfreduce/fabrics.py --fabrics 2000

A fabric has zones of leaves of hosts, under spines of the zone and, with several zones, cores. The truth is `leaves`.
"""

import argparse
import itertools
import json
import random
from collections import defaultdict
from dataclasses import dataclass

from hfreduce import topology, topology_sources


@dataclass
class Drawn:
    zones: list[list[str]]  # leaves
    leaves: dict[str, list[str]]  # hosts
    spines: list[list[str]]  # of each zone
    cores: list[str]

    @property
    def hosts(self):
        return [host for hosts in self.leaves.values() for host in hosts]

    def links(self):
        """(lower, upper)"""
        for leaf, hosts in self.leaves.items():
            yield from ((host, leaf) for host in hosts)
        for leaves, spines in zip(self.zones, self.spines, strict=True):
            yield from ((leaf, spine) for leaf in leaves for spine in spines)
            yield from ((spine, core) for spine in spines for core in self.cores)


def draw(seed: int, tree: bool = False) -> Drawn:
    """2 to 200 hosts. tree: one spine in a zone, one core."""
    rng = random.Random(seed)
    count = rng.choice([rng.randint(2, 16), rng.randint(2, 200)])
    width = rng.choice([1, 3, 4])
    stem, sep = rng.choice(["node", "gpu-a", "r7n", "x2-compute", "N"]), rng.choice(["", "-", "_"])
    hosts = [f"{stem}{sep}{number:0{width}}" for number in rng.sample(range(1000), count)]
    names = [f"leaf{i}" for i in rng.sample(range(1, 999), 200)]
    zones, leaves, spines = [], {}, []
    most = rng.choice([1, 4, 16, 40])
    while hosts:
        zones.append([])
        for _ in range(rng.randint(1, 6)):
            if hosts:
                zones[-1].append(leaf := names.pop())
                size = rng.randint(1, most)
                leaves[leaf], hosts = hosts[:size], hosts[size:]
            if not names:
                leaves[leaf] += hosts
                hosts = []
        spines.append([f"spine{len(zones)}-{i}" for i in range(1 if tree else rng.randint(1, 4))])
    cores = [f"core{i}" for i in range(1 if tree else rng.randint(1, 4))] if len(zones) > 1 else []
    return Drawn(zones, leaves, spines, cores)


def brackets(names: list[str], rng: random.Random) -> str:
    """Slurm's list of names: single names, or ranges of those of one stem."""
    by = defaultdict(list)
    for name in names:
        digits = name[len(name.rstrip("0123456789")) :]
        by[name[: len(name) - len(digits)], len(digits) if digits[:1] == "0" or rng.random() < 0.5 else 0].append(
            digits
        )
    parts = []
    for (stem, width), numbers in by.items():
        if not width and any(number[0] == "0" and len(number) > 1 for number in numbers):
            parts += [stem + number for number in numbers]
            continue
        ranges = []
        for number in sorted(map(int, numbers)):
            if ranges and ranges[-1][1] == number - 1:
                ranges[-1][1] = number
            else:
                ranges.append([number, number])
        text = ",".join(f"{a:0{width}}" + (f"-{b:0{width}}" if b > a else "") for a, b in ranges)
        parts.append(f"{stem}[{text}]" if "," in text or "-" in text or rng.random() < 0.3 else stem + text)
    return ",".join(parts)


def slurm(drawn: Drawn, rng: random.Random) -> str:
    lines = [f"SwitchName={leaf} Nodes={brackets(hosts, rng)}" for leaf, hosts in drawn.leaves.items()]
    for leaves, spines in zip(drawn.zones, drawn.spines, strict=True):
        lines.append(f"SwitchName={spines[0]} Switches={brackets(leaves, rng)} LinkSpeed=1")
    if drawn.cores:
        lines.append(f"switchname={drawn.cores[0]} switches={','.join(spines[0] for spines in drawn.spines)}")
    rng.shuffle(lines)
    return "# fabric\n\n" + "\n".join(lines) + "\n"


def scontrol(drawn: Drawn, rng: random.Random) -> str:
    lines = [
        f"SwitchName={leaf} Level=0 LinkSpeed=1 Nodes={brackets(hosts, rng)}" for leaf, hosts in drawn.leaves.items()
    ]
    for leaves, spines in zip(drawn.zones, drawn.spines, strict=True):
        below = [host for leaf in leaves for host in drawn.leaves[leaf]]
        lines.append(
            f"SwitchName={spines[0]} Level=1 LinkSpeed=1 Nodes={brackets(below, rng)} Switches={brackets(leaves, rng)}"
        )
    return "\n".join(lines)


def addresses(drawn: Drawn, rng: random.Random) -> str:
    lines = []
    for leaves, spines in zip(drawn.zones, drawn.spines, strict=True):
        above = [brackets(level, random.Random(0)) for level in (drawn.cores, spines) if level]
        lines += [".".join([*above, leaf, host]) for leaf in leaves for host in drawn.leaves[leaf]]
    rng.shuffle(lines)
    return "\n".join(lines)


def topograph(drawn: Drawn, rng: random.Random) -> str:
    switches = {leaf: {"nodes": [brackets(hosts, rng)]} for leaf, hosts in drawn.leaves.items()}
    switches |= {spines[0]: {"switches": leaves} for leaves, spines in zip(drawn.zones, drawn.spines, strict=True)}
    if drawn.cores:
        switches[drawn.cores[0]] = {"switches": [spines[0] for spines in drawn.spines]}
    if rng.random() < 0.5:
        return json.dumps({"switches": [{"name": name, **each} for name, each in switches.items()]}, indent=1)
    return json.dumps({"switches": switches, "nodes": {}}, indent=rng.choice([None, 2]))


def node_link(drawn: Drawn, rng: random.Random) -> str:
    links = [*drawn.links()]
    rng.shuffle(links)
    hosts, names = set(drawn.hosts), list(dict.fromkeys(name for link in links for name in link))
    nodes = [{"id": name} if name in hosts else {"id": name, "type": "switch"} for name in names]
    edges = [dict(zip(("source", "target"), rng.sample(link, 2), strict=True)) for link in links]
    return json.dumps({"directed": False, "nodes": nodes, rng.choice(["links", "edges"]): edges}, indent=1)


def ibnetdiscover(drawn: Drawn, rng: random.Random) -> str:
    """Hosts have one or two adapters; switches may share a description."""
    hosts, generic, ports = set(drawn.hosts), rng.random() < 0.5, defaultdict(list)
    adapters, ids = rng.choice([1, 2]), {}

    def identity(name, adapter=0):
        return ids.setdefault((name, adapter), f"{'H' if name in hosts else 'S'}-{len(ids):016x}")

    kinds = {}
    for lower, upper in drawn.links():
        for adapter in range(adapters if lower in hosts else 1):
            a, b = identity(lower, adapter), identity(upper)
            kinds[a] = (
                f"{lower} mlx5_{adapter}" if lower in hosts else "MF0;generic/U1" if generic else f"{lower} Mellanox"
            )
            kinds[b] = "MF0;generic/U1" if generic else f"{upper} Mellanox"
            pa, pb = len(ports[a]) + 1, len(ports[b]) + 1
            ports[a].append((pa, b, pb)), ports[b].append((pb, a, pa))
    text = ["#", "# Topology file: generated on Sat Nov 28 12:00:00 2026", "#"]
    devices = [*ports]
    rng.shuffle(devices)
    for device in devices:
        what = "Switch" if device[0] == "S" else "Ca"
        text += ["", "vendid=0x2c9", "devid=0xcb20", f"{'switch' if what == 'Switch' else 'ca'}guid=0x{device[2:]}"]
        text.append(f'{what}\t{len(ports[device])} "{device}"\t\t# "{kinds[device]}" base port 0 lid 7 lmc 0')
        for port, other, theirs in ports[device]:
            guid = f"({other[2:]})" if other[0] == "H" else ""
            tail = f'"{kinds[other]}" lid 9 4xHDR' if what == "Switch" else f'lid 9 lmc 0 "{kinds[other]}" lid 3 4xHDR'
            text.append(f'[{port}]{guid if what == "Ca" else ""}\t"{other}"[{theirs}]{guid}\t\t# {tail}')
    return "\n".join(text) + "\n"


def opensm(drawn: Drawn, rng: random.Random) -> str:
    most = max(map(len, drawn.leaves.values()))
    lines = []
    for hosts in drawn.leaves.values():
        lines += [f"0x{rng.randrange(1, 1 << 15):04x}\t{host} HCA-1" for host in hosts]
        lines += ["0xFFFF\tDUMMY"] * (most - len(hosts))
    return "\n".join(lines) + "\n"


def lldp(drawn: Drawn, rng: random.Random) -> str:
    lines = []
    for leaf, hosts in drawn.leaves.items():
        for host in hosts:
            lines += [
                f"{host}: lldp.eth0.via=LLDP",
                f"{host}: lldp.eth0.chassis.name={leaf}",
                f"{host}: lldp.eth0.port.descr=a = b",
            ]
    return "\n".join(lines)


# Each with whether it says which leaf a host is on.
FORMATS = {
    **{
        write.__name__: (write, True)
        for write in (slurm, scontrol, addresses, topograph, node_link, ibnetdiscover, lldp)
    },
    "opensm": (opensm, False),
}
TREES = "slurm", "scontrol", "topograph"
ZONES = "slurm", "addresses", "topograph", "node_link", "ibnetdiscover", "opensm"  # say which leaves are near


def together(hosts: list[str], group: dict[str, object]) -> bool:
    """Whether the hosts of each group are next to one another."""
    changes = sum(group[a] != group[b] for a, b in itertools.pairwise(hosts))
    return changes == len({group[host] for host in hosts}) - 1


def check(name: str, seed: int) -> None:
    """Raises AssertionError if the fabric of this seed is not found in this format, for all hosts and for a job's."""
    write, leaves = FORMATS[name]
    drawn, rng = draw(seed, tree=name in TREES), random.Random(seed)
    found = topology_sources.parse(write(drawn, rng))
    leaf = {host: leaf for leaf, hosts in drawn.leaves.items() for host in hosts}
    zone = {host: i for i, zone in enumerate(drawn.zones) for leaf in zone for host in drawn.leaves[leaf]}
    assert set(found.hosts) == set(leaf), name
    for hosts in (drawn.hosts, rng.sample(drawn.hosts, rng.randint(1, len(leaf)))):
        shuffled = rng.sample(hosts, len(hosts))
        order = found.sorted(shuffled)
        assert sorted(order) == sorted(hosts) and order == found.sorted(hosts)
        assert together(order, leaf) and (name not in ZONES or together(order, zone))
        if leaves:
            groups = defaultdict(set)
            for host in hosts:
                groups[found.leaf(host)].add(host)
            truth = defaultdict(set)
            for host in hosts:
                truth[leaf[host]].add(host)
            assert sorted(map(sorted, groups.values())) == sorted(map(sorted, truth.values()))
            crossed, least = found.crossings(order)
            assert crossed == least == (len(truth) if len(truth) > 1 else 0)
            assert found.crossings(shuffled)[0] >= least
            for a, b in itertools.pairwise(order):
                assert leaf[a] != leaf[b] or topology.natural(a) < topology.natural(b)


def damaged(text: str, rng: random.Random) -> str:
    """The text with one to three faults: lines and characters lost, doubled, swapped, changed."""
    for _ in range(rng.randint(1, 3)):
        lines = text.split("\n")
        i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
        at = rng.randrange(len(text) + 1)
        pieces = [*lines[:i], lines[j], *lines[i + 1 :]], lines[:i] + lines[i + 1 :], [*lines, lines[i]]
        wrong = rng.choice('[]{},=."#\t 0-\x00é²')
        changed = text[:at], text[:at] + text[at + 1 :], text[:at] + wrong + text[at:]
        text = rng.choice([*map("\n".join, pieces), *changed])
    return text


def check_damaged(name: str, seed: int) -> str:
    """A damaged file is read, or refused with the reason and, except for a few, the line. Returns the reason."""
    drawn, rng = draw(seed, tree=name in TREES), random.Random(seed)
    text = damaged(FORMATS[name][0](drawn, rng), rng)
    try:
        found = topology_sources.parse(text)
    except topology.TopologyError as why:
        assert str(why).startswith("line ") or str(why) in ("there is nothing in it", "it names no hosts"), why
        return str(why)
    assert sorted(found.sorted(drawn.hosts)) == sorted(drawn.hosts)
    found.crossings(drawn.hosts)
    return ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fabrics", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in FORMATS:
        seeds = range(options.seed, options.seed + options.fabrics)
        for seed in seeds:
            try:
                check(name, seed)
                check_damaged(name, seed)
            except Exception as error:
                raise SystemExit(f"{name}, seed {seed}: {type(error).__name__}: {error}") from error
        print(f"{name}: {options.fabrics} fabrics, {sum(map(bool, (check_damaged(name, s) for s in seeds)))} refused")
