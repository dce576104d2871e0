"""Where steps begin and end, and what belongs to which phase, in typical training loops."""

import contextlib
import itertools
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from haiprof import phases as phases_module
from haiprof.phases import Hooks, Phases
from haiprof.record import PHASES


def fault():
    raise  # an error in a hook fails the test


@contextlib.contextmanager
def watched():
    """Collects the steps made in the block; complete after it."""
    steps = []
    phases = Phases(steps.append, fault)
    hooks = Hooks(phases)
    hooks.install()
    try:
        yield steps
    finally:
        hooks.remove()
    phases.finish()
    for step in steps:
        seconds = step.seconds()
        assert sum(seconds.values()) == pytest.approx(step.end - step.begin)
        assert all(value >= -1e-9 for value in seconds.values()), seconds
        assert all(step.begin <= span.start <= span.end <= step.end for span in step.spans)
    for step, following in itertools.pairwise(steps):
        assert step.end + following.gap == pytest.approx(following.begin)


def make(**more):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loader(batches=3, **more):
    return DataLoader(TensorDataset(torch.randn(2 * batches, 4)), batch_size=2, **more)


def names(step):
    return [span.name for span in step.spans]


def train(model, optimizer, x):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


def test_a_loop_over_a_loader():
    model, optimizer = make()
    with watched() as steps:
        for _ in range(2):
            for (x,) in loader():
                train(model, optimizer, x)
    assert len(steps) == 6
    assert names(steps[1]) == ["data", "forward", "backward", "optimizer"]
    assert names(steps[3]) == ["data", "data", "data", "forward", "backward", "optimizer"]  # the end of the first epoch
    assert all(step.gap == 0 and step.passes() == 1 for step in steps)


def test_a_loop_without_a_loader():
    model, optimizer = make()
    with watched() as steps:
        for _ in range(5):
            train(model, optimizer, torch.randn(2, 4))
    assert [names(step) for step in steps] == [["forward", "backward", "optimizer"]] * 5


@pytest.mark.parametrize("with_loader", [True, False])
def test_accumulated_gradients_are_one_step(with_loader):
    model, optimizer = make()
    batches = (x for (x,) in loader(12)) if with_loader else (torch.randn(2, 4) for _ in range(12))
    with watched() as steps:
        for i, x in enumerate(batches):
            model(x).sum().backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    assert [step.passes() for step in steps] == [4, 4, 4]
    assert [names(step).count("data") for step in steps[1:]] == ([4, 4] if with_loader else [0, 0])


def test_batches_that_are_fetched_ahead_and_several_at_a_time():
    """Like transformers' Trainer, which fetches all batches to accumulate at once."""
    model, optimizer = make()
    with watched() as steps:
        batches = iter(loader(8))
        for _ in range(4):
            pair = [next(batches), next(batches)]
            for (x,) in pair:
                model(x).sum().backward()
            optimizer.step()
    assert [names(step)[-7:] for step in steps] == [["data"] * 2 + ["forward", "backward"] * 2 + ["optimizer"]] * 4


@pytest.mark.parametrize("with_loader", [True, False])
def test_optimizers_of_one_model(with_loader):
    model, _ = make()
    optimizers = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]
    batches = (x for (x,) in loader(4)) if with_loader else (torch.randn(2, 4) for _ in range(4))
    with watched() as steps:
        for x in batches:
            model(x).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert [names(step).count("optimizer") for step in steps] == [2, 2, 2, 2]


@pytest.mark.parametrize("with_loader", [True, False])
def test_a_gan(with_loader):
    (real, first), (fake, second) = make(), make()
    batches = (x for (x,) in loader(4)) if with_loader else (torch.randn(2, 4) for _ in range(4))
    with watched() as steps:
        for x in batches:
            with torch.no_grad():
                made = fake(torch.randn(2, 4))
            (real(x).sum() - real(made).sum()).backward()
            first.step()
            real(fake(torch.randn(2, 4))).sum().backward()
            second.step()
    half = ["forward", "forward", "backward", "optimizer"]
    own = ["data"] * with_loader + ["inference", *half, *half]
    assert [names(step)[-len(own) :] for step in steps] == [own] * 4
    assert all(step.gap == 0 for step in steps)


