"""What is kept beside the result of an activation: never more than torch keeps."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hfnn
from hfnn.core import bits, native

compiled = pytest.mark.skipif(native.extension is None, reason="convolutions are torch's without the extension")
CONSUMERS = {
    "conv": lambda: hfnn.Conv2d(8, 8, 3),
    "linear": lambda: hfnn.Linear(16, 8),
    "layer_norm": lambda: hfnn.LayerNorm(16),
    "group_norm": lambda: hfnn.GroupNorm(2, 8),
    "batch_norm": lambda: hfnn.BatchNorm2d(8),
    "gelu": lambda: hfnn.GELU(),
}


def network(consumer, prefer="memory"):
    torch.manual_seed(0)
    consumer = CONSUMERS[consumer]()
    relu = hfnn.ReLU()
    relu.prefer = consumer.prefer = prefer
    x = torch.randn(2, 8, 16, 16, requires_grad=True)
    y = relu(x)
    return x, y, consumer


def of(y):
    """The node's bits, and its output if that takes their place."""
    found = y.grad_fn.recipe
    return found._bits, found._y


@compiled
@pytest.mark.parametrize("name", CONSUMERS)
def test_a_consumer_that_keeps_the_result_takes_the_place_of_the_bits(name):
    x, y, consumer = network(name)
    assert of(y)[0].numel() == y.numel() // 8 and of(y)[1] is None
    z = consumer(y)
    assert of(y)[0] is None and of(y)[1].data_ptr() == y.data_ptr()
    z.square().sum().backward(retain_graph=True)
    got = [x.grad, *(p.grad.clone() for p in consumer.parameters())]
    again = torch.autograd.grad(z.square().sum(), x)[0]
    want = x.detach().requires_grad_()
    consumer.zero_grad()
    consumer(F.relu(want)).square().sum().backward()
    assert torch.equal(got[0], again) and of(y) == (None, None)
    assert all(map(torch.equal, got, [want.grad, *(p.grad for p in consumer.parameters())]))


def test_bits_stay_where_the_result_is_not_kept():
    _, y, _ = network("conv")
    z = hfnn.functional.max_pool2d(y, 2, prefer="memory")
    z.sum().backward(retain_graph=True)
    assert of(y)[0].untyped_storage().nbytes() == y.numel() // 8


@compiled
def test_a_write_to_a_kept_result_is_torchs_error():
    _, y, consumer = network("conv")
    consumer(y).detach()
    with torch.no_grad():
        y.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@compiled
def test_a_result_that_was_written_to_before_it_is_kept_leaves_the_bits():
    x, y, consumer = network("conv")
    with torch.no_grad():
        y.mul_(2)
    consumer(y)
    assert of(y)[1] is None
    y.sum().backward()
    assert torch.equal(x.grad, (x > 0).float())


@compiled
def test_second_derivatives_read_the_kept_result():
    x, y, consumer = network("conv")
    (dx,) = torch.autograd.grad(consumer(y).square().sum(), x, create_graph=True)
    got = torch.autograd.grad(dx.square().sum(), [x, consumer.weight])
    want = x.detach().requires_grad_()
    (dx,) = torch.autograd.grad(consumer(F.relu(want)).square().sum(), want, create_graph=True)
    for a, b in zip(got, torch.autograd.grad(dx.square().sum(), [want, consumer.weight]), strict=True):
        torch.testing.assert_close(a, b)


def test_hooks_of_saved_tensors_see_the_bits():
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        _, y, consumer = network("conv")
        consumer(y)
    assert y.grad_fn.recipe is None
    assert type(network("conv")[1].grad_fn.recipe) is bits.OfOutput


def kept(model, x):
    return hfnn.memory.saved_bytes(lambda: model(x)).total


@compiled
@pytest.mark.parametrize(
    "act", [nn.ReLU(True), nn.LeakyReLU(0.2, True), nn.ReLU6(True), nn.LeakyReLU(0.2), nn.ReLU6(), nn.LeakyReLU(-0.2)]
)
@pytest.mark.parametrize("prefer", ["auto", "memory"])
def test_batch_norm_and_an_activation_keep_no_more(act, prefer):
    def make():
        torch.manual_seed(0)
        parts = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), act, nn.Conv2d(8, 8, 3, padding=1)
        return nn.Sequential(*parts)

    stock, ours, x = make(), hfnn.convert(make(), prefer=prefer), torch.randn(4, 8, 8, 8)
    assert kept(ours, x) <= kept(stock, x)
    for model in (stock, ours):
        model(x).square().sum().backward()
    for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


