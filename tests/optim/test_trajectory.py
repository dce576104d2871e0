"""The same parameters as torch.optim's classes, over many steps and all options; and which kernel ran."""

import contextlib
import copy

import pytest
import torch

import hfnn

INTERPRETED = pytest.param("triton", marks=pytest.mark.interpreted)

SHAPES = ((), (3,), (70, 70), (0,), (2, 3, 4, 5), (1,), (4097,))
ADAM = (
    {}, {"amsgrad": True}, {"maximize": True}, {"weight_decay": 0.1}, {"betas": (0.5, 0.6)}, {"eps": 1e-3}, {"lr": 0.1},
    {"amsgrad": True, "maximize": True, "weight_decay": 0.3, "foreach": False},
    {"betas": (0.0, 0.9), "fused": True}, {"weight_decay": 0.0}, {"lr": torch.tensor(0.01, dtype=torch.float64)},
)  # fmt: skip
SGD = (
    {}, {"lr": 0.1}, {"momentum": 0.9}, {"weight_decay": 0.1}, {"maximize": True, "momentum": 0.5, "weight_decay": 0.2},
    {"momentum": 0.9, "dampening": 0.5}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"lr": torch.tensor(0.01, dtype=torch.float64), "momentum": 0.9},
)  # fmt: skip
CASES = [(name, kw) for name in ("AdamW", "Adam") for kw in ADAM] + [("SGD", kw) for kw in SGD]
IDS = [f"{name}-{i}" for i, (name, _) in enumerate(CASES)]


class Lion(torch.optim.Optimizer):
    """The paper's algorithm 2, line for line."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, maximize=False):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (b1, b2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                g = -p.grad if group["maximize"] else p.grad
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                c = b1 * m + (1 - b1) * g
                p.copy_(p - lr * (c.sign() + group["weight_decay"] * p))
                m.copy_(b2 * m + (1 - b2) * g)


def params(dtype=torch.float64, shapes=SHAPES):
    made = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    return [[x.to(dtype, copy=True).requires_grad_() for x in made] for _ in range(2)]


def give(a, b, skip=()):
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        g = None if i in skip else torch.randn(x.shape, dtype=torch.float64)
        x.grad, y.grad = (None if g is None else g.to(z.dtype) for z in (x, y))


def check(a, b, tolerance=1e-12):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
@pytest.mark.parametrize("scheduled", [False, True])
def test_float64(name, options, scheduled):
    """200 steps over two groups; one parameter at times without a gradient, one frozen, one added on the way."""
    a, b = params()
    plain = {k: v for k, v in options.items() if k not in ("foreach", "fused")}
    optimizers, schedulers = [], []
    for cls, x, kw in ((getattr(hfnn.optim, name), a, options), (getattr(torch.optim, name), b, plain)):
        kw = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in kw.items()}
        optimizers.append(cls([{"params": x[:3]}, {"params": x[3:-1], "lr": 0.02, "weight_decay": 0.05}], **kw))
        if scheduled:
            schedulers.append(torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[-1], 50))
    a[1].requires_grad_(False), b[1].requires_grad_(False)
    for i in range(200):
        if i == 100 and not scheduled:  # torch's schedulers do not support groups added later
            for optimizer, x in zip(optimizers, (a, b), strict=True):
                optimizer.add_param_group({"params": [x[-1]], "lr": 0.3})
        give(a, b, skip={1, 2} if i % 7 == 3 else {1})
        for each in optimizers + schedulers:
            each.step()
        assert optimizers[0]._ran == ("cpp",)
    check(a, b)
    for x, y in zip(a, b, strict=True):
        mine, theirs = optimizers[0].state.get(x, {}), optimizers[1].state.get(y, {})
        assert mine.keys() == theirs.keys()
        for key in mine:
            torch.testing.assert_close(mine[key].double(), theirs[key].double(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"weight_decay": 0.3, "betas": (0.5, 0.9), "lr": 0.01}])
def test_lion_float64(options):
    a, b = params()
    mine, theirs = hfnn.optim.Lion(a, **options), Lion(b, **options)
    for _ in range(200):
        give(a, b)
        mine.step(), theirs.step()
    assert mine._ran == ("cpp",)
    check(a, b)


def near(x, y, *sizes):
    """Within four ulps of the largest summand, because sums may cancel."""
    size = y.double().abs()
    for other in sizes:
        size = torch.maximum(size, torch.as_tensor(other, dtype=torch.float64).abs())
    assert ((x.double() - y.double()).abs() <= 4 * torch.finfo(torch.float32).eps * size).all()


@pytest.mark.parametrize("kernel", ["cpp", INTERPRETED])
@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_float32_steps(name, options, kernel):
    """Each step from the same state, compared with float64 and with torch's own in float32."""
    shapes, steps = (SHAPES, 25) if kernel == "cpp" else (((3,), (70, 70), (0,)), 3)
    options = {k: v for k, v in options.items() if k not in ("foreach", "fused")}
    if isinstance(options.get("lr"), torch.Tensor):
        options["lr"] = options["lr"].float()  # the same number for both
    mine, cls = params(torch.float32, shapes)[0], getattr(torch.optim, name)
    optimizer = getattr(hfnn.optim, name)(mine, **options)
    for _ in range(steps):
        before = copy.deepcopy(optimizer.state_dict()["state"])
        wide = [p.detach().double().requires_grad_() for p in mine]
        plain = [p.detach().clone().requires_grad_() for p in mine]
        exact = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        others = [cls(wide, **exact), cls(plain, **options, fused=True)]
        for other in others:
            state = {i: {k: v.clone() for k, v in s.items()} for i, s in before.items()}
            other.load_state_dict({"state": state, "param_groups": other.state_dict()["param_groups"]})
        for x, *rest in zip(mine, wide, plain, strict=True):
            x.grad = torch.randn_like(x)
            for y in rest:
                y.grad = x.grad.to(y.dtype)
        starts = [p.detach().clone() for p in mine]
        with hfnn.use(kernel):
            optimizer.step()
        assert optimizer._ran == (kernel,)
        for other in others:
            other.step()
        for i, (start, x, *rest) in enumerate(zip(starts, mine, wide, plain, strict=True)):
            for other, y in zip(others, rest, strict=True):
                near(x, y, start, other.param_groups[0]["lr"])
                states = optimizer.state.get(x, {}), other.state.get(y, {})
                assert states[0].keys() == states[1].keys()
                for key in states[0]:
                    first = torch.zeros_like(start)
                    terms = (x.grad, start, before.get(i, {}).get(key, first))
                    if "sq" in key:
                        terms = ((1 - options.get("betas", (0, 0.999))[1]) * (x.grad.abs() + start.abs()).square(),)
                    near(states[0][key], states[1][key], *terms)


