"""Piecewise linear operators that do not keep their input: the second derivative is 0, as in torch, and not None.

The kept values (bits, codes) have no graph that leads to x. So the Function also saves a *link*: a tensor without
elements whose grad_fn leads to x. `flat` makes a gradient depend on it. The link is a second output of the Function
itself. Hooks of saved tensors would keep such an output, and so the Function, alive for ever. With hooks, the link
comes from a separate node before the Function (`link_before`).
"""

import torch

from hfnn.core.node import Function

_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Link(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        ctx.set_materialize_grads(False)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx, dlink):
        return zeros_or_none(dlink, ctx.shape)


def link_before(x):
    """Under hooks of saved tensors a link to x, an input of the Function; else None."""
    return None if _hooks(True) is None else Link.apply(x)


def links(x, before):
    """(the link that the Function returns or None, the link that it saves); before: what `link_before` returned."""
    own = x.new_empty(0) if before is None else None
    return own, own if before is None else before


class _Flat(Function):
    @staticmethod
    def forward(ctx, dx, link):
        ctx.set_materialize_grads(False)
        ctx.shape = link.shape
        return dx.data

    @staticmethod
    def backward(ctx, ddx):
        return ddx, ddx.new_zeros(ctx.shape)


def zeros_or_none(dlink, shape):
    """dx if the output has no gradient: zeros if the link has one, from a second backward; else None."""
    return None if dlink is None else dlink.new_zeros(shape)


def flat(dx, link):
    """dx, which depends on x only through the link, with a derivative of 0. link: without elements, or x itself."""
    return dx if link is None or not torch.is_grad_enabled() else _Flat.apply(dx, link)
