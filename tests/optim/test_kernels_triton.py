"""The Triton kernels of a step, against csrc/optim.h in plain torch (reference_step.py)."""

import importlib
import os
import pathlib
import re

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
triton = pytest.importorskip("triton")
from . import reference_step as reference  # noqa: E402
from .reference_step import ADAM, AMSGRAD, DECOUPLED, FORMATS, LION, MAXIMIZE, SGD  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
HEADER = pathlib.Path(__file__).parents[2] / "csrc" / "optim.h"
op = importlib.import_module("hfnn.kernels.optim")
formats = importlib.import_module("hfnn.kernels.optim_formats")

SIZES = 5000, 1, 255, 4096
STATES = {ADAM: 2, SGD: 1, LION: 1}
RATES = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}


def draw_rows(rule, param=F32, grad=F32, state=F32, sizes=SIZES, seed=0, amsgrad=False, **given):
    torch.manual_seed(seed)
    rows = []
    for n in sizes:
        # Squares so large that dividing by their root does not amplify a gradient's rounding.
        states = [torch.randn(n) * 0.1, *(torch.rand(n) * 0.1 + 0.01 for _ in range(STATES[rule] - 1 + amsgrad))]
        # Small tensors are not stored as codes.
        kept = F32 if isinstance(state, str) and n < 4096 else state
        rows.append(
            reference.new_row(torch.randn(n).to(param), torch.randn(n).to(grad), rule, states, kept, 3, **given)
        )
    return rows


def features(rows, amsgrad=False):
    codes = {FORMATS[r.param.dtype] | FORMATS[r.grad.dtype] << 4 | FORMATS[r.state_format] << 8 for r in rows}
    return op.Features(tuple(sorted(codes)), amsgrad, *(any(x is not None for x in xs) for xs in (
        [r.remainder for r in rows], [r.ema for r in rows])))  # fmt: skip


def run(rows, rule, numbers, control=None, clip=False, ema_decay=-1.0, seed=-1, offset=0):
    """One step of the rows with the kernels, in place; returns control after it."""
    table, owner = reference.table(rows)
    control = (reference.control() if control is None else control).to(DEVICE)
    numbers = (numbers if torch.is_tensor(numbers) else reference.hyper(numbers)).to(DEVICE)
    squares = None
    if clip:
        squares = torch.full((op.partials(owner.numel()),), torch.nan, dtype=F64, device=DEVICE)
    op.prepare(table, owner, control, squares, 0)
    amsgrad = bool((numbers[:, 5].long() & AMSGRAD).any())
    op.update(table, owner, numbers, control, squares, rule, ema_decay, seed, offset, 0, features(rows, amsgrad))
    return control.cpu()


def on_device(rows):
    return [row.clone().to(DEVICE) for row in rows]


def exactly(rows):
    """The same rows with float64 parameters and float states, so that the reference does not round."""
    rows = [row.clone() for row in rows]
    for row in rows:
        row.param = row.param.double()
        if isinstance(row.state_format, torch.dtype):
            row.states, row.state_format = tuple(s.double() for s in row.states), F64
    return rows


def close(got, exact, size, dtype):
    """Whether got equals exact, rounded to dtype, with an error of up to 4 roundings of a float32 of size `size`."""
    got, error = got.cpu().double(), 4 * 2**-24 * size.double().abs()
    if dtype != F32:
        spacing = {BF16: 2.0**-8, F16: 2.0**-11}[dtype]
        error = error + exact.abs() * spacing + 2.0**-25 * (dtype == F16)
    return bool(((got - exact).abs() <= error).all())


