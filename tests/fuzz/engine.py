"""Differential fuzzing: shared by the fuzzers of this folder.

A fuzzer draws programs as users write them, runs each on stock torch and on ours, and compares what both log. It is a
module of this folder that ends in `FUZZER = Fuzzer(...)` and has the fuzzer's name. `run.py` drives it, `check` is for
the test suite, `shrink.py` finds the smallest program that still differs.

A *program* is plain data: lists are sequences of which any part may be dropped (steps, layers); tuples and dicts are
records. `draw(rng)` makes one from a `random.Random`, `features(program)` names what it contains, and

    def run(program, ours, noise=0):
        log = Log()
        torch.manual_seed(program["seed"])
        with log.attempt("forward 1"):  # logs an exception by its type; the rest of the block is skipped
            y = model(x)
            log.tensor("value y", y)  # values, dtype, shape, stride, requires_grad
            log.note("version x", x._version)  # anything else, compared with ==
        log.features.add("recipes taken")  # features known only at run time
        return log

The first word of a label says what is compared (value, grad, version, alive, error, ...). Together with how it differs
it names the *class* of a difference: "grad: values". Only the first difference of a program counts, because later ones
mostly follow from it. Labels that only one side has are a difference ("missing"), except in a block that raised on both
sides. Of "alive" and "bytes", which are numbers, ours may have less (or `SPARE` more), or one side may omit it.

Where stock raises and ours does not (it keeps less, so fewer writes are errors), `lenient(program)` may give another
run of stock that shows the right results, such as one that keeps copies of all it saves. Ours must then agree with
that, or raise what stock raised. If ours later refuses what that run accepts, in a program that stock refuses, neither
can be said to be right, and the comparison ends.

Values may differ by rounding: by `ULPS` of the largest value, in ulps of the coarser of their dtype and `log.coarse`
(set it to torch.bfloat16 where autocast computes in it). Beyond that, stock's own sensitivity decides: `run(program,
False, noise=k)` starts from inputs moved by about an ulp (k is a seed), and `NOISE` times the change of stock's results
is allowed. A fuzzer whose results must agree without that ignores `noise`.

`faults` are context managers by name that plant a defect in ours, in the process that runs the program (a fuzzer with
rank processes passes the name on to them). `known` are differences that are understood and not fixed yet: each is
predicted from the program and the difference together, and counted separately by name.
"""

import contextlib
import dataclasses
import itertools
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch

ULPS = {torch.float64: 256, torch.float32: 64, torch.float16: 8, torch.bfloat16: 4}  # other dtypes: bitwise equal
ULPS[torch.complex64] = ULPS[torch.float32]
NOISE, NOISES = 8, 8
SPARE = {"alive": 0, "bytes": 512}  # numbers of which ours may have so many more


