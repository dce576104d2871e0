"""hfnn.LSTM, GRU and RNN against torch's: values, gradients, strides, random numbers, saved tensors."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hfnn
from hfnn import memory, testing
from hfnn.core.holder import target_of
from hfnn.ops import rnn

T, B, I, H = 11, 3, 5, 6
KINDS = {
    "lstm": (nn.LSTM, {}),
    "projected": (nn.LSTM, {"proj_size": 4}),
    "gru": (nn.GRU, {}),
    "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
}
FORMS = {
    "one": {},
    "batch_first": {"batch_first": True, "bias": False},
    "both_ways": {"bidirectional": True, "num_layers": 2},
    "deep": {"num_layers": 3, "dropout": 0.4},
    "all": {"num_layers": 2, "dropout": 0.5, "bidirectional": True, "batch_first": True},
}
every_kind = pytest.mark.parametrize("kind", KINDS)
# torch warns about its own layers.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


def build(kind, **more):
    cls, given = KINDS[kind]
    torch.manual_seed(0)
    return cls(I, H, **given, **more)


def swapped(module):
    return hfnn.convert(copy.deepcopy(module), prefer="memory")


def inputs(module, dtype=torch.float32, steps=T, batched=True, given=False):
    """x, and states or None."""
    torch.manual_seed(1)
    shape = (B, steps, I) if module.batch_first else (steps, B, I)
    x = torch.randn(shape).select(0 if module.batch_first else 1, 0) if not batched else torch.randn(shape)
    count = module.num_layers * (1 + module.bidirectional)
    widths = (module.proj_size or H, H)[: 1 + (module.mode == "LSTM")]
    states = [torch.randn(count, *([B] if batched else []), width) for width in widths] if given else []
    return [t.to(dtype).requires_grad_() for t in (x, *states)]


def call(module, x, *states):
    """(y, state, ...)"""
    hx = None if not states else states if module.mode == "LSTM" else states[0]
    y, end = module(x, hx)
    return (y, *end) if module.mode == "LSTM" else (y, end)


def gradients(module, given, used=(0, 1, 2)):
    """Results, and gradients of inputs and weights, for a loss of some of the results."""
    torch.manual_seed(2)
    results = call(module, *given)
    draws = torch.Generator().manual_seed(3)
    chosen = [y for number, y in enumerate(results) if number in used]
    weights = [torch.randn(y.shape, generator=draws).to(y.dtype) for y in chosen]
    loss = sum((y * w).sum() for y, w in zip(chosen, weights, strict=True))
    return results, torch.autograd.grad(loss, [*given, *module.parameters()], allow_unused=True)


def ran(results) -> bool:
    """Whether our node made the results."""
    nodes, seen = [y.grad_fn for y in results], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes.extend(before for before, _ in node.next_functions)
    return any(type(node).__name__ == "_RNNBackward" for node in seen)


def compare(module, given, own=True, **how):
    """Compares by the accuracy rule; also strides, dtypes, and the generator's state afterwards. own: whether the room
    runs."""
    wide = copy.deepcopy(module).double()
    ours, torchs = swapped(module), module
    reference = gradients(wide, [t.detach().double().requires_grad_() for t in given], **how)
    want, state = gradients(torchs, given, **how), torch.get_rng_state()
    got = gradients(ours, given, **how)
    assert ran(got[0]) == own and not ran(want[0])
    assert torch.equal(state, torch.get_rng_state())
    for mine, stock in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        assert (mine is None) == (stock is None)
        if mine is not None:
            assert mine.stride() == stock.stride() and mine.requires_grad == stock.requires_grad
    assert [y._is_view() for y in got[0]] == [y._is_view() for y in want[0]]
    # Concatenated, like the weights' gradients: for a state or bias of a few numbers torch's error is random.
    results = (torch.cat([y.flatten() for y in found[0]]) for found in (got, reference, want))
    testing.assert_close(*results, terms=T * (I + H))  # a state is rounded at each step
    of_inputs = len(given)
    columns = [[g for g in found[1] if g is not None] for found in (got, reference, want)]
    of_weights = [torch.cat([g.flatten() for g in column[of_inputs:]]) for column in columns]
    rows = [*zip(*(column[:of_inputs] for column in columns), strict=True), of_weights]
    for number, (mine, exact, stock) in enumerate(rows):
        testing.assert_close(mine, exact, stock, testing.GRADIENTS, f"gradient {number}", terms=T * B * (I + H))


@every_kind
@pytest.mark.parametrize("form", FORMS)
def test_equals_torch(kind, form):
    """Dropout between layers draws the same numbers, in float64 too."""
    module = build(kind, **FORMS[form])
    compare(module, inputs(module))
    compare(module, inputs(module, given=True))


@every_kind
@pytest.mark.parametrize("steps", [1, 2, 4, 37])
def test_any_number_of_steps(kind, steps):
    module = build(kind, bidirectional=True)
    # Of one step of an RNN without gates, torch keeps as little.
    compare(module, inputs(module, steps=steps, given=True), own=steps > 1 or kind not in ("tanh", "relu"))


@every_kind
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_without_a_batch(kind, first, given):
    module = build(kind, batch_first=first, num_layers=2)
    compare(module, inputs(module, batched=False, given=given))


@every_kind
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (1, 2)])
def test_some_of_the_results(kind, used):
    module = build(kind, num_layers=2)
    if used != (2,) or module.mode == "LSTM":
        compare(module, inputs(module, given=True), used=used)


@every_kind
def test_eval_and_the_input_alone(kind):
    module = build(kind, num_layers=2, dropout=0.5).eval()
    compare(module, inputs(module))
    x = inputs(module)[0].detach()
    assert all(t.requires_grad for t in call(swapped(module), x))
    both = (gradients(m, [x.clone().requires_grad_()])[1] for m in (swapped(module), module))
    for mine, stock in zip(*both, strict=True):
        torch.testing.assert_close(mine, stock, rtol=1e-4, atol=1e-6)


@every_kind
def test_gradcheck(kind):
    module = swapped(build(kind, bidirectional=True)).double()
    given = inputs(module, torch.float64, steps=5, given=True)
    assert torch.autograd.gradcheck(lambda *given: call(module, *given), given)


@every_kind
def test_second_derivative(kind):
    module = build(kind, num_layers=2).double()
    given = inputs(module, torch.float64, steps=5, given=True)
    found = []
    for m in (module, swapped(module)):
        loss = sum(y.square().sum() for y in call(m, *given))
        first = torch.autograd.grad(loss, given, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), [*given, *m.parameters()]))
    for stock, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, stock)


@every_kind
def test_backward_twice(kind):
    module = swapped(build(kind, num_layers=2, dropout=0.5))
    (x,) = inputs(module)
    loss = sum(y.square().sum() for y in call(module, x))
    first, second = (torch.autograd.grad(loss, [x, *module.parameters()], retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize(("kind", "at_most"), [("lstm", 0.12), ("projected", 0.3), ("gru", 0.25), ("tanh", 0.8)])
def test_keeps_less(kind, at_most):
    """Two layers of 64 steps: two inputs, the first of which is the caller's, and 8 states for each layer."""
    module = build(kind, num_layers=2)
    (x,) = inputs(module, steps=64)
    ours, torchs = (memory.saved_bytes(lambda m=m: call(m, x)).total for m in (swapped(module), module))
    assert ours < at_most * torchs
    assert ours >= x.nbytes


