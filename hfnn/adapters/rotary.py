"""Other functions that attention modules of transformers call in their own code, mainly rotary embeddings.

Each file of transformers has its own function that rotates queries and keys. Modules call it by its global name. If it
computes the same as `hfnn.functional.apply_rotary_pos_emb`, calls in a converted module's own code are routed there
while its forward runs (hfnn/patterns/routed.py). Every other caller gets transformers' function.
"""

import functools
import inspect
import sys
import types

import torch

from hfnn import functional
from hfnn.core.classes import cache_by_class
from hfnn.patch import Place, _routed
from hfnn.patterns import routed
from hfnn.patterns.proof import seclusion

NAME = "apply_rotary_pos_emb"
_ARGUMENTS = ["q", "k", "cos", "sin"]


@cache_by_class
def calls(cls: type) -> routed.Calls | None:
    """The calls to route in an attention class's own code, or None.

    Calls that are only in its eager attention are not routed: eager attention runs only where hfnn's does not.
    """
    found = routed.calls(cls)
    if not isinstance(found, routed.Calls) or all(
        name.endswith("attention_forward") for name in found.where.split(", ")
    ):
        found = None
    forward = routed._unwrapped(cls.forward)
    owner = sys.modules.get(forward.__globals__.get("__name__"))
    names = forward.__code__.co_names if owner is not None and vars(owner) is forward.__globals__ else ()
    places = tuple(place for place in (_place(owner, name) for name in dict.fromkeys(names)) if place is not None)
    if not places:
        return found
    if found is None:
        return routed.Calls(places, frozenset(routed._codes(forward)), forward.__name__)
    return routed.Calls((*found.places, *places), found.codes, found.where)


@functools.cache
def _place(owner: types.ModuleType, name: str) -> Place | None:
    """The attribute of a file that holds a function with the same arguments and results as ours."""
    function = vars(owner).get(name)
    if type(function) is not types.FunctionType:
        return None
    theirs, known = (inspect.signature(f).parameters for f in (function, functional.apply_rotary_pos_emb))
    if list(theirs)[:4] != _ARGUMENTS or not all(
        n in known and known[n].default == p.default for n, p in theirs.items()
    ):
        return None
    ours = next((f for f in (functional.apply_rotary_pos_emb, _cast_back) if _same(function, f)), None)
    return None if ours is None else Place(owner, name, function, _routed(NAME, function, ours))


def _cast_back(q, k, *args, **kwargs):
    """As in OLMo: cos and sin are float32, and the results still have the dtypes of q and k."""
    turned = functional.apply_rotary_pos_emb(q, k, *args, **kwargs)
    return tuple(y.to(x.dtype) for x, y in zip((q, k), turned, strict=True))


def _same(theirs, ours) -> bool:
    """Whether both give the same results and gradients for tensors of several shapes and dtypes."""
    generator = torch.Generator("cpu").manual_seed(0)
    try:
        with seclusion():
            return all(
                _agree(theirs, ours, shape, batch, *dtypes, generator)
                for dtypes, shape, batch in (
                    ((torch.float32, torch.float32), (2, 3, 5, 8), 1),
                    ((torch.float32, torch.float32), (2, 3, 5, 8), 2),
                    ((torch.bfloat16, torch.bfloat16), (2, 3, 5, 16), 1),
                    ((torch.bfloat16, torch.float32), (2, 3, 5, 16), 2),
                    ((torch.float32, torch.bfloat16), (2, 3, 5, 16), 2),
                )
            )
    except Exception:  # this runs the author's code: it is not the same function as ours
        return False


def _agree(theirs, ours, shape, batch, dtype, of_angles, generator) -> bool:
    def draw(*sizes, dtype=dtype):
        return torch.randn(sizes, generator=generator).to(dtype)

    # As a model makes them. A function that rotates half of a head, or pairs of neighbours, gives other results.
    cos, sin = (draw(batch, shape[2], shape[3], dtype=of_angles) for _ in "cs")
    q, k = draw(*shape).requires_grad_(), draw(shape[0], 1, *shape[2:]).requires_grad_()
    given = [draw(*shape), draw(shape[0], 1, *shape[2:])]
    results = []
    for function in (theirs, ours):
        turned = function(q, k, cos, sin)
        grads = torch.autograd.grad(turned, (q, k), [g.to(y.dtype) for g, y in zip(given, turned, strict=True)])
        results.append((*turned, *grads))
    near = 32 * max(torch.finfo(d).eps for d in (dtype, of_angles))
    return all(
        a.dtype is b.dtype and a.shape == b.shape and torch.allclose(a, b, rtol=near, atol=near)
        for a, b in zip(*results, strict=True)
    )
