"""Tools on models with unusual buffers and parameters: none raises for a model that trains, and none changes it."""

import pytest
import torch
from played_graphs import played
from torch import nn

import hfnn
from hfnn.core import parts

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse .* support is in beta", "ignore:.*quantize", "ignore:.*Quantized"
)
ADJACENCY = (torch.arange(64).view(8, 8) % 3 == 0).float()
shared = torch.zeros(8)


def inference():
    with torch.inference_mode():
        return torch.ones(8)


# {kind: (a buffer, its use in a forward with x of 8 x 8)}
BUFFERS = {
    "sparse_coo": (ADJACENCY.to_sparse, lambda b, x: torch.sparse.mm(b, x)),
    "uncoalesced": (
        lambda: torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (8, 8), check_invariants=False),
        lambda b, x: torch.sparse.mm(b, x),
    ),
    "sparse_csr": (ADJACENCY.to_sparse_csr, lambda b, x: x + b.to_dense()),
    "sparse_csc": (ADJACENCY.to_sparse_csc, lambda b, x: x + b.to_dense()),
    "sparse_bsr": (lambda: ADJACENCY.to_sparse_bsr((2, 2)), lambda b, x: x + b.to_dense()),
    "quantised": (lambda: torch.quantize_per_tensor(ADJACENCY, 0.1, 3, torch.qint8), lambda b, x: x + b.dequantize()),
    "by channel": (
        lambda: torch.quantize_per_channel(ADJACENCY, torch.full((8,), 0.1), torch.zeros(8).long(), 0, torch.qint8),
        lambda b, x: x + b.dequantize(),
    ),
    "complex": (lambda: torch.polar(torch.ones(8), torch.arange(8.0)), lambda b, x: (x * b).real + (x * b).imag),
    "conjugate": (lambda: torch.polar(torch.ones(8), torch.arange(8.0)).conj(), lambda b, x: (x * b).imag),
    "empty": (lambda: torch.empty(0, 8), lambda b, x: torch.cat([b.to(x.dtype), x])),
    "meta": (lambda: torch.empty(8, device="meta"), lambda b, x: x * b.dim()),
    "shared": (lambda: shared, lambda b, x: x + b.add_(1)),
    "expanded": (lambda: torch.ones(1).expand(8), lambda b, x: x * b),
    "float8": (lambda: torch.ones(8).to(torch.float8_e4m3fn), lambda b, x: x * b.to(x.dtype)),
    "uint16": (lambda: torch.arange(8).to(torch.uint16), lambda b, x: x * b.to(x.dtype)),
    "inference": (inference, lambda b, x: x + b.to(x.dtype)),
    "replaced": (lambda: torch.zeros(8), None),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(6)], layout=torch.jagged),
        lambda b, x: x * b.values().to(x.dtype),
    ),
}


class Buffered(nn.Module):
    def __init__(self, kind, trained=False):
        super().__init__()
        self.norm, self.fc, self.act = nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()
        make, self.use = BUFFERS[kind]
        if trained:
            self.held = nn.Parameter(make())
        else:
            self.register_buffer("held", make())
        if kind == "shared":
            self.register_buffer("again", self.held)
            self.register_buffer("part", self.held[:4])

    def forward(self, x):
        y = self.fc(self.act(self.norm(x)))
        if self.use is None:
            self.held = self.held + 1  # another tensor in its place
            return y + self.held
        return self.use(self.held, y)


def state(model):
    return {name: (id(b), parts.copy(b)) for name, b in model.named_buffers(remove_duplicate=False)}


def same(now, before):
    return now.keys() == before.keys() and all(
        now[n][0] == before[n][0] and parts.equal(now[n][1], before[n][1]) for n in now
    )


def tune(model, x):
    how = {"steps": 1, "loss": lambda m, x: m(x).float().square().mean(), "budget": 60.0, "among": "converted"}
    return hfnn.tune(model, [x, x], **how, cache=False, show=False)


TOOLS = {
    "report": lambda model, x: str(hfnn.report(model, x)),
    "memory.report": lambda model, x: str(hfnn.memory.report(model, x)),
    "verify": lambda model, x: hfnn.verify(model, x),
    "tune": tune,
    "saved_bytes": lambda model, x: str(hfnn.memory.saved_bytes(lambda: model(x))),
    "peak_bytes": lambda model, x: hfnn.memory.peak_bytes(lambda: model(x)),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch 2.11, of its own copies
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("kind", BUFFERS)
def test_buffers(kind, tool):
    torch.manual_seed(0)
    model, x = Buffered(kind), torch.randn(8, 8)
    model(x).square().mean().backward()  # it trains
    before = state(model)
    found = TOOLS[tool](model, x)
    if tool == "verify":
        assert found.ok, str(found)
    if tool == "tune":
        assert not [row.why for row in found.rows if row.why], found
    assert tool.endswith("bytes") or same(state(model), before)


@pytest.mark.parametrize("kind", ["sparse_coo", "complex", "empty"])
def test_parameters(kind):
    """What is not trained is in the model all the same; what is trained has a gradient of its kind."""
    torch.manual_seed(0)
    model, x = Buffered(kind, trained=True), torch.randn(8, 8)
    model(x).square().mean().backward()
    rows = [row.name for row in hfnn.verify(model, x).rows]
    assert ("grad held" in rows) is (model.held.grad is not None)
    for tool in TOOLS.values():
        tool(model, x)


def test_sparse_gradients():
    model, x = nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.LayerNorm(8)), torch.tensor([1, 2, 2])
    for tool in TOOLS.values():
        tool(model, x)
    optimizer = hfnn.convert(torch.optim.SGD(model.parameters(), 0.1))
    model(x).sum().backward()
    assert optimizer.memory()["gradient"] >= 3 * 8 * 4


@pytest.mark.parametrize("kind", BUFFERS)
def test_captured(kind):
    """A captured model runs uncaptured, or as itself."""
    torch.manual_seed(0)
    shared.zero_()
    stock, x = Buffered(kind), torch.randn(8, 8)
    expected = [stock(x) for _ in range(5)]
    torch.manual_seed(0)
    shared.zero_()
    model = hfnn.convert(Buffered(kind), capture=True)
    with played():
        for y in expected:
            found = model(x)
            torch.testing.assert_close(found, y)
            found.square().sum().backward()
    assert hfnn.report(model).captured


def test_writes_restore():
    for kind, (make, _) in BUFFERS.items():
        t = make()
        before = parts.copy(t)
        if not t.is_meta and t.numel() and t.layout is torch.strided and not t.is_quantized:
            changed = parts.copy(t)
            parts.bits(changed).add_(1)
            parts.write(t, changed)
            assert not parts.equal(t, before), kind
        parts.write(t, before)
        assert parts.equal(t, before), kind
