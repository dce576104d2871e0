"""Cases of tests/workers/ddp.py: the wrapper's other behaviour and messages."""

import contextlib
import copy
import functools
import io
import json
import os
import pickle
from pathlib import Path

import torch
import torch.distributed as dist
from ddp_common import Torch, case, loss_of, made, same, train
from ddp_models import (
    WIDTH,
    Branches,
    Checkpointed,
    gpt2,
    mlp,
    vectors,
)  # fmt: skip
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import hfreduce
from haiscale import checks
from haiscale.ddp import DDP, sizes


@case
def nested_no_sync(rank, size, store):
    """The end of the inner context does not end the outer."""
    model = DDP(made(mlp))
    alone = copy.deepcopy(model.module)
    with model.no_sync():
        with model.no_sync():
            loss_of(model(*vectors(0, rank))).backward()
        loss_of(model(*vectors(1, rank))).backward()
    for step in range(2):
        loss_of(alone(*vectors(step, rank))).backward()
    return {"same": same([p.grad for p in model.parameters()], [p.grad for p in alone.parameters()])}


@case
def buffers(rank, size, store):
    """Broadcast in one message before each forward that may be trained, but not after one without gradients."""
    model = DDP(made(mlp, norm=True))
    sent, broadcast = [], dist.broadcast
    dist.broadcast = lambda tensor, *args, **kwargs: (sent.append(tensor.nbytes), broadcast(tensor, *args, **kwargs))
    try:
        if rank == 1:
            model.module[1].running_mean.data.fill_(7)
        model.eval()
        for step in range(3):
            model(*vectors(step, rank))
        restored = bool((model.module[1].running_mean == 0).all())
        with torch.no_grad():
            model(*vectors(0, rank))
        before = len(sent) - 1  # the first one without gradients follows a trained one
        with torch.no_grad():
            model(*vectors(0, rank))
    finally:
        dist.broadcast = broadcast
    return {"restored": restored, "sent": before, "silent": len(sent) - 1 - before}


@case
def copies(rank, size, store):
    """deepcopy and pickle, as with torch's: in the default group; the copy averages separately."""
    model = DDP(made(mlp), bucket_cap_mb=0.002)
    loss_of(model(*vectors(0, rank))).backward()
    found = {}
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for name, other in (("deepcopy", copy.deepcopy(model)), ("pickle", torch.load(stream, weights_only=False))):
        found[name] = same(train(other, vectors, 3), train(Torch(made(mlp)), vectors, 3))
    try:
        pickle.dumps(DDP(made(mlp), process_group=dist.new_group()))
    except ValueError as error:
        found["other_group"] = str(error)
    return found


@case
def again(rank, size, store):
    """A model wrapped twice, one after the other, averages once; `stop` ends it; old hooks are removed."""
    module = made(mlp)
    first = DDP(module)
    loss_of(first(*vectors(0, rank))).backward()
    del first
    before = hfreduce.operations()
    loss_of(module(*vectors(0, rank))).backward()
    silent = hfreduce.operations() - before
    second = DDP(module)
    loss_of(second(*vectors(0, rank))).backward()
    second.reducer.stop()
    before = hfreduce.operations()
    loss_of(module(*vectors(0, rank))).backward()
    return {"silent": silent, "stopped": hfreduce.operations() - before}


@case
def pointers(rank, size, store):
    """Gradients are views of one buffer, at the same address in every step, whatever zero_grad does and bucket sizes
    are."""
    candidates, sizes.CANDIDATES = sizes.CANDIDATES, (1 << 10, 16 << 10)
    model = DDP(made(mlp))
    places, counts = [], set()
    for step in range(8):
        loss_of(model(*vectors(step, rank))).backward()
        places.append([p.grad.data_ptr() for p in model.parameters()])
        counts.add(len(model.reducer.buckets))
        model.zero_grad(set_to_none=step % 2 == 0)
    sizes.CANDIDATES = candidates
    flat = model.reducer.flats[0].buffer
    inside = all(flat.data_ptr() <= at < flat.data_ptr() + flat.nbytes for at in places[0])
    return {"stable": all(place == places[0] for place in places), "inside": inside, "counts": sorted(counts)}


