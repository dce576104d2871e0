"""The engine of all patterns: what a proof is, how it is made, and how long it is kept.

A pattern gives a module's clone (probe.py), inputs and a definition. `check` compares the clone's own forward with the
definition, output and gradients, and checks that it depends only on its input. The inputs cannot have every size and
every dtype, so a forward is refused that limits values or looks at them (`watched`). `Proofs` keeps the result for all
modules of the class with the same reads.
"""

import contextlib
import copy
import functools
import inspect
import pickle
import random
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hfnn.core.kernel import forcing
from hfnn.patch import unrouted
from hfnn.patterns import probe
from hfnn.patterns.held import Held
from hfnn.patterns.names import outside
from hfnn.patterns.probe import NOTHING, Reads, Refusal, of_class
from hfnn.testing import error

# Errors in ulps of the L2 norm of a row or a tensor. They are similar on all processors, because no single element
# decides. Correct code was measured to stay below 2.5 (float32) and 1.1 (bfloat16).
ULPS = {torch.float32: 8, torch.bfloat16: 3, torch.float16: 3}
EXACT = 1e-9  # in float64, where two computations may only differ in their order


def bound(dtype: torch.dtype) -> float:
    """The largest relative error of correct code."""
    return EXACT if dtype is torch.float64 else ULPS[dtype] * torch.finfo(dtype).eps


@dataclass(frozen=True, kw_only=True)
class Match:
    """How to treat a module. `mixin` is put before its class; `op` and `str(match)` are for the report.

    reads: what the proof depends on; free: attributes that it does not, because `mixin` reads them at each call, and
    several values were tried.
    """

    reads: Reads = NOTHING
    mixin = op = None
    free = property(lambda self: (getattr(self, "eps", None),))

    def depends(self, cls: type) -> Held:
        """What a conversion of modules of this class depends on."""
        return Held(cls, self.reads)


class Differs(Refusal):
    """A forward differs from the definition that it was compared with."""


class Proofs:
    """Proofs of modules, by their classes, which it does not keep alive."""

    def __init__(self):
        self._known: weakref.WeakKeyDictionary[type, list] = weakref.WeakKeyDictionary()

    def of(self, module: nn.Module, key: tuple, prove: Callable, but: str = "") -> Match | Refusal | None:
        """The result of `prove(notes)` for a module with this class, this key and the same reads.

        An exception becomes a refusal whose reason begins with `but`.
        """
        cls = type(module)
        for known, reads, methods, names, found in self._known.get(cls, ()):
            same = known == key and reads.match(module) and all(m(of_class(cls, n)) for n, m in methods)
            if same and (not names or _have(cls, reads.methods, names)):
                return found
        notes = probe.Notes(module)
        with seclusion():
            try:
                with _other_generators():
                    found = prove(notes)
            except Exception as why:  # this runs the author's code: whatever it raises is a reason
                found = Refusal(but + reason(why))
        reads, names = notes.reads(), []
        if isinstance(found, Match):
            reads = reads.without(found.free)
            try:
                names = [(name, _same(value)) for _, name, value in outside(cls, reads.methods)]
                reads = replace(reads, names=tuple(name for name, _ in names))
            except Refusal as why:
                found = Refusal(but + str(why))
        methods = [(name, _same(of_class(cls, name))) for name in ("forward", *reads.methods)]
        found = replace(found, reads=reads) if isinstance(found, Match) else found
        self._known.setdefault(cls, []).append((key, reads, methods, names, found))
        return found


def reason(why: Exception) -> str:
    return str(why) if isinstance(why, Refusal) else f"its forward raises on the probe: {why}"


def _have(cls, methods, names) -> bool:
    """Whether the names that a class's code reads have the values of the proof."""
    try:
        read = outside(cls, methods)
    except Refusal:
        return False
    return [name for _, name, _ in read] == [name for name, _ in names] and all(
        same(value) for (_, _, value), (_, same) in zip(read, names, strict=True)
    )