@pytest.mark.parametrize("kernel", ["cpp", INTERPRETED, "torch"])
@pytest.mark.parametrize("clipped", [0.5, 1e9])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_max_grad_norm(name, clipped, kernel):
    """Like clip_grad_norm_ before the step; the gradients themselves are unchanged."""
    a, b = params(torch.float32, ((5,), (70, 70), (0,), (2, 3)))
    mine = getattr(hfnn.optim, name)(a, lr=0.1, max_grad_norm=clipped)
    theirs = getattr(torch.optim, name)(b, lr=0.1)
    assert mine.grad_norm is None
    for _ in range(4):
        give(a, b)
        before = [x.grad.clone() for x in a]
        norm = torch.nn.utils.clip_grad_norm_(b, clipped)
        with hfnn.use(kernel):
            mine.step()
        theirs.step()
        assert mine._ran == (kernel,)
        torch.testing.assert_close(mine.grad_norm, norm, rtol=1e-6, atol=0)
        assert all(torch.equal(x.grad, g) for x, g in zip(a, before, strict=True))
        check(a, b, 1e-6)
    held = mine.grad_norm
    give(a, b)
    mine.step()
    assert held != mine.grad_norm


@pytest.mark.parametrize("kernel", ["cpp", INTERPRETED, "torch"])
def test_remainder_is_a_float32_master(kernel):
    """bfloat16 parameters with a remainder follow float32 ones with the same gradients, bit for bit."""
    shapes, steps = (((5,), (70, 71), (4096,)), 200) if kernel != "triton" else (((5,), (70, 71)), 8)
    half = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
    whole = [p.detach().float().requires_grad_() for p in half]
    mine = hfnn.optim.AdamW(half, lr=1e-3, master="remainder", state_dtype=torch.float32, ema_decay=0.9)
    master = hfnn.optim.AdamW(whole, lr=1e-3, ema_decay=0.9)
    for _ in range(steps):
        give(half, whole)
        for x, y in zip(half, whole, strict=True):
            y.grad = x.grad.float()
        with hfnn.use(kernel):
            mine.step(), master.step()
    for x, y in zip(half, whole, strict=True):
        remainder = mine.state[x]["remainder"]
        assert remainder.dtype is torch.int16 and remainder.shape == x.shape and remainder.any()
        assert torch.equal(hfnn.optim.formats.join(x.detach(), remainder), y)
        assert ((x.float() - y).abs() <= y.abs() * 2**-8).all()
        for key in ("exp_avg", "exp_avg_sq", "ema"):
            assert torch.equal(mine.state[x][key], master.state[y][key])


