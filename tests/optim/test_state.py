"""States and their transfer: torch's state dicts in both directions, files, pickles, copies, formats, and bytes."""

import copy
import io
import pickle

import pytest
import torch

import hfnn
from hfnn.optim import formats

from . import reference_step as reference

OPTIMIZERS = (
    ("AdamW", {}), ("AdamW", {"amsgrad": True}), ("Adam", {}), ("SGD", {}), ("SGD", {"momentum": 0.9}),
    ("AdamW", {"capturable": False, "fused": True}),
)  # fmt: skip
SHAPES = ((), (3,), (70, 70), (0,), (2, 8, 4, 4))


def params(dtype=torch.float32, shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    made = [x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x for x in made]
    return [x.requires_grad_() for x in made]


def train(optimizer, steps=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))
        optimizer.step()


def through_file(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(a, b, path=""):
    assert type(a) is type(b), (path, type(a), type(b))
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, pair in enumerate(zip(a, b, strict=True)):
            same(*pair, f"{path}.{i}")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.device == b.device and torch.equal(a, b), path
        assert a.shape == b.shape and (a.numel() < 2 or a.stride() == b.stride()), path
    else:
        assert a == b, path


@pytest.mark.parametrize("way", ["direct", "file"])
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_round_trip_with_torch(name, options, way):
    """torch -> hfnn -> torch and hfnn -> torch -> hfnn: bitwise the same, with keys and strides."""
    travel = through_file if way == "file" else copy.deepcopy
    ours, theirs = getattr(hfnn.optim, name), getattr(torch.optim, name)
    for first, second in ((theirs, ours), (ours, theirs)):
        source = first(params(), **options)
        train(source)
        given = travel(source.state_dict())
        middle = second(params(), **options)
        middle.load_state_dict(travel(given))
        same(middle.state_dict(), given)
        last = first(params(), **options)
        last.load_state_dict(travel(middle.state_dict()))
        same(last.state_dict(), given)


@pytest.mark.parametrize(("name", "options"), [*OPTIMIZERS, ("Lion", {}), ("AdamW", {"state_dtype": "8bit"}),
                                               ("AdamW", {"state_dtype": "4bit"}), ("Lion", {"state_dtype": "4bit"}),
                                               ("AdamW", {"ema_decay": 0.9, "amsgrad": True})])  # fmt: skip
@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle", "save"])
def test_goes_on_the_same(name, options, way):
    """A copy continues like the original, bit for bit."""
    a = params()
    optimizer = getattr(hfnn.optim, name)(a, lr=0.01, **options)
    train(optimizer)
    if way == "state_dict":
        b = [x.detach().clone().requires_grad_() for x in a]
        other = getattr(hfnn.optim, name)(b, lr=0.01, **options)
        other.load_state_dict(through_file(optimizer.state_dict()))
    elif way == "deepcopy":
        other = copy.deepcopy(optimizer)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(optimizer))
    else:
        file = io.BytesIO()
        torch.save(optimizer, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    b = other.param_groups[0]["params"]
    assert type(other) is type(optimizer) and other.state_dtype == optimizer.state_dtype
    train(optimizer, seed=2), train(other, seed=2)
    assert optimizer._ran == other._ran == ("cpp",)
    assert all(torch.equal(x, y) and x is not y for x, y in zip(a, b, strict=True))
    same(optimizer.state_dict(), other.state_dict())


def test_steps_are_apart():
    """On a GPU a step is a view of shared memory, which neither a state dict nor a pickle includes."""
    optimizer = hfnn.optim.AdamW([torch.ones(2, requires_grad=True) for _ in range(1000)])
    train(optimizer, 1)
    assert all(s["step"].untyped_storage().nbytes() == 4 for s in optimizer.state_dict()["state"].values())
    assert len(pickle.dumps(optimizer)) < 3 * len(pickle.dumps(torch.optim.AdamW(params()))) + 3_000_000


@pytest.fixture(params=[torch.float32, torch.float64])
def default_dtype(request):
    """With float64 a state dict cannot have the tensors in which kernels count, as on a GPU."""
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(torch.float32)


def _loaded_twice(optimizer):
    """The same dict again, after steps that write to its tensors."""
    train(optimizer, 3)
    state = optimizer.state_dict()
    for _ in range(2):
        optimizer.load_state_dict(state)
        train(optimizer, 2)
    return optimizer.state_dict()


def _loaded_by_two(optimizer):
    """Two optimizers with one dict share its tensors."""
    train(optimizer, 2)
    other = type(optimizer)(params(seed=1), lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    train(other, 2), train(optimizer, 1)
    return other.state_dict(), optimizer.state_dict()


def steps_of(found) -> list:
    found = found if isinstance(found, tuple) else (found,)
    return [s["step"].item() for each in found for s in each["state"].values() if "step" in s]


@pytest.mark.parametrize("use", [_loaded_twice, _loaded_by_two])
@pytest.mark.parametrize("name, options", OPTIMIZERS)
def test_a_dict_in_memory_shares_its_tensors(name, options, use, default_dtype):
    stock, ours = (use(getattr(lib, name)(params(), lr=0.1, **options)) for lib in (torch.optim, hfnn.optim))
    assert steps_of(stock) == steps_of(ours)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (stock, ours)), strict=True):
        for key, values in a["state"].items():
            for each, value in values.items():
                torch.testing.assert_close(b["state"][key][each], value, msg=f"{key} {each}")