def evaluate(model, data, most=None):
    model.eval()
    with torch.no_grad():
        for i, (x,) in enumerate(data):
            model(x)
            time.sleep(0.01)
            if i == most:
                break
    model.train()


@pytest.mark.parametrize("most", [None, 1])
@pytest.mark.parametrize("same_data", [False, True])
def test_validation_between_steps_is_in_none_of_them(most, same_data):
    model, optimizer = make()
    training, validation = loader(4), loader(4)
    with watched() as steps:
        for _ in range(2):
            for (x,) in training:
                train(model, optimizer, x)
            evaluate(model, training if same_data else validation, most)
    assert len(steps) == 8
    assert [step.gap > 0.02 for step in steps] == [False] * 4 + [True] + [False] * 3
    assert all(names(step)[-3:] == ["forward", "backward", "optimizer"] for step in steps)
    assert sum("inference" in names(step) for step in steps) == 0


def test_validation_without_a_loader_and_before_training():
    model, optimizer = make()
    evaluate(model, [(torch.randn(2, 4),)] * 3)
    with watched() as steps:
        evaluate(model, [(torch.randn(2, 4),)] * 3)
        for _ in range(3):
            train(model, optimizer, torch.randn(2, 4))
        evaluate(model, [(torch.randn(2, 4),)] * 3)
        for _ in range(3):
            train(model, optimizer, torch.randn(2, 4))
    assert [step.gap > 0.02 for step in steps] == [False, False, False, True, False, False]
    assert all("inference" not in names(step) for step in steps[1:])


def test_a_teacher_belongs_to_the_step():
    (model, optimizer), (teacher, _) = make(), make()
    teacher.eval()
    with watched() as steps:
        for (x,) in loader(3):
            with torch.no_grad():
                target = teacher(x)
            (model(x) - target).square().sum().backward()
            optimizer.step()
    assert [names(step)[-5:] for step in steps] == [["data", "inference", "forward", "backward", "optimizer"]] * 3
    assert all(step.gap == 0 and step.seconds()["forward"] > 0 for step in steps)


def test_a_closure_is_forward_and_backward():
    model, _ = make()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = torch.randn(8, 4)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with watched() as steps:
        for _ in range(3):
            optimizer.step(closure)
    assert len(steps) == 3
    assert {*names(steps[1])} == {"forward", "backward", "optimizer"} and steps[1].passes() >= 2
    assert all(steps[1].seconds()[name] > 0 for name in ("forward", "backward", "optimizer"))


def test_optimizers_that_step_within_backward():
    model, _ = make()
    own = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(p):
        own[p].step()
        own[p].zero_grad()

    for p in own:
        p.register_post_accumulate_grad_hook(step)
    with watched() as steps:
        for _ in range(4):
            model(torch.randn(2, 4)).sum().backward()
    assert [names(step) for step in steps] == [["forward", "backward"]] * 4


def test_an_optimizer_within_an_optimizer_is_one():
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    model, _ = make()
    optimizer = Twice(model.parameters(), lr=0.1)
    with watched() as steps:
        for _ in range(3):
            train(model, optimizer, torch.randn(2, 4))
    assert [names(step) for step in steps] == [["forward", "backward", "optimizer"]] * 3


def test_recomputation_is_backward_and_gradients_in_a_forward_are_forward():
    from torch.utils.checkpoint import checkpoint

    class Energy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 1)

        def forward(self, x):
            x = x.requires_grad_()
            energy = checkpoint(self.inner, x, use_reentrant=False).square().sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]

    model = Energy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched() as steps:
        for _ in range(3):
            train(model, optimizer, torch.randn(2, 4))
    assert [names(step) for step in steps] == [["forward", "backward", "optimizer"]] * 3


