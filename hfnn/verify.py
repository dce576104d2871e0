"""`verify`: compares a converted model with its original and with float64, on your inputs."""

import copy
import dataclasses
import io
import statistics
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from hfnn import adapters
from hfnn.convert import convert, revert
from hfnn.core import parts
from hfnn.patch import unrouted
from hfnn.patterns.subclass import is_converted
from hfnn.testing import GRADIENTS, OUTPUTS, Error, error

# If torch's own error is half or more, or a tenth in float32 (a gradient that is zero in theory), it is noise and
# cannot serve as a reference.
NOISE = 10.0
# One element may be exact by chance, which differs between processors: its reference error is at least the median of
# the tensors' largest errors, noise excepted. The same holds for all of a tensor of so few elements, above all a loss.
FEW = 64
# A kink (relu, max pooling) turns rounding into an error of any size, in one of the versions only. So a tensor that
# breaks the rule is looked at in further draws, with parameters moved by up to this share and other directions.
DRAWS, MOVED = 5, 2.0**-6
OK, NO, NOT_COMPARABLE = "ok", "NO", "not comparable"


@dataclass(frozen=True)
class ErrorRow:
    """One output or gradient. difference: largest between the two versions; converted, original: their errors against
    the reference; at_most: the allowed multiple of the original's; why: what makes it not comparable, or "".
    """

    name: str
    dtype: torch.dtype
    difference: float
    converted: Error
    original: Error
    at_most: float
    why: str = ""

    @property
    def verdict(self) -> str:
        """ "ok", "NO" or "not comparable"."""
        if self.why:
            return NOT_COMPARABLE
        return OK if self.converted.within(self.original, self.dtype, self.at_most) else NO

    @property
    def ok(self) -> bool:
        return self.verdict == OK


@dataclass(frozen=True)
class Verification:
    """`ok` if every row keeps the accuracy rule; print it, or read its `rows`, outputs first.

    reference: what both versions are compared with: "float64", or "float32" and the reason.
    """

    rows: list[ErrorRow]
    reference: str = "float64"

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    @property
    def not_comparable(self) -> list[ErrorRow]:
        """Rows about which nothing is known: their numbers are not finite."""
        return [row for row in self.rows if row.verdict == NOT_COMPARABLE]

    def __rich__(self) -> Table:
        wrong, unknown = sum(row.verdict == NO for row in self.rows), len(self.not_comparable)
        counts = [f"{wrong} break the accuracy rule"] * bool(wrong) + [f"{unknown} are not comparable"] * bool(unknown)
        lines = [f"{len(self.rows)} tensors: " + (", ".join(counts) or "all within it")]
        lines += [f"{row.name}: {row.why}" for row in self.not_comparable]
        lines += [f"reference: {self.reference}"] if self.reference != "float64" else []
        columns = "tensor", "dtype", "largest difference", "error", "torch's error", "allowed", ""
        table = Table(*columns, caption="\n".join(lines))
        for row in self.rows:
            dtype, difference = str(row.dtype).removeprefix("torch."), f"{row.difference:.2e}"
            errors = [f"{e.l2:.2e}" for e in (row.converted, row.original)]
            verdict = "" if row.ok else row.verdict
            table.add_row(row.name, dtype, difference, *errors, f"x{row.at_most:g}", verdict)
        return table

    def __str__(self) -> str:
        file = io.StringIO()
        Console(file=file, width=160).print(self)
        return file.getvalue()


def verify(model: nn.Module, *inputs: Any, **kwargs: Any) -> Verification:
    """Run the model converted and with its original classes, and compare outputs and gradients.

    Both are compared with a float64 copy: the relative error is at most 2 times (outputs) or 3 times (gradients) the
    original's, or half an ulp. Gradients are of a sum of all outputs with fixed random signs, with respect to the
    parameters and to inputs that require grad. A tensor that breaks this is compared again with slightly moved
    parameters and other signs, because a kink (relu) makes rounding an error of any size by chance: it is NO if it
    breaks the rule in every one of five draws. A tensor that is not finite with the original classes is not comparable:
    it is named, and the result is not ok.

    If the model does not run in float64 (it makes float32 tensors itself), or overflows there (a mask value), it is
    compared with a float32 copy, or if it is float32, with its original classes; their error is then estimated by the
    change of their results when the parameters move by a few ulps. `Verification.reference` says so.

    Everything runs on copies without hooks, so the model, its gradients and torch's generators do not change. This
    takes the memory of another model in float64. A model that is not converted is converted for the comparison. Raises
    ValueError if dropout is active, because the two versions draw different masks, and if there is nothing to compare.

    Args:
        model: A module, converted or not.
        inputs: Of its forward.
        kwargs: Of its forward.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
            raise ValueError(f"verify: dropout {name!r} is active (p={module.p}); call model.eval() or set its p to 0")
    first, reference = _compare(model, inputs, kwargs, 0)
    rows = {row.name: row for row in first}
    for draw in range(1, DRAWS):
        if all(row.verdict != NO for row in rows.values()):
            break
        again, _ = _compare(model, inputs, kwargs, draw)
        rows |= {row.name: _better(rows[row.name], row) for row in again if rows.get(row.name, row).verdict == NO}
    return Verification([*rows.values()], reference)


def _better(row: ErrorRow, again: ErrorRow) -> ErrorRow:
    """The draw with the smaller error of the two, with the larger reference: torch's error is by chance, too."""
    if again.why:
        return row
    largest = Error(*(max(getattr(r.original, of) for r in (row, again)) for of in ("l2", "largest")))
    found = [replace(r, original=largest, at_most=max(row.at_most, again.at_most)) for r in (row, again)]
    return min(found, key=lambda r: (not r.ok, r.converted.l2))


