"""dropout_add, add_layer_norm and add_rms_norm: what the contract tests cannot check for two results."""

import contextlib
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hfnn
from hfnn import testing
from hfnn.core import node as recipe
from hfnn.core.kernel import _interpreting
from hfnn.ops import add_norm, dropout_add

F = hfnn.functional
ON_CUDA = torch.cuda.is_available()
KERNELS = ("triton",) if ON_CUDA else ("cpp", "triton") if _interpreting() else ("cpp",)
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
# (input, residual): the same dtype, and autocast's combinations.
PAIRS = (F32, F32), (BF16, BF16), (F16, F16), (BF16, F32), (F16, F32)
SHAPES = (3, 769), (5, 3, 64), (9, 1000), (1, 1), (2, 9000)
NORMS = {"layer": (F.add_layer_norm, add_norm.LAYER), "rms": (F.add_rms_norm, add_norm.RMS)}

kernels = pytest.mark.parametrize("kernel", KERNELS)
norms = pytest.mark.parametrize("norm", NORMS)
dropouts = pytest.mark.parametrize("p", [0.0, 0.3])
pairs = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(str(d)[6:] for d in pair))


def draw(norm, shape, pair, p, device, dtype=None):
    """(input, residual, *parameters) as leaves, and a function that calls the op with them."""
    low, dtype = pair
    x, residual = (torch.randn(shape) for _ in range(2))
    x = x + torch.where(x < 0, -0.5, 0.5)
    count = 2 if norm == "layer" else 1
    parameters = [torch.randn(shape[-1]).to(dtype) for _ in range(count)]
    leaves = [t.to(device).requires_grad_() for t in (x.to(low), residual.to(dtype), *parameters)]
    # In rows of one element only eps matters.
    return leaves, lambda fn, x, residual, *rest, **more: fn(x, residual, shape[-1:], *rest, 1e-2, p=p, **more)


def cotangents(results):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(y.shape, generator=generator).bfloat16().to(y) for y in results]


def run(call, fn, leaves, wanted=(0, 1), **more):
    """(results, gradients of all leaves) for the cotangents of the results `wanted`."""
    torch.manual_seed(7)
    results = call(fn, *leaves, **more)
    chosen = [results[i] for i in wanted]
    return results, torch.autograd.grad(chosen, leaves, cotangents(chosen), allow_unused=True)


def mask_of(total, residual):
    return total.detach() != residual.detach()


@pairs
@norms
@dropouts
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@kernels
def test_matches_float64(kernel, shape, p, norm, pair, device):
    fn, op = NORMS[norm]
    leaves, call = draw(norm, shape, pair, p, device)
    with hfnn.use(kernel):
        results, grads = run(call, fn, leaves)
    assert results[1].grad_fn.name().startswith("_DropoutAdd") and results[0].grad_fn.name().startswith("_")
    assert all(y.dtype is pair[1] for y in results) and grads[0].dtype is pair[0]
    mask = mask_of(results[1], leaves[1]) if p else torch.ones_like(leaves[0], dtype=torch.bool)
    wide = run(call, op.reference, [t.detach().double().requires_grad_() for t in leaves], mask=mask)

    def own(*args, mask, p, **more):
        """torch's ops, in the dtypes given."""
        total = dropout_add.reference(args[0], args[1], p, p > 0, mask=mask)
        op = torch.layer_norm if norm == "layer" else torch.rms_norm
        return op(total, *args[2:]), total

    theirs = run(call, own, leaves, mask=mask)
    for i, (got, want, torchs) in enumerate(zip(results, wide[0], theirs[0], strict=True)):
        testing.assert_close(got, want, torchs, testing.OUTPUTS, f"result {i}")
    for i, (got, want, torchs) in enumerate(zip(grads, wide[1], theirs[1], strict=True)):
        testing.assert_close(got, want, torchs, testing.GRADIENTS, f"gradient {i}")


@pairs
@kernels
def test_mask_and_sum(kernel, pair, device):
    """One seed gives the mask of `dropout`. Fused sum and norm are bitwise those of the separate ops."""
    for shape in SHAPES:
        leaves, call = draw("layer", shape, pair, 0.3, device)
        x, residual, weight, bias = leaves
        with hfnn.use(kernel):
            torch.manual_seed(7)
            alone = F.dropout_add(x, residual, 0.3)
            torch.manual_seed(7)
            mask = F.dropout(torch.ones_like(x), 0.3) != 0
            (y, total), _ = run(call, F.add_layer_norm, leaves)
            assert torch.equal(alone, total)
            assert torch.equal(mask_of(alone, residual), mask)
            expected = (residual + x.float().masked_fill(~mask, 0) / 0.7).to(residual.dtype)
            torch.testing.assert_close(total, expected)
            assert torch.equal(total[~mask], residual[~mask])
            again = F.layer_norm(total.detach(), shape[-1:], weight, bias, 1e-2)
            if not ON_CUDA:
                assert torch.equal(y, again)
            torch.testing.assert_close(y, again)


