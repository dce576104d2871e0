"""C++ and Python count gradients in the same way."""

import gc
import random
import weakref

import pytest
import torch

import hfreduce.backend
from haiscale.ddp import arrivals


class Told:
    """One of the two implementations, with the events that it reported."""

    def __init__(self, module, parameters):
        self.log, self.parameters = [], [torch.nn.Parameter(torch.zeros(2)) for _ in range(parameters)]
        tell = (lambda *args, name=name: self.log.append((name, *args)) for name in ("begin", "whole", "late"))
        self.arrivals = module.Arrivals(parameters, *tell)
        for i, p in enumerate(self.parameters):
            p.register_post_accumulate_grad_hook(self.arrivals.hook(i))

    def backward(self, places):
        for i in places:  # separate backwards, so that the order is known
            self.parameters[i].sum().backward()

    def state(self, buckets):
        a = self.arrivals
        flags = [(a.is_whole(b), a.is_dirty(b)) for b in range(buckets)]
        return self.log, a.begun, a.expecting, list(a.counts), list(a.order), flags


@pytest.mark.parametrize("seed", range(20))
def test_alike(seed):
    rng, count = random.Random(seed), 6
    both = [Told(module, count) for module in (arrivals.native(), arrivals)]
    assert both[0].arrivals.__class__.__module__ != both[1].arrivals.__class__.__module__
    buckets = 0
    for _ in range(30):
        step = rng.choice(
            ["backward", "backward", "backward", "arm", "watch", "clean", "run", "begun", "expecting", "finish"]
        )
        if step == "watch":
            buckets = rng.randint(1, 3)
            bucket_of = [*range(buckets), *(rng.randint(-1, buckets - 1) for _ in range(count - buckets))]
            args = (bucket_of, [rng.randint(1, 2) for _ in range(count)])
        elif step == "backward":
            args = ([rng.randrange(count) for _ in range(rng.randint(1, 8))],)
        elif step in ("begun", "expecting"):
            args = (rng.random() < 0.5,)
        elif step not in ("arm", "finish") and not buckets:
            continue
        else:
            args = {"arm": (), "finish": (), "clean": (rng.randrange(max(1, buckets)),)}.get(step)
            args = (rng.randrange(buckets), rng.random() < 0.5) if args is None else args
        for one in both:
            if step in ("begun", "expecting"):
                setattr(one.arrivals, step, args[0])
            else:
                getattr(one if step == "backward" else one.arrivals, step)(*args)
        assert both[0].state(buckets) == both[1].state(buckets), step


@pytest.mark.parametrize("module", [arrivals.native(), arrivals], ids=["native", "python"])
def test_collect(module):
    ours, theirs, graph, wide, none, narrow = all_of = [torch.nn.Parameter(torch.zeros(3)) for _ in range(6)]
    narrow.data = narrow.data.bfloat16()
    wide.grad_dtype = torch.float64
    views = list(torch.full((18,), float("nan")).view(6, 3))
    views[0].fill_(5)
    ours.grad, theirs.grad = views[0], torch.full((3,), 2.0)
    graph.grad = torch.ones(3, requires_grad=True) * 4  # as create_graph=True leaves it
    wide.grad = torch.full((3,), 6.0, dtype=torch.float64)
    narrow.grad = torch.full((3,), 3.0, dtype=torch.bfloat16)
    kept = graph.grad, wide.grad
    module.collect(all_of, views)
    assert [view.tolist() for view in views] == [[5] * 3, [2] * 3, [4] * 3, [6] * 3, [0] * 3, [3] * 3]
    assert ours.grad is views[0] and theirs.grad is views[1] and none.grad is None and narrow.grad is None
    assert graph.grad is kept[0] and graph.grad.grad_fn is not None and wide.grad is kept[1]
    assert not any(view.requires_grad for view in views)


@pytest.mark.parametrize("module", [arrivals.native(), arrivals], ids=["native", "python"])
def test_a_bucket_is_whole_after_all_hooks_of_its_parameters(module):
    told = Told(module, 2)
    for p in told.parameters:
        p.register_post_accumulate_grad_hook(lambda p: told.log.append("hook"))
    told.arrivals.watch([0, 1], [1, 1])
    told.backward([0, 1])
    told.arrivals.finish()
    assert told.log == [("begin",), "hook", ("whole", 0), "hook", ("whole", 1)]


@pytest.mark.parametrize("module", [arrivals.native(), arrivals], ids=["native", "python"])
def test_an_error_comes_out_of_backward(module):
    def fail(*args):
        raise ValueError("no average will have it")

    p = torch.nn.Parameter(torch.zeros(2))
    counted = module.Arrivals(1, lambda: None, lambda bucket: None, fail)
    p.register_post_accumulate_grad_hook(counted.hook(0))
    counted.watch([-1], [1])
    p.sum().backward()
    with pytest.raises(ValueError, match="no average"):
        counted.finish()
    p.sum().backward()
    with pytest.raises(ValueError, match="no average"):
        p.sum().backward()


def test_without_the_native_module_python_counts_and_says_so_once(monkeypatch, caplog):
    def missing():
        raise ImportError("it was not built")

    monkeypatch.setattr(hfreduce.backend, "native", missing)
    arrivals.native.cache_clear()
    try:
        assert arrivals.native() is arrivals and arrivals.native() is arrivals
    finally:
        arrivals.native.cache_clear()
    (told,) = caplog.records
    assert told.levelname == "WARNING" and "in Python" in told.getMessage() and "it was not built" in told.getMessage()


def test_hooks_do_not_keep_it_alive():
    p = torch.nn.Parameter(torch.zeros(2))
    counted = arrivals.native().Arrivals(1, *[lambda *args: None] * 3)
    p.register_post_accumulate_grad_hook(counted.hook(0))
    gone = weakref.ref(counted)
    del counted
    gc.collect()
    assert gone() is None
    p.sum().backward()  # the hook is still there, and counts nothing
