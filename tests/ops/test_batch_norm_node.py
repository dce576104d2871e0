"""Batch norm's node against torch's ops, and its obligations to autograd."""

import copy
import inspect
import itertools
import types

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import hfnn
from hfnn.core import native
from hfnn.core import node as recipe
from hfnn.core.kernel import PREFERENCES, _interpreting, _load
from hfnn.ops import batch_norm

from .kernels import dtypes
from .test_batch_norm import CASES, LAYOUTS, MODULES, SHAPES, random_parts

F = hfnn.functional
pytestmark = pytest.mark.skipif(native.extension is None, reason="hfnn._autograd is not built")
BEHIND = (None, False), ("relu", False), ("silu", False), (None, True), ("relu", True), ("leaky_relu", True)


OFF = {torch.float64: 1e-9, torch.float32: 1e-4}  # in L2 norm; tests/ops/test_batch_norm.py has 16 bits


def of_both(call):
    """The result of `call` with the node, after comparison with torch's ops."""
    mine, nodes = call()
    # On a GPU, some nodes are torch's.
    assert all(native.extension.module(node) is not None for node in nodes) or mine[0].is_cuda
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "batch_norm_act", lambda *args, prefer="auto", **how: batch_norm._in_torch(*args, **how))
        other, _ = call()
    for a, b in zip(mine, other, strict=True):
        assert a.dtype is b.dtype and a.stride() == b.stride()
        assert mine[0].dtype not in OFF or (a - b).double().norm() <= OFF.get(a.dtype, 0) * (
            b.double().norm() + 1e-2
        ), (a, b)
    return mine


def kernel_of(device):
    return "triton" if device == "cuda" else "cpp"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.parametrize("mode", ["train", "eval", "frozen"])
def test_batches(mode, dims, layout, device):
    """Results, gradients and buffers of three batches, and strides."""
    for case, (act, with_sum) in itertools.product(CASES, BEHIND):
        theirs = random_parts(MODULES[dims](SHAPES[dims][1], device=device, **CASES[case]))
        theirs.train(mode != "eval")
        if mode == "frozen":
            theirs.eval().requires_grad_(False)
        batches = [LAYOUTS[layout](torch.randn(SHAPES[dims], device=device) * (i + 1) + i) for i in range(3)]
        others, dys = ([torch.randn_like(x) for x in batches] for _ in range(2))

        def call(theirs=theirs, act=act, with_sum=with_sum, batches=batches, others=others, dys=dys):
            module, found, nodes = copy.deepcopy(theirs), [], []
            for x, other, dy in zip(batches, others, dys, strict=True):
                leaves = [x.detach().requires_grad_(), *([other.detach().requires_grad_()] if with_sum else [])]
                residual = leaves[1] if with_sum else None
                y = F.batch_norm_act(leaves[0], *batch_norm.arguments(module), residual, act, 0.3, prefer="memory")
                wanted = [*leaves, *(p for p in module.parameters() if p.requires_grad)]
                found += [y.detach(), *torch.autograd.grad(y, wanted, dy)]
                nodes.append(y.grad_fn)
            return [*found, *(b.clone() for b in module.buffers())], nodes

        with hfnn.use(kernel_of(device)):
            of_both(call)


@dtypes
@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=4))[1:])
def test_any_gradients(wanted, dtype, device):
    """Any subset of gradients of x, weight, bias and residual, with parameters in float32 or x's dtype."""
    torch.manual_seed(0)
    for training, act, of_parameters in itertools.product([True, False], [None, "relu6"], [torch.float32, dtype]):
        x, residual, dy = (torch.randn(3, 8, 4, 4, device=device).to(dtype) for _ in range(3))
        parameters = torch.randn(4, 8, device=device).abs().to(of_parameters).unbind()

        def call(training=training, act=act, x=x, residual=residual, dy=dy, parameters=parameters):
            leaves = [t.clone().requires_grad_(w) for t, w in zip((x, *parameters[:2], residual), wanted, strict=True)]
            running = [p.clone() for p in parameters[2:]]
            y = F.batch_norm_act(leaves[0], *running, *leaves[1:3], training, 0.3, 1e-3, leaves[3], act)
            found = torch.autograd.grad(y, [t for t in leaves if t.requires_grad], dy)
            return [y.detach(), *found, *running], [y.grad_fn]

        with hfnn.use(kernel_of(device)):
            of_both(call)