def averaged(model, alone):
    """Whether the model's gradients are the averages over ranks of those of an unwrapped model."""
    equal = []
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        dist.all_reduce(q.grad, dist.ReduceOp.AVG)
        equal.append(torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-7))
    return all(equal)


@case
def backwards(rank, size, store):
    """Two losses of one forward, each with its own backward, and one backward run twice: averages of the sums."""
    model, alone = (DDP(made(mlp), bucket_cap_mb=0.002), made(mlp))
    equal = []
    for step in range(3):
        for m in (model, alone):
            m.zero_grad()
            y = m(*vectors(step, rank))
            y.square().mean().backward(retain_graph=True)
            y.sin().mean().backward(retain_graph=step == 1)
            if step == 1:
                y.sin().mean().backward()
        equal.append(averaged(model, alone))
    return {"equal": all(equal)}


@case
def recomputed(rank, size, store):
    """Checkpoints around the wrapped model, with two forwards and one backward: averages of the sums."""
    equal = []
    for make, reentrant in ((mlp, False), (mlp, True), (lambda: Checkpointed(True, False), False)):
        model, alone = (DDP(made(make), bucket_cap_mb=0.002), made(make))
        for step in range(3):
            for m in (model, alone):
                m.zero_grad()
                batches = [x.requires_grad_() for k in range(2) for x in vectors(2 * step + k, rank)]
                sum(checkpoint(m, x, use_reentrant=reentrant).square().mean() for x in batches).backward()
            equal.append(averaged(model, alone))
    return {"equal": all(equal)}


@case
def tuned(rank, size, store):
    """The size is measured in the first steps, saved to a file, and read from there the next time.

    Rank 0's file is broken at first, which is harmless.
    """
    os.environ["HAISCALE_BUCKETS"] = str(Path(store).with_suffix(".buckets"))
    if rank == 0:
        Path(os.environ["HAISCALE_BUCKETS"]).write_text('{"version": 1, "sizes"')
    candidates, sizes.CANDIDATES = sizes.CANDIDATES, (1 << 10, 4 << 10, 16 << 10)
    try:
        model = DDP(made(mlp))
        results, counts = [train(model, vectors, 20), train(Torch(made(mlp)), vectors, 20)], set()
        chosen, text = model.reducer.sizes.now, model.explain()
        counts = model.reducer.steps
        dist.barrier()
        again = DDP(made(mlp))
        train(again, vectors, 3)
        kept = json.loads(Path(os.environ["HAISCALE_BUCKETS"]).read_text())
    finally:
        sizes.CANDIDATES = candidates
        os.environ["HAISCALE_BUCKETS"] = ""
    (entry,) = kept["sizes"].values()
    return {
        "same": same(*results), "chosen": chosen, "steps": counts, "again": again.reducer.sizes.now, "text": text,
        "kept": entry["bytes"], "timed": sorted(map(int, entry["seconds"])), "again_text": again.explain(),
    }  # fmt: skip


def error(call):
    """The message of the ValueError raised."""
    try:
        call()
    except ValueError as why:
        return str(why)
    return "nothing raised"


def raising(rank, place):
    """The message after a backward that raised at the input of part `place`: at 0 when all averages had begun. The step
    after it averages."""

    def bomb(gradient):
        raise ArithmeticError

    model = DDP(made(mlp), find_unused_parameters=place > 0, bucket_cap_mb=0.001)
    train(model, vectors, 2)
    hooked = model.module[place].register_forward_pre_hook(
        lambda _, args: args[0].requires_grad_().register_hook(bomb) and None
    )
    with contextlib.suppress(ArithmeticError):
        loss_of(model(*vectors(0, rank))).backward()
        raise AssertionError("backward did not raise")
    hooked.remove()
    message = error(lambda: model(*vectors(0, rank)))
    model.zero_grad()
    loss_of(model(*vectors(0, rank))).backward()
    grads = [torch.empty_like(model.module[0].weight) for _ in range(dist.get_world_size())]
    dist.all_gather(grads, model.module[0].weight.grad)
    return message if torch.equal(*grads) else "not averaged"