@norms
@kernels
def test_each_gradient_on_its_own(kernel, norm, device):
    """Either result alone, each leaf alone: a gradient does not depend on what else is computed."""
    leaves, call = draw(norm, (5, 769), (BF16, F32), 0.3, device)
    fn = NORMS[norm][0]
    with hfnn.use(kernel):
        for wanted in ((0, 1), (0,), (1,)):
            _, together = run(call, fn, leaves, wanted)
            for i, leaf in enumerate(leaves):
                if together[i] is None:
                    assert wanted == (1,) and i > 1  # the sum does not depend on the norm's parameters
                    continue
                alone = [t.detach().requires_grad_(t is leaf) for t in leaves]
                torch.manual_seed(7)
                results = call(fn, *alone)
                chosen = [results[j] for j in wanted]
                given = [(y, dy) for y, dy in zip(chosen, cotangents(chosen), strict=True) if y.requires_grad]
                ys, dys = zip(*given, strict=True)
                (grad,) = torch.autograd.grad(ys, alone[i], dys)
                assert torch.equal(grad, together[i])


@norms
@dropouts
@kernels
def test_nothing_is_written_to_and_runs_are_equal(kernel, p, norm, device):
    leaves, call = draw(norm, (5, 769), (F32, F32), p, device)
    copies = [t.detach().clone() for t in leaves]
    fn = NORMS[norm][0]
    with hfnn.use(kernel):
        torch.manual_seed(7)
        results = call(fn, *leaves)
        kept, given = [y.detach().clone() for y in results], cotangents(results)
        first, second = (torch.autograd.grad(results, leaves, given, retain_graph=True) for _ in range(2))
        again, grads = run(call, fn, leaves)
    assert all(map(torch.equal, first, second)) and all(map(torch.equal, first, grads))
    assert all(map(torch.equal, results, kept)) and all(map(torch.equal, results, again))
    assert all(map(torch.equal, leaves, copies)) and all(t._version == 0 for t in (*leaves, *results, *given))


@norms
@kernels
def test_any_layout(kernel, norm, device):
    (x, residual, *rest), call = draw(norm, (6, 770), (F32, F32), 0.3, device)
    fn, op = NORMS[norm]
    with hfnn.use(kernel):
        want = run(call, fn, [x, residual, *rest])
        spread, columns = (lambda t: torch.stack([t, t], -1)[..., 0]), (lambda t: t.t().contiguous().t())
        for layout in (spread, columns):
            laid = [layout(t.detach()).requires_grad_() for t in (x, residual)]
            if layout is columns:  # torch's own ops run, and draw, where the sum has this layout
                want = run(call, op.torch, [*laid, *rest])
            got = run(call, fn, [*laid, *rest])
            assert layout is not columns or got[0][1].stride() == want[0][1].stride() == laid[1].stride()
            for a, b in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
                torch.testing.assert_close(a, b)
        row = residual.detach()[:1].expand(6, -1).requires_grad_()
        flat = row.detach().contiguous().requires_grad_()
        (expanded, expanded_grads), (full, full_grads) = run(call, fn, [x, row, *rest]), run(call, fn, [x, flat, *rest])
        for a, b in zip((*expanded, *expanded_grads), (*full, *full_grads), strict=True):
            assert torch.equal(a, b)


@norms
@dropouts
@kernels
def test_empty(kernel, p, norm, device):
    leaves, call = draw(norm, (0, 8), (F32, F32), p, device)
    with hfnn.use(kernel):
        results, grads = run(call, NORMS[norm][0], leaves)
    assert all(y.shape == (0, 8) for y in results)
    assert [g.shape for g in grads] == [t.shape for t in leaves] and not any(g.any() for g in grads)


