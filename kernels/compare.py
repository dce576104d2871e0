"""Maps whose slope depends on the order of two numbers; csrc/compare.h has the contract.

A program works on a tile with 8 codes per row. The codes of a row are two bytes, stored as one 16-bit number; with
16-bit elements a row is one 16-byte load. The last program, which may end anywhere, has 4 codes per row and stores
bytes.
"""

import triton
import triton.language as tl

from .launch import launch

BLOCK = 2048  # elements per program
WARPS = 4

ABS, MAXIMUM, MINIMUM, CODES = (tl.constexpr(kind) for kind in range(4))


@triton.jit
def _choose(a, b, KIND: tl.constexpr):
    if KIND == ABS:
        return tl.abs(a)
    elif KIND == MAXIMUM:
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _forward_tile(a_N, b_N, y_N, codes_B, rest, KIND: tl.constexpr, WORD: tl.constexpr, BLOCK: tl.constexpr):
    """A tile with WORD codes per row; `rest` elements exist, None if all do."""
    PACKED: tl.constexpr = tl.int16 if WORD == 8 else tl.int8
    row, place = tl.arange(0, BLOCK // WORD), tl.arange(0, WORD)
    i = row[:, None] * WORD + place[None, :]
    inside = None if rest is None else i < rest
    a = tl.load(a_N + i, mask=inside).to(tl.float32)
    b = tl.zeros_like(a) if KIND == ABS else tl.load(b_N + i, mask=inside).to(tl.float32)
    if KIND != CODES:
        tl.store(y_N + i, _choose(a, b, KIND).to(y_N.dtype.element_ty), mask=inside)
    if codes_B is not None:
        code = tl.where(a < b, 1, tl.where(a > b, 2, tl.where(a == b, 0, 3)))
        if rest is not None:
            code = tl.where(inside, code, 0)
        words = tl.sum(code << (2 * place)[None, :], 1)
        if rest is None:
            words_W = codes_B.to(tl.pointer_type(PACKED))
            tl.store(words_W + row, words.to(PACKED))
        else:
            tl.store(codes_B + row, words.to(tl.uint8), mask=row * WORD < rest)


# Only the last program is masked, so the others load whole vectors for any n.
@triton.jit(do_not_specialize=["n"])
def forward_kernel(a_N, b_N, y_N, codes_B, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    a_N += start
    if b_N is not None:
        b_N += start
    if y_N is not None:
        y_N += start
    if codes_B is not None:
        codes_B += start // 4
    if start + BLOCK <= n:
        _forward_tile(a_N, b_N, y_N, codes_B, None, KIND, 8, BLOCK)
    else:
        _forward_tile(a_N, b_N, y_N, codes_B, n - start, KIND, 4, BLOCK)


@triton.jit
def _backward_tile(
    dy_N, codes_B, dx_N, rest, equal, less, greater, unordered,
    ONE: tl.constexpr, WORD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    PACKED: tl.constexpr = tl.uint16 if WORD == 8 else tl.uint8
    row, place = tl.arange(0, BLOCK // WORD), tl.arange(0, WORD)
    i = row[:, None] * WORD + place[None, :]
    if rest is None:
        inside = None
        words = tl.load(codes_B.to(tl.pointer_type(PACKED)) + row)
    else:
        inside = i < rest
        words = tl.load(codes_B + row, mask=row * WORD < rest, other=0)
    code = (words.to(tl.int32)[:, None] >> (2 * place)[None, :]) & 3
    factor = tl.where(code < 2, tl.where(code == 0, equal, less), tl.where(code == 2, greater, unordered))
    dy = tl.load(dy_N) if ONE else tl.load(dy_N + i, mask=inside).to(tl.float32)
    dx = tl.where(factor == factor, dy * factor, 0.0)
    tl.store(dx_N + i, dx.to(dx_N.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n"])
def backward_kernel(
    dy_N, codes_B, dx_N, n, equal: tl.float32, less: tl.float32, greater: tl.float32, unordered: tl.float32,
    ONE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if not ONE:
        dy_N += start
    codes_B += start // 4
    dx_N += start
    if start + BLOCK <= n:
        _backward_tile(dy_N, codes_B, dx_N, None, equal, less, greater, unordered, ONE, 8, BLOCK)
    else:
        _backward_tile(dy_N, codes_B, dx_N, n - start, equal, less, greater, unordered, ONE, 4, BLOCK)


def forward(a, b, y, codes, kind, queue):
    n = a.numel()
    if n:
        launch(forward_kernel, (-(-n // BLOCK),), a, b, y, codes, n, kind, BLOCK, num_warps=WARPS)


def backward(dy, codes, dx, equal, less, greater, unordered, queue):
    n = dx.numel()
    if n:
        one = dy.numel() == 1 and n > 1
        launch(
            backward_kernel, (-(-n // BLOCK),),
            dy, codes, dx, n, equal, less, greater, unordered, one, BLOCK, num_warps=WARPS,
        )  # fmt: skip