def _same(value) -> Callable:
    """Whether it is this value. Functions and classes are held weakly, because they hold the module's class."""
    if isinstance(value, property):
        same = _same(value.fget)
        return lambda other: isinstance(other, property) and same(other.fget)
    if isinstance(value, (types.FunctionType, type)):
        held = weakref.ref(value)
        return lambda other: other is held()
    return lambda other: other is value


def check(
    clone: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    definition: Callable,
    setting: str,
    *,
    within: float | None = None,
    wide: bool = True,
    dtype: torch.dtype | None = None,
    off: Callable = lambda given, wanted: error(given, wanted).l2,
    names: tuple[str, ...] = ("the input",),
    limits: bool = False,
) -> None:
    """Raises Differs if a clone's forward is not `definition(module, *inputs)`, whose module has the clone's parts.

    Output and gradients of the inputs (`names`) and all parameters may differ from those of the definition in float64
    by at most `within`, measured by `off`; the default is `bound` of the first input's dtype. wide=False: the
    definition is computed in the clone's dtypes. dtype: of the output, if it matters. setting: a description of the
    case. limits: whether the forward may limit values, because the definition does and the inputs are large enough.
    Raises Refusal for what `watched` refuses, and for a forward that writes to its input.
    """
    own, parts, within = type(clone).forward, nn.Module(), bound(inputs[0].dtype) if within is None else within
    parts.training, parts._parameters, parts._modules = clone.training, dict(clone._parameters), dict(clone._modules)
    copied = copy.deepcopy(parts).double() if wide else parts
    seen = functools.partial(watched, own, limits=limits)
    y, *grads = _run(seen, clone, inputs)
    want, *wanted = _run(definition, copied, [_widened(x) for x in inputs] if wide else inputs)
    versions = [x._version for x in inputs]
    with torch.no_grad():
        torch.default_generator.manual_seed(0)
        again, empty = seen(clone, *inputs), own(clone, *(x[:0] for x in inputs))
    if versions != [x._version for x in inputs]:
        raise Differs("its forward writes to its input")
    if probe.changes(clone):
        raise Differs("its forward changes attributes of the module")
    if not torch.equal(again, y) or (empty.dtype, empty.shape) != (y.dtype, y[:0].shape):
        raise Differs("its forward depends on more than its input (grad mode, number of rows or of calls)")
    if y.shape != want.shape or (dtype is not None and y.dtype is not dtype):
        raise Differs(f"it returns {y.dtype} {tuple(y.shape)} for {inputs[0].dtype} {tuple(inputs[0].shape)}")
    what = "output", *(f"gradient of {x}" for x in (*names, *dict(clone.named_parameters())))
    for name, given, exact in zip(what, (y, *grads), (want, *wanted), strict=True):
        if given is None and exact is None:  # of a parameter that neither reads
            continue
        distance = float("inf") if given is None else off(given, exact)
        if not distance <= within:
            raise Differs(f"{name} off by {distance:.1e} in L2 norm ({setting})")


def compare(clone_of, function, x, dtype, casts, how) -> None:
    """Raises Differs if a module's own forward differs from a function, with parameters of its inputs' dtype; if it
    casts, also of float32. One of the two may raise, as torch's norms do."""
    why = None

    def definition(parts, *given):
        vars(parts)["prefer"] = "auto"
        return function(parts, *given)

    dtypes = (dtype, torch.float32)[: 1 + (casts and dtype is not torch.float32)]
    for own in dtypes:
        clone = clone_of(own)
        try:
            with torch.no_grad():
                if len(dtypes) > 1:
                    type(clone).forward(clone, *x)
        except Exception as error:  # this runs the author's code
            if why is not None:
                raise
            why = error
            continue
        names = ("the input", "the second input", "the third input")[: len(x)]
        within = {"within": bound(own)} if own is not dtype is torch.float64 else {}
        setting = f"{dtype}, {'training' if clone.training else 'eval'}"
        check(clone, tuple(x), definition, setting, names=names, **{**within, **how})


