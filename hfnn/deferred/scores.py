"""Scores of attention that a module's own code writes out, and that have not been computed.

    s = scale q k^T;    s = s + bias;    s = c where it is hidden;    p = dropout(softmax(s));    o = p v

In such a module (hfnn/adapters/written.py) the product of queries and keys gives `Scores`. What may follow up to the
product with the values is recorded (scored.py), and this product computes attention without scores (attended.py). Any
other operation computes the scores as torch does, and all that was made of them. `Result` waits for the order in which
o is read.
"""

import contextlib
import functools
import logging
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from hfnn.core.context import autocasting, uncompiled
from hfnn.deferred.hidden import Made
from hfnn.deferred.product import saving_hooks
from hfnn.deferred.recorded import name_of

log = logging.getLogger("hfnn")

_WRITTEN = (
    "these attention scores were not computed and cannot be computed now: queries, keys or masks have been written to. "
    "Read them before, or leave the module alone: hfnn.convert(model, skip=...)"
)
_USED = (
    "a hook on attention scores, or on their product with values, comes too late: it has been read already. Set it "
    "before, or leave the module alone: hfnn.convert(model, skip=...)"
)
_LOST = (
    "a gradient has come to attention scores that were not computed: an autograd.Function or an extension took them. "
    "Later calls compute them; or leave the module alone: hfnn.convert(model, skip=...)"
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
    """What became of a module's scores. watched: a backward has come without a read; read: calls with one, in a row;
    late: whether the last call's were read after it."""

    def __init__(self):
        self.watched, self.read, self.late = False, 0, False


@dataclass
class Call:
    """A forward of a module. members: its scores and results; read: whether something but attention has read them;
    over: whether the forward has returned."""

    use: Use
    prefer: str
    made: Made
    members: list[weakref.ref] = field(default_factory=list)
    read: bool = False
    over: bool = False

    def living(self) -> list:
        return [x for x in (ref() for ref in self.members) if x is not None]

    def seen(self) -> None:
        """Something but attention reads its scores."""
        if self.over and not self.read:
            self.use.watched, self.use.read, self.use.late = False, self.use.read + 1, True
        self.read = True

    def end(self) -> None:
        """At the end of the forward. Scores that live on wait, unless what they are made of is larger than they are."""
        for x in self.living():
            if type(x) is Scores and not x.waits_in_less():
                self.read = True
                x.value()
        self.over, self.made = True, Made(())
        for x in self.living():
            if type(x) is Scores:
                x._node.forget()
        use = self.use
        if self.read:
            use.read += 1
        elif not use.late:
            use.read = 0
        use.watched, use.late = use.watched and not self.read, False


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
        self.used = False  # by a product with values
        self.memory = object()  # the same for nodes whose values share memory
        self._state, self._versions = self._state_now(), self._now()
        if not call.use.watched or (before is not None and before._value is not None):
            self.value()

    def _state_now(self):
        on = autocasting(self.plan.query)
        dtype = torch.get_autocast_dtype(self.plan.query.device.type) if on else None
        return on, dtype, torch.is_grad_enabled(), saving_hooks()

    def same_state(self) -> bool:
        """Whether autocast, grad mode and hooks of saved tensors are as they were."""
        return self._state == self._state_now()

    def given(self) -> list[torch.Tensor]:
        plan = self.plan
        return [plan.query, plan.key, *plan.biases, *(mask for mask, _ in plan.hidden)]

    def _now(self) -> list[int]:
        return [t._version for t in self.given()]

    def value(self) -> torch.Tensor:
        if self._value is None:
            self.check()
            if self.used and self.plan.p:
                log.warning("attention weights were read after their use: their dropout was drawn again")
            on, dtype, grad, hooks = self._state
            given = () if self.before is None else (self.before.value(),)
            same = hooks == saving_hooks()
            saving = contextlib.nullcontext() if same else saved_tensors_hooks(lambda t: t, lambda t: t)
            autocast = torch.autocast(self.plan.query.device.type, dtype, enabled=on)
            with torch.inference_mode(False), torch.set_grad_enabled(grad), autocast, saving:
                self._value = self.step(*given)
            self.before = self.step = None  # they would keep other scores alive
            self.forget()
        return self._value

    def forget(self) -> None:
        """Drops what computed scores no longer need once their forward has returned: all else reads their values."""
        if self.call.over and self._value is not None:
            self.plan = None

    def late(self) -> bool:
        """Whether a product with values has used it without computing it."""
        return self.used and self._value is None

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


def _lost(use: Use, grad):
    use.read = sys.maxsize
    if grad is not None and grad.any():  # of weights that nobody reads: a node that they pass through gives nothing
        raise RuntimeError(_LOST)


class Scores(_Waiting):
    """A tensor that is computed when it is read. Code below Python and autograd.Functions see the tensor itself: if it
    has been computed, it shares memory and graph with its value; else a gradient that comes to it is an error."""

    @staticmethod
    def of(node: Node, shape, dtype) -> "Scores":
        if node._value is None:
            how = {"dtype": dtype, "device": node.plan.query.device, "requires_grad": True}
            y = torch.Tensor._make_wrapper_subclass(Scores, shape, **how)
            with torch._C.DisableTorchFunctionSubclass():
                y.register_hook(functools.partial(_lost, node.call.use))
        else:
            y = node._value.as_subclass(Scores)
        y._node = node
        node.call.members.append(weakref.ref(y))
        return y

    def then(self, step: Callable, *, shape=None, dtype=None, **changes) -> "Scores":
        node = self._node
        node = Node(node.call, replace(node.plan, **changes), step, node)
        return Scores.of(node, self.shape if shape is None else shape, dtype or self.dtype)

    def value(self) -> torch.Tensor:
        return self._node.value()

    def late(self) -> bool:
        return self._node.late()

    def waits_in_less(self) -> bool:
        """Whether the tensors that it is made of are no larger than its value."""
        with torch._C.DisableTorchFunctionSubclass():
            size = self.numel() * self.element_size()
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in self._node.given()}
        return sum(storages.values()) <= size

    def is_shared(self) -> bool:
        """Whether others that are alive share its memory."""
        living = (x for x in self._node.call.living() if type(x) is Scores and x is not self)
        return any(x._node.memory is self._node.memory for x in living)

    @classmethod
    @uncompiled
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, name_of(func)
        x = next((x for x in args if type(x) is Scores), None)
        if x is not None and (name in _SIZES or (name in HANDLERS and x._node.plan and x._node.same_state())):
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs) if name in _SIZES else HANDLERS[name](x, func, args, kwargs)
            if result is not NotImplemented:
                return result
        return _on_values(func, args, kwargs)

    def __repr__(self, *, tensor_contents=None):
        _read(self)
        return repr(self.value())


