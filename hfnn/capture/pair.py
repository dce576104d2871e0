"""The two graphs of one kind of call: forward, and backward if gradients are wanted.

    call       inputs are copied into buffers of the graph's -> forward is replayed -> outputs are copied out of it
    backward   gradients of outputs are copied in -> backward is replayed -> gradients of inputs and parameters

Between a forward and its backward the pool belongs to the pair: `Pool.busy`. A `Ticket` is held by the autograd node of
the call, so the pool is free once backward has run or the graph is dropped.

Gradients of parameters are returned in the graphs' own memory, and autograd makes them the .grad. Nothing is copied
while nothing holds the previous ones. If something still holds them when the pool is used again (accumulation, a .grad
that was kept), they are moved out of the pool first. pytorch#181723 shows what happens otherwise.

Recording does not use the model's parameters but others with the same memory. torch's nodes that accumulate gradients
belong to the stream on which they were made. If one of them is still alive, because an earlier loss or DDP keeps it, it
would draw that stream into the graph.
"""

import contextlib
import weakref

import torch
from torch import nn

from hfnn.capture.answers import Answers, Other
from hfnn.capture.outputs import Outputs, Unfit, storage
from hfnn.capture.watch import Snapshot, autocast_as, autocast_state
from hfnn.core import parts
from hfnn.core.ask import answered
from hfnn.core.node import Function

HELD = "gradients of an earlier call are held by something else than .grad"
TRIES = 9  # recordings until the answers match the call: each trial finds one more

_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
_uses = torch._C._storage_Use_Count
_WRITTEN = (
    "a parameter or a buffer that the forward read was written to before backward. The backward of a captured call "
    "runs the forward once more if it is the second of a retained graph, or of other outputs than usual: for this, "
    "convert the model without capture=True."
)
_REFUSED = (
    "the second derivative of a captured call needs its forward once more, which cannot be repeated outside of the "
    "graph: it {}. Convert the model without capture=True for this."
)


class Pool:
    """The memory that all graphs of a model share. handed: the gradients in it that were returned last, or None."""

    def __init__(self):
        self._ticket = lambda: None
        self.handed: Gradients | None = None

    def busy(self) -> bool:
        """Whether a replayed forward still waits for its backward."""
        ticket = self._ticket()
        return ticket is not None and ticket.waits

    def free(self) -> bool:
        """Move returned gradients out of the pool; returns whether nothing holds memory of the pool any more."""
        if self.handed is not None and self.handed.moved():
            self.handed = None
        return self.handed is None

    def issue(self, state) -> "Ticket":
        ticket = Ticket(state)
        self._ticket = weakref.ref(ticket)
        return ticket


class Ticket:
    """One forward's claim on the pool. state: of the device's generator before it; read: what it read besides its
    inputs and trained parameters, which torch checks itself; unread: weak references to the products of its logits."""

    __slots__ = ("__weakref__", "_read", "fresh", "state", "unread", "waits")

    def __init__(self, state):
        self.state, self.fresh, self.waits, self._read, self.unread = state, True, True, (), []

    def read(self, tensors) -> None:
        self._read = [(t, parts.version(t)) for t in tensors]

    def look(self) -> None:
        """Before the forward runs again. Raises RuntimeError."""
        if any(parts.version(t) != version for t, version in self._read):
            raise RuntimeError(_WRITTEN)


