"""The linear loss under a compiler: its operator, and graphs that use it in place of logits."""

import copy
from pathlib import Path

import pytest
import ranks
import torch
from torch import nn

import hfnn
from hfnn import testing
from hfnn.compiled import head
from hfnn.ops.linear_cross_entropy_op import operator

TOKENS = 24
pytestmark = pytest.mark.filterwarnings("ignore")  # Dynamo's own


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch):
    """Otherwise small problems are left to torch."""
    torch._dynamo.reset()
    monkeypatch.setattr(head, "WORTH_LOGITS", 0)
    monkeypatch.setattr("hfnn.ops.head.WORTH_LOGITS", 0)


@pytest.fixture
def calls(monkeypatch):
    """Records the calls of the room by the operator, with their options."""
    from hfnn.ops import linear_cross_entropy as room

    found, original = [], room.linear_cross_entropy
    monkeypatch.setattr(room, "linear_cross_entropy", lambda *a, **k: found.append(k) or original(*a, **k))
    return found


def given(dtype=torch.float32, bias=True, rows=6, vocabulary=7):
    hidden = torch.randn(rows, 4, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, 4, dtype=dtype, requires_grad=True)
    target = torch.randint(vocabulary, (rows,))
    target[0] = -100
    return hidden, weight, torch.randn(vocabulary, dtype=dtype, requires_grad=True) if bias else None, target


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_operator(dtype, bias, reduction):
    """Schema, fake tensors, autograd, second derivatives."""
    hidden, weight, b, target = given(dtype, bias)
    needs = [True, True, bias]
    arguments = (hidden, weight, b, target, None, needs, reduction, -100, 0.1, False, dtype, dtype)
    torch.library.opcheck(operator, arguments)
    if dtype is torch.float64:
        wanted = [t for t in (hidden, weight, b) if t is not None]
        call = lambda *t: operator(*t[:2], t[2] if bias else None, *arguments[3:])[0]  # noqa: E731
        assert torch.autograd.gradcheck(call, wanted) and torch.autograd.gradgradcheck(call, wanted)


class Model(nn.Module):
    """A body, a head, and a loss as in language models."""

    def __init__(self, returns=True, between=None, bias=False):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 37, bias=bias)
        self.returns, self.between = returns, between

    def forward(self, x, labels):
        logits = self.head(torch.tanh(self.body(x)))
        seen = logits if self.between is None else self.between(logits)
        loss = nn.functional.cross_entropy(seen.float().view(-1, 37), labels.view(-1), ignore_index=-100)
        return (loss, logits) if self.returns else (loss,)


def batch(rows=3):
    x, labels = torch.randn(rows, 8, 16), torch.randint(37, (rows, 8))
    labels[:, -1] = -100
    return x, labels


def step(model, x, labels, reads=None):
    model.zero_grad()
    out = model(x, labels)
    (out[0] if reads is None else out[0] + reads(out[1])).backward()
    return [out[0].detach(), *(p.grad.clone() for p in model.parameters())]


def check(stock, backend="hfnn_eager", reads=None, given=None, **options):
    given = batch() if given is None else given
    compiled = torch.compile(copy.deepcopy(stock), backend=backend, **options)
    wanted = step(copy.deepcopy(stock).double(), given[0].double(), given[1], reads)
    torchs, found = step(stock, *given, reads), step(compiled, *given, reads)
    for i, (a, b, c) in enumerate(zip(found, wanted, torchs, strict=True)):
        testing.assert_close(a, b, c, testing.OUTPUTS if i == 0 else testing.GRADIENTS, str(i), TOKENS if i == 0 else 1)
    return compiled, given


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("returns", [True, False])
def test_a_loss_without_its_logits(calls, returns, bias):
    stock = Model(returns, bias=bias)
    compiled, given = check(stock, fullgraph=True)
    assert calls
    if returns:
        logits = compiled(*given)[1]
        assert type(logits) is hfnn.deferred.Deferred and logits.waits()
        torch.testing.assert_close(logits + 0, stock(*given)[1])
        assert not logits.waits()


def test_logits_that_are_read_have_their_gradient(calls):
    check(Model(), reads=lambda logits: logits.square().mean())
    assert calls


@pytest.mark.parametrize("between", [lambda y: 2 * y, lambda y: y.transpose(0, 1).contiguous(), lambda y: y.relu()])
def test_what_else_is_done_to_logits_leaves_them(calls, between):
    check(Model(between=between))
    assert not calls


