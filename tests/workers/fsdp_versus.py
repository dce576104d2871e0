"""Cases in which haiscale.fsdp equals fully_shard bitwise: see fsdp.py."""

import contextlib
import copy

import torch
from fsdp_models import BF16, DEVICE, FP32, Net, check_gradients, follow, ids, loss_of, net, torchs, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import hfnn
from haiscale.fsdp import FSDP, MixedPrecision
from hfnn.core import node as recipe


def plain(rank, size, zero=3, precision=None, **options):
    follow(
        FSDP(net(**options), zero=zero, mixed_precision=precision), torchs(net(**options), precision=precision), rank
    )


def buffers(rank, size):
    """More and fewer units gathered at a time."""
    for count in (1, 3):
        model = FSDP(net(depth=5), buffers=count)
        follow(model, torchs(net(depth=5)), rank, steps=2)
        assert model.memory().slot_count == count


def transformer(kind, layers=4):
    import transformers

    torch.manual_seed(1)
    common = {"vocab_size": 256, "use_cache": False, "attn_implementation": "sdpa"}
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_embd=32, n_layer=layers, n_head=2, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **common
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        **common,
    )
    return transformers.LlamaForCausalLM(config)


def language_loss(model, batch):
    return model(batch, labels=batch).loss


def language(rank, size, kind, steps, convert=False, precision=None, clip=None):
    """50 steps of a transformers model, whose blocks are detected."""
    made = [transformer(kind).to(DEVICE) for _ in range(2)]
    made = [hfnn.convert(m, prefer="memory") if convert else m for m in made]
    blocks = made[1].transformer.h if kind == "gpt2" else [*made[1].model.layers, made[1].model.embed_tokens]
    if kind == "llama" and not convert:
        blocks.append(made[1].lm_head)
    model, reference = FSDP(made[0], mixed_precision=precision), torchs(made[1], blocks, precision=precision)
    assert len(model.units) == 1 + len(blocks), [unit.name for unit in model.units]
    recipe.counter.reset()
    follow(model, reference, rank, steps, loss=language_loss, clip=clip, vocabulary=256)
    assert not convert or recipe.counter.taken


def frozen(rank, size):
    """A frozen block, and a partly frozen one."""

    def make():
        model = net()
        model.blocks[0].requires_grad_(False)
        model.blocks[1].up.requires_grad_(False)
        return model

    model = FSDP(make())
    follow(model, torchs(make()), rank)
    assert all(p.grad is None for p in model.module.blocks[0].parameters())
    alone, model = net(), FSDP(net())
    for made, blocks in ((alone, alone.blocks), (model, model.module.blocks)):
        loss_of(made, ids(0, 0)).backward()
        made.zero_grad()
        blocks[1].requires_grad_(False)  # frozen later
        blocks[2].norm.requires_grad_(False)
        loss_of(made, ids(0, 0)).backward()
    check_gradients(model, alone)


class Branches(Net):
    """Uses every other block in every other forward, and part of a block never."""

    def __init__(self):
        super().__init__(depth=4)
        self.calls = 0
        self.blocks[1].spare = nn.Linear(3, 3)

    def forward(self, ids):
        self.calls += 1
        x = self.embed(ids)
        for i, block in enumerate(self.blocks):
            if (i + self.calls) % 2:
                x = block(x)
        return self.head(self.norm(x))


def unused(rank, size):
    torch.manual_seed(0)
    made = Branches().to(DEVICE)
    reference = torchs(copy.deepcopy(made))
    follow(FSDP(made), reference, rank, steps=5)


class Aside(Net):
    """A unit runs, but on the given ranks the loss does not depend on it."""

    left_out = ()

    def forward(self, ids):
        x = self.embed(ids)
        for i, block in enumerate(self.blocks):
            y = block(x)
            x = x if i in self.left_out else y
        return self.head(self.norm(x))


def aside(rank, size):
    torch.manual_seed(0)
    made = Aside().to(DEVICE)
    made.left_out = (1,)
    reference = torchs(copy.deepcopy(made))
    follow(FSDP(made), reference, rank)


