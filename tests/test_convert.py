"""convert, revert and report: what is swapped, what survives, what is left alone and why."""

import copy
import importlib
import io
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize

import hfnn
from hfnn.convert import examine, sites
from hfnn.core import native
from hfnn.core.holder import target_of

SWAPS = {cls: getattr(hfnn, cls.__name__) for cls in (nn.LayerNorm, nn.RMSNorm, nn.GELU, nn.Dropout, nn.Linear)}


class OwnInit(nn.LayerNorm):
    """A user's subclass with torch's forward."""

    def __init__(self, width):
        super().__init__(width, eps=1e-3)


class OwnForward(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


class RootMeanSquareNorm(nn.Module):
    """A look-alike at module level, because pickle finds classes by name."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = 1e-6

    def forward(self, hidden_states):
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.GELU(approximate="tanh")
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.0)
        self.last = RootMeanSquareNorm(width)

    def forward(self, x):
        return self.last(x + self.drop(self.down(self.act(self.up(self.norm(x))))))


def model():
    return nn.Sequential(Block(), Block(), OwnInit(32), nn.RMSNorm(32))


def run(m, seed=1):
    """Output and gradients."""
    x = torch.randn(4, 3, 32, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    y = m(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *m.parameters()])]


def classes(m):
    return [type(module) for module in m.modules()]


def why(module, around=None):
    """The reason that `report` gives for a module that was left alone."""
    (row,) = [row for row in hfnn.report(hfnn.convert(around or module)).rows if row.to is None]
    return row.why


def assert_close(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def assert_equal(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("torch_class", SWAPS)
def test_exact_classes(torch_class):
    m = torch_class(*{nn.GELU: (), nn.Dropout: ()}.get(torch_class, (8,) * (1 + (torch_class is nn.Linear))))
    before = dict(vars(m))
    assert hfnn.convert(m) is m and type(m) is torch_class
    assert target_of(m) is SWAPS[torch_class] and hfnn.is_converted(m) and vars(m).items() > before.items()
    assert type(hfnn.revert(m)) is torch_class and vars(m) == before and not hfnn.is_converted(m)


def test_results_and_revert():
    m = model()
    wanted, before = run(m), classes(m)
    state, parameters = m.state_dict(), list(m.parameters())
    hfnn.convert(m, prefer="memory")
    assert all(new is old for new, old in zip(m.parameters(), parameters, strict=True))
    assert list(m.state_dict()) == list(state) and m.state_dict()._metadata == state._metadata
    hfnn.recipe.counter.reset()
    assert_close(run(m), wanted)
    assert hfnn.recipe.counter.taken == 7  # norm -> up and act -> down, twice; last -> norm, three times
    assert classes(hfnn.revert(m)) == before and not any("prefer" in vars(module) for module in m.modules())
    assert_equal(run(m), wanted)


def test_twice_changes_nothing():
    m = hfnn.convert(model())
    before, state = classes(m), [dict(vars(module)) for module in m.modules()]
    hfnn.convert(m)
    assert classes(m) == before and [vars(module) for module in m.modules()] == state
    hfnn.convert(m, prefer="memory")
    assert m[0].norm.prefer == m[0].last.prefer == "memory"
    hfnn.convert(m)
    assert [vars(module) for module in m.modules()] == state
    assert classes(hfnn.revert(hfnn.revert(m))) == classes(model())


def test_nothing_else_moves():
    m, other = model(), model()
    forwards = [c.forward for c in (*SWAPS, RootMeanSquareNorm)]
    hook = m[0].norm.register_forward_hook(lambda *_: pytest.fail("a hook fired"))
    state, versions = torch.get_rng_state(), [p._version for p in m.parameters()]
    hfnn.report(hfnn.convert(m))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None and p._version == old for p, old in zip(m.parameters(), versions, strict=True))
    assert classes(other) == classes(model()) and forwards == [c.forward for c in (*SWAPS, RootMeanSquareNorm)]
    hook.remove()


@pytest.mark.parametrize("prefer", ["auto", "memory"])
def test_copies(prefer):
    m = hfnn.convert(model(), prefer=prefer)
    wanted = run(m)
    file = io.BytesIO()
    torch.save(m, file)
    file.seek(0)
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m)), torch.load(file, weights_only=False)):
        assert classes(other) == classes(m)
        assert other[0].last.prefer == prefer
        assert_equal(run(other), wanted)
        assert classes(hfnn.revert(other)) == classes(model())


SOMEBODY = """
import torch
from torch import nn

class OwnInit(nn.LayerNorm):
    pass

class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
"""

LOADING = """
import pickle, hfnn
from hfnn.patterns.subclass import is_converted
m = pickle.load(open("model.pickle", "rb"))
assert all(map(is_converted, m)) and [x.prefer for x in m] == ["memory"] * 3, m
hfnn.revert(m)
import somebody, torch
assert [type(x) for x in m] == [somebody.OwnInit, somebody.RMSNorm, torch.nn.GELU]
"""


def test_pickle_into_a_fresh_process(tmp_path, monkeypatch):
    (tmp_path / "somebody.py").write_text(SOMEBODY)
    monkeypatch.syspath_prepend(tmp_path)
    somebody = importlib.import_module("somebody")
    m = hfnn.convert(nn.Sequential(somebody.OwnInit(32), somebody.RMSNorm(32), nn.GELU()), prefer="memory")
    (tmp_path / "model.pickle").write_bytes(pickle.dumps(m))
    subprocess.run([sys.executable, "-c", LOADING], cwd=tmp_path, check=True, timeout=100)


def test_hooks():
    def observe(m):
        seen = []
        m.up.register_forward_pre_hook(lambda module, args: seen.append(("pre", args[0].detach().clone())))
        m.act.register_forward_hook(lambda module, args, out: seen.append(("forward", out.detach().clone())))
        m.norm.register_full_backward_hook(lambda module, dx, dy: seen.append(("backward", dx[0].clone())))
        m.last.register_forward_hook(lambda module, args, out: out * 2)
        return seen

    plain, mine = Block(), Block()
    mine.load_state_dict(plain.state_dict())
    seen, wanted = observe(mine), observe(plain)
    hfnn.convert(mine, prefer="memory")
    assert_close(run(mine), run(plain))
    assert [name for name, _ in seen] == [name for name, _ in wanted] == ["pre", "forward", "backward"]
    assert_close([value for _, value in seen], [value for _, value in wanted])


def test_tied_and_shared():
    tied = nn.Sequential(nn.Linear(8, 8, bias=False), nn.GELU(), nn.Linear(8, 8, bias=False))
    tied[2].weight = tied[0].weight
    assert hfnn.convert(tied)[2].weight is tied[0].weight and len(list(tied.parameters())) == 1
    norm = nn.LayerNorm(32)
    shared = hfnn.convert(nn.Sequential(norm, nn.Linear(32, 32), norm), prefer="memory")
    assert [row.name for row in hfnn.report(shared).rows] == ["0", "1"]
    assert target_of(shared[2]) is hfnn.LayerNorm and shared[0] is shared[2]
    found = run(shared)  # the module is called twice
    assert_close(found, run(hfnn.revert(shared)))


def test_moves_and_modes():
    m = hfnn.convert(model(), prefer="memory").to(torch.bfloat16).eval()
    assert m(torch.randn(2, 32, dtype=torch.bfloat16)).dtype is torch.bfloat16 and not m[0].norm.training
    assert m.double()(torch.randn(2, 32, dtype=torch.float64)).dtype is torch.float64
    with torch.device("meta"):
        empty = hfnn.convert(model())
    assert type(empty[0].last) is type(m[0].last) and empty.to_empty(device="cpu")[0].norm.weight.device.type == "cpu"
    assert hfnn.report(hfnn.convert(model().to("meta"))).swapped[0].kernel == "torch"


def test_inherited_forward():
    m = hfnn.convert(OwnInit(8))
    assert type(m) is OwnInit and target_of(m) is hfnn.LayerNorm and m.eps == 1e-3
    assert "forward" not in vars(hfnn.revert(m))


def test_float64_and_integers_are_for_the_call_to_decide():
    assert target_of(hfnn.convert(nn.LayerNorm(4, dtype=torch.float64))) is hfnn.LayerNorm
    m = nn.Linear(4, 4, bias=False)
    m.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int32), requires_grad=False)
    assert hfnn.convert(m)(torch.ones(1, 4, dtype=torch.int32)).tolist() == [[4] * 4]


class TestLeftAlone:
    def test_forward_on_the_instance(self):
        m = nn.LayerNorm(4)
        m.forward = lambda x: x
        assert "forward of its own on the instance" in why(m)
        assert type(m) is nn.LayerNorm

    def test_own_forward(self):
        assert "OwnForward has a forward of its own" in why(OwnForward(4, 4))

    def test_parametrized(self):
        m = nn.Linear(4, 4)
        parametrize.register_parametrization(m, "weight", nn.ReLU())
        assert "convert first" in examine(sites(m)[0]).why
        later = hfnn.convert(nn.Linear(4, 4))
        parametrize.register_parametrization(later, "weight", nn.ReLU())
        assert (later(torch.ones(1, 4)) - later.bias >= 0).all()
        assert "forward" not in vars(hfnn.revert(later)) and parametrize.is_parametrized(later)

    def test_fully_sharded(self, one_rank):
        m = nn.LayerNorm(4)
        fully_shard(m, mesh=one_rank)
        assert "fully_shard: convert first" in why(m)
        block = nn.Sequential(nn.Linear(4, 4))
        fully_shard(block, mesh=one_rank)
        assert "its weight is a DTensor, not a plain parameter: convert before fully_shard" in why(block[0])

    def test_strange_parameters(self):
        class Int8Params(nn.Parameter):
            pass

        m = nn.Linear(4, 4)
        m.weight = Int8Params(m.weight.data)
        assert why(m) == "its weight is a Int8Params, not a plain parameter"
        assert "run the model once" in why(nn.LazyLinear(4))

    def test_inside_peft(self):
        layer = type("Linear", (nn.Module,), {"__module__": "peft.tuners.lora.layer"})()
        layer.base_layer, layer.lora_A = nn.Linear(4, 4), nn.ModuleDict({"default": nn.Linear(4, 2)})
        m = hfnn.convert(nn.Sequential(layer, nn.Linear(4, 4)))
        assert type(layer.base_layer) is type(layer.lora_A["default"]) is nn.Linear and target_of(m[1]) is hfnn.Linear
        assert "inside Linear of PEFT" in hfnn.report(m).left[0].why

    def test_inside_multihead_attention(self):
        m = hfnn.convert(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
        assert "without calling it" in hfnn.report(m).left[0].why and target_of(m.linear1) is hfnn.Linear

    def test_name_taken(self):
        m = nn.LayerNorm(4)
        m.prefer = "tea"
        assert "attribute named prefer" in why(m) and m.prefer == "tea"


@pytest.fixture
def one_rank():
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def _rooms_in_python(node) -> set[str]:
    found, seen, left = set(), set(), [node]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found |= {node.name()} if getattr(node, "_forward_cls", type).__module__.startswith("hfnn") else set()
            left += [below for below, _ in node.next_functions]
    return found


def test_fully_shard_after_convert(one_rank):
    plain, m = model(), model()
    m.load_state_dict(plain.state_dict())
    hfnn.convert(m, prefer="memory")
    for block in (*m, m):
        fully_shard(block, mesh=one_rank)
    hfnn.recipe.counter.reset()
    x = torch.randn(4, 32, requires_grad=True)
    y = m(x)
    if native.extension is not None:
        assert not _rooms_in_python(y.grad_fn)
    y.square().sum().backward()
    plain(x).square().sum().backward()
    assert hfnn.recipe.counter.taken == 7
    assert_close([p.grad.full_tensor() for p in m.parameters()], [p.grad for p in plain.parameters()])
    assert len(hfnn.report(m).swapped) == 16 and not hfnn.report(m).left
    assert not any(map(hfnn.is_converted, hfnn.revert(m).modules())) and type(m).__name__ == "FSDPSequential"


@pytest.mark.skipif(native.extension is None, reason="rooms in Python do not see it")
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_writes_to_parameters_beside_fully_shard(one_rank, name):
    """Copies are kept instead of them, but a write is an error still."""
    sharded = fully_shard(nn.Linear(4, 4), mesh=one_rank)
    norm = hfnn.LayerNorm(32)
    norm.prefer = "memory"
    y = norm(torch.randn(64, 32))
    with torch.no_grad():
        getattr(norm, name).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    del sharded


def test_only_and_skip():
    def swapped(**filters):
        return [
            row.name for row in hfnn.report(hfnn.convert(nn.Sequential(Block(), nn.Linear(4, 4)), **filters)).swapped
        ]

    everything = swapped()
    assert everything == ["0", "0.norm", "0.up", "0.act", "0.down", "0.drop", "0.last", "1"]
    assert swapped(only="1") == ["1"] and swapped(only="0") == everything[:-1]
    assert swapped(only=["*.up", "1"]) == ["0.up", "1"]
    assert swapped(skip=nn.Linear) == ["0", "0.norm", "0.act", "0.drop", "0.last"]
    assert swapped(only=nn.Linear, skip=["0.d*"]) == ["0.up", "1"]
    assert swapped(only=lambda name, module: name.endswith("p") and hasattr(module, "p")) == ["0.drop"]
    assert swapped(skip=[nn.Linear, RootMeanSquareNorm, "*.act", lambda name, _: "norm" in name]) == ["0", "0.drop"]


@pytest.mark.parametrize("argument", ["only", "skip"])
def test_mistakes_in_filters(argument):
    with pytest.raises(ValueError, match=f"{argument}='0.nrom' matches no module"):
        hfnn.convert(model(), **{argument: ["0.norm", "0.nrom"]})
    with pytest.raises(ValueError, match="takes names, patterns, classes and functions, got 3"):
        hfnn.convert(model(), **{argument: [3]})


def test_mistakes():
    with pytest.raises(ValueError, match="choose one of 'auto', 'memory', 'speed'"):
        hfnn.convert(model(), prefer="fast")
    for function in (hfnn.convert, hfnn.report):
        with pytest.raises(ValueError, match=r"takes a torch\.nn\.Module, got list"):
            function([])


def test_report():
    m = model()
    plain = hfnn.report(m)
    assert {row.to for row in plain.rows} == {None}
    block, norm = plain.rows[:2]
    assert block.name == "0" and "hfnn.convert would swap it" in block.why
    assert norm.name == "0.norm" and "hfnn.convert would swap it" in norm.why
    found = hfnn.report(hfnn.convert(nn.Sequential(*m, nn.Bilinear(2, 2, 2))))
    rows = {row.name: row for row in found.rows}
    assert rows["0.norm"].original == "torch.LayerNorm" and rows["0.norm"].to == "hfnn.LayerNorm"
    assert rows["0.last"].to == "hfnn rms_norm" and rows["2"].to == "hfnn.LayerNorm"
    assert rows["4"].to is None and rows["4"].why == "no op of hfnn computes this"
    assert rows["0.norm"].kernel in ("cpp", "torch") and "elements on" in rows["0.act"].why
    text = str(found)
    assert "*.norm  x2" in text and "16 modules swapped, 1 left alone" in text
