"""Programs give bitwise the same with the collector on: random training loops, hfnn's conversion and proofs,
torch.compile."""

import contextlib
import random

import pytest
import torch
from torch import nn

import hfnn
from haiprof import record
from haiprof.collector import Collector

ACTIVATIONS = (nn.ReLU, nn.GELU, nn.SiLU)
OPTIMIZERS = ("SGD", "AdamW", "LBFGS")
FLAGS = ("converted", "validation", "checkpointed", "loader", "penalty", "hooks", "raises")


@contextlib.contextmanager
def profiled(folder):
    collector = Collector(folder, hz=10).start()
    try:
        yield collector
    finally:
        collector.stop()
    assert not collector._failed


def draw(rng):
    """A program: plain data, as in tests/fuzz/engine.py."""
    return {
        "seed": rng.randrange(10**6),
        "layers": [(rng.choice(ACTIVATIONS), rng.random() < 0.5) for _ in range(rng.randrange(1, 4))],
        "optimizer": rng.choice(OPTIMIZERS),
        "passes": rng.randrange(1, 4),
        "steps": rng.randrange(2, 6),
        **{flag: rng.random() < 0.4 for flag in FLAGS},
    }


def build(program):
    layers = []
    for activation, norm in program["layers"]:
        layers += [nn.Linear(8, 8), *([nn.LayerNorm(8)] if norm else []), activation()]
    model = nn.Sequential(*layers, nn.Linear(8, 4))
    arguments = {"max_iter": 3} if program["optimizer"] == "LBFGS" else {}
    optimizer = getattr(torch.optim, program["optimizer"])(model.parameters(), lr=0.01, **arguments)
    return (hfnn.convert(model) if program["converted"] else model), optimizer


def run(program):
    """Everything that the program produces: losses, gradients, weights, exceptions."""
    torch.manual_seed(program["seed"])
    random.seed(program["seed"])
    model, optimizer = build(program)
    log = []
    data = torch.utils.data.TensorDataset(torch.randn(64, 8))
    batches = iter(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True) if program["loader"] else [])
    if program["hooks"]:
        model[0].register_forward_hook(lambda module, inputs, y: log.append(y.detach().sum()))

    def closure():
        optimizer.zero_grad()
        for _ in range(program["passes"]):
            (x,) = next(batches) if program["loader"] and len(log) < 10 else (torch.randn(4, 8),)
            x.requires_grad_(program["penalty"])
            y = (
                torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
                if program["checkpointed"]
                else model(x)
            )
            loss = y.square().mean()
            if program["penalty"]:
                loss = loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()
            loss.backward()
            log.append(loss.detach().clone())
        return loss

    for step in range(program["steps"]):
        if program["optimizer"] == "LBFGS":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        log += [p.grad.clone() for p in model.parameters()]
        if program["validation"] and step % 2:
            model.eval()
            with torch.no_grad():
                log.append(model(torch.randn(4, 8)))
            model.train()
        if program["raises"] and step == 1:
            try:
                model(torch.randn(4, 3))
            except RuntimeError as error:
                log.append(str(error))
    return [*log, *(p.detach().clone() for p in model.parameters()), str(random.random())]


def same(a, b):
    return len(a) == len(b) and all(
        x == y if isinstance(x, str) else torch.equal(x, y) for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("seed", range(24))
def test_drawn_programs(tmp_path, seed):
    program = draw(random.Random(seed))
    plain = run(program)
    with profiled(tmp_path) as collector:
        assert same(run(program), plain), program
    assert collector.done == program["steps"]


def test_the_comparison_sees_a_difference(tmp_path, monkeypatch):
    """A collector that draws a random number is found."""
    from haiprof.phases import Phases

    plain, leave = run(draw(random.Random(1))), Phases.leave

    def noisy(self, *args, **kwargs):
        torch.rand(1)
        return leave(self, *args, **kwargs)

    monkeypatch.setattr(Phases, "leave", noisy)
    with profiled(tmp_path):
        assert not same(run(draw(random.Random(1))), plain)


class Norm(nn.Module):
    """An RMS norm in its author's own code, which hfnn proves."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def test_conversion_and_its_proofs_are_the_same(tmp_path):
    def model():
        return nn.Sequential(nn.Linear(8, 8), Norm(), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 8), nn.LayerNorm(8))

    plain = hfnn.report(hfnn.convert(model())).rows
    with profiled(tmp_path):
        assert hfnn.report(hfnn.convert(model())).rows == plain
    assert sum(row.to is not None for row in plain) >= 4


def test_captured_models_are_replayed_and_told_of(tmp_path):
    """The same losses and replays with the collector, with played graphs where there is no GPU."""
    from played_graphs import DEVICE, played

    def trained(looks=None):
        torch.manual_seed(0)
        inner = hfnn.convert(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1)).to(DEVICE), capture=True)
        model = nn.Sequential(inner)  # as in a wrapper
        optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
        for step in range(10):
            x = torch.full((4, 8), float(step), device=DEVICE)
            loss = model(x if step != 7 else x.requires_grad_()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
            if looks and step == 8:
                looks.flush()
        return torch.stack(found), dict(vars(inner)["_hfnn_capture"].counts)

    with played():
        losses, counts = trained()
        with profiled(tmp_path) as collector:
            again, own = trained(collector)  # its model is gone when the collector stops
    assert torch.equal(again, losses) and own == counts and counts["replayed"] == 6
    *_, line = record.load(tmp_path)[0]["captures"]
    assert (line["model"], line["replayed"], line["as_it_is"]) == ("Sequential", 6, {"before recording": 4})


def test_modules_are_bare_to_hfnn(tmp_path):
    from hfnn.core.context import is_bare

    module = nn.Linear(8, 8)
    with profiled(tmp_path):
        module(torch.randn(2, 8)).sum().backward()
        assert is_bare(module)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # TorchDynamo reads it
@pytest.mark.parametrize("broken", [False, True])
def test_graphs_of_torch_compile_are_the_same(tmp_path, broken):
    """The same number of graphs and operations, and no more recompilations, if the collector starts before or after the
    first."""
    graphs = []

    def backend(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes])
        return graph.forward

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

        def forward(self, x):
            x = self.inner(x)
            if broken:
                torch._dynamo.graph_break()
            return self.inner(x)

    def compiled():
        graphs.clear()
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = torch.compile(Model(), backend=backend, fullgraph=not broken)
        outputs = [model(torch.randn(2, 8)).sum() for _ in range(3)]
        for y in outputs:
            y.backward()
        return torch.stack(outputs).detach(), [str(each) for each in graphs]

    values, plain = compiled()
    with profiled(tmp_path):
        again, own = compiled()
        assert own == plain and torch.equal(again, values)
    again, own = compiled()
    assert own == plain and torch.equal(again, values)
    torch._dynamo.reset()