def accumulate(rank, size, zero=3, precision=None):
    """Microbatches under no_sync, each reduced separately, and gradient accumulation."""
    model, reference = FSDP(net(), zero=zero, mixed_precision=precision), torchs(net(), precision=precision)
    for microbatch in range(6):
        synced = microbatch in (2, 4, 5)
        reference.set_requires_gradient_sync(synced)
        reference.set_reshard_after_backward(synced)
        with contextlib.nullcontext() if synced else model.no_sync():
            loss_of(model, ids(rank, microbatch)).backward()
        loss_of(reference, ids(rank, microbatch)).backward()
        if synced:
            check_gradients(model, reference)
    assert zero == 1 or model.memory().whole_gradients == 0


def clipped(rank, size):
    """The norm of the full gradients; torch's clip_grad_norm_ also works on them."""
    follow(FSDP(net(), zero=2), torchs(net()), rank, clip=0.05)
    for kind in (2.0, 1.0, float("inf")):
        model = FSDP(net())
        loss_of(model, ids(rank, 0)).backward()
        grads = [whole(p.grad).clone() for p in model.parameters()]
        want = nn.utils.get_total_norm(grads, kind)
        torch.testing.assert_close(model.clip_grad_norm_(0.05, kind), want, rtol=1e-5, atol=0)
        for p, g in zip(model.parameters(), grads, strict=True):
            torch.testing.assert_close(whole(p.grad), g * (0.05 / (want + 1e-6)), rtol=1e-5, atol=1e-9)


def output(rank, size):
    """output_dtype, and dtypes given by torch's policies."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, output_dtype=torch.float64)
    model = FSDP(net(), mixed_precision=policy)
    assert model(ids(rank, 0)).dtype is torch.float64
    follow(FSDP(net(), mixed_precision=MixedPrecision(BF16)), torchs(net(), precision=(BF16,)), rank, steps=2)


def checkpoints(rank, size):
    """Recomputed blocks: inside a unit, and whole units."""
    for reentrant in (False, True):
        options = {"checkpointed": reentrant}
        follow(FSDP(net(**options)), torchs(net(**options)), rank, steps=2)

        def around(model, reentrant=reentrant):
            for block in model.blocks:
                forward = type(block).__call__
                cls = type("Recomputed", (type(block),), {})
                cls.__call__ = lambda self, x, f=forward: checkpoint(f, self, x, use_reentrant=reentrant)
                block.__class__ = cls
            return model

        follow(FSDP(around(net())), torchs(around(net())), rank, steps=2)


def compiled(rank, size):
    """Blocks under torch.compile, in place and around the module."""

    def make():
        model = net(depth=2)
        for block in model.blocks:
            block.compile(backend="aot_eager")
        return model

    follow(FSDP(make()), torchs(make()), rank, steps=2)
    made = net(depth=2)
    made.blocks = nn.ModuleList(torch.compile(block, backend="aot_eager") for block in made.blocks)
    follow(FSDP(made), torchs(net(depth=2)), rank, steps=2)


def hybrid(rank, size, precision=None, zero=3):
    """Replicas of shards."""
    mesh = init_device_mesh(DEVICE, (2, size // 2), mesh_dim_names=("dp", "fsdp"))
    model = FSDP(net(), device_mesh=mesh, mixed_precision=precision, zero=zero)
    follow(model, torchs(net(), mesh=mesh, precision=precision), rank, steps=6, clip=0.05)
    loss_of(model, ids(rank, 0)).backward()
    grads = [whole(p.grad).clone() for p in model.parameters()]
    torch.testing.assert_close(model.clip_grad_norm_(0.05), nn.utils.get_total_norm(grads))
    for made in (FSDP(net(), device_mesh=mesh), torchs(net(), mesh=mesh)):
        optimizer = torch.optim.AdamW(made.parameters())
        loss_of(made, ids(rank, 0)).backward()
        optimizer.step()
