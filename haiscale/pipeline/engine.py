"""The step of a rank: it runs its list of actions, receives their inputs and sends their results.

The lists are those of actions.py. The engine does not depend on the schedule: every schedule that `simulate.check`
accepts runs, with any number of chunks on a rank.
"""

import contextlib
import functools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from haiscale.fsdp import FSDP
from haiscale.pipeline import backward, batch
from haiscale.pipeline.actions import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Schedule
from haiscale.pipeline.clock import Clock
from haiscale.pipeline.messages import Receiver, Sender, directed_groups
from hfnn.memory import saved_bytes

GRADIENT = "gradient"
GATHERED = (FSDP, FSDPModule)  # haiscale's, and torch's
CHECKPOINTS = ("never", "except_last", "always")


@dataclass
class Work:
    """The work of one call: microbatches' inputs (first chunk), labels (last chunk), and options."""

    inputs: list[tuple] | None
    labels: list[tuple] | None
    criterion: Callable | None
    keep_outputs: bool
    average: bool = True  # average gradients over the ranks of a wrapper inside, DDP or FSDP
    outputs: list = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)

    @functools.cached_property
    def shares(self) -> list[float]:
        return batch.shares(self.labels)


@dataclass
class InFlight:
    """The state of one microbatch on one chunk, between its forward and the end of its backward."""

    inputs: list[Tensor | None]
    roots: list | None  # None: the forward runs again
    state: list[Tensor] | None = None  # generator states for running it again
    weights: backward.Weights | None = None


def message(schedule: Schedule, action: Action) -> tuple[str, int, int] | None:
    """(kind, chunk, microbatch) that an action sends to another chunk; None if it sends nothing."""
    kind, chunk, microbatch = action
    if kind == FORWARD and chunk + 1 < len(schedule.placement):
        return FORWARD, chunk + 1, microbatch
    if kind in (BACKWARD, INPUT) and chunk:
        return GRADIENT, chunk - 1, microbatch
    return None


def incoming(schedule: Schedule, rank: int) -> dict[int, list[tuple[str, int, int]]]:
    """{sending rank: its messages to `rank`, in sending order}."""
    found = defaultdict(list)
    for peer, order in enumerate(schedule.orders):
        given = [message(schedule, action) for action in order if peer != rank]
        for what in given:
            if what and schedule.placement[what[1]] == rank:
                found[peer].append(what)
    return dict(found)


