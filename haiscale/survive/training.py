"""Generations of a training, seen from one of its processes."""

import contextlib
import datetime
import gc
import importlib
import os
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

import hfreduce
from haiscale.coordinator import Generation, Report
from haiscale.mesh import _rank_device
from haiscale.processes import CONNECTION
from haiscale.survive.connection import Launcher, Store
from haiscale.survive.state import State

T = TypeVar("T")
_called: list[bool] = []  # not empty once `run` was
# In errors that have no type of their own; gloo's last one has no name of a file before it.
_COMMUNICATION = re.compile(r"\b(gloo|hfreduce)\b|caused pair closure")


def run(
    train: "Callable[[Run], T]",
    *,
    least: int = 1,
    attempts: int = 3,
    backend: str = "hfreduce",
    timeout: float = 300.0,
) -> T:
    """Calls train(run), and again in each rank that is left when another one has failed.

    Before each call, the default process group is made of the ranks that are left. A rank whose own code raises ends
    with that error; the others go on.

    Args:
        train: Trains with what `Run` offers, from the step where the last generation ended.
        least: The smallest number of ranks with which training goes on.
        attempts: Successive generations that may finish no step before training ends.
        backend: Of the default process group: "hfreduce" or "gloo".
        timeout: Seconds that an operation waits for other ranks, and that a rank may take to notice a fault.

    Returns:
        What the last call of train returned.

    Raises:
        RuntimeError: The program was not started by `python -m haiscale.launch --survive`, or training cannot go on.
            The launcher shows all faults.
        ValueError: An argument is not accepted.
    """
    launcher = Launcher(_checked(least, attempts, backend, timeout), timeout)
    with _older_objects_frozen():
        return _generations(train, launcher, Report(0, least=least, attempts=attempts, timeout=timeout), backend)


def _generations(train: "Callable[[Run], T]", launcher: Launcher, report: Report, backend: str) -> T:
    state = State()
    result: Any = None
    while (generation := launcher.next(report)) is not None:
        report = replace(report, step=None, why="", done=False)
        this = Run(generation, launcher, state)
        try:
            with _group(backend, launcher, generation, report.timeout):
                result = train(this)
            report.done = True
        except Exception as error:
            if not _is_fault(error, launcher):
                launcher.tell(f"{type(error).__name__}: {error}".splitlines()[0])
                raise
            report.why = f"{type(error).__name__}: {error}"
            _release(error)
        report.step = state.step if state.is_whole else None
        del this
        gc.collect()  # wrappers, whose hooks must be gone before the model is wrapped again
    return result


@contextlib.contextmanager
def _older_objects_frozen() -> Iterator[None]:
    """Collections in this block leave out what exists now, modules above all: they would take most of a recovery."""
    frozen = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()


def _checked(least: int, attempts: int, backend: str, timeout: float) -> Connection:
    """The connection to the launcher."""
    if _called:
        raise RuntimeError("survive.run was called before in this process: it is the whole training")
    if CONNECTION not in os.environ:
        raise RuntimeError(
            "haiscale.survive.run needs a launcher that outlives its ranks: start this program by "
            "`python -m haiscale.launch --survive --nproc N program.py`"
        )
    size = int(os.environ["WORLD_SIZE"])
    if not 1 <= least <= size:
        raise ValueError(f"least={least} is not accepted: it is a number of ranks, and there are {size}")
    if attempts < 1:
        raise ValueError(f"attempts={attempts} is not accepted: give at least 1")
    if backend not in ("hfreduce", "gloo"):
        raise ValueError(f"backend={backend!r} is not accepted: give 'hfreduce' or 'gloo', whose groups can be left")
    if timeout <= 0:
        raise ValueError(f"timeout={timeout} is not accepted: give seconds")
    if dist.is_initialized():
        raise RuntimeError("there is a process group already: survive.run makes one for each generation; call no init")
    _called.append(True)
    if int(os.environ["RANK"]) >= size:  # a spare, which has the time
        importlib.import_module("torch._dynamo")  # optimizers import it, which takes seconds
    descriptor = int(os.environ.pop(CONNECTION))
    os.set_inheritable(descriptor, False)
    return Connection(descriptor)


