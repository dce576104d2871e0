"""Cases of tests/workers/ddp.py: training, against torch's DistributedDataParallel."""

import contextlib
import copy
import functools
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from ddp_common import Torch, against_torch, case, loss_of, made, same, train
from ddp_models import (
    Attention,
    Branches,
    Checkpointed,
    SyncBatchNorm,
    Wide,
    gpt2,
    images,
    llama,
    mlp,
    resnet,
    tokens,
    vectors,
)  # fmt: skip
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import hfnn
from haiscale.ddp import DDP
from hfnn.optim import AdamW

sys.path.append(str(Path(__file__).parents[1] / "fuzz"))
from played_graphs import played


@case
def language(rank, size, store, make, converted):
    """50 steps of a transformers decoder with 4 layers; GPT-2 has tied weights."""
    make = {"gpt2": gpt2, "llama": llama}[make]
    return against_torch(lambda: hfnn.convert(make(), prefer="memory") if converted else make(), tokens, 50, keep=False)


@case
def captured(rank, size, store):
    """Played graphs: in either wrapper a captured model trains as an uncaptured one, with accumulation."""
    results, replays = [], []
    with played():
        for wrap in (Torch, DDP):
            for capture in (False, True):
                model = hfnn.convert(made(gpt2), prefer="memory", capture=capture)
                results.append(train(wrap(model), tokens, 8, accumulate=2))
                replays += [vars(model)["_hfnn_capture"].counts["replayed"]] if capture else []
    return {"same": all(same(results[0], other) for other in results[1:]), "replays": replays}


@case
def vision(rank, size, store, norm):
    """50 steps of a small ResNet, channels last; running statistics are buffers."""
    norm = {"batch": nn.BatchNorm2d, "sync": SyncBatchNorm, "torch": nn.SyncBatchNorm}[norm]
    return against_torch(functools.partial(resnet, norm), images, 50, keep=False)


@case
def frozen(rank, size, store):
    def make():
        model = mlp()
        model[2].requires_grad_(False)
        model[0].bias.requires_grad_(False)
        return model

    return against_torch(make, vectors, 10)


@case
def unused(rank, size, store, choose):
    """Branches used alternately, alternately by rank, or by some ranks only."""
    choose = {
        "alternating": lambda step: step % 2,
        "by_rank": lambda step: (step + rank) % 2,
        "first_rank_only": lambda step: 2 if rank == 0 else 1,
    }[choose]
    options = {"find_unused_parameters": True}
    return against_torch(functools.partial(Branches, choose), vectors, 8, options, options)


@case
def static(rank, size, store):
    """A part that is never used, and one that only rank 0 uses; then with no_sync in between."""
    make = functools.partial(Branches, lambda step: 2 if rank == 0 else 1)
    found = against_torch(make, vectors, 8, {"static_graph": True}, {"find_unused_parameters": True})
    with_no_sync = against_torch(
        make, vectors, 4, {"static_graph": True}, {"find_unused_parameters": True}, accumulate=3
    )
    return found | {"no_sync": with_no_sync["same"]}


@case
def accumulation(rank, size, store, no_sync):
    found = against_torch(mlp, vectors, 6, accumulate=3, no_sync=no_sync, clip=0.05)
    clipped = against_torch(mlp, vectors, 6, {"gradient_as_bucket_view": False}, accumulate=3, no_sync=no_sync)
    return found | {"copied": clipped["same"]}


@case
def checkpointed(rank, size, store, reentrant, shared):
    """Compared with no checkpoint at all: torch's wrapper refuses a parameter that two reentrant checkpoints use."""
    results = []
    for wrapper, reentrant_ in ((DDP, reentrant), (Torch, False)):
        options = {"bucket_cap_mb": 0.002} if wrapper is DDP else {}
        results.append(train(wrapper(made(Checkpointed, reentrant_, shared), **options), vectors, 6))
    far = max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))
    return {"same": same(*results), "far": far}


@case
def wire(rank, size, store):
    """In bfloat16, compared with torch's hook for it, which torch allows for NCCL only, by name."""
    theirs = Torch(made(mlp))
    theirs.register_comm_hook(None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))
    model = DDP(made(mlp), wire_dtype=torch.bfloat16, bucket_cap_mb=0.002)
    found = same(train(model, vectors, 6), train(theirs, vectors, 6))
    loss_of(model(*vectors(6, rank))).backward()
    return {"same": found, "dtypes": sorted({str(p.grad.dtype) for p in model.parameters()})}


@case
def assisted(rank, size, store):
    """In a separate group for the averages."""
    found = against_torch(mlp, vectors, 6, {"cpu_assisted": True})
    return found | {"own": DDP(made(mlp), cpu_assisted=True).reducer.group is not dist.group.WORLD}


