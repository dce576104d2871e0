"""The C++ kernels of a step, against csrc/optim.h in plain torch (reference_step.py)."""

import pytest
import torch

from . import reference_step as reference
from .reference_step import ADAM, AMSGRAD, DECOUPLED, LION, MAXIMIZE, NESTEROV, SGD, TILE

_C = pytest.importorskip("hfnn._C", reason="the C++ kernels are not built")
op = _C.cpu.optim

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
SIZES = 9001, 1, 0, 255, 4096
STATES = {ADAM: 2, SGD: 1, LION: 1}
# A sum weighted 3/4 and 1/4 is exact for 16 bits, so Lion's sign does not depend on rounding.
RATES = {"lr": 0.01, "beta1": 0.75, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}


def draw_rows(rule, param=F32, grad=F32, state=F32, sizes=SIZES, amsgrad=False, **given):
    torch.manual_seed(0)
    rows = []
    for n in sizes:
        # Squares so large that dividing by their root does not amplify a gradient's rounding.
        states = [torch.randn(n) * 0.1, *(torch.rand(n) * 0.1 + 0.01 for _ in range(STATES[rule] - 1 + amsgrad))]
        rows.append(
            reference.new_row(torch.randn(n).to(param), torch.randn(n).to(grad), rule, states, state, 3, **given)
        )
    return rows


def run(rows, rule, numbers, control=None, clip=False, ema_decay=-1.0, seed=-1, offset=0, threads=2):
    """One step of the rows with the kernels, in place; returns control after it."""
    table, owner = reference.table(rows)
    control = reference.control() if control is None else control.clone()
    numbers = numbers if torch.is_tensor(numbers) else reference.hyper(numbers)
    squares = torch.full((op.partials(owner.numel()),), torch.nan, dtype=F64) if clip else None
    op.prepare(table, owner, control, squares, threads)
    op.update(table, owner, numbers, control, squares, rule, ema_decay, seed, offset, threads)
    return control


def copies(rows):
    return [row.clone() for row in rows]


def tensors(rows):
    for row in rows:
        yield from (x for x in (row.param, row.remainder, row.ema, row.step, *row.states, *row.scales) if x is not None)


def same(a, b):
    return all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(tensors(a), tensors(b), strict=True))


def exactly(rows):
    """The same rows with float64 parameters and float states, so that the reference does not round."""
    rows = copies(rows)
    for row in rows:
        row.param = row.param.double()
        if isinstance(row.state_format, torch.dtype):
            row.states, row.state_format = tuple(s.double() for s in row.states), F64
    return rows


def close(got, exact, size, dtype, ulp=2**-24):
    """Whether got equals exact, rounded to dtype, with an error of up to 4 roundings of a number of size `size`."""
    error = 4 * ulp * size.double().abs()
    spacing = {BF16: 2.0**-8, F16: 2.0**-11}.get(dtype, 0.0)
    error = error + exact.abs() * spacing + 2.0**-25 * (dtype == F16)
    return bool(((got.double() - exact).abs() <= error).all())


def check(got, before, exact):
    """Compares rows stepped by the kernels with rows of `exactly` stepped by the reference."""
    for row, old, wanted in zip(got, before, exact, strict=True):
        codes = isinstance(row.state_format, str)  # codes are computed in float32
        ulp = 2**-53 if row.param.dtype == F64 and not codes and row.state_format != F32 else 2**-24
        assert close(row.param, wanted.param, old.param.double().abs() + wanted.param.abs() + 0.1, row.param.dtype, ulp)
        assert row.step == wanted.step
        for k, state in enumerate(row.states):
            if not codes:
                size = wanted.states[k].abs() + old.grad.double().abs() + old.param.double().abs()
                assert close(state, wanted.states[k], size, state.dtype, ulp)
                continue
            # A number almost halfway between two codes may go either way.
            torch.testing.assert_close(row.scales[k], wanted.scales[k], rtol=1e-6, atol=0)
            assert (state != wanted.states[k]).sum() <= 1 + 1e-3 * state.numel()


def compare(rows, rule, numbers, control=None, clip=False):
    """Compares a step of the kernels with one of the reference; three threads give the same bits, and gradients are
    unchanged."""
    control = reference.control() if control is None else control
    numbers = numbers if torch.is_tensor(numbers) else reference.hyper(numbers)
    got, other, exact = copies(rows), copies(rows), exactly(rows)
    after = run(got, rule, numbers, control, clip)
    run(other, rule, numbers, control, clip, threads=3)
    squares = reference.prepare(exact, control, int(clip))
    reference.update(exact, numbers, control.clone(), squares, rule)
    check(got, rows, exact)
    assert same(got, other)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(got, rows, strict=True))
    if clip:
        assert after[3].item() == pytest.approx(squares.sqrt().item(), rel=1e-6)


