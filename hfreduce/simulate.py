"""Times of a collective between hosts on a fabric: the flows of its algorithm, at max-min fair rates.

Each host sends over all its links (rails, planes) at once. A flow takes one of the shortest paths, chosen by a hash of
its ends, as ECMP does. Rates of the flows of a step are max-min fair: no flow can get more without taking it from one
that has no more. A step ends when its last bytes have arrived. Latencies, and what happens inside a host, are not
counted.
"""

import json
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from hfreduce.topology import Fabric
from hfreduce.topology_sources import from_links

GIGABIT = 1e9 / 8  # bytes per second
ALGORITHMS = ("direct", "ring", "tree")


class Network:
    """Hosts, switches and links. rates: {(from, to): bytes per second}, each link in both directions."""

    def __init__(self, hosts: Iterable[str], rates: Mapping[tuple[str, str], float], source: str):
        self.hosts, self.rates = [*hosts], dict(rates)
        self._near, self._known = defaultdict(set), {}
        for a, b in rates:
            self._near[a].add(b)
        inside = set(self.hosts)
        self.leaves = {host: tuple(sorted(self._near[host] - inside)) for host in self.hosts}
        self._switches = {a: sorted(near - inside) for a, near in self._near.items() if a not in inside}
        self.fabric: Fabric = from_links(source, "as given", self.hosts, self._near)

    def paths(self, a: str, b: str) -> Iterator[list[tuple[str, str]]]:
        """The links of the paths from a to b, one for each link of a: to the same of b's if it has as many."""
        starts, ends = self.leaves[a], self.leaves[b]
        for i, here in enumerate(starts):
            to = (ends[i],) if len(starts) == len(ends) else ends
            path, chosen = [(a, here)], zlib.crc32(f"{a} {b} {i}".encode())
            while here not in to and (nexts := self._towards(to).get(here)):
                chosen, pick = divmod(chosen, len(nexts))
                path.append((here, nexts[pick]))
                here = nexts[pick]
            if here in to:
                yield [*path, (here, b)]

    def _towards(self, ends):
        """{switch: the switches next to it that are nearer to the nearest of `ends`}"""
        if ends not in self._known:
            far, level = dict.fromkeys(ends, 0), list(ends)
            while level:
                level = list(dict.fromkeys(n for s in level for n in self._switches[s] if n not in far))
                far |= dict.fromkeys(level, 1 + max(far.values()))
            self._known[ends] = {s: [n for n in self._switches[s] if far.get(n) == far[s] - 1] for s in far}
        return self._known[ends]


def network(text: str) -> Network:
    """A fabric from one line, or from a file of networkx.node_link_data (`rate` of a link: Gbit/s, 100 if missing).

        fat_tree leaves=8 hosts=16 spines=4 rate=100        hosts of each leaf; rate in Gbit/s
        rails groups=2 hosts=8 rails=4 spines=4             each host is on all rails of its group
        planes leaves=4 hosts=8 spines=4                    two fat trees; each host is on a leaf of both
        dragonfly groups=4 routers=4 hosts=4                a router is linked to its group, and groups to one another

    Raises ValueError, OSError.
    """
    kind, *words = text.split()
    if kind not in _KINDS:
        return _file(text)
    make, defaults = _KINDS[kind]
    given = dict(defaults, rate=100)
    for word in words:
        name, _, value = word.partition("=")
        if name not in given or not re.fullmatch(r"[0-9]{1,6}", value) or int(value) < 1:
            raise ValueError(f"{word!r} of {kind}: give {', '.join(f'{name}=NUMBER' for name in given)}")
        given[name] = int(value)
    rate = given.pop("rate") * GIGABIT
    links = [*make(**given)]
    hosts = dict.fromkeys(a for a, _ in links if a.startswith("host"))
    return Network(hosts, {link: rate for a, b in links for link in ((a, b), (b, a))}, text)


def _fat_tree(leaves, hosts, spines, name=""):
    for leaf in range(leaves):
        yield from ((f"host{leaf * hosts + i}", f"leaf{name}{leaf}") for i in range(hosts))
        yield from ((f"leaf{name}{leaf}", f"spine{name}{spine}") for spine in range(spines))


def _rails(groups, hosts, rails, spines):
    for group in range(groups):
        for rail in range(rails):
            leaf = f"leaf{group}-{rail}"
            yield from ((f"host{group * hosts + i}", leaf) for i in range(hosts))
            yield from ((leaf, f"spine{spine}") for spine in range(spines))


def _planes(leaves, hosts, spines):
    for plane in "ab":
        yield from _fat_tree(leaves, hosts, spines, plane)


def _dragonfly(groups, routers, hosts):
    for group in range(groups):
        names = [f"router{group}-{i}" for i in range(routers)]
        yield from ((a, b) for i, a in enumerate(names) for b in names[i + 1 :])
        for i, router in enumerate(names):
            yield from ((f"host{(group * routers + i) * hosts + j}", router) for j in range(hosts))
        yield from ((names[other % routers], f"router{other}-{group % routers}") for other in range(group))


