"""Convolutions that keep a recipe of their input: results, gradients, strides and errors are exactly torch's."""

import itertools

import pytest
import torch
from torch import nn

import hfnn
from hfnn.core import native
from hfnn.core import node as recipe
from hfnn.memory import saved_bytes

from .convolutions import (
    PRODUCERS,
    C,
    N,
    gradients,
    kernels_take,
    names,
    node,
    norm,
    ours,
    same,
    silu,
    tensors,
    theirs,
)

if native.extension is None:
    pytest.skip(native.why, allow_module_level=True)

HOW = {
    "plain": {},
    "padded": {"padding": 1},
    "strided": {"stride": 2, "padding": 1},
    "dilated": {"dilation": 2, "padding": 2},
    "grouped": {"groups": 4},
    "depthwise": {"groups": C},
}


@names
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("last", [False, True], ids=["planes", "channels last"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_gradients_are_torchs(device, name, how, last, bias, rebuilt):
    how = HOW[how]
    leaves = tensors(name, device, groups=how.get("groups", 1), bias=bias, last=last)
    found = gradients(ours(name), leaves, how)
    assert node(found[0]) == "_ConvolutionBackward" and len(rebuilt) == 1
    same(found, gradients(theirs(name), leaves, how))
    with recipe.disabled():
        same(gradients(ours(name), leaves, how), found)


@pytest.mark.parametrize("producer", PRODUCERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["planes", "channels last"])
def test_what_any_producer_makes_is_rebuilt_in_its_layout(device, producer, dtype, last, rebuilt):
    leaves = tensors("conv2d", device, dtype, last=last)
    found = gradients(ours("conv2d"), leaves, {"padding": 1}, PRODUCERS[producer])
    if kernels_take(dtype, device):
        assert node(found[0]) == "_ConvolutionBackward" and rebuilt
    same(found, gradients(theirs("conv2d"), leaves, {"padding": 1}, PRODUCERS[producer]))


@names
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("taken", [True, False], ids=["taken", "kept"])
def test_gradients_under_autocast_are_torchs(device, name, low, x_dtype, taken, rebuilt):
    leaves = tensors(name, device, last=True)
    leaves[0] = leaves[0].detach().to(x_dtype).requires_grad_()
    leaf = lambda x: x * 1  # noqa: E731

    def run(conv):
        with torch.autocast(device, low):
            return gradients(conv, leaves, {}, silu if taken else leaf)

    found = run(ours(name))
    assert node(found[0]) == "_ConvolutionBackward" and found[0].dtype is low and len(rebuilt) == taken
    same(found, run(theirs(name)))


def test_small_inputs_under_autocast_are_torchs(device):
    leaves = tensors("conv2d", device)
    with torch.autocast(device, torch.bfloat16):
        found = [node(hfnn.functional.conv2d(*leaves, prefer=prefer)) for prefer in ("auto", "memory", "speed")]
    assert [name == "_ConvolutionBackward" for name in found] == [False, True, False]


@names
@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3)), ids=str)
def test_each_gradient_on_its_own(device, name, wanted):
    leaves = [t.requires_grad_(want) for t, want in zip(tensors(name, device), wanted, strict=True)]
    if any(wanted):
        same(gradients(ours(name), leaves, {"padding": 1}), gradients(theirs(name), leaves, {"padding": 1}))
    y = getattr(hfnn.functional, name)(silu(leaves[0]), *leaves[1:])
    assert y.requires_grad == any(wanted)


def test_siblings_share_what_is_rebuilt(device, rebuilt):
    x, weight, bias = tensors("conv2d", device)
    second, last = weight.detach().clone().requires_grad_(), tensors("conv2d", device, size=1)[1]

    def run(conv):
        h = norm(x)
        y = conv(h, weight, bias, padding=1) + conv(h, second, padding=1) + conv(h, last)
        return y, *torch.autograd.grad(y.square().sum(), [x, weight, bias, second, last])

    found = run(ours("conv2d"))
    assert len(rebuilt) == 1 and rebuilt[0]() is None
    same(found, run(theirs("conv2d")))