@pytest.mark.parametrize("kernel", ["cpp", INTERPRETED, "torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding(kernel, dtype):
    """Its mean is the exact result, its values are the two neighbours, and torch's seed determines them."""
    n = 40000 if kernel != "triton" else 8192
    with hfnn.use(kernel):
        results = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            p = torch.ones(n, dtype=dtype, requires_grad=True)
            p.grad = torch.ones_like(p)
            hfnn.optim.SGD([p], lr=2**-13, stochastic_rounding=True).step()
            results.append(p.detach())
    below = 1 - torch.finfo(dtype).eps / 2
    share = 2**-13 / (1 - below)
    for result in results:
        assert set(result.unique().tolist()) == {1.0, below}
        found = (result == below).double().mean().item()
        assert abs(found - share) < 5 * (share * (1 - share) / n) ** 0.5
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


@pytest.mark.parametrize("kernel", ["cpp", "torch"])
def test_ema(kernel):
    a, b = params(torch.float32)
    optimizer = hfnn.optim.AdamW(a, lr=0.1, ema_decay=0.9)
    averages = [x.detach().clone() for x in a]
    for _ in range(10):
        give(a, b)
        with hfnn.use(kernel):
            optimizer.step()
        for x, average in zip(a, averages, strict=True):
            average.add_((x.detach() - average) * (1 - 0.9))
    for x, average in zip(a, averages, strict=True):
        torch.testing.assert_close(optimizer.state[x]["ema"], average, rtol=1e-6, atol=1e-6)


def test_low_bits_train():
    """A regression is learned as well in 8 bits as in 32, and nearly so in 4."""
    x = torch.randn(256, 100)
    y = x @ torch.randn(100, 100)
    losses = {}
    for dtype in (None, "8bit", "4bit"):
        torch.manual_seed(1)
        w = torch.zeros(100, 100, requires_grad=True)
        optimizer = hfnn.optim.AdamW([w], lr=0.05, state_dtype=dtype)
        for _ in range(200):
            optimizer.zero_grad()
            loss = (x @ w - y).square().mean()
            loss.backward()
            optimizer.step()
        losses[dtype] = loss.item()
    assert losses[None] < 1 and losses["8bit"] < 2 * losses[None] + 0.1 and losses["4bit"] < 5 * losses[None] + 0.5


def test_closure_and_hooks():
    p = torch.ones(3, requires_grad=True)
    optimizer, seen = hfnn.optim.AdamW([p], lr=0.1), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure():
        seen.append("closure")
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3.0
    assert seen == ["before", "closure", "after"] and (p < 1).all()


def test_swapped_class_takes_over():
    """Nothing relies on __init__: torch's optimizer continues as hfnn's, with its existing states."""
    a, b = params()
    mine, theirs = torch.optim.AdamW(a, lr=0.01), torch.optim.AdamW(b, lr=0.01)
    for i in range(20):
        if i == 10:
            mine.__class__ = hfnn.optim.AdamW
        give(a, b)
        mine.step(), theirs.step()
    assert mine._ran == ("cpp",)
    check(a, b)


def test_step_parameters():
    a, b = params()
    mine, theirs = hfnn.optim.AdamW(a, lr=0.01), hfnn.optim.AdamW(b, lr=0.01)
    for _ in range(3):
        give(a, b)
        for x in a:
            mine.step_parameters([x])
        theirs.step()
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    with pytest.raises(ValueError, match="is in no group of this optimizer"):
        mine.step_parameters([torch.ones(3, requires_grad=True)])


@pytest.mark.parametrize("forced", [None, "torch"])
def test_complex_goes_to_torch(forced):
    z = torch.randn(3, dtype=torch.complex64)
    a, b = (torch.nn.Parameter(z.clone()) for _ in range(2))
    mine, theirs = hfnn.optim.AdamW([a]), torch.optim.AdamW([b])
    a.grad, b.grad = z.clone(), z.clone()
    with hfnn.use(forced) if forced else contextlib.nullcontext():
        mine.step(), theirs.step()
    assert mine._ran == ("torch",) and torch.equal(a, b)
    assert "torch's own step" in mine.report() and ("complex64" in mine.report() or forced)
    special = hfnn.optim.AdamW([a], state_dtype="8bit")
    with pytest.raises(ValueError, match=r"takes real parameters, got torch.complex64"):
        special.step()


def test_refusals():
    p = [torch.ones(3, requires_grad=True)]
    for wrong, words in (
        ({"state_dtype": "16bit"}, "choose one of"), ({"master": "float32"}, "choose one of None, 'remainder'"),
        ({"max_grad_norm": 0}, "positive"), ({"ema_decay": 1.0}, "in .0, 1."), ({"differentiable": True}, "graph"),
        ({"master": "remainder", "stochastic_rounding": True}, "keeps all bits"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            hfnn.optim.AdamW(p, **wrong)
    with pytest.raises(ValueError, match="the options are"):
        hfnn.optim.AdamW(p).configure(stat_dtype="8bit")
    sparse = torch.nn.Embedding(5, 3, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse gradients"):  # torch's error
        hfnn.optim.AdamW(sparse.parameters()).step()
    with pytest.raises(ValueError, match="dense gradients"):
        hfnn.optim.AdamW(sparse.parameters(), state_dtype="8bit").step()
    before = sparse.weight.detach().clone()
    hfnn.optim.SGD(sparse.parameters(), lr=1.0).step()  # torch's SGD takes it
    assert torch.equal(before[1] - 1, sparse.weight[1]) and torch.equal(before[2], sparse.weight[2])
