"""patch_torch in threads: others see torch, several may overlap, and backward's threads route like their caller."""

import sys
import threading

import pytest
import torch
import torch.nn.functional as F

from .test_patch import MEMORY, gelu_is_ours, tensor

pytestmark = pytest.mark.usefixtures("restored")


def in_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(60)
    return results[0]


def test_other_threads_see_torch():
    with MEMORY():
        assert gelu_is_ours() and not in_thread(gelu_is_ours)
        assert in_thread(MEMORY()(gelu_is_ours))
        assert gelu_is_ours()


def test_threads_that_overlap():
    """One object in two threads; the thread that entered first leaves first."""
    shared, entered, left, found = MEMORY(), threading.Event(), threading.Event(), []

    def other():
        with shared:
            entered.set()
            left.wait(60)
            found.append(gelu_is_ours())

    thread = threading.Thread(target=other)
    with shared:
        thread.start()
        entered.wait(60)
    assert not gelu_is_ours() and F.gelu is not torch._C._nn.gelu
    left.set()
    thread.join(60)
    assert found == [True]


def test_many_threads():
    """Enter and leave in quick succession, with threads interrupted anywhere."""
    interval, wrong = sys.getswitchinterval(), []

    def work(patched):
        for _ in range(200):
            with patched:
                if not gelu_is_ours():
                    wrong.append("torch's inside")
            if gelu_is_ours():
                wrong.append("hfnn's outside")

    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(MEMORY(only),)) for only in (None, "gelu", None, ("gelu",))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


def test_the_threads_of_backward():
    """The engine's threads route like the thread that called backward. CUDA uses them; on the CPU deep nesting does."""
    seen = []

    class Nest(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, depth):
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            x = tensor(4)
            with torch.enable_grad():
                y = Nest.apply(x, ctx.depth - 1) if ctx.depth else x * 2
                seen.append((gelu_is_ours(), threading.get_ident()))
                y.sum().backward()
            return dy, None

    y = Nest.apply(tensor(4), 100).sum()
    with MEMORY():
        y.backward()
    assert {ours for ours, _ in seen} == {True} and len({thread for _, thread in seen}) > 1
    del seen[:]
    y = Nest.apply(tensor(4), 100).sum()
    with MEMORY("silu"):
        y.backward()
    assert {ours for ours, _ in seen} == {False}
