"""`module.forward` of converted modules: kept, called with other modules, replaced."""

import copy
import types

import pytest
import torch
from torch import nn

import hfnn


def test_a_forward_kept_after_its_module():
    forward = hfnn.convert(nn.Linear(4, 4)).forward
    with pytest.raises(ReferenceError, match="keep the module"):
        forward(torch.ones(1, 4))


@pytest.mark.parametrize("captured", [False, True])
def test_the_function_of_a_forward(captured):
    """accelerate takes it out of the method for mixed precision, and calls it with the model."""

    class Wrapper(nn.Linear):
        def module(self):
            raise AssertionError("it is the user's")

    x = torch.ones(1, 4)
    ours, other = hfnn.convert(Wrapper(4, 4), prefer="memory", capture=captured), nn.Linear(4, 4)
    function, wanted = ours.forward.__func__, nn.Linear.forward(ours, x)
    ours.forward = types.MethodType(lambda self, *args: function(self, *args) * 2, ours)
    assert ours(x).equal(wanted * 2) and function(other, x).equal(other(x))
    twin = copy.deepcopy(ours)
    assert twin(x).equal(wanted * 2) and hfnn.is_converted(twin)
    hfnn.revert(ours)
    assert ours(x).equal(wanted * 2) and not hfnn.is_converted(ours)

    class Twice(nn.Linear):  # its forward calls that of another class
        def forward(self, input):
            return function(self, input) * 2

    for twice in (Twice(4, 4), hfnn.convert(nn.Sequential(Twice(4, 4)), prefer="memory")[0]):
        assert twice(x).equal(nn.functional.linear(x, twice.weight, twice.bias) * 2)


def test_a_forward_replaced_in_its_class(monkeypatch):
    """It runs while it is there, as in stock."""
    ours, x = hfnn.convert(nn.Sequential(nn.Linear(4, 4)), prefer="memory"), torch.ones(1, 4)
    wanted = ours(x)
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", lambda self, input: input * 3)
        assert ours(x).equal(x * 3) and "runs its own forward" in hfnn.report(ours).rows[0].why
    assert ours(x).equal(wanted) and hfnn.report(ours).swapped
