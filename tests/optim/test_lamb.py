"""hfnn.optim.LAMB against a float64 reference, with any kernel and any format."""

import copy
import io

import pytest
import torch

import hfnn
from hfnn.optim import LAMB

from .whole import assert_masters, clipped, difference, halved, on_threads

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
GPU = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = [("cpp", "cpu"), ("triton", GPU)]
SHAPES = [(5,), (), (0, 3), (4096,), (4097,), (130, 70), (3, 3, 2, 2)]
OPTIONS = [
    {},
    {"weight_decay": 0.0},
    {"weight_decay": 0.0, "use_nvlamb": True, "bias_correction": False},
    {"grad_averaging": False, "adam_w_mode": False, "maximize": True, "betas": (0.8, 0.95), "eps": 1e-3},
    {"lr": torch.tensor(0.02, dtype=F64), "weight_decay": 0.3},
]


class Reference:
    """The paper's formulas, one parameter at a time, in float64."""

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, bias_correction=True,
        grad_averaging=True, adam_w_mode=True, use_nvlamb=False, maximize=False,
    ):  # fmt: skip
        self.params, self.lr, self.betas, self.eps, self.decay = params, float(lr), betas, eps, weight_decay
        self.correct, self.average, self.decoupled = bias_correction, grad_averaging, adam_w_mode
        self.adapt, self.sign = use_nvlamb or weight_decay != 0, -1 if maximize else 1
        self.m, self.v = ([torch.zeros_like(p) for p in params] for _ in range(2))
        self.t = [0] * len(params)

    def step(self, grads):
        b1, b2 = self.betas
        for i, (p, g) in enumerate(zip(self.params, grads, strict=True)):
            if g is None:
                continue
            self.t[i] += 1
            g = self.sign * g + (0 if self.decoupled else self.decay) * p
            self.m[i] = b1 * self.m[i] + (1 - b1 if self.average else 1) * g
            self.v[i] = b2 * self.v[i] + (1 - b2) * g**2
            c1, c2 = (1 - b1 ** self.t[i], 1 - b2 ** self.t[i]) if self.correct else (1, 1)
            u = self.m[i] / c1 / ((self.v[i] / c2).sqrt() + self.eps) + (self.decay if self.decoupled else 0) * p
            p_norm, u_norm = p.square().sum().sqrt().item(), u.square().sum().sqrt().item()
            ratio = p_norm / u_norm if self.adapt and p_norm and u_norm else 1
            self.params[i] = p - self.lr * ratio * u


def parameters(dtype, device="cpu", shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(s, generator=generator, dtype=F64) for s in shapes]
    params.append(torch.zeros(7, dtype=F64))  # a norm of 0
    return [torch.nn.Parameter(p.to(device, dtype)) for p in params]


