"""Optimizers whose step is one launch, with states of a chosen size: `hfnn.optim.AdamW` for `torch.optim.AdamW`, ..."""

from hfnn.optim.adafactor import Adafactor
from hfnn.optim.adam import Adam, AdamW
from hfnn.optim.backward import step_in_backward
from hfnn.optim.lamb import LAMB
from hfnn.optim.lion import Lion
from hfnn.optim.sgd import SGD

__all__ = ["LAMB", "SGD", "Adafactor", "Adam", "AdamW", "Lion", "step_in_backward"]
