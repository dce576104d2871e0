"""q, k and v as views of one product: programs around attention, ours against stock, bit for bit."""

import random

import pytest
import torch
from torch.nn.functional import linear
from torch.nn.functional import scaled_dot_product_attention as stock
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from hfnn.core import native
from hfnn.functional import scaled_dot_product_attention as ours
from hfnn.ops.attention import sdpa

pytestmark = pytest.mark.skipif(native.extension is None, reason="rooms in C++ are not built")

B, T, H, D = 2, 48, 4, 64


class Turned(torch.autograd.Function):
    """The identity with a negated gradient: a view whose node does more than a view's."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return -dy


def of_timm(y):
    return y.view(B, T, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)


def of_neox(y):
    return y.view(B, T, H, 3 * D).transpose(1, 2).chunk(3, dim=-1)


def of_selects(y):
    qkv = y.view(B, T, 3, H, D).transpose(1, 3)
    return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]


def of_split(y):
    return [x.view(B, T, H, D).transpose(1, 2) for x in y.split(H * D, dim=-1)]


def with_batch_second(y):
    return y.view(T, B, 3, H, D).permute(2, 1, 3, 0, 4).unbind(0)


def in_another_order(y):
    q, k, v = of_timm(y)
    return v, q, k


def one_twice(y):
    q, k, _ = of_timm(y)
    return q, k, k


def one_turned(y):
    q, k, v = of_timm(y)
    return Turned.apply(q), k, v


def product_turned(y):
    return of_timm(Turned.apply(y))


def written_before(y):
    q, k, v = of_selects(y)
    y.mul_(2)
    return q, k, v


LAYOUTS = (of_timm, of_neox, of_selects, of_split, with_batch_second, in_another_order, one_twice, one_turned)
LAYOUTS += (product_turned, written_before)
JOINED = (of_timm, of_neox, of_selects, with_batch_second, in_another_order)


class Copies(TorchDispatchMode):
    """Counts torch's stack calls."""

    hfnn_runs, count = True, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.stack.default
        return func(*args, **(kwargs or {}))


