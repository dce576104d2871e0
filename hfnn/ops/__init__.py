"""The index of ops. Tests, `hfnn.info`, `hfnn.convert` and the benchmark read it."""

from hfnn.ops import (
    abs,
    adaptive_max_pool,
    attention,
    avg_pool,
    binary_cross_entropy_with_logits,
    celu,
    clamp,
    cross_entropy,
    dropout,
    dropout_add,
    elu,
    embedding,
    exp,
    gather,
    geglu,
    gelu,
    glu,
    hardshrink,
    hardsigmoid,
    hardswish,
    hardtanh,
    huber_loss,
    l1_loss,
    layer_norm,
    leaky_relu,
    linear,
    linear_cross_entropy,
    linear_distillation,
    log_softmax,
    logsigmoid,
    masked_fill,
    masked_softmax,
    max_pool,
    maximum,
    minimum,
    mish,
    mse_loss,
    nll_loss,
    prelu,
    quick_gelu,
    reglu,
    relu,
    relu6,
    relu_dropout,
    rms_norm,
    rrelu,
    selu,
    sigmoid,
    silu,
    smooth_l1_loss,
    softmax,
    softplus,
    softshrink,
    softsign,
    sqrt,
    swiglu,
    tanh,
    threshold,
)

NORMS = layer_norm, rms_norm
ACTIVATIONS = gelu, silu, softmax, log_softmax, masked_softmax
# What keeps its output, and what keeps its input.
SMOOTH = (
    sigmoid, tanh, exp, sqrt, softplus, logsigmoid, elu, selu, celu, softsign,
    mish, hardswish, quick_gelu,
)  # fmt: skip
SELECTIONS = abs, maximum, minimum, masked_fill, gather  # and where, whose first argument is not the input
POOLS = *max_pool.OPS, *adaptive_max_pool.OPS, *avg_pool.OPS
GATED = swiglu, geglu, reglu, glu
# relu6 before hardtanh: `nn.ReLU6` is an `nn.Hardtanh`, and `convert` takes the first that fits.
PIECEWISE = (
    relu, leaky_relu, relu6, hardtanh, clamp, threshold, hardshrink, softshrink, hardsigmoid, prelu, rrelu,
    relu_dropout,
)  # fmt: skip
LOSSES = cross_entropy, nll_loss, l1_loss, mse_loss, huber_loss, smooth_l1_loss, binary_cross_entropy_with_logits
HEADS = linear_cross_entropy, linear_distillation  # and linear_log_probs, which has two results: not for the contract
ROOMS = (
    *NORMS, *ACTIVATIONS, *SMOOTH, *PIECEWISE, *GATED, *SELECTIONS, dropout, dropout_add, linear, embedding,
    *LOSSES, *HEADS,
)  # fmt: skip
# A room of pools has an op for each number of dimensions.
CONTRACT = (*(room.OP for room in ROOMS), *POOLS)  # what the contract's tests and bench/run.py can call with rows
ALL = (*CONTRACT, attention.OP)