class Gradients:
    """The gradients of parameters, in the memory of graphs."""

    def __init__(self, parameters, tensors):
        self._of = [(p, g, storage(g)) for p, g in zip(parameters, tensors, strict=True) if g is not None]
        self._unheld = [_uses(key) for _, _, key in self._of]

    def held(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """(parameter, gradient) for gradients that are still held."""
        return [(p, g) for (p, g, key), n in zip(self._of, self._unheld, strict=True) if _uses(key) > n]

    def moved(self) -> bool:
        """Give each .grad its own memory. If anything else holds a gradient, do nothing and return False."""
        held = [(p, key, _uses(key) - n) for (p, _, key), n in zip(self._of, self._unheld, strict=True)]
        held = [(p, key, more) for p, key, more in held if more > 0]
        if any(more > 1 or type(p.grad) is not torch.Tensor or storage(p.grad) != key for p, key, more in held):
            return False
        for p, _, _ in held:
            p.grad.data = p.grad.detach().clone()
        return True


class Pair:
    """Graphs for calls with one key.

    tensors: the tensors of one such call; used: the indices of the differentiable outputs that a loss depends on;
    answers: the known answers of the calls that it is for. Raises Unfit, or what recording raises.
    """

    def __init__(self, model: nn.Module, kind, tensors, used: set[int], answers: tuple = (), trial: bool = True):
        self._model, self._kind = weakref.ref(model), kind
        self._backend, self._pool = kind.backend, kind.pool
        self.snapshot, self.used = Snapshot(model), used
        self._inputs = [_buffer(t) for t in tensors]
        self._record(model, answers, trial)

    def _record(self, model, answers, trial) -> None:
        if any(t.layout is not torch.strided for t in self._kind.writes):
            raise Unfit("its forward writes to a sparse buffer")
        grad = torch.is_grad_enabled()
        trained = [p for p in model.parameters() if p.requires_grad] if grad else []
        self._aliases = {id(p): _alias(p) for p in trained}
        wanted = [t for t in self._inputs if grad and t.requires_grad] + [*self._aliases.values()]
        written = {id(t) for t in self._kind.writes}
        self._others = [p for p in model.parameters() if id(p) not in self._aliases]
        self._others += [t for t in model.buffers() if id(t) not in written]
        self._before = [t.detach().clone() for t in self._kind.writes]  # for each forward, in case it runs again
        others = (*self._inputs, *model.parameters(), *model.buffers())
        for _ in range(TRIES):
            self._answers, self._graph, self._outputs = Answers(self._backend, answers), None, None
            self._graph = self._backend.record(lambda: Outputs(self._run(self._inputs), others))
            self._outputs = self._graph.results
            try:
                if trial and self._answers:
                    self._launch_unseen()
                break
            except Other as other:
                answers = other.answers
        else:
            raise Unfit("what it asks of its tensors is another each time")
        outputs = self._outputs
        self._plain = [i for i, t in enumerate(outputs.tensors) if not t.requires_grad]
        differentiable = [i for i, t in enumerate(outputs.tensors[: outputs.shown]) if t.requires_grad]
        self._trained, self._of_inputs, self._backward = trained, len(wanted) - len(trained), None
        if differentiable and wanted:
            self.used = {i for i in differentiable if i in self.used} or {differentiable[0]}
            self._record_backward(wanted)
        # From here on nothing holds the recorded autograd graph.
        self._graph.results = None
        self._static = outputs.tensors = [t.detach() for t in outputs.tensors]

    def _record_backward(self, wanted) -> None:
        self._behind = self._kind.behind or [(device, False, dtype) for device, _, dtype in self._kind.ambient]
        self._dys = [torch.empty_like(self._outputs.tensors[i]) for i in sorted(self.used)]

        def backward():
            outputs = [self._graph.results.tensors[i] for i in sorted(self.used)]
            with autocast_as(self._behind), self._instead():  # checkpoints call modules again
                found = torch.autograd.grad(outputs, wanted + self._trained, self._dys, allow_unused=True)
            if any(g is not None for g in found[len(wanted) :]):
                raise Unfit("it reads parameters by other ways than its modules' attributes")
            return found[: len(wanted)]

        self._backward = self._backend.record(backward)
        self._grads = [None if g is None else g.detach() for g in self._backward.results]
        self._backward.results = None
        self._backend.drain()  # or a gradient would count as held by what always holds it
        self._handed = Gradients(self._trained, self._grads[self._of_inputs :])

    @contextlib.contextmanager
    def _instead(self):
        """Replace the model's trained parameters everywhere by others with the same memory."""
        places = [*self.snapshot.places(self._aliases)]
        before = [part[at] for part, at in places]
        for part, at in places:
            part[at] = self._aliases[id(part[at])]
        try:
            yield
        finally:
            for (part, at), value in zip(places, before, strict=True):
                part[at] = value

    def _run(self, tensors):
        args, kwargs = self._kind.template.filled(tensors)
        self._answers.begin()
        with autocast_as(self._kind.ambient), self._instead(), answered(self._answers):
            return self._kind.forward(self._model(), *args, **kwargs)

    def agrees(self, answers: tuple) -> bool:
        """Whether it fits calls with these first answers."""
        return tuple(self._answers.expected[: len(answers)]) == answers

    def replay(self, call):
        """The outputs of a call. Raises Other, and Unfit while memory of the pool is held."""
        if not self._pool.free():
            raise Unfit(HELD)
        with torch.no_grad():
            for static, given in zip(self._inputs, call.tensors, strict=True):
                static.copy_(given)
        if self._backward is None:
            outputs = self.run_forward()
        else:
            ticket = self._pool.issue(self._backend.generator.get_state() if self._kind.draws else None)
            inputs = [t for t in call.tensors if t.requires_grad] + self._trained
            outputs = _Replay.apply(self, ticket, *inputs)
        if self._kind.moved:
            torch.autograd.graph.increment_version(self._kind.moved)
        nest, products = self._outputs.filled(outputs)
        if self._backward is not None:
            ticket.read(self._others)
            ticket.unread = [weakref.ref(product) for product in products]
        return nest

    # What the node calls

    def run_forward(self) -> tuple:
        before = self._state() if self._answers else None
        if self._before:
            torch._foreach_copy_(self._before, [*self._kind.writes])
        self._launch()
        outputs = tuple(t.clone() for t in self._static)
        if before is not None:
            try:
                self._answers.check()
            except Other:
                self._restore(before)
                raise
        return outputs

    def _launch(self) -> None:
        self._answers.expect()
        self._graph.replay()

    def _state(self) -> tuple:
        """The state that a forward changes: the generator's state, if it draws, and buffers."""
        state = self._backend.generator.get_state() if self._kind.draws else None
        return state, [t.clone() for t in self._kind.writes]

    def _restore(self, before: tuple) -> None:
        if before[0] is not None:
            self._backend.generator.set_state(before[0])
        for t, value in zip(self._kind.writes, before[1], strict=True):
            t.data.copy_(value)

    def _launch_unseen(self) -> None:
        """A forward that changes nothing. Raises Other."""
        before = self._state()
        try:
            self._launch()
            if self._answers:
                self._answers.check()
        finally:
            self._restore(before)

    def run_backward(self, dys, ticket: Ticket) -> list:
        """The gradients of inputs and parameters from those of the outputs in use."""
        for static, dy in zip(self._dys, [dy for dy in dys if dy is not None], strict=True):
            static.copy_(dy)
        held = [] if self._pool.free() else [(g, g.clone()) for _, g in self._pool.handed.held()]
        if not ticket.fresh:
            self._run_again(ticket)
        ticket.fresh = False
        self._backward.replay()
        found = [
            None if g is None else g.clone() if held or at < self._of_inputs else g.detach()
            for at, g in enumerate(self._grads)
        ]
        for g, before in held:
            g.copy_(before)
        if not held:
            self._pool.handed = self._handed
        return found

    def _run_again(self, ticket: Ticket) -> None:
        """Forward once more, with the same random numbers, for the backward of a retained graph."""
        ticket.look()
        now = self._backend.generator.get_state()
        buffers = [t.clone() for t in self._kind.writes]
        self._restore((ticket.state, self._before))
        self._launch_unseen()
        self._restore((None if ticket.state is None else now, buffers))

    def is_for(self, used: set[int]) -> bool:
        """Whether its backward is for these outputs and for the present autocast state."""
        return used == self.used and tuple(self._behind) == autocast_state()

    def of_outputs(self, used: set[int], ticket: Ticket) -> "Pair":
        """The pair for losses of other outputs, on the present inputs; from now on it comes first."""
        ticket.look()
        self._kind.behind = autocast_state()
        with torch.enable_grad():
            pair = Pair(self._model(), self._kind, self._inputs, used, tuple(self._answers.expected), trial=False)
        pair._before = self._before
        self._kind.pairs[:] = [pair, *(other for other in self._kind.pairs if other is not self)]
        return pair

    def by_autograd(self, dys, inputs) -> list:
        """The gradients with a graph, by a forward outside of the recording, on the inputs of the call."""
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
    """The node of a captured call. It saves tensors so that torch detects writes to them."""

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
            if not pair.is_for(given):
                pair, ticket.fresh = pair.of_outputs(given, ticket), False
            grads = pair.run_backward(dys, ticket)
        ticket.waits = _keeps_graph()
        for ref in ticket.unread:
            if (product := ref()) is not None:
                product.keep_after_backward()
        return None, None, *grads


def _buffer(t: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    return made.copy_(t.detach()).requires_grad_(t.requires_grad)


def _alias(p: nn.Parameter) -> nn.Parameter:
    """Another parameter with the same memory."""
    made = nn.Parameter(p.detach())
    vars(made).update(vars(p))
    return made