@norms
@kernels
def test_double_backward(kernel, norm, device):
    """Against the reference in float64, whose graph is torch's."""
    fn, op = NORMS[norm]
    leaves, call = draw(norm, (4, 65), (F32, F32), 0.3, device)

    def second(function, leaves, **more):
        torch.manual_seed(7)
        y, total = call(function, *leaves, **more)
        weight = cotangents([y])[0]
        first = torch.autograd.grad((y * y * weight).sum() + (total * weight).square().sum(), leaves, create_graph=True)
        return total, torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    with hfnn.use(kernel):
        total, got = second(fn, leaves)
    mask = mask_of(total, leaves[1])
    _, wide = second(op.reference, [t.detach().double().requires_grad_() for t in leaves], mask=mask)
    _, own = second(op.reference, leaves, mask=mask)
    for i, (g, w, o) in enumerate(zip(got, wide, own, strict=True)):
        testing.assert_close(g, w, o, 2 * testing.GRADIENTS, f"second gradient {i}")


@norms
@dropouts
@pytest.mark.skipif(ON_CUDA, reason="the kernels of the GPU take no float64")
def test_gradcheck(norm, p):
    leaves, call = draw(norm, (3, 5), (F64, F64), p, "cpu")

    def function(*inputs):
        torch.manual_seed(7)
        return call(NORMS[norm][0], *inputs)

    with hfnn.use("cpp"):
        assert torch.autograd.gradcheck(function, leaves)
        assert torch.autograd.gradgradcheck(function, leaves)


def consumed(call, fn, leaves, matrix, recipes=True, nodes=None):
    torch.manual_seed(7)
    matrix = matrix.detach().requires_grad_()
    with contextlib.nullcontext() if recipes else recipe.disabled():
        y, total = call(fn, *leaves)
        z = F.linear(y, matrix) + F.linear(y, matrix * 2) + total.sum(-1, keepdim=True)
    if nodes is not None:
        nodes.append(weakref.ref(total))  # kept by the norm's node
    return torch.autograd.grad(z.square().mean(), [*leaves, matrix])


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@norms
@dropouts
@kernels
def test_recipes_change_no_bit(kernel, p, norm, dtype, device):
    leaves, call = draw(norm, (6, 769), (dtype, dtype), p, device)
    matrix = torch.randn(8, 769, dtype=dtype, device=device)
    with hfnn.use(kernel):
        recipe.counter.reset()
        nodes = []
        on = consumed(call, NORMS[norm][0], leaves, matrix, nodes=nodes)
        assert recipe.counter.taken == 2 and recipe.counter.rebuilt == 1
        off = consumed(call, NORMS[norm][0], leaves, matrix, recipes=False)
        assert recipe.counter.taken == 2 and nodes[0]() is None
    assert all(map(torch.equal, on, off))


@norms
@kernels
def test_keeps_the_sum_and_a_seed(kernel, norm, device):
    """With a consumer, only the sum and statistics; the nodes do not keep an input alive."""
    leaves, call = draw(norm, (8, 1024), (BF16, BF16), 0.3, device)
    matrix = torch.randn(8, 1024, dtype=BF16, device=device, requires_grad=True)
    totals = []

    def model():
        x, residual = leaves[0] * 1, leaves[1] * 1
        y, total = call(NORMS[norm][0], x, residual, *leaves[2:])
        totals.append(total)
        return F.linear(y, matrix), total

    with hfnn.use(kernel):
        saved = hfnn.memory.saved_bytes(model)
        known = leaves[2].nbytes * (len(leaves) - 2) + matrix.nbytes  # plain leaves here, not Parameters
        assert saved.total <= totals[0].nbytes + 8 * 8 + known, saved


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # torch's rms_norm
@norms
def test_autocast(norm, device):
    """The dtypes of torch's own ops, for every pair and both low precisions."""
    fn, op = NORMS[norm]
    for low in (BF16, F16):
        for x_dtype, dtype in ((F32, F32), (low, low), (low, F32), (F32, low)):
            leaves, call = draw(norm, (4, 64), (x_dtype, dtype), 0.3, device)
            leaves[2:] = [t.detach().float() for t in leaves[2:]]
            with torch.autocast(device, dtype=low):
                want = [y.dtype for y in call(op.torch, *leaves)]
                for prefer in ("memory", "auto"):
                    assert [y.dtype for y in call(fn, *leaves, prefer=prefer)] == want
                want = (torch.dropout(leaves[0], 0.3, True) + leaves[1]).dtype
                assert F.dropout_add(leaves[0], leaves[1], 0.3, prefer="memory").dtype is want


