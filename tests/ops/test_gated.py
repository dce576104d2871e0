"""Gated products beyond the contract: packed tensors, rows with gaps, extreme values, kinks, what they keep."""

import copy
import math

import pytest
import torch
from torch import nn

import hfnn
from hfnn.core import node as recipe
from hfnn.core.kernel import _interpreting
from hfnn.ops.gated import GATES, formula, gated
from hfnn.testing import GRADIENTS, OUTPUTS, assert_close

KERNELS = [name for name in ("cpp", "triton") if name == "cpp" or _interpreting()]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INF, NAN = math.inf, math.nan


def leaf(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(2).to(dtype).requires_grad_()


def step(function, *leaves):
    y = function(*leaves)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(y.dtype)
    return y, *torch.autograd.grad(y, leaves, dy)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("f", GATES)
def test_every_gate_against_float64(f, dtype, kernel):
    gate, up = leaf(3, 769, dtype=dtype), leaf(3, 769, dtype=dtype, seed=1)
    with hfnn.use(kernel):
        got = step(lambda g, u: gated(g, u, f), gate, up)
    exact = lambda g, u: GATES[f].reference(g) * u  # noqa: E731
    wide = step(exact, *(t.detach().double().requires_grad_() for t in (gate, up)))
    own = step(lambda g, u: formula(g, u, f), gate, up)
    for what, g, w, o in zip(("output", "dgate", "dup"), got, wide, own, strict=True):
        assert_close(g, w, o, OUTPUTS if what == "output" else GRADIENTS, what)


# Widths that a packed tensor's tiles divide, that no vector divides, of several tiles and of part of one.
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("shape", [(5, 512), (2, 3, 37), (2, 2304), (1, 1), (0, 4), (3, 0), (7,), (2, 2500)])
def test_packed_is_its_halves_to_the_bit(shape, gate_first, kernel):
    packed = leaf(*shape[:-1], 2 * shape[-1])
    gate, up = (half.detach().clone().requires_grad_() for half in packed.chunk(2, -1))
    if not gate_first:
        gate, up = up, gate
    with hfnn.use(kernel):
        y, dpacked = step(lambda p: gated(p, gate_first=gate_first), packed)
        want, *halves = step(gated, gate, up)
    assert torch.equal(y, want)
    assert dpacked.is_contiguous() and dpacked.shape == packed.shape
    assert torch.equal(dpacked, torch.cat(halves if gate_first else halves[::-1], -1))


@pytest.mark.parametrize("kernel", KERNELS)
def test_views_of_a_packed_tensor_are_not_copied_first(kernel, monkeypatch):
    packed = leaf(6, 1024, dtype=torch.bfloat16)
    copies = []
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda self, *a, **k: copies.append(self) or self.clone())
    with hfnn.use(kernel):
        y, _ = step(lambda p: hfnn.functional.swiglu(*p.chunk(2, -1)), packed)
        assert not copies
        saved = hfnn.memory.saved_bytes(lambda: hfnn.functional.swiglu(*packed.chunk(2, -1)))
    assert saved.total == packed.nbytes
    monkeypatch.undo()
    assert torch.equal(y, nn.functional.silu(packed[:, :512].float()).mul(packed[:, 512:].float()).bfloat16())


@pytest.mark.parametrize("threads", [1, 3])
def test_bits_do_not_depend_on_threads_or_gaps(threads):
    gate, up = leaf(40, 1500).detach(), leaf(40, 1500, seed=1).detach()
    apart = torch.zeros(40, 4000)
    apart[:, 10:1510], apart[:, 2001:3501] = gate, up
    results = []
    for g, u, n in ((gate, up, 1), (apart[:, 10:1510], apart[:, 2001:3501], threads)):
        y, dg, du = (torch.full_like(gate, NAN) for _ in range(3))
        hfnn._C.cpu.gated.forward(g, u, y, 1, n)
        hfnn._C.cpu.gated.backward(y, g, u, dg, du, 1, n)
        results.append((y, dg, du))
    assert all(map(torch.equal, *results))