@pytest.mark.parametrize("state_dtype", ["8bit", "4bit"])
def test_a_dict_of_low_bit_states_shares_its_counts(state_dtype, default_dtype):
    for use in (_loaded_twice, _loaded_by_two):
        ours = hfnn.optim.AdamW(params(), lr=0.1, state_dtype=state_dtype)
        assert steps_of(use(ours)) == steps_of(use(torch.optim.AdamW(params(), lr=0.1)))


def test_a_dict_from_before_convert_shares_its_counts(default_dtype):
    counts = []
    for convert in (lambda o: o, hfnn.convert):
        optimizer = torch.optim.AdamW(params(), lr=0.1)
        train(optimizer, 2)
        state = optimizer.state_dict()
        convert(optimizer)
        train(optimizer, 2)
        optimizer.load_state_dict(state)
        train(optimizer, 1)
        counts.append(steps_of(optimizer.state_dict()))
    assert counts[0] == counts[1] == [5.0] * len(counts[0])


@pytest.mark.parametrize("kernel", ["cpp", "torch"])
def test_float32_states_of_bfloat16(kernel):
    """They lose no bits; torch's own load would cast them."""
    with hfnn.use(kernel):
        optimizer = hfnn.optim.AdamW(params(torch.bfloat16), state_dtype=torch.float32)
        train(optimizer)
        for options in ({}, {"state_dtype": torch.float32}):
            other = hfnn.optim.AdamW(params(torch.bfloat16), **options)
            other.load_state_dict(through_file(optimizer.state_dict()))
            for p, q in zip(*(o.param_groups[0]["params"] for o in (optimizer, other)), strict=True):
                q.data.copy_(p)
            train(other, 1, seed=5)
            assert all(s["exp_avg"].dtype is torch.float32 for s in other.state.values())
        half = hfnn.optim.AdamW(params(torch.bfloat16))
        train(half)
        assert all(s["exp_avg"].dtype is torch.bfloat16 for s in half.state.values())


