"""The product behind unread logits: their sources, also after these have changed.

Logits may be read after their weights were written to, and must still be those of their forward. So when the backward
of their loss ends, and before the step of an optimizer, `keep` copies the weight if unread logits of it are still held.
If the logits are smaller, it computes them instead. `compute_held` computes them before a module writes to its weights.

Inside a checkpoint, or another region whose hooks save tensors, logits that were made outside of it are read at once:
the recomputation must find the same operations. Their own graph is saved without those hooks, as in forward.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hfnn.core.context import address, capturing, compiling, has_values
from hfnn.deferred.graph import again, keeps_graph
from hfnn.ops.head import no_autocast

_MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: the weights of a "
    "language model's head have changed since its logits were made (an optimizer step ran?)"
)
_CHANGED = (
    "these logits were not computed in forward (the loss needs none) and cannot be computed now: {} since. Read "
    "output.logits between forward and the change, or let hfnn.convert(model, defer=False) compute logits in forward."
)
_at_the_end = torch.autograd.Variable._execution_engine
# The innermost hooks that saved tensors go to, or None.
saving_hooks = functools.partial(torch._C._autograd._top_saved_tensors_default_hooks, False)
_unread: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # products by id
_copies: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # by id and version of the weight


@dataclass
class Outcome:
    """What became of a product's logits. read: by another operation than a recorded one or a loss; used: by a loss."""

    read: bool = False
    used: bool = False


class Product:
    """The linear map behind a Deferred and everything that was derived from it, its `members`.

    dtype: the dtype in which torch multiplies; grad: whether grad mode was on; readers: the unread gradients;
    hooks: those of saved tensors in forward.
    """

    def __init__(self, hidden, weight, bias, dtype, grad, compact, prefer):
        self.hidden, self.weight, self.bias, self.dtype, self.grad = hidden, weight, bias, dtype, grad
        self.compact, self.prefer, self.device = compact, prefer, hidden.device
        self.hooks = saving_hooks()
        self.members: list[weakref.ref] = []
        self.readers: list[weakref.ref] = []
        self._marks: list[tuple] = []
        self._kept: dict[int, torch.Tensor] = {}
        self._inner: Callable = lambda: None
        self._made: tuple | None = None  # the value, if it was computed in forward
        self.outcome = Outcome()
        # A write to `.data` leaves no other trace. Reading logits compares these numbers, a loss does not.
        self._samples = [(t, _sample(t, t.is_contiguous())) for t in (weight, bias) if t is not None]
        self.watch(hidden, weight, bias)
        _unread[id(self)] = self

    def watch(self, *tensors) -> None:
        """Remember the present state of these tensors: `check` raises once they have changed."""
        self._marks += [(t, t._version, address(t)) for t in tensors if t is not None]

    def change(self, numbers: bool = False, copies=MappingProxyType({})) -> str | None:
        """How a source has changed, or None. numbers: also by a write to `.data`; waits for the device. copies: stand
        for the sources with these ids."""
        for t, version, pointer in self._marks:
            if id(t) in copies:
                continue
            if t.numel() and not t.untyped_storage().nbytes():
                return "a weight was resharded"
            if (t._version, address(t)) != (version, pointer):
                return "the weights have changed"
        if numbers and has_values(self.weight) and not capturing():
            for t, sample in self._samples:
                if not _equal(_sample(copies.get(id(t), t), t.is_contiguous()), sample):
                    return "the weights have changed"
        return None

    def check(self, numbers: bool = False) -> None:
        """Raises RuntimeError if the logits can no longer be computed: a source has changed that was not copied."""
        what = self.change(numbers, self._kept)
        if what is not None:
            raise RuntimeError(_CHANGED.format(what))

    def check_unwritten(self, numbers: bool = False) -> None:
        """Raises torch's error if a source has changed: a gradient needs the source itself, not its copy."""
        if self.change(numbers) is not None:
            raise RuntimeError(_MODIFIED)

    def smaller_than_weight(self) -> bool:
        """Whether the logits are, or as large."""
        return self.hidden.numel() // self.hidden.shape[-1] <= self.hidden.shape[-1]

    def waiting(self) -> list:
        """Logits and gradients that are still held, and still to be computed."""
        return [x for x in (ref() for ref in (*self.members, *self.readers)) if x is not None and x.waits()]

    def keep(self, written: set[int]) -> None:
        """Call before the tensors with these ids are written to: logits that may still be read keep their values.

        The weight is copied, unless the logits are smaller; once for all products of the same weight.
        """
        weights = [t for t in (self.weight, self.bias) if t is not None and _ids(t) & written]
        if self._made is not None or all(id(t) in self._kept for t in weights) or not self.waiting():
            return
        if self.smaller_than_weight():
            self.compute_waiting()
            return
        self.check()
        for t in weights:
            self._kept[id(t)] = _copies.setdefault((id(t), t._version, address(t)), t.detach().clone())

    def keep_after_backward(self) -> None:
        """Call in a backward: when it ends, `keep` what unread logits need, whatever is written to afterwards."""
        if self.waiting() and not capturing():
            _at_the_end.queue_callback(functools.partial(_keep_all, weakref.ref(self)))

    def given(self) -> list:
        """hidden, weight and bias as they were in forward."""
        self.check()
        return [self._kept.get(id(t), t) for t in (self.hidden, self.weight, self.bias)]

    def leaves(self) -> list:
        """hidden, weight and bias as leaves of a graph, with their memory and versions."""
        given = (self.hidden, self.weight, self.bias)
        return [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in given]

    def logits(self, hidden, weight, bias):
        """The product as torch computes it, also under the autocast state of forward."""
        hidden, weight = hidden.to(self.dtype), weight.to(self.dtype)
        with no_autocast(hidden):
            return nn.functional.linear(hidden, weight, None if bias is None else bias.to(self.dtype))

    def make(self) -> None:
        """Computes the logits now; whenever they are read, they are there."""
        self._made = self.value(self.grad)

    def value(self, grad: bool):
        """(the logits without a graph, what holds their graph for `backward` or None)."""
        if self._made is not None:
            made, self._made = self._made, None
            return made
        if not grad or (self._kept and self.change(numbers=True) is not None):
            with torch.no_grad():
                return self.logits(*self.given()), None
        with torch.enable_grad():
            leaves = self.leaves()
            y = self.logits(*leaves)
        inner = Inner(get_gradient_edge(y), leaves)
        self._inner = weakref.ref(inner)
        return y.detach(), inner

    def backward(self, dy, needs) -> list:
        """The gradients of hidden, weight and bias, None where not needed, from that of the logits."""
        create_graph, inner = torch.is_grad_enabled(), self._inner()
        if inner is not None and not create_graph:
            y, leaves = inner.taken()
        else:
            self.check_unwritten()
            with torch.enable_grad():
                # Views, so that gradients stop here: the hidden states may come from this very weight.
                given = (self.hidden, self.weight, self.bias)
                leaves = [None if t is None else t.view_as(t) for t in given]
                y = self.logits(*leaves)
        wanted = [t for t, need in zip(leaves, needs, strict=True) if need]
        grads = iter(torch.autograd.grad(y, wanted, dy, retain_graph=keeps_graph(), create_graph=create_graph))
        return [next(grads) if need else None for need in needs]

    def compute(self, read: bool = True) -> None:
        """Every living member. A view stays a view of its tensor, whatever is written. read: whether they are read."""
        self.outcome.read |= read
        if self._made is None:
            self.check(numbers=True)
        members, self.members = [ref() for ref in self.members], []
        same = saving_hooks() == self.hooks
        saving = contextlib.nullcontext() if same else saved_tensors_hooks(lambda t: t, lambda t: t)
        with torch.inference_mode(False), saving:
            for member in members:
                if member is not None:
                    member._compute()

    def compute_waiting(self) -> None:
        waiting = self.waiting()
        self.compute(read=False)
        for x in waiting:
            x.computed()