@dataclasses.dataclass(frozen=True)
class Raised:
    """An exception, compared by its type and the first word of its text; torch words dtype errors in several ways."""

    kind: str
    text: str = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor as it was when it was logged."""

    values: torch.Tensor
    coarse: torch.dtype | None
    stride: tuple
    requires_grad: bool
    zero: float = 0.0

    def __repr__(self) -> str:
        kind = f"{str(self.values.dtype).removeprefix('torch.')}{list(self.values.shape)} strides {self.stride}"
        flat = self.values.flatten()
        return f"{kind}{' requires_grad' if self.requires_grad else ''} {flat[:6].tolist()}"


class Log:
    """What a run logs, by label and in order, and features known only at run time."""

    def __init__(self):
        self.seen: dict[str, Any] = {}
        self.features: set[str] = set()
        self.coarse: torch.dtype | None = None
        self.zero = 0.0  # what rounding may leave of a gradient that cancels to zero in stock
        self.all_strides = False  # whether strides of dimensions of size 1 are compared
        self.block: str | None = None  # the label of the innermost `attempt`
        self.blocks: dict[str, str | None] = {}  # of each label

    def note(self, label: str, value) -> None:
        assert label not in self.seen, f"{label!r} is logged twice"
        self.seen[label] = value
        self.blocks[label] = self.block

    def tensor(self, label: str, x: torch.Tensor | None) -> None:
        if x is None:
            return self.note(label, None)
        # Strides of empty tensors are meaningless, and mostly those of dimensions of size 1.
        strides = zip(x.shape, x.stride(), strict=True) if x.numel() else ()
        stride = tuple(s if n != 1 or self.all_strides else 0 for n, s in strides)
        zero = self.zero if label.startswith("grad ") else 0.0
        self.note(label, Tensor(x.detach().cpu().clone(), self.coarse, stride, x.requires_grad, zero))

    @contextlib.contextmanager
    def attempt(self, label: str) -> Iterator[None]:
        """Logs how the block ends as "error LABEL", ahead of what the block logs."""
        outer, self.block = self.block, f"error {label}"
        self.note(self.block, None)
        try:
            yield
        except Exception as error:
            frames = traceback.walk_tb(error.__traceback__)
            where = [f"{frame.f_code.co_filename}:{line} {frame.f_code.co_name}" for frame, line in frames]
            about = "dtype" if "dtype" in str(error) or "scalar type" in str(error) else str(error).split(" ")[0]
            kind = f"{type(error).__name__}: {about}"
            self.seen[f"error {label}"] = Raised(kind, "\n".join([*where[-8:], str(error)]))
            # A failed checkpoint leaves a generator, which pops hooks when it ends: end it now, not while others are
            # set.
            traceback.clear_frames(error.__traceback__)
        finally:
            self.block = outer


@dataclasses.dataclass(frozen=True)
class Difference:
    label: str
    how: (
        str  # values, dtype, shape, strides, requires_grad, raises, raises not, raises another, missing, extra, differs
    )
    ours: Any
    stock: Any

    @property
    def kind(self) -> str:
        return f"{self.label.split()[0]}: {self.how}"

    def alike_but_for_ones(self) -> bool:
        """Whether strides differ, in dimensions of size 1 alone, which address no element."""
        if self.how != "strides":
            return False
        sizes = self.ours.values.shape
        return all(n == 1 or a == b for n, a, b in zip(sizes, self.ours.stride, self.stock.stride, strict=True))

    def __str__(self) -> str:
        return f"{self.label} ({self.how})\n  ours:  {told(self.ours)}\n  stock: {told(self.stock)}"


def told(seen) -> str:
    return f"{seen.kind}\n{seen.text}" if isinstance(seen, Raised) else repr(seen)


@dataclasses.dataclass(frozen=True)
class Known:
    """A known class of differences; `waits` says briefly what its fix waits for."""

    name: str
    waits: str
    matches: Callable[[Any, Difference], bool]


@dataclasses.dataclass(frozen=True)
class Fuzzer:
    name: str
    draw: Callable[[random.Random], Any]
    features: Callable[[Any], Iterable[str]]
    run: Callable[..., Log]
    expected: tuple[str, ...] = ()  # features that must occur in at least 2% of programs
    known: tuple[Known, ...] = ()
    faults: dict[str, Callable[[], contextlib.AbstractContextManager]] = dataclasses.field(default_factory=dict)
    lenient: Callable[[Any], Log] | None = None
    simpler: Callable[[Any], Iterable[Any]] = lambda program: ()  # candidates beyond those of `shrink.shorter`

    def program(self, seed: int):
        return self.draw(random.Random(seed))

    def difference(self, program) -> tuple[Difference | None, Log]:
        """The first difference between stock and ours, if it occurs again when both run again; and the log of ours."""
        found, ours = self._difference(program)
        if found is not None:
            again, _ = self._difference(program)
            found = None if again is None or again.label != found.label else found
        return found, ours

    def _difference(self, program) -> tuple[Difference | None, Log]:
        stock, ours = self.run(program, False), self.run(program, True)
        noisy: list[Log] = []

        def moved(label, values):
            """How far stock's values at `label` move if the inputs move by an ulp; infinite if they are missing."""
            if not noisy:
                noisy.extend(self.run(program, False, noise=k) for k in range(1, NOISES + 1))
            return max(relative_error(log.seen.get(label), values) for log in noisy)

        found = first_difference(ours, stock, moved)
        if found is not None and found.how in ("raises not", "raises another") and self.lenient is not None:
            other = first_difference(ours, self.lenient(program), moved, stock)
            if other is not None and other.how in ("raises", "raises another"):
                other = None
            if other is None:
                ours.features.add("right where stock raises")
            found = other
        return found, ours

    def is_known(self, program, difference: Difference) -> str | None:
        return next((f"{k.name} (waits: {k.waits})" for k in self.known if k.matches(program, difference)), None)


