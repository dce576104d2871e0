"""Strides of dimensions of size 1, which address no element: those of results and gradients equal torch's.

Such a tensor is contiguous with any of these strides, and may be channels-last, too. torch's elementwise functions
give their results the usual strides; other functions keep the input's. A convolution derives its layout from them.
"""

import functools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hfnn
from hfnn.core import native
from hfnn.ops import qk_norm_rope, rope

O = hfnn.functional
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMAGES = (8, 8, 1, 1), (8, 1, 5, 6), (1, 8, 5, 6), (2, 3, 1, 6)
SHAPES = (*IMAGES, (64, 1), (1, 64), (4, 1, 16), (3, 2, 1, 1, 1))


def last(x):
    """Channels-last in memory."""
    return x.movedim(1, -1).clone(memory_format=torch.contiguous_format).movedim(-1, 1) if x.dim() > 2 else x


def cut(x):
    """Like a slice of something larger."""
    strides = [77 + d if size == 1 else step for d, (size, step) in enumerate(zip(x.shape, x.stride(), strict=True))]
    size = 1 + sum((size - 1) * step for size, step in zip(x.shape, strides, strict=True))
    return x.new_empty(size).as_strided(x.shape, strides).copy_(x)


def cut_last(x):
    return cut(last(x))


def spread(x):
    """Like the gradient of a sum."""
    return x.new_ones(()).expand(x.shape)


# Layouts of tensors of the input's shape, and of the gradient; None: the usual strides.
GIVEN = [(x, dy) for layout in (last, cut, cut_last) for x, dy in ((layout, layout), (layout, None), (None, layout))]
GIVEN.append((None, spread))
# Exceptions: torch's gradient of expanded tensors has the strides of a mask, or of a product, of x.
EXPANDED = "dropout", "dropout_add", "quick_gelu"


