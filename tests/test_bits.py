"""Packed bits: every kernel and the path by torch ops, against the format's definition in integers."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hfnn
from hfnn.core import bits
from hfnn.core.kernel import _interpreting

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = ("triton",) if torch.cuda.is_available() else ("cpp", "triton") if _interpreting() else ("cpp",)
WAYS = (*KERNELS, "ops")
SIZES = (0, 1, 7, 8, 9, 769, 4096, 5003, 1 << 16)


@contextlib.contextmanager
def way(name, monkeypatch):
    """Within this context, `pack` and `unpack` use this kernel, or plain torch ops."""
    if name == "ops":
        with monkeypatch.context() as patch:
            patch.setattr(bits, "_kernel", lambda x: None)
            yield
        return
    with hfnn.use(name):
        assert bits._kernel(torch.empty(1, dtype=torch.uint8, device=DEVICE)).name == name
        yield


def defined(codes, width):
    """The packed bytes, by Python's integers."""
    number = sum(code << width * i for i, code in enumerate(codes.flatten().tolist()))
    return torch.tensor(list(number.to_bytes(bits.size(codes.numel(), width), "little")), dtype=torch.uint8)


def draw(n, width):
    return torch.randint(0, 1 << width, (n,), dtype=torch.uint8, device=DEVICE)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("width", bits.WIDTHS)
