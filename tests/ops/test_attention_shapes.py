"""Attention for any sizes and layouts."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hfnn
from hfnn import testing
from hfnn.ops.attention import in_rows
from hfnn.ops.attention.reference import reference

from .attention_cases import (
    CUDA,
    DEVICE,
    FEATURES,
    FLOATS,
    NAMES,
    Case,
    attention,
    case,
    compare,
    cotangents,
    excluded,
    keep_of,
    ran_ours,
    refused,
    run,
)

F = torch.nn.functional
names = pytest.mark.parametrize("name", NAMES)
AROUND = ((1, 1), (1, 127), (127, 1), (127, 129), (129, 127), (129, 129))


@names
@pytest.mark.parametrize("features", [("lse",), ("causal", "softcap"), ("window", "offset", "lengths")], ids="-".join)
@pytest.mark.parametrize("queries, keys", AROUND)
def test_sizes_around_a_block(queries, keys, features, name):
    compare(case(features, size=(2, 1, queries, keys, 16), name=name), name)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("features", [("causal", "softcap"), ("window", "alibi"), ("mask", "sinks")], ids="-".join)
def test_many_blocks(features, dtype):
    """The accuracy rule without extra ulps, on enough elements."""
    size = (2, 4, 4096, 4096, 64) if CUDA else (1, 2, 700, 900, 64)
    compare(case(features, dtype, size, NAMES[0]), NAMES[0], sharp=True)


@names
@pytest.mark.parametrize("features", [("lse",), ("mask", "softcap"), ("varlen", "sinks"), ("bias", "dropout")])
@pytest.mark.parametrize("size", [(2, 4, 0, 5, 8), (2, 4, 5, 0, 8), (0, 4, 5, 5, 8), (1, 4, 0, 0, 8)], ids=str)
def test_no_tokens(size, features, name):
    if "varlen" in features and size[0] != 1:
        pytest.skip("sequences side by side have one batch element")
    made = case(features, size=size, name=name).cast(None)
    with hfnn.use(name):
        results, grads = run(made, attention)
    wide, wide_grads = run(made.cast(torch.float64), reference)
    for got, want in zip((*results, *grads), (*wide, *wide_grads), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


@names
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "width, value_width",
    [(1, 1), (3, 5), (16, 16), (20, 20), (32, 64), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)],
)
def test_widths_of_heads(width, value_width, dtype, name):
    made = case(("causal", "softcap"), dtype, size=(1, 2, 40, 50, width), name=name)
    made.inputs["value"] = torch.randn(1, 2, 50, value_width).to(made.inputs["query"])
    compare(made, name)


@names
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_call(data, name):
    size = st.integers(1, 2), st.sampled_from([2, 4]), st.integers(1, 140), st.integers(1, 140), st.integers(1, 40)
    size = tuple(data.draw(s) for s in size)
    features = tuple(data.draw(st.sets(st.sampled_from(FEATURES), max_size=5)))
    if name == "triton" and not CUDA:
        size = (1, 2, min(size[2], 33), min(size[3], 33), size[4])
    if "varlen" in features:
        size = (1, *size[1:])
    if excluded(features) or refused(features):
        return
    dtype = data.draw(st.sampled_from(FLOATS))
    made = case(features, dtype, size, name, generator=torch.Generator().manual_seed(3))
    mine = made.cast(None)
    with hfnn.use(name):
        results, grads = run(mine, attention)
    assert ran_ours(results[0])
    keep, dy = keep_of(made), cotangents(results)
    wide, wide_grads = run(made.cast(torch.float64), reference, dy, **keep)
    own, own_grads = run(made.cast(None), reference, dy, **keep)
    # Few elements make torch's own error random: some ulps are added.
    results = zip((*results, *grads), (*wide, *wide_grads), (*own, *own_grads), strict=True)
    for got, want, torchs in results:
        error, ulps = (
            testing.error(got, want),
            32 if got.numel() <= 64 else 4,
        )  # a gradient of sinks is a sum that cancels
        assert error.l2 <= 3 * testing.error(torchs, want).l2 + ulps * torch.finfo(dtype).eps or want.norm() < 1e-5


@pytest.mark.skipif(not CUDA, reason="a grid of a GPU")
def test_more_heads_than_a_grid_has_rows():
    q = torch.randn(1 << 15, 3, 5, 16, device=DEVICE, dtype=torch.bfloat16)
    with hfnn.use("triton"):
        y = attention(query=q, key=q, value=q, window=(2, 1))
        assert torch.equal(y[-7:], attention(query=q[-7:], key=q[-7:], value=q[-7:], window=(2, 1)))


# Layouts


def apart(x):
    """(B, H, T, D) in the memory of (B, T, H, D)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def strided(x):
    return torch.stack([x, x], -1)[..., 0]


