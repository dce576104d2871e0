"""The last step as it ran on all ranks: a timeline like the simulator's, and the costs for a simulation."""

import statistics
from collections import defaultdict

import torch
import torch.distributed as dist

from haiscale import checks
from haiscale.pipeline.actions import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Schedule
from haiscale.pipeline.timeline.simulate import Costs, Span, Timeline, needs, peak

MIB = 1024**2


def gather(schedule: Schedule, spans: list, activations: dict[int, int], group) -> tuple[Timeline, tuple[float, ...]]:
    """(timeline in ms from the first start, MiB that one microbatch keeps on each chunk), the same on all ranks.

    Ranks of several hosts are aligned by their hosts' clocks. This is a collective; nothing is pickled.
    """
    longest = max(map(len, schedule.orders))
    mine = torch.zeros(2 * longest + len(schedule.placement), dtype=torch.float64)
    for i, (_, start, end) in enumerate(spans):
        mine[2 * i], mine[2 * i + 1] = start * 1e3, end * 1e3
    for chunk, nbytes in activations.items():
        mine[2 * longest + chunk] = nbytes / MIB
    device = checks.host_device(group)
    every = [torch.empty_like(mine, device=device) for _ in schedule.orders]
    dist.all_gather(every, mine.to(device), group=group)
    every = [row.tolist() for row in every]
    # Three digits: the precision of a picture.
    sizes = tuple(float(f"{every[rank][2 * longest + chunk]:.3g}") for chunk, rank in enumerate(schedule.placement))
    first = min(row[0] for row in every)
    found = tuple(
        tuple(Span(action, row[2 * i] - first, row[2 * i + 1] - first) for i, action in enumerate(order))
        for order, row in zip(schedule.orders, every, strict=True)
    )
    # A step without backward keeps nothing.
    trained = any(kind != FORWARD for kind, *_ in schedule.orders[0])
    peaks = tuple(float(f"{peak(order, sizes):.3g}") if trained else 0 for order in schedule.orders)
    return Timeline(schedule, found, peaks), sizes


def costs(timeline: Timeline, activations: tuple[float, ...]) -> Costs:
    """Mean times of the parts on each chunk; if a schedule only has whole backwards, half each."""
    chunks = len(timeline.schedule.placement)
    times = {kind: defaultdict(list) for kind in (FORWARD, BACKWARD, INPUT, WEIGHT)}
    for spans in timeline.spans:
        for (kind, chunk, _), start, end in spans:
            times[kind][chunk].append(end - start)

    def mean(kind, chunk):
        return statistics.fmean(times[kind][chunk] or [0.0])

    inputs, weights = [], []
    for chunk in range(chunks):
        parted = bool(times[INPUT][chunk])
        inputs.append(mean(INPUT, chunk) if parted else mean(BACKWARD, chunk) / 2)
        weights.append(mean(WEIGHT, chunk) if parted else mean(BACKWARD, chunk) / 2)
    forward = [mean(FORWARD, chunk) for chunk in range(chunks)]
    parts = map(sum, zip(inputs, weights, strict=True))
    whole = [mean(BACKWARD, chunk) if times[BACKWARD][chunk] else both for chunk, both in enumerate(parts)]
    return Costs(forward, inputs, weights, _latency(timeline), activations, backward=whole)


def _latency(timeline):
    """The median time from the end of a sending action to the start of the action that waited for it."""
    place, ends, waits = timeline.schedule.placement, {}, []
    for spans in timeline.spans:
        for action, _, end in spans:
            ends[Action(INPUT, *action[1:]) if action.kind == BACKWARD else action] = end
    for spans in timeline.spans:
        free = 0.0
        for action, start, end in spans:
            for need in needs(action, len(place)):
                if place[need.chunk] != place[action.chunk] and ends[need] >= free:
                    waits.append(max(start - ends[need], 0.0))
            free = end
    return statistics.median(waits) if waits else 0.0