@case
def messages(rank, size, store):
    found = {}
    model = DDP(Branches(lambda step: 0))
    loss_of(model(*vectors(0, rank))).backward()
    found["unused"] = error(lambda: model(*vectors(0, rank)))
    found["after"] = error(lambda: model(*vectors(0, rank)))
    model = DDP(made(Checkpointed, True, False), bucket_cap_mb=0.001)
    loss_of(model(*vectors(0, rank))).backward()
    model.module.uses = True
    found["more"] = error(lambda: loss_of(model(*vectors(0, rank))).backward())
    found["more_after"] = error(lambda: model(*vectors(0, rank)))
    found["raised"], found["raised_late"] = raising(rank, 2), raising(rank, 0)
    model = mlp()
    model[0].requires_grad_(False)
    model = DDP(model)
    model.module[0].requires_grad_(True)
    found["unfrozen"] = error(lambda: model(*vectors(0, rank)))
    found["shape"] = error(lambda: DDP(nn.Linear(WIDTH, 3 + rank // (size - 1))))
    found["name"] = error(lambda: DDP(nn.Sequential(nn.Linear(2, 2), *([nn.PReLU()] if rank == 0 else []))))
    odd = nn.Linear(2, 2)
    odd.bias.requires_grad_(rank == 0)
    found["frozen"] = error(lambda: DDP(odd))
    others = dist.new_group([0])
    found["group"] = "" if rank == 0 else error(lambda: DDP(nn.Linear(2, 2), process_group=others))
    for name, value in {"dim": 1, "param_to_hook_all_reduce": odd.bias, "bucket_cap_mb_list": [1]}.items():
        found[name] = error(functools.partial(DDP, nn.Linear(2, 2), **{name: value}))
    found["device_ids"] = error(lambda: DDP(nn.Linear(2, 2), [0]))
    found["sparse"] = error(lambda: DDP(nn.Embedding(2, 2, sparse=True)))
    found["lazy"] = error(lambda: DDP(nn.LazyLinear(2)))
    found["meta"] = error(lambda: DDP(nn.Linear(2, 2, device="meta"), init_sync=False))
    found["nothing"] = error(lambda: DDP(nn.ReLU()))
    model = DDP(mlp())
    found["optimizer"] = error(lambda: model.overlap_forward(torch.optim.SGD(model.parameters(), lr=0.1)))
    tied = gpt2()
    found["tied"] = checks.path(tied, tied.model.lm_head.weight)
    return found


@case
def shards(rank, size, store):
    """Names of the user's model, tied parameters once, live tensors; persistent buffers."""
    module = gpt2()
    module.register_buffer("kept", torch.zeros(2))
    module.register_buffer("left", torch.zeros(2), persistent=False)
    named = dict(DDP(module).named_shards())
    live = all(module.get_parameter(name) is p for name, p in named.items() if name != "kept")
    return {
        "live": live,
        "names": len(named) == len(list(module.parameters())) + 1,
        "kept": named["kept"] is module.kept,
    }


@case
def moved(rank, size, store):
    """Ranks start with rank 0's parameters and buffers, whatever theirs were."""
    torch.manual_seed(rank)
    model = DDP(mlp(norm=True))
    model.module[1].running_var.fill_(rank + 1.0)
    other = DDP(model.module)
    sums = torch.tensor([float(t.double().sum()) for t in other.state_dict().values()])
    gathered = [torch.empty_like(sums) for _ in range(size)]
    dist.all_gather(gathered, sums)
    return {
        "same": all(torch.equal(sums, other) for other in gathered),
        "variance": float(model.module[1].running_var[0]),
    }


@case
def groups(rank, size, store):
    """A mesh's dimension is a group; what the model asks to leave out is not averaged."""
    module = made(mlp)
    module._ddp_params_and_buffers_to_ignore = ["0.bias"]
    model = DDP(module, device_mesh=init_device_mesh("cpu", (size,)))
    loss_of(model(*vectors(0, rank))).backward()
    grads = [torch.cat([p.grad.flatten() for p in (module[0].weight, module[0].bias)]) for _ in range(size)]
    dist.all_gather(grads, grads[rank].clone())
    first, second = (grad.split([WIDTH * WIDTH, WIDTH]) for grad in grads[:2])
    return {"averaged": torch.equal(first[0], second[0]), "left_out": not torch.equal(first[1], second[1])}
