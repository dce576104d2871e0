"""The C++ CPU kernels of pointwise losses and of scaling, called as `hfnn._C.cpu.<op>`, against torch's formulas.

N elements.
"""

import pytest
import torch
import torch.nn.functional as F

from .test_losses_csrc import DTYPES, INF, agree, cpu, nan, run_twice, same_bits, seeded, wide

# Scaling.


@pytest.mark.parametrize("dtype", DTYPES)
def test_scale(dtype):
    for N, factor in ((0, 2.0), (1, 0.3), (70001, 0.3), (70001, 1.0)):
        x_N, factor_1 = seeded(N, dtype=dtype), torch.tensor([factor], dtype=wide(dtype))
        expected_N, y_N, place_N = (x_N.to(wide(dtype)) * factor_1).to(dtype), nan(N, dtype=dtype), x_N.clone()
        cpu.scale.forward(x_N, factor_1, y_N, 1)
        cpu.scale.forward(place_N, factor_1[0], place_N, 2)
        assert same_bits(y_N, expected_N) and same_bits(place_N, expected_N)


def test_scale_says_what_it_takes():
    x_N = torch.ones(5)
    for factor, message in (
        (torch.ones(5), r"factor must be a tensor of one element, got \(5,\)"),
        (None, "factor must be a tensor of one element, got None"),
        (torch.ones((), dtype=torch.float64), "factor must be float32, got float64"),
    ):
        with pytest.raises(ValueError, match=message):
            cpu.scale.forward(x_N, factor, x_N, 1)


# Pointwise losses.

POINTWISE = [
    (0, 0.0, lambda x, t, _: F.mse_loss(x, t, reduction="none")),
    (1, 0.7, lambda x, t, p: F.huber_loss(x, t, reduction="none", delta=p)),
    (2, 0.7, lambda x, t, p: F.smooth_l1_loss(x, t, reduction="none", beta=p)),
    (2, 0.0, lambda x, t, p: F.smooth_l1_loss(x, t, reduction="none", beta=p)),
    (3, 0.0, lambda x, t, _: F.binary_cross_entropy_with_logits(x, t, reduction="none")),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N", [0, 1000, 5003, 1200007])
@pytest.mark.parametrize("kind,parameter,formula", POINTWISE)
def test_pointwise_loss(dtype, N, kind, parameter, formula):
    x_N, target_N = 3 * seeded(N, dtype=dtype), seeded(N, dtype=dtype, seed=1)
    target_N = target_N.sigmoid() if kind == 3 else target_N

    def call(threads):
        sums_P, alone_P = (nan(cpu.pointwise_loss.partials(N), dtype=wide(dtype)) for _ in range(2))
        dx_N = nan(N, dtype=dtype)
        cpu.pointwise_loss.forward(x_N, target_N, sums_P, dx_N, kind, parameter, threads)
        cpu.pointwise_loss.forward(x_N, target_N, alone_P, None, kind, parameter, threads)
        assert same_bits(sums_P, alone_P)
        return [sums_P.double().sum().to(sums_P.dtype), dx_N]

    def total(x_N, target_N):
        x_N = x_N.detach().requires_grad_()
        loss = formula(x_N, target_N, parameter).sum()
        return loss, *torch.autograd.grad(loss, x_N)

    agree(total, (x_N, target_N), run_twice(call))


def test_pointwise_losses_at_the_ends():
    x_N = torch.tensor([0.0, -0.0, 0.7, -0.7, 100.0, -100.0, 1e30, INF, -INF, float("nan")])
    target_N = torch.zeros_like(x_N)
    for kind, parameter, formula in POINTWISE:
        for k in range(x_N.numel()):
            sums_P, dx_N, leaf_N = nan(1), nan(1), x_N[k : k + 1].clone().requires_grad_()
            cpu.pointwise_loss.forward(leaf_N.detach(), target_N[:1], sums_P, dx_N, kind, parameter, 1)
            loss_N = formula(leaf_N, target_N[:1], parameter)
            loss_N.backward()
            torch.testing.assert_close(sums_P, loss_N.detach(), equal_nan=True)
            # torch's L1 treats the sign of a NaN as 0.
            own_N = x_N[k : k + 1] if x_N[k].isnan() else leaf_N.grad
            torch.testing.assert_close(dx_N, own_N, equal_nan=True)


def test_pointwise_losses_say_what_they_take():
    x_N, sums_P = torch.ones(5), torch.ones(1)
    for change, message in (
        ({"target": torch.ones(4)}, r"target must have the shape \(5,\), got \(4,\)"),
        ({"sums": torch.ones(2)}, r"sums must have the shape \(1,\), got \(2,\)"),
        ({"dx": torch.ones(5, dtype=torch.float64)}, "dx must be float32, got float64"),
        ({"kind": 4}, "kind"),
    ):
        given = {"target": x_N, "sums": sums_P, "dx": None, "kind": 0, **change}
        with pytest.raises(ValueError, match=message):
            cpu.pointwise_loss.forward(x_N, *given.values(), 0.0, 1)
