"""Rank programs of tests/hfreduce/test_wire.py; results are returned for the tests to check."""

import contextlib
import functools
import hashlib
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from ddp_common import Torch, made
from ddp_models import DEVICE, Branches, gpt2, tokens, vectors
from torch import nn

from haiscale.ddp import DDP
from haiscale.mesh import host_groups
from hfreduce import wire  # registers its backend

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
ROUNDING = {BF16: 2**-8, FP8: 2**-4}  # of a number, at most


def init(rank, size, store, backend):
    torch.set_num_threads(1)
    os.environ["HAISCALE_BUCKETS"] = ""
    if DEVICE.type == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    where = {"init_method": f"file://{store}", "rank": rank, "world_size": size}
    dist.init_process_group(backend, **where, timeout=timedelta(seconds=60))


def of(rank, n, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(n, generator=generator).to(DEVICE)


def digest(*tensors):
    return hashlib.sha256(b"".join(t.detach().double().cpu().numpy().tobytes() for t in tensors)).hexdigest()


def layouts(x):
    """The same values: contiguous, with gaps, two-dimensional and transposed, at an odd address."""
    yield x.clone()
    yield torch.stack([x, x], -1)[..., 0]
    if len(x) % 7 == 0 and len(x):
        yield x.view(7, -1).t().clone(memory_format=torch.contiguous_format).t()
    yield torch.empty(len(x) + 1, dtype=x.dtype, device=x.device)[1:].copy_(x)


def sums(rank, size, store, backend):
    init(rank, size, store, backend)
    wire._PART = 1 << 17  # so that some of the tensors travel in parts
    functions = [accuracy, feedback, non_finite, order, alone]
    found = {function.__name__: function(rank, size) for function in functions}
    dist.barrier()
    dist.destroy_process_group()
    return found


def accuracy(rank, size):
    """By case: the largest error relative to the bound, the mean one, and the digests of all layouts and runs."""
    found = {}
    for n in (0, 1, 7, 128, 1001, 70_000, 400_003):
        for x_dtype in (torch.float32, BF16, torch.float16, torch.float64) if n == 70_000 else (torch.float32,):
            inputs = torch.stack([of(r, n).to(x_dtype) for r in range(size)])
            for dtype in wire.FORMATS:
                for op in wire.OPS:
                    results = []
                    for x in [*layouts(inputs[rank]), inputs[rank].clone()]:
                        assert wire.all_reduce_(x, op, dtype=dtype) is x
                        results.append(x)
                    exact = inputs.double().sum(0) / (size if op == "avg" else 1)
                    wrong = (results[0].double() - exact).abs()
                    # Each rank's number is rounded once, then the sum; a block's smallest numbers to a step of its
                    # scale.
                    terms = inputs.double().abs().sum(0) * (1 if op == "sum" else 1 / size)
                    allowed = ROUNDING[dtype] * (1.1 * terms + exact.abs()) + 2**-15 * size + exact.abs() * 2**-8
                    found[f"{n} {x_dtype} {dtype} {op}"] = {
                        "largest": (wrong / allowed).max().item() if n else 0.0,
                        "mean": (wrong.mean() / exact.abs().mean()).item() if n else 0.0,
                        "digests": [digest(x) for x in results],
                    }
    return found


def feedback(rank, size, n=30_001, steps=50):
    """The same input at each step: the mean of results, with and without error feedback; the kept error against the
    true one."""
    inputs = torch.stack([of(r, n, 1) * (1 + r) for r in range(size)])
    exact, found = inputs.double().mean(0), {}
    for dtype in wire.FORMATS:
        for kept in (None, torch.zeros(n, device=DEVICE)):
            total = torch.zeros_like(exact)
            for _ in range(steps):
                total += wire.all_reduce_(inputs[rank].clone(), "avg", dtype=dtype, error=kept)
            wrong = ((total / steps - exact).norm() / exact.norm()).item()
            found[f"{dtype} {kept is not None}"] = wrong
            if kept is not None:
                left = kept.double()
                dist.all_reduce(left)
                lacking = inputs.double().sum(0) * steps - total * size
                found[f"{dtype} kept"] = ((left - lacking).norm() / lacking.norm()).item()
    return found


def non_finite(rank, size):
    """Positions of non-finite results, their values, and whether kept errors stay finite."""
    found = {}
    for dtype in wire.FORMATS:
        x, kept = of(rank, 1000, 2), torch.zeros(1000, device=DEVICE)
        if rank == 0:
            x[3], x[500] = torch.inf, torch.nan
        if rank == size - 1:
            x[4], x[900] = -torch.inf, torch.inf
        wire.all_reduce_(x, "avg", dtype=dtype, error=kept)
        places = (~x.isfinite()).nonzero().flatten()
        again = wire.all_reduce_(of(rank, 1000, 2), "avg", dtype=dtype, error=kept)
        found[str(dtype)] = [
            places.tolist(), [str(v) for v in x[places].tolist()], kept.isfinite().all().item(),
            again.isfinite().all().item(),
        ]  # fmt: skip
    return found


def order(rank, size):
    """Several under way, finished in any order, against one after another."""
    sizes, same = (1, 5000, 129, 70_000), True
    for flush in (False, True):
        singly = [wire.all_reduce_(of(rank, n, 3), "avg", dtype=FP8) for n in sizes]
        tensors, line = [of(rank, n, 3) for n in sizes], wire.Wire()
        begun = [line.begin(x) for x in tensors]
        if flush:
            line.flush()
        for i in (2, 0, 3, 1):
            begun[i].wait()
            begun[i].wait()
        same = same and all(map(torch.equal, singly, tensors))
    return same


def alone(rank, size):
    """In a group of one, and in a group of some."""
    one = dist.new_subgroups(1)[0]
    x = of(rank, 1000)
    unchanged = torch.equal(wire.all_reduce_(x.clone(), "sum", one, dtype=FP8), x)
    two = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        wire.all_reduce_(x, "avg", two, dtype=FP8)
        return [unchanged, digest(x)]
    return [unchanged, None]


# Training


def batches(step, rank):
    return tokens(step % 4, rank)  # few enough to be learnt


def trained(model, steps=60, look=lambda model: None):
    """Losses averaged over ranks, and a digest of the final parameters."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(steps):
        loss = model(*batches(step, dist.get_rank())).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        look(model)
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    return {"losses": (losses / dist.get_world_size()).tolist(), "digest": digest(*model.parameters())}


def hooked(**options):
    model = Torch(made(gpt2), bucket_cap_mb=0.05)
    model.register_comm_hook(wire.HookState(**options), wire.hook)
    return model


def training(rank, size, store, backend):
    """A small GPT-2, with each wrapper."""
    init(rank, size, store, backend)
    models = {
        "float32": lambda: DDP(made(gpt2), bucket_cap_mb=0.05),
        "fed": lambda: DDP(made(gpt2), bucket_cap_mb=0.05, wire_dtype=FP8),
        "unfed": lambda: DDP(made(gpt2), bucket_cap_mb=0.05, wire_dtype=FP8, error_feedback=False),
        "hook": lambda: hooked(),
        "hook_unfed": lambda: hooked(error_feedback=False),
        "hook_bf16": lambda: hooked(dtype=BF16, error_feedback=False),
    }
    found = {name: trained(make()) for name, make in models.items()}
    dist.barrier()
    dist.destroy_process_group()
    return found


def under_ddp(rank, size, store, backend):
    """The errors that DDP keeps, and its messages."""
    init(rank, size, store, backend)
    found = {"kept": kept(rank, size), "said": said(), "uneven": uneven(rank), "unused": unused(rank)}
    dist.barrier()
    dist.destroy_process_group()
    return found


class Constant(nn.Module):
    """A module whose gradients are given."""

    def __init__(self, sizes):
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(n, device=DEVICE)) for n in sizes)

    def forward(self, gradients):
        return sum((p * g).sum() for p, g in zip(self.parts, gradients, strict=True))


def kept(rank, size):
    """Gradients of 12 steps plus kept errors, against all inputs, while buckets are rebuilt; by wrapper."""
    sizes, found = (1000, 33, 70, 5001), {}
    for name, options in (("views", {}), ("copied", {"gradient_as_bucket_view": False})):
        model = DDP(Constant(sizes), bucket_cap_mb=0.01, wire_dtype=FP8, **options)
        parameters, caps, counts = list(model.module.parts), model.reducer.sizes, []
        caps.stepped = lambda *_, caps=caps, n=counts: setattr(caps, "now", {3: 1 << 30, 7: 1}.get(len(n), caps.now))
        given, got = (torch.zeros(sum(sizes), dtype=torch.float64, device=DEVICE) for _ in range(2))
        for step in range(12):
            for silent in (True, False):  # the kept error is added once, to the sum of both
                gradients = [of(rank, n, 10 * step + i + 100 * silent) for i, n in enumerate(sizes)]
                with model.no_sync() if silent else contextlib.nullcontext():
                    model(gradients).backward()
                given += torch.cat(gradients)
            got += torch.cat([p.grad for p in parameters]).double() * size
            model.zero_grad()
            counts.append(len(model.reducer.buckets))
        between = model.reducer.wire.hosts is not None
        assert ("on the wire between hosts with error feedback" in model.explain()) == between == (size == 4)
        (flat,) = model.reducer.flats
        at = dict(zip(flat.order, flat.offsets, strict=False))
        left = torch.cat([flat.error[at[i] : at[i] + n] for i, n in enumerate(sizes)]).double()
        for total in (given, left):
            dist.all_reduce(total)
        lacking = given - got
        found[name] = [
            ((left - lacking).norm() / lacking.norm()).item(),
            (lacking.norm() / given.norm()).item(),
            counts,
        ]
    return found


def said():
    """What explain returns, and refusals."""
    model = DDP(made(gpt2), wire_dtype=FP8)
    texts = [model.explain().splitlines()[1]]
    for options in (
        {"wire_dtype": torch.float8_e5m2},
        {"wire_dtype": BF16, "error_feedback": True},
        {"error_feedback": True},
        {"wire_dtype": FP8, "cpu_assisted": True},
    ):
        try:
            DDP(made(gpt2), **options)
        except ValueError as error:
            texts.append(str(error))
    return texts


def uneven(rank):
    """Rank 0 has two inputs, rank 1 five: the digest of the final parameters."""
    model = DDP(made(gpt2), bucket_cap_mb=0.05, wire_dtype=FP8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with model.join():
        for step in range(5 if rank else 2):
            model(*batches(step, rank)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return digest(*model.parameters())


def unused(rank):
    """Branches used by ranks alternately, or by all, and a part used by none: digests of the final parameters."""
    digests = []
    for choose, option in (
        (lambda step: (step + rank) % 2, "find_unused_parameters"),
        (lambda step: 2, "static_graph"),
    ):
        make = functools.partial(Branches, choose)
        model = DDP(made(make), bucket_cap_mb=0.002, wire_dtype=FP8, **{option: True})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(6):
            model(*vectors(step, rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(p.grad is None for p in model.module.never.parameters())
        digests.append(digest(*model.parameters()))
    return digests


# Between hosts


def of_hosts(rank, size, store, backend):
    """Two ranks on each of two hosts: sums as in `accuracy` and `feedback`, several under way, DDP, and bytes sent."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    init(rank, size, store, backend)
    hosts = host_groups(dist.group.WORLD)
    found = {"groups": [dist.get_process_group_ranks(group) for group in hosts], "digests": [], "wrong": [], "kept": []}
    for n in (1, 300, 30_001):
        inputs, error = torch.stack([of(r, n, 4) for r in range(size)]), torch.zeros(n, device=DEVICE)
        exact, total = inputs.double().sum(0), torch.zeros(n, dtype=torch.float64, device=DEVICE)
        for _ in range(10):
            x = wire.all_reduce_(inputs[rank].clone(), "avg", dtype=FP8, error=error, hosts=hosts)
            total += x.double() * size
            found["digests"].append(digest(x))
        left = error.double()
        dist.all_reduce(left)
        found["wrong"].append(((x * size - exact).norm() / exact.norm()).item())
        found["kept"].append(((exact * 10 - total - left).norm() / exact.norm()).item())
    sizes, line = (1, 5000, 129, 70_000), wire.Wire(hosts=hosts)
    singly = [wire.all_reduce_(of(rank, n, 3), "avg", dtype=FP8, hosts=hosts) for n in sizes]
    tensors = [of(rank, n, 3) for n in sizes]
    begun = [line.begin(x) for x in tensors]
    line.flush()
    for i in (2, 0, 3, 1):
        begun[i].wait()
    found["order"], found["ddp"] = all(map(torch.equal, singly, tensors)), kept(rank, size)
    found["bytes"], x = [], torch.randn(1 << 22)
    for call in (lambda: dist.all_reduce(x), lambda: wire.all_reduce_(x, dtype=FP8, hosts=hosts)):
        dist.barrier()
        before = sent()
        call()
        dist.barrier()
        found["bytes"].append(sent() - before)
    dist.destroy_process_group()
    return found


def sent():
    """Bytes that this host has sent over eth0."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if "eth0" in line)
    return int(line.partition(":")[2].split()[8])


def travels(rank, size, store, count, rounds):
    """By format: seconds of each all-reduce, and the bytes that this host sends for it."""
    init(rank, size, store, "hfreduce")
    x, found, hosts = torch.ones(count), {}, host_groups(dist.group.WORLD)
    calls = {
        "float32": lambda: dist.all_reduce(x),
        "bfloat16": lambda: wire.all_reduce_(x, dtype=BF16, hosts=hosts),
        "float8_e4m3fn": lambda: wire.all_reduce_(x, dtype=FP8, hosts=hosts),
    }
    for name in [*calls] * (rounds + 1):
        x.copy_(torch.randn(count))
        dist.barrier()
        before, began = sent(), time.perf_counter()
        calls[name]()
        seconds = time.perf_counter() - began
        dist.barrier()
        found.setdefault(name, []).append([seconds, sent() - before])
    dist.destroy_process_group()
    return {name: values[1:] for name, values in found.items()}


def steps(rank, size, store, rounds):
    """By wire_dtype: seconds of each training step of an MLP with 64 MiB of gradients, in turns."""
    init(rank, size, store, "hfreduce")
    width, found = 1448, {}

    def prepared(wire_dtype):
        torch.manual_seed(3)
        layers = [layer for _ in range(8) for layer in (nn.Linear(width, width, bias=False), nn.GELU())]
        return DDP(nn.Sequential(*layers), bucket_cap_mb=16, wire_dtype=wire_dtype)

    models = {str(wire_dtype): prepared(wire_dtype) for wire_dtype in (None, BF16, FP8)}
    for name in [*models] * (rounds + 2):
        x = of(rank, 64 * width).view(64, width)
        dist.barrier()
        began = time.perf_counter()
        models[name](x).square().mean().backward()
        found.setdefault(name, []).append(time.perf_counter() - began)
        models[name].zero_grad()
    dist.destroy_process_group()
    return {name: seconds[2:] for name, seconds in found.items()}
