"""`plan`: the memory of a training step, in each mode, without running it and without a GPU."""

import functools
import io
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from hfnn.convert import convert
from hfnn.core.options import one_of
from hfnn.planning.allocator import replay
from hfnn.planning.trace import KINDS, Step, trace

BAND = 1.10  # the upper bound of a peak, in peaks
LARGEST = 1 << 24  # samples in a batch
MODULES = 10  # that are printed
UNITS = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def _checkpointed(model: nn.Module) -> None:
    """Each block is computed again in backward."""
    found = list(_blocks(model))
    if not found:
        raise ValueError("no blocks: it has no list of modules of one class")
    for block in found:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def _blocks(module: nn.Module):
    """Modules of one class in an outermost list."""
    for child in module.children():
        parts = [m for m in child.children() if next(m.children(), None)] if isinstance(child, _LISTS) else []
        alike = [m for m in parts if sum(type(m) is type(other) for other in parts) > 1]
        yield from alike or _blocks(child)


_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
MODES: dict[str, Callable[[nn.Module], Any]] = {
    "stock": lambda model: None,
    "converted": convert,
    'prefer="memory"': functools.partial(convert, prefer="memory"),
    'recompute="gemm"': functools.partial(convert, recompute="gemm"),
    "checkpoints": _checkpointed,
}
NOT_MODELLED = "captured and compiled steps; a backward of several steps; what CUDA, cuBLAS and cuDNN allocate"


@dataclass(frozen=True)
class PlanRow:
    """One mode: bytes on the device when most is allocated, from the beginning of a step on, once states exist.

    peak: as `torch.cuda.max_memory_allocated` counts it; weights to temporaries add up to it. upper: the upper end of
    the band: what torch's caching allocator reserves, but at most 1.10 peaks. reserved, segments: of that allocator, if
    it gives nothing back. phase: when the peak is. kept_for_backward: after forward. why: the reason if the mode cannot
    be planned; all else is 0 then. modules: {name of a module: bytes that its forward made and that are kept for
    backward}, with * for numbers in the name. curve: (phase, {kind: bytes}) over the step, in up to 401 parts.
    """

    mode: str
    peak: int = 0
    upper: int = 0
    reserved: int = 0
    segments: int = 0
    phase: str = ""
    weights: int = 0
    states: int = 0
    gradients: int = 0
    inputs: int = 0
    kept: int = 0
    temporaries: int = 0
    kept_for_backward: int = 0
    why: str = ""
    modules: dict[str, int] = field(default_factory=dict, repr=False)
    curve: list[tuple[str, dict[str, int]]] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Plan:
    """The memory of a step in each mode. Print it, or read its `rows`.

    batch: the first dimension that all inputs have in common, or None. of_batch: plans a mode with another one.
    """

    rows: list[PlanRow]
    batch: int | None
    device: str
    of_batch: Callable[[str, int], PlanRow] = field(repr=False)

    def row(self, mode: str) -> PlanRow:
        """Raises ValueError for a mode that is not in the plan."""
        one_of("mode", mode, tuple(row.mode for row in self.rows))
        return next(row for row in self.rows if row.mode == mode)

    def fits(self, memory: str | int, mode: str = "stock") -> bool:
        """Whether the band of a mode ends at or below `memory`: bytes, or a text like "80GiB"."""
        row = self.row(mode)
        return not row.why and row.upper <= size(memory)

    def largest(self, memory: str | int, mode: str = "stock") -> int:
        """The largest batch for which `fits` is true; 0 if one sample is too much. Plans a few batches, up to 2^24.

        Raises ValueError if the inputs have no batch in common, or the mode cannot be planned.
        """
        if self.batch is None:
            raise ValueError("the inputs have no first dimension in common: plan each batch by itself")
        row, limit = self.row(mode), size(memory)
        if row.why:
            raise ValueError(f"{mode}: {row.why}")
        known = {self.batch: row.upper}  # {batch: bytes}, nearly a line
        guess = max(2 * self.batch, 1)
        for turn in itertools.count():
            known[guess] = self.of_batch(mode, guess).upper
            low = max((batch for batch, need in known.items() if need <= limit), default=0)
            high = min((batch for batch, need in known.items() if need > limit), default=LARGEST + 1)
            if high <= low + 1:
                return low
            a, b = sorted(known, key=lambda batch: abs(known[batch] - limit))[:2]
            slope = (known[b] - known[a]) / (b - a)
            bent = slope <= 0 or turn % 3 == 2  # the line through two batches leads no further
            guess = (low + min(high, 3 * low)) // 2 if bent else a + int((limit - known[a]) / slope)
            guess = min(max(guess, low + 1), high - 1)

    def plot(self, path: str | Path) -> None:
        """Draws the bytes of each mode over a step, in layers by kind; path's suffix gives the picture format.

        Needs matplotlib.
        """
        from matplotlib.figure import Figure  # not pyplot: the caller's figures and backend do not change

        rows = [row for row in self.rows if row.curve]
        figure = Figure(figsize=(8, 1 + 2 * len(rows)), layout="constrained")
        panels = figure.subplots(len(rows), sharey=True, squeeze=False)[:, 0]
        for row, axes in zip(rows, panels, strict=True):
            phases, kinds = zip(*row.curve, strict=True)
            axes.stackplot(range(len(kinds)), *([each[k] / 2**30 for each in kinds] for k in KINDS), labels=KINDS)
            begins = {phase: phases.index(phase) for phase in phases}
            axes.set(title=row.mode, ylabel="GiB", xlim=(0, len(kinds) - 1))
            axes.set_xticks(list(begins.values()), list(begins), ha="left")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", reverse=True)
        figure.savefig(path, dpi=150)

    def __rich__(self) -> Group:
        columns = "mode", "peak", "at most", "in", *KINDS, "kept for backward"
        title = f"bytes of a training step on {self.device}" + (f", batch {self.batch}" if self.batch else "")
        table = Table(*columns, title=title, caption=f"not modelled: {NOT_MODELLED}")
        for column in table.columns[1:3] + table.columns[4:]:
            column.justify = "right"
        for row in self.rows:
            numbers = (getattr(row, kind) for kind in (*KINDS, "kept_for_backward"))
            cells = [_text(row.peak), _text(row.upper), row.phase, *map(_text, numbers)]
            table.add_row(row.mode, *([row.why] if row.why else cells))
        return Group(table, self._by_module())

    def _by_module(self) -> Table:
        rows = [row for row in self.rows if not row.why]
        most = {name: max(row.modules.get(name, 0) for row in rows) for row in rows for name in row.modules}
        table = Table("kept for backward by", *(row.mode for row in rows))
        for name in sorted(most, key=lambda name: -most[name])[:MODULES]:
            table.add_row(name, *(_text(row.modules.get(name, 0)) for row in rows))
        return table

    def __str__(self) -> str:
        file = io.StringIO()
        Console(file=file, width=160).print(self)
        return file.getvalue()