def check(got, before, exact, rule):
    """Compares rows stepped by the kernels with rows of `exactly` stepped by the reference."""
    for row, old, wanted in zip(got, before, exact, strict=True):
        size = old.param.double().abs() + wanted.param.abs() + 0.1
        assert close(row.param, wanted.param, size, row.param.dtype)
        assert row.step.item() == wanted.step.item()
        for k, state in enumerate(row.states):
            if isinstance(row.state_format, torch.dtype):
                size = wanted.states[k].abs() + old.grad.double().abs() + old.param.double().abs()
                assert close(state, wanted.states[k], size, state.dtype)
                continue
            # A number almost halfway between two codes may go either way.
            torch.testing.assert_close(row.scales[k].cpu(), wanted.scales[k], rtol=1e-6, atol=0)
            assert (state.cpu() != wanted.states[k]).double().mean() < 1e-3


@pytest.mark.parametrize("rule", [ADAM, SGD, LION])
@pytest.mark.parametrize("state", [F32, "8bit", "4bit"], ids=str)
@pytest.mark.parametrize("param, grad", [(F32, F32), (BF16, BF16), (F16, F32), (F32, BF16)], ids=str)
def test_step(rule, state, param, grad):
    rows = draw_rows(rule, param, grad, state)
    numbers = RATES | {"options": DECOUPLED if rule == ADAM else 0}
    got, exact = on_device(rows), exactly(rows)
    run(got, rule, numbers)
    reference.prepare(exact, reference.control())
    reference.update(exact, reference.hyper(numbers), reference.control(), None, rule)
    check(got, rows, exact, rule)


@pytest.mark.parametrize("rule, options, numbers", reference.OPTIONS)
@pytest.mark.parametrize("state", [F32, "8bit", BF16], ids=str)
def test_options(rule, options, numbers, state):
    rows = draw_rows(rule, state=state, sizes=(4096, 77), amsgrad=bool(options & AMSGRAD))
    rows[1].first = rule == SGD
    numbers = {**RATES, "options": options, **numbers}
    got, exact = on_device(rows), exactly(rows)
    run(got, rule, numbers)
    reference.prepare(exact, reference.control())
    reference.update(exact, reference.hyper(numbers), reference.control(), None, rule)
    check(got, rows, exact, rule)


def test_groups_and_formats_in_one_table():
    one = draw_rows(ADAM, BF16, BF16, "8bit", sizes=(9000, 0, 100))
    two = draw_rows(ADAM, F32, F32, "4bit", sizes=(4097, 3), seed=1, group=1)
    rows = [one[0], two[0], one[1], two[1], one[2]]
    numbers = reference.hyper(RATES, {**RATES, "lr": 0.5, "options": AMSGRAD * 0 | MAXIMIZE})
    got, exact = on_device(rows), exactly(rows)
    run(got, ADAM, numbers)
    reference.prepare(exact, reference.control())
    reference.update(exact, numbers, reference.control(), None, ADAM)
    check(got, rows, exact, ADAM)


@pytest.mark.parametrize("step", [0, 1, 1000, 1 << 22])
def test_powers_of_a_count(step):
    rows = draw_rows(ADAM, sizes=(4096,))
    rows[0].step.fill_(step)
    numbers = {**RATES, "beta2": 0.999999}
    got, exact = on_device(rows), exactly(rows)
    run(got, ADAM, numbers)
    reference.prepare(exact, reference.control())
    reference.update(exact, reference.hyper(numbers), reference.control(), None, ADAM)
    check(got, rows, exact, ADAM)


# ---- clipping and infinite gradients


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("grad", [F32, BF16, F16], ids=str)
def test_clipping_and_scale(max_norm, grad):
    rows = draw_rows(ADAM, grad=grad, sizes=(9001, 1, 4096))
    control = reference.control(grad_scale=8.0, max_norm=max_norm)
    got, exact = on_device(rows), exactly(rows)
    after = run(got, ADAM, RATES, control, clip=True)
    squares = reference.prepare(exact, control, 1)
    reference.update(exact, reference.hyper(RATES), control, squares, ADAM)
    assert after[3].item() == pytest.approx(squares.sqrt().item(), rel=1e-6)
    check(got, rows, exact, ADAM)
    for row, old in zip(got, rows, strict=True):
        assert torch.equal(row.grad.cpu(), old.grad)