def relative_error(a, b) -> float:
    """The largest difference, relative to the largest value of b; infinite if they cannot be compared."""
    if not isinstance(a, Tensor) or a.values.shape != b.values.shape:
        return float("inf")
    half = torch.float16 in (a.coarse, a.values.dtype)
    tiny = torch.finfo(torch.float16).tiny if half else 0.0
    a, b = _numbers(a.values), _numbers(b.values)
    if half:  # torch's intermediates may overflow where ours do not
        a = torch.where(b.isfinite(), a, b)
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    difference = (a - b).abs().nan_to_num(0.0, 0.0)  # inf - inf, nan - nan
    # Below the smallest normal number ulps no longer shrink.
    return 0.0 if not difference.numel() else (difference.max() / _scale(b).clamp_min(tiny)).item()


def _numbers(x: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(x) if x.is_complex() else x).double()


def _scale(x: torch.Tensor) -> torch.Tensor:
    return x.abs().nan_to_num(0.0, 0.0).max().clamp_min(1e-30)


def _measurable(seen) -> bool:
    values = seen.values if isinstance(seen, Tensor) else None
    return values is not None and values.dtype in ULPS and values.numel() > 0 and bool(values.isfinite().all())


def _values_differ(a: Tensor, b: Tensor, largest: float, moved: Callable[[], float]) -> bool:
    """largest: stock's largest number; in float64, a and b may consist of a few of its roundings."""
    if torch.equal(a.values, b.values):
        return False
    if not (a.values.is_floating_point() or a.values.is_complex()):
        return True
    bound = max(
        ULPS.get(dtype, 0) * torch.finfo(dtype).eps for dtype in (a.values.dtype, a.coarse) if dtype is not None
    )
    error = relative_error(a, b)
    ours, stock = _numbers(a.values).abs().max(), _numbers(b.values).abs().max()
    if stock <= b.zero / 64 and ours < b.zero:
        return False
    if b.values.dtype is torch.float64 and max(ours, stock) <= 4 * torch.finfo(torch.float64).eps * largest:
        return False
    return error > bound and not error <= NOISE * moved()


