"""Cases for features beyond fully_shard, against the unwrapped model: see fsdp.py."""

import contextlib
import copy
import dataclasses
import inspect

import pytest
import torch
import torch.distributed as dist
from fsdp_models import (
    BF16,
    DEVICE,
    FP32,
    VOCABULARY,
    WIDTH,
    Block,
    check_gradients,
    check_parameters,
    follow,
    ids,
    loss_of,
    net,
    torchs,
    whole,
)
from fsdp_versus import Aside
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import hfnn
from haiscale.fsdp import FSDP, CPUOffload, ShardingStrategy
from haiscale.fsdp.predict import Live, measure
from hfnn.core import node as recipe


class Twice(nn.Module):
    """A block that runs twice, one inside another, a pair in a unit, and a dataclass between them."""

    @dataclasses.dataclass
    class Carry:
        x: torch.Tensor

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.inner, self.after = Block(), nn.ModuleList([Block(), Block()]), Block()

        def forward(self, x):
            x = self.before(x)
            for block in self.inner:
                x = block(x)
            return Twice.Carry(self.after(x))

    def __init__(self):
        super().__init__()
        self.shared, self.outer, self.left, self.right = Block(), Twice.Outer(), Block(), Block()

    def forward(self, x):
        x = self.shared(x)
        x = self.outer(x).x
        x = self.shared(x)
        return self.left(x) + self.right(x)


def twice(rank, size):
    torch.manual_seed(0)
    alone = Twice()
    made = copy.deepcopy(alone)
    units = ["shared", "outer", "outer.inner.0", made.outer.inner[1], ["left", "right"]]
    model = FSDP(made, units=units)
    assert [unit.name for unit in model.units] == [
        "Twice", "shared (Block)", "outer (Outer)", "outer.inner.0 (Block)", "outer.inner.1 (Block)", "left (Block)"
    ]  # fmt: skip
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        for m in (model, alone):
            m.zero_grad()
            m(x).square().mean().backward()
        check_gradients(model, alone)


def norms_alone(rank, size):
    """Converted; the layer after a norm rebuilds its output when the norm's own parameters are gone.

    On a GPU the reference is the wrapped model without recipes: cuDNN and cuBLAS choose kernels by the alignment of
    weights, which is another one in a unit's flat memory.
    """
    torch.backends.cudnn.deterministic = True

    def images():
        torch.manual_seed(0)
        parts = [(nn.Conv2d(5, 5, 3), nn.BatchNorm2d(5), act()) for act in (nn.ReLU, nn.SiLU, nn.Identity)]
        return nn.Sequential(*sum(parts, ()), nn.Flatten(), nn.Linear(20, VOCABULARY)).to(DEVICE)

    def of_images(model, batch):
        x = torch.randn(12, 5, 8, 8, generator=torch.Generator().manual_seed(int(batch.sum()))).to(DEVICE)
        return nn.functional.cross_entropy(model(x), batch[0])

    units = nn.LayerNorm, nn.Linear, nn.BatchNorm2d, nn.Conv2d
    for made, loss in ((lambda: net(tied=False), loss_of), (images, of_images)):
        alone, model = (hfnn.convert(made(), prefer="memory") for _ in range(2))
        model = FSDP(model, units=units)
        if DEVICE == "cuda":
            alone = FSDP(alone, units=units)
        for step in range(3):
            recipe.counter.reset()
            model.zero_grad()
            loss(model, ids(0, step)).backward()
            assert recipe.counter.taken
            alone.zero_grad()
            with recipe.disabled() if DEVICE == "cuda" else contextlib.nullcontext():
                loss(alone, ids(0, step)).backward()
            check_gradients(model, alone)


