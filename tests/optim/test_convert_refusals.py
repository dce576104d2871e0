"""Optimizers and options that `hfnn.convert` refuses, which stay as they are."""

import logging

import pytest
import torch
from torch import nn

import hfnn

from .test_convert import SCHEDULERS, build


class Steps(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


class Zeroes(torch.optim.AdamW):
    def state_dict(self):
        return super().state_dict()


def patched(optimizer):
    step = optimizer.step
    optimizer.step = lambda closure=None: step(closure)
    return optimizer


def patched_then_scheduled(optimizer):
    step = optimizer.step
    optimizer.step = (lambda self, closure=None: step(closure)).__get__(optimizer)
    SCHEDULERS["cosine"](optimizer)
    return optimizer


REFUSED = {
    "step of its own on the instance": lambda: patched(build()[1]),
    "step of its own on the instance, which": lambda: patched_then_scheduled(build()[1]),
    "class has a step of its own": lambda: build(Steps)[1],
    "defines state_dict": lambda: build(Zeroes)[1],
    "of torch.optim, and this is torch.optim.rprop.Rprop": lambda: build("Rprop")[1],
    "differentiable=True": lambda: build("AdamW", differentiable=True)[1],
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused_with_a_reason(why, caplog):
    """Left alone, with a reason in the log and in the report, or as an error if something specific was requested."""
    optimizer = REFUSED[why]()
    cls, attributes = type(optimizer), dict(vars(optimizer))
    with caplog.at_level(logging.WARNING, "hfnn"):
        assert hfnn.convert(optimizer) is optimizer
    assert why in caplog.text
    (row,) = hfnn.report(optimizer).left
    assert why in row.why and row.name == "(optimizer)"
    with pytest.raises(ValueError, match=why):
        hfnn.convert(optimizer, state_dtype=torch.bfloat16)
    assert type(optimizer) is cls and vars(optimizer) == attributes


def test_another_librarys_optimizer(caplog):
    class Theirs(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

    hfnn.convert(Theirs(nn.Linear(2, 2).parameters()))
    assert "Theirs" in caplog.text


def test_unknown_options_change_nothing():
    _, optimizer = build()
    with pytest.raises(ValueError, match="state_dtpye"):
        hfnn.convert(optimizer, state_dtpye="8bit")
    with pytest.raises(ValueError, match="state_dtype"):
        hfnn.convert(optimizer, state_dtype="7bit")
    assert type(optimizer) is torch.optim.AdamW and not {"state_dtype", "state_dtpye"} & vars(optimizer).keys()
    with pytest.raises(ValueError, match="state_dtype"):
        hfnn.convert(nn.Linear(2, 2), state_dtype="8bit")
    with pytest.raises(ValueError, match="second argument"):
        hfnn.convert(nn.Linear(2, 2), "*.norm")