@pytest.mark.parametrize("rule", [ADAM, SGD, LION])
@pytest.mark.parametrize("state", [F32, BF16, F16, "8bit", "4bit"], ids=str)
@pytest.mark.parametrize("param, grad", [(F32, F32), (BF16, BF16), (F16, F32), (F32, BF16), (BF16, F16)], ids=str)
def test_step(rule, state, param, grad):
    # Enough elements for several threads.
    rows = draw_rows(rule, param, grad, state, (*SIZES, 40001))
    compare(rows, rule, RATES | {"options": DECOUPLED if rule == ADAM else 0})


@pytest.mark.parametrize("rule", [ADAM, SGD, LION])
@pytest.mark.parametrize("state", [F64, F32, "8bit"], ids=str)
def test_step_in_float64(rule, state):
    compare(draw_rows(rule, F64, F64, state), rule, RATES)


@pytest.mark.parametrize("rule, options, numbers", reference.OPTIONS)
@pytest.mark.parametrize("dtype, state", [(F32, F32), (F32, "8bit"), (BF16, BF16), (F64, F64)], ids=str)
def test_options(rule, options, numbers, dtype, state):
    rows = draw_rows(rule, dtype, dtype, state, amsgrad=bool(options & AMSGRAD))
    rows[0].first = rows[1].first = rule == SGD
    compare(rows, rule, {**RATES, "options": options, **numbers})


def test_groups_formats_and_steps_in_one_table():
    one = draw_rows(ADAM, BF16, BF16, "8bit", (9000, 0, 100))
    two = draw_rows(ADAM, F32, F32, "4bit", (4097, 3), group=1)
    two[1].step.fill_(40.0)
    numbers = reference.hyper(RATES, {**RATES, "lr": 0.5, "options": MAXIMIZE})
    compare([one[0], two[0], one[1], two[1], *draw_rows(ADAM, F64, F64, F64, (77,)), one[2]], ADAM, numbers)


def test_the_first_state_of_sgd_is_not_read():
    rows = draw_rows(SGD, sizes=(5000,))
    rows[0].first = True
    rows[0].states[0].fill_(torch.nan)
    run(rows, SGD, RATES | {"options": NESTEROV})
    assert not any(x.isnan().any() for x in tensors(rows))


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("param, grad", [(F32, F32), (BF16, BF16), (F32, F16), (F64, F64)], ids=str)
def test_clipping_and_scale(param, grad, max_norm):
    rows = draw_rows(ADAM, param, grad)
    compare(rows, ADAM, RATES, reference.control(grad_scale=8.0, max_norm=max_norm), clip=True)


def test_squares_do_not_depend_on_threads():
    rows = draw_rows(SGD, sizes=(700001, 3, 4096))
    table, owner = reference.table(rows)
    assert op.partials(0) == 1 and op.partials(5) == 5 and op.partials(len(owner)) < len(owner)
    sums = [torch.full((op.partials(len(owner)),), torch.nan, dtype=F64) for _ in range(2)]
    for threads, squares in enumerate(sums, 1):
        op.prepare(table, owner, reference.control(), squares, threads)
    assert torch.equal(*sums)
    exact = sum(row.grad.double().square().sum() for row in rows)
    assert sums[0].sum().item() == pytest.approx(exact.item(), rel=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_norm_that_is_not_finite(bad):
    rows = draw_rows(SGD, sizes=(10,))
    rows[0].grad[3] = bad
    after = run(rows, SGD, {"lr": 1.0}, reference.control(max_norm=1.0), clip=True)
    assert not after[3].isfinite() and rows[0].param[3].isnan()
    # As in clip_grad_norm_: an infinity makes all others 0.
    assert rows[0].param.isnan().all() == (bad != torch.inf)


def test_nothing_moves_where_something_was_infinite():
    rows = draw_rows(ADAM, BF16, BF16, "8bit", (5000,), ema=torch.zeros(5000))
    got = copies(rows)
    run(got, ADAM, RATES, reference.control(found_inf=1.0, max_norm=1.0), clip=True, ema_decay=0.9)
    assert same(got, rows)


@pytest.mark.parametrize("rows", [draw_rows(SGD, sizes=(0,)), draw_rows(SGD, sizes=(0, 0))])
def test_a_table_without_tiles(rows):
    assert run(rows, SGD, RATES, reference.control(max_norm=1.0), clip=True)[3] == 0


@pytest.mark.parametrize("param, state", [(F32, F32), (BF16, BF16), (BF16, "8bit"), (F32, "4bit")], ids=str)
def test_addresses_of_any_alignment(param, state):
    rows = draw_rows(ADAM, param, param, state, (9001,))

    def shifted(x):
        return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].copy_(x)

    moved = copies(rows)
    for row in moved:
        row.param, row.grad = shifted(row.param), shifted(row.grad)
        row.states, row.scales = tuple(map(shifted, row.states)), tuple(map(shifted, row.scales))
    run(rows, ADAM, RATES)
    run(moved, ADAM, RATES)
    assert same(rows, moved)


