"""Runs a program of the fuzzer of optimizers: parameters, an optimizer, and the steps by name.

Both sides run this. Ours uses `hfnn.optim`'s class, or torch's changed by `hfnn.convert`.
"""

import contextlib
import copy
import io
import pickle

import torch
from engine import Log
from torch import nn

import hfnn

LAYOUTS = ("plain", "transposed", "gaps", "channels_last", "offset")
SIGNED = ("exp_avg", "momentum_buffer")
GRADS = ("plain", "same", "reversed", "expanded", "gaps", "negated")
SCHEDULERS = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
    "exponential": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.7),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, Warmup()),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=50),
}


class Warmup:
    """A schedule that can be pickled and copied."""

    def __call__(self, epoch):
        return (epoch + 1) / 4


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """x in another memory layout."""
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "channels_last" and x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    if layout in ("gaps", "offset"):
        wide = (
            torch.zeros(*x.shape, 3, dtype=x.dtype) if layout == "gaps" else torch.zeros(x.numel() + 1, dtype=x.dtype)
        )
        view = wide[..., 1] if layout == "gaps" else wide[1:].view(x.shape)
        return view.copy_(x)
    return x.contiguous()


class Session:
    def __init__(self, program: dict, ours: bool, noise: int, log: Log):
        self.program, self.ours, self.log, self.number = program, ours, log, 0
        self.generator = torch.Generator().manual_seed(program["seed"])
        self.noise = torch.Generator().manual_seed(noise) if noise else None
        self.params = [self._parameter(t) for t in program["tensors"]]
        for t, p in zip(program["tensors"], self.params, strict=True):
            p.requires_grad_(not t["frozen"])
        self.scaler, self.schedulers, self.calls, self.pending = None, [], [], None
        halves = [p.dtype for p in self.params if p.element_size() == 2]
        if any(step[0] in ("clip", "scaled_step") for step in program["steps"]):
            log.coarse = max(halves, key=lambda d: torch.finfo(d).eps, default=None)  # the norm couples them
        self.optimizer = None
        with log.attempt("construct"):
            self.optimizer = self.build(self.groups(), program["options"])

    # Parameters, gradients and the optimizer.

    def random(self, shape, dtype):
        if dtype is torch.complex64:
            return torch.view_as_complex(torch.randn((*shape, 2), generator=self.generator))
        return torch.randn(shape, generator=self.generator).to(dtype)

    def _parameter(self, t) -> nn.Parameter:
        x = self.random(t["shape"], getattr(torch, t["dtype"]))
        if self.noise is not None and x.is_floating_point():
            signs = torch.randint(0, 2, x.shape, generator=self.noise) * 2 - 1
            x = (x.double() * (1 + signs * torch.finfo(x.dtype).eps)).to(x.dtype)
        # torch's fused step treats gaps as elements.
        return nn.Parameter(laid_out(x, "plain" if self.program["options"].get("fused") else t["layout"]))

    def groups(self):
        """As `params` of a constructor: the groups with the initial parameters."""
        groups = []
        for group in self.program["groups"]:
            params = [self.params[i] for i in group["params"]]
            groups.append({"params": params, **group["options"]})
        return self.params[0] if self.program["bad"] == "tensor" else groups

    def build(self, groups, options):
        options = (
            {**options, "lr": torch.tensor(options["lr"], dtype=torch.float64)}
            if self.program["tensor_lr"]
            else options
        )
        name = self.program["class"]
        if self.ours and self.program["build"] == "class":
            return getattr(hfnn.optim, name)(groups, **options)
        optimizer = getattr(torch.optim, name)(groups, **options)
        return hfnn.convert(optimizer) if self.ours else optimizer

    def gradient(self, p, kind):
        if kind == "none":
            return None
        if kind == "sparse":
            return self.random(p.shape, p.dtype).to_sparse() if p.dim() else self.random(p.shape, p.dtype)
        x = self.random(p.shape, p.dtype)
        if p.element_size() == 2:
            # With small 16-bit gradients, torch's Adam rounds the squares to 0 and divides by that.
            x = x + torch.where(x < 0, -2, 2).to(p.dtype)
        if kind == "zero" and p.dtype is not torch.float16:
            return torch.zeros_like(p)
        if self.is_fused():
            kind = "same"  # torch's fused step misreads gradients whose layout is not their parameter's
        if kind == "inf" and x.numel():
            x.view(-1)[0] = torch.inf
        if kind == "same":
            return torch.empty_like(p).copy_(x)
        if kind == "negated":
            return x if p.is_complex() or p.dtype is torch.bfloat16 else torch.complex(x, -x).conj().imag
        if kind == "expanded":
            return x.flatten()[:1].sum().expand(p.shape)
        if kind == "reversed" and p.dim() > 1:
            order = tuple(range(p.dim()))[::-1]
            return x.permute(order).contiguous().permute(order)
        return laid_out(x, kind)

    # The steps.

    def do(self, step: tuple) -> None:
        name, *arguments = step
        self.number += 1
        if self.optimizer is None:
            return
        with self.log.attempt(f"{self.number} {name}"):
            getattr(self, name)(*arguments)
        self.show()

    def grads(self, kinds) -> None:
        for i, p in enumerate(self.params):
            if p.requires_grad:
                p.grad = self.gradient(p, kinds[i % len(kinds)] if kinds else "plain")

    def loss(self):
        """A loss that uses every parameter twice, so that backward needs the parameters themselves."""
        parts = [p.abs().double() if p.is_complex() else p.double() for p in self.params if p.requires_grad]
        return sum((p * p).sum() * (0.1 / (i + 1)) + 2 * p.sum() for i, p in enumerate(parts))

    def backward(self, times) -> None:
        loss = self.loss()
        if isinstance(loss, torch.Tensor):
            for _ in range(times):
                loss.backward(retain_graph=True)

    def stale(self) -> None:
        """A graph made before a step and used after it."""
        self.pending = self.loss()

    def late_backward(self) -> None:
        loss, self.pending = self.pending, None
        # torch's fused step writes without changing versions, so the gradients are wrong.
        if isinstance(loss, torch.Tensor) and not self.is_fused():
            loss.backward()

    def step(self, closure) -> None:
        before = [p._version for p in self.params]

        def evaluate():
            self.optimizer.zero_grad()
            loss = self.loss()
            if isinstance(loss, torch.Tensor):
                loss.backward()
            if closure == "raises":
                raise KeyError("of the closure")
            return loss

        result = self.optimizer.step() if closure == "none" else self.optimizer.step(evaluate)
        if isinstance(result, torch.Tensor):
            if all(p.element_size() > 2 for p in self.params):  # in 16 bits, systematic roundings add up in the sum
                self.log.tensor(f"result {self.number}", result.float())
        else:
            self.log.note(f"result {self.number}", result)
        self.moved(before)

    def is_fused(self) -> bool:
        return self.optimizer is not None and any(group.get("fused") for group in self.optimizer.param_groups)

    def moved(self, before) -> None:
        if not self.is_fused():
            versions = [p._version > v for p, v in zip(self.params, before, strict=True)]
            self.log.note(f"version {self.number}", versions)

    def scaled_step(self, unscale, clip, kind) -> None:
        if self.scaler is None:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        if not any(p.requires_grad for p in self.params):
            return
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss()).backward()
        for p in self.params[:1]:
            if kind == "inf" and p.grad is not None and p.grad.numel():
                p.grad.view(-1)[0] = torch.inf
        # hfnn's step, like torch's fused step, takes float16 gradients and is called when gradients overflow. torch's
        # other steps, and their hooks, are not called then.
        calls = len(self.calls)
        try:
            if unscale or any(p.dtype is torch.float16 for p in self.params):
                self.scaler.unscale_(self.optimizer)
                if clip:
                    self.clip(clip, "norm")
            before = [p._version for p in self.params]
            self.scaler.step(self.optimizer)
            self.moved(before)
            self.scaler.update()
            self.log.note(f"scale {self.number}", self.scaler.get_scale())
        finally:
            del self.calls[calls:]
            if not unscale:
                self.optimizer.zero_grad()  # torch's step divides gradients in place, hfnn's leaves them unchanged

    def clip(self, most, kind) -> None:
        params = [p for p in self.params if p.grad is not None and p.grad.layout is torch.strided]
        params = [p for p in params if p.dtype is not torch.float16]  # small gradients: see above
        if kind == "norm":
            self.log.tensor(f"norm {self.number}", nn.utils.clip_grad_norm_(params, most))
        else:
            nn.utils.clip_grad_value_([p for p in params if not p.is_complex()], most)

    def zero_grad(self, to_none) -> None:
        self.optimizer.zero_grad(set_to_none=to_none)

    def option(self, group, name, value) -> None:
        group = self.optimizer.param_groups[group % len(self.optimizer.param_groups)]
        # torch's fused step fails where there was no momentum before.
        if name in group and not (name == "momentum" and self.is_fused()):
            group[name] = value

    def add_group(self, tensor, options) -> None:
        p = self._parameter(tensor).requires_grad_(not tensor["frozen"])
        self.params.append(p)
        self.optimizer.add_param_group({"params": [p], **options})

    def add_again(self, i) -> None:
        """torch's error: a parameter that is already in a group."""
        self.optimizer.add_param_group({"params": self.params[i % len(self.params)]})

    def regroup(self, i) -> None:
        """Moves the last parameter of a group to the front of the next one."""
        groups = self.optimizer.param_groups
        i %= len(groups)
        kinds = [
            (group.get("amsgrad"), group.get("momentum")) for group in groups
        ]  # torch does not make missing states
        if len(set(kinds)) == 1 and groups[i]["params"]:
            groups[(i + 1) % len(groups)]["params"].insert(0, groups[i]["params"].pop())

    def schedule(self, kind) -> None:
        self.schedulers.append(SCHEDULERS[kind](self.optimizer))

    def schedule_step(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()

    def freeze(self, i) -> None:
        p = self.params[i % len(self.params)]
        p.requires_grad_(not p.requires_grad)
        p.grad = None

    def write(self, i, how) -> None:
        p = self.params[i % len(self.params)]
        with torch.no_grad():
            if how == "in place":
                p.mul_(0.5)
            elif how == "data":
                p.data = p.data.clone()
            elif how == "grad in place" and p.grad is not None and p.grad.layout is torch.strided:
                p.grad = p.grad.clone().mul_(-1)

    def edit_state(self, i, how) -> None:
        """User actions on states: reset, drop, move, replace, scale."""
        state = self.optimizer.state
        if how == "clear":
            state.clear()
        elif how == "drop":
            state.pop(self.params[i % len(self.params)], None)
        else:
            for name, value in [*state.get(self.params[i % len(self.params)], {}).items()]:
                if how == "move" and isinstance(value, torch.Tensor):
                    value.data = value.data.clone()
                elif how == "replace" and isinstance(value, torch.Tensor):
                    state[self.params[i % len(self.params)]][name] = value.clone()
                elif isinstance(value, torch.Tensor) and name != "step":
                    value.mul_(0.5) if how == "scale" else value.zero_()

    def hook(self, kind) -> None:
        def note(*_):
            self.calls.append(kind)

        getattr(self.optimizer, f"register_{kind}_hook")(note)

    def save(self, through) -> None:
        """Loads a state dict, via a file or torch's own class, into a new optimizer, which continues."""
        saved = self.optimizer.state_dict()
        self.show_dict(saved)
        if through == "file":
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
        groups = [{"params": group["params"]} for group in self.optimizer.param_groups]
        if through == "torch":
            of_torch = getattr(torch.optim, self.program["class"])(groups, lr=0.5)
            of_torch.load_state_dict(saved)
            self.show_dict(of_torch.state_dict(), "torch's")
            saved = of_torch.state_dict()
        self.optimizer = self.build(
            [{"params": group["params"]} for group in self.optimizer.param_groups], {"lr": 0.25}
        )
        self.optimizer.load_state_dict(saved)
        self.schedulers = []

    def load_wrong(self) -> None:
        saved = self.optimizer.state_dict()
        saved["param_groups"] = saved["param_groups"][1:]
        self.optimizer.load_state_dict(saved)

    def copy(self, how) -> None:
        """Everything is replaced by a copy: tied objects stay tied."""
        things = self.params, self.optimizer, self.schedulers
        self.calls = []
        for hooks in [name for name in vars(self.optimizer) if name.endswith("_hooks")]:
            vars(self.optimizer)[hooks].clear()
        copied = copy.deepcopy(things) if how == "deepcopy" else pickle.loads(pickle.dumps(things))
        self.params, self.optimizer, self.schedulers = copied
        # On a machine with a GPU, torch 2.11's Adafactor reads an option from its copies that they lack.
        self.optimizer._warned_capturable_if_run_uncaptured = True
        self.pending = None

    def swap(self, way) -> None:
        """hfnn.revert or hfnn.convert in between; no effect on torch's side."""
        if self.ours:
            (hfnn.revert if way == "revert" else hfnn.convert)(self.optimizer)

    def forced(self) -> None:
        """A step by the definition in torch, with which ours must agree."""
        with hfnn.use("torch") if self.ours else contextlib.nullcontext():
            self.step("none")

    # What is compared.

    def show(self) -> None:
        n = self.number
        for i, p in enumerate(self.params):
            self.log.tensor(f"value {n} parameter {i}", beside_one(p))
            self.log.note(f"layout {n} parameter {i}", (p.dtype, p.shape, p.stride(), p.requires_grad, p.is_leaf))
            grad = p.grad
            if grad is None or grad.layout is torch.strided:
                self.log.tensor(f"grad {n} parameter {i}", grad)
            for name, value in sorted(written(self.optimizer.state.get(p, {})).items()):
                if isinstance(value, torch.Tensor):
                    value = beside_one(value) if name in SIGNED else value.detach().contiguous()
                    self.log.tensor(f"state {n} parameter {i} {name}", value)
                else:
                    self.log.note(f"state {n} parameter {i} {name}", value)
        groups = [{k: plain(v) for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        self.log.note(f"groups {n}", groups)
        self.log.note(f"hooks {n}", list(self.calls))

    def show_dict(self, saved, label="saved") -> None:
        label = f"{label} {self.number}"
        self.log.note(f"{label} groups", [{k: plain(v) for k, v in g.items()} for g in saved["param_groups"]])
        for key, values in saved["state"].items():
            kinds = {name: kind(value) for name, value in written(values).items()}
            if kinds:
                self.log.note(f"{label} kinds of {key}", kinds)


def beside_one(x) -> torch.Tensor:
    """The elements of x and a one. Small results of cancelling terms of about one are only as exact as these terms."""
    return torch.cat((x.detach().to_dense().flatten(), torch.ones(1, dtype=x.dtype)))


def written(state: dict) -> dict:
    """A state without missing or never-written entries: hfnn creates it before it detects an overflow."""
    state = {name: value for name, value in state.items() if value is not None}
    return {} if all(isinstance(x, torch.Tensor) and not x.any() for x in state.values()) else state


def plain(value):
    return round(value.item(), 6) if isinstance(value, torch.Tensor) else value


def kind(value):
    return (value.dtype, tuple(value.shape), value.device.type) if isinstance(value, torch.Tensor) else value
