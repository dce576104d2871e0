"""rope and qk_norm_rope with tables of all positions, and with every other way of passing angles."""

import pytest
import torch

import hfnn
from hfnn import testing
from hfnn.core.kernel import _interpreting
from hfnn.ops import rope

from .test_rope import HALVES, each, function, leaves, run


@each
@pytest.mark.parametrize("interleaved", [False, True])
def test_tables_and_positions(op, kernel, device, dtype, interleaved):
    """A table of all positions, with whole or half rows, gives the same as its rows."""
    args, _ = op.sample((2, 4, 2, 9, 24, 16, interleaved), dtype, device)
    cos, sin = (t[0] for t in rope.angles(1, 40, 16, dtype, device, interleaved=interleaved))
    positions = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(3)).to(device)
    short = [t[:, ::2] if interleaved else t[:, :8] for t in (cos, sin)]
    options = {"interleaved": interleaved}

    def same(a, b):  # each form of table has its own kernel; a GPU's compiler may fuse each differently
        return torch.equal(a, b) or (
            device == "cuda" and testing.error(a, b.double()).l2 <= 4 * torch.finfo(a.dtype).eps
        )

    with hfnn.use(kernel):
        want = run(function(op), [*leaves(op, args)[:-2], cos[positions], sin[positions]], **options)
        for given in (
            ((cos, sin), positions, None),
            ((cos[None], sin[None]), positions.int(), None),
            (short, positions, 16),
            ([t[positions] for t in short], None, 16),
        ):
            tables, at, rotary = given
            args_ = [*leaves(op, args)[:-2], *tables]
            got = run(function(op), args_, position_ids=at, rotary_dim=rotary, **options)
            assert got[0][0].grad_fn.name().startswith("_")
            assert all(map(same, (*got[0], *got[1]), (*want[0], *want[1])))
        one = run(function(op), [*leaves(op, args)[:-2], cos[positions[0]], sin[positions[0]]], **options)
        for at in (positions[0], positions[:1]):
            got = run(function(op), [*leaves(op, args)[:-2], cos, sin], position_ids=at, **options)
            assert all(map(same, (*got[0], *got[1]), (*one[0], *one[1])))
        expanded = [t[positions[:1]].expand(2, -1, -1) for t in (cos, sin)]
        got = run(function(op), [*leaves(op, args)[:-2], *expanded], **options)
        assert all(map(same, (*got[0], *got[1]), (*one[0], *one[1])))


@each
def test_formula_agrees(op, kernel, device, dtype):
    """The formula that runs without a kernel, with every way of passing angles."""
    args, _ = op.sample((2, 4, 2, 9, 24, 16, True), dtype, device)
    cos, sin = (t[0, :, ::2] for t in rope.angles(1, 40, 16, dtype, device, interleaved=True))
    options = {"position_ids": torch.arange(18, device=device).view(2, 9), "rotary_dim": 16, "interleaved": True}
    swapped = [x.transpose(1, 2) for x in args[:2]]
    near = {torch.float64: 1e-12, torch.float32: 1e-6}.get(dtype, 2e-2)
    for tensors, layout in ((args[:2], "bhsd"), (swapped, "bshd")):
        found = []
        for name in (kernel, "torch"):
            with hfnn.use(name):
                inputs = [*leaves(op, (*tensors, *args[2:]))[:-2], cos, sin]
                found.append(run(function(op), inputs, layout=layout, **options))
        (ours, our_grads), (torchs, torchs_grads) = found
        assert not torchs[0].grad_fn.name().startswith("_")
        for a, b in zip((*ours, *our_grads), (*torchs, *torchs_grads), strict=True):
            assert a.dtype is b.dtype and testing.error(a, b.double()).l2 < near


def test_positions_outside_the_table():
    (query, key, _, _), _ = rope.sample(HALVES, torch.float32, "cpu")
    cos, sin = (t[0] for t in rope.angles(1, 9, 16, torch.float32, "cpu"))
    at = torch.arange(9).view(1, 9) + 1
    with hfnn.use("cpp"), pytest.raises(ValueError, match="positions must be from 0 to 8, got 9"):
        hfnn.functional.rope(query, key, cos, sin, at)
    if _interpreting():
        with hfnn.use("triton"):
            q, _ = hfnn.functional.rope(query, key, cos, sin, at)
        assert q[:, :, -1].isnan().all() and q[:, :, :-1].isfinite().all()
