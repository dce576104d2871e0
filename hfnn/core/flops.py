"""Counters of FLOPs, and the products that they do not see.

`torch.utils.flop_counter.FlopCounterMode` and `torch.profiler.profile(with_flops=True)` add up the ops of torch that
run. Some products here run in kernels (attention), at another time than torch's (linear losses), or once more in
backward. Where a counter is active, `forward` and `backward` run the ops that stock torch would have run on tensors of
the device "meta", which have no memory; `uncounted` hides the others. So results and memory are the same with and
without a counter. Any other dispatch mode might read values, so it must see the ops themselves (`watched`).
"""

import contextlib
import sys

import torch

from hfnn.core import native
from hfnn.core.context import compiling

_depth, _at = torch._C._len_torch_dispatch_stack, torch._C._get_dispatch_stack_at
_flops = torch.autograd._profiler_enabled if native.extension is None else native.extension.profiles_flops


def counting() -> bool:
    """Whether a counter of FLOPs is active."""
    return not compiling() and (_flops() or by_mode())


def by_mode() -> bool:
    """Whether a FlopCounterMode is active."""
    return not compiling() and _depth() > 0 and any(map(_counts, _modes()))


def watched() -> bool:
    """Whether a dispatch mode is active that is neither torch's own machinery nor a FlopCounterMode, nor hfnn's."""
    return (
        not compiling()
        and _depth() > 0
        and not all(mode.is_infra_mode() or _counts(mode) or getattr(mode, "hfnn_runs", False) for mode in _modes())
    )


def _modes() -> list:
    return [_at(i) for i in range(_depth())]


def _counts(mode) -> bool:
    module = sys.modules.get("torch.utils.flop_counter")
    return module is not None and isinstance(mode, module._FlopCounterMode)


@contextlib.contextmanager
def uncounted(profiled: bool = False):
    """No FlopCounterMode counts what runs inside. profiled: a profiler that counts FLOPs does not see it either."""
    modes = _modes() if _depth() else []
    others = [mode for mode in modes if not _counts(mode)]
    hides, pauses = len(others) < len(modes), profiled and native.extension is not None and _flops()
    if hides:
        _replace(others)
    if pauses:
        native.extension.record(False)
    try:
        yield
    finally:
        if pauses:
            native.extension.record(True)
        if hides:
            _replace(modes)


@contextlib.contextmanager
def instead(formula, *tensors, needs: tuple[bool, ...] | None = None):
    """A FlopCounterMode counts the products of formula(*tensors) instead of those that run inside.

    needs: count the products of backward, for the gradients that are needed.
    """
    if not by_mode():
        yield
        return
    shapes = [None if t is None else t.shape for t in tensors]
    forward(formula, *shapes) if needs is None else backward(formula, needs, *shapes)
    with uncounted():
        yield


def _replace(modes: list) -> None:
    for _ in range(_depth()):
        torch._C._pop_torch_dispatch_stack(None)
    for mode in modes:
        torch._C._push_on_torch_dispatch_stack(mode)


def forward(formula, *shapes) -> None:
    """Count the products of formula(*tensors) for tensors of these shapes, None for no tensor."""
    with torch.no_grad():
        formula(*_stand_ins(shapes, (False,) * len(shapes)))


def backward(formula, needs, *shapes) -> None:
    """Count the products of the gradients of formula(*tensors), of those tensors that need one."""
    if not any(needs):
        return
    plain = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    given = _stand_ins(shapes, needs)
    with uncounted(profiled=True), torch.enable_grad(), plain:
        y = formula(*given)
        dy = torch.empty_like(y)
    torch.autograd.grad(y, [t for t in given if t is not None and t.requires_grad], dy)


def _stand_ins(shapes, needs) -> list:
    with uncounted(profiled=True):
        return [
            None if shape is None else torch.empty(shape, device="meta", requires_grad=need)
            for shape, need in zip(shapes, needs, strict=True)
        ]
