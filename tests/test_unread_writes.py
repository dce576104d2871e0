"""Weights that are written to before logits are read: the logits are those of their forward, or there is an error."""

import pytest
import torch
from played_graphs import DEVICE, played
from torch import nn

import hfnn
from hfnn.deferred.logits import defer

F = nn.functional
ROWS, HIDDEN, VOCABULARY = 14, 8, 11


def loss_of(x, **options):
    return F.cross_entropy(x.reshape(-1, VOCABULARY), torch.arange(x.shape[:-1].numel()) % VOCABULARY, **options)


def _ascend(*weights):
    for p in weights:
        p += 0.5 * p.grad / p.grad.norm()


WRITES = {
    "sgd": lambda *weights: [p.sub_(p.grad) for p in weights],
    "sam": _ascend,
    "average": lambda *weights: [p.data.mul_(0.9).add_(p.data.roll(1), alpha=0.1) for p in weights],
    "clipping": lambda *weights: [p.clamp_(-0.1, 0.1) for p in weights],
    "another tensor": lambda *weights: [setattr(p, "data", p + 1) for p in weights],
    "one row": lambda *weights: weights[0].data[3].zero_(),
}
DERIVED = {
    "logits": lambda x: x,
    "capped": lambda x: (x[..., :-1, :].float() / 3).tanh() * 3,
    "detached": lambda x: x.detach(),
}


def both(function, tokens=ROWS):
    """function(make, hidden, weight, bias) for torch's logits and unread ones."""
    results = []
    for make in (F.linear, defer):
        torch.manual_seed(0)
        hidden = torch.randn(1, tokens, HIDDEN, dtype=torch.float64, requires_grad=True)
        weight = nn.Parameter(torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64))
        bias = nn.Parameter(torch.randn(VOCABULARY, dtype=torch.float64))
        results.append(function(make, hidden, weight, bias))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("tokens", [ROWS, pytest.param(HIDDEN // 2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("derived", DERIVED)
@pytest.mark.parametrize("how", WRITES)
def test_written_after_backward(how, derived, tokens):
    def run(make, hidden, weight, bias):
        x = make(hidden * 1, weight, bias)
        y = DERIVED[derived](x)
        loss_of(y if y.requires_grad else x).backward()
        with torch.no_grad():
            WRITES[how](weight, bias)
        loss = loss_of(y.detach(), reduction="sum")
        return [y + 0, x.argmax(-1), loss, y[..., 1:, :].exp()]

    both(run, tokens)


@pytest.mark.parametrize("tokens", [ROWS, HIDDEN // 2])
def test_nothing_is_kept_for_logits_that_are_gone(tokens):
    hidden, weight = torch.randn(1, tokens, HIDDEN, requires_grad=True), nn.Parameter(torch.randn(VOCABULARY, HIDDEN))
    x = defer(hidden, weight, None)
    product, loss = x._plan.product, loss_of(x)
    del x
    loss.backward()
    assert not product._kept


def test_written_before_backward():
    """A write that is not seen until then: the copy is not taken for the weight of forward."""
    for tokens in (ROWS, HIDDEN // 2):
        hidden, weight = (
            torch.randn(1, tokens, HIDDEN, requires_grad=True),
            nn.Parameter(torch.randn(VOCABULARY, HIDDEN)),
        )
        x = defer(hidden, weight, None)
        loss = loss_of(x)
        weight.data.mul_(2)
        loss.backward()
        with pytest.raises(RuntimeError, match=r"the weights have changed since.*hfnn\.convert\(model, defer=False\)"):
            x.argmax(-1)


LATE = {
    "loss": lambda x: loss_of(x),
    "read": lambda x: x.square().sum(),
    "capped loss": lambda x: loss_of((x / 3).tanh() * 3),
    "capped": lambda x: ((x / 3).tanh() * 3).square().sum(),
}


@pytest.mark.parametrize("create_graph", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("by", ["optimizer", "hand"])
def test_a_gradient_after_a_write(late, by, create_graph):
    """torch's error, not the gradient of a copy; the loss itself is that of the old weights."""

    def run(make, hidden, weight, bias):
        x = make(hidden * 1, weight, bias)
        loss_of(x).backward(retain_graph=True)
        if by == "hand":
            with torch.no_grad():
                weight.mul_(2)
        else:
            torch.optim.SGD([weight], 0.5).step()
        loss = LATE[late](x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, hidden, create_graph=create_graph)
        return loss.detach()

    both(run)


@pytest.mark.parametrize("late", LATE)
def test_a_graph_of_the_gradient_after_a_write(late):
    def run(make, hidden, weight, bias):
        x = make(hidden * 1, weight, bias)
        loss = LATE[late](x)
        loss.backward(retain_graph=True)
        torch.optim.SGD([weight], 0.5).step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, hidden, create_graph=True)
        return loss.detach()

    both(run)


@pytest.mark.parametrize("late", LATE)
def test_a_retained_graph_without_a_write(late):
    """What is kept when the first backward ends changes no later gradient."""

    def run(make, hidden, weight, bias):
        x = make(hidden * 1, weight, bias)
        loss = loss_of(x)
        loss.backward(retain_graph=True)
        second = torch.autograd.grad(loss + LATE[late](x), (hidden, weight, bias), create_graph=True)
        third = torch.autograd.grad(sum(g.square().sum() for g in second), (hidden, weight, bias))
        return [*second, *third]

    both(run)


def model(**how):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=257, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    made = transformers.GPT2LMHeadModel(config).eval()
    return hfnn.convert(made, prefer="memory", **how) if how else made


def _load(model):
    state = {name: t * 0.5 for name, t in model.state_dict().items()}
    return lambda: model.load_state_dict(state)


MOVES = {
    "load_state_dict": _load,
    "to": lambda model: lambda: model.to(torch.float64),
    "half of it": lambda model: lambda: model.lm_head.double(),
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("grad", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", MOVES)
def test_held_before_modules_write(how, grad):
    """Between forward and backward, too."""
    results, ids = [], torch.randint(0, 257, (2, 40), generator=torch.Generator().manual_seed(0))
    for options in ({}, {"defer": True}):
        made = model(**options)
        move = MOVES[how](made)
        with torch.set_grad_enabled(grad):
            out = made(input_ids=ids, labels=ids)
        assert not options or out.logits._value is None
        move()
        results.append([out.loss.detach(), out.logits + 0])
    torch.testing.assert_close(*results)


@pytest.mark.filterwarnings("default")
def test_not_deferred():
    made, ids = model(defer=False), torch.randint(0, 257, (2, 40))
    out = made(input_ids=ids, labels=ids)
    assert type(out.logits) is torch.Tensor and "never: defer=False" in str(hfnn.report(made))
    with pytest.raises(ValueError, match="defer='no'"):
        hfnn.convert(made, defer="no")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("capture", [False, True])
def test_steps_by_hand(capture):
    results, ids = [], torch.randint(0, 257, (2, 40), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for options in ({}, {"capture": capture}):
        seen = []
        with played():
            made = model(**options).to(DEVICE)
            for _ in range(6):
                out = made(input_ids=ids, labels=ids)
                out.loss.backward()
                with torch.no_grad():
                    for p in made.parameters():
                        p -= 0.1 * p.grad
                        p.grad = None
                seen += [out.loss.detach(), out.logits.detach() + 0]
        results.append(seen)
    assert not capture or vars(made)["_hfnn_capture"].counts["replayed"] == 3
    torch.testing.assert_close(*results)
