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

import os
import sys
import threading
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

OPS = ("sum", "avg", "prod", "min", "max", "band", "bor", "bxor", "premul_sum")  # the order of csrc/hfreduce/types.h
_ORDER = "uint8 int8 int16 int32 int64 bool float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2"  # too
DTYPES = {getattr(torch, name): number for number, name in enumerate(_ORDER.split())}
GROUP_TIMEOUT = -1.0  # use the group's timeout
_OPS = {name: number for number, name in enumerate(OPS)}


def native():
    """hfreduce._C. The ImportError says what to run."""
    try:
        from hfreduce import _C
    except ImportError as error:
        raise ImportError(f"hfreduce was not built ({error}): it needs a C++ compiler; run `make`") from error
    return _C


def plan_rows(size, slot_bytes=None):
    """The measured plan of this machine, as rows of numbers; empty without one, or for slots of another size."""
    from hfreduce import plan

    return plan.rows(size) if slot_bytes in (None, plan.SLOT) else []


def device_plan_rows(size):
    """The same for CUDA tensors."""
    from hfreduce import plan

    return plan.device_rows(size)


def explain(op, nbytes, *, ranks=None, hosts=None, device="cpu", peers=True):
    """Which algorithm a collective of `nbytes` runs with so many ranks and hosts, and why: see hfreduce.plan."""
    from hfreduce import plan

    return plan.explain(op, nbytes, ranks=ranks, hosts=hosts, device=device, peers=peers)


