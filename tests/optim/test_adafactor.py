"""hfnn.optim.Adafactor: torch.optim.Adafactor's steps with any kernel, its states, and what a step allocates."""

import copy
import io

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hfnn
from hfnn.optim import Adafactor

from .whole import assert_masters, clipped, difference, halved, on_threads

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
GPU = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = [("cpp", "cpu"), ("triton", GPU)]
# Vectors; small matrices, many and few; large ones with odd sides, one row or column, more than a tile; batches.
SHAPES = [(5,), (), (0, 3), (17000,), (3, 4), (7, 3, 3, 3), (4, 2, 1, 1), (140, 1, 8), (300, 129), (1, 500), (500, 1),
          (3, 130, 40), (2, 128, 128), (2, 3, 9, 9)]  # fmt: skip
FEW = [(5,), (), (4097,), (7, 3, 3, 3), (2, 140, 130), (1, 200)]
OPTIONS = [
    {},
    {"weight_decay": 0.1, "maximize": True, "lr": 0.3},
    {"eps": (1e-3, 1e-2), "d": 1.5, "beta2_decay": -0.5},
    {"lr": torch.tensor(0.02, dtype=torch.float64), "eps": (0.0, 0.0)},
]


def parameters(shapes, dtype, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=F64).to(device, dtype)) for s in shapes]


