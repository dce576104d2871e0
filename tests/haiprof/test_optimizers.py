"""Optimizers whose step() raises, calls autograd or modules, or runs inside something else."""

import contextlib
import gc
import threading
import weakref

import pytest
import torch
from test_steps import make, names, train, watched
from torch import nn

STEP = ["forward", "backward", "optimizer"]


class Planted(Exception):
    pass


def losses_of(model, optimizer, raising=()):
    """step(closure) for ten batches; the closure raises in those of `raising`, in a module if it is odd."""
    torch.manual_seed(0)
    for i in range(10):
        x = torch.randn(2, 4)

        def closure(i=i, x=x):
            optimizer.zero_grad()
            loss = model(x).sum() if i not in raising or i % 2 == 0 else model(None)
            loss.backward()
            if i in raising:
                raise Planted
            return loss

        try:
            optimizer.step(closure)
        except (Planted, TypeError):
            assert i in raising


@pytest.mark.parametrize("raising", [(0,), (3,), (3, 4), (4, 6, 8), (9,), range(10)])
def test_steps_after_a_closure_that_raised(raising):
    model, optimizer = make()
    with watched() as steps:
        losses_of(model, optimizer, raising)
    assert len(steps) == 10 - len(raising)
    assert all([name for name in names(step) if name != "optimizer"][-2:] == ["forward", "backward"] for step in steps)


@pytest.mark.parametrize("aside", [False, True])  # whether the one that raises is another optimizer's
def test_steps_without_a_closure_after_one_that_raised(aside):
    model, optimizer = make()
    _, other = make()

    def closure():
        raise Planted

    with watched() as steps:
        for i in range(6):
            if i in (2, 4):
                with pytest.raises(Planted):
                    (other if aside else optimizer).step(closure)
            train(model, optimizer, torch.randn(2, 4))
    assert [names(step) for step in steps] == [STEP] * 6


def test_a_closure_whose_backward_runs_in_another_thread():
    model, optimizer = make()

    def closure():
        thread = threading.Thread(target=model(torch.randn(2, 4)).sum().backward)
        thread.start()
        thread.join()

    with watched() as steps:
        for _ in range(4):
            optimizer.step(closure)
    assert len(steps) == 4


class Curved(torch.optim.SGD):
    """Like AdaHessian: its step() differentiates the gradients."""

    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        with torch.enable_grad():
            nn.Linear(4, 4)(torch.ones(4)).sum().backward()
        torch.autograd.grad([p.grad.square().sum() for p in parameters], parameters, allow_unused=True)
        return super().step(closure)


@pytest.mark.filterwarnings("ignore:Using backward")  # with create_graph, as AdaHessian needs
def test_autograd_and_modules_in_a_step_without_a_closure_are_part_of_it():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = Curved(model.parameters(), lr=0.01)
    with watched() as steps:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(2, 4)).square().sum().backward(create_graph=True)
            optimizer.step()
    assert [names(step) for step in steps] == [STEP] * 6


def test_a_step_that_handles_an_inner_one_that_raised():
    class Again(torch.optim.SGD):
        def step(self, closure=None):
            with contextlib.suppress(Planted):
                inner.step(closure)
            return super().step()

    def closure():
        raise Planted

    model, inner = make()
    optimizer = Again(model.parameters(), lr=0.1)
    with watched() as steps:
        for _ in range(4):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step(closure)
    assert [names(step) for step in steps] == [STEP] * 4


def test_steps_inside_a_forward_end_no_phase():
    class Adapts(nn.Linear):
        def forward(self, x):
            with torch.enable_grad():
                inner_model(x).sum().backward()
            inner.step()
            return super().forward(x)

    inner_model, inner = make()
    model = Adapts(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched() as steps:
        for _ in range(6):
            train(model, optimizer, torch.randn(2, 4))
    assert [names(step) for step in steps] == [STEP] * 6


def test_what_a_step_that_raised_was_given_is_not_kept():
    _, optimizer = make()
    given = nn.Linear(4, 4)
    gone = weakref.ref(given)

    def closure(given):
        raise Planted

    with watched():
        with contextlib.suppress(Planted):
            optimizer.step(lambda given=given: closure(given))
        gc.disable()
        try:
            del given
            assert gone() is None
        finally:
            gc.enable()
