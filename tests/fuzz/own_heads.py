"""Fuzzer of output layers that are found by use: training programs with a head, losses and reads of the user's own."""

import contextlib
import copy
import dataclasses
import pickle
from unittest import mock

import torch
from engine import Fuzzer, Known, Log, Raised, patched
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hfnn
from hfnn.deferred import head, logits, product

VOCABULARY, WIDTH, ROWS, SEQ = 24, 6, 3, 4
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


class Model(nn.Module):
    """A language model in small. tied: the head has the embedding's weight; else it is the last layer, with a bias."""

    def __init__(self, tied):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY if tied else VOCABULARY - 1, WIDTH)
        self.norm, self.body = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x, y=None, how=None):
        z = changed(self.head(self.norm(self.body(self.embed(x)))), how["changes"] if how else ())
        return z if y is None else (z, loss_of(z, y, how["loss"]))


# What code does to logits before the loss. A name ends in "!" if it reads them.
CHANGES = {
    "float": lambda z: z.float(),
    "double": lambda z: z.double(),
    "scale": lambda z: z * 0.5,
    "divide": lambda z: z / 0.7,
    "cap": lambda z: 3 * torch.tanh(z / 3),
    "row": lambda z: z + torch.linspace(-1, 1, VOCABULARY, dtype=z.dtype),
    "shift": lambda z: z[:, :-1],
    "rows": lambda z: z[torch.tensor([2, 0])],
    "contiguous": lambda z: z.contiguous(),
    "clone!": lambda z: z.clone(),
    "sum!": lambda z: z + z.mean(-1, keepdim=True),
    "where!": lambda z: torch.where(z > -1, z, -1.0),
    "write!": lambda z: z.mul_(0.5),
    "fill!": lambda z: z.masked_fill_(torch.arange(VOCABULARY) == 3, -9.0),
    "checkpoint!": lambda z: checkpoint(torch.sin, z, use_reentrant=False),
}


def changed(z, names):
    for name in names:
        z = CHANGES[name](z)
    return z


def loss_of(z, y, how):
    kind, options = how["kind"], {"reduction": how["reduction"], "ignore_index": how["ignore"]}
    y = y[: z.shape[0], : z.shape[1]]
    if kind == "flat":
        loss = F.cross_entropy(z.reshape(-1, VOCABULARY), y.reshape(-1), label_smoothing=how["smoothing"], **options)
    elif kind == "second":
        loss = F.cross_entropy(z.transpose(1, 2), y, label_smoothing=how["smoothing"], **options)
    elif kind == "permuted":
        loss = nn.CrossEntropyLoss(torch.linspace(0.5, 1, VOCABULARY, dtype=z.dtype), **options)(z.permute(0, 2, 1), y)
    elif kind == "nll":
        loss = F.nll_loss(F.log_softmax(z, -1).flatten(0, 1), y.flatten(), **options)
    elif kind == "nll second":
        loss = nn.NLLLoss(**options)(z.movedim(-1, 1).log_softmax(1), y)
    elif kind == "gather":
        loss = -z.log_softmax(-1).gather(-1, y.clamp(0)[..., None]).mean()
    else:  # z-loss
        loss = F.cross_entropy(z.flatten(0, 1), y.flatten(), **options).mean() + 0.1 * z.logsumexp(-1).square().mean()
    return (loss * torch.arange(1, loss.numel() + 1).view(loss.shape)).mean() if loss.dim() else loss


READS = {
    "argmax": lambda z: z.detach().gather(-1, z.argmax(-1, keepdim=True)),  # rounding may choose another one
    "values": lambda z: z.detach().clone(),
    "softmax": lambda z: z.softmax(-1),
    "numpy": lambda z: torch.from_numpy(z.detach().float().numpy().copy()),
    "one": lambda z: torch.tensor(z[0, 0, 0].item()),
    "last": lambda z: z[:, -1].topk(2).values,
    "type": lambda z: torch.tensor([*z.shape, *z.stride(), z.requires_grad, z.is_leaf]),
}


def write_weight(model, optimizer, how):
    weight = model.head.weight
    if how == "optimizer":
        optimizer.step()
    elif how == "load":
        model.load_state_dict({name: 0.9 * t for name, t in model.state_dict().items()})
    elif weight.grad is not None:
        with torch.no_grad():
            if how == "sgd":
                weight -= 0.1 * weight.grad
            elif how == "foreach":
                torch._foreach_add_([weight], [weight.grad], alpha=-0.1)
            else:
                weight.data.add_(weight.grad, alpha=-0.1)


