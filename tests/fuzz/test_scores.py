"""Each choice of `convert_scores.py` by itself: a module that has been watched does what stock torch does."""

import copy

import pytest
import torch
from convert_attention_faults import FAULTS
from convert_scores import CHOICES, scored

import hfnn

WIDTH, TOKENS = 16, 16
PLAIN = ["@", "after", "none", "function", "none"]
PROGRAMS = [
    [*PLAIN[:at], each, *PLAIN[at + 1 :]] for at, choices in enumerate(CHOICES) for each in dict.fromkeys(choices)
]
PROGRAMS += [["einsum", "inplace", mask, "float", read] for mask in CHOICES[2] for read in ("none", "two orders")]
FAULTS = {
    name: FAULTS[name]
    for name in (
        "scores written through a view",
        "scores recorded in any state",
        "masks of the scores of another window",
    )
}


def results(model, x):
    x = x.detach().requires_grad_()
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], torch.ones_like(y))]


def differ(how) -> bool:
    torch.manual_seed(0)
    stock = scored(WIDTH, *how)
    ours = hfnn.convert(copy.deepcopy(stock), prefer="memory")
    for _ in range(4):
        x = torch.randn(TOKENS, TOKENS, WIDTH)  # also as many samples as queries
        for a, b in zip(results(ours, x), results(stock, x), strict=True):
            if not torch.allclose(a, b, 1e-4, 1e-5, equal_nan=True) or a.stride() != b.stride():
                return True
    return False


@pytest.mark.parametrize("how", PROGRAMS, ids=" ".join)
def test_scores_that_were_not_computed_change_nothing(how):
    assert not differ(how)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    with FAULTS[fault]():
        assert any(map(differ, PROGRAMS))
