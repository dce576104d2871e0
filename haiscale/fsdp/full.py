"""Whole parameters, for saving, loading and inspection."""

import collections
import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys

from haiscale.fsdp.unit import all_gather


@contextlib.contextmanager
def summon(model, writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool) -> Iterator[None]:
    """In the block the module's parameters are whole, in their own dtype; all ranks enter it.

    writeback: changes made in the block are kept, each rank's rows from its own copy. rank0_only: on the other ranks of
    the group they stay sharded. offload_to_cpu: they are on the host. with_grads: their `.grad` is the whole gradient;
    changes to it are not kept. Raises ValueError inside forward or backward.
    """
    if any(unit.running for unit in model.units):
        raise ValueError("summon_full_params: not inside forward or backward, where units come and go")
    first = model.mesh.get_local_rank(model.mesh.ndim - 1) == 0
    wholes = []
    with torch.no_grad():
        for unit in model.units:
            for flat in unit.flats:
                values = _gather(flat, model.mesh)
                for p, value in zip(flat.parameters, values, strict=True):
                    grad = _whole(model, p.sharded.grad) if with_grads and p.sharded.grad is not None else None
                    if first or not rank0_only:
                        wholes.append((flat, p, _parameter(value, grad, p.sharded.requires_grad, offload_to_cpu)))
    for _, p, whole in wholes:
        p.put(whole)
    try:
        yield
    finally:
        for flat, p, whole in wholes:
            p.put(p.sharded)
            if writeback:
                flat.write(p, whole.detach())
        model.shards_loaded()


def _gather(flat, mesh) -> list[Tensor]:
    """Each parameter of a flat, whole, in the dtype of its shard."""
    shard = flat.shard.to(flat.device)
    buffer = torch.empty(flat.whole_length, dtype=flat.dtype, device=flat.device)
    outputs = flat.wholes(buffer)
    pairs = [(i, o) for i, o in zip(flat.shards(shard), outputs, strict=True) if o.numel()]
    for work in all_gather(mesh.get_group(mesh.ndim - 1), [o for _, o in pairs], [i for i, _ in pairs]):
        work.wait()
    return [o[: p.numel].view(p.shape) for p, o in zip(flat.parameters, outputs, strict=True)]


def _parameter(value: Tensor, grad: Tensor | None, requires_grad: bool, offload: bool) -> nn.Parameter:
    whole = nn.Parameter(value.cpu() if offload else value, requires_grad)
    if grad is not None:
        whole.grad = grad.cpu() if offload else grad
    return whole


def _whole(model, sharded: DTensor) -> Tensor:
    """Through the model's device, because a GPU-only backend cannot gather host tensors."""
    return sharded.to(model.device).full_tensor()


def state_dict(model, rank0_only: bool, cpu: bool) -> dict[str, Tensor]:
    found, keep = {}, not rank0_only or torch.distributed.get_rank() == 0
    whole: dict[int, Tensor] = {}  # a tied one is gathered, and kept, once
    for name, value in model.module.state_dict(keep_vars=True).items():
        if id(value) not in whole:
            tensor = _whole(model, value) if isinstance(value, DTensor) else value
            tensor = tensor.detach() if isinstance(tensor, Tensor) else tensor
            whole[id(value)] = (tensor.cpu() if cpu and isinstance(tensor, Tensor) else tensor) if keep else None
        if keep:
            found[name] = whole[id(value)]
    return found


@torch.no_grad()
def load_state_dict(model, given: dict, strict: bool, assign: bool):
    if assign:
        raise ValueError(
            "assign=True is not accepted: optimizers hold the sharded parameters; values are copied into them"
        )
    parameters = {}
    for unit in model.units:
        for flat in unit.flats:
            parameters.update((id(p.sharded), (flat, p)) for p in flat.parameters)
    rest, unknown = {}, []
    mine = model.module.state_dict(keep_vars=True)
    for name, value in given.items():
        flat, p = parameters.get(id(mine.get(name)), (None, None))
        if p is None:
            (rest.__setitem__(name, value) if name in mine else unknown.append(name))
        elif tuple(value.shape) != tuple(p.shape):
            raise ValueError(
                f"{name} has shape {tuple(value.shape)} in the state dict and {tuple(p.shape)} in the model"
            )
        elif isinstance(value, DTensor):
            p.sharded.copy_(value)
        else:
            flat.write(p, value)
    model.module.load_state_dict(rest, strict=False)
    model.shards_loaded()
    missing = [name for name in mine if name not in given]
    if strict and (missing or unknown):
        raise ValueError(f"the state dict lacks {missing or 'nothing'}, and the model has no {unknown or 'more'}")
    return _IncompatibleKeys(missing, unknown)


def cast(nest, dtype: torch.dtype):
    """A model's result, with its floating-point tensors in `dtype`."""
    if isinstance(nest, Tensor):
        return nest.to(dtype) if nest.is_floating_point() else nest
    if isinstance(nest, collections.abc.MutableMapping):
        for key, value in list(nest.items()):
            nest[key] = cast(value, dtype)
        return nest
    if type(nest) in (list, tuple):
        return type(nest)(cast(part, dtype) for part in nest)
    return nest
