"""`report`: how much each module and op keeps between forward and backward, with original classes and converted."""

import contextlib
import functools
import io
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group
from rich.table import Table
from torch import nn

from hfnn.capture import captured
from hfnn.convert import convert, revert
from hfnn.core import parts
from hfnn.core.holder import added, holder_of
from hfnn.core.kernel import PREFERENCES
from hfnn.core.node import counter
from hfnn.core.options import one_of
from hfnn.memory.saved import FROM_PYTHON, Record, SavedTensor, nodes, packed, set_aside, unpack
from hfnn.patterns.subclass import is_converted

CASTS = "casts of weights"
GRAPHS = "graphs"
ASIDE = ", set aside"  # suffix of the op's name: held as an attribute of the node, not as a saved tensor
VERSIONS = ("eager", "converted")
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
# The number of layers of a bar in a picture; the smallest are combined into one.
LAYERS = 12


@dataclass(frozen=True)
class MemoryRow:
    """Bytes that one op keeps in similar modules, with the original classes (eager) and converted.

    module: the name, with * for numbers in it; modules: how many have this name; op: the name of the autograd node.
    """

    module: str
    modules: int
    op: str
    eager: int
    converted: int


@dataclass(frozen=True)
class MemoryReport:
    """What is kept between forward and backward, by module and op: print it, read its `rows`, or `plot` it.

    Each storage is counted once, for the module that saved it first: the innermost module running at that time. Rows
    are in the order of the model.
    """

    rows: list[MemoryRow]

    @property
    def eager(self) -> int:
        return sum(row.eager for row in self.rows)

    @property
    def converted(self) -> int:
        return sum(row.converted for row in self.rows)

    @property
    def by_module(self) -> dict[str, tuple[int, int]]:
        """(eager, converted) bytes by the folded name of a module, in the order of the model."""
        return self._sums("module")

    @property
    def by_op(self) -> dict[str, tuple[int, int]]:
        """(eager, converted) bytes by op."""
        return self._sums("op")

    def _sums(self, by: str) -> dict[str, tuple[int, int]]:
        sums: dict[str, tuple[int, int]] = {}
        for row in self.rows:
            eager, converted = sums.get(getattr(row, by), (0, 0))
            sums[getattr(row, by)] = eager + row.eager, converted + row.converted
        return sums

    def __rich__(self) -> Group:
        how_many = {row.module: f"{row.module}  x{row.modules}" if row.modules > 1 else row.module for row in self.rows}
        modules = {how_many[name]: both for name, both in self.by_module.items()}
        return Group(self._table("module", modules), self._table("op", self.by_op))

    def _table(self, title: str, sums: dict[str, tuple[int, int]]) -> Table:
        """The largest first; the last line is the total."""
        power = max(min((max(self.eager, self.converted, 1).bit_length() - 1) // 10, len(UNITS) - 1), 0)
        table = Table(title, *(f"{version}, {UNITS[power]}" for version in VERSIONS), "converted / eager")
        for column in table.columns[1:]:
            column.justify = "right"
        for name, both in sorted(sums.items(), key=lambda item: -max(item[1])):
            table.add_row(name, *(_number(n, power) for n in both), _ratio(*both))
        table.add_section()
        both = self.eager, self.converted
        table.add_row("all", *(_number(n, power) for n in both), _ratio(*both))
        return table

    def __str__(self) -> str:
        file = io.StringIO()
        Console(file=file, width=160).print(self)
        return file.getvalue()

    def plot(self, path: str | Path, by: str = "module") -> None:
        """Draws two bars, eager and converted, in layers by "module" or "op"; path's suffix gives the picture format.

        Needs matplotlib. Raises ValueError for another `by`.
        """
        if by not in ("module", "op"):
            raise ValueError(f'by={by!r}: choose "module" or "op"')
        from matplotlib.figure import Figure  # not pyplot: the caller's figures and backend do not change

        colours = [f"C{i}" for i in range(10) if i != 7] + ["gold", "navy", "0.7"]
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes, below = figure.subplots(), [0.0, 0.0]
        for (name, both), colour in zip(_largest(self._sums(by)).items(), colours, strict=False):
            heights = [n / 2**20 for n in both]
            axes.bar(VERSIONS, heights, 0.6, below, label=name, color=colour, edgecolor="white", linewidth=0.5)
            below = [b + h for b, h in zip(below, heights, strict=True)]
        for version, height in zip(VERSIONS, below, strict=True):
            axes.text(version, height, f"{height:,.4g}", ha="center", va="bottom")
        axes.set(ylabel="MiB kept between forward and backward")
        axes.spines[["top", "right"]].set_visible(False)
        # In the order of the layers, the lowest last.
        figure.legend(*(part[::-1] for part in axes.get_legend_handles_labels()), loc="outside right upper")
        figure.savefig(path, dpi=150)


def _largest(sums: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """The largest, in their order, and the rest combined, if there are too many for a picture."""
    if len(sums) <= LAYERS:
        return sums
    chosen = sorted(sums, key=lambda name: -max(sums[name]))[: LAYERS - 1]
    rest = [both for name, both in sums.items() if name not in chosen]
    others = {f"{len(rest)} others": (sum(eager for eager, _ in rest), sum(converted for _, converted in rest))}
    return {name: both for name, both in sums.items() if name in chosen} | others


def _number(nbytes: int, power: int) -> str:
    if not nbytes:
        return "-"
    return f"{nbytes / 1024**power:,.2f}" if power else f"{nbytes:,}"


def _ratio(eager: int, converted: int) -> str:
    return f"{converted / eager:.2f}" if eager else ""


def report(model: nn.Module, *inputs: Any, prefer: str = "auto", **kwargs: Any) -> MemoryReport:
    """Run the model forward twice, with its original classes and converted, and report what each keeps for backward.

    The forward is `model(*inputs, **kwargs)`, in the caller's autocast state and in the model's own mode. Call
    `model.train()` before, because the question is about training. A model that is not converted is converted for the
    second run, with `prefer`. Afterwards classes, parameters and their gradients, buffers, and torch's generators are
    as before. No backward runs; the memory of one forward is needed.

    Unique storages are counted. Parameters, buffers and tensors that share their memory are not counted. Casts of
    parameters by autocast are counted, as an op "casts of weights". So are tensors that a node holds as attributes
    ("..., set aside"). "graphs" is the memory of a captured model's graphs, which hold what its calls keep. Under
    gradient checkpointing, the tensors that checkpoints keep are counted. Raises what the forward raises, and
    ValueError for a model whose classes cannot be changed back (see `hfnn.revert`) and for an unknown `prefer`.

    Args:
        model: Converted or not.
        inputs: Of its forward.
        prefer: As in `hfnn.convert`, for a model that is not converted.
        kwargs: Of its forward.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"takes a torch.nn.Module, got {type(model).__name__}")
    one_of("prefer", prefer, PREFERENCES)
    with _left_as_it_was(model):
        if not any(map(is_converted, model.modules())):
            convert(model, prefer=prefer)
        graphs = captured.pool_bytes(model)
        with captured.set_aside(model):
            converted = _forward(model, inputs, kwargs)
        if graphs:
            converted["", GRAPHS] = graphs
        eager = _forward(revert(model), inputs, kwargs)
    return MemoryReport(_rows(model, eager, converted))


def costs(model: nn.Module, inputs: tuple, kwargs: dict) -> dict[str, tuple[float, float, int]]:
    """Each module's part in a forward of the present model: {name: (share of the bytes kept, of the time, how many
    recipes it takes)}.

    Modules inside have separate parts. The forward runs twice and is timed the second time; otherwise as in `report`.
    """
    with _left_as_it_was(model), captured.set_aside(model):
        kept = _forward(model, inputs, kwargs)
        spy = Spy(model, clock=True)
        with _same_randomness(model), torch.enable_grad(), spy.watching():
            spy.timed("", model, inputs, kwargs)
    by_module: dict[str, int] = {}
    for (name, _), size in kept.items():
        by_module[name] = by_module.get(name, 0) + size
    size, seconds = sum(by_module.values()) or 1, sum(spy.seconds.values()) or 1.0
    names = dict.fromkeys((*by_module, *spy.seconds))
    return {
        name: (by_module.get(name, 0) / size, spy.seconds.get(name, 0.0) / seconds, spy.taken.get(name, 0))
        for name in names
    }


# {(name of the module, op): bytes}, in the order in which they came
Found = dict[tuple[str, str], int]


def _rows(model, eager: Found, converted: Found) -> list[MemoryRow]:
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    sums: dict[tuple[str, str], list] = {}
    for name, op in sorted({**eager, **converted}, key=lambda key: order[key[0]]):
        modules, before, after = sums.setdefault((folded_name(name), op), [set(), 0, 0])
        modules.add(name)
        sums[folded_name(name), op][1:] = before + eager.get((name, op), 0), after + converted.get((name, op), 0)
    many: dict[str, set[str]] = {}
    for (folded, _), (modules, *_) in sums.items():
        many.setdefault(folded, set()).update(modules)
    return [MemoryRow(folded, len(many[folded]), op, *both) for (folded, op), (_, *both) in sums.items()]


def folded_name(name: str) -> str:
    return re.sub(r"\b\d+\b", "*", name) or "(model)"


def _forward(model, inputs, kwargs) -> Found:
    """Run the model and count what is kept, by module and op."""
    spy = Spy(model)
    torch.clear_autocast_cache()  # a cast left by the other run would be counted for no module here
    hooks = torch.autograd.graph.saved_tensors_hooks(spy.pack, unpack)
    with _same_randomness(model), torch.enable_grad(), spy.watching(), hooks:
        result = model(*inputs, **kwargs)
    torch.clear_autocast_cache()
    graph = list(nodes(result))
    ops, modules = {}, {}
    for op, node in graph:
        for kept in packed(node):
            ops.setdefault(kept, op)
            modules.setdefault(node, kept.module)
    found: Found = {}
    seen = {key for t in (*model.parameters(), *model.buffers()) for key in parts.storages(t)}
    for kept in spy.record.alive(reached=ops):
        if new := kept.storages.keys() - seen:
            seen |= new
            key = kept.module, CASTS if kept.cast else ops.get(kept, FROM_PYTHON)
            found[key] = found.get(key, 0) + sum(kept.storages[storage] for storage in new)
    for op, node in graph:
        key = modules.get(node, ""), op + ASIDE
        for _, size in set_aside(node, seen):
            found[key] = found.get(key, 0) + size
    return found


class Spy:
    """Tracks the running module, and so which module saves a tensor.

    `nn.Module.__call__` is replaced meanwhile, as in torch.fx. Hooks would change behaviour: some code takes another
    path if there are any (hfnn's deferred logits, the fast paths of torch's transformer layers). running: the names of
    the modules whose forwards run, the innermost last.
    """

    def __init__(self, model: nn.Module, clock: bool = False):
        self._names = {module: name for name, module in model.named_modules()}
        self.running = [""]
        self._clock, self._waits = clock, any(p.is_cuda for p in model.parameters())
        self._inner = [(0.0, 0)]  # seconds and recipes of modules inside the running one, by depth
        self.seconds: dict[str, float] = {}  # of each module, without those inside
        self.taken: dict[str, int] = {}
        self.record = Record()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        call = nn.Module.__call__

        def watched(module, *args, **kwargs):
            name = self._names.get(module)
            if name is None:
                return call(module, *args, **kwargs)
            self.running.append(name)
            try:
                return self.timed(name, functools.partial(call, module), args, kwargs)
            finally:
                self.running.pop()

        nn.Module.__call__ = watched
        try:
            yield
        finally:
            nn.Module.__call__ = call

    def timed(self, name: str, call, args, kwargs):
        """call(*args, **kwargs), with its time recorded."""
        if not self._clock:
            return call(*args, **kwargs)
        self._inner.append((0.0, 0))
        start, before = self._now(), counter.taken
        try:
            return call(*args, **kwargs)
        finally:
            spent, taken = self._now() - start, counter.taken - before
            seconds, inside = self._inner.pop()
            self.seconds[name] = self.seconds.get(name, 0.0) + spent - seconds
            self.taken[name] = self.taken.get(name, 0) + taken - inside
            self._inner[-1] = self._inner[-1][0] + spent, self._inner[-1][1] + taken

    def _now(self) -> float:
        if self._waits:
            torch.cuda.synchronize()
        return time.perf_counter()

    def pack(self, tensor: torch.Tensor) -> SavedTensor:
        kept = self.record.pack(tensor)
        kept.module = self.running[-1]
        return kept


# Leaving no trace


def _same_randomness(model) -> contextlib.AbstractContextManager:
    """Restores torch's generators of the CPU and of the model's devices."""
    devices = {t.device for t in (*model.parameters(), *model.buffers()) if t.is_cuda}
    return torch.random.fork_rng(list(devices))


def _put(module) -> set[str]:
    """The names in a module's dict that are hfnn's."""
    own = {"prefer", "exact"} if is_converted(module) else set()
    return {name for name in own | added(module) if name in vars(module)}


@contextlib.contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Restores the classes of modules, their preference, their buffers and the buffers' values."""
    # Restored in the end: the class, and what hfnn has put into a module, in its place: captured models compare it.
    before = [
        (m, type(m), [*vars(m)], {n: vars(m)[n] for n in _put(m)}, holder_of(m), dict(m._buffers))
        for m in model.modules()
    ]
    copies = [(buffer, parts.copy(buffer)) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module, cls, order, attributes, holder, buffers in before:
            object.__setattr__(module, "__class__", cls)
            gone = _put(module) - attributes.keys()
            state = {name: value for name, value in vars(module).items() if name not in gone} | attributes
            vars(module).clear()
            vars(module).update({name: state[name] for name in order if name in state} | state)
            for owner in (holder, vars(module).get("_hfnn_capture")):
                if owner is not None:
                    owner.on = True
            module._buffers.clear()
            module._buffers.update(buffers)
        for buffer, copy in copies:  # not detectable by `_version`, which batch norm does not change
            if not parts.equal(buffer, copy):
                parts.write(buffer, copy)