class Program:
    """Random user code around one attention, drawn by a seed."""

    def __init__(self, seed):
        draw = random.Random(seed)
        self.layout = draw.choice(LAYOUTS + 2 * JOINED)
        self.bias = draw.random() < 0.5
        self.causal = draw.random() < 0.3
        self.checkpoint = draw.random() < 0.15
        self.twice = draw.random() < 0.15  # two attentions on the same views
        self.hooks = [name for name in "qkvy" if draw.random() < 0.04]
        self.late_hooks = [name for name in "qkvy" if draw.random() < 0.04]
        self.retained = [name for name in "qkvy" if draw.random() < 0.04]
        self.consumers = [name for name in "qkvy" if draw.random() < 0.04]
        self.node_hook = draw.random() < 0.05
        self.written = draw.choice([None] * 20 + ["q", "y"])
        self.wanted = draw.choice([None] * 3 + ["q", "y", "qx", "x", "xw"])
        self.backwards = draw.choice([1, 1, 1, 2])
        self.second = draw.random() < 0.15
        self.batched = draw.random() < 0.1
        if self.batched:
            self.retained = []  # a batched gradient is valid only during its backward
        if self.layout is written_before:
            self.hooks = []  # torch crashes on a hook on a view whose base was written to
        self.dropped = draw.random() < 0.5  # whether only hooks refer to the views in backward
        self.copies = Copies()

    def __repr__(self):
        return ", ".join(f"{k}={getattr(v, '__name__', v)}" for k, v in vars(self).items())

    def run(self, attention):
        """Everything that a user observes, by name; or the error."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape):
            return torch.randn(*shape, generator=generator)

        x, w = normal(B, T, 16).requires_grad_(), normal(3 * H * D, 16).requires_grad_()
        b = normal(3 * H * D).requires_grad_() if self.bias else None
        seen, values = {}, {}

        def forward(x):
            y = linear(x, w, b)
            if self.layout is with_batch_second:
                y = linear(x.transpose(0, 1).contiguous(), w, b)
            q, k, v = self.layout(y)
            made = {"q": q, "k": k, "v": v, "y": y, "x": x, "w": w}
            for name in self.hooks:
                made[name].register_hook(lambda dy, name=name: self.see(seen, name, dy) * 3)
            for name in self.retained:
                made[name].retain_grad()
            # What the program holds. Nothing else may add to the other tensors' gradients.
            named = {
                *self.late_hooks,
                *self.retained,
                *(self.wanted or ""),
                self.written,
                "q" if self.node_hook else "",
            }
            values.update((name, made[name]) for name in named & made.keys())
            o = attention(q, k, v, is_causal=self.causal)
            if self.twice:
                o = o + attention(k, q, v)
            return (o, *(made[name] * made[name] for name in self.consumers))

        try:
            o, *others = checkpoint(forward, x, use_reentrant=False) if self.checkpoint else forward(x)
            for name in self.late_hooks:
                values[name].register_hook(lambda dy, name=name: self.see(seen, name, dy) / 2)
            if self.node_hook:
                values["q"].grad_fn.register_hook(lambda dxs, dys: tuple(None if d is None else d * 2 for d in dxs))
            if self.dropped and not self.wanted and not self.retained and not self.written:
                values.clear()
            if self.written:
                values[self.written].detach().mul_(1.5)
            loss = (o * normal(*o.shape)).sum() + sum((other * normal(*other.shape)).sum() for other in others)
            with self.copies:
                for _ in range(self.backwards):
                    self.backward(loss, values, seen)
        except RuntimeError as error:
            return str(error).replace("_JointBackward", "UnbindBackward0")
        leaves = {"x": x, "w": w, "b": b}
        seen.update({f"d{name}": leaf.grad for name, leaf in leaves.items() if leaf is not None})
        seen.update({f"retained {name}": values[name].grad for name in self.retained})
        return seen

    def see(self, seen, name, dy):
        if not self.batched:  # a batched gradient is valid only during its backward
            seen[f"hook {name} {len(seen)}"] = dy.clone()
        return dy

    def backward(self, loss, values, seen):
        wanted = [values[name] for name in self.wanted or "" if values[name].requires_grad]
        if self.batched and wanted:
            grads = torch.autograd.grad(
                loss, wanted, torch.tensor([1.0, 2.0]), is_grads_batched=True, retain_graph=True, allow_unused=True
            )
        elif self.second and wanted:
            grads = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
            sum((g.square().sum() for g in grads if g is not None), loss * 0).backward(retain_graph=True)
        elif wanted:
            grads = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
        else:
            return loss.backward(retain_graph=True)
        for name, grad in zip(self.wanted, grads, strict=True):
            seen[f"grad {name}"] = grad


def check(seed):
    program = Program(seed)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # has second derivatives
        wanted, stacked = program.run(stock), program.copies.count
        found = program.run(ours)
    assert type(wanted) is type(found), f"seed {seed}: {program}\nstock {wanted}\nours {found}"
    if isinstance(wanted, str):
        assert wanted == found, f"seed {seed}: {program}"
        return
    assert wanted.keys() == found.keys(), f"seed {seed}: {program}"
    for name, a in wanted.items():
        b = found[name]
        same = (a is None) == (b is None) and (a is None or (torch.equal(a, b) and a.stride() == b.stride()))
        assert same, f"seed {seed}: {name} differs in {program}"
    return program.copies.count < 2 * stacked


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_programs(first):
    joined = [check(seed) for seed in range(first, first + 100)]
    assert joined.count(True) >= 5  # in layouts that torch stacks


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_views_run_nothing(layout, dtype):
    """Where the three are joined, no gradient passes the views; elsewhere torch's nodes run."""
    shape = (T, B) if layout is with_batch_second else (B, T)
    leaf, plain = (torch.zeros(*shape, 3 * H * D, dtype=dtype, requires_grad=True) for _ in range(2))
    joined = sdpa._joint(*layout(leaf * 1))
    assert (joined is not None) is (layout in JOINED)
    if joined is None:
        return
    dys = [torch.randn(B, T, H, D).to(dtype).transpose(1, 2) for _ in range(3)]
    with torch.profiler.profile(acc_events=True) as profile:
        torch.autograd.backward(joined, dys)
    torch.autograd.backward(layout(plain * 1), dys)
    assert torch.equal(leaf.grad, plain.grad)
    ran = {event.key for event in profile.key_averages()}
    assert not ran & {"aten::stack", "aten::select_backward", "aten::add_", "aten::contiguous", "aten::clone"}, ran


@pytest.mark.parametrize("written", ["product", "view", "joined"])
def test_a_write_is_seen(written):
    y = torch.randn(B, T, 3 * H * D, requires_grad=True) * 1
    views = of_selects(y)
    joined = sdpa._joint(*views)
    loss = (joined[0] * joined[1]).sum()
    {"product": y, "view": views[1], "joined": joined[1]}[written].detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("of_node", [False, True])
@pytest.mark.parametrize("layout", JOINED)
def test_hooks_of_views_that_are_gone_run(layout, of_node):
    shape = (T, B) if layout is with_batch_second else (B, T)
    found = []
    for attention in stock, ours:
        leaf = torch.ones(*shape, 3 * H * D, requires_grad=True)
        views = layout(leaf * torch.arange(3 * H * D) * 1e-3)
        out = attention(*views)
        if of_node:
            views[1].grad_fn.register_hook(lambda dxs, dys: tuple(2 * dx for dx in dxs))
        else:
            views[1].register_hook(lambda dy: 3 * dy)
        del views
        out.square().sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)


def test_compiled_whole():
    y = torch.randn(B, T, 3 * H * D, requires_grad=True)
    compiled = torch.compile(lambda y: ours(*of_timm(y * 1)), backend="eager", fullgraph=True)
    assert torch.allclose(compiled(y), ours(*of_timm(y * 1)))


def test_nothing_is_joined_that_is_small_or_without_a_gradient():
    y = torch.randn(B, T, 3 * H * D, requires_grad=True) * 1
    assert sdpa._joint(*of_timm(y)) is not None
    assert sdpa._joint(*of_timm(y.detach())) is None
    with torch.no_grad():
        assert sdpa._joint(*of_timm(y)) is None
    q, k, v = of_timm(y)
    assert sdpa._joint(q, k, v.detach()) is None and sdpa._joint(q, k, v + 0) is None
    small = torch.randn(2, 16, 3 * 2 * 16, requires_grad=True) * 1
    assert sdpa._joint(*small.view(2, 16, 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)) is None
