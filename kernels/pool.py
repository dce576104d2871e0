"""Max pooling over three dimensions; csrc/pool.h has the contract.

A lane computes one output in forward and the gradient of one input in backward: it iterates over the windows that
contain this input, in order, and adds dy if the window's code points to it. The geometry is compiled in, because
divisions by constants are cheap; the sizes are not.
"""

import triton
import triton.language as tl

from .launch import launch

BLOCK = 512  # elements per program
WARPS = 4
UNROLLED = 16  # maximum number of positions with unrolled loads


@triton.jit
def _place(i, H, W, C):
    """(d, h, w, c) from the index of an element of a plane."""
    c = i % C
    w = i // C % W
    h = i // C // W % H
    return i // C // W // H, h, w, c


@triton.jit
def _better(x_N, at, d, h, w, D, H, W, here, k, best, code):
    """best and code after position k of the windows, which is at (d, h, w)."""
    inside = here & (d >= 0) & (d < D) & (h >= 0) & (h < H) & (w >= 0) & (w < W)
    x = tl.load(x_N + at, mask=inside, other=0.0).to(tl.float32)
    better = inside & ((x > best) | (x != x) | (code < 0))
    return tl.where(better, x, best), tl.where(better, k, code)


# Offsets within the planes of a program have 32 bits; the start of its first plane has 64.
@triton.jit(do_not_specialize=["n", "D", "H", "W", "C", "outD", "outH", "outW"])
def forward_kernel(
    x_N, y_N, codes_N, n, D, H, W, C, outD, outH, outW,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, LD: tl.constexpr, LH: tl.constexpr, LW: tl.constexpr,
    UNROLL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    plane = outD * outH * outW * C
    first = start // plane
    x_N += first * (D * H * W * C)
    i = (start - first * plane).to(tl.int32) + tl.arange(0, BLOCK)
    here = tl.arange(0, BLOCK) < n - start
    d, h, w, c = _place(i % plane, outH, outW, C)
    x_N += (i // plane).to(tl.int64) * (D * H * W * C)
    d, h, w = d * SD - PD, h * SH - PH, w * SW - PW
    at = ((d * H + h) * W + w) * C + c
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    code = tl.full([BLOCK], -1, tl.int32)
    if UNROLL:
        for k in tl.static_range(KD * KH * KW):
            kd, kh, kw = k // (KH * KW) * LD, k // KW % KH * LH, k % KW * LW
            to = at + ((kd * H + kh) * W + kw) * C
            best, code = _better(x_N, to, d + kd, h + kh, w + kw, D, H, W, here, k, best, code)
    else:
        for k in tl.range(KD * KH * KW):
            kd, kh, kw = k // (KH * KW) * LD, k // KW % KH * LH, k % KW * LW
            to = at + ((kd * H + kh) * W + kw) * C
            best, code = _better(x_N, to, d + kd, h + kh, w + kw, D, H, W, here, k, best, code)
    i = tl.arange(0, BLOCK)
    tl.store(y_N + start + i, best.to(y_N.dtype.element_ty), mask=here)
    tl.store(codes_N + start + i, tl.maximum(code, 0).to(tl.uint8), mask=here)


@triton.jit
def _window(i, back, out, K: tl.constexpr, S: tl.constexpr, P: tl.constexpr, L: tl.constexpr):
    """The window `back` steps before the last one that may contain position i, i's index in it, whether it is valid."""
    o = (i + P) // S - back
    k = (i + P - o * S) // L
    return o, k, (o >= 0) & (o < out) & (k < K) & (i + P - o * S == k * L)


@triton.jit
def _add(
    dy_N, codes_N, j, d, h, w, c, here, outD, outH, outW, C,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, LD: tl.constexpr, LH: tl.constexpr, LW: tl.constexpr,
    RD: tl.constexpr, RH: tl.constexpr, RW: tl.constexpr
):  # fmt: skip
    """The contribution to an input's gradient of window j among the RD * RH * RW that may contain it."""
    od, kd, holds_d = _window(d, RD - 1 - j // (RH * RW), outD, KD, SD, PD, LD)
    oh, kh, holds_h = _window(h, RH - 1 - j // RW % RH, outH, KH, SH, PH, LH)
    ow, kw, holds_w = _window(w, RW - 1 - j % RW, outW, KW, SW, PW, LW)
    holds = here & holds_d & holds_h & holds_w
    at = ((od * outH + oh) * outW + ow) * C + c
    code = tl.load(codes_N + at, mask=holds, other=0).to(tl.int32)
    leads = holds & (code == (kd * KH + kh) * KW + kw)
    return tl.load(dy_N + at, mask=leads, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["n", "D", "H", "W", "C", "outD", "outH", "outW"])
def backward_kernel(
    dy_N, codes_N, dx_N, n, D, H, W, C, outD, outH, outW,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, LD: tl.constexpr, LH: tl.constexpr, LW: tl.constexpr,
    RD: tl.constexpr, RH: tl.constexpr, RW: tl.constexpr, UNROLL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    plane = D * H * W * C
    first = start // plane
    i = (start - first * plane).to(tl.int32) + tl.arange(0, BLOCK)
    here = tl.arange(0, BLOCK) < n - start
    d, h, w, c = _place(i % plane, H, W, C)
    before = (first + (i // plane).to(tl.int64)) * (outD * outH * outW * C)
    dy_N += before
    codes_N += before
    sum = tl.zeros([BLOCK], tl.float32)
    if UNROLL:
        for j in tl.static_range(RD * RH * RW):
            sum += _add(dy_N, codes_N, j, d, h, w, c, here, outD, outH, outW, C,
                        KD, KH, KW, SD, SH, SW, PD, PH, PW, LD, LH, LW, RD, RH, RW)  # fmt: skip
    else:
        for j in tl.range(RD * RH * RW):
            sum += _add(dy_N, codes_N, j, d, h, w, c, here, outD, outH, outW, C,
                        KD, KH, KW, SD, SH, SW, PD, PH, PW, LD, LH, LW, RD, RH, RW)  # fmt: skip
    tl.store(dx_N + start + tl.arange(0, BLOCK), sum.to(dx_N.dtype.element_ty), mask=here)


def forward(x, y, codes, window, stride, padding, dilation, queue):
    n, positions = y.numel(), window[0] * window[1] * window[2]
    if n:
        launch(
            forward_kernel, (-(-n // BLOCK),),
            x, y, codes, n, *x.shape[1:], *y.shape[1:4], *window, *stride, *padding, *dilation,
            positions <= UNROLLED, BLOCK, num_warps=WARPS
        )  # fmt: skip


def backward(dy, codes, dx, window, stride, padding, dilation, queue):
    n = dx.numel()
    # Maximum number of windows that contain one position of a dimension.
    reach = [((k - 1) * dil) // s + 1 for k, dil, s in zip(window, dilation, stride, strict=True)]
    if n:
        launch(
            backward_kernel, (-(-n // BLOCK),),
            dy, codes, dx, n, *dx.shape[1:], *dy.shape[1:4], *window, *stride, *padding, *dilation,
            *reach, reach[0] * reach[1] * reach[2] <= UNROLLED, BLOCK, num_warps=WARPS
        )  # fmt: skip