@pytest.mark.parametrize(
    "dtypes, fits",
    [
        ((torch.float32, torch.bfloat16, torch.float32), False),
        ((torch.float64, torch.float32, torch.float64), False),
        ((torch.bfloat16, torch.float32, torch.bfloat16, torch.float32), True),
    ],
)
def test_casts_in_between_that_round_leave_logits(calls, dtypes, fits):
    def run(x, weight, labels):
        logits = nn.functional.linear(x, weight)
        for dtype in dtypes[1:]:
            logits = logits.to(dtype)
        return nn.functional.cross_entropy(logits, labels)

    given = torch.randn(8, 16, dtype=dtypes[0]), torch.randn(37, 16, dtype=dtypes[0]), torch.randint(37, (8,))
    found, wanted = torch.compile(run, backend="hfnn_eager")(*given), run(*given)
    assert bool(calls) == fits and found.dtype is wanted.dtype
    assert fits or torch.equal(found, wanted)


def test_what_is_written_to_after_the_product_leaves_logits(calls):
    """The operator would read the new values."""

    def run(x, weight, labels):
        hidden = x + 1
        logits = nn.functional.linear(hidden, weight)
        hidden.mul_(2)
        return nn.functional.cross_entropy(logits, labels), hidden

    given = torch.randn(8, 16), torch.randn(37, 16), torch.randint(37, (8,))
    torch.testing.assert_close(torch.compile(run, backend="hfnn_eager")(*given), run(*given))
    assert not calls


def test_logits_made_without_a_graph_have_none(calls):
    def run(x, weight, labels):
        with torch.no_grad():
            logits = nn.functional.linear(x, weight)
            return nn.functional.cross_entropy(logits, labels), logits

    given = torch.randn(8, 16), torch.randn(37, 16, requires_grad=True), torch.randint(37, (8,))
    loss, logits = torch.compile(run, backend="hfnn_eager")(*given)
    assert calls and not loss.requires_grad and not logits.requires_grad
    torch.testing.assert_close(logits + 0, run(*given)[1])


def test_dynamic_shapes(calls):
    stock = Model()
    compiled, _ = check(stock, dynamic=True, fullgraph=True)
    counts = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for rows in (5, 2, 7):
        given = batch(rows)
        for a, b in zip(step(compiled, *given), step(stock, *given), strict=True):
            torch.testing.assert_close(a, b)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == counts


def test_autocast(calls):
    """Products in bfloat16, the loss in float32, as in torch's autocast."""
    stock, given = Model(), batch()
    compiled = torch.compile(copy.deepcopy(stock), backend="hfnn_eager")
    wanted = step(copy.deepcopy(stock).double(), given[0].double(), given[1])
    with torch.autocast("cpu", torch.bfloat16):
        torchs, found = step(stock, *given), step(compiled, *given)
        logits = compiled(*given)[1]
    assert calls and logits.dtype is torch.bfloat16
    for a, b, c in zip(found, wanted, torchs, strict=True):
        testing.assert_close(a, b, c, testing.GRADIENTS, terms=TOKENS)


def test_nothing_is_kept_of_a_forward_without_gradients(calls):
    stock, given = Model(), batch()
    with torch.no_grad():
        loss, logits = torch.compile(stock, backend="hfnn_eager")(*given)
        torch.testing.assert_close(loss, stock(*given)[0])
    assert calls and not loss.requires_grad and not logits.requires_grad


def test_logits_after_an_optimizers_step_are_those_of_their_forward():
    stock, given = Model(), batch()
    wanted = stock(*given)[1].detach()
    compiled = torch.compile(stock, backend="hfnn_eager")
    optimizer = torch.optim.SGD(stock.parameters(), 0.5)
    loss, logits = compiled(*given)
    loss.backward()
    optimizer.step()
    torch.testing.assert_close(logits.detach() + 0, wanted)


@pytest.mark.slow
def test_under_ddp(tmp_path):
    """Two gloo ranks, whose graphs Dynamo also splits at DDP's buckets; see workers/compiled.py."""
    ranks.run(Path(__file__).parent / "workers" / "compiled.py", "main", 2, tmp_path)


def test_logits_go_into_another_graph():
    """Logits that nobody has read are computed there."""
    stock, given = Model(), batch()
    compiled, other = (torch.compile(f, backend="hfnn_eager") for f in (copy.deepcopy(stock), lambda y: 2 * y))
    torch.testing.assert_close(other(compiled(*given)[1]), 2 * stock(*given)[1])


def test_a_model_s_own_choice_of_loss_is_traced(monkeypatch):
    """transformers' own loss is traced without its log message."""
    transformers = pytest.importorskip("transformers")

    class Own(transformers.GPT2LMHeadModel):
        loss_function = property(lambda self: sum)

    monkeypatch.setattr("hfnn.adapters.transformers.compiling", lambda: True)
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16, bos_token_id=1, eos_token_id=2)
    stock = transformers.GPT2LMHeadModel(config)
    given = torch.randn(2, 3, 16), torch.zeros(2, 3, dtype=torch.int64), 16
    wanted = stock.loss_function(*given)
    assert hfnn.convert(stock).loss_function(*given).equal(wanted) and "_loss_function" in vars(stock)
    stock.loss_function = max
    assert stock.loss_function is max
    assert hfnn.convert(Own(config)).loss_function is sum