def test_the_kernel_refuses_what_is_not_so():
    forward, x = hfnn._C.cpu.gated.forward, torch.ones(4, 6)
    for args, message in (
        ((x, x, x, 6, 1), "kind must be from 0 to 5, got 6"),
        ((x, x[:, ::2], x, 0, 1), r"up must have the shape \(4, 6\)"),
        ((x, torch.ones(6, 4).t(), x, 0, 1), "up must have rows without gaps"),
        ((x, x.double(), x, 0, 1), "up must be float32, got float64"),
        ((torch.ones(4), x, x, 0, 1), "gate must have 2 dimensions"),
    ):
        with pytest.raises(ValueError, match=message):
            forward(*args)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_reglu_at_its_kink_and_at_the_ends(dtype, kernel):
    """Bitwise torch's, including infinities and NaN of up and dy where relu's gradient is 0."""
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-6, -1e-6, INF, -INF, NAN], dtype=dtype)
    gate, up = (v.flatten() for v in torch.meshgrid(values, values, indexing="ij"))
    for dy in values:
        got, want = [], []
        for run, to in ((hfnn.functional.reglu, got), (lambda g, u: torch.relu(g) * u, want)):
            leaves = [t.clone().requires_grad_() for t in (gate, up)]
            with hfnn.use(kernel if to is got else "torch"):
                y = run(*leaves)
                to += [y, *torch.autograd.grad(y, leaves, dy.expand_as(y))]
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("f", GATES)
def test_large_gates(f, kernel):
    """Where exponentials overflow or underflow, value and slope are torch's."""
    gate = torch.tensor([-200.0, -100, -88, 88, 100, 200, -30, 30]).requires_grad_()
    up = torch.full((8,), 2.0)
    y, dgate = step(lambda g: _by(kernel)(g, up, f), gate)
    want, dwant = step(lambda g: formula(g, up, f), gate)
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(dgate, dwant, rtol=1e-5, atol=1e-12)  # torch's 1 - s cancels
    infinite = torch.tensor([INF, NAN])
    assert _by(kernel)(infinite, torch.ones(2), f).isnan().tolist() == [False, True]


def _by(kernel):
    def run(gate, up, f):
        with hfnn.use(kernel):
            return gated(gate, up, f)

    return run


def test_what_is_kept():
    """gate and up; the consumer keeps nothing more. torch keeps four tensors."""
    gate, up, weight = leaf(64, 512), leaf(64, 512, seed=1), leaf(512, 512)
    for f in GATES:
        ours = hfnn.memory.saved_bytes(lambda f=f: hfnn.functional.linear(gated(gate, up, f, prefer="memory"), weight))
        assert ours.total == gate.nbytes + up.nbytes + weight.nbytes
    torchs = hfnn.memory.saved_bytes(lambda: nn.functional.linear(nn.functional.silu(gate) * up, weight))
    assert torchs.total == 4 * gate.nbytes + weight.nbytes


def test_products_that_are_computed_again_are_not_kept():
    x, a, b, c = leaf(64, 256), leaf(512, 256), leaf(512, 256, seed=1), leaf(256, 512, seed=2)

    def network(recompute):
        linear = hfnn.functional.linear
        gate, up = (linear(x, w, recompute=recompute) for w in (a, b))
        return linear(hfnn.functional.swiglu(gate, up, prefer="memory"), c)

    kept = hfnn.memory.saved_bytes(lambda: network(True)).total
    assert kept == sum(t.nbytes for t in (x, a, b, c))
    grads = [torch.autograd.grad(network(recompute).square().sum(), (x, a, b, c)) for recompute in (True, False)]
    assert all(map(torch.equal, *grads))


def test_glu_has_a_recipe():
    x, weight = leaf(16, 1024), leaf(8, 512)

    def run():
        y = hfnn.functional.glu(x, prefer="memory")
        return torch.autograd.grad(hfnn.functional.linear(y, weight).square().sum(), (x, weight))

    recipe.counter.reset()
    on = run()
    assert recipe.counter.taken == recipe.counter.rebuilt == 1
    with recipe.disabled():
        assert all(map(torch.equal, on, run()))
    assert recipe.counter.taken == 1


@pytest.mark.parametrize("dim", [0, 1, -2])
def test_glu_along_other_dimensions(dim):
    """As torch's, with strides and second derivatives, where x is contiguous; else torch's own."""
    x = leaf(4, 6, 8)
    y, wanted = hfnn.functional.glu(x, dim, prefer="memory"), nn.functional.glu(x, dim)
    assert y.grad_fn.name().startswith("_Gated") and y.stride() == wanted.stride()
    dy = torch.randn_like(y)
    (dx,), (wanted_dx,) = (torch.autograd.grad(z, x, dy) for z in (y, wanted))
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(dx, wanted_dx)
    assert dx.stride() == wanted_dx.stride()
    double = x.detach().double().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda z: hfnn.functional.glu(z, dim, prefer="memory"), double)
    moved = x.detach().transpose(0, 1).requires_grad_()
    assert torch.equal(hfnn.functional.glu(moved, 1, prefer="memory"), nn.functional.glu(moved, 1))
    assert not hfnn.functional.glu(moved, 1, prefer="memory").grad_fn.name().startswith("_Gated")


