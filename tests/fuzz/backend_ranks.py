"""Runs programs of the backend fuzzer on a rank, and manages the rank processes.

`Pool` has four processes, all in one gloo group. Through it they create groups of both backends as programs need them,
and keep them. After a program with an error or an unanswered receive, its backend's groups are destroyed; after the
latter, within seconds. A pool that does not answer is ended, and reported as a finding.
"""

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import random
import tempfile
import time
import warnings
from multiprocessing.connection import wait

import backend_data as data
import torch
import torch.distributed as dist

RANKS = 4
TIMEOUT = 60  # seconds that an operation may take
PLANTED = 5  # the same with a planted fault, which may well make ranks wait in vain
SOON = 5  # seconds in which groups must end after a receive that nobody answers
HANG = 200  # seconds that a program may take: for a process that does not even time out


class Rank:
    """One process: its groups, and the log of its current program."""

    def __init__(self, rank, folder):
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        import hfreduce  # noqa: F401  its backend

        self.rank, self.groups = rank, {}
        patience = datetime.timedelta(seconds=TIMEOUT)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=patience
        )

    def group(self, backend, ranks, timeout=TIMEOUT):
        """All ranks call this at the same time."""
        if (backend, ranks) not in self.groups:
            patience = datetime.timedelta(seconds=timeout)
            self.groups[backend, ranks] = dist.new_group(list(ranks), backend=backend, timeout=patience)
        return self.groups[backend, ranks]

    def forget(self, backend):
        """Returns the seconds that it took."""
        began = time.monotonic()
        for key in [key for key in self.groups if key[0] == backend]:
            group = self.groups.pop(key)
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
        return time.monotonic() - began

    def run(self, program, backend, fault):
        """What this rank saw of a program: [(label, value)], and whether the groups have become unusable."""
        import backend_steps

        for ranks in program["groups"]:
            self.group(backend, ranks, PLANTED if fault else TIMEOUT)
        if self.rank >= program["size"]:
            return [], False
        steps = backend_steps.Steps(self, program, backend, fault)
        try:
            steps.run()
        finally:
            steps.end()
        return steps.seen, steps.broken


def plain(value):
    """The form sent to the calling process: tensors as bytes."""
    if isinstance(value, torch.Tensor):
        x = value.detach().resolve_neg().resolve_conj().clone(memory_format=torch.contiguous_format)
        return (
            "tensor",
            str(x.dtype).removeprefix("torch."),
            tuple(x.shape),
            x.reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
    return "note", value


def tensor(dtype, shape, raw):
    """Rebuilds a tensor from `plain`; for a dtype that torch cannot compare, its bytes."""
    if dtype not in data.DTYPES:
        dtype, shape = "uint8", (len(raw),)
    if not raw:
        return torch.empty(shape, dtype=data.dtype_of(dtype))
    return torch.frombuffer(bytearray(raw), dtype=data.dtype_of(dtype)).view(shape)


def serve(rank, folder, pipe):
    faulthandler.enable()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # if torch sees a GPU, it expects more than CPU ranks have
    here = Rank(rank, folder)
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        program, backend, fault = asked
        if program is None:
            pipe.send(here.forget(backend))
            continue
        seen, broken = here.run(program, backend, fault)
        pipe.send(([(label, plain(value)) for label, value in seen], broken))
    os._exit(0)


class Pool:
    """The processes of this one; see the module's docstring."""

    def __init__(self):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "torch.nn.parallel", "backend_steps"])
        self._folder = tempfile.TemporaryDirectory(prefix="hfreduce-fuzz-")
        self._pipes, self._processes = [], []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, self._folder.name, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def run(self, program, backend, fault=None):
        """[(label, rank, value)] of all ranks; None if the ranks hung or died and the pool has become unusable."""
        answers = self._ask(program, backend, fault)
        if answers is None:
            return None
        seen = [(label, rank, value) for rank, (here, _) in enumerate(answers) for label, value in here]
        if any(broken for _, broken in answers) or fault:
            took = self._ask(None, backend, fault)
            if took is None:
                return None
            if any(step["do"] == "unanswered" for step in program["steps"]):
                seen += [("value ended in time", rank, ("note", seconds < SOON)) for rank, seconds in enumerate(took)]
        return seen

    def _ask(self, *question):
        """The answers of all ranks; None if some rank does not answer."""
        for pipe in self._pipes:
            pipe.send(question)
        answers, deadline = {}, time.monotonic() + HANG
        while len(answers) < RANKS:
            waiting = [pipe for pipe in self._pipes if pipe not in answers]
            ready = wait(waiting, timeout=max(0, deadline - time.monotonic()))
            if not ready:
                return None
            for pipe in ready:
                try:
                    answers[pipe] = pipe.recv()
                except EOFError:
                    return None
        return [answers[pipe] for pipe in self._pipes]

    def end(self):
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        with contextlib.suppress(OSError):
            self._folder.cleanup()


def shuffled(items, seed):
    items = list(items)
    random.Random(seed).shuffle(items)
    return items
