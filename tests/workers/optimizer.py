"""One gloo rank: hfnn's optimizers work on sharded parameters as on whole ones."""

import contextlib
import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gloo import process_group
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import hfnn
from hfnn import optim
from hfnn.core import kernel
from hfnn.optim.fused import Fused

SAME = {"rtol": 0, "atol": 0}
CLOSE = {"rtol": 1e-5, "atol": 1e-6}

# Whether bits are preserved: for elementwise states, and for blocks of 256 if shards begin between them.
OPTIMIZERS = {
    "adamw": lambda p, **o: optim.AdamW(p, lr=0.01, weight_decay=0.1, **o),
    "amsgrad": lambda p, **o: optim.Adam(p, lr=0.01, amsgrad=True, **o),
    "sgd": lambda p, **o: optim.SGD(p, lr=0.1, momentum=0.9, **o),
    "lion": lambda p, **o: optim.Lion(p, lr=0.001, **o),
    "8bit": lambda p, **o: optim.AdamW(p, lr=0.01, state_dtype="8bit", **o),
    "4bit": lambda p, **o: optim.AdamW(p, lr=0.01, state_dtype="4bit", **o),
    "ema": lambda p, **o: optim.AdamW(p, lr=0.01, ema_decay=0.9, **o),
}
REMAINDER = {"master": "remainder", "state_dtype": torch.float32}


def build(dtype=torch.float32):
    """Shards of the first weight are whole blocks on 4 ranks; 10 rows do not split evenly, 3 leave a rank with none."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 10), nn.Tanh(), nn.Linear(10, 3)).to(dtype)


def train(model, optimizer, first, last, clip=None):
    """All ranks read the same batch, so the mean of their gradients is bitwise each one's."""
    for i in range(first, last):
        x = torch.randn(4, 128, generator=torch.Generator().manual_seed(i)).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if isinstance(optimizer, Fused):
            assert optimizer._ran == (kernel.forced() or "cpp",), optimizer.report()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_equal(model, plain, **tolerance):
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(p.detach()), whole(q.detach()), **tolerance)


def assert_states_equal(optimizer, plain, **tolerance):
    """As returned by state_dict: in the parameter's layout, whatever their storage format."""
    found, wanted = optimizer.state_dict()["state"], plain.state_dict()["state"]
    assert found.keys() == wanted.keys() and found
    for index, values in wanted.items():
        assert found[index].keys() == values.keys()
        for key, value in values.items():
            if value.dim():
                assert isinstance(found[index][key], DTensor), key
            # The remainder of a DTensor is int32 here, and int16 otherwise.
            torch.testing.assert_close(whole(found[index][key]), value, check_dtype=key != "remainder", **tolerance)


def shard(model, mesh):
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp2(world_size, folder):
    """Bitwise equal to the unsharded run; also a converted torch optimizer, and a bfloat16 model with a master."""
    mesh = init_device_mesh("cpu", (world_size,))
    for name, make in OPTIMIZERS.items():
        plain, model = build(), shard(build(), mesh)
        reference, optimizer = make(plain.parameters()), make(model.parameters())
        train(plain, reference, 0, 4)
        train(model, optimizer, 0, 4)
        assert_equal(model, plain, **SAME)
        if name not in ("8bit", "4bit") or world_size in (2, 4):
            assert_states_equal(optimizer, reference, **SAME)
    plain, model = build(torch.bfloat16), shard(build(torch.bfloat16), mesh)
    reference, optimizer = optim.AdamW(plain.parameters(), **REMAINDER), optim.AdamW(model.parameters(), **REMAINDER)
    train(plain, reference, 0, 4)
    train(model, optimizer, 0, 4)
    assert_states_equal(optimizer, reference, **SAME)
    assert_equal(model, plain, **SAME)
    plain, model = build(), shard(build(), mesh)
    reference, optimizer = torch.optim.AdamW(plain.parameters()), torch.optim.AdamW(model.parameters())
    train(plain, reference, 0, 6)
    train(model, optimizer, 0, 2)
    train(model, hfnn.convert(optimizer), 2, 4)
    train(model, hfnn.revert(optimizer), 4, 6)
    assert_equal(model, plain, rtol=2e-5, atol=2e-6)


class Whole(ParallelStyle):
    """Replicates a module's parameters as DTensors; its output is a plain tensor."""

    def _apply(self, module, mesh):
        return distribute_module(module, mesh, output_fn=lambda m, y, mesh: y.full_tensor())


