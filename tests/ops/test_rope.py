"""rope and qk_norm_rope: the contract tests, adapted to two results, and their own features."""

import itertools

import pytest
import torch

import hfnn
from hfnn import testing
from hfnn.core import node as recipe
from hfnn.core.kernel import _interpreting
from hfnn.ops import qk_norm_rope, rope

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
ROOMS = rope, qk_norm_rope
HALVES = (2, 4, 2, 9, 16, 16, False)


def combinations(narrow=False):
    for room, device in itertools.product(ROOMS, DEVICES):
        for kernel in room.OP.kernels:
            runs = kernel.device == device or (kernel.name == "triton" and _interpreting())
            if not runs or kernel.missing is not None:
                continue
            for dtype in kernel.dtypes:
                # A case takes the interpreter a second, so it runs two of three dtypes.
                slow = kernel.name == "triton" and device == "cpu" and dtype is torch.float16
                if not slow and not (narrow and dtype is torch.float64):
                    name = f"{room.OP.name}-{kernel.name}-{device}-{str(dtype)[6:]}"
                    yield pytest.param(room.OP, kernel.name, device, dtype, id=name)


each = pytest.mark.parametrize("op, kernel, device, dtype", list(combinations()))
narrow = pytest.mark.parametrize("op, kernel, device, dtype", list(combinations(narrow=True)))
cases = pytest.mark.parametrize("case", rope.OP.cases, ids=str)


def function(op):
    return getattr(hfnn.functional, op.name)


def leaves(op, args, dtype=None):
    """Fresh leaves in `dtype`, except cos and sin, which are passed unchanged."""
    copies = [a if a is None else a.detach().clone().to(dtype or a.dtype) for a in args]
    return [a if a is None else a.requires_grad_() for a in copies[:-2]] + copies[-2:]


def cotangents(results):
    generator = torch.Generator().manual_seed(1)
    return [y if y is None else torch.randn(y.shape, generator=generator).bfloat16().to(y) for y in results]


def run(fn, args, dy=None, **options):
    """(results, gradients), without those that are None."""
    results = fn(*args, **options)
    dy = cotangents(results) if dy is None else dy
    pairs = [(y, d.to(y)) for y, d in zip(results, dy, strict=True) if y is not None]
    wanted = [a for a in args if a is not None and a.requires_grad]
    outputs, dy = zip(*pairs, strict=True)
    return outputs, torch.autograd.grad(outputs, wanted, dy)


def assert_accurate(op, kernel, args, dtype, **options):
    with hfnn.use(kernel):
        results, grads = run(function(op), leaves(op, args), **options)
    assert results[0].grad_fn.name().startswith("_"), "torch's formula ran"
    # Eight bits represent a cotangent, and float32 tables are not rounded for the reference.
    wide, wide_grads = run(op.reference, leaves(op, args, torch.float64), **options)
    own, own_grads = run(op.reference, leaves(op, args), **options)
    for y, want, torchs in zip(results, wide, own, strict=True):
        testing.assert_close(y, want, torchs, testing.OUTPUTS, "output")
    for i, (grad, want, torchs) in enumerate(zip(grads, wide_grads, own_grads, strict=True)):
        testing.assert_close(grad, want, torchs, testing.GRADIENTS, f"gradient {i}")
    return results, grads


@narrow
@cases
def test_matches_float64(op, kernel, device, dtype, case):
    args, options = op.sample(case, dtype, device)
    first, second = (assert_accurate(op, kernel, args, dtype, **options) for _ in range(2))
    assert all(map(torch.equal, (*first[0], *first[1]), (*second[0], *second[1]))), "two runs differ"


@narrow
def test_float32_angles(op, kernel, device, dtype):
    """For 16-bit inputs and float32 tables, torch's formula returns float32."""
    args, options = op.sample(HALVES, dtype, device)
    args = *args[:-2], *(t.float() for t in op.sample(HALVES, torch.float32, device)[0][-2:])
    with hfnn.use(kernel):
        results, grads = run(function(op), leaves(op, args), **options)
    wide, wide_grads = run(op.reference, leaves(op, args, torch.float64), **options)
    for y, want in zip(results, wide, strict=True):
        assert y.dtype is torch.float32 and testing.error(y, want).l2 < 3e-7
    for grad, want in zip(grads, wide_grads, strict=True):
        assert grad.dtype is dtype and testing.error(grad, want).l2 < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", [k.name for k in rope.OP.kernels])
