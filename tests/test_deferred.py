"""hfnn.deferred: logits that are computed only when read, and then equal torch's."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import hfnn
from hfnn.deferred.logits import Deferred, defer

F = nn.functional
ROWS, SEQ, HIDDEN, VOCABULARY = 2, 5, 8, 11


@pytest.fixture
def given():
    hidden = torch.randn(ROWS, SEQ, HIDDEN, requires_grad=True)
    return hidden, torch.randn(VOCABULARY, HIDDEN, requires_grad=True), torch.randn(VOCABULARY, requires_grad=True)


def target():
    found = torch.randint(VOCABULARY, (ROWS, SEQ), generator=torch.Generator().manual_seed(1))
    found[0, 0] = -100
    return found


def untouched(y) -> bool:
    return type(y) is Deferred and y._value is None


def mask():
    return target() > 4


# Recorded operations: these compute nothing.
ROW = torch.linspace(-1, 1, VOCABULARY)
RECORDED = {
    "nothing": lambda x: x,
    "float": lambda x: x.float(),
    "to_dtype": lambda x: x.to(torch.float32),
    "to_device": lambda x: x.to("cpu"),
    "type": lambda x: x.type(torch.float32),
    "type_as": lambda x: x.type_as(torch.empty(0)),
    "contiguous": lambda x: x.contiguous(),
    "view": lambda x: x.view(-1, VOCABULARY).view(ROWS * SEQ, -1),
    "flatten": lambda x: x.flatten(0, 1),
    "torch_flatten": lambda x: torch.flatten(x, 0, -2),
    "reshape": lambda x: torch.reshape(x, (-1, x.size(-1))),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "shift": lambda x: x[..., :-1, :].contiguous(),
    "row": lambda x: x[1],
    "last": lambda x: x[:, -1],
    "new_axis": lambda x: x[:, None],
    "whole_range": lambda x: x[:, 1:, :VOCABULARY],
    "mask": lambda x: x[mask()],
    "numbers": lambda x: x[:, torch.tensor([0, 3])],
    "shift_mask": lambda x: x[..., :-1, :][mask()[:, 1:]].contiguous(),
    "times": lambda x: 0.25 * x * 2,
    "divided": lambda x: torch.div(x, 3) / 2,
    "cap": lambda x: torch.tanh(x / 5.0) * 5.0,
    "cap_other": lambda x: (3 * x).tanh() * -0.5,
    "cap_alone": lambda x: torch.tanh(x),
    "constant_row": lambda x: x + ROW,
    "two_rows": lambda x: (x + ROW + ROW.view(1, -1)) / 2,
    "detach": lambda x: x.detach(),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", RECORDED)
def test_recorded(given, name, bias):
    """The values, the loss and both gradients equal those of torch's ops on real logits."""
    given = given if bias else (*given[:2], None)
    wanted, found = RECORDED[name](F.linear(*given)), RECORDED[name](defer(*given))
    assert untouched(found)
    for attribute in ("shape", "dtype", "device", "requires_grad", "ndim", "is_cuda", "layout", "nbytes"):
        assert getattr(found, attribute) == getattr(wanted, attribute), attribute
    for method in ("size", "stride", "dim", "numel", "is_contiguous", "storage_offset", "is_floating_point", "__len__"):
        assert getattr(found, method)() == getattr(wanted, method)(), method
    assert untouched(found) and "not computed" in repr(found)
    classes = torch.randint(VOCABULARY, wanted.shape[:-1]).view(-1)
    wanted, found = (y.reshape(-1, VOCABULARY) for y in (wanted, found))
    leaves = [t for t in given if t is not None]
    for options in ({}, {"reduction": "sum"}, {"reduction": "none", "label_smoothing": 0.1}, {"weight": ROW.abs()}):
        losses = [F.cross_entropy(y, classes, **options) for y in (found, wanted)]
        assert untouched(found)
        torch.testing.assert_close(*losses)
        if losses[1].requires_grad:
            grads = [torch.autograd.grad(loss.sum(), leaves, retain_graph=True) for loss in losses]
            torch.testing.assert_close(*grads)
    torch.testing.assert_close(found.computed(), wanted, rtol=1e-6, atol=1e-6)
    assert found.computed().requires_grad == wanted.requires_grad
    if wanted.requires_grad:
        grads = [torch.autograd.grad(y.sin().sum(), leaves, retain_graph=True) for y in (found, wanted)]
        torch.testing.assert_close(*grads)


