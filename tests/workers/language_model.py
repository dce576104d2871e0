"""One gloo rank: a converted language model, parallelised, has the loss and the gradients of the plain one."""

import copy

import torch
import transformers
from gloo import process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import hfnn
from hfnn.deferred.logits import Deferred

SHAPE = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 257, "n_positions": 64}


def untouched(out) -> bool:
    return type(out.logits) is Deferred and out.logits._value is None


def whole(model):
    """Gradients of every parameter; clears them."""
    found = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    model.zero_grad()
    return found


def check(model, plain, batch, low=False):
    """Backwards of the loss, and of loss and logits."""
    tolerance = {"rtol": 5e-2, "atol": 5e-3} if low else {"rtol": 1e-4, "atol": 1e-6}
    for read in (False, True, False):
        grads = []
        for m in (plain, model):
            out = m(**batch)
            assert m is plain or untouched(out)
            loss = out.loss + out.logits.float().softmax(-1).square().sum(-1).mean() if read else out.loss
            loss.backward()
            grads.append([loss.detach(), *whole(m)])
        assert len(grads[0]) == len(grads[1])
        for wanted, found in zip(*grads, strict=True):
            torch.testing.assert_close(found, wanted, **tolerance)


def ddp(plain, model, batch, mesh):
    for how in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        check(DistributedDataParallel(copy.deepcopy(model), **how), copy.deepcopy(plain), batch)


def fsdp2(plain, model, batch, mesh):
    sharded = copy.deepcopy(model)
    for block in sharded.transformer.h:
        fully_shard(block, mesh=mesh)
    check(fully_shard(sharded, mesh=mesh), plain, batch)

    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    sharded = fully_shard(copy.deepcopy(model), mesh=mesh, mp_policy=low)
    out = sharded(**batch)
    assert untouched(out) and out.logits.dtype is out.loss.dtype is torch.float32
    check(sharded, plain, batch, low=True)

    # The weights are gone after forward: reading the logits raises an error.
    sharded = fully_shard(copy.deepcopy(model), mesh=mesh, reshard_after_forward=True)
    out = sharded(**batch)
    try:
        out.logits.argmax(-1)
        raise AssertionError("the logits were computed from weights that are gone")
    except RuntimeError as error:
        assert "a weight was resharded" in str(error), error
    out.loss.backward()
    for wanted, found in zip(gradients(plain, batch), whole(sharded), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)

    # A separately sharded head has its weight only during its own forward.
    untied = copy.deepcopy(model)
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach().clone())
    reference = hfnn.revert(copy.deepcopy(untied))
    fully_shard(untied.lm_head, mesh=mesh)
    fully_shard(untied, mesh=mesh)
    out = untied(**batch)
    assert type(out.logits) is torch.Tensor
    out.loss.backward()
    for wanted, found in zip(gradients(reference, batch), whole(untied), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def gradients(model, batch):
    model(**batch).loss.backward()
    return whole(model)


def main(rank, world_size, store, way):
    with process_group(rank, world_size, store):
        torch.manual_seed(0)
        plain = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SHAPE)).eval()
        model = hfnn.convert(copy.deepcopy(plain), prefer="memory")
        ids = torch.randint(257, (4, 40))
        mesh = init_device_mesh("cpu", (world_size,))
        {"ddp": ddp, "fsdp2": fsdp2}[way](plain, model, {"input_ids": ids, "labels": ids}, mesh)