def in_backward(rank, size):
    """Bitwise the ordinary step, with torch's optimizers and hfnn's, and without gradients left over."""
    for make in (torch.optim.AdamW, hfnn.optim.AdamW):
        made, reference = FSDP(net()), FSDP(net())
        rest = [p for name, p in made.named_parameters() if "blocks.1" not in name]
        own = [p for name, p in made.named_parameters() if "blocks.1" in name]
        ours = make([{"params": rest}, {"params": own, "lr": 3e-3}], lr=1e-2)
        rest = [p for name, p in reference.named_parameters() if "blocks.1" not in name]
        own = [p for name, p in reference.named_parameters() if "blocks.1" in name]
        theirs = make([{"params": rest}, {"params": own, "lr": 3e-3}], lr=1e-2)
        made.step_in_backward(ours)
        for step in range(3):
            with made.no_sync(), reference.no_sync():
                for m in (made, reference):
                    loss_of(m, ids(rank, step + 10)).backward()
            for m in (made, reference):
                loss_of(m, ids(rank, step)).backward()
            assert all(p.grad is None for p in made.parameters()) and made.memory().gradients == 0
            ours.step()
            theirs.step()
            reference.zero_grad()
        check_parameters(made, reference)
        loss_of(made, ids(rank, 0)).backward()
        with pytest.raises(ValueError, match=r"step_in_backward: a second gradient for .*no_sync"):
            loss_of(made, ids(rank, 1)).backward()
    with pytest.raises(ValueError, match="max_grad_norm=1"):
        made.step_in_backward(hfnn.optim.AdamW(made.parameters(), max_grad_norm=1))


def hooks_of_parameters(rank, size):
    """hfnn's step_in_backward, with hooks on the sharded parameters."""
    made, reference = FSDP(net()), FSDP(net())
    ours, theirs = (hfnn.optim.AdamW(m.parameters(), lr=1e-2) for m in (made, reference))
    hfnn.optim.step_in_backward(ours)
    for step in range(2):
        for m in (made, reference):
            loss_of(m, ids(rank, step)).backward()
        assert all(p.grad is None for p in made.parameters())
        ours.step()
        theirs.step()
        reference.zero_grad()
    check_parameters(made, reference)


def uneven(rank, size):
    """Ranks with different numbers of batches: those without any left count as zero."""
    model, reference = FSDP(net()), net()
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))
    seen = 0
    for batch in model.join([ids(rank, step) for step in range(1 + 2 * rank)]):
        seen += 1
        loss_of(model, batch).backward()
        ours.step()
        ours.zero_grad()
    longest = 1 + 2 * (size - 1)
    assert seen == longest
    for step in range(longest):
        (sum(loss_of(reference, ids(r, step)) for r in range(size) if step < 1 + 2 * r) / size).backward()
        theirs.step()
        theirs.zero_grad()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(p.detach()), q.detach(), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=f"only {size - 1} of {size} ranks have a batch"):
        list(model.join([] if rank == 0 else [1, 2]))


def optimizer_made_before(rank, size):
    """Its steps would change nothing, and raise an error; one that has gradients may continue."""
    made = net()
    for make in (torch.optim.SGD, hfnn.optim.AdamW):
        early = make(made.parameters(), lr=0.1)
        head, norm = made.head.weight, made.norm.weight
        model = FSDP(made)
        loss_of(model, ids(rank, 0)).backward()
        with pytest.raises(ValueError, match=f"{make.__name__} was made of parameters that FSDP has sharded since"):
            early.step()
        trained = make([head, norm], lr=0.1)
        head.grad, norm.grad = torch.ones_like(head), torch.ones_like(norm)
        trained.step()
        make(model.parameters(), lr=0.1).step()
        made = net()


