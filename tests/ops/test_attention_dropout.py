"""Attention's dropout, and packed sequences."""

import math

import pytest
import torch

import hfnn
from hfnn import testing
from hfnn.ops.attention.reference import reference

from .attention_cases import (
    DEVICE,
    NAMES,
    SEED,
    Case,
    attention,
    case,
    cotangents,
    dropout_mask,
    keep_of,
    ran_ours,
    run,
)

names = pytest.mark.parametrize("name", NAMES)


def kept(p, shape, name, **options):
    """Which pairs were kept, observed through equal scores and an identity as values: (B, H, T, S)."""
    batch, heads, queries, keys = shape
    query = torch.zeros(batch, heads, queries, 16, device=DEVICE)
    key = torch.zeros(batch, heads, keys, 16, device=DEVICE)
    value = torch.eye(keys, device=DEVICE).expand(batch, heads, keys, keys)
    with hfnn.use(name):
        return attention(query=query, key=key, value=value, dropout_p=p, **options) * keys


@names
@pytest.mark.parametrize("p", [0.1, 0.5, 1 / 3, 0.9])
def test_p_is_exact(p, name):
    """The kept share is within five standard deviations of 1 - p, and the scale is its inverse."""
    weights = kept(p, (2, 4, 64, 64), name)
    exact = round(p * 65536) / 65536
    share = (weights != 0).double().mean().item()
    assert abs(share - (1 - exact)) < 5 * math.sqrt(p * (1 - p) / weights.numel())
    torch.testing.assert_close(weights[weights != 0], torch.full_like(weights[weights != 0], 1 / (1 - exact)))


@names
def test_the_mask_is_that_of_the_definition(name):
    """All pairs. The 37 keys are not divisible by 8, and seeds exceed 32 bits on the CPU."""
    torch.manual_seed(SEED)
    weights = kept(0.3, (2, 3, 21, 37), name)
    made = Case({"query": weights.new_empty(2, 3, 21, 1), "key": weights.new_empty(2, 3, 37, 1)}, {"dropout_p": 0.3})
    assert torch.equal(weights != 0, keep_of(made)["keep"])


