"""torch.nn.functional's names, for hfnn's ops."""

from hfnn.ops.adaptive_max_pool import adaptive_max_pool1d, adaptive_max_pool2d, adaptive_max_pool3d
from hfnn.ops.add_norm import add_layer_norm, add_rms_norm
from hfnn.ops.attention import scaled_dot_product_attention
from hfnn.ops.avg_pool import (
    adaptive_avg_pool1d,
    adaptive_avg_pool2d,
    adaptive_avg_pool3d,
    avg_pool1d,
    avg_pool2d,
    avg_pool3d,
)
from hfnn.ops.batch_norm import batch_norm, batch_norm_act
from hfnn.ops.cat import cat
from hfnn.ops.conv import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d
from hfnn.ops.cross_entropy import cross_entropy
from hfnn.ops.dropout import dropout
from hfnn.ops.dropout_add import dropout_add
from hfnn.ops.embedding import embedding
from hfnn.ops.gated import geglu, glu, reglu, swiglu
from hfnn.ops.group_norm import group_norm, group_norm_act
from hfnn.ops.instance_norm import instance_norm
from hfnn.ops.layer_norm import layer_norm
from hfnn.ops.linear import linear
from hfnn.ops.linear_cross_entropy import linear_cross_entropy
from hfnn.ops.linear_distillation import linear_distillation
from hfnn.ops.linear_log_probs import linear_log_probs
from hfnn.ops.log_softmax import log_softmax
from hfnn.ops.masked_softmax import causal_softmax, masked_softmax
from hfnn.ops.max_pool import max_pool1d, max_pool2d, max_pool3d
from hfnn.ops.nll_loss import nll_loss
from hfnn.ops.piecewise import (
    clamp,
    hardshrink,
    hardsigmoid,
    hardtanh,
    leaky_relu,
    relu,
    relu6,
    softshrink,
    threshold,
)
from hfnn.ops.pointwise_loss import (
    binary_cross_entropy_with_logits,
    huber_loss,
    l1_loss,
    mse_loss,
    smooth_l1_loss,
)
from hfnn.ops.prelu import prelu
from hfnn.ops.qk_norm_rope import qk_norm_rope
from hfnn.ops.relu_dropout import relu_dropout
from hfnn.ops.rms_norm import rms_norm
from hfnn.ops.rope import apply_rotary_pos_emb, rope
from hfnn.ops.rrelu import rrelu
from hfnn.ops.select import abs, gather, masked_fill, maximum, minimum, where
from hfnn.ops.smooth import (
    celu,
    elu,
    exp,
    gelu,
    hardswish,
    logsigmoid,
    mish,
    quick_gelu,
    relu_squared,
    selu,
    sigmoid,
    silu,
    softplus,
    softsign,
    sqrt,
    tanh,
)
from hfnn.ops.softmax import softmax

__all__ = [
    "abs",
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "adaptive_max_pool1d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "add_layer_norm",
    "add_rms_norm",
    "apply_rotary_pos_emb",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "batch_norm",
    "batch_norm_act",
    "binary_cross_entropy_with_logits",
    "cat",
    "causal_softmax",
    "celu",
    "clamp",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "cross_entropy",
    "dropout",
    "dropout_add",
    "elu",
    "embedding",
    "exp",
    "gather",
    "geglu",
    "gelu",
    "glu",
    "group_norm",
    "group_norm_act",
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "huber_loss",
    "instance_norm",
    "l1_loss",
    "layer_norm",
    "leaky_relu",
    "linear",
    "linear_cross_entropy",
    "linear_distillation",
    "linear_log_probs",
    "log_softmax",
    "logsigmoid",
    "masked_fill",
    "masked_softmax",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "maximum",
    "minimum",
    "mish",
    "mse_loss",
    "nll_loss",
    "prelu",
    "qk_norm_rope",
    "quick_gelu",
    "reglu",
    "relu",
    "relu6",
    "relu_dropout",
    "relu_squared",
    "rms_norm",
    "rope",
    "rrelu",
    "scaled_dot_product_attention",
    "selu",
    "sigmoid",
    "silu",
    "smooth_l1_loss",
    "softmax",
    "softplus",
    "softshrink",
    "softsign",
    "sqrt",
    "swiglu",
    "tanh",
    "threshold",
    "where",
]