# Any other operation computes the logits first.
COMPUTED = {
    "int": lambda x: x.int(),
    "copy": lambda x: x.to(torch.float32, copy=True),
    "softmax": lambda x: F.softmax(x, -1),
    "argmax": lambda x: x.argmax(-1),
    "transpose": lambda x: x.transpose(1, 2),
    "token": lambda x: x[..., 3],
    "columns": lambda x: x[..., 2:7],
    "columns_by_number": lambda x: x[0, :, torch.tensor([1, 2])],
    "vocabulary_first": lambda x: x.view(VOCABULARY, -1),
    "vector": lambda x: x[0, 0] * 2,
    "add": lambda x: x + 1,
    "add_logits": lambda x: x + torch.ones(ROWS, SEQ, VOCABULARY),
    "add_learnt": lambda x: x + torch.ones(VOCABULARY, requires_grad=True),
    "times_tensor": lambda x: x * torch.tensor(2.0),
    "reciprocal": lambda x: 2 / x,
    "rounded": lambda x: torch.div(x, 2, rounding_mode="floor"),
    "capped_twice": lambda x: x.tanh().tanh(),
    "cat": lambda x: torch.cat([x, x]),
    "out": lambda x: torch.mul(x, 2, out=torch.empty(0)) if not x.requires_grad else x * 1,
    "where": lambda x: x.masked_fill(mask()[..., None], 0),
    "unbind": lambda x: x.unbind()[1],
    "iteration": lambda x: list(x)[1],
    "list": lambda x: torch.tensor(x.detach().tolist()),
    "numpy": lambda x: torch.from_numpy(x.detach().numpy()),
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x[0, 0, 0]),
    "contains": lambda x: 0.0 in x,
    "norm": lambda x: torch.linalg.vector_norm(x),
    "classes_in_the_middle": lambda x: F.cross_entropy(x.transpose(1, 2), target()),
    "classes_in_the_middle_of_deferred": lambda x: F.cross_entropy(x, torch.ones(ROWS, VOCABULARY).long()),
    "probabilities": lambda x: F.cross_entropy(x.view(-1, VOCABULARY), torch.ones(ROWS * SEQ, VOCABULARY)),
    "nll": lambda x: F.nll_loss(F.log_softmax(x.view(-1, VOCABULARY), -1), target().view(-1)),
    "double": lambda x: F.cross_entropy(x.double().view(-1, VOCABULARY), target().view(-1)),
    "in_place": lambda x: x.mul_(2),
    "in_place_after_a_copy": lambda x: (x * 1).zero_() + x,
    "augmented": lambda x: x.__iadd__(1),
    "assignment": lambda x: x.__setitem__((..., 3), 0.0) or x,
    "format": lambda x: f"{x.detach().sum():.3f}",
    "text": lambda x: str(x.detach() + 0),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_computed(given, name):
    wanted, found = COMPUTED[name](F.linear(*given)), COMPUTED[name](defer(*given))
    if not isinstance(wanted, torch.Tensor):
        assert found == wanted if not isinstance(wanted, float) else found == pytest.approx(wanted)
        return
    torch.testing.assert_close(found + 0, wanted + 0)
    assert found.requires_grad == wanted.requires_grad
    if wanted.requires_grad:
        grads = [torch.autograd.grad(y.sum(), given, retain_graph=True) for y in (found, wanted)]
        torch.testing.assert_close(*grads)


def test_computed_once(given):
    x = defer(*given)
    y = x.exp()
    assert x.computed() is x.computed() and not untouched(x)
    assert type(y) is torch.Tensor and x.data_ptr() == x.computed().data_ptr()
    assert "not computed" not in repr(x)


def test_views_stay_views_and_copies_copies(given):
    """Writes to the logits show in their views, also in views taken before they were computed."""
    with torch.no_grad():
        wanted, found = F.linear(*given), defer(*given)
        results = []
        for x in (wanted, found):
            view, double, part = x.view(-1, VOCABULARY), x * 2, x[0]
            x.zero_()
            part += 1
            results.append([t + 0 for t in (x, view, double, part)])
    torch.testing.assert_close(*results)


