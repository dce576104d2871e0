"""Modules that only look like batch norms followed by activations are left alone."""

import copy

import pytest
import torch

import hfnn
from hfnn.patterns.probe import Refusal

from .test_norm_act import BasicBlock, match


class Reused(BasicBlock):
    """The norm's result is used again."""

    def forward(self, x):
        y = self.bn1(self.conv1(x))
        return self.relu(y.clone() if False else y) + y


class Written(BasicBlock):
    """The norm's input is used again: written to before the activation."""

    def forward(self, x):
        c = self.conv1(x)
        y = self.bn1(c)
        c += x
        return self.conv2(self.relu(y)) + c


class Identity2(BasicBlock):
    """The sum is written with its operands swapped."""

    def forward(self, x):
        other = self.conv2(x)
        y = self.bn1(self.conv1(x))
        other += y
        return self.relu(other)


class ByData(BasicBlock):
    def forward(self, x):
        y = self.bn1(self.conv1(x))
        return self.relu(y) if x.sum() > 0 else y


class ByMode(BasicBlock):
    def forward(self, x):
        y = self.bn1(self.conv1(x))
        return self.relu(y) if self.training else y


class Keeps(BasicBlock):
    def forward(self, x):
        self.last = self.bn1(self.conv1(x))
        return self.relu(self.last)


class Scaled(BasicBlock):
    def forward(self, x):
        return self.relu(self.bn1(self.conv1(x))) * 2


class Second(BasicBlock):
    def forward(self, x):
        return self.relu(self.bn1(self.conv1(x))), x


LEFT_ALONE = {
    Reused: None, Written: None, Identity2: None, ByData: "calls", Keeps: "changes attributes",
    Second: "returns a tuple",
}  # fmt: skip


@pytest.mark.parametrize("cls", LEFT_ALONE, ids=lambda cls: cls.__name__)
def test_what_only_looks_like_it_is_left_alone(cls):
    torch.manual_seed(0)
    theirs = cls(8, 8)
    found, why = match(theirs), LEFT_ALONE[cls]
    assert found is None if why is None else why in str(found) and isinstance(found, Refusal)
    mine, x = hfnn.convert(copy.deepcopy(theirs), prefer="memory").eval(), torch.randn(2, 8, 6, 6)
    y, want = mine(x), theirs.eval()(x)
    torch.testing.assert_close(y, want)


@pytest.mark.parametrize("cls", [ByMode, Scaled])
@pytest.mark.parametrize("training", [True, False])
def test_what_stands_around_stays(cls, training):
    """A forward may differ between training and eval."""
    torch.manual_seed(0)
    theirs = cls(8, 8)
    assert "bn1 + relu" in str(match(theirs))
    mine, x = hfnn.convert(copy.deepcopy(theirs), prefer="memory").train(training), torch.randn(2, 8, 6, 6)
    torch.testing.assert_close(mine(x), theirs.train(training)(x))
