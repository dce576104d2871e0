"""User actions on a wrapped model, step by step, and what is logged."""

import contextlib

import numpy as np
import torch
import wrappers_models as models
from engine import Raised
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

# How a model is given parameters after it was wrapped, and what replaces one of them.
ADDED = ("parameter", "module", "inserted", "adapted", "another", "thawed")
REPLACED = ("value", "value", "value", "frozen", "in one place", "of another shape", "of another dtype")


def run(session, noise: int) -> None:
    """Runs all steps of the session's program until one raises."""
    program, log = session.program, session.log
    for i, (name, *arguments) in enumerate(program["steps"]):
        for module in session.model.modules():
            if isinstance(module, models.Sometimes):
                module.on = not module.on
        with attempt(log, f"{name} {i}"):
            Steps(session, i, noise).__getattribute__(name)(*arguments)
            continue
        return
    log.features.add("runs to its end")


@contextlib.contextmanager
def attempt(log, label: str):
    """Like Log.attempt, but ignores the kind of exception, which differs between wrappers, and drops what was logged in
    the block."""
    log.note(f"error {label}", None)
    before = len(log.seen)
    try:
        yield
    except Exception as error:
        log.seen = dict(list(log.seen.items())[:before])
        log.seen[f"error {label}"] = Raised("an exception", f"{type(error).__name__}: {error}"[-1500:])


