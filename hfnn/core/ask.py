"""What the host must know of a tensor before it goes on: whether there is padding, how many tokens count.

`ask` waits for the tensor. Where a captured model is recorded nothing can wait: whoever records it gives the numbers
that it expects, and compares them with the tensor's at each replay (hfnn/capture/answers.py).
"""

import contextlib
import threading

import torch

from hfnn.core.context import capturing

_local = threading.local()


def recorded() -> bool:
    """Whether `ask` gives what is expected, for a captured model is recorded in this thread."""
    return getattr(_local, "answers", None) is not None


def may_ask(x: torch.Tensor) -> bool:
    """Whether `ask` can answer: not while somebody else records x's stream."""
    return recorded() or not (x.is_cuda and capturing())


def ask(x: torch.Tensor, guess: tuple[int, ...]) -> tuple[int, ...]:
    """The numbers of a small tensor, booleans or integers. guess: those that are likely."""
    return _local.answers.answer(x, guess) if recorded() else tuple(map(int, x.reshape(-1).tolist()))


@contextlib.contextmanager
def answered(answers):
    """`ask` asks `answers.answer(x, guess)` inside the `with` block, in this thread."""
    before, _local.answers = getattr(_local, "answers", None), answers
    try:
        yield
    finally:
        _local.answers = before
