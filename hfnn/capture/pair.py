"""The two graphs of one kind of call: forward, and backward where gradients are wanted.

    call       inputs are copied into buffers of the graph's -> forward is replayed -> outputs are copied out of it
    backward   gradients of outputs are copied in -> backward is replayed -> gradients of inputs and parameters

Between a forward and its backward the pool belongs to the pair: `Pool.busy`. A `Ticket` is held by the autograd node of
the call, so the pool is free once backward has run or the graph is dropped.

Gradients of parameters are handed out as they lie in the graph's memory, which autograd then makes the .grad: nothing
is copied while nobody holds the last ones. Where somebody does (accumulation, a .grad that was kept), what is held
stays, and a copy is handed out. See pytorch#181723 for what comes of it otherwise.
"""

import contextlib
import weakref

import torch
from torch import nn

from hfnn.capture.outputs import Outputs, storage
from hfnn.capture.watch import Snapshot
from hfnn.core.function import Function

_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
_uses = torch._C._storage_Use_Count
_REFUSED = (
    "the second derivative of a captured call needs its forward once more, which cannot be repeated outside of the "
    "graph: it {}. Convert the model without capture=True for this."
)


class Pool:
    """The memory that all graphs of a model share."""

    def __init__(self):
        self._ticket = lambda: None
        self.trained = weakref.WeakSet()  # pairs with a backward

    def busy(self) -> bool:
        """Whether a forward that was replayed still waits for its backward."""
        ticket = self._ticket()
        return ticket is not None and ticket.waits

    def issue(self, state) -> "Ticket":
        ticket = Ticket(state)
        self._ticket = weakref.ref(ticket)
        return ticket


class Ticket:
    """One forward's claim on the pool. state: of the device's generator before it."""

    __slots__ = ("__weakref__", "fresh", "state", "waits")

    def __init__(self, state):
        self.state, self.fresh, self.waits = state, True, True


