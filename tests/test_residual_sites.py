"""Residual connections as modules: which are recognised, which are not, and what a converted one does."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn

import hfnn
from hfnn.core.holder import target_of
from hfnn.patterns import rewrite
from hfnn.patterns.probe import Refusal
from hfnn.patterns.subclass import is_converted, title


class PostNorm(nn.Module):
    """BERT's, as in transformers."""

    def __init__(self, inner=64, p=0.1):
        super().__init__()
        self.dense = nn.Linear(inner, 32)
        self.LayerNorm = nn.LayerNorm(32, eps=1e-3)
        self.dropout = nn.Dropout(p)

    def forward(self, hidden_states, input_tensor):
        hidden_states = self.dense(hidden_states)
        hidden_states = self.dropout(hidden_states)
        hidden_states = self.LayerNorm(hidden_states + input_tensor)
        return hidden_states


class Plain(nn.Module):
    """ViT's."""

    def __init__(self, p=0.1):
        super().__init__()
        self.dense = nn.Linear(64, 32, bias=False)
        self.dropout = nn.Dropout(p)

    def forward(self, hidden_states, input_tensor):
        return input_tensor + self.dropout(self.dense(hidden_states))


class Functional(PostNorm):
    """The same, written differently."""

    def forward(self, x, residual):
        x = nn.functional.dropout(self.dense(x), self.dropout.p, self.training)
        return nn.functional.layer_norm(
            x.add(residual), (x.shape[-1],), *self.LayerNorm.parameters(), self.LayerNorm.eps
        )


SITES = {PostNorm: "hfnn add_layer_norm of dense", Plain: "hfnn dropout_add of dense"}
SITES[Functional] = SITES[PostNorm]


class DropsTheSum(PostNorm):
    def forward(self, x, residual):
        return self.LayerNorm(self.dropout(self.dense(x) + residual))


class DropsTheResult(PostNorm):
    def forward(self, x, residual):
        return self.dropout(self.LayerNorm(self.dense(x) + residual))


class PreNorm(PostNorm):
    def forward(self, x, residual):
        return self.dropout(self.LayerNorm(self.dense(x))) + residual


class NoResidual(Plain):
    """ViTSelfOutput: the residual is added elsewhere."""

    def forward(self, x, residual):
        return self.dropout(self.dense(x))


class Halved(Plain):
    def forward(self, x, residual):
        return self.dropout(self.dense(x)) * 0.5 + residual


class Detached(Plain):
    def forward(self, x, residual):
        return self.dropout(self.dense(x)) + residual.detach()


class Wide(PostNorm):
    """Right in float32 and float64 only."""

    def forward(self, x, residual):
        y = self.dropout(self.dense(x))
        return self.LayerNorm(y + residual if x.dtype is not torch.bfloat16 else y + residual * 1.01)


class EvalOnly(Plain):
    def forward(self, x, residual):
        return self.dense(x) + residual if self.training else self.dropout(self.dense(x)) + residual


class Counting(Plain):
    calls = 0

    def forward(self, x, residual):
        self.calls += 1
        return super().forward(x, residual)


class Raising(Plain):
    def forward(self, x, residual):
        raise RuntimeError("not today")


class TwoResults(Plain):
    def forward(self, x, residual):
        return super().forward(x, residual), x


ANOTHER = "puts its parts together in another way"
LIARS = {
    DropsTheSum: ANOTHER,
    DropsTheResult: ANOTHER,
    PreNorm: ANOTHER,
    NoResidual: ANOTHER,
    Halved: ANOTHER,
    Detached: "calls detach",
    Wide: "depends on the dtype of its input",
    Counting: "changes attributes of the module",
    Raising: "raises on the probe: not today",
    TwoResults: "returns a tuple",
}


class OneInput(Plain):
    def forward(self, x):
        return self.dropout(self.dense(x)) + x[..., :32]


class WithParameter(Plain):
    def __init__(self, p=0.0):
        super().__init__(p)
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x, residual):
        return self.dropout(self.dense(x)) * self.scale + residual


