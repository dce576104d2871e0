"""Attention calls for tests, with one or several features, and their references.

B batch, H and G heads of queries and of keys, T queries, S keys, D and E widths of keys and of values.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

import hfnn
from hfnn import testing
from hfnn.core.kernel import _interpreting
from hfnn.ops import dropout
from hfnn.ops.attention.reference import reference

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
NAMES = ("triton",) if CUDA else ("cpp", "triton") if _interpreting() else ("cpp",)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

MASKS = ("mask", "blocks", "bias", "shared_bias", "row_bias")
FEATURES = (
    "causal",
    "window",
    "softcap",
    "alibi",
    "sinks",
    "lengths",
    *MASKS,
    "dropout",
    "uniform",
    "gqa",
    "mqa",
    "varlen",
    "offset",
    "lse",
    "widths",
)
P = 0.3  # dropout probability
SEED = 7


@dataclass
class Case:
    """Arguments of a call: `inputs` by name, first those that require gradients, and `options`."""

    inputs: dict
    options: dict = field(default_factory=dict)

    def cast(self, dtype):
        """Fresh leaves. float64, for the definition, casts the inputs; other values keep their dtypes."""
        wide = dtype is torch.float64
        inputs = {
            name: x.detach().to(dtype if wide else x.dtype).clone().requires_grad_() for name, x in self.inputs.items()
        }
        return Case(inputs, self.options)

    def call(self, function, **more):
        """(o,) or (o, lse)."""
        found = function(**self.inputs, **self.options, **more)
        return found if isinstance(found, tuple) else (found,)


def sizes(features, name):
    """(B, H, T, S, D), with more than one block of queries and of keys."""
    if name == "triton" and not CUDA:  # in the interpreter
        if "blocks" in features:
            return 1, 2, 131, 140, 16
        return 1 if "varlen" in features else 2, 4 if "gqa" in features else 2, 21, 37, 16
    return (1 if "varlen" in features else 2), 4, 141, 270, 32


def case(features, dtype=torch.float32, size=None, name="cpp", device=DEVICE, generator=None):
    """A call with all of `features`."""
    batch, heads, queries, keys, width = size or sizes(features, name)
    groups = 1 if "mqa" in features else heads // 2 if "gqa" in features else heads
    normal = lambda *shape: torch.randn(shape, generator=generator).to(dtype).to(device)  # noqa: E731
    inputs = {
        "query": normal(batch, heads, queries, width),
        "key": normal(batch, groups, keys, width),
        "value": normal(batch, groups, keys, width + 24 if "widths" in features else width),
    }
    options = {"enable_gqa": True} if groups != heads else {}
    if "causal" in features:
        options["is_causal"] = True
    if "window" in features:
        options["window"] = keys // 3, None if "causal" in features else 5
    if "softcap" in features:
        options["softcap"] = 1.5
    if "offset" in features:
        options["offset"] = keys // 4
    if "lse" in features:
        options["return_lse"] = True
    if "dropout" in features:
        options["dropout_p"] = P
    if "uniform" in features:  # the first queries see no key
        options |= {"uniform": True, "window": (keys, 0), "offset": -3}
    if "alibi" in features:
        options["alibi"] = (2.0 ** -torch.arange(1, heads + 1)).to(device)
    if "sinks" in features:
        inputs["sinks"] = normal(heads)
    if "lengths" in features:
        last = torch.tensor([[0, 2 * keys // 3], [3, keys]][:batch], dtype=torch.int32)
        options["lengths"] = last.to(device)
    if "varlen" in features:
        options["cu_seqlens"] = starts(queries, device), starts(keys, device, 0.4)
    options, inputs = _masks(features, options, inputs, (batch, heads, queries, keys), dtype, device, generator)
    return Case(inputs, options)


def starts(rows, device, share=0.6):
    """Three sequences; the second is empty."""
    first = int(rows * share)
    return torch.tensor([0, first, first, rows], dtype=torch.int32, device=device)


def _masks(features, options, inputs, shape, dtype, device, generator):
    batch, heads, queries, keys = shape
    if "mask" in features:
        mask = torch.rand((batch, 1, queries, keys), generator=generator) < 0.7
        mask[:, :, :1] = False  # a query that sees nothing
        options["attn_mask"] = mask.to(device)
    if "blocks" in features:  # whole tiles that are hidden, full and mixed
        mask = torch.rand((1, heads, queries, keys), generator=generator) < 0.5
        mask[:, :, :128, 128:] = False
        mask[:, :, 128:, :128] = True
        options["attn_mask"] = mask.to(device)
    wide = {"bias": (batch, heads, queries, keys), "shared_bias": (1, heads, queries, keys)}
    wide["row_bias"] = (batch, 1, 1, keys)
    for name, size in wide.items():
        if name in features:
            bias = torch.randn(size, generator=generator).to(dtype)
            bias[:, :, 1::5] = torch.finfo(dtype).min  # of queries that see no key, as finite masks have it
            inputs["attn_mask"] = bias.to(device)
    return options, inputs


def excluded(features) -> bool:
    """Whether one call cannot have all of these because they use the same argument."""
    return sum(f in features for f in MASKS) > 1 or {"gqa", "mqa"} <= set(features)


def refused(features) -> bool:
    """Whether the call is an error: packed sequences together with a mask, lengths or uniform."""
    return "varlen" in features and any(f in features for f in (*MASKS, "lengths", "uniform"))


def keep_of(case, name="keep"):
    """{} or the pairs that dropout keeps after `torch.manual_seed(SEED)`, for `reference`."""
    p = case.options.get("dropout_p", 0)
    if not p:
        return {}
    query, keys = case.inputs["query"], case.inputs["key"].shape[2]
    torch.manual_seed(SEED)
    seed, offset, _ = dropout.philox_seed(query, 1)
    mask = dropout_mask(seed, offset, *query.shape[:3], keys, round(p * 65536))
    if "cu_seqlens" in case.options:
        both = [starts.tolist() for starts in case.options["cu_seqlens"]]
        local, mask = mask, torch.ones_like(mask)
        for a, b, c, d in zip(both[0], both[0][1:], both[1], both[1][1:], strict=False):
            mask[..., a:b, c:d] = local[..., a:b, : d - c]
    return {name: mask.to(query.device)}


def dropout_mask(seed, offset, batch, heads, queries, keys, threshold):
    """Boolean (B, H, T, S): the pairs that dropout keeps, with the random words of csrc/attention.h."""
    octets = -(-keys // 8)
    counter = np.arange(batch * heads * queries * octets, dtype=np.uint64) + np.uint64(offset)
    low = np.uint64(0xFFFFFFFF)
    seed = seed & (1 << 64) - 1
    a, b = counter & low, counter >> np.uint64(32)
    c, d = np.zeros_like(a), np.full_like(a, 0x68666E61)
    key_low, key_high = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        p, q = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b = (q >> np.uint64(32)) ^ b ^ np.uint64(key_low), q & low
        c, d = (p >> np.uint64(32)) ^ d ^ np.uint64(key_high), p & low
        key_low, key_high = (key_low + 0x9E3779B9) & 0xFFFFFFFF, (key_high + 0xBB67AE85) & 0xFFFFFFFF
    words = np.stack([a, b, c, d], -1).astype(np.uint32)
    numbers = np.stack([words & 0xFFFF, words >> 16], -1).reshape(batch, heads, queries, octets * 8)[..., :keys]
    return torch.from_numpy(numbers >= threshold)


def cotangents(results):
    """Gradients for each result, in bfloat16 values that every dtype represents; 0 where a result is infinite."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(y.shape, generator=generator).bfloat16().to(y) for y in results]
    return [dy.where(y.detach().isfinite(), 0) for dy, y in zip(drawn, results, strict=True)]