def test_a_norm_that_is_not_finite():
    for bad in (torch.nan, torch.inf):
        rows = draw_rows(SGD, sizes=(10,))
        rows[0].grad[3] = bad
        got = on_device(rows)
        after = run(got, SGD, {"lr": 1.0}, reference.control(max_norm=1.0), clip=True)
        assert not after[3].isfinite()
        assert got[0].param[3].isnan()
        assert got[0].param.isnan().all() == (bad != torch.inf)  # as in clip_grad_norm_: an infinity makes all others 0


def test_nothing_moves_where_something_was_infinite():
    rows = draw_rows(ADAM, BF16, BF16, "8bit", ema=torch.zeros(4096), sizes=(4096,))
    got = on_device(rows)
    run(got, ADAM, RATES, reference.control(found_inf=1.0, max_norm=1.0), clip=True, ema_decay=0.9)
    for name in ("param", "ema", "step"):
        assert torch.equal(getattr(got[0], name).cpu(), getattr(rows[0], name))
    for name in ("states", "scales"):
        for a, b in zip(getattr(got[0], name), getattr(rows[0], name), strict=True):
            assert torch.equal(a.cpu(), b)


def test_squares_add_up_over_more_tiles_than_partials():
    tiles = op.partials(1 << 30) + 7
    assert op.partials(0) == 1 and op.partials(5) == 5 and op.partials(tiles) < tiles
    rows = [reference.Row(x, x, step=torch.zeros(())) for x in torch.randn(tiles, 1, device=DEVICE)]
    for row in rows:
        row.step = row.step.to(DEVICE)
    table, owner = reference.table(rows)
    control = reference.control().to(DEVICE)
    sums = [torch.full((op.partials(tiles),), torch.nan, dtype=F64, device=DEVICE) for _ in range(2)]
    for squares in sums:
        op.prepare(table, owner, control, squares, 0)
    assert torch.equal(*sums)
    exact = sum(row.grad.double().square().sum() for row in rows)
    assert sums[0].sum().item() == pytest.approx(exact.item(), rel=1e-6)
    assert all(row.step == 2 for row in rows)


def test_an_empty_table():
    rows = draw_rows(SGD, sizes=(0,))
    after = run(on_device(rows), SGD, RATES, reference.control(max_norm=1.0), clip=True)
    assert after[3] == 0


# ---- layout and formats of the numbers


@pytest.mark.parametrize("param, state", [(F32, F32), (BF16, BF16), (BF16, "8bit"), (F32, "4bit")], ids=str)
def test_addresses_of_any_alignment(param, state):
    rows = draw_rows(ADAM, param, param, state, sizes=(9000,))

    def shifted(x):
        moved = torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE)[1:]
        return moved.copy_(x)

    plain, moved = on_device(rows), on_device(rows)
    for row in moved:
        row.param, row.grad = shifted(row.param), shifted(row.grad)
        row.states, row.scales = tuple(map(shifted, row.states)), tuple(map(shifted, row.scales))
        assert row.param.data_ptr() % 16 and not plain[0].param.data_ptr() % 16
    run(plain, ADAM, RATES)
    run(moved, ADAM, RATES)
    a, b = plain[0], moved[0]
    for x, y in zip((a.param, *a.states, *a.scales), (b.param, *b.states, *b.scales), strict=True):
        assert torch.equal(x, y)


def test_a_remainder_makes_a_master():
    rows = draw_rows(ADAM, F32, BF16, sizes=(5000, 60))
    halves = [
        reference.new_row(None, r.grad, ADAM, [s.clone() for s in r.states], F32, 3, master=r.param) for r in rows
    ]
    whole, halves = on_device(rows), on_device(halves)
    for _ in range(3):
        run(whole, ADAM, RATES)
        run(halves, ADAM, RATES)
    for a, b in zip(whole, halves, strict=True):
        assert b.param.dtype == BF16
        assert torch.equal(reference.join(b.param.cpu(), b.remainder.cpu()), a.param.cpu())
        assert (b.param.float() - a.param).abs().max() <= a.param.abs().max() * 2**-8


