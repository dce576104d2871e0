"""What `make test` omits from products of parameters: no value and no pair of values."""

import itertools
import types
from pathlib import Path

import pytest


@pytest.fixture
def beyond_pairs(request):
    here = str(Path(__file__).with_name("conftest.py"))
    return next(
        p for p in request.config.pluginmanager.get_plugins() if getattr(p, "__file__", "") == here
    ).beyond_pairs


def items(*axes, allowed=lambda *values: True):
    names = "abcdef"[: len(axes)]
    cases = [dict(zip(names, case, strict=True)) for case in itertools.product(*axes) if allowed(*case)]
    return [types.SimpleNamespace(callspec=types.SimpleNamespace(params=case)) for case in cases]


def pairs(cases):
    found = [itertools.combinations([(n, repr(v)) for n, v in case.callspec.params.items()], 2) for case in cases]
    return set(itertools.chain.from_iterable(found))


@pytest.mark.parametrize(
    "product, most",
    [
        (items("pqrs", range(3), (True, False), (1, True, 1.0)), 20),
        (items(*[range(2)] * 6), 12),
        (items("pqrs", range(3), "tuv", allowed=lambda a, b, c: (a, b) != ("p", 0) and (b == 2 or c != "t")), 16),
        (items([[1], [2]], [{}, {1: 2}], [{3}]), 4),  # unhashable values
    ],
)
def test_every_pair_stays(beyond_pairs, product, most):
    left_out = beyond_pairs(product)
    stays = [item for item in product if not any(item is other for other in left_out)]
    assert pairs(stays) == pairs(product) and len(stays) <= min(most, len(product))
    assert beyond_pairs(product) == left_out, "every one of pytest's processes leaves out the same"
