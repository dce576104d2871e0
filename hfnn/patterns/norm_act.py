"""Modules that call a batch norm, then an activation on its result or on its sum with another tensor.

    y = relu(bn1(conv1(x))),  relu(bn3(conv3(y)) + x)        the blocks of ResNets, and most convolutional models

The module's own forward is run once on a clone whose parts are stand-ins that record their arguments. If it only calls
parts, adds, activates, flattens and concatenates, the record is a list of steps. Adjacent norms, sums and activations
in this list are fused. It is proved by running both, and then replaces the forward.
"""

import functools
import inspect
from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hfnn.core.context import compiling, is_bare, is_plain
from hfnn.ops import batch_norm, piecewise, smooth
from hfnn.ops.batch_norm import ACT, ACTIVATIONS, PIECEWISE
from hfnn.patterns import probe
from hfnn.patterns.probe import Refusal
from hfnn.patterns.proof import Match, Proofs, arguments, check

_NORMS = {
    nn.BatchNorm1d: 3, nn.BatchNorm2d: 4, nn.BatchNorm3d: 5,
    batch_norm.BatchNorm1d: 3, batch_norm.BatchNorm2d: 4, batch_norm.BatchNorm3d: 5,
}  # fmt: skip
_ACTIVATIONS = {
    nn.ReLU: "relu", nn.LeakyReLU: "leaky_relu", nn.ReLU6: "relu6", nn.SiLU: "silu", nn.Hardswish: "hardswish",
    piecewise.ReLU: "relu", piecewise.LeakyReLU: "leaky_relu", piecewise.ReLU6: "relu6", smooth.SiLU: "silu",
    smooth.Hardswish: "hardswish",
}  # fmt: skip
# Further operations that a forward may use: functions of torch, by their names in steps.
_FUNCTIONS = {
    torch.Tensor.__add__: "add", torch.Tensor.add: "add", torch.add: "add",
    torch.Tensor.__iadd__: "add_", torch.Tensor.add_: "add_",
    torch.flatten: "flatten", torch.Tensor.flatten: "flatten", torch.cat: "cat",
    torch.relu: "relu", torch.Tensor.relu: "relu", torch.Tensor.relu_: "relu", torch.relu_: "relu",
    F.relu: "relu", F.leaky_relu: "leaky_relu", F.relu6: "relu6", F.silu: "silu", F.hardswish: "hardswish",
}  # fmt: skip
_IN_PLACE = torch.Tensor.relu_, torch.relu_
_CONSTANTS = (int, float, bool)


@dataclass(frozen=True)
class Step:
    """`out = what(*inputs, *constants)`: values are numbered; 0 is the forward's input.

    kind: "part", by name; "function", of _FUNCTIONS; or "norm", followed by an activation `act`, a part or a function,
    with a sum in between if there are two inputs.
    """

    kind: str
    what: str
    inputs: tuple[int, ...]
    out: int
    constants: tuple = ()
    act: tuple[str, str] | None = None
    inplace: bool = False  # whether the sum is written to the norm's result


class NormAct:
    """Mixin for such a module: its steps, or the class's own forward."""

    prefer = "auto"
    _hfnn_when = "while its norms and activations carry no hooks, which would not be called"

    def forward(self, *args, **kwargs):
        like, parts = self._hfnn_like, self._modules
        if len(args) != 1 or kwargs or compiling() or not is_plain(args[0]) or not like.holds(parts):
            return super().forward(*args, **kwargs)
        return like.run(parts, self.prefer, args[0])


@dataclass(frozen=True)
class NormsAndActs(Match):
    """names: of all parts; identities: of those that return their input."""

    names: tuple[str, ...]
    identities: tuple[str, ...]
    steps: tuple[Step, ...]
    result: int
    mixin, op = NormAct, ACT

    def __str__(self) -> str:
        fused = [" + ".join([s.what, *(["sum"] if len(s.inputs) > 1 else []), s.act[1]]) for s in self.steps if s.act]
        return f"hfnn batch_norm_act of {', '.join(fused)}"

    @functools.cached_property
    def run(self):
        """run(parts, prefer, x): the steps as a function."""
        return _compiled(self.steps, self.result)

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "run"}  # which cannot be pickled

    def holds(self, parts) -> bool:
        return tuple(parts) == self.names and all(
            type(parts[name]) is nn.Identity and is_bare(parts[name]) for name in self.identities
        )


