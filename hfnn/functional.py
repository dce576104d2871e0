"""torch.nn.functional's names, for hfnn's ops."""

from hfnn.ops.binary_cross_entropy_with_logits import binary_cross_entropy_with_logits
from hfnn.ops.cross_entropy import cross_entropy
from hfnn.ops.dropout import dropout
from hfnn.ops.gelu import gelu
from hfnn.ops.huber_loss import huber_loss
from hfnn.ops.layer_norm import layer_norm
from hfnn.ops.linear import linear
from hfnn.ops.linear_cross_entropy import linear_cross_entropy
from hfnn.ops.linear_distillation import linear_distillation
from hfnn.ops.linear_log_probs import linear_log_probs
from hfnn.ops.log_softmax import log_softmax
from hfnn.ops.mse_loss import mse_loss
from hfnn.ops.nll_loss import nll_loss
from hfnn.ops.rms_norm import rms_norm
from hfnn.ops.silu import silu
from hfnn.ops.smooth_l1_loss import smooth_l1_loss
from hfnn.ops.softmax import softmax

__all__ = [
    "binary_cross_entropy_with_logits",
    "cross_entropy",
    "dropout",
    "gelu",
    "huber_loss",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_distillation",
    "linear_log_probs",
    "log_softmax",
    "mse_loss",
    "nll_loss",
    "rms_norm",
    "silu",
    "smooth_l1_loss",
    "softmax",
]
