"""Checkpoints in one format, whatever wrapped the model: plain, DDP, FSDP, pipeline stages, on any number of ranks.

    checkpoint.save("runs/a", model, optimizer, step=100, keep=3, sampler=sampler.state_dict())
    extra = checkpoint.load("runs/a", model, optimizer)             # the newest one in there
    first = extra["step"]

A checkpoint is a folder `step-00000100` of torch.distributed.checkpoint's files, with the keys

    model.<name>                parameters and persistent buffers, by their names in the user's whole model
    optimizer.<name>.<key>      the optimizer's state of that parameter, as in its `state_dict()`
    param_group.<checksum>      the options of one of its groups, and the names in it
    extra.<rank>                the rank's extras, the step, and its random number states

So any layout can read what any other wrote. Data that several ranks have is written by one of them, and each rank reads
the parts that it needs. A checkpoint is written into a folder with another name, which is renamed when everything is on
disk. So a folder with the right name is a complete checkpoint, even if a save was killed. All ranks must see the
folder. As with torch.load, load only files that you trust: extras are pickles.
"""

import concurrent.futures
import contextlib
import errno
import os
import re
import shutil
import signal
import warnings
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from haiscale import optimizer_state, partial, pending, signals
from haiscale import state as states
from haiscale.mesh import sibling

_WHOLE = re.compile(r"step-(\d{8,})(?:\.(\d+))?")  # a step that is saved again has a number appended

__all__ = ["latest", "load", "on_signal", "save"]

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    step: int,
    keep: int | None = None,
    async_: bool = False,
    process_group: dist.ProcessGroup | None = None,
    **extra: Any,
) -> "Path | concurrent.futures.Future[Path]":
    """Writes a checkpoint of this step; every rank of the group calls it. It is on the disk when this returns.

    Args:
        folder: Of checkpoints; this one is a folder in it.
        model: Plain or wrapped.
        optimizer: One, several or None.
        step: The number of steps taken.
        keep: How many checkpoints to keep, including this one; the oldest of those with earlier steps are removed.
            None: all.
        async_: Whether only copies to the host are made now, and a thread writes while training continues. The next
            save or load, destroy_process_group and Python's exit wait for it and raise its error; at exit it is
            printed, and the exit status is 1.
        process_group: The ranks; None: all.
        extra: Values that `load` returns on this rank, such as a scheduler's state and the position in the data. They
            are pickled.

    Returns:
        The checkpoint's path; with async_ a future of it.

    Raises:
        ValueError: An argument is not accepted, or a parameter is in two optimizers.
        RuntimeError: A rank could not write. The message names it, and earlier checkpoints are unchanged. Errors of the
            backend for ranks that died or hang keep their class.
    """
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"step={step!r} is not accepted: give the number of steps taken, an integer from 0")
    if keep is not None and keep < 1:
        raise ValueError(f"keep={keep} is not accepted: give how many checkpoints are to be left, at least 1")
    pending.finish()
    ranks = _Ranks(process_group)
    mine = {"step": step, "ranks": ranks.size, "random": states.random_state(), "extra": extra}
    entries = _entries(model, optimizer, {f"extra.{ranks.rank}": mine}, copy=async_)
    if not async_:
        return _write(Path(folder), step, entries, keep, ranks)
    return pending.begin(_write, Path(folder), step, entries, keep, ranks.aside())


def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    random_state: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Reads a checkpoint into the model and the optimizer; every rank calls it.

    Parameters are written in place, in their own dtype.

    Args:
        folder: A checkpoint, or a folder of checkpoints, of which the one with the highest step is read.
        model: Built and wrapped as for training from the beginning.
        optimizer: As saved, created from the model's parameters; None: only the model is read.
        random_state: Whether the generators of Python, numpy, torch and this GPU are set, if the number of ranks is the
            same.
        process_group: The ranks; None: all.

    Returns:
        The extras that this rank saved, or those of rank 0 if this rank did not exist; and "step".

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: Names or shapes differ. The message, on all ranks, lists them, and nothing was loaded.
    """
    pending.finish()
    ranks = _Ranks(process_group)
    path = Path(ranks.on_first(lambda: str(_find(folder))))
    reader = states.Reader(path, model)
    saved = reader.read_metadata().state_dict_metadata
    targets = {f"model.{name}": tensor.detach() for name, tensor in states.named_shards(model)}
    parameters = dict(states.named_shards(model)) if optimizer is not None else {}
    optimizers = optimizer_state.as_list(optimizer)
    names = {id(tensor): name for name, tensor in parameters.items()}
    owned = optimizer_state.owned_by_each(optimizers, names)
    groups = _read_groups(reader, saved, ranks) if optimizers else []
    kept = optimizer_state.saved_states((name for group in groups for name in group["params"]), saved)
    _check(path, targets, saved, optimizers, owned, kept, groups, ranks)
    kept = optimizer_state.to_read_into(kept, {n: parameters[n] for of in owned for group in of for n in group})
    extra = f"extra.{ranks.rank}" if f"extra.{ranks.rank}" in saved else "extra.0"
    values = {f"optimizer.{name}.{key}": value for name, found in kept.items() for key, value in found.items()}
    entries = {**targets, **values, extra: None}
    _read(reader, entries, ranks)
    states.shards_loaded(model)
    kept = {name: {key: entries[f"optimizer.{name}.{key}"] for key in found} for name, found in kept.items()}
    for one, of in zip(optimizers, owned, strict=True):
        optimizer_state.load_optimizer(one, of, kept, groups)
    rest = entries[extra]
    if random_state and rest["ranks"] == ranks.size:
        states.set_random_state(rest["random"])
    return {**rest["extra"], "step": rest["step"]}


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint with the highest step in a folder, or None."""
    found = _checkpoints(Path(folder))
    return found[-1][1] if found else None


