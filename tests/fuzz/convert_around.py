"""Modules around others, as users write them, for the fuzzer of `hfnn.convert`. Each preserves its input's shape."""

import contextlib

import torch
from convert_modules import BlockEnd
from torch import nn
from torch.utils.checkpoint import checkpoint


class Changing(nn.Module):
    """Attributes that change during forward, and between calls if a step changes `scale`."""

    def __init__(self, body):
        super().__init__()
        self.body, self.scale, self.calls, self.last = body, 1.0, 0, None

    def forward(self, x):
        self.calls += 1
        self.last = x.shape
        return self.body(x) * self.scale + 0.1 * self.calls


class Ended(nn.Module):
    def __init__(self, width, body):
        super().__init__()
        self.body, self.end = body, BlockEnd(width)

    def forward(self, x):
        return self.end(self.body(x), x)


class Branches(nn.Module):
    """Siblings with one input; the first may be a chunk of a wider product."""

    def __init__(self, bodies):
        super().__init__()
        self.bodies = nn.ModuleList(bodies)

    def forward(self, x):
        return sum((body(x) for body in self.bodies), x)


class Residual(nn.Module):
    def __init__(self, body, how):
        super().__init__()
        self.body, self.how = body, how

    def forward(self, x):
        y = self.body(x)
        if self.how == "inplace":
            y += x
            return y
        return x + y


class Twice(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(self.body(x))


class Chain(nn.Module):
    """Cheap ops in a row, without a product between them."""

    def __init__(self, body, calls):
        super().__init__()
        self.body, self.calls = body, calls

    def forward(self, x):
        for _ in range(self.calls):
            x = self.body(x)
        return x


class Between(nn.Module):
    """The first body's input is written to before the second one takes the result."""

    def __init__(self, first, second, how):
        super().__init__()
        self.first, self.second, self.how = first, second, how

    def forward(self, x):
        x = x * 1.5
        y = self.first(x)
        with contextlib.nullcontext() if self.how == "seen" else torch.no_grad():
            if self.how == "data":
                x.data = x + 0.5
            else:
                x.add_(0.5)
        return self.second(y)


class Moved(nn.Module):
    """The body runs on a permuted or otherwise viewed input; the permutation is then undone."""

    def __init__(self, body, order):
        super().__init__()
        self.body, self.order = body, tuple(order)

    def forward(self, x):
        back = sorted(range(x.dim()), key=self.order.__getitem__)
        return self.body(x.permute(self.order)).permute(back)


class Checkpointed(nn.Module):
    def __init__(self, body, reentrant):
        super().__init__()
        self.body, self.reentrant = body, reentrant

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


copying = False  # whether all saved tensors are copied, independent of the program's hooks


def saved_tensor_hooks(kind):
    if copying and (kind is not None or torch._C._autograd._top_saved_tensors_default_hooks(True) is None):
        kind = "clone"
    if kind == "save_on_cpu":
        return torch.autograd.graph.save_on_cpu()
    if kind == "identity":
        return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    return contextlib.nullcontext() if kind is None else torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)


@contextlib.contextmanager
def no_copying():
    """torch.func.grad refuses hooks; the copying hooks are not the program's, so they are removed."""
    if not copying:
        yield
        return
    torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        torch._C._autograd._push_saved_tensors_default_hooks(_pack, _unpack)


def _pack(x):
    return x.detach().clone(), x.requires_grad


def _unpack(packed):
    return packed[0].requires_grad_(packed[1]) if packed[0].is_floating_point() else packed[0]


class Packed(nn.Module):
    """The body runs under saved-tensor hooks."""

    def __init__(self, body, kind):
        super().__init__()
        self.body, self.kind = body, kind

    def forward(self, x):
        with saved_tensor_hooks(self.kind):
            return self.body(x)


DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Autocast(nn.Module):
    """The body runs with another autocast setting; its result is cast back to the input's dtype."""

    def __init__(self, body, dtype):
        super().__init__()
        self.body, self.dtype = body, dtype

    def forward(self, x):
        with torch.autocast("cpu", DTYPES[self.dtype or "bfloat16"], enabled=self.dtype is not None):
            return self.body(x).to(x.dtype)


class NoGrad(nn.Module):
    """A part without gradients next to one with gradients."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        with torch.no_grad():
            y = self.body(x)
        return x + y


class Cast(nn.Module):
    """The body runs in another dtype."""

    def __init__(self, body, dtype):
        super().__init__()
        self.body, self.dtype = body.to(DTYPES[dtype]), dtype

    def forward(self, x):
        return self.body(x.to(DTYPES[self.dtype])).to(x.dtype)
