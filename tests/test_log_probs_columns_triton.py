"""Triton's kernels of log_probs whose rows lie in columns, in the interpreter where there is no GPU."""

import importlib

import pytest
import torch

from .test_losses_triton import BF16, DEVICE, F16, F32, F64, INF, NAN, assert_near, blank, capped, draw


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("options", [(1.0, 0.0), (-0.7, 0.0), (1.0, 5.0)], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (530, 3), (70, 40), (90, 272)], ids=str)
def test_log_probs_of_columns(monkeypatch, shape, options, dtype):
    """Splits of several tiles and of one; a partial last tile; more splits than tiles."""
    op, (C, R) = importlib.import_module("hfnn.kernels.log_probs"), shape
    monkeypatch.setattr(op, "COLUMNS_FORWARD", ((16, 16, 2, 1, 1, 3), (256, 64, 2, 1, 2, 3), (1, 128, 4, 1, 1, 3)))
    monkeypatch.setattr(op, "COLUMNS_BACKWARD", ((1 << 30, 128, 4, 1, 1, 3),))
    monkeypatch.setattr(op, "SPLITS", (2, 32))
    x, target = draw(C, R, dtype=dtype, scale=3), torch.randint(C, (R,), device=DEVICE)
    if R > 2:
        target[0], target[1] = -1, C
        x[1:5, 0] = x[: C // 2, 1] = 0 if options[1] else -INF * options[0]
    picked, lse, a, t = blank(R), blank(R, dtype=F64), draw(R), draw(R)
    x64 = x.double()
    z = capped(x64, *options)
    exact, inside = torch.logsumexp(z, 0), (target >= 0) & (target < C)
    one_hot = torch.nn.functional.one_hot(target.where(inside, C), C + 1)[:, :C].t()
    wanted = (z - exact).exp() * a.double() + one_hot * t.double()
    wanted *= options[0] * (1 - (z / options[1]) ** 2 if options[1] else 1)
    for splits in (op.column_splits(C, R), 7):
        op.forward_columns(x, target, blank(2, splits, R), picked, lse, *options, 0)
        assert_near(picked, z.gather(0, target.where(inside, 0)[None])[0].where(inside, 0))
        assert_near(lse, exact)
    dx, in_place = torch.full_like(x, NAN), x.clone()
    op.backward_columns(x, target, lse, a, t, dx, *options, 0)
    op.backward_columns(in_place, target, lse, a, t, in_place, *options, 0)
    assert_near(dx, wanted, dtype, 16)
    assert torch.equal(dx, in_place)


def test_log_probs_of_extreme_columns():
    """An empty column, one masked by a finite number, and one with NaN; other columns are unaffected."""
    op, C, R = importlib.import_module("hfnn.kernels.log_probs"), 300, 5
    x, target = draw(C, R), torch.zeros(R, dtype=torch.int64, device=DEVICE)
    x[:, 0], x[:, 1], x[7, 2], x[1:, 3] = -INF, torch.finfo(F32).min, NAN, -INF
    picked, lse, again = blank(R), blank(R, dtype=F64), blank(R, dtype=F64)
    op.forward_columns(x, target, blank(2, op.column_splits(C, R), R), picked, lse, 1.0, 0.0, 0)
    assert torch.equal(picked, x[0])
    assert_near(lse, torch.logsumexp(x.double(), 0))
    op.forward_columns(x, target, blank(2, op.column_splits(C, R), R), picked, again, 1.0, 0.0, 0)
    assert torch.equal(lse.nan_to_num(), again.nan_to_num())
    for none in (x[:0], x[:, :0].contiguous()):
        op.forward_columns(none, target, blank(2, op.column_splits(*none.shape), R), picked, lse, 1.0, 0.0, 0)
        op.backward_columns(none, target, lse, picked, picked, none, 1.0, 0.0, 0)


# ---- distillation