@contextlib.contextmanager
def _group(backend: str, launcher: Launcher, generation: Generation, timeout: float) -> Iterator[None]:
    """The default process group of a generation."""
    size, seat = str(generation.size), str(generation.seat)
    os.environ.update(RANK=str(generation.rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, LOCAL_RANK=seat)
    if torch.cuda.is_available():
        torch.cuda.set_device(_rank_device())
    launcher.begin(generation)
    store = Store(launcher)  # must live as long as groups may be made: torch keeps its C++ half alone
    try:
        dist.init_process_group(
            backend, store=store, rank=generation.rank, world_size=generation.size,
            timeout=datetime.timedelta(seconds=timeout),
        )  # fmt: skip
        yield
    except Exception as error:
        if not _is_fault(error, launcher):
            raise  # this process ends, and must not wait for what is under way
        _leave()
        raise
    else:
        _leave()


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _is_fault(error: BaseException | None, launcher: Launcher) -> bool:
    """Whether an error, or one that it follows from, is one of communication: the cause is elsewhere."""
    if launcher.is_over:
        return True
    while error is not None:
        if isinstance(error, (dist.DistError, hfreduce.Fault)):
            return True
        if type(error) is RuntimeError and _COMMUNICATION.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _release(error: BaseException | None) -> None:
    """Lets go of what the frames of an error hold: wrappers, graphs and loaders of the generation."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class Run:
    """What train gets: its place in a generation, and the methods with which it trains.

    Attributes:
        rank: This rank.
        size: The number of ranks.
        generation: The number of the generation; 0 is the first.
        step: The number of finished steps.
        device: This rank's device.
        reason: Why there is a new generation; "" in the first.
    """

    def __init__(self, generation: Generation, launcher: Launcher, state: State):
        self.rank, self.size, self.generation = generation.rank, generation.size, generation.number
        self.reason, self.device = generation.reason, _rank_device()
        self._given, self._launcher, self._state = generation, launcher, state
        self._is_kept = self._is_stepping = False

    @property
    def step(self) -> int:
        return self._state.step

    def keep(self, build: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """What build() returns: everything that training changes. It is called once in each process.

        In later generations the same objects are returned, with the newest state of all ranks. All ranks call this,
        before they wrap the model.

        Args:
            build: Returns a tuple of the model, optimizers, schedulers and others with state_dict and load_state_dict.

        Raises:
            TypeError: One of them has no state_dict.
        """
        self._is_kept = True
        return self._state.keep(build, self._given)

    def batches(self, samples: int, size: int, *, seed: int = 0, shuffle: bool = True) -> "Batches":
        """This rank's share of each global batch, from the next step on: a batch_sampler for torch's DataLoader.

        Args:
            samples: The length of the dataset.
            size: Samples of a global batch, which stays the same whatever the number of ranks.
            seed: Of the order, which is another one in each epoch.
            shuffle: False: the order is that of the dataset.

        Raises:
            ValueError: A rank would have no sample, or an epoch no batch.
        """
        return Batches(self, samples, size, seed, shuffle)

    def steps(self, total: int, *, seed: int = 0) -> Iterator[int]:
        """The numbers of the steps that are left, up to `total`. Each one is finished by `commit`.

        Before each, torch's generators of random numbers are seeded with (seed, step, rank), so that a step can be
        repeated.

        Args:
            total: The number of steps of the whole training.
            seed: Any integer.

        Raises:
            RuntimeError: The last step ended without `commit`.
        """
        if not self._is_kept:
            raise RuntimeError("call run.keep(build) before run.steps: it has the state that goes on")
        self._state.check_whole()
        while self.step < total:
            step = self.step
            self._launcher.check()
            _seed(((seed * 1_000_003 + step) * 1_000_003 + self.rank) % 2**63)
            self._is_stepping = True
            yield step
            if self.step == step:
                raise RuntimeError(f"step {step} has ended without `with run.commit():`, in which its state changes")
        self._launcher.check()

    @contextlib.contextmanager
    def commit(self) -> Iterator[None]:
        """A block that changes the state: `optimizer.step()`, and those of schedulers and scalers.

        The step is finished when the block ends. After a fault, a step is finished on all ranks or on none.

        Raises:
            RuntimeError: The step is already finished, or this is outside of `steps`.
        """
        if not self._is_stepping:
            raise RuntimeError("run.commit() belongs to a step of run.steps, once in each")
        self._launcher.check()
        self._state.check_group()
        self._state.is_whole = False
        yield
        self._state.finish()
        self._is_stepping = False


def _seed(value: int) -> None:
    """torch.manual_seed without devices that are not in use, for which it keeps a stack trace of each call."""
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value)


class Batches(Sampler[list[int]]):
    """The result of `Run.batches`: lists of indices, without end. Samples that fill no batch of an epoch are left out.

    Attributes:
        weight: A factor for the mean loss of this rank's share: shares may differ by one sample, and DDP averages over
            ranks. It is 1.0 if they are equal.
    """

    def __init__(self, run: Run, samples: int, size: int, seed: int, shuffle: bool):
        if size < run.size:
            raise ValueError(f"a global batch of {size} samples is not accepted: each of {run.size} ranks needs one")
        if samples < size:
            raise ValueError(f"{samples} samples are not accepted: they do not fill a global batch of {size}")
        self._run, self._samples, self._size, self._seed, self._shuffle = run, samples, size, seed, shuffle
        self._share = slice(size * run.rank // run.size, size * (run.rank + 1) // run.size)
        self.weight = (self._share.stop - self._share.start) * run.size / size

    def __iter__(self) -> Iterator[list[int]]:
        step, each = self._run.step, self._samples // self._size  # batches of an epoch
        epoch, order = -1, torch.empty(0)
        while True:
            if step // each != epoch:
                epoch = step // each
                own = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % 2**63)
                order = torch.randperm(self._samples, generator=own) if self._shuffle else torch.arange(self._samples)
            batch = order[step % each * self._size :][: self._size]
            yield batch[self._share].tolist()
            step += 1
