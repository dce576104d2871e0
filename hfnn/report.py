"""`report`: every module of a model, or an optimizer: what it was swapped for or why it was left alone."""

import io
import re
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.optim import Optimizer

from hfnn.convert import NO_OP, examine, is_fsdp, sites
from hfnn.core import recipe
from hfnn.ops import linear
from hfnn.optim import swap
from hfnn.patterns.subclass import is_converted, op_of, original, title

OPTIMIZER = "(optimizer)"  # in the place of a name


@dataclass(frozen=True)
class ModuleRow:
    """One module. to: what it was swapped for, or None; kernel: what runs for inputs of its parameters' device and
    dtype; why: the reason it was left alone, or what else there is to know.
    """

    name: str
    original: str
    to: str | None
    kernel: str | None
    why: str


@dataclass(frozen=True)
class Report:
    """`rows` in the order of the model; printed with rows alike but for numbers in their names folded into one."""

    rows: list[ModuleRow]

    @property
    def swapped(self) -> list[ModuleRow]:
        return [row for row in self.rows if row.to is not None]

    @property
    def left(self) -> list[ModuleRow]:
        return [row for row in self.rows if row.to is None]

    def __rich__(self) -> Table:
        counter = recipe.counter
        caption = f"{len(self.swapped)} modules swapped, {len(self.left)} left alone; "
        caption += f"in this process {counter.taken} recipes taken, {counter.rebuilt} tensors rebuilt"
        of_modules = any(row.name != OPTIMIZER for row in self.rows)
        table = Table("module", "from", "to", "kernel", "why", caption=caption if of_modules else None)
        folded: dict[tuple, list[str]] = {}
        for row in self.rows:
            key = re.sub(r"\b\d+\b", "*", row.name), row.original, row.to or "-", row.kernel or "-", row.why
            folded.setdefault(key, []).append(row.name or "(model)")
        for (pattern, *rest), names in folded.items():
            table.add_row(names[0] if len(names) == 1 else f"{pattern}  x{len(names)}", *rest)
        return table

    def __str__(self) -> str:
        file = io.StringIO()
        Console(file=file, width=160).print(self)
        return file.getvalue()


def report(model: nn.Module | Optimizer) -> Report:
    """Every module without modules inside, and of the others those that are converted, or nearly were; or an optimizer.

    Print it, or read its `rows`. Kernels are those for contiguous inputs of the device and dtype of the module's
    parameters (of the model's first parameter where it has none), outside torch.compile. Works on models that are
    converted, partly or not at all.
    """
    if isinstance(model, Optimizer):
        return Report([ModuleRow(OPTIMIZER, *swap.explain(model))])
    found = [site for site in sites(model) if not site.module._modules or _is_of_note(site)]
    first = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    return Report([_row(site, first) for site in found])


def _is_of_note(site) -> bool:
    """Whether there is more to say of a module than that it holds others."""
    verdict = None if is_converted(site.module) else examine(site)
    return verdict is None or verdict.room is not None or verdict.why != NO_OP


def _row(site, first) -> ModuleRow:
    module, cls = site.module, type(site.module)
    before = original(cls) or cls
    name, label = site.names[0], f"{before.__module__.split('.')[0]}.{before.__name__}"
    if not is_converted(module):
        verdict = examine(site)
        return ModuleRow(name, label, None, None, verdict.why or "not converted: hfnn.convert would swap it")
    weight = next((p for p in module._parameters.values() if p is not None), first)
    op = op_of(cls)
    kernel, why = (None, "") if op is None else _kernel(module, op, weight)
    if getattr(module, "_hfnn_lapsed", None):
        return ModuleRow(name, label, None, None, f"runs its own forward: {module._hfnn_lapsed} after hfnn.convert")
    if hasattr(module, "_hfnn_when"):
        why = module._hfnn_when
    return ModuleRow(name, label, title(cls), kernel, why)


def _kernel(module, op, weight) -> tuple[str, str]:
    """(the kernel, from which size of input on)."""
    if op is linear.OP:
        if is_fsdp(module):  # fully_shard hands it a view of its input, which has no recipe
            return "torch", "keeps its input: wrap the block around it instead of the module itself"
        return "torch", "keeps a recipe of its input where there is one"
    if not op.kernels:
        return "torch", "keeps less than torch's module"
    # A norm's weight is a row of its input; what works along another length says so.
    device, cols = weight.device.type, getattr(module, "_hfnn_cols", weight.numel() if module._parameters else 0)
    kernel = next((k for k in op.kernels if not k.refusals(device, weight.dtype, cols, weight.dtype)), None)
    if kernel is None:
        return "torch", f"no kernel here for {weight.dtype} on {device}"
    floor = op.floors[module.prefer][weight.is_cuda]
    return kernel.name, f"from {floor} elements on" if floor else ""
