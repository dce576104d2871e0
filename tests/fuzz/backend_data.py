"""The inputs of a program's collectives, and their results by definition.

All ranks' inputs follow from the program, so a rank knows every other's. A definition replaces gloo where that lacks an
operation or dtype, or takes only contiguous tensors of one size: `Step.gloo` says where.
"""

import torch

FLOATS = ("float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
WHOLE = ("uint8", "int8", "int16", "int32", "int64")
COMPLEX = ("complex64", "complex128")
DTYPES = (*FLOATS, *WHOLE, *COMPLEX, "bool")
MOVED = (*DTYPES, "uint16", "uint32", "uint64", "float8_e4m3fnuz", "complex32")  # by operations that only move data
GLOO = ("float32", "float64", "float16", "bfloat16", "uint8", "int8", "int32", "int64")
LAYOUTS = ("plain", "offset", "transposed", "gaps", "negated", "conjugated")
CONJUGATED = (
    "reduce",
    "gather",
    "reduce_scatter",
    "reduce_scatter_single",
)  # others refuse such views, in torch's Python


SIGNED = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64)


def ops_of(dtype: str) -> tuple[str, ...]:
    """Reductions that hfreduce supports for a dtype."""
    if dtype in COMPLEX:
        return "SUM", "AVG"
    ops = ("SUM", "PRODUCT", "MIN", "MAX")
    if dtype in FLOATS:
        return (*ops, "AVG", "PREMUL")
    return (*ops, "BAND", "BOR", "BXOR", *(("AVG",) if dtype in WHOLE else ()))


def gloo_reduces(dtype: str, op: str) -> bool:
    return dtype in GLOO and op not in ("AVG", "PREMUL")


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name)


def values(seed: int, shape, dtype: str, exact: bool = True) -> torch.Tensor:
    """Small integers, whose sums and products are exact in any order; or normally distributed numbers."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    if not exact and dtype in FLOATS:
        return torch.randn(shape, generator=generator).to(dtype_of(dtype))
    whole = torch.randint(-2, 3, shape, generator=generator)
    if dtype == "bool":
        return whole > 0
    if dtype in (*COMPLEX, "complex32"):
        imaginary = torch.randint(-2, 3, shape, generator=generator)
        return torch.complex(whole.float(), imaginary.float()).to(dtype_of(dtype))
    if dtype.startswith("uint"):
        whole = whole.abs()
    return whole.to(dtype_of(dtype))


def layout_of(rng, name: str, dtype: str) -> str:
    """One that the collective and the dtype can have."""
    if name in CONJUGATED and dtype in COMPLEX:
        return "conjugated"
    return rng.choice(LAYOUTS[:-1])


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values with other strides, at an offset in their storage, or lazily negated or conjugated."""
    if layout == "negated" and (x.dtype in SIGNED or x.is_complex()):
        return torch._neg_view(-x)
    if layout == "conjugated":
        return x.conj_physical().conj()
    if layout == "offset":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "gaps":
        return torch.stack([x, x], -1)[..., 0]
    return x


def _wide(x):
    return x.float() if x.is_floating_point() and x.dtype is not torch.float64 else x


_TWO = {
    "MIN": torch.minimum, "MAX": torch.maximum, "PRODUCT": torch.mul, "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
}  # fmt: skip


def reduced(inputs: list[torch.Tensor], op: str, factors: list[float]) -> torch.Tensor:
    """Reduces in the order of ranks, in float32 for narrower floats, rounded once."""
    dtype, two = inputs[0].dtype, _TWO.get(op, torch.add)
    if dtype is torch.bool:
        two = {"SUM": torch.logical_or, "PRODUCT": torch.logical_and}.get(op, two)
    wide = [_wide(x) * f if op == "PREMUL" else _wide(x) for x, f in zip(inputs, factors, strict=True)]
    total = wide[0]
    for x in wide[1:]:
        total = two(total, x)
    if op == "AVG":
        whole = not dtype.is_floating_point
        if dtype.is_complex:  # by parts: a complex quotient is rounded twice
            total = torch.view_as_complex(torch.view_as_real(total) / len(inputs))
        else:
            total = torch.div(total, len(inputs), rounding_mode="trunc") if whole else total / len(inputs)
    if dtype is torch.float8_e4m3fn:  # saturates, as torch's cast does from 2.13 on
        total = total.clamp(-448, 448)
    return total.to(dtype)
