"""User actions on a model, for the fuzzer of `hfnn.convert`: one method of `Session` per step.

Those between calls are in convert_changes.py.
"""

import concurrent.futures
import contextlib
import gc
import traceback
import weakref

import convert_around
import convert_models as models
import convert_modules as own
import torch
from convert_around import DTYPES, saved_tensor_hooks
from convert_bytes import kept_bytes
from convert_changes import Changes
from convert_head import Head, count_tensors
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from hfnn.core import parts

EPS = {"float64": 1e-15, "float32": 2e-7, "float16": 1e-3, "bfloat16": 8e-3}
LOSSES = ("weighted", "square", "part", "sum")
CRITERIA = ("CrossEntropyLoss", "MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BCEWithLogitsLoss", "NLLLoss")


class Session(Head, Changes):
    """A model, its inputs and derived tensors, while the steps of a program run."""

    def __init__(self, program, ours, noise, log):
        self.program, self.ours, self.noise, self.log = program, ours, noise, log
        self.draws = torch.Generator().manual_seed(program["seed"] + 1)
        self.moves = torch.Generator().manual_seed(noise)
        self.dtype = DTYPES[program["dtype"]]
        self.coarse = coarsest(program)
        log.coarse, log.all_strides, log.zero = DTYPES[self.coarse], True, EPS[self.coarse]
        self.losses, self.handles, self.recorded, self.optimizer, self.y = [], [], [], None, None
        self.at, self.raised = "start", False
        self.retained = False  # whether a graph that backward has run through is still retained
        own.seen.clear(), own.kept.clear()
        self.build()
        self.head, self.logits, self.ended = None, None, False
        calls = [step[2] for step in program["steps"] if step[0] == "forward"]
        # Hooks of saved tensors, in torch too, leave cycles that nothing collects.
        self.hooked = any(call["hooks"] or call["call"] in ("checkpoint", "reentrant") for call in calls)
        self.hooked |= any(layer[0] in ("packed", "checkpoint") for layer, _ in models.walk(program["model"]))
        if program["head"]:
            self.head = nn.Linear(program["D"], 11).to(self.dtype)
        self.x = [self.input(layout) for layout in program["inputs"]]

    def build(self):
        program = self.program
        body = models.sequential(program["D"], program["model"])
        if program["tokens"]:
            body.insert(0, nn.Embedding(11, program["D"], padding_idx=0))
        model = own.Model(body, getattr(nn, program["loss"])() if program["loss"] in CRITERIA else None)
        model.to(self.dtype)
        if program["mixed"]:
            for module in model.modules():
                if isinstance(module, (nn.LayerNorm, nn.RMSNorm, own.RMSNormLike)):
                    module.float()
        if program["memory_format"]:
            model.to(memory_format=torch.channels_last)
        with torch.no_grad():
            for p in model.parameters():
                self.move(p)
        self.model = model
        self.convert()

    def move(self, t):
        """Moves a tensor by about an ulp in runs with noise."""
        if self.noise and t.is_floating_point() and t.numel():
            by = torch.randn(t.shape, generator=self.moves, dtype=torch.float64)
            t.mul_((1 + EPS[self.coarse] * by).to(t.dtype))
        return t

    def random(self, shape, dtype=None):
        return self.move(torch.randn(shape, generator=self.draws).to(dtype or self.dtype))

    def shape(self):
        return models.shape(self.program)

    def input(self, layout):
        shape = self.shape()
        if self.program["tokens"]:
            return torch.randint(0, 11, shape[:-1], generator=self.draws)
        x = self.random(shape)
        if layout == "numpy":
            return torch.from_numpy(x.float().numpy()) if self.dtype in (torch.float32, torch.bfloat16) else x
        if layout == "transposed":
            x = x.transpose(0, 1).contiguous().transpose(0, 1)
        elif layout == "channels_last" and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        elif layout == "slice":
            x = torch.cat([x, x], -1)[..., : shape[-1]]
        elif layout == "cut":  # a slice of a larger batch; a batch of one may not look like it
            x = torch.cat([x, x])[: shape[0]]
            x = x.as_strided(shape, (7, *x.stride()[1:])) if shape[0] == 1 else x
        elif layout == "reversed":
            x = x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
        return x.detach().requires_grad_(self.program["input_grad"])

    # Forward and loss.

    def forward(self, which, how):
        x, self.y = self.x[which % len(self.x)], None
        with contextlib.ExitStack() as stack:
            if how["autocast"]:
                stack.enter_context(torch.autocast("cpu", DTYPES[how["autocast"]]))
            if how["grad"] != "on":
                stack.enter_context(torch.no_grad() if how["grad"] == "no" else torch.inference_mode())
            stack.enter_context(saved_tensor_hooks(how["hooks"]))
            stack.enter_context(self.flops())
            output = getattr(self, "call_" + how["call"])(x)
        version = 0 if output.is_inference() else output._version
        y = output if how["view"] == "none" else self.view(output, how["view"])
        self.log.tensor(f"value {self.at} y", y)
        if y.requires_grad:
            low = how["autocast"] if self.program["loss_in_autocast"] else None
            with torch.autocast("cpu", DTYPES[low or "bfloat16"], enabled=low is not None):
                self.losses.append(self.loss(y))
            self.log.tensor(f"value {self.at} loss", self.losses[-1])
            if not self.program["sharded"]:  # then norms keep copies of their weights
                own_by_user = (*self.x, *self.model.parameters(), *self.model.buffers())
                self.log.note(f"bytes {self.at}", kept_bytes(self.losses[-1], own_by_user))
                self.log.features.add("bytes counted")
            self.add_head(y)
        self.y, self.y_version = output, version

    def call_plain(self, x):
        return self.model(x)

    def call_twice(self, x):
        y = self.model(x)
        return y if self.program["tokens"] else self.model(y)

    def call_checkpoint(self, x):
        return checkpoint(self.model, x, use_reentrant=False)

    def call_reentrant(self, x):
        return checkpoint(self.model, x, use_reentrant=True)

    def call_functional(self, x):
        parameters = {name: p * 0.5 for name, p in self.model.named_parameters()}
        return torch.func.functional_call(self.model, parameters, (x,))

    def call_vmap(self, x):
        return torch.func.vmap(self.model, randomness="different")(x)

    def call_func_grad(self, x):
        with convert_around.no_copying():
            return torch.func.grad(lambda x: self.model(x).float().square().sum())(x.detach())

    def call_thread(self, x):
        return self.in_threads(1, lambda: self.model(x))[0]

    def call_threads(self, x):
        """Two threads run the model concurrently, each with its own backward."""
        weights = [p for p in self.model.parameters() if p.requires_grad]

        def run():
            y = self.model(x.detach().clone())
            return torch.autograd.grad(y.float().square().sum(), weights, allow_unused=True)

        for i, grads in enumerate(self.in_threads(2, run)):
            for n, g in enumerate(grads or ()):
                self.log.tensor(f"grad {self.at} thread {i} weight {n}", g)
        return self.model(x)

    @staticmethod
    def in_threads(count, function):
        def run():
            with saved_tensor_hooks(None):
                try:
                    return function()
                except Exception as error:  # a checkpoint's generator pops hooks in the thread in which it ends
                    traceback.clear_frames(error.__traceback__)
                    raise

        with concurrent.futures.ThreadPoolExecutor(count) as threads:
            return [each.result() for each in [threads.submit(run) for _ in range(count)]]

    def view(self, y, how):
        """What users do to an output before the loss."""
        if how == "permuted":
            return y.permute(*reversed(range(y.dim()))).view(-1)
        if how == "flat":
            return y.view(-1)
        if how == "item":
            return y[:1]
        if how == "relu_":
            return torch.relu_(y)
        if how == "add_":
            y += 1
            return y
        return y.float().mul_(2)

    def loss(self, y):
        kind = self.program["loss"]
        if kind in CRITERIA and y.shape == self.shape():
            features_last = y.movedim(1, -1) if self.program["layout"] in models.FIRST else y
            rows = features_last.flatten(0, -2)
            if kind == "CrossEntropyLoss" and self.program["probabilities"]:  # float32, whatever the logits are
                target = torch.rand(rows.shape, generator=self.draws).softmax(-1)
            elif kind in ("CrossEntropyLoss", "NLLLoss"):
                target = torch.randint(0, rows.shape[-1], rows.shape[:1], generator=self.draws)
            else:
                target = torch.rand(rows.shape, generator=self.draws).to(y.dtype)
            return self.model.criterion(rows, target)
        if kind == "square":
            return y.square().mean()
        if kind == "part":
            return (y[..., : max(1, y.shape[-1] // 2)] if y.dim() else y).float().square().sum()
        return y.sum() if kind == "sum" else (y * self.random(y.shape, y.dtype)).sum()

    # Backward.

    def backward(self, how):
        if not self.losses:
            return
        losses = self.losses if how["which"] != "last" else self.losses[-1:]
        inputs = self.wanted(how["inputs"])

        def run():
            with self.flops():
                self.run_backward(losses, how, inputs)

        self.in_threads(1, run) if how["thread"] else run()
        partial = how["inputs"] is not None or len(losses) < len(self.losses)
        self.retained = self.retained or how["retain"] or partial
        if not how["retain"]:
            self.losses = [] if losses is self.losses else self.losses[:-1]
        losses, run, self.ended = None, None, how["inputs"] is None
        self.log_grads()
        self.log_alive("after backward")

    @contextlib.contextmanager
    def flops(self):
        """Logs what torch's counter counts, by class of operator: fused or not, a product is a product."""
        if not self.program["flops"]:
            yield
            return
        with FlopCounterMode(display=False) as counter:
            yield
        found = {}
        for op, count in counter.get_flop_counts().get("Global", {}).items():
            name = "product" if op.__name__.endswith("mm") else op.__name__
            found[name] = found.get(name, 0) + count
        self.log.note(f"flops {self.at}", tuple(sorted(found.items())))

    def run_backward(self, losses, how, inputs):
        options = {"retain_graph": how["retain"]}
        if inputs is not None:
            options["inputs"] = inputs
        if how["which"] == "each":
            for n, loss in enumerate(losses):
                loss.backward(**{**options, "retain_graph": how["retain"] or n + 1 < len(losses)})
        else:
            sum(losses).backward(**options)

    def wanted(self, which):
        weights = [p for p in self.model.parameters() if p.requires_grad]
        x = [x for x in self.x if x.requires_grad]
        chosen = {None: None, "x": x, "weights": weights, "first": weights[:1], "last": weights[-1:]}[which]
        return chosen if chosen is None else chosen or x or weights

    def split(self):
        """The gradients of the inputs first, then those of the weights, as in zero-bubble schedules."""
        if not self.losses:
            return
        loss = self.losses[-1]
        for which in ("x", "weights"):
            wanted = self.wanted(which)
            found = torch.autograd.grad(loss, wanted, retain_graph=which == "x", allow_unused=True)
            for n, g in enumerate(found):
                self.log.tensor(f"grad {self.at} {which} {n}", g)
        self.losses.pop()

    def penalty(self, which):
        if not self.losses:
            return
        loss = self.losses.pop()
        wanted = self.wanted(which)
        grads = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
        for n, g in enumerate(grads):
            self.log.tensor(f"grad {self.at} {which} {n}", g)
        self.log_nones(wanted)
        sum(g.float().square().sum() for g in grads if g is not None).backward()
        self.log_grads()

    def log_nones(self, wanted):
        """Which second derivatives of the output are None. The loss's would depend on more."""
        if self.y is None or not self.y.requires_grad or not self.y.numel():
            return
        options = {"allow_unused": True, "retain_graph": True}
        first = torch.autograd.grad(self.y, wanted, torch.ones_like(self.y), create_graph=True, **options)
        for n, g in enumerate(first):
            if g is not None and g.requires_grad:
                second = torch.autograd.grad(g.sum(), wanted, **options)
                self.log.note(f"none {self.at} {n}", tuple(s is None for s in second))
            else:
                self.log.note(f"none {self.at} {n}", g is None)

    def batched(self, which):
        if not self.losses:
            return
        wanted = self.wanted(which)
        self.losses.pop()
        ones = self.random((3, *self.y.shape), self.y.dtype)
        found = torch.autograd.grad(self.y, wanted, ones, is_grads_batched=True, allow_unused=True)
        for n, g in enumerate(found):
            self.log.tensor(f"grad {self.at} {which} {n}", g)

    # What is compared.

    def run(self, at, name, arguments):
        self.at = at
        try:
            getattr(self, name)(*arguments)
        except Exception:
            self.zero_grad(to_none=True)  # how far a backward came before it raised is not compared
            for t in own.kept:
                t.grad = None
            self.recorded.clear()
            self.raised = True  # torch then keeps some nodes alive for ever (seen, without hfnn)
            raise

    def log_versions(self):
        tensors = [t for t in (*self.x, self.y) if t is not None and not t.is_inference()]
        # For an output, only changes since it was returned: a product and an in-place addition are one op.
        versions = [t._version - (self.y_version if t is self.y else 0) for t in tensors]
        self.log.note(f"version {self.at} x and y", tuple(versions))
        for n, (what, t) in enumerate(self.recorded):
            self.log.tensor(f"hook {self.at} {what} {n}", t)
        self.recorded.clear()

    def log_grads(self):
        for name, p in self.model.named_parameters():
            self.log.tensor(f"grad {self.at} {name}", p.grad)
        for n, x in enumerate(self.x):
            self.log.tensor(f"grad {self.at} x{n}", x.grad)
        for n, t in enumerate(own.kept):
            self.log.tensor(f"grad {self.at} kept {n}", t.grad)
        if self.head is not None:
            self.log.tensor(f"grad {self.at} head", self.head.weight.grad)

    def log_modes(self):
        self.log.note(f"modes {self.at}", tuple(module.training for module in self.model.modules()))

    def log_weights(self):
        for name, p in self.model.named_parameters():
            self.log.tensor(f"value {self.at} {name}", p)

    def log_alive(self, when):
        """Logs how many tensors that passed probes are alive, if no graph is left that backward may use."""
        if not (self.losses or self.retained or own.kept or self.raised):
            self.log.note(f"alive {self.at} {when}", sum(not ref.expired() for ref in own.seen))
            if self.optimizer is None and self.head is None and not self.hooked:
                self.log.note(f"alive {self.at} {when} objects", count_tensors())

    def close(self):
        """The final comparison: buffers and weights, and what is alive once the user holds nothing."""
        self.at = "end"
        for name, b in self.model.named_buffers():
            self.log.tensor(f"value end {name}", parts.numbers(b))
        refs = [weakref.ref(module) for module in self.model.modules()]
        refs += [weakref.ref(p) for p in self.model.parameters()]
        memory = [*own.seen, *(StorageWeakRef(x.untyped_storage()) for x in self.x)]
        self.unhook()
        own.kept.clear()
        self.model = self.optimizer = self.y = self.x = self.losses = self.head = self.logits = None
        gc.collect()
        gc.freeze()  # caches and imports of a program: the next collection need not scan them
        if not self.raised:
            self.log.note("alive end modules", sum(ref() is not None for ref in refs))
            self.log.note("alive end tensors", sum(not ref.expired() for ref in memory))
        own.seen.clear()


def coarsest(program) -> str:
    """The dtype with the largest ulps that a program may compute in."""
    found = {program["dtype"], *(step[2]["autocast"] for step in program["steps"] if step[0] == "forward")}
    for layer, _ in models.walk(program["model"]):
        if layer[0] in ("autocast", "cast"):
            found.add(layer[2])
    found |= {step[1] for step in program["steps"] if step[0] == "cast"}
    calls = [step[2] for step in program["steps"] if step[0] == "forward"]
    if program["loss"] == "part" or any(call["view"] == "float" or call["call"] == "threads" for call in calls):
        found.add("float32")
    return max(found - {None}, key=EPS.__getitem__)
