"""When units are gathered, released and reduced.

Forward: before a unit's module runs, its parameters are gathered, and prefetching starts for the units that ran next in
the last forward. Whole parameters are in slots; `buffers` slots are shared in turns. A unit always uses the same slot,
because tensors that autograd saved refer to that memory. Parameters are not actively released: they stay whole until
another unit needs the slot. So the last units of forward are still gathered when backward begins.

Backward: a hook on a unit's outputs runs when their gradients are complete. Autograd runs nodes in the reverse order of
their creation. So by then, everything that ran after this unit has finished its backward: the gradients of those units
are complete, their reduction starts, and their slots are free. No hooks on parameters or inputs are needed. A hook
knows which units were running when the output was made: from then on these, and no others, are in backward. A tensor
that a unit passes on but did not create gives no information and gets no hook.

A checkpoint that runs units again in backward is a forward inside of it: units take their slots, and units in backward
get theirs back at its end. This does not end any unit's backward.

On a GPU the host never waits here: operations of the groups wait for the current stream, and the stream waits for them.
A gather into a slot starts after all kernels that read the slot have been launched, on the stream that launched them.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from haiscale.fsdp.methods import Mixing
from haiscale.fsdp.nested import cast, tensors
from haiscale.fsdp.reduce import Reductions
from haiscale.fsdp.unit import Slot, Unit
from hfnn.deferred.logits import Deferred

Count = tuple[int, int]  # (thread, number): autograd counts the nodes that it creates in each thread
_PLAIN = (int, float, bool, str, bytes, type(None))


class Engine:
    """The engine of one FSDP: its units, root first, and their states."""

    def __init__(
        self, units: list[Unit], group: dist.ProcessGroup, reductions: Reductions, buffers: int, make: Callable
    ):
        self.root, self.units, self.group, self.reductions = units[0], units, group, reductions
        self.buffers, self._make = buffers, make
        self.zero, self.sync, self.dummy, self.reduce_unused = 3, True, False, False
        self.forward_prefetch = self.backward_prefetch = True
        self.slots: list[Slot] = []
        self.slot_bytes = max((u.nbytes for u in units if not u.private), default=0)
        self.cast_inputs: torch.dtype | None = None
        self._running: list[tuple[Unit, Count]] = []  # running forwards, and autograd's count when they began
        self._mixing: Mixing | None = None  # set while a method runs
        self._paused = False
        self._constant = False  # whether parameters stay as they are from one forward to the next
        self._backward: dict[Unit, Count] = {}  # units in backward, the outermost first, as above
        self._in_backward = False
        self._ending: weakref.ref | None = None  # what calls `_end_backward` at the end of the backward in progress
        self._outside = 0  # the number of forwards around this backward, as in a method
        self._last: list[Unit] = []  # in the order of the last forward
        self._began: list[Unit] = []  # those of the present forward so far
        self._ended: list[Unit] = []  # in the order in which they ended
        self._at = 0
        for unit in units:
            hook = functools.partial(self._before_forward, unit)
            after = functools.partial(self._after_forward, unit)
            for module in unit.modules:
                module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
                module.register_forward_hook(after, always_call=True)

    # Forward

    def _before_forward(self, unit: Unit, module: nn.Module, args: tuple, kwargs: dict):
        if torch.compiler.is_compiling():  # a graph break: the following code cannot be traced
            return torch._dynamo.disable(self._enter)(unit, args, kwargs)
        return self._enter(unit, args, kwargs)

    def _enter(self, unit: Unit, args: tuple, kwargs: dict):
        for tensor in tensors((args, kwargs)):
            _ = tensor.grad_fn  # for a view that was written to, the node is created now, before the unit's own nodes
        self._running.append((unit, _count()))
        unit.running += 1
        if self._mixing is not None and len(self._running) == 2:
            self._paused = self._mixing.pause()
        if in_graph_task():  # a checkpoint's recomputation
            self._recompute(unit)
        else:
            if len(self._running) == 1 and not self._constant:
                self._suspect(unit)
            if unit is self.root:
                self._start()
            else:
                self._began.append(unit)
        self._need(unit)
        unit.swap_in()
        if self.forward_prefetch and not self._in_backward:
            self._prefetch(self._upcoming(unit))
        if self.cast_inputs is not None:
            return cast(args, self.cast_inputs), cast(kwargs, self.cast_inputs)
        return None

    def _after_forward(self, unit: Unit, module: nn.Module, args: tuple, output):
        if torch.compiler.is_compiling():
            return torch._dynamo.disable(self._leave)(unit, output)
        return self._leave(unit, output)

    def _leave(self, unit: Unit, output) -> None:
        """The end of a forward; output is None after an exception."""
        if self._mixing is not None and len(self._running) == 2 and self._paused:
            self._mixing.resume()
        around = [*(self._backward.items() if in_graph_task() else ()), *self._running]
        self._running.pop()
        unit.running -= 1
        if not in_graph_task():
            self._ended.append(unit)
        if not unit.running:
            unit.swap_out()
        self._restore()
        found = not torch.is_grad_enabled() or self._follow(output, around)
        if not found and not isinstance(output, _PLAIN) and any(p.requires_grad for p in unit.parameters):
            raise ValueError(
                f"{unit.name} returned a {type(output).__name__}, in which no tensor was found, so its backward could "
                "not be followed; return tensors, in tuples, lists, dicts or dataclasses"
            )

    def _follow(self, output, around: list[tuple[Unit, Count]]) -> bool:
        """Puts hooks on the tensors that the last of these units created. Returns whether its result contains a
        tensor."""
        unit, since = around[-1]
        around = {other: count for other, count in around if other is not unit} | {unit: since}
        found = False
        for tensor in tensors(output):
            found = True
            # A view that is written to later loses its base; a hook on the base gives the same information.
            for made in (tensor, tensor._base) if tensor._is_view() else (tensor,):
                if made.requires_grad and _made_since(made, since):
                    made.register_hook(functools.partial(self._gradient_came, unit, around))
        return found

    def call(self, method: Callable, args: tuple, kwargs: dict):
        """A method of the root's module, which is treated as a forward of the root."""
        if self._mixing is not None:  # called by another method
            return method(*args, **kwargs)
        with self.constant():
            return self._call(method, args, kwargs)

    def _call(self, method: Callable, args: tuple, kwargs: dict):
        whole = {id(p.sharded): p.whole for p in self.root.parameters}

        def of_root(sharded: Tensor) -> Tensor:
            self._need(self.root)
            return whole[id(sharded)]

        before, running = self._running, [(self.root, _count())]
        self._running, self._mixing = list(running), Mixing(set(whole), of_root)
        self._mixing.resume()
        try:
            output = method(*args, **kwargs)
        finally:
            self._mixing.pause()
            self._running, self._mixing = before, None
        if torch.is_grad_enabled():
            self._follow(output, running)
        return output

    def _start(self) -> None:
        """A forward of the whole model."""
        first = 0 if self._mixing is None else 1  # a method
        if self._in_backward or len(self._running) > first + 1:
            running = [*self._running[:first], self._running[-1]]
            self.reset()  # the last forward or backward ended in an exception
            self._running, self.root.running = running, 1
        self._check()
        for unit in self.units:
            for flat in unit.flats:
                flat.adopt()
                flat.let_go()
        if self._began:
            self._last = self._began
        self._began, self._ended, self._at = [], [], 0

    @contextlib.contextmanager
    def constant(self) -> Iterator[None]:
        """Parameters do not change inside the block, so a forward may use those that the last one has gathered."""
        before, self._constant = self._constant, True
        if not before:
            self._suspect(self.root)
        try:
            yield
        finally:
            self._constant = before

    def _suspect(self, outermost: Unit) -> None:
        """A forward by the user begins: before it, code may have written through `.data`, numpy or a collective, which
        torch does not count, or to whole parameters inside the last forward. So everything is gathered again."""
        for unit in self.units:
            unit.suspect |= unit is outermost or outermost is self.root or outermost in unit.around

    def _upcoming(self, unit: Unit) -> list[Unit]:
        """The units that ran after this one in the last forward."""
        at = len(self._began) - 1
        if at < 0:
            return self._last[:1]
        return self._last[at + 1 : at + self.buffers] if at < len(self._last) and self._last[at] is unit else []

    # Parameters

    def _need(self, unit: Unit) -> None:
        """Make the parameters of a unit whole."""
        if not unit.flats:
            return
        if unit.slot is None:
            with torch.inference_mode(False):  # in case the first forward is in inference mode
                self._assign(unit)
        if not unit.is_fresh():
            unit.gather(self.group)
        unit.wait()

    def _restore(self) -> None:
        """A running unit gets back the slot that a unit inside it, or a finished recomputation, has taken."""
        around = [unit for unit, _ in self._running[-1:]]
        if self._in_backward and len(self._running) <= self._outside:
            around = [unit for unit in self._backward if unit.backward_reads]
        for unit in around:
            if unit.slot is not None and unit.slot.unit is not unit:
                self._need(unit)

    def _prefetch(self, units: list[Unit]) -> None:
        for unit in units:
            slot = unit.slot
            if slot is None or unit.is_fresh():
                continue
            holder = slot.unit
            if holder is None or holder is unit or not (holder.running or holder.works):
                unit.gather(self.group)

    def _assign(self, unit: Unit) -> None:
        """Chooses a slot at the first gather: the least recently used slot that no unit needs now.

        It must not belong to a unit inside or around this one, because these run together.
        """
        if unit.private:
            unit.bind(Slot(unit.nbytes, self._make))
            return
        together = {id(o.slot) for o in self.units if o in unit.around or unit in o.around}
        free = [slot for slot in self.slots if not slot.busy and id(slot) not in together]
        while len(free) < self.buffers:
            free.append(Slot(self.slot_bytes, self._make))
            self.slots.append(free[-1])
        slot = min(free, key=lambda slot: slot.turn)
        slot.turn = 1 + max(other.turn for other in self.slots)
        unit.bind(slot)

    # Backward

    def _begin_backward(self, outside: int) -> None:
        if not self._in_backward:
            self._in_backward, self._at, self._outside = True, len(self._ended), outside
            end = functools.partial(Engine._end_backward, self)
            self._ending = weakref.ref(end, _ended(weakref.ref(self)))
            torch.autograd.Variable._execution_engine.queue_callback(end)

    def _recompute(self, unit: Unit) -> None:
        """A unit runs forward within backward: units whose forward began after the running node have ended."""
        self._begin_backward(len(self._running) - 1)
        thread, now = threading.get_ident(), torch._C._current_autograd_node()._sequence_nr()
        for other, (counted_in, began) in reversed(self._backward.copy().items()):
            if counted_in == thread and began > now and other is not unit:
                self._after_backward(other)

    def _gradient_came(self, unit: Unit, around: dict[Unit, Count], gradient: Tensor) -> None:
        """The gradient of a unit's output is complete. around: the units that ran when it was made, and their begin."""
        if unit not in self._backward:  # not already started by another of its outputs
            self._begin_backward(len(self._running))
            for other in reversed(self._backward.copy()):
                if other not in around:
                    self._after_backward(other)
        for other, began in around.items():
            if other not in self._backward:
                self._before_backward(other, began)
            elif began < self._backward[other]:  # an earlier forward of it
                self._backward[other] = began

    def _before_backward(self, unit: Unit, began: Count) -> None:
        before = self._preceding(unit)
        self._backward[unit] = began
        unit.running += 1
        if unit.backward_reads:
            self._need(unit)
            unit.swap_in()  # for checkpoints inside the unit
        if self.backward_prefetch:
            self._prefetch(before)

    def _preceding(self, unit: Unit) -> list[Unit]:
        """The units after this one in backward."""
        for at in range(self._at - 1, -1, -1):
            if self._ended[at] is unit:
                self._skip(self._ended[at + 1 : self._at])
                self._at = at
                before = self._ended[max(at - self.buffers + 1, 0) : at]
                return [other for other in reversed(before) if other.backward_reads]
        return []

    def _skip(self, units: list[Unit]) -> None:
        """Units that this rank's loss does not depend on. On other ranks it may, and these wait for this rank."""
        if self.reduce_unused:
            for unit in reversed(units):
                if unit not in self._backward:
                    if unit.backward_reads:
                        self._need(unit)
                    self._reduce(unit)

    def _after_backward(self, unit: Unit) -> None:
        del self._backward[unit]
        unit.running -= 1
        if not unit.running:
            unit.swap_out()
        self._reduce(unit)
        self._restore()

    def _reduce(self, unit: Unit) -> None:
        for flat in unit.flats:
            gradients = []
            for p in flat.parameters:
                if p.whole.grad is not None:
                    if p.whole.grad.layout is not torch.strided:
                        raise ValueError(f"{p.name} has a sparse gradient, which is not averaged: make it dense")
                    gradients.append((p, p.whole.grad))
                    p.whole.grad = None
                elif self.reduce_unused and p.requires_grad:
                    gradients.append((p, torch.zeros_like(p.whole)))
            if self.dummy:
                torch._foreach_zero_([gradient for _, gradient in gradients])
            if not self.sync:
                self.reductions.keep(flat, gradients)
            elif gradients or flat.kept_of:
                self.reductions.begin(flat, gradients, self.zero == 1)

    def _end_backward(self) -> None:
        while self._backward:
            if len(self._backward) == 1:  # the root, if it is in this backward, comes last
                self._skip(self._ended[: self._at])
                self._at = 0
            self._after_backward(next(reversed(self._backward)))
        self._in_backward = False
        for unit in self.units:
            if unit.private and any(p.whole.grad is not None for p in unit.parameters):
                self._reduce(unit)  # through something else than its output
        self.reductions.end()
        for unit in self.units:
            unit.wait()  # for unused gathers
            for flat in unit.flats:
                flat.settle()
        self._check()

    def _check(self) -> None:
        """Checks that no gradient was missed."""
        for unit in self.units:
            stray = [p.name for p in unit.parameters if p.whole.grad is not None]
            if stray:
                self.reset()
                raise RuntimeError(
                    f"{stray[0]} of {unit.name} got a gradient, but not through what {unit.name} returned, so its "
                    "parameters may have been others' in backward; return every tensor that the loss depends on from "
                    "the module's forward, or leave the module out of units"
                )

    def reset(self) -> None:
        """After an exception: resets everything."""
        self._running, self._backward, self._in_backward = [], {}, False
        self.reductions.forget()
        for unit in self.units:
            unit.running, unit.stamp, unit.works = 0, None, []
            unit.swap_out()
            for p in unit.parameters:
                p.whole.grad = None


def _ended(engine: weakref.ref) -> Callable:
    """Called when a backward has ended or raised, and forgot what it would have called at its end."""

    def gone(ending):
        found = engine()
        if found is not None and found._ending is ending and found._in_backward:
            found.reset()  # parameters are shards again, for who saves them then

    return gone


def in_graph_task() -> bool:
    """Whether this runs inside of a backward."""
    return torch._C._current_graph_task_id() != -1


def _count() -> Count:
    """Autograd's present count of nodes."""
    return threading.get_ident(), torch.autograd._get_sequence_nr()


def _made_since(tensor: Tensor, since: Count) -> bool:
    """Whether autograd has created it since then, in this thread; False if it was only passed on."""
    node = tensor.grad_fn
    if node is None:  # a leaf, except for unread logits of hfnn
        return isinstance(tensor, Deferred)
    return node._sequence_nr() >= since[1]