@cases
def test_the_bits_of_the_formula(kernel, dtype, case):
    """Nothing is fused, so float32 results are bitwise torch's, including signed zeros, infinities and NaN."""
    if kernel == "triton" and (dtype is torch.float64 or not (_interpreting() or torch.cuda.is_available())):
        pytest.skip("no such kernel here")
    device = "cuda" if kernel == "triton" and torch.cuda.is_available() else "cpu"
    (query, key, cos, sin), options = rope.sample(case, dtype, device)
    if query.numel():
        odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan], dtype=dtype, device=device)
        query[0, 0, 0, :5], query[0, 1, 1, -5:] = odd, odd
        key[0, 0, 0], cos[0, 0, 0], sin[0, 0, -1] = -0.0, 0.0, -0.0
    with hfnn.use(kernel):
        ours, grads = run(hfnn.functional.rope, leaves(rope.OP, (query, key, cos, sin)), **options)
    torchs, torchs_grads = run(rope.reference, leaves(rope.OP, (query, key, cos, sin)), **options)
    for a, b in zip((*ours, *grads), (*torchs, *torchs_grads), strict=True):
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0))
        assert torch.equal(a.where(a == 0, 1).signbit(), b.where(b == 0, 1).signbit())


def pieces(x):
    """Like a part of a fused projection: neither dense nor aligned."""
    batch, heads, tokens, columns = x.shape
    whole = x.new_zeros(batch, tokens, heads * columns + 3)
    whole[..., 1:-2] = x.transpose(1, 2).flatten(2)
    return whole[..., 1:-2].unflatten(-1, (heads, columns)).transpose(1, 2)


def columns_apart(x):
    return torch.stack((x, x), -1)[..., 0]


LAYOUTS = {
    "heads first": lambda x: x.contiguous(),
    "pieces": pieces,
    "columns apart": columns_apart,
    "expanded": lambda x: x[:, :1].expand(x.shape),
}


@each
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(op, kernel, device, dtype, layout):
    lay = LAYOUTS[layout]
    args, options = op.sample(HALVES, dtype, device)
    laid = [lay(x) for x in args[:2]]
    dense = [x.contiguous() for x in laid]
    with hfnn.use(kernel):
        results = function(op)(*args, **options)
        found = []
        for query, key, form in (*laid, lay), (*dense, lambda d: lay(d).contiguous()):
            inputs = [query.requires_grad_(), key.requires_grad_(), *leaves(op, args)[2:]]
            found.append(run(function(op), inputs, [form(d) for d in cotangents(results)], **options))
    (got, got_grads), (want, want_grads) = found
    assert all(map(torch.equal, (*got, *got_grads), (*want, *want_grads)))


@each
def test_results_keep_the_order_of_strides(op, kernel, device, dtype):
    """So a projection's layout reaches attention, and its gradient returns in it."""
    args, options = op.sample(HALVES, dtype, device)
    with hfnn.use(kernel):
        args = leaves(op, args)
        results, grads = run(function(op), args, [d.contiguous() for d in cotangents(args[:2])], **options)
    for x, y, dx in zip(args[:2], results, grads[:2], strict=True):
        assert x.stride() == y.stride() == dx.stride() and not y.is_contiguous()


@each
def test_tokens_first(op, kernel, device, dtype):
    args, options = op.sample((2, 4, 2, 9, 16, 12, True), dtype, device)
    with hfnn.use(kernel):
        want = run(function(op), leaves(op, args), **options)
        swapped = [x.detach().transpose(1, 2).requires_grad_() for x in args[:2]]
        dy = [d.transpose(1, 2) for d in cotangents(want[0])]
        results, grads = run(function(op), [*swapped, *leaves(op, args)[2:]], dy, layout="bshd", **options)
    for a, b in zip((*results, *grads[:2]), (*want[0], *want[1][:2]), strict=True):
        assert torch.equal(a.transpose(1, 2), b)
    assert all(map(torch.equal, grads[2:], want[1][2:]))


@each
def test_each_gradient_on_its_own_and_nothing_is_written_to(op, kernel, device, dtype):
    args, options = op.sample(HALVES, dtype, device)
    with hfnn.use(kernel):
        results, together = run(function(op), leaves(op, args), **options)
        for wanted in range(len(args) - 2):
            alone = [a.detach().clone().requires_grad_(i == wanted) for i, a in enumerate(args)]
            copies = [a.detach().clone() for a in alone]
            results = function(op)(*alone, **options)
            y = results[wanted % 2]  # queries and their weight, keys and theirs
            dy = cotangents(results)
            kept = dy[wanted % 2].clone()
            for retain in (True, False):
                (grad,) = torch.autograd.grad(y, alone[wanted], dy[wanted % 2], retain_graph=retain)
                assert torch.equal(grad, together[wanted])
            assert torch.equal(kept, dy[wanted % 2]) and all(map(torch.equal, alone, copies))
            assert all(a._version == 0 for a in (*alone, *dy))


