"""The arithmetic of every reduction, bitwise equal to torch's own operators and casts."""

import functools
import operator

import pytest
import torch

from hfreduce import _C

# In the order of DType and Op in csrc/hfreduce/types.h.
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SMALL = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (*INTEGERS, torch.bool, *FLOATS)
OPS = ("sum", "avg", "prod", "min", "max", "band", "bor", "bxor", "premul_sum")
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
BITWISE = {"band": operator.and_, "bor": operator.or_, "bxor": operator.xor}
FACTORS = (0.5, -1.75, 3.1, 1e-3, 2.0, 0.0, -1.0, 1.1)
GUARD = 64


def taken(dtype: torch.dtype, op: str) -> bool:
    """Whether reduce supports the pair."""
    if op in BITWISE:
        return not dtype.is_floating_point
    if op == "premul_sum":
        return dtype.is_floating_point
    return (dtype, op) != (torch.bool, "avg")


PAIRS = [(dtype, op) for dtype in DTYPES for op in OPS if taken(dtype, op)]


def draw(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Random bits: all values of the dtype, including NaNs, infinities and subnormals."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


def combine(op: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if op in BITWISE:
        return BITWISE[op](a, b)
    return {"prod": torch.mul, "min": torch.minimum, "max": torch.maximum}.get(op, torch.add)(a, b)


def expected(inputs: list[torch.Tensor], op: str, divisor: int = 1, factors=None) -> torch.Tensor:
    """Inputs one after another, small floats in float32, rounded once."""
    dtype = inputs[0].dtype
    if dtype == torch.bool:
        op = {"sum": "bor", "max": "bor", "prod": "band", "min": "band"}.get(op, op)
    wide = torch.float32 if dtype in SMALL else dtype
    terms = [x.to(wide) for x in inputs]
    if factors:
        terms = [torch.tensor(f, dtype=wide) * x for f, x in zip(factors, terms, strict=True)]
    total = functools.reduce(functools.partial(combine, op), terms)
    if op == "avg":
        total = total / divisor if dtype.is_floating_point else torch.div(total, divisor, rounding_mode="trunc")
    return rounded(total, dtype)


def rounded(wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """torch's cast. What is too large for e4m3 becomes NaN in some versions and the largest number in others."""
    return (wide.clamp(-448, 448) if dtype == torch.float8_e4m3fn else wide).to(dtype)


class Room:
    """Memory for a tensor `shift` bytes after a line, with guard bytes around it."""

    def __init__(self, dtype: torch.dtype, count: int, shift: int = 0):
        self.bytes = count * dtype.itemsize
        self.raw = torch.full((self.bytes + 4 * GUARD,), 0xA5, dtype=torch.uint8)
        self.at = GUARD + -self.raw.data_ptr() % 64 + shift
        self.dtype = dtype

    def put(self, tensor: torch.Tensor) -> "Room":
        self.raw[self.at : self.at + self.bytes] = tensor.view(torch.uint8)
        return self

    @property
    def pointer(self) -> int:
        return self.raw.data_ptr() + self.at

    def get(self) -> torch.Tensor:
        """The tensor; checks that the guard bytes are unchanged."""
        around = torch.cat([self.raw[: self.at], self.raw[self.at + self.bytes :]])
        assert around.eq(0xA5).all(), "written outside the output"
        return self.raw[self.at : self.at + self.bytes].clone().view(self.dtype)


def run(out: Room, inputs: list[Room], count: int, op: str, divisor=1, factors=None, stream=False) -> torch.Tensor:
    pointers = [x.pointer for x in inputs]
    dtype = DTYPES.index(out.dtype)
    _C.reduce(out.pointer, pointers, factors, count, dtype, OPS.index(op), divisor, stream)
    return out.get()


def reduced(inputs: list[torch.Tensor], op: str, divisor=1, factors=None) -> torch.Tensor:
    dtype, count = inputs[0].dtype, inputs[0].numel()
    rooms = [Room(dtype, count).put(x) for x in inputs]
    return run(Room(dtype, count), rooms, count, op, divisor, factors)


def same(got: torch.Tensor, want: torch.Tensor, zeros: bool = True) -> None:
    """Equal bits; but any NaN equals any NaN and, unless `zeros`, any zero any zero."""
    a, b = (x.view(BITS[x.dtype.itemsize]) for x in (got, want))
    if got.dtype.is_floating_point:
        for free in (torch.isnan, *([] if zeros else [lambda x: x == 0])):
            where = free(want.double())
            assert torch.equal(free(got.double()), where)
            a, b = a.masked_fill(where, 0), b.masked_fill(where, 0)
    wrong = (a != b).nonzero().flatten()
    assert not len(wrong), (
        f"{len(wrong)} of {len(a)} differ, the first at {wrong[0]}: {got[wrong[0]]}, {want[wrong[0]]}"
    )


def equal(op: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """torch's vector code and its scalar tail disagree on which zero is less."""
    same(got, want, zeros=op not in ("min", "max"))


def options(op: str, n: int, divisor: int = 3) -> dict:
    return {"divisor": divisor if op == "avg" else 1, "factors": list(FACTORS[:n]) if op == "premul_sum" else None}


@pytest.mark.parametrize("dtype, op", PAIRS, ids=str)
def test_bits_are_those_of_torch_for_any_count_of_inputs_and_elements(dtype, op):
    for n in range(1, 9):
        for count in (0, 1, 31, 1024, 4097):
            inputs = [draw(dtype, count, 10 * n + j) for j in range(n)]
            want = expected(inputs, op, **options(op, n))
            for stream in (False, True):
                rooms = [Room(dtype, count).put(x) for x in inputs]
                equal(op, run(Room(dtype, count), rooms, count, op, stream=stream, **options(op, n)), want)


@pytest.mark.parametrize("dtype, op", PAIRS, ids=str)
def test_any_address_will_do(dtype, op):
    count = 2 * 1024 + 77
    for n, shifts in ((1, (3, 1)), (2, (1, 0, 63)), (3, (7, 2, 5, 0)), (2, (dtype.itemsize, 0, 0))):
        inputs = [draw(dtype, count, j) for j in range(n)]
        rooms = [Room(dtype, count, shift).put(x) for x, shift in zip(inputs, shifts[1:], strict=True)]
        want = expected(inputs, op, **options(op, n))
        for stream in (False, True):
            equal(op, run(Room(dtype, count, shifts[0]), rooms, count, op, stream=stream, **options(op, n)), want)


@pytest.mark.parametrize("dtype, op", PAIRS, ids=str)
def test_the_output_may_be_any_one_of_the_inputs(dtype, op):
    count = 3000
    for n in (1, 2, 3, 5):
        inputs = [draw(dtype, count, j) for j in range(n)]
        want = expected(inputs, op, **options(op, n))
        for k in range(n):
            for stream in (False, True):
                rooms = [Room(dtype, count).put(x) for x in inputs]
                equal(op, run(rooms[k], rooms, count, op, stream=stream, **options(op, n)), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stream", (False, True))
def test_large(dtype, stream):
    count = 3_000_001
    inputs = [draw(dtype, count, j) for j in range(3)]
    rooms = [Room(dtype, count).put(x) for x in inputs]
    same(run(Room(dtype, count), rooms, count, "sum", stream=stream), expected(inputs, "sum"))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_two_inputs_are_rounded_once(dtype):
    """float64 represents the sum of two narrower floats well enough to be rounded to float32 as if exact."""
    a, b = draw(dtype, 200_000, 1), draw(dtype, 200_000, 2)
    exact = a.double() + b.double()
    same(reduced([a, b], "sum"), exact if dtype == torch.float64 else rounded(exact.float(), dtype))


@pytest.mark.parametrize("dtype", (torch.float8_e4m3fn, torch.float8_e5m2), ids=str)
@pytest.mark.parametrize("op", ("sum", "prod", "min", "max"))
def test_every_pair_of_eight_bit_floats(dtype, op):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    a, b = codes.repeat_interleave(256).view(dtype), codes.repeat(256).view(dtype)
    equal(op, reduced([a, b], op), expected([a, b], op))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("factor", (1.0, 1.0009765625, 1 / 3, 2.0**-20, 3000.0))
def test_every_sixteen_bit_float_there_and_back(dtype, factor):
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    same(reduced([x], "premul_sum", factors=[factor]), expected([x], "premul_sum", factors=[factor]))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", ("min", "max"))
def test_a_nan_anywhere_is_the_result(dtype, op):
    for n in (2, 3, 8):
        for k in range(n):
            inputs = [torch.full((40,), float(j), dtype=torch.float32).to(dtype) for j in range(n)]
            inputs[k] = torch.full((40,), float("nan")).to(dtype)
            assert reduced(inputs, op).float().isnan().all()


def test_overflow():
    for dtype in (torch.float16, torch.float8_e5m2, torch.bfloat16):
        top = torch.tensor([torch.finfo(dtype).max] * 50).to(dtype)
        assert reduced([top, top], "sum").float().isinf().all()
        if dtype != torch.bfloat16:  # its sum overflows in float32, too
            same(reduced([top, top], "avg", divisor=2), top)
    for x in (448.0, -448.0):
        top = torch.full((50,), x).to(torch.float8_e4m3fn)
        same(reduced([top, top], "sum"), top)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_wrap_around_and_averages_go_toward_zero(dtype):
    top = torch.full((33,), torch.iinfo(dtype).max, dtype=dtype)
    same(reduced([top, top], "sum"), top + top)
    same(reduced([top, top], "prod"), top * top)
    values = torch.tensor([7, 8, 1, 0] if dtype == torch.uint8 else [-7, 7, -8, -1], dtype=dtype)
    same(reduced([values], "avg", divisor=3), torch.tensor([int(v / 3) for v in values.tolist()], dtype=dtype))


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=str)
def test_quotients_of_large_integers_are_exact(dtype):
    info = torch.iinfo(dtype)
    for divisor in (2, 3, 7, 1000, 2**31 - 1):
        near = [q * divisor + r for q in (1, 2, info.max // divisor) for r in (-1, 0, 1)]
        values = [v for x in near for v in (x, -x) if info.min <= v <= info.max] + [info.max, info.min]
        want = [(abs(v) // divisor) * (1 if v >= 0 else -1) for v in values]
        same(reduced([torch.tensor(values, dtype=dtype)], "avg", divisor=divisor), torch.tensor(want, dtype=dtype))


@pytest.mark.parametrize("dtype, op", [(d, op) for d in DTYPES for op in OPS if not taken(d, op)], ids=str)
def test_what_makes_no_sense_is_refused(dtype, op):
    room = Room(dtype, 4)
    with pytest.raises(ValueError, match="reduce takes"):
        run(room, [room, room], 4, op)


def test_bad_arguments_are_refused():
    room = Room(torch.float32, 4)
    for arguments in (
        {"inputs": [], "count": 4, "op": "sum"},
        {"inputs": [room], "count": -1, "op": "sum"},
        {"inputs": [room], "count": 4, "op": "avg", "divisor": 0},
        {"inputs": [room], "count": 4, "op": "sum", "factors": [2.0]},
    ):
        with pytest.raises(ValueError, match="reduce takes"):
            run(room, **arguments)
