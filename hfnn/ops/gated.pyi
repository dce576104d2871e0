# Written by tests/test_types.py.

import typing
from typing import Any

import torch
from torch import nn

class GLU(nn.GLU):
    """`hfnn.functional.glu` as a module, with the arguments and defaults of `torch.nn.GLU`."""

    prefer: str
    def forward(self, input: torch.Tensor) -> torch.Tensor: ...

def geglu(gate: torch.Tensor, up: torch.Tensor | None = None, approximate: str = 'none', *, gate_first: bool = True, prefer: str = 'auto') -> torch.Tensor:
    """gelu(gate) * up, keeping gate and up and letting its consumer rebuild the product."""

def glu(input: torch.Tensor, dim: int = -1, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.nn.functional.glu`, letting its consumer rebuild the output."""

def reglu(gate: torch.Tensor, up: torch.Tensor | None = None, *, gate_first: bool = True, prefer: str = 'auto') -> torch.Tensor:
    """relu(gate) * up, keeping gate and up and letting its consumer rebuild the product."""

def swiglu(gate: torch.Tensor, up: torch.Tensor | None = None, *, gate_first: bool = True, prefer: str = 'auto') -> torch.Tensor:
    """silu(gate) * up, keeping gate and up and letting its consumer rebuild the product."""

def __getattr__(name: str) -> Any: ...