def where():
    """Where the main thread is: its innermost frame outside torch and these packages, as "train.py:42 in step"."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("torch", "hfreduce", "haiscale", "hfnn", "contextlib", "threading", "importlib"):
            code = frame.f_code
            return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""


def why():
    """The exception that makes groups close: the one that ends the program or is being handled. "" if there is none."""
    error = sys.exc_info()[1]
    if error is None and not hasattr(sys, "ps1"):  # at the end of the program, unless it is interactive
        error = getattr(sys, "last_value", None)
    if (isinstance(error, SystemExit) and error.code in (None, 0)) or isinstance(error, GeneratorExit):
        return ""
    return "" if error is None else f"{type(error).__name__}: {error}"[:2000]


class Group:
    """A group of ranks. See `init` for the arguments; the functions of this module are its methods."""

    def __init__(self, store, rank, size, *, name="default", timeout=300.0, **config):
        self.rank, self.size = rank, size
        config.setdefault("plan", plan_rows(size, config.get("slot_bytes")))
        with _Making(store, name) as making:
            keys = dist.PrefixStore(f"hfreduce/{name}", store)

            def find(key):  # does not wait
                making.check()
                return keys.get(key) if keys.check([key]) else None

            self._core = native().Communicator(
                keys.set, find, rank, size, name=name, timeout=timeout, where=where, **config
            )
        self.close = weakref.finalize(self, _end, self._core, os.getpid())  # at the latest when the interpreter exits

    def __repr__(self):
        return f"<{self._core.describe()}>"

    @property
    def operations(self):
        """The number of operations that this rank has begun."""
        return self._core.operations

    def record(self):
        """The last operations, as JSON in the schema of torch's flight recorder, 2.10."""
        return self._core.record()

    def abort(self, reason):
        """Makes all running and later operations of all ranks fail with this reason."""
        self._core.abort(reason)

    def all_reduce(self, x, op="sum", *, factor=1.0, out=None, timeout=GROUP_TIMEOUT):
        """out = op over the x of all ranks. x: [*shape]; out: [*shape], allocated if None."""
        p, n, dtype = _memory(x)
        out = _output(out, x, x.shape)
        self._core.all_reduce(p, _memory(out)[0], n, dtype, _op(op), factor, timeout)
        return out

    def all_reduce_(self, x, op="sum", *, factor=1.0, timeout=GROUP_TIMEOUT):
        """x = op over the x of all ranks, in place. Returns x."""
        return self.all_reduce(x, op, factor=factor, out=x, timeout=timeout)

    def reduce_(self, x, root=0, op="sum", *, factor=1.0, timeout=GROUP_TIMEOUT):
        """x of rank `root` = op over the x of all ranks, in place; the other ranks keep theirs. Returns x."""
        p, n, dtype = _memory(x)
        self._core.reduce(p, p if self.rank == root else 0, n, dtype, root, _op(op), factor, timeout)
        return x

    def reduce_scatter(self, x, op="sum", *, factor=1.0, out=None, timeout=GROUP_TIMEOUT):
        """out = op over x[rank] of all ranks. x: [size, *shape]; out: [*shape], allocated if None."""
        self._blocks(x)
        out = _output(out, x, x.shape[1:])
        p, n, dtype = _memory(out)
        self._core.reduce_scatter(_memory(x)[0], p, n, dtype, _op(op), factor, timeout)
        return out

    def all_gather(self, x, *, out=None, timeout=GROUP_TIMEOUT):
        """out[r] = x of rank r. x: [*shape]; out: [size, *shape], allocated if None; x may be out[rank]."""
        p, n, dtype = _memory(x)
        out = _output(out, x, (self.size, *x.shape))
        self._core.all_gather(p, _memory(out)[0], n, dtype, timeout)
        return out

    def broadcast_(self, x, root=0, *, timeout=GROUP_TIMEOUT):
        """x = x of rank `root`, in place. Returns x."""
        self._core.broadcast(*_memory(x), root, timeout)
        return x

    def gather(self, x, root=0, *, out=None, timeout=GROUP_TIMEOUT):
        """On rank `root`: out[r] = x of rank r; elsewhere None. x: [*shape]; out: [size, *shape], allocated if None."""
        p, n, dtype = _memory(x)
        out = _output(out, x, (self.size, *x.shape)) if self.rank == root else None
        self._core.gather(p, 0 if out is None else _memory(out)[0], n, dtype, root, timeout)
        return out

    def scatter(self, x, out, root=0, *, timeout=GROUP_TIMEOUT):
        """out = x[rank] of rank `root`. x: [size, *shape] on rank `root`, None on the others; out: [*shape]."""
        p, n, dtype = _memory(out)
        if self.rank == root:
            self._blocks(x)
            _output(out, x, x.shape[1:])
        self._core.scatter(_memory(x)[0] if self.rank == root else 0, p, n, dtype, root, timeout)
        return out

    def all_to_all(self, x, *, input_splits=None, output_splits=None, out=None, timeout=GROUP_TIMEOUT):
        """Sends rows of x to every rank, in order; out has the rows from every rank. Returns out.

        x: [rows, *shape], input_splits[r] rows for rank r; out: [sum(output_splits), *shape], allocated if None.
        Without splits every rank gets the same number of rows.
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

    def barrier(self, *, timeout=GROUP_TIMEOUT):
        """Returns when all ranks have called it."""
        self._core.barrier(timeout)

    def send(self, x, to, tag=0, *, timeout=GROUP_TIMEOUT):
        """Sends x to a rank. Returns when x may be written to again."""
        self._core.send(*_memory(x), to, tag, timeout)

    def recv_(self, x, source, tag=0, *, timeout=GROUP_TIMEOUT):
        """x = the next message with this tag from rank `source`, of the same size and dtype, in place. Returns x."""
        self._core.recv(*_memory(x), source, tag, timeout)
        return x

    def recv_any_(self, x, tag=0, *, timeout=GROUP_TIMEOUT):
        """x = a message with this tag from any rank, in place. Returns its sender."""
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


_default = []  # at most one


def init(store=None, rank=None, size=None, *, name="default", timeout=300.0, **config):
    """Makes and returns the default group, of all ranks, which the functions of this module use.

    store, rank, size: a torch.distributed store that all ranks reach, this rank, the number of ranks. The default is
    the environment (MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE), as torchrun sets it. name: of the group, in error
    messages; groups on one store need different names. timeout: seconds, for connecting and as the default of
    operations. config: interface, host_id, slot_bytes, plan, global_ranks; see `hfreduce.Options`.
    """
    if _default:
        raise RuntimeError("hfreduce.init was already called: call hfreduce.close() first, or make a Group")
    if store is None:
        store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
    if rank is None or size is None:
        raise ValueError("hfreduce.init with a store needs rank and size")
    _default.append(Group(store, rank, size, name=name, timeout=timeout, **config))
    return _default[0]


def close():
    """Closes the default group: sends what is still queued, and tells the other ranks that this one leaves."""
    if _default:
        _default.pop().close()


def _function(name):
    method = getattr(Group, name)

    def function(*args, **options):
        if not _default:
            raise RuntimeError(f"hfreduce.{name} needs a group: call hfreduce.init() first")
        return method(_default[0], *args, **options)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = method.__doc__
    return function


all_reduce = _function("all_reduce")
all_reduce_ = _function("all_reduce_")
reduce_ = _function("reduce_")
reduce_scatter = _function("reduce_scatter")
all_gather = _function("all_gather")
broadcast_ = _function("broadcast_")
gather = _function("gather")
scatter = _function("scatter")
all_to_all = _function("all_to_all")
barrier = _function("barrier")
send = _function("send")
recv_ = _function("recv_")
recv_any_ = _function("recv_any_")