def _compare(model, inputs, kwargs, draw: int) -> tuple[list[ErrorRow], str]:
    """The rows of one draw, and their reference."""
    converted = _copy(model)
    if not any(is_converted(module) for module in converted.modules()):
        convert(converted)
    if draw:
        parts.move(converted, MOVED, draw)
    with unrouted():
        ours = _run(converted, inputs, kwargs, draw)
        stock = revert(converted)
        theirs = _run(stock, inputs, kwargs, draw)
        if ours.keys() != theirs.keys():
            raise ValueError(
                f"verify: the two versions return different tensors: {sorted(ours.keys() ^ theirs.keys())}"
            )
        if not any(y.numel() for y in ours.values()):
            raise ValueError("verify: the model returned no floating-point tensor to compare")
        exact, why = _wider(stock, inputs, kwargs, theirs, draw)
        if exact is not None:
            errors = {name: error(theirs[name], exact[name]) for name in ours}
        else:
            exact, errors = theirs, _sensitivity(stock, inputs, kwargs, theirs, draw)
    return _rows(ours, theirs, exact, errors, exact is theirs), why


def _wider(stock, inputs, kwargs, theirs, draw) -> tuple[dict | None, str]:
    """(results of a copy in a wider dtype, or None if it does not run in one; the name of the reference)."""
    narrow = any(t.is_floating_point() and t.element_size() < 4 for t in theirs.values())
    reason = ""
    for dtype in (torch.float64, torch.float32)[: 1 + narrow]:
        name = str(dtype).removeprefix("torch.")
        nests = (_nest_map(lambda x, dtype=dtype: _widened(x, dtype), nest) for nest in (inputs, kwargs))
        try:
            exact = _run(adapters.widened(_copy(stock), dtype), *nests, draw)
        except Exception as failure:
            first_line = str(failure).strip().partition("\n")[0]
            reason = reason or f", because in {name} the model raises {type(failure).__name__}: {first_line}"
            continue
        if {n: t.shape for n, t in exact.items()} != {n: t.shape for n, t in theirs.items()}:
            reason = reason or f", because in {name} the model returns other tensors"
        elif any((~exact[n].isfinite() & t.isfinite()).any() for n, t in theirs.items()):  # a mask value that overflows
            reason = reason or f", because in {name} the model returns numbers that are NaN or infinite"
        else:
            return exact, name + reason
    return None, "float32, its original classes" + reason


def _sensitivity(stock, inputs, kwargs, theirs, draw) -> dict[str, Error]:
    """The largest change of each result over two sets of parameters that are moved by a few ulps."""
    step = max([torch.finfo(t.dtype).eps for t in theirs.values()], default=0.0)
    errors: dict[str, list[Error]] = {name: [Error(0.0, 0.0)] for name in theirs}
    for seed in (1, 2):
        moved = _copy(stock)
        parts.move(moved, 4 * step, seed)
        for name, result in _run(moved, inputs, kwargs, draw).items():
            if name in theirs:
                errors[name].append(error(result, theirs[name]))
    return {name: Error(max(e.l2 for e in es), max(e.largest for e in es)) for name, es in errors.items()}


def _rows(ours, theirs, exact, errors, estimated: bool) -> list[ErrorRow]:
    known = [e for name, e in errors.items() if exact[name].isfinite().all() and not _is_noise(e, ours[name])]
    plain = known or [Error(0.0, 0.0)]
    l2, largest = (statistics.median(getattr(e, of) for e in plain) for of in ("l2", "largest"))
    least = {name: Error(l2 if ours[name].numel() < FEW else 0.0, largest) for name in ours}
    return [_row(n, ours[n], theirs[n], exact[n], errors[n], least[n], estimated) for n in ours]