_KINDS = {
    "fat_tree": (_fat_tree, {"leaves": 8, "hosts": 16, "spines": 16}),
    "rails": (_rails, {"groups": 2, "hosts": 8, "rails": 4, "spines": 4}),
    "planes": (_planes, {"leaves": 4, "hosts": 8, "spines": 4}),
    "dragonfly": (_dragonfly, {"groups": 4, "routers": 4, "hosts": 4}),
}


def _file(path):
    try:
        found = json.loads(Path(path).read_text())
        links = found.get("links", found.get("edges"))
        hosts = [node["id"] for node in found["nodes"] if node.get("type", "host") != "switch"]
        rates = {}
        for link in links:
            rate = float(link.get("rate", 100)) * GIGABIT
            if not 0 < rate < float("inf"):
                raise ValueError(f"a rate must be a positive number of Gbit/s, got {link['rate']!r}")
            for end in ((link["source"], link["target"]), (link["target"], link["source"])):
                rates[end] = rates.get(end, 0) + rate  # parallel links
        return Network(hosts, rates, path)
    except (AttributeError, KeyError, TypeError, ValueError) as why:
        raise ValueError(f"{path} is no graph of networkx.node_link_data: {type(why).__name__}: {why}") from None


def steps(op: str, algorithm: str, hosts: list[str], nbytes: float) -> list[tuple[int, list[tuple[str, str, float]]]]:
    """(how many times, flows that run at the same time: from, to, bytes). hosts: in the order of neighbours."""
    n, halves = len(hosts), 2 if op == "all_reduce" else 1
    if n < 2:
        return []
    if algorithm == "ring":
        return [(halves * (n - 1), [(a, b, nbytes / n) for a, b in zip(hosts, hosts[1:] + hosts[:1], strict=True)])]
    if algorithm == "direct":
        return [(halves, [(a, b, nbytes / n) for a in hosts for b in hosts if a != b])]
    flows = []  # a pipeline: all links of both trees at the same time
    for half in (0, 1):
        for node in range(1, n + 1):
            bit = node & -node
            above = (node ^ bit) | bit << 1
            above = node ^ bit if above > n else above
            if above:
                places = [p - 1 if half == 0 else n - p if n % 2 == 0 else p % n for p in (node, above)]
                child, parent = (hosts[place] for place in places)
                flows += [(child, parent, nbytes / 2), (parent, child, nbytes / 2)]
    return [(1, flows)]


def fair(paths: list[list[int]], rates: list[float]) -> list[float]:
    """Max-min fair rates of flows over numbered links: the fullest link limits its flows, then the next one."""
    most = max(map(len, paths))
    links = torch.tensor([path + [len(rates)] * (most - len(path)) for path in paths])
    left = torch.tensor([*rates, float("inf")], dtype=torch.double)
    found, going = torch.zeros(len(paths), dtype=torch.double), torch.ones(len(paths), dtype=torch.bool)
    while going.any():
        count = torch.bincount(links[going].flatten(), minlength=len(left))
        share = torch.where(count > 0, left / count, float("inf"))
        least = share.min()
        ended = going & (share <= least * (1 + 1e-9))[links].any(1)
        found[ended] = least
        left -= torch.bincount(links[ended].flatten(), minlength=len(left)) * least
        going &= ~ended
    return found.tolist()


@dataclass
class Result:
    """seconds; busy: {link: the part of this time that its bytes take at its rate}."""

    seconds: float
    busy: dict[tuple[str, str], float]


def simulate(on: Network, hosts: list[str], op: str, algorithm: str, nbytes: float) -> Result:
    """The time of a collective between hosts, in the order in which they are neighbours. Raises ValueError."""
    if unknown := [host for host in hosts if not on.leaves.get(host)]:
        raise ValueError(f"hosts that are not in the fabric, or on no switch: {', '.join(unknown[:8])}")
    numbers = {link: i for i, link in enumerate(on.rates)}
    seconds, carried = 0.0, Counter()
    for times, flows in steps(op, algorithm, hosts, nbytes):
        paths, sizes = [], []
        for a, b, size in flows:
            if not (found := [*on.paths(a, b)]):
                raise ValueError(f"there is no path from {a} to {b}")
            paths += found
            sizes += [size / len(found)] * len(found)
        rates = fair([[numbers[link] for link in path] for path in paths], [*on.rates.values()])
        seconds += times * max(size / rate for size, rate in zip(sizes, rates, strict=True))
        for path, size in zip(paths, sizes, strict=True):
            for link in path:
                carried[link] += times * size
    return Result(seconds, {link: n / on.rates[link] / seconds for link, n in carried.items()})


def ideal(on: Network, hosts: list[str], op: str, algorithm: str, nbytes: float) -> float:
    """The seconds on one switch, to which each host is connected with all its bandwidth."""
    rate = {host: sum(on.rates[host, leaf] for leaf in on.leaves[host]) for host in hosts}
    star = {link: rate[host] for host in hosts for link in ((host, "switch"), ("switch", host))}
    return simulate(Network(hosts, star, "one switch"), hosts, op, algorithm, nbytes).seconds
