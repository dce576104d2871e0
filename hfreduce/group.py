"""A group of ranks, with the collectives on contiguous CPU tensors."""

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hfreduce.core import native, plan_rows, sorted_hosts, where, why

OPS = ("sum", "avg", "prod", "min", "max", "band", "bor", "bxor", "premul_sum")  # the order of csrc/hfreduce/types.h
_ORDER = "uint8 int8 int16 int32 int64 bool float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2"  # too
DTYPES = {getattr(torch, name): number for number, name in enumerate(_ORDER.split())}
GROUP_TIMEOUT = -1.0  # use the group's timeout
_OPS = {name: number for number, name in enumerate(OPS)}


class Group:
    """A group of ranks. The collectives of hfreduce are its methods.

    Args:
        store: A store of torch.distributed that all ranks reach.
        rank: This rank.
        size: The number of ranks.
        name: Of the group, in error messages. Groups on one store need different names.
        timeout: Seconds, for connecting and as the default of operations.
        config: interface, host_id, slot_bytes and plan, as in `hfreduce.Options`; global_ranks: the numbers of the
            ranks in error messages.

    Raises:
        ValueError: Another thread makes a group of this name on this store.
        hfreduce.Fault: Ranks did not connect.

    >>> group = hfreduce.Group(torch.distributed.HashStore(), rank=0, size=1, name="example")
    >>> group.all_reduce(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    >>> group.close()
    """

    rank: int
    size: int
    close: Callable[[], object]

    def __init__(
        self, store: dist.Store, rank: int, size: int, *, name: str = "default", timeout: float = 300.0, **config: Any
    ):
        self.rank, self.size = rank, size
        config.setdefault("plan", plan_rows(size, config.get("slot_bytes")))
        with _Making(store, name) as making:
            keys = dist.PrefixStore(f"hfreduce/{name}", store)

            def find(key):  # does not wait
                making.check()
                return keys.get(key) if keys.check([key]) else None

            self._core = native().Communicator(
                keys.set, find, rank, size, name=name, timeout=timeout, where=where, sorted=sorted_hosts, **config
            )
        self.close = weakref.finalize(self, _end, self._core, os.getpid())  # at the latest when the interpreter exits

    def __repr__(self) -> str:
        return f"<{self._core.describe()}>"

    @property
    def operations(self) -> int:
        """The number of operations that this rank has begun."""
        return self._core.operations

    def record(self) -> str:
        """The last operations, as JSON in the schema of torch's flight recorder, 2.10."""
        return self._core.record()

    def abort(self, reason: str) -> None:
        """Makes all running and later operations of all ranks fail with this reason."""
        self._core.abort(reason)

    def all_reduce(
        self,
        x: Tensor,
        op: str = "sum",
        *,
        factor: float = 1.0,
        out: Tensor | None = None,
        timeout: float = GROUP_TIMEOUT,
    ) -> Tensor:
        """out = op over the x of all ranks. Returns out.

        Args:
            x: [*shape].
            op: One of the words above.
            factor: For "premul_sum": what this rank's x is multiplied by.
            out: [*shape]; a new tensor if None.
            timeout: Seconds; the group's if negative.
        """
        p, n, dtype = _memory(x)
        out = _output(out, x, x.shape)
        self._core.all_reduce(p, _memory(out)[0], n, dtype, _op(op), factor, timeout)
        return out

    def all_reduce_(self, x: Tensor, op: str = "sum", *, factor: float = 1.0, timeout: float = GROUP_TIMEOUT) -> Tensor:
        """x = op over the x of all ranks. Returns x.

        Args:
            x: [*shape].
            op: One of the words above.
            factor: For "premul_sum": what this rank's x is multiplied by.
            timeout: Seconds; the group's if negative.
        """
        return self.all_reduce(x, op, factor=factor, out=x, timeout=timeout)

    def reduce_(
        self, x: Tensor, root: int = 0, op: str = "sum", *, factor: float = 1.0, timeout: float = GROUP_TIMEOUT
    ) -> Tensor:
        """x of rank `root` = op over the x of all ranks; the other ranks keep theirs. Returns x.

        Args:
            x: [*shape].
            root: The rank that gets the result.
            op: One of the words above.
            factor: For "premul_sum": what this rank's x is multiplied by.
            timeout: Seconds; the group's if negative.
        """
        p, n, dtype = _memory(x)
        self._core.reduce(p, p if self.rank == root else 0, n, dtype, root, _op(op), factor, timeout)
        return x

    def reduce_scatter(
        self,
        x: Tensor,
        op: str = "sum",
        *,
        factor: float = 1.0,
        out: Tensor | None = None,
        timeout: float = GROUP_TIMEOUT,
    ) -> Tensor:
        """out = op over the x[rank] of all ranks. Returns out.

        Args:
            x: [size, *shape], a block for each rank.
            op: One of the words above.
            factor: For "premul_sum": what this rank's x is multiplied by.
            out: [*shape]; a new tensor if None.
            timeout: Seconds; the group's if negative.
        """
        self._blocks(x)
        out = _output(out, x, x.shape[1:])
        p, n, dtype = _memory(out)
        self._core.reduce_scatter(_memory(x)[0], p, n, dtype, _op(op), factor, timeout)
        return out

    def all_gather(self, x: Tensor, *, out: Tensor | None = None, timeout: float = GROUP_TIMEOUT) -> Tensor:
        """out[r] = x of rank r. Returns out.

        Args:
            x: [*shape]; may be out[rank].
            out: [size, *shape]; a new tensor if None.
            timeout: Seconds; the group's if negative.
        """
        p, n, dtype = _memory(x)
        out = _output(out, x, (self.size, *x.shape))
        self._core.all_gather(p, _memory(out)[0], n, dtype, timeout)
        return out

    def broadcast_(self, x: Tensor, root: int = 0, *, timeout: float = GROUP_TIMEOUT) -> Tensor:
        """x = x of rank `root`. Returns x.

        Args:
            x: [*shape].
            root: The rank whose x is sent.
            timeout: Seconds; the group's if negative.
        """
        self._core.broadcast(*_memory(x), root, timeout)
        return x

    def gather(
        self, x: Tensor, root: int = 0, *, out: Tensor | None = None, timeout: float = GROUP_TIMEOUT
    ) -> Tensor | None:
        """out[r] = x of rank r, on rank `root`. Returns out there, and None on the other ranks.

        Args:
            x: [*shape].
            root: The rank that gets all x.
            out: [size, *shape]; a new tensor if None.
            timeout: Seconds; the group's if negative.
        """
        p, n, dtype = _memory(x)
        out = _output(out, x, (self.size, *x.shape)) if self.rank == root else None
        self._core.gather(p, 0 if out is None else _memory(out)[0], n, dtype, root, timeout)
        return out

    def scatter(self, x: Tensor | None, out: Tensor, root: int = 0, *, timeout: float = GROUP_TIMEOUT) -> Tensor:
        """out = x[rank] of rank `root`. Returns out.

        Args:
            x: [size, *shape] on rank `root`; ignored on the others.
            out: [*shape].
            root: The rank whose blocks are sent.
            timeout: Seconds; the group's if negative.
        """
        p, n, dtype = _memory(out)
        if self.rank == root:
            self._blocks(x)
            _output(out, x, x.shape[1:])
        self._core.scatter(_memory(x)[0] if self.rank == root else 0, p, n, dtype, root, timeout)
        return out

    def all_to_all(
        self,
        x: Tensor,
        *,
        input_splits: Sequence[int] | None = None,
        output_splits: Sequence[int] | None = None,
        out: Tensor | None = None,
        timeout: float = GROUP_TIMEOUT,
    ) -> Tensor:
        """Sends rows of x to every rank, in order. Returns out, with the rows from every rank.

        Args:
            x: [rows, *shape].
            input_splits: How many rows go to each rank; equally many if None.
            output_splits: How many rows come from each rank. Needed with input_splits.
            out: [sum(output_splits), *shape]; a new tensor if None.
            timeout: Seconds; the group's if negative.
        """
        into = self._splits("input_splits", input_splits, x.shape[0])
        if output_splits is None and input_splits is not None:
            raise ValueError(
                "all_to_all with input_splits needs output_splits: the numbers of rows that each rank sends here"
            )
        back = self._splits("output_splits", output_splits, x.shape[0] if output_splits is None else sum(output_splits))
        out = _output(out, x, (sum(back), *x.shape[1:]))
        row = x[0].numel() if len(x) else out[0].numel() if len(out) else 0
        (p, _, dtype), (q, _, _) = _memory(x), _memory(out)
        self._core.all_to_all(p, *_ranges(into, row), q, *_ranges(back, row), dtype, timeout)
        return out

    def barrier(self, *, timeout: float = GROUP_TIMEOUT) -> None:
        """Returns when all ranks have called it. timeout: seconds; the group's if negative."""
        self._core.barrier(timeout)

    def send(self, x: Tensor, to: int, tag: int = 0, *, timeout: float = GROUP_TIMEOUT) -> None:
        """Sends x to a rank. Returns when x may be written to again.

        Args:
            x: [*shape].
            to: The receiving rank.
            tag: Messages between two ranks keep their order if they have the same tag.
            timeout: Seconds; the group's if negative.
        """
        self._core.send(*_memory(x), to, tag, timeout)

    def recv_(self, x: Tensor, source: int, tag: int = 0, *, timeout: float = GROUP_TIMEOUT) -> Tensor:
        """x = the next message from a rank. Returns x.

        Args:
            x: Of the message's size and dtype.
            source: The sending rank.
            tag: Of the message.
            timeout: Seconds; the group's if negative.
        """
        self._core.recv(*_memory(x), source, tag, timeout)
        return x

    def recv_any_(self, x: Tensor, tag: int = 0, *, timeout: float = GROUP_TIMEOUT) -> int:
        """x = a message from any rank. Returns its sender.

        Args:
            x: Of the message's size and dtype.
            tag: Of the message.
            timeout: Seconds; the group's if negative.
        """
        return self._core.recv_any(*_memory(x), tag, timeout)

    def _blocks(self, x):
        if x.dim() == 0 or x.shape[0] != self.size:
            raise ValueError(f"expected a first dimension of {self.size}, one block for each rank, got {_told(x)}")

    def _splits(self, what, splits, rows):
        if splits is None:
            if rows % self.size:
                raise ValueError(f"{rows} rows cannot be split evenly between {self.size} ranks: give {what}")
            splits = [rows // self.size] * self.size
        if len(splits) != self.size or sum(splits) != rows or min(splits) < 0:
            raise ValueError(f"{what} must be {self.size} numbers of rows that add up to {rows}, got {list(splits)}")
        return splits


class _Making:
    """A group that is being made. Two with one name at once would find each other's ranks, so both are refused."""

    _lock, _all = threading.Lock(), {}

    def __init__(self, store, name):
        self._name, self._key, self._alone = name, (*_place(store), name), True

    def __enter__(self):
        with self._lock:
            other = self._all.setdefault(self._key, self)
            if other is not self:
                other._alone = self._alone = False
        self.check()
        return self

    def __exit__(self, *_):
        with self._lock:
            if self._all.get(self._key) is self:
                del self._all[self._key]

    def check(self):
        if not self._alone:
            raise ValueError(
                f"two threads are making an hfreduce.Group named {self._name!r} on one store at once, so it is unknown "
                "which ranks belong together: give them different names"
            )


def _place(store):
    """An identity that is equal for two stores with the same keys, as far as can be seen."""
    if isinstance(store, dist.TCPStore):
        return store.host, store.port
    return (store.path,) if isinstance(store, dist.FileStore) else (id(store),)


def _end(core, pid):
    if os.getpid() == pid:  # otherwise a forked child is exiting, and the group is its parent's
        core.shutdown(why())


def _told(x):
    return f"{x.dtype}{list(x.shape)}"


def _memory(x):
    """Address, number of elements and dtype of a tensor. ValueError if the core does not support it."""
    dtype = DTYPES.get(x.dtype)
    if dtype is None or not x.is_cpu or not x.is_contiguous() or x.is_neg():
        raise ValueError(
            "expected a contiguous tensor on the CPU, not lazily negated (CUDA tensors: torch.distributed with the "
            f"backend 'hfreduce'), of one of {', '.join(map(str, DTYPES))}; got {_told(x)} on "
            f"{x.device}, strides {x.stride() if x.layout == torch.strided else x.layout}"
        )
    return x.data_ptr(), x.numel(), dtype


def _output(out, x, shape):
    if out is None:
        return torch.empty(shape, dtype=x.dtype)
    if out.shape != torch.Size(shape) or out.dtype != x.dtype:
        raise ValueError(f"expected an output of {x.dtype}{list(shape)}, got {_told(out)}")
    return out


def _op(op):
    if op not in _OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
    return _OPS[op]


def _ranges(splits, row):
    counts = [n * row for n in splits]
    return [sum(counts[:i]) for i in range(len(counts))], counts
