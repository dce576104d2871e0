"""Defects to plant in haiscale's wrappers, in a rank process."""

import contextlib
from unittest import mock

import torch

from haiscale import checks
from haiscale.ddp import buckets, buffers, reducer
from haiscale.ddp.wrapper import DDP
from haiscale.fsdp import clip, engine, full, unit, wrapper
from haiscale.fsdp import flat as flats
from haiscale.fsdp import reduce as reductions
from hfnn.core import node as recipe
from hfnn.core.node import parameters_are_resharded


def planted(name: str | None):
    """A context with the defect of this name; None: no defect."""
    return contextlib.nullcontext() if name is None else FAULTS[name]()


def _replaced(owner, name, make):
    """A context in which an attribute is replaced by `make(attribute)`."""
    return lambda: mock.patch.object(owner, name, make(getattr(owner, name)))


def _hooks_on_what_was_handed_on(real):
    return lambda tensor, since: tensor.grad_fn is not None


def _a_hook_left_out(real):
    return lambda tensor, since: real(tensor, since) and tensor.grad_fn._sequence_nr() % 3 > 0


def _gather_skipped(real):
    return lambda self: self.slot.unit is not None and self.stamp == self._stamp()


def _stale_parameter(real):
    return lambda self: self.slot.unit is self


def _not_reduced(real):
    """The first parameter of a unit keeps this rank's own gradient."""

    def attach(self, done, values, divisor):
        real(self, done, values, divisor)
        if self.size > 1 and done[0].sharded.grad is not None:
            done[0].sharded.grad._local_tensor.mul_(1 + self.rank)

    return attach


def _average_lost(real):
    """Where autograd has written `.grad` during the reduction."""

    def attach(self, done, values, divisor):
        for p in done:
            if values is self.grad and p.sharded.grad is not None:
                values[p.start : p.start + p.count] = 0
        real(self, done, values, divisor)

    return attach


def _reduced_twice(real):
    def begin(self, flat, gradients, keeping):
        real(self, flat, [(p, g * 2 if len(p.places) > 1 else g) for p, g in gradients], keeping)

    return begin


def _only_the_unit_itself(real):
    return lambda self, unit, around, gradient: real(self, unit, {unit: around[unit]}, gradient)


def _recomputation_ends_backward(real):
    def recompute(self, unit):
        self._begin_backward(len(self._running) - 1)
        for other in reversed(self._backward.copy()):
            if other is not unit and other not in unit.around:
                self._after_backward(other)

    return recompute


def _kept_for_ever(real):
    """What no_sync kept is still there in the next step."""

    def begin(self, flat, gradients, keeping):
        kept = set(flat.kept_of)
        real(self, flat, gradients, keeping)
        if kept and not keeping:
            flat.kept, flat.kept_of = torch.ones(flat.whole_length, dtype=flat.reduce_dtype), kept

    return begin


def _local_norm(real):
    def power(tensors, norm_type, device):
        return real(tensors[1:], norm_type, device)

    return power


def _zeros_for_nothing(real):
    """An unused parameter gets zeros."""

    def reduce(self, unit):
        for flat in unit.flats:
            for p in flat.parameters:
                if p.requires_grad and p.whole.grad is None and p.whole.numel():
                    p.whole.grad = torch.zeros_like(p.whole)
        real(self, unit)

    return reduce


def _first_rows_only(real):
    """A state dict is loaded into the rows of rank 0 only."""

    def write(self, p, whole):
        if self.rank == 0:
            real(self, p, whole)

    return write


def _replacement_lost(real):
    def adopt(self):
        for p in self.parameters:
            p.put(p.sharded)

    return adopt


def _lists_not_watched(real):
    def look(self):
        real(self)
        self._lists, self._seen = [], (self._seen[0], 0)

    return look


def _frozen_not_watched(real):
    def look(self):
        real(self)
        self._frozen = []

    return look


def _ddp_missing_kept(real):
    """A bucket's old gradient of a parameter that is unused this time is averaged again."""

    def collect(self, attach):
        with mock.patch.object(torch, "_foreach_zero_", lambda tensors: None):
            real(self, attach)

    return collect


def _ddp_sync_ignored(real):
    return lambda self, sync: real(self, True)


def _ddp_too_early(real):
    """A bucket's average starts one gradient too early."""

    def reset(self):
        real(self)
        self.waiting = max(1, self.waiting - 1)

    return reset


@contextlib.contextmanager
def _recipes_of_parameters():
    with mock.patch.object(recipe, "parameters_are_resharded", lambda: None):
        parameters_are_resharded(False)
        yield


FAULTS = {
    "fsdp: a hook left out": _replaced(engine, "_made_since", _a_hook_left_out),
    "fsdp: hooks on what is handed on": _replaced(engine, "_made_since", _hooks_on_what_was_handed_on),
    "fsdp: a gather skipped": _replaced(unit.Unit, "is_fresh", _gather_skipped),
    "fsdp: a stale parameter": _replaced(unit.Unit, "is_fresh", _stale_parameter),
    "fsdp: a release forgotten": _replaced(unit.Unit, "swap_out", lambda real: lambda self: None),
    "fsdp: a gradient not reduced": _replaced(flats.Flat, "attach", _not_reduced),
    "fsdp: a tied weight reduced twice": _replaced(reductions.Reductions, "begin", _reduced_twice),
    "fsdp: no_sync ignored": _replaced(
        wrapper.FSDP, "no_sync", lambda real: lambda self: contextlib.nullcontext()
    ),
    "fsdp: no_sync not cleared": _replaced(reductions.Reductions, "begin", _kept_for_ever),
    "fsdp: around a unit unknown": _replaced(engine.Engine, "_gradient_came", _only_the_unit_itself),
    "fsdp: recomputation ends backward": _replaced(engine.Engine, "_recompute", _recomputation_ends_backward),
    "fsdp: slots not given back": _replaced(engine.Engine, "_restore", lambda real: lambda self: None),
    "fsdp: a norm of a part": _replaced(clip, "_power", _local_norm),
    "fsdp: zeros for what is unused": _replaced(engine.Engine, "_reduce", _zeros_for_nothing),
    "fsdp: a part not loaded": _replaced(flats.Flat, "write", _first_rows_only),
    "fsdp: writes without a trace": _replaced(engine.Engine, "_suspect", lambda real: lambda self, outermost: None),
    "fsdp: an average lost": _replaced(flats.Flat, "attach", _average_lost),
    "fsdp: recipes refer to parameters": _recipes_of_parameters,
    "fsdp: exceptions not forgotten": _replaced(engine.Engine, "reset", lambda real: lambda self: None),
    "fsdp: whole after an exception": _replaced(engine, "_ended", lambda real: lambda engine: lambda ending: None),
    "fsdp: a replacement lost": _replaced(flats.Flat, "adopt", _replacement_lost),
    "ddp: buffers not sent": _replaced(buffers.Buffers, "synchronise", lambda real: lambda self, source=0: False),
    "ddp: no_sync ignored": _replaced(reducer.Reducer, "arm", _ddp_sync_ignored),
    "added parameters let through": _replaced(checks.Added, "__call__", lambda real: lambda self: None),
    "added to a list without a trace": _replaced(checks.Added, "_look", _lists_not_watched),
    "added frozen and thawed": _replaced(checks.Added, "_look", _frozen_not_watched),
}  # fmt: skip
__all__ = ["DDP", "FAULTS", "buckets", "full", "planted"]
