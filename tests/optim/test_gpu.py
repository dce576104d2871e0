"""Steps on a GPU: the CPU's numbers, two launches, no waiting, graphs, moving gradients, 2^31 elements."""

import copy

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import hfnn

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

SHAPES = ((), (3,), (70, 70), (0,), (4097,), (256, 513))
RULES = (
    ("AdamW", {}), ("AdamW", {"amsgrad": True, "maximize": True}), ("Adam", {"weight_decay": 0.1}), ("SGD", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True}), ("SGD", {"momentum": 0.9, "dampening": 0.5}), ("Lion", {}),
    ("LAMB", {}), ("Adafactor", {}),
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def parameters(dtype, device="cuda", shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype).to(device).requires_grad_() for s in shapes]


def give(params, i):
    generator = torch.Generator().manual_seed(i)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype).to(p.device)


def both(name, dtype, steps=5, **options):
    """(on the GPU, on the CPU): parameters and optimizer after the same steps."""
    found = []
    for device, kernel in (("cuda", "triton"), ("cpu", "cpp")):
        params = parameters(dtype, device)
        optimizer = getattr(hfnn.optim, name)(params, **{"lr": 0.01, **options})
        for i in range(steps):
            give(params, i)
            optimizer.step()
            assert optimizer._ran == (kernel,)
        found.append((params, optimizer))
    return found


def moved_alike(on_gpu, on_cpu, dtype, share):
    """The parameters moved the same way, within a share of the distance plus an ulp."""
    for a, b, start in zip(on_gpu, on_cpu, parameters(dtype, "cpu"), strict=True):
        if a.numel():
            eps = torch.finfo(dtype).eps
            off = ((a.cpu().double() - b.double()).abs() - 2 * eps * b.double().abs()).clamp(min=0).norm()
            assert off <= share * (b.double() - start.double()).norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "options"), RULES)
