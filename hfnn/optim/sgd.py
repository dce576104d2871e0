"""Stochastic gradient descent in one launch, with torch's momentum (Sutskever et al., ICML 2013).

    g += wd p;   b = mu b + (1 - dampening) g, at the first step b = g;   p -= lr b   (Nesterov: p -= lr (g + mu b))

b is `momentum_buffer`; without momentum nothing is kept.
"""

import torch

from hfnn.optim import reference
from hfnn.optim.fused import Fused


class SGD(Fused, torch.optim.SGD):
    """`torch.optim.SGD`, whose step is one launch over all parameters.

    Args:
        args: As in torch.
        state_dtype: Of the states: a dtype, "8bit" or "4bit"; None: the parameter's dtype.
        master: "remainder" keeps 16 more bits of bfloat16 parameters, so updates are those of float32; or None.
        stochastic_rounding: Whether 16-bit parameters are rounded at random, by torch's generator.
        max_grad_norm: Gradients are clipped to this norm within the step; `.grad` does not change. None: no clipping.
        ema_decay: Of a float32 average of each parameter, in `state[p]["ema"]`; None: no average.
        kwargs: As in torch.

    Raises:
        ValueError: An option has no such value.
    """

    rule = 1
    signs = {"momentum_buffer": True}
    counts = False
    _update = staticmethod(reference.sgd)

    def _names(self, group):
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def _fills(self, group):
        # Without dampening, averaging into zeros gives the gradient itself, so the first step needs no special case.
        return group["dampening"] != 0

    def _numbers(self, group):
        options = reference.MAXIMIZE * group["maximize"] | reference.NESTEROV * group["nesterov"]
        momentum, decay = group["momentum"], group["weight_decay"]
        return [group["lr"], momentum, group["dampening"], 0.0, decay, options, 0.0, 0.0]
