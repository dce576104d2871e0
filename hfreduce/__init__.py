"""Collectives that say who went wrong: on CPU tensors by shared memory in a host and TCP between hosts, on CUDA tensors
by kernels over peer memory or by copy engines and host cores.

As a backend of torch.distributed, on which DDP, FSDP and the rest of torch run unchanged (on CPU tensors; on CUDA
tensors that is not tested yet):

    import hfreduce
    torch.distributed.init_process_group("hfreduce")

Directly, without c10d's overhead (`hfreduce.api`):

    hfreduce.init()
    hfreduce.all_reduce_(gradient, "avg")

What goes wrong is an exception on every rank that names ranks, hosts and operations: from a process group
torch.distributed.DistBackendError, from the direct functions hfreduce.Fault. Groups that nobody ended are ended before
the interpreter is, without waiting long.
"""

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

try:
    from hfreduce._C import Fault
except ImportError:  # nothing was compiled: whoever uses it is told, see api.native

    class Fault(RuntimeError):
        """What goes wrong in a group; `cause` says how, `ranks` whose fault it is."""


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
