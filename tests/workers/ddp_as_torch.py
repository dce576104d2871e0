"""Rank programs of tests/haiscale/test_ddp_as_torch.py: each case runs with torch's DDP, haiscale's, and auto's.

A case gets a function that wraps a module, and returns what the test compares.
"""

import contextlib
import gc
import io
import os
import traceback
import warnings
import weakref
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import hfreduce  # noqa: F401 (a backend)
from haiscale import ddp
from haiscale.ddp import as_torch

warnings.filterwarnings("ignore", category=FutureWarning)
WRAPPERS = {
    "torch": nn.parallel.DistributedDataParallel,
    "haiscale": lambda module, **given: ddp.DDP(module, **SEVERAL | given),
    "auto": lambda module, **given: as_torch.DistributedDataParallel(lambda: "", {"module": module} | SEVERAL | given),
}
SEVERAL = {"bucket_cap_mb": 1e-5}  # buckets
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def run(rank, size, store, backend="hfreduce"):
    torch.set_num_threads(1)
    os.environ["HAISCALE_BUCKETS"] = ""
    where = {"init_method": f"file://{store}", "rank": rank, "world_size": size}
    dist.init_process_group(backend, **where, timeout=timedelta(seconds=30))
    found = {}
    for name, function in CASES.items():
        for kind, wrap in WRAPPERS.items():
            try:
                result = function(wrap, rank)
            except Exception:
                result = {"error": traceback.format_exc()[-3000:]}
            found.setdefault(name, {})[kind] = result
    return found


def chain(layers=3):
    """Linear layers of ones, whose gradients are exact."""
    net = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(layers)))
    for p in net.parameters():
        nn.init.ones_(p)
    return net


def inputs(rank, k=1.0):
    return torch.full((1, 2), k * (rank + 1.0))


def grads(module):
    return [None if p.grad is None else p.grad.tolist() for p in module.parameters()]


def raised(call):
    try:
        call()
    except RuntimeError:
        return True
    except ValueError:
        return True
    return False


@case
def plain_module(wrap, rank):
    """Backwards of the module itself, which add to averages and to nothing."""
    net = chain()
    model, found = wrap(net), []
    for _ in range(3):
        model(inputs(rank)).sum().backward()
        found.append(grads(net))
        net(inputs(rank)).sum().backward()
        found.append(grads(net))
        model.zero_grad()
        net(inputs(rank)).sum().backward()
        found.append(grads(net))
        model.zero_grad()
    return found


@case
def hooks_after_wrapping(wrap, rank):
    """Hooks of parameters that change their gradients: before the average, whenever they were registered."""
    net = chain()
    model, found = wrap(net), []

    def clamp(p):
        p.grad.clamp_(-3, 3 + rank)

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(clamp)
    for _ in range(12):
        model(inputs(rank, 4)).sum().backward()
        found.append(grads(net))
        model.zero_grad()
    return found