def test_relu_in_a_sequence_keeps_its_result_where_the_next_part_keeps_it():
    """So that hooks see no bits beside it, either."""
    parts = lambda: [nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.ReLU(), nn.MaxPool2d(2)]  # noqa: E731
    model = hfnn.convert(nn.Sequential(*parts()), prefer="memory")
    assert [model[1].keep, model[3].keep] == ["output", "bits"]
    x = torch.randn(2, 4, 16, 16)
    assert kept(model[:3], x) <= kept(nn.Sequential(*parts()[:3]), x)


@compiled
@pytest.mark.parametrize("layer", [nn.Linear(64, 64), nn.Conv1d(64, 64, 1)])
def test_weights_that_the_program_makes_are_kept_cast(layer):
    """Under autocast, as torch keeps them; a parameter is kept as it is, and not copied."""
    x = torch.randn(64, 64, 1) if isinstance(layer, nn.Conv1d) else torch.randn(1, 64)
    ours = hfnn.convert(nn.Sequential(layer), prefer="memory")
    made = {name: p * 0.5 for name, p in ours.named_parameters()}

    def run(model):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.func.functional_call(model, made, (x,))

    results = []
    for model in (ours, hfnn.revert(nn.Sequential(layer))):
        found = hfnn.memory.saved_bytes(lambda model=model: run(model)).total
        y = run(model).float().square().sum()
        results.append((found, torch.autograd.grad(y, list(ours.parameters()), retain_graph=True)))
        hfnn.convert(ours, prefer="memory")
    assert results[0][0] <= results[1][0]
    for a, b in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@compiled
@pytest.mark.parametrize("layer", [nn.Linear(64, 64), nn.Conv1d(64, 64, 1)])
def test_hooks_that_copy_get_no_uncast_weights(layer):
    x = torch.randn(2, 64, 64, requires_grad=True)
    sizes = []
    for model in (nn.Sequential(layer), hfnn.convert(nn.Sequential(layer), prefer="memory")):
        packed = []
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t, packed=packed: packed.append(t.nbytes) or t.clone(), lambda t: t
        )
        with torch.autocast("cpu", torch.bfloat16), hooks:
            y = model(x)
        y.float().sum().backward()
        sizes.append(sum(packed))
    assert sizes[1] <= sizes[0]


@pytest.mark.parametrize("layer", [nn.Linear(64, 64), nn.Conv1d(64, 64, 1)])
def test_a_checkpoint_saves_the_same_of_made_weights_and_of_parameters(layer):
    """Backward outside of functional_call computes the checkpoint again with the parameters."""

    class Checkpointed(nn.Sequential):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    given, results = torch.randn(2, 64, 64), []
    for model in (Checkpointed(layer), hfnn.convert(Checkpointed(layer), prefer="memory")):
        x = given.clone().requires_grad_()
        made = {name: p * 0.5 for name, p in model.named_parameters()}
        with torch.autocast("cpu", torch.bfloat16):
            y = torch.func.functional_call(model, made, (x,))
        results.append(torch.autograd.grad(y.float().square().sum(), [x, *model.parameters()]))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())


@pytest.mark.parametrize("make", [lambda x: x.relu_(), lambda x: x.relu_().view(-1), torch.sigmoid, lambda x: x])
def test_a_loss_of_what_its_op_keeps(make):
    """torch's loss keeps its input, which costs nothing if the op that made it keeps it; so ours does not keep more."""
    x, target = torch.randn(8, 16, requires_grad=True), torch.rand(8, 16)
    stock, ours = torch.nn.BCEWithLogitsLoss(), hfnn.BCEWithLogitsLoss()
    ours.prefer = "memory"

    def kept(loss):
        def run():
            y = make(x * 1)
            return loss(y, target.view(y.shape))

        return hfnn.memory.saved_bytes(run).total

    assert kept(ours) <= kept(stock)
