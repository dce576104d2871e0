"""Which CPUs a rank of this host gets: those near its GPU, and no other rank's.

Linux tells in /sys which CPUs form a core, which cores a NUMA node, and which node a GPU hangs on. Memory follows by
itself: a page lies on the node of the CPU that writes to it first.
"""

import itertools
import os
import re
from pathlib import Path
from typing import NamedTuple


class Share(NamedTuple):
    """The CPUs of a rank, and how many threads suit it: one a core."""

    cpus: frozenset[int]
    threads: int


def shares(nprocs: int, root: str | os.PathLike = "/") -> list[Share]:
    """A share for each of `nprocs` ranks of this host, from the CPUs that this process may use.

    Rank i is taken to use the i-th visible GPU; where there are fewer, ranks are spread over the nodes in turn. The
    ranks of a node split its cores evenly; they share all of them where there are more ranks than cores. `root` is
    where /sys and /proc are.
    """
    root, allowed = Path(root), os.sched_getaffinity(0)
    nodes = _nodes(root, allowed)
    homes = _homes(nprocs, list(nodes), _gpu_nodes(root))
    found = []
    for rank, home in enumerate(homes):
        cores = [core for node in home for core in _cores(root, nodes[node])]
        neighbours = [other for other in range(nprocs) if homes[other] == home]
        place, count = neighbours.index(rank), len(neighbours)
        if len(cores) < count:
            found.append(Share(frozenset().union(*cores), 1))
            continue
        mine = cores[place * len(cores) // count : (place + 1) * len(cores) // count]
        found.append(Share(frozenset().union(*mine), len(mine)))
    return found


def _homes(nprocs: int, nodes: list[int], gpu_nodes: list[int]) -> list[tuple[int, ...]]:
    """The nodes of each rank: of its GPU; else a part of all nodes, one alone where there are more ranks than nodes."""
    if len(gpu_nodes) >= nprocs and all(node in nodes for node in gpu_nodes[:nprocs]):
        return [(node,) for node in gpu_nodes[:nprocs]]
    ends = [rank * len(nodes) // nprocs for rank in range(nprocs + 1)]
    return [tuple(nodes[begin : max(end, begin + 1)]) for begin, end in itertools.pairwise(ends)]


def _nodes(root: Path, allowed: set[int]) -> dict[int, list[int]]:
    """CPUs by NUMA node, without nodes of which none may be used; one node where Linux knows of none."""
    found = {}
    for path in (root / "sys/devices/system/node").glob("node[0-9]*/cpulist"):
        cpus = sorted(allowed & set(_numbers(path.read_text())))
        if cpus:
            found[int(path.parent.name[4:])] = cpus
    return dict(sorted(found.items())) or {0: sorted(allowed)}


def _cores(root: Path, cpus: list[int]) -> list[frozenset[int]]:
    """CPUs of one node, those of a core together."""
    found = {}
    for cpu in cpus:
        path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        siblings = _numbers(path.read_text()) if path.exists() else [cpu]
        found.setdefault(frozenset(siblings) & frozenset(cpus), None)
    return list(found)


def _gpu_nodes(root: Path) -> list[int]:
    """The NUMA node of each visible NVIDIA GPU in the order of the PCI bus; -1 for one that Linux does not know.

    Not asked of the driver: that would make this process one of its users, and takes seconds.
    """
    gpus = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = [gpu for name in visible.split(",") if (gpu := _called(name.strip(), gpus)) is not None]
    found = []
    for gpu in gpus:
        path = root / "sys/bus/pci/devices" / gpu.parent.name.lower() / "numa_node"
        found.append(int(path.read_text()) if path.exists() else -1)
    return found


def _called(name: str, gpus: list[Path]) -> Path | None:
    """The GPU that CUDA_VISIBLE_DEVICES names by its number or the beginning of its UUID."""
    if name.isdigit():
        return gpus[int(name)] if int(name) < len(gpus) else None
    return next((gpu for gpu in gpus if name and re.search(rf"UUID:\s+{re.escape(name)}", gpu.read_text())), None)


def _numbers(text: str) -> list[int]:
    """Of Linux's lists: "0-3,8" is 0, 1, 2, 3, 8."""
    ranges = (part.split("-") for part in text.strip().split(",") if part)
    return [cpu for ends in ranges for cpu in range(int(ends[0]), int(ends[-1]) + 1)]