@pytest.mark.parametrize("format", formats.LOW)
def test_low_bits(format):
    """Codes and scales; state dicts have float32, which gives the same codes again. Small states stay float32."""
    a = params(shapes=((70, 70), (63, 65), (2, 64, 16, 16)))
    optimizer = hfnn.optim.AdamW(a, state_dtype=format, amsgrad=True)
    train(optimizer)
    state = optimizer.state[a[0]]
    assert state["exp_avg"].dtype is torch.uint8
    assert state["exp_avg"].shape == ((4900,) if format == "8bit" else (2450,))
    assert state["exp_avg_scale"].shape == (-(-4900 // 256),) and state["exp_avg_scale"].dtype is torch.float32
    assert optimizer.state[a[1]]["exp_avg"].dtype is torch.float32  # fewer than 4096 elements
    given = through_file(optimizer.state_dict())
    assert given["state"][2]["exp_avg"].stride() == a[2].stride()
    plain = torch.optim.AdamW([x.detach().clone().requires_grad_() for x in a], amsgrad=True)
    plain.load_state_dict(given)
    plain_state = plain.state_dict()["state"]
    assert all(plain_state[i].keys() == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"} for i in range(3))
    other = hfnn.optim.AdamW(params(shapes=((70, 70), (63, 65), (2, 64, 16, 16))), state_dtype=format, amsgrad=True)
    other.load_state_dict(given)
    for x, y in zip(a, other.param_groups[0]["params"], strict=True):
        same({**optimizer.state[x], "step": None}, {**other.state[y], "step": None})


@pytest.mark.parametrize("format", formats.LOW)
@pytest.mark.parametrize("signed", [True, False])
def test_formats(format, signed):
    """Bitwise the definition's values; NaN for non-finite numbers; encoding and decoding are inverse."""
    table = formats.values(format, signed)
    bits = int(format[0])
    assert torch.equal(table.double(), reference.code_values(bits, signed)) and (table.diff() > 0).all()
    assert len(table) == 2**bits and table[-1] == 1 and (signed == (table == 0).any())
    for n in (0, 1, 255, 256, 257, 5001):
        x = torch.randn(n) * torch.randn(n).exp()
        x = x if signed else x.abs()
        codes, scale = formats.encode(x, format, signed)
        wanted = reference.encode(x, bits, signed)
        assert torch.equal(codes, wanted[0]) and torch.equal(scale, wanted[1])
        found = formats.decode(codes, scale, n, format, signed)
        again = formats.encode(found, format, signed)
        assert torch.equal(again[0], codes) and torch.equal(again[1], scale)
    for wrong in (torch.nan, torch.inf, -torch.inf):
        x = torch.ones(600)
        x[300] = wrong
        found = formats.decode(*formats.encode(x, format, signed), 600, format, signed)
        assert found[256:512].isnan().all() and (found[:256] == 1).all() and (found[512:] == 1).all()
    zeros = formats.decode(*formats.encode(torch.zeros(300), format, signed), 300, format, signed)
    assert (zeros == 0).all()


@pytest.mark.parametrize("format", formats.LOW)
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("scale", [1.0, -1.0, 3.7e10, -2.3e-20, 3.4e38, 1e-30])
def test_the_nearest_code(format, signed, scale):
    """Every value is used, and m is the nearest to the inverse of value, which is smooth between the values."""
    bits = int(format[0])
    scale = scale if signed else abs(scale)
    values, (top, zero) = reference.code_values(bits, signed), reference.code_layout(bits, signed)
    for block in reference.code_samples(bits, signed, scale):
        codes, found = formats.encode(block, format, signed)
        assert found == torch.tensor(scale)
        if bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], 1).flatten()[: block.numel()]
        share = block.double() / found.double()
        exact = reference.inverse_lb(top + reference.lb(share.abs()) / 3).copysign(share) * (share != 0)
        exact = exact.clamp(min=-zero)
        assert ((codes.long() - zero - exact).abs() <= 0.5 + 1e-4).all()
        above = torch.searchsorted(values, share).clamp(max=2**bits - 1)
        assert ((codes == above) | (codes == above - 1) | (values[codes.int()] == share)).all()
        again = formats.encode(formats.decode(*formats.encode(block, format, signed), len(block), format, signed),
                               format, signed)  # fmt: skip
        assert torch.equal(again[1], found) and torch.equal(again[0], formats.encode(block, format, signed)[0])


@pytest.mark.parametrize("format", formats.LOW)
@pytest.mark.parametrize("signed", [True, False])
def test_every_code_comes_back(format, signed):
    """From 2^-100, below which a block becomes 0, to the largest number, with both signs."""
    count = len(formats.values(format, signed))
    every = torch.arange(count, dtype=torch.uint8)
    codes = every if format == "8bit" else every[::2] | every[1::2] << 4
    for power in range(-100, 128):
        for factor in (1.0, 1.0 + 2**-23, 1.37, 2.0 - 2**-23):
            for sign in (1, -1) if signed else (1,):
                scale = torch.tensor([sign * factor * 2.0**power])
                found = formats.encode(formats.decode(codes, scale, count, format, signed), format, signed)
                assert torch.equal(found[0], codes) and torch.equal(found[1], scale)
    assert formats.encode(torch.tensor([2.0**-100, -(2.0**-101)]), format, True)[1] == 2.0**-100
    assert formats.encode(torch.tensor([-0.99 * 2.0**-100, 1e-40]), format, signed)[1] == 0


def test_split_and_join():
    x = torch.cat(
        (torch.randn(10000) * torch.randn(10000).exp(), torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-40]))
    )
    parameter, remainder = formats.split(x)
    assert torch.equal(formats.join(parameter, remainder).view(torch.int32), x.view(torch.int32))
    # To nearest; ties to the larger magnitude.
    assert ((parameter.double() - x) / x).nan_to_num().abs()[:10000].max() <= 2**-8
    assert formats.split(torch.tensor([torch.nan]))[0].isnan()
    half = torch.tensor([0x3F808000, 0x3F818000], dtype=torch.int32).view(torch.float32)
    assert formats.split(half)[0].view(torch.int16).tolist() == [0x3F81, 0x3F82]


