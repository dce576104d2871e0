"""Piecewise linear operators that keep no input: their second derivative is 0, as in torch, and not None.

What such an operator keeps (bits, codes) has no graph that leads to x. Its Function saves a *link* besides: a tensor
without elements whose grad_fn leads to x. `flat` makes a gradient depend on it. The link is a second output of the
Function itself; under hooks of saved tensors, which would keep such an output and so the Function alive for ever, it
comes from a node of its own before the Function (`link_before`).
"""

import torch

from hfnn.core.function import Function

_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class _Link(Function):
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
    return None if _hooks(True) is None else _Link.apply(x)


def links(x, before):
    """(the link that the Function returns or None, the link that it saves); before: what `link_before` returned."""
    own = x.new_empty(0) if before is None else None
    return own, own if before is None else before


class _Flat(Function):
    @staticmethod
    def forward(ctx, dx, link):
        return dx.data

    @staticmethod
    def backward(ctx, ddx):
        return ddx, ddx.new_zeros(0)


def zeros_or_none(dlink, shape):
    """dx where the output has no gradient: zeros where the link has one, from a second backward; else None."""
    return None if dlink is None else dlink.new_zeros(shape)


def flat(dx, link):
    """dx, which depends on x by the link alone, with a derivative of 0."""
    return dx if link is None or not torch.is_grad_enabled() else _Flat.apply(dx, link)