def test_in_place_keeps_the_object(given):
    with torch.no_grad():
        x = defer(*given)
        assert x.add_(1) is x
        x += 1
        assert type(x) is Deferred
        torch.testing.assert_close(x + 0, F.linear(*given) + 2)
        assert F.cross_entropy(x.view(-1, VOCABULARY), target().view(-1)) == F.cross_entropy(
            x.computed().view(-1, VOCABULARY), target().view(-1)
        )


@pytest.mark.parametrize("what", ["weight", "bias", "hidden", "row"])
def test_changed_since(given, what):
    row = ROW.clone()
    x = defer(*given) + row
    with torch.no_grad():
        dict(zip(("hidden", "weight", "bias", "row"), (*given, row), strict=True))[what].add_(1)
    with pytest.raises(RuntimeError, match=r"the weights have changed since.*Read output\.logits between"):
        x.argmax(-1)
    with pytest.raises(RuntimeError, match="the weights have changed"):
        F.cross_entropy(x.view(-1, VOCABULARY), target().view(-1))
    assert "not computed" in repr(x) and x.shape == (ROWS, SEQ, VOCABULARY)


def test_freed_since(given):
    """fully_shard frees a weight's memory when it reshards."""
    x = defer(*given)
    given[1].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="a weight was resharded since"):
        x.argmax(-1)


def test_computed_logits_outlive_a_change(given):
    x = defer(*given)
    wanted = x.detach().clone()
    with torch.no_grad():
        given[1].add_(1)
    torch.testing.assert_close(x.detach() + 0, wanted)


def test_grad_modes(given):
    """Logits have the graph of forward's grad mode, whenever they are computed."""
    x = defer(*given)
    with torch.no_grad():
        assert not x.float().view(-1, VOCABULARY).requires_grad
        assert not F.cross_entropy(x.view(-1, VOCABULARY), target().view(-1)).requires_grad
        x.argmax(-1)
    assert x.requires_grad and (x * 2).requires_grad
    with torch.inference_mode():
        y = defer(*(t.detach().clone() for t in given))
    assert y is None
    z = defer(*given)
    with torch.inference_mode():
        z.argmax(-1)
    z.sum().backward()
    with torch.no_grad():
        z = defer(*given)
    assert not z.requires_grad and not (z * 2).requires_grad and not z.exp().requires_grad


@pytest.mark.parametrize("outside", [True, False])
def test_autocast(given, outside):
    """The product is in bfloat16 and the loss in float32, whether or not it is computed under autocast."""
    results = []
    for make in (F.linear, defer):
        with torch.autocast("cpu", torch.bfloat16):
            x = make(*given)
        with torch.autocast("cpu", torch.bfloat16, enabled=not outside):
            loss = F.cross_entropy(x.float().view(-1, VOCABULARY), target().view(-1))
            low = F.cross_entropy(x.view(-1, VOCABULARY), target().view(-1))
        grads = torch.autograd.grad(loss, given, retain_graph=True)
        assert {g.dtype for g in grads} == {torch.float32}
        results.append((loss, low, grads, x + 0))
    wanted, found = results
    assert found[0].dtype is torch.float32 and found[1].dtype is wanted[1].dtype
    torch.testing.assert_close(found[0], wanted[0], rtol=2e-2, atol=0)
    torch.testing.assert_close(found[1], wanted[1], rtol=2e-2, atol=0)
    torch.testing.assert_close(found[2], wanted[2], rtol=5e-2, atol=5e-2)
    assert torch.equal(found[3], wanted[3])


def test_low_precision(given):
    """A bfloat16 model whose loss function asks for float32 gets float32 that was not rounded to bfloat16 before."""
    given = [t.detach().bfloat16().requires_grad_() for t in given]
    x = defer(*given)
    loss = F.cross_entropy(x.float().view(-1, VOCABULARY), target().view(-1), reduction="sum")
    wanted = F.cross_entropy(F.linear(*given).float().view(-1, VOCABULARY), target().view(-1), reduction="sum")
    assert loss.dtype is torch.float32 and untouched(x)
    torch.testing.assert_close(loss, wanted, rtol=1e-2, atol=0)
    assert loss != loss.bfloat16()
    assert F.cross_entropy(x.view(-1, VOCABULARY), target().view(-1)).dtype is torch.bfloat16


