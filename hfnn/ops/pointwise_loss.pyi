# Written by tests/test_types.py.

import typing
from typing import Any

import torch
from torch import nn

class BCEWithLogitsLoss(nn.BCEWithLogitsLoss):
    """`hfnn.functional.binary_cross_entropy_with_logits` as a module, with the arguments and defaults of `torch.nn.BCEWithLogitsLoss`."""

    prefer: str
    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor: ...

class HuberLoss(nn.HuberLoss):
    """`hfnn.functional.huber_loss` as a module, with the arguments and defaults of `torch.nn.HuberLoss`."""

    prefer: str
    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor: ...

class L1Loss(nn.L1Loss):
    """`hfnn.functional.l1_loss` as a module, with the arguments and defaults of `torch.nn.L1Loss`."""

    prefer: str
    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor: ...

class MSELoss(nn.MSELoss):
    """`hfnn.functional.mse_loss` as a module, with the arguments and defaults of `torch.nn.MSELoss`."""

    prefer: str
    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor: ...

class SmoothL1Loss(nn.SmoothL1Loss):
    """`hfnn.functional.smooth_l1_loss` as a module, with the arguments and defaults of `torch.nn.SmoothL1Loss`."""

    prefer: str
    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor: ...

def binary_cross_entropy_with_logits(input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, size_average: bool | None = None, reduce: bool | None = None, reduction: str = 'mean', pos_weight: torch.Tensor | None = None, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.nn.functional.binary_cross_entropy_with_logits`, with the gradient made in forward."""

def huber_loss(input: torch.Tensor, target: torch.Tensor, reduction: str = 'mean', delta: float = 1.0, weight: torch.Tensor | None = None, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.nn.functional.huber_loss`, keeping one tensor instead of input and target."""

def l1_loss(input: torch.Tensor, target: torch.Tensor, size_average: bool | None = None, reduce: bool | None = None, reduction: str = 'mean', weight: torch.Tensor | None = None, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.nn.functional.l1_loss`, keeping two bits an element instead of input and target."""

def mse_loss(input: torch.Tensor, target: torch.Tensor, size_average: bool | None = None, reduce: bool | None = None, reduction: str = 'mean', weight: torch.Tensor | None = None, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.nn.functional.mse_loss`, keeping one tensor instead of input and target."""

def smooth_l1_loss(input: torch.Tensor, target: torch.Tensor, size_average: bool | None = None, reduce: bool | None = None, reduction: str = 'mean', beta: float = 1.0, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.nn.functional.smooth_l1_loss`, keeping one tensor instead of input and target; a sign where beta is 0."""

def __getattr__(name: str) -> Any: ...
