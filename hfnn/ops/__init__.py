"""The index of ops. Tests, `hfnn.info`, `hfnn.convert` and the benchmark read it."""

from hfnn.ops import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    dropout,
    gelu,
    huber_loss,
    layer_norm,
    linear,
    linear_cross_entropy,
    linear_distillation,
    log_softmax,
    mse_loss,
    nll_loss,
    rms_norm,
    silu,
    smooth_l1_loss,
    softmax,
)

NORMS = layer_norm, rms_norm
ACTIVATIONS = gelu, silu, softmax, log_softmax
LOSSES = cross_entropy, nll_loss, mse_loss, huber_loss, smooth_l1_loss, binary_cross_entropy_with_logits
HEADS = linear_cross_entropy, linear_distillation  # and linear_log_probs, which has two results: not for the contract
ALL = tuple(room.OP for room in (*NORMS, *ACTIVATIONS, dropout, linear, *LOSSES, *HEADS))
