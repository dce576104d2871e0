"""torch.nn.functional's names, for hfnn's ops."""

from hfnn.ops.dropout import dropout
from hfnn.ops.gelu import gelu
from hfnn.ops.layer_norm import layer_norm
from hfnn.ops.linear import linear
from hfnn.ops.rms_norm import rms_norm
from hfnn.ops.silu import silu

__all__ = ["dropout", "gelu", "layer_norm", "linear", "rms_norm", "silu"]
