"""The direct functions: collectives on contiguous CPU tensors, on the calling thread, without torch.distributed.

A trailing underscore means that the given tensor is written to. All ranks of a group call the same functions in the
same order, with the same shapes (except in an uneven all_to_all) and dtypes. ValueError: the arguments are invalid;
nothing was sent. hfreduce.Fault: the group is unusable. The message names ranks, hosts and operations; `cause` is one
of died, timeout, mismatch, aborted, left, broken; `ranks` are the ranks at fault.

dtypes: uint8, int8, int16, int32, int64, bool, float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2.
op: "sum", "avg", "prod", "min", "max", "band", "bor", "bxor"; and "premul_sum", which multiplies this rank's input by
`factor`. Bit operations take integers and bool, premul_sum takes floats, avg everything except bool. Floats of 16 and 8
bits are added in float32 and rounded once. Results are bitwise equal on all ranks and in every run.
"""

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch.distributed as dist

from hfreduce.group import Group


def explain(
    op: str, nbytes: int, *, ranks: int | None = None, hosts: int | None = None, device: str = "cpu", peers: bool = True
) -> str:
    """A text: which algorithm a collective runs, and why.

    Args:
        op: "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all", "gather", "scatter" or
            "barrier".
        nbytes: Bytes of the whole message: of the blocks of all ranks, if it consists of blocks.
        ranks: Number of ranks. By default the launcher's (WORLD_SIZE), otherwise one for each core.
        hosts: Number of hosts. By default the launcher's (LOCAL_WORLD_SIZE).
        device: Of the tensors, "cpu" or "cuda".
        peers: Whether the GPUs of a host reach each other's memory, with one GPU for each rank.

    Raises:
        ValueError: For another operation or device.
        hfreduce.plan.PlanError: The file of measured plans is unusable.
    """
    from hfreduce import plan

    return plan.explain(op, nbytes, ranks=ranks, hosts=hosts, device=device, peers=peers)


_default = []  # at most one


def init(
    store: dist.Store | None = None,
    rank: int | None = None,
    size: int | None = None,
    *,
    name: str = "default",
    timeout: float = 300.0,
    **config: Any,
) -> Group:
    """Makes and returns the default group, of all ranks, which the functions of this module use.

    Args:
        store: A store of torch.distributed that all ranks reach. By default, store, rank and size come from the
            environment (MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE), as torchrun sets it.
        rank: This rank. Needed with a store.
        size: The number of ranks. Needed with a store.
        name: Of the group, in error messages. Groups on one store need different names.
        timeout: Seconds, for connecting and as the default of operations.
        config: As in `Group`.

    Raises:
        RuntimeError: There is a default group already.
        ValueError: rank or size is missing.
        hfreduce.Fault: Ranks did not connect.
    """
    if _default:
        raise RuntimeError("hfreduce.init was already called: call hfreduce.close() first, or make a Group")
    if store is None:
        store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
    if rank is None or size is None:
        raise ValueError("hfreduce.init with a store needs rank and size")
    _default.append(Group(store, rank, size, name=name, timeout=timeout, **config))
    return _default[0]


def close() -> None:
    """Closes the default group: sends what is still queued, and tells the other ranks that this one leaves."""
    if _default:
        _default.pop().close()


P, R = ParamSpec("P"), TypeVar("R")


def _function(method: Callable[Concatenate[Group, P], R]) -> Callable[P, R]:
    """A method of the default group, as a function."""

    def function(*args: P.args, **options: P.kwargs) -> R:
        if not _default:
            raise RuntimeError(f"hfreduce.{name} needs a group: call hfreduce.init() first")
        return method(_default[0], *args, **options)

    name, signature = method.__name__, inspect.signature(method)
    function.__name__ = function.__qualname__ = name
    function.__doc__ = method.__doc__
    function.__annotations__ = method.__annotations__
    function.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
    return function


all_reduce = _function(Group.all_reduce)
all_reduce_ = _function(Group.all_reduce_)
reduce_ = _function(Group.reduce_)
reduce_scatter = _function(Group.reduce_scatter)
all_gather = _function(Group.all_gather)
broadcast_ = _function(Group.broadcast_)
gather = _function(Group.gather)
scatter = _function(Group.scatter)
all_to_all = _function(Group.all_to_all)
barrier = _function(Group.barrier)
send = _function(Group.send)
recv_ = _function(Group.recv_)
recv_any_ = _function(Group.recv_any_)
