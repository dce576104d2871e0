"""Rank programs for the tests of rendezvous and connections: see ranks.py."""

import os
import signal
import socket
import time
from pathlib import Path

from faulty import _C, FLOAT32, all_reduce, connect, values


def raised(f, *arguments, **options):
    """The text of f's error and the seconds it took; None if f raised nothing."""
    begun = time.monotonic()
    try:
        f(*arguments, **options)
    except RuntimeError as error:
        return {"text": str(error), "took": time.monotonic() - begun, "pid": os.getpid()}


def around(comm):
    """Each rank sends its number to the next; then all numbers are summed. Returns what this rank received."""
    mine, theirs = values(1000, comm.rank), values(1000)
    there, back = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.rank == 0:
        comm.send(mine.buffer_info()[0], 1000, FLOAT32, there)
    comm.recv(theirs.buffer_info()[0], 1000, FLOAT32, back)
    if comm.rank > 0:
        comm.send(mine.buffer_info()[0], 1000, FLOAT32, there)
    all_reduce(comm, mine)
    return {"message": sorted(set(theirs)), "sum": sorted(set(mine))}


def meets(rank, size, store, **config):
    comm = connect(rank, size, store, **config)
    result = {"describe": comm.describe(), **around(comm)}
    comm.shutdown()
    return result


def fails(rank, size, store, seconds):
    return raised(connect, rank, size, store, timeout=seconds)


def dies(rank, size, store, culprit):
    """The culprit is killed right after the rendezvous, while the others wait for its connections, or dial it."""
    communicator = _C.Communicator

    def dying(put, find, *arguments, **options):
        def last(key):
            value = find(key)
            if value is not None and key.endswith("/roster"):
                os.kill(os.getpid(), signal.SIGKILL)
            return value

        return communicator(put, last, *arguments, **options)

    if rank == culprit:
        _C.Communicator = dying
    return raised(connect, rank, size, store, timeout=20.0)


def sockets():
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            found += os.readlink(link).startswith("socket:")
        except FileNotFoundError:
            continue  # the descriptor that listed the folder
    return found


def forks(rank, size, store):
    """The number of sockets of this rank and of its child. Files that the child opens at their numbers stay open."""
    before = sockets()
    comm = connect(rank, size, store, host_id=["a", "b"])
    around(comm)
    mine = sockets() - before
    child = os.fork()
    if child == 0:
        inherited = sockets() - before
        a, b = socket.socketpair()
        a.sendall(b"x")
        os._exit(inherited if b.recv(1) == b"x" else 100)
    inherited = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    result = around(comm)
    comm.shutdown()
    return {"mine": mine, "inherited": inherited, "after": sockets() - before, **result}