@pytest.mark.parametrize("reentrant", [False, True])
@norms
def test_checkpoints_draw_the_same_mask(norm, reentrant, device):
    leaves, call = draw(norm, (8, 1024), (F32, F32), 0.3, device)

    def block(*leaves):
        y, total = call(NORMS[norm][0], *leaves, prefer="memory")
        return y * total

    grads = []
    for function in (block, lambda *leaves: checkpoint(block, *leaves, use_reentrant=reentrant)):
        torch.manual_seed(7)
        for leaf in leaves:
            leaf.grad = None
        function(*leaves).sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    assert all(map(torch.equal, *grads))


def test_torchs_own_ops(device):
    """No dropout, p = 1, other shapes, other dtypes: torch's results and torch's errors."""
    x, residual = torch.randn(2, 4, 8, device=device).unbind()
    for p, training in ((0.0, True), (0.7, False), (0, True)):
        assert torch.equal(F.dropout_add(x, residual, p, training, prefer="memory"), x + residual)
    assert torch.equal(F.dropout_add(x, residual, 1.0, prefer="memory"), residual)
    y, total = F.add_layer_norm(x, residual, (8,), p=1.0, prefer="memory")
    assert torch.equal(total, residual)
    torch.testing.assert_close(y, torch.layer_norm(residual, (8,)))
    for p in (-0.1, 1.1):
        for training in (True, False):
            with pytest.raises(ValueError, match="dropout probability"):
                F.dropout_add(x, residual, p, training)
            with pytest.raises(ValueError, match="dropout probability"):
                F.add_layer_norm(x, residual, (8,), p=p, training=training)
    broadcast = F.dropout_add(x, residual[0], 0.5, prefer="memory")
    assert broadcast.shape == x.shape
    assert F.add_rms_norm(x, residual[0], (8,), prefer="memory")[0].shape == x.shape
    with pytest.raises(RuntimeError):
        F.add_layer_norm(x, residual[:, :3], (8,), prefer="memory")
    with pytest.raises(RuntimeError):
        F.add_layer_norm(x, residual, (7,), prefer="memory")


def test_offset_of_the_weight(device):
    """Gemma stores its weight minus 1; the same without a kernel."""
    leaves, call = draw("rms", (5, 64), (F32, F32), 0.0, device)
    want = torch.rms_norm(leaves[0] + leaves[1], (64,), leaves[2] + 1, 1e-2)
    for prefer in ("memory", "speed"):
        y, _ = call(F.add_rms_norm, *leaves, offset=1.0, prefer=prefer)
        torch.testing.assert_close(y, want)
    no_weight = call(lambda x, r, s, eps, **k: F.add_rms_norm(x, r, s, None, eps, **k), *leaves[:2], prefer="memory")
    torch.testing.assert_close(no_weight[0], torch.rms_norm(leaves[0] + leaves[1], (64,), None, 1e-2))


def test_without_grad(device):
    leaves, call = draw("layer", (64, 1024), (F32, F32), 0.3, device)
    with_grad, _ = run(call, F.add_layer_norm, leaves, prefer="memory")
    with torch.no_grad():
        torch.manual_seed(7)
        results = call(F.add_layer_norm, *leaves, prefer="memory")
    assert all(map(torch.equal, results, with_grad)) and not any(y.requires_grad for y in results)
    assert recipe.take(results[0]) is None


@pytest.mark.skipif("cpp" not in KERNELS, reason="one device's mask beside another's: tests/ops/test_dropout.py")
@pytest.mark.parametrize("cols", [769, 770, 772, 64, 3000, 8192, 9001])
def test_kernels_agree_on_the_mask(cols):
    """Rows that start at any of the four words of a counter."""
    masks = []
    for kernel in KERNELS:
        with hfnn.use(kernel):
            torch.manual_seed(3)
            _, total = F.add_layer_norm(torch.ones(3, cols), torch.zeros(3, cols), (cols,), p=0.5)
        masks.append(total != 0)
    torch.manual_seed(3)
    masks.append(F.dropout(torch.ones(3, cols), 0.5, prefer="memory") != 0)
    assert all(torch.equal(mask, masks[0]) for mask in masks)
    assert 0 < masks[0].double().mean() < 1


@pytest.mark.skipif(ON_CUDA, reason="the CPU's")
def test_results_do_not_depend_on_threads():
    leaves, call = draw("layer", (301, 770), (BF16, F32), 0.3, "cpu")
    found = []
    for threads in (1, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            results, grads = run(call, F.add_layer_norm, leaves, prefer="memory")
        finally:
            torch.set_num_threads(before)
        found.append((*results, *grads))
    assert all(map(torch.equal, *found))
