"""Batch norms followed by activations, found by running a module's forward: ResNets and similar networks."""

import copy
import pickle
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfnn
from hfnn.core.holder import like_of
from hfnn.ops import batch_norm
from hfnn.patterns import batch_norm_act, proof, rewrite
from hfnn.patterns.probe import Refusal


class BasicBlock(nn.Module):
    """Like torchvision's."""

    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.downsample = None if inputs == outputs else nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x):
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    """Like timm's: an activation for each norm, and identities where options are off."""

    def __init__(self, width, act=nn.ReLU):
        super().__init__()
        self.conv1, self.bn1, self.act1 = nn.Conv2d(width, 8, 1, bias=False), nn.BatchNorm2d(8), act()
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.drop_block, self.act2, self.aa = nn.Identity(), act(), nn.Identity()
        self.conv3, self.bn3, self.act3 = nn.Conv2d(8, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        self.se = self.drop_path = None

    def forward(self, x):
        shortcut = x
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.conv2(x)
        x = self.bn2(x)
        x = self.drop_block(x)
        x = self.act2(x)
        x = self.aa(x)
        x = self.conv3(x)
        x = self.bn3(x)
        if self.se is not None:
            x = self.se(x)
        if self.drop_path is not None:
            x = self.drop_path(x)
        x = x + shortcut
        return self.act3(x)


class Functional(nn.Module):
    """Like torchvision's BasicConv2d, in three ways."""

    def __init__(self, width, how):
        super().__init__()
        self.conv, self.bn, self.how = nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width), how

    def forward(self, x):
        y = self.bn(self.conv(x))
        if self.how == "leaky":
            return F.leaky_relu(y, 0.25)
        return F.relu(y, inplace=True) if self.how == "inplace" else torch.cat([torch.relu(y), x], 1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 16, 2))
        self.layer2 = nn.Sequential(Bottleneck(16), Bottleneck(16, nn.SiLU), Functional(16, "leaky"))
        self.layer3 = nn.Sequential(nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish())
        self.last = nn.Sequential(Functional(16, "inplace"), Functional(16, "cat"))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(32, 4)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.last(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


@pytest.fixture
def sites(monkeypatch):
    """The calls of the op: the activation after the norm, whether there is a sum, and whether the room ran."""
    found, fused = [], batch_norm.fused

    def note(*args):
        y = fused(*args)
        found.append((args[9], args[8] is not None, y is not None and y.grad_fn.name() == "_BatchNormBackward"))
        return y

    monkeypatch.setattr(batch_norm, "fused", note)
    return found


def match(module):
    return rewrite.recognise(module)


def results(model, x, train):
    model.train(train)
    x = x.detach().requires_grad_()
    y = model(x)
    return y, *torch.autograd.grad(y.square().mean(), [x, *model.parameters()]), *model.buffers()


def same(mine, theirs, dtype=torch.float32):
    eps = torch.finfo(dtype).eps
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype is b.dtype and a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=2000 * eps, atol=2000 * eps * max(float(b.detach().abs().max()), 1e-3))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("train", [True, False])
def test_a_resnet(train, last, sites):
    """Values, gradients and buffers, in float64 so that rounding hides nothing."""
    torch.manual_seed(0)
    theirs = Net().double()
    if last:
        theirs = theirs.to(memory_format=torch.channels_last)
    mine = hfnn.convert(copy.deepcopy(theirs), prefer="memory")
    x = torch.randn(4, 3, 32, 32).double()
    x = x.to(memory_format=torch.channels_last) if last else x
    same(results(mine, x, train), results(theirs, x, train), torch.float64)
    assert all(ran for *_, ran in sites)
    wanted = {
        ("relu", False): 7,
        ("relu", True): 4,
        ("silu", False): 2,
        ("leaky_relu", False): 1,
        ("hardswish", False): 1,
    }
    assert Counter(site[:2] for site in sites) == wanted
    assert "batch_norm_act of bn1 + relu, bn2 + sum + relu" in str(like_of(mine.layer1[0]))


def test_copies_pickles_and_revert(sites):
    torch.manual_seed(0)
    theirs = Net()
    mine = hfnn.convert(copy.deepcopy(theirs), prefer="memory")
    x = torch.randn(2, 3, 32, 32)
    for model in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        sites.clear()
        assert type(model.layer1[0]) is type(mine.layer1[0]) and isinstance(model.layer1[0], BasicBlock)
        same(results(model, x, False), results(mine, x, False))
        assert len(sites) == 30
    assert list(mine.state_dict()) == list(theirs.state_dict())
    hfnn.revert(mine)
    assert [type(m) for m in mine.modules()] == [type(m) for m in theirs.modules()]