class Buffered(nn.Module):
    """Writes to buffers in ways that no counter tells; gets a buffer and a part with one later."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.register_buffer("ema", torch.zeros(1))

    def forward(self, x):
        if not hasattr(self, "late"):
            self.register_buffer("late", x.detach().mean().view(1))
            self.part = nn.BatchNorm1d(1)
            self.part.running_mean.fill_(x.detach().mean())
            self.part.weight.requires_grad_(False)
            self.part.bias.requires_grad_(False)
        self.ema.data.mul_(0.5).add_(x.detach().mean(), alpha=0.5)
        return (self.w * x).sum()


@case
def buffers(wrap, rank):
    model, found = wrap(Buffered()), []
    for _ in range(3):
        model(inputs(rank)).backward()
        found.append([b.tolist() for b in model.module.buffers()])
    model.eval()
    model.module.late.data.fill_(rank + 7.0)
    model(inputs(rank)).backward()
    return [*found, [b.tolist() for b in model.module.buffers()]]


@case
def comm_hook(wrap, rank):
    """A hook whose result depends on the number of elements; registered before and after the first step."""
    found = []

    def signs(state, bucket):
        b = bucket.buffer()
        state.append(b.numel())
        b.copy_(b.sign() * b.abs().mean()).div_(2)
        return dist.all_reduce(b, async_op=True).get_future().then(lambda future: future.value()[0])

    for late in (False, True):
        sizes = []
        model = wrap(nn.Linear(3, 5), bucket_cap_mb=25)
        for step in range(3):
            if step == late:
                model.register_comm_hook(sizes, signs)
            x = torch.full((2, 3), rank + 1.0)
            model(x).sum().backward()
            means = [p.grad.double().norm().item() for p in model.parameters()]
            found.append([means, sum(sizes)] if step >= late else 0)
            model.zero_grad()
    return found


@case
def create_graph(wrap, rank):
    """Gradients have averaged values, and the graph of this rank's share. A second time torch's may raise."""
    found = []
    for warm in (False, True):
        net = nn.Linear(2, 1, bias=False)
        nn.init.ones_(net.weight)
        model = wrap(net)
        if warm:
            model(inputs(rank)).sum().backward()
            model.zero_grad()
        for _ in range(1 if wrap is WRAPPERS["torch"] else 3):
            (model(inputs(rank)) ** 3).sum().backward(create_graph=True)
            g = net.weight.grad
            (again,) = torch.autograd.grad(g.pow(2).sum(), net.weight)
            result = g.requires_grad, g.tolist(), again.tolist()
            if result not in found:
                found.append(result)
            net.weight.grad = None
    return found


@case
def no_sync_between(wrap, rank):
    """A forward without average does not take the average from an earlier forward."""
    net = chain(2)
    model, found = wrap(net), []
    for _ in range(3):
        a = model(inputs(rank))
        with model.no_sync():
            b = model(inputs(rank, 3))
        a.sum().backward()
        found.append(grads(net))
        b.sum().backward()
        found.append(grads(net))
        model.zero_grad()
        a = model(inputs(rank))
        with model.no_sync():
            (model(inputs(rank, 3)).sum() + a.sum()).backward()
        found.append(grads(net))
        model.zero_grad()
    return found


class Fails(torch.autograd.Function):
    """Raises in backward while `on`."""

    on = True

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        if Fails.on:
            raise ZeroDivisionError
        return g


class Fragile(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = chain(2)

    def forward(self, x):
        return self.parts[1](Fails.apply(self.parts[0](x)))


@case
def repeated_after_error(wrap, rank):
    """A backward that raised, and is repeated: an error, or averages; never local gradients."""
    found = []
    for cap in (1e-5, 25):
        Fails.on = False
        net = Fragile()
        model = wrap(net, bucket_cap_mb=cap)
        model(inputs(rank)).sum().backward()
        model.zero_grad()
        loss = model(inputs(rank)).sum()
        Fails.on = True
        with contextlib.suppress(ZeroDivisionError):
            loss.backward(retain_graph=True)
        Fails.on = False
        if raised(loss.backward):
            found.append("raised")
            continue
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, grads(net))
        found.append("averaged" if everyone.count(everyone[0]) == len(everyone) else "local")
    return found


@case
def lifetime(wrap, rank):
    """The wrapper and its module are freed at once, also while an output lives."""
    found = []
    for keeps in (False, True):
        model = wrap(chain())
        out = model(inputs(rank))
        out.sum().backward(retain_graph=True)
        gone = [weakref.ref(model), weakref.ref(model.module)]
        gc.collect()
        gc.disable()
        if not keeps:
            del out
        del model
        found.append([one() is None for one in gone])
        gc.enable()
    return found


@case
def saved_output(wrap, rank):
    """Saving an output does not warn."""
    model = wrap(chain())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.save(model(inputs(rank)), io.BytesIO())
    return [str(one.message) for one in seen if "serialized" in str(one.message)]


class Choice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = chain(1), chain(1)
        self.use = "ab"

    def forward(self, x):
        return sum(getattr(self, name)(x) for name in self.use)


@case
def unused_with_old_gradient(wrap, rank):
    """Gradients of parameters that no rank used do not change; nor do those of frozen ones."""
    net = Choice()
    model, found = wrap(net, find_unused_parameters=True), []
    for step in range(6):
        net.use = "ab" if step < 2 else "a" if step < 4 or rank else "ab"
        net.b[0].weight.requires_grad_(step != 3)
        if step in (2, 3):
            net.b[0].weight.grad = torch.full((2, 2), float(rank))
        sync = contextlib.nullcontext() if step != 4 else model.no_sync()
        with sync:
            model(inputs(rank)).sum().backward()
        found.append(grads(net))
        if step != 4:
            model.zero_grad()
    return found


@case
def gradient_dtype(wrap, rank):
    """Gradients with a dtype of their own, set at various times: averaged, and they keep it. torch's DDP raises."""
    found = []
    if wrap is WRAPPERS["torch"]:
        return found
    for view in (False, True):
        for when in range(3):
            net = chain(2).bfloat16()
            for step in range(4):
                if step == when:
                    for p in net.parameters():
                        p.grad_dtype = torch.float32
                if step == 0:
                    model = wrap(net, gradient_as_bucket_view=view)
                if step > 1:
                    with model.no_sync():
                        model(inputs(rank).bfloat16()).sum().backward()
                model(inputs(rank).bfloat16()).sum().backward()
                dtype = torch.float32 if step >= when else torch.bfloat16
                right = all(p.grad.dtype == dtype and (p.grad == 3 * (1 + (step > 1))).all() for p in net.parameters())
                found.append(right)
                model.zero_grad()
    return found


FACTS = (
    "module_name rank world_size num_parameter_tensors total_parameter_size_bytes bucket_cap_bytes "
    "broadcast_buffers find_unused_parameters gradient_as_bucket_view is_multi_device_module"
)


@case
def attributes(wrap, rank):
    model = wrap(Buffered(), bucket_cap_mb=3) if wrap is WRAPPERS["torch"] else as_torch.DistributedDataParallel(
        lambda: "", {"module": Buffered(), "bucket_cap_mb": 3}
    )  # fmt: skip
    names = "dim device_type mixed_precision is_multi_device_module broadcast_bucket_size bucket_bytes_cap"
    lists = [b.tolist() for b in model.modules_buffers]
    data = model._get_ddp_logging_data()
    same = {name: data[name] for name in FACTS.split()}
    return [*(getattr(model, name) for name in names.split()), lists, same, lacking(model)]


def lacking(model):
    """What libraries read on torch's wrapper and this one has not: see tests/haiscale/wrapper_attributes.py."""
    parts = {"DDP": model, "Reducer": model.reducer}
    listed = (Path(__file__).parents[1] / "haiscale" / "wrapper_attributes.txt").read_text().splitlines()
    rows = (line.partition(":")[0].split() for line in listed)
    return [f"{kind} {name}" for kind, name in rows if kind in parts and not hasattr(parts[kind], name)]


@case
def plain_module_on_one_rank(wrap, rank):
    """The last case: where ranks call different collectives, their group breaks."""
    net = chain()
    model, found = wrap(net), []
    for _ in range(2):
        model(inputs(rank)).sum().backward()
        if rank == 0:
            net(inputs(rank)).sum().backward()
        found.append(grads(net))
        model.zero_grad()
    return found
