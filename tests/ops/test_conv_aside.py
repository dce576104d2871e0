"""When a convolution runs torch's op, which errors it raises as torch does, and its modules."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import hfnn
from hfnn.core import native

from .convolutions import OUT, C, gradients, names, node, norm, ours, same, silu, tensors, theirs

if native.extension is None:
    pytest.skip(native.why, allow_module_level=True)


def outcome(call):
    """A call's result, or its error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return call()
    except Exception as error:
        return type(error), str(error)


BAD = {
    "channels": lambda x, w, b: ((x[:, 1:] * 1, w, b), {}),
    "groups": lambda x, w, b: ((x, w, b), {"groups": 3}),
    "no groups": lambda x, w, b: ((x, w, b), {"groups": 0}),
    "integers": lambda x, w, b: ((x.long(), w, b), {}),
    "dtypes": lambda x, w, b: ((x, w.double(), b), {}),
    "dtype of the bias": lambda x, w, b: ((x, w, b.double()), {}),
    "dimensions": lambda x, w, b: ((x[0, 0], w, b), {}),
    "dimensions of the weight": lambda x, w, b: ((x, w[0], b), {}),
    "a bias too long": lambda x, w, b: ((x, w, torch.cat([b, b])), {}),
    "a large window": lambda x, w, b: ((x[..., :2] * 1, w, b), {}),
    "padding": lambda x, w, b: ((x, w, b), {"padding": -1}),
    "stride": lambda x, w, b: ((x, w, b), {"stride": 0}),
    "dilation": lambda x, w, b: ((x, w, b), {"dilation": 0}),
    "name of the padding": lambda x, w, b: ((x, w, b), {"padding": "full"}),
    "same and strided": lambda x, w, b: ((x, w, b), {"padding": "same", "stride": 2}),
    "three strides": lambda x, w, b: ((x, w, b), {"stride": (1, 1, 1)}),
    "no number": lambda x, w, b: ((x, w, b), {"stride": 1.5}),
    "no tensor": lambda x, w, b: ((x, None, b), {}),
    "huge": lambda x, w, b: ((x, w, b), {"padding": 1 << 70}),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("grad", [True, False])
def test_errors_are_torchs(device, bad, grad):
    x, *rest = tensors("conv2d", device)
    args, how = BAD[bad](silu(x), *rest)
    with torch.set_grad_enabled(grad):
        found, wanted = (outcome(lambda conv=conv: conv(*args, **how)) for conv in (ours("conv2d"), theirs("conv2d")))
    assert isinstance(wanted, tuple) and found[0] is wanted[0]
    # torch's parser lists the arguments in its message, and we have more.
    assert found[1].partition(" - got")[0] == wanted[1].partition(" - got")[0]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("which", ["x", "weight"])
@pytest.mark.parametrize("asked", [(0,), (1,), (2,)])
@pytest.mark.parametrize("leaf", [False, True])
def test_writes_are_reported_as_by_torch(device, frozen, which, asked, leaf):
    """Writes to the input, too, if it is not kept or read."""
    leaves = tensors("conv2d", device)
    if frozen:
        leaves[1].requires_grad_(False)
    if not leaves[asked[0]].requires_grad:
        pytest.skip("no gradient of a frozen weight")

    def run(conv):
        h = leaves[0].detach().requires_grad_() if leaf else silu(leaves[0])
        y = conv(h, *leaves[1:])
        with torch.no_grad():
            (h if which == "x" else leaves[1]).add_(0)
        return torch.autograd.grad(y.sum(), [h if i == 0 else leaves[i] for i in asked])

    found, wanted = outcome(lambda: run(ours("conv2d"))), outcome(lambda: run(theirs("conv2d")))
    assert wanted[0] is RuntimeError and "modified by an inplace operation" in wanted[1]
    versions = lambda text: text.partition(" is at version")[0]  # noqa: E731
    assert found[0] is RuntimeError and versions(found[1]) == versions(wanted[1])


def test_a_source_that_was_written_to_is_an_error(device):
    x, weight, bias = tensors("conv2d", device)
    z = x * 1
    y = ours("conv2d")(silu(z), weight, bias)
    with torch.no_grad():
        z.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), weight)


@pytest.mark.parametrize("change", [torch.Tensor.zero_, lambda t: setattr(t, "data", t.data * 2)])
def test_a_source_that_changed_before_is_not_trusted(device, change):
    x, weight, bias = tensors("conv2d", device)

    def run(conv):
        z = x * 1
        h = silu(z)
        with torch.no_grad():
            change(z)
        return torch.autograd.grad(conv(h, weight, bias).square().sum(), weight)

    same(run(ours("conv2d")), run(theirs("conv2d")))