@each
def test_without_keys(op, kernel, device, dtype):
    args, options = op.sample(HALVES, dtype, device)
    no_keys = [None if i % 2 and i < len(args) - 2 else a for i, a in enumerate(args)]
    with hfnn.use(kernel):
        both, grads = run(function(op), leaves(op, args), **options)
        dy = cotangents(both)[:1]
        (y,), alone = run(function(op), leaves(op, no_keys), [*dy, None], **options)
        assert function(op)(*no_keys, **options)[1] is None
    assert torch.equal(y, both[0]) and torch.equal(alone[0], grads[0])
    for got, want in zip(alone, grads[::2], strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("op", [room.OP for room in ROOMS], ids=lambda op: op.name)
@pytest.mark.parametrize("case", [rope.OP.small, (1, 2, 2, 3, 6, 6, True)], ids=str)
def test_gradcheck(op, case):
    args, options = op.sample(case, torch.float64, "cpu")
    args = leaves(op, args)
    fn = lambda *inputs: function(op)(*inputs, *args[-2:], **options)  # noqa: E731
    with hfnn.use("cpp"):
        assert torch.autograd.gradcheck(fn, args[:-2])
        assert torch.autograd.gradgradcheck(fn, args[:-2])


@narrow
def test_double_backward(op, kernel, device, dtype):
    args, options = op.sample(HALVES, dtype, device)

    def second(fn, dtype=None):
        inputs = leaves(op, args, dtype)
        results = fn(*inputs, **options)
        total = sum((y * y * w).sum() for y, w in zip(results, cotangents(results), strict=True))
        first = torch.autograd.grad(total, inputs[:-2], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), inputs[:-2])

    with hfnn.use(kernel):
        got = second(function(op))
    for g, wide, own in zip(got, second(op.reference, torch.float64), second(op.reference), strict=True):
        testing.assert_close(g, wide, own, 2 * testing.GRADIENTS, "second gradient")


@each
def test_cos_and_sin_get_gradients(op, kernel, device, dtype):
    args, options = op.sample(HALVES, dtype, device)
    args = [a.detach().clone().requires_grad_() for a in args]
    with hfnn.use(kernel):
        sum(y.double().square().sum() for y in function(op)(*args, **options)).backward()
    assert all(a.grad is not None and a.grad.isfinite().all() for a in args)
    assert args[-1].grad.any() and args[-2].grad.any()


@each
def test_recipes_change_no_bit(op, kernel, device, dtype):
    """A consumer that keeps the result rebuilds it: from q and its statistic, or from q's own recipe."""
    args, options = op.sample((2, 4, 2, 9, 24, 16, False), dtype, device)

    def grads(layout):
        inputs = leaves(op, args)
        query, key = inputs[:2]
        if op.recipe_needs_recipe:
            query, key = (hfnn.functional.silu(x, prefer="memory") for x in (query, key))
        if layout == "bshd":
            query, key = (x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (query, key))
            if op.recipe_needs_recipe:
                query, key = (hfnn.functional.silu(x, prefer="memory") for x in (query, key))
        results = function(op)(query, key, *inputs[2:], layout=layout, **options)
        kept = [hfnn.functional.silu(y, prefer="memory") for y in results for _ in range(2)]
        wanted = [a for a in (*inputs[:-2], query, key) if a.requires_grad]
        return torch.autograd.grad(sum(y.float().square().sum() for y in kept), wanted, allow_unused=True)

    with hfnn.use(kernel) if kernel != "cpp" else hfnn.use("cpp"):
        for layout in ("bhsd", "bshd"):
            recipe.counter.reset()
            on = grads(layout)
            assert recipe.counter.taken >= 4 and recipe.counter.rebuilt >= 2, "the recipes were not used"
            with recipe.disabled():
                off = grads(layout)
            for a, b in zip(on, off, strict=True):
                assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


