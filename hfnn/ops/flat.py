"""Maps without curvature that keep no input: their second derivative is 0, as torch says, and not None.

What such a room keeps (bits, codes) leads back to x along no graph. Its Function therefore has a second output, without
elements, whose node is the Function's own: a gradient that is to be differentiated depends on that handle, too. Under
hooks of saved tensors, which would hold such an output of the Function, and so the Function, for ever, the handle comes
from a node before it (`lead`).
"""

import torch

from hfnn.kernel import Function

_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def handle(x):
    """What leads on to x, to be returned and saved."""
    return x.new_empty(0)


class _Lead(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        ctx.set_materialize_grads(False)
        return handle(x)

    @staticmethod
    def backward(ctx, dlead):
        return nought(dlead, ctx.shape)


def lead(x):
    """Under hooks of saved tensors a handle, to be given to the Function and saved there; else None."""
    return None if _hooks(True) is None else _Lead.apply(x)


class _Flat(Function):
    @staticmethod
    def forward(ctx, dx, handle):
        return dx.data

    @staticmethod
    def backward(ctx, ddx):
        return ddx, ddx.new_zeros(0)


def nought(dleads, shape):
    """dx where no gradient came but, from a second backward, that of the handle; None without it."""
    return None if dleads is None else dleads.new_zeros(shape)


def flat(dx, handle):
    """dx, as a function of the x that the handle leads to, which it does not bend with."""
    return dx if handle is None or not torch.is_grad_enabled() else _Flat.apply(dx, handle)
