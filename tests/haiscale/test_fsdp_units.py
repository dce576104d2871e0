"""Which parameters are gathered together, and their layout in memory; needs no ranks."""

import pytest
import torch
from torch import nn

import hfnn
from haiscale.fsdp.deferred import Initialiser
from haiscale.fsdp.flat import Layout
from haiscale.fsdp.options import MixedPrecision, ShardingStrategy, mixed_precision, zero_stage
from haiscale.fsdp.units import find_units


class Model(nn.Module):
    """An embedding and a head as large as a block, a list of blocks, experts inside them, and a small head."""

    def __init__(self, tied=False):
        super().__init__()
        self.embed, self.head = nn.Embedding(300, 8), nn.Linear(8, 300, bias=False)
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.score = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        if tied:
            self.head.weight = self.embed.weight

    def block(self):
        return nn.ModuleDict({"up": nn.Linear(8, 16), "experts": nn.ModuleList(nn.Linear(16, 8) for _ in range(2))})


def names(model, wanted=None):
    called = {module: name for name, module in model.named_modules()}
    return [[called[m] for m in unit] for unit in find_units(model, wanted, set())]


BLOCKS = [["blocks.0"], ["blocks.1"], ["blocks.2"]]


def test_blocks_are_found_and_what_is_as_large():
    assert names(Model()) == [["embed"], ["head"], *BLOCKS]
    assert names(Model(tied=True)) == BLOCKS
    assert names(hfnn.convert(Model())) == [["embed"], *BLOCKS]  # a converted head may be computed after its forward


def test_without_blocks_leaves_are_units():
    assert names(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))) == [["0"], ["2"]]
    assert names(nn.Linear(2, 2)) == []


def test_units_as_the_user_names_them():
    model = Model()
    assert names(model, nn.ModuleDict) == names(model, (nn.ModuleDict,)) == BLOCKS
    assert names(model, ["blocks.1", model.blocks[0]]) == [["blocks.1"], ["blocks.0"]]
    assert names(model, [["blocks.1", "head"]]) == [["blocks.1", "head"]]
    assert names(model, lambda module: isinstance(module, nn.Embedding)) == [["embed"]]
    with pytest.raises(ValueError, match="units=3 is not accepted"):
        names(model, 3)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_layout_is_that_of_dtensors_shards(size):
    """Rows split as by torch.chunk; every parameter is aligned and, once gathered, contiguous."""
    shapes = [(5, 3), (8,), (1, 2, 2), (16, 16), (0, 4), (2,)]
    named = [(str(i), nn.Parameter(torch.randn(shape)), []) for i, shape in enumerate(shapes)]
    layouts = [Layout(named, rank, size) for rank in range(size)]
    whole = torch.full((layouts[0].whole_length,), -1.0)
    for rank, layout in enumerate(layouts):
        assert (layout.length, layout.whole_length) == (layouts[0].length, layouts[0].whole_length)
        for (_, tensor, _), p, into in zip(named, layout.parameters, layout.wholes(whole), strict=True):
            chunks = torch.chunk(tensor.detach(), size) if tensor.shape[0] else []
            mine = chunks[rank] if rank < len(chunks) else tensor.detach()[:0]
            assert p.rows == mine.shape[0] and p.start % 16 == 0 and p.whole_start % 64 == 0
            assert mine.numel() <= p.count
            into[rank * p.count : rank * p.count + mine.numel()] = mine.flatten()
    for (_, tensor, _), p in zip(named, layouts[0].parameters, strict=True):
        found = whole[p.whole_start : p.whole_start + p.numel].view(p.shape)
        assert torch.equal(found, tensor)


def test_stages_by_number_and_by_torchs_names():
    assert zero_stage(None, None) == (3, False) and zero_stage(None, 1) == (1, False)
    assert zero_stage(ShardingStrategy.SHARD_GRAD_OP, None) == zero_stage(2, None) == (2, False)
    assert zero_stage(torch.distributed.fsdp.ShardingStrategy.HYBRID_SHARD, 3) == (3, True)


def test_precision_as_torch_and_others_write_it():
    half, single = torch.bfloat16, torch.float32
    want = MixedPrecision(half, single)
    assert mixed_precision((half, single)) == want
    assert mixed_precision(torch.distributed.fsdp.MixedPrecisionPolicy(half, single)) == want
    assert mixed_precision(torch.distributed.fsdp.MixedPrecision(half, single)).reduce_dtype is single
    assert mixed_precision(None) == MixedPrecision()


def initialised(model, init_fn=None):
    of = Initialiser(model, torch.device("cpu"), init_fn, send=False, mesh=None)
    rows = of.parameters([(name, p, [(model, name)]) for name, p in model.named_parameters()])
    of.buffers(None)
    return [p for _, p, _ in rows]


def test_modules_on_meta_get_values_once():
    """From their own reset_parameters, or from param_init_fn: a norm's buffers too."""
    torch.manual_seed(1)
    with torch.device("meta"):
        linear, norm, own = nn.Linear(3, 2), nn.BatchNorm1d(4), nn.Linear(3, 2)
    weight, _ = initialised(linear)
    torch.manual_seed(1)
    assert torch.equal(weight, nn.Linear(3, 2).weight) and weight is linear.weight
    assert torch.equal(torch.stack(initialised(norm)), torch.tensor([1.0, 0.0]).repeat(4, 1).T)
    assert torch.equal(norm.running_var, torch.ones(4)) and norm.num_batches_tracked == 0
    calls = []
    filled = initialised(own, lambda module: calls.append(module) or [nn.init.ones_(p) for p in module.parameters()])
    assert calls == [own] and all((p == 1).all() for p in filled)


def test_modules_on_meta_that_nobody_initialises():
    with torch.device("meta"):
        model = nn.Module()
        model.p = nn.Parameter(torch.empty(3))
    with pytest.raises(ValueError, match="p is on the meta device, and Module has no reset_parameters"):
        initialised(model)
