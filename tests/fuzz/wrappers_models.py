"""Random trees of modules for the fuzzer of wrappers: drawing trees, and building their models.

A tree is nested dicts. `{"kind": "block", "parts": [...]}` runs its parts in turn; the others are leaves. A block
returns a tensor, or a tensor with others (`asides`), which are passed up to the root.
"""

import dataclasses

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

LEAVES = {
    "linear": 6,
    "mlp": 4,
    "norm": 2,
    "scale": 1,
    "batch": 0.7,
    "relu_": 1,
    "tied": 1.5,
    "spare": 0.5,
    "sometimes": 0.7,
}
OUTPUTS = {
    "plain": 7,
    "tuple": 1,
    "list": 0.5,
    "dict": 1,
    "dataclass": 0.6,
    "view": 1,
    "input": 2.5,
    "aux": 1.2,
    "same": 0.6,
}
CHECKPOINTS = {"": 9, "each": 1.6, "each reentrant": 1.2, "all": 1.4, "all reentrant": 1}


def choose(rng, weights: dict):
    return rng.choices(list(weights), list(weights.values()))[0]


def draw(rng, depth: int, root: bool = False) -> dict:
    if not root and (depth == 0 or rng.random() < 0.35):
        if rng.random() < 0.08:
            return {"kind": "again", "of": rng.randrange(8)}
        return {
            "kind": choose(rng, LEAVES),
            "frozen": rng.random() < 0.1,
            "unit": rng.random() < 0.25,
            "bias": rng.random() < 0.7,
        }
    count = rng.choice((2, 3, 3, 4, 5)) if root else rng.choice((1, 2, 2, 3))
    return {
        "kind": "block",
        "unit": rng.random() < 0.6,
        "parts": [draw(rng, depth - 1) for _ in range(count)],
        "residual": rng.random() < 0.3,
        "twice": rng.random() < 0.1,
        "checkpoint": choose(rng, CHECKPOINTS),
        "output": choose(rng, OUTPUTS),
        "kwargs": rng.random() < 0.15,
    }


def walk(tree: dict):
    """All nodes, the root first."""
    yield tree
    for part in tree.get("parts", ()):
        yield from walk(part)


@dataclasses.dataclass
class Output:
    y: torch.Tensor
    asides: list


def main_of(output):
    if isinstance(output, Output):
        return output.y
    return output["y"] if isinstance(output, dict) else output[0] if isinstance(output, tuple | list) else output


def asides_of(output) -> list:
    if isinstance(output, Output):
        return output.asides
    if isinstance(output, dict):
        return output["asides"]
    return list(output[1:]) if isinstance(output, tuple | list) else []


class Linear(nn.Linear):
    """Like torch's, but its weight may be shared with another one."""


class MLP(nn.Module):
    def __init__(self, width, bias):
        super().__init__()
        self.up, self.down = nn.Linear(width, width + 3, bias), nn.Linear(width + 3, width, bias)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Scale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.weight


class Spare(nn.Module):
    """Has parameters and does not use them."""

    def __init__(self, width):
        super().__init__()
        self.unused = nn.Linear(width, width)

    def forward(self, x):
        return x


class Sometimes(nn.Module):
    """Runs its layer in every other step; the session toggles it."""

    def __init__(self, width):
        super().__init__()
        self.layer, self.on = nn.Linear(width, width), True

    def forward(self, x):
        return self.layer(x) if self.on else x


class Block(nn.Module):
    def __init__(self, tree, made, width):
        super().__init__()
        self.tree = tree
        self.parts = nn.ModuleList(build(part, made, width) for part in tree["parts"])

    def forward(self, x):
        given, asides = x, []
        for _ in range(2 if self.tree["twice"] else 1):
            how = self.tree["checkpoint"]
            if how.startswith("all"):
                x, *found = checkpoint(self.run, x, use_reentrant=how.endswith("reentrant"))
            else:
                x, *found = self.run(x)
            asides += found
        if self.tree["residual"]:
            x = x + given
        return give(self.tree["output"], x, given, asides)

    def run(self, x):
        asides, how = [], self.tree["checkpoint"]
        for part in self.parts:
            if how.startswith("each"):
                output = checkpoint(part, x, use_reentrant=how.endswith("reentrant"))
            else:
                output = part(x=x) if self.tree["kwargs"] and isinstance(part, Block) else part(x)
            x = main_of(output)
            asides += asides_of(output)
        return x, *asides


def give(how, x, given, asides):
    """The return value of a block."""
    if how == "tuple":
        return x, *asides
    if how == "list":
        return [x, *asides]
    if how == "dict":
        return {"y": x, "n": 3, "text": "a", "asides": asides}
    if how == "dataclass":
        return Output(x, asides)
    if how == "view":
        return x.unsqueeze(1)[:, 0]
    if how == "input":
        return x, given
    if how == "aux":
        return x, x.square().mean(), *asides
    if how == "same":
        return x, x
    return x


def build(tree, made, width) -> nn.Module:
    """The module of a tree. made: the leaves and blocks built so far, which others may refer to."""
    kind = tree["kind"]
    if kind == "again":
        return made[tree["of"] % len(made)] if made else nn.Identity()
    if kind == "block":
        module = Block(tree, made, width)
    elif kind in ("linear", "tied"):
        module = Linear(width, width, tree["bias"])
        others = [m for m in made if isinstance(m, Linear)]
        if kind == "tied" and others:
            module.weight = others[0].weight
    else:
        make = {
            "mlp": lambda: MLP(width, tree["bias"]), "norm": lambda: nn.LayerNorm(width), "scale": lambda: Scale(width),
            "batch": lambda: nn.BatchNorm1d(width), "relu_": lambda: nn.ReLU(inplace=True),
            "spare": lambda: Spare(width), "sometimes": lambda: Sometimes(width),
        }  # fmt: skip
        module = make[kind]()
    if tree.get("frozen"):
        module.requires_grad_(False)
    module.is_unit = tree.get("unit", False) and any(True for _ in module.parameters())
    made.append(module)
    return module


class Model(nn.Module):
    """The root: a tree, optionally after an embedding."""

    def __init__(self, tree, width, tokens):
        super().__init__()
        self.embed = nn.Embedding(7, width) if tokens else None
        self.tree = build(tree, [], width)

    def forward(self, x):
        return self.tree(x if self.embed is None else self.embed(x))


def units_of(model: Model) -> list[nn.Module]:
    """The modules to be wrapped separately, the outer ones first."""
    return [m for m in model.modules() if getattr(m, "is_unit", False)]
