"""`hfnn.convert(optimizer)` and `hfnn.revert(optimizer)`: change the class of an existing optimizer, and change it
back.

It stays the same object, with its parameter groups, states, step counts and hooks. So everything that holds it (a
scheduler, a GradScaler, a trainer) still works. `examine` alone decides; `hfnn.report` prints its verdict.
"""

import functools
import inspect
import weakref

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _get_scalar_dtype

from hfnn import optim
from hfnn.core.kernel import log
from hfnn.optim.fused import Fused
from hfnn.optim.state import OPTIONS
from hfnn.patterns.subclass import make_subclass


def _torch_class(cls: type) -> type | None:
    """The torch.optim class that a class is or derives from, or None."""
    return next((c for c in cls.__mro__ if _of_torch(c) and c is not Optimizer), None)


def _of_torch(x) -> bool:
    return f"{x.__module__}.".startswith("torch.optim.")


# torch's class -> hfnn's class of that name, from the index of optimizers.
ROOMS = {
    _torch_class(cls): cls
    for cls in vars(optim).values()
    if isinstance(cls, type) and issubclass(cls, Fused) and _torch_class(cls) is not None
}


# Attributes that hfnn's classes set on an instance, besides their options.
_OURS = ("_plans", "_captured", "_settings", "_norm", "_ran", "_step_supports_amp_scaling")


def convert(optimizer: Optimizer, **options) -> Optimizer:
    """Change the class of an optimizer to hfnn's, in place, and set its options; returns it. See `hfnn.convert`.

    If it cannot be changed, it is left as it is and the reason is logged; with options this raises ValueError, as do
    unknown options.
    """
    inner = _inside(optimizer)
    if isinstance(inner, Fused):
        inner.configure(**options)
        return optimizer
    room, why = examine(inner)
    if room is None:
        if options:
            raise ValueError(f"{', '.join(options)}: {type(inner).__name__} cannot be converted: {why}")
        log.warning("hfnn.convert leaves the optimizer %s alone: %s", type(inner).__name__, why)
        return optimizer
    before = type(inner)
    _swap(inner, room)
    try:
        inner.configure(**options)
    except ValueError:
        _swap(inner, before)
        raise
    _settle(optimizer)
    return optimizer


def revert(optimizer: Optimizer) -> Optimizer:
    """Give a converted optimizer torch's class again, in place, with its states as torch keeps them; returns it.

    States get the dtype of their parameter; 8-bit and 4-bit states are decoded. A remainder is dropped: the parameter
    keeps its rounded value. An optimizer without a torch class (`hfnn.optim.Lion`) stays as it is.
    """
    inner = _inside(optimizer)
    cls = original(type(inner))
    if cls is None:
        return optimizer
    for group in inner.param_groups:
        for p in group["params"]:
            if inner.state.get(p):
                inner.state[p] = _torchs_state(inner, p, group)
    _swap(inner, cls)
    for name in (*OPTIONS, *_OURS):
        vars(inner).pop(name, None)
    if all(group.get("fused") for group in inner.param_groups):
        inner._step_supports_amp_scaling = True  # as in torch's constructor
    _settle(optimizer)
    return optimizer


def examine(optimizer: Optimizer) -> tuple[type | None, str]:
    """(the class that an unconverted optimizer would get, why none)."""
    cls = type(optimizer)
    base = _torch_class(cls)
    room = ROOMS.get(base)
    if room is None:
        known = ", ".join(sorted(c.__name__ for c in ROOMS))
        return None, f"hfnn has {known} of torch.optim, and this is {cls.__module__}.{cls.__name__}"
    if not _is(cls.step, base.step) or not _of_torch(inspect.unwrap(base.step)):
        return None, f"its class has a step of its own, which torch.optim.{base.__name__}'s is not"
    if "step" in vars(optimizer) and not _is(vars(optimizer)["step"], base.step):
        return None, "it has a step of its own on the instance, which wins over the class: convert first, then patch"
    if cls is not base:
        own = {name for c in cls.__mro__[: cls.__mro__.index(base)] for name in vars(c)} & _defined(room, base)
        if own:
            return None, f"its class defines {', '.join(sorted(own))}, which hfnn.optim.{room.__name__} does too"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return None, "differentiable=True, where autograd follows torch's own step"
    return (room if cls is base else make_subclass(cls, room, None)), ""


