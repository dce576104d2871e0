"""Defects planted in `hfnn.optim`; the fuzzer of optimizers finds each of them."""

from collections import defaultdict

import torch
from engine import patched

from hfnn.optim import adam, reference, sgd, state, swap, table
from hfnn.optim.fused import Fused


def _without(flag: int):
    """A group's numbers, without one of its option flags."""

    def replacement(own):
        def numbers(self, group):
            found = own(self, group)
            return [*found[:5], found[5] & ~flag, *found[6:]]

        return numbers

    return replacement


def _first_numbers(own):
    def set_first(self, numbers, *others):
        self.first_numbers = vars(self).get("first_numbers", numbers)
        own(self, self.first_numbers if len(self.first_numbers) == len(numbers) else numbers, *others)

    return set_first


def _without_scale(own):
    return lambda self, numbers, max_norm, grad_scale, found_inf: own(self, numbers, max_norm, None, found_inf)


def _without_overflow(own):
    return lambda self, numbers, max_norm, grad_scale, found_inf: own(self, numbers, max_norm, grad_scale, None)


def _count_from_one(own):
    def count(self, params):
        new = [p for p in params if "step" not in self.state[p]]
        own(self, params)
        for p in new:
            self.state[p]["step"] = self.state[p]["step"] + 1

    return count


def _forgetting(own):
    def convert(optimizer, **options):
        optimizer.state = defaultdict(dict)
        return own(optimizer, **options)

    return convert


def _empty_state(own):
    return lambda self: {**own(self), "state": defaultdict(dict)}


def _by_shape(own):
    return lambda x, wanted: x.contiguous()


def _no_closure(own):
    def step(self, closure=None):
        with torch.no_grad():
            self._step(None)
        return None if closure is None else closure()

    step.hooked = True
    return step


FAULTS = {
    "versions are not moved": patched(torch.autograd.graph, "increment_version", lambda own: lambda tensors: None),
    "groups may exchange parameters": patched(Fused, "_options", lambda own: lambda self: own(self)[:-1]),
    "a negation is left out": patched(torch.Tensor, "resolve_neg", lambda own: lambda self: self),
    "options are those of the first step": patched(table.Settings, "set", _first_numbers),
    "the gradients' scale is left out": patched(table.Settings, "set", _without_scale),
    "a step that overflows is taken": patched(table.Settings, "set", _without_overflow),
    "maximize is left out": patched(adam.Adam, "_numbers", _without(reference.MAXIMIZE)),
    "the largest of amsgrad is left out": patched(adam.Adam, "_numbers", _without(reference.AMSGRAD)),
    "nesterov is left out": patched(sgd.SGD, "_numbers", _without(reference.NESTEROV)),
    "dampening from the first step on": patched(sgd.SGD, "_fills", lambda own: lambda self, group: False),
    "steps are counted from one": patched(state.States, "_count", _count_from_one),
    "gradients in the order of their shape": patched(table, "like", _by_shape),
    "convert forgets the states": patched(swap, "convert", _forgetting),
    "revert forgets the states": patched(swap, "_torchs_state", lambda own: lambda optimizer, p, group: {}),
    "a pickle forgets the states": patched(state.States, "__getstate__", _empty_state),
    "the closure comes after the step": patched(Fused, "step", _no_closure),
}