def on_signal(*numbers: int, process_group: dist.ProcessGroup | None = None) -> Callable[[], bool]:
    """Treats these signals (SIGTERM by default) as a request to save and exit, as cluster schedulers send them.

    haiscale.launch forwards signals to its ranks. Workers of DataLoaders ignore these signals, if they start later.

    Args:
        numbers: Of signals.
        process_group: The ranks; None: all.

    Returns:
        A function that tells whether any rank has received one. All ranks call it together, between two steps, and get
        the same answer. It is one all_reduce of a number on the host.
    """
    received = signals.watch(numbers or (signal.SIGTERM,))
    group = _Ranks(process_group).beside()

    def asked() -> bool:
        flag = torch.tensor([int(received())])
        if group is not None:
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
        return bool(flag)

    return asked


# Writing


def _entries(model: nn.Module, optimizer: Optimizers, extra: dict, copy: bool) -> dict[str, object]:
    """Everything that this rank has to write, by key: Pieces, and objects to pickle. copy: as they are now."""
    tensors = dict(states.named_shards(model))
    found = {f"model.{name}": tensor for name, tensor in tensors.items()}
    names = {id(tensor): name for name, tensor in tensors.items()}
    optimizers = optimizer_state.as_list(optimizer)
    for one, owned in zip(optimizers, optimizer_state.owned_by_each(optimizers, names), strict=True):
        found.update(optimizer_state.optimizer_entries(one, owned))
    found.update(extra)
    for key, value in found.items():
        if isinstance(value, torch.Tensor):
            if value.is_meta:
                raise ValueError(f"{key} is on the meta device: there is nothing to save before it is given values")
            is_buffer = key.startswith("model.") and not isinstance(value, nn.Parameter)
            found[key] = states.Piece(value, is_buffer)
            if copy:
                found[key].copy()
        elif copy:
            found[key] = states.Pickled(value)
    if copy and torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    return found


def _write(folder: Path, step: int, entries: dict, keep: int | None, ranks: "_Ranks") -> Path:
    failed, path = f"checkpoint {folder} of step {step} was not written", None
    try:
        path = Path(ranks.on_first(lambda: str(_begin(folder, step))))
        writer = dcp.FileSystemWriter(path, sync_files=True)
        _dcp(ranks, failed, dcp.save, entries, storage_writer=writer, planner=states.WritePlanner())
        return Path(ranks.on_first(lambda: str(_finish(folder, path, step, keep))))
    except RuntimeError as error:  # of the backend
        if failed in str(error):
            raise
        raise type(error)(f"{failed}: {error}") from error
    finally:
        if path is not None:
            partial.release(path.name)


def _begin(folder: Path, step: int) -> Path:
    """The folder to write into."""
    folder.mkdir(parents=True, exist_ok=True)
    partial.remove_abandoned(folder)
    path = folder / partial.claim(f"{step:08d}")
    path.mkdir()
    return path


def _finish(folder: Path, written: Path, step: int, keep: int | None) -> Path:
    """All files are on disk: give the folder its name, under which `latest` finds it."""
    _sync(written)
    again = [path for found, path in _checkpoints(folder) if found[0] == step]
    path = _rename(folder, written, step)
    _sync(folder)
    older = [old for found, old in _checkpoints(folder) if found[0] < step]
    for old in again + (older[: max(0, len(older) - keep + 1)] if keep else []):
        # With its name, a half-removed folder would count as a checkpoint.
        gone = folder / partial.claim(old.name)
        with contextlib.suppress(FileNotFoundError):  # another job was faster
            os.rename(old, gone)
            shutil.rmtree(gone, ignore_errors=True)
        partial.release(gone.name)
    return path


def _rename(folder: Path, written: Path, step: int) -> Path:
    """Gives a folder the name of its step, with a number appended if the step was saved before."""
    while True:
        numbers = [number for (found, number), _ in _checkpoints(folder) if found == step]
        path = folder / (f"step-{step:08d}.{max(numbers) + 1}" if numbers else f"step-{step:08d}")
        try:
            os.rename(written, path)
            return path
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # those mean that another job was faster
                raise


