"""What pipelines of wrappers.py have in common: where the model is cut, and what haiscale predicts a step to take.

The prediction is made before the first step: from each chunk's parts, measured on all ranks at the same time, as they
share the host; from what a message takes between two ranks; and from the optimizer's own time on each rank.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

# By the end of the provider's name: torch's schedule, haiscale's wrapper, chunks on a rank, which they are.
PIPELINES = {
    "1f1b": ("Schedule1F1B", "PipeDream", 1, "loop"),
    "interleaved": ("ScheduleInterleaved1F1B", "Interleaved1F1B", 2, "loop"),
    "zbv": ("ScheduleZBVZeroBubble", "ZeroBubble", 2, "v"),
    "dualpipev": ("ScheduleDualPipeV", "DualPipeV", 2, "v"),
    "zb-h1": (None, "ZeroBubble", 1, "loop"),
}
_MEASURED: dict = {}  # in a rank, of its one model


def next_token(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def cut(model: nn.Module, ids: Tensor, size: int, chunks: int, placement: str, hfnn: bool) -> list[nn.Module]:
    """All chunks; where they are cut is found once for all providers, by the layers and the loss as rank 0 measures."""
    from haiscale import pipeline
    from haiscale.pipeline.timeline import measure

    def criterion(logits):
        return next_token(logits, ids)

    layers = _once("layers", lambda: pipeline.layer_costs(model, (ids,), criterion=criterion))[0]
    counts = measure.balance(layers, size * chunks)
    parts = pipeline.partition(model, None, size, counts, chunks, placement=placement)
    _once((size * chunks, hfnn), lambda: measure.measure(parts, (ids,), 7, criterion))
    return parts


def _once(what, measured: Callable) -> list:
    """What each rank has measured, the first time that it was asked for."""
    if what not in _MEASURED:
        every = [None] * dist.get_world_size()
        dist.barrier()
        dist.all_gather_object(every, measured())
        _MEASURED[what] = every
    return _MEASURED[what]


def predicted(pp, hidden: Tensor, hfnn: bool, optimizer: Callable, steps: int) -> float:
    """Microseconds of a step in a block of `steps`, the same on all ranks, which call this together.

    pp: haiscale's pipeline. hidden: what a microbatch gives from chunk to chunk. optimizer: what a rank does between
    the last action of a step and the first one of the next.
    """
    from haiscale.pipeline import message_times, predict, stage_costs

    place = pp.schedule.placement
    every = _once((len(place), hfnn), None)
    chunks = [every[rank][chunk] for chunk, rank in enumerate(place)]
    sending, latency = message_times(hidden, pp.group)
    costs = stage_costs(chunks, [1] * len(place), latency, sending)
    between = [None] * dist.get_world_size(pp.group)
    dist.all_gather_object(between, _time(optimizer, hidden.device), group=pp.group)
    timeline = predict(pp.schedule, costs)
    ends = [spans[-1].end + extra for spans, extra in zip(timeline.spans, between, strict=True)]
    return 1e3 * ((steps - 1) * timeline.period(between) + max(ends)) / steps


def _time(call: Callable, device: torch.device, repeats: int = 5) -> float:
    """Median milliseconds; once more that does not count."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[1:])
