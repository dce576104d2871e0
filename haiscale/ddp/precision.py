"""Mixed precision: forward and backward use narrow copies of the parameters, which themselves do not change.

From the beginning of forward to the end of backward `parameter.data` is the copy. Gradients arrive in its dtype, are
averaged in `reduce_dtype`, and end in the parameter's own dtype. Accumulation over several backwards uses the
parameter's dtype.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from haiscale.ddp.buckets import CODES


@dataclass(frozen=True)
class Dtypes:
    """Dtypes: of parameters and inputs in forward and backward; of gradients while averaged; of buffers. None:
    unchanged."""

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    buffer: torch.dtype | None = None

    @classmethod
    def of(cls, given: Any) -> "Dtypes":
        """None, a dtype of parameters, or an object with torch's `param_dtype`, `reduce_dtype` and `buffer_dtype`."""
        if given is None:
            return cls()
        if isinstance(given, torch.dtype):
            return cls(given)
        if not hasattr(given, "param_dtype"):
            raise ValueError(
                "mixed_precision must be a dtype, or have param_dtype, reduce_dtype and buffer_dtype as torch's "
                f"MixedPrecision has, got {given!r}"
            )
        refused = [name for name in ("keep_low_precision_grads", "cast_forward_inputs") if name in vars(given)]
        if "keep_low_precision_grads" in refused and given.keep_low_precision_grads:
            raise ValueError(
                "mixed_precision: keep_low_precision_grads=True would leave gradients of another dtype than their "
                "parameters', which optimizers refuse; leave it out"
            )
        return cls(given.param_dtype, getattr(given, "reduce_dtype", None), getattr(given, "buffer_dtype", None))


class Narrow:
    """Replaces parameters by narrow copies, and restores them."""

    def __init__(self, module: nn.Module, parameters: list[Tensor], dtypes: Dtypes):
        self.dtype = dtypes.param
        self.parameters = [p for p in parameters if p.dtype.is_floating_point and p.dtype != self.dtype]
        self.own: list[Tensor] | None = None  # while the copies are in place
        if dtypes.buffer is not None:
            for buffer in module.buffers():
                if buffer.is_floating_point():
                    buffer.data = buffer.to(dtypes.buffer)

    @torch.no_grad()
    def place(self) -> None:
        """Before forward."""
        if self.own is not None:
            return
        self.own = [p.data for p in self.parameters]
        narrow = [torch.empty_like(data, dtype=self.dtype) for data in self.own]
        torch._foreach_copy_(narrow, self.own)
        for p, data in zip(self.parameters, narrow, strict=True):
            p.data = data

    @torch.no_grad()
    def restore(self) -> None:
        """After backward, or after a forward without a backward."""
        if self.own is None:
            return
        for p, data in zip(self.parameters, self.own, strict=True):
            grad, p.grad = p.grad, None
            p.data = data
            if grad is not None:
                p.grad = grad.to(p.dtype)
        self.own = None

    def cast(self, inputs: Any) -> Any:
        """Floating-point tensors among the inputs, in the copies' dtype."""
        return tree_map(lambda x: x.to(self.dtype) if torch.is_tensor(x) and x.is_floating_point() else x, inputs)


def feedback(wire_dtype: torch.dtype | None, given: bool | None) -> bool:
    """Whether the rounding error of the wire format is fed back; given: the user's argument.

    Raises ValueError if the dtype is not a wire format, or if feedback is requested for a format without error
    feedback.
    """
    if wire_dtype is not None and not getattr(wire_dtype, "is_floating_point", False):
        raise ValueError(f"wire_dtype must be a floating-point dtype such as torch.bfloat16, got {wire_dtype!r}")
    if wire_dtype is not None and wire_dtype.itemsize < 2 and wire_dtype != CODES:
        raise ValueError(f"wire_dtype={wire_dtype} is not accepted: of 8 bits there is {CODES}")
    if given and wire_dtype != CODES:
        raise ValueError(f"error_feedback=True needs wire_dtype={CODES}, got wire_dtype={wire_dtype}")
    return wire_dtype == CODES and given is not False
