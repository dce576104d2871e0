"""The fuzzer of captured models: training loops with a model, captured and uncaptured.

A program is a dict: layers of a small network, what it returns, and actions between and within steps. Graphs are CUDA's
where there is a GPU, else played on the CPU (played_graphs.py). Both sides must agree bitwise: losses, outputs,
gradients, buffers, parameters, calls of hooks and errors. Where stock torch raises because a tensor was written to
before backward, ours may succeed.
"""

import contextlib
import copy
import hashlib
import pickle
import random
import warnings

import torch
from capture_faults import FAULTS
from capture_models import HABITS, LAYERS, RESULTS, WIDTH, Net, Result
from engine import Fuzzer, Known, Log, Raised
from played_graphs import DEVICE, played
from torch import nn

import hfnn
from hfnn.capture import captured
from hfnn.memory.peak import tensors as tensors_of

ROWS = (6, 3)
ACTIONS = {
    "train": 14, "accumulate": 4, "evaluate": 2, "infer": 0.7, "mode": 1.5, "between": 1.5, "two losses": 1.2,
    "twice": 1.2, "second": 0.7, "drop": 1, "write weight": 0.8, "refill": 1.2, "attribute": 0.8, "freeze": 1,
    "data": 0.6, "replace": 0.6, "load": 0.8, "inner hook": 0.4, "parameter hook": 0.6, "outer hook": 0.5,
    "keep gradients": 1.2, "copy": 0.6, "pickle": 0.5, "revert": 0.5, "argument": 1, "wrong": 0.5,
    "write output": 0.7, "input gradient": 1.5, "part": 0.7, "other output": 0.7, "transform": 0.7,
    "global hook": 0.6, "checkpoint": 0.5, "autocast": 1, "clip": 0.7,
}  # fmt: skip


def draw(rng) -> dict:
    layers = [rng.choice(LAYERS) for _ in range(rng.choice((1, 2, 2, 3, 4)))]
    actions = [_action(rng, "train") for _ in range(rng.choice((0, 4, 5)))]
    actions += [_action(rng) for _ in range(rng.choice((4, 6, 8, 12)))]
    return {
        "seed": rng.randrange(1 << 30),
        "layers": layers,
        "returns": rng.choice(RESULTS),
        "habit": rng.choice(HABITS) if rng.random() < 0.12 else None,
        "converted": rng.random() < 0.4,
        "momentum": rng.choice((0.0, 0.9)),
        "shapes": rng.choice((1, 2, 8)),
        "actions": actions,
    }


def _action(rng, name=None) -> tuple:
    name = name or rng.choices(list(ACTIONS), list(ACTIONS.values()))[0]
    return name, rng.choices(ROWS, (5, 1))[0], rng.random() < 0.7, rng.randrange(4)


def features(program) -> set[str]:
    found = {f"layer {kind}" for kind in program["layers"]} | {f"returns {program['returns']}"}
    found |= {f"action {name}" for name, *_ in program["actions"]}
    found |= {"converted"} if program["converted"] else set()
    found |= {f"habit {program['habit']}"} if program["habit"] else set()
    return found


EXPECTED = (
    *(f"layer {kind}" for kind in LAYERS), *(f"returns {kind}" for kind in RESULTS),
    *(f"habit {kind}" for kind in HABITS),
    *(f"action {name}" for name in ACTIONS), "converted",
)  # fmt: skip