@functools.lru_cache(maxsize=1024)
def _compiled(steps: tuple[Step, ...], result: int):
    """The steps as Python source. A value is released as soon as no step needs it, like local names of a forward."""
    last = {value: step for step in steps for value in (*step.inputs, step.out)}
    lines = []
    for step in steps:
        values = [f"v{n}" for n in step.inputs]
        constants = [repr(c) for c in step.constants]
        if step.kind == "part":
            call = f"parts[{step.what!r}]({values[0]})"
        elif step.kind == "norm":
            residual = values[1] if len(values) > 1 else None
            act = f"parts[{step.act[1]!r}]" if step.act[0] == "part" else repr(step.act[1])
            slope = constants[0] if len(constants) > 1 else "0.01"
            call = f"norm_act(parts[{step.what!r}], {act}, {values[0]}, {residual}, {step.inplace}, {slope}, prefer)"
        elif step.what in ("add", "add_"):
            call = " + ".join(values)
            if step.what == "add_":
                lines.append(f"{values[0]} += {values[1]}")
                call = values[0]
        elif step.what == "cat":
            call = f"cat([{', '.join(values)}], {', '.join(constants)})"
        else:
            call = f"{step.what}({', '.join([*values, *constants])})"
        lines.append(f"v{step.out} = {call}")
        gone = {n for n in (*step.inputs, step.out) if last[n] is step and n != result}
        if gone:
            lines.append("del " + ", ".join(f"v{n}" for n in sorted(gone)))
    source = "def run(parts, prefer, v0):\n" + "".join(f"    {line}\n" for line in lines) + f"    return v{result}\n"
    names = {"norm_act": _norm_act, "cat": torch.cat, "flatten": torch.flatten}
    names |= {name: getattr(F, name) for name in ACTIVATIONS if name}
    exec(source, names)
    return names["run"]


def _norm_act(norm, act, x, residual, inplace, slope, prefer):
    """act(norm(x) + residual), by one kernel if possible and nothing observes the parts."""
    name = act if type(act) is str else _ACTIVATIONS.get(type(act))
    fits = residual is None or (
        residual.shape == x.shape and residual.dtype is x.dtype and name in ACTIVATIONS[: PIECEWISE + 1]
    )
    if (
        fits and name is not None and type(norm) in _NORMS and is_bare(norm) and is_plain(x)
        and (act is name or is_bare(act))
    ):  # fmt: skip
        norm._check_input_dim(x)
        of_x = batch_norm.arguments(norm)  # also counts a batch
        behind = residual, name, act.negative_slope if name == "leaky_relu" and act is not name else slope
        y = batch_norm.fused(x, *of_x, *behind, prefer)
        if y is not None:
            return y
        y = batch_norm.batch_norm(x, *of_x, prefer=prefer)
    else:
        y = norm(x)
    if residual is not None:
        if inplace:
            y += residual
        else:
            y = y + residual
    if act is not name:
        return act(y)
    return F.leaky_relu(y, slope) if name == "leaky_relu" else getattr(F, name)(y)


class _Part(nn.Module):
    """Stand-in for a part: mixes a row in a distinct way, so that its position matters."""

    def __init__(self, name, number, log):
        super().__init__()
        self.name, self.number, self.log = name, number, log

    def forward(self, *args, **kwargs):
        if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor):
            raise Refusal(f"its forward calls {self.name} with more than a tensor")
        with torch._C.DisableTorchFunction():
            x = args[0]
            places = torch.arange(x.shape[-1], dtype=torch.float64) + 3 * self.number
            y = x * places.cos().to(x.dtype) + x.roll(self.number, -1)
        if self.log is not None:
            self.log.add("part", self.name, (x,), y)
        return y


class _Log(TorchFunctionMode):
    """Records the steps of a forward."""

    def __init__(self, x):
        super().__init__()
        self.steps, self.kept, self.numbers, self.count = [], [x], {id(x): 0}, 1

    def number(self, x) -> int:
        if id(x) not in self.numbers:
            raise Refusal("its forward uses a tensor that is neither its input nor made of it")
        return self.numbers[id(x)]

    def add(self, kind, what, inputs, out, constants=()) -> None:
        inputs = tuple(map(self.number, inputs))
        self.steps.append(Step(kind, what, inputs, self.count, constants))
        self.kept.append(out)
        self.numbers[id(out)] = self.count
        self.count += 1

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs = _FUNCTIONS.get(func), kwargs or {}
        if name is None:
            raise Refusal(f"its forward calls {getattr(func, '__qualname__', func)}")
        y = func(*args, **kwargs)
        inputs, constants = _read(name, func, args, dict(kwargs))
        if not all(isinstance(x, torch.Tensor) for x in inputs) or not all(type(c) in _CONSTANTS for c in constants):
            raise Refusal(f"its forward calls {name} with arguments that a step does not have")
        self.add("function", name, inputs, y, tuple(constants))
        return y


