"""A proof made at `convert` holds while what it depends on is unchanged. Proofs leave no traces."""

import copy
import pickle
from types import SimpleNamespace as Namespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfnn
from hfnn.patterns.subclass import holds, is_converted

WIDTH = 16
REGISTRY, CALLS = [], []


class Registered(nn.Module):
    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        REGISTRY.append(cls)


class RMSNorm(Registered):
    def __init__(self):
        super().__init__()
        self.weight, self.eps, self.factor = nn.Parameter(torch.rand(WIDTH) + 0.5), 1e-6, 1.0

    def forward(self, x):
        y = self.weight * self.normalised(x.float()).to(x.dtype) * self.factor
        return y * 2 if getattr(self, "doubled", False) else y

    def normalised(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class HelpedNorm(RMSNorm):
    """Uses a property, a class method, a static method and a number of its class."""

    power = 2

    @property
    def small(self):
        return self.eps

    @classmethod
    def squared(cls, x):
        return x.pow(2)

    @staticmethod
    def mean(x):
        return x.mean(-1, keepdim=True)

    def normalised(self, x):
        return x * torch.rsqrt(self.mean(self.squared(x)) + self.small) ** (self.power - 1)


class Sigmoids(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class MyQuickGELU(Sigmoids):
    pass


class GatedMLP(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 32, bias=False), nn.Linear(WIDTH, 32, bias=False)
        self.act, self.down = act, nn.Linear(32, WIDTH, bias=False)
        self.config = Namespace(factor=1.0, unread=[1], inner=Namespace(factor=1.0))

    def forward(self, x):
        y = self.down(self.act(self.gate(x)) * self.up(x))
        return y * self.config.factor * self.config.inner.factor


class BlockEnd(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.drop, self.skip = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0), 1.0

    def forward(self, x, residual):
        return self.drop(self.dense(x)) + residual * self.skip


class Ended(nn.Module):
    def __init__(self):
        super().__init__()
        self.end = BlockEnd()

    def forward(self, x):
        return self.end(x, x)


class Calling(nn.Module):
    def forward(self, x):
        return F.gelu(x)


class LinearOfMine(nn.Linear):
    """Inherits its forward."""


class MyNorm(nn.LayerNorm):
    """Inherits its forward."""


def replaced(cls, name):
    def change(models, patch):
        own = getattr(cls, name)
        patch.setattr(cls, name, lambda self, *args: own(self, *args) * 0.5)

    return change


def sets(path, value):
    *where, name = path.split(".")

    def change(models, patch):
        for owner in models:
            for part in where:
                owner = getattr(owner, part)
            setattr(owner, name, value)

    return change


BUILD = {
    "norm": RMSNorm,
    "helped": HelpedNorm,
    "mlp": lambda: GatedMLP(nn.SiLU()),
    "mlp of a look-alike": lambda: GatedMLP(MyQuickGELU()),
    "end": Ended,
    "calling": Calling,
    "subclass": lambda: MyNorm(WIDTH),
    "linear": lambda: LinearOfMine(WIDTH, WIDTH),
}
CHANGES = {
    "an attribute": ("norm", sets("factor", 0.5)),
    "one that was not there": ("norm", sets("doubled", True)),
    "eps, which the room reads": ("norm", sets("eps", 0.5)),
    "forward": ("norm", replaced(RMSNorm, "forward")),
    "a method": ("norm", replaced(RMSNorm, "normalised")),
    "a method of the instance": ("norm", sets("normalised", torch.abs)),
    "a class method": ("helped", lambda models, patch: patch.setattr(HelpedNorm, "squared", torch.abs)),
    "a static method": ("helped", lambda models, patch: patch.setattr(HelpedNorm, "mean", staticmethod(torch.sum))),
    "a property": ("helped", lambda models, patch: patch.setattr(HelpedNorm, "small", property(lambda self: 0.5))),
    "a number of the class": ("helped", lambda models, patch: patch.setattr(HelpedNorm, "power", 4)),
    "a configuration": ("mlp", sets("config.factor", 0.5)),
    "a configuration inside": ("mlp", sets("config.inner.factor", 0.5)),
    "another configuration": ("mlp", sets("config", Namespace(factor=0.5, inner=Namespace(factor=2)))),
    "the activation": ("mlp", sets("act", nn.Tanh())),
    "the activation's class": ("mlp of a look-alike", replaced(Sigmoids, "forward")),
    "the end of a block": ("end", sets("end.skip", 2.0)),
    "the class of a block's end": ("end", replaced(BlockEnd, "forward")),
    "a class that calls": ("calling", replaced(Calling, "forward")),
    "a class that inherits a norm": ("subclass", replaced(MyNorm, "forward")),
    "a class that inherits a linear": ("linear", replaced(LinearOfMine, "forward")),
}  # fmt: skip


def results(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    return y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_is_obeyed(change, monkeypatch):
    """By the converted module, its copies, and pickles made before and after the change."""
    name, do = CHANGES[change]
    torch.manual_seed(0)
    stock = BUILD[name]()
    model = hfnn.convert(copy.deepcopy(stock), prefer="memory")
    assert hfnn.report(model).swapped and not any(is_converted(m) and not holds(m) for m in model.modules())
    x = torch.randn(3, WIDTH)
    torch.testing.assert_close(results(model, x), results(stock, x))
    other = pickle.loads(pickle.dumps(model))
    with monkeypatch.context() as patch:
        do([stock, model, other], patch)
        for each in (model, other, copy.deepcopy(model), pickle.loads(pickle.dumps(other)), model):
            torch.testing.assert_close(results(each, x), results(stock, x))
        again = hfnn.convert(model, prefer="memory")
        torch.testing.assert_close(results(again, x), results(stock, x))
        torch.testing.assert_close(results(hfnn.revert(again), x), results(stock, x))


def test_parts_that_are_converted_already():
    class Later(GatedMLP):
        """Not proved before."""

    model = Later(nn.SiLU())
    hfnn.convert(model.act)
    assert is_converted(hfnn.convert(model, prefer="memory"))


def test_what_no_proof_read_changes_nothing():
    model = hfnn.convert(GatedMLP(nn.SiLU()), prefer="memory")
    model.note, model.config.note, model.config.unread, model.training = 1, 2, [], False
    model(torch.randn(3, WIDTH))
    assert is_converted(model) and not hfnn.report(model).left


@pytest.mark.parametrize("change", [sets("factor", 0.5), replaced(RMSNorm, "normalised")])
def test_the_report_says_what_changed_until_convert_is_called_again(change, monkeypatch, caplog):
    model = hfnn.convert(RMSNorm(), prefer="memory")
    change([model], monkeypatch)
    model(torch.randn(3, WIDTH))
    (row,) = hfnn.report(model).rows
    assert row.to is None and "runs its own forward" in row.why and "after hfnn.convert" in row.why
    assert row.why[20:] in caplog.text
    (row,) = hfnn.report(hfnn.convert(model)).rows
    assert row.to is None and "named like a norm, but no op of hfnn" in row.why and not is_converted(model)


def test_what_was_replaced_by_the_same_is_proved_anew(monkeypatch):
    model, own = hfnn.convert(RMSNorm(), prefer="memory"), RMSNorm.forward
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x: own(self, x))
    x = torch.randn(3, WIDTH, requires_grad=True)
    model(x)
    assert hfnn.report(model).left and not hfnn.report(hfnn.convert(model, prefer="memory")).left
    assert "Norm" in model(x).grad_fn.name() and not hfnn.report(model).left


class OfATensor(RMSNorm):
    def __init__(self):
        super().__init__()
        self.factor = torch.ones(())


def test_a_tensor_that_is_no_parameter_is_no_ground_for_a_proof():
    model = GatedMLP(nn.SiLU())
    model.config.factor = torch.ones(())
    for module in (hfnn.convert(OfATensor()), hfnn.convert(model)):
        assert module(torch.randn(3, WIDTH)).shape == (3, WIDTH) and not is_converted(module)


def test_a_module_that_sets_its_attributes_compiles():
    class Sets(MyNorm):
        def __init__(self):
            super().__init__(WIDTH)
            self.calls = 0

    class Counted(nn.Sequential):
        def forward(self, x):
            self[0].calls = 1
            return super().forward(x)

    model = hfnn.convert(Counted(Sets()), prefer="memory")
    x = torch.randn(3, WIDTH)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))