def test_a_convolution_takes_the_recipe_of_glu_along_its_channels():
    """The input of glu is kept, in place of both."""
    model = nn.Sequential(nn.Conv1d(8, 64, 1), nn.GLU(1), nn.Conv1d(32, 8, 3))
    ours, x = hfnn.convert(copy.deepcopy(model), prefer="memory"), leaf(4, 8, 100)
    kept = [hfnn.memory.saved_bytes(lambda made=made: made(x)).total for made in (model, ours)]
    assert kept == [4 * (x.numel() + 4 * 96 * 100), 4 * (x.numel() + 4 * 64 * 100)]
    grads = [torch.autograd.grad(made(x).square().sum(), (x, *made.parameters())) for made in (model, ours)]
    for found, wanted in zip(*grads[::-1], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_glu_on_its_last_dimension():
    x = leaf(4, 6, 8)
    assert hfnn.functional.glu(x, 2, prefer="memory").grad_fn.name().startswith("_Gated")
    assert nn.functional.glu(x).grad_fn.name() == hfnn.functional.glu(x).grad_fn.name()
    with pytest.raises(RuntimeError, match="must be even"):
        hfnn.functional.glu(leaf(3, 5), prefer="memory")
    module = hfnn.GLU()
    module.prefer = "memory"
    assert repr(module) == repr(nn.GLU()) and module(x).shape == (4, 6, 4)


def test_what_the_kernels_do_not_take_is_torchs():
    gate, row = leaf(4, 6), leaf(6)
    assert torch.equal(hfnn.functional.swiglu(gate, row, prefer="memory"), nn.functional.silu(gate) * row)
    wide = leaf(4, 6).detach().double()
    assert hfnn.functional.swiglu(gate, wide, prefer="memory").dtype is torch.float64
    assert torch.equal(torch.vmap(hfnn.functional.reglu)(gate, gate), torch.relu(gate) * gate)


@pytest.mark.parametrize("f", GATES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_autocast_leaves_the_dtype(dtype, f):
    gate, up = leaf(4, 6, dtype=dtype), leaf(4, 6, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert gated(gate, up, f, prefer="memory").dtype is formula(gate, up, f).dtype is dtype


def test_errors():
    with pytest.raises(ValueError, match=r"must be even; got the shape \(3, 5\)"):
        hfnn.functional.swiglu(leaf(3, 5))
    with pytest.raises(ValueError, match=r"must be even; got the shape \(3, 5\)"):
        hfnn.functional.swiglu(leaf(3, 5), prefer="memory")
    with pytest.raises(ValueError, match="approximate='erf': choose one of 'none', 'tanh'"):
        hfnn.functional.geglu(leaf(3, 4), approximate="erf")
    with pytest.raises(ValueError, match="activation='tanh': choose one of 'silu'"):
        gated(leaf(3, 4), activation="tanh")


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_packed_double_backward_and_frozen_halves(needs):
    gate, up = (leaf(3, 5, seed=i).detach().requires_grad_(need) for i, need in enumerate(needs))
    y = hfnn.functional.swiglu(gate, up, prefer="memory")
    y.sum().backward()
    assert [t.grad is not None for t in (gate, up)] == list(needs)
    packed = leaf(3, 10).detach().double().requires_grad_()
    with hfnn.use("cpp"):
        assert torch.autograd.gradgradcheck(lambda p: hfnn.functional.geglu(p, gate_first=False), packed)


def test_no_rows():
    """Like an expert without tokens. A gradient expanded to no elements has strides of 0."""
    for shape in ((0, 8), (3, 0, 8)):
        x = torch.randn(shape, requires_grad=True)
        for fn in (hfnn.functional.glu, hfnn.functional.swiglu, lambda x, **how: hfnn.functional.swiglu(x, x, **how)):
            (dx,) = torch.autograd.grad(fn(x, prefer="memory").sum(), x)
            assert dx.shape == x.shape
