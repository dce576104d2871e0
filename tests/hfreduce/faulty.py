"""Faulty ranks for tests of faults. Without torch, because a bare interpreter starts fast."""

import array
import contextlib
import ctypes
import importlib.util
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import ranks


def load():
    """hfreduce._C without hfreduce, which imports torch."""
    if "torch" in sys.modules:
        import hfreduce._C

        return hfreduce._C
    folders = importlib.util.find_spec("hfreduce").submodule_search_locations
    path = next(path for folder in folders for path in Path(folder).glob("_C.*"))
    spec = importlib.util.spec_from_file_location("hfreduce._C", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_C = load()
FLOAT32, FLOAT64, INT32 = 8, 9, 3
SUM, MAX = 0, 4
MAIN = threading.main_thread().ident


def where():
    frame = sys._current_frames()[MAIN]
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def connect(rank, size, store, name="default", **config):
    """A communicator whose store is a folder."""
    folder = Path(f"{store}.keys.{name}")
    folder.mkdir(exist_ok=True)

    def put(key, value):
        path = folder / key.replace("/", "_")
        path.with_name(f"{path.name}.{rank}").write_bytes(value)
        os.replace(path.with_name(f"{path.name}.{rank}"), path)

    def find(key):
        with contextlib.suppress(FileNotFoundError):
            return (folder / key.replace("/", "_")).read_bytes()

    config = {key: value[rank] if key == "host_id" else value for key, value in config.items()}
    return _C.Communicator(put, find, rank, size, name=name, where=where, **{"timeout": 20.0, **config})


def values(count, value=1.0):
    return array.array("f", [value]) * count


def all_reduce(comm, data, **options):
    address = data.buffer_info()[0]
    comm.all_reduce(address, address, len(data), FLOAT32, **options)


def fault(f, *arguments, **options):
    """What f raised. `at` is the time, on a clock shared by all processes."""
    begun = time.monotonic()
    try:
        f(*arguments, **options)
    except _C.Fault as error:
        at = time.monotonic()
        return {"cause": error.cause, "ranks": error.ranks, "text": str(error), "at": at, "took": at - begun}
    return None


def forever(comm, count=1000):
    while True:
        all_reduce(comm, values(count))


def belongings():
    """Counts what must not leak: open files, threads, mapped shared memory, names of ours in /dev/shm."""
    names = [name for name in os.listdir("/dev/shm") if "hfreduce" in name]
    mapped = Path("/proc/self/maps").read_text().count("memfd:")
    return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), mapped, len(names)]


# ---- programs of ranks: functions of a rank, the number of ranks and the store; see ranks.py


def works(rank, size, store, count=1000, **config):
    """All-reduces until an error, then once more."""
    before = belongings()
    comm = connect(rank, size, store, **config)
    all_reduce(comm, values(count))
    ranks.reached(store, "works")
    first = fault(forever, comm, count)
    later = fault(all_reduce, comm, values(count))
    comm.shutdown()
    del comm
    return {"first": first, "later": later, "before": before, "after": belongings()}


def forks(rank, size, store, culprit):
    """Like `works`, but the culprit has a child that lives on, like a DataLoader's worker."""
    comm = connect(rank, size, store)
    all_reduce(comm, values(10))
    if rank == culprit and os.fork() == 0:
        ranks.reached(store, "forked", "child")
        time.sleep(30)
        os._exit(0)
    ranks.reached(store, "works")
    return fault(forever, comm)


def idles(rank, size, store):
    """Is in no operation when a peer ends; then calls one."""
    comm = connect(rank, size, store)
    comm.barrier()
    ranks.reached(store, "idle")
    while not comm.failed:
        time.sleep(0.001)
    noticed = time.monotonic()
    return {"noticed": noticed, "next": fault(comm.barrier)}


def meets(rank, size, store, patience, late=(), **config):
    """A barrier, which the late ranks enter only when told to."""
    comm = connect(rank, size, store, timeout=ranks.soon(patience), **config)
    all_reduce(comm, values(10))
    ranks.reached(store, "met")
    if rank in late:
        reads_data(store)
    # All others have entered this barrier: the late rank may still pass it.
    first = fault(comm.barrier) or fault(comm.barrier)
    ranks.reached(store, "raised")
    return first


def reads_data(store):
    deadline = time.monotonic() + 30
    while not Path(f"{store}.raised.0").exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def stops(rank, size, store, patience, culprit):
    """One rank is stopped before a barrier, and continued when the others have given up."""
    comm = connect(rank, size, store, timeout=ranks.soon(patience))
    comm.barrier()
    ranks.reached(store, "met")
    if rank == culprit:
        os.kill(os.getpid(), signal.SIGSTOP)
    # All others have entered this barrier: the stopped rank may still pass it.
    first = fault(comm.barrier) or fault(comm.barrier)
    ranks.reached(store, "raised")
    return first


def disagrees(rank, size, store):
    """Mismatched calls, each in its own group. Rank 1 differs from the others."""
    odd = rank == 1
    data = values(64)
    address = data.buffer_info()[0]
    calls = {
        "count": lambda c: c.all_reduce(address, address, 5 if odd else 4, FLOAT32),
        "dtype": lambda c: c.all_reduce(address, address, 4, INT32 if odd else FLOAT32),
        "op": lambda c: c.all_reduce(address, address, 4, FLOAT32, op=MAX if odd else SUM),
        "kind": lambda c: c.broadcast(address, 4, FLOAT32, 0) if odd else c.all_reduce(address, address, 4, FLOAT32),
        "root": lambda c: c.broadcast(address, 4, FLOAT32, 1 if odd else 0),
    }
    faults = {}
    for name, call in calls.items():
        comm = connect(rank, size, store, name)
        comm.barrier()
        faults[name] = fault(call, comm)
        comm.shutdown()
    return faults