class Inner:
    """The graph of computed logits: its root and its leaves."""

    def __init__(self, edge, leaves):
        self._graph = edge, leaves

    def taken(self):
        """Both, which are released if the graph is not retained."""
        graph = self._graph
        if graph is None:
            raise again()
        if not keeps_graph():
            self._graph = None
        return graph


def _sample(t, flat: bool) -> torch.Tensor:
    """A copy of about 64 numbers of t, from all of its rows and columns if it is flat in memory; else of rows."""
    if not flat:
        return t.detach()[:: len(t) // 64 + 1].clone()
    step = t.numel() // 64 | 1  # odd, so the columns change
    return t.detach().view(-1)[::step].clone()


def _equal(a, b) -> bool:
    """Whether all numbers are equal, or both are NaN."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _ids(t) -> set[int]:
    return {id(t)} if t._base is None else {id(t), id(t._base)}


def keep(params) -> None:
    """Call before these tensors are written to: logits that may still be read keep their values."""
    written = None
    for ref in _unread.valuerefs():
        product = ref()
        if product is not None:
            written = set(map(id, params)) if written is None else written
            product.keep(written)


def compute_held(params) -> None:
    """Call before these tensors are written to or moved: unread logits of them that are still held are computed."""
    ids = set(map(id, params)) if _unread else ()
    for ref in _unread.valuerefs():
        product = ref()
        if product is not None and any(_ids(t) & ids for t, *_ in product._marks) and product.waiting():
            product.compute_waiting()


class Writes:
    """For modules that write to the weights of heads, or move them: unread logits are computed first."""

    @staticmethod
    def methods(module) -> tuple[str, ...]:
        """Those that hang on a converted module."""
        return "_load_from_state_dict", "_apply"

    def _load_from_state_dict(self, *args, **kwargs):
        compute_held(self.parameters())
        type(self)._load_from_state_dict(self, *args, **kwargs)

    def _apply(self, *args, **kwargs):
        compute_held(self.parameters())
        return type(self)._apply(self, *args, **kwargs)


def _keep_all(ref: weakref.ref) -> None:
    product = ref()
    if product is not None and product.change(numbers=product.smaller_than_weight()) is None:
        with torch.no_grad():
            product.keep({id(t) for t in (product.weight, product.bias) if t is not None})


def _before_step(optimizer, args, kwargs):
    """A hook before the step of any optimizer. A closure also makes logits, and the write follows it."""
    if compiling():
        return None

    def params():
        return [p for group in optimizer.param_groups for p in group["params"]]

    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        if _unread:
            keep(params())
        return None

    def kept():
        loss = closure()
        keep(params())
        return loss

    return ((args[0], kept, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": kept})


register_optimizer_step_pre_hook(_before_step)