def test_the_words_are_philox():
    """Checks the tests' own random words against Philox4x32-10 of Salmon et al., in plain integers, pair by pair."""

    def word(seed, counter, index):
        x, key = [counter & 0xFFFFFFFF, counter >> 32, 0, 0x68666E61], [seed & 0xFFFFFFFF, seed >> 32]
        for _ in range(10):
            p, q = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
            x = [q >> 32 ^ x[1] ^ key[0], q & 0xFFFFFFFF, p >> 32 ^ x[3] ^ key[1], p & 0xFFFFFFFF]
            key = [key[0] + 0x9E3779B9 & 0xFFFFFFFF, key[1] + 0xBB67AE85 & 0xFFFFFFFF]
        return x[index]

    seed, offset, (batch, heads, queries, keys), threshold = 0x123456789ABCDEF, 1 << 33, (2, 2, 3, 11), 20000
    mask = dropout_mask(seed, offset, batch, heads, queries, keys, threshold)
    for b, h, i, j in ((0, 0, 0, 0), (0, 1, 2, 7), (1, 0, 1, 8), (1, 1, 2, 10), (1, 1, 0, 3)):
        number = word(seed, offset + ((b * heads + h) * queries + i) * 2 + j // 8, j % 8 // 2) >> 16 * (j % 2) & 0xFFFF
        assert mask[b, h, i, j].item() == (number >= threshold)


@pytest.mark.skipif(len(NAMES) < 2, reason="there is one kernel")
def test_every_kernel_gives_the_same_mask():
    masks = []
    for name in NAMES:
        torch.manual_seed(SEED)
        masks.append(kept(0.3, (1, 2, 21, 37), name) != 0)
    assert torch.equal(*masks)


@names
def test_draws_follow_torchs_generator(name):
    torch.manual_seed(5)
    first, second = (kept(0.5, (1, 2, 16, 32), name) for _ in range(2))
    assert 0.3 < ((first != 0) == (second != 0)).double().mean().item() < 0.7
    torch.manual_seed(5)
    assert torch.equal(kept(0.5, (1, 2, 16, 32), name), first)
    assert torch.equal(kept(0.5, (1, 2, 16, 32), name), second)


@names
def test_rows_heads_and_draws_share_no_numbers(name):
    """Any two rows of two draws agree only by chance."""
    torch.manual_seed(5)
    rows = torch.cat([(kept(0.5, (2, 2, 8, 64), name) != 0).flatten(0, 2) for _ in range(2)]).double() * 2 - 1
    correlation = (rows @ rows.T / rows.shape[1]).fill_diagonal_(0)
    assert correlation.abs().max() < 6 / math.sqrt(rows.shape[1])


@names
def test_limits(name):
    made = case(("dropout", "softcap"), name=name)
    for p in (0.0, 1e-6):  # less than 1 / 65536
        made.options["dropout_p"] = p
        with hfnn.use(name):
            (y,) = made.call(attention)
        want = reference(**made.inputs, softcap=1.5)
        assert testing.error(y, want.double()).l2 < 1e-5


# Packed sequences


def sequences(lengths_q, lengths_k, dtype=torch.float32, heads=4, groups=2, width=16):
    """A call with cu_seqlens, and the rows of each sequence."""
    starts = [torch.tensor([0, *x], device=DEVICE).cumsum(0).int() for x in (lengths_q, lengths_k)]
    normal = lambda *shape: torch.randn(shape).to(dtype).to(DEVICE)  # noqa: E731
    query = normal(1, heads, sum(lengths_q), width)
    key, value = (normal(1, groups, sum(lengths_k), width) for _ in range(2))
    made = Case({"query": query, "key": key, "value": value}, {"cu_seqlens": tuple(starts), "enable_gqa": True})
    places = [x.tolist() for x in starts]
    return made, list(zip(places[0], places[0][1:], places[1], places[1][1:], strict=False))


@names
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"window": (9, 3), "softcap": 2.0, "offset": 4}, {"alibi": "and sinks"}]
)
def test_sequences_give_the_bits_they_give_alone(options, dtype, name):
    lengths = [17, 1, 0, 40] if name == "triton" else [130, 1, 0, 257, 64]
    others = [30, 5, 3, 0] if name == "triton" else [97, 5, 3, 300, 64]
    for keys in (lengths, others):
        made, places = sequences(lengths, keys, dtype)
        made.options |= {**options, "return_lse": True}
        if "alibi" in options:
            made.inputs["sinks"] = torch.randn(4, device=DEVICE).to(dtype)
            made.options["alibi"] = torch.rand(4, device=DEVICE)
        with hfnn.use(name):
            together, grads = run(made.cast(None), attention)
            assert ran_ours(together[0])
            given = cotangents(together)
            for a, b, c, d in places:
                rows = {"query": slice(a, b), "key": slice(c, d), "value": slice(c, d), "sinks": slice(None)}
                inputs = {
                    what: x if what == "sinks" else x[:, :, rows[what]].contiguous() for what, x in made.inputs.items()
                }
                alone = Case(inputs, {what: x for what, x in made.options.items() if what != "cu_seqlens"}).cast(None)
                results, its = run(alone, attention, [given[0][:, :, a:b], given[1][:, :, a:b]])
                for x, y in zip(results, together, strict=True):
                    assert torch.equal(x, y[:, :, a:b])
                for what, x, y in zip(made.inputs, its, grads, strict=False):
                    assert what == "sinks" or torch.equal(x, y[:, :, rows[what]]), what


@names
def test_one_cu_seqlens_serves_both(name):
    made, _ = sequences([9, 4, 20], [9, 4, 20])
    made.options["is_causal"] = True
    with hfnn.use(name):
        (want,) = made.call(attention)
        made.options["cu_seqlens"] = made.options["cu_seqlens"][0]
        assert torch.equal(made.call(attention)[0], want)


@names
def test_rows_of_no_sequence(name):
    """Padding after the last sequence: results and gradients are 0, and it is not read."""
    made, _ = sequences([9, 4], [9, 4])
    padded = {
        what: torch.cat([x, x.new_full((*x.shape[:2], 7, x.shape[3]), torch.nan)], 2) for what, x in made.inputs.items()
    }
    made.options["softcap"] = 2.0
    with hfnn.use(name):
        mine = Case(padded, made.options).cast(None)
        dy = torch.randn(1, 4, 13, 16, device=DEVICE)
        (y,), grads = run(mine, attention, [torch.cat([dy, dy[:, :, :7]], 2)])
        want, want_grads = run(made.cast(None), attention, [dy])
    assert torch.equal(y[:, :, :13], want[0]) and not y[:, :, 13:].any()
    for got, right in zip(grads, want_grads, strict=True):
        assert torch.equal(got[:, :, :13], right) and not got[:, :, 13:].any()


@names
def test_dropout_in_sequences_counts_keys_from_their_start(name):
    made = case(("varlen", "dropout"), name=name)
    with hfnn.use(name):
        results, grads = run(made.cast(None), attention)
    want, want_grads = run(made.cast(torch.float64), reference, **keep_of(made))
    assert all(testing.error(a, b).l2 < 1e-5 for a, b in zip((*results, *grads), (*want, *want_grads), strict=True))
