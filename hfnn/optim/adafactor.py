"""Adafactor in a fixed number of launches: Shazeer & Stern, arXiv:1804.04235, as in torch.optim.Adafactor.

A parameter of two dimensions or more keeps averages of g^2 over the columns (`row_var`) and over the rows (`col_var`)
of the matrices of its last two dimensions; another keeps its average of g^2 (`variance`). At step t, with b = t^decay:

    row_var += b (mean over columns of g^2 - row_var);   col_var += b (mean over rows of g^2 - col_var)
    V = row_var col_var / max(mean of row_var over rows, eps1);   u = g / sqrt(max(V, eps1^2))
    p = (1 - lr wd) p - max(eps2, RMS(p)) min(lr, 1 / sqrt(t)) / max(1, RMS(u) / d) u

No memory of a parameter's size is allocated. Only sums over tiles of 128 x 128 are, one number per 64 elements, for the
duration of a step. Nothing waits for the device.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from hfnn.core.kernel import FLOATS, Kernel
from hfnn.optim import formats
from hfnn.optim.fused import Fused
from hfnn.optim.reference import MAXIMIZE
from hfnn.optim.table import Entry, Table, local

SIDE, SMALL = 128, 64  # as in csrc/adafactor.h
TILE = SIDE * SIDE
WIDEST = 1 << 27  # positions in some rows of a matrix have 32 bits

KERNELS = (
    Kernel("triton", "hfnn.kernels.adafactor", "cuda"),
    Kernel("cpp", "hfnn._C:cpu.adafactor", "cpu", (*FLOATS, torch.float64)),
)


class Layout:
    """How the rows of a table are distributed; csrc/adafactor.h defines the terms.

    shapes: (N, 5) int64; tile_row (T,), block_row (K,): int32; work: the number of temporary numbers; small: whether
    there are small matrices.
    """

    def __init__(self, table: Table):
        shapes, tiles, blocks, self.work = [], [0], [0], 0
        for entry in table.entries:
            p, numel = entry.param, entry.param.numel()
            rows, cols = p.shape[-2:] if p.dim() > 1 and numel else (0, 0)
            matrices = numel // (rows * cols) if rows else 0
            bands, across = -(-rows // SIDE), -(-cols // SIDE)
            shapes.append([rows, cols, tiles[-1], blocks[-1], self.work])
            self.work += matrices * bands
            if rows * cols > SMALL:
                tiles.append(tiles[-1] + matrices * bands * across)
                blocks.append(blocks[-1] + matrices * bands - (-matrices * cols // SIDE))
                self.work += matrices * (across * rows + bands * cols)
            else:
                tiles.append(tiles[-1] - (-numel // TILE))
                blocks.append(blocks[-1] - (-matrices // SIDE))
        self.small = any(0 < rows * cols <= SMALL for rows, cols, *_ in shapes)
        device, numbers = table.rows.device, torch.arange(len(shapes), dtype=torch.int32, device="cpu")
        self.shapes = torch.tensor(shapes, dtype=torch.int64, device="cpu").to(device, non_blocking=True)
        self.tile_row, self.block_row = (
            numbers.repeat_interleave(torch.tensor(ends, device="cpu").diff()).to(device, non_blocking=True)
            for ends in (tiles, blocks)
        )


class Adafactor(Fused, torch.optim.Adafactor):
    """`torch.optim.Adafactor`, without memory of a parameter's size.

    If a parameter is a DTensor or not contiguous, torch's own step runs, and `report()` gives the reason. With options
    of `Fused` a ValueError is raised, because rows and columns would not be whole. (torch 2.13 cannot take the norms of
    sharded matrices: its RuntimeError is raised.)

    Args:
        args: As in torch.
        state_dtype: Of the states: torch.float32, torch.bfloat16, or None: the parameter's dtype.
        master: "remainder" keeps 16 more bits of bfloat16 parameters, so updates are those of float32; or None.
        stochastic_rounding: Whether 16-bit parameters are rounded at random, by torch's generator.
        max_grad_norm: Gradients are clipped to this norm within the step; `.grad` does not change. None: no clipping.
        ema_decay: Of a float32 average of each parameter, in `state[p]["ema"]`; None: no average.
        kwargs: As in torch.

    Raises:
        ValueError: An option has no such value; or has one, while a parameter is a DTensor or not contiguous.
    """

    kernels = KERNELS
    rule = 4
    signs = {"row_var": False, "col_var": False, "variance": False}

    def configure(self, **options: Any) -> None:
        if options.get("state_dtype") in formats.LOW:
            raise ValueError(
                f"state_dtype={options['state_dtype']!r}: Adafactor keeps a number for each row and column, in which "
                "low bits save nothing; choose None, torch.float32 or torch.bfloat16"
            )
        super().configure(**options)

    def _names(self, group):
        return ()  # they depend on the parameter: see _entry

    def _numbers(self, group):
        eps1, eps2 = group["eps"]
        if eps1 is None:
            # As in torch: from the first parameter that has a gradient, for the whole group.
            first = next((p for p in group["params"] if p.grad is not None), None)
            eps1 = 0.0 if first is None else torch.finfo(first.dtype).eps
        options = MAXIMIZE * group["maximize"]
        return [group["lr"], group["beta2_decay"], eps1, eps2, group["weight_decay"], options, group["d"], 0.0]

    def _entry(self, p: Tensor, number: int) -> Entry:
        entry, state = super()._entry(p, number), self.state[p]
        names = ("row_var", "col_var") if p.dim() > 1 else ("variance",)
        format = self._format(p, [state[name] for name in names if state.get(name) is not None])
        for name in names:
            self._keep(p, state, name, format)
        return dataclasses.replace(entry, format=format, states=tuple(state[name] for name in names))

    def _keep(self, p: Tensor, state: dict, name: str, format) -> None:
        shape = list(p.shape)
        if name != "variance":
            shape[-1 if name == "row_var" else -2] = 1
        if state.get(name) is None:
            state[name] = p.new_zeros(shape, dtype=format)
        elif list(state[name].shape) != shape:
            raise RuntimeError(f"The size of {name} {tuple(state[name].shape)} must match {tuple(shape)}")
        else:
            state[name] = state[name].to(format).contiguous()

    def _refusal(self, pairs: list[tuple[Tensor, Tensor]]) -> str | None:
        for p, _ in pairs:
            if local(p) is not p:
                return f"a parameter of shape {tuple(p.shape)}: kernels take whole matrices, got a DTensor"
            if not p.is_contiguous():
                return f"a parameter of shape {tuple(p.shape)}: kernels take contiguous ones, got strides {p.stride()}"
            if p.dim() > 1 and max(p.shape[-2:]) > WIDEST:
                return f"a parameter of shape {tuple(p.shape)}: kernels take at most {WIDEST} rows and columns"
        return super()._refusal(pairs)

    def _reference_step(self, pairs: list) -> None:
        reason = self._plans[None].refusal if None in self._plans else "no kernel takes these parameters"
        raise ValueError(f"Adafactor with options that torch's own step does not know: {reason}")

    def _launch(self, table: Table, squares: Tensor | None) -> None:
        layout = table.__dict__.get("layout")
        if layout is None:
            layout = table.layout = Layout(table)
        kernel, rows, shapes, tiles = table.kernel, table.rows, layout.shapes, layout.tile_row
        wide, device = torch.float64, rows.device
        work = torch.empty(layout.work, dtype=torch.float32 if rows.is_cuda else wide, device=device)
        partials = torch.empty(len(tiles), 2, dtype=wide, device=device)
        scales = torch.empty(len(rows), dtype=wide, device=device)
        given, queue = (table.settings.hyper, table.settings.control), kernel.queue(rows)
        features = table.features
        small = {"small": layout.small} if kernel.name == "triton" else {}
        kernel.sums(rows, shapes, tiles, *given, squares, work, queue, **features)
        kernel.factors(rows, shapes, layout.block_row, *given, squares, work, queue, **features)
        kernel.norms(rows, shapes, tiles, *given, squares, work, partials, queue, **features, **small)
        kernel.scale(rows, shapes, *given, squares, partials, scales, queue)
        keep = self._keeping(rows, TILE // 8 * len(tiles))
        kernel.update(rows, shapes, tiles, *given, work, scales, *keep, queue, **features, **small)
