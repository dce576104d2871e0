"""Modules with unusual buffers, and tools called on models, for the fuzzer of `hfnn.convert`."""

import torch
from torch import nn

import hfnn

COUNTER = torch.zeros(())  # one tensor in several modules, and in their copies until they are copied


def _sparse(D):
    return torch.eye(D).to_sparse()


def _quantised(D):
    return torch.quantize_per_tensor(torch.eye(D), 0.1, 3, torch.qint8)


class Buffered(nn.Module):
    """Multiplies by a number that it computes from a buffer of an unusual layout or dtype."""

    KINDS = {
        "sparse": (_sparse, lambda b: b.to_dense().mean()),
        "uncoalesced": (lambda D: torch.cat([_sparse(D)] * 2), lambda b: torch.sparse.sum(b) / b.shape[1]),
        "csr": (lambda D: torch.eye(D).to_sparse_csr(), lambda b: b.values().mean()),
        "quantised": (_quantised, lambda b: b.dequantize().sum() / b.shape[0]),
        "complex": (lambda D: torch.polar(torch.ones(D), torch.ones(D)), lambda b: b.abs().mean()),
        "empty": (lambda D: torch.empty(0, D), lambda b: b.sum() + 1),
        "meta": (lambda D: torch.empty(D, device="meta"), lambda b: torch.tensor(1.0 / b.dim())),
        "expanded": (lambda D: torch.ones(1).expand(D), lambda b: b.mean()),
        "float8": (lambda D: torch.ones(D).to(torch.float8_e4m3fn), lambda b: b.float().mean()),
        "shared": (lambda D: COUNTER, lambda b: b.detach().clone() * 0 + 0.5),
        "written": (lambda D: torch.zeros(D), lambda b: b.add_(1).mean() * 0.1),
        "replaced": (lambda D: torch.zeros(D), None),
    }

    def __init__(self, D, kind):
        super().__init__()
        make, self.kind = self.KINDS[kind][0], kind
        self.register_buffer("held", make(D))
        if kind == "shared":
            self.inner = nn.Module()
            self.inner.register_buffer("again", self.held)

    def forward(self, x):
        if self.kind == "replaced":
            self.held = self.held + 1
            return x * self.held.mean().to(x.dtype)
        return x * self.KINDS[self.kind][1](self.held).to(x.dtype)


def _tune(model, x):
    how = {"steps": 1, "loss": lambda m, x: m(x).float().square().mean(), "budget": 20.0, "among": ["converted"]}
    hfnn.tune(hfnn.revert(model), [x, x], **how, cache=False, show=False)


TOOLS = {
    "report": lambda model, x: str(hfnn.report(model, x)),
    "memory.report": lambda model, x: str(hfnn.memory.report(model, x)),
    "verify": lambda model, x: str(hfnn.verify(model.eval(), x)),
    "tune": _tune,
    "peak_bytes": lambda model, x: hfnn.memory.peak_bytes(lambda: model(x)),
}
# What tools say about a model that trains, and that they do not take.
REFUSALS = ("dropout", "no floating-point tensor", "has hooks", "as stock", "takes a loss of one number")


def called(tool: str, model: nn.Module, x: torch.Tensor) -> str | None:
    """How a tool fails on a model that trains, or None."""
    try:
        TOOLS[tool](model, x)
    except Exception as error:
        refused = isinstance(error, ValueError) and any(text in str(error) for text in REFUSALS)
        return None if refused else f"{tool}: {type(error).__name__}: {str(error).splitlines()[0]}"
    return None
