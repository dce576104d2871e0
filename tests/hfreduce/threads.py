"""Ranks as threads of one process, each with its own communicator, memory and sockets. Fast for many world sizes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from hfreduce._C import Communicator


@contextmanager
def group(size: int, **config):
    """Communicators of `size` ranks that see each other. config: the constructor's options; a list has a value per
    rank."""
    notes, lock = {}, threading.Lock()

    def put(key, value):
        with lock:
            notes[key] = value

    def connect(rank):
        mine = {key: value[rank] if isinstance(value, list) else value for key, value in config.items()}
        return Communicator(put, notes.get, rank, size, **{"timeout": 20.0, **mine})

    ranks = run(connect, range(size))
    try:
        yield ranks
    finally:
        run(Communicator.shutdown, ranks)


def run(f, *arguments):
    """Results of f with each rank's arguments, concurrently, in the order of ranks. Raises the first error when all
    have ended."""
    n = len(arguments[0])
    with ThreadPoolExecutor(n) as pool:
        futures = [pool.submit(f, *[a[i] for a in arguments]) for i in range(n)]
        return [future.result() for future in futures]
