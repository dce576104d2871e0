"""Pipeline parallelism: a model is split over ranks; each computes its stage for several microbatches in turn.

    stage = partition(model, pp_rank, pp_size)
    pp = PipeDream(stage, chunks=8, process_group=pp_group)
    loss, logits = pp.forward_backward(tokens, criterion=criterion, labels=(tokens,))

Schedules are data, which can be simulated and drawn without torch. Everything that needs torch is imported at first
use.

    print(draw(predict(SCHEDULES["1f1b"](stages=4, microbatches=8), Costs(forward=1, input=1, weight=1))))
"""

import importlib

from haiscale.pipeline import dual_pipe_v, gpipe, interleaved, one_f_one_b, zero_bubble
from haiscale.pipeline.actions import Action, Schedule
from haiscale.pipeline.timeline.picture import draw, plot
from haiscale.pipeline.timeline.simulate import Costs, Span, Timeline, check, predict

# Each a function (stages, microbatches) -> Schedule; "interleaved" has a third argument, chunks on each rank.
SCHEDULES = {
    "gpipe": gpipe.schedule,
    "1f1b": one_f_one_b.schedule,
    "interleaved": interleaved.schedule,
    "zb-h1": zero_bubble.h1,
    "zbv": zero_bubble.zbv,
    "dualpipev": dual_pipe_v.schedule,
}

_HOMES = {
    **dict.fromkeys(("DualPipeV", "GPipe", "Interleaved1F1B", "PipeDream", "Pipeline", "ZeroBubble"), "wrappers"),
    **dict.fromkeys(("layer_costs", "partition"), "partitioning"),
    **dict.fromkeys(("LayerCost", "message_times", "stage_costs"), "timeline.measure"),
    **dict.fromkeys(("Pop", "SequentialModel", "Stash"), "sequential"),
    **dict.fromkeys(("materialize", "on_meta"), "meta"),
}

__all__ = ["SCHEDULES", "Action", "Costs", "Schedule", "Span", "Timeline", "check", "draw", "plot", "predict", *_HOMES]


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f"haiscale.pipeline.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'haiscale.pipeline' has no attribute {name!r}")