def first_difference(
    ours: Log, stock: Log, moved: Callable[[str, Tensor], float], strict: Log | None = None
) -> Difference | None:
    """strict: another run of stock, whose exceptions are also right."""

    def raised(block) -> bool:
        a = ours.seen.get(block)
        also = isinstance(stock.seen.get(block), Raised) or (strict is not None and a == strict.seen.get(block))
        return isinstance(a, Raised) and also

    largest = max((float(t.values.abs().max()) for t in stock.seen.values() if _measurable(t)), default=0.0)
    for label in dict.fromkeys(itertools.chain(stock.seen, ours.seen)):
        a, b = ours.seen.get(label, "not there"), stock.seen.get(label, "not there")
        how = None
        if label.split()[0] in SPARE:
            more = label in ours.seen and label in stock.seen and a > b + SPARE[label.split()[0]]
            how = "more" if more else None
        elif label not in ours.seen or label not in stock.seen:
            if not raised((ours if label in ours.seen else stock).blocks[label]):
                how = "extra" if label in ours.seen else "missing"
        elif isinstance(a, Raised) and strict is not None and a == strict.seen.get(label):
            if not isinstance(b, Raised):
                return None  # from here on the two sides did different things
        elif isinstance(a, Raised) or isinstance(b, Raised):
            if a != b:
                both = isinstance(a, Raised) and isinstance(b, Raised)
                how = "raises another" if both else "raises" if isinstance(a, Raised) else "raises not"
        elif not (isinstance(a, Tensor) and isinstance(b, Tensor)):
            how = None if type(a) is type(b) and a == b else "differs"
        elif a.values.dtype is not b.values.dtype:
            how = "dtype"
        elif a.values.shape != b.values.shape:
            how = "shape"
        elif a.requires_grad is not b.requires_grad:
            how = "requires_grad"
        elif _values_differ(a, b, largest, lambda label=label, b=b: moved(label, b)):
            how = "values"
        elif a.stride != b.stride:
            how = "strides"
        if how is not None:
            return Difference(label, how, a, b)
    return None


def patched(owner, name: str, replacement: Callable) -> Callable:
    """A fault for `faults`: owner.name is replaced by `replacement(owner.name)`."""

    @contextlib.contextmanager
    def planted():
        with mock.patch.object(owner, name, replacement(getattr(owner, name))):
            yield

    return planted


@dataclasses.dataclass
class Summary:
    """Counts of a run: programs, features, classes of differences (known ones by name), and their seeds."""

    programs: int = 0
    features: Counter = dataclasses.field(default_factory=Counter)
    known: Counter = dataclasses.field(default_factory=Counter)
    found: dict[str, list[int]] = dataclasses.field(default_factory=dict)  # class -> seeds of its programs

    def add(self, seed: int, features: Iterable[str], kind: str | None, known: str | None) -> None:
        self.programs += 1
        self.features.update(set(features))
        if known is not None:
            self.known[known] += 1
        elif kind is not None:
            self.found.setdefault(kind, []).append(seed)

    def rare(self, fuzzer: Fuzzer, share: float = 0.02) -> list[str]:
        return [name for name in fuzzer.expected if self.features[name] < share * self.programs]


def trial(fuzzer: Fuzzer, seed: int) -> tuple[int, set[str], str | None, str | None]:
    """(seed, features, class of the first difference or None, its name if known) for the program of a seed."""
    program = fuzzer.program(seed)
    difference, log = fuzzer.difference(program)
    features = {*fuzzer.features(program), *log.features}
    if difference is None:
        return seed, features, None, None
    return seed, features, difference.kind, fuzzer.is_known(program, difference)


def check(fuzzer: Fuzzer, seeds: Iterable[int]) -> Summary:
    """Runs the programs of these seeds in this process; the suite asserts that `found` and `rare` are empty."""
    summary = Summary()
    for seed in seeds:
        summary.add(*trial(fuzzer, seed))
    return summary


def rarely_drawn(fuzzer: Fuzzer, programs: int = 2000) -> list[str]:
    """The expected features that occur in too few programs; programs are drawn but not run."""
    summary = Summary()
    for seed in range(programs):
        summary.add(seed, fuzzer.features(fuzzer.program(seed)), None, None)
    return summary.rare(fuzzer)


def first_found(fuzzer: Fuzzer, fault: str, seeds: Iterable[int]) -> int | None:
    """The number of programs until one differed with the fault planted, and not without; None if none did."""
    for number, seed in enumerate(seeds, 1):
        with fuzzer.faults[fault]():
            found = trial(fuzzer, seed)
        if found[2] is not None and found[3] is None and trial(fuzzer, seed)[2] is None:
            return number
    return None
