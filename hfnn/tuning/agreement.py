"""Whether the results of a candidate agree with stock's.

The rule of hfnn/testing.py needs a run in float64, for which real batches leave no memory. So torch's own error is
estimated by the change of stock's results when each parameter moves by up to one ulp of the dtype of products. For
float32 it is four ulps, because orders of sums and approximations of functions add errors that 16 bits hide. Both stock
and a candidate have errors, so the difference may be at most 1 + 2 times the estimate (losses, buffers) or 1 + 3 times
(gradients).
"""

import contextlib
import statistics
from collections.abc import Iterator

import torch
from torch import nn

from hfnn.testing import GRADIENTS, OUTPUTS, Error, error
from hfnn.tuning.candidates import convolved

DRAWS = 2  # sets of moved parameters
ULPS = 4  # for float32 and float64
NOISE, FEW = 10.0, 64  # as in hfnn/verify.py: factor for values zero in theory; elements that may match by chance


def allowed(stock: dict, moved: list[dict], step: float) -> dict[str, tuple[Error, float]]:
    """For each result the estimated error and the allowed multiple of it."""
    own = {}
    for name in [n for n, t in stock.items() if t.is_floating_point()]:
        errors = [error(results[name], stock[name]) for results in moved]
        own[name] = Error(max(e.l2 for e in errors), max(e.largest for e in errors))
    noise = 0.1 if step < 1e-5 else 0.5
    plain = [e for e in own.values() if e.l2 < noise] or [Error(step, step)]
    usual = Error(*(statistics.median(getattr(e, of) for e in plain) for of in ("l2", "largest")))
    worst = Error(max(e.l2 for e in plain), max(e.largest for e in plain))
    found = {}
    for name, value in stock.items():
        gradient, e = name.startswith("gradient"), own.get(name, Error(0.0, 0.0))
        least = worst if gradient and value.numel() < FEW else usual
        at_most = 1 + (GRADIENTS if gradient else OUTPUTS)
        if noise <= e.l2 < float("inf"):
            found[name] = e, NOISE
        else:
            known = e if e.l2 < noise else Error(0.0, 0.0)
            found[name] = Error(max(known.l2, least.l2, step), max(known.largest, least.largest, step)), at_most
    return found


def differs(value: torch.Tensor, stock: torch.Tensor, yardstick: Error, at_most: float) -> str | None:
    if value.dtype is not stock.dtype or value.shape != stock.shape:
        return f"is {value.dtype} {tuple(value.shape)}, stock's {stock.dtype} {tuple(stock.shape)}"
    if not value.is_floating_point():
        return None if torch.equal(value, stock) else "is another than stock's"
    e = error(value, stock)
    if e.within(yardstick, value.dtype, at_most):
        return None
    off, allowed = (e.l2, yardstick.l2) if e.l2 > at_most * yardstick.l2 else (e.largest, yardstick.largest)
    return f"is off by {off:.2g} of stock's, {at_most * allowed:.2g} are allowed"


@contextlib.contextmanager
def step_of(model: nn.Module, cuda: bool) -> Iterator[list[float]]:
    """The relative change of parameters, from the dtypes that modules work in within the block: their parameters',
    autocast's, TF32's."""
    found = [max([torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point()], default=0.0)]
    device = "cuda" if cuda else "cpu"
    if cuda and (convolved(model) or torch.get_float32_matmul_precision() != "highest"):
        found[0] = max(found[0], 2.0**-10)

    def note(module, args):
        if torch.is_autocast_enabled(device):
            found[0] = max(found[0], torch.finfo(torch.get_autocast_dtype(device)).eps)

    hooks = [module.register_forward_pre_hook(note) for module in model.modules()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
        found[0] *= ULPS if found[0] < 1e-5 else 1
