"""The definition of attention against torch's own op, and masks in the kernels' format."""

import gc
import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hfnn import testing
from hfnn.core import bits
from hfnn.ops.attention import mask
from hfnn.ops.attention.reference import reference

from .attention_cases import CUDA, DEVICE, Case, case, cotangents, run

torchs = torch.nn.functional.scaled_dot_product_attention


@pytest.mark.parametrize(
    "features", [(), ("causal",), ("gqa",), ("mqa", "widths"), ("mask",), ("bias",), ("row_bias",)]
)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_it_is_torchs(features, scale):
    made = case(features, torch.float64)
    made.options["scale"] = scale
    found, grads = run(made.cast(None), reference)
    own, own_grads = run(made.cast(None), torchs)
    for got, want in zip((*found, *grads), (*own, *own_grads), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_it_is_as_exact_as_torchs_math(dtype):
    made = case(("gqa",), dtype)
    with sdpa_kernel(SDPBackend.MATH):
        own, own_grads = run(made.cast(None), torchs)
    wide, wide_grads = run(made.cast(torch.float64), reference)
    found, grads = run(made.cast(None), reference)
    for got, want, its in zip((*found, *grads), (*wide, *wide_grads), (*own, *own_grads), strict=True):
        testing.assert_close(got, want, its, 1.1)


def dense(made):
    """The call with one dense mask, computed pair by pair where the definition uses arrays."""
    q, k = made.inputs["query"], made.inputs["key"]
    options = dict(made.options)
    bias = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.float64)
    (left, right), offset = options.get("window", (None, None)), options.get("offset", 0)
    bounds = options.get("lengths", torch.tensor([[0, k.shape[2]]] * q.shape[0])).tolist()
    slopes = options.get("alibi", torch.zeros(q.shape[1], device=DEVICE)).tolist()
    for b in range(q.shape[0]):
        for i in range(q.shape[2]):
            for j in range(k.shape[2]):
                away = j - i - offset
                seen = bounds[b][0] <= j < bounds[b][1]
                seen = seen and (left is None or away >= -left) and (right is None or away <= right)
                seen = seen and (away <= 0 or not options.get("is_causal"))
                for h in range(q.shape[1]):
                    bias[b, h, i, j] = -slopes[h] * abs(away) if seen else -math.inf
    return bias.to(DEVICE)


