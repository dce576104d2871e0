"""hfnn: fused operators for PyTorch training, by module swapping.

    model = hfnn.convert(model)         # in place: same parameters, same state dict, fewer bytes, less time
    print(hfnn.report(model))           # what was swapped, what was left alone, and why
    hfnn.revert(model)                  # restores the original forwards

`hfnn.LayerNorm` and similar classes replace those of torch.nn. `hfnn.functional` has the functions.
"""

import torch  # noqa: F401  first: hfnn._C must find torch's OpenMP already loaded, or two of them fight over the cores

from hfnn import data, functional, memory, ops, optim
from hfnn.adapters import tools
from hfnn.convert import convert, is_converted, revert
from hfnn.core import bits, kernel
from hfnn.core import node as recipe
from hfnn.core.as_if import as_if
from hfnn.core.kernel import NoKernel, use
from hfnn.ops.adaptive_max_pool import AdaptiveMaxPool1d, AdaptiveMaxPool2d, AdaptiveMaxPool3d
from hfnn.ops.attention import MultiheadAttention, TransformerDecoderLayer, TransformerEncoderLayer
from hfnn.ops.avg_pool import AdaptiveAvgPool1d, AdaptiveAvgPool2d, AdaptiveAvgPool3d, AvgPool1d, AvgPool2d, AvgPool3d
from hfnn.ops.batch_norm import BatchNorm1d, BatchNorm2d, BatchNorm3d
from hfnn.ops.conv import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from hfnn.ops.cross_entropy import CrossEntropyLoss
from hfnn.ops.dropout import Dropout
from hfnn.ops.embedding import Embedding
from hfnn.ops.gated import GLU
from hfnn.ops.group_norm import GroupNorm
from hfnn.ops.instance_norm import InstanceNorm1d, InstanceNorm2d, InstanceNorm3d
from hfnn.ops.layer_norm import LayerNorm
from hfnn.ops.linear import Linear
from hfnn.ops.log_softmax import LogSoftmax
from hfnn.ops.max_pool import MaxPool1d, MaxPool2d, MaxPool3d
from hfnn.ops.mlp import MLP, GatedMLP
from hfnn.ops.nll_loss import NLLLoss
from hfnn.ops.piecewise import Hardshrink, Hardsigmoid, Hardtanh, LeakyReLU, ReLU, ReLU6, Softshrink, Threshold
from hfnn.ops.pointwise_loss import BCEWithLogitsLoss, HuberLoss, L1Loss, MSELoss, SmoothL1Loss
from hfnn.ops.prelu import PReLU
from hfnn.ops.rms_norm import RMSNorm
from hfnn.ops.rnn import GRU, LSTM, RNN
from hfnn.ops.rrelu import RReLU
from hfnn.ops.smooth import (
    CELU,
    ELU,
    GELU,
    SELU,
    Hardswish,
    LogSigmoid,
    Mish,
    QuickGELU,
    ReLUSquared,
    Sigmoid,
    SiLU,
    Softplus,
    Softsign,
    Tanh,
)
from hfnn.ops.softmax import Softmax
from hfnn.patch import patch_torch
from hfnn.plan import plan
from hfnn.report import report
from hfnn.tune import tune
from hfnn.verify import verify

__version__ = "0.2.0"

tools.install()

__all__ = [
    "CELU",
    "ELU",
    "GELU",
    "GLU",
    "GRU",
    "LSTM",
    "MLP",
    "RNN",
    "SELU",
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AdaptiveMaxPool1d",
    "AdaptiveMaxPool2d",
    "AdaptiveMaxPool3d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "BCEWithLogitsLoss",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "GatedMLP",
    "GroupNorm",
    "Hardshrink",
    "Hardsigmoid",
    "Hardswish",
    "Hardtanh",
    "HuberLoss",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "L1Loss",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LogSigmoid",
    "LogSoftmax",
    "MSELoss",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "Mish",
    "MultiheadAttention",
    "NLLLoss",
    "NoKernel",
    "PReLU",
    "QuickGELU",
    "RMSNorm",
    "RReLU",
    "ReLU",
    "ReLU6",
    "ReLUSquared",
    "SiLU",
    "Sigmoid",
    "SmoothL1Loss",
    "Softmax",
    "Softplus",
    "Softshrink",
    "Softsign",
    "Tanh",
    "Threshold",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
    "as_if",
    "bits",
    "convert",
    "data",
    "functional",
    "is_converted",
    "kernel",
    "memory",
    "ops",
    "optim",
    "patch_torch",
    "plan",
    "recipe",
    "report",
    "revert",
    "tune",
    "use",
    "verify",
]
