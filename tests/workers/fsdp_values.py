"""Cases for reading and writing values other than by training: see fsdp.py."""

import collections
import copy
import typing

import pytest
import torch
import torch.distributed as dist
from fsdp_models import (
    DEVICE,
    Block,
    Net,
    check_gradients,
    ids,
    loss_of,
    net,
    torchs,
    whole,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from haiscale.fsdp import FSDP


def states(rank, size):
    """Full and sharded state dicts, summoned parameters, and written shards, in all ZeRO stages."""
    reference, other = net(), net()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1)
    for zero in (1, 2, 3):
        model = FSDP(net(), zero=zero)
        batch = ids(rank, 0)
        assert torch.equal(model(batch), reference(batch))
        assert [name for name, _ in model.named_shards()] == [name for name, _ in reference.named_parameters()]
        full = model.full_state_dict()
        assert list(full) == (list(reference.state_dict()) if rank == 0 else [])
        assert all(torch.equal(full[name], value.cpu()) for name, value in reference.state_dict().items() if full)
        model.load_state_dict(other.state_dict())
        assert torch.equal(model(batch), other(batch))
        model.load_state_dict(FSDP(net()).state_dict())
        assert torch.equal(model(batch), reference(batch))
        for _, shard in model.named_shards():
            shard.detach()._local_tensor.add_(1)
        model.shards_loaded()
        assert torch.equal(model(batch), other(batch))
        with model.summon_full_params():
            for p, q in zip(model.module.parameters(), other.parameters(), strict=True):
                assert not isinstance(p, DTensor) and torch.equal(p, q)
                p.data.sub_(1)
        assert torch.equal(model(batch), other_minus_one(other)(batch))
    lacking = {name: value for name, value in other.state_dict().items() if name != "norm.weight"}
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "norm.weight"'):
        model.load_state_dict(lacking)
    assert model.load_state_dict({**lacking, "more": 1}, strict=False) == (["norm.weight"], ["more"])


class Migrating(nn.Module):
    """Its scale is saved squared since version 2, and its weight had another name."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(20.0).reshape(5, 4))
        self.register_buffer("scale", torch.tensor([4.0]))
        self._register_load_state_dict_pre_hook(self.rename)

    def rename(self, state, prefix, *rest):
        if prefix + "old" in state:
            state[prefix + "weight"] = state.pop(prefix + "old")

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        if (metadata.get("version") or 1) < 2 and prefix + "scale" in state:
            state[prefix + "scale"] = state[prefix + "scale"] ** 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def migrated(rank, size):
    """load_state_dict with versions and hooks of modules, as torch's, and inside an outer model."""
    model = FSDP(Migrating())
    for state in (model.state_dict(), model.full_state_dict(rank0_only=False), Migrating().state_dict()):
        model.load_state_dict(state)
        assert model.module.scale == 4
    model.load_state_dict({"old": torch.ones(5, 4), "scale": torch.tensor([3.0])})
    assert model.module.scale == 9 and (whole(model.module.weight) == 1).all()
    outer = nn.Sequential(FSDP(Migrating()), nn.Linear(2, 2))
    outer.load_state_dict(outer.state_dict())
    assert outer[0].module.scale == 4
    state = {"0.weight": torch.ones(5, 4), "0.scale": torch.tensor([3.0]), **nn.Linear(2, 2).state_dict(prefix="1.")}
    outer.load_state_dict(state)
    assert outer[0].module.scale == 9 and (whole(outer[0].module.weight) == 1).all()
    with pytest.raises(RuntimeError, match="size mismatch"):
        outer.load_state_dict({**state, "0.weight": torch.ones(6, 4)})
    state["0.old"] = 2 * model.state_dict()["weight"]
    del state["0.weight"]
    outer.load_state_dict(state)
    assert (whole(outer[0].module.weight) == 2).all()


def other_minus_one(model):
    model = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(1)
    return model


def meta(rank, size):
    """Built on meta and initialised unit by unit; optionally all ranks get the first rank's values."""
    torch.manual_seed(rank)
    with torch.device("meta"):
        made = Net()
    model = FSDP(made, sync_module_states=True)
    full = model.full_state_dict(rank0_only=False)
    torch.manual_seed(0)
    assert full["embed.weight"].std() > 0.5 and torch.equal(full["head.weight"], full["embed.weight"])
    values = [None] * size
    dist.all_gather_object(values, float(full["blocks.0.up.weight"].sum()))
    assert len(set(values)) == 1
    loss_of(model, ids(rank, 0)).backward()

    def own():
        with torch.device("meta"):
            made = nn.Sequential(Block(), nn.Sequential(Block()))
            made[1].own = nn.Parameter(torch.empty(4))
        return made

    with pytest.raises(ValueError, match=r"1\.own is on the meta device, and Sequential has no reset_parameters"):
        FSDP(own())
    filled = FSDP(own(), param_init_fn=lambda m: [p.data.fill_(3) for p in m.parameters(recurse=False)])
    assert all((whole(p) == 3).all() for p in filled.parameters())


