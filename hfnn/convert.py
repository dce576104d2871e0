"""`convert` and `revert`: use hfnn in a model that is already built, by giving its modules other forwards.

Classes, parameters, buffers, hooks and names do not change: a module gets a forward of its own on the instance
(hfnn/core/holder.py), with options such as `prefer`. Nothing outside the model changes. `examine` decides about one
module, and `hfnn.report` prints its verdict.
`hfnn/optim/swap.py` converts optimizers.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar, overload

from torch import nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from hfnn import adapters
from hfnn.capture import captured
from hfnn.core import native
from hfnn.core.context import PLAIN
from hfnn.core.holder import COMPUTE, foreign_forward, forward_of, holder_of, settings
from hfnn.core.kernel import PREFERENCES
from hfnn.core.options import one_of
from hfnn.optim import swap
from hfnn.patterns import (
    batch_norm_act,
    experts,
    gated_norm,
    linear,
    lookalike,
    rewrite,
    routed,
)
from hfnn.patterns.probe import Refusal
from hfnn.patterns.proof import Match
from hfnn.patterns.subclass import (
    FORWARDS,
    ROOMS,
    Converted,
    holds,
    is_converted,
    original,
    put,
    restore,
    underivable,
)

Filter = str | type | Callable[[str, nn.Module], bool]


@dataclass(frozen=True, eq=False)
class Site:
    """A module of a model: all of its names, and every module around it under any of them."""

    module: nn.Module
    names: list[str]
    around: list[nn.Module]
    use: object | None = None  # of a layer that may make the model's logits


@dataclass(frozen=True)
class Verdict:
    """What `convert` does with a module: the class whose forward it gets and the match of its proof, or why it is left
    alone."""

    room: type | None
    why: str = ""
    like: Match | None = None


NO_OP = "no op of hfnn computes this"

# Each takes a module whose class is not known. It returns a `Match`, a `Refusal` if something hints at its pattern, or
# None (hfnn/patterns/proof.py).
RECOGNISERS = (
    gated_norm.recognise,
    lookalike.recognise,
    linear.recognise,
    rewrite.recognise,
    experts.recognise,
    adapters.recognise,
    batch_norm_act.recognise,
    routed.recognise,
)


_Model = TypeVar("_Model", bound=nn.Module | Optimizer)


@overload
def convert(
    model: _Model, optimizer: None = None, *, only: Filter | Iterable[Filter] | None = None,
    skip: Filter | Iterable[Filter] | None = None, prefer: str = "auto", recompute: str | None = None,
    exact: bool = False, defer: bool = True, capture: bool = False, **options: Any,
) -> _Model: ...  # fmt: skip
@overload
def convert(
    model: nn.Module, optimizer: Optimizer, *, only: Filter | Iterable[Filter] | None = None,
    skip: Filter | Iterable[Filter] | None = None, prefer: str = "auto", recompute: str | None = None,
    exact: bool = False, defer: bool = True, capture: bool = False, **options: Any,
) -> tuple[nn.Module, Optimizer]: ...  # fmt: skip
def convert(
    model: nn.Module | Optimizer,
    optimizer: Optimizer | None = None,
    *,
    only: Filter | Iterable[Filter] | None = None,
    skip: Filter | Iterable[Filter] | None = None,
    prefer: str = "auto",
    recompute: str | None = None,
    exact: bool = False,
    defer: bool = True,
    capture: bool = False,
    **options: Any,
) -> Any:
    """Swap the forward of every module for which hfnn has an op, in place; returns the model.

    Modules keep their classes: `isinstance(m, hfnn.LayerNorm)` is False, and `hfnn.is_converted(m)` tells.

    The swapped modules are torch's own classes, classes that inherit their forward unchanged, and look-alikes that were
    proved to compute the same (hfnn/patterns). `hfnn.report(model)` lists each module, with the reason if it was left
    alone. Converting again only changes the options, and examines again modules that returned to their own forward.

    `convert(optimizer)` converts an optimizer alone and returns it; `convert(model, optimizer)` returns both. An
    optimizer that cannot be converted is left alone, with the reason in the log and in `hfnn.report(optimizer)`; with
    options it raises ValueError.

    Args:
        model: A module, or an optimizer of torch.optim.
        optimizer: One whose class is in hfnn.optim, or a subclass that inherits its step. It becomes hfnn's, in place,
            with its states, step counts and hooks, before or after a scheduler or a GradScaler was made for it. If
            accelerate prepared it with a GradScaler, pass the object that accelerate returned.
        only: What is converted; one or several of: a name or fnmatch pattern ("model.layers.0", "*.mlp.*"; it also
            selects everything inside a module), a class, a function of (name, module). None: everything.
        skip: What is left alone, likewise.
        prefer: "memory" uses hfnn's kernels at any size, "speed" only where they are faster, "auto" where they are
            faster or save megabytes.
        recompute: "gemm": feed-forward networks do not keep the first products, the widest tensors of a transformer,
            but recompute them in backward. None: they keep them.
        exact: Whether, on a GPU under autocast, gradients of linear maps are rounded and added up in torch's order.
            Otherwise gradients of float32 tensors are not rounded to 16 bits for large inputs, which is faster.
        defer: Whether logits that only a loss needs are computed when they are read, which raises an error if the
            weights were written to by hand before the loss's backward. Otherwise language models compute the logits of
            every call.
        capture: Whether, on a GPU, the model's forward and backward are replayed as CUDA graphs, after three uncaptured
            calls with the same shapes. The training loop stays as it is. Calls that cannot be replayed run uncaptured,
            and `hfnn.report` counts them with their reasons. On the CPU it has no effect, and a message says so.
            Converting again without it ends it. hfnn's dropout draws other masks than without capture.
        options: Those of `hfnn.optim` for the optimizer (`state_dtype="8bit"`, ...), which may also be set on a
            converted one.

    Raises:
        ValueError: An option has another value than those named here, or a pattern matches no module.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    >>> hfnn.convert(model) is model, hfnn.is_converted(model[1]), type(model[1])
    (True, True, <class 'torch.nn.modules.normalization.LayerNorm'>)
    """
    one_of("prefer", prefer, PREFERENCES)
    one_of("recompute", recompute, (None, "gemm"))
    one_of("exact", exact, (False, True))
    one_of("capture", capture, (False, True))
    one_of("defer", defer, (True, False))
    if isinstance(model, Optimizer):
        given = optimizer, only, skip, prefer, recompute, exact, capture, defer
        if given != (None, None, None, "auto", None, False, False, True):
            raise ValueError("got options of a model: hfnn.convert(optimizer) takes those of hfnn.optim")
        return swap.convert(model, **options)
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ValueError(f"takes a torch.optim.Optimizer as second argument, got {type(optimizer).__name__}")
    if options and optimizer is None:
        raise ValueError(
            f"got {', '.join(options)}: those are for an optimizer, as in hfnn.convert(model, optimizer, ...)"
        )
    native.warn()
    _convert(model, only, skip, prefer, recompute, exact, defer)
    if capture:
        captured.capture(model)
    return model if optimizer is None else (model, swap.convert(optimizer, **options))


def _convert(model: nn.Module, only, skip, prefer: str, recompute: str | None, exact: bool, defer: bool) -> None:
    if isinstance(model, nn.Module):
        captured.release(model)
    for module in model.modules() if isinstance(model, nn.Module) else ():
        holder = holder_of(module)
        if holder is not None and not holder.holds():
            holder.release()  # it is examined again
        elif isinstance(module, Converted) and not holds(module) and _why_not_restored(module) is None:
            restore(module)
    found = sites(model)
    chosen, skipped = _select(found, only, "only", default=found), _select(found, skip, "skip", default=[])
    # All verdicts come first: if a proof fails in an unexpected way, the model is unchanged.
    verdicts = [(site, examine(site)) for site in found if site in chosen and site not in skipped]
    of_parts = [rewrite.settings(site.module, recompute) for site, _ in verdicts]
    for site, verdict in verdicts:
        module = site.module
        if verdict.room is not None:
            put(module, verdict.room, verdict.like)
            if site.use is not None:
                vars(module)["_hfnn_use"] = site.use
        if is_converted(module) or rewrite.is_own(module):
            _set(module, {"prefer": prefer, "exact": exact, "defer": defer})
    for part, attributes in ((p, a) for parts in of_parts for p, a in parts.items() if is_converted(p)):
        _set(part, attributes)
    adapters.settle(model)


@overload
def revert(model: _Model, optimizer: None = None) -> _Model: ...
@overload
def revert(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]: ...
def revert(model: nn.Module | Optimizer, optimizer: Optimizer | None = None) -> Any:
    """Give every converted module its own forward again, in place; returns its argument.

    hfnn's own classes become torch's, even if the model was built with them. `hfnn.MLP` and `hfnn.GatedMLP` stay,
    because torch has no class for them; only their parts change.

    Args:
        model: A module, or an optimizer.
        optimizer: Becomes torch's, with states as torch keeps them; 8-bit and 4-bit states are decoded.

    Raises:
        ValueError: `fully_shard` or similar code has changed the class of a module that has a subclass (layers of
            transformers that checkpoint themselves), or its forward. Nothing is changed then.

    >>> model = hfnn.convert(torch.nn.Sequential(torch.nn.LayerNorm(8)))
    >>> hfnn.is_converted(hfnn.revert(model)[0])
    False
    """
    if isinstance(model, Optimizer) and optimizer is None:
        return swap.revert(model)
    _revert(model)
    return model if optimizer is None else (model, swap.revert(optimizer))


def _revert(model: nn.Module) -> None:
    captured.release(model)
    modules = [module for module in model.modules() if is_converted(module)]
    for module in modules:
        why = _why_not_restored(module)
        if why is not None:
            raise ValueError(f"cannot revert {type(module).__name__}: {why}; undo that first")
    for module in filter(rewrite.is_own, model.modules()):
        vars(module).pop("prefer", None)
    for module in modules:
        restore(module)
    adapters.release(model)


def _why_not_restored(module) -> str | None:
    if holder_of(module) is not None:
        return None
    if original(type(module)) is None:
        return "its class was changed after hfnn.convert"
    if isinstance(module, Converted) and foreign_forward(module):
        return (
            "its forward was replaced on the instance after hfnn.convert (by accelerate, or alike), and goes on to "
            "hfnn's"
        )
    return None


def sites(model: nn.Module) -> list[Site]:
    """Every module of the model once, in the order of `named_modules`."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"takes a torch.nn.Module, got {type(model).__name__}")
    by_name, uses = dict(model.named_modules(remove_duplicate=False)), adapters.candidates(model)
    found: dict[nn.Module, Site] = {}
    for name, module in by_name.items():
        site = found.setdefault(module, Site(module, [], [], uses.get(module)))
        site.names.append(name)
        site.around.extend(by_name[outer] for outer in _prefixes(name) if outer != name)
    return list(found.values())


