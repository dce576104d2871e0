"""Choosing a kernel, and explaining the choice.

An `Op` lists its kernels in order of preference. A `Kernel` states its limits as data. The choice and the refusal
messages are both derived from that data. If no kernel accepts a call, torch's own op runs.
"""

import contextlib
import functools
import importlib
import logging
import math
import os
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from hfnn.core import native
from hfnn.core.context import PLAIN, Tensor, compiling, context, faked, fakes_under_autocast, mixture, on_gpu, place

log = logging.getLogger("hfnn")

_UNKNOWN = object()

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
PREFERENCES = ("auto", "memory", "speed")
NAMES = ("torch", "cpp", "triton", "cuda")

# A room keeps fewer bytes than torch. From this input size on this is worth its host time, even if it is not faster.
WORTH_ELEMENTS = 1 << 21


class NoKernel(RuntimeError):
    """The kernel requested with `hfnn.use` cannot run this call; the message has every reason."""


_forced: str | None = None


def _force(name: str | None) -> None:
    global _forced
    _forced = name
    if native.extension is not None:
        native.extension.force(0 if name is None else 1 + NAMES.index(name))


_force("torch" if os.environ.get("HFNN_DISABLE", "0") not in ("", "0") else None)


@contextlib.contextmanager
def use(name: str) -> Iterator[None]:
    """Run every hfnn op inside the `with` block with one kind of kernel.

    A call that this kind cannot run raises `NoKernel` instead of falling back. The choice is process-wide. A backward
    uses the choice of its forward.

    Args:
        name: "cpp", "cuda", "triton"; or "torch", which turns hfnn's kernels off.

    Raises:
        ValueError: An unknown name.
    """
    if name not in NAMES:
        raise ValueError(f"hfnn.use({name!r}): choose one of {', '.join(NAMES)}")
    with forcing(name):
        yield


@contextlib.contextmanager
def forcing(name: str | None) -> Iterator[None]:
    """Implements `use`. With None, hfnn chooses the kernels inside the block, regardless of an outer `use`."""
    before = _forced
    _force(name)
    try:
        yield
    finally:
        _force(before)


def forced() -> str | None:
    """The kind of kernel requested by `use`, or None."""
    return _forced