def test_a_weight_that_changed_before_backward_under_autocast_says_what_to_do(device):
    x, weight, bias = tensors("conv2d", device)
    with torch.autocast(device, torch.bfloat16):
        y = ours("conv2d")(silu(x), weight, bias)
        alone = ours("conv2d")(x.detach(), weight, bias)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"(?s)modified by an inplace.*backward before the weight .* skip="):
        y.float().sum().backward()
    alone.float().sum().backward()  # no gradient needs it


def test_autocast_leaves_float64_alone(device):
    leaves = [t.detach().double().requires_grad_() for t in tensors("conv2d", device)]

    def run(conv):
        with torch.autocast(device, torch.bfloat16):
            return gradients(conv, leaves, {})

    found, wanted = run(ours("conv2d")), run(theirs("conv2d"))
    assert found[0].dtype is torch.float64
    same(found, wanted)


@names
def test_one_image_without_a_batch_and_complex_numbers_are_torchs(device, name):
    x, weight, bias = tensors(name, device)
    one = x.detach()[0].requires_grad_()
    same(gradients(ours(name), [one, weight, bias], {}), gradients(theirs(name), [one, weight, bias], {}))
    leaves = [torch.complex(t.detach(), t.detach()).requires_grad_() for t in (x, weight)]
    plain = lambda x: x * 1  # noqa: E731
    same(gradients(ours(name), leaves, {}, plain), gradients(theirs(name), leaves, {}, plain))


class Tagged(torch.Tensor):
    pass


def test_transforms_tracers_modes_and_subclasses_are_torchs(device):
    x, weight, bias = tensors("conv2d", device)
    conv = ours("conv2d")
    run = lambda conv: lambda h: conv(silu(h), weight, bias).sum()  # noqa: E731
    same([torch.func.grad(run(conv))(x.detach())], [torch.func.grad(run(theirs("conv2d")))(x.detach())])
    batch = torch.stack([x.detach()] * 2)
    torch.testing.assert_close(torch.func.vmap(run(conv))(batch), torch.func.vmap(run(theirs("conv2d")))(batch))
    tangent = torch.func.jvp(lambda h: conv(h, weight, bias), (x,), (x,))[1]
    torch.testing.assert_close(tangent, theirs("conv2d")(x, weight))
    graph = make_fx(lambda h: conv(h, weight, bias))(x)
    assert "convolution" in graph.code
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert conv(mode.from_tensor(x), weight, bias).shape == theirs("conv2d")(x, weight, bias).shape
    tagged = conv(x.detach().as_subclass(Tagged), weight, bias)
    assert type(tagged) is Tagged
    with torch.inference_mode():
        assert torch.equal(conv(x.detach() * 1, weight, bias), theirs("conv2d")(x.detach(), weight, bias))
    with hfnn.use("torch"):
        assert node(conv(silu(x), weight, bias)) == "ConvolutionBackward0"


def test_a_compiled_model_is_torchs(device):
    model = hfnn.convert(nn.Sequential(nn.Conv2d(C, OUT, 3), nn.SiLU(), nn.Conv2d(OUT, C, 3)), prefer="memory")
    x = tensors("conv2d", device)[0]
    torch._dynamo.reset()
    y = torch.compile(model.to(device), backend="eager", fullgraph=True)(x)
    assert "Convolution" in node(y) and torch.equal(y, hfnn.revert(copy.deepcopy(model))(x))


@pytest.mark.parametrize("how", ["checkpoint", "reentrant", "hooks", "cpu"])
@pytest.mark.parametrize("inside", ["both", "conv"])
def test_checkpoints_and_hooks_of_saved_tensors(device, how, inside):
    leaves = tensors("conv2d", device)
    x, weight, bias = leaves

    def region(conv, body, given):
        if how in ("checkpoint", "reentrant"):
            return checkpoint(body, given, use_reentrant=how == "reentrant")
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
        with torch.autograd.graph.save_on_cpu() if how == "cpu" else hooks:
            return body(given)

    def run(conv):
        outer = norm(x)
        body = lambda h: conv(norm(h) if inside == "both" else h, weight[:, :C], bias)  # noqa: E731
        y = region(conv, body, outer)
        for leaf in leaves:
            leaf.grad = None
        y.square().sum().backward()
        return y, *(leaf.grad for leaf in leaves)

    same(run(ours("conv2d")), run(theirs("conv2d")))


