"""The tables of a step, in the format of `csrc/optim.h`: made when an address, layout or option changes, then kept.

A `StepPlan` has everything that one call of `step` needs. It is checked against the present tensors in one pass
(`look.py`). It has one `Table`, with the rows, for each device and sharding. `Settings`, one per device, hold values
that change without a change of the table: the numbers of the groups, and the results of a GradScaler.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from hfnn.core.context import capturing
from hfnn.optim.look import local, look

TILE = 4096
PARAM, GRAD, STATE, SCALE, REMAINDER, EMA, STEP, NUMEL, FIRST_TILE, CODES, GROUP, FLAGS, COLUMNS = (
    0, 1, 2, 5, 8, 9, 10, 11, 12, 13, 14, 15, 16,
)  # fmt: skip
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3, "8bit": 4, "4bit": 5}
HYPER, FIRST = 8, 1
FOUND_INF, GRAD_SCALE, MAX_NORM, NORM, CONTROL = range(5)


@dataclass
class Entry:
    """A parameter in a table, with its states; all are local tensors with the same element order."""

    param: Tensor
    group: int
    format: object  # of the states: a dtype, "8bit" or "4bit"
    states: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]
    step: Tensor | None = None
    remainder: Tensor | None = None
    ema: Tensor | None = None
    first: bool = False  # whether its states have never been written

    def row(self, grad: Tensor, first_tile: int) -> list[int]:
        """The row; the top of this file names its columns."""
        absent = [0, 0, 0]
        codes = FORMATS[self.param.dtype] | FORMATS[grad.dtype] << 4 | FORMATS[self.format] << 8
        return [
            self.param.data_ptr(),
            grad.data_ptr(),
            *([x.data_ptr() for x in self.states] + absent)[:3],
            *([x.data_ptr() for x in self.scales] + absent)[:3],
            *(0 if x is None else x.data_ptr() for x in (self.remainder, self.ema, self.step)),
            self.param.numel(),
            first_tile,
            codes,
            self.group,
            FIRST * self.first,
        ]


def order(x: Tensor) -> tuple:
    """The memory order of x's elements without gaps, for comparison with tensors of its shape."""
    return () if x.is_contiguous() else _steps(torch.empty_like(x, device="meta"))


def dense(x: Tensor) -> bool:
    """Whether the elements of x are in memory without gaps and overlaps."""
    return x.is_contiguous() or _steps(x) == order(x)


def _steps(x: Tensor) -> tuple:
    return tuple(stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1)


def like(x: Tensor, wanted: Tensor) -> Tensor:
    """x, copied if it is not dense in the memory order of `wanted`."""
    if x.is_contiguous() and wanted.is_contiguous():
        return x
    if order(x) == order(wanted) and dense(x):
        return x
    return torch.empty_like(wanted, dtype=x.dtype).copy_(x)


def flat(x: Tensor) -> Tensor:
    """The elements of a dense tensor in memory order."""
    return x.as_strided((x.numel(),), (1,))


