"""Distant ranks: relays in front of their TCP ports delay all data.

A rank learns the others' ports from the store; there they are replaced by the relays' ports. Each rank is a host of its
own (`host_id`), on the loopback interface.
"""

import contextlib
import queue
import socket
import threading
import time

from hfreduce._C import Communicator
from threads import run

RECORD, UNIT, PORT = b"\x1e", b"\x1f", 6  # format of the roster that ranks leave in the store: bootstrap/roster.cpp


@contextlib.contextmanager
def far(size, seconds, **config):
    """Communicators of `size` ranks. Every connection between them delays bytes by `seconds`."""
    notes, relays = {}, Relays(seconds)

    def connect(rank):
        def find(key):
            value = notes.get(key)
            return relays.told(value, key, rank) if value else value

        where = {"host_id": f"host {rank}", "interface": "lo", "timeout": 20.0}
        return Communicator(notes.__setitem__, find, rank, size, **where, **config)

    ranks = run(connect, range(size))
    try:
        yield ranks
    finally:
        run(Communicator.shutdown, ranks)
        relays.close()


class Relays:
    def __init__(self, seconds):
        self._seconds, self._relayed, self._lock = seconds, {}, threading.Lock()
        self._sockets, self._threads = [], []

    def told(self, value, key, rank):
        """What this rank finds in the store: relays' ports in place of the others' own."""
        if "/rank/" in key:
            return self._in_front_of(value)
        if not key.endswith("/roster"):
            return value
        secret, *entries = value.split(RECORD)
        own = {relayed: entry for entry, relayed in self._relayed.items()}
        entries = [own.get(e, e) if i == rank else self._in_front_of(own.get(e, e)) for i, e in enumerate(entries)]
        return RECORD.join([secret, *entries])

    def _in_front_of(self, entry):
        with self._lock:
            if entry not in self._relayed:
                fields = entry.split(UNIT)
                listener = socket.create_server(("127.0.0.1", 0))
                self._sockets.append(listener)
                self._serve(self._accept, listener, int(fields[PORT]))
                fields[PORT] = str(listener.getsockname()[1]).encode()
                self._relayed[entry] = UNIT.join(fields)
            return self._relayed[entry]

    def _accept(self, listener, port):
        with contextlib.suppress(OSError):  # it is closed
            while True:
                near, _ = listener.accept()
                there = socket.create_connection(("127.0.0.1", port))
                self._sockets += [near, there]
                for a, b in ((near, there), (there, near)):
                    for end in (a, b):
                        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    held = queue.SimpleQueue()
                    self._serve(self._take_in, a, held)
                    self._serve(self._pass_on, b, held)

    def _take_in(self, end, held):
        data = b"-"
        while data:
            with contextlib.suppress(OSError):
                data = b""
                data = end.recv(1 << 16)
            held.put((time.monotonic() + self._seconds, data))

    def _pass_on(self, end, held):
        """The end of the stream is queued as an empty chunk, so it cannot overtake the bytes before it."""
        with contextlib.suppress(OSError):
            while True:
                due, data = held.get()
                time.sleep(max(0, due - time.monotonic()))
                if not data:
                    return end.shutdown(socket.SHUT_WR)
                end.sendall(data)

    def _serve(self, what, *arguments):
        self._threads.append(threading.Thread(target=what, args=arguments, daemon=True))
        self._threads[-1].start()

    def close(self):
        for each in self._sockets:
            with contextlib.suppress(OSError):  # the other end has closed
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for each in self._sockets:
            each.close()
