"""The trees of modules that the fuzzer of `hfnn.convert` draws: torch's and hfnn's layers, and users' modules.

A tree is a list of layers, each `(kind, *arguments)`; an argument that is a list is itself a tree. Every layer
preserves the shape, so that any layer may be dropped. Layouts: "rows" (N, D), "sequence" (B, T, D), "channels" (B, D,
T), "image" (N, D, H, W), "last" (N, H, W, D).
"""

import dataclasses
from collections.abc import Callable

import convert_around
import convert_attention
import convert_buffers
import convert_formulas
import convert_modules as own
import convert_scores
from convert_images import Dense
from torch import nn

# Activations, with the arguments of their constructors; these have an in-place option.
INPLACE = {
    **dict.fromkeys(("SiLU", "ReLU", "ReLU6", "ELU", "SELU", "CELU", "LeakyReLU"), ()),
    **dict.fromkeys(("Hardtanh", "Mish", "Hardswish", "Hardsigmoid"), ()),
    "Threshold": (0.1, 0.2),
    "RReLU": (0.1, 0.3),
}
ACTIVATIONS = {
    **INPLACE,
    **dict.fromkeys(("GELU", "Sigmoid", "Tanh", "Softplus", "LogSigmoid", "Softsign"), ()),
    **dict.fromkeys(("PReLU", "Hardshrink", "Softshrink", "Tanhshrink"), ()),
}
GATES = ("SiLU", "GELU", "ReLU", "Sigmoid", "Tanh")
ALL = ("rows", "sequence", "channels", "image", "last")
LAST = ("rows", "sequence", "last")  # features in the last dimension
FIRST = ("channels", "image")
DIMENSIONS = {"channels": 1, "image": 2}
# Permutations to another layout.
TO = {"sequence": ("channels", (0, 2, 1)), "channels": ("sequence", (0, 2, 1)), "image": ("last", (0, 2, 3, 1))}


@dataclasses.dataclass(frozen=True)
class Layer:
    """The layouts that a layer supports, how likely it is, and a function that builds it from D and its arguments.

    draw(rng, tree, layout) returns the arguments; `tree(layout)` draws an inner tree.
    """

    layouts: tuple[str, ...]
    weight: float
    build: Callable
    draw: Callable = lambda rng, tree, layout: ()


def sequential(D: int, tree: list) -> nn.Module:
    return nn.Sequential(*[LAYERS[kind].build(D, *arguments) for kind, *arguments in tree])


def draw(rng, layout: str, depth: int, length: int) -> list:
    """A tree of `length` layers, with inner trees up to `depth`."""
    kinds = [name for name, each in LAYERS.items() if layout in each.layouts and (depth or name not in AROUND)]
    weights = [LAYERS[name].weight for name in kinds]

    def inner(to=layout):
        return draw(rng, to, depth - 1, rng.choice((1, 2, 2, 3) if to == layout else (2, 3)))

    names = []
    for name in rng.choices(kinds, weights, k=length):
        names.append(name)
        # A layer that gives a recipe is mostly followed by one that takes it.
        if name in GIVES and rng.random() < 0.9:
            after = ("linear",) if layout in LAST else AFTER if depth else AFTER[:4]
            names.append(rng.choice(after))
    return [(name, *LAYERS[name].draw(rng, inner, layout)) for name in names]


def walk(tree, around=()):
    """(layer, kinds of its enclosing layers) for every layer of a tree and its inner trees."""
    for layer in tree:
        yield layer, around
        trees = layer[1] if layer[0] == "branches" else [part for part in layer[1:] if isinstance(part, list)]
        for inner in trees:
            yield from walk(inner, (*around, layer[0]))


def _activation(name, inplace):
    return getattr(nn, name)(*ACTIVATIONS[name], **({"inplace": True} if inplace else {}))


def _gate(name):
    return own.SwishBeta() if name == "SwishBeta" else getattr(nn, name)()