@pytest.mark.parametrize(
    "features",
    [
        ("window",),
        ("window", "offset", "lengths"),
        ("causal", "alibi"),
        ("causal", "window", "offset"),
        ("lengths", "alibi"),
    ],
)
def test_windows_slopes_and_lengths_are_a_mask(features):
    made = case(features, torch.float64, size=(2, 2, 12, 17, 8))
    found, grads = run(made.cast(None), reference)
    own, own_grads = run(Case(made.inputs, {"attn_mask": dense(made)}).cast(None), torchs)
    for got, want in zip((*found, *grads), (*own, *own_grads), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_lengths_are_bounds_from_0():
    made = case((), size=(2, 2, 5, 9, 8))
    for lengths, pairs in (([4, 9], [[0, 4], [0, 9]]), ([0, 3], [[0, 0], [0, 3]])):
        a, b = (reference(**made.inputs, lengths=torch.tensor(x, device=DEVICE)) for x in (lengths, pairs))
        assert torch.equal(a, b)


def test_sinks_are_keys_of_value_0():
    """One more key per head, whose score is the sink and whose value is 0."""
    made = case(("sinks", "lse"), torch.float64, size=(2, 3, 5, 9, 8)).cast(None)
    q, k, v, sinks = made.inputs.values()
    (o, lse), grads = run(made, reference)
    s = torch.cat([q @ k.mT / math.sqrt(8), sinks[None, :, None, None].expand(2, 3, 5, 1)], -1)
    p = s.softmax(-1)[..., :-1]
    want = p @ v, s.logsumexp(-1)
    torch.testing.assert_close((o, lse), want)
    torch.testing.assert_close(grads, torch.autograd.grad(want, [q, k, v, sinks], cotangents(want)))


@pytest.mark.parametrize("sinks", [True, False])
def test_queries_without_keys_give_0(sinks):
    made = case(("sinks", "lse", "mask") if sinks else ("lse", "mask"), size=(2, 2, 5, 9, 8))
    (o, lse), grads = run(made.cast(None), reference)
    hidden = lse[:, :, 0]
    assert not o[:, :, 0].any() and o[:, :, 1:].all()
    assert torch.equal(hidden, made.inputs["sinks"].expand(2, 2)) if sinks else (hidden == -math.inf).all()
    assert not grads[0][:, :, 0].any() and all(g.isfinite().all() for g in grads)


def test_dropout_keeps_what_it_is_told_to():
    made = case((), torch.float64, size=(2, 2, 5, 9, 8))
    keep = torch.rand(2, 2, 5, 9, device=DEVICE) < 0.5
    q, k, v = made.inputs.values()
    want = (q @ k.mT / math.sqrt(8)).softmax(-1) * keep / (1 - round(0.3 * 65536) / 65536) @ v
    torch.testing.assert_close(reference(q, k, v, dropout_p=0.3, keep=keep), want)
    torch.manual_seed(3)
    drawn = reference(q, k, v, dropout_p=0.3)
    torch.manual_seed(3)
    assert torch.equal(drawn, reference(q, k, v, dropout_p=0.3)) and not torch.equal(drawn, reference(q, k, v))


def test_autocast_has_no_say():
    made = case(("softcap", "gqa"))
    want = made.call(reference)[0]
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert torch.equal(made.call(reference)[0], want)


# Masks in the kernels' format


@pytest.mark.parametrize("queries, keys", [(1, 1), (5, 9), (128, 128), (130, 255), (257, 130), (0, 8), (8, 0)])
@pytest.mark.parametrize("broadcast", [(), (0,), (1,), (0, 1), (0, 1, 2), (0, 1, 3)], ids=str)
def test_packed_masks_unpack(queries, keys, broadcast):
    shape = 2, 3, queries, keys
    small = tuple(1 if dim in broadcast else n for dim, n in enumerate(shape))
    x = torch.rand(small, device=DEVICE) < 0.5
    x[..., :128, :128], x[..., 128:, :128] = False, True
    packed, tiles = mask.packed(x, shape)
    octets = -(-keys // 8)
    assert packed.shape == (2, 3, queries, octets) and packed.dtype is torch.uint8
    whole = x.expand(shape)
    rows = bits.unpack(packed.flatten(), (2, 3, queries, octets * 8))
    assert torch.equal(rows[..., :keys], whole) and not rows[..., keys:].any()
    for dim in broadcast[:2]:
        assert packed.stride(dim) == 0 and tiles.stride(dim) == 0
    assert tiles.shape == (2, 3, -(-queries // 128), -(-keys // 128)) and tiles.dtype is torch.uint8
    for i in range(tiles.shape[2]):
        for j in range(tiles.shape[3]):
            tile = whole[:, :, i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128].flatten(2)
            want = tile.any(-1).int() + tile.all(-1).int()
            assert torch.equal(tiles[:, :, i, j].int(), want)


def test_expanded_masks_are_packed_once():
    """A mask that a model expands over heads takes the memory of one head."""
    x = (torch.rand(2, 1, 9, 16, device=DEVICE) < 0.5).expand(2, 5, 9, 16)
    packed, tiles = mask.packed(x, x.shape)
    assert packed.stride(1) == 0 and tiles.stride(1) == 0
    assert torch.equal(bits.unpack(packed.flatten(), x.shape), x)


def test_masks_are_made_once_for_all_layers():
    """Cached per tensor of hfnn's own, or per view of it, until it is written to. Freed with the tensor."""
    known = len(mask._made)
    x = mask.own(torch.rand(2, 1, 9, 24, device=DEVICE) < 0.5)
    shape = 2, 4, 9, 16
    first = mask.packed(x[..., :16], shape)
    assert mask.packed(x[..., :16], shape) is first
    other = mask.packed(x[..., 8:], shape)
    assert not torch.equal(other[0], first[0]) and mask.packed(x[..., :16], (2, 2, 9, 16))[0].shape[1] == 2
    x.logical_not_()
    again = mask.packed(x[..., :16], shape)
    assert torch.equal(again[0], ~first[0]) and len(mask._made) == known + 1
    with torch.inference_mode():
        y = torch.rand(2, 1, 9, 16, device=DEVICE) < 0.5
        assert mask.packed(y, shape)[0].shape == (2, 4, 9, 2)
    del x
    gc.collect()
    assert len(mask._made) == known


@pytest.mark.skipif(not CUDA, reason="waiting for the GPU is what is tested")
def test_no_wait_for_the_gpu():
    x, lengths = torch.rand(2, 1, 200, 300, device="cuda") < 0.5, torch.tensor([3, 300], device="cuda")
    try:
        torch.cuda.set_sync_debug_mode("error")
        mask.packed(x, (2, 4, 200, 300))
        mask.bounds(lengths, 2, 300)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("fill", [torch.Tensor.copy_, lambda x, new: x.data.copy_(new)])
def test_a_callers_mask_may_be_filled_anew(fill):
    """Each call uses a mask's current contents, however they were written."""
    seen, lengths = torch.zeros(1, 1, 9, 16, dtype=torch.bool, device=DEVICE), torch.zeros(4, dtype=torch.int64)
    for seed in range(3):
        torch.manual_seed(seed)
        new, numbers = torch.rand(1, 1, 9, 16, device=DEVICE) < 0.5, torch.randint(9, (4,))
        fill(seen, new), fill(lengths, numbers)
        assert torch.equal(bits.unpack(mask.packed(seen, (1, 1, 9, 16))[0].flatten(), new.shape), new)
        assert mask.bounds(lengths, 4, 9)[:, 1].tolist() == numbers.tolist()


def test_bounds():
    lengths = mask.own(torch.tensor([3, 0, 12, -1], device=DEVICE))
    found = mask.bounds(lengths, 4, 9)
    assert found.tolist() == [[0, 3], [0, 0], [0, 9], [0, 0]] and found.dtype is torch.int32 and found.is_contiguous()
    assert mask.bounds(lengths, 4, 9) is found
    both = torch.tensor([[2, 5], [-3, 20]], device=DEVICE, dtype=torch.int32)
    assert mask.bounds(both.T.contiguous().T, 2, 9).tolist() == [[2, 5], [0, 9]]
    both.zero_()
    assert not mask.bounds(both, 2, 9).any()


def test_what_is_wrong_is_said():
    with pytest.raises(ValueError, match=r"torch.bool, got torch.float32"):
        mask.packed(torch.zeros(2, 2), (1, 1, 2, 2))
    with pytest.raises(ValueError, match=r"\(3, 2\) does not broadcast to \(1, 1, 2, 2\)"):
        mask.packed(torch.zeros(3, 2, dtype=torch.bool), (1, 1, 2, 2))
    for lengths in (torch.zeros(3), torch.zeros(4, dtype=torch.int32), torch.zeros(3, 3, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"shape \(3,\)"):
            mask.bounds(lengths, 3, 9)
