"""The inputs of a case, and the check of the results."""

import contextlib
import functools
from dataclasses import dataclass

import rivals
import torch

import hfnn
from hfnn import testing

CHECKED = 1 << 22  # elements of a tensor compared with float64
say = functools.cache(print)  # prints each line once


@dataclass(frozen=True)
class Inputs:
    """One set of arguments as in a training step: an activation first, then parameters.

    dy: one tensor, or one per result of the op.
    """

    args: tuple
    kwargs: dict
    dy: torch.Tensor | tuple[torch.Tensor, ...]

    @functools.cached_property
    def leaves(self) -> list[torch.Tensor]:
        return [a for a in self.args if isinstance(a, torch.Tensor) and a.requires_grad]

    def of(self, provider) -> "Inputs":
        return Inputs(provider.prepare(self.args), self.kwargs, self.dy)

    def forward(self, fn):
        return fn(*self.args, **self.kwargs)

    def backward(self, y):
        return torch.autograd.grad(y, self.leaves, self.dy, retain_graph=True)

    def step(self, fn):
        """Forward and backward as in training, with a graph that is used once."""
        return torch.autograd.grad(self.forward(fn), self.leaves, self.dy)


def is_float(a) -> bool:
    return isinstance(a, torch.Tensor) and a.is_floating_point()


def _leaf(a: torch.Tensor, parameter: bool = False) -> torch.Tensor:
    return torch.nn.Parameter(a) if parameter else a.detach().requires_grad_()


def draw(op, case, dtype, device: str) -> Inputs:
    """Inputs of a case, drawn on the device."""
    with torch.device(device):
        args, kwargs = op.sample(case, dtype, device)
        leaves = len(args) - op.constants
        args = tuple(_leaf(a, parameter=i > 0) if is_float(a) and i < leaves else a for i, a in enumerate(args))
        with torch.no_grad():
            y = op.torch(*args, **kwargs)
        return Inputs(args, kwargs, tuple(map(_cotangent, y)) if isinstance(y, tuple) else _cotangent(y))


def _cotangent(y: torch.Tensor) -> torch.Tensor:
    # In the layout of y. A training step begins with 1 at a loss, for which Liger has a shortcut.
    return torch.randn_like(y, dtype=torch.float32).to(y.dtype) if y.dim() else torch.ones_like(y)


def several(y) -> tuple[torch.Tensor, ...]:
    return y if isinstance(y, tuple) else (y,)


@contextlib.contextmanager
def poisoned():
    """Fills the results of `torch.empty` with NaN: otherwise memory of another provider could be taken for a kernel's
    output."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def result(provider, given: Inputs) -> list[torch.Tensor]:
    """The output and the gradients."""
    given = given.of(provider)
    with provider.around(), poisoned() if provider.name == "hfnn" else contextlib.nullcontext():
        y = given.forward(provider.fn)
        return [*(part.detach() for part in several(y)), *given.backward(y)]


def exactly(op, given: Inputs, y: torch.Tensor) -> list[torch.Tensor]:
    """The output and the gradients in float64. `y`: the result whose random draw a random op must repeat."""
    pin = {} if op.pin is None else op.pin(given.args, y)
    args = tuple(a if not is_float(a) else _leaf(a.double()) if a.requires_grad else a.double() for a in given.args)
    dy = tuple(d.double() for d in given.dy) if isinstance(given.dy, tuple) else given.dy.double()
    wide = Inputs(args, given.kwargs, dy)
    exact = op.reference(*wide.args, **wide.kwargs, **pin)
    return [*(part.detach() for part in several(exact)), *wide.backward(exact)]


def errors(results: list[torch.Tensor], exact: list[torch.Tensor]) -> list[testing.Error]:
    return [testing.error(_thin(r), _thin(e)) for r, e in zip(results, exact, strict=True)]


def _thin(x: torch.Tensor) -> torch.Tensor:
    """At most about CHECKED elements: every n-th with n odd, so that all columns and lanes are covered."""
    return x.flatten()[:: x.numel() // CHECKED | 1]


def broken(results, mine, torchs, outputs: int = 1) -> list[str]:
    """The results that break the accuracy rule, in words; the first are outputs, the others gradients."""
    found = []
    for i, (r, m, t) in enumerate(zip(results, mine, torchs, strict=True)):
        if r.numel() == 1:
            # The error of one number is random, also torch's, so it counts as at least one ulp.
            ulp = torch.finfo(r.dtype).eps
            t = testing.Error(max(t.l2, ulp), max(t.largest, ulp))
        if not m.within(t, r.dtype, testing.OUTPUTS if i < outputs else testing.GRADIENTS):
            what = "output" if i < outputs else f"gradient {i - outputs}"
            found.append(f"{what}: error {m.l2:.3g} (largest {m.largest:.3g}), torch's {t.l2:.3g} ({t.largest:.3g})")
    return found


def judge(op, case, given: Inputs, providers) -> tuple[dict, bool]:
    """({provider: errors} of those that can run, whether all of ours are right)."""
    own = result(rivals.rival(op, "torch", ""), given)
    exact = exactly(op, given, own[0])
    torchs, able, right = errors(own, exact), {}, True
    for provider in providers:
        try:
            results = result(provider, given)
        except Exception as why:  # any exception of a rival is its reason; ours may only report that it has no kernel
            say(f"skipped: {provider} {op.name} {case}: {type(why).__name__}: {why}")
            right = right and (provider.name != "hfnn" or isinstance(why, hfnn.NoKernel))
            continue
        able[provider] = errors(results, exact if op.pin is None else exactly(op, given, results[0]))
        ours = provider.name == "hfnn"
        wrong = broken(results, able[provider], torchs, len(several(given.dy))) if ours else []
        for line in wrong:
            print(f"RED: {provider} {op.name} {case} {given.args[0].dtype}: {line}")
        right = right and not wrong
    return able, right
