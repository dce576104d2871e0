"""hfreduce.wire: the precision of its formats, and all-reduces and training with them.

The rank programs are in tests/workers/wires.py. Without processes, `played` runs all ranks of an all-reduce with the
three functions that torch's operations and the Triton kernels both have.
"""

from pathlib import Path

import pytest
import ranks
import torch
from hosts import hosts

from haiscale.ddp.hooks import GradBucket
from hfreduce import wire

WORKER = Path(__file__).parents[1] / "workers" / "wires.py"
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["hfreduce", pytest.param("gloo", marks=pytest.mark.rest), *["hfreduce on GPUs"] * torch.cuda.is_available()]
BACKENDS += ["nccl on GPUs"] * (torch.cuda.device_count() > 1)
REPEATABLE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def rows(count, length, dtype):
    """As Reduction allocates them; filled with values that must all be overwritten."""
    if dtype == BF16:
        return torch.full((count, length), torch.nan, dtype=BF16, device=DEVICE)
    return torch.full((count, -(-(length + length // wire.BLOCK) // 16) * 16), 0x7F, dtype=torch.uint8, device=DEVICE)


def played(kernels, inputs, errors, dtype, mean):
    """The result of every rank."""
    size, n = len(inputs), inputs[0].numel()
    length = -(-n // (size * wire.BLOCK)) * wire.BLOCK
    sent, sums = [rows(size, length, dtype) for _ in inputs], []
    for r, (x, error) in enumerate(zip(inputs, errors, strict=True)):
        kernels.encode(x, error, sent[r], r, length)
    for r, (x, error) in enumerate(zip(inputs, errors, strict=True)):
        sums.append(rows(1, length, dtype))
        kernels.reduce(x, error, torch.stack([s[r] for s in sent]), sums[r], r, length, mean)
    results = [torch.full_like(x, torch.nan) for x in inputs]
    for result in results:
        kernels.decode(torch.cat(sums), result, length)
    return results


def spread(n, seed, dtype=torch.float32, smallest=1e-36):
    """Numbers of very different magnitudes, including zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator) * torch.randn(n, generator=generator).mul(3).exp()
    x[5:200] *= smallest
    x[300:700] = 0
    x[650:660] = -0.0
    return x.clamp(-2e4, 2e4).to(dtype).to(DEVICE)


def test_float8_keeps_its_three_bits():
    """Compared with torch's cast of the numbers divided by the scale; each is within half a step."""
    x = spread(10_000, 1)
    row = rows(1, 10_112, FP8)[0]
    wire._put(x, row, 0, 10_112)
    got = wire._get(row, 0, 10_000, 10_112)
    blocks = torch.nn.functional.pad(x, (0, 112)).view(-1, 128).double()
    largest = blocks.abs().amax(1, keepdim=True)
    scales = 2.0 ** torch.ceil(torch.log2(largest / 448)).clamp(min=-126)
    want = ((blocks / scales).float().to(FP8).double() * scales).view(-1)[:10_000]
    assert torch.equal(got.double(), want)
    assert torch.equal(got.signbit(), x.signbit())
    step = torch.maximum(x.abs() / 16, (scales * 2**-10).expand_as(blocks).reshape(-1)[:10_000])
    assert ((got - x).abs() <= step).all() and (got != x).any()
    assert (blocks.abs().amax(1) / scales[:, 0] <= 448).all()


@pytest.mark.parametrize("value", [1.0, 448.0, 449.0, 1.75 * 2**100, 3.2e38, 2.0**-126, 1e-42, 0.0])
def test_float8_scale(value):
    """One large number, of any magnitude, keeps 3 bits; so does the smallest number with a code."""
    x = torch.zeros(128, device=DEVICE)
    x[3], x[4] = -value, value * 2.0**-14
    row = rows(1, 128, FP8)[0]
    wire._put(x, row, 0, 128)
    got = wire._get(row, 0, 128, 128)
    assert (got - x).abs().max() <= max(value / 16, 2.0**-136)
    if 1e-30 < value < 1e30:
        assert got[4] > 0


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("x_dtype", [torch.float32, BF16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", wire.FORMATS, ids=str)
@pytest.mark.parametrize("n, size", [(1, 2), (1000, 3), (9000, 4), (385, 4)])
def test_triton_kernels_give_the_same_bits(n, size, dtype, x_dtype, feedback):
    pytest.importorskip("triton")
    from hfnn.kernels import wire as kernels

    # Triton's interpreter is wrong about subnormal bfloat16 numbers.
    smallest = 1e-25 if BF16 in (dtype, x_dtype) else 1e-36
    inputs = [spread(n, seed, x_dtype, smallest) for seed in range(size)]
    if n > 500:
        inputs[0][5], inputs[1][6], inputs[-1][n - 1] = torch.inf, torch.nan, -torch.inf
        inputs[0][600] = min(torch.finfo(x_dtype).max, 1e38) / 4
    results = []
    for which in (wire, kernels):
        errors = [spread(n, seed + 9, smallest=smallest) / 16 if feedback else None for seed in range(size)]
        results.append(played(which, inputs, errors, dtype, size) + [error for error in errors if feedback])
    for ours, theirs in zip(*results, strict=True):
        # NaN in the same places; the bits of a NaN are unspecified.
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num(0, 7, -7), theirs.nan_to_num(0, 7, -7))
    if n > 500:
        assert set((~results[0][0].isfinite()).nonzero().flatten().tolist()) == {5, 6, n - 1}


def test_what_is_refused():
    x, error = torch.zeros(4), torch.zeros(5)
    for options, words in (
        ({"x": x.int()}, "got torch.int32"),
        ({"x": x.to(FP8)}, "got torch.float8_e4m3fn"),
        ({"op": "max"}, "one of sum, avg, got 'max'"),
        ({"dtype": torch.float16}, "one of torch.bfloat16, torch.float8_e4m3fn, got torch.float16"),
        ({"error": error}, "with x's 4 elements"),
        ({"error": error.half()[:4]}, "got torch.float16"),
        ({}, "no process group"),
    ):
        with pytest.raises(ValueError, match=words):
            wire.all_reduce_(**{"x": x, **options})


def test_hook_keeps_nothing_for_other_buckets():
    """The kept error belongs to a bucket's parameters in their order."""
    first, second = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))

    def bucket(*parameters):
        return GradBucket(0, 1, torch.zeros(8), [], list(parameters))

    state = wire.HookState()
    kept = state.error(bucket(first, second))
    assert kept.shape == (8,) and not kept.any()
    kept.fill_(1)
    assert state.error(bucket(first, second)) is kept
    assert not state.error(bucket(second, first)).any()
    assert not state.error(bucket(first, second)).any()
    assert wire.HookState(error_feedback=False).error(bucket(first)) is None


def ran(function, size, backend, factory):
    """What the ranks returned. "... on GPUs": each rank has one; with hfreduce they may share them."""
    backend, _, gpus = backend.partition(" on ")
    return ranks.run(
        WORKER, function, size, factory.mktemp(function), backend=backend, timeout=240, gpus=bool(gpus),
        env=lambda rank: {"DDP_DEVICE": f"cuda:{rank % torch.cuda.device_count()}", **REPEATABLE} if gpus else {},
    )  # fmt: skip


@pytest.fixture(scope="module", params=BACKENDS)
def found(request, tmp_path_factory):
    """What three ranks, or two, returned, on each backend."""
    size = 3 if "nccl" not in request.param else min(3, torch.cuda.device_count())
    return ran("sums", size, request.param, tmp_path_factory)


def test_accuracy(found):
    """Errors are within two roundings, and the average error shows that values were rounded to this format."""
    for case, values in found[0]["accuracy"].items():
        assert values["largest"] <= 1, (case, values)
        if not case.startswith(("0 ", "1 ", "7 ")):
            low, high = (0.01, 0.05) if "float8" in case else (0.0005, 0.006)
            assert low < values["mean"] < high, (case, values)


def test_the_same_bits_on_all_ranks_and_in_all_runs(found):
    """In all layouts, too."""
    for case in found[0]["accuracy"]:
        assert len({d for result in found for d in result["accuracy"][case]["digests"]}) == 1, case


def test_error_feedback(found):
    """The rounding error is kept, so the mean over 50 steps converges."""
    for dtype, plain in (("torch.float8_e4m3fn", 0.01), ("torch.bfloat16", 0.0005)):
        values = found[0]["feedback"]
        assert values[f"{dtype} False"] > plain, values
        assert values[f"{dtype} True"] < values[f"{dtype} False"] / 20, values
        assert values[f"{dtype} kept"] < 0.01, values


def test_what_is_not_finite(found):
    for dtype, values in (("float8_e4m3fn", ["nan"] * 4), ("bfloat16", ["inf", "-inf", "nan", "inf"])):
        for result in found:
            assert result["non_finite"][f"torch.{dtype}"] == [[3, 4, 500, 900], values, True, True]


def test_several_under_way(found):
    assert all(result["order"] for result in found)


def test_groups(found):
    """A group of one rounds nothing. In other groups, ranks outside are not involved."""
    results = [result["alone"] for result in found]
    assert all(unchanged for unchanged, _ in results)
    assert results[0][1] == results[-1][1] is not None
    assert all(outside is None for _, outside in results[1:-1])


@pytest.fixture(scope="module", params=BACKENDS)
def under_ddp(request, tmp_path_factory):
    """What two ranks returned, on each backend."""
    return ran("under_ddp", 2, request.param, tmp_path_factory)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_training(backend, tmp_path_factory):
    """A small GPT-2 learns as in float32; ranks have bitwise equal parameters."""
    ours, others = ran("training", 2, backend, tmp_path_factory)
    print({name: found["losses"][::10] + found["losses"][-1:] for name, found in ours.items() if "losses" in found})
    exact = torch.tensor(ours["float32"]["losses"])
    assert exact[-1] < 0.6 * exact[0]
    for name in ("fed", "unfed", "hook", "hook_unfed", "hook_bf16"):
        assert ours[name]["digest"] == others[name]["digest"] != ours["float32"]["digest"], name
        losses = torch.tensor(ours[name]["losses"])
        assert ((losses - exact).abs() < 0.02 * exact[0]).all(), (name, (losses - exact).abs().max())


def test_ddp_keeps_what_it_left_out(under_ddp):
    """Through no_sync and rebuilt buckets: every input is in the result, or in the kept error."""
    for found in under_ddp[0]["kept"].values():
        wrong, lacking, counts = found
        assert wrong < 1e-3 and lacking > 1e-3, found
        assert len(set(counts)) == 3, found


def test_ddp_says_so(under_ddp):
    told, *refused = under_ddp[0]["said"]
    assert "averaged in float32 from float8_e4m3fn on the wire with error feedback; views of buckets" in told
    for text, words in zip(
        refused, ("wire_dtype=torch.float8_e5m2", "got wire_dtype=torch.bfloat16", "=None", "cpu_assisted"), strict=True
    ):
        assert words in text and "torch.float8_e4m3fn" in text


def test_ddp_join_and_unused_parameters(under_ddp):
    assert under_ddp[0]["uneven"] == under_ddp[1]["uneven"] and under_ddp[0]["unused"] == under_ddp[1]["unused"]


@pytest.mark.rest
@pytest.mark.parametrize("backend", ["hfreduce", "gloo"])
def test_hosts_of_two_ranks(backend, tmp_path):
    """Inside a host nothing is rounded, and a host sends as little as one rank. Errors are kept, also under DDP."""
    with hosts(2) as h:
        results = ranks.run(
            WORKER, "of_hosts", 4, tmp_path, prefix=lambda rank: h.prefix(rank // 2), backend=backend, timeout=120
        )
    for rank, found in enumerate(results):
        assert found["groups"] == [[rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]]
        assert found["digests"] == results[0]["digests"] and found["order"]
        assert all(0.001 < wrong < 0.05 for wrong in found["wrong"][1:]), found["wrong"]
        assert max(found["kept"]) < 1e-5, found["kept"]
        for wrong, lacking, counts in found["ddp"].values():
            assert wrong < 1e-3 and lacking > 1e-3 and len(set(counts)) == 3, found
        whole, quarter = found["bytes"]
        print(whole, quarter / whole)
        assert quarter < 0.27 * (16 << 20)


def test_bytes_between_hosts(tmp_path):
    """As counted by a network interface, including headers and acknowledgements."""
    with hosts(2) as h:
        results = ranks.run(WORKER, "travels", 2, tmp_path, prefix=h.prefix, count=4 << 20, rounds=2, timeout=120)
    for found in results:
        whole, half, quarter = (found[name][-1][1] for name in ("float32", "bfloat16", "float8_e4m3fn"))
        print(whole, half / whole, quarter / whole)
        assert 16 << 20 < whole < 18 << 20  # 2 (n - 1) / n of the tensor
        assert half < 0.52 * whole and quarter < 0.27 * whole
