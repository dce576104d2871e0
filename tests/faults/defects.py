"""Defects, each of which the verdict of a case must find: planted in the launcher of that case, before its ranks."""

import os
import socket
import time

import torch.distributed as dist
from ranks import soon

from haiscale import coordinator, survive
from haiscale.survive import state, training


def _replace(owner, name, make):
    setattr(owner, name, make(getattr(owner, name)))


def samples_twice():
    """A new generation begins with samples of the step before."""
    _replace(survive.Batches, "__iter__", lambda real: lambda self: _from(self, real))


def _from(batches, real):
    if batches._run.generation:
        batches._run._state.step -= 1
    found = real(batches)
    first = next(found)
    if batches._run.generation:
        batches._run._state.step += 1
    yield first
    yield from found


def older_state():
    """The state of the rank that is behind wins."""

    def begin(real):
        def wrong(self, seats):
            steps = [m.report.step for m in self._members if m.report and m.report.step is not None]
            for member in self._members:
                if member.report and member.report.step is not None and self._generation == 0:
                    member.report.step = min(steps)
            return real(self, seats)

        return wrong

    _replace(coordinator.Coordinator, "_begin", begin)


def own_state():
    """No state is sent."""
    _replace(state, "_share", lambda real: lambda *arguments: None)


def buffers_of_the_failed_step():
    _replace(state.State, "_roll_back", lambda real: lambda self: None)


def other_random_numbers():
    """Of the generation instead of the step."""
    _replace(training, "_seed", lambda real: lambda seed: real(seed + int(os.environ["WORLD_SIZE"])))


def old_keys():
    """The store of a new generation answers with what the old one was told."""
    kept = {}

    def store_set(real):
        def wrong(self, key, value):
            return real(self, key, kept.setdefault(key, value))

        return wrong

    _replace(coordinator.Coordinator, "_store_set", store_set)


def leaked_socket():
    kept = []
    _replace(
        survive.Run, "__init__", lambda real: lambda self, *a: (kept.append(socket.socketpair()), real(self, *a))[1]
    )


def leaked_file():
    def run(real):
        def wrong(*arguments, **options):
            with open(os.path.join(os.environ["TMPDIR"], "left"), "w"):
                return real(*arguments, **options)

        return wrong

    _replace(survive, "run", run)


def leaked_memory():
    """A name in /dev/shm."""

    def run(real):
        def wrong(*arguments, **options):
            with open(f"/dev/shm/survive_{os.getppid()}", "w"):
                return real(*arguments, **options)

        return wrong

    _replace(survive, "run", run)


def leaked_process():
    """Of a rank that is killed; it should be killed with it."""

    def init(real):
        def wrong(self, *arguments):
            real(self, *arguments)
            if self.generation == 0 and self.rank == self.size - 1 and os.fork() == 0:
                time.sleep(60)
                os._exit(0)

        return wrong

    _replace(survive.Run, "__init__", init)
    _replace(coordinator.Coordinator, "_ended", lambda real: lambda self, member: _without_kill(self, member, real))


def _without_kill(self, member, real):
    kill, self._kill = self._kill, lambda rank: None
    real(self, member)
    self._kill = kill


def wrong_name():
    """Another rank than the one at fault."""
    _replace(coordinator._Member, "name", lambda real: property(lambda self: real.fget(self).replace("k 0", "k 1")))


def no_reason():
    _replace(coordinator.Rank, "fate", lambda real: lambda self: "has ended")


def late():
    def keep(real):
        def wrong(self, build):
            time.sleep(self.generation * soon(1.5))
            return real(self, build)

        return wrong

    _replace(survive.Run, "keep", keep)


def gives_up():
    """Training ends at the first fault."""
    planted = {False: "", True: "it is planted"}
    _replace(coordinator.Coordinator, "_why_not", lambda real: lambda self, *_: planted[self._since is not None])


def without_the_living():
    """A rank that could go on is left out."""

    def begin(real):
        def wrong(self, seats):
            if self._generation == 0:
                kill = [m for m in seats if m.state == "ready"][-1]
                self._kill(kill.rank)
                seats = [m for m in seats if m is not kill]
            return real(self, seats)

        return wrong

    _replace(coordinator.Coordinator, "_begin", begin)


def needless_generation():
    """The averages of a step that all ranks have finished are taken for failed."""
    seen = []

    def finish(real):
        def wrong(self):
            real(self)
            if self.step == 4 and not seen:
                seen.append(True)
                raise dist.DistBackendError("planted")

        return wrong

    _replace(state.State, "finish", finish)
