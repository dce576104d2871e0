"""Attention against its definition: each feature, every pair of features, and refused combinations."""

import itertools

import pytest
import torch

import hfnn

from .attention_cases import DEVICE, FEATURES, FLOATS, MASKS, NAMES, attention, case, compare, excluded, refused

names = pytest.mark.parametrize("name", NAMES)
PAIRS = [pair for pair in itertools.combinations(FEATURES, 2) if not excluded(pair)]


@names
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("feature", ("plain", *FEATURES))
def test_each_feature(feature, dtype, name):
    compare(case((feature,), dtype, name=name), name)


# Triton's interpreter takes minutes for all pairs; it runs only single features and a few larger sets.
@pytest.mark.parametrize("name", NAMES[:1])
@pytest.mark.parametrize("features", [p for p in PAIRS if not refused(p)], ids="-".join)
def test_every_pair_of_features(features, name):
    # With an option of ours besides: torch refuses a mask together with is_causal.
    ours = ("lse",) if "causal" in features and any(f in MASKS for f in features) else ()
    compare(case((*features, *ours), name=name), name)


@names
@pytest.mark.parametrize(
    "features",
    [
        ("causal", "window", "softcap", "gqa", "sinks", "lse"),  # gemma2, gpt-oss
        ("causal", "window", "sinks", "gqa", "varlen", "dropout", "lse"),
        ("alibi", "causal", "lengths", "dropout", "lse"),
        ("shared_bias", "lengths", "dropout", "offset", "window", "lse"),
        ("mask", "softcap", "sinks", "mqa", "widths", "dropout", "lse"),
        ("blocks", "causal", "window", "gqa", "dropout", "sinks", "lengths", "lse"),
        ("bias", "softcap", "alibi", "sinks", "lengths", "window", "offset", "gqa", "dropout", "widths", "lse"),
    ],
    ids="-".join,
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_many_features_at_once(features, dtype, name):
    compare(case(features, dtype, name=name), name)


@names
@pytest.mark.parametrize("features", [p for p in PAIRS if refused(p)], ids="-".join)
def test_what_excludes_each_other_is_an_error(features, name):
    made = case(features, name=name)
    for forced in (name, "torch"):
        with hfnn.use(forced), pytest.raises((ValueError, RuntimeError), match=r"(?i)mask|lengths|uniform"):
            made.call(attention)


@pytest.mark.skipif(DEVICE != "cpu", reason="torch keeps probabilities on the CPU only")
@pytest.mark.parametrize("keys", [16, 33, 34, 64])
def test_a_trained_bias_keeps_no_more_than_torch(keys):
    q, k, v = (torch.randn(4, 4, keys, 32, requires_grad=True) for _ in range(3))
    bias = torch.randn(keys, keys, requires_grad=True)
    functions = hfnn.functional, torch.nn.functional
    ours, stock = (
        hfnn.memory.saved_bytes(lambda f=f: f.scaled_dot_product_attention(q, k, v, bias)).total for f in functions
    )
    assert ours <= stock


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_makes_infinity_of_float32s_lowest_number_in_a_mask(dtype):
    # With a gradient for the bias alone, torch's kernel for a GPU raises "LSE is not correctly aligned".
    q, k, v = (torch.randn(2, 2, 17, 8, device=DEVICE, requires_grad=True) for _ in range(3))
    bias = torch.randn(17, 17, device=DEVICE, requires_grad=True)
    hidden = torch.eye(17, device=DEVICE).cumsum(0) == 0
    hidden[3] = True  # sees no key
    results = []
    for f in (hfnn.functional, torch.nn.functional):
        with torch.autocast(DEVICE, dtype):
            mask = bias.masked_fill(hidden, torch.finfo(torch.float32).min)
            o = f.scaled_dot_product_attention(q, k, v, mask, **({"prefer": "memory"} if f is hfnn.functional else {}))
        results.append((o, *torch.autograd.grad(o.float().square().sum(), bias)))
    assert not results[0][0][:, :, 3].any()
    for ours, stock in zip(*results, strict=True):
        torch.testing.assert_close(ours, stock, rtol=0.05, atol=0.05)
