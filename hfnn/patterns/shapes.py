"""Shapes with which a module's forward is traced: of its inputs, as its parts take them, and of their results."""

import functools
import itertools

import torch
from torch import nn

from hfnn.patterns.kinds import BATCH_NORMS, Map, kind_of
from hfnn.patterns.probe import Refusal
from hfnn.patterns.subclass import original


def shape_of(part: nn.Module, kind, shape: tuple[int, ...], strict: bool = True) -> tuple[int, ...]:
    """The shape of a part's result, which torch's own classes and linear maps know; others keep that of their input.

    strict: whether a map of another width is refused.
    """
    cls = original(type(part)) or type(part)
    if hasattr(kind, "outputs"):
        if strict and shape[-1] != kind.inputs:
            raise Refusal("its parts do not fit to one another")
        return (*shape[:-1], kind.outputs)
    if kind not in (None, "norm", "other"):
        return shape
    if cls is nn.Sequential:
        return functools.reduce(lambda shape, each: shape_of(each, None, shape), part, shape)
    if not cls.__module__.startswith("torch.nn.modules.") or part._modules:
        return shape
    twin = object.__new__(cls)
    empty = {
        k: p if p is None else torch.empty(p.shape, device="meta")
        for k, p in {**part._parameters, **part._buffers}.items()
    }
    vars(twin).update({**vars(part), "_parameters": empty, "_buffers": {}})
    vars(twin).pop("forward", None)
    try:
        y = cls.forward(twin, torch.empty(shape, device="meta"))
    except Exception:  # it takes other shapes
        return shape
    return tuple(y.shape) if isinstance(y, torch.Tensor) else shape


def candidates(module, kinds, inputs):
    """(three shapes of inputs that may fit, the sizes that they must have, None for all)."""
    norm = next((part for name, part in module._modules.items() if kinds[name] == "batch_norm"), None)
    if norm is not None:
        dims = BATCH_NORMS[type(norm)]
        sizes = (3, 4, 4, 5, 3), (2, 6, 3, 4, 5), (3, 4, 2, 2, 1)
        if dims == 3:  # or two
            yield [(each[: dims - number % 2],) * inputs for number, each in enumerate(sizes)], None
        yield [(each[:dims],) * inputs for each in sizes], ((None,) * dims,) * inputs
        return
    maps = [kind for kind in kinds.values() if isinstance(kind, Map)]
    for width in dict.fromkeys(kind.inputs for kind in maps):
        lasts = (width, maps[-1].outputs)[:inputs]
        if inputs < 3:
            yield [tuple((*rows, last) for last in lasts) for rows in _ROWS], tuple((..., last) for last in lasts)
    firsts = dict.fromkeys(
        (*_forms(module, None), *(f for n, p in module._modules.items() for f in _forms(p, kinds[n])))
    )
    firsts = list(firsts) or [("b", "t", 8)]
    for first in firsts[:3]:
        others = [first, *(("b", width) for width in _widths(module))][:4]
        for rest in itertools.product(others, repeat=inputs - 1):
            forms = first, *rest
            sized = [tuple(tuple(each.get(n, n) for n in form) for form in forms) for each in _SIZES]
            yield sized, tuple(tuple(None if isinstance(n, str) else n for n in form) for form in forms)


_ROWS = (2, 3), (6,), (1, 2, 3)
_SIZES = [dict(zip("bthwd", sizes, strict=True)) for sizes in ((2, 3, 8, 6, 4), (3, 5, 4, 8, 6), (1, 2, 6, 4, 8))]


def _forms(part, kind) -> list[tuple]:
    """The shapes of a part's inputs, with letters for sizes that it leaves open."""
    if isinstance(kind, Map):
        return [("b", "t", kind.inputs)]
    if isinstance(part, nn.Sequential):
        return next(filter(None, (_forms(each, kind_of(each)) for each in part)), [])
    if isinstance(part, nn.LayerNorm):
        return [("b", "t", *part.normalized_shape)]
    if isinstance(part, nn.GroupNorm):
        return [("b", part.num_channels, "h", "w"), ("b", part.num_channels, "t")]
    if isinstance(part, nn.modules.conv._ConvNd):
        return [("b", part.in_channels, *"hwd"[: len(part.kernel_size)])]
    found = []
    for p in part._parameters.values():
        shape = () if p is None else tuple(p.shape)
        sizes = [n for n in shape if n != 1]
        if len(sizes) == 1 and shape[-1] == sizes[0]:
            found.append(("b", "t", *sizes))
        elif len(sizes) == 1:
            found.append(("b", *sizes, *"hwd"[: len(shape) - 1 - shape.index(sizes[0])]))
        elif len(shape) == 3 and shape[1] == 1:  # (heads, 1, width)
            found.append(("b", shape[0], "t", shape[2]))
    return found


def _widths(module) -> list[int]:
    """Of the maps in a module's parts, the first ones of sequences."""
    forms = [
        form for part in module._modules.values() for form in _forms(part, kind_of(part)) if form[:2] == ("b", "t")
    ]
    return list(dict.fromkeys(form[2] for form in forms if len(form) == 3))


class Size(int):
    """A size that a forward asked for, or a number made of sizes. compared: what else it computed of them, by which it
    may decide something."""

    __hash__ = None  # to be found in a table is to be compared


class Sizes(tuple):
    def __len__(self):
        self.compared.append(found := super().__len__())
        return found


def sized(answer, compared: list):
    """A size, or all sizes of a shape, as such numbers."""
    of_shape = isinstance(answer, tuple)
    found = Sizes([sized(n, compared) for n in answer]) if of_shape else Size(answer)
    found.compared = compared
    return found


def _computing(name: str):
    def method(self, *others):
        found = getattr(int, name)(self, *others)
        if type(found) is int:
            return sized(found, self.compared)
        self.compared.append(f"{name}({self}, {others})")
        return found

    return method


_COMPUTES = "eq ne lt le gt ge bool float neg abs add sub mul floordiv truediv mod pow divmod and or xor lshift rshift"
for _name in (f"__{r}{name}__" for name in _COMPUTES.split() for r in ("", "r")):
    if hasattr(int, _name):
        setattr(Size, _name, _computing(_name))
