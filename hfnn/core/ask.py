"""Tensor values that the host needs before it continues: whether there is padding, how many tokens count.

`ask` waits for the tensor. While a captured model is recorded, nothing can wait. Then the recorder gives the expected
numbers, and compares them with the tensor's values at each replay (hfnn/capture/answers.py).
"""

import contextlib
import threading

import torch

from hfnn.core.context import capturing, has_values

_local = threading.local()


def recorded() -> bool:
    """Whether `ask` returns expected values, because a captured model is recorded in this thread."""
    return getattr(_local, "answers", None) is not None


def may_ask(x: torch.Tensor) -> bool:
    """Whether `ask` can answer: not while other code records x's stream, and not without values."""
    return recorded() or (has_values(x) and not (x.is_cuda and capturing()))


def ask(x: torch.Tensor, guess: tuple[int, ...]) -> tuple[int, ...]:
    """The values of a small tensor of booleans or integers. guess: the likely values."""
    return _local.answers.answer(x, guess) if recorded() else tuple(map(int, x.reshape(-1).tolist()))


@contextlib.contextmanager
def answered(answers):
    """Inside the `with` block, in this thread, `ask` calls `answers.answer(x, guess)`."""
    before, _local.answers = getattr(_local, "answers", None), answers
    try:
        yield
    finally:
        _local.answers = before
