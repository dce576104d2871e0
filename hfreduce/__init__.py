"""Collectives whose errors name the rank at fault. CPU tensors use shared memory inside a host and TCP between hosts.
CUDA tensors use kernels over peer memory, or copy engines and host cores.

As a backend of torch.distributed, on which DDP, FSDP and the rest of torch run unchanged (CPU tensors, and CUDA tensors
on one host):

    import hfreduce
    torch.distributed.init_process_group("hfreduce")

Direct calls, without c10d's overhead (`hfreduce.api`):

    hfreduce.init()
    hfreduce.all_reduce_(gradient, "avg")

An error is an exception on every rank that names ranks, hosts and operations: torch.distributed.DistBackendError from a
process group, hfreduce.Fault from the direct functions. Groups that are still open are closed before the interpreter
exits, without waiting long.
"""

import contextlib
from typing import TYPE_CHECKING

from hfreduce import wire
from hfreduce.api import (
    Group,
    all_gather,
    all_reduce,
    all_reduce_,
    all_to_all,
    barrier,
    broadcast_,
    close,
    explain,
    gather,
    init,
    recv_,
    recv_any_,
    reduce_,
    reduce_scatter,
    scatter,
    send,
)
from hfreduce.backend import Options, describe, monitored_barrier, nbytes, operations, record, register


class Fault(RuntimeError):
    """A group failed, and cannot be used any more. The message names ranks, hosts and operations.

    Attributes:
        cause: "died", "timeout", "mismatch", "aborted", "left" or "broken".
        ranks: The ranks at fault, numbered in the group.
    """

    cause: str
    ranks: list[int]


if not TYPE_CHECKING:
    with contextlib.suppress(ImportError):  # nothing was compiled: core.native raises an error on use
        from hfreduce import _C

        _C.Fault.__doc__, _C.Fault.__module__, Fault = Fault.__doc__, "hfreduce", _C.Fault

__all__ = [
    "Fault",
    "Group",
    "Options",
    "all_gather",
    "all_reduce",
    "all_reduce_",
    "all_to_all",
    "barrier",
    "broadcast_",
    "close",
    "describe",
    "explain",
    "gather",
    "init",
    "monitored_barrier",
    "nbytes",
    "operations",
    "record",
    "recv_",
    "recv_any_",
    "reduce_",
    "reduce_scatter",
    "register",
    "scatter",
    "send",
    "wire",
]

register()