class Pair:
    """Graphs for calls of one key.

    tensors: those of one such call; used: which differentiable outputs a loss depends on, by their number. Raises
    Unfit, or what recording raises.
    """

    def __init__(self, model: nn.Module, kind, tensors, used: set[int]):
        self._model, self._kind = weakref.ref(model), kind
        self._backend, self._pool = kind.backend, kind.pool
        self.snapshot, self.used = Snapshot(model), used
        self._inputs = [_buffer(t) for t in tensors]
        self._record(model)

    def _record(self, model) -> None:
        grad = torch.is_grad_enabled()
        trained = [p for p in model.parameters() if p.requires_grad] if grad else []
        wanted = [t for t in self._inputs if grad and t.requires_grad] + trained
        others = (*self._inputs, *model.parameters(), *model.buffers())
        self._graph = self._backend.record(lambda: Outputs(self._run(self._inputs), others))
        self._outputs = outputs = self._graph.results
        self._plain = [i for i, t in enumerate(outputs.tensors) if not t.requires_grad]
        differentiable = [i for i, t in enumerate(outputs.tensors[: outputs.shown]) if t.requires_grad]
        self._trained, self._of_inputs, self._backward = trained, len(wanted) - len(trained), None
        if differentiable and wanted:
            self.used = {i for i in differentiable if i in self.used} or {differentiable[0]}
            self._record_backward(wanted)
        # From here on nothing holds the graph of autograd that was recorded.
        self._graph.results = None
        self._static = outputs.tensors = [t.detach() for t in outputs.tensors]

    def _record_backward(self, wanted) -> None:
        self._dys = [torch.empty_like(self._outputs.tensors[i]) for i in sorted(self.used)]

        def backward():
            outputs = [self._graph.results.tensors[i] for i in sorted(self.used)]
            with _without_hooks(wanted):
                return torch.autograd.grad(outputs, wanted, self._dys, allow_unused=True)

        self._backward = self._backend.record(backward)
        self._grads = [None if g is None else g.detach() for g in self._backward.results]
        self._backward.results = None
        self._memory = [None if g is None else storage(g) for g in self._grads]
        self._unheld = [None if key is None else _uses(key) for key in self._memory]
        self._pool.trained.add(self)

    def _run(self, tensors):
        args, kwargs = self._kind.template.filled(tensors)
        with self._kind.ambient():
            return self._kind.forward(self._model(), *args, **kwargs)

    def replay(self, call):
        """The outputs of a call."""
        with torch.no_grad():
            for static, given in zip(self._inputs, call.tensors, strict=True):
                static.copy_(given)
        if self._backward is None:
            self._graph.replay()
            outputs = [t.clone() for t in self._static]
        else:
            ticket = self._pool.issue(self._backend.generator.get_state() if self._kind.draws else None)
            inputs = [t for t in call.tensors if t.requires_grad] + self._trained
            outputs = _Replay.apply(self, ticket, *inputs)
        if self._kind.moved:
            torch.autograd.graph.increment_version(self._kind.moved)
        return self._outputs.filled(outputs)

    # What the node calls

    def run_forward(self) -> tuple:
        self._graph.replay()
        return tuple(t.clone() for t in self._static)

    def run_backward(self, dys) -> list:
        """The gradients of inputs and parameters from those of the outputs in use."""
        for static, dy in zip(self._dys, [dy for dy in dys if dy is not None], strict=True):
            static.copy_(dy)
        held = [
            (at, self._grads[at].clone())
            for at, key in enumerate(self._memory)
            if key is not None and at >= self._of_inputs and _uses(key) > self._unheld[at]
        ]
        self._backward.replay()
        alone = len(self._pool.trained) == 1
        found = [
            None if g is None else g.clone() if at < self._of_inputs or not alone else g.detach()
            for at, g in enumerate(self._grads)
        ]
        for at, before in held:
            found[at] = self._grads[at].clone()
            self._grads[at].copy_(before)
        return found

    def run_again(self, ticket: Ticket) -> None:
        """Forward once more, with the numbers that it drew, for the backward of a graph that was kept."""
        generator, before = self._backend.generator, [t.clone() for t in self._kind.writes]
        if ticket.state is not None:
            now = generator.get_state()
            generator.set_state(ticket.state)
        self._graph.replay()
        if ticket.state is not None:
            generator.set_state(now)
        for t, value in zip(self._kind.writes, before, strict=True):
            t.data.copy_(value)

    def of_outputs(self, used: set[int]) -> "Pair":
        """The pair for losses of other outputs, on the inputs that are here; from now on it comes first."""
        with torch.enable_grad():
            pair = Pair(self._model(), self._kind, self._inputs, used)
        self._kind.pair = pair
        return pair

    def by_autograd(self, dys, inputs) -> list:
        """The gradients with a graph, by a forward outside of this one, on the inputs that the call had."""
        if self._kind.draws or self._kind.writes:
            raise RuntimeError(_REFUSED.format("draws random numbers" if self._kind.draws else "writes to buffers"))
        given = iter(inputs)
        tensors = [next(given) if t.requires_grad else t.clone() for t in self._inputs]
        with torch.enable_grad():
            outputs = Outputs(self._run(tensors), ()).tensors
        pairs = [(y, dy) for y, dy in zip(outputs, dys, strict=True) if dy is not None]
        ys, dys = zip(*pairs, strict=True)
        return [*torch.autograd.grad(ys, inputs, dys, allow_unused=True, create_graph=True)]


class _Replay(Function):
    """The node of a captured call. Its saved tensors are there for torch to see whether they were written to."""

    @staticmethod
    def forward(ctx, pair, ticket, *inputs):
        ctx.pair, ctx.ticket = pair, ticket
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        outputs = pair.run_forward()
        ctx.mark_non_differentiable(*(outputs[i] for i in pair._plain))
        return outputs

    @staticmethod
    def backward(ctx, *dys):
        pair, ticket, inputs = ctx.pair, ctx.ticket, ctx.saved_tensors
        given = {i for i, dy in enumerate(dys) if dy is not None}
        if not given:
            return (None,) * (2 + len(inputs))
        if torch.is_grad_enabled():
            grads = pair.by_autograd(dys, inputs)
        else:
            if given != pair.used:
                pair, ticket.fresh = pair.of_outputs(given), False
            if not ticket.fresh:
                pair.run_again(ticket)
            ticket.fresh = False
            grads = pair.run_backward(dys)
        ticket.waits = _keeps_graph()
        return None, None, *grads


def _buffer(t: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    return made.copy_(t.detach()).requires_grad_(t.requires_grad)


@contextlib.contextmanager
def _without_hooks(tensors):
    """Hooks on parameters run when the gradients reach them, and not in the graph."""
    before = [(t, t._backward_hooks) for t in tensors if t._backward_hooks]
    for t, _ in before:
        t._backward_hooks = None
    try:
        yield
    finally:
        for t, hooks in before:
            t._backward_hooks = hooks
