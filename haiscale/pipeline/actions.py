"""A schedule is an ordered list of actions for each rank: the contract between schedules and the engine.

A pipeline of `stages` ranks runs a model split into chunks, numbered in the order of the model; chunk c is on rank
`placement[c]`. A batch is split into microbatches. For every chunk c and microbatch i there is

    F  forward          needs F of (c - 1, i); its output goes to chunk c + 1
    B  whole backward   needs F of (c, i) and B or I of (c + 1, i); its gradient goes to chunk c - 1
    I  backward-input   as B, but leaves the gradients of the weights to
    W  backward-weight  needs I of (c, i); nothing leaves the rank

once: F and B, or F, I and W; in inference only F. A rank runs its actions in the given order, each as soon as its
inputs have arrived. Results for other ranks are sent when the action ends, by a send that does not wait. Messages from
one rank to another are received in the order in which they were sent, separately for activations and gradients (two
tags). Neighbours in the list may overlap if the later does not need the earlier.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

FORWARD, BACKWARD, INPUT, WEIGHT = KINDS = ("F", "B", "I", "W")


class Action(NamedTuple):
    """What a rank does at a time.

    Attributes:
        kind: "F" forward, "B" backward, "I" backward for inputs, "W" backward for weights.
        chunk: The part of the model, from 0.
        microbatch: The part of the batch, from 0.
    """

    kind: str
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} of microbatch {self.microbatch} on chunk {self.chunk}"


@dataclass(frozen=True)
class Schedule:
    """What each rank does in a step, and in which order.

    Attributes:
        name: Of the schedule.
        microbatches: The parts of a batch.
        placement: For each chunk of the model, its rank.
        orders: For each rank, its actions.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        """The number of ranks."""
        return len(self.orders)

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The chunks of a rank, in the order of the model."""
        return tuple(chunk for chunk, home in enumerate(self.placement) if home == rank)


class Order:
    """The actions of one rank, added one by one: each call adds the next microbatch of that chunk.

    Calls beyond `microbatches` are counted and left out. So a schedule can be written for as many microbatches as its
    phases need, and is legal for fewer: orders stay legal if a microbatch is removed from all of them.
    """

    def __init__(self, microbatches: int, chunks: Sequence[int]):
        self.actions: list[Action] = []
        self._microbatches = microbatches
        self._forwards = dict.fromkeys(chunks, 0)
        self._backwards = dict.fromkeys(chunks, 0)
        self._without_weight: deque[tuple[int, int]] = deque()

    def forward(self, chunk: int) -> None:
        self._write(FORWARD, chunk, self._next(self._forwards, chunk))

    def backward(self, chunk: int) -> None:
        self._write(BACKWARD, chunk, self._next(self._backwards, chunk))

    def input(self, chunk: int) -> None:
        microbatch = self._next(self._backwards, chunk)
        self._without_weight.append((chunk, microbatch))
        self._write(INPUT, chunk, microbatch)

    def weight(self) -> None:
        """A backward-weight for the oldest backward-input without one."""
        self._write(WEIGHT, *self._without_weight.popleft())

    def _next(self, count: dict[int, int], chunk: int) -> int:
        count[chunk] += 1
        return count[chunk] - 1

    def _write(self, kind: str, chunk: int, microbatch: int) -> None:
        if microbatch < self._microbatches:
            self.actions.append(Action(kind, chunk, microbatch))


def check_counts(**counts: int) -> None:
    """Raises ValueError unless each is an integer of at least one."""
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"{name}={count!r} is not accepted: give an integer of at least 1")


def scheduled(name: str, placement: Callable, order: Callable, stages: int, microbatches: int) -> Schedule:
    """A schedule from placement(stages) and order(rank, stages, microbatches), the actions of a rank.

    Raises ValueError for counts below one.
    """
    check_counts(stages=stages, microbatches=microbatches)
    orders = tuple(order(rank, stages, microbatches) for rank in range(stages))
    return Schedule(name, microbatches, placement(stages), orders)


def in_turn(stages: int, chunks: int = 1) -> tuple[int, ...]:
    """Round-robin placement of `chunks` on each rank: chunk r + v * stages is the v-th of rank r."""
    return tuple(range(stages)) * chunks


def v_shape(stages: int) -> tuple[int, ...]:
    """Placement of two chunks on each rank, there and back: rank r has chunks r and 2 * stages - 1 - r."""
    return (*range(stages), *reversed(range(stages)))
