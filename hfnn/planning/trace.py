"""A training step on tensors without values: what is allocated and freed, in order, and what for."""

import contextlib
import copy
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode, fake_tensor

from hfnn.core import parts
from hfnn.core.as_if import as_if
from hfnn.deferred.head import CALLS
from hfnn.memory.peak import _Live, tensors

KINDS = ("weights", "states", "gradients", "inputs", "kept", "temporaries")
PHASES = ("forward", "backward", "optimizer")
_NEEDS_VALUES = tuple(
    getattr(fake_tensor, name)
    for name in ("DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedOperatorException")
)


@dataclass(frozen=True)
class Step:
    """events: (number of a storage, its bytes), or (number, 0) where it is freed; kinds: {number: one of KINDS};
    starts: the number of events before each of PHASES."""

    events: list[tuple[int, int]]
    kinds: dict[int, str]
    starts: tuple[int, int, int]

    def at_peak(self) -> tuple[dict[str, int], str]:
        """({kind: bytes} when most is allocated, the phase); from the beginning of the step on."""
        now, alive = dict.fromkeys(KINDS, 0), {}
        best, where = dict(now), 0
        for i, (number, size) in enumerate(self.events):
            kind = self.kinds.get(number, "temporaries")
            now[kind] += size or -alive.get(number, 0)
            alive[number] = size
            if i >= self.starts[0] and sum(now.values()) > sum(best.values()):
                best, where = dict(now), i
        return best, PHASES[sum(where >= start for start in self.starts) - 1]

    def kept(self) -> int:
        """Bytes that are kept between forward and backward."""
        alive = dict(self.events[: self.starts[1]])
        return sum(size for number, size in alive.items() if self.kinds.get(number) == "kept")


class _Events(_Live):
    """Records the births and deaths of storages."""

    def __init__(self):
        super().__init__()
        self.events: list[tuple[int, int]] = []
        self.numbers: dict[int, int] = {}  # of the storages that are alive

    def _born(self, key, size):
        super()._born(key, size)
        self.numbers[key] = len(self.events)
        self.events.append((len(self.events), size))

    def _forget(self, key, size):
        super()._forget(key, size)
        self.events.append((self.numbers.pop(key), 0))

    def of(self, nest) -> set[int]:
        """The numbers of the storages of tensors."""
        keys = (key for tensor in tensors(nest) for key in parts.storages(tensor))
        return {self.numbers[key] for key in keys if key in self.numbers}


def trace(
    model: nn.Module,
    inputs: tuple,
    loss: Callable,
    optimizer: Callable | None,
    convert: Callable,
    gpu: bool,
    autocast: torch.dtype | None,
) -> Step:
    """A step of a copy of a model, in which the states exist. convert: what is done to the copy; gpu: whether
    the step is one on a GPU; for the others, see `hfnn.plan`. Raises ValueError where a value is needed.
    """
    with _Events() as live, FakeTensorMode(allow_non_fake_inputs=True), as_if() if gpu else _nothing():
        twin = _without_values(model)
        weights = set(live.numbers.values())
        given = map_tensors(_fake, inputs)
        convert(twin)
        stepper = optimizer and optimizer(p for p in twin.parameters() if p.requires_grad)
        for group in stepper.param_groups if stepper and gpu else ():
            if group.get("foreach", 0) is None and not group.get("fused"):
                group["foreach"] = True  # as torch chooses it for parameters on a GPU
        with _saying_where(twin):
            for _ in range(2 + CALLS * any(_undecided(m) for m in twin.modules())):
                starts = _step(twin, given, loss, stepper, autocast, live)
        kinds = dict.fromkeys(_alive_at(live.events, starts[1]), "kept")
        kinds |= dict.fromkeys(starts[4], "temporaries") | dict.fromkeys(starts[3], "gradients")
        kinds |= dict.fromkeys(live.of(given), "inputs")
        if stepper is not None:
            kinds |= dict.fromkeys(live.of([*map(dict, stepper.state.values())]), "states")
        kinds |= dict.fromkeys(weights | live.of([*twin.parameters(), *twin.buffers()]), "weights")
        return Step(list(live.events), kinds, starts[:3])


def _step(model, inputs, loss, stepper, autocast, live):
    """(events before forward, backward and the optimizer, the numbers of the gradients, that of the loss)"""
    for p in model.parameters():
        p.grad = None
    forward = len(live.events)
    with torch.autocast("cpu", autocast) if autocast else _nothing():
        value = loss(model, *inputs)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ValueError("give loss=: a function of the model and the inputs whose result is a scalar")
    backward, of_loss = len(live.events), live.of(value)
    value.backward()
    del value
    gradients, update = live.of([p.grad for p in model.parameters() if p.grad is not None]), len(live.events)
    if stepper is not None:
        stepper.step()
    return forward, backward, update, gradients, of_loss


def _undecided(m: nn.Module) -> bool:
    """Whether a layer is in the calls that tell if its logits can be deferred."""
    use = vars(m).get("_hfnn_use")
    return use is not None and use.unread < CALLS


def _alive_at(events, end: int) -> set[int]:
    alive = dict(events[:end])
    return {number for number, size in alive.items() if size}


def _without_values(model: nn.Module) -> nn.Module:
    """A copy of a model with tensors without values, on the CPU."""
    own = (value for m in model.modules() for part in (m._parameters, m._buffers, vars(m)) for value in part.values())
    return copy.deepcopy(model, {id(t): _fake(t) for t in own if isinstance(t, Tensor)})


def _fake(t: Tensor) -> Tensor:
    found = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu", requires_grad=t.requires_grad)
    return nn.Parameter(found.detach(), t.requires_grad) if isinstance(t, nn.Parameter) else found


def map_tensors(function: Callable, nest):
    """A nest of tuples, lists and dicts with a function's results in place of tensors."""
    if isinstance(nest, Tensor):
        return function(nest)
    if isinstance(nest, dict):
        return {key: map_tensors(function, value) for key, value in nest.items()}
    return type(nest)(map_tensors(function, value) for value in nest) if type(nest) in (tuple, list) else nest


@contextlib.contextmanager
def _saying_where(model: nn.Module):
    """An error about a missing value names the module and the line that asked for it."""
    try:
        yield
    except _NEEDS_VALUES as error:
        names, inner, line = {m: name for name, m in model.named_modules()}, "the model", ""
        for frame, number in traceback.walk_tb(error.__traceback__):
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and owner in names and not frame.f_code.co_filename.startswith("<"):
                inner = f"{names[owner] or 'the model'} ({type(owner).__name__})"
                line = f", {frame.f_code.co_filename}:{number}"
        raise ValueError(f"a step cannot be planned without values: {inner} asks for one{line}") from error


_nothing = contextlib.nullcontext