def test_attributes_go_back_to_the_letter():
    model = GatedMLP(nn.SiLU())
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    hfnn.convert(model, prefer="memory", recompute="gemm").config.factor = 2.0
    model(torch.randn(3, WIDTH))
    assert not holds(model)
    hfnn.revert(model)
    assert before == {name: dict(vars(m)) for name, m in model.named_modules()}
    assert type(model) is GatedMLP and [list(vars(m)) for m in model.modules()] == [*map(list, before.values())]


def test_no_registry_has_our_classes():
    known = list(REGISTRY)
    hfnn.revert(hfnn.convert(RMSNorm(), prefer="memory"))
    assert known == REGISTRY

    class Derived(type(hfnn.convert(RMSNorm()))):
        """A user's class nevertheless."""

    assert [*known, Derived] == REGISTRY


class Counts:
    def __init__(self):
        self.calls = 0


class CountingNorm(RMSNorm):
    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def forward(self, x):
        if isinstance(self.calls, list):
            self.calls.append(1)
        else:
            self.calls.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("calls", [[], Counts()])
def test_a_forward_that_changes_what_it_shares_is_not_run_on_it(calls):
    model = hfnn.convert(CountingNorm(calls), prefer="memory")
    assert not calls if isinstance(calls, list) else not calls.calls
    assert not is_converted(model) and "changes attributes" in hfnn.report(model).left[0].why
    model(torch.randn(3, WIDTH))
    assert calls == [1] if isinstance(calls, list) else calls.calls == 1


