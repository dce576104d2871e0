"""Common parts of the attention kernels: the keys that a block of queries sees, and the scores of a tile.

csrc/attention.h has the contract. Letters: M queries and N keys of a tile, D and E the padded widths of keys and
values. Scores are in units of log 2, because exp2 is the hardware instruction; with a bias they are not, because its
largest numbers would become infinite. A tile is (M, N), or (N, M) if `i` and
`j` are given as a row and a column.
"""

import triton
import triton.language as tl

from .dropout import _philox

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
TILE = tl.constexpr(128)  # the side of a tile of `tiles`


@triton.jit
def place(program, blocks, heads):
    """(block, batch, head) of a program. The grid is one-dimensional, because other dimensions are limited to 65535."""
    row = program // blocks
    return program % blocks, row // heads, row % heads


@triton.jit
def sequence(block, starts, n, BLOCK: tl.constexpr):
    """The sequence to which a block of rows belongs, and its first row there.

    Sequence s has blocks from starts[s] // BLOCK + s on: as many as it needs, or one more. So the position of a block
    needs no table. Its first row may be after the sequence's end.
    """
    low, high = 0, n - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(starts + middle) // BLOCK + middle <= block:
            low = middle
        else:
            high = middle - 1
    return low, (block - tl.load(starts + low) // BLOCK - low) * BLOCK


@triton.jit
def lengths(starts_q, starts_k, s):
    """The first query and key of sequence s, and the number of each."""
    q0 = tl.load(starts_q + s)
    k0 = tl.load(starts_k + s)
    return q0, k0, tl.load(starts_q + s + 1) - q0, tl.load(starts_k + s + 1) - k0


@triton.jit
def span(bounds, b, S):
    """The first key of a batch that counts, and the end of the keys that count."""
    if bounds is not None:
        return tl.maximum(tl.load(bounds + 2 * b), 0), tl.minimum(tl.load(bounds + 2 * b + 1), S)
    else:
        return 0, S


@triton.jit
def stretch(part: tl.constexpr, low, full, full_end, high):
    """Begin and end of a part of a block's range: before (0) and after (2) the part that needs no mask (1)."""
    if part == 0:
        return low, tl.minimum(full, high)
    elif part == 1:
        return full, full_end
    else:
        return full_end, high


@triton.jit
def rows(
    x, b, h, first, count, x_b, x_h, x_t,
    C: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Rows `first` to `first + BLOCK` of head h of batch b, of width C; 0 from `count` on.

    TMA: x is a descriptor, which knows the end of the tensor.
    """
    if TMA:
        return tl.reshape(x.load([b, h, first, 0]), [BLOCK, BLOCK_C])
    else:
        r, c = tl.arange(0, BLOCK), tl.arange(0, BLOCK_C)
        start = tl.cast(b, tl.int64) * x_b + tl.cast(h, tl.int64) * x_h + tl.cast(first, tl.int64) * x_t
        at = x + start + r[:, None] * x_t + c[None, :]
        if MASKED:
            return tl.load(at, mask=(first + r < count)[:, None] & (c < C)[None, :], other=0.0)
        elif C == BLOCK_C:
            return tl.load(at)
        else:
            return tl.load(at, mask=(c < C)[None, :], other=0.0)


@triton.jit
def store_rows(
    x, value, b, h, first, count, x_b, x_h, x_t, C: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    r, c = tl.arange(0, BLOCK), tl.arange(0, BLOCK_C)
    start = tl.cast(b, tl.int64) * x_b + tl.cast(h, tl.int64) * x_h + tl.cast(first, tl.int64) * x_t
    at = x + start + r[:, None] * x_t + c[None, :]
    tl.store(at, value.to(x.dtype.element_ty), mask=(first + r < count)[:, None] & (c < C)[None, :])


@triton.jit
def tanh(x, CHEAP: tl.constexpr):
    """CHEAP: an instruction with a relative error of 2^-11, a quarter of bfloat16's rounding error of a score."""
    if CHEAP:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2 * LOG2E)))


