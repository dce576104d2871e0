"""A step's time, predicted before the first one: a case of tests/workers/pipeline.py."""

import time

import torch
import torch.distributed as dist
from pipeline_models import WIDTH, batch
from torch import nn
from torch.nn.functional import mse_loss

from haiscale.pipeline import SequentialModel, layer_costs, message_times, predict, stage_costs


class Slow(torch.autograd.Function):
    """Takes its time without using a core: 3 ms forward, 6 ms backward."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(0.003)
        return x + 0

    @staticmethod
    def backward(ctx, dy):
        time.sleep(0.006)
        return dy


class Sleeper(nn.Linear):
    def forward(self, x):
        return Slow.apply(super().forward(x))


def predicted(schedule):
    """Separately measured costs of stages and messages predict a step's time before the first step.

    Measured up to four times, until it does on all ranks, because other processes may slow down either measurement.
    """

    def case(place):
        model = SequentialModel(*[Sleeper(WIDTH, WIDTH) for _ in range(8)])
        pp, (x, y) = place.pipeline(model, schedule, 8), batch()
        for _ in range(4):
            wrong = compared(place, model, pp, x, y)
            bad = torch.tensor(float(wrong is not None))
            dist.all_reduce(bad, group=place.group)
            if not bad:
                return None
        return wrong or "wrong on another rank"

    return case


def compared(place, model, pp, x, y) -> str | None:
    """What is wrong with one prediction, or None."""
    counts = [8 // len(pp.schedule.placement)] * len(pp.schedule.placement)
    sending, latency = message_times(x[:2], place.group)
    layers = layer_costs(model, (x[:2],), criterion=lambda z: mse_loss(z, y[:2]))
    costs = stage_costs(layers, counts, latency, sending)
    expected, found = predict(pp.schedule, costs).makespan, []
    for _ in range(3):
        pp.forward_backward(x, criterion=mse_loss, labels=y)
        found.append(pp.timeline().makespan)
    if not 0.65 < expected / min(found) < 1.25 or not 0 < sending < 3 or not latency < 3:
        return f"{expected} ms predicted, where {found} were measured; messages: {sending} and {latency} ms"
    return None
