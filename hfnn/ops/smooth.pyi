# Written by tests/test_types.py.

import typing
from typing import Any

import torch
from torch import nn

class CELU(nn.CELU):
    """`hfnn.functional.celu` as a module, with the arguments and defaults of `torch.nn.CELU`."""

    prefer: str
    def forward(self, input: torch.Tensor) -> torch.Tensor: ...

class ELU(nn.ELU):
    """`hfnn.functional.elu` as a module, with the arguments and defaults of `torch.nn.ELU`."""

    prefer: str
    def forward(self, input: torch.Tensor) -> torch.Tensor: ...

class GELU(nn.GELU):
    """`hfnn.functional.gelu` as a module, with the arguments and defaults of `torch.nn.GELU`."""

    prefer: str
    def forward(self, input: torch.Tensor) -> torch.Tensor: ...

class Hardswish(nn.Hardswish):
    """`hfnn.functional.hardswish` as a module, with the arguments and defaults of `torch.nn.Hardswish`."""

    prefer: str
    def forward(self, input: torch.Tensor) -> torch.Tensor: ...

class LogSigmoid(nn.LogSigmoid):
    """`hfnn.functional.logsigmoid` as a module, with the arguments and defaults of `torch.nn.LogSigmoid`."""

    prefer: str
    def forward(self, input: torch.Tensor) -> torch.Tensor: ...

class Mish(nn.Mish):
    """`hfnn.functional.mish` as a module, with the arguments and defaults of `torch.nn.Mish`."""

    prefer: str
    def forward(self, input: torch.Tensor) -> torch.Tensor: ...

class QuickGELU(nn.Module):
    """`hfnn.functional.quick_gelu` as a module."""

    prefer: str
    def forward(self, input: torch.Tensor) -> torch.Tensor: ...

class ReLUSquared(nn.Module):
    """`hfnn.functional.relu_squared` as a module."""

    prefer: str
    def forward(self, input: torch.Tensor) -> torch.Tensor: ...

class SELU(nn.SELU):
    """`hfnn.functional.selu` as a module, with the arguments and defaults of `torch.nn.SELU`."""

    prefer: str
    def forward(self, input: torch.Tensor) -> torch.Tensor: ...

class SiLU(nn.SiLU):
    """`hfnn.functional.silu` as a module, with the arguments and defaults of `torch.nn.SiLU`."""

    prefer: str
    def forward(self, input: torch.Tensor) -> torch.Tensor: ...

class Sigmoid(nn.Sigmoid):
    """`hfnn.functional.sigmoid` as a module, with the arguments and defaults of `torch.nn.Sigmoid`."""

    prefer: str
    def forward(self, input: torch.Tensor) -> torch.Tensor: ...

class Softplus(nn.Softplus):
    """`hfnn.functional.softplus` as a module, with the arguments and defaults of `torch.nn.Softplus`."""

    prefer: str
    def forward(self, input: torch.Tensor) -> torch.Tensor: ...

class Softsign(nn.Softsign):
    """`hfnn.functional.softsign` as a module, with the arguments and defaults of `torch.nn.Softsign`."""

    prefer: str
    def forward(self, input: torch.Tensor) -> torch.Tensor: ...

class Tanh(nn.Tanh):
    """`hfnn.functional.tanh` as a module, with the arguments and defaults of `torch.nn.Tanh`."""

    prefer: str
    def forward(self, input: torch.Tensor) -> torch.Tensor: ...

def celu(input: torch.Tensor, alpha: float = 1.0, inplace: bool = False, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.nn.functional.celu`: y = x for x > 0, else alpha (exp(x / alpha) - 1). With alpha <= 0 torch's own op runs."""

def elu(input: torch.Tensor, alpha: float = 1.0, inplace: bool = False, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.nn.functional.elu`: y = x for x > 0, else alpha (exp(x) - 1)."""

def exp(input: torch.Tensor, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.exp`: y = exp(x), dy/dx = y."""

def gelu(input: torch.Tensor, *, approximate: str = 'none', prefer: str = 'auto') -> torch.Tensor:
    """`torch.nn.functional.gelu`: y = x Phi(x) = x / 2 (1 + erf(x / sqrt(2))) with approximate="none", x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715
    x^3))) with "tanh"."""

def hardswish(input: torch.Tensor, inplace: bool = False, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.nn.functional.hardswish`: y = x min(max(x + 3, 0), 6) / 6; dy/dx = 0 up to -3, 1 from 3 on, else (2 x + 3) / 6."""

def logsigmoid(input: torch.Tensor, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.nn.functional.logsigmoid`: y = min(x, 0) - log(1 + exp(-|x|)), dy/dx = 1 - exp(y). torch keeps x, and on the CPU a buffer of its size."""

def mish(input: torch.Tensor, inplace: bool = False, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.nn.functional.mish`: y = x tanh(log(1 + exp(x)))."""

def quick_gelu(input: torch.Tensor, *, prefer: str = 'auto') -> torch.Tensor:
    """x sigmoid(1.702 x), the approximation of gelu in CLIP, in one op; without a kernel by torch's."""

def relu_squared(input: torch.Tensor, *, prefer: str = 'auto') -> torch.Tensor:
    """max(x, 0)^2, in one op; without a kernel by torch's two, of which both keep a tensor."""

def selu(input: torch.Tensor, inplace: bool = False, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.nn.functional.selu`: y = scale x for x > 0, else scale alpha (exp(x) - 1), for two fixed numbers."""

def sigmoid(input: torch.Tensor, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.nn.functional.sigmoid`: y = 1 / (1 + exp(-x)), dy/dx = y (1 - y)."""

def silu(input: torch.Tensor, inplace: bool = False, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.nn.functional.silu`: y = x sigmoid(x) = x / (1 + exp(-x)), also called swish."""

def softplus(input: torch.Tensor, beta: float = 1, threshold: float = 20, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.nn.functional.softplus`: y = log(1 + exp(beta x)) / beta, x itself where beta x > threshold; dy/dx = sigmoid(beta x). With beta <= 0
    torch's own op runs."""

def softsign(input: torch.Tensor, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.nn.functional.softsign`: y = x / (1 + |x|), dy/dx = 1 / (1 + |x|)^2 = (1 - |y|)^2."""

def sqrt(input: torch.Tensor, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.sqrt`: y = sqrt(x), dy/dx = 1 / (2 y)."""

def tanh(input: torch.Tensor, *, prefer: str = 'auto') -> torch.Tensor:
    """`torch.nn.functional.tanh`: y = tanh(x), dy/dx = 1 - y^2. In float32 on the CPU torch's own op runs."""

def __getattr__(name: str) -> Any: ...