def aborts(rank, size, store, culprit):
    comm = connect(rank, size, store)
    comm.barrier()
    if rank == culprit:
        time.sleep(0.3)  # the others are in the barrier by now
        at = time.monotonic()
        comm.abort("the loss is not a number")
        return {"first": fault(comm.barrier), "at": at}
    return {"first": fault(comm.barrier), "later": fault(comm.barrier)}


def leaves(rank, size, store, culprit):
    comm = connect(rank, size, store)
    comm.barrier()
    if rank == culprit:
        comm.shutdown()
        return None
    return fault(comm.barrier)


def receives(rank, size, store, culprit, leave, **config):
    """All wait for a message from the culprit, which leaves, or waits to be killed."""
    comm = connect(rank, size, store, **config)
    comm.barrier()
    data = values(1000)
    if rank == culprit:
        comm.send(data.buffer_info()[0], 1000, FLOAT32, (rank + 1) % size)  # so that a connection exists
        if leave:
            comm.shutdown()
            return None
        time.sleep(30)
    if rank == (culprit + 1) % size:
        comm.recv(data.buffer_info()[0], 1000, FLOAT32, culprit)
    ranks.reached(store, "works")
    return fault(comm.recv, data.buffer_info()[0], 1000, FLOAT32, culprit)


def returns(rank, size, store, rounds):
    """Groups that are shut down, one that is aborted, one that is only dropped: nothing leaks."""
    before = None
    for i in range(rounds):
        comm = connect(rank, size, store, f"round {i}")
        data = values(100, rank + 1.0)
        all_reduce(comm, data)
        assert data[0] == size * (size + 1) / 2, data[0]
        if i % 3 == 1:
            ended = fault(forever, comm) if rank else comm.abort("enough")
            assert rank == 0 or ended["cause"] == "aborted", ended
        if i % 3 < 2:
            comm.shutdown()
            comm.shutdown()
        del comm
        if before is None:  # the first group has done one-time loading
            before = belongings()
    return {"before": before, "after": belongings()}


def records(rank, size, store, case):
    """Dumps of the flight recorder after a mismatch, without the last rank, or after success."""
    comm = connect(rank, size, store, timeout=1.0, global_ranks=[2 * r for r in range(size)])
    data, out = values(4 * size), values(4 * size)
    address, output = data.buffer_info()[0], out.buffer_info()[0]
    comm.all_reduce(address, address, 4, FLOAT32)
    comm.reduce(address, address, 4, FLOAT32, 0)
    comm.all_gather(address, output, 4, FLOAT32)
    comm.reduce_scatter(address, output, 4, FLOAT32)
    if case == "mismatch":
        fault(comm.all_reduce, address, address, 5 if rank else 4, FLOAT32)
    elif case == "missing" and rank + 1 < size:
        fault(comm.barrier)
    elif case == "messages":
        if rank == 0:
            comm.send(address, 4, FLOAT32, 1)
        if rank == 1:
            comm.recv(address, 4, FLOAT32, 0)
            comm.send(address, 2, FLOAT32, 0)
        if rank == 0:
            comm.recv(address, 2, FLOAT32, 1)
        comm.barrier()
    return json.loads(comm.record())


# ---- for the soak test


def soaks(rank, size, store, seed, patience, **config):
    """Checked collectives, the same random ones on all ranks, until an error."""
    before = belongings()
    comm = connect(rank, size, store, **config)
    ranks.reached(store, "works")
    result = fault(checked, comm, random.Random(seed), rank, size, patience)
    later = fault(comm.barrier)
    comm.shutdown()
    del comm
    return {"first": result, "later": later, "before": before, "after": belongings()}


def checked(comm, dice, rank, size, patience):
    """Random collectives with known results; AssertionError if one is wrong."""
    while True:
        kind = dice.choice(["all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier", "pause"])
        count, root, factor = dice.choice([1, 7, 1000, 100_003]), dice.randrange(size), dice.randrange(1, 9)
        mine = values(count, float(factor * (rank + 1)))
        address, total = mine.buffer_info()[0], float(factor * size * (size + 1) // 2)
        if kind == "all_reduce":
            comm.all_reduce(address, address, count, FLOAT32, timeout=patience)
            expected = values(count, total)
        elif kind == "broadcast":
            comm.broadcast(address, count, FLOAT32, root, timeout=patience)
            expected = values(count, float(factor * (root + 1)))
        elif kind == "all_gather":
            out = values(count * size)
            comm.all_gather(address, out.buffer_info()[0], count, FLOAT32, timeout=patience)
            mine = out
            expected = array.array("f")
            for peer in range(size):
                expected += values(count, float(factor * (peer + 1)))
        elif kind == "reduce_scatter":
            blocks = values(count * size, float(factor * (rank + 1)))
            comm.reduce_scatter(blocks.buffer_info()[0], address, count, FLOAT32, timeout=patience)
            expected = values(count, total)
        elif kind == "barrier":
            comm.barrier(timeout=patience)
            continue
        else:
            time.sleep(dice.random() * 0.01)
            continue
        assert equal(mine, expected), f"{kind} of {count} from {root}: rank {rank} got {mine[:4]}, not {expected[:4]}"


def equal(a, b):
    size = len(a) * a.itemsize
    pointers = [ctypes.c_void_p(x.buffer_info()[0]) for x in (a, b)]
    return len(a) == len(b) and ctypes.CDLL(None).memcmp(*pointers, ctypes.c_size_t(size)) == 0