def draw_loss(rng):
    return {
        "kind": rng.choice(("flat", "flat", "flat", "second", "permuted", "nll", "nll second", "gather", "z")),
        "reduction": rng.choice(("mean", "mean", "sum", "none")),
        "ignore": rng.choice((-100, -1, 5)),
        "smoothing": rng.choice((0.0, 0.0, 0.1)),
    }


def draw(rng):
    usual = {"changes": draw_changes(rng), "loss": draw_loss(rng)}
    steps = []
    for _ in range(rng.choice((2, 3, 4, 5, 6))):
        other = rng.random() < 0.15
        how = {"changes": draw_changes(rng), "loss": draw_loss(rng)} if other else usual
        call = rng.choices(("script", "inside", "autocast", "no_grad", "checkpoint", "compiled"), (5, 5, 2, 1, 1, 0.2))[
            0
        ]
        steps.append(("forward", call, how))
        if rng.random() < 0.15:
            steps.append((rng.choice(("hook", "retain_grad")),))
        if rng.random() < 0.15:
            steps.append(("read", rng.choice(list(READS))))
        if rng.random() < 0.1:
            steps.append(("write", rng.choice(("sgd", "foreach", "data", "load"))))
        if rng.random() < 0.9:
            steps.append(("backward", rng.random() < 0.15, rng.random() < 0.1))
        if rng.random() < 0.2:
            steps.append(("read", rng.choice(list(READS))))
        if rng.random() < 0.5:
            steps.append(("write", rng.choice(("optimizer", "optimizer", "sgd", "foreach", "data", "load"))))
            if rng.random() < 0.3:
                steps.append(("read", rng.choice(list(READS))))
        if rng.random() < 0.3:
            steps.append(("zero_grad",))
        if rng.random() < 0.1:
            steps.append((rng.choice(("deepcopy", "pickle", "mode", "revert", "freeze", "again")),))
    return {
        "seed": rng.randrange(1 << 30),
        "tied": rng.random() < 0.5,
        "dtype": rng.choices(list(DTYPES), (6, 2, 1))[0],
        "prefer": "memory",
        "steps": steps,
    }


def draw_changes(rng):
    usual = [name for name in CHANGES if not name.endswith("!")]
    found = [rng.choice(usual) for _ in range(rng.choice((0, 0, 1, 2)))]
    return [*found, rng.choice([name for name in CHANGES if name.endswith("!")])] if rng.random() < 0.15 else found


def features(program):
    yield f"tied {program['tied']}"
    yield f"dtype {program['dtype']}"
    for step in program["steps"]:
        if step[0] == "forward":
            yield f"call {step[1]}"
            yield f"loss {step[2]['loss']['kind']}"
            yield from (f"change {name}" for name in step[2]["changes"])
        else:
            yield " ".join(str(part) for part in step[:2])


def run(program, ours, noise=0):
    few = mock.patch.object(head, "FEWEST", 1) if ours else contextlib.nullcontext()
    with few:
        return _run(program, ours, noise)