def backwards(x):
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def off_by_one(x):
    """Contiguous, but 16-byte loads would fault or read the neighbour."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def near(got, want, dtype=torch.float32):
    assert testing.error(got, want.double()).l2 <= {torch.float32: 1e-5}.get(dtype, 2e-2)


@names
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [apart, strided, backwards, off_by_one])
@pytest.mark.parametrize("features", [("causal", "gqa", "lse"), ("bias", "softcap", "sinks")], ids="-".join)
def test_any_layout(features, layout, dtype, name):
    made = case(features, dtype, (1, 4, 9, 21, 16) if name == "triton" and not CUDA else None, name)
    with hfnn.use(name):
        plain = run(made.cast(None), attention)
        inputs = made.cast(None).inputs
        laid = {what: layout(x.detach()).requires_grad_() if x.dim() == 4 else x for what, x in inputs.items()}
        assert all(torch.equal(x, inputs[what]) for what, x in laid.items())
        found = run(Case(laid, made.options), attention)
        mine = made.cast(None)
        results = mine.call(attention)
        given = [layout(dy) if dy.dim() == 4 else dy for dy in cotangents(results)]
        last = torch.autograd.grad(results, list(mine.inputs.values()), given)
    for got, want in zip((*found[0], *found[1], *last), (*plain[0], *plain[1], *plain[1]), strict=True):
        near(got, want, dtype)


@names
def test_slices_of_one_projection(name):
    """query, key and value in one tensor (B, T, 3, H, D), and its gradient."""
    packed = torch.randn(2, 33, 3, 4, 16, device=DEVICE, requires_grad=True)
    query, key, value = packed.permute(2, 0, 3, 1, 4)
    with hfnn.use(name):
        y = attention(query=query, key=key, value=value, is_causal=True, softcap=2.0)
    assert ran_ours(y)
    dy = torch.randn_like(y)
    want = reference(query, key, value, is_causal=True, softcap=2.0)
    near(y, want)
    near(torch.autograd.grad(y, packed, dy, retain_graph=True)[0], torch.autograd.grad(want, packed, dy)[0])


@names
def test_the_result_can_be_viewed_by_tokens(name):
    """The usual next step, `transpose(1, 2).reshape(B, T, H D)`, copies nothing."""
    made = case(("causal", "softcap"), name=name)
    with hfnn.use(name):
        (y,) = made.call(attention)
    assert y.transpose(1, 2).is_contiguous()


@names
def test_expanded_inputs(name):
    """One key head and one key sequence, expanded: bitwise equal to their copies."""
    made = case(("softcap",), name=name)
    query, key, value = made.inputs.values()
    key, value = (x[:1, :1].expand_as(x) for x in (key, value))
    with hfnn.use(name):
        found = run(Case({"query": query, "key": key, "value": value}, made.options).cast(None), attention)
        expanded = {"query": query, "key": key.detach().requires_grad_(), "value": value.detach().requires_grad_()}
        expanded["query"] = query.detach().requires_grad_()
        assert expanded["key"].stride(0) == 0
        other = run(Case(expanded, made.options), attention)
        mine = made.cast(None)
        (y,) = mine.call(attention)
        summed = torch.autograd.grad(y.sum(), list(mine.inputs.values()), retain_graph=True)
        ones = torch.autograd.grad(y, list(mine.inputs.values()), torch.ones_like(y))
    assert all(map(torch.equal, (*found[0], *found[1]), (*other[0], *other[1])))
    assert all(map(torch.equal, summed, ones))


@names
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 2, 3)], ids=str)
def test_any_leading_dimensions(leading, name):
    """Fewer or more than torch's four dimensions; without leading dimensions there is one head."""
    query, key, value = (torch.randn(*leading, rows, 8, device=DEVICE) for rows in (9, 11, 11))
    leaves = [x.requires_grad_() for x in (query, key, value)]
    options = {"window": (3, 2), "return_lse": True}
    with hfnn.use(name):
        y, lse = attention(query=query, key=key, value=value, **options)
    assert y.shape == query.shape and lse.shape == query.shape[:-1] and ran_ours(y)
    want, want_lse = reference(query, key, value, **options)
    near(y, want)
    near(lse, want_lse)
    dy, dlse = torch.randn_like(y), torch.randn_like(lse)
    for got, right in zip(
        torch.autograd.grad((y, lse), leaves, (dy, dlse)),
        torch.autograd.grad((want, want_lse), leaves, (dy, dlse)),
        strict=True,
    ):
        near(got, right)


