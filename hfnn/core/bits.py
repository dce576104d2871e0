"""Small codes in packed bits: a boolean in one bit, a choice among four in two bits.

Code i of the flattened tensor is in the bits [width i, width (i + 1)) of the bytes, the lowest bit of a byte first: one
format for the CPU, Triton and CUDA (csrc/bits.h). 1024 booleans are 128 bytes.
"""

import math

import torch

from hfnn.core.context import PLAIN, address, context
from hfnn.core.kernel import Kernel, Op
from hfnn.core.written import written_to

_hooks = torch._C._autograd._top_saved_tensors_default_hooks

WIDTHS = (1, 2, 4, 5, 8)  # bits per code


def _reference(codes, width=1):
    return _pack_by_torch(codes.reshape(-1), width)


OP = Op(
    "bits",
    _reference,
    _reference,
    kernels=(
        Kernel("triton", "hfnn.kernels.bits", "cuda", (torch.uint8,)),
        Kernel("cpp", "hfnn._C:cpu.bits", "cpu", (torch.uint8,)),
    ),
    sample=lambda *_: None,
)


def size(codes: int, width: int = 1) -> int:
    """The number of bytes for this many codes."""
    return -(-codes * width // 8)


def pack(codes: torch.Tensor, width: int = 1) -> torch.Tensor:
    """Packs `codes` into ceil(n width / 8) bytes; the bits after the last code are 0.

    codes: any shape and layout, on any device; uint8, of which the lowest `width` bits count, or torch.bool if width is
    1. width: 1, 2, 4, 5 or 8. Result: uint8, one dimension. Raises ValueError for another width or dtype.
    """
    _check_width(width)
    if codes.dtype is not torch.uint8 and (codes.dtype is not torch.bool or width != 1):
        raise ValueError(f"codes must be torch.uint8, or torch.bool where width is 1, got {codes.dtype}, width {width}")
    codes = codes.detach().contiguous().view(-1)
    kernel = _kernel(codes)
    if kernel is None:
        return _pack_by_torch(codes, width)
    codes = codes.view(torch.uint8)
    packed = torch.empty(size(codes.numel(), width), dtype=torch.uint8, device=codes.device)
    kernel.pack(codes, packed, width, kernel.queue(codes))
    return packed


def unpack(packed: torch.Tensor, shape, width: int = 1, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The codes that `pack` was given, contiguous.

    packed: uint8, one dimension, with at least ceil(n width / 8) bytes for the n elements of `shape`. dtype: torch.bool
    (for width 1, and the default there) or torch.uint8. Raises ValueError for another width or dtype, for a tensor of
    another kind, and for too few bytes.
    """
    _check_width(width)
    dtype = dtype or (torch.bool if width == 1 else torch.uint8)
    if dtype is not torch.uint8 and (dtype is not torch.bool or width != 1):
        raise ValueError(f"dtype must be torch.uint8, or torch.bool where width is 1, got {dtype}, width {width}")
    if packed.dtype is not torch.uint8 or packed.dim() != 1:
        raise ValueError(f"packed must be torch.uint8 with one dimension, got {packed.dtype} {tuple(packed.shape)}")
    shape = torch.Size((shape,) if isinstance(shape, int) else shape)
    bytes_ = size(math.prod(shape), width)
    if packed.numel() < bytes_:
        raise ValueError(
            f"packed has {packed.numel()} bytes; the shape {tuple(shape)} takes {bytes_} at {width} bits a code"
        )
    packed = packed.detach()[:bytes_].contiguous()
    kernel = _kernel(packed)
    if kernel is None:
        return _unpack_by_torch(packed, math.prod(shape), width).view(shape).to(dtype)
    codes = torch.empty(shape, dtype=torch.uint8, device=packed.device)
    kernel.unpack(packed, codes, width, kernel.queue(packed))
    return codes.view(dtype)


def _check_width(width):
    if width not in WIDTHS:
        raise ValueError(f"width must be one of {', '.join(map(str, WIDTHS))} bits, got {width!r}")


def _kernel(x):
    """The kernel for codes or bytes; None for torch's ops, for other devices, tracers and subclasses."""
    return OP.find(x, torch.uint8) if context(x) is None else None


def _shifts(bits, like):
    return bits * torch.arange(8, device=like.device)


def _pack_by_torch(codes, width):
    """Eight codes form a number of 8 * width bits, which is `width` bytes."""
    # No view in another dtype: torch 2.11 does not support it under vmap.
    rows = torch.nn.functional.pad(codes, (0, -codes.numel() % 8)).view(-1, 8).long() & (1 << width) - 1
    words = (rows << _shifts(width, codes)).sum(1, keepdim=True)
    packed = (words >> _shifts(8, codes)[:width]) & 255
    return packed.to(torch.uint8).view(-1)[: size(codes.numel(), width)]


def _unpack_by_torch(packed, count, width):
    rows = torch.nn.functional.pad(packed, (0, -packed.numel() % width)).view(-1, width).long()
    words = (rows << _shifts(8, packed)[:width]).sum(1, keepdim=True)
    codes = (words >> _shifts(width, packed)) & (1 << width) - 1
    return codes.to(torch.uint8).view(-1)[:count]


class OfOutput:
    """The bits that a node keeps of its output. Once a consumer keeps the output itself, so does the node, as in torch,
    and the bits are freed. It is the node's `recipe` (hfnn/core/node.py).
    """

    __slots__ = ("_bits", "_look", "_y")

    def __init__(self, packed: torch.Tensor, y: torch.Tensor):
        self._bits, self._look, self._y = packed, (y._version, address(y)), None

    def keep(self, y: torch.Tensor) -> None:
        if self._bits is not None and self._look == (y._version, address(y)):
            self._bits.untyped_storage().resize_(0)
            self._bits, self._y = None, y.detach()

    def output(self) -> torch.Tensor | None:
        """The output, if it takes the place of the bits; raises if it was written to."""
        if self._y is not None and self._y._version != self._look[0]:
            raise written_to(self._y, self._look[0])
        return self._y

    def release(self) -> None:
        self._bits = self._y = None


def of_output(packed: torch.Tensor, y: torch.Tensor) -> OfOutput | None:
    """None with hooks of saved tensors, which decide what is kept of each."""
    return OfOutput(packed, y) if type(y) in PLAIN and _hooks(True) is None else None


def keeps_whole(x: torch.Tensor) -> None:
    """A consumer keeps x as it is: the node that made it need not keep bits."""
    found = getattr(x.grad_fn, "recipe", None)
    if type(found) is OfOutput and x.output_nr == 0 and _hooks(True) is None:
        found.keep(x)
