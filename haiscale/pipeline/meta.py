"""One stage of a model that is too large to be created as a whole.

    with on_meta():
        model = LlamaForCausalLM(config)           # parameters without memory
    stage = materialize(partition(model, pp_rank, pp_size), device)

Then load a checkpoint into it, or train from the layers' own initial values.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Parameters of modules created inside are on the meta device. Buffers have values, because not all can be
    recreated."""
    register = nn.Module.register_parameter

    def register_on_meta(module, name, parameter):
        if parameter is not None and not parameter.is_meta:
            parameter = type(parameter)(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def materialize(stage: nn.Module, device: torch.device | str = "cpu") -> nn.Module:
    """Gives parameters on the meta device memory, and moves everything else there; returns the stage.

    Parameters get initial values: by `stage._init_weights(module)` if a transformers model has it, otherwise by each
    module's `reset_parameters()`. These differ from those of a whole model with the same seed, and tied parameters on
    other ranks get different values: load a checkpoint, or copy one rank's.

    Args:
        stage: From `partition` of a model made under `on_meta`.
        device: Where it will be.

    Raises:
        ValueError: A module has neither.
    """
    made: dict[int, nn.Parameter] = {}
    todo = []
    for name, module in stage.named_modules():
        own = {key: p for key, p in module._parameters.items() if p is not None and p.is_meta}
        if own and not (hasattr(stage, "_init_weights") or hasattr(module, "reset_parameters")):
            raise ValueError(
                f"{name or 'the stage'} (a {type(module).__name__}) has parameters on the meta device and no "
                "reset_parameters() to give them values: write one, which fills them in place"
            )
        for key, p in own.items():
            if id(p) not in made:
                made[id(p)] = nn.Parameter(torch.empty_like(p, device=device), requires_grad=p.requires_grad)
            module._parameters[key] = made[id(p)]
        todo += [module] if own else []
    stage.to(device)
    with torch.no_grad():
        for module in todo:
            if hasattr(stage, "_init_weights"):
                stage._init_weights(module)
            else:
                module.reset_parameters()
    return stage