class Session:
    """A model and its optimizer, on one side."""

    def __init__(self, program, ours, log, copies):
        self.program, self.ours, self.log, self.copies = program, ours, log, copies
        self.model = Net(program).train().to(DEVICE)
        self.number, self.done, self.kept, self.hooked = 0, 0, [], 0
        self.convert()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=program["momentum"])

    def convert(self):
        if self.program["converted"]:
            hfnn.convert(self.model, prefer="memory")
        if self.ours:
            captured.capture(self.model, self.program["shapes"])

    def parameters(self):
        return [*self.model.parameters()]

    def input(self, rows, grad=False):
        self.number += 1
        generator = torch.Generator().manual_seed(self.program["seed"] + self.number)
        torch.manual_seed(self.number)
        random.seed(self.number)
        return torch.randn(rows, WIDTH, generator=generator).to(DEVICE).requires_grad_(grad)

    def loss(self, *args, **kwargs):
        found = self.model(*args, **kwargs)
        self.last_outputs = [*tensors_of(vars(found) if isinstance(found, Result) else found)]
        if isinstance(found, torch.Tensor):
            return found.square().sum(), found
        loss, y = (found[0], found[1][0]) if isinstance(found, tuple) else (
            (found["loss"], found["y"]) if isinstance(found, dict) else (found.loss, found.hidden)
        )  # fmt: skip
        return loss + y.sum() if self.program["returns"] == "several used" else loss, y

    def do(self, action, rows, flag, number):
        self.done += 1
        label = f"{self.done} {action}"
        with (
            self.log.attempt(label),
            self.copied() if self.copies and action != "transform" else contextlib.nullcontext(),
        ):
            getattr(self, action.replace(" ", "_"))(rows, flag, number)
        self.bits("parameters", self.parameters())
        self.bits("buffers", [*self.model.buffers()])
        self.bits("gradients", [p.grad for p in self.parameters()])
        self.bits("kept", self.kept)
        self.log.note(
            f"calls {self.number} {len(self.log.seen)}", (self.hooked, self.model.calls, len(self.model.seen))
        )
        self.log.note(f"random {self.number} {len(self.log.seen)}", random.random())

    def copied(self):
        """Backward works on copies of the saved tensors: it is right whatever is written to."""
        return torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)

    def bits(self, what, tensors):
        digest = hashlib.sha256()
        for t in tensors:
            raw = b"none" if t is None else t.detach().cpu().numpy().tobytes()
            digest.update(raw if t is None else repr((t.shape, t.dtype)).encode() + raw)
        self.log.note(f"{what} {self.number} {len(self.log.seen)}", digest.hexdigest())

    # The parts of a step

    def train(self, rows, flag, number, **kwargs):
        self.optimizer.zero_grad(set_to_none=flag)
        loss, _ = self.loss(self.input(rows), **kwargs)
        self.bits("loss", [loss])
        loss.backward()
        self.optimizer.step()

    def accumulate(self, rows, flag, number):
        self.optimizer.zero_grad(set_to_none=flag)
        for _ in range(2 + number % 2):
            loss, _ = self.loss(self.input(rows))
            loss.backward()
        self.bits("gradients", [p.grad for p in self.parameters()])
        self.optimizer.step()

    def evaluate(self, rows, flag, number):
        with torch.no_grad():
            self.bits("outputs", self.loss(self.input(rows)))

    def infer(self, rows, flag, number):
        with torch.inference_mode():
            self.bits("outputs", self.loss(self.input(rows)))

    def mode(self, rows, flag, number):
        self.model.train(not self.model.training) if number % 2 else self.model.layers[0].eval()

    def between(self, rows, flag, number):
        loss, _ = self.loss(self.input(rows))
        self.evaluate(ROWS[number % 2], flag, number)
        loss.backward()

    def two_losses(self, rows, flag, number):
        first, _ = self.loss(self.input(rows))
        second, _ = self.loss(self.input(ROWS[number % 2]))
        if "spectral norm" in self.program["layers"]:  # a weight that is read twice: sums would be in another order
            first.backward()
            second.backward()
        else:
            (first + second).backward()

    def twice(self, rows, flag, number):
        loss, _ = self.loss(self.input(rows))
        loss.backward(retain_graph=True)
        self.bits("gradients", [p.grad for p in self.parameters()])
        if flag:
            self.evaluate(rows, flag, number)
        loss.backward(retain_graph=number == 0)
        if number == 0:
            loss.backward()

    def second(self, rows, flag, number):
        x = self.input(rows, grad=True)
        loss, _ = self.loss(x)
        (dx,) = torch.autograd.grad(loss, x, create_graph=True)
        self.bits("dx", [dx])
        (loss + dx.square().sum()).backward()

    def drop(self, rows, flag, number):
        found = self.loss(self.input(rows))
        self.bits("outputs", found)

    def write_weight(self, rows, flag, number):
        if number == 2:
            self.model.last.weight.requires_grad_(False)
            for _ in range(4):
                self.train(rows, flag, number)
        loss, _ = self.loss(self.input(rows))
        if number == 2:
            loss.backward(retain_graph=True)
        with torch.no_grad():
            self.model.last.weight.mul_(0.5)
            for buffer in self.model.buffers():
                buffer.mul_(2) if number == 3 else None
        loss.backward()

    def refill(self, rows, flag, number):
        x = self.input(rows)
        loss, _y = self.loss(x)
        with torch.no_grad():
            x.fill_(3.0)
        loss.backward()

    def clip(self, rows, flag, number):
        loss, _ = self.loss(self.input(rows))
        loss.backward()
        self.bits("norm", [torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)])
        self.optimizer.step()

    def input_gradient(self, rows, flag, number):
        x = self.input(rows, grad=True)
        x = x * 1 if flag else x
        loss, _ = self.loss(x)
        self.bits("dx", torch.autograd.grad(loss, [x, *(p for p in self.parameters() if p.requires_grad)]))

    def part(self, rows, flag, number):
        loss, _ = self.loss(self.input(rows))
        self.bits("gradient", torch.autograd.grad(loss, [self.model.last.weight]))

    def other_output(self, rows, flag, number):
        _, y = self.loss(self.input(rows))
        y.sum().backward()

    def checkpoint(self, rows, flag, number):
        x = self.input(rows, grad=True)
        y = torch.utils.checkpoint.checkpoint(lambda x: self.loss(x)[0], x, use_reentrant=flag)
        y.backward()

    def transform(self, rows, flag, number):
        x = self.input(rows)
        with torch.no_grad() if flag else contextlib.nullcontext():
            self.bits("dx", [torch.func.grad(lambda x: self.loss(x)[0])(x)])
            self.bits("tangent", [torch.func.jvp(lambda x: self.loss(x)[0], (x,), (x,))[1]])

    def global_hook(self, rows, flag, number):
        handle = torch.nn.modules.module.register_module_forward_hook(self.count)
        try:
            self.evaluate(rows, flag, number)
        finally:
            handle.remove()

    def autocast(self, rows, flag, number):
        with torch.autocast(DEVICE, torch.bfloat16):
            loss, _ = self.loss(self.input(rows))
            if flag:
                loss.float().backward()
        if not flag:
            loss.float().backward()

    def write_output(self, rows, flag, number):
        _loss, y = self.loss(self.input(rows))
        (y * 2).sum().backward() if flag else None
        with torch.no_grad():
            y.zero_()
        self.bits("outputs", self.last_outputs)

    def argument(self, rows, flag, number):
        more = self.input(rows) if number == 0 else None
        self.train(rows, flag, number, scale=(1.0, 0.5, 2, True)[number], more=more)

    def wrong(self, rows, flag, number):
        self.loss(torch.randn(rows, WIDTH + 1, device=DEVICE))

    # Changes of a model

    def attribute(self, rows, flag, number):
        for module in self.model.modules():
            if isinstance(module, nn.Dropout) and module.p:
                module.p = 0.1 * number
        if flag:
            self.model.gain = 1.0 + number

    def freeze(self, rows, flag, number):
        p = self.parameters()[number % len(self.parameters())]
        p.requires_grad_(not p.requires_grad)

    def data(self, rows, flag, number):
        p = self.parameters()[number % len(self.parameters())]
        p.data = p.data * 0.5

    def replace(self, rows, flag, number):
        self.model.last.weight = nn.Parameter(self.model.last.weight.detach() * 0.5)

    def load(self, rows, flag, number):
        self.model.load_state_dict(
            {name: t * 0.5 for name, t in self.model.state_dict().items() if t.is_floating_point()}, strict=False
        )

    def inner_hook(self, rows, flag, number):
        self.model.last.register_forward_hook(self.count)

    def outer_hook(self, rows, flag, number):
        self.model.register_forward_hook(self.count)

    def count(self, *args):
        self.hooked += 1

    def parameter_hook(self, rows, flag, number):
        if self.model.last.weight.requires_grad:
            self.model.last.weight.register_hook(lambda g: g * 2)

    def keep_gradients(self, rows, flag, number):
        self.kept = [p.grad for p in self.parameters() if p.grad is not None]
        if flag:
            self.optimizer.zero_grad()

    def copy(self, rows, flag, number):
        self.renew(copy.deepcopy(self.model))

    def pickle(self, rows, flag, number):
        if not any(module._forward_hooks for module in self.model.modules()):
            self.renew(pickle.loads(pickle.dumps(self.model)))

    def renew(self, model):
        before, self.model = self.model, model
        if self.ours:
            assert (captured.of(model) is None) is (captured.of(before) is None)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=self.program["momentum"])

    def revert(self, rows, flag, number):
        captured.release(self.model)
        assert captured.of(self.model) is None and "_hfnn_capture" not in vars(self.model)
        if flag:
            hfnn.revert(self.model)
            self.convert()


def run(program, ours, noise=0, copies=False) -> Log:
    log = Log()
    torch.manual_seed(program["seed"])
    random.seed(program["seed"])
    with warnings.catch_warnings(), played():
        warnings.simplefilter("ignore")
        session = Session(program, ours, log, copies)
        for action in program["actions"]:
            session.do(*action)
        if ours and captured.of(session.model):
            counts = vars(session.model)["_hfnn_capture"].counts
            log.features |= {"replayed"} if counts["replayed"] else set()
    return log


def _refused(program, difference) -> bool:
    return isinstance(difference.ours, Raised) and "without capture=True" in difference.ours.text


def _written(program, difference) -> bool:
    """torch does not save every weight, and raises only for writes to those that it saves."""
    says = "modified by an inplace operation", "was written to before backward"
    raised = difference.how == "raises" and any(words in difference.ours.text for words in says)
    return raised and difference.label.endswith("write weight")


FUZZER = Fuzzer(
    "capture",
    draw,
    features,
    run,
    EXPECTED,
    known=(
        Known("a second derivative of what draws or writes", "a limit", _refused),
        Known("weights written to before backward", "a limit", _written),
    ),
    faults=FAULTS,
    lenient=lambda program: run(program, False, copies=True),
)
