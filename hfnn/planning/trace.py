"""A training step on tensors without values: what is allocated and freed, in order, and what for."""

import copy
import traceback
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode, fake_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hfnn.core import parts
from hfnn.core.as_if import as_if
from hfnn.core.context import PLAIN
from hfnn.deferred.head import CALLS
from hfnn.memory.keepers import Spy, folded_name
from hfnn.memory.peak import Live, tensors

KINDS = ("weights", "states", "gradients", "inputs", "kept", "temporaries")
PHASES = ("forward", "backward", "optimizer")
_NEEDS_VALUES = tuple(
    getattr(fake_tensor, name)
    for name in ("DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedOperatorException")
)


@dataclass(frozen=True)
class Step:
    """events: (number of a storage, its bytes), or (number, 0) where it is freed; kinds: {number: one of KINDS};
    starts: the number of events before each of PHASES; modules: {number: name of the module in whose forward it was
    made}."""

    events: list[tuple[int, int]]
    kinds: dict[int, str]
    starts: tuple[int, int, int]
    modules: dict[int, str]

    def curve(self, points: int = 400) -> list[tuple[str, dict[str, int]]]:
        """(phase, {kind: bytes}) over the step, in at most `points` parts and one: when most is allocated in each."""
        now, alive, found = dict.fromkeys(KINDS, 0), {}, {}
        length = max(-(-(len(self.events) - self.starts[0]) // points), 1)
        for i, (number, size) in enumerate(self.events):
            now[self.kinds.get(number, "temporaries")] += size or -alive.get(number, 0)
            alive[number] = size
            part = (i - self.starts[0]) // length
            if part >= 0 and sum(now.values()) > sum(found.get(part, ("", {}))[1].values()):
                found[part] = PHASES[sum(i >= start for start in self.starts) - 1], dict(now)
        return list(found.values())

    def kept(self) -> dict[str, int]:
        """{name of a module: bytes that it keeps between forward and backward}, with * for numbers in the name."""
        found = {}
        for number, size in dict(self.events[: self.starts[1]]).items():
            if size and self.kinds.get(number) == "kept":
                name = folded_name(self.modules.get(number, ""))
                found[name] = found.get(name, 0) + size
        return found


class _Events(Live):
    """Records the births and deaths of storages."""

    def __init__(self):
        super().__init__()
        self.events: list[tuple[int, int]] = []
        self.numbers: dict[int, int] = {}  # of the storages that are alive
        self.modules: dict[int, str] = {}
        self.running: list[str] = []  # names of the modules whose forwards run

    def _born(self, key, size):
        super()._born(key, size)
        self.numbers[key] = len(self.events)
        if self.running:
            self.modules[len(self.events)] = self.running[-1]
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
    change: Callable,
    gpu: bool,
    autocast: torch.dtype | None,
) -> Step:
    """A step of a copy of a model, in which the states exist. change: what is done to the copy; gpu: whether the step
    is one on a GPU; for the others, see `hfnn.plan`. Raises ValueError where a value is needed.
    """
    with _Events() as live, FakeTensorMode(allow_non_fake_inputs=True), as_if() if gpu else nullcontext():
        copies = _Copies()
        twin = copies.of_model(model)
        weights = set(live.numbers.values())
        given = tree_map_only(Tensor, copies.of, inputs)
        change(twin)
        stepper = optimizer and optimizer(p for p in twin.parameters() if p.requires_grad)
        for group in stepper.param_groups if stepper and gpu else ():
            if group.get("foreach", 0) is None and not group.get("fused"):
                group["foreach"] = True  # as torch chooses it for parameters on a GPU
        for _ in range(2 + CALLS * any(map(_undecided, twin.modules()))):
            starts, kinds = _step(twin, given, loss, stepper, autocast, live)
        states = [] if stepper is None else [dict(state) for state in stepper.state.values()]
        for kind, nest in ("inputs", given), ("states", states), ("weights", [*twin.parameters(), *twin.buffers()]):
            kinds |= dict.fromkeys(live.of(nest), kind)
        return Step(list(live.events), kinds | dict.fromkeys(weights, "weights"), starts, live.modules)


def _step(model, inputs, loss, stepper, autocast, live) -> tuple[tuple[int, int, int], dict[int, str]]:
    """(the number of events before each phase, {number of a storage: its kind, of those that the step made})"""
    leaves = [*model.parameters(), *tensors(tree_leaves(inputs))]
    for leaf in leaves:
        leaf.grad = None
    forward = len(live.events)
    spy = Spy(model)
    with _saying_where(model), spy.watching(), torch.autocast("cpu", autocast) if autocast else nullcontext():
        live.running = spy.running
        value = loss(model, *inputs)
    live.running = []
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ValueError("give loss=: a function of the model and the inputs whose result is a scalar")
    kinds = {number: "kept" for number, size in dict(live.events).items() if size}  # all that is alive
    kinds |= dict.fromkeys(live.of(value), "temporaries")
    backward = len(live.events)
    with _saying_where(model):
        value.backward()
    del value
    kinds |= dict.fromkeys(live.of([leaf.grad for leaf in leaves if leaf.grad is not None]), "gradients")
    update = len(live.events)
    if stepper is not None:
        stepper.step()
    return (forward, backward, update), kinds


def _undecided(m: nn.Module) -> bool:
    """Whether a layer is in the calls that tell if its logits can be deferred."""
    use = vars(m).get("_hfnn_use")
    return use is not None and use.unread < CALLS


class _Copies(TorchFunctionMode):
    """Tensors without values, on the CPU, with the sizes and strides of others; they share memory where those do."""

    def __init__(self):
        self._memory: dict[int, Tensor] = {}

    def of_model(self, model: nn.Module) -> nn.Module:
        with self:
            return copy.deepcopy(model, {id(p): self.of(p) for p in model.parameters()})

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        t, memo = args
        return memo.setdefault(id(t), self.of(t))

    def of(self, t: Tensor) -> Tensor:
        if type(t) not in PLAIN or t.layout is not torch.strided:
            raise ValueError(f"a step with a {type(t).__name__} of layout {t.layout} cannot be planned")
        storage = t.untyped_storage()
        memory = self._memory.get(storage._cdata)
        if memory is None:
            memory = self._memory[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
        place = memory.untyped_storage(), t.storage_offset(), t.shape, t.stride()
        found = torch.empty(0, dtype=t.dtype, device="cpu").set_(*place)
        if isinstance(t, nn.Parameter):
            return nn.Parameter(found, t.requires_grad)
        return found.requires_grad_(t.requires_grad)


@contextmanager
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