@functools.cache
def _load(source: str) -> tuple[object, str | None]:
    """(module, None), or (None, why it is not available). `source` is "module" or "module:attribute.attribute"."""
    name, _, path = source.partition(":")
    try:
        found = importlib.import_module(name)
        for part in path.split(".") if path else ():
            found = getattr(found, part)
    except ImportError as error:
        missing = getattr(error, "name", None) or name
        if missing == "triton":
            return None, "triton is not installed: pip install triton"
        return None, f"not built: no {missing} here; install hfnn where there is a C++ compiler"
    except AttributeError:
        build = importlib.import_module("hfnn._build")
        return None, f"{name} has no {path}: {build.cuda if path.startswith('cuda.') else build.cxx}"
    if path.startswith("cuda."):
        refusal = importlib.import_module(name).cuda.refusal()
        if refusal:
            return None, refusal
    return found, None


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _with_device(function: Callable) -> Callable:
    """Triton launches on torch's current device; make this the tensors' device."""

    @functools.wraps(function)
    def run(first, *rest, **options):
        with torch.cuda.device(first.device):
            return function(first, *rest, **options)

    return run


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op, and its limits.

    name: the kind, as in `hfnn.use`; source: its module, imported at the first use; device: "cpu" or "cuda"; dtypes: of
    the input; max_cols: the longest row; out: whether the output may have another dtype than the input; min_elements:
    the measured input size below which host time decides and torch's own op is faster.
    """

    name: str
    source: str
    device: str
    dtypes: tuple[torch.dtype, ...] = FLOATS
    max_cols: int | None = None
    out: bool = True
    min_elements: int = 0

    @property
    def missing(self) -> str | None:
        """Why this kernel cannot run on this machine at all, or None."""
        if self.device == "cuda" and not torch.cuda.is_available() and not (self.name == "triton" and _interpreting()):
            return "torch sees no CUDA device"
        return _load(self.source)[1]

    def refusals(self, device: str, dtype: torch.dtype, cols: int, out: torch.dtype) -> list[str]:
        """Why this kernel does not accept such a call; empty if it does."""
        reasons = self.limits(device, dtype, cols, out)
        if not reasons and self.missing:
            reasons.append(self.missing)
        return reasons

    def limits(self, device: str, dtype: torch.dtype, cols: int, out: torch.dtype) -> list[str]:
        """The refusals that hold on any machine."""
        reasons = []
        interpreted = _forced == "triton" == self.name and device == "cpu" and _interpreting()
        if device != self.device and not interpreted:
            reasons.append(f"runs on {self.device}, got {device}")
        if dtype not in self.dtypes:
            reasons.append(f"takes {', '.join(map(str, self.dtypes))}, got {dtype}")
        if self.max_cols is not None and cols > self.max_cols:
            reasons.append(f"takes at most {self.max_cols} columns, got {cols}")
        if out is not dtype and not self.out:
            reasons.append(f"returns its input's dtype, asked for {out} from {dtype}")
        return reasons

    def __getattr__(self, function: str):
        """`kernel.forward`, `kernel.backward`, ... come from the module and are kept on the instance after the first
        use."""
        if function.startswith("_"):
            raise AttributeError(function)
        found = getattr(_load(self.source)[0], function)
        if self.name == "triton" and function not in _SIZES and torch.cuda.device_count() > 1:
            found = _with_device(found)
        object.__setattr__(self, function, found)
        return found

    def queue(self, x: torch.Tensor) -> int:
        """The queue of the kernel: the number of threads on the CPU, the current raw stream on CUDA."""
        return torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else torch.get_num_threads()


def kernels(source: str, floor: int, *first: Kernel, cuda: int = 1 << 24, max_cols: int | None = None, **triton):
    """The kernels of an op that has one in Triton and one in C++, `first` before them.

    source: their file; floor, cuda: the number of elements from which they are faster than torch, in C++ and in Triton;
    max_cols: the longest row in Triton; triton: other fields of the Triton kernel.
    """
    return (
        *first,
        Kernel("triton", f"hfnn.kernels.{source}", "cuda", max_cols=max_cols, min_elements=cuda, **triton),
        Kernel("cpp", f"hfnn._C:cpu.{source}", "cpu", (*FLOATS, torch.float64), min_elements=floor),
    )


# Functions of numbers, which return sizes that a kernel needs; all other functions are launches.
_SIZES = ("partials", "column_splits")

_NO_MODULE = types.SimpleNamespace(**dict.fromkeys(_SIZES, lambda *sizes: 1))  # without values


class _FakeKernel:
    """In place of `kernel` for tensors without values: the room makes shapes and saved tensors; nothing is launched."""

    def __init__(self, kernel: Kernel):
        self.name = kernel.name

    def __getattr__(self, function: str):
        if function.startswith("_"):
            raise AttributeError(function)
        return (lambda *sizes: 1) if function in _SIZES else lambda *args: None

    def queue(self, x: torch.Tensor) -> int:
        return 0


@dataclass(frozen=True)
class Op:
    """An operator: its definition, its kernels in order of preference, and information for tests and benchmarks.

    reference: the definition in plain torch, differentiable, in any dtype; `torch`: torch's own op, same arguments;
    `function`: hfnn's; `sample(case, dtype, device)`: arguments of a case, differentiable ones first; `cases`: for the
    contract tests; `bench`: cases worth timing; `traffic`: tensors of the input's size moved by (forward, backward).
    """

    name: str
    reference: Callable
    torch: Callable
    kernels: tuple[Kernel, ...]
    sample: Callable
    cases: tuple = ()
    bench: tuple = ()
    traffic: tuple[float, float] = (2, 3)
    probe: tuple | Callable = ()  # torch's further arguments for an input of shape (0, 1), or a function of that input
    small: tuple = ()  # a case small enough for gradcheck
    pin: Callable | None = None  # for random ops: (args, result) -> arguments that make the reference repeat the draw
    saves: bool = True  # whether a room keeps fewer bytes than torch's op
    worth: tuple[int, int] = (WORTH_ELEMENTS, WORTH_ELEMENTS)  # if so, from which size on; on the CPU and on CUDA
    recipe: bool = True  # whether the output carries a recipe
    recipe_needs_recipe: bool = False  # whether the output has a recipe only where the input has one
    like_input: bool = True  # whether the output has the input's shape; a loss does not
    constants: int = 0  # how many of the last arguments get no gradient
    modules: dict = field(default_factory=dict)  # torch's class -> the room's
    sums: bool = False  # whether its results are sums over rows or columns, for the accuracy rule
    likes: dict = field(default_factory=dict)  # forms in which modules without parameters compute it: name -> options
    # passes(x, prefer): whether torch's own op runs without further checks. Not a cached property, whose lock (up to
    # Python 3.11) Dynamo cannot compile.
    passes: Callable[..., bool] = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "passes", self._make_passes())

    def _make_passes(self) -> Callable[..., bool]:
        """`passes`.

        torch's op runs while Dynamo compiles, because Inductor fuses these ops better, and for small inputs, where host
        time decides. This is the whole cost of hfnn in a small call. So it is a closure, because an attribute look-up
        counts here.
        """
        floors = self.floors
        lowest = {prefer: min(both) for prefer, both in floors.items()}

        def passes(x, prefer="auto"):
            if compiling():
                return True
            if type(x) is not Tensor:  # a tracer's stand-in has no size to compare
                return _forced is None and type(x) not in PLAIN
            if _forced is not None:
                return False
            size = x.numel()
            return size < lowest[prefer] or size < floors[prefer][on_gpu(x)]

        return passes

    def select(self, x: torch.Tensor, *others: torch.Tensor | None, row=(), out=None, prefer: str = "auto", dtype=None):
        """The first kernel that accepts the call, or None for torch's own op.

        `others` are the further tensors (None if absent); `row` the dimensions along which an op works; `out` the
        output's dtype if it is not torch's choice; `dtype` the dtype that the kernel works on if it is not x's.
        """
        if self.passes(x, prefer):
            return None
        return self._choose(x, others, math.prod(row), out, prefer, dtype)

    def left(self, x: torch.Tensor, *others: torch.Tensor | None, row=(), out=None, prefer: str = "auto") -> None:
        """Explains why torch's own op runs, as `select` does, after the node in C++ has refused the call."""
        if _forced not in (None, "torch") and native.extension is None and not self.passes(x, prefer):
            raise NoKernel(f"{self.name}: `{_forced}` was asked for; hfnn._autograd is missing: {native.why}")
        self.select(x, *others, row=row, out=out, prefer=prefer)

    def find(self, x: torch.Tensor, dtype: torch.dtype | None = None, cols: int = 0) -> Kernel | None:
        """The first kernel for tensors on x's device, of `dtype` if it is not x's, regardless of `use`.

        For rooms that make such tensors themselves, after `select` has chosen a kernel.
        """
        dtype = x.dtype if dtype is None else dtype
        key = (place(x), dtype, cols, dtype, faked(x), _forced)
        if key not in self._choices:
            forced = _forced if any(k.name == _forced for k in self.kernels) else None
            self._choices[key] = self._first(*key[:-1], forced)
        return self._choices[key]

    def module_for(self, device: str, dtype: torch.dtype, cols: int, out: torch.dtype, fake: bool):
        """The module of the first kernel for such a call, or None. For rooms in C++. fake: it launches nothing."""
        kernel = self._find(device, dtype, cols, out, fake, _forced)
        return None if kernel is None else _NO_MODULE if kernel.missing else _load(kernel.source)[0]

    @functools.cached_property
    def floors(self) -> dict[str, tuple[int, int]]:
        """By preference: the smallest input, in elements, for which a kernel is worthwhile, on the CPU and on CUDA."""
        speed = tuple(
            min((k.min_elements for k in self.kernels if k.device == device), default=0) for device in ("cpu", "cuda")
        )
        auto = tuple(map(min, speed, self.worth)) if self.saves else speed
        return {"speed": speed, "auto": auto, "memory": (0, 0)}

    def _choose(self, x, others, cols, out, prefer, dtype=None):
        if _forced == "torch":
            return None
        why = context(x, *others) or mixture(x, others)
        if why is None:
            if _forced is None and x.numel() < self.floors[prefer][on_gpu(x)]:
                return None  # a Parameter or a FakeTensor; `passes` saw to plain tensors
            out = self.out_dtype(x) if out is None else out
            dtype = x.dtype if dtype is None else dtype
            key = (place(x), dtype, cols, out, faked(x), _forced)
            kernel = self._choices.get(key, _UNKNOWN)
            if kernel is _UNKNOWN:
                kernel = self._choices[key] = self._first(*key)
            if kernel is not None:
                return kernel
        return self._refuse(x, cols, out, why)

    def _first(self, device, dtype, cols, out, fake, forced):
        kernel = self._find(device, dtype, cols, out, fake, forced)
        return _FakeKernel(kernel) if fake and kernel is not None else kernel

    def _find(self, device, dtype, cols, out, fake, forced):
        for kernel in self.kernels:
            reasons = kernel.limits if fake else kernel.refusals
            if forced in (None, kernel.name) and not reasons(device, dtype, cols, out):
                return kernel
        return None

    def _refuse(self, x, cols, out, why: str | None) -> None:
        """torch's own op will run: an error if a kernel was requested, a log message otherwise."""
        if _forced is not None:
            raise NoKernel(self.explain(x, cols, out, why))
        if type(x) in PLAIN:
            log_once(self, why or self.explain(x, cols, out), x.dtype)

    def explain(self, x, cols: int = 0, out=None, why: str | None = None) -> str:
        """Each kernel with its reasons against a call on x, as a text table."""
        asked = f"`{_forced}` was asked for; " if _forced else ""
        lines = [f"{self.name}: {asked}input {tuple(x.shape)} {x.dtype} on {x.device.type}"]
        if why is not None:
            return f"{lines[0]}: {why}"
        for kernel in self.kernels:
            reasons = kernel.refusals(x.device.type, x.dtype, cols, out or x.dtype)
            lines.append(f"  {kernel.name:<8}{'; '.join(reasons) or 'takes it'}")
        return "\n".join(lines)

    def out_dtype(self, x: torch.Tensor) -> torch.dtype:
        """The dtype that torch's op returns for x under the present autocast state.

        Found by running torch's op on an empty tensor, because it differs between devices and versions.
        """
        device = "cuda" if x.is_cuda else "cpu"
        if not torch.is_autocast_enabled(device):
            return x.dtype
        gpu, low = on_gpu(x), torch.get_autocast_dtype(device)
        key = (x.dtype, gpu, low)
        if key not in self._probed:
            with torch.no_grad(), contextlib.nullcontext() if gpu is x.is_cuda else fakes_under_autocast(low):
                empty = torch.empty(0, 1, dtype=x.dtype, device=x.device if gpu is x.is_cuda else "cuda")
                others = self.probe(empty) if callable(self.probe) else self.probe
                self._probed[key] = self.torch(empty, *others).dtype
        return self._probed[key]

    @functools.cached_property
    def _probed(self) -> dict:
        return {}

    @functools.cached_property
    def _choices(self) -> dict:
        return {}


_logged: set = set()


def log_once(op: Op, why: str, dtype: torch.dtype) -> None:
    """The first fallback of its kind, as a warning."""
    kind = (op.name, dtype, why.split("\n")[0] if "\n" not in why else "")
    if kind not in _logged:
        _logged.add(kind)
        log.warning("torch's own op runs instead of hfnn's (said once): %s", why)