def writes(func) -> bool:
    """Whether a function of torch, by its name, writes to its first argument."""
    name = name_of(func)
    return name.startswith(("__i", "__setitem")) or (name.endswith("_") and not name.endswith("__"))


def _on_values(func, args, kwargs):
    """func of the values; whatever else was recorded is computed before, because func may write."""
    if name_of(func) in _HOOKS and isinstance(args[0], _Waiting) and args[0].late():
        raise RuntimeError(_USED)
    tree_map_only(Scores, _read, (args, kwargs))
    args = tuple(x.written() if i == 0 and type(x) is Result and writes(func) else x for i, x in enumerate(args))
    args, kwargs = tree_map_only((Scores, Result), lambda x: x.value(), (args, kwargs or {}))
    return func(*args, **kwargs)


def _read(x: Scores) -> None:
    call = x._node.call
    call.seen()
    for each in call.living():
        each.value()


class Result(_Waiting):
    """The result of attention, (B, H, T, E). rows: in the order (B, T, H, E), in which modules mostly read it. tokens:
    whether the result itself has this order, with the strides that einsum gives it."""

    @staticmethod
    def of(call: Call, rows: torch.Tensor, tokens: bool = False) -> "Result":
        y = (rows if tokens else rows.transpose(1, 2)).as_subclass(Result)
        y._rows, y._tokens, y._value, y._given = rows, tokens, None, False
        call.members.append(weakref.ref(y))
        return y

    def value(self) -> torch.Tensor:
        """As torch's product returns it."""
        if self._value is not None:
            return self._value
        value = self._rows.transpose(1, 2).contiguous()
        value = value.transpose(1, 2) if self._tokens else value
        self._value = None if self._given else value
        return value

    def written(self) -> torch.Tensor:
        """What is written to. Rows that were given share its memory, where torch's do."""
        return self._rows.transpose(1, 2) if self._given and not self._tokens else self.value()

    def _read_rows(self, name, func, args):
        """The rows for a read in their order, or None."""
        if self._value is not None:
            return None
        if not self._tokens:
            dims = args[0] if len(args) == 1 else args
            fits = name in _ORDERS and tuple(d % 4 for d in dims) in _ORDERS[name]
            return self._rows if fits else None
        y = func(self._rows, *args) if name in ("flatten", "reshape") else None
        return y if y is not None and y.shape == self._rows.flatten(2).shape else None

    def late(self) -> bool:
        return self._given

    @classmethod
    @uncompiled
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        x, name = args[0] if args else None, name_of(func)
        if type(x) is Result and name in _SIZES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        rows = x._read_rows(name, func, args[1:]) if type(x) is Result and not kwargs else None
        if rows is not None:
            x._given = True
            return rows
        return _on_values(func, args, kwargs)

    def __repr__(self, *, tensor_contents=None):
        return repr(self.value())


_ORDERS = dict.fromkeys(("transpose", "swapaxes", "swapdims"), ((1, 2), (2, 1))) | {"permute": ((0, 2, 1, 3),)}