def examine(site: Site) -> Verdict:
    """Whether and how to swap a module that is not converted yet, or why not."""
    module, cls = site.module, type(site.module)
    placed = adapters.room_of(module, site.around, site.use)
    if placed is not None:
        why = _obstacle(site, placed)
        return Verdict(None if why else placed, why or "")
    if is_converted(module):
        return Verdict(None, "converted already")
    base, room = _room(cls)
    like = _recognise(module) if room is None else None
    if room is None and not isinstance(like, Match):
        why = like and str(like)
        if why is None and base is not None:
            of = "another forward than torch's" if cls is base else "a forward of its own"
            why = f"{cls.__name__} has {of}, which {base.__name__}'s room does not know"
        return Verdict(None, why or NO_OP)
    room = room or like.mixin
    why = _obstacle(site, room)
    if why is not None:
        return Verdict(None, why)
    why = underivable(cls, room, like)
    return Verdict(None if why else room, why or "", like)


def _recognise(module) -> Match | Refusal | None:
    """The first match of any of RECOGNISERS, else the first refusal."""
    refusal = None
    for recognise in RECOGNISERS:
        like = recognise(module)
        if isinstance(like, Match):
            return like
        refusal = refusal or like
    return refusal


def _room(cls: type) -> tuple[type | None, type | None]:
    """(the class that hfnn knows, the room). The room is None for a subclass with its own forward."""
    rooms = {**ROOMS, **adapters.rooms()}
    base = next((base for base in cls.__mro__ if base in rooms), None)
    return base, rooms[base] if base and forward_of(cls) == FORWARDS.get(base, forward_of(base)) else None