def _sync(folder: Path) -> None:
    """Syncs the names in a folder to disk."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


# Finding, reading


def _number(path: Path) -> tuple[int, int]:
    """(step, how often it was saved before), from the name."""
    found = _WHOLE.fullmatch(path.name)
    return int(found[1]), int(found[2] or 0)


def _checkpoints(folder: Path) -> list[tuple[tuple[int, int], Path]]:
    """In order, the latest last."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((_number(path), path) for path in paths if _WHOLE.fullmatch(path.name))


def _find(folder: str | os.PathLike) -> Path:
    folder = Path(folder)
    path = folder if (folder / ".metadata").exists() else latest(folder)
    if path is None:
        raise FileNotFoundError(f"no checkpoint in {folder.resolve()}: give one named step-..., or a folder of them")
    return path


def _read(reader: states.Reader, entries: dict, ranks: "_Ranks") -> None:
    failed = f"checkpoint {reader.path} was not read"
    _dcp(ranks, failed, dcp.load, entries, storage_reader=reader, planner=states.ReadPlanner())


def _read_groups(reader: states.Reader, saved: dict, ranks: "_Ranks") -> list[dict]:
    """The saved parameter groups, each with its names and options."""
    found = dict.fromkeys(key for key in saved if key.startswith("param_group."))
    _read(reader, found, ranks)
    return [{**group, "params": [reader.plain_name(name) for name in group["params"]]} for group in found.values()]


def _check(path, targets, saved, optimizers, owned, kept, groups, ranks: "_Ranks") -> None:
    """Raises ValueError, on all ranks, if the saved data does not match the data to load."""
    missing, others = states.misfits(targets, saved)
    optimized = [f"optimizer.{name}" for of in owned for group in of for name in group]
    stepped = {f"optimizer.{name}" for group in groups for name in group["params"]}
    missing += [key for key in optimized if key not in stepped]
    for one, of in zip(optimizers, owned, strict=True):
        others += optimizer_state.optimizer_misfits(one, of, kept, groups)
    found = ranks.everybody((missing, others, [*targets, *optimized]))
    here = {key for *_, keys in found for key in keys}
    there = [key for key in saved if key.startswith("model.")] + (sorted(stepped) if optimizers else [])
    missing, others = (sorted({x for of_rank in found for x in of_rank[i]}) for i in (0, 1))
    surplus = [key for key in there if key not in here]
    if optimizers and not groups:
        missing = ["the state of any optimizer", *(key for key in missing if key not in optimized)]
    if message := states.misfit_message(path, missing, surplus, others):
        raise ValueError(message)


# Ranks


class _Ranks:
    """The ranks that save or load together: a process group, or this process alone."""

    def __init__(self, group: dist.ProcessGroup | None):
        self.many = dist.is_available() and dist.is_initialized()
        self.group = (group or dist.group.WORLD) if self.many else None
        self.rank = dist.get_rank(self.group) if self.many else 0
        self.size = dist.get_world_size(self.group) if self.many else 1

    def everybody(self, value) -> list:
        """The value of every rank."""
        found = [value] * self.size
        if self.many:
            dist.all_gather_object(found, value, group=self.group)
        return found

    def on_first(self, do: Callable[[], str]) -> str:
        """Runs a function on rank 0 and returns its result on all ranks; its error is raised on all ranks."""
        found = [None]
        if self.rank == 0:
            try:
                found = [do()]
            except OSError as error:
                found = [error]
        if self.many:
            dist.broadcast_object_list(found, dist.get_global_rank(self.group, 0), group=self.group)
        if isinstance(found[0], OSError):
            raise found[0]
        return found[0]

    def beside(self) -> dist.ProcessGroup | None:
        """A new group of the same ranks for tensors of the host."""
        if not self.many:
            return None
        # NCCL takes none.
        return sibling(self.group, "gloo" if dist.get_backend(self.group) == "nccl" else None)

    def aside(self) -> "_Ranks":
        """The same ranks on a group that only the writing thread uses: two threads in one group would take turns in a
        different order on every rank."""
        if self.many:
            if self.group not in _aside:
                _aside[self.group] = self.beside()
            return _Ranks(_aside[self.group])
        return self


_aside: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _dcp(ranks: _Ranks, failed: str, call: Callable, *args, **options) -> None:
    """dcp.save or dcp.load; RuntimeError names the ranks that failed, and why."""
    try:
        with contextlib.ExitStack() as quiet:
            if not ranks.many:
                quiet.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable|uninitialized)")
            call(*args, process_group=ranks.group, no_dist=not ranks.many, **options)
    except CheckpointException as error:
        why = "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in sorted(error.failures.items()))
        raise RuntimeError(f"{failed}: {why}") from error


# Random numbers
