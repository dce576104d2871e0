"""Kernels launched from C++ with numbers that differ at each call and so do not distinguish launches."""

import math

import pytest

pytest.importorskip("triton")
autograd = pytest.importorskip("hfnn._autograd")
from hfnn.kernels import launch as module  # noqa: E402

from .test_launch_recorded import KERNEL, A, Driver, bits, function  # noqa: E402


@pytest.fixture
def driver():
    found = Driver()
    autograd.fake_driver(found)
    yield found
    autograd.fake_driver(None)


@pytest.mark.parametrize("seeds", [(0, 1, 7, 300, -1, 2**31 - 1, -(2**31)), (2**31, -(2**31) - 1, 2**63 - 1, -(2**63))])
def test_fresh_integers(driver, seeds):
    calls, driver.count = [], 3
    f = function(("*fp32", "i64", "i32" if seeds[0] == 0 else "i64"), calls=calls)
    for seed in seeds:
        f(A, autograd.Fresh(seed), autograd.Fresh(seeds[-1]))
        if seed != seeds[0]:
            mask = 2**32 - 1 if seeds[0] == 0 else 2**64 - 1
            assert driver.params()[:2] == [A.data_ptr(), seed % 2**64] and driver.params()[2] & mask == seeds[-1] & mask
    assert len(calls) == 1 and f.replays == len(seeds) - 1


LOOKS = {
    "computed": lambda x, seed: (x, seed & 0xFFFF),
    "chosen": lambda x, seed: (x, 1 if seed == 5 else 2),
    "of another type": lambda x, seed: (x, float(seed)),
}


@pytest.mark.parametrize("name", LOOKS)
def test_fresh_integers_are_only_handed_on(driver, name):
    calls = []
    f = function(("*fp32", "fp32" if "type" in name else "i32"), give=LOOKS[name], calls=calls)
    for seed in (5, 6, 5, 7, 8):
        f(A, autograd.Fresh(seed))
    assert len(calls) == 5 and not driver.seen and "fresh" in f.refusal


def test_a_launch_that_depends_on_a_fresh_integer(driver):
    f = autograd.TritonFunction(lambda x, seed: seed < 9 and module.record(KERNEL, (1,), 32, 0, (), ()))
    f(A, autograd.Fresh(1))
    assert "fresh" in f.refusal


@pytest.mark.parametrize("first", [1.0, 0.0, -0.0, 0.1, math.inf])
def test_fresh_reals(driver, first):
    """Kernels get a float32. Of its 8 bytes, the driver reads four."""
    calls, driver.count = [], 4
    f = function(("*fp32", "fp32", "i32", "fp32"), calls=calls)
    reals = first, 1 / 2, 1 / 3, 1e-30, -5.0, math.nan, math.inf, 0.0
    for real in reals:
        f(A, autograd.FreshReal(real), autograd.Fresh(7), 0.25)
        if len(driver.seen):
            assert driver.params() == [A.data_ptr(), bits(real), 7, bits(0.25)]
    assert len(calls) == 1 and (f.kinds, f.replays) == (1, len(reals) - 1)


REAL_LOOKS = {
    "computed": (("*fp32", "fp32"), lambda x, real: (x, 1 - real)),
    "of another type": (("*fp32", "fp64"), lambda x, real: (x, real)),
    "an integer": (("*fp32", "i32"), lambda x, real: (x, int(1000 * real))),
}


@pytest.mark.parametrize("name", REAL_LOOKS)
def test_fresh_reals_are_only_handed_on(driver, name):
    types, give = REAL_LOOKS[name]
    calls = []
    f = function(types, give=give, calls=calls)
    for real in (0.5, 2.5, 0.5, 3.5):
        f(A, autograd.FreshReal(real))
    assert len(calls) == 4 and not driver.seen and "fresh number" in f.refusal
