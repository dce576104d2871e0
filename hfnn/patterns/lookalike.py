"""Modules that implement one of our ops themselves: recognised by structure, then proved numerically.

A class named like a norm or an activation may compute anything. Before its modules are swapped, its own `forward` is
run on a clone with random parameters (hfnn/patterns/probe.py) and compared with the op's definition in float64: output
and gradients, float32 and bfloat16, training and eval, with and without grad, rows of very large and very small values
(where eps matters), two values of eps, two to four dimensions. float16 is tried separately: if it differs, float16
calls run the module's own code. A module that fails, raises or changes itself is refused.
"""

import functools
import itertools
from dataclasses import dataclass, replace

import torch
from torch import nn

from hfnn import ops
from hfnn.core.context import autocasting, is_plain, transformed
from hfnn.core.holder import holder_of, stock_of
from hfnn.ops import layer_norm, rms_norm
from hfnn.patterns import probe
from hfnn.patterns.probe import Refusal
from hfnn.patterns.proof import Differs, Match, Proofs, arguments, check

# Tried if no attribute is called eps: values that authors write into the formula itself.
CONSTANTS = (1e-5, 1e-6, 1e-8, 1e-12)
MIN_COLS = 8  # in shorter rows the gradient of a norm is mostly cancellation, which proves nothing
# Names that a class may resemble: a norm, or one of these. The longest comes first: QuickGELU is not GELU.
ACTIVATIONS = {op.name: op for op in sorted(ops.ALL, key=lambda op: -len(op.name)) if op.likes}
LIMITED = "hardswish", "relu_squared"  # activations that limit values
# (dtype of the parameters, of the input), training, factor of eps
CASES = (
    *itertools.product([(torch.float32, torch.float32)], (True, False), (1.0, 3.0)),
    *itertools.product([(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)], (True, False), [1.0]),
)
HALF = tuple(itertools.product([(torch.float16, torch.float16), (torch.float32, torch.float16)], (True, False), [1.0]))


class LookAlike:
    """Mixin for a look-alike: the room if a kernel accepts the call, else the class's own code."""

    prefer = "auto"
    _hfnn_one_input = True  # the op's size limit applies to it

    def forward(self, like, input):
        if not transformed() and is_plain(input):
            out = _out_dtype(self, like, input)
            # Every kernel widens to float32; other mixtures (a float32 input rounded to its weight's dtype) are rare.
            if (out is input.dtype or out is torch.float32) and (like.half or input.dtype is not torch.float16):
                y = like.fused(self, input, out)
                if y is not None:
                    return y
        return stock_of(self).forward(self, input)


@functools.cache
def _op(name: str):
    return next(op for op in ops.ALL if op.name == name)


class _Like(Match):
    @functools.cached_property
    def dtypes(self) -> dict:
        """The dtypes of results, by those of what they are made of."""
        return {}


@dataclass(frozen=True)
class NormLike(_Like):
    """A norm over the last dimension. weight, bias: names of parameters; eps: the name of an attribute, or a number.

    half: whether it equals the op in float16, too.
    """

    room: str
    weight: str | None
    bias: str | None
    eps: str | float
    offset: float = 0.0
    half: bool = True
    mixin = LookAlike

    @property
    def op(self):
        return _op(self.room)

    def __str__(self) -> str:
        return f"hfnn {self.room}" + (f", offset {self.offset:g}" if self.offset else "")

    def numbers(self, module):
        """(weight, bias, eps) of the present module."""
        weight, bias = (None if name is None else getattr(module, name) for name in (self.weight, self.bias))
        return weight, bias, getattr(module, self.eps) if isinstance(self.eps, str) else self.eps

    def fused(self, module, x, out):
        weight, bias, eps = self.numbers(module)
        if self.room == "rms_norm":
            return rms_norm.fused(x, weight, eps, self.offset, out, module.prefer)
        return layer_norm.fused(x, weight, bias, eps, out, module.prefer)

    def exact(self, module, x, eps):
        weight, bias = module._parameters.get(self.weight), module._parameters.get(self.bias)
        if self.room == "rms_norm":
            return rms_norm.reference(x, x.shape[-1:], weight, eps, self.offset)
        return layer_norm.reference(x, x.shape[-1:], weight, bias, eps)


