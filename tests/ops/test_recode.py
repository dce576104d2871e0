"""keep="output": bitwise the gradient of keep="input", from y and five bits per element."""

import itertools

import pytest
import torch
from torch import nn

import hfnn
from hfnn import memory
from hfnn.core import recipe
from hfnn.core.kernel import _interpreting
from hfnn.ops import recode

KERNELS = ("cuda", "triton") if torch.cuda.is_available() else ("cpp", "triton") if _interpreting() else ("cpp",)
F = hfnn.functional
FUNCTIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x, **how: F.gelu(x, approximate="tanh", **how),
    "silu": F.silu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "quick_gelu": F.quick_gelu,
}
each = pytest.mark.parametrize("name", FUNCTIONS)
NODE = "_KeepsCodesBackward"


def numbers(device, dtype=torch.bfloat16):
    """All 16-bit numbers."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).to(device)


def bits(x):
    """Bit patterns, with one for all NaNs."""
    return x.detach().view(torch.int16).masked_fill(x.isnan(), 0x7FC0)


def kernel_for(name, kernel):
    if kernel == "cuda" and not name.startswith("gelu"):
        pytest.skip("has no CUDA C++ kernel")
    return hfnn.use(kernel)


@each
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_number(name, kernel, device):
    """y, and the gradients for ordinary, huge and special dy, bitwise equal those of keep="input"."""
    x = numbers(device).requires_grad_()
    with kernel_for(name, kernel):
        y, want = FUNCTIONS[name](x, keep="output"), FUNCTIONS[name](x)
        assert y.grad_fn.name() == NODE and recipe.take(y) is None and recipe.take(want) is not None
        assert torch.equal(bits(y), bits(want))
        largest = torch.finfo(torch.bfloat16).max
        cotangents = [torch.full_like(y, dy) for dy in (1.0, -0.37, largest, -largest, 1e-38, torch.inf, torch.nan)]
        for dy in (*cotangents, torch.randn_like(y)):
            grads = [torch.autograd.grad(out, x, dy, retain_graph=True)[0] for out in (y, want)]
            assert torch.equal(*map(bits, grads))


@each
@pytest.mark.parametrize("kernel", KERNELS)
def test_x_comes_back(name, kernel, device):
    """Bitwise, except where f'(x) is certainly 0; NaN gives NaN."""
    x = numbers(device).requires_grad_()
    with kernel_for(name, kernel):
        y = FUNCTIONS[name](x, keep="output")
        node = y.grad_fn
        found = recode._decode(y.detach(), node.saved_tensors[1], node.way)
        (slope,) = torch.autograd.grad(y, x, torch.full_like(y, torch.finfo(y.dtype).max))
    flat = ((slope == 0) | slope.isnan()) & x.isfinite()
    assert torch.equal(found.isnan(), x.isnan())
    assert torch.equal(bits(found)[~flat], bits(x)[~flat])
    assert (found[flat].abs() <= x[flat].abs()).all()
    assert 0 < flat.sum() < 25000 and node.way.tables.rank.max() < 31


@each
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 3 * 769, 4099])
def test_what_is_kept(name, n, device):
    x = torch.randn(n, device=device, dtype=torch.bfloat16, requires_grad=True)
    handle = 2  # bytes, see recode.py
    kept = memory.saved_bytes(lambda: FUNCTIONS[name](x, prefer="memory", keep="output"))
    assert kept.total == 2 * n + -(-5 * n // 8) + handle
    y, want = FUNCTIONS[name](x, prefer="memory", keep="output"), FUNCTIONS[name](x, prefer="memory")
    dy = torch.randn_like(y)
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(want, x, dy)[0])


