"""hfnn.MultiheadAttention against torch's, with the same weights, in all kinds of calls."""

import copy
import io
import itertools
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hfnn
from hfnn import testing
from hfnn.core import node as recipe
from hfnn.core.holder import target_of
from hfnn.ops.attention import multihead

E, H, B, T, S = 24, 4, 3, 5, 7
VARIANTS = {
    "plain": {},
    "no bias": {"bias": False},
    "widths": {"kdim": 12, "vdim": 20},
    "widths, no bias": {"kdim": 12, "vdim": 20, "bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
}
LAYOUTS = ("batch first", "sequence first", "unbatched")
INPUTS = ("self", "memory", "three")
MASKS = ("none", "bool 2d", "float 2d", "bool 3d", "float 3d", "hint")
PADDINGS = ("none", "bool", "float")


def pair(dtype=torch.float32, layout="batch first", dropout=0.0, **options):
    """torch's module and hfnn's, with the same random weights."""
    theirs = nn.MultiheadAttention(E, H, dropout, batch_first=layout == "batch first", dtype=dtype, **options)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.uniform_(-0.5, 0.5)
    ours = hfnn.convert(copy.deepcopy(theirs), prefer="memory")
    assert target_of(ours) is hfnn.MultiheadAttention
    return theirs, ours


def shaped(x, layout):
    return {"batch first": x, "sequence first": x.transpose(0, 1).contiguous(), "unbatched": x[0]}[layout]


def draw(inputs, layout, kdim=E, vdim=E, dtype=torch.float32):
    """(leaves, [query, key, value]): arguments that are the same share a tensor."""
    lengths = {"self": (T,), "memory": (T, S), "three": (T, S, S)}[inputs]
    widths = (E, kdim, vdim)
    leaves = [
        shaped(torch.randn(B, n, w), layout).to(dtype).requires_grad_() for n, w in zip(lengths, widths, strict=False)
    ]
    return leaves, [leaves[min(i, len(leaves) - 1)] for i in range(3)]


def masks(mask, padding, inputs, layout, dtype=torch.float32):
    """Keyword arguments. Key 0 stays visible to all, because torch returns NaN weights where there are no keys."""
    keys, batch = T if inputs == "self" else S, 1 if layout == "unbatched" else B
    shape = (batch * H, T, keys) if "3d" in mask else (T, keys)
    blocked = torch.ones(T, keys, dtype=torch.bool).triu(1) if mask == "hint" else torch.rand(shape) < 0.4
    blocked[..., 0] = False
    padded = torch.arange(keys) >= torch.randint(1, keys + 1, (batch, 1))
    found = {"is_causal": mask == "hint"}
    as_float = lambda m: torch.zeros(m.shape, dtype=dtype).masked_fill(m, -torch.inf)  # noqa: E731
    if mask != "none":
        found["attn_mask"] = torch.randn(shape).to(dtype).where(~blocked, -torch.inf) if "float" in mask else blocked
    if padding != "none":
        padded = padded[0] if layout == "unbatched" else padded
        found["key_padding_mask"] = as_float(padded) if padding == "float" else padded
        if mask == "hint" and padding == "float":  # one mask dtype, or torch warns
            found["attn_mask"] = as_float(blocked)
    return found


def run(module, given, leaves, **how):
    torch.manual_seed(3)
    y, weights = module(*given, **how)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).to(y)
    return y, weights, torch.autograd.grad(y, [*leaves, *module.parameters()], dy)


def wide(module, given, leaves, how):
    """torch's result in float64."""
    module = copy.deepcopy(module).double()
    found = {id(x): x.detach().double().requires_grad_() for x in leaves}
    how = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in how.items()}
    return run(module, [found[id(x)] for x in given], list(found.values()), **how)