def test_hooks_and_what_changes_later(sites):
    """A part that has hooks or was replaced is called as in the class's own forward."""
    torch.manual_seed(0)
    theirs = BasicBlock(8, 8)
    mine = hfnn.convert(copy.deepcopy(theirs), prefer="memory")
    x, seen = torch.randn(2, 8, 6, 6), []

    def compare(expected):
        sites.clear()
        same(results(mine, x, True), results(theirs, x, True))
        assert len(sites) == expected

    compare(2)
    handle = mine.bn1.register_forward_hook(lambda module, args, y: seen.append(y.detach().clone()))
    compare(1)
    assert len(seen) == 1 and (seen[0] < 0).any()
    handle.remove()
    handle = mine.relu.register_forward_hook(lambda module, args, y: y * 2)
    other = theirs.relu.register_forward_hook(lambda module, args, y: y * 2)
    compare(0)
    handle.remove(), other.remove()
    mine.relu, theirs.relu = nn.GELU(), nn.GELU()
    compare(0)
    mine.relu, theirs.relu = nn.LeakyReLU(0.3), nn.LeakyReLU(0.3)
    compare(2)
    mine.bn1, theirs.bn1 = nn.GroupNorm(2, 8), nn.GroupNorm(2, 8)
    compare(1)
    for model in (mine, theirs):
        torch.manual_seed(1)
        model.downsample = nn.Conv2d(8, 8, 1)
    compare(0)  # an attribute that was None is not any more: the class's own forward
    assert type(mine) is BasicBlock and like_of(mine) is not None


def test_a_sequential_that_is_cut_or_grows():
    theirs = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))
    mine, x = hfnn.convert(copy.deepcopy(theirs), prefer="memory").eval(), torch.randn(2, 3, 5, 5)
    theirs.eval()
    torch.testing.assert_close(mine[:2](x), theirs[:2](x))
    mine.append(nn.Sigmoid()), theirs.append(nn.Sigmoid())
    torch.testing.assert_close(mine(x), theirs(x))


def test_small_inputs_and_other_calls_run_torchs_ops(sites):
    theirs = BasicBlock(8, 8)
    mine, x = hfnn.convert(copy.deepcopy(theirs)), torch.randn(2, 8, 6, 6)
    assert all(map(torch.equal, results(mine, x, True), results(theirs, x, True)))
    assert len(sites) == 2 and not any(ran for *_, ran in sites)
    copy.deepcopy(mine), pickle.dumps(mine)  # after it ran
    torch.testing.assert_close(mine(x=x), theirs(x=x))


def test_the_input_is_written_to_where_the_forward_does():
    """An in-place activation before the norms, as in pre-activated blocks: by a module, and by a function. No proof
    runs it on its real input."""

    class PreActivated(BasicBlock):
        def forward(self, x):
            y = F.relu(x, inplace=True)
            return self.relu(self.bn1(self.conv1(y)))

    class ByPart(BasicBlock):
        def forward(self, x):
            return self.relu(self.bn1(self.conv1(self.relu(x))))

    for cls, found in ((PreActivated, Refusal), (ByPart, rewrite.Fused)):
        theirs = cls(8, 8).eval()
        mine = hfnn.convert(copy.deepcopy(theirs), prefer="memory")
        assert isinstance(match(theirs), found)
        x = torch.randn(2, 8, 6, 6)
        given, other = x.clone(), x.clone()
        torch.testing.assert_close(mine(given), theirs(other))
        assert torch.equal(given, other) and not torch.equal(given, x)


def test_a_wrong_graph_is_found(monkeypatch):
    """Planted: a sum that is left out, before a proof and after another."""
    source = rewrite._source

    def forgets(*args):
        return source(*args).replace(
            "hfnn_norm_sum_in_place_act(prefer_1, conv2, x0,", "hfnn_norm_act(prefer_1, conv2,"
        )

    monkeypatch.setattr(rewrite, "_source", forgets)
    monkeypatch.setattr(rewrite, "_proofs", proof.Proofs())
    assert "off by" in str(match(BasicBlock(8, 8)))