def _read(name, func, args, kwargs) -> tuple[list, list]:
    """The tensors and the constants of a function call; arguments that a step does not support are among the
    constants."""
    if name in ACTIVATIONS:  # the slope, if there is one, and `inplace`, both by position
        given = inspect.signature(getattr(F, name)).bind(*args, **kwargs)
        given.apply_defaults()
        x, *constants, inplace = given.args
        return [x], [*constants, inplace or func in _IN_PLACE]
    if name == "cat":
        dim = kwargs.pop("dim", 0)
        return list(args[0]), [*(args[1:] or [dim]), *kwargs.items()]
    tensors = 1 if name == "flatten" else 2
    return list(args[:tensors]), [*args[tensors:], *kwargs.items()]


def recognise(module: nn.Module) -> Match | Refusal | None:
    """The steps of its forward, or why they are not known; None if no activation follows a batch norm."""
    parts, cls = module._modules, type(module)
    if cls.__module__.startswith("torch.") and cls is not nn.Sequential:
        return None
    if not any(type(part) in _NORMS for part in parts.values()) or None in parts.values() or module._buffers:
        return None
    if any(p is not None for p in module._parameters.values()) or arguments(cls) != 1:
        return None
    key = tuple((name, _kind(part), _first(parts, part)) for name, part in parts.items())
    return _proofs.of(module, key, lambda notes: _prove(module, notes), "it has batch norms, but ")


_proofs = Proofs()


def _kind(part) -> str | None:
    """The properties of a part on which the steps depend."""
    if type(part) is nn.Identity:
        return "identity"
    return "norm" if type(part) in _NORMS else _ACTIVATIONS.get(type(part))


def _first(parts, part) -> str:
    return next(name for name, other in parts.items() if other is part)


def _clone(module, notes, training, log):
    made = {}
    for number, (name, part) in enumerate(module._modules.items()):
        made[name] = (
            nn.Identity() if type(part) is nn.Identity else _Part(_first(module._modules, part), number + 1, log)
        )
        made[name].training = training
    made = {name: made[_first(module._modules, part)] for name, part in module._modules.items()}
    return probe.clone(module, notes, training, {}, made)


def _prove(module, notes) -> NormsAndActs | None:
    dims = next(_NORMS[type(part)] for part in module._modules.values() if type(part) in _NORMS)
    shape = (3, 4, 4, 5, 3)[:dims]
    found = set()
    for training in (True, False):
        x = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(0))
        log = _Log(x)
        clone = _clone(module, notes, training, log)
        with torch.no_grad(), log:
            y = type(clone).forward(clone, x)
        if not isinstance(y, torch.Tensor):
            raise Refusal(f"its forward returns a {type(y).__name__}")
        found.add((tuple(log.steps), log.number(y)))
    if len(found) > 1:
        raise Refusal("its forward is another in training than in eval")
    ((steps, result),) = found
    fused = _fused(steps, result, {name: _kind(part) for name, part in module._modules.items()})
    if fused == steps:
        return None
    identities = tuple(name for name, part in module._modules.items() if type(part) is nn.Identity)
    like = NormsAndActs(tuple(module._modules), identities, fused, result)
    for number, (dtype, training) in enumerate(((torch.float64, True), (torch.float32, False))):
        clone = _clone(module, notes, training, None)
        x = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(1 + number)).to(dtype)
        definition = lambda parts, x: like.run(parts._modules, "speed", x)  # noqa: E731
        check(clone, (x,), definition, f"{dtype}", within=0.0, wide=False, dtype=dtype)
    return like


def _fused(steps, result, kinds) -> tuple[Step, ...]:
    """The steps with each norm joined to the activation after it, if nothing else uses the values in between."""
    uses = Counter([result, *(value for step in steps for value in step.inputs)])
    reader = {value: step for step in steps for value in step.inputs}
    gone, made = set(), {}
    for norm in steps:
        if norm.kind != "part" or kinds[norm.what] != "norm" or uses[norm.out] != 1 or norm.out == result:
            continue
        act, inputs, inplace = reader[norm.out], norm.inputs, False
        if uses[norm.inputs[0]] != 1:  # which may be written to before the activation
            continue
        sum_ = None
        if act.kind == "function" and act.what in ("add", "add_") and act not in gone:
            sum_, inplace = act, act.what == "add_"
            others = [value for value in sum_.inputs if value != norm.out]
            if (
                (inplace and sum_.inputs[0] != norm.out)
                or uses[sum_.out] != 1
                or sum_.out == result
                or len(others) != 1
            ):
                continue
            act, inputs = reader[sum_.out], (*inputs, *others)
        name = kinds[act.what] if act.kind == "part" else act.what
        if (
            name not in ACTIVATIONS[1:]
            or act in gone
            or (sum_ is not None and name not in ACTIVATIONS[: PIECEWISE + 1])
        ):
            continue
        gone |= {norm, act} | ({sum_} if sum_ is not None else set())
        made[act] = replace(act, kind="norm", what=norm.what, inputs=inputs, act=(act.kind, act.what), inplace=inplace)
    return tuple(made.get(step, step) for step in steps if step in made or step not in gone)