class Engine:
    """Runs the chunks of this rank, `modules`, {chunk: module}, with schedules of one placement."""

    def __init__(self, modules: dict[int, nn.Module], schedule: Schedule, group, device: torch.device, checkpoint: str):
        self.modules, self.group, self.device, self.checkpoint = modules, group, device, checkpoint
        self.rank, self.clock = dist.get_rank(group), Clock(device)
        self.activations: dict[int, int] = {}  # bytes that a microbatch keeps on each chunk, from the first step
        sources = {r: dist.get_global_rank(group, r) for r in incoming(schedule, self.rank)}
        targets = {r: dist.get_global_rank(group, r) for r in _targets(schedule, self.rank)}
        wires = directed_groups(group, set(sources.values()), set(targets.values()), device)
        me = dist.get_rank()
        self._receivers = {r: Receiver(peer, device, wires[peer, me]) for r, peer in sources.items()}
        self._senders = {r: Sender(peer, device, wires[me, peer]) for r, peer in targets.items()}

    def run(self, schedule: Schedule, work: Work) -> None:
        """Runs all actions of this rank; `work` gets its outputs and losses. Raises what modules and the backend
        raise."""
        self.schedule, self.work = schedule, work
        self._last = len(schedule.placement) - 1
        self._kept: dict[tuple[int, int], InFlight] = {}
        self._arrived: dict[tuple[str, int, int], list] = {}
        self._coming = {peer: deque(messages) for peer, messages in incoming(schedule, self.rank).items()}
        self._source = {what: peer for peer, messages in self._coming.items() for what in messages}
        self._final = _final(schedule, self.rank)
        for peer in self._coming:
            self._receivers[peer].post()
        for module in self.modules.values():
            if hasattr(module, "set_requires_gradient_sync"):
                module.set_requires_gradient_sync(False)
        run = {FORWARD: self._forward, BACKWARD: self._backward, INPUT: self._backward, WEIGHT: self._weight}
        self.clock.begin()
        with contextlib.ExitStack() as stack:
            for module in self.modules.values():
                if isinstance(module, FSDP):
                    stack.enter_context(module.constant_parameters())
            for action in schedule.orders[self.rank]:
                run[action.kind](action)
        for sender in self._senders.values():
            sender.finish()
        self.work = None  # the caller owns its outputs

    # Forward

    def _forward(self, action):
        _, chunk, microbatch = action
        inputs = self._take(FORWARD, chunk, microbatch) if chunk else list(self.work.inputs[microbatch])
        grad = torch.is_grad_enabled()
        again = grad and self._recomputes(microbatch)
        kept = InFlight(inputs, None, _random_state(self.device) if again else None)
        # Not the first microbatch: it may include casts that all share.
        seen = chunk in self.activations or not grad or microbatch < min(1, self.schedule.microbatches - 1)
        with self.clock.span(action), backward.without_graph() if again else contextlib.nullcontext():
            output = self._compute(chunk, microbatch, inputs) if seen else self._weigh(chunk, microbatch, inputs)
        if chunk == self._last:
            self.work.losses += [loss.detach() for loss in output]
        if grad:
            kept.roots = None if again else backward.edges(output)
            self._kept[chunk, microbatch] = kept
        if chunk != self._last:
            self._give(action, self._wanting(output, inputs, chunk) if again else output)

    def _wanting(self, output, inputs, chunk):
        """Outputs of a forward without a graph; they record whether they will have one when it runs again."""
        leaves = (*self.modules[chunk].parameters(), *(x for x in inputs if isinstance(x, Tensor)))
        if not any(x.requires_grad for x in leaves):
            return output
        floats = [isinstance(y, Tensor) and (y.is_floating_point() or y.is_complex()) for y in output]
        return [y.detach().requires_grad_() if wants else y for y, wants in zip(output, floats, strict=True)]

    def _compute(self, chunk, microbatch, inputs):
        """The roots of backward: the tensors for the next chunk, or only the loss."""
        output = self.modules[chunk](*inputs)
        if chunk != self._last:
            return _tensors(output, chunk)
        work = self.work
        if work.keep_outputs and len(work.outputs) == microbatch:  # not the second time
            work.outputs.append(batch.detached(output))
        if not work.criterion:
            return []
        loss = work.criterion(output, *work.labels[microbatch])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ValueError(f"criterion gave {given}: give the mean loss of the microbatch, a tensor of one element")
        return [loss]

    def _weigh(self, chunk, microbatch, inputs):
        """As `_compute`, and records how much memory it keeps."""
        result = []

        def run():
            result.append(self._compute(chunk, microbatch, inputs))
            return result

        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated(self.device)
            run()
            self.activations[chunk] = max(torch.cuda.memory_allocated(self.device) - before, 0)
        else:
            self.activations[chunk] = saved_bytes(run).total
        if self._recomputes(microbatch):
            self.activations[chunk] = sum(x.nbytes for x in inputs if isinstance(x, Tensor))
        return result[0]

    def _recomputes(self, microbatch):
        last = microbatch == self.schedule.microbatches - 1
        return self.checkpoint == "always" or (self.checkpoint == "except_last" and not last)

    # Backward

    def _backward(self, action):
        kind, chunk, microbatch = action
        kept = self._kept[chunk, microbatch]
        gradients = None if chunk == self._last else self._take(GRADIENT, chunk, microbatch)
        with self.clock.span(action):
            roots = self._recompute(action, kept) if kept.roots is None else kept.roots
            if gradients is None:
                gradients = [torch.full_like(self.work.losses[microbatch], self.work.shares[microbatch])]
            final = self._final[chunk] == microbatch
            # There are no gradients before the first chunk to wait for. If parameters are gathered for a backward,
            # their gradients must be complete at its end.
            if kind == BACKWARD or not chunk or isinstance(self.modules[chunk], GATHERED):
                with self._averaging(chunk, final):
                    backward.whole(roots, gradients)
            else:
                kept.weights = backward.split(roots, gradients, kept.inputs, hold=final)
        if chunk:
            self._give(action, [x.grad if isinstance(x, Tensor) else None for x in kept.inputs])
        if kind == BACKWARD:
            del self._kept[chunk, microbatch]
        else:
            kept.inputs, kept.roots = [], []

    def _recompute(self, action, kept):
        """The forward once more, with a graph and with the random numbers of the first time."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.enable_grad():
            _set_random_state(kept.state, self.device)
            return backward.edges(self._compute(action.chunk, action.microbatch, kept.inputs))

    def _weight(self, action):
        kept = self._kept.pop((action.chunk, action.microbatch))
        with self.clock.span(action):
            if kept.weights is not None:
                with self._averaging(action.chunk, self._final[action.chunk] == action.microbatch):
                    kept.weights.run()

    @contextlib.contextmanager
    def _averaging(self, chunk, final):
        """Wrappers average over their ranks in the last backward of a chunk's step, and accumulate in those before."""
        module, now = self.modules[chunk], final and self.work.average
        with contextlib.ExitStack() as stack:
            if hasattr(module, "set_requires_gradient_sync"):
                module.set_requires_gradient_sync(now)
            elif hasattr(module, "no_sync") and not now:
                stack.enter_context(module.no_sync())
            yield

    # Between chunks

    def _take(self, what, chunk, microbatch):
        """The tensors sent by another chunk: of this rank immediately, otherwise as soon as they arrive."""
        key = (what, chunk, microbatch)
        while key not in self._arrived:
            peer = self._source[key]
            coming = self._coming[peer]
            found = coming.popleft()
            self._arrived[found] = self._receivers[peer].receive(last=not coming)
        return self._arrived.pop(key)

    def _give(self, action, tensors):
        what = message(self.schedule, action)
        target = self.schedule.placement[what[1]]
        if target == self.rank:
            self._arrived[what] = [None if x is None else x.detach().requires_grad_(x.requires_grad) for x in tensors]
        else:
            self._senders[target].send(tensors)


def _final(schedule, rank):
    """{chunk: the microbatch whose gradients of parameters come last}."""
    return {chunk: microbatch for kind, chunk, microbatch in schedule.orders[rank] if kind in (BACKWARD, WEIGHT)}


def _targets(schedule, rank):
    given = [message(schedule, action) for action in schedule.orders[rank]]
    return {schedule.placement[what[1]] for what in given if what} - {rank}


def _tensors(output, chunk) -> list:
    output = list(output) if isinstance(output, (tuple, list)) else [output]
    wrong = [type(y).__name__ for y in output if not (y is None or isinstance(y, Tensor))]
    if wrong:
        raise ValueError(
            f"chunk {chunk} gives the next one a {wrong[0]}: between chunks give a tensor, or a tuple of tensors "
            "and None"
        )
    return output


def _random_state(device) -> list[Tensor]:
    state = [torch.get_rng_state()]
    return [*state, torch.cuda.get_rng_state(device)] if device.type == "cuda" else state


def _set_random_state(state: Sequence[Tensor], device) -> None:
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.cuda.set_rng_state(state[1], device)