def _obstacle(site: Site, room: type) -> str | None:
    """Why this module must be left alone although its class is known and has a room, or None."""
    module = site.module
    own = next((name for name in COMPUTE[1:] if name in vars(module)), "forward" if foreign_forward(module) else None)
    if own is not None:
        return (
            f"it has a {own} of its own on the instance (set by accelerate, Liger or alike), which wins over the class"
        )
    for name in () if is_converted(module) else settings(room):
        if hasattr(module, name):
            return f"it has an attribute named {name}, which hfnn uses"
    if is_fsdp(module):
        return "already wrapped by fully_shard: convert first, then wrap"
    if parametrize.is_parametrized(module):
        return "its parameters are parametrized: convert first, then register parametrizations"
    for name, p in module._parameters.items():
        if p is not None and type(p) not in PLAIN:
            return f"its {name} is a {type(p).__name__}, not a plain parameter{_ADVICE.get(type(p).__name__, '')}"
    for outer in site.around:
        if type(outer).__module__.startswith("peft.") and "base_layer" in outer._modules:
            return f"inside {type(outer).__name__} of PEFT, which computes with its parts in its own way"
        if isinstance(outer, nn.MultiheadAttention):
            return "inside nn.MultiheadAttention, which reads its weights without calling it"
    return None