@dataclass(frozen=True)
class ActivationLike(_Like):
    """An activation without parameters. form: one of the op's `likes`; half: as in NormLike."""

    room: str
    form: str
    half: bool = True
    eps = 1e-4  # only sets how small the smallest probes are
    mixin = LookAlike

    @property
    def op(self):
        return ACTIVATIONS[self.room]

    def __str__(self) -> str:
        return f"hfnn {self.room}" + (f", {self.form}" if self.form else "")

    def fused(self, module, x, out):
        return self.op.fused(x, out, module.prefer, **self.op.likes[self.form])

    def exact(self, module, x, eps):
        return self.op.reference(x, **self.op.likes[self.form])


def _out_dtype(module, like, x) -> torch.dtype | None:
    """The dtype that the module's own code returns for x; found by running a clone on an empty tensor.

    None for float64, which is not proved, because many authors round to float32 on the way.
    """
    if x.dtype is torch.float64:
        return None
    weight = next(iter(module._parameters.values()), None)
    device = x.device.type
    autocast = torch.get_autocast_dtype(device) if autocasting(x) else None
    known, key = like.dtypes, (x.dtype, None if weight is None else weight.dtype, device, autocast)
    if key not in known:
        holder = holder_of(module)
        own = stock_of(module) if holder is None else holder.cls
        with torch.no_grad():
            clone = probe.clone(module, probe.Notes(module), module.training, module._parameters, cls=own)
            known[key] = own.forward(clone, x.new_empty(0, x.shape[-1] if x.dim() else 1)).dtype
    return known[key]


def recognise(module: nn.Module) -> Match | Refusal | None:
    """How to treat the module's class, or why it is not the op that its name suggests."""
    cls = type(module)
    name = cls.__name__.lower().replace("_", "")
    kind = next((kind for kind in (*ACTIVATIONS, "norm") if kind.replace("_", "") in name), None)
    if kind is None or cls.__module__.startswith(("torch.", "hfnn.")):
        return None
    but = f"named like a {kind}, but "
    why = _unlike(module, kind)
    if why is not None:
        return Refusal(but + why)
    floats = tuple(name for name, value in probe.attributes(module).items() if isinstance(value, float))
    return _proofs.of(module, (kind, _shapes(module), floats), lambda notes: _prove(module, kind, notes), but)


_proofs = Proofs()


def _unlike(module, kind) -> str | None:
    """Why the structure rules out a look-alike, or None."""
    if module._modules:
        return "it has modules inside"
    if module._buffers or any(isinstance(value, torch.Tensor) for value in vars(module).values()):
        return "it holds tensors that are no parameters"
    needed = arguments(type(module))
    if needed != 1:
        return f"its forward needs {needed} arguments, not one tensor"
    shapes = _shapes(module)
    if kind in ACTIVATIONS:
        return "it has parameters" if shapes else None
    if len(shapes) > 2 or any(len(shape) != 1 for _, shape in shapes) or len({shape for _, shape in shapes}) > 1:
        return f"its parameters are not one weight (and bias) of one dimension: {dict(shapes)}"
    if _cols(module) is None:
        return "it normalises over several dimensions"
    return f"rows of {_cols(module)} are too short to prove it" if _cols(module) < MIN_COLS else None


def _shapes(module) -> tuple:
    return tuple((name, tuple(p.shape)) for name, p in module._parameters.items() if p is not None)


