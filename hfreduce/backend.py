"""The c10d backend "hfreduce": its registration with torch.distributed, and what can be asked of a process group."""

import atexit
import copy
import importlib
import logging
import os
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

from hfreduce import api

_log = logging.getLogger("hfreduce")
_AT_EXIT = 10.0  # seconds that groups nobody ended are given to let their last messages out


def native():
    """hfreduce._c10d. ImportError says why there is none, and what to run.

    It is a C++ class of one version of torch: with another one it would not load, or worse.
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


def Options():
    """`pg_options` of init_process_group and new_group: interface, host_id, slot_bytes, plan, device_plan.

    interface: the network interface between hosts; "" for the one that has a route to the others. host_id: two ranks
    share memory when it is equal; "" for the machine's own. slot_bytes: shared memory that a rank fills in one step;
    each rank has two. plan: rows as `hfreduce.plan` keeps them; empty for this machine's. device_plan: the same for
    CUDA tensors (`hfreduce.plan.DeviceRow`).
    """
    return native().Options()


def register():
    """Makes "hfreduce" known to torch.distributed; `import hfreduce` has done it."""
    if os.environ.get("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "0").lower() not in ("0", "false", ""):
        raise RuntimeError(
            "TORCH_DISTRIBUTED_USE_TORCHCOMMS is set: torch.distributed would hand all groups to torchcomms and never "
            "ask hfreduce; unset it, or do not import hfreduce"
        )
    if not hasattr(dist.Backend, "HFREDUCE"):
        dist.Backend.register_backend("hfreduce", create, extended_api=True, devices=["cpu", "cuda"])


def create(options, pg_options=None):
    """The backend of one process group, as torch.distributed asks for it."""
    c10d = native()
    if pg_options is not None and not isinstance(pg_options, c10d.Options):
        raise TypeError(f"pg_options of the hfreduce backend are hfreduce.Options, got {type(pg_options).__name__}")
    if not _ready:
        c10d.set_told_by(api.where, api.why)
        atexit.register(c10d.close_all, _AT_EXIT)
        _ready.append(True)
    own = copy.deepcopy(pg_options or c10d.Options())
    own.plan = own.plan or api.plan_rows(options.group_size, own.slot_bytes)
    own.device_plan = own.device_plan or api.device_plan_rows(options.group_size)
    backend = c10d.create(options, own)
    _log.info("%s", backend.describe())
    return backend


_ready = []  # not empty once the module was told of Python


def _backend(group):
    group = group or dist.group.WORLD
    if group is None:
        raise ValueError("there is no process group: call torch.distributed.init_process_group('hfreduce') first")
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank does not belong to the given process group: ask one that does")
    backend = group._get_backend(torch.device("cpu"))
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
    if not isinstance(backend, native().Backend):
        raise ValueError(f"the process group's backend for CPU tensors is {backend.name()!r}, not 'hfreduce'")
    return backend


def describe(group=None):
    """Ranks, hosts and connections of a process group, and how CUDA tensors go once it has seen some, in one line."""
    return _backend(group).describe()


def record(group=None):
    """The last operations of a process group, as JSON: what torch's flight recorder writes, schema 2.10."""
    return _backend(group).record()


def operations():
    """How many operations this process has begun on the backend, on all process groups."""
    return native().operations()


def nbytes():
    """How many bytes the dense tensors have that those operations give back, all together."""
    return native().nbytes()


def monitored_barrier(group=None, timeout=None):
    """torch.distributed.monitored_barrier, which torch itself allows for gloo alone.

    timeout: a timedelta, or seconds; the group's, if None. DistBackendError names the ranks that did not come, with
    where all of them are. Unlike gloo's, the group is of no use after it, as after any failure. On a rank outside the
    group it warns and returns, as torch's collectives do.
    """
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        warnings.warn(
            f"monitored_barrier was called on global rank {dist.get_rank()}, which does not belong to the given group",
            stacklevel=2,
        )
        return
    if timeout is None:
        timeout = timedelta(milliseconds=-1)  # c10d's own word for none
    elif not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=timeout)
    _backend(group)
    (group or dist.group.WORLD).monitored_barrier(timeout, wait_all_ranks=True)
