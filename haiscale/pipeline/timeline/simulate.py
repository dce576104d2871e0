"""The cost of a schedule, without running it: start and end of each action, bubbles, memory, and whether it can run.

Time: a rank runs its actions in order, each as soon as the rank is free and the action's inputs have arrived. An action
that sends to another rank takes `sending` additional time on its rank. The message arrives `latency` after its end, and
messages do not delay each other. A whole backward takes `backward`, by default the sum of its two parts, and its
gradient is sent at its end.

Memory: the activations of a microbatch on a chunk are kept from the start of its forward to the end of its
backward-weight (or whole backward). Weights, gradients and messages in flight are not counted.

Units are those of the costs given; integers and fractions give exact results.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

from haiscale.pipeline.actions import BACKWARD, FORWARD, INPUT, KINDS, WEIGHT, Action, Schedule

PerChunk = Real | Sequence[Real]


@dataclass(frozen=True)
class Costs:
    """Times of the parts of a step, and sizes of activations: one number for all chunks, or one for each.

    Attributes:
        forward: Time of a forward of one microbatch.
        input: Time of the part of a backward that computes gradients of inputs.
        weight: Time of the part that computes gradients of weights.
        latency: From the end of a sending until the receiver has the message.
        activation: What one microbatch keeps from forward to backward.
        sending: Time that a message takes on the sending rank.
        backward: Time of a whole backward; None: that of both parts.
    """

    forward: PerChunk = 1
    input: PerChunk = 1
    weight: PerChunk = 1
    latency: Real = 0
    activation: PerChunk = 1
    sending: Real = 0
    backward: PerChunk | None = None

    def each(self, name: str, chunks: int) -> tuple[Real, ...]:
        """A field, for each chunk. Raises ValueError unless it is a number of at least 0, or one per chunk."""
        given = getattr(self, name)
        each = tuple(given) if isinstance(given, Sequence) else (given,) * chunks
        if len(each) == chunks and all(isinstance(cost, Real) and 0 <= cost < math.inf for cost in each):
            return each
        raise ValueError(
            f"Costs({name}={given!r}) is not accepted: give a number of at least 0, or one for each of {chunks} chunks"
        )

    def times(self, chunks: int) -> dict[str, tuple[Real, ...]]:
        """{kind: its time on each chunk}."""
        forward, inputs, weight = (self.each(name, chunks) for name in ("forward", "input", "weight"))
        whole = tuple(map(sum, zip(inputs, weight, strict=True)))
        if self.backward is not None:
            whole = self.each("backward", chunks)
        return {FORWARD: forward, BACKWARD: whole, INPUT: inputs, WEIGHT: weight}


class Span(NamedTuple):
    """An action, and when it began and ended."""

    action: Action
    start: Real
    end: Real


@dataclass(frozen=True)
class Timeline:
    """A run of a schedule, predicted or measured.

    Attributes:
        schedule: What ran.
        spans: For each rank, its actions in order.
        peak: For each rank, the most activations kept at a time, in units of `Costs.activation`.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    peak: tuple[Real, ...]

    @property
    def makespan(self) -> Real:
        """From the first start to the last end on any rank."""
        every = [span for spans in self.spans for span in spans]
        return max(span.end for span in every) - min(span.start for span in every)

    def period(self, between: PerChunk = 0) -> Real:
        """The time from step to step if no rank waits for others between steps: that of the busiest rank.

        Args:
            between: Time that a rank takes from a step to the next; one number for all ranks, or one for each.
        """
        each = tuple(between) if isinstance(between, Sequence) else (between,) * len(self.spans)
        return max(spans[-1].end - spans[0].start + more for spans, more in zip(self.spans, each, strict=True))

    @property
    def bubble(self) -> tuple[float, ...]:
        """For each rank, the idle part of the makespan."""
        makespan = self.makespan
        busy = [sum(span.end - span.start for span in spans) for spans in self.spans]
        return tuple((makespan - time) / makespan if makespan else 0.0 for time in busy)