def split(model, mesh):
    """Some parameters are sharded by tensor parallelism, others replicated."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(use_local_output=False), "4": Whole()}
    return parallelize_module(model, mesh, plan)


def distributions(world_size):
    """(model, context to step it in) for each kind of distribution; the last uses the definition, which sums in its own
    way."""
    line = init_device_mesh("cpu", (world_size,))
    models = [shard(build(), line), split(build(), line)]
    if world_size == 4:
        models.append(shard(build(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))))
        # The first weight is sharded over both dimensions.
        plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "split"))
        models.append(shard(split(build(), plane["split"]), plane["shard"]))
    return [*((model, contextlib.nullcontext()) for model in models), (shard(build(), line), hfnn.use("torch"))]


def norm(world_size, folder):
    """max_grad_norm covers all shards, counts replicas once, and is refused if the shards are on several meshes."""
    plain = build()
    reference = torch.optim.AdamW(plain.parameters())
    train(plain, reference, 0, 3, clip=0.01)
    models = distributions(world_size)
    for model, how in models:
        optimizer = optim.AdamW(model.parameters(), max_grad_norm=0.01)
        with how:
            train(model, optimizer, 0, 3)
        assert_equal(model, plain, **CLOSE)
        gradients = [whole(p.grad) for p in model.parameters()]
        torch.testing.assert_close(optimizer.grad_norm, nn.utils.get_total_norm(gradients), **CLOSE)
    other = shard(build(), init_device_mesh("cpu", (1, world_size), mesh_dim_names=("a", "b"))["b"])
    for parameters in (
        [*models[0][0].parameters(), *other.parameters()],
        [*models[0][0].parameters(), *build().parameters()],
    ):
        optimizer = optim.AdamW(parameters, max_grad_norm=1.0)
        for p in parameters:
            p.grad = torch.ones_like(p)
        before = [whole(p.detach()).clone() for p in parameters]
        with pytest.raises(ValueError, match="max_grad_norm"):
            optimizer.step()
        assert all(torch.equal(whole(p.detach()), q) for p, q in zip(parameters, before, strict=True))


def lamb(world_size, folder):
    """Both norms of the ratio are those of whole parameters: over all shards, with replicas counted once."""
    for options in (
        {"weight_decay": 0.1},
        {"weight_decay": 0.0, "use_nvlamb": True, "max_grad_norm": 0.01},
        {"adam_w_mode": False, "grad_averaging": False, "bias_correction": False},
    ):
        print(options, flush=True)  # shown on failure
        plain = build()
        reference = optim.LAMB(plain.parameters(), lr=0.01, **options)
        train(plain, reference, 0, 3)
        for model, how in distributions(world_size):
            optimizer = optim.LAMB(model.parameters(), lr=0.01, **options)
            with how:
                train(model, optimizer, 0, 3)
            assert_equal(model, plain, **CLOSE)


def adafactor(world_size, folder):
    """torch's own step, as without hfnn, with the reason; options that it lacks are an error."""
    why, mesh = "kernels take whole matrices, got a DTensor", init_device_mesh("cpu", (world_size,))

    def run(cls, placement, **options):
        """Some parameters, an optimizer, and the error of three steps, or None."""
        new = functools.partial(distribute_tensor, device_mesh=mesh, placements=[placement])
        params = [nn.Parameter(new(torch.ones(shape))) for shape in ((8, 6), (6,))]
        optimizer, generator = cls(params, **options), torch.Generator().manual_seed(0)
        try:
            for _ in range(3):
                for p in params:
                    p.grad = new(torch.randn(p.shape, generator=generator))
                optimizer.step()
        except RuntimeError as error:  # torch 2.13 computes no norms of sharded matrices
            return params, optimizer, str(error)
        return params, optimizer, None

    for placement in (Replicate(), Shard(0)):
        (ours, optimizer, error), (theirs, _, wanted) = (
            run(cls, placement) for cls in (optim.Adafactor, torch.optim.Adafactor)
        )
        assert error == wanted and (wanted is None or placement.is_shard())
        assert optimizer._ran == ("torch",) and "torch's own step" in optimizer.report() and why in optimizer.report()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(whole(p.detach()), whole(q.detach()), **SAME)
        with pytest.raises(ValueError, match=why):
            run(optim.Adafactor, placement, ema_decay=0.9)


def gradients(world_size, folder):
    """A gradient whose layout differs from its parameter's, such as a partial sum, is redistributed.

    Also if the previous one had the parameter's layout.
    """
    mesh = init_device_mesh("cpu", (world_size,))
    plain, values = nn.Parameter(torch.ones(8, 8)), torch.arange(64.0).view(8, 8)
    sharded = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)]))
    copied = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, [Replicate()]))
    optimizers = [optim.AdamW([p], lr=0.1) for p in (plain, sharded, copied)]
    grads = {
        Shard(0): distribute_tensor(values, mesh, [Shard(0)]),
        Replicate(): distribute_tensor(values, mesh, [Replicate()]),
        Partial(): DTensor.from_local(values / world_size, mesh, [Partial()]),
    }
    for of_sharded, of_copied in ((Shard(0), Replicate()), (Replicate(), Partial()), (Shard(0), Replicate())):
        plain.grad, sharded.grad, copied.grad = values, grads[of_sharded], grads[of_copied]
        for optimizer in optimizers:
            optimizer.step()
        for p in (sharded, copied):
            torch.testing.assert_close(p.detach().full_tensor(), plain.detach(), **SAME)


