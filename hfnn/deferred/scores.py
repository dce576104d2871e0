"""Scores of attention that a module's own code writes out, and that have not been computed.

    s = scale q k^T;    s = s + bias;    s = c where it is hidden;    p = dropout(softmax(s));    o = p v

In such a module (hfnn/adapters/written.py) the product of queries and keys gives `Scores`. What may follow up to the
product with the values is recorded (scored.py), and this product computes attention without scores (attended.py). Any
other operation computes the scores as torch does, and all that was made of them. `Result` waits for the order in which
o is read.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch.utils._pytree import tree_map_only

from hfnn.core.context import autocasting, uncompiled
from hfnn.deferred.hidden import Made
from hfnn.deferred.recorded import name_of

_WRITTEN = (
    "these attention scores were not computed and cannot be computed now: queries, keys or masks have been written to. "
    "Read them before, or leave the module alone: hfnn.convert(model, skip=...)"
)
_USED = (
    "a hook on attention scores that were not computed comes too late: their product with the values is done. Set it "
    "before, or leave the module alone: hfnn.convert(model, skip=...)"
)
_HOOKS = "register_hook", "retain_grad"
_SIZES = frozenset((
    "shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "dtype", "device", "is_cuda", "is_cpu", "layout",
    "is_floating_point", "is_complex", "element_size", "get_device", "__len__", "is_nested", "is_sparse", "is_meta",
    "is_quantized", "__hash__",
))  # fmt: skip

# The operations that are recorded. A handler takes (the scores, torch's function, its arguments and keywords).
# NotImplemented: the scores must be computed.
HANDLERS: dict[str, Callable] = {}


def recorder(*names):
    def register(handler):
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


class Use:
    """What became of a module's scores. watched: a backward has come without a read; read: calls with one, in a row."""

    def __init__(self):
        self.watched, self.read = False, 0


@dataclass
class Call:
    """A forward of a module. members: its scores and results; read: whether something but attention has read them."""

    use: Use
    prefer: str
    made: Made
    members: list[weakref.ref] = field(default_factory=list)
    read: bool = False

    def living(self) -> list:
        return [x for x in (ref() for ref in self.members) if x is not None]


@dataclass(frozen=True)
class Plan:
    """What scores are. biases: added to them; hidden: (mask, number) of those that were filled; leading: the leading
    dimensions of the scores to which masks belong, if they have some; weights: after the softmax; p: of dropout."""

    query: torch.Tensor
    key: torch.Tensor
    scale: float = 1.0
    biases: tuple[torch.Tensor, ...] = ()
    hidden: tuple[tuple[torch.Tensor, float], ...] = ()
    leading: tuple[int, ...] | None = None
    weights: bool = False
    p: float = 0.0


class Node:
    """What computes scores: `step`, of the value of the node before it."""

    def __init__(self, call: Call, plan: Plan, step: Callable, before: "Node | None" = None):
        self.call, self.plan, self.step, self.before, self._value = call, plan, step, before, None
        self.used = False  # by a product that did not compute it
        on = autocasting(plan.query)
        dtype = torch.get_autocast_dtype(plan.query.device.type) if on else None
        self._state, self._versions = (on, dtype, torch.is_grad_enabled()), self._now()
        if not call.use.watched or (before is not None and before._value is not None):
            self.value()

    def _now(self) -> list[int]:
        plan = self.plan
        given = plan.query, plan.key, *plan.biases, *(mask for mask, _ in plan.hidden)
        return [t._version for t in given]

    def value(self) -> torch.Tensor:
        if self._value is None:
            self.check()
            on, dtype, grad = self._state
            given = () if self.before is None else (self.before.value(),)
            with torch.set_grad_enabled(grad), torch.autocast(self.plan.query.device.type, dtype, enabled=on):
                self._value = self.step(*given)
        return self._value

    def use(self) -> None:
        self.used = True
        if self.before is not None:
            self.before.use()

    def check(self) -> None:
        """Raises RuntimeError if what it is made of has been written to."""
        if self._now() != self._versions:
            raise RuntimeError(_WRITTEN)

    def computed(self) -> bool:
        """Whether it, or one before it, has been computed."""
        return self._value is not None or (self.before is not None and self.before.computed())


class _Waiting(torch.Tensor):
    @classmethod
    @uncompiled
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _on_values(func, args, kwargs)


class Scores(_Waiting):
    """A tensor that is computed when it is read."""

    @staticmethod
    def of(node: Node, shape, dtype) -> "Scores":
        y = torch.Tensor._make_wrapper_subclass(Scores, shape, dtype=dtype, device=node.plan.query.device)
        y._node = node
        node.call.members.append(weakref.ref(y))
        return y

    def then(self, step: Callable, *, shape=None, dtype=None, **changes) -> "Scores":
        node = self._node
        node = Node(node.call, replace(node.plan, **changes), step, node)
        return Scores.of(node, self.shape if shape is None else shape, dtype or self.dtype)

    def value(self) -> torch.Tensor:
        return self._node.value()

    @classmethod
    @uncompiled
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, name_of(func)
        x = next((x for x in args if type(x) is Scores), None)
        if x is not None and (name in _SIZES or name in HANDLERS):
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs) if name in _SIZES else HANDLERS[name](x, func, args, kwargs)
            if result is not NotImplemented:
                return result
        return _on_values(func, args, kwargs)

    def __repr__(self, *, tensor_contents=None):
        return f"Scores(shape={tuple(self.shape)}, dtype={self.dtype}, not computed)"


def _on_values(func, args, kwargs):
    """func of the values; whatever else was recorded is computed before, because func may write."""
    if name_of(func) in _HOOKS and type(args[0]) is Scores and args[0]._node.used:
        raise RuntimeError(_USED)
    tree_map_only(Scores, _read, (args, kwargs))
    args, kwargs = tree_map_only((Scores, Result), lambda x: x.value(), (args, kwargs or {}))
    return func(*args, **kwargs)


def _read(x: Scores) -> None:
    call = x._node.call
    call.read = True
    for each in call.living():
        each.value()


class Result(_Waiting):
    """The result of attention, (B, H, T, E). rows: in the order (B, T, H, E), in which modules mostly read it."""

    @staticmethod
    def of(call: Call, rows: torch.Tensor) -> "Result":
        batch, queries, heads, width = rows.shape
        y = torch.Tensor._make_wrapper_subclass(
            Result, (batch, heads, queries, width), dtype=rows.dtype, device=rows.device
        )
        y._rows, y._value = rows, None
        call.members.append(weakref.ref(y))
        return y

    def value(self) -> torch.Tensor:
        """As torch's product returns it."""
        if self._value is None:
            self._value = self._rows.transpose(1, 2).contiguous()
        return self._value

    @classmethod
    @uncompiled
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        x, name = args[0] if args else None, name_of(func)
        if type(x) is Result and name in _SIZES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if type(x) is Result and x._value is None and not kwargs and name in _ORDERS:
            dims = args[1] if len(args) == 2 else args[1:]
            if tuple(d % 4 for d in dims) in _ORDERS[name]:
                return x._rows
        return _on_values(func, args, kwargs)

    def __repr__(self, *, tensor_contents=None):
        return repr(self.value())


_ORDERS = dict.fromkeys(("transpose", "swapaxes", "swapdims"), ((1, 2), (2, 1))) | {"permute": ((0, 2, 1, 3),)}
