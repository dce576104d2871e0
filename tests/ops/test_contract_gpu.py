"""The semantic contract on a GPU only: captured graphs, and more than 2^31 elements."""

import pytest
import torch

import hfnn

from .test_contract import RAGGED, function, is_float, leaves, pinned, run, tensors, to

ON_CUDA = [p for p in RAGGED if p.values[2] == "cuda" and p.values[3] is torch.bfloat16]
cuda_kernels = pytest.mark.parametrize("op, kernel, device, dtype, case", ON_CUDA)


def assert_repeats(op, args, kwargs, y, grads):
    """The result and the gradients of `y.sum()` are those of one draw, within rounding. Returns the draw."""
    pin = pinned(op, args, y)
    wide, wide_grads = run(op.reference, to(args, torch.float64), {**kwargs, **pin}, torch.ones_like(y))
    for got, want in zip((y, *grads), (wide, *wide_grads), strict=True):
        # A sum that cancels is as exact as its float32 terms.
        torch.testing.assert_close(got.double(), want, rtol=torch.finfo(got.dtype).eps, atol=1e-6)
    return [value.clone() for value in pin.values()]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@cuda_kernels
def test_cuda_graph(op, kernel, device, dtype, case):
    args, kwargs = op.sample(case, dtype, device)
    torch.cuda.synchronize()  # the sample was drawn on another stream than the one that copies it
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # leaves accumulate on the stream they were made on
        args = leaves(args)

    def step():
        y = function(op)(*args, **kwargs)
        return y, torch.autograd.grad(y, tensors(args), torch.ones_like(y))

    torch.use_deterministic_algorithms(False)  # no NaN filling inside a captured graph
    with hfnn.use(kernel.name):
        with torch.cuda.stream(stream):
            eager, eager_grads = step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y, grads = step()
    graph.replay()
    torch.cuda.synchronize()
    if op.pin is None:
        assert torch.equal(y, eager) and all(map(torch.equal, grads, eager_grads))
    else:  # a random op: every replay draws anew, and backward uses forward's draw
        first = y.clone(), [grad.clone() for grad in grads]
        graph.replay()
        torch.cuda.synchronize()
        draws = [assert_repeats(op, args, kwargs, *found) for found in (first, (y, grads))]
        assert not all(map(torch.equal, *draws))


# A batch norm's statistics need all rows; a group norm of this many groups is left to torch.
WHOLE = ("batch_norm", "batch_norm_act", "group_norm", "group_norm_act")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs 40 GiB of GPU memory")
@pytest.mark.parametrize(
    "op, kernel, device, dtype, case",
    [p for p in ON_CUDA if p.values[0].like_input and p.values[0].name not in WHOLE],
)
def test_more_than_2_31_elements(op, kernel, device, dtype, case):
    """The last rows of a tensor beyond int32 offsets equal those rows alone."""
    rows = (1 << 31) // 4096 + 16
    extras = tuple(extra for extra in op.cases[1] if not isinstance(extra, int))
    sampled, kwargs = op.sample((16, 4096, *extras), dtype, device)

    def like_x(t):
        return isinstance(t, torch.Tensor) and t.shape[1:] == (4096,)

    def result(args):
        y = function(op)(*args, **kwargs)
        grads = torch.autograd.grad(y.sum(), tensors(args))
        return [t[-16:] for t in (y, *grads) if like_x(t)]

    # Rows of the sample, because not every op takes any value; in random order, so that a wrong row shows.
    args = [a[torch.randint(16, (rows,), device=device)] if like_x(a) else a for a in sampled]
    tails = leaves([a[-16:] if like_x(a) else a for a in args])
    args = [a.requires_grad_() if is_float(a) else a for a in args]
    with hfnn.use(kernel.name):
        y, *grads = result(args)
        if op.pin is None:
            assert all(map(torch.equal, (y, *grads), result(tails)))
        else:
            (draw,) = assert_repeats(op, tails, kwargs, y, grads)
            assert len(draw.unique()) > 1, "all was kept, or nothing"
