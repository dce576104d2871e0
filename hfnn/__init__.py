"""hfnn: fused operators for PyTorch training, by module swapping.

    model = hfnn.convert(model)         # in place: same parameters, same state dict, fewer bytes, less time
    print(hfnn.report(model))           # what was swapped, what was left alone, and why
    hfnn.revert(model)                  # restores the original classes

`hfnn.LayerNorm` and similar classes replace those of torch.nn. `hfnn.functional` has the functions.
"""

import torch  # noqa: F401  first: hfnn._C must find torch's OpenMP already loaded, or two of them fight over the cores

from hfnn import data, functional, memory, ops, optim
from hfnn.adapters import tools
from hfnn.convert import convert, revert
from hfnn.core import bits, kernel, recipe
from hfnn.core.kernel import NoKernel, use
from hfnn.ops.mlp import MLP, GatedMLP
from hfnn.ops.smooth import QuickGELU, ReLUSquared
from hfnn.patch import patch_torch
from hfnn.report import report
from hfnn.tune import tune
from hfnn.verify import verify

__version__ = "0.2.0"

# hfnn.LayerNorm, hfnn.RMSNorm, hfnn.GELU, ...: read from the index, so that an op is listed once.
MODULES = {cls.__name__: cls for op in ops.ALL for cls in op.modules.values()}
globals().update(MODULES)
tools.install()

__all__ = [
    "GatedMLP",
    "MLP",
    "NoKernel",
    "QuickGELU",
    "ReLUSquared",
    "bits",
    "convert",
    "data",
    "functional",
    "kernel",
    "memory",
    "ops",
    "optim",
    "patch_torch",
    "recipe",
    "report",
    "revert",
    "tune",
    "use",
    "verify",
    *MODULES,
]