# Operations whose result is their argument's value or a bound, by their names without a trailing "_".
_LIMITS = frozenset((
    "clamp", "clamp_min", "clamp_max", "clip", "hardtanh", "hardsigmoid", "threshold", "hardshrink", "softshrink",
    "minimum", "maximum", "fmin", "fmax", "min", "max", "amin", "amax", "aminmax", "nan_to_num", "where", "masked_fill",
))  # fmt: skip
_READS = frozenset((torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.data_ptr))


class _Limits(TorchDispatchMode):
    """Raises Refusal for operations that limit floats, or whose results are not floats: tests, indices, numbers."""

    def __init__(self, limits):
        super().__init__()
        self.limits = limits

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if any(map(_is_float, _each((*args, *kwargs.values())))):
            name = func._schema.name.removeprefix("aten::").removesuffix("_")
            if name in _LIMITS and not self.limits:
                raise Refusal(f"its forward calls {name}, which the sizes of the probe's values may not show")
            if name != "native_dropout" and not all(map(_is_float, _each([found]))):
                raise Refusal(f"its forward looks at values ({name.removeprefix('_')})")
        return found


class _Numbers(TorchFunctionMode):
    """Raises Refusal for calls that copy a tensor's values past the dispatcher."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _READS:
            raise Refusal(f"its forward looks at values ({func.__name__})")
        return func(*args, **(kwargs or {}))


def watched(function: Callable, *args, limits: bool = False):
    """function(*args); raises Refusal if it limits floating-point values (unless `limits`) or depends on tests of
    them: then it may be another function for larger values, or for NaN.
    """
    with _Numbers(), _Limits(limits):
        return function(*args)


def _each(values):
    """The values, and those of lists and tuples among them."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _each(value)
        elif value is not None:
            yield value


def _is_float(x) -> bool:
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def _widened(x):
    return x.double() if x.is_floating_point() else x


def _run(function, module, inputs):
    """(output, gradients of the floating inputs and of all parameters)"""
    torch.default_generator.manual_seed(0)  # only the CPU's: torch.manual_seed would also seed all GPUs
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    y = function(module, *leaves)
    if not isinstance(y, torch.Tensor):
        raise Differs(f"its forward returns a {type(y).__name__}")
    wanted = [*(x for x in leaves if x.requires_grad), *module.parameters()]
    # With eight bits, so they are the same in all dtypes.
    dy = torch.randn(y.shape, generator=torch.Generator("cpu").manual_seed(1)).bfloat16().to(y.dtype)
    return y, *torch.autograd.grad(y, wanted, dy, allow_unused=True)


def arguments(cls: type) -> int | None:
    """How many arguments a class's forward needs, all of them positional; None if unknown."""
    forward = inspect.unwrap(cls.forward)
    code = getattr(forward, "__code__", None)
    if code is None or code.co_kwonlyargcount > len(forward.__kwdefaults__ or ()):  # compiled code has none
        return None
    return max(code.co_argcount - 1 - len(forward.__defaults__ or ()), 0)


@contextlib.contextmanager
def _other_generators():
    """Restores the generators of Python and of numpy; raises Refusal if something drew from them."""
    numpy = sys.modules.get("numpy")
    before, of_numpy = random.getstate(), numpy and numpy.random.get_state(legacy=False)
    seen = pickle.dumps(of_numpy)
    try:
        yield
    finally:
        moved = random.getstate() != before
        random.setstate(before)
        if numpy is not None:
            moved = moved or pickle.dumps(numpy.random.get_state(legacy=False)) != seen
            numpy.random.set_state(of_numpy)
        if moved:
            raise Refusal("its forward draws random numbers from Python or numpy")


@contextlib.contextmanager
def seclusion():
    """Runs the proof outside of the caller's modes, and restores torch's generator afterwards."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_disable_current_modes())  # of dispatch: FakeTensors, above all, have no values to compare
        stack.enter_context(torch.random.fork_rng(devices=[]))
        if torch.get_default_device().type != "cpu":  # each of torch's functions would pass through Python
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(unrouted())
        stack.enter_context(forcing(None))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield
