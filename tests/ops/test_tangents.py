"""Forward AD that begins after forward: the tangent of dy reaches the gradient."""

import inspect

import pytest
import torch
from torch.autograd import forward_ad

import hfnn

ROW = torch.linspace(0.5, 1.5, 32)
CASES = {
    "gelu": (),
    "relu": (),
    "softplus": (),
    "hardswish": (),
    "leaky_relu": (),
    "glu": (),
    "prelu": (ROW[:16],),
    "softmax": (-1,),
    "layer_norm": ((32,), ROW, ROW),
    "rms_norm": ((32,), ROW),
    "batch_norm": (None, None, None, None, True),
    "max_pool1d": (2,),
    "conv1d": (ROW.expand(3, 16, 32)[..., :3],),
    "l1_loss": (ROW.expand(8, 16, 32),),
    "cross_entropy": (torch.arange(8 * 32).view(8, 32) % 16,),
}


def gradient(function, args, create_graph, **options):
    """(the gradient, its tangent) for a dy with a tangent."""
    x = torch.randn(8, 16, 32, generator=torch.Generator().manual_seed(0)).mul_(2).requires_grad_()
    y = function(x, *args, **options)
    dy, tangent = (torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    with forward_ad.dual_level():
        (dx,) = torch.autograd.grad(y, x, forward_ad.make_dual(dy, tangent), create_graph=create_graph)
        return [part.detach() for part in forward_ad.unpack_dual(dx)], y.grad_fn.name()


@pytest.mark.parametrize("create_graph", [False, True], ids=["", "create_graph"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_have_the_tangent_that_torch_gives(name, create_graph):
    ours = getattr(hfnn.functional, name)
    options = {"prefer": "memory"} if "prefer" in inspect.signature(ours).parameters else {}
    got, node = gradient(ours, CASES[name], create_graph, **options)
    want, stock = gradient(getattr(torch.nn.functional, name), CASES[name], create_graph)
    assert node.startswith("_") and node != stock, "torch's own op ran"
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_source_is_rebuilt_once_for_both():
    """Under hooks that unpack once, as a checkpoint's do."""
    unpacked = []

    def unpack(i):
        assert i not in unpacked
        unpacked.append(i)
        return kept[i]

    kept = []
    for function in (hfnn.functional.softplus, hfnn.functional.hardswish, hfnn.functional.gelu):
        kept.clear(), unpacked.clear()
        x = torch.randn(64, 64, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.detach()) or len(kept) - 1, unpack):
            y = function(x * 1, prefer="memory")
        with forward_ad.dual_level():
            y.backward(forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y)))
        assert unpacked
