"""A unit: modules whose parameters are gathered together, and whose gradients are reduced together."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import AllgatherOptions
from torch.optim.optimizer import register_optimizer_step_post_hook

import hfnn
from haiscale import checks
from haiscale.fsdp.flat import Flat, Parameter

_steps = [0]  # number of steps of all optimizers of this process
_ABSENT = 2**31  # the version of whole parameters while another unit uses the slot


def stepped(optimizer: torch.optim.Optimizer | None = None, *_) -> None:
    """Parameters may have changed; called after every step of an optimizer.

    Raises ValueError for an optimizer of parameters that FSDP has since replaced: they get no gradients.
    """
    _steps[0] += 1
    for group in optimizer.param_groups if optimizer is not None else ():
        if any(p.grad is None and getattr(p, "given_to_fsdp", False) for p in group["params"]):
            raise ValueError(
                f"{type(optimizer).__name__} was made of parameters that FSDP has sharded since, so its step changes "
                "nothing: make the optimizer of model.parameters() after wrapping the model"
            )


register_optimizer_step_post_hook(stepped)


class Slot:
    """Memory for the whole parameters of one unit at a time; several units may take turns."""

    def __init__(self, nbytes: int, make: Callable[[int], Tensor]):
        self.buffer, self.unit, self.turn = make(nbytes), None, 0

    @property
    def busy(self) -> bool:
        return self.unit is not None and self.unit.running > 0


class Unit:
    """See the top of this file. `running` counts the users of whole parameters: forwards, and one backward."""

    def __init__(self, name: str, modules: list[nn.Module], flats: list[Flat], private: bool):
        self.name, self.modules, self.flats = name, modules, flats
        self.private = private  # has its own slot, never used by other parameters
        self.running, self.swapped, self.stamp = 0, False, None
        self.suspect = False  # shards may have been written to in a way that leaves no trace
        self.works: list[dist.Work] = []
        self.slot: Slot | None = None
        self.around: set[Unit] = set()  # units around this one
        embeddings = nn.Embedding.forward, hfnn.Embedding.forward  # their backward reads no weights
        self.backward_reads = any(type(m).forward not in embeddings for m in modules)
        self.parameters: list[Parameter] = [p for flat in flats for p in flat.parameters]
        self.version = 0  # version of the whole parameters: how often the shards have changed
        self._wholes = tuple(p.whole for p in self.parameters)
        self._calls: list[tuple[Flat, Tensor | None, list, list]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of a slot: the whole parameters, and the cast shard if there is a cast."""
        return sum(_bytes(f.whole_length, f) + (_bytes(f.length, f) if f.casts else 0) for f in self.flats)

    def bind(self, slot: Slot) -> None:
        """From now on the parameters are always gathered into this slot, because saved tensors of autograd refer to
        it."""
        self.slot, at = slot, 0
        for flat in self.flats:
            whole = slot.buffer[at : at + flat.whole_length * flat.compute_dtype.itemsize].view(flat.compute_dtype)
            at += _bytes(flat.whole_length, flat)
            outputs, cast, inputs = flat.bind(whole), None, flat.inputs
            if flat.casts:
                cast = slot.buffer[at : at + flat.length * flat.compute_dtype.itemsize].view(flat.compute_dtype)
                at += _bytes(flat.length, flat)
                inputs = flat.shards(cast)
            pairs = [(i, o) for i, o in zip(inputs, outputs, strict=True) if o.numel()]
            self._calls.append((flat, cast, [i for i, _ in pairs], [o for _, o in pairs]))

    def is_fresh(self) -> bool:
        """Whether the slot holds, or is receiving, the present values of the shards."""
        return self.slot.unit is self and not self.suspect and self.stamp == self._stamp()

    def _stamp(self) -> tuple[int, int]:
        """Changes when shards are written to, by torch's ops or by an optimizer's kernels, which torch cannot see."""
        return _steps[0], sum(flat.versions() for flat in self.flats)

    @torch.no_grad()
    def gather(self, group: dist.ProcessGroup) -> None:
        """Starts to write the whole parameters into the slot."""
        holder = self.slot.unit
        if holder is not None:
            holder.wait()
            holder._set_version(_ABSENT)
        self.slot.unit, before, self.stamp, self.suspect = self, self.stamp, self._stamp(), False
        self.version += self.stamp != before  # a backward that needs the old values fails, as it does without shards
        self._set_version(self.version)
        for flat, cast, inputs, outputs in self._calls:
            if cast is not None:
                cast.copy_(flat.shard, non_blocking=True)
            self.works += all_gather(group, outputs, inputs)

    def _set_version(self, version: int) -> None:
        """Autograd compares it with the saved version, so a backward fails if the parameters are not in the slot."""
        torch._C._autograd._unsafe_set_version_counter(self._wholes, (version,) * len(self._wholes))

    def wait(self) -> None:
        """Waits until the started gather is complete; on a GPU, only later kernels wait."""
        try:
            while self.works:
                self.works.pop(0).wait()
        except dist.DistBackendError as error:
            checks.explain(
                error, f"was gathering {self.name} of FSDP: every rank must call it as often, in evaluation too"
            )
            raise

    def swap_in(self) -> None:
        """Modules have whole parameters from now on."""
        if not self.swapped:
            self.swapped = True
            for p in self.parameters:
                if p.requires_grad is not p.sharded.requires_grad:  # the user froze or unfroze it
                    p.requires_grad = p.sharded.requires_grad
                    p.whole.requires_grad_(p.requires_grad)
                p.put(p.whole)

    def swap_out(self) -> None:
        if self.swapped:
            self.swapped = False
            for p in self.parameters:
                p.put(p.sharded)


def all_gather(group: dist.ProcessGroup, outputs: list[Tensor], inputs: list[Tensor]) -> list[dist.Work]:
    """One coalesced all-gather; returns the object to wait for."""
    if not inputs or is_fake(group):
        return []
    if group.size() == 1:
        torch._foreach_copy_(outputs, inputs)
        return []
    options = AllgatherOptions()
    options.asyncOp = True
    return [group.allgather_into_tensor_coalesced(outputs, inputs, options)]


def is_fake(group: dist.ProcessGroup) -> bool:
    """Whether the other ranks do not exist, as in memory prediction: then nothing is sent."""
    return dist.get_backend(group) == "fake"


def _bytes(length: int, flat: Flat) -> int:
    return -(-length * flat.compute_dtype.itemsize // 512) * 512
