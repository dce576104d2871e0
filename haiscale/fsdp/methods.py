"""Methods of the wrapped module, called through the wrapper: model.generate(), model.encode(x), model.num_parameters().

A method that only calls the module or its units needs nothing special. A method that uses the root's own parameters
outside of forward would find them sharded, and torch refuses to mix these with other tensors. So an op that computes
with them gets whole parameters. Code that only inspects or writes them (counting, an optimizer, an initialisation) gets
the sharded ones. Nothing is gathered before such an op, so a method that needs no values may be called on one rank.
"""

import functools
from collections.abc import Callable

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._pytree import tree_map_only

# Dunders and properties that compute, and functions that do not.
_OPERATORS = {f"__{r}{name}__" for r in ("", "r") for name in ("add", "sub", "mul", "truediv", "pow", "matmul")}
_OPERATORS |= {"__getitem__", "__neg__", "__abs__"}
_TRANSPOSED = (Tensor.T.__get__, Tensor.mT.__get__)
_LOOKS = {
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "data_ptr"),
    *("is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_inference", "is_shared", "get_device"),
    *("untyped_storage", "storage", "type", "detach", "requires_grad_", "register_hook", "retain_grad", "backward"),
    *("register_post_accumulate_grad_hook", "tolist", "item"),
}


class Mixing(TorchFunctionMode):
    """Ops that compute with sharded parameters of the root get the result of `whole` instead."""

    def __init__(self, sharded: set[int], whole: Callable[[Tensor], Tensor]):
        super().__init__()
        self._sharded, self._whole = sharded, whole

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = args, kwargs or {}
        if _computes(func):
            given = tree_map_only(DTensor, lambda t: self._whole(t) if id(t) in self._sharded else t, given)
        return func(*given[0], **given[1])

    def resume(self) -> None:
        _push_mode(self)

    def pause(self) -> bool:
        """Switches it off, so that the ops of a forward are not intercepted; returns whether it was on."""
        stack = _get_current_function_mode_stack()
        if not stack or stack[-1] is not self:
            return False
        _pop_mode()
        return True


def _computes(func) -> bool:
    """Whether an op creates new tensors and changes none."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name in _OPERATORS or func in _TRANSPOSED
    return name not in _LOOKS and not name.endswith("_")


def through(engine, method: Callable) -> Callable:
    """The method, for a call through the wrapper."""

    @functools.wraps(method)
    def call(*args, **kwargs):
        return engine.call(method, args, kwargs)

    return call