class Hidden(nn.Module):
    """Passes on a tensor besides its output."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()
        self.first.forward = self.hide

    def hide(self, x):
        self.aside = Block.forward(self.first, x)
        return x * 1

    def forward(self, x):
        x = self.second(self.first(x))
        return x + self.aside if self.training else [object(), x]


def errors(rank, size):
    """What is refused, and with which message."""
    for options, text in (
        ({"zero": 4}, "zero=4 is not accepted"),
        ({"zero": 2, "sharding_strategy": ShardingStrategy.FULL_SHARD}, "contradict each other"),
        ({"sharding_strategy": ShardingStrategy.NO_SHARD}, "haiscale.ddp.DDP"),
        ({"sharding_strategy": ShardingStrategy.HYBRID_SHARD}, "LOCAL_WORLD_SIZE"),
        ({"buffers": 0}, "buffers=0 is not accepted"),
        ({"units": ["blocks.7"]}, "'blocks.7' is not a module of this Net"),
        ({"units": ["blocks.0", ["blocks.0"]]}, "blocks.0 is in two units"),
        ({"units": [], "auto_wrap_policy": Block}, "say the same"),
        ({"mixed_precision": "bf16"}, "mixed_precision='bf16' is not accepted"),
    ):
        with pytest.raises(ValueError, match=text):
            FSDP(net(), **options)
    made = net()
    made.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="parameter scale has no dimension to shard along"):
        FSDP(made)
    with pytest.raises(ValueError, match="is a DTensor already"):
        FSDP(torchs(net()))
    with pytest.raises(ValueError, match=r"ranks wrap different models.*blocks\.2"):
        FSDP(net(depth=2 + rank))
    with pytest.raises(ValueError, match=r"0.weight \(of an EmbeddingBag\) has sparse gradients.* set sparse=False"):
        FSDP(nn.Sequential(nn.EmbeddingBag(5, WIDTH, sparse=True), Block()))
    made = Hidden()
    model, x = FSDP(made, units=Block), torch.randn(2, WIDTH)
    with pytest.raises(RuntimeError, match=r"of first \(Block\) got a gradient, but not through what"):
        model(x).sum().backward()
    made = net()
    made.blocks[1].forward = lambda x: object()
    with pytest.raises(ValueError, match=r"blocks.1 \(Block\) returned a object, in which no tensor was found"):
        FSDP(made)(ids(rank, 0))
    model = FSDP(net())
    made = model.module.blocks[2]
    made.forward = None  # an exception in the middle of forward
    with pytest.raises(TypeError):
        model(ids(rank, 0))
    del made.forward
    assert all(isinstance(p, DTensor) for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters())

    def fail(gradient):
        raise KeyError("in the middle of backward, where averages are under way")

    handle = model.module.blocks[0].register_forward_hook(lambda _, __, output: output.register_hook(fail) and None)
    with pytest.raises(KeyError, match="in the middle of backward"):
        loss_of(model, ids(rank, 0)).backward()
    handle.remove()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    optimizer.zero_grad()
    follow(model, torchs(net()), rank, steps=2)


def policies(rank, size):
    """The arguments of torch's FSDP, and policies in its form."""
    from functools import partial

    from torch.distributed.fsdp import ShardingStrategy as Strategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

    by_size = partial(size_based_auto_wrap_policy, min_num_params=7000)
    for policy in (ModuleWrapPolicy({Block}), Block, {Block}, by_size, lambda module: isinstance(module, Block)):
        model = FSDP(net(), dist.group.WORLD, Strategy.SHARD_GRAD_OP, CPUOffload(True), policy, use_orig_params=True)
        assert [unit.modules[0] for unit in model.units[1:]] == list(model.module.blocks) and model.zero == 2
    made = net()
    ignored = FSDP(made, ignored_modules=[made.blocks[0]], ignored_states=[made.norm.bias])
    plain_ones = {name for name, p in ignored.module.named_parameters() if not isinstance(p, DTensor)}
    assert plain_ones == {"norm.bias", *(f"blocks.0.{name}" for name, _ in made.blocks[0].named_parameters())}
    loss_of(ignored, ids(rank, 0)).backward()