@triton.jit
def keeps(seed, counter, row, j, threshold, M: tl.constexpr, N: tl.constexpr, groups):
    """(M, N) which pairs dropout keeps. row (M,): int64 rows of all scores; j: the first key, a multiple of 8."""
    c = counter + row[:, None] * groups + (j // 8 + tl.arange(0, N // 8))[None, :]
    low = c.to(tl.uint32)
    w0, w1, w2, w3 = _philox(
        low, (c >> 32).to(tl.uint32), tl.zeros_like(low), tl.full(low.shape, 0x68666E61, tl.uint32),
        seed.to(tl.uint32), (seed >> 32).to(tl.uint32),
    )  # fmt: skip
    a, b, c, d = w0 & 0xFFFF, w1 & 0xFFFF, w2 & 0xFFFF, w3 & 0xFFFF
    e, f, g, h = w0 >> 16, w1 >> 16, w2 >> 16, w3 >> 16
    # Each join appends a fastest axis of 2: key 2 w + half of a group of 8 is [w // 2, w % 2, half].
    even = tl.join(tl.join(a, c), tl.join(b, d))
    odd = tl.join(tl.join(e, g), tl.join(f, h))
    return tl.reshape(tl.join(even, odd), [M, N]) >= threshold


@triton.jit
def scores(
    qk, i, j, bias, bias_t, bias_s, slope, scale, softcap, shift, T, S, SOFTCAP: tl.constexpr, CHEAP: tl.constexpr,
):  # fmt: skip
    """(scores, derivative of the soft cap) of a tile of products."""
    PER_NAT: tl.constexpr = LOG2E if bias is None else 1.0
    if SOFTCAP:
        t = tanh(qk * (scale / softcap), CHEAP)
        s, slope_of_cap = t * (softcap * PER_NAT), 1.0 - t * t
    else:
        s, slope_of_cap = qk * (scale * PER_NAT), 1.0
    if bias is not None:
        at = bias + i.to(tl.int64) * bias_t + j.to(tl.int64) * bias_s
        s += tl.load(at, mask=(i < T) & (j < S), other=0.0).to(tl.float32)
    if slope is not None:
        s -= (slope * PER_NAT) * tl.abs(i + shift - j).to(tl.float32)
    return s, slope_of_cap


@triton.jit
def power(x, bias):
    """The exponential of a difference of scores, in their unit."""
    return tl.exp2(x) if bias is None else tl.exp2(x * LOG2E)


@triton.jit
def visible(
    i, j, bits, bits_t, bits_s, mixed, T, first, last, left, right, shift,
    LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Which pairs of a tile count, ignoring whether queries exist. mixed: whether to read its bits."""
    seen = (j >= first) & (j < last)
    if LEFT:
        seen = seen & (j >= i + (shift - left))
    if RIGHT:
        seen = seen & (j <= i + (shift + right))
    if bits is not None:
        at = bits + i.to(tl.int64) * bits_t + (j // 8).to(tl.int64) * bits_s
        byte = tl.load(at, mask=seen & (i < T) & mixed, other=255)
        seen = seen & (((byte >> (j % 8)) & 1) != 0)
    return seen


@triton.jit
def seen_keys(m, T, shift, left, right, first, last, LEFT: tl.constexpr, RIGHT: tl.constexpr,
              M: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """(low, full, end of full, high): the keys that queries m to m + M see, and those that all of them see.

    Multiples of N, except high.
    """
    low, high, full, full_end = first, last, first, last
    end = tl.minimum(m + M, T)
    if LEFT:
        low = tl.maximum(low, m + shift - left)
        full = tl.maximum(full, end - 1 + shift - left)
    if RIGHT:
        high = tl.minimum(high, end + shift + right)
        full_end = tl.minimum(full_end, m + shift + right + 1)
    low = tl.maximum(low, 0) // N * N
    full = tl.maximum((tl.maximum(full, 0) + N - 1) // N * N, low)
    full_end = tl.maximum(tl.maximum(full_end, 0) // N * N, full)
    return low, full, full_end, high


@triton.jit
def seeing_queries(n, T, shift, left, right, first, last, LEFT: tl.constexpr, RIGHT: tl.constexpr,
                   M: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """(low, full, end of full, high): the queries that see keys n to n + N, and those that see all of them.

    Multiples of M, except high.
    """
    low, high, full, full_end = 0, T, 0, T
    end = tl.minimum(n + N, last)
    if RIGHT:
        low = tl.maximum(low, n - shift - right)
        full = tl.maximum(full, n + N - 1 - shift - right)
    if LEFT:
        high = tl.minimum(high, end - shift + left)
        full_end = tl.minimum(full_end, n - shift + left + 1)
    if (n < first) | (n + N > last):
        full_end = 0
    if end <= first:
        high = 0
    low = low // M * M
    full = tl.maximum((full + M - 1) // M * M, low)
    full_end = tl.maximum(tl.maximum(full_end, 0) // M * M, full)
    return low, full, full_end, high
