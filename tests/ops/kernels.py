"""The kernels that tests of ops run on this machine, and the dtypes that all of them take."""

import pytest
import torch

from hfnn.core.kernel import _interpreting

KERNELS = ("triton",) if torch.cuda.is_available() else ("cpp", "triton") if _interpreting() else ("cpp",)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
kernels = pytest.mark.parametrize("kernel", KERNELS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
INF, NAN = float("inf"), float("nan")
