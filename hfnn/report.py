"""`report`: for every module of a model, or an optimizer, what it was swapped for or why it was left alone."""

import io
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.optim import Optimizer

from hfnn.capture import captured
from hfnn.convert import NO_OP, examine, is_fsdp, sites
from hfnn.memory.keepers import costs
from hfnn.ops import conv, linear
from hfnn.optim import swap
from hfnn.patterns.subclass import ended, holds, is_converted, op_of, original, target, title
from hfnn.tune import explain

OPTIMIZER = "(optimizer)"  # used instead of a name
TAKES = "keeps a recipe of its input where there is one"
OF_NOTE = 0.005  # share of the bytes or of the time from which a module gets a row although hfnn does not concern it


@dataclass(frozen=True)
class ModuleRow:
    """One module. to: what it was swapped for, or None; kernel: what runs for inputs of its parameters' device and
    dtype; why: the reason it was left alone, or further information. If `report` was given inputs: kept, time: its
    share, without the modules inside, of the bytes that a forward keeps and of its time; taken: for what can keep a
    recipe of its input, how many it took.
    """

    name: str
    original: str
    to: str | None
    kernel: str | None
    why: str
    kept: float | None = None
    time: float | None = None
    taken: int | None = None


@dataclass(frozen=True)
class Report:
    """`rows` in the order of the model. When printed, rows that differ only in the numbers in their names are combined.

    captured: one line about the calls of a captured model, or None; tuned: the choice of `hfnn.tune`, likewise.
    """

    rows: list[ModuleRow]
    captured: str | None = None
    tuned: str | None = None

    @property
    def swapped(self) -> list[ModuleRow]:
        return [row for row in self.rows if row.to is not None]

    @property
    def left(self) -> list[ModuleRow]:
        return [row for row in self.rows if row.to is None]

    def _asked(self) -> list[int]:
        return [row.taken for row in self.rows if row.taken is not None]

    def __rich__(self) -> Table:
        caption, asked = f"{len(self.swapped)} modules swapped, {len(self.left)} left alone", self._asked()
        caption += f"; recipes taken: {sum(map(bool, asked))} of {len(asked)}" if asked else ""
        caption += "".join(f"\n{line}" for line in (self.captured, self.tuned) if line)
        of_modules = any(row.name != OPTIMIZER for row in self.rows)
        shown = ("kept", "time") if any(row.kept is not None for row in self.rows) else ()
        columns = "module", "from", "to", "kernel", *shown, "why"
        table = Table(*columns, caption=caption if of_modules else None)
        folded: dict[tuple, list[ModuleRow]] = {}
        for row in self.rows:
            key = re.sub(r"\b\d+\b", "*", row.name), row.original, row.to or "-", row.kernel or "-", row.why
            folded.setdefault(key, []).append(row)
        for (pattern, *rest, why), rows in folded.items():
            shares = (f"{sum(getattr(row, cost) or 0.0 for row in rows):.1%}" for cost in shown)
            name = rows[0].name or "(model)"
            table.add_row(name if len(rows) == 1 else f"{pattern}  x{len(rows)}", *rest, *shares, why)
        return table

    def __str__(self) -> str:
        file = io.StringIO()
        Console(file=file, width=160).print(self)
        return file.getvalue()


def report(model: nn.Module | Optimizer, *inputs: Any, **kwargs: Any) -> Report:
    """Every module without modules inside, and other modules that are converted or almost matched; or an optimizer.

    Print it, or read its `rows`. Kernels are those for contiguous inputs with the device and dtype of the module's
    parameters (or of the model's first parameter), outside torch.compile. Works on models that are converted, partly
    converted or not converted.

    With inputs, `model(*inputs, **kwargs)` runs twice, forward only, and each row shows the module's share of the bytes
    kept for backward and of the time. So the cost of modules that were left alone is visible. The model, its buffers
    and torch's generators do not change. Raises what the forward raises.

    Args:
        model: A module, or an optimizer.
        inputs: Of the forward that is measured.
        kwargs: Of the forward that is measured.

    >>> model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Flatten())
    >>> {row.name: row.to is not None for row in hfnn.report(hfnn.convert(model)).rows}
    {'0': True, '1': False}
    """
    if isinstance(model, Optimizer):
        return Report([ModuleRow(OPTIMIZER, *swap.explain(model))])
    shares = costs(model, inputs, kwargs) if inputs or kwargs else {}
    found = [
        site
        for site in sites(model)
        if not site.module._modules or max(shares.get(site.names[0], (0.0,))) >= OF_NOTE or _is_of_note(site)
    ]
    first = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    rows = [_row(site, first) for site in found]
    if shares:
        rows = [_with_costs(row, *shares.get(row.name, (0.0, 0.0, 0))) for row in rows]
    return Report(rows, captured.explain(model), explain(model))


def _with_costs(row: ModuleRow, kept: float, time: float, taken: int) -> ModuleRow:
    if row.why != TAKES:
        return replace(row, kept=kept, time=time)
    why = "keeps a recipe of its input" if taken else "keeps its input, which has no recipe"
    return replace(row, kept=kept, time=time, taken=taken, why=why)


def _is_of_note(site) -> bool:
    """Whether a module needs a row, rather than only containing others."""
    verdict = None if is_converted(site.module) else examine(site)
    return verdict is None or verdict.room is not None or verdict.why != NO_OP


def _row(site, first) -> ModuleRow:
    module, cls = site.module, target(site.module)
    before = original(type(module)) or type(module)
    name, label = site.names[0], f"{before.__module__.split('.')[0]}.{before.__name__}"
    if not is_converted(module):
        verdict = examine(site)
        return ModuleRow(name, label, None, None, verdict.why or "not converted: hfnn.convert would swap it")
    weight = next((p for p in module._parameters.values() if p is not None), first)
    op = op_of(module)
    kernel, why = (None, "") if op is None else _kernel(cls, module, op, weight)
    if not holds(module):
        return ModuleRow(name, label, None, None, f"runs its own forward: {ended(module)} after hfnn.convert")
    why = _of_class(cls, module, "_hfnn_when", why) or why
    return ModuleRow(name, label, title(module), kernel, why)


def _of_class(cls: type, module, name: str, default):
    """A fact about the module that the class which computes it states."""
    value = getattr(cls, name, default)
    return value.fget(module) if isinstance(value, property) else value


def _kernel(cls, module, op, weight) -> tuple[str, str]:
    """(the kernel, the input size from which it runs)."""
    if op is linear.OP or op in conv.OPS:
        if is_fsdp(module):  # fully_shard passes it a view of its input, which has no recipe
            return "torch", "keeps its input: wrap the block around it instead of the module itself"
        if op in conv.OPS and weight.is_cuda and module.prefer == "auto":
            return "torch", "keeps a recipe of an input from 2^23 elements on, where there is one"
        if op in conv.OPS and weight.is_cuda and module.prefer == "speed":
            return "torch", "keeps its input: on a GPU prefer='speed' asks for it"
        return "torch", TAKES
    if not op.kernels:
        return "torch", "keeps less than torch's module"
    # A norm's weight is a row of its input; ops along another length state it.
    device, cols = weight.device.type, weight.numel() if module._parameters else 0
    cols = _of_class(cls, module, "_hfnn_cols", cols)
    kernel = next((k for k in op.kernels if not k.refusals(device, weight.dtype, cols, weight.dtype)), None)
    if kernel is None:
        return "torch", f"no kernel here for {weight.dtype} on {device}"
    floor = op.floors[module.prefer][weight.is_cuda]
    return kernel.name, f"from {floor} elements on" if floor else ""