class Raises:
    def __init__(self, place):
        self.armed, self.place = False, place

    def __call__(self, place):
        if self.armed and place == self.place:
            self.armed = False
            raise KeyError(place)


@pytest.mark.parametrize("place", ["data", "forward", "backward", "optimizer"])
def test_an_exception_passes_and_the_next_steps_are_as_before(place):
    raises = Raises(place)

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, i):
            raises("data")
            return torch.ones(4)

    class Model(nn.Linear):
        def forward(self, x):
            raises("forward")
            y = super().forward(x)
            y.register_hook(lambda _: raises("backward"))
            return y

    class Optimizer(torch.optim.SGD):
        def step(self, closure=None):
            raises("optimizer")
            return super().step(closure)

    model = Model(4, 4)
    optimizer, data = Optimizer(model.parameters(), lr=0.1), DataLoader(Data(), batch_size=2)
    with watched() as steps:
        for attempt in range(3):
            raises.armed = attempt == 1
            try:
                for x in data:
                    train(model, optimizer, x)
            except KeyError as error:
                assert error.args == (place,) and attempt == 1
    assert not raises.armed and len(steps) == 8
    assert [names(step)[-3:] for step in steps] == [["forward", "backward", "optimizer"]] * 8


def test_other_threads_are_left_alone():
    import threading

    model, optimizer = make()
    aside = nn.Linear(4, 4)
    stop = threading.Event()

    def serve():
        with torch.no_grad():
            while not stop.is_set():
                aside(torch.randn(2, 4))

    thread = threading.Thread(target=serve)
    with watched() as steps:
        thread.start()
        for _ in range(20):
            train(model, optimizer, torch.randn(2, 4))
        stop.set()
        thread.join()
    assert [names(step) for step in steps] == [["forward", "backward", "optimizer"]] * 20


def test_training_in_a_thread_of_its_own_is_seen():
    import threading

    model, optimizer = make()

    def work():
        for _ in range(5):
            train(model, optimizer, torch.randn(2, 4))

    with watched() as steps:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(steps) >= 4 and names(steps[-1]) == ["forward", "backward", "optimizer"]


def test_everything_is_taken_out_again():
    from torch.optim import optimizer as torch_optimizer
    from torch.utils.data import dataloader

    places = [
        (nn.Module, "__call__"),
        (torch.autograd, "_engine_run_backward"),
        (dataloader._BaseDataLoaderIter, "__next__"),
        (dataloader.DataLoader, "__iter__"),
    ]
    hooks = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
    before = [vars(owner)[name] for owner, name in places], [len(each) for each in hooks]
    with watched():
        assert all(vars(owner)[name] is not one for (owner, name), one in zip(places, before[0], strict=True))
    assert ([vars(owner)[name] for owner, name in places], [len(each) for each in hooks]) == before


def test_marks_are_made_where_phases_begin_and_end():
    """CUDA events, faked by numbers: a pair per span, ordered by time."""
    made = iter(range(1000))
    steps = []
    phases = Phases(steps.append, fault, mark=lambda: SimpleNamespace(at=next(made)))
    hooks = Hooks(phases)
    model, optimizer = make()
    hooks.install()
    try:
        for _ in range(3):
            train(model, optimizer, torch.randn(2, 4))
    finally:
        hooks.remove()
    phases.finish()
    at = [mark.at for step in steps for span in step.spans for mark in span.marks]
    assert at == list(range(18))


def test_a_program_that_never_steps_is_bounded(monkeypatch):
    monkeypatch.setattr(phases_module, "MOST", 40)
    model, _ = make()
    phases = Phases(lambda step: None, fault)
    hooks = Hooks(phases)
    hooks.install()
    try:
        for _ in range(200):
            model(torch.randn(2, 4))
    finally:
        hooks.remove()
    assert len(phases.spans) <= 40 and PHASES[1] == phases.spans[-1].name
