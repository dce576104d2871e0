"""A program as people write it, and what it must keep for backward once converted."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Program:
    """One spelling of a pattern, or a near miss of it.

    build: () -> the module; inputs: () -> its inputs. op: what reports call the replacement. stock, target: bytes kept
    for backward of a call in training, before and after `convert`; activations have a megabyte or more. within: how far
    from the target. target=None: a near miss, in which the op must not be found; it may keep no more than stock.
    draws: whether training draws random numbers: then values are compared in eval. wide: makes a copy float64. slow:
    whether what keeps less takes longer than stock on a CPU: there the target holds with prefer="memory" alone.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    op: str
    stock: float
    target: float | None
    within: float = 0.02
    draws: bool = False
    wide: Callable[[nn.Module], nn.Module] = nn.Module.double
    slow: bool = False

    def __str__(self) -> str:
        return self.name
