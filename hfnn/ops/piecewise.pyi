# Written by tests/test_types.py.

import typing
from typing import Any

import torch
from torch import nn

class Hardshrink(nn.Hardshrink):
    """`hfnn.functional.hardshrink` as a module, with the arguments and defaults of `torch.nn.Hardshrink`."""

    prefer: str
    def forward(self, input: torch.Tensor) -> torch.Tensor: ...

class Hardsigmoid(nn.Hardsigmoid):
    """`hfnn.functional.hardsigmoid` as a module, with the arguments and defaults of `torch.nn.Hardsigmoid`."""

    prefer: str
    def forward(self, input: torch.Tensor) -> torch.Tensor: ...

class Hardtanh(nn.Hardtanh):
    """`hfnn.functional.hardtanh` as a module, with the arguments and defaults of `torch.nn.Hardtanh`."""

    prefer: str
    def forward(self, input: torch.Tensor) -> torch.Tensor: ...

class LeakyReLU(nn.LeakyReLU):
    """`hfnn.functional.leaky_relu` as a module, with the arguments and defaults of `torch.nn.LeakyReLU`."""

    prefer: str
    def forward(self, input: torch.Tensor) -> torch.Tensor: ...

class ReLU(nn.ReLU):
    """`hfnn.functional.relu` as a module, with the arguments and defaults of `torch.nn.ReLU`."""

    prefer: str
    keep: str
    def forward(self, input: torch.Tensor) -> torch.Tensor: ...

class ReLU6(nn.ReLU6):
    """`hfnn.functional.relu6` as a module, with the arguments and defaults of `torch.nn.ReLU6`."""

    prefer: str
    def forward(self, input: torch.Tensor) -> torch.Tensor: ...

class Softshrink(nn.Softshrink):
    """`hfnn.functional.softshrink` as a module, with the arguments and defaults of `torch.nn.Softshrink`."""

    prefer: str
    def forward(self, input: torch.Tensor) -> torch.Tensor: ...

class Threshold(nn.Threshold):
    """`hfnn.functional.threshold` as a module, with the arguments and defaults of `torch.nn.Threshold`."""

    prefer: str
    def forward(self, input: torch.Tensor) -> torch.Tensor: ...

def clamp(input: torch.Tensor, min: torch.Tensor | float | None = None, max: torch.Tensor | float | None = None, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.clamp`, keeping one bit per element instead of the input."""

def hardshrink(input: torch.Tensor, lambd: float = 0.5, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.nn.functional.hardshrink`, keeping one bit per element instead of the input."""

def hardsigmoid(input: torch.Tensor, inplace: bool = False, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.nn.functional.hardsigmoid`, keeping one bit per element instead of the input."""

def hardtanh(input: torch.Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.nn.functional.hardtanh`, keeping one bit per element instead of the input."""

def leaky_relu(input: torch.Tensor, negative_slope: float = 0.01, inplace: bool = False, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.nn.functional.leaky_relu`, keeping one bit per element instead of the input."""

def relu(input: torch.Tensor, inplace: bool = False, *, prefer: str = 'auto', keep: str = 'bits') -> torch.Tensor:
    """`torch.nn.functional.relu`, keeping one bit per element instead of the input."""

def relu6(input: torch.Tensor, inplace: bool = False, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.nn.functional.relu6`, keeping one bit per element instead of the input."""

def softshrink(input: torch.Tensor, lambd: float = 0.5, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.nn.functional.softshrink`, keeping one bit per element instead of the input."""

def threshold(input: torch.Tensor, threshold: float, value: float, inplace: bool = False, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.nn.functional.threshold`, keeping one bit per element instead of the input."""

def __getattr__(name: str) -> Any: ...
