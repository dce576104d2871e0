"""The C++ CPU kernel of attention, called as in test_attention_csrc.py: shared and strided tensors, and sequences."""

from dataclasses import replace

import pytest
import torch

from .test_attention_csrc import (
    DTYPES,
    SHAPE,
    Given,
    attention,
    check,
    inputs,
    nan,
    packed,
    randn,
    random_mask,
    run,
    same_bits,
)


@pytest.mark.parametrize("shared", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shared_bias(shared, dtype):
    """A bias with strides of 0: its gradient is summed over the shared dimensions."""
    B, H, _, T, S, _, _ = SHAPE
    sizes = 1 if shared[0] else B, 1 if shared[1] else H, T, S
    g = Given(bias=randn(*sizes, seed=6, dtype=dtype).expand(B, H, T, S), softcap=3.0, right=30, threshold=9000)
    check(SHAPE, dtype, g, shared)


def test_bias_along_one_side():
    B, H, _, T, S, _, _ = SHAPE
    for size in ((B, H, 1, S), (1, 1, T, 1)):
        check(SHAPE, torch.float32, Given(bias=randn(*size, seed=3).expand(B, H, T, S)))


def test_transposed_bias_and_shared_bits():
    B, H, _, T, S, _, _ = SHAPE
    tensors = inputs(SHAPE, torch.float32)
    mask = random_mask(SHAPE)[:1, :1]
    whole = Given(mask=mask.expand(B, H, T, S).contiguous(), bias=randn(B, H, T, S))
    wanted = run(*tensors, whole)
    bits, tiles = (x.expand(B, H, -1, -1) for x in packed(mask))
    o, lse, sums = (torch.empty_like(wanted[n]) for n in (0, 1, 1))
    turned = whole.bias.transpose(2, 3).contiguous().transpose(2, 3)
    attention.forward(*tensors[:3], o, lse, sums, bits, tiles, turned, *[None] * 5, *whole.numbers(), 1)
    assert same_bits(o, wanted[0]) and same_bits(lse + sums.log(), wanted[1])


def test_any_strides():
    """(B, T, H, D) memory, expanded keys, padded rows; gaps are not written."""
    B, H, _, T, S, D, E = SHAPE
    plain = inputs((B, H, H, T, S, D, E), torch.bfloat16)
    plain[1], plain[2] = (x[:, :1].expand(-1, H, -1, -1) for x in plain[1:3])
    contiguous = [x.contiguous() for x in plain]

    def between(x):
        memory = nan(x.shape[0], x.shape[2], x.shape[1], x.shape[3] + 5, dtype=x.dtype)
        return memory, memory.transpose(1, 2)[..., : x.shape[3]]

    strided = [between(x) for x in (plain[0], plain[3])]
    for (_, view), x in zip(strided, (plain[0], plain[3]), strict=True):
        view.copy_(x)
    buffers = [between(x) for x in (plain[3], *contiguous[:3])]
    g = Given(right=0)
    results = run(strided[0][1], plain[1], plain[2], strided[1][1], g, 2, outputs=[view for _, view in buffers])
    for a, b in zip(results, run(*contiguous, g), strict=True):
        assert a is None or same_bits(a.contiguous(), b)
    assert all(memory[..., -5:].isnan().all() for memory, _ in buffers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"right": 0}, {"left": 20, "right": 3, "shift": 4}, {"softcap": 2.0}], ids=str)
def test_sequences(options, dtype):
    """Each sequence gets the bits that it gets alone; rows outside any sequence are not written."""
    H, G, T, S, D, E = 4, 2, 400, 460, 24, 40
    q, k, v, dout = inputs((1, H, G, T, S, D, E), dtype)
    starts_q, starts_k = [5, 5, 135, 136, 390], [2, 10, 210, 210, 450]
    g = Given(slopes=randn(1, H).abs() / 9, sinks=randn(H), **options)
    both = {"starts_q": starts_q, "starts_k": starts_k}
    several = replace(g, **{name: torch.tensor(x, dtype=torch.int32) for name, x in both.items()})
    results = run(q, k, v, dout, several, 16)  # more threads than heads: two passes
    assert all(same_bits(a, b) for a, b in zip(results[:-1], run(q, k, v, dout, several)[:-1], strict=True))
    for q0, q1, k0, k1 in zip(starts_q[:-1], starts_q[1:], starts_k[:-1], starts_k[1:], strict=True):
        alone = run(q[:, :, q0:q1], k[:, :, k0:k1], v[:, :, k0:k1], dout[:, :, q0:q1], g)
        for n, (whole, part) in enumerate(zip(results[:-1], alone[:-1], strict=True)):
            rows = slice(k0, k1) if n in (4, 5) else slice(q0, q1)
            assert same_bits(whole[:, :, rows].contiguous(), part), n
    for n in (0, 1, 3):
        assert results[n][:, :, :5].isnan().all() and results[n][:, :, 390:].isnan().all()
    for n in (4, 5):
        assert results[n][:, :, :2].isnan().all() and results[n][:, :, 450:].isnan().all()


def test_sequences_against_the_formula():
    """Dropout counts i over all of T and j from the sequence's start."""
    starts = torch.tensor([0, 100, 100, 271, 300], dtype=torch.int32)
    g = Given(starts_q=starts, starts_k=starts, right=0, threshold=30000, slopes=randn(1, 4).abs())
    check((1, 4, 2, 300, 300, 24, 40), torch.float32, g)
