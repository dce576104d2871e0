"""Common code of the pipelines of wrappers.py: the split of the model, and haiscale's prediction of a step's time.

The prediction is made before the first step. It uses the parts of each chunk, measured on all ranks at the same time
because they share the host; the time of a message between two ranks; and the optimizer's time on each rank.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

# By the suffix of the provider's name: torch's schedule, haiscale's wrapper, chunks on a rank, their placement.
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
    """All chunks; the split is chosen once for all providers, from rank 0's measurement of layers and loss."""
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
    """The measurements of each rank, made at the first call."""
    if what not in _MEASURED:
        every = [None] * dist.get_world_size()
        dist.barrier()
        dist.all_gather_object(every, measured())
        _MEASURED[what] = every
    return _MEASURED[what]


def predicted(pp, hidden: Tensor, hfnn: bool, optimizer: Callable, steps: int) -> float:
    """Microseconds of a step in a block of `steps`, the same on all ranks, which call this together.

    pp: haiscale's pipeline. hidden: the tensor that a microbatch passes from chunk to chunk. optimizer: a function that
    a rank runs between the last action of a step and the first one of the next.
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
    """Median milliseconds, after one warm-up run."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[1:])