def test_without_a_graph(device):
    """No graph, but statistics update: under no_grad, in inference mode, and if no leaf requires grad."""
    x = torch.randn(4, 6, 5, device=device)
    for region, training in itertools.product((torch.no_grad, torch.inference_mode, torch.enable_grad), (True, False)):

        def call(region=region, training=training):
            running = torch.zeros(6, device=device), torch.ones(6, device=device)
            with region():
                y = F.batch_norm_act(x, *running, training=training, residual=x, act="relu", prefer="memory")
            assert y.grad_fn is None
            return [y.clone(), *running], []

        of_both(call)


@pytest.mark.parametrize("reentrant", [False, True])
def test_statistics_under_checkpoint(reentrant, device):
    """A checkpoint runs forward again: the statistics are updated as often as torch's."""

    def call(norm):
        norm, x = copy.deepcopy(norm), torch.ones(4, 6, 5, device=device).cumsum(0).requires_grad_()
        y = checkpoint(norm, x * 1, use_reentrant=reentrant)
        before = norm.num_batches_tracked.clone(), norm.running_mean.clone()
        (dx,) = torch.autograd.grad(y.square().sum(), x) if not reentrant else (y.square().sum().backward(), x.grad)[1:]
        return [dx, *before, *(b.clone() for b in norm.buffers())]

    theirs = nn.BatchNorm1d(6, device=device, momentum=None)
    mine = hfnn.convert(copy.deepcopy(theirs), prefer="memory")
    for a, b in zip(call(mine), call(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_what_hooks_of_saved_tensors_see(device):
    """Each kept tensor once in forward, in order, and once in backward; the bias only where backward reads it."""
    for act, with_sum, training in itertools.product((None, "relu"), (False, True), (True, False)):

        def call(act=act, with_sum=with_sum, training=training):
            torch.manual_seed(0)
            x, residual = (torch.randn(3, 8, 4, 4, device=device, requires_grad=True) for _ in range(2))
            weight, bias = (torch.randn(8, device=device, requires_grad=True) for _ in range(2))
            running, packed, unpacked = (torch.zeros(8, device=device), torch.ones(8, device=device)), [], []

            def pack(t):
                packed.append((t.dtype, t.shape))
                return len(packed), t * 2 if t.is_floating_point() else t.clone()

            def unpack(given):
                unpacked.append(given[0])
                return given[1]

            with saved_tensors_hooks(pack, unpack):
                added = residual if with_sum else None
                y = F.batch_norm_act(x, *running, weight, bias, training, residual=added, act=act, prefer="memory")
            leaves = [x, weight, bias, *([residual] if with_sum else [])]
            grads = torch.autograd.grad(y, leaves, torch.ones_like(y))
            kept = 4 + (act is not None) * (1 + with_sum)
            assert len(packed) == kept and sorted(unpacked) == list(range(1, kept + 1))
            assert all(g is not None for g in grads)

        call()


@pytest.mark.parametrize("what", ["x", "weight", "bias", "mean"])
@pytest.mark.parametrize("act", [None, "relu"])
def test_what_is_written_to_before_backward(what, act, device):
    """As in torch: an error if backward reads it. In evaluation running statistics are copied."""
    x, weight, bias = (torch.randn(size, device=device).requires_grad_() for size in ((4, 6, 5), 6, 6))
    mean, var = torch.zeros(6, device=device), torch.ones(6, device=device)
    middle = x * 1
    with hfnn.use(kernel_of(device)):
        y = F.batch_norm_act(middle, mean, var, weight, bias, what != "mean", act=act)
    want = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    with torch.no_grad():
        {"x": middle, "weight": weight, "bias": bias, "mean": mean}[what].add_(1)
    if what in ("x", "weight") or (what == "bias" and act):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y, x, torch.ones_like(y))
    else:
        assert torch.equal(*want, *torch.autograd.grad(y, x, torch.ones_like(y)))


def test_a_graph_ends_with_its_backward(device):
    x = torch.randn(4, 6, 5, device=device, requires_grad=True)
    y = F.batch_norm(x, None, None, training=True, prefer="memory")
    y.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("act, with_sum", BEHIND)
@pytest.mark.parametrize("training", [True, False])
def test_second_derivatives(training, act, with_sum, last):
    """Of torch's formula, with forward's flags: by finite differences."""
    torch.manual_seed(0)
    x, residual, dy = torch.randn(3, 2, 3, 2, 3, dtype=torch.float64).unbind()
    if last:
        x, residual, dy = (t.to(memory_format=torch.channels_last) for t in (x, residual, dy))
    parameters = torch.linspace(0.5, 1.5, 2 * x.shape[1], dtype=torch.float64).view(2, -1).unbind()
    running = torch.zeros(x.shape[1], dtype=torch.float64), torch.ones(x.shape[1], dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in (x, *parameters, *([residual * 3] if with_sum else []))]

    def forward(x, weight, bias, residual=None):
        return F.batch_norm_act(x, *(r.clone() for r in running), weight, bias, training, 0.1, 1e-2, residual, act, 0.3)

    with hfnn.use("cpp"):
        assert torch.autograd.gradcheck(forward, leaves)
        assert torch.autograd.gradgradcheck(forward, leaves)


@pytest.mark.parametrize("act", [None, "relu"])
def test_gradients_of_every_kind(act, device):
    """Expanded, lazily negated, zeros without memory, batched: the same as plain tensors of equal values."""
    x, residual = (torch.randn(4, 8, 5, device=device, requires_grad=True) for _ in range(2))
    weight = torch.ones(8, device=device, requires_grad=True)

    def call():
        with hfnn.use(kernel_of(device)):
            y = F.batch_norm_act(x, None, None, weight, None, True, residual=residual, act=act)
        of = lambda dy, **how: torch.autograd.grad(y, (x, weight, residual), dy, retain_graph=True, **how)  # noqa: E731
        negated = torch._neg_view(torch.ones_like(y))
        zeros = torch._efficientzerotensor(y.shape, device=device)
        for odd in (torch.ones((), device=device).expand(y.shape), negated, zeros):
            assert all(map(torch.equal, of(odd), of(odd.clone().resolve_neg().contiguous())))
        many = torch.randn(3, *y.shape, device=device, generator=torch.Generator(device).manual_seed(0))
        each = [torch.stack(parts) for parts in zip(*map(of, many), strict=True)]
        assert all(map(torch.equal, of(many, is_grads_batched=True), each))
        return each, [y.grad_fn]

    call()


def test_transforms_are_torchs(device):
    x = torch.randn(3, 4, 6, 5, device=device)
    call = lambda x: F.batch_norm(x, None, None, training=True, prefer="memory")  # noqa: E731
    want = torch.stack([nn.functional.batch_norm(one, None, None, training=True) for one in x])
    torch.testing.assert_close(torch.func.vmap(call)(x), want)
    stock = lambda x: nn.functional.batch_norm(x, None, None, training=True)  # noqa: E731
    found, want = (torch.func.grad(lambda x, f=f: f(x).pow(3).sum())(x[0]) for f in (call, stock))
    torch.testing.assert_close(found, want)


def test_recipes_are_taken_from_both_sides(device):
    """The norm takes its producer's recipe and its consumer the norm's, bitwise equal, also in a chain of both kinds of
    node."""
    torch.manual_seed(0)
    gelu, norm, linear = hfnn.GELU(), hfnn.BatchNorm1d(6, device=device), hfnn.Linear(5, 4, device=device)
    gelu.prefer = norm.prefer = linear.prefer = "memory"
    random_parts(norm)
    x = torch.randn(4, 6, 5, device=device, requires_grad=True)

    def consumed():
        y = linear(norm(gelu(x)))
        return torch.autograd.grad(y.square().sum(), [x, *norm.parameters(), *linear.parameters()])

    with hfnn.use(kernel_of(device)):
        recipe.counter.reset()
        on = consumed()
        assert recipe.counter.taken == 2 and recipe.counter.rebuilt == 2
        with recipe.disabled():
            off = consumed()
    assert all(map(torch.equal, on, off))


def test_a_sum_leaves_no_recipe(device):
    """The sum is not kept, so y cannot be rebuilt."""
    x, residual, weight = torch.randn(3, 4, 6, 5, device=device).unbind()
    x, residual, weight = (t.requires_grad_() for t in (x, residual, weight[0]))
    for act in (None, "relu"):
        with hfnn.use(kernel_of(device)):
            y = F.batch_norm_act(x, None, None, training=True, residual=residual, act=act)
            assert not recipe.carries(y)
            found = torch.autograd.grad(F.linear(y, weight).square().sum(), weight)
        want = torch.autograd.grad(F.linear(y.detach(), weight).square().sum(), weight)
        assert torch.equal(*found, *want)


def test_a_buffer_for_bias_leaves_no_recipe(device):
    """A buffer may be refilled unnoticed."""
    x, weight = (
        torch.randn(4, 6, 5, device=device, requires_grad=True),
        torch.ones(6, device=device, requires_grad=True),
    )
    with hfnn.use(kernel_of(device)):
        for bias, carries in (
            (torch.zeros(6, device=device), False),
            (nn.Parameter(torch.zeros(6, device=device)), True),
        ):
            y = F.batch_norm(x, None, None, weight, bias, True)
            assert recipe.carries(y) is carries


def with_queue(function, count):
    """A function of `count` arguments and a queue, the signature that C++ expects of Triton's modules."""
    names = *(f"a{i}" for i in range(count)), "queue"
    function.__signature__ = inspect.Signature([inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY) for n in names])
    return function


