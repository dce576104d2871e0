"""Whole parameters, for saving, loading and inspection."""

import collections
import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

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
    found, keep = collections.OrderedDict(), not rank0_only or torch.distributed.get_rank() == 0
    whole: dict[int, Tensor] = {}  # a tied one is gathered, and kept, once
    state = model.module.state_dict(keep_vars=True)
    found._metadata = state._metadata  # the versions of modules
    for name, value in state.items():
        if id(value) not in whole:
            tensor = _whole(model, value) if isinstance(value, DTensor) else value
            tensor = tensor.detach() if isinstance(tensor, Tensor) else tensor
            whole[id(value)] = (tensor.cpu() if cpu and isinstance(tensor, Tensor) else tensor) if keep else None
        if keep:
            found[name] = whole[id(value)]
    return found


def load_state_dict(model, given: dict, strict: bool, assign: bool):
    if assign:
        raise ValueError(
            "assign=True is not accepted: optimizers hold the sharded parameters; values are copied into them"
        )
    with RowsOnly(model):
        found = model.module.load_state_dict(given, strict)
    model.shards_loaded()
    return found


def rows_of(model, sharded, value):
    """A whole tensor as a DTensor like the sharded parameter; anything else unchanged."""
    if not isinstance(sharded, DTensor) or isinstance(value, DTensor) or getattr(value, "shape", None) != sharded.shape:
        return value
    found = torch.empty_like(sharded.detach())
    (flat, p) = next((f, p) for unit in model.units for f in unit.flats for p in f.parameters if p.sharded is sharded)
    flat.copy_rows(p, value, found._local_tensor)
    return found


class RowsOnly(TorchFunctionMode):
    """A context in which copying a whole tensor to a sharded parameter copies this rank's rows."""

    def __init__(self, model):
        super().__init__()
        self._of = {id(p.sharded): (flat, p) for unit in model.units for flat in unit.flats for p in flat.parameters}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.copy_ and id(args[0]) in self._of and not isinstance(args[1], DTensor):
            flat, p = self._of[id(args[0])]
            flat.write(p, args[1])
            return args[0]
        return func(*args, **(kwargs or {}))