class _Spare:
    """Pinned memory that a graph copies to the device at every replay, so no piece is reused."""

    def __init__(self):
        self.free, self.taken = torch.empty(0, dtype=torch.uint8), []

    def reserve(self, size: int) -> None:
        if self.free.numel() < size:
            self.free = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def take(self, values: Tensor) -> Tensor:
        size = values.nbytes
        self.reserve(size)
        taken, self.free = self.free[:size], self.free[-(-size // 8) * 8 :]
        taken = taken.view(values.dtype).view(values.shape)
        self.taken.append(taken)
        return taken.copy_(values)


_spare = _Spare()


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Host values copied to the device; the host does not wait."""
    return (_spare.take(values) if capturing() else values).to(device, non_blocking=True)


class Settings:
    """The numbers of the groups and of this step, on one device.

    They are compared on the host and copied if they changed. Tensors on the device are copied there on the device at
    every step.
    """

    def __init__(self, device: torch.device, groups: int):
        self.device = device
        self.hyper = torch.zeros(groups, HYPER, dtype=torch.float64, device=device)
        self.control = upload(torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float32, device="cpu"), device)
        self.entries = self.control.unbind()
        self._known: list | None = None
        self._max_norm, self._scaled = 0.0, False

    def set(self, numbers: list[list], max_norm: float | None, grad_scale: Tensor | None, found_inf: Tensor | None):
        """numbers: the row of `hyper` of each group, of floats and one-element tensors."""
        tensors = [(g, c) for g, row in enumerate(numbers) for c, x in enumerate(row) if isinstance(x, Tensor)]
        if tensors:
            late = {(g, c): numbers[g][c] for g, c in tensors if not numbers[g][c].is_cpu}
            numbers = [
                [0.0 if (g, c) in late else float(x) for c, x in enumerate(row)] for g, row in enumerate(numbers)
            ]
        if numbers != self._known:
            self.hyper.copy_(upload(torch.tensor(numbers, dtype=torch.float64, device="cpu"), self.device))
            self._known = [list(row) for row in numbers]
        for place in tensors:
            if place in late:
                self.hyper[place].copy_(late[place].squeeze())
        if max_norm is not None and max_norm != self._max_norm:
            self.entries[MAX_NORM].fill_(max_norm)
            self._max_norm = max_norm
        if found_inf is not None or grad_scale is not None or self._scaled:
            self._scaled = found_inf is not None or grad_scale is not None
            for place, value, default in ((FOUND_INF, found_inf, 0.0), (GRAD_SCALE, grad_scale, 1.0)):
                self.entries[place].fill_(default) if value is None else self.entries[place].copy_(value.squeeze())


class Table:
    """The rows of one launch: parameters of one device whose gradients have the same sharding (`shards`)."""

    def __init__(self, entries: list[Entry], grads: list[Tensor], kernel, settings: Settings, norm: bool, shards):
        # Dropped after the first launch: states that the user replaces must be freed.
        self.entries, self.kernel, self.settings, self.shards = entries, kernel, settings, shards
        self.kinds = Counter((entry.param.dtype, entry.format) for entry in entries)
        device = settings.device
        tiles = [-(-entry.param.numel() // TILE) for entry in entries]
        first, rows = 0, []
        for entry, grad, n in zip(entries, grads, tiles, strict=True):
            rows.append(entry.row(grad, first))
            first += n
        self.tiles = first
        self.first = any(entry.first for entry in entries)  # whether a row's states have never been written
        self._host = torch.tensor(rows, dtype=torch.int64, device="cpu")
        self.rows = upload(self._host, device)
        numbers = torch.arange(len(entries), dtype=torch.int32, device="cpu")
        self.owner = upload(numbers.repeat_interleave(torch.tensor(tiles, device="cpu")), device)
        self.squares = None
        if norm:
            self.squares = torch.zeros(max(1, kernel.partials(first)), dtype=torch.float64, device=device)
        self.features = self._features() if kernel.name == "triton" else {}  # arguments of each launch

    def _features(self) -> dict:
        """The features that occur in this table, for kernels specialised on them."""
        from hfnn.kernels.optim import Features  # imported here, because it needs triton

        there = [bool((self._host[:, column] != 0).any()) for column in (STATE + 2, REMAINDER, EMA)]
        return {"features": Features(tuple(self._host[:, CODES].unique().tolist()), *there)}

    def reserve(self) -> None:
        """Reserve memory for making this table again while a graph is recorded."""
        if self.rows.is_cuda:
            numbers = (self.rows, self.owner, self.settings.hyper, self.settings.control)
            _spare.reserve(2 * sum(x.nbytes for x in numbers) + 64 * len(numbers))

    def prepare(self) -> None:
        """Count the step; if gradients are clipped, add up their squares."""
        self.kernel.prepare(self.rows, self.owner, self.settings.control, self.squares, self.kernel.queue(self.rows))

    def move(self, addresses: Tensor) -> None:
        """Update the addresses of the gradients; nothing else about them has changed."""
        self._set(GRAD, addresses)

    def written(self) -> None:
        """The states have been written: no row is at its first step any longer."""
        self.first = False
        self._set(FLAGS, torch.zeros(len(self.rows), dtype=torch.int64, device="cpu"))

    def _set(self, column: int, values: Tensor) -> None:
        self._host[:, column] = values
        if self.rows is not self._host:
            self.rows[:, column].copy_(upload(values, self.rows.device))


class StepPlan:
    """The tables of one call of `step`, and the addresses and layouts for which they were made.

    `refusal` tells why no kernel accepts them; `which` are the indices of the parameters with a gradient; `places` are,
    for each table, the ones among those that it has. Parameters and states are not kept, so that those that the user
    replaces are freed.
    """

    def __init__(self, options: tuple, which: list[int], refusal: str | None):
        self.options, self.which, self.refusal = options, which, refusal
        self.tables: list[Table] = []
        self.places: list[Tensor] = []
        self.copied: list[Tensor] = []  # gradients of a step that are copies, to which rows point
        self.written: list[Tensor] = []  # states that this step writes to
        self._copies = self._sharded = False
        self._chosen = b""

    def add(self, table: Table, places: list[int]) -> None:
        self.tables.append(table)
        self.places.append(torch.tensor([self.which[i] for i in places], device="cpu"))
        if not capturing():
            table.reserve()

    def remember(self, params: list[Tensor], grads: list[Tensor], fitted: list[Tensor], states: list, written: list):
        """Record the addresses and layouts of all tensors; rows point to gradients `fitted` and states `written`."""
        self._sharded = any(local(p) is not p for p in params)
        self.copied = [x for g, x in zip(grads, fitted, strict=True) if x is not local(g)]
        self._copies = bool(self.copied)
        mine = set(map(id, written))
        self._chosen = bytes([id(state) in mine for state in states])
        self._seen = self._look(params, states)
        if self._seen is None:
            # Except steps: those made together are in one tensor and share one version.
            self.written = [
                x for state in written for name, x in state.items() if name != "step" and isinstance(x, Tensor)
            ]

    def _look(self, params: list[Tensor], states: list) -> tuple | None:
        """The result of `look` for local parts, less the written states, which it sets; None also if a gradient is
        distributed differently from its parameter."""
        grads = None
        if self._sharded:
            grads = [p.grad for p in params]  # read once: slow for a DTensor
            if any(map(_elsewhere, grads, params)):
                return None
            params, grads = ([getattr(x, "_local_tensor", x) for x in found] for found in (params, grads))
        seen = look(params, grads, states, self._chosen)
        if seen is None:
            return None
        *seen, self.written = seen
        return seen

    def holds(self, params: list[Tensor], options: tuple, states: list) -> bool:
        """Whether this plan is still valid for these parameters, their gradients and states.

        The rows of moved gradients are updated.
        """
        if self.refusal is not None or self._copies or options != self.options or len(states) != len(self._chosen):
            return False
        seen = self._look(params, states)
        if seen is None or self._seen is None:
            return False
        (at, grads_at, layouts), (known, grads_known, layouts_known) = seen, self._seen
        if at != known or layouts != layouts_known:
            return False
        if grads_at != grads_known:
            addresses = torch.frombuffer(bytearray(grads_at), dtype=torch.int64)
            for table, places in zip(self.tables, self.places, strict=True):
                table.move(addresses[places])
            self._seen = seen
        return True


def _elsewhere(grad: Tensor | None, p: Tensor) -> bool:
    """Whether a gradient is distributed differently from its parameter."""
    spec = getattr(p, "_spec", None)  # of a DTensor; often the same object, which is faster to compare than placements
    return spec is not None and grad is not None and grad._spec is not spec and grad.placements != spec.placements


def fit(grad: Tensor, p: Tensor) -> Tensor:
    """The local gradient of p for a row: itself, or a copy in the memory layout of p."""
    if _elsewhere(grad, p):
        grad = grad.redistribute(placements=p.placements)
    grad, x = local(grad).resolve_neg(), local(p)
    if (x.dtype is torch.float64) != (grad.dtype is torch.float64) or grad.dtype not in FORMATS:
        grad = grad.to(x.dtype)
    return like(grad, x)


def sharding(p: Tensor) -> tuple | None:
    """(mesh, the dimensions of it over which p is sharded), or None for a tensor that is not distributed."""
    if local(p) is p:
        return None
    # A shard of a shard (FSDP over tensor parallelism) is a special placement, for which `is_shard` is False.
    return p.device_mesh, tuple(i for i, placement in enumerate(p.placements) if not placement.is_replicate())


def clashing(addresses: list[int]) -> bool:
    """Whether two tensors with elements have the same address."""
    real = [a for a in addresses if a]
    return len(set(real)) < len(real)
