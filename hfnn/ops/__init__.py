"""The index of ops. Tests, `hfnn.info`, `hfnn.convert` and the benchmark read it."""

from hfnn.ops import dropout, gelu, layer_norm, linear, rms_norm, silu

ALL = tuple(room.OP for room in (layer_norm, rms_norm, gelu, silu, dropout, linear))