def _is_noise(error, tensor) -> bool:
    return error.l2 > (0.1 if torch.finfo(tensor.dtype).eps < 1e-5 else 0.5)


def _row(name, ours, theirs, exact, of, least, estimated) -> ErrorRow:
    at_most = GRADIENTS if name.startswith("grad ") else OUTPUTS
    if _is_noise(of, ours):
        at_most = NOISE
    else:
        of = Error(max(of.l2, least.l2), max(of.largest, least.largest))
    # Where the original is its own reference, both versions have an error.
    at_most += estimated
    difference = (ours.double() - theirs.double()).abs().max().item() if ours.numel() else 0.0
    row = ErrorRow(name, ours.dtype, difference, error(ours, exact), of, at_most)
    for of, tensor in (("the reference", exact), ("the original", theirs)):
        if wrong := tensor.numel() - int(tensor.isfinite().sum()):
            return replace(row, why=f"{wrong} of {tensor.numel()} numbers of {of} are NaN or infinite")
    return row


def _run(model, inputs, kwargs, draw: int = 0) -> dict[str, torch.Tensor]:
    """Outputs by path and gradients by name, as real numbers on the CPU. Does not change the model's buffers."""
    inputs, kwargs = _nest_map(_leaf, inputs), _nest_map(_leaf, kwargs)
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    held = [(module, dict(module._buffers)) for module in model.modules()]
    buffers = [(buffer, parts.copy(buffer)) for buffer in model.buffers()]
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        found = {name: y for name, y in _tensors("output", model(*inputs, **kwargs)) if _is_real(y)}
    leaves = [*_tensors("input", inputs), *_tensors("input", kwargs), *model.named_parameters()]
    leaves = {name: leaf for name, leaf in leaves if leaf.requires_grad}
    outputs, grads = [y for y in found.values() if y.requires_grad], {}
    if outputs and leaves:
        generator = torch.Generator("cpu").manual_seed(draw)
        # Not `grad`, which gradient checkpointing with use_reentrant=True refuses.
        torch.autograd.backward(outputs, [_signs(y, generator) for y in outputs])
        grads = {f"grad {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    for module, before in held:
        module._buffers.update(before)
    for buffer, before in buffers:
        if not parts.equal(buffer, before):
            parts.write(buffer, before)
    for p in model.parameters():
        p.grad = None
    return {name: parts.numbers(tensor) for name, tensor in {**found, **grads}.items()}


def _is_real(y) -> bool:
    return y.is_floating_point() or y.is_complex()


def _signs(y, generator):
    """Random 1 and -1: a direction for gradients that is the same in every dtype."""
    return torch.randint(0, 2, y.shape, generator=generator, device="cpu").mul(2).sub(1).to(y.device, y.dtype)


def _copy(model):
    """A deep copy without hooks, because hooks are foreign code and may hold large parts of a program."""
    names = [name for name, value in vars(nn.Module()).items() if "_hooks" in name and isinstance(value, dict)]
    memo = {id(vars(module).get(name)): OrderedDict() for module in model.modules() for name in names}
    for t in (*model.parameters(), *model.buffers()):
        if t.layout is not torch.strided or t.is_quantized:  # deepcopy fails for some of these, and warns
            values = parts.copy(t)
            memo[id(t)] = nn.Parameter(values, t.requires_grad) if isinstance(t, nn.Parameter) else values
    return adapters.without_hooks(copy.deepcopy(model, memo))


def _leaf(x):
    return x.detach().clone().requires_grad_(x.requires_grad)


def _widened(x, dtype):
    return parts.widened(x.detach(), dtype).requires_grad_(x.requires_grad)


def _nest_map(function, nest):
    if isinstance(nest, torch.Tensor):
        return function(nest)
    if isinstance(nest, dict):
        return {key: _nest_map(function, value) for key, value in nest.items()}
    if type(nest) in (tuple, list):
        return type(nest)(_nest_map(function, value) for value in nest)
    return nest


def _tensors(name, nest):
    """(path, tensor) for every tensor in a nest of dicts, sequences and dataclasses."""
    if isinstance(nest, torch.Tensor):
        yield name, nest
    elif isinstance(nest, dict):
        for key, value in nest.items():
            yield from _tensors(f"{name}.{key}", value)
    elif isinstance(nest, (tuple, list)):
        for i, value in enumerate(nest):
            yield from _tensors(f"{name}.{i}", value)
    elif dataclasses.is_dataclass(nest):
        for field in dataclasses.fields(nest):
            yield from _tensors(f"{name}.{field.name}", getattr(nest, field.name))
