"""A line between two bounds, of which one may be absent.

    y = min(max(x, a), b),   dx = dy where a <= x <= b, else 0

torch keeps x. `hardtanh` is the same map, but for its gradient at the bounds.
"""

import math

import torch

from hfnn.kernel import Op
from hfnn.ops import piecewise

_clamp = torch.clamp


def reference(x, min=None, max=None):
    """The definition, in the dtype of x."""
    x = x if min is None else torch.where(x >= min, x, min)
    return x if max is None else torch.where(x <= max, x, max)


def sample(case, dtype, device, generator=None):
    """Arguments of `clamp` for x of shape `case[:-2]`; the last entries of a case are the bounds, or None."""
    *shape, low, high = case
    kinks = [bound for bound in (low, high) if bound is not None]
    return (piecewise.sampled(shape, dtype, device, generator, kinks),), {"min": low, "max": high}


OP = Op(
    "clamp",
    reference,
    _clamp,
    kernels=piecewise.kernels(1 << 14),
    sample=sample,
    cases=tuple((*shape, *bounds) for shape in piecewise.SHAPES for bounds in ((-1.0, 2.0), (-0.5, None), (None, 3.0))),
    traffic=(2, 2),
    probe=(0.0,),
    small=(3, 5, -1.0, 2.5),
    bench=((*piecewise.BENCH, -1.0, 1.0),),
    recipe=False,
)
_passes = OP.passes


def clamp(input, min=None, max=None, *, prefer="auto"):
    """`torch.clamp`, keeping a bit an element instead of the input.

    Shapes: any; the result has the shape and dtype of input. min, max: numbers, or None for no bound; with tensors as
    bounds torch's own op runs. prefer: "auto" | "memory" | "speed" (`hfnn.convert`). Raises what torch raises.
    """
    kernel = None if _passes(input, prefer) else OP.select(input, prefer=prefer)
    bounds = None if kernel is None else _bounds(min, max, input.dtype)
    if bounds is None:
        return _clamp(input, min, max)
    return piecewise.run(input, piecewise.CLAMP, kernel, *bounds)


def _bounds(low, high, dtype):
    """Both as torch compares with them, in the dtype of x; None for what torch is to deal with, or to refuse.

    That is a bound of another type, a NaN, a number that the dtype does not hold, and no bound at all.
    """
    if low is None and high is None:
        return None
    found = []
    for bound, absent in ((low, -math.inf), (high, math.inf)):
        bound = absent if bound is None else bound
        if type(bound) not in (int, float):
            return None
        near = piecewise.rounded(float(bound), dtype)
        if math.isnan(near) or (math.isinf(near) and not math.isinf(bound)):
            return None
        found.append(near)
    return found