def explain(optimizer: Optimizer) -> tuple[str, str | None, str | None, str]:
    """For `hfnn.report`: (previous class, present class, what ran at its last step, why)."""
    inner = _inside(optimizer)
    before = original(type(inner)) or type(inner)
    label = f"{before.__module__.split('.')[0]}.{before.__name__}"
    if isinstance(inner, Fused):
        room = next(c for c in type(inner).__mro__ if c.__module__.startswith("hfnn.optim."))
        ran, said = inner._ran, inner.report().splitlines()
        return label, f"hfnn.optim.{room.__name__}", ", ".join(ran) or None, "\n".join(line.strip() for line in said)
    room, why = examine(inner)
    return label, None, None, why if room is None else "not converted: hfnn.convert would swap it"


def original(cls: type) -> type | None:
    """The class that `convert` replaced by cls, or None."""
    return vars(cls).get("_hfnn_original") or next((base for base, room in ROOMS.items() if room is cls), None)


def _is(step, plain) -> bool:
    """Whether a step is the class's own, below torch's wrappers for hooks, grad mode and schedulers."""
    return inspect.unwrap(getattr(step, "__func__", step)) is inspect.unwrap(plain)


def _defined(room: type, base: type) -> set[str]:
    """The methods that hfnn's class overrides, except the constructor."""
    classes = [c for c in room.__mro__ if c not in base.__mro__]
    return {name for c in classes for name in vars(c)} - {"__init__", "__module__", "__qualname__", "__doc__"}


def _torchs_state(optimizer: Fused, p: Tensor, group: dict) -> dict:
    """The state of p as its original torch class would have made it."""
    state = optimizer._exported(p, optimizer.state[p])
    state.pop("remainder", None)
    for name in optimizer.signs.keys() & state.keys():
        if isinstance(state[name], Tensor):
            state[name] = state[name].to(p.dtype)
    if "step" in state:
        device = p.device if group.get("capturable") or group.get("fused") else "cpu"
        state["step"] = state["step"].to(device, _get_scalar_dtype(bool(group.get("fused"))), copy=True)
    return state


def _swap(optimizer: Optimizer, cls: type) -> None:
    """Change the class, and everything that torch put on the instance that refers to the class."""
    step = vars(optimizer).pop("step", None)
    optimizer.__class__ = cls
    optimizer._patch_step_function()  # step hooks and the profiler's names, as a constructor does
    if hasattr(step, "_wrapped_by_lr_sched"):
        optimizer.step = _counted_by_schedulers(optimizer)


def _counted_by_schedulers(optimizer: Optimizer):
    """The wrapper that a scheduler puts around the class's step, to warn if the scheduler steps first."""
    reference = weakref.ref(optimizer)  # as in torch: otherwise the optimizer would hold itself

    @functools.wraps(type(optimizer).step)
    def step(*args, **kwargs):
        optimizer = reference()
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True
    return step


def _inside(optimizer: Optimizer) -> Optimizer:
    """The optimizer that accelerate wrapped, or the optimizer itself."""
    if type(optimizer).__module__ == "accelerate.optimizer":
        return _inside(optimizer.optimizer)
    return optimizer


def _settle(optimizer: Optimizer) -> None:
    """Update the step that accelerate holds if it has a GradScaler."""
    if type(optimizer).__module__ == "accelerate.optimizer" and optimizer.scaler is not None:
        optimizer.__setstate__({})