def _cols(module) -> int | None:
    """Row length for the probes; None if `normalized_shape` has several dimensions."""
    shapes = _shapes(module)
    shape = shapes[0][1] if shapes else vars(module).get("normalized_shape")
    if isinstance(shape, (tuple, list)):
        return shape[0] if len(shape) == 1 else None
    return shape if isinstance(shape, int) else 64


def _candidates(module, kind):
    """The candidates worth a proof, the most likely first."""
    if kind in ACTIVATIONS:
        return [ActivationLike(kind, form) for form in ACTIVATIONS[kind].likes]
    names = [name for name, _ in _shapes(module)]
    bias = next((name for name in names if name.lower() in ("bias", "beta", "b", "shift")), None)
    weight = next((name for name in names if name != bias), None)
    floats = [name for name, value in probe.attributes(module).items() if isinstance(value, float)]
    epsilons = [name for name in floats if "eps" in name.lower()] or [*floats, *CONSTANTS]
    rms = [NormLike("rms_norm", weight, None, eps) for eps in epsilons] if bias is None else []
    plain = [NormLike("layer_norm", weight, bias, eps) for eps in epsilons]
    shifted = [NormLike("rms_norm", weight, None, eps, 1.0) for eps in epsilons] if bias is None and weight else []
    return [*rms, *plain, *shifted]


def _prove(module, kind, notes) -> Match:
    """The first candidate that passes every case."""
    best = -1, None, None
    for like in _candidates(module, kind):
        for number, case in enumerate((*CASES, *HALF)):
            try:
                _check(module, notes, like, number, *case)
            except Exception as why:
                if case in HALF:
                    return replace(like, half=False)
                if not isinstance(why, Differs):
                    raise
                best = max(best, (number, like, str(why)), key=lambda found: found[0])
                break
        else:
            return like
    raise Refusal(f"no op of hfnn: unlike {str(best[1]).removeprefix('hfnn ')}, {best[2]}")


def _check(module, notes, like, number, dtypes, training, factor) -> None:
    """Raises Differs if the module's own code differs from a candidate in one case."""
    generator = torch.Generator("cpu").manual_seed(number)
    clone, eps = _fresh(module, notes, like, dtypes[0], training, factor, generator)
    large = 3e4 if dtypes[1] is not torch.float16 else 3e3
    x = _probe(_cols(module), eps, 2 + number % 3, generator, large).to(dtypes[1])
    setting = f"input {dtypes[1]}, parameters {dtypes[0]}, {'training' if training else 'eval'}"
    setting += "" if factor == 1 else f", eps times {factor:g}"
    limits = like.room in LIMITED  # whose limits are far below the largest values
    check(clone, (x,), lambda wide, x: like.exact(wide, x, eps), setting, off=_row_error, limits=limits)


def _fresh(module, notes, like, dtype, training, factor, generator):
    """(a clone with random parameters, its eps)."""
    parameters = {
        name: None if p is None else nn.Parameter(torch.randn(p.shape, generator=generator).to(dtype))
        for name, p in module._parameters.items()
    }
    eps, changed = like.eps, {}
    if isinstance(eps, str):
        changed[eps] = eps = vars(module)[eps] * factor
    return probe.clone(module, notes, training, parameters, changed=changed), eps


def _probe(cols, eps, dims, generator, large):
    """Rows of ordinary values, one of very large values, and rows so small that eps matters; none centred on 0."""
    small = eps**0.5 if eps > 0 else 1e-3
    scales = torch.tensor([1.0, large, 3.0, 0.5, small, 0.1 * small])
    x = (torch.randn(6, cols, generator=generator) + 0.5) * scales[:, None]
    return x.view({2: (6, cols), 3: (3, 2, cols), 4: (2, 3, 1, cols)}[dims])


def _row_error(result, exact) -> float:
    """Largest error of a row relative to its L2 norm; infinite if there is a NaN."""
    difference = (result.double() - exact).norm(dim=-1)
    error = difference / exact.norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
    return error.nan_to_num(nan=float("inf")).max().item()