def test_format_may_change():
    """A state continues in the format that is requested now."""
    a = params(shapes=((70, 70),))
    optimizer = hfnn.optim.AdamW(a)
    train(optimizer)
    before = optimizer.state[a[0]]["exp_avg"].clone()
    for format, dtype in (("8bit", torch.uint8), ("4bit", torch.uint8), (torch.bfloat16,) * 2, (torch.float32,) * 2):
        optimizer.configure(state_dtype=format)
        train(optimizer, 1)
        assert optimizer.state[a[0]]["exp_avg"].dtype is dtype
        assert ("exp_avg_scale" in optimizer.state[a[0]]) == (dtype is torch.uint8)
    assert optimizer.state[a[0]]["step"] == 7 and not torch.equal(before, optimizer.state[a[0]]["exp_avg"])


def test_replaced_states_are_seen():
    """States that were removed or replaced are used as they are at the next step."""
    a, b = params(), params()
    optimizer, fresh = hfnn.optim.AdamW(a, lr=0.1), hfnn.optim.AdamW(b, lr=0.1)
    train(optimizer)
    for x, y in zip(a, b, strict=True):
        y.data.copy_(x)
    optimizer.state.clear()
    train(optimizer, 1), train(fresh, 1)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    optimizer.state[a[1]] = {}
    fresh.state[b[1]] = {}
    train(optimizer, 1), train(fresh, 1)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_moved_data_is_seen():
    """`.data` in new memory, and a parameter in another's place."""
    a, b = params(), params()
    optimizer, other = hfnn.optim.AdamW(a, lr=0.1), torch.optim.AdamW(b, lr=0.1)
    train(optimizer), train(other)
    old = a[2].data
    kept = old.clone()
    a[2].data = old.clone()
    train(optimizer), train(other)
    assert torch.equal(old, kept)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_stochastic_rounding_goes_on():
    """With torch's random state saved beside the state dict, as documented."""
    a = params(torch.bfloat16)
    optimizer = hfnn.optim.AdamW(a, lr=1e-4, stochastic_rounding=True)
    train(optimizer)
    saved, state, random = [x.detach().clone() for x in a], copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()
    train(optimizer)
    b = [x.requires_grad_() for x in saved]
    other = hfnn.optim.AdamW(b, lr=1e-4, stochastic_rounding=True)
    other.load_state_dict(state)
    torch.set_rng_state(random)
    train(other)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_sgd_without_momentum_keeps_nothing():
    optimizer = hfnn.optim.SGD(params(), lr=0.1, max_grad_norm=1.0)
    train(optimizer)
    assert not optimizer.state and not optimizer.state_dict()["state"] and optimizer._ran == ("cpp",)


def test_memory():
    n = 64 * 1024
    p = [torch.zeros(n, dtype=torch.bfloat16, requires_grad=True)]
    optimizer = hfnn.optim.AdamW(p, state_dtype="8bit", master="remainder", ema_decay=0.99)
    train(optimizer, 1)
    found = optimizer.memory()
    wanted = {"parameter": 2 * n, "gradient": 2 * n, "exp_avg": n, "exp_avg_sq": n, "scales": 2 * 4 * n // 256,
              "remainder": 2 * n, "ema": 4 * n, "step": 4}  # fmt: skip
    assert {**found, "total": 0} == {**wanted, "total": 0} and found["total"] == sum(wanted.values())
    assert "1.000" in str(found) and "total" in str(found)
    kept = sum(t.untyped_storage().nbytes() for t in optimizer.state[p[0]].values())
    assert kept == found["total"] - 4 * n


def test_isinstance_and_repr():
    p = params()
    for name in ("AdamW", "Adam", "SGD"):
        ours, theirs = getattr(hfnn.optim, name)(p), getattr(torch.optim, name)(p)
        assert isinstance(ours, getattr(torch.optim, name)) and repr(ours) == repr(theirs)
        assert ours.defaults == theirs.defaults and ours._step_supports_amp_scaling