def test_autocast(sites):
    torch.manual_seed(0)
    theirs = Net()
    mine = hfnn.convert(copy.deepcopy(theirs), prefer="memory")
    x = torch.randn(4, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        y, want = mine(x), theirs(x)
    assert y.dtype is want.dtype and all(ran for *_, ran in sites) and sites
    exact = copy.deepcopy(theirs).double()
    for a, b in zip(exact.buffers(), theirs.buffers(), strict=True):
        a.copy_(b)
    reference = copy.deepcopy(exact).train()(x.double())
    assert (y - reference).norm() <= 2 * (want - reference).norm()


@pytest.mark.parametrize("library, name", [("torchvision.models", "resnet18"), ("timm", "resnet26")])
def test_libraries(library, name, sites):
    models = pytest.importorskip(library)
    torch.manual_seed(0)
    theirs = (getattr(models, name, None) or (lambda: models.create_model(name)))().double()
    mine = hfnn.convert(copy.deepcopy(theirs), prefer="memory")
    x = torch.randn(2, 3, 64, 64).double()
    same(results(mine, x, True), results(theirs, x, True), torch.float64)
    norms = sum(isinstance(m, nn.BatchNorm2d) for m in theirs.modules())
    shortcuts = sum(n.endswith("downsample") for n, _ in theirs.named_modules())
    assert len(sites) == norms - shortcuts


class BatchNormAct2d(nn.BatchNorm2d):
    """Like timm's."""

    wrong = None

    def __init__(self, features, act=nn.ReLU, **options):
        super().__init__(features, **options)
        self.drop, self.act = nn.Identity(), act() if act is nn.SiLU or act is nn.Identity else act(inplace=True)

    def forward(self, x):
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(2 if self.wrong == "count" else 1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        training = self.training or (self.running_mean is None and self.running_var is None)
        tracked = not self.training or self.track_running_stats
        mean, var = (self.running_mean, self.running_var) if tracked else (None, None)
        factor = factor / 2 if self.wrong == "factor" else factor
        x = F.batch_norm(x, mean, var, self.weight, self.bias, training, factor, self.eps)
        return self.act(self.drop(x)) * (2 if self.wrong == "scale" else 1) if self.wrong else self.act(self.drop(x))


@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"track_running_stats": False}, {"eps": 0.1}], ids=str)
@pytest.mark.parametrize("act", [nn.ReLU, nn.LeakyReLU, nn.SiLU, nn.Hardswish, nn.Identity])
def test_norms_that_have_their_activation(act, options, sites):
    torch.manual_seed(0)
    # No bias: the norm cancels it, and its gradient is rounding noise around zero.
    theirs = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), BatchNormAct2d(8, act, **options)).double()
    mine = hfnn.convert(copy.deepcopy(theirs), prefer="memory")
    mine = pickle.loads(pickle.dumps(mine))
    x = torch.randn(3, 3, 6, 6).double()
    for train in (True, True, False):
        same(results(mine, x, train), results(theirs, x, train), torch.float64)
    if options.get("track_running_stats", True):
        assert len(sites) == 3 and all(ran for *_, ran in sites)
    mine[1].act, theirs[1].act = nn.Tanh(), nn.Tanh()
    same(results(mine, x, True), results(theirs, x, True), torch.float64)


@pytest.mark.parametrize("wrong", ["count", "factor", "scale"])
def test_norms_whose_forward_is_another(wrong, monkeypatch):
    monkeypatch.setattr(BatchNormAct2d, "wrong", wrong)
    why = batch_norm_act.recognise(BatchNormAct2d(8))
    assert ("off by" if wrong == "scale" else "running statistics become others") in str(why)


def test_timm_norms(sites):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    theirs = timm.create_model("mobilenetv3_small_050").double()
    mine = hfnn.convert(copy.deepcopy(theirs), prefer="memory")
    x = torch.randn(2, 3, 64, 64).double()
    # Each of many norms in a row divides by the spread that the previous one left: 1.5e-9 was seen.
    for a, b in zip(results(mine, x, False), results(theirs, x, False), strict=True):
        assert (a - b).double().norm() <= 1e-7 * b.double().norm() + 1e-20
    norms = sum(isinstance(m, nn.BatchNorm2d) for m in theirs.modules())
    assert len(sites) == norms and all(ran for *_, ran in sites)
