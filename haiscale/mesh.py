"""Process groups: the default group, and meshes of groups for pipelines, replicas and shards."""

import datetime
import hashlib
import importlib
import logging
import os
import socket
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Subgroups", "init", "make_subgroups"]

_log = logging.getLogger("haiscale")
_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


_given: torch.device | None = None


def _rank_device() -> torch.device:
    """This rank's device: the argument of `init`; else the GPU numbered LOCAL_RANK if visible, or the CPU."""
    if _given is not None:
        return _given
    local = int(os.environ.get("LOCAL_RANK", 0))
    if torch.cuda.is_available() and local < torch.cuda.device_count():
        return torch.device("cuda", local)
    return torch.device("cpu")


def init(
    backend: str | None = None, timeout: float | None = None, device: str | torch.device | None = None
) -> torch.device:
    """Creates the default process group from the environment that haiscale.launch or torchrun gives its ranks.

    Args:
        backend: A name for torch.distributed. None: "hfreduce"; or "nccl" if hfreduce was built without CUDA, and for
            GPUs of several hosts, unless `hfreduce tune` has found hfreduce to be faster between them.
        timeout: Seconds that an operation waits for other ranks; None: torch's own default.
        device: None: the GPU numbered LOCAL_RANK, or the CPU if there is none.

    Returns:
        The device, which is now the current one.

    Raises:
        ValueError: The environment is missing.
    """
    if missing := [name for name in _ENVIRONMENT if name not in os.environ]:
        raise ValueError(
            f"{', '.join(missing)} is not set in the environment: start this program by "
            "`python -m haiscale.launch --nproc N program.py`, by haiscale.spawn, or by torchrun"
        )
    global _given
    _given = None if device is None else torch.device(device)
    mine = _rank_device()
    if mine.type == "cuda":
        torch.cuda.set_device(mine)
    options = {} if timeout is None else {"timeout": datetime.timedelta(seconds=timeout)}
    why_not = None
    if backend is None:
        import hfreduce  # noqa: F401  # registers itself

        one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
        why_not = why_nccl(one_host, hfreduce_takes_cuda(), measured()) if mine.type == "cuda" else None
        if mine.type == "cuda" and not one_host:  # the plan is a file of each host's: rank 0 decides
            wait = options.get("timeout", dist.distributed_c10d.default_pg_timeout)
            store, rank, size = next(dist.rendezvous("env://", timeout=wait))
            if rank == 0:
                store.set("haiscale.init", why_not or "")
            why_not = store.get("haiscale.init").decode() or None
            options |= {"store": store, "rank": rank, "world_size": size}
        backend = "nccl" if why_not else "hfreduce"
    dist.init_process_group(backend, **options)
    if dist.get_rank() == 0:
        size = dist.get_world_size()
        if why_not:
            _log.warning("haiscale.init: %d ranks on NCCL, not on hfreduce: %s", size, why_not)
        else:
            _log.info("haiscale.init: %d ranks on %s", size, backend)
    return mine


def measured(size: int | None = None) -> tuple[str, str] | None:
    """hfreduce.plan.backend, if hfreduce can be imported."""
    try:
        from hfreduce import plan
    except ImportError:
        return None
    return plan.backend(size)


def why_nccl(one_host: bool, takes_cuda: bool, measured: tuple[str, str] | None) -> str | None:
    """Why CUDA tensors use NCCL unless a backend is named; None if they use hfreduce.

    one_host: whether all ranks are known to be on one host. takes_cuda: `hfreduce_takes_cuda` of all ranks. measured:
    the faster backend between such hosts, and when it was measured.
    """
    if not dist.is_nccl_available():
        return None
    if not takes_cuda:
        return "this hfreduce was built without CUDA"
    if one_host:
        return None
    if measured is None:
        return (
            "GPUs of several hosts, between which nothing is measured; "
            "`torchrun ... -m hfreduce.tune --device cuda` on these hosts finds the faster one"
        )
    return f"NCCL was the faster one between such hosts on {measured[1]}" if measured[0] == "nccl" else None