def _run(program, ours, noise):
    log = Log()
    torch.manual_seed(program["seed"])
    dtype = DTYPES[program["dtype"]]
    model = Model(program["tied"])
    draws = torch.Generator().manual_seed(noise)
    rounds = any(step[:2] == ("forward", "autocast") for step in program["steps"])
    eps = torch.finfo(torch.bfloat16 if rounds else dtype).eps
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + eps * torch.randn(p.shape, generator=draws)) if noise else None
    model.to(dtype)
    if ours:
        hfnn.convert(model, prefer=program["prefer"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    z = loss = None
    saved = False  # whether a backward is still possible: then writes to `.data` are not noticed, by torch neither
    for at, step in enumerate(program["steps"]):
        kind = step[0]
        with log.attempt(f"{kind} {at}"):
            if kind == "forward":
                z, loss = forward(model, step, log)
                saved = True
                if loss is not None:
                    log.tensor(f"value loss {at}", loss)
            elif kind == "backward" and loss is not None and loss.requires_grad:
                if step[2]:
                    log.tensor(
                        f"grad logits {at}", torch.autograd.grad(loss, z, retain_graph=True, allow_unused=True)[0]
                    )
                try:
                    loss.backward(retain_graph=step[1])
                except RuntimeError:
                    optimizer.zero_grad()  # a part of them may be there
                    raise
                saved = step[1]
                for name, p in model.named_parameters():
                    log.tensor(f"grad {at} {name}", p.grad)
            elif kind == "hook" and z is not None and z.requires_grad:
                z.register_hook(lambda g, at=at: log.tensor(f"grad hook {at} {len(log.seen)}", g))
            elif kind == "retain_grad" and z is not None and z.requires_grad:
                z.retain_grad()
            elif kind == "read" and z is not None:
                log.tensor(f"value read {at}", READS[step[1]](z))
            elif kind == "write" and not (step[1] == "data" and saved):
                write_weight(model, optimizer, step[1])
            elif kind == "zero_grad":
                optimizer.zero_grad()
            elif kind in ("deepcopy", "pickle"):
                model = copy.deepcopy(model) if kind == "deepcopy" else pickle.loads(pickle.dumps(model))
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
            elif kind == "mode":
                model.train(not model.training)
            elif kind == "freeze":
                model.head.requires_grad_(not model.head.weight.requires_grad)
            elif kind == "revert" and ours:
                hfnn.revert(model)
            elif kind == "again" and ours:
                hfnn.convert(model, prefer=program["prefer"])
    if ours and (use := vars(model.head).get("_hfnn_use")) is not None:
        log.features |= {"no logits"} if use.unread >= head.CALLS and not use.read else set()
        log.features |= {"always logits"} if use.read >= head.CALLS else set()
    for name, p in model.named_parameters():
        log.tensor(f"value end {name}", p)
    return log


def forward(model, step, log):
    _, call, how = step
    if "float" in how["changes"] and log.coarse is None:
        log.coarse = torch.float32
    x = torch.randint(0, VOCABULARY - 1, (ROWS, SEQ))
    y = torch.randint(0, VOCABULARY, (ROWS, SEQ))
    if how["loss"]["ignore"] == -1:
        y[0, :2] = -1
    if call == "autocast":
        log.coarse = torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            return model(x, y, how)
    if call == "no_grad":
        with torch.no_grad():
            return model(x, y, how)
    if call == "checkpoint":
        return checkpoint(model, x, y, how, use_reentrant=False)
    if call == "compiled":
        return torch.compile(model, backend="eager")(x, y, how)
    if call == "inside":
        return model(x, y, how)
    z = changed(model(x), how["changes"])
    return z, loss_of(z, y, how["loss"])


def _keeps_weights(program, difference):
    """The documented error under autocast: a weight is kept where torch keeps a cast."""
    told = "Under autocast hfnn.Linear keeps its weight", "where torch's may have kept a copy of it"
    return isinstance(difference.ours, Raised) and any(text in difference.ours.text for text in told)


def _hook_of_a_view(program, difference):
    """A hook on a view of logits with two readers sees the gradient of each reader, not their sum."""
    views = any("shift" in step[2]["changes"] for step in program["steps"] if step[0] == "forward")
    return views and difference.label.startswith("grad hook")


def keeping_copies(program):
    """A run of stock that keeps copies of what it saves, so that later writes do not matter."""
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
        return _run(program, False, 0)


def _changed_by_hand(program, difference):
    """Logits read after a write to the weights by hand, before a backward of their loss: refused, with a reason."""
    return isinstance(difference.ours, Raised) and "not computed in forward" in difference.ours.text


FUZZER = Fuzzer(
    name="own_heads",
    draw=draw,
    features=features,
    run=run,
    expected=(
        "no logits", "always logits", "call script", "call inside", "call autocast", "call checkpoint",
        *(f"loss {kind}" for kind in ("flat", "second", "permuted", "nll", "nll second", "gather", "z")),
        *(f"read {name}" for name in READS), "tied True", "tied False", "hook", "retain_grad",
    ),
    known=(
        Known("weights written to before backward", "docs/design.md", _keeps_weights),
        Known("a hook of a view", "a node for views of logits", _hook_of_a_view),
        Known("weights written by hand", "docs/design.md", _changed_by_hand),
    ),
    lenient=keeping_copies,
    faults={
        "the classes second taken for last": patched(
            logits.Epilogue, "loss", lambda own: lambda self, z, function, target, *rest: own(
                self, z, function, target.transpose(0, -1).reshape(target.shape), *rest)
        ),
        "no check of the weights": patched(product.Product, "change", lambda own: lambda self, *a, **k: None),
        "the soft cap forgotten": patched(
            logits.Epilogue, "_fused", lambda own: lambda self, *a: own(dataclasses.replace(self, capped=False), *a)
        ),
        "a checkpoint's forwards differ": patched(head, "in_checkpoint", lambda own: lambda: False),
    },
)  # fmt: skip
