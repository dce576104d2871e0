"""Lion in one launch: Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675.

    p = (1 - lr wd) p;   p -= lr sign(b1 m + (1 - b1) g);   m += (1 - b2)(g - m)

m is `exp_avg`. The paper uses a learning rate 3 to 10 times smaller than AdamW's, and a weight decay larger by the same
factor.
"""

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from hfnn.optim import reference
from hfnn.optim.fused import Fused, check_numbers


class Lion(Fused, torch.optim.Optimizer):
    """Lion: Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675.

        p = (1 - lr wd) p;   p -= lr sign(b1 m + (1 - b1) g);   m += (1 - b2)(g - m)

    The paper uses a learning rate 3 to 10 times smaller than AdamW's, and a weight decay larger by the same factor.

    Args:
        params: As in torch.optim.
        lr: A number or a tensor of one element.
        betas: b1 and b2, in [0, 1).
        weight_decay: wd.
        maximize: As in torch.optim.
        capturable: As in torch.optim.
        options: state_dtype, master, stochastic_rounding, max_grad_norm and ema_decay, as in `AdamW`.

    Raises:
        ValueError: lr or weight_decay is negative, or betas are outside of [0, 1).
    """

    rule = 2
    signs = {"exp_avg": True}
    counts = False
    _update = staticmethod(reference.lion)

    def __init__(
        self, params: ParamsT, lr: float | torch.Tensor = 1e-4, betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0, *, maximize: bool = False, capturable: bool = False, **options: Any,
    ):  # fmt: skip
        check_numbers(lr, betas, 0.0, weight_decay)
        defaults = {
            "lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize, "capturable": capturable,
            "differentiable": False,
        }  # fmt: skip
        super().__init__(params, defaults, **options)

    def _names(self, group):
        return ("exp_avg",)

    def _numbers(self, group):
        options = reference.MAXIMIZE * group["maximize"]
        return [group["lr"], *group["betas"], 0.0, group["weight_decay"], options, 0.0, 0.0]
