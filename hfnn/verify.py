"""`verify`: compares a converted model with its original and with float64, on your inputs."""

import copy
import dataclasses
import io
import statistics
from collections import OrderedDict
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from hfnn import adapters
from hfnn.convert import convert, revert
from hfnn.patch import unrouted
from hfnn.patterns.subclass import is_converted
from hfnn.testing import GRADIENTS, OUTPUTS, Error, error

# If torch's own error is half or more, or a tenth in float32 (a gradient that is zero in theory), it is noise and
# cannot serve as a reference.
NOISE = 10.0
# One element may be exact by chance, which differs between processors: its reference error is at least the median of
# the tensors' largest errors. The same holds for a tensor of so few elements, above all a loss: its reference is the
# greatest error except noise.
FEW = 64


@dataclass(frozen=True)
class ErrorRow:
    """One output or gradient. difference: largest between the two versions; converted, original: their errors against
    float64 (the original's is the reference); at_most: the allowed multiple of the reference.
    """

    name: str
    dtype: torch.dtype
    difference: float
    converted: Error
    original: Error
    at_most: float

    @property
    def ok(self) -> bool:
        return self.converted.within(self.original, self.dtype, self.at_most)


@dataclass(frozen=True)
class Verification:
    """`ok` if every row keeps the accuracy rule; print it, or read its `rows`, outputs first."""

    rows: list[ErrorRow]

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    def __rich__(self) -> Table:
        wrong = sum(not row.ok for row in self.rows)
        caption = f"{len(self.rows)} tensors: " + (f"{wrong} break the accuracy rule" if wrong else "all within it")
        table = Table("tensor", "dtype", "largest difference", "error", "torch's error", "allowed", "", caption=caption)
        for row in self.rows:
            errors = (f"{e.l2:.2e}" for e in (row.converted, row.original))
            dtype = str(row.dtype).removeprefix("torch.")
            table.add_row(
                row.name, dtype, f"{row.difference:.2e}", *errors, f"x{row.at_most:g}", "" if row.ok else "NO"
            )
        return table

    def __str__(self) -> str:
        file = io.StringIO()
        Console(file=file, width=160).print(self)
        return file.getvalue()


def verify(model: nn.Module, *inputs, **kwargs) -> Verification:
    """Run the model converted and with its original classes, and compare outputs and gradients.

    Both are compared with a float64 copy: the relative error is at most 2 times (outputs) or 3 times (gradients) the
    original's, or half an ulp. Gradients are of a sum of all floating outputs with fixed random signs, with respect to
    the parameters and to inputs that require grad. Everything runs on copies without hooks, so the model, its gradients
    and torch's generators do not change. This takes the memory of another model in float64. A model that is not
    converted is converted for the comparison. Raises ValueError if dropout is active, because the two versions draw
    different masks.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
            raise ValueError(f"verify: dropout {name!r} is active (p={module.p}); call model.eval() or set its p to 0")
    converted = _copy(model)
    if not any(is_converted(module) for module in converted.modules()):
        convert(converted)
    with unrouted():
        ours = _run(converted, inputs, kwargs)
        theirs = _run(revert(converted), inputs, kwargs)
        exact = _run(adapters.double(converted), *(_nest_map(_double, nest) for nest in (inputs, kwargs)))
    if not ours:
        raise ValueError("verify: the model returned no floating-point tensor to compare")
    if not ours.keys() == theirs.keys() == exact.keys():
        raise ValueError(f"verify: the two versions return different tensors: {sorted(ours.keys() ^ theirs.keys())}")
    errors = {name: error(theirs[name], exact[name]) for name in ours}
    plain = [e for name, e in errors.items() if not _is_noise(e, ours[name])] or [Error(0.0, 0.0)]
    usual = Error(0.0, statistics.median(e.largest for e in plain))
    worst = Error(max(e.l2 for e in plain), max(e.largest for e in plain))
    least = {name: worst if ours[name].numel() < FEW else usual for name in ours}
    return Verification([_row(n, ours[n], theirs[n], exact[n], errors[n], least[n]) for n in ours])


def _is_noise(error, tensor) -> bool:
    return error.l2 > (0.1 if torch.finfo(tensor.dtype).eps < 1e-5 else 0.5)


def _row(name, ours, theirs, exact, of, least) -> ErrorRow:
    at_most = GRADIENTS if name.startswith("grad ") else OUTPUTS
    if _is_noise(of, ours):
        at_most = NOISE
    else:
        of = Error(max(of.l2, least.l2), max(of.largest, least.largest))
    difference = (ours.double() - theirs.double()).abs().max().item() if ours.numel() else 0.0
    return ErrorRow(name, ours.dtype, difference, error(ours, exact), of, at_most)


def _run(model, inputs, kwargs) -> dict[str, torch.Tensor]:
    """Outputs by path and gradients by name, on the CPU. Does not change the model's buffers."""
    inputs, kwargs = _nest_map(_leaf, inputs), _nest_map(_leaf, kwargs)
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        found = {name: y for name, y in _tensors("output", model(*inputs, **kwargs)) if y.is_floating_point()}
    leaves = [*_tensors("input", inputs), *_tensors("input", kwargs), *model.named_parameters()]
    leaves = {name: leaf for name, leaf in leaves if leaf.requires_grad}
    outputs, grads = [y for y in found.values() if y.requires_grad], ()
    if outputs and leaves:
        generator = torch.Generator("cpu").manual_seed(0)
        grads = torch.autograd.grad(
            outputs, list(leaves.values()), [_signs(y, generator) for y in outputs], allow_unused=True
        )
    for buffer, before in buffers:
        buffer.copy_(before)
    found |= {f"grad {name}": g for name, g in zip(leaves, grads, strict=False) if g is not None}
    return {name: tensor.detach().cpu() for name, tensor in found.items()}


def _signs(y, generator):
    """Random 1 and -1: a direction for gradients that is the same in every dtype."""
    return torch.randint(0, 2, y.shape, generator=generator, device="cpu").mul(2).sub(1).to(y.device, y.dtype)


def _copy(model):
    """A deep copy without hooks, because hooks are foreign code and may hold large parts of a program."""
    names = [name for name, value in vars(nn.Module()).items() if "_hooks" in name and isinstance(value, dict)]
    memo = {id(vars(module).get(name)): OrderedDict() for module in model.modules() for name in names}
    return adapters.without_hooks(copy.deepcopy(model, memo))


def _leaf(x):
    return x.detach().clone().requires_grad_(x.requires_grad)


def _double(x):
    return x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x


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