def _draw_activation(rng, tree, layout):
    name = rng.choice(list(ACTIVATIONS))
    return name, name in INPLACE and rng.random() < 0.35


def _choose(*choices):
    """Draws one value from each of the choices."""
    return lambda rng, tree, layout: tuple(rng.choice(each) for each in choices)


def _inner(*choices):
    """Draws an inner tree and one value from each of the choices."""
    return lambda rng, tree, layout: (tree(), *(rng.choice(each) for each in choices))


def _of(make):
    """Builds a module around an inner tree."""
    return lambda D, body, *rest: make(sequential(D, body), *rest)


def _conv(D, dimensions, size, bias, groups, how):
    groups = D if groups == "depthwise" else groups
    if how == "transposed":
        cls = getattr(nn, f"ConvTranspose{dimensions}d")
        return cls(D, D, size, padding=size // 2, bias=bias, groups=groups)
    dilation = 2 if how == "dilated" else 1
    padding = "same" if how == "same" else dilation * (size // 2)
    mode = "circular" if how == "circular" else "zeros"
    cls = getattr(nn, f"Conv{dimensions}d")
    return cls(D, D, size, padding=padding, dilation=dilation, bias=bias, groups=groups, padding_mode=mode)


def _draw_conv(rng, tree, layout):
    how = rng.choice(("plain", "plain", "plain", "same", "dilated", "circular", "transposed"))
    return DIMENSIONS[layout], rng.choice((1, 3)), rng.random() < 0.7, rng.choice((1, 1, 2, "depthwise")), how


def _batch_norm(D, dimensions, momentum, affine, tracked):
    return getattr(nn, f"BatchNorm{dimensions}d")(D, momentum=momentum, affine=affine, track_running_stats=tracked)


def _instance_norm(D, dimensions, momentum, affine, tracked):
    return getattr(nn, f"InstanceNorm{dimensions}d")(D, 1e-5, momentum, affine, tracked)


def _draw_batch_norm(rng, tree, layout):
    return DIMENSIONS.get(layout, 1), rng.choice((0.1, 0.1, None)), rng.random() < 0.8, rng.random() < 0.8


def _pool(D, kind, dimensions, ceil):
    cls = getattr(nn, f"{kind}Pool{dimensions}d")
    if kind.startswith("Adaptive"):
        return nn.Sequential(cls((2,) * dimensions), nn.Upsample((4,) * dimensions))
    return cls(3, 1, 1, ceil_mode=ceil)


def _draw_moved(rng, tree, layout):
    to, order = TO[layout]
    return tree(to), order


def _chain(D, norm, name, calls):
    body = LAYERS[norm].build(D, *((1, 1e-5, True) if norm == "group_norm" else ()))
    return convert_around.Chain(nn.Sequential(body, _gate(name)), calls)


def _draw_chain(rng, tree, layout):
    """10 to 2000 ops, mostly few."""
    norm = "layer_norm" if layout in LAST else "group_norm"
    return norm, rng.choice(("GELU", "SiLU", "Sigmoid", "ReLU")), int(5 * 200 ** (rng.random() ** 2))


def _transformer(D, norm_first, activation):
    return nn.TransformerEncoderLayer(D, 2, 2 * D, 0.0, activation, batch_first=True, norm_first=norm_first)


BOOLS = (True, False)
LAYERS = {
    "linear": Layer(LAST, 10, lambda D, bias: nn.Linear(D, D, bias), _choose((True, True, False))),
    "layer_norm": Layer(LAST, 6, lambda D, *how: nn.LayerNorm(D, *how), _choose((1e-5, 1e-2), (True, True, False))),
    "rms_norm": Layer(LAST, 2, nn.RMSNorm, _choose((None, 1e-2))),
    "rms_norm_like": Layer(LAST, 2, own.RMSNormLike),
    "softmax": Layer(LAST, 0.6, lambda D, name: getattr(nn, name)(-1), _choose(("Softmax", "LogSoftmax"))),
    "glu": Layer(LAST, 1.5, lambda D: nn.Sequential(nn.Linear(D, 2 * D), nn.GLU(-1))),
    "glu_channels": Layer(("channels",), 1.5, lambda D: nn.Sequential(nn.Conv1d(D, 2 * D, 1), nn.GLU(1))),
    "dropout": Layer(ALL, 2, lambda D, *how: nn.Dropout(*how), _choose((0.0, 0.0, 0.5), (False, False, True))),
    "group_norm": Layer(
        FIRST,
        3,
        lambda D, groups, *how: own.GroupNorm(groups or D, D, *how),
        _choose((1, 2, 0), (1e-5, 0.1), (True, True, False)),
    ),
    "instance_norm": Layer(FIRST, 2, _instance_norm, _draw_batch_norm),
    "dense": Layer(
        FIRST,
        3,
        lambda D, dimensions, read, name, inplace: Dense(D, dimensions, read, _activation(name, inplace)),
        lambda rng, tree, to: (DIMENSIONS[to], rng.choice(Dense.READ), *_draw_activation(rng, tree, to)),
    ),
    "batch_norm": Layer(("rows", *FIRST), 1.5, lambda D, *how: _batch_norm(D, *how), _draw_batch_norm),
    "conv_block": Layer(
        FIRST,
        3,
        lambda D, how, name, inplace, *norm: own.ConvBlock(
            D, norm[0], _batch_norm(D, *norm), _activation(name, inplace), how
        ),
        lambda rng, tree, to: (
            rng.choice(own.ConvBlock.HOW),
            rng.choice(("ReLU", "LeakyReLU", "ReLU6", "SiLU", "Hardswish", "GELU")),
            False,
            *_draw_batch_norm(rng, tree, to),
        ),
    ),
    "conv": Layer(FIRST, 5, _conv, _draw_conv),
    "pool": Layer(
        FIRST,
        2.5,
        _pool,
        lambda rng, tree, to: (
            rng.choice(("Max", "Avg", "AdaptiveAvg", "AdaptiveMax")),
            DIMENSIONS[to],
            rng.random() < 0.3,
        ),
    ),
    "activation": Layer(ALL, 10, lambda D, name, inplace: _activation(name, inplace), _draw_activation),
    "quick_gelu": Layer(ALL, 1, lambda D: own.QuickGELU()),
    "functional": Layer(ALL, 3, lambda D, name: own.Functional(name), _choose(own.Functional.NAMES)),
    "where": Layer(ALL, 1.2, lambda D, name: own.Where(name), _choose(own.Where.NAMES)),
    "viewed": Layer(ALL, 1.8, lambda D, name: own.Viewed(name), _choose(own.Viewed.NAMES)),
    "formula": Layer(
        ("rows", "sequence", *FIRST),
        3,
        convert_formulas.Formula,
        lambda rng, tree, to: convert_formulas.draw(rng, DIMENSIONS.get(to, 0), 2 if to == "rows" else 3),
    ),
    "written": Layer(ALL, 1.2, lambda D, name: own.Written(name), _choose(own.Written.NAMES)),
    "buffered": Layer(ALL, 0.8, convert_buffers.Buffered, _choose(tuple(convert_buffers.Buffered.KINDS))),
    "probe": Layer(ALL, 2.5, lambda D, how: own.Probe(how), _choose(own.Probe.HOW)),
    "mlp": Layer(
        LAST,
        1.5,
        lambda D, name, inplace, p: own.MLP(D, _activation(name, inplace), p),
        lambda rng, tree, to: (*_draw_activation(rng, tree, to), rng.choice((0.0, 0.0, 0.5))),
    ),
    "gated_mlp": Layer(LAST, 1.5, lambda D, name: own.GatedMLP(D, _gate(name)), _choose((*GATES, "SwishBeta"))),
    "limited_mlp": Layer(
        LAST, 1, lambda D, name: nn.Sequential(own.Times(200), own.LimitedMLP(D, _gate(name))), _choose(GATES)
    ),
    "attention": Layer(("sequence",), 2, own.Attention, _choose(own.Attention.HOW)),
    "padded": Layer(
        ("sequence",),
        6,
        lambda D, *how: convert_attention.Padded(D, *how),
        _choose(
            (*convert_attention.OWN, *convert_attention.LIBRARY * 2),
            convert_attention.PADDINGS,
            convert_attention.MASKS,
            BOOLS,
        ),
    ),
    "scored": Layer(("sequence",), 2, convert_scores.scored, _choose(*convert_scores.CHOICES)),
    "multihead": Layer(("sequence",), 1.2, own.SelfAttention, _choose(BOOLS, BOOLS)),
    "encoder_layer": Layer(("sequence",), 1, _transformer, _choose(BOOLS, ("relu", "gelu"))),
    "decoder_layer": Layer(("sequence",), 1, own.Decoder, _choose(BOOLS)),
    "recurrent": Layer(("rows", "sequence"), 1.5, own.Recurrent, _choose(("LSTM", "GRU", "RNN"), BOOLS, BOOLS)),
    "experts": Layer(LAST, 1, own.Experts, _choose((0.0, 0.5, 100.0))),
    "tied": Layer(LAST, 1, own.Tied, _choose(BOOLS)),
    "parametrised": Layer(LAST, 0.5, own.Parametrised),
    "ended": Layer(LAST, 1, lambda D, body: convert_around.Ended(D, sequential(D, body)), _inner()),
    "changing": Layer(ALL, 1, _of(convert_around.Changing), _inner()),
    "branches": Layer(
        ALL,
        1.5,
        lambda D, bodies: convert_around.Branches([sequential(D, body) for body in bodies]),
        lambda rng, tree, to: ([tree() for _ in range(rng.choice((2, 3)))],),
    ),
    "between": Layer(
        ALL,
        2,
        lambda D, first, second, how: convert_around.Between(sequential(D, first), sequential(D, second), how),
        lambda rng, tree, to: (tree(), tree(), rng.choice(("seen", "unseen", "data"))),
    ),
    "residual": Layer(ALL, 1.5, _of(convert_around.Residual), _inner(("sum", "inplace"))),
    "chain": Layer(ALL, 0.4, _chain, _draw_chain),
    "twice": Layer(ALL, 1, _of(convert_around.Twice), _inner()),
    "moved": Layer(("sequence", "channels", "image"), 5, _of(convert_around.Moved), _draw_moved),
    "checkpoint": Layer(ALL, 2.5, _of(convert_around.Checkpointed), _inner((True, False, False))),
    "packed": Layer(ALL, 1, _of(convert_around.Packed), _inner(("save_on_cpu", "identity", "clone"))),
    "autocast": Layer(ALL, 1.2, _of(convert_around.Autocast), _inner(("bfloat16", "bfloat16", "float16", None))),
    "no_grad": Layer(ALL, 0.7, _of(convert_around.NoGrad), _inner()),
    "cast": Layer(ALL, 0.7, _of(convert_around.Cast), _inner(("float64", "bfloat16", "float32"))),
}
GIVES = frozenset(("layer_norm", "rms_norm", "rms_norm_like", "activation", "quick_gelu", "functional", "softmax"))
GIVES |= {"batch_norm", "group_norm", "conv_block", "dropout"}
# Layers that take a recipe where features are not in the last dimension; the latter two have inner trees.
AFTER = ("conv", "conv", "conv", "activation", "moved", "branches")
# Layers with inner trees.
AROUND = frozenset(("ended", "changing", "branches", "residual", "twice", "moved", "between"))
AROUND |= {"checkpoint", "packed", "autocast", "no_grad", "cast"}


def shape(program) -> tuple[int, ...]:
    """The shape of the inputs, after embedding if they are tokens."""
    N, D = program["N"], program["D"]
    return {"rows": (N, D), "sequence": (N, 4, D), "channels": (N, D, 4), "image": (N, D, 4, 4)}[program["layout"]]