def assert_alike(theirs, ours, given, leaves, **how):
    """The accuracy rule for outputs and gradients, and which code ran."""
    with hfnn.use("torch"):
        assert ours(*given, **how)[0].equal(theirs(*given, **how)[0])
    want, _, want_grads = run(theirs, given, leaves, **how)
    got, weights, got_grads = run(ours, given, leaves, **how)
    exact, _, exact_grads = wide(theirs, given, leaves, how)
    assert weights is None and got.shape == want.shape
    if got.dtype is torch.float64:
        torch.testing.assert_close((got, *got_grads), (want, *want_grads))
        return
    testing.assert_close(got, exact, want)
    for mine, true, torchs in zip(got_grads, exact_grads, want_grads, strict=True):
        # The gradient of the keys' bias is rounding noise.
        if testing.error(mine, torchs).largest > 1e-5 and (mine - torchs).abs().max() > 1e-6:
            testing.assert_close(mine, true, torchs, testing.GRADIENTS)


@pytest.fixture
def counted(monkeypatch):
    """Counts how often hfnn's own path was taken."""
    calls, attend = [], multihead._attend
    monkeypatch.setattr(multihead, "_attend", lambda *args: calls.append(1) or attend(*args))
    return calls


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(variant, inputs, layout, counted):
    options = VARIANTS[variant]
    if "kdim" in options and inputs != "three":
        pytest.skip("keys and values of other widths are other tensors")
    theirs, ours = pair(layout=layout, **options)
    for mask, padding in itertools.product(MASKS, PADDINGS):
        if "none" not in (mask, padding) and mask != "hint" and padding not in mask:
            continue  # mixed mask dtypes: tested below
        leaves, given = draw(inputs, layout, options.get("kdim", E), options.get("vdim", E))
        counted.clear()
        assert_alike(theirs, ours, given, leaves, need_weights=False, **masks(mask, padding, inputs, layout))
        assert counted == [1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "mask, padding", [("none", "none"), ("bool 2d", "bool"), ("float 3d", "float"), ("hint", "bool")]
)
def test_dtypes(dtype, mask, padding, counted):
    theirs, ours = pair(dtype)
    leaves, given = draw("self", "batch first", dtype=dtype)
    assert_alike(theirs, ours, given, leaves, need_weights=False, **masks(mask, padding, "self", "batch first", dtype))
    assert counted == [1]


def test_where_nothing_is_learnt_torchs_fast_path_runs(counted, monkeypatch):
    theirs, ours = (m.eval() for m in pair())
    x, calls = torch.randn(B, T, E), []
    native = torch._native_multi_head_attention
    monkeypatch.setattr(torch, "_native_multi_head_attention", lambda *args: calls.append(1) or native(*args))
    with torch.no_grad():
        assert ours(x, x, x, need_weights=False)[0].equal(theirs(x, x, x, need_weights=False)[0])
    assert calls == [1, 1] and not counted
    ours(x, x, x, need_weights=False)  # the weights require grad
    assert counted == [1] and len(calls) == 2


BAD = {
    "hint without mask": (lambda: [torch.randn(B, T, E)] * 3, lambda: {"is_causal": True}),
    "mask of integers": (lambda: [torch.randn(B, T, E)] * 3, lambda: {"attn_mask": torch.zeros(T, T, dtype=torch.int)}),
    "size of a mask": (lambda: [torch.randn(B, T, E)] * 3, lambda: {"attn_mask": torch.zeros(T, T + 1)}),
    "size of a 3d mask": (lambda: [torch.randn(B, T, E)] * 3, lambda: {"attn_mask": torch.zeros(B, T, T)}),
    "size of the padding": (lambda: [torch.randn(B, T, E)] * 3, lambda: {"key_padding_mask": torch.zeros(B, T + 1)}),
    "dimensions of the padding": (lambda: [torch.randn(B, T, E)] * 3, lambda: {"key_padding_mask": torch.zeros(T)}),
    "four dimensions": (lambda: [torch.randn(1, B, T, E)] * 3, dict),
    "keys of two dimensions": (lambda: [torch.randn(B, T, E), torch.randn(T, E), torch.randn(T, E)], dict),
    "width": (lambda: [torch.randn(B, T, E + 1)] * 3, dict),
    "keys and values": (lambda: [torch.randn(B, n, E) for n in (T, S, S + 1)], dict),
    "batch": (lambda: [torch.randn(n, T, E) for n in (B, B + 1, B + 1)], dict),
    "dtype": (lambda: [torch.randn(B, T, E).bfloat16()] * 3, dict),
    "nothing": (lambda: [None] * 3, dict),
}