def test_dropout_keeps_bits():
    module = build("gru", num_layers=2, dropout=0.5)
    (x,) = inputs(module, steps=64)
    kept = memory.saved_bytes(lambda: call(swapped(module), x)).total
    module.dropout = 0.0
    assert kept - memory.saved_bytes(lambda: call(swapped(module), x)).total == 64 * B * H // 8


def test_backward_holds_one_segment(monkeypatch):
    """The tensors of segments that ran before are freed when a segment begins."""
    module = swapped(build("gru"))
    (x,) = inputs(module, steps=49)
    results, alive, seen = call(module, x), [], []
    run = rnn.Layer.run

    def watched(self, *given):
        seen.append(sum(ref.expired() for ref in alive))
        found = run(self, *given)
        alive.append(torch.multiprocessing.reductions.StorageWeakRef(found[0].untyped_storage()))
        return found

    monkeypatch.setattr(rnn.Layer, "run", watched)
    sum(y.sum() for y in results).backward()
    assert seen == list(range(7))


def test_a_producer_is_kept_instead_of_the_input():
    """The result of a norm before the layer is rebuilt in backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(I, I), nn.LayerNorm(I), build("gru"))
    x = torch.randn(64, B, I)
    hfnn.convert(model, prefer="memory")
    before = hfnn.recipe.counter.taken
    kept = memory.saved_bytes(lambda: model(x)[0]).total
    assert hfnn.recipe.counter.taken == before + 1
    with hfnn.recipe.disabled():
        assert kept <= memory.saved_bytes(lambda: model(x)[0]).total - x.nbytes


@every_kind
def test_a_write_to_what_is_kept_is_an_error(kind):
    module = build(kind)
    said = []
    for m in (module, swapped(module)):
        x = inputs(module)[0] * 1
        loss = call(m, x)[0].square().sum()
        with torch.no_grad():
            x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
            loss.backward()
        said.append(str(error.value).split("[")[0])
    assert said[0] == said[1]


def test_results_may_be_written_to():
    module = swapped(build("gru", batch_first=True))
    (x,) = inputs(module)
    want = torch.autograd.grad((call(module, x)[0] + 1).square().sum(), x)[0]
    y, end = call(module, x)
    y.add_(1)
    end.zero_()
    assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], want)


@every_kind
@pytest.mark.parametrize(("own", "dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_autocast(own, dtype, kind):
    """Gradients are computed outside of autocast, as in torch."""
    module = build(kind, num_layers=2).to(own)
    given = inputs(module, own, given=True)
    found = []
    # oneDNN has a 16-bit LSTM on some processors only. On others torch's raises (test_rnn_fallback.py).
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        for m in (module, swapped(module)):
            with torch.autocast("cpu", dtype):
                results = call(m, *given)
            loss = sum(y.float().square().sum() for y in results)
            found.append((*results, *torch.autograd.grad(loss, [*given, *m.parameters()])))
    finally:
        torch._C._set_mkldnn_enabled(enabled)
    assert ran(found[1][: 3 if module.mode == "LSTM" else 2])
    for stock, mine in zip(*found, strict=True):
        assert mine.dtype is stock.dtype
        eps = max(torch.finfo(dtype).eps, torch.finfo(own).eps)
        assert (mine - stock).norm() <= 4 * eps * stock.norm(), (mine - stock).norm() / stock.norm()


@every_kind
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_and_offloading(kind, reentrant):
    module = swapped(build(kind, num_layers=2, dropout=0.5))
    (x,) = inputs(module)

    def grads(run):
        torch.manual_seed(5)
        return torch.autograd.grad(sum(y.square().sum() for y in run()), [x, *module.parameters()])

    want = grads(lambda: call(module, x))
    if not reentrant:
        assert all(map(torch.equal, want, grads(lambda: checkpoint(call, module, x, use_reentrant=False))))
        with torch.autograd.graph.save_on_cpu():
            results = call(module, x)
        assert ran(results)
    else:
        torch.manual_seed(5)
        sum(y.square().sum() for y in checkpoint(call, module, x, use_reentrant=True)).backward()
        for mine, t in zip(want, (x, *module.parameters()), strict=True):  # its forward, without gradients, is torch's
            torch.testing.assert_close(t.grad, mine, rtol=1e-4, atol=1e-6)


@every_kind
def test_convert_and_revert(kind):
    module = build(kind, num_layers=2)
    (x,) = inputs(module)
    ours = swapped(module)
    assert target_of(ours) is getattr(hfnn, type(module).__name__) and isinstance(ours, type(module))
    assert ours.state_dict().keys() == module.state_dict().keys() and repr(ours) == repr(module)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert target_of(twin) is target_of(ours) and twin.prefer == "memory"
        assert all(map(torch.equal, gradients(twin, [x])[1], gradients(ours, [x])[1]))
    assert [row.to for row in hfnn.report(ours).rows] == [f"hfnn.{type(module).__name__}"]
    hfnn.revert(ours)
    assert type(ours) is type(module) and vars(ours).keys() == vars(module).keys()
    assert all(map(torch.equal, gradients(ours, [x])[1], gradients(module, [x])[1]))


def test_weights_that_change_between_calls():
    """The next call uses the new parameter or dtype."""
    module = swapped(build("gru"))
    (x,) = inputs(module)
    call(module, x)
    module.weight_hh_l0 = nn.Parameter(torch.zeros(3 * H, H))
    results, grads = gradients(module, [x])
    assert ran(results) and grads[2].shape == (3 * H, H)
    stock = hfnn.revert(copy.deepcopy(module))
    torch.testing.assert_close(call(stock, x)[0], results[0])
    module.double()
    results, grads = gradients(module, [x.detach().double().requires_grad_()])
    assert ran(results) and {g.dtype for g in grads} == {torch.float64}


def test_hooks_of_weights_run_once():
    module = swapped(build("lstm", bidirectional=True))
    (x,) = inputs(module)
    counts = dict.fromkeys(dict(module.named_parameters()), 0)

    def count(name):
        def hook(grad):
            counts[name] += 1

        return hook

    for name, p in module.named_parameters():
        p.register_hook(count(name))
    sum(y.sum() for y in call(module, x)).backward()
    assert set(counts.values()) == {1}


@pytest.mark.parametrize("fault", ["state", "order", "noise"])
def test_a_planted_fault_is_found(monkeypatch, fault):
    """The comparison above finds a segment with a wrong state, a wrong order, and other dropout noise in backward."""
    if fault == "state":
        split = torch.Tensor.split
        monkeypatch.setattr(torch.Tensor, "split", lambda t, n: split(t, n)[::-1])
    elif fault == "order":
        monkeypatch.setattr(rnn.Layer, "seen", lambda self, t: t)
    else:
        unpack = hfnn.bits.unpack
        monkeypatch.setattr(rnn.bits, "unpack", lambda *given, **how: ~unpack(*given, **how))
    module = build("gru", num_layers=2, dropout=0.5, bidirectional=True)
    with pytest.raises(AssertionError, match="torch's own"):
        compare(module, inputs(module, given=True))


@every_kind
@pytest.mark.parametrize("first", [False, True])
def test_a_write_that_moves_no_version(kind, first):
    """The write is seen where torch's layer sees it: only if the saved input is not a copy."""
    module = build(kind, batch_first=first)
    found = []
    for m in (module, swapped(module)):
        x = inputs(module)[0].detach()
        loss = call(m, x)[0].square().sum()
        x.numpy().fill(0)
        found.append(torch.autograd.grad(loss, list(m.parameters())))
    for stock, mine in zip(*found, strict=True):
        if first:
            torch.testing.assert_close(mine, stock, rtol=1e-4, atol=1e-5)
    if not first:  # both see the write, because only backward reads the input
        assert not found[0][0].any() and not found[1][0].any()


def test_a_weight_written_before_backward_is_an_error_that_says_why():
    module = swapped(build("gru"))
    (x,) = inputs(module)
    loss = call(module, x)[0].sum()
    with torch.no_grad():
        module.bias_ih_l0.zero_()
    with pytest.raises(RuntimeError, match=r"(?s)modified by an inplace operation.*recurrent layers run again"):
        loss.backward()