def test_rope_has_a_recipe_only_where_its_input_has_one():
    (query, key, cos, sin), _ = rope.sample(HALVES, torch.float32, "cpu")
    query = query.requires_grad_()
    with hfnn.use("cpp"):
        q, k = hfnn.functional.rope(hfnn.functional.silu(query), key, cos, sin)
    assert recipe.take(q) is not None and recipe.take(k) is None


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.OP.name)
def test_keeps_nothing_but(room):
    """rope keeps angles; with norms, also queries, keys and a number for each of their rows."""
    args, options = room.sample((2, 4, 2, 64, 32, 32, False), torch.bfloat16, "cpu")
    args = leaves(room.OP, args)
    with hfnn.use("cpp"):
        kept = hfnn.memory.saved_bytes(lambda: function(room.OP)(*args, **options)).total
    angles = sum(2 * t.numel() for t in args[-2:])
    rows = sum(x.numel() // 32 for x in args[:2])
    own = 0 if room is rope else sum(2 * t.numel() for t in args[:4]) + 4 * rows
    assert kept == angles + own


def test_weight_offset():
    """Gemma stores its weights minus 1."""
    args, options = qk_norm_rope.sample(HALVES, torch.float32, "cpu")
    less = [*args[:2], args[2] - 1, args[3] - 1, *args[4:]]
    for name in ("cpp", "torch"):
        with hfnn.use(name):
            want = run(hfnn.functional.qk_norm_rope, leaves(qk_norm_rope.OP, args), **options)
            got = run(hfnn.functional.qk_norm_rope, leaves(qk_norm_rope.OP, less), weight_offset=1.0, **options)
        for a, b in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_drop_in_for_transformers(unsqueeze_dim):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    (query, key, cos, sin), _ = rope.sample((2, 4, 2, 9, 16, 16, False), torch.float32, "cpu")
    if unsqueeze_dim == 2:
        query, key = query.transpose(1, 2), key.transpose(1, 2)
    want = llama.apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim)
    for name in ("cpp", "torch"):
        with hfnn.use(name):
            got = rope.apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=unsqueeze_dim)
        assert all(map(torch.equal, got, want))
    got = rope.apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim)  # small: torch's formula
    assert all(map(torch.equal, got, want))


def test_results_do_not_depend_on_threads():
    args, options = qk_norm_rope.sample((2, 4, 2, 700, 64, 64, False), torch.float32, "cpu")
    threads, found = torch.get_num_threads(), []
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            with hfnn.use("cpp"):
                found.append(run(hfnn.functional.qk_norm_rope, leaves(qk_norm_rope.OP, args), **options))
    finally:
        torch.set_num_threads(threads)
    (a, a_grads), (b, b_grads) = found
    assert all(map(torch.equal, (*a, *a_grads), (*b, *b_grads)))


def test_shapes_that_do_not_fit_are_torchs_to_refuse():
    (query, key, cos, sin), _ = rope.sample(HALVES, torch.float32, "cpu")
    with pytest.raises(ValueError, match="layout='sbhd'"):
        hfnn.functional.rope(query, key, cos, sin, layout="sbhd")
    for prefer in ("auto", "memory"):
        with pytest.raises(RuntimeError, match="must match"):
            hfnn.functional.rope(query, key, cos[:, :5], sin[:, :5], prefer=prefer)
        with pytest.raises(RuntimeError, match="must match"):
            hfnn.functional.rope(query, key, cos, sin, rotary_dim=12, prefer=prefer)


def test_compiled():
    """Dynamo gets torch's formula."""
    (query, key, cos, sin), _ = rope.sample(HALVES, torch.float32, "cpu")
    compiled = torch.compile(lambda *a: hfnn.functional.rope(*a, prefer="memory"), backend="eager", fullgraph=True)
    assert all(map(torch.equal, compiled(query, key, cos, sin), rope.reference(query, key, cos, sin)))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("used", [0, 1])
def test_a_loss_of_queries_or_keys_alone(used, create_graph):
    """The other's input and weight get no gradient, as from two norms."""
    x = [torch.randn(2, 4, 8, 16, requires_grad=True) for _ in range(2)]
    weights = [torch.randn(16, requires_grad=True) for _ in range(2)]
    with hfnn.use("cpp"):
        y = hfnn.functional.qk_norm_rope(*x, *weights, torch.randn(8, 16), torch.randn(8, 16))
    assert {each.grad_fn.name() for each in y} == {"_QkNormRopeBackward"}
    found = torch.autograd.grad(y[used].sum(), (*x, *weights), allow_unused=True, create_graph=create_graph)
    assert [g is not None for g in found] == [used == 0, used == 1] * 2


def test_a_parameter_that_is_turned_is_not_saved():
    (query, key, cos, sin), _ = rope.sample(HALVES, torch.float32, "cpu")
    packed = []
    with hfnn.use("cpp"), torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x.shape), lambda x: x):
        q, _ = hfnn.functional.rope(torch.nn.Parameter(query), key, cos, sin)
    assert q.grad_fn.name() == "_RopeBackward" and set(packed) == {cos.shape}
