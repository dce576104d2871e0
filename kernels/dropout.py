"""Dropout; csrc/dropout.h defines the bits. It is its own backward: call it again on dy with the same pair."""

import triton
import triton.language as tl

from .launch import launch

BLOCK = 2048  # elements per program
WARPS = 4


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """The four words of Philox4x32-10 (Salmon et al., SC 2011), all uint32.

    Products are written in 64 bits because one wide multiplication gives both halves; Triton's own philox computes them
    separately.
    """
    for _ in tl.static_range(10):
        p = c0.to(tl.uint64) * 0xD2511F53
        q = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (q >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = q.to(tl.uint32)
        c3 = p.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def _four(seed, c):
    """The four words of each counter of the int64 block c."""
    low = c.to(tl.uint32)
    w0, w1, w2, w3 = _philox(
        low, (c >> 32).to(tl.uint32), tl.zeros_like(low), tl.full(low.shape, 0x68666E6E, tl.uint32),
        seed.to(tl.uint32), (seed >> 32).to(tl.uint32),
    )  # fmt: skip
    return w0, w1, w2, w3


@triton.jit
def _words(seed, first, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """BLOCK random words in the order of the elements; `first` is the counter of the first four.

    A thread makes the words of as many consecutive elements as one 16-byte load provides (WIDE: 8, else 4), so no word
    has to change threads. Each join appends an axis of 2, the fastest in the flattened order.
    """
    if WIDE:
        c = first + 2 * tl.arange(0, BLOCK // 8)
        a0, a1, a2, a3 = _four(seed, c)
        b0, b1, b2, b3 = _four(seed, c + 1)
        w0, w1, w2, w3 = tl.join(a0, b0), tl.join(a1, b1), tl.join(a2, b2), tl.join(a3, b3)
    else:
        w0, w1, w2, w3 = _four(seed, first + tl.arange(0, BLOCK // 4))
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK])


@triton.jit
def pair_of(pair_2, seed, offset):
    """Seed and offset: from memory, which a captured graph reads anew, or the given ones."""
    if pair_2 is not None:
        return tl.load(pair_2), tl.load(pair_2 + 1)
    else:
        return seed, offset


@triton.jit
def _tile(x_N, residual_N, y_N, mask, threshold, scale, seed, first, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    x = tl.load(x_N, mask=mask)  # loads while the words are made
    if residual_N is not None:
        residual = tl.load(residual_N, mask=mask).to(tl.float32)
    keep = _words(seed, first, BLOCK, WIDE) >= threshold
    # Drop before scaling: otherwise the compiler would select among packed 16-bit numbers one by one.
    y = tl.where(keep, x.to(tl.float32), 0.0) * scale
    if residual_N is not None:
        y = residual + y
    tl.store(y_N, y.to(y_N.dtype.element_ty), mask=mask)


# Only the last program is masked, so the others load whole vectors for any n.
@triton.jit
def _program(x_N, residual_N, y_N, n, threshold, scale, seed, offset, pair_2, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    seed, offset = pair_of(pair_2, seed, offset)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    first = offset + start // 4
    i = tl.arange(0, BLOCK)
    x_N += start + i
    if residual_N is not None:
        residual_N += start + i
    y_N += start + i
    least, key = threshold.to(tl.uint32), seed.to(tl.int64)
    if start + BLOCK <= n:
        _tile(x_N, residual_N, y_N, None, least, scale, key, first, WIDE, BLOCK)
    else:
        _tile(x_N, residual_N, y_N, i < n - start, least, scale, key, first, WIDE, BLOCK)


@triton.jit(do_not_specialize=["n", "threshold", "seed", "offset"])
def forward_kernel(
    x_N, y_N, n, threshold: tl.uint32, scale, seed: tl.int64, offset: tl.int64, pair_2,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _program(x_N, None, y_N, n, threshold, scale, seed, offset, pair_2, WIDE, BLOCK)


@triton.jit(do_not_specialize=["n", "threshold", "seed", "offset"])
def add_kernel(
    x_N, residual_N, y_N, n, threshold: tl.uint32, scale, seed: tl.int64, offset: tl.int64, pair_2,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _program(x_N, residual_N, y_N, n, threshold, scale, seed, offset, pair_2, WIDE, BLOCK)


def forward(x, y, threshold, scale, seed, offset, pair, queue):
    n = x.numel()
    if threshold == 1 << 32:  # one more than the largest word: nothing is kept
        y.zero_()
    elif n:
        wide = x.element_size() == 2
        launch(
            forward_kernel, (-(-n // BLOCK),),
            x, y, n, threshold, scale, seed, offset, pair, wide, BLOCK, num_warps=WARPS,
        )  # fmt: skip


def add(x, residual, y, threshold, scale, seed, offset, pair, queue):
    n = x.numel()
    if threshold == 1 << 32:
        y.copy_(residual)
    elif n:
        launch(
            add_kernel, (-(-n // BLOCK),),
            x, residual, y, n, threshold, scale, seed, offset, pair, y.element_size() == 2, BLOCK,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