def predict(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """The timeline of a schedule.

    Args:
        schedule: What runs.
        costs: None: each part takes 1, so a backward takes twice a forward.

    Raises:
        ValueError: The schedule cannot run, and why: actions that are missing, repeated or on the wrong rank, messages
            received in another order than sent, or ranks that wait for each other.

    >>> schedule = haiscale.pipeline.SCHEDULES["1f1b"](2, 3)  # stages, microbatches
    >>> haiscale.pipeline.predict(schedule).bubble
    (0.25, 0.25)
    """
    costs, chunks = costs or Costs(), len(schedule.placement)
    times, sizes = costs.times(chunks), costs.each("activation", chunks)
    (latency,), (sending,) = costs.each("latency", 1), costs.each("sending", 1)
    check(schedule)
    spans = _run(schedule, times, latency, sending)
    return Timeline(schedule, spans, tuple(peak(order, sizes) for order in schedule.orders))


def check(schedule: Schedule) -> None:
    """Raises ValueError unless each action occurs once, on its rank, and messages are received in sending order."""
    _check_complete(schedule)
    _check_messages(schedule)


def _check_complete(schedule):
    found = defaultdict(list)
    for rank, order in enumerate(schedule.orders):
        for action in order:
            kind, chunk, microbatch = action
            known = kind in KINDS and 0 <= chunk < len(schedule.placement) and 0 <= microbatch < schedule.microbatches
            if not known or schedule.placement[chunk] != rank:
                raise ValueError(f"rank {rank} cannot run {action}: it has chunks {schedule.chunks(rank)}")
            found[chunk, microbatch].append(kind)
    inference = all(kinds == [FORWARD] for kinds in found.values())
    accepted = [[FORWARD]] if inference else [[BACKWARD, FORWARD], [FORWARD, INPUT, WEIGHT]]
    for chunk, rank in enumerate(schedule.placement):
        for microbatch in range(schedule.microbatches):
            kinds = sorted(found[chunk, microbatch])
            if kinds not in accepted:
                raise ValueError(
                    f"microbatch {microbatch} on chunk {chunk} (rank {rank}) has the actions {kinds}: "
                    f"each must be there once, {' or '.join(map(str, accepted))}"
                )


def needs(action: Action, chunks: int) -> list[Action]:
    """The actions that must have ended; INPUT also means BACKWARD."""
    kind, chunk, microbatch = action
    if kind == FORWARD:
        return [Action(FORWARD, chunk - 1, microbatch)] if chunk else []
    if kind == WEIGHT:
        return [Action(INPUT, chunk, microbatch)]
    own = Action(FORWARD, chunk, microbatch)
    return [own, Action(INPUT, chunk + 1, microbatch)] if chunk + 1 < chunks else [own]


def _check_messages(schedule):
    """Between two ranks, activations and gradients are each received in the order in which they are sent."""
    sent, received = defaultdict(list), defaultdict(list)
    place, last = schedule.placement, len(schedule.placement) - 1
    for rank, order in enumerate(schedule.orders):
        for kind, chunk, microbatch in order:
            if kind == WEIGHT:
                continue
            what, step = ("activations", 1) if kind == FORWARD else ("gradients", -1)
            before, after = chunk - step, chunk + step
            if 0 <= before <= last and place[before] != rank:
                received[place[before], rank, what].append((chunk, microbatch))
            if 0 <= after <= last and place[after] != rank:
                sent[rank, place[after], what].append((after, microbatch))
    for (source, target, what), messages in sent.items():
        for mine, theirs in zip(messages, received[source, target, what], strict=True):
            if mine != theirs:
                raise ValueError(
                    f"rank {source} sends rank {target} the {what} for microbatch {mine[1]} on chunk {mine[0]} "
                    f"where that rank receives those for microbatch {theirs[1]} on chunk {theirs[0]}: "
                    "both must have the same order"
                )


def _run(schedule, times, latency, sending):
    place, chunks = schedule.placement, len(schedule.placement)
    ended, spans = {}, [[] for _ in schedule.orders]
    ready, asleep = list(range(schedule.stages)), {}  # asleep: the action that is waited for, and the waiting rank
    while ready:
        rank = ready.pop()
        order, mine = schedule.orders[rank], spans[rank]
        while len(mine) < len(order):
            action = order[len(mine)]
            wanted = needs(action, chunks)
            missing = [need for need in wanted if need not in ended]
            if missing:
                asleep.setdefault(missing[0], []).append(rank)
                break
            there = [ended[need] + (latency if place[need.chunk] != rank else 0) for need in wanted]
            start = max([mine[-1].end if mine else 0, *there])
            kind, chunk, microbatch = action
            end = start + times[kind][chunk] + (sending if _sends(place, action) else 0)
            mine.append(Span(action, start, end))
            done = Action(INPUT, chunk, microbatch) if kind == BACKWARD else action
            ended[done] = end
            ready += asleep.pop(done, ())
    if asleep:
        raise ValueError(f"deadlock: {_deadlock(schedule, spans, asleep)}")
    return tuple(map(tuple, spans))


def _sends(place, action):
    """Whether the action's result goes to another rank."""
    kind, chunk, _ = action
    after = chunk + 1 if kind == FORWARD else chunk - 1
    return kind != WEIGHT and 0 <= after < len(place) and place[after] != place[chunk]


def _deadlock(schedule, spans, asleep):
    place, orders = schedule.placement, schedule.orders
    waits = sorted((rank, need) for need, ranks in asleep.items() for rank in ranks)
    return "; ".join(
        f"rank {rank} is to run {orders[rank][len(spans[rank])]}, which needs {need} (rank {place[need.chunk]})"
        for rank, need in waits
    )


def peak(order: Sequence[Action], sizes: Sequence[Real]) -> Real:
    """The peak of a rank's activations, with the given sizes by chunk."""
    kept = most = 0
    for kind, chunk, _ in order:
        if kind == FORWARD:
            kept += sizes[chunk]
            most = max(most, kept)
        elif kind != INPUT:
            kept -= sizes[chunk]
    return most