def in_backward(world_size, folder):
    """FSDP2 runs the hooks when a gradient is reduced; without shards, DDP would average too late."""
    mesh = init_device_mesh("cpu", (world_size,))
    plain, model = build(), shard(build(), mesh)
    reference, optimizer = optim.AdamW(plain.parameters()), optim.AdamW(model.parameters())
    handle = optim.step_in_backward(optimizer)
    train(plain, reference, 0, 3)
    train(model, optimizer, 0, 3)
    assert_equal(model, plain, **SAME)
    assert all(p.grad is None for p in model.parameters())
    handle.remove()
    train(plain, reference, 3, 5)
    train(model, optimizer, 3, 5)
    assert_equal(model, plain, **SAME)
    assert_states_equal(optimizer, reference, **SAME)
    with pytest.raises(ValueError, match="fully_shard"):
        optim.step_in_backward(reference)


def ddp(world_size, folder):
    """Each rank has its own gradient, and their mean is applied; also gradients that are views of buckets."""
    for options in ({}, {"gradient_as_bucket_view": True}):
        plain, inner = build(), build()
        model = nn.parallel.DistributedDataParallel(inner, **options)
        reference = torch.optim.AdamW(plain.parameters())
        optimizer = hfnn.convert(torch.optim.AdamW(model.parameters()), max_grad_norm=1e6)
        for i in range(3):
            x = torch.randn(world_size, 4, 128, generator=torch.Generator().manual_seed(i))
            for m, o, batch in ((plain, reference, x), (model, optimizer, x[dist.get_rank()])):
                o.zero_grad()
                m(batch).square().mean().backward()
                o.step()
        assert_equal(inner, plain, **CLOSE)


# What is saved on one number of ranks and loaded on another: a class, its options, the dtype of the model.
SAVED = {
    "adamw": (optim.AdamW, {}, torch.float32),
    "sgd": (optim.SGD, {"lr": 0.1, "momentum": 0.9}, torch.float32),
    "8bit": (optim.AdamW, {"state_dtype": "8bit"}, torch.float32),
    "4bit": (optim.AdamW, {"state_dtype": "4bit"}, torch.float32),
    "remainder": (optim.AdamW, {**REMAINDER, "ema_decay": 0.9}, torch.bfloat16),
}


def distributed(name, world_size):
    """On one rank, a model that is not sharded."""
    cls, options, dtype = SAVED[name]
    model = build(dtype) if world_size == 1 else shard(build(dtype), init_device_mesh("cpu", (world_size,)))
    return model, cls(model.parameters(), **options)


def save(world_size, folder):
    for name in SAVED:
        model, optimizer = distributed(name, world_size)
        train(model, optimizer, 0, 3)
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=f"{folder}/{name}")


def load(world_size, folder):
    """Continuing from a checkpoint of another number of ranks gives bitwise the uninterrupted run.

    For low-bit states, if the shards of both begin between blocks, as those of the first weight here; otherwise blocks
    are encoded again. The other tensors of this model are too small for low-bit states.
    """
    for name, (cls, options, dtype) in SAVED.items():
        print(name, flush=True)  # shown on failure
        plain = build(dtype)
        reference = cls(plain.parameters(), **options)
        train(plain, reference, 0, 6)
        model, optimizer = distributed(name, world_size)
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=f"{folder}/{name}")
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        train(model, optimizer, 3, 6)
        assert_equal(model, plain, **SAME)
        if world_size > 1:
            assert_states_equal(optimizer, reference, **SAME)
        whole_state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        again, other = distributed(name, world_size)
        whole_state = copy.deepcopy(whole_state)  # optimizers that load one state dict share its tensors, as in torch
        set_optimizer_state_dict(again, other, whole_state, options=StateDictOptions(full_state_dict=True))
        set_model_state_dict(again, get_model_state_dict(model))
        train(model, optimizer, 6, 7)
        train(again, other, 6, 7)
        assert_equal(again, model, **SAME)


WAYS = {f.__name__: f for f in (fsdp2, norm, lamb, adafactor, gradients, in_backward, ddp, save, load)}


def main(rank, world_size, store, way, into):
    with process_group(rank, world_size, store):
        WAYS[way](world_size, into)