class WithActivation(Plain):
    def __init__(self):
        super().__init__()
        self.activation = nn.GELU()


def test_reading():
    for make, name in SITES.items():
        m = hfnn.convert(make())
        assert is_converted(m) and title(m) == name and isinstance(m, make)
        assert target_of(m.dense) is hfnn.Linear and target_of(m.dropout) is hfnn.Dropout
        row = next(row for row in hfnn.report(m).rows if row.name == "")
        assert row.to == name and "hooks" in row.why
        assert type(hfnn.revert(m)) is make and type(m.dropout) is nn.Dropout


@pytest.mark.parametrize("make", LIARS)
def test_liars_are_left_alone(make):
    m, state = make(), torch.get_rng_state()
    before = dict(vars(m))
    hfnn.convert(m)
    assert torch.equal(torch.get_rng_state(), state) and vars(m) == before
    assert type(m) is make
    why = rewrite.recognise(m)
    assert isinstance(why, Refusal) and re.search(LIARS[make], str(why)), why


@pytest.mark.parametrize("make", [EvalOnly, WithActivation, WithParameter])
def test_what_stands_around_stays(make):
    """Training and eval may differ, and there may be further parts."""
    x, r = tensors()
    m = make(*([] if make is WithActivation else [0.0]))
    for training in (True, False):
        m.dropout.p = 0.0
        own = run(m.train(training), x, r)
        hfnn.convert(m, prefer="memory")
        assert is_converted(m) == (make is WithActivation)
        for got, want in zip(run(m, x, r), own, strict=True):
            torch.testing.assert_close(got, want)
        hfnn.revert(m)


def test_one_input():
    m, (x, _) = OneInput(), tensors()
    m.dropout.p = 0.0
    own = m(x)
    hfnn.convert(m, prefer="memory")
    assert title(m) == "hfnn dropout_add of dense"
    torch.testing.assert_close(m(x), own)


def tensors(dtype=torch.float32, residual_dtype=None):
    x, r = torch.randn(5, 7, 64).to(dtype), torch.randn(5, 7, 32).to(residual_dtype or dtype)
    return x.requires_grad_(), r.requires_grad_()


def run(m, x, r):
    torch.manual_seed(3)
    y = m(x, r)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return y, *torch.autograd.grad(y, [x, r, *m.parameters()], dy)


