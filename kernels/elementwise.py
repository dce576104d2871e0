"""Common code of kernels for functions of one element."""

import triton
import triton.language as tl


@triton.jit
def _store(dy_N, x_N, out_N, i, mask, f: tl.constexpr, options):
    x = tl.load(x_N + i, mask=mask).to(tl.float32)
    out = f(x, *options) if dy_N is None else f(tl.load(dy_N + i, mask=mask).to(tl.float32), x, *options)
    tl.store(out_N + i, out.to(out_N.dtype.element_ty), mask=mask)


# Only the last program is masked, so the others load whole vectors for any n.
@triton.jit
def apply(dy_N, x_N, out_N, n, f: tl.constexpr, options, BLOCK: tl.constexpr):
    """f(dy, x, *options), or f(x, *options) without dy, of a program's BLOCK elements in float32."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    if dy_N is not None:
        dy_N += start
    x_N += start
    out_N += start
    if start + BLOCK <= n:
        _store(dy_N, x_N, out_N, i, None, f, options)
    else:
        _store(dy_N, x_N, out_N, i, i < n - start, f, options)
