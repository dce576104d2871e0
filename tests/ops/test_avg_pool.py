"""Average pools: torch's results, nothing is kept, and torch's errors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hfnn import memory

from .kernels import DTYPES
from .test_pools import LAST, exact, ours, run, same, shapes, torchs

# torch's own backward of some pools uses atomic adds on the GPU, and warns if determinism is requested.
pytestmark = pytest.mark.filterwarnings("ignore:.* does not have a deterministic implementation")


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data(), dtype=st.sampled_from((*DTYPES, torch.float64)))
def test_random_average_pools_are_torchs(data, dtype):
    dims, lead, sizes = data.draw(shapes(least=4))
    window = [data.draw(st.integers(1, 4)) for _ in range(dims)]
    stride = data.draw(st.sampled_from((None, [data.draw(st.integers(1, 3)) for _ in range(dims)], 2)))
    padding = [data.draw(st.integers(0, n // 2)) for n in window]
    how = [window, stride, padding, data.draw(st.booleans()), data.draw(st.booleans())]
    if dims > 1:
        how.append(data.draw(st.sampled_from((None, 3))))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if dims == 3 and device == "cpu" and dtype.itemsize == 2 else dtype  # torch has no others
    x = torch.randn(*lead, *sizes).to(dtype).to(device)
    if len(lead) == 2 and dims > 1 and data.draw(st.booleans()):
        x = x.contiguous(memory_format=LAST[dims])
    mine = run(ours("avg_pool", dims), x, *how, prefer="memory")
    want = run(torchs("avg_pool", dims), x, *how)
    same(mine, want, exact=dims < 3 or device == "cpu")  # overlapping 3-D windows use atomic adds on the GPU
    assert mine[0].stride() == want[0].stride() and mine[1].stride() == want[1].stride()


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data(), dtype=st.sampled_from((*DTYPES, torch.float64)))
def test_random_adaptive_average_pools_are_torchs(data, dtype):
    dims, lead, sizes = data.draw(shapes())
    output = data.draw(st.sampled_from((3, 1, tuple(data.draw(st.integers(1, 5)) for _ in range(dims)))))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(*lead, *sizes).to(dtype).to(device)
    mine = run(ours("adaptive_avg_pool", dims), x, output, prefer="memory")
    same(mine, run(torchs("adaptive_avg_pool", dims), x, output), exact("adaptive_avg_pool"))


AVERAGES = [(f"{kind}avg_pool", dims) for kind in ("", "adaptive_") for dims in (1, 2, 3)]


@pytest.mark.parametrize("name, dims", AVERAGES)
def test_average_pools_keep_nothing(name, dims, device):
    x = torch.randn(2, 3, *(9,) * dims, device=device, requires_grad=True)
    assert memory.saved_bytes(lambda: ours(name, dims)(x * 2, 4, prefer="memory")).total == 0
    assert memory.saved_bytes(lambda: torchs(name, dims)(x * 2, 4)).total == x.numel() * 4
    # Strides with gaps: dx is dense.
    holes = torch.randn(2, 3, *(9,) * (dims - 1), 18, device=device)[..., ::2]
    same(run(ours(name, dims), holes, 4, prefer="memory"), run(torchs(name, dims), holes, 4), exact(name))


@pytest.mark.parametrize("name, dims", AVERAGES)
def test_average_pools_twice(name, dims):
    x = torch.randn(1, 2, *(6,) * dims, dtype=torch.float64, requires_grad=True)
    fn = lambda x: ours(name, dims)(x, 4, prefer="memory").square()  # noqa: E731
    assert torch.autograd.gradcheck(fn, (x,), fast_mode=True)
    assert torch.autograd.gradgradcheck(fn, (x,), fast_mode=True)


@pytest.mark.parametrize("name, dims", AVERAGES)
def test_average_pools_under_autocast(name, dims, device):
    x = torch.randn(2, 3, *(9,) * dims, device=device).bfloat16()
    with torch.autocast(device, dtype=torch.bfloat16):
        mine, want = run(ours(name, dims), x, 4, prefer="memory"), run(torchs(name, dims), x, 4)
    same(mine, want, exact(name))


@pytest.mark.parametrize("name, dims", AVERAGES)
def test_errors_of_average_pools_are_torchs(name, dims, device):
    x = torch.randn(2, 3, *(9,) * dims, device=device, requires_grad=True)
    wrong = ((2,) * (dims + 1),), (2.5,), (-1,)
    for how in (*wrong, (None,)) if name.startswith("adaptive") else (*wrong, (0,), (12,), (2, 0), (2, 1, 2)):
        errors = []
        for call in (lambda *how: ours(name, dims)(*how, prefer="memory"), torchs(name, dims)):
            with pytest.raises((RuntimeError, TypeError, ValueError)) as raised:
                call(x, *how)
            errors.append((raised.type, str(raised.value).split("\n")[0]))
        assert errors[0][0] is errors[1][0], (how, errors)
