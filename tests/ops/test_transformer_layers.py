"""hfnn's Transformer layers against torch's, with the same weights, alone and inside nn.Transformer."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hfnn
from hfnn import testing
from hfnn.core import node as recipe
from hfnn.core.holder import target_of
from hfnn.ops.attention import transformer

D, H, FF, B, T, S = 16, 2, 40, 3, 6, 5
KINDS = {"encoder": nn.TransformerEncoderLayer, "decoder": nn.TransformerDecoderLayer}
OURS = {"encoder": hfnn.TransformerEncoderLayer, "decoder": hfnn.TransformerDecoderLayer}
ACTIVATIONS = {
    "relu": lambda: "relu",
    "gelu": lambda: "gelu",
    "silu": lambda: nn.functional.silu,
    "torch.relu": lambda: torch.relu,
    "callable": lambda: torch.cos,
    "ReLU": nn.ReLU,
    "GELU": nn.GELU,
    "Tanh": nn.Tanh,
}
each = pytest.mark.parametrize("kind", KINDS)
norms = pytest.mark.parametrize("norm_first", [True, False])


def copied(module):
    """A copy. A copied decoder of torch uses relu instead of an activation module."""
    found = copy.deepcopy(module)
    if isinstance(module.activation, nn.Module):
        vars(found).pop("activation", None)
    return found


def pair(kind, dtype=torch.float32, dropout=0.0, **options):
    theirs = KINDS[kind](D, H, FF, dropout, batch_first=options.pop("batch_first", True), **options).to(dtype)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))
    ours = hfnn.convert(copied(theirs), prefer="memory")
    assert target_of(ours) is OURS[kind]
    return theirs, ours


def draw(kind, dtype=torch.float32, batch_first=True):
    shapes = [(B, T, D), (B, S, D)][: 1 if kind == "encoder" else 2]
    shapes = [s if batch_first else (s[1], s[0], s[2]) for s in shapes]
    return [torch.randn(s).to(dtype).requires_grad_() for s in shapes]


def causal(n):
    return nn.Transformer.generate_square_subsequent_mask(n).isinf()


def masks(kind, mask, padded):
    """Keyword arguments; mask: None, "mask" or "hint"."""
    own, cross = ("src", None) if kind == "encoder" else ("tgt", "memory")
    padding = lambda n: torch.arange(n) >= torch.tensor([n, 2, 3])[:, None]  # noqa: E731
    found = {}
    if mask:
        found[f"{own}_mask"] = causal(T)
        found["is_causal" if kind == "encoder" else "tgt_is_causal"] = mask == "hint"
        if cross and mask == "mask":
            found["memory_mask"] = torch.zeros(T, S, dtype=torch.bool)
            found["memory_mask"][:, 1] = True
    if padded:
        found[f"{own}_key_padding_mask"] = padding(T)
        if cross:
            found["memory_key_padding_mask"] = padding(S)
    return found


def run(module, given, **how):
    torch.manual_seed(3)
    y = module(*given, **how)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).to(y)
    return y, torch.autograd.grad(y, [*given, *module.parameters()], dy)


def assert_alike(theirs, ours, given, **how):
    want, want_grads = run(theirs, given, **how)
    got, got_grads = run(ours, given, **how)
    wide = [x.detach().double().requires_grad_() for x in given]
    exact, exact_grads = run(copied(theirs).double(), wide, **how)
    testing.assert_close(got, exact, want)
    for mine, true, torchs in zip(got_grads, exact_grads, want_grads, strict=True):
        if (mine - torchs).abs().max() > 1e-5 * max(1, torchs.abs().max()):
            testing.assert_close(mine, true, torchs, testing.GRADIENTS)


@each
@norms
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_masks(kind, norm_first, batch_first, bias):
    theirs, ours = pair(kind, norm_first=norm_first, batch_first=batch_first, bias=bias)
    for mask, padded in itertools.product((None, "mask", "hint"), (False, True)):
        assert_alike(theirs, ours, draw(kind, batch_first=batch_first), **masks(kind, mask, padded))


@each
@norms
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(kind, norm_first, activation):
    theirs, ours = pair(kind, norm_first=norm_first, activation=ACTIVATIONS[activation]())
    assert_alike(theirs, ours, draw(kind))


@each
@norms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(kind, norm_first, dtype):
    # Not relu, whose gradient changes where an element near 0 rounds to the other side.
    theirs, ours = pair(kind, dtype, norm_first=norm_first, activation="gelu")
    given, how = draw(kind, dtype), masks(kind, "hint", True)
    want, got = (run(module, given, **how) for module in (theirs, ours))
    exact = run(copied(theirs).double(), [x.detach().double().requires_grad_() for x in given], **how)
    testing.assert_close(got[0], exact[0], want[0])
    # Many successive roundings: the error of a single element is random.
    for mine, true, torchs in zip(got[1], exact[1], want[1], strict=True):
        if true.abs().max() > 1e-6:
            own = testing.error(torchs, true)
            assert testing.error(mine, true).l2 <= 3 * own.l2 + torch.finfo(dtype).eps


@each
@norms
@pytest.mark.parametrize("activation", ["relu", "gelu", "ReLU", "GELU"])
def test_dropout(kind, norm_first, activation):
    """One seed gives one draw, also when recomputed; the mean is near the result without; fewer bytes are kept."""
    theirs, ours = pair(kind, dropout=0.2, norm_first=norm_first, activation=ACTIVATIONS[activation]())
    given = draw(kind)
    y, grads = run(ours, given)
    assert run(ours, given)[0].equal(y) and not ours(*given).equal(y)
    torch.manual_seed(3)
    again = checkpoint(ours, *given, use_reentrant=False)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(4))
    assert again.equal(y)
    assert all(map(torch.equal, torch.autograd.grad(again, [*given, *ours.parameters()], dy), grads))
    with recipe.disabled():
        assert all(map(torch.equal, run(ours, given)[1], grads))
    mine, torchs = (hfnn.memory.saved_bytes(lambda m=m: m(*given)).total for m in (ours, theirs))
    assert mine < 0.8 * torchs, (mine, torchs)


def nodes(y):
    found, queue = [], [y.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None and node not in found:
            found.append(node)
            queue.extend(after for after, _ in node.next_functions)
    return [node.name() for node in found]


def test_sums_and_norms_are_fused():
    for kind, ends in (("encoder", 2), ("decoder", 3)):
        for norm_first in (True, False):
            _, ours = pair(kind, dropout=0.2, norm_first=norm_first)
            names = nodes(ours(*draw(kind)))
            assert names.count("_DropoutAddBackward") == names.count("_LayerNormBackward") == ends
            assert names.count("_ReluDropoutBackward") == 1


@each
@norms
@pytest.mark.parametrize("prefer", ["auto", "memory"])
def test_strides_are_torchs(kind, norm_first, prefer):
    """Attention's results have another layout than its inputs; in a sum the first operand's decides."""
    theirs = KINDS[kind](D, H, FF, 0.0, batch_first=True, norm_first=norm_first)
    ours = hfnn.convert(copied(theirs), prefer=prefer)
    for x in (torch.randn(B, T, D), torch.randn(T, B, D).transpose(0, 1)):
        inputs = (x,) if kind == "encoder" else (x, x.flip(-2))
        assert ours(*inputs).stride() == theirs(*inputs).stride()


@each
@norms
def test_hooks_are_called(kind, norm_first):
    _, ours = pair(kind, dropout=0.2, norm_first=norm_first)
    called = []
    for name, part in ours.named_modules():
        if name and "out_proj" not in name:  # torch does not call it either
            part.register_forward_hook(lambda *args, name=name: called.append(name))
    ours(*draw(kind))
    assert sorted(called) == sorted(name for name, _ in ours.named_modules() if name and "out_proj" not in name)


class OwnBlock(nn.TransformerEncoderLayer):
    def _ff_block(self, x):
        return x * 2


def test_a_subclass_with_its_own_block_keeps_it():
    theirs = OwnBlock(D, H, FF, 0.0, batch_first=True)
    ours = hfnn.convert(copy.deepcopy(theirs))
    (x,) = draw("encoder")
    assert target_of(ours) is hfnn.TransformerEncoderLayer
    torch.testing.assert_close(ours(x), theirs(x))
    changed = pair("encoder")[1]
    changed._sa_block = lambda x, *args, **kwargs: x
    torch.testing.assert_close(changed(x), hfnn.revert(copy.deepcopy(changed))(x))


def test_parts_of_another_class_are_called():
    theirs, ours = pair("encoder", norm_first=True)
    for layer in (theirs, ours):
        layer.norm2, layer.dropout1 = nn.RMSNorm(D), nn.Identity()
    assert_alike(theirs, ours, draw("encoder"))


@each
def test_built_by_hand(kind):
    """The constructor, state dicts in both directions, copies and pickles."""
    theirs, _ = pair(kind, dropout=0.1, activation=nn.GELU())
    fresh = OURS[kind](D, H, FF, 0.1, nn.GELU(), batch_first=True)
    assert isinstance(fresh, KINDS[kind])
    fresh.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(fresh.state_dict())
    assert list(fresh.state_dict()) == list(theirs.state_dict())
    parts = {name: type(part) for name, part in fresh.named_children()}
    assert parts["self_attn"] is hfnn.MultiheadAttention and parts["norm1"] is hfnn.LayerNorm
    assert parts["linear1"] is hfnn.Linear and parts["dropout"] is hfnn.Dropout and parts["activation"] is hfnn.GELU
    given = draw(kind)
    want = run(fresh, given)[0]
    for module in (copy.deepcopy(fresh), pickle.loads(pickle.dumps(fresh))):
        if kind == "decoder":  # as in torch
            vars(module).pop("activation", None)
        assert target_of(module) is OURS[kind] and run(module, given)[0].equal(want)
    hfnn.revert(fresh)
    assert not any(type(m).__module__.startswith("hfnn") for m in fresh.modules())
    assert run(fresh, given)[0].equal(run(theirs, given)[0])


@each
def test_errors_and_warnings_are_torchs(kind):
    theirs, ours = pair(kind)
    own = "src" if kind == "encoder" else "tgt"
    hint = "is_causal" if kind == "encoder" else "tgt_is_causal"
    for how in ({hint: True}, {f"{own}_mask": torch.zeros(T, T, dtype=torch.int)}, {f"{own}_mask": torch.zeros(2, 2)}):
        with pytest.raises(Exception) as want:
            theirs(*draw(kind), **how)
        with pytest.raises(type(want.value)) as got:
            ours(*draw(kind), **how)
        assert str(got.value) == str(want.value)
    how = {f"{own}_mask": torch.zeros(T, T), f"{own}_key_padding_mask": torch.zeros(B, T, dtype=torch.bool)}
    for layer in (theirs, ours):
        with pytest.warns(UserWarning, match="Support for mismatched"):
            layer(*draw(kind), **how)


@norms
def test_where_nothing_is_learnt_torchs_fast_path_runs(norm_first, monkeypatch):
    theirs, ours = (module.eval() for module in pair("encoder", dropout=0.1, norm_first=norm_first))
    calls, fast = [], torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *args: calls.append(1) or fast(*args))
    (x,) = draw("encoder")
    with torch.no_grad():
        assert ours(x).equal(theirs(x)) and len(calls) == 2
    for layer in (theirs, ours):
        layer.requires_grad_(False)
    assert ours(x.detach()).equal(theirs(x.detach())) and len(calls) == 4
    assert ours(x).requires_grad and len(calls) == 4


@norms
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_transformer(norm_first):
    """convert and revert of a whole model: torch's own encoder, with its nested tensors, around hfnn's layers."""
    torch.manual_seed(0)
    theirs = nn.Transformer(D, H, 2, 2, FF, 0.1, batch_first=True, norm_first=norm_first)
    ours = hfnn.convert(copy.deepcopy(theirs), prefer="memory")
    assert target_of(ours.encoder.layers[0]) is hfnn.TransformerEncoderLayer
    assert target_of(ours.decoder.layers[1].multihead_attn) is hfnn.MultiheadAttention
    rows = {row.name: row for row in hfnn.report(ours).rows}
    assert rows["encoder.layers.0"].to == "hfnn.TransformerEncoderLayer"
    assert rows["decoder.layers.1.self_attn"].to == "hfnn.MultiheadAttention"
    src, tgt = (torch.randn(B, n, D, requires_grad=True) for n in (S, T))
    padding = torch.arange(S) >= torch.tensor([S, 2, 3])[:, None]
    how = {"tgt_mask": causal(T), "src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    with torch.no_grad():
        want, got = (module.eval()(src, tgt, **how) for module in (theirs, ours))
        torch.testing.assert_close(got, want)
    want, got = (run(module.eval(), (src, tgt), **how) for module in (theirs, ours))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    kept = [hfnn.memory.saved_bytes(lambda m=m: m.train()(src, tgt, **how)).total for m in (ours, theirs)]
    assert kept[0] < 0.8 * kept[1]
    hfnn.revert(ours)
    assert not any(type(m).__module__.startswith("hfnn") for m in ours.modules())
    assert [vars(m).keys() for m in theirs.modules()] == [vars(m).keys() for m in ours.modules()]
    for a, b in zip(run(theirs, (src, tgt), **how), run(ours, (src, tgt), **how), strict=True):
        assert all(map(torch.equal, a, b)) if isinstance(a, tuple) else a.equal(b)


def test_compiled_is_torchs(monkeypatch):
    theirs, ours = pair("encoder", norm_first=True)
    (x,) = draw("encoder")
    monkeypatch.setattr(transformer, "_end", None)
    compiled = torch.compile(lambda m, x: m(x), backend="eager", fullgraph=True)
    assert compiled(ours, x).equal(compiled(theirs, x))


def test_report_knows_the_width_of_a_head(monkeypatch):
    """The limits of kernels refer to it, not to the size of a weight."""
    kernel = hfnn.kernel.Kernel("cpp", "hfnn._C:cpu.layer_norm", "cpu", max_cols=H * 4)
    monkeypatch.setattr(type(transformer.OP), "__setattr__", object.__setattr__)
    monkeypatch.setattr(transformer.OP, "kernels", (kernel,))
    rows = {row.name: row for row in hfnn.report(pair("encoder")[1]).rows}
    assert D // H == 8 and rows[""].kernel == rows["self_attn"].kernel == "cpp"
    monkeypatch.setattr(transformer.OP, "kernels", (hfnn.kernel.Kernel("cpp", kernel.source, "cpu", max_cols=7),))
    rows = {row.name: row for row in hfnn.report(pair("encoder")[1]).rows}
    assert rows[""].kernel == rows["self_attn"].kernel == "torch"
