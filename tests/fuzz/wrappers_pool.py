"""Pools of rank processes, one for each number of ranks, which run many programs.

Ranks are forked from a server that has only imported what they need: in forks of a process that has used a GPU, every
program may raise on both sides. Their group on each backend is created when first needed, and again after a program
that raised. A pool ends when a rank does not answer in time, dies, or is the only one to raise, and after `RUNS` runs;
the next program gets a new pool.
"""

import multiprocessing
import os
import tempfile
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import wrappers_faults as faults
import wrappers_session as sessions
import wrappers_steps as steps
from engine import Log, Raised

TIMEOUT = timedelta(seconds=10)  # of an operation
PATIENCE = 60.0  # seconds for a run
RUNS = 200  # of a pool: gloo keeps the threads of replaced groups, which poll for messages

_pools: dict[int, "Pool"] = {}


def run(program, kind: str, noise: int, fault: str | None) -> list | str:
    """What each rank has logged, as its log's `seen` and `features`; or a text: that one hangs or has died.

    kind: of the session. fault: planted in haiscale's.
    """
    ranks = program["ranks"]
    if ranks not in _pools:
        _pools[ranks] = Pool(ranks)
    found = _pools[ranks].run(program, kind, noise, fault)
    if isinstance(found, str) or not _pools[ranks].whole:
        _pools.pop(ranks).end()
    return found


class Pool:
    def __init__(self, ranks: int):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["haiscale.ddp", "haiscale.fsdp", "torch.distributed.fsdp"])
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        self.whole = True  # whether its ranks are still in step
        self.turn = 0  # how often its groups had to be replaced
        self.runs = 0
        for rank in range(ranks):
            here, there = context.Pipe()
            process = context.Process(target=_main, args=(rank, ranks, there, f"{self.folder.name}/store"), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, *task) -> list | str:
        for pipe in self.pipes:
            pipe.send((*task, self.turn))
        found = []
        for rank, pipe in enumerate(self.pipes):
            try:
                if not pipe.poll(PATIENCE):
                    return f"rank {rank} hangs"
                found.append(pipe.recv())
            except (EOFError, ConnectionResetError):
                return f"rank {rank} has died"
        errors = [[seen for seen in log.values() if isinstance(seen, Raised)] for log, _ in found]
        self.turn += any(errors)
        self.runs += 1
        alike = all(errors) == any(errors) and not any("imed out" in e.text for of in errors for e in of)
        self.whole = alike and self.runs < RUNS
        return found

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.folder.cleanup()


def _main(rank, ranks, pipe, store) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ["HAISCALE_BUCKETS"] = ""
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=TIMEOUT)
    groups = {}
    while True:
        try:
            program, kind, noise, fault, turn = pipe.recv()
        except EOFError:
            os._exit(0)
        log, backend = Log(), program["backend"]
        with steps.attempt(log, "wrapping"), faults.planted(fault if kind == "Ours" else None):
            if groups.get(backend, (None, -1))[1] != turn:
                groups[backend] = dist.new_group(backend=backend, timeout=TIMEOUT), turn
            session = getattr(sessions, kind)(program, groups[backend][0], log, noise)
            steps.run(session, noise)
        pipe.send((log.seen, log.features))