@pytest.mark.parametrize("what", BAD)
def test_errors_are_torchs(what):
    theirs, ours = pair()
    inputs, how = (make() for make in BAD[what])
    with pytest.raises(Exception) as want:
        theirs(*inputs, need_weights=False, **how)
    with pytest.raises(type(want.value)) as got:
        ours(*inputs, need_weights=False, **how)
    assert str(got.value) == str(want.value) and type(got.value) is type(want.value)


def test_masks_of_two_kinds_are_torchs_to_warn_of():
    x, how, results = torch.randn(B, T, E), masks("float 2d", "bool", "self", "batch first"), []
    for module in pair():
        with pytest.warns(UserWarning, match="mismatched key_padding_mask and attn_mask"):
            results.append(module(x, x, x, need_weights=False, **how)[0])
    assert results[0].equal(results[1])


def test_a_query_without_keys_is_0():
    _, ours = pair(bias=False)
    x = torch.randn(B, T, E, requires_grad=True)
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[1] = True
    y = ours(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    assert y[1].eq(0).all() and y[0].ne(0).any() and dx[1].eq(0).all() and dx.isfinite().all()


def test_a_mask_that_learns():
    theirs, ours = pair()
    x, mask = torch.randn(B, T, E), torch.randn(B * H, T, T, requires_grad=True)
    padding = masks("none", "float", "self", "batch first")["key_padding_mask"]
    for is_causal in (False, True):  # a wrong hint; torch ignores it together with padding
        how = {"attn_mask": mask, "key_padding_mask": padding, "is_causal": is_causal, "need_weights": False}
        want, got = (torch.autograd.grad(m(x, x, x, **how)[0].square().sum(), mask)[0] for m in (theirs, ours))
        assert want.ne(0).any()
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(low, counted):
    theirs, ours = pair()
    leaves, given = draw("memory", "batch first")
    for mask, padding in (("none", "none"), ("bool 2d", "bool"), ("float 2d", "float")):
        how = {"need_weights": False, **masks(mask, padding, "memory", "batch first")}
        with torch.autocast("cpu", low):
            want, got = (run(module, given, leaves, **how) for module in (theirs, ours))
        true = wide(theirs, given, leaves, how)
        testing.assert_close(got[0], true[0], want[0])
        assert [g.dtype for g in got[2]] == [g.dtype for g in want[2]]
        for mine, torchs, exact in zip(got[2], want[2], true[2], strict=True):
            if (mine - torchs).abs().max() > 2e-2:
                testing.assert_close(mine, exact, torchs, testing.GRADIENTS)
    assert len(counted) == 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout(layout):
    """Its mean is attention without dropout. A seed gives one draw, also when a checkpoint recomputes it."""
    theirs, ours = pair(layout=layout, dropout=0.3)
    leaves, given = draw("self", layout)
    mean = torch.stack([ours(*given, need_weights=False)[0] for _ in range(1000)]).mean(0)
    want = theirs.eval()(*given, need_weights=False)[0]
    assert (mean - want).abs().max() < 0.2 and not mean.equal(want)
    plain = run(ours, given, leaves, need_weights=False)
    assert plain[0].equal(run(ours, given, leaves, need_weights=False)[0])
    for reentrant in (False, True):
        torch.manual_seed(3)
        y = checkpoint(lambda x: ours(x, x, x, need_weights=False)[0], given[0], use_reentrant=reentrant)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(4))
        (dx,) = torch.autograd.grad(y, leaves[0], dy) if not reentrant else (_backward(y, dy, leaves[0]),)
        assert y.equal(plain[0]) and dx.equal(plain[2][0])


