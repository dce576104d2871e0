"""Element-wise functions return what torch's own have: strides, and for any layout the values and gradients."""

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
    "softplus", "logsigmoid", "softsign", "mish", "sigmoid", "tanh",
)  # fmt: skip


def torchs(name):
    return getattr(hfnn.ops, name).OP.torch


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_strides_are_torchs(name, layout, device):
    options = (0.5, True) if "dropout" in name else (0.5,) if name == "softshrink" else ()
    x = LAYOUTS[layout](torch.randn(SIZES, device=device))
    kernel = "triton" if x.is_cuda else "cpp"

    def run(x, fn):
        torch.manual_seed(1)
        x = x.detach().requires_grad_()
        y = fn(x, *options)
        dy = torch.arange(y.numel(), device=device).view(y.shape).to(y)  # contiguous, whatever y
        (along,) = torch.autograd.grad(y, x, torch.empty_like(y).copy_(dy), retain_graph=True)
        return y.detach(), torch.autograd.grad(y, x, dy)[0], along.stride()

    with hfnn.use(kernel):
        y, dx, strides = run(x, getattr(hfnn.functional, name))
    want, dwant, wanted = run(x, torchs(name))
    assert y.stride() == want.stride() and strides == wanted
    if "dropout" not in name:
        torch.testing.assert_close(y, want)
        torch.testing.assert_close(dx, dwant, rtol=1e-4, atol=1e-3)
        return
    dy = torch.arange(y.numel(), device=device).view(y.shape).to(y)
    torch.testing.assert_close(dx, torch.where(y != 0, 2 * dy, 0))
    assert 0.1 < (y != 0).float().mean() < 0.9