def sparse(rank, size):
    """A sparse embedding that is frozen, or left to the user; any other sparse gradient is reported."""

    class Looked(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(5, WIDTH))

        def forward(self, x):
            return nn.functional.embedding(x, self.table, sparse=True)

    for how in ("frozen", "ignored"):
        torch.manual_seed(0)
        made = nn.Sequential(nn.Embedding(5, WIDTH, sparse=True), Block())
        made[0].requires_grad_(how == "ignored")
        alone = copy.deepcopy(made)
        model = FSDP(made, ignored_modules=[made[0]] if how == "ignored" else None)
        for m, embedding in ((model, made[0]), (alone, alone[0])):
            m(torch.tensor([1, 3])).square().mean().backward()
            if how == "ignored":
                embedding.weight.grad = embedding.weight.grad.to_dense()
        check_gradients(model, alone)
    model = FSDP(nn.Sequential(Looked(), Block()))
    for context in (contextlib.nullcontext(), model.no_sync()):
        with context, pytest.raises(ValueError, match=r"0\.table has a sparse gradient"):
            model(torch.tensor([1, 3])).square().mean().backward()


def another_order(rank, size):
    """A group whose ranks are not in order, as torch 2.13 allows."""
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        group = dist.new_group([*reversed(range(size))], sort_ranks=False)
        follow(FSDP(net(), group), torchs(net(), mesh=DeviceMesh.from_group(group, DEVICE)), rank, steps=2)


def clipped_without_rows(rank, size):
    """Parameters of two rows leave the last ranks without any."""
    model = FSDP(nn.Sequential(nn.Linear(3, 2)))
    model(torch.ones(1, 3)).sum().backward()
    for kind in (2.0, float("inf")):
        want = nn.utils.get_total_norm([whole(p.grad) for p in model.parameters()], kind)
        torch.testing.assert_close(model.clip_grad_norm_(1.0, kind), want)


def hybrid_uneven(rank, size):
    """Ranks 0 to 3 have 1 to 4 batches."""
    model = FSDP(net(), device_mesh=init_device_mesh("cpu", (2, size // 2)))
    seen = 0
    for batch in model.join(ids(rank, step) for step in range(1 + rank)):
        loss_of(model, batch).backward()
        seen += 1
    assert seen == size


def measured(rank, size):
    """The bytes of a real step, which are also predicted without ranks."""
    with Live() as live:
        model = FSDP(net(depth=4), mixed_precision=(BF16, FP32))
        found = measure(model, live, lambda m: loss_of(m, ids(rank, 0)), torch.optim.AdamW(model.parameters()))
    return dataclasses.asdict(found)


def dtypes(rank, size):
    """Parameters of two dtypes in one unit, which fully_shard refuses."""
    made = net()
    for block in made.blocks:
        block.norm.to(torch.float64)
        block.norm.register_forward_pre_hook(lambda _, args: args[0].double())
        block.norm.register_forward_hook(lambda _, args, out: out.float())
    alone = copy.deepcopy(made)
    model = FSDP(made)
    for step in range(2):
        loss_of(model, ids(0, step)).backward()
        loss_of(alone, ids(0, step)).backward()
    check_gradients(model, alone)


def reduce_unused(rank, size):
    """Ranks whose losses depend on different units: missing gradients count as zeros."""
    torch.manual_seed(0)
    made = Aside(depth=5)
    reference = copy.deepcopy(made)
    model = FSDP(made, reduce_unused=True)
    left_out = [(1, 2), (0, 4), (3,), ()]
    made.left_out = left_out[rank]
    for step in range(2):
        loss_of(model, ids(rank, step)).backward()
        gradients = []
        for r in range(size):
            reference.zero_grad()
            reference.left_out = left_out[r]
            loss_of(reference, ids(r, step)).backward()
            gradients.append([torch.zeros_like(p) if p.grad is None else p.grad for p in reference.parameters()])
        for p, *parts in zip(model.parameters(), *gradients, strict=True):
            torch.testing.assert_close(whole(p.grad), sum(parts) / size, rtol=1e-5, atol=1e-7)
        model.zero_grad()
