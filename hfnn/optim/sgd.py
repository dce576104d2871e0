"""Stochastic gradient descent in one launch, with torch's momentum (Sutskever et al., ICML 2013).

    g += wd p;   b = mu b + (1 - dampening) g, at the first step b = g;   p -= lr b   (Nesterov: p -= lr (g + mu b))

b is `momentum_buffer`; without momentum nothing is kept.
"""

import torch

from hfnn.optim import reference
from hfnn.optim.fused import Fused


class SGD(Fused, torch.optim.SGD):
    """`torch.optim.SGD`: the same arguments and defaults, and those of `Fused`."""

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