def test_a_stock_consumer_shares_y(device):
    x = torch.randn(64, 320, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = nn.Parameter(torch.randn(8, 320, device=device, dtype=torch.bfloat16))
    sizes = [
        memory.saved_bytes(lambda: nn.functional.linear(F.gelu(x, prefer="memory", keep=keep), weight)).total  # noqa: B023
        for keep in recode.KEEPS
    ]
    assert sizes == [2 * x.nbytes, x.nbytes + 5 * x.numel() // 8 + 2]


@each
def test_second_derivatives(name, device):
    x = (torch.randn(5, 64, device=device) * 2).bfloat16().requires_grad_()

    def derivatives(keep):
        y = FUNCTIONS[name](x, prefer="memory", keep=keep)
        (first,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        return first, *torch.autograd.grad(first.square().sum(), x)

    for mine, theirs in zip(derivatives("output"), derivatives("input"), strict=True):
        assert torch.equal(mine, theirs)


@each
def test_third_derivative(name, device):
    x = (torch.randn(40, device=device) * 2).bfloat16().requires_grad_()

    def third(keep):
        y = FUNCTIONS[name](x, prefer="memory", keep=keep)
        for _ in range(2):
            (y,) = torch.autograd.grad(y.float().sum(), x, create_graph=True)
        return torch.autograd.grad(y.float().sum(), x)[0]

    if name == "hardswish":
        pytest.skip("torch has no third derivative of it")
    torch.testing.assert_close(third("output"), third("input"), rtol=0, atol=0)


@each
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes_keep_x(name, dtype, device):
    x = torch.randn(4, 50, device=device, dtype=dtype, requires_grad=True)
    y = FUNCTIONS[name](x, prefer="memory", keep="output")
    assert y.grad_fn.name() != NODE and recipe.take(y) is not None


@each
def test_layouts(name, device):
    x = torch.randn(2, 6, 5, 3, device=device, dtype=torch.bfloat16)
    dy = torch.randn_like(x)
    results = []
    for layout, keep in itertools.product((torch.contiguous_format, torch.channels_last), recode.KEEPS):
        leaf = x.clone(memory_format=layout).requires_grad_()
        y = FUNCTIONS[name](leaf, prefer="memory", keep=keep)
        results.append((y, *torch.autograd.grad(y, leaf, dy)))
    strided = x.transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
    y = FUNCTIONS[name](strided, prefer="memory", keep="output")
    results.append((y, *torch.autograd.grad(y, strided, dy.expand(2, 6, 5, 3))))
    assert all(torch.equal(a, b) for one in results for a, b in zip(one, results[0], strict=True))


def test_functions_with_too_many_x_are_refused():
    x = torch.zeros(3, dtype=torch.bfloat16)
    ones = lambda dy, x: dy.clone()  # noqa: E731
    assert recode._tables(x, torch.zeros_like, ones) is None
    assert recode._tables(x, torch.clone, ones) is not None
    halves = lambda x: (x.view(torch.int16) & -64).view(torch.bfloat16)  # noqa: E731  64 to one
    assert recode._tables(x, halves, ones) is None


def test_modules_and_errors(device):
    x = torch.randn(4, 50, device=device, dtype=torch.bfloat16, requires_grad=True)
    for original in (nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish):
        m = hfnn.convert(original(), prefer="memory")
        assert m(x).grad_fn.name() != NODE
        m.keep = "output"
        assert m(x).grad_fn.name() == NODE
        m.keep = "both"
        with pytest.raises(ValueError, match="keep='both': choose one of 'input', 'output'"):
            m(x)
    with torch.no_grad():
        assert torch.equal(F.gelu(x, prefer="memory", keep="output"), F.gelu(x, prefer="memory"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_cuda_graph_before_and_after_the_tables_are_there():
    x = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    want = torch.autograd.grad(F.silu(x, prefer="memory").sum(), x)[0]
    recode._known.clear()
    for warm in (False, True):
        if warm:
            F.silu(x, prefer="memory", keep="output")
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = F.silu(x, prefer="memory", keep="output")
            assert (y.grad_fn.name() == NODE) == warm
            (dx,) = torch.autograd.grad(y.sum(), x)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(dx, want)