# ---- codes. SGD's first step stores the gradient as the state; Adam's second moment, with beta2 0, stores its square.


def kept_as(x, state, signed):
    """The codes and scales by which the kernels store x."""
    if signed:
        row = reference.new_row(torch.zeros_like(x), x, SGD, [torch.zeros_like(x)], state, first=True)
        run([row], SGD, {"lr": 0.0, "beta1": 0.5})
        return row.states[0], row.scales[0]
    zeros = torch.zeros_like(x)
    row = reference.new_row(zeros, x.sqrt(), ADAM, [zeros, zeros], state)
    run([row], ADAM, {"lr": 0.0, "beta1": 0.5, "beta2": 0.0, "eps": 1.0})
    return row.states[1], row.scales[1]


CODES = [("8bit", True), ("8bit", False), ("4bit", True), ("4bit", False)]


@pytest.mark.parametrize("state, signed", CODES)
@pytest.mark.parametrize("scale", [1.0, -1.0, 3.7e10, -2.3e-20, 3.4e38, 1e-30, 1e-31])
def test_codes(state, signed, scale):
    """Bitwise, for all values and for numbers between them."""
    for block in reference.code_samples(int(state[0]), signed, scale if signed else min(abs(scale), 1e38)):
        codes, scales = kept_as(block, state, signed)
        if not signed:
            block = block.sqrt() * block.sqrt()  # as the kernel computes it
        wanted, wanted_scales = reference.encode(block, int(state[0]), signed)
        assert torch.equal(scales, wanted_scales) and (scales == 0).all() == (abs(scale) == 1e-31)
        assert torch.equal(codes, wanted)


@pytest.mark.parametrize("state", ["8bit", "4bit"])
@pytest.mark.parametrize("scale", [*(1.7**k * s for k in range(-124, 166, 29) for s in (1, -1)), 1e-30, -3.4e38])
def test_every_code_stays(state, scale):
    """An unchanged state keeps its codes and scale, bit for bit, and the parameter becomes it."""
    bits = int(state[0])
    values = reference.code_values(bits, True).float() * torch.tensor(scale)
    row = reference.new_row(torch.zeros(len(values)), torch.zeros(len(values)), SGD, [values], state)
    every = torch.arange(2**bits)
    row.states[0].copy_(every if bits == 8 else every[::2] | every[1::2] << 4)
    assert row.scales[0] == torch.tensor(scale)
    before = row.clone()
    run([row], SGD, {"lr": -1.0, "beta1": 1.0, "beta2": 1.0})
    assert torch.equal(row.states[0], before.states[0]) and torch.equal(row.scales[0], before.scales[0])
    assert torch.equal(row.param, values)


@pytest.mark.parametrize("state", ["8bit", "4bit"])
@pytest.mark.parametrize("scale", [1.0, 8e-31, 1.9e-7, 3e38])
def test_every_unsigned_code_stays(state, scale):
    bits = int(state[0])
    count = 2**bits
    zeros = torch.zeros(count)
    row = reference.new_row(zeros.clone(), zeros, ADAM, [zeros, zeros + scale], state)
    every = torch.arange(count)
    row.states[1].copy_(every if bits == 8 else every[::2] | every[1::2] << 4)
    before = row.clone()
    run([row], ADAM, {"lr": 0.0, "beta1": 1.0, "beta2": 1.0, "eps": 1.0})
    assert torch.equal(row.states[1], before.states[1]) and torch.equal(row.scales[1], before.scales[1])


@pytest.mark.parametrize("state", ["8bit", "4bit"])
def test_both_signs_of_the_largest(state):
    """The positive one is the scale; -1 has no code, and becomes the nearest."""
    bits = int(state[0])
    codes, scales = kept_as(torch.tensor([-3.0, 3.0, -2.9999]), state, True)
    back = reference.decode(codes, scales, 3, bits, True)
    assert scales == 3 and back[1] == 3 and back[0] == back[2] == 3 * reference.code_values(bits, True)[0]
    codes, scales = kept_as(torch.tensor([-3.0, 2.9999, 0.0]), state, True)
    back = reference.decode(codes, scales, 3, bits, True)
    assert scales == -3 and back[0] == -3 and back[1] == -3 * reference.code_values(bits, True)[0] and back[2] == 0