def _backward(y, dy, leaf):
    y.backward(dy)
    return leaf.grad


def test_the_norm_before_is_not_kept():
    norm, (theirs, ours) = hfnn.LayerNorm(E), pair()
    x = torch.randn(B, T, E, requires_grad=True)

    def step(module):
        y = hfnn.functional.layer_norm(x, (E,), norm.weight, norm.bias, prefer="memory")
        return module(y, y, y, need_weights=False)[0]

    with hfnn.use("torch"):
        before = hfnn.memory.saved_bytes(lambda: theirs(norm(x), *[x] * 2, need_weights=False)[0])
    recipe.counter.reset()
    after = hfnn.memory.saved_bytes(lambda: step(ours))
    assert recipe.counter.taken == 1 and after.total < before.total
    on = torch.autograd.grad(step(ours).square().sum(), [x, *ours.parameters()])
    with recipe.disabled():
        off = torch.autograd.grad(step(ours).square().sum(), [x, *ours.parameters()])
    assert all(map(torch.equal, on, off))


def test_state_dicts_copies_and_pickles():
    theirs, ours = pair(dropout=0.1)
    fresh = hfnn.MultiheadAttention(E, H, 0.1, batch_first=True)
    fresh.prefer = "memory"
    fresh.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(fresh.state_dict())
    assert list(fresh.state_dict()) == list(theirs.state_dict()) and isinstance(fresh, nn.MultiheadAttention)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    copies = copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(file, weights_only=False), fresh
    x = torch.randn(B, T, E)

    def result(module):
        torch.manual_seed(5)
        return module(x, x, x, need_weights=False)[0]

    for module in copies:
        assert target_of(module) is hfnn.MultiheadAttention
        assert result(module).equal(result(ours))
    assert type(hfnn.revert(copies[0])) is nn.MultiheadAttention


class Inherits(nn.MultiheadAttention):
    """A user's class with torch's forward."""


class Changes(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)[0]


def test_subclasses(counted):
    model = hfnn.convert(nn.ModuleList([Inherits(E, H), Changes(E, H)]))
    x = torch.randn(T, B, E)
    assert isinstance(model[0], Inherits) and model[0](x, x, x, need_weights=False)[1] is None and counted == [1]
    assert type(model[1]) is Changes
    rows = {row.name: row for row in hfnn.report(model).rows}
    assert rows["0"].to == "hfnn.MultiheadAttention" and "weights" in rows["0"].why
    assert "forward of its own" in rows["1"].why


def test_empty_nested_and_transformed_calls_are_torchs(counted):
    theirs, ours = pair()
    empty = torch.randn(0, T, E)
    assert ours(empty, empty, empty, need_weights=False)[0].shape == (0, T, E)
    x = torch.randn(2, B, T, E)
    call = lambda module: torch.func.vmap(lambda x: module(x, x, x, need_weights=False)[0])(x)  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(call(ours), call(theirs))
        nested = torch.nested.nested_tensor([torch.randn(3, E), torch.randn(5, E)])
        with torch.no_grad():
            y = ours.eval()(nested, nested, nested, need_weights=False)[0]
            assert y.is_nested
    assert not counted


def test_compiled_is_torchs():
    theirs, ours = pair()
    x = torch.randn(B, T, E)
    compiled = torch.compile(lambda m, x: m(x, x, x, need_weights=False)[0], backend="eager", fullgraph=True)
    assert compiled(ours, x).equal(compiled(theirs, x))


@pytest.mark.parametrize("sizes", [(3, 5), (1, 5), (5, 1)])
@pytest.mark.parametrize("batch_first", [False, True])
def test_strides_are_torchs(batch_first, sizes):
    x = torch.randn(*sizes, 16)
    module = nn.MultiheadAttention(16, 4, batch_first=batch_first)
    want = module(x, x, x, need_weights=False)[0]
    y = hfnn.convert(module, prefer="memory")(x, x, x, need_weights=False)[0]
    assert y.stride() == want.stride()
    torch.testing.assert_close(y, want)