def gradients(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        g = torch.randn(p.shape, generator=generator, dtype=F64) * (1 + seed % 3)
        p.grad = g.to(p.device, p.dtype)


def tensors(optimizer):
    """All parameters and states."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    names = ("row_var", "col_var", "variance", "step")
    return params + [optimizer.state[p][n] for p in params for n in names if n in optimizer.state.get(p, {})]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_trajectory_in_float64(options):
    mine, theirs = parameters(SHAPES, F64), parameters([s for s in SHAPES if 0 not in s], F64)
    mine = [p for p in mine if p.numel()] + [p for p in mine if not p.numel()]
    full = [p for p in mine if p.numel()]
    for p, q in zip(full, theirs, strict=True):
        q.data.copy_(p.data)
    ours, torchs = Adafactor(mine, **options), torch.optim.Adafactor(theirs, foreach=False, **copy.deepcopy(options))
    for step in range(200):
        gradients(theirs, step)
        for p, q in zip(full, theirs, strict=True):
            p.grad = q.grad.clone()
        if step % 7 == 3:
            full[0].grad = theirs[0].grad = None
        ours.step()
        torchs.step()
    assert ours._ran == ("cpp",)
    assert difference(full, theirs) < 1e-12
    for p, q in zip(full, theirs, strict=True):
        assert ours.state[p].keys() == torchs.state[q].keys()
        assert all(ours.state[p][n].shape == torchs.state[q][n].shape for n in ours.state[p])
        assert difference(ours.state[p].values(), torchs.state[q].values()) < 1e-12


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kernel, device", KERNELS)
@pytest.mark.parametrize("dtype, bound", [(F32, 2**-21), (BF16, 2**-7), (F16, 2**-10)], ids=str)
def test_each_step(dtype, bound, kernel, device, options):
    """Steps from the same state, compared with torch's in float64: off by a few roundings of what is stored."""
    params = parameters(FEW if kernel == "triton" else [s for s in SHAPES if 0 not in s], dtype, device)
    options = {"eps": (torch.finfo(dtype).eps, 1e-3)} | options
    ours = Adafactor(params, **options)
    with hfnn.use(kernel):
        for step in range(3):
            exact = [torch.nn.Parameter(p.detach().double().cpu()) for p in params]
            theirs = torch.optim.Adafactor(exact, foreach=False, **copy.deepcopy(options))
            if step:
                theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
            gradients(params, step)
            for p, q in zip(params, exact, strict=True):
                q.grad = p.grad.double().cpu()
            ours.step()
            theirs.step()
            assert ours._ran == (kernel,)
            assert difference(tensors(ours), tensors(theirs)) < bound


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_do_not_show(threads):
    def run():
        params = parameters(SHAPES, F32)
        optimizer = Adafactor(params)
        steps(optimizer, params, 3)
        return tensors(optimizer)

    assert all(map(torch.equal, on_threads(1, run), on_threads(threads, run)))


@pytest.mark.parametrize("kernel, device", KERNELS)
@pytest.mark.parametrize("found", [0.0, 1.0])
def test_scaler_and_norm(kernel, device, found):
    params, plain = parameters(FEW, F32, device), parameters(FEW, F32, device)
    ours, theirs = Adafactor(params, max_grad_norm=2.0), torch.optim.Adafactor(plain, foreach=False)
    gradients(plain, 1)
    norm, before = clipped(params, plain, ours, found)
    with hfnn.use(kernel):
        ours.step()
    if found:
        assert all(map(torch.equal, params, before)) and not any(ours.state[p]["step"] for p in params)
        assert not any(x.any() for x in tensors(ours)[len(params) :])
    else:
        theirs.step()
        assert difference(tensors(ours), tensors(theirs)) < 2**-20
        assert difference([ours.grad_norm], [norm]) < 2**-20


def steps(optimizer, params, count, first=0):
    for step in range(first, first + count):
        gradients(params, step)
        optimizer.step()


@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_state_goes_to_torch_and_back(dtype):
    params, shapes = parameters(FEW, dtype), FEW
    ours = Adafactor(params)
    steps(ours, params, 3)
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    theirs = torch.optim.Adafactor(parameters(shapes, dtype))
    theirs.load_state_dict(torch.load(file, weights_only=True))
    again = Adafactor([torch.nn.Parameter(p.detach().clone()) for p in params])
    again.load_state_dict(theirs.state_dict())
    for a, b in zip(tensors(ours)[len(params) :], tensors(again)[len(params) :], strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    copied = copy.deepcopy(ours)
    for optimizer in (ours, again, copied):
        steps(optimizer, optimizer.param_groups[0]["params"], 2, first=3)
        assert all(map(torch.equal, tensors(ours), tensors(optimizer)))


@pytest.mark.parametrize("kernel, device", KERNELS)
def test_float32_states_and_master(kernel, device):
    """bfloat16 parameters with a remainder and float32 states equal float32 parameters, bit for bit."""
    masters = parameters(FEW, F32, device)
    halves = halved(masters)
    eps = (2.0**-23, 1e-3)
    full = Adafactor(masters, eps=eps, ema_decay=0.9)
    ours = Adafactor(halves, eps=eps, ema_decay=0.9, state_dtype=F32, master="remainder")
    with hfnn.use(kernel):
        for step in range(10 if kernel == "cpp" else 3):
            gradients(halves, step)
            for p, q in zip(masters, halves, strict=True):
                p.grad = q.grad.float()
            full.step()
            ours.step()
    assert_masters(full, masters, ours, halves)


@pytest.mark.parametrize("kernel, device", KERNELS)
def test_stochastic_rounding(kernel, device):
    """Reproducible, to one of the two neighbours, and unbiased."""
    shapes = [(160, 140), (40, 30, 3, 3), (20000,)]

    def run(seed):
        torch.manual_seed(seed)
        params = parameters(shapes, BF16, device)
        optimizer = Adafactor(params, lr=1e-3, state_dtype=F32, stochastic_rounding=True)
        gradients(params, 0)
        with hfnn.use(kernel):
            optimizer.step()
        return [p.detach().float() for p in params]

    once, twice, other = run(1), run(1), run(2)
    assert all(map(torch.equal, once, twice)) and not any(map(torch.equal, once, other))
    exact = parameters(shapes, BF16, device)
    gradients(exact, 0)
    wide = [torch.nn.Parameter(p.detach().float()) for p in exact]
    for p, q in zip(wide, exact, strict=True):
        p.grad = q.grad.float()
    with hfnn.use(kernel):
        Adafactor(wide, lr=1e-3, eps=(2.0**-7, 1e-3)).step()
    for rounded, p in zip(once, wide, strict=True):
        ulp = torch.exp2(p.detach().abs().log2().floor() - 7)
        off = (rounded - p.detach()) / ulp
        assert off.abs().max() <= 1.001
        # Uniform errors within an ulp: the mean of n of them is within 4 / sqrt(6 n), except with probability 1e-4.
        assert abs(off.mean().item()) < 4 / (6 * off.numel()) ** 0.5


class Watch(TorchDispatchMode):
    """Collects the names of torch's operators called, and the bytes of each one's largest result."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            name = function.name()
            self.seen[name] = max(self.seen.get(name, 0), result.nbytes)
        else:
            self.seen.setdefault(function.name(), 0)
        return result


def test_a_step_neither_waits_nor_allocates_much():
    params = parameters([(1024, 2048), (512, 512), (4096,)], F32)
    optimizer = Adafactor(params, max_grad_norm=1.0)
    steps(optimizer, params, 1)
    gradients(params, 1)
    with Watch() as watch:
        optimizer.step()
    assert not any("item" in name or "_local_scalar_dense" in name for name in watch.seen), watch.seen
    assert sum(watch.seen.values()) < sum(p.nbytes for p in params) / 20, watch.seen


def test_refusals():
    with pytest.raises(ValueError, match="low bits save nothing"):
        Adafactor(parameters(FEW, F32), state_dtype="8bit")
    params = [torch.nn.Parameter(torch.randn(30, 40).t())]
    theirs = [torch.nn.Parameter(params[0].detach().clone())]
    ours, torchs = Adafactor(params), torch.optim.Adafactor(theirs)
    gradients(params, 0)
    gradients(theirs, 0)
    ours.step()
    torchs.step()
    assert ours._ran == ("torch",) and "contiguous" in ours.report()
    assert torch.equal(params[0], theirs[0])
    asked = Adafactor(params, ema_decay=0.9)
    with pytest.raises(ValueError, match="contiguous"):
        asked.step()


def test_torch_and_kernels_take_turns():
    params, theirs = parameters(FEW, F64), parameters(FEW, F64)
    ours, torchs = Adafactor(params), torch.optim.Adafactor(theirs, foreach=False)
    for step in range(6):
        gradients(params, step)
        gradients(theirs, step)
        if step % 2:
            ours.step()
        else:
            with hfnn.use("torch"):
                ours.step()
        assert ours._ran == (("cpp",) if step % 2 else ("torch",))
        torchs.step()
    assert difference(tensors(ours), tensors(torchs)) < 1e-12


def test_parameter_by_parameter_is_the_whole_step():
    whole, single = parameters(FEW, F32), parameters(FEW, F32)
    a, b = Adafactor(whole), Adafactor(single)
    for step in range(3):
        gradients(whole, step)
        gradients(single, step)
        a.step()
        for p in single:
            b.step_parameters([p])
    assert all(map(torch.equal, tensors(a), tensors(b)))