@case
def mixed(rank, size, store, reduce):
    """bfloat16 parameters in forward and backward, compared with a bfloat16 model averaged by hand."""
    reduce = getattr(torch, reduce)

    class Policy:
        param_dtype, reduce_dtype, buffer_dtype = torch.bfloat16, reduce, torch.bfloat16

    policy = torch.bfloat16 if reduce == torch.float32 else Policy()  # the short form, and torch's
    model, alone = DDP(made(mlp), mixed_precision=policy, bucket_cap_mb=0.002), made(mlp)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, alone)]
    equal = []
    for step in range(5):
        for part in range(2):
            with model.no_sync() if part == 0 else contextlib.nullcontext():
                loss_of(model(*vectors(2 * step + part, rank))).backward()
        sums = [torch.zeros_like(p) for p in alone.parameters()]
        for part in range(2):
            narrow = copy.deepcopy(alone)
            for p in narrow.parameters():
                p.data = p.data.bfloat16()
            loss_of(narrow(vectors(2 * step + part, rank)[0].bfloat16())).backward()
            for total, p in zip(sums, narrow.parameters(), strict=True):
                total += p.grad
        for p, total in zip(alone.parameters(), sums, strict=True):
            total = total.to(reduce)
            dist.all_reduce(total, dist.ReduceOp.AVG)
            p.grad = total.float()
        equal.append(same([p.grad for p in model.parameters()], [p.grad for p in alone.parameters()]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    equal.append(same([p.data for p in model.parameters()], [p.data for p in alone.parameters()]))
    norm = DDP(made(mlp, norm=True), mixed_precision=Policy())
    output = norm(*vectors(0, rank))
    buffer_dtypes = [str(norm.module[1].running_mean.dtype), str(norm.module[1].num_batches_tracked.dtype)]
    output.square().mean().backward()
    dtypes = sorted({str(p.dtype) for p in (*model.parameters(), *norm.parameters())})
    return {"equal": equal, "dtypes": [*dtypes, str(output.dtype), *buffer_dtypes]}


@case
def hooks(rank, size, store):
    """torch's own hooks see whole buckets, and get their state by bucket."""
    found = {}
    for name in ("allreduce_hook", "fp16_compress_hook"):
        models = [DDP(made(mlp), bucket_cap_mb=0.002), Torch(made(mlp))]
        for model in models:
            model.register_comm_hook(None, getattr(default_hooks, name))
        found[name] = same(*[train(model, vectors, 4) for model in models])
    results = []
    for wrapper in (DDP, Torch):
        model = wrapper(made(mlp), bucket_cap_mb=100)
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        results.append(train(model, vectors, 20, keep=False))
        found[f"errors_{wrapper is DDP}"] = len(state.error_dict)
    found["power_far"] = max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))
    seen = []

    def hook(state, bucket):
        seen.append((bucket.index(), bucket.is_last(), len(bucket.gradients()), len(bucket.parameters())))
        bucket.set_buffer(bucket.buffer() * 0 + 2)
        future = torch.futures.Future()
        future.set_result(bucket.buffer() + 1)
        return future

    model = DDP(made(mlp), bucket_cap_mb=0.002)
    model.register_comm_hook(None, hook)
    loss_of(model(*vectors(0, rank))).backward()
    found |= {"seen": seen, "threes": all(bool((p.grad == 3).all()) for p in model.parameters())}
    return found


@case
def joined(rank, size, store, initial):
    """The last rank has no inputs; each earlier rank has one more than the next."""
    results = []
    for wrapper in (DDP, Torch):
        model = wrapper(made(mlp, norm=True), bucket_cap_mb=0.002)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with model.join(divide_by_initial_world_size=initial):
            for step in range(size - 1 - rank):
                with model.no_sync() if step == 1 else contextlib.nullcontext():
                    loss_of(model(*vectors(step, rank))).backward()
                optimizer.step()
                optimizer.zero_grad()
        results.append([t.detach().clone() for t in model.state_dict().values()])
        loss_of(model(*vectors(9, rank))).backward()  # all ranks continue together
        results[-1] += [p.grad.clone() for p in model.parameters()]
    return {"same": same(*results)}


@case
def compiled(rank, size, store):
    """Compiled whole, and inside: torch's compiler splits the graph at buckets, so averages start within backward."""
    make = functools.partial(made, Wide)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    want = train(Torch(make()), vectors, 3)
    around = torch.compile(DDP(make(), bucket_cap_mb=1), backend=backend)
    found = {"around": same(train(around, vectors, 3), want), "graphs": len(graphs)}
    inside = DDP(torch.compile(make(), backend="aot_eager"), bucket_cap_mb=1)
    return found | {"inside": same(train(inside, vectors, 3), want)}


@case
def overlapped(rank, size, store, make, wire=None):
    """Steps that end in the next forward, with a changing learning rate: bitwise those of ordinary steps."""
    make = {"mlp": functools.partial(mlp, norm=True), "attention": Attention, "gpt2": gpt2}[make]
    batches, results = tokens if make is gpt2 else vectors, []
    for overlap in (True, False):
        model = DDP(made(make), bucket_cap_mb=0.002, wire_dtype=wire and getattr(torch, wire))
        optimizer = AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        handle = model.overlap_forward(optimizer) if overlap else None
        losses, pending = [], []
        for step in range(6):
            with model.no_sync() if step % 3 == 1 else contextlib.nullcontext():
                loss = loss_of(model(*batches(step, rank)))
                loss.backward()
            losses.append(loss.detach())
            if step % 3 == 1:
                continue
            pending.append(sum(bucket.work is not None for bucket in model.reducer.buckets))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        results.append(losses + [t.clone() for t in model.state_dict().values()])
        if overlap:
            handle.remove()
            under_way = pending
        loss_of(model(*batches(7, rank))).backward()
        results[-1] += [p.grad.clone() for p in model.parameters()]
    return {"same": same(*results), "under_way": min(under_way), "buckets": len(model.reducer.buckets)}
