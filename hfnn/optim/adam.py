"""Adam and AdamW in one launch: Kingma & Ba, arXiv:1412.6980; Loshchilov & Hutter, arXiv:1711.05101.

    g += wd p   (AdamW: p = (1 - lr wd) p);   m += (1 - b1)(g - m);   v = b2 v + (1 - b2) g g
    p -= lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)

m is `exp_avg`, v is `exp_avg_sq`; with amsgrad, the largest v so far replaces v (`max_exp_avg_sq`).
"""

import torch

from hfnn.optim import reference
from hfnn.optim.fused import Fused


class Adam(Fused, torch.optim.Adam):
    """`torch.optim.Adam`, whose step is one launch over all parameters.

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

    rule = 0
    signs = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}
    _update = staticmethod(reference.adam)

    def _names(self, group):
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if group["amsgrad"] else 2]

    def _numbers(self, group):
        options = (
            reference.MAXIMIZE * group["maximize"]
            | reference.DECOUPLED * group.get("decoupled_weight_decay", False)
            | reference.AMSGRAD * group["amsgrad"]
        )
        return [group["lr"], *group["betas"], group["eps"], group["weight_decay"], options, 0.0, 0.0]


class AdamW(Adam, torch.optim.AdamW):
    """`torch.optim.AdamW`, whose step is one launch over all parameters.

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

    >>> w = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = hfnn.optim.AdamW([w], lr=0.1)
    >>> w.sum().backward()
    >>> optimizer.step()
    >>> w.detach()
    tensor([0.8990, 0.8990])
    """