def test_code_below_torch_function(given):
    """autograd.Function and C++ receive the tensor itself; values and gradients are right there, too."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            return dy * 2

    results = []
    for make in (F.linear, defer):
        x = make(*given)
        y = Double.apply(torch.tanh(x) * 3)
        results.append((y.detach().clone(), torch.autograd.grad(y.sin().sum(), given)))
    torch.testing.assert_close(*results)
    results = []
    for make in (F.linear, defer):
        x = make(*given)
        y = Double.apply(x).sin().sum()
        grads = torch.autograd.grad(y, given, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in grads), given))
    torch.testing.assert_close(*results)
    x = defer(*given)
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.equal(x.argmax(-1), F.linear(*given).argmax(-1))
        with pytest.raises(RuntimeError, match="cannot write to logits"):
            x.zero_()
    assert untouched(x)


def test_backward_of_a_list(given):
    """torch.autograd.backward and grad accept the logits beside the loss."""
    results = []
    for make in (F.linear, defer):
        x = make(*given)
        loss = F.cross_entropy(x.view(-1, VOCABULARY), target().view(-1))
        torch.autograd.backward([loss, x], [None, torch.ones_like(x)])
        results.append([t.grad for t in given])
        for t in given:
            t.grad = None
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("through", ["computed", "below"])
def test_hooks(given, through):
    x, seen = defer(*given), []
    handle = x.register_hook(lambda grad: seen.append(1))
    x.register_hook(lambda grad: seen.append(grad) or 2 * grad)
    handle.remove()
    assert untouched(x)
    if through == "computed":
        y = x.sum()
    else:
        with torch._C.DisableTorchFunctionSubclass():
            y = x.sum()
    (dbias,) = torch.autograd.grad(y, given[2])
    assert len(seen) == 1 and seen[0].shape == x.shape and dbias.eq(2 * ROWS * SEQ).all()


def test_copies(given):
    """Pickles, files and copies hold plain logits; those that require grad are refused where torch refuses them."""
    with torch.no_grad():
        x, wanted = defer(*given), F.linear(*given)
    file = io.BytesIO()
    torch.save({"logits": x}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["logits"]
    for found in (pickle.loads(pickle.dumps(defer(*given))), copy.deepcopy(x), copy.copy(x), loaded):
        assert type(found) is torch.Tensor and torch.equal(found, wanted)
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly"):
        copy.deepcopy(defer(*given))


def test_containers(given):
    x = defer(*given)
    leaves, spec = pytree.tree_flatten({"a": [x], "b": 1})
    assert leaves[0] is x and pytree.tree_unflatten(leaves, spec)["a"][0] is x
    assert isinstance(x, torch.Tensor) and torch.is_tensor(x) and {x: 1}[x] == 1 and x in [x]
    assert x.grad_fn is None and x.requires_grad  # None: DDP puts its sink behind tensors that have one
    with torch.no_grad():
        assert untouched(x.clone())  # the sink clones, and discards the clone
    assert untouched(x)
    assert not untouched(x.detach().clone())


def test_left_to_torch(given):
    hidden, weight, bias = given
    for refused in (
        (hidden.double(), weight, bias),
        (hidden[..., :3], weight, bias),
        (hidden, nn.Buffer(weight.detach().int()), None),
        (hidden[0, 0], weight, bias),
    ):
        with pytest.raises((RuntimeError, NotImplementedError)) if refused[0].dim() > 1 else torch.no_grad():
            assert defer(*refused) is None
            F.linear(*refused)
    assert defer(hidden, weight.detach().to_sparse(), None) is None
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError):  # autocast does not cast float64
        assert defer(hidden, weight.double(), None) is None
        F.linear(hidden, weight.double())
    with hfnn.use("torch"):
        assert defer(*given) is None
    assert torch.func.vmap(lambda h: h if defer(h, weight, None) is None else None)(hidden) is not None


def test_memory_is_given_back(given):
    """No reference cycles: only its user holds a Deferred."""
    gc.collect()
    gc.disable()
    try:
        x = defer(*given)
        y = x.float().view(-1, VOCABULARY)
        loss = F.cross_entropy(y, target().view(-1))
        refs = [weakref.ref(t) for t in (x, y, x._plan.product)]
        del x, y
        loss.backward()
        assert not any(ref() for ref in refs)
    finally:
        gc.enable()
