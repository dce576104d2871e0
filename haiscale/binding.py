"""Which CPUs a rank of this host gets: those near its GPU, not shared with other ranks.

Linux shows in /sys which CPUs form a core, which cores form a NUMA node, and to which node a GPU is attached. Memory
needs no binding: a page is on the node of the CPU that writes to it first.
"""

import itertools
import os
import re
from pathlib import Path
from typing import NamedTuple


class Share(NamedTuple):
    """The CPUs of a rank, and its number of threads: one per core."""

    cpus: frozenset[int]
    threads: int


def shares(nprocs: int, root: str | os.PathLike = "/") -> list[Share]:
    """A share for each of `nprocs` ranks of this host, from the CPUs that this process may use.

    Rank i is assumed to use the i-th visible GPU. If there are fewer GPUs, ranks are spread over the nodes in turn. The
    ranks of a node split its cores evenly. If there are more ranks than cores, they share all of them. `root` is the
    directory with /sys and /proc.
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
    """The nodes of each rank: that of its GPU, else a part of all nodes; one node if there are more ranks than
    nodes."""
    if len(gpu_nodes) >= nprocs and all(node in nodes for node in gpu_nodes[:nprocs]):
        return [(node,) for node in gpu_nodes[:nprocs]]
    ends = [rank * len(nodes) // nprocs for rank in range(nprocs + 1)]
    return [tuple(nodes[begin : max(end, begin + 1)]) for begin, end in itertools.pairwise(ends)]


def _nodes(root: Path, allowed: set[int]) -> dict[int, list[int]]:
    """CPUs by NUMA node, without nodes that have no usable CPU; one node if Linux reports none."""
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
    """The NUMA node of each visible NVIDIA GPU in PCI bus order; -1 if Linux does not know it.

    The driver is not queried, because this would make the process one of its users and take seconds.
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
    """Parses Linux's lists: "0-3,8" is 0, 1, 2, 3, 8."""
    ranges = (part.split("-") for part in text.strip().split(",") if part)
    return [cpu for ends in ranges for cpu in range(int(ends[0]), int(ends[-1]) + 1)]
