"""What users do to a model between calls, for the fuzzer of `hfnn.convert`: one method of `Changes` per step."""

import contextlib
import copy
import pickle

import convert_buffers
import convert_modules as own
import torch
from convert_around import DTYPES
from torch import nn

import hfnn
from hfnn.ops.flat import flat


class DropoutByDefinition(nn.Dropout):
    """hfnn's dropout in torch's ops, with the mask of a seed that is drawn where hfnn draws it."""

    def forward(self, x):
        if not self.training or self.inplace or self.p == 0 or torch._C._are_functorch_transforms_active():
            return super().forward(x)
        with torch.no_grad():
            mask = hfnn.functional.dropout(torch.ones_like(x), self.p, prefer="memory")
        return x * mask


class _Times(torch.autograd.Function):
    """x * factor; the gradient has the layout of the factor, as that of torch's rrelu has."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(factor, x)
        return (x * factor).contiguous()

    @staticmethod
    def backward(ctx, dy):
        if dy is None:
            return None, None
        factor, x = ctx.saved_tensors
        return flat(factor.mul(dy), x), None  # of the second derivatives x has zeros, not None


class RReLUByDefinition(nn.RReLU):
    """The same for a random slope."""

    def forward(self, x):
        if not self.training or self.inplace or torch._C._are_functorch_transforms_active():
            return super().forward(x)
        with torch.no_grad():
            slopes = hfnn.functional.rrelu(-torch.ones_like(x), self.lower, self.upper, True, prefer="memory").neg()
            factor = torch.where(x <= 0, slopes, 1.0)  # 1 for NaN
        return _Times.apply(x, factor)


BY_DEFINITION = {nn.Dropout: DropoutByDefinition, nn.RReLU: RReLUByDefinition}


class Changes:
    """The steps between calls of a `Session`."""

    def write(self, target, how):
        if target == "y":
            t = self.y
        elif target == "x":
            t = self.x[0]
        else:
            parameters = list(self.model.parameters())
            t = parameters[target % len(parameters)] if parameters else self.x[0]
        visible = target == "y" and how in ("add_", "zero_", "copy_")
        with contextlib.nullcontext() if visible else torch.no_grad():
            new = self.random(t.shape, t.dtype) if t.is_floating_point() else torch.ones_like(t)
            if how == "copy_":
                t.copy_(new)
            elif how == "data":
                t.data.copy_(new)
            elif how == "numpy":
                t.detach().view(torch.uint8).numpy()[...] = new.view(torch.uint8).numpy()
            elif how == "add_":
                t.add_(1)
            elif how == "set":
                t.data = new
            else:
                t[..., :1].zero_()

    def step(self, name):
        if self.optimizer is None:
            weights = [p for p in self.model.parameters() if p.requires_grad]
            # With a small eps, AdamW's first steps have the sign of gradients that may be rounding errors.
            self.optimizer = getattr(torch.optim, name)(weights, 0.01, **({"eps": 0.01} if name == "AdamW" else {}))
            # With float16, torch's AdamW divides by zero where squares underflow; hfnn's computes in float32.
            if self.ours and self.program["optimizer"] and not any(w.dtype is torch.float16 for w in weights):
                hfnn.convert(self.optimizer)
        self.optimizer.step()
        self.log_weights()

    def zero_grad(self, to_none):
        self.model.zero_grad(set_to_none=to_none)
        for x in self.x:
            x.grad = None

    def freeze(self, which, on):
        parameters = list(self.model.parameters())
        if parameters:
            parameters[which % len(parameters)].requires_grad_(on)

    def freeze_all(self, on):
        self.model.requires_grad_(on)

    def mode(self, training):
        self.model.train(training)

    def tools(self, tool):
        """On a copy of a model that trains, stock, a tool of hfnn raises nothing, and changes no state of torch."""
        seen, kept, recorded = list(own.seen), list(own.kept), list(self.recorded)
        with torch.random.fork_rng():
            why, x = None, self.x[0].detach().clone()
            try:
                model, stock = copy.deepcopy(self.model), copy.deepcopy(self.model)
                hfnn.revert(stock)(x.clone()).float().square().mean().backward()
                trains = True
            except Exception:
                trains = False
            if trains and self.ours:
                before = torch.get_rng_state()
                why = convert_buffers.called(tool, model, x)
                drew = tool != "peak_bytes" and not torch.equal(before, torch.get_rng_state())
                why = why or (f"{tool} draws" if drew else None)
        own.seen[:], own.kept[:], self.recorded[:] = seen, kept, recorded
        self.log.note(f"tool {self.at}", why)

    def deepcopy(self):
        self.model, self.optimizer = copy.deepcopy(self.model), None
        self.log_modes()

    def pickle(self):
        self.model, self.optimizer = pickle.loads(pickle.dumps(self.model)), None
        self.log_modes()

    def convert(self):
        if self.ours:
            state = torch.get_rng_state()
            hfnn.convert(self.model, prefer=self.program["prefer"])
            self.log.note(f"rng {self.at} convert", torch.equal(state, torch.get_rng_state()))
        else:
            self.log.note(f"rng {self.at} convert", True)
            self.swap(BY_DEFINITION if self.program["prefer"] == "memory" else {})

    def revert(self):
        if self.ours:
            hfnn.revert(self.model)
        else:
            self.swap({own: torchs for torchs, own in BY_DEFINITION.items()})

    def swap(self, classes):
        """Stock's counterpart of convert and revert: random layers draw as hfnn draws."""
        for module in self.model.modules():
            module.__class__ = classes.get(type(module), type(module))

    def load(self, assign):
        state = {name: t * 0.5 if t.is_floating_point() else t for name, t in self.model.state_dict().items()}
        self.log.note(f"keys {self.at}", tuple(state))
        self.model.load_state_dict(state, assign=assign)
        self.optimizer = None

    def cast(self, dtype):
        self.model.to(DTYPES[dtype])
        self.x = [x.detach().to(DTYPES[dtype]) if x.is_floating_point() else x for x in self.x]

    def attribute(self, which, name, value):
        having = [m for m in self.model.modules() if name in vars(m) or name in m._modules]
        if having:
            setattr(having[which % len(having)], name, nn.Tanh() if value == "Tanh" else value)

    def config(self, which):
        having = [m for m in self.model.modules() if hasattr(m, "config")]
        if having:
            having[which % len(having)].config.factor = 0.5

    def patch(self, which):
        having = [type(m) for m in self.model.modules() if isinstance(m, own.PATCHED)]
        if having:
            own.patch(next(cls for cls in having[which % len(having)].__mro__ if cls in own.PATCHED))

    def hook(self, which, kind):
        modules = list(self.model.modules())
        module = modules[which % len(modules)]
        parameters = list(self.model.parameters())
        if kind == "forward":
            handle = module.register_forward_hook(lambda m, args, y: self.record("forward", y))
        elif kind == "replace":
            handle = module.register_forward_hook(lambda m, args, y: y * 0.5)
        elif kind == "pre":
            handle = module.register_forward_pre_hook(lambda m, args: (args[0] * 1.5, *args[1:]))
        elif kind == "backward":
            handle = module.register_full_backward_hook(lambda m, gx, gy: self.record("backward", *gx, *gy))
        elif kind == "backward_pre":
            handle = module.register_full_backward_pre_hook(lambda m, gy: tuple(g * 0.5 for g in gy))
        elif kind == "tensor":
            handle = module.register_forward_hook(lambda m, args, y: self.hook_tensor(y))
        elif kind == "retain_grad":
            handle = module.register_forward_hook(lambda m, args, y: self.retain(y))
        elif parameters:
            handle = parameters[which % len(parameters)].register_post_accumulate_grad_hook(
                lambda p: self.record("post", p.grad)
            )
        self.handles.append(handle)

    def record(self, what, *tensors):
        for t in tensors:
            if isinstance(t, torch.Tensor):
                self.recorded.append((what, t.detach().clone()))

    def hook_tensor(self, y):
        if isinstance(y, torch.Tensor) and y.requires_grad and (y.is_leaf or y.grad_fn is not None):
            y.register_hook(lambda g: g * 0.5)

    def retain(self, y):
        if (
            torch._C._current_graph_task_id() == -1
            and isinstance(y, torch.Tensor)
            and y.requires_grad
            and (y.is_leaf or y.grad_fn is not None)
        ):
            y.retain_grad()
            own.kept.append(y)

    def unhook(self):
        while self.handles:
            self.handles.pop().remove()

    def drop(self, what):
        """The user drops the outputs, or everything that leads to a graph."""
        self.y = None
        if what == "all":
            self.losses, self.retained = [], False
            own.kept.clear()
        self.log_alive("after drop")
