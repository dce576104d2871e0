"""A tensor times a number on the device; csrc/scale.h has the contract."""

import triton
import triton.language as tl

from . import rows
from .launch import launch

BLOCK = 2048  # elements per program at a time
WARPS = 4
PROGRAMS = 16  # per multiprocessor: not more, because they do nothing in the usual case of a factor of 1


@triton.jit
def _scale_block(x_N, y_N, i, factor, mask):
    x = tl.load(x_N + i, mask=mask).to(tl.float32)
    tl.store(y_N + i, (x * factor).to(y_N.dtype.element_ty), mask=mask)


# Only the last block is masked, so the others load whole vectors for any n.
@triton.jit(do_not_specialize=["n"])
def forward_kernel(x_N, factor_1, y_N, n, SAME: tl.constexpr, BLOCK: tl.constexpr):
    factor = tl.load(factor_1)
    if SAME and factor == 1.0:
        return
    for block in tl.range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        start = tl.cast(block, tl.int64) * BLOCK
        i = tl.arange(0, BLOCK)
        if start + BLOCK <= n:
            _scale_block(x_N + start, y_N + start, i, factor, None)
        else:
            _scale_block(x_N + start, y_N + start, i, factor, i < n - start)


def forward(x, factor, y, queue):
    n = x.numel()
    if n:
        same = x is y or x.data_ptr() == y.data_ptr()
        programs = min(-(-n // BLOCK), PROGRAMS * rows.device()[0])
        launch(forward_kernel, (programs,), x, factor, y, n, same, BLOCK, num_warps=WARPS, enable_fp_fusion=False)