def plan(
    model: nn.Module,
    *inputs: Any,
    loss: Callable[..., Tensor] | None = None,
    optimizer: Callable | None = torch.optim.AdamW,
    device: str = "cuda",
    autocast: torch.dtype | None = None,
    modes: tuple[str, ...] = tuple(MODES),
    **kwargs: Any,
) -> Plan:
    """The memory of a training step of a model: as it is, converted, and with checkpoints.

    The step runs on tensors without values, so it takes no memory and no GPU, and the model may be on "meta". What is
    chosen and kept for backward is that of the device. A step is forward, backward and an update, after which the
    gradients are set to None.

    Args:
        model: Any module; it stays as it is. One that is converted already is planned as it is in mode "stock".
        *inputs: What the model, or `loss`, is called with. Tensors' values are not read.
        loss: A function of the model and these inputs that returns a scalar. None: the model's result, or its
            attribute `loss`.
        optimizer: A function of the parameters, such as a class of torch.optim; None: there is none.
        device: "cuda", or "cpu".
        autocast: The dtype of torch.autocast around the loss; None: there is none.
        modes: Some of "stock", "converted", 'prefer="memory"', 'recompute="gemm"' and "checkpoints".
        **kwargs: What the model, or `loss`, is called with besides.

    Raises:
        ValueError: An unknown mode or device, an optimizer in place of a function, no scalar loss, tensors of another
            class or layout than torch's own, or a forward that asks for a tensor's value; the message then has the
            module and the line.

    >>> x = torch.empty(64, 256)
    >>> mlp = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    >>> hfnn.plan(mlp, x, loss=lambda model, x: model(x).sum(), modes=("stock",)).fits("16MiB")
    True
    """
    one_of("device", device, ("cuda", "cpu"))
    for mode in modes:
        one_of("mode", mode, tuple(MODES))
    if isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError("optimizer: give a function of the parameters, such as torch.optim.AdamW, not an optimizer")
    batches = {x.shape[0] for x in tree_leaves((inputs, kwargs)) if isinstance(x, Tensor) and x.dim()}
    batch = batches.pop() if len(batches) == 1 else None

    def of_batch(mode: str, size: int | None) -> PlanRow:
        given = (inputs, kwargs)
        if size != batch:
            given = tree_map_only(Tensor, lambda x: _resized(x, size) if x.dim() else x, given)
        call = lambda model, args, named: (loss or _own_loss)(model, *args, **named)  # noqa: E731
        return _row(mode, trace(model, given, call, optimizer, MODES[mode], device == "cuda", autocast))

    rows = []
    for mode in modes:
        try:
            rows.append(of_batch(mode, batch))
        except ValueError as error:
            if mode == "stock":
                raise
            rows.append(PlanRow(mode, why=str(error)))
    return Plan(rows, batch, device, of_batch)


def _row(mode: str, step: Step) -> PlanRow:
    curve, modules, reserved = step.curve(), step.kept(), replay(step.events)
    phase, kinds = max(curve, key=lambda part: sum(part[1].values()))
    peak = sum(kinds.values())
    upper = min(max(reserved.reserved, peak), int(BAND * peak))
    kept = sum(modules.values())
    return PlanRow(
        mode, peak, upper, reserved.reserved, reserved.segments, phase, **kinds, kept_for_backward=kept,
        modules=modules, curve=curve,
    )  # fmt: skip


def _own_loss(model, *args, **kwargs):
    found = model(*args, **kwargs)
    return found if isinstance(found, Tensor) else getattr(found, "loss", None)


def _resized(x: Tensor, batch: int) -> Tensor:
    """x without values, with another first dimension and its dimensions in the same order."""
    order = sorted(range(x.dim()), key=lambda d: -x.stride(d))
    found = torch.empty_permuted((batch, *x.shape[1:]), order, dtype=x.dtype, device="meta")
    return found.requires_grad_(x.requires_grad)


def size(memory: str | int) -> int:
    """Bytes of 85899345920 or "80GiB". Raises ValueError for other texts."""
    if isinstance(memory, int):
        return memory
    found = re.fullmatch(r"\s*(\d+\.?\d*)\s*([a-z]+)\s*", memory.lower())
    if found is None or found[2] not in UNITS:
        raise ValueError(f'{memory!r} is no size: write bytes, or a text like "80GiB"')
    return int(float(found[1]) * UNITS[found[2]])


def _text(number: int) -> str:
    power = max(min((number.bit_length() - 1) // 10, 4), 0)
    return f"{number / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
