"""LAMB in a fixed number of launches: You et al., "Large Batch Optimization for Deep Learning", arXiv:1904.00962.

    m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g g
    u = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + wd p
    p -= lr |p| / |u| u

with the Euclidean norms of a whole parameter; the ratio is 1 if one of them is 0. m is `exp_avg`, v is `exp_avg_sq`.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hfnn.core.kernel import FLOATS, Kernel
from hfnn.optim.distributed import total_squares
from hfnn.optim.fused import COUNTERS, Fused, check_numbers
from hfnn.optim.reference import DECOUPLED, MAXIMIZE
from hfnn.optim.table import sharding

BIAS_CORRECTION, SUM, ALWAYS = 16, 32, 64  # options, as in csrc/lamb.h

KERNELS = (
    Kernel("triton", "hfnn.kernels.lamb", "cuda"),
    Kernel("cpp", "hfnn._C:cpu.lamb", "cpu", (*FLOATS, torch.float64)),
)


def reference(p, g, states, numbers, step, first, total) -> None:
    """LAMB in plain torch, in place on p and its states. total(x): the sum of x over all shards of the parameter."""
    lr, beta1, beta2, eps, decay, options = numbers[:6]
    m, v = states
    if not options & DECOUPLED:
        g, decay = g + p * decay, 0.0
    m.mul_(beta1).add_(g, alpha=1 if options & SUM else 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    left = (1 - beta1**step, 1 - beta2**step) if options & BIAS_CORRECTION else (1.0, 1.0)
    u = (m / left[0]) / ((v / left[1]).sqrt() + eps) + p * decay
    p_norm, u_norm = (total(x.double().square().sum()).sqrt() for x in (p, u))
    ratio = torch.where((p_norm > 0) & (u_norm > 0), p_norm / u_norm, 1.0)
    p.sub_(u * (lr * ratio if numbers[4] or options & ALWAYS else lr))


class LAMB(Fused, torch.optim.Optimizer):
    """LAMB: You et al., "Large Batch Optimization for Deep Learning", arXiv:1904.00962.

        u = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + wd p;   p -= lr |p| / |u| u

    Args:
        params: As in torch.optim.
        lr: A number or a tensor of one element.
        betas: Decays of m, the average of gradients, and v, that of their squares; in [0, 1).
        eps: Added to the root of v.
        weight_decay: wd.
        bias_correction: Whether m and v are divided by 1 - b^t.
        grad_averaging: Whether m averages gradients, b1 m + (1 - b1) g. Otherwise it sums them, b1 m + g.
        adam_w_mode: Whether weight decay is added to u. Otherwise it is added to g.
        use_nvlamb: Whether parameters without weight decay also use the ratio |p| / |u| instead of 1.
        maximize: As in torch.optim.
        capturable: As in torch.optim.
        options: state_dtype, master, stochastic_rounding, max_grad_norm and ema_decay, as in `AdamW`. (The
            max_grad_norm of apex's FusedLAMB is 1.0 by default.)

    Raises:
        ValueError: lr, eps or weight_decay is negative, or betas are outside of [0, 1).
    """

    kernels = KERNELS
    rule = 3
    signs = {"exp_avg": True, "exp_avg_sq": False}

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6,
        weight_decay: float = 0.01, *, bias_correction: bool = True, grad_averaging: bool = True,
        adam_w_mode: bool = True, use_nvlamb: bool = False, maximize: bool = False, capturable: bool = False,
        **options: Any,
    ):  # fmt: skip
        check_numbers(lr, betas, eps, weight_decay)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction,
            "grad_averaging": grad_averaging, "adam_w_mode": adam_w_mode, "use_nvlamb": use_nvlamb,
            "maximize": maximize, "capturable": capturable, "differentiable": False,
        }  # fmt: skip
        super().__init__(params, defaults, **options)

    def _names(self, group):
        return ("exp_avg", "exp_avg_sq")

    def _numbers(self, group):
        options = (
            MAXIMIZE * group["maximize"]
            | DECOUPLED * group["adam_w_mode"]
            | BIAS_CORRECTION * group["bias_correction"]
            | SUM * (not group["grad_averaging"])
            | ALWAYS * group["use_nvlamb"]
        )
        return [group["lr"], *group["betas"], group["eps"], group["weight_decay"], options, 0.0, 0.0]

    def _rule(self, p: Tensor):
        return functools.partial(reference, total=lambda part: total_squares([(sharding(p), part)]).squeeze())

    def _launch(self, table, squares: Tensor | None) -> None:
        kernel, rows, settings = table.kernel, table.rows, table.settings
        partials = torch.empty(table.tiles, 2, dtype=torch.float64, device=rows.device)
        norms = torch.empty(len(rows), 2, dtype=torch.float64, device=rows.device)
        given, queue = (rows, table.owner, settings.hyper, settings.control), kernel.queue(rows)
        kernel.moments(*given, squares, partials, queue, **table.features)
        kernel.norms(rows, partials, norms, queue)
        if table.shards is not None:
            mesh, dims = table.shards
            for dim in dims:
                torch.distributed.all_reduce(norms, group=mesh.get_group(dim))
        kernel.update(*given, norms, *self._keeping(rows, COUNTERS * table.tiles), queue, **table.features)
