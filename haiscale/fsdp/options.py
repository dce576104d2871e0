"""The arguments of FSDP's constructor, under the names of torch.distributed.fsdp."""

from dataclasses import dataclass
from enum import Enum, auto

import torch


class ShardingStrategy(Enum):
    """torch's names for `zero` and a two-dimensional mesh."""

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()


class BackwardPrefetch(Enum):
    """Either value prefetches the next unit while one runs backward; None gathers it when it is needed."""

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes of a model; None leaves them unchanged.

    Attributes:
        param_dtype: Parameters are cast to it before they are gathered, and modules compute in it.
        reduce_dtype: Gradients are averaged in it; None: in param_dtype.
        output_dtype: Of the floating-point tensors that the model returns.
        buffer_dtype: Of floating-point buffers, cast once.
        cast_forward_inputs: Whether floating-point tensors given to a unit are cast to param_dtype.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class CPUOffload:
    """Where shards are.

    Attributes:
        offload_params: Whether shards of parameters and gradients are in host memory, where the optimizer steps them.
    """

    offload_params: bool = False


ZERO = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "HYBRID_SHARD": 3, "_HYBRID_SHARD_ZERO2": 2}


def zero_stage(sharding_strategy, zero) -> tuple[int, bool]:
    """(1, 2 or 3; whether replicas of shards are wanted) from the two arguments of the user."""
    if sharding_strategy is None:
        stage, hybrid = 3 if zero is None else zero, False
    elif isinstance(sharding_strategy, int):
        stage, hybrid = sharding_strategy, False
    else:
        name = getattr(sharding_strategy, "name", str(sharding_strategy))
        if name not in ZERO:
            raise ValueError(
                f"sharding_strategy={sharding_strategy} is not accepted: use one of {', '.join(ZERO)}, or zero=1, 2 or "
                "3; what NO_SHARD means is haiscale.ddp.DDP"
            )
        stage, hybrid = ZERO[name], name.lstrip("_").startswith("HYBRID")
    if stage not in (1, 2, 3) or isinstance(stage, bool):
        raise ValueError(
            f"zero={stage!r} is not accepted: 1 shards optimizer states, 2 gradients too, 3 parameters too"
        )
    if sharding_strategy is not None and zero not in (None, stage):
        raise ValueError(
            f"zero={zero} and sharding_strategy={sharding_strategy} contradict each other: give one of them"
        )
    return stage, hybrid


def mixed_precision(given) -> MixedPrecision:
    """Converts ours, torch's MixedPrecision or MixedPrecisionPolicy, a tuple (param, reduce, output) of dtypes, or
    None."""
    if given is None or isinstance(given, MixedPrecision):
        return given or MixedPrecision()
    if isinstance(given, tuple):
        return MixedPrecision(*given)
    if not hasattr(given, "param_dtype"):
        raise ValueError(
            f"mixed_precision={given!r} is not accepted: give a tuple (param_dtype, reduce_dtype, output_dtype) or a "
            "haiscale.fsdp.MixedPrecision"
        )
    names = MixedPrecision.__dataclass_fields__
    return MixedPrecision(**{name: getattr(given, name) for name in names if hasattr(given, name)})
