"""What a stage knows about the whole model."""

from dataclasses import dataclass

from torch import nn

_ATTRIBUTE = "_haiscale_cut"


@dataclass(frozen=True)
class Cut:
    """chunk: its index among `chunks`. names: for tied parameters, {name here: first name in the whole model}, if the
    two differ. shared: {first name: the chunks that have the parameter}, if there are several.
    """

    chunk: int
    chunks: int
    names: dict[str, str]
    shared: dict[str, tuple[int, ...]]


def mark(module: nn.Module, cut: Cut) -> None:
    module.__dict__[_ATTRIBUTE] = cut


def stage_in(module: nn.Module) -> nn.Module | None:
    """The stage made by `partition`, inside of wrappers, or None."""
    while isinstance(module, nn.Module):
        if _ATTRIBUTE in module.__dict__:
            return module
        module = module._modules.get("module", module._modules.get("_orig_mod"))
    return None


def cut_of(module: nn.Module) -> Cut | None:
    """The information of the stage inside."""
    stage = stage_in(module)
    return None if stage is None else stage.__dict__[_ATTRIBUTE]
