"""Small shapes, where host time decides: the rule for them, and the size from which a kernel is worthwhile.

Whole calls are timed, including launches and synchronisation, in interleaved blocks of many calls.
"""

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import check
import report
import timing
import torch

import hfnn

RULE = tuple(1 << n for n in (0, 4, 8, 12, 14, 16, 18, 20))  # elements
CROSSOVER = {"cuda": tuple(1 << n for n in range(10, 27)), "cpu": tuple(1 << n for n in range(8, 23))}
RATIO = 0.97  # at least as fast as torch, except for noise
EXTRA_US = {"module": 0.3, "functional": 0.4}  # or at most this much slower
PASSES = ("forward", "forward+backward")


@dataclass(frozen=True)
class Subject:
    """A forward without arguments, and the tensors for which its backward computes gradients."""

    forward: Callable[[], torch.Tensor]
    leaves: list[torch.Tensor]

    def call(self, name: str, dy: torch.Tensor, around: Callable = contextlib.nullcontext) -> timing.Call:
        """One of PASSES."""
        if name == "forward":
            return timing.Call((self.forward,), around)
        return timing.Call((lambda: torch.autograd.grad(self.forward(), self.leaves, dy),), around)


def case_of(op, elements: int) -> tuple:
    """A case of `op` whose x has this many elements, in rows of at most 1024."""
    cols = min(elements, 1024)
    return (elements // cols, cols, *tail(op))


def tail(op) -> tuple:
    """The entries of a case of `op` besides the shape of x, from its first case."""
    if not op.cases:
        return ()
    (x, *_), _ = op.sample(op.cases[0], torch.float32, "meta")
    return op.cases[0][x.dim() :]


def draw(op, elements: int, dtype, device: str) -> tuple[list, dict]:
    args, kwargs = op.sample(case_of(op, elements), dtype, device)
    return [a.requires_grad_() if check.is_float(a) else a for a in args], kwargs


def functionals(op, args, kwargs) -> tuple[Subject, Subject]:
    """hfnn's function and torch.nn.functional's."""
    leaves = [a for a in args if check.is_float(a)]
    fns = getattr(hfnn.functional, op.name), getattr(torch.nn.functional, op.name, op.torch)
    return tuple(Subject(functools.partial(fn, *args, **kwargs), leaves) for fn in fns)


def modules(op, args, kwargs) -> Iterator[tuple[Subject, Subject]]:
    """hfnn's module and torch's, for each class that the op replaces."""
    given = inspect.signature(getattr(hfnn.functional, op.name)).bind(*args, **kwargs).arguments
    if "weight" in given and given["weight"].dim() == 2:  # the sizes, by the names of constructor arguments
        given["out_features"], given["in_features"] = given["weight"].shape
        given["num_embeddings"], given["embedding_dim"] = given["weight"].shape
    if "weight" in given and given["weight"].dim() > 2:  # a convolution with equally many output channels
        given["out_channels"], given["in_channels"], *given["kernel_size"] = given["weight"].shape
    x = args[0]
    if "running_mean" in given or op.name == "instance_norm":
        given["num_features"] = x.shape[1]
    if "num_groups" in given:
        given["num_channels"] = x.shape[1]
    for original, room in op.modules.items():
        if op.name == "instance_norm" and original.__name__ != f"InstanceNorm{x.dim() - 2}d":
            continue  # it would take x for one sample
        wanted = inspect.signature(original).parameters
        _, _, *names = inspect.signature(original.forward).parameters  # after self and x: the target of a loss
        others = [given[name] for name in names if name in given]
        known = {name: a for name, a in given.items() if name in wanted and not isinstance(a, torch.Tensor)}
        dtype = next(a.dtype for a in args if check.is_float(a))
        both = [cls(**known).to(x.device, dtype) for cls in (room, original)]
        leaves = [[t for t in (x, *m.parameters()) if check.is_float(t)] for m in both]
        yield tuple(Subject(functools.partial(m, x, *others), some) for m, some in zip(both, leaves, strict=True))


def rule(options) -> int:
    """Measure every op as module and as function, against torch's; print violations of the rule. Returns the exit
    status."""
    path, rows, broken = report.path(options.results, options.device, "-small"), [], []
    try:
        for op, dtype, elements in itertools.product(options.ops or hfnn.ops.CONTRACT, options.dtype, RULE):
            for kind, name, ours, theirs, found in _measured(op, elements, dtype, options.device):
                rows += report.append(path, found)
                if theirs / ours < RATIO and ours - theirs > EXTRA_US[kind]:
                    what = f"{op.name} {kind} {name} of {elements} {dtype}"
                    broken.append(f"SLOW: {what}: {ours:.2f} us, torch {theirs:.2f}")
    finally:  # an interrupted run shows what it has
        report.table(rows, f"{path.stem}, whole calls")
        print(*broken, sep="\n")
        print(f"{len(broken)} of {len(rows) // 2} slower than torch by more than the rule allows")
    return 0


def _measured(op, elements: int, dtype, device: str):
    """(kind, pass, our microseconds, torch's, rows) of each comparison at one size."""
    args, kwargs = draw(op, elements, dtype, device)
    case = case_of(op, elements)
    pairs = [("functional", functionals(op, args, kwargs)), *(("module", pair) for pair in modules(op, args, kwargs))]
    for kind, (ours, theirs) in pairs:
        why = _refusal(theirs)
        if why is not None:
            check.say(f"skipped: {op.name} {kind} of {elements} {dtype}: torch says: {why}")
            continue
        y = ours.forward()
        kernel, dy = report.kernel_of(y), torch.randn_like(y)
        for name in PASSES:
            times = timing.side_by_side(ours.call(name, dy), theirs.call(name, dy), device)
            rows = [
                report.row(op.name, case, dtype, provider, f"{kind} {name}", timing.Timing(None, us, None), None, more)
                for provider, us, more in zip(("hfnn", "torch"), times, ({"kernel": kernel}, {}), strict=True)
            ]
            yield kind, name, *times, rows


def _refusal(subject: Subject) -> str | None:
    """Why torch cannot compute it, such as a pool whose window is larger than its input, or None."""
    try:
        y = subject.forward()
        torch.autograd.grad(y, subject.leaves, torch.ones_like(y))
    except (RuntimeError, ValueError) as why:
        return str(why).split("\n")[0]
    return None


def crossover(options) -> int:
    """Print, for each kernel, the smallest input size from which it is not slower than torch's op. Returns the exit
    status."""
    for op in options.ops or hfnn.ops.CONTRACT:
        for kernel in op.kernels:
            if kernel.device != options.device or kernel.missing:
                print(f"skipped: {op.name} {kernel.name}: {kernel.missing or f'runs on {kernel.device}'}")
                continue
            for dtype in options.dtype:
                _crossover(op, kernel, dtype, options.device)
    return 0


def _crossover(op, kernel, dtype, device: str) -> None:
    sizes, ratios = CROSSOVER[device], {name: [] for name in PASSES}
    for elements in sizes:
        args, kwargs = draw(op, elements, dtype, device)
        ours, theirs = functionals(op, args, kwargs)
        dy = torch.randn_like(theirs.forward())
        for name, found in ratios.items():
            with_kernel = ours.call(name, dy, functools.partial(hfnn.use, kernel.name))
            mine, torchs = timing.side_by_side(with_kernel, theirs.call(name, dy), device, rounds=15)
            found.append(torchs / mine)
    for name, found in ratios.items():
        first = _first(sizes, found)
        from_there = "at no size" if first is None else f"from 2^{first.bit_length() - 1} elements"
        series = " ".join(f"{ratio:.2f}" for ratio in found)
        print(
            f"{op.name} {kernel.name} {dtype} {name}: no slower than torch {from_there}; "
            f"torch's time / ours from 2^{sizes[0].bit_length() - 1} up: {series}"
        )


def _first(sizes, ratios) -> int | None:
    """The smallest size from which every ratio is at least RATIO."""
    first = None
    for elements, ratio in zip(reversed(sizes), reversed(ratios), strict=True):
        if ratio < RATIO:
            break
        first = elements
    return first
