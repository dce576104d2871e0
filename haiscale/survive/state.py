"""What training changes, in one process, and how it gets to others."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import ErrorType
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from haiscale.coordinator import Generation
from haiscale.ddp import DDP
from haiscale.fsdp import FSDP
from haiscale.mesh import _rank_device

_WRAPPERS = (DDP, FSDP, nn.parallel.DistributedDataParallel, FullyShardedDataParallel)
# What changes within `commit` only.
_OF_COMMITS = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)


class State:
    """What training changes, in this process."""

    def __init__(self) -> None:
        self.step, self.is_whole = 0, True  # is_whole: no step is half done
        self.objects: tuple[Any, ...] = ()
        self._parameters: list[tuple[nn.Module, list[Any]]] = []
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._versions: list[int] = []
        self._others: list[Any] = []  # states of what may change outside of `commit`, as of a loader

    def keep(self, build: Callable[[], tuple[Any, ...]], generation: Generation) -> tuple[Any, ...]:
        if not self.objects:
            self._take(build())
        else:
            self._roll_back()
        if generation.shares:
            self.is_whole = self.step == generation.step  # until it has received all
            _share(self.objects, generation.source, generation.rank)
            self._remember()
        self.step, self.is_whole = generation.step, True
        return self.objects

    def _take(self, built: tuple[Any, ...]) -> None:
        objects = built if isinstance(built, tuple) else (built,)
        for value in objects:
            if not all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")):
                raise TypeError(
                    f"run.keep(build): build returned {type(value).__name__}, which has no state_dict and "
                    "load_state_dict: return what training changes, as a tuple"
                )
        models = [value for value in objects if isinstance(value, nn.Module)]
        for model in models:
            if isinstance(model, _WRAPPERS) or any(isinstance(p, DTensor) for p in model.parameters()):
                raise TypeError(
                    f"run.keep(build): build returned {type(model).__name__}, which belongs to a process group, and so "
                    "to one generation: return the model itself, and wrap it with DDP in each generation, after keep"
                )
        buffers = [buffer for model in models for buffer in model.buffers()]
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in buffers]
        self._parameters = [(model, _shapes(model)) for model in models]
        for value in objects:
            if isinstance(value, torch.optim.Optimizer):
                value.register_step_pre_hook(self._check_step)
        self.objects = objects
        self._remember()

    def check_whole(self) -> None:
        """Raises RuntimeError if a wrapper has sharded a model."""
        for model, shapes in self._parameters:
            if _shapes(model) != shapes:
                raise RuntimeError(
                    f"the parameters of {type(model).__name__} are others than run.keep returned: a wrapper has "
                    "replaced or sharded them, and then no rank has the whole state; wrap the model with DDP"
                )

    def _check_step(self, *_: Any) -> None:
        if self.is_whole:
            raise RuntimeError("call optimizer.step() within `with run.commit():`, so that a fault leaves no half step")

    def check_group(self) -> None:
        """Raises the error of a group that has failed. Code may have caught it, and averages are then not averages."""
        group = dist.group.WORLD
        if group is not None and dist.get_backend(group) == "hfreduce":
            error = group._get_backend(torch.device("cpu")).get_error()
            if error != ErrorType.SUCCESS:
                raise dist.DistBackendError(f"a rank has failed: {error.name}")

    def finish(self) -> None:
        self._remember()
        self.step, self.is_whole = self.step + 1, True

    def _remember(self) -> None:
        """What may change in a step that is dropped."""
        versions = [buffer._version for buffer, _ in self._buffers]
        if versions != self._versions:
            with torch.no_grad():
                for buffer, copy in self._buffers:
                    copy.copy_(buffer)
            self._versions = versions
        self._others = [None if isinstance(value, _OF_COMMITS) else value.state_dict() for value in self.objects]

    def _roll_back(self) -> None:
        with torch.no_grad():
            for (buffer, copy), version in zip(self._buffers, self._versions, strict=True):
                if buffer._version != version:
                    buffer.copy_(copy)
        self._versions = [buffer._version for buffer, _ in self._buffers]
        for value, state in zip(self.objects, self._others, strict=True):
            if state is not None:
                value.load_state_dict(state)
            if isinstance(value, nn.Module):
                value.zero_grad(set_to_none=True)


def _shapes(model: nn.Module) -> list[tuple[int, torch.Size]]:
    return [(id(p), p.shape) for p in model.parameters()]


@torch.no_grad()
def _share(objects: tuple[Any, ...], source: int, rank: int) -> None:
    """Gives all ranks the state of one of them."""
    for value in objects:
        if isinstance(value, nn.Module):
            for tensor in (*value.parameters(), *value.buffers()):
                _broadcast(tensor.detach(), source)
            continue
        mine = value.state_dict() if rank == source else None
        found = [pytree.tree_map_only(Tensor, _Empty, mine)]
        dist.broadcast_object_list(found, source)
        state = mine if rank == source else pytree.tree_map_only(_Empty, _Empty.tensor, found[0])
        for x in pytree.tree_leaves(state):
            if isinstance(x, Tensor):
                _broadcast(x, source)
        if rank != source:
            value.load_state_dict(state)


class _Empty:
    """In place of a tensor that is sent."""

    def __init__(self, x: Tensor):
        self.shape, self.dtype, self.is_cuda = x.shape, x.dtype, x.is_cuda

    def tensor(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=_rank_device() if self.is_cuda else "cpu")


def _broadcast(x: Tensor, source: int) -> None:
    sent = x.contiguous()
    dist.broadcast(sent, source)
    if sent is not x:
        x.copy_(sent)