def gradients(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for i, p in enumerate(params):
        g = torch.randn(p.shape, generator=generator, dtype=F64) * (1 + seed % 3)
        p.grad = None if (seed, i) == (3, 1) else g.to(p.device, p.dtype)
    return [None if p.grad is None else p.grad.double().cpu() for p in params]


def tensors(optimizer):
    params = optimizer.param_groups[0]["params"]
    return params + [x for p in params for x in optimizer.state[p].values()]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kernel", ["cpp", "torch"])
def test_trajectory_in_float64(kernel, options):
    params = parameters(F64)
    optimizer, exact = LAMB(params, **options), Reference([p.detach().clone() for p in params], **options)
    with hfnn.use(kernel):
        for step in range(200):
            exact.step(gradients(params, step))
            optimizer.step()
    assert optimizer._ran == (kernel,)
    assert difference(params, exact.params) < 1e-12
    assert difference([optimizer.state[p]["exp_avg"] for p in params], exact.m) < 1e-12
    assert difference([optimizer.state[p]["exp_avg_sq"] for p in params], exact.v) < 1e-12


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kernel, device", KERNELS)
@pytest.mark.parametrize("dtype, bound", [(F32, 2**-21), (BF16, 2**-7), (F16, 2**-10)], ids=str)
def test_each_step(dtype, bound, kernel, device, options):
    """Steps from the same state, compared with float64. Both compute u from the states as stored."""
    params = parameters(dtype, device)
    optimizer = LAMB(params, state_dtype=F32, **options)
    with hfnn.use(kernel):
        for step in range(5):
            exact = Reference([p.detach().double().cpu() for p in params], **options)
            if step:
                exact.m = [optimizer.state[p]["exp_avg"].double().cpu() for p in params]
                exact.v = [optimizer.state[p]["exp_avg_sq"].double().cpu() for p in params]
                exact.t = [int(optimizer.state[p]["step"]) for p in params]
            exact.step(gradients(params, step))
            optimizer.step()
            assert optimizer._ran == (kernel,)
            assert difference(params, exact.params) < bound
            assert difference([optimizer.state[p]["exp_avg"] for p in params], exact.m) < 2**-21
            assert difference([optimizer.state[p]["exp_avg_sq"] for p in params], exact.v) < 2**-21


@pytest.mark.parametrize("kernel, device", KERNELS)
@pytest.mark.parametrize("format", ["8bit", "4bit", BF16], ids=str)
def test_narrow_states(format, kernel, device):
    """The step uses the states as stored, so it is computed from the states after it."""
    params = parameters(F32, device, [(5000,), (33, 130), (4100,)])
    optimizer = LAMB(params, lr=0.1, state_dtype=format)
    with hfnn.use(kernel):
        for step in range(3):
            before = [p.detach().double().cpu() for p in params]
            gradients(params, step)
            optimizer.step()
            states = optimizer.state_dict()["state"]
            for i, (p, old) in enumerate(zip(params, before, strict=True)):
                m, v, t = (states[i][n].double().cpu() for n in ("exp_avg", "exp_avg_sq", "step"))
                u = m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + 0.01 * old
                ratio = old.norm() / u.norm() if old.norm() else 1
                assert difference([p], [old - 0.1 * ratio * u]) < 2**-20
    low = {p.numel() >= 4096: optimizer.state[p]["exp_avg"].dtype for p in params}
    assert low == {True: BF16, False: BF16} if format is BF16 else low == {True: torch.uint8, False: F32}


def test_low_bits_stay_near_float32():
    params, full = parameters(F32, shapes=[(200, 100)]), parameters(F32, shapes=[(200, 100)])
    start = [p.detach().clone() for p in params]
    a, b = LAMB(params, lr=0.01, state_dtype="8bit"), LAMB(full, lr=0.01)
    for step in range(20):
        gradients(params, step)
        gradients(full, step)
        a.step()
        b.step()
    moved = (full[0] - start[0]).norm()
    assert 0 < (params[0] - full[0]).norm() < 0.2 * moved


@pytest.mark.parametrize("kernel, device", KERNELS)
@pytest.mark.parametrize("found", [0.0, 1.0])
def test_scaler_and_norm(kernel, device, found):
    params, plain = parameters(F32, device), parameters(F32, device)
    ours, other = LAMB(params, max_grad_norm=2.0), LAMB(plain)
    gradients(plain, 1)
    norm, before = clipped(params, plain, ours, found)
    with hfnn.use(kernel):
        ours.step()
        other.step()
    if found:
        assert all(map(torch.equal, params, before)) and not any(x.any() for x in tensors(ours)[len(params) :])
    else:
        assert difference(tensors(ours), tensors(other)) < 2**-20
        assert difference([ours.grad_norm], [norm]) < 2**-20


@pytest.mark.parametrize("kernel, device", KERNELS)
def test_master_and_average(kernel, device):
    """bfloat16 parameters with a remainder equal float32 parameters, bit for bit."""
    masters = parameters(F32, device)
    halves = halved(masters)
    full = LAMB(masters, ema_decay=0.9)
    ours = LAMB(halves, ema_decay=0.9, state_dtype=F32, master="remainder")
    with hfnn.use(kernel):
        for step in range(20 if kernel == "cpp" else 4):
            gradients(halves, step)
            for p, q in zip(masters, halves, strict=True):
                p.grad = None if q.grad is None else q.grad.float()
            full.step()
            ours.step()
    assert_masters(full, masters, ours, halves)


@pytest.mark.parametrize("kernel, device", KERNELS)
def test_stochastic_rounding(kernel, device):
    def run(seed):
        torch.manual_seed(seed)
        params = parameters(BF16, device, [(20000,), (100, 90)])
        optimizer = LAMB(params, state_dtype=F32, stochastic_rounding=seed > 0)
        gradients(params, 0)
        with hfnn.use(kernel):
            optimizer.step()
        return [p.detach().float() for p in params[:2]]

    nearest, once, again, other = run(0), run(1), run(1), run(2)
    assert all(map(torch.equal, once, again)) and not any(map(torch.equal, once, other))
    for a, b in zip(once, nearest, strict=True):
        ulp = torch.exp2(b.abs().log2().floor() - 7)
        assert ((a - b).abs() <= 2 * ulp).all() and 0.05 < (a != b).float().mean() < 0.75


def test_state_dicts():
    for options in ({}, {"state_dtype": "8bit"}, {"state_dtype": "4bit"}):
        params = parameters(F32)
        ours = LAMB(params, **options)
        for step in range(3):
            gradients(params, step)
            ours.step()
        file = io.BytesIO()
        torch.save(ours.state_dict(), file)
        file.seek(0)
        again = LAMB([torch.nn.Parameter(p.detach().clone()) for p in params], **options)
        again.load_state_dict(torch.load(file, weights_only=True))
        copied = copy.deepcopy(ours)
        for optimizer in (ours, again, copied):
            gradients(optimizer.param_groups[0]["params"], 4)
            optimizer.step()
            assert all(map(torch.equal, ours.param_groups[0]["params"], optimizer.param_groups[0]["params"]))
            states, others = ours.state_dict()["state"], optimizer.state_dict()["state"]
            assert all(torch.equal(states[i][n], others[i][n]) for i in states for n in states[i])


@pytest.mark.parametrize(
    "options", [{"lr": -1.0}, {"eps": -1.0}, {"betas": (1.0, 0.9)}, {"weight_decay": -1.0}], ids=str
)
def test_errors(options):
    with pytest.raises(ValueError, match=r"-1|1\.0"):
        LAMB(parameters(F32), **options)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_do_not_show(threads):
    def run():
        params = parameters(F32, shapes=[(300, 300), (5,), (4097,)])
        optimizer = LAMB(params, max_grad_norm=1.0)
        for step in range(3):
            gradients(params, step)
            optimizer.step()
        return tensors(optimizer)

    assert all(map(torch.equal, on_threads(1, run), on_threads(threads, run)))