class HalfNorm(RMSNorm):
    def forward(self, x):
        return super().forward(x) + (x.dtype is torch.float16) * 0.5


def test_what_is_another_function_in_float16_is_left_alone_there():
    stock, model = HalfNorm(), hfnn.convert(HalfNorm(), prefer="memory")
    model.load_state_dict(stock.state_dict())
    assert is_converted(model)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(3, WIDTH).to(dtype)
        torch.testing.assert_close(model(x), stock(x), rtol=0.01, atol=0.01)  # tolerance of the dtype's rounding


class FlaggedNorm(RMSNorm):
    def __init__(self, cast):
        super().__init__()
        self.cast = cast

    def forward(self, x):
        y = super().forward(x.float())
        return y.to(x.dtype) if self.cast else y


def test_dtypes_are_of_the_instance():
    one, two = (hfnn.convert(FlaggedNorm(cast), prefer="memory") for cast in (True, False))
    x = torch.randn(3, WIDTH).bfloat16()
    assert [model(x).dtype for model in (one, two, one)] == [torch.bfloat16, torch.float32, torch.bfloat16]


class Comparing(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, x):
        return F.gelu(x) if self.act is F.gelu else F.silu(x)


class Keeping(nn.Module):
    def forward(self, x):
        self.act = F.gelu
        return self.act(x)


@pytest.mark.parametrize("build", [lambda: Comparing(F.gelu), Keeping])
def test_a_function_that_is_named_and_not_called_is_not_routed(build):
    stock, model = build(), hfnn.convert(build(), prefer="memory")
    x = torch.randn(3, WIDTH, requires_grad=True)
    assert torch.equal(model(x), stock(x)) and "without calling it" in hfnn.report(model).rows[0].why
    pickle.dumps(model)


def test_a_class_of_torchs_that_was_replaced_before():
    own = nn.GELU.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.GELU, "forward", lambda self, x: own(self, x) * 0.5)
        model = hfnn.convert(nn.GELU(), prefer="memory")
        assert not is_converted(model) and "another forward than torch's" in hfnn.report(model).rows[0].why
