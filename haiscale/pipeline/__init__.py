"""Pipeline parallelism. Here: schedules as data, what they cost, and their pictures.

    from haiscale.pipeline import SCHEDULES, Costs, draw, predict
    print(draw(predict(SCHEDULES["1f1b"](stages=4, microbatches=8), Costs(forward=1, input=1, weight=1))))

Nothing here needs torch.
"""

from haiscale.pipeline import dual_pipe_v, gpipe, interleaved, one_f_one_b, zero_bubble
from haiscale.pipeline.actions import Action, Schedule
from haiscale.pipeline.picture import draw, plot
from haiscale.pipeline.simulate import Costs, Span, Timeline, check, predict

# Each a function (stages, microbatches) -> Schedule; "interleaved" has a third argument, chunks on each rank.
SCHEDULES = {
    "gpipe": gpipe.schedule,
    "1f1b": one_f_one_b.schedule,
    "interleaved": interleaved.schedule,
    "zb-h1": zero_bubble.h1,
    "zbv": zero_bubble.zbv,
    "dualpipev": dual_pipe_v.schedule,
}

__all__ = ["SCHEDULES", "Action", "Costs", "Schedule", "Span", "Timeline", "check", "draw", "plot", "predict"]