def run(case, function, given=None, **more):
    """(results, gradients of all inputs)."""
    torch.manual_seed(SEED)
    results = case.call(function, **more)
    given = cotangents(results) if given is None else given
    given = [dy.to(y.dtype) for dy, y in zip(given, results, strict=True)]
    return results, torch.autograd.grad(results, list(case.inputs.values()), given)


def attention(**arguments):
    return hfnn.functional.scaled_dot_product_attention(**arguments)


def ran_ours(y) -> bool:
    """Whether our autograd node, and so one of our kernels, made y."""
    nodes, seen = [y.grad_fn], 0
    while nodes and seen < 8:
        node, seen = nodes.pop(0), seen + 1
        if node is not None and node.name().startswith("_Attention"):
            return True
        nodes += [after for after, _ in node.next_functions] if node is not None else []
    return False


def assert_close(got, want, torchs, at_most, what):
    """The accuracy rule, plus some ulps where few elements make torch's own error random.

    A gradient that is 0 but for rounding, like that of a query with one key, is only as exact as the cancelling terms.
    """
    few, ulp = got.numel() <= 64, torch.finfo(got.dtype).eps
    if got.dtype is not torch.float32 and got.numel() > 65536:
        testing.assert_close(got, want, torchs, at_most, what)
        return
    assert got.shape == want.shape and got.dtype is torchs.dtype
    if got.dtype is torch.float32 and want.abs().max() < 1e-3 and (got - want).abs().max() < 1e-5:
        return
    # A GPU's exp2 is one instruction, and its float32 products are three of tf32: 11 ulps of a log-sum-exp were seen.
    luck = ulp * ((16 if few or CUDA else 4) if got.dtype is torch.float32 else 1.5 if few else 0.5)
    mine, theirs = testing.error(got, want), testing.error(torchs, want)
    assert mine.l2 <= at_most * theirs.l2 + luck, f"{what}: error {mine.l2:.3g}, torch's own {theirs.l2:.3g}"
    assert mine.largest <= at_most * theirs.largest + luck, f"{what}: {mine.largest:.3g} {theirs.largest:.3g}"


def compare(case, name, sharp=False):
    """The accuracy rule for results and gradients. torch's error is that of the formula in the same dtype.

    sharp: without extra ulps if there are enough elements; on CPUs, with the rounding error of float32 sums, whose
    orders differ.
    """

    terms = max(case.inputs["query"].shape[-2], case.inputs["key"].shape[-2])

    def check(got, *rest):
        if sharp and got.numel() >= 1000:
            testing.assert_close(got, *rest, terms if got.dtype is torch.float32 and not CUDA else 1)
        else:
            assert_close(got, *rest)

    mine = case.cast(None)
    with hfnn.use(name):
        results, grads = run(mine, attention)
    assert ran_ours(results[0]), "no kernel of ours ran"
    keep = keep_of(case)
    given = cotangents(results)
    wide, wide_grads = run(case.cast(torch.float64), reference, given, **keep)
    own, own_grads = run(case.cast(None), reference, given, **keep)
    for what, got, want, torchs in zip(("output", "lse"), results, wide, own, strict=False):
        check(got, want, torchs, testing.OUTPUTS, what)
    for what, got, want, torchs in zip(case.inputs, grads, wide_grads, own_grads, strict=True):
        check(got, want, torchs, testing.GRADIENTS, f"gradient of {what}")
    return results, grads