@names
def test_what_is_kept(device, name):
    """One of silu's input and result; nothing of a frozen weight's input."""
    x, weight, bias = tensors(name, device)
    weight, bias = nn.Parameter(weight), nn.Parameter(bias)
    kept = lambda conv, h: saved_bytes(lambda: conv(h(x), weight, bias)).total  # noqa: E731
    assert kept(ours(name), silu) == x.nbytes and kept(theirs(name), silu) == 2 * x.nbytes
    weight.requires_grad_(False)
    double = lambda x: x * 2  # noqa: E731
    # torch keeps the input although it does not read it.
    own = weight.nbytes  # counted, because it does not require grad
    assert kept(ours(name), double) == own and kept(theirs(name), double) == own + x.nbytes
    with torch.autocast(device, torch.bfloat16):  # the parameter is kept uncast, which hooks do not see
        assert kept(ours(name), double) == 0 and kept(theirs(name), double) == (own + x.nbytes) // 2


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
def test_padding_by_name(device, padding, size, dims):
    """torch pads for an even window by copying the input; the copy has no recipe."""
    name = f"conv{dims}d"
    leaves = tensors(name, device, size=size)
    for dilation in (1, 2)[: 1 + (padding == "same")]:
        found = gradients(ours(name), leaves, {"padding": padding, "dilation": dilation})
        copied = padding == "same" and dilation * (size - 1) % 2
        assert (node(found[0]) == "_ConvolutionBackward") == (not copied)
        same(found, gradients(theirs(name), leaves, {"padding": padding, "dilation": dilation}))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_output_padding(device, dims):
    name = f"conv_transpose{dims}d"
    leaves, how = tensors(name, device, groups=2), {"stride": 2, "output_padding": 1, "padding": 1, "groups": 2}
    found = gradients(ours(name), leaves, how)
    assert node(found[0]) == "_ConvolutionBackward"
    same(found, gradients(theirs(name), leaves, how))


def test_layouts_of_inputs_and_gradients(device):
    """Inputs and gradients that are transposed, with gaps or channels-last; gradients that are expanded."""
    x, weight, bias = tensors("conv2d", device)
    turned = lambda t: t.transpose(2, 3).contiguous().transpose(2, 3)  # noqa: E731
    spread = lambda t: torch.stack([t, t], -1)[..., 0]  # noqa: E731
    last = lambda t: t.contiguous(memory_format=torch.channels_last)  # noqa: E731
    for layout, of_dy, of_weight in itertools.product((turned, spread, last), (turned, spread, last), (last, turned)):
        leaves = [layout(x.detach()).requires_grad_(), of_weight(weight.detach()).requires_grad_(), bias]
        how = {}, silu, lambda y, of_dy=of_dy: of_dy(torch.ones_like(y) + y.detach())
        same(gradients(ours("conv2d"), leaves, *how), gradients(theirs("conv2d"), leaves, *how))
        how = {}, silu, lambda y: y.new_ones(()).expand_as(y)
        same(gradients(ours("conv2d"), leaves, *how), gradients(theirs("conv2d"), leaves, *how))


@names
@pytest.mark.parametrize("autocast, taken", [(False, True), (True, True), (True, False)])
def test_second_derivatives(device, name, autocast, taken):
    leaves, torchs = tensors(name, device, size=2), theirs(name)

    def second(conv, asked):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            y = conv(silu(leaves[0]) if taken else leaves[0] * 1, *leaves[1:])
        assert conv is torchs or node(y) == "_ConvolutionBackward"
        first = torch.autograd.grad(y.float().square().sum(), [leaves[i] for i in asked], create_graph=True)
        return torch.autograd.grad(sum(g.float().square().sum() for g in first), leaves[: 2 + (2 in asked)])

    for asked in ((0, 1, 2), (0,), (1,)):
        for a, b in zip(second(ours(name), asked), second(torchs, asked), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=(2e-2 if autocast else 1e-5) * b.abs().max().item())


