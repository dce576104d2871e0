"""Decoders of transformers (GPT-2, Llama and similar models), split into stages by their structure.

Such a model has a *trunk*, a module with the list of blocks. There are embeddings before the list, a norm after it, and
a head outside of the trunk. A stage is the model itself without some parts. Its forward is the model's own, so each
stage computes masks and rotary embeddings as the model does. Parts are removed from copies of the few modules above
them; blocks, parameters and names are the model's. Parts are identified as follows:

    blocks      the ModuleList of `config.num_hidden_layers` modules
    embeddings  modules with parameters, and dropouts, that the trunk registers before the blocks
    norm        modules with parameters that the trunk registers after the blocks (OPT: before, identified by name)

Other modules (rotary embeddings) have no parameters, and are on every stage. `check` verifies the split by running the
stages and the model on a few tokens.
"""

import copy

import torch
from torch import nn

from haiscale.pipeline import backward
from hfnn.adapters import views

BEHIND = ("final_", "project_out")  # modules that run after the blocks, wherever they are registered


class Blocks(nn.ModuleList):
    """Some of a model's blocks, under their names in the model."""

    def __init__(self, named: list[tuple[str, nn.Module]]):
        super().__init__()
        for name, block in named:
            self.add_module(name, block)

    def __getitem__(self, index):
        blocks = list(self._modules.values())[index]
        return blocks if isinstance(blocks, nn.Module) else nn.ModuleList(blocks)


class Nothing(nn.Module):
    """Replaces an embedding that an earlier stage has added: adds zero."""

    def forward(self, *inputs, **named):
        device = next(x.device for x in (*inputs, *named.values()) if isinstance(x, torch.Tensor))
        return torch.zeros((), device=device)


class Same(nn.Module):
    """Replaces a module of another stage: returns its first input."""

    def forward(self, x, *inputs, **named):
        return x


class DecoderStage:
    """Mixed into the model's class. Inputs: tokens (batch, sequence) on the first stage, hidden states (batch,
    sequence, width) on the others; a mask and positions, as the model takes them, or None; they are sent with the
    hidden states. Result: hidden states, or the model's logits on the last stage.
    """

    def forward(self, x, attention_mask=None, position_ids=None):
        inputs = {"input_ids" if self._first else "inputs_embeds": x, "use_cache": False}
        inputs |= {"attention_mask": attention_mask} if attention_mask is not None else {}
        inputs |= {"position_ids": position_ids} if position_ids is not None else {}
        if self._last:
            output = super().forward(**inputs)
            return output.logits if "logits" in output else output[0]
        y = self.get_submodule(self._trunk)(**inputs)[0]
        return y if attention_mask is None and position_ids is None else (y, attention_mask, position_ids)


def find_blocks(model: nn.Module) -> str | None:
    """The name of the block list of a transformers decoder; None for other models."""
    config = getattr(model, "config", None)
    count = getattr(config, "num_hidden_layers", None)
    if count is None or getattr(config, "is_encoder_decoder", False) or not hasattr(model, "get_input_embeddings"):
        return None
    found = [
        name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    found = [name for name in found if not any(name.startswith(f"{outer}.") for outer in found)]
    return found[0] if len(found) == 1 and count else None


def units(model: nn.Module) -> int:
    """The embeddings, each block, the norm with the head."""
    return model.config.num_hidden_layers + 2


def cut(model: nn.Module, start: int, stop: int) -> nn.Module:
    """Units `start` to `stop` (excluded) as a stage: a copy of the model without the others."""
    blocks = find_blocks(model)
    trunk, _, blocks_name = blocks.rpartition(".")
    count = units(model)
    stage = _copy_down(model, trunk)
    stage.__class__ = type(type(model).__name__, (DecoderStage, type(model)), {"__module__": type(model).__module__})
    stage._first, stage._last, stage._trunk = start == 0, stop == count, trunk
    inner = stage.get_submodule(trunk)
    mine = slice(max(start - 1, 0), min(max(stop - 1, 0), count - 2))
    mine = slice(min(mine.start, mine.stop), mine.stop)
    named = list(getattr(inner, blocks_name).named_children())[mine]
    _leave_out(inner, blocks_name, stage._first, stage._last)
    setattr(inner, blocks_name, Blocks(named))
    if not stage._last:
        _leave_out_head(stage, trunk)
    _count_blocks(stage, trunk, mine)
    return stage


def _copy_down(model, path):
    """The model with copies of the modules along `path`; everything else is shared."""
    top = module = _shallow(model)
    for name in path.split(".") if path else ():
        inner = _shallow(module._modules[name])
        module._modules[name] = inner
        module = inner
    return top


def _shallow(module):
    twin = copy.copy(module)
    for name in ("_modules", "_parameters", "_buffers"):
        twin.__dict__[name] = dict(module.__dict__[name])
    if hasattr(twin, "config"):
        config = copy.copy(views.plain(twin.config))
        twin.config = views.view(config) if views.is_view(twin.config) else config
    return twin


def _leave_out(trunk, blocks_name, first, last):
    seen = False
    for name, module in list(trunk.named_children()):
        seen = seen or name == blocks_name
        if name == blocks_name or not (has_parameters(module) or isinstance(module, nn.Dropout)):
            continue
        behind = seen or name.startswith(BEHIND)
        if not (last if behind else first):
            # The token embedding is not called if hidden states are given.
            trunk._modules[name] = Nothing() if isinstance(module, nn.Embedding) else Same()


def has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _leave_out_head(stage, trunk):
    """Everything that is not on the path to the trunk."""
    module = stage
    for name in trunk.split(".") if trunk else ():
        module._modules = {name: module._modules[name]}
        module = module._modules[name]


def _count_blocks(stage, trunk, mine):
    """Updates the number and kinds of blocks in the copies' configurations."""
    modules = [stage]
    for name in trunk.split(".") if trunk else ():
        modules.append(modules[-1]._modules[name])
    for module in modules:
        if hasattr(module, "config"):
            module.config.num_hidden_layers = mine.stop - mine.start
            if getattr(module.config, "layer_types", None) is not None:
                module.config.layer_types = list(module.config.layer_types)[mine]


def check(model: nn.Module) -> None:
    """Raises ValueError unless the model's units, one after the other, compute what the model computes.

    Both run on a few tokens, without dropout and without a graph. Skipped if parameters are on the meta device.
    """
    if any(p.is_meta for p in model.parameters()):
        return
    device = model.get_input_embeddings().weight.device
    modes = [(module, module.training) for module in model.modules()]
    tokens = torch.arange(8, device=device).view(2, 4) % model.config.vocab_size
    mask = torch.ones_like(tokens)
    mask[0, 0] = 0
    model.eval()
    try:
        with backward.without_graph():
            expected = cut(model, 0, units(model))(tokens, mask)
            found = (tokens, mask, None)
            for unit in range(units(model)):
                found = cut(model, unit, unit + 1)(*found)
    finally:
        for module, mode in modes:
            module.training = mode
    if not torch.allclose(found, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())):
        raise ValueError(
            f"{type(model).__name__} is not cut right by its structure: its parts, one after the other, compute "
            "something else than it does. Write it as a haiscale.pipeline.SequentialModel and give that to partition"
        )


def sample(model: nn.Module) -> tuple[torch.Tensor]:
    """Tokens for measuring: one sequence of the model's maximum length, at most 512."""
    config = model.config
    length = min(512, getattr(config, "max_position_embeddings", None) or 512)
    device = model.get_input_embeddings().weight.device
    return ((torch.arange(length, device=device) % config.vocab_size).view(1, length),)
