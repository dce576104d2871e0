"""The common part of add_layer_norm and add_rms_norm: a norm of a residual connection with dropout, in one pass.

    sum = residual + dropout(x),    y = norm(sum)

There are two autograd nodes, that of dropout_add.py and the norm's own, and one kernel for both. Each node keeps,
rebuilds and differentiates as it does alone. So the kept tensors are the sum, which continues the residual stream, its
statistics and a seed; y has the norm's recipe. The fused kernel's y, mean and rstd match what the norm's own `rebuild`
and `backward` expect (csrc/add_norm.h).
"""

from hfnn.core.context import is_plain
from hfnn.ops import dropout, dropout_add, layer_norm


class _Summed:
    """The norm's kernel for a sum that is only allocated: its forward also computes the sum; the rest is unchanged."""

    def __init__(self, kernel, p, drawn):
        self._kernel, self._drop = kernel, (*dropout_add.numbers(p), *drawn)
        self._terms = None

    def fill(self, x, residual):
        self._terms = x, residual

    def forward(self, sum_RC, *rest):
        *rest, queue = rest
        terms, self._terms = self._terms, None  # they must not live as long as the autograd nodes
        self._kernel.add(*(t.view(sum_RC.shape) for t in terms), sum_RC, *rest, *self._drop, queue)

    def __getattr__(self, function):
        return getattr(self._kernel, function)


def run(norm, kernel, x, residual, p):
    """(y, sum). `norm(sum, kernel)` is the norm's room, run with that kernel. None if no kernel accepts the dropout.

    The caller has chosen `kernel` for tensors like residual, and has checked that x fits.
    """
    dropped, drawn = None, (0, 0, None)
    if p:
        dropped = dropout_add.OP.select(x, residual, out=residual.dtype, prefer="memory")
        if dropped is None:
            return None
        drawn = dropout.philox_seed(x)
    fused = _Summed(kernel, p, drawn)
    total = dropout_add.run(x, residual, p, drawn, dropped, fused.fill)
    return norm(total, fused), total


def fits(x, residual, dropped, normalized_shape, *parameters) -> bool:
    """Whether the fused kernels accept such tensors and dropout; otherwise other ops run, or raise."""
    if not (0 <= dropped < 1 and is_plain(x) and x.device == residual.device):
        return False
    return dropout_add.fits(x, residual) and layer_norm.fits(residual, normalized_shape, *parameters)
