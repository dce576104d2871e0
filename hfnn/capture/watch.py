"""The dependencies of a recorded graph besides its inputs: everything that a forward may read from modules on the host.

A graph repeats recorded launches. Host code does not run again. So a replay is correct only while everything that this
code read is unchanged: attributes of modules and of the objects that they hold, parameters and their memory, hooks,
forwards of classes. Not seen: changes below the second level of objects, and globals of the author's files.
"""

import contextlib
import functools
import random
import sys
import types
from collections.abc import Callable, Iterator

import torch
from torch import nn

from hfnn.core import parts
from hfnn.patterns.probe import CONTAINERS

LEVELS = 2  # levels of objects that a module holds, such as its config and a config inside that
_HELD = (nn.Module, torch.Tensor, type, types.FunctionType, types.MethodType, types.ModuleType, torch.Generator)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class _Contents:
    """`hfnn._C.Contents` (csrc/contents.h) in Python, used if that is not built."""

    def __init__(self, parts: list):
        self._parts = [(part, [*map(id, _values(part))]) for part in parts]

    def changed(self, begin: int) -> int:
        """The index of the first part from `begin` on that holds other objects than before, or -1."""
        for number, (part, known) in enumerate(self._parts[begin:], begin):
            if [*map(id, _values(part))] != known:
                return number
        return -1

    def look(self, number: int) -> None:
        """Take the present objects of this part as the reference from now on."""
        part = self._parts[number][0]
        self._parts[number] = part, [*map(id, _values(part))]


try:
    from hfnn._C import Contents
except ImportError:
    Contents = _Contents


class Snapshot:
    """The state of a model at one moment."""

    def __init__(self, model: nn.Module):
        self._parts: list[dict | list] = []
        self._places: list[str] = []  # the place of each
        self._values: list[list] = []  # the values in each, which keeps them alive
        self._sets: list[tuple[str, set, set]] = []
        self._tensors: list[tuple[torch.Tensor, Callable, object, bool]] = []
        self._forwards = {}
        seen: set[int] = set()
        for name, module in model.named_modules():
            cls = type(module)
            self._forwards[cls] = cls.forward
            for where, part in _contents(vars(module), name or "the model", 0, seen):
                if isinstance(part, set):
                    self._sets.append((where, part, {*part}))
                else:
                    self._parts.append(part)
                    self._places.append(where)
                    self._values.append(_values(part))
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if type(tensor) in (torch.Tensor, nn.Parameter):
                    plain = tensor.layout is torch.strided
                    address = tensor.data_ptr if plain else functools.partial(parts.addresses, tensor)
                    self._tensors.append((tensor, address, address(), tensor.requires_grad))
        self._contents = Contents(self._parts)

    def changed(self) -> str | None:
        """What has changed, in words, or None."""
        number = self._contents.changed(0)
        while number >= 0:
            values = _values(self._parts[number])
            if not _same(values, self._values[number]):
                return f"{self._places[number]} has changed"
            self._values[number] = values
            self._contents.look(number)
            number = self._contents.changed(number + 1)
        for where, part, before in self._sets:
            if part != before:
                return f"{where} has changed"
        for tensor, address, at, grad in self._tensors:
            if address() != at or tensor.requires_grad is not grad:
                return "a parameter or a buffer has other memory, or is (not) trained any more"
        for cls, forward in self._forwards.items():
            if cls.forward is not forward:
                return f"the forward of {cls.__name__} was replaced"
        return None

    def places(self, values: dict[int, object]) -> Iterator[tuple[dict | list, object]]:
        """(dict or list, key or index) for each place where the model holds one of `values`, given by id."""
        for part in self._parts:
            items = part.items() if isinstance(part, dict) else enumerate(part)
            yield from ((part, at) for at, value in items if id(value) in values)


def _contents(state: dict, where: str, level: int, seen: set[int]) -> Iterator[tuple[str, object]]:
    """A dict of attributes, the containers in it, and the containers of the objects in it."""
    if id(state) in seen:
        return
    seen.add(id(state))
    yield where, state
    for name, value in state.items():
        if name == "_hfnn_capture":
            continue
        if isinstance(value, CONTAINERS):
            yield f"{where}.{name}", value
        elif (
            level < LEVELS
            and not isinstance(value, (*_HELD, *_PLAIN))
            and type(getattr(value, "__dict__", None)) is dict
        ):
            yield from _contents(vars(value), f"{where}.{name}", level + 1, seen)


def _values(part) -> list:
    return [*part.values()] if isinstance(part, dict) else [*part]


def _same(now: list, before: list) -> bool:
    """Whether values are the same objects, or equal numbers and strings."""
    return len(now) == len(before) and all(
        a is b or (type(a) is type(b) and isinstance(a, _PLAIN) and a == b) for a, b in zip(now, before, strict=True)
    )


def foreign_hooks(model: nn.Module) -> str | None:
    """Which module inside the model has a hook, or None. Hooks of the model itself run outside of its forward."""
    for name, module in model.named_modules():
        if module is not model:
            kinds = module._forward_pre_hooks, module._forward_hooks, module._backward_hooks, module._backward_pre_hooks
            for hook in (hook for kind in kinds for hook in kind.values()):
                # transformers leaves hooks that only act if outputs are requested.
                if not getattr(hook, "__module__", "").startswith("transformers.utils.output_capturing"):
                    return f"{name} has a hook, which a replay would not call"
    return None


def autocast_state() -> tuple:
    """(device, whether autocast is on, its dtype) of each device."""
    return tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cuda", "cpu"))


@contextlib.contextmanager
def autocast_as(states: tuple) -> Iterator[None]:
    """Restores an autocast state, without its cache: a cast made while recording must not be used by later calls."""
    with contextlib.ExitStack() as stack:
        for device, enabled, dtype in states:
            if enabled or torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
        yield


class HostDraws:
    """The host's generators: numbers drawn from them would be the same in each replay."""

    def __init__(self, device_generator):
        self._ours = device_generator is torch.default_generator
        self._before = self._states()

    def moved(self) -> str | None:
        """The name of a generator whose state has changed."""
        before, now = self._before, self._states()
        return next((name for name in now if name in before and not _equal(before[name], now[name])), None)

    def _states(self) -> dict:
        found = {"random": random.getstate()}
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            kind, keys, *rest = numpy.get_state(legacy=True)
            found["numpy.random"] = (kind, keys.tobytes(), *rest)
        if not self._ours:
            found["torch's generator of the CPU"] = torch.default_generator.get_state()
        return found


def _equal(a, b) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