NONE, APART = dict.fromkeys(PREFERENCES, (0, 0)), batch_norm._APART


def stub(forward=None, floors=NONE, apart=APART):
    """The room's call for an op whose kernel is Python functions, like Triton's, and the momenta that it received."""
    kernel = _load("hfnn.kernels.batch_norm" if _interpreting() else "hfnn._C:cpu.batch_norm")[0]
    momenta = []

    def own(*args):
        momenta.append(args[11])
        kernel.forward(*args)

    module = types.SimpleNamespace(
        forward=with_queue(forward or own, 15),
        rebuild=with_queue(lambda *args: kernel.rebuild(*args), 10),
        backward=with_queue(lambda *args: kernel.backward(*args), 15),
        partials=kernel.partials,
    )
    op = types.SimpleNamespace(floors=floors, module_for=lambda *_: module)
    return native.call("batch_norm", op, batch_norm._second, batch_norm.PIECEWISE, 0, 0, apart), momenta


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's kernels run themselves")
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "every other"])
def test_kernels_that_are_functions_of_python(layout):
    """They get the shapes, flags and momenta that they need, and each call updates the statistics."""
    room, momenta = stub()
    x, residual, dy = (LAYOUTS[layout](torch.randn(3, 8, 4, 6)) for _ in range(3))
    running, moved = (torch.zeros(8), torch.ones(8)), (torch.zeros(8), torch.ones(8))
    for n in (1, 2, 3):
        leaves = [t.detach().requires_grad_() for t in (x, torch.rand(8), torch.rand(8), residual)]
        y = room(leaves[0], *running, *leaves[1:3], True, 1 / n, 1e-5, leaves[3], 1, 0.0, "memory")
        want = batch_norm._in_torch(leaves[0], *moved, *leaves[1:3], True, 1 / n, 1e-5, leaves[3], "relu")
        grads = zip(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(want, leaves, dy), strict=True)
        for a, b in ((y, want), *grads, *zip(running, moved, strict=True)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
            assert a.stride() == b.stride()
    assert momenta == [1, 1 / 2, 1 / 3]
    if layout == "channels_last":  # Triton's flags start a new byte in each row; five channels do not fill one
        assert room(x[:, :5].contiguous(memory_format=torch.channels_last), None, None, None, None, True, 0.1, 1e-5,
                    residual[:, :5], 1, 0.0, "memory") is NotImplemented  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver is CUDA's")
def test_another_momentum_is_no_other_kind_of_launch():
    """Cumulative averages have another momentum at each call; Python records the launch once."""
    pytest.importorskip("triton")
    from hfnn.kernels import launch

    from ..test_launch_recorded import Driver, bits

    calls, driver = [], Driver()

    def forward(*args):
        calls.append(args)
        launch.record(0x1000, (1,), 32, 0, ("fp32", "fp32"), args[11:13])

    room, _ = stub(forward)
    x, running = torch.randn(3, 8, 4), (torch.zeros(8), torch.ones(8))
    driver.count = 2
    native.extension.fake_driver(driver)
    try:
        for n in (1, 2, 3, 4):
            with torch.no_grad():
                y = room(x, *running, None, None, True, 1 / n, 0.25, None, 0, 0.0, "memory")
            assert y.shape == x.shape
            assert n == 1 or driver.params() == [bits(1 / n), bits(0.25)]
    finally:
        native.extension.fake_driver(None)
    assert len(driver.seen) == 3 and len(calls) == 2  # the first call, and once more to locate its momentum argument