def sent(rank, size):
    torch.manual_seed(rank)
    made = Net()
    made.register_buffer("count", torch.tensor(float(rank)))
    model = FSDP(made, sync_module_states=True)
    torch.manual_seed(0)
    assert torch.equal(whole(next(model.parameters()).detach()), Net().embed.weight) and model.module.count == 0


def evaluated(rank, size):
    """Without gradients, between steps, and with parameters changed by hand."""
    model, reference = FSDP(net(), zero=2), net()
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(ids(rank, 0)), reference(ids(rank, 0)))
        for m in (model, reference):
            for p in m.parameters():
                p.mul_(0.5)
        assert torch.equal(model(ids(rank, 0)), reference(ids(rank, 0)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = loss_of(model, ids(rank, 0))
    loss_of(model, ids(rank, 1)).backward()
    optimizer.step()
    loss_of(model, ids(rank, 1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # as without shards
        first.backward()
    loss_of(model, ids(rank, 1)).backward()


def written(rank, size):
    """Writes that leave no trace in version counters, and writes to whole parameters inside forward, which are lost."""

    class Halving(nn.Linear):
        halves = False

        def forward(self, x):
            if self.halves:
                with torch.no_grad():
                    self.weight.mul_(0.5)
            return super().forward(x)

    def make():
        torch.manual_seed(0)
        return nn.Sequential(Halving(4, 8), nn.Tanh(), Halving(8, 2))

    x = torch.ones(1, 4)
    ways = (
        lambda p: p.data.mul_(2),
        lambda p: dist.all_reduce(p.detach().to_local()),
        lambda p: p.detach().to_local().numpy().__imul__(0.5),
        lambda p: p.data.to_local().mul_(3),
    )
    for zero, units in ((1, nn.Linear), (2, nn.Linear), (3, nn.Linear), (3, [])):
        made = make()
        model, reference = FSDP(made, zero=zero, units=units), torchs(make(), blocks=[])
        for evaluating in (True, False):
            for write in ways:
                for m in (model, reference):
                    if evaluating:
                        with torch.no_grad():
                            m(x)
                        reference.reshard()  # its root would be stale
                    else:
                        m(x).sum().backward()
                        m.zero_grad()
                    for p in m.parameters():
                        write(p)
                with torch.no_grad():
                    assert torch.equal(model(x), reference(x))
                reference.reshard()
        with model.constant_parameters(), torch.no_grad():
            before = model(x)
            if zero < 3:  # nothing is gathered, as the user promised not to write
                next(model.parameters()).data.mul_(2)
                assert torch.equal(model(x), before)
                next(model.parameters()).data.mul_(0.5)
        made[0].halves = made[2].halves = True
        with torch.no_grad():
            first = model(x)
            assert not torch.equal(first, before) and torch.equal(model(x), first)


def used_directly(rank, size):
    """A loss that also depends on sharded parameters themselves: before the forward, after it, or in another loss."""
    squares, total = (lambda p: p.pow(2).sum().full_tensor()), (lambda p: p.full_tensor().sum())
    # The gradient of a DTensor's sum is replicated, which fully_shard cannot add to a sharded one.
    for terms in ((squares, squares), (total, total), (lambda p: whole(p.sum()), total)):
        for early in (True, False):
            models = FSDP(net()), torchs(net())
            for step in range(2):
                for made, term in zip(models, terms, strict=True):
                    held = list(made.parameters())  # fully_shard has whole ones after forward
                    extra = sum(map(term, held)) if early else 0
                    loss = loss_of(made, ids(rank, step)) + extra
                    (loss if early else loss + sum(map(term, held))).backward()
                    if step == 0:
                        made.zero_grad()
                    else:
                        sum(map(term, held)).backward()
                check_gradients(*models)
    model = FSDP(net())
    sum(whole(p.sum()) for p in model.parameters()).backward()
    count = sum(p.numel() for p in model.parameters())
    torch.testing.assert_close(model.clip_grad_norm_(1.0), torch.tensor(float(count)).sqrt())


def one_at_a_time(rank, size):
    """Losses of different parameters of a unit; gradients that the user took do not change later."""

    class Choice(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.parts = nn.ModuleList([nn.Linear(3, 5), nn.Linear(3, 5)])

        def forward(self, x):
            return [part(x).square().sum() for part in self.parts]

    x = torch.full((2, 3), 1.0 + rank)
    taken = []
    for made in (FSDP(Choice(), units=[]), torchs(Choice(), blocks=[])):
        first, second = made(x)
        first.backward(retain_graph=True)
        second.backward(retain_graph=True)
        kept = [p.grad for p in made.parameters()]
        next(made.parameters()).grad = None
        first.backward(retain_graph=True)
        kept += [p.grad for p in made.parameters()]
        made.zero_grad()
        second.backward(retain_graph=True)
        first.backward()
        taken.append([*kept, *(p.grad for p in made.parameters())])
    for got, want in zip(*taken, strict=True):
        torch.testing.assert_close(whole(got), whole(want), rtol=1e-6, atol=0)


class Pair(typing.NamedTuple):
    first: torch.Tensor
    second: object


def containers(rank, size):
    """Mixed precision casts what is in named tuples and ordered dicts, as fully_shard does, and the user's own dicts
    are left alone."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.kept = nn.Linear(4, 4), collections.UserDict()

        def forward(self, pair, given):
            y = self.layer(pair.first) + self.layer(given["x"]) + self.layer(pair.second[0])
            self.kept["y"] = y
            return Pair(y, collections.OrderedDict(y=y, n=3)), {"y": [y]}, self.kept

    half, x, model = torch.bfloat16, torch.ones(2, 4), Model()
    ours = FSDP(model, mixed_precision=(half, torch.float32, torch.float32))
    policy = MixedPrecisionPolicy(half, torch.float32, torch.float32)
    reference = fully_shard(Model(), mesh=init_device_mesh(DEVICE, (size,)), mp_policy=policy)
    found = []
    for made in (ours, reference):
        pair, values, _ = made(Pair(x, [x]), collections.OrderedDict(x=x))
        assert type(pair) is Pair and type(pair.second) is collections.OrderedDict and pair.second["n"] == 3
        found.append([pair.first, pair.second["y"], values["y"][0]])
        assert all(y.dtype is torch.float32 for y in found[-1])
        assert model.kept["y"].dtype is half
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert ours(Pair(x, [x]), {"x": x})[2]["y"].dtype is torch.float32  # a mapping that pytrees do not know


def copied(rank, size):
    with pytest.raises(TypeError, match="an FSDP cannot be copied"):
        copy.deepcopy(FSDP(net()))


def again(rank, size):
    """Two backwards of one forward, each averaged; a first forward in inference mode."""
    model, reference = FSDP(net()), torchs(net())
    with torch.inference_mode():
        assert torch.equal(model(ids(rank, 0)), net()(ids(rank, 0)))
    for made in (model, reference):
        loss = loss_of(made, ids(rank, 0))
        loss.backward(retain_graph=True)
        loss.backward()
    check_gradients(model, reference)
    model.zero_grad()
    model(ids(rank, 0))
    assert model.memory().gradients == 0  # their memory is unused until backward


def assigned(rank, size):
    """Values assigned with new parameters, and `.to`, which moves nothing."""
    batch, want = ids(rank, 0), halved(net())(ids(rank, 0))
    model = FSDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, batch).backward()
    optimizer.step()
    assert not torch.equal(model(batch), want)
    model.module.load_state_dict(FSDP(halved(net())).state_dict(), assign=True)
    assert torch.equal(model.to("cpu").float()(batch), want)
    with pytest.raises(ValueError, match=r"embed.weight would become torch.bfloat16 on cpu; it is a shard"):
        model.bfloat16()


def halved(model):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    return model


def offload(rank, size):
    """Shards on the host: bitwise equal, except for different roundings of the optimizer's kernels there."""
    model, reference = FSDP(net(), cpu_offload=True), FSDP(net())
    ours, theirs = (torch.optim.SGD(made.parameters(), lr=0.1) for made in (model, reference))
    for step in range(4):
        for made, stepper in ((model, ours), (reference, theirs)):
            loss_of(made, ids(rank, step)).backward()
            loss_of(made, ids(rank, step + 10)).backward()
            made.clip_grad_norm_(0.5)
            stepper.step()
            stepper.zero_grad()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.device.type == "cpu" and p._local_tensor.is_pinned() is (q.device.type == "cuda")
        torch.testing.assert_close(p.detach()._local_tensor, q.detach()._local_tensor.cpu())
    full = model.full_state_dict(rank0_only=False)
    for name, value in reference.full_state_dict(rank0_only=False).items():
        torch.testing.assert_close(full[name], value)