class Steps:
    def __init__(self, session, i, noise):
        self.session, self.log, self.program, self.i, self.noise = session, session.log, session.program, i, noise
        self.rank, self.calls = session.group.rank(), 0
        self.raised = False  # whether the last backward did

    # Parts of steps

    def batch(self, rows=3):
        """Different on each rank, in each step and call."""
        self.calls += 1
        generator = torch.Generator().manual_seed(self.program["seed"] + 1000 * self.i + 10 * self.calls + self.rank)
        if self.program["tokens"]:
            return torch.randint(7, (rows,), generator=generator)
        x = torch.randn(rows, self.program["D"], generator=generator)
        if self.noise:
            x *= 1 + torch.randn(x.shape, generator=generator.manual_seed(self.noise)) * torch.finfo(x.dtype).eps
        return x.requires_grad_(self.program["input_grad"])

    def forward(self, x=None):
        x, session = self.batch() if x is None else x, self.session
        how = self.program["checkpoint"]
        if how:
            return checkpoint(session.wrapped, x, use_reentrant=how == "reentrant")
        return session.wrapped(x)

    def loss(self, output, which=0):
        """A sum over what the model returned, or over a part of it."""
        terms = [models.main_of(output).float().square().mean()] if self.program["main"] or which else []
        for at, aside in enumerate(models.asides_of(output)):
            if self.program["asides"][at % len(self.program["asides"])]:
                terms.append(aside.float().sin().mean() * (at + 2))
        return sum(terms) if terms else torch.zeros(())

    def look(self, what="grad", visible=True):
        """Logs gradients, or values, of all parameters: this rank's part."""
        for name, p in self.session.parameters().items():
            seen = p if what == "value" else self.session.visible(p)
            rows = None if seen is None else self.session.rows(seen.detach())
            self.log.tensor(f"{what} {self.i}.{self.calls} {name}", rows)

    def backward(self, loss, sync, **options):
        if not loss.requires_grad:
            self.log.note(f"loss {self.i}.{self.calls} needs no gradient", True)
            return
        self.raised = True
        loss.backward(**options)
        self.raised = False
        self.session.finish_backward(sync)

    def update(self, clip=None):
        if clip is not None:
            self.log.tensor(f"norm {self.i}", self.session.clip(clip).detach())
            self.look("clipped")
        self.session.optimizer.step()
        self.session.optimizer.zero_grad(set_to_none=self.program["set_to_none"])
        self.look("value")
        for name, buffer in self.session.model.named_buffers():
            self.log.tensor(f"buffer {self.i} {name}", buffer)

    # Steps

    def train(self, micro, no_sync, clip):
        for k in range(micro):
            sync = not no_sync or k == micro - 1
            with self.session.syncing(sync):
                loss = self.loss(self.forward())
                self.log.tensor(f"loss {self.i}.{self.calls}", loss.detach())
                self.backward(loss, sync)
            self.look()
        self.update(clip)

    def two_forwards(self):
        """Two forwards and one backward of both."""
        with self.session.syncing(True):
            loss = self.loss(self.forward()) + self.loss(self.forward()) * 2
            self.log.tensor(f"loss {self.i}", loss.detach())
            self.backward(loss, True)
        self.look()
        self.update()

    def two_losses(self):
        """Two backwards of one forward."""
        with self.session.syncing(True):
            output = self.forward()
            first, second = self.loss(output), self.loss(output, 1) * 3
            self.backward(first, True, retain_graph=True)
            self.look()
            self.calls += 1
            self.backward(second, True)
        self.look()
        self.update()

    def regularised(self, when):
        """A loss that also uses the parameters themselves, before or after the forward."""

        def extra():
            terms = [p.pow(2).sum() for p in self.session.parameters().values() if p.requires_grad]
            return sum(term.full_tensor() if isinstance(term, DTensor) else term for term in terms)

        with self.session.syncing(True):
            first = extra() if when == "before" else 0
            loss = self.loss(self.forward()) + first
            self.backward(loss if when == "before" else loss + extra(), True)
        self.look()
        self.update()

    def write(self, how):
        """Writes to parameters that version counters do not show, between two evaluations."""
        self.evaluate("no_grad")
        self.session.reshard()
        for p in self.session.parameters().values():
            local = p.detach().to_local() if isinstance(p, DTensor) else p.detach()
            if how == "data":
                p.data.mul_(0.5)
            elif how == "local":
                local.data.mul_(0.5)
            else:
                np.multiply(local.numpy(), 0.5, out=local.numpy())
        self.look("value")
        self.evaluate("no_grad")

    def evaluate(self, how):
        context = torch.inference_mode if how == "inference" else torch.no_grad
        if how == "eval":
            self.session.wrapped.eval()
        with context(), self.session.syncing(True):
            output = self.session.wrapped(self.batch())
        self.session.wrapped.train()
        self.log.tensor(f"output {self.i}.{self.calls}", models.main_of(output).detach().clone())

    def forward_only(self):
        with self.session.syncing(True):
            output = self.forward()
        self.log.tensor(f"output {self.i}", models.main_of(output).detach())

    def gradient_of_input(self):
        if self.program["tokens"]:
            return
        x = self.batch().detach().requires_grad_()
        with self.session.syncing(True):
            loss = self.loss(self.session.wrapped(x * 1))
            if loss.requires_grad:
                (found,) = torch.autograd.grad(loss, x, allow_unused=True)
                self.log.tensor(f"input {self.i}", found)
        self.look()

    def caught(self):
        """An exception in the middle of forward, after which training continues."""
        handles = [module.register_forward_pre_hook(_raise) for module in list(self.session.model.modules())[-1:]]
        try:
            with self.session.syncing(True):
                self.session.wrapped(self.batch())
        except ZeroDivisionError:
            pass
        finally:
            for handle in handles:
                handle.remove()

    def raises(self, which):
        """An exception in a backward, at the output of some module, after which training continues."""

        def hook(module, args, output):
            output = models.main_of(output)
            if output.requires_grad:
                output.register_hook(_raise)

        modules = list(self.session.model.modules())
        handle = modules[which % len(modules)].register_forward_hook(hook)
        with contextlib.suppress(ZeroDivisionError), self.session.syncing(True):
            loss = self.loss(self.forward())
            handle.remove()
            self.backward(loss, True)
        self.look("value")
        self.recover()

    def recover(self):
        if self.raised:
            self.session.recover()
        self.session.optimizer.zero_grad()

    def save_and_load(self, scale):
        """Changes and loads whole values of the state."""
        state = {name: value.detach().clone() for name, value in self.session.state().items()}
        for name, value in state.items():
            self.log.tensor(f"state {self.i} {name.removeprefix('module.')}", value)
        if scale is not None:
            changed = {name: value * scale if value.is_floating_point() else value for name, value in state.items()}
            self.session.load(changed)
            self.look("value")

    def plain_backward(self):
        """After a step, a backward of the module itself: local."""
        with self.session.syncing(True):
            self.backward(self.loss(self.forward()), True)
        self.look()
        loss = self.loss(self.session.model(self.batch()))
        if loss.requires_grad:
            loss.backward()
        self.look()
        self.session.optimizer.zero_grad(set_to_none=self.program["set_to_none"])

    def late_hooks(self, scale):
        """Registered after wrapping, they change gradients before the average."""

        def change(p):
            p.grad.mul_(scale + self.rank)

        for p in self.session.parameters().values():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(change)

    def write_buffers(self):
        """In a way that no counter tells."""
        for buffer in self.session.model.buffers():
            if buffer.is_floating_point():
                buffer.data.add_(self.rank + 1)

    def freeze(self, which):
        """From now on a parameter is not trained."""
        parameters = list(self.session.parameters().values())
        parameters[which % len(parameters)].requires_grad_(False)

    def refuse(self, names):
        """An error of the next training names new parameters."""

        def train():
            loss = self.loss(self.forward())
            if not loss.requires_grad:  # a reentrant checkpoint without anything to train
                raise ValueError(f"Wrap after {names}")
            self.backward(loss, True)

        with self.session.syncing(True):
            self.log.note(f"refused {self.i}", self.session.refuses(train, names))

    def names_of(self, made):
        return [name for name, p in self.session.model.named_parameters() if any(p is held for held in made)]

    def add(self, how, which):
        """Parameters that the wrapped model is given, and that are taken away after the error."""
        model, made = self.session.model, self.session.spare.requires_grad_(True)
        parts = model.tree.parts
        if how in ("parameter", "module", "thawed"):
            modules = [m for m in model.modules() if not isinstance(m, nn.ModuleList)]
            module = modules[which % len(modules)]
            module.extra = made.weight if how == "parameter" else made
            if how == "thawed":
                made.requires_grad_(False)
                self.forward_only()
                made.weight.requires_grad_(True)
            self.refuse(self.names_of(made.parameters() if how == "module" else [made.weight]))
            del module.extra
        elif how == "inserted":
            parts.insert(which % len(parts), made)
            self.refuse(self.names_of(made.parameters()))
            del parts[which % (len(parts) - 1)]
        else:
            name = str(which % len(parts))
            old = getattr(parts, name)
            setattr(parts, name, made if how == "another" else nn.Sequential(old, made))
            self.refuse(self.names_of(made.parameters()))
            setattr(parts, name, old)
        self.recover()

    def replace(self, how, which, scale):
        """A parameter that replaces another. FSDP takes it over if it fits; DDP refuses it."""
        session, which = self.session, which % len(self.session.names)
        name, places = session.names[which], session.places(which)
        fits = how in ("value", "frozen") or (how == "in one place" and len(places) == 1)
        if session.fsdp and fits:
            session.replace(which, session.state()[name].detach() * scale, how != "frozen")
            self.evaluate("no_grad")
            self.look("value")
            return
        old = session.parameters()[name]
        shape = [*old.shape[:-1], old.shape[-1] + 1] if how == "of another shape" else old.shape
        new = nn.Parameter(torch.ones(shape, dtype=torch.float64 if how == "of another dtype" else old.dtype))
        for module, key in places[-1:] if how == "in one place" else places:
            setattr(module, key, new)
        self.refuse([name] if session.fsdp else self.names_of([new]))
        for module, key in places:
            setattr(module, key, old)
        self.recover()


def _raise(*_):
    raise ZeroDivisionError
