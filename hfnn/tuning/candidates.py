"""The ways in which a model can run."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim import Optimizer

from hfnn.convert import convert, revert
from hfnn.core.kernel import log

STOCK = "stock"
# For a compiled choice: with and without gradients, training and eval, a second shape. torch gives up after 8.
RECOMPILED_CALLS = 6


@dataclass(frozen=True)
class Candidate:
    """A way to run a model. backend: torch.compile's, or None for a model that is not compiled."""

    name: str
    convert: bool = False
    capture: bool = False
    backend: str | Callable | None = None
    channels_last: bool = False

    def enter(self, model: nn.Module) -> None:
        """Make the model run this way, in place."""
        for weight in convolved(model) if self.channels_last else ():
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        if self.convert:
            convert(model, capture=self.capture)
        if self.backend is not None:
            vars(model)["_compiled_call_impl"] = _compiled(model, self.backend)

    def leave(self, model: nn.Module) -> None:
        """Undo `enter`, except the layout. Discards everything that torch.compile compiled in this process."""
        if vars(model).pop("_compiled_call_impl", None) is not None:
            torch._dynamo.reset()
        if self.convert:
            revert(model)


def candidates(model: nn.Module, optimizer: Optimizer | None = None, backend: str | Callable = "inductor"):
    """All candidates for a model, those with the shortest setup first. A converted model is compiled by "hfnn" if the
    backend is Inductor.

    Layouts are only for weights whose optimizer has no states yet: existing states would keep their layout.
    """
    plain = [Candidate(STOCK), Candidate("converted", convert=True)]
    if any(p.is_cuda for p in model.parameters()):
        plain.append(Candidate("captured", convert=True, capture=True))
    ours = "hfnn" if backend == "inductor" else backend
    compiled = [Candidate("compiled", backend=backend), Candidate("compiled, converted", convert=True, backend=ours)]
    weights, found = convolved(model), []
    layouts = (
        bool(weights) and all(w.is_contiguous() for w in weights) and optimizer is not None and not optimizer.state
    )
    for group in (plain, compiled):
        found += group
        found += [replace(c, name=f"{c.name}, channels_last", channels_last=True) for c in group] if layouts else []
    return found


def among_names(known: list[Candidate], names: Iterable[str | Candidate]) -> list[Candidate]:
    by_name = {c.name: c for c in known}
    wanted = [STOCK, *([names] if isinstance(names, (str, Candidate)) else names)]
    for name in wanted:
        if not isinstance(name, Candidate) and name not in by_name:
            raise ValueError(f"among={name!r}: choose of {', '.join(map(repr, by_name))}")
    found = [c if isinstance(c, Candidate) else by_name[c] for c in wanted]
    return list({c.name: c for c in found}.values())


def convolved(model: nn.Module) -> list[nn.Parameter]:
    """Weights of two-dimensional convolutions."""
    convolutions = nn.Conv2d, nn.ConvTranspose2d
    return [m.weight for m in model.modules() if isinstance(m, convolutions) and isinstance(m.weight, nn.Parameter)]


def _compiled(model: nn.Module, backend: str | Callable) -> Callable:
    """The replacement of `_call_impl`, because nn.Module.compile leaves torch's own containers uncompiled."""

    def call(*args, **kwargs):
        return model._call_impl(*args, **kwargs)

    call.__code__ = call.__code__.replace()  # a copy: torch counts recompilations by code
    return torch.compile(call, backend=backend)


def watch(model: nn.Module) -> None:
    """Make a compiled model run uncompiled once more than `RECOMPILED_CALLS` calls have recompiled."""
    compiled, count = vars(model)["_compiled_call_impl"], -1  # the first call compiles

    def call(*args, **kwargs):
        nonlocal count
        before = graphs()
        found = compiled(*args, **kwargs)
        if graphs() != before:
            count += 1
            if count > RECOMPILED_CALLS and vars(model).get("_compiled_call_impl") is call:
                del vars(model)["_compiled_call_impl"]
                log.warning("%s is no longer compiled: %d calls compiled anew", type(model).__name__, count)
        return found

    vars(model)["_compiled_call_impl"] = call


def graphs() -> int:
    """The number of compilations by torch.compile in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # importing it takes a second
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0
