"""The C++ CPU kernel of attention, called as `hfnn._C.cpu.attention`, against the dense formula of csrc/attention.h.

B batch, H and G heads of queries and of keys, T queries, S keys, D and E widths of keys and of values.
"""

import math
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hfnn.testing import GRADIENTS, OUTPUTS, assert_close

_C = pytest.importorskip("hfnn._C", reason="the C++ kernels are not built")
attention = _C.cpu.attention

INF = float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPE = (2, 4, 2, 129, 300, 24, 40)  # B, H, G, T, S, D, E
LENGTHS = (0, 1, 7, 127, 129, 300)
SEED, OFFSET = -(1 << 62) + 12345, 1 << 33


@dataclass
class Given:
    """The optional arguments of csrc/attention.h, by its names. `mask` (B, H, T, S) stands for bits and tiles."""

    mask: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    bounds: torch.Tensor | None = None
    starts_q: torch.Tensor | None = None
    starts_k: torch.Tensor | None = None
    scale: float = 0.2
    softcap: float = 0.0
    left: int = -1
    right: int = -1
    shift: int = 0
    uniform: bool = False
    threshold: int = 0
    seed: int = SEED
    offset: int = OFFSET
    pair: torch.Tensor | None = None

    def numbers(self):
        return [getattr(self, f.name) for f in fields(self)[7:]]


def wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def nan(*shape, dtype):
    return torch.full(shape, float("nan"), dtype=dtype)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(a, b):
    """Equal as integers; any NaN equals any other."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return bool(((a.view(integer) == b.view(integer)) | (a.isnan() & b.isnan())).all())


def inputs(shape, dtype, seed=0):
    """q, k, v and the gradient of o."""
    B, H, G, T, S, D, E = shape
    sizes = (B, H, T, D), (B, G, S, D), (B, G, S, E), (B, H, T, E)
    return [randn(*size, seed=seed + n, dtype=dtype) for n, size in enumerate(sizes)]


def seen(g, B, H, T, S):
    """The visible pairs (B, H, T, S), and their i + shift - j."""
    i, j = torch.arange(T), torch.arange(S)
    allowed = torch.ones(T, S, dtype=torch.bool)
    if g.starts_q is not None:
        i, j, allowed = torch.zeros(T, dtype=torch.long), torch.zeros(S, dtype=torch.long), ~allowed
        spans = zip(g.starts_q[:-1], g.starts_q[1:], g.starts_k[:-1], g.starts_k[1:], strict=True)
        for q0, q1, k0, k1 in ([int(x) for x in span] for span in spans):
            i[q0:q1], j[k0:k1], allowed[q0:q1, k0:k1] = torch.arange(q1 - q0), torch.arange(k1 - k0), True
    away = i[:, None] + g.shift - j
    allowed &= away <= g.left if g.left >= 0 else True
    allowed &= -away <= g.right if g.right >= 0 else True
    allowed = allowed.expand(B, H, T, S)
    if g.bounds is not None:
        first, last = g.bounds.long()[:, :, None, None, None].unbind(1)
        allowed = allowed & (j >= first) & (j < last)
    return (allowed if g.mask is None else allowed & g.mask), away


def philox(counter, seed):
    """Philox4x32-10 as printed by Salmon et al.: (n,) counters to (n, 4) words."""
    low = np.uint64(0xFFFFFFFF)
    x = [counter & low, counter >> np.uint64(32), np.zeros_like(counter), np.full_like(counter, 0x68666E61)]
    keys = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        p, q = np.uint64(0xD2511F53) * x[0], np.uint64(0xCD9E8D57) * x[2]
        x = [
            (q >> np.uint64(32)) ^ x[1] ^ np.uint64(keys[0]),
            q & low,
            (p >> np.uint64(32)) ^ x[3] ^ np.uint64(keys[1]),
            p & low,
        ]
        keys = [keys[0] + 0x9E3779B9 & 0xFFFFFFFF, keys[1] + 0xBB67AE85 & 0xFFFFFFFF]
    return np.stack(x, 1)


def kept(g, B, H, T, S):
    """The dropout factor of every pair: 0 or 1 / (1 - p')."""
    if not g.threshold:
        return 1
    per_row = -(-S // 8)
    counters = np.uint64(g.offset) + np.arange(B * H * T * per_row, dtype=np.uint64)
    words = philox(counters, g.seed)
    halves = np.stack((words & np.uint64(0xFFFF), words >> np.uint64(16)), 2).reshape(B, H, T, 8 * per_row)
    if g.starts_k is None:
        j = np.arange(S)
    else:
        starts = g.starts_k.numpy()
        j = np.arange(S) - starts[np.clip(np.searchsorted(starts, np.arange(S), "right") - 1, 0, None)]
        j = np.clip(j, 0, S - 1)
    return torch.from_numpy(halves[..., j] >= g.threshold).double() / (1 - g.threshold / 65536)


def dense(q, k, v, g, bias=None, low=None):
    """o and lse by the formula. `low` rounds to the inputs' dtype where torch's math backend does."""
    (B, H, T, _), S, group = q.shape, k.shape[2], q.shape[1] // k.shape[1]
    round_ = (lambda x: x) if low is None else (lambda x: x.to(low).to(x.dtype))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = round_(g.scale * q @ k.transpose(2, 3))
    s = g.softcap * (s / g.softcap).tanh() if g.softcap else s
    allowed, away = seen(g, B, H, T, S)
    alike = (s + torch.finfo(s.dtype).min).softmax(3)
    s = s if bias is None else s + bias
    s = s if g.slopes is None else s - g.slopes.to(s.dtype)[..., None, None] * away.abs()
    s = s.masked_fill(~allowed, -INF)
    sink = torch.full((B, H, T, 1), -INF, dtype=s.dtype) if g.sinks is None else g.sinks.to(s.dtype).view(-1, 1, 1)
    lse = torch.cat((s, sink.expand(B, H, T, 1)), 3).logsumexp(3)
    none = lse == -INF
    p = torch.cat((s, sink.expand(B, H, T, 1)), 3).masked_fill(none[..., None], 0).softmax(3)[..., :-1]
    p = p.masked_fill(none[..., None], 0)
    p = torch.where(none[..., None], alike, p) if g.uniform else p
    m = kept(g, B, H, T, S)
    return round_(p * (m if isinstance(m, int) else m.to(s.dtype))) @ v, lse


def packed(mask):
    """Bits and tiles of a mask (B, H, T, S)."""
    if mask is None:
        return None, None
    B, H, T, S = mask.shape
    bits = torch.from_numpy(np.packbits(mask.numpy(), 3, "little"))
    tiles = torch.zeros(B, H, -(-T // 128), -(-S // 128), dtype=torch.uint8)
    for i in range(tiles.shape[2]):
        for j in range(tiles.shape[3]):
            tile = mask[:, :, i * 128 : i * 128 + 128, j * 128 : j * 128 + 128]
            tiles[:, :, i, j] = tile.any((2, 3)).to(torch.uint8) + tile.all(3).all(2)
    return bits, tiles


def run(q, k, v, dout, g, threads=1, dbias=None, wanted=(True, True, True), outputs=None):
    """o, lse, delta, dq, dk, dv, dbias, in buffers filled with NaN, or in `outputs` (o, dq, dk, dv)."""
    (B, H, T, _), dtype = q.shape, q.dtype
    o, dq, dk, dv = outputs or (nan(*x.shape, dtype=dtype) for x in (dout, q, k, v))
    lse, delta, sums = (nan(B, H, T, dtype=wide(dtype)) for _ in range(3))
    sums = None if g.bias is None else sums
    masks = (*packed(g.mask), g.bias, g.slopes)
    attention.forward(
        q, k, v, o, lse, sums, *masks, g.sinks, g.bounds, g.starts_q, g.starts_k, *g.numbers(), threads
    )  # fmt: skip
    attention.delta(o, dout, delta, threads)
    dq, dk, dv = (x if want else None for x, want in zip((dq, dk, dv), wanted, strict=True))
    attention.backward(
        q, k, v, lse, sums, dout, delta, dq, dk, dv, dbias, *masks, g.bounds, g.starts_q, g.starts_k, *g.numbers(),
        threads,
    )  # fmt: skip
    return o, lse if sums is None else lse + sums.log(), delta, dq, dk, dv, dbias


def check(shape, dtype, g, shared=(False, False), seed=0):
    """Compares all outputs with the formula in float64. Errors are bounded by those of the formula in `dtype` (accuracy
    rule)."""
    B, H, _, T, S, _, _ = shape
    tensors = inputs(shape, dtype, seed)
    dbias = None
    if g.bias is not None:
        dbias = nan(1 if shared[0] else B, 1 if shared[1] else H, T, S, dtype=g.bias.dtype)
    results = dict(zip(("o", "lse", "delta", "dq", "dk", "dv", "dbias"), run(*tensors, g, 1, dbias), strict=True))
    again = run(*tensors, g, 3, None if dbias is None else torch.full_like(dbias, float("nan")))
    for a, b in zip(results.values(), again, strict=True):
        assert a is None or same_bits(a, b)  # the number of threads, and so of passes, changes no bit

    def formula(dtype, low=None):
        leaves = [x.detach().to(dtype).requires_grad_() for x in tensors[:3]]
        if g.bias is not None:
            leaves.append(g.bias.detach().to(dtype).requires_grad_())
        o, lse = dense(*leaves[:3], g, leaves[3] if g.bias is not None else None, low)
        grads = list(torch.autograd.grad(o, leaves, tensors[3].to(dtype)))
        if g.bias is not None:
            dims = [n for n in (0, 1) if shared[n]]
            grads[3] = grads[3].sum(dims, keepdim=True) if dims else grads[3]
        names = ("o", "lse", "dq", "dk", "dv", "dbias")
        return dict(zip(names, (o.detach(), lse.detach(), *grads), strict=False))

    exact = formula(torch.float64)
    own = exact if dtype == torch.float64 else formula(torch.float32, None if dtype == torch.float32 else dtype)
    for name, e in exact.items():
        result, at_most = results[name], OUTPUTS if name in ("o", "lse") else GRADIENTS
        if dtype == torch.float64:
            tolerance = 2e-6 if result.dtype == torch.float32 else 1e-11
            torch.testing.assert_close(result.double(), e, rtol=tolerance, atol=tolerance)
        elif name not in ("o", "lse") and e.numel() and e.abs().max() < 1e-12:  # one key: a difference of equal numbers
            assert result.abs().max() < 4 * torch.finfo(dtype).eps
        else:
            at_most *= 2 if e.numel() < 1000 else 1  # the error of a few numbers is random
            terms = max(shape[3:5]) if result.dtype == torch.float32 else 1
            assert_close(result, e, own[name].to(result.dtype), at_most, name, terms)
    return results


def random_mask(shape, share=0.6):
    """Contains empty rows and tiles, and full ones."""
    B, H, _, T, S, _, _ = shape
    mask = torch.rand(B, H, T, S, generator=torch.Generator().manual_seed(5)) < share
    mask[:, :1, :128, :128], mask[:, 1:2, :128, :128] = False, True
    mask[:, :, T // 2 : T // 2 + 1] = False
    return mask


def feature(name, shape, dtype=torch.float32):
    B, H, _, T, S, _, _ = shape
    return {
        "plain": {},
        "causal": {"right": 0},
        "shifted": {"right": 0, "shift": S - T},
        "window": {"left": 70, "right": 5, "shift": 40},
        "left": {"left": 3},
        "nothing": {"left": 0, "right": 0, "shift": 2 * S + T},
        "softcap": {"softcap": 2.0},
        "mask": {"mask": random_mask(shape)},
        "bias": {"bias": randn(B, H, T, S, seed=6, dtype=dtype)},
        "wide bias": {"bias": randn(B, H, T, S, seed=6)},
        "finite bias": {
            "bias": randn(B, H, T, S, seed=6).masked_fill(~random_mask(shape), torch.finfo(torch.float32).min)
        },
        "slopes": {"slopes": randn(B, H, seed=7).abs() / 8, "shift": 20},
        "sinks": {"sinks": randn(H, seed=8)},
        "bounds": {"bounds": torch.tensor([[3, S - 9], [S // 2, S + 5]][:B], dtype=torch.int32)},
        "empty bounds": {"bounds": torch.tensor([[0, 0], [9, 4]][:B], dtype=torch.int32)},
        "dropout": {"threshold": 20000},
        "uniform": {"uniform": True, "right": 0, "shift": -20},
        "uniform mask": {"uniform": True, "mask": random_mask(shape)},
    }[name]


FEATURES = (
    "plain", "causal", "shifted", "window", "left", "nothing", "softcap", "mask", "bias", "wide bias", "finite bias",
    "slopes", "sinks", "bounds", "empty bounds", "dropout", "uniform", "uniform mask",
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FEATURES)
def test_feature(name, dtype):
    check(SHAPE, dtype, Given(**feature(name, SHAPE, dtype)))


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("S", LENGTHS)
def test_lengths(T, S):
    results = check((2, 2, 1, T, S, 16, 8), torch.float32, Given(right=0, shift=S - T))
    if T and not S:
        assert (results["o"] == 0).all() and (results["lse"] == -INF).all()


@pytest.mark.parametrize("D,E", [(1, 1), (3, 64), (64, 3), (33, 17), (128, 256), (80, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_widths(D, E, dtype):
    check((1, 2, 2, 40, 150, D, E), dtype, Given())


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data())
def test_combinations(data):
    G, group = data.draw(st.integers(1, 3), "G"), data.draw(st.integers(1, 3), "group")
    T, S = data.draw(st.sampled_from(LENGTHS), "T"), data.draw(st.sampled_from(LENGTHS), "S")
    shape = (2, G * group, G, T, S, data.draw(st.integers(1, 40), "D"), data.draw(st.integers(1, 40), "E"))
    names = data.draw(st.lists(st.sampled_from(FEATURES), unique=True, max_size=5), "features")
    options = {}
    for name in names:
        options |= feature(name, shape)
    shared = data.draw(st.tuples(st.booleans(), st.booleans()), "shared")
    check(shape, torch.float32, Given(**options), shared, seed=data.draw(st.integers(0, 99), "seed"))


@pytest.mark.parametrize("threshold", [1, 6554, 32768, 65535])
def test_dropout_pattern(threshold):
    """With v = 1 on the diagonal, o is p times m: zero exactly where the random number is below the threshold."""
    B, H, T, S = 2, 3, 70, 150
    q, k = randn(B, H, T, 8) / 4, randn(B, H, S, 8, seed=1) / 4
    v = torch.eye(S).expand(B, H, S, S)
    g = Given(threshold=threshold)
    o, lse = nan(B, H, T, S, dtype=torch.float32), nan(B, H, T, dtype=torch.float32)
    attention.forward(q, k, v, o, lse, *[None] * 9, *g.numbers(), 2)
    m = kept(g, B, H, T, S)
    assert torch.equal(o != 0, m != 0)
    assert abs((m == 0).double().mean() - threshold / 65536) < 4 * math.sqrt(0.25 / m.numel())
    torch.testing.assert_close(o, ((g.scale * q @ k.mT).softmax(3) * m).float(), rtol=1e-5, atol=1e-7)
    again = torch.empty_like(o)
    numbers = replace(g, seed=3, offset=4, pair=torch.tensor([SEED, OFFSET])).numbers()
    attention.forward(q, k, v, again, lse, *[None] * 9, *numbers, 1)
    assert same_bits(o, again)  # seed and offset as a tensor, where there is one


def test_wanted_gradients():
    """Each gradient computed alone has the same bits as beside the others."""
    tensors, g = inputs(SHAPE, torch.float32), Given(right=0, threshold=500)
    everything = run(*tensors, g)[3:6]
    for n in range(3):
        alone = run(*tensors, g, wanted=[n == m for m in range(3)])[3:6]
        assert same_bits(alone[n], everything[n]) and all(alone[m] is None for m in range(3) if m != n)


def test_keys_that_do_not_exist_may_be_anything():
    """Memory behind a padded batch element's keys: NaN there affects nothing."""
    q, k, v, dout = inputs(SHAPE, torch.float32)
    g = Given(bounds=torch.tensor([[0, 290], [30, 140]], dtype=torch.int32))
    wanted = run(q, k, v, dout, g, 2)
    for b, (first, last) in enumerate(g.bounds.tolist()):
        for x in (k, v):
            x[b, :, :first], x[b, :, last:] = float("nan"), float("nan")
    assert all(same_bits(a, b) for a, b in zip(run(q, k, v, dout, g)[:-1], wanted[:-1], strict=True))


def test_extreme_scores():
    """Scores far apart do not overflow; a NaN or an infinity stays in its row, as in torch."""
    q, k, v, dout = inputs((1, 2, 2, 130, 140, 16, 16), torch.float32)
    g = Given(scale=300.0)
    o, lse = run(q, k, v, dout, g)[:2]
    exact = dense(q.double(), k.double(), v.double(), g)
    torch.testing.assert_close(lse.double(), exact[1], rtol=1e-5, atol=1e-3)
    assert o.isfinite().all()
    q[0, 0, 3, 2], q[0, 1, 9, 0] = float("nan"), INF
    o, lse = run(q, k, v, dout, Given())[:2]
    assert o[0, 0, 3].isnan().all() and o[0, 1, 9].isnan().all() and int(o.isnan().sum()) == 32
    bias = torch.zeros(1, 2, 130, 140)
    bias[0, 1, 7] = -INF
    o, lse = run(*inputs((1, 2, 2, 130, 140, 16, 16), torch.float32), Given(bias=bias))[:2]
    assert (o[0, 1, 7] == 0).all() and lse[0, 1, 7] == -INF and o.isfinite().all()


class Dense(torch.autograd.Function):
    """The kernel as a differentiable function of q, k, v and bias (1, H, T, S), for gradcheck."""

    @staticmethod
    def forward(ctx, q, k, v, bias, g):
        ctx.g = replace(g, bias=bias.detach().expand(q.shape[0], -1, -1, -1))
        ctx.save_for_backward(q, k, v)
        return run(q, k, v, torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype), ctx.g)[0]

    @staticmethod
    def backward(ctx, dout):
        q, k, v = ctx.saved_tensors
        dbias = torch.empty(1, *ctx.g.bias.shape[1:], dtype=q.dtype)
        return *run(q, k, v, dout.contiguous(), ctx.g, 2, dbias)[3:], None


def test_gradcheck():
    shape = (2, 2, 1, 5, 9, 3, 4)
    options = feature("window", shape) | feature("sinks", shape) | feature("bounds", shape) | {"shift": 3}
    g = Given(softcap=2.0, threshold=10000, slopes=randn(2, 2).abs(), **options)
    leaves = [x.requires_grad_() for x in inputs(shape, torch.float64)[:3]]
    leaves.append(randn(1, 2, 5, 9, dtype=torch.float64, seed=9).requires_grad_())
    assert torch.autograd.gradcheck(lambda *leaves: Dense.apply(*leaves, g), leaves)


def test_refusals():
    q, k, v, dout = inputs((1, 4, 2, 5, 6, 8, 8), torch.float32)
    starts = torch.tensor([0, 3, 2], dtype=torch.int32)
    for changed, message in (
        ((q[:, :3], k, v, Given()), "heads of q must be a multiple of those of k, 2, got 3"),
        ((q, k.double(), v, Given()), "k must be float32, got float64"),
        ((q.mT.contiguous().mT, k, v, Given()), "q must have the last stride 1"),
        ((q, k, v[:, :, :4], Given()), r"v must have the shape \(1, 2, 6, 8\), got \(1, 2, 4, 8\)"),
        ((q, k, v, Given(threshold=65536)), "threshold < 65536"),
        ((q, k, v, Given(bias=torch.zeros(1, 4, 5, 5))), r"bias must have the shape \(1, 4, 5, 6\)"),
        ((q, k, v, Given(sinks=torch.zeros(3))), r"sinks must have the shape \(4,\)"),
        ((q, k, v, Given(bounds=torch.zeros(1, 2))), "bounds must be int32"),
        ((q, k, v, Given(starts_q=starts)), "come together"),
        ((q, k, v, Given(starts_q=starts, starts_k=starts)), "starts_q must ascend"),
    ):
        *tensors, g = changed
        with pytest.raises(ValueError, match=message):
            run(*tensors, dout[:, : tensors[0].shape[1]], g)
