"""A process's connection to the coordinator in the launcher, and the store that is there."""

import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from haiscale.coordinator import Generation, Report


class Over(dist.DistError):
    """The launcher has ended this generation."""


class Launcher:
    """This process's connection to the coordinator."""

    def __init__(self, connection: Connection, timeout: float):
        self._connection, self._timeout, self._lock = connection, timeout, threading.Lock()
        self._generation, self._asked, self.is_over = -1, 0, ""  # is_over: why

    def next(self, report: Report) -> Generation | None:
        """The next generation; None: training has come to its end. Raises RuntimeError if it cannot go on."""
        self._connection.send(report)
        while True:
            kind, value = self._connection.recv()  # what belongs to the last generation is dropped
            if kind == "begin":
                return value
            if kind == "stop":
                raise RuntimeError(f"training ends: {value}")
            if kind == "end":
                if self._generation < 0:
                    sys.exit(0)  # a spare that nobody needed
                return None

    def begin(self, generation: Generation) -> None:
        self._generation, self.is_over = generation.number, ""

    def tell(self, error: str) -> None:
        """Why this process is about to end."""
        self._connection.send(error)

    def check(self) -> None:
        """Raises if this generation is over."""
        with self._lock:
            while self._connection.poll():
                self._receive()

    def ask(self, name: str, *arguments: Any, timeout: float | None = None) -> Any:
        """The answer of the generation's store."""
        with self._lock:
            self._asked += 1
            self._connection.send((self._generation, self._asked, name, *arguments))
            wait, begun = self._timeout if timeout is None else timeout, time.monotonic()
            while self._connection.poll(max(0.0, begun + wait - time.monotonic())):
                number, answer = self._receive()
                if number == self._asked:  # otherwise one that came too late
                    return answer
            raise dist.DistStoreError(f"the store has not answered {name}{arguments} in {wait} s")

    def _receive(self) -> Any:
        kind, value = self._connection.recv()
        if kind == "over":
            self.is_over = value
            raise Over(f"generation {self._generation} is over: {value}")
        return value


class Store(dist.Store):
    """The store of a generation, which is in the launcher. What waits there ends with the generation."""

    def __init__(self, launcher: Launcher):
        super().__init__()
        self._launcher = launcher

    def set(self, key, value):
        self._launcher.ask("set", key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key):
        return self._launcher.ask("get", key)

    def wait(self, keys, timeout=None):
        self._launcher.ask("wait", keys, timeout=timeout and timeout.total_seconds())

    def check(self, keys):
        return self._launcher.ask("check", keys)

    def add(self, key, amount):
        return self._launcher.ask("add", key, amount)

    def delete_key(self, key):
        return self._launcher.ask("delete", key)

    def compare_set(self, key, expected, desired):
        return self._launcher.ask("compare", key, expected, desired)

    def num_keys(self):
        return self._launcher.ask("count")

    def set_timeout(self, timeout):
        pass