def backend_of(group: dist.ProcessGroup) -> str:
    """The name of the backend that a group runs on.

    The same as torch.distributed.get_backend, except for groups switched by `haiscale.auto`: for these torch returns
    the name that the script requested, and this function returns "hfreduce".
    """
    names = {pair.rpartition(":")[2] for pair in dist.get_backend_config(group).split(",")}
    return names.pop() if len(names) == 1 else dist.get_backend(group)


def hfreduce_takes_cuda() -> bool:
    """Whether this installation of hfreduce has CUDA kernels; without them, CUDA tensors go through the host."""
    try:
        return importlib.import_module("hfnn._build").cuda.startswith("nvcc")
    except ImportError:
        return False


def timeout_of(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """How long operations of a group wait for other ranks; None if unknown, as in torch's debug mode."""
    kind = "cpu" if any(device.type == "cpu" for device in group._device_types) else "cuda"
    return getattr(getattr(group._get_backend(torch.device(kind)), "options", None), "_timeout", None)


def sibling(
    group: dist.ProcessGroup, backend: str | None = None, options=None, ranks: list[int] | None = None
) -> dist.ProcessGroup:
    """A new group of the same ranks; only they call this. Its operations do not wait for those of the first group.

    It has the backend and the timeout of `group`, which torch's new_group does not take over. backend: another backend.
    options: of the backend, as `pg_options`. ranks: a subset of `group`, as global ranks.
    """
    if backend == "nccl" and options is None:
        options = dist.ProcessGroupNCCL.Options()  # haiscale.auto switches no group that has options
        options._timeout = timeout_of(group) or options._timeout
    ranks = dist.get_process_group_ranks(group) if ranks is None else ranks
    order = {} if ranks == sorted(ranks) else {"sort_ranks": False}  # torch 2.13's option for another order
    # Not with the whole world, because other ranks may create other groups at this time. torch would name the group by
    # the number of groups of this process. If these numbers differ, its ranks would wait for each other for ever.
    with mock.patch.object(dist.distributed_c10d, "_process_group_name", lambda *_, **__: _sibling_name(ranks)):
        return dist.new_group(
            ranks,
            timeout=timeout_of(group),
            backend=backend or dist.get_backend(group),
            use_local_synchronization=True,
            pg_options=options,
            **order,
        )


_siblings: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by default group: how many per ranks


def _sibling_name(ranks: list[int]) -> str:
    """A name that is the same on all of these ranks: only they create these siblings, all in the same order."""
    made = _siblings.setdefault(dist.group.WORLD, Counter())
    made[tuple(ranks)] += 1
    return hashlib.sha1(f"haiscale {ranks} {made[tuple(ranks)]}".encode(), usedforsecurity=False).hexdigest()


def host_groups(group: dist.ProcessGroup) -> tuple[dist.ProcessGroup, dist.ProcessGroup] | None:
    """The ranks of `group` on this rank's host, and those with its position on all hosts. All of `group` call this.

    None if there is one host, or one rank per host, or unequal numbers: the argument `hosts` of hfreduce.wire.
    """
    names: list[str] = [""] * group.size()
    dist.all_gather_object(names, _host(), group=group)
    hosts: dict[str, list[int]] = {}
    for rank, name in zip(dist.get_process_group_ranks(group), names, strict=True):
        hosts.setdefault(name, []).append(rank)
    sizes = {len(ranks) for ranks in hosts.values()}
    if len(hosts) == 1 or sizes == {1} or len(sizes) > 1:
        return None
    inside = hosts[_host()]
    place = inside.index(dist.get_rank())
    return sibling(group, ranks=inside), sibling(group, ranks=[ranks[place] for ranks in hosts.values()])


def own_gpus(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether NCCL can connect the ranks of `group`: each passes a CUDA device of its own. All of them call this."""
    mine = f"{_host()} {torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else ""
    every: list[str] = [""] * group.size()
    dist.all_gather_object(every, mine if dist.is_nccl_available() else "", group=group)
    return "" not in every and len(set(every)) == len(every)


def _host() -> str:
    """Equal for ranks that share memory: the machine's boot id and network namespace, as in hfreduce."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return f"{boot.strip()} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # not on Linux
        return socket.gethostname()


def assisted(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A sibling on hfreduce whose collectives on CUDA tensors use copy engines and host cores, no multiprocessors."""
    import hfreduce
    from hfreduce import plan

    options, kinds = hfreduce.Options(), ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
    options.device_plan = [plan.DeviceRow(kind, plan.ANY, "assisted").tuple() for kind in kinds]
    return sibling(group, "hfreduce", options)


@dataclass(frozen=True)
class Subgroups:
    """The result of `make_subgroups`; `dp_group, pp_group = make_subgroups(...)` also works.

    Attributes:
        mesh: A DeviceMesh of all ranks with the dimensions "pp", "dp", "fsdp". Pass `mesh["dp", "fsdp"]` to FSDP for
            replicas of shards.
    """

    mesh: DeviceMesh

    @property
    def pp_group(self) -> dist.ProcessGroup:
        """Ranks that hold the stages of one pipeline."""
        return self.mesh.get_group("pp")

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """Ranks that hold the same parameters and read different batches; their gradients are averaged."""
        return self.mesh.get_group("dp")

    @property
    def fsdp_group(self) -> dist.ProcessGroup:
        """Ranks that hold shards of the same parameters."""
        return self.mesh.get_group("fsdp")

    def __iter__(self) -> Iterator[dist.ProcessGroup]:
        return iter((self.dp_group, self.pp_group))


def make_subgroups(pp_size: int = 1, dp_size: int | None = None, fsdp_size: int = 1) -> Subgroups:
    """Splits all ranks into pipelines of `pp_size` stages, `dp_size` replicas and `fsdp_size` shards.

    All ranks call it. Neighbouring ranks, which are probably on one host, are first shards, then replicas. So
    pipelines, which send least, cross hosts, and each rank of a host is in a different pipeline (as in Fire-Flyer,
    arXiv 2408.14158, section 5).

    Args:
        pp_size: Stages of a pipeline.
        dp_size: Replicas; None: as many as there are ranks for.
        fsdp_size: Shards.

    Raises:
        ValueError: The product of the sizes is not the number of ranks, or there is no process group.
    """
    if not dist.is_initialized():
        raise ValueError("there is no process group: call haiscale.init() first, in ranks started by haiscale.launch")
    world, sizes = dist.get_world_size(), {"pp_size": pp_size, "dp_size": dp_size, "fsdp_size": fsdp_size}
    for name, size in sizes.items():
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(f"{name}={size!r} is not accepted: give an integer of at least 1")
    replicas = world // (pp_size * fsdp_size) if dp_size is None else dp_size
    if pp_size * replicas * fsdp_size != world:
        given = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"{given} do not make up {world} ranks: their product must be {world}")
    kind = "cpu" if dist.get_backend() == "gloo" else _rank_device().type
    ranks = torch.arange(world).view(pp_size, replicas, fsdp_size)
    groups = [_subgroup(ranks.movedim(dim, -1)) for dim in range(3)]
    return Subgroups(DeviceMesh.from_group(groups, kind, ranks, mesh_dim_names=("pp", "dp", "fsdp")))


def _subgroup(ranks: torch.Tensor) -> dist.ProcessGroup:
    """This rank's group among the rows of `ranks`. DeviceMesh would create them with torch's own timeout."""
    rows = ranks.reshape(-1, ranks.shape[-1]).tolist()
    return dist.new_subgroups_by_enumeration(rows, timeout=timeout_of(dist.group.WORLD))[0]