@pytest.mark.parametrize("n", SIZES)
def test_format(n, width, name, monkeypatch):
    codes = draw(n, width)
    with way(name, monkeypatch):
        packed = bits.pack(codes, width)
        assert packed.dtype is torch.uint8 and packed.shape == (-(-n * width // 8),)
        if n <= 5003:
            assert torch.equal(packed.cpu(), defined(codes, width))
        else:
            assert torch.equal(packed, bits._pack_by_torch(codes, width))
        back = bits.unpack(packed, (n,), width, torch.uint8)
    assert back.dtype is torch.uint8 and torch.equal(back, codes)


@pytest.mark.parametrize("name", WAYS)
def test_booleans(name, monkeypatch):
    mask = torch.randn(3, 5, 77, device=DEVICE) > 0
    with way(name, monkeypatch):
        packed = bits.pack(mask)
        again = bits.unpack(packed, mask.shape)
    assert torch.equal(packed.cpu(), defined(mask.long(), 1)) and packed.numel() == -(-mask.numel() // 8)
    assert again.dtype is torch.bool and again.is_contiguous() and torch.equal(again, mask)
    assert torch.equal(bits.unpack(packed, mask.numel()), mask.flatten())


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("width", bits.WIDTHS)
def test_any_layout(width, name, monkeypatch):
    codes = draw(6 * 35, width).view(6, 35)
    with way(name, monkeypatch):
        for strided in (codes.t(), codes[:, 1::3], codes[1:, 3:], codes[:1].expand(4, 35)):
            packed = bits.pack(strided, width)
            assert torch.equal(packed.cpu(), defined(strided, width))
            apart = torch.stack([packed, packed], 1)[:, 0]
            assert torch.equal(bits.unpack(apart, strided.shape, width, torch.uint8), strided)
        long = torch.cat([packed.new_zeros(1), packed, packed.new_full((3,), 255)])[1:]  # unaligned
        assert torch.equal(bits.unpack(long, strided.shape, width, torch.uint8), strided)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("width", bits.WIDTHS)
def test_higher_bits_of_a_code_are_dropped(width, name, monkeypatch):
    """They do not reach its neighbours."""
    codes = torch.randint(0, 256, (5003,), dtype=torch.uint8, device=DEVICE)
    with way(name, monkeypatch):
        assert torch.equal(bits.pack(codes, width), bits.pack(codes & (1 << width) - 1, width))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(n=st.integers(0, 9000), width=st.sampled_from(bits.WIDTHS), name=st.sampled_from(KERNELS))
def test_every_kernel_agrees_with_torch(n, width, name):
    codes = draw(n, width)
    with hfnn.use(name):
        packed = bits.pack(codes, width)
        back = bits.unpack(packed, (n,), width, torch.uint8)
    assert torch.equal(packed, bits._pack_by_torch(codes, width)) and torch.equal(back, codes)


def test_nothing_is_written_to_and_threads_do_not_matter():
    codes = draw(100_003, 5)
    kept, version, threads = codes.clone(), codes._version, torch.get_num_threads()
    packed = bits.pack(codes, 5)
    try:
        for n in (1, 2, 3, 5):
            torch.set_num_threads(n)
            assert torch.equal(bits.pack(codes, 5), packed)
            assert torch.equal(bits.unpack(packed, codes.shape, 5), kept)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(codes, kept) and codes._version == version and packed._version == 0


def test_where_no_kernel_runs():
    """Meta and fake tensors, vmap, torch.compile's tracer: the same format by torch's ops, or shapes alone."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    meta = torch.empty(3, 7, dtype=torch.bool, device="meta")
    assert bits.pack(meta).shape == (3,) and bits.unpack(bits.pack(meta), (3, 7)).shape == (3, 7)
    with FakeTensorMode() as mode:
        fake = bits.pack(mode.from_tensor(torch.empty(3, 7, dtype=torch.bool)))
        assert fake.shape == (3,) and bits.unpack(fake, (3, 7)).dtype is torch.bool
    mask = torch.randn(4, 21, device=DEVICE) > 0
    rows = torch.vmap(bits.pack)(mask)
    assert all(torch.equal(row, bits.pack(m)) for row, m in zip(rows, mask, strict=True))
    assert torch.equal(torch.vmap(lambda row: bits.unpack(row, (21,)))(rows), mask)
    graph = make_fx(lambda m: bits.unpack(bits.pack(m), (4, 21)))(mask)
    assert torch.equal(graph(~mask), ~mask)


def test_what_is_refused():
    codes, packed = draw(16, 1), draw(2, 8)
    for width in (0, 3, 6, 16, None):
        with pytest.raises(ValueError, match="width must be one of 1, 2, 4, 5, 8 bits, got"):
            bits.pack(codes, width)
        with pytest.raises(ValueError, match="width must be one of"):
            bits.unpack(packed, (16,), width)
    for dtype in (torch.int64, torch.float32, torch.int8):
        with pytest.raises(ValueError, match=f"codes must be torch.uint8.* got {dtype}"):
            bits.pack(codes.to(dtype))
        with pytest.raises(ValueError, match=f"dtype must be torch.uint8.* got {dtype}"):
            bits.unpack(packed, (16,), 1, dtype)
        with pytest.raises(ValueError, match=f"packed must be torch.uint8.* got {dtype}"):
            bits.unpack(packed.to(dtype), (16,))
    with pytest.raises(ValueError, match=r"codes must be .* torch.bool, width 2"):
        bits.pack(codes.bool(), 2)
    with pytest.raises(ValueError, match=r"dtype must be .* torch.bool, width 2"):
        bits.unpack(packed, (8,), 2, torch.bool)
    with pytest.raises(ValueError, match=r"packed has 2 bytes; the shape \(17,\) takes 3 at 1 bits a code"):
        bits.unpack(packed, (17,))
    with pytest.raises(ValueError, match=r"one dimension, got torch.uint8 \(1, 2\)"):
        bits.unpack(packed[None], (16,))


@pytest.mark.skipif("cpp" not in KERNELS, reason="tests the kernel of the CPU")
def test_the_kernel_checks_what_it_is_given():
    from hfnn._C import cpu

    codes, packed = draw(16, 1), torch.empty(2, dtype=torch.uint8)
    for wrong in (
        (codes, packed, 3, 1),
        (codes, packed, 2, 1),
        (codes.float(), packed, 1, 1),
        (codes, packed.float(), 1, 1),
        (codes.view(4, 4).t(), packed, 1, 1),
        (None, packed, 1, 1),
        (codes, None, 1, 1),
    ):
        with pytest.raises(ValueError):
            cpu.bits.pack(*wrong)
        with pytest.raises(ValueError):
            cpu.bits.unpack(wrong[1], wrong[0], *wrong[2:])