def test_the_numbers_of_the_cpu(name, options, dtype):
    (a, mine), (b, other) = both(name, dtype, **options)
    # The sign of a number near 0 may differ; LAMB's norms are summed in another order.
    moved_alike(a, b, dtype, {"Lion": 1e-2, "LAMB": 1e-4}.get(name, 1e-5))
    for p, q in zip(a, b, strict=True):
        for key, x in other.state.get(q, {}).items():
            got, eps = mine.state[p][key].cpu(), torch.finfo(x.dtype).eps
            assert got.dtype is x.dtype and got.shape == x.shape
            torch.testing.assert_close(got, x, rtol=4 * eps, atol=max(eps / 4, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(
    "options",
    [{"state_dtype": "8bit"}, {"state_dtype": "4bit"}, {"state_dtype": torch.float32}, {"state_dtype": torch.bfloat16},
     {"max_grad_norm": 0.5}, {"ema_decay": 0.9}, {"state_dtype": "8bit", "max_grad_norm": 0.5, "ema_decay": 0.9}],
    ids=str,
)  # fmt: skip
def test_formats_and_extras(options, dtype):
    (a, mine), (b, other) = both("AdamW", dtype, **options)
    # A code that falls to the other side of an edge is a larger difference than float32's rounding.
    coded = isinstance(options.get("state_dtype"), str)
    moved_alike(a, b, dtype, 1e-2 if coded else 1e-5)
    if "max_grad_norm" in options:
        torch.testing.assert_close(mine.grad_norm.cpu(), other.grad_norm, rtol=1e-6, atol=0)
    if "ema_decay" in options:
        for p, q in zip(a, b, strict=True):
            got, want = mine.state[p]["ema"].cpu(), other.state[q]["ema"]
            assert (got - want).norm() <= (1e-3 if coded else 1e-5) * want.norm()


def test_remainder_is_a_float32_master():
    params, masters = parameters(torch.bfloat16), [p.detach().float() for p in parameters(torch.bfloat16)]
    masters = [m.requires_grad_() for m in masters]
    mine = hfnn.optim.AdamW(params, lr=1e-3, state_dtype=torch.float32, master="remainder")
    other = hfnn.optim.AdamW(masters, lr=1e-3)
    for i in range(20):
        give(params, i)
        for p, m in zip(params, masters, strict=True):
            m.grad = p.grad.float()
        mine.step(), other.step()
    for p, m in zip(params, masters, strict=True):
        bits = (p.view(torch.int16).int() << 16) + mine.state[p]["remainder"].int()
        assert torch.equal(bits.view(torch.float32), m)


def test_stochastic_rounding():
    """Unbiased where rounding to nearest would never move; reproducible from the same generator state."""
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        p = torch.ones(1 << 20, dtype=torch.bfloat16, device="cuda").requires_grad_()
        optimizer = hfnn.optim.SGD([p], lr=1e-4, stochastic_rounding=True)
        for _ in range(10):
            p.grad = torch.ones_like(p)
            optimizer.step()
        found.append(p.detach())
    assert torch.equal(*found)
    assert abs(1 - found[0].float().mean().item() - 1e-3) < 2e-5


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
@pytest.mark.parametrize("extra", [{}, {"max_grad_norm": 1.0}, {"state_dtype": "8bit"}], ids=str)
def test_two_launches_for_a_thousand_tensors(extra):
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    params = [torch.randn(1 + 37 * i % 9000, device="cuda").to(dtypes[i % 3]).requires_grad_() for i in range(1000)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = hfnn.optim.AdamW(params, **extra)
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        optimizer.step()
        torch.cuda.synchronize()
    kernels = [event for event in seen.key_averages() if event.self_device_time_total > 0]
    assert sum(event.count for event in kernels) == 2, [event.key for event in kernels]


@pytest.mark.parametrize("extra", [{}, {"max_grad_norm": 1.0, "ema_decay": 0.9}, {"state_dtype": "4bit"}], ids=str)
def test_nothing_waits(extra):
    """Steps whose gradients move each time, a GradScaler and a schedule do not make the host wait."""
    params = parameters(torch.float32)
    optimizer = hfnn.optim.AdamW(params, lr=0.1, **extra)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))
    scaler.scale(torch.ones((), device="cuda"))
    grads = [[torch.randn_like(p) for p in params] for _ in range(6)]
    for i, found in enumerate(grads):
        for p, g in zip(params, found, strict=True):
            p.grad = g
        if i > 1:
            torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.grad_scale, optimizer.found_inf = scaler._scale, torch.zeros((), device="cuda")
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf
            schedule.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert optimizer._ran == ("triton",) and all(torch.isfinite(p).all() for p in params)


def test_grad_scaler():
    """The same as without a scaler; an overflowing step has no effect."""
    a, b = parameters(torch.float32), parameters(torch.float32)
    mine, other = hfnn.optim.AdamW(a, lr=0.01), hfnn.optim.AdamW(b, lr=0.01)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for i in range(5):
        scaler.scale(torch.ones((), device="cuda"))
        give(b, i)
        for x, y in zip(a, b, strict=True):
            x.grad = torch.full_like(x, torch.inf) if i in (0, 2) else y.grad * scaler.get_scale()
        scaler.step(mine)
        scaler.update()
        if i not in (0, 2):
            other.step()
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
        assert mine.state[x]["step"] == other.state[y]["step"] == 3


@pytest.mark.parametrize("extra", [{}, {"max_grad_norm": 1.0}, {"state_dtype": "8bit"}], ids=str)
def test_in_a_graph(extra):
    """Replays equal steps, with the learning rate in a tensor that changes."""
    a, b = parameters(torch.float32), parameters(torch.float32)
    rates = [torch.tensor(0.01, device="cuda") for _ in range(2)]
    made = [hfnn.optim.AdamW(p, lr=lr, capturable=True, **extra) for p, lr in zip((a, b), rates, strict=True)]
    for p in (*a, *b):
        p.grad = torch.zeros_like(p)
    states = [copy.deepcopy([p.detach() for p in a])]
    for optimizer in made:
        optimizer.step()
    with torch.no_grad():
        for p, q, x in zip(a, b, states[0], strict=True):
            p.copy_(x), q.copy_(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made[0].step()
    for i in range(4):
        generator = torch.Generator("cuda").manual_seed(i)
        for p, q in zip(a, b, strict=True):
            p.grad.normal_(generator=generator)
            q.grad.copy_(p.grad)
        for lr in rates:
            lr.fill_(0.01 / (1 + i))
        graph.replay()
        made[1].step()
    for p, q in zip(a, b, strict=True):
        assert torch.equal(p, q) and made[0].state[p]["step"] == made[1].state[q]["step"] == 5


def test_more_elements_than_an_int32_counts():
    n = (1 << 31) + 5000
    p = torch.zeros(n, dtype=torch.bfloat16, device="cuda").requires_grad_()
    p.grad = torch.zeros_like(p)
    p.grad[[0, 1 << 31, n - 1]] = torch.tensor([1, 2, 3], dtype=torch.bfloat16, device="cuda")
    optimizer = hfnn.optim.SGD([p], lr=1.0)
    optimizer.step()
    assert optimizer._ran == ("triton",)
    assert p[[0, 1, 1 << 31, n - 2, n - 1]].tolist() == [-1, 0, -2, 0, -3] and p.count_nonzero() == 3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device():
    a, b = (parameters(torch.float32, f"cuda:{i}") for i in range(2))
    optimizer = hfnn.optim.AdamW([*a, *b], max_grad_norm=1.0)
    give(a, 0), give(b, 0)
    optimizer.step()
    assert all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(a, b, strict=True))
