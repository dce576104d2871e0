"""The index of ops. Tests, `hfnn.info`, `hfnn.convert` and the benchmark read it."""

from hfnn.ops import (
    adaptive_max_pool,
    attention,
    avg_pool,
    batch_norm,
    conv,
    cross_entropy,
    dropout,
    dropout_add,
    embedding,
    gated,
    group_norm,
    instance_norm,
    layer_norm,
    linear,
    linear_cross_entropy,
    linear_distillation,
    log_softmax,
    masked_softmax,
    max_pool,
    nll_loss,
    piecewise,
    pointwise_loss,
    prelu,
    relu_dropout,
    rms_norm,
    rnn,
    rrelu,
    select,
    smooth,
    softmax,
)

# Files with one op.
ROOMS = (
    layer_norm, rms_norm, softmax, log_softmax, masked_softmax, prelu, rrelu, relu_dropout, dropout, dropout_add,
    linear, embedding, cross_entropy, nll_loss, linear_cross_entropy, linear_distillation, instance_norm,
)  # fmt: skip
# Files of families, with one row per op.
FAMILIES = (
    smooth, piecewise, gated, select, pointwise_loss, max_pool, adaptive_max_pool, avg_pool, batch_norm, group_norm,
    conv,
)  # fmt: skip
# The ops that the contract tests and bench/run.py call with rows; without linear_log_probs, which has two results.
CONTRACT = (*(room.OP for room in ROOMS), *(op for family in FAMILIES for op in family.OPS))
ALL = (*CONTRACT, attention.OP, *rnn.ALL)
OPS = {op.name: op for op in ALL}