def fused(m, *args, **kwargs):
    """Whether the site's own forward ran: one node for dropout and the sum."""
    y = m(*args, **kwargs)
    nodes, seen = [y.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes.extend(after for after, _ in node.next_functions)
    return any(node.name().startswith("_DropoutAdd") for node in seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", SITES)
def test_results(make, dtype):
    """Without dropout, within rounding of the author's code; in eval, too."""
    for training, p in ((True, 0.0), (False, 0.1)):
        m = make(p=p).to(dtype).train(training)
        x, r = tensors(dtype)
        theirs = run(m, x, r)
        hfnn.convert(m, prefer="memory")
        ours = run(m, x, r)
        assert fused(m, x, r) or make is Plain  # which runs torch.add
        for got, want in zip(ours, theirs, strict=True):
            assert got.dtype is want.dtype
            assert hfnn.testing.error(got, want.double()).l2 < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("make", SITES)
def test_dropout(make):
    """The mask of hfnn.dropout's draw, on the dense output alone."""
    m = hfnn.convert(make(p=0.4), prefer="memory")
    x, r = tensors()
    ours = run(m, x, r)
    assert fused(m, x, r)
    own = type(m).forward  # the author's code, with hfnn's parts
    torch.manual_seed(3)
    y = own(m, x, r)
    if make is Functional:  # draws with torch's dropout
        return
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    wanted = y, *torch.autograd.grad(y, [x, r, *m.parameters()], dy)
    for got, want in zip(ours, wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_autocast():
    for make in SITES:
        m, (x, r) = make(p=0.0), tensors()
        with torch.autocast("cpu", torch.bfloat16):
            want = m(x, r)
            got = hfnn.convert(m, prefer="memory")(x, r)
        assert got.dtype is want.dtype
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


def test_hooks_are_called():
    """A hook on a part that would be skipped makes the class's own code run; other hooks change nothing."""
    x, r = tensors()
    for part in ("dropout", "LayerNorm"):
        for register in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
            m, calls = hfnn.convert(PostNorm(), prefer="memory"), []
            assert fused(m, x, r)
            handle = getattr(getattr(m, part), f"register_{register}")(lambda *_, calls=calls: calls.append(1))
            run(m, x, r)
            assert calls and not fused(m, x, r)
            handle.remove()
            assert fused(m, x, r)
    m, calls = hfnn.convert(PostNorm(), prefer="memory"), []
    m.dense.register_forward_hook(lambda *_: calls.append(1))
    m.register_forward_hook(lambda *_: calls.append(2))
    assert fused(m, x, r) and calls == [1, 2]
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: calls.append(module))
    try:
        assert not fused(m, x, r) and m.LayerNorm in calls
    finally:
        handle.remove()


def test_called_in_another_way():
    x, r = tensors()
    m = hfnn.convert(PostNorm(), prefer="memory").eval()
    want = m(x, r)
    assert fused(m, x, r) and not fused(m, x, input_tensor=r)
    torch.testing.assert_close(m(hidden_states=x, input_tensor=r), want)
    m.LayerNorm.forward = lambda x: x * 0  # accelerate and others set one on the instance
    assert not m(x, r).any()
    del m.LayerNorm.forward
    m.dropout = nn.Identity()  # replaced after convert
    torch.testing.assert_close(m(x, r), want)
    assert not fused(m, x, r)


def test_skipped_parts_are_respected():
    x, r = tensors()
    m = hfnn.convert(PostNorm(), skip=nn.LayerNorm, prefer="memory")
    assert type(m.LayerNorm) is nn.LayerNorm and is_converted(m) and not fused(m, x, r)
    m = hfnn.convert(PostNorm(), skip=PostNorm, prefer="memory")
    assert type(m) is PostNorm and target_of(m.LayerNorm) is hfnn.LayerNorm


def test_compiled_and_transformed():
    x, r = tensors()
    m = hfnn.convert(PostNorm(), prefer="memory").eval()
    want = m(x, r)
    torch.testing.assert_close(torch.compile(m, backend="eager", fullgraph=True)(x, r), want)
    torch.testing.assert_close(torch.vmap(m)(x, r), want)


def test_copies_and_files():
    x, r = tensors()
    m = hfnn.convert(PostNorm(), prefer="memory").eval()
    want = m(x, r)
    for twin in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert type(twin) is type(m) and twin.prefer == "memory" and torch.equal(twin(x, r), want)
    assert m.state_dict().keys() == PostNorm().state_dict().keys()


def test_saves_the_sum_alone():
    """A site with dropout keeps dense's input, the sum, statistics and a seed; torch also keeps a mask."""
    m = PostNorm().bfloat16()
    x, r = (torch.randn(4, 64, n, dtype=torch.bfloat16, requires_grad=True) for n in (64, 32))
    kept = [hfnn.memory.saved_bytes(lambda: m(x * 1, r * 1)).total]
    hfnn.convert(m, prefer="memory")
    kept.append(hfnn.memory.saved_bytes(lambda: m(x * 1, r * 1)).total)
    assert kept[1] <= x.nbytes + r.nbytes + 8 * 4 * 64 + 64
    assert kept[0] >= x.nbytes + r.nbytes + r.numel()


def test_transformers():
    """BERT's classes are recognised, and the converted model is right."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(**sizes, vocab_size=50, max_position_embeddings=16, hidden_dropout_prob=0.0)
    model = transformers.BertModel(config).eval()
    ids = torch.randint(0, 50, (2, 16))
    assert hfnn.verify(hfnn.convert(model, prefer="memory"), input_ids=ids).ok
    found = {row.original: row.to for row in hfnn.report(model).rows}
    for name in ("BertSelfOutput", "BertOutput"):
        assert found[f"transformers.{name}"] == "hfnn add_layer_norm of dense"
