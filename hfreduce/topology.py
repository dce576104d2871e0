"""Under which switches hosts are, and the order of hosts that keeps those of a switch together.

Hosts are sorted by the switches above them, from the top: by zone, then by leaf, then by name. A host on several
switches (rails, planes) belongs with the hosts on the same ones.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


class TopologyError(ValueError):
    """A file that cannot be used. The message says which line, and why."""

    def __init__(self, why: str, line: int = 0):
        super().__init__(f"line {line}: {why}" if line else why)


@dataclass
class Fabric:
    """What a source says. parents: the switches directly above a host or a switch.

    order: the hosts in the order of the source, if it says only that. sure: how far the source can be trusted.
    """

    source: str
    sure: str
    hosts: list[str] = field(default_factory=list)
    parents: Mapping[str, set[str]] = field(default_factory=dict)
    order: dict[str, int] = field(default_factory=dict)

    def __post_init__(self):
        self._short = {_short(host): host for host in reversed(self.hosts)}

    def known(self, host: str) -> str | None:
        """The host's name in the source: the same, or the same up to the first dot. None: it is not in there."""
        if host in self.order or self.parents.get(host):
            return host
        return self._short.get(_short(host))

    def leaf(self, host: str) -> tuple[str, ...]:
        """The switches that the host is connected to; empty if they are not known."""
        return tuple(sorted(self.parents.get(self.known(host) or "", ()), key=natural))

    def path(self, host: str) -> tuple[tuple[str, ...], ...]:
        """The switches above the host by level, from the top."""
        level, found = set(self.leaf(host)), []
        while level:
            found.append(tuple(sorted(level, key=natural)))
            level = {above for switch in level for above in self.parents.get(switch, ())}
        return tuple(reversed(found))

    def key(self, host: str) -> tuple:
        """By which hosts are sorted. Those that the source does not know are last."""
        path = [[natural(name) for name in level] for level in self.path(host)]
        return self.known(host) is None, path, self.order.get(self.known(host) or "", 0), natural(host)

    def sorted(self, hosts: Iterable[str]) -> list[str]:
        """The hosts in the order to start them in."""
        return sorted(hosts, key=self.key)

    def missing(self, hosts: Iterable[str]) -> list[str]:
        return [host for host in hosts if self.known(host) is None] if self.hosts else []

    def crossings(self, hosts: Sequence[str]) -> tuple[int, int]:
        """How many links of a ring over the hosts, in this order, lead to another leaf; and how many must."""
        leaves = [self.leaf(host) or (host,) for host in hosts]
        least = len(set(leaves))
        crossed = sum(a != b for a, b in zip(leaves, leaves[1:] + leaves[:1], strict=True))
        return (crossed, least if least > 1 else 0) if any(self.leaf(host) for host in hosts) else (0, 0)


def _short(host: str) -> str:
    first = host.partition(".")[0]
    return host if first.isdecimal() else first  # an address has no short form


def natural(name: str) -> tuple:
    """A key that compares numbers in names as numbers: node7 is before node66."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return tuple((0, int(part), "") if part[0] in "0123456789" else (1, 0, part) for part in parts), name


def expand(text: str) -> list[str]:
    """Slurm's lists of names: "n[01-03,7],login" are n01, n02, n03, n7 and login. Raises TopologyError."""
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if ",".join(parts) != text.strip(","):
        raise TopologyError(f"'{text}' is not a list of names: brackets do not match")
    return [name for part in parts for name in _names(part.strip())]


def _names(part: str) -> list[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    ranges, _, after = rest.partition("]")
    found = []
    for piece in ranges.split(","):
        first, dash, last = piece.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) < int(first):
            raise TopologyError(f"'[{ranges}]' is not a list of numbers and ranges")
        if int(last or first) - int(first) > 1 << 17:
            raise TopologyError(f"'[{ranges}]' has more than 131072 names")
        found += [f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)]
    return (
        [before + number + end for number in found for end in _names(after)] if after else [before + n for n in found]
    )