def test_a_remainder_of_what_is_not_finite():
    given = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4028234e38, -0.0, 1e-45])
    row = reference.new_row(None, torch.zeros(6), SGD, [torch.zeros(6)], master=given)
    got = on_device([row])
    run(got, SGD, {"lr": 0.0})
    master = reference.join(got[0].param.cpu(), got[0].remainder.cpu())
    # 0 times infinity is NaN: a learning rate of 0 still multiplies its decay.
    torch.testing.assert_close(master[2:], given[2:], rtol=0, atol=0, equal_nan=True)
    assert got[0].param[2].isnan() and not master[:2].isfinite().any()


@pytest.mark.parametrize("param", [BF16, F16], ids=str)
@pytest.mark.parametrize("state", [F32, BF16, "8bit"], ids=str)
def test_stochastic_rounding(param, state):
    seed, offset = 0x123456789ABCDEF, (1 << 32) - 5
    rows = draw_rows(ADAM, param, BF16, state, sizes=(5000, 9, 4096))
    rows[0].param[:4] = torch.tensor([torch.inf, torch.nan, 1e-6, 0.0])
    wide = [row.clone() for row in rows]
    for row in wide:
        row.param = row.param.float()
    got, wide = on_device(rows), on_device(wide)
    run(got, ADAM, RATES, seed=seed, offset=offset)
    run(wide, ADAM, RATES)
    first = 0
    for a, b in zip(got, wide, strict=True):
        halves = reference.random_halves(seed, offset, a.param.numel(), first)
        wanted = reference.round_stochastically(b.param.cpu(), param, halves)
        torch.testing.assert_close(a.param.cpu(), wanted, rtol=0, atol=0, equal_nan=True)
        assert a.param.numel() < 99 or not torch.equal(wanted, b.param.cpu().to(param))
        first += -(-a.param.numel() // reference.TILE)


@pytest.mark.parametrize("master", [False, True])
def test_ema(master):
    rows = draw_rows(SGD, BF16, BF16, sizes=(5000,), ema=torch.randn(5000))
    if master:
        rows[0].param, rows[0].remainder = reference.split(torch.randn(5000))
    got = on_device(rows)
    run(got, SGD, RATES, ema_decay=0.75)
    kept = got[0].param.cpu().float()
    if master:
        kept = reference.join(got[0].param.cpu(), got[0].remainder.cpu())
    torch.testing.assert_close(got[0].ema.cpu(), rows[0].ema + 0.25 * (kept - rows[0].ema), rtol=1e-6, atol=1e-7)


# ---- the contract


def test_the_table_is_the_headers():
    text = HEADER.read_text()
    assert int(re.search(r"kTile = (\d+)", text)[1]) == op.TILE.value == reference.TILE
    assert int(re.search(r"kBlock = (\d+)", text)[1]) == formats.BLOCK.value == reference.BLOCK

    def enumerators(name):
        """The values of an enum of the header, by the kernels' names."""
        values, value = {}, 0
        for entry in re.search(rf"enum {name} {{(.*?)}}", text, re.DOTALL)[1].split(","):
            key, _, given = entry.strip().partition(" = ")
            value = values[given] if given in values else int(given) if given else value
            values[key] = value
            value += 1
        return {re.sub(r"(?<!^)(?=[A-Z])", "_", key[1:]).upper(): value for key, value in values.items()}

    for name in ("Column", "Hyper", "Options", "Flags", "Control", "Rule"):
        for key, value in enumerators(name).items():
            if key not in ("CONTROL", "MOMENTUM", "DAMPENING"):
                assert getattr(op, key).value == value, key
    for key, value in enumerators("Format").items():
        if key != "FLOAT64":
            assert getattr(formats, {"INT8": "INT8", "INT4": "INT4"}.get(key, key)).value == value
