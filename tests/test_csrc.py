"""The C++ CPU kernels, called as `hfnn._C.cpu.<op>`: arguments that no room passes, and bits that no room can observe.

R rows, C columns, N elements. tests/ops covers accuracy and gradients.
"""

import pytest
import torch
from torch._subclasses import FakeTensorMode

_C = pytest.importorskip("hfnn._C", reason="the C++ kernels are not built")
cpu = _C.cpu

PAIRS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float64, torch.float64),
]


def nan(*shape, dtype=torch.float32):
    return torch.full(shape, float("nan"), dtype=dtype)


def same_bits(a, b):
    """Equal as integers; any NaN equals any other."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return bool(((a.view(integer) == b.view(integer)) | (a.isnan() & b.isnan())).all())


def layer_norm(x_RC, w_C, b_C, y_dtype, threads):
    """Every output of the three calls, in buffers filled with NaN."""
    (R, C), op = x_RC.shape, cpu.layer_norm
    wide = torch.float64 if x_RC.dtype == torch.float64 else torch.float32
    y_RC, again_RC = nan(R, C, dtype=y_dtype), nan(R, C, dtype=y_dtype)
    mean_R, rstd_R = nan(R, dtype=wide), nan(R, dtype=wide)
    op.forward(x_RC, w_C, b_C, y_RC, mean_R, rstd_R, 1e-5, threads)
    op.rebuild(x_RC, w_C, b_C, mean_R, rstd_R, again_RC, threads)
    dx_RC, dw_C, db_C = nan(R, C, dtype=x_RC.dtype), nan(C, dtype=w_C.dtype), nan(C, dtype=w_C.dtype)
    partials_2PC = nan(2, op.partials(R, C), C, dtype=wide)
    op.backward(y_RC, x_RC, w_C, mean_R, rstd_R, dx_RC, dw_C, db_C, partials_2PC, threads)
    return y_RC, again_RC, mean_R, rstd_R, dx_RC, dw_C, db_C


def rms_norm(x_RC, w_C, y_dtype, threads):
    (R, C), op = x_RC.shape, cpu.rms_norm
    wide = torch.float64 if x_RC.dtype == torch.float64 else torch.float32
    y_RC, again_RC, rstd_R = nan(R, C, dtype=y_dtype), nan(R, C, dtype=y_dtype), nan(R, dtype=wide)
    op.forward(x_RC, w_C, y_RC, rstd_R, 1e-5, 1.0, threads)
    op.rebuild(x_RC, w_C, rstd_R, again_RC, 1.0, threads)
    dx_RC, dw_C = nan(R, C, dtype=x_RC.dtype), nan(C, dtype=w_C.dtype)
    partials_1PC = nan(1, op.partials(R, C), C, dtype=wide)
    op.backward(y_RC, x_RC, w_C, rstd_R, dx_RC, dw_C, partials_1PC, 1.0, threads)
    return y_RC, again_RC, rstd_R, dx_RC, dw_C


@pytest.mark.parametrize("x_dtype,y_dtype", PAIRS)
@pytest.mark.parametrize("R,C", [(0, 5), (1, 1), (5, 3), (130, 769)])
def test_norms_rebuild_the_bits_and_do_not_depend_on_the_threads(R, C, x_dtype, y_dtype):
    x_RC, w_C, b_C = (torch.randn(s, dtype=torch.float64).to(x_dtype) for s in ((R, C), (C,), (C,)))
    for run in (lambda t: layer_norm(x_RC, w_C, b_C, y_dtype, t), lambda t: rms_norm(x_RC, w_C, y_dtype, t)):
        one, three = run(1), run(3)
        assert not any(t.isnan().any() for t in one)
        assert all(map(same_bits, one, three))
        assert same_bits(one[0], one[1])


@pytest.mark.parametrize("tanh", [False, True])
def test_gelu_does_not_depend_on_the_threads_or_on_the_place(tanh):
    x_N = torch.randn(70001)
    one_N, three_N, tail_N = nan(70001), nan(70001), nan(70001 - 517)
    cpu.gelu.forward(x_N, one_N, tanh, 1)
    cpu.gelu.forward(x_N, three_N, tanh, 3)
    cpu.gelu.forward(x_N[517:], tail_N, tanh, 1)
    assert same_bits(one_N, three_N) and same_bits(one_N[517:], tail_N)
    ones_N = torch.ones_like(x_N)
    cpu.gelu.backward(ones_N, x_N, one_N, tanh, 1)
    cpu.gelu.backward(ones_N, x_N, three_N, tanh, 3)
    assert same_bits(one_N, three_N)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_gelu_at_the_ends(dtype):
    x_N = torch.tensor([float("inf"), float("nan"), 100.0, -100.0, 0.0], dtype=dtype)
    for tanh in (False, True):
        y_N = torch.empty_like(x_N)
        cpu.gelu.forward(x_N, y_N, tanh, 1)
        assert y_N[0] == float("inf") and y_N[1].isnan() and y_N[2] == 100 and y_N[3] == 0 and y_N[4] == 0


# Philox, in Python's integers.


def philox(counter, key):
    """Philox4x32-10: four words from a counter of four words and a key of two."""
    (a, b, c, d), (k, l) = counter, key
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = q >> 32 ^ b ^ k, q & 0xFFFFFFFF, p >> 32 ^ d ^ l, p & 0xFFFFFFFF
        k, l = (k + 0x9E3779B9) & 0xFFFFFFFF, (l + 0xBB67AE85) & 0xFFFFFFFF
    return a, b, c, d


def kept(n, threshold, seed, offset):
    words = []
    for i in range((n + 3) // 4):
        c, key = (offset + i) % 2**64, seed % 2**64
        words += philox((c & 0xFFFFFFFF, c >> 32, 0, 0x68666E6E), (key & 0xFFFFFFFF, key >> 32))
    return torch.tensor(words[:n], dtype=torch.int64) >= threshold


def test_the_reference_knows_the_answers_of_random123():
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    f = 0xFFFFFFFF
    assert philox((f, f, f, f), (f, f)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


# The counter crosses 2^32, then 2^64.
@pytest.mark.parametrize("N,seed,offset", [(1, 1, 0), (7, -5, 2**32 - 1), (1025, 2**62 + 7, -2), (40000, 123, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dropout_draws_what_its_header_says(N, seed, offset, dtype):
    x_N, threshold = torch.randn(N).to(dtype), 2**31 // 5
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scaled_N = (x_N.to(wide) * torch.tensor(1.25, dtype=wide)).to(dtype)
    expected_N = torch.where(kept(N, threshold, seed, offset), scaled_N, torch.zeros_like(x_N))
    for threads, pair in ((1, None), (3, None), (1, torch.tensor([seed, offset]))):
        y_N = nan(N, dtype=dtype)
        given = (seed, offset) if pair is None else (0, 0)
        cpu.dropout.forward(x_N, y_N, threshold, 1.25, *given, pair, threads)
        assert same_bits(y_N, expected_N)


def test_dropout_of_nothing_and_of_everything():
    x_N, y_N = torch.randn(100), nan(100)
    cpu.dropout.forward(x_N, y_N, 0, 1.0, 1, 0, None, 1)
    assert same_bits(x_N, y_N)
    x_N[3] = float("nan")
    cpu.dropout.forward(x_N, y_N, 2**32, 1.0, 1, 0, None, 1)
    assert same_bits(y_N, torch.zeros(100))


# Storage. torch's casts are the reference: all float16 values, and all cases of rounding to 16 bits.


def test_float16_loads_and_stores_every_value():
    x_N = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    y_N, y_1N = nan(65536, dtype=torch.float16), nan(1, 65536)
    cpu.dropout.forward(x_N, y_N, 0, 1.0, 0, 0, None, 1)
    assert same_bits(x_N, y_N)
    cpu.layer_norm.rebuild(x_N[None], None, None, torch.zeros(1), torch.ones(1), y_1N, 1)
    assert same_bits(y_1N[0], x_N.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stores_round_to_nearest_even(dtype):
    edges = [65504.0, 65519.99, 65520.0, 2**-24, 2**-25, 2**-25 * 1.0001, 2**-14, float("inf"), float("nan")]
    x_N = (torch.arange(100000, dtype=torch.int32) * 0x800 + 0x33000000).view(torch.float32)
    x_1N = torch.cat([x_N, -x_N, torch.tensor(edges)])[None]
    y_1N = torch.empty_like(x_1N, dtype=dtype)
    cpu.layer_norm.rebuild(x_1N, None, None, torch.zeros(1), torch.ones(1), y_1N, 1)
    assert same_bits(y_1N, x_1N.to(dtype))
    # Weights are read, and their gradients written, without the instructions used for rows of float16.
    w_C, ones_1C, y_1C = x_1N[0].to(dtype), torch.ones_like(x_1N), torch.empty_like(x_1N)
    cpu.rms_norm.rebuild(ones_1C, w_C, torch.ones(1), y_1C, 0.0, 1)
    assert same_bits(y_1C[0], w_C.float())
    dw_C, partials_1PC = torch.empty_like(w_C), nan(1, 1, w_C.numel())
    cpu.rms_norm.backward(x_1N, ones_1C, w_C, torch.ones(1), None, dw_C, partials_1PC, 0.0, 1)
    assert same_bits(dw_C, w_C)


# Refusals.


def norm(x=(4, 8), weight=(8,), bias=(8,), y=(4, 8), mean=(4,), rstd=(4,), **dtypes):
    """A forward call with tensors of these shapes. x_dtype=... etc. set dtypes other than float32."""
    shapes = {"x": x, "weight": weight, "bias": bias, "y": y, "mean": mean, "rstd": rstd}
    tensors = [torch.zeros(s, dtype=dtypes.get(f"{name}_dtype")) for name, s in shapes.items()]
    cpu.layer_norm.forward(*tensors, 1e-5, 1)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"x": (8,)}, r"x must have the shape \(R, C\) with C > 0, got \(8,\)"),
        ({"weight": (7,)}, r"weight must have the shape \(8,\), got \(7,\)"),
        ({"y": (4, 7)}, r"y must have the shape \(4, 8\), got \(4, 7\)"),
        ({"rstd": (3,)}, r"rstd must have the shape \(4,\), got \(3,\)"),
        ({"mean_dtype": torch.float64}, "mean must be float32, got float64"),
        ({"bias_dtype": torch.bfloat16}, "weight.dtype must equal bias.dtype, got float32 and bfloat16"),
        ({"x_dtype": torch.int64}, "x must be float32, bfloat16, float16 or float64, got int64"),
        ({"y_dtype": torch.float64}, "y must be float32, bfloat16 or float16 when x is float32, got float64"),
    ],
)
def test_norms_say_what_they_were_given_and_what_they_take(change, message):
    norm()
    with pytest.raises(ValueError, match=message):
        norm(**change)


def test_backward_needs_partials_of_the_right_size():
    x_RC, w_C, stat_R = torch.randn(100, 8), torch.randn(8), torch.ones(100)
    P = cpu.layer_norm.partials(100, 8)
    for partials, got in ((None, "None"), (nan(2, P + 1, 8), rf"\(2, {P + 1}, 8\)")):
        with pytest.raises(ValueError, match=f"partials must .*, got {got}"):
            cpu.layer_norm.backward(x_RC, x_RC, w_C, stat_R, stat_R, None, w_C, None, partials, 1)


def test_backward_of_nothing_writes_nothing():
    x_RC, stat_R = torch.randn(100, 8), torch.ones(100)
    cpu.layer_norm.backward(x_RC, x_RC, None, stat_R, stat_R, None, None, None, None, 1)
    cpu.rms_norm.backward(x_RC, x_RC, None, stat_R, None, None, None, 0.0, 1)


def test_elementwise_refusals():
    x = torch.randn(4, 4)
    with pytest.raises(ValueError, match=r"y must have the shape \(4, 4\), got \(4, 3\)"):
        cpu.gelu.forward(x, torch.empty(4, 3), False, 1)
    with pytest.raises(ValueError, match="y must be float32, got float16"):
        cpu.silu.forward(x, torch.empty(4, 4, dtype=torch.float16), 1)
    with pytest.raises(ValueError, match="y must be float16 or float32 when x is float16, got bfloat16"):
        cpu.gelu.forward(x.half(), torch.empty(4, 4, dtype=torch.bfloat16), False, 1)
    with pytest.raises(ValueError, match=r"y must be .* when x is float32, got float64"):
        cpu.gelu.forward(x, torch.empty(4, 4, dtype=torch.float64), False, 1)
    with pytest.raises(ValueError, match=r"x must be contiguous, got the strides \(1, 4\)"):
        cpu.gelu.forward(x.t(), torch.empty(4, 4), False, 1)
    with pytest.raises(ValueError, match=r"pair must have the shape \(2,\), got \(3,\)"):
        cpu.dropout.forward(x, torch.empty(4, 4), 0, 1.0, 0, 0, torch.zeros(3, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match="threshold"):
        cpu.dropout.forward(x, torch.empty(4, 4), 2**32 + 1, 1.0, 0, 0, None, 1)


def no_memory():
    x = torch.randn(4)
    x.untyped_storage().resize_(0)
    return x


def fake():
    with FakeTensorMode():
        return torch.empty(4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, dtype=torch.complex64),
        lambda: torch.randn(4, dtype=torch.complex64).conj(),
        lambda: torch.ones(4).to_sparse(),
        lambda: torch.eye(4).to_sparse_csr(),
        lambda: torch.empty(4, device="meta"),
        lambda: [1.0, 2.0],
        no_memory,
        fake,
    ],
    ids=["complex", "conj", "sparse", "csr", "meta", "list", "no memory", "fake"],
)
def test_what_no_kernel_can_read_is_a_type_error(make):
    with pytest.raises(TypeError, match="kernels take dense, real tensors"):
        cpu.gelu.forward(make(), torch.empty(4), False, 1)
