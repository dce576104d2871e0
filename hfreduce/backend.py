"""The c10d backend "hfreduce": its registration with torch.distributed, and queries about a process group."""

import atexit
import copy
import importlib
import logging
import os
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hfreduce import core

_log = logging.getLogger("hfreduce")
_AT_EXIT = 10.0  # seconds for groups that are still open to send their last messages


def native():
    """hfreduce._c10d. The ImportError gives the reason and the command to run.

    The module is built for one version of torch. With another version it might not load, or crash.
    """
    run = "pip install --no-build-isolation --force-reinstall --no-deps hfnn (or `make`), with this Python"
    try:
        build = importlib.import_module("hfreduce._build")
    except ImportError:
        raise ImportError(f"hfreduce was not built; run {run}") from None
    if not build.c10d.startswith("for torch"):
        raise ImportError(f"hfreduce's torch backend was {build.c10d}; run {run}")
    if build.torch_version != torch.__version__:
        raise ImportError(
            f"hfreduce's torch backend was built for torch {build.torch_version}, this is torch {torch.__version__}; "
            f"run {run}"
        )
    return importlib.import_module("hfreduce._c10d")


def Options() -> Any:
    """Makes the `pg_options` of init_process_group and new_group. The attributes:

    * interface: str. The network interface between hosts; "" for the one with a route to the others.
    * host_id: str. Ranks with equal ids share memory; "" for the machine's own.
    * slot_bytes: int. Shared memory that a rank fills in one step; each rank has two.
    * plan: list. Tuples of `hfreduce.plan.Row`; empty for this machine's measured plan.
    * device_plan: list. The same for CUDA tensors, of `hfreduce.plan.DeviceRow`.

    Raises:
        ImportError: hfreduce was not built for this torch.
    """
    return native().Options()


def register() -> None:
    """Registers "hfreduce" with torch.distributed; `import hfreduce` calls it.

    Raises:
        RuntimeError: TORCH_DISTRIBUTED_USE_TORCHCOMMS is set: then torch.distributed asks no other backend.
    """
    if os.environ.get("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "0").lower() not in ("0", "false", ""):
        raise RuntimeError(
            "TORCH_DISTRIBUTED_USE_TORCHCOMMS is set: torch.distributed would give all groups to torchcomms, none to "
            "hfreduce; unset it, or do not import hfreduce"
        )
    if not hasattr(dist.Backend, "HFREDUCE"):
        dist.Backend.register_backend("hfreduce", create, extended_api=True, devices=["cpu", "cuda"])


def create(options, pg_options=None):
    """Makes the backend of one process group; torch.distributed calls it."""
    c10d = native()
    if pg_options is not None and not isinstance(pg_options, c10d.Options):
        raise TypeError(f"pg_options of the hfreduce backend are hfreduce.Options, got {type(pg_options).__name__}")
    if not _ready:
        c10d.set_told_by(core.where, core.why, core.sorted_hosts)
        atexit.register(c10d.close_all, _AT_EXIT)
        _ready.append(True)
    own = copy.deepcopy(pg_options or c10d.Options())
    own.plan = own.plan or core.plan_rows(options.group_size, own.slot_bytes)
    own.device_plan = own.device_plan or core.device_plan_rows(options.group_size)
    backend = c10d.create(options, own)
    _log.info("%s", backend.describe())
    return backend


_ready = []  # not empty once `create` has set up the module


def _backend(group):
    group = group or dist.group.WORLD
    if group is None:
        raise ValueError("there is no process group: call torch.distributed.init_process_group('hfreduce') first")
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank does not belong to the given process group: call this on a rank that does")
    backend = group._get_backend(torch.device("cpu"))
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
    if not isinstance(backend, native().Backend):
        raise ValueError(f"the process group's backend for CPU tensors is {backend.name()!r}, not 'hfreduce'")
    return backend


def describe(group: dist.ProcessGroup | None = None) -> str:
    """One line: ranks, hosts and connections of a process group, and paths of CUDA tensors once it has seen some.

    Args:
        group: A process group on hfreduce; the default group if None.

    Raises:
        ValueError: There is no such group, it has another backend, or this rank is not in it.
    """
    return _backend(group).describe()


def record(group: dist.ProcessGroup | None = None) -> str:
    """The last operations of a process group, as JSON in the schema of torch's flight recorder, 2.10.

    Args:
        group: A process group on hfreduce; the default group if None.

    Raises:
        ValueError: As in `describe`.
    """
    return _backend(group).record()


def operations() -> int:
    """The number of operations that this process has begun on the backend, over all process groups."""
    return native().operations()


def nbytes() -> int:
    """The bytes of all dense tensors that those operations return."""
    return native().nbytes()


def monitored_barrier(group: dist.ProcessGroup | None = None, timeout: timedelta | float | None = None) -> None:
    """torch.distributed.monitored_barrier, which torch itself only allows for gloo.

    On a rank outside the group it warns and returns, as torch's collectives do.

    Args:
        group: A process group on hfreduce; the default group if None.
        timeout: A timedelta or seconds; the group's if None.

    Raises:
        torch.distributed.DistBackendError: Ranks are missing. It names them and shows where each of them is. Unlike
            with gloo, the group is then unusable, as after any failure.
    """
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        warnings.warn(
            f"monitored_barrier was called on global rank {dist.get_rank()}, which does not belong to the given group",
            stacklevel=2,
        )
        return
    if timeout is None:
        timeout = timedelta(milliseconds=-1)  # c10d's value for "none given"
    elif not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=timeout)
    _backend(group)
    (group or dist.group.WORLD).monitored_barrier(timeout, wait_all_ranks=True)
