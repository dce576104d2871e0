"""The low-bit formats of optimizer states, and the float32 master of a bfloat16 parameter, in plain torch.

`csrc/optim.h` defines them. This version is for state dicts, for states kept in another format before, and for tests.
Blocks are of BLOCK consecutive elements, the last one shorter:

    scale = the x of largest magnitude in the block,   x ~ value(code) * scale,   value(code) about (m / most m)^3

with integers m from -127 to 128, or from 1 to 256 if no sign is needed; for "4bit" from -7 to 8, or from 1 to 16. After
the blockwise codes of Dettmers et al. 2022, arXiv:2110.02861, and Li et al. 2023, arXiv:2309.01507. Tensors here are
flat.
"""

import functools

import torch
from torch import Tensor

BLOCK = 256
LOW = ("8bit", "4bit")
SMALL = 4096  # elements: smaller tensors stay float32, because little would be saved
LEAST = 2.0**-100  # the smallest scale except 0


def _shape(format: str, signed: bool) -> tuple[int, int, float]:
    """The number of codes, the code of m = 0, and the unit of m in which its bits are a third of those of 4 value."""
    bits = {"8bit": 8, "4bit": 4}[format]
    return 2**bits, 2 ** (bits - 1) - 1 if signed else -1, 2.0 ** -(bits + 84 - signed)


@functools.cache
def values(format: str, signed: bool) -> Tensor:
    """The value of each code, ascending, float32."""
    count, zero, unit = _shape(format, signed)
    m = (torch.arange(count) - zero) * unit
    return (m.abs().view(torch.int32) * 3).view(torch.float32).copysign(m) / 4


def _blocks(x: Tensor) -> Tensor:
    """x as float32 rows of BLOCK elements, padded with zeros."""
    return torch.nn.functional.pad(x.float(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)


def encode(x: Tensor, format: str, signed: bool) -> tuple[Tensor, Tensor]:
    """(codes uint8, scale float32) of x: (numel,) or, for "4bit", (ceil(numel / 2),); and (ceil(numel / BLOCK),).

    The result of `decode` has the same codes and scales again. A block with a non-finite value becomes NaN, and one
    with only magnitudes under LEAST becomes 0.
    """
    _, zero, unit = _shape(format, signed)
    blocks = _blocks(x) if signed else _blocks(x).abs()
    most, least = blocks.amax(1), blocks.amin(1)
    scale = torch.where(most >= -least, most, least)
    scale = torch.where(scale.isfinite(), torch.where(scale.abs() < LEAST, 0.0, scale), torch.nan)
    # (4 / scale would be 4 times a reciprocal to torch, which may be subnormal.)
    inverse = torch.where(scale.abs() > 0, (scale.abs() / 4).reciprocal(), 0.0)
    third = ((blocks.abs() * inverse[:, None]).nan_to_num(0).view(torch.int32) // 3).view(torch.float32)
    m = third.copysign(blocks) * (1 / unit) * torch.where(scale < 0, -1.0, 1.0)[:, None]
    # float32 numbers between 2^23 and 2^24 are integers.
    codes = ((m + (2.0**23 + zero)).clamp(min=2.0**23) - 2.0**23).to(torch.uint8).view(-1)
    if format == "8bit":
        return codes[: x.numel()].clone(), scale
    pairs = torch.nn.functional.pad(codes[: x.numel()], (0, x.numel() % 2)).view(-1, 2)
    return pairs[:, 0] | pairs[:, 1] << 4, scale


def decode(codes: Tensor, scale: Tensor, numel: int, format: str, signed: bool) -> Tensor:
    """The float32 values of `numel` elements."""
    if format == "4bit":
        codes = torch.stack((codes & 15, codes >> 4), 1).view(-1)[:numel]
    blocks = _blocks(values(format, signed).to(codes.device)[codes.int()])
    return (blocks * scale[:, None]).view(-1)[:numel]


def join(parameter: Tensor, remainder: Tensor) -> Tensor:
    """The float32 master of a bfloat16 parameter: its bits are (parameter << 16) + remainder."""
    high = parameter.view(torch.int16).int() << 16
    return (high + remainder.int()).view(torch.float32)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """(parameter bfloat16, remainder int16) of a float32 master, rounded half up in magnitude; NaN stays NaN."""
    bits = master.contiguous().view(torch.int32).long()
    high = (bits + 0x8000) >> 16
    low = (bits - (high << 16)).to(torch.int16)
    parameter = high.to(torch.int16).view(torch.bfloat16)
    lost = master.isnan()
    return torch.where(lost, torch.nan, parameter), torch.where(lost, 0, low)
