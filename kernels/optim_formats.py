"""The storage formats of an optimizer step; csrc/optim.h defines them. Device functions for optim.py.

Tensors are (BLOCKS, BLOCK): the elements of a row of the table from `start`, of which `left` exist, with one block of
codes per line. VECTOR: the number of elements that a thread moves at once, if all exist and all addresses are multiples
of 16 bytes; otherwise 0, and elements are moved one by one, with zeros for missing ones.
"""

import triton
import triton.language as tl

BLOCK = tl.constexpr(256)  # elements that share a scale
FLOAT32, BFLOAT16, FLOAT16 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
INT8, INT4 = tl.constexpr(4), tl.constexpr(5)

LEAST = tl.constexpr(2.0**-100)  # the smallest scale except 0: subnormal numbers never occur


@triton.jit
def index(BLOCKS: tl.constexpr):
    return tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def _get(address, start, i, left, KIND: tl.constexpr, VECTOR: tl.constexpr):
    """Elements start + i, of the type KIND, of the array at address."""
    pointer = (address + start * (KIND.primitive_bitwidth // 8)).to(tl.pointer_type(KIND))
    if VECTOR:
        return tl.load(tl.multiple_of(pointer, VECTOR * KIND.primitive_bitwidth // 8) + i)
    return tl.load(pointer + i, i < left, 0)


@triton.jit
def _put(x, address, start, i, left, KIND: tl.constexpr, VECTOR: tl.constexpr):
    pointer = (address + start * (KIND.primitive_bitwidth // 8)).to(tl.pointer_type(KIND))
    if VECTOR:
        tl.store(tl.multiple_of(pointer, VECTOR * KIND.primitive_bitwidth // 8) + i, x.to(KIND))
    else:
        tl.store(pointer + i, x.to(KIND), i < left)


@triton.jit
def load(address, start, left, FORMAT: tl.constexpr, BLOCKS: tl.constexpr, VECTOR: tl.constexpr):
    """float32 numbers."""
    i = index(BLOCKS)
    if FORMAT == FLOAT32:
        return _get(address, start, i, left, tl.float32, VECTOR)
    elif FORMAT == BFLOAT16:
        return _get(address, start, i, left, tl.bfloat16, VECTOR).to(tl.float32)
    else:
        tl.static_assert(FORMAT == FLOAT16)
        return _get(address, start, i, left, tl.float16, VECTOR).to(tl.float32)


@triton.jit
def store(x, address, start, left, FORMAT: tl.constexpr, BLOCKS: tl.constexpr, VECTOR: tl.constexpr):
    i = index(BLOCKS)
    if FORMAT == FLOAT32:
        _put(x, address, start, i, left, tl.float32, VECTOR)
    elif FORMAT == BFLOAT16:
        _put(x, address, start, i, left, tl.bfloat16, VECTOR)
    else:
        _put(x, address, start, i, left, tl.float16, VECTOR)


# ---- codes


@triton.jit
def _four_values(code, BITS: tl.constexpr, SIGNED: tl.constexpr):
    """4 times the value of each code, exactly, of int32."""
    ZERO: tl.constexpr = (1 << BITS - 1) - 1 if SIGNED else -1
    S: tl.constexpr = BITS + (83 if SIGNED else 84)
    # The code becomes the last bits of a number; the lowest bit represents 2^-S.
    m = (code | (127 + 23 - S << 23)).to(tl.float32, bitcast=True) - (2.0**23 + ZERO) * 2.0**-S
    return (m.to(tl.int32, bitcast=True) * 3).to(tl.float32, bitcast=True)


@triton.jit
def _scale(x, SIGNED: tl.constexpr):
    """The scale of each block x. Without a sign, x may be NaN of either sign, but not -0."""
    # As integers, magnitudes keep their order, with infinity above and NaN above that. Negative numbers have the
    # opposite order, and are all above or all below the others.
    most = tl.max(x.to(tl.uint32, bitcast=True), 1)
    if SIGNED:
        positive = tl.max(x.to(tl.int32, bitcast=True), 1).to(tl.uint32, bitcast=True)
        most = tl.where((positive & 0x7FFFFFFF) >= (most & 0x7FFFFFFF), positive, most)
    scale = most.to(tl.float32, bitcast=True)
    scale = tl.where(tl.abs(scale) < LEAST, 0.0, scale)
    return tl.where(tl.abs(scale) < float("inf"), scale, float("nan"))


@triton.jit
def _code(x, scale, BITS: tl.constexpr, SIGNED: tl.constexpr):
    """The codes, int32, of blocks x: the bits of 4 |x / scale| divided by 3 are m 2^-S, which is rounded."""
    ZERO: tl.constexpr = (1 << BITS - 1) - 1 if SIGNED else -1
    S: tl.constexpr = BITS + (83 if SIGNED else 84)
    size = tl.abs(scale)
    inverse = tl.where(size >= LEAST, tl.div_rn(4.0, size), 0.0)
    y = tl.abs(x) * inverse[:, None]
    m = tl.umulhi(y.to(tl.uint32, bitcast=True), 0x55555556)  # divided by 3, rounded down
    factor = tl.full([1, 1], 2.0**S, tl.float32)
    if SIGNED:
        m |= x.to(tl.uint32, bitcast=True) & 0x80000000
        factor = tl.where(scale < 0, -(2.0**S), 2.0**S)[:, None]
    # Numbers here are integers. Values below the range become -1, or 0 if that has no code.
    whole = tl.maximum(tl.fma(m.to(tl.float32, bitcast=True), factor, 2.0**23 + ZERO), 2.0**23)
    return whole.to(tl.int32, bitcast=True) & ((1 << BITS) - 1)


@triton.jit
def load_codes(
    address, scale, start, left, BITS: tl.constexpr, SIGNED: tl.constexpr, BLOCKS: tl.constexpr, VECTOR: tl.constexpr
):
    """The float32 numbers of blocks of codes."""
    i = index(BLOCKS)
    if BITS == 8:
        code = _get(address, start, i, left, tl.uint8, VECTOR).to(tl.int32)
    else:
        pair = tl.arange(0, BLOCKS)[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        two = _get(address, start // 2, pair, (left + 1) // 2, tl.uint8, VECTOR // 2).to(tl.int32)
        code = tl.reshape(tl.join(two & 15, two >> 4), [BLOCKS, BLOCK])
    most = _get(scale, start // BLOCK, tl.arange(0, BLOCKS), (left + BLOCK - 1) // BLOCK, tl.float32, 0)
    x = _four_values(code, BITS, SIGNED) * (most * 0.25)[:, None]
    return x if VECTOR else tl.where(i < left, x, 0.0)


@triton.jit
def store_codes(
    x, address, scale, start, left, BITS: tl.constexpr, SIGNED: tl.constexpr, BLOCKS: tl.constexpr, VECTOR: tl.constexpr
):
    """Chooses the scales and codes of the blocks x, and returns the values that they represent."""
    i = index(BLOCKS)
    if not VECTOR:
        x = tl.where(i < left, x, 0.0)
    most = _scale(x, SIGNED)
    code = _code(x, most, BITS, SIGNED)
    _put(most, scale, start // BLOCK, tl.arange(0, BLOCKS), (left + BLOCK - 1) // BLOCK, tl.float32, 0)
    y = _four_values(code, BITS, SIGNED) * (most * 0.25)[:, None]
    if BITS == 8:
        _put(code, address, start, i, left, tl.uint8, VECTOR)
    else:
        if not VECTOR:
            code = tl.where(i < left, code, 0)
        low, high = tl.split(tl.reshape(code, [BLOCKS, BLOCK // 2, 2]))
        pair = tl.arange(0, BLOCKS)[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        _put(low | high << 4, address, start // 2, pair, (left + 1) // 2, tl.uint8, VECTOR // 2)
    return y


# ---- parameters


@triton.jit
def round_stochastically(x, halves, FORMAT: tl.constexpr):
    """x with random bits added below the precision of its 16-bit format, then truncated."""
    mask: tl.constexpr = 0xFFFF if FORMAT == BFLOAT16 else 0x1FFF
    bits = x.to(tl.uint32, bitcast=True)
    rounded = ((bits + (halves & mask)) & (0xFFFFFFFF - mask)).to(tl.float32, bitcast=True)
    # Infinity and NaN stay, and so do values that are subnormal in float16.
    plain = (tl.abs(x) < float("inf")) == 0
    if FORMAT == FLOAT16:
        plain = plain | (tl.abs(x) < 2.0**-14)
    return tl.where(plain, x, rounded)


@triton.jit
def load_master(address, remainder, start, left, BLOCKS: tl.constexpr, VECTOR: tl.constexpr):
    """The float32 number whose upper half is a bfloat16 parameter."""
    i = index(BLOCKS)
    upper = _get(address, start, i, left, tl.int16, VECTOR).to(tl.int32)
    lower = _get(remainder, start, i, left, tl.int16, VECTOR).to(tl.int32)
    return ((upper << 16) + lower).to(tl.float32, bitcast=True)


@triton.jit
def store_master(x, address, remainder, start, left, BLOCKS: tl.constexpr, VECTOR: tl.constexpr):
    i = index(BLOCKS)
    bits = x.to(tl.uint32, bitcast=True)
    upper = tl.where(x == x, (bits + 0x8000) >> 16, 0x7FC0)
    lower = tl.where(x == x, bits, 0)  # the lower half is kept
    _put(upper, address, start, i, left, tl.int16, VECTOR)
    _put(lower, remainder, start, i, left, tl.int16, VECTOR)