@names
@pytest.mark.parametrize("frozen", [False, True])
def test_second_derivatives_of_what_is_not_kept(device, name, frozen):
    """First derivatives have a graph where torch's have one, even if it gives nothing."""
    x, weight, bias = tensors(name, device)
    leaf, other = (x, weight) if frozen else (weight, x)
    other.requires_grad_(False)

    def second(conv):
        with torch.autocast(device, torch.bfloat16, enabled=not frozen):
            y = conv(x, weight, bias)
        (first,) = torch.autograd.grad(y.float().sum(), leaf, create_graph=True)
        return first.requires_grad, torch.autograd.grad(first.float().square().sum(), [leaf, bias], allow_unused=True)

    assert second(ours(name)) == second(theirs(name))


@names
def test_gradients_that_are_not_asked_for(device, name):
    """Some of torch's kernels compute them, in another shape."""
    leaves = tensors(name, device)

    def each(conv):
        y = conv(silu(leaves[0]), *leaves[1:], dilation=2, padding=2)
        return [torch.autograd.grad(y.sum(), leaf, retain_graph=True)[0] for leaf in leaves]

    same(each(ours(name)), each(theirs(name)))


@names
def test_gradcheck(device, name):
    leaves = [t.detach()[:1].double() if i == 0 else t.detach().double() for i, t in enumerate(tensors(name, device))]
    leaves[0] = leaves[0][(..., *(slice(4),) * int(name[-2]))].contiguous()
    leaves = [t.requires_grad_() for t in leaves]
    run = lambda x, w, b: ours(name)(silu(x), w[:, :, :2], b, stride=2)  # noqa: E731
    assert (node(run(*leaves)) == "_ConvolutionBackward") is kernels_take(torch.float64, device)
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("batch, channels", [(0, C), (N, 0)])
@pytest.mark.parametrize("padding, dtype", [(0, torch.float32), (1, torch.bfloat16), ("same", torch.bfloat16)])
def test_nothing_at_all(device, batch, channels, padding, dtype):
    """With padding="same" torch does not compare dtypes where there is nothing to convolve."""
    x = torch.randn(batch, channels, 5, 5, device=device, requires_grad=True)
    weight = torch.randn(4, channels, 3, 3, device=device, dtype=dtype, requires_grad=True)

    def run(conv):
        try:
            y = conv(silu(x), weight, padding=padding)
            return y, *torch.autograd.grad(y.sum(), [x, weight])
        except RuntimeError as error:
            return str(error)

    found, wanted = run(ours("conv2d")), run(theirs("conv2d"))
    assert found == wanted if isinstance(wanted, str) else same(found, wanted) is None


def test_partial_backwards_rebuild_what_they_read(device, rebuilt):
    """As in a zero-bubble schedule: the input's gradient first, which rebuilds nothing, then the weight's."""
    x, weight, bias = tensors("conv2d", device)
    wanted = gradients(theirs("conv2d"), [x, weight, bias], {}, cotangent=torch.ones_like)
    h = silu(x)
    y = ours("conv2d")(h, weight, bias)
    (dh,) = torch.autograd.grad(y.sum(), h, retain_graph=True)
    (dx,) = torch.autograd.grad(h, x, dh, retain_graph=True)
    assert not rebuilt
    found = y, dx, *torch.autograd.grad(y.sum(), [weight, bias])
    assert len(rebuilt) == 1
    same(found, wanted)


def test_retained_graphs_and_a_second_time(device):
    leaves = tensors("conv2d", device)
    y = ours("conv2d")(silu(leaves[0]), *leaves[1:])
    first = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
    same(torch.autograd.grad(y.sum(), leaves), first)
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        torch.autograd.grad(y.sum(), leaves)


def test_many_gradients_at_once(device):
    leaves = tensors("conv2d", device)
    y = ours("conv2d")(silu(leaves[0]), *leaves[1:])
    dys = torch.randn(3, *y.shape, device=device)
    found = torch.autograd.grad(y, leaves, dys, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, leaves, dy, retain_graph=True) for dy in dys]
    same(found, [torch.stack(parts) for parts in zip(*each, strict=True)])


@names
def test_the_result_may_be_written_to_and_viewed(device, name):
    leaves = tensors(name, device)
    inplace = lambda conv: lambda *args: conv(*args).mul_(2)[:, 1:].relu_()  # noqa: E731
    same(gradients(inplace(ours(name)), leaves, {}), gradients(inplace(theirs(name)), leaves, {}))
