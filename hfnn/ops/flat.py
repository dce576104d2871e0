"""Maps without curvature that keep no input: their second derivative is 0, as torch says, and not None.

What such a room keeps (bits, codes) leads back to x along no graph. Its Function therefore has a second output, without
elements, whose node is the Function's own: a gradient that is to be differentiated depends on that handle, too.
"""

import torch

from hfnn.kernel import Function

_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def handle(x):
    """What leads on to x, to be returned and saved; None under hooks of saved tensors, which would hold it for ever."""
    return x.new_empty(0) if _hooks(True) is None else None


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