@pytest.mark.parametrize("state", ["8bit", "4bit"])
def test_blocks_that_are_zero_or_not_finite(state):
    x = torch.randn(1300)
    x[256:512] = 0
    x[600], x[1100] = torch.inf, torch.nan
    codes, scales = kept_as(x, state, True)
    wanted, wanted_scales = reference.encode(x, int(state[0]), True)
    torch.testing.assert_close(scales, wanted_scales, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(scales.isnan(), torch.tensor([False, False, True, False, True, False])) and scales[1] == 0
    back = reference.decode(codes, scales, 1300, int(state[0]), True)
    assert (back[256:512] == 0).all() and back[512:768].isnan().all() and not back[:512].isnan().any()
    assert torch.equal(codes[:128], wanted[:128])


# ---- parameter formats


def test_a_remainder_makes_a_master():
    rows = draw_rows(ADAM, F32, BF16, sizes=(5000, 61))
    halves = [
        reference.new_row(None, r.grad, ADAM, [s.clone() for s in r.states], F32, 3, master=r.param) for r in rows
    ]
    for _ in range(3):
        run(rows, ADAM, RATES)
        run(halves, ADAM, RATES)
    for a, b in zip(rows, halves, strict=True):
        assert b.param.dtype == BF16
        assert torch.equal(reference.join(b.param, b.remainder), a.param)
        assert torch.equal(reference.split(a.param)[0], b.param)


def test_a_remainder_of_what_is_not_finite():
    given = torch.tensor([torch.nan, 3.4028234e38, -3.4028234e38, -0.0, 1e-45])
    row = reference.new_row(None, torch.zeros(5), SGD, [torch.zeros(5)], master=given)
    run([row], SGD, {"lr": 0.0})
    torch.testing.assert_close(reference.join(row.param, row.remainder), given, rtol=0, atol=0, equal_nan=True)
    assert row.param[0].isnan()


@pytest.mark.parametrize("param", [BF16, F16], ids=str)
@pytest.mark.parametrize("state", [F32, BF16, "8bit"], ids=str)
def test_stochastic_rounding(param, state):
    seed, offset = 0x123456789ABCDEF, (1 << 32) - 5
    rows = draw_rows(ADAM, param, BF16, state, (9001, 9, 4096))
    rows[0].param[:4] = torch.tensor([torch.inf, torch.nan, 1e-6, 0.0])
    wide = copies(rows)
    for row in wide:
        row.param = row.param.float()
    run(rows, ADAM, RATES, seed=seed, offset=offset)
    run(wide, ADAM, RATES)
    first = 0
    for a, b in zip(rows, wide, strict=True):
        wanted = reference.round_stochastically(
            b.param, param, reference.random_halves(seed, offset, len(b.param), first)
        )
        torch.testing.assert_close(a.param, wanted, rtol=0, atol=0, equal_nan=True)
        assert a.param.numel() < 99 or not torch.equal(wanted.nan_to_num(), b.param.to(param).nan_to_num())
        first += -(-a.param.numel() // TILE)


@pytest.mark.parametrize("how", ["nearest", "master", "stochastic", F32, F64], ids=str)
def test_ema(how):
    param = how if isinstance(how, torch.dtype) else BF16
    rows = draw_rows(SGD, param, param, sizes=(5000,), ema=torch.randn(5000))
    if how == "master":
        rows[0].param, rows[0].remainder = reference.split(torch.randn(5000))
    got = copies(rows)
    run(got, SGD, RATES, ema_decay=0.75, seed=5 if how == "stochastic" else -1)
    kept = got[0].param.float() if how != "master" else reference.join(got[0].param, got[0].remainder)
    torch.testing.assert_close(got[0].ema, rows[0].ema + 0.25 * (kept - rows[0].ema), rtol=1e-6, atol=1e-7)


def test_refusals():
    rows = draw_rows(SGD, sizes=(10,))
    table, owner = reference.table(rows)
    numbers, control = reference.hyper(RATES), reference.control()
    with pytest.raises(ValueError, match="rows must have the shape"):
        op.prepare(table[:, :-1].contiguous(), owner, control, None, 1)
    with pytest.raises(ValueError, match="owner must be int32"):
        op.update(table, owner.long(), numbers, control, None, SGD, -1.0, -1, 0, 1)
    with pytest.raises(ValueError, match="hyper must be float64"):
        op.update(table, owner, numbers.float(), control, None, SGD, -1.0, -1, 0, 1)
    with pytest.raises(ValueError, match="squares must have the shape"):
        op.prepare(table, owner, control, torch.zeros(2, dtype=F64), 1)
    with pytest.raises(ValueError, match="needs rule"):
        op.update(table, owner, numbers, control, None, 3, -1.0, -1, 0, 1)