def is_float(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def run(fn, args, kwargs, layout, dy_layout):
    """The results, and the gradients of the floating-point arguments."""
    args = [a.detach().clone() if is_float(a) else a for a in args]
    if layout is not None:
        args = [layout(a) if is_float(a) and a.shape == args[0].shape else a for a in args]
    leaves = [a.requires_grad_() for a in args if is_float(a)]
    torch.manual_seed(7)
    ys = fn(*args, **kwargs)
    ys = ys if isinstance(ys, tuple) else (ys,)
    generator = torch.Generator().manual_seed(1)
    dys = [torch.randn(y.shape, generator=generator).bfloat16().to(y) for y in ys]
    dys = dys if dy_layout is None else [dy_layout(dy) for dy in dys]
    return [*ys, *torch.autograd.grad(ys, leaves, dys)]


def differences(ours, torchs, args, kwargs, given=GIVEN):
    """One line per layout whose strides are not torch's."""
    wrong = []
    for layout, dy_layout in given:
        got, want = (run(fn, args, kwargs, layout, dy_layout) for fn in (ours, torchs))
        strides = [[t.stride() for t in tensors] for tensors in (got, want)]
        if strides[0] != strides[1]:
            names = [each and each.__name__ for each in (layout, dy_layout)]
            wrong.append(f"{tuple(args[0].shape)} x {names[0]} dy {names[1]}: {strides[0]}, torch's {strides[1]}")
    return wrong


# On CUDA torch lays out these gradients differently if input and incoming gradient have different layouts: logsigmoid's
# has dy's strides, rms_norm's the usual ones, and relu_dropout's and add_rms_norm's depend on both.
ON_CUDA = {"logsigmoid", "relu_dropout", "rms_norm", "add_rms_norm"}


def known(names, name_of=str):
    """Parameters; those in ON_CUDA are expected to differ there."""
    expected = [pytest.mark.xfail(strict=True, reason="torch lays it out otherwise")] if DEVICE == "cuda" else []
    return [pytest.param(n, marks=expected if name_of(n) in ON_CUDA else [], id=name_of(n)) for n in names]


@pytest.mark.parametrize("op", known((op for op in hfnn.ops.CONTRACT if op.kernels), lambda op: op.name))
def test_strides_are_torchs(op):
    options = [option for option in op.small if not isinstance(option, int)]
    kernels = [k.name for k in op.kernels if k.device == DEVICE and k.missing is None]
    given = GIVEN if op.name in EXPANDED else [*GIVEN, (cut, spread)]
    wrong, pool = [], op.name[-2] if op.name.startswith("max_pool") else ""
    for shape in SHAPES:
        if pool and len(shape) != int(pool) + 2:
            continue
        if op.name == "instance_norm" and math.prod(shape[2:]) == 1:  # torch refuses one number
            continue
        args, kwargs = op.sample((*shape, *options), torch.float32, DEVICE)
        ours = getattr(O, op.name)
        wrong += differences(functools.partial(ours, prefer="memory"), op.torch, args, kwargs, given)
        for kernel in kernels:
            with hfnn.use(kernel):
                wrong += [f"{kernel} {each}" for each in differences(ours, op.torch, args, kwargs, given)]
    assert not wrong, "\n".join(wrong)


@pytest.fixture
def built():
    """Copies of what recipes rebuild from now on, and their strides."""
    found = []

    def note(y):
        found.append((y.detach().clone(), y.stride()))
        return y

    if native.extension is not None:
        native.extension.watch(note)
    yield found
    if native.extension is not None:
        native.extension.watch(None)


@pytest.mark.parametrize("op", [op for op in hfnn.ops.CONTRACT if op.kernels and op.recipe], ids=lambda op: op.name)
def test_what_is_rebuilt_is_what_was_there(op, built):
    options = [option for option in op.small if not isinstance(option, int)]
    ran = False
    for layout in (last, cut, cut_last):
        for shape in SHAPES:
            if op.name == "instance_norm" and math.prod(shape[2:]) == 1:
                continue
            (x, *rest), kwargs = op.sample((*shape, *options), torch.float32, DEVICE)
            x, *rest = (a.requires_grad_() if is_float(a) else a for a in (layout(x), *rest))
            x = O.gelu(x, prefer="memory") if op.recipe_needs_recipe else x
            torch.manual_seed(7)
            y = getattr(O, op.name)(x, *rest, **kwargs, prefer="memory")
            if not y.grad_fn.name().startswith("_"):  # torch's own op ran; some tensors are left to it
                continue
            ran = True
            weight = torch.ones(2, y.shape[-1], device=DEVICE, requires_grad=True)
            before, strides = y.detach().clone(), y.stride()
            built.clear()
            O.linear(y, weight, prefer="memory").sum().backward()
            assert any(torch.equal(again, before) and stride == strides for again, stride in built)
    assert ran


class Own(nn.Module):
    """Modules whose own code computes what hfnn has a kernel for."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.linspace(0.5, 1.5, width)), 1e-6

    def forward(self, x):
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def memory(fn):
    return functools.partial(fn, prefer="memory")


def convolution(of, x, transposed=""):
    name = f"conv{transposed}{x.dim() - 2}d"
    return getattr(of, name) if of is F else memory(getattr(of, name))


def weights(x, *shape):
    return torch.linspace(-1, 1, shape[0] * x.shape[1], device=x.device).view(shape[0], x.shape[1], *shape[1:])


def behind(of, x):
    """A convolution of an activation, whose recipe it keeps."""
    silu = F.silu if of is F else memory(O.silu)
    return convolution(of, x)(silu(x), weights(x, 4, *(1 for _ in x.shape[2:])).requires_grad_())


def frozen(of, x):
    return convolution(of, x)(x, weights(x, 4, *(1 for _ in x.shape[2:])))


def low(of, x):
    with torch.autocast(x.device.type, torch.bfloat16):
        return convolution(of, x)(x, weights(x, 4, *(1 for _ in x.shape[2:])).requires_grad_()).float()


def linear_behind(of, x):
    silu, linear = (F.silu, F.linear) if of is F else (memory(O.silu), memory(O.linear))
    return linear(silu(x), torch.linspace(-1, 1, 3 * x.shape[-1], device=x.device).view(3, -1).requires_grad_())


def linear_low(of, x):
    linear = F.linear if of is F else memory(O.linear)
    with torch.autocast(x.device.type, torch.bfloat16):
        return linear(x, torch.ones(3, x.shape[-1], device=x.device, requires_grad=True)).float()


def evaluated(of, x):
    batch_norm = F.batch_norm if of is F else memory(O.batch_norm)
    return batch_norm(x, x.new_zeros(x.shape[1]), x.new_ones(x.shape[1]))


def residual(of, x, other):
    """In training, followed by a sum and an activation."""
    if of is F:
        return F.relu(F.batch_norm(x, None, None, training=True) + other)
    return O.batch_norm_act(x, None, None, training=True, residual=other, act="relu", prefer="memory")


def added(of, x, other, norm="layer_norm"):
    if of is F:
        total = other + x
        return getattr(F, norm)(total, x.shape[-1:]), total
    return getattr(O, f"add_{norm}")(x, other, x.shape[-1:], prefer="memory")


def norm_of(of, x, module=Own):
    made = module(x.shape[-1]).to(x.device)
    return (made if of is F else hfnn.convert(made, prefer="memory"))(x)


def pooled(of, x, name):
    name = f"{name}{x.dim() - 2}d"
    return (getattr(F, name) if of is F else memory(getattr(O, name)))(x, 1)


def attention(of, x, other):
    call = F.scaled_dot_product_attention if of is F else memory(O.scaled_dot_product_attention)
    return call(x, other, other)


def chosen(of, x, other):
    return (torch.where if of is F else memory(O.where))(x > 0, x, other)


def over_two(of, x):
    return (F.layer_norm if of is F else memory(O.layer_norm))(x, x.shape[-2:])


CALLS = {
    "convolution behind": (behind, IMAGES), "convolution, frozen": (frozen, IMAGES),
    "convolution, autocast": (low, IMAGES), "linear behind": (linear_behind, SHAPES),
    "linear, autocast": (linear_low, SHAPES), "batch_norm, eval": (evaluated, SHAPES),
    "batch_norm, sum, relu": (residual, [shape for shape in SHAPES if shape != (1, 64)]),
    "add_layer_norm": (added, SHAPES), "add_rms_norm": (functools.partial(added, norm="rms_norm"), SHAPES),
    "rms norm in own words": (norm_of, SHAPES), "layer_norm over two": (over_two, SHAPES), "where": (chosen, SHAPES),
    "attention": (attention, IMAGES),
    **{
        name: (functools.partial(pooled, name=name), (*IMAGES, (4, 1, 16), (3, 2, 1, 1, 1)))
        for name in ("avg_pool", "adaptive_avg_pool", "adaptive_max_pool")
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*deterministic")  # pools on CUDA
@pytest.mark.parametrize("name", known(CALLS))
def test_strides_of_more_are_torchs(name):
    fn, shapes = CALLS[name]
    wrong = []
    for shape in shapes:
        args = [torch.randn(shape, device=DEVICE) for _ in range(2 if "other" in fn_names(fn) else 1)]
        wrong += differences(functools.partial(fn, O), functools.partial(fn, F), args, {})
    assert not wrong, "\n".join(wrong)


def fn_names(fn):
    return getattr(fn, "func", fn).__code__.co_varnames[: getattr(fn, "func", fn).__code__.co_argcount]


@pytest.mark.parametrize("op", [rope.OP, qk_norm_rope.OP], ids=lambda op: op.name)
@pytest.mark.parametrize("layout", [cut, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), last])
def test_rotated_heads(op, layout):
    """One head for all queries, with the strides of views of (B, S, 1, D), and single tokens."""
    ours = functools.partial(getattr(O, op.name), prefer="memory")
    for case in ((2, 1, 1, 5, 8, 8, False), (2, 4, 1, 1, 8, 8, False), (1, 1, 1, 5, 8, 8, True)):
        args, kwargs = op.sample(case, torch.float32, DEVICE)
        for dy_layout in (None, layout):
            results = []
            for fn in (ours, op.torch):
                both = [layout(x.detach()).requires_grad_() for x in args[:2]]
                ys = fn(*both, *args[2:], **kwargs)
                dys = [x.detach() if dy_layout is None else dy_layout(x.detach()) for x in args[:2]]
                results.append([*ys, *torch.autograd.grad(ys, both, dys)])
            for got, want, x in zip(*results, 2 * both, strict=True):
                torch.testing.assert_close(got, want)
                if x.is_contiguous():
                    assert got.stride() == want.stride()
