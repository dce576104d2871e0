"""Parameters and buffers of any layout and dtype: sparse, quantised, complex, narrower than a byte, expanded, on meta.

torch has no `equal`, `clone`, `copy_` or storage for several of these. Here a tensor is the strided tensors that it
consists of (`dense`), and these are compared and copied as integers (`bits`).
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SPARSE = {
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
    torch.sparse_coo: ("_indices", "_values"),
}
_PAIRS = getattr(torch, "float4_e2m1fn_x2", None)  # two numbers in a byte
_COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64}


def dense(t: torch.Tensor) -> Iterator[torch.Tensor]:
    """The strided tensors that t consists of: indices and values of a sparse one, those inside a wrapper, or itself."""
    if t.layout in _SPARSE:
        yield from (getattr(t, name)() for name in _SPARSE[t.layout])
    elif is_traceable_wrapper_subclass(t):
        for name in t.__tensor_flatten__()[0]:
            yield from dense(getattr(t, name))
    elif t.layout is torch.strided:
        yield t


def storages(t: torch.Tensor) -> dict[int, int]:
    """{key of a storage: its bytes} of the memory behind t."""
    found = [part.untyped_storage() for part in dense(t)]
    return {storage._cdata: storage.nbytes() for storage in found}


def addresses(t: torch.Tensor) -> tuple[int, ...]:
    return tuple(part.data_ptr() for part in dense(t))


def version(t: torch.Tensor) -> int:
    """The number of writes to t; torch does not count them for tensors made in inference mode."""
    return 0 if t.is_inference() else t._version


def nbytes(t: torch.Tensor) -> int:
    """The bytes of t's elements, whatever the storage has besides them."""
    return sum(part.nbytes for part in dense(t))


def bits(t: torch.Tensor) -> torch.Tensor:
    """The memory of a strided tensor as integers; a copy of a quantised and of a lazily conjugated or negated one."""
    t = t.detach()
    if t.is_quantized:
        return t.int_repr()
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj())
    return t.resolve_neg().view(_INTEGERS[t.element_size()])


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one device have the same shape, dtype and bits; there are no bits on meta."""
    if a.shape != b.shape or a.layout is not b.layout:
        return False
    pairs = zip(dense(a), dense(b), strict=True)
    return all(
        x.shape == y.shape and x.dtype is y.dtype and (x.is_meta or torch.equal(bits(x), bits(y))) for x, y in pairs
    )


def _narrow(t: torch.Tensor) -> bool:
    """Whether t is of one of those dtypes of which some have no copies in torch."""
    return t.layout is torch.strided and t.element_size() == 1 and t.dtype is not torch.bool and not t.is_quantized


def copy(t: torch.Tensor, device: torch.device | str | None = None) -> torch.Tensor:
    """A copy of t's values, on `device` if there are values; not a parameter, and without a graph."""
    t = t.detach()
    if t.is_meta:
        return t
    if _narrow(t):
        return bits(t).to(device or t.device, copy=True).view(t.dtype)
    return t.clone() if device is None else t.to(device, copy=True)


def write(t: torch.Tensor, values: torch.Tensor) -> None:
    """Gives t the values of a `copy`, in place and past its version; a sparse tensor that differs gets other memory."""
    if t.layout in _SPARSE:
        values = copy(values, t.device)
        if not equal(t, values):
            t.data = values
        return
    for part, source in zip(dense(t), dense(values), strict=True):
        if part.is_meta:
            continue
        for dim in range(part.dim()):
            if part.stride(dim) == 0:  # expanded: one element stands for all
                part, source = part.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
        with torch.inference_mode() if part.is_inference() else torch.no_grad():
            bits(part.data).copy_(bits(source)) if _narrow(part) else part.data.copy_(source)


def numbers(t: torch.Tensor) -> torch.Tensor:
    """The values of t as a strided tensor of real numbers on the CPU, for comparisons; none of a tensor on meta."""
    t = t.detach()
    if t.is_meta:
        return torch.empty(0)
    if t.layout in _SPARSE:
        t = t.to_dense()
    if is_traceable_wrapper_subclass(t):
        return torch.cat([numbers(part).reshape(-1) for part in dense(t)])
    t = t.dequantize() if t.is_quantized else t
    t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t.resolve_neg()
    if _narrow(t):
        t = t.float() if t.is_floating_point() and t.dtype is not _PAIRS else bits(t)
    return t.to("cpu", copy=True)


def widened(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """t with numbers of `dtype` (float32 or float64), or complex ones of two such, if it is not integer or 8-bit."""
    if t.is_complex():
        return t.to(_COMPLEX[dtype])
    return t.to(dtype) if t.is_floating_point() and t.element_size() > 1 else t


def move(model: nn.Module, by: float, seed: int) -> None:
    """Changes each parameter, relative to its size, by up to `by`."""
    for p in model.parameters():
        if p.is_floating_point() and p.layout is torch.strided and p.element_size() > 1 and not p.is_meta:
            generator = torch.Generator(p.device).manual_seed(seed)
            p.data.mul_(torch.empty_like(p).uniform_(-1, 1, generator=generator).mul_(by).add_(1))