_ADVICE = {
    "DTensor": ": convert before fully_shard or parallelize_module",
    "UninitializedParameter": ": run the model once, then convert",
}


def is_fsdp(module) -> bool:
    """Whether `fully_shard` was called on this module: it changes the class too."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _set(module, values: dict) -> None:
    """Set on the instance only if it differs from the class's value, so modules carry no unneeded state."""
    holder = holder_of(module)
    for name in settings(type(module) if holder is None else holder.target):
        if holder is None and name in values:
            vars(module).pop(name, None)
        if name in values and (holder is not None or getattr(type(module), name) != values[name]):
            vars(module)[name] = values[name]


def _prefixes(name: str) -> list[str]:
    """ "a.b.c" -> ["", "a", "a.b", "a.b.c"]."""
    parts = name.split(".") if name else []
    return ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]


def _select(found: list[Site], filters, argument: str, default: list[Site]) -> set[Site]:
    """The sites that any of the filters selects."""
    if filters is None:
        return set(default)
    filters = [filters] if isinstance(filters, (str, type)) or callable(filters) else list(filters)
    for pattern in filters:
        if isinstance(pattern, str) and not any(fnmatchcase(name, pattern) for s in found for name in s.names):
            raise ValueError(f"{argument}={pattern!r} matches no module of this model; names are as in named_modules()")
        if not isinstance(pattern, str) and not callable(pattern):
            raise ValueError(f"{argument} takes names, patterns, classes and functions, got {pattern!r}")
    return {site for site in found if any(_takes(f, site) for f in filters)}


def _takes(wanted: Filter, site: Site) -> bool:
    if isinstance(wanted, type):
        return isinstance(site.module, wanted)
    if isinstance(wanted, str):
        return any(fnmatchcase(outer, wanted) for name in site.names for outer in _prefixes(name))
    return any(wanted(name, site.module) for name in site.names)