@names
@pytest.mark.parametrize(
    "shape", [(33,), (21, 33), (1, 21, 33), (4, 1, 33), (2, 1, 21, 33), (2, 1, 1, 33), (2, 4, 21, 1), (1, 1, 1, 1)]
)
@pytest.mark.parametrize("boolean", [True, False])
def test_masks_of_any_shape(shape, boolean, name):
    made = case(("softcap",), size=(2, 4, 21, 33, 16), name=name)
    if boolean:
        made.options["attn_mask"] = torch.rand(shape, device=DEVICE) < 0.6
    else:
        made.inputs["attn_mask"] = torch.randn(shape, device=DEVICE)
    compare(made, name)


@names
def test_masks_of_numbers_may_hide(name):
    """-inf as in models, in a whole row too, and a float32 mask for bfloat16 queries."""
    mask = torch.zeros(2, 1, 21, 33, device=DEVICE).masked_fill(
        torch.rand(2, 1, 21, 33, device=DEVICE) < 0.4, -torch.inf
    )
    mask[:, :, 3] = -torch.inf
    for dtype in FLOATS:
        made = case(("softcap", "lse"), dtype, size=(2, 4, 21, 33, 16), name=name)
        made.options["attn_mask"] = mask
        (y, lse), grads = compare(made, name)
        assert not y[:, :, 3].any() and (lse[:, :, 3] == -torch.inf).all()
        assert not grads[0][:, :, 3].any()


