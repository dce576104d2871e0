"""Element-wise functions: strides are torch's, and for any layout so are values and gradients."""

import functools

import pytest
import torch

import hfnn

SIZES = 2, 6, 4, 10
LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "permuted": lambda x: x.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0),
    "columns": lambda x: torch.stack([x, x], -1)[..., 0],
    "columns of a transposed": lambda x: torch.stack([x, x], -1).transpose(1, 3).contiguous().transpose(1, 3)[..., 0],
    "rows": lambda x: torch.cat([x, x], 1)[:, :6],
    "expanded": lambda x: x[:, :1].expand(x.shape),
}
NAMES = (
    "gelu", "silu", "dropout", "relu_dropout", "relu", "leaky_relu", "hardtanh", "hardsigmoid", "softshrink", "elu",
    "softplus", "logsigmoid", "softsign", "mish", "sigmoid", "tanh", "relu_squared",
)  # fmt: skip


def torchs(name):
    return hfnn.ops.OPS[name].torch


@pytest.mark.parametrize("gradient", ["contiguous", "permuted"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_strides_are_torchs(name, layout, gradient, device):
    options = (0.5, True) if "dropout" in name else (0.5,) if name == "softshrink" else ()
    x = LAYOUTS[layout](torch.randn(SIZES, device=device))
    kernel = "triton" if x.is_cuda else "cpp"

    def run(x, fn):
        torch.manual_seed(1)
        x = x.detach().requires_grad_()
        y = fn(x, *options)
        dy = LAYOUTS[gradient](torch.arange(y.numel(), device=device).view(y.shape).to(y))  # independent of y
        (along,) = torch.autograd.grad(y, x, torch.empty_like(y).copy_(dy), retain_graph=True)
        return y.detach(), torch.autograd.grad(y, x, dy)[0], along.stride()

    with hfnn.use(kernel):
        y, dx, strides = run(x, getattr(hfnn.functional, name))
    want, dwant, wanted = run(x, torchs(name))
    assert y.stride() == want.stride() and strides == wanted
    if name != "relu_dropout" and (name, layout) != ("leaky_relu", "expanded"):  # for these torch uses dy's layout
        assert dx.stride() == dwant.stride()
    if "dropout" not in name:
        torch.testing.assert_close(y, want)
        torch.testing.assert_close(dx, dwant, rtol=1e-4, atol=1e-3)
        return
    dy = torch.arange(y.numel(), device=device).view(y.shape).to(y)
    torch.testing.assert_close(dx, torch.where(y != 0, 2 * dy, 0))
    assert 0.1 < (y != 0).float().mean() < 0.9


def _silu_times(a, b):
    return torch.nn.functional.silu(a) * b


class RMSNormLike(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.linspace(0.5, 1.5, SIZES[-1])), 1e-6

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(dtype)


F, O, WIDTH = torch.nn.functional, hfnn.functional, SIZES[-1:]
OTHERS = {
    "rms_norm": (lambda x: F.rms_norm(x, WIDTH), lambda x: O.rms_norm(x, WIDTH, prefer="memory")),
    "layer_norm": (lambda x: F.layer_norm(x, WIDTH), lambda x: O.layer_norm(x, WIDTH, prefer="memory")),
    "glu": (F.glu, lambda x: O.glu(x, prefer="memory")),
    "swiglu": (_silu_times, lambda a, b: O.swiglu(a, b, prefer="memory")),
    "reglu": (lambda a, b: F.relu(a) * b, lambda a, b: O.reglu(a, b, prefer="memory")),
    **{
        f"{loss}, {how}": tuple(
            functools.partial(getattr(of, loss), reduction=how, **more)
            for of, more in ((F, {}), (O, {"prefer": "memory"}))
        )
        for loss in ("l1_loss", "mse_loss", "huber_loss", "smooth_l1_loss")
        for how in ("mean", "sum")
    },
    "abs": (torch.abs, lambda x: O.abs(x, prefer="memory")),
    "maximum": (torch.maximum, lambda a, b: O.maximum(a, b, prefer="memory")),
    "where": (lambda x: torch.where(x > 0, x, 2 * x), lambda x: O.where(x > 0, x, 2 * x, prefer="memory")),
    "prelu": (lambda x: F.prelu(x, torch.ones(1) / 4), lambda x: O.prelu(x, torch.ones(1) / 4, prefer="memory")),
    "max_pool1d": (lambda x: F.max_pool1d(x[0], 2), lambda x: O.max_pool1d(x[0], 2, prefer="memory")),
    "module": (RMSNormLike(), hfnn.convert(RMSNormLike(), prefer="memory")),
}


@pytest.mark.parametrize("first", [name for name in LAYOUTS if name != "expanded"])
@pytest.mark.parametrize("second", ["contiguous", "permuted"])  # layout of the second argument, or of the gradient
@pytest.mark.parametrize("name", OTHERS)
def test_strides_of_more_are_torchs(name, first, second):
    arguments = [LAYOUTS[first](torch.randn(SIZES))]
    if name in ("swiglu", "reglu", "maximum") or "loss" in name:
        arguments.append(LAYOUTS[second](torch.randn(SIZES)))
    results = []
    for fn in OTHERS[name]:
        given = [x.detach().requires_grad_() for x in arguments]
        y = fn(*given)
        dy = LAYOUTS[second](torch.ones_like(y)) if y.dim() == 4 and y.shape == SIZES else torch.ones_like(y)
        results.append([y, *torch.autograd.grad(y, given, dy)])
    for got, want in zip(*results, strict=True):
        assert got.stride() == want.stride()
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("layout", ["contiguous", "columns"])
def test_linears_gradient_has_the_layout_of_its_input(layout):
    """Under autocast, where hfnn's own product runs."""
    x = torch.randn(5, 3)
    x = x.t().contiguous().t() if layout == "columns" else x
    results = []
    for linear in (F.linear, O.linear):
        given, weight = x.detach().requires_grad_(), torch.ones(4, 3, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = linear(given, weight)
        results.append(torch.autograd.grad(y.float().sum(), given)[0])
    assert results[0].stride() == results[1].stride()


@pytest.mark.parametrize("norm_first", [True, False])
def test_strides_of_a_transformer_layer_are_torchs(norm_first):
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=norm_first)
    x = torch.randn(4, 3, 8).transpose(0, 1)
    want = layer(x).stride()
    assert hfnn.convert(layer, prefer="memory")(x).stride() == want
