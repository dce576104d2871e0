# Written by tests/test_types.py.

import typing
from typing import Any

import torch
from torch import nn

def abs(input: torch.Tensor, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.abs`, keeping the sign, two bits an element, instead of its input."""

def gather(input: torch.Tensor, dim: int, index: torch.Tensor, *, sparse_grad: bool = False, prefer: str = 'auto') -> torch.Tensor:
    """`torch.gather`, keeping the index and not the input. Raises what torch raises."""

def masked_fill(input: torch.Tensor, mask: torch.Tensor, value: torch.Tensor | float, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.masked_fill`, keeping an eighth of a byte an element for the mask instead of a byte."""

def maximum(input: torch.Tensor, other: torch.Tensor, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.maximum`, keeping two bits an element instead of both inputs."""

def minimum(input: torch.Tensor, other: torch.Tensor, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.minimum`, keeping two bits an element instead of both inputs."""

def where(condition: torch.Tensor, input: torch.Tensor | float | None = None, other: torch.Tensor | float | None = None, *, prefer: str = 'auto') -> torch.Tensor | typing.Any:
    """`torch.where`, keeping an eighth of a byte an element for a mask instead of a byte."""

def __getattr__(name: str) -> Any: ...