@pytest.mark.skipif(not CUDA, reason="needs 40 GiB of GPU memory")
def test_more_than_2_31_elements():
    """The last batch elements beyond int32 offsets equal those alone, for q, k, v, and for a bias."""
    batch, queries = (1 << 31) // (4096 * 128) + 2, 4096
    options = {"window": (100, 0), "return_lse": True}
    x = torch.randn(2, 1, queries, 128, device="cuda", dtype=torch.bfloat16)
    many = x.repeat(batch // 2, 1, 1, 1).requires_grad_()
    few = x.clone().requires_grad_()
    ends = []
    with hfnn.use("triton"):
        for leaf in (many, few):
            y, lse = attention(query=leaf, key=leaf, value=leaf, **options)
            (grad,) = torch.autograd.grad(y.sum() + lse.sum(), leaf)
            ends.append([t[-2:].clone() for t in (y, lse, grad)])
            del y, lse, grad
    assert all(map(torch.equal, *ends))
    with hfnn.use("triton"):
        shape = (1, 1, (1 << 31) // 8192 + 128, 8192)
        bias = torch.randn(1, 1, 1, 8192, device="cuda", dtype=torch.bfloat16).expand(shape).contiguous()
        q = torch.randn(1, 1, shape[2], 16, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(1, 1, 8192, 16, device="cuda", dtype=torch.bfloat16)
        whole = attention(query=q, key=k, value=k, attn_mask=bias, softcap=5.0)
        tail = attention(query=q[:, :, -128:], key=k, value=k, attn_mask=bias[:, :, -128:], softcap=5.0)
    assert torch.equal(whole[:, :, -128:], tail)


def call(function, q, k, v, mask, **options):
    """(the result, the gradients of what requires them)."""
    o = function(q, k, v, mask, **options)
    wanted = [x for x in (q, k, v, mask) if x is not None and x.requires_grad]
    return o, *(torch.autograd.grad(o.sum(), wanted) if wanted else ())


@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("order", [(-3, -2), (-2, -3)], ids=["contiguous", "transposed"])
@pytest.mark.parametrize("leading", [(), (6,), (2, 6), (2, 2, 6)], ids=str)
@pytest.mark.parametrize("mask", [None, "boolean", "bias"])
def test_strides_where_torch_runs_its_math_backend(mask, leading, order, grad):
    """On the CPU: with dropout, a mask that requires a gradient, or other than four dimensions."""
    for p, causal, gqa in itertools.product((0.0, 0.3), (False, True), (False, True)):
        if (causal and mask) or (gqa and not leading) or (len(leading) == 2 and not p and mask != "bias"):
            continue
        query = torch.randn(*leading, 32, 24)
        if leading:
            query = query.movedim(order[0], order[1]).contiguous().movedim(order[1], order[0])
        key = query[..., : 2 if gqa else 6, :, :] if leading else query
        q, k, v = (x.clone().requires_grad_(grad) for x in (query, key, key))
        if mask is None:
            pairs = None
        else:
            pairs = torch.randn(32, 32).requires_grad_() if mask == "bias" else torch.randn(32, 32) > -1
        options = {"dropout_p": p, "is_causal": causal, "enable_gqa": gqa}
        stock = call(F.scaled_dot_product_attention, q, k, v, pairs, **options)
        with hfnn.use("cpp"):
            ours = call(hfnn.functional.scaled_dot_product_attention, q, k, v, pairs, **options)
        assert [x.stride() for x in ours] == [x.stride() for x in stock], options


# torch's flash backend on the CPU accepts both.
@pytest.mark.parametrize("mask, p", [("boolean", 0.5), ("numbers", 0.5), ("bias", 0.0), ("bias", 0.5)])
def test_a_mask_and_is_causal_exclude_each_other_as_in_torch(mask, p):
    q = torch.randn(2, 4, 16, 8)
    pairs = torch.randn(16, 16) > -1 if mask == "boolean" else torch.randn(16, 16).requires_grad_(mask == "bias")
    for function, options in (
        (F.scaled_dot_product_attention, {}),
        (hfnn.functional.scaled_dot_product_attention, {"prefer": "memory"}),
    ):
        with pytest.raises(RuntimeError, match="attn_mask should not be set when is_causal=True"):
            function(q, q, q, pairs, p, True, **options)
    hfnn.functional.scaled_dot_product_attention(q, q, q, pairs, p, True, window=(3, None))  # an option of ours


@pytest.mark.parametrize("p, biased", [(0.0, True), (0.5, False)])
def test_within_a_module_the_next_product_needs_no_copy(p, biased):
    """Also where torch's own op has another memory order."""
    q = torch.randn(2, 4, 32, 16, requires_grad=True)
    bias = torch.randn(32, 32, requires_grad=True) if biased else None
    with hfnn.use("cpp"):
        assert in_rows(q, q, q, bias, p, prefer="auto").transpose(1, 2).is_contiguous()
        assert not hfnn.functional.scaled_dot_product_attention(q, q, q, bias, p).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_strides_of_a_bias_that_requires_a_gradient_in_no_grad_mode(mode):
    """torch has a kernel for that, which returns the query's strides."""
    q, bias = torch.randn(2, 4, 32, 16), torch.randn(32, 32, requires_grad=True)
    for x in (q, q.transpose(1, 2).contiguous().transpose(1, 2)):
        with mode():
            want = F.scaled_dot_product_attention(x, x, x, bias)
            assert (
                hfnn.functional.scaled_dot_product_attention(x, x, x, bias, prefer="memory").stride() == want.stride()
            )
