"""What administrators have that says where hosts hang: files, SLURM_TOPOLOGY_ADDR, and else the hosts' names.

`read` takes Slurm's topology.conf or `scontrol show topology`, values of SLURM_TOPOLOGY_ADDR, JSON of Topograph's
models or a networkx graph, the output of ibnetdiscover, OpenSM's host order, and LLDP neighbours. The format is found
by content. An error names the file and the line. `find` never raises because of a file: it warns, and uses the natural
order of names.
"""

import functools
import json
import logging
import os
import re
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from hfreduce.topology import Fabric, TopologyError, expand

_log = logging.getLogger("hfreduce")


def read(file: str | os.PathLike) -> Fabric:
    """A file of any of the formats. Raises TopologyError, OSError if it cannot be read."""
    try:
        return parse(Path(file).read_text(errors="replace"), str(file))
    except TopologyError as why:
        raise TopologyError(f"{file}, {why}") from None


def parse(text: str, source: str = "a file") -> Fabric:
    """The same for the text of a file."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")), None)
    if first is None:
        raise TopologyError("there is nothing in it")
    for pattern, reader in _FORMATS:
        if re.match(pattern, lines[first], re.IGNORECASE):
            return reader(text if reader is _json else lines, source)
    raise TopologyError(f"of no known format: '{lines[first][:80]}'", first + 1)


def find(hosts: Sequence[str], file: str | None = None, addresses: Mapping[str, str] | None = None) -> Fabric:
    """The first source that knows these hosts: a file (HFREDUCE_TOPO if None), SLURM_TOPOLOGY_ADDR of the hosts in
    `addresses`, or their names. An unusable file causes a warning."""
    file = os.environ.get("HFREDUCE_TOPO") if file is None else file
    if file:
        try:
            found = read(file)
            missing = found.missing(hosts)
            if not missing or len(missing) < len(hosts):
                if missing:
                    _tell(f"hfreduce: {_several(missing, len(hosts))} not in {file}, and come last: {_some(missing)}")
                return found
            _tell(f"hfreduce: none of the hosts is in {file}: {_some(hosts)}. They are in the order of their names")
        except (OSError, ValueError) as why:
            _tell(f"hfreduce: {why}. Hosts are in the order of their names")
    given = {host: address for host, address in (addresses or {}).items() if "." in address}
    if given and len(given) == len(addresses or {}):
        try:
            return _addresses(given)
        except TopologyError as why:
            _tell(f"hfreduce: SLURM_TOPOLOGY_ADDR: {why}. Hosts are in the order of their names")
    return Fabric("the hosts' names", "a guess: nothing says which switches they are connected to")


_tell = functools.cache(_log.warning)  # once per text


def _several(some, count):
    return f"{len(some)} of {count} hosts {'is' if len(some) == 1 else 'are'}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


# Formats

_LEVEL = r"(?:[^\s.\[\]]|\[[^\]\s]*\])+"  # of an address


class _Tree:
    """Switches and hosts below switches, each below one. line: where it is said, for errors."""

    def __init__(self):
        self.below, self.parents, self.leaves = {}, defaultdict(set), {}

    def add(self, switch, hosts, switches, line):
        if switch in self.below:
            raise TopologyError(f"switch {switch} is there twice, first in line {self.below[switch][1]}", line)
        self.below[switch] = switches, line
        for host in hosts:
            if other := self.leaves.get(host):
                raise TopologyError(f"host {host} is under {switch} and, in line {other[1]}, under {other[0]}", line)
            self.leaves[host] = switch, line
            self.parents[host].add(switch)

    def fabric(self, source, sure):
        for switch, (switches, line) in self.below.items():
            for other in switches:
                if other not in self.below:
                    raise TopologyError(f"switch {other}, under {switch}, is not described", line)
                if self.parents[other]:
                    above = next(iter(self.parents[other]))
                    raise TopologyError(f"switch {other} is under {switch} and under {above}", line)
                self.parents[other].add(switch)
        for switch, (_, line) in self.below.items():
            above, seen = switch, {switch}
            while above := next(iter(self.parents.get(above, ())), None):
                if above in seen:
                    raise TopologyError(f"switch {switch} is above itself", line)
                seen.add(above)
        return _some_hosts(Fabric(source, sure, [*self.leaves], {k: v for k, v in self.parents.items() if v}))


def _some_hosts(fabric: Fabric) -> Fabric:
    if not fabric.hosts:
        raise TopologyError("it names no hosts")
    return fabric


def _slurm(lines, source):
    tree, begun = _Tree(), ""
    for number, line in enumerate(lines, 1):
        line = begun + line.partition("#")[0].strip()
        begun = line[:-1].rstrip() + " " if line.endswith("\\") else ""
        if begun or not line:
            continue
        fields = {}
        for word in line.split():
            key, equal, value = word.partition("=")
            if not equal:
                raise TopologyError(f"'{word}' is not KEY=VALUE", number)
            fields[key.lower()] = value
        if set(fields) == {"blocksizes"}:
            continue
        name = fields.get("switchname") or fields.get("blockname")
        if not name:
            raise TopologyError(f"neither SwitchName nor BlockName: '{line[:80]}'", number)
        try:
            switches = expand(fields.get("switches", ""))
            # scontrol also shows, of a switch above others, all hosts below it
            hosts = [] if switches else expand(fields.get("nodes", ""))
        except TopologyError as why:
            raise TopologyError(str(why), number) from None
        if not hosts and not switches and "nodes" not in fields:
            raise TopologyError(f"switch {name} has neither Nodes nor Switches", number)
        tree.add(name, hosts, switches, number)
    return tree.fabric(source, "as Slurm's administrator has written it")


def _lines_of_addresses(lines, source):
    found, numbers = {}, {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        if not re.fullmatch(rf"(?:{_LEVEL}\.)+[^\s.\[\]]+", line.strip()):
            raise TopologyError(f"'{line[:80]}' is not SWITCH.SWITCH.HOST", number)
        host = line.strip().rpartition(".")[2]
        if found.setdefault(host, line.strip()) != line.strip():
            raise TopologyError(f"host {host} has another address in line {numbers[host]}", number)
        numbers.setdefault(host, number)
    return _addresses(found, source, numbers)


def _addresses(found, source="SLURM_TOPOLOGY_ADDR", line=None) -> Fabric:
    """From {host: switches and host, joined by dots}. Of a level with several switches: "spine[0-3]"."""
    links = defaultdict(set)
    for host, address in found.items():
        below = [host]
        try:
            *levels, last = re.findall(_LEVEL, address)
            if ".".join([*levels, last]) != address:
                raise TopologyError(f"'{address}' is not SWITCH.SWITCH.HOST")
            for names in map(expand, reversed(levels)):
                for name in below:
                    links[name].update(names)
                below = names
        except TopologyError as why:
            raise TopologyError(str(why), line[host] if line else 0) from None
    return _some_hosts(from_links(source, "as Slurm's administrator has written it", [*found], links))


def _json(text, source):
    try:
        found = json.loads(text)
    except ValueError as why:
        raise TopologyError(f"it cannot be read as JSON: {why}", getattr(why, "lineno", 0)) from None

    def line(name):
        place = text.find(json.dumps(name))
        return text.count("\n", 0, max(place, 0)) + 1

    if isinstance(found, dict) and isinstance(found.get("switches"), dict | list):
        switches = found["switches"]
        if isinstance(switches, list):
            if not all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in switches):
                raise TopologyError("each of the switches must be an object with a name", line("switches"))
            pairs = [(each["name"], each) for each in switches]
        else:
            pairs = [*switches.items()]
        tree = _Tree()
        for name, each in pairs:
            names = [each.get(key) or [] for key in ("nodes", "switches")] if isinstance(each, dict) else [None]
            if not all(isinstance(some, list) and all(isinstance(n, str) for n in some) for some in names):
                raise TopologyError(f"nodes and switches of {name} must be lists of names", line(name))
            try:
                tree.add(name, *([n for text in some for n in expand(text)] for some in names), line(name))
            except TopologyError as why:
                raise why if str(why).startswith("line") else TopologyError(str(why), line(name)) from None
        return tree.fabric(source, "as written")
    return _node_link(found, source, line)


def _node_link(found, source, line):
    """The JSON of networkx.node_link_data. Nodes that are switches have type "switch"; the others are hosts."""
    edges = found.get("links", found.get("edges")) if isinstance(found, dict) else None
    nodes = found.get("nodes") if isinstance(found, dict) else None
    if not isinstance(nodes, list) or not isinstance(edges, list):
        raise TopologyError('neither "switches" nor a graph of "nodes" and "links"', 1)
    kinds, links = {}, defaultdict(set)
    for node in nodes:
        if not isinstance(node, dict) or not isinstance(node.get("id"), str):
            raise TopologyError(f"a node without an id: {json.dumps(node)[:80]}", line("nodes"))
        kinds[node["id"]] = node.get("type", "host")
    for edge in edges:
        ends = [edge.get(end) for end in ("source", "target")] if isinstance(edge, dict) else []
        for end in ends or [None]:
            if not isinstance(end, str) or end not in kinds:
                raise TopologyError(f"a link of {end!r}, which is no node", line(end))
        links[ends[0]].add(ends[1])
        links[ends[1]].add(ends[0])
    return _some_hosts(
        from_links(source, "as written", [name for name, kind in kinds.items() if kind != "switch"], links)
    )


def from_links(source, sure, hosts, links) -> Fabric:
    """From links: a switch is above what is nearer to the hosts."""
    both = defaultdict(set)
    for one, others in links.items():
        for other in others:
            both[one].add(other), both[other].add(one)
    parents, level, seen = {}, [host for host in hosts if both[host]], set(hosts)
    while level:
        above = {other for one in level for other in both[one]} - seen
        parents |= {one: both[one] & above for one in level if both[one] & above}
        seen |= above
        level = above
    return Fabric(source, sure, [*hosts], parents)


_DEVICE = re.compile(r'(Switch|Ca|Rt)\s+\d+\s+"([^"]+)"\s*(?:#\s*"([^"]*)".*)?')
_PORT = re.compile(
    r'\[(\d+)\](?:\[ext \d+\])?(?:\([0-9a-fA-F]+\))?\s+"([^"]+)"\[(\d+)\](?:\[ext \d+\])?(?:\([0-9a-fA-F]+\))?'
    r'\s*(?:#[^"]*"([^"]*)".*)?'
)


def _ibnetdiscover(lines, source):
    kinds, names, ports, now = {}, {}, {}, None
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line or line.startswith("#") or re.match(r"\w+=\S+$", line):
            continue
        if found := _DEVICE.fullmatch(line):
            kind, now, text = found.groups()
            if now in kinds:
                raise TopologyError(f"{kind} {now} is there twice", number)
            kinds[now], names[now] = kind, text or names.get(now, now)
        elif (found := _PORT.fullmatch(line)) and now:
            mine, other, theirs, text = found.groups()
            end, far = (now, mine), (other, theirs)
            if ports.setdefault(end, far) != far or ports.setdefault(far, end) != end:
                raise TopologyError(f'port {mine} of "{now}" or its other end is connected to two', number)
            if kinds[now] == "Switch":
                names.setdefault(other, text or other)
        else:
            raise TopologyError(f"neither a device nor a port: '{line[:80]}'", number)
    for device, _ in ports:
        kinds.setdefault(device, "Switch" if device.startswith("S") else "Ca")
        names.setdefault(device, device)
    shown = defaultdict(list)
    for device, kind in kinds.items():
        shown[names[device] if kind == "Switch" else names[device].split(" ")[0]].append(device)
    # Switches may share a description; several adapters with a host's name are one host.
    called = {d: d if len(of) > 1 and kinds[d] == "Switch" else name for name, of in shown.items() for d in of}
    links = defaultdict(set)
    for (here, _), (there, _) in ports.items():
        links[called[here]].add(called[there])
    hosts = list(dict.fromkeys(called[device] for device, kind in kinds.items() if kind != "Switch"))
    return _some_hosts(from_links(source, "as the subnet's devices report it", hosts, links))


def _opensm(lines, source):
    order = {}
    for number, line in enumerate(lines, 1):
        found = re.fullmatch(r"(0x[0-9a-fA-F]+)\s+(\S+).*", line.strip())
        if line.strip() and not found:
            raise TopologyError(f"neither LID and host nor DUMMY: '{line[:80]}'", number)
        if found and found[2] != "DUMMY":
            order.setdefault(found[2], len(order))
    sure = "the order of OpenSM's routing; it does not say where a switch begins"
    return _some_hosts(Fabric(source, sure, [*order], {}, order))


def _lldp(lines, source):
    parents, me = defaultdict(set), socket.gethostname()
    for number, line in enumerate(lines, 1):
        found = re.fullmatch(r"(?:(\S+): *)?lldp\.([^=]+)=(.*)", line.strip())
        if line.strip() and not found:
            raise TopologyError(
                f"not lldp.INTERFACE.KEY=VALUE, as lldpctl -f keyvalue writes it: '{line[:80]}'", number
            )
        if found and found[2].endswith(".chassis.name"):
            parents[found[1] or me].add(found[3])
    return _some_hosts(Fabric(source, "as the switches announce themselves", [*parents], dict(parents)))


_FORMATS = (
    (r"\s*[{\[]", _json),
    (r"\s*(SwitchName|BlockName|BlockSizes)=", _slurm),
    (r"\s*(vendid=|devid=|sysimgguid=|switchguid=|caguid=|Switch\s+\d|Ca\s+\d)", _ibnetdiscover),
    (r"\s*0x[0-9a-f]+\s", _opensm),
    (r"\s*(\S+: *)?lldp\.", _lldp),
    (r"\s*[^\s=.]+\.[^\s=]+\s*$", _lines_of_addresses),
)