def test_a_checkpoint_that_many_gradients_at_once_repeat(device):
    x, weight, bias = leaves = tensors("conv2d", device)

    def run(conv):
        y = checkpoint(lambda h: conv(silu(h), weight, bias), x, use_reentrant=False)
        return torch.autograd.grad(y, leaves, torch.stack([y.detach()] * 2), is_grads_batched=True)

    for found, wanted in zip(run(ours("conv2d")), run(theirs("conv2d")), strict=True):
        torch.testing.assert_close(found, wanted)


# Modules

MODULES = {
    "conv1d": lambda **how: nn.Conv1d(C, OUT, 3, **how),
    "conv2d": lambda **how: nn.Conv2d(C, OUT, 3, **how),
    "conv3d": lambda **how: nn.Conv3d(C, OUT, 3, **how),
    "conv_transpose1d": lambda **how: nn.ConvTranspose1d(C, OUT, 3, **how),
    "conv_transpose2d": lambda **how: nn.ConvTranspose2d(C, OUT, 3, **how),
    "conv_transpose3d": lambda **how: nn.ConvTranspose3d(C, OUT, 3, **how),
}


def step(model, x, *rest):
    y = model(silu(x), *rest)
    return y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])


@names
def test_modules(device, name, rebuilt):
    stock = MODULES[name](stride=2, groups=2, padding=1).to(device)
    x = tensors(name, device)[0]
    model = hfnn.convert(copy.deepcopy(stock), prefer="memory")
    assert hfnn.is_converted(model) and type(model) is type(stock)
    assert repr(model) == repr(stock) and model.state_dict().keys() == stock.state_dict().keys()
    wanted = step(stock, x)
    assert not rebuilt
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        rebuilt.clear()
        same(step(each, x), wanted)
        assert len(rebuilt) == 1
    assert "keeps a recipe of its input" in hfnn.report(model).rows[0].why
    hfnn.revert(model)
    assert type(model) is type(stock) and vars(model).keys() == vars(stock).keys()


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_other_modes_of_padding(device, mode):
    stock = nn.Conv2d(C, OUT, 3, padding=2, padding_mode=mode).to(device)
    x = tensors("conv2d", device)[0]
    same(step(hfnn.convert(copy.deepcopy(stock), prefer="memory"), x), step(stock, x))


def test_an_output_size_is_torchs(device):
    stock = nn.ConvTranspose2d(C, OUT, 3, stride=2).to(device)
    x = tensors("conv_transpose2d", device)[0]
    size = [2 * n + 2 for n in x.shape[2:]]
    same(step(hfnn.convert(copy.deepcopy(stock), prefer="memory"), x, size), step(stock, x, size))


class Doubled(nn.Conv2d):
    def _conv_forward(self, input, weight, bias):
        return 2 * super()._conv_forward(input, weight, bias)


class Inherits(nn.Conv2d):
    pass


def why(module):
    return hfnn.report(module).left[0].why


def test_what_is_left_alone():
    assert "a forward of its own" in why(hfnn.convert(Doubled(C, OUT, 3)))
    patched = nn.Conv2d(C, OUT, 3)
    patched._conv_forward = lambda input, weight, bias: input
    assert "_conv_forward of its own on the instance" in why(hfnn.convert(patched))
    assert "run the model once" in why(hfnn.convert(nn.LazyConv2d(OUT, 3)))
    assert "parametrized" in why(hfnn.convert(parametrizations.weight_norm(nn.Conv2d(C, OUT, 3))))


def test_what_becomes_another_after_convert(device, monkeypatch):
    x = tensors("conv2d", device)[0]
    tiled = hfnn.convert(nn.Conv2d(C, OUT, 3).to(device), prefer="memory")  # as authors of seamless images do
    padded = lambda input, weight, bias: F.conv2d(F.pad(input, (1, 1, 1, 1), mode="circular"), weight, bias)  # noqa: E731
    tiled._conv_forward = padded
    assert torch.equal(tiled(x), padded(x, tiled.weight, tiled.bias))
    normed = parametrizations.weight_norm(hfnn.convert(nn.Conv2d(C, OUT, 3).to(device), prefer="memory"))
    same(gradients(lambda h: normed(h), [x], {}), gradients(lambda h: F.conv2d(h, normed.weight, normed.bias), [x], {}))
    model = hfnn.convert(Inherits(C, OUT, 3).to(device), prefer="memory")
    assert node(model(silu(x))) == "_ConvolutionBackward"
    own = nn.Conv2d._conv_forward
    monkeypatch.setattr(Inherits, "_conv_forward", lambda self, *args: own(self, *args) * 2, raising=False)
    assert torch.equal(model(silu(x)), 2 * F.conv2d(silu(x), model.weight, model.bias))
